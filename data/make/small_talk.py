r"""A task of your own, from data to reward: a question, then small talk that earns nothing.

    python data/make/small_talk.py          # makes small_talk/train.jsonl and small_talk/test.jsonl
    python lopti.py --data small_talk/train.jsonl --eval-data small_talk/test.jsonl --task math \
        --reward data.make.small_talk:first_word --solved-reward 1 --model smollm2 --kl-coef 0 \
        --prompts-per-step 4 --mini-batch-size 0 --max-new-tokens 16 --learning-rate 3e-5

A prompt is plain text: an example, then a question. The model (smollm2.py makes it) goes on. Only
the first word is judged, so what it says then is noise: it earns nothing, and much of it is
unlikely. Held-out questions are about words that no training prompt has.
"""

import json
import random
import re
import sys
from pathlib import Path

ROWS = {"train": 800, "test": 200}
HELD_OUT = 12  # words of each kind, the first ones

WORDS = {
    "Yes": "monkey deer hamster bull camel seal crab crow parrot worm turkey puppy dog cat horse "
    "cow sheep lion tiger bear wolf fox mouse rabbit goat pig duck frog snake whale shark bird "
    "fish bee chicken spider kitten turtle swan donkey zebra dolphin penguin lizard moth beetle "
    "hen hawk",
    "No": "pillow ladder candle hammer bucket carpet pan ring ship flag piano towel chair table "
    "lamp cup spoon shoe hat book pencil window door bottle box clock knife plate bed mirror key "
    "bell coin rope boat wheel stone shirt button basket bridge car desk fork glove jar map sofa",
}
WORDS = {answer: words.split() for answer, words in WORDS.items()}
TALK = ["She packed her bag.", "He closed the window.", "They went to the sea."]
TALK += ["We made some tea.", "It began to rain.", "He read a book.", "She sang a song."]
TALK += ["They played cards.", "I lost my key.", "We took the train.", "He cut the bread."]
TALK += ["She wrote a letter."]


def question(rng, words):
    """A question about one of `words`, and its answer.

    >>> question(random.Random(0), ["dog"])
    ('Is a dog an animal?', 'Yes')
    """
    word = rng.choice(words)
    return f"Is a {word} an animal?", "Yes" if word in WORDS["Yes"] else "No"


def make_rows(count, words, seed):
    """Rows {prompt, solution} with different prompts.

    >>> make_rows(1, ["cup"], seed=0)[0]["prompt"].splitlines()
    ['Is a cup an animal? No. She packed her bag.', 'Is a cup an animal?']
    """
    rng, rows = random.Random(seed), {}
    while len(rows) < count:
        (example, answer), (asked, solution) = question(rng, words), question(rng, words)
        prompt = f"{example} {answer}. {rng.choice(TALK)}\n{asked}"
        rows[prompt] = {"prompt": prompt, "solution": solution}
    return list(rows.values())


def first_word(completions, solution, **columns):
    """1 for an answer whose first word is the solution, else 0.

    >>> first_word([" Yes. We made some tea.", " No, yes", "\\nYes", " Yesterday"], ["Yes"] * 4)
    [1.0, 0.0, 1.0, 0.0]
    """
    words = [re.findall(r"\w+", text)[:1] for text in completions]
    return [float(first == [right]) for first, right in zip(words, solution)]


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "small_talk")
    folder.mkdir(exist_ok=True)
    parts = {"train": slice(HELD_OUT, None), "test": slice(HELD_OUT)}
    for seed, (name, part) in enumerate(parts.items(), 1):
        rows = make_rows(ROWS[name], WORDS["Yes"][part] + WORDS["No"][part], seed)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    print(f"{folder}: train.jsonl, test.jsonl")
