"""Run the laboratory: the training runs behind RESULTS.md. results/DESIGN.md says why.

    python data/lab/experiments.py --question bias --results my.jsonl --jobs 2   # two at a time
    python data/lab/experiments.py --question bias --list     # only print what is still to be run

Each run is a process of its own, lopti.py or one of its variants.py. When it ends its line is
appended to the results, with all its settings. The same command runs what is not there yet.
analysis.py makes the tables of these lines, plot.py the pictures. The flags of runs on record that
belong to no question any more stand at the top of DESIGN.md.
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
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RESULTS = HERE / "results" / "runs.jsonl"

# ---- The plan: name in tables → flags. Everything else is the default job.

SETTINGS = "--eval-every 6 --eval-samples 2 --save-every 0"
SHORT = "--eval-every 0"  # evaluated before and after training only
ONLY_TRAINING = "--eval-every 0 --eval-size 1 --eval-samples 1"  # on two puzzles: no table reads it
TWO, REVERSED = "GRPO, two passes", "reversed Lopti"
METHODS = {
    "GRPO": "",
    "AR": "--alpha 0.3",
    "Lopti": "--eta 0.5",
    "AR + Lopti": "--alpha 0.3 --eta 0.5",
    TWO: "--passes 2",  # as many optimizer steps as Lopti
    REVERSED: "--eta 0.5 --order high-low",
    "high only": "--eta 0.5 --order high",  # only tokens with π ≥ η
    "low only": "--eta 0.5 --order low",
    "AR α = 0.6": "--alpha 0.6",
    "AR α = 1": "--alpha 1",
    "random split": f"{SHORT} --eta 0.5 --variant random-split",
    "GRPO, half-size mini-batches": f"{SHORT} --mini-batch-size 32",
    "GRPO, without wording": f"{SHORT} --variant without-wording",  # an oracle
    "Lopti, two optimizers": f"{SHORT} --eta 0.5 --variant two-optimizers",
}


def also(ending, flags, *names):
    """Methods that are there already, with more flags: their names."""
    more = {f"{name}, {ending}": f"{METHODS[name]} {flags}".strip() for name in names}
    METHODS.update(more)
    return list(more)


# The policy with one wording for each thing.
PLAIN = also("plain wording", f"--model {{plain}} {SHORT}", TWO, "Lopti", REVERSED, "GRPO")
NO_MOMENTUM = also("β₁ = 0", f"{SHORT} --variant no-momentum", "GRPO", "Lopti", REVERSED)
BIAS_JOB = f"{ONLY_TRAINING} --without-bias"
WITHOUT_BIAS = also("without bias", BIAS_JOB, "AR α = 1", "AR α = 0.6", "AR", "high only")
WITHOUT_BIAS += also("without bias", BIAS_JOB, "Lopti, two optimizers", REVERSED, "Lopti")
WITHOUT_BIAS += also("without bias", BIAS_JOB, "low only")
# With the bias, on seeds that the first laboratory did not have; `shown` gives them their old name.
MORE_SEEDS = also("more seeds", ONLY_TRAINING, "AR α = 1", "AR α = 0.6", "Lopti, two optimizers")
METHODS["AR α = 0.1"] = "--alpha 0.1"
ALPHAS = also("without bias", BIAS_JOB, "AR α = 0.1")
for other_rate, value in (("0.5", "5e-5"), ("2", "2e-4")):
    unbiased = ["AR α = 0.1, without bias", *WITHOUT_BIAS[:3]]
    ALPHAS += also(f"rate × {other_rate}", f"--learning-rate {value}", *unbiased)
NEW_SEEDS = also("new seeds", ONLY_TRAINING, "GRPO", "Lopti", TWO)
METHODS["GRPO, rate × √2, new seeds"] = f"{ONLY_TRAINING} --learning-rate 1.4142e-4"
NEW_SEEDS += ["GRPO, rate × √2, new seeds"]
# A policy made so that its unlikely tokens are noise: a talkative pupil's (pretrain.py --filler).
WORDY_JOB = f"--model {{wordy}} --people 2 --steps 16 --learning-rate 5e-5 {ONLY_TRAINING}"
WORDY = also("wordy, rate × 0.5", WORDY_JOB, "GRPO", "Lopti", "AR α = 1, without bias", TWO)
WORDY += also("wordy, rate × 0.5", WORDY_JOB, "GRPO, without wording", REVERSED, "random split")
# Gradient descent with steps of a given length, for which the theory is made; no AdamW.
UNIT_STEPS = []
for ending, policy, length in (("", "", 0.05), (", wordy", "--model {wordy} --people 2", 0.02)):
    job = f"{policy} --variant unit-steps --learning-rate {length} --steps 16 {ONLY_TRAINING}"
    UNIT_STEPS += also(f"unit steps{ending}", job, "GRPO", "AR α = 1, without bias", "Lopti", TWO)
SHORT_STEPS = also("half as long", "--learning-rate 0.01 --steps 32", *UNIT_STEPS[4:6])
# So short that a theory of the first order holds; Lopti's two beside one of the same total length.
QUARTER = also("a quarter as long", "--learning-rate 0.005", *UNIT_STEPS[4:7])
QUARTER += also("a quarter as long × √2", "--learning-rate 0.0070711", UNIT_STEPS[4])
QUARTER_BIASED = "AR α = 1, unit steps, wordy, a quarter as long"
METHODS[QUARTER_BIASED] = METHODS[QUARTER[1]].replace(" --without-bias", "")
# What else there is, on the same job; the last is an oracle.
job += " --learning-rate 0.005"
others = (TWO, REVERSED, "random split", "AR", "GRPO, without wording")
OTHERS = also("unit steps, wordy, a quarter as long", job, *others)
# SmolLM2-135M-Instruct on one-step word problems, both of real_model.py.
SMOLLM2_TASK = """--model {smollm2} --data {smollm2}/word_train.jsonl
    --eval-data {smollm2}/word_test.jsonl --task math --solved-reward 1
    --reward data.lab.real_model:last_number --temperature 0.7 --max-new-tokens 64"""
SMOLLM2_JOB = f"""{SMOLLM2_TASK} --kl-coef 0 --prompts-per-step 8 --mini-batch-size 64 --steps 12
    --dtype bfloat16 --eval-every 0 --eval-size 24 --eval-samples 1"""
RATES = ("3e-6", "1e-5", "3e-5")
SMOLLM2 = []
for rate in RATES:
    job = f"{SMOLLM2_JOB} --learning-rate {rate}"
    SMOLLM2 += also(f"SmolLM2 at {rate}", job, "GRPO", TWO, "AR", "Lopti")
SMOLLM2_BIAS = also(f"SmolLM2 at {rate}", job, "AR α = 1", "AR α = 1, without bias")  # the last


def runs_of(seeds, *methods):
    return [(method, seed) for seed in seeds for method in methods]


SOME = [name for name in WITHOUT_BIAS[::-1] if " only" not in name and name != "AR, without bias"]
QUESTIONS = {  # (method, seed), in order of importance
    "methods": [
        *runs_of(range(10), "GRPO", "Lopti", TWO, REVERSED),
        *runs_of(range(5), "AR", "AR + Lopti", "high only"),
        *runs_of(range(3), "low only", "AR α = 0.6", "AR α = 1"),
    ],
    "split or step": [
        *runs_of(range(10), *PLAIN),
        *runs_of(range(5), "random split", "GRPO, half-size mini-batches"),
    ],
    "order": runs_of(range(3), *NO_MOMENTUM, "Lopti, two optimizers"),
    "equal KL": runs_of(range(20, 30), *NEW_SEEDS),
    "bias": [
        *runs_of(range(5), *WITHOUT_BIAS),
        *runs_of(range(3, 5), *MORE_SEEDS),
        *runs_of(range(5, 10), *MORE_SEEDS, *SOME),
    ],
    "alpha": runs_of(range(3), *ALPHAS),
    "unit steps": [*runs_of(range(10), *UNIT_STEPS), *runs_of(range(10), *SHORT_STEPS)],
    "short steps": [
        *runs_of(range(100, 110), *QUARTER[:2], QUARTER_BIASED),
        *runs_of(range(100, 108), *QUARTER[2:]),
        *runs_of(range(100, 105), *OTHERS[::-1]),
        *runs_of(range(105, 110), *QUARTER[2:], *OTHERS[3:]),
    ],
    "wordy": runs_of(range(10), *WORDY),
    "SmolLM2": [*runs_of(range(1, 6), *SMOLLM2), *runs_of(range(1, 4), *SMOLLM2_BIAS)],
}
# Folders of policies: the first two made by data/make/pretrain.py --plain, --filler.
POLICIES = {"plain": "data/tiny-plain", "wordy": "data/tiny-wordy", "smollm2": "smollm2"}
HELD_OUT = "--people 2 3 --train 0 --test 100 --seed 20251122"  # flags of data/make/puzzles.py


def shown(method):
    """The name of a method in tables: seeds of two series are one method, nothing is abbreviated.

    >>> shown("Lopti, seeds 5 to 9"), shown("GRPO, rate × 2"), shown("AR, plain, cut")
    ('Lopti', 'GRPO, learning rate × 2', 'AR, plain, truncated')
    """
    method = method.removesuffix(", seeds 5 to 9").removesuffix(", more seeds")
    method = method.replace(", cut", ", truncated")
    return method.replace(", rate", ", learning rate")


# ---- Commands


def variants_of(method):
    """What stands behind each --variant in the command of a method."""
    return re.findall(r"--variant (\S+)", METHODS[method])


def command_of(method, seed, args):
    """The folder of a run, and its command."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", method).strip("-") + f"-{seed}"
    flags = f"{SETTINGS} --eval-data {args.work / 'kk_test.jsonl'} " + METHODS[method].format(
        **{policy: getattr(args, policy) for policy in POLICIES}
    )
    flags += f" --seed {seed} --output {args.work} --name {name}"
    script = "data/lab/variants.py" if variants_of(method) else "lopti.py"
    return args.work / name, ["python", script, *shlex.split(flags)]


