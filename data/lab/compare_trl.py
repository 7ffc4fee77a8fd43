"""Time TRL's GRPOTrainer on the default job, to set beside `python lopti.py --benchmark 4`.

    pip install trl                      # 1.16.0 when this was written; lopti itself does not need it
    python data/lab/compare_trl.py           # seconds of each step: 16 prompts x 8 responses, 2 optimizer steps

The same policy, prompts, reward, lengths, clip, KL and number of optimizer steps. A first step warms up.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import lopti


class StepTimes(TrainerCallback):
    """Seconds of each optimizer step; TRL samples at the first of those that share a batch of responses."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, *args, **kwargs):
        self.began = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        self.seconds.append(time.perf_counter() - self.began)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4, help="steps after the one that warms up")
    parser.add_argument(
        "--per-device",
        type=int,
        default=64,
        help="responses in one forward pass of the update; 64 is a mini-batch",
    )
    given = parser.parse_args()
    args = lopti.parse_arguments([])
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows, _ = lopti.load_data(args, tokenizer)
    prompts = lopti.prompt_stream(rows, args.prompts_per_step, args.seed)
    data = [
        {"prompt": row["prompt"], "solution": row["solution"]}
        for _ in range(given.steps + 2)
        for row in next(prompts)
    ]
    mini_batches = (
        args.prompts_per_step * args.group_size // args.mini_batch_size
    )  # optimizer steps to a batch of responses
    micro_batches = args.mini_batch_size // given.per_device
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, per_device_train_batch_size=given.per_device, gradient_accumulation_steps=micro_batches,
            steps_per_generation=mini_batches * micro_batches, num_generations=args.group_size, max_completion_length=args.max_new_tokens,
            temperature=args.temperature, top_p=1.0, top_k=0, learning_rate=args.learning_rate, lr_scheduler_type="constant",
            weight_decay=args.weight_decay, max_grad_norm=args.max_grad_norm, beta=args.kl_coef, epsilon=args.clip_low, epsilon_high=args.clip_high,
            loss_type="bnpo", max_steps=mini_batches * (given.steps + 1), save_strategy="no", report_to=[], gradient_checkpointing=False,
            shuffle_dataset=False, seed=args.seed, disable_tqdm=True,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")
        GRPOTrainer(
            model=model,
            reward_funcs=lopti.kk_reward,
            args=config,
            train_dataset=Dataset.from_list(data),
            processing_class=tokenizer,
            callbacks=[times],
        ).train()
    steps = [
        sum(times.seconds[start : start + mini_batches])
        for start in range(0, len(times.seconds), mini_batches)
    ][1:]
    print(
        f"seconds a step: {', '.join(f'{seconds:.2f}' for seconds in steps)}; median {statistics.median(steps):.2f}"
    )


if __name__ == "__main__":
    main()
