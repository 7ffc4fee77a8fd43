"""Holds a port of the method to golden.json, at three levels, and names the mistake that it finds.

    python data/ports/check_port.py my_port                        # 1. single functions
    python data/ports/check_port.py my_port:update                 # 2. updates of a small table
    python data/ports/check_port.py --model my_port:update_model   # 3. updates of a language model

my_port.py is yours, in the current folder; example_port.py beside this file shows what it may hold.

1. Any of these functions, on float64 tensors that are padded on the right:
    group_advantages(rewards, group_size): (B,) → (B,)
    reweight_advantages(advantages, old_logprobs, alpha): (B, T), (B, T) → (B, T)
    split_tokens(old_logprobs, mask, eta): (B, T), (B, T) → two masks (B, T), low and high
    policy_loss(logprobs, old_logprobs, ref_logprobs, advantages, update_mask, mask, case):
        (B, T) each → a scalar, whose gradient is compared, too; `update_mask` has the tokens of the
        pass, `mask` all response tokens, `case` clip_low, clip_high, clip_dual and kl_coef.
2. update(case) makes a whole update with your loss, passes and optimizer, on a policy that is a
   table (V, V): row i holds the logits of the token after token i. `case` has what data/golden.py
   calls inputs. It returns the table after each optimizer step, in their order.
3. update_model(model, optimizer, case) does the same with the bundled model, a causal model of
   transformers, and an AdamW over its weights; `case` has prompt and responses as token ids.

Where the tables of level 2 are wrong, mistakes are put into a right update until its tables are the
same: one mistake or two. Exit code 0: right, perhaps with choices that README.md allows; 1: wrong.
"""

import argparse
import importlib
import itertools
import json
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
    "padding": "fact 3: N counts padding",
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


def group_advantages(rewards, group_size, mistakes):
    groups = rewards.view(-1, len(rewards) if "batch" in mistakes else group_size)
    deviation = groups.std(1, keepdim=True, correction=0 if "deviation by G" in mistakes else 1)
    advantages = (groups - groups.mean(1, keepdim=True)) / (deviation + 1e-6)
    return advantages.masked_fill((groups == groups[:, :1]).all(1, keepdim=True), 0.0).view(-1)


def token_weights(pi, alpha, mistakes):
    if "no Eq. 4" in mistakes:
        alpha = 0.0
    if "α for 1 - α" in mistakes:
        alpha = 1 - alpha
    return alpha * pi + 1 - alpha


def is_low(logprobs, eta, mistakes):
    return logprobs < eta if "η against log π" in mistakes else logprobs.exp() < eta


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


def micro_batch_loss(losses, update_mask, mask, rows, mini_batch, mistakes):
    """What `rows` add to the loss of their mini-batch: its losses divided by its N."""
    losses = torch.where(update_mask, losses, 0.0)[rows]
    if "own lengths" in mistakes:
        return (losses.sum(1) / mask[rows].sum(1)).sum() / len(mini_batch)
    if "micro-batch means" in mistakes:
        return losses.sum() / mask[rows].sum() * len(rows) / len(mini_batch)
    if "own tokens" in mistakes:
        return losses.sum() / update_mask[mini_batch].sum().clamp(min=1)
    if "padding" in mistakes:
        return losses.sum() / mask[mini_batch].numel()
    return losses.sum() / (1 if "sum" in mistakes else mask[mini_batch].sum())


def padded_rollout(case):
    """The responses of a golden rollout: ids, the tokens before them, and the mask, all (B, T)."""
    responses = [torch.tensor(response) for response in case["responses"]]
    ids = torch.nn.utils.rnn.pad_sequence(responses, batch_first=True, padding_value=-1)
    mask = ids >= 0
    ids = ids.clamp(min=0)
    before = torch.cat([torch.tensor(case["prompts"])[:, None], ids[:, :-1]], 1)
    return ids, before, mask


def update_with(mistakes, case):
    """The update of a golden rollout with some mistakes in it: a table after each step."""
    ids, before, mask = padded_rollout(case)
    if "no end token" in mistakes:
        mask = mask & torch.nn.functional.pad(mask, (0, 1))[:, 1:]
    if "shift" in mistakes:
        before = ids
    sampling_temperature = 1.0 if "no temperature" in mistakes else case["temperature"]

    def logprobs(table, temperature=sampling_temperature):
        every_logprob = (table[before] / temperature).log_softmax(-1)  # (B, T, V)
        return every_logprob.gather(-1, ids[..., None])[..., 0]

    first_table = float64(case["table"])
    old = logprobs(first_table, 1.0 if "temperature" in mistakes else sampling_temperature)
    ref = logprobs(float64(case["reference"]))
    raw = group_advantages(float64(case["rewards"]), case["group_size"], mistakes)[:, None]
    sampled = ref if "reference π" in mistakes else old
    low = is_low(ref if "reference split" in mistakes else old, case["eta"], mistakes)

    def new_optimizer():
        return torch.optim.AdamW([table], case["learning_rate"], weight_decay=case["weight_decay"])

    table = first_table.clone().requires_grad_()
    optimizer = new_optimizer()
    names = ["low", "high"] if case["eta"] and "one step" not in mistakes else ["all"]
    if "high first" in mistakes:
        names.reverse()
    tables = []
    for number, name in enumerate(names):
        if number == 1 and "split again" in mistakes:
            low = is_low(logprobs(table.detach()), case["eta"], mistakes)
        if number == 1 and "old again" in mistakes:
            old = logprobs(table.detach())
        if number == 1 and "first weights" in mistakes:
            table.data = first_table.clone()
        if number == 1 and "own optimizer" in mistakes:
            optimizer = new_optimizer()
        update_mask = {"all": mask, "low": mask & low, "high": mask & ~low}[name]
        for mini_batch in torch.arange(len(ids)).split(case["mini_batch_size"]):
            optimizer.zero_grad()
            for rows in mini_batch.split(case["micro_batch_size"]):
                new = logprobs(table)
                pi = sampled.exp()
                if "current π" in mistakes:
                    pi = new.detach().exp()
                if "gradient of π" in mistakes:
                    pi = new.exp()
                advantages = token_weights(pi, case["alpha"], mistakes) * raw
                losses = token_losses(new, old, ref, advantages, case, mistakes)
                micro_batch_loss(losses, update_mask, mask, rows, mini_batch, mistakes).backward()
                if "micro-batch clip" in mistakes:
                    torch.nn.utils.clip_grad_norm_([table], case["max_grad_norm"])
            if "no gradient clip" not in mistakes:
                torch.nn.utils.clip_grad_norm_([table], case["max_grad_norm"])
            if table.grad.any() or "zero step" in mistakes:
                optimizer.step()
            tables.append(table.detach().clone())
    return tables


