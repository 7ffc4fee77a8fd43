"""Has your model the problem that the paper speaks of, and would AR and Lopti help? No training.

    python data/lab/diagnose.py                                  # the bundled policy, minutes
    python data/lab/diagnose.py --model M --data F --reward R    # any flags of lopti.py
    python data/lab/diagnose.py --batches 20 --plot picture.png

It samples rollout batches as lopti.py would with the same flags, cuts them into mini-batches (one
optimizer step each), and measures the gradient of each part of a mini-batch's tokens at the policy
that sampled. Tokens and advantages are those of Eq. 1; there is no clip and no KL, as in the first
step. ± and brackets are 95 % intervals by the jackknife over mini-batches.

- The *signal* of some tokens is the inner product of their gradient with the whole gradient of
  another mini-batch, averaged over all pairs: ⟨∇J, E g⟩. No mini-batch meets itself, so noise does
  not count as signal.
- The *energy* of a bin of π is E‖g_bin‖², g_bin the gradient of its tokens in a mini-batch. The
  theorem (theory.unit_progress) neglects cross terms between tokens. Here those between bins are
  neglected and those within a bin are kept: they are a part of the length of a step, and gradients
  of single tokens would cost a backward pass each. How much this leaves out is printed. A bin
  stands for one π, its mean weighted by the energy at the logits, Â²·‖∇_z log π‖².
- The *measured* gain knows no bins: a step of length 1 along the method's gradient of one
  mini-batch, its progress along the mean gradient of all others, over the same for GRPO.
- AdamW goes by each weight on its own: theory.adam_drift over all mini-batches but one, and its
  progress along the gradient of that one.

The gradients are kept as they are where that takes at most 2 GB. Else each is kept as a sketch: its
entries times random signs, added up in 262,139 buckets. Inner products of sketches are those of
the gradients on average, with a standard error of .2 % of the product of the lengths. For AdamW
some entries are kept as well. LOPTI_QUICK=1 takes fewer and smaller batches: a minute.
"""

import copy
import itertools
import math
import os
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import theory
import torch
from scipy import stats
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti
from rewards import told_in_a_sentence
from variants import weighted_mass

EDGES = (0.0, 0.25, 0.5, 0.75, 1.1)  # of the four bins of π
BINS = ("π < .25", ".25 to .5", ".5 to .75", "π ≥ .75")
PAPER = {  # Qwen2.5-7B-Instruct-1M: Fig. 1 (a), (d) over the norm of all tokens, .82; Fig. 3
    "share": (0.19, 0.10, 0.10, 0.61),
    "norm": (0.88, 0.44, 0.29, 0.18),
    "GRPO": (0.530, 0.514, 0.501, 0.497),
    "AR": (0.520, 0.525, 0.530, 0.526),
    "Lopti": (0.524, 0.517, 0.512, 0.534),
}
ALPHAS = (0.1, 0.3, 1.0)
BUCKETS = 2**18 - 5  # a prime: so entries of one column of a matrix fall into different buckets
ENTRIES = 2**17  # of a gradient, for AdamW
MEMORY = 2e9  # bytes for all gradients
SMALL = 0.15  # a gain whose interval lies within ± this and holds 0 is nothing to expect


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


def compress(named_gradients):
    """A list of (name, gradient) → its sketch (BUCKETS,) and some of its entries, as one vector.

    Signs and entries are drawn anew for each parameter, from a seed made of its name.
    """
    sketch, entries = 0.0, []
    total = sum(gradient.numel() for _, gradient in named_gradients)
    for name, gradient in named_gradients:
        draw = torch.Generator(gradient.device).manual_seed(zlib.crc32(name.encode()))
        options = {"generator": draw, "device": gradient.device}
        flat = gradient.flatten().float()
        chosen = math.ceil(len(flat) * ENTRIES / total)
        entries.append(flat[torch.randint(len(flat), (chosen,), **options)])
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % BUCKETS))
        signs = torch.randint(0, 2, flat.shape, dtype=torch.int8, **options)
        sketch = sketch + torch.where(signs > 0, flat, -flat).view(-1, BUCKETS).sum(0)
    return torch.cat([sketch, *entries])


