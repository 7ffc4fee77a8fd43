"""Has your model the problem that the paper speaks of, and would AR and Lopti help? No training.

    python data/lab/diagnose.py                                  # the bundled policy, minutes
    python data/lab/diagnose.py --model M --data F --reward R    # any flags of lopti.py
    python data/lab/diagnose.py --batches 20 --plot picture.png

It samples rollout batches as lopti.py would with the same flags, cuts them into mini-batches (one
optimizer step each), and takes the gradient of each part of a mini-batch's tokens at the policy
that sampled: without a clip and the KL, as in the first step. ± and brackets are 95 % intervals by
the jackknife over mini-batches.

- *Signal* of some tokens: the inner product of their gradient with the whole gradient of another
  mini-batch, the mean over all pairs. That is ⟨∇J, E g⟩, and noise does not count as signal.
- *Energy* of a bin of π: E‖g_bin‖², g_bin the gradient of its tokens in a mini-batch. The theorem
  (theory.unit_progress) neglects cross terms between tokens. Here only those between bins are
  neglected (how much they are is printed). Those within a bin stay, because they are a part of a
  step's length, and because gradients of single tokens would cost a backward pass each. A bin
  stands for one π: its mean weighted by the energy at the logits, Â²·‖∇_z log π‖².
- *Measured* gain: the progress of a step of length 1 along a method's gradient of one mini-batch,
  along the mean gradient of all others, over the same for GRPO. It knows no bins.
- AdamW: theory.adam_drift over all mini-batches but one, its progress along that one's gradient.

Gradients are kept whole where that takes at most 2 GB; else each as a sketch, its entries times
random signs, added up in 262,139 buckets: inner products are right on average, with a standard
error of .2 % of the product of the lengths. LOPTI_QUICK=1 takes fewer, smaller batches: a minute.
"""

import argparse
import copy
import itertools
import math
import os
import sys
import time
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import theory
import torch
from scipy import stats
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti
from rewards import told_in_a_sentence

EDGES = (0.0, 0.25, 0.5, 0.75, 1.1)  # of the four bins of π
BINS = ("π < .25", ".25 to .5", ".5 to .75", "π ≥ .75")
ALPHAS = (0.1, 0.3, 1.0)
MEMORY = 2e9  # bytes for all gradients
BUCKETS = 2**18 - 5  # a prime: entries of one column of a matrix fall into different buckets
ENTRIES = 2**16  # of a gradient: AdamW goes by single weights
SMALL = 15  # %: a gain whose interval holds 0 and ends before this is nothing to expect

# What is printed: headings; (label, titles of columns); (label and name of numbers, digits, the
# paper's). Those are of Qwen2.5-7B-Instruct-1M, the norms over that of all tokens, .82.
ALPHA_ROW = ("", "α")
TABLE = (
    "Has it the problem? (Figs. 1 to 3)",
    ("", BINS),
    ("share of tokens", 2, "0.19 0.10 0.10 0.61"),
    ("‖gradient‖ (of all tokens: 1)", 2, "0.88 0.44 0.29 0.18"),
    ("rewarded tokens that rise: GRPO", 3, "0.530 0.514 0.501 0.497"),
    ("rewarded tokens that rise: two plain steps", 3),
    ("rewarded tokens that rise: AR", 3, "0.520 0.525 0.530 0.526"),
    ("rewarded tokens that rise: Lopti", 3, "0.524 0.517 0.512 0.534"),
    ("an update on", ("π < .25 alone", "π ≥ .75 alone", "difference")),
    ("moves π ≥ .75 (an update on all: 1)", 2, "≈1 smaller"),
    "Would AR help? It gains where the signal sits at likelier tokens than the energy.",
    ("", BINS),
    ("share of the energy", 2),
    ("share of the signal", 2),
    ("", ("E_s[π]", "E_v[π]", "E_s − E_v", "energy left out")),
    ("mean π by signal, by energy", 2),
    ALPHA_ROW,
    ("gain in %, predicted", 1),
    ("gain in %, measured", 1),
    ("gain in %, measured, without the bias", 1),
    ("the bias along ∇J (signal: 1)", 2),
    ("the expected bias's length (‖∇J‖: 1)", 2),
    "Would Lopti help? It gains where σ is above the threshold.",
    ("", ("σ", "threshold", "φ, degrees", "cosine")),
    ("the two passes", 2, "– 0.18 19 –"),
    ("gain in %", ("predicted", "measured", "without bias")),
    ("an optimizer for each pass", 1),
    ("measured gain in %", ("π < η", "π ≥ η")),
    ("one pass alone", 1),
    ("one pass alone, without the bias", 1),
    ("its bias along ∇J (signal: 1)", 2),
    ("its expected bias's length (‖∇J‖: 1)", 2),
    ("AdamW (GRPO: 1)", ("distance", "progress", "per distance")),
    ("one AdamW for both passes", 2),
    ("an AdamW for each pass", 2),
)


