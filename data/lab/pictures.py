"""Draws the pictures of R3 and R7 (data/lab/results) from the numbers on record. It trains nothing.

python data/lab/pictures.py        # results/curve.svg and results/synthetic_tasks.svg
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import pandas
from scipy import stats

RESULTS = Path(__file__).resolve().parent / "results"
COLORS = {  # of the methods; colour-blind readers can tell them apart
    "GRPO": "#16191d",
    "two-pass GRPO": "#8B5A2B",
    "AR": "#B79AD0",
    "AR α = 1": "#6A3D9A",
    "Lopti": "#009E73",
    "AR + Lopti": "#E69F00",
}
LABELS = {"AR": "AR, α = 0.3", "AR α = 1": "AR, α = 1"}
TASKS = {  # the panels of synthetic_tasks.svg: (task, optimizer) → title
    ("noise at low π", "fixed norm"): (
        "noise at low π,\nsteps of a fixed norm:\nAR with α = 1 and Lopti help."
    ),
    ("noise at low π", "AdamW"): (
        "noise at low π,\nAdamW:\nAR with α = 1 helps, Lopti not significantly."
    ),
    ("rare mistakes", "fixed norm"): (
        "rare mistakes,\nsteps of a fixed norm:\nAR with α = 1 does harm, Lopti a little."
    ),
}


def interval(values):
    """The mean of each column over its rows, and half of its 95 % interval (Student's t).

    >>> mean, half = interval(pandas.DataFrame({"GRPO": [1.0, 2.0, 3.0]}))
    >>> print(f"{mean['GRPO']:.3f} ± {half['GRPO']:.3f}")     # 4.303 · 1 / √3
    2.000 ± 2.484
    """
    return values.mean(), stats.t.ppf(0.975, values.count() - 1) * values.sem()


def learning_curves(runs, steps):
    """{method: frame} for the bundled model in R3: a row for each seed, a column for each step.

    An accuracy is the mean of five training steps and stands at the third of them.
    """
    chosen = runs[(runs.experiment == "R3") & (runs.model == "bundled")]
    curves = {}
    for method in ("AR + Lopti", "AR", "two-pass GRPO", "Lopti", "GRPO"):
        of_method = steps[steps.run.isin(chosen.run[chosen.method == method])]
        by_step = of_method.pivot(index="step", columns="run", values="accuracy")
        curves[method] = by_step.rolling(5, center=True).mean().dropna().T
    return curves


def draw_curves(curves):
    """One line for each method, with a band for the 95 % interval over the seeds."""
    figure, axis = plt.subplots(figsize=(9, 5))
    for method, accuracies in curves.items():
        mean, half = interval(accuracies)
        label = f"{LABELS.get(method, method)} ({len(accuracies)} seeds)"
        axis.plot(mean, color=COLORS[method], label=label)
        band = {"color": COLORS[method], "alpha": 0.1, "linewidth": 0}
        axis.fill_between(mean.index, mean - half, mean + half, **band)
    title = "On the bundled model all methods learn at about the same speed"
    axis.set_title(title, loc="left", weight="bold")
    axis.set(xlabel="training step", ylabel="accuracy in training, mean of five steps")
    axis.set_xticks(range(4, 24, 4))
    axis.legend(title="mean over the seeds, bands: 95 %", loc="lower right", reverse=True)
    return figure


def differences(tasks):
    """{(task, optimizer): accuracy minus GRPO's at equal KL, a row for each of 20 seeds}."""
    at_equal_kl = tasks[tasks.compared == "at equal KL"]
    found = {}
    for pair in TASKS:
        of_pair = at_equal_kl[(at_equal_kl.task == pair[0]) & (at_equal_kl.optimizer == pair[1])]
        by_seed = of_pair.pivot(index="seed", columns="method", values="accuracy")
        methods = ["AR α = 1", "AR", "Lopti", "two-pass GRPO"]
        found[pair] = by_seed[methods].sub(by_seed["GRPO"], axis="index")
    return found


def draw_tasks(found):
    """One panel for each task: a point and its 95 % interval for each method."""
    figure, axes = plt.subplots(1, len(found), figsize=(14, 5), sharex=True, sharey=True)
    for axis, (pair, by_seed) in zip(axes, found.items(), strict=True):
        mean, half = interval(by_seed)
        for height, method in enumerate(by_seed):
            style = {"color": COLORS[method], "fmt": "o", "markersize": 8, "capsize": 4}
            axis.errorbar(mean[method], height, xerr=half[method], **style)
            text = f"{round(mean[method], 3) + 0.0:+.3f} ± {half[method]:.3f}"  # no −0.000
            text = text.replace("-", "−")
            where = {"xycoords": axis.get_yaxis_transform(), "textcoords": "offset points"}
            axis.annotate(text, (1, height), (0, 10), ha="right", **where)
        axis.axvline(0, color="black", linewidth=1)
        axis.set_title(TASKS[pair], loc="left", fontsize=13)
        axis.set_yticks(range(len(by_seed.columns)), [LABELS.get(name, name) for name in by_seed])
    axes[0].set_xticks([0, 0.05, 0.1], ["0", "0.05", "0.1"])
    axes[0].set(xlim=(-0.04, 0.115), ylim=(-0.5, len(by_seed.columns) - 0.3))
    label = "accuracy minus GRPO's, where both have the same KL from the initial model"
    figure.supxlabel(f"{label} (mean of 20 seeds, bars: 95 %)", fontsize=13)
    title = "AR with α = 1 and Lopti help in one task and do harm in another"
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    return figure


def main():
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=form).parse_args()
    look = {"font.size": 13, "axes.spines.top": False, "axes.spines.right": False}
    look |= {"lines.linewidth": 2.5, "legend.frameon": False, "legend.fontsize": 12}
    look |= {"figure.constrained_layout.use": True, "svg.hashsalt": "lopti"}
    look |= {"svg.fonttype": "none"}  # text stays text
    with plt.style.context(look, after_reset=True):  # whatever the caller has set
        runs = pandas.read_csv(RESULTS / "runs.csv")
        steps = pandas.read_csv(RESULTS / "steps.csv")
        tasks = pandas.read_csv(RESULTS / "synthetic_tasks.csv")
        curve = draw_curves(learning_curves(runs, steps))
        curve.savefig(RESULTS / "curve.svg", metadata={"Date": None})
        panels = draw_tasks(differences(tasks))
        panels.savefig(RESULTS / "synthetic_tasks.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
