"""The updates of the bundled model in golden.json, made by lopti.py; the ports are held to both."""

import itertools
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import lopti  # isort: skip, before torch

import torch

PAGE = json.loads((ROOT / "data" / "golden.json").read_text(encoding="utf-8"))["model"]


def settings_of(case):
    """The settings of lopti.py for a case of the page: one puzzle, four responses."""
    names = "group_size temperature clip_low clip_high clip_dual kl_coef learning_rate weight_decay"
    shared = {name: PAGE[name] for name in [*names.split(), "max_grad_norm"]}
    own = {name: case[name] for name in ("alpha", "eta", "mini_batch_size")}
    return lopti.Settings(prompts_per_step=1, device="cpu", **shared, **own)


def new_rollout(policy, settings):
    """The four responses, scored by the first policy, which is the reference too."""
    ids, mask, lengths = lopti.pack([PAGE["prompt"]] * 4, PAGE["responses"])
    rollout = lopti.Rollout(ids, mask, lengths, truncated=torch.zeros(4).bool(), texts=[])
    rollout.old_logprobs, rollout.entropies = lopti.score(policy, rollout, settings)
    rollout.ref_logprobs = rollout.old_logprobs
    return rollout


def lopti_update(case):
    """The policy after the update of lopti.py, its rollout, passes and optimizer steps."""
    settings = settings_of(case)
    policy, _ = lopti.load_model(settings.model, "cpu")
    optimizer = lopti.make_optimizer(policy, settings)
    steps = recorded_steps(optimizer)
    rollout = new_rollout(policy, settings)
    mask = rollout.mask
    old = rollout.old_logprobs
    advantages = lopti.group_advantages(torch.tensor(PAGE["rewards"]), 4)[:, None] * mask
    rollout.advantages = lopti.reweight_advantages(advantages, old, settings.alpha)
    low, high = lopti.split_tokens(old, mask, settings.eta)
    groups = {"all": mask, "low": low, "high": high}
    updates = {}
    for name in settings.pass_names():
        updates[name] = lopti.update(policy, optimizer, rollout, groups[name], settings)
    return policy, rollout, updates, steps


def recorded_steps(optimizer):
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


def differences(case, steps, policy):
    """How far an update is from golden.json, at worst: a dictionary of three numbers.

    Relative: the norm of a gradient, as the optimizer got it, and of a step's change. Absolute, in
    nats: the log-probabilities after the update.
    """
    wanted = [step for step in case["steps"] if not step["skipped"]]
    assert len(steps) == len(wanted), f"{len(steps)} optimizer steps instead of {len(wanted)}"
    gradients = []
    changes = []
    for step, right in zip(steps, wanted):
        clipped = min(right["gradient_norm"], PAGE["max_grad_norm"])
        gradients.append(abs(step["gradient_norm"] / clipped - 1))
        changes.append(abs(step["change_norm"] / right["change_norm"] - 1))
    rollout = new_rollout(policy, settings_of(case))
    right = torch.tensor(list(itertools.chain(*case["new_logprobs"])))
    logprobs = rollout.old_logprobs[rollout.mask] - right  # of the policy as it is now
    return {
        "gradients": max(gradients),
        "changes": max(changes),
        "logprobs": float(logprobs.abs().max()),
    }


def flat_weights(policy):
    return torch.cat([weight.detach().flatten().double() for weight in policy.parameters()])


LIMITS = {"gradients": 1e-4, "changes": 1e-4, "logprobs": 1e-4}


def is_right(found):
    return all(found[name] < limit for name, limit in LIMITS.items())