def changed(settings, **changes):
    """A copy of lopti's arguments or of a Rollout with some attributes changed."""
    result = copy.copy(settings)
    vars(result).update(changes)
    return result


def collect(policy, tokenizer, rows, args):
    """One rollout batch, made as `lopti.train` makes it: sample, judge, score, advantages.

    Returns the rollout, with Â before Eq. 4, the rewards (B,) and the entropies (B, L).
    """
    batch = [row for row in rows for _ in range(args.group_size)]
    prompts = [row["prompt"] for row in rows]
    rollout = lopti.sample(policy, tokenizer, prompts, args.group_size, args.temperature, args)
    rewards = torch.tensor(lopti.compute_rewards(rollout.texts, batch, args)).to(policy.device)
    rollout.old_logprobs, entropies = lopti.score(policy, rollout, args, with_entropy=True)
    if args.advantage == "grpo":
        advantages = lopti.group_advantages(rewards, args.group_size)[:, None] * rollout.mask
    else:
        advantages = lopti.reinforce_pp_advantages(rewards, rollout.mask)
    rollout.advantages = advantages
    return rollout, rewards, entropies


# ---- gradients of a mini-batch


def whole(named_gradients):
    return torch.cat([gradient.flatten().float() for _, gradient in named_gradients])


def sketch(named_gradients):
    """A list of (name, gradient) → BUCKETS sums of its entries with random signs, and some entries.

    Signs and places are drawn for each parameter from a seed made of its name.
    """
    buckets, entries = 0.0, []
    total = sum(gradient.numel() for _, gradient in named_gradients)
    for name, gradient in named_gradients:
        seed = zlib.crc32(name.encode())
        draw = torch.Generator(gradient.device).manual_seed(seed)
        options = {"generator": draw, "device": gradient.device}
        flat = gradient.flatten().float()
        places = torch.randint(len(flat), (math.ceil(len(flat) * ENTRIES / total),), **options)
        entries.append(flat[places])
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % BUCKETS))
        signs = torch.randint(0, 2, flat.shape, dtype=torch.int8, **options)
        folded = torch.where(signs > 0, flat, -flat).view(-1, BUCKETS).sum(0)
        buckets = buckets + folded.roll(seed % BUCKETS)
    return torch.cat([buckets, *entries])


def cuts_of(eta):
    """The bins of π, cut at η: a list of (low, high)."""
    return list(itertools.pairwise(sorted({*EDGES, eta})))


def alphas_of(args):
    return sorted({*ALPHAS, args.alpha})


