"""Compares a port of the method with golden.json, at three levels, and names the mistake it finds.

    python data/ports/check_port.py my_port                        # 1. single functions
    python data/ports/check_port.py my_port:update                 # 2. updates of a small table
    python data/ports/check_port.py --model my_port:update_model   # 3. updates of a language model

my_port.py is your file, in the current folder. example_port.py has the arguments and results of its
functions, and README.md the choices that a right port may make in another way than lopti.py.

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
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils import logging

HERE = Path(__file__).resolve().parent
GOLDEN = json.loads((HERE / "golden.json").read_text(encoding="utf-8"))
EXAMPLE = (HERE / "example_port.py").read_text(encoding="utf-8")
SETTINGS = ["mini_batch_size", "temperature", "alpha", "eta", "clip_low", "clip_high", "clip_dual"]
SETTINGS += ["kl_coef", "learning_rate", "weight_decay", "max_grad_norm"]
TOLERANCE = 1e-4  # float32 stays below it, and no mistake does
FUNCTIONS = ["group_advantages", "reweight_advantages", "split_tokens"]
FUNCTIONS += ["policy_loss", "kl_estimate"]


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


@functools.cache
def port_with(names):
    """Returns the functions of the example port with these changes."""
    port = {"FACTOR": 1.0}
    exec(source_with(names), port)  # noqa: S102
    return SimpleNamespace(**port)


def first_wrong(values, others, tolerance=TOLERANCE):
    """Returns the number of the first tensor that differs, or infinity if none does.

    A difference of up to tolerance · (1 + |value|) is none. NaN agrees with NaN only.
    """
    limits = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    for number, (a, b) in enumerate(itertools.zip_longest(values, others)):
        if a is None or b is None or not torch.allclose(a, b, **limits):
            return number
    return math.inf


def largest_error(values, others):
    """Returns the largest difference of two lists of tensors, as far as both go; NaN stays NaN."""
    errors = [(a - b).abs().max() for a, b in zip(values, others)]
    return float(torch.stack([float64(0.0), *errors]).max())


class Search:
    """Looks for the changes of the example port that explain the values of a port in each case.

    `found` has these values, a list of tensors for each case. `simulate(names, number)` gives those
    of the example port in case `number` after the changes with these names, or without names the
    right ones. Only mistakes in `source`, a part of the example port, are tried.
    """

    def __init__(self, level, found, simulate, source=EXAMPLE):
        self.level = level
        self.found = found
        self.simulate = functools.cache(simulate)
        self.sets_of_choices = functools.cache(self.sets_of_choices)
        self.choices_that_show = functools.cache(self.choices_that_show)
        self.agreement = functools.cache(self.agreement)
        self.mistakes = []
        for name, changes in MISTAKES.items():
            is_mistake = name not in CHOICES and "FACTOR" not in name
            if is_mistake and any(text in source for text, _ in changes):
                self.mistakes.append(name)

    def sets_of_choices(self, mistakes):
        """Returns the sets of choices that go together with these mistakes, the smallest first."""
        sets = []
        for count in range(len(CHOICES) + 1):
            every = itertools.combinations(CHOICES, count)
            sets += [choices for choices in every if source_with(mistakes + choices)]
        return sets

    def choices_that_show(self, mistakes, number):
        """Returns the choices that make a difference in a case, beside these mistakes."""

        def shows(choices):
            values = [self.simulate(mistakes + each, number) for each in (choices, ())]
            return first_wrong(*values) < math.inf

        sets = self.sets_of_choices(mistakes)
        if not shows(max(sets, key=len)):  # mostly none shows, which this tells at once
            return []
        return [names[0] for names in sets if len(names) == 1 and shows(names)]

    def agreement(self, names, number):
        """Returns how many values these changes explain up to the first wrong one, or infinity."""
        values = self.simulate(names, number)
        limit = TOLERANCE
        choices = tuple(name for name in names if name in CHOICES)
        if first_wrong(values, self.simulate(choices, number)) < math.inf:
            limit *= 10  # rounding grows where a mistake makes steps wrong
        return first_wrong(self.found[number], values, limit)

    def only_shown(self, mistakes, choices, number):
        """Returns these changes without the choices that make no difference in a case."""
        shown = self.choices_that_show(mistakes, number)
        return mistakes + tuple(name for name in choices if name in shown)

    def error(self, names, number):
        return largest_error(self.found[number], self.simulate(names, number))

    def closest(self, number):
        """Returns the choices with which a right port comes closest in a case."""
        if self.agreement((), number) == math.inf:
            return ()
        shown = [self.only_shown((), each, number) for each in self.sets_of_choices(())]
        return min(shown, key=lambda choices: self.error(choices, number))

    def explanation(self, mistakes):
        """Returns mistakes and the fewest choices that explain all cases together, or None."""
        sets = self.sets_of_choices(mistakes)
        for number in self.numbers:
            explaining = []
            for choices in sets:
                if self.agreement(self.only_shown(mistakes, choices, number), number) == math.inf:
                    explaining.append(choices)
            sets = explaining
            if not sets:
                return None
        return mistakes + sets[0]

    def explain(self):
        """Returns a list of what explains all cases, each time names of mistakes and choices.

        An empty list says that nothing does, and no names that all is right.
        """
        self.numbers = range(len(self.found))
        closest = [self.closest(number) for number in self.numbers]
        if all(self.agreement(*pair) == math.inf for pair in zip(closest, self.numbers)):
            made = tuple(name for name in CHOICES if any(name in each for each in closest))
            return [made and self.explanation(()) or made]

        def usefulness(number):
            count = self.agreement((), number)
            return count == math.inf, bool(self.choices_that_show((), number)), count

        self.numbers = sorted(self.numbers, key=usefulness)  # the first rules out the most mistakes
        explained = list(self.explanations([(name,) for name in self.mistakes]))
        if not explained:
            more = self.fitted()
            if self.level < 3:
                more = [(best, name) for _, best in self.ranking[:10] for name in self.mistakes]
            explained = list(itertools.islice(self.explanations(more), 1))
        return explained

    def explanations(self, tried):
        """Yields the explanations among the `tried` mistakes."""
        for mistakes in tqdm(tried, "known mistakes", disable=None, leave=False):
            names = self.explanation(mistakes)
            if names is not None:
                yield names

    def fitted(self):
        """Yields the mistakes with a FACTOR, which at level 3 a gradient norm determines."""
        number = self.numbers[0]
        for name in [name for name in MISTAKES if "FACTOR" in name]:
            error, *_ = self.found[number]  # of the first norm, relative to the right one
            simulated_error, *_ = self.simulate((name,), number)
            factor = float((1 + error) / (1 + simulated_error))
            fitted_name = name.replace("FACTOR", f"{factor:.3g}")
            [[text, instead]] = MISTAKES[name]
            MISTAKES[fitted_name] = [[text, instead.replace("FACTOR", f"{factor:.8g}")]]
            yield (fitted_name,)

    @functools.cached_property
    def ranking(self):
        """How many wrong cases a mistake explains, and its name: a list, the most cases first.

        It has the mistakes that spoil no right case, and only the likeliest of those that explain
        the same cases. Only cases count in which no choice makes a difference.
        """
        numbers = [number for number in self.numbers if not self.choices_that_show((), number)]
        right = {number for number in numbers if self.agreement((), number) == math.inf}
        names = {}
        for name in self.mistakes:
            explained = {
                number for number in numbers if self.agreement((name,), number) == math.inf
            }
            if explained > right:
                names.setdefault(frozenset(explained - right), name)
        return sorted([(len(cases), name) for cases, name in names.items()], reverse=True)

    def nearest(self):
        """Returns the mistake that explains 3 cases more than every other one does, or None.

        Of 701 mistakes beside one that is not known it named 164, and one wrongly.
        """
        (most, name), (others, _), *_ = [*self.ranking, (0, None), (0, None)]
        return name if most - others >= 3 else None

    def shows(self, name):
        """Says whether a mistake makes a difference in any case."""
        pairs = ((self.simulate((name,), n), self.simulate((), n)) for n in range(len(self.found)))
        return any(first_wrong(*pair) < math.inf for pair in pairs)


def judge(search, cases, settings=()):
    """Prints what explains the values of a port; returns the exit code."""
    explained = search.explain()
    if not explained:
        errors = []
        wrong = []
        for number, case in enumerate(cases):
            choices = search.closest(number)
            errors.append(search.error(choices, number))
            if search.agreement(choices, number) < math.inf:
                wrong.append(case["name"])
        largest = torch.tensor(errors).max()
        print(f"Wrong. No known mistake explains it. The largest error is {largest:.2g}.")
        nearest = search.nearest() if search.level < 3 else None
        if nearest:
            print(f"A part of it is probably this: {nearest}")
        first = [name for name in ("GRPO, no KL", "GRPO", "AR", "Lopti") if name in wrong]
        if first:
            print(f"First mend what level 1 says, if it says anything, then the case {first[0]}.")
        if search.level == 3:
            print("Level 2 also looks for two mistakes at a time.")
        return 1
    names, *others = explained
    choices = [name for name in names if name in CHOICES]
    mistakes = names[: len(names) - len(choices)]
    for name in mistakes:
        print(f"Wrong: {name}")
    for other in others:
        print(f"or: {other[0]}")
    if not mistakes:
        texts = [f"{name}={number:g}" for name, number in dict(settings).items()]
        print(f"Right, with {', '.join(texts)}." if settings else "Right.")
    for choice in choices:
        print(choice)
    if not mistakes and search.level == 3:
        print("Level 2 sees more mistakes.")
    if settings and not mistakes and search.level == 2:
        print("Known mistakes that make no difference with these settings:")
        for name in [name for name in search.mistakes if not search.shows(name)]:
            print(f"- {name}")
    return 1 if mistakes else 0


# 1. Single functions ------------------------------------------------------------------------------


def outputs(name, function, case):
    """Returns what a function gives for a golden case, and what is right: two lists of tensors."""
    if name == "group_advantages":
        right = float64(golden.group_advantages(case))
        return [function(float64(case["rewards"]), case["group_size"])], [right]
    old = float64(case["old_logprobs"])
    mask = torch.arange(old.shape[1]) < torch.tensor(case["lengths"])[:, None]
    advantages = float64(case["advantages"])
    reweighted = float64(case["reweighted_advantages"])
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


def check_function(name, function):
    """Prints what is wrong with a function; returns the exit code."""
    signature = inspect.signature(getattr(port_with(()), name))
    try:
        inspect.signature(function).bind(*signature.parameters)
    except TypeError as problem:
        print(f"{name}: Wrong: {problem}. It is called as {name}{signature}.")
        return 1
    print(f"{name}: ", end="")
    # Among the rewards of the rollouts are nearly equal ones, which show the ε of Eq. 1.
    cases = GOLDEN["cases"] + (GOLDEN["rollouts"] if name == "group_advantages" else [])

    found, right = zip(*[outputs(name, function, case) for case in cases])

    def simulate(names, number):
        if not names:
            return right[number]
        return outputs(name, getattr(port_with(names), name), cases[number])[0]

    source = EXAMPLE.split(f"def {name}(")[1].split("\n\n\n")[0]
    return judge(Search(1, found, simulate, source), cases)


def check_functions(module):
    """Level 1: prints what is wrong with each function that a module has; returns the exit code."""
    names = [name for name in FUNCTIONS if hasattr(module, name)]
    return max([check_function(name, getattr(module, name)) for name in names], default=1)


# 2. Updates of a table ----------------------------------------------------------------------------


def solved_anew(cases, settings, solve):
    """Returns cases with other settings, and the outputs that golden.py computes for them."""
    if not settings:
        return cases
    changed = []
    for case in cases:
        case = case | settings
        case["mini_batch_size"] = case["mini_batch_size"] or len(case["responses"])
        changed.append(case | solve(case))
    return changed


def with_skipped_steps(values, case, value):
    """Adds the steps that an update skipped and left out: its tables, or norms, as they were.

    `value` is that before the first step. A port skips either all steps without a gradient or
    those without a token.
    """
    skipped = [step["skipped"] for step in case["steps"]]
    empty = [not step["updated_tokens"] for step in case["steps"]]
    for left_out in (skipped, empty):
        if len(values) + sum(left_out) == len(left_out):
            for number, is_left_out in enumerate(left_out):
                if is_left_out:
                    values.insert(number, values[number - 1] if number else value)
    return values


def tables(update, case):
    """Returns the table after each optimizer step of an update."""
    found = [float64(table) for table in update(case)]
    return with_skipped_steps(found, case, float64(case["table"]))


def table_cases(settings):
    return solved_anew(GOLDEN["rollouts"], settings, golden.solve_rollout)


def check_update(update, settings=()):
    """Level 2: prints from where on each update differs, and why; returns the exit code."""
    cases = table_cases(settings)
    right = [[float64(step["table"]) for step in case["steps"]] for case in cases]
    return check_updates(2, update, tables, cases, right, settings)


def check_updates(level, update, values_of, cases, right, settings):
    """Prints from where on each update differs, and why; returns the exit code.

    `values_of(update, case)` are what is compared with the `right` values of the case.
    """

    def simulate(names, number):
        if not names:
            return right[number]
        port = port_with(names)
        return values_of(port.update if level == 2 else port.update_model, cases[number])

    search = Search(level, [], simulate)
    for number, case in enumerate(cases):
        found = values_of(update, case)
        search.found.append(found)
        choices = search.closest(number)
        wrong = search.agreement(choices, number)
        steps = len(case["steps"])
        excess = len(found) - len(right[number])
        if excess:
            state = f"wrong; the number of optimizer steps is {steps + excess}, and must be {steps}"
            if excess < 0 and "mini_batch_size" not in dict(settings):
                state += " (for a trainer of one step for each batch give --set mini_batch_size=0)"
        elif wrong == math.inf:
            state = "right, with your choices" if choices else "right"
        elif wrong >= steps:
            state = "differs in the weights"
        else:
            state = f"differs from optimizer step {wrong + 1} of {steps} on"
            if case["eta"] and wrong == steps / 2:
                state += ", the first of the second pass"
        if level == 3:
            sizes = summary(found)
            state += "; " + ", ".join(f"{name} {size:.1e}" for name, size in sizes.items())
        print(f"{case['name']}: {state}")
    return judge(search, cases, settings)


# 3. Updates of the bundled model ------------------------------------------------------------------


def model_cases(settings=()):
    """Returns the cases of golden.json, and two more whose prompts have two lengths."""
    cases = list(GOLDEN["model"])
    case = cases[-1] | {"mini_batch_size": 2, "weight_decay": 0.01}
    plain = {"name": "GRPO, two prompts of two lengths", "alpha": 0.0, "eta": 0.0}
    longer_first = {"name": "both, two prompts of two lengths, the longer one first"}
    for name in ("prompts", "responses", "rewards"):
        longer_first[name] = case[name][2:] + case[name][:2]
    for changes in (plain, longer_first):
        cases.append(case | changes | golden.solve_model(case | changes))
    cases = solved_anew(cases, settings, golden.solve_model)
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

    First those of the gradient norms, then that of the norm of the change of all weights, all
    relative. The last one is that of the first weight of each parameter, × 100: it moves by about
    the learning rate, 1e-4.
    """
    errors = []
    right_norms = [step["gradient_norm"] for step in case["steps"]]
    for norm, right in itertools.zip_longest(norms, right_norms[: len(norms)], fillvalue=0.0):
        errors.append(float64((float(norm) - right) / (right or 1.0)))
    flat = torch.nn.utils.parameters_to_vector
    change = flat(model.parameters()) - flat(load_bundled_model().parameters())
    errors.append(change.double().norm() / case["change_norm"] - 1)
    first_entries = torch.stack([weight.flatten()[0] for weight in model.parameters()])
    errors.append((float64(first_entries) - float64(list(case["weights"].values()))) * 100)
    return errors


