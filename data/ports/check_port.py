"""Compares a port of the method with golden.json, at three levels, and names the mistake it finds.

    python data/ports/check_port.py my_port                        # 1. single functions
    python data/ports/check_port.py my_port:update                 # 2. updates of a small table
    python data/ports/check_port.py --model my_port:update_model   # 3. updates of a language model

my_port.py is your file, in the current folder. The easiest way to write it is to copy
example_port.py beside this file, which is correct, and to let its functions call your code.

B is the number of responses, T the number of tokens of the longest, and V the size of the
vocabulary. A group is group_size responses that follow one another.

1. Any of these functions. They get float64 tensors, padded on the right.
    group_advantages(rewards, group_size): (B,) → (B,). The advantages Â of Eq. 1.
    reweight_advantages(advantages, old_logprobs, alpha): (B, T), (B, T) → (B, T). Eq. 4.
    split_tokens(old_logprobs, mask, eta): (B, T), (B, T) → (B, T), (B, T). The masks of the
        low-probability tokens and of the others.
    policy_loss(logprobs, old_logprobs, ref_logprobs, advantages, update_mask, mask, case):
        (B, T) each → a scalar. The loss of a mini-batch; its gradient is compared, too.
        `update_mask` has the tokens of the pass, and `mask` all response tokens. `case` has
        clip_low, clip_high, clip_dual and kl_coef.
2. update(case) → tables (V, V). It makes a whole update, with your loss, passes and optimizer, of a
    policy that is a table: row i holds the logits of the token after token i. It returns a copy of
    the table after each optimizer step, and also after one that is skipped. `case` has the table,
    that of the reference, prompts, responses, rewards and all settings, in the names that golden.py
    explains under `rollouts`. With eta 0 there is one pass.
3. update_model(model, optimizer, case) → numbers. It makes a whole update of the bundled model, a
    causal model of transformers, with the given AdamW. The reference is the model before the
    update. It returns the gradient norm of each optimizer step before it is clipped, and 0 for a
    step that is skipped. `case` has the token ids of B prompts and B responses, rewards and
    settings.

At level 3 the printed numbers say how far the gradient norms, the change of all weights (both
relative) and single weights (absolute) are from golden.json.

If level 1 or 2 finds wrong numbers, the program looks for a known mistake that gives the same wrong
numbers: first single mistakes of mistakes.diff, then pairs of them.
It tries 1,000 candidates at most, which takes about a minute.

The exit code is 0 for a correct port and 1 for a faulty one.
README.md here names four choices. A port that makes them in another way than lopti.py is accepted,
too, and its choice is printed.
"""

import argparse
import importlib
import itertools
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

HERE = Path(__file__).resolve().parent
GOLDEN = json.loads((HERE / "golden.json").read_text(encoding="utf-8"))
EXAMPLE = (HERE / "example_port.py").read_text(encoding="utf-8")
TOLERANCE = 1e-4  # float32 stays below it, and no mistake does
FUNCTIONS = ("group_advantages", "reweight_advantages", "split_tokens", "policy_loss")


def float64(values):
    return torch.as_tensor(values, dtype=torch.float64).detach()


# Mistakes -----------------------------------------------------------------------------------------


def read_mistakes():
    """mistakes.diff as {name: its changes}; a change is a text of example_port.py and another."""
    mistakes = {}
    _, *sections = (HERE / "mistakes.diff").read_text(encoding="utf-8").split("\n@@ ")
    for section in sections:
        name, *lines = section.splitlines()
        changes = []
        for sign, same_sign in itertools.groupby(lines, key=lambda line: line[0]):
            text = "\n".join(line[1:] for line in same_sign)
            if sign == "-":
                changes.append([text, ""])
            else:
                changes[-1][1] = text
        mistakes[name] = changes
    return mistakes


MISTAKES = read_mistakes()
CHOICES = [name for name in MISTAKES if name.startswith("a choice: ")]
ZERO_STEP = CHOICES[0]  # AdamW makes a step where the gradient is 0
CANDIDATES = 1000  # that are tried at most: about a minute on one core, as --help says


def port_with(names):
    """The example port with these changes; None where two of them change the same line."""
    source = EXAMPLE
    for name in names:
        for text, instead in MISTAKES[name]:
            if source.count(f"\n{text}\n") != 1:
                return None
            source = source.replace(f"\n{text}\n", f"\n{instead}\n")
    port = {}
    exec(source, port)  # noqa: S102
    return SimpleNamespace(**port)


