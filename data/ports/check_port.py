"""Holds a port of the method to golden.json, at three levels, and names the mistake that it finds.

    python data/ports/check_port.py my_port                        # 1. single functions
    python data/ports/check_port.py my_port:update                 # 2. updates of a small table
    python data/ports/check_port.py --model my_port:update_model   # 3. updates of a language model

my_port.py is yours, in the current folder; example_port.py beside this file is a right one.

1. Any of these functions, on float64 tensors that are padded on the right:
    group_advantages(rewards, group_size): (B,) → (B,)
    reweight_advantages(advantages, old_logprobs, alpha): (B, T), (B, T) → (B, T)
    split_tokens(old_logprobs, mask, eta): (B, T), (B, T) → two masks (B, T), low and high
    policy_loss(logprobs, old_logprobs, ref_logprobs, advantages, update_mask, mask, case):
        (B, T) each → a scalar, whose gradient is compared, too; `update_mask` has the tokens of the
        pass, `mask` all response tokens, `case` clip_low, clip_high, clip_dual and kl_coef.
2. update(case) makes a whole update with your loss, passes and optimizer, on a policy that is a
   table (V, V): row i holds the logits of the token after token i. `case` has what data/golden.py
   calls inputs; pad the responses with 0. It returns the table after each optimizer step.
3. update_model(model, optimizer, case) does the same with the bundled model, a causal model of
   transformers, and an AdamW over its weights; `case` has prompt and responses as token ids.

Where level 1 or 2 is wrong, mistakes are put into the right method until it gives the same: one or
two, with any of the choices that README.md allows. Exit code 0: right, perhaps with such choices;
1: wrong.
"""

import argparse
import functools
import importlib
import itertools
import json
import math
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

DATA = Path(__file__).resolve().parents[1]
GOLDEN = json.loads((DATA / "golden.json").read_text(encoding="utf-8"))
TOLERANCE = 1e-4  # float32 stays below it, and no mistake does

MISTAKES = {
    "temperature": "fact 1: π is taken at temperature 1, not at that of sampling",
    "no temperature": "fact 1: all log-probabilities are taken at temperature 1",
    "current π": "fact 1: π in Eq. 4 is the current policy's, not that of the policy that sampled",
    "reference π": "fact 1: π in Eq. 4 is the reference model's",
    "reference split": "fact 1: π in the split is the reference model's",
    "gradient of π": "fact 1: the weight of Eq. 4 has a gradient",
    "η against log π": "fact 1: η is compared with log π, not with π",
    "split again": "fact 2: the tokens are split again in the second pass",
    "own tokens": "fact 3: the loss is divided by the number of tokens that the pass updates",
    "own lengths": "fact 3: the loss is a mean over responses, each divided by its own length",
    "micro-batch means": "fact 3: the loss is a mean of the micro-batches' means",
    "sum": "fact 3: the loss is a sum, divided by nothing",
    "padding": "fact 3: N counts padding, as far as the longest response of the batch",
    "short padding": "fact 3: N counts padding, as far as the longest response of the mini-batch",
    "padding updated": "fact 3: padding is taken for response tokens, in the loss and in N",
    "no end token": "fact 3: the mask leaves out the last token of each response, its end",
    "first weights": "fact 4: the second pass starts from the first weights",
    "old again": "fact 4: the second pass takes the old log-probabilities anew",
    "one step": "fact 4: both passes are made in one optimizer step (or there is no split)",
    "own optimizer": "fact 5: the second pass has an optimizer of its own",
    "no gradient clip": "fact 5: the gradient is not clipped",
    "micro-batch clip": "fact 5: the gradient is clipped after each micro-batch",
    "high first": "the high-probability tokens are updated first",
    "no Eq. 4": "the advantages are not weighted by Eq. 4",
    "α for 1 - α": "α and 1 - α are exchanged in Eq. 4",
    "shift": "the logits are shifted by one: log π of a token is read at the token itself",
    "deviation by G": "the standard deviation of a group is divided by G, not by G - 1",
    "batch": "mean and standard deviation of the rewards are the batch's, not the group's",
    "no clip": "the ratio is not clipped",
    "equal clips": "the ratio is clipped at 1 + ε_l, not at 1 + ε_h",
    "max": "where Â < 0 the larger objective is taken, not the smaller one (max for min)",
    "reversed KL": "the KL is the wrong way round: its estimate takes log π - log π_ref",
    "minus KL": "the KL is subtracted from the loss, not added to it",
}
CHOICES = {
    "zero step": "fact 6, a choice: AdamW makes a step where the gradient is 0",
    "no clamp of the difference": "fact 7, a choice: log π_ref - log π is not clamped at ±5",
    "no clamp of the estimate": "fact 7, a choice: the KL's estimate is not clamped at 10",
    "no dual clip": "fact 7, a choice: there is no dual clip",
}


