"""A designed world with a dial: where AR and Lopti win, where they change nothing, where they lose.

python data/lab/world.py         # tables, results/world.jsonl, world.png, world_gain.png: minutes
LOPTI_QUICK=1 python data/lab/world.py     # the same with few seeds, into runs/: about a minute

The world is BUILT so that the paper's premise holds, or does not. It shows that the methods can
help, when, and why. It does not show that language models are such worlds: `diagnose.py` asks that.

An answer has D decisions, each right with probability p; the reward is the number of right ones. It
also has W wording tokens, each one of K synonyms, which do not touch the reward. Every position has
its own logits. All logits depend on the same few parameters through fixed random features, so that
a drift of the wording disturbs the decisions, as in a network. Advantages, reweighting, split,
stages and loss are lopti's own. Many seeds are trained at once: S seeds, B responses, T tokens,
R rows of logits, V words.
"""

import json
import math
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib.pyplot as plt
import scipy.stats
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from style import COLORS
from variants import random_split, weighted_mass

import lopti

QUICK = bool(os.environ.get("LOPTI_QUICK"))
RESULTS = Path("runs/world") if QUICK else Path(__file__).resolve().parent / "results"
GROUP_SIZE, ETA, STEPS = 8, 0.5, 40
TUNING, JUDGED = (3, 4) if QUICK else (10, 20)  # seeds that choose a rate, seeds that are judged
BLOCK = 0 if QUICK else 2  # names a set of seeds
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


@dataclass(frozen=True)
class World:
    """The dials."""

    accuracy: float = 0.6  # p, before training
    decisions: int = 4  # D
    wording: int = 128  # W
    synonyms: int = 8  # K
    favourite: float = 0.0  # the probability of one synonym; 0: all are equally likely
    late: bool = False  # wording has other logits where the first decision was right
    groups: int = 1  # groups of 8 responses for each step
    optimizer: str = "unit steps"  # or "one AdamW" or "an AdamW for each pass"
    parameters: int = 32  # that all logits share; 0: a table of logits, nothing is shared


POINTS = {"AR, α = .3": COLORS["AR"], "AR, α = 1": "#882255", "Lopti": COLORS["Lopti"]}
POINTS["AR, α = 1, no bias"] = "#CC79A7"

# name → the world, its learning rates, the KL at which "equal KL" is read
UNIT_RATES = (0.05, 0.12, 0.3, 0.8, 2.0, 5.0, 12.0, 30.0)
ADAMW_RATES = (0.005, 0.012, 0.03, 0.08, 0.2, 0.5, 1.2, 3.0)
WORLDS = {
    "unlikely wording, unit steps": (World(), UNIT_RATES, 15),
    "unlikely wording, one AdamW": (World(optimizer="one AdamW"), ADAMW_RATES, 10),
    "wording like decisions": (
        World(accuracy=0.55, synonyms=2, favourite=0.55, optimizer="one AdamW"),
        ADAMW_RATES,
        10,
    ),
    "right answers are unlikely": (
        World(accuracy=0.1, decisions=8, synonyms=2, favourite=0.6),
        UNIT_RATES,
        10,
    ),
    "wording follows the decision": (
        World(decisions=1, wording=64, favourite=0.5, late=True, groups=4),
        UNIT_RATES,
        2,
    ),
}


# --------------------------------------------------------------------------------------------------
# The theorem: progress of steps whose length is fixed


def start_logits(world):
    """(R, V): the rows of the decisions (column 0 is right), then those of the wording."""
    words, p = max(2, world.synonyms), world.accuracy
    logits = torch.full((world.decisions + (1 + world.late) * world.wording, words), -1e9)
    logits[: world.decisions, :2] = torch.tensor([p, 1 - p]).log()
    favourite = world.favourite or 1 / world.synonyms
    others = [(1 - favourite) / (world.synonyms - 1)] * (world.synonyms - 1)
    logits[world.decisions :, : world.synonyms] = torch.tensor([favourite, *others]).log()
    return logits


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


def progress(world, weights):
    """⟨∇J, steps⟩ of unit steps with these weights, one after the other; and over their length."""
    signals, products = signals_and_products(world, weights)
    lengths = products.diagonal().sqrt()
    in_all = float((signals / lengths).sum())
    return in_all, in_all / float((products / torch.outer(lengths, lengths)).sum().sqrt())


