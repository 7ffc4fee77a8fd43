"""Tests of lopti.py and rewards.py: a section for each of theirs, in their order.

    python -m pytest -q                  # the quick tests
    LOPTI_ALL=1 python -m pytest -q      # all

The equations are compared with numbers that were worked out by hand, in the examples of docstrings,
and with golden.json of data/ports. A training step is compared with a second implementation,
`plain_steps`, which computes one token at a time and uses nothing of lopti.py.
"""

import copy
import doctest
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import sys
from dataclasses import asdict, fields
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace
from unittest import mock
from unittest.mock import Mock

import datasets
import huggingface_hub.constants
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.cache_utils import DynamicLayer

ROOT = Path(__file__).resolve().parent
sys.path.append(str(ROOT / "data" / "ports"))

import check_port

import lopti
import rewards

TOKENIZER = AutoTokenizer.from_pretrained(ROOT / "data" / "tiny")
PROMPTS = ["Zoey is a knight or Liam is a knave. So who is a knight?", "Liam is a knave", "Lily"]
ENDS = [1, *range(40, 80)]  # of models that are to end their responses early

huggingface_hub.constants.HF_HUB_OFFLINE = True  # no test asks the hub
torch.set_num_threads(1)  # with two the child that a test forks hangs


def settings_of(flags=""):
    return lopti.parse_arguments(flags.split())


def exit_code(flags):
    """Runs the program, and returns its exit code, also where argparse ends it."""
    try:
        return lopti.main(flags.split())
    except SystemExit as stop:
        return stop.code


def watch(monkeypatch, place, name):
    """Records the calls of a function from now on."""
    mock = Mock(wraps=getattr(place, name))
    monkeypatch.setattr(place, name, mock)
    return mock


def random_model(family="Llama", ends=(1,), **changes):
    """A small model for the bundled vocabulary. Its random weights are large: π is not uniform."""
    config = {"vocab_size": len(TOKENIZER), "hidden_size": 32, "intermediate_size": 64}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config |= {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None, **changes}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**config))
    model.generation_config = GenerationConfig(eos_token_id=list(ends), pad_token_id=0)
    model.in_bfloat16 = False
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.mul_(6)
    return model.eval()


def save_both(model, tokenizer, folder):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def other_template():
    """A tokenizer whose chat template ends a response with another token, 4, than its own."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = TOKENIZER.chat_template.replace("<|end|>", "<|assistant|>\n")
    return tokenizer


def random_rollout(model, temperature=1.0):
    """12 rows of random lengths, with what the update needs of a Rollout."""
    rng = random.Random(1)
    prompts = [rng.choices(range(5, 308), k=rng.randint(2, 7)) for _ in range(12)]
    responses = [rng.choices(range(5, 308), k=rng.randint(1, 9)) for _ in range(12)]
    ids, mask = lopti.pack(prompts, responses)
    rollout = SimpleNamespace(ids=ids, mask=mask, advantages=mask.float())
    rollout.old_logprobs, _ = lopti.response_logprobs(model, ids, mask, temperature, 2048)
    rollout.ref_logprobs = rollout.old_logprobs - 0.3 * mask
    rollout.entropies = torch.zeros_like(rollout.old_logprobs)  # those of the current policy count
    return rollout


def adamw(policy, flags=""):
    """AdamW as a reader would write it."""
    settings = settings_of(flags)
    rate = settings.learning_rate or 1e-4
    return torch.optim.AdamW(policy.parameters(), rate, weight_decay=settings.weight_decay)


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def joined(rows):
    return list(itertools.chain.from_iterable(rows))


# The training step --------------------------------------------------------------------------------

SOLUTIONS = {"Lily": "", "Zoey is a knight": "1", "Liam is a knave or": "22"}  # of three prompts
CLIPS = {name: f"clip_ratio/{name}_mean" for name in ("low", "high", "dual")}
STATISTICS = ("policy_loss", "kl", *CLIPS.values(), "updated_share", "grad_norm", "optimizer_steps")


def example_of(prompt, solution, difficulty="2"):
    """A row as `load_data` makes it."""
    return rewards.Example(prompt, prompt, solution, difficulty, columns={})


EXAMPLES = [example_of(*prompt) for prompt in SOLUTIONS.items()]


def vowels(completions, solution, **columns):
    """A reward of one's own: 1e8 + 0, 1 or 2, by the vowels of the response and by the solution.

    float32 has steps of 8 at 1e8. So only float64 tells these rewards apart.
    """
    values = []
    for text, truth in zip(completions, solution):
        count = sum(text.count(letter) for letter in "aeiou") + len(truth)
        values.append(1e8 + count % 3)
    return values


def plain_rows(ids, mask):
    """The prompt and the response of each row, as ids without padding."""
    rows = []
    for row_ids, row_mask in zip(ids, mask):
        start = row_mask.tolist().index(True)
        rows.append(SimpleNamespace(prompt=row_ids[:start], response=row_ids[row_mask]))
    return rows


def plain_reward(row):
    text = TOKENIZER.decode([token for token in row.response.tolist() if token not in ENDS])
    return vowels([text], [SOLUTIONS[TOKENIZER.decode(row.prompt)]])[0]


def plain_logprobs(model, row, settings):
    """log π of each token of one response, -80 outside V_safe, and the entropies: two of (T,)."""
    logits = model(torch.cat([row.prompt, row.response])[None]).logits[0]
    logits = logits[len(row.prompt) - 1 : -1] / settings.temperature  # (T, V)
    pi = logits.softmax(-1)
    safe = pi >= settings.min_p * pi.amax(-1, keepdim=True)
    logprobs = logits.masked_fill(~safe, -math.inf).log_softmax(-1)
    logprobs = logprobs.masked_fill(~safe, -80.0)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs[range(len(row.response)), row.response], entropies


OFF_DEFAULT = (
    "--group-size 4 --max-new-tokens 6 --temperature 0.7 --mini-batch-size 5 --max-grad-norm 0.4 "
    "--tokens-per-microbatch 24 --learning-rate 1e-2 --weight-decay 0.3 --clip-low 0.05 "
    f"--clip-high 0.1 --clip-dual 1.3 --sample-batch-size 8 --reward {__name__}:vowels "
    "--solved-reward 1 "
)
TRAINING = {  # flags: the tokens of each pass
    "--alpha 0.3 --eta 0.06 --kl-coef 0.5 --min-p 0.03 --passes 2": "low high low high",
    "--alpha 0.9 --eta 0.06 --order high-low --advantage reinforce++ --kl-coef 0": "high low",
    "--kl-coef 0.2 --passes 2": "all all",
}


def plain_advantages(rewards, lengths, settings):
    """Â of Eq. 1, or of REINFORCE++, which compares the rewards of all tokens of the batch."""
    advantages = []
    for i, reward in enumerate(rewards):
        first = i - i % settings.group_size
        compared = rewards[first : first + settings.group_size]
        if settings.advantage == "reinforce++":
            compared = joined([each] * length for each, length in zip(rewards, lengths))
        advantages.append((reward - mean(compared)) / (stdev(compared) + 1e-6))
    return advantages


def plain_steps(policy, reference, optimizer, rows, passes, settings):
    """Steps 3 to 7 of the method, token t of response i at a time, without masks and micro-batches.

    Yields what each optimizer step should report.
    """
    old = [plain_logprobs(policy, row, settings)[0].detach() for row in rows]
    ref = [plain_logprobs(reference, row, settings)[0].detach() for row in rows]
    lengths = [len(row.response) for row in rows]
    advantages = plain_advantages([plain_reward(row) for row in rows], lengths, settings)
    size = settings.mini_batch_size
    for name in passes:
        for start in range(0, len(rows), size):
            mini_batch = range(len(rows))[start : start + size]
            tokens = [(i, t) for i in mini_batch for t in range(lengths[i])]
            count = len(tokens)  # N
            new = {i: plain_logprobs(policy, rows[i], settings)[0] for i in mini_batch}
            total = 0 * new[start].sum()
            report = dict.fromkeys(STATISTICS, 0.0)
            for i, t in tokens:
                pi = math.exp(old[i][t])
                if name != "all" and (pi < settings.eta) != (name == "low"):
                    continue  # it belongs to the other pass of Lopti
                advantage = (settings.alpha * pi + 1 - settings.alpha) * advantages[i]
                ratio = (new[i][t] - old[i][t]).exp()
                clipped = min(max(ratio, 1 - settings.clip_low), 1 + settings.clip_high)
                loss = -min(ratio * advantage, clipped * advantage)
                if advantage < 0:
                    loss = min(loss, -settings.clip_dual * advantage)
                difference = min(max(ref[i][t] - new[i][t], -5), 5)
                kl = min(math.e**difference - difference - 1, 10) * (settings.kl_coef > 0)
                total = total + (loss + settings.kl_coef * kl) / count
                happened = {"policy_loss": loss, "kl": kl, "updated_share": 1}
                happened[CLIPS["low"]] = advantage < 0 and ratio < 1 - settings.clip_low
                happened[CLIPS["high"]] = advantage > 0 and ratio > 1 + settings.clip_high
                happened[CLIPS["dual"]] = advantage < 0 and ratio > settings.clip_dual
                for statistic, value in happened.items():
                    report[statistic] += torch.as_tensor(value).item() / count
            total.backward()
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), settings.max_grad_norm)
            if norm > 0:
                optimizer.step()
            optimizer.zero_grad()
            yield report | {"grad_norm": float(norm), "optimizer_steps": float(norm > 0)}


@pytest.mark.parametrize("flags", TRAINING)
def test_training_step_against_a_plain_second_implementation(flags, monkeypatch):
    """Two training steps compute what `plain_steps` computes from the same responses.

    Compared are rewards, log π and entropies, what every optimizer step reports, and the weights.
    How to sample, and in what parts to compute, is what the flags say.
    """
    sampled = watch(monkeypatch, lopti, "sample")
    parts = watch(monkeypatch, lopti, "micro_batches")
    settings = settings_of(OFF_DEFAULT + flags)
    passes = TRAINING[flags].split()
    policy = random_model(ends=ENDS, hidden_size=16, attention_dropout=0.5).double()
    policy.lm_head.weight.data.mul_(4)  # π from 0.004 to 0.4
    start = weights(policy)
    plain = copy.deepcopy(policy)
    reference = copy.deepcopy(policy)
    optimizer = lopti.new_optimizer(policy, settings)
    plain_optimizer = adamw(plain, OFF_DEFAULT + flags)
    happened = set()
    for _ in range(2):
        with lopti.safe_vocabulary([policy, reference], settings.min_p, settings.temperature):
            rollout, updates = lopti.training_step(
                policy, reference, optimizer, TOKENIZER, EXAMPLES, settings
            )
        mask = rollout.mask
        rows = plain_rows(rollout.ids, mask)
        assert rollout.rewards.tolist() == [plain_reward(row) for row in rows]
        logprobs, entropies = zip(*[plain_logprobs(plain, row, settings) for row in rows])
        assert (rollout.old_logprobs[mask] - torch.cat(logprobs)).abs().max() < 1e-3
        assert (rollout.entropies[mask] - torch.cat(entropies)).abs().max() < 1e-3
        assert not rollout.old_logprobs[~mask].any()
        assert not rollout.entropies[~mask].any()
        steps = plain_steps(plain, reference, plain_optimizer, rows, passes, settings)
        assert [name for name, _ in updates] == passes
        for result, expected in zip(joined(of for _, of in updates), steps, strict=True):
            assert result == pytest.approx(expected, rel=1e-3, abs=1e-5)
            happened |= {name for name, value in result.items() if value}
    assert set(CLIPS.values()) <= happened  # every clip was active somewhere
    assert sampled.call_args.args[3:] == (0.7, 6, 8)  # T_s, most tokens, responses at a time
    assert {call.args[2] for call in parts.call_args_list} == {24}  # tokens
    moved = (weights(plain) - start).norm()
    assert moved > 1
    assert (weights(policy) - weights(plain)).norm() < 1e-3 * moved


# 1. Sampling, 11. Generation ----------------------------------------------------------------------


def sample(model, tokenizer=TOKENIZER, prompts=PROMPTS, temperature=0.0, limit=40, size=0):
    return lopti.sample(model, tokenizer, prompts, temperature, limit, size)


@pytest.mark.parametrize("temperature, min_p", [(1.0, 0.0), (0.7, 0.0), (0.8, 0.3)])
def test_samples_come_from_the_distribution_that_is_scored(temperature, min_p, tmp_path):
    """Tokens are drawn from the π that the update uses, whatever the model's own options say.

    The first tokens of 4,000 samples are compared with π by a chi-squared test.
    """
    save_both(random_model(), TOKENIZER, tmp_path)
    own = {"eos_token_id": 1, "do_sample": True, "top_k": 20, "top_p": 0.8, "temperature": 0.1}
    own |= {"repetition_penalty": 1.8, "min_p": 0.5, "suppress_tokens": list(range(20, 60))}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    model, tokenizer = lopti.load_model(tmp_path, "cpu")
    model.generation_config.update(top_p=0.8)  # as of a model that was loaded otherwise
    torch.manual_seed(0)
    every_token = torch.arange(len(TOKENIZER))[:, None].tolist()
    scored = lopti.pack([TOKENIZER("Lily said").input_ids] * len(every_token), every_token)
    with lopti.safe_vocabulary([model, None], min_p, temperature):
        ids, *_ = sample(model, tokenizer, ["Lily said"] * 4000, temperature, limit=1)
        logprobs, _ = lopti.response_logprobs(model, *scored, temperature, 2048)
    pi = logprobs[:, -1].exp()
    assert pi.sum().item() == pytest.approx(1, abs=1e-4)
    counts = torch.bincount(ids[:, -1], minlength=len(TOKENIZER))
    common = (pi > 0.002) | (pi < 1e-30)
    assert (pi < 1e-30).any() == (min_p > 0)
    expected = 4000 * pi[common] + 1e-6
    chi_squared = ((counts[common] - expected) ** 2 / expected).sum()
    degrees = int((pi > 0.002).sum()) - 1
    assert degrees > 1
    assert chi_squared < degrees + 5 * math.sqrt(2 * degrees)


WINDOW = {"sliding_window": 8, "head_dim": 16}  # every other layer of Gemma 2 has it


@pytest.mark.parametrize("family, changes", [("Llama", {}), ("Qwen2", {}), ("Gemma2", WINDOW)])
@pytest.mark.parametrize("ends", [[1], ENDS])
def test_greedy_responses_are_those_of_generate(family, changes, ends, monkeypatch):
    """Every response is the one that `model.generate` gives to its prompt alone.

    Left padding, stretches of 32 tokens and rows that have ended change no token, nor does a
    padding token that was itself sampled, the tokenizer's own first token, or an option of the
    model. A batch reads each prompt once, all of it but its last token: the third batch, of one
    token each, reads nothing.
    """
    model = random_model(family, ends, **changes)
    options = GenerationConfig(do_sample=False, pad_token_id=0, max_new_tokens=40)
    options.eos_token_id = ends
    alone = []  # prompts and responses
    for prompt in PROMPTS:
        ids = TOKENIZER(prompt, return_tensors="pt").input_ids
        alone.append(model.generate(ids, generation_config=options)[0].tolist())
    model.generation_config.update(pad_token_id=alone[0][-33], repetition_penalty=1.8)
    tokenizer = copy.deepcopy(TOKENIZER)
    first = TemplateProcessing("<|end|> $A", special_tokens=[("<|end|>", 1)])
    tokenizer._tokenizer.post_processor = first
    calls = watch(monkeypatch, lopti, "generate").call_args_list
    inner_calls = watch(monkeypatch, model, "generate").call_args_list
    prompts = lopti.repeat(PROMPTS, 4)
    sampled, mask, _, truncated = sample(model, tokenizer, prompts, size=5)
    assert [len(call.args[1]) for call in calls] == [5, 5, 2]
    assert calls[1].args[4] == "sampling responses 6 to 10 of 12"  # is shown while it samples
    read = [call.args[0].shape for call in inner_calls if "do_sample" not in call.kwargs]
    assert read == [(2, 15), (2, 3)]
    layers = inner_calls[-1].kwargs[lopti.CACHE].layers  # those with a window keep no more
    assert [layer.is_sliding for layer in layers] == [family == "Gemma2", False]
    for i, row in enumerate(plain_rows(sampled, mask)):
        assert row.prompt.tolist() == TOKENIZER(PROMPTS[i // 4]).input_ids
        assert [*row.prompt, *row.response] == alone[i // 4]
        assert truncated[i] == (alone[i // 4][-1] not in ends)


def test_a_preallocated_layer_holds_what_that_of_hf_holds_and_seldom_copies_it():
    """Its keys and values are those of HF's layer, but it copies them once in 32 tokens."""
    layer = lopti.PreallocatedLayer()
    plain = DynamicLayer()
    copied = []  # at how many tokens
    for count in [5, *[1] * 70, 3, 70, 1]:
        keys = torch.randn(4, 2, count, 3)  # (rows, heads, new tokens, size)
        values = torch.randn(4, 2, count, 6)
        before = layer.keys
        for ours, expected in zip(layer.update(keys, values), plain.update(keys, values)):
            assert torch.equal(ours, expected)
        if layer.keys is not before:
            copied.append(layer.get_seq_length())
    assert copied == [5, 6, 39, 72, 148]


