"""The pictures and checks of notebook.ipynb, so that its cells stay short."""

import inspect
import math
import sys
import textwrap
from pathlib import Path

LAB = Path(__file__).resolve().parent
sys.path.insert(0, str(LAB.parents[1]))

import matplotlib.pyplot as plt
import pandas
import torch
from IPython.display import SVG, Code, Markdown, display
from matplotlib.colors import LinearSegmentedColormap
from torch.nn.functional import one_hot

from lopti import policy_loss

# Orange is low probability, blue is high probability. Colour-blind readers can tell these apart.
COLORS = {
    "low": "#D55E00",
    "high": "#0072B2",
    "GRPO": "#555555",
    "GRPO, two passes": "#8B5A2B",
    "AR, α = .3": "#B79AD0",
    "AR, α = 1": "#6A3D9A",
    "Lopti": "#009E73",
    "reversed Lopti": "#8FD1BB",
}
PROBABILITY = LinearSegmentedColormap.from_list("π", [COLORS["low"], "#F7F7F7", COLORS["high"]])
plt.rcParams |= {
    "font.size": 15,
    "axes.titlesize": 17,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 2.5,
    "figure.constrained_layout.use": True,
    "legend.frameon": False,
    "figure.dpi": 80,
}


def roadmap(*boxes):
    """Shows README's picture with these boxes as they are and the others faint."""
    picture = (LAB / "results" / "hero.svg").read_text(encoding="utf-8")
    for box in ("sample", "score", "ar", "split", "pass1", "pass2"):
        if box not in boxes:
            picture = picture.replace(f'<g id="{box}"', f'<g id="{box}" opacity=".2"')
    display(SVG(picture.replace('width="830"', 'width="600"', 1)))


def conclude(text):
    """Shows the pictures drawn so far, then what follows from them."""
    plt.show()
    display(Markdown(f"**In short.** {text}"))


def source(function, first, last):
    """Shows the lines of a function from the first that holds `first` to the next with `last`."""
    text = inspect.getsource(function)
    start = text.rindex("\n", 0, text.index(first)) + 1
    stop = text.index("\n", text.index(last, start))
    display(Code(textwrap.dedent(text[start:stop]), language="python"))


def gradient_norm(logits, ids):
    """The norm of the gradient of each token's log π with respect to the logits.

        ‖∇_z log π_j‖ = ‖e_j - π‖,   z the logits, π = softmax(z)

    logits (M, V), ids (M,) → (M,). Of two tokens with π = .5, e_j - π is (.5, -.5):

    >>> gradient_norm(torch.zeros(1, 2), torch.tensor([0]))
    tensor([0.7071])
    """
    probabilities = logits.softmax(-1)
    return (one_hot(ids, logits.shape[-1]) - probabilities).norm(dim=-1)


def token_sheet(tokens, pi, norms, title, width=78):
    """Draws a response: each token on the colour of its π, under it a bar for its norm."""
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
    text_style = {"ha": "center", "va": "center", "family": "monospace", "fontsize": 13}
    for token, (x, y, size), probability, norm in zip(tokens, places, pi, norms, strict=True):
        axis.add_patch(plt.Rectangle((x, y), size, 0.85, color=PROBABILITY(probability)))
        ink = "white" if abs(probability - 0.5) > 0.3 else "black"
        axis.text(x + size / 2, y + 0.4, token, color=ink, **text_style)
        color = COLORS["low" if probability < 0.5 else "high"]
        axis.add_patch(plt.Rectangle((x + size / 2 - 1, y - 0.1), 2, -norm, color=color))
    axis.set(xlim=(0, width), ylim=(places[-1][1] - 1.6, 1), title=title)
    axis.axis("off")
    label = "π of the token, the colour behind it (bars: orange below .5, blue from .5)"
    scale = plt.cm.ScalarMappable(cmap=PROBABILITY)
    figure.colorbar(scale, ax=axis, location="bottom", aspect=60, shrink=0.6, label=label)


def bounds(pi, norms, vocabulary_size):
    """Draws the norm of every token between its bounds, Prop. 4.2, V the size of the vocabulary.

    √(V/(V-1))·(1-π) ≤ ‖∇ log π‖ ≤ √2·(1-π)
    """
    grid = torch.linspace(0, 1, 100)
    lower = math.sqrt(vocabulary_size / (vocabulary_size - 1)) * (1 - grid)
    upper = math.sqrt(2) * (1 - grid)
    label = "between 1 and √2 times 1 − π"
    _, axis = plt.subplots(figsize=(11, 4.8))
    axis.fill_between(grid, lower, upper, color=COLORS["GRPO"], alpha=0.25, label=label)
    axis.scatter(pi, norms, s=16, c=pi, cmap=PROBABILITY, edgecolors="black", linewidths=0.3)
    axis.plot([], [], "o", color=COLORS["low"], label="a token, coloured by its π")
    title = "Every gradient norm lies between two bounds, which fall as π rises"
    axis.set(title=title, xlabel="π of the token", ylabel="‖∇ log π‖ at the logits")
    axis.legend()


def bars(groups, colors, title, ylabel):
    """Grouped bars. groups: {group: {bar: (value, half of its interval)}}, colors: {bar: color}."""
    pairs = pandas.DataFrame(groups).T
    values = pairs.map(lambda pair: pair[0])
    halves = pairs.map(lambda pair: pair[1])
    style = {"figsize": (12, 4.6), "width": 0.8, "capsize": 4, "rot": 0}
    axis = values.plot.bar(yerr=halves, color=colors, title=title, ylabel=ylabel, **style)
    for drawn in axis.containers[1::2]:  # every other one has the intervals
        labels = [f"{value:.2f}".replace("-", "−") for value in drawn.datavalues]
        axis.bar_label(drawn, labels, fontsize=11, padding=3)
    axis.axhline(0, color="black", linewidth=1)
    axis.margins(y=0.12)
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return axis


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
    """Draws where `policy_loss` has a gradient; letters: {name: (ratio, Â)} to mark."""
    ratio = torch.logspace(-0.7, 0.7, 2000)
    _, axis = plt.subplots(figsize=(12, 3))
    for place, advantage in enumerate((-1.0, 1.0)):
        logprobs = ratio.log().requires_grad_()
        advantages = torch.full((2000,), advantage)
        loss, _ = policy_loss(logprobs, torch.zeros(2000), advantages, normalizer=1)
        (slope,) = torch.autograd.grad(loss, logprobs)
        axis.fill_between(ratio, place - 0.3, place + 0.3, color="#DDDDDD")
        dark = {"where": slope != 0, "color": COLORS["GRPO"]}
        axis.fill_between(ratio, place - 0.3, place + 0.3, **dark)
    for name, (at, advantage) in letters.items():
        color = "white" if 0.8 < at < 1.24 else "black"
        style = {"ha": "center", "va": "center", "color": color, "weight": "bold"}
        axis.text(at, float(advantage > 0), name, **style)
    title = "Dark: the token has a gradient. Light: only that of the KL"
    axis.set(xscale="log", xlabel="ratio r = π_θ / π_old", title=title)
    axis.set_xticks([0.3, 0.8, 1, 1.24, 2.2], [".3", ".80", "1", "1.24", "2.2"])
    axis.set_xticks([], minor=True)
    axis.set_yticks([0, 1], ["Â < 0: π is to fall", "Â > 0: π is to rise"])
