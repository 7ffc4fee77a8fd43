"""The pictures and checks of notebook.ipynb, so that its cells stay short."""

import inspect
import io
import json
import math
import re
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
import lopti  # isort: skip, before torch

import matplotlib.pyplot as plt
import pandas
import PIL.Image
import torch
from IPython.display import SVG, Code, Image, Markdown, display
from matplotlib.colors import LinearSegmentedColormap
from theory import logit_gradient_bounds

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
    "AR + Lopti": "#CC79A7",
}
LOOK = {"font.size": 15, "axes.titlesize": 17, "axes.titlelocation": "left", "savefig.dpi": 80}
LOOK |= {"axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 2.5}
LOOK |= {"figure.constrained_layout.use": True, "legend.frameon": False}
plt.rcParams.update(LOOK)
PROBABILITY = LinearSegmentedColormap.from_list("π", [COLORS["low"], "#F7F7F7", COLORS["high"]])


def roadmap(*boxes):
    """README's picture with these boxes as they are and the others faint; without boxes, all."""
    picture = (HERE / "results" / "hero.svg").read_text(encoding="utf-8")
    for box in {*re.findall('<g id="(.*?)"', picture)} - {*boxes} if boxes else ():
        picture = picture.replace(f'<g id="{box}"', f'<g id="{box}" opacity=".2"')
    display(SVG(picture.replace('width="640"', 'width="400"')))


def answer(text):
    """The pictures drawn so far, in few colours so that the file stays small; then the answer."""
    for number in plt.get_fignums():
        drawn, small = io.BytesIO(), io.BytesIO()
        plt.figure(number).savefig(drawn, bbox_inches="tight")
        PIL.Image.open(drawn).convert("RGB").quantize(128).save(small, "png", optimize=True)
        display(Image(small.getvalue(), alt=plt.figure(number).axes[0].get_title("left")))
    plt.close("all")
    display(Markdown(f"**Answer.** {text}"))


def source(function, first="", last="\0"):
    """The source of a function, or its lines from the one that holds `first` to that of `last`."""
    lines = inspect.getsource(function).splitlines()
    start = next(i for i, line in enumerate(lines) if first in line)
    stop = next((i + 1 for i, line in enumerate(lines) if i >= start and last in line), None)
    display(Code(textwrap.dedent("\n".join(lines[start:stop])), language="python"))


# ---- Tokens and answers


def token_sheet(tokens, pi, pushes, title, width=78):
    """An answer: each token on the colour of its π, under it a bar as high as its push."""
    places, x, line = [], 0, 0
    for token in tokens:
        if x + len(token) + 1 > width:
            x, line = 0, line + 1
        places.append((x, -2.7 * line, len(token) + 0.8))
        x += len(token) + 1
    figure, axis = plt.subplots(figsize=(13, 0.85 * (line + 1) + 1.5))
    for token, (x, y, size), probability, push in zip(tokens, places, pi, pushes):
        axis.add_patch(plt.Rectangle((x, y), size, 0.85, color=PROBABILITY(probability)))
        ink = "white" if abs(probability - 0.5) > 0.3 else "black"
        how = {"ha": "center", "va": "center", "family": "monospace", "fontsize": 13}
        axis.text(x + size / 2, y + 0.4, token, color=ink, **how)
        color = COLORS["low" if probability < 0.5 else "high"]
        axis.add_patch(plt.Rectangle((x + size / 2 - 1, y - 0.1), 2, -push, color=color))
    axis.set(xlim=(0, width), ylim=(places[-1][1] - 1.6, 1), title=title)
    axis.axis("off")
    scale = plt.cm.ScalarMappable(cmap=PROBABILITY)
    label = "π of the token, the colour behind it (bars: orange below .5, blue from .5)"
    figure.colorbar(scale, ax=axis, location="bottom", aspect=60, shrink=0.6, label=label)


def cone(pi, pushes, vocabulary_size):
    """The push of every token, between the bounds of Prop. 4.2."""
    grid = torch.linspace(0, 1, 100)
    _, axis = plt.subplots(figsize=(11, 4.8))
    allowed = {"color": COLORS["GRPO"], "alpha": 0.25, "label": "between 1 and √2 times 1 − π"}
    axis.fill_between(grid, *logit_gradient_bounds(grid, vocabulary_size), **allowed)
    axis.scatter(pi, pushes, s=16, c=pi, cmap=PROBABILITY, edgecolors="black", linewidths=0.3)
    axis.plot([], [], "o", color=COLORS["low"], label="a token, coloured by its π")
    title = "Every push lies between the two bounds, which fall as π rises"
    axis.set(title=title, xlabel="π of the token", ylabel="push: ‖∇ log π‖ at the logits")
    axis.legend()


def bars(groups, colors, title, ylabel, digits=2):
    """Grouped bars. groups: {group: {bar: value or (value, half of its interval)}}."""
    pairs = pandas.DataFrame(groups).T.map(lambda x: x if isinstance(x, tuple) else (x, math.nan))
    values, halves = (pairs.map(lambda pair, part=part: pair[part]) for part in (0, 1))
    look = {"rot": 0, "width": 0.8, "capsize": 4, "figsize": (12, 4.6), "color": colors}
    axis = values.plot.bar(yerr=halves, title=title, ylabel=ylabel, **look)
    for shown in axis.containers:
        if hasattr(shown, "patches"):  # bars, not their whiskers
            places = lambda x: digits + (0 < abs(x) < 0.005)  # .003 is not .00
            fmt = lambda x, places=places: f"{x:.{places(x)}f}".replace("-", "−")
            axis.bar_label(shown, fmt=fmt, fontsize=11, padding=3)
    axis.axhline(0, color="black", linewidth=1)
    axis.margins(y=0.1)
    below = -0.1 - 0.07 * max(name.count("\n") for name in groups)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, below), ncols=len(colors))


