"""Draw the laboratory's pictures, or the curves of run folders. Needs matplotlib.

    python data/lab/plot.py                                     # into results/
    python data/lab/plot.py runs/A runs/B                       # plot.png
    python data/lab/plot.py runs/* --smooth 5 --output my.pdf   # running means over 5 steps
    python data/lab/plot.py runs/* --measure entropy            # any column of metrics.jsonl

In a notebook: `plot.draw(["runs/A", "runs/B"])`, `plot.draw_two_views(lines, ["GRPO", "AR"])` with
the lines of results/runs.jsonl.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

import analysis
import experiments
import matplotlib
import numpy as np
import pandas as pd
from experiments import REVERSED, TWO
from matplotlib.figure import Figure

# One colour for each thing and one look, in every picture of the project: Okabe and Ito's colours,
# which colour-blind readers can tell apart, and type that a last row can read.
COLORS = {
    "low": "#D55E00",  # tokens with π < η
    "high": "#0072B2",  # tokens with π ≥ η
    "GRPO": "#555555",
    TWO: "#8B5A2B",
    "AR": "#E69F00",
    "AR α = 1": "#6A3D9A",
    "Lopti": "#009E73",
    "AR + Lopti": "#CC79A7",
    REVERSED: "#56B4E9",
    "high only": "#0072B2",
}
LOOK = {"font.size": 15, "axes.titlesize": 17, "axes.titlelocation": "left", "savefig.dpi": 110}
LOOK |= {"axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 2.5}
LOOK |= {"figure.constrained_layout.use": True, "legend.frameon": False}
matplotlib.rcParams.update(LOOK)

BIAS = ", without bias"
NEW = ", new seeds"
PICTURES = {  # file → methods
    "equal_kl": (f"GRPO{NEW}", f"Lopti{NEW}", f"{TWO}{NEW}"),
    "bias": ("GRPO", "AR α = 1", f"AR α = 1{BIAS}"),
}
TITLES = {  # by step, at equal KL
    "equal_kl": ("By step: no measurable difference", "At equal KL: two passes are behind one"),
    "bias": (
        "By step: without its bias α = 1 learns",
        "At equal KL: it is still behind GRPO",
    ),
}


def canvas(panels, height=6.5, **options):
    figure = Figure(figsize=(16, height))
    return figure, figure.subplots(1, panels, **options)


def draw_two_views(lines, methods, titles=(analysis.WHOLE, analysis.EQUAL_KL)):
    """Accuracy in training by step and by KL to the starting policy: the same runs, seen twice.

    Means over the seeds that all methods have, five steps at a time, with 95 % intervals. A method
    with fewer than two runs is left out; None for fewer than two methods or seeds. The KL is that
    at sampling where all runs have it.
    """
    frame = analysis.run_frame(lines)
    runs = {name: frame[frame.method == name].set_index("seed").metrics for name in methods}
    runs = {name: of_method for name, of_method in runs.items() if len(of_method) > 1}
    seeds = [set(of_method.index) for of_method in runs.values()]
    if len(runs) < 2 or len(seeds := sorted(set.intersection(*seeds))) < 2:
        return None
    kl = analysis.column_of_kl(run for of_method in runs.values() for run in of_method[seeds])
    figure, (by_step, by_kl) = canvas(2, sharey=True)
    for name, of_method in runs.items():
        curves = [analysis.accuracy_by_kl(run, kl) for run in of_method[seeds]]
        at = np.linspace(max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves), 50)
        steps = analysis.WINDOW // 2 + 1 + np.arange(len(curves[0][0]))
        views = {by_step: (steps, [y for _, y in curves])}
        views[by_kl] = (at, [np.interp(at, *curve) for curve in curves])
        name = name.removesuffix(NEW)
        style = {"color": COLORS[name.removesuffix(BIAS)]}
        style["linestyle"] = "--" if BIAS in name else "-"
        for axis, (x, values) in views.items():
            mean, half = map(np.array, zip(*map(analysis.interval, zip(*values))))
            axis.plot(x, mean, label=name, **style)
            band = {"color": style["color"], "alpha": 0.12, "linewidth": 0}
            axis.fill_between(x, mean - half, mean + half, **band)
    by_step.set(title=titles[0], xlabel="training step", ylabel="accuracy in training")
    by_kl.set(title=titles[1], xlabel="KL to the starting policy, nats a token")
    far = 2 * by_kl.lines[0].get_xdata()[-1]  # what goes on for long does not squeeze the rest
    by_kl.set_xlim(right=min(far, by_kl.get_xlim()[1]))
    by_step.xaxis.get_major_locator().set_params(integer=True)
    labels, title = by_step.get_legend_handles_labels(), f"means of {len(seeds)} seeds; bands: 95 %"
    figure.legend(*labels, title=title, loc="outside lower center", ncols=3)
    return figure


def draw(folders, smooth=1, measure="reward"):
    """The curves of run folders: lines are training batches, markers held-out puzzles."""
    figure, axes = canvas(2)
    for folder, color in zip(map(Path, folders), itertools.cycle(COLORS.values())):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        metrics = pd.DataFrame(experiments.read_lines(folder / "metrics.jsonl"))
        label = f"{config['method']}, seed {config['seed']} ({folder.name})"
        for axis, name in zip(axes, (measure, "accuracy")):
            values = metrics[name].rolling(smooth, min_periods=1).mean()
            axis.plot(metrics["step"], values, color=color, label=label)
            axis.set(title=name, xlabel="training step")
        sampled = f"avg@{config['eval_samples']}" if config["eval_samples"] else "greedy"
        for row in experiments.read_lines(folder / "evaluations.jsonl"):
            values = [measures[sampled][0] for measures in row["table"].values()]
            axes[1].plot(row["step"], np.mean(values), "o", color=color)
    axes[1].set_title("accuracy; dots: on held-out prompts")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center")
    return figure


def draw_diagnosis(found, alphas, title):
    """What diagnose.py found: a panel for each of its questions, with 95 % intervals."""
    panels = {  # a number: its question, what its entries are
        "‖gradient‖ (of all tokens: 1)": ("Does it have the problem?", ("π<.25", "", "", "π≥.75")),
        "gain in %, measured": ("Would AR help?", [f"α={alpha:g}" for alpha in alphas]),
        "an optimizer for each pass": ("Would Lopti help?", ("gain in %, predicted", "measured")),
    }
    figure, axes = canvas(3)
    for axis, (name, (question, entries)) in zip(axes, panels.items()):
        axis.errorbar(range(len(entries)), *found[name], fmt="o", capsize=4)
        axis.axhline(0, color="black", linewidth=1)
        axis.margins(x=0.3)
        axis.set_xticks(range(len(entries)), entries)
        axis.set(title=question, ylabel=name)
    figure.suptitle(title)
    return figure


def draw_gains(rows):
    """The gain of a step of given length that theory.py predicts, and what world.py simulated."""
    figure, axis = canvas(1, 9)
    rows = pd.DataFrame(rows)
    for name, points in rows.groupby("gain_of", sort=False):
        axis.loglog(points.predicted, points.simulated, "o", label=name, markersize=8)
    ends = [rows.predicted.min(), rows.predicted.max()]
    axis.plot(ends, ends, color="black", linewidth=1, label="as predicted")
    worlds = rows.world.map(str).nunique()
    axis.set_title(f"The gain of a step of given length over GRPO's, in {worlds} designed worlds")
    axis.set(xlabel="predicted by the theorem", ylabel="simulated")
    axis.minorticks_off()
    for side in (axis.xaxis, axis.yaxis):
        side.set_ticks((0.5, 1, 2, 4), ("0.5", "1", "2", "4"))
    axis.legend(title="a mark is a world")
    return figure


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folders", nargs="*", type=Path, metavar="runs/NAME", help="run folders")
    add("--output", type=Path, default="plot.png", help="where the picture of run folders goes")
    add("--smooth", type=int, default=1, help="draw running means over so many steps")
    add("--measure", default="reward", help="what is drawn beside the accuracy")
    args = parser.parse_args()
    if args.folders:
        try:
            pictures = {args.output: draw(args.folders, args.smooth, args.measure)}
        except (OSError, KeyError) as error:
            sys.exit(f"plot.py: {error}")
    else:
        lines = experiments.read_lines(experiments.RESULTS)
        pictures = {
            analysis.FOLDER / f"{name}.png": draw_two_views(lines, methods, TITLES[name])
            for name, methods in PICTURES.items()
        }
        gains = experiments.read_lines(analysis.FOLDER / "world_gain.jsonl")
        pictures[analysis.FOLDER / "world_gain.png"] = draw_gains(gains)
    for path, figure in pictures.items():
        if figure:  # there are runs for it
            figure.savefig(path)
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
