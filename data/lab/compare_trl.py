"""Time TRL on the default job, to set beside what data/lab/benchmark.py says of lopti.py.

    pip install trl==1.16.0                               # lopti itself does not need it
    python data/lab/compare_trl.py                        # GRPO, seconds of each step
    python data/lab/compare_trl.py --alpha 0.3 --eta 0.5  # with the port, data/ports/trl_lopti.py

The same policy, prompts, reward, lengths, clips, KL and number of optimizer steps: a step is 16
prompts x 8 responses and 2 optimizer steps, 4 with Lopti. A first step warms up.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

DATA = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(DATA.parent), str(DATA / "ports")]
from trl_lopti import puzzle_trainer, trl_settings

import lopti


class StepTimes(TrainerCallback):
    """Seconds of each optimizer step; TRL samples at the first of those that share a batch."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, *args, **kwargs):
        self.began = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        self.seconds.append(time.perf_counter() - self.began)


def main():
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text)
    parser.add_argument("--steps", type=int, default=4, help="steps after the one that warms up")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a mini-batch")
    options, flags = parser.parse_known_args()
    args = lopti.parse_arguments(flags)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    policy = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")
    rows, _ = lopti.load_data(args, tokenizer)
    batches = lopti.prompt_stream(rows, args.prompts_per_step, args.seed)
    rows = [row for _ in range(options.steps + 2) for row in next(batches)]
    settings = trl_settings(args, accumulation=options.accumulation)
    updates = settings["steps_per_generation"] * settings["num_iterations"] // options.accumulation
    settings |= {"max_steps": updates * (options.steps + 1), "shuffle_dataset": False}
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        job = policy, tokenizer, rows, settings, args, folder
        puzzle_trainer(*job, callbacks=[times]).train()
    firsts = range(updates, len(times.seconds), updates)  # without the step that warms up
    steps = [sum(times.seconds[first : first + updates]) for first in firsts]
    each, median = ", ".join(f"{step:.2f}" for step in steps), statistics.median(steps)
    print(f"seconds a step: {each}; median {median:.2f}")


if __name__ == "__main__":
    main()
