"""Drawings and tables of the report. What they show is computed in measures.py and theory.py.

A "line" is what was measured on one rollout batch, as measures.py and real_model.py make it:
{"figure_1": ..., "figure_3": ...}, in the first batch also "figure_2". A "set" is the lines of one
model, and `sets` is {name of the model: lines}. Ratios are ratios of means over the batches.
"""

import io
import re
from collections import Counter

import matplotlib.pyplot as plt
import measures
import numpy as np
import theory
import torch
from analysis import interval, markdown, ratio
from IPython.display import Image, Markdown
from PIL import Image as Pillow
from plot import forest
from scipy import stats
from style import COLORS

BINS = ("π < .25", ".25–.5", ".5–.75", "π ≥ .75")
BIN_COLORS = (COLORS["low"], "#E9A66B", "#8FB8DE", COLORS["high"])  # from low to high
GREYS = ("#C0C0C0", "#808080", "#303030")
TICKS = (0.01, 0.1, 0.5, 0.9, 0.99, 0.999)  # of a logit axis
PAPER = "paper"  # Qwen2.5-7B-Instruct-1M
SHARES, NORMS = [19.22, 10.15, 10.09, 60.54], [4.8, 2.4, 1.6, 1.0]  # norms read off its Fig. 1 (d)
PROPOSITION = (
    "",
    "inside the bounds of Prop. 4.2",
    "above STAPO's bound 1 − 2π + e^(−H)",
    "rank correlation of ‖∇‖ and 1 − π, embedding to last layer",
    "median ‖∇‖, π < .25 over π ≥ .75, embedding to last layer",
)

# ---- pictures


def canvas(columns, height=5.2, **options):
    """A figure as wide as a slide."""
    return plt.subplots(1, columns, figsize=(14, height), **options)


def picture(figure):
    """The figure as a small PNG of 64 colors."""
    stream, small = io.BytesIO(), io.BytesIO()
    figure.savefig(stream)
    plt.close(figure)
    Pillow.open(stream).convert("RGB").quantize(64).save(small, "png", optimize=True)
    return Image(small.getvalue(), width=1000)


def bars(axis, names, groups, colors, *, base=0.0, digits=None):
    """`groups`: label → [(mean, half of its interval)], drawn side by side for each name."""
    width = 0.8 / len(groups)
    for number, ((label, pairs), color) in enumerate(zip(groups.items(), colors)):
        means, halves = np.array(pairs, dtype=float).T
        places = np.arange(len(names)) + (number - (len(groups) - 1) / 2) * width
        style = {"capsize": 4, "ecolor": "black", "label": label, "color": color}
        drawn = axis.bar(places, means - base, width, bottom=base, yerr=halves, **style)
        if digits is not None:
            axis.bar_label(drawn, [f"{mean:.{digits}f}" for mean in means], padding=3, fontsize=14)
    axis.set_xticks(np.arange(len(names)), names)


def shares_and_norms(sets):
    """Fig. 1 (a) and (d): the paper's numbers beside ours."""
    figure, (left, right) = canvas(2)
    groups = {PAPER: [(value, 0) for value in SHARES]}
    bars(
        left, BINS, groups | {name: shares(lines) for name, lines in sets.items()}, GREYS, digits=0
    )
    groups = {PAPER: [(value, 0) for value in NORMS]}
    bars(
        right, BINS, groups | {name: norms(lines) for name, lines in sets.items()}, GREYS, digits=1
    )
    left.set(title="Few tokens are unlikely ...", ylabel="% of response tokens")
    right.set(title="... and theirs is the largest gradient", ylabel="‖∇‖ over the highest bin's")
    left.legend(loc="upper left")
    return picture(figure)


def violins(lines, name, panels, limits=None):
    """A quantity's distribution in each bin: panels {title: line's figure_1 → its quantiles}."""
    figure, axes = canvas(2)
    for axis, (title, pick) in zip(axes, panels.items()):
        quantiles = [pick(line["figure_1"])["quantiles"] for line in lines]  # batch, bin
        samples = [np.concatenate(of_bin) for of_bin in zip(*quantiles)]
        drawn = axis.violinplot(samples, showmeans=True, showextrema=False, widths=0.85)
        for body, color in zip(drawn["bodies"], BIN_COLORS):
            body.set(facecolor=color, alpha=0.7)
        drawn["cmeans"].set_color("black")
        axis.axhline(0, color="black", linewidth=1, linestyle=":")
        axis.set_xticks(range(1, 5), BINS)
        axis.set(title=title, ylim=limits if "π" in title else None)
    figure.suptitle(name)
    return picture(figure)


