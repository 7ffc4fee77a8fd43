"""What each token weighs in the gradient: Eq. 2, and Prop. 4.2 at the logits.

Training never calls these (autograd does the work); the report and the tests do.
"""

import math

import torch


def gradient_weight(
    logprobs,
    old_logprobs,
    advantages,
    *,
    ref_logprobs=None,
    clip_low=0.2,
    clip_high=0.24,
    clip_dual=10.0,
    kl_coef=0.001,
):
    """w of Eq. 2: the gradient of Eq. 1 is 1/N Σ w·∇log π_θ. (B, L) → (B, L)

        w = r·Â·1[trust] + β·π_ref/π_θ - β

    1[trust] is 0 where a clip takes the constant branch; the KL part is 0 outside the clamps of
    `kl_estimate`.
    """
    ratio = (logprobs - old_logprobs).exp()
    too_low, too_high = ratio < 1 - clip_low, ratio > 1 + clip_high
    trusted = torch.where(advantages > 0, ~too_high, ~too_low & (ratio < clip_dual))
    weight = ratio * advantages * trusted
    if ref_logprobs is not None and kl_coef:
        difference = ref_logprobs - logprobs
        inside = (difference.abs() < 5) & (difference.exp() - difference - 1 < 10)
        weight = weight + kl_coef * (difference.exp() - 1) * inside
    return weight


def logit_gradient_norm(logits, ids):
    """‖∇_z log π_j‖ = sqrt((1-π_j)² + Σ_{k≠j} π_k²), logits z (..., V), ids j (...): Prop. 4.2."""
    probabilities = logits.softmax(-1)
    chosen = torch.nn.functional.one_hot(ids, logits.shape[-1])
    return (chosen - probabilities).norm(dim=-1)  # ∇_z log π_j = e_j - π


def logit_gradient_bounds(probabilities, vocabulary_size):
    """(lower, upper) of Prop. 4.2: √(N/(N-1))·(1-π) ≤ ‖∇_z log π‖ ≤ √2·(1-π), vocabulary N."""
    room = 1 - probabilities
    return math.sqrt(vocabulary_size / (vocabulary_size - 1)) * room, math.sqrt(2) * room