def first_wrong(values, others):
    """The number of the first tensor that differs; None if none does. NaN differs."""
    for number, (a, b) in enumerate(itertools.zip_longest(values, others)):
        if a is None or b is None or not (a - b).abs().max() < TOLERANCE:
            return number
    return None


def explain(found, right, source, simulate):
    """The names of what explains the values `found` in each golden case; None: nothing does.

    `right` has the right values, `simulate(port, number)` those of another port in case `number`;
    `source` is the part of the example port that is looked at.
    """
    wrong = [first_wrong(*pair) for pair in zip(found, right)]
    if wrong.count(None) == len(wrong):
        return ()
    # First the case that is wrong from its beginning: it rules out most mistakes the soonest.
    numbers = sorted(range(len(wrong)), key=lambda i: math.inf if wrong[i] is None else wrong[i])
    names = [name for name, changes in MISTAKES.items() if changes[0][0] in source]
    for name in names:
        port = port_with([name])
        if all(first_wrong(found[i], simulate(port, i)) is None for i in numbers):
            return (name,)

    agreement = {}  # of each candidate: how many values agree, up to the first wrong one of a case
    for candidate in itertools.islice(candidates(names, agreement), CANDIDATES):
        agreement[candidate] = 0
        port = port_with(candidate)
        if port:
            wrong = [first_wrong(found[i], simulate(port, i)) for i in range(len(found))]
            if wrong.count(None) == len(wrong):
                return candidate
            for values, number in zip(found, wrong):
                agreement[candidate] += len(values) if number is None else number
    return None


def candidates(names, agreement):
    """Tuples of these names, of two mistakes at most and any choices.

    Whoever takes a candidate puts into `agreement` how many values it explains, before taking the
    next one: what explains more than it does without its last mistake is tried beside choices and
    beside a second mistake, the best first.
    """
    choices = [name for name in names if name in CHOICES]
    promising = [()]
    yield ()
    while promising:
        mistakes = max(promising, key=agreement.get)
        promising.remove(mistakes)
        for count in range(1, len(choices) + 1):
            for beside in itertools.combinations(choices, count):
                yield (*mistakes, *beside)
        for name in names:
            if name not in choices and len(mistakes) < 2:
                yield (*mistakes, name)
                if agreement[*mistakes, name] > agreement[mistakes]:
                    promising.append((*mistakes, name))


def verdict(names):
    """Prints what was found; returns the exit code."""
    if names is None:
        print("Wrong. No known mistake explains it, nor does a pair of mistakes that was tried.")
        return 1
    mistakes = [name for name in names if name not in CHOICES]
    for mistake in mistakes:
        print(f"Wrong: {mistake}")
    if not mistakes:
        print("Right.")
    for choice in names:
        if choice in CHOICES:
            print(choice)
    return int(bool(mistakes))


# 1. Single functions ------------------------------------------------------------------------------


def outputs(name, function, case):
    """What a function gives for a golden case, and what is right: two lists of tensors."""
    old = float64(case["old_logprobs"])
    mask = torch.arange(old.shape[1]) < torch.tensor(case["lengths"])[:, None]
    low = torch.tensor(case["low"])
    advantages = float64(case["advantages"])
    if name == "group_advantages":
        return [function(float64(case["rewards"]), case["group_size"])], [advantages]
    reweighted = float64(case["reweighted_advantages"])
    if name == "reweight_advantages":
        return [function(advantages[:, None] * mask, old, case["alpha"]) * mask], [reweighted]
    masks = {"all": mask, "low": low, "high": mask & ~low}
    if name == "split_tokens":
        found = function(old, mask, case["eta"])
        return list(map(float64, found)), [float64(masks["low"]), float64(masks["high"])]
    found = []
    right = []
    for pass_name, update_mask in masks.items():
        new = float64(case["new_logprobs"]).requires_grad_()
        ref = float64(case["ref_logprobs"])
        loss = function(new, old, ref, reweighted, update_mask, mask, case)
        loss.backward()
        found += [loss.detach(), new.grad]
        expected = case["passes"][pass_name]
        right += [float64(expected["loss"]), float64(expected["gradient"])]
    return found, right


