"""Do unlikely tokens drown the others in your model, and what would AR and Lopti gain? No training.

    python data/lab/diagnose.py                                  # the bundled model
    python data/lab/diagnose.py --model M --data F --task math   # any flags of lopti.py
    python data/lab/diagnose.py --batches 80                     # shorter intervals

It samples rollout batches as lopti.py does, at α = .3 and η = .5 unless these are given, and takes
the gradient of each mini-batch (one optimizer step) at the policy that sampled, without the KL.
Let g be the gradient of a mini-batch, p the part of g that comes from some of its tokens, and E the
mean over mini-batches. All point the way in which the expected reward rises.

    energy of the tokens   E‖p‖²                    what they add to the length of a step
    signal of the tokens   ⟨E p, E g⟩               what they add to the reward; noise adds nothing
    gain of a method       ⟨E u, E g⟩ / ⟨E v, E g⟩ - 1    u: its step, v: GRPO's step, equally long

A gain compares one step at an unchanged policy. It does not predict a whole training.
"""

import argparse
import sys
import textwrap
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti  # isort: skip, before torch

import numpy as np
import torch
from scipy import stats
from torch.nn.functional import normalize
from tqdm import tqdm

BINS = (0.0, 0.25, 0.5, 0.75, 1.1)  # of π, as in the paper's Fig. 1
PAPER_TOKENS = (0.19, 0.10, 0.10, 0.61)  # Fig. 1a, read off for Qwen2.5-7B-Instruct-1M
PAPER_LENGTHS = (0.88, 0.44, 0.29, 0.18)  # Fig. 1d, over .82, the length for all tokens
BIN_NAMES = ("π < .25", ".25 to .5", ".5 to .75", "π ≥ .75")
LITTLE = 3  # %: a gain whose whole interval is nearer to 0 than this makes little difference


MOST_WEIGHTS = 20_000_000  # of a larger model a random sample of so many weights stands for all

EXPLANATION = """\
Energy is what tokens add to the squared length of a step, signal what they add to the reward. A
method gains if it moves weight to tokens with more signal than energy. Gain: how much more reward
one step brings than one of GRPO that is equally long, at an unchanged policy. By plain gradient
descent Lopti makes two steps of one length, one for each pass. Brackets hold 95 % intervals, ± is
half of one. One step does not predict a training: compare.py compares whole trainings."""


class GradientKeeper:
    """Takes the place of the optimizer in `lopti.update`: keeps the gradient, moves no weight."""

    def __init__(self, policy, settings):
        self.policy = policy
        # `gradient` gets one mini-batch at a time. The length of a gradient stays as it is.
        self.settings = replace(settings, mini_batch_size=0, max_grad_norm=1e9)
        self.entries = sample_of_weights(policy)

    def step(self):
        parts = []
        for weights, entries in zip(self.policy.parameters(), self.entries):
            slope = torch.zeros_like(weights) if weights.grad is None else weights.grad
            parts.append(-slope.flatten()[entries])  # minus: the loss falls where the reward rises
        self.kept = torch.cat(parts)

    def zero_grad(self):
        self.policy.zero_grad()

    def gradient(self, batch, tokens):
        """What `tokens` (B, L) of a mini-batch add to its gradient: (D,), D weights."""
        self.kept = 0.0
        told = lopti.update(self.policy, self, batch, tokens, self.settings)
        if told["nonfinite_steps"]:
            raise lopti.UserError("a gradient is not finite: try --dtype float32")
        if not told["optimizer_steps"]:
            self.step()  # there is no gradient: zeros
        return self.kept


def sample_of_weights(policy):
    """Which entries of each of the policy's tensors are measured: all, or a random sample."""
    share = MOST_WEIGHTS / sum(weights.numel() for weights in policy.parameters())
    generator = torch.Generator().manual_seed(0)
    chosen = []
    for weights in policy.parameters():
        entries = torch.arange(weights.numel())
        if share < 1:
            count = round(share * len(entries))
            entries = torch.randint(len(entries), (count,), generator=generator)
        chosen.append(entries.to(policy.device))
    return chosen