# ---- Running

KEPT = ["reward", "accuracy", "entropy", "kl", "rollout/kl", "completions/mean_length"]
KEPT += ["completions/clipped_ratio", "low_probability_share", "masked_share"]
KEPT += ["grad_norm/all", "grad_norm/low", "grad_norm/high"]
KEPT += [f"seconds/{phase}" for phase in ("sampling", "scoring", "updating")]


def read_lines(path):
    """The rows of a jsonl file; none if there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def result_line(method, seed, folder):
    """A finished run in one line: its settings, every step's metrics and every evaluation."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = (Path(config["model"]) / "model.safetensors").read_bytes()
    for name in ("name", "output", "resume"):
        del config[name]
    files = [name for name in ("model", "data", "eval_data") if config[name]]
    config |= {name: Path(config[name]).name for name in files}
    evaluations = read_lines(folder / "evaluations.jsonl")
    steps = read_lines(folder / "metrics.jsonl")
    return {
        "method": method,
        "seed": seed,
        "policy": hashlib.sha256(weights).hexdigest()[:12],
        "variant": " ".join(variants_of(method)) or None,
        "config": config,
        "evaluations": [{"step": row["step"], **row["table"]} for row in evaluations],
        "metrics": {
            name: [float(step.get(name, 0.0)) for step in steps]
            for name in KEPT
            if steps and name in steps[0]
        },
    }


