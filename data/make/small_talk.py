r"""A task of your own, from data to reward: a judgement, then small talk that earns nothing.

    python data/make/small_talk.py          # makes small_talk/train.jsonl and small_talk/test.jsonl
    python lopti.py --data small_talk/train.jsonl --eval-data small_talk/test.jsonl --task math \
        --reward data.make.small_talk:first_word --solved-reward 1 --model smollm2 --kl-coef 0 \
        --prompts-per-step 4 --mini-batch-size 0 --max-new-tokens 16 --learning-rate 3e-5

A prompt is plain text: two examples, then a statement. The model (smollm2.py makes it) goes on.
Only the first word is judged, so what it says then is noise: it earns nothing, and much of it is
unlikely. Held-out statements are about words that no training prompt has.
"""

import argparse
import json
import random
import re
from pathlib import Path

ROWS = {"train": 800, "test": 200}
HELD_OUT = 12  # words of each kind, the first ones

WORDS = {
    "True": "monkey deer hamster bull camel seal crab crow parrot worm turkey puppy dog cat horse "
    "cow sheep lion tiger bear wolf fox mouse rabbit goat pig duck frog snake whale shark bird "
    "fish bee chicken spider kitten turtle swan donkey zebra dolphin penguin lizard moth beetle "
    "hen hawk",
    "False": "pillow ladder candle hammer bucket carpet pan ring ship flag piano towel chair table "
    "lamp cup spoon shoe hat book pencil window door bottle box clock knife plate bed mirror key "
    "bell coin rope boat wheel stone shirt button basket bridge car desk fork glove jar map sofa",
}
WORDS = {answer: words.split() for answer, words in WORDS.items()}
TALK = ["She packed her bag.", "He closed the window.", "They went to the sea."]
TALK += ["We made some tea.", "It began to rain.", "He read a book.", "She sang a song."]
TALK += ["They played cards.", "I lost my key.", "We took the train.", "He cut the bread."]
TALK += ["She wrote a letter."]


def make_rows(count, words, seed):
    """Rows {prompt, solution} with different prompts; words: {answer: words of that kind}.

    >>> make_rows(1, {"True": ["dog"], "False": ["cup"]}, seed=0)[0]["prompt"].splitlines()[1:]
    ['A dog can eat. True. She sang a song.', 'A dog can eat.']
    """
    rng, rows = random.Random(seed), {}
    while len(rows) < count:
        prompt, answers = "", rng.sample(list(words), 2)
        for answer in answers:  # an example of each kind
            word = rng.choice(words[answer])
            prompt += f"A {word} can eat. {answer}. {rng.choice(TALK)}\n"
        solution = rng.choice(answers)
        prompt += f"A {rng.choice(words[solution])} can eat."
        rows[prompt] = {"prompt": prompt, "solution": solution}
    return list(rows.values())


def first_word(completions, solution, **columns):
    """1 for an answer whose first word is the solution, else 0.

    >>> first_word([" True. We made some tea.", " False, true", "\\nTrue", "Truely"], ["True"] * 4)
    [1.0, 0.0, 1.0, 0.0]
    """
    words = [re.findall(r"\w+", text)[:1] for text in completions]
    return [float(first == [right]) for first, right in zip(words, solution)]


if __name__ == "__main__":
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=look)
    parser.add_argument("folder", type=Path, nargs="?", default="small_talk")
    folder = parser.parse_args().folder
    folder.mkdir(exist_ok=True)
    parts = {"train": slice(HELD_OUT, None), "test": slice(HELD_OUT)}
    for seed, (name, part) in enumerate(parts.items(), 1):
        words = {answer: of_kind[part] for answer, of_kind in WORDS.items()}
        rows = make_rows(ROWS[name], words, seed)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    print(f"{folder}: train.jsonl, test.jsonl")
