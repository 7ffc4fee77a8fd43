"""Checks every formula against a computation of its own, every pitfall, and the whole program.

    python -m pytest -q                  # the quick tests
    LOPTI_ALL=1 python -m pytest -q      # all: also killed processes and the notebook

First come the paper's equations with numbers done by hand, for a port to copy.
"""

import argparse
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
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test asks the hub

import lopti  # isort: skip, because it says how the threads of torch wait

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import rewards

ROOT = Path(__file__).resolve().parent
TINY = ROOT / "data" / "tiny"
sys.path[:0] = [str(ROOT / "data" / folder) for folder in ("make", "lab")]

import golden
import theory

slow = pytest.mark.skipif(not os.environ.get("LOPTI_ALL"), reason="LOPTI_ALL=1 runs it")
TOKENIZER = AutoTokenizer.from_pretrained(TINY)

# ------------------------------------------------------------------------ the equations, by hand


def test_eq_1_group_advantages():
    """Mean 0, deviation √(12/3) = 2; and a group whose rewards are all equal."""
    rewards = torch.tensor([3.0, -1.0, -1.0, -1.0, 0.1, 0.1, 0.1, 0.1])
    advantages = lopti.group_advantages(rewards, group_size=4)
    assert advantages.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5, 0, 0, 0, 0], abs=1e-5)


def test_eq_1_loss_and_clip():
    """Clipped at 1.24, at 0.8, by the dual clip at 10, and not: the fifth token is a prompt's."""
    ratio = torch.tensor([[1.5, 0.5, 20.0, 0.5, 7.0]])
    advantages, mask = torch.tensor([[1.0, -1, -1, 1, 1]]), torch.tensor([[True] * 4 + [False]])
    loss, statistics = lopti.policy_loss(ratio.log(), torch.zeros(1, 5), advantages, mask)
    assert float(loss) == pytest.approx((-1.24 + 0.8 + 10 - 0.5) / 4)
    assert [statistics[f"clip_ratio/{name}_mean"] for name in ("high", "low", "dual")] == [0.25] * 3


def test_eq_1_kl():
    """k3 with π_ref/π = 1/2 and 2: 1/2 - 1 - log 1/2 and 2 - 1 - log 2, times β = 0.1."""
    logprobs, ref = torch.tensor([[0.5, 0.4]]).log(), torch.tensor([[0.25, 0.8]]).log()
    rest = {"advantages": torch.zeros(1, 2), "mask": torch.tensor([[True, True]])}
    loss, _ = lopti.policy_loss(logprobs, logprobs, **rest, ref_logprobs=ref, kl_coef=0.1)
    assert float(loss) == pytest.approx(0.1 * (0.1931472 + 0.3068528) / 2)


def test_eq_2_gradient():
    """By log π, times -N: r·Â + β·(π_ref/π - 1); at r = 1.3 the clip leaves the KL alone."""
    old, ref = torch.tensor([[0.5, 0.5, 0.5]]).log(), torch.tensor([[0.25, 0.5, 1.3]]).log()
    logprobs = torch.tensor([[0.5, 0.6, 0.65]]).log().requires_grad_()
    advantages, mask = torch.full((1, 3), 2.0), torch.tensor([[True] * 3])
    lopti.policy_loss(logprobs, old, advantages, mask, ref_logprobs=ref, kl_coef=0.1)[0].backward()
    assert (-3 * logprobs.grad[0]).tolist() == pytest.approx([2 - 0.05, 2.4 - 0.1 / 6, 0.1])


def test_eq_4_reweighting():
    """α·π + 1 - α with α = 0.3, for both signs."""
    old, advantages = torch.tensor([[0.01, 0.5, 1.0]]).log(), torch.tensor([[1.0, -2.0, 1.0]])
    reweighted = lopti.reweight_advantages(advantages, old, alpha=0.3)
    assert reweighted[0].tolist() == pytest.approx([0.703, -1.7, 1.0])


def test_prop_4_2_unlikely_tokens_have_the_larger_gradient_at_the_logits():
    """π = (1/2, 1/4, 1/4): e_1 - π and e_2 - π, between √(3/2)·(1-π) and √2·(1-π)."""
    logits = torch.tensor([[0.5, 0.25, 0.25]] * 2).log().requires_grad_()
    ids, tokens = torch.tensor([[0, 1]]), torch.tensor([[True] * 2])
    lopti.token_logprobs(logits, ids, tokens).sum().backward()
    assert logits.grad.tolist() == [[0.5, -0.25, -0.25], [-0.5, 0.75, -0.25]]
    norms, room = logits.grad.norm(dim=1), torch.tensor([0.5, 0.75])
    assert (1.5**0.5 * room <= norms + 1e-6).all() and (norms <= 2**0.5 * room).all()


def test_lopti_two_stages_low_probability_tokens_first():
    """π < η = 0.5 in the one, π ≥ η in the other, and what is no response in none."""
    old, mask = torch.tensor([[0.1, 0.5, 0.9, 0.1]]).log(), torch.tensor([[True] * 3 + [False]])
    low, high = lopti.split_tokens(old, mask, eta=0.5)
    assert low[0].tolist() == [True, False, False, False]
    assert high[0].tolist() == [False, True, True, False]


def test_lopti_two_stages_share_one_normaliser():
    """One of three response tokens is low: its stage's loss is -1/3, not -1."""
    old, mask = torch.zeros(1, 3), torch.ones(1, 3).bool()
    low = torch.tensor([[True, False, False]])
    losses = [lopti.policy_loss(old, old, mask * 1.0, mask, tokens=x)[0] for x in (low, ~low)]
    assert list(map(float, losses)) == pytest.approx([-1 / 3, -2 / 3])


# ------------------------------------------------------------------------------ helpers


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def arguments(flags="", **changes):
    args = lopti.parse_arguments(flags.split())
    vars(args).update(changes)
    return args


def spy(monkeypatch, place, name, look):
    """From now on `look` gets the result and the inputs of every call of a function."""
    original = getattr(place, name)

    def looked_at(*inputs, **options):
        result = original(*inputs, **options)
        look(result, *inputs)
        return result

    monkeypatch.setattr(place, name, looked_at)


LILY = "(1) Lily is a knave"
KK_TRUTH = {"solution_text_format": LILY}


def data_row(prompt, solution=""):
    """A row as `lopti.load_data` makes them."""
    row = {"asked": prompt, "key": prompt, "prompt": prompt, "solution": solution}
    return {**row, "difficulty": "2", "columns": {}}


