"""Run the experiments behind the README's tables and the notebook, and keep one line for each run.

    python data/experiments.py default              # the default job, by every method
    python data/experiments.py default --table      # print what is there so far
    python data/experiments.py default --list       # print the commands, run nothing

Each run is a `python lopti.py` command in a process of its own, several at once with --jobs. Its line is appended to
data/results/PLAN.jsonl when it is done: settings, seed, every step's metrics and every evaluation. Stop it whenever
you like: the same command goes on where it was, with runs that are in the file left out and unfinished ones resumed.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"

METHODS = {  # name in tables -> flags; everything else, the clip and β too, is the same for all
    "GRPO": [],
    "AR": ["--alpha", "0.3"],
    "Lopti": ["--eta", "0.5"],
    "AR + Lopti": ["--alpha", "0.3", "--eta", "0.5"],
    "reversed Lopti": ["--eta", "0.5", "--order", "high-low"],
    "REINFORCE++": ["--advantage", "reinforce++"],
    "STAPO": ["--stapo"],
    "80/20": ["--top-entropy", "0.2"],
    "lowest 80 %": ["--bottom-entropy", "0.8"],
    "min-p": ["--min-p", "2.3e-6"],
}

PLANS = {  # name -> list of (method, seed, flags of the plan)
    "default": [(method, seed, []) for seed in (0, 1, 2) for method in list(METHODS)[:4]]
    + [(method, 0, []) for method in list(METHODS)[4:]],
}

PHASES = ("sampling", "rewarding", "scoring", "updating")
KEPT = ("step", "reward", "accuracy", "completions/mean_length", "completions/clipped_ratio", "entropy", "kl", "low_probability_share",
        "masked_share", "frac_reward_zero_std", "clip_ratio/low_mean", "clip_ratio/high_mean", "unsafe_tokens", "optimizer_steps",
        *(f"seconds/{phase}" for phase in PHASES))  # fmt: skip


def read_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def command_of(run, plan, method, seed, flags, work):
    name = f"{plan}-{method}-{seed}".replace(" ", "").replace("/", "").replace("%", "").replace("+", "p")
    folder = work / name
    if (folder / "checkpoints").exists():
        return folder, [*run, "--resume", str(folder), "--quiet"]
    return folder, [*run, *METHODS[method], *flags, "--seed", str(seed), "--output", str(work), "--name", name, "--quiet"]


def do(plan, method, seed, flags, work, threads):
    """One run, from its command to its line in the results."""
    run = [sys.executable, str(HERE.parent / "lopti.py")]
    folder, command = command_of(run, plan, method, seed, flags, work)
    if folder.exists() and "--resume" not in command:
        shutil.rmtree(folder)  # it was stopped before there was anything to go on from
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    if finished.returncode:
        print(f"{method}, seed {seed}: stopped with {finished.returncode}\n{finished.stderr[-500:]}", flush=True)
        return
    config = json.loads((folder / "config.json").read_text(encoding="utf-8").replace(f"{HERE.parent}/", ""))  # no paths of this machine
    config = {key: value for key, value in config.items() if key not in ("name", "output", "resume", "quiet")}
    metrics = [{key: round(row[key], 5) for key in KEPT if row.get(key) is not None} for row in read_lines(folder / "metrics.jsonl")]
    line = {"plan": plan, "method": method, "seed": seed, "flags": METHODS[method] + flags, "threads": threads, "config": config,
            "evaluations": read_lines(folder / "evaluations.jsonl"), "metrics": metrics}  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / f"{plan}.jsonl", "a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")
    print(f"{method}, seed {seed}: done", flush=True)


def mean_of(table, measure):
    return statistics.mean(row[measure][0] for row in table.values())


def print_table(plan):
    """Accuracy before and after per method, mean and range over seeds, and how the runs ended."""
    lines = read_lines(RESULTS / f"{plan}.jsonl")
    if not lines:
        print(f"no results of {plan} yet")
        return
    before = lines[0]["evaluations"][0]["table"]
    sizes = list(before)
    sampled = next(name for name in before[sizes[0]] if name.startswith("avg@"))
    columns = [f"{measure} {size}" for measure in (sampled, "greedy") for size in (*sizes, "mean")]
    print(f"{'':<16}{'seeds':>6}" + "".join(f"{column:>20}" for column in columns) + f"{'length':>9}{'entropy':>9}{'masked':>8}{'s/step':>8}")

    def cells(tables):
        found = []
        for measure in (sampled, "greedy"):
            for size in (*sizes, "mean"):
                values = [mean_of(table, measure) if size == "mean" else table[size][measure][0] for table in tables]
                spread = f" ({min(values):.2f}-{max(values):.2f})" if len(values) > 1 else ""
                found.append(f"{statistics.mean(values):.3f}{spread}".rjust(20))
        return "".join(found)

    print(f"{'before':<16}{'':>6}" + cells([before]))
    for method in METHODS:
        runs = [line for line in lines if line["method"] == method]
        if runs:
            last = [line["metrics"][-3:] for line in runs]
            ends = [statistics.mean(row[key] for rows in last for row in rows) for key in ("completions/mean_length", "entropy")]
            masked = statistics.mean(row["masked_share"] for line in runs for row in line["metrics"])
            seconds = statistics.median(sum(row[f"seconds/{phase}"] for phase in PHASES) for line in runs for row in line["metrics"])
            print(f"{method:<16}{len(runs):>6}" + cells([line["evaluations"][-1]["table"] for line in runs]) + f"{ends[0]:>9.0f}{ends[1]:>9.3f}{masked:>8.1%}{seconds:>8.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", choices=PLANS)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=0, help="threads of each run; 0 shares the cores out")
    parser.add_argument("--work", type=Path, default=HERE.parent / "runs" / "experiments", help="where the run folders go")
    parser.add_argument("--list", action="store_true", help="print the commands and stop")
    parser.add_argument("--table", action="store_true", help="print the table of what is there and stop")
    args = parser.parse_args()
    done = {(line["method"], line["seed"]) for line in read_lines(RESULTS / f"{args.plan}.jsonl")}
    todo = [entry for entry in PLANS[args.plan] if entry[:2] not in done]
    if args.list:
        for method, seed, flags in todo:
            print(" ".join(command_of(["python", "lopti.py"], args.plan, method, seed, flags, args.work)[1]))
    elif not args.table:
        threads = args.threads or max(1, (os.cpu_count() or 1) // args.jobs)
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(lambda entry: do(args.plan, *entry, args.work, threads), todo))
    if not args.list:
        print_table(args.plan)


if __name__ == "__main__":
    main()