def ar_gain(world, alpha, without_bias=False):
    """AR's progress for each unit of length, over GRPO's."""
    of = replace(world, late=False) if without_bias else world  # then V(s) is 0
    return (
        progress(of, [lambda pi: 1 - alpha * (1 - pi)])[1] / progress(world, [torch.ones_like])[1]
    )


def split_gain(world, eta=ETA, of_a_batch=False):
    """Lopti's progress for each unit of length, or for each batch, over GRPO's."""
    passes = [lambda pi: (pi < eta).double(), lambda pi: (pi >= eta).double()]
    which = 0 if of_a_batch else 1
    return progress(world, passes)[which] / progress(world, [torch.ones_like])[which]


# --------------------------------------------------------------------------------------------------
# The same by simulation: training


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


def step(world, theta, rate, optimizers, name):
    """One optimizer step for every seed on its own."""
    if world.optimizer == "unit steps":
        theta.data -= rate * theta.grad / theta.grad.norm(dim=1, keepdim=True).clamp(min=1e-30)
        return
    key = name if world.optimizer == "an AdamW for each pass" else "all"
    optimizers.setdefault(key, torch.optim.AdamW([theta], lr=rate)).step()


def train(
    world,
    rate,
    steps,
    seeds,
    block,
    alpha=0.0,
    eta=0.0,
    order="low-high",
    passes=1,
    split=lopti.split_tokens,
    without_bias=False,
    oracle=False,
):
    """Accuracies and KLs (steps + 1, S), parameters (S, P). `block` names a set of seeds."""
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
        raw = lopti.group_advantages(rewards, GROUP_SIZE)[:, None] * mask
        advantages = lopti.reweight_advantages(raw, old_logprobs, alpha)
        low, high = split(old_logprobs, mask, eta)
        for name, chosen in lopti.update_stages(low, high, mask, eta, order) * passes:
            if oracle:
                chosen = chosen & (rows < world.decisions).flatten(0, 1)
            logits = logits_now()
            logprobs = logits.log_softmax(-1)[seed, rows, tokens].flatten(0, 1)
            settings = {"tokens": chosen, "normalizer": mask.sum() / seeds}
            loss, _ = lopti.policy_loss(logprobs, old_logprobs, advantages, mask, **settings)
            if without_bias:
                mass = weighted_mass(logits.flatten(0, 1), alpha, eta, name).view(seeds, -1)
                mass = mass[seed, rows].flatten(0, 1)  # (S·B, T)
                loss = loss + (raw * mass).sum() / settings["normalizer"]
            theta.grad = None
            loss.backward()
            step(world, theta, rate, optimizers, name)
    history.append(measure(world, logits_now(), start))
    accuracies, kls = (torch.stack(values) for values in zip(*history))
    return accuracies, kls, theta.detach()


# --------------------------------------------------------------------------------------------------
# (a) Gain: predicted against simulated


def simulated_gain(world, method, seeds=16 if QUICK else 64, blocks=2 if QUICK else 4):
    """The accuracy that one tiny batch gains for each unit of length, over GRPO's."""
    world, gains = replace(world, parameters=0, optimizer="unit steps"), []
    for settings in (METHODS[method], METHODS["GRPO"]):
        gained = length = 0.0
        for block in range(blocks):
            accuracies, _, theta = train(world, 1e-5, 1, seeds, 100 + block, **settings)
            gained += float((accuracies[1] - accuracies[0]).sum())
            length += float(theta.norm(dim=1).sum())
        gains.append(gained / length)
    return gains[0] / gains[1]


def gain_worlds():
    """28 worlds: how sure the policy is, how its wording looks, how many responses there are."""
    wordings = [(0, 2, 0.0), (64, 2, 0.6), (100, 3, 0.0), (64, 8, 0.5), (100, 8, 0.0)]
    wordings += [(200, 32, 0.0)]
    for p in (0.6, 0.9):
        for groups in (1, 8):
            for words in wordings:
                yield World(p, 8, *words, groups=groups)
            yield World(p, 2, 64, 8, 0.5, late=True, groups=groups)


def compare_gains():
    rows = []
    for world in gain_worlds():
        predicted = {"AR, α = .3": ar_gain(world, 0.3), "AR, α = 1": ar_gain(world, 1.0)}
        predicted["Lopti"] = split_gain(world)
        if world.late:
            predicted["AR, α = 1, no bias"] = ar_gain(world, 1.0, without_bias=True)
        for method, gain in predicted.items():
            simulated = simulated_gain(world, method)
            row = {"gain_of": method, "world": vars(world), "predicted": gain}
            rows.append({**row, "simulated": simulated})
    return rows