def flatten(named_gradients):
    return torch.cat([gradient.flatten().float() for _, gradient in named_gradients])


def cuts_of(eta):
    """The edges of the bins, and η: (low, high) of each piece of the tokens."""
    return list(itertools.pairwise(sorted({*EDGES, eta})))


def gradients(policy, batch, args, eta, keep=flatten):
    """What one mini-batch's gradient is made of: (pieces + 3, size of what `keep` returns).

    Rows, in ascent of J, all divided by the number of response tokens:
    - for each piece of π in `cuts_of(eta)`, Σ Â ∇log π over its tokens: they add up to GRPO's
    - Σ Â π ∇log π: AR's gradient is (1-α)·GRPO's + α·this
    - the bias of AR at α = 1 and of the pass π < η (THEORY: V·∇Σ_a m(a)π(a), V estimated by Â);
      the other pass has minus the latter.
    Also the energy of each piece at the logits and that times π, (2, pieces).
    """
    names, parameters = zip(*(pair for pair in policy.named_parameters() if pair[1].requires_grad))
    kept = lopti.tokens_to_keep(policy, batch, args) & batch.old_logprobs.isfinite()
    busy, cuts = batch.advantages.any(1).nonzero().flatten().tolist(), cuts_of(eta)
    rows, at_logits = [0.0] * (len(cuts) + 3), torch.zeros(2, len(cuts), dtype=torch.float64)
    for micro_batch in lopti.micro_batches(busy, batch.lengths, args.tokens_per_microbatch):
        part = batch.rows(micro_batch)
        tokens = kept[micro_batch, : part.mask.shape[1]]
        with lopti.mixed_precision(policy, args), lopti.gradient_checkpointing(policy, args):
            logits = lopti.token_logits(policy, part.ids, tokens, args.temperature, args.min_p)
        advantages, pi = part.advantages[tokens], part.old_logprobs[tokens].exp()  # (N,)
        terms = advantages * lopti.token_logprobs(logits, part.ids, tokens)[tokens]
        mass = weighted_mass(logits, 1.0, 0.0, "all")  # Σ_a π², with half of its gradient
        pieces = [(pi >= low) & (pi < high) for low, high in cuts]
        losses = [terms[piece].sum() for piece in pieces] + [(terms * pi).sum()]
        losses += [(advantages * mass).sum()]
        losses += [(advantages * weighted_mass(logits, 0.0, eta, "low")).sum()]
        energies = (advantages**2 * (1 - 2 * pi + mass)).detach().double()
        for number, piece in enumerate(pieces):
            pair = energies[piece].sum(), (energies * pi)[piece].sum()
            at_logits[:, number] += torch.stack(pair).cpu()
        for number, loss in enumerate(losses):
            options = {"retain_graph": number + 1 < len(losses), "allow_unused": True}
            found = torch.autograd.grad(loss / kept.sum(), parameters, **options)
            pairs = zip(names, parameters, found)
            found = [(n, torch.zeros_like(p) if g is None else g) for n, p, g in pairs]
            rows[number] = rows[number] + keep(found)
    return torch.stack(rows).cpu(), at_logits


# ---- what a step does to the probabilities (Figs. 1 and 3)


def probabilities(model, rollout, args):
    """π of every token; of a small model in float64, because many tokens move by very little."""
    twin = model
    if model.num_parameters() < 5e7 and model.device.type != "mps":
        twin = copy.deepcopy(model).double()
    return lopti.score(twin, rollout, changed(args, dtype="float32"))[0].exp()


