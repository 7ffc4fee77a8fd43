"""Run the laboratory: the training runs behind RESULTS.md. results/DESIGN.md says why.

    python data/lab/experiments.py --results my.jsonl --jobs 2   # make the runs, two at a time
    python data/lab/experiments.py --results my.jsonl --list     # print their commands, run nothing
    python data/lab/experiments.py --question "split or step"    # the runs of one question only

Each run is a process of its own, a `python data/lab/variants.py` command, which is lopti.py with
rewards in its evaluations. When it ends its line is appended to the results. The same command goes
on where it was stopped. analysis.py makes the tables of these lines, plot.py the pictures.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RESULTS = HERE / "results" / "runs.jsonl"

# ---- The plan: name in tables → flags. Everything else is the default job.

PAPER = {"AR": "--alpha 0.3", "Lopti": "--eta 0.5", "AR + Lopti": "--alpha 0.3 --eta 0.5"}
TWO, REVERSED = "GRPO, two passes", "reversed Lopti"
BASE = {
    "GRPO": "",
    **PAPER,
    TWO: "--passes 2",  # as many optimizer steps as Lopti
    REVERSED: "--eta 0.5 --order high-low",
    "high only": "--eta 0.5 --order high",  # only tokens with π ≥ η
    "low only": "--eta 0.5 --order low",
    **{f"AR α = {alpha}": f"--alpha {alpha}" for alpha in (0.1, 0.6, 1)},
    **{f"Lopti η = {eta}": f"--eta {eta}" for eta in (0.2, 0.8)},
    "min-p": "--min-p 2.3e-6",
    "reward-free": "--variant reward-free",
    "REINFORCE++": "--advantage reinforce++",
    "REINFORCE++, AR + Lopti": f"--advantage reinforce++ {PAPER['AR + Lopti']}",
    "STAPO": "--stapo",
    "80/20": "--top-entropy 0.2",
}


def also(ending, flags, *names):
    """Some of these methods with more flags."""
    return {f"{name}, {ending}": f"{BASE[name]} {flags}".strip() for name in names}


PLAIN = "--model {plain}"  # the policy with one wording for each thing
CELLS = {  # the limits truncate 23 % of the first responses
    "varied, cut": "--max-new-tokens 130",
    "plain": PLAIN,
    "plain, cut": f"{PLAIN} --max-new-tokens 140",
}
AGAIN = also("seeds 5 to 9", "", "Lopti", TWO, REVERSED)  # new seeds for claims 35, 36 and 38
UNTRAINED = {
    f"untrained, T = {temperature}": f"--steps 0 --set eval_temperature={temperature}"
    for temperature in (0.2, 0.4, 0.6, 0.8)
}
FIRST = {
    **BASE,
    **also("rate × 0.5", "--learning-rate 5e-5", "GRPO", *PAPER, TWO),
    **also("rate × 2", "--learning-rate 2e-4", "GRPO", *PAPER, TWO),
    **also("centred", "--variant token-centred", "GRPO", "AR", "Lopti", "high only", "AR α = 1"),
    **{
        name: method
        for cell, flags in CELLS.items()
        for name, method in also(cell, flags, "GRPO", "AR", "Lopti").items()
    },
    **AGAIN,
    **UNTRAINED,
}

# Is it the split, or the step? DESIGN.md has the plan. Training itself is judged: so these are
# evaluated before and after it only.
SHORT = "--eval-every 0"
ON_PLAIN = also("plain wording", f"{PLAIN} {SHORT}", TWO, "Lopti", REVERSED, "GRPO", "AR")
SECOND_STEP = {
    "random split": f"{SHORT} --eta 0.5 --variant random-split",
    "GRPO, half-size mini-batches": f"{SHORT} --mini-batch-size 32",
}
ORDER_OR_ADAM = also("β₁ = 0", f"{SHORT} --variant no-momentum", "GRPO", "Lopti", REVERSED)
ORDER_OR_ADAM |= also("two optimizers", f"{SHORT} --save-every 0 --variant two-optimizers", "Lopti")
CEILING = {
    "GRPO, without wording": f"{SHORT} --variant without-wording",
    "GRPO, twice the prompts": f"{SHORT} --prompts-per-step 32 --mini-batch-size 128",
}
LONG_JOB = f"""{PLAIN} --people 3 4 5 --steps 200 --learning-rate 5e-5 --prompts-per-step 8
    --mini-batch-size 32 --max-new-tokens 320 --eval-every 20 --eval-size 40
    --eval-data {{work}}/long/kk_test.jsonl"""
LONG = also("long", LONG_JOB, "GRPO", "Lopti", TWO, REVERSED, "AR", "AR + Lopti")

# What equal KL says on new seeds, and the bias of a weight that goes by π. Only training is judged:
# these are evaluated on two puzzles, which no table reads.
ONLY_TRAINING = "--eval-every 0 --eval-size 1 --eval-samples 1"
WITHOUT_BIAS = {
    **also("without bias", f"{ONLY_TRAINING} --without-bias", "AR α = 1", "AR α = 0.6", "AR"),
    **also("without bias", f"{ONLY_TRAINING} --without-bias", "high only"),
    "Lopti, two optimizers, without bias": f"""--eta 0.5 {ONLY_TRAINING} --save-every 0
        --without-bias --variant two-optimizers""",
    **also("without bias", f"{ONLY_TRAINING} --without-bias", REVERSED, "Lopti", "low only"),
}
EQUAL_KL = also("new seeds", ONLY_TRAINING, "GRPO", "Lopti", TWO)
EQUAL_KL["GRPO, rate × √2, new seeds"] = f"{ONLY_TRAINING} --learning-rate 1.4142e-4"

# A language model made so that its unlikely tokens are noise: a talkative pupil's (pretrain.py).
WORDY_JOB = f"--model {{wordy}} --people 2 --steps 16 --save-every 0 {ONLY_TRAINING}"
WORDY = {
    f"{name}, wordy": f"{flags} {WORDY_JOB}".strip()
    for name, flags in {
        "GRPO": "",
        "Lopti": BASE["Lopti"],
        "AR α = 1, without bias": f"{BASE['AR α = 1']} --without-bias",
        TWO: BASE[TWO],
        "AR α = 1": BASE["AR α = 1"],
        "Lopti, two optimizers": "--eta 0.5 --variant two-optimizers",
        "AR": BASE["AR"],
        "random split": "--eta 0.5 --variant random-split",
        REVERSED: BASE[REVERSED],
        "GRPO, without wording": "--variant without-wording",  # an oracle
    }.items()
}
METHODS = FIRST | ON_PLAIN | SECOND_STEP | ORDER_OR_ADAM | CEILING | LONG
METHODS |= WITHOUT_BIAS | EQUAL_KL | WORDY


def runs_of(seeds, *methods):
    return [(method, seed) for seed in seeds for method in methods]


FIVE_SEEDS = [*PAPER, TWO, REVERSED, "high only", "min-p", "AR, centred", "STAPO", "80/20"]
FIVE_SEEDS += ["GRPO, rate × 0.5", "GRPO, rate × 2", "REINFORCE++", "REINFORCE++, AR + Lopti"]
OTHERS = [name for name in FIRST if name not in ("GRPO", *FIVE_SEEDS, *AGAIN, *UNTRAINED)]
PLAN = [  # (method, seed)
    *runs_of(range(10), "GRPO"),
    *runs_of(range(5), *FIVE_SEEDS),
    *runs_of(range(5, 10), *AGAIN),
    *runs_of([0], *UNTRAINED),
    *runs_of(range(3), *OTHERS),
]
PLAIN_ARMS = list(ON_PLAIN)[:4]
TEN_SEEDS = [name for name in WITHOUT_BIAS if " only" not in name]
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
    "bias": [*runs_of(range(5), *WITHOUT_BIAS), *runs_of(range(5, 10), *TEN_SEEDS)],
    "equal KL": runs_of(range(20, 30), *EQUAL_KL),
    "wordy": [*runs_of(range(5), *list(WORDY)[:7]), *runs_of(range(5), *list(WORDY)[7:])]
    + runs_of(range(5, 10), *WORDY),
}

SETTINGS = "--eval-every 6 --eval-samples 2"
HELD_OUT = "--people 2 3 --train 0 --test 100 --seed 20251122"  # flags of data/make/puzzles.py
HELD_OUT_LONG = "--people 3 4 5 --train 0 --test 40 --seed 20261123"

# ---- Running


def command_of(method, seed, args):
    """The folder of a run, and the command that begins it or goes on with it."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", method).strip("-") + f"-{seed}"
    folder, flags = args.work / name, METHODS[method]
    flags = flags.format(plain=args.plain, wordy=args.wordy, work=args.work)
    command = ["python", "data/lab/variants.py"]
    if (folder / "checkpoints").exists():
        variant = ["--variant", variant_of(method)] if variant_of(method) else []
        return folder, [*command, *variant, "--resume", str(folder)]
    flags = f"{SETTINGS} --eval-data {args.work / 'kk_test.jsonl'} {flags}"
    flags += f" --seed {seed} --output {args.work} --name {name}"
    return folder, [*command, *shlex.split(flags)]


