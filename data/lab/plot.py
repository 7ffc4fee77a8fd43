"""Draw the curves of one or more run folders: reward, accuracy, length, entropy, clip share, and accuracy over time.

    python data/lab/plot.py runs/A runs/B                       # writes plot.png
    python data/lab/plot.py runs/* --smooth 5 --output my.pdf   # running means; the ending of the name decides the format

It needs matplotlib (pip install matplotlib), which training does not. In a notebook: `plot.draw(["runs/A", "runs/B"])`.
"""

import argparse
import json
import statistics
import sys
from collections import Counter
from itertools import accumulate
from pathlib import Path

# Colours of Okabe and Ito, which stay apart for colour-blind readers, without their yellow, which is lost on white.
# 7 colours and 5 line styles have no common divisor: 35 runs differ from each other.
COLOURS = ("#000000", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
LINES = ("-", "--", "-.", ":", (0, (7, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v")
FONT = 13  # points, on a picture 16 inches wide

PANELS = (  # title, label of the y axis, what is drawn, over what
    ("Reward", "mean reward of a response", "reward", "step"),
    ("Accuracy", "share of right responses", "accuracy", "step"),
    ("Response length", "mean length (tokens)", "completions/mean_length", "step"),
    ("Entropy", "mean entropy of a token (nats)", "entropy", "step"),
    ("Clip share", "clipped tokens (%)", "clipped", "step"),
    ("Accuracy over time", "share of right responses", "accuracy", "minutes"),
)


class UserError(Exception):
    """Something that the user can put right: ends the program with one sentence and exit code 2."""


def read_lines(path):
    """The rows of a jsonl file, without a line that a crash or a run still going on has cut short; none if there is no file."""
    rows = []
    for line in (
        path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    ):
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def read_run(folder):
    """The curves of a run folder, each with one value a step; its evaluations, (step, accuracy, avg@k); what to call it."""
    try:
        if not folder.is_dir():
            raise UserError(
                f"there is no run folder {folder}: give folders that lopti.py has made, such as runs/NAME"
            )
        if not (rows := read_lines(folder / "metrics.jsonl")):
            raise UserError(
                f"{folder / 'metrics.jsonl'} is missing or holds no step: give the folder of a run that has done at least one step"
            )
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        run = {
            name: [row[name] for row in rows]
            for name in ("step", "reward", "accuracy", "completions/mean_length", "entropy")
        }
        run["clipped"] = [
            100 * (row["clip_ratio/low_mean"] + row["clip_ratio/high_mean"]) for row in rows
        ]
        run["minutes"] = [
            seconds / 60
            for seconds in accumulate(
                sum(row[key] for key in row if key.startswith("seconds/")) for row in rows
            )
        ]
        run["held out"] = [
            (row["step"], statistics.mean(cells[name][0] for cells in row["table"].values()), name)
            for row in read_lines(folder / "evaluations.jsonl")
            for name in list(row["table"].values())[0] if name.startswith("avg@")  # mean over difficulties; none without --eval-samples
        ]  # fmt: skip
        return run | {"label": f"{config['method']}, seed {config['seed']}", "folder": folder}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder} cannot be read as a run folder ({type(error).__name__}: {error}): leave it out or run it again"
        ) from error


def name_apart(runs):
    """Where runs have the same method and seed, add the folder's name; where that is the same too, its whole path."""
    for name_of in (lambda folder: folder.resolve().name, str):
        count = Counter(run["label"] for run in runs)
        for run in runs:
            run["label"] += f" ({name_of(run['folder'])})" * (count[run["label"]] > 1)


def running_mean(values, steps):
    """The mean of each value and those before it, `steps` in all, fewer at the beginning."""
    return [
        statistics.fmean(values[max(0, end - steps) : end]) for end in range(1, len(values) + 1)
    ]


def draw(folders, smooth=1):
    """A matplotlib figure of the runs in `folders`; its lines are running means over `smooth` steps, its markers never."""
    if smooth < 1:
        raise UserError(f"--smooth {smooth} is not a number of steps: give 1 (off) or more")
    runs = [
        read_run(folder) for folder in dict.fromkeys(map(Path, folders))
    ]  # a folder that is given twice counts once
    name_apart(runs)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError as error:
        raise UserError(
            f"matplotlib cannot be imported ({error}): install it with pip install matplotlib"
        ) from error

    columns = max(1, min(len(runs), 4, 160 // (13 + max(len(run["label"]) for run in runs))))
    height = 9 + 0.25 * max(
        0, len(runs) / columns - 4
    )  # a long legend takes nothing from the panels
    figure = Figure(
        figsize=(16, height), dpi=120, layout="constrained"
    )  # without pyplot: no window, and a notebook's settings stay
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    FigureCanvasAgg(figure)
    handles = []
    for axis, (title, label, name, over) in zip(figure.subplots(2, 3).flat, PANELS):
        for number, run in enumerate(runs):
            line = {
                "color": COLOURS[number % len(COLOURS)],
                "linestyle": LINES[number % len(LINES)],
            }
            dots = {
                "color": line["color"],
                "marker": MARKERS[number % len(MARKERS)],
                "markersize": 8,
                "markeredgecolor": "white",
            }
            alone = "." if len(run["step"]) == 1 else ""  # a line of one point would not be seen
            axis.plot(
                run[over],
                running_mean(run[name], smooth),
                **line,
                marker=alone,
                linewidth=1.2 if name == "accuracy" else 2,
            )
            if name == "accuracy":
                place = dict(zip([0, *run["step"]], [0, *run[over]]))  # of each step on the x axis
                shown = [
                    (place[step], value) for step, value, _ in run["held out"] if step in place
                ]
                axis.plot(
                    [x for x, _ in shown], [y for _, y in shown], linestyle="", zorder=3, **dots
                )
            if title == "Reward":
                handles.append(
                    Line2D(
                        [],
                        [],
                        linewidth=2,
                        label=run["label"].replace("$", r"\$"),
                        **(line | dots if run["held out"] else line),
                    )
                )
        axis.set_title(title, fontsize=FONT + 2, loc="left")
        axis.set_xlabel("training step" if over == "step" else "minutes of training", fontsize=FONT)
        axis.set_ylabel(label, fontsize=FONT)
        axis.tick_params(labelsize=FONT)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.get_major_locator().set_params(integer=over == "step")
        axis.set_xlim(
            -0.03 * axis.get_xlim()[1], axis.get_xlim()[1]
        )  # from 0, where the evaluation before training stands
        if title == "Clip share":
            axis.set_ylim(bottom=0)
    measures = " or ".join(sorted({name for run in runs for _, _, name in run["held out"]}))
    notes = [f"Lines: running means over the last {smooth} steps."] * (smooth > 1)
    notes += [
        f"Accuracy: lines on training batches, markers on held-out problems ({measures})."
        if measures
        else "Accuracy: on training batches."
    ]
    figure.suptitle(" ".join(notes), fontsize=FONT)
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        fontsize=FONT,
        frameon=False,
        handlelength=4,
    )
    return figure


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="runs/NAME", help="run folders")
    parser.add_argument(
        "--output", type=Path, default="plot.png", help="where the picture goes (default: plot.png)"
    )
    parser.add_argument(
        "--smooth",
        type=int,
        default=1,
        help="draw running means over so many steps (default: 1, off)",
    )
    args = parser.parse_args()
    output = args.output if args.output.suffix else args.output.with_suffix(".png")
    try:
        draw(args.folders, args.smooth).savefig(output)
        print(f"wrote {output}")
        return 0
    except UserError as error:
        print(f"plot.py: {error}", file=sys.stderr)
    except (OSError, ValueError) as error:  # ValueError: an ending that matplotlib does not know
        print(
            f"plot.py: cannot write {output} ({getattr(error, 'strerror', None) or error}): choose another --output",
            file=sys.stderr,
        )
    return 2


if __name__ == "__main__":
    sys.exit(main())
