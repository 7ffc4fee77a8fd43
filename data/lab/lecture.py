"""The pictures and checks of notebook.ipynb, so that its cells stay short."""

import inspect
import io
import json
import math
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
import lopti  # isort: skip, before torch

import matplotlib.pyplot as plt
import PIL.Image
import torch
from IPython.display import SVG, Code, Image, Markdown, display
from matplotlib.colors import LinearSegmentedColormap

# Orange is unlikely, blue is likely, everywhere. Colour-blind readers can tell these apart.
COLORS = {
    "low": "#D55E00",
    "high": "#0072B2",
    "GRPO": "#555555",
    "GRPO, two passes": "#8B5A2B",
    "AR": "#B79AD0",
    "AR α = 1": "#6A3D9A",
    "Lopti": "#009E73",
    "reversed Lopti": "#8FD1BB",
}
PROBABILITY = LinearSegmentedColormap.from_list("π", [COLORS["low"], "#F7F7F7", COLORS["high"]])
plt.rcParams.update(
    {
        "font.size": 15,
        "axes.titlesize": 17,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "lines.linewidth": 2.5,
        "figure.constrained_layout.use": True,
        "legend.frameon": False,
        "savefig.dpi": 80,
    }
)

# ---- What a cell shows

BOXES = ("sample", "score", "ar", "split", "pass1", "pass2")  # of README's picture


def roadmap(*boxes):
    """README's picture with these boxes as they are and the others faint."""
    picture = (HERE / "results" / "hero.svg").read_text(encoding="utf-8")
    for box in BOXES:
        if box not in boxes:
            picture = picture.replace(f'<g id="{box}"', f'<g id="{box}" opacity=".2"')
    display(SVG(picture.replace('width="640"', 'width="400"')))


def answer(text):
    """The pictures drawn so far, then the answer to the question."""
    for number in plt.get_fignums():
        figure = plt.figure(number)
        title = figure.get_suptitle() or figure.axes[0].get_title("left")
        display(Image(small_png(figure), alt=title))
    plt.close("all")
    display(Markdown(f"**Answer.** {text}"))


def small_png(figure):
    """A picture in 128 colours: a third of the bytes, and nothing else to see."""
    drawn = io.BytesIO()
    figure.savefig(drawn, bbox_inches="tight")
    small = io.BytesIO()
    PIL.Image.open(drawn).convert("RGB").quantize(128).save(small, "png", optimize=True)
    return small.getvalue()


def source(function, first, last):
    """The lines of a function from the first that holds `first` to the next that holds `last`."""
    lines = inspect.getsource(function).splitlines()
    start = 0
    while first not in lines[start]:
        start += 1
    stop = start
    while last not in lines[stop]:
        stop += 1
    text = textwrap.dedent("\n".join(lines[start : stop + 1]))
    display(Code(text, language="python"))


# ---- The push of a token


def push(logits, ids):
    """The push of each token, the length of the gradient of its log π at the logits.

        ‖∇_z log π_j‖ = ‖e_j - π‖,   z the logits, π = softmax(z)

    logits (M, V), ids (M,) → (M,). If two words are equally likely, e_j - π is (.5, -.5):

    >>> push(torch.zeros(1, 2), torch.tensor([0]))
    tensor([0.7071])
    """
    probabilities = logits.softmax(-1)
    chosen = torch.nn.functional.one_hot(ids, logits.shape[-1])
    return (chosen - probabilities).norm(dim=-1)


def token_sheet(tokens, pi, pushes, title, width=78):
    """An answer: each token on the colour of its π, under it a bar as high as its push."""
    places = []  # left end, foot, width of each token
    x = 0
    line = 0
    for token in tokens:
        if x + len(token) + 1 > width:
            x = 0
            line += 1
        places.append((x, -2.7 * line, len(token) + 0.8))
        x += len(token) + 1
    figure, axis = plt.subplots(figsize=(13, 0.85 * (line + 1) + 1.5))
    for token, place, probability, length in zip(tokens, places, pi, pushes, strict=True):
        x, y, size = place
        axis.add_patch(plt.Rectangle((x, y), size, 0.85, color=PROBABILITY(probability)))
        ink = "white" if abs(probability - 0.5) > 0.3 else "black"
        how = {"ha": "center", "va": "center", "family": "monospace", "fontsize": 13}
        axis.text(x + size / 2, y + 0.4, token, color=ink, **how)
        color = COLORS["low" if probability < 0.5 else "high"]
        axis.add_patch(plt.Rectangle((x + size / 2 - 1, y - 0.1), 2, -length, color=color))
    axis.set(xlim=(0, width), ylim=(places[-1][1] - 1.6, 1), title=title)
    axis.axis("off")
    scale = plt.cm.ScalarMappable(cmap=PROBABILITY)
    label = "π of the token, the colour behind it (bars: orange below .5, blue from .5)"
    figure.colorbar(scale, ax=axis, location="bottom", aspect=60, shrink=0.6, label=label)


