"""A designed world with a dial: where AR and Lopti win, where they change nothing, where they lose.

python data/lab/world.py                   # trains, ten minutes: world.jsonl, two pictures, a table
python data/lab/world.py --show            # pictures and table once more, from world.jsonl
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
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import scipy.stats
import torch
from matplotlib.colors import LinearSegmentedColormap

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from style import COLORS
from theory import split_gain, world_moments
from variants import random_split

import lopti

QUICK = bool(os.environ.get("LOPTI_QUICK"))
RESULTS = Path("runs/world") if QUICK else Path(__file__).resolve().parent / "results"
BLOCK = 0 if QUICK else 3  # names a set of seeds
TUNING, JUDGED = (3, 4) if QUICK else (10, 20)  # seeds that choose a rate, seeds that are judged
GROUP_SIZE, ETA, STEPS = 8, 0.5, 10 if QUICK else 40


class Method(NamedTuple):
    alpha: float = 0.0
    eta: float = 0.0
    order: str = "low-high"
    passes: int = 1
    split: object = lopti.split_tokens
    without_bias: bool = False
    oracle: bool = False  # updates the decisions only


METHODS = {
    "GRPO": Method(),
    "GRPO, two passes": Method(passes=2),
    "random split": Method(eta=ETA, split=random_split),
    "Lopti": Method(eta=ETA),
    "reversed Lopti": Method(eta=ETA, order="high-low"),
    "AR, α = .3": Method(alpha=0.3),
    "AR, α = 1": Method(alpha=1.0),
    "AR, α = 1, no bias": Method(alpha=1.0, without_bias=True),
    "oracle": Method(oracle=True),
}


@dataclass(frozen=True)
class World:
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

    def start_logits(self):
        """(R, V): the rows of the decisions (column 0 is right), then those of the wording."""
        rows = self.decisions + (1 + self.late) * self.wording
        logits = torch.full((rows, max(2, self.synonyms)), -1e9)
        logits[: self.decisions, :2] = torch.tensor([self.accuracy, 1 - self.accuracy]).log()
        favourite = self.favourite or 1 / self.synonyms
        others = [(1 - favourite) / (self.synonyms - 1)] * (self.synonyms - 1)
        logits[self.decisions :, : self.synonyms] = torch.tensor([favourite, *others]).log()
        return logits


UNIT_RATES = (0.05, 0.12, 0.3, 0.8, 2.0, 5.0, 12.0, 30.0)
ADAMW_RATES = (0.005, 0.012, 0.03, 0.08, 0.2, 0.5, 1.2, 3.0)
ALIKE = World(accuracy=0.55, synonyms=2, favourite=0.55, optimizer="one AdamW")
UNLIKELY = World(accuracy=0.1, decisions=8, synonyms=2, favourite=0.6)
GOOD = World(accuracy=0.9, synonyms=2, favourite=0.7, groups=4)
LATE = World(decisions=1, wording=64, favourite=0.5, late=True, groups=4)
WORLDS = {  # the world, its learning rates, the KL at which "equal KL" is read
    "unlikely wording, unit steps": (World(), UNIT_RATES, 15),
    "unlikely wording, one AdamW": (World(optimizer="one AdamW"), ADAMW_RATES, 10),
    "wording like decisions": (ALIKE, ADAMW_RATES, 10),
    "good policy, likely wording": (GOOD, UNIT_RATES, 5),
    "right answers are unlikely": (UNLIKELY, UNIT_RATES, 10),
    "wording follows the decision": (LATE, UNIT_RATES, 2),
}
VIEWS = ("one rate", "best rate", "equal KL")

# ---- the theorem: how far a step of given length gets, before training

PASSES = [lambda pi: (pi < ETA).double(), lambda pi: (pi >= ETA).double()]


def moments(world, weights):
    """Signals (M,) and inner products (M, M) of gradients in which a token counts m(π)."""
    words = world.start_logits()[world.decisions :][:1].softmax(-1)
    return world_moments(world, words, weights, world.groups * GROUP_SIZE, GROUP_SIZE)


def progress(world, weight=torch.ones_like):
    """⟨∇J, step⟩ of a step of unit length in which a token counts m(π)."""
    (signal,), ((square,),) = moments(world, [weight])
    return float(signal / square.sqrt())


def predicted_gain(world, name, view="equal KL"):
    """Progress over GRPO's: for each unit of length or, at one rate, for a whole batch."""
    method, gain = METHODS[name], 1.0
    length = {"random split": 2**0.5, "GRPO, two passes": 2.0}.get(name, 1.0)
    if method.oracle:
        gain = progress(replace(world, wording=0)) / progress(world)
    if method.alpha:
        of = replace(world, late=False) if method.without_bias else world  # then V(s) is 0
        gain = progress(of, lambda pi: 1 - method.alpha * (1 - pi)) / progress(world)
    if "Lopti" in name:
        signals, products = moments(world, PASSES)
        low, high = products.diagonal().sqrt().tolist()
        cosine = float(products[0, 1]) / (low * high)
        gain = split_gain(float(signals[1] / signals.sum()), math.atan2(high, low), cosine)
        gain = 1.0 if world.optimizer == "one AdamW" else gain  # then it is only a longer step
        length = math.sqrt(2 + 2 * cosine)
    return gain * length if view == "one rate" else gain


