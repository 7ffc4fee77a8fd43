"""Which tokens does the gradient come from? Measures Fig. 1 a and d of the paper for any model.

    python data/lab/diagnose.py                                  # the bundled model
    python data/lab/diagnose.py --model M --data F --task math   # any flags of lopti.py
    python data/lab/diagnose.py --model runs/NAME/final          # a trained model

The program samples rollout batches as lopti.py does. For each mini-batch (one optimizer step) it
computes the gradient of GRPO's loss, without the KL term, at the policy that sampled: once for all
tokens, and once for the tokens of each of four intervals of π. With --alpha the advantages are
those of Eq. 4. No weight changes. ± is half of a 95 % interval over rollout batches. The default,
20 batches of 128 responses with the bundled model, takes 6 to 7 minutes on one CPU core.

It does not say whether a method helps: for that, train with and without it (compare.py).
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import torch
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti

BINS = ["π < 0.25", "0.25 to 0.5", "0.5 to 0.75", "π ≥ 0.75"]
PAPER = {  # Fig. 1: Qwen2.5-7B-Instruct-1M; over all tokens its gradient norm is 0.82
    "share of the tokens": [0.19, 0.10, 0.10, 0.61],
    "gradient norm (all tokens: 1)": [0.88, 0.44, 0.29, 0.18],
}


def masks_of_bins(old_logprobs, mask):
    """Returns a mask (B, L) for each bin of π; each token of `mask` is in one of them."""
    masks = []
    for edge in (0.25, 0.5, 0.75):
        low, mask = lopti.split_tokens(old_logprobs, mask, edge)
        masks.append(low)
    return [*masks, mask]


def measure(policy, tokenizer, examples, batches, settings):
    """Samples rollout batches, and returns their tokens (batches, 4) and norms (batches, 5).

    The columns are the four bins of π. The last column of the norms is that of all tokens. A norm
    is that of the gradient for all weights, averaged over the mini-batches of a rollout batch.
    """
    # One update on all tokens, without the reference model
    settings = replace(settings, eta=0.0, order="low-high", update_epochs=1, kl_coef=0.0)
    reward_function = lopti.find_reward(settings)
    no_step = torch.optim.SGD(policy.parameters(), lr=0.0)
    torch.manual_seed(settings.seed)
    prompts = lopti.prompt_stream(examples, settings.prompts_per_step, settings.seed)
    tokens = []
    norms = []
    print("Sampling from the rows to train on; nothing is trained or evaluated.")
    for number in range(1, batches + 1):
        batch = next(prompts)
        rollout, updates = lopti.training_step(
            policy, None, no_step, tokenizer, reward_function, batch, settings
        )
        counts = []
        results = []
        for mask in masks_of_bins(rollout.old_logprobs, rollout.mask):
            counts.append(int(mask.sum()))
            results.append(lopti.update(policy, no_step, rollout, mask, settings))
        results.append(updates[0][1])  # of all tokens
        means = []
        for of_mini_batches in results:
            means.append(np.mean([result["grad_norm"] for result in of_mini_batches]))
        tokens.append(counts)
        norms.append(means)
        print(f"batch {number} of {batches}")
    return np.array(tokens), np.array(norms)


def ratio(above, below):
    """Returns Σ above / Σ below, and half of its 95 % interval. Both have n numbers, one a batch.

    With R the ratio, the numbers above - R·below have mean 0; s is their standard deviation. Half
    of the interval is t·s/√n, divided by the mean of below.
    """
    value = above.sum() / below.sum()
    t = stats.t.ppf(0.975, len(above) - 1)
    return value, t * stats.sem(above - value * below) / below.mean()


def summarize(tokens, norms):
    """Returns a table with a row for each bin: measured, half of the interval, the paper's."""
    columns = {}
    for name, values, total in zip(PAPER, (tokens, norms), (tokens.sum(1), norms[:, 4])):
        ratios = [ratio(values[:, place], total) for place in range(4)]
        columns[name, "measured"] = [value for value, _ in ratios]
        columns[name, "±"] = [half for _, half in ratios]
        columns[name, "paper"] = PAPER[name]
    return pandas.DataFrame(columns, BINS)


def message(tokens, norms):
    """Returns two sentences: how many tokens have π < 0.25, and how large their gradient is."""
    share = tokens[:, 0].sum() / tokens.sum()
    times, half = ratio(norms[:, 0], norms[:, 3])
    text = f"{100 * share:.0f} % of the tokens have π < 0.25.\n"
    text += f"Their gradient norm is {times:.1f} ± {half:.1f} times as large as that of π ≥ 0.75"
    return text + (" (not significant)." if abs(times - 1) <= half else ".")


def main(words=None):
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # as lopti.main
    look = argparse.RawDescriptionHelpFormatter
    usage = "diagnose.py [--batches N] [flags of lopti.py]"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=look, usage=usage, allow_abbrev=False
    )
    parser.add_argument(
        "--batches", type=int, default=20, help="rollout batches, 2 or more (default: %(default)s)"
    )
    args, flags = parser.parse_known_args(words)
    try:
        settings = lopti.parse_arguments(flags)
        if args.batches < 2:
            raise lopti.UserError("--batches must be 2 or more, for an interval")
        policy, tokenizer = lopti.load_model(settings.model, settings.device)
        examples, _ = lopti.load_data(settings, tokenizer)
        tokens, norms = measure(policy, tokenizer, examples, args.batches, settings)
        has_gradient = norms[:, 4] > 0  # a batch of equal rewards has none, and says nothing
        tokens = tokens[has_gradient]
        norms = norms[has_gradient]
        if len(norms) < 2:
            raise lopti.UserError(
                f"an interval needs two batches with groups of unequal rewards, not {len(norms)}"
            )
        for name, total in zip(BINS, norms.sum(0)):
            if not total:
                raise lopti.UserError(f"no token with {name} has a gradient: give more --batches")
        print(summarize(tokens, norms).to_string(float_format="{:.2f}".format))
        print(f"\n{message(tokens, norms)} In the paper it is 4.9 times.")
        print("This does not say whether a method helps: compare.py trains with and without it.")
    except (lopti.UserError, OSError) as problem:
        parser.error(str(problem))


if __name__ == "__main__":
    main()
