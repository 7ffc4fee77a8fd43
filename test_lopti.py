"""Tests of lopti.py and rewards.py: the method in five tests, then a section for each of theirs.

    python -m pytest -q                  # the quick tests
    LOPTI_ALL=1 python -m pytest -q      # all

The equations are compared with numbers that were worked out by hand, here and in the examples of
docstrings, and with golden.json of data/ports. A training step is compared with a second
implementation, `plain_steps`, which computes one token at a time.
"""

import copy
import doctest
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace
from unittest.mock import Mock, patch

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

# The method in five tests -------------------------------------------------------------------------


def test_eq_1():
    """Rewards of 4, 0 and 2 have mean 2 and deviation 2; good tokens are clipped at 1.24."""
    advantages = lopti.group_advantages(torch.tensor([4.0, 0.0, 2.0]), group_size=3)
    assert advantages.tolist() == pytest.approx([1, -1, 0], abs=1e-5)
    ratios = torch.tensor([1.5, 0.5, 1.5])
    losses = lopti.policy_loss(ratios.log(), torch.zeros(3), advantages, 0.2, 0.24, 10)
    assert losses.tolist() == pytest.approx([-1.24, 0.8, 0], abs=1e-5)


def test_eq_4():
    """With α = 0.4 a token of π = 0.1 has the weight 0.4 · 0.1 + 0.6, whatever its sign."""
    pi = torch.tensor([[0.1, 0.5, 1.0]])
    weighted = lopti.reweight_advantages(torch.tensor([[2.0, -2.0, -2.0]]), pi.log(), alpha=0.4)
    assert weighted[0].tolist() == pytest.approx([1.28, -1.6, -2])


def test_the_split():
    """Low are the tokens with π < η, high all others of the response: not those of the padding."""
    pi = torch.tensor([[0.1, 0.5, 0.9, 0.2]])
    mask = torch.tensor([[True, True, True, False]])
    low, high = lopti.split_tokens(pi.log(), mask, eta=0.5)
    assert (low.int() - high.int()).tolist() == [[1, -1, -1, 0]]


def test_one_n_of_both_passes():
    """N counts all response tokens in both: so their gradients add up to that of a single pass."""
    rollout = random_rollout(random_model())
    gradients = []
    for tokens in (*lopti.split_tokens(rollout.old_logprobs, rollout.mask, 1e-3), rollout.mask):
        model = random_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1)  # a step of the gradient's size
        lopti.update(model, optimizer, rollout, tokens, settings_of(f"{ONE_STEP} --kl-coef 0.5"))
        gradients.append(weights(model) - weights(random_model()))
    low, high, single = gradients
    assert min(low.norm(), high.norm()) > 0.1 * single.norm()
    assert (low + high - single).norm() < 1e-4 * single.norm()


def test_alpha_and_eta_of_0_are_grpo():
    """A response's tokens all have its Â, to the last bit, and are trained on together."""
    rollout, updates = one_step(random_model(), "--alpha 0 --eta 0 --mini-batch-size 0")
    assert torch.equal(rollout.advantages, rollout.response_advantages[:, None] * rollout.mask)
    ((name, (result,)),) = updates
    assert name == "all"
    shares = rollout.advantages.sum() / rollout.mask.sum()  # the ratios are 1
    assert result["policy_loss"] == pytest.approx(-shares.item(), abs=1e-4)


# Helpers ------------------------------------------------------------------------------------------

ONE_STEP = "--mini-batch-size 0 --max-grad-norm 1e9"


def settings_of(flags=""):
    return lopti.parse_arguments(flags.split())


def exit_code(flags):
    """Runs the program, and returns its exit code, also where argparse ends it."""
    try:
        return lopti.main(shlex.split(flags))
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
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.mul_(6)
    return model.eval()


def shapes_read(model):
    """Returns a list that gets the form of the token ids, (rows, length), at each forward pass."""
    shapes = []

    def look(module, inputs, named):
        ids = inputs[0] if inputs else named["input_ids"]
        shapes.append(tuple(ids.shape))

    model.register_forward_pre_hook(look, with_kwargs=True)
    return shapes


def save_both(model, tokenizer, folder):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def other_template():
    """A tokenizer whose chat template ends a response with another token, 4, than its own."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = TOKENIZER.chat_template.replace("<|end|>", "<|assistant|>\n")
    return tokenizer


def random_rollout(model, flags=""):
    """12 rows of random lengths with Â = 1, and with other π of the reference."""
    rng = random.Random(1)
    prompts = [rng.choices(range(5, 308), k=rng.randint(2, 7)) for _ in range(12)]
    responses = [rng.choices(range(5, 308), k=rng.randint(1, 9)) for _ in range(12)]
    ids, mask = lopti.pack(prompts, responses)
    old_logprobs, entropies = lopti.response_logprobs(model, ids, mask, settings_of(flags))
    return lopti.Rollout(
        texts=[TOKENIZER.decode(response) for response in responses],
        truncated=torch.zeros(12, dtype=torch.bool),
        rewards=torch.zeros(12, dtype=torch.float64),
        response_advantages=torch.ones(12),
        ids=ids,
        mask=mask,
        old_logprobs=old_logprobs,
        ref_logprobs=old_logprobs - 0.3 * mask,
        entropies=torch.zeros_like(entropies),  # those of the current policy count
        advantages=mask.float(),
    )


def adamw(policy, flags=""):
    """AdamW as a reader would write it."""
    settings = settings_of(flags)
    decay = settings.weight_decay
    return torch.optim.AdamW(policy.parameters(), settings.learning_rate, weight_decay=decay)


def one_step(policy, flags=""):
    """A training step on three prompts with the seed 0."""
    torch.manual_seed(0)
    settings = settings_of(f"{OFF_DEFAULT} {flags}")
    others = (copy.deepcopy(policy), adamw(policy), TOKENIZER, vowels, EXAMPLES, settings)
    return lopti.training_step(policy, *others)


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# The training step --------------------------------------------------------------------------------

SOLUTIONS = {"Lily": "", "Zoey is a knight": "1", "Liam is a knave or": "22"}  # of three prompts
CLIPS = {name: f"clip_ratio/{name}_mean" for name in ("low", "high", "dual")}
STATISTICS = ("policy_loss", "kl", *CLIPS.values(), "updated_share", "grad_norm", "optimizer_steps")


def example_of(prompt, solution, difficulty="2", /, **columns):
    """A row as `load_data` makes it."""
    ids = TOKENIZER(prompt).input_ids
    return rewards.Example(prompt, ids, prompt, solution, difficulty, columns)


EXAMPLES = [example_of(*prompt) for prompt in SOLUTIONS.items()]


def vowels(completions, solution, **columns):
    """Gives 1e8 + 0, 1 or 2, by the vowels and the solution; only float64 tells these apart."""
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
    "--micro-batch-tokens 24 --learning-rate 1e-2 --weight-decay 0.3 --clip-low 0.05 "
    f"--clip-high 0.1 --clip-dual 1.3 --sample-batch-size 8 --reward {__name__}:vowels "
    "--solved-reward 1 "
)
TRAINING = {  # flags: the tokens of each pass
    "--alpha 0.3 --eta 0.06 --kl-coef 0.5 --min-p 0.03 --update-epochs 2": "low high low high",
    "--alpha 0.9 --eta 0.06 --order high-low --advantage reinforce++ --kl-coef 0": "high low",
    "--kl-coef 0.2 --update-epochs 2": "all all",
    "--eta 0.06 --order low --temperature 1": "low",
}


def plain_advantages(rewards, lengths, settings):
    """Â of Eq. 1, or of REINFORCE++, which compares the rewards of all tokens of the batch."""
    advantages = []
    for i, reward in enumerate(rewards):
        first = i - i % settings.group_size
        compared = rewards[first : first + settings.group_size]
        if settings.advantage == "reinforce++":
            compared = [each for each, length in zip(rewards, lengths) for _ in range(length)]
        advantages.append((reward - mean(compared)) / (stdev(compared) + 1e-6))
    return advantages


def plain_steps(policy, reference, optimizer, rows, passes, settings):
    """Steps 3 to 7, a token at a time, without masks; yields each optimizer step's report."""
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
def test_training_step_against_a_plain_second_implementation(flags):
    """Two steps compute what `plain_steps` computes from the same responses.

    Compared are rewards, log π and entropies, what every optimizer step reports, and the weights.
    """
    settings = settings_of(OFF_DEFAULT + flags)
    passes = TRAINING[flags].split()
    policy = random_model(ends=ENDS, hidden_size=16, attention_dropout=0.5).double()
    policy.lm_head.weight.data.mul_(4)  # π from 0.004 to 0.4
    start = weights(policy)
    plain = copy.deepcopy(policy)
    reference = copy.deepcopy(policy)
    read = shapes_read(policy)
    optimizer = lopti.new_optimizer(policy, settings)
    plain_optimizer = adamw(plain, OFF_DEFAULT + flags)
    happened = set()
    for _ in range(2):
        rollout, updates = lopti.training_step(
            policy, reference, optimizer, TOKENIZER, vowels, EXAMPLES, settings
        )
        mask = rollout.mask
        assert mask.sum(1).amax() == 6
        rows = plain_rows(rollout.ids, mask)
        assert rollout.rewards.tolist() == [plain_reward(row) for row in rows]
        logprobs, entropies = zip(*[plain_logprobs(plain, row, settings) for row in rows])
        assert (rollout.old_logprobs[mask] - torch.cat(logprobs)).abs().max() < 1e-3
        assert (rollout.entropies[mask] - torch.cat(entropies)).abs().max() < 1e-3
        assert not rollout.old_logprobs[~mask].any()
        assert not rollout.entropies[~mask].any()
        steps = plain_steps(plain, reference, plain_optimizer, rows, passes, settings)
        assert [name for name, _ in updates] == passes
        results = [result for _, of_pass in updates for result in of_pass]
        for result, expected in zip(results, steps, strict=True):
            assert result == pytest.approx(expected, rel=1e-3, abs=1e-5)
            happened |= {name for name, value in result.items() if value}
    assert len(passes) == 1 or set(CLIPS.values()) <= happened  # every clip was active somewhere
    micro_batches = [shape for shape in read if shape[1] > 1]
    assert all(rows == 1 or rows * length <= 24 for rows, length in micro_batches)
    assert max(micro_batches)[0] > 1
    moved = (weights(plain) - start).norm()
    assert moved > 1
    assert (weights(policy) - weights(plain)).norm() < 1e-3 * moved