def gradients(keeper, batch, settings):
    """Of a mini-batch: those of the four bins of π (4, D), of π < η (D,), and AR's (D,)."""
    pi = batch.old_logprobs.exp()
    bins, low = [0.0, 0.0, 0.0, 0.0], 0.0
    for start, end in pairwise(sorted({*BINS, settings.eta})):  # the bins, cut at η
        piece = keeper.gradient(batch, batch.mask & (pi >= start) & (pi < end))
        number = int(start // 0.25)
        bins[number] = bins[number] + piece
        if start < settings.eta:
            low = low + piece
    weighted = lopti.reweight_advantages(batch.advantages, batch.old_logprobs, settings.alpha)
    ar = keeper.gradient(replace(batch, advantages=weighted), batch.mask)
    return torch.stack(bins), low, ar


def descent_steps(bins, low, ar):
    """A mini-batch's steps of GRPO, AR and Lopti by plain gradient descent, of length 1: (3, D).

    The learning rate and the clip of the norm fix how long a step is, so a method can only turn it.
    Lopti makes two steps of equal length, one for each pass. Here both start at the same policy.
    """
    grpo = bins.sum(0)
    high = grpo - low
    lopti_sum = normalize(low, dim=0) + normalize(high, dim=0)
    return normalize(torch.stack([grpo, ar, lopti_sum]), dim=1)


def squares_for_adamw(bins, low, ar):
    """The squares that AdamW averages for GRPO, AR and Lopti: (3, D).

    With one AdamW for both of Lopti's passes these are the squares of the two gradients in turn.
    """
    grpo = bins.sum(0)
    high = grpo - low
    return torch.stack([grpo**2, ar**2, (low**2 + high**2) / 2])


class FirstHalf:
    """The means over the first half of the mini-batches; the second half is measured against them.

    AdamW's step is each weight's mean gradient over the root of its mean square, as if the policy
    stood still and the optimizer had run for a while.
    """

    def __init__(self):
        self.count = 0
        self.bins = self.ar = self.steps = self.squares = 0.0

    def add(self, bins, low, ar):
        self.count += 1
        self.bins = self.bins + bins
        self.ar = self.ar + ar
        self.steps = self.steps + descent_steps(bins, low, ar)
        self.squares = self.squares + squares_for_adamw(bins, low, ar)

    def finish(self):
        self.bins = self.bins / self.count
        self.steps = self.steps / self.count
        self.grpo = self.bins.sum(0)
        means = torch.stack([self.grpo, self.ar / self.count, self.grpo])  # Lopti's passes: GRPO's
        roots = (self.squares / self.count).sqrt()
        steps = torch.where(roots > 0, means / roots, 0.0)  # 0: a weight without any gradient
        self.adamw_lengths = steps.norm(dim=1)
        self.adamw_steps = normalize(steps, dim=1)

    def products(self, bins, low, ar):
        """What a mini-batch of the second half says: signals (4,), progress by descent, AdamW (3,).

        No product holds the square of a noise, as the noise of the two halves is independent. The
        signal and the progress by descent are taken both ways: the mini-batch's part along the
        first half's gradient, and its gradient along the first half's part.
        """
        grpo = bins.sum(0)
        steps = descent_steps(bins, low, ar)
        return {
            "signal": bins @ self.grpo + self.bins @ grpo,
            "descent": steps @ self.grpo + self.steps @ grpo,
            "adamw": self.adamw_steps @ grpo,
        }


def sizes(batch, bins, eta):
    """Of a mini-batch: how many tokens the bins have (4,), how many are below η; how long the
    gradients of the bins are, and of all tokens (5,); the squares of the former (4,)."""
    pi = batch.old_logprobs[batch.mask].exp().cpu()
    lengths = torch.cat([bins, bins.sum(0)[None]]).norm(dim=1)
    return {
        "tokens": torch.tensor(np.histogram(pi, BINS)[0]),
        "low": (pi < eta).sum(),
        "length": lengths,
        "energy": lengths[:4] ** 2,
    }


def measure(policy, tokenizer, rows, count, settings):
    """Sums over the mini-batches of each rollout batch, {name: (batches, numbers)}; the share of
    right answers; and how much further Lopti goes than GRPO with one AdamW."""
    plain = replace(settings, alpha=0.0, eta=0.0, order="low-high", passes=1, kl_coef=0.0)
    keeper = GradientKeeper(policy, plain)
    size = settings.mini_batch_size or settings.prompts_per_step * settings.group_size
    torch.manual_seed(settings.seed)
    prompts = lopti.prompt_stream(rows, settings.prompts_per_step, settings.seed)
    first = FirstHalf()
    right, found = [], {}
    for number in tqdm(range(count), "rollout batches", disable=None):
        rollout, _ = lopti.training_step(policy, None, keeper, tokenizer, next(prompts), plain)
        right.append(lopti.reaches(rollout.rewards, settings.solved_reward).double().mean().item())
        sums = {}
        for indices in torch.arange(len(rollout.mask)).split(size):
            batch = rollout.rows(indices)
            parts = gradients(keeper, batch, settings)
            numbers = sizes(batch, parts[0], settings.eta)
            if number < count // 2:
                first.add(*parts)
            else:
                numbers |= first.products(*parts)
            for name, values in numbers.items():
                sums[name] = sums.get(name, 0) + values.double().cpu().numpy()
        for name, values in sums.items():
            found.setdefault(name, []).append(values)
        if number + 1 == count // 2:
            first.finish()
    if not first.grpo.any() or not np.any(found["descent"]):
        share = f"{100 * np.mean(right):.0f} % of the answers are right"
        raise lopti.UserError(
            f"nothing to measure: in a half of the batches no group has unequal rewards ({share}): "
            "take more --batches, a larger --group-size or other --data"
        )
    found = {name: np.array(lines) for name, lines in found.items()}
    return found, np.mean(right), float(first.adamw_lengths[2] / first.adamw_lengths[0])


# ---- Ratios with their intervals


def ratio(above, below, variance=None):
    """Σ above / Σ below and half of its 95 % interval. Each has a number for each of n batches.

    Rollout batches are the independent units. With R the ratio, their numbers above - R·below have
    mean 0; s is the standard deviation of these, so that of their mean is s/√n. `variance` is what
    takes the place of 1/n. Here it is 2 ± t·s/√n = 2 ± 4.303·1/√3:

    >>> print("{:.3f} ± {:.3f}".format(*ratio(np.array([1.0, 2.0, 3.0]), np.ones(3))))
    2.000 ± 2.484
    """
    count = len(above)
    if not below.any():
        return np.nan, np.nan
    value = above.sum() / below.sum()
    deviation = (above - value * below).std(ddof=1)
    error = deviation * (variance or 1 / count) ** 0.5 / abs(below.mean())
    return value, stats.t.ppf(0.975, count - 1) * error


def ratios(columns, below, variance=None):
    """The `ratio` of each of some columns (batches, K) to `below` (batches,)."""
    return [ratio(column, below, variance) for column in columns.T]


# ---- What is printed


def verdict(gain, half):
    """A gain over GRPO in %, with half of its 95 % interval, in words.

    >>> verdict(5.0, 2.0)
    'it helps (3.0 to 7.0 %)'
    >>> verdict(-5.0, 2.0)
    'it does harm (−7.0 to −3.0 %)'
    >>> verdict(1.5, 1.0)
    'it makes little difference (0.5 to 2.5 %)'
    >>> verdict(1.0, 7.0)
    'this is not decided (−6.0 to 8.0 %: take more --batches)'
    """
    low, high = gain - half, gain + half
    interval = f"{low:.1f} to {high:.1f} %".replace("-", "−")
    if -LITTLE < low and high < LITTLE:
        return f"it makes little difference ({interval})"
    if low > 0:
        return f"it helps ({interval})"
    if high < 0:
        return f"it does harm ({interval})"
    return f"this is not decided ({interval}: take more --batches)"


def gain(progress, method, variance):
    """What method 1 (AR) or 2 (Lopti) gains over GRPO, in %, and half of the interval."""
    value, half = ratio(progress[:, method], progress[:, 0], variance)
    return 100 * (value - 1), 100 * half


def answer(progress, method, variance):
    """The `verdict` on a method, if GRPO itself makes progress."""
    own, half = ratio(progress[:, 0], np.ones(len(progress)), variance)
    if not own > half:
        return "this is not decided (GRPO's own progress may be 0: take more --batches)"
    return verdict(*gain(progress, method, variance))


def sentences(found, distance, variance, settings):
    """Three answers: do unlikely tokens push hardest, would AR help, would Lopti help?"""
    share, _ = ratio(found["tokens"][:, 0], found["tokens"].sum(1))
    times, half = ratio(found["length"][:, 0], found["length"][:, 3])
    pushes = "Not decided: take more --batches."
    if times - half > 1:
        pushes = "Yes."
    elif times + half < 1:
        pushes = "No."
    first = f"Do unlikely tokens push hardest? {pushes} "
    first += f"{100 * share:.0f} % of the tokens are unlikely (π < .25), and "
    if np.isnan(times):
        first += "none is likely (π ≥ .75)."
    else:
        first += f"their gradient is {times:.1f} ± {half:.1f} times as long as that of the likely "
        first += "ones (π ≥ .75; in the paper 4.8 times)."
    second = (
        f"Would AR help (α = {settings.alpha:g})? By plain gradient descent "
        f"{answer(found['descent'], 1, variance)}. With AdamW, as in lopti.py, "
        f"{answer(found['adamw'], 1, variance)}."
    )
    if 0 < found["low"].sum() < found["tokens"].sum():
        third = (
            f"Would Lopti help (η = {settings.eta:g})? By plain gradient descent "
            f"{answer(found['descent'], 2, variance)}. With one AdamW it goes {distance:.2f} times "
            f"as far as GRPO; over the same distance {answer(found['adamw'], 2, variance)}."
        )
    else:
        third = f"All tokens are on one side of η = {settings.eta:g}: take another --eta for Lopti."
    return [first, second, third]


def table_line(label, pairs, digits=2):
    """A line of the table: its label, and each value with half of its interval."""
    cells = ""
    for value, half in pairs:
        cell = f"{value:.{digits}f} ± {half:.{digits}f}".replace("-", "−")
        cells += f"{'–' if np.isnan(value) else cell:>15}"
    return f"{label:<34}{cells}"


def page(found, distance, count, settings):
    """All that is printed of `count` rollout batches."""
    # The first half's mean is as uncertain as the second's: two halves, two variances.
    variance = 1 / (count // 2) + 1 / (count - count // 2)
    tokens, energy, signal = found["tokens"], found["energy"], found["signal"]
    lines = []
    for text in sentences(found, distance, variance, settings):
        lines += [textwrap.fill(text, 98), ""]
    lines.append(f"{'tokens with':<34}" + "".join(f"{name:>15}" for name in BIN_NAMES))
    lines.append(table_line("share of the tokens", ratios(tokens, tokens.sum(1))))
    lines.append(f"{'  the paper, 7B model':<34}" + "".join(f"{x:15.2f}" for x in PAPER_TOKENS))
    lengths = ratios(found["length"][:, :4], found["length"][:, 4])
    lines.append(table_line("length of their gradient (all: 1)", lengths))
    lines.append(f"{'  the paper, 7B model':<34}" + "".join(f"{x:15.2f}" for x in PAPER_LENGTHS))
    lines.append(table_line("share of the energy", ratios(energy, energy.sum(1))))
    lines.append(table_line("share of the signal", ratios(signal, signal.sum(1), variance)))
    lines += ["", f"{'gain over GRPO in %':<34}{'AR':>15}{'Lopti':>15}"]
    for label, name in (("plain gradient descent", "descent"), ("AdamW", "adamw")):
        lines.append(table_line(label, [gain(found[name], k, variance) for k in (1, 2)], 1))
    return "\n".join([*lines, "", EXPLANATION])


def main(argv=None):
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=look, allow_abbrev=False, usage=argparse.SUPPRESS
    )
    parser.add_argument("--batches", type=int, default=20, help="rollout batches (default: 20)")
    own, flags = parser.parse_known_args(argv)
    settings = lopti.parse_arguments(["--alpha", "0.3", "--eta", "0.5", *flags])
    if own.batches < 4:
        raise lopti.UserError("--batches must be at least 4: two for each half")
    if not settings.alpha or not settings.eta:
        raise lopti.UserError("give --alpha and --eta above 0, or leave them out: .3 and .5")
    if settings.resume or settings.eval_only:
        raise lopti.UserError(
            "no --resume, no --eval-only here: --model runs/NAME/final measures a run"
        )
    started = time.process_time()
    policy, tokenizer, rows, _ = lopti.prepare(settings)
    found, right, distance = measure(policy, tokenizer, rows, own.batches, settings)
    seconds = time.process_time() - started
    print(
        f"{own.batches} rollout batches, {100 * right:.0f} % of the answers right, "
        f"{seconds:.0f} s of processor time\n"
    )
    print(page(found, distance, own.batches, settings))


if __name__ == "__main__":
    lopti.open_streams()
    sys.exit(lopti.exit_code(main, "diagnose.py"))