# ---- the simulation


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
    kl = (logprobs.exp() * (logprobs - world.start_logits().log_softmax(-1))).sum(-1)  # (S, R)
    if world.late:  # each branch counts as often as it is taken
        wrong_rows, right_rows = kl[:, world.decisions :].split(world.wording, 1)
        wrong_rows *= 1 - right[:, :1]
        right_rows *= right[:, :1]
    return right.mean(1), kl.sum(1)


def train(world, name, rate, steps, seeds, block):
    """Accuracies and KLs (steps + 1, S), parameters (S, P). `block` names a set of seeds."""
    method, start = METHODS[name], world.start_logits()
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

    def step():  # for every seed on its own
        if world.optimizer == "one AdamW":
            return adamw.step()
        theta.data -= rate * theta.grad / theta.grad.norm(dim=1, keepdim=True).clamp(min=1e-30)

    history = [measure(world, logits_now())]
    for _ in range(steps):
        logits = logits_now().detach()
        tokens, rows, rewards = sample(world, logits, generator)

        def logprobs_of(logits, rows=rows, tokens=tokens):  # (S·B, T)
            return logits.log_softmax(-1)[seed, rows, tokens].flatten(0, 1)

        old_logprobs = logprobs_of(logits)
        mask = torch.ones_like(old_logprobs, dtype=torch.bool)
        normalizer = mask.sum() / seeds  # the loss is a sum over seeds
        raw = lopti.group_advantages(rewards, GROUP_SIZE)[:, None] * mask
        advantages = lopti.reweight_advantages(raw, old_logprobs, method.alpha)
        low, high = method.split(old_logprobs, mask, method.eta)
        stages = lopti.update_stages(low, high, mask, method.eta, method.order)
        for stage, chosen in stages * method.passes:
            if method.oracle:
                chosen = chosen & (rows < world.decisions).flatten(0, 1)
            logits = logits_now()
            values = (logprobs_of(logits), old_logprobs, advantages, mask)
            loss, _ = lopti.policy_loss(*values, tokens=chosen, normalizer=normalizer)
            if method.without_bias:
                every = logits[seed, rows].flatten(0, 2), raw.flatten()  # of (S·B·T) tokens
                weights = method.alpha, method.eta, stage
                loss = loss + lopti.bias_correction(*every, *weights) / normalizer
            theta.grad = None
            loss.backward()
            step()
        history.append(measure(world, logits_now()))
    return *(torch.stack(values) for values in zip(*history)), theta.detach()


# ---- (a) gain: predicted against simulated


def simulated_gain(world, name, seeds=16 if QUICK else 64, blocks=2 if QUICK else 4):
    """The accuracy that one tiny batch gains for each unit of length, over GRPO's."""
    world, gains = replace(world, parameters=0, optimizer="unit steps"), []
    for one in (name, "GRPO"):
        runs = [train(world, one, 1e-5, 1, seeds, 100 + block) for block in range(blocks)]
        gained = sum(float((accuracies[1] - accuracies[0]).sum()) for accuracies, _, _ in runs)
        gains.append(gained / sum(float(theta.norm(dim=1).sum()) for _, _, theta in runs))
    return gains[0] / gains[1]


GAINS_OF = {"AR, α = 1": ("s", "#882255"), "AR, α = 1, no bias": ("^", "#CC79A7")}
GAINS_OF |= {"Lopti": ("D", COLORS["Lopti"]), "AR, α = .3": ("o", COLORS["AR"])}


def compare_gains():
    """28 worlds: how sure the policy is, how many responses there are, what the wording is."""
    wordings = [(0, 2, 0.0), (64, 2, 0.6), (100, 3, 0.0), (64, 8, 0.5), (100, 8, 0.0)]
    wordings += [(200, 32, 0.0)]
    pairs = [(p, groups) for p in (0.6, 0.9) for groups in (1, 8)]
    worlds = [World(p, 8, *words, groups=groups) for p, groups in pairs for words in wordings]
    worlds += [World(p, 2, 64, 8, 0.5, late=True, groups=groups) for p, groups in pairs]
    rows = []
    for world, name in itertools.product(worlds, GAINS_OF):
        if world.late or "no bias" not in name:
            gains = {"predicted": predicted_gain(world, name)}
            gains["simulated"] = simulated_gain(world, name)
            rows.append({"gain_of": name, "world": asdict(world), **gains})
    return rows


