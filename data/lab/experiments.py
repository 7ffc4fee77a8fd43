"""Run the laboratory: the training runs behind RESULTS.md. results/DESIGN.md says why.

    python data/lab/experiments.py --results my.jsonl --jobs 2   # make the runs, two at a time
    python data/lab/experiments.py --results my.jsonl --list     # print their commands, run nothing
    python data/lab/experiments.py --table                       # the tables of results/runs.jsonl
    python data/lab/experiments.py --write                       # put these tables into RESULTS.md

Each run is a process of its own, a `python data/lab/variants.py` command, which is lopti.py with
rewards in its evaluations. When it ends its line is appended to the results. The same command goes
on where it was stopped.
"""

import argparse
import functools
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RESULTS = HERE / "results" / "runs.jsonl"
NOTHING_TO_LEARN = HERE / "results" / "runs_2026-11-21_nothing_to_learn.jsonl"
REAL_MODEL = HERE / "results" / "real_model_runs.jsonl"
PAGE = HERE / "results" / "RESULTS.md"

# ---- The plan: group -> {name in tables: flags}. Everything else is the default job.

RATE = 1e-4  # the default learning rate
HALF, TWICE = f"--learning-rate {RATE / 2:g}", f"--learning-rate {RATE * 2:g}"
CENTRED = "--variant token-centred"
PLAIN = "--model {plain}"  # the policy with one wording for each thing
SHORT, PLAIN_SHORT = "--max-new-tokens 130", "--max-new-tokens 140"  # 23 % are cut at the start

CURES = {"AR": "--alpha 0.3", "Lopti": "--eta 0.5", "AR + Lopti": "--alpha 0.3 --eta 0.5"}
TWO_PASSES = {"GRPO, two passes": "--passes 2"}  # as many optimizer steps as Lopti
AT_THREE_RATES = CURES | TWO_PASSES  # beside GRPO
GROUPS = {
    "baseline": {"GRPO": ""},
    "the paper's cures": CURES,
    "order and groups": {
        "reversed Lopti": "--eta 0.5 --order high-low",
        "high only": "--eta 0.5 --update-only high",
        "low only": "--eta 0.5 --update-only low",
    },
    "steps and their size": {
        **TWO_PASSES,
        "GRPO, rate × 0.5": HALF,
        "GRPO, rate × 2": TWICE,
    },
    "A/A": {"min-p": "--min-p 2.3e-6", "GRPO, centred": CENTRED},
    "no reward": {"reward-free": "--variant reward-free"},
    "token-centred Â": {
        "AR, centred": f"{CURES['AR']} {CENTRED}",
        "Lopti, centred": f"{CURES['Lopti']} {CENTRED}",
        "high only, centred": f"--eta 0.5 --update-only high {CENTRED}",
        "AR α = 1, centred": f"--alpha 1 {CENTRED}",
    },
    "later treatments": {
        "REINFORCE++": "--advantage reinforce++",
        "REINFORCE++, AR + Lopti": f"--advantage reinforce++ {CURES['AR + Lopti']}",
        "STAPO": "--stapo",
        "80/20": "--top-entropy 0.2",
    },
    "other rates": {
        f"{name}, rate × {factor}": f"{flags} {rate}"
        for name, flags in AT_THREE_RATES.items()
        for factor, rate in (("0.5", HALF), ("2", TWICE))
    },
    "sweeps": {f"AR α = {alpha}": f"--alpha {alpha}" for alpha in (0.1, 0.6, 1)}
    | {f"Lopti η = {eta}": f"--eta {eta}" for eta in (0.2, 0.8)},
}
CELLS = {"varied, cut": SHORT, "plain": PLAIN, "plain, cut": f"{PLAIN} {PLAIN_SHORT}"}
IN_CELLS = {
    f"{name}, {cell}": f"{cure} {flags}".strip()
    for cell, flags in CELLS.items()
    for name, cure in (("GRPO", ""), ("AR", CURES["AR"]), ("Lopti", CURES["Lopti"]))
}
UNTRAINED = {
    f"untrained, T = {temperature}": f"--steps 0 --eval-temperature {temperature}"
    for temperature in (0.2, 0.4, 0.6, 0.8)
}
AGAIN = {  # what happens early in training, on new seeds
    f"{name}, seeds 5 to 9": GROUPS[group][name]
    for group, name in (
        ("the paper's cures", "Lopti"),
        ("steps and their size", "GRPO, two passes"),
        ("order and groups", "reversed Lopti"),
    )
}
# ---- Is it the split, or the step? DESIGN.md has the plan, written before these runs.

