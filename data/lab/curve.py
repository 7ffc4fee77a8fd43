"""How did training go? Draws the curves of one or several runs, as svg or png.

    python data/lab/curve.py runs/NAME                      # one run, into runs/NAME/curve.png
    python data/lab/curve.py runs/NAME runs/OTHER --plot two.svg
    python data/lab/curve.py data/lab/results/readme_run.jsonl data/lab/results/readme_grpo.jsonl \\
        --labels "AR + Lopti" GRPO --plot data/lab/results/readme_runs.svg \\
        --title "Both learn alike; with AR + Lopti the model moves farther from its start"

RUN is the folder of a run, or a metrics file. The evaluations are read from the files of the same
folder whose names end in evaluations.jsonl. If a line there names a run, it counts only for the
metrics file of this name. Without --plot the plot is curve.png in the folder of the first RUN.

A thin line shows each training step, and a thick line the mean of it and the two steps on either
side, as far as the run has them. A point is an evaluation with its 95 % interval: avg@k of all
held-out prompts, or the greedy accuracy of a run with --eval-samples 0.
"""

import argparse
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas
from matplotlib.ticker import MaxNLocator

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti

PANELS = {  # title → name in metrics.jsonl
    "accuracy": "accuracy",
    "KL to the initial model": "rollout/kl",
    "reward": "reward",
}
# Elsewhere orange stands for low-probability tokens and blue for the others, so they are not here.
COLORS = ["#C2185B", "#555555", "#009E73", "#6A3D9A", "#8B5A2B", "#A8A800", "#00B2B2", "#AAAAAA"]


def metrics_file(run):
    """Returns the metrics file of a run, which is given by its folder or by this file."""
    path = Path(run)
    return path / "metrics.jsonl" if path.is_dir() else path


def read_run(run):
    """Returns the metrics of a run and its evaluations (mean, low, high): a row for each step."""
    file = metrics_file(run)
    metrics = pandas.DataFrame(lopti.read_lines(file))
    if not {"step", *PANELS.values()} <= set(metrics):
        raise lopti.UserError(f"{file} has no line of a training step, or does not exist")
    rows = {}
    for other in sorted(file.parent.glob("*evaluations.jsonl")):
        for line in lopti.read_lines(other):
            if line.get("run", file.stem) == file.stem:
                rows[line["step"]] = held_out_row(line["table"])
    columns = ["mean", "low", "high"]
    evaluations = pandas.DataFrame.from_dict(rows, orient="index", columns=columns, dtype=float)
    return metrics.set_index("step"), evaluations


def held_out_row(table):
    """Returns the row of an evaluation that is drawn: avg@k of all prompts, or greedy accuracy."""
    rows = {row["measure"]: row for row in table if row["difficulty"] == "all"}
    for measure, row in rows.items():
        if measure.startswith("avg@"):
            return row
    return rows["greedy"]


def draw(path, runs, title=None):
    """Saves the curves of {label: (metrics, evaluations)}, each as `read_run` returns it."""
    look = {"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"}
    look |= {"font.size": 14, "axes.titlesize": "medium"}
    look |= {"svg.hashsalt": "lopti", "svg.fonttype": "none"}  # the same file each time
    look |= {"axes.prop_cycle": plt.cycler(color=COLORS)}
    with plt.style.context(look, after_reset=True):  # whatever a caller has set
        figure, panels = plt.subplots(1, 3, figsize=(11, 4.8), layout="constrained")
        for number, (label, (metrics, evaluations)) in enumerate(runs.items()):
            color = f"C{number}"
            for axis, name in zip(panels, PANELS.values()):
                axis.plot(metrics[name], color=color, alpha=0.3, linewidth=0.8)
                means = metrics[name].rolling(5, center=True, min_periods=1).mean()
                axis.plot(means, color=color, linewidth=2.5, label=label)
            steps = evaluations.index + 0.02 * number * len(metrics)  # runs stand side by side
            panels[0].plot(steps, evaluations["mean"], "o", color=color)
            panels[0].vlines(steps, evaluations["low"], evaluations["high"], color=color)
        for axis, name in zip(panels, PANELS):
            axis.set_title(name)
            axis.set_xlabel("training step")
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        lines, labels = panels[0].get_legend_handles_labels()
        words = "thin: each step; thick: mean of up to five steps; points: held out, 95 % intervals"
        figure.supxlabel(words, fontsize="medium")
        style = {"loc": "outside upper left", "alignment": "left", "ncols": 3, "frameon": False}
        bold = {"weight": "bold", "size": "large"}
        figure.legend(lines, labels, title=title, title_fontproperties=bold, **style)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def main(words=None):
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # as lopti.main
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=look)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder, or metrics file")
    parser.add_argument("--labels", nargs="+", help="names of the runs, in their order")
    parser.add_argument("--title", help="what stands above the plot")
    parser.add_argument(
        "--plot",
        type=Path,
        help="file of the plot, .svg or .png (default: curve.png in the folder of the first run)",
    )
    args = parser.parse_args(words)
    labels = args.labels or [Path(path).resolve().name for path in args.runs]
    if len(set(labels)) < len(args.runs) or len(labels) > len(args.runs):
        parser.error("give --labels, a different one for each run")
    plot = args.plot or metrics_file(args.runs[0]).parent / "curve.png"
    try:
        draw(plot, {name: read_run(path) for name, path in zip(labels, args.runs)}, args.title)
    except (lopti.UserError, OSError, ValueError) as problem:
        parser.error(str(problem))
    print(f"The plot is in {plot}.")


if __name__ == "__main__":
    main()