# 1. Sampling, 11. Generation ----------------------------------------------------------------------


def sample(model, prompts, group_size, flags="", tokenizer=TOKENIZER, greedy=False):
    examples = [example_of(prompt, "") for prompt in prompts]
    return lopti.sample(model, tokenizer, examples, group_size, settings_of(flags), greedy)


@pytest.mark.parametrize("temperature, min_p", [(1.0, 0.0), (0.7, 0.0), (0.8, 0.3)])
def test_samples_come_from_the_distribution_that_is_scored(temperature, min_p, tmp_path):
    """Whatever the model's own options say: 4,000 first tokens against π, by chi-squared."""
    save_both(random_model(), TOKENIZER, tmp_path)
    own = {"eos_token_id": 1, "do_sample": True, "top_k": 20, "top_p": 0.8, "temperature": 0.1}
    own |= {"repetition_penalty": 1.8, "min_p": 0.5, "suppress_tokens": list(range(20, 60))}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    model, tokenizer = lopti.load_model(tmp_path, "cpu")
    torch.manual_seed(0)
    flags = f"--temperature {temperature} --min-p {min_p} --max-new-tokens 1"
    ids, *_ = sample(model, ["Lily said"], 4000, flags, tokenizer)
    every_token = torch.arange(len(TOKENIZER))[:, None].tolist()
    scored = lopti.pack([TOKENIZER("Lily said").input_ids], every_token)
    logprobs, _ = lopti.response_logprobs(model, *scored, settings_of(flags))
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
    padding token that was itself sampled. A batch, here of two groups, reads each prompt once, all
    of it but its last token: the second batch, of one token, reads nothing.
    """
    model = random_model(family, ends, **changes)
    options = GenerationConfig(do_sample=False, pad_token_id=0, max_new_tokens=40)
    options.eos_token_id = ends
    alone = []  # prompts and responses
    for prompt in PROMPTS:
        ids = TOKENIZER(prompt, return_tensors="pt").input_ids
        alone.append(model.generate(ids, generation_config=options)[0].tolist())
    model.generation_config.update(pad_token_id=alone[0][-33])
    calls = watch(monkeypatch, model, "generate").call_args_list
    read = shapes_read(model)
    flags = "--max-new-tokens 40 --sample-batch-size 9"
    sampled, mask, _, truncated = sample(model, PROMPTS, 4, flags, greedy=True)
    longest = len(TOKENIZER(PROMPTS[0]).input_ids)
    assert [shape for shape in read if shape[1] > 1] == [(2, longest - 1)]
    assert max(rows for rows, _ in read) == 8
    layers = calls[-1].kwargs[lopti.CACHE].layers  # those with a window keep no more
    assert [layer.is_sliding for layer in layers] == [family == "Gemma2", False]
    for i, row in enumerate(plain_rows(sampled, mask)):
        assert row.prompt.tolist() == TOKENIZER(PROMPTS[i // 4]).input_ids
        assert [*row.prompt, *row.response] == alone[i // 4]
        assert truncated[i] == (alone[i // 4][-1] not in ends)


def test_a_growing_layer_holds_what_that_of_hf_holds_and_seldom_copies_it():
    """Its keys and values are those of HF's layer, but it copies them once in 32 tokens."""
    layer = lopti.GrowingLayer()
    plain = DynamicLayer()
    copies = 0
    for count in [5, *[1] * 70, 3, 70, 1]:
        keys = torch.randn(4, 2, count, 3)  # (rows, heads, new tokens, size)
        values = torch.randn(4, 2, count, 6)
        before = layer.keys
        for ours, expected in zip(layer.update(keys, values), plain.update(keys, values)):
            assert torch.equal(ours, expected)
        copies += layer.keys is not before
    assert layer.get_seq_length() == plain.get_seq_length()
    assert copies <= 1 + layer.get_seq_length() // lopti.STRETCH
    rounded = lopti.GrowingLayer()
    for _ in range(2):
        rounded.update(keys, values.bfloat16())
    assert rounded.keys.dtype == rounded.values.dtype == torch.bfloat16


def test_which_tokens_end_a_response():
    """Those of tokenizer and model, and what the template writes next; no ordinary word."""
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


def test_every_end_token_ends_a_response_and_belongs_to_it(flags, tmp_path):
    """A response stops at the first end token, of whichever kind, and then leaves the batch.

    The end token is in its ids, but not in its text, also for a trained model from final/.
    """
    tokenizer = other_template()
    tokenizer.clean_up_tokenization_spaces = True
    base = save_both(random_model(ends=[3]), tokenizer, tmp_path / "base")
    assert exit_code(f"{flags} --model {base} --steps 1 --output {tmp_path}/run") == 0
    model, tokenizer = lopti.load_model(tmp_path / "run" / "final", "cpu")
    read = shapes_read(model)
    torch.manual_seed(0)
    words = "--temperature 2 --max-new-tokens 60"
    sampled, mask, texts, truncated = sample(model, PROMPTS[:2], 128, words, tokenizer)
    unfinished = int((mask.sum(1) > lopti.STRETCH).sum())
    assert {rows for rows, _ in read} == {2, 256, unfinished}
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
    model = random_model(ends=range(len(TOKENIZER)))
    *_, truncated = sample(model, PROMPTS, 1, "--max-new-tokens 1")  # ends at the limit
    assert not truncated.any()