def logit_axis(axis):
    """π from 0 to 1, stretched at both ends, where nearly all tokens are."""
    axis.set_xscale("logit")
    axis.set_xlim(1e-4, 1 - 1e-5)
    labels = [f"{tick:g}".removeprefix("0") for tick in TICKS]
    axis.set_xticks(TICKS, labels, minor=False, fontsize=14)
    axis.xaxis.set_minor_locator(plt.NullLocator())
    axis.set_xlabel("π of the token (logit axis)")


def some_layers(layers, most=6):
    """Which columns of `layers` to show: all, or of a deep model five from first to last."""
    count = layers.shape[1]
    return range(count) if count <= most else np.linspace(0, count - 1, 5).astype(int)


def proposition(tokens, vocabulary_size, name):
    """Fig. 2: the cone at the logits, and the norms at the layers."""
    figure, axes = canvas(2, 5.8)
    pi, layers = np.clip(tokens["probability"], 0, 1 - 1e-6), np.array(tokens["at_layers"])
    grid = torch.tensor(np.append(np.linspace(2e-4, 0.99, 300), 1 - np.geomspace(0.01, 2e-5, 100)))
    bounds = theory.logit_gradient_bounds(grid, vocabulary_size)
    axes[0].fill_between(grid, *bounds, color=GREYS[0], label="Prop. 4.2 allows")
    style = {"markersize": 4, "color": COLORS["low"], "label": f"{len(pi)} tokens"}
    axes[0].plot(pi, tokens["at_logits"], "o", **style)
    logit_axis(axes[0])
    axes[0].set(title="At the logits: inside the bounds", ylabel="‖∇ log π‖")
    chosen = some_layers(layers)
    for number, color in zip(chosen, plt.cm.viridis(np.linspace(0, 0.9, len(chosen)))):
        label = f"layer {number}" if number else "embedding"
        axes[1].loglog(1 - pi, layers[:, number], "o", markersize=3, color=color, label=label)
    axes[1].set(title="At the layers: it grows with 1 − π", xlabel="1 − π", xlim=(1e-4, 1.3))
    axes[1].set(ylim=(layers[1 - pi > 1e-4].min() / 2, None))
    for axis in axes:
        axis.legend(markerscale=3)
    figure.suptitle(name)
    return picture(figure)


def risen(lines, name):
    """Fig. 3 for both optimizers."""
    figure, axes = canvas(2, 5.6, sharey=True)
    for axis, optimizer in zip(axes, ("SGD", "AdamW")):
        of_lines = [line["figure_3"][optimizer]["risen"] for line in lines]
        groups = {method: means([one[method] for one in of_lines]) for method in of_lines[0]}
        bars(axis, BINS, groups, [COLORS[method] for method in groups], base=0.5)
        axis.axhline(0.5, color="black", linewidth=1)
        axis.set_title(optimizer)
    axes[0].set_ylabel("share of tokens with Â > 0\nwhose π rose")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(f"{name}: of the rewarded tokens the likely ones rise least often")
    return picture(figure)


def word_effects(differences):
    """A row for each kind of word: mean over puzzles and 95 % interval."""
    figure, axis = canvas(1, 0.55 * len(differences) + 1.8)
    pairs = {name: interval(values) for name, values in differences.items()}
    forest(axis, {name: (x, half, float(abs(x) <= half), []) for name, (x, half) in pairs.items()})
    axis.set_xlabel("per 100 words: right minus wrong answers to the same puzzle")
    return picture(figure)


# ---- tables


def table(rows, note=""):
    """Rows of cells, the first of them the head, as a table."""
    text = markdown([[str(cell) for cell in row] for row in rows])
    return Markdown(f"{text}\n\n{note}" if note else text)


def number(value, digits):
    """.38 rather than 0.38; − for minus."""
    text = f"{abs(value):.{digits}f}".removeprefix("0" if digits else "")
    return f"{'−' if value < 0 else ''}{text}"


