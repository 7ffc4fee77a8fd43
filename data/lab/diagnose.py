"""Which tokens does the gradient come from? Draws Fig. 1 a and d of the paper for any model.

    python data/lab/diagnose.py                                  # the bundled model
    python data/lab/diagnose.py --model M --data F --task math   # any flags of lopti.py
    python data/lab/diagnose.py --model runs/NAME/final          # a trained model

The program samples rollout batches as lopti.py does. For each mini-batch (one optimizer step) it
computes the gradient of GRPO's loss, without the KL term, at the policy that sampled: once for all
tokens, and once for the tokens of each of four intervals of π. With --alpha the advantages are
those of Eq. 4. No weight changes. It prints a table and saves a plot. ± is half of a 95 % interval
over rollout batches.

It does not say whether a method helps: for that, train with and without it (compare.py).
"""

import argparse
import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas
import torch
from scipy import stats
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti

BINS = ["π < 0.25", "0.25 to 0.5", "0.5 to 0.75", "π ≥ 0.75"]
EDGES = [0.0, 0.25, 0.5, 0.75, math.inf]
PAPER = {  # Fig. 1: Qwen2.5-7B-Instruct-1M; over all tokens its gradient norm is 0.82
    "share of the tokens": [0.19, 0.10, 0.10, 0.61],
    "gradient norm (all tokens: 1)": [0.88, 0.44, 0.29, 0.18],
}


def measure(policy, tokenizer, examples, batches, settings):
    """Samples rollout batches, and returns their tokens (batches, 4) and norms (batches, 5).

    The columns are the four bins of π. The last column of the norms is that of all tokens. A norm
    is that of the gradient for all weights, averaged over the mini-batches of a rollout batch.
    """
    # One pass on all tokens, without the reference model
    settings = replace(settings, eta=0.0, order="low-high", passes=1, kl_coef=0.0)
    no_step = torch.optim.SGD(policy.parameters(), lr=0.0)
    torch.manual_seed(settings.seed)
    prompts = lopti.prompt_stream(examples, settings.prompts_per_step, settings.seed)
    tokens = []
    norms = []
    for _ in tqdm(range(batches), "rollout batches", disable=None):
        batch = next(prompts)
        rollout, passes = lopti.training_step(policy, None, no_step, tokenizer, batch, settings)
        pi = rollout.old_logprobs.exp()
        counts = []
        for low, high in pairwise(EDGES):
            mask = rollout.response_mask & (pi >= low) & (pi < high)
            passes.append(lopti.update(policy, no_step, rollout, mask, settings))
            counts.append(int(mask.sum()))
        means = []  # all tokens, then the bins
        for results in passes:
            means.append(np.mean([result["grad_norm"] for result in results]))
        tokens.append(counts)
        norms.append(means[1:] + means[:1])
    return np.array(tokens), np.array(norms)


def ratio(above, below):
    """Returns Σ above / Σ below, and half of its 95 % interval. Both have n numbers, one a batch.

    With R the ratio, the numbers above - R·below have mean 0; s is their standard deviation. Half
    of the interval is t·s/√n, divided by the mean of below. Here it is 4.303·1/√3/2:

    >>> print("{:.3f} ± {:.3f}".format(*ratio(np.array([1.0, 2.0, 3.0]), np.array([2.0] * 3))))
    1.000 ± 1.242
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


def plot(path, table, title):
    """Saves a plot of the table: Fig. 1 a and d, beside the values of the paper."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.5), layout="constrained")
    for axis, name in zip(axes, PAPER):
        errors = {"measured": table[name]["±"]}
        bars = table[name][["measured", "paper"]]
        bars.plot.bar(ax=axis, yerr=errors, color=["tab:orange", "silver"], ylabel=name, rot=0)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(words=None):
    look = argparse.RawDescriptionHelpFormatter
    usage = "diagnose.py [--batches N] [--plot FILE] [flags of lopti.py]"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=look, usage=usage, allow_abbrev=False
    )
    parser.add_argument(
        "--batches", type=int, default=20, help="rollout batches, 2 or more (default: %(default)s)"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        default=Path("runs/diagnose.png"),
        help="file of the plot (default: %(default)s)",
    )
    args, flags = parser.parse_known_args(words)
    try:
        settings = lopti.parse_arguments(flags)
        if args.batches < 2 or settings.resume:
            raise lopti.UserError("--batches must be 2 or more; instead of --resume give --model")
        policy, tokenizer = lopti.load_model(settings.model, settings.device)
        if settings.gradient_checkpointing:
            lopti.checkpoint_layers(policy)
        examples, _ = lopti.load_data(settings, tokenizer)
        tokens, norms = measure(policy, tokenizer, examples, args.batches, settings)
        if not norms.sum(0).all():
            raise lopti.UserError(
                "a gradient norm is 0: no group has unequal rewards, or a bin has no token"
            )
        table = summarize(tokens, norms)
        print(table.to_string(float_format="{:.2f}".format))
        print(f"\n{message(tokens, norms)} In the paper it is 4.9 times.")
        plot(args.plot, table, message(tokens, norms))
        print("This does not say whether a method helps: compare.py trains with and without it.")
        print(f"The plot is in {args.plot}.")
    except (lopti.UserError, OSError) as problem:
        parser.error(str(problem))


if __name__ == "__main__":
    main()
