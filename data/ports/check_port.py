"""Compares a port of the method with golden.json, at three levels, and names the mistake it finds.

    python data/ports/check_port.py my_port                        # 1. single functions
    python data/ports/check_port.py my_port:update                 # 2. updates of a small table
    python data/ports/check_port.py --model my_port:update_model   # 3. updates of a language model

my_port.py is your file, in the current folder. data/ports/README.md has the arguments and results
of its functions, and the choices that a right port may make in another way than lopti.py.

At level 3 the printed numbers say how far the gradient norms, the change of all weights (both
relative) and single weights (absolute) are from golden.json.

The exit code is 0 for a correct port and 1 for a faulty one.
"""

import argparse
import contextlib
import copy
import functools
import importlib
import inspect
import io
import itertools
import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import golden
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

HERE = Path(__file__).resolve().parent
GOLDEN = json.loads((HERE / "golden.json").read_text(encoding="utf-8"))
EXAMPLE = (HERE / "example_port.py").read_text(encoding="utf-8")
TOLERANCE = 1e-4  # float32 stays below it, and no mistake does
FUNCTIONS = (
    "group_advantages",
    "reweight_advantages",
    "split_tokens",
    "policy_loss",
    "kl_estimate",
)


def float64(values):
    return torch.as_tensor(values, dtype=torch.float64).detach()


# Mistakes -----------------------------------------------------------------------------------------


def read_mistakes():
    """Returns {name: changes} of mistakes.diff; a change is an old text and a new one."""
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


def source_with(names):
    """Returns the example port with these changes, or None where two change the same line."""
    source = EXAMPLE
    for name in names:
        for text, instead in MISTAKES[name]:
            if source.count(f"\n{text}\n") != 1:
                return None
            source = source.replace(f"\n{text}\n", f"\n{instead}\n")
    return source


def port_with(names):
    """Returns the functions of the example port with these changes."""
    port = {}
    exec(source_with(names), port)  # noqa: S102
    return SimpleNamespace(**port)


def agree(a, b, tolerance=TOLERANCE):
    """Says whether two tensors are equal up to rounding; NaN agrees with NaN only."""
    return bool((((a - b).abs() < tolerance) | (a.isnan() & b.isnan())).all())


def first_wrong(values, others, tolerance=TOLERANCE):
    """Returns the number of the first tensor that differs, or infinity if none does."""
    for number, (a, b) in enumerate(itertools.zip_longest(values, others)):
        if a is None or b is None or not agree(a, b, tolerance):
            return number
    return math.inf


def largest_error(values, others):
    """Returns the largest difference of two lists of tensors, as far as both go; NaN stays NaN."""
    errors = [(a - b).abs().max() for a, b in zip(values, others)]
    return float(torch.stack([torch.zeros(()), *errors]).max())


def sets_of_choices():
    counts = range(len(CHOICES) + 1)
    return itertools.chain(*[itertools.combinations(CHOICES, count) for count in counts])


def choices_show(mistakes, simulate, number):
    """Says whether a choice makes a difference in a case, beside these mistakes."""
    choices = tuple(name for name in CHOICES if source_with((*mistakes, name)))
    with_choices = simulate((*mistakes, *choices), number)
    return first_wrong(with_choices, simulate(mistakes, number)) < math.inf


def closest(values, right, simulate, number):
    """Returns what a right port gives in a case, with the choices that come closest to `values`."""
    results = [right]
    if first_wrong(values, right) < math.inf and choices_show((), simulate, number):
        results += [simulate(choices, number) for choices in sets_of_choices()]
    return min(results, key=functools.partial(largest_error, values))


