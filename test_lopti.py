"""Checks every formula against a computation of its own, every pitfall, and the whole program.

    python -m pytest -q                  # the quick tests
    LOPTI_ALL=1 python -m pytest -q      # all: also killed processes and more families of models

The sections, in this order. Each begins with the helpers that it alone needs.

    the method    the equations by hand (for a port to copy) · golden numbers · advantages and
                  later methods · log-probabilities · sampling · the update · training against a
                  plain loop · evaluation
    the program   settings and pages · runs and resume · what a run tells · models that are
                  refused, and their files · errors
    rewards.py    puzzles · mathematics (a table of answers, paid and unpaid) · rows of data
                  files · prompts · a reward of one's own

data/ports tests what golden.json holds, the flags of the paper's runs, and both ports; data/lab
what it measures.
"""

import copy
import doctest
import functools
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import runpy
import shutil
import signal
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

import lopti  # isort: skip, because it says how the threads of torch wait

import datasets
import huggingface_hub.constants
import numpy
import pytest
import torch
import transformers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
)

from rewards import (
    TASKS,
    answers_match,
    compute_rewards,
    extract_boxed,
    is_compared_as_text,
    kk_reward,
    load_data,
    load_function,
    load_rows,
    math_reward,
    prompt_stream,
    read_roles,
    render_prompt,
)

ROOT = Path(__file__).resolve().parent
TINY = ROOT / "data" / "tiny"
sys.path.insert(0, str(ROOT / "data"))

import golden

huggingface_hub.constants.HF_HUB_OFFLINE = True  # no test asks the hub
slow = pytest.mark.skipif(not os.environ.get("LOPTI_ALL"), reason="LOPTI_ALL=1 runs it")
TOKENIZER = AutoTokenizer.from_pretrained(TINY)
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "data" / "GUIDE.md").read_text(encoding="utf-8")


# --------------------------------------------------------------------------- the equations, by hand


def test_eq_1_group_advantages():
    """Mean 0, deviation √(12/3) = 2; and a group whose rewards are all equal."""
    rewards = torch.tensor([3.0, -1.0, -1.0, -1.0, 0.1, 0.1, 0.1, 0.1])
    advantages = lopti.group_advantages(rewards, group_size=4)
    assert advantages.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5, 0, 0, 0, 0], abs=1e-5)


def test_eq_1_loss_and_clip():
    """Clipped at 1.24, at 0.8, by the dual clip at 10, and not clipped. N = 4."""
    ratio = torch.tensor([1.5, 0.5, 20.0, 0.5])
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0])
    loss, statistics = lopti.policy_loss(ratio.log(), torch.zeros(4), advantages, normalizer=4)
    assert float(loss) == pytest.approx((-1.24 + 0.8 + 10 - 0.5) / 4)
    assert statistics["clip_ratio/high_mean"] == 0.25
    assert statistics["clip_ratio/low_mean"] == 0.25
    assert statistics["clip_ratio/dual_mean"] == 0.25


def test_eq_1_kl():
    """k3 with π_ref/π = 1/2 and 1: 1/2 - 1 - log 1/2 and 0, times β = 0.1."""
    logprobs = torch.tensor([0.5, 0.4]).log()
    ref_logprobs = torch.tensor([0.25, 0.4]).log()
    loss, _ = lopti.policy_loss(
        logprobs, logprobs, torch.zeros(2), 2, ref_logprobs=ref_logprobs, kl_coef=0.1
    )
    assert float(loss) == pytest.approx(0.1 * 0.1931472 / 2)


def test_eq_2_gradient():
    """By log π, times -N: r·Â + β·(π_ref/π - 1); at r = 1.3 the clip leaves the KL alone."""
    old_logprobs = torch.tensor([0.5, 0.5, 0.5]).log()
    ref_logprobs = torch.tensor([0.25, 0.5, 1.3]).log()
    logprobs = torch.tensor([0.5, 0.6, 0.65]).log().requires_grad_()
    advantages = torch.tensor([2.0, 2.0, 2.0])
    loss, _ = lopti.policy_loss(
        logprobs, old_logprobs, advantages, 3, ref_logprobs=ref_logprobs, kl_coef=0.1
    )
    loss.backward()
    assert (-3 * logprobs.grad).tolist() == pytest.approx([2 - 0.05, 2.4 - 0.1 / 6, 0.1])


def test_eq_4_reweighting():
    """α·π + 1 - α with α = 0.3, for both signs."""
    old_logprobs = torch.tensor([[0.01, 0.5, 1.0]]).log()
    advantages = torch.tensor([[1.0, -2.0, 1.0]])
    reweighted = lopti.reweight_advantages(advantages, old_logprobs, alpha=0.3)
    assert reweighted[0].tolist() == pytest.approx([0.703, -1.7, 1.0])


def test_prop_4_2_unlikely_tokens_have_the_larger_gradient_at_the_logits():
    """π = (1/2, 1/4, 1/4): e_1 - π and e_2 - π, between √(3/2)·(1-π) and √2·(1-π)."""
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]).log().requires_grad_()
    lopti.token_logprobs(logits, torch.tensor([0, 1])).sum().backward()
    assert logits.grad.tolist() == [[0.5, -0.25, -0.25], [-0.5, 0.75, -0.25]]
    room = torch.tensor([0.5, 0.75])  # 1 - π
    norms = logits.grad.norm(dim=1)
    assert (norms + 1e-6 >= 1.5**0.5 * room).all()
    assert (norms <= 2**0.5 * room).all()


def test_lopti_splits_at_eta():
    """π < η = 0.5 in the one group, π ≥ η in the other, and what is no response in none."""
    old_logprobs = torch.tensor([[0.1, 0.5, 0.9, 0.1]]).log()
    mask = torch.tensor([[True, True, True, False]])
    low, high = lopti.split_tokens(old_logprobs, mask, eta=0.5)
    assert low[0].tolist() == [True, False, False, False]
    assert high[0].tolist() == [False, True, True, False]


def test_lopti_updates_the_unlikely_tokens_first():
    """As README's box and all other orders say; twice with two passes."""
    assert lopti.Settings().pass_names() == ["all"]
    assert lopti.Settings(eta=0.5).pass_names() == ["low", "high"]
    assert lopti.Settings(eta=0.5, passes=2).pass_names() == ["low", "high", "low", "high"]
    assert lopti.Settings(eta=0.5, order="high-low").pass_names() == ["high", "low"]
    assert lopti.Settings(eta=0.5, order="high").pass_names() == ["high"]
    (box,) = [block for block in README.split("```") if "training_step()" in block]
    assert box.index("π < η") < box.index("π ≥ η")


def test_lopti_both_passes_divide_by_all_response_tokens():
    """One of three response tokens is low: its pass has the loss -1/3, not -1."""
    settings = lopti.Settings(eta=0.5, kl_coef=0.0)
    model = random_model()
    rollout = packed([[5]], [[6, 7, 8]])
    rollout.old_logprobs, _ = lopti.score(model, rollout, settings)
    rollout.advantages = torch.ones(1, 3 + 1) * rollout.mask
    low = torch.tensor([[False, True, False, False]])
    for tokens, loss in ((low, -1 / 3), (rollout.mask & ~low, -2 / 3)):
        totals = lopti.update(model, no_optimizer(), rollout, tokens, settings)
        assert totals["policy_loss"] == pytest.approx(loss)


# -------------------------------------------------------------------------- helpers of all sections


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def settings_of(flags="", **changes):
    """The settings of a command line, some of them changed."""
    return replace(lopti.parse_arguments(flags.split()), **changes)


def spy(monkeypatch, place, name, look):
    """From now on `look` gets the result and the inputs of every call of a function."""
    original = getattr(place, name)

    def looked_at(*inputs, **options):
        result = original(*inputs, **options)
        look(result, *inputs)
        return result

    monkeypatch.setattr(place, name, looked_at)


def data_row(prompt, solution=""):
    """A row as `load_data` makes them."""
    row = {"asked": prompt, "key": prompt, "prompt": prompt, "solution": solution}
    return {**row, "difficulty": "2", "columns": {}}


SIZES = {  # of a small model: a size, and the names that families have for it
    32: "hidden_size n_embd d_model moe_intermediate_size shared_expert_intermediate_size",
    64: "intermediate_size ffn_dim",
    2: "num_hidden_layers n_layer n_layers num_attention_heads num_key_value_heads n_head n_heads "
    "num_experts_per_tok",
    4: "num_experts num_local_experts",
    16: "head_dim",
    512: "max_position_embeddings n_positions",
    len(TOKENIZER): "vocab_size",
}


def random_model(family="Llama", **changes):
    """A small model over the bundled vocabulary; large random weights: π is far from uniform."""
    config_class = getattr(transformers, f"{family}Config")
    default = config_class()
    own = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    for size, names in SIZES.items():
        for name in names.split():
            is_other_name = name in config_class.attribute_map
            if hasattr(default, name) and not is_other_name:
                own[name] = size
    own |= changes
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**own))
    model.generation_config = GenerationConfig(eos_token_id=own["eos_token_id"])
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.mul_(6)
    return model.eval()


def save_both(model, tokenizer, folder):
    for part in (model, tokenizer):
        part.save_pretrained(folder)


def no_optimizer():
    """An optimizer that leaves all weights as they are."""
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)


def packed(prompts, responses):
    """A Rollout of these ids."""
    ids, mask, lengths = lopti.pack(prompts, responses)
    return lopti.Rollout(ids, mask, lengths, torch.zeros_like(lengths).bool(), [""] * len(ids))


def random_rollout(model, seed=0):
    """12 random rows of random lengths."""
    rng = random.Random(seed)
    vocabulary = range(5, model.config.vocab_size)
    prompts = []
    responses = []
    for row in range(12):
        prompt_length = 7 if row == 0 else rng.randint(2, 7)
        response_length = 9 if row == 11 else rng.randint(1, 9)
        prompts.append(rng.choices(vocabulary, k=prompt_length))
        responses.append(rng.choices(vocabulary, k=response_length))
    return packed(prompts, responses)


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def gradient(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def tensor_of(values):
    return torch.tensor(values, dtype=torch.float64)


def close(values, expected):
    return torch.allclose(values, tensor_of(expected), atol=1e-9, rtol=0)


def joined(rows):
    """Rows of several lengths → one list."""
    return list(itertools.chain.from_iterable(rows))


# ----------------------------------------------------------------------------------- golden numbers


GOLDEN = json.loads((ROOT / "data" / "golden.json").read_text(encoding="utf-8"))


def name_of(case):
    return case.get("name")


def mask_of(case, width):
    """True on response tokens: (B, width)."""
    return torch.arange(width) < torch.tensor(case["lengths"])[:, None]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=name_of)
def test_golden_numbers(case):
    """Advantages, split, loss and gradient of all tokens and of both passes, to 1e-9."""
    old = tensor_of(case["old_logprobs"])
    new = tensor_of(case["new_logprobs"])
    ref = tensor_of(case["ref_logprobs"])
    mask = mask_of(case, old.shape[1])
    advantages = lopti.group_advantages(tensor_of(case["rewards"]), case["group_size"])
    assert close(advantages, case["advantages"])
    advantages = lopti.reweight_advantages(advantages[:, None] * mask, old, case["alpha"])
    assert close(advantages, case["reweighted_advantages"])
    low, high = lopti.split_tokens(old, mask, case["eta"])
    assert torch.equal(low, tensor_of(case["low"]).bool() & mask)
    for name, tokens in (("all", mask), ("low", low), ("high", high)):
        expected = case["passes"][name]
        logprobs = new.clone().requires_grad_()
        loss, statistics = lopti.policy_loss(
            logprobs[tokens],
            old[tokens],
            advantages[tokens],
            mask.sum(),
            ref_logprobs=ref[tokens],
            clip_low=case["clip_low"],
            clip_high=case["clip_high"],
            clip_dual=case["clip_dual"],
            kl_coef=case["kl_coef"],
        )
        loss.backward()
        assert loss.item() == pytest.approx(expected["loss"], abs=1e-9)
        assert close(logprobs.grad, expected["gradient"])
        assert statistics["policy_loss"] == pytest.approx(expected["policy_loss"], abs=1e-9)
        assert statistics["kl"] == pytest.approx(expected["kl"], abs=1e-9)
        for kind in ("low", "high", "dual"):
            share = expected[f"clip_{kind}_share"]
            assert statistics[f"clip_ratio/{kind}_mean"] == pytest.approx(share)


class Bigrams(torch.nn.Module):
    """A policy small enough to write down: row i of its table holds the logits after token i."""

    device = torch.device("cpu")
    dtype = torch.float64

    def __init__(self, table):
        super().__init__()
        self.table = torch.nn.Embedding.from_pretrained(tensor_of(table), freeze=False)
        self.output = torch.nn.Identity()

    def get_output_embeddings(self):
        return self.output

    def forward(self, ids, use_cache):
        return SimpleNamespace(logits=self.output(self.table(ids)))


def golden_update(policy, reference, rollout, case):
    """Steps 3 to 7 of a training step: for each optimizer step (gradient, weights after it).

    `rollout` gets what was computed on the way.
    """
    names = {each.name for each in fields(lopti.Settings)} - {"name", "steps"}
    settings = lopti.Settings(**{name: case[name] for name in names & case.keys()})
    rollout.old_logprobs, rollout.entropies = lopti.score(policy, rollout, settings)
    rollout.ref_logprobs, _ = lopti.score(reference, rollout, settings)
    advantages = lopti.group_advantages(tensor_of(case["rewards"]), settings.group_size)
    advantages = advantages[:, None] * rollout.mask
    rollout.advantages = lopti.reweight_advantages(advantages, rollout.old_logprobs, settings.alpha)
    low, high = lopti.split_tokens(rollout.old_logprobs, rollout.mask, settings.eta)
    groups = {"low": low, "high": high, "all": rollout.mask}
    optimizer = lopti.make_optimizer(policy, settings)
    steps = []

    def before_step(*call):
        steps.append([gradient(policy)])

    def after_step(*call):
        steps[-1].append(weights(policy))

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)
    for name in settings.pass_names():
        lopti.update(policy, optimizer, rollout, groups[name], settings)
    return steps


@pytest.mark.parametrize("case", GOLDEN["rollouts"], ids=name_of)
def test_golden_rollouts(case):
    """Both passes over two mini-batches: every step's gradient and weights, and the skipped."""
    policy = Bigrams(case["table"])
    rollout = packed([[prompt] for prompt in case["prompts"]], case["responses"])
    steps = golden_update(policy, Bigrams(case["reference"]), rollout, case)
    for name in ("old_logprobs", "ref_logprobs", "advantages"):
        assert close(getattr(rollout, name)[rollout.mask], joined(case[name]))
    expected_steps = [step for step in case["steps"] if not step["skipped"]]
    assert len(steps) == len(expected_steps)
    for (found, table), expected in zip(steps, expected_steps):
        full = tensor_of(expected["gradient"]).flatten()
        factor = min(1.0, case["max_grad_norm"] / (full.norm().item() + 1e-6))
        assert torch.allclose(found, factor * full, atol=1e-9, rtol=0)
        assert close(table, joined(expected["table"]))


@pytest.mark.parametrize("case", GOLDEN["treatments"], ids=name_of)
def test_golden_numbers_of_the_later_methods(case):
    """REINFORCE++, entropies, STAPO, 80/20 and min-p against plain Python."""
    ids = torch.tensor(case["ids"])
    mask = mask_of(case, ids.shape[1])
    logits = tensor_of(case["logits"])[mask] / case["temperature"]  # (M, V)
    logprobs = lopti.spread(lopti.token_logprobs(logits, ids[mask]), mask)
    entropies = lopti.spread(lopti.entropy(logits), mask)
    assert close(logprobs, case["logprobs"])
    assert close(entropies, case["entropies"])
    # min-p
    safe_logits = logits.where(lopti.safe_vocabulary(logits, case["min_p"]), -math.inf)
    safe_logprobs = lopti.spread(lopti.token_logprobs(safe_logits, ids[mask]), mask)
    is_safe = safe_logprobs > -math.inf
    assert (is_safe & mask).tolist() == case["safe"]
    assert close(safe_logprobs.masked_fill(~is_safe, 0), case["safe_logprobs"])
    assert close(lopti.spread(lopti.entropy(safe_logits), mask), case["safe_entropies"])
    # REINFORCE++
    advantages = lopti.reinforce_pp_advantages(tensor_of(case["rewards"]), mask)
    assert close(advantages, case["reinforce_pp_advantages"])
    # STAPO and 80/20
    advantages = tensor_of(case["advantages"])[:, None] * mask
    kept = lopti.stapo_mask(
        logprobs, entropies, advantages, mask, case["stapo_tau"], case["stapo_quantile"]
    )
    assert kept.tolist() == case["stapo_kept"]
    assert lopti.entropy_mask(entropies, mask, case["rho"]).tolist() == case["top_kept"]