# The method, with mistakes in it ------------------------------------------------------------------


def float64(values):
    return torch.as_tensor(values, dtype=torch.float64).detach()


def group_advantages(rewards, group_size, mistakes=()):
    groups = rewards.view(-1, len(rewards) if "batch" in mistakes else group_size)
    deviation = groups.std(1, keepdim=True, correction=0 if "deviation by G" in mistakes else 1)
    advantages = (groups - groups.mean(1, keepdim=True)) / (deviation + 1e-6)
    return advantages.masked_fill((groups == groups[:, :1]).all(1, keepdim=True), 0.0).view(-1)


def reweight_advantages(advantages, old_logprobs, alpha, mistakes=()):
    if "no Eq. 4" in mistakes:
        alpha = 0.0
    if "α for 1 - α" in mistakes:
        alpha = 1 - alpha
    return (alpha * old_logprobs.exp() + 1 - alpha) * advantages


def split_tokens(old_logprobs, mask, eta, mistakes=()):
    low = mask & ((old_logprobs if "η against log π" in mistakes else old_logprobs.exp()) < eta)
    return (mask & ~low, low) if "high first" in mistakes else (low, mask & ~low)


def token_losses(new, old, ref, advantages, case, mistakes=()):
    """The loss of Eq. 1 with its KL, of every token: (B, T)."""
    ratio = (new - old).exp()
    clip_high = case["clip_low"] if "equal clips" in mistakes else case["clip_high"]
    clipped = ratio.clamp(1 - case["clip_low"], 1 + clip_high)
    if "no clip" in mistakes:
        clipped = ratio
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    if "max" in mistakes:
        larger = -torch.maximum(ratio * advantages, clipped * advantages)
        losses = torch.where(advantages < 0, larger, losses)
    if "no dual clip" not in mistakes:
        bounded = torch.minimum(losses, -case["clip_dual"] * advantages)
        losses = torch.where(advantages < 0, bounded, losses)
    difference = new - ref if "reversed KL" in mistakes else ref - new
    if "no clamp of the difference" not in mistakes:
        difference = difference.clamp(-5, 5)
    kl = difference.exp() - difference - 1
    if "no clamp of the estimate" not in mistakes:
        kl = kl.clamp(max=10)
    return losses + case["kl_coef"] * (-kl if "minus KL" in mistakes else kl)


def normalizers(update_mask, mask, mistakes):
    """N, by which the losses of each response are divided: (B, 1)."""
    normalizer = mask.sum()
    if "own tokens" in mistakes:
        normalizer = update_mask.sum().clamp(min=1)
    if "padding" in mistakes:
        normalizer = torch.tensor(mask.numel())
    if "short padding" in mistakes:
        normalizer = mask.sum(1).max() * len(mask)
    if "own lengths" in mistakes:
        normalizer = mask.sum(1, keepdim=True) * len(mask)
    if "sum" in mistakes:
        normalizer = torch.tensor(1)
    return normalizer.expand(len(mask), 1)


def policy_loss(new, old, ref, advantages, update_mask, mask, case, mistakes=()):
    losses = token_losses(new, old, ref, advantages, case, mistakes)
    return (losses * update_mask / normalizers(update_mask, mask, mistakes)).sum()


def padded_rollout(case):
    """The responses of a golden rollout: ids, the tokens before them, and the mask, all (B, T)."""
    responses = [torch.tensor(response) for response in case["responses"]]
    ids = torch.nn.utils.rnn.pad_sequence(responses, batch_first=True, padding_value=-1)
    mask = ids >= 0
    ids = ids.clamp(min=0)
    before = torch.cat([torch.tensor(case["prompts"])[:, None], ids[:, :-1]], 1)
    return ids, before, mask