def explain(found, right, simulate, source, with_pairs=False):
    """Returns the names of mistakes and choices that explain the values `found` in each case.

    () says that the values are right, and None that nothing explains them. `right` has the right
    values, and `simulate(names, number)` gives those of the example port in case `number` after
    these changes. Only mistakes in `source`, a part of the example port, are tried.
    """
    wrong = [first_wrong(*pair) for pair in zip(found, right)]
    if min(wrong) == math.inf:
        return ()
    mistakes = []
    for name, changes in MISTAKES.items():
        if name not in CHOICES and any(text in source for text, _ in changes):
            mistakes.append(name)

    def agreement(tried, number):
        """Returns how many values these mistakes explain, up to the first wrong one of a case."""
        values = simulate(tried, number)
        shows = set(tried) - set(CHOICES) and first_wrong(values, right[number]) < math.inf
        limit = 10 * TOLERANCE if shows else TOLERANCE  # rounding grows where steps are wrong
        return first_wrong(found[number], values, limit)

    def explanation(tried):
        """Returns mistakes and the fewest choices that explain all cases together, or None."""
        sets = [choices for choices in sets_of_choices() if source_with(tried + choices)]
        for number in numbers:
            if choices_show(tried, simulate, number):
                sets = [each for each in sets if agreement(tried + each, number) == math.inf]
            elif agreement(tried, number) < math.inf:
                return None
            if not sets:
                return None
        return tried + sets[0]

    # The case that is wrong from its beginning comes first: it rules out most mistakes the soonest.
    numbers = sorted(range(len(found)), key=wrong.__getitem__)
    plain = [number for number in numbers if not choices_show((), simulate, number)]

    def pairs():
        """Returns pairs of mistakes, one of which explains more optimizer steps than most do."""
        explained = {}
        for name in mistakes:
            steps = [min(agreement((name,), number), len(found[number])) for number in plain]
            explained[name] = sum(steps)
        best = sorted(mistakes, key=explained.get)[-10:]
        return itertools.product(reversed(best), mistakes)

    singles = [(), *((name,) for name in mistakes)]
    for tried in itertools.chain(singles, pairs() if with_pairs else []):
        names = explanation(tried) if source_with(tried) else None
        if names:
            return names
    return None


def judge(found, right, simulate, source, with_pairs=False):
    """Prints what explains the values of a port, see `explain`; returns the exit code."""
    names = explain(found, right, simulate, source, with_pairs)
    if names is None:
        errors = []
        for number, values in enumerate(found):
            errors.append(largest_error(values, closest(values, right[number], simulate, number)))
        largest = torch.tensor(errors).max()
        print(f"Wrong. No known mistake explains it. The largest error is {largest:.2g}.")
        print("If your code computes in bfloat16 or float16, first run it in float32.")
        return 1
    mistakes = [name for name in names if name not in CHOICES]
    for mistake in mistakes:
        print(f"Wrong: {mistake}")
    if not mistakes:
        print("Right.")
    for choice in names[len(mistakes) :]:
        print(choice)
    return int(bool(mistakes))


# 1. Single functions ------------------------------------------------------------------------------


def outputs(name, function, case):
    """Returns what a function gives for a golden case, and what is right: two lists of tensors."""
    old = float64(case["old_logprobs"])
    mask = torch.arange(old.shape[1]) < torch.tensor(case["lengths"])[:, None]
    advantages = float64(case["advantages"])
    reweighted = float64(case["reweighted_advantages"])
    if name == "group_advantages":
        return [function(float64(case["rewards"]), case["group_size"])], [advantages]
    if name == "reweight_advantages":
        return [function(advantages[:, None] * mask, old, case["alpha"]) * mask], [reweighted]
    if name == "split_tokens":
        found = function(old, mask, case["eta"])
        low = torch.tensor(case["low"])
        return list(map(float64, found)), [float64(low), float64(mask & ~low)]

    new = float64(case["new_logprobs"]).requires_grad_()
    ref = float64(case["ref_logprobs"])
    if name == "policy_loss":
        right = token_losses(case | {"kl_coef": 0.0}, new, old, ref, reweighted, mask)
        clips = (case["clip_low"], case["clip_high"], case["clip_dual"])
        losses = function(new, old, reweighted, *clips)
    else:  # kl_estimate: without an advantage the KL is the whole loss
        right = token_losses(case | {"kl_coef": 1.0}, new, old, ref, 0 * reweighted, mask)
        losses = function(new, ref)
    (losses * mask + 0 * new).sum().backward()  # 0 · new: the losses may have no gradient
    return [losses.detach() * mask, new.grad], right