def cone(pi, pushes, vocabulary_size):
    """The push of every token between the paper's bounds (Prop. 4.2, V words in the vocabulary):

    √(V/(V-1))·(1-π) ≤ push ≤ √2·(1-π)
    """
    grid = torch.linspace(0, 1, 100)
    lower = math.sqrt(vocabulary_size / (vocabulary_size - 1)) * (1 - grid)
    upper = math.sqrt(2) * (1 - grid)
    _, axis = plt.subplots(figsize=(11, 4.8))
    label = "between 1 and √2 times 1 − π"
    axis.fill_between(grid, lower, upper, color=COLORS["GRPO"], alpha=0.25, label=label)
    axis.scatter(pi, pushes, s=16, c=pi, cmap=PROBABILITY, edgecolors="black", linewidths=0.3)
    axis.plot([], [], "o", color=COLORS["low"], label="a token, coloured by its π")
    title = "Every push lies between the two bounds, which fall as π rises"
    axis.set(title=title, xlabel="π of the token", ylabel="push: ‖∇ log π‖ at the logits")
    axis.legend()


# ---- Bars, curves, the clip, the designed worlds


def bars(groups, colors, title, ylabel, line_at=None):
    """Grouped bars. groups: {group: {bar: (value, half of its interval)}}, colors: {bar: color}."""
    _, axis = plt.subplots(figsize=(12, 4.6))
    width = 0.8 / len(colors)
    for number, (bar, color) in enumerate(colors.items()):
        shift = (number - (len(colors) - 1) / 2) * width
        places = [place + shift for place in range(len(groups))]
        values = [group[bar][0] for group in groups.values()]
        halves = [group[bar][1] for group in groups.values()]
        drawn = axis.bar(places, values, width, yerr=halves, color=color, label=bar, capsize=4)
        labels = [f"{value:.2f}".replace("-", "−") for value in values]
        axis.bar_label(drawn, labels, fontsize=11, padding=3)
    axis.axhline(0, color="black", linewidth=1)
    if line_at:
        height, text = line_at
        axis.axhline(height, color="black", linewidth=1, linestyle="--")
        axis.text(len(groups) - 0.5, height, text, ha="right", va="bottom", fontsize=13)
    axis.set_xticks(range(len(groups)), groups)
    for label in axis.get_xticklabels():  # the house colours
        if label.get_text().startswith("π < .25"):
            label.set_color(COLORS["low"])
        if label.get_text().startswith("π ≥ .75"):
            label.set_color(COLORS["high"])
    axis.set(title=title, ylabel=ylabel)
    axis.margins(y=0.12)
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))


def curves(lines, title, xlabel, ylabel, letters=()):
    """Lines by name: {name: (x, y, style of plot)}. letters: (x, y, name) of points to mark."""
    _, axis = plt.subplots(figsize=(11, 4.6))
    for name, (x, y, style) in lines.items():
        axis.plot(x, y, label=name, **style)
    for x, y, name in letters:
        axis.plot(x, y, "o", color="black")
        axis.annotate(name, (x, y), (6, 6), textcoords="offset points")
    axis.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return axis


def clip_cases(letters):
    """For which ratios `policy_loss` has a gradient; letters: {name: (ratio, Â)} to mark."""
    ratio = torch.logspace(-0.7, 0.7, 2000)
    _, axis = plt.subplots(figsize=(12, 3))
    for place, advantage in enumerate((-1.0, 1.0)):
        logprobs = ratio.log().requires_grad_()
        old_logprobs = torch.zeros(2000)
        advantages = torch.full((2000,), advantage)
        loss, _ = lopti.policy_loss(logprobs, old_logprobs, advantages, normalizer=1)
        (slope,) = torch.autograd.grad(loss, logprobs)
        low, high = place - 0.3, place + 0.3
        axis.fill_between(ratio, low, high, color="#DDDDDD")
        axis.fill_between(ratio, low, high, where=slope != 0, color=COLORS["GRPO"])
    for name, (at, advantage) in letters.items():
        color = "white" if 0.8 < at < 1.24 else "black"
        how = {"ha": "center", "va": "center", "color": color, "weight": "bold"}
        axis.text(at, float(advantage > 0), name, **how)
    title = "Dark: it has a gradient. Light: none, but for the KL"
    axis.set(xscale="log", xlabel="ratio r = π_θ / π_old", title=title)
    axis.set_xticks([0.3, 0.8, 1, 1.24, 2.2], [".3", ".80", "1", "1.24", "2.2"])
    axis.set_xticks([], minor=True)
    axis.set_yticks([0, 1], ["Â < 0, pushed down", "Â > 0, pushed up"])


