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

import json
import math
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import scipy.stats
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from style import COLORS
from theory import split_gain
from variants import random_split

import lopti

QUICK = bool(os.environ.get("LOPTI_QUICK"))
RESULTS = Path("runs/world") if QUICK else Path(__file__).resolve().parent / "results"
BLOCK = 0 if QUICK else 3  # names a set of seeds
TUNING, JUDGED = (3, 4) if QUICK else (10, 20)  # seeds that choose a rate, seeds that are judged
GROUP_SIZE, ETA, STEPS = 8, 0.5, 10 if QUICK else 40
PLAIN = {"alpha": 0.0, "eta": 0.0, "order": "low-high", "passes": 1, "split": lopti.split_tokens}
PLAIN |= {"without_bias": False, "oracle": False}
METHODS = {
    "GRPO": {},
    "GRPO, two passes": {"passes": 2},
    "random split": {"eta": ETA, "split": random_split},
    "Lopti": {"eta": ETA},
    "reversed Lopti": {"eta": ETA, "order": "high-low"},
    "AR, α = .3": {"alpha": 0.3},
    "AR, α = 1": {"alpha": 1.0},
    "AR, α = 1, no bias": {"alpha": 1.0, "without_bias": True},
    "oracle": {"oracle": True},  # updates the decisions only
}
POINTS = {"AR, α = 1": "#882255", "AR, α = 1, no bias": "#CC79A7", "Lopti": COLORS["Lopti"]}
POINTS["AR, α = .3"] = COLORS["AR"]


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
    optimizer: str = "unit steps"  # or "one AdamW" or "an AdamW for each pass"
    parameters: int = 32  # that all logits share; 0: a table of logits, nothing is shared


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


def start_logits(world):
    """(R, V): the rows of the decisions (column 0 is right), then those of the wording."""
    words, p = max(2, world.synonyms), world.accuracy
    logits = torch.full((world.decisions + (1 + world.late) * world.wording, words), -1e9)
    logits[: world.decisions, :2] = torch.tensor([p, 1 - p]).log()
    favourite = world.favourite or 1 / world.synonyms
    others = [(1 - favourite) / (world.synonyms - 1)] * (world.synonyms - 1)
    logits[world.decisions :, : world.synonyms] = torch.tensor([favourite, *others]).log()
    return logits


# --------------------------------------------------------------------------------------------------
# The theorem: how far a step of given length gets, before training


def signals_and_products(world, weights):
    """For gradients in which a token counts m(π): their signals (M,), inner products (M, M).

    Advantages add up to 0 in a group. So the noise of a row is a variance: the second moment of
    m(e - π) minus its mean's square. Two passes share noise where both move the same row.
    """
    p, n = torch.tensor(world.accuracy), world.groups * GROUP_SIZE
    signals = torch.stack([(1 - p) * m(p) + p * m(1 - p) for m in weights])
    # A group's own mean and deviation take (1 - 1/G) and (1 - 1/4(G-1))² from the mean gradient.
    mean_part = (1 - 1 / GROUP_SIZE) * (1 - 1 / (4 * GROUP_SIZE - 4)) ** 2 - 1 / n
    products = 2 * p * (1 - p) * mean_part * torch.outer(signals, signals)
    rows = [(world.decisions, 1.0, torch.stack([p, 1 - p]))]
    branches = (p, 1 - p) if world.late else (1.0,)  # how often a row of wording is visited
    if world.wording:
        rows += [(world.wording, v, start_logits(world)[-1].softmax(-1)) for v in branches]
    for number, (count, visits, pi) in enumerate(rows):
        scores, weighted = torch.eye(len(pi)) - pi, torch.stack([m(pi) for m in weights])
        means = (weighted * pi) @ scores  # Σ_a m π (e_a - π) = ∇ Σ m π
        second = (weighted * pi * scores.square().sum(1)) @ weighted.T
        products += count / n * (visits * second - visits**2 * means @ means.T)
        if number and world.late:  # the bias: V(s) ∇ Σ m π at every wording token
            products += count * p * (1 - p) / world.decisions * mean_part * means @ means.T
    return signals, products


