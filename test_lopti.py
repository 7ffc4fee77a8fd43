"""Checks every formula against a computation of its own, every known pitfall, and the program end to end.

    python -m pytest -q

Where a folder with the paper's own numbers and real puzzles stands beside this one (../shared), those are checked
too; without it these tests are skipped and the others still pass.
"""

import copy
import doctest
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from ast import literal_eval
from collections import Counter
from dataclasses import replace
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test asks the hub

import pytest
import torch
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel,
    GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM, Qwen2Config, Qwen2ForCausalLM,
)  # fmt: skip

import lopti
import rewards
from lopti import Arguments, Rollout
from rewards import (
    answers_match,
    extract_boxed,
    kk_reward,
    math_reward,
    names_and_roles,
    parse_roles,
)

ROOT = Path(__file__).resolve().parent
SHARED = ROOT.parent / "shared"
TINY = ROOT / "data" / "tiny"
sys.path[:0] = [str(ROOT / "data" / folder) for folder in ("make", "lab")]

import golden  # noqa: E402
import puzzles  # noqa: E402


def shared_file(name):
    """The path of a file beside the project, or a skip."""
    if not (SHARED / name).exists():
        pytest.skip(f"{name} is not here")
    return SHARED / name


def read_jsonl(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


# ---------------------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def random_model(seed=0, **changes):
    """A small Llama with random weights over the bundled vocabulary; large weights, so that π is far from uniform."""
    torch.manual_seed(seed)
    settings = {"vocab_size": 273, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
                "num_key_value_heads": 2, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(6)
    return model.eval()


def random_rollout(model, seed=0, batch=12, prompt=7, response=9):
    """Random ids of random lengths, padded as `sample` pads them."""
    generator = torch.Generator().manual_seed(seed)
    prompt_lengths = torch.randint(2, prompt + 1, (batch, 1), generator=generator)
    response_lengths = torch.randint(1, response + 1, (batch, 1), generator=generator)
    prompt_lengths[0], response_lengths[-1] = prompt, response
    prompt_mask = torch.arange(prompt)[None] >= prompt - prompt_lengths
    mask = torch.arange(response)[None] < response_lengths
    vocabulary = model.config.vocab_size
    return Rollout(
        torch.randint(5, vocabulary, (batch, prompt), generator=generator) * prompt_mask,
        prompt_mask,
        torch.randint(5, vocabulary, (batch, response), generator=generator) * mask,
        mask,
        torch.zeros(batch, dtype=torch.bool),
        [""] * batch,
    )


def random_batch(model, seed=0, group_size=4, min_p=0.0):
    """A rollout with log-probabilities and advantages: what one training step hands to `update`."""
    rollout = random_rollout(model, seed)
    rollout.old_logprobs = lopti.score(model, rollout, 1.0, 60, min_p).logprobs
    rewards = torch.randn(len(rollout.mask), generator=torch.Generator().manual_seed(seed))
    rollout.advantages = lopti.group_advantages(rewards, group_size)[:, None] * rollout.mask
    noise = torch.randn(rollout.mask.shape, generator=torch.Generator().manual_seed(seed + 1)) * 0.3
    rollout.ref_logprobs = (rollout.old_logprobs + noise) * rollout.mask
    return rollout


def run_lopti(*flags, output=None):
    """The program in a process of its own: (exit code, standard output, standard error)."""
    where = ["--output", str(output)] if output else []
    command = [sys.executable, str(ROOT / "lopti.py"), *map(str, flags), *where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


SMALL = ("--steps", 2, "--people", 2, "--prompts-per-step", 2, "--group-size", 4, "--max-new-tokens", 120, "--mini-batch-size", 4,
         "--eval-size", 2, "--eval-samples", 2, "--quiet")  # fmt: skip


# ---------------------------------------------------------------------------------------------- advantages


def test_group_advantages_by_hand():
    values = [3.0, -0.5, -1.0, -3.0, 1.0, 2.0, 2.0, 7.0]
    expected = []
    for group in (values[:4], values[4:]):
        expected += [
            (value - statistics.mean(group)) / (statistics.stdev(group) + 1e-6) for value in group
        ]
    found = lopti.group_advantages(torch.tensor(values, dtype=torch.float64), 4)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.1, -3.0, 1e-8, 1e6 + 0.1])
def test_equal_rewards_get_exactly_zero(dtype, reward):
    """0.1 seven times has a mean that is not 0.1 in floating point: the advantages must be 0 all the same."""
    assert lopti.group_advantages(torch.full((7,), reward, dtype=dtype), 7).tolist() == [0.0] * 7


def test_groups_of_one_are_refused():
    with pytest.raises(ValueError, match="at least 2"):
        lopti.group_advantages(torch.ones(4), 1)


def test_reweighting_by_hand_and_off():
    old_logprobs = torch.tensor([[0.9, 0.04]], dtype=torch.float64).log()
    advantages = torch.tensor([[2.0, -3.0]], dtype=torch.float64)
    expected = [(0.3 * 0.9 + 0.7) * 2.0, (0.3 * 0.04 + 0.7) * -3.0]
    assert lopti.reweight_advantages(advantages, old_logprobs, 0.3)[0].tolist() == pytest.approx(
        expected, abs=1e-12
    )
    advantages, old_logprobs = torch.randn(50, 40), torch.rand(50, 40).log()
    assert torch.equal(lopti.reweight_advantages(advantages, old_logprobs, 0.0), advantages)


# ---------------------------------------------------------------------------------------------- the split


def test_split_is_strict_disjoint_and_complete():
    probabilities = torch.tensor(
        [[0.5, 0.4999, 0.9, 0.0001], [0.5, 0.2, 0.7, 0.3]], dtype=torch.float64
    )
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    low, high = lopti.split_tokens(probabilities.log(), mask, 0.5)
    assert low.tolist() == [[False, True, False, True], [False, True, False, False]]
    assert not (low & high).any() and torch.equal(low | high, mask)
    low, high = lopti.split_tokens(probabilities.log(), mask, 0.0)
    assert not low.any() and torch.equal(high, mask)


def test_stages_in_every_order():
    low, high, mask = (torch.tensor([[x]]) for x in (True, False, True))

    def names(**options):
        return [name for name, _ in lopti.update_stages(low, high, mask, **options)]

    assert names(eta=0) == ["all"]
    assert names(eta=0, passes=2) == ["all", "all"]
    assert names(eta=0.5) == ["low", "high"]
    assert names(eta=0.5, order="high-low") == ["high", "low"]
    assert names(eta=0.5, update_only="high") == ["high"]
    assert lopti.update_stages(low, high, mask, eta=0.5, update_only="low")[0][1] is low


# ---------------------------------------------------------------------------------------------- the loss

OUR_NAMES = {"old": "old_logprobs", "new": "new_logprobs", "ref": "ref_logprobs", "gradient": "gradient", "policy_loss": "policy_loss",
             "joint": "joint", "low": "low_stage", "high": "high_stage"}  # fmt: skip
PUBLISHED_NAMES = {"old": "old_logprob", "new": "new_logprob", "ref": "ref_logprob", "gradient": "grad_wrt_logprob",
                   "policy_loss": "pg_loss", "joint": "joint", "low": "low", "high": "high"}  # fmt: skip


def check_golden_case(case, names, advantages, reweighted, low_mask):
    """Advantages, split, loss, statistics and gradients of lopti.py against the numbers of one golden case, to 1e-9."""
    old_logprobs = tensor_of(case[names["old"]])
    mask = torch.arange(old_logprobs.shape[1])[None] < torch.tensor(case["lengths"])[:, None]
    found = lopti.group_advantages(tensor_of(case["rewards"]), case["group_size"])
    assert torch.allclose(found, advantages, atol=1e-9, rtol=0)
    found = lopti.reweight_advantages(found[:, None] * mask, old_logprobs, case["alpha"])
    assert torch.allclose(found, reweighted, atol=1e-9, rtol=0)
    assert torch.equal(lopti.split_tokens(old_logprobs, mask, case["eta"])[0], low_mask & mask)
    check_updates(case, names, found, mask)


def check_updates(case, names, advantages, mask):
    """Loss, statistics and gradient of the plain update and of both stages, to 1e-9."""
    old_logprobs, new_logprobs, ref_logprobs = (
        tensor_of(case[names[key]]) for key in ("old", "new", "ref")
    )
    low, high = lopti.split_tokens(old_logprobs, mask, case["eta"])
    settings = {name: case[name] for name in ("clip_low", "clip_high", "clip_dual", "kl_coef")}
    weight = lopti.gradient_weight(
        new_logprobs, old_logprobs, advantages, ref_logprobs=ref_logprobs, **settings
    )
    for update, update_mask in (("joint", None), ("low", low), ("high", high)):
        expected = case[names[update]]
        logprobs = new_logprobs.clone().requires_grad_()
        loss, stats = lopti.policy_loss(
            logprobs,
            old_logprobs,
            advantages,
            mask,
            update_mask=update_mask,
            ref_logprobs=ref_logprobs,
            **settings,
        )
        loss.backward()
        assert loss.item() == pytest.approx(expected["loss"], abs=1e-9)
        assert stats["policy_loss"] == pytest.approx(expected[names["policy_loss"]], abs=1e-9)
        assert torch.allclose(
            logprobs.grad, tensor_of(expected[names["gradient"]]), atol=1e-9, rtol=0
        )
        # Eq. 2: the gradient is -w/N on every updated token
        updated = mask if update_mask is None else update_mask
        assert torch.allclose(logprobs.grad, -weight * updated / mask.sum(), atol=1e-12, rtol=0)
        clipped = stats["clip_ratio/low_mean"] + stats["clip_ratio/high_mean"]
        if names is OUR_NAMES:
            assert stats["kl"] == pytest.approx(expected["kl"], abs=1e-9)
            assert clipped == pytest.approx(
                expected["clip_low_share"] + expected["clip_high_share"]
            )
            assert stats["clip_ratio/dual_mean"] == pytest.approx(expected["clip_dual_share"])
        else:
            assert clipped == pytest.approx(expected["clip_fraction"])
            assert stats["clip_ratio/dual_mean"] == pytest.approx(expected["clip_fraction_dual"])


def tensor_of(values):
    return torch.tensor(values, dtype=torch.float64)


GOLDEN = json.loads((ROOT / "data" / "golden.json").read_text(encoding="utf-8"))
OUR_CASES = GOLDEN["cases"]


@pytest.mark.parametrize("number", range(len(OUR_CASES)))
def test_our_golden_numbers(number):
    case = OUR_CASES[number]
    check_golden_case(
        case,
        OUR_NAMES,
        tensor_of(case["advantages"]),
        tensor_of(case["reweighted_advantages"]),
        torch.tensor(case["low"]),
    )


def test_golden_file_is_what_its_script_writes():
    """Recomputed token by token in plain Python; and the cases do reach every clip."""
    assert len(OUR_CASES) >= 20
    for case in OUR_CASES:
        assert (
            golden.solve(
                {
                    key: case[key]
                    for key in case
                    if key not in ("advantages", "reweighted_advantages", "low")
                }
            )
            == case
        )
    for case in GOLDEN["treatments"]:
        assert golden.solve_treatments(case) == case
    assert any(not all(map(all, case["safe"])) for case in GOLDEN["treatments"])
    for name in ("low", "high", "dual"):
        assert any(case["joint"][f"clip_{name}_share"] > 0 for case in OUR_CASES)


def test_published_code():
    """The 8 GRPO cases that the paper's own code computed."""
    cases = json.loads(shared_file("golden/published_code.json").read_text())["cases"]
    cases = [case for case in cases if case["algorithm"] == "grpo"]
    assert len(cases) == 8
    for case in cases:
        advantages = tensor_of(case["advantage"])
        if advantages.dim() == 2:
            advantages = advantages[:, 0]
        check_golden_case(
            case,
            PUBLISHED_NAMES,
            advantages,
            tensor_of(case["advantage_reweighted"]),
            torch.tensor(case["low_mask"]).bool(),
        )


def test_loss_by_finite_differences():
    """The derivative by the logits, through log-softmax, ratio, clips and KL, against central differences in float64."""
    torch.manual_seed(0)
    logits = torch.randn(3, 4, 6, dtype=torch.float64)
    ids = torch.randint(0, 6, (3, 4))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]).bool()
    old_logprobs = (
        (logits + 0.4 * torch.randn_like(logits)).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    )
    ref_logprobs = (
        (logits + torch.randn_like(logits)).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    )
    advantages = torch.randn(3, 1, dtype=torch.float64).expand(3, 4)
    low, _ = lopti.split_tokens(old_logprobs, mask, 0.2)
    assert 0 < low.sum() < mask.sum()

    def loss(logits):
        logprobs = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        return lopti.policy_loss(
            logprobs,
            old_logprobs,
            advantages,
            mask,
            update_mask=low,
            ref_logprobs=ref_logprobs,
            kl_coef=0.1,
            clip_dual=1.5,
        )[0]

    assert torch.autograd.gradcheck(loss, logits.requires_grad_(), eps=1e-6, atol=1e-7)


def test_kl_estimate_is_k3_of_policy_from_reference():
    """In expectation over the policy, k3 is KL(π_θ‖π_ref); per token it is never negative."""
    torch.manual_seed(0)
    policy, reference = (
        torch.randn(7).double().log_softmax(-1),
        torch.randn(7).double().log_softmax(-1),
    )
    estimate = lopti.kl_estimate(policy, reference)
    assert (estimate >= 0).all()
    exact = (policy.exp() * (policy - reference)).sum()
    assert (policy.exp() * estimate).sum().item() == pytest.approx(exact.item(), abs=1e-12)
    assert lopti.kl_estimate(torch.tensor([0.0]), torch.tensor([-9.0])).item() == pytest.approx(
        math.exp(-5) + 5 - 1
    )
    assert lopti.kl_estimate(torch.tensor([-9.0]), torch.tensor([0.0])).item() == 10.0


def test_kl_raises_the_loss():
    """β·KL is added to the loss (subtracted from the objective)."""
    logprobs, ref = torch.tensor([[-1.0]]), torch.tensor([[-2.0]])
    advantages, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    loss, stats = lopti.policy_loss(
        logprobs, logprobs, advantages, mask, ref_logprobs=ref, kl_coef=0.5
    )
    assert loss.item() == pytest.approx(0.5 * (math.exp(-1) + 1 - 1)) and stats[
        "kl"
    ] == pytest.approx(math.exp(-1))


def test_padding_cannot_reach_the_loss():
    """Whatever stands in the padding, infinities too, loss and gradient stay what they are."""
    mask = torch.tensor([[True, True, False]])
    old, advantages = torch.tensor([[-1.0, -2.0, -1e9]]), torch.tensor([[1.0, -1.0, 5.0]])
    results = []
    for junk in (0.0, 1e9):
        logprobs = torch.tensor([[-0.9, -2.1, junk]], requires_grad=True)
        loss, _ = lopti.policy_loss(logprobs, old, advantages, mask)
        loss.backward()
        results.append((loss.item(), logprobs.grad.tolist()))
    assert results[0] == results[1] and math.isfinite(results[0][0])


def test_loss_is_zero_but_its_gradient_is_not_at_the_first_step():
    """The question every user asks: at ratio 1 the loss is -mean(Â), which is about 0 in a group of equal lengths."""
    advantages = lopti.group_advantages(torch.tensor([3.0, -1.0, -1.0, -3.0]), 4)[:, None].expand(
        4, 5
    )
    logprobs = torch.full((4, 5), -1.0, requires_grad=True)
    loss, stats = lopti.policy_loss(
        logprobs, logprobs.detach(), advantages, torch.ones(4, 5, dtype=torch.bool)
    )
    loss.backward()
    assert (
        abs(loss.item()) < 1e-6 and stats["ratio_mean"] == 1.0 and logprobs.grad.abs().min() > 0.005
    )


# ---------------------------------------------------------------------------------------------- Prop. 4.2


def test_logit_gradient_against_autograd_and_bounds():
    torch.manual_seed(0)
    for vocabulary in (2, 5, 1000):
        for scale in (0.1, 3.0, 30.0):
            logits = (torch.randn(200, vocabulary, dtype=torch.float64) * scale).requires_grad_()
            ids = torch.randint(0, vocabulary, (200,))
            logprobs = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
            (gradient,) = torch.autograd.grad(logprobs.sum(), logits)
            norms = lopti.logit_gradient_norm(logits.detach(), ids)
            assert torch.allclose(norms, gradient.norm(dim=-1), atol=1e-12, rtol=0)
            lower, upper = lopti.logit_gradient_bounds(logprobs.detach().exp(), vocabulary)
            assert (lower <= norms + 1e-12).all() and (norms <= upper + 1e-12).all()


# ---------------------------------------------------------------------------------------------- log-probabilities


@pytest.fixture(scope="module")
def gpt2():
    """A model with learnt absolute positions: there wrong position ids are badly wrong. Dropout is on."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=273,
            n_positions=64,
            n_embd=32,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.5,
            eos_token_id=1,
            bos_token_id=1,
        )
    )
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(5)
    return model.eval()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_against_one_row_at_a_time(name, temperature, gpt2):
    """Padded, batched and micro-batched, against each response alone, token by token, without any padding."""
    model = gpt2 if name == "gpt2" else random_model()
    rollout = random_rollout(model)
    logprobs, entropies, safe = lopti.score(model, rollout, temperature, 60)
    assert torch.equal(safe, rollout.mask)
    assert logprobs.dtype == torch.float32
    assert (logprobs[~rollout.mask] == 0).all() and (entropies[~rollout.mask] == 0).all()
    for i in range(len(rollout.mask)):
        prompt = rollout.prompt_ids[i][rollout.prompt_mask[i]]
        response = rollout.response_ids[i][rollout.mask[i]]
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0].double() / temperature
        for t, token in enumerate(response):
            distribution = logits[len(prompt) + t - 1].softmax(-1)  # what was known before token t
            assert logprobs[i, t].item() == pytest.approx(
                distribution[token].log().item(), abs=2e-5
            )
            assert entropies[i, t].item() == pytest.approx(
                -(distribution * distribution.log()).sum().item(), abs=2e-5
            )


OTHER_MODELS = {  # what a model may do between its last hidden state and its logits, and with the end of a sequence
    "tied embeddings": lambda small: Qwen2ForCausalLM(
        Qwen2Config(**small, tie_word_embeddings=True)
    ),
    "several ends": lambda small: Qwen2ForCausalLM(
        Qwen2Config(**{**small, "eos_token_id": [1, 40, 41]})
    ),
    "soft-capping and sliding windows": lambda small: Gemma2ForCausalLM(
        Gemma2Config(**small, head_dim=16, final_logit_softcapping=3.0, sliding_window=4)
    ),
    "logits scaled up": lambda small: CohereForCausalLM(CohereConfig(**small, logit_scale=1.7)),
    "logits scaled down": lambda small: GraniteForCausalLM(
        GraniteConfig(**small, logits_scaling=2.5)
    ),
}


@pytest.fixture(scope="module", params=OTHER_MODELS)
def other_model(request):
    torch.manual_seed(0)
    small = {"vocab_size": 273, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 2, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}  # fmt: skip
    model = OTHER_MODELS[request.param](small)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(6)
    return model.eval()


def test_chunked_logits_against_the_plain_forward_pass(other_model, monkeypatch):
    """Logits for 3 positions at a time: log-probabilities, entropies and every gradient of the model called as it is."""
    rollout, size = random_rollout(other_model), len(random_rollout(other_model).prompt_ids[0])
    mask = torch.cat([rollout.prompt_mask, rollout.mask], 1).long()
    logits = other_model(
        torch.cat([rollout.prompt_ids, rollout.response_ids], 1),
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
    ).logits
    distribution = (logits[:, size - 1 : -1] / 0.7).log_softmax(-1)
    logprobs = distribution.gather(-1, rollout.response_ids[..., None])[..., 0]
    entropies = -(distribution.exp() * distribution).sum(-1).detach()
    weight = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(0)) * rollout.mask

    def gradient(values):
        other_model.zero_grad()
        (values * weight).sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in other_model.parameters()])

    expected = gradient(logprobs)
    calls, in_chunks = [], lopti.in_chunks
    monkeypatch.setattr(lopti, "in_chunks", lambda function, *rest, vocabulary_size: in_chunks(
        lambda *parts: calls.append(len(parts[0])) or function(*parts), *rest, vocabulary_size, elements=3 * 273))  # fmt: skip
    scores = lopti.token_logprobs(other_model, rollout, 0.7)
    assert max(calls) == 3 and len(calls) == math.ceil(rollout.mask.sum() / 3)
    assert torch.allclose(scores.logprobs[rollout.mask], logprobs[rollout.mask], atol=1e-5)
    assert torch.allclose(scores.entropies[rollout.mask], entropies[rollout.mask], atol=1e-5)
    found = gradient(scores.logprobs)
    assert expected.norm() > 1 and (found - expected).norm() <= 1e-5 * expected.norm()
    assert len(calls) == 2 * math.ceil(rollout.mask.sum() / 3)  # made again, not kept


def test_a_model_that_the_shortcuts_misread_is_refused(tokenizer):
    """One that looks at more than its last hidden state, or at a cache of its own, is wrong without any error: it is found out."""
    model = random_model()
    lopti.check_model(model, tokenizer, "good")
    forward = model.forward

    def skewed(*inputs, inputs_embeds=None, **options):
        outputs = forward(*inputs, inputs_embeds=inputs_embeds, **options)
        if inputs_embeds is not None:  # the way from hidden states to logits
            outputs.logits = outputs.logits.roll(1, -1)
        return outputs

    def forgetful(*inputs, past_key_values=None, **options):
        return forward(
            *inputs, past_key_values=lopti.DynamicCache() if past_key_values else None, **options
        )

    for wrong in (skewed, forgetful):
        model.forward = wrong
        with pytest.raises(
            lopti.UserError, match="the model bad .* does not work with the sampling and scoring"
        ):
            lopti.check_model(model, tokenizer, "bad")


def test_roomy_cache_layer_against_hf_layer():
    """The same keys and values as HF's layer through every way of growing, repeating and selecting; few copies of the whole."""
    plain, roomy = lopti.DynamicLayer(), lopti.RoomyLayer(room=5)
    generator, copies, whole = torch.Generator().manual_seed(0), 0, None

    def grow(rows, new):
        states = torch.randn(2, rows, 3, new, 4, generator=generator)
        return [layer.update(states[0].clone(), states[1].clone()) for layer in (plain, roomy)]

    actions = [
        (2, 7),
        "repeat",
        (6, 1),
        (6, 1),
        [0, 2, 5],
        (3, 1),
        (3, 4),
        [0, 1, 2],
        (3, 1),
        (3, 9),
        [1],
        *[(1, 1)] * 12,
    ]
    for action in actions:
        if action == "repeat":
            plain.batch_repeat_interleave(3), roomy.batch_repeat_interleave(3)
        elif isinstance(action, list):
            (
                plain.batch_select_indices(torch.tensor(action)),
                roomy.batch_select_indices(torch.tensor(action)),
            )
        else:
            (keys, values), (roomy_keys, roomy_values) = grow(*action)
            assert torch.equal(keys, roomy_keys) and torch.equal(values, roomy_values)
            copies, whole = copies + (roomy.whole is not whole), roomy.whole
        assert (
            torch.equal(plain.keys, roomy.keys) and plain.get_seq_length() == roomy.get_seq_length()
        )
    assert copies < sum(isinstance(action, tuple) for action in actions) - 6