def test_which_tokens_end_a_response():
    """A response ends with the tokenizer's or the model's end token, or with that of the template.

    The template's is what it writes directly after a response. Ordinary words end no response.
    """
    model = random_model(ends=[3, 40])  # 40 is a word: Llama's default is 2
    assert lopti.end_token_ids(model, TOKENIZER) == [1, 3]
    tokenizer = other_template()
    assert lopti.end_token_ids(model, tokenizer) == [1, 3, 4]
    tokenizer.chat_template = tokenizer.chat_template.replace("<|assistant|>\n", "\n<|assistant|>")
    assert lopti.end_token_ids(model, tokenizer) == [1, 3]
    model.generation_config.eos_token_id = 0
    assert lopti.end_token_ids(model, TOKENIZER) == [0, 1]
    tokenizer = other_template()
    tokenizer.eos_token = None
    model.generation_config.eos_token_id = None
    assert lopti.end_token_ids(model, tokenizer) == [4]


def test_every_end_token_ends_a_response_and_belongs_to_it(flags, tmp_path, monkeypatch):
    """A response stops at the first end token, of whichever kind, and then leaves the batch.

    The end token is in its ids, but not in its text, and the tokenizer cleans up no spaces. This
    also holds for a trained model that is loaded from final/.
    """
    tokenizer = other_template()
    tokenizer.clean_up_tokenization_spaces = True
    base = save_both(random_model(ends=[3]), tokenizer, tmp_path / "base")
    assert exit_code(f"{flags} --model {base} --steps 1 --output {tmp_path}/run") == 0
    model, tokenizer = lopti.load_model(tmp_path / "run" / "final", "cpu")
    calls = watch(monkeypatch, model, "generate").call_args_list
    torch.manual_seed(0)
    prompts = lopti.repeat(PROMPTS[:2], 128)
    sampled, mask, texts, truncated = sample(model, tokenizer, prompts, 2.0, limit=60)
    unfinished = int((mask.sum(1) > lopti.STRETCH).sum())
    assert [len(call.args[0]) for call in calls] == [2, 256, unfinished]
    last = set()
    for row, is_cut_off, text in zip(plain_rows(sampled, mask), truncated, texts):
        ids = row.response.tolist()
        if not is_cut_off:
            last.add(ids.pop())
        assert not {1, 3, 4} & set(ids)
        assert len(ids) == 60 or not is_cut_off
        assert text == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert last == {1, 3, 4}
    assert text != tokenizer.decode(ids)
    *_, truncated = sample(random_model(ends=range(len(TOKENIZER))), limit=1)  # ends at the limit
    assert not truncated.any()


# 3. Log-probabilities -----------------------------------------------------------------------------


def test_bfloat16_is_for_forward_passes():
    """With --dtype bfloat16 layers compute in bfloat16, and logits and weights stay float32.

    Without it everything is float32.
    """
    policy = random_model("Qwen2", tie_word_embeddings=True)
    policy.in_bfloat16 = True
    settings = settings_of(OFF_DEFAULT + "--stapo")
    optimizer = adamw(policy)
    computed = set()  # dtypes of the layers' outputs
    for module in policy.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _, __, output: computed.add(output.dtype))
    lopti.evaluate(policy, TOKENIZER, EXAMPLES, settings)
    rollout, _ = lopti.training_step(policy, policy, optimizer, TOKENIZER, EXAMPLES, settings)
    assert computed == {torch.bfloat16}
    assert weights(policy).dtype == torch.float32
    logits = lopti.token_logits(policy, rollout.ids, rollout.mask, 1.0)
    divided = lopti.token_logits(policy, rollout.ids, rollout.mask, 0.7)
    assert torch.equal(divided, logits / 0.7)
    computed.clear()
    policy.in_bfloat16 = False
    lopti.response_logprobs(policy, rollout.ids, rollout.mask, 1.0, 2048)
    assert computed == {torch.float32}


# 4 to 7. Advantages, Eq. 4, the split, the update -------------------------------------------------


@pytest.mark.parametrize("reward", [0.1, -3.0, 1e-8, 1e6 + 0.1])
def test_equal_rewards_get_exactly_zero_and_nearly_equal_ones_do_not(reward):
    """A group of equal rewards is not learned from, in spite of rounding errors.

    The mean of seven times 0.1 is not 0.1 in floating point, and Adam would turn the tiny
    advantages into whole steps. Rewards that differ by 1e-5 are not equal.
    """
    values = torch.full((7,), reward, dtype=torch.float64)
    for is_unequal in (False, True):
        values[0] += is_unequal * 1e-5 * (1 + abs(reward))
        assert lopti.group_advantages(values, 7).any() == is_unequal
        counts = torch.arange(1, 8)
        assert lopti.reinforce_pp_advantages(values, counts).any() == is_unequal
    settings = settings_of("--task math")
    assert lopti.is_solved(0.7 + 0.2 + 0.1, settings)  # 0.9999999999999999
    assert not lopti.is_solved(0.99999, settings)


@pytest.mark.parametrize("name", check_port.FUNCTIONS)
@pytest.mark.parametrize("case", check_port.GOLDEN["cases"])
def test_golden_cases(name, case):
    """The functions of Eqs. 1 and 4, and the gradients of the loss, equal golden.json to 1e-9."""
    found, right = check_port.outputs(name, getattr(lopti, name), case)
    assert check_port.first_wrong(found, right, 1e-9) == math.inf


def updated(flags="", model=None):
    """Makes one pass over a fixed rollout. Returns the model, and what `update` returns."""
    model = model or random_model()
    settings = settings_of(flags)
    rollout = random_rollout(model, settings.temperature)
    return model, lopti.update(model, adamw(model), rollout, rollout.mask, settings)


@pytest.mark.parametrize("factor, steps", [(0, 2), (1e-9, 3), (math.nan, 2), (1e30, 2)])
def test_which_gradients_make_a_step(factor, steps):
    """No optimizer step is made where the gradient is 0 or NaN, or its norm infinite (with 1e30).

    A small gradient makes one. The next mini-batches are not affected.
    """
    model = random_model()
    settings = settings_of("--mini-batch-size 4 --kl-coef 0")
    rollout = random_rollout(model)
    rollout.advantages[:4] *= factor  # of the first of three mini-batches
    optimizer = adamw(model)
    first, *others = lopti.update(model, optimizer, rollout, rollout.mask, settings)
    assert [result["optimizer_steps"] for result in (first, *others)] == [steps - 2, 1, 1]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert optimizer.state[model.lm_head.weight]["step"] == steps
    assert (0 < first["grad_norm"] < 1e-6) == (steps == 3)
    assert all(1e-3 < result["grad_norm"] < math.inf for result in others)


def test_the_memory_of_an_update():
    """An update reads one micro-batch at a time, and of it only rows with a token of the pass.

    With --tokens-per-microbatch 1 each row is a micro-batch: it is read without a cache, gives
    logits for its response only, and its backward pass comes before the next row. A mini-batch
    without such a row makes no step.
    """
    model = random_model()
    rollout = random_rollout(model)
    update_mask = rollout.mask.clone()
    update_mask[[0, 1, 2, 3, 5, 6]] = False  # of the first of three mini-batches all
    seen = []

    def look(module, inputs, output):
        assert output.get(lopti.CACHE) is None
        seen.append((inputs[0].shape[1], output.logits.shape[-2]))

    model.register_forward_hook(look)
    model.lm_head.weight.register_hook(lambda _: seen.append("backward"))
    settings = settings_of("--mini-batch-size 4 --tokens-per-microbatch 1")
    first, *others = lopti.update(model, adamw(model), rollout, update_mask, settings)
    read = seen[::2]  # rows 4 and 7, then 8 to 11
    assert seen == joined((row, "backward") for row in read)
    assert read == [(5, 3), (11, 5), (8, 3), (9, 4), (10, 5), (13, 9)]  # tokens, logits
    assert set(first.values()) == {0.0}
    assert first.keys() == others[0].keys()
    assert [result["optimizer_steps"] for result in others] == [1, 1]