def gradients(policy, batch, args, keep=whole):
    """What a mini-batch's gradient is made of: (pieces + 3, size of what `keep` returns).

    Rows, in ascent of J, each divided by the number of response tokens:
    - Σ Â ∇log π over the tokens of each piece of `cuts_of(η)`: together they are GRPO's gradient;
    - Σ Â π ∇log π over all: AR's gradient is (1-α) GRPO's + α this;
    - the bias V·∇Σ_a m(a)π(a), Â for V, of AR at α = 1, and of the pass π < η; that of the other
      pass is minus the latter.
    Also (2, pieces): each piece's energy at the logits, and that times π.
    """
    names, parameters = zip(*(pair for pair in policy.named_parameters() if pair[1].requires_grad))
    kept = lopti.tokens_to_keep(policy, batch, args) & batch.old_logprobs.isfinite()
    busy, cuts = batch.advantages.any(1).nonzero().flatten().tolist(), cuts_of(args.eta)
    rows, at_logits = [0.0] * (len(cuts) + 3), 0.0
    for micro_batch in lopti.micro_batches(busy, batch.lengths, args.tokens_per_microbatch):
        part = batch.rows(micro_batch)
        tokens = kept[micro_batch, : part.mask.shape[1]]
        with lopti.mixed_precision(policy, args), lopti.gradient_checkpointing(policy, args):
            logits = lopti.token_logits(policy, part.ids, tokens, args.temperature, args.min_p)
        advantages, pi = part.advantages[tokens], part.old_logprobs[tokens].exp()  # (N,)
        terms = advantages * lopti.token_logprobs(logits, part.ids, tokens)[tokens]
        squares = logits.detach().softmax(-1).square().sum(-1)  # Σ_a π²
        pieces = torch.stack([(pi >= low) & (pi < high) for low, high in cuts])  # (pieces, N)
        losses = [terms[piece].sum() for piece in pieces] + [(terms * pi).sum()]
        losses += [lopti.bias_correction(logits, advantages, alpha=1.0, eta=0.0)]
        losses += [lopti.bias_correction(logits, advantages, 0.0, args.eta, "low")]
        energies = (advantages**2 * (1 - 2 * pi + squares)).double()
        at_logits += torch.stack([(pieces * one).sum(1) for one in (energies, energies * pi)])
        for number, loss in enumerate(losses):
            options = {"retain_graph": loss is not losses[-1], "materialize_grads": True}
            found = torch.autograd.grad(loss / kept.sum(), parameters, **options)
            rows[number] = rows[number] + keep(list(zip(names, found)))
    return torch.stack(rows).cpu(), at_logits.cpu().numpy()


# ---- what a step does to the probabilities (Figs. 1 and 3)


def probabilities(model, rollout, args):
    """π of every token; of a small model in float64, because likely tokens move by very little."""
    if model.num_parameters() < 5e7 and model.device.type != "mps":
        model = copy.deepcopy(model).double()
    return lopti.score(model, rollout, changed(args, dtype="float32"))[0].exp()


def moves(policy, batch, args, norm):
    """How far a step on a mini-batch moves likely tokens, and how many rewarded ones rise.

    "sizes": by plain gradient descent, as in Fig. 1, the mean |Δπ| where π ≥ .75 after an update on
    all tokens, on π < .25 and on π ≥ .75 alone (3,). `norm` is that of the gradient; the step on
    all is as long as a fresh AdamW's. By a fresh AdamW at the learning rate of `args`: the share of
    the tokens with Â > 0 whose π rose, in each bin (4,), by method.
    """
    args = changed(args, kl_coef=0.0, mini_batch_size=0)
    rate = args.learning_rate * policy.num_parameters() ** 0.5 / norm
    before, pi = probabilities(policy, batch, args), batch.old_logprobs.exp()
    bins = [batch.mask & (pi >= low) & (pi < high) for low, high in itertools.pairwise(EDGES)]

    def after(*stages, alpha=0.0, plain=False):
        trained = copy.deepcopy(policy)
        settings = changed(args, max_grad_norm=math.inf) if plain else args
        sgd = torch.optim.SGD(trained.parameters(), lr=rate)
        optimizer = sgd if plain else lopti.make_optimizer(trained, args)
        weighted = lopti.reweight_advantages(batch.advantages, batch.old_logprobs, alpha)
        for tokens in stages:
            rollout = changed(batch, advantages=weighted)
            lopti.update(trained, optimizer, rollout, tokens, settings)
        return probabilities(trained, batch, args) - before

    parts = (batch.mask, bins[0], bins[-1])
    sizes = [float(after(part, plain=True)[bins[-1]].abs().mean()) for part in parts]
    steps = {"GRPO": after(batch.mask), "two plain steps": after(batch.mask, batch.mask)}
    steps["AR"] = after(batch.mask, alpha=args.alpha)
    steps["Lopti"] = after(*lopti.split_tokens(batch.old_logprobs, batch.mask, args.eta))
    found = {"sizes": np.array(sizes)}
    rewarded = [tokens & (batch.advantages > 0) for tokens in bins]
    for name, move in steps.items():
        rose = [float((move[tokens] > 0).double().mean()) for tokens in rewarded]
        found[f"rewarded tokens that rise: {name}"] = np.array(rose)
    return found