def moves(policy, batch, args, eta, alpha, norm):
    """One optimizer step on a mini-batch: how far likely tokens move, how many rewarded ones rise.

    Plain gradient descent (as the paper's Fig. 1), as long as AdamW's first step: the mean |Δπ| of
    the tokens with π ≥ .75 by an update on π < .25 alone, and on themselves, over that by the whole
    update (2,). A fresh AdamW at the learning rate of args: the share of the tokens with Â > 0
    whose π rose, by bin (4,), for each method.
    """
    args = changed(args, kl_coef=0.0, mini_batch_size=0)
    free = changed(args, max_grad_norm=math.inf)
    before, count = probabilities(policy, batch, args), policy.num_parameters()
    pi = batch.old_logprobs.exp()
    bins = [batch.mask & (pi >= low) & (pi < high) for low, high in itertools.pairwise(EDGES)]

    def after(stages, settings, make, alpha=0.0):
        trained = copy.deepcopy(policy)
        weighted = lopti.reweight_advantages(batch.advantages, batch.old_logprobs, alpha)
        optimizer, rollout = make(trained), changed(batch, advantages=weighted)
        for tokens in stages:
            lopti.update(trained, optimizer, rollout, tokens, settings)
            yield probabilities(trained, batch, args) - before

    rate = args.learning_rate * count**0.5 / norm
    sgd = lambda model: torch.optim.SGD(model.parameters(), lr=rate)
    parts = (batch.mask, bins[0], bins[-1])
    sizes = [float(next(after([one], free, sgd))[bins[-1]].abs().mean()) for one in parts]
    adamw = lambda model: lopti.make_optimizer(model, args)
    *_, lopti_moves = after(lopti.split_tokens(batch.old_logprobs, batch.mask, eta), args, adamw)
    one, two = after([batch.mask] * 2, args, adamw)
    (ar,) = after([batch.mask], args, adamw, alpha)
    found = {"GRPO": one, "two plain steps": two, "AR": ar, "Lopti": lopti_moves}
    rewarded = [tokens & (batch.advantages > 0) for tokens in bins]
    rose = lambda move: [float((move[tokens] > 0).double().mean()) for tokens in rewarded]
    return {
        "moved": np.divide(sizes[1:], sizes[0]),
        **{name: np.array(rose(move)) for name, move in found.items()},
    }


# ---- from gradients to numbers


def jackknife(statistic, count):
    """{name: (value, half of its 95 % interval)} of a function of the list of mini-batches used.

    >>> values = np.array([1.0, 2.0, 3.0])
    >>> found = jackknife(lambda used: {"mean": values[used].mean()}, 3)["mean"]
    >>> [round(float(x), 3) for x in found]  # of a mean it is Student's interval
    [2.0, 2.484]
    """
    every = list(range(count))
    without = [statistic([j for j in every if j != i]) for i in every]
    result = {}
    for name, value in statistic(every).items():
        spread = np.var([one[name] for one in without], axis=0) * (count - 1)
        result[name] = value, stats.t.ppf(0.975, count - 1) * spread**0.5
    return result


def gram_matrix(vectors):
    """All inner products of (N, K, D), in float64: (N, K, N, K)."""
    flat = vectors.flatten(0, 1)
    dots = sum(part.double() @ part.double().T for part in flat.split(2**16, 1))
    return dots.view(*vectors.shape[:2], *vectors.shape[:2]).numpy()