def on_record(model, row):
    """The numbers of a row of diagnose_MODEL.txt: pairs of a value and half of its interval."""
    text = (HERE / "results" / f"diagnose_{model}.txt").read_text(encoding="utf-8")
    [line] = re.findall(rf"^ +{re.escape(row)}  +(.*)", text, re.MULTILINE)
    return [tuple(map(float, x)) for x in re.findall(r"(\S+) ± (\S+)", line.replace("−", "-"))]


# ---- The clip, curves, and what golden.json says of a student's work


def clip_cases(letters):
    """For which ratios `policy_loss` has a gradient; letters: {name: (ratio, Â)} to mark."""
    ratio, old = torch.logspace(-0.7, 0.7, 2000)[None], torch.zeros(1, 2000)
    _, axis = plt.subplots(figsize=(12, 3))
    for place, advantage in enumerate((-1.0, 1.0)):
        logprobs = ratio.log().requires_grad_()
        loss, _ = lopti.policy_loss(logprobs, old, old + advantage, old == 0)
        (slope,) = torch.autograd.grad(loss, logprobs)
        inside, (low, high) = slope[0] != 0, (place - 0.3, place + 0.3)
        axis.fill_between(ratio[0], low, high, color="#DDDDDD")
        axis.fill_between(ratio[0], low, high, where=inside, color=COLORS["GRPO"])
    for name, (at, advantage) in letters.items():
        color = "white" if 0.8 < at < 1.24 else "black"
        how = {"ha": "center", "va": "center", "color": color, "weight": "bold"}
        axis.text(at, float(advantage > 0), name, **how)
    title = "Dark: it has a gradient. Light: none, but for the KL"
    axis.set(xscale="log", xlabel="ratio r = π_θ / π_old", title=title)
    axis.set_xticks([0.3, 0.8, 1, 1.24, 2.2], [".3", ".80", "1", "1.24", "2.2"])
    axis.set_xticks([], minor=True)
    axis.set_yticks([0, 1], ["Â < 0, pushed down", "Â > 0, pushed up"])


def curves(lines, title, xlabel, ylabel, letters=()):
    """Lines by name: {name: (x, y, style of plot)}. letters: (x, y, name) of points to mark."""
    _, axis = plt.subplots(figsize=(11, 4.6))
    for name, (x, y, style) in lines.items():
        axis.plot(x, y, label=name, **style)
    for at, height, name in letters:
        axis.plot(at, height, "o", color="black")
        axis.annotate(name, (at, height), (6, 6), textcoords="offset points")
    if isinstance(x, range):
        axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def golden(name):
    return json.loads((HERE.parent / "golden.json").read_text(encoding="utf-8"))[name]


def check(method):
    """Compares method(advantages, pi, mask, alpha, eta) with golden.json: Â after Eq. 4, passes."""
    right, cases = {"AR": 0, "Lopti": 0}, golden("cases")
    for case in cases:
        names = "advantages", "old_logprobs", "reweighted_advantages", "low"
        raw, old, weighted, low = (torch.tensor(case[name]) for name in names)
        mask = torch.arange(old.shape[1]) < torch.tensor(case["lengths"])[:, None]
        expected, settings = [low, mask & ~low], (case["alpha"], case["eta"])
        found, passes = method(raw[:, None] * mask, old.exp(), mask, *settings)
        right["AR"] += torch.allclose(found, weighted, atol=1e-6)
        expected = expected if case["eta"] else [mask]
        right["Lopti"] += len(passes) == len(expected) and all(map(torch.equal, passes, expected))
    for name, count in right.items():
        said = "done" if count == len(cases) else "not yet"
        print(f"{name}: {said}, {count} of {len(cases)} cases are right")


def compare(port):
    """The largest difference of a port's weights from golden.json, after each optimizer step."""
    found = {}
    for case in golden("rollouts")[:4]:  # GRPO, AR, Lopti, both
        right = [torch.tensor(step["table"], dtype=torch.float64) for step in case["steps"]]
        pairs = zip(right, port(case), strict=True)
        found[case["name"]] = pandas.Series([float((a - b).abs().max()) for a, b in pairs])
    return pandas.DataFrame(found).T.rename(columns=lambda step: f"step {step + 1}")