# ---------------------------------------------------------------- advantages, and the later methods


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_get_exactly_zero_and_nearly_equal_ones_teach(dtype):
    """Seven times 0.1 has a mean that is not 0.1 in floating point: Adam would take whole steps."""
    mask = torch.ones(7, 3) > 0
    for reward in (0.1, -3.0, 1e-8, 1e6 + 0.1):
        equal = torch.full((7,), reward, dtype=dtype)
        assert lopti.group_advantages(equal, 7).tolist() == [0.0] * 7
        assert lopti.reinforce_pp_advantages(equal, mask).abs().max() == 0
    near = torch.tensor([0.5, 0.5 + 1e-5], dtype=dtype)
    mask = torch.ones(2, 1) > 0
    for advantages in (lopti.group_advantages(near, 2), lopti.reinforce_pp_advantages(near, mask)):
        assert advantages.flatten()[1] > 0.04
        assert advantages.sum().abs() < 1e-3


def test_a_sum_of_parts_reaches_its_threshold_everywhere():
    """.7 + .2 + .1 is .9999999999999999: right in training and in the table, and equal to 1."""
    reward = 0.7 + 0.2 + 0.1
    assert reward < 1
    table = lopti.tally([{"difficulty": "2"}], [[("", reward), ("", 0.9)]], 1.0)
    assert table["2"]["greedy"][0] == 1
    assert table["2"]["avg@1"][0] == 0
    assert not lopti.group_advantages(tensor_of([reward, 1.0]), 2).any()


def with_scores(monkeypatch, logprobs, entropies):
    """What `tokens_to_keep` sees of the current policy."""
    monkeypatch.setattr(lopti, "score", lambda *inputs: (logprobs, entropies))


def test_which_tokens_the_later_methods_leave(monkeypatch):
    """80/20 of all tokens, whatever STAPO leaves; of so few that ρ·n rounds to 0: none. ρ = 1."""
    entropies = torch.tensor([[0.1, 0.9, 0.5, 0.2, 0.3]])
    with_scores(monkeypatch, torch.tensor([[-9.0, -1, -9, -9, -1]]), entropies)
    batch = SimpleNamespace(mask=torch.ones(1, 5) > 0, advantages=torch.ones(1, 5))

    def kept(flags):
        return lopti.tokens_to_keep(None, batch, settings_of(flags))[0].tolist()

    assert kept("") == [True] * 5
    assert kept("--stapo") == [False, True, True, False, True]
    assert kept("--stapo --top-entropy .4") == [False, True, True, False, False]
    assert kept("--stapo --top-entropy .8") == [False, True, True, False, True]
    assert kept("--top-entropy 1") == [True] * 5
    assert not any(kept("--top-entropy .09"))
    equal = torch.tensor([[1.0, 1.0, 0.0]])
    assert lopti.safe_vocabulary(equal, 1.0).tolist() == [[True, True, False]]


def test_stapo_has_the_paper_s_thresholds(monkeypatch):
    """τ_p = .002: of five candidates below it the three quarters of lower entropy go."""
    pi = torch.tensor([[0.0019, 0.0019, 0.0019, 0.0019, 0.0019, 0.0021, 0.0021]])
    entropies = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 0.5, 0.5]])
    with_scores(monkeypatch, pi.log(), entropies)
    batch = SimpleNamespace(mask=torch.ones(1, 7) > 0, advantages=torch.ones(1, 7))
    kept = lopti.tokens_to_keep(None, batch, lopti.Settings(stapo=True))
    assert kept[0].tolist() == [False, False, False, True, True, True, True]


# -------------------------------------------------------------------------------- log-probabilities


