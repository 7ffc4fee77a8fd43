"""Does your model have the problem of the paper, and would AR and Lopti help? No training.

    python data/lab/diagnose.py                                  # the bundled model, minutes
    python data/lab/diagnose.py --model M --data F --task math   # any flags of lopti.py
    python data/lab/diagnose.py --batches 30                     # shorter intervals

It samples rollout batches as lopti.py would, cuts them into mini-batches (one optimizer step each),
and takes the gradient of each part of their tokens at the policy that sampled: without a clip and
the KL. ±: 95 % by the jackknife over mini-batches. α is .3 and η .5 unless given.

- *Signal* of some tokens: the inner product of their gradient with the whole gradient of another
  mini-batch, the mean over all pairs. That is ⟨∇J, E g⟩, and noise does not count as signal.
- *Energy* of some tokens: E‖g‖², g their gradient in a mini-batch.
- *Mean π* by signal, by energy: how much of them is left where a token's gradient counts π times.
- *Gain*: the progress of a step of length 1 along a method's gradient of one mini-batch, along the
  mean gradient of all others, over the same for GRPO.
"""

import argparse
import math
import re
import sys
import textwrap
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti  # isort: skip, before torch

import numpy as np
import theory
import torch
from scipy import stats
from tqdm import tqdm
from variants import bias_correction

EDGES = (0.0, 0.25, 0.5, 0.75, 1.1)  # of the four bins of π
ALPHAS = (0.1, 0.3, 1.0)
MEMORY = 2e9  # bytes for all gradients
BUCKETS = 2**18 - 5  # a prime: entries of one column of a matrix fall into different buckets
ENTRIES = 2**16  # of a gradient: AdamW goes by single weights
NOTHING = 1e-14  # a gradient of no tokens is shorter
SMALL = 15  # %: a gain whose interval holds 0 and ends before this makes little difference,
SMALL_IF_SURE = 3  # or one whose interval does not hold 0 and ends before this

# The text that is printed, names of numbers with their digits, {} for answers. The paper's numbers
# are read off its figures for Qwen2.5-7B-Instruct-1M; the norms over that of all tokens, .82.
PAGE = Path(__file__).with_suffix(".txt.in").read_text(encoding="utf-8").rstrip()


def collect(policy, tokenizer, rows, args):
    """A rollout batch as `lopti.training_step` makes it, with Â before Eq. 4; and rewards (B,)."""
    batch = [row for row in rows for _ in range(args.group_size)]
    prompts = [row["prompt"] for row in rows]
    rollout = lopti.sample(policy, tokenizer, prompts, args.group_size, args.temperature, args)
    rewards = torch.tensor(lopti.compute_rewards(rollout.texts, batch, args)).to(policy.device)
    rollout.old_logprobs, _ = lopti.score(policy, rollout, args)
    advantages = lopti.reinforce_pp_advantages(rewards, rollout.mask)
    if args.advantage == "grpo":
        advantages = lopti.group_advantages(rewards, args.group_size)[:, None] * rollout.mask
    rollout.advantages = advantages
    return rollout, rewards


def stored(gradient, exact):
    """A gradient, a list of tensors → all of it or its sketch, and some of its entries.

    A sketch is BUCKETS sums of its entries with random signs, the same for each gradient: inner
    products are right on average, with an error of .2 % of the product of the lengths.
    """
    stride = math.ceil(sum(part.numel() for part in gradient) / ENTRIES)
    kept, entries, seen = [], [], 0
    for seed, part in enumerate(gradient):
        flat = part.flatten().float()
        entries.append(flat[-seen % stride :: stride])
        seen += len(flat)
        if not exact:
            flat = torch.nn.functional.pad(flat, (0, -len(flat) % BUCKETS))
            generator = torch.Generator(flat.device).manual_seed(seed)
            signs = torch.empty_like(flat, dtype=torch.int8).random_(0, 2, generator=generator)
            flat = torch.where(signs > 0, flat, -flat).view(-1, BUCKETS).sum(0).roll(997 * seed)
        kept.append(flat)
    return (torch.cat(kept) if exact else sum(kept)).cpu(), torch.cat(entries).cpu()