def progress(world, weight=torch.ones_like):
    """⟨∇J, step⟩ of a step of unit length in which a token counts m(π)."""
    (signal,), ((square,),) = signals_and_products(world, [weight])
    return float(signal / square.sqrt())


def predicted_gain(world, method, view="equal KL"):
    """Progress over GRPO's: for each unit of length or, at one rate, for a whole batch."""
    settings = SimpleNamespace(**PLAIN | METHODS[method])
    gain, length = 1.0, {"random split": 2**0.5, "GRPO, two passes": 2.0}.get(method, 1.0)
    if settings.oracle:
        gain = progress(replace(world, wording=0)) / progress(world)
    if settings.alpha:
        of = replace(world, late=False) if settings.without_bias else world  # then V(s) is 0
        gain = progress(of, lambda pi: 1 - settings.alpha * (1 - pi)) / progress(world)
    if "Lopti" in method:
        passes = [lambda pi: (pi < ETA).double(), lambda pi: (pi >= ETA).double()]
        signals, products = signals_and_products(world, passes)
        low, high = products.diagonal().sqrt().tolist()
        cosine = float(products[0, 1]) / (low * high)
        gain = split_gain(float(signals[1] / signals.sum()), math.atan2(high, low), cosine)
        gain = 1.0 if world.optimizer == "one AdamW" else gain  # then it is only a longer step
        length = math.sqrt(2 + 2 * cosine)
    return gain * length if view == "one rate" else gain


# --------------------------------------------------------------------------------------------------
# The simulation


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


def measure(world, logits, start):
    """Accuracy (S,) and KL to the start (S,) of a whole answer, both exact."""
    logprobs = logits.detach().log_softmax(-1)
    right = logprobs[:, : world.decisions, 0].exp()  # (S, D)
    kl = (logprobs.exp() * (logprobs - start.log_softmax(-1))).sum(-1)  # (S, R)
    if world.late:  # each branch counts as often as it is taken
        wrong_rows, right_rows = kl[:, world.decisions :].split(world.wording, 1)
        wrong_rows *= 1 - right[:, :1]
        right_rows *= right[:, :1]
    return right.mean(1), kl.sum(1)


def optimizer_step(world, theta, rate, optimizers, stage):
    """One step for every seed on its own."""
    if world.optimizer == "unit steps":
        theta.data -= rate * theta.grad / theta.grad.norm(dim=1, keepdim=True).clamp(min=1e-30)
        return
    key = stage if world.optimizer == "an AdamW for each pass" else "all"
    optimizers.setdefault(key, torch.optim.AdamW([theta], lr=rate)).step()


def train(world, method, rate, steps, seeds, block):
    """Accuracies and KLs (steps + 1, S), parameters (S, P). `block` names a set of seeds."""
    settings = SimpleNamespace(**PLAIN | METHODS[method])
    torch.manual_seed(block)  # for the random split
    generator = torch.Generator().manual_seed(block)  # the same for all methods
    start, optimizers, history = start_logits(world), {}, []
    theta = torch.zeros(seeds, world.parameters or start.numel(), requires_grad=True)
    if world.parameters:
        features = torch.randn(seeds, start.numel(), world.parameters, generator=generator)
        features /= world.parameters**0.5
    seed = torch.arange(seeds)[:, None, None]

    def logits_now():  # (S, R, V)
        moved = (features @ theta[..., None]) if world.parameters else theta
        return start + moved.view(seeds, *start.shape)

    for _ in range(steps):
        logits = logits_now().detach()
        history.append(measure(world, logits, start))
        tokens, rows, rewards = sample(world, logits, generator)
        old_logprobs = logits.log_softmax(-1)[seed, rows, tokens].flatten(0, 1)  # (S·B, T)
        mask = torch.ones_like(old_logprobs, dtype=torch.bool)
        normalizer = mask.sum() / seeds  # the loss is a sum over seeds
        raw = lopti.group_advantages(rewards, GROUP_SIZE)[:, None] * mask
        advantages = lopti.reweight_advantages(raw, old_logprobs, settings.alpha)
        low, high = settings.split(old_logprobs, mask, settings.eta)
        stages = lopti.update_stages(low, high, mask, settings.eta, settings.order)
        for stage, chosen in stages * settings.passes:
            if settings.oracle:
                chosen = chosen & (rows < world.decisions).flatten(0, 1)
            logits = logits_now()
            logprobs = logits.log_softmax(-1)[seed, rows, tokens].flatten(0, 1)
            values = (logprobs, old_logprobs, advantages, mask)
            loss, _ = lopti.policy_loss(*values, tokens=chosen, normalizer=normalizer)
            if settings.without_bias:
                every = logits[seed, rows].flatten(0, 2), raw.flatten()  # of (S·B·T) tokens
                weights = settings.alpha, settings.eta, stage
                loss = loss + lopti.bias_correction(*every, *weights) / normalizer
            theta.grad = None
            loss.backward()
            optimizer_step(world, theta, rate, optimizers, stage)
    history.append(measure(world, logits_now(), start))
    accuracies, kls = (torch.stack(values) for values in zip(*history))
    return accuracies, kls, theta.detach()