SHORT_EVALUATION = "--eval-every 0"  # before and after training only: training itself is judged
ON_PLAIN = {
    f"{name}, plain wording": f"{flags} {PLAIN} {SHORT_EVALUATION}".strip()
    for name, flags in {
        **TWO_PASSES,
        "Lopti": CURES["Lopti"],
        "reversed Lopti": GROUPS["order and groups"]["reversed Lopti"],
        "GRPO": "",
        "AR": CURES["AR"],
    }.items()
}
SECOND_STEP = {
    "random split": "--eta 0.5 --variant random-split",
    "GRPO, half-size mini-batches": "--mini-batch-size 32",
}
ORDER_OR_ADAM = {
    f"{name}, β₁ = 0": f"{flags} --variant no-momentum".strip()
    for name, flags in (
        ("GRPO", ""),
        ("Lopti", CURES["Lopti"]),
        ("reversed Lopti", GROUPS["order and groups"]["reversed Lopti"]),
    )
} | {"Lopti, two optimizers": f"{CURES['Lopti']} --save-every 0 --variant two-optimizers"}
CEILING = {
    "GRPO, without wording": "--variant without-wording",
    "GRPO, twice the prompts": "--prompts-per-step 32 --mini-batch-size 128",
}
NEW_ARMS = {
    name: f"{SHORT_EVALUATION} {flags}"
    for group in (SECOND_STEP, ORDER_OR_ADAM, CEILING)
    for name, flags in group.items()
}
LONG_JOB = (
    f"{PLAIN} --people 3 4 5 --steps 200 --learning-rate 5e-5 --prompts-per-step 8 "
    "--mini-batch-size 32 --max-new-tokens 320 --eval-every 20 --eval-size 40 "
    "--eval-data {work}/long/kk_test.jsonl"
)
LONG = {
    f"{name}, long": f"{LONG_JOB} {flags}".strip()
    for name, flags in {
        "GRPO": "",
        "Lopti": CURES["Lopti"],
        **TWO_PASSES,
        "reversed Lopti": GROUPS["order and groups"]["reversed Lopti"],
        "AR": CURES["AR"],
        "AR + Lopti": CURES["AR + Lopti"],
    }.items()
}
METHODS = {
    name: flags
    for group in (*GROUPS.values(), AGAIN, IN_CELLS, UNTRAINED, ON_PLAIN, NEW_ARMS, LONG)
    for name, flags in group.items()
}


def runs_of(seeds, *methods):
    return [(method, seed) for seed in seeds for method in methods]


PLAN = [  # (method, seed), in order of importance
    *runs_of(range(5), "GRPO", *CURES, "reversed Lopti"),
    *runs_of(range(5, 10), "GRPO"),
    *runs_of([0], *UNTRAINED),
    *runs_of(range(3), "high only", "low only", "AR α = 1"),
    *runs_of(range(5), "GRPO, two passes"),
    *runs_of(range(3), "reward-free", "AR, centred"),
    *runs_of(range(3), *list(GROUPS["steps and their size"])[1:]),
    *runs_of(range(5, 10), *list(AGAIN)[:2]),
    *runs_of(range(5), "STAPO", "80/20"),
    *runs_of(range(5, 10), *list(AGAIN)[2:]),
    *runs_of(
        range(3), "GRPO, centred", "Lopti, centred", "high only, centred", "AR α = 1, centred"
    ),
    *runs_of(range(3), *IN_CELLS),
    *runs_of(range(3, 5), *list(GROUPS["steps and their size"])[1:]),
    *runs_of(range(5), "REINFORCE++", "REINFORCE++, AR + Lopti"),
    *runs_of(range(3), *GROUPS["other rates"]),
    *runs_of(range(3), *[method for method in GROUPS["sweeps"] if method != "AR α = 1"]),
    *runs_of(range(5), "min-p"),
    *runs_of(range(3, 5), "high only", "AR, centred"),
]
PLAIN_ARMS = list(ON_PLAIN)[:4]
QUESTIONS = {  # a queue for each core: (method, seed), in order of importance
    "split or step": [
        *runs_of(range(5), *PLAIN_ARMS),
        *runs_of(range(5), *SECOND_STEP),
        *runs_of(range(5, 10), *PLAIN_ARMS),
        *runs_of(range(3), *ORDER_OR_ADAM),
        *runs_of(range(3), *CEILING),
        *runs_of(range(10), "AR, plain wording"),
    ],
    "long": runs_of(range(2), *LONG),
}

