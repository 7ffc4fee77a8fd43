"""Which of README.md's seven facts is broken in a port? Its update runs on the golden rollouts.

    python data/ports/check_port.py my_module:update     # update() in my_module.py, where you are

`update(case)` is yours. It gets one of the `rollouts` of data/golden.json: a dictionary of what
data/golden.py calls inputs. It makes the whole update with your loss, your passes and your
optimizer, on a policy that is a table (V, V): row i holds the logits of the token after token i.
It returns the table after each optimizer step, in their order: one for each pass and mini-batch,
also where there was nothing to update. Nested lists, arrays and tensors will do. README.md has an
example.

Where the tables are wrong, mistakes are put into a right update until its tables are the same.
"""

import argparse
import importlib
import itertools
import json
import sys
from pathlib import Path

import torch

GOLDEN = Path(__file__).resolve().parents[1] / "golden.json"
TOLERANCE = 1e-4  # of a logit: float32 stays below it, and no mistake does

MISTAKES = {
    "temperature": "fact 1: π is taken at temperature 1, not at that of sampling",
    "no temperature": "fact 1: all log-probabilities are taken at temperature 1",
    "current π": "fact 1: π in Eq. 4 is the current policy's, not that of the policy that sampled",
    "gradient of π": "fact 1: the weight of Eq. 4 has a gradient",
    "split again": "fact 2: the tokens are split again in the second pass",
    "own tokens": "fact 3: the loss is divided by the number of tokens that the pass updates",
    "own lengths": "fact 3: the loss is a mean over responses, each divided by its own length",
    "first weights": "fact 4: the second pass starts from the first weights",
    "old again": "fact 4: the second pass takes the old log-probabilities anew",
    "own optimizer": "fact 5: the second pass has an optimizer of its own",
    "no gradient clip": "fact 5: the gradient is not clipped",
    "high first": "the likely tokens are updated first",
    "no Eq. 4": "the advantages are not weighted by Eq. 4",
    "no clip": "the ratio is not clipped",
    "equal clips": "the ratio is clipped at 1 + ε_l, not at 1 + ε_h",
}
CHOICES = {
    "zero step": "fact 6, a choice: AdamW makes a step where the gradient is 0",
    "no clamp of the difference": "fact 7, a choice: log π_ref − log π is not clamped at ±5",
    "no clamp of the estimate": "fact 7, a choice: the KL's estimate is not clamped at 10",
    "no dual clip": "fact 7, a choice: there is no dual clip",
}


def golden_rollouts():
    return json.loads(GOLDEN.read_text(encoding="utf-8"))["rollouts"]


def float64(values):
    return torch.as_tensor(values, dtype=torch.float64).detach()


def tables_of(update, case):
    """What a port's update gives for a golden rollout: a table after each optimizer step."""
    tables = [float64(table) for table in update(case)]
    wanted = [float64(step["table"]).shape for step in case["steps"]]
    if [table.shape for table in tables] != wanted:
        size = "x".join(map(str, wanted[0]))
        raise ValueError(
            f"{case['name']}: update must return {len(wanted)} tables of {size}, one for each pass "
            f"and mini-batch; it returned {[tuple(table.shape) for table in tables]}"
        )
    return tables


def differences(tables, case):
    """The largest difference of a logit from golden.json, after each optimizer step."""
    right = [float64(step["table"]) for step in case["steps"]]
    return [float((a - b).abs().max()) for a, b in zip(tables, right)]


def is_right(tables, case):
    return all(off < TOLERANCE for off in differences(tables, case))  # not where it is NaN


def check(update):
    """What is broken in a port's update, a sentence each; no sentence: nothing."""
    cases = golden_rollouts()
    tables = {case["name"]: tables_of(update, case) for case in cases}
    wrong = [case for case in cases if not is_right(tables[case["name"]], case)]
    if not wrong:
        return []
    right = [case for case in cases if case not in wrong]
    for mistakes in candidates():
        # The wrong cases first: one of them rules out most mistakes.
        if all(same(tables[case["name"]], update_with(mistakes, case)) for case in wrong + right):
            return [(MISTAKES | CHOICES)[mistake] for mistake in mistakes]
    first = wrong[0]
    found = differences(tables[first["name"]], first)
    number = [off < TOLERANCE for off in found].index(False)
    step = first["steps"][number]
    where = f"optimizer step {number + 1} (pass: {step['pass']}, first row: {step['first_row']})"
    names = "; ".join(case["name"] for case in right) or "no case"
    found_nothing = f"no mistake that is known here. Right: {names}."
    return [f"{found_nothing} First difference: {found[number]:.1e}, {first['name']}, {where}"]


def candidates():
    """One mistake and any of the choices, or two mistakes, the fewest first."""
    sets = list(itertools.combinations(MISTAKES, 2))
    for chosen in range(len(CHOICES) + 1):
        for choices in itertools.combinations(CHOICES, chosen):
            sets.append(choices)
            sets += [(mistake, *choices) for mistake in MISTAKES]
    return sorted(sets, key=len)[1:]


