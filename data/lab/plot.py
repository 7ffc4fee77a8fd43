"""Draw the laboratory's pictures, or the curves of run folders. Needs matplotlib.

    python data/lab/plot.py                                     # into results/
    python data/lab/plot.py runs/A runs/B                       # plot.png
    python data/lab/plot.py runs/* --smooth 5 --output my.pdf   # running means over 5 steps
    python data/lab/plot.py runs/* --measure entropy            # any column of metrics.jsonl

In a notebook: `plot.draw(["runs/A", "runs/B"])`, `plot.draw_training(lines)` and so on, with the
lines of results/runs.jsonl.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

import analysis
import experiments
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats
from style import COLORS

BAND = "#DDDDDD"
SHOWN = ("GRPO", "GRPO, two passes", "AR", "Lopti", "AR + Lopti", "reversed Lopti")
TITLES = {  # of the questions' pictures
    "plain wording": "Plain wording: no difference is sure; Lopti equals GRPO within .02",
    "second step": "Random split, half-size mini-batches: no difference is sure",
    "order or Adam": "Three seeds: the reverse and two optimizers lie behind, none surely",
    "ceiling": "Twice the prompts are ahead; leaving out the wording is open",
}


def running_mean(values, steps):
    """The mean of each value and those before it, `steps` in all, fewer at the beginning.

    >>> running_mean([1, 2, 3], 2)
    [1.0, 1.5, 2.5]
    """
    return pd.Series(values).rolling(steps, min_periods=1).mean().tolist()


def canvas(panels, height=6.5, **options):
    figure = Figure(figsize=(16, height))
    return figure, figure.subplots(1, panels, **options)


# ---- The laboratory


def draw_training(lines):
    """Accuracy in training, and sampled accuracy on held-out puzzles minus GRPO's.

    The grey band is where the mean of five runs of GRPO itself would lie, 19 times in 20, against
    that of its ten.
    """
    figure, (training, held_out) = canvas(2)
    runs = {method: [] for method in SHOWN}
    for line in lines:
        runs.get(analysis.shown(line["method"]), []).append(line)
    runs = {method: of_method for method, of_method in runs.items() if of_method}
    steps = [row["step"] for row in runs["GRPO"][0]["evaluations"]]
    grpo = np.array([analysis.curve(line, "avg@2") for line in runs["GRPO"]])
    t = stats.t.ppf(0.975, len(grpo) - 1)
    margin = t * grpo.std(0, ddof=1) * np.sqrt(1 / 5 + 1 / len(grpo))
    held_out.fill_between(steps, -margin, margin, color=BAND, linewidth=0)
    for method, of_method in runs.items():
        accuracy = np.mean([line["metrics"]["accuracy"] for line in of_method], 0)
        evaluated = np.mean([analysis.curve(line, "avg@2") for line in of_method], 0)
        style = {"color": COLORS[method], "label": method}
        training.plot(range(1, len(accuracy) + 1), running_mean(accuracy, 3), **style)
        held_out.plot(steps, evaluated - grpo.mean(0), marker="o", **style)
    training.set(title="In training the reverse rises last", xlabel="training step")
    training.set_ylabel("accuracy in training, 3 steps at a time")
    held_out.set(title="On held-out puzzles none stays above GRPO", xlabel="training step")
    held_out.set(ylabel="sampled accuracy minus GRPO's", xticks=steps)
    training.legend()
    return figure


def forest(axis, rows):
    """Differences with their intervals, a row each: label → (difference, half, p, single runs)."""
    for place, (difference, half, p, singles) in enumerate(rows.values()):
        color = "black" if p >= 0.05 else COLORS["high" if difference > 0 else "low"]
        axis.plot(singles, [place - 0.25] * len(singles), "o", color="#888888", markersize=7)
        axis.errorbar(difference, place, xerr=half, fmt="D", color=color, markersize=9, capsize=4)
    axis.axvline(0, color="black", linewidth=1)
    axis.set_yticks(range(len(rows)), list(rows))
    axis.set_ylim(len(rows) - 0.4, -0.6)


def draw_effects(lines):
    """Each method minus GRPO, mean, Dunnett's interval, every run: blue is surely more, orange
    surely less.
    """
    frame = analysis.run_frame(lines)
    figure, axes = canvas(2, 8, sharey=True)
    for axis, outcome in zip(axes, ("sampled accuracy", "mean over training")):
        values = dict(list(frame.groupby("method")[outcome]))
        found = analysis.effects(frame, analysis.CLAIMS, outcome)
        singles = {method: values[method] - values["GRPO"].mean() for method, *_ in found}
        forest(axis, {claim[0]: (*effect, singles[claim[0]]) for claim, effect in found.items()})
        axis.set_title(f"{outcome} minus GRPO's")
    figure.suptitle("No method is surely above GRPO")
    return figure


def draw_question(lines, question, title):
    """The differences of one question: what is not black is sure, corrected by Holm.

    What lies in the grey band with its whole interval is *equal within .02*.
    """
    found = analysis.family(analysis.run_frame(lines), analysis.FAMILIES[question])
    if not found:
        return None
    figure, axis = canvas(1, 2 + 0.9 * len(found))
    names = [" −\n".join(pair).replace(", plain wording", "") for pair in found]
    axis.axvspan(-analysis.SAME, analysis.SAME, color=BAND)
    forest(axis, {name: (*test, runs) for name, (runs, *test) in zip(names, found.values())})
    axis.set(title=title, xlabel="difference of accuracy in training, steps 2 to 24")
    return figure


def draw_two_views(lines, methods, titles, kl="kl"):
    """Accuracy in training by step and by KL to the starting policy: the same runs, seen twice.

    Means over the seeds that all methods have, five steps at a time; bands are 95 % intervals.
    """
    runs = {name: analysis.metrics_by_seed(lines, name) for name in methods}
    seeds = sorted(set.intersection(*map(set, runs.values())))
    if len(seeds) < 2:
        return None
    figure, (by_step, by_kl) = canvas(2, sharey=True)
    for name, of_method in runs.items():
        curves = [analysis.accuracy_by_kl(of_method[seed], kl) for seed in seeds]
        at = np.linspace(max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves), 50)
        steps = analysis.WINDOW // 2 + 1 + np.arange(len(curves[0][0]))
        views = {by_step: (steps, [y for _, y in curves])}
        views[by_kl] = (at, [np.interp(at, *curve) for curve in curves])
        color = COLORS.get(name.split(",")[0] if name not in COLORS else name)
        for axis, (x, values) in views.items():
            mean, half = map(np.array, zip(*map(analysis.interval, zip(*values))))
            axis.plot(x, mean, label=name, color=color)
            axis.fill_between(x, mean - half, mean + half, color=color, alpha=0.15, linewidth=0)
    by_step.set(title=titles[0], xlabel="training step", ylabel="accuracy in training")
    by_kl.set(title=titles[1], xlabel="KL to the starting policy (nats a token)", xscale="log")
    by_step.legend(title=f"{len(seeds)} seeds; bands: 95 %")
    return figure


def draw_long(lines, steps=20):
    """The runs of 200 steps: held-out accuracy and reward in training, means over seeds."""
    frame = analysis.long_frame(lines)
    if not len(frame):
        return None
    figure, (held_out, training) = canvas(2)
    for method, runs in frame.groupby("method", sort=False):
        means = runs.groupby("step")[["reward", "held out"]].mean()
        style = {"color": COLORS[method], "label": method}
        held_out.plot(means["held out"].dropna(), marker="o", **style)
        reward = means["reward"].dropna()
        training.plot(reward.index, running_mean(reward, steps), **style)
    held_out.set(title="200 steps, one seed each: none stays above GRPO", xlabel="training step")
    held_out.set_ylabel("sampled accuracy, held-out puzzles")
    training.set(title="In training the curves cross", xlabel="training step")
    training.set_ylabel(f"reward in training, {steps} steps at a time")
    held_out.legend()
    return figure


def draw_real_model(lines):
    """SmolLM2: accuracy in training at three learning rates; dots are runs, lines their means."""
    frame = analysis.run_frame([line for line in lines if "metrics" in line], {})
    rates = sorted(frame["learning rate"].unique(), key=float)
    figure, axis = canvas(1)
    for number, (method, runs) in enumerate(frame.groupby("method")):
        places = runs["learning rate"].map(rates.index) + (number - 1.5) / 25
        values, color = runs[analysis.EARLY], COLORS[method]
        axis.plot(places, values, "o", color=color, alpha=0.5)
        axis.plot(*zip(*values.groupby(places).mean().items()), color=color, label=method)
    axis.set_xticks(range(len(rates)), rates)
    axis.set(title="Lopti and a plain second pass lie above GRPO at every learning rate")
    axis.set(xlabel="learning rate", ylabel="accuracy in training, steps 2 to 12")
    axis.legend()
    return figure


# ---- Run folders


def draw(folders, smooth=1, measure="reward"):
    """The curves of run folders: lines are training batches, markers held-out puzzles."""
    figure, axes = canvas(2)
    for folder, color in zip(map(Path, folders), itertools.cycle(COLORS.values())):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        metrics = pd.DataFrame(experiments.read_lines(folder / "metrics.jsonl"))
        style = {
            "label": f"{config['method']}, seed {config['seed']} ({folder.name})",
            "color": color,
        }
        for axis, name in zip(axes, (measure, "accuracy")):
            axis.plot(metrics["step"], running_mean(metrics[name], smooth), **style)
            axis.set(title=name, xlabel="training step")
        sampled = f"avg@{config['eval_samples']}" if config["eval_samples"] else "greedy"
        for row in experiments.read_lines(folder / "evaluations.jsonl"):
            values = [measures[sampled][0] for measures in row["table"].values()]
            axes[1].plot(row["step"], np.mean(values), "o", color=color)
    axes[1].set_title("accuracy; dots: on held-out prompts")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center")
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
        real = experiments.read_lines(analysis.REAL_MODEL)
        pictures = {"training": draw_training(lines), "effects": draw_effects(lines)}
        pictures |= {"real_model": draw_real_model(real), "long": draw_long(lines)}
        for question, title in TITLES.items():
            pictures[question.replace(" ", "_").lower()] = draw_question(lines, question, title)
        pictures = {analysis.FOLDER / f"{name}.png": drawn for name, drawn in pictures.items()}
    for path, figure in pictures.items():
        if figure:  # there are runs for it
            figure.savefig(path)
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