# Accuracy minus GRPO's at equal KL and half of its 95 % interval, 20 seeds: RESULTS.md, R7.
WORLDS = {
    "Unlikely words are noise\nsteps of fixed length\n$E_s[π]$ = .48, $E_v[π]$ = .14": {
        "GRPO, two passes": (0.000, 0.006),
        "Lopti": (0.071, 0.011),
        "AR, α = .3": (0.008, 0.006),
        "AR, α = 1": (0.050, 0.009),
    },
    "Unlikely words are noise\nAdamW\n$E_s[π]$ = .48, $E_v[π]$ = .14": {
        "GRPO, two passes": (0.005, 0.004),
        "Lopti": (0.005, 0.006),
        "AR, α = .3": (0.011, 0.008),
        "AR, α = 1": (0.066, 0.015),
    },
    "Signal and noise sit alike\nAdamW\n$E_s[π]$ = .49, $E_v[π]$ = .49": {
        "GRPO, two passes": (0.001, 0.007),
        "Lopti": (0.002, 0.009),
        "AR, α = .3": (-0.001, 0.002),
        "AR, α = 1": (-0.010, 0.005),
    },
    "Unlikely words are signal\nsteps of fixed length\n$E_s[π]$ = .18, $E_v[π]$ = .40": {
        "GRPO, two passes": (0.000, 0.001),
        "Lopti": (-0.003, 0.001),
        "AR, α = .3": (-0.002, 0.002),
        "AR, α = 1": (-0.021, 0.003),
    },
}
DRAWN_IN = {
    "GRPO, two passes": COLORS["GRPO, two passes"],
    "Lopti": COLORS["Lopti"],
    "AR, α = .3": COLORS["AR"],
    "AR, α = 1": COLORS["AR α = 1"],
}


def worlds():
    """Who leads GRPO in four designed worlds. `small_png` of it is data/lab/results/world.png."""
    figure, axes = plt.subplots(1, 4, figsize=(16, 5.6), sharex=True, sharey=True)
    for axis, (world, methods) in zip(axes, WORLDS.items(), strict=True):
        for height, (name, color) in enumerate(DRAWN_IN.items()):
            lead, half = methods[name]
            axis.errorbar(lead, -height, xerr=half, fmt="o", color=color, markersize=9, capsize=5)
            text = f"{lead:+.3f}".replace("-", "−").replace("+0.000", "0")
            right = (max(lead + half, 0), -height)
            axis.annotate(text, right, (7, 0), textcoords="offset points", va="center")
        axis.axvline(0, color="black", linewidth=1)
        axis.set_title(world, fontsize=15)
        axis.set_yticks([0, -1, -2, -3], DRAWN_IN)
        axis.set_xticks([0, 0.05, 0.1], ["0", ".05", ".10"])
        axis.set(xlim=(-0.03, 0.13), ylim=(-3.5, 0.5))
    title = "With steps of fixed length AR and Lopti lead only where unlikely words are noise"
    figure.suptitle(title, x=0.01, ha="left", fontsize=17, weight="bold")
    note = "accuracy minus GRPO's at equal KL, with 95 % intervals; all panels have one scale"
    figure.supxlabel(note, fontsize=15)
    return figure


# ---- What golden.json says of a student's work


def check(method):
    """Compares method(advantages, pi, mask, alpha, eta) with golden.json: Â after Eq. 4, passes."""
    golden = json.loads((HERE.parent / "golden.json").read_text(encoding="utf-8"))
    cases = golden["cases"]
    right = {"AR": 0, "Lopti": 0}
    for case in cases:
        old_logprobs = torch.tensor(case["old_logprobs"])  # (B, L)
        lengths = torch.tensor(case["lengths"])
        mask = torch.arange(old_logprobs.shape[1]) < lengths[:, None]
        advantages = torch.tensor(case["advantages"])[:, None] * mask
        low = torch.tensor(case["low"])
        expected = [low, mask & ~low] if case["eta"] else [mask]
        found, passes = method(advantages, old_logprobs.exp(), mask, case["alpha"], case["eta"])
        if torch.allclose(found, torch.tensor(case["reweighted_advantages"]), atol=1e-6):
            right["AR"] += 1
        if len(passes) == len(expected) and all(map(torch.equal, passes, expected)):
            right["Lopti"] += 1
    for name, count in right.items():
        said = "done" if count == len(cases) else "not yet"
        print(f"{name}: {said}, {count} of {len(cases)} cases are right")