def statistics(gram, at_logits, counts, eta, alphas):
    """mini-batches used → what they say of AR and Lopti, from the inner products alone."""
    cuts, size = cuts_of(eta), gram.shape[1]
    row = np.eye(size)
    bins = [
        sum(row[i] for i, (low, _) in enumerate(cuts) if a <= low < b)
        for a, b in itertools.pairwise(EDGES)
    ]
    whole, by_pi, ar_bias, low_bias = sum(bins), *row[-3:]
    low = sum(row[i] for i, (_, high) in enumerate(cuts) if high <= eta)
    high = whole - low

    def of(used):
        dots, n = gram[used][:, :, used], len(used)
        inner = lambda a, b: np.einsum("k,ikjl,l->ij", a, dots, b, optimize=True)
        own = lambda a, b: np.diag(inner(a, b))
        crossed = lambda a, b: (inner(a, b).sum() - own(a, b).sum()) / (n * (n - 1))

        def progress(*steps):  # of steps of length 1 each, per length that they lead
            norms = [own(step, step) ** 0.5 + 1e-30 for step in steps]
            along = [inner(step, whole) / norm[:, None] for step, norm in zip(steps, norms)]
            along = sum((one.sum(1) - np.diag(one)) / (n - 1) for one in along)
            pairs = list(itertools.product(zip(steps, norms), repeat=2))
            length = sum(own(a, b) / x / y for (a, x), (b, y) in pairs) ** 0.5
            return (along / length).mean()

        gain = lambda *steps: progress(*steps) / progress(whole) - 1
        ar = lambda alpha: (1 - alpha) * whole + alpha * by_pi
        expected_length = lambda a: max(crossed(a, a), 0.0) ** 0.5
        signal = crossed(whole, whole)
        signals = torch.tensor([crossed(row[i], whole) for i in range(len(cuts))])
        energies = torch.tensor([own(row[i], row[i]).mean() for i in range(len(cuts))])
        weight, weighted = at_logits[used].sum(0)
        pi = torch.tensor(weighted / np.maximum(weight, 1e-30))
        predicted = [theory.unit_progress(pi, signals, energies, x) for x in (0.0, *alphas)]
        phi = math.atan((own(high, high).mean() / own(low, low).mean()) ** 0.5)
        cosine = own(low, high).mean() / (own(low, low).mean() * own(high, high).mean()) ** 0.5
        sigma, bin_energies = crossed(high, whole) / signal, [own(b, b).mean() for b in bins]
        tokens, unbiased = counts[used].sum(0), (low - low_bias, high + low_bias)
        return {
            "share": tokens / tokens.sum(),
            "norm": np.array([(own(b, b) ** 0.5).mean() for b in bins])
            / (own(whole, whole) ** 0.5).mean(),
            "norm ratio": (own(bins[0], bins[0]) ** 0.5).mean()
            / (own(bins[-1], bins[-1]) ** 0.5).mean(),
            "progress": progress(whole),
            "signal": np.array([crossed(b, whole) for b in bins]) / signal,
            "energy": np.array(bin_energies) / sum(bin_energies),
            "left out": own(whole, whole).mean() / sum(bin_energies) - 1,
            "E_s": float((signals * pi).sum() / signals.sum()),
            "E_v": float((energies * pi).sum() / energies.sum()),
            "criterion": float(theory.reweighting_criterion(pi, signals, energies)),
            "predicted": np.array([float(x / predicted[0]) - 1 for x in predicted[1:]]),
            "measured": np.array([gain(ar(x)) for x in alphas]),
            "without bias": np.array([gain(ar(x) - x * ar_bias) for x in alphas]),
            "bias": crossed(ar_bias, whole) / signal * np.array(alphas),
            "bias length": np.array([x * expected_length(ar_bias) for x in alphas]) / signal**0.5,
            "sigma": sigma,
            "phi": math.degrees(phi),
            "cosine": cosine,
            "threshold": theory.split_threshold(phi, cosine),
            "split predicted": theory.split_gain(sigma, phi, cosine) - 1,
            "split measured": gain(low, high),
            "split without bias": gain(*unbiased),
            "pass gains": np.array([gain(x) for x in (low, high, *unbiased)]),
            "pass bias": crossed(low_bias, whole) / signal * np.array([1, -1]),
            "pass bias length": expected_length(low_bias) / signal**0.5,
        }

    return of


