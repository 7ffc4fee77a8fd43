"""What happens after step 24? Trains the bundled model for 72 steps by several methods.

    python data/lab/long_runs.py runs/long        # many hours; the same command goes on

Two runs are made at a time, with one thread each. A run that is finished is not made again. The
program writes results/long_runs.csv and results/long_steps.csv, and leaves out of RUNS what stands
there already. It was made before the first run, and what follows is the plan of that day, in which
*GRPO, two epochs* was called *two-pass GRPO*.

Plan. Known before: one seed of GRPO, Lopti and GRPO with two passes, with the settings of README,
to step 70 or 73. Whatever made twice as many optimizer steps was ahead at step 24, and then moved
far (a KL of .09 and .19, GRPO .027) and learned no more (accuracy .77 and .76, GRPO .83). A few
runs with 4 prompts and 4 responses a step: at 1e-4 AR + Lopti drifted to a KL of .42.

Runs, in this order, with seeds that no other run has:

1. GRPO, two-pass GRPO, AR (α = .3), Lopti (η = .5), AR + Lopti: seeds 21, 22, 23.
2. Controls, seeds 21 and 22: Lopti and two-pass GRPO at half the rate, Lopti with a random split
   into groups of the same sizes, GRPO at √2 and 2 times the rate, Lopti with ten times the β.
3. Small batches (4 prompts, 4 responses, mini-batches of 8, at most 128 tokens): the five methods
   of 1. at 1e-4 and 3e-5, seeds 21, 22, 23.
4. The five methods of 1. with seeds 24 and 25, if the hours suffice. Whether they are made does not
   depend on what the first seeds show.

Measures of a run: the mean accuracy and the mean KL (rollout/kl) of the last third, steps 49 to 72,
and the greedy accuracy on 100 held-out puzzles at step 72. *Collapsed* is a run whose mean accuracy
in steps 61 to 72 is more than .1 below its best mean of twelve steps (1 to 12, 13 to 24, ...).

What counts as a difference: the mean over seeds of the difference between two runs with the same
seed, if it is significant at 5 % (Student's t) after Holm's correction, within each measure, for
AR, Lopti, two-pass GRPO and both minus GRPO, and Lopti minus two-pass GRPO. With three seeds only a
large one can be; one that has the same sign in all seeds is named as that, and no more.

What we expect:
- KL: Lopti and two-pass GRPO at least twice that of GRPO; AR a little below GRPO; AR + Lopti like
  Lopti.
- Accuracy: GRPO and AR ahead of the methods with twice as many steps, by .02 to .08; AR within .02
  of GRPO. Two-pass GRPO moves farther than Lopti and is not better.
- Controls: at half the rate Lopti and two-pass GRPO are within .03 of GRPO, at a KL like its own.
  GRPO at twice the rate loses as two-pass GRPO does, so that it is the distance and not the split.
  The random split is within .03 of Lopti. Ten times the β holds Lopti's KL below .05 and its
  accuracy within .03 of GRPO's.
- Small batches: at 1e-4 GRPO learns, and the methods with two passes do not; at 3e-5 all of them
  learn slowly and none collapses.
"""

import argparse
import functools
import multiprocessing
import sys
from pathlib import Path

import pandas
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti

RESULTS = Path(__file__).resolve().parent / "results"
METHODS = {
    "GRPO": {},
    "GRPO, two epochs": {"update_epochs": 2},
    "AR": {"alpha": 0.3},
    "Lopti": {"eta": 0.5},
    "AR + Lopti": {"alpha": 0.3, "eta": 0.5},
}
CONTROLS = {
    "Lopti, half the rate": {"eta": 0.5, "learning_rate": 5e-5},
    "GRPO, two epochs, half the rate": {"update_epochs": 2, "learning_rate": 5e-5},
    "Lopti, random split": {"eta": 0.5},
    "GRPO, √2 times the rate": {"learning_rate": 1.414e-4},
    "GRPO, twice the rate": {"learning_rate": 2e-4},
    "Lopti, ten times β": {"eta": 0.5, "kl_coef": 0.01},
}
COMMON = {"steps": 72, "eval_every": 24, "eval_size": 50, "eval_samples": 0, "save_every": 10}
SMALL = {"prompts_per_step": 4, "group_size": 4, "mini_batch_size": 8, "max_new_tokens": 128}
SMALL_RATES = {"small batches, 1e-4": 1e-4, "small batches, 3e-5": 3e-5}