def token_losses(case, new, old, ref, advantages, mask):
    """Returns the loss of each token by golden.py, with its KL, and its derivative by `new`."""
    losses = torch.zeros_like(old)
    derivatives = torch.zeros_like(old)
    for i, t in mask.nonzero().tolist():
        values = [each[i, t].item() for each in (new, old, ref, advantages)]
        policy_loss, kl, _, derivatives[i, t] = golden.token_terms(*values, case)
        losses[i, t] = policy_loss + case["kl_coef"] * kl
    return [losses, derivatives]


def check_functions(module):
    """Level 1: prints what is wrong with each function that a module has; returns the exit code."""
    code = int(not any(hasattr(module, name) for name in FUNCTIONS))
    for name in FUNCTIONS:
        if not hasattr(module, name):
            continue
        function = getattr(module, name)
        signature = inspect.signature(getattr(port_with(()), name))
        try:
            inspect.signature(function).bind(*signature.parameters)
        except TypeError as problem:
            print(f"{name}: Wrong: {problem}. It is called as {name}{signature}.")
            code = 1
            continue
        print(f"{name}: ", end="")
        pairs = [outputs(name, function, case) for case in GOLDEN["cases"]]

        @functools.cache
        def simulate(names, number, name=name):
            return outputs(name, getattr(port_with(names), name), GOLDEN["cases"][number])[0]

        source = EXAMPLE.split(f"def {name}(")[1].split("\n\n\n")[0]
        code = max(code, judge(*zip(*pairs), simulate, source))
    return code


# 2. Updates of a table ----------------------------------------------------------------------------


def count_problem(count, case):
    """Returns a sentence if an update made a wrong number of optimizer steps, else None."""
    expected = len(case["steps"])
    if count == expected:
        return None
    return f"wrong; the number of optimizer steps is {count}, and must be {expected}"


def check_update(update):
    """Level 2: prints from where on each update differs, and why; returns the exit code."""
    cases = GOLDEN["rollouts"]
    found = []
    right = []

    @functools.cache
    def simulate(names, number):
        return list(port_with(names).update(cases[number]))

    for number, case in enumerate(cases):
        found.append([float64(table) for table in update(case)])
        right.append([float64(step["table"]) for step in case["steps"]])
        expected = closest(found[-1], right[-1], simulate, number)
        step = first_wrong(found[-1], expected)
        state = "right" if expected is right[-1] else "right, with your choices"
        if step < math.inf:
            state = f"differs from optimizer step {step + 1} of {len(right[-1])} on"
            if case["eta"] and step == len(right[-1]) / 2:
                state += ", the first of the second pass"
        print(f"{case['name']}: {count_problem(len(found[-1]), case) or state}")
    source = EXAMPLE.partition("def update_model(")[0]
    return judge(found, right, simulate, source, with_pairs=True)


# 3. Updates of the bundled model ------------------------------------------------------------------


def model_cases():
    """Returns the cases of golden.json, and two more whose prompts have two lengths."""
    cases = list(GOLDEN["model"])
    case = cases[-1] | {"mini_batch_size": 2, "weight_decay": 0.01}
    plain = {"name": "GRPO, two prompts of two lengths", "alpha": 0.0, "eta": 0.0}
    longer_first = {"name": "both, two prompts of two lengths, the longer one first"}
    for name in ("prompts", "responses", "rewards"):
        longer_first[name] = case[name][2:] + case[name][:2]
    for changes in (plain, longer_first):
        cases.append(case | changes | golden.solve_model(case | changes))
    return [case | {"micro_batch_size": 1} for case in cases]


