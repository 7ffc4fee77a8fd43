"""How large a token's gradient is (Prop. 4.2), when AR and Lopti can help. Not used in training."""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti  # isort: skip, before torch  # noqa: F401

import torch


def logit_gradient_norm(logits, ids):
    """‖∇_z log π_j‖ = sqrt((1-π_j)² + Σ_{k≠j} π_k²), logits z (..., V), ids j (...): Prop. 4.2."""
    probabilities = logits.softmax(-1)
    chosen = torch.nn.functional.one_hot(ids, logits.shape[-1])
    return (chosen - probabilities).norm(dim=-1)  # ∇_z log π_j = e_j - π


def logit_gradient_bounds(probabilities, vocabulary_size):
    """(lower, upper) of Prop. 4.2: √(N/(N-1))·(1-π) ≤ ‖∇_z log π‖ ≤ √2·(1-π), vocabulary N."""
    room = 1 - probabilities
    return math.sqrt(vocabulary_size / (vocabulary_size - 1)) * room, math.sqrt(2) * room


# ---- What AR and Lopti make of it (not in the paper)
# g_t is token t's part of the gradient of Eq. 1 at the policy that sampled, J the expected reward.
# Its *signal* is s_t = ⟨∇J, E g_t⟩, its *energy* v_t = E‖g_t‖². *Unit progress* is what a step of
# length 1 adds to J to first order: the learning rate and the clip of the norm fix the length.


def unit_progress(probabilities, signals, energies, alpha=0.0):
    """Unit progress of AR: Σ s·m / √(Σ v·m²), m = 1 - α(1-π). All inputs (tokens,) → a scalar.

    Assumes that the tokens' gradients are orthogonal on average (no cross terms), and that the mean
    of g/‖g‖ is the mean of g over the root of the mean of ‖g‖². In units of J per unit of length.

    >>> pi, s, v = torch.tensor([0.9, 0.1]), torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    >>> unit_progress(pi, s, v), unit_progress(pi, s, v, alpha=1.0)  # all signal at the likely one
    (tensor(0.7071), tensor(0.9939))
    """
    weights = 1 - alpha * (1 - probabilities)
    return (signals * weights).sum() / (energies * weights**2).sum() ** 0.5


def reweighting_criterion(probabilities, signals, energies):
    """The derivative of log `unit_progress` at α = 0: E_s[π] - E_v[π]. AR gains if it is positive.

    E_s and E_v are means weighted by signal and by energy. It decides for small α. If no signal is
    negative, a criterion ≤ 0 means no gain at any α, and one > 0 a gain up to
    α = 2(E_s[π] - E_v[π]) / (E_v[(1-π)²] - (1-E_s[π])²), beyond which AR loses. All this for a
    first step of fixed length, without cross terms.

    Without AR's bias it is E_s[π] - E_v[π] + noise/Σv - bias/Σs. With c = ½∇Σπ² at a prefix α·Â·c
    is subtracted: bias = Σ V·⟨∇J, c⟩ leaves the derivative of the progress, noise =
    Σ ⟨E[Â²∇log π], c⟩ half of the energy's; noise is 0 where Â² is the same for all tokens.

    >>> reweighting_criterion(*torch.tensor([[0.9, 0.1], [1.0, 0.0], [1.0, 1.0]]))
    tensor(0.4000)
    """
    by_signal = (signals * probabilities).sum() / signals.sum()
    return by_signal - (energies * probabilities).sum() / energies.sum()


