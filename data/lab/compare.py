"""Does a method help on your model? Trains each with the same seeds, and prints their leads.

    python data/lab/compare.py --seeds 0-4 "" "--passes 2" "--alpha 0.3" "--eta 0.5"
    python data/lab/compare.py --seeds 0-4 "" "--eta 0.5" -- --model M --data F --task math
    python data/lab/compare.py --seeds 0-4 --rates 5e-5 1e-4 2e-4 --rate-seeds 90 "" "--eta 0.5"

A method is a list of flags of lopti.py, with --variant of variants.py; "" is GRPO. Flags after --
are for all. The same command goes on where it stopped. A finished run is a line of --results, and
its weights are deleted; from these lines the same command prints the table again.

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
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pandas
from scipy import stats

ROOT, WORK = Path(__file__).resolve().parents[2], Path("runs/compare")
METRICS = ("accuracy", "reward", "rollout/kl", "entropy", "completions/mean_length")
BY_STEP, EQUAL_KL, HELD_OUT, KL_END = "by step", "at equal KL", "held out", "KL at the end"
COLORS = ("#555555", "#8B5A2B", "#E69F00", "#6A3D9A", "#009E73", "#000000", "#56B4E9", "#CC79A7")


def numbers(text):
    """'0-2,7' → [0, 1, 2, 7]"""
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return [number for end in ends for number in range(end[0], end[-1] + 1)]


FLAGS = {
    "--seeds": {"type": numbers, "required": True, "help": "0-4, or 0,2,7"},
    "--rates": {"type": float, "nargs": "+", "help": "learning rates; each method takes its best"},
    "--rate-seeds": {"type": numbers, "default": [], "help": "of the runs that choose the rates"},
    "--rate-steps": {"type": int, "help": "--steps of these runs"},
    "--names": {"nargs": "+", "help": "of the methods, in the table and the picture"},
    "--against": {"type": int, "nargs": "+", "default": [1], "help": "leads over the 1st method …"},
    "--judge": {"type": int, "nargs": "+", "help": "steps whose evaluations count"},
    "--kl": {"type": float, "nargs": 2, "default": (0.0, np.inf), "help": "at equal KL"},
    "--jobs": {"type": int, "default": 1, "help": "runs at a time"},
    "--threads": {"type": int, "default": 1, "help": "of each run"},
    "--results": {"type": Path, "default": WORK / "results.jsonl", "help": "%(default)s"},
    "--table": {"action": "store_true", "help": "of what has finished: train nothing"},
    "--plot": {"metavar": "FILE", "help": "draw accuracy in training by step"},
}

# ---- Training


def read_lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def train(flags, seed, args):
    """One run, begun or gone on with, as a process of its own. Returns what to say of it."""
    words, name = shlex.split(flags), re.sub(r"[^A-Za-z0-9]+", "-", flags)[-60:].strip("-")
    folder = WORK / f"{name}-{zlib.crc32(flags.encode()):08x}-{seed}"
    if not (folder / "final").exists():
        own = [pair for pair in pairwise(words) if pair[0] in ("--variant", "--only")]
        command = [sys.executable, ROOT / ("data/lab/variants.py" if own else "lopti.py")]
        if (folder / "checkpoint.pt").exists():
            command += [*sum(own, ()), "--resume", folder]
        else:
            shutil.rmtree(folder, ignore_errors=True)
            command += [*words, "--seed", f"{seed}", "--name", folder.name, "--output", WORK]
        log, environment = folder.with_suffix(".log"), {"OMP_NUM_THREADS": f"{args.threads}"}
        with log.open("w", encoding="utf-8") as stream:
            options = {"stdout": stream, "stderr": stream, "env": os.environ | environment}
            if subprocess.run(command, check=False, **options).returncode:
                return f"{log}: {' '.join(log.read_text('utf-8').splitlines()[-1:])}"
    steps, evaluations = (read_lines(folder / f"{x}.jsonl") for x in ("metrics", "evaluations"))
    line = {"flags": flags, "seed": seed}
    line["evaluations"] = [{name: row[name] for name in ("step", "table")} for row in evaluations]
    line["metrics"] = {name: [step[name] for step in steps] for name in METRICS}
    short = json.loads(json.dumps(line), parse_float=lambda text: float(f"{float(text):.4g}"))
    with args.results.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(short) + "\n")
    shutil.rmtree(folder / "final")
    (folder / "checkpoint.pt").unlink(missing_ok=True)
    return "done"


def train_all(texts, seeds, args):
    """Train what has not finished, --jobs at a time. Returns {(flags, seed): line of results}."""
    results = lambda: {(line["flags"], line["seed"]): line for line in read_lines(args.results)}
    done, pool = results(), ThreadPoolExecutor(args.jobs)
    todo = [(text, seed) for seed in seeds for text in texts if not args.table]
    try:  # after Ctrl-C no other starts
        futures = {pool.submit(train, *run, args): run for run in todo if run not in done}
        for count, future in enumerate(as_completed(futures), 1):
            flags, seed = futures[future]
            print(f"{count} of {len(futures)}: {flags}, seed {seed}: {future.result()}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    return results()


def best_rate(name, flags, rates, args, more=2):
    """The learning rate at which accuracy by step is best.

    Where that is the lowest or the highest, the next beyond it is tried too, `more` times.
    """
    steps = ["--steps", f"{args.rate_steps}"] if args.rate_steps else []
    texts = {x: shlex.join([*flags, "--learning-rate", f"{x:g}", *steps]) for x in sorted(rates)}
    results, seeds = train_all(texts.values(), args.rate_seeds, args), args.rate_seeds
    lines = {rate: [results.get((text, seed)) for seed in seeds] for rate, text in texts.items()}
    found = {rate: np.mean([*map(by_step, each)]) for rate, each in lines.items() if all(each)}
    if len(found) < 2:
        sys.exit(f"compare.py: {name} has not finished at two rates")
    best, tried = max(found, key=found.get), list(found)
    beyond = {tried[0]: tried[0] ** 2 / tried[1], tried[-1]: tried[-1] ** 2 / tried[-2]}
    if best in beyond and more:
        return best_rate(name, flags, [*rates, float(f"{beyond[best]:.2g}")], args, more - 1)
    print(f"{name}: best at {best:g} of {tried}" + ", perhaps beyond" * (best in beyond))
    return best


# ---- What came of it


def by_step(line):
    return np.mean(line["metrics"]["accuracy"][1:] or np.nan)


def outcomes(line, args):
    """What one run says; a lead at equal KL needs two."""
    rows = {row["step"]: list(row["table"].values()) for row in line["evaluations"]}
    steps = args.judge or [step for step in rows if step]
    if missing := {*steps} - rows.keys():
        sys.exit(f"compare.py: no evaluation at step {min(missing)} with {line['flags']}")
    sizes = [size for step in steps for size in rows[step]]
    measure = next((name for name in sizes[0] if name.startswith("avg@")), "greedy")
    held_out = np.mean([size[measure][0] for size in sizes])
    kl = line["metrics"]["rollout/kl"][-1] or np.nan  # 0: there is no reference
    return {BY_STEP: by_step(line), EQUAL_KL: np.nan, HELD_OUT: held_out, KL_END: kl}


def running_means(line, name):
    return pandas.Series(line["metrics"][name]).rolling(5).mean().dropna().to_numpy()


def at_equal_kl(first, second, limits=(0.0, np.inf)):
    """The lead of one run at equal KL; NaN where the two have no KL in common."""
    kls = [np.maximum.accumulate(running_means(line, "rollout/kl")) for line in (first, second)]
    low = max(limits[0], *(kl.min(initial=np.inf) for kl in kls))
    high = min(limits[1], *(kl.max(initial=-np.inf) for kl in kls))
    if low >= high:
        return np.nan
    at, means = np.linspace(low, high, 101), [running_means(x, "accuracy") for x in (first, second)]
    return np.mean(np.interp(at, kls[0], means[0]) - np.interp(at, kls[1], means[1]))


def interval(values):
    """The mean, half of its 95 % interval and the p of Student's t-test; NaNs are left out."""
    values = pandas.Series(values, dtype=float).dropna()
    mean, error, freedom = np.float64(values.mean()), values.sem(), len(values) - 1
    with np.errstate(all="ignore"):
        return mean, stats.t.ppf(0.975, freedom) * error, 2 * stats.t.sf(abs(mean) / error, freedom)