def pieces_of(eta):
    """The bins of π, cut at η: a list of (low, high)."""
    return list(pairwise(sorted({*EDGES, eta})))


def alphas_of(args):
    return sorted({*ALPHAS, args.alpha})


def gradients(policy, batch, args, exact=True):
    """What a mini-batch's gradient is made of: rows as kept by `stored` (K, D), entries (K, E).

    The rows, in ascent of J, each divided by the number of response tokens:
    - Σ Â ∇log π over the tokens of each piece of `pieces_of(η)`: together they are GRPO's gradient;
    - Σ Â π ∇log π over all: AR's gradient is (1-α) GRPO's + α this;
    - the bias of AR at α = 1, V·∇Σ_a m(a)π(a) with Â for V, and that of the pass π ≥ η.
    """
    parameters = [weights for weights in policy.parameters() if weights.requires_grad]
    kept = lopti.tokens_to_keep(policy, batch, args) & batch.old_logprobs.isfinite()
    busy = batch.advantages.any(1).nonzero().flatten().tolist()
    vectors, entries = 0.0, 0.0
    for micro_batch in lopti.micro_batches(busy, batch.lengths, args.tokens_per_microbatch):
        part = batch.rows(micro_batch)
        tokens = kept[micro_batch, : part.mask.shape[1]]
        with lopti.mixed_precision(policy, args):
            logits = lopti.token_logits(policy, part.ids, tokens, args.temperature, args.min_p)
        advantages, pi = part.advantages[tokens], part.old_logprobs[tokens].exp()  # (N,)
        terms = advantages * lopti.token_logprobs(logits, part.ids, tokens)[tokens]
        pieces = torch.stack([(pi >= low) & (pi < high) for low, high in pieces_of(args.eta)])
        losses = [*(pieces * terms).sum(1), (terms * pi).sum()]
        losses.append(bias_correction(logits, advantages, alpha=1.0, eta=0.0))
        losses.append(bias_correction(logits, advantages, 0.0, args.eta, "high"))
        rows = []
        for loss in losses:
            options = {"retain_graph": loss is not losses[-1], "materialize_grads": True}
            found = torch.autograd.grad(loss / kept.sum(), parameters, **options)
            rows.append(stored(found, exact))
        of_rows, entries_of_rows = map(torch.stack, zip(*rows))
        vectors, entries = vectors + of_rows, entries + entries_of_rows
    return vectors, entries


def moves(policy, batch, args, norm):
    """The mean |Δπ| of π ≥ .75 after a step on all tokens, on π < .25, on π ≥ .75 (Fig. 1e, f).

    Steps of gradient descent; that on all, with a gradient of this norm, is as long as AdamW's.
    """
    settings = vars(args) | {"kl_coef": 0.0, "mini_batch_size": 0, "max_grad_norm": math.inf}
    args = argparse.Namespace(**settings)
    exactly = argparse.Namespace(**settings | {"dtype": "float32"})
    probabilities = lambda model: lopti.score(model, batch, exactly)[0].exp()
    rate = args.learning_rate * policy.num_parameters() ** 0.5 / norm
    pi, every, sizes = batch.old_logprobs.exp(), batch.mask, []
    descent = lambda model, _: torch.optim.SGD(model.parameters(), lr=rate)
    likely, before = every & (pi >= EDGES[3]), probabilities(policy)
    for tokens in (every, every & (pi < EDGES[1]), likely):
        [trained] = theory.updated_copy(policy, batch, [tokens], args, descent)
        sizes.append(float((probabilities(trained) - before)[likely].abs().mean()))
    return np.array(sizes)


def jackknife(statistics, count):
    """{name: (value, half of its 95 % interval)} of a function of the list of mini-batches used."""
    without = [statistics([j for j in range(count) if j != i]) for i in range(count)]
    factor, result = stats.t.ppf(0.975, count - 1) * (count - 1) ** 0.5, {}
    for name, value in statistics(list(range(count))).items():
        result[name] = np.array([value, factor * np.std([one[name] for one in without], axis=0)])
    return result