def test_roomy_cache_layer_in_the_type_that_attention_uses():
    """Under autocast Llama's rotated keys are float32, yet attention reads them in bfloat16: kept so, the same logits to the last bit."""
    model, prompt = random_model(), torch.arange(5, 45).view(4, 10)
    model.forward_dtype = torch.bfloat16
    plain, roomy = (lopti.DynamicCache(config=model.config) for _ in range(2))
    roomy.layers = [lopti.RoomyLayer(room=3) for _ in roomy.layers]
    with torch.no_grad(), lopti.mixed_precision(model):
        for ids in (prompt, *torch.randint(5, 273, (6, 4, 1))):
            logits = [
                model(input_ids=ids, past_key_values=cache, use_cache=True).logits
                for cache in (plain, roomy)
            ]
            assert torch.equal(*logits)
    assert (
        plain.layers[0].keys.dtype == torch.float32
    )  # the reason for it; if this fails there is nothing left to convert
    assert {whole.dtype for layer in roomy.layers for whole in layer.whole} == {torch.bfloat16}
    assert torch.equal(plain.layers[1].keys.bfloat16(), roomy.layers[1].keys) and torch.equal(
        plain.layers[1].values, roomy.layers[1].values
    )


def test_the_cache_is_held_once(tokenizer, monkeypatch):
    """Where rows leave, the free room of all rows is given back before the next layer's rows are picked; no copy where none leave."""
    layer = lopti.RoomyLayer(room=5)
    for action in (
        lambda: layer.batch_select_indices(torch.tensor([1])),
        lambda: layer.batch_repeat_interleave(2),
    ):
        layer.update(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4))
        assert layer.whole
        action()
        assert (
            layer.whole is None and layer.keys.untyped_storage().nbytes() == 4 * layer.keys.numel()
        )
    chosen = []
    monkeypatch.setattr(
        lopti.DynamicCache, "batch_select_indices", lambda cache, rows: chosen.append(rows)
    )
    model = random_model()
    model.lm_head.weight.data[1] = (
        0  # the end's logit is 0 where others' are large: no response ends
    )
    rollout = lopti.sample(
        model, tokenizer, ["Lily"], group_size=3, max_new_tokens=80, temperature=0
    )
    assert rollout.truncated.all() and not chosen


def test_a_policy_in_float64_is_scored_in_float64():
    """One step changes some log-probabilities by less than float32 can tell; the notebook measures such changes."""
    model, temperature = random_model(), 0.7
    rollout = random_rollout(model)
    single = lopti.score(model, rollout, temperature, 64).logprobs
    scores = lopti.score(model.double(), rollout, temperature, 64)
    assert (
        single.dtype == torch.float32
        and scores.logprobs.dtype == scores.entropies.dtype == torch.float64
    )
    assert torch.allclose(scores.logprobs.float(), single, atol=1e-5)
    assert (scores.logprobs.float().double() != scores.logprobs)[
        rollout.mask
    ].float().mean() > 0.9  # not a float32 number made longer


def test_sampling_in_stretches_against_generate(other_model, tokenizer):
    """Greedy, left-padded, in groups, ended responses leaving: the ids that one plain call of `generate` gives."""
    prompts = [
        "Zoey is a knight or Liam is a knave. So who is a knight and who is a knave?",
        "Lily",
        "Liam is a knave",
    ]
    encoded = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
    ends = lopti.end_token_ids(other_model, tokenizer)
    settings = lopti.GenerationConfig(
        max_new_tokens=30, do_sample=False, eos_token_id=ends, pad_token_id=0
    )
    plain = other_model.generate(**encoded, generation_config=settings)[
        :, encoded["input_ids"].shape[1] :
    ]
    plain = plain.repeat_interleave(2, 0)
    for stretch in (1, 7, 100):
        with torch.no_grad():
            found = lopti.generate_groups(
                other_model, encoded["input_ids"], encoded["attention_mask"], 2, settings, stretch
            )
        mask, _ = lopti.response_mask(plain, ends)
        assert (
            torch.equal(found[:, : plain.shape[1]][mask], plain[mask])
            and found.shape[1] == plain.shape[1]
        )
        assert (found[~mask] == 0).all()


def test_responses_that_end_leave_the_batch(tokenizer):
    """However long the others go on, no forward pass is made for a response that ended in an earlier stretch."""
    model, rows = random_model(), []
    with torch.no_grad():
        for weights in model.model.layers.parameters():
            weights.zero_()  # the next token depends on the last one alone
    forward = model.model.forward
    model.model.forward = lambda *inputs, **options: (
        rows.append(len(options["input_ids"])) or forward(*inputs, **options)
    )
    torch.manual_seed(0)
    rollout = lopti.sample(
        model,
        tokenizer,
        ["Lily"] * 3 + ["Liam said"],
        group_size=20,
        max_new_tokens=96,
        temperature=5.0,
    )
    lengths = rollout.mask.sum(1)
    assert rows[0] == 4 and rows[1] == 80  # the prompts once each, then all responses
    for number, count in enumerate(rows[1:]):
        assert count == (lengths > number // 32 * 32).sum() or number // 32 == 0
    assert 0 < rows[-1] < 80


def test_micro_batches_by_tokens():
    lengths = torch.tensor([9, 2, 5, 30, 2, 4])
    assert lopti.micro_batches(range(6), lengths, 12) == [[1, 4, 5], [2], [0], [3]]
    assert (
        lopti.micro_batches([0, 2], lengths, 1000) == [[2, 0]]
        and lopti.micro_batches([], lengths, 5) == []
    )


def test_trimming_keeps_every_token():
    rollout = random_rollout(random_model())
    part = rollout.part([3, 5])
    for row, original in enumerate([3, 5]):
        assert (
            part.response_ids[row][part.mask[row]].tolist()
            == rollout.response_ids[original][rollout.mask[original]].tolist()
        )
        assert (
            part.prompt_ids[row][part.prompt_mask[row]].tolist()
            == rollout.prompt_ids[original][rollout.prompt_mask[original]].tolist()
        )
    assert part.mask.any(0).all() and part.prompt_mask.any(0).all()


# ---------------------------------------------------------------------------------------------- sampling


def test_response_mask_keeps_the_end_token():
    end_ids, pad = [7, 9], 7  # padding id and one end id the same, two end ids
    ids = torch.tensor([[5, 7, pad, pad], [9, pad, pad, pad], [5, 6, 5, 6], [5, 5, 5, 9]])
    mask, truncated = lopti.response_mask(ids, end_ids)
    assert mask.sum(1).tolist() == [2, 1, 4, 4] and truncated.tolist() == [
        False,
        False,
        True,
        False,
    ]
    assert lopti.strip_end(ids[0][mask[0]], end_ids).tolist() == [5]
    assert lopti.strip_end(ids[2][mask[2]], end_ids).tolist() == [5, 6, 5, 6]


def test_the_models_generation_settings_do_not_leak(tokenizer):
    """With and without top_k, top_p, a repetition penalty and more in the model's settings: the same samples."""
    prompts = ["<|user|>So who is a knight?<|assistant|>"] * 2
    options = {"group_size": 8, "max_new_tokens": 12, "temperature": 1.0}
    model = random_model()
    torch.manual_seed(5)
    clean = lopti.sample(model, tokenizer, prompts, **options).response_ids
    settings = model.generation_config
    settings.update(do_sample=True, top_k=2, top_p=0.5, temperature=0.01, repetition_penalty=1.8, min_p=0.5, typical_p=0.2,
                    suppress_tokens=list(range(20, 60)), no_repeat_ngram_size=1, min_new_tokens=9)  # fmt: skip
    torch.manual_seed(5)
    assert torch.equal(lopti.sample(model, tokenizer, prompts, **options).response_ids, clean)
    assert model.generation_config is settings and settings.top_k == 2  # and they are put back
    assert (
        len({tuple(row) for row in clean.tolist()}) == 16
    )  # top_k 1 or greedy decoding would repeat itself


def test_samples_come_from_the_scored_distribution(tokenizer):
    """First tokens of 4,000 samples at temperature 0.7 against the π that token_logprobs computes (chi-squared)."""
    model, temperature = random_model(), 0.7
    torch.manual_seed(0)
    rollout = lopti.sample(
        model, tokenizer, ["Lily said"], group_size=4000, max_new_tokens=1, temperature=temperature
    )
    counts = torch.bincount(rollout.response_ids[:, 0], minlength=273).double()
    probe = rollout.part([0] * 273)
    probe.response_ids = torch.arange(273)[:, None]
    probabilities = lopti.token_logprobs(model, probe, temperature).logprobs[:, 0].double().exp()
    assert probabilities.sum().item() == pytest.approx(1, abs=1e-4)
    common = probabilities > 0.002
    expected = 4000 * probabilities[common]
    statistic = ((counts[common] - expected) ** 2 / expected).sum().item()
    degrees = int(common.sum()) - 1
    assert degrees > 5 and statistic < degrees + 5 * math.sqrt(2 * degrees)


def test_several_end_tokens_end_a_response(tokenizer):
    model = random_model()
    model.generation_config.eos_token_id = [1, 40, 41]
    assert lopti.end_token_ids(model, tokenizer) == [1, 40, 41]
    torch.manual_seed(0)
    rollout = lopti.sample(
        model, tokenizer, ["knight"], group_size=64, max_new_tokens=60, temperature=2.0
    )
    last = {
        int(ids[mask][-1])
        for ids, mask, truncated in zip(rollout.response_ids, rollout.mask, rollout.truncated)
        if not truncated
    }
    assert last & {40, 41} and last <= {1, 40, 41}
    for ids, mask in zip(rollout.response_ids, rollout.mask):
        assert not torch.isin(ids[mask][:-1], torch.tensor([1, 40, 41])).any()


def test_left_padding_does_not_change_what_is_sampled(tokenizer, gpt2):
    """Greedy answers to a short and a long prompt, in one padded batch and one by one."""
    prompts = [
        "Lily",
        "Zoey is a knight or Liam is a knave. So who is a knight and who is a knave?",
    ]
    for model in (random_model(), gpt2):
        options = {"group_size": 1, "max_new_tokens": 8, "temperature": 0}
        together = lopti.sample(model, tokenizer, prompts, **options).texts
        assert together == [
            lopti.sample(model, tokenizer, [prompt], **options).texts[0] for prompt in prompts
        ]


def test_sampling_switches_dropout_off(gpt2, tokenizer):
    gpt2.train()
    options = {"group_size": 1, "max_new_tokens": 8, "temperature": 0}
    first, second = (lopti.sample(gpt2, tokenizer, ["Lily"], **options).texts for _ in range(2))
    assert first == second and not gpt2.training


def test_tags_survive_decoding(tokenizer):
    """Special or not, what the model wrote is judged as it wrote it; only padding and end of sequence go."""
    text = "<think> Suppose Lily knight</think><answer>(1) Lily is a knight</answer>"
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"] + [1, 0, 0])
    mask, _ = lopti.response_mask(ids[None], [1])
    decoded = tokenizer.decode(lopti.strip_end(ids[mask[0]], [1]), skip_special_tokens=False)
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        assert decoded.count(tag) == 1
    assert "<|end|>" not in decoded and "<|pad|>" not in decoded


def test_prompt_batches_in_parts(tokenizer):
    """Greedy sampling in batches of 2 rows gives what one batch gives."""
    prompts = ["Lily", "Zoey is a knight", "So who is a knave?"]
    options = {"group_size": 1, "max_new_tokens": 8, "temperature": 0}
    model = random_model()
    assert (
        lopti.sample(model, tokenizer, prompts, **options, batch_size=2).texts
        == lopti.sample(model, tokenizer, prompts, **options).texts
    )


# ---------------------------------------------------------------------------------------------- the update


ETA = 0.003  # near the median π of random ids under the random model, so that both groups have members


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def low_tokens(rollout):
    return lopti.split_tokens(rollout.old_logprobs, rollout.mask, ETA)[0]


def high_tokens(rollout):
    return lopti.split_tokens(rollout.old_logprobs, rollout.mask, ETA)[1]


def gradient_of_update(tokens_per_microbatch=1000, tokens=lambda rollout: rollout.mask, **settings):
    """The gradient of one optimizer step (SGD, learning rate 1: the weights move by it), and the statistics."""
    model = random_model()
    rollout, before = random_batch(model, min_p=settings.get("min_p", 0.0)), weights(model)
    args = Arguments(
        **{
            "tokens_per_microbatch": tokens_per_microbatch,
            "mini_batch_size": 0,
            "max_grad_norm": 1e9,
            "kl_coef": 0.1,
            **settings,
        }
    )
    stats = lopti.update(
        model, torch.optim.SGD(model.parameters(), lr=1.0), rollout, tokens(rollout), args
    )
    return before - weights(model), stats


@pytest.mark.parametrize(
    "settings", [{}, {"stapo": True, "stapo_tau": 0.01}, {"top_entropy": 0.2}, {"min_p": 0.1}]
)
@pytest.mark.parametrize("tokens", [lambda rollout: rollout.mask, low_tokens], ids=["all", "low"])
def test_gradient_does_not_depend_on_the_micro_batch_size(tokens, settings):
    whole, whole_stats = gradient_of_update(1000, tokens, **settings)
    assert whole.norm() > 1e-3
    for size in (1, 60):  # one response at a time; five or so
        gradient, stats = gradient_of_update(size, tokens, **settings)
        assert (gradient - whole).norm() <= 1e-5 * whole.norm()
        for name in stats:
            assert stats[name] == pytest.approx(whole_stats[name], rel=1e-4, abs=1e-6)


def test_responses_without_advantage_are_skipped_where_that_is_exact(monkeypatch):
    """β = 0: two of the three groups have equal rewards, and their forward passes are saved; with β > 0 none are."""
    seen, original = [], lopti.token_logprobs

    def counting(model, rollout, *rest, **options):
        seen.append(len(rollout.mask))
        return original(model, rollout, *rest, **options)

    def gradient(kl_coef, busy_rows):
        model, rollout = random_model(), random_batch(random_model())
        rollout.advantages[:8] = 0
        rollout.ref_logprobs = rollout.old_logprobs - 0.5 if kl_coef else None
        before = weights(model)
        monkeypatch.setattr(lopti, "token_logprobs", counting)
        seen.clear()
        stats = lopti.update(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            rollout,
            rollout.mask,
            Arguments(mini_batch_size=0, kl_coef=kl_coef, max_grad_norm=1e9),
        )
        monkeypatch.undo()
        assert sum(seen) == busy_rows and stats["optimizer_steps"] == 1
        return before - weights(model), rollout

    found, rollout = gradient(0.0, 4)
    gradient(0.1, 12)
    model = random_model()
    loss, _ = lopti.policy_loss(
        lopti.token_logprobs(model, rollout, 1.0).logprobs,
        rollout.old_logprobs,
        rollout.advantages,
        rollout.mask,
        kl_coef=0.0,
    )
    loss.backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_both_stages_divide_by_all_response_tokens():
    """So the gradients of the two groups, from the same weights, add up to plain GRPO's."""
    low, high, plain = (
        gradient_of_update(tokens=tokens)[0]
        for tokens in (low_tokens, high_tokens, lambda rollout: rollout.mask)
    )
    assert min(low.norm(), high.norm()) > 1e-3
    assert torch.allclose(low + high, plain, atol=1e-5)


def trained_weights(args, stages_of=None, optimizer_class=torch.optim.AdamW):
    """One training step by `args` on a fixed rollout: the weights after it, and the statistics of each stage."""
    model = random_model()
    rollout = random_batch(model)
    rollout.advantages = lopti.reweight_advantages(
        rollout.advantages, rollout.old_logprobs, args.alpha
    )
    low, high = lopti.split_tokens(rollout.old_logprobs, rollout.mask, args.eta)
    stages = (
        lopti.update_stages(low, high, rollout.mask, eta=args.eta)
        if stages_of is None
        else stages_of(low, high, rollout.mask)
    )
    optimizer = optimizer_class(model.parameters(), lr=1e-3)
    stats = [lopti.update(model, optimizer, rollout, tokens, args) for _, tokens in stages]
    return weights(model), stats


def test_lopti_with_an_empty_group_is_grpo_to_the_last_bit():
    """η so small that no token is below it: stage 1 takes no optimizer step, stage 2 is plain GRPO."""
    grpo, _ = trained_weights(Arguments(mini_batch_size=4), lambda low, high, mask: [("all", mask)])
    same, stats = trained_weights(Arguments(mini_batch_size=4, alpha=0.0, eta=1e-30))
    assert torch.equal(grpo, same)
    assert [stage["optimizer_steps"] for stage in stats] == [0, 3] and [
        stage["skipped_steps"] for stage in stats
    ] == [3, 0]
    other, stats = trained_weights(Arguments(mini_batch_size=4, eta=ETA))
    assert not torch.equal(grpo, other) and [stage["optimizer_steps"] for stage in stats] == [3, 3]


def test_a_skipped_mini_batch_leaves_weights_and_moments_alone():
    model = random_model()
    rollout, args = random_batch(model), Arguments(mini_batch_size=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    lopti.update(model, optimizer, rollout, rollout.mask, args)  # fills the moments
    before, nothing = weights(model), torch.zeros_like(rollout.mask)
    stats = lopti.update(model, optimizer, rollout, nothing, args)
    assert stats == {
        "optimizer_steps": 0,
        "skipped_steps": 3,
        "nonfinite_steps": 0,
        "masked_tokens": 0,
    }
    assert torch.equal(before, weights(model))
    one_mini_batch = nothing.clone()
    one_mini_batch[:4] = rollout.mask[:4]
    assert lopti.update(model, optimizer, rollout, one_mini_batch, args)["optimizer_steps"] == 1


def test_second_stage_sees_the_ratio_of_the_first():
    """Same old_logprobs in both stages: the first starts at ratio 1, the second does not."""
    _, (first, second) = trained_weights(Arguments(mini_batch_size=0, eta=ETA))
    assert first["ratio_mean"] / first["updated_share"] == pytest.approx(1, abs=1e-5)
    assert abs(second["ratio_mean"] / second["updated_share"] - 1) > 1e-5
    assert first["updated_share"] + second["updated_share"] == pytest.approx(1)


def test_gradient_clip_is_applied_to_each_step():
    gradient, stats = gradient_of_update(max_grad_norm=0.01)
    assert stats["grad_norm"] > 0.01 and gradient.norm().item() == pytest.approx(0.01, rel=1e-3)


# ---------------------------------------------------------------------------------------------- the later treatments


def test_reinforce_pp_by_hand():
    rewards, mask = (
        torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64),
        torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]]).bool(),
    )
    tokens = [2.0] * 3 + [-1.0] + [0.5] * 2
    mean, variance = statistics.mean(tokens), statistics.variance(tokens)
    found = lopti.reinforce_pp_advantages(rewards, mask)
    for i, reward in enumerate(rewards.tolist()):
        expected = [(reward - mean) / math.sqrt(variance + 1e-8) * float(m) for m in mask[i]]
        assert found[i].tolist() == pytest.approx(expected, abs=1e-12)
    assert (
        lopti.reinforce_pp_advantages(torch.full((3,), 0.1), mask).abs().max() == 0
    )  # and no rounding noise