def holm(p_values):
    """Holm's correction, (N,) → (N,); NaN counts as 1."""
    p_values = np.nan_to_num(p_values, nan=1.0)
    order = np.argsort(p_values)
    steps = p_values[order] * np.arange(len(order), 0, -1)
    return np.maximum.accumulate(steps).clip(max=1)[order.argsort()]


def table(runs, bases, args):
    """The methods, and their leads over `bases`, as a frame of text. runs: {name: {seed: line}}."""
    methods, leads, rows = {}, {}, {}
    for name, lines in runs.items():
        found = {seed: outcomes(line, args) for seed, line in lines.items()}
        methods[name] = pandas.DataFrame.from_dict(found, "index")
    for base, name in product(bases, runs):
        if name != base and f"{base} − {name}" not in leads:
            values = (methods[name] - methods[base]).dropna(how="all")  # by seed
            pairs = [(runs[name][seed], runs[base][seed]) for seed in values.index]
            values[EQUAL_KL] = [at_equal_kl(*pair, args.kl) for pair in pairs]
            leads[f"{name} − {base}"] = values
    for name, values in (methods | leads).items():
        rows[name] = {"runs": len(values)}
        for column in values:
            mean, half, _ = interval(values[column])
            cell = f"{mean:{'+' if name in leads else ''}.3f} ± {half:.3f}".replace(" ± nan", "")
            rows[name][column] = "–" if np.isnan(mean) else cell.replace("-", "−")
    for column in (BY_STEP, EQUAL_KL, HELD_OUT):
        p_values = holm([interval(values[column])[2] for values in leads.values()])
        for name, p in zip(leads, p_values):
            rows[name][column] += f", p {p:.3f}" * ("±" in rows[name][column])
    return pandas.DataFrame.from_dict(rows, "index")


