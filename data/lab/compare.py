"""Does a method help on your model? Trains each with the same seeds, and prints their leads.

    python data/lab/compare.py --seeds 0-4 "" "--passes 2" "--alpha 0.3" "--eta 0.5" --against 1 2
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
import shlex
import shutil
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas
from scipy import stats

ROOT, WORK = Path(__file__).resolve().parents[2], Path("runs/compare")
METRICS = ("accuracy", "reward", "rollout/kl", "entropy", "completions/mean_length")
BY_STEP, EQUAL_KL, HELD_OUT, KL_END = "by step", "at equal KL", "held out", "KL at the end"

# ---- Training


def read_lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def train(flags, seed, args):
    """One run, begun or gone on with, as a process of its own. Returns what to say of it."""
    words = shlex.split(flags)
    folder = WORK / f"{zlib.crc32(flags.encode()):08x}-{seed}"
    if not (folder / "final").exists():
        own = [pair for pair in pairwise(words) if pair[0] in ("--variant", "--only")]
        command = [sys.executable, ROOT / ("data/lab/variants.py" if own else "lopti.py")]
        if (folder / "checkpoint.pt").exists():
            command += [*sum(own, ()), "--resume", folder]
        else:
            shutil.rmtree(folder, ignore_errors=True)
            command += [*words, "--seed", f"{seed}", "--name", folder.name, "--output", WORK]
        if (run := subprocess.run(command, check=False, capture_output=True, text=True)).returncode:
            return run.stderr.strip()
    steps, evaluations = (read_lines(folder / f"{x}.jsonl") for x in ("metrics", "evaluations"))
    line = {"flags": flags, "seed": seed}
    line["evaluations"] = [{name: row[name] for name in ("step", "table")} for row in evaluations]
    line["metrics"] = {name: [step[name] for step in steps] for name in METRICS}
    with args.results.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")
    shutil.rmtree(folder / "final")
    (folder / "checkpoint.pt").unlink(missing_ok=True)
    return "done"


def train_all(texts, seeds, args):
    """Train what has not finished, --jobs at a time. {name: flags} → {name: {seed: line}}."""
    finished = lambda: {(line["flags"], line["seed"]): line for line in read_lines(args.results)}
    done = finished()
    todo = [(text, seed) for seed in seeds for text in texts.values() if (text, seed) not in done]
    with ThreadPoolExecutor(args.jobs) as pool:  # after Ctrl-C no other starts
        told = pool.map(lambda run: train(*run, args), [] if args.table else todo)
        for count, ((flags, seed), said) in enumerate(zip(todo, told), 1):
            print(f"{count} of {len(todo)}: {flags}, seed {seed}: {said}", flush=True)
    done = finished()
    of_text = lambda text: {seed: done[text, seed] for seed in seeds if (text, seed) in done}
    return {name: of_text(text) for name, text in texts.items()}


def best_rate(name, flags, rates, args, more=2):
    """The rate of the best accuracy by step; beyond the lowest or highest `more` are tried."""
    steps = ["--steps", f"{args.rate_steps}"] if args.rate_steps else []
    texts = {x: shlex.join([*flags, "--learning-rate", f"{x:g}", *steps]) for x in sorted(rates)}
    runs = train_all(texts, args.rate_seeds, args)
    if len(runs) < 2 or any(len(lines) < len(args.rate_seeds) for lines in runs.values()):
        sys.exit(f"compare.py: {name} has not finished at two rates or more, with all --rate-seeds")
    found = {rate: np.mean([*map(by_step, lines.values())]) for rate, lines in runs.items()}
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


def at_equal_kl(first, second, limits):
    """The lead of one run at equal KL; NaN where the two have no KL in common."""
    kls = [np.maximum.accumulate(running_means(line, "rollout/kl")) for line in (first, second)]
    low = max(limits[0], *(kl.min(initial=np.inf) for kl in kls))
    high = min(limits[1], *(kl.max(initial=-np.inf) for kl in kls))
    if low >= high:
        return np.nan
    means = [running_means(line, "accuracy") for line in (first, second)]
    at = np.linspace(low, high, 101)
    return np.mean(np.interp(at, kls[0], means[0]) - np.interp(at, kls[1], means[1]))


def interval(values):
    """Of each column: the mean, half of its 95 % interval and the p of Student's t-test."""
    mean, error, freedom = values.mean(), values.sem(), values.count() - 1
    p = 2 * (mean.abs() / error).combine(freedom, stats.t.sf)
    return mean, stats.t.ppf(0.975, freedom) * error, p