# 3. Log-probabilities -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_number_format_is_that_of_forward_passes(dtype):
    """Layers compute in that of --dtype; weights stay float32, and so do logits / temperature."""
    policy = random_model("Qwen2", tie_word_embeddings=True)
    flags = f"--stapo --dtype {str(dtype).removeprefix('torch.')}"
    computed = set()  # dtypes of the layers' outputs
    for module in policy.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _, __, output: computed.add(output.dtype))
    lopti.evaluate(policy, TOKENIZER, vowels, EXAMPLES, settings_of(f"{OFF_DEFAULT} {flags}"))
    assert computed == {dtype}
    rollout, _ = one_step(policy, flags)
    assert computed == {dtype}
    assert weights(policy).dtype == torch.float32
    options = [settings_of(f"{flags} --temperature {number}") for number in (1, 0.7)]
    rows = (policy, rollout.ids, rollout.mask)
    logits, divided = [lopti.token_logits(*rows, settings) for settings in options]
    assert torch.equal(divided, logits / 0.7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_checkpointing_changes_memory_and_nothing_else(dtype, monkeypatch):
    """A step gives the same weights to the last bit, and computes layers twice in the update."""
    layer_norm = watch(monkeypatch, torch.nn.functional, "layer_norm")
    flags = f"{ONE_STEP} --micro-batch-tokens 999 --dtype {dtype}"
    plain = random_model("GPT2")  # which has dropout
    one_step(plain, flags)
    count = layer_norm.call_count
    model = random_model("GPT2")
    one_step(model, f"{flags} --gradient-checkpointing")
    assert layer_norm.call_count == 2 * count + 4  # 2 layers × 2 layer norms
    assert torch.equal(weights(plain), weights(model))
    assert not torch.equal(weights(plain), weights(random_model("GPT2")))


def test_min_p_acts_in_a_training_step():
    """With the same seed the responses are others: of 0.9 only the most probable tokens."""
    texts = [one_step(random_model(), f"--min-p {min_p}")[0].texts for min_p in (0, 0.9)]
    assert texts[0] != texts[1]


def test_micro_batches_count_padding():
    """Rows of 2, 2 and 4 tokens make 3 · 4 = 12, and rows of 4 and 5 make 10."""
    ends = torch.tensor([[7], [9], [2], [5], [30], [2], [4]])
    mask = torch.arange(30) == ends - 1  # a response of one token at the end of each row
    tokens = mask.clone()
    tokens[0] = False  # a row without one is left out
    for size, batches in (
        (12, [([2, 5, 6], 4), ([3], 5), ([1], 9), ([4], 30)]),
        (9, [([2, 5], 2), ([6], 4), ([3], 5), ([1], 9), ([4], 30)]),
    ):
        assert list(lopti.micro_batches(mask, tokens, size)) == batches


# 4 to 7. Advantages, Eq. 4, the split, the update -------------------------------------------------


@pytest.mark.parametrize("reward", [0.1, -3.0, 1e-8, 1e6 + 0.1])
def test_equal_rewards_get_exactly_zero_and_nearly_equal_ones_do_not(reward):
    """The mean of seven times 0.1 is not 0.1 in floating point; Adam would make whole steps of it.

    Rewards that differ by 1e-5 are not equal.
    """
    values = torch.full((7,), reward, dtype=torch.float64)
    for is_unequal in (False, True):
        values[0] += is_unequal * 1e-5 * (1 + abs(reward))
        assert lopti.group_advantages(values, 7).any() == is_unequal
        counts = torch.arange(1, 8)
        assert lopti.reinforce_pp_advantages(values, counts).any() == is_unequal
    solved = lopti.is_solved([0.7 + 0.2 + 0.1, 0.99999], solved_reward=1)  # 0.9999999999999999
    assert solved.tolist() == [1, 0]


@pytest.mark.parametrize("name", check_port.FUNCTIONS)
@pytest.mark.parametrize("case", check_port.GOLDEN["cases"])
def test_golden_cases(name, case):
    """The functions of Eqs. 1 and 4, and the gradients of the loss, equal golden.json to 1e-9."""
    found, right = check_port.outputs(name, getattr(lopti, name), case)
    assert check_port.first_wrong(found, right, 1e-9) == math.inf


@pytest.mark.parametrize("factor, steps", [(0, 2), (1e-9, 3), (math.nan, 2), (1e30, 2)])
def test_which_gradients_make_a_step(factor, steps):
    """None where the gradient is 0 or NaN, or its norm infinite (with 1e30); a small one does."""
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

    Here each row is a micro-batch. It is read without a cache, gives logits for its response only,
    and its backward pass comes before the next row. A mini-batch without a row makes no step.
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
    settings = settings_of("--mini-batch-size 4 --micro-batch-tokens 1")
    first, *others = lopti.update(model, adamw(model), rollout, update_mask, settings)
    rows = plain_rows(rollout.ids[update_mask.any(1)], rollout.mask[update_mask.any(1)])
    expected = [(len(row.prompt) + len(row.response), len(row.response)) for row in rows]
    assert sorted(seen[::2]) == sorted(expected)
    assert seen[1::2] == ["backward"] * len(expected)
    assert set(first.values()) == {0.0}
    assert first.keys() == others[0].keys()
    assert [result["optimizer_steps"] for result in others] == [1, 1]


# 8. Later methods ---------------------------------------------------------------------------------


def test_which_tokens_the_later_methods_keep():
    """Those that a hand picks by their rules, and never padding.

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
    """N is the number of tokens that they keep, or 1: with Â = 1 the loss is -N/N, or 0."""
    model = random_model()
    rollout = random_rollout(model, flags)
    settings = settings_of(f"--kl-coef 0 {flags}")
    for result in lopti.update(model, adamw(model), rollout, rollout.mask, settings):
        assert result["policy_loss"] == pytest.approx(loss, abs=1e-3)
        assert result["updated_share"] == pytest.approx(share, abs=0.03)


# 9. The training loop -----------------------------------------------------------------------------


def test_defaults_that_depend_on_other_settings(capsys):
    """A run prints its learning rate, and which other defaults may not suit one's own model."""
    assert settings_of().solved_reward == 3
    assert settings_of("--task math").solved_reward == 1
    assert settings_of("--solved-reward 0").solved_reward == 0
    with pytest.raises(lopti.UserError, match="--reward needs --solved-reward"):
        settings_of("--reward rewards:math_reward")
    mine = "--model mine --learning-rate 1e-5 --group-size 2 --steps 9"
    paper = "default: 1e-6, the paper's for 512"
    tokens = "--max-new-tokens 256"
    for words, rate, said, *not_own in (
        ("", 1e-4, "0.0001 for 128 responses in a step (default: 1e-4, for 128)"),
        ("--model a", 1e-6, f"1e-06 for 128 responses in a step ({paper})", tokens, "--steps 24"),
        (mine, 1e-5, f"1e-05 for 32 responses in a step ({paper})", tokens),
    ):
        settings = settings_of(words)
        model = random_model()
        assert lopti.new_optimizer(model, settings).param_groups[0]["lr"] == rate
        lopti.print_start(Path("run"), 7, model, settings)
        start = [f"7 of {settings.steps} steps are done, on cpu. The run is in run."]
        start.append(f"The learning rate is {said}.")
        lines = [f"{each} is made for the bundled model: choose your own." for each in not_own]
        assert capsys.readouterr().out.splitlines() == start + lines


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Five steps of AR + Lopti with a small model and 20 rows; hardly a setting is a default."""
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
        "--max-new-tokens 12 --learning-rate 2e-4 --weight-decay 0.1 --seed 3 "
    )


@pytest.fixture(scope="module")
def finished_run(flags, tmp_path_factory):
    """A run in which each step samples at random and moves the weights."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    assert lopti.train(settings_of(f"{flags} --output {folder}")) == folder
    for line in lopti.read_lines(folder / "metrics.jsonl"):
        assert line["entropy"] > 0.1
        assert line["optimizer_steps"] == 4  # two mini-batches in each pass
    return folder


def assert_same_run(folder, other):
    """Both have the same metrics, samples, evaluations and weights, to the last bit."""
    lines = [lopti.read_lines(each / "metrics.jsonl") for each in (folder, other)]
    for mine, its in zip(*lines, strict=True):
        assert mine | {"step_time": 0} == its | {"step_time": 0}
    for name in ("samples.jsonl", "evaluations.jsonl", "final/model.safetensors"):
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name


def test_a_run_is_training_step_in_a_loop(finished_run, flags):
    """A run is what a reader would write with `training_step`: a model, AdamW, and a loop.

    Samples are the first responses to the first two prompts of each step. Evaluations do not change
    the random state, and --temperature and --min-p do not change them.
    """
    settings = settings_of(flags)
    policy, tokenizer = lopti.load_model(settings.model, "cpu")
    reference, _ = lopti.load_model(settings.model, "cpu")
    optimizer = torch.optim.AdamW(policy.parameters(), 2e-4, (0.9, 0.999), 1e-8, 0.1, fused=True)
    examples, held_out = rewards.load_data(settings, tokenizer)
    torch.manual_seed(3)
    samples = []
    for step, batch in enumerate(itertools.islice(rewards.prompt_stream(examples, 3, 3), 5), 1):
        rollout, _ = lopti.training_step(
            policy, reference, optimizer, tokenizer, vowels, batch, settings
        )
        for example, row in ((batch[0], 0), (batch[1], 3)):
            line = {"step": step, "prompt": example.prompt, "solution": example.solution}
            line |= {"response": rollout.texts[row], "reward": rollout.rewards[row].item()}
            samples.append(line)
    names = ["checkpoint.pt", "config.json", "evaluations.jsonl", "final", "metrics.jsonl"]
    assert sorted(path.name for path in finished_run.iterdir()) == [*names, "samples.jsonl"]
    config = json.loads((finished_run / "config.json").read_text())
    assert config == asdict(settings_of(f"{flags} --output {finished_run}"))
    assert lopti.read_lines(finished_run / "samples.jsonl") == samples
    metrics = lopti.read_lines(finished_run / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5]
    for name in ("grad_norm/low", "grad_norm/high", "step_time"):
        assert all(line[name] > 0 for line in metrics)
    trained, _ = lopti.load_model(finished_run / "final", "cpu")
    assert torch.equal(weights(trained), weights(policy))
    plain = replace(settings, temperature=1.0, min_p=0.0)
    results = lopti.evaluate(trained, tokenizer, vowels, held_out, plain)
    evaluations = lopti.read_lines(finished_run / "evaluations.jsonl")
    assert evaluations[-1] == {"step": 5, **results}
    assert [line["solution"] for line in results["greedy"]] == [row.solution for row in held_out]
    assert [line["step"] for line in evaluations] == [0, 2, 4, 5]


def test_settings_of_zero(flags, tmp_path, monkeypatch):
    """Each switches off what --help says; --steps 0 only evaluates, here all prompts at a time.

    The seed of the training is --seed, and that of evaluations is the next number.
    """
    monkeypatch.chdir(tmp_path)
    generate = watch(monkeypatch, lopti, "generate")
    zeros = "--steps 0 --eval-size 0 --eval-samples 0 --sample-batch-size 0"
    assert exit_code(f"{flags} {zeros} --data= --max-new-tokens 1") == 0
    assert generate.call_count == 1
    (folder,) = (tmp_path / "runs").glob(f"kk-*-{os.getpid()}")  # no two runs share a folder
    assert not {"final", "checkpoint.pt"} & {path.name for path in folder.iterdir()}
    assert not lopti.read_lines(folder / "metrics.jsonl")
    (line,) = lopti.read_lines(folder / "evaluations.jsonl")
    assert {row["measure"] for row in line["table"]} == {"greedy", "cut off"}
    assert len(line["greedy"]) == 400
    copies = watch(monkeypatch, copy, "deepcopy").call_args_list
    seeds = watch(monkeypatch, torch, "manual_seed").call_args_list
    zeros = "--kl-coef 0 --eval-every 0 --save-every 0 --mini-batch-size 0"
    assert exit_code(f"{flags} {zeros} --seed 5 --steps 1 --output run") == 0
    (line,) = lopti.read_lines(Path("run/metrics.jsonl"))
    assert line["optimizer_steps"] == 2  # one of each pass
    assert [call.args[0] for call in seeds] == [5, 6, 6]
    assert not any(isinstance(call.args[0], torch.nn.Module) for call in copies)
    assert not Path("run/checkpoint.pt").exists()


# 10. Evaluation -----------------------------------------------------------------------------------


def test_the_accuracy_table_by_hand(monkeypatch):
    """Accuracies and intervals are those that a hand counts, by difficulty.

    The greedy responses are all '7'. So is every second sample, but none of the last prompt's.
    """
    levels = ["10", "10", "10", "2", "2"]
    examples = [example_of("?", solution, level) for solution, level in zip("77877", levels)]
    policy = random_model()
    of_training = torch.get_rng_state()

    def sampled(policy, tokenizer, examples, group_size, settings, greedy=False):
        assert (settings.temperature, settings.min_p, settings.max_new_tokens) == (1, 0, 99)
        assert group_size == (1 if greedy else 4)
        if greedy:  # cut off: the last response
            return None, None, [r"\boxed{7}"] * 5, torch.arange(5) > 3
        # cut off: three of the first prompt
        return None, None, [r"\boxed{7}", "no"] * 8 + ["no"] * 4, torch.arange(20) < 3

    monkeypatch.setattr(lopti, "sample", sampled)
    flags = "--solved-reward 1 --temperature 0.7 --min-p 0.5 --max-new-tokens 99"
    settings = settings_of(flags)  # right is 1, and not the task's 3
    results = lopti.evaluate(policy, TOKENIZER, rewards.math_reward, examples, settings)
    table = results["table"]
    assert torch.equal(torch.get_rng_state(), of_training)
    response = {"prompt": "?", "response": r"\boxed{7}"}
    for line, solution in zip(results["greedy"], "77877", strict=True):
        assert line == response | {"solution": solution, "reward": float(solution == "7")}
    assert [row["difficulty"] for row in table] == ["10", "2", "all"] * 4
    means = {}
    for row in table:
        means.setdefault(row["measure"], []).append(row["mean"])
    assert means == {
        "greedy": pytest.approx([2 / 3, 1, 4 / 5]),
        "avg@4": pytest.approx([1 / 3, 1 / 4, 0.3]),
        "pass@4": pytest.approx([2 / 3, 1 / 2, 3 / 5]),
        "cut off": pytest.approx([3 / 5 / 3, 1 / 5 / 2, 4 / 5 / 5]),
    }
    assert (table[0]["low"], table[0]["high"]) == pytest.approx((0.2077, 0.9385), abs=1e-4)
    assert lopti.wilson_interval(torch.ones(2)) == pytest.approx((1, 0.3424, 1), abs=1e-4)
    (row,) = lopti.accuracy_table(["all"] * 2, {"a": torch.ones(2)})
    assert row["difficulty"] == "all"


def test_what_a_run_reports_at_its_end(tmp_path, capsys):
    """A run prints its first and its last evaluation, and the shortest prompt that became right."""
    texts = ("long, became right", "became right", "was right", "")
    examples = [example_of(text, "") for text in texts]
    evaluations = ((0, 0.25, (-3, 0, 1, -3)), (5, 0.5, (0, 0, 0, 1)), (9, 0.75, (1, 1, 1, 0)))
    for step, share, values in evaluations:
        response = f"<think></think> {step}"
        greedy = [lopti.sample_line(*pair) for pair in zip(examples, [response] * 4, values)]
        row = {"measure": "greedy", "difficulty": "2", "mean": share, "low": 0.1, "high": 0.9}
        line = {"step": step, "table": [row], "greedy": greedy}
        lopti.add_line(tmp_path / "evaluations.jsonl", line)
    lopti.report(tmp_path, examples, settings_of("--solved-reward 1"))
    text = capsys.readouterr().out
    assert re.search(r"people +step 0 +step 9\n", text)
    assert re.search(r"greedy +2 +0.25 \[0.10, 0.90\] +0.75 \[0.10, 0.90\]\n", text)
    assert "\nbecame right\nbefore: 0\nafter:  9\n" in text


# 13. Metrics and files ----------------------------------------------------------------------------


def test_step_metrics_by_hand():
    """Each value of metrics.jsonl is what a hand computes, and GUIDE explains each.

    There are two groups of two; the rewards of the second are equal but for rounding. Mini-batches
    and update epochs are averaged, and Lopti's two passes are added.
    """
    ids, mask = lopti.pack([[5]] * 4, [[6, 7], [8], [9, 9, 9], [6, 6]])
    pi = torch.tensor([0.5, 0.3, 0.4, 0.9, 0.1, 0.8, 0.6, 0.2])
    weighted = torch.tensor([0.8, 0.72, -0.76, 1.92, 1.28, 1.84, 0, 0])  # by α = 0.4
    rollout = lopti.Rollout(
        texts=["?"] * 4,
        truncated=torch.tensor([False, False, True, False]),
        rewards=torch.tensor([3.0, -1.0, 3.0, 3.0 + 1e-9], dtype=torch.float64),
        response_advantages=torch.tensor([1.0, -1.0, 2.0, 0.0]),
        ids=ids,
        mask=mask,
        old_logprobs=lopti.scatter(pi.log(), mask),
        ref_logprobs=lopti.scatter((pi / torch.tensor([2] * 4 + [1] * 4)).log(), mask),
        entropies=lopti.scatter(torch.arange(8.0), mask),
        advantages=lopti.scatter(weighted, mask),
    )
    updates = []
    for name, value in (("low", 1.0), ("high", 10.0), ("low", 3.0), ("high", 30.0)):
        results = [dict.fromkeys(STATISTICS, value), dict.fromkeys(STATISTICS, 2 * value)]
        for result in results:  # two mini-batches
            result["optimizer_steps"] = 1.0
        updates.append((name, results))
    settings = settings_of("--alpha 0.4 --eta 0.45 --update-epochs 2 --group-size 2")
    expected = dict.fromkeys(STATISTICS[:-2], 1.5 * (1 + 10 + 3 + 30) / 2)
    expected |= {"grad_norm/low": 1.5 * (1 + 3) / 2, "grad_norm/high": 1.5 * (10 + 30) / 2}
    expected |= {"reward": 2.0, "reward_std": 8**0.5 / 2, "frac_reward_zero_std": 0.5}
    expected |= {"accuracy": 0.75, "entropy": 3.5, "low_probability_share": 0.5}
    expected |= {"completions/mean_length": 2.0, "completions/clipped_ratio": 0.25}
    expected |= {"rollout/kl": (0.5 - 1 + math.log(2)) / 2, "optimizer_steps": 7.0}
    expected |= {"ar/mean_weight": 0.4 * 3.8 / 8 + 0.6, "ar/removed_share": (9 - 7.32) / 9}
    updates[3][1][1] |= {"grad_norm": 0.0, "optimizer_steps": 0.0}
    expected["grad_norm/high"] = (10 + 20 + 30) / 4
    assert lopti.step_metrics(rollout, updates, settings) == pytest.approx(expected)
    settings = settings_of("--update-epochs 4 --group-size 4 --solved-reward -1")
    metrics = lopti.step_metrics(rollout, updates, settings)
    assert metrics["reward_std"] == pytest.approx(2)
    assert metrics["low_probability_share"] == 0.5  # without Lopti those with π < 0.5
    assert metrics["accuracy"] == 1
    settings = settings_of("--group-size 1 --advantage reinforce++")  # no deviation, and no NaN
    nothing = replace(rollout, response_advantages=torch.zeros(4), advantages=0.0 * mask)
    metrics = lopti.step_metrics(nothing, updates, settings)
    assert metrics["reward_std"] == metrics["ar/removed_share"] == 0
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


@pytest.mark.parametrize("step, share, advantage, steps, said", LOGGED)
def test_what_a_step_says(step, share, advantage, steps, said, finished_run, tmp_path, capsys):
    metrics = lopti.read_lines(finished_run / "metrics.jsonl")[0] | {"step": step, "reward": 2}
    metrics |= {"accuracy": 0.75, "optimizer_steps": steps, "completions/clipped_ratio": share}
    rollout = random_rollout(random_model())
    rollout.advantages *= advantage
    lopti.log_step(tmp_path, metrics, EXAMPLES, rollout, settings_of())
    assert capsys.readouterr().out == said + "\n" * bool(said)


KILLS = [  # before which call of which function, and the step of the last checkpoint
    ("step_metrics", 5, 3),  # lines of step 4 are already written
    ("evaluate", 4, 5),  # of step 5: the trained weights are already in the checkpoint
]


@pytest.mark.parametrize("name, call, step", KILLS)
def test_killed_and_resumed_to_the_last_bit(
    name, call, step, finished_run, flags, tmp_path, monkeypatch
):
    """A run that `kill -9` ended goes on from its checkpoint as if nothing had happened.

    What it had printed is in its log, a file whose encoding lacks most characters.
    """
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
        sys.stdout = (tmp_path / "log").open("w", encoding="ascii")
        os._exit(exit_code(f"{flags} --output {folder}"))
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert torch.load(folder / "checkpoint.pt")["step"] == step
    log = (tmp_path / "log").read_text()
    assert "rows.jsonl: 20 of 20 rows used" in log
    assert f"step {step}: reward 1000000" in log
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 3')  # the kill cut off a line
    assert exit_code(f"--resume {folder}") == 0
    assert_same_run(folder, finished_run)


def test_more_steps_later_are_the_same_run(finished_run, flags, tmp_path):
    """A finished run that is resumed with more steps equals one that had them from the start."""
    folder = tmp_path / "longer"
    assert exit_code(f"{flags} --output {folder} --steps 2") == 0
    assert lopti.resume(folder, steps=5) == folder
    config = json.loads((folder / "config.json").read_text())
    assert config == asdict(settings_of(f"{flags} --output {folder}"))
    assert exit_code(f"--resume {folder}") == 0  # nothing is left to do
    assert_same_run(folder, finished_run)


@pytest.mark.parametrize("done, saved", [(2, 0), (4, 3)])
def test_ctrl_c_says_how_to_go_on(done, saved, finished_run, flags, tmp_path, monkeypatch, capsys):
    """As it says, --resume goes on, or again from the beginning: the same run in the end."""
    step = lopti.training_step
    calls = itertools.count()

    def stopped_step(*inputs):
        if next(calls) >= done:
            raise KeyboardInterrupt
        return step(*inputs)

    folder = tmp_path / "a run"
    resume = f"--resume '{folder}'"
    again = "from the checkpoint of step 3" if saved else "again from the beginning"
    with monkeypatch.context() as stopped:
        stopped.setattr(lopti, "training_step", stopped_step)
        for words, count in ((f"{flags} --output '{folder}'", done), (resume, saved)):
            assert exit_code(words) == 130
            says = f"\nStopped after {count} training steps; {resume} goes on {again}.\n"
            assert capsys.readouterr().out.endswith(says)
    assert exit_code(resume) == 0
    assert_same_run(folder, finished_run)


def test_a_run_that_has_begun_leaves_its_folder(flags, tmp_path, monkeypatch):
    """config.json has the learning rate that was worked out."""
    monkeypatch.setattr(lopti, "evaluate", Mock(side_effect=lopti.UserError("no")))
    flags = flags.replace("--learning-rate 2e-4", "")
    assert exit_code(f"{flags} --output {tmp_path}/run") == 2
    assert json.loads((tmp_path / "run" / "config.json").read_text())["learning_rate"] == 1e-6


FULL_DISK = [(torch, "save", 2), (transformers.LlamaForCausalLM, "save_pretrained", 1)]


@pytest.mark.parametrize("place, name, call", FULL_DISK)
def test_no_space_for_the_weights(place, name, call, flags, tmp_path, monkeypatch, capsys):
    """It ends in one sentence, whatever a library raises, and the last checkpoint stays."""
    save = getattr(place, name)
    calls = itertools.count(1)

    def save_half(weights, path):
        if next(calls) < call:
            return save(weights, path)
        Path(path).write_bytes(b"half")
        raise RuntimeError("unexpected pos 64 vs 0")

    monkeypatch.setattr(place, name, save_half)
    assert exit_code(f"{flags} --output {tmp_path}/run") == 2
    sentence = f"lopti.py: cannot write the weights into {tmp_path}/run: unexpected pos 64 vs 0"
    assert capsys.readouterr().err.splitlines()[-1] == sentence
    (checkpoint,) = tmp_path.rglob("checkpoint*")
    assert torch.load(checkpoint)["step"] == 3


def test_a_checkpoint_of_a_gpu(tmp_path, monkeypatch):
    """It has a GPU's random state (here a pretended one's) and is read into memory."""
    model = random_model()
    optimizer = adamw(model)
    gpu = Mock()
    gpu.get_rng_state.return_value = torch.ones(3)
    monkeypatch.setattr(torch, "get_device_module", Mock(return_value=gpu))
    load = watch(monkeypatch, torch, "load")
    policy = Mock(wraps=model, device=torch.device("xpu"))
    lopti.save_checkpoint(tmp_path, 4, policy, optimizer)
    for kind, count in (("cpu", 0), ("xpu", 1)):
        policy.device = torch.device(kind)
        assert lopti.load_checkpoint(tmp_path, policy, optimizer, settings_of()) == 4
        assert gpu.set_rng_state.call_count == count
        assert load.call_args.kwargs["map_location"] == "cpu"


# 12. The model, 14. Settings, and the command line ------------------------------------------------


def test_a_model_is_loaded_as_training_needs_it(tmp_path, capsys, monkeypatch):
    """A hub name is asked for also beside a folder with its first part."""
    monkeypatch.chdir(tmp_path)
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.pad_token = None
    save_both(random_model("GPT2").bfloat16(), tokenizer, "Qwen")
    model, loaded = lopti.load_model("Qwen", "cpu")
    assert weights(model).dtype == torch.float32
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert not model.training
    assert loaded.pad_token == TOKENIZER.eos_token
    assert not capsys.readouterr().out
    hub = Mock(return_value=(model, {"missing_keys": []}))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", hub)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", Mock(return_value=tokenizer))
    assert lopti.load_model("Qwen/Qwen2.5-0.5B", "cpu")[0] is model
    assert hub.call_args.args == ("Qwen/Qwen2.5-0.5B",)
    model.transformer.h[0].requires_grad_(False)
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
    with patch.object(model.config, "rope_parameters", changing):
        lopti.check_lengths(model, TOKENIZER, examples, 35)
        with pytest.raises(lopti.UserError, match="beyond 39 its positions change"):
            lopti.check_lengths(model, TOKENIZER, examples, 36)
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_tokens(["<new>"])
    examples[0].prompt_ids.append(308)
    with pytest.raises(lopti.UserError, match=r"gives the id 308 \(<new>\), but .* for 308 ids"):
        lopti.check_lengths(model, tokenizer, examples, 36)