def draw_gains(rows):
    figure, axis = plt.subplots(figsize=(9, 9))
    axis.plot([0.3, 7], [0.3, 7], color="#999999", linewidth=1, zorder=0, label="as predicted")
    for line in (axis.axhline, axis.axvline):
        line(1, color="#cccccc", linewidth=1, zorder=0)
    for name, (mark, color) in GAINS_OF.items():
        points = [(r["predicted"], r["simulated"]) for r in rows if r["gain_of"] == name]
        axis.plot(*zip(*points), mark, label=name, color=color, markersize=9, mec="white")
    ticks = {"ticks": [0.5, 1, 2, 4], "labels": [0.5, 1, 2, 4]}
    limits = {"xscale": "log", "yscale": "log", "xlim": (0.3, 7), "ylim": (0.3, 7)}
    labels = "gain over GRPO that the theorem predicts", "gain in the simulation"
    axis.set(**limits, xlabel=labels[0], ylabel=labels[1])
    axis.set_xticks(**ticks), axis.set_yticks(**ticks)
    axis.minorticks_off()
    count = len({str(row["world"]) for row in rows})
    axis.set_title(f"How far a step of given length gets, in {count} worlds")
    axis.legend(loc="upper left", title="a mark is a world")
    figure.savefig(RESULTS / "world_gain.png")


# ---- (b) training, seen in three ways


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
    (world, rates, limit), rows = WORLDS[name], []
    for method in METHODS:
        if "no bias" in method and not world.late:
            continue  # the same to the last digit: V(s) is 0

        def at_rates(rates, method=method):  # (rates, S): the mean over the steps, and at equal KL
            runs = [train(world, method, rate, STEPS, TUNING + JUDGED, BLOCK) for rate in rates]
            mean = torch.stack([accuracies[1:].mean(0) for accuracies, _, _ in runs])
            return mean, torch.stack([at_kl(accuracies, kls, limit) for accuracies, kls, _ in runs])

        mean, equal = at_rates(rates)
        best = rates[int(equal[:, :TUNING].mean(1).argmax())]
        near = [best * 2.5**share for share in (-0.5, -0.25, 0.25, 0.5)]  # 2.5: the grid's spacing
        equal = torch.cat([equal, at_rates(near)[1]])
        for view, values in zip(VIEWS, (mean, mean, equal)):
            by_rate = values[:, :TUNING].mean(1)
            chosen = 2 if view == "one rate" else int(by_rate.argmax())
            row = {"world": name, "method": method, "view": view}
            row["rate"], row["by_rate"] = [*rates, *near][chosen], by_rate.tolist()
            rows.append({**row, "accuracies": values[chosen, TUNING:].tolist()})
    return rows


def difference(rows, name, one, other, view):
    """Accuracy of one method minus another's by seed: mean, half of its 95 % interval (Student)."""
    found = {(r["method"], r["view"]): r["accuracies"] for r in rows if r["world"] == name}
    values = torch.tensor(found[one, view]) - torch.tensor(found[other, view])
    factor = float(scipy.stats.t.ppf(0.975, len(values) - 1)) / math.sqrt(len(values))
    return float(values.mean()), factor * float(values.std())


def side(value, margin, words=("ahead", "behind", "level")):
    """Is it above the margin, below minus the margin, or between?"""
    return words[0] if value > margin else words[1] if value < -margin else words[2]


COMPARED = {  # each with these others
    "Lopti": ("GRPO", "GRPO, two passes", "random split", "reversed Lopti"),
    "AR, α = .3": ("GRPO",),
    "AR, α = 1": ("GRPO",),
    "AR, α = 1, no bias": ("AR, α = 1", "GRPO"),
    "oracle": ("GRPO",),
}


