"""Which models are sampled from as they are scored, and which are refused before training.

python -m pytest -q data/test_model_check.py        # LOPTI_ALL=1: many more families
"""

import copy
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test asks the hub
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import lopti  # isort: skip, because it says how the threads of torch wait

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig

slow = pytest.mark.skipif(not os.environ.get("LOPTI_ALL"), reason="LOPTI_ALL=1 runs it")
TOKENIZER = AutoTokenizer.from_pretrained(ROOT / "data" / "tiny")
PROMPT = "Zoey is a knight or Liam is a knave. So who is a knight?"


def arguments(flags=""):
    settings = lopti.parse_arguments(flags.split())
    settings.model = "it"
    return settings


# ------------------------------------------------------------------------------ small models

SIZES = {"hidden_size": 32, "d_model": 32, "n_embd": 32, "intermediate_size": 64, "vocab_size": 308}
SIZES |= {"num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "n_head": 2, "n_heads": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "ffn_dim": 64}
SIZES |= {"max_position_embeddings": 512, "n_positions": 512, "moe_intermediate_size": 32}
SIZES |= {"shared_expert_intermediate_size": 32, "num_local_experts": 16, "num_experts": 16}
SIZES |= {"num_experts_per_tok": 4, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2}
DECODER = {"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 64}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
MAMBA |= {"mamba_expand": 2, "mamba_chunk_size": 8}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
LINEAR |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
LATENT |= {"v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
LATENT |= {"topk_group": 1, "first_k_dense_replace": 1}
BOTH = ["linear_attention", "full_attention"]


def small_model(family, **changes):
    """A small model over the bundled vocabulary; large random weights: π is far from uniform."""
    config_class = getattr(transformers, f"{family}Config")
    default = config_class()
    sizes = {}
    for name, size in SIZES.items():
        own_name = config_class.attribute_map.get(name, name)
        if name in changes or (own_name == name and hasattr(default, name)):
            sizes[name] = size
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**{**sizes, **changes}))
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.mul_(6)
    return model.eval()


PLAIN = {
    "Llama": {},
    "sliding window": {"family": "Mistral", "sliding_window": 16},
}
HYBRID = {  # some layers keep a state instead of keys and values
    "Qwen3Next": {**LINEAR, "layer_types": BOTH, "num_experts": 4, "num_experts_per_tok": 2},
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_ff_dim": 64},
    "FalconH1": {**MAMBA, "mamba_d_ssm": 64},
    "GraniteMoeHybrid": {
        **MAMBA,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}
MORE = {  # right, too
    **{family: {} for family in ("GPT2", "GPTNeoX", "OPT", "Phi", "Phi3", "Qwen2")},
    **{family: {} for family in ("Qwen3", "Gemma", "Gemma2", "Cohere", "Cohere2", "Olmo", "Olmo2")},
    **{family: {} for family in ("Bloom", "StableLm", "Starcoder2", "SmolLM3", "Glm4")},
    **{family: {} for family in ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GraniteMoe")},
    "GPTJ": {"rotary_dim": 8},
    "GPTNeo": {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
    "Gemma3Text": {"sliding_window": 16},
    "GptOss": {"sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": LATENT,
    "Qwen3_5Text": {**LINEAR, "layer_types": BOTH},
    "OlmoHybrid": {**LINEAR, "layer_types": BOTH},
    "Bamba": {**MAMBA, "attn_layer_indices": [1]},
    "Jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "Mamba2": {"num_heads": 4, "state_size": 8, "n_groups": 1, "chunk_size": 8},
}


def named_model(name):
    changes = {**PLAIN, **HYBRID, **MORE}[name]
    return small_model(**{"family": name, **changes})


def check(model, flags=""):
    lopti.check_model(model, TOKENIZER, [{"prompt": PROMPT}], arguments(flags))


def sampled_and_scored(model, monkeypatch):
    """log π of every token of six responses, as it was drawn and as `score` has it: two of (M,).

    Of unequal prompts. Row 1 is made to end in the first stretch, and row 3 in the second.
    """
    generator = torch.Generator().manual_seed(0)
    settings = arguments("--max-new-tokens 80")
    prompts = []
    for length in (150, 7, 40, 12, 3, 90):
        prompts.append(torch.randint(5, 308, (length,), generator=generator).tolist())
    end = 1
    calls = []  # each of (rows, V)
    drawn = [[] for _ in prompts]
    found = [[] for _ in prompts]
    original = lopti.generate

    def generate(*inputs):
        calls.clear()
        new = original(*inputs)  # (rows, T)
        logprobs = torch.stack(calls, 1).gather(2, new[..., None])[..., 0]
        unfinished = [i for i in range(len(prompts)) if end not in found[i]]
        for row, i in enumerate(unfinished):
            found[i] += new[row].tolist()
            drawn[i] += logprobs[row].tolist()
        return new

    def look(module, inputs, output):
        logits = output.logits[:, -1]
        calls.append(logits.float().log_softmax(-1))
        logits[:, end] = -1e4
        if len(calls) == 10 and len(logits) == 6:
            logits[1, end] = 1e4
        if len(calls) == 10 and len(logits) == 5:
            logits[2, end] = 1e4  # row 3, as row 1 has left

    monkeypatch.setattr(lopti, "generate", generate)
    torch.manual_seed(0)
    with torch.no_grad(), model.register_forward_hook(look):
        responses = lopti.generate_in_stretches(model, prompts, 1.0, settings, [end], 0)
    monkeypatch.undo()
    lengths = [len(response) for response in responses]
    assert lengths[1] == 10 and lengths[3] == 42 and max(lengths) == 80
    ids, mask, lengths = lopti.pack(prompts, responses)
    rollout = lopti.Rollout(ids, mask, lengths, lengths > 0, [""] * len(prompts))
    kept = []
    for values, response in zip(drawn, responses):
        kept += values[: len(response)]  # without the padding after an end
    return torch.tensor(kept), lopti.score(model, rollout, settings)[0][mask]


def assert_right(name, monkeypatch):
    model = named_model(name)
    check(model)
    drawn, scored = sampled_and_scored(model, monkeypatch)
    assert (drawn - scored).abs().max() <= 1e-3


@pytest.mark.parametrize("name", [*PLAIN, *HYBRID])
def test_a_right_model_is_accepted_and_its_tokens_scored_as_drawn(name, monkeypatch):
    assert_right(name, monkeypatch)


@slow
@pytest.mark.parametrize("name", MORE)
def test_many_right_models(name, monkeypatch):
    assert_right(name, monkeypatch)


def test_a_mixture_of_experts_is_accepted_in_bfloat16():
    """Rounding sends some tokens to other experts, and their logits differ by .2."""
    check(small_model("FlexOlmo", num_hidden_layers=4), "--dtype bfloat16")


# ------------------------------------------------------------------------------ refused

TUNED = {"attn_temperature_tuning": True, "floor_scale": 100, "no_rope_layers": [0, 0]}
TUNED |= {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 64}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8}
LONG_ROPE |= {"long_factor": [4.0] * 8, "factor": 4.0, "original_max_position_embeddings": 100}
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
        check(small_model(**WRONG[name]))


def test_long_ropes_are_right_where_no_row_gets_long():
    check(small_model(**WRONG["rope by the longest row"]), "--max-new-tokens 40")


def test_positions_end_before_the_longest_row():
    """With one sentence where the config says so, and with another where only trying shows it."""
    with pytest.raises(lopti.UserError, match=r"may pass 100 positions: lower --max-new-tokens"):
        check(small_model("Llama", max_position_embeddings=100))
    with pytest.raises(lopti.UserError, match="it cannot be trained"):
        check(small_model("Mpt", max_seq_len=100))
    with pytest.raises(lopti.UserError, match="the model has 20 embeddings, none for token"):
        check(small_model("Llama", vocab_size=20))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_that_share_an_offset_hide_nothing(dtype):
    """Log-probabilities are compared: next to −100 a difference of 3 looks like rounding."""
    model = small_model("Roberta", is_decoder=True)
    model.lm_head.bias.data.fill_(-100)
    with pytest.raises(lopti.UserError, match=REFUSED):
        check(model, f"--dtype {dtype}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_pi_has_to_be_a_number(dtype):
    """In float32, and in --dtype too."""
    model = small_model("Llama")

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
        check(small_model("Llama"))
    check(small_model("Llama"), "--max-new-tokens 32")  # where no second stretch is needed


def test_the_probe_computes_few_logits():
    """Of no position but those of the tokens that it draws; more would fill a GPU."""
    model = small_model("Llama")
    sizes = []
    model.lm_head.register_forward_hook(lambda *call: sizes.append(call[2].numel() // 308))
    check(model)
    count = lopti.STRETCH + 4
    assert sum(sizes) == 3 * lopti.STRETCH + 2 * 4 + 2 * count


@pytest.mark.parametrize("name", ["CTRL", "GPTNeoXJapanese"])
def test_gradient_checkpointing_that_would_do_nothing_is_refused(name):
    sizes = {"dff": 64} if name == "CTRL" else {}
    with pytest.raises(lopti.UserError, match="--gradient-checkpointing does nothing for"):
        lopti.checkpoint_layers(small_model(name, **sizes))


# ------------------------------------------------------------------------------ sampling


def test_which_ids_end_a_response():
    """The model's generation config and the tokenizer's; the config's where neither says any."""
    model, tokenizer = small_model("Llama"), copy.deepcopy(TOKENIZER)
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


def test_a_tokenizer_need_not_know_of_the_attention_mask():
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.model_input_names = ["input_ids"]
    prompts, settings = [PROMPT, "Liam"], arguments("--max-new-tokens 5")
    model = small_model("Llama")
    answers = [
        lopti.sample(model, each, prompts, 1, 0, settings) for each in (tokenizer, TOKENIZER)
    ]
    assert answers[0].texts == answers[1].texts


def test_every_response_goes_on_in_its_own_row(monkeypatch):
    """Row k writes its own number until it ends, after 10, 40, 70, 100 tokens or never.

    Of each stretch only the new tokens are searched for an end.
    """
    lengths = {4: 10, 5: 100, 6: 40, 7: 999, 8: 70}
    searched = []

    class Scripted:
        device, config, generation_config = torch.device("cpu"), None, None

        def generate(self, ids, attention_mask, generation_config, **cache):
            start = attention_mask.shape[1] - 2
            places = torch.arange(start, start + generation_config.max_new_tokens)
            own = ids[:, -1:].expand(-1, len(places))
            ends = torch.tensor([lengths[int(number)] for number in ids[:, -1]])[:, None]
            new = torch.where(places < ends, own, torch.where(places == ends, 1, 0))
            assert len(ids) == len(attention_mask) and attention_mask[:, 1:].all()
            return torch.cat([ids, new], 1)

    def until_end(ids, end_ids, original=lopti.until_end):
        searched.append(len(ids))
        return original(ids, end_ids)

    monkeypatch.setattr(lopti, "until_end", until_end)
    monkeypatch.setattr(lopti, "DynamicCache", lambda config: DynamicCache())
    prompts = [[3, number] for number in lengths]
    settings = SimpleNamespace(max_new_tokens=120, min_p=0.0)
    found = lopti.generate_in_stretches(Scripted(), prompts, 0, settings, [1], 0)
    assert found == [[k] * 120 if n > 120 else [k] * n + [1] for k, n in lengths.items()]
    assert max(searched) <= lopti.STRETCH
