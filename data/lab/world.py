"""A designed world with a dial: where AR and Lopti win, where they change nothing, where they lose.

python data/lab/world.py                   # trains, ten minutes: world.jsonl, a picture, a table
python data/lab/world.py --show            # picture and table once more, from world.jsonl
LOPTI_QUICK=1 python data/lab/world.py     # few seeds and steps, into runs/world: a minute

The worlds are BUILT so that the paper's premise holds, or does not. They show that the methods can
help, when, and why. They do not show that a language model is such a world.

An answer has D decisions, each right with probability p; the reward is the number of right ones. It
also has W wording tokens, each one of K synonyms, which do not touch the reward. Every position has
its own logits. All logits depend on the same few parameters through random features, so that a
drift of the wording disturbs the decisions, as in a network. Advantages, reweighting, split, stages
and loss are lopti's own. Many seeds are trained at once. Shapes: S seeds, B responses, T tokens of
a response, R rows of logits, V words.
"""

import itertools
import json
import math
import os
import sys
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from analysis import interval
from experiments import read_lines
from plot import COLORS
from theory import split_gain, world_moments
from variants import random_split

import lopti

QUICK = bool(os.environ.get("LOPTI_QUICK"))
RESULTS = Path("runs/world") if QUICK else Path(__file__).resolve().parent / "results"
BLOCK = 0 if QUICK else 3  # names a set of seeds
TUNING, JUDGED = (3, 4) if QUICK else (10, 20)  # seeds that choose a rate, seeds that are judged
GROUP_SIZE, STEPS = 8, 10 if QUICK else 40
METHODS = {  # α, η, Lopti's order, passes over a batch
    "GRPO": (0.0, 0.0, "low-high", 1),
    "GRPO, two passes": (0.0, 0.0, "low-high", 2),
    "random split": (0.0, 0.5, "low-high", 1),
    "Lopti": (0.0, 0.5, "low-high", 1),
    "reversed Lopti": (0.0, 0.5, "high-low", 1),
    "AR, α = .3": (0.3, 0.0, "low-high", 1),
    "AR, α = 1": (1.0, 0.0, "low-high", 1),
    "AR, α = 1, no bias": (1.0, 0.0, "low-high", 1),
    "oracle": (0.0, 0.0, "low-high", 1),  # updates the decisions only
}
COMPARED = [("Lopti", name) for name in list(METHODS)[:3]] + [("Lopti", "reversed Lopti")]
COMPARED += [("AR, α = .3", "GRPO"), ("AR, α = 1", "GRPO"), ("AR, α = 1, no bias", "AR, α = 1")]
COMPARED += [("AR, α = 1, no bias", "GRPO"), ("oracle", "GRPO")]


class World(NamedTuple):
    """The dials."""

    accuracy: float = 0.6  # p, before training
    decisions: int = 4  # D
    wording: int = 128  # W
    synonyms: int = 8  # K
    favourite: float = 0.0  # the probability of one synonym; 0: all are equally likely
    late: bool = False  # the wording has other logits where the first decision was right
    groups: int = 1  # groups of 8 responses for each step
    optimizer: str = "unit steps"  # or "one AdamW"
    parameters: int = 32  # that all logits share; 0: a table of logits, nothing is shared


RATES = {"unit steps": (0.05, 0.12, 0.3, 0.8, 2.0, 5.0, 12.0, 30.0)}
RATES["one AdamW"] = tuple(rate / 10 for rate in RATES["unit steps"])
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
    favourite = world.favourite or 1 / world.synonyms
    others = [(1 - favourite) / (world.synonyms - 1)] * (world.synonyms - 1)
    logits[world.decisions :, : world.synonyms] = torch.tensor([favourite, *others]).log()
    return logits


def moments(world, *weights):
    """Signals (M,) and inner products (M, M) of gradients in which a token counts m(π)."""
    words = start_logits(world)[world.decisions :][:1].softmax(-1)
    return world_moments(world, words, weights, world.groups * GROUP_SIZE, GROUP_SIZE)


def predicted_gain(world, name):
    """Progress for each unit of length, over GRPO's."""
    (alpha, eta, *_), of = METHODS[name], world
    if "Lopti" in name and world.optimizer == "unit steps":
        passes = (lambda pi: (pi < eta).double()), (lambda pi: (pi >= eta).double())
        signals, products = moments(world, *passes)
        low, high = products.diagonal().sqrt().tolist()
        cosine = float(products[0, 1]) / (low * high)
        return split_gain(float(signals[1] / signals.sum()), math.atan2(high, low), cosine)
    if name == "oracle":
        of = world._replace(wording=0)
    if "no bias" in name:
        of = world._replace(late=False)  # then V(s) is 0
    (signal,), ((square,),) = moments(of, lambda pi: 1 - alpha * (1 - pi))
    (plain,), ((noise,),) = moments(world, torch.ones_like)
    return float(signal / plain * (noise / square).sqrt())  # 1 of two steps with one AdamW


