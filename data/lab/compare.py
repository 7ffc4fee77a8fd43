"""Does a method help on your model? Trains each with the same seeds, and prints their leads.

    python data/lab/compare.py --seeds 0-4 "" "--passes 2" "--alpha 0.3" "--eta 0.5" --against 1 2
    python data/lab/compare.py --seeds 0-4 "" "--eta 0.5" -- --model M --data F --task math
    python data/lab/compare.py --seeds 0-4 --rates 5e-5 1e-4 2e-4 --rate-seeds 90 "" "--eta 0.5"

A method is a list of flags of lopti.py in quotation marks; "" is GRPO. Flags after -- are for all.
The same command goes on where it stopped. A finished run is a line of --results, and its weights
are deleted; from these lines the same command prints the table again.

A lead is a difference in accuracy, first minus second, for each seed:

- by step: accuracy in training, the mean over all steps but the first
- at equal KL: accuracy in training against rollout/kl, which says how far the policy that sampled
  was from the starting one. Both are running means of five steps, the KL made never to fall, linear
  between steps. The lead is the mean over the KL that both runs of a seed pass through, within --kl
- held out: the mean over all evaluations after step 0 and all difficulties
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti  # isort: skip, before torch

import numpy as np
from scipy import stats

ROOT, WORK = Path(__file__).resolve().parents[2], Path("runs/compare")
METRICS = ("accuracy", "reward", "rollout/kl", "entropy", "completions/mean_length")
BY_STEP, EQUAL_KL, HELD_OUT, KL_END = "by step", "at equal KL", "held out", "KL at the end"

# ---- Training


def read_lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def finished_runs(results):
    """{(flags, seed): line} of a file of results."""
    lines = read_lines(results) if results.exists() else []
    return {(line["flags"], line["seed"]): line for line in lines}


def train(flags, seed, results):
    """One run, begun or gone on with, as a process of its own. Returns what to say of it."""
    folder = WORK / f"{zlib.crc32(flags.encode()):08x}-{seed}"
    if not (folder / "final").exists():
        command = [sys.executable, ROOT / "lopti.py"]
        if (folder / "checkpoint.pt").exists():
            command += ["--resume", folder]
        else:
            shutil.rmtree(folder, ignore_errors=True)
            command += [*shlex.split(flags), "--seed", f"{seed}"]
            command += ["--name", folder.name, "--output", WORK]
        run = subprocess.run(command, check=False, capture_output=True, text=True)
        if run.returncode:
            return run.stderr.strip()
    steps = read_lines(folder / "metrics.jsonl")
    line = {"flags": flags, "seed": seed, "evaluations": [], "metrics": {}}
    for row in read_lines(folder / "evaluations.jsonl"):
        line["evaluations"].append({"step": row["step"], "table": row["table"]})
    for name in METRICS:
        line["metrics"][name] = [step[name] for step in steps]
    with results.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")
    shutil.rmtree(folder / "final")
    (folder / "checkpoint.pt").unlink(missing_ok=True)
    return "done"


def train_all(methods, seeds, args):
    """Train what has not finished, --jobs at a time. {name: flags} → {name: {seed: line}}."""
    done = finished_runs(args.results)
    todo = [(flags, seed) for seed in seeds for flags in methods.values()]
    todo = [] if args.table else [run for run in todo if run not in done]
    if todo:
        print(f"{len(todo)} runs to train, {args.jobs} at a time", flush=True)
    started = time.monotonic()
    with ThreadPoolExecutor(args.jobs) as pool:  # after Ctrl-C no other starts
        told = pool.map(lambda run: train(*run, args.results), todo)
        for count, ((flags, seed), said) in enumerate(zip(todo, told), 1):
            print(f"{count} of {len(todo)}: {flags or 'GRPO'}, seed {seed}: {said}", flush=True)
            if count == 1 and said == "done":
                minutes = (time.monotonic() - started) * (len(todo) - 1) / args.jobs / 60
                print(f"about {minutes:.0f} minutes for the others", flush=True)
    done = finished_runs(args.results)
    runs = {}
    for name, flags in methods.items():
        runs[name] = {seed: done[flags, seed] for seed in seeds if (flags, seed) in done}
    return runs


def best_rate(name, flags, rates, args, more=2):
    """The rate of the best accuracy by step; beyond the lowest or highest `more` are tried."""
    rates = sorted(rates)
    texts = {rate: shlex.join([*flags, "--learning-rate", f"{rate:g}"]) for rate in rates}
    accuracy = {}
    for rate, lines in train_all(texts, args.rate_seeds, args).items():
        if len(lines) < len(args.rate_seeds):
            raise lopti.UserError(f"{name} has not finished at {rate:g} with all --rate-seeds")
        accuracy[rate] = np.mean([by_step(line) for line in lines.values()])
    best = max(rates, key=accuracy.get)
    beyond = None
    if best == rates[0]:
        beyond = best**2 / rates[1]
    elif best == rates[-1]:
        beyond = best**2 / rates[-2]
    if beyond and more:
        return best_rate(name, flags, [*rates, float(f"{beyond:.2g}")], args, more - 1)
    print(f"{name}: best at {best:g} of {rates}" + (", perhaps beyond" if beyond else ""))
    return best


# ---- What came of it


def by_step(line):
    """Accuracy in training, the mean over all steps but the first."""
    accuracy = line["metrics"]["accuracy"][1:]
    return np.mean(accuracy) if accuracy else np.nan


def held_out(line):
    """Accuracy (avg@k, or greedy), the mean over evaluations after step 0 and difficulties."""
    found = []
    for row in line["evaluations"]:
        for size in row["table"].values():
            sampled = [name for name in size if name.startswith("avg@")]
            if row["step"] > 0:
                found.append(size[sampled[0] if sampled else "greedy"][0])
    return np.mean(found) if found else np.nan


def running_means(line, name):
    values = line["metrics"][name]
    return np.convolve(values, np.ones(5) / 5, mode="valid") if len(values) >= 5 else np.array([])


def at_equal_kl(first, second, limits):
    """The lead of one run at equal KL; NaN where the two have no KL in common."""
    kls = [np.maximum.accumulate(running_means(line, "rollout/kl")) for line in (first, second)]
    low = max(limits[0], *(kl.min(initial=np.inf) for kl in kls))
    high = min(limits[1], *(kl.max(initial=-np.inf) for kl in kls))
    if low >= high:
        return np.nan
    at = np.linspace(low, high, 101)
    of_first = np.interp(at, kls[0], running_means(first, "accuracy"))
    of_second = np.interp(at, kls[1], running_means(second, "accuracy"))
    return np.mean(of_first - of_second)


def outcomes(line):
    """What one run says; a lead at equal KL needs two."""
    kl = line["metrics"]["rollout/kl"][-1] or np.nan  # 0: there is no reference
    return {BY_STEP: by_step(line), EQUAL_KL: np.nan, HELD_OUT: held_out(line), KL_END: kl}


def lead(first, second, limits):
    """The difference between what two runs of a seed say."""
    of_first, of_second = outcomes(first), outcomes(second)
    found = {name: of_first[name] - of_second[name] for name in of_first}
    found[EQUAL_KL] = at_equal_kl(first, second, limits)
    return found


def interval(values):
    """The mean, half of its 95 % interval and p of Student's t-test; NaN where there is none.

    Values that are all alike have no interval: 0.000 ± 0.000 of a few prompts is no exact number.
    """
    values = np.array([value for value in values if np.isfinite(value)])
    if not len(values):
        return np.nan, np.nan, np.nan
    if np.ptp(values) < 1e-9:
        return values.mean(), np.nan, np.nan
    test = stats.ttest_1samp(values, 0.0)
    bounds = test.confidence_interval(0.95)
    return values.mean(), (bounds.high - bounds.low) / 2, test.pvalue


def holm(p_values):
    """Holm's correction: the lowest of n counts n times, the next n - 1 times and so on.

    >>> [round(p, 3) for p in holm([0.04, 0.01, 0.03])]
    [0.06, 0.03, 0.06]
    """
    corrected = [np.nan] * len(p_values)
    known = [place for place, p in enumerate(p_values) if np.isfinite(p)]
    known.sort(key=p_values.__getitem__)
    highest = 0.0
    for rank, place in enumerate(known):
        highest = max(highest, min(1.0, p_values[place] * (len(known) - rank)))
        corrected[place] = highest
    return corrected


def leads_over(bases, runs, limits):
    """{"A − B": the leads of all seeds that both have}, of each method over each of `bases`."""
    leads = {}
    for base in bases:
        for name in runs:
            seeds = [seed for seed in runs[name] if seed in runs[base]]
            if seeds and name != base and f"{base} − {name}" not in leads:
                pairs = [(runs[name][seed], runs[base][seed]) for seed in seeds]
                leads[f"{name} − {base}"] = [lead(*pair, limits) for pair in pairs]
    return leads


def table(runs, bases, limits):
    """The methods and their leads over `bases` as lines of text. runs: {name: {seed: line}}."""
    leads = leads_over(bases, runs, limits)
    rows = {}  # name → number of runs and the text of each column
    for name, lines in runs.items():
        rows[name] = [str(len(lines))]
    for name, found in leads.items():
        rows[name] = [str(len(found))]
    decided = []
    for column in (BY_STEP, EQUAL_KL, HELD_OUT, KL_END):
        for name, lines in runs.items():
            values = [outcomes(line)[column] for line in lines.values()]
            rows[name].append(cell("{:.3f}", *interval(values)[:2]))
        found = {name: interval([one[column] for one in leads[name]]) for name in leads}
        p_values = holm([p for _, _, p in found.values()])
        for (name, (mean, half, _)), p in zip(found.items(), p_values):
            rows[name].append(cell("{:+.3f}", mean, half, np.nan if column == KL_END else p))
            if column != KL_END and p < 0.05:
                decided.append(f"{name} ({column})")
    heading = ["", "runs", BY_STEP, EQUAL_KL, HELD_OUT, KL_END]
    cells = [heading] + [[name, *texts] for name, texts in rows.items()]
    widths = [max(len(row[place]) for row in cells) for place in range(len(heading))]
    lines = []
    for row in cells:
        padded = [text.rjust(width) for text, width in zip(row[1:], widths[1:])]
        lines.append("  ".join([row[0].ljust(widths[0]), *padded]))
    return [*lines, "", *explanation(decided)]


def cell(form, mean, half=np.nan, p=np.nan):
    """A number with half of its interval and its p, as far as there are any."""
    if np.isnan(mean):
        return "–"
    text = form.format(mean)
    if np.isfinite(half):
        text += f" ± {half:.3f}"
    if np.isfinite(p):
        text += f", p {p:.3f}"
    return text.replace("-", "−")


def explanation(decided):
    """What stands below the table: what its signs are, and which leads are decided."""
    signs = (
        "–: not measured. ±: half of a 95 % interval over the seeds (Student's t), none where there"
        " is one seed or all are alike. p: how often chance alone makes a lead this large,"
        " corrected for the number of leads in the column (Holm); below .05 a lead is decided."
    )
    said = "Decided: " + "; ".join(decided) + "." if decided else "No lead is decided."
    return [textwrap.fill(signs, 98), said]


# ---- The command


def seed_list(text):
    """'0-2,7' → [0, 1, 2, 7]"""
    seeds = []
    for part in text.split(","):
        ends = [int(end) for end in part.split("-")]
        seeds += range(ends[0], ends[-1] + 1)
    return seeds


def parse(words):
    """The arguments, and the flags of each method as a list: {name: flags}."""
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=look, allow_abbrev=False, usage=argparse.SUPPRESS
    )
    add = parser.add_argument
    add("--seeds", type=seed_list, required=True, help="0-4, or 0,2,7")
    add("--rates", type=float, nargs="+", help="learning rates; each method takes its best")
    add("--rate-seeds", type=seed_list, default=[], help="of the runs that choose the rates")
    add("--against", type=int, nargs="+", default=[1], help="leads over method 1, 2 and so on")
    add("--kl", type=float, nargs=2, default=(0.0, np.inf), help="between which two, at equal KL")
    add("--jobs", type=int, default=1, help="runs at a time, of $OMP_NUM_THREADS (1) threads each")
    add("--results", type=Path, default=WORK / "results.jsonl", help="default: %(default)s")
    add("--table", action="store_true", help="of what has finished: train nothing")
    end = words.index("--") if "--" in words else len(words)
    args, texts = parser.parse_known_args(words[:end])
    if len(texts) < 2 or any(text and text[0] not in "-@" for text in texts):
        parser.error("give two methods or more, each in quotation marks")
    if args.rates and (not args.rate_seeds or {*args.seeds} & {*args.rate_seeds}):
        parser.error("--rates needs --rate-seeds, and --seeds has none of these")
    if args.rates and len({*args.rates}) < 2:
        parser.error("--rates needs two learning rates or more")
    if not all(1 <= number <= len(texts) for number in args.against):
        parser.error(f"--against takes numbers of methods, 1 to {len(texts)}")
    if args.jobs < 1:
        parser.error("--jobs must be at least 1")
    methods = {text or "GRPO": [*words[end + 1 :], *shlex.split(text)] for text in texts}
    if len(methods) < len(texts):
        parser.error("two methods are the same")
    for flags in methods.values():
        settings = lopti.parse_arguments(flags)  # tells of a wrong flag before anything is trained
        if settings.resume or settings.eval_only:
            parser.error("a method is trained from its beginning: no --resume, no --eval-only")
    return args, methods


def main():
    args, methods = parse(sys.argv[1:])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    args.results = args.results.expanduser()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    try:
        if args.rates:
            for name, flags in methods.items():
                rate = best_rate(name, flags, {*args.rates}, args)
                flags += ["--learning-rate", f"{rate:g}"]
        texts = {name: shlex.join(flags) for name, flags in methods.items()}
        runs = train_all(texts, args.seeds, args)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt("The same command goes on") from stop
    if not any(runs.values()):
        raise lopti.UserError("no run has finished")
    bases = [[*methods][number - 1] for number in args.against]
    print("\n".join(table(runs, bases, args.kl)))


if __name__ == "__main__":
    lopti.open_streams()
    sys.exit(lopti.exit_code(main, "compare.py"))