# 8. Later methods ---------------------------------------------------------------------------------


def test_which_tokens_the_later_methods_keep():
    """STAPO and 80/20 keep the tokens that a hand picks by their rules, and never padding.

    The first row has Â = 1, and five tokens below τ_p = 0.002, whose 75 % quantile of H is 4.
    """
    mask = torch.tensor([[True] * 7, [True] + [False] * 6])
    pi = torch.tensor([[0.0019] * 5 + [0.0021] * 2, [0.0019] + [1.0] * 6])
    entropies = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 0.5, 0.5], [0.1] + [9.0] * 6])
    kept = [lopti.stapo_mask(pi.log(), entropies, torch.tensor([[1.0], [-1.0]]), mask)]
    kept += [lopti.entropy_mask(entropies, mask, share) for share in (0.35, 0.06)]
    assert not any((each & ~mask).any() for each in kept)
    assert [each[mask].int().tolist() for each in kept] == [
        [0, 0, 0, 1, 1, 1, 1, 1],
        [0, 0, 1, 1, 1, 0, 0, 0],  # round(2.8) tokens
        [0, 0, 0, 0, 0, 0, 0, 0],  # round(0.48) tokens
    ]


SHARES = [  # at T_s = 0.7, 43 of the 67 tokens have π < τ_p, of which STAPO leaves out 32
    ("--top-entropy 0.5 --mini-batch-size 4", 0.5, -1),
    ("--top-entropy 0.001", 0, 0),
    ("--stapo --temperature 0.7", 35 / 67, -1),
    ("--stapo --temperature 0.7 --top-entropy 0.5", 24 / 67, -1),
]


@pytest.mark.parametrize("flags, share, loss", SHARES)
def test_later_methods_divide_by_what_they_keep(flags, share, loss):
    """80/20 and STAPO divide the loss by the number of tokens that they keep, or by 1 if by none.

    With Â = 1 the loss is -N/N, or 0. Both use the current policy and the rows of a mini-batch.
    """
    _, results = updated(f"--kl-coef 0 {flags}")
    for result in results:
        assert result["policy_loss"] == pytest.approx(loss, abs=1e-3)
        assert result["updated_share"] == pytest.approx(share, abs=0.03)


# 9. Settings, and the training loop ---------------------------------------------------------------

DEFAULTS = (
    "--alpha 0 --eta 0 --order low-high --passes 1 --advantage grpo --top-entropy 0 --min-p 0 "
    "--clip-low 0.2 --clip-high 0.24 --clip-dual 10 --kl-coef 0.001 --prompts-per-step 16 "
    "--group-size 8 --temperature 1 --max-prompt-length 400 --max-new-tokens 256 "
    "--sample-batch-size 256 --weight-decay 0.01 --max-grad-norm 1 "
    "--mini-batch-size 64 --tokens-per-microbatch 2048 --steps 24 --model= --task kk --data= "
    "--eval-data= --reward= --dtype float32 --device auto --eval-every 0 "
    "--eval-size 100 --eval-samples 4 --save-every 10 --output= --seed 0"
)


def test_every_default():
    """Every default is what it was: another value would be another method or another run."""
    assert settings_of() == lopti.Settings() == settings_of(DEFAULTS)
    others = {"stapo": False, "gradient_checkpointing": False}
    others |= {"learning_rate": None, "solved_reward": None}
    named = {name.replace("-", "_") for name in re.findall("--([a-z-]+)", DEFAULTS)}
    assert named | others.keys() == {each.name for each in fields(lopti.Settings)}
    assert vars(settings_of()).items() >= others.items()
    assert settings_of("--stapo --task math") == lopti.Settings(stapo=True, task="math")
    lopti.Settings(alpha=1, eta=1, top_entropy=1, kl_coef=0, steps=0, seed=2**32 - 1)  # limits
    for order in ("low-high", "high-low", "low", "high"):
        assert lopti.Settings(eta=0.5, order=order).order == order


def test_defaults_that_depend_on_other_settings(capsys):
    """The lowest reward of a right response goes by the task, the learning rate by the model.

    A reward of one's own has no default. A run prints its learning rate, and which other defaults
    may not suit a model of one's own.
    """
    assert settings_of().resolved().solved_reward == 3
    assert settings_of("--task math").resolved().solved_reward == 1
    assert settings_of("--solved-reward 0").resolved().solved_reward == 0
    with pytest.raises(lopti.UserError, match="--reward needs --solved-reward"):
        settings_of("--reward rewards:math_reward")
    bundled = "The learning rate is 0.0001, the default for the bundled model."
    others = "The learning rate is 1e-06, the paper's; 1e-4 is for the bundled model only."
    given = "The learning rate is 1e-05."
    limit = "--max-new-tokens 256 is made for the bundled model: choose your own."
    steps = "--steps 24 is made for the bundled model: choose your own."
    for words, rate, *lines in (
        ("", 1e-4, bundled),
        ("--model mine --steps 9", 1e-6, others, limit),
        ("--model mine --learning-rate 1e-5 --max-new-tokens 99", 1e-5, given, steps),
    ):
        settings = settings_of(words)
        assert lopti.new_optimizer(random_model(), settings).param_groups[0]["lr"] == rate
        lopti.print_start(Path("run"), 7, SimpleNamespace(device="cpu"), settings)
        start = f"7 of {settings.steps} steps are done, on cpu. The run is in run."
        assert capsys.readouterr().out.splitlines() == [start, *lines]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """The flags of a run: five steps of AR + Lopti with a small model and 20 rows.

    No setting that reaches a library or another file has that one's own default.
    """
    model = random_model()
    model.lm_head.weight.data.mul_(8)  # some tokens on each side of η
    folder = save_both(model, TOKENIZER, tmp_path_factory.mktemp("model"))
    lines = (ROOT / "data" / "kk_train.jsonl").read_text(encoding="utf-8").splitlines(True)
    (folder / "rows.jsonl").write_text("".join(lines[:20]), encoding="utf-8")
    return (
        f"--model {folder} --data {folder}/rows.jsonl --device cpu --reward {__name__}:vowels "
        "--solved-reward 100000001 --steps 5 --save-every 3 --eval-every 2 --eval-samples 3 "
        "--alpha 0.3 --eta 0.5 --temperature 0.8 --min-p 0.1 "
        "--prompts-per-step 3 --group-size 3 --mini-batch-size 5 "
        "--max-new-tokens 12 --learning-rate 2e-3 --weight-decay 0.1 --seed 3 "
    )