def test_published_reinforce_pp():
    cases = json.loads(shared_file("golden/published_code.json").read_text())["cases"]
    cases = [case for case in cases if case["algorithm"] == "reinforce++"]
    assert len(cases) == 4
    for case in cases:
        advantages = tensor_of(case["advantage"])
        mask = torch.arange(advantages.shape[1])[None] < torch.tensor(case["lengths"])[:, None]
        found = lopti.reinforce_pp_advantages(tensor_of(case["rewards"]), mask)
        assert torch.allclose(found, advantages, atol=1e-9, rtol=0)
        found = lopti.reweight_advantages(found, tensor_of(case["old_logprob"]), case["alpha"])
        check_updates(case, PUBLISHED_NAMES, found, mask)


def test_stapo_by_hand():
    """Four candidates with entropies 0.1 0.2 0.3 0.4: the 75 % quantile is 0.325, three are silenced."""
    probabilities = torch.tensor(
        [[0.001, 0.001, 0.001, 0.001, 0.5, 0.001], [0.001, 0.9, 0.001, 0.002, 0.001, 0.001]]
    )
    entropies = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    advantages = torch.tensor([[1.0] * 5 + [1.0], [-1.0] * 6])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]).bool()
    kept = lopti.stapo_mask(probabilities.log(), entropies, advantages, mask)
    assert kept.tolist() == [[False, False, False, True, True, False], [True] * 6]
    assert torch.equal(
        lopti.stapo_mask(probabilities.log(), entropies, -advantages.abs(), mask), mask
    )
    # quantile by hand: numpy's linear rule on another size
    kept = lopti.stapo_mask(probabilities.log(), entropies, advantages, mask, quantile=0.5)  # 0.25
    assert kept[0].tolist() == [False, False, True, True, True, False]
    # H = τ_h (one candidate, its own quantile) and π = τ_p are not below: kept
    assert lopti.stapo_mask(
        probabilities[:1, :1].log(), entropies[:1, :1], advantages[:1, :1], mask[:1, :1]
    ).tolist() == [[True]]
    four = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    assert lopti.stapo_mask(
        four,
        torch.tensor([[0.0, 0.0, 0.1, 0.2]]),
        torch.ones(1, 4),
        torch.ones(1, 4) > 0,
        tau_p=0.25,
    ).tolist() == [[True, True, False, True]]


def test_entropy_mask_by_hand():
    entropies = torch.tensor([[0.5, 0.1, 0.9, 0.0], [0.7, 0.2, 5.0, 5.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()  # values .9 .7 .5 .2 .1 .0
    assert lopti.entropy_mask(entropies, mask, 1 / 3).tolist() == [
        [False, False, True, False],
        [True, False, False, False],
    ]
    assert lopti.entropy_mask(entropies, mask, 2 / 3, lowest=True).tolist() == [
        [True, True, False, True],
        [False, True, False, False],
    ]
    assert torch.equal(lopti.entropy_mask(entropies, mask, 1.0), mask)
    torch.manual_seed(0)
    entropies, mask = torch.rand(20, 30), torch.rand(20, 30) < 0.7
    top, low = (
        lopti.entropy_mask(entropies, mask, 0.2),
        lopti.entropy_mask(entropies, mask, 0.8, lowest=True),
    )
    assert not (top & low).any() and torch.equal(top | low, mask)
    assert top.sum().item() == round(0.2 * mask.sum().item())


def test_entropy_in_chunks(monkeypatch):
    """Against -Σ p log p in float64; many chunks and one give the same."""
    logits = torch.randn(3, 50, 273) * 4
    probabilities = logits.double().softmax(-1)
    expected = -(probabilities * probabilities.log()).sum(-1)
    assert torch.allclose(lopti.entropy(logits).double(), expected, atol=1e-5)
    sizes = []
    original = torch.Tensor.softmax
    monkeypatch.setattr(
        torch.Tensor,
        "softmax",
        lambda self, *rest: sizes.append(self.numel()) or original(self, *rest),
    )
    lopti.entropy(torch.randn(4, 30, 2**16))
    assert max(sizes) <= 2**22 < 4 * 30 * 2**16  # never a second copy of all logits


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("min_p", [0.15, 0.35])
def test_min_p_by_hand(temperature, min_p):
    """Temperature first, then the cut, then a softmax over what is left; tokens outside are told, not scored."""
    model = random_model()
    rollout = random_rollout(
        model, seed=1
    )  # with seed 0 one probability lies within 1e-7 of the threshold
    scores = lopti.score(model, rollout, temperature, 5, min_p)
    outside = 0
    for i in range(len(rollout.mask)):
        prompt, response = (
            rollout.prompt_ids[i][rollout.prompt_mask[i]],
            rollout.response_ids[i][rollout.mask[i]],
        )
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0].double() / temperature
        for t, token in enumerate(response):
            probabilities = logits[len(prompt) + t - 1].softmax(-1)
            kept = probabilities >= min_p * probabilities.max()
            renormalised = torch.where(kept, probabilities, 0) / probabilities[kept].sum()
            assert scores.safe[i, t].item() == kept[token].item()
            outside += not kept[token]
            expected = renormalised[token].log().item() if kept[token] else 0.0
            assert scores.logprobs[i, t].item() == pytest.approx(expected, abs=2e-5)
            expected = -sum(p * math.log(p) for p in renormalised.tolist() if p > 0)
            assert scores.entropies[i, t].item() == pytest.approx(expected, abs=2e-5)
    assert 0 < outside < rollout.mask.sum()


def test_min_p_samples_come_from_the_scored_distribution(tokenizer):
    """With temperature and min-p together no sample is outside the safe vocabulary, and every safe token has its π."""
    model, temperature, min_p = random_model(), 0.8, 0.3
    torch.manual_seed(0)
    rollout = lopti.sample(
        model,
        tokenizer,
        ["Lily said"],
        group_size=3000,
        max_new_tokens=1,
        temperature=temperature,
        min_p=min_p,
    )
    assert lopti.score(model, rollout, temperature, 1000, min_p).safe.all()
    probe = rollout.part([0] * 273)
    probe.response_ids = torch.arange(273)[:, None]
    scores = lopti.token_logprobs(model, probe, temperature, min_p)
    expected = scores.logprobs[:, 0].exp() * scores.safe[:, 0]
    assert expected.sum().item() == pytest.approx(1, abs=1e-4) and 2 < scores.safe.sum() < 100
    counts = torch.bincount(rollout.response_ids[:, 0], minlength=273) / 3000
    assert (counts - expected).abs().max() < 5 * (expected.max() / 3000).sqrt()


def test_unsafe_tokens_add_nothing_and_stay_in_the_denominator():
    gradient, stats = gradient_of_update(min_p=0.3, kl_coef=0.0)
    model = random_model()
    rollout = random_batch(model, min_p=0.3)
    scores = lopti.token_logprobs(model, rollout, 1.0, 0.3)
    loss = (
        -(
            rollout.advantages * (scores.logprobs - scores.logprobs.detach()).exp() * scores.safe
        ).sum()
        / rollout.mask.sum()
    )
    loss.backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert torch.allclose(gradient, expected, atol=1e-6) and expected.norm() > 1e-3
    assert stats["unsafe_tokens"] == int((rollout.mask & ~scores.safe).sum()) > 0


TREATMENTS = [{"stapo": True, "stapo_tau": 0.01}, {"top_entropy": 0.3}, {"bottom_entropy": 0.7}]


@pytest.mark.parametrize("settings", TREATMENTS)
def test_kept_tokens_are_the_denominator_in_both_stages(settings):
    """By hand from the masks: the loss of each stage is divided by the kept tokens of both groups."""
    gradients, stats = {}, {}
    for name, tokens in (
        ("low", low_tokens),
        ("high", high_tokens),
        ("all", lambda rollout: rollout.mask),
    ):
        gradients[name], stats[name] = gradient_of_update(tokens=tokens, kl_coef=0.0, **settings)
    assert torch.allclose(gradients["low"] + gradients["high"], gradients["all"], atol=1e-5)
    model = random_model()
    rollout = random_batch(model)
    now = lopti.token_logprobs(model, rollout, 1.0)
    args = Arguments(**settings)
    kept = lopti.tokens_to_keep(model, rollout, args)
    assert 0 < kept.sum() < rollout.mask.sum() and not (kept & ~rollout.mask).any()
    loss = (
        -(rollout.advantages * (now.logprobs - now.logprobs.detach()).exp() * kept).sum()
        / kept.sum()
    )
    loss.backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert torch.allclose(gradients["all"], expected, atol=1e-6)
    assert stats["all"]["masked_tokens"] == int((rollout.mask & ~kept).sum())
    assert stats["all"]["updated_share"] == pytest.approx(
        1, abs=1e-6
    )  # all kept tokens, divided by the kept tokens


@pytest.mark.parametrize("number", range(len(GOLDEN["treatments"])))
def test_our_golden_treatments(number):
    case = GOLDEN["treatments"][number]
    logits, ids = tensor_of(case["logits"]) / case["temperature"], torch.tensor(case["ids"])
    mask = torch.arange(ids.shape[1])[None] < torch.tensor(case["lengths"])[:, None]
    close = {"atol": 1e-9, "rtol": 0}
    found = lopti.reinforce_pp_advantages(tensor_of(case["rewards"]), mask)
    assert torch.allclose(found, tensor_of(case["reinforce_pp_advantages"]), **close)
    logprobs = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    entropies = lopti.entropy(logits)
    assert torch.allclose(logprobs * mask, tensor_of(case["logprobs"]), **close)
    assert torch.allclose(entropies * mask, tensor_of(case["entropies"]), **close)
    in_vocabulary = lopti.safe_vocabulary(logits, case["min_p"])
    safe = in_vocabulary.gather(-1, ids[..., None])[..., 0] & mask
    assert safe.tolist() == case["safe"]
    pruned = logits.masked_fill(~in_vocabulary, torch.finfo(logits.dtype).min)
    safe_logprobs = (
        pruned.log_softmax(-1).gather(-1, ids[..., None])[..., 0].masked_fill(~safe, 0.0)
    )
    assert torch.allclose(safe_logprobs, tensor_of(case["safe_logprobs"]), **close)
    assert torch.allclose(lopti.entropy(pruned) * mask, tensor_of(case["safe_entropies"]), **close)
    advantages = tensor_of(case["advantages"])[:, None] * mask
    kept = lopti.stapo_mask(
        logprobs, entropies, advantages, mask, case["stapo_tau"], case["stapo_quantile"]
    )
    assert kept.tolist() == case["stapo_kept"]
    loss, _ = lopti.policy_loss(
        logprobs, logprobs, advantages, mask, update_mask=kept, normalizer=kept.sum()
    )
    assert loss.item() == pytest.approx(case["stapo_loss"], abs=1e-9)
    assert lopti.entropy_mask(entropies, mask, case["rho"]).tolist() == case["top_kept"]
    assert (
        lopti.entropy_mask(entropies, mask, 1 - case["rho"], lowest=True).tolist()
        == case["bottom_kept"]
    )


def test_masks_come_from_the_current_policy():
    """Lopti's stage 2 sees the entropies that stage 1 left behind, not those of the rollout."""
    model = random_model()
    rollout, args = random_batch(model), Arguments(top_entropy=0.3, mini_batch_size=0)
    before = lopti.tokens_to_keep(model, rollout, args)
    lopti.update(
        model, torch.optim.SGD(model.parameters(), lr=0.5), rollout, low_tokens(rollout), args
    )
    assert not torch.equal(before, lopti.tokens_to_keep(model, rollout, args))


def test_switched_off_changes_nothing_to_the_last_bit():
    plain, _ = trained_weights(Arguments(mini_batch_size=4, eta=ETA))
    for settings in (
        {"stapo": True, "stapo_tau": 1e-30},
        {"top_entropy": 1.0},
        {"bottom_entropy": 1.0},
        {"min_p": 1e-30},
    ):
        assert torch.equal(
            plain, trained_weights(Arguments(mini_batch_size=4, eta=ETA, **settings))[0]
        ), settings
    for settings in TREATMENTS:  # and switched on each of them changes something
        assert not torch.equal(
            plain, trained_weights(Arguments(mini_batch_size=4, eta=ETA, **settings))[0]
        ), settings


def test_all_tokens_masked_is_a_skipped_step():
    for eta in (0.0, ETA):
        after, stats = trained_weights(Arguments(mini_batch_size=4, eta=eta, top_entropy=1e-9))
        assert torch.equal(after, weights(random_model()))
        assert all(stage["optimizer_steps"] == 0 and stage["skipped_steps"] == 3 for stage in stats)
    gradient, stats = gradient_of_update(
        tokens=low_tokens, min_p=0.3
    )  # no low token is in the safe vocabulary
    assert gradient.norm() == 0 and stats["optimizer_steps"] == 0 and stats["skipped_steps"] == 1


# ---------------------------------------------------------------------------------------------- rewards: Knights and Knaves

TRUTH = "(1) Jack is a knight\n(2) Jackson is a knave"
RIGHT = "(1) Jack is a knight\n(2) Jackson is a knave"


def kk(answer, before="Suppose so. </think>", after="", **columns):
    return kk_reward([f"{before}<answer>{answer}</answer>{after}"], [TRUTH], **columns)[0]


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (RIGHT, 3.0),
        ("JACK IS A KNIGHT, JACKSON IS A KNAVE", 3.0),  # case does not matter
        ("Jackson is a knave.\nJack is\ta  knight.", 3.0),  # nor order, nor spacing
        ("Jack is a knight\nJackson is a knight", -0.5),  # complete but wrong
        ("Jack is a knave\nJackson is a knight", -0.5),
        ("", -1.0),
        ("Jack is a knight", -1.0),  # a name is missing
        ("Jack is a knight\nJack is a knave", -1.0),  # both roles for one name, the other missing
        ("Jack is a knight\nJack is a knave\nJackson is a knave", -1.0),  # both roles for one name
        (RIGHT + "\nso there is one knight", -1.0),  # one role word too many
        ("Both are knights: " + RIGHT, -1.0),  # 'knights' counts as well
        ("Jack is a knight\nJackson is a knaves", -1.0),  # the count is right, the word is not
        ("Jack: knight\nJackson: knave", -1.0),  # another layout
        ("Jackson is a knight\nJackson is a knave", -1.0),  # Jack must not be found inside Jackson
        ("(1) Zoey is a knight\n(2) Oliver is a knave", -1.0),  # copied from the prompt's example
    ],
)
def test_kk_answer(answer, score):
    assert kk(answer) == score


@pytest.mark.parametrize(
    "response",
    [
        "",
        "no tags at all",
        f"<answer>{RIGHT}</answer>",  # thinking never ends
        f"</think>{RIGHT}",
        f"</think><answer>{RIGHT}",
        f"</think>{RIGHT}</answer>",
        f"</think></think><answer>{RIGHT}</answer>",
        f"<answer>{RIGHT}</answer></think>",  # wrong order
        f"</think></answer>{RIGHT}<answer>",
        f"</think><answer>{RIGHT}</answer><answer>{RIGHT}</answer>",  # a second answer
        f"The form is <answer> </answer>.</think><answer>{RIGHT}</answer>",  # tags copied from the prompt
        f"<think></think><answer>{RIGHT}</answer>",  # the prompt opened <think> already
        f"</think><Answer>{RIGHT}</Answer>",
        None,
        [],
        [{"role": "assistant", "content": None}],
    ],
)
def test_kk_broken_format(response):
    assert kk_reward([response], [TRUTH]) == [-3.0]


def test_kk_text_outside_the_answer_does_not_count():
    assert (
        kk(
            RIGHT,
            before="(1) Zoey is a knight\n(2) Oliver is a knave </think>",
            after=" All knaves lie.",
        )
        == 3.0
    )


def test_kk_uses_the_prompt_to_see_whether_think_is_open():
    closed, opened = "Who is who?", "Who is who?\nassistant: <think> \n"
    assert kk(RIGHT, prompts=[opened]) == 3.0
    assert kk(RIGHT, prompts=[closed]) == -3.0
    assert kk(RIGHT, before="<think>So </think>", prompts=[closed]) == 3.0
    assert kk(RIGHT, before="<think>So </think>", prompts=[opened]) == -3.0
    assert kk(RIGHT, before="</think><think>", prompts=[closed]) == -3.0
    messages = [{"role": "user", "content": closed}, {"role": "assistant", "content": "<think>"}]
    assert kk(RIGHT, prompts=[messages]) == 3.0
    assert kk(RIGHT, prompts=[messages[:1]]) == -3.0


def test_chat_messages_count_by_their_last_one():
    right, wrong = f"</think><answer>{RIGHT}</answer>", "</think><answer></answer>"
    chat = [{"role": "assistant", "content": wrong}, {"role": "assistant", "content": right}]
    assert kk_reward([chat, chat[:1], right], [TRUTH] * 3, names=[["Jack"]] * 3) == [3.0, -1.0, 3.0]
    boxed = [{"role": "assistant", "content": r"$\boxed{7}$"}]
    assert math_reward([boxed, boxed, []], ["7", "8", "7"], level=[1, 2, 3]) == [1.0, 0.0, 0.0]


def test_kk_helpers():
    assert names_and_roles(TRUTH) == {"Jack": "knight", "Jackson": "knave"}
    assert parse_roles(
        "Jackson is a knave, Jack is a knight", ["Jack", "Jackson"]
    ) == names_and_roles(TRUTH)
    assert parse_roles("Jack is a knight", ["Jack", "Jackson"]) is None
    assert (
        parse_roles("Joann is a knight, Joann is a knave", ["Ann", "Joann"]) is None
    )  # Ann is not in Joann
    assert parse_roles("J.ck is a knight", ["J.ck"]) == {"J.ck": "knight"}
    assert parse_roles("Jack is a knight", ["J.ck"]) is None


def test_wrong_arguments_are_reported():
    with pytest.raises(ValueError, match="2 completions but 1 entries in `solution`"):
        kk_reward(["a", "b"], [TRUTH])
    with pytest.raises(ValueError, match="1 completions but 2 entries in `prompts`"):
        kk_reward(["a"], [TRUTH], prompts=["", ""])
    with pytest.raises(ValueError, match="1 completions but 0 entries in `solution`"):
        math_reward(["a"], [])
    for nobody in ("nobody here", "", None):
        with pytest.raises(ValueError, match="row 1 of `solution` names nobody"):
            kk_reward(["a", "b"], [TRUTH, nobody])
    assert kk_reward([], []) == math_reward([], []) == []