def same(tables, others):
    return all((a - b).abs().max() < TOLERANCE for a, b in zip(tables, others))


def update_with(mistakes, case):
    """The update of a golden rollout with some mistakes in it: a table after each step."""
    responses = [torch.tensor(response) for response in case["responses"]]
    ids = torch.nn.utils.rnn.pad_sequence(responses, batch_first=True, padding_value=-1)  # (B, T)
    mask = ids >= 0
    ids = ids.clamp(min=0)
    before = torch.cat([torch.tensor(case["prompts"])[:, None], ids[:, :-1]], 1)

    sampling_temperature = 1.0 if "no temperature" in mistakes else case["temperature"]

    def logprobs(table, temperature=sampling_temperature):
        every_logprob = (table[before] / temperature).log_softmax(-1)  # (B, T, V)
        return every_logprob.gather(-1, ids[..., None])[..., 0]

    first_table = float64(case["table"])
    old = logprobs(first_table, 1.0 if "temperature" in mistakes else sampling_temperature)
    ref = logprobs(float64(case["reference"]))
    groups = float64(case["rewards"]).view(-1, case["group_size"])
    raw = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    raw = raw.masked_fill((groups == groups[:, :1]).all(1, keepdim=True), 0.0).view(-1, 1)
    alpha = 0.0 if "no Eq. 4" in mistakes else case["alpha"]
    low = old.exp() < case["eta"]

    def new_optimizer():
        return torch.optim.AdamW([table], case["learning_rate"], weight_decay=case["weight_decay"])

    table = first_table.clone().requires_grad_()
    optimizer = new_optimizer()
    names = ["low", "high"] if case["eta"] else ["all"]
    if "high first" in mistakes:
        names.reverse()
    tables = []
    for number, name in enumerate(names):
        if number == 1 and "split again" in mistakes:
            low = logprobs(table.detach()).exp() < case["eta"]
        if number == 1 and "old again" in mistakes:
            old = logprobs(table.detach())
        if number == 1 and "first weights" in mistakes:
            table.data = first_table.clone()
        if number == 1 and "own optimizer" in mistakes:
            optimizer = new_optimizer()
        tokens = {"all": mask, "low": mask & low, "high": mask & ~low}[name]
        for rows in torch.arange(len(ids)).split(case["mini_batch_size"]):
            new = logprobs(table)
            pi = old.exp()
            if "current π" in mistakes:
                pi = new.detach().exp()
            if "gradient of π" in mistakes:
                pi = new.exp()
            losses = token_losses(new, old, ref, (alpha * pi + 1 - alpha) * raw, case, mistakes)
            losses = torch.where(tokens, losses, 0.0)[rows]
            if "own tokens" in mistakes:
                loss = losses.sum() / tokens[rows].sum().clamp(min=1)
            elif "own lengths" in mistakes:
                loss = (losses.sum(1) / mask[rows].sum(1)).mean()
            else:
                loss = losses.sum() / mask[rows].sum()
            optimizer.zero_grad()
            loss.backward()
            if "no gradient clip" not in mistakes:
                torch.nn.utils.clip_grad_norm_([table], case["max_grad_norm"])
            if table.grad.any() or "zero step" in mistakes:
                optimizer.step()
            tables.append(table.detach().clone())
    return tables


def token_losses(new, old, ref, advantages, case, mistakes):
    """The loss of Eq. 1 with its KL, of every token: (B, T)."""
    ratio = (new - old).exp()
    clip_high = case["clip_low"] if "equal clips" in mistakes else case["clip_high"]
    clipped = ratio.clamp(1 - case["clip_low"], 1 + clip_high)
    if "no clip" in mistakes:
        clipped = ratio
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    if "no dual clip" not in mistakes:
        capped = torch.minimum(losses, -case["clip_dual"] * advantages)
        losses = torch.where(advantages < 0, capped, losses)
    difference = ref - new
    if "no clamp of the difference" not in mistakes:
        difference = difference.clamp(-5, 5)
    kl = difference.exp() - difference - 1
    if "no clamp of the estimate" not in mistakes:
        kl = kl.clamp(max=10)
    return losses + case["kl_coef"] * kl


def main(words=None):
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=look)
    parser.add_argument("port", metavar="MODULE:FUNCTION", help="your update")
    place = parser.parse_args(words).port
    module_name, _, function_name = place.partition(":")
    sys.path.insert(0, ".")
    try:
        update = getattr(importlib.import_module(module_name), function_name)
    except (ModuleNotFoundError, AttributeError, ValueError) as problem:
        parser.error(f"{place}: {problem}; give the name of a module here and of its function")
    try:
        for case in golden_rollouts():
            found = differences(tables_of(update, case), case)
            print(f"{case['name']}: largest difference {max(found):.1e}")
    except ValueError as problem:
        parser.error(str(problem))
    broken = check(update)
    print("\n".join(broken) or "The port is right in all cases.")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
