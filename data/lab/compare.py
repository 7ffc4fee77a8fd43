"""Does a method help on your model? Trains each with the same seeds, and prints their leads.

    python data/lab/compare.py --seeds 0-4 "" "--passes 2" "--alpha 0.3" "--eta 0.5"
    python data/lab/compare.py --seeds 0-4 "" "--eta 0.5" -- --model M --data F --task math
    python data/lab/compare.py --seeds 0-4 --rates 5e-5 1e-4 2e-4 --rate-seeds 90 "" "--eta 0.5"

A method is a list of flags of lopti.py, with --variant of variants.py; "" is GRPO. Flags after --
are for all. The same command goes on where it stopped. A run that has finished is a line of
--results, and its weights are deleted; from these lines the same command prints the table again.

A lead is a difference in accuracy, first minus second, for each seed. ±: half of a 95 % interval
over the seeds (Student's t). p: of the t-test, after Holm's correction for all leads of a column.

- By step: accuracy in training, the mean over all steps but the first.
- At equal KL: accuracy in training against rollout/kl, that of the policy that sampled to the
  starting one. Both are running means of five steps, the KL made never to fall, linear between
  steps. The lead is the mean over the KL that both runs of a seed pass through, within --kl.
- Held out: the mean over evaluations, those of --judge or all after step 0, and difficulties.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import pairwise
from pathlib import Path

import numpy as np
from scipy import stats

ROOT, WORK = Path(__file__).resolve().parents[2], Path("runs/compare")
METRICS = ("accuracy", "reward", "rollout/kl", "entropy", "completions/mean_length")
COLUMNS = ("by step", "p", "at equal KL", "p", "held out", "p", "KL at the end")
COLORS = ("#555555", "#8B5A2B", "#E69F00", "#6A3D9A", "#009E73", "#000000", "#56B4E9", "#CC79A7")
RUNNING = []  # processes

# ---- Training


def read_lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def results_of(args):
    return {(line["flags"], line["seed"]): line for line in read_lines(args.results)}


def train(flags, seed, args):
    """One run, begun or gone on with, as a process of its own. Returns what to say of it."""
    words = shlex.split(flags)
    name = re.sub(r"[^A-Za-z0-9]+", "-", flags)[-60:].strip("-")
    folder = WORK / f"{name}-{zlib.crc32(flags.encode()):08x}-{seed}"
    if not (folder / "final").exists():
        own = [pair for pair in pairwise(words) if pair[0] in ("--variant", "--only")]
        command = [sys.executable, ROOT / ("data/lab/variants.py" if own else "lopti.py")]
        if any(folder.glob("checkpoint*")):
            command += [*sum(own, ()), "--resume", folder]
        else:
            shutil.rmtree(folder, ignore_errors=True)
            command += [*words, "--seed", f"{seed}", "--name", folder.name, "--output", WORK]
        log, environment = folder.with_suffix(".log"), {"OMP_NUM_THREADS": f"{args.threads}"}
        with log.open("w", encoding="utf-8") as stream:
            options = {"stdout": stream, "stderr": stream, "start_new_session": True}
            RUNNING.append(subprocess.Popen(command, env=os.environ | environment, **options))
            if RUNNING[-1].wait():
                return f"{log}: {log.read_text('utf-8')[-500:].strip()}"
    steps = read_lines(folder / "metrics.jsonl")
    line = {"flags": flags, "seed": seed, "evaluations": read_lines(folder / "evaluations.jsonl")}
    line["metrics"] = {name: [step[name] for step in steps] for name in METRICS}
    short = json.loads(json.dumps(line), parse_float=lambda text: float(f"{float(text):.4g}"))
    with args.results.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(short) + "\n")
    for path in [folder / "final", *folder.glob("checkpoint*")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return "done"


def train_all(runs, args):
    """Train what has not finished, --jobs at a time. Returns all results."""
    todo = [run for run in runs if run not in results_of(args) and not args.table]
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = {pool.submit(train, *run, args): run for run in todo}
        try:
            for count, future in enumerate(as_completed(futures), 1):
                flags, seed = futures[future]
                print(
                    f"{count} of {len(todo)}: {flags}, seed {seed}: {future.result()}", flush=True
                )
        except KeyboardInterrupt:  # no other starts, and those that run stop
            pool.shutdown(wait=False, cancel_futures=True)
            for process in RUNNING:
                process.terminate()
            raise
    return results_of(args)


def flags_of(method, args, *more):
    """All flags of a method's runs, in one text: their name in the results."""
    return shlex.join([*args.common, *shlex.split(method), *more])