def draw(runs, file):
    """Accuracy in training by step, running means of five steps, with 95 % intervals."""
    import matplotlib.pyplot as plt

    for (name, lines), color in zip(runs.items(), COLORS * len(runs)):
        curves = zip(*[running_means(line, "accuracy") for line in lines.values()])
        mean, half, _ = np.transpose([*map(interval, curves)])
        steps = np.arange(3, 3 + len(mean))  # the middle of five
        plt.plot(steps, mean, color=color, label=name)
        band = np.clip([mean - half, mean + half], 0, 1)
        plt.fill_between(steps, *band, color=color, alpha=0.15)
    plt.gca().set(xlabel="step", ylabel="accuracy in training")
    plt.legend()
    plt.savefig(file, dpi=120)


def main():
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=look, allow_abbrev=False)
    for name, options in FLAGS.items():
        parser.add_argument(name, **options)
    argv = [*sys.argv[1:], "--"]
    end = argv.index("--")
    ours = lambda word: word and (word[0] not in "-@" or word.split("=")[0] in {*FLAGS, "--help"})
    args = parser.parse_args([word for word in argv[:end] if ours(word)])
    methods = [shlex.split(word) for word in argv[:end] if not ours(word)]
    names = args.names or [shlex.join(method) or "GRPO" for method in methods]
    if len(names) < 2 or len({*names}) != len(methods):
        parser.error("give two methods or more, each in quotation marks, and as many --names")
    if args.rates and (not args.rate_seeds or {*args.seeds} & {*args.rate_seeds}):
        parser.error("--rates needs --rate-seeds, and --seeds has none of these")
    for folder in (WORK, args.results.parent):
        folder.mkdir(parents=True, exist_ok=True)
    args.results.touch()
    texts = {}
    for name, method in zip(names, methods):
        flags = [*argv[end + 1 : -1], *method]
        if args.rates:
            flags += ["--learning-rate", f"{best_rate(name, flags, args.rates, args):g}"]
        texts[name] = shlex.join(flags)
    results, runs = train_all(texts.values(), args.seeds, args), {}
    for name, text in texts.items():
        lines = {seed: results[text, seed] for seed in args.seeds if (text, seed) in results}
        runs |= {name: lines} if lines else {}
    bases = [names[number - 1] for number in args.against if names[number - 1] in runs]
    print(table(runs, bases, args).to_string() if runs else "no run has finished")
    if args.plot and runs:
        draw(runs, args.plot)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's & takes away
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("compare.py: stopped; the same command goes on")
