"""Does a method help on your model? Trains with several lists of flags and compares accuracies.

    python data/lab/compare.py --seeds 5 "" "--passes 2" "--alpha 0.3" "--eta 0.5"
    python data/lab/compare.py --seeds 5 "" "--eta 0.5" -- --model M --data F --task math

Each list of flags of lopti.py stands in quotation marks; "" is GRPO. Flags after -- belong to every
list, but a list's own flags win. All lists are trained with the same seeds. Each run has a folder
in --output, whose name is computed from its settings. If you stop the program, the same command
continues, and no finished run is trained again. Weights of finished runs are deleted.

Two accuracies of each run are compared. ± is half of a 95 % interval over seeds (Student's t).

- training: the mean accuracy of the training steps, without the first step
- held out: avg@k of all prompts in the last evaluation, or greedy accuracy with --eval-samples 0
"""

import argparse
import gc
import itertools
import json
import shlex
import shutil
import sys
import zlib
from dataclasses import asdict, replace
from pathlib import Path

import matplotlib.pyplot as plt
import pandas
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti

MEASURES = ["training", "held out"]


def train(settings, output):
    """Trains one run, or continues it, unless it has finished. Returns its folder."""
    text = json.dumps(asdict(settings))
    folder = output / f"{zlib.crc32(text.encode()):08x}"  # the same however the flags are written
    evaluations = lopti.read_lines(folder / "evaluations.jsonl")
    if not evaluations or evaluations[-1]["step"] < settings.steps:
        if (folder / "checkpoint.pt").exists():
            settings = replace(settings, resume=str(folder))
        else:
            shutil.rmtree(folder, ignore_errors=True)  # a run without a checkpoint
        lopti.train(replace(settings, output=str(folder)))
        gc.collect()  # frees this model's GPU memory before the next run
    shutil.rmtree(folder / "final", ignore_errors=True)
    (folder / "checkpoint.pt").unlink(missing_ok=True)
    return folder


def accuracies(folder, settings):
    """The two accuracies of a finished run."""
    steps = lopti.read_lines(folder / "metrics.jsonl")
    table = lopti.read_lines(folder / "evaluations.jsonl")[-1]["table"]
    measure = f"avg@{settings.eval_samples}" if settings.eval_samples else "greedy"
    return {
        "training": pandas.Series([line["accuracy"] for line in steps[1:]], dtype=float).mean(),
        "held out": table[measure]["all"][0],
    }


def paired_differences(runs):
    """Compares each pair of lists of flags: a row with the mean difference, and ± beside it.

    Each difference is between two runs with the same seed. `runs` has a row for each run, with the
    columns flags, seed, training, held out.
    """
    accuracy = runs.pivot(index="seed", columns="flags", values=MEASURES)
    rows = {}
    for base, flags in itertools.combinations(runs["flags"].unique(), 2):
        row = {"seeds": len(accuracy)}
        for measure in MEASURES:
            differences = accuracy[measure, flags] - accuracy[measure, base]
            row[measure] = differences.mean()
            row[f"{measure} ±"] = stats.t.ppf(0.975, len(accuracy) - 1) * differences.sem()
        rows[f"{flags} minus {base}"] = row
    return pandas.DataFrame.from_dict(rows, orient="index")


def plot(path, differences):
    """Saves a plot of the differences and their intervals. Its title says how many exclude 0."""
    size = (10, 1.5 + 0.4 * len(differences))
    figure, axes = plt.subplots(1, 2, sharex=True, sharey=True, figsize=size, layout="constrained")
    excluding = 0
    for axis, measure in zip(axes, MEASURES):
        means = differences[measure]
        halves = differences[f"{measure} ±"]
        excluding += (means.abs() > halves).sum()
        axis.errorbar(means, differences.index, xerr=halves, fmt="o", capsize=4)
        axis.axvline(0, color="gray", linewidth=1)
        axis.set_xlabel(f"difference in accuracy, {measure}")
    axis.invert_yaxis()  # of both
    figure.suptitle(f"95 % intervals that exclude 0: {excluding} of {2 * len(differences)}")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(words=None):
    words = sys.argv[1:] if words is None else words
    end = words.index("--") if "--" in words else len(words)
    look = argparse.RawDescriptionHelpFormatter
    usage = 'compare.py [--seeds N] [--output FOLDER] "FLAGS" "FLAGS" ... [-- FLAGS of every list]'
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=look, usage=usage, allow_abbrev=False
    )
    parser.add_argument(
        "--seeds", type=int, default=5, help="number of seeds: 0, 1, ... (default: %(default)s)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/compare"),
        help="folder of all runs and of the plot (default: %(default)s)",
    )
    args, lists = parser.parse_known_args(words[:end])
    common = words[end + 1 :]
    names = [flags or "GRPO" for flags in lists]
    if len(names) < 2 or len(names) > len(set(names)) or args.seeds < 1:
        parser.error("give two or more lists of flags, all different, and --seeds 1 or more")
    rows = []
    try:
        methods = [lopti.parse_arguments(common + shlex.split(flags)) for flags in lists]
        for seed in range(args.seeds):  # all methods with one seed, then the next seed
            for name, method in zip(names, methods):
                print(f"\n{name}, seed {seed}", flush=True)
                settings = replace(method, seed=seed, output="", resume="")
                accuracy = accuracies(train(settings, args.output), settings)
                rows.append({"flags": name, "seed": seed, **accuracy})
    except (lopti.UserError, OSError) as problem:
        parser.error(str(problem))
    runs = pandas.DataFrame(rows)
    differences = paired_differences(runs)
    print("\nAccuracy, averaged over seeds")
    print(runs.groupby("flags", sort=False)[MEASURES].mean().rename_axis(None).round(3))
    print("\nMean difference between runs with the same seed; ± is half of a 95 % interval")
    print(differences.round(3).to_string())
    plot(args.output / "differences.png", differences)
    print(f"\nThe plot is in {args.output / 'differences.png'}.")


if __name__ == "__main__":
    main()