SETTINGS = "--eval-every 6 --eval-samples 2 --quiet"
HELD_OUT = "--people 2 3 --train 0 --test 100 --seed 20251122"  # flags of data/make/puzzles.py
HELD_OUT_LONG = "--people 3 4 5 --train 0 --test 40 --seed 20261123"

# ---- The claims: (what is claimed, method, compared with, +1: more or -1: less; 0: no claim)

NOT_WORSE = "low-probability tokens alone are not worse"  # by more than the margin
CLAIMS = [  # against GRPO
    ("AR beats GRPO", "AR", "GRPO", 1),
    ("Lopti beats GRPO", "Lopti", "GRPO", 1),
    ("AR + Lopti beats GRPO", "AR + Lopti", "GRPO", 1),
    ("reversed Lopti is worse than GRPO", "reversed Lopti", "GRPO", -1),
    ("high-probability tokens alone are worse", "high only", "GRPO", -1),
    ("STAPO beats GRPO", "STAPO", "GRPO", 1),
    ("the highest-entropy 20 % beat all tokens", "80/20", "GRPO", 1),
    ("control: a second pass beats one", "GRPO, two passes", "GRPO", 1),
    ("control: half the rate is worse", "GRPO, rate × 0.5", "GRPO", -1),
    ("control: twice the rate is worse", "GRPO, rate × 2", "GRPO", -1),
    ("control: training without reward is worse", "reward-free", "GRPO", -1),
    (NOT_WORSE, "low only", "GRPO", 1),
    ("no claim: REINFORCE++", "REINFORCE++", "GRPO", 0),
    ("A/A: min-p", "min-p", "GRPO", 0),
    ("A/A: GRPO with token-centred Â", "GRPO, centred", "GRPO", 0),
]
MARGINS = {  # of that claim: it holds where the interval lies above -margin
    "sampled accuracy": 0.05,
    "reward": 0.15,
    "mean over training": 0.05,
}
OTHER_CLAIMS = [
    ("AR + Lopti beats AR", "AR + Lopti", "AR", 1),
    ("AR + Lopti beats Lopti", "AR + Lopti", "Lopti", 1),
    ("reversed Lopti is worse than Lopti", "reversed Lopti", "Lopti", -1),
    ("Lopti beats GRPO with as many optimizer steps", "Lopti", "GRPO, two passes", 1),
    ("AR + Lopti helps REINFORCE++", "REINFORCE++, AR + Lopti", "REINFORCE++", 1),
    *[
        (f"{name} beats GRPO at {words} the rate", f"{name}, {rate}", f"GRPO, {rate}", 1)
        for words, rate in (("half", "rate × 0.5"), ("twice", "rate × 2"))
        for name in CURES
    ],
    ("token-centred Â helps AR", "AR, centred", "AR", 1),
    ("token-centred Â helps Lopti", "Lopti, centred", "Lopti", 1),
    ("token-centred Â helps high only", "high only, centred", "high only", 1),
    ("token-centred Â helps α = 1", "AR α = 1, centred", "AR α = 1", 1),
    ("α = 1 is worse than α = 0.3", "AR α = 1", "AR", -1),
    ("η = 0.8 is worse than η = 0.5", "Lopti η = 0.8", "Lopti", -1),
]
CELL_CLAIMS = [
    (f"{cell}: {name} beats GRPO", f"{name}, {cell}", f"GRPO, {cell}", 1)
    for cell in CELLS
    for name in ("AR", "Lopti")
]

