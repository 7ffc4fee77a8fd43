"""Run the laboratory: the training runs behind RESULTS.md, as results/plan.txt has them.

    python data/lab/experiments.py --question bias --results my.jsonl --jobs 2   # two at a time
    python data/lab/experiments.py --question bias --list     # only print what is still to be run

Each run is a process of its own, lopti.py or one of its variants.py. When it ends its line is
appended to the results, with all its settings. The same command runs what is not there yet.
analysis.py makes the tables of these lines, plot.py the pictures.
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
RESULTS, PLAN = HERE / "results" / "runs.jsonl", HERE / "results" / "plan.txt"
OF_ALL = "--eval-every 6 --eval-samples 2 --save-every 0"
HELD_OUT = "--people 2 3 --train 0 --test 100 --seed 20251122"  # flags of data/make/puzzles.py


def rows_of(path):
    """The rows of a text like plan.txt, three cells each: (cells of the heading above it, cells).

    Lines that begin with a space are rows, others headings; `#` is a comment.
    """
    heading = None
    for line in path.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if line.startswith(" "):
            yield heading, cells
        elif line and not line.startswith("#"):
            heading = cells


def with_ending(name, ending):
    return f"{name}, {ending}" if ending else name


def planned():
    """The runs of plan.txt: (question, method, seed, flags), first seeds first."""
    runs = []
    for (question, ending, common), (name, seeds, flags) in rows_of(PLAN):
        first, _, last = seeds.partition("-")
        method, flags = with_ending(name, ending), f"{common} {flags}"
        runs += [(question, method, seed, flags) for seed in range(int(first), int(last) + 1)]
    return sorted(runs, key=lambda run: run[2])


def command_of(method, seed, flags, work):
    """The folder of a run in the folder `work`, and its command."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", method).strip("-") + f"-{seed}"
    script = "data/lab/variants.py" if "--variant" in flags else "lopti.py"
    places = ["--eval-data", f"{work / 'kk_test.jsonl'}", "--output", f"{work}"]
    flags = shlex.split(f"{OF_ALL} {flags} --seed {seed} --name {name}")
    return work / name, ["python", script, *places, *flags]


# ---- Running


def read_lines(path):
    """The rows of a jsonl file; none if there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def result_line(method, seed, flags, folder):
    """A finished run in one line: its settings, every step's metrics and every evaluation."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = (ROOT / config["model"] / "model.safetensors").read_bytes()
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
        "variant": " ".join(re.findall(r"--variant (\S+)", flags)) or None,
        "config": config,
        "evaluations": [{"step": row["step"], **row["table"]} for row in evaluations],
        "metrics": {name: [step.get(name, 0.0) for step in steps] for name in steps[-1]},
    }


def run(entry, args):
    """One run as a process of its own; then its line is appended to the results."""
    folder, command = command_of(*entry, args.work)
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
    plan = planned()
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=look)
    add = parser.add_argument
    questions = dict.fromkeys(question for question, *_ in plan)
    add("--question", choices=questions, help="the runs of this question only")
    add("--jobs", type=int, default=1, help="runs at a time, one thread each")
    add("--work", type=Path, default=ROOT / "runs" / "experiments", help="where run folders go")
    add("--results", type=Path, default=RESULTS, help="the file of finished runs")
    add("--list", action="store_true", help="print the commands and stop")
    args = parser.parse_args()
    args.work = args.work.resolve()
    done = {(line["method"], line["seed"]) for line in read_lines(args.results)}
    todo = [entry for question, *entry in plan if args.question in (None, question)]
    todo = [entry for entry in todo if tuple(entry[:2]) not in done]
    if not todo:
        return print(f"{args.results} has all runs; --results my.jsonl makes them anew")
    held_out = ["python", "data/make/puzzles.py", *HELD_OUT.split(), "--folder", f"{args.work}"]
    if args.list:
        commands = [held_out, *(command_of(*entry, args.work)[1] for entry in todo)]
        return print(*map(shlex.join, commands), sep="\n")
    if not (args.work / "kk_test.jsonl").exists():
        args.work.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, *held_out[1:]], cwd=ROOT, check=True)
    pool = ThreadPoolExecutor(args.jobs)
    try:  # after Ctrl-C no other starts
        for future in [pool.submit(run, entry, args) for entry in todo]:
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    main()