def sample(world, logits, generator):
    """One batch: tokens and their rows (S, B, T), rewards (S·B,)."""
    seeds, count = len(logits), world.groups * GROUP_SIZE
    uniform = torch.rand(seeds, logits.shape[1], count, generator=generator)
    drawn = torch.searchsorted(logits.softmax(-1).cumsum(-1), uniform)  # in every row (S, R, B)
    drawn = drawn.clamp(max=logits.shape[2] - 1).transpose(1, 2)
    right = drawn[..., : world.decisions] == 0
    rows = torch.arange(world.decisions + world.wording).repeat(seeds, count, 1)
    if world.late:
        rows[..., world.decisions :] += right[..., :1] * world.wording
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


def train(world, name, rate, steps, seeds, block):
    """Accuracies and KLs (steps + 1, S), parameters (S, P). `block` names a set of seeds."""
    (alpha, eta, order, passes), start = METHODS[name], start_logits(world)
    split = random_split if name == "random split" else lopti.split_tokens
    torch.manual_seed(block)  # for the random split
    generator = torch.Generator().manual_seed(block)  # the same for all methods
    theta = torch.zeros(seeds, world.parameters or start.numel(), requires_grad=True)
    if world.parameters:
        features = torch.randn(seeds, start.numel(), world.parameters, generator=generator)
        features /= world.parameters**0.5
    seed, adamw = torch.arange(seeds)[:, None, None], torch.optim.AdamW([theta], lr=rate)

    def logits_now():  # (S, R, V)
        moved = (features @ theta[..., None]) if world.parameters else theta
        return start + moved.view(seeds, *start.shape)

    history = [measure(world, logits_now())]
    for _ in range(steps):
        tokens, rows, rewards = sample(world, logits_now().detach(), generator)
        here = seed, rows, tokens
        old_logprobs = logits_now().detach().log_softmax(-1)[here].flatten(0, 1)  # (S·B, T)
        mask = torch.ones_like(old_logprobs, dtype=torch.bool)
        raw = lopti.group_advantages(rewards, GROUP_SIZE)[:, None] * mask
        advantages = lopti.reweight_advantages(raw, old_logprobs, alpha)
        low, high = split(old_logprobs, mask, eta)
        for stage, chosen in lopti.update_stages(low, high, mask, eta, order) * passes:
            if name == "oracle":
                chosen = chosen & (rows < world.decisions).flatten(0, 1)
            logits, theta.grad = logits_now(), None
            values = logits.log_softmax(-1)[here].flatten(0, 1), old_logprobs, advantages, mask
            count = mask.sum() / seeds  # the loss is a sum over seeds
            loss, _ = lopti.policy_loss(*values, tokens=chosen, normalizer=count)
            if "no bias" in name:
                every = logits[seed, rows].flatten(0, 2), raw.flatten()  # of (S·B·T) tokens
                loss = loss + lopti.bias_correction(*every, alpha, eta, stage) / count
            loss.backward()
            if world.optimizer == "one AdamW":
                adamw.step()
            else:  # a step of length `rate` for each seed
                length = theta.grad.norm(dim=1, keepdim=True).clamp(min=1e-30)
                theta.data -= rate * theta.grad / length
        history.append(measure(world, logits_now()))
    return *(torch.stack(values) for values in zip(*history)), theta.detach()