# ---- from gradients to numbers


def jackknife(statistics, count):
    """{name: (value, half of its 95 % interval)} of a function of the list of mini-batches used.

    >>> values = np.array([1.0, 2.0, 3.0])
    >>> found = jackknife(lambda used: {"mean": values[used].mean()}, 3)["mean"]
    >>> [round(float(x), 3) for x in found]  # of a mean it is Student's interval
    [2.0, 2.484]
    """
    every = list(range(count))
    without = [statistics([j for j in every if j != i]) for i in every]
    result, factor = {}, stats.t.ppf(0.975, count - 1) * (count - 1) ** 0.5
    for name, value in statistics(every).items():
        result[name] = np.array([value, factor * np.std([one[name] for one in without], axis=0)])
    return result


def inner_products(vectors):
    """Those of all rows of (N, K, D) in float64: (N, K, N, K)."""
    parts = vectors.flatten(0, 1).split(2**16, 1)
    dots = sum(part.double() @ part.double().T for part in parts)
    return dots.view(*vectors.shape[:2], *vectors.shape[:2]).numpy()


def gradient_statistics(dots, at_logits, counts, args, used):
    """What the inner products of the gradients of the mini-batches used say."""
    cuts, rows, alphas = cuts_of(args.eta), np.eye(dots.shape[1]), alphas_of(args)
    pieces, (by_pi, ar_bias, low_bias) = rows[:-3], rows[-3:]
    edges = list(itertools.pairwise(EDGES))
    bins = [pieces[[a <= start < b for start, _ in cuts]].sum(0) for a, b in edges]
    grpo, low = pieces.sum(0), pieces[[end <= args.eta for _, end in cuts]].sum(0)
    passes, pass_biases = (low, grpo - low), (low_bias, -low_bias)
    ar, biases = [(1 - x) * grpo + x * by_pi for x in alphas], [x * ar_bias for x in alphas]
    ar_without, passes_without = np.subtract(ar, biases), np.subtract(passes, pass_biases)
    chosen, n = dots[used][:, :, used], len(used)
    # inner: of mini-batch i's a with j's b, (n, n); square: of the length, (n,)
    inner = lambda a, b: np.einsum("k,ikjl,l->ij", a, chosen, b, optimize=True)
    square = lambda a: np.diag(inner(a, a)) + 1e-30
    crossed = lambda a, b: (inner(a, b).sum() - np.trace(inner(a, b))) / (n * (n - 1))
    signals = lambda parts: np.array([crossed(part, grpo) for part in parts])
    energies = lambda parts: np.array([square(part).mean() for part in parts])
    lengths = lambda parts: np.array([max(crossed(x, x), 0.0) / signal for x in parts]) ** 0.5

    def progress(*steps):  # of steps of length 1 each, over the length of their sum
        unit = [(step, square(step) ** 0.5) for step in steps]
        along = sum(inner(step, grpo) / length[:, None] for step, length in unit)
        pairs = itertools.product(unit, repeat=2)
        total = sum(np.diag(inner(a, b)) / x / y for (a, x), (b, y) in pairs) ** 0.5
        return ((along.sum(1) - np.diag(along)) / (n - 1) / total).mean()

    def gains(*methods):
        return np.array([100 * (progress(*steps) / progress(grpo) - 1) for steps in methods])

    signal, (weight, weighted) = crossed(grpo, grpo), at_logits[used].sum(0)
    parts = weighted / (weight + 1e-30), signals(pieces), energies(pieces)
    pi, of_pieces, energy = parts = [torch.tensor(part) for part in parts]
    predicted = np.array([float(theory.unit_progress(*parts, x)) for x in (0.0, *alphas)])
    means = [float((pi * x).sum() / x.sum()) for x in (of_pieces, energy)]
    criterion = float(theory.reweighting_criterion(*parts))
    left_out = energies([grpo])[0] / energies(bins).sum() - 1
    low_energy, high_energy = energies(passes)
    phi, sigma = math.atan((high_energy / low_energy) ** 0.5), signals(passes)[1] / signal
    cosine = np.trace(inner(*passes)) / n / (low_energy * high_energy) ** 0.5
    of_passes = [sigma, theory.split_threshold(phi, cosine), math.degrees(phi), cosine]
    split = 100 * (theory.split_gain(sigma, phi, cosine) - 1)
    norms, tokens = [(square(x) ** 0.5).mean() for x in (*bins, grpo)], counts[used].sum(0)
    return {
        "progress": progress(grpo),
        "ratio": norms[0] / norms[3],
        "share of tokens": tokens / tokens.sum(),
        "‖gradient‖ (of all tokens: 1)": np.array(norms[:4]) / norms[4],
        "share of the energy": energies(bins) / energies(bins).sum(),
        "share of the signal": signals(bins) / signal,
        "mean π by signal, by energy": np.array([*means, criterion, left_out]),
        "gain in %, predicted": 100 * (predicted[1:] / predicted[0] - 1),
        "gain in %, measured": gains(*zip(ar)),
        "gain in %, measured, without the bias": gains(*zip(ar_without)),
        "the bias along ∇J (signal: 1)": signals(biases) / signal,
        "the expected bias's length (‖∇J‖: 1)": lengths(biases),
        "the two passes": np.array(of_passes),
        "an optimizer for each pass": np.array([split, *gains(passes, passes_without)]),
        "one pass alone": gains(*zip(passes)),
        "one pass alone, without the bias": gains(*zip(passes_without)),
        "its bias along ∇J (signal: 1)": signals(pass_biases) / signal,
        "its expected bias's length (‖∇J‖: 1)": lengths(pass_biases),
    }


