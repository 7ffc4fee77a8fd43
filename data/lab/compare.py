"""Does a method help on your model? Trains with several lists of flags and compares accuracies.

    python data/lab/compare.py --seeds 5 "" "--update-epochs 2" "--alpha 0.3" "--eta 0.5"
    python data/lab/compare.py --seeds 5 "" "--eta 0.5" -- --model M --data F --task math

Each list of flags of lopti.py stands in quotation marks; "" is GRPO. Flags after -- belong to every
list, but a list's own flags win. All lists are trained with the same seeds. Each run has a folder
in --output, without its weights, and beside it a file with what the run printed. The folder's name
is computed from the settings: the same command trains no finished run again.

Two accuracies of each run are compared. ± is half of a 95 % interval over seeds (Student's t), and
* marks an interval that excludes 0.

- training: the mean accuracy of the training steps, without the first step
- held out: avg@k of all prompts in the last evaluation, or greedy accuracy with --eval-samples 0

The plot is that of curve.py, with the KL beside the accuracy. Each curve and each point of it is a
mean over seeds, and so are the ends of the intervals of an evaluation.
"""

import argparse
import contextlib
import gc
import itertools
import json
import shlex
import shutil
import sys
import zlib
from dataclasses import asdict, replace
from pathlib import Path

import curve
import pandas
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti

MEASURES = ["training", "held out"]


def train(settings, output):
    """Trains one run, unless it has finished, and deletes its weights. Returns its folder."""
    text = json.dumps(asdict(settings))
    folder = output / f"{zlib.crc32(text.encode()):08x}"  # the same however the flags are written
    evaluations = lopti.read_lines(folder / "evaluations.jsonl")
    if not evaluations or evaluations[-1]["step"] < settings.steps:
        shutil.rmtree(folder, ignore_errors=True)  # a run that was stopped
        output.mkdir(parents=True, exist_ok=True)
        log = Path(f"{folder}.txt")
        with log.open("w", buffering=1, encoding="utf-8") as file, contextlib.redirect_stdout(file):
            lopti.train(replace(settings, output=str(folder), save_every=0))
        gc.collect()  # frees this model's GPU memory before the next run
    shutil.rmtree(folder / "final", ignore_errors=True)
    return folder


def accuracies(metrics, evaluations):
    """Returns the two accuracies of a run as `curve.read_run` returns it."""
    held_out = evaluations["mean"].iloc[-1]
    return {"training": metrics["accuracy"].iloc[1:].mean(), "held out": held_out}


def mean_over_seeds(runs):
    """Returns the means of metrics and of evaluations, for `curve.draw`."""
    return [pandas.concat(tables).groupby(level=0).mean() for tables in zip(*runs)]


def paired_differences(runs):
    """Compares each pair of lists of flags: a row with the mean difference, ± and * beside it.

    Each difference is between two runs with the same seed. `runs` has a row for each run, with the
    columns flags, seed, training, held out.
    """
    accuracy = runs.pivot(index="seed", columns="flags", values=MEASURES)
    rows = {}
    for base, flags in itertools.combinations(runs["flags"].unique(), 2):
        row = {"seeds": len(accuracy)}
        for measure in MEASURES:
            differences = accuracy[measure, flags] - accuracy[measure, base]
            mean = differences.mean()
            half = stats.t.ppf(0.975, len(accuracy) - 1) * differences.sem()
            row[measure] = mean
            row[f"{measure} ±"] = half
            row[f"{measure} *"] = "*" if abs(mean) > half else ""
        rows[f"{flags} minus {base}"] = row
    return pandas.DataFrame.from_dict(rows, orient="index")


def main(words=None):
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # as lopti.main
    words = sys.argv[1:] if words is None else words
    end = words.index("--") if "--" in words else len(words)
    look = argparse.RawDescriptionHelpFormatter
    usage = 'compare.py [--seeds N] [--output FOLDER] "FLAGS" "FLAGS" ... [-- FLAGS of every list]'
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=look, usage=usage, allow_abbrev=False
    )
    parser.add_argument(
        "--seeds", type=int, default=5, help="seeds 0, 1, ..., two or more (default: %(default)s)"
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
    if len(names) < 2 or len(names) > len(set(names)) or args.seeds < 2:
        parser.error("give two or more lists of flags, all different, and --seeds 2 or more")
    rows = []
    runs = {name: [] for name in names}
    try:
        methods = [lopti.parse_arguments(common + shlex.split(flags)) for flags in lists]
        if min(method.steps for method in methods) < 2:
            raise lopti.UserError("give --steps 2 or more: the accuracy leaves out the first step")
        for seed in range(args.seeds):  # all methods with one seed, then the next seed
            for name, method in zip(names, methods):
                print(f"{name}, seed {seed}")
                folder = train(replace(method, seed=seed, output=""), args.output)
                run = curve.read_run(folder)
                accuracy = accuracies(*run)
                numbers = ", ".join(f"{key} {value:.3f}" for key, value in accuracy.items())
                print(f"  {numbers}, in {folder}")
                rows.append({"flags": name, "seed": seed, **accuracy})
                runs[name].append(run)
    except (lopti.UserError, OSError) as problem:
        parser.error(str(problem))
    except KeyboardInterrupt:
        print("Stopped. The same command goes on after the runs that have finished.")
        sys.exit(130)
    table = pandas.DataFrame(rows)
    print("\nAccuracy, averaged over seeds")
    print(table.groupby("flags", sort=False)[MEASURES].mean().rename_axis(None).round(3))
    print("\nMean difference between runs with the same seed; ± is half of a 95 % interval.")
    print("* means significant at 5 %, not corrected for the number of intervals.")
    print(paired_differences(table).round(3).to_string())
    plot = args.output / "curves.png"
    curve.draw(plot, {name: mean_over_seeds(of_name) for name, of_name in runs.items()})
    print(f"\nThe plot is in {plot}.")


if __name__ == "__main__":
    main()