@pytest.fixture(scope="module")
def finished_run(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "finished"
    assert lopti.train(settings_of(f"{flags} --output {folder}")) == folder
    return folder


def assert_same_run(folder, other):
    """Both have the same metrics, samples, evaluations and weights, to the last bit."""
    lines = [lopti.read_lines(each / "metrics.jsonl") for each in (folder, other)]
    for mine, its in zip(*lines, strict=True):
        assert mine | {"seconds": 0} == its | {"seconds": 0}
    for name in ("samples.jsonl", "evaluations.jsonl", "final/model.safetensors"):
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name


def test_a_run_is_training_step_in_a_loop(finished_run, flags):
    """A run is what a reader would write with `training_step`: a model, AdamW, and a loop.

    It leaves its settings, metrics, samples, evaluations, a checkpoint and its weights. Samples are
    the first responses to the first two prompts of each step. It evaluates before the first step,
    every two steps, and after the last one. Evaluations do not change the random state, and --min-p
    does not change them.
    """
    settings = settings_of(flags)
    policy, tokenizer = lopti.load_model(settings.model, "cpu")
    reference, _ = lopti.load_model(settings.model, "cpu")
    optimizer = torch.optim.AdamW(policy.parameters(), 2e-3, (0.9, 0.999), 1e-8, 0.1, fused=True)
    examples, held_out = rewards.load_data(settings, tokenizer)
    torch.manual_seed(3)
    samples = []
    for step, batch in enumerate(itertools.islice(rewards.prompt_stream(examples, 3, 3), 5), 1):
        with lopti.safe_vocabulary([policy, reference], min_p=0.1, temperature=0.8):
            rollout, _ = lopti.training_step(
                policy, reference, optimizer, tokenizer, batch, settings
            )
        for prompt, row in ((batch[0].prompt, 0), (batch[1].prompt, 3)):
            line = {"step": step, "prompt": prompt, "response": rollout.texts[row]}
            samples.append(line | {"reward": rollout.rewards[row].item()})
    names = ["checkpoint.pt", "config.json", "evaluations.jsonl", "final", "metrics.jsonl"]
    assert sorted(path.name for path in finished_run.iterdir()) == [*names, "samples.jsonl"]
    config = json.loads((finished_run / "config.json").read_text())
    assert config == asdict(settings_of(f"{flags} --output {finished_run}"))
    assert lopti.read_lines(finished_run / "samples.jsonl") == samples
    metrics = lopti.read_lines(finished_run / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5]
    for name in ("grad_norm/low", "grad_norm/high", "seconds"):
        assert any(line[name] > 0 for line in metrics)
    trained, _ = lopti.load_model(finished_run / "final", "cpu")
    assert torch.equal(weights(trained), weights(policy))
    table, greedy = lopti.evaluate(trained, tokenizer, held_out, settings)
    last = {"step": 5, "table": table, "greedy": greedy}
    evaluations = lopti.read_lines(finished_run / "evaluations.jsonl")
    assert evaluations[-1] == json.loads(json.dumps(last))
    assert [line["step"] for line in evaluations] == [0, 2, 4, 5]


def test_settings_of_zero(flags, tmp_path, monkeypatch):
    """A setting of 0 switches off what its line in --help says.

    --steps 0 only evaluates, here all prompts at a time and greedily. With β = 0 there is no
    reference. The seed of the training is --seed, and that of evaluations is the next number.
    """
    monkeypatch.chdir(tmp_path)
    calls = watch(monkeypatch, lopti, "generate").call_args_list
    zeros = "--steps 0 --eval-size 0 --eval-samples 0 --sample-batch-size 0"
    assert exit_code(f"{flags} {zeros} --data= --max-new-tokens 1") == 0
    assert [len(call.args[1]) for call in calls] == [400]
    (folder,) = (tmp_path / "runs").glob(f"kk-*-{os.getpid()}")  # no two runs share a folder
    assert {path.name for path in folder.iterdir()} == {"config.json", "evaluations.jsonl"}
    (line,) = lopti.read_lines(folder / "evaluations.jsonl")
    assert line["table"].keys() == {"greedy", "cut off"}
    steps = watch(monkeypatch, lopti, "training_step").call_args_list
    seeds = watch(monkeypatch, torch, "manual_seed").call_args_list
    checkpointed = watch(monkeypatch, lopti, "checkpoint_layers")
    zeros = "--kl-coef 0 --eval-every 0 --save-every 0 --mini-batch-size 0"
    others = "--gradient-checkpointing --seed 5 --steps 1 --output run"
    assert exit_code(f"{flags} {zeros} {others}") == 0
    (line,) = lopti.read_lines(Path("run/metrics.jsonl"))
    assert line["optimizer_steps"] == 2  # one of each pass
    assert [call.args[1] for call in steps] == [None]
    assert [call.args[0] for call in seeds] == [5, 6, 6]
    assert checkpointed.called
    assert not Path("run/checkpoint.pt").exists()


# 10. Evaluation -----------------------------------------------------------------------------------


def test_the_accuracy_table_by_hand(monkeypatch):
    """An evaluation's accuracies and intervals are those that a hand counts, by difficulty.

    The greedy responses are all '7'. So is every second sample, but none of the last prompt's.
    Evaluations sample at temperature 1 from the whole vocabulary, and leave the random state alone.
    """
    levels = ["10", "10", "10", "2", "2"]
    examples = [example_of("?", solution, level) for solution, level in zip("77877", levels)]
    # cut off: of the first prompt three samples, of the last one the greedy response
    greedily = (None, None, [r"\boxed{7}"] * 5, torch.arange(5) > 3)
    sampled = (None, None, [r"\boxed{7}", "no"] * 8 + ["no"] * 4, torch.arange(20) < 3)
    sample = Mock(side_effect=[greedily, sampled])
    monkeypatch.setattr(lopti, "sample", sample)
    policy = SimpleNamespace(device=torch.device("cpu"))
    of_training = torch.get_rng_state()
    settings = settings_of(
        "--task math --temperature 0.7 --max-new-tokens 99 --sample-batch-size 9"
    )
    table, greedy = lopti.evaluate(policy, TOKENIZER, examples, settings)
    calls = [(len(call.args[2]), *call.args[3:]) for call in sample.call_args_list]
    assert calls == [(5, 0, 99, 9, "evaluation:"), (20, 1, 99, 9, "evaluation:")]
    assert torch.equal(torch.get_rng_state(), of_training)
    response = {"prompt": "?", "response": r"\boxed{7}"}
    assert greedy == [response | {"reward": float(i != 2)} for i in range(5)]
    assert list(table["greedy"]) == ["10", "2", "all"]
    means = {name: [interval[0] for interval in row.values()] for name, row in table.items()}
    assert means == {
        "greedy": pytest.approx([2 / 3, 1, 4 / 5]),
        "avg@4": pytest.approx([1 / 3, 1 / 4, 0.3]),
        "pass@4": pytest.approx([2 / 3, 1 / 2, 3 / 5]),
        "cut off": pytest.approx([3 / 5 / 3, 1 / 5 / 2, 4 / 5 / 5]),
    }
    assert table["greedy"]["10"][1:] == pytest.approx((0.2077, 0.9385), abs=1e-4)
    interval = lopti.wilson_interval(torch.ones(2))
    assert interval == pytest.approx((1, 0.3424, 1), abs=1e-4)
    assert lopti.accuracy_table(["all"] * 2, {"a": torch.ones(2)}) == {"a": {"all": interval}}


def test_what_a_run_reports_at_its_end(tmp_path, capsys):
    """A run prints its first and its last evaluation, and the shortest prompt that became right."""
    prompts = ("long, became right", "became right", "was right", "")
    evaluations = ((0, 0.25, (-3, 0, 3, -3)), (5, 0.5, (0, 0, 0, 3)), (9, 0.75, (3, 3, 3, 0)))
    for step, share, values in evaluations:
        greedy = [{"response": f"<think></think> {step}", "reward": value} for value in values]
        line = {"step": step, "table": {"greedy": {"2": (share, 0.1, 0.9)}}, "greedy": greedy}
        lopti.add_line(tmp_path / "evaluations.jsonl", line)
    lopti.report(tmp_path, [example_of(text, "") for text in prompts], settings_of())
    text = capsys.readouterr().out
    assert re.search(r"people +step 0 +step 9\n", text)
    assert re.search(r"greedy +2 +0.25 \[0.10, 0.90\] +0.75 \[0.10, 0.90\]\n", text)
    assert "\nbecame right\nbefore: 0\nafter:  9\n" in text


# 12. Batches of token ids, 14. metrics and files --------------------------------------------------


def test_micro_batches_count_padding():
    """A micro-batch has at most so many tokens, its padding included, or it is one row.

    Rows of 2, 2 and 4 tokens make 3 · 4 = 12, and rows of 4 and 5 make 10.
    """
    ends = torch.tensor([[7], [9], [2], [5], [30], [2], [4]])
    mask = torch.arange(30) == ends - 1  # a response of one token at the end of each row
    for size, batches in (
        (12, [[[2, 5, 6], 4], [[3], 5], [[1], 9], [[4], 30]]),
        (9, [[[2, 5], 2], [[6], 4], [[3], 5], [[1], 9], [[4], 30]]),
    ):
        assert lopti.micro_batches(mask, torch.arange(1, 7), size) == batches


def test_step_metrics_by_hand():
    """Each value of metrics.jsonl is what a hand computes, and GUIDE explains each.

    There are two groups of two; the rewards of the second are equal but for rounding. Mini-batches
    and --passes are averaged, and Lopti's two passes are added. The task's own lowest reward of a
    right response is 3, and --solved-reward is lower.
    """
    ids, mask = lopti.pack([[5]] * 4, [[6, 7], [8], [9, 9, 9], [6, 6]])
    pi = torch.tensor([0.5, 0.3, 0.4, 0.9, 0.1, 0.8, 0.6, 0.2])
    rollout = SimpleNamespace(
        rewards=torch.tensor([3.0, -1.0, 3.0, 3.0 + 1e-9], dtype=torch.float64),
        truncated=torch.tensor([False, False, True, False]),
        ids=ids,
        mask=mask,
        old_logprobs=lopti.scatter(pi.log(), mask),
        entropies=lopti.scatter(torch.arange(8.0), mask),
        ref_logprobs=lopti.scatter((pi / torch.tensor([2] * 4 + [1] * 4)).log(), mask),
    )
    updates = []
    for name, value in (("low", 1.0), ("high", 10.0), ("low", 3.0), ("high", 30.0)):
        results = [dict.fromkeys(STATISTICS, value), dict.fromkeys(STATISTICS, 2 * value)]
        for result in results:  # two mini-batches
            result["optimizer_steps"] = 1.0
        updates.append((name, results))
    settings = settings_of("--eta 0.45 --passes 2 --group-size 2")
    expected = dict.fromkeys(STATISTICS[:-2], 1.5 * (1 + 10 + 3 + 30) / 2)
    expected |= {"grad_norm/low": 1.5 * (1 + 3) / 2, "grad_norm/high": 1.5 * (10 + 30) / 2}
    expected |= {"reward": 2.0, "reward_std": 8**0.5 / 2, "frac_reward_zero_std": 0.5}
    expected |= {"accuracy": 0.75, "entropy": 3.5, "low_probability_share": 0.5}
    expected |= {"completions/mean_length": 2.0, "completions/clipped_ratio": 0.25}
    expected |= {"rollout/kl": (0.5 - 1 + math.log(2)) / 2, "optimizer_steps": 7.0}
    updates[3][1][1] |= {"grad_norm": 0.0, "optimizer_steps": 0.0}
    expected["grad_norm/high"] = (10 + 20 + 30) / 4
    assert lopti.step_metrics(rollout, updates, settings) == pytest.approx(expected)
    settings = settings_of("--passes 4 --group-size 4 --solved-reward -1")  # without Lopti π < 0.5
    metrics = lopti.step_metrics(rollout, updates, settings)
    assert metrics["reward_std"] == pytest.approx(2)
    assert metrics["low_probability_share"] == 0.5
    assert metrics["accuracy"] == 1
    settings = settings_of("--group-size 1 --advantage reinforce++")  # no deviation, and no NaN
    assert lopti.step_metrics(rollout, updates, settings)["reward_std"] == 0
    table = (ROOT / "data" / "GUIDE.md").read_text().split("### What the metrics mean")[1]
    columns = [row.split("|")[1] for row in table.splitlines() if row.startswith("|")]
    assert expected.keys() <= set(re.findall("`([a-z_/]+)`", " ".join(columns)))


LOGGED = [  # one of 24 steps, its share of cut-off responses, Â, optimizer steps; what it says
    (24, 0.5, 1, 1, "step 24: reward 2.00, accuracy 0.75"),
    (1, 0.5, 1, 1, ""),  # of 24 steps every second one is printed
    (1, 0.625, 1, 1, "step 1: 62% of the responses were cut off at 256 tokens"),
    (1, 0.5, 0, 0, "step 1: no group has unequal rewards, so the rewards teach nothing"),
    (1, 0.5, 1, 0, "step 1: no optimizer step was made: each gradient is 0 or not finite"),
]


@pytest.mark.parametrize("step, share, advantage, optimizer_steps, sentence", LOGGED)
def test_what_a_step_says(step, share, advantage, optimizer_steps, sentence, tmp_path, capsys):
    metrics = {"step": step, "reward": 2, "accuracy": 0.75, "optimizer_steps": optimizer_steps}
    metrics["completions/clipped_ratio"] = share
    rollout = SimpleNamespace(advantages=torch.tensor([0, advantage]))
    lopti.log_step(tmp_path, metrics, [], rollout, settings_of())
    assert capsys.readouterr().out == sentence + "\n" * bool(sentence)


KILLS = [  # before which call of which function, and the step of the last checkpoint
    ("step_metrics", 5, 3),  # lines of step 4 are already written
    ("log_evaluation", 4, 5),  # of step 5: the trained weights are already in the checkpoint
    ("report", 1, 5),
]


@pytest.mark.parametrize("name, call, step", KILLS)
def test_killed_and_resumed_to_the_last_bit(
    name, call, step, finished_run, flags, tmp_path, monkeypatch
):
    """A run that `kill -9` ended goes on from its checkpoint as if nothing had happened."""
    folder = tmp_path / "killed"
    calls = itertools.count(1)
    original = getattr(lopti, name)

    def kill(*inputs):
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*inputs)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(lopti, name, kill)
        os._exit(exit_code(f"{flags} --output {folder}"))
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert torch.load(folder / "checkpoint.pt")["step"] == step
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 3')  # the kill cut off a line
    assert exit_code(f"--resume {folder}") == 0
    assert_same_run(folder, finished_run)


def test_more_steps_later_are_the_same_run(finished_run, flags, tmp_path, capsys):
    """A finished run that is resumed with more steps equals a run that had them from the start.

    It keeps its own α, η and all others. How to resume is printed with the first checkpoint.
    """
    folder = tmp_path / "longer"
    assert exit_code(f"{flags} --output {folder} --steps 2") == 0
    assert capsys.readouterr().out.count(f"--resume {folder} continues") == 1
    assert lopti.resume(folder, steps=5) == folder
    assert "--resume" not in capsys.readouterr().out
    config = json.loads((folder / "config.json").read_text())
    assert config == asdict(settings_of(f"{flags} --output {folder}"))
    assert exit_code(f"--resume {folder}") == 0  # nothing is left to do
    assert_same_run(folder, finished_run)


@pytest.mark.parametrize("done", [2, 4])
def test_ctrl_c_says_what_was_done_and_how_to_go_on(done, flags, tmp_path, monkeypatch, capsys):
    """Here a run that was stopped after 2 or 4 steps; the first checkpoint is that of step 3."""
    step = lopti.training_step
    calls = itertools.count()

    def stopped_step(*inputs):
        if next(calls) >= done:
            raise KeyboardInterrupt
        return step(*inputs)

    monkeypatch.setattr(lopti, "training_step", stopped_step)
    folder = tmp_path / "run"
    assert exit_code(f"{flags} --eval-every 0 --output {folder}") == 130
    how = "there is no checkpoint to go on from"
    if done == 4:
        how = f"python lopti.py --resume {folder} goes on from the checkpoint of step 3"
    assert capsys.readouterr().out.endswith(f"\nStopped after {done} training steps; {how}.\n")
    if done == 4:
        assert exit_code(f"--resume {folder}") == 130
        assert capsys.readouterr().out.endswith(f"\nStopped after 3 training steps; {how}.\n")


def test_a_run_that_does_not_begin_leaves_no_folder(flags, tmp_path, monkeypatch):
    """A wrong file or length leaves nothing behind; what a run has written stays.

    config.json has the learning rate that was worked out.
    """
    monkeypatch.setattr(lopti, "log_evaluation", Mock(side_effect=lopti.UserError("no")))
    for wrong in ("--data missing.jsonl", "--max-new-tokens 9999"):
        assert exit_code(f"{flags} {wrong} --output {tmp_path}/run") == 2
        assert not (tmp_path / "run").exists()
    flags = flags.replace("--learning-rate 2e-3", "")
    assert exit_code(f"{flags} --output {tmp_path}/run") == 2
    assert json.loads((tmp_path / "run" / "config.json").read_text())["learning_rate"] == 1e-6