def adam_statistics(low, high):
    """mini-batches used → Lopti with one AdamW, and with one for each pass, over GRPO.

    low, high: the passes' gradients (N, D). Distance gone, progress, progress for each distance.
    """
    drifts = {
        "GRPO": lambda low, high: theory.adam_drift(low + high),
        "one AdamW": theory.adam_drift,
        "an AdamW for each pass": lambda *passes: sum(map(theory.adam_drift, passes)),
    }
    values = {name: [] for name in drifts}
    for i in range(len(low)):
        rest = [j for j in range(len(low)) if j != i]
        for name, drift in drifts.items():
            step = drift(low[rest], high[rest]).nan_to_num(0.0)  # 0/0: a weight without gradient
            values[name].append((float(step.norm()), float(step @ (low[i] + high[i]))))

    def of(used):
        means = {name: np.array(pairs)[used].mean(0) for name, pairs in values.items()}
        ratios = {name: means[name] / means["GRPO"] for name in list(means)[1:]}
        return {name: np.array([a, b, b / a]) for name, (a, b) in ratios.items()}

    return of


# ---- in words


def percent(value):
    return f"{100 * value:.0f} %".replace("-", "−")


def between(value, half):
    """'3 % (−4 to 11 %)'."""
    return f"{percent(value)} ({percent(value - half)[:-2]} to {percent(value + half)})"


def verdict(gain, half):
    """What to expect of a gain with this interval.

    >>> [verdict(gain, 0.075) for gain in (0.035, 0.2, -0.2)]
    ['Nothing to expect.', 'A gain to expect.', 'A loss to expect.']
    """
    if not math.isfinite(gain + half):
        return "Not known."
    if abs(gain) > half:
        return ("A gain" if gain > 0 else "A loss") + " to expect."
    if abs(gain) + half < SMALL:
        return "Nothing to expect."
    return "Not decided by so few batches: raise --batches."


def problem_sentence(share, ratio, moved):
    """The first plain sentence; (value, half) of each, `moved` by the unlikely and by themselves."""
    (by_unlikely, by_themselves), halves = moved
    larger = ratio[0] - ratio[1] > 1
    further = by_unlikely - halves[0] > by_themselves + halves[1]
    nearer = by_unlikely + halves[0] < by_themselves - halves[1]
    text = f"Tokens with π < .25 are {percent(share)} of all, and their gradient is {ratio[0]:.1f} "
    text += f"times as long as that of π ≥ .75 (the paper: 4.8). An update on them alone moves the "
    text += f"likely tokens {by_unlikely:.2f} times as far as the whole update, one on the likely "
    text += f"tokens {by_themselves:.2f} times. "
    if larger and further:
        return f"{text}Your model has the problem, as the paper's has."
    if not larger:
        return f"{text}The unlikely tokens do not surely dominate."
    rest = "less far than their own update" if nearer else "not surely further"
    return f"{text}Their gradient is larger, but it moves the others {rest}."


def reweighting_sentence(alpha, gain, half):
    """
    >>> reweighting_sentence(0.3, 0.035, 0.075)
    'AR at α = 0.3: expected gain 4 % (−4 to 11 %). Nothing to expect.'
    """
    return f"AR at α = {alpha:g}: expected gain {between(gain, half)}. {verdict(gain, half)}"


def split_sentence(eta, own, adam):
    """Lopti: (gain, half) with a step of its own for each pass; (ratios, halves) with one AdamW."""
    (distance, _, per_length), (_, _, half) = adam
    text = f"Lopti at η = {eta:g}, a step of its own length for each pass: expected gain "
    text += f"{between(*own)}. {verdict(*own)} With one AdamW: a step {distance:.2f} times as long "
    text += f"as GRPO's, for each length {between(per_length - 1, half)} more progress. "
    said = {"A gain": "A longer and a better step.", "A loss": "A longer and a worse step."}
    return text + said.get(verdict(per_length - 1, half)[:6], "A longer step, and no better one.")


