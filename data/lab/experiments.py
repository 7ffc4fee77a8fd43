"""Run the laboratory: the experiments behind the README's tables and the notebook. data/lab/results/DESIGN.md says why.

    python data/lab/experiments.py --jobs 2          # run what is not done yet, two at a time; stop and start as you like
    python data/lab/experiments.py --table           # print what is there so far
    python data/lab/experiments.py --list            # print the commands, run nothing

Each run is a `python lopti.py` command in a process of its own. Its line is appended to data/lab/results/runs.jsonl when it
is done: settings, seed, every step's metrics and every evaluation. The same command goes on where it was stopped, with
runs that are in the file left out and unfinished ones resumed.
"""

import argparse
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from plot import read_lines, running_mean

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RESULTS = HERE / "results" / "runs.jsonl"

# Name in tables -> flags; everything else, the clip and β too, is the same for all.
PRIMARY = {
    "GRPO": "",
    "AR": "--alpha 0.3",
    "Lopti": "--eta 0.5",
    "AR + Lopti": "--alpha 0.3 --eta 0.5",
    "reversed Lopti": "--eta 0.5 --order high-low",
}
OTHERS = {
    "REINFORCE++": "--advantage reinforce++",
    "STAPO": "--stapo",
    "80/20": "--top-entropy 0.2",
    "lowest 80 %": "--bottom-entropy 0.8",
    "min-p": "--min-p 2.3e-6",
    "high only": "--eta 0.5 --update-only high",
    "REINFORCE++ + AR + Lopti": "--advantage reinforce++ --alpha 0.3 --eta 0.5",
}
CONTROLS = {  # what the paper does not show: is it the number of optimizer steps, or their size?
    "GRPO, two passes": "--passes 2",
    "GRPO, lr × 0.5": "--learning-rate 5e-5",
    "GRPO, lr × 2": "--learning-rate 2e-4",
    "GRPO, lr × 4": "--learning-rate 4e-4",
}
SWEEPS = {f"AR α = {alpha}": f"--alpha {alpha}" for alpha in (0.1, 0.2, 0.5, 0.7, 1)}
SWEEPS |= {f"Lopti η = {eta}": f"--eta {eta}" for eta in (0.1, 0.3, 0.7, 0.9)}
LONG = {
    f"{name}, long": f"{PRIMARY[name]} --steps 120 --eval-from 116".strip()
    for name in ("GRPO", "Lopti", "reversed Lopti")
}
AFTERWARDS = {  # added after the first runs, to explain them
    "low only": "--eta 0.5 --update-only low",
    "Lopti, lr × 0.5": "--eta 0.5 --learning-rate 5e-5",
}
AGAIN = {"GRPO again": "--tokens-per-microbatch 1024"}  # GRPO with other rounding
OTHER_SEEDS = {"GRPO, seeds 5 to 9": ""}  # were the first five lucky?
PUZZLES = PRIMARY | OTHERS | CONTROLS | AGAIN | OTHER_SEEDS | AFTERWARDS | SWEEPS | LONG
ARITHMETIC = {  # the paper's second task, mathematics: AR with a smaller α, or Lopti, and it advises against both
    "GRPO, arithmetic": "--task math",
    "AR α = 0.1, arithmetic": "--task math --alpha 0.1",
    "Lopti, arithmetic": "--task math --eta 0.5",
    "AR + Lopti, arithmetic": "--task math --alpha 0.1 --eta 0.5",
}
METHODS = PUZZLES | ARITHMETIC

PLAN = [
    *[(name, 0) for name in PRIMARY | OTHERS | CONTROLS],
    *[(name, seed) for seed in (1, 2) for name in PRIMARY],
    *[(name, seed) for seed in (1, 2) for name in CONTROLS | OTHERS],
    *[(name, seed) for seed in (3, 4) for name in PRIMARY | CONTROLS | OTHERS],
    *[(name, seed) for seed in range(5) for name in AGAIN],
    *[(name, seed) for seed in range(5, 10) for name in OTHER_SEEDS],
    *[(name, seed) for seed in (0, 1, 2) for name in LONG],
    *[(name, seed) for seed in (0, 1, 2) for name in SWEEPS],
    *[(name, seed) for seed in (0, 1, 2) for name in AFTERWARDS],
    *[(name, seed) for seed in range(5) for name in ARITHMETIC],
]  # a list of (method, seed), in the order in which they run