def test_help_has_every_flag():
    """--help explains every flag, where characters are Windows', too. The pages name no other."""
    old_windows = {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONIOENCODING": "cp1252"}
    words = [sys.executable, ROOT / "lopti.py", "--help"]
    text = subprocess.check_output(words, env=os.environ | old_windows, encoding="cp1252")
    text = " ".join(text.split())
    named = set(re.findall("--[a-z][a-z-]*", text))
    assert named >= {lopti.flag(each.name) for each in fields(lopti.Settings)} | {"--resume"}
    assert "(default: 0.0, paper: 0.3)" in text
    for page in ("README.md", "data/GUIDE.md"):
        words = (ROOT / page).read_text(encoding="utf-8")
        commands = " ".join(re.findall(r"python lopti\.py[^\n`]*", words))
        flags = re.findall("--[a-z][a-z-]*", commands) + re.findall("`(--[a-z][a-z-]*)", words)
        assert set(flags) <= named | {"--length"}  # that of check_model.py


def test_the_python_on_the_pages():
    """Every block compiles, and the reward of GUIDE gives what the page says."""
    blocks = []
    for page in ("README.md", "data/GUIDE.md", "data/ports/README.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        blocks += re.findall("\n```python\n(.*?)```", text, re.DOTALL)
    names = {}
    for block in blocks:
        code = compile(block, "a page", "exec")
        if "def last_word" in block:
            exec(code, names)  # noqa: S102
    assert names["last_word"](["It is a cat.", "A dog", ""], ["cat"] * 3) == [1.0, 0.0, 0.0]


REFUSED = {  # flags: what the sentence names
    "--model ./typo": "cannot load --model ./typo on --device cpu (there is no such folder, and so",
    "--model finished": "cannot load --model finished on --device cpu (a run has its model in its",
    "--model lossy": "lacks 1 of the model's weights: model.layers.0.mlp.up_proj.weight",
    "--model endless": "has no token that ends a response",
    "--device cuda:99": "on --device cuda:99",  # nobody has so many, and many have none
    "--output finished": "--output finished: File exists; give a new folder, or go on with",
    "--resume finished --steps 4": "has done 5 steps: give --steps 5 or more",
    "--resume finished --learning-rate 1e-3": "only --steps may be given too",
    "--resume other": "other/config.json is not that of this program: Settings.__init__",
    "--resume nowhere": "No such file or directory: 'nowhere/config.json'",
    "--max-new-tokens 9999": "tokens, but the model reads 2048: give a lower --max-new-tokens or",
    "--data broken.parquet": "Parquet",
    "--data missing.jsonl": "cannot read missing.jsonl (there is no such file, and so it",
    "--alpha nan": "--alpha must be from 0 to 1, not nan",
    "--group-size 1": "--group-size must be at least 2: GRPO compares",
    "--order high-low --eta 0": "--order needs --eta above 0",
    "--clip-dual 0.9": "--clip-dual must be at least 1, not 0.9",
    "--steps -1": "--steps must be at least 0, not -1",
    "--seed 4294967296": "--seed must be from 0 to 4294967295, not 4294967296",
    "--alp 0.3": "unrecognized arguments: --alp 0.3",
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
    for name in ("finished", "other"):
        shutil.copytree(finished_run, name)
    Path("other/config.json").write_text('{"gamma": 1}')
    Path("broken.parquet").write_text("?")
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=ConnectionError("no network")))
    before = {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}
    assert exit_code(words if "--resume" in words else f"{flags} --output run {words}") == 2
    *usage, sentence = capsys.readouterr().err.splitlines()
    assert REFUSED[words] in sentence
    assert len(usage) < 2  # that of argparse
    assert before == {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}


def test_wrong_settings_from_python():
    for settings, wanted in (
        ({"group_size": 2.5}, "of type int"),
        ({"alpha": "0.3"}, "of type float"),
        ({"update_epochs": True}, "of type int"),
        ({"stapo": 1}, "of type bool"),
        ({"eta": 0.5, "order": "up"}, "low-high or high-low or low or high"),
    ):
        with pytest.raises(lopti.UserError, match=f"must be {wanted}, not"):
            lopti.Settings(**settings)
    alpha = torch.linspace(0, 1, 3, dtype=torch.float64).numpy()[1]
    lopti.Settings(alpha=alpha, eta=1, kl_coef=0, steps=0, seed=2**32 - 1)


def test_files_of_flags(tmp_path):
    """They may have comments, quotes and empty lines; a later flag wins."""
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
        clips = (settings.clip_low, settings.clip_high, settings.clip_dual)
        assert (settings.group_size, settings.kl_coef, *clips) == (8, 0.001, 0.2, 0.24, 10)
        assert (settings.weight_decay, settings.max_grad_norm) == (0.01, 1)


def test_a_bug_shows_its_traceback(monkeypatch):
    monkeypatch.setattr(lopti, "train", Mock(side_effect=RuntimeError("shapes differ")))
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
    chat = [{"content": "(1) Ann is a knight"}]
    for solution in (twice, spy, typo, "So Ann is a knight", "", None, chat):
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
    for solution in (None, ["none"], {}, True):
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
    return lopti.Settings(**{"task": "math", "eval_size": 0, "solved_reward": 1.0, **changes})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The user's current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())  # --reward appends the folder
    return tmp_path


def test_a_reward_of_ones_own_gets_every_column():
    """One entry for each response; `solution` is the example's, not the column of that name."""
    reward = Mock(return_value=[7, True, 0.5, -1])  # has no __name__, as a partial has none
    first = example_of(
        "1 + 1?", "2", a=1, prompts="no", completions="no", solution="Add one to one."
    )
    second = example_of("1 + 1?", {"x": 3}, b=[2])
    assert rewards.compute_rewards(reward, ["r", "s", "t", "u"], [first, second]) == [7, 1, 0.5, -1]
    reward.assert_called_once_with(
        completions=["r", "s", "t", "u"],
        prompts=["1 + 1?"] * 4,
        solution=["2", "2", {"x": 3}, {"x": 3}],
        a=[1, 1, None, None],  # the union of the rows' columns
        b=[None, None, [2], [2]],
    )


WRONG_REWARDS = [None, 1, [1], [1, 2, 3], [1, math.nan], [1, math.inf], [1, None], [1, "good"]]


@pytest.mark.parametrize("returned", WRONG_REWARDS)
def test_a_reward_returns_one_finite_number_for_each_response(returned):
    reward = Mock(return_value=returned, __name__="mine")
    with pytest.raises(rewards.UserError, match="function mine must return a finite number for"):
        rewards.compute_rewards(reward, ["a", "b"], EXAMPLES[:2])


NO_REWARDS = {  # what is given as --reward: what is told
    "my_reward.py": " is no MODULE:FUNCTION: No module named 'my_reward'",
    "no_such_file:f": " is no MODULE:FUNCTION: No module named 'no_such_file'",
    "os.no_such_file:f": " is no MODULE:FUNCTION: No module named 'os.no_such_file'",
    "rewards:my_fn": f": {rewards} has no function my_fn",  # which names the file
    "sys:path": f": {sys} has no function path",
}


@pytest.mark.parametrize("place", NO_REWARDS)
def test_a_reward_that_cannot_be_called(place):
    with pytest.raises(rewards.UserError, match=re.escape(f"--reward {place}{NO_REWARDS[place]}")):
        rewards.find_reward(make_settings(reward=place))


def test_what_a_reward_of_ones_own_raises_keeps_its_traceback(folder):
    """Also an error that would end this program in one sentence, and what the import raises."""
    own = "from rewards import UserError\ndef f(**columns): raise UserError('no')"
    for number, text in enumerate(("1 / 0", "open('no_such_file')", "import no_such_module", own)):
        (folder / f"broken{number}.py").write_text(text)
        with pytest.raises(RuntimeError, match=f"(broken{number}|function f) raised") as caught:
            reward = rewards.find_reward(make_settings(reward=f"broken{number}:f"))
            rewards.compute_rewards(reward, ["a"], [example_of("?", "2")])
        assert caught.value.__cause__ is not None


def test_the_current_folder_takes_no_librarys_place(folder, monkeypatch):
    """Its random.py stays unread, while and after a reward loads; a neighbour is found."""
    monkeypatch.setattr("sys.path", [path for path in sys.path if path != ""])
    for name in ("random.py", "beside.py"):
        (folder / name).write_text("")
    code = """from importlib.machinery import PathFinder
def reward(**columns):  # which of two modules are those of the folder
    return ["{}" in PathFinder.find_spec(name).origin for name in ("random", "beside")]
while_it_loads = reward()
"""
    (folder / "finds.py").write_text(code.format(folder))
    reward = rewards.find_reward(make_settings(reward="finds:reward"))
    assert sys.modules["finds"].while_it_loads == reward() == [False, True]


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
    return rewards.load_rows(source, make_settings(data=source, **settings), TOKENIZER)


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
    assert rewards.load_rows(f"{tmp_path}/a.parquet", settings, TOKENIZER) == [example]
    assert example.prompt == prompt
    assert example.prompt_ids == TOKENIZER(prompt).input_ids
    questions = [text for text in ("1 + 1?", "1 + 1 =", "Who?", "Who? ") if text in prompt]
    assert example.question == questions[-1]
    assert example.solution == solution
    assert example.columns == row
    assert example.difficulty == {LILY: "1", JACK: "2"}.get(solution, "all")


NO_QUESTION = "a text as question, quiz, problem, or a whole prompt; it has the columns"
NO_SOLUTION = "a text or a number as solution_text_format, answer, solution; it has the columns"


def chat(content="1 + 1?", role="user"):
    """A row whose prompt is a chat with this message."""
    return {"prompt": [{"role": role, "content": content}], "answer": "2"}


WRONG_ROWS = [  # a task, a row, what is wrong
    ("math", {"answer": "2", "source": "mine"}, f"{NO_QUESTION} answer, source"),
    ("math", {**ROW, "problem": 2}, NO_QUESTION),
    ("math", {**ROW, "problem": None, "prompt": 5}, NO_QUESTION),
    ("math", {"prompt": " ", "solution": "2"}, NO_QUESTION),  # blank text is none
    ("math", {"problem": "1 + 1?"}, f"{NO_SOLUTION} problem"),
    ("math", {**ROW, "answer": True}, NO_SOLUTION),
    ("math", {"prompt": CHAT, "solution": ["2"]}, NO_SOLUTION),
    ("math", {**ROW, "answer": math.nan}, NO_SOLUTION),
    ("math", {**ROW, "answer": " "}, NO_SOLUTION),
    ("math", chat("It is", "assistant"), "ends with words of the assist"),
    ("math", {**ROW, "answer": "['34', '35']"}, "has a list as its solution"),
    ("math", {**ROW, "answer": r" [\frac{3}{4}]"}, "has a list as its solution"),
    ("math", {"prompt": [{"from": "human", "value": "1 + 1?"}], "answer": "2"}, "content of each"),
    ("math", chat([{"type": "text", "text": "1 + 1?"}]), "a text as the content of each message"),
    ("math", {"prompt": ["1 + 1?"], "answer": "2"}, "a text as the content of each message"),
    ("math", {"prompt": [{"role": "developer", "content": "Be terse."}, *CHAT], "answer": "2"},
     "has a message that the chat template leaves out: 'Be terse.'"),
    ("math", '{"problem": ', "Expecting value"),
    ("math", "7", "a JSON object, not 7"),
    ("math", json.dumps([ROW] * 999), r"a JSON object, not \[{'problem'"),
    ("kk", {"quiz": "Who?", "solution": "Lily"}, r"lines like \(1\) Zoey is a knight, not 'Lily'"),
]  # fmt: skip


@pytest.mark.parametrize("task, row, message", WRONG_ROWS)
def test_a_wrong_row_is_named(task, row, message, tmp_path):
    good = {"quiz": "Who?", "solution": LILY}  # blank lines do not count
    with pytest.raises(rewards.UserError, match=rf"a\.jsonl, row 2: .*{message}") as caught:
        loaded(tmp_path, [good, "", row, good], task=task)
    assert len(str(caught.value)) < 450 + len(str(tmp_path))


def test_nan_and_blanks_are_nothing_and_a_byte_order_mark_is_none(tmp_path):
    """Windows' editors write the mark, pandas writes NaN."""
    for nothing in (math.nan, " ", None):
        row = json.dumps(ROW | {"level": nothing, "solution": nothing})
        (example,) = loaded(tmp_path, ["\ufeff" + row])
        assert (example.difficulty, example.solution) == ("all", "2")


def test_a_model_without_a_tokenizer_is_told():
    tokenizer = Mock(chat_template=None, bos_token_id=7)
    tokenizer.return_value.input_ids = []
    with pytest.raises(rewards.UserError, match="is there a tokenizer beside the model"):
        rewards.make_example(ROW, make_settings(), tokenizer)


LENGTH = len(TOKENIZER(ASKED).input_ids)  # of all that the model reads
WORKING = {**ROW, "answer": r"We add the two, and so the answer is $\boxed 2$."}
OTHERS = {**ROW, "image": "x.png", "level": 3}
USED_AS_IS = "1 of 1 rows used; prompts are used as they are, and the reward looks for "
LINES = [  # rows, settings, whether the model has a chat template, what becomes of the rows
    ([ROW, ""], {"max_prompt_length": LENGTH}, True, "1 of 1 rows used"),
    ([ROW, WORKING], {}, True, "1 of 2 rows used; 1 with a solution that no answer could match"),
    ([OTHERS], {}, True, "1 of 1 rows used; other columns, for the reward: image"),
    ([chat()], {}, True, rf"{USED_AS_IS}\boxed{{}}"),
    ([{"prompt": "1", "answer": "2"}], {}, False, rf"{USED_AS_IS}\boxed{{}}"),
    ([{"prompt": "1", "answer": LILY}], {"task": "kk"}, True, f"{USED_AS_IS}<think> and <answer>"),
]  # fmt: skip


@pytest.mark.parametrize("rows, settings, has_template, told", LINES)
def test_one_line_tells_what_becomes_of_rows(rows, settings, has_template, told, tmp_path, capsys):
    """It ends with the end of the first prompt. Of the bundled rows nothing is told."""
    tokenizer = TOKENIZER if has_template else tokenizer_with(None)
    source = write_rows(tmp_path / "a.jsonl", rows)
    examples = rewards.load_rows(source, make_settings(**settings), tokenizer)
    assert not capsys.readouterr().out
    assert examples == rewards.load_rows(source, make_settings(data=source, **settings), tokenizer)
    told += f"; the first prompt ends in {examples[0].prompt[-60:]!r}"
    assert capsys.readouterr().out == f"a.jsonl: {told}\n"


def test_a_file_without_a_row_to_use_says_why(tmp_path):
    for rows, length, reason in (
        ([ROW], LENGTH - 1, "1 rows used; 1 longer than --max-prompt-length"),
        ([WORKING], LENGTH, "1 rows used; 1 with a solution that no answer could match"),
        ([], LENGTH, "0 rows used"),
    ):
        with pytest.raises(rewards.UserError, match=rf"^a\.jsonl: 0 of {reason}$"):
            loaded(tmp_path, rows, max_prompt_length=length)


def test_a_solution_is_gradable_if_what_a_model_would_write_is_rewarded():
    """A model writes 98 for the solution $98$; that the solution matches itself is not enough."""
    for solution in (r"\boxed{98} \boxed{\[98\]}", r"\$32,\!348", r"45\text{ mph}", r"1 \\[2pt] 2"):
        assert rewards.is_gradable(solution, "math"), solution
    for solution in (r"\$\frac23 \approx \$0.67", r"\frac{1}{2", r"\boxed{1} or \boxed{2}", ""):
        assert not rewards.is_gradable(solution, "math"), solution


@pytest.mark.parametrize("task", rewards.TASKS)
def test_with_a_reward_of_ones_own_a_solution_may_be_anything(task, tmp_path):
    solutions = [None, 0, {"target": 24}, "Lily", "12 #### x", JACK]
    rows = [{"problem": "Who?", "answer": solution, "level": 9} for solution in solutions]
    examples = loaded(tmp_path, rows, task=task, reward="my:own")
    assert [example.solution for example in examples] == solutions
    assert {example.difficulty for example in examples} == {"9"}


HUB = [("", None, "train"), (":main:test+dev", "main", "test+dev"), ("::test", None, "test")]


@pytest.mark.parametrize("source, configuration, split", HUB)
def test_a_data_set_of_the_hub(source, configuration, split, monkeypatch):
    load_dataset = Mock(return_value=datasets.Dataset.from_list([ROW]))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(rewards.load_rows(f"owner/name{source}", make_settings(), TOKENIZER)) == 1
    load_dataset.assert_called_once_with("owner/name", configuration, split=split)


@pytest.mark.parametrize("name", ["my.csv", "my.json", "my"])
def test_a_file_of_another_kind_points_to_its_conversion(name, folder):
    (folder / name).write_text("")
    with pytest.raises(rewards.UserError, match=r"data/GUIDE\.md converts csv and json"):
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
    others = [row["problem"] for row in rows if row["problem"] not in problems(evaluation)]
    assert problems(training) == others
    assert "32 rows to train on, 5 of 5 to evaluate on" in capsys.readouterr().out
    many = write_rows(tmp_path / "many.jsonl", [{"prompt": f"{i} is"} for i in range(5010)])
    settings = make_settings(data=many, reward="rewards:math_reward")
    assert len(rewards.load_data(settings, TOKENIZER)[1]) == 500


def test_no_row_is_left_to_train_on(tmp_path):
    own = write_rows(tmp_path / "own.jsonl", [ROW] * 3)
    for eval_data in ("", own):
        with pytest.raises(rewards.UserError, match="all 3 prompts are held out"):
            rewards.load_data(make_settings(data=own, eval_data=eval_data), TOKENIZER)


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
def test_the_prompt_of_a_puzzle(template, prompt):
    row = {"quiz": "Who?", "solution": LILY}
    example = rewards.make_example(row, make_settings(task="kk"), tokenizer_with(template))
    assert example.prompt == prompt


def test_no_later_turn_of_a_chat_is_lost():
    """Neither where a template refuses the system message, nor where there is no template."""
    roles = ("system", "user", "assistant", "user")
    chat = [{"role": role, "content": f"{role}?"} for role in roles]
    prompt = rewards.render_prompt(tokenizer_with(REFUSES), chat)
    assert prompt == "<user>system?\n\nuser?<assistant>assistant?<user>user?<assistant>"
    words = rewards.render_prompt(tokenizer_with(None), chat).split()
    assert words == [f"{role}?" for role in roles]


def test_a_template_may_leave_out_blanks_at_the_ends_of_a_message():
    tokenizer = tokenizer_with(TURNS.replace("turn.content", "turn.content | trim"))
    example = rewards.make_example(chat(" 1 + 1?\n"), make_settings(), tokenizer)
    assert example.prompt == "<user>1 + 1?<assistant>"


def test_a_chat_that_the_template_refuses_ends_in_one_sentence(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [ROW])
    with pytest.raises(rewards.UserError, match=r"a\.jsonl, row 1: No!"):
        rewards.load_rows(source, make_settings(), tokenizer_with("{{ raise_exception('No!') }}"))


def test_a_prompt_begins_once_as_the_model_is_used_to():
    """Llama's tokenizer puts a token before every text, GPT-2's has one and does not."""
    tokenizer = tokenizer_with(TURNS, bos="<|bos|>")
    assert rewards.render_prompt(tokenizer, CHAT) == "<user>1 + 1?<assistant>"
    assert rewards.render_prompt(tokenizer, "1 + 1 =") == "<|bos|>1 + 1 ="
    assert rewards.render_prompt(tokenizer, "<|bos|>1 + 1 =") == "<|bos|>1 + 1 ="
    row = {"prompt": "1 + 1 =", "answer": "2"}
    ids = rewards.make_example(row, make_settings(), tokenizer).prompt_ids
    assert ids.count(tokenizer.bos_token_id) == 1
    tokenizer = tokenizer_with(None, bos="<|bos|>", is_added=False)
    assert rewards.render_prompt(tokenizer, "1 + 1 =") == "1 + 1 ="