def shown(values, digits=2):
    """(value, half) of one number or of several → cells '0.12 ± 0.03'."""
    pairs = zip(*map(np.atleast_1d, values))
    cells = [f"{value:.{digits}f} ± {half:.{digits}f}" for value, half in pairs]
    return [cell.replace("-", "−") if "nan" not in cell else "?" for cell in cells]


def line(name, cells, width=16):
    return f"{name:<42}" + "".join(f"{cell:>{width}}" for cell in cells)


def report(found, adam, moved, eta, alphas, alpha):
    """All that is printed, as lines of text."""
    scale = lambda name, factor: tuple(factor * np.array(pair) for pair in found[name])
    lines = ["\n== Has it the problem? (Figs. 1 to 3; the paper's numbers are of a 7B model)"]
    lines.append(line("", BINS))
    for label, name, digits in (
        ("share of tokens", "share", 3),
        ("‖gradient‖, all tokens = 1", "norm", 2),
    ):
        lines.append(line(f"{label}, here", shown(found[name], digits)))
        lines.append(line("    the paper", [f"{x:.2f}" for x in PAPER[name]]))
    lines.append("rewarded tokens that rise in one step of AdamW")
    for name in ("GRPO", "two plain steps", "AR", "Lopti"):
        lines.append(line(f"    {name}, here", shown(moved[name], 3)))
        if name in PAPER:
            lines.append(line("    the paper", [f"{x:.3f}" for x in PAPER[name]]))
    lines.append("how far an update moves tokens with π ≥ .75, the whole update = 1")
    for name, cell, paper in zip(
        ("π < .25 alone", "π ≥ .75 alone"), shown(moved["moved"]), ("near 1", "much smaller")
    ):
        lines.append(line(f"    {name}, here", [cell, f"paper: {paper}"], 20))
    ratio, share = found["norm ratio"], found["share"][0][0]
    lines.append("\n" + problem_sentence(share, ratio, moved["moved"]))

    lines.append(
        "\n== Would AR help? It gains where the signal sits at likelier tokens than energy"
    )
    lines.append(line("", BINS))
    lines.append(line("share of the energy", shown(found["energy"])))
    lines.append(line("share of the signal", shown(found["signal"])))
    lines.append(line("cross terms between bins, left out", shown(found["left out"])))
    for label, name in (("E_s[π]", "E_s"), ("E_v[π]", "E_v"), ("E_s − E_v", "criterion")):
        lines.append(line(label, shown(found[name])))
    lines.append(line("", [f"α = {x:g}" for x in alphas]))
    for label, name in (
        ("gain in %, predicted", "predicted"),
        ("gain in %, measured", "measured"),
        ("gain in %, measured, without the bias", "without bias"),
    ):
        lines.append(line(label, shown(scale(name, 100), 1)))
    lines.append(line("bias along ∇J, signal = 1", shown(found["bias"])))
    lines.append(line("length of the expected bias, ‖∇J‖ = 1", shown(found["bias length"])))
    gains = [pair[alphas.index(alpha)] for pair in found["measured"]]
    lines.append("\n" + reweighting_sentence(alpha, *gains))

    lines.append(f"\n== Would Lopti help? (η = {eta:g})")
    for label, name in (
        ("σ, the likely tokens' share of signal", "sigma"),
        ("φ in degrees, tan φ = ‖g_high‖/‖g_low‖", "phi"),
        ("cosine of the passes' gradients", "cosine"),
        ("threshold: it gains if σ is above", "threshold"),
    ):
        lines.append(line(label, shown(found[name])))
    lines.append("    (from the paper's norms: φ = 19 degrees, threshold .18)")
    for label, name in (
        ("each pass its own step: gain in %, predicted", "split predicted"),
        ("    measured", "split measured"),
        ("    measured, without the bias", "split without bias"),
    ):
        lines.append(line(label, shown(scale(name, 100), 1)))
    lines.append(line("", ("π < η", "π ≥ η")))
    both = scale("pass gains", 100)
    lines.append(line("one pass alone: gain in %", shown(both, 1)[:2]))
    lines.append(line("    without the bias", shown(both, 1)[2:]))
    lines.append(line("bias along ∇J, signal = 1", shown(found["pass bias"])))
    lines.append(line("length of the expected bias, ‖∇J‖ = 1", shown(found["pass bias length"])))
    lines.append(line("GRPO with AdamW = 1", ("distance", "progress", "per distance")))
    for name, values in adam.items():
        lines.append(line(f"    Lopti, {name}", shown(values)))
    lines.append("\n" + split_sentence(eta, found["split measured"], adam["one AdamW"]))
    return "\n".join(lines)