def draw_gains(rows):
    figure, axis = plt.subplots(figsize=(9, 8))
    axis.plot([0.1, 5], [0.1, 5], color="#999999", linewidth=1)
    axis.axhline(1, color="#cccccc", linewidth=1, zorder=0)
    axis.axvline(1, color="#cccccc", linewidth=1, zorder=0)
    for (method, color), mark in zip(POINTS.items(), "osD^"):
        points = [(r["predicted"], r["simulated"]) for r in rows if r["gain_of"] == method]
        options = {"color": color, "markersize": 9, "alpha": 0.75, "markeredgewidth": 0}
        axis.plot(*zip(*points), mark, label=method, **options)
    ticks = [0.2, 0.5, 1, 2, 4]
    axis.set(xscale="log", yscale="log", xticks=ticks, yticks=ticks)
    axis.set_xticklabels(ticks), axis.set_yticklabels(ticks)
    axis.minorticks_off()
    axis.set(xlabel="gain over GRPO that the theorem predicts", ylabel="gain in the simulation")
    count = len({str(row["world"]) for row in rows})
    axis.set_title(f"What a step of given length gains, {count} worlds")
    axis.text(0.97, 0.04, "grey diagonal: as predicted", transform=axis.transAxes, ha="right")
    axis.legend(loc="upper left")
    figure.savefig(RESULTS / "world_gain.png")


# --------------------------------------------------------------------------------------------------
# (b) Training, seen in three ways