def shown(pairs, digits):
    """'mean ± half / mean ± half'; the mean alone where there is no interval."""
    texts = [[number(value, digits) for value in pair if not np.isnan(value)] for pair in pairs]
    return " / ".join(" ± ".join(text) for text in texts)


def means(rows):
    """(mean, half of its interval) of each column of `rows`, one row for each batch."""
    return [interval(column) for column in zip(*rows)]


def shares(lines):
    """Fig. 1 (a): % of the tokens in each bin."""
    return means([100 * np.array(line["figure_1"]["share"]) for line in lines])


def norms(lines):
    """Fig. 1 (d): ‖∇‖ of each bin over the highest's, as a ratio of means."""
    columns = np.array([line["figure_1"]["norm"]["bins"] for line in lines]).T
    return [ratio(column, columns[3]) for column in columns]


def beside(rows, sets):
    """What the paper reports beside what is measured here, a column for each set.

    `rows` are (what, the paper's numbers, lines → [(mean, half)], digits).
    """
    counts = (f"{name}, {len(lines)} batches" for name, lines in sets.items())
    cells = [("", PAPER, *counts)]
    for what, paper, values, digits in rows:
        cells.append((what, paper, *(shown(values(lines), digits) for lines in sets.values())))
    return table(cells, "Means over batches ± half of a 95 % interval; ratios are ratios of means.")


def agreement_table(policy, tokenizer, rollouts, args):
    """Of the gradient of each part of the tokens: how much batches have in common."""
    shares, gradients, words = {}, {}, Counter()
    for rollout in rollouts:
        bins = measures.bins_of(rollout.old_logprobs.exp(), rollout.mask)
        wording = measures.wording_of(tokenizer, rollout)
        parts = {"all": rollout.mask, **dict(zip(BINS, bins))}
        parts |= {"π < .25, wording": bins[0] & wording, "π < .25, all else": bins[0] & ~wording}
        for name, tokens in parts.items():
            gradient = measures.gradient(policy, tokens, rollout, args)
            gradients.setdefault(name, []).append(gradient)
            shares.setdefault(name, []).append(100 * float(tokens.sum() / rollout.mask.sum()))
        decoded = tokenizer.batch_decode(rollout.ids[tokens][:, None])  # the last part's
        words.update(re.sub(r".*-(knight|knave)", "a name with its role", w) for w in decoded)
    rows = [("tokens", "% of all", "‖∇‖", "cosine of two batches", "‖expected ∇‖")]
    for name, of_batches in gradients.items():
        norm, cosine, half, signal = measures.agreement(torch.stack(of_batches))
        common, part = shown([(cosine, half)], 2), number(np.mean(shares[name]), 1)
        rows.append((name, part, number(norm, 3), common, number(signal, 3)))
    note = f"{len(rollouts)} batches; ± is half of a 95 % interval (jackknife). "
    most = [f"`{word}` {count / words.total():.0%}" for word, count in words.most_common(6)]
    return table(rows, f"{note}*All else* is {', '.join(most)}, and others.")


def proposition_table(measured):
    """How well ‖∇‖ goes with 1 - π: {name: (figure 2 of some tokens, size of the vocabulary)}."""
    columns = [[*PROPOSITION], [PAPER, "all: a theorem", "all: a theorem", "proportional", ""]]
    for name, (tokens, size) in measured.items():
        pi, entropies, norms, layers = (np.array(values) for values in tokens.values())
        lower, upper = theory.logit_gradient_bounds(torch.tensor(pi), size)
        inside = (norms >= lower.numpy() - 1e-4) & (norms <= upper.numpy() + 1e-4)
        above = norms**2 >= 1 - 2 * pi + np.exp(-entropies) - 1e-4
        ends = layers.T[some_layers(layers)]
        ranks = [number(stats.spearmanr(layer, 1 - pi).statistic, 2) for layer in ends]
        ratios = [np.median(layer[pi < 0.25]) / np.median(layer[pi >= 0.75]) for layer in ends]
        column = [f"{name}, {len(pi)} tokens", f"{inside.mean():.1%}", f"{above.mean():.1%}"]
        columns.append([*column, " / ".join(ranks), " / ".join(f"{one:.0f}" for one in ratios)])
    return table(list(zip(*columns)))