def draw(found, adam, alphas, title, path):
    """The three answers in one picture."""
    import matplotlib.pyplot as plt
    from style import COLORS

    colors = (COLORS["low"], "#E9A66B", "#8FB8DE", COLORS["high"])
    figure, axes = plt.subplots(1, 3, figsize=(18, 5.6), width_ratios=(1, 1, 1.2))
    places = np.arange(4)
    for axis, left, right, names in (
        (axes[0], (PAPER["norm"], None), found["norm"], ("the paper, 7B", "here")),
        (axes[1], found["energy"], found["signal"], ("energy", "signal")),
    ):
        axis.bar(places - 0.2, left[0], 0.38, yerr=left[1], color=colors, alpha=0.45, capsize=3)
        axis.bar(places + 0.2, right[0], 0.38, yerr=right[1], color=colors, capsize=3)
        axis.bar(0, 0, color="grey", alpha=0.45, label=names[0])
        axis.bar(0, 0, color="grey", label=names[1])
        axis.axhline(0, color="black", linewidth=1)
        axis.set_xticks(places, BINS, fontsize=13)
        axis.legend()
    axes[0].set(title="Length of the gradient", ylabel="‖gradient‖, all tokens = 1")
    axes[1].set(title="Where energy and signal sit", ylabel="share of the whole")
    rows = [
        (f"AR, α = {x:g}", [[v[i] for v in found[name]] for name in ("predicted", "measured")])
        for i, x in enumerate(alphas)
    ]
    names = ("split predicted", "split measured")
    rows.append(("Lopti, a step\nfor each pass", [found[name] for name in names]))
    values, halves = adam["one AdamW"]
    rows.append(("Lopti, one AdamW", [None, (values[2] - 1, halves[2])]))
    for y, (name, pairs) in enumerate(rows):
        for pair, face, shift in zip(pairs, ("white", "black"), (-0.12, 0.12)):
            if pair is not None:
                style = {"fmt": "o", "color": "black", "markerfacecolor": face, "capsize": 4}
                axes[2].errorbar(100 * pair[0], y + shift, xerr=100 * pair[1], **style)
    axes[2].plot([], [], "o", color="black", markerfacecolor="white", label="predicted")
    axes[2].plot([], [], "o", color="black", label="measured")
    axes[2].axvline(0, color="black", linewidth=1)
    axes[2].set_yticks(range(len(rows)), [name for name, _ in rows])
    axes[2].invert_yaxis()
    axes[2].set(title="Progress for each length, over GRPO's", xlabel="gain in %, 95 % interval")
    axes[2].legend()
    figure.suptitle(title)
    figure.savefig(path)
    plt.close(figure)


# ---- the command