def random_model(family="Llama", **changes):
    """A small model over the bundled vocabulary; large random weights: π is far from uniform."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": len(TOKENIZER)}
    ids = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    config = getattr(transformers, f"{family}Config")(**{**sizes, **heads, **ids, **changes})
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(6)
    return model.eval()


def packed(prompts, responses):
    """A Rollout of these ids."""
    ids, mask, lengths = lopti.pack(prompts, responses)
    return lopti.Rollout(ids, mask, lengths, torch.zeros_like(lengths).bool(), [""] * len(ids))


def random_rollout(model, seed=0):
    """12 random rows of random lengths."""
    rng = random.Random(seed)

    def rows(low, high):
        lengths = [high, *(rng.randint(low, high) for _ in range(11))]
        return [rng.choices(range(5, model.config.vocab_size), k=length) for length in lengths]

    return packed(rows(2, 7), rows(1, 9)[::-1])


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def gradient(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def tensor_of(values):
    return torch.tensor(values, dtype=torch.float64)


def close(values, expected):
    return torch.allclose(values, tensor_of(expected), atol=1e-9, rtol=0)


# ------------------------------------------------------------------------ golden numbers

GOLDEN = json.loads((ROOT / "data" / "golden.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", GOLDEN["cases"])
def test_golden_numbers(case):
    """Advantages, split, loss and gradient of all tokens and of both stages, to 1e-9."""
    old, new, ref = (tensor_of(case[f"{name}_logprobs"]) for name in ("old", "new", "ref"))
    mask = torch.arange(old.shape[1])[None] < torch.tensor(case["lengths"])[:, None]
    if case.get("algorithm") == "reinforce++":
        advantages = lopti.reinforce_pp_advantages(tensor_of(case["rewards"]), mask)
        assert close(advantages, case["advantages"])
    else:
        advantages = lopti.group_advantages(tensor_of(case["rewards"]), case["group_size"])
        expected = [row[0] if isinstance(row, list) else row for row in case["advantages"]]
        assert close(advantages, expected)
        advantages = advantages[:, None] * mask
    advantages = lopti.reweight_advantages(advantages, old, case["alpha"])
    assert close(advantages, case["reweighted_advantages"])
    low, high = lopti.split_tokens(old, mask, case["eta"])
    assert torch.equal(low, tensor_of(case["low"]).bool() & mask)
    settings = {name: case[name] for name in ("clip_low", "clip_high", "clip_dual", "kl_coef")}
    settings["ref_logprobs"] = ref
    for stage, tokens in (("joint", mask), ("low_stage", low), ("high_stage", high)):
        expected, logprobs = case[stage], new.clone().requires_grad_()
        loss, stats = lopti.policy_loss(logprobs, old, advantages, mask, tokens=tokens, **settings)
        loss.backward()
        assert loss.item() == pytest.approx(expected["loss"], abs=1e-9)
        assert close(logprobs.grad, expected["gradient"])
        if "kl" in expected:
            clips = [expected[f"clip_{name}_share"] for name in ("low", "high", "dual")]
            ours = [stats[f"clip_ratio/{name}_mean"] for name in ("low", "high", "dual")]
            assert stats["kl"] == pytest.approx(expected["kl"], abs=1e-9)
            assert ours == pytest.approx(clips)


class Bigrams(torch.nn.Module):  # row i of its table holds the logits after token i
    device, dtype = torch.device("cpu"), torch.float64

    def __init__(self, table):
        super().__init__()
        self.table = torch.nn.Embedding.from_pretrained(tensor_of(table), freeze=False)
        self.output = torch.nn.Identity()

    def get_output_embeddings(self):
        return self.output

    def forward(self, ids, use_cache):
        return SimpleNamespace(logits=self.output(self.table(ids)))


@pytest.mark.parametrize("case", GOLDEN["rollouts"], ids=lambda case: case["name"])
def test_golden_rollouts(case):
    """Both stages over two mini-batches: every step's gradient and weights, and the skipped."""
    args = arguments(**{name: case[name] for name in vars(arguments()).keys() & case.keys()})
    policy, reference = Bigrams(case["table"]), Bigrams(case["reference"])
    rollout = packed([[prompt] for prompt in case["prompts"]], case["responses"])
    mask, old = rollout.mask, lopti.score(policy, rollout, args)[0]
    rollout.old_logprobs, rollout.ref_logprobs = old, lopti.score(reference, rollout, args)[0]
    advantages = lopti.group_advantages(tensor_of(case["rewards"]), args.group_size)[:, None] * mask
    rollout.advantages = lopti.reweight_advantages(advantages, old, args.alpha)
    low, high = lopti.split_tokens(old, mask, args.eta)
    for name, values in (("old_logprobs", old), ("low", low.double())):
        assert close(values[mask], list(itertools.chain(*case[name])))
    optimizer, weight, steps = lopti.make_optimizer(policy, args), policy.table.weight, []
    optimizer.register_step_pre_hook(lambda *_: steps.append([weight.grad.clone()]))
    optimizer.register_step_post_hook(lambda *_: steps[-1].append(weight.detach().clone()))
    for tokens in (low, high) if args.eta else (mask,):
        lopti.update(policy, optimizer, rollout, tokens, args)
    expected = [step for step in case["steps"] if not step["skipped"]]
    assert len(steps) == len(expected)
    for (gradient, table), step in zip(steps, expected):
        norm = tensor_of(step["gradient"]).norm().item()
        clip = min(1.0, args.max_grad_norm / (norm + 1e-6))
        assert torch.allclose(gradient, clip * tensor_of(step["gradient"]), atol=1e-9, rtol=0)
        assert close(table, step["table"])