# ---- Running


def command_of(method, seed, args):
    """The folder of a run, and the command that begins it or goes on with it."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", method).strip("-") + f"-{seed}"
    folder, flags = args.work / name, METHODS[method].format(plain=args.plain, work=args.work)
    command = ["python", "data/lab/variants.py"]
    if (folder / "checkpoints").exists():
        variant = flags.split()[-2:] if "--variant" in flags else []
        return folder, [*command, *variant, "--resume", str(folder), "--quiet"]
    flags = f"{SETTINGS} --eval-data {args.work / 'kk_test.jsonl'} {flags}"
    return folder, [
        *command,
        *shlex.split(flags),
        *f"--seed {seed} --output {args.work} --name {name}".split(),
    ]


def start(method, seed, flags, args):
    folder, command = command_of(method, seed, args)
    if "--resume" not in command:
        shutil.rmtree(folder, ignore_errors=True)  # stopped before there was anything to go on from
        command += shlex.split(flags)
    log = folder.with_suffix(".log").open("w")
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    return subprocess.Popen(
        [sys.executable, *command[1:]], stdout=log, stderr=log, cwd=ROOT, env=environment
    )


KEPT = ["reward", "accuracy", "entropy", "kl", "completions/mean_length"]
KEPT += ["completions/clipped_ratio", "low_probability_share", "masked_share"]
KEPT += ["grad_norm/all", "grad_norm/low", "grad_norm/high"]
KEPT += [f"seconds/{phase}" for phase in ("sampling", "scoring", "updating")]


def rounded(value):
    return float(f"{value:.4g}")


def result_line(method, seed, folder):
    """A finished run in one line: its settings, every step's metrics and every evaluation."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = (Path(config["model"]) / "model.safetensors").read_bytes()
    for name in ("name", "output", "resume", "quiet"):
        del config[name]
    config |= {name: Path(config[name]).name for name in ("model", "eval_data")}
    evaluations = [
        {
            "step": row["step"],
            **{
                size: {
                    name: rounded(value[0] if isinstance(value, list) else value)
                    for name, value in measures.items()
                }
                for size, measures in row["table"].items()
            },
        }
        for row in read_lines(folder / "evaluations.jsonl")
    ]
    steps = read_lines(folder / "metrics.jsonl")
    return {
        "method": method,
        "seed": seed,
        "policy": hashlib.sha256(weights).hexdigest()[:12],
        "config": config,
        "evaluations": evaluations,
        "metrics": {
            name: [rounded(step.get(name, 0.0)) for step in steps]
            for name in KEPT
            if steps and name in steps[0]
        },
    }


def run_all(todo, args):
    """Make these runs; after --minutes start no more, and stop those that have not ended.

    A run that would not end in time, going by the longest so far, is not started.
    """
    deadline = time.monotonic() + 60 * args.minutes
    slots = [flags for jobs, flags in args.on or [(args.jobs, "")] for _ in range(int(jobs))]
    running, longest = {}, {flags: 0.0 for flags in slots}  # slot -> (process, method, seed, start)
    while todo or running:
        now = time.monotonic()
        for slot, flags in enumerate(slots):
            if slot not in running and todo and now + longest[flags] < deadline:
                method, seed = todo.pop(0)
                running[slot] = (start(method, seed, flags, args), method, seed, now)
        if not running or now > deadline:
            break
        for slot, (process, method, seed, started) in list(running.items()):
            if process.poll() is None:
                continue
            del running[slot]
            folder = command_of(method, seed, args)[0]
            print(f"{method}, seed {seed}: {now - started:.0f} s {slots[slot]}", flush=True)
            if process.returncode:
                print(folder.with_suffix(".log").read_text()[-500:], flush=True)
                continue
            longest[slots[slot]] = max(longest[slots[slot]], now - started)
            with open(args.results, "a", encoding="utf-8") as stream:
                stream.write(json.dumps(result_line(method, seed, folder)) + "\n")
        time.sleep(0.5)
    for process, *_ in running.values():
        process.terminate()  # ends after the current step, with a checkpoint
    time.sleep(20 if running else 0)
    for process, *_ in running.values():
        process.kill()


