"""Fig. 1 a and d of the paper for any model: which tokens does the gradient come from? No training.

    python data/lab/diagnose.py                                  # the bundled model
    python data/lab/diagnose.py --model M --data F --task math   # any flags of lopti.py
    python data/lab/diagnose.py --model runs/NAME/final          # a trained model

It samples rollout batches as lopti.py does. For each mini-batch (one optimizer step) it takes the
gradient of GRPO's loss, without the KL term, at the policy that sampled: once of all tokens, once
of the tokens in each of four bins of π. With --alpha the advantages are those of Eq. 4. No weight
moves. It prints a table and saves a plot. ± is half of a 95 % interval over rollout batches.
"""

import argparse
import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy import stats
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti

EDGES = (0.0, 0.25, 0.5, 0.75, math.inf)  # of the bins of π, as in Fig. 1
BINS = ("π < .25", ".25 to .5", ".5 to .75", "π ≥ .75")
PAPER_SHARES = (0.19, 0.10, 0.10, 0.61)  # Fig. 1a, of Qwen2.5-7B-Instruct-1M
PAPER_NORMS = (0.88, 0.44, 0.29, 0.18)  # Fig. 1d: .72 .36 .24 .15, divided by .82 of all tokens


def measure(policy, tokenizer, examples, batches, settings):
    """Returns (batches, 4) numbers of tokens, (batches, 5) gradient norms: four bins, all tokens.

    A norm is over all weights, and the mean over the mini-batches of a rollout batch.
    """
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
        masks = []
        for low, high in pairwise(EDGES):
            masks.append(rollout.response_mask & (pi >= low) & (pi < high))
            passes.append(lopti.update(policy, no_step, rollout, masks[-1], settings))
        tokens.append([int(mask.sum()) for mask in masks])
        of_all, *of_bins = [np.mean([result["grad_norm"] for result in each]) for each in passes]
        norms.append([*of_bins, of_all])
    return np.array(tokens), np.array(norms)


def ratio(above, below):
    """Σ above / Σ below and half of its 95 % interval. Each has a number for each of n batches.

    With R the ratio, the numbers above - R·below have mean 0; s is their standard deviation. The
    interval is R ± t·s/√n, divided by the mean of below. Here 2 ± 4.303·1/√3:

    >>> print("{:.3f} ± {:.3f}".format(*ratio(np.array([1.0, 2.0, 3.0]), np.ones(3))))
    2.000 ± 2.484
    """
    count = len(above)
    value = above.sum() / below.sum()
    error = (above - value * below).std(ddof=1) / math.sqrt(count)
    return value, stats.t.ppf(0.975, count - 1) * error / below.mean()


def summarize(tokens, norms):
    """Each number with half of its interval: shares of the tokens (4, 2), gradient norms where that
    of all tokens is 1 (4, 2), and how many times as large π < .25 has it as π ≥ .75 (2,)."""
    shares = np.array([ratio(tokens[:, place], tokens.sum(1)) for place in range(4)])
    relative = np.array([ratio(norms[:, place], norms[:, 4]) for place in range(4)])
    return shares, relative, ratio(norms[:, 0], norms[:, 3])


def message(shares, times):
    """What table and plot say."""
    text = f"{100 * shares[0, 0]:.0f} % of the tokens have π < .25.\nTheir gradient norm is "
    text += "{:.1f} ± {:.1f} times as large as that of π ≥ .75".format(*times)
    return text + (" (not significant)." if abs(times[0] - 1) <= times[1] else ".")


def table(shares, norms, times):
    """All that is printed: two rows, each above the paper's, and a sentence."""
    lines = [f"{'tokens with':<30}" + "".join(f"{name:>14}" for name in BINS)]
    for label, values, paper in (
        ("share of the tokens", shares, PAPER_SHARES),
        ("gradient norm (all tokens: 1)", norms, PAPER_NORMS),
    ):
        lines.append(f"{label:<30}" + "".join(f"{mean:7.2f} ± {half:.2f}" for mean, half in values))
        lines.append(f"{'  the paper, 7B model':<23}" + "".join(f"{x:14.2f}" for x in paper))
    return "\n".join([*lines, "", message(shares, times) + " In the paper it is 4.8 times."])


def plot(path, shares, norms, times):
    """Saves Fig. 1 a and d: two bars for each bin, and a line where the paper has its value."""
    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    for shift, name, color, values, of_paper in (
        (-0.2, "share of the tokens", "silver", shares, PAPER_SHARES),
        (0.2, "gradient norm (all tokens: 1)", "tab:orange", norms, PAPER_NORMS),
    ):
        places = np.arange(4) + shift
        axis.bar(places, values[:, 0], 0.38, yerr=values[:, 1], color=color, label=name, capsize=4)
        paper = axis.hlines(of_paper, places - 0.19, places + 0.19, "black", "dashed")
    paper.set_label("the paper, 7B model")
    axis.set_xticks(range(4), BINS)
    axis.set_title(message(shares, times), fontsize=11)
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(words=None):
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=look, allow_abbrev=False)
    parser.add_argument("--batches", type=int, default=20, help="rollout batches, 2 or more")
    parser.add_argument("--plot", type=Path, default=Path("runs/diagnose.png"), help="its file")
    args, flags = parser.parse_known_args(words)
    try:
        settings = lopti.parse_arguments(flags)
        if args.batches < 2 or settings.resume:
            raise lopti.UserError("--batches must be 2 or more; instead of --resume give --model")
        device = settings.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
        policy, tokenizer = lopti.load_model(settings.model, device)
        if settings.gradient_checkpointing:
            lopti.checkpoint_layers(policy)
        examples, _ = lopti.load_data(settings, tokenizer)
        tokens, norms = measure(policy, tokenizer, examples, args.batches, settings)
        if not norms.sum(0).all():
            raise lopti.UserError(
                "a gradient is 0: no group has unequal rewards, or a bin no token"
            )
        results = summarize(tokens, norms)
        print(table(*results))
        plot(args.plot, *results)
        print(f"The plot is in {args.plot}.")
    except (lopti.UserError, OSError) as problem:
        parser.error(str(problem))


if __name__ == "__main__":
    main()
