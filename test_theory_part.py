"""The theory's tests, to stand in test_lopti.py beside the laboratory's."""

import doctest
import math
import sys
from pathlib import Path

import pytest
import torch

import lopti

sys.path[:0] = [str(Path(__file__).resolve().parent / "data" / "lab")]

import theory
import variants


def binary_world(p, decisions, words, synonyms, responses, alpha=0.0, batches=500):
    """Sampled gradients (batches, P): of unlikely tokens (wrong ones, words), of likely ones."""
    torch.manual_seed(0)
    right = (torch.rand(batches * responses, decisions) < p).float()
    said = torch.randint(synonyms, (batches * responses, words))
    said = torch.nn.functional.one_hot(said, synonyms).flatten(1) - 1 / synonyms
    advantages = lopti.group_advantages(right.sum(1), responses)[:, None]
    pi = torch.tensor([[p, 1 - p, 1 / synonyms]])  # of a right token, a wrong one, a word
    factors = lopti.reweight_advantages(advantages, pi.log(), alpha).T[..., None]
    pairs = right * (1 - p), (right - 1) * p  # ∇ log π at the logit of right; of wrong: minus it
    scores = [torch.cat([pair, -pair], 1) for pair in pairs] + [said]
    means = [(x * y).view(batches, responses, -1).mean(1) for x, y in zip(factors, scores)]
    return torch.cat(means[1:], 1), torch.cat([means[0], 0 * means[2]], 1)


@pytest.mark.parametrize("p, words, synonyms", [(0.8, 0, 8), (0.6, 100, 8), (0.9, 100, 3)])
def test_progress_in_the_binary_world(p, words, synonyms):
    """AR's closed form and the split's gain on sampled groups; without words all is parallel."""
    world = (p, 10, words, synonyms, 64)
    unit = lambda x: (x[:, :10] - x[:, 10:20]).sum(1) / x.norm(dim=1) * (p * (1 - p) / 10) ** 0.5
    low, high = binary_world(*world)
    plain, reweighted = (unit(x).mean() for x in (low + high, sum(binary_world(*world, 0.3))))
    expected = [theory.binary_world_progress(*world, alpha) for alpha in (0, 0.3)]
    assert plain == pytest.approx(expected[0], rel=0.02)
    assert reweighted / plain == pytest.approx(expected[1] / expected[0], abs=1e-3)
    low_2, high_2, both = (
        (x * y).sum(1).mean() for x, y in ((low, low), (high, high), (low, high))
    )
    cosine, phi = float(both / (low_2 * high_2).sqrt()), math.atan((high_2 / low_2).sqrt())
    assert words or cosine == pytest.approx(1)
    for passes, length in ((1, (2 + 2 * cosine) ** 0.5), (2, 2)):
        gain = theory.split_gain(1 - p, phi, cosine, passes)
        assert (unit(low) + unit(high)).mean() / plain / length == pytest.approx(gain, rel=0.01)


def test_drift_of_adamw_that_alternates():
    """AdamW itself, on 2000 batches of correlated stages."""
    torch.manual_seed(0)
    shared, low, high = torch.randn(3, 2000, 20) + torch.randn(3, 1, 20)
    for stages in ([shared + low], [low, high], [shared + low, shared], [shared + low] * 2):
        weights = torch.zeros(20, requires_grad=True)
        optimizer = torch.optim.AdamW([weights], lr=1 / 2000, weight_decay=0.0)
        for gradient in torch.stack(stages, 1).flatten(0, 1):
            weights.grad = -gradient
            optimizer.step()
        assert weights.tolist() == pytest.approx(theory.adam_drift(*stages).tolist(), abs=0.03)


def tabular_world():
    """Two steps of three actions; the second state is by the first action. V(s) is not 0.

    Logits (4, 3), the Â of all responses (9,), Q (4, 3), V (4,), chances of the states (4, 1).
    """
    torch.manual_seed(0)
    logits, advantages = torch.randn(4, 3).double(), torch.randn(9).double()
    pi, later = logits.softmax(1), advantages.view(3, 3)
    values = torch.cat([(pi[1:] * later).sum(1)[None], later])
    visits = torch.cat([torch.ones(1), pi[0]])[:, None]
    return logits, advantages, values, (pi * values).sum(1), visits