@pytest.mark.parametrize("case", GOLDEN["treatments"])
def test_golden_numbers_of_the_later_methods(case):
    """REINFORCE++, entropies, STAPO, 80/20 and min-p against plain Python."""
    ids, rho = torch.tensor(case["ids"]), case["rho"]
    mask = torch.arange(ids.shape[1])[None] < torch.tensor(case["lengths"])[:, None]
    logits = tensor_of(case["logits"])[mask] / case["temperature"]  # (N, V)
    pruned, scores = logits.where(lopti.safe_vocabulary(logits, case["min_p"]), -math.inf), {}
    for name, values in (("", logits), ("safe_", pruned)):
        scores[f"{name}logprobs"] = lopti.token_logprobs(values, ids, mask)
        scores[f"{name}entropies"] = lopti.spread(lopti.entropy(values), mask)
    safe = scores["safe_logprobs"] > -math.inf
    assert (safe & mask).tolist() == case["safe"]
    for name, values in scores.items():
        assert close(values.masked_fill(~safe & (name == "safe_logprobs"), 0), case[name])
    advantages = lopti.reinforce_pp_advantages(tensor_of(case["rewards"]), mask)
    assert close(advantages, case["reinforce_pp_advantages"])
    inputs = scores["logprobs"], scores["entropies"], tensor_of(case["advantages"])[:, None] * mask
    kept = lopti.stapo_mask(*inputs, mask, case["stapo_tau"], case["stapo_quantile"])
    assert kept.tolist() == case["stapo_kept"]
    assert lopti.entropy_mask(scores["entropies"], mask, rho).tolist() == case["top_kept"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_get_exactly_zero_and_nearly_equal_ones_teach(dtype):
    """Seven times 0.1 has a mean that is not 0.1 in floating point."""
    mask = torch.ones(7, 3) > 0
    for reward in (0.1, -3.0, 1e-8, 1e6 + 0.1):
        equal = torch.full((7,), reward, dtype=dtype)
        assert lopti.group_advantages(equal, 7).tolist() == [0.0] * 7
        assert lopti.reinforce_pp_advantages(equal, mask).abs().max() == 0
    near, mask = torch.tensor([0.5, 0.5 + 1e-5], dtype=dtype), torch.ones(2, 1) > 0
    for advantages in (lopti.group_advantages(near, 2), lopti.reinforce_pp_advantages(near, mask)):
        assert advantages.flatten()[1] > 0.04 and advantages.sum().abs() < 1e-3


def test_which_tokens_the_later_methods_leave(monkeypatch):
    """80/20 of all tokens, whatever STAPO leaves; of so few that ρ·n rounds to 0: none. ρ = 1."""
    mask, entropies = torch.ones(1, 5) > 0, torch.tensor([[0.1, 0.9, 0.5, 0.2, 0.3]])
    logprobs = torch.tensor([[-9.0, -1, -9, -9, -1]])
    monkeypatch.setattr(lopti, "score", lambda *inputs: (logprobs, entropies))
    batch = SimpleNamespace(mask=mask, advantages=torch.ones(1, 5))
    kept = lambda flags: lopti.tokens_to_keep(None, batch, arguments(flags))[0].tolist()
    assert kept("--stapo") == [False, True, True, False, True]
    assert kept("--stapo --top-entropy .4") == [False, True, True, False, False]
    assert kept("--stapo --top-entropy .8") == [False, True, True, False, True]
    assert not any(kept("--top-entropy .09"))
    equal = torch.tensor([[1.0, 1.0, 0.0]])
    assert lopti.safe_vocabulary(equal, 1.0).tolist() == [[True, True, False]]


# ------------------------------------------------------------------------------ log-probabilities

MODELS = {  # what models do between ids and logits, and with the end of a sequence
    "plain": {},
    "dropout": {"family": "GPT2", "n_positions": 128, "resid_pdrop": 0.5},  # learnt positions too
    "tied embeddings": {"family": "Qwen2", "tie_word_embeddings": True},
    "several ends": {"family": "Qwen2", "eos_token_id": [1, *range(40, 60)]},
    "soft-capping": {"family": "Gemma2", "final_logit_softcapping": 3.0, "sliding_window": 4},
    "logits scaled": {"family": "Cohere", "logit_scale": 1.7},
}


def plain_rows(rollout):
    """(prompt, response) of each row, without padding."""
    rows = zip(rollout.ids, rollout.mask, rollout.mask.int().argmax(1))
    return [(ids[:start], ids[mask]) for ids, mask, start in rows]


def plain_distribution(model, prompt, response, temperature, min_p=0.0):
    """log π of every word at each token of one response alone, (T, V); −∞ outside of V_safe."""
    logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    probabilities = (logits / temperature).softmax(-1)
    safe = probabilities >= min_p * probabilities.max(-1, keepdim=True).values
    return (logits / temperature).masked_fill(~safe, -math.inf).log_softmax(-1)


def plain_logprobs(model, row, temperature, min_p=0.0):
    """log π of each token of one response, (T,)."""
    return plain_distribution(model, *row, temperature, min_p).gather(1, row[1][:, None])[:, 0]


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
    args = arguments(temperature=temperature, min_p=min_p, tokens_per_microbatch=60)
    logprobs, entropies = lopti.score(model, rollout, args)
    assert logprobs.dtype == torch.float32
    assert not logprobs[~rollout.mask].any() and not entropies[~rollout.mask].any()
    factors = torch.randn(rollout.mask.shape) * (logprobs > -math.inf)
    total, unsafe = 0.0, rollout.mask & (logprobs == -math.inf)
    for i, (prompt, response) in enumerate(plain_rows(rollout)):
        distribution = plain_distribution(model, prompt, response, temperature, min_p)
        expected, own = distribution.gather(1, response[:, None])[:, 0], rollout.mask[i]
        assert torch.allclose(logprobs[i][own], expected, atol=2e-5)  # −∞ included
        assert torch.allclose(entropies[i][own], plain_entropy(distribution), atol=2e-5)
        safe = expected > -math.inf
        total = total + (expected * factors[i][own])[safe].sum()
    assert (0 < unsafe.sum() < rollout.mask.sum()) == (min_p > 0)
    total.backward()
    expected = gradient(model)
    model.zero_grad()
    logits = lopti.token_logits(model, rollout.ids, rollout.mask, temperature, min_p)
    logprobs = lopti.token_logprobs(logits, rollout.ids, rollout.mask)
    (logprobs.masked_fill(unsafe, 0) * factors).sum().backward()
    assert 1 < expected.norm() and (gradient(model) - expected).norm() <= 1e-5 * expected.norm()


def test_micro_batches_by_tokens():
    lengths = torch.tensor([9, 2, 5, 30, 2, 4])
    assert lopti.micro_batches(range(6), lengths, 12) == [[1, 4, 5], [2], [0], [3]]
    assert lopti.micro_batches([0, 2], lengths, 1000) == [[2, 0]]


# ------------------------------------------------------------------------------ sampling

ENDS = [1, *range(40, 80)]  # of models that are to end their responses early
PROMPTS = ["Zoey is a knight or Liam is a knave. So who is a knight?", "Liam is a knave", "Lily"]


def sample(model, prompts=PROMPTS, tokenizer=TOKENIZER, group_size=1, temperature=0, **changes):
    args = arguments(**{"max_new_tokens": 12, **changes})
    return lopti.sample(model, tokenizer, prompts, group_size, temperature, args)


@pytest.mark.parametrize(
    "name, dtype", [*((name, "float32") for name in MODELS), ("plain", "bfloat16")]
)
def test_greedy_samples_against_generate(name, dtype, monkeypatch):
    """In groups, three rows at a time, ended responses leaving: as plain `generate` one by one."""
    model, sizes, bars = random_model(**MODELS[name]), [], []
    spy(monkeypatch, lopti, "generate_in_stretches", lambda ids, *inputs: sizes.append(len(ids)))
    prompts = TOKENIZER(PROMPTS, add_special_tokens=False)["input_ids"]
    settings = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 70}
    settings["eos_token_id"] = lopti.end_token_ids(model, TOKENIZER)
    settings = transformers.GenerationConfig(**settings)
    spy(monkeypatch, lopti, "tqdm", lambda bar, *_: bars.append((bar.total, bar.disable)))
    rollout = sample(model, group_size=8, sample_batch_size=3, max_new_tokens=70, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        answer = lambda ids: model.generate(torch.tensor([ids]), generation_config=settings)[0]
        alone = list(map(answer, prompts))
    assert sizes == [3] * 8 and bars == [(8, True)]  # no bar where the output is no terminal
    for i, (prompt, response) in enumerate(plain_rows(rollout)):
        assert prompt.tolist() == prompts[i // 8]
        assert torch.equal(torch.cat([prompt, response]), alone[i // 8])
    assert (rollout.ids[torch.arange(rollout.ids.shape[1]) >= rollout.lengths[:, None]] == 0).all()


@pytest.mark.parametrize("temperature, min_p", [(1.0, 0.0), (0.7, 0.0), (0.8, 0.3)])
def test_samples_come_from_the_scored_distribution(temperature, min_p, monkeypatch):
    """First tokens of 4,000 samples against the π that is scored (chi-squared).

    The model's own top_k and so on are put aside, as are HF's, and put back, whatever happens.
    """
    model, settings = random_model(), {"temperature": temperature, "min_p": min_p}
    own = model.generation_config
    own.update(do_sample=True, top_k=2, top_p=0.5, temperature=0.01, repetition_penalty=1.8)
    own.update(min_p=0.5, no_repeat_ngram_size=1, suppress_tokens=list(range(20, 60)))
    torch.manual_seed(0)
    rollout = sample(model, ["Lily said"], group_size=4000, max_new_tokens=1, **settings)
    assert torch.isfinite(lopti.score(model, rollout, arguments(**settings))[0]).all()
    (prompt, _), words = plain_rows(rollout)[0], torch.arange(len(TOKENIZER))
    probe = packed([prompt.tolist()] * len(words), words[:, None].tolist())
    probabilities = lopti.score(model, probe, arguments(**settings))[0][:, -1].exp().double()
    assert probabilities.sum().item() == pytest.approx(1, abs=1e-4)
    common = probabilities > 0.002
    expected = 4000 * probabilities[common]
    counts = torch.bincount(rollout.ids[:, -1], minlength=len(words))[common]
    statistic, degrees = ((counts - expected) ** 2 / expected).sum(), int(common.sum()) - 1
    assert degrees > 1 and statistic < degrees + 5 * math.sqrt(2 * degrees)
    monkeypatch.setattr(model, "generate", exits)
    with pytest.raises(SystemExit):
        sample(model)
    assert model.generation_config is own and own.top_k == 2


def test_every_end_of_sequence_token_ends_a_response_and_belongs_to_it():
    """The tokenizer's, which is the padding too; one of the settings; one of the config.

    At the end the batch has only what was unfinished 32 tokens before.
    """
    model, tokenizer, ends = random_model(), copy.deepcopy(TOKENIZER), torch.tensor([1, 40, 41])
    model.generation_config.eos_token_id, model.config.eos_token_id = [40], 41
    tokenizer.pad_token = tokenizer.eos_token
    torch.manual_seed(0)
    seen, options = [], {"group_size": 64, "max_new_tokens": 60, "temperature": 2.0}
    look = lambda _, inputs: seen.append((len(inputs[0]), torch.is_grad_enabled()))
    model.get_input_embeddings().register_forward_pre_hook(look)
    rollout, last = sample(model, PROMPTS[:2], tokenizer, **options), set()
    unfinished = int((rollout.mask.sum(1) > lopti.STRETCH).sum())
    assert seen[0] == (128, False) and seen[-1] == (unfinished, False) and 0 < unfinished < 128
    for (_, response), truncated in zip(plain_rows(rollout), rollout.truncated):
        assert not torch.isin(response[:-1], ends).any()
        last |= set() if truncated else {int(response[-1])}
    assert last == {1, 40, 41}


def test_every_response_goes_on_in_its_own_row():
    """Row k writes its own number until it ends, after 10, 40, 70, 100 tokens or never."""
    lengths = {4: 10, 5: 100, 6: 40, 7: 999, 8: 70}

    class Scripted:
        device, generation_config = torch.device("cpu"), SimpleNamespace(max_new_tokens=120)

        def generate(self, ids, attention_mask, max_new_tokens, **cache):
            places = torch.arange(ids.shape[1] - 2, ids.shape[1] - 2 + max_new_tokens)
            own = ids[:, 1:2].expand(-1, max_new_tokens)
            ends = torch.tensor([lengths[int(number)] for number in ids[:, 1]])[:, None]
            new = torch.where(places < ends, own, torch.where(places == ends, 1, 0))
            assert attention_mask.shape == ids.shape and attention_mask[:, 1:].all()
            return torch.cat([ids, new], 1)

    Scripted.generation_config.eos_token_id = [1]
    found = lopti.generate_in_stretches(Scripted(), TOKENIZER, [[3, k] for k in lengths])
    assert found == [[k] * 120 if n > 120 else [k] * n + [1] for k, n in lengths.items()]


# ------------------------------------------------------------------------------ the update


def updated(checkpointed=False, family="Llama"):
    """The model after one training step on a fixed rollout, and the statistics of it."""
    model, args = random_model(family), arguments("--mini-batch-size 4")
    if checkpointed:
        lopti.checkpoint_layers(model)
    rollout = random_rollout(model)
    rollout.old_logprobs = lopti.score(model, rollout, args)[0]
    torch.manual_seed(0)
    advantages = lopti.group_advantages(torch.randn(len(rollout.mask)), 4)
    rollout.advantages = advantages[:, None] * rollout.mask
    rollout.ref_logprobs = rollout.old_logprobs + 0.3 * torch.randn(rollout.mask.shape)
    optimizer = lopti.make_optimizer(model, args)
    with torch.no_grad():  # as a user's reward may leave it
        return model, lopti.update(model, optimizer, rollout, rollout.mask, args)


def test_non_finite_steps_are_left_out_and_counted(monkeypatch):
    factors, original = iter([1.0, math.nan, 1.0]), lopti.kl_estimate
    monkeypatch.setattr(lopti, "kl_estimate", lambda *x: original(*x) * next(factors))
    model, stats = updated()
    assert (stats["optimizer_steps"], stats["nonfinite_steps"]) == (2, 1)
    assert torch.isfinite(weights(model)).all()


@pytest.mark.parametrize("kl_coef", [0.001, 0])
def test_no_padding_is_read_and_no_logits_are_computed_in_vain(kl_coef):
    """All rows are scored, then those with a token to update are read again, and only for that.

    With β = 0 only those with advantages.
    """
    args, read, scored = arguments(f"--tokens-per-microbatch 1 --kl-coef {kl_coef}"), [], []
    model = random_model()
    rollout = random_rollout(model)
    tokens = rollout.mask & (rollout.ids % 5 == 0)
    with_advantage = rollout.lengths % 2
    busy = tokens.any(1).int() * (1 if kl_coef else with_advantage)
    first, last, caches = model.get_input_embeddings(), model.get_output_embeddings(), []
    first.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].numel()))
    last.register_forward_hook(lambda *call: scored.append(call[2].numel() // len(TOKENIZER)))
    model.register_forward_hook(lambda *call: caches.append(call[2].get(lopti.CACHE)))
    rollout.old_logprobs = rollout.ref_logprobs = lopti.score(model, rollout, args)[0]
    rollout.advantages = 1.0 * rollout.mask * with_advantage[:, None]
    lopti.update(model, lopti.make_optimizer(model, args), rollout, tokens, args)
    assert 0 < busy.sum() < len(busy) and not any(caches)
    assert sum(read) == (rollout.lengths * (1 + busy)).sum()
    assert sum(scored) == rollout.mask.sum() + (tokens * busy[:, None]).sum()


@pytest.mark.parametrize("family", ["GPT2", "OPT"])  # which have dropout
def test_gradient_checkpointing_changes_memory_and_nothing_else(family, monkeypatch, recwarn):
    """The same bits by two forward passes of each layer, without dropout or a warning."""
    calls = []
    look = lambda result, inputs, *_: calls.append(inputs.requires_grad)
    spy(monkeypatch, torch.nn.functional, "layer_norm", look)
    (plain, stats), plain_calls = updated(False, family), calls.copy()
    calls.clear()
    checkpointed, same_stats = updated(True, family)
    # 3 mini-batches × 2 layers × 2 layer norms
    assert len(calls) == len(plain_calls) + 12
    assert torch.equal(weights(plain), weights(checkpointed)) and stats == same_stats
    assert not any(part.training for part in checkpointed.modules()) and not recwarn.list


# -------------------------------------------------------------------------- training and evaluation

SOLUTIONS = {"Lily": "", "Zoey is a knight": "1", "Liam is a knave or": "22"}  # of three prompts


def vowels_modulo_3(completions, solution, **columns):
    """A reward that any response can earn, and another one after each solution."""
    counts = [sum(map(text.count, "aeiou")) for text in completions]
    return [float((count + len(truth)) % 3) for count, truth in zip(counts, solution)]


def plain_advantages(values, rows, args):
    if args.advantage == "grpo":
        return golden.group_advantages({"group_size": args.group_size, "rewards": values})
    of_tokens = [value for value, (_, response) in zip(values, rows) for _ in response]
    scale = math.sqrt(statistics.variance(of_tokens) + 1e-8)
    return [(value - statistics.mean(of_tokens)) / scale for value in values]


def plain_kept(policy, rows, advantages, args):
    """Which tokens of a mini-batch STAPO or 80/20 keep, by the policy: a mask for each response."""
    settings = args.temperature, args.min_p
    entropies = [plain_entropy(plain_distribution(policy, *row, *settings)) for row in rows]
    entropies = [values.detach().round(decimals=9) for values in entropies]
    if args.top_entropy:
        falling = sorted(torch.cat(entropies).tolist(), reverse=True)
        bound = falling[round(args.top_entropy * len(falling)) - 1]
        return [values >= bound for values in entropies]
    tau = [STAPO["tau_p"] if args.stapo and a > 0 else 0 for a in advantages]
    pi = [plain_logprobs(policy, row, *settings).exp() for row in rows]
    unlikely = [values < limit for values, limit in zip(pi, tau)]
    candidates = torch.cat([x[y] for x, y in zip(entropies, unlikely)]).tolist()
    bound = golden.quantile(candidates, STAPO["quantile"]) if candidates else 0
    return [~(x & (y < bound)) for x, y in zip(unlikely, entropies)]


def plain_batch_metrics(policy, rows, values, old, ref, args):
    """What metrics.jsonl says of a rollout batch, before its update."""
    lengths = [len(response) for _, response in rows]
    groups = [values[start : start + 4] for start in range(0, len(values), 4)]
    distributions = [plain_distribution(policy, *row, args.temperature, args.min_p) for row in rows]
    old, ref = (torch.cat(values).tolist() for values in (old, ref))
    kl = [golden.token_terms(x, x, y, 0, vars(args))[1] for x, y in zip(old, ref) if x > -math.inf]
    return {
        "reward": statistics.mean(values),
        "reward_std": statistics.mean(map(statistics.stdev, groups)),
        "frac_reward_zero_std": statistics.mean(len(set(group)) == 1 for group in groups),
        "accuracy": statistics.mean(value >= 1 for value in values),
        "completions/mean_length": statistics.mean(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": statistics.mean(int(row[1][-1]) not in ENDS for row in rows),
        "entropy": sum(plain_entropy(each).sum().item() for each in distributions) / sum(lengths),
        "low_probability_share": statistics.mean(x < math.log(args.eta or 0.5) for x in old),
        "rollout/kl": sum(kl) / sum(lengths),
        "rollout/tokens": sum(lengths),
        **{f"seconds/{phase}": 1 for phase in ("sampling", "rewarding", "scoring", "updating")},
    }


def plain_training(policy, rollouts, stages, args):
    """Train on what was sampled, a token at a time; yields each step's metrics and samples."""
    reference, parameters = copy.deepcopy(policy), list(policy.parameters())
    optimizer = torch.optim.AdamW(parameters, args.learning_rate, weight_decay=args.weight_decay)
    logprobs_of = lambda model, row: plain_logprobs(model, row, args.temperature, args.min_p)
    for step, rollout in enumerate(rollouts, 1):
        rows, counts = plain_rows(rollout), Counter()
        of_stage, norms = ({stage: [] for stage in stages} for _ in range(2))
        prompts = [TOKENIZER.decode(prompt) for prompt, _ in rows]
        texts = [TOKENIZER.decode([x for x in ids.tolist() if x not in ENDS]) for _, ids in rows]
        solutions = list(map(SOLUTIONS.get, prompts))
        values = vowels_modulo_3(texts, solutions)
        with torch.no_grad():
            old, ref = ([logprobs_of(model, row) for row in rows] for model in (policy, reference))
            metrics = plain_batch_metrics(policy, rows, values, old, ref, args)
        advantages = plain_advantages(values, rows, args)
        for stage in stages:
            for start in range(0, len(rows), args.mini_batch_size):
                batch, sums, total = slice(start, start + args.mini_batch_size), Counter(), 0.0
                kept = plain_kept(policy, rows[batch], advantages[batch], args)
                count = int(torch.cat(kept).sum())
                counts["masked_tokens"] += len(torch.cat(kept)) - count
                for i, chosen in enumerate(kept, start):
                    if advantages[i] == 0 == args.kl_coef:
                        continue  # a response without a gradient
                    new, is_low = logprobs_of(policy, rows[i]), old[i].exp() < args.eta
                    chosen &= {"all": chosen, "low": is_low, "high": ~is_low}[stage]
                    chosen &= (old[i] > -math.inf) & (new > -math.inf)  # in the safe vocabulary
                    fixed = old[i][chosen].tolist(), ref[i][chosen].tolist()
                    for x, y, z in zip(new[chosen], *fixed):
                        advantage = (args.alpha * math.exp(y) + 1 - args.alpha) * advantages[i]
                        inputs = x.item(), y, z, advantage, vars(args)
                        loss, kl, clip, slope = golden.token_terms(*inputs)
                        total += slope * x / count
                        terms = {"policy_loss": loss, "kl": kl, "updated_share": 1}
                        terms |= {f"clip_ratio/{side}_mean": clip == side for side in CLIPS}
                        sums.update({name: term / count for name, term in terms.items()})
                norm = 0.0
                if sums["updated_share"]:
                    total.backward()
                    norm = torch.nn.utils.clip_grad_norm_(parameters, args.max_grad_norm).item()
                counts["optimizer_steps" if norm else "skipped_steps"] += 1
                of_stage[stage].append(sums)
                if norm:
                    optimizer.step()
                    norms[stage].append(norm)
                optimizer.zero_grad()
        for stage, batches in of_stage.items():  # means over its mini-batches, summed over stages
            metrics[f"grad_norm/{stage}"] = statistics.mean(norms[stage])
            for name in set().union(*batches):
                mean = statistics.mean(sums[name] for sums in batches)
                metrics[name] = metrics.get(name, 0.0) + mean
        for name in ("optimizer_steps", "skipped_steps", "masked_tokens"):
            metrics[name] = counts[name]
        metrics |= {"step": step, "nonfinite_steps": 0}
        metrics["masked_share"] = counts["masked_tokens"] / len(stages) / metrics["rollout/tokens"]
        columns = zip(itertools.repeat(step), prompts, texts, values)
        yield metrics, list(columns)[: 2 * args.group_size : args.group_size]


CLIPS = ("low", "high", "dual")
OFF_DEFAULT = (
    "--steps 2 --prompts-per-step 3 --group-size 4 --max-new-tokens 6 --temperature 0.7 "
    "--mini-batch-size 5 --tokens-per-microbatch 24 --learning-rate 1e-2 --clip-low 0.05 "
    f"--clip-high 0.1 --solved-reward 1 --reward {__name__}:vowels_modulo_3 --sample-batch-size 8 "
    "--save-every 0 "
)
CONSTANTS = {"weight_decay": 0.3, "max_grad_norm": 0.4, "clip_dual": 1.3}
STAPO = {"tau_p": 0.1, "quantile": 0.6}
TRAINING = {  # flags: stages
    "--alpha 0.3 --eta 0.06 --kl-coef 0.5 --min-p 0.05 --passes 2": "low high low high",
    "--alpha 0.9 --eta 0.06 --order high-low --advantage reinforce++ --kl-coef 0": "high low",
    "--eta 0.06 --order high --kl-coef 0.2": "high",
    "--stapo --kl-coef 0.3 --passes 2": "all all",
    "--eta 0.06 --top-entropy 0.4 --kl-coef 0": "low high",
}


def trained(policy, flags, folder, monkeypatch):
    """Train by lopti.py on three prompts; returns the arguments and the lines of metrics.jsonl."""
    args = arguments(OFF_DEFAULT + f"{flags} --name run --output {folder}", **CONSTANTS)
    rows = [data_row(*prompt) for prompt in SOLUTIONS.items()]
    monkeypatch.setattr(lopti, "prepare", lambda args: (policy, TOKENIZER, rows, rows))
    monkeypatch.setattr(lopti, "evaluate", lambda *inputs: ({}, []))
    monkeypatch.setattr(lopti, "report", lambda *inputs: None)
    lopti.train(args)
    return args, read_jsonl(folder / "run" / "metrics.jsonl")


@pytest.mark.parametrize("flags", TRAINING)
def test_training_against_a_plain_loop(flags, monkeypatch, tmp_path):
    """Two steps of `train` against a loop on the sampled ids that calls nothing of lopti.py.

    The weights, and every number of metrics.jsonl; the clock adds one at each look. Nowhere is
    there dropout.
    """
    rollouts, original, clock = [], lopti.sample, itertools.count()

    def recorded(*inputs):  # without min-p: some tokens are not in V_safe
        args = argparse.Namespace(**{**vars(inputs[-1]), "min_p": 0})
        rollouts.append(original(*inputs[:-1], args))
        return rollouts[-1]

    monkeypatch.setattr(lopti, "sample", recorded)
    monkeypatch.setattr(lopti, "stapo_mask", functools.partial(lopti.stapo_mask, **STAPO))
    monkeypatch.setattr(lopti, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    # the rounding of entropies after the same prefix must not decide which are kept
    rounded = lambda logits, of=lopti.entropy: of(logits).round(decimals=9)
    monkeypatch.setattr(lopti, "entropy", rounded)
    policy = random_model(hidden_size=16, eos_token_id=ENDS, attention_dropout=0.5).double()
    policy.lm_head.weight.data.mul_(4)  # π from .004 to .4
    start, plain = copy.deepcopy(policy), copy.deepcopy(policy)
    args, metrics = trained(policy, flags, tmp_path, monkeypatch)
    expected, samples = zip(*plain_training(plain, rollouts, TRAINING[flags].split(), args))
    assert metrics == [pytest.approx(line, rel=1e-3, abs=1e-4) for line in expected]
    kept_samples = [tuple(row.values()) for row in read_jsonl(tmp_path / "run" / "samples.jsonl")]
    assert kept_samples == list(itertools.chain(*samples))
    happens = {name for line in metrics for name, value in line.items() if value}
    assert all(f"clip_ratio/{name}_mean" in happens for name in CLIPS)
    assert ("masked_tokens" in happens) == ("stapo" in flags or "entropy" in flags)
    assert max(x for line in metrics for name, x in line.items() if "grad_norm" in name) > 0.4
    assert 0 < metrics[0]["completions/clipped_ratio"] < 1  # responses of several lengths
    moved = (weights(plain) - weights(start)).norm()
    assert moved > 1 and (weights(policy) - weights(plain)).norm() < 1e-3 * moved


@pytest.mark.parametrize("order", ["low-high", "high-low", "low", "high"])
def test_no_token_on_one_side_of_eta(order, tmp_path, monkeypatch):
    """The empty pass takes no step. Every line has the same keys, also where rewards are equal."""
    values = iter([[0.0, 1.0] * 6, [0.0] * 12])
    monkeypatch.setattr(lopti, "compute_rewards", lambda *inputs: next(values))
    start, model = random_model(), random_model()
    flags = f"--eta 1e-9 --kl-coef 0 --order {order} "
    _, (first, second) = trained(model, flags, tmp_path, monkeypatch)
    for name in order.split("-"):
        assert (first[f"grad_norm/{name}"] > 0) == (name == "high")
    assert torch.equal(weights(model), weights(start)) == (order == "low")
    assert (first["optimizer_steps"] == 0) == (order == "low") and second["optimizer_steps"] == 0
    assert first.keys() == second.keys()


def test_a_bfloat16_checkpoint_without_a_padding_token_or_an_end_of_its_own(tmp_path):
    """Weights become float32. The tokenizer's end is both: prompts with it inside, and padded
    right by other programs, are answered as with the bundled tokenizer."""
    model, tokenizer = random_model(eos_token_id=None).bfloat16(), copy.deepcopy(TOKENIZER)
    tokenizer.pad_token, tokenizer.padding_side = None, "right"
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    model, tokenizer = lopti.load_model(tmp_path, "cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training
    prompts = [f"{prompt}{tokenizer.eos_token}So Lily" for prompt in PROMPTS]
    answers = [sample(model, prompts, each).texts for each in (tokenizer, TOKENIZER)]
    assert tokenizer.pad_token == tokenizer.eos_token and answers[0] == answers[1]


@pytest.mark.parametrize("tied", [False, True])
def test_training_in_bfloat16(tied, tmp_path, monkeypatch):
    """All forward passes are in it, weights and gradients are not; the KL begins at exactly 0.

    The temperature divides logits that are float32 already.
    """
    policy, seen, divided = random_model("Qwen2", tie_word_embeddings=tied), set(), []
    for module in policy.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda *call: seen.add(call[2].dtype))
    policy.lm_head.register_forward_hook(lambda *call: divided.append(call[2].float() / 0.7))
    look = lambda logits, *_: kept.add(torch.equal(logits, divided[-1]))
    spy(monkeypatch, lopti, "token_logits", look)
    kept, before = set(), weights(policy)  # of gradients, weights and log-probabilities
    look = lambda *_: kept.update((gradient(policy).dtype, weights(policy).dtype))
    spy(monkeypatch, torch.nn.utils, "clip_grad_norm_", look)
    spy(monkeypatch, lopti, "token_logprobs", lambda logprobs, *_: kept.add(logprobs.dtype))
    flags = "--dtype bfloat16 --kl-coef 0.1 --steps 1 --mini-batch-size 0 --stapo "
    flags += "--tokens-per-microbatch 9999"
    _, (line,) = trained(policy, flags, tmp_path, monkeypatch)
    assert line["kl"] == 0 < line["grad_norm/all"] and seen == {torch.bfloat16}
    assert kept == {torch.float32, True} and not torch.equal(weights(policy), before)
    assert lopti.make_reference(policy, arguments("--kl-coef 0")) is None


@pytest.mark.parametrize("place", ["cpu", "cuda:1"])
def test_evaluation_counts(place, monkeypatch):
    """'7' when greedy, and in every second sample of the first prompts; of the last, never."""
    levels, truths, seen, forked = ["10", "10", "10", "2", "2"], "77877", [], []
    rows = [{**data_row("?", x), "difficulty": y} for x, y in zip(truths, levels)]

    def fake_sample(model, tokenizer, prompts, group_size, temperature, args):
        seen.append((torch.initial_seed(), group_size, temperature))
        number = torch.arange(len(prompts) * group_size)
        texts = ["no" if temperature and (i % 2 or i > 15) else r"\boxed{7}" for i in number]
        return SimpleNamespace(texts=texts)

    seeds = []  # of all devices, not of the CPU alone
    spy(monkeypatch, torch, "manual_seed", lambda _, seed: seeds.append(seed))
    fork = lambda devices, device_type: nullcontext(forked.extend([devices, device_type]))
    monkeypatch.setattr(lopti, "sample", fake_sample)
    monkeypatch.setattr(torch.random, "fork_rng", fork)
    policy = SimpleNamespace(device=torch.device(place))
    args = arguments("--task math --seed 7 --temperature 0.7")
    table, answered = lopti.evaluate(policy, TOKENIZER, rows, args)
    assert seen == [(8, 1, 0), (8, 4, 1)] and seeds == [8]
    assert forked == [[] if place == "cpu" else [policy.device], policy.device.type]
    assert answered[0][1:3] == [(r"\boxed{7}", 1.0), ("no", 0.0)]
    lines = rewards.TASKS["math"].table_text({"before": table, "after": table}).splitlines()
    assert [re.sub(" +", " ", line).strip() for line in lines] == [
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


# ------------------------------------------------------------------------------ flags and runs

PAPER = {"prompts_per_step": 64, "group_size": 8, "temperature": 0.7, "max_new_tokens": 4096}
PAPER |= {"learning_rate": 1e-6, "mini_batch_size": 256, "clip_low": 0.2, "clip_high": 0.24}
PAPER |= {"kl_coef": 0.001, "clip_dual": 10.0, "weight_decay": 0.01, "max_grad_norm": 1.0}
OURS = {"prompts_per_step": 16, "temperature": 1.0, "max_new_tokens": 256, "mini_batch_size": 64}
OURS |= {"learning_rate": 1e-4, "steps": 24, "alpha": 0, "eta": 0, "passes": 1, "eval_samples": 4}
SETTINGS = {  # of these flags
    "": {**PAPER, **OURS, "solved_reward": 3, "model": str(TINY), "dtype": "float32"},
    "--task math": {"solved_reward": 1, "prompts_per_step": 64, "mini_batch_size": 256},
    f"@{ROOT}/data/kk.flags": {**PAPER, "steps": 351, "task": "kk", "dtype": "bfloat16"},
    f"@{ROOT}/data/math.flags": {**PAPER, "steps": 781, "task": "math", "solved_reward": 1},
}


@pytest.mark.parametrize("flags", SETTINGS)
def test_the_paper_s_and_our_settings(flags):
    args = vars(arguments(flags))
    assert {name: args[name] for name in SETTINGS[flags]} == SETTINGS[flags]
    assert arguments(f"{flags} --steps 9").steps == 9  # a later flag wins


def test_help_names_every_flag_and_the_pages_no_other():
    text = lopti.build_parser().format_help()
    for name in vars(arguments()).keys() - {"weight_decay", "max_grad_norm", "clip_dual"}:
        assert "--" + name.replace("_", "-") in text
    pages = (ROOT / "README.md", ROOT / "data" / "GUIDE.md")
    readme = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    for command in re.findall(r"python lopti\.py[^\n`]*", readme):
        assert all(flag in text for flag in re.findall(r"--[a-z][a-z-]*", command)), command
    for name in re.findall(r"(?<!\.)\b([a-z_]+)\(\)", readme):
        assert any(hasattr(module, name) for module in (lopti, rewards, theory)), name


def test_resume_changes_only_what_does_not_change_the_run(tmp_path, capsys):
    config = vars(arguments("--alpha 0.3"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    free = "--steps 9 --sample-batch-size 1 --tokens-per-microbatch 9 --gradient-checkpointing "
    args = arguments(f"--resume {tmp_path} --save-every 1 --eval-every 2 --device cpu {free}")
    assert sum(value != config[name] for name, value in vars(args).items()) == 8
    assert args.alpha == 0.3
    for flag in ("--alpha 0.3", "--stapo", "--people 2", "--seed 1", "--name n"):
        refusal = refused(capsys, f"--resume {tmp_path} {flag}")
        assert f"cannot change {flag.split()[0][2:]}" in refusal


FOLDER = (
    tempfile.TemporaryDirectory()
)  # of a small model and few rows, so that a run takes a second
SMALL = Path(FOLDER.name)
for part in (random_model(), TOKENIZER):
    part.save_pretrained(SMALL)
for use in ("train", "test"):
    write_jsonl(SMALL / f"{use}.jsonl", read_jsonl(ROOT / "data" / f"kk_{use}.jsonl")[:20])
ROWS = f"--data {SMALL}/train.jsonl --eval-data {SMALL}/test.jsonl --people 2 "
FLAGS = (
    f"--model {SMALL} {ROWS}"
    "--steps 4 --save-every 2 --alpha 0.3 --eta 0.5 --prompts-per-step 2 --group-size 4 "
    "--max-new-tokens 24 --mini-batch-size 4 --eval-size 1 --eval-samples 1 --eval-every 2 "
    f"--reward {__name__}:vowels_modulo_3 --solved-reward 1 "
)
PROCESSES = multiprocessing.get_context("forkserver")  # which imports torch once for all of them
PROCESSES.set_forkserver_preload(["torch", "transformers", "datasets", "lopti"])


def main(flags):
    return lopti.main(flags.split())


def lasting_metrics(folder):
    """The rows of metrics.jsonl without what differs between two runs of the same command."""
    rows = read_jsonl(folder / "metrics.jsonl")
    return [{key: row[key] for key in row if not key.startswith("seconds")} for row in rows]


def assert_same_run(folder, other):
    """The same metrics, samples and evaluations, and the same files in final/, to the last bit."""
    assert lasting_metrics(folder) == lasting_metrics(other)
    names = ["samples.jsonl", "evaluations.jsonl"]
    names += [f"final/{path.name}" for path in (other / "final").iterdir()]
    for name in names:
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """Four steps of AR + Lopti without an interruption."""
    folder, output = tmp_path_factory.mktemp("runs"), io.StringIO()
    with redirect_stdout(output):
        assert main(FLAGS + f"--name finished --output {folder}") == 0
    assert re.search(r"people +prompts +before +after\ngreedy ", output.getvalue())
    return folder / "finished"


@pytest.fixture
def run_copy(finished_run, tmp_path):
    return Path(shutil.copytree(finished_run, tmp_path / "copy"))


def test_what_a_run_tells_at_its_end(capsys):
    """By hand: before and after, the shortest puzzle that became right, first and last numbers."""
    rows = [{"asked": text} for text in ("long, became right", "became right", "was right", "")]
    greedy = lambda *rewards: [("<think></think> b", reward) for reward in rewards]
    tables = [{"2": {"prompts": 4, "greedy": (x, 0, 1), "reward": (x,)}} for x in (0.25, 0.75)]
    evaluations = [
        {"step": step, "table": table, "greedy": answers}
        for step, table, answers in zip((0, 9), tables, (greedy(-3, 0, 3, 0), greedy(3, 3, 3, 0)))
    ]
    steps = [{"accuracy": x, "low_probability_share": x / 2} for x in (0.25, 0.5, 1.0)]
    steps = [{**line, "grad_norm/low": 2 * line["accuracy"]} for line in steps]
    lopti.report({"evaluations": evaluations, "metrics": steps}, rows, arguments())
    text = capsys.readouterr().out
    assert "after 9 steps" in text and re.search(r"greedy +mean +0.25 +0.75\n", text)
    assert "\nbecame right\nbefore: b\nafter:  b\n" in text
    assert "▃▅█" in text and "grad_norm/high" not in text
    found = re.findall(r"^(\S+) +(\S+) → (\S+)$", text, re.MULTILINE)
    assert found == [
        ("accuracy", "0.25", "1.00"),
        ("low_probability_share", "0.12", "0.50"),
        ("grad_norm/low", "0.50", "2.00"),
    ]
    lopti.report({"evaluations": evaluations[:1], "metrics": []}, rows, arguments())
    assert "learned" not in capsys.readouterr().out


def test_what_a_run_leaves_behind(finished_run):
    steps = read_jsonl(finished_run / "metrics.jsonl")
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    config = json.loads((finished_run / "config.json").read_text())
    assert config["alpha"] == 0.3 and config["torch"] == torch.__version__
    assert [row["step"] for row in read_jsonl(finished_run / "evaluations.jsonl")] == [0, 2, 4]
    samples = read_jsonl(finished_run / "samples.jsonl")
    assert [row["step"] for row in samples] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert samples[0]["prompt"] != samples[1]["prompt"]  # of two groups
    before, after = (lopti.load_model(path, "cpu")[0] for path in (SMALL, finished_run / "final"))
    assert not torch.equal(weights(before), weights(after))


@pytest.mark.parametrize("calls", [0, 4, 5, 9])  # of `sample`: check, evaluations, steps
def test_stopped_and_resumed_to_the_last_bit(calls, finished_run, tmp_path, monkeypatch, capsys):
    """Ctrl-C in an evaluation, in a step, after a checkpoint: the same batches, samples, lines."""
    folder, numbers = tmp_path / "stopped", iter([[]] * calls + [[signal.SIGINT]])
    ask = lambda *_: [signal.raise_signal(number) for number in next(numbers, [])]
    spy(monkeypatch, lopti, "sample", ask)
    assert main(FLAGS + f"--name stopped --output {tmp_path}") == 130
    told = capsys.readouterr().err
    monkeypatch.undo()
    if calls == 0:  # no run has begun
        return
    saved = int(re.search(r"--resume \S+ goes on after step (\d)", told)[1])
    assert saved == 2 * (calls > 4) + 2 * (calls > 8)
    with open(folder / "metrics.jsonl", "a") as stream:
        stream.write('{"step": 3')  # torn by a crash
    assert main(f"--resume {folder}") == 0
    assert_same_run(folder, finished_run)


@slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("LOPTI_KILLS", "3"))))
def test_killed_and_resumed_to_the_last_bit(finished_run, tmp_path, seed):
    """SIGKILL at two random moments; the same bits. LOPTI_KILLS=20 for more."""
    folder, rng = tmp_path / "killed", random.Random(seed)
    flags = FLAGS + f"--name killed --output {tmp_path}"
    for _ in range(2):
        process = PROCESSES.Process(target=main, args=(flags,))
        process.start()
        while not (folder / "config.json").exists():
            assert process.is_alive()
            time.sleep(0.01)
        process.join(rng.uniform(0, 2.5))
        process.kill()
        process.join()
        flags = f"--resume {folder}"
    assert main(flags) == 0
    assert_same_run(folder, finished_run)


def refused(capsys, flags):
    """The one sentence with which the program refuses: exit code 2, no traceback."""
    try:
        code = main(flags)
    except SystemExit as stop:  # by argparse
        code = stop.code
    lines = capsys.readouterr().err.strip().splitlines()
    assert code == 2 and len(lines) == 1 and re.match(r"\S+\.py: ", lines[0]), (code, lines)
    return lines[0]


def test_a_damaged_checkpoint_is_named(run_copy, capsys):
    """A lost tensor; a pickle that would run code."""
    path = run_copy / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    del state["policy"]["model.norm.weight"]
    for damaged in (state, {"step": 4, "code": os.system}):
        torch.save(damaged, path)
        assert "checkpoint.pt is damaged" in refused(capsys, f"--resume {run_copy}")


def test_no_room_or_another_process_leaves_the_checkpoint(run_copy, capsys, monkeypatch):
    """A full disk, a full memory: both are told, and what to do."""

    def full(state, path):
        Path(path).write_bytes(b"half a file")
        raise OSError(28, "No space left on device")

    def out_of_memory(*inputs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    checkpoint = (run_copy / "checkpoint.pt").read_bytes()
    for place, name, fails, advice in (
        (torch, "save", full, "--resume goes on"),
        (lopti, "score", out_of_memory, "--tokens-per-microbatch"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fails)
            assert advice in refused(capsys, f"--resume {run_copy} --steps 5")
    assert (run_copy / "checkpoint.pt").read_bytes() == checkpoint
    fcntl = pytest.importorskip("fcntl")  # which locks also against the same process
    with (run_copy / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert "another process" in refused(capsys, f"--resume {run_copy}")
    assert main(f"--resume {run_copy} --steps 5") == 0
    assert torch.load(run_copy / "checkpoint.pt", weights_only=True)["step"] == 5


def test_what_the_seed_seeds(tmp_path, monkeypatch):
    """Training has the seed, every evaluation the next; zeros: two evaluations, no checkpoint."""
    seeds = []
    spy(monkeypatch, lopti, "sample", lambda *_: seeds.append(torch.initial_seed()))
    flags = FLAGS + f"--task math --steps 2 --seed 5 --output {tmp_path} --save-every 0 "
    assert main(flags + "--eval-every 0") == 0
    assert seeds[1:] == [6, 6, 5, 5, 6, 6]  # greedy and sampled, around two steps
    assert not list(tmp_path.glob("*/checkpoint.pt"))


@pytest.mark.parametrize("kind", ["cpu", "xpu", "cuda"])
def test_a_checkpoint_goes_from_one_kind_of_device_to_another(kind, tmp_path, monkeypatch):
    """The random state of a pretended xpu is restored on an xpu only."""
    model, restored = random_model(), []
    get, set_state = lambda device: torch.ones(3), lambda state, device: restored.append(device)
    module = SimpleNamespace(get_rng_state=get, set_rng_state=set_state)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    optimizer, expected = lopti.make_optimizer(model, arguments()), torch.get_rng_state()
    policy = SimpleNamespace(device=torch.device("xpu"), state_dict=model.state_dict)
    log = {"metrics": [{"step": 1}]}
    lopti.save_checkpoint(tmp_path, 4, log, policy, optimizer)
    torch.rand(1)
    policy.device, policy.load_state_dict = torch.device(kind), model.load_state_dict
    assert lopti.load_checkpoint(tmp_path, policy, optimizer) == (4, log)
    assert torch.equal(torch.get_rng_state(), expected)
    assert len(restored) == (kind == "xpu")


def test_eval_only_shows_responses_and_leaves_no_run(tmp_path, capsys, monkeypatch):
    """Tags as the model wrote them, without its end-of-sequence token.

    Zeros: all prompts are evaluated, all at a time; none is sampled and none is shown.
    """
    files, sizes = [ROOT / "data" / "kk_test.jsonl", tmp_path / "few.jsonl"], []
    write_jsonl(files[1], read_jsonl(files[0])[197:203])
    spy(monkeypatch, lopti, "generate_in_stretches", lambda ids, *_: sizes.append(len(ids)))
    flags = f"--eval-only --eval-data {files[1]} --output {tmp_path} "
    assert main(flags + "--show 2 --eval-size 2 --eval-samples 1 --max-new-tokens 150") == 0
    output = capsys.readouterr().out
    shown = re.findall(r"--- .*?meet (\d)", output, re.DOTALL)
    assert shown == ["2", "3"] and output.count(", reward ") == 4 and output.count("(1)") > 2
    assert "<answer>" in output and TOKENIZER.eos_token not in output
    zeros = "--eval-size 0 --sample-batch-size 0 --eval-samples 0 --show 0"
    assert main(flags + "--max-new-tokens 2 " + zeros) == 0
    output = capsys.readouterr().out
    assert sizes[-1] == 6 and "avg@" not in output and "solution" not in output
    assert list(tmp_path.iterdir()) == files[1:]


# -------------------------------------------------------------------- errors that a user will make


@pytest.fixture(scope="module")
def places(tmp_path_factory, finished_run):
    """Files and folders with something wrong, by name."""
    folder = tmp_path_factory.mktemp("wrong")
    questions = ("Who? " * 1024, "Is she? " * 1024)
    write_jsonl(folder / "long.jsonl", [{"quiz": quiz, **KK_TRUTH} for quiz in questions])
    write_jsonl(folder / "silent.jsonl", [{"prompt": " ", "solution": LILY}])
    good = json.dumps({"quiz": "Who?", **KK_TRUTH})
    (folder / "broken.jsonl").write_text(f'{good}\n\n{{"quiz": "torn"\n{good}\n')
    (folder / "notes.txt").write_text(good)
    (folder / "empty.jsonl").touch()
    rope = {"rope_type": "dynamic", "rope_theta": 9, "factor": 4}
    long = {**rope, "rope_type": "longrope", "original_max_position_embeddings": 64}
    long |= {"short_factor": [1] * 8, "long_factor": [4] * 8}
    changes = {  # of config.json
        "mistyped": {"model_type": "qwen2"},  # which has biases
        "short": {"max_position_embeddings": 64},
        "narrow": {"vocab_size": 304},  # one less than the prompts need
        "stretched": {"rope_parameters": rope, "max_position_embeddings": 64},
        "longrope": {"rope_parameters": {"full_attention": long, "sliding_attention": {}}},
        "own": {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}},
        "weightless": {},
    }
    config = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    for name, changed in changes.items():
        shutil.copytree(TINY, folder / name)
        (folder / name / "config.json").write_text(json.dumps({**config, **changed}))
    (folder / "own" / "mine.py").write_text("1 / 0  # code of its own, which is not run")
    tensors = load_file(TINY / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:304].clone()
    save_file(tensors, folder / "narrow" / "model.safetensors", metadata={"format": "pt"})
    (folder / "weightless" / "model.safetensors").unlink()
    flags = {"wrong": "--steps 9 # nine\n\n--alpha 2", "torn": "--steps # how many"}
    for name, text in flags.items():
        (folder / f"{name}.flags").write_text(text)
    ended = shutil.copytree(finished_run, folder / "ended")  # as --save-every 0 leaves a run
    (ended / "checkpoint.pt").unlink()
    shutil.copytree(TINY, folder / "adapter")
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    named = {path.stem: path for path in folder.iterdir()}
    return named | {"run": finished_run, "runs": finished_run.parent}


def exits(completions, **columns):
    sys.exit(0)


NAMED = ["--alpha 1.5", "--group-size 1", "--people 9", "--learning-rate inf", "--alpha nan"]
NAMED += ["--device hpu", "--model no/such-model-anywhere"]
NAMED += [f"--mini-batch-size {10**20}"]
ERRORS = {flags: flags.split()[1 if "model" in flags else 0] for flags in NAMED}
ERRORS |= {  # the flags: what the sentence must name
    **dict.fromkeys(("--order low --eta 0", "--order high-low --eta 0"), "--eta"),
    "--data {silent}": "silent.jsonl, see data/GUIDE.md: 1 rows, 1 left out: 1 without a prompt",
    "--data {empty}": "no rows",
    "--data {notes}": "jsonl, json, csv or parquet",
    "--eval-only --data {empty} --eval-data=": "instead of --data",
    **{f"--model {{{name}}}": name for name in ("weightless", "mistyped", "adapter")},
    "@{wrong}": "argument --alpha: must lie between 0 and 1, not 2",
    "@{torn}": "argument --steps",
    "@nothing.flags": "nothing.flags",
    # beyond its length π of a stretched one depends on the rest of the batch
    **{f"--model {{{x}}}": "--max-new-tokens" for x in ("short", "stretched", "longrope")},
    "--data {long} --people 1 2 --max-prompt-length 9999": "--max-new-tokens",
    "--model {narrow}": "304 embeddings, none for token 30",
    "--model {own}": "custom code",
    "--eval-data {broken}": "line 3",
    "--reward nothing_there:f": "nothing_there",
    "--reward math:pi": "must be callable",
    "--solved-reward nan": "--solved-reward",
    f"--reward {__name__}:exits": "exits",
    "--output {empty}": "empty.jsonl",
    "--name finished --output {runs}": "--resume",
    "--resume {runs}": "--resume",
    "--resume {ended} --steps 9": "final",  # nothing is deleted
}


@pytest.mark.parametrize("flags", ERRORS)
def test_errors_end_in_one_sentence_that_names_what_to_change(flags, places, tmp_path, capsys):
    before = {path: path.read_bytes() for path in places["runs"].parent.rglob("*.json*")}
    all_flags = flags.format(**places)
    if "--resume" not in flags:  # a small run in another place, where it is not refused
        all_flags = FLAGS + f"--steps 1 --name run --output {tmp_path / 'runs'} " + all_flags
    assert ERRORS[flags] in refused(capsys, all_flags)
    assert ("exits" in flags) == (tmp_path / "runs").exists()  # all others before training
    assert before == {path: path.read_bytes() for path in before}


# ------------------------------------------------------------------------------ other models

DECODER = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 64}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
TUNED = {"attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 0.5, "head_dim": 16}
TUNED |= {"no_rope_layers": [0, 0], "num_local_experts": 2, "intermediate_size_mlp": 64}
RIGHT = {**MODELS, "experts": {"family": "Mixtral", **MOE}, "learnt positions": {"family": "OPT"}}
WRONG = {  # what is drawn is not what is scored
    "positions counted in the cache": {"family": "Bart", **DECODER, "is_decoder": True},
    "positions counted in the padded row": {"family": "Roberta", "is_decoder": True},
    "temperature by position": {"family": "Llama4Text", **TUNED},
    "an encoder": {"family": "Bert"},
    "a state": {"family": "Rwkv"},
    "not a number": {},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_a_model_is_sampled_from_as_it_is_scored_or_refused(name, dtype, tmp_path):
    model = random_model(**{**RIGHT, **WRONG}[name], max_position_embeddings=512)
    if name == "not a number":
        model.lm_head.weight.data[7] = math.nan
    if name == "experts":  # their load balancing is off while we sample and train
        for part in (model, TOKENIZER):
            part.save_pretrained(tmp_path)
        model, _ = lopti.load_model(tmp_path, "cpu")
    rows = [data_row(prompt) for prompt in PROMPTS]
    expected = nullcontext()
    if name in WRONG:
        expected = pytest.raises(lopti.UserError, match=r"what was sampled: .* differ by [\dn]")
    with expected:
        lopti.check_model(model, TOKENIZER, rows, arguments(dtype=dtype, model="it"))


def test_what_cannot_be_trained_or_saved_is_refused_before_training(monkeypatch, tmp_path):
    model, rows = random_model(), [data_row(PROMPTS[0])]
    monkeypatch.setattr(model.config, "save_pretrained", exits)
    with pytest.raises(lopti.UserError, match="it cannot be trained"):
        lopti.check_model(model, TOKENIZER, rows, arguments(model="it"))

    def frozen(*inputs, original=AutoModelForCausalLM.from_pretrained, **options):
        model, report = original(*inputs, **options)
        model.lm_head.weight.requires_grad_(False)
        return model, report

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", frozen)
    with pytest.raises(lopti.UserError, match="quantized or frozen"):
        lopti.load_model(TINY, "cpu")
    monkeypatch.undo()
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # for which the model has no embedding
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    assert lopti.load_model(tmp_path, "cpu")[1].pad_token == TOKENIZER.eos_token


def test_examples_in_docstrings():
    result = doctest.testmod(lopti)
    assert result.attempted and not result.failed
