"""How large a token's gradient is (Prop. 4.2), when AR and Lopti can help. Not used in training."""

import copy
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti  # isort: skip, before torch

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


def updated_copy(policy, rollout, stages, args, make_optimizer=lopti.make_optimizer):
    """Yields one copy of the policy, with one new optimizer, after the update on each stage."""
    optimizer = make_optimizer(trained := copy.deepcopy(policy), args)
    for tokens in stages:
        lopti.update(trained, optimizer, rollout, tokens, args)
        yield trained


# ---- What AR and Lopti make of it (not in the paper)
# g_t is token t's part of the gradient of Eq. 1 at the policy that sampled, J the expected reward.
# Its *signal* is s_t = ⟨∇J, E g_t⟩, its *energy* v_t = E‖g_t‖². *Unit progress* is what a step of
# length 1 adds to J to first order: the learning rate and the clip of the norm fix the length.


def unit_progress(probabilities, signals, energies, alpha=0.0):
    """Unit progress of AR: Σ s·m / √(Σ v·m²), m = 1 - α(1-π). All inputs (tokens,) → a scalar.

    Assumes that the tokens' gradients are orthogonal on average (no cross terms), and that the mean
    of g/‖g‖ is the mean of g over the root of the mean of ‖g‖². In units of J per unit of length.
    If no signal is negative, it is at most 1/(1-α) times that of α = 0.

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