def run(entry, args):
    """One run as a process of its own; then its line is appended to the results."""
    folder, command = command_of(*entry, args)
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped
    log = folder.with_name(f"{folder.name}.log")
    with log.open("w") as stream:
        settings = {"stdout": stream, "stderr": stream, "cwd": ROOT}
        settings["env"] = {"OMP_NUM_THREADS": "1", **os.environ}
        code = subprocess.run([sys.executable, *command[1:]], check=False, **settings).returncode
    print(f"{folder.name}: " + ("done" if not code else log.read_text()[-500:]), flush=True)
    if not code:
        line = json.dumps(result_line(*entry, folder))
        line = json.loads(line, parse_float=lambda digits: float(f"{float(digits):.4g}"))
        with open(args.results, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--question", choices=QUESTIONS, help="the runs of this question only")
    add("--jobs", type=int, default=1, help="runs at a time, one thread each")
    add("--work", type=Path, default=ROOT / "runs" / "experiments", help="where run folders go")
    add("--results", type=Path, default=RESULTS, help="the file of finished runs")
    for policy, folder in POLICIES.items():
        add(f"--{policy}", type=Path, default=ROOT / folder, help=f"a policy's folder [{folder}]")
    add("--list", action="store_true", help="print the commands and stop")
    args = parser.parse_args()
    for name in ("work", *POLICIES):
        setattr(args, name, getattr(args, name).resolve())
    done = {(shown(line["method"]), line["seed"]) for line in read_lines(args.results)}
    chosen = [args.question] if args.question else QUESTIONS
    plan = [entry for question in chosen for entry in QUESTIONS[question]]
    todo = [(method, seed) for method, seed in plan if (shown(method), seed) not in done]
    for policy in POLICIES:
        needing = [entry for entry in todo if f"{{{policy}}}" in METHODS[entry[0]]]
        if needing and not getattr(args, policy).exists():
            print(f"left out: {len(needing)} runs, for there is no {getattr(args, policy)}")
            todo = [entry for entry in todo if entry not in needing]
    held_out = f"data/make/puzzles.py {HELD_OUT} --folder {args.work}"
    if args.list:
        print(f"python {held_out}")
        return print(*(shlex.join(command_of(*entry, args)[1]) for entry in todo), sep="\n")
    if not (args.work / "kk_test.jsonl").exists():
        args.work.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, *shlex.split(held_out)], cwd=ROOT, check=True)
    pool = ThreadPoolExecutor(args.jobs)
    try:  # after Ctrl-C no other starts
        for future in [pool.submit(run, entry, args) for entry in todo]:
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    main()