ENDS = [1, *range(40, 80)]  # of models that are to end their responses early
FEW_ENDS = ENDS[:21]
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
LINEAR |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
LINEAR |= {"layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
MAMBA |= {"mamba_expand": 2, "mamba_chunk_size": 8}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"], "block_ff_dim": 64}
MODELS = {  # what models do between ids and logits, and what their layers keep
    "plain": {},
    "dropout": {"family": "GPT2", "resid_pdrop": 0.5},  # learnt positions too
    "tied embeddings": {"family": "Qwen2", "tie_word_embeddings": True},
    "several ends": {"family": "Qwen2", "eos_token_id": FEW_ENDS},
    "soft-capping": {"family": "Gemma2", "final_logit_softcapping": 3.0, "sliding_window": 4},
    "logits scaled": {"family": "Cohere", "logit_scale": 1.7},
    "sliding window": {"family": "Mistral", "sliding_window": 16, "eos_token_id": FEW_ENDS},
    "linear attention": {"family": "Qwen3Next", **LINEAR, "eos_token_id": FEW_ENDS},
    "convolutions": {"family": "Lfm2", **CONVOLUTIONS, "eos_token_id": FEW_ENDS},
    "a state": {"family": "FalconH1", **MAMBA, "mamba_d_ssm": 64, "eos_token_id": FEW_ENDS},
}


def plain_rows(rollout):
    """(prompt, response) of each row, without padding."""
    rows = []
    for ids, mask in zip(rollout.ids, rollout.mask):
        start = int(mask.int().argmax())
        rows.append((ids[:start], ids[mask]))
    return rows


def plain_distribution(model, prompt, response, temperature, min_p=0.0):
    """log π of every word at each token of one response alone, (T, V); −∞ outside of V_safe."""
    logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    probabilities = (logits / temperature).softmax(-1)
    safe = probabilities >= min_p * probabilities.max(-1, keepdim=True).values
    return (logits / temperature).masked_fill(~safe, -math.inf).log_softmax(-1)


def plain_logprobs(model, row, temperature, min_p=0.0):
    """log π of each token of one response, (T,)."""
    distribution = plain_distribution(model, *row, temperature, min_p)
    return distribution[range(len(row[1])), row[1]]


def plain_entropy(distribution):
    return -(distribution.exp() * distribution).nansum(-1)


@pytest.mark.parametrize(
    "name, temperature, min_p",
    [*((name, 0.7, 0.0) for name in MODELS), ("plain", 1.0, 0.15), ("plain", 0.7, 0.35)],
)
def test_logprobs_against_one_row_at_a_time(name, temperature, min_p):
    """Padded, batched and micro-batched, against each response alone; and every gradient.

    Temperature first, then the safe vocabulary, then the softmax.
    """
    model = random_model(**MODELS[name])
    rollout = random_rollout(model, seed=1)
    mask = rollout.mask
    settings = settings_of(temperature=temperature, min_p=min_p, tokens_per_microbatch=60)
    logprobs, entropies = lopti.score(model, rollout, settings)
    assert logprobs.dtype == torch.float32
    assert not logprobs[~mask].any()
    assert not entropies[~mask].any()
    factors = torch.randn(mask.shape)  # of each token's log π in a sum
    total = 0.0
    for i, (prompt, response) in enumerate(plain_rows(rollout)):
        distribution = plain_distribution(model, prompt, response, temperature, min_p)
        expected = distribution[range(len(response)), response]
        assert torch.allclose(logprobs[i][mask[i]], expected, atol=2e-5)  # −∞ included
        assert torch.allclose(entropies[i][mask[i]], plain_entropy(distribution), atol=2e-5)
        safe = expected > -math.inf
        total = total + (expected * factors[i][mask[i]])[safe].sum()
    unsafe = mask & (logprobs == -math.inf)
    assert (0 < unsafe.sum() < mask.sum()) == (min_p > 0)
    total.backward()
    expected = gradient(model)
    model.zero_grad()
    logits = lopti.token_logits(model, rollout.ids, mask, temperature, min_p)
    logprobs = lopti.token_logprobs(logits, rollout.ids[mask])
    safe = ~unsafe[mask]
    (logprobs * factors[mask])[safe].sum().backward()
    assert expected.norm() > 1
    assert (gradient(model) - expected).norm() <= 1e-5 * expected.norm()


def test_micro_batches_by_tokens():
    """Sorted by length, so that little padding is read; one long row alone."""
    lengths = torch.tensor([9, 2, 5, 30, 2, 4])
    assert lopti.micro_batches(range(6), lengths, 12) == [[1, 4, 5], [2], [0], [3]]
    assert lopti.micro_batches([0, 2], lengths, 1000) == [[2, 0]]


# ----------------------------------------------------------------------------------------- sampling


PROMPTS = ["Zoey is a knight or Liam is a knave. So who is a knight?", "Liam is a knave", "Lily"]


def sample(model, prompts=PROMPTS, tokenizer=TOKENIZER, group_size=1, temperature=0, **changes):
    settings = settings_of(**{"max_new_tokens": 12, **changes})
    return lopti.sample(model, tokenizer, prompts, group_size, temperature, settings)


def generated_alone(model, prompt_ids, dtype):
    """A greedy response of up to 40 tokens by one plain call of `generate`, behind its prompt."""
    config = transformers.GenerationConfig(
        do_sample=False,
        pad_token_id=0,
        max_new_tokens=40,
        eos_token_id=lopti.end_token_ids(model, TOKENIZER),
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        return model.generate(torch.tensor([prompt_ids]), generation_config=config)[0]


def check(model, flags=""):
    """`check_model` of rows with one prompt."""
    lopti.check_model(model, TOKENIZER, [{"prompt": PROMPTS[0]}], settings_of(flags, model="it"))


def assert_sampled_as_by_generate(model, dtype="float32"):
    """Accepted before training; greedy responses in groups, five rows at a time, ended ones
    leaving, are those of plain `generate` one by one."""
    check(model, f"--dtype {dtype}")
    prompts = TOKENIZER(PROMPTS, add_special_tokens=False)["input_ids"]
    alone = [generated_alone(model, prompt, dtype) for prompt in prompts]
    rollout = sample(model, group_size=4, sample_batch_size=5, max_new_tokens=40, dtype=dtype)
    for i, (prompt, response) in enumerate(plain_rows(rollout)):
        assert prompt.tolist() == prompts[i // 4]
        assert torch.equal(torch.cat([prompt, response]), alone[i // 4])
    padding = torch.arange(rollout.ids.shape[1]) >= rollout.lengths[:, None]
    assert not rollout.ids[padding].any()


@pytest.mark.parametrize("name", MODELS)
def test_greedy_samples_against_generate(name, monkeypatch):
    bars = []
    spy(monkeypatch, lopti, "tqdm", lambda bar, *_: bars.append((bar.total, bar.disable)))
    assert_sampled_as_by_generate(random_model(**MODELS[name]))
    assert bars == [(3, True)]  # 12 rows by fives; no bar where the output is no terminal


def test_greedy_samples_in_bfloat16():
    assert_sampled_as_by_generate(random_model(), "bfloat16")


LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
LATENT |= {"v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
LATENT |= {"first_k_dense_replace": 1}
MORE = {
    "Qwen3": {},
    "Phi3": {},
    "Mixtral": {},
    "Gemma3Text": {"sliding_window": 16},
    "GptOss": {"sliding_window": 16},
    "DeepseekV3": LATENT,
    "Qwen3_5Text": LINEAR,
    "OlmoHybrid": LINEAR,
    "GraniteMoeHybrid": {**MAMBA, "layer_types": ["mamba", "attention"]},
    "Mamba2": {"num_heads": 4, "state_size": 8, "n_groups": 1, "chunk_size": 8},
}


@slow
@pytest.mark.parametrize("family", MORE)
def test_more_models(family):
    assert_sampled_as_by_generate(random_model(family, eos_token_id=FEW_ENDS, **MORE[family]))


@pytest.mark.parametrize("temperature, min_p", [(1.0, 0.0), (0.7, 0.0), (0.8, 0.3)])
def test_samples_come_from_the_scored_distribution(temperature, min_p):
    """First tokens of 4,000 samples against the π that is scored (chi-squared).

    The model's own top_k and so on are put aside, as are HF's.
    """
    model = random_model()
    own = model.generation_config
    own.update(do_sample=True, top_k=2, top_p=0.5, temperature=0.01, repetition_penalty=1.8)
    own.update(min_p=0.5, no_repeat_ngram_size=1, suppress_tokens=list(range(20, 60)))
    settings = settings_of(temperature=temperature, min_p=min_p, max_new_tokens=1)
    torch.manual_seed(0)
    rollout = lopti.sample(model, TOKENIZER, ["Lily said"], 4000, temperature, settings)
    assert torch.isfinite(lopti.score(model, rollout, settings)[0]).all()
    prompt, _ = plain_rows(rollout)[0]
    every_word = torch.arange(len(TOKENIZER))[:, None].tolist()
    probe = packed([prompt.tolist()] * len(TOKENIZER), every_word)
    probabilities = lopti.score(model, probe, settings)[0][:, -1].exp().double()
    assert probabilities.sum().item() == pytest.approx(1, abs=1e-4)
    common = probabilities > 0.002
    expected = 4000 * probabilities[common]
    counts = torch.bincount(rollout.ids[:, -1], minlength=len(TOKENIZER))[common]
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    degrees = int(common.sum()) - 1
    assert degrees > 1
    assert chi_squared < degrees + 5 * math.sqrt(2 * degrees)


def test_the_model_keeps_its_own_generation_config():
    """final/ is saved with it."""
    model = random_model()
    own = model.generation_config
    own.top_k = 2
    sample(model)
    assert model.generation_config is own
    assert own.top_k == 2


def test_every_end_of_sequence_token_ends_a_response_and_belongs_to_it(monkeypatch):
    """The tokenizer's, which is the padding too, and two of the model's settings.

    At the end the batch has only what was unfinished 32 tokens before, and only new tokens are
    searched for an end.
    """
    model = random_model()
    model.generation_config.eos_token_id = [40, 41]
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.pad_token = tokenizer.eos_token
    seen = []
    searched = []
    spy(monkeypatch, lopti, "until_end", lambda _, ids, *ends: searched.append(len(ids)))

    def look(module, inputs):
        seen.append(len(inputs[0]))
        assert not torch.is_grad_enabled()

    model.get_input_embeddings().register_forward_pre_hook(look)
    torch.manual_seed(0)
    rollout = sample(
        model, PROMPTS[:2], tokenizer, group_size=64, max_new_tokens=60, temperature=2.0
    )
    unfinished = int((rollout.mask.sum(1) > lopti.STRETCH).sum())
    assert 0 < unfinished < 128
    assert seen[0] == 128
    assert seen[-1] == unfinished
    assert max(searched) == lopti.STRETCH
    last = set()
    for (_, response), truncated in zip(plain_rows(rollout), rollout.truncated):
        ids = response.tolist()
        assert not {1, 40, 41} & set(ids[:-1])
        if not truncated:
            last.add(ids[-1])
    assert last == {1, 40, 41}


def test_which_ids_end_a_response():
    """The model's generation config and the tokenizer's; the config's where neither says any."""
    model = random_model()
    tokenizer = copy.deepcopy(TOKENIZER)
    end = tokenizer.eos_token_id
    model.config.eos_token_id = 42
    model.generation_config = GenerationConfig(eos_token_id=[40, 41])
    assert lopti.end_token_ids(model, tokenizer) == [end, 40, 41]
    model.generation_config = GenerationConfig()
    assert lopti.end_token_ids(model, tokenizer) == [end]
    # As HF makes one where there is no generation_config.json: Llama's default is 2.
    model.generation_config = GenerationConfig.from_model_config(model.config)
    assert model.generation_config.eos_token_id == 42
    assert lopti.end_token_ids(model, tokenizer) == [end]
    tokenizer.add_special_tokens({"extra_special_tokens": [tokenizer.convert_ids_to_tokens(42)]})
    assert lopti.end_token_ids(model, tokenizer) == [end, 42]
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.eos_token = None
    assert lopti.end_token_ids(model, tokenizer) == [42]


def test_texts_keep_special_tokens_and_leave_out_the_end():
    """In Qwen3's and DeepSeek's vocabularies <think> is a special token: rewards must see it."""
    model = random_model(eos_token_id=ENDS)
    special = copy.deepcopy(TOKENIZER)
    words = [word for word, number in special.get_vocab().items() if number >= 100]
    special.add_special_tokens({"extra_special_tokens": words})
    torch.manual_seed(0)
    rollout = sample(model, PROMPTS, special, group_size=4, temperature=1.0)
    assert not rollout.truncated.all()
    for (_, response), truncated, text in zip(
        plain_rows(rollout), rollout.truncated, rollout.texts
    ):
        ids = response.tolist()
        assert text == special.decode(ids if truncated else ids[:-1], skip_special_tokens=False)
    assert special.decode(rollout.ids[0], skip_special_tokens=True) != special.decode(
        rollout.ids[0], skip_special_tokens=False
    )


# --------------------------------------------------------------------------------------- the update


def updated(checkpointed=False, family="Llama"):
    """The model after one pass over a fixed rollout in three mini-batches, and its statistics."""
    model = random_model(family)
    settings = settings_of("--mini-batch-size 4")
    if checkpointed:
        lopti.checkpoint_layers(model)
    rollout = random_rollout(model)
    rollout.old_logprobs, _ = lopti.score(model, rollout, settings)
    torch.manual_seed(0)
    advantages = lopti.group_advantages(torch.randn(len(rollout.mask)), 4)
    rollout.advantages = advantages[:, None] * rollout.mask
    rollout.ref_logprobs = rollout.old_logprobs + 0.3 * torch.randn(rollout.mask.shape)
    optimizer = lopti.make_optimizer(model, settings)
    return model, lopti.update(model, optimizer, rollout, rollout.mask, settings)


def test_non_finite_steps_are_left_out_and_counted(monkeypatch):
    """Neither the weights nor the sums get what is not a number: metrics.jsonl stays JSON."""
    factors = iter([1.0, math.nan, 1.0])
    original = lopti.kl_estimate
    monkeypatch.setattr(lopti, "kl_estimate", lambda *inputs: original(*inputs) * next(factors))
    model, statistics = updated()
    assert statistics["optimizer_steps"] == 2
    assert statistics["nonfinite_steps"] == 1
    assert all(math.isfinite(value) for value in statistics.values())
    assert torch.isfinite(weights(model)).all()


@pytest.mark.parametrize("kl_coef", [0.001, 0])
def test_no_padding_is_read_and_no_logits_are_computed_in_vain(kl_coef):
    """All rows are scored, then those with a token to update are read again, and only for that.

    With β = 0 only those with advantages.
    """
    settings = settings_of(f"--tokens-per-microbatch 1 --kl-coef {kl_coef}")
    model = random_model()
    rollout = random_rollout(model)
    tokens = rollout.mask & (rollout.ids % 5 == 0)
    with_advantage = rollout.lengths % 2
    busy = tokens.any(1).int()
    if kl_coef == 0:
        busy = busy * with_advantage
    assert 0 < busy.sum() < len(busy)
    ids_read = []
    logits_made = []
    caches = []

    def look(module, inputs, output):
        ids_read.append(inputs[0].numel())
        logits_made.append(output.logits.numel() // len(TOKENIZER))
        caches.append(output.get(lopti.CACHE))

    model.register_forward_hook(look)
    rollout.old_logprobs, _ = lopti.score(model, rollout, settings)
    rollout.ref_logprobs = rollout.old_logprobs
    rollout.advantages = 1.0 * rollout.mask * with_advantage[:, None]
    lopti.update(model, lopti.make_optimizer(model, settings), rollout, tokens, settings)
    assert not any(caches)
    assert sum(ids_read) == (rollout.lengths * (1 + busy)).sum()
    assert sum(logits_made) == rollout.mask.sum() + (tokens * busy[:, None]).sum()


def test_gradient_checkpointing_changes_memory_and_nothing_else(monkeypatch, recwarn):
    """The same bits by two forward passes of each layer, without dropout or a warning."""
    calls = []
    spy(monkeypatch, torch.nn.functional, "layer_norm", lambda *call: calls.append(1))
    plain, statistics = updated(False, "GPT2")  # which has dropout
    plain_calls = len(calls)
    calls.clear()
    checkpointed, same_statistics = updated(True, "GPT2")
    assert len(calls) == plain_calls + 12  # 3 mini-batches × 2 layers × 2 layer norms
    assert torch.equal(weights(plain), weights(checkpointed))
    assert statistics == same_statistics
    assert not any(part.training for part in checkpointed.modules())
    assert not recwarn.list


def test_gradient_checkpointing_from_the_command_line(monkeypatch):
    """kk.flags and math.flags run out of memory without it."""
    checkpointed = []
    spy(monkeypatch, lopti, "checkpoint_layers", lambda _, model: checkpointed.append(model))
    flags = f"--gradient-checkpointing --model {SMALL} {ROWS}"
    policy, *_ = lopti.prepare(settings_of(flags))
    assert checkpointed == [policy]


def test_gradient_checkpointing_that_would_do_nothing_is_refused():
    with pytest.raises(lopti.UserError, match="--gradient-checkpointing does nothing for CTRL"):
        lopti.checkpoint_layers(random_model("CTRL", dff=64))


# -------------------------------------------------------------------- training against a plain loop


SOLUTIONS = {"Lily": "", "Zoey is a knight": "1", "Liam is a knave or": "22"}  # of three prompts
CLIPS = ("low", "high", "dual")
SUMS = ("policy_loss", "kl", "updated_share", *(f"clip_ratio/{name}_mean" for name in CLIPS))


def vowels_modulo_3(completions, solution, **columns):
    """A reward that any response can earn, and another one after each solution."""
    rewards = []
    for text, truth in zip(completions, solution):
        vowels = sum(text.count(letter) for letter in "aeiou")
        rewards.append(float((vowels + len(truth)) % 3))
    return rewards


@dataclass
class Answer:
    """What the plain loop knows of a response."""

    prompt: torch.Tensor  # ids
    response: torch.Tensor  # ids (T,)
    text: str
    reward: float = None
    advantage: float = None  # Â, before Eq. 4
    old: torch.Tensor = None  # log π_old (T,)
    ref: torch.Tensor = None  # log π_ref (T,)
    entropies: torch.Tensor = None  # (T,)

    def logprobs(self, model, settings):
        row = (self.prompt, self.response)
        return plain_logprobs(model, row, settings.temperature, settings.min_p)

    def entropy(self, model, settings):
        row = (self.prompt, self.response)
        distribution = plain_distribution(model, *row, settings.temperature, settings.min_p)
        return plain_entropy(distribution).detach().round(decimals=9)


def plain_answers(policy, reference, rollout, settings):
    """Steps 2 to 4 of a training step, one response after the other."""
    answers = []
    for prompt, response in plain_rows(rollout):
        words = [token for token in response.tolist() if token not in ENDS]
        answers.append(Answer(prompt, response, TOKENIZER.decode(words)))
    texts = [answer.text for answer in answers]
    solutions = [SOLUTIONS[TOKENIZER.decode(answer.prompt)] for answer in answers]
    rewards = vowels_modulo_3(texts, solutions)
    if settings.advantage == "grpo":
        case = {"group_size": settings.group_size, "rewards": rewards}
        advantages = golden.group_advantages(case)
    else:  # whitened over all tokens
        of_tokens = []
        for answer, reward in zip(answers, rewards):
            of_tokens += [reward] * len(answer.response)
        scale = math.sqrt(statistics.variance(of_tokens) + 1e-8)
        advantages = [(reward - statistics.mean(of_tokens)) / scale for reward in rewards]
    with torch.no_grad():
        for answer, reward, advantage in zip(answers, rewards, advantages):
            answer.reward = reward
            answer.advantage = advantage
            answer.old = answer.logprobs(policy, settings)
            answer.ref = answer.logprobs(reference, settings)
            answer.entropies = answer.entropy(policy, settings)
    return answers


def plain_metrics(answers, settings):
    """What metrics.jsonl says of a rollout batch, before its update."""
    rewards = [answer.reward for answer in answers]
    size = settings.group_size
    groups = [rewards[start : start + size] for start in range(0, len(rewards), size)]
    lengths = [len(answer.response) for answer in answers]
    old = torch.cat([answer.old for answer in answers]).tolist()
    ref = torch.cat([answer.ref for answer in answers]).tolist()
    kl = 0.0
    if settings.kl_coef:
        for x, y in zip(old, ref):
            if x > -math.inf:  # in the safe vocabulary
                kl += golden.token_terms(x, x, y, 0, vars(settings))[1]
    bound = math.log(settings.eta or 0.5)
    return {
        "reward": statistics.mean(rewards),
        "reward_std": statistics.mean(statistics.stdev(group) for group in groups),
        "frac_reward_zero_std": statistics.mean(len(set(group)) == 1 for group in groups),
        "accuracy": statistics.mean(reward >= 1 for reward in rewards),
        "completions/mean_length": statistics.mean(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": statistics.mean(
            int(answer.response[-1]) not in ENDS for answer in answers
        ),
        "entropy": sum(float(answer.entropies.sum()) for answer in answers) / sum(lengths),
        "low_probability_share": statistics.mean(logprob < bound for logprob in old),
        "rollout/kl": kl / sum(lengths),
        "rollout/tokens": sum(lengths),
    }


def plain_kept(policy, answers, settings):
    """Which tokens of a mini-batch STAPO or 80/20 keep, by the policy: a mask for each response."""
    entropies = [answer.entropy(policy, settings) for answer in answers]
    if settings.top_entropy:
        falling = sorted(torch.cat(entropies).tolist(), reverse=True)
        bound = falling[round(settings.top_entropy * len(falling)) - 1]
        return [values >= bound for values in entropies]
    if not settings.stapo:
        return [torch.ones_like(values) > 0 for values in entropies]
    candidates = []  # a mask for each response
    for answer in answers:
        pi = answer.logprobs(policy, settings).exp()
        candidates.append((pi < STAPO["tau_p"]) & (answer.advantage > 0))
    of_candidates = [values[mask] for values, mask in zip(entropies, candidates)]
    of_candidates = torch.cat(of_candidates).tolist()
    bound = golden.quantile(of_candidates, STAPO["quantile"]) if of_candidates else 0
    return [~(mask & (values < bound)) for mask, values in zip(candidates, entropies)]


def plain_optimizer_step(policy, optimizer, answers, name, settings):
    """An optimizer step on a mini-batch, token after token: what was measured, each divided by N.

    `name` says which tokens the pass updates: all, low or high.
    """
    kept = plain_kept(policy, answers, settings)
    count = int(torch.cat(kept).sum())  # N
    found = dict.fromkeys(SUMS, 0.0)
    found["masked_tokens"] = len(torch.cat(kept)) - count
    total = 0.0  # its gradient is that of the loss
    for answer, chosen in zip(answers, kept):
        if answer.advantage == 0 and settings.kl_coef == 0:
            continue  # a response without a gradient
        new = answer.logprobs(policy, settings)
        is_low = answer.old.exp() < settings.eta
        if name == "low":
            chosen = chosen & is_low
        if name == "high":
            chosen = chosen & ~is_low
        chosen = chosen & (answer.old > -math.inf) & (new > -math.inf)  # in the safe vocabulary
        for x, old, ref in zip(new[chosen], answer.old[chosen], answer.ref[chosen]):
            weight = settings.alpha * math.exp(old) + 1 - settings.alpha
            loss, kl, clip, slope = golden.token_terms(
                x.item(), old.item(), ref.item(), weight * answer.advantage, vars(settings)
            )
            total = total + slope * x / count
            found["policy_loss"] += loss / count
            found["kl"] += kl / count
            found["updated_share"] += 1 / count
            for side in CLIPS:
                found[f"clip_ratio/{side}_mean"] += (clip == side) / count
    found["norm"] = 0.0
    if found["updated_share"]:
        total.backward()
        parameters = list(policy.parameters())
        norm = torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)
        found["norm"] = norm.item()
    if found["norm"]:
        optimizer.step()
    optimizer.zero_grad()
    return found


def plain_update_metrics(by_pass, passes):
    """What metrics.jsonl says of an update: means over mini-batches, summed over Lopti's passes."""
    metrics = dict.fromkeys(SUMS, 0.0)
    steps = joined(by_pass.values())
    for name, found in by_pass.items():
        norms = [step["norm"] for step in found if step["norm"]]
        metrics[f"grad_norm/{name}"] = statistics.mean(norms)
        for each in SUMS:
            metrics[each] += statistics.mean(step[each] for step in found)
    metrics["optimizer_steps"] = sum(step["norm"] > 0 for step in steps)
    metrics["skipped_steps"] = sum(step["norm"] == 0 for step in steps)
    metrics["nonfinite_steps"] = 0
    metrics["masked_tokens"] = sum(step["masked_tokens"] for step in steps)
    return metrics


def plain_training(policy, rollouts, passes, settings):
    """Train on what was sampled; returns the lines of metrics.jsonl and of samples.jsonl."""
    reference = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(
        policy.parameters(), settings.learning_rate, weight_decay=settings.weight_decay
    )
    lines = []
    samples = []
    for step, rollout in enumerate(rollouts, 1):
        answers = plain_answers(policy, reference, rollout, settings)
        metrics = {"step": step, **plain_metrics(answers, settings)}
        by_pass = {name: [] for name in passes}
        for name in passes:
            for start in range(0, len(answers), settings.mini_batch_size):
                batch = answers[start : start + settings.mini_batch_size]
                found = plain_optimizer_step(policy, optimizer, batch, name, settings)
                by_pass[name].append(found)
        metrics |= plain_update_metrics(by_pass, passes)
        tokens = len(passes) * metrics["rollout/tokens"]
        metrics["masked_share"] = metrics["masked_tokens"] / tokens
        lines.append(metrics)
        for answer in answers[: 2 * settings.group_size : settings.group_size]:
            prompt = TOKENIZER.decode(answer.prompt)
            sample = {"step": step, "prompt": prompt, "response": answer.text}
            samples.append({**sample, "reward": answer.reward})
    return lines, samples


OFF_DEFAULT = (
    "--steps 2 --prompts-per-step 3 --group-size 4 --max-new-tokens 6 --temperature 0.7 "
    "--mini-batch-size 5 --tokens-per-microbatch 24 --learning-rate 1e-2 --weight-decay 0.3 "
    "--clip-low 0.05 --clip-high 0.1 --clip-dual 1.3 --max-grad-norm 0.4 --sample-batch-size 8 "
    f"--save-every 0 --solved-reward 1 --reward {__name__}:vowels_modulo_3 "
)

STAPO = {"tau_p": 0.1, "quantile": 0.6}

TRAINING = {  # flags: the tokens of each pass
    "--alpha 0.3 --eta 0.06 --kl-coef 0.5 --min-p 0.05 --passes 2": "low high low high",
    "--alpha 0.9 --eta 0.06 --order high-low --advantage reinforce++ --kl-coef 0": "high low",
    "--eta 0.06 --order high --kl-coef 0.2": "high",
    "--stapo --kl-coef 0.3 --passes 2": "all all",
    "--eta 0.06 --top-entropy 0.4 --kl-coef 0": "low high",
}


def trained(policy, flags, folder, monkeypatch):
    """Train by lopti.py on three prompts: the settings and the lines of metrics.jsonl."""
    settings = settings_of(OFF_DEFAULT + f"{flags} --name run --output {folder}")
    rows = [data_row(*prompt) for prompt in SOLUTIONS.items()]
    monkeypatch.setattr(lopti, "prepare", lambda settings: (policy, TOKENIZER, rows, rows))
    monkeypatch.setattr(lopti, "evaluate", lambda *inputs: ({}, []))
    monkeypatch.setattr(lopti, "report", lambda *inputs: None)
    lopti.train(settings)
    lines = read_jsonl(folder / "run" / "metrics.jsonl")
    for line in lines:
        assert line.pop("seconds") > 0
    return settings, lines


@pytest.mark.parametrize("flags", TRAINING)
def test_training_against_a_plain_loop(flags, monkeypatch, tmp_path):
    """Two steps of `train` against a loop on the sampled ids that calls nothing of lopti.py.

    The weights, and every number of metrics.jsonl. Nowhere is there dropout.
    """
    rollouts = []
    sample = lopti.sample
    entropy = lopti.entropy

    def sample_without_min_p(*inputs):
        """So that some tokens are not in V_safe."""
        *others, settings = inputs
        rollouts.append(sample(*others, replace(settings, min_p=0.0)))
        return rollouts[-1]

    def rounded_entropy(logits):
        """Rounding of entropies after the same prefix must not decide which are kept."""
        return entropy(logits).round(decimals=9)

    monkeypatch.setattr(lopti, "sample", sample_without_min_p)
    monkeypatch.setattr(lopti, "entropy", rounded_entropy)
    monkeypatch.setattr(lopti, "stapo_mask", functools.partial(lopti.stapo_mask, **STAPO))
    policy = random_model(
        hidden_size=16, head_dim=8, eos_token_id=ENDS, attention_dropout=0.5
    ).double()
    policy.lm_head.weight.data.mul_(4)  # π from .004 to .4
    start = weights(policy)
    plain = copy.deepcopy(policy)
    settings, lines = trained(policy, flags, tmp_path, monkeypatch)
    passes = TRAINING[flags].split()
    expected, samples = plain_training(plain, rollouts, passes, settings)
    assert lines == [pytest.approx(line, rel=1e-3, abs=1e-4) for line in expected]
    assert read_jsonl(tmp_path / "run" / "samples.jsonl") == samples
    moved = (weights(plain) - start).norm()
    assert moved > 1
    assert (weights(policy) - weights(plain)).norm() < 1e-3 * moved
    # What could go wrong has happened: every clip, responses of several lengths, a long gradient.
    happens = {name for line in lines for name, value in line.items() if value}
    assert {f"clip_ratio/{name}_mean" for name in CLIPS} <= happens
    assert ("masked_tokens" in happens) == ("stapo" in flags or "entropy" in flags)
    assert 0 < lines[0]["completions/clipped_ratio"] < 1
    norms = [line[f"grad_norm/{name}"] for line in lines for name in passes]
    assert max(norms) > settings.max_grad_norm


def test_rewards_are_counted_in_float64(tmp_path, monkeypatch):
    """1e8 + 0 to 3: float32 has steps of 8 there. And .7 + .2 + .1 solves at 1."""
    large = [1e8 + number % 4 for number in range(12)]
    parts = [0.7 + 0.2 + 0.1, 0.9] * 6
    rewards = iter([large, parts])
    monkeypatch.setattr(lopti, "compute_rewards", lambda *inputs: next(rewards))
    start = random_model()
    model = random_model()
    _, (first, second) = trained(model, "--kl-coef 0", tmp_path, monkeypatch)
    assert first["frac_reward_zero_std"] == 0
    assert first["reward_std"] == pytest.approx(statistics.stdev(range(4)))
    assert first["reward"] == 1e8 + 1.5
    assert not torch.equal(weights(model), weights(start))
    assert second["accuracy"] == 0.5


def test_while_it_samples_there_are_no_gradients(tmp_path, monkeypatch):
    """They would take as much memory as the weights: kk.flags fits without them only."""
    policy = random_model()
    kept = []

    def look(*call):
        kept.append(any(parameter.grad is not None for parameter in policy.parameters()))

    spy(monkeypatch, lopti, "sample", look)
    trained(policy, "", tmp_path, monkeypatch)
    assert kept == [False, False]


@pytest.mark.parametrize("tied", [False, True])
def test_training_in_bfloat16(tied, tmp_path, monkeypatch):
    """All forward passes are in it, weights and gradients are not; the KL begins at exactly 0."""
    policy = random_model("Qwen2", tie_word_embeddings=tied)
    before = weights(policy)
    computed = set()  # dtypes of the layers' outputs
    kept = set()  # dtypes of gradients, weights and log-probabilities

    def look_at_layer(layer, inputs, output):
        computed.add(output.dtype)

    def look_at_gradients(*call):
        kept.update((gradient(policy).dtype, weights(policy).dtype))

    for module in policy.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(look_at_layer)
    spy(monkeypatch, torch.nn.utils, "clip_grad_norm_", look_at_gradients)
    spy(monkeypatch, lopti, "token_logprobs", lambda logprobs, *_: kept.add(logprobs.dtype))
    flags = "--dtype bfloat16 --kl-coef 0.1 --steps 1 --mini-batch-size 0 --stapo "
    flags += "--tokens-per-microbatch 9999"
    _, (line,) = trained(policy, flags, tmp_path, monkeypatch)
    assert line["kl"] == 0
    assert line["grad_norm/all"] > 0
    assert computed == {torch.bfloat16}
    assert kept == {torch.float32}
    assert not torch.equal(weights(policy), before)


def test_the_temperature_divides_float32_logits():
    """In bfloat16 the quotients would be rounded: another π than that of sampling."""
    model = random_model()
    rollout = random_rollout(model)
    with torch.autocast("cpu", torch.bfloat16):
        plain = lopti.token_logits(model, rollout.ids, rollout.mask, 1.0)
        divided = lopti.token_logits(model, rollout.ids, rollout.mask, 0.7)
    assert torch.equal(divided, plain / 0.7)


def test_without_kl_there_is_no_reference_model():
    """It would take as much memory as the weights."""
    model = random_model()
    assert lopti.make_reference(model, lopti.Settings(kl_coef=0.0)) is None
    reference = lopti.make_reference(model, lopti.Settings())
    assert not any(parameter.requires_grad for parameter in reference.parameters())


# --------------------------------------------------------------------------------------- evaluation


def test_evaluation_counts(monkeypatch):
    """'7' when greedy, and in every second sample of the first prompts; of the last, never."""
    rows = []
    for solution, level in zip("77877", ["10", "10", "10", "2", "2"]):
        rows.append({**data_row("?", solution), "difficulty": level})
    sampled = []

    def fake_sample(model, tokenizer, prompts, group_size, temperature, settings):
        sampled.append((torch.initial_seed(), group_size, temperature))
        texts = []
        for i in range(len(prompts) * group_size):
            is_wrong = temperature and (i % 2 or i > 15)
            texts.append("no" if is_wrong else r"\boxed{7}")
        return SimpleNamespace(texts=texts)

    monkeypatch.setattr(lopti, "sample", fake_sample)
    policy = SimpleNamespace(device=torch.device("cpu"))
    of_training = torch.get_rng_state()
    settings = settings_of("--task math --seed 7 --temperature 0.7")
    table, answers = lopti.evaluate(policy, TOKENIZER, rows, settings)
    assert sampled == [(8, 1, 0), (8, 4, 1)]
    assert torch.equal(torch.get_rng_state(), of_training)
    assert answers[0][1:3] == [(r"\boxed{7}", 1.0), ("no", 0.0)]
    lines = lopti.table_text({"before": table, "after": table}, "level").splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "level prompts before after",
        "greedy 10 3 0.67 [0.21, 0.94] 0.67 [0.21, 0.94]",
        "greedy 2 2 1.00 [0.34, 1.00] 1.00 [0.34, 1.00]",
        "greedy mean 0.83 0.83",
        "avg@4 10 3 0.33 [0.06, 0.79] 0.33 [0.06, 0.79]",
        "avg@4 2 2 0.25 [0.03, 0.80] 0.25 [0.03, 0.80]",
        "avg@4 mean 0.29 0.29",
        "pass@4 10 3 0.67 [0.21, 0.94] 0.67 [0.21, 0.94]",
        "pass@4 2 2 0.50 [0.09, 0.91] 0.50 [0.09, 0.91]",
        "pass@4 mean 0.58 0.58",
        "reward mean 0.29 0.29",
    ]


def one_line_table(accuracy):
    """A table of `tally`, of one difficulty."""
    return {"2": {"prompts": 4, "greedy": (accuracy, 0, 1), "reward": accuracy}}


def greedy_answers(*rewards):
    return [("<think></think> b", reward) for reward in rewards]


def test_what_a_run_tells_at_its_end(capsys):
    """Before and after, the shortest puzzle that became right, first and last numbers."""
    rows = [{"asked": text} for text in ("long, became right", "became right", "was right", "")]
    before = {"step": 0, "table": one_line_table(0.25), "greedy": greedy_answers(-3, 0, 3, 0)}
    after = {"step": 9, "table": one_line_table(0.75), "greedy": greedy_answers(3, 3, 3, 0)}
    steps = []
    for accuracy in (0.25, 0.5, 1.0):
        line = {"accuracy": accuracy, "low_probability_share": accuracy / 2}
        steps.append({**line, "grad_norm/low": 2 * accuracy, "frac_reward_zero_std": 0.5})
    lopti.report({"evaluations": [before, after], "metrics": steps}, rows, settings_of())
    text = capsys.readouterr().out
    assert "after 9 steps" in text
    assert re.search(r"people +prompts +before +after\n", text)
    assert re.search(r"greedy +mean +0.25 +0.75\n", text)
    assert "\nbecame right\nbefore: b\nafter:  b\n" in text
    assert "nothing was" not in text
    found = re.findall(r"^(\S+) +(\S+) → (\S+)$", text, re.MULTILINE)
    assert found == [
        ("accuracy", "0.25", "1.00"),
        ("low_probability_share", "0.12", "0.50"),
        ("grad_norm/low", "0.50", "2.00"),
    ]
    lopti.report({"evaluations": [before], "metrics": []}, rows, settings_of())
    assert "learned" not in capsys.readouterr().out


def test_eval_only_shows_three_answers_and_leaves_no_run(tmp_path, capsys):
    """Tags as the model wrote them, without its end-of-sequence token."""
    few = tmp_path / "few.jsonl"
    write_jsonl(few, read_jsonl(ROOT / "data" / "kk_test.jsonl")[197:203])
    flags = f"--eval-only --eval-data {few} --output {tmp_path} --eval-samples 1 "
    assert main(flags + "--max-new-tokens 100") == 0
    output = capsys.readouterr().out
    shown = re.findall(r"--- .*?meet (\d)", output, re.DOTALL)
    assert shown == ["2", "2", "3"]  # of three puzzles each
    assert output.count("[greedy, reward ") == 3
    assert output.count("[sample 1, reward ") == 3
    assert output.count("solution: (1)") == 3
    assert "<answer>" in output
    assert TOKENIZER.eos_token not in output
    assert re.search(r"greedy +mean", output)
    assert list(tmp_path.iterdir()) == [few]


def test_eval_size_and_samples_of_zero(tmp_path, capsys, monkeypatch):
    """All prompts are evaluated, all at a time, and none is sampled."""
    few = read_jsonl(ROOT / "data" / "kk_test.jsonl")[195:205]
    path = write_jsonl(tmp_path / "few.jsonl", few)
    calls = []
    spy(monkeypatch, lopti, "generate_in_stretches", lambda _, model, ids, *more: calls.append(ids))
    flags = f"--eval-only --eval-data {path} --max-new-tokens 2 "
    assert main(flags + "--eval-size 0 --sample-batch-size 0 --eval-samples 0") == 0
    assert len(calls[-1]) == 10
    assert "avg@" not in capsys.readouterr().out


# ------------------------------------------------------------------------------- settings and pages


OURS = {
    "alpha": 0,
    "eta": 0,
    "clip_low": 0.2,
    "clip_high": 0.24,
    "clip_dual": 10.0,
    "kl_coef": 0.001,
    "advantage": "grpo",
    "passes": 1,
    "prompts_per_step": 16,
    "group_size": 8,
    "temperature": 1.0,
    "max_new_tokens": 256,
    "mini_batch_size": 64,
    "learning_rate": 1e-4,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "steps": 24,
    "save_every": 10,
    "eval_samples": 4,
    "dtype": "float32",
}


@pytest.mark.parametrize("task, solved_reward", [("kk", 3), ("math", 1)])
def test_settings_without_flags(task, solved_reward):
    """Another value is another method, or a run without checkpoints. The paper's settings, which
    are in the two files of flags, are tested in data/ports."""
    settings = vars(settings_of(f"--task {task}"))
    expected = {**OURS, "solved_reward": solved_reward}
    assert {name: settings[name] for name in expected} == expected


def test_a_flag_is_a_setting_and_its_limits_hold_for_both():
    """lopti.Settings(alpha=2) is refused as --alpha 2 is; both ends of the limits are allowed."""
    flags = "--alpha 1 --eta 1 --order high --top-entropy 1 --passes 2 --people 2 5 --stapo"
    changes = {"alpha": 1.0, "eta": 1.0, "order": "high", "top_entropy": 1.0, "passes": 2}
    changes |= {"people": (2, 5), "stapo": True}
    assert settings_of(flags) == lopti.Settings(**changes)
    assert lopti.Settings(people=[2, 5]) == lopti.Settings(people=(2, 5))
    assert lopti.Settings(alpha=0, eta=0, kl_coef=0, steps=0, seed=2**32 - 1).steps == 0
    wrong = [{"alpha": 1.01}, {"alpha": -0.1}, {"alpha": math.nan}, {"eta": 1.5}, {"passes": 0}]
    wrong += [{"group_size": 1}, {"order": "low"}, {"advantage": "ppo"}, {"task": "chess"}]
    wrong += [{"learning_rate": math.inf}, {"mini_batch_size": 10**20}, {"seed": 2**32}]
    wrong += [{"solved_reward": math.nan}, {"reward": "mine:f"}]
    for change in wrong:
        (name,) = change
        with pytest.raises(lopti.UserError, match="--" + name.replace("_", "-")):
            lopti.Settings(**change)


@pytest.mark.parametrize("given", ["0", "0.0", "-1"])
def test_a_solved_reward_of_zero_counts(given):
    assert settings_of(f"--solved-reward {given}").solved_reward == float(given)
    settings = settings_of(f"--reward {__name__}:exits --solved-reward {given}")
    assert settings.solved_reward == float(given)


def test_help_names_every_flag_and_the_pages_no_other():
    """A flag or function that a page names and that does not exist stops a reader."""
    text = lopti.build_parser().format_help()
    flags = {lopti.flag(each.name) for each in fields(lopti.Settings)} | {"--help"}
    assert flags == set(re.findall(r"^ +(?:-h, )?(--[a-z-]+)", text, re.MULTILINE))
    for command in re.findall(r"python lopti\.py[^\n`]*", README + GUIDE):
        assert set(re.findall(r"--[a-z][a-z-]*", command)) <= flags, command
    (box,) = [block for block in README.split("```") if "training_step()" in block]
    for name in re.findall(r"\b([a-z_]+)\(\)", box):
        assert hasattr(lopti, name), name


def test_the_guide_s_loop_runs_and_its_table_has_every_metric(tmp_path, monkeypatch):
    """A loop of one's own, as it stands there, for one step."""
    blocks = re.findall("```python\n(.*?)```", GUIDE, re.DOTALL)
    (loop,) = [block for block in blocks if "step_metrics" in block]
    for long, short in (("steps=3", "steps=1"), ("step=8", "step=2"), ("rows[:20]", "rows[:1]")):
        assert long in loop
        loop = loop.replace(long, short)
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    made = {}
    exec(loop, made)  # noqa: S102, it is our own page
    assert (tmp_path / "trained" / "model.safetensors").exists()
    part = GUIDE.split("### What the metrics mean")[1].split("**Why")[0]
    first_column = [row.split("|")[1] for row in part.splitlines() if row.startswith("|")]
    in_the_table = set(re.findall("`([a-z_/]+)`", " ".join(first_column)))
    assert in_the_table == {"seconds", "grad_norm/all", *made["metrics"]}


@pytest.mark.parametrize("module", ["lopti", "rewards"])
def test_examples_in_docstrings(module):
    result = doctest.testmod(sys.modules[module])
    assert result.attempted
    assert not result.failed


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('--data "my data/x.jsonl"  # mine', ["--data", "my data/x.jsonl"]),
        ("--data 'my #1.jsonl'", ["--data", "my #1.jsonl"]),
        (r"--data C:\data\x.jsonl", ["--data", r"C:\data\x.jsonl"]),
        ("# the paper's", []),
    ],
)
def test_a_line_of_a_file_of_flags(line, words):
    assert lopti.words_of_line(line) == words


def test_a_quote_that_does_not_end_is_told(tmp_path, capsys):
    (tmp_path / "my.flags").write_text('--data "my data')
    assert lopti.main([f"@{tmp_path}/my.flags"]) == 2
    assert '--data "my data of a file of flags' in capsys.readouterr().err


# ---------------------------------------------------------------------------------- runs and resume


TEMPORARY = tempfile.TemporaryDirectory()
SMALL = Path(TEMPORARY.name)  # a small model and few rows, so that a run takes a second
SURE = random_model()
SURE.lm_head.weight.data.mul_(8)  # some tokens on each side of η
save_both(SURE, TOKENIZER, SMALL)
for use in ("train", "test"):
    write_jsonl(SMALL / f"{use}.jsonl", read_jsonl(ROOT / "data" / f"kk_{use}.jsonl")[:20])
ROWS = f"--data {SMALL}/train.jsonl --eval-data {SMALL}/test.jsonl --people 2 "
FLAGS = (
    f"--model {SMALL} {ROWS}"
    "--steps 4 --save-every 2 --alpha 0.3 --eta 0.5 --prompts-per-step 2 --group-size 4 "
    "--max-new-tokens 12 --mini-batch-size 4 --eval-size 1 --eval-samples 1 --eval-every 2 "
    f"--reward {__name__}:vowels_modulo_3 --solved-reward 1 "
)


def main(flags):
    return lopti.main(flags.split())


def assert_same_run(folder, other):
    """The same metrics, samples and evaluations, and the same files in final/, to the last bit."""
    for mine, its in zip(
        read_jsonl(folder / "metrics.jsonl"), read_jsonl(other / "metrics.jsonl"), strict=True
    ):
        assert {**mine, "seconds": 0} == {**its, "seconds": 0}
    names = ["samples.jsonl", "evaluations.jsonl"]
    names += [f"final/{path.name}" for path in (other / "final").iterdir()]
    for name in names:
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """Four steps of AR + Lopti without an interruption."""
    folder = tmp_path_factory.mktemp("runs")
    with redirect_stdout(io.StringIO()):
        assert main(FLAGS + f"--name finished --output {folder}") == 0
    return folder / "finished"


@pytest.fixture
def run_copy(finished_run, tmp_path):
    return Path(shutil.copytree(finished_run, tmp_path / "copy"))


def test_what_a_run_leaves_behind(finished_run):
    steps = read_jsonl(finished_run / "metrics.jsonl")
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    config = json.loads((finished_run / "config.json").read_text())
    assert config["alpha"] == 0.3
    assert config["torch"] == torch.__version__
    evaluations = read_jsonl(finished_run / "evaluations.jsonl")
    assert [row["step"] for row in evaluations] == [0, 2, 4]
    for line in steps:
        assert 0 < line["low_probability_share"] < 1
        assert min(line["grad_norm/low"], line["grad_norm/high"]) > 0
    samples = read_jsonl(finished_run / "samples.jsonl")
    assert [row["step"] for row in samples] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert samples[0]["prompt"] != samples[1]["prompt"]  # of two groups
    before, _ = lopti.load_model(SMALL, "cpu")
    after, _ = lopti.load_model(finished_run / "final", "cpu")
    assert not torch.equal(weights(before), weights(after))
    names = {path.name for path in finished_run.iterdir()}
    lines = {"metrics.jsonl", "samples.jsonl", "evaluations.jsonl"}
    assert names == {"config.json", "checkpoint.pt", "final", *lines}


def test_a_library_call_is_the_same_run(finished_run, tmp_path, capsys):
    """lopti.train(lopti.Settings(...)) trains, and returns the folder."""
    folder = lopti.train(settings_of(FLAGS, name="called", output=str(tmp_path)))
    assert folder == tmp_path / "called"
    assert_same_run(folder, finished_run)


def test_a_library_call_does_not_train_with_eval_only():
    """There are no rows to train on, and it would wait for them forever."""
    with pytest.raises(lopti.UserError, match="show_accuracy"):
        lopti.train(settings_of(FLAGS + "--eval-only"))


@pytest.fixture
def handlers():
    """Ctrl-C as in a terminal, and a kill that only lopti.py heeds; afterwards as before."""
    of_int = signal.signal(signal.SIGINT, signal.default_int_handler)
    of_term = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, of_int)
    signal.signal(signal.SIGTERM, of_term)


def stop_at(monkeypatch, name, call, number):
    """A signal after the nth call of a function of lopti.py: 1 is the first."""
    calls = itertools.count(1)

    def stop(*inputs):
        if next(calls) == call:
            signal.raise_signal(number)

    spy(monkeypatch, lopti, name, stop)


@pytest.mark.parametrize(
    "name, call, number, saved",
    [
        ("evaluate", 1, signal.SIGINT, None),  # nothing has come of the run
        ("training_step", 1, signal.SIGTERM, 0),
        ("evaluate", 2, signal.SIGINT, 0),  # after step 2, before its checkpoint
        ("training_step", 3, signal.SIGTERM, 2),
        ("evaluate", 3, signal.SIGINT, 2),
    ],
)
def test_stopped_and_resumed_to_the_last_bit(
    name, call, number, saved, finished_run, tmp_path, monkeypatch, capsys, handlers
):
    """Ctrl-C or a kill: one line says what to do, and then come the same batches and lines."""
    stop_at(monkeypatch, name, call, number)
    assert main(FLAGS + f"--name stopped --output {tmp_path}") == 130
    monkeypatch.undo()
    (told,) = capsys.readouterr().err.splitlines()
    folder = tmp_path / "stopped"
    if saved is None:
        assert f"{folder} has no checkpoint yet" in told
        assert not folder.exists()
        return
    if saved == 0:
        assert f"{folder} has no checkpoint yet" in told
        advice = f"--resume {folder}"
    else:
        advice = re.search(r"(--resume \S+) goes on after step (\d)", told)
        assert advice[2] == str(saved)
        advice = advice[1]
    with open(folder / "metrics.jsonl", "a") as stream:
        stream.write('{"step": 3')  # torn by a crash
    assert main(advice) == 0
    assert_same_run(folder, finished_run)


PROCESSES = multiprocessing.get_context("forkserver")  # which imports torch once for all of them
PROCESSES.set_forkserver_preload(["torch", "transformers", "datasets", "lopti"])


@slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("LOPTI_KILLS", "3"))))
def test_killed_and_resumed_to_the_last_bit(finished_run, tmp_path, seed):
    """SIGKILL at two random moments; the same bits. LOPTI_KILLS=20 for more."""
    folder = tmp_path / "killed"
    rng = random.Random(seed)
    flags = FLAGS + f"--name killed --output {tmp_path}"
    for _ in range(2):
        process = PROCESSES.Process(target=main, args=(flags,))
        process.start()
        while not (folder / "config.json").exists():
            assert process.is_alive()
            time.sleep(0.01)
        process.join(rng.uniform(0, 1))
        process.kill()
        process.join()
        flags = f"--resume {folder}"
    assert main(flags) == 0
    assert_same_run(folder, finished_run)


