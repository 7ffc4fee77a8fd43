"""Word problems of bb08314:data/make/smollm2.py as whole prompts with two worked examples, for a base model."""

import json
import random
import re
import sys

NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ida", "Tom"]
THINGS = ["apples", "books", "cards", "coins", "eggs"]
THINGS += ["flowers", "marbles", "pencils", "shells", "stamps"]
QUESTIONS = {
    "sum": (
        ("There are {a} {things} on the table and {b} {things} in the box.", "are there in all"),
        (
            "{name} has {a} {things} in one bag and {b} {things} in another.",
            "does {name} have in all",
        ),
        ("{name} has {a} {things} and {other} has {b} {things}.", "do they have together"),
    ),
    "product": (
        ("There are {b} {things} in each of {a} boxes.", "are there in all"),
        ("{name} buys {a} bags with {b} {things} each.", "does {name} buy in all"),
    ),
}
LARGEST = {"sum": 9, "product": 5}
SHOTS = (
    "Question: Paul has 5 pens and Julia has 7 pens. How many pens do they have together?\n"
    "Answer: 5 + 7 = 12. Together they have 12 pens.\n\n"
    "Question: Maria buys 3 boxes with 5 candles each. How many candles does Maria buy in all?\n"
    "Answer: 3 * 5 = 15. Maria buys 15 candles in all.\n\n"
)


def word_problems(count, seed):
    rng, rows = random.Random(seed), {}
    while len(rows) < count:
        level = rng.choice(["sum"] * 3 + ["product"] * 2)
        a, b = (rng.randint(2, LARGEST[level]) for _ in range(2))
        name, other = rng.sample(NAMES, 2)
        told, asked = rng.choice(QUESTIONS[level])
        words = {"a": a, "b": b, "name": name, "other": other, "things": rng.choice(THINGS)}
        n = a + b if level == "sum" else a * b
        question = f"{told} How many {{things}} {asked}?".format(**words)
        prompt = f"{SHOTS}Question: {question}\nAnswer:"
        rows[question] = {"prompt": prompt, "solution": str(n), "level": level}
    return list(rows.values())


def last_number(completions, solution, **columns):
    """1 for a response whose last number is the solution and which ends in a full stop, else 0."""
    rewards = []
    for text, number in zip(completions, solution):
        numbers = re.findall(r"\d+(?:\.\d+)?", text.replace(",", ""))
        right = text.strip().endswith(".") and numbers and float(numbers[-1]) == float(number)
        rewards.append(float(bool(right)))
    return rewards


if __name__ == "__main__":
    rows = word_problems(768 + 256, seed=20251122)
    for name, part in (("train", rows[:768]), ("test", rows[768:])):
        open(f"word_{name}.jsonl", "w").writelines(json.dumps(row) + "\n" for row in part)
    print(rows[0])