# --------------------------------------------------------------------------------------------------
# (a) Gain: predicted against simulated


def simulated_gain(world, method, seeds=16 if QUICK else 64, blocks=2 if QUICK else 4):
    """The accuracy that one tiny batch gains for each unit of length, over GRPO's."""
    world, gains = replace(world, parameters=0, optimizer="unit steps"), []
    for one in (method, "GRPO"):
        runs = [train(world, one, 1e-5, 1, seeds, 100 + block) for block in range(blocks)]
        gained = sum(float((accuracies[1] - accuracies[0]).sum()) for accuracies, _, _ in runs)
        gains.append(gained / sum(float(theta.norm(dim=1).sum()) for _, _, theta in runs))
    return gains[0] / gains[1]


def compare_gains():
    """28 worlds: how sure the policy is, how many responses there are, what the wording is."""
    wordings = [(0, 2, 0.0), (64, 2, 0.6), (100, 3, 0.0), (64, 8, 0.5), (100, 8, 0.0)]
    wordings += [(200, 32, 0.0)]
    pairs = [(p, groups) for p in (0.6, 0.9) for groups in (1, 8)]
    worlds = [World(p, 8, *words, groups=groups) for p, groups in pairs for words in wordings]
    worlds += [World(p, 2, 64, 8, 0.5, late=True, groups=groups) for p, groups in pairs]
    rows = []
    for world in worlds:
        for method in POINTS:
            if world.late or "no bias" not in method:
                gains = {"predicted": predicted_gain(world, method)}
                gains["simulated"] = simulated_gain(world, method)
                rows.append({"gain_of": method, "world": vars(world), **gains})
    return rows


def draw_gains(rows):
    figure, axis = plt.subplots(figsize=(9, 9))
    axis.plot([0.3, 7], [0.3, 7], color="#999999", linewidth=1, zorder=0, label="as predicted")
    for line in (axis.axhline, axis.axvline):
        line(1, color="#cccccc", linewidth=1, zorder=0)
    for (method, color), mark in zip(POINTS.items(), "s^Do"):
        points = [(r["predicted"], r["simulated"]) for r in rows if r["gain_of"] == method]
        axis.plot(*zip(*points), mark, label=method, color=color, markersize=9, mec="white")
    ticks = [0.5, 1, 2, 4]
    axis.set(xscale="log", yscale="log", xlim=(0.3, 7), ylim=(0.3, 7))
    axis.set_xticks(ticks, ticks), axis.set_yticks(ticks, ticks)
    axis.minorticks_off()
    axis.set(xlabel="gain over GRPO that the theorem predicts", ylabel="gain in the simulation")
    count = len({str(row["world"]) for row in rows})
    axis.set_title(f"How far a step of given length gets, in {count} worlds")
    axis.legend(loc="upper left", title="a mark is a world")
    figure.savefig(RESULTS / "world_gain.png")


# --------------------------------------------------------------------------------------------------
# (b) Training, seen in three ways

VIEWS = ("one rate", "best rate", "equal KL")


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