def summary(errors):
    """Returns the largest of these errors, by name; those of single weights are absolute again."""
    *norms, change, weights = [error.abs() for error in errors]
    return {
        "gradients": largest_error(norms, itertools.repeat(0.0)),
        "change": float(change),
        "weights": float(weights.max()) / 100,
    }


def model_differences(model, norms, case):
    """Returns how far an update of the bundled model is from a golden case, at worst."""
    assert len(norms) == len(case["steps"])
    return summary(model_errors(model, norms, case))


def is_right(found):
    return all(value < TOLERANCE for value in found.values()) and found["weights"] < TOLERANCE / 100


def errors_of_update(update_model, case):
    """Returns how far an update of the bundled model is from a golden case."""
    model = bundled_model()
    norms = list(update_model(model, new_optimizer(model, case), case))
    return model_errors(model, with_skipped_steps(norms, case, 0.0), case)


def check_model_update(update_model, settings=()):
    """Level 3: prints how far each update is from a golden case, and why; returns the exit code."""
    cases = model_cases(settings)
    right = [[float64(0.0)] * (len(case["steps"]) + 2) for case in cases]
    return check_updates(3, update_model, errors_of_update, cases, right, settings)


# The command --------------------------------------------------------------------------------------


def setting(word):
    """Returns the name and number of a word NAME=NUMBER."""
    name, _, text = word.partition("=")
    number = (int if name == "mini_batch_size" else float)(text)
    if name not in SETTINGS or not number >= 0 or (name == "temperature" and not number):
        raise argparse.ArgumentTypeError(f"give NAME=NUMBER, with a name of {', '.join(SETTINGS)}")
    return name, number