def best_rate(method, rates, args, more=2):
    """The rate with the best accuracy by step, and whether it is the lowest or highest tried.

    Where it is one of these, the next rate beyond it is tried too, `more` times.
    """
    steps = ["--steps", f"{args.rate_steps}"] if args.rate_steps else []
    texts = {x: flags_of(method, args, "--learning-rate", f"{x:g}", *steps) for x in sorted(rates)}
    results = train_all([(text, seed) for seed in args.rate_seeds for text in texts.values()], args)
    found = {}
    for rate, text in texts.items():
        lines = [results.get((text, seed)) for seed in args.rate_seeds]
        found |= {rate: np.mean([by_step(line) for line in lines])} if all(lines) else {}
    if len(found) < 2:
        sys.exit(f"compare.py: '{method}' has not finished at two rates")
    best, tried = max(found, key=found.get), list(found)
    beyond = {tried[0]: tried[0] ** 2 / tried[1], tried[-1]: tried[-1] ** 2 / tried[-2]}
    if best in beyond and more and not args.table:
        return best_rate(method, [*rates, float(f"{beyond[best]:.2g}")], args, more - 1)
    return best, best in beyond


# ---- What came of it


def by_step(line):
    return np.mean(line["metrics"]["accuracy"][1:] or np.nan)


def running_means(line, name):
    return np.convolve(line["metrics"][name], np.ones(5) / 5, "valid")


def at_equal_kl(first, second, limits):
    """The lead of one run at equal KL; NaN where the two have no KL in common."""
    if min(len(line["metrics"]["accuracy"]) for line in (first, second)) < 5:
        return np.nan
    kls = [np.maximum.accumulate(running_means(line, "rollout/kl")) for line in (first, second)]
    low, high = max(limits[0], kls[0][0], kls[1][0]), min(limits[1], kls[0][-1], kls[1][-1])
    at, means = np.linspace(low, high, 101), [running_means(x, "accuracy") for x in (first, second)]
    curves = [np.interp(at, *curve) for curve in zip(kls, means)]
    return np.mean(curves[0] - curves[1]) if low < high else np.nan


def outcomes(line, args):
    """By step, at equal KL (nothing yet), held out, KL at the end: (4,)."""
    rows = {row["step"]: list(row["table"].values()) for row in line["evaluations"]}
    steps = args.judge or [step for step in rows if step]
    if missing := {*steps} - rows.keys():
        sys.exit(f"compare.py: '{line['flags']}' has no evaluation at step {min(missing)}")
    sizes = [size for step in steps for size in rows[step]]
    measure = next((name for name in sizes[0] if name.startswith("avg@")), "greedy")
    held_out = np.mean([size[measure][0] for size in sizes])
    kl = line["metrics"]["rollout/kl"][-1]
    return np.array([by_step(line), np.nan, held_out, kl if kl else np.nan])


def interval(values):
    """The mean, half of its 95 % interval and the p of Student's t-test; NaNs are left out."""
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return values.sum() if len(values) else np.nan, np.nan, np.nan
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return values.mean(), half, stats.ttest_1samp(values, 0).pvalue if half else np.nan


def holm(p_values):
    """Holm's correction, (N,) → (N,); NaN counts as 1."""
    p_values = np.nan_to_num(p_values, nan=1.0)
    order = np.argsort(p_values)
    steps = p_values[order] * np.arange(len(order), 0, -1)
    return np.maximum.accumulate(steps).clip(max=1)[order.argsort()]