# The default job with more held-out prompts (250 puzzles of each size or 170 problems of each level, made for this and
# used for nothing else), and with three evaluations near the end instead of one.
SETTINGS = "--eval-size 250 --eval-samples 1 --eval-every 2 --eval-from 20"
HELD_OUT = {
    "kk_test.jsonl": "puzzles.py --people 2 3 --train 0 --test 250 --seed 20251112",
    "math_test.jsonl": "arithmetic.py --train 0 --test 170 --seed 20251112",
}
SIZES = {"2 people": "2", "3 people": "3"}  # heading -> name in a run's evaluations
LEVELS = {"level 1": "1", "level 2": "2", "level 3": "3"}

PHASES = ("sampling", "rewarding", "scoring", "updating")
KEPT = ("reward", "accuracy", "completions/mean_length", "completions/clipped_ratio", "entropy", "kl", "low_probability_share", "masked_share",
        "frac_reward_zero_std", "clip_ratio/low_mean", "clip_ratio/high_mean", "unsafe_tokens", "optimizer_steps", "grad_norm/all",
        "grad_norm/low", "grad_norm/high", *(f"seconds/{phase}" for phase in PHASES))  # fmt: skip


# ---- running


def command_of(run, method, seed, work):
    """The folder of a run, and the command that begins it or goes on with it."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", method).strip("-") + f"-{seed}"
    folder = work / name
    if (folder / "checkpoints").exists():
        return folder, [*run, "--resume", str(folder), "--quiet"]
    held_out = work / ("math_test.jsonl" if method in ARITHMETIC else "kk_test.jsonl")
    flags = [*shlex.split(SETTINGS), "--eval-data", str(held_out), *shlex.split(METHODS[method])]
    return folder, [
        *run,
        *flags,
        "--seed",
        str(seed),
        "--output",
        str(work),
        "--name",
        name,
        "--quiet",
    ]


def do(method, seed, work, threads):
    """One run, from its command to its line in the results."""
    folder, command = command_of([sys.executable, str(ROOT / "lopti.py")], method, seed, work)
    if folder.exists() and "--resume" not in command:
        shutil.rmtree(folder)  # it was stopped before there was anything to go on from
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    if finished.returncode:
        print(
            f"{method}, seed {seed}: stopped with {finished.returncode}\n{finished.stderr[-500:]}",
            flush=True,
        )
        return
    config = json.loads(
        (folder / "config.json").read_text(encoding="utf-8").replace(f"{ROOT}/", "")
    )  # no paths of this machine
    config = {
        key: value
        for key, value in config.items()
        if key not in ("name", "output", "resume", "quiet")
    }
    rows = read_lines(folder / "metrics.jsonl")
    metrics = {
        key: [float(f"{row.get(key) or 0:.4g}") for row in rows] for key in KEPT if key in rows[0]
    }
    line = {"method": method, "seed": seed, "flags": METHODS[method], "threads": threads, "config": config,
            "evaluations": read_lines(folder / "evaluations.jsonl"), "metrics": metrics}  # fmt: skip
    with open(RESULTS, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")
    print(f"{method}, seed {seed}: done", flush=True)


# ---- reading


def accuracy(line, measure="avg@1", size="mean", before=False):
    """A run's accuracy on held-out puzzles of a size ("2", "3" or "mean"): the mean of its last three evaluations."""
    tables = [evaluation["table"] for evaluation in line["evaluations"]]
    tables = tables[:1] if before else tables[1:][-3:]
    sizes = list(tables[0]) if size == "mean" else [size]
    return statistics.mean(table[size][measure][0] for table in tables for size in sizes)


