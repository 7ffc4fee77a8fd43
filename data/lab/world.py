"""A designed world with a dial: where AR and Lopti win, where they change nothing, where they lose.

    python data/lab/world.py     # ten minutes: results/world.jsonl

plot.py draws world.jsonl, analysis.py makes the table of it.

The worlds are BUILT so that the paper's premise holds, or does not. They show that the methods can
help, when, and why. They do not show that a language model is such a world.

An answer has D decisions, each right with probability p; the reward is the number of right ones. It
also has W words, each one of K synonyms, which do not touch the reward. All logits depend on the
same few parameters through random features: a drift of the words disturbs the decisions, as in a
network. Advantages, split, loss are lopti's. S seeds, B responses, T tokens, R logit rows, V words.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti  # isort: skip, before torch

import numpy as np
import theory
import torch
from tqdm import tqdm
from variants import random_split

GROUP_SIZE = 8
METHODS = {  # α, η, Lopti's order, passes over a batch
    "GRPO": (0.0, 0.0, "low-high", 1),
    "GRPO, two passes": (0.0, 0.0, "low-high", 2),
    "random split": (0.0, 0.5, "low-high", 1),
    "Lopti": (0.0, 0.5, "low-high", 1),
    "reversed Lopti": (0.0, 0.5, "high-low", 1),
    "AR, α = .3": (0.3, 0.0, "low-high", 1),
    "AR, α = 1": (1.0, 0.0, "low-high", 1),
    "AR, α = 1, no bias": (1.0, 0.0, "low-high", 1),
    "AR, measured α": (0.0, 0.0, "low-high", 1),
    "oracle": (0.0, 0.0, "low-high", 1),  # updates the decisions only
}


class World(NamedTuple):  # the dials
    accuracy: float = 0.6  # p, before training
    decisions: int = 4  # D
    wording: int = 128  # W
    synonyms: int = 8  # K
    favourite: float = 0.0  # the probability of one synonym; 0: all are equally likely
    late: bool = False  # the wording has other logits where the first decision was right
    groups: int = 1  # groups of 8 responses for each step
    optimizer: str = "unit steps"  # or "one AdamW"
    parameters: int = 32  # that all logits share; 0: a table of logits, nothing is shared


WORLDS = {  # and the KL at which "equal KL" is read
    "unlikely wording, unit steps": (World(), 15),
    "unlikely wording, one AdamW": (World(optimizer="one AdamW"), 10),
    "wording like decisions": (World(0.55, 4, 128, 2, 0.55, optimizer="one AdamW"), 10),
    "good policy, likely wording": (World(0.9, 4, 128, 2, 0.7, groups=4), 5),
    "right answers are unlikely": (World(0.1, 8, 128, 2, 0.6), 10),
    "wording follows the decision": (World(0.6, 1, 64, 8, 0.5, late=True, groups=4), 2),
}


def start_logits(world):
    """(R, V): the rows of the decisions (column 0 is right), then those of the wording."""
    rows = world.decisions + (1 + world.late) * world.wording
    logits = torch.full((rows, max(2, world.synonyms)), -1e9)
    logits[: world.decisions, :2] = torch.tensor([world.accuracy, 1 - world.accuracy]).log()
    favourite, others = world.favourite or 1 / world.synonyms, world.synonyms - 1
    words = torch.tensor([favourite, *[(1 - favourite) / others] * others])
    logits[world.decisions :, : world.synonyms] = words.log()
    return logits


def sample(world, logits, generator):
    """One batch: tokens and their rows (S, B, T), rewards (S·B,)."""
    seeds, count = len(logits), world.groups * GROUP_SIZE
    uniform = torch.rand(seeds, logits.shape[1], count, generator=generator)
    drawn = torch.searchsorted(logits.softmax(-1).cumsum(-1), uniform)  # in every row (S, R, B)
    drawn = drawn.clamp(max=logits.shape[2] - 1).transpose(1, 2)
    right = drawn[..., : world.decisions] == 0
    rows = torch.arange(world.decisions + world.wording).repeat(seeds, count, 1)
    rows[..., world.decisions :] += world.late * right[..., :1] * world.wording
    return drawn.gather(2, rows), rows, right.sum(-1).flatten().double()


def measure(world, logits):
    """Accuracy (S,) and KL to the start (S,) of a whole answer, both exact."""
    logprobs = logits.detach().log_softmax(-1)
    right = logprobs[:, : world.decisions, 0].exp()  # (S, D)
    kl = (logprobs.exp() * (logprobs - start_logits(world).log_softmax(-1))).sum(-1)  # (S, R)
    if world.late:  # each branch counts as often as it is taken
        kl[:, world.decisions : -world.wording] *= 1 - right[:, :1]
        kl[:, -world.wording :] *= right[:, :1]
    return right.mean(1), kl.sum(1)


def loss_of(logits, batch, chosen, eta, stage, alpha, without_bias):
    """Eq. 1 on the chosen tokens of a batch: a sum over seeds of their means."""
    seed, rows, tokens, old_logprobs, raw = batch
    logprobs, mask = logits.log_softmax(-1)[seed, rows, tokens].flatten(0, 1), raw.isfinite()
    advantages, count = lopti.reweight_advantages(raw, old_logprobs, alpha), mask.sum() / len(seed)
    values = logprobs, old_logprobs, advantages, mask
    loss, _ = lopti.policy_loss(*values, tokens=chosen, normalizer=count)
    if without_bias:
        every = logits[seed, rows].flatten(0, 2), raw.flatten()  # of (S·B·T) tokens
        loss = loss + lopti.bias_correction(*every, alpha, eta, stage) / count
    return loss


def train(world, name, rate, steps, seeds, block):
    """Accuracies, KLs (steps + 1, S), parameters (S, P): arrays. `block` names a set of seeds."""
    (alpha, eta, order, passes), start = METHODS[name], start_logits(world)
    split = random_split if name == "random split" else lopti.split_tokens
    torch.manual_seed(block)  # for the random split
    generator = torch.Generator().manual_seed(block)  # the same for all methods
    features = torch.eye(start.numel()).expand(seeds, -1, -1)
    if world.parameters:
        features = torch.randn(seeds, start.numel(), world.parameters, generator=generator)
        features /= world.parameters**0.5
    theta = torch.zeros(seeds, features.shape[2], requires_grad=True)
    make_optimizer = torch.optim.AdamW if world.optimizer == "one AdamW" else torch.optim.SGD
    optimizer, seed = make_optimizer([theta], lr=rate), torch.arange(seeds)[:, None, None]

    def logits_now():  # (S, R, V)
        return start + (features @ theta[..., None]).view(seeds, *start.shape)

    history, measured = [measure(world, logits_now())], theory.MeasuredAlpha()
    for _ in range(steps):
        tokens, rows, rewards = sample(world, logits_now().detach(), generator)
        old_logprobs = logits_now().detach().log_softmax(-1)[seed, rows, tokens].flatten(0, 1)
        mask = torch.ones_like(old_logprobs, dtype=torch.bool)  # (S·B, T)
        raw = lopti.group_advantages(rewards, GROUP_SIZE)[:, None] * mask
        batch = seed, rows, tokens, old_logprobs, raw
        low, high = split(old_logprobs, mask, eta)
        for stage, chosen in lopti.update_stages(low, high, mask, eta, order) * passes:
            if name == "oracle":
                chosen = chosen & (rows < world.decisions).flatten(0, 1)
            settings = batch, chosen, eta, stage
            loss = loss_of(logits_now(), *settings, alpha, without_bias="no bias" in name)
            [theta.grad] = torch.autograd.grad(loss, theta)
            if "measured" in name:
                [by_pi] = torch.autograd.grad(loss_of(logits_now(), *settings, 1.0, True), theta)
                theta.grad, _ = measured(theta.grad, by_pi)
            if world.optimizer == "unit steps":  # of length `rate` for each seed
                theta.grad = torch.nn.functional.normalize(theta.grad)
            optimizer.step()
        history.append(measure(world, logits_now()))
    return *(torch.stack(values).numpy() for values in zip(*history)), theta.detach().numpy()


# ---- Every method at many rates

FILE = Path(__file__).with_name("results") / "world.jsonl"
BLOCK = 3  # names a set of seeds
TUNING, JUDGED, STEPS = 10, 20, 40  # seeds that choose a rate, those that are judged; steps
RATES = {"unit steps": (0.05, 0.12, 0.3, 0.8, 2.0, 5.0, 12.0, 30.0)}
RATES["one AdamW"] = tuple(rate / 10 for rate in RATES["unit steps"])


def outcomes(of, method, rate, limit):
    """(2, S): the mean accuracy over the steps, and that where the KL first passes the limit."""
    accuracies, kls, _ = train(of, method, rate, STEPS, TUNING + JUDGED, BLOCK)
    kls = np.maximum.accumulate(kls)
    at_limit = [np.interp(limit, *seed) for seed in zip(kls.T, accuracies.T)]  # or at the end
    return np.stack([accuracies[1:].mean(0), at_limit])


def train_methods(name):
    """Rows: world, method, view, rate, accuracies of judged seeds. Other seeds choose the rate.

    For equal KL four more rates around the best are tried, because it depends on the rate sharply.
    """
    of, limit = WORLDS[name]
    rates = RATES[of.optimizer]
    for method in METHODS:
        if "no bias" in method and not of.late:
            continue  # the same to the last digit: V(s) is 0
        runs = {rate: outcomes(of, method, rate, limit) for rate in rates}
        best = max(rates, key=lambda rate: runs[rate][1][:TUNING].mean())
        near = [best * 2.5**share for share in (-0.5, -0.25, 0.25, 0.5)]  # 2.5: the grid's spacing
        runs |= {rate: outcomes(of, method, rate, limit) for rate in near}
        views = {"one rate": (0, rates[2:3]), "best rate": (0, rates), "equal KL": (1, runs)}
        for view, (at, tried) in views.items():
            rate = max(tried, key=lambda rate: runs[rate][at][:TUNING].mean())
            row = {"world": name, "method": method, "view": view, "rate": round(rate, 4)}
            yield row | {"accuracies": runs[rate][at][TUNING:].round(4).tolist()}


def main():
    look = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=look).parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    rows = [row for name in tqdm(WORLDS, disable=None) for row in train_methods(name)]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    FILE.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
