"""The pictures and tables of notebook.ipynb, so that its cells stay short."""

import inspect
import json
import re
import statistics
from pathlib import Path

import analysis
import matplotlib.pyplot as plt
import pandas
import torch
from experiments import TWO
from IPython.display import Code
from matplotlib.colors import LinearSegmentedColormap
from style import COLORS
from theory import logit_gradient_bounds, logit_gradient_norm

import lopti

RESULTS = Path(__file__).resolve().parent / "results"
# From unlikely to likely, in the two colours of the whole project.
PROBABILITY = LinearSegmentedColormap.from_list("π", [COLORS["low"], "#F7F7F7", COLORS["high"]])
BINS = ("π < .25", ".25 to .5", ".5 to .75", "π ≥ .75")


def from_page(file):
    """The tokens of the best answer on a token page, and their π."""
    text = (RESULTS / file).read_text(encoding="utf-8")
    held = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    answer = held["prompts"][0]["answers"][0]
    return answer["texts"], answer["tokens"]["pi"]


def source(*functions):
    """The source of functions as lopti.py has it, with highlighting."""
    return Code("\n\n".join(map(inspect.getsource, functions)), language="python")


def answers(rollout, rewards, advantages):
    """One line for each answer of a group: its last lines, its reward, its advantage."""
    texts = [re.sub(r"\s+", " ", text.partition("<answer>")[2]) for text in rollout.texts]
    said = [text.removesuffix("</answer>").strip() or "no answer" for text in texts]
    columns = {"answer": said, "tokens": rollout.mask.sum(1), "reward R": rewards}
    return pandas.DataFrame(columns | {"advantage Â": advantages.round(decimals=2)})


def token_sheet(tokens, probabilities, title, width=88, lines=8):
    """The first lines of an answer, each token on the colour of its probability."""
    figure, axis = plt.subplots(figsize=(13, 0.55 * lines + 1.2))
    x = line = 0
    for token, probability in zip(tokens, probabilities):
        size = len(token) + 0.7
        if x + size > width or "\n" in token:
            x, line = 0, line + 1
        if line == lines:
            break
        token = token.strip()
        color = PROBABILITY(probability)
        axis.add_patch(plt.Rectangle((x, -line - 0.4), size - 0.2, 0.8, color=color))
        ink = "white" if abs(probability - 0.5) > 0.3 else "black"
        how = {"ha": "center", "va": "center", "family": "monospace", "fontsize": 14}
        axis.text(x + (size - 0.2) / 2, -line, token, color=ink, **how)
        x += size
    axis.set(xlim=(0, width), ylim=(-min(line, lines - 1) - 0.6, 0.6), title=title)
    axis.axis("off")
    scale = plt.cm.ScalarMappable(cmap=PROBABILITY)
    figure.colorbar(
        scale, ax=axis, location="bottom", aspect=60, shrink=0.6, label="π of the token"
    )


def in_bins(rollout):
    """The tokens of each of the four bins of π, (B, L) each."""
    number = (4 * rollout.old_logprobs.exp()).floor().clamp(max=3)
    return [rollout.mask & (number == place) for place in range(4)]


def bin_shares(rollout):
    return [float(tokens.sum() / rollout.mask.sum()) for tokens in in_bins(rollout)]


def mean_shares(lines):
    """The same, over the batches of real_model_figures.jsonl."""
    figures = [line["figure_1"] for line in lines if "figure_1" in line]
    total = sum(figure["tokens"] for figure in figures)
    weighted = [
        [figure["tokens"] * value / total for value in figure["share"]] for figure in figures
    ]
    return [sum(values) for values in zip(*weighted)]


def shares(policies):
    """The share of tokens in each bin of π, {name: shares}, as grouped bars."""
    _, axis = plt.subplots(figsize=(11, 4.5))
    colors = ("#222222", "#777777", "#BBBBBB")
    for number, (name, values) in enumerate(policies.items()):
        places = [place + 0.27 * (number - 1) for place in range(4)]
        bars = axis.bar(places, values, 0.25, label=name, color=colors[number])
        axis.bar_label(bars, [f"{100 * value:.0f}" for value in values], fontsize=14)
    axis.set(
        title="One token in five is unlikely, as in a language model", ylabel="share of tokens"
    )
    axis.set_xticks(range(4), BINS)
    axis.yaxis.set_major_formatter("{x:.0%}")
    axis.legend()


@torch.no_grad()
def cone(policy, rollout):
    """‖∇_z log π‖ of every token of some answers, between the bounds of Prop. 4.2."""
    logits = lopti.token_logits(policy, rollout.ids, rollout.mask, temperature=1.0)
    norms = logit_gradient_norm(logits, rollout.ids[rollout.mask])
    pi = rollout.old_logprobs[rollout.mask].exp()
    grid = torch.linspace(0, 1, 100)
    lower, upper = logit_gradient_bounds(grid, logits.shape[-1])
    _, axis = plt.subplots(figsize=(11, 5))
    axis.fill_between(
        grid, lower, upper, color=COLORS["GRPO"], alpha=0.25, label="Prop. 4.2 allows"
    )
    axis.scatter(pi, norms, s=18, c=pi, cmap=PROBABILITY, edgecolors="black", linewidths=0.3)
    axis.plot([], [], "o", color=COLORS["low"], label="a token of the eight answers")
    axis.set(title="The less likely a token, the larger its gradient", xlabel="π of the token")
    axis.set_ylabel("‖∇ log π‖ at the logits")
    axis.legend()


