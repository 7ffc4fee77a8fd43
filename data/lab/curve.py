"""Draws README's learning curves, data/lab/results/curve.svg, from curve.csv beside it.

    python data/lab/curve.py

curve.csv has the accuracy in training of each step, one line for each run: those of the bundled
model that runs.jsonl of commit ee9b7ad has on record.
"""

from pathlib import Path

import numpy as np
import pandas
from scipy import stats

RESULTS = Path(__file__).parent / "results"
LEFT, RIGHT, TOP, BOTTOM = 56, 476, 112, 376  # the edges of the plot in the picture
LOWEST, HIGHEST = 0.3, 0.9  # the accuracies there

# Orange and blue mean unlikely and likely tokens on all pages, so no method has them.
STYLES = {  # a method's label, its color on a light page and on a dark one, its dashes
    "GRPO": ("GRPO", "#16191d", "#f0f3f6", "none"),
    "two passes": ("two passes", "#6b737c", "#9aa3ad", "7 5"),
    "AR": ("AR", "#00855f", "#2fc998", "none"),
    "Lopti": ("Lopti", "#a8327d", "#ee8ec6", "none"),
    "both": ("AR + Lopti", "#7d6c00", "#d9c83f", "2 5"),
}


def point(step, accuracy):
    x = LEFT + (RIGHT - LEFT) * (step - 1) / 23
    y = BOTTOM - (BOTTOM - TOP) * (accuracy - LOWEST) / (HIGHEST - LOWEST)
    return f"{x:.1f} {y:.1f}"


def draw(runs):
    """The SVG. `runs` has a row for each (method, seed), and a column for each step."""
    steps = range(1, len(runs.columns) + 1)
    smooth = runs.T.rolling(5, min_periods=1).mean().T
    bands, lines, ends = "", "", {}
    for number, method in enumerate(STYLES):
        own = smooth.loc[method]
        mean = own.mean().to_numpy()
        half = stats.t.ppf(0.975, len(own) - 1) * own.std().to_numpy() / np.sqrt(len(own))
        upper = [point(step, value) for step, value in zip(steps, mean + half)]
        lower = [point(step, value) for step, value in zip(steps, mean - half)]
        bands += f'<path class="area{number}" d="M{" L".join(upper + lower[::-1])}z"/>\n'
        path = " L".join(point(step, value) for step, value in zip(steps, mean))
        lines += f'<path class="line{number}" d="M{path}"/>\n'
        ends[number] = mean[-1]

    labels = ""  # at the ends of the lines, the highest first, 25 apart
    for place, number in enumerate(sorted(ends, key=ends.get, reverse=True)):
        y = TOP + 12 + 25 * place
        end = point(24, ends[number])
        labels += f'<path class="line{number} thin" d="M{end} L{RIGHT + 24} {y}"/>\n'
        label = list(STYLES.values())[number][0]
        labels += f'<text class="text{number}" x="{RIGHT + 30}" y="{y + 6}">{label}</text>\n'

    axes = ""
    for accuracy in (0.3, 0.5, 0.7, 0.9):
        left, y = point(1, accuracy).split()
        axes += f'<path class="grid" d="M{left} {y}H{RIGHT}"/>\n'
        axes += f'<text class="quiet" x="{LEFT - 8}" y="{float(y) + 6}" text-anchor="end">'
        axes += f"{accuracy:.1f}</text>\n".replace("0.", ".")
    for step in (1, 6, 12, 18, 24):
        x = point(step, LOWEST).split()[0]
        axes += (
            f'<text class="quiet" x="{x}" y="{BOTTOM + 25}" text-anchor="middle">{step}</text>\n'
        )

    light, dark = "", ""
    for number, (_, on_light, on_dark, dashes) in enumerate(STYLES.values()):
        light += f".area{number}, .text{number} {{ fill: {on_light} }} "
        light += f".line{number} {{ stroke: {on_light}; stroke-dasharray: {dashes} }}\n"
        dark += f".area{number}, .text{number} {{ fill: {on_dark} }} "
        dark += f".line{number} {{ stroke: {on_dark} }}\n"
    template = (RESULTS.parent / "curve.svg.in").read_text(encoding="utf-8")
    parts = {"LIGHT": light, "DARK": dark, "AXES": axes, "DRAWN": bands + lines + labels}
    for name, text in parts.items():
        template = template.replace(name, text.rstrip("\n"))
    return template


if __name__ == "__main__":
    runs = pandas.read_csv(RESULTS / "curve.csv", index_col=["method", "seed"])
    (RESULTS / "curve.svg").write_text(draw(runs), encoding="utf-8")
