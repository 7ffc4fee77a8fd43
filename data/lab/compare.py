"""Does a method help on your model? Trains lists of flags with the same seeds; prints differences.

    python data/lab/compare.py --seeds 0-4 "" "--passes 2" "--alpha 0.3" "--eta 0.5" --against 1 2
    python data/lab/compare.py --seeds 0-4 "" "--eta 0.5" -- --model M --data F --task math

A list of flags of lopti.py stands in quotation marks; "" is GRPO. Flags after -- are for all lists.
Each run is a folder in runs/compare, named by its settings. The same command goes on where it was
stopped. What has finished keeps its metrics, not its weights.

A difference in accuracy is taken for each seed, first minus second:

- training: averaged over training steps, all but the first
- held out: at the last evaluation, all difficulties together
"""

import argparse
import gc
import json
import shlex
import shutil
import sys
import zlib
from dataclasses import asdict, replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti

NUMBERS = {"float_format": "{:.3f}".format, "na_rep": "–"}


def run_folder(settings, output):
    """Runs with equal settings have the same folder, however their flags were written."""
    text = json.dumps(asdict(settings))
    return output / f"{zlib.crc32(text.encode()):08x}"


def has_finished(folder, settings):
    evaluations = lopti.read_lines(folder / "evaluations.jsonl")
    return bool(evaluations) and evaluations[-1]["step"] == settings.steps


def train(folder, settings):
    """Begins a run or goes on with it, unless it has finished. Its weights are deleted then."""
    if not has_finished(folder, settings):
        if (folder / "checkpoint.pt").exists():
            settings = replace(settings, resume=str(folder))
        else:
            shutil.rmtree(folder, ignore_errors=True)  # of a run that never came to a checkpoint
        lopti.train(replace(settings, output=str(folder)))
        gc.collect()  # this model leaves a GPU before the next one comes
    shutil.rmtree(folder / "final", ignore_errors=True)
    (folder / "checkpoint.pt").unlink(missing_ok=True)


def outcome(folder, measure):
    """The two accuracies of a finished run."""
    metrics = lopti.read_lines(folder / "metrics.jsonl")
    table = lopti.read_lines(folder / "evaluations.jsonl")[-1]["table"]
    training = pandas.Series([line["accuracy"] for line in metrics[1:]], dtype=float).mean()
    return {"training": training, "held out": table[measure]["all"][0]}


def interval(differences):
    """The mean and half of its 95 % interval (Student's t); NaN for one value or where all are
    alike: ± 0.000 of a few prompts is no exact number.

    >>> print("{:.3f} ± {:.3f}".format(*interval(pandas.Series([0.01, 0.02, 0.03]))))
    0.020 ± 0.025
    """
    error = differences.sem() if differences.std() > 1e-9 else np.nan
    return differences.mean(), stats.t.ppf(0.975, len(differences) - 1) * error


def paired_differences(runs, names, against):
    """A row for each pair of names, with means and intervals over the seeds that both have.

    `runs` has a row for each finished run: flags, seed, training, held out. `against` are numbers
    of names, from 1 on, that the others are compared with.
    """
    pairs = []
    for number in against:
        for name in names:
            base = names[number - 1]
            if name != base and (base, name) not in pairs:
                pairs.append((name, base))
    rows = {}
    for column in ("training", "held out"):
        accuracy = runs.pivot(index="seed", columns="flags", values=column).reindex(columns=names)
        for first, second in pairs:
            differences = (accuracy[first] - accuracy[second]).dropna()
            mean, half = interval(differences)
            row = rows.setdefault(f"{first} minus {second}", {})
            row |= {"seeds": len(differences), column: mean, f"{column} ±": half}
    return pandas.DataFrame.from_dict(rows, orient="index")


def text_of(runs, differences, names, measure):
    """What is printed: the accuracy of each list of flags, and the paired differences."""
    means = runs.groupby("flags").agg({"seed": "count", "training": "mean", "held out": "mean"})
    means = means.reindex([name for name in names if name in means.index])
    parts = [f"Accuracy (training: mean over all steps but the first; held out: {measure})"]
    parts.append(means.rename_axis(None).rename(columns={"seed": "seeds"}).to_string(**NUMBERS))
    parts.append("\nDifferences for the same seeds (±: half of a 95 % interval)")
    parts.append(differences.to_string(**NUMBERS))
    return "\n".join(parts)


def plot(path, differences, measure):
    """Saves the differences with their intervals. The title says how many exclude 0."""
    figure, axis = plt.subplots(figsize=(9, 1.5 + 0.6 * len(differences)), layout="constrained")
    places = np.arange(len(differences))
    excluding = 0
    for column, label, shift in (
        ("training", "training", -0.1),
        ("held out", f"held out, {measure}", 0.1),
    ):
        means = differences[column]
        halves = differences[f"{column} ±"]
        excluding += (means.abs() > halves).sum()
        axis.errorbar(means, places + shift, xerr=halves, fmt="o", capsize=4, label=label)
    axis.axvline(0, color="gray", linewidth=1)
    axis.set_yticks(places, differences.index)
    axis.invert_yaxis()
    axis.set_xlabel("difference in accuracy, with 95 % intervals over seeds")
    axis.set_title(f"Intervals that exclude 0: {excluding} of {2 * len(differences)}")
    axis.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def seed_range(text):
    """0-4 → [0, 1, 2, 3, 4]; 7 → [7]"""
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def main(words=None):
    words = sys.argv[1:] if words is None else words
    end = words.index("--") if "--" in words else len(words)
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=look, allow_abbrev=False)
    parser.add_argument("--seeds", type=seed_range, required=True, help="0-4, or one seed")
    parser.add_argument("--against", type=int, nargs="+", default=[1], help="list 1, 2 and so on")
    parser.add_argument("--table-only", action="store_true", help="train nothing")
    parser.add_argument("--output", type=Path, default=Path("runs/compare"), help="%(default)s")
    args, lists = parser.parse_known_args(words[:end])
    names = [flags or "GRPO" for flags in lists]
    numbers = range(1, len(names) + 1)
    if len(names) < 2 or len(names) > len(set(names)) or not set(args.against) <= set(numbers):
        parser.error("give two or more lists of flags, all different; --against has their numbers")
    try:
        methods = [lopti.parse_arguments(words[end + 1 :] + shlex.split(flags)) for flags in lists]
        ks = {settings.eval_samples for settings in methods}
        measure = "greedy" if len(ks) > 1 or 0 in ks else f"avg@{max(ks)}"
        rows = []
        for seed in args.seeds:  # all methods with a seed, then the next seed
            for name, method in zip(names, methods):
                settings = replace(method, seed=seed, output="", resume="")
                folder = run_folder(settings, args.output)
                if not args.table_only:
                    print(f"\n{name}, seed {seed}: {folder}", flush=True)
                    train(folder, settings)
                if has_finished(folder, settings):
                    rows.append({"flags": name, "seed": seed} | outcome(folder, measure))
        if not rows:
            raise lopti.UserError(f"no run of these has finished in {args.output}")
    except (lopti.UserError, OSError) as problem:
        parser.error(str(problem))
    except KeyboardInterrupt:
        parser.exit(130, "\nThe same command goes on from here.\n")
    runs = pandas.DataFrame(rows)
    differences = paired_differences(runs, names, args.against)
    print(text_of(runs, differences, names, measure))
    plot(args.output / "differences.png", differences, measure)
    print(f"\nThe plot is {args.output / 'differences.png'}.")


if __name__ == "__main__":
    main()