# ---- Reading


def read_lines(path):
    """The rows of a jsonl file; none if there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def held_out(line, measure, last=2):
    """A measure of a run's last evaluations, mean over these and over the sizes of puzzle."""
    return statistics.mean(
        sizes[size][measure]
        for sizes in line["evaluations"][-last:]
        for size in sizes
        if size != "step"
    )


def mean_over_training(line):
    """Sampled accuracy, mean of all evaluations but the one before training."""
    return held_out(line, "avg@2", last=len(line["evaluations"]) - 1)


OUTCOMES = {  # a run -> a number; the first three are judged
    "sampled accuracy": lambda line: held_out(line, "avg@2"),
    "reward": lambda line: held_out(line, "reward"),
    "mean over training": mean_over_training,
    "greedy": lambda line: held_out(line, "greedy"),
    "share cut": lambda line: held_out(line, "cut"),
    "length": lambda line: held_out(line, "length"),
    "entropy": lambda line: statistics.mean(line["metrics"]["entropy"][-3:]),
}
JUDGED = list(OUTCOMES)[:3]


def accuracy_in_training(line, last=None):
    """Mean over steps 2 to `last`: all that follow an update. Each on prompts not trained on."""
    return statistics.mean(line["metrics"]["accuracy"][1:last])


def values_of(lines, method, outcome):
    """An outcome of every run of a method."""
    return [OUTCOMES[outcome](line) for line in lines if line["method"] == method]


def pooled_deviation(groups):
    """The standard deviation within groups, pooled over them, and its degrees of freedom."""
    squares = sum(
        (len(values) - 1) * statistics.variance(values) for values in groups if values[1:]
    )
    degrees = sum(len(values) - 1 for values in groups)
    return math.sqrt(squares / degrees), degrees


@functools.cache
def critical_value(sizes, pairs, degrees, samples=100_000):
    """The factor of simultaneous 95 % intervals for differences of group means.

    It is the 95 % quantile of the largest |t| among the `pairs` (a, b) of groups with `sizes` runs,
    if all groups were alike. With one group in all pairs it is Dunnett's. By simulation, fixed
    seed.

    >>> round(critical_value((5, 5), ((0, 1),), 8), 1)  # Student's t with 8 degrees: 2.306
    2.3
    """
    random = np.random.default_rng(0)
    means = random.normal(size=(samples, len(sizes))) / np.sqrt(sizes)  # (samples, groups)
    deviation = np.sqrt(random.chisquare(degrees, samples) / degrees)  # (samples,)
    first, second = np.array(pairs).T
    errors = np.sqrt(1 / np.array(sizes)[first] + 1 / np.array(sizes)[second])  # (pairs,)
    largest = (np.abs(means[:, first] - means[:, second]) / errors).max(1)  # (samples,)
    return float(np.quantile(largest / deviation, 0.95))


def mean_and_half(values):
    """The mean and half of its 95 % interval (Student's t; NaN for one value), NaNs left out."""
    values = [value for value in values if not math.isnan(value)]
    if len(values) < 2:
        return (values[0] if values else math.nan), math.nan
    t = critical_value((1, 1), ((0, 1),), len(values) - 1)
    return statistics.mean(values), t * statistics.stdev(values) / math.sqrt(len(values))


def compare(lines, claims, outcome):
    """(difference, half of its interval) for each claim with two runs on both sides, by claim."""
    names = sorted({name for _, *both, _ in claims for name in both})
    groups = {name: values_of(lines, name, outcome) for name in names}
    groups = {name: values for name, values in groups.items() if values[1:]}
    claims = [claim for claim in claims if claim[1] in groups and claim[2] in groups]
    return differences(groups, claims) if claims else {}