def comparison_table(rows):
    """What was predicted and what was found, for each world, comparison and view."""
    lines = [
        "| world | comparison | view | predicted | found | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for name, (world, rates, _) in WORLDS.items():
        chosen = {(r["method"], r["view"]): r["rate"] for r in rows if r["world"] == name}
        pairs = [(one, other) for one, others in COMPARED.items() for other in others]
        for one, other in pairs:
            for view in VIEWS if (one, "one rate") in chosen else ():
                gain = predicted_gain(world, one, view) / predicted_gain(world, other, view)
                mean, half = difference(rows, name, one, other, view)
                found = side(mean, half, ("ahead", "behind", "not decided"))
                at_end = {chosen[one, view], chosen[other, view]} & {rates[0], rates[-1]}
                cells = (name, f"{one} - {other}", view + " (end of the grid)" * bool(at_end))
                cells += (
                    f"{side(gain - 1, 0.05)}, {gain:.2f}",
                    f"{found}, {mean:+.3f} ± {half:.3f}",
                )
                lines.append(f"| {' | '.join(cells)} | {JUDGED} |")
    return "\n".join(lines)


TITLES = {  # of the three worlds that are drawn
    "unlikely wording, unit steps": "Unlikely words are noise:\nLopti and AR win",
    "wording like decisions": "Signal and noise sit alike:\nno gain",
    "good policy, likely wording": "Unlikely words are signal:\nLopti and AR lose",
}
DRAWN = ("AR, α = 1", "AR, α = .3", "Lopti", "random split", "GRPO, two passes")
NOTE = """Top: the mean probability of the tokens, weighted by what they add to the signal and to \
the noise. Points: accuracy
minus GRPO's at the same distance (KL) from the start, {seeds} seeds, 95 % intervals; right of \
the line is better; scales differ.
▲ = ▼: ahead, level, behind, predicted before training. Steps have a fixed length; in the middle \
world they are AdamW's."""


def draw_worlds(rows):
    """A win, a tie and a loss: where signal and noise sit, what was predicted, what was found."""
    figure, axes = plt.subplots(2, 3, figsize=(14, 8), height_ratios=(1, 3.4))
    scale = LinearSegmentedColormap.from_list("", [COLORS["low"], "white", COLORS["high"]])
    for (strip, axis), (name, title) in zip(axes.T, TITLES.items()):
        world, reach, first = WORLDS[name][0], 0.0, strip is axes[0, 0]
        signals, products = moments(world, [torch.ones_like, lambda pi: pi])
        means = (products[0, 1] / products[0, 0], signals[1] / signals[0])  # E_v[π], E_s[π]
        shades = torch.linspace(0, 1, 256)[None]
        strip.imshow(shades, scale, extent=(0, 1, -0.6, 1.6), aspect="auto", alpha=0.6)
        strip.plot(means, (0, 1), "o", color="black", markersize=12)
        strip.set_yticks((0, 1), ("noise", "signal") if first else ("", ""))
        strip.set_xticks((0.05, 0.95), ("unlikely", "likely"))
        strip.tick_params(length=0)
        strip.set_title(title, fontsize=19)
        axis.axvline(0, color="black", linewidth=1.5)
        for height, method in enumerate(DRAWN):
            mean, half = difference(rows, name, method, "GRPO", "equal KL")
            color = "black" if height < 3 else "#888888"  # the last two are controls
            style = {"color": color, "markersize": 10, "capsize": 5}
            axis.errorbar(mean, height, xerr=half, fmt="o", **style)
            reach = max(reach, 1.15 * (abs(mean) + half))
            arrow = side(predicted_gain(world, method) - 1, 0.05, ("▲", "▼", "="))
            axis.text(1.02, height, arrow, va="center", transform=axis.get_yaxis_transform())
        axis.set_yticks(range(len(DRAWN)), DRAWN if first else [""] * len(DRAWN))
        axis.set(xlim=(-reach, reach), ylim=(-0.5, len(DRAWN) - 0.5))
        axis.locator_params(axis="x", nbins=5)
        axis.set_xlabel("accuracy minus GRPO's")
    figure.supxlabel(NOTE.format(seeds=JUDGED), fontsize=14, ha="left", x=0.01)
    figure.savefig(RESULTS / "world.png")


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    RESULTS.mkdir(parents=True, exist_ok=True)
    file, started = RESULTS / "world.jsonl", time.time()
    if "--show" not in sys.argv:
        rows = compare_gains()
        print(f"predicted and simulated gains: {time.time() - started:.0f} s", flush=True)
        for name in WORLDS:
            rows += train_methods(name)
            print(f"{name}: {time.time() - started:.0f} s", flush=True)
        short = partial(json.loads, parse_float=lambda number: round(float(number), 4))
        lines = [json.dumps(short(json.dumps(row)), ensure_ascii=False) + "\n" for row in rows]
        file.write_text("".join(lines), encoding="utf-8")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    draw_gains([row for row in rows if "gain_of" in row])
    training = [row for row in rows if "view" in row]
    draw_worlds(training)
    print(comparison_table(training))


if __name__ == "__main__":
    main()