def test_a_checkpoint_of_a_gpu_and_one_on_a_full_disk(tmp_path, monkeypatch):
    """A checkpoint has a GPU's random state (here a pretended one's), which a CPU leaves out.

    It stays until the next one is complete, and is read into memory, not onto the GPU.
    """
    model = random_model()
    optimizer = adamw(model)
    gpu = Mock()
    gpu.get_rng_state.return_value = torch.ones(3)
    monkeypatch.setattr(torch, "get_device_module", Mock(return_value=gpu))
    load = watch(monkeypatch, torch, "load")
    policy = Mock(wraps=model, device=torch.device("xpu"))
    lopti.save_checkpoint(tmp_path, 4, policy, optimizer)

    def half(state, path):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="No space left"):
        lopti.save_checkpoint(tmp_path, 5, policy, optimizer)
    for kind, count in (("cpu", 0), ("xpu", 1)):
        policy.device = torch.device(kind)
        assert lopti.load_checkpoint(tmp_path, policy, optimizer, settings_of()) == 4
        assert gpu.set_rng_state.call_count == count
        assert load.call_args.kwargs["map_location"] == "cpu"


# 13. The model, 15. the command line --------------------------------------------------------------


def test_a_model_is_loaded_as_training_needs_it(tmp_path, capsys, monkeypatch):
    """A model has float32 weights, none of them frozen, no dropout, and a padding token.

    --dtype is that of forward passes and changes no weight. cuDNN's attention is off.
    """
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.pad_token = None
    save_both(random_model("GPT2").bfloat16(), tokenizer, tmp_path)
    torch.backends.cuda.enable_cudnn_sdp(True)
    for dtype in ("bfloat16", "float32"):
        model, loaded = lopti.load_model(tmp_path, "cpu", dtype)
        assert weights(model).dtype == torch.float32
        assert model.in_bfloat16 == (dtype == "bfloat16")
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert not model.training
    assert loaded.pad_token == TOKENIZER.eos_token
    assert not capsys.readouterr().out
    model.transformer.h[0].requires_grad_(False)
    frozen = Mock(return_value=(model, {"missing_keys": []}))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", frozen)
    with pytest.raises(lopti.UserError, match="frozen or quantized weights"):
        lopti.load_model("", "cpu")


def test_a_prompt_that_the_model_cannot_read_is_refused():
    """An id needs an embedding, and prompt and response must fit into the model's positions."""
    model = random_model(max_position_embeddings=40)
    examples = [example_of("Lily", ""), example_of("Liam is a knight", "")]  # 1 and 4 tokens
    lopti.check_lengths(model, TOKENIZER, examples, 36)
    with pytest.raises(lopti.UserError, match="may have 41 tokens, but the model reads 40"):
        lopti.check_lengths(model, TOKENIZER, examples, 37)
    changing = {"rope_type": "longrope", "original_max_position_embeddings": 39}
    with mock.patch.object(model.config, "rope_parameters", changing):
        lopti.check_lengths(model, TOKENIZER, examples, 35)
        with pytest.raises(lopti.UserError, match="beyond 39 its positions change"):
            lopti.check_lengths(model, TOKENIZER, examples, 36)
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_tokens(["<new>"])
    examples.append(example_of("Lily <new>", ""))
    with pytest.raises(lopti.UserError, match=r"gives the id 308 \(<new>\), but .* for 308 ids"):
        lopti.check_lengths(model, tokenizer, examples, 36)


def test_gradient_checkpointing_changes_memory_and_nothing_else(monkeypatch):
    """Gradient checkpointing gives the same weights to the last bit, and computes layers twice."""
    layer_norm = watch(monkeypatch, torch.nn.functional, "layer_norm")
    plain, results = updated(model=random_model("GPT2"))  # which has dropout
    count = layer_norm.call_count
    model = random_model("GPT2")
    lopti.checkpoint_layers(model)
    assert updated(model=model)[1] == results
    assert layer_norm.call_count == 2 * count + 4  # 2 layers × 2 layer norms
    assert torch.equal(weights(plain), weights(model))


def test_help_has_every_flag(capsys):
    """--help explains every flag, and the pages name no other."""
    assert exit_code("--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    named = set(re.findall("--[a-z][a-z-]*", text))
    assert named >= {lopti.flag(each.name) for each in fields(lopti.Settings)} | {"--resume"}
    assert "(default: 0.0, paper: 0.3)" in text
    for page in ("README.md", "data/GUIDE.md"):
        for command in re.findall(r"python lopti\.py[^\n`]*", (ROOT / page).read_text()):
            assert set(re.findall("--[a-z][a-z-]*", command)) <= named, command


def test_the_python_on_the_pages():
    """Every block compiles, and the reward of GUIDE gives what the page says."""
    blocks = []
    pages = "README.md data/GUIDE.md data/ports/README.md"
    for page in pages.split():
        text = (ROOT / page).read_text(encoding="utf-8")
        blocks += [part.partition("```")[0] for part in text.split("\n```python\n")[1:]]
    names = {}
    for block in blocks:
        code = compile(block, "a page", "exec")
        if "def last_word" in block:
            exec(code, names)  # noqa: S102
    assert names["last_word"](["It is a cat.", "A dog", ""], ["cat"] * 3) == [1.0, 0.0, 0.0]


REFUSED = {  # flags: what the sentence names
    "--model no/such-model": "cannot load --model no/such-model",
    "--model finished/last": "--model finished/last is no folder",
    "--model my/runs/last": "--model my/runs/last is no folder",
    "--model lossy": "lacks 1 of the model's weights: model.layers.0.mlp.up_proj.weight",
    "--model endless": "has no token that ends a response",
    "--device cuda:99": "on --device cuda:99",  # nobody has so many, and many have none
    "--output finished": "--output finished: File exists; give a new folder, or go on with",
    "--resume finished --steps 4": "has done 5 steps: give --steps 5 or more",
    "--resume finished --learning-rate 1e-3": "only --steps may be given too",
    "--resume other": "other/config.json is not that of this program: Settings.__init__",
    "--resume lost --steps 6": "there is no checkpoint.pt to go on from",
    "--data missing.jsonl": "No such file",
    "--data broken.parquet": "Parquet",
    "--data no/such_name": "cannot read no/such_name: no network",
    "--reward no_such_module:f": "No module named 'no_such_module'",
    "--alpha 1.01": "--alpha must be from 0 to 1, not 1.01",
    "--alpha nan": "--alpha must be from 0 to 1, not nan",
    "--alpha half": "argument --alpha: invalid float value: 'half'",
    "--eta 1.5": "--eta must be from 0 to 1, not 1.5",
    "--passes 0": "--passes must be at least 1, not 0",
    "--group-size 1": "--group-size must be at least 2: GRPO compares",
    "--order up": "argument --order: invalid choice: 'up'",
    "--order high-low --eta 0": "--order needs --eta above 0",
    "--advantage ppo": "argument --advantage: invalid choice: 'ppo'",
    "--task chess": "argument --task: invalid choice: 'chess'",
    "--learning-rate inf": "--learning-rate must be from 1e-12 to 1, not inf",
    "--temperature 0": "--temperature must be from 0.01 to 100, not 0.0",
    "--steps -1": "--steps must be at least 0, not -1",
    "--seed 4294967296": "--seed must be from 0 to 4294967295, not 4294967296",
    "--alp 0.3": "unrecognized arguments: --alp 0.3",
    "--resume nowhere": "--resume nowhere: there is no checkpoint.pt",
}


@pytest.mark.parametrize("words", REFUSED)
def test_runs_that_are_refused(words, flags, finished_run, tmp_path, capsys, monkeypatch):
    """A wrong setting, file or name ends in one sentence, and no file is changed or made."""
    monkeypatch.chdir(tmp_path)
    model = random_model()
    model.generation_config = GenerationConfig()
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.eos_token = tokenizer.chat_template = None
    save_both(model, tokenizer, "endless")
    save_both(model, TOKENIZER, "lossy")
    kept = model.state_dict()
    del kept["model.layers.0.mlp.up_proj.weight"]
    save_file(kept, "lossy/model.safetensors", metadata={"format": "pt"})
    for name in ("finished", "other", "lost"):
        shutil.copytree(finished_run, name)
    Path("other/config.json").write_text('{"gamma": 1}')
    Path("lost/checkpoint.pt").unlink()
    Path("broken.parquet").write_text("?")
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=ConnectionError("no network")))
    before = {path: path.read_bytes() for path in Path().rglob("*.*")}
    assert exit_code(words if "--resume" in words else f"{flags} --output run {words}") == 2
    *usage, sentence = capsys.readouterr().err.splitlines()
    assert REFUSED[words] in sentence
    assert len(usage) < 2  # that of argparse
    assert {path: path.read_bytes() for path in Path().rglob("*.*")} == before


def test_wrong_settings_from_python():
    wrong = ({"group_size": 2.5}, "int"), ({"alpha": "0.3"}, "float")
    for settings, kind in (*wrong, ({"passes": True}, "int"), ({"stapo": 1}, "bool")):
        with pytest.raises(lopti.UserError, match=f"must be of type {kind}, not"):
            lopti.Settings(**settings)
    lopti.Settings(alpha=torch.linspace(0, 1, 3, dtype=torch.float64).numpy()[1], eta=1)


def test_files_of_flags(tmp_path):
    """A file of flags may have comments, quotes and empty lines, and a later flag wins.

    So a later flag switches off what the file has switched on.
    """
    path = tmp_path / "my.flags"
    path.write_text('# mine\n\n--steps 9  # nine\n--data "my data/x.jsonl" --alpha 0.3 --stapo\n')
    settings = settings_of(f"@{path} --alpha 0.5")
    assert (settings.steps, settings.data, settings.alpha) == (9, "my data/x.jsonl", 0.5)
    assert settings.stapo
    assert not settings_of(f"@{path} --no-stapo").stapo


def test_flags_that_follow_the_paper():
    """kk.flags has the values that --help calls the paper's; so has math.flags, but for steps."""
    paper = {each.name: each.metadata["paper"] for each in fields(lopti.Settings)}
    paper = {name: value for name, value in paper.items() if value is not None}
    for task, steps in (("kk", 351), ("math", 781)):
        words = [f"@{ROOT}/data/{task}.flags", "--alpha", "0.3", "--eta", "0.5"]
        settings = lopti.parse_arguments(words)
        assert settings.task == task
        assert vars(settings).items() >= (paper | {"steps": steps}).items()


def test_a_small_step_of_kk_flags(flags, tmp_path):
    """A training step of kk.flags runs to its end, here with a small model.

    Most flags are those that make it small. The rest is the file's: bfloat16, gradient
    checkpointing, and a learning rate that bfloat16 weights would not notice.
    """
    code = exit_code(
        f"@{ROOT}/data/kk.flags {flags} --learning-rate 1e-6 --steps 1 --eval-data= --eval-size 1 "
        f"--output {tmp_path}/run"
    )
    assert code == 0
    (line,) = lopti.read_lines(tmp_path / "run" / "metrics.jsonl")
    assert line["optimizer_steps"] == 4
    model = settings_of(flags).model
    before, after = [lopti.load_model(each, "cpu")[0] for each in (model, tmp_path / "run/final")]
    change = (weights(after) - weights(before)).abs()
    assert 0 < change.max() < 1e-5  # AdamW moves a weight by up to the learning rate in a step


def test_an_error_of_the_system_and_a_bug(monkeypatch, capsys):
    """The first ends in one sentence, the second shows its traceback."""
    train = Mock(side_effect=[OSError("disk"), RuntimeError("shapes differ")])
    monkeypatch.setattr(lopti, "train", train)
    assert lopti.main([]) == 2
    assert capsys.readouterr().err == "lopti.py: disk\n"
    with pytest.raises(RuntimeError, match="shapes differ"):
        lopti.main([])


@pytest.mark.parametrize("module", [lopti, rewards])
def test_examples_in_docstrings(module):
    """The examples in docstrings, which were worked out by hand, are right."""
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


# rewards.py: Knights and Knaves -------------------------------------------------------------------

JACK = "(1) Jack is a knight\n(2) Jackson is a knave"
ANN = "(1) Mary Ann is a knight\n(2) Ann is a knave"
ODD = "(1) Sir Knightley (the 2nd) is a knight\n(2) @bo+x is a knave\n(3) O'Neil Å. is a knight"