def test_kk_agrees_with_the_published_reward():
    rows = read_jsonl(shared_file("golden/kk_rewards.jsonl"))
    ours = kk_reward([row["response"] for row in rows], [row["solution"] for row in rows])
    assert [
        (row["response"], score) for row, score in zip(rows, ours) if score != row["score"]
    ] == []
    assert len(rows) == 640


# ---------------------------------------------------------------------------------------------- rewards: mathematics


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so $\boxed{5}$.", "5"),
        (r"\boxed{1} or \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} }", r"\frac{1}{2}"),
        (r"\boxed {a}", "a"),
        (r"$\boxed 5$ eggs", "5"),
        (r"$\boxed\frac{1}{2}$", r"\frac{1}{2}"),
        (r"\fbox{6}", "6"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\boxed{1}</think> I forgot.", None),
        (r"\boxed{1}</think> \boxed{2}", "2"),
        (r"\boxed{}", ""),
        (r"\boxed{1} no: \boxed{2", None),
        (r"the answer is 5", None),
        (r"\boxed", None),
        ("", None),
    ],
)
def test_extract_boxed(text, content):
    assert extract_boxed(text) == content


EQUAL = r"""
5 | 5.0
5 | 05
-7 | - 7
1234567 | 1,234,567
1234567 | 1{,}234{,}567
1234.5 | 1,\!234.5
52000 | 52\,000
\frac{3}{4} | 0.75
\frac{3}{4} | \dfrac34
\frac{3}{4} | \tfrac{3}4
\frac{3}{4} | 6/8
\frac 3 4 | .75
-\frac{3}{4} | \frac{-3}{4}
\frac{\frac12}{3} | 1/6
2\frac{1}{3} | \frac{7}{3}
-2\frac{1}{3} | -7/3
2 1/3 | 7/3
\sqrt{18} | 3\sqrt2
\frac{1}{\sqrt{2}} | \frac{\sqrt 2}{2}
\sqrt[3]{-27} | -3
\sqrt{-4} | 2i
2^{10} | 1024
4^{-1/2} | 0.5
2\cdot 3^2 | 18
5! | 120
1.5 \times 10^{3} | 1500
\log_2 8 | 3
\sin\frac{\pi}{6} | \frac12
|-3| | 3
e^{i\pi} | -1
(2+i)^2 | 3+4i
40\% | 40
60^\circ | 60
60^{\circ} | 60
\$12.50 | 12.5
12 \text{ cm}^2 | 12
12 | 12\,\mathrm{km}
12 | 12 square feet
12 cm | 12
3 \text{ million} | 3000000
x = 4 | 4
4 | x = 4
\theta=\frac{\pi}{4} | 0.25\pi
f(x) = x^2 | x^2
x \in [1,2] | [1, 2]
\text{Area} = 6 | 6
x^2 - 1 | (x-1)(x+1)
(a+b)^2 | a^2+2ab+b^2
\frac{x}{2} | 0.5x
\sqrt{x^2} | |x|
x_1 + x_{2} | x_2 + x_{1}
\tan^2 x | \frac{\sin^2 x}{\cos^2 x}
y = 2x + 1 | 2x - y + 1 = 0
2x + 4y = 6 | x + 2y - 3 = 0
x > 3 | 3 < x
1 \le x < 2 | 1 \leq x \lt 2
(1, \frac12) | \left( 1,\, 0.5 \right)
[0, \infty) | \left[0,+\infty\right)
(-\infty,1)\cup(2,3] | (2,3] \cup (-\infty,1)
\{1, 2, 3\} | \{3, 1, 2\}
1, 2 | 2,1
\{1, 2\} | 1 \text{ and } 2
1, 2, 3 | 1, 2, \text{ and } 3
x = 1 \text{ or } x = -1 | x = \pm 1
2 \pm \sqrt{3} | 2-\sqrt{3}, 2+\sqrt{3}
100,200 | 200, 100
\begin{pmatrix} 1/2 & 0 \\ 0 & 1 \end{pmatrix} | \begin{bmatrix} 0.5 & 0 \\ 0 & 1 \end{bmatrix}
\text{(B)} | B
\text{Monday} | monday
A,C | \text{C, A}
7:30 | 7 : 30
21_3 | 7
9^{9^{9^9}} | 9^{ \, 9^{9^9} }
{1, 2} | \{2, 1\}
18.90 | \( 18.9 \text{ dollars} \)
(x, y) = (1, 2) | (1,2)
""".strip().splitlines()

DIFFERENT = r"""
5 | 6
5 | -5
5 |
100000000000000000000 | 100000000000000000001
\frac{1}{3} | 0.333
\frac13 | 3
\frac{12}{3} | \frac{1}{23}
1\frac{2}{3} | \frac{2}{3}
\sqrt{2} | 1.41
\sqrt{2} | \sqrt[3]{2}
2^{10} | 2^{11}
40 | 0.4
5 \text{ million} | 5
5 \text{ a.m.} | 5 \text{ p.m.}
5 | 5 6
30 | 5 6
2 | 3x = 2
5 | 5, 6
5, 6 | 5
1, 1, 2 | 1, 2, 2
1,200 | 1.2
(1,200) | 1200
(1, 2) | (2, 1)
(1, 2) | [1, 2]
[1, 2) | (1, 2]
(1, 2) | (1, 2, 3)
(1, 2) | 1, 2
(1, 2) | (1, 2
\{1, 2\} | (1, 2)
(-\infty,1)\cup(2,3] | (-\infty,1)\cup(2,3)
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 1 & 2 \end{pmatrix}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 2 \\ 1 \end{pmatrix}
x | y
x | -x
x | |x|
x^2 | x^3
x^2 - 1 | (x-1)^2
x = 4 | y = 4
x = 4 | x = 5
y = 2x + 1 | y = 2x - 1
2x + y = 0 | 2x + y
x > 3 | x \ge 3
x > 3 | x < 3
2 \pm \sqrt{3} | 2 + \sqrt{3}
2+3i | 2-3i
7:30 | 7:20
\text{(B)} | C
\text{Monday} | \text{dayMon}
\text{no solution} | 0
9^{9^{9}} | 9^{9^{8^9}}
1/0 | 2/0
5 | 5☃
5 | 5\text{ or }6
24 | 24abcd
\infty | -\infty
5 | five hundred
""".strip().splitlines()

TRIPLES = [(*line.split(" |", 1), True) for line in EQUAL] + [
    (*line.split(" |", 1), False) for line in DIFFERENT
]


@pytest.mark.parametrize(("expected", "predicted", "verdict"), TRIPLES)
def test_answers_match(expected, predicted, verdict):
    assert answers_match(predicted, expected) is verdict
    if predicted.strip():
        assert answers_match(expected, predicted) is verdict  # the order does not matter


def test_math_reward_reads_the_box_and_compares():
    texts = [
        r"$\boxed{\frac12}$",
        "0.5",
        r"\boxed{0.5}</think>0.5",
        r"</think>\boxed{\frac{2}{4}\%}",
    ]
    texts += [r"\boxed{0.5", None]
    assert math_reward(texts, ["0.5"] * 6, prompts=["?"] * 6) == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    assert math_reward([r"\boxed{5}", r"\boxed{}"], [5, ""]) == [1.0, 0.0]


HOSTILE = [
    "{" * 10_000,
    "}" * 10_000,
    "(" * 900,
    "[(" * 450,
    "|" * 999,
    "-" * 990 + "5",
    r"\frac" * 190,
    r"\sqrt{" * 160 + "}" * 40,
    r"\left(" * 160,
    r"\begin{pmatrix}" * 60,
    r"\text{" * 160 + "}" * 39,
    r"\sin" * 240 + "x",
    "2^" * 490 + "2",
    "9!" * 480,
    "9!" + "!" * 900,
    "9^{9^{9}}",
    "9^{9^{9}} x",
    "0^{-1}",
    "-" + "9" * 990,
    "(9^999)" * 140,
    "(9^999+x)" * 100,
    "7^{1000}/" * 90 + "3",
    "1," * 499 + "2",
    r"\pm1," * 190 + "1",
    r"1\cup" * 190 + "1",
    "x=" * 499 + "1",
    "1<" * 499 + "1",
    " ".join(["x_{a}"] * 160),
    "\x00\x01\x7f 5",
    "\u200f5\u200f",
    "٥",
    "²",
    "𝟓",
    "\ud800\udfff5",
    "\ud800",
    "x_\ud800",
    "5_0",
    "9_1",
    "9" * 990 + "_{99}",
    r"\log_{1} 5",
    r"\log 0",
    r"\infty-\infty",
    r"\infty^{\infty}",
    r"\sqrt[0]{2}",
    r"\sqrt{\infty}",
    r"\sqrt[x]{(1,2)}",
    r"(1,2)^2",
    r"\{1,2\}!",
    r"x!",
    r"i!",
    r"|(1,2)|",
    r"i<5",
    "\\",
    "_",
    "^",
    "&",
    r"\\",
    "x=\\",
    r"\frac{1",
    r"\text{}",
    r"1\text{}2",
    ".",
    ",,,",
    "$",
]


@pytest.mark.parametrize("junk", HOSTILE, ids=lambda text: ascii(text[:12]))
def test_hostile_answers_are_wrong_and_fast(junk):
    start = time.perf_counter()
    assert not answers_match(junk, "17")
    assert not answers_match("17", junk)
    assert not answers_match(junk, "3x+(1,2)")
    answers_match(junk + " ", junk.replace(" ", "") + "+0")  # either verdict, but no exception
    assert math_reward(["\\boxed{" + junk + "}", junk], ["17", "17"]) == [0.0, 0.0]
    assert kk_reward([junk, f"</think><answer>{junk}</answer>"], [TRUTH] * 2) == [-3.0, -1.0]
    assert time.perf_counter() - start < 1.0


MEGABYTE = 1_000_000


