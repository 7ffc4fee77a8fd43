"""Drawings of the notebook. What is drawn is computed there; nothing here knows about the method.

Colours are those of Okabe and Ito, which stay apart for colour-blind readers.
"""

import textwrap

import experiments
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown
from plot import COLOURS, LINES

BINS = ("π < .25", ".25–.5", ".5–.75", "π ≥ .75")
BIN_COLOURS = ("#D55E00", "#E69F00", "#56B4E9", "#0072B2")

plt.rcParams.update(
    {
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.dpi": 80,
        "savefig.bbox": "tight",
    }
)


def bars(axis, names, values, errors=None, *, colours=BIN_COLOURS, digits=2, base=0.0):
    """One bar for each name with its value written on it; `errors` are halves of intervals."""
    positions = np.arange(len(names))
    axis.bar(
        positions, np.asarray(values) - base, bottom=base, yerr=errors, color=colours, capsize=4
    )
    for position, value, error in zip(
        positions, values, errors if errors is not None else [0] * len(values)
    ):
        axis.annotate(
            f"{value:.{digits}f}",
            (position, max(value, base) + error),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    axis.set_xticks(positions, names)


def grouped_bars(axis, names, groups, errors=None, *, digits=3, base=0.0):
    """`groups`: label -> one value for each name, drawn side by side."""
    width = 0.8 / len(groups)
    for number, (label, values) in enumerate(groups.items()):
        positions = np.arange(len(names)) + (number - (len(groups) - 1) / 2) * width
        error = None if errors is None else errors[label]
        axis.bar(
            positions,
            np.asarray(values) - base,
            width,
            bottom=base,
            yerr=error,
            color=COLOURS[number],
            label=label,
            capsize=3,
            ecolor="#777777",
        )
    axis.set_xticks(np.arange(len(names)), names)
    axis.legend(frameon=False)


def violins(axis, samples, names=BINS, colours=BIN_COLOURS):
    """The distribution of each sample; a line at its mean, a dotted line at 0."""
    drawn = axis.violinplot(
        [np.asarray(sample) for sample in samples], showmeans=True, showextrema=False, widths=0.85
    )
    for body, colour in zip(drawn["bodies"], colours):
        body.set(facecolor=colour, alpha=0.7)
    drawn["cmeans"].set_color("black")
    axis.axhline(0, color="black", linewidth=0.8, linestyle=":")
    axis.set_xticks(range(1, len(names) + 1), names)


def token_sheet(tokens, probabilities, rows, *, width=100, title=""):
    """A response as text: each token's background shows its probability, beneath it a line for each of `rows` (name -> texts)."""
    cells = [
        max([len(token) + 2, *(len(texts[i]) + 2 for texts in rows.values())])
        for i, token in enumerate(tokens)
    ]
    lines, used = [[]], 0
    for i, token in enumerate(tokens):
        if used + cells[i] > width or token == "\n":
            lines.append([])
            used = 0
        if token != "\n":
            lines[-1].append(i)
            used += cells[i]
    lines = [line for line in lines if line]
    height, map_ = len(rows) + 1.8, plt.get_cmap("cividis")
    figure, axis = plt.subplots(figsize=(width * 0.125 + 1.4, 0.19 * height * len(lines) + 0.8))
    for number, line in enumerate(lines):
        top, x = -number * height, 0
        for label, (name, _) in enumerate(rows.items(), 1):
            axis.text(-1, top - label, name, ha="right", va="center", fontsize=8, color="#555555")
        for i in line:
            axis.add_patch(
                plt.Rectangle(
                    (x, top - 0.5), cells[i] - 0.2, 1.0, color=map_(float(probabilities[i]))
                )
            )
            ink = "white" if probabilities[i] < 0.55 else "black"
            axis.text(
                x + cells[i] / 2,
                top,
                tokens[i],
                ha="center",
                va="center",
                fontsize=9,
                family="monospace",
                color=ink,
            )
            for label, texts in enumerate(rows.values(), 1):
                axis.text(
                    x + cells[i] / 2,
                    top - label,
                    texts[i],
                    ha="center",
                    va="center",
                    fontsize=7.5,
                    family="monospace",
                )
            x += cells[i]
    axis.set(xlim=(-9, width + 1), ylim=(-height * len(lines) + 0.6, 1.2))
    axis.axis("off")
    axis.set_title(title, loc="left")
    scale = plt.cm.ScalarMappable(cmap=map_, norm=plt.Normalize(0, 1))
    figure.colorbar(scale, ax=axis, fraction=0.015, pad=0.01, label="probability π of the token")
    return figure


def band(axis, x, runs, *, label, number=0):
    """The mean of several runs over x, and the range between the lowest and the highest of them."""
    runs = np.asarray(runs)
    axis.plot(
        x,
        runs.mean(0),
        color=COLOURS[number],
        linestyle=LINES[number % len(LINES)],
        linewidth=2,
        label=label,
    )
    axis.fill_between(x, runs.min(0), runs.max(0), color=COLOURS[number], alpha=0.15, linewidth=0)


def effects(axis, names, values, *, label, zero=0.0, left=None):
    """A row for each name: its mean, its 95 % interval as a line, and every single value as a dot. `values`: (mean, half, singles).

    A row whose mean lies to the left of `left` is written there as a number, so that the others have room."""
    for row, (mean, half, singles) in enumerate(values):
        if left is not None and mean < left:
            axis.text(
                left,
                row,
                f"◂ {experiments.number_and_interval(singles, '+')}",
                va="center",
                color="#D55E00",
            )
            continue
        axis.plot(
            singles,
            [row] * len(singles),
            "o",
            markerfacecolor="white",
            markeredgecolor="black",
            markersize=4,
            zorder=2.5,
        )
        if half is not None:
            axis.plot([mean - half, mean + half], [row, row], color="#0072B2", linewidth=2.5)
        axis.plot([mean], [row], "D", color="#D55E00", markersize=6, zorder=3)
    axis.axvline(zero, color="black", linewidth=0.8, linestyle=":")
    axis.set_yticks(range(len(names)), names)
    axis.set(ylim=(len(names) - 0.5, -0.5), xlabel=label)
    axis.set_xlim(left=left)


def table(rows):
    """Rows of text, the first of them the head, as a table."""
    return Markdown(experiments.markdown([[str(cell) for cell in row] for row in rows]))


def paper_and_here(*rows, head=("", "paper", "here")):
    """A table of what the paper reports and what was measured here."""
    return table([head, *rows])


def wrapped(text, width=110):
    """Long lines of a response cut to the width of a page."""
    return "\n".join(
        part for line in text.splitlines() for part in textwrap.wrap(line, width) or [""]
    )