def test_more_steps_later_are_the_same_run(finished_run, tmp_path, capsys):
    """The evaluation after step 2 is in the checkpoint of step 2, and is not made again."""
    assert main(FLAGS + f"--name longer --output {tmp_path} --steps 2") == 0
    folder = tmp_path / "longer"
    assert main(f"--resume {folder} --steps 4") == 0
    assert_same_run(folder, finished_run)


def test_what_the_seed_seeds(tmp_path, monkeypatch, capsys):
    """Training has the seed, every evaluation the next; zeros: two evaluations, no checkpoint."""
    seeds = []
    spy(monkeypatch, lopti, "sample", lambda *_: seeds.append(torch.initial_seed()))
    flags = FLAGS + f"--task math --steps 2 --seed 5 --output {tmp_path} --save-every 0 "
    assert main(flags + "--eval-every 0") == 0
    assert seeds[-6:] == [6, 6, 5, 5, 6, 6]  # greedy and sampled, around two steps
    assert not list(tmp_path.glob("*/checkpoint.pt"))


def test_resume_changes_only_what_does_not_change_the_run(run_copy, capsys):
    """A flag with the run's own value is no change."""
    free = "--steps 9 --sample-batch-size 1 --tokens-per-microbatch 9 --gradient-checkpointing "
    free += "--save-every 1 --eval-every 1 --device cpu "
    own = "--alpha 0.3 --people 2 --seed 0 --mini-batch-size 4 "
    settings = vars(settings_of(f"--resume {run_copy} {free} {own}"))
    config = json.loads((run_copy / "config.json").read_text())
    settings["people"] = list(settings["people"])  # as in the file
    changed = {name for name, value in settings.items() if value != config[name]}
    names = [flag.replace("-", "_") for flag in re.findall(r"--([a-z-]+)", free)]
    assert changed == {"resume", *names}
    assert settings["alpha"] == 0.3
    with pytest.raises(lopti.UserError, match="--resume cannot change"):
        lopti.train(lopti.Settings(model=str(SMALL), resume=str(run_copy), task="math"))
    for flag in ("--alpha 0.4", "--stapo", "--people 2 3", "--seed 1", "--name n"):
        told = refused(capsys, f"--resume {run_copy} {flag}")
        assert f"cannot change {flag.split()[0]}:" in told