def planned_runs():
    """Returns (setting, method, seed, settings as a dict) of each run, in the order of the plan."""
    runs = []
    for seed in (21, 22, 23):
        runs += [("72 steps", name, seed, method) for name, method in METHODS.items()]
    for seed in (21, 22):
        runs += [("72 steps", name, seed, method) for name, method in CONTROLS.items()]
    for setting, rate in SMALL_RATES.items():
        for seed in (21, 22, 23):
            for name, method in METHODS.items():
                runs.append((setting, name, seed, {**method, **SMALL, "learning_rate": rate}))
    for seed in (24, 25):
        runs += [("72 steps", name, seed, method) for name, method in METHODS.items()]
    return runs


def random_split(old_logprobs, mask, eta):
    """Returns two masks of the sizes that `lopti.split_tokens` gives, of tokens drawn at random."""
    low = (old_logprobs.exp() < eta) & mask
    order = torch.rand(mask.shape).masked_fill(~mask, 2.0).flatten().argsort()
    drawn = torch.zeros_like(mask.flatten())
    drawn[order[: int(low.sum())]] = True
    drawn = drawn.view(mask.shape)
    return drawn, mask & ~drawn


def train(output, run):
    """Trains one run, or goes on with it. Returns its setting, method, seed and folder."""
    setting, method, seed, settings = run
    torch.set_num_threads(1)
    if method == "Lopti, random split":
        lopti.split_tokens = random_split
    folder = output / f"{setting}, {method}, {seed}".replace(", ", "-").replace(" ", "_")
    evaluations = lopti.read_lines(folder / "evaluations.jsonl")
    if evaluations and evaluations[-1]["step"] == COMMON["steps"]:
        pass
    elif (folder / "checkpoint.pt").exists():
        lopti.resume(folder)
    else:
        for number in range(100):  # it ended before its first checkpoint
            if not folder.exists():
                break
            folder.rename(f"{folder}.unfinished{number}")
        lopti.train(lopti.Settings(**COMMON, **settings, seed=seed, output=str(folder)))
    return setting, method, seed, folder


def write_results(setting, method, seed, folder):
    """Adds a finished run to the two csv files."""
    key = {"setting": setting, "method": method, "seed": seed}
    evaluations = []
    for line in lopti.read_lines(folder / "evaluations.jsonl"):
        table = pandas.DataFrame(line["table"]).set_index(["measure", "difficulty"])
        greedy = table.loc[("greedy", "all"), "mean"]
        evaluations.append({**key, "step": line["step"], "held_out": greedy})
    steps = pandas.DataFrame(lopti.read_lines(folder / "metrics.jsonl"))
    columns = {"step": steps["step"], "accuracy": steps["accuracy"], "kl": steps["rollout/kl"]}
    columns |= {"entropy": steps["entropy"], "length": steps["completions/mean_length"]}
    columns["low_probability_share"] = steps["low_probability_share"]
    norms = [name for name in steps if name.startswith("grad_norm")]
    columns["grad_norm"] = steps[norms].mean(axis=1)
    steps = pandas.DataFrame({**key, **columns}).round(5)
    for name, table in (("long_runs", pandas.DataFrame(evaluations)), ("long_steps", steps)):
        path = RESULTS / f"{name}.csv"
        table.to_csv(path, mode="a", header=not path.exists(), index=False)


def main():
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # as lopti.main
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, help="folder of all runs")
    output = parser.parse_args().output
    done = set()
    if (RESULTS / "long_runs.csv").exists():
        written = pandas.read_csv(RESULTS / "long_runs.csv")
        done = set(zip(written["setting"], written["method"], written["seed"]))
    runs = [run for run in planned_runs() if run[:3] not in done]
    context = multiprocessing.get_context("spawn")
    # A new process for each run: the random split replaces a function of lopti.py.
    with context.Pool(2, maxtasksperchild=1) as pool:
        for finished in pool.imap_unordered(functools.partial(train, output), runs):
            write_results(*finished)


if __name__ == "__main__":
    main()