def candidates():
    """Choices alone; then one mistake with any of them, or two mistakes, the fewest first."""
    sets = list(itertools.combinations(MISTAKES, 2))
    for chosen in range(len(CHOICES) + 1):
        for choices in itertools.combinations(CHOICES, chosen):
            sets.append(choices)
            sets += [(mistake, *choices) for mistake in MISTAKES]
    return sorted(sets, key=lambda names: (not set(names) <= set(CHOICES), len(names)))


def same(values, others):
    """Whether two lists of tensors are the same; not where one has NaN."""
    pairs = zip(values, others)
    return len(values) == len(others) and all((a - b).abs().max() < TOLERANCE for a, b in pairs)


def verdict(mistakes):
    """Prints what was found, names of MISTAKES and CHOICES; returns the exit code."""
    if not mistakes:
        print("Right.")
    elif set(mistakes) <= set(CHOICES):
        print("Right, with these choices:")
    for mistake in mistakes:
        print((MISTAKES | CHOICES)[mistake])
    return int(not set(mistakes) <= set(CHOICES))


# 1. Single functions ------------------------------------------------------------------------------


def outputs(name, case, mistakes=(), function=None):
    """What a function of level 1 gives for a golden case: yours, or the right one with mistakes."""
    lengths = torch.tensor(case["lengths"])[:, None]
    old = float64(case["old_logprobs"])
    ref = float64(case["ref_logprobs"])
    mask = torch.arange(old.shape[1]) < lengths
    advantages = float64(case["advantages"])[:, None] * mask
    if name == "group_advantages":
        arguments = (float64(case["rewards"]), case["group_size"])
        return [function(*arguments) if function else group_advantages(*arguments, mistakes)]
    if name == "reweight_advantages":
        if function:
            return [function(advantages, old, case["alpha"]) * mask]
        return [token_weights(old.exp(), case["alpha"], mistakes) * advantages]
    low = is_low(old, case["eta"], mistakes if name == "split_tokens" else ()) & mask
    if name == "split_tokens":
        masks = function(old, mask, case["eta"]) if function else (low, mask & ~low)
        return [torch.as_tensor(part).double() for part in masks]
    advantages = float64(case["reweighted_advantages"]) * mask
    found = []
    rows = torch.arange(len(mask))
    for update_mask in (mask, low, mask & ~low):
        new = float64(case["new_logprobs"]).requires_grad_()
        if function:
            loss = function(new, old, ref, advantages, update_mask, mask, case)
        else:
            losses = token_losses(new, old, ref, advantages, case, mistakes)
            loss = micro_batch_loss(losses, update_mask, mask, rows, rows, mistakes)
        loss.backward()
        found += [loss.detach(), new.grad]
    return found


def check_functions(module):
    """Level 1: prints what is wrong with each function that a module has; returns the exit code."""
    code = 0
    for name in ("group_advantages", "reweight_advantages", "split_tokens", "policy_loss"):
        if not hasattr(module, name):
            print(f"{name}: not in {module.__name__}.")
            continue
        print(f"{name}: ", end="")
        yours = [outputs(name, case, function=getattr(module, name)) for case in GOLDEN["cases"]]
        for mistakes in candidates():
            pairs = zip(yours, GOLDEN["cases"])
            if all(same(found, outputs(name, case, mistakes)) for found, case in pairs):
                code = max(code, verdict(mistakes))
                break
        else:
            print("wrong, by no mistake that is known here.")
            code = 1
    return code


# 2. Updates of a table ----------------------------------------------------------------------------


def find_mistakes(update):
    """The names of what explains the tables of an update; () is right, None that nothing does."""
    found = []
    for case in GOLDEN["rollouts"]:
        right = [float64(step["table"]) for step in case["steps"]]
        tables = [float64(table) for table in update(case)]
        print(f"{case['name']}: {'right' if same(tables, right) else 'wrong'}")
        found.append((same(tables, right), tables, case))
    found.sort(key=lambda each: each[0])  # a wrong case first: one rules out most mistakes
    for mistakes in candidates():
        if all(same(tables, update_with(mistakes, case)) for _, tables, case in found):
            return mistakes
    return None


def check_update(update):
    """Level 2: prints what is wrong with an update; returns the exit code."""
    mistakes = find_mistakes(update)
    if mistakes is None:
        print("Wrong, by no mistake that is known here, nor by two of them.")
        return 1
    return verdict(mistakes)


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
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, function_name) if function_name else None
    except (ModuleNotFoundError, AttributeError) as problem:
        parser.error(f"{flags.port}: {problem}; give the name of a module here and of its function")
    if function is None:
        return check_functions(module)
    return check_model_update(function) if flags.model else check_update(function)


if __name__ == "__main__":
    sys.exit(main())