def world_moments(world, words, weights, responses, group_size):
    """Signals (M,) and inner products (M, M) of gradients in which a token counts m(π), M times.

    Of world.py's worlds with a table of logits, up to O(1/G) of the values; `words` (K,) are the
    probabilities of the synonyms. Unit progress is signal / √(product with itself). A right token
    has the share q = 1-p of its decision's signal, a wrong one p: E_s[π] = 2pq, so the better the
    policy, the more its unlikely wrong tokens carry. Where words dominate, AR gains if and only if
    2pq > 1/K; without words every α is the same. Group advantages add up to 0, so the noise of a
    row is a variance, the second moment of m(e - π) minus its mean's square.

    >>> from types import SimpleNamespace
    >>> world = SimpleNamespace(accuracy=0.6, decisions=10, wording=100, late=False)
    >>> words, weights = torch.full((8,), 1 / 8), [torch.ones_like, lambda pi: pi]
    >>> signals, products = world_moments(world, words, weights, 64, 64)
    >>> signals / signals[0], products[0] / products[0, 0]  # 1 and E_s[π], 1 and E_v[π]
    (tensor([1.0000, 0.4800]), tensor([1.0000, 0.2250]))
    """
    p, n = words.new_tensor(world.accuracy), responses
    signals = torch.stack([(1 - p) * m(p) + p * m(1 - p) for m in weights])
    # A group's own mean and deviation take (1 - 1/G) and (1 - 1/4(G-1))² from the mean gradient.
    mean_part = (1 - 1 / group_size) * (1 - 1 / (4 * group_size - 4)) ** 2 - 1 / n
    products = 2 * p * (1 - p) * mean_part * torch.outer(signals, signals)
    rows = [(world.decisions, 1.0, torch.stack([p, 1 - p]))]
    branches = (p, 1 - p) if world.late else (1.0,)  # how often a row of wording is visited
    rows += [(world.wording, visits, words) for visits in branches]
    for number, (count, visits, pi) in enumerate(rows):
        scores, weighted = torch.eye(len(pi)).to(pi) - pi, torch.stack([m(pi) for m in weights])
        means = (weighted * pi) @ scores  # Σ_a m π (e_a - π) = ∇ Σ m π
        second = (weighted * pi * scores.square().sum(1)) @ weighted.T
        products += count / n * (visits * second - visits**2 * means @ means.T)
        if number and world.late:  # the bias: V(s) ∇ Σ m π at every wording token
            products += count * p * (1 - p) / world.decisions * mean_part * means @ means.T
    return signals, products


def best_slope(signals, energies):
    """The λ at which a step along g + λ·d makes most unit progress: (s_d/v_d) / (s_g/v_g).

    g is GRPO's gradient and d what a weight linear in π adds to it, without its part along g, so
    that ⟨g, d⟩ = 0. `signals` are (s_g, s_d), `energies` (v_g, v_d). Unit progress is
    (s_g + λ·s_d) / √(v_g + λ²·v_d); its derivative is 0 where s_d·v_g = λ·s_g·v_d. The gain of that
    step is √(1 + (s_d²/v_d) / (s_g²/v_g)), never below 1. λ < 0: unlikely tokens should weigh more.

    >>> best_slope((1.0, 0.5), (4.0, 1.0))
    2.0
    """
    return (signals[1] / energies[1]) / (signals[0] / energies[0])