def inner_products(vectors):
    """Those of all rows of (N, K, D) in float64: (N, K, N, K)."""
    parts = vectors.flatten(0, 1).split(2**16, 1)
    dots = sum(part.double() @ part.double().T for part in parts)
    return dots.view(*vectors.shape[:2], *vectors.shape[:2]).numpy()


def methods(args, count):
    """GRPO, Lopti's passes, AR and AR without bias (by α): coefficients of rows of `gradients`."""
    pieces, alphas, rows = pieces_of(args.eta), np.array(alphas_of(args))[:, None], np.eye(count)
    parts, (by_pi, bias) = rows[: len(pieces)], rows[len(pieces) :][:2]
    grpo, low = parts.sum(0), parts[[end <= args.eta for _, end in pieces]].sum(0)
    ar = (1 - alphas) * grpo + alphas * by_pi
    return grpo, low, grpo - low, ar, ar - alphas * bias


def gradient_statistics(dots, counts, args, used):
    """What the inner products `dots` of the mini-batches used say.

    A gradient is written as its coefficients by the K rows of `gradients`; n mini-batches.
    """
    pieces, rows, n = pieces_of(args.eta), np.eye(dots.shape[1]), len(used)
    parts, (by_pi, bias, bias_of_high) = rows[: len(pieces)], rows[len(pieces) :]
    bin_of = np.digitize([start for start, _ in pieces], EDGES)
    bins = np.stack([parts[bin_of == number].sum(0) for number in range(1, len(EDGES))])
    grpo, low, high, ar, unbiased = methods(args, len(rows))
    chosen = dots[used][:, :, used]
    own = chosen[range(n), :, range(n)]  # (n, K, K): products within a mini-batch
    crossed = (chosen.sum(2) - own) / (n - 1)  # (n, K, K): with the mean of all others
    mean_own, signal_of = own.mean(0), crossed.mean(0) @ grpo  # of K rows

    lengths = lambda part: (part @ own @ part + 1e-30) ** 0.5  # (n,)
    energy = lambda parts: (parts @ mean_own * parts).sum(-1) + 1e-30  # of one or of several
    signal_share = lambda parts: parts @ signal_of / (grpo @ signal_of)

    def progress(*steps):  # of steps of length 1 each, over the length of their sum
        unit = sum(step / lengths(step)[:, None] for step in steps)  # (n, K)
        length = np.einsum("nk,nkl,nl->n", unit, own, unit) ** 0.5
        return (np.einsum("nk,nkl,l->n", unit, crossed, grpo) / length).mean()

    gain = lambda *steps: 100 * (progress(*steps) / progress(grpo) - 1)

    by_signal, by_energy = signal_share(by_pi), (grpo @ mean_own @ by_pi) / energy(grpo)
    sigma, phi = signal_share(high), math.atan((energy(high) / energy(low)) ** 0.5)
    cosine = (low @ mean_own @ high) / (energy(low) * energy(high)) ** 0.5
    has_both = min(lengths(low).max(), lengths(high).max()) > NOTHING
    split = 100 * (theory.split_gain(sigma, phi, cosine) - 1) if has_both else np.nan
    norms = np.array([lengths(x).mean() for x in (*bins, grpo)])
    return {
        "progress": progress(grpo),
        "ratio": norms[0] / norms[3] if norms[3] > NOTHING else np.nan,
        "share of tokens": counts[used].sum(0) / counts[used].sum(),
        "‖gradient‖ (of all tokens: 1)": norms[:4] / norms[4],
        "share of the energy": energy(bins) / energy(bins).sum(),
        "share of the signal": signal_share(bins),
        "mean π": np.array([by_signal, by_energy, by_signal - by_energy]),
        "gain in %, measured": np.array([gain(step) for step in ar]),
        "gain in %, measured, without the bias": np.array([gain(step) for step in unbiased]),
        "the bias along ∇J (signal: 1)": np.array(alphas_of(args)) * signal_share(bias),
        "signal of π ≥ η": np.array([sigma, theory.split_threshold(phi, cosine)]),
        "of this a bias (π < η: minus this)": np.array([signal_share(bias_of_high)]),
        "an optimizer for each pass": np.array([split, gain(low, high)]),
    }