def moments(logits, advantages, alpha=0.0, eta=0.0, stage="all", mass=None, now=None):
    """E g (4, 3) and E‖g‖² over all responses, by `lopti`, less that of Â Σ mass; π_θ is `now`."""
    now = (logits if now is None else now).clone().requires_grad_()
    mean, energy = 0, 0
    for number, advantage in enumerate(advantages):
        first, second = divmod(number, 3)
        states, actions = [0, 1 + first], [first, second]
        old, new = (z.log_softmax(1)[states, actions][None] for z in (logits, now))
        mask = torch.ones_like(old, dtype=torch.bool)
        low, high = lopti.split_tokens(old, mask, eta)
        tokens = {"all": mask, "low": low, "high": high}[stage]
        weighted = lopti.reweight_advantages(advantage.expand(1, 2), old, alpha)
        loss, _ = lopti.policy_loss(new, old, weighted, mask, tokens=tokens, normalizer=1)
        loss = loss + (advantage * mass(now)[states].sum() if mass else 0)
        [gradient] = torch.autograd.grad(-loss, now)
        mean = mean + old.sum().exp() * gradient
        energy = energy + old.sum().exp() * gradient.square().sum()
    return mean, energy


CASES = [(1.0, 0.0, "all"), (0.3, 0.0, "all"), (0.0, 0.35, "low"), (0.3, 0.35, "high")]


@pytest.mark.parametrize("alpha, eta, stage", CASES)
def test_the_bias_of_a_weight(alpha, eta, stage):
    """The expected gradient, exactly: with the bias, without, after a step; and the variance."""
    logits, advantages, values, value, visits = tabular_world()
    world, pi = (logits, advantages, alpha, eta, stage), logits.softmax(1)
    weights = (1 - alpha * (1 - pi)) * {"all": pi >= 0, "low": pi < eta, "high": pi >= eta}[stage]
    mass = lambda z: (weights * z.softmax(1)).sum(1)
    current = lambda z: variants.weighted_mass(z, alpha, eta, stage)
    bias, total = theory.weight_bias(logits, weights, value), lambda z: (value * mass(z)).sum()
    steps = 1e-6 * torch.eye(12).double().view(12, 4, 3)
    slopes = [float(total(logits + step) - total(logits - step)) / 2e-6 for step in steps]
    assert bias.flatten().tolist() == pytest.approx(slopes)
    other = theory.weight_bias(logits, 1 - alpha * (1 - pi) - weights, value)
    assert (bias + other - theory.weight_bias(logits, alpha * pi, value)).abs().max() < 1e-12
    signal = lambda z: visits * theory.expected_gradient(z, weights * (values - value[:, None]))
    assert (moments(*world, current)[0] - signal(logits)).abs().max() < 1e-12
    assert (moments(*world)[0] - signal(logits) - visits * bias).abs().max() < 1e-12
    assert bias.abs().max() > 0.01
    now = logits + 0.1 * signal(logits) / signal(logits).norm()  # later mini-batches: m of π_old,
    left = [(moments(*world, one, now)[0] - signal(now)).norm() for one in (mass, current)]
    assert left[0] < 1e-12 < left[1] < 0.1 * (visits * bias).norm()  # or of π_θ: nearly
    world = (logits, advantages.sign(), *world[2:])  # where Â² = 1 the energy falls:
    lower = (visits * theory.expected_gradient(logits, weights) ** 2).sum()
    assert float(moments(*world)[1] - moments(*world, mass)[1]) == pytest.approx(float(lower))


def test_the_condition_for_ar():
    """The derivative of log unit progress at α = 0, with the bias and without, by enumeration."""
    logits, advantages, values, value, visits = tabular_world()
    slope, pi, later = moments(logits, advantages)[0], logits.softmax(1), advantages.view(3, 3) ** 2
    scores = torch.eye(3) - pi[:, None]  # ∇ log π: (states, actions, logits)
    squares = torch.cat([(pi[1:] * later).sum(1)[None], later])  # E[Â² | s, a]
    signals = visits * pi * values * (scores * slope[:, None]).sum(2)
    energies = visits * pi * squares * scores.square().sum(2)
    sharper = theory.expected_gradient(logits, pi)  # ∇½Σπ²
    bias = (visits * value[:, None] * slope * sharper).sum()
    noise = (visits * theory.expected_gradient(logits, squares) * sharper).sum()

    def progress(alpha, corrected):
        mass = (lambda z: variants.weighted_mass(z, alpha, 0.0, "all")) if corrected else None
        mean, energy = moments(logits, advantages, alpha, mass=mass)
        return float((mean * slope).sum() / energy.sqrt())

    found = theory.unit_progress(pi, signals, energies, alpha=0.5)
    assert float(found) == pytest.approx(progress(0.5, False))
    for corrected, terms in ((False, ()), (True, (bias, noise))):
        found = math.log(progress(1e-5, corrected) / progress(-1e-5, corrected)) / 2e-5
        criterion = theory.reweighting_criterion(pi, signals, energies, *terms)
        assert float(criterion) == pytest.approx(found, rel=1e-4)


def test_examples_in_the_theorys_docstrings():  # then in MODULES
    assert doctest.testmod(theory).attempted and not doctest.testmod(theory).failed