def at_kl(accuracies, kls, limit):
    """The accuracy (S,) where the KL first passes the limit, linear between steps, or the last."""
    before = ((kls <= limit).long().cumprod(0).sum(0) - 1)[None]  # the last step below it
    after = (before + 1).clamp(max=len(kls) - 1)
    low, high = kls.gather(0, before), kls.gather(0, after)
    share = ((limit - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    return torch.lerp(accuracies.gather(0, before), accuracies.gather(0, after), share)[0]


def train_methods(name):
    """Rows: world, method, view, rate, accuracies of judged seeds. Other seeds choose the rate."""
    world, rates, kl_limit = WORLDS[name]
    rows = []
    for method, settings in METHODS.items():
        if settings.get("without_bias") and not world.late:
            continue  # the same to the last digit: V(s) is 0
        runs = [train(world, rate, STEPS, TUNING + JUDGED, BLOCK, **settings) for rate in rates]
        mean = torch.stack([accuracies[1:].mean(0) for accuracies, _, _ in runs])  # (rates, S)
        equal = torch.stack([at_kl(accuracies, kls, kl_limit) for accuracies, kls, _ in runs])
        for view, values in (("one rate", mean[2:3]), ("best rate", mean), ("equal KL", equal)):
            best = int(values[:, :TUNING].mean(1).argmax())
            row = {"world": name, "method": method, "view": view}
            row["rate"] = rates[2] if view == "one rate" else rates[best]
            row["by_rate"] = values[:, :TUNING].mean(1).tolist()
            rows.append({**row, "accuracies": values[best, TUNING:].tolist()})
    return rows


def predicted_gain(name, method, view):
    """Over GRPO: for a batch at one rate, for each unit of length in the other two views."""
    world, settings = WORLDS[name][0], METHODS[method]
    if settings.get("oracle"):
        plain = [torch.ones_like]
        return progress(replace(world, wording=0), plain)[1] / progress(world, plain)[1]
    if "alpha" in settings:
        return ar_gain(world, **settings)
    gain, length = 1.0, {"GRPO": 1.0, "random split": 2**0.5}.get(method, 2.0)
    if "Lopti" in method:
        gain = split_gain(world)
        length = split_gain(world, of_a_batch=True) / gain
        if world.optimizer == "one AdamW":  # only a longer step
            gain = 1.0
    return gain * length if view == "one rate" else gain


VIEWS = ("one rate", "best rate", "equal KL")
COMPARISONS = [("Lopti", "GRPO"), ("Lopti", "GRPO, two passes"), ("Lopti", "random split")]
COMPARISONS += [("Lopti", "reversed Lopti"), ("AR, α = .3", "GRPO"), ("AR, α = 1", "GRPO")]
COMPARISONS += [("AR, α = 1, no bias", other) for other in ("AR, α = 1", "GRPO")]
COMPARISONS += [("oracle", "GRPO")]


def student(values):
    """The mean over seeds and half of its 95 % interval."""
    factor = scipy.stats.t.ppf(0.975, len(values) - 1)
    return float(values.mean()), float(factor * values.std() / math.sqrt(len(values)))


def differences(rows, name, one, other, view):
    """Accuracy of one method minus another's, seed by seed: (mean, half of the interval)."""
    wanted = {(r["method"], r["view"]): r["accuracies"] for r in rows if r.get("world") == name}
    return student(torch.tensor(wanted[one, view]) - torch.tensor(wanted[other, view]))


def comparison_table(rows):
    """What was predicted and what was found, for each world, comparison and view."""
    lines = [
        "| world | comparison | view | predicted | found | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for name, (_, rates, _) in WORLDS.items():
        chosen = {(r["method"], r["view"]): r["rate"] for r in rows if r.get("world") == name}
        for one, other in COMPARISONS:
            for view in VIEWS if (one, "one rate") in chosen else ():
                gain = predicted_gain(name, one, view) / predicted_gain(name, other, view)
                expected = "ahead" if gain > 1.05 else "behind" if gain < 0.95 else "level"
                mean, half = differences(rows, name, one, other, view)
                found = "ahead" if mean > half else "behind" if mean < -half else "not decided"
                ends = {chosen[one, view], chosen[other, view]} & {rates[0], rates[-1]}
                note = " (a rate is at the end of the grid)" if ends else ""
                cells = (name, f"{one} - {other}", view + note, f"{expected}, {gain:.2f}")
                cells += (f"{found}, {mean:+.3f} ± {half:.3f}", f"{JUDGED}")
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw_worlds(rows, view="equal KL"):
    """Each method's accuracy minus GRPO's, with the gain that was predicted for it."""
    figure, axes = plt.subplots(2, 3, figsize=(19, 10.5))
    for axis, (name, (world, _, limit)) in zip(axes.flat, WORLDS.items()):
        methods = [r["method"] for r in rows if r.get("world") == name and r["view"] == view]
        methods = methods[:0:-1]  # GRPO is the line at 0
        axis.axvline(0, color=COLORS["GRPO"], linewidth=1.5)
        for height, method in enumerate(methods):
            mean, half = differences(rows, name, method, "GRPO", view)
            color = (COLORS | POINTS).get(method, "#999999")
            axis.errorbar(mean, height, xerr=half, fmt="o", color=color, markersize=9, capsize=4)
            gain = predicted_gain(name, method, view)
            where = {"transform": axis.get_yaxis_transform(), "va": "center"}
            axis.text(1.02, height, f"{gain:.2f}", color=color, **where)
        axis.text(1.02, len(methods) - 0.3, "predicted\ngain", fontsize=11, **where)
        axis.set_yticks(range(len(methods)), methods)
        axis.set(ylim=(-0.6, len(methods) - 0.4), title=name.capitalize())
        axis.set_xlabel(f"accuracy minus GRPO's, at a KL of {limit}")
    axes[1, 2].axis("off")
    axes[1, 2].text(0, 0.95, NOTE.format(seeds=JUDGED), va="top", linespacing=1.5)
    figure.suptitle("Designed worlds: accuracy at equal KL to the starting policy", fontsize=20)
    figure.savefig(RESULTS / "world.png")


NOTE = """How to read this

A point: the mean of {seeds} seeds. A bar: its 95 % interval,
paired by seed. Grey line: GRPO. Right of it is better.

Predicted gain: how far a step of given length gets,
GRPO = 1. It is computed before training, from how
likely the tokens are. It says which side of the line,
not how far.

The worlds are built so that the paper's premise
holds (above) or does not. They show when the
methods help. Whether a language model is such a
world must be measured on that model."""


def rounded(row):
    """The same row with four digits."""
    if isinstance(row, float):
        return round(row, 4)
    if isinstance(row, list):
        return [rounded(value) for value in row]
    return {key: rounded(value) for key, value in row.items()} if isinstance(row, dict) else row


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    RESULTS.mkdir(parents=True, exist_ok=True)
    rows, started = compare_gains(), time.time()
    print(f"{len(rows)} gains, {time.time() - started:.0f} s", flush=True)
    for name in WORLDS:
        rows += train_methods(name)
        print(f"{name}: {time.time() - started:.0f} s", flush=True)
    lines = [json.dumps(rounded(row), ensure_ascii=False) + "\n" for row in rows]
    (RESULTS / "world.jsonl").write_text("".join(lines), encoding="utf-8")
    draw_gains([row for row in rows if "gain_of" in row])
    draw_worlds(rows)
    print(comparison_table(rows))


if __name__ == "__main__":
    main()