def differences(groups, claims):
    """(difference of means, half of its interval) for each claim between groups of values.

    One standard deviation pooled over all groups, and intervals that hold for all claims together.
    """
    order = list(groups)
    sizes = tuple(len(values) for values in groups.values())
    pairs = tuple((order.index(method), order.index(other)) for _, method, other, _ in claims)
    deviation, degrees = pooled_deviation(groups.values())
    factor = critical_value(sizes, pairs, degrees)
    return {
        claim: (
            statistics.mean(groups[method]) - statistics.mean(groups[other]),
            factor * deviation * math.sqrt(1 / len(groups[method]) + 1 / len(groups[other])),
        )
        for claim, method, other, _ in claims
    }


def verdict(difference, half, sign, margin=0.0):
    """'held', 'the opposite' or 'undecided'; '' where nothing is claimed.

    With a margin the claim is that the difference is more than -margin: "not worse".

    >>> verdict(2, 1, 1), verdict(-2, 1, 1), verdict(1, 2, 1), verdict(2, 1, -1)
    ('held', 'the opposite', 'undecided', 'the opposite')
    >>> verdict(-0.02, 0.025, 1, margin=0.05)
    'held'
    """
    if not sign:
        return ""
    difference += margin
    if abs(difference) <= half:
        return "undecided"
    return "held" if difference * sign > 0 else "the opposite"


# ---- Tables


def markdown(rows):
    """Rows of text, the first of them the head, as an aligned Markdown table."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |"
        for row in rows
    )


def with_deviation(values, digits=3):
    """'0.787 ± 0.014', the mean and the standard deviation of runs; the mean alone for one run."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if values[1:] else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def methods_table(lines):
    """Every outcome of every method; of untrained policies what their evaluation says."""
    untrained = ("before training", *UNTRAINED)
    lines = lines + [
        {**line, "method": untrained[0], "evaluations": line["evaluations"][:1]}
        for line in lines
        if line["method"] == "GRPO"
    ]
    rows = [("method", "runs", *OUTCOMES)]
    for name in (*untrained, *(method for method in METHODS if method not in UNTRAINED)):
        if count := sum(line["method"] == name for line in lines):
            cells = [
                ""
                if name in untrained and outcome in ("mean over training", "entropy")
                else with_deviation(
                    values_of(lines, name, outcome), 1 if outcome == "length" else 3
                )
                for outcome in OUTCOMES
            ]
            rows.append((name, f"{count}", *cells))
    return markdown(rows)


def claims_table(lines, claims):
    """Each claim's difference, interval and verdict by each of the judged outcomes."""
    judged = {outcome: compare(lines, claims, outcome) for outcome in JUDGED}
    rows = [("claim", "runs", *JUDGED)]
    for claim, method, other, sign in claims:
        if claim not in judged[JUDGED[0]]:
            continue
        counts = [len(values_of(lines, name, JUDGED[0])) for name in (method, other)]
        cells = []
        for outcome in JUDGED:
            difference, half = judged[outcome][claim]
            margin = MARGINS[outcome] if claim == NOT_WORSE else 0.0
            verdict_text = verdict(difference, half, sign, margin)
            cells.append(f"{difference:+.3f} ± {half:.3f} {verdict_text}".strip())
        rows.append((claim, f"{counts[0]} and {counts[1]}", *cells))
    return markdown(rows)


def rates_table(lines):
    """The primary methods and two passes at three learning rates."""
    rows = [("outcome", "method", *(f"rate × {factor}" for factor in ("0.5", "1", "2")))]
    for outcome in JUDGED:
        for method in ("GRPO", *AT_THREE_RATES):
            names = (f"{method}, rate × 0.5", method, f"{method}, rate × 2")
            groups = [values_of(lines, name, outcome) for name in names]
            cells = [with_deviation(values) if values else "" for values in groups]
            rows.append((outcome, method, *cells))
    return markdown(rows)


EARLY = [(method, "GRPO") for method in (*CURES, "reversed Lopti", "low only", "high only")]
EARLY += [("GRPO, two passes", "GRPO"), ("Lopti", "GRPO, two passes"), ("Lopti", "reversed Lopti")]
EARLY += [("Lopti, seeds 5 to 9", other) for other in ("GRPO", *list(AGAIN)[1:])]
EARLY += [("reversed Lopti, seeds 5 to 9", "GRPO")]