def diagnose(args, batches, plot=None):
    """Sample, measure, print."""
    started = time.process_time()
    eta, alpha = args.eta or 0.5, args.alpha or 0.3
    alphas = sorted({*ALPHAS, alpha})
    if os.environ.get("LOPTI_QUICK"):
        batches, args.prompts_per_step = min(batches, 6), min(args.prompts_per_step, 8)
    device = lopti.choose_device(args.device)
    if args.dtype == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(False)
        args.dtype = "bfloat16" if fast else "float32"
    policy, tokenizer = lopti.load_model(args.model, device)
    rows, held_out = lopti.load_data(args, tokenizer)
    lopti.check_model(policy, tokenizer, rows + held_out, args)
    torch.manual_seed(args.seed)
    prompts = lopti.prompt_stream(rows, args.prompts_per_step, args.seed)
    size = args.mini_batch_size or args.prompts_per_step * args.group_size
    planned = batches * math.ceil(args.prompts_per_step * args.group_size / size)
    weights = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    exact = 4.0 * weights * planned * (len(cuts_of(eta)) + 3) <= MEMORY
    vectors, at_logits, counts, moved, right = [], [], [], [], []
    progress = tqdm(total=planned, desc="mini-batches", disable=None)
    for _ in range(batches):
        rollout, rewards, _ = collect(policy, tokenizer, next(prompts), args)
        right.append(float((rewards >= args.solved_reward).float().mean()))
        for indices in torch.arange(len(rollout.mask)).split(size):
            progress.update()
            batch = rollout.rows(indices)
            if not batch.advantages.any():
                continue
            keep = flatten if exact else compress
            parts, energies = gradients(policy, batch, args, eta, keep)
            vectors.append(parts)
            at_logits.append(energies)
            pi = batch.old_logprobs[batch.mask].exp().cpu()
            counts.append(torch.histogram(pi.float(), torch.tensor(EDGES)).hist)
            if len(vectors) % 4 == 1:
                whole = parts[: len(cuts_of(eta)), : None if exact else BUCKETS].sum(0)
                norm = float(whole.norm())
                moved.append(moves(policy, batch, args, eta, alpha, norm))
    progress.close()
    accuracy, used = sum(right) / len(right), len(vectors)
    if used < max(3, planned / 2):
        raise lopti.UserError(
            f"only {used} of {planned} mini-batches have a group with unequal rewards, "
            f"with {percent(accuracy)} of the answers right: nothing can be learned or measured "
            "there. Take easier --data, or raise --prompts-per-step or --group-size"
        )
    vectors = torch.stack(vectors)
    inner = vectors if exact else vectors[:, :, :BUCKETS]
    entries = vectors[:, :, :: math.ceil(weights / ENTRIES)] if exact else vectors[:, :, BUCKETS:]
    at_logits, counts = (torch.stack(values).numpy() for values in (at_logits, counts))
    with np.errstate(invalid="ignore"):
        of = statistics(gram_matrix(inner), at_logits, counts, eta, alphas)
        found = jackknife(of, used)
    low = [i for i, (_, high) in enumerate(cuts_of(eta)) if high <= eta]
    high = [i for i, (start, _) in enumerate(cuts_of(eta)) if start >= eta]
    adam = adam_statistics(*(entries[:, pieces].sum(1) for pieces in (low, high)))
    adam = jackknife(adam, used)
    by_name = {name: np.array([one[name] for one in moved]) for name in moved[0]}
    mean = lambda chosen: {name: values[chosen].mean(0) for name, values in by_name.items()}
    moved = jackknife(mean, len(moved))
    kept = "gradients kept whole" if exact else f"gradients kept as sketches of {BUCKETS} buckets"
    print(f"{used} mini-batches of {size} responses, {percent(accuracy)} right, {kept}")
    print(report(found, adam, moved, eta, alphas, alpha))
    print(f"\n{time.process_time() - started:.0f} s of processor time")
    if plot:
        draw(found, adam, alphas, f"{Path(args.model).name}, {used} mini-batches", plot)


def main(argv=None):
    parser = lopti.Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--batches", type=lopti.number(int, 1), default=12)
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options, flags = parser.parse_known_args(argv)
    diagnose(lopti.parse_arguments(flags), options.batches, options.plot)


if __name__ == "__main__":
    with told_in_a_sentence():
        main()