def adam_statistics(low, high, used):
    """(distance, progress, progress for each distance) of Lopti with AdamW, over GRPO's.

    low, high: the passes' gradients (N, D). The step is the mean one of all mini-batches but one,
    and its progress is along the gradient of that one.
    """
    found = 0.0
    for i in used:
        rest = [j for j in used if j != i]
        a, b = low[rest], high[rest]
        steps = [theory.adam_drift(a + b), theory.adam_drift(a, b)]
        steps.append(theory.adam_drift(a) + theory.adam_drift(b))
        steps = torch.stack(steps).nan_to_num(0.0)  # 0/0: a weight without gradient
        found = found + torch.stack([steps.norm(dim=1), steps @ (low[i] + high[i])], 1).numpy()
    grpo, one, two = found
    ratios = {"one AdamW for both passes": one / grpo, "an AdamW for each pass": two / grpo}
    return {name: np.array([*x, x[1] / x[0]]) for name, x in ratios.items()}


def move_statistics(moved, used):
    """What `moves` found, averaged over mini-batches."""
    found = {name: np.mean([moved[i][name] for i in used], axis=0) for name in moved[0]}
    whole, low, high = found["sizes"]
    found["moves π ≥ .75 (an update on all: 1)"] = np.array([low, high, low - high]) / whole
    return found