def test_a_run_of_another_version_is_told(run_copy, capsys):
    """Not *name the folder*, which was right."""
    config = json.loads((run_copy / "config.json").read_text())
    del config["alpha"]
    (run_copy / "config.json").write_text(json.dumps(config))
    told = refused(capsys, f"--resume {run_copy}")
    assert "config.json lacks alpha" in told
    assert "start a new run" in told


def test_a_damaged_checkpoint_is_named(run_copy, capsys):
    path = run_copy / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    del state["policy"]["model.norm.weight"]
    torch.save(state, path)
    assert "checkpoint.pt is damaged" in refused(capsys, f"--resume {run_copy}")


def full_disk(self, path, *inputs, **options):
    Path(path).mkdir(exist_ok=True)
    (Path(path) / "half a file").write_bytes(b"half")
    raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_the_old_checkpoint_and_final(run_copy, capsys, monkeypatch):
    """Else a crash leaves neither model. It is told, and what to do."""
    checkpoint = (run_copy / "checkpoint.pt").read_bytes()
    final = (run_copy / "final" / "model.safetensors").read_bytes()

    def half_a_checkpoint(state, path):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", half_a_checkpoint)
        assert "--resume goes on" in refused(capsys, f"--resume {run_copy} --steps 5")
    assert (run_copy / "checkpoint.pt").read_bytes() == checkpoint
    with monkeypatch.context() as patch:
        patch.setattr(transformers.PreTrainedModel, "save_pretrained", full_disk)
        assert "--resume goes on" in refused(capsys, f"--resume {run_copy} --steps 5")
    assert (run_copy / "final" / "model.safetensors").read_bytes() == final
    assert main(f"--resume {run_copy} --steps 5") == 0
    assert torch.load(run_copy / "checkpoint.pt", weights_only=True)["step"] == 5
    assert (run_copy / "final" / "model.safetensors").read_bytes() != final


def test_a_linked_final_is_replaced_and_its_target_kept(run_copy, tmp_path, capsys):
    """Somebody moved final/ to another disk: that model stays."""
    moved = shutil.move(run_copy / "final", tmp_path / "elsewhere")
    (run_copy / "final").symlink_to(moved)
    before = (moved / "model.safetensors").read_bytes()
    assert main(f"--resume {run_copy} --steps 5") == 0
    assert not (run_copy / "final").is_symlink()
    assert (moved / "model.safetensors").read_bytes() == before
    assert (run_copy / "final" / "model.safetensors").read_bytes() != before


def test_a_checkpoint_goes_from_one_kind_of_device_to_another(tmp_path, monkeypatch):
    """The random state of a pretended xpu is restored on an xpu only."""
    model = random_model()
    optimizer = lopti.make_optimizer(model, settings_of())
    restored = []
    module = SimpleNamespace(
        get_rng_state=lambda device: torch.ones(3),
        set_rng_state=lambda state, device: restored.append(device.type),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    policy = SimpleNamespace(
        device=torch.device("xpu"),
        state_dict=model.state_dict,
        load_state_dict=model.load_state_dict,
    )
    lopti.save_checkpoint(tmp_path, 4, {"metrics": []}, policy, optimizer)
    for kind in ("cpu", "xpu"):
        policy.device = torch.device(kind)
        lopti.load_checkpoint(tmp_path, policy, optimizer)
    assert restored == ["xpu"]


def test_a_full_disk_without_a_checkpoint_is_no_advice_to_resume(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", full_disk)
    told = refused(capsys, FLAGS + f"--steps 1 --save-every 0 --output {tmp_path}")
    assert "there is no checkpoint: start again" in told
    assert "--resume" not in told


def test_a_place_that_has_moved_goes_into_the_config(tmp_path):
    settings = lopti.Settings(model="old/model", resume=str(tmp_path))
    saved = {**asdict(settings), "resume": "", "people": [2, 3]}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    lopti.refuse_changes(settings)
    for changed, is_place in (
        (replace(settings, model="new"), True),
        (replace(settings, alpha=0.5), False),
    ):
        with pytest.raises(lopti.UserError, match="cannot change") as error:
            lopti.refuse_changes(changed)
        assert ("has moved into" in str(error.value)) == is_place


# --------------------------------------------------------------------------------- what a run tells


def always_zero(completions, **columns):
    return [0.0] * len(completions)


def test_a_training_that_learns_nothing_says_so(tmp_path, capsys):
    """After the first such step, once, and at the end: else only metrics.jsonl knows."""
    flags = f"--reward {__name__}:always_zero --kl-coef 0 --output {tmp_path} "
    assert main(FLAGS + flags) == 0
    output = capsys.readouterr().out
    assert output.count("no group has unequal rewards") == 1
    assert "step 1: no group has unequal rewards" in output
    told = " ".join(output.split())
    assert "In 4 of 4 steps no group had unequal rewards: nothing was learned there" in told


def test_an_update_that_is_not_finite_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lopti, "kl_estimate", lambda logprobs, ref: logprobs * math.nan)
    assert main(FLAGS + f"--output {tmp_path} --steps 1") == 0
    assert "step 1: left out an update whose gradient was not finite" in capsys.readouterr().out


def test_a_remainder_mini_batch_is_told_at_the_start(tmp_path, capsys):
    """Its few responses get a whole optimizer step."""
    for size, is_told in ((3, True), (4, False), (9, False), (0, False)):
        settings = lopti.Settings(prompts_per_step=2, group_size=4, mini_batch_size=size)
        lopti.tell_plan(settings, "cpu", tmp_path, 0, 1)
        text = capsys.readouterr().out
        assert ("8 responses: the last mini-batch, a step too, has 2 of them" in text) == is_told
        assert ("mini-batch" in text) == is_told


def test_without_a_terminal_progress_is_told_each_tenth(capsys):
    progress = SimpleNamespace(disable=True, set_postfix=lambda **numbers: None)
    lines = []
    for step in range(1, 41):
        numbers = {"reward": step / 40, "accuracy": 0.5, "nonfinite_steps": 0}
        lines.append({"step": step, **numbers, "frac_reward_zero_std": 0})
        lopti.tell_step(lines, 40, progress, lopti.Settings())
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 10
    assert told[0] == "step 4 of 40: reward 0.10, accuracy 0.50"


@pytest.mark.parametrize("is_closed", [True, False])
def test_output_may_be_closed_or_a_file(is_closed, tmp_path, monkeypatch):
    """`python lopti.py >&-`, and >log: there lines appear as they come, with any sign."""
    monkeypatch.setattr(sys, "argv", ["lopti.py", "--help"])
    log = tmp_path / "log"
    with open(log, "w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", None if is_closed else stream)
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(ROOT / "lopti.py"), run_name="__main__")
        assert stop.value.code == 0
        print("one more line")
        has_come = log.read_text().splitlines()
        monkeypatch.undo()
    assert is_closed or (has_come[-1] == "one more line" and "\\u03b1" in "".join(has_come))