def at_kl(accuracies, kls, limit):
    """The accuracy (S,) where the KL first passes the limit, linear between steps, or the last."""
    before = ((kls <= limit).long().cumprod(0).sum(0) - 1)[None]  # the last step below it
    after = (before + 1).clamp(max=len(kls) - 1)
    low, high = kls.gather(0, before), kls.gather(0, after)
    share = ((limit - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    return torch.lerp(accuracies.gather(0, before), accuracies.gather(0, after), share)[0]


def train_methods(name):
    """Rows: world, method, view, rate, accuracies of judged seeds. Other seeds choose the rate.

    For equal KL four more rates around the best are tried, because it depends on the rate sharply.
    """
    world, limit = WORLDS[name]
    rates = RATES[world.optimizer]
    for method in METHODS:
        if "no bias" in method and not world.late:
            continue  # the same to the last digit: V(s) is 0

        def run(rate, method=method):  # accuracies (S,): the mean over the steps, and at equal KL
            accuracies, kls, _ = train(world, method, rate, STEPS, TUNING + JUDGED, BLOCK)
            return accuracies[1:].mean(0), at_kl(accuracies, kls, limit)

        runs = {rate: run(rate) for rate in rates}
        best = max(rates, key=lambda rate: runs[rate][1][:TUNING].mean())
        near = [best * 2.5**share for share in (-0.5, -0.25, 0.25, 0.5)]  # 2.5: the grid's spacing
        runs |= {rate: run(rate) for rate in near}
        views = {"one rate": (0, rates[2:3]), "best rate": (0, rates), "equal KL": (1, runs)}
        for view, (at, tried) in views.items():
            by_rate = torch.stack([runs[rate][at][:TUNING].mean() for rate in tried])
            rate = list(tried)[int(by_rate.argmax())]
            row = {"world": name, "method": method, "view": view, "rate": round(rate, 4)}
            row["by_rate"] = by_rate.round(decimals=4).tolist()
            yield row | {"accuracies": runs[rate][at][TUNING:].round(decimals=4).tolist()}


def difference(found, name, one, other, view):
    """Accuracy of one method minus another's by seed: mean, half of its 95 % interval."""
    pair = [found[name, method, view]["accuracies"] for method in (one, other)]
    return interval([a - b for a, b in zip(*pair)])


def print_table(found):
    print(f"Accuracy of one method minus another's, {JUDGED} seeds; °: a rate at the grid's end.\n")
    print("| world | comparison | predicted gain | one rate | best rate | equal KL |")
    print("|---|---|---|---|---|---|")
    for (name, (world, _)), (one, other) in itertools.product(WORLDS.items(), COMPARED):
        if (name, one, "equal KL") in found:
            gain = predicted_gain(world, one) / predicted_gain(world, other)
            cells, ends = [name, f"{one} - {other}", f"{gain:.2f}"], RATES[world.optimizer][::7]
            for view in ("one rate", "best rate", "equal KL"):
                at_end = any(found[name, method, view]["rate"] in ends for method in (one, other))
                mean, half = difference(found, name, one, other, view)
                cells.append(f"{mean:+.3f} ± {half:.3f}{'°' * at_end}")
            print(f"| {' | '.join(cells)} |")


DRAWN = ("AR, α = 1", "AR, α = .3", "Lopti", "random split", "GRPO, two passes")
TITLES = {  # of the three worlds that are drawn
    "unlikely wording, unit steps": "Unlikely words are noise:\nLopti and AR win",
    "wording like decisions": "Signal and noise sit alike:\nno gain",
    "good policy, likely wording": "Unlikely words are signal:\nLopti and AR lose",
}
NOTE = f"""Points: accuracy minus GRPO's at the same distance (KL) from the start, {JUDGED} seeds, \
95 % intervals; scales differ.
Numbers: the gain over GRPO that was predicted before training; 1 is none. Steps have a fixed \
length; in the middle AdamW's."""


def draw_worlds(found):
    """A win, a tie and a loss: where signal and noise sit, what was predicted, what was found."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 7), sharey=True)
    for axis, (name, title) in zip(axes, TITLES.items()):
        (world, _), reach = WORLDS[name], 0.0
        signals, products = moments(world, torch.ones_like, lambda pi: pi)
        by_signal, by_noise = signals[1] / signals[0], products[0, 1] / products[0, 0]
        for height, method in enumerate(DRAWN):
            mean, half = difference(found, name, method, "GRPO", "equal KL")
            style = {"color": COLORS["Lopti"] if height < 3 else COLORS["GRPO"], "capsize": 5}
            axis.errorbar(mean, height, xerr=half, fmt="o", markersize=10, **style)
            bound = "≤ " * (height > 2)  # of plain passes and random groups (DESIGN.md)
            gain = f"{bound}{predicted_gain(world, method):.2f}"
            place = axis.get_yaxis_transform()
            axis.text(0.99, height, gain, ha="right", va="center", transform=place)
            reach = max(reach, 1.9 * (abs(mean) + half))
        axis.text(0.99, 4.35, "predicted", ha="right", va="center", transform=place)
        axis.axvline(0, color="black", linewidth=1.5)
        axis.set(xlim=(-reach, reach), ylim=(-0.5, 4.7), xlabel="accuracy minus GRPO's")
        axis.set_title(f"{title}\nmean π: signal {by_signal:.2f}, noise {by_noise:.2f}")
        axis.set_yticks(range(len(DRAWN)), DRAWN)
        axis.locator_params(axis="x", nbins=5)
    figure.supxlabel(NOTE, fontsize=14, ha="left", x=0.01)
    figure.savefig(RESULTS / "world.png")


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = RESULTS / "world.jsonl"
    if "--show" not in sys.argv:
        rows = (row for name in tqdm(WORLDS, disable=None) for row in train_methods(name))
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        file.write_text("".join(lines), encoding="utf-8")
    found = {(row["world"], row["method"], row["view"]): row for row in read_lines(file)}
    draw_worlds(found)
    print_table(found)


if __name__ == "__main__":
    main()