def holm(p_values):
    """Holm's correction of a column, lowest p first; NaN counts as 1."""
    ascending = p_values.fillna(1.0).sort_values()
    return (ascending * np.arange(len(ascending), 0, -1)).cummax().clip(upper=1)


def table(runs, bases, args):
    """The methods, and their leads over `bases`, as a frame of text. runs: {name: {seed: line}}."""
    methods, leads = {}, {}  # frames, with a row for each seed
    for name, lines in runs.items():
        found = {seed: outcomes(line, args) for seed, line in lines.items()}
        methods[name] = pandas.DataFrame.from_dict(found, "index")
    for base, name in product(bases, runs):
        lead = (methods[name] - methods[base]).dropna(how="all")
        if len(lead) and name != base and f"{base} − {name}" not in leads:
            pairs = [(runs[name][seed], runs[base][seed]) for seed in lead.index]
            lead[EQUAL_KL] = [at_equal_kl(*pair, args.kl) for pair in pairs]
            leads[f"{name} − {base}"] = lead
    groups = pandas.concat(methods | leads).groupby(level=0, sort=False)
    means, halves, p_values = interval(groups)
    p_values = p_values.loc[[*leads], [BY_STEP, EQUAL_KL, HELD_OUT]].apply(holm)
    p_values = p_values.where(halves.notna()).reindex_like(means)
    shown = lambda x, form: x.map(form.format, na_action="ignore").astype(object).fillna("")
    text = shown(means, "{:.3f}")
    text.loc[[*leads]] = shown(means.loc[[*leads]], "{:+.3f}")
    text += shown(halves, " ± {:.3f}") + shown(p_values, ", p {:.3f}")
    text = text.replace("-", "−", regex=True).replace("", "–")
    text.insert(0, "runs", groups.size())
    return text


def draw(runs, file):
    """Accuracy in training by step: running means of five steps, the mean over the seeds."""
    plt.style.use("petroff10")
    for name, lines in runs.items():
        curves = [running_means(line, "accuracy") for line in lines.values()]
        mean = pandas.DataFrame(curves).mean()
        plt.plot(mean.index + 3, mean, label=name)  # 3: the middle of five
    plt.gca().set(xlabel="step", ylabel="accuracy in training")
    plt.legend(loc="upper left", bbox_to_anchor=(1, 1))
    plt.savefig(file, dpi=120, bbox_inches="tight")


# ---- The command


def numbers(text):
    """'0-2,7' → [0, 1, 2, 7]"""
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return [number for end in ends for number in range(end[0], end[-1] + 1)]


def main():
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=look, allow_abbrev=False)
    add = parser.add_argument
    add("--seeds", type=numbers, required=True, help="0-4, or 0,2,7")
    add("--rates", type=float, nargs="+", help="learning rates; each method takes its best")
    add("--rate-seeds", type=numbers, default=[], help="of the runs that choose the rates")
    add("--rate-steps", type=int, help="--steps of these runs")
    add("--against", type=int, nargs="+", default=[1], help="leads over method 1, 2 and so on")
    add("--judge", type=int, nargs="+", help="steps whose evaluations count")
    add("--kl", type=float, nargs=2, default=(0.0, np.inf), help="between which two, at equal KL")
    add("--jobs", type=int, default=1, help="runs at a time, of $OMP_NUM_THREADS (1) threads each")
    add("--results", type=Path, default=WORK / "results.jsonl", help="default: %(default)s")
    add("--table", action="store_true", help="of what has finished: train nothing")
    add("--plot", metavar="FILE", help="draw accuracy in training by step")
    argv = [*sys.argv[1:], "--"]
    end = argv.index("--")
    args, methods = parser.parse_known_args(argv[:end])
    if len(methods) < 2 or any(method and method[0] not in "-@" for method in methods):
        parser.error("give two methods or more, each in quotation marks")
    if args.rates and (not args.rate_seeds or {*args.seeds} & {*args.rate_seeds}):
        parser.error("--rates needs --rate-seeds, and --seeds has none of these")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    args.results.parent.mkdir(parents=True, exist_ok=True)
    args.results.touch()
    texts = {}
    for method in methods:
        name = method or "GRPO"
        flags = [*argv[end + 1 : -1], *shlex.split(method)]
        if args.rates:
            flags += ["--learning-rate", f"{best_rate(name, flags, args.rates, args):g}"]
        texts[name] = shlex.join(flags)
    runs = train_all(texts, args.seeds, args)
    if not any(runs.values()):
        sys.exit("compare.py: no run has finished")
    print(table(runs, [[*runs][number - 1] for number in args.against], args).to_string())
    if args.plot:
        draw(runs, args.plot)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("compare.py: stopped; the same command goes on")