# ---- in words


def table(found, args):
    """The numbers as text. found: name → (value, half of its interval)."""
    lines = []

    def add(label, cells):
        cells = ["?" if "nan" in cell else cell.replace("-", "−") for cell in cells]
        lines.append(f"{label:<44}" + "".join(f"{cell:>16}" for cell in cells))

    for row in TABLE:
        if isinstance(row, str):
            lines.append(f"\n{row}")
        elif row == ALPHA_ROW:
            add("", [f"α = {alpha:g}" for alpha in alphas_of(args)])
        elif row[0] not in found:
            add(*row)
        else:
            name, digits, *paper = row
            add(name, [f"{x:.{digits}f} ± {half:.{digits}f}" for x, half in zip(*found[name])])
            for cells in paper:
                add("    the paper", cells.split())
    return "\n".join(lines)


def percent(value, half):
    """'3 % (−4 to 11 %)'."""
    value, low, high = (round(x) for x in (value, value - half, value + half))
    return f"{value} % ({low} to {high} %)".replace("-", "−")


def verdict(gain, half):
    """What to expect of a gain in %.

    >>> [verdict(*pair) for pair in ((3.5, 7.5), (10, 7.5), (-10, 7.5), (10, 12))]
    ['Nothing to expect.', 'A gain to expect.', 'A loss to expect.', 'Not decided: more --batches.']
    """
    if abs(gain) > half:
        return f"A {'gain' if gain > 0 else 'loss'} to expect."
    return "Nothing to expect." if abs(gain) + half < SMALL else "Not decided: more --batches."


def sentences(found, args):
    """The three answers in words."""
    share, (ratio, half) = found["share of tokens"][0][0], found["ratio"]
    moved, halves = found["moves π ≥ .75 (an update on all: 1)"]
    has = ratio - half > 1 and moved[2] > halves[2]
    problem = (
        f"Tokens with π < .25 are {100 * share:.0f} % of all, and their gradient is {ratio:.1f} ± "
        f"{half:.1f} times as long as that of π ≥ .75 (the paper: 4.8). An update on them alone "
        f"moves the likely tokens {moved[0]:.2f} times as far as the whole update, one on the "
        f"likely tokens {moved[1]:.2f} times. {'It has' if has else 'It does not surely have'} the "
        "problem."
    )
    if not found["progress"][0] > found["progress"][1]:
        unsure = "GRPO's own progress is not surely above 0 in these mini-batches: no method can"
        return [problem, f"{unsure} be compared with it. Take more --batches."]
    gain = found["gain in %, measured"][:, alphas_of(args).index(args.alpha)]
    own = found["an optimizer for each pass"][:, 1]
    values, halves = found["one AdamW for both passes"]
    per_distance = 100 * values[2] - 100, 100 * halves[2]
    ar = f"AR at α = {args.alpha:g}: expected gain {percent(*gain)}. {verdict(*gain)}"
    both = (
        f"Lopti at η = {args.eta:g}, an optimizer for each pass: expected gain {percent(*own)}. "
        f"{verdict(*own)} With one AdamW it goes {values[0]:.2f} times as far as GRPO, and for "
        f"each distance its gain is {percent(*per_distance)}. {verdict(*per_distance)}"
    )
    return [problem, ar, both]


# ---- the command