def update_with(mistakes, case):
    """The update of a golden rollout with some mistakes in it: yields the table after each step."""
    ids, before, mask = padded_rollout(case)
    if "no end token" in mistakes:
        mask = mask & torch.nn.functional.pad(mask, (0, 1))[:, 1:]
    if "padding updated" in mistakes:
        mask = torch.ones_like(mask)
    if "shift" in mistakes:
        before = ids
    sampling_temperature = 1.0 if "no temperature" in mistakes else case["temperature"]

    def logprobs(table, temperature=sampling_temperature):
        every_logprob = (table[before] / temperature).log_softmax(-1)  # (B, T, V)
        return every_logprob.gather(-1, ids[..., None])[..., 0]

    def new_optimizer():
        return torch.optim.AdamW([table], case["learning_rate"], weight_decay=case["weight_decay"])

    first_table = float64(case["table"])
    old = logprobs(first_table, 1.0 if "temperature" in mistakes else sampling_temperature)
    ref = logprobs(float64(case["reference"]))
    sampled = old
    raw = group_advantages(float64(case["rewards"]), case["group_size"], mistakes)[:, None]
    passes = [mask]
    if case["eta"] and "one step" not in mistakes:
        source = ref if "reference split" in mistakes else old
        passes = split_tokens(source, mask, case["eta"], mistakes)
    table = first_table.clone().requires_grad_()
    optimizer = new_optimizer()
    for number, update_mask in enumerate(passes):
        if number == 1 and "split again" in mistakes:
            _, update_mask = split_tokens(logprobs(table.detach()), mask, case["eta"], mistakes)
        if number == 1 and "old again" in mistakes:
            old = logprobs(table.detach())
        if number == 1 and "first weights" in mistakes:
            table.data = first_table.clone()
        if number == 1 and "own optimizer" in mistakes:
            optimizer = new_optimizer()
        for mini_batch in torch.arange(len(ids)).split(case["mini_batch_size"]):
            optimizer.zero_grad()
            all_normalizers = normalizers(update_mask[mini_batch], mask[mini_batch], mistakes)
            size = len(mini_batch)
            if "micro-batch means" in mistakes or "micro-batch clip" in mistakes:
                size = case["micro_batch_size"]
            for rows, normalizer in zip(mini_batch.split(size), all_normalizers.split(size)):
                new = logprobs(table)
                log_pi = ref if "reference π" in mistakes else sampled
                if "current π" in mistakes:
                    log_pi = new.detach()
                if "gradient of π" in mistakes:
                    log_pi = new
                advantages = reweight_advantages(raw, log_pi, case["alpha"], mistakes)
                losses = token_losses(new, old, ref, advantages, case, mistakes)
                if "micro-batch means" in mistakes:
                    means = normalizers(update_mask[rows], mask[rows], mistakes)
                    normalizer = means * len(mini_batch) / len(rows)
                torch.where(update_mask, losses, 0.0)[rows].div(normalizer).sum().backward()
                if "micro-batch clip" in mistakes:
                    torch.nn.utils.clip_grad_norm_([table], case["max_grad_norm"])
            if "no gradient clip" not in mistakes:
                torch.nn.utils.clip_grad_norm_([table], case["max_grad_norm"])
            if table.grad.any() or "zero step" in mistakes:
                optimizer.step()
            yield table.detach().clone()


# The search for mistakes --------------------------------------------------------------------------


def candidates():
    """Sets of names: choices alone, one mistake, two mistakes; the last with any choices, too."""
    choices = []
    for count in range(len(CHOICES) + 1):
        choices += itertools.combinations(CHOICES, count)
    for count in (0, 1, 2):
        for names in choices:
            for mistakes in itertools.combinations(MISTAKES, count):
                yield (*mistakes, *names)


def first_wrong(values, others):
    """The number of the first tensor that differs; None if none does. NaN differs."""
    for number, (a, b) in enumerate(itertools.zip_longest(values, others)):
        if a is None or b is None or not (a - b).abs().max() < TOLERANCE:
            return number
    return None


def explain(found, right, simulate):
    """The names of what explains the values `found` in each golden case; None: nothing does.

    `right` has the right values, `simulate(mistakes, number)` gives those of case `number`.
    """
    wrong = {number: first_wrong(found[number], right[number]) for number in range(len(found))}
    # first the case that is wrong from its beginning: it rules out most mistakes the soonest
    numbers = sorted(wrong, key=lambda number: math.inf if wrong[number] is None else wrong[number])
    for mistakes in candidates():
        if all(first_wrong(found[each], simulate(mistakes, each)) is None for each in numbers):
            return mistakes
    return None


def verdict(mistakes):
    """Prints what was found, names of MISTAKES and CHOICES; returns the exit code."""
    if mistakes is None:
        print("Wrong, by no mistake that is known here, nor by two of them.")
        return 1
    is_right = set(mistakes) <= set(CHOICES)
    if is_right:
        print("Right, with these choices:" if mistakes else "Right.")
    for mistake in mistakes:
        print((MISTAKES | CHOICES)[mistake])
    return int(not is_right)


# 1. Single functions ------------------------------------------------------------------------------


