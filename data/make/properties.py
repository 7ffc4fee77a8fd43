"""Measure the four properties wanted of the bundled policy, on puzzles of its own making.

    python data/make/properties.py                          # data/tiny, before training
    python data/make/properties.py --model runs/A/final     # a policy after training
    python data/make/properties.py --real FILE              # public 3-person puzzles beside ours

1. Its tokens spread over the probabilities as a language model's do, and most unlikely ones are
   harmless wording.
2. No temperature mends its mistakes: greedy decoding makes them too.
3. The length limit does not decide: few responses are truncated, and the token mean of Â is near 0.
4. Training raises its accuracy: run this again on the trained policy. (`python lopti.py` reports
   the same on data/kk_test.jsonl, which nothing was tuned on.)
"""

import argparse
import copy
import math
import random
import sys
import tempfile
from pathlib import Path

import puzzles
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
import lopti
from rewards import told_in_a_sentence

BINS = ((0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.01))


def mean_and_interval(values):
    """Mean and half of a 95 % interval over independent batches (normal approximation)."""
    values = torch.tensor(values, dtype=torch.float64)
    return f"{values.mean():.3f} ± {1.96 * values.std() / math.sqrt(len(values)):.3f}"


def load_rows(file, people, tokenizer):
    flags = ["--eval-data", str(file), "--eval-size", "0", "--people", *map(str, people)]
    _, rows = lopti.load_data(lopti.parse_arguments(flags), tokenizer)
    return rows


def measure_tokens(policy, tokenizer, rows, args):
    """Bins of π, each bin's gradient norm, wording, truncated responses, mean Â, by batch."""
    wording_ids = torch.tensor(tokenizer.convert_tokens_to_ids(puzzles.WORDING_WORDS))
    # one mini-batch, no clip of the gradient, a step of size 0: `update` then only reports the norm
    vars(args).update(max_grad_norm=math.inf, mini_batch_size=0, kl_coef=0.0)
    measures = {}
    for start in range(0, len(rows), args.prompts_per_step):
        prompts = rows[start : start + args.prompts_per_step]
        texts = [row["prompt"] for row in prompts]
        rollout = lopti.sample(policy, tokenizer, texts, args.group_size, args.temperature, args)
        repeated = [row for row in prompts for _ in range(args.group_size)]
        rewards = torch.tensor(lopti.compute_rewards(rollout.texts, repeated, args))
        rollout.old_logprobs, entropies = lopti.score(policy, rollout, args, with_entropy=True)
        advantages = lopti.group_advantages(rewards, args.group_size)
        rollout.advantages = advantages[:, None] * rollout.mask  # (B, L)
        probabilities, mask = rollout.old_logprobs.exp(), rollout.mask
        tokens = int(mask.sum())
        unlikely = mask & (probabilities < BINS[0][1])
        is_wording = torch.isin(rollout.ids, wording_ids)
        found = {
            "reward": rewards.mean(),
            "accuracy": (rewards >= args.solved_reward).float().mean(),
            "length": tokens / len(rewards),
            "entropy": entropies.sum() / tokens,
            "share of responses truncated": rollout.truncated.float().mean(),
            "token mean of Â": rollout.advantages.sum() / tokens,
            "wording among π < .25": (unlikely & is_wording).sum() / unlikely.sum(),
        }
        norms = []
        for low, high in BINS:
            in_bin = mask & (probabilities >= low) & (probabilities < high)
            still = torch.optim.SGD(policy.parameters(), lr=0.0)
            norms.append(lopti.update(policy, still, rollout, in_bin, args)["grad_norm"])
            found[f"share of tokens, π in {low:.2f}–{min(high, 1):.2f}"] = in_bin.sum() / tokens
        for (low, high), norm in zip(BINS, norms):
            found[f"gradient norm,   π in {low:.2f}–{min(high, 1):.2f}"] = norm
        found["norm of the lowest bin over the highest's"] = norms[0] / norms[-1]
        for name, value in found.items():
            measures.setdefault(name, []).append(float(value))
    print(f"\n{len(rows)} prompts × {args.group_size} responses at T = {args.temperature:g},")
    print(f"in batches of {args.prompts_per_step} prompts; ± is half of a 95 % interval")
    for name, values in measures.items():
        print(f"  {name:<45}{mean_and_interval(values)}", flush=True)


def measure_accuracy(policy, tokenizer, rows, temperatures, args):
    """Accuracy at each temperature (0: greedy) by number of people, with 95 % intervals."""
    sizes = sorted({row["difficulty"] for row in rows})
    counts = {size: sum(row["difficulty"] == size for row in rows) for size in sizes}
    print(
        "\naccuracy" + "".join(f"{f'{n} people (n = {counts[n]})':>24}" for n in sizes) + "    mean"
    )
    for temperature in temperatures:
        right = {size: 0 for size in sizes}
        for start in range(0, len(rows), 200):
            chunk = rows[start : start + 200]
            prompts = [row["prompt"] for row in chunk]
            rollout = lopti.sample(policy, tokenizer, prompts, 1, temperature, args)
            for row, reward in zip(chunk, lopti.compute_rewards(rollout.texts, chunk, args)):
                right[row["difficulty"]] += reward >= args.solved_reward
        means = {size: right[size] / counts[size] for size in sizes}
        cells = [(mean, *lopti.wilson_interval(mean, counts[n])) for n, mean in means.items()]
        print(
            f"{f'T = {temperature:g}' if temperature else 'greedy':<8}"
            + "".join(f"{f'{mean:.3f} [{low:.2f}, {high:.2f}]':>24}" for mean, low, high in cells)
            + f"{sum(means.values()) / len(means):>8.3f}",
            flush=True,
        )


def main():
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=look)
    parser.add_argument("--model", default=lopti.parse_arguments([]).model)
    parser.add_argument("--people", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--puzzles", type=int, default=400, help="held-out puzzles per size")
    parser.add_argument("--batches", type=int, default=10, help="rollout batches, for the tokens")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[1, 0.7, 0.5, 0.3, 0])
    parser.add_argument("--real", type=Path, help="a file of public 3-person puzzles")
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()

    args = lopti.parse_arguments(["--model", str(options.model)])
    args.max_new_tokens = options.max_new_tokens or args.max_new_tokens
    policy, tokenizer = lopti.load_model(args.model, "cpu")
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "puzzles.jsonl"
        made = [
            puzzles.generate_puzzle(rng, n) for _ in range(options.puzzles) for n in options.people
        ]
        puzzles.write_jsonl(file, made)
        rows = load_rows(file, options.people, tokenizer)
    mixed = rng.sample(rows, options.batches * args.prompts_per_step)
    measure_tokens(policy, tokenizer, mixed, copy.copy(args))
    measure_accuracy(policy, tokenizer, rows, options.temperatures, copy.copy(args))
    if options.real:
        print(f"\n{options.real.name}, the first {options.puzzles}")
        real = load_rows(options.real, [3], tokenizer)[: options.puzzles]
        measure_accuracy(policy, tokenizer, real, [1, 0], copy.copy(args))


if __name__ == "__main__":
    with told_in_a_sentence():
        main()