ANSWERS = [  # a solution, an answer, its reward in the right format
    (JACK, JACK, 3),
    (JACK, "JACKSON IS A KNAVE.\nJack is\ta  knight", 3),  # any case, blanks and order
    (ANN, ANN, 3),
    (ODD, ODD, 3),  # names may be anything
    (JACK, "Jack is a knight\nJackson is a knight", -0.5),
    (JACK, "Jack is a knight", -1),  # a name is missing
    (JACK, "Jackson is a knave\nJackson is a knight", -1),  # there is no Jack in Jackson
    ("(1) Ann is a knight", "Joann is a knight", -1),
    ("(1) Ann is a knight", "Ann is a knight\nJoann is a knave", -1),
    (JACK, "Jack is a knight\nJack is a knave", -1),  # both roles
    (JACK, f"{JACK}\nJack is a knight", -1),
    (JACK, f"Both are knights: {JACK}", -1),
    (JACK, "Jack is a knight or knave\nJackson is a knave", -1),
]


@pytest.mark.parametrize("solution, answer, reward", ANSWERS)
def test_answers_to_a_puzzle(solution, answer, reward):
    text = f"So. </think> <answer>{answer}</answer>"
    assert rewards.kk_reward([text], [solution]) == [reward]


ANSWER = f"<answer>{JACK}</answer>"
RIGHT = f"So. </think>{ANSWER}"

FORMS = [  # a response, its prompt, its reward
    (RIGHT, "Who? <think> \n", 3),
    (RIGHT, "Write <think> first. Who?", -3),
    (f"<think>{RIGHT}", "Who?", 3),
    (ANSWER, "<think>", -3),
    (f"{ANSWER}</think>", "<think>", -3),
    (RIGHT.removesuffix("</answer>"), "<think>", -3),
    (f"{RIGHT}{ANSWER}", "<think>", -3),
    (None, "<think>", -3),
    ([], "<think>", -3),
    ([{"content": "No."}, {"content": RIGHT}], "<think>", 3),  # a chat: its last message
    (RIGHT, [{"role": "user", "content": "Who? <think>"}], 3),
]


@pytest.mark.parametrize("response, prompt, reward", FORMS)
def test_the_form_of_a_response_to_a_puzzle(response, prompt, reward):
    assert rewards.kk_reward([response], [JACK], prompts=[prompt], names=[[]]) == [reward]


def test_the_solution_of_a_puzzle():
    roles = {"åsa öl": "knight", "小明": "knave"}
    for solution in (
        "1. Åsa Öl is a knight\n12) 小明 is a knave",
        "(1) Åsa Öl is a knight (2) 小明 is a knave",
    ):
        assert rewards.read_solution(solution) == rewards.read_answer(solution, roles) == roles
    twice = "(1) Ann is a knight\n(2) Ann is a knave"
    spy = "(1) Ann is a spy\n(2) Omar is a knave"
    typo = "(1) Ann is an knave (2) Omar is a knave"
    for solution in (twice, spy, typo, "So Ann is a knight", "", None):
        with pytest.raises(rewards.UserError, match=r"lines like \(1\) Zoey is a knight"):
            rewards.kk_reward(["", ""], [JACK, solution])


# rewards.py: mathematics --------------------------------------------------------------------------

EQUAL = r"""
11 | 11.0 | 011 | +11 | (11) | 11. | $11$ | \text{11} | {11} | \( 11 \) | \mathrm{11} | \[ 11 \]
11 | \mbox{11} | \textbf{11} | \mathbf{11} | **11** | ~11
0.00001 | 1e-05 | 1.0e-05
3/4 | \frac{3}{4} | .75 | \dfrac 3 4 | \tfrac34 | \left(\frac{3}{4}\right) | \frac3{4}
-\frac73 | \frac{-7}{3} | -7/3 | -2\frac{1}{3} | -2 1/3 | −2\frac13 | –2\frac13
\frac\pi2, \sqrt\frac34 | \frac{\pi}{2}, \sqrt\frac{3}{4} | \frac{\pi} 2, \sqrt\frac34
1234567 | 1,234,567 | 1{,}234{,}567 | 1,\! 234,\!567 | \(1,234,567\) | \$1,234,567 | x = 1,234,567
1234, 1 | 1,234, 1
25,100,55 | 25, 100, 55 | 100,55,25
28\% | 28 | 28% | 28 percent
90^\circ | 90 | 90^{\circ} | 90^ {\circ} | 90° | 90 degrees | 90\degree
10 | 10\ \text{cm} | 10 cm | 10cm | x = 10\text{ cm} | 10 inches | 10 square feet | 10\text{ ways}
5 inches | 5 inch | 5 | x = 5 | \theta = 5 | f(x) = 5
x = \frac12\text{ hour} | 0.5 hours | 0.5 | x=0.50
864 \mbox{ inches}^2 | 864 | x = 864 inches^2 | 864 \text{ inches}^{2}
144 \mbox{ m}^3 | 144 | 144 m^3
2.5 \mathrm{~m} | 2.5 | 2.5 m | 2.5\text{ m} | \frac52
8\sqrt3 \text { square feet}. | 8\sqrt{3} | 8\sqrt{3}\text{ square feet}
x = 1, y = 2 | y = 2, x = 1 | x = 1 \text{ and } y = 2
x = 2 \text{ or } x = -3 | x=2, x=-3 | 2, -3 | x = -3, 2 | x = 2 \text{ and } x = -3
(x,y) = (2,3) | (2,3) | (x, y) = (2, 3)
55 | \text{Area} = 55 | f(g(x)) = 55 | P(X > 3) = 55 | f^{-1}(3) = 55 | a_{n+1} = 55 | F_Y(-3) = 55
\angle ABC = 55^\circ | 55 | 55^\circ | \angle ABC = 55
S_{10} = 55 | 55 | S_10 = 55 | S _{10} = 55.0
f^{-1}(x) = x + 2 | x + 2
\$4.5\text{ million} | 4500000 | 4.5 million | \$4,500,000
3\text{ dozen} | 36 | 3 dozen
\frac12\text{ million} | 500,000
2\text{ trillion} | 2000 billion | 2,000,000 million | 20 hundred billion | 2000000000 thousand
\{1, 2, 3\} | 3,1,2 | 1, 2, \text{ and } 3 | 1; 2; 3 | 1 or 2 or 3 | \{3.0,2,1\} | {1,2,3}
(1, 2) | (1,\ 2) | \left( 1,\, 2.0 \right) | ( 1, 2 )
[1,2), (3,0.5) | (3,\frac12), [1,2) | (3,.5), [1.0,2)
yes | Yes | \text{Yes}
2^\pi, 2^{10}y, e^{-x}, 2^{0.5} | 2^{\pi}, 2^10y, e^-x, 2^0.5 | 2^ \pi, 2^ 10 y, e^{-x}, 2^.5
2 \cdot 10^{-3} | 2 \times 10^-3 | 2×10^−3
\log 2 + \pi 3, x^2 + 2x\sqrt3 | \log2+\pi3, x^{2}+2 x \sqrt{3}
\operatorname{lcm}(a,b) | \text{lcm}(a, b)
\sin^2 3x, \log_2 8 | \sin^23x, \log_28 | \sin^{2}3x, \log_{2}8
x \le 3, y \ge 3 | x \leq 3, y \geq 3 | x ≤ 3, y≥3 | x \leqslant 3, y \geqslant 3
1 < x < 5 | 1 \lt x \lt 5 | 1<x<+5
x > 5, y \ne 5 | x \gt 5, y \neq 5 | x > 5, y ≠ 5 | x>5, y \not= 5
[1,+\infty) | [1,\infty) | [+1, +\infty)
\emptyset, \binom{4}{2} | \varnothing, \dbinom{4}{2}
(1, 2) | \bigl( 1, 2 \bigr) | \Big(1,2\Big) | \color{blue}(1,2)
12 | \large 12 | {\Large 12} | \boldsymbol{12} | \underline{12} | \color{red} 12 | \bf{12}
12 | \textcolor{red}{12} | \color{red}{12} | \textbf{\text{12}} | x = \color{red}{12}\text{ cm}
\frac{5}{1+2\sqrt{3}} | \mathbf{\frac{5}{1+2\sqrt{3}}} | \underline{\frac5{1+2\sqrt3}}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix}1\\2\end{pmatrix}
"""

DIFFERENT = r"""
11 | 5+6 | 11+0 | 22/2 | \frac{22}{2} | \frac{11}{1} | 11^1 | -(-11) | x = 5 + 6 = 11 | 5+6=11
11 | \frac{22}{2} = 11 | \sqrt{121} = 11 | 11 = x | x < y = 11
0 | x - y = 0 | x^3 - x = 0 | x != 0 | x \not= 0
Ca^{+2} | Ca^2
4\text{ million} | 4 | 4 thousand | 40000 | 4 million million
2\text{ fifths} | 2
3\text{ hours and twenty minutes} | 3
3\text{ hours 20 minutes} | 3
\frac73 | -2\frac13 | 2\frac{-1}{3} | 2 2/6 | 1 4/3 | 2 1/0
1024 | 1024... | 1024..
5.5 | 5 0.5 | 5 .5 | 5 1/2.0
5 | -5 | 5 6 | 5e1 | ５ | ٥ | \text{five} | 5 hundred | 5x | [5] | 5 or 6 | \pm 5 | ++5
540 | 5\$40 | 5 40 | 5\,40 | 5\text{40}
1200 | 1, 200 | (1,200) | ( 1,200 ) | \left(1,200\right) | 12,00 | 1,20000
(1,200,3) | (1200,3) | 1200,3
0.12 | 0.1,200
1 | 1\% | 100\%
5 | 5 time person book | 5 cm kg | 5\text{ is wrong} | 5 squared | 5 square | 5 xy | 5:00
25 | x^2 = 25 | e^x = 25 | xy = 25 | \log x = 25 | \log(x) = 25 | x \cdot 5 = 25 | x(x+1) = 25
25 | \text{half of it} = 25 | P(1+r) = 25
5\text{ cm} | 5 km | 5 square cm | 5 cm per hour | 5 cm^2
45\text{ mph} | 45 km | 45x | 46 mph | 46
2\mathrm{i} | 2
2\mathrm{~i} | 2
2\mathrm{AB} | 2
y = 5 | x = 5 | 2y = 5 | y < 5 | y = 7 = 5
x=1, y=2 | 2, 1 | 1, 2 | x=2, y=1 | (1, 2)
n = 3k | 3
x y = 4 | 4 | x = 4
y^2 = 4x | 4x
x + 2y = 5 | 5
(1, 2) | (2, 1) | \{1, 2\} | 1, 2 | [1, 2] | (1, 2] | (1, 2, 2)
1, 1, 2 | 1, 2, 2 | 1, 2
\{1,2\}\setminus\{3,4\} | \{4,2\}\setminus\{3,1\}
x \le 1 \text{ or } x = 2 | x \le 1 \text{ and } x = 2
x \in A \text{ or } x \in B | x \in A \text{ and } x \in B
ABC | abc
\frac{1}{23} | \frac{1}{2}3 | \frac123
\{\} | | \,
\sqrt3/2 | \frac{\sqrt{3}}{2}
"""


def rewarded(solution, answer):
    return rewards.math_reward([rf"So $\boxed{{{answer}}}$."], [solution]) == [1]


@pytest.mark.parametrize("row", EQUAL.strip().splitlines())
def test_equal_answers_are_rewarded(row):
    solution, *answers = row.split(" | ")
    assert [answer for answer in answers if not rewarded(solution, answer)] == []


@pytest.mark.parametrize("row", DIFFERENT.strip().splitlines())
def test_different_answers_are_not_rewarded(row):
    solution, *answers = row.split(" | ")
    assert [answer for answer in answers if rewarded(solution, answer)] == []
    assert rewards.answers_match(solution, solution)


def test_the_last_box():
    assert rewards.last_box(r"\boxed{1}, no, \boxed{\frac{1}{2}} }") == r"\frac{1}{2}"
    assert rewards.last_box(r"\boxed{\left\{ 1 \right.}") == r"\left\{ 1 \right."
    assert rewards.last_box(r"\boxed{1} or \boxed{}") == ""
    assert rewards.last_box(r"\boxed{1} and \boxed{2") is None
    assert rewards.last_box(r"\boxed{1}</think> no box.") is None


def test_math_reward_takes_chats_worked_solutions_and_numbers():
    chat = [{"content": r"\boxed{9}"}, {"content": r"\boxed{4}"}]  # its last message counts
    proof = "9" * 301  # too long to be an answer
    boxes = ["9", "4", "0.00001", "1" + "0" * 20, "", proof]
    responses = [chat, *(rf"\boxed{{{box}}}" for box in boxes), "4", None]
    solutions = ["4", r"So $\boxed{9}$.", 4, 1e-05, 1e20, "", proof, "4", "4"]
    assert rewards.math_reward(responses, solutions, level=[1] * 9) == [1] * 5 + [0] * 4
    for solution in (None, ["none"], {}):
        with pytest.raises(rewards.UserError, match="must be a text or a number"):
            rewards.math_reward([r"\boxed{none}"], [solution])