def weights(alpha):
    """How much a token can pull, (1-π)·|Â|, before and after Eq. 4."""
    pi = torch.linspace(0.001, 1, 200)
    before = 1 - pi
    after = lopti.reweight_advantages(before, pi.log(), alpha)
    _, axis = plt.subplots(figsize=(11, 4.8))
    axis.plot(pi, before, color=COLORS["GRPO"], label="GRPO: 1 − π")
    axis.plot(pi, after, color=COLORS["AR"], label=f"AR: (1 − π)·[{alpha}π + {1 - alpha:.1f}]")
    axis.fill_between(pi, after, before, color=COLORS["AR"], alpha=0.25)
    axis.set(title="AR takes from the unlikely tokens, and little from the likely ones")
    axis.set(xlabel="π of the token", ylabel="pull of a token with |Â| = 1")
    axis.legend()


def passes(words, rows, title):
    """The π of each word after each pass, {pass: (π of each word)}, as lines."""
    _, axis = plt.subplots(figsize=(11, 4.8))
    colors = (COLORS["high"], COLORS["low"], "#A63603")
    for word, color, values in zip(words, colors, zip(*rows.values())):
        axis.plot(list(rows), values, "o-", color=color, markersize=9, label=word)
        for number, value in enumerate(values):
            axis.annotate(f"{value:.2f}", (number, value + 0.04), color=color, fontsize=14)
    axis.set(title=title, ylabel="π", ylim=(0, 1))
    axis.legend(loc="center right")


def clip_cases(clip_low=0.2, clip_high=0.24, clip_dual=10.0):
    """What one token adds to the objective by its ratio, for Â = 1 and for Â = -1."""
    _, axes = plt.subplots(1, 2, figsize=(14, 4.8))
    ratio = torch.linspace(0.4, 1.6, 400).requires_grad_()
    for axis, advantage, color in zip(axes, (1.0, -1.0), (COLORS["high"], COLORS["low"])):
        old = torch.zeros(1, 1)
        values = [
            -lopti.policy_loss(r.log().view(1, 1), old, old + advantage, old == 0)[0] for r in ratio
        ]
        values = torch.stack(values)
        (slope,) = torch.autograd.grad(values.sum(), ratio)
        learns, values, places = slope != 0, values.detach(), ratio.detach()
        axis.plot(places[~learns], values[~learns], color=COLORS["GRPO"], label="no gradient")
        axis.plot(places[learns], values[learns], ".", color=color, label="gradient")
        axis.axvline(1, color="black", linewidth=1, linestyle=":")
        axis.set(xlabel="ratio r = π_θ / π_old", ylabel="objective")
        axis.set_title(
            f"Â = {advantage:+.0f}: "
            + ("enough above 1.24" if advantage > 0 else "enough below 0.80")
        )
        axis.legend()


def training_curves(runs, methods, title):
    """Accuracy in training by step, mean over seeds, smoothed over three steps."""
    _, axis = plt.subplots(figsize=(12, 5.5))
    for method in methods:
        named = [run for run in runs if analysis.shown(run["method"]) == method]
        curves = [run["metrics"]["accuracy"] for run in named]
        mean = [statistics.mean(values) for values in zip(*curves)]
        smooth = [statistics.mean(mean[max(0, i - 1) : i + 2]) for i in range(len(mean))]
        steps = range(1, len(mean) + 1)
        axis.plot(steps, smooth, color=COLORS[method], label=method)
    axis.set(title=title, xlabel="training step", ylabel="right answers", ylim=(0.3, 0.9))
    axis.yaxis.set_major_formatter("{x:.0%}")
    axis.legend(loc="lower right")


def results(runs):
    """The paper's accuracy and ours, by method: means ± standard deviations over seeds."""
    paper = {"GRPO": 0.39, "AR": 0.53, "Lopti": 0.54, "AR + Lopti": 0.57, TWO: "not run"}
    frame, table = analysis.run_frame(runs), {}
    for method, accuracy in paper.items():
        ours = frame[frame.method == method]
        table[method] = {
            "the paper's 3B, at the end": accuracy,
            "ours, in training": analysis.of_runs(ours[analysis.WHOLE]),
            "ours, at the end": analysis.of_runs(ours["sampled accuracy"]),
            "our seeds": len(ours),
        }
    return pandas.DataFrame(table).T


def kept(rollout, masks):
    """Which share of the tokens in each bin of π each method keeps: {name: mask (B, L)}."""
    bins = in_bins(rollout)
    _, axis = plt.subplots(figsize=(12, 4.8))
    for number, (name, mask) in enumerate(masks.items()):
        values = [float((mask & tokens).sum() / tokens.sum()) for tokens in bins]
        places = [place + 0.2 * (number - 1.5) for place in range(4)]
        bars = axis.bar(places, values, 0.19, label=name, color=COLORS.get(name, COLORS["low"]))
        axis.bar_label(bars, [f"{100 * value:.0f}" for value in values], fontsize=14)
    axis.set(title="80/20 drops the likely tokens; STAPO and min-p drop next to nothing")
    axis.set_ylabel("share of the bin's tokens")
    axis.set_xticks(range(4), BINS)
    axis.yaxis.set_major_formatter("{x:.0%}")
    axis.legend(loc="upper center", ncols=4, bbox_to_anchor=(0.5, -0.1))
