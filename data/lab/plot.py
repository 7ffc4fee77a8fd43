"""Draw the laboratory's pictures, or the curves of run folders. Needs matplotlib.

    python data/lab/plot.py                                     # into results/
    python data/lab/plot.py runs/A runs/B                       # plot.png
    python data/lab/plot.py runs/* --smooth 5 --output my.pdf   # running means over 5 steps

In a notebook: `plot.draw(["runs/A", "runs/B"])`, `plot.draw_training(lines)`,
`plot.draw_effects(lines)` with the lines of results/runs.jsonl.
"""

import argparse
import json
import math
import statistics
import sys
from collections import Counter
from itertools import accumulate
from pathlib import Path

import experiments
import matplotlib
from matplotlib.figure import Figure

# Colours of Okabe and Ito, which stay apart for colour-blind readers, without their yellow, which
# is lost on white. 7 colours and 5 line styles have no common divisor: 35 lines differ.
COLOURS = ("#000000", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
LINES = ("-", "--", "-.", ":", (0, (7, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v")
BAND = "#BBBBBB"
STYLE = {
    "font.size": 16,
    "axes.titlesize": 18,
    "axes.titlelocation": "left",
    "lines.linewidth": 2.5,
}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 150}
matplotlib.rcParams.update(STYLE)


# ---- The laboratory


SHOWN = ("AR", "Lopti", "AR + Lopti", "reversed Lopti", "min-p")
PANELS = {"avg@2": "sampled accuracy", "reward": "reward", "cut": "share cut"}


def at_step(lines, method, measure, number):
    """A measure of every run of a method at its evaluation `number`, mean over the sizes."""
    runs = [line for line in lines if line["method"] == method]
    one = [{"evaluations": run["evaluations"][number : number + 1]} for run in runs]
    return [experiments.held_out(run, measure, last=1) for run in one]


def draw_training(lines):
    """Each method minus GRPO on held-out puzzles, over training.

    The grey band is where the mean of five runs of GRPO itself would lie, 19 times in 20, against
    that of its ten.
    """
    steps = [row["step"] for row in next(x for x in lines if x["method"] == "GRPO")["evaluations"]]
    figure = Figure(figsize=(16, 6), layout="constrained")
    for axis, (measure, title) in zip(figure.subplots(1, 3), PANELS.items()):
        grpo = [at_step(lines, "GRPO", measure, number) for number in range(len(steps))]
        margins = []
        for values in grpo:
            degrees = len(values) - 1
            t = experiments.critical_value((5, len(values)), ((0, 1),), degrees)
            margins.append(t * statistics.stdev(values) * math.sqrt(1 / 5 + 1 / len(values)))
        axis.fill_between(steps, [-margin for margin in margins], margins, color=BAND, alpha=0.5)
        axis.axhline(0, color="black", linewidth=1)
        for number, method in enumerate(SHOWN):
            values = [at_step(lines, method, measure, step) for step in range(len(steps))]
            if not values[0]:
                continue
            means = [statistics.mean(ours) - statistics.mean(g) for ours, g in zip(values, grpo)]
            style = {"color": COLOURS[1 + number], "linestyle": LINES[number]}
            axis.plot(steps, means, marker=MARKERS[number], markersize=8, label=method, **style)
        axis.set(title=f"{title} minus GRPO's", xlabel="training step", xticks=steps)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


EFFECTS = ("the paper's cures", "order and groups", "token-centred Â", "steps and their size")
EFFECTS += ("later treatments", "no reward", "A/A")


def draw_effects(lines):
    """Each method minus GRPO by the three outcomes: mean, Dunnett's interval, every run.

    Blue is surely more, orange surely less. Methods that are GRPO, five runs each, would all lie in
    the grey band 19 times in 20.
    """
    runs = Counter(line["method"] for line in lines)
    groups = {
        name: [method for method in experiments.GROUPS[name] if runs[method] > 1]
        for name in EFFECTS
    }
    methods = [method for group in groups.values() for method in group]
    claims = [(method, method, "GRPO", 0) for method in methods]
    rows, row = {}, 0  # method -> its place, with a gap between groups
    for group in groups.values():
        for method in group:
            rows[method] = row = row + 1
        row += 0.7 * bool(group)
    figure = Figure(figsize=(16, 2 + 0.42 * row), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for axis, outcome in zip(axes, experiments.JUDGED):
        grpo = experiments.values_of(lines, "GRPO", outcome)
        effects = experiments.compare(lines, claims, outcome)
        first, (_, half) = next(iter(effects.items()))
        margin = half * math.sqrt((1 / 5 + 1 / len(grpo)) / (1 / runs[first] + 1 / len(grpo)))
        left = -4.5 * margin
        axis.set_xlim(left, 3 * margin)
        for method, (difference, half) in effects.items():
            sure = COLOURS[2] if difference > 0 else COLOURS[3]
            colour = sure if abs(difference) > half else COLOURS[0]
            if difference - half < left:  # far off: its number is more legible than its place
                style = {"color": colour, "verticalalignment": "center"}
                text = f"← {difference:.2f} ± {half:.2f}"
                axis.text(left + 0.1 * margin, rows[method], text, **style)
                continue
            values = experiments.values_of(lines, method, outcome)
            singles = [value - statistics.mean(grpo) for value in values]
            axis.plot(singles, [rows[method]] * len(values), "o", color="#888888", markersize=5)
            axis.errorbar(difference, rows[method], xerr=half, fmt="D", color=colour, markersize=8)
        axis.axvspan(-margin, margin, color=BAND, alpha=0.5, linewidth=0)
        axis.axvline(0, color="black", linewidth=1)
        axis.set_title(f"{outcome}\nminus GRPO's")
        axis.locator_params(axis="x", nbins=5)
    axes[0].set_yticks(list(rows.values()), list(rows))
    axes[0].set_ylim(row + 0.5, 0.3)
    return figure


def draw_real_model(lines):
    """Accuracy in training on SmolLM2, a row for each learning rate.

    Left: means over seeds and over 3 steps. Right: every dot is a run, its mean after the first
    step.
    """
    lines = [line for line in lines if "metrics" in line]  # not the untrained model
    methods = list(dict.fromkeys(line["method"] for line in lines))
    rates = sorted({line["learning_rate"] for line in lines}, key=float)
    figure = Figure(figsize=(16, 4.5 * len(rates)), layout="constrained")
    axes = figure.subplots(len(rates), 2, sharex="col", squeeze=False)
    for rate, (over_steps, over_runs) in zip(rates, axes):
        for number, method in enumerate(methods):
            cell = {"method": method, "learning_rate": rate}
            runs = [line for line in lines if cell.items() <= line.items()]
            accuracies = zip(*(run["metrics"]["accuracy"] for run in runs))  # of each step
            means = running_mean([statistics.mean(step) for step in accuracies], 3)
            style = {"color": COLOURS[number], "linestyle": LINES[number], "label": method}
            over_steps.plot(range(1, len(means) + 1), means, **style)
            whole = [experiments.accuracy_in_training(run) for run in runs]
            over_runs.plot(whole, [number] * len(whole), "o", color=COLOURS[number], markersize=9)
            over_runs.plot(
                statistics.mean(whole), number, "|", color=COLOURS[number], markersize=40
            )
        over_runs.set_yticks(range(len(methods)), methods)
        over_runs.set(title="mean of each run, and of all (|)", ylim=(len(methods) - 0.4, -0.6))
        over_steps.set(title=f"accuracy in training at {rate}, 3 steps at a time", ylim=(0, 0.8))
    over_steps.set_xlabel("training step")
    axes[0, 0].legend(frameon=False)
    return figure


# ---- Run folders

CURVES = (  # title, what is drawn, over what
    ("reward", "reward", "step"),
    ("accuracy", "accuracy", "step"),
    ("length of a response (tokens)", "completions/mean_length", "step"),
    ("entropy of a token (nats)", "entropy", "step"),
    ("clipped tokens (%)", "clipped", "step"),
    ("accuracy over time (minutes)", "accuracy", "minutes"),
)


def read_run(folder):
    """What to call a run, its steps, and its evaluations as (step, sampled accuracy)."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    steps = experiments.read_lines(folder / "metrics.jsonl")
    seconds = [sum(step[key] for key in step if key.startswith("seconds/")) for step in steps]
    for step, time in zip(steps, accumulate(seconds)):
        step["minutes"] = time / 60
        clipped = [step.get(f"clip_ratio/{side}_mean", 0) for side in ("low", "high")]
        step["clipped"] = 100 * sum(clipped)
    evaluations = [
        (row["step"], statistics.mean(table[name][0] for table in row["table"].values()))
        for row in experiments.read_lines(folder / "evaluations.jsonl")
        for name in next(iter(row["table"].values()))
        if name.startswith("avg@")
    ]
    return f"{config['method']}, seed {config['seed']} ({folder.name})", steps, evaluations


def running_mean(values, steps):
    """The mean of each value and those before it, `steps` in all, fewer at the beginning.

    >>> running_mean([1, 2, 3], 2)
    [1.0, 1.5, 2.5]
    """
    ends = range(1, len(values) + 1)
    return [statistics.fmean(values[max(0, end - steps) : end]) for end in ends]


def draw(folders, smooth=1):
    """The curves of run folders: lines are training batches, markers held-out puzzles."""
    runs = [read_run(Path(folder)) for folder in folders]
    figure = Figure(figsize=(16, 9), layout="constrained")
    for axis, (title, name, over) in zip(figure.subplots(2, 3).flat, CURVES):
        for number, (label, steps, evaluations) in enumerate(runs):
            colour, x = COLOURS[number % len(COLOURS)], [step[over] for step in steps]
            style = {"color": colour, "linestyle": LINES[number % len(LINES)], "label": label}
            axis.plot(x, running_mean([step[name] for step in steps], smooth), **style)
            if name == "accuracy":
                place = {0: 0} | {step["step"]: step[over] for step in steps}
                dots = [(place[step], value) for step, value in evaluations if step in place]
                marker = {"marker": MARKERS[number % len(MARKERS)], "color": colour}
                axis.plot(*zip(*dots), linestyle="", markersize=9, **marker) if dots else None
        axis.set_title(title)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return figure


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folders", nargs="*", type=Path, metavar="runs/NAME", help="run folders")
    add("--output", type=Path, default="plot.png", help="where the picture of run folders goes")
    add("--smooth", type=int, default=1, help="draw running means over so many steps")
    args = parser.parse_args()
    if args.folders:
        try:
            pictures = {args.output: draw(args.folders, args.smooth)}
        except OSError as error:
            sys.exit(f"plot.py: {error}")
    else:
        lines, folder = experiments.read_lines(experiments.RESULTS), experiments.RESULTS.parent
        real = experiments.read_lines(experiments.REAL_MODEL)
        pictures = {
            folder / "training.png": draw_training(lines),
            folder / "effects.png": draw_effects(lines),
            folder / "real_model.png": draw_real_model(real),
        }
    for path, figure in pictures.items():
        figure.savefig(path)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