def main(words=None):
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument(
        "port", metavar="MODULE[:FUNCTION]", help="your module, and at levels 2 and 3 its function"
    )
    parser.add_argument("--model", action="store_true", help="FUNCTION updates a language model")
    parser.add_argument(
        "--set",
        type=setting,
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help=f"at levels 2 and 3 another setting in every case, of {', '.join(SETTINGS)}",
    )
    flags = parser.parse_args(words)
    settings = dict(flags.set)
    module_name, _, function_name = flags.port.partition(":")
    sys.path.insert(0, ".")
    torch.set_num_threads(1)  # more gain little
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, function_name) if function_name else None
    except (ModuleNotFoundError, AttributeError) as problem:
        parser.error(f"{flags.port}: {problem}; give the name of a module here and of its function")
    if settings and not function:
        parser.error("--set is for levels 2 and 3")
    reports = os.environ.get("RANK", "0") == "0"  # of torchrun's processes only the first one
    with contextlib.redirect_stdout(sys.stdout if reports else io.StringIO()):
        if not function:
            missing = [name for name in FUNCTIONS if not hasattr(module, name)]
            if missing:
                print(f"Not found: {', '.join(missing)}.")
            code = check_functions(module)
        elif flags.model:
            code = check_model_update(function, settings)
        else:
            code = check_update(function, settings)
    return code if reports else 0


if __name__ == "__main__":
    sys.exit(main())