def test_a_home_folder_and_a_working_folder(tmp_path, monkeypatch, capsys):
    """~ in --output and --resume; a reward that changes the working folder, as running code may."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(FLAGS + "--name mine --output=~/x --steps 1") == 0
    assert main("--resume ~/x/mine --steps 2") == 0
    assert len(read_jsonl(tmp_path / "x" / "mine" / "metrics.jsonl")) == 2
    (tmp_path / "other").mkdir()
    spy(monkeypatch, lopti, "compute_rewards", lambda *_: os.chdir(tmp_path / "other"))
    assert main(FLAGS + "--name here --output runs --steps 1") == 0
    assert len(read_jsonl(tmp_path / "runs" / "here" / "metrics.jsonl")) == 1
    assert (tmp_path / "runs" / "here" / "final").exists()
    assert not list((tmp_path / "other").iterdir())


# ------------------------------------------------------------------ models: refused before training


TUNED = {"attn_temperature_tuning": True, "floor_scale": 100, "no_rope_layers": [0, 0]}
TUNED |= {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 64}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8}
LONG_ROPE |= {"long_factor": [4.0] * 8, "factor": 4.0, "original_max_position_embeddings": 100}
DECODER = {"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 64}


WRONG = {  # what is drawn is not what is scored
    "temperature by position": {"family": "Llama4Text", **TUNED},
    "tokens kept in a window": {"family": "Doge", "keep_window_size": 100},
    "rope by the longest row": {"family": "Llama", "rope_parameters": LONG_ROPE},
    "positions counted in the cache": {"family": "Bart", **DECODER, "is_decoder": True},
    "positions counted in the padded row": {"family": "Roberta", "is_decoder": True},
    "an encoder": {"family": "Bert"},
    "a state": {"family": "Rwkv", "attention_hidden_size": 32},
}

REFUSED = r"it cannot be trained .*π is not what was sampled: .* differ by [\dn]"


@pytest.mark.parametrize("name", WRONG)
def test_a_model_that_is_not_scored_as_sampled_is_refused(name):
    with pytest.raises(lopti.UserError, match=REFUSED):
        check(random_model(**WRONG[name]))


def test_a_mixture_of_experts_is_accepted_in_bfloat16():
    """Rounding sends some tokens to other experts, and their logits differ by .2."""
    sizes = {"num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 4}
    check(random_model("FlexOlmo", **sizes), "--dtype bfloat16")


def test_positions_end_before_the_longest_row():
    """With one sentence where the config says so, and with another where only trying shows it."""
    with pytest.raises(lopti.UserError, match=r"may pass 100 positions: lower --max-new-tokens"):
        check(random_model("Llama", max_position_embeddings=100))
    with pytest.raises(lopti.UserError, match="it cannot be trained"):
        check(random_model("Mpt", max_seq_len=100))
    with pytest.raises(lopti.UserError, match="the model has 20 embeddings, none for token"):
        check(random_model("Llama", vocab_size=20))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_that_share_an_offset_hide_nothing(dtype):
    """Log-probabilities are compared: next to −100 a difference of 3 looks like rounding."""
    model = random_model("Roberta", is_decoder=True)
    model.lm_head.bias.data.fill_(-100)
    with pytest.raises(lopti.UserError, match=REFUSED):
        check(model, f"--dtype {dtype}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_pi_has_to_be_a_number(dtype):
    """In float32, and in --dtype too."""
    model = random_model("Llama")

    def spoil(module, inputs, output):
        return output * math.nan if output.dtype == getattr(torch, dtype) else output

    model.lm_head.register_forward_hook(spoil)
    if dtype == "bfloat16":
        check(model)
    with pytest.raises(lopti.UserError, match="differ by nan|is not a number in bfloat16"):
        check(model, f"--dtype {dtype}")


def test_the_probe_cuts_the_cache(monkeypatch):
    """A cache that keeps other rows than those that go on is seen."""
    original = DynamicCache.reorder_cache

    def keep_the_first(cache, rows):
        original(cache, torch.arange(len(rows)))

    monkeypatch.setattr(DynamicCache, "reorder_cache", keep_the_first)
    with pytest.raises(lopti.UserError, match=REFUSED):
        check(random_model("Llama"))
    check(random_model("Llama"), "--max-new-tokens 32")  # where no second stretch is needed


# ------------------------------------------------------------------------------------ models: files


def test_a_bfloat16_checkpoint_without_a_padding_token_or_an_end_of_its_own(tmp_path):
    """Weights become float32. The tokenizer's end is both: prompts with it inside, and padded
    right by other programs, are answered as with the bundled tokenizer."""
    model = random_model(eos_token_id=None).bfloat16()
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.pad_token = None
    tokenizer.padding_side = "right"
    save_both(model, tokenizer, tmp_path)
    model, tokenizer = lopti.load_model(tmp_path, "cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training
    assert tokenizer.pad_token == tokenizer.eos_token
    prompts = [f"{prompt}{tokenizer.eos_token}So Lily" for prompt in PROMPTS]
    answers = sample(model, prompts, tokenizer).texts
    assert answers == sample(model, prompts, TOKENIZER).texts


def test_a_padding_token_without_an_embedding(tmp_path):
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    save_both(random_model(), tokenizer, tmp_path)
    assert lopti.load_model(tmp_path, "cpu")[1].pad_token == TOKENIZER.eos_token


def test_a_model_that_could_not_be_saved_is_told_before_training(tmp_path, capsys, monkeypatch):
    """Hours later nobody wants to hear it. No folder is left."""
    monkeypatch.setattr(transformers.LlamaConfig, "save_pretrained", exits)
    told = refused(capsys, FLAGS + f"--output {tmp_path}")
    assert "could not be saved" in told
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------- errors that a user will make


def refused(capsys, flags):
    """The one sentence with which the program refuses: exit code 2, no traceback."""
    try:
        code = main(flags)
    except SystemExit as stop:  # by argparse
        code = stop.code
    lines = capsys.readouterr().err.strip().splitlines()
    assert code == 2
    assert len(lines) == 1, lines
    assert re.match(r"\S+\.py: ", lines[0])
    return lines[0]


def exits(*inputs, **options):
    sys.exit(0)


def raises(error):
    """A function that does nothing else."""

    def function(*inputs, **options):
        raise error

    return function


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"),
    ],
)
def test_out_of_memory_is_one_sentence(error, run_copy, capsys, monkeypatch):
    monkeypatch.setattr(lopti, "score", raises(error))
    told = refused(capsys, f"--resume {run_copy} --steps 5")
    assert "out of memory: lower --tokens-per-microbatch" in told


def test_a_mistake_in_the_program_has_its_traceback(monkeypatch, run_copy):
    """One sentence would hide it."""
    monkeypatch.setattr(lopti, "score", raises(RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ"):
        main(f"--resume {run_copy} --steps 5")


@pytest.fixture(scope="module")
def places(tmp_path_factory, finished_run):
    """Files and folders with something wrong, by name."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "empty.jsonl").touch()
    (folder / "wrong.flags").write_text("--steps 9 # nine\n\n--alpha 2")
    (folder / "torn.flags").write_text("--steps # how many")
    for name in ("mistyped", "own", "weightless", "adapter"):
        shutil.copytree(TINY, folder / name)
    config = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    mistyped = {**config, "model_type": "qwen2"}  # which has biases
    (folder / "mistyped" / "config.json").write_text(json.dumps(mistyped))
    own = {**config, "model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}
    (folder / "own" / "config.json").write_text(json.dumps(own))
    (folder / "own" / "mine.py").write_text("1 / 0  # code of its own, which is not run")
    (folder / "weightless" / "model.safetensors").unlink()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    ended = shutil.copytree(finished_run, folder / "ended")  # as --save-every 0 leaves a run
    (ended / "checkpoint.pt").unlink()
    named = {path.stem: path for path in folder.iterdir()}
    return named | {"run": finished_run, "runs": finished_run.parent}


ERRORS = {  # the flags: what the sentence must name
    "--alpha 1.5": "--alpha",
    "--alpha half": "--alpha",
    "--steps 2.5": "--steps",
    "--beta 1": "--beta",
    "--order sideways --eta 0.5": "--order",
    "--people 9": "--people",
    "--device hpu": "--device",
    "--model no/such-model-anywhere": "no/such-model-anywhere",
    "--model data/no-such-model": "there is no such folder",
    "--model {weightless}": "weightless",
    "--model {mistyped}": "mistyped",
    "--model {adapter}": "adapter",
    "--model {own}": "custom code",
    "--data {empty}": "empty.jsonl",
    "--eval-only --data {empty} --eval-data=": "instead of --data",
    "@{wrong}": "--alpha must lie between 0 and 1, not 2",
    "@{torn}": "argument --steps",
    "@nothing.flags": "nothing.flags",
    "--reward nothing_there:f": "nothing_there",
    "--reward math:pi": "must be callable",
    f"--reward {__name__}:exits": "exits",
    "--output {empty}": "empty.jsonl",
    "--name finished --output {runs}": "--resume",
    "--resume {runs}": "--resume",
    "--resume {ended} --steps 9": "final",  # nothing is deleted
}


@pytest.mark.parametrize("flags", ERRORS)
def test_errors_end_in_one_sentence_that_names_what_to_change(
    flags, places, tmp_path, capsys, monkeypatch
):
    """No traceback, nothing deleted, and no empty run folder left."""
    monkeypatch.chdir(ROOT)
    before = {path: path.read_bytes() for path in places["runs"].parent.rglob("*.json*")}
    all_flags = flags.format(**places)
    if "--resume" not in flags:  # a small run in another place, where it is not refused
        all_flags = FLAGS + f"--steps 1 --name run --output {tmp_path / 'runs'} " + all_flags
    assert ERRORS[flags] in refused(capsys, all_flags)
    assert not list((tmp_path / "runs").glob("*"))
    assert before == {path: path.read_bytes() for path in before}


# --------------------------------------------------------------------------------- rewards: puzzles


TRUTH = "(1) Jack is a knight\n(2) Jackson is a knave"
ANN = "(1) Mary Ann is a knight\n(2) Jo Ann is a knave, and Ann is a knave"


def kk(answer, before="Suppose so. </think>", truth=TRUTH, **columns):
    return kk_reward([f"{before}<answer>{answer}</answer>"], [truth], **columns)[0]


@pytest.mark.parametrize(
    "truth, answer, reward",
    [
        (TRUTH, TRUTH, 3.0),
        (TRUTH, "JACKSON IS A KNAVE.\nJack is\ta  knight", 3.0),
        (TRUTH, "Jack is a knight\nJackson is a knight", -0.5),
        (TRUTH, "Jack is a knight", -1.0),  # a name is missing
        (TRUTH, "Jack is a knight\nJack is a knave", -1.0),
        (TRUTH, "Jackson is a knight\nJackson is a knave", -1.0),  # Jack is not inside Jackson
        (TRUTH, TRUTH + "\nso one knight", -1.0),  # one role word too many
        (TRUTH, "both are knights: " + TRUTH, -1.0),
        (ANN, ANN, 3.0),
        (ANN, ANN.replace("Jo Ann is a knave", "Jo Ann is a knight"), -0.5),
        (ANN, ANN.replace("Ann is a knave, and ", "Ann is a knave, Jo Ann is a knight, "), -1.0),
    ],
)
def test_what_an_answer_to_a_puzzle_earns(truth, answer, reward):
    assert kk(answer, truth=truth) == reward


@pytest.mark.parametrize(
    "solution, names",
    [
        ("(1) Åsa Öl is a knight\n(2) 小明 is a knave", ["åsa öl", "小明"]),
        ("1. Mary Ann is a knight\n2. Ann is a knave", ["mary ann", "ann"]),
        ("Zoë is a knight, and 小明 is a knave.", ["zoë", "小明"]),
        ("Therefore Zoey is a knight, while Oliver is a knave", []),  # no names, but prose
        ("(1) Zoey is a knight\n(2) Oliver is no knight", []),
        ("(1) Ann is a knight\n(2) Ann is a knave", []),
        ("a" * 50 + " is a knight", ["a" * 50]),
        ("a" * 51 + " is a knight", []),  # without a limit time is quadratic
    ],
)
def test_the_names_of_a_solution(solution, names):
    """Without names the row is left out, and on TRL's route it is an error."""
    assert list(read_roles(solution) or ()) == names
    if names:
        assert kk(solution, truth=solution) == 3.0
    else:
        with pytest.raises(ValueError, match="`solution` does not give each name one"):
            kk_reward(["a", "b"], [TRUTH, solution])


ANSWER = f"<answer>{TRUTH}</answer>"


@pytest.mark.parametrize(
    "response",
    [
        ANSWER,  # the thought is not closed
        f"</think>{ANSWER}"[:-2],  # the answer is not
        f"{ANSWER}</think>",  # in wrong order
        f"</think>{ANSWER}{ANSWER}",
        f"<answer> </answer></think>{ANSWER}",  # with copied tags
        None,
        [],
        [{"content": None}],
    ],
)
def test_a_response_without_the_form_of_a_puzzle(response):
    assert kk_reward([response], [TRUTH]) == [-3.0]


@pytest.mark.parametrize(
    "prompt, has_opened",
    [
        ("Who?", False),
        ("Write <think> first. Who?", False),  # names the tag, but does not open it
        ("Who?\nassistant: <think> \n", True),
    ],
)
def test_whether_the_prompt_has_opened_the_thought(prompt, has_opened):
    for form in (prompt, user(prompt)):
        assert kk(TRUTH, prompts=[form]) == (3.0 if has_opened else -3.0)
        assert kk(TRUTH, "<think>So </think>", prompts=[form]) == (-3.0 if has_opened else 3.0)


# ----------------------------------------------------------------------------- rewards: mathematics


def paid(solution, answer):
    return math_reward([f"\\boxed{{{answer}}}"], [solution]) == [1.0]


PAID = {
    "a number is compared by value, not by spelling": r"""
        11 | 11.0 | 011 | +11 | (11) | 11. | $11$ | \text{11} | \{11\} | {11} | 1.1E1
        \frac{3}{4} | 3/4 | .75 | \dfrac 3 4 | \tfrac34 | \left(\frac{3}{4}\right) | \\frac{3}{4}
        -\frac73 | \frac{-7}{3} | -7/3 | -2\frac{1}{3} | -2 1/3 | −2\frac13
        \frac13 | 0.\overline{3} | 0.\overline3  ;;  \frac16 | .1\overline{6}
        1200 | 1,200 | 1{,}200 | 1,\! 200 | 1\,200 | \(1,200\) | \$1,200 | 1.2e3""",
    "one of the two may lack the unit; percent, degree, dollar are units": r"""
        158000 | 158000\% | \$158000 | 158000^\circ | 158000\text{ cm} | 158000cm | €158000
        16\pi\text{ cm}^2 | 16\pi | 16 \pi cm² | 16π \text{ square centimeters}
        28\% | 28 | 28 percent  ;;  90^\circ | 90 | 90^{\circ} | 90° | 90 degrees
        5\text{ m} | 5 | 5 meters  ;;  9\text{ m/s}^2 | 9
        60\text{ miles per hour} | 60 miles/hour | 60
        \frac12\text{ hour} | 0.5 hours  ;;  9\text{ values} | 9  ;;  \$5 | 5 dollars""",
    "one of the two may lack the label": r"""
        x = 5 | 5 | x=5.0  ;;  5 | x = 5 | \theta = 5 | f(x)=5 | a_{n+1} = 5 | x = 5\text{ cm}
        (x, y) = (1, 0.5) | (1, \frac12)  ;;  x \in [0, \infty) | [0, ∞)  ;;  1, 2 | x=2, x=1""",
    "a list or a set has no order; a pair has one, and its elements are compared": r"""
        \{1, 2, 3\} | 3,1,2 | 1, 2, \text{ and } 3 | 1; 2; 3 | 1 or 2 or 3 | \{3.0,2,1\}
        (1, \frac12) | \left( 1,\, 0.5 \right)  ;;  (1,2), (3,4) | (3,4), (1,2)
        x = 1, y = 2 | y = 2, x = 1  ;;  [0, 0.5) | [0, \frac{1}{2})""",
    "one number in two spellings": r"""
        $\frac12$ or $0.5$ | 0.5 | \frac12  ;;  So $\boxed{9}$. | 9 | 9.0""",
    "everything else is the same text; spaces and spellings of signs are none of it": r"""
        \text{two lines} | two lines  ;;  \text{(B)} | B | (B) | \textbf{(B)}  ;;  Yes | \text{Yes}
        2\sqrt{3} | 2\sqrt3 | 2√3 | 2 \sqrt 3  ;;  x^2 + 2x | x^{2}+2 x  ;;  2\alpha | 2α
        x \neq 3 | x ≠ 3 | x\ne3  ;;  x > 3 | x \gt 3  ;;  \emptyset | \varnothing | ∅
        1.83\times10^{14} | 1.83 × 10^14  ;;  \binom52 | \dbinom{5}{2}  ;;  1204_9 | 1204_{9}
        (-\infty,1)\cup(2,+\infty) | (-∞, 1) ∪ (2, ∞)  ;;  x^2 | x\u200b^2""",
}

UNPAID = {
    "what is still to be worked out: the question itself would be an answer": r"""
        11 | 5+6 | 11+0 | 22/2 | \frac{22}{2} | \frac{11}{1} | \sqrt{121} | 11^1 | -(-11) | --11
        11 | x = 5 + 6 = 11 | 5+6=11  ;;  100 | 10^2 | 10^{2}  ;;  \frac34 | 6/8 | \frac{1.5}{2}
        x^2+2x+1 | (x+1)^2+0  ;;  3+4i | (2+i)^2 + 0  ;;  (x-1)(x+1) | \frac{x^2-1}{1} | x^2-1
        \frac73 | 2 2/6 | 1 4/3  ;;  9 | 9^{9^9} | 9^9^9""",
    "near, or another number": r"""
        \frac13 | 0.333 | .33333333333333333333  ;;  5 | -5 | 5 6 | 5{}6 | 5e1  ;;  -5 | 5
        0 | 1e-99 | \frac{1}{10^{99}}  ;;  1 | 1/0 | 0/0 | 1e999999 | 1-e^{-25}  ;;  \pi | 3.14
        1,200 | 1,2 | 1, 200 | (1,200)  ;;  (1,200) | 1200  ;;  12000 | 1,2000
        1234567 | 1234,567  ;;  0.12 | 0.1,200
        \frac73 | -2\frac13 | 2\frac{-1}{3}  ;;  \frac13 | -0.\overline{3}
        540 | 5\$40 | 5€40 | 5$40 | 5{}\$40  ;;  56 | 5\text{}6 | 5\!6 | 5\left.6 | 5 6 | 5+6
        5 | ５ | ٥ | 5\u202e | \u202e5 | 5\0 | \text{five} | 5 hundred | 5 million | 5 dozen""",
    "percent of a share is another share": r"""
        0.5 | 0.5\% | 50\% | 0.5\%\% | \frac12\%  ;;  \frac12 | \frac{1}{2}\%
        1 | 1\% | 100\%""",
    "another unit, or words that are no known unit": r"""
        5\text{ cm} | 5 km | 5 pounds | 5\text{ cm}^2  ;;  \$5 | 5 cents | €5  ;;  25 | 5 cm^2
        5 | 5\text{ is wrong} | 5\text{ or six} | 5 squared | 5 square | 5m | 5 xy | 5:00
        60\text{ miles per hour} | 60 hours per mile  ;;  \sin 30^\circ | \sin 30
        5\text{ cm}, 3\text{ kg} | 5 kg, 3 cm  ;;  3 hours 2 minutes | 2 hours 3 minutes""",
    "another label, or a left side that is none": r"""
        y = 5 | x = 5  ;;  5 | x < 5 | x \ne 5 | 2x = 5 | xy = 5 | -x = 5 | x^2 = 5 | 6 = 5 | x=7=5
        xy = 4 | 4  ;;  n = 3k | 3  ;;  x=1, y=2 | 2, 1 | 1, 2 | x=2, y=1 | (1, 2)""",
    "several answers for one, another order, other brackets": r"""
        5 | 5 or 6 | 5\text{ or }6 | 5, 6 | 5, 5 | \pm 5 | \{5, 6\}  ;;  A | A or B | A, B | (A)(B)
        (1, 2) | \{1, 2\} | 1, 2 | (2, 1) | [1, 2] | (1, 2] | (1, 2, 2)  ;;  1, 2 | (1, 2) | 1
        1, 1, 2 | 1, 2, 2 | 1, 2  ;;  (1,2),(3,4) | (2,1),(3,4) | (1,2,3,4)
        x<1 \text{ or } x>2 | x<1 \text{ and } x>2  ;;  x<1, x>2 | x<1 and x>2 | x<1 or x>2
        \frac12 | 1/2 or 0.6  ;;  5 | [5]  ;;  \{1,2\}\setminus\{3,4\} | \{4,2\}\setminus\{3,1\}""",
    "another text": r"""
        abc | ABC | Abc | a b c  ;;  \sin^2 3x | \sin^{23} x  ;;  x > 3 | x \ge 3 | x < 3
        2^{\frac12} | 2^1/2  ;;  \sqrt{\frac12} | \sqrt1/2  ;;  \frac{x^2}{3} | x^{7/3} | x^2\frac23
        \frac{1}{23} | \frac{1}{2}3 | \frac123  ;;  2-\frac13 | 2\frac{-1}{3}
        -\frac{3+x}{2} | \frac{-3+x}{2}  ;;  8:30 AM | 8:30 PM
        \log_2\frac58 | \frac{\log_2 5}{8}  ;;  \emptyset | \{\} | 0 |  | \,  ;;  \{\} | ()""",
    "the price of comparing as text: right, and unpaid": r"""
        2\sqrt{3} | \sqrt{12}  ;;  9a+11 | 11+9a  ;;  x > 3 | 3 < x  ;;  \pm 2 | 2, -2
        \cot x | \cot(x)  ;;  mn | m \cdot n  ;;  1200 | 1.2\times 10^3  ;;  6/8 | 3/4""",
}

MARKS = {r"\u200b": "\u200b", r"\u202e": "\u202e", r"\0": "\0"}


def pairs(table):
    """(solution, answer) of each answer of a table, and of each solution as its own answer."""
    for mark, sign in MARKS.items():
        table = table.replace(mark, sign)
    for row in table.replace(";;", "\n").strip().splitlines():
        solution, *answers = row.strip().split(" | ")
        yield solution, solution, True
        for answer in answers:
            yield solution, answer, False


@pytest.mark.parametrize("why", PAID)
def test_a_right_answer_is_paid(why):
    unpaid = [(truth, answer) for truth, answer, _ in pairs(PAID[why]) if not paid(truth, answer)]
    assert unpaid == []


@pytest.mark.parametrize("why", UNPAID)
def test_a_wrong_or_unfinished_answer_is_not_paid(why):
    """But each solution is paid for itself."""
    rows = pairs(UNPAID[why])
    assert [(truth, answer) for truth, answer, same in rows if paid(truth, answer) != same] == []


def test_copying_the_problem_is_not_answering_it():
    lines = (ROOT / "data" / "math_train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    answers = [row["answer"] for row in rows]
    copies = [row["problem"].removeprefix("What is ").removesuffix("?") for row in rows]
    for form in ("%s", "x = (%s)", r"\frac{%s}{1}\text{ cm}", "%s+0", "%s = %s"):
        boxes = ["\\boxed{" + form.replace("%s", copy) + "}" for copy in copies]
        assert math_reward(boxes, answers) == [0.0] * len(rows), form


BOXES = {
    r"\boxed{1} or \fbox{2}": "2",
    r"\boxed{\frac{1}{2}} }": r"\frac{1}{2}",
    r"\boxed{\left\{ 1 \right.}": r"\left\{ 1 \right.",
    r"\boxed{5} no: $\boxed\frac12$": r"\frac12",
    r"$\boxed 5$ eggs": "5",
    r"\boxed{3}, in \boxed as told": "3",
    r"\boxed{1} no: \boxed{2": None,
    r"\boxed{1}</think> no.": None,
}


def test_the_last_box_is_read():
    for text, content in BOXES.items():
        assert extract_boxed(text) == content, text
    texts = [r"\boxed{42}", r"\boxed{42} or \boxed{}", "42", r"\boxed{%s}" % ("4" * 10_000)]
    texts += [[{"content": r"\boxed{7}"}, {"content": r"\boxed{42}"}]]  # a chat: its last message
    assert math_reward(texts, [42] * 5, level=[1] * 5) == [1.0, 0.0, 0.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="argument 2 is shorter than argument 1"):
        math_reward(["", ""], ["1"])


@pytest.mark.parametrize("solution", [None, float("nan"), "", " ", [], ["2"], {}, r"\boxed{}"])
def test_a_row_without_a_solution_is_an_error(solution):
    """Otherwise the answer "none" would be right."""
    with pytest.raises(ValueError, match="`solution` does not give an answer"):
        math_reward([r"\boxed{none}"], [solution])


def test_what_is_compared_as_text_is_known():
    read = ["2", "x = 5", r"\frac12\text{ hours}", "(1, 2.5)", "two lines", r"[1, \infty)", "-i"]
    texts = [r"2\sqrt{3}", "x^2+1", "8:30 AM", r"\forall x", "9/", "(1, 2x)", "6/8", "9" * 999]
    assert [text for text in read if is_compared_as_text(text)] == []
    assert [text for text in texts if not is_compared_as_text(text)] == []
    assert not is_compared_as_text(r"So $\boxed{9}$.")


PIECES = r"""√ \sqrt ( [( { - | \frac \frac1 \sqrt[ 2^{ \text{ \text{m 2^ 9! 1/ x= (x,y)= 1< 1, \pm
x_ % 1_ € \$ & \\ ) ] } \} \{ . , ; : + * _ ^ 0 7 12 1,000 .5 1/0 x tea or and i π ² ٥ 𝟓 $ 5cm
\infty 9^{9^{9}} 9^{999} 1e99 0.\overline{ \overline{3} 99999999999999999999 \boxed \sin^2 = {,}"""


def test_no_text_raises():
    """Whatever a model writes. What would take long, such as a power, is not even worked out."""
    generator = random.Random(0)
    pieces = [*PIECES.split(), "1 1/2 ", "\u200f", "\ud800", "\x00", "5 feet per ", " ", " or "]
    texts = [piece * (size // len(piece)) for piece in pieces for size in (150, 290, 990)]
    texts += ["(" * 149 + "5" + ")" * 149, "{" * 149 + "1,2" + "}" * 147]
    for count in [3, 9, 40] * 300:
        texts.append("".join(generator.choices(pieces, k=count)))
    for text in texts:
        boxed = rf"\boxed{{{text}}}"
        assert math_reward([boxed, text], ["17", "3x+(1,2)"]) == [0.0, 0.0], text
        assert answers_match(text, text + "x") in (True, False)  # either verdict
    assert not answers_match("", r"\,")  # if a row has no more to compare
    for solution in ("9", r"9^{9^{9}}"):
        assert math_reward([r"\boxed{9^{9^{9^{9}}}}"], [solution]) == [0.0]


# ------------------------------------------------------------------------------- rows of data files


LILY = "(1) Lily is a knave"
KK_TRUTH = {"solution_text_format": LILY}
CHAT = "<|user|>Who is a knave?<|assistant|><think>"  # the template is applied already
GOOD = {"problem": "2?", "answer": "2"}


def user(text):
    return [{"role": "user", "content": text}]


def verl(prompt, truth):
    return {"prompt": prompt, "reward_model": {"ground_truth": truth}}


def loaded_data(flags="", **files):
    """(training rows, evaluation rows) of `load_data`."""
    return load_data(settings_of(flags, **files), TOKENIZER)


def loaded(path, flags="--task math"):
    return load_rows(str(path), settings_of(flags), TOKENIZER)


def loaded_rows(tmp_path, rows, flags="--task math"):
    """What becomes of some rows in a jsonl file."""
    return loaded(write_jsonl(tmp_path / "a.jsonl", rows), flags)


ROWS_OF_FORMS = {  # form: (task, a row, its question or its prompt, its solution)
    "K&K": ("kk", {"quiz": "Who?", **KK_TRUTH}, "Who?", LILY),
    "TRL": ("kk", {"prompt": user("Who?"), "solution": LILY}, "<|user|>Who?<|assistant|>", LILY),
    "both": ("kk", {"quiz": "Who?", **KK_TRUTH, "prompt": "Who?"}, "Who?", LILY),
    "TRL, text": ("math", {"prompt": "1 + 1 =", "solution": "2", "problem": "No."}, "1 + 1 =", "2"),
    "verl": ("math", {**verl(user("1?"), "1"), "question": "1?"}, "<|user|>1?<|assistant|>", "1"),
    "verl, rendered": ("kk", verl(user(CHAT), KK_TRUTH), CHAT, LILY),
    "GSM8K": ("math", {"question": "How many?", "answer": "2.\n#### 1,002"}, "How many?", "1,002"),
    "DeepScaleR": ("math", {"problem": "Add.", "answer": "2", "solution": "Clear."}, "Add.", "2"),
    "MATH": ("math", {"problem": "Halve.", "solution": r"$\boxed{\frac12}$"}, "Halve.", r"\frac12"),
}


@pytest.mark.parametrize("form", ROWS_OF_FORMS)
def test_every_form_of_row_in_every_format(tmp_path, form):
    """From a file to a prompt, and to a solution that the reward reads."""
    task, row, prompt, solution = ROWS_OF_FORMS[form]
    data = datasets.Dataset.from_list([row])
    data.to_json(tmp_path / "rows.jsonl")
    data.to_parquet(tmp_path / "rows.parquet")
    if all(isinstance(value, str) for value in row.values()):
        data.to_csv(tmp_path / "rows.csv")
    for path in tmp_path.iterdir():
        flags = f"--task {task} --people 1 --eval-only --eval-data {path}"
        training, (read,) = loaded_data(flags)
        assert not training
        assert read["solution"] == solution
        assert read["difficulty"] == ("1" if task == "kk" else "all")
        assert prompt in read["prompt"]
        if form.startswith(("TRL", "verl")):  # a whole prompt, to which nothing is added
            assert read["prompt"] == prompt
        opens = form in ("K&K", "both", "verl, rendered")
        assert read["prompt"].endswith("<think>") == opens


def test_no_training_prompt_is_an_evaluation_prompt(tmp_path, capsys):
    """Whatever the files' forms, spaces and capitals, and beyond --eval-size as well."""
    island = "On this island live knights and knaves, and you meet"
    trained = []
    evaluated = []
    for name in "ABC":
        quiz = f"{island}  {name}?"
        trained.append({"quiz": quiz, **KK_TRUTH})
        trained.append({"prompt": user(quiz), "solution": LILY})
        trained.append(verl(user(CHAT.replace("Who", f"The puzzle: {quiz} Who")), LILY))
    evaluated.append({"quiz": f"{island} a?", **KK_TRUTH})
    evaluated.append(verl(user(CHAT.replace("Who", f"The puzzle: {island} b? Who")), LILY))
    files = {
        "data": write_jsonl(tmp_path / "data.jsonl", trained),
        "eval_data": write_jsonl(tmp_path / "eval.jsonl", evaluated),
    }
    training, _ = loaded_data("--people 1 --eval-size 1", **files)
    assert all("you meet c?" in row["key"] for row in training)
    told = "3 training and 1 of 2 evaluation prompts; 6 of 9 rows are also in --eval-data\n"
    assert capsys.readouterr().out.endswith(told)


def test_a_short_question_is_no_part_of_a_long_one(tmp_path, monkeypatch, capsys):
    """'Solve for x' removes itself, and not all equations. Long lists: equal questions only."""
    long = "A train leaves at noon and arrives at three, after 120 miles. "
    trained = ["Solve for x: 2x = 4", "solve  for x", long + "How fast is it?"]
    evaluated = ["Solve for x", long]
    files = {}
    for name, asked in (("data", trained), ("eval_data", evaluated)):
        rows = [{**GOOD, "problem": problem} for problem in asked]
        files[name] = write_jsonl(tmp_path / f"{name}.jsonl", rows)
    training, _ = loaded_data("--task math", **files)
    assert [row["asked"] for row in training] == trained[:1]
    monkeypatch.setattr("rewards.MAX_PAIRS", 1)
    training, _ = loaded_data("--task math", **files)
    assert [row["asked"] for row in training] == [trained[0], trained[2]]
    assert "only equal ones are left out" in capsys.readouterr().out


def test_a_tenth_of_ones_own_data_is_evaluated_on(tmp_path, capsys):
    """At random: a sorted file begins with its easiest rows. What is there twice is no training."""
    rows = [{"problem": f"Say {i // 2}!", "answer": f"{i // 2}"} for i in range(40)]
    path = write_jsonl(tmp_path / "own.jsonl", rows)
    training, evaluation = loaded_data("--task math", data=path)
    assert not {row["key"] for row in training} & {row["key"] for row in evaluation}
    assert len(evaluation) == 4
    assert max(int(row["solution"]) for row in evaluation) > 4
    told = f"4 of 40 rows are held out for evaluation, {36 - len(training)} more have the same"
    assert told in capsys.readouterr().out
    assert loaded_data("--task math --seed 7", data=path)[1] == evaluation  # of every run
    _, evaluation = loaded_data("--task math --eval-only --eval-size 4", eval_data=path)
    assert max(int(row["solution"]) for row in evaluation) > 4
    write_jsonl(tmp_path / "own.jsonl", rows[:2])
    with pytest.raises(lopti.UserError, match="nothing is left to train on"):
        loaded_data("--task math", data=path)


NO_ROW = "without a prompt or a (boxed) solution"
CUT = "with LaTeX that JSON has cut"
BAD = {  # why a row is left out: such rows
    "without columns": [7, None, [GOOD]],
    "with columns that are not known (question, final": [{"question": "2?", "final": "2"}],
    NO_ROW: [{"problem": "2?", "solution": 2}, {"problem": "", "answer": "2"}],
    "with several boxes": [{"problem": "2?", "solution": r"\boxed{3} and $\boxed{4}$"}],
    "that cannot be read": [
        {"prompt": user(None), "solution": "2"},
        {"prompt": user([{"type": "text", "text": "2?"}]), "solution": "2"},
        {"prompt": user(2), "solution": "2"},
        {"prompt": user("\ud83d"), "solution": "2"},  # half a character
    ],
    "whose chat is written as text": [{"prompt": str(user("2?")), "solution": "2"}],
    CUT: [{**GOOD, "problem": "\frac12?"}],
    "with a picture": [{**GOOD, "images": ["figure.png"]}],
    "with choices that its question does not show": [
        {**GOOD, "choices": ["7", "8"]},
        {**GOOD, "options": "?2"},  # as csv has it: one text
        {"problem": "Is 2 even, Anna and Ben?", "options": {"A": "yes", "B": "no"}, "answer": "A"},
    ],
    "the number of a choice": [{"problem": "1, or 2?", "choices": ["1", "2"], "answer": 1}],
    "longer than --max-prompt-length 400": [{**GOOD, "problem": "Hm? " * 999}],
}
BAD_ANSWERS = {  # the same of answers
    NO_ROW: [None, math.nan, -math.inf, ["3"], {"a": 3}, ""],
    CUT: ["\frac12", "3\times 2", "\bar x", "2\right)", "\neq 2"],
    "says that there is none": ["proof", "Not found", "None", "unknown", "See solution.", "?"],
    "is a list or other JSON": ['["2"]', "['2', '3']", '{"inputs": ["1"], "outputs": ["2"]}'],
    "is a sentence": ["One and one are two, so 2"],
    "a spreadsheet has made a date": ["4-Mar", "Mar-04"],
    "with two spellings of one answer": [r"$\frac12$ or $0.5$"],
    "whose solution --task math cannot read": [r"\frac{1}{2"],
}


@pytest.mark.parametrize("reason", BAD | BAD_ANSWERS)
def test_a_bad_row_is_left_out_and_counted_with_its_reason(reason, tmp_path, capsys):
    bad = list(BAD.get(reason, []))
    bad += [{**GOOD, "answer": answer} for answer in BAD_ANSWERS.get(reason, [])]
    rows = [GOOD, *bad, {**GOOD, "options": ["2"]}]
    assert len(loaded_rows(tmp_path, rows)) == 2
    told = capsys.readouterr().out
    assert told.startswith(f"a.jsonl: {len(rows)} rows, {len(bad)} left out: ")
    assert reason in told
    assert " (row 2" in told


def test_every_row_has_the_columns_of_all(tmp_path):
    """Else a reward would get lists of different lengths."""
    rows = loaded_rows(tmp_path, [GOOD, {**GOOD, "options": ["2"]}])
    assert rows[0]["columns"] == {**GOOD, "options": None}


@pytest.mark.parametrize(
    "written, read",
    [
        (r"We must have x equal to one more than seven, so $\boxed{8}$.", "8"),
        ("1E+06", "1000000"),  # of a spreadsheet
        ("1.5E-07", "0.00000015"),
        ("1 or 2", "1 or 2"),
        (1e20, "1" + "0" * 20),
        (-2.0, "-2"),
        (0.5, "0.5"),
        ("2021-03-04", "2021-03-04"),
        ("2021-03-04 05:06:07", "2021-03-04 05:06:07"),
        (12345678901234567890123, "12345678901234567890123"),
        ("0.10", "0.10"),
        ("1e3", "1e3"),
    ],
)
def test_how_a_solution_is_read(written, read, tmp_path):
    """No dates and no floats are made of what is text, or a long number."""
    (row,) = loaded_rows(tmp_path, [{"prompt": "2?", "solution": written}])
    assert row["solution"] == read


def test_prompts_that_do_not_ask_for_the_form_are_counted(tmp_path, capsys):
    """verl's GSM8K asks for ####: every obedient answer would earn 0, in silence."""
    rows = [verl(user("3 + 4? Write #### before it."), "7"), verl(user("3 + 4? Box it."), "7")]
    loaded_rows(tmp_path, [*rows, {"problem": "3 + 4?", "answer": "7"}])
    told = "a.jsonl: 1 prompts do not ask for a box: answers without one count as wrong\n"
    assert capsys.readouterr().out == told


def test_the_length_of_a_prompt_is_that_of_all_that_the_model_reads(tmp_path):
    """System message, template and our request included."""
    (row,) = loaded_rows(tmp_path, [GOOD])
    length = len(TOKENIZER(row["prompt"])["input_ids"])
    assert loaded_rows(tmp_path, [GOOD], f"--task math --max-prompt-length {length}")
    with pytest.raises(lopti.UserError, match="longer than"):
        loaded_rows(tmp_path, [GOOD], f"--task math --max-prompt-length {length - 1}")


def test_what_people_and_the_task_leave_out(tmp_path, capsys):
    """--people silently, unless nothing is left; texts that are no puzzle with a word."""
    truths = {"A?": "(1) Ann is a knight (2) Bo is a knave", "B?": LILY, "C?": "(1) Knightley"}
    rows = [{"quiz": quiz, "solution_text_format": truth} for quiz, truth in truths.items()]
    assert [row["asked"] for row in loaded_rows(tmp_path, rows, "--people 2")] == ["A?"]
    told = "a.jsonl: 3 rows, 1 left out: 1 whose solution --task kk cannot read"
    told += " (not puzzles? --task math) (row 3)\n"
    assert capsys.readouterr().out == told
    told = "2 of another size than --people .*columns: quiz, solution_text_format; .* --people 3"
    with pytest.raises(lopti.UserError, match=told):
        loaded_rows(tmp_path, rows, "--people 3")


def test_solutions_that_are_compared_as_text_are_counted(tmp_path, capsys):
    loaded_rows(tmp_path, [{**GOOD, "answer": answer} for answer in ("2", r"\forall x", "9/")])
    told = "a.jsonl: 2 compared as text (see math-verify in data/GUIDE.md)\n"
    assert capsys.readouterr().out == told


def test_files_of_json(tmp_path):
    """A mark at the beginning, empty lines, capitals in the name; a text may have U+2028."""
    lines = [json.dumps({**GOOD, "problem": f"Two\u2028{i}"}, ensure_ascii=False) for i in "ab"]
    for name, text in (
        ("a.JSONL", "\n\n".join(lines) + "\n\n"),
        ("a.json", f"[{','.join(lines)}]"),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert ["Two\u2028a" in row["prompt"] for row in loaded(tmp_path / name)] == [True, False]
    (tmp_path / "a.JSONL").write_text('{"problem": "?"}\n{"problem": ')
    with pytest.raises(lopti.UserError, match=r"a.JSONL \(ValueError: line 2: "):
        loaded(tmp_path / "a.JSONL")


def test_files_of_csv(tmp_path, capsys):
    """Of Excel, with a cell too many; with two columns of one name."""
    path = tmp_path / "a.csv"
    path.write_text("problem,answer,note\r\n2?,2,,\r\n3?,3,b,c\r\n", encoding="utf-8-sig")
    assert [row["columns"] for row in loaded(path)] == [{**GOOD, "note": ""}]
    assert "2 rows, 1 left out: 1 with more cells than columns (row 2)\n" in capsys.readouterr().out
    path.write_text("problem,answer,answer\n2?,2,3\n")
    with pytest.raises(lopti.UserError, match="two columns of one name"):
        loaded(path)


def test_difficulties(tmp_path):
    levels = {1: "1", "1.0": "1", None: "all", "": "all", "Level 5": "Level 5"}
    rows = loaded_rows(tmp_path, [{**GOOD, "level": level} for level in levels])
    assert [row["difficulty"] for row in rows] == list(levels.values())


SINGLE = datasets.Value("float32")


@pytest.mark.parametrize(
    "name, kind, value, meant",
    [
        ("answer", SINGLE, 0.3, "0.3"),  # not 0.30000001192092896
        ("answer", datasets.Value("float16"), 1.1, "1.1"),
        ("answer", datasets.ClassLabel(names=["no", "yes"]), 1, "yes"),
        ("reward_model", {"ground_truth": SINGLE}, {"ground_truth": 0.1}, "0.1"),
    ],
)
def test_parquet_is_read_as_it_was_meant(name, kind, value, meant, tmp_path):
    """At every depth. A file that has changed is read anew."""
    text = datasets.Value("string")
    features = {"problem": text, "prompt": text, name: kind, "list": datasets.List(SINGLE)}
    for question in ("?", "??"):
        columns = {"problem": [question], "prompt": [question], name: [value], "list": [[0.3]]}
        data = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
        data.to_parquet(tmp_path / "a.parquet")
        (row,) = loaded(tmp_path / "a.parquet")
        assert row["solution"] == meant
        assert row["asked"] == question
        assert row["columns"]["list"] == [0.3]


def test_paths_are_read_as_they_are_meant(tmp_path, monkeypatch):
    """A colon in the name of a folder does not cut it; ~ is the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("d:1", r"C:\data\x"):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "train.jsonl", [GOOD])
        assert len(loaded(tmp_path / name)) == 1
        assert len(loaded(f"~/{name}")) == 1


def test_a_data_set_with_configurations_and_splits(tmp_path):
    """The form in which the hub holds the paper's data: name:configuration:split+split."""
    for split in "ab":
        write_jsonl(tmp_path / f"{split}.jsonl", [{"quiz": split, **KK_TRUTH}] * 2)
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in "ab")
    card = f"---\nconfigs:\n- config_name: train\n  data_files:\n{files}---\n"
    (tmp_path / "README.md").write_text(card)
    rows = loaded(f"{tmp_path}:train:a+b", "--people 1")
    assert [row["asked"] for row in rows] == ["a", "a", "b", "b"]


def test_every_epoch_has_every_prompt_in_an_order_of_its_own():
    def batches(size, seed, skip=0):
        return list(itertools.islice(prompt_stream(range(10), size, seed, skip), 10 - skip))

    order = joined(batches(4, 0))  # of four epochs
    epochs = [tuple(order[start : start + 10]) for start in range(0, 40, 10)]
    assert len(set(epochs)) == 4
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert batches(4, 0, skip=3) == batches(4, 0)[3:]
    assert batches(4, 0) != batches(4, 1)


# ------------------------------------------------------------------------------------------ prompts


def messages(question):
    """A puzzle as a chat."""
    return TASKS["kk"].messages(question)


SYSTEM = TASKS["kk"].system


def test_prompts_begin_as_the_model_is_used_to():
    """Llama's tokenizer puts a token before every text: once; a chat template has its own."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_special_tokens({"bos_token": "<|bos|>"})
    first = [("<|bos|>", tokenizer.bos_token_id)]
    tokenizer._tokenizer.post_processor = TemplateProcessing("<|bos|> $A", special_tokens=first)
    assert render_prompt(tokenizer, user("Lily")) == "<|user|>Lily<|assistant|>"
    tokenizer.chat_template = None  # a base model
    text = render_prompt(tokenizer, messages("Lily"), "<think>")
    assert text == f"<|bos|>{SYSTEM}\n\nLily\n\n<think>"
    assert render_prompt(tokenizer, "<|bos|>Lily") == "<|bos|>Lily"
    rollout = sample(random_model(vocab_size=len(tokenizer)), ["<|bos|>Lily"], tokenizer)
    assert plain_rows(rollout)[0][0].tolist() == tokenizer("Lily")["input_ids"]  # not twice


def test_a_template_is_applied_once():
    """What the model's own template writes shows that it was applied; another's mark is text."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = "<｜User｜>{{ messages[0].content }}<｜Assistant｜><think>"  # R1's
    text = render_prompt(tokenizer, user("What is <think> or [INST]?"))
    assert text == "<｜User｜>What is <think> or [INST]?<｜Assistant｜><think>"
    assert render_prompt(tokenizer, user(text)) == text


TURN = "{% for turn in messages if turn.role == 'user' %}<|user|>{{ turn.content }}{% endfor %}"
REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


@pytest.mark.parametrize(
    "template",
    [
        REFUSING + TURN,  # Gemma's refuses a system message
        TURN,  # others drop it
        TURN + "<|assistant|><think>\n",  # DeepSeek's opens the thought itself
    ],
)
def test_a_chat_template_loses_nothing_and_adds_nothing_twice(template):
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = template
    text = render_prompt(tokenizer, messages("Lily  is?"), "<think>")
    assert SYSTEM not in text  # which the bundled vocabulary cannot write
    tokenizer.unk_token = None
    text = render_prompt(tokenizer, messages("Lily  is?"), "<think>")
    beginning = f"<|user|>{SYSTEM}\n\nLily  is?"
    assert text.startswith(beginning)
    assert text.removeprefix(beginning).count("<think>") == 1
    assert "Lily" not in text.removeprefix(beginning)


@pytest.mark.parametrize(
    "template", ["{{ messages[-1].content[0].text }}", "{{ raise_exception('no chat') }}"]
)
def test_a_chat_template_that_loses_the_question_is_refused(template):
    """The first is for content in parts."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = template
    with pytest.raises(lopti.UserError, match="refuses or leaves out"):
        render_prompt(tokenizer, messages("Lily"))


# ---------------------------------------------------------------------------- a reward of one's own


def rewards_of(reward, rows, texts=("a", "b"), **changes):
    """What a function of one's own gives for responses to rows."""
    return compute_rewards(list(texts), rows, settings_of(reward=reward, **changes))


def careless_with_its_inputs(completions, value, prompts, solution, nested):
    """Returns the column `value`, and empties all that it got."""
    values = list(value)
    for column in (completions, value, prompts, solution, nested[0]):
        column.clear()
    return values


def test_a_reward_gets_copies_of_every_column():
    """As in TRL: lists with one entry for each response."""
    rows = [{**data_row("?"), "columns": {"value": value, "nested": [1]}} for value in (0, 6.5)]
    before = copy.deepcopy(rows)
    texts = ["a", "b"]
    settings = settings_of(reward=careless_with_its_inputs)
    assert compute_rewards(texts, rows, settings) == [0.0, 6.5]
    assert texts == ["a", "b"]
    assert rows == before


NO_REWARDS = [
    None,
    [None, 1],
    [1, math.nan],
    [1, math.inf],
    [1],
    [1, 2, 3],
    {1: 1, 2: 1},
    ["a", "b"],
]


@pytest.mark.parametrize("returned", NO_REWARDS)
def test_a_reward_returns_one_finite_number_for_each_response(returned):
    with pytest.raises(lopti.UserError, match="reward|finite"):
        rewards_of(lambda completions, **columns: returned, [data_row("?")] * 2)


def test_a_file_of_ones_own_with_the_name_of_ours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text("def kk_reward(**columns): return [1.0]")
    with pytest.raises(lopti.UserError, match="rename your file"):
        load_function("rewards:kk_reward")


def test_rows_for_a_reward_of_ones_own(tmp_path):
    """Any solution, also a dictionary; and a question gets no words of ours."""
    truth = {"target": 24, "numbers": [4, 6]}  # Countdown's
    sentence = "The earth turns around the sun"
    rows = [{"question": "Why?", "answer": sentence}, verl("24?", truth)]
    flags = f"--task math --reward {__name__}:exits --solved-reward 1"
    first, second = loaded_rows(tmp_path, rows, flags)
    assert first["prompt"] == "<|user|>Why?<|assistant|>"
    assert first["solution"] == sentence
    assert second["solution"] == truth


def test_a_reward_leaves_the_process_as_it_was(tmp_path):
    """Else a seed in it draws the same answers in every step, and a folder loses the run."""
    kept = []

    def careful(completions, **columns):
        return [1091.375]

    def careless(completions, **columns):
        for seed in (random.seed, numpy.random.seed, torch.manual_seed):
            seed(0)
        os.chdir(tmp_path)
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        kept.append(torch.inference_mode())
        kept[-1].__enter__()
        return [1091.375]

    states = []
    for reward in (careful, careless, careless):
        for seed in (random.seed, numpy.random.seed, torch.manual_seed):
            seed(1)
        assert rewards_of(reward, [data_row("?")], "a") == [1091.375]
        draws = (random.random(), numpy.random.random(), float(torch.rand(())))
        modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        defaults = (torch.get_default_dtype(), torch.get_default_device())
        states.append((draws, modes, defaults, Path.cwd()))
    assert states[0] == states[1] == states[2]


FAILING = """\
import json
def chat(completions, **columns):
    return [each[0]['content'] for each in completions]
def load(completions, **columns):
    return json.loads('[')
"""


def test_where_a_reward_failed(tmp_path, monkeypatch):
    """Its own file and line, also where a library raises; and where to read what it gets."""
    (tmp_path / "failing.py").write_text(FAILING)
    monkeypatch.chdir(tmp_path)
    for name, line in (("chat", 3), ("load", 5)):
        with pytest.raises(lopti.UserError, match=f"failing.py, line {line}.*data/GUIDE.md"):
            rewards_of(f"failing:{name}", [data_row("?")], "a", solved_reward=1)


def test_the_guide_s_reward_with_math_verify(tmp_path, monkeypatch):
    pytest.importorskip("math_verify")
    blocks = re.findall("```python\n(.*?)```", GUIDE, re.DOTALL)
    (code,) = [block for block in blocks if "math_verify" in block]
    (tmp_path / "my_reward.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    reward = load_function("my_reward:math_verify_reward")
    texts = [r"\boxed{(-\infty, 4)}", r"\boxed{2}</think> \boxed{3}", "4", r"\boxed{4"]
    assert reward(texts, ["x < 4", "3", "5", "5"], level=[1] * 4) == [1.0, 1.0, 0.0, 0.0]


def column(completions, **columns):
    return torch.ones(len(completions), 2).numpy()


def one_that_divides_by_zero(completions, **columns):
    return [1 / 0 for _ in completions]


@pytest.mark.parametrize("function", [column, one_that_divides_by_zero])
def test_the_line_of_a_reward_that_fails_is_its_own(function):
    """Where our code fails with what it returned, no line is named."""
    settings = lopti.Settings(
        task="math", reward=f"{__name__}:{function.__name__}", solved_reward=1
    )
    row = {"columns": {}, "solution": "1", "prompt": "?"}
    with pytest.raises(lopti.UserError) as error:
        compute_rewards(["a", "b"], [row, row], settings)
    told = str(error.value)
    assert "rewards.py" not in told
    if function is one_that_divides_by_zero:
        assert re.search(r"in \S+test_lopti.py, line \d+", told)