KEPT = ["reward", "accuracy", "entropy", "kl", "rollout/kl", "completions/mean_length"]
KEPT += ["completions/clipped_ratio", "low_probability_share", "masked_share"]
KEPT += ["grad_norm/all", "grad_norm/low", "grad_norm/high"]
KEPT += [f"seconds/{phase}" for phase in ("sampling", "scoring", "updating")]


def read_lines(path):
    """The rows of a jsonl file; none if there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def append_line(path, line):
    with open(path, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(rounded(line)) + "\n")


def rounded(value):
    """Numbers in nested lists and dictionaries rounded to four significant digits."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def variant_of(method):
    """What stands behind --variant in the command of a method; None for lopti.py itself."""
    flags = METHODS[method].split()
    return flags[flags.index("--variant") + 1] if "--variant" in flags else None


def result_line(method, seed, folder):
    """A finished run in one line: its settings, every step's metrics and every evaluation."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = (Path(config["model"]) / "model.safetensors").read_bytes()
    for name in ("name", "output", "resume"):
        del config[name]
    config |= {name: Path(config[name]).name for name in ("model", "eval_data")}
    evaluations = [{"step": row["step"]} for row in read_lines(folder / "evaluations.jsonl")]
    for of_step, row in zip(evaluations, read_lines(folder / "evaluations.jsonl")):
        for size, measures in row["table"].items():
            of_step[size] = {  # without the intervals
                name: float(value[0] if isinstance(value, list) else value)
                for name, value in measures.items()
            }
    steps = read_lines(folder / "metrics.jsonl")
    return {
        "method": method,
        "seed": seed,
        "policy": hashlib.sha256(weights).hexdigest()[:12],
        "variant": variant_of(method),
        "config": config,
        "evaluations": evaluations,
        "metrics": {
            name: [float(step.get(name, 0.0)) for step in steps]
            for name in KEPT
            if steps and name in steps[0]
        },
    }


def run(folder, command, line_of, results):
    """Run a command as a process of its own and append `line_of(folder)` to the results."""
    if "--resume" not in command:
        shutil.rmtree(folder, ignore_errors=True)  # stopped before there was anything to go on from
    log = folder.with_name(f"{folder.name}.log")
    with log.open("w") as stream:
        settings = {"stdout": stream, "stderr": stream, "cwd": ROOT}
        settings["env"] = {"OMP_NUM_THREADS": "1", **os.environ}
        code = subprocess.run([sys.executable, *command[1:]], check=False, **settings).returncode
    print(f"{folder.name}: " + ("done" if not code else log.read_text()[-500:]), flush=True)
    if not code:
        append_line(results, line_of(folder))


def run_all(runs, jobs):
    """Several runs at a time; after Ctrl-C those under way save a checkpoint, no other starts."""
    pool = ThreadPoolExecutor(jobs)
    try:
        for future in [pool.submit(run, *arguments) for arguments in runs]:
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--question", choices=QUESTIONS, help="the runs of this question only")
    add("--jobs", type=int, default=1, help="runs at a time, one thread each")
    add("--work", type=Path, default=ROOT / "runs" / "experiments", help="where run folders go")
    add("--results", type=Path, default=RESULTS, help="the file of finished runs")
    add("--plain", type=Path, default=ROOT / "data/tiny-plain", help="data/tiny made with --plain")
    add("--wordy", type=Path, default=ROOT / "data/tiny-wordy", help="made with --filler")
    add("--list", action="store_true", help="print the commands and stop")
    args = parser.parse_args()
    for folder in ("work", "plain", "wordy"):
        setattr(args, folder, getattr(args, folder).resolve())
    done = {(line["method"], line["seed"]) for line in read_lines(args.results)}
    plan = QUESTIONS[args.question] if args.question else PLAN
    todo = [entry for entry in plan if entry not in done]
    for policy in (args.plain, args.wordy):
        kind = "{plain}" if policy is args.plain else "{wordy}"
        needing = [entry for entry in todo if kind in METHODS[entry[0]]]
        if needing and not policy.exists():
            todo = [entry for entry in todo if entry not in needing]
            print(f"left out, for {policy} is not there: {len(needing)} runs")
    held_out = {args.work: HELD_OUT, args.work / "long": HELD_OUT_LONG}
    for folder, flags in held_out.items():
        command = f"data/make/puzzles.py {flags} --folder {folder}"
        if args.list:
            print(f"python {command}")
        elif not (folder / "kk_test.jsonl").exists():
            folder.mkdir(parents=True, exist_ok=True)
            subprocess.run([sys.executable, *shlex.split(command)], cwd=ROOT, check=True)
    if args.list:
        return print("\n".join(shlex.join(command_of(*entry, args)[1]) for entry in todo))
    lines = [(partial(result_line, *entry), args.results) for entry in todo]
    run_all([command_of(*entry, args) + line for entry, line in zip(todo, lines)], args.jobs)


if __name__ == "__main__":
    main()