FUNCTIONS = {
    "group_advantages": group_advantages,
    "reweight_advantages": reweight_advantages,
    "split_tokens": split_tokens,
    "policy_loss": policy_loss,
}


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
    for name, reference in FUNCTIONS.items():
        if not hasattr(module, name):
            print(f"{name}: not in {module.__name__}.")
            continue
        print(f"{name}: ", end="")
        pairs = [outputs(name, getattr(module, name), case) for case in GOLDEN["cases"]]

        def simulate(mistakes, number, name=name, reference=reference):
            wrong = functools.partial(reference, mistakes=mistakes)
            return outputs(name, wrong, GOLDEN["cases"][number])[0]

        code = max(code, verdict(explain(*zip(*pairs), simulate)))
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

    def simulate(mistakes, number):
        return update_with(mistakes, GOLDEN["rollouts"][number])

    if any(first_wrong(*pair) is not None for pair in zip(found, right)):
        print("Looking for what explains this, for up to a minute ...")
    return explain(found, right, simulate)


# 3. Updates of the bundled model ------------------------------------------------------------------


def model_cases():
    """The cases of the bundled model with all their inputs and outputs."""
    shared = {name: value for name, value in GOLDEN["model"].items() if name != "cases"}
    return [shared | case for case in GOLDEN["model"]["cases"]]


def bundled_model():
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(DATA / "tiny", dtype=torch.float32).eval()


def record_steps(optimizer):
    """A list that gets, of every step that has a gradient, its norm and that of the change."""
    steps = []
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]

    def flat(tensors):
        return torch.cat([tensor.detach().flatten().double() for tensor in tensors])

    def before(*_):
        if weights[0].grad is not None:
            gradient = flat(weight.grad for weight in weights)
            steps.append({"gradient_norm": float(gradient.norm()), "weights": flat(weights)})

    def after(*_):
        if weights[0].grad is not None:
            change = flat(weights) - steps[-1].pop("weights")
            steps[-1]["change_norm"] = float(change.norm())

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return steps


@torch.no_grad()
def model_differences(model, steps, case):
    """How far an update is from golden.json, at worst. Steps: those of `record_steps`.

    Relative: the norm of a gradient, as the optimizer got it, and of a step's change. Absolute: the
    log-probabilities after the update, in nats, and the weights.
    """
    right = [step for step in case["steps"] if not step["skipped"]]
    found = {"optimizer steps": abs(len(steps) - len(right)), "gradients": 0.0, "changes": 0.0}
    for step, wanted in zip(steps, right):
        clipped = min(wanted["gradient_norm"], case["max_grad_norm"])
        gradient = abs(step["gradient_norm"] / clipped - 1)
        change = abs(step["change_norm"] / wanted["change_norm"] - 1)
        found["gradients"] = max(found["gradients"], gradient)
        found["changes"] = max(found["changes"], change)
    logprobs = []
    for response in case["responses"]:
        logits = model(torch.tensor([case["prompt"] + response])).logits[0, -len(response) - 1 : -1]
        every_logprob = (logits.double() / case["temperature"]).log_softmax(-1)
        logprobs.append(every_logprob[range(len(response)), response])
    wanted = torch.tensor(list(itertools.chain(*case["new_logprobs"])))
    found["log-probabilities"] = float((torch.cat(logprobs) - wanted).abs().max())
    weights = [float(weight.flatten()[0]) for weight in model.parameters()]
    differences = [abs(a - b) for a, b in zip(weights, case["weights"].values(), strict=True)]
    return found | {"weights": max(differences)}


def check_model_update(update_model):
    """Level 3: prints how far each update is from golden.json; returns the exit code."""
    code = 0
    for case in model_cases():
        model = bundled_model()
        optimizer = torch.optim.AdamW(
            model.parameters(), case["learning_rate"], weight_decay=case["weight_decay"]
        )
        steps = record_steps(optimizer)
        update_model(model, optimizer, case)
        may_skip = any(step["skipped"] for step in case["steps"])
        if may_skip and any(step["gradient_norm"] == 0 for step in steps):
            print(f"{case['name']}: not compared. {CHOICES['zero step']}")
            continue
        found = model_differences(model, steps, case)
        weights_differ = found["weights"] > 1e-6  # each moves by about the learning rate, 1e-4
        is_right = max(found.values()) < TOLERANCE and not weights_differ
        print(f"{case['name']}: {'right' if is_right else 'wrong'};", end=" ")
        print(", ".join(f"{name} {value:.1e}" for name, value in found.items()))
        code = max(code, int(not is_right))
    return code


def main(words=None):
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=look)
    parser.add_argument("port", metavar="MODULE[:FUNCTION]", help="yours")
    parser.add_argument("--model", action="store_true", help="FUNCTION updates a language model")
    flags = parser.parse_args(words)
    module_name, _, function_name = flags.port.partition(":")
    sys.path.insert(0, ".")
    torch.set_num_threads(1)  # the fastest for many small operations
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