def check_functions(module):
    """Level 1: prints what is wrong with each function that a module has; returns the exit code."""
    code = 0
    for name in FUNCTIONS:
        if not hasattr(module, name):
            continue
        print(f"{name}: ", end="")
        source = EXAMPLE.split(f"def {name}(")[1].split("\n\n\n")[0]
        pairs = [outputs(name, getattr(module, name), case) for case in GOLDEN["cases"]]

        def simulate(port, number, name=name):
            return outputs(name, getattr(port, name), GOLDEN["cases"][number])[0]

        code = max(code, verdict(explain(*zip(*pairs), source, simulate)))
    return code


# 2. Updates of a table ----------------------------------------------------------------------------


def compare_tables(update):
    """Prints from where on an update is wrong. Returns its tables and the right ones, by case."""
    found = []
    right = []
    for case in GOLDEN["rollouts"]:
        found.append([float64(table) for table in update(case)])
        right.append([float64(step["table"]) for step in case["steps"]])
        step = first_wrong(found[-1], right[-1])
        state = "right" if step is None else f"wrong from optimizer step {step + 1} on"
        print(f"{case['name']}: {state}")
    return found, right


def find_mistakes(update):
    """The names of what explains the tables of an update; () is right, None that nothing does."""
    found, right = compare_tables(update)
    if any(first_wrong(*pair) is not None for pair in zip(found, right)):
        print("Looking for the mistake, for about a minute at most ...")

    def simulate(port, number):
        return port.update(GOLDEN["rollouts"][number])

    return explain(found, right, EXAMPLE, simulate)


# 3. Updates of the bundled model ------------------------------------------------------------------


def bundled_model():
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(HERE.parent / "tiny", dtype=torch.float32).eval()


def new_optimizer(model, case):
    rate = case["learning_rate"]
    return torch.optim.AdamW(model.parameters(), rate, weight_decay=case["weight_decay"])


@torch.no_grad()
def model_differences(model, norms, case):
    """How far an update of the bundled model is from golden.json, at worst.

    Relative: the gradient norms, and the norm of the change of all weights. Absolute: the first
    weight of each parameter; it moves by about the learning rate, 1e-4.
    """
    flat = torch.nn.utils.parameters_to_vector
    change = flat(model.parameters()) - flat(bundled_model().parameters())
    found = {
        "gradients": 0.0,
        "change": abs(float(change.double().norm()) / case["change_norm"] - 1),
    }
    for norm, step in zip(norms, case["steps"], strict=True):
        difference = abs(norm - step["gradient_norm"]) / (step["gradient_norm"] or 1)
        found["gradients"] = max(found["gradients"], difference)
    first_entries = [float(weight.flatten()[0]) for weight in model.parameters()]
    weights = [abs(a - b) for a, b in zip(first_entries, case["weights"].values(), strict=True)]
    return found | {"weights": max(weights)}


def is_right(found):
    return max(found.values()) < TOLERANCE and found["weights"] < 1e-6


def check_model_update(update_model):
    """Level 3: prints how far each update is from golden.json; returns the exit code."""
    code = 0
    for case in GOLDEN["model"]:
        model = bundled_model()
        optimizer = new_optimizer(model, case)
        norms = update_model(model, optimizer, case)
        steps = optimizer.state[next(model.parameters())].get("step", 0)
        skipped = [norm for norm, step in zip(norms, case["steps"]) if step["skipped"]]
        if skipped and not any(skipped) and steps == len(norms):
            print(f"{case['name']}: not compared. {ZERO_STEP}")
            continue
        found = model_differences(model, norms, case)
        right = is_right(found)
        print(f"{case['name']}: {'right' if right else 'wrong'};", end=" ")
        print(", ".join(f"{name} {value:.1e}" for name, value in found.items()))
        code = max(code, int(not right))
    return code


def main(words=None):
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=look)
    parser.add_argument(
        "port", metavar="MODULE[:FUNCTION]", help="your module, and at levels 2 and 3 its function"
    )
    parser.add_argument("--model", action="store_true", help="FUNCTION updates a language model")
    flags = parser.parse_args(words)
    module_name, _, function_name = flags.port.partition(":")
    sys.path.insert(0, ".")
    torch.set_num_threads(1)  # more gain little
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, function_name) if function_name else None
    except (ModuleNotFoundError, AttributeError) as problem:
        parser.error(f"{flags.port}: {problem}; give the name of a module here and of its function")
    if function is None and not any(hasattr(module, name) for name in FUNCTIONS):
        parser.error(f"{flags.port} has none of {', '.join(FUNCTIONS)}")
    if function is None:
        return check_functions(module)
    return check_model_update(function) if flags.model else verdict(find_mistakes(function))


if __name__ == "__main__":
    sys.exit(main())