@functools.cache
def load_bundled_model():
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(HERE.parent / "tiny", dtype=torch.float32).eval()


def bundled_model():
    return copy.deepcopy(load_bundled_model())


def new_optimizer(model, case):
    rate = case["learning_rate"]
    return torch.optim.AdamW(model.parameters(), rate, weight_decay=case["weight_decay"])


@torch.no_grad()
def model_errors(model, norms, case):
    """Returns how far an update of the bundled model is from a golden case: tensors, 0 if right.

    The first is that of the first weight of each parameter, × 100: it moves by about the learning
    rate, 1e-4. The second is that of the norm of the change of all weights, and the others are
    those of the gradient norms; these are relative.
    """
    flat = torch.nn.utils.parameters_to_vector
    change = flat(model.parameters()) - flat(load_bundled_model().parameters())
    first_entries = torch.stack([weight.flatten()[0] for weight in model.parameters()])
    errors = [(float64(first_entries) - float64(list(case["weights"].values()))) * 100]
    errors.append(change.double().norm() / case["change_norm"] - 1)
    right_norms = [step["gradient_norm"] for step in case["steps"]]
    for norm, right in itertools.zip_longest(norms, right_norms[: len(norms)], fillvalue=0.0):
        errors.append(float64((float(norm) - right) / (right or 1.0)))
    return errors


def summary(errors):
    """Returns the largest of these errors, by name; those of single weights are absolute again."""
    weights, change, *norms = [error.abs() for error in errors]
    return {
        "gradients": largest_error(norms, itertools.repeat(0.0)),
        "change": float(change),
        "weights": float(weights.max()) / 100,
    }


def model_differences(model, norms, case):
    """Returns how far an update of the bundled model is from a golden case, at worst."""
    assert len(norms) == len(case["steps"]), count_problem(len(norms), case)
    return summary(model_errors(model, norms, case))


def is_right(found):
    return all(value < TOLERANCE for value in found.values()) and found["weights"] < TOLERANCE / 100


def check_model_update(update_model):
    """Level 3: prints how far each update is from a golden case, and why; returns the exit code."""
    cases = model_cases()
    found = []
    right = []

    def errors_of(update_model, case):
        model = bundled_model()
        return model_errors(model, update_model(model, new_optimizer(model, case), case), case)

    @functools.cache
    def simulate(names, number):
        return errors_of(port_with(names).update_model, cases[number])

    for number, case in enumerate(cases):
        found.append(errors_of(update_model, case))
        right.append([torch.zeros(())] * (2 + len(case["steps"])))
        expected = closest(found[-1], right[-1], simulate, number)
        state = "right" if expected is right[-1] else "right, with your choices"
        if first_wrong(found[-1], expected) < math.inf:
            state = "differs"
        print(f"{case['name']}: {count_problem(len(found[-1]) - 2, case) or state};", end=" ")
        print(", ".join(f"{name} {value:.1e}" for name, value in summary(found[-1]).items()))
    source = EXAMPLE.partition("def update(")[0] + EXAMPLE.partition("def update_model(")[2]
    return judge(found, right, simulate, source)


def main(words=None):
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
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
    if os.environ.get("RANK", "0") != "0":  # of torchrun's processes only the first one reports
        with contextlib.redirect_stdout(io.StringIO()):
            check(module, function, flags.model)
        return 0
    return check(module, function, flags.model)


def check(module, function, is_model):
    """Returns the exit code of one of the three levels."""
    if function is None:
        missing = [name for name in FUNCTIONS if not hasattr(module, name)]
        if missing:
            print(f"Not found: {', '.join(missing)}.")
        return check_functions(module)
    return check_model_update(function) if is_model else check_update(function)


if __name__ == "__main__":
    sys.exit(main())