def adam_statistics(entries, args, used):
    """AR and Lopti with one AdamW, over GRPO: its gain, or its distance and progress.

    entries: those of the rows of `gradients`, (N, K, E). A step is theory.adam_drift over all
    mini-batches but one, its progress that along the gradient of that one.
    """
    grpo, low, high, ar, unbiased = (
        torch.tensordot(torch.tensor(rows), entries[used], ([-1], [1]))
        for rows in methods(args, entries.shape[1])
    )  # (n, E), or (alphas, n, E)
    count, found = len(used), []  # found: a step's distance and progress, of each method
    others = (1 - torch.eye(count, dtype=entries.dtype)) / (count - 1)  # takes means of all others
    for passes in [(grpo,), (low, high), *((one,) for one in (*ar, *unbiased))]:
        means, squares = ([others @ each for each in x] for x in (passes, [g**2 for g in passes]))
        steps = theory.adam_drift(means, squares).nan_to_num(0.0)  # 0/0: it has no gradient
        found.append([float(steps.norm(dim=1).sum()), float((steps * grpo).sum())])
    distance, progress = np.array(found).T / np.array(found[:1]).T
    per_distance = progress / distance
    with_bias, without_bias = np.split(100 * (per_distance[2:] - 1), [len(ar)])
    return {
        "one AdamW for both passes": np.array([distance[1], progress[1], per_distance[1]]),
        "gain in %, AdamW": with_bias,
        "gain in %, AdamW, without the bias": without_bias,
    }


def page(found, args):
    """The three questions, answers and their numbers. found: name → (value, half of interval)."""

    def numbers(row):
        label, digits = row.groups()
        pairs = zip(*found[label.strip()])
        cells = [f"{x:.{digits}f} ± {half:.{digits}f}".replace("-", "−") for x, half in pairs]
        cells = [cell.removesuffix(" ± nan") for cell in cells]
        return f"{label:<40}" + "".join(f"{'?' if 'nan' in cell else cell:>15}" for cell in cells)

    alphas = "".join(f"{f'α = {alpha:g}':>15}" for alpha in alphas_of(args))
    wrap = partial(textwrap.fill, width=98, initial_indent="  ", subsequent_indent="  ")
    answers = map(wrap, sentences(found, args))
    return re.sub(r"(.*) \| (\d)", numbers, PAGE).format(*answers, alphas=alphas)


def compared(gain, half):
    """A gain in % over GRPO with its interval, and what to expect of it."""
    answer, sure = "not decided, take more --batches", abs(gain) > half
    if abs(gain) + half < (SMALL_IF_SURE if sure else SMALL):
        answer = "little difference"
    elif sure:
        answer = "it helps" if gain > 0 else "it does harm"
    interval = f"{round(gain - half)} to {round(gain + half)} %".replace("-", "−")
    amount = f"{abs(round(gain))} % {'less' if round(gain) < 0 else 'more'}"
    return f"{amount} reward than GRPO (95 % interval: {interval}): {answer}"