T_QUANTILES = {
    2: 12.706,
    3: 4.303,
    4: 3.182,
    5: 2.776,
    6: 2.571,
    7: 2.447,
    8: 2.365,
    9: 2.306,
    10: 2.262,
}  # of Student's t at 97.5 %, by the number of values


def mean_and_interval(values):
    """(mean, half of its 95 % interval by Student's t); the half is None for fewer than 2 values."""
    half = (
        T_QUANTILES[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
        if len(values) > 1
        else None
    )
    return statistics.mean(values), half


def by_seed(lines, method):
    return {line["seed"]: line for line in lines if line["method"] == method}


def differences(lines, method, baseline="GRPO", **what):
    """`accuracy` minus that of the baseline with the same seed (hence the same prompts), for every seed that has both."""
    ours, theirs = by_seed(lines, method), by_seed(lines, baseline)
    return [
        accuracy(ours[seed], **what) - accuracy(theirs[seed], **what)
        for seed in sorted(ours)
        if seed in theirs
    ]


def difference_to_all(lines, method):
    """(mean, half of the 95 % interval) of the difference between a method's runs and all of GRPO's, those with further seeds
    too: not within seeds, hence by Welch's standard error, with the degrees of freedom of the smaller of the two."""
    groups = [
        [accuracy(line) for line in lines if line["method"] in names]
        for names in ((method,), ("GRPO", *OTHER_SEEDS))
    ]
    mean, fewest = statistics.mean(groups[0]) - statistics.mean(groups[1]), min(map(len, groups))
    if fewest < 2:
        return mean, None
    return mean, T_QUANTILES[fewest] * math.sqrt(
        sum(statistics.variance(group) / len(group) for group in groups)
    )


def verdict(mean, half):
    """What a difference that is claimed to be positive says: 'held', 'did not hold' or 'undecided'."""
    if half is None or abs(mean) <= half:
        return "undecided"
    return "held" if mean > 0 else "did not hold"


CLAIMS = [  # (what a paper says, method, compared with, +1: more accurate or -1: less)
    ("AR beats GRPO", "AR", "GRPO", 1),
    ("Lopti beats GRPO", "Lopti", "GRPO", 1),
    ("AR + Lopti beats GRPO", "AR + Lopti", "GRPO", 1),
    ("AR + Lopti beats AR", "AR + Lopti", "AR", 1),
    ("AR + Lopti beats Lopti", "AR + Lopti", "Lopti", 1),
    ("the reversed order is worse than GRPO", "reversed Lopti", "GRPO", -1),
    ("the reversed order is worse than Lopti", "reversed Lopti", "Lopti", -1),
    ("high-probability tokens alone are worse than all", "high only", "GRPO", -1),
    ("AR + Lopti helps REINFORCE++ too", "REINFORCE++ + AR + Lopti", "REINFORCE++", 1),
    ("STAPO beats GRPO", "STAPO", "GRPO", 1),
    ("the highest-entropy 20 % beat all tokens", "80/20", "GRPO", 1),
    ("the lowest-entropy 80 % are worse than all", "lowest 80 %", "GRPO", -1),
    ("the safe vocabulary beats the whole", "min-p", "GRPO", 1),
    ("control: a second pass over the batch beats one", "GRPO, two passes", "GRPO", 1),
    ("control: Lopti beats GRPO with as many optimizer steps", "Lopti", "GRPO, two passes", 1),
    ("control: half the learning rate is worse", "GRPO, lr × 0.5", "GRPO", -1),
    ("control: twice the learning rate is worse", "GRPO, lr × 2", "GRPO", -1),
    ("control: four times the learning rate is worse", "GRPO, lr × 4", "GRPO", -1),
    ("α = 1 is worse than α = 0.3", "AR α = 1", "AR", -1),
    ("η = 0.9 is worse than η = 0.5", "Lopti η = 0.9", "Lopti", -1),
    ("five times as long: Lopti beats GRPO", "Lopti, long", "GRPO, long", 1),
    (
        "five times as long: the reversed order is worse than GRPO",
        "reversed Lopti, long",
        "GRPO, long",
        -1,
    ),
    (
        "five times as long: the reversed order is worse than Lopti",
        "reversed Lopti, long",
        "Lopti, long",
        -1,
    ),
    ("arithmetic: AR beats GRPO", "AR α = 0.1, arithmetic", "GRPO, arithmetic", 1),
    ("arithmetic: Lopti beats GRPO", "Lopti, arithmetic", "GRPO, arithmetic", 1),
    (
        "arithmetic: AR + Lopti beats AR (paper: no)",
        "AR + Lopti, arithmetic",
        "AR α = 0.1, arithmetic",
        1,
    ),
    (
        "arithmetic: AR + Lopti beats Lopti (paper: no)",
        "AR + Lopti, arithmetic",
        "Lopti, arithmetic",
        1,
    ),
]


def claims(lines):
    """The head and a row for each claim that there are runs for: how large, how sure, and what follows; and the same against
    all runs of GRPO."""
    found = [
        (
            "claim",
            "difference in sampled accuracy",
            "95 % interval",
            "seeds",
            "verdict",
            "against GRPO's runs with ten seeds",
        )
    ]
    for claim, method, baseline, sign in CLAIMS:
        if values := differences(lines, method, baseline):
            mean, half = mean_and_interval(values)
            interval = f"{mean - half:+.3f} to {mean + half:+.3f}" if half is not None else ""
            wider = ""
            if baseline == "GRPO":
                to_all, margin = difference_to_all(lines, method)
                wider = f"{to_all:+.3f}" + (
                    f" ± {margin:.3f} {verdict(sign * to_all, margin)}"
                    if margin is not None
                    else ""
                )
            found.append(
                (
                    claim,
                    f"{mean:+.3f}",
                    interval,
                    f"{len(values)}",
                    verdict(sign * mean, half),
                    wider,
                )
            )
    return found


def collapsed(line, width=10, drop=0.1):
    """Whether a run's training accuracy, averaged over `width` steps, ends at least `drop` below its best such average."""
    values = line["metrics"]["accuracy"]
    means = running_mean(values, width)[min(width, len(values)) - 1 :]
    return means[-1] <= max(means) - drop


def step_seconds(line):
    """Seconds that each training step of a run took."""
    return [sum(step) for step in zip(*(line["metrics"][f"seconds/{phase}"] for phase in PHASES))]


def number_and_interval(values, sign=""):
    """'0.787 ± 0.014'; the mean alone for a single value. `sign="+"` writes plus signs too."""
    mean, half = mean_and_interval(values)
    return f"{mean:{sign}.3f}" + (f" ± {half:.3f}" if half is not None else "")


def baseline_of(method):
    """The plain GRPO of the same task and length."""
    return (
        "GRPO, arithmetic" if method in ARITHMETIC else "GRPO, long" if method in LONG else "GRPO"
    )


def before_training(lines, methods):
    """The runs of GRPO or whichever of these methods comes first: before training all are the same policy, up to its samples."""
    first = next(line["method"] for line in lines if line["method"] in methods)
    return list(by_seed(lines, first).values())


def accuracies(lines, methods=PUZZLES, sizes=SIZES):
    """The paper's table: the head and a row for each method with its sampled accuracy by size and what it gained over GRPO
    (runs of 120 steps over GRPO's of 120). `sizes`: heading -> name in the evaluations."""
    first, sizes = before_training(lines, methods), {**sizes, "mean": "mean"}  # heading -> name
    found = [("sampled accuracy", "seeds", *sizes, "against GRPO, same seeds", "relative")]
    found += [
        (
            "before training",
            f"{len(first)}",
            *(
                number_and_interval([accuracy(run, size=size, before=True) for run in first])
                for size in sizes.values()
            ),
            "",
            "",
        )
    ]
    for method in methods:
        if runs := list(by_seed(lines, method).values()):
            row = [
                method,
                f"{len(runs)}",
                *(
                    number_and_interval([accuracy(run, size=size) for run in runs])
                    for size in sizes.values()
                ),
            ]
            baseline = baseline_of(method)
            if method != baseline and (compared := differences(lines, method, baseline)):
                theirs = statistics.mean(
                    accuracy(run)
                    for seed, run in by_seed(lines, baseline).items()
                    if seed in by_seed(lines, method)
                )
                row += [
                    number_and_interval(compared, "+"),
                    f"{statistics.mean(compared) / theirs:+.1%}",
                ]
            found.append((*row, *[""] * (len(found[0]) - len(row))))
    return found


def endings(lines, methods=PUZZLES):
    """The head and a row for each method: greedy accuracy, the last three training steps, and what it cost."""
    found = [
        (
            "how it ended",
            "greedy accuracy",
            "length",
            "entropy",
            "masked tokens",
            "seconds a step",
            "collapsed",
        )
    ]
    found += [
        (
            "before training",
            f"{accuracy(before_training(lines, methods)[0], 'greedy', before=True):.3f}",
            *[""] * 5,
        )
    ]
    for method in methods:
        if runs := list(by_seed(lines, method).values()):
            length, entropy = (
                statistics.mean(value for run in runs for value in run["metrics"][key][-3:])
                for key in ("completions/mean_length", "entropy")
            )
            masked = statistics.mean(
                value for run in runs for value in run["metrics"]["masked_share"]
            )
            seconds = statistics.median(seconds for run in runs for seconds in step_seconds(run))
            fallen = f"{sum(map(collapsed, runs))} of {len(runs)}"
            found.append(
                (
                    method,
                    number_and_interval([accuracy(run, "greedy") for run in runs]),
                    f"{length:.0f}",
                    f"{entropy:.3f}",
                    f"{masked:.2%}",
                    f"{seconds:.1f}",
                    fallen,
                )
            )
    return found


def markdown(rows):
    """Rows of text, the first of them the head, as a Markdown table that also reads well as it stands."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |"
        for row in rows
    )


def table(lines):
    """Accuracy per method and size, how the runs ended, and what became of the claims."""
    tables = []
    for methods, sizes in ((PUZZLES, SIZES), (ARITHMETIC, LEVELS)):
        if any(line["method"] in methods for line in lines):
            tables += [accuracies(lines, methods, sizes), endings(lines, methods)]
    return "\n\n".join(map(markdown, [*tables, claims(lines)])) if tables else "no results yet"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument(
        "--threads", type=int, default=0, help="threads of each run; 0 shares the cores out"
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / "runs" / "experiments", help="where the run folders go"
    )
    parser.add_argument("--list", action="store_true", help="print the commands and stop")
    parser.add_argument(
        "--table", action="store_true", help="print the table of what is there and stop"
    )
    args = parser.parse_args()
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--table | head` ends quietly
    done = {(line["method"], line["seed"]) for line in read_lines(RESULTS)}
    todo = [entry for entry in PLAN if entry not in done]
    if args.list:
        for script in HELD_OUT.values():
            print(f"python data/make/{script} --folder {args.work}")
        for entry in todo:
            print(shlex.join(command_of(["python", "lopti.py"], *entry, args.work)[1]))
    elif not args.table:
        args.work.mkdir(parents=True, exist_ok=True)
        for file, script in HELD_OUT.items():
            if not (args.work / file).exists():
                name, *flags = shlex.split(script)
                subprocess.run(
                    [
                        sys.executable,
                        str(HERE.parent / "make" / name),
                        *flags,
                        "--folder",
                        str(args.work),
                    ],
                    check=True,
                )
        threads = args.threads or max(1, (os.cpu_count() or 1) // args.jobs)
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(lambda entry: do(*entry, args.work, threads), todo))
    if not args.list:
        print(table(read_lines(RESULTS)))


if __name__ == "__main__":
    main()