def test_no_answer_raises():
    signs = [*"()[]{}.,;=+-*/^_$%&~<> 07xI\n\\", "1,000", "\\frac", "\\text{", " or ", "\ud800"]
    texts = ["".join(pair) for pair in itertools.product(signs, repeat=2)]
    texts += [sign * (290 // len(sign)) for sign in signs]
    texts += ["(" * n + "5" + ")" * n for n in (149, 999)]
    for text in texts:
        assert rewards.answers_match(text, "17y") is False, text


# rewards.py: the two tasks, and a reward of one's own ---------------------------------------------


def make_settings(**changes):
    settings = {"task": "math", "reward": "", "data": "", "eval_data": "", "eval_size": 0}
    return SimpleNamespace(**{**settings, "max_prompt_length": 400, **changes})


def example_from(solution="2", /, **columns):
    return rewards.Example("1 + 1?", "1 + 1?", solution, "all", columns)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The user's current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_reward_of_ones_own_gets_every_column(monkeypatch):
    """One entry for each response; `solution` is the example's, not the column of that name."""
    reward = Mock(return_value=[7, True, 0.5, -1])
    monkeypatch.setattr(rewards, "load_function", Mock(return_value=reward))
    first = example_from("2", a=1, prompts="no", completions="no", solution="Add one to one.")
    second = example_from({"x": 3}, b=[2])
    examples = [first, first, second, second]
    settings = make_settings(reward="my:own")
    assert rewards.compute_rewards(["r", "s", "t", "u"], examples, settings) == [7, 1, 0.5, -1]
    reward.assert_called_once_with(
        completions=["r", "s", "t", "u"],
        prompts=["1 + 1?"] * 4,
        solution=["2", "2", {"x": 3}, {"x": 3}],
        a=[1, 1, None, None],  # the union of the rows' columns
        b=[None, None, [2], [2]],
    )


WRONG_REWARDS = [None, 1, [1], [1, 2, 3], [1, math.nan], [1, math.inf], [1, None], [1, "good"]]


@pytest.mark.parametrize("returned", WRONG_REWARDS)
def test_a_reward_returns_one_finite_number_for_each_response(returned, monkeypatch):
    monkeypatch.setattr(rewards, "load_function", lambda place: lambda **columns: returned)
    examples = [example_from(), example_from()]
    with pytest.raises(rewards.UserError, match="a finite number for each response"):
        rewards.compute_rewards(["a", "b"], examples, make_settings(reward="my:own"))


NO_REWARDS = {  # what is given as --reward: what is told
    ":f": "is no MODULE:FUNCTION, such as my_reward:last_word",
    "rewards:": "is no MODULE:FUNCTION, such as my_reward:last_word",
    "my_reward.py": "is no MODULE:FUNCTION, such as my_reward:last_word",
    "no_such_file:f": "is no MODULE:FUNCTION: No module named 'no_such_file'",
    "os.no_such_file:f": "is no MODULE:FUNCTION: No module named 'os.no_such_file'",
    "rewards:f": "is no MODULE:FUNCTION: rewards has no attribute 'f' to call",
    "math:pi": "is no MODULE:FUNCTION: math has no attribute 'pi' to call",
    "os:getcwd": "must take **columns: getcwd(completions, solution, **columns)",
}


@pytest.mark.parametrize("place", NO_REWARDS)
def test_a_reward_that_cannot_be_called(place):
    with pytest.raises(rewards.UserError, match=re.escape(f"--reward {place} {NO_REWARDS[place]}")):
        rewards.load_function(place)


def test_what_a_reward_of_ones_own_raises_keeps_its_traceback(folder):
    """Also an error that would end this program in one sentence, and what the import raises."""
    own = "from rewards import UserError\ndef f(**columns): raise UserError('no')"
    for number, text in enumerate(("1 / 0", "open('no_such_file')", "import no_such_module", own)):
        (folder / f"broken{number}.py").write_text(text)
        settings = make_settings(reward=f"broken{number}:f")
        with pytest.raises(RuntimeError, match=f"--reward broken{number}:f.* raised") as caught:
            rewards.compute_rewards(["a"], [example_from()], settings)
        assert caught.value.__cause__ is not None
    with pytest.raises(rewards.UserError, match="must be a text or a number"):
        rewards.compute_rewards([""], [example_from(["2"])], make_settings())  # of the task


def test_the_current_folder_takes_no_librarys_place(folder, monkeypatch):
    """A file random.py there stays unread, while and after a reward loads."""
    monkeypatch.setattr("sys.path", [path for path in sys.path if path != ""])
    for name in ("random.py", "beside.py"):
        (folder / name).write_text("")
    code = "from importlib.machinery import PathFinder\nplaces = "
    code += "[PathFinder.find_spec(name).origin for name in ('random', 'beside')]\n"
    (folder / "finds.py").write_text(f"{code}def reward(**columns): ...")
    before = list(sys.path)
    rewards.load_function("finds:reward")
    assert [str(folder) in place for place in sys.modules["finds"].places] == [False, True]
    assert sys.path == before


# rewards.py: data ---------------------------------------------------------------------------------

ROW = {"problem": "1 + 1?", "answer": "2"}
LILY = "(1) Lily is a knave"
CHAT = [{"role": "user", "content": "1 + 1?"}]
ASKED = f"<|user|>1 + 1?{rewards.TASKS['math'].request}<|assistant|>"  # by data/tiny's template


def write_rows(path, rows):
    """A jsonl file; a row may be a text that stands there as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def loaded(path, rows, **settings):
    """The examples of a jsonl file with these rows."""
    source = write_rows(path / "a.jsonl", rows)
    return rewards.load_rows(source, make_settings(**settings), TOKENIZER)


ROWS = [  # a task, a row, its prompt, its solution
    ("math", ROW, ASKED, "2"),
    ("math", {"question": "1 + 1?", "answer": "One more.\n#### 2 "}, ASKED, "2"),  # GSM8K
    ("math", {**ROW, "question": "1 + 1?", "problem": "No."}, ASKED, "2"),
    ("math", {**ROW, "solution": "Add.", "question": None}, ASKED, "2"),
    ("math", {"prompt": CHAT, "solution": "2"}, "<|user|>1 + 1?<|assistant|>", "2"),
    ("math", {"prompt": "1 + 1 =", "answer": "2"}, "1 + 1 =", "2"),
    ("math", {"problem": "1 + 1?", "answer": 2}, ASKED, "2"),  # a number, written as its text
    ("math", {"problem": "1 + 1?", "answer": 2.5}, ASKED, "2.5"),
    ("math", {"problem": "1 + 1?", "answer": "[1, 2]"}, ASKED, "[1, 2]"),  # an interval
    ("math", {"question": "", "prompt": CHAT, "answer": "2"}, "<|user|>1 + 1?<|assistant|>", "2"),
    ("math", {**ROW, "question": "", "solution": "3", "answer": ""}, ASKED, "3"),
    ("kk", {"quiz": "Who?", "solution_text_format": JACK, "solution": [True, False], "level": 9},
     "<|user|>Who?<|assistant|><think>", JACK),
    ("kk", {"quiz": "Who?", "solution": LILY, "prompt": [{"role": "user", "content": ASKED}]},
     "<|user|>Who?<|assistant|><think>", LILY),  # as in the authors' files
    ("kk", {"prompt": "Who? ", "solution": LILY}, "Who? ", LILY),
]  # fmt: skip


@pytest.mark.parametrize("task, row, prompt, solution", ROWS)
def test_what_becomes_of_a_row(task, row, prompt, solution, tmp_path):
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "a.parquet")
    settings = make_settings(task=task)
    (example,) = loaded(tmp_path, [row], task=task)
    assert rewards.load_rows(tmp_path / "a.parquet", settings, TOKENIZER) == [example]
    assert example.prompt == prompt
    questions = [text for text in ("1 + 1?", "1 + 1 =", "Who?", "Who? ") if text in prompt]
    assert example.question == questions[-1]
    assert example.solution == solution
    assert example.columns == row
    assert example.difficulty == {LILY: "1", JACK: "2"}.get(solution, "all")


NO_QUESTION = "a text as question, quiz, problem, or a whole prompt; it has the columns"
NO_SOLUTION = "a text or a number as solution_text_format, answer, solution; it has the columns"
LEFT_OUT = "has a message that the chat template leaves out: "


def chat(content="1 + 1?", role="user"):
    """A row whose prompt is a chat with this message."""
    return {"prompt": [{"role": role, "content": content}], "answer": "2"}


WRONG_ROWS = [  # a task, a row, what is wrong
    ("math", {"answer": "2", "source": "mine"}, f"{NO_QUESTION} answer, source"),
    ("math", {**ROW, "problem": 2}, NO_QUESTION),
    ("math", {**ROW, "problem": " "}, NO_QUESTION),  # an empty text is none
    ("math", {**ROW, "problem": None, "prompt": 5}, NO_QUESTION),
    ("math", {"prompt": " ", "solution": "2"}, NO_QUESTION),
    ("math", {"problem": "1 + 1?"}, f"{NO_SOLUTION} problem"),
    ("math", {**ROW, "answer": True}, NO_SOLUTION),
    ("math", {"prompt": CHAT, "solution": ["2"]}, NO_SOLUTION),
    ("math", {**ROW, "answer": "['34', '35']"}, "has a list as its solution"),
    ("math", {**ROW, "answer": r" [\frac{3}{4}]"}, "has a list as its solution"),
    ("math", {"prompt": [{"from": "human", "value": "1 + 1?"}], "answer": "2"}, "content of each"),
    ("math", chat([{"type": "text", "text": "1 + 1?"}]), "a text as the content of each message"),
    ("math", {"prompt": ["1 + 1?"], "answer": "2"}, "a text as the content of each message"),
    ("math", chat(role="User"), rf"{LEFT_OUT}'1 \+ 1\?'"),
    ("math", {"prompt": [{"role": "developer", "content": "Be terse."}, *CHAT], "answer": "2"},
     f"{LEFT_OUT}'Be terse.'"),
    ("math", {"prompt": str(CHAT), "answer": "2"}, "a chat in a text"),
    ("math", {"prompt": ' [{"from": "human"}]', "answer": "2"}, "a chat in a text"),
    ("math", '{"problem": ', "Expecting value"),
    ("math", "7", "a JSON object, not 7"),
    ("kk", {"quiz": "Who?", "solution": "Lily"}, r"lines like \(1\) Zoey is a knight, not 'Lily'"),
]  # fmt: skip


@pytest.mark.parametrize("task, row, message", WRONG_ROWS)
def test_a_wrong_row_is_named(task, row, message, tmp_path):
    good = {"quiz": "Who?", "solution": LILY}  # blank lines do not count
    with pytest.raises(rewards.UserError, match=rf"a\.jsonl, row 2: .*{message}"):
        loaded(tmp_path, [good, "", row, good], task=task)


def test_a_model_without_a_tokenizer_is_told(tmp_path):
    """Its prompts have no tokens."""
    tokenizer = Mock(chat_template=None, bos_token_id=7)
    tokenizer.return_value.input_ids = []
    source = write_rows(tmp_path / "a.jsonl", [ROW])
    with pytest.raises(rewards.UserError, match="is there a tokenizer beside the model"):
        rewards.load_rows(source, make_settings(), tokenizer)


LENGTH = len(TOKENIZER(ASKED).input_ids)  # of all that the model reads
WORKING = {**ROW, "answer": r"We add the two, and so the answer is $\boxed 2$."}
OTHERS = {**ROW, "image": "x.png", "level": 3}
USED_AS_IS = "1 of 1 rows used; prompts are used as they are, and the reward looks for "
JOINED = "; the model has no chat template, so messages are joined"
LINES = [  # rows, settings, whether the model has a chat template, what becomes of the rows
    ([ROW, ""], {"max_prompt_length": LENGTH}, True, "1 of 1 rows used"),
    ([ROW], {"max_prompt_length": LENGTH - 1}, True,
     "0 of 1 rows used; 1 longer than --max-prompt-length"),
    ([ROW, WORKING], {}, True, "1 of 2 rows used; 1 with a solution that no answer could match"),
    ([OTHERS], {}, True, "1 of 1 rows used; other columns, for the reward: image"),
    ([chat()], {}, True, rf"{USED_AS_IS}\boxed{{}}"),
    ([{"prompt": "1", "answer": "2"}], {}, False, rf"{USED_AS_IS}\boxed{{}}"),
    ([{"prompt": "1", "answer": LILY}], {"task": "kk"}, True, f"{USED_AS_IS}<think> and <answer>"),
    ([ROW], {}, False, f"1 of 1 rows used{JOINED}"),
    ([chat()], {"reward": "my:own"}, False, f"1 of 1 rows used{JOINED}"),
]  # fmt: skip


@pytest.mark.parametrize("rows, settings, has_template, told", LINES)
def test_one_line_tells_what_becomes_of_the_rows(
    rows, settings, has_template, told, tmp_path, capsys
):
    """It ends with the end of the first prompt; it does not tell what is 0."""
    tokenizer = TOKENIZER if has_template else tokenizer_with(None)
    source = write_rows(tmp_path / "a.jsonl", rows)
    examples = rewards.load_rows(source, make_settings(**settings), tokenizer)
    if examples:
        told += f"; the first prompt ends in {examples[0].prompt[-60:]!r}"
    assert capsys.readouterr().out == f"a.jsonl: {told}\n"


def test_a_solution_is_gradable_if_what_a_model_would_write_is_rewarded():
    """A model writes 98 for the solution $98$; that the solution matches itself is not enough."""
    for solution in (r"\boxed{98} \boxed{\[98\]}", r"\$32,\!348", r"45\text{ mph}", r"1 \\[2pt] 2"):
        assert rewards.is_gradable(solution, "math"), solution
    for solution in (r"\$\frac23 \approx \$0.67", r"\frac{1}{2", r"\boxed{1} or \boxed{2}", ""):
        assert not rewards.is_gradable(solution, "math"), solution


@pytest.mark.parametrize("task", rewards.TASKS)
def test_with_a_reward_of_ones_own_a_solution_may_be_anything(task, tmp_path):
    """A puzzle has its number of people where its solution reads as one, else the column level."""
    solutions = [None, 0, "", {"target": 24}, "Lily", "12 #### x", JACK]
    rows = [{"problem": "Who?", "answer": solution, "level": 9} for solution in solutions]
    examples = loaded(tmp_path, rows, task=task, reward="my:own")
    assert [example.solution for example in examples] == solutions
    last = "2" if task == "kk" else "9"
    assert [example.difficulty for example in examples] == ["9"] * 6 + [last]


@pytest.mark.parametrize(
    "source, configuration, split",
    [
        ("owner/name", None, "train"),
        ("owner/name:main:test+dev", "main", "test+dev"),
        ("owner/name::test", None, "test"),
    ],
)
def test_a_data_set_of_the_hub(source, configuration, split, monkeypatch):
    load_dataset = Mock(return_value=datasets.Dataset.from_list([ROW]))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(rewards.load_rows(source, make_settings(), TOKENIZER)) == 1
    load_dataset.assert_called_once_with("owner/name", configuration, split=split)


NO_FILES = ["my.csv", "my.JSON", "no.parquet", "./my", "/my/data", "a/b/c", "~/my", "no.parquet:x"]


@pytest.mark.parametrize("source", NO_FILES)
def test_a_file_that_does_not_exist_is_not_looked_up_on_the_hub(source, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=AssertionError))
    with pytest.raises(rewards.UserError, match=f"cannot read {source}: there is no such file"):
        rewards.read_table(source)


@pytest.mark.parametrize("name", ["my.csv", "my.json", "my"])
def test_a_file_of_another_kind_points_to_its_conversion(name, folder):
    (folder / name).write_text("")
    with pytest.raises(rewards.UserError, match=r"Converting data of data/GUIDE\.md"):
        rewards.read_table(name)


def test_what_guide_says_on_csv_and_json(folder):
    """The answer None and leading zeros are kept, and so are the messages of a chat."""
    page = (ROOT / "data" / "GUIDE.md").read_text(encoding="utf-8")
    guide = page.partition("\n## Converting data\n")[2]
    csv_lines = re.search("```python\n(.*?)```", guide, re.DOTALL)[1]
    [read_csv] = re.findall("rows = pandas.read_csv.*", csv_lines)
    [read_json] = re.findall("# or.*(rows = pandas.DataFrame.*)", csv_lines)
    json_lines = csv_lines.replace(read_csv, read_json)
    (folder / "my.csv").write_text('problem,answer\nHow many?,None\nAgent?,007\n"1, 2?",NA\n')
    (folder / "my.json").write_text(json.dumps([chat(), ROW]))
    for lines, solutions in ((csv_lines, ["None", "007", "NA"]), (json_lines, ["2", "2"])):
        exec(lines, {})  # noqa: S102
        examples = rewards.load_rows("my.jsonl", make_settings(), TOKENIZER)
        assert [example.solution for example in examples] == solutions
    assert [example.question for example in examples] == ["1 + 1?", "1 + 1?"]


def problems(examples):
    return [example.question for example in examples]


def test_a_tenth_of_ones_own_data_is_held_out(tmp_path, capsys):
    """The same rows for every seed; what is there twice is not trained on."""
    rows = [{"problem": f"{i // 2}?", "answer": "2"} for i in range(42)]
    own = write_rows(tmp_path / "own.jsonl", rows)
    training, evaluation = rewards.load_data(make_settings(data=own, seed=1), TOKENIZER)
    assert problems(evaluation) == ["12?", "13?", "1?", "8?", "16?"]  # rows 24, 26, 2, 16, 32
    assert problems(training) == [
        row["problem"] for row in rows if row["problem"] not in problems(evaluation)
    ]
    assert "32 rows to train on, 5 of 5 to evaluate on" in capsys.readouterr().out
    many = write_rows(tmp_path / "many.jsonl", [{"prompt": f"{i} is"} for i in range(5010)])
    settings = make_settings(data=many, reward="rewards:math_reward")
    assert len(rewards.load_data(settings, TOKENIZER)[1]) == 500


THREE = [{"problem": f"{i}?", "answer": "2"} for i in range(3)]
NO_ROW_IS_LEFT = [  # the rows of --data, those of --eval-data, what is told
    ([ROW], None, "train on: of 1 rows used 1 are held out, and 0 have .* the 1 rows"),
    (THREE, THREE * 2, "train on: of 3 rows used 0 are held out, and 3 have .* the 6 rows"),
    (THREE, [], "evaluate on: of 3 rows used 0 are held out, and 0 have .* the 0 rows"),
]


@pytest.mark.parametrize("rows, eval_rows, reason", NO_ROW_IS_LEFT)
def test_why_no_row_is_left(rows, eval_rows, reason, tmp_path):
    settings = make_settings(data=write_rows(tmp_path / "own.jsonl", rows))
    if eval_rows is not None:
        settings.eval_data = write_rows(tmp_path / "other.jsonl", eval_rows)
    with pytest.raises(rewards.UserError, match=f"no row is left to {reason}"):
        rewards.load_data(settings, TOKENIZER)


def test_no_training_question_is_in_the_evaluation_rows(tmp_path):
    """Also where one of the two is a whole prompt, and beyond --eval-size."""
    rows = [{"problem": f"Say {i}!", "answer": "2", "level": [10, 2][i % 2]} for i in range(20)]
    rows += [{"prompt": CHAT, "solution": "2"}]
    whole = [{"role": "user", "content": f"Say 1!{rewards.MATH_PROMPT}"}]
    others = [{"prompt": whole, "solution": "2"}, {**ROW, "problem": "Say 99!"}]
    own = write_rows(tmp_path / "own.jsonl", [*rows, *others])
    other = write_rows(tmp_path / "other.jsonl", rows)
    settings = make_settings(data=own, eval_data=other, eval_size=3)
    training, evaluation = rewards.load_data(settings, TOKENIZER)
    assert problems(training) == ["Say 99!"]
    assert [example.difficulty for example in evaluation] == ["2"] * 3 + ["10"] * 3 + ["all"]
    assert problems(evaluation)[:3] != ["Say 1!", "Say 3!", "Say 5!"]  # a sorted file: its easiest


def test_batches_come_in_a_new_order_each_time_through():
    def batches(seed, skip=0):
        return list(itertools.islice(rewards.prompt_stream(range(5), 2, seed, skip), 10 - skip))

    drawn = [[1, 0], [4, 3], [2, 3], [4, 2], [1, 0], [0, 3], [4, 1], [2, 4], [0, 2], [1, 3]]
    assert batches(seed=1) == drawn  # README's run depends on it
    assert batches(seed=1, skip=4) == drawn[4:]
    assert batches(seed=2) != drawn


# rewards.py: prompts ------------------------------------------------------------------------------


def tokenizer_with(template, bos=None, is_added=True):
    """A tokenizer with a chat template (None: of a base model), and perhaps a first token."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = template
    if bos:
        tokenizer.add_special_tokens({"bos_token": bos})
    if bos and is_added:
        first = [(bos, tokenizer.bos_token_id)]
        tokenizer._tokenizer.post_processor = TemplateProcessing(f"{bos} $A", special_tokens=first)
    return tokenizer


TURNS = "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{% endfor %}<assistant>"
DROPS = TURNS.replace("messages %}", "messages if turn.role != 'system' %}")
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('No!') }}{% endif %}" + TURNS
SYSTEM = rewards.TASKS["kk"].system