@pytest.mark.parametrize(
    "text",
    [
        "x" * MEGABYTE,
        " " * MEGABYTE,
        "{" * MEGABYTE,
        "\\" * MEGABYTE,
        r"\boxed{" * (MEGABYTE // 7),
        r"\boxed" * (MEGABYTE // 6),
        r"\boxed" + " " * MEGABYTE,
        r"\boxed{" + "{" * (MEGABYTE // 2) + "}" * (MEGABYTE // 2) + "}",
        r"\boxed{" + "9" * MEGABYTE + "}",
        r"\boxed{" + "1," * (MEGABYTE // 2) + "}",
        "</think>" * (MEGABYTE // 8),
        "</think><answer>" + "Jack is a " * (MEGABYTE // 10) + "</answer>",
        "</think><answer>Jack"
        + " " * MEGABYTE
        + "is a knight, Jackson is"
        + " " * MEGABYTE
        + "a knave?</answer>knave",
        "</think><answer>Jack is a knight, Jack is a knight"
        + "Jackson is " * (MEGABYTE // 11)
        + "</answer>",
    ],
    ids=range(14),
)
def test_a_megabyte_is_harmless(text):
    start = time.perf_counter()
    assert math_reward([text], ["17"]) == [0.0]
    assert kk_reward([text], [TRUTH])[0] in (-3.0, -1.0, 3.0)
    assert time.perf_counter() - start < 5.0


def test_limits_are_kept():
    deep = lambda n: "(" * n + "1" + ")" * n
    assert answers_match(deep(rewards.MAX_DEPTH - 1), "1")
    assert not answers_match(deep(rewards.MAX_DEPTH + 1), "1")
    long = "1" + "+0" * rewards.MAX_LENGTH
    assert (
        answers_match("1+0+0", "1") and not answers_match(long, "1") and answers_match(long, long)
    )


def test_math_agrees_with_two_established_graders_and_is_fast():
    rows = read_jsonl(shared_file("data/math_grading.jsonl"))
    responses, solutions = [row["response"] for row in rows], [row["solution"] for row in rows]
    start = time.process_time()
    ours = math_reward(responses, solutions)
    assert (time.process_time() - start) / len(rows) < 1e-3  # seconds per pair
    assert sum(score == row["correct"] for score, row in zip(ours, rows)) >= 0.98 * len(rows)


def test_a_pair_takes_less_than_a_millisecond():
    start = time.process_time()
    for expected, predicted, _ in TRIPLES:
        answers_match(predicted, expected)
    assert (time.process_time() - start) / len(TRIPLES) < 1e-3


# ---------------------------------------------------------------------------------------------- puzzles, tokenizer, data files


def test_generated_puzzles_have_one_solution():
    """Counted by brute force on the text itself, not on the generator's claims."""
    rng = random.Random(1)
    for people in (2, 3, 4, 5, 8):
        for _ in range(10):
            puzzle = puzzles.generate_puzzle(rng, people)
            names, found = puzzle["names"], []
            claims = literal_eval(puzzle["statements"])
            for number in range(2**people):
                roles = [bool(number >> i & 1) for i in range(people)]
                text_of = {f"{name} is a {word}": value for name, is_knight in zip(names, roles)
                           for word, value in (("knight", is_knight), ("knave", not is_knight))}  # fmt: skip
                consistent = True
                for claim, is_knight in zip(claims, roles):
                    sentence = puzzles.claim_text(claim, names).replace(" is not a ", " is a ")
                    facts = re.findall(
                        r"[A-Z][a-z]+ is a (?:knight|knave)", sentence.removeprefix("If ")
                    )
                    values = [text_of[fact] for fact in facts]
                    if claim[0] == "not":
                        truth = not values[0]
                    elif len(values) == 1:
                        truth = values[0]
                    else:
                        truth = {
                            "and": values[0] and values[1],
                            "or": values[0] or values[1],
                            "->": not values[0] or values[1],
                            "<=>": values[0] == values[1],
                        }[claim[0]]
                    consistent = consistent and truth == is_knight
                if consistent:
                    found.append(roles)
            assert found == [puzzle["solution"]]
            assert puzzle["quiz"].startswith(puzzles.OPENING) and puzzle["quiz"].endswith(
                puzzles.QUESTION
            )


def test_committed_puzzles_are_disjoint_and_solved():
    train, test = (
        read_jsonl(ROOT / "data" / "kk_train.jsonl"),
        read_jsonl(ROOT / "data" / "kk_test.jsonl"),
    )
    assert not {row["quiz"] for row in train} & {row["quiz"] for row in test}
    assert len({row["quiz"] for row in train + test}) == len(train) + len(test)
    assert (
        {len(row["names"]) for row in train} == {len(row["names"]) for row in test} == {2, 3, 4, 5}
    )
    for row in train + test:
        assert puzzles.solutions(literal_eval(row["statements"])) == [tuple(row["solution"])]
        answer = "\n".join(
            f"({i}) {name} is a {'knight' if role else 'knave'}"
            for i, (name, role) in enumerate(zip(row["names"], row["solution"]), 1)
        )
        assert row["solution_text_format"] == answer


def fake_run(method, seed, sampled, before=0.5):
    """A line of data/lab/results/runs.jsonl: `sampled` are the accuracies of its evaluations on 2 people; on 3 they are half of that."""
    import experiments

    def row(value):
        return {"greedy": [value, 0, 1], "avg@1": [value, 0, 1], "prompts": 10}

    evaluations = [
        {"step": step, "table": {"2": row(value), "3": row(value / 2)}}
        for step, value in enumerate([before, *sampled])
    ]
    metrics = {key: [1.0] * 4 for key in experiments.KEPT} | {"masked_share": [0.25] * 4}
    return {"method": method, "seed": seed, "evaluations": evaluations, "metrics": metrics}


def test_experiments_go_on_where_they_were(tmp_path, monkeypatch, capsys):
    """Runs that are in the results are left out, unfinished ones resumed, and the table says what is there."""
    import experiments

    monkeypatch.setattr(experiments, "RESULTS", tmp_path / "runs.jsonl")
    lines = [fake_run("GRPO", 0, [0.6]), fake_run("GRPO", 1, [0.8]), fake_run("AR", 0, [0.8])]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "GRPO-2" / "checkpoints").mkdir(parents=True)
    (tmp_path / "GRPO-2" / "config.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["experiments.py", "--list", "--work", str(tmp_path)])
    experiments.main()
    *made, rest = capsys.readouterr().out.split(
        "\n", 2
    )  # the two files of held-out prompts, and the runs
    commands = rest.splitlines()
    assert all(line.startswith("python data/") for line in made)
    assert (
        len(commands) == len(experiments.PLAN) - 3
        and sum("--resume" in command for command in commands) == 1
    )
    assert not any(
        "--name GRPO-0 " in command or "--name GRPO-1 " in command for command in commands
    )
    for (
        command
    ) in commands:  # each of them is a command that lopti.py takes, and has a name of its own
        if "--resume" not in command:
            lopti.parse_arguments(command.split()[2:])
    names = [command.split("--name ")[1] for command in commands if "--name" in command]
    assert len(set(names)) == len(names)
    monkeypatch.setattr(sys, "argv", ["experiments.py", "--table"])
    experiments.main()
    printed = capsys.readouterr().out
    assert "25.00%" in printed and "| 4.0 " in printed
    assert "+0.150" in printed  # AR against GRPO: 0.8 - 0.6 on 2 people, half of that on 3


def test_the_plan_is_the_one_of_the_design():
    import experiments

    assert (
        len(experiments.PLAN)
        == len(set(experiments.PLAN))
        == 5 * 16 + 2 * 5 + 3 * 3 + 3 * 9 + 2 * 3 + 5 * 4
    )
    for name in experiments.PRIMARY | experiments.OTHERS | experiments.CONTROLS:
        assert all((name, seed) in experiments.PLAN for seed in range(5))
    seconds, first, third = (
        experiments.PLAN.index(entry) for entry in (("AR + Lopti", 2), ("min-p", 0), ("AR", 3))
    )
    assert first < seconds < third


def test_accuracy_of_a_run_and_its_interval():
    """The mean of the last three evaluations; Student's interval by hand; differences within seeds only."""
    import experiments

    run = fake_run("AR", 0, [0.1, 0.6, 0.7, 0.8])
    assert experiments.accuracy(run, size="2") == pytest.approx(0.7) and experiments.accuracy(
        run
    ) == pytest.approx((0.7 + 0.35) / 2)
    assert experiments.accuracy(run, size="2", before=True) == 0.5
    mean, half = experiments.mean_and_interval([1.0, 2.0, 3.0])  # standard deviation 1
    assert mean == 2.0 and half == pytest.approx(4.303 / 3**0.5)
    assert experiments.mean_and_interval([2.0]) == (2.0, None)
    lines = [
        fake_run("GRPO", 1, [0.4]),
        fake_run("GRPO", 0, [0.2]),
        fake_run("AR", 0, [0.6]),
        fake_run("AR", 1, [0.5]),
        fake_run("AR", 2, [0.9]),
    ]
    assert experiments.differences(lines, "AR", size="2") == pytest.approx([0.4, 0.1])


def test_arithmetic_has_a_table_and_a_baseline_of_its_own():
    """By hand: three levels, .6 · (1 + 1/2 + 1/4)/3 against .3 · the same; GRPO on puzzles takes no part."""
    import experiments

    lines = [
        fake_run("GRPO", 0, [0.9]),
        fake_run("GRPO, arithmetic", 0, [0.3], before=0.2),
        fake_run("Lopti, arithmetic", 0, [0.6]),
    ]
    for line in lines[1:]:
        for evaluation in line["evaluations"]:
            first, second = (evaluation["table"].pop(size) for size in "23")
            evaluation["table"] = {
                "1": first,
                "2": second,
                "3": {name: [second[name][0] / 2, 0, 1] for name in ("greedy", "avg@1")},
            }
    head, before, grpo, ours = experiments.accuracies(
        lines, experiments.ARITHMETIC, experiments.LEVELS
    )
    assert head[2:6] == ("level 1", "level 2", "level 3", "mean") and before[2:6] == (
        "0.200",
        "0.100",
        "0.050",
        "0.117",
    )
    assert grpo == ("GRPO, arithmetic", "1", "0.300", "0.150", "0.075", "0.175", "", "")
    assert ours == (
        "Lopti, arithmetic",
        "1",
        "0.600",
        "0.300",
        "0.150",
        "0.350",
        "+0.175",
        "+100.0%",
    )
    assert [row[0] for row in experiments.accuracies(lines)[2:]] == ["GRPO"]
    assert [row[:2] for row in experiments.claims(lines)[1:]] == [
        ("arithmetic: Lopti beats GRPO", "+0.175")
    ]
    assert "0.117" in experiments.table(lines) and "| Lopti, arithmetic" in experiments.table(lines)


def test_claims_are_judged_by_their_intervals():
    """One-sided on the claimed side: held; on the other: did not hold; interval over 0 or one seed: undecided."""
    import experiments

    def verdict(values):
        return experiments.verdict(*experiments.mean_and_interval(values))

    assert verdict([0.1, 0.12, 0.11]) == "held" and verdict([-0.1, -0.12, -0.11]) == "did not hold"
    assert verdict([0.1, -0.1, 0.3]) == verdict([0.5]) == "undecided"
    for claim, method, baseline, sign in experiments.CLAIMS:
        assert method in experiments.METHODS and baseline in experiments.METHODS and sign in (1, -1)
    lines = [
        fake_run(name, seed, [base + 0.01 * seed])
        for name, base in (("GRPO", 0.8), ("high only", 0.4), ("AR", 0.6))
        for seed in range(5)
    ]
    _, *found = experiments.claims(lines)
    assert found == [  # not within seeds: 2.776·sqrt(2·var/5), var that of 0.0075·seed
        (
            "AR beats GRPO",
            "-0.150",
            "-0.150 to -0.150",
            "5",
            "did not hold",
            "-0.150 ± 0.021 did not hold",
        ),
        (
            "high-probability tokens alone are worse than all",
            "-0.300",
            "-0.300 to -0.300",
            "5",
            "held",
            "-0.300 ± 0.021 held",
        ),
    ]


def test_difference_to_all_runs_of_grpo():
    """By hand: AR .9 and .7 against GRPO .4, .6 and .8 on 2 people, half of each on 3, hence .75 of it on average."""
    import experiments

    lines = [
        fake_run("GRPO", 0, [0.4]),
        fake_run("GRPO", 1, [0.6]),
        fake_run("GRPO, seeds 5 to 9", 5, [0.8]),
        fake_run("AR", 0, [0.9]),
    ]
    assert experiments.difference_to_all(lines, "AR") == (pytest.approx(0.75 * 0.3), None)
    mean, half = experiments.difference_to_all([*lines, fake_run("AR", 1, [0.7])], "AR")
    assert mean == pytest.approx(0.75 * 0.2) and half == pytest.approx(
        0.75 * 12.706 * (0.02 / 2 + 0.04 / 3) ** 0.5
    )
    _, row, *_ = experiments.claims([*lines, fake_run("AR", 1, [0.7])])
    assert row[-1] == f"+0.150 ± {half:.3f} undecided"


def test_collapse_is_a_fall_of_a_tenth_below_the_best():
    import experiments

    def run(accuracies):
        return {"metrics": {"accuracy": accuracies}}

    assert not experiments.collapsed(run([0.5] * 10 + [0.8] * 20))
    assert experiments.collapsed(run([0.5] * 10 + [0.8] * 10 + [0.6] * 10))
    assert not experiments.collapsed(
        run([0.8] * 20 + [0.6] * 4)
    )  # the mean of 10 steps has fallen by .08 only


def notebook():
    return json.loads((ROOT / "notebook.ipynb").read_text(encoding="utf-8"))


def pictures(cells):
    """How many pictures each code cell shows."""
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    return [
        sum("image/png" in output.get("data", {}) for output in cell["outputs"]) for cell in code
    ]


def test_committed_notebook_is_executed_and_restates_nothing():
    """It has its outputs, in order and without errors; what lopti.py and rewards.py define it imports."""
    code = [cell for cell in notebook()["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert sum(pictures(code)) >= 12
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not any(
        output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs
    )
    defined = {
        name
        for cell in code
        for name in re.findall(r"^(?:def|class) (\w+)", "".join(cell["source"]), re.MULTILINE)
    }
    assert not defined & (set(dir(lopti)) | set(dir(rewards)) | set(dir(__import__("experiments"))))
    assert "/home" not in json.dumps(outputs) and "/tmp" not in json.dumps(outputs)


def test_notebook_runs_with_every_picture(tmp_path):
    """From top to bottom with fewer batches: no error, and the same pictures in the same cells as committed."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    book = nbformat.read(ROOT / "notebook.ipynb", as_version=4)
    wanted = pictures(book.cells)
    os.environ["LOPTI_QUICK"] = "1"  # the kernel inherits it
    try:
        nbclient.NotebookClient(
            book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
        ).execute()
    finally:
        del os.environ["LOPTI_QUICK"]
    assert pictures(book.cells) == wanted


def test_readme_and_notebook_show_the_results_that_are_there():
    """Accuracies and verdicts in both are those of data/lab/results/runs.jsonl, to the last digit."""
    import experiments

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    outputs = [
        output
        for cell in notebook()["cells"]
        if cell["cell_type"] == "code"
        for output in cell["outputs"]
    ]
    shown = ["".join(output.get("data", {}).get("text/markdown", "")) for output in outputs]
    lines = experiments.read_lines(experiments.RESULTS)
    assert experiments.markdown(experiments.accuracies(lines)) in text
    for rows in (
        experiments.accuracies(lines, experiments.ARITHMETIC, experiments.LEVELS),
        experiments.claims(lines),
    ):
        assert experiments.markdown(rows) in text and experiments.markdown(rows) in shown


def test_worked_solutions_are_right():
    rng = random.Random(0)
    for people in (2, 3, 5):
        for _ in range(20):
            puzzle = puzzles.generate_puzzle(rng, people)
            text = puzzles.worked_solution(rng, puzzle["names"], literal_eval(puzzle["statements"]))
            assert rewards.kk_reward([text], [puzzle["solution_text_format"]]) == [3.0]


def test_real_puzzles_are_in_our_language(tokenizer):
    """Every sentence of the public set can be written by our generator, and every word is in the vocabulary."""
    rows = [
        row
        for people in range(3, 8)
        for row in read_jsonl(shared_file(f"data/kk_{people}ppl.jsonl"))
    ]
    for row in rows:
        for name, claim in zip(row["names"], literal_eval(row["statements"])):
            text = puzzles.claim_text(claim, row["names"])
            assert any(
                attribution.format(name=name, claim=text) in row["quiz"]
                for attribution in puzzles.ATTRIBUTIONS
            )
    ids = tokenizer([row["quiz"] for row in rows], add_special_tokens=False)["input_ids"]
    assert not any(tokenizer.unk_token_id in row for row in ids)
    assert tokenizer.batch_decode(ids) == [row["quiz"] for row in rows]


def test_tokenizer_round_trips(tokenizer):
    texts = [
        r"\boxed{12}",
        r"The answer is \boxed{\frac{3}{7}}.",
        "(1, 2) + (3, 4) = (4, 6). The answer is \\boxed{(4, 6)}.",
    ]
    texts += [row["quiz"] for row in read_jsonl(ROOT / "data" / "kk_test.jsonl")]
    texts += [
        row[key]
        for row in read_jsonl(ROOT / "data" / "math_test.jsonl")
        for key in ("problem", "answer")
    ]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert tokenizer.batch_decode(ids) == texts
    assert not any(tokenizer.unk_token_id in row for row in ids)
    prompt = lopti.render_prompt(tokenizer, lopti.TASKS["kk"].messages(texts[3]), "<think>")
    assert prompt.endswith("<|assistant|><think>") and texts[3] in prompt


def test_bundled_policy_is_small_and_standard():
    assert sum(path.stat().st_size for path in TINY.iterdir()) <= 8 * 2**20
    assert (TINY / "model.safetensors").exists()
    model = AutoModelForCausalLM.from_pretrained(TINY)
    assert model.config.model_type == "llama" and model.dtype == torch.float32


def test_math_files_grade_themselves():
    train, test = (
        read_jsonl(ROOT / "data" / "math_train.jsonl"),
        read_jsonl(ROOT / "data" / "math_test.jsonl"),
    )
    assert not {row["problem"] for row in train} & {row["problem"] for row in test}
    answers = [row["answer"] for row in train + test]
    assert rewards.math_reward([f"\\boxed{{{answer}}}" for answer in answers], answers) == [
        1.0
    ] * len(answers)
    for kind, sign in (
        ("integer", r"\d+"),
        ("fraction", r"\\frac\{\d+\}\{\d+\}"),
        ("decimal", r"\d+\.\d"),
        ("tuple", r"\(\d+, \d+\)"),
    ):
        assert any(re.fullmatch(sign, answer) for answer in answers), kind


# ---------------------------------------------------------------------------------------------- arguments, data, evaluation


def test_epochs_are_instead_of_steps(tmp_path):
    assert (
        lopti.parse_arguments(["--epochs", "3"]).steps == 0
        and lopti.parse_arguments(["--preset", "kk", "--steps", "9"]).steps == 9
    )
    rows = read_jsonl(ROOT / "data" / "kk_train.jsonl")
    data = kk_file(tmp_path, [row for row in rows if len(row["names"]) == 2][:5])
    small = [str(flag) for flag in SMALL[2:]] + [
        "--max-new-tokens",
        "8",
        "--data",
        data,
        "--output",
        str(tmp_path),
        "--name",
        "two",
    ]
    assert lopti.main(["--epochs", "2", *small]) == 0  # 2 rounds of 5 prompts, 2 a step
    assert len(read_jsonl(tmp_path / "two" / "metrics.jsonl")) == 5


def test_presets_and_explicit_flags():
    assert lopti.parse_arguments([]).alpha == 0 and lopti.parse_arguments([]).eta == 0
    for preset in lopti.PRESETS:
        args = lopti.parse_arguments(["--preset", preset])
        assert args.alpha == 0 and args.eta == 0
    paper = lopti.parse_arguments(["--preset", "kk", "--alpha", "0.3", "--eta", "0.5"])
    settings = {"learning_rate": 1e-6, "weight_decay": 0.01, "max_grad_norm": 1.0, "prompts_per_step": 64, "group_size": 8, "mini_batch_size": 256,
                "temperature": 0.7, "clip_low": 0.2, "clip_high": 0.24, "clip_dual": 10.0, "kl_coef": 0.001, "epochs": 5,
                "max_prompt_length": 400, "max_new_tokens": 4096, "alpha": 0.3, "eta": 0.5}  # fmt: skip
    assert {name: getattr(paper, name) for name in settings} == settings
    assert lopti.parse_arguments(["--preset", "kk", "--temperature", "1.0"]).temperature == 1.0
    assert lopti.parse_arguments(["--temperature", "0.9", "--preset", "kk"]).temperature == 0.9
    sizes = [
        (args.prompts_per_step, args.mini_batch_size)
        for args in map(
            lopti.parse_arguments,
            ([], ["--task", "math"], ["--task", "math", "--prompts-per-step", "8"]),
        )
    ]
    assert sizes == [(16, 64), (64, 256), (8, 256)]


def test_help_documents_every_field(capsys):
    with pytest.raises(SystemExit) as stop:
        lopti.main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    for name in Arguments.__dataclass_fields__:
        assert "--" + name.replace("_", "-") in text
    for group in ("method", "sampling", "optimisation", "model and data", "evaluation", "run"):
        assert f"\n{group}:" in text


def kk_file(folder, rows, name="rows.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_training_prompts_are_never_evaluation_prompts(tokenizer, tmp_path):
    test = read_jsonl(ROOT / "data" / "kk_test.jsonl")[:6]
    train = read_jsonl(ROOT / "data" / "kk_train.jsonl")
    small = [row for row in train if len(row["names"]) == 2][:4]
    disguised = {**test[0], "quiz": "  " + test[0]["quiz"].replace(". ", ".  ").upper()}
    said = []
    args = Arguments(
        data=kk_file(tmp_path, small + test[:3] + [disguised]),
        eval_data=kk_file(tmp_path, test, "eval.jsonl"),
    )
    rows, held_out = lopti.load_data(args, tokenizer, said.append)
    assert len(rows) == 4 and len(held_out) == 6
    assert any("4 dropped" in line for line in said)
    assert not {row["question"] for row in rows} & {row["question"] for row in held_out}
    with pytest.raises(lopti.UserError, match="no training prompts are left"):
        lopti.load_data(
            Arguments(data=args.eval_data, eval_data=args.eval_data), tokenizer, said.append
        )


@pytest.mark.parametrize("trained_in", ["K&K", "TRL", "verl", "verl, rendered"])
@pytest.mark.parametrize("evaluated_in", ["K&K", "TRL", "verl", "verl, rendered"])
def test_one_question_in_two_shapes_is_one_question(tokenizer, tmp_path, trained_in, evaluated_in):
    """A bare puzzle, chat messages with a system prompt, a chat that is rendered already: the same puzzle is not trained on."""

    def file(name, shape, rows):
        def written(row):
            system, user = (
                {"role": "system", "content": f"Be brief, in a {name} way."},
                {"role": "user", "content": row["quiz"]},
            )
            rendered = {
                "role": "user",
                "content": f"<|im_start|>user\nThe puzzle: {row['quiz']}<|im_end|>\n<|im_start|>assistant\n",
            }
            return {
                "K&K": row,
                "TRL": {"prompt": [system, user], "solution": row["solution_text_format"]},
                "verl": {
                    "prompt": [system, user],
                    "reward_model": {"ground_truth": row["solution_text_format"]},
                },
                "verl, rendered": {
                    "prompt": [rendered],
                    "reward_model": {"ground_truth": row["solution_text_format"]},
                },
            }[shape]

        return kk_file(tmp_path, [written(row) for row in rows], f"{name}.jsonl")

    rows = read_jsonl(ROOT / "data" / "kk_test.jsonl")[:8]
    args = Arguments(
        data=file("train", trained_in, rows[2:]), eval_data=file("eval", evaluated_in, rows[:5])
    )
    training, evaluation = lopti.load_data(args, tokenizer, lambda text: None)
    assert len(evaluation) == 5 and [row["solution"] for row in training] == [
        row["solution_text_format"] for row in rows[5:]
    ]


def test_prompts_begin_as_the_model_is_used_to(tokenizer):
    """Llama's and Gemma's tokenizers put a token before every text: before a base model's prompt, once, and not before a template's own."""
    from tokenizers.processors import TemplateProcessing

    begins = copy.deepcopy(tokenizer)
    begins.add_special_tokens({"bos_token": "<|bos|>"})
    begins._tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", begins.bos_token_id)]
    )
    assert begins("Lily")["input_ids"][0] == begins.bos_token_id
    assert (
        lopti.begun(begins, "Lily") == lopti.begun(begins, "<|bos|>Lily") == "<|bos|>Lily"
        and lopti.begun(tokenizer, "Lily") == "Lily"
    )
    chat = [{"role": "user", "content": "Lily"}]
    assert not lopti.render_prompt(begins, chat).startswith("<|bos|>")  # has a template
    begins.chat_template = None
    assert lopti.render_prompt(begins, chat, "<think>") == "<|bos|>Lily\n\n<think>"


def test_a_chat_template_that_refuses_system_messages(tokenizer):
    """Gemma's does: the system message then opens the user's."""
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('no such role') }}{% endif %}[{{ m.content }}]{% endfor %}"
    system, user = {"role": "system", "content": "Think."}, {"role": "user", "content": "Who?"}
    assert lopti.render_prompt(strict, [system, user], "<think>") == "[Think.\n\nWho?]<think>"
    with pytest.raises(lopti.UserError, match="does not take the roles user, tool: no such role"):
        lopti.render_prompt(strict, [user, {"role": "tool", "content": "3"}])


SAID = {"role": "user", "content": "Who?"}


@pytest.mark.parametrize(
    "row, words",
    [
        (
            {"prompt": [{"role": "user", "content": None}], "solution": "s"},
            "do not hold a prompt and a solution",
        ),
        ({"prompt": [{"role": "user"}], "solution": "s"}, "do not hold a prompt and a solution"),
        (
            {
                "prompt": [{"role": "user", "content": [{"type": "text", "text": "Who?"}]}],
                "solution": "s",
            },
            "do not hold a prompt and a solution",
        ),
        ({"prompt": SAID, "solution": "s"}, "do not hold a prompt and a solution"),
        ({"prompt": [{"content": "Who?"}], "solution": "s"}, "do not hold a prompt and a solution"),
        ({"prompt": [1, 2], "solution": "s"}, "do not hold a prompt and a solution"),
        ({"prompt": [SAID], "reward_model": "s"}, "do not hold a prompt and a solution"),
        ({"quiz": 3, "solution_text_format": "s"}, "do not hold a prompt and a solution"),
        ({"quiz": ["Who?"], "solution_text_format": "s"}, "do not hold a prompt and a solution"),
        ({"prompt": [], "solution": "s"}, "its prompt is empty"),
        ({"prompt": " ", "solution": "s"}, "its prompt is empty"),
        ({"quiz": "", "solution_text_format": "s"}, "its quiz is empty"),
    ],
)
def test_rows_that_hold_no_prompt(tmp_path, row, words):
    with pytest.raises(lopti.UserError, match=f"row 1 of the data .*{words}"):
        lopti.load_rows(kk_file(tmp_path, [row]), lopti.TASKS["kk"])


def test_long_prompts_are_dropped_and_counted(tokenizer):
    said = []
    rows, _ = lopti.load_data(Arguments(max_prompt_length=75), tokenizer, said.append)
    assert any(
        re.search(r"dropped \d+ training prompts longer than 75 tokens", line) for line in said
    )
    assert rows and all(len(tokenizer(row["prompt"])["input_ids"]) <= 75 for row in rows)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_every_file_format(tokenizer, tmp_path, suffix):
    import datasets

    rows = [
        {
            "quiz": f"quiz {i}, with a comma",
            "solution_text_format": "(1) Zoey is a knight\n(2) Liam is a knave",
        }
        for i in range(3)
    ]
    data, path = datasets.Dataset.from_list(rows), str(tmp_path / f"rows.{suffix}")
    {"jsonl": data.to_json, "json": data.to_json, "csv": data.to_csv, "parquet": data.to_parquet}[
        suffix
    ](path)
    found = lopti.load_rows(path, lopti.TASKS["kk"])
    assert [row["question"] for row in found] == [row["quiz"] for row in rows]
    assert all(
        row["solution"] == rows[0]["solution_text_format"] and row["difficulty"] == "2"
        for row in found
    )


VERL_CHAT = "<|im_start|>system\nThink.<|im_end|>\n<|im_start|>user\nWho is a knave?<|im_end|>\n<|im_start|>assistant\n<think>"
ROWS = [  # task, a row as its data set has it, the prompt's text, the solution
    ("kk", {"quiz": "Who?", "solution_text_format": "(1) Lily is a knave"}, None, "(1) Lily is a knave"),
    ("kk", {"prompt": [{"role": "user", "content": VERL_CHAT}], "reward_model": {"style": "rule", "ground_truth": {"solution_text_format": "(1) Lily is a knave"}}},
     VERL_CHAT, "(1) Lily is a knave"),
    ("kk", {"prompt": [{"role": "user", "content": "Who?"}], "solution": "(1) Lily is a knave"}, "<|user|>Who?<|assistant|>", "(1) Lily is a knave"),
    ("math", {"prompt": "1 + 1 =", "solution": "2"}, "1 + 1 =", "2"),
    ("math", {"prompt": [{"role": "user", "content": "What is 1 + 1?"}], "reward_model": {"ground_truth": "2", "style": "rule"}}, "<|user|>What is 1 + 1?<|assistant|>", "2"),
    ("math", {"question": "How many?", "answer": "She has <<1+1=2>>2.\n#### 1,002"}, None, "1,002"),
    ("math", {"problem": "What is 1 + 1?", "answer": "2", "solution": "It is clear."}, None, "2"),
    ("math", {"problem": "Halve 1.", "solution": "So it is $\\boxed{\\frac{1}{2}}$.", "level": "Level 3"}, None, "\\frac{1}{2}"),
]  # fmt: skip


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("task, row, prompt, solution", ROWS)
def test_every_shape_of_row(tokenizer, tmp_path, suffix, task, row, prompt, solution):
    """The shapes of K&K, TRL, verl, GSM8K, DeepScaleR and MATH, from a file to a prompt and what the reward is given."""
    import datasets

    data, path = datasets.Dataset.from_list([row]), str(tmp_path / f"rows.{suffix}")
    (data.to_json if suffix == "jsonl" else data.to_parquet)(path)
    args = Arguments(task=task, people=[1], data=path, eval_data=path, eval_only=True)
    training, (found,) = lopti.load_data(args, tokenizer, lambda text: None)
    assert not training  # the same row: it cannot be trained on and evaluated on
    if prompt is None:
        expected = lopti.TASKS[task].messages(next(iter(row.values())))
        prompt = lopti.render_prompt(tokenizer, expected, lopti.TASKS[task].opening)
    assert found["prompt"] == prompt and found["solution"] == solution
    assert found["difficulty"] == ("1" if task == "kk" else row.get("level", "all"))
    answer = f"</think><answer>{solution}</answer>" if task == "kk" else f"\\boxed{{{solution}}}"
    opening = "" if prompt.endswith("<think>") else "<think>"
    assert lopti.judge([opening + answer], [found], args) == [lopti.TASKS[task].solved]


def test_real_files_of_every_shape(tokenizer):
    folder = SHARED / "data"
    if not folder.exists():
        pytest.skip("the real data is not here")
    qwen = AutoTokenizer.from_pretrained(TINY)
    for name, task, count in (
        ("kk_3ppl.jsonl", "kk", 900),
        ("gsm8k.jsonl", "math", None),
        ("math.jsonl", "math", None),
        ("verl_kk.parquet", "kk", 100),
        ("verl_math.parquet", "math", 200),
    ):
        args = Arguments(task=task, people=[3], data=str(folder / name), max_prompt_length=10**6)
        training, _ = lopti.load_data(args, qwen, lambda text: None)
        assert training and (count is None or len(training) <= count)
        texts = [
            f"</think><answer>{row['solution']}</answer>"
            if task == "kk"
            else f"\\boxed{{{row['solution']}}}"
            for row in training
        ]
        rewards_given = lopti.judge(texts, training, args)
        assert sum(reward == lopti.TASKS[task].solved for reward in rewards_given) >= 0.99 * len(
            training
        ), name
        assert all(
            row["prompt"].count("<|im_start|>assistant") <= 1
            and row["prompt"].count("<|assistant|>") <= 1
            for row in training
        )
    # verl's file holds 100 of the same puzzles, each in a rendered chat: none of them may be trained on
    args = Arguments(
        people=[3],
        data=str(folder / "verl_kk.parquet"),
        eval_data=str(folder / "kk_3ppl.jsonl"),
        max_prompt_length=10**6,
        eval_only=True,
    )
    assert lopti.load_data(args, qwen, lambda text: None)[0] == []


def test_a_reward_function_of_ones_own(tmp_path, monkeypatch):
    """It gets every column of the data, as in TRL."""
    (tmp_path / "mine.py").write_text(
        "def f(completions, solution, colour, prompts, **columns):\n    return [len(c) + len(k) for c, k in zip(completions, colour)]\n"
    )
    monkeypatch.chdir(tmp_path)
    args = Arguments(reward="mine:f", solved_reward=6.0)
    rows = [
        {"prompt": "p", "solution": "s", "columns": {"colour": "red", "size": 1}},
        {"prompt": "p", "solution": "s", "columns": {"colour": "blue"}},
    ]
    assert lopti.judge(["ab", "ab"], rows, args) == [5.0, 6.0] and lopti.solved(args) == 6.0
    for wrong in ("mine:g", "nothing_there:f", "mine"):
        with pytest.raises(lopti.UserError, match="give MODULE:FUNCTION"):
            lopti.reward_function(Arguments(reward=wrong))


# ---------------------------------------------------------------------------------------------- memory and precision


def test_float32_weights_learn_where_bfloat16_weights_do_not():
    """AdamW at learning rate 1e-6 moves a weight of size 1 by 1e-6: bfloat16 rounds that away, float32 does not."""
    moved = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = random_model().to(dtype)
        for parameter in model.parameters():
            parameter.data.fill_(1.0)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        lopti.make_optimizer(model, Arguments(learning_rate=1e-6, weight_decay=0.0)).step()
        moved[dtype] = max((parameter - 1).abs().max().item() for parameter in model.parameters())
    assert moved[torch.float32] == pytest.approx(1e-6, rel=0.1) and moved[torch.bfloat16] == 0.0


def test_bfloat16_is_for_forward_passes_only():
    """--dtype bfloat16: other log-probabilities, near the float32 ones; weights, gradients and π_ref as they should be."""
    model, _ = lopti.load_model(str(TINY), torch.device("cpu"), dtype="bfloat16")
    rollout = random_rollout(model)
    rough = lopti.token_logprobs(model, rollout, 1.0).logprobs
    rough.sum().backward()
    model.forward_dtype = torch.float32
    exact = lopti.token_logprobs(model, rollout, 1.0).logprobs
    assert rough.dtype == torch.float32 and not torch.equal(rough, exact)
    assert (rough - exact)[rollout.mask].abs().mean() < 0.1
    assert {parameter.dtype for parameter in model.parameters()} | {
        parameter.grad.dtype for parameter in model.parameters()
    } == {torch.float32}
    model.forward_dtype = torch.bfloat16
    assert {
        parameter.dtype for parameter in lopti.make_reference(model, Arguments()).parameters()
    } == {torch.bfloat16}
    buffers = dict(
        lopti.make_reference(model, Arguments()).named_buffers()
    )  # rotary frequencies, which bfloat16 would falsify
    assert buffers and all(
        torch.equal(buffers[name], values) for name, values in model.named_buffers()
    )
    assert lopti.make_reference(model, Arguments(kl_coef=0.0)) is None
    assert lopti.load_model(str(TINY), torch.device("cpu"))[0].forward_dtype == torch.float32


def test_gradient_checkpointing_changes_memory_not_gradients(gpt2):
    """The same gradient, by two forward passes of each layer; dropout stays off, and sampling is not touched."""
    for model in (random_model(), gpt2.eval()):
        rollout, gradients, calls = random_rollout(model), [], []
        layer = next(module for name, module in model.named_modules() if name.endswith(".0.mlp"))
        handle = layer.register_forward_pre_hook(lambda *inputs: calls.append(1))
        for on in (False, True):
            model.zero_grad()
            lopti.checkpoint_gradients(model, on)
            lopti.token_logprobs(model, rollout, 1.0).logprobs.sum().backward()
            gradients.append(
                torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            )
        handle.remove()
        assert len(calls) == 3  # once, and with checkpointing twice
        assert torch.allclose(*gradients, rtol=1e-5, atol=1e-6) and gradients[0].norm() > 1
        assert not any(
            module.training for module in model.modules() if isinstance(module, torch.nn.Dropout)
        )
        model.eval()
        (
            getattr(model, "activation_checkpointing_disable", None)
            or model.gradient_checkpointing_disable
        )()


def test_random_shapes_have_the_parameters_of_qwen(tokenizer):
    """Counted without weights: 0.494, 1.544, 3.086 and 7.616 billion, as the model cards say."""
    for name, billions in (
        ("Qwen2.5-0.5B", 0.494),
        ("Qwen2.5-1.5B", 1.544),
        ("Qwen2.5-3B", 3.086),
        ("Qwen2.5-7B", 7.616),
    ):
        with torch.device("meta"):
            model = lopti.random_model(name, tokenizer)
        assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(
            billions, abs=0.001
        )
    with pytest.raises(lopti.UserError, match="the shapes are Qwen2.5-0.5B"):
        lopti.random_model("Qwen9", tokenizer)


def test_benchmark_prints_grpo_beside_lopti(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        lopti.main(
            [
                "--benchmark",
                "1",
                "--prompts-per-step",
                "2",
                "--group-size",
                "4",
                "--max-new-tokens",
                "20",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.startswith(("GRPO", "Lopti "))]
    assert [row[0] for row in rows] == ["GRPO"] * 5 + ["Lopti"] * 5
    assert all(float(row[2 + (row[1] == "whole")]) > 0 for row in rows if row[1] != "rewarding")
    assert list(tmp_path.iterdir()) == []


def test_forward_operations_by_hand():
    """Tied or not, the input embeddings do not count and the head counts once."""
    for tied in (True, False):
        config = LlamaConfig(
            hidden_size=8,
            intermediate_size=4,
            num_hidden_layers=1,
            num_attention_heads=1,
            vocab_size=7,
            tie_word_embeddings=tied,
        )
        model = LlamaForCausalLM(config)
        layers = 4 * 8 * 8 + 3 * 8 * 4 + 3 * 8  # attention, MLP, norms
        assert lopti.forward_operations(model, 10, 30) == 2 * (layers * 30 + 7 * 8 * 10)
        assert lopti.forward_operations(model, 10, 30, times=2) == 2 * (
            2 * layers * 30 + 7 * 8 * 10
        )


def test_a_data_set_with_configurations_and_splits(tmp_path):
    """The form in which the hub holds the paper's data: name:configuration:split+split."""
    for people in (3, 4):
        (tmp_path / "train").mkdir(exist_ok=True)
        kk_file(
            tmp_path / "train",
            [{"quiz": f"quiz {people}", "solution_text_format": "(1) A is a knight"}] * 2,
            f"people{people}.jsonl",
        )
    files = "".join(f"  - split: {n}ppl\n    path: train/people{n}.jsonl\n" for n in (3, 4))
    (tmp_path / "README.md").write_text(
        f"---\nconfigs:\n- config_name: train\n  data_files:\n{files}---\n"
    )
    rows = lopti.load_rows(f"{tmp_path}:train:3ppl+4ppl", lopti.TASKS["kk"])
    assert [row["question"] for row in rows] == ["quiz 3"] * 2 + ["quiz 4"] * 2


def test_wilson_interval_by_hand():
    """The bounds are the shares p0 at which |p - p0| is 1.96 standard errors of p0."""
    for mean, count in ((0.5, 100), (0.0, 20), (1.0, 20), (0.9, 50)):
        for bound in lopti.wilson_interval(mean, count):
            if 0 < bound < 1:
                assert abs(mean - bound) == pytest.approx(
                    1.959964 * math.sqrt(bound * (1 - bound) / count), rel=1e-6
                )
    low, high = lopti.wilson_interval(1.0, 20)
    assert low < 0.9 and high == 1.0


def test_evaluation_counts(tokenizer, monkeypatch):
    """A policy that answers every puzzle with the solution of the first: known greedy, avg@k and pass@k."""
    rows = [{"prompt": f"p{i} <think>", "question": f"p{i}", "solution": f"(1) {name} is a knight", "difficulty": str(people)}
            for i, (name, people) in enumerate([("Zoey", 2), ("Zoey", 2), ("Liam", 2), ("Zoey", 3)])]  # fmt: skip

    def fake_sample(model, tokenizer, prompts, *, group_size, temperature, **rest):
        right, wrong = " r </think><answer>(1) Zoey is a knight</answer>", "nothing"
        texts = [
            right if temperature == 0 or number % 2 == 0 else wrong
            for _ in prompts
            for number in range(group_size)
        ]
        return Rollout(None, None, None, torch.ones(len(texts), 5), None, texts)

    monkeypatch.setattr(lopti, "sample", fake_sample)
    table, answered = lopti.evaluate(None, tokenizer, rows, Arguments(eval_samples=4))
    assert [table["2"][name][0] for name in ("greedy", "avg@4", "pass@4")] == pytest.approx(
        [2 / 3, 1 / 3, 2 / 3]
    )
    assert [table["3"][name][0] for name in ("greedy", "avg@4", "pass@4")] == [1.0, 0.5, 1.0]
    assert table["2"]["prompts"] == 3 and len(answered[0]) == 5
    text = lopti.evaluation_table({"before": table, "after": table}, "people")
    lines = [line.split() for line in text.splitlines()]
    assert (
        lines[0] == ["people", "prompts", "before", "after"]
        and max(map(len, text.splitlines())) <= 80
    )
    assert lines[1][:4] == ["greedy", "2", "3", "0.67"] and lines[2][:3] == ["3", "1", "1.00"]
    assert lines[3] == ["mean", "4", "0.83", "0.83"] and [line[0] for line in lines[4::3]] == [
        "avg@4",
        "pass@4",
    ]


def test_evaluation_leaves_the_random_state_alone(tokenizer):
    model = random_model()
    rows = [
        {"prompt": "Lily", "question": "q", "solution": "(1) Lily is a knight", "difficulty": "2"}
    ]
    args = Arguments(max_new_tokens=5, eval_samples=2)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    first = lopti.evaluate(model, tokenizer, rows, args)[1]
    assert torch.equal(torch.rand(4), expected)
    assert lopti.evaluate(model, tokenizer, rows, args)[1] == first


def test_prompts_come_in_whole_rounds():
    rows = list(range(10))
    stream = lopti.prompt_stream(rows, 4, seed=0)
    drawn = [row for _ in range(5) for row in next(stream)]
    assert sorted(drawn[:10]) == rows and sorted(drawn[10:]) == rows and drawn[:10] != drawn[10:]
    again = lopti.prompt_stream(rows, 4, seed=0)
    assert [row for _ in range(5) for row in next(again)] == drawn


# ---------------------------------------------------------------------------------------------- bad input


def broken_models(folder, wanted):
    """Copies of the bundled policy, each with something wrong, where their names are wanted."""

    def edit(file, **changes):
        content = json.loads(file.read_text())
        file.write_text(json.dumps({**content, **changes}))

    for name in {"cut", "misshapen", "tokenless", "endless", "mamba"} & set(wanted):
        model = Path(shutil.copytree(TINY, folder / name))
        if name == "cut":
            (model / "model.safetensors").write_bytes(
                (model / "model.safetensors").read_bytes()[:5000]
            )
        if name == "misshapen":
            edit(model / "config.json", hidden_size=64)
        if name == "tokenless":
            (model / "tokenizer.json").write_text('{"version": "1.0"')
        if name == "endless":
            edit(model / "tokenizer_config.json", pad_token=None, eos_token=None)
        if name == "mamba":
            MambaForCausalLM(
                MambaConfig(
                    vocab_size=273,
                    hidden_size=16,
                    num_hidden_layers=1,
                    eos_token_id=1,
                    pad_token_id=0,
                    bos_token_id=0,
                )
            ).save_pretrained(model)


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--alpha", "1.5"), "--alpha must lie between 0 and 1, not 1.5"),
        (("--eta", "-0.1"), "--eta must lie between 0 and 1"),
        (("--alpha", "nan"), "--alpha must lie between 0 and 1"),
        (("--learning-rate", "inf"), "--learning-rate must be above 0 and finite"),
        (("--kl-coef", "nan"), "--kl-coef must not be negative"),
        (("--seed", "-1"), "--seed must lie between 0 and 4294967295"),
        (("--group-size", "1"), "--group-size must be at least 2"),
        (("--data", "nowhere.jsonl"), "there is no data file nowhere.jsonl"),
        (("--data", "{empty}"), "is empty"),
        (
            ("--data", "{columns}"),
            "needs the columns quiz and solution_text_format or prompt and solution or prompt and reward_model; it has colour, size",
        ),
        (("--data", "{broken}"), "cannot load the data"),
        (("--data", "{holes}"), "row 2 of the data"),
        (("--model", "{weightless}"), "holds no weights"),
        (("--model", "runs/nowhere/final"), "there is no model folder runs/nowhere/final"),
        (("--model", "./nowhere"), "there is no model folder ./nowhere"),
        (("--model", "no/such-model-anywhere"), "cannot load the model no/such-model-anywhere"),
        (("--device", "cuda:7x"), "--device cuda:7x"),
        (("--device", "toaster"), "--device toaster: no such device here"),
        (("--update-only", "low"), "--update-only low needs --eta above 0"),
        (("--temperature", "0"), "--temperature must be above 0"),
        (("--people", "9"), "no evaluation prompts are left"),
        (("--steps", "0"), "give --steps or --epochs"),
        (("--steps", "9", "--epochs", "2"), "--steps and --epochs exclude each other"),
        (("--clip-dual", "1"), "--clip-dual must be above 1, not 1.0"),
        (("--show", "3"), "--show needs --eval-only"),
        (("--eval-from", "3"), "--eval-from needs --eval-every"),
        (("--model", "{cut}"), "cannot load the model"),
        (("--model", "{misshapen}"), "cannot load the model"),
        (("--model", "{tokenless}"), "cannot load the model"),
        (("--model", "{endless}"), "has neither a padding nor an end-of-sequence token"),
        (
            ("--model", "{mamba}"),
            "(MambaForCausalLM) does not work with the sampling and scoring of lopti.py",
        ),
        (("--bogus",), "unrecognized arguments: --bogus"),
        (("--order", "sideways"), "invalid choice"),
    ],
)
def test_bad_input_ends_in_one_sentence(flags, words, tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "columns.jsonl").write_text('{"colour": 1, "size": 2}\n')
    (tmp_path / "broken.jsonl").write_text('{"quiz": \n')
    (tmp_path / "holes.jsonl").write_text(
        '{"quiz": "q", "solution_text_format": "(1) A is a knight"}\n{"quiz": "q"}\n'
    )
    (tmp_path / "weightless").mkdir()
    shutil.copy(TINY / "config.json", tmp_path / "weightless")
    broken_models(tmp_path, [flag.strip("{}") for flag in flags])
    names = {path.stem: path for path in tmp_path.iterdir()}
    code = lopti.main(
        [flag.format(**names) for flag in flags] + ["--output", str(tmp_path / "runs")]
    )
    error = capsys.readouterr().err.strip()
    assert code == 2 and words in error
    assert len(error.splitlines()) == 1 and "Traceback" not in error
    assert not (tmp_path / "runs").exists()


# ---------------------------------------------------------------------------------------------- end to end


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """The same two steps of AR + Lopti, twice, each in a process of its own."""
    folder = tmp_path_factory.mktemp("runs")
    results = [run_lopti("--alpha", 0.3, "--eta", 0.5, *SMALL, output=folder) for _ in range(2)]
    assert [code for code, _, _ in results] == [0, 0], results
    return sorted(folder.iterdir()), results


def test_two_steps_end_to_end(two_runs):
    folders, results = two_runs
    assert len(folders) == 2  # the same command twice: two folders
    for folder in folders:
        steps = read_jsonl(folder / "metrics.jsonl")
        assert [row["step"] for row in steps] == [1, 2]
        for name in (
            "reward", "reward_std", "frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio", "entropy", "kl",
            "clip_ratio/low_mean", "clip_ratio/high_mean", "grad_norm/low", "grad_norm/high", "low_probability_share", "peak_memory_gib",
            "seconds/sampling", "seconds/scoring", "seconds/updating", "tokens_per_second/sampling", "tokens_per_second/updating",
        ):  # fmt: skip
            assert math.isfinite(steps[0][name]), name
        assert steps[0]["optimizer_steps"] == 4  # 8 responses in mini-batches of 4, two stages
        assert steps[0]["updated_share"] == pytest.approx(1, abs=1e-6)
        config = json.loads((folder / "config.json").read_text())
        assert config["alpha"] == 0.3 and config["method"] == "GRPO + AR (α=0.3) + Lopti (η=0.5)"
        sample = read_jsonl(folder / "samples.jsonl")[0]
        assert {"step", "prompt", "response", "solution", "reward", "truncated"} <= set(sample)
        assert sample["prompt"].endswith("<think>")
        assert [row["step"] for row in read_jsonl(folder / "evaluations.jsonl")] == [0, 2]
    for _, output, _ in results:
        assert re.search(r"people +prompts +before +after\ngreedy ", output)


def test_final_loads_and_has_changed(two_runs):
    folders, _ = two_runs
    trained = AutoModelForCausalLM.from_pretrained(folders[0] / "final")
    start = AutoModelForCausalLM.from_pretrained(TINY)
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), start.parameters()))
    assert AutoTokenizer.from_pretrained(folders[0] / "final").decode(
        [9]
    ) == AutoTokenizer.from_pretrained(TINY).decode([9])


def test_same_command_same_metrics(two_runs):
    assert_same_run(*two_runs[0])


def test_first_step_has_ratio_one_and_reference_stays(tmp_path):
    """One mini-batch a step: π_θ is still π_old when the loss is taken, and at step 1 it is π_ref as well."""
    code, _, error = run_lopti(*SMALL, "--mini-batch-size", 0, "--name", "plain", output=tmp_path)
    assert code == 0, error
    first, second = read_jsonl(tmp_path / "plain" / "metrics.jsonl")
    for row in (first, second):
        assert row["ratio_mean"] == pytest.approx(1, abs=1e-4) and row["clip_ratio/high_mean"] == 0
        assert row["optimizer_steps"] == 1
    assert abs(first["kl"]) < 1e-6 and second["kl"] > 1e-6
    code, _, error = run_lopti(*SMALL, "--name", "plain", output=tmp_path)
    assert code == 2 and "is there already" in error and len(error.strip().splitlines()) == 1


def test_eval_only_shows_responses(tmp_path):
    code, output, error = run_lopti(
        "--eval-only",
        "--show",
        2,
        "--eval-size",
        2,
        "--eval-samples",
        1,
        "--max-new-tokens",
        24,
        output=tmp_path,
    )
    assert code == 0, error
    assert (
        output.count("solution: (1)") == 2
        and output.count("[greedy, reward ") == 2
        and output.count("[sample 1, reward ") == 2
    )
    assert not list(tmp_path.iterdir())


def test_math_task_runs(tmp_path):
    code, output, error = run_lopti("--task", "math", "--eta", 0.5, *SMALL, output=tmp_path)
    assert code == 0, error
    assert re.search(r"level +prompts +before +after\ngreedy ", output)


def test_training_raises_the_reward(monkeypatch, tokenizer, tmp_path):
    """A reward for saying 'knight' early must teach a random policy to say it: signs and masks are right end to end."""

    def says_knight(completions, **columns):
        return [float(" ".join(text.split()[:4]).count("knight")) for text in completions]

    monkeypatch.setitem(lopti.TASKS, "kk", replace(lopti.TASKS["kk"], reward=says_knight))
    rows = [{"prompt": "Lily", "question": "q", "solution": "", "difficulty": "2"}]
    for eta in (0.0, 0.5):
        torch.manual_seed(0)
        model = random_model(hidden_size=16)
        args = Arguments(eta=eta, alpha=0.3, steps=15, prompts_per_step=1, group_size=64, mini_batch_size=32, max_new_tokens=4, learning_rate=1e-2,
                         kl_coef=0.0, output=str(tmp_path), quiet=True)  # fmt: skip
        run = lopti.Run(args)
        lopti.train(
            model,
            None,
            tokenizer,
            torch.optim.AdamW(model.parameters(), lr=args.learning_rate),
            rows,
            rows,
            run,
            args,
        )
        rewards = [row["reward"] for row in read_jsonl(run.folder / "metrics.jsonl")]
        assert rewards[-1] > rewards[0] + 0.5, (eta, rewards)


def plain_distribution(model, prompt, response, temperature, min_p):
    """log π of every word at each token of one response, alone and without padding; −∞ outside of the safe vocabulary."""
    logits = (
        model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / temperature
    )
    probabilities = logits.softmax(-1)
    safe = probabilities >= min_p * probabilities.max(-1, keepdim=True).values
    return logits.masked_fill(~safe, -math.inf).log_softmax(-1)


def plain_logprobs(model, prompt, response, temperature, min_p):
    """log π of each token of one response, and whether it is in the safe vocabulary."""
    logprobs = plain_distribution(model, prompt, response, temperature, min_p).gather(
        1, response[:, None]
    )[:, 0]
    return logprobs, logprobs > -math.inf


def vowels_modulo_3(completions, **columns):
    return [float(sum(text.count(vowel) for vowel in "aeiou") % 3) for text in completions]


TRAINING = {  # everything off its default that has one
    "AR + Lopti": {"alpha": 0.3, "eta": 0.06, "kl_coef": 0.5, "min_p": 0.05, "passes": 2},
    "reversed, REINFORCE++": {
        "eta": 0.06,
        "order": "high-low",
        "advantage": "reinforce++",
        "kl_coef": 0.0,
        "alpha": 0.9,
    },
    "high only": {"eta": 0.06, "update_only": "high", "kl_coef": 0.2},
    "STAPO": {"stapo": True, "stapo_tau": 0.1, "stapo_quantile": 0.6, "kl_coef": 0.3},
    "80/20": {"eta": 0.06, "top_entropy": 0.4, "kl_coef": 0.0},
    "lowest entropy": {"bottom_entropy": 0.7, "kl_coef": 0.0},
}


@pytest.mark.parametrize("name", TRAINING)
def test_training_against_a_plain_loop(name, monkeypatch, tokenizer, tmp_path):
    """Two steps of `train` end with the weights of a loop that goes token by token and calls nothing of lopti.py.

    It is handed the sampled ids only: rewards, log-probabilities, advantages, weights, groups, stages, mini-batches,
    clips, KL, the division, the clip of the gradient and the optimizer are its own.
    """
    args = Arguments(**{**dict(
        steps=2, prompts_per_step=3, group_size=4, max_new_tokens=6, temperature=0.7, mini_batch_size=5, tokens_per_microbatch=60, learning_rate=2e-2,
        weight_decay=0.3, max_grad_norm=0.4, clip_low=0.05, clip_high=0.1, clip_dual=1.3, solved_reward=1.0, sample_batch_size=8, output=str(tmp_path),
        quiet=True, save_every=0), **TRAINING[name]})  # fmt: skip
    monkeypatch.setitem(lopti.TASKS, "kk", replace(lopti.TASKS["kk"], reward=vowels_modulo_3))
    rollouts, sample = [], lopti.sample

    def recorded(model, *rest, **settings):
        wanted = {
            "group_size": 4,
            "max_new_tokens": 6,
            "temperature": 0.7,
            "min_p": args.min_p,
            "batch_size": 8,
        }
        assert settings == wanted
        rollouts.append(
            sample(model, *rest, **{**settings, "min_p": 0.0})
        )  # some tokens outside of the safe vocabulary
        return rollouts[-1]

    monkeypatch.setattr(lopti, "sample", recorded)
    # Tokens after the same prefix have the same entropy but for rounding, which must not decide what is kept here.
    entropy_mask, stapo_mask = lopti.entropy_mask, lopti.stapo_mask
    monkeypatch.setattr(
        lopti,
        "entropy_mask",
        lambda entropies, *rest, **options: entropy_mask(
            entropies.round(decimals=9), *rest, **options
        ),
    )
    monkeypatch.setattr(
        lopti,
        "stapo_mask",
        lambda logprobs, entropies, *rest: stapo_mask(logprobs, entropies.round(decimals=9), *rest),
    )
    torch.manual_seed(0)
    policy = random_model(hidden_size=16).double()
    policy.lm_head.weight.data.mul_(4)  # π from .004 to .4
    plain, reference = copy.deepcopy(policy), copy.deepcopy(policy)
    rows = [
        {"prompt": prompt, "question": "q", "solution": "", "difficulty": "2"}
        for prompt in ("Lily", "Zoey is a knight", "Liam is a knave or")
    ]
    run = lopti.Run(args)
    lopti.train(
        policy,
        copy.deepcopy(policy) if args.kl_coef else None,
        tokenizer,
        lopti.make_optimizer(policy, args),
        rows,
        rows,
        run,
        args,
    )

    optimizer, happened = (
        torch.optim.AdamW(plain.parameters(), lr=2e-2, weight_decay=0.3),
        Counter(),
    )
    for rollout, metrics in zip(rollouts, read_jsonl(run.folder / "metrics.jsonl"), strict=True):
        prompts = [ids[kept] for ids, kept in zip(rollout.prompt_ids, rollout.prompt_mask)]
        responses = [ids[kept] for ids, kept in zip(rollout.response_ids, rollout.mask)]
        rewards = vowels_modulo_3(rollout.texts)
        assert metrics["accuracy"] == pytest.approx(sum(reward >= 1 for reward in rewards) / 12)
        with torch.no_grad():
            old = [
                plain_logprobs(plain, *both, 0.7, args.min_p) for both in zip(prompts, responses)
            ]
            ref = [
                plain_logprobs(reference, *both, 0.7, args.min_p)[0]
                for both in zip(prompts, responses)
            ]
        if args.advantage == "grpo":
            groups = [rewards[start : start + 4] for start in range(0, 12, 4)]
            advantages = [
                (r - statistics.mean(group)) / (statistics.stdev(group) + 1e-6)
                for group in groups
                for r in group
            ]
        else:
            all_ = [r for r, response in zip(rewards, responses) for _ in response]
            advantages = [
                (r - statistics.mean(all_)) / math.sqrt(statistics.variance(all_) + 1e-8)
                for r in rewards
            ]
        stages = {
            "AR + Lopti": ["low", "high"] * 2,
            "reversed, REINFORCE++": ["high", "low"],
            "high only": ["high"],
            "80/20": ["low", "high"],
        }
        for stage in stages.get(name, ["all"]):
            for start in range(0, 12, 5):
                batch, loss = range(start, min(start + 5, 12)), torch.zeros((), dtype=torch.float64)
                now = {}  # π and H of each token of the mini-batch under the policy as it is before this step
                for i in batch:
                    with torch.no_grad():
                        distribution = plain_distribution(
                            plain, prompts[i], responses[i], 0.7, args.min_p
                        )
                    for t, token in enumerate(responses[i]):
                        now[i, t] = (
                            float(distribution[t, token].exp()),
                            round(float(-(distribution[t].exp() * distribution[t]).nansum()), 9),
                        )
                kept, entropies = (
                    set(now),
                    sorted((entropy for _, entropy in now.values()), reverse=True),
                )
                if args.stapo:
                    unlikely = [
                        place for place in now if now[place][0] < 0.1 and advantages[place[0]] > 0
                    ]
                    bound = (
                        statistics.quantiles(
                            [now[place][1] for place in unlikely], n=5, method="inclusive"
                        )[2]
                        if len(unlikely) > 1
                        else 0.0
                    )
                    kept -= {place for place in unlikely if now[place][1] < round(bound, 9)}
                if args.top_entropy:
                    kept = {
                        place
                        for place in now
                        if now[place][1] >= entropies[round(0.4 * len(now)) - 1]
                    }
                if args.bottom_entropy:
                    kept = {
                        place
                        for place in now
                        if now[place][1] < entropies[len(now) - round(0.7 * len(now)) - 1]
                    }
                happened["masked"] += len(now) - len(kept)
                for i in batch:
                    new, safe = plain_logprobs(plain, prompts[i], responses[i], 0.7, args.min_p)
                    for t in range(len(new)):
                        pi_old = math.exp(old[i][0][t])
                        if (
                            not old[i][1][t]
                            or (i, t) not in kept
                            or (stage != "all" and (pi_old < args.eta) != (stage == "low"))
                        ):
                            continue
                        if not safe[t]:
                            happened["unsafe"] += 1
                            continue
                        ratio, advantage = (
                            (new[t] - old[i][0][t]).exp(),
                            (args.alpha * pi_old + 1 - args.alpha) * advantages[i],
                        )
                        objective = torch.minimum(
                            ratio * advantage, ratio.clamp(0.95, 1.1) * advantage
                        )
                        if advantage < 0 and objective < 1.3 * advantage:
                            objective, happened["dual"] = 1.3 * advantage, happened["dual"] + 1
                        happened["low clip"] += advantage < 0 and float(ratio.detach()) < 0.95
                        happened["high clip"] += advantage > 0 and float(ratio.detach()) > 1.1
                        difference = (ref[i][t] - new[t]).clamp(-5, 5)
                        loss = (
                            loss
                            - objective
                            + args.kl_coef * (difference.exp() - difference - 1).clamp(max=10)
                        )
                if loss.requires_grad:
                    (loss / len(kept)).backward()
                    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.4)
                    happened["norm clip"], happened["steps"] = (
                        happened["norm clip"] + int(norm > 0.4),
                        happened["steps"] + 1,
                    )
                    optimizer.step()
                optimizer.zero_grad()

    assert all(
        happened[event] for event in ("low clip", "high clip", "dual", "norm clip", "steps")
    ), happened
    assert happened["unsafe"] or not args.min_p
    assert happened["masked"] or not (args.stapo or args.top_entropy or args.bottom_entropy)
    moved = (weights(plain) - weights(reference)).norm()
    assert moved > 1 and (weights(policy) - weights(plain)).norm() < 1e-3 * moved, (
        (weights(policy) - weights(plain)).norm(),
        moved,
    )


def test_a_root_of_complex_degree_is_no_crash():
    assert answers_match(r"\sqrt[i]{-8}", "2") is False


def test_evaluation_samples_with_its_own_temperature(monkeypatch, tokenizer):
    """Greedily once, then k times at --eval-temperature; from the safe vocabulary where training does."""
    seen, sample = [], lopti.sample
    monkeypatch.setattr(
        lopti,
        "sample",
        lambda *rest, **settings: seen.append(settings) or sample(*rest, **settings),
    )
    rows = [
        {"prompt": "Lily", "question": "q", "solution": "(1) Lily is a knight", "difficulty": "2"}
    ]
    lopti.evaluate(
        random_model(),
        tokenizer,
        rows,
        Arguments(
            eval_samples=3, eval_temperature=0.6, temperature=0.9, min_p=0.01, max_new_tokens=4
        ),
    )
    assert [(s["group_size"], s["temperature"], s["min_p"], s["max_new_tokens"]) for s in seen] == [
        (1, 0, 0.01, 4),
        (3, 0.6, 0.01, 4),
    ]


# ---------------------------------------------------------------------------------------------- runs that survive

FOUR_STEPS = ("--steps", 4, "--save-every", 1, "--eta", 0.5, "--people", 2, "--prompts-per-step", 2, "--group-size", 4, "--max-new-tokens", 60,
              "--mini-batch-size", 4, "--eval-size", 1, "--eval-samples", 1, "--eval-every", 2, "--quiet")  # fmt: skip


def lasting_metrics(folder):
    """The rows of metrics.jsonl without what differs between two runs of the same command."""
    passing = ("seconds", "tokens_per_second", "peak_memory")
    return [
        {key: value for key, value in row.items() if not key.startswith(passing)}
        for row in read_jsonl(folder / "metrics.jsonl")
    ]


def assert_same_run(folder, other):
    assert lasting_metrics(folder) == lasting_metrics(other)
    for file in ("samples.jsonl", "evaluations.jsonl"):
        assert read_jsonl(folder / file) == read_jsonl(other / file)
    first, second = (
        AutoModelForCausalLM.from_pretrained(run / "final").state_dict() for run in (folder, other)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """Four steps without an interruption."""
    folder = tmp_path_factory.mktemp("whole")
    code, _, error = run_lopti(*FOUR_STEPS, "--name", "whole", output=folder)
    assert code == 0, error
    return folder / "whole"


def start(*flags):
    command = [sys.executable, str(ROOT / "lopti.py"), *map(str, flags)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path, lines=1, seconds=120):
    until = time.time() + seconds
    while time.time() < until:
        if path.exists() and len(path.read_text().splitlines()) >= lines:
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} did not come")


def test_killed_at_random_moments(whole_run, tmp_path):
    """SIGKILL at random moments, resumed each time: the same metrics, samples and weights. LOPTI_KILLS=20 for more."""
    rng, kills, round_number, folder = random.Random(0), 0, 0, None
    wanted = int(os.environ.get("LOPTI_KILLS", "3"))
    while kills < wanted or folder is not None:
        if folder is None:
            round_number += 1
            folder = tmp_path / f"killed-{round_number}"
            process = start(*FOUR_STEPS, "--name", folder.name, "--output", tmp_path)
        elif (folder / "config.json").exists():
            process = start("--resume", folder)
        else:  # killed before it wrote its settings: nothing to resume
            shutil.rmtree(folder)
            folder = None
            continue
        wait_for(folder / "config.json")
        try:
            limit = rng.uniform(0, 4) if kills < wanted else 300
            _, error = process.communicate(timeout=limit)
            assert process.returncode == 0 or "has done its 4 steps" in error, (
                error
            )  # killed on its very last line
            assert_same_run(folder, whole_run)
            folder = None
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
    assert kills == wanted


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_asked_to_stop(whole_run, tmp_path, number, code):
    process = start(*FOUR_STEPS, "--save-every", 0, "--name", "asked", "--output", tmp_path)
    wait_for(tmp_path / "asked" / "metrics.jsonl")
    process.send_signal(number)
    _, error = process.communicate(timeout=120)
    assert process.returncode == code, error
    done = len(read_jsonl(tmp_path / "asked" / "metrics.jsonl"))
    assert (
        done < 4
        and f"continue with: python lopti.py --resume {tmp_path / 'asked'}" in error
        and "Traceback" not in error
    )
    assert [path.name for path in (tmp_path / "asked" / "checkpoints").iterdir()] == [
        f"step-{done:06d}"
    ]
    code, _, error = run_lopti("--resume", tmp_path / "asked")
    assert code == 0, error
    assert_same_run(tmp_path / "asked", whole_run)


def test_asked_twice_stops_at_once(tmp_path):
    process = start(
        *FOUR_STEPS,
        "--steps",
        400,
        "--max-new-tokens",
        200,
        "--group-size",
        48,
        "--name",
        "twice",
        "--output",
        tmp_path,
    )
    wait_for(tmp_path / "twice" / "metrics.jsonl")
    time.sleep(1)  # well into the second step, which takes several seconds
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130 and "stopped at once" in error and "Traceback" not in error
    lopti.Run(Arguments(resume=str(tmp_path / "twice"))).load_checkpoint(*fresh_tiny())


def fresh_tiny():
    model = AutoModelForCausalLM.from_pretrained(TINY)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def copied(whole_run, tmp_path):
    return Path(shutil.copytree(whole_run, tmp_path / "copy"))


def message_of(capsys, *flags):
    """The one sentence with which the program refuses; exit code 2, no traceback."""
    assert lopti.main([str(flag) for flag in flags]) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1 and "Traceback" not in error
    return error


def test_more_steps_with_resume(whole_run, tmp_path, capsys):
    """4 steps and then 2 more are 6 steps; the newest checkpoints stay; a second resume knows the new number."""
    folder = copied(whole_run, tmp_path)
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == [
        "step-000003",
        "step-000004",
    ]
    assert "has done its 4 steps" in message_of(capsys, "--resume", folder)
    assert lopti.main(["--resume", str(folder), "--steps", "6", "--keep", "1", "--quiet"]) == 0
    assert [row["step"] for row in read_jsonl(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000006"]
    assert "has done its 6 steps" in message_of(capsys, "--resume", folder)
    code, _, error = run_lopti(*FOUR_STEPS, "--steps", 6, "--name", "six", output=tmp_path)
    assert code == 0, error
    assert lasting_metrics(folder) == lasting_metrics(tmp_path / "six")


def test_resume_refuses_what_changes_the_run(whole_run, tmp_path, capsys):
    error = message_of(
        capsys, "--resume", whole_run, "--alpha", "0.3", "--seed", "1", "--steps", "9"
    )
    assert "--alpha, --seed" in error and "--steps" not in error
    assert "--preset" in message_of(capsys, "--resume", whole_run, "--preset", "kk")
    assert "config.json is not there" in message_of(capsys, "--resume", tmp_path)
    assert "--resume" in message_of(capsys, "--name", whole_run.name, "--output", whole_run.parent)


def test_resume_to_fewer_steps(whole_run, tmp_path, capsys):
    """Refused, and the run's files stay as they are."""
    folder = copied(whole_run, tmp_path)
    files = {path: path.read_bytes() for path in folder.glob("*.json*")}
    for _ in ("finished", "stopped before its end"):
        assert "has done its 4 steps: give --steps above 4" in message_of(
            capsys, "--resume", folder, "--steps", "3"
        )
        assert files == {path: path.read_bytes() for path in folder.glob("*.json*")}
        shutil.rmtree(folder / "final", ignore_errors=True)


def test_resume_with_other_evaluations(whole_run, tmp_path, capsys):
    """'before' stands beside 'after' only where both were measured on the same prompts."""
    folder = copied(whole_run, tmp_path)
    assert lopti.main(["--resume", str(folder), "--steps", "5", "--eval-size", "3", "--quiet"]) == 0
    assert re.search(r"people +prompts +after\n", capsys.readouterr().out)
    assert lopti.main(["--resume", str(folder), "--steps", "6", "--eval-size", "1", "--quiet"]) == 0
    assert re.search(r"people +prompts +before +after\n", capsys.readouterr().out)


def test_evaluations_are_made_and_compared_where_asked(tmp_path, capsys, monkeypatch):
    """--eval-every from --eval-from on; the best evaluation is named at the end, also by a run that was resumed."""
    accuracies = iter([0.4, 0.9, 0.6, 0.7, 0.9, 0.5])

    def fake(policy, tokenizer, rows, args):
        mean = next(accuracies)
        return {"2": {"greedy": (mean, 0.0, 1.0), "length": 9.0, "prompts": 2}}, None

    monkeypatch.setattr(lopti, "evaluate", fake)
    flags = [
        *SMALL,
        "--eval-every",
        1,
        "--eval-from",
        3,
        "--max-new-tokens",
        8,
        "--steps",
        4,
        "--output",
        tmp_path,
        "--name",
        "best",
    ]
    assert lopti.main([str(flag) for flag in flags]) == 0
    assert [row["step"] for row in read_jsonl(tmp_path / "best" / "evaluations.jsonl")] == [0, 3, 4]
    assert "Best mean greedy accuracy: 0.90 after step 3" in capsys.readouterr().out
    assert (
        lopti.main(
            ["--resume", str(tmp_path / "best"), "--steps", "6", "--eval-every", "0", "--quiet"]
        )
        == 0
    )
    assert "Best mean greedy accuracy: 0.90 after step 3" in capsys.readouterr().out
    assert (
        lopti.main(
            ["--resume", str(tmp_path / "best"), "--steps", "7", "--eval-every", "0", "--quiet"]
        )
        == 0
    )
    assert "Best" not in capsys.readouterr().out  # the last one is as good


def test_odd_lines_and_settings_on_resume(whole_run, tmp_path, capsys):
    folder = copied(whole_run, tmp_path)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('7\n[1]\n{"reward": 1}\n{"step": "x"}\n')
    assert lopti.main(["--resume", str(folder), "--steps", "5", "--quiet"]) == 0
    assert [row["step"] for row in read_jsonl(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    config = json.loads((folder / "config.json").read_text())
    for wrong in ({**config, "alpha": "a lot"}, {**config, "steps": None}, [1], "text"):
        (folder / "config.json").write_text(json.dumps(wrong))
        assert "not readable as the settings of a run" in message_of(capsys, "--resume", folder)


def test_damaged_checkpoints_are_named_and_left_alone(whole_run, tmp_path, capsys):
    folder = copied(whole_run, tmp_path)
    newest = folder / "checkpoints" / "step-000004"
    state = (newest / "training_state.pt").read_bytes()
    for damage in (
        state[: len(state) // 2],
        b"",
        b"not a checkpoint",
        state[:1000] + b"x" * 50 + state[1050:],
    ):
        (newest / "training_state.pt").write_bytes(damage)
        (folder / "final").mkdir(exist_ok=True)
        error = message_of(capsys, "--resume", folder, "--steps", "5")
        assert "step-000004 is damaged" in error and "move it away" in error
        assert len(read_jsonl(folder / "metrics.jsonl")) == 4
    torch.save(
        {"step": 4, "code": os.system}, newest / "training_state.pt"
    )  # a pickle that would run code
    assert "is damaged or not one of this run" in message_of(
        capsys, "--resume", folder, "--steps", "5"
    )
    shutil.move(newest, tmp_path / "away")
    assert lopti.main(["--resume", str(folder), "--quiet"]) == 0
    assert_same_run(folder, whole_run)


def test_foreign_checkpoint(whole_run, tmp_path, capsys, tokenizer):
    folder = copied(whole_run, tmp_path)
    random_model().save_pretrained(folder / "checkpoints" / "step-000004")
    assert "step-000004 is damaged or not one of this run" in message_of(
        capsys, "--resume", folder, "--steps", "5"
    )


def test_metrics_cut_in_the_middle_of_a_line(whole_run, tmp_path):
    folder = copied(whole_run, tmp_path)
    shutil.rmtree(folder / "checkpoints" / "step-000004")
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text[: len(text) - 200])
    assert lopti.main(["--resume", str(folder), "--quiet"]) == 0
    assert_same_run(folder, whole_run)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("PytorchStreamWriter failed writing file"),
    ],
)
def test_full_disk_leaves_the_last_checkpoint(whole_run, tmp_path, capsys, monkeypatch, error):
    folder = copied(whole_run, tmp_path)

    def full(state, path):
        Path(path).write_bytes(b"half a file")
        raise error

    monkeypatch.setattr(torch, "save", full)
    sentence = message_of(capsys, "--resume", folder, "--steps", "6", "--quiet")
    assert (
        "cannot write" in sentence
        and "MiB are free on that disk" in sentence
        and "untouched" in sentence
    )
    monkeypatch.undo()
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == [
        "step-000003",
        "step-000004",
    ]
    assert lopti.main(["--resume", str(folder), "--steps", "5", "--quiet"]) == 0


def test_unwritable_folder(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert "cannot make the run folder" in message_of(
        capsys, *SMALL, "--name", "x", "--output", tmp_path / "file"
    )


def test_non_finite_steps_are_left_out_and_counted(monkeypatch):
    original, calls = lopti.policy_loss, []

    def sometimes(*inputs, **options):
        loss, stats = original(*inputs, **options)
        calls.append(1)
        return (loss * float("nan") if len(calls) == 2 else loss), stats

    monkeypatch.setattr(lopti, "policy_loss", sometimes)
    after, (stats,) = trained_weights(Arguments(mini_batch_size=4))
    assert (
        stats["optimizer_steps"] == 2
        and stats["nonfinite_steps"] == 1
        and torch.isfinite(after).all()
    )


def test_a_policy_without_finite_logits_cannot_sample(monkeypatch, tmp_path, capsys):
    load = lopti.load_model

    def broken(*inputs, **options):
        model, tokenizer = load(*inputs, **options)
        model.lm_head.weight.data.fill_(float("nan"))
        return model, tokenizer

    monkeypatch.setattr(lopti, "load_model", broken)
    assert "logits are not finite" in message_of(capsys, *SMALL, "--output", tmp_path)


def test_a_run_of_non_finite_steps_stops_with_a_checkpoint_from_before(
    whole_run, tmp_path, capsys, monkeypatch
):
    """From step 2 on nothing is finite: the checkpoint is that of step 1, and what follows from it is the whole run."""
    original, calls = lopti.policy_loss, []
    calls_of_step_1 = read_jsonl(whole_run / "metrics.jsonl")[0][
        "optimizer_steps"
    ]  # one micro-batch each

    def broken(*inputs, **options):
        loss, stats = original(*inputs, **options)
        calls.append(1)
        return (loss if len(calls) <= calls_of_step_1 else loss * float("inf")), stats

    monkeypatch.setattr(lopti, "policy_loss", broken)
    error = message_of(
        capsys, *FOUR_STEPS, "--save-every", 0, "--name", "nan", "--output", tmp_path
    )
    assert "no finite gradient in 3 steps" in error and "--learning-rate" in error
    assert [path.name for path in (tmp_path / "nan" / "checkpoints").iterdir()] == ["step-000001"]
    assert [
        row["nonfinite_steps"] > 0 for row in read_jsonl(tmp_path / "nan" / "metrics.jsonl")
    ] == [False, True, True, True]
    monkeypatch.undo()
    assert lopti.main(["--resume", str(tmp_path / "nan"), "--quiet"]) == 0
    assert_same_run(tmp_path / "nan", whole_run)


def with_reward(monkeypatch, function):
    monkeypatch.setitem(
        lopti.TASKS, "kk", lopti.Task(**{**lopti.TASKS["kk"].__dict__, "reward": function})
    )
    return [{"prompt": "p", "solution": "s"}] * 3, Arguments(reward_timeout=0.3)


def test_reward_functions_that_misbehave(monkeypatch):
    texts = ["fine", "bad\x1b[2J", "fine"]

    def raises(completions, **columns):
        if "bad" in "".join(completions):
            raise KeyError("no such thing")
        return [0.0] * len(completions)

    def hangs(completions, **columns):
        while "bad" in "".join(completions):
            pass
        return [0.0] * len(completions)

    def miscounts(completions, **columns):
        return [1.0] * (len(completions) + 1)

    def not_a_number(completions, **columns):
        return [0.0, float("nan"), 0.0]

    def swallows(completions, **columns):
        try:
            return hangs(completions)
        except Exception:
            return [0.0] * len(completions)

    def too_large(completions, **columns):
        return [0.0, 1e300, 0.0]

    def by_name(completions, **columns):
        return {0: 1.0, 1: 0.0, 2: 1.0}

    for function, words in (
        (
            swallows,
            "the reward function swallows took longer than 0.3 s (--reward-timeout), at response 1",
        ),
        (
            too_large,
            "the reward function too_large returned 1e+300 at response 1 of the batch: rewards must be finite, and at most 1e15",
        ),
        (by_name, "the reward function by_name returned a dict: it must return a list"),
        (
            raises,
            "the reward function raises raised KeyError: 'no such thing', at response 1 of the batch",
        ),
        (
            hangs,
            "the reward function hangs took longer than 0.3 s (--reward-timeout), at response 1",
        ),
        (miscounts, "the reward function miscounts returned 4 values for 3 responses"),
        (not_a_number, "the reward function not_a_number returned nan at response 1"),
    ):
        rows, args = with_reward(monkeypatch, function)
        with pytest.raises(lopti.UserError) as caught:
            lopti.judge(texts, rows, args)
        assert words in str(caught.value) and "\x1b" not in str(caught.value)


def test_out_of_memory_names_three_flags(monkeypatch, capsys, tmp_path):
    def full(*inputs, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def full_cpu(*inputs, **options):
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."
        )

    monkeypatch.setattr(lopti, "evaluate", full_cpu)
    assert "out of memory on auto" in message_of(capsys, *SMALL, "--output", tmp_path)
    monkeypatch.setattr(lopti, "sample", full)
    error = message_of(capsys, *SMALL, "--output", tmp_path)
    for words in (
        "--tokens-per-microbatch (now 2048)",
        "--sample-batch-size (now 8)",
        "--max-new-tokens (now 120)",
    ):
        assert words in error


def test_memory_that_runs_out_on_resume_is_no_damage(whole_run, tmp_path, capsys, monkeypatch):
    def full(*inputs, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "load", full)
    assert "out of memory" in message_of(
        capsys, "--resume", copied(whole_run, tmp_path), "--steps", "6"
    )


def test_an_interrupt_from_elsewhere(monkeypatch, tmp_path, capsys):
    """A KeyboardInterrupt that no signal of ours announced ends as Ctrl-C does."""

    def interrupted(completions, **columns):
        raise KeyboardInterrupt

    with_reward(monkeypatch, interrupted)
    assert lopti.main([str(flag) for flag in SMALL] + ["--output", str(tmp_path)]) == 130
    assert "stopped at once" in capsys.readouterr().err


def test_a_terminal_without_greek():
    command = [sys.executable, str(ROOT / "lopti.py"), "--help"]
    done = subprocess.run(
        command,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "\\u03b1 of Advantage Reweighting" in done.stdout.decode("cp1252")


def test_hostile_text_is_harmless(capsys, tmp_path):
    text = "knight\x1b[2J\x07\r\x00\u202e\ud800 line\nnext"
    assert lopti.printable(text) == "knight\\x1b[2J\\x07\\r\\x00\\u202e\\ud800 line\nnext"
    rows = [{"question": text, "solution": text}]
    lopti.show_responses(rows, [[(text, -3.0)]], 1)
    assert not set(capsys.readouterr().out) & {"\x1b", "\x07", "\r", "\x00", "\u202e", "\ud800"}
    run = lopti.Run(Arguments(output=str(tmp_path)))
    run.append("samples.jsonl", {"step": 1, "response": text + "\u2028\x85"})
    assert len((run.folder / "samples.jsonl").read_text().splitlines()) == 1
    assert run.read_lines("samples.jsonl")[0]["response"] == text + "\u2028\x85"


def test_remote_code_needs_a_flag(tmp_path, capsys):
    """A model folder that brings its own Python code is refused without --trust-remote-code, and the code does not run."""
    folder = Path(shutil.copytree(TINY, tmp_path / "own"))
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert "cannot load the model" in message_of(capsys, "--model", folder, "--eval-only")
    assert not (tmp_path / "ran").exists()


JUNK = ["\\boxed{", "}", "{", "\\frac", "^", "_", "9", "(", ")", "[", "]", ",", "\\sqrt", "\\left", "\\text{", "e", "i", "\\pi", "-", "+", "±", "/", "!", "%",
        "\\infty", "\\cup", "x", "=", "<", ">", "|", "\\begin{pmatrix}", "&", "\\\\", "\\end{pmatrix}", "999999999", ".", "\x00", "\u202e", "\ud800", "²", "٣",
        "<think>", "</think>", "<answer>", "</answer>", "Zoey is a knight", "knave", "\n", " ", "\\log", "\\sin", "10^", "7.5", "1,000"]  # fmt: skip


def test_twenty_thousand_junk_responses():
    """Random pieces of LaTeX, tags, numbers and odd characters: no exception, no reward by chance, under 1 ms each."""
    rng = random.Random(0)
    texts = ["".join(rng.choices(JUNK, k=rng.choice((1, 5, 20, 80)))) for _ in range(10_000)]
    boxed = [f"\\boxed{{{text}}}" for text in texts]
    solutions = [
        "".join(rng.choices(JUNK, k=3)) if i % 2 else r"\frac{1}{2}" for i in range(10_000)
    ]
    started = time.perf_counter()
    found = (
        kk_reward(texts, ["(1) Zoey is a knight"] * len(texts))
        + math_reward(texts, solutions)
        + math_reward(boxed, solutions)
    )
    seconds = time.perf_counter() - started
    assert set(found[:10_000]) <= {3.0, -0.5, -1.0, -3.0} and set(found[10_000:]) <= {0.0, 1.0}
    assert seconds / len(found) < 1e-3


# ---------------------------------------------------------------------------------------------- documentation


@pytest.mark.parametrize("module", [lopti, rewards])
def test_examples_in_docstrings(module):
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


def test_readme_names_only_flags_and_functions_that_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    known = {"--" + name.replace("_", "-") for name in Arguments.__dataclass_fields__} | {
        "--preset",
        "--help",
    }
    for command in re.findall(r"python lopti\.py[^\n`]*", text):
        for flag in re.findall(r"--[a-z][a-z-]*", command):
            assert flag in known, command
    for name in re.findall(r"`([a-z_]+)\(\)", text):
        assert hasattr(lopti, name) or hasattr(rewards, name), name


# ---------------------------------------------------------------------------------------------- pictures


def fake_folder(path, steps, seed=0, evaluated=(), **changes):
    """A run folder of so many steps: every number in it can be told from its step. `evaluated`: the steps with an evaluation."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"method": "GRPO + AR (α=0.3)", "seed": seed}))
    rows = [
        {"step": step, "reward": step - 0.5, "accuracy": step / 10, "completions/mean_length": 100 + step, "entropy": 1 / step,
         "clip_ratio/low_mean": 0.01 * step, "clip_ratio/high_mean": 0.002, "clip_ratio/dual_mean": 0.5, "seconds/sampling": 20.0 * step,
         "seconds/updating": 10.0, "tokens_per_second/sampling": 1e6, "peak_memory_gib/sampling": None, **changes}
        for step in range(1, steps + 1)
    ]  # fmt: skip
    (path / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 99, "rewa'
    )  # a crash cut the last one short
    tables = [
        {
            size: {"greedy": [0.9, 0, 1], "avg@4": [value, 0, 1], "pass@4": [1.0, 0, 1]}
            for size, value in (("2", 0.8), ("3", 0.4))
        }
        for _ in evaluated
    ]
    if evaluated:
        (path / "evaluations.jsonl").write_text(
            "".join(
                json.dumps({"step": step, "table": table}) + "\n"
                for step, table in zip(evaluated, tables)
            )
        )
    return path


def drawn(axis):
    """(x, y) of every line and of every row of markers in a panel."""
    points = [
        ([float(x) for x in line.get_xdata()], [float(y) for y in line.get_ydata()])
        for line in axis.lines
    ]
    return [pair for pair, line in zip(points, axis.lines) if line.get_linestyle() != "None"], [
        pair for pair, line in zip(points, axis.lines) if line.get_linestyle() == "None" and pair[0]
    ]


def test_plot_draws_what_the_run_folders_hold(tmp_path):
    """Runs of different lengths, one without evaluations, all cut short: lines, markers, minutes and means by hand."""
    pytest.importorskip("matplotlib")
    import plot

    folders = [
        fake_folder(tmp_path / "long", 4, evaluated=(0, 3, 7)),
        fake_folder(tmp_path / "short", 2),
        fake_folder(tmp_path / "one", 1, seed=1),
    ]
    figure = plot.draw(folders)
    panels = {axis.get_title(loc="left"): axis for axis in figure.axes}
    expected = {
        "Reward": [0.5, 1.5, 2.5, 3.5], "Accuracy": [0.1, 0.2, 0.3, 0.4], "Response length": [101, 102, 103, 104],
        "Entropy": [1, 1 / 2, 1 / 3, 1 / 4], "Clip share": [1.2, 2.2, 3.2, 4.2], "Accuracy over time": [0.1, 0.2, 0.3, 0.4],
    }  # fmt: skip
    assert list(panels) == list(expected)
    minutes = [
        0.5,
        30 / 60 + 50 / 60,
        80 / 60 + 70 / 60,
        150 / 60 + 90 / 60,
    ]  # a step takes 20 · step + 10 seconds
    for title, values in expected.items():
        lines, _ = drawn(panels[title])
        for (x, y), length in zip(lines, (4, 2, 1), strict=True):
            assert y == pytest.approx(values[:length]) and x == pytest.approx(
                minutes[:length] if title == "Accuracy over time" else [1, 2, 3, 4][:length]
            )
        assert (
            len(
                {
                    (line.get_color(), line.get_linestyle())
                    for line in panels[title].lines
                    if line.get_linestyle() != "None"
                }
            )
            == 3
        )
    for title, places in (
        ("Accuracy", [0, 3]),
        ("Accuracy over time", [0, 2.5]),
    ):  # step 7 is not in the metrics, as after a crash
        _, ((x, y),) = drawn(panels[title])
        assert x == pytest.approx(places) and y == pytest.approx([0.6, 0.6])
    assert "avg@4" in figure.get_suptitle() and "running" not in figure.get_suptitle()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "GRPO + AR (α=0.3), seed 0 (long)", "GRPO + AR (α=0.3), seed 0 (short)", "GRPO + AR (α=0.3), seed 1",
    ]  # fmt: skip
    figure = plot.draw(folders[:1], smooth=3)
    (line,), (markers,) = drawn(figure.axes[1])
    assert (
        line[1] == pytest.approx([0.1, 0.15, 0.2, 0.3])
        and markers[1] == pytest.approx([0.6, 0.6])
        and "last 3 steps" in figure.get_suptitle()
    )
    assert drawn(figure.axes[5])[0][0][0] == pytest.approx(minutes)


def test_plot_writes_a_picture_and_tells_runs_of_one_name_apart(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    import plot

    folders = [fake_folder(tmp_path / parent / "A", 2) for parent in ("x", "y")]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["plot.py", *map(str, folders)])
    assert plot.main() == 0 and capsys.readouterr().out == "wrote plot.png\n"
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    labels = [text.get_text() for text in plot.draw([*folders, folders[0]]).legends[0].get_texts()]
    assert len(labels) == 2 and all(str(folder) in label for folder, label in zip(folders, labels))


def test_plot_says_what_is_wrong(tmp_path, monkeypatch, capsys):
    """One sentence, exit code 2, no traceback."""
    import plot

    good, bare, odd = (
        fake_folder(tmp_path / "good", 2),
        tmp_path / "bare",
        fake_folder(tmp_path / "odd", 2),
    )
    bare.mkdir()
    (odd / "config.json").write_text("{")
    no_step = fake_folder(tmp_path / "no step", 0)

    def message(*flags):
        monkeypatch.setattr(sys, "argv", ["plot.py", *map(str, flags)])
        assert plot.main() == 2
        out, error = capsys.readouterr()
        assert not out and len(error.splitlines()) == 1 and error.startswith("plot.py: ")
        return error

    assert f"there is no run folder {tmp_path / 'nowhere'}" in message(good, tmp_path / "nowhere")
    assert f"{bare / 'metrics.jsonl'} is missing or holds no step" in message(bare)
    assert f"{no_step / 'metrics.jsonl'} is missing or holds no step" in message(no_step)
    assert f"{odd} cannot be read as a run folder" in message(odd)
    assert "--smooth 0 is not a number of steps" in message(good, "--smooth", 0)
    with monkeypatch.context() as without:
        for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
            without.setitem(sys.modules, name, None)  # as if it were not installed
        assert "pip install matplotlib" in message(good)
    pytest.importorskip("matplotlib")
    assert "No such file or directory" in message(
        good, "--output", tmp_path / "nowhere" / "plot.png"
    )
    assert "choose another --output" in message(good, "--output", tmp_path / "plot.nonsense")