def table(runs, args):
    """Rows of text, the head first: the methods, then their leads. runs: {name: {seed: line}}."""
    names, rows, leads = list(runs), [("", "runs", *COLUMNS)], {}
    for base in (names[number - 1] for number in args.against):
        for name in names:
            if name != base and (base, name) not in leads:
                seeds = sorted(runs[name].keys() & runs[base].keys())
                leads[name, base] = np.full((len(seeds), 4), np.nan)
                for row, seed in zip(leads[name, base], seeds):
                    pair = runs[name][seed], runs[base][seed]
                    row[:] = np.subtract(*[outcomes(line, args) for line in pair])
                    row[1] = at_equal_kl(*pair, args.kl)
    p_values = [[interval(column)[2] for column in values.T] for values in leads.values()]
    corrected = dict(zip(leads, np.transpose([holm(column) for column in np.transpose(p_values)])))
    of_methods = {(x,): np.array([outcomes(y, args) for y in runs[x].values()]) for x in names}
    for name, values in (of_methods | leads).items():
        row = [" − ".join(name), f"{len(values)}"]
        for column, p in zip(values.reshape(-1, 4).T, corrected.get(name, [np.nan] * 4)):
            mean, half, _ = interval(column)
            cell = f"{mean:{'+' if name in leads else ''}.3f} ± {half:.3f}"
            row += [cell.replace(" ± nan", ""), f"{p:.3f}" if np.isfinite(half + p) else ""]
        rows.append([cell.replace("-", "−").replace("nan", "–") for cell in row[:-1]])
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * width for width in widths])
    return [" | ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows]


def draw(runs, file):
    """Accuracy in training by step, running means of five steps, with 95 % intervals."""
    import matplotlib.pyplot as plt

    for (name, lines), color in zip(runs.items(), COLORS * len(runs)):
        curves = np.array([running_means(line, "accuracy") for line in lines.values()])
        mean, half, _ = np.transpose([interval(step) for step in curves.T])
        steps = 3 + np.arange(len(mean))
        plt.plot(steps, mean, color=color, label=name)
        plt.fill_between(steps, mean - half, mean + half, color=color, alpha=0.15)
    plt.gca().set(xlabel="step", ylabel="accuracy in training")
    plt.legend()
    plt.savefig(file, dpi=120)


def numbers(text):
    """'0-2,7' → [0, 1, 2, 7]"""
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return [number for end in ends for number in range(end[0], end[-1] + 1)]


def main():
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=look, allow_abbrev=False)
    several = {"nargs": "+", "metavar": "X"}
    options = {
        "--seeds": {"type": numbers, "required": True, "help": "0-4, or 0,2,7"},
        "--rates": {"type": float, **several, "help": "learning rates to choose from"},
        "--rate-seeds": {"type": numbers, "default": [], "help": "that choose; none of --seeds"},
        "--rate-steps": {"type": int, "help": "--steps of the runs that choose"},
        "--names": {**several, "help": "of the methods, in the table and the picture"},
        "--against": {
            "type": int,
            **several,
            "default": [1],
            "help": "leads over the 1st method …",
        },
        "--judge": {"type": int, **several, "help": "steps whose evaluations count"},
        "--kl": {"type": float, "nargs": 2, "default": (0.0, np.inf), "help": "at equal KL"},
        "--jobs": {"type": int, "default": 1, "help": "runs at a time"},
        "--threads": {"type": int, "default": 1, "help": "of each run"},
        "--results": {"type": Path, "default": WORK / "results.jsonl", "help": "%(default)s"},
        "--table": {"action": "store_true", "help": "of what has finished: train nothing"},
        "--plot": {"metavar": "FILE", "help": "draw accuracy in training by step"},
    }
    for name, option in options.items():
        parser.add_argument(name, **option)
    argv = [*sys.argv[1:], "--"]
    end, words, methods = argv.index("--"), [], []
    for word in argv[:end]:
        of_lopti = not word or (word[0] in "-@" and word.split("=")[0] not in {*options, "--help"})
        (methods if of_lopti else words).append(word)
    args = parser.parse_args(words)
    args.common = argv[end + 1 : -1]
    args.names = args.names or [method or "GRPO" for method in methods]
    if len(methods) < 2 or len(args.names) != len(methods):
        parser.error("give two methods or more, each in quotation marks, and as many --names")
    if args.rates and (len({*args.rates}) < 2 or not args.rate_seeds):
        parser.error("--rates needs two rates or more, and --rate-seeds")
    if {*args.seeds} & {*args.rate_seeds}:
        parser.error("--rate-seeds must be others than --seeds: those are judged")
    if not all(1 <= number <= len(methods) for number in args.against):
        parser.error(f"--against takes numbers from 1 to {len(methods)}")
    for folder in (WORK, args.results.parent):
        folder.mkdir(parents=True, exist_ok=True)
    args.results.touch()
    flags = dict(zip(args.names, methods))
    for name, method in flags.items():
        rate, at_end = best_rate(method, args.rates, args) if args.rates else (None, False)
        flags[name] = flags_of(method, args, *(["--learning-rate", f"{rate:g}"] if rate else []))
        if rate:
            print(f"{name}: {rate:g}" + ", the lowest or highest that was tried" * at_end)
    results = train_all([(text, seed) for seed in args.seeds for text in flags.values()], args)
    runs = {
        name: {seed: results[text, seed] for seed in args.seeds if (text, seed) in results}
        for name, text in flags.items()
    }
    print(*table(runs, args), sep="\n")
    if args.plot:
        draw(runs, args.plot)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ncompare.py: stopped; the same command goes on")