class MeasuredAlpha:
    """AR whose α is measured while it trains: a weight linear in π, without its bias (ours).

    It is given two gradients of each mini-batch, GRPO's g and g_π, in which a token weighs π (its
    bias subtracted). With b = ⟨g, g_π⟩/‖g‖² and d = g_π - b·g, the products of g and of d with M, a
    mean of *earlier* g that stands for ∇J, estimate the signals of `best_slope`, their squares the
    energies. All are running means over earlier mini-batches, so that the weights do not depend on
    what they weigh. λ is shrunk by 1 - (standard error of ⟨d, M⟩ / ⟨d, M⟩)², at least 0, and kept
    where no token's weight 1 + λ(π - b) is negative: from -1/(1-b), the weight 1 - π up to a
    factor, to 1/b, the weight π, which is α = 1.
    """

    DECAY = 0.9  # of the running means, as AdamW's β₁

    def __init__(self):
        self.past, self.sums = (0.0, 0.0), (0.0, 0.0, 0.0)  # Σ w·x, Σ w, and Σ w² for the error

    def __call__(self, gradient, by_pi):
        """g, g_π (..., P) → the step's gradient, and how much of the weight tokens with π = 0 have:

        their weight over the sum of theirs and that of tokens with π = 1 (...): 0 for α = 1, ½ for
        GRPO, 1 for the weight 1 - π.
        """
        energy = (gradient**2).sum(-1) + 1e-30
        b = (gradient * by_pi).sum(-1) / energy
        rest, slope = by_pi - b[..., None] * gradient, torch.zeros_like(b)
        total, weight, squares = self.sums
        if weight**2 > 1.5 * squares:  # as good as two mini-batches
            of_g, of_d, energy_g, energy_d, square = total / weight
            variance = (square - of_d**2) / (weight**2 / squares - 1)  # of the mean
            shrunk = (1 - variance / (of_d**2 + 1e-30)).clamp(min=0)
            slope = shrunk * best_slope((of_g, of_d), (energy_g, energy_d + 1e-30))
            slope = torch.where(of_g > 0, slope, 0.0).clamp(-1 / (1 - b), 1 / b.clamp(min=1e-6))
        if self.past[1]:
            mean = self.past[0] / self.past[1]
            of_d = (rest * mean).sum(-1)
            products = (gradient * mean).sum(-1), of_d, energy, (rest**2).sum(-1), of_d**2
            kept = self.DECAY * total, self.DECAY * weight, self.DECAY**2 * squares
            self.sums = kept[0] + torch.stack(products), kept[1] + 1, kept[2] + 1
        self.past = self.DECAY * self.past[0] + gradient, self.DECAY * self.past[1] + 1
        of_unlikely = (1 - slope * b) / (2 + slope * (1 - 2 * b))
        return gradient + slope[..., None] * rest, of_unlikely


def split_gain(sigma, phi, cosine=0.0):
    """Unit progress of Lopti's two steps of length 1 over GRPO's. Numbers → a number.

        gain = [(1-σ)/cos φ + σ/sin φ]·√(1 + c·sin 2φ) / √(2 + 2c)

    σ: the likely tokens' share of the signal. φ in radians: tan φ = ‖g_high‖/‖g_low‖. c: the cosine
    between the two; √(2 + 2c) is how far the two steps lead. Assumes that each step has a length of
    its own, which one AdamW denies (`adam_drift`), and that the first leaves the second's gradient
    as it was: so the order does not enter.

    >>> round(split_gain(sigma=0.3, phi=math.radians(19)), 3)
    1.175
    """
    sum_of_cosines = (1 - sigma) / math.cos(phi) + sigma / math.sin(phi)
    return sum_of_cosines * math.sqrt((1 + cosine * math.sin(2 * phi)) / (2 + 2 * cosine))


def split_threshold(phi, cosine=0.0):
    """The σ at which `split_gain` is 1: Lopti gains above it if φ < 45°, below it if φ > 45°.

    >>> round(split_threshold(math.radians(19)), 3)  # the paper's norms, 7B, Fig. 1d
    0.177
    """
    at_0, at_1 = (split_gain(sigma, phi, cosine) for sigma in (0, 1))
    return (1 - at_0) / (at_1 - at_0)  # the gain is linear in σ


def adam_drift(means, squares):
    """The mean step per batch of one AdamW that alternates between stages; in learning rates.

        Σ_stages E[g] / √(mean over stages of E[g²]),   for each parameter

    E[g] and E[g²] of each stage: lists of (..., P) → (..., P). Assumes a policy that stands still,
    many batches, β₂ → 1, no clip, no weight decay; β₁ does not enter. GRPO is one stage. Lopti is
    two, low and high, for each parameter √2 times GRPO's step where these are uncorrelated and 2
    times where they are equal: a longer step of GRPO. With an AdamW for each stage it is the sum of
    the drifts of low and of high.

    >>> low, high = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])  # of a single batch
    >>> adam_drift([low + high], [(low + high) ** 2]), adam_drift([low, high], [low**2, high**2])
    (tensor([1., 1.]), tensor([1.4142, 1.4142]))
    """
    return sum(means) / (sum(squares) / len(squares)) ** 0.5