def measure(policy, tokenizer, rows, count, args):
    """All numbers of `count` rollout batches, name → (value, half), and a line about them."""
    responses = args.prompts_per_step * args.group_size
    size = args.mini_batch_size or responses
    planned = count * math.ceil(responses / size)
    cuts, weights = cuts_of(args.eta), policy.num_parameters(only_trainable=True)
    exact = 4.0 * weights * planned * (len(cuts) + 3) <= MEMORY
    torch.manual_seed(args.seed)
    prompts = lopti.prompt_stream(rows, args.prompts_per_step, args.seed)
    right, measured, moved = [], [], []
    progress = tqdm(total=planned, desc="mini-batches", disable=None)
    for _ in range(count):
        rollout, rewards, _ = collect(policy, tokenizer, next(prompts), args)
        right += (rewards >= args.solved_reward).tolist()
        for indices in torch.arange(responses).split(size):
            batch = rollout.rows(indices)
            if batch.advantages.any():  # else there is no step
                found, energies = gradients(policy, batch, args, whole if exact else sketch)
                pi = batch.old_logprobs[batch.mask].exp().tolist()
                measured.append((found, energies, np.histogram(pi, EDGES)[0]))
                if len(measured) % max(2, planned // 5) == 1:  # it takes three times as long
                    grpo = found[: len(cuts), : None if exact else BUCKETS].double().sum(0)
                    moved.append(moves(policy, batch, args, float(grpo.norm())))
            progress.update()
    progress.close()
    used, share = len(measured), 100 * np.mean(right)
    if used < max(3, planned / 2):
        raise lopti.UserError(
            f"only {used} of {planned} mini-batches have a group with unequal rewards ({share:.0f} "
            "% of the answers are right): too few to measure anything. Take other --data, a larger "
            "--group-size or more --prompts-per-step"
        )
    vectors, at_logits, counts = zip(*measured)
    vectors, unlikely = torch.stack(vectors), [high <= args.eta for _, high in cuts]
    inner, entries = vectors[:, :, :BUCKETS], vectors[:, :, BUCKETS:]
    if exact:
        inner, entries = vectors, vectors[:, :, :: math.ceil(weights / ENTRIES)]
    entries = entries[:, : len(cuts)].double()
    passes = (entries[:, part].sum(1) for part in (unlikely, np.invert(unlikely)))
    numbers = inner_products(inner), np.stack(at_logits), np.stack(counts), args
    with np.errstate(invalid="ignore"):  # the root of a signal below 0, shown as ?
        found = jackknife(partial(gradient_statistics, *numbers), used)
        found |= jackknife(partial(adam_statistics, *passes), used)
        found |= jackknife(partial(move_statistics, moved), len(moved))
    kept = "kept whole" if exact else f"as sketches of {BUCKETS} numbers"
    return found, f"{used} mini-batches, {share:.0f} % of the answers right, gradients {kept}"


def main(argv=None):
    look = argparse.RawDescriptionHelpFormatter
    parser = lopti.Parser(description=__doc__, formatter_class=look, allow_abbrev=False)
    parser.add_argument("--batches", type=lopti.number(int, 1), default=10, help="default: 10")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it")
    options, flags = parser.parse_known_args(argv)
    args, started = lopti.parse_arguments(flags), time.process_time()
    args.alpha, args.eta = args.alpha or 0.3, args.eta or 0.5  # the paper's
    if os.environ.get("LOPTI_QUICK"):
        options.batches, args.prompts_per_step = min(options.batches, 6), 4
    device = lopti.choose_device(args.device)
    if args.dtype == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(False)
        args.dtype = "bfloat16" if fast else "float32"
    policy, tokenizer = lopti.load_model(args.model, device)
    rows, held_out = lopti.load_data(args, tokenizer)
    lopti.check_model(policy, tokenizer, rows + held_out, args)
    found, text = measure(policy, tokenizer, rows, options.batches, args)
    print(f"{text}, {time.process_time() - started:.0f} s of processor time")
    print(table(found, args), *sentences(found, args), sep="\n\n")
    if options.plot:
        from plot import draw_diagnosis  # needs matplotlib

        title = f"{Path(args.model).name}: {text}"
        draw_diagnosis(found, alphas_of(args), title).savefig(options.plot, dpi=80)


if __name__ == "__main__":
    with told_in_a_sentence():
        try:
            main()
        except torch.OutOfMemoryError as error:
            raise lopti.UserError("out of memory: lower --tokens-per-microbatch") from error