def early_table(lines):
    """Differences in accuracy over steps 2 to 12, by seed (the same prompts), in three places."""
    laboratories = {"first laboratory": read_lines(NOTHING_TO_LEARN)}
    laboratories["this one"] = lines
    for run in read_lines(REAL_MODEL):
        if "learning_rate" in run:  # not the untrained model
            laboratories.setdefault(f"SmolLM2, {run['learning_rate']}", []).append(run)
    rows = [("difference", *laboratories)]
    for method, other in EARLY:
        row = [f"{method} - {other}"]
        for runs in laboratories.values():
            ours, theirs = (
                {
                    run["seed"]: accuracy_in_training(run, 12)
                    for run in runs
                    if run["method"] == name
                }
                for name in (method, other)
            )
            values = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
            mean, half = mean_and_half(values)
            row.append("" if math.isnan(half) else f"{mean:+.3f} ± {half:.3f} ({len(values)})")
        if any(row[1:]):
            rows.append(row)
    return markdown(rows)


def tables(lines):
    """The tables of RESULTS.md by name."""
    return {
        "against GRPO": claims_table(lines, CLAIMS),
        "other claims": claims_table(lines, OTHER_CLAIMS),
        "two by two": claims_table(lines, CELL_CLAIMS),
        "rates": rates_table(lines),
        "early": early_table(lines),
        "methods": methods_table(lines),
    }


def with_tables(text, lines):
    """RESULTS.md with what stands between `<!-- name -->` and `<!-- end -->` made anew."""
    for name, table in tables(lines).items():
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        text = f"{before}<!-- {name} -->\n{table}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--question", choices=QUESTIONS, help="the runs of this question only")
    add("--jobs", type=int, default=1, help="runs at a time")
    slots = "instead of --jobs: so many at a time with these flags, such as 10 '--device cuda'"
    add("--on", nargs=2, action="append", metavar=("JOBS", "FLAGS"), help=slots)
    add("--threads", type=int, default=1, help="threads of each run")
    add("--minutes", type=float, default=math.inf, help="stop after so many")
    add("--work", type=Path, default=ROOT / "runs" / "experiments", help="where run folders go")
    add("--results", type=Path, default=RESULTS, help="the file of finished runs")
    add("--plain", type=Path, default=ROOT / "data/tiny-plain", help="data/tiny made with --plain")
    add("--list", action="store_true", help="print the commands and stop")
    add("--table", action="store_true", help="print the tables and stop")
    add("--write", action="store_true", help="write the tables into RESULTS.md and stop")
    args = parser.parse_args()
    args.work, args.plain = args.work.resolve(), args.plain.resolve()
    lines = read_lines(args.results)
    if args.write:
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), lines), encoding="utf-8")
    elif args.table:
        print("\n\n".join(tables(lines).values()))
    else:
        done = {(line["method"], line["seed"]) for line in lines}
        plan = QUESTIONS[args.question] if args.question else PLAN
        todo = [entry for entry in plan if entry not in done]
        if not args.plain.exists():
            todo = [entry for entry in todo if PLAIN not in METHODS[entry[0]]]
            print(f"left out, for {args.plain} is not there: the runs of the plain policy")
        files = {args.work: HELD_OUT, args.work / "long": HELD_OUT_LONG}
        commands = [
            f"data/make/puzzles.py {flags} --folder {path}" for path, flags in files.items()
        ]
        if args.list:
            print("\n".join(f"python {command}" for command in commands))
            for entry in todo:
                print(shlex.join(command_of(*entry, args)[1]))
            return
        (args.work / "long").mkdir(parents=True, exist_ok=True)
        for folder, command in zip(files, commands):
            if not (folder / "kk_test.jsonl").exists():
                subprocess.run([sys.executable, *command.split()], cwd=ROOT, check=True)
        run_all(todo, args)


if __name__ == "__main__":
    main()