COMPARISONS = [("Lopti", "GRPO"), ("Lopti", "GRPO, two passes"), ("Lopti", "random split")]
COMPARISONS += [("Lopti", "reversed Lopti"), ("AR, α = .3", "GRPO"), ("AR, α = 1", "GRPO")]
COMPARISONS += [("AR, α = 1, no bias", other) for other in ("AR, α = 1", "GRPO")]
COMPARISONS += [("oracle", "GRPO")]


def comparison_table(rows):
    """What was predicted and what was found, for each world, comparison and view."""
    lines = [
        "| world | comparison | view | predicted | found | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for name, (world, rates, _) in WORLDS.items():
        chosen = {(r["method"], r["view"]): r["rate"] for r in rows if r["world"] == name}
        for one, other in COMPARISONS:
            for view in VIEWS if (one, "one rate") in chosen else ():
                gain = predicted_gain(world, one, view) / predicted_gain(world, other, view)
                expected = "ahead" if gain > 1.05 else "behind" if gain < 0.95 else "level"
                mean, half = difference(rows, name, one, other, view)
                found = "ahead" if mean > half else "behind" if mean < -half else "not decided"
                at_end = {chosen[one, view], chosen[other, view]} & {rates[0], rates[-1]}
                cells = (name, f"{one} - {other}", view + " (end of the grid)" * bool(at_end))
                cells += (f"{expected}, {gain:.2f}", f"{found}, {mean:+.3f} ± {half:.3f}")
                lines.append(f"| {' | '.join(cells)} | {JUDGED} |")
    return "\n".join(lines)


NOTE = """A point is the mean of {seeds} seeds, a bar its 95 % interval, paired by seed. The line \
at 0 is GRPO; right of it is better. Predicted gain: how far a step of given length
gets; GRPO is 1. It is computed before training and says on which side of the line a method \
lies, not how far. The worlds are built so that the paper's premise holds (the first
two) or does not. They show when the methods help. Whether a language model is like them must \
be measured on the model."""


def draw_worlds(rows, view="equal KL"):
    """Each method's accuracy minus GRPO's, with the gain that was predicted for it."""
    figure, axes = plt.subplots(2, 3, figsize=(19, 12))
    for axis, (name, (world, _, limit)) in zip(axes.flat, WORLDS.items()):
        methods = [r["method"] for r in rows if r["world"] == name and r["view"] == view]
        methods = methods[:0:-1]  # without GRPO, which is the line at 0
        axis.axvline(0, color=COLORS["GRPO"], linewidth=1.5)
        for height, method in enumerate(methods):
            mean, half = difference(rows, name, method, "GRPO", view)
            color = (COLORS | POINTS).get(method, "#888888")
            axis.errorbar(mean, height, xerr=half, fmt="o", color=color, markersize=9, capsize=4)
            text = f"{predicted_gain(world, method, view):.2f}"
            where = {"transform": axis.get_yaxis_transform(), "va": "center"}
            axis.text(1.03, height, text, color=color, **where)
        axis.text(1.03, len(methods) - 0.3, "predicted\ngain", fontsize=12, **where)
        axis.set_yticks(range(len(methods)), methods)
        axis.set(ylim=(-0.6, len(methods) - 0.1), title=name[0].upper() + name[1:])
        axis.set_xlabel(f"accuracy minus GRPO's, at KL {limit}")
    figure.supxlabel(NOTE.format(seeds=JUDGED), fontsize=14, ha="left", x=0.01)
    figure.suptitle("Designed worlds: accuracy at equal KL to the starting policy", fontsize=20)
    figure.savefig(RESULTS / "world.png")


def rounded(value):
    """Numbers with four digits, also within lists and dictionaries."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return round(value, 4) if isinstance(value, float) else value


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
        lines = [json.dumps(rounded(row), ensure_ascii=False) + "\n" for row in rows]
        file.write_text("".join(lines), encoding="utf-8")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    draw_gains([row for row in rows if "gain_of" in row])
    training = [row for row in rows if "view" in row]
    draw_worlds(training)
    print(comparison_table(training))


if __name__ == "__main__":
    main()