PUZZLE_PROMPTS = [  # a chat template, the prompt of the puzzle "Who?"
    (TURNS, f"<system>{SYSTEM}<user>Who?<assistant><think>"),
    (DROPS, "<user>Who?<assistant><think>"),
    (REFUSES, f"<user>{SYSTEM}\n\nWho?<assistant><think>"),  # Gemma 1 and 2, Mistral 7B
    (TURNS + "<think>\n\n", f"<system>{SYSTEM}<user>Who?<assistant><think>\n"),  # DeepSeek's: once
    (None, f"{SYSTEM}\n\nWho?\n\n<think>"),  # a base model: the words
]


@pytest.mark.parametrize("template, prompt", PUZZLE_PROMPTS)
def test_the_prompt_of_a_puzzle(template, prompt, tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [{"quiz": "Who?", "solution": LILY}])
    settings = make_settings(task="kk", max_prompt_length=10_000)
    (example,) = rewards.load_rows(source, settings, tokenizer_with(template))
    assert example.prompt == prompt


def test_no_later_turn_of_a_chat_is_lost():
    """Neither where a template refuses the system message, nor where there is no template."""
    roles = ("system", "user", "assistant", "user")
    chat = [{"role": role, "content": f"{role}?"} for role in roles]
    prompt = rewards.render_prompt(tokenizer_with(REFUSES), chat)
    assert prompt == "<user>system?\n\nuser?<assistant>assistant?<user>user?<assistant>"
    words = rewards.render_prompt(tokenizer_with(None), chat).split()
    assert words == [f"{role}?" for role in roles]


def test_a_template_may_leave_out_blanks_at_the_ends_of_a_message(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [chat(" 1 + 1?\n")])
    tokenizer = tokenizer_with(TURNS.replace("turn.content", "turn.content | trim"))
    (example,) = rewards.load_rows(source, make_settings(), tokenizer)
    assert example.prompt == "<user>1 + 1?<assistant>"


def test_a_chat_that_the_template_refuses_ends_in_one_sentence(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [ROW])
    tokenizer = tokenizer_with("{{ raise_exception('No!') }}")
    with pytest.raises(rewards.UserError, match=r"a\.jsonl, row 1: No!"):
        rewards.load_rows(source, make_settings(), tokenizer)


def test_a_prompt_begins_once_as_the_model_is_used_to():
    """Llama's tokenizer puts a token before every text, GPT-2's has one and does not."""
    tokenizer = tokenizer_with(TURNS, bos="<|bos|>")
    assert rewards.render_prompt(tokenizer, CHAT) == "<user>1 + 1?<assistant>"
    assert rewards.render_prompt(tokenizer, "1 + 1 =") == "<|bos|>1 + 1 ="
    assert rewards.render_prompt(tokenizer, "<|bos|>1 + 1 =") == "<|bos|>1 + 1 ="
    tokenizer = tokenizer_with(None, bos="<|bos|>", is_added=False)
    assert rewards.render_prompt(tokenizer, "1 + 1 =") == "1 + 1 ="