def sentences(found, args):
    """The three answers in words."""
    share, (ratio, half) = found["share of tokens"][0][0], found["ratio"]
    moved, halves = found["moves π ≥ .75 (an update on all: 1)"]
    yield (
        f"{'Yes' if ratio - half > 1 and moved[2] > halves[2] else 'Not surely'}. "
        f"{100 * share:.0f} % of the tokens are unlikely (π < .25). Their gradient is "
        f"{ratio:.1f} ± {half:.1f} times as long as that of the likely ones (π ≥ .75; in the paper "
        f"4.8 times). An update on the unlikely ones alone moves the likely ones {moved[0]:.2f} "
        f"times as far as an update on all, one on the likely ones {moved[1]:.2f} times."
        if math.isfinite(ratio)
        else "Not decided: no token is likely (π ≥ .75), so there is nothing to compare with."
    )
    if not found["progress"][0] > found["progress"][1]:
        unsure = "Not decided: GRPO's own progress is not surely above 0. Take more --batches."
        yield from [unsure] * 2
        return
    gain = found["gain in %, measured"][:, alphas_of(args).index(args.alpha)]
    adam = found["gain in %, AdamW"][:, alphas_of(args).index(args.alpha)]
    yield (
        f"With steps of the same length AR at α = {args.alpha:g} gains {compared(*gain)}. With "
        f"AdamW, as in lopti.py, it gains {compared(*adam)}."
    )
    own = found["an optimizer for each pass"][:, 1]
    distance, _, per_distance = found["one AdamW for both passes"].T
    if not math.isfinite(own[0]):
        yield f"Not decided: all tokens are on one side of η = {args.eta:g}. Take another --eta."
        return
    yield (
        f"With steps of the same length and an optimizer for each pass Lopti at η = {args.eta:g} "
        f"gains {compared(*own)}. With one AdamW, as in lopti.py, it goes {distance[0]:.2f} times "
        f"as far as GRPO; over the same length it gains {compared(*100 * per_distance - [100, 0])}."
    )


def measure(policy, tokenizer, rows, count, args):
    """All numbers of `count` rollout batches, name → (value, half), and a line about them."""
    responses = args.prompts_per_step * args.group_size
    size = min(args.mini_batch_size or responses, responses)
    planned, weights = count * math.ceil(responses / size), policy.num_parameters(True)
    exact = 4.0 * weights * planned * (len(pieces_of(args.eta)) + 3) <= MEMORY
    torch.manual_seed(args.seed)
    prompts = lopti.prompt_stream(rows, args.prompts_per_step, args.seed)
    right, measured, moved = [], [], []
    for _ in tqdm(range(count), "rollout batches", disable=None):
        rollout, rewards = collect(policy, tokenizer, next(prompts), args)
        right += (rewards >= args.solved_reward).tolist()
        for batch in map(rollout.rows, torch.arange(responses).split(size)):
            if batch.advantages.any():  # else there is no step
                pi = batch.old_logprobs[batch.mask].exp()
                found = gradients(policy, batch, args, exact)
                measured.append((*found, np.histogram(pi.tolist(), EDGES)[0]))
                if len(measured) % max(2, planned // 5) == 1:  # it takes as long as the gradients
                    norm = found[0][: len(pieces_of(args.eta))].double().sum(0).norm()
                    moved.append(moves(policy, batch, args, float(norm)))
    used, share = len(measured), f"{100 * np.mean(right):.0f} % of the answers"
    if used < max(3, planned / 2):
        raise lopti.UserError(
            f"only {used} of {planned} mini-batches have a group with unequal rewards ({share} are "
            "right): take more --batches, a larger --group-size or other --data"
        )
    vectors, entries, counts = zip(*measured)
    numbers = inner_products(torch.stack(vectors)), np.stack(counts), args
    found = jackknife(partial(gradient_statistics, *numbers), used)
    found |= jackknife(partial(adam_statistics, torch.stack(entries).double(), args), used)
    name, parts = "moves π ≥ .75 (an update on all: 1)", lambda x: [x[1], x[2], x[1] - x[2]] / x[0]
    found |= jackknife(lambda used: {name: parts(np.mean([moved[i] for i in used], 0))}, len(moved))
    kept = "kept whole" if exact else f"as sketches of {BUCKETS} numbers"
    return found, f"{used} mini-batches of {size} answers, {share} right, gradients {kept}"


def main(argv=None):
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=look, allow_abbrev=False)
    parser.add_argument("--batches", type=lopti.within(int, 1), default=10, help="default: 10")
    own, flags = parser.parse_known_args(argv)
    args = lopti.parse_arguments(["--alpha", "0.3", "--eta", "0.5", *flags])  # the paper's
    started = time.process_time()
    policy, tokenizer, rows, _ = lopti.prepare(args)
    found, text = measure(policy, tokenizer, rows, own.batches, args)
    print(f"{text}, {time.process_time() - started:.0f} s of processor time\n")
    print(page(found, args))


if __name__ == "__main__":
    sys.exit(lopti.exit_code(main, "diagnose.py"))
