"""lopti: Advantage Reweighting and Low-Probability Token Isolation for GRPO.

    python lopti.py                             # GRPO on the bundled model, no GPU needed
    python lopti.py --alpha 0.3 --eta 0.5       # the paper's two methods: α and η
    python lopti.py --task math --eta 0.5       # the same on arithmetic
    python lopti.py @data/kk.flags --alpha 0.3 --eta 0.5     # follows the paper, one large GPU

Read it beside "Do Not Let Low-Probability Tokens Over-Dominate in RL for LLMs" (arXiv 2505.12929).
First come the settings and one training step. Sections 1 to 7 are its steps: sampling, rewards (in
rewards.py), log-probabilities, advantages (Eq. 1), Advantage Reweighting (Eq. 4), Lopti (section
4.2), the update (Eq. 1). Section 8 has later methods, 9 the training loop, 10 the evaluation. The
rest is plumbing: fast sampling (11), metrics and files (12), the model (13), the command line (14).

What it leaves out of PPO: the value function (the group's mean is the baseline), generalized
advantage estimation, the entropy bonus. Of GRPO: the mean over each response's own tokens (one mean
over all tokens instead). Of large frameworks: several GPUs, inference servers, learning rate
schedules, chats of several turns.

Shapes: B responses (prompts × group size G), L tokens of the longest row, V words of the
vocabulary, M tokens that a mask picks out of (B, L). A row is a prompt, its response, and padding.
Masks are boolean (B, L): `mask` is True on all response tokens, `tokens` on those that a pass
updates. Log-probabilities are float32, and −∞ outside the vocabulary that is sampled from.
"""

import argparse
import copy
import functools
import json
import math
import os
import shlex
import shutil
import signal
import sys
import textwrap
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: idle threads sleep sooner

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig
from transformers.generation.utils import ALL_CACHE_NAMES
from transformers.modeling_layers import GradientCheckpointingLayer

from rewards import TASKS, UserError, compute_rewards, load_data, prompt_stream, user_errors

transformers.utils.logging.disable_progress_bar()  # ours is enough

# The settings -------------------------------------------------------------------------------------


def setting(default, meaning, low=None, high=1e9, choices=None):
    """A field of Settings: its default, what it is, and the lowest and the highest value."""
    limits = {"meaning": meaning, "low": low, "high": high, "choices": choices}
    return field(default=default, metadata=limits)


def flag(name):
    """The flag of a setting: eval_size → --eval-size."""
    return "--" + name.replace("_", "-")


@dataclass
class Settings:
    """All that can be set: Settings(alpha=0.3), or --alpha 0.3. UserError outside the limits."""

    # The method
    advantage: str = setting("grpo", "by group or by batch", choices=("grpo", "reinforce++"))
    alpha: float = setting(0.0, "α of Advantage Reweighting, Eq. 4", 0, 1)
    eta: float = setting(0.0, "η of Lopti: π < η is updated first", 0, 1)
    order: str = setting(
        "low-high", "Lopti's passes", choices=("low-high", "high-low", "low", "high")
    )
    passes: int = setting(1, "how often to go over a rollout batch", 1)
    stapo: bool = setting(False, "leave out STAPO's spurious tokens")
    top_entropy: float = setting(0.0, "ρ of 80/20, the share kept; the paper: 0.2; 0: off", 0, 1)
    min_p: float = setting(0.0, "ρ of the safe vocabulary; e^-13 is 2.3e-6; 0: off", 0, 1)
    clip_low: float = setting(0.2, "ε_l: the ratio is clipped at 1-ε_l", 0)
    clip_high: float = setting(0.24, "ε_h: the ratio is clipped at 1+ε_h", 0)
    clip_dual: float = setting(10.0, "c: where Â < 0 a token's loss is at most c·|Â|", 0)
    kl_coef: float = setting(0.001, "β; at 0 no reference model is needed", 0)

    # Sampling
    prompts_per_step: int = setting(16, "prompts in a rollout batch; the paper: 64", 1)
    group_size: int = setting(8, "G: responses to each prompt", 1)
    temperature: float = setting(1.0, "T_s, of sampling and every π; the paper: 0.7", 0.01, 100)
    max_prompt_length: int = setting(400, "in tokens; longer prompts are dropped", 1)
    max_new_tokens: int = setting(256, "longest response, in tokens", 1)
    sample_batch_size: int = setting(256, "responses sampled at a time; 0: all", 0)

    # Optimisation
    learning_rate: float = setting(1e-4, "of AdamW, constant; the paper: 1e-6", 1e-12, 1)
    weight_decay: float = setting(0.01, "of AdamW", 0, 1)
    max_grad_norm: float = setting(1.0, "a longer gradient is shortened to this length", 1e-9)
    mini_batch_size: int = setting(64, "responses in an optimizer step; the paper: 256; 0: all", 0)
    tokens_per_microbatch: int = setting(2048, "changes memory and speed only", 1)
    gradient_checkpointing: bool = setting(False, "less memory, a third more time")
    steps: int = setting(24, "training steps (rollout batches)", 0)

    # Model and data
    task: str = setting("kk", "Knights and Knaves, or math with \\boxed{}", choices=tuple(TASKS))
    model: str = setting("", "folder or hub name of a causal model; else the bundled one")
    data: str = setting("", "a file or hub name:configuration:split; else our own rows")
    eval_data: str = setting("", "in the same forms; else a tenth of --data, or our own rows")
    reward: str = setting("", "your own, MODULE:FUNCTION, f(completions, solution, **columns)")
    solved_reward: float = setting(None, "a response is right from this reward on", -1e9, 1e9)
    people: tuple = setting((2, 3), "kk: sizes of puzzles")
    dtype: str = setting("float32", "of forward passes", choices=("float32", "bfloat16"))
    device: str = setting("auto", "auto: cuda where there is one, or cpu")

    # Evaluation and the run's folder
    eval_every: int = setting(0, "steps; 0: before and after training only", 0)
    eval_size: int = setting(100, "evaluation prompts per difficulty; 0: all", 0)
    eval_samples: int = setting(4, "k of avg@k and pass@k, at T = 1; 0: greedy only", 0)
    eval_only: bool = setting(False, "evaluate the model, show three answers, and stop")
    save_every: int = setting(10, "steps; 0: no checkpoint", 0)
    resume: str = setting("", "runs/NAME: go on with this run, by its own settings")
    name: str = setting("", "of the run's folder; a new one otherwise")
    output: str = setting("runs", "where the runs' folders are made")
    seed: int = setting(0, "of everything random", 0, 2**32 - 1)

    def __post_init__(self):
        for each in fields(self):
            value = getattr(self, each.name)
            low = each.metadata["low"]
            high = each.metadata["high"]
            choices = each.metadata["choices"]
            if choices and value not in choices:
                raise UserError(f"{flag(each.name)} must be {' or '.join(choices)}, not {value}")
            if low is None or value is None:  # no limits, or no value given
                continue
            if not low <= value <= high:  # so written, this refuses NaN as well
                raise UserError(f"{flag(each.name)} must lie between {low} and {high}, not {value}")
        self.people = tuple(self.people)
        if self.reward and self.solved_reward is None:
            raise UserError("--reward needs --solved-reward: from which on is a response right?")
        if self.solved_reward is None:
            self.solved_reward = TASKS[self.task].solved
        if self.order != "low-high" and not self.eta:
            raise UserError("--order needs --eta above 0 to tell low from high")
        if self.group_size < 2 and self.advantage == "grpo":
            raise UserError("--group-size must be at least 2: GRPO compares responses in a group")

    def pass_names(self):
        """Which tokens each pass over a rollout batch updates: ["low", "high"] for Lopti."""
        names = self.order.split("-") if self.eta else ["all"]
        return names * self.passes


# The training step --------------------------------------------------------------------------------


@dataclass
class Rollout:
    """A batch of sampled responses. Each row is a prompt, its response, then padding."""

    ids: torch.Tensor  # (B, L) the ids that were sampled; never re-tokenised text
    mask: torch.Tensor  # (B, L) True on the response, its end-of-sequence token included
    lengths: torch.Tensor  # (B,) tokens of prompt and response
    truncated: torch.Tensor  # (B,) True where the length limit came before an end-of-sequence token
    texts: list  # B strings: the responses without end of sequence
    rewards: torch.Tensor = None  # (B,) R, in float64
    old_logprobs: torch.Tensor = None  # (B, L) log π_old, of the policy that sampled; 0 elsewhere
    entropies: torch.Tensor = None  # (B, L) H of that policy, in nats; 0 elsewhere
    ref_logprobs: torch.Tensor = None  # (B, L) log π_ref, of the starting policy; None if β = 0
    advantages: torch.Tensor = None  # (B, L) Â, weighted by Eq. 4
    tokens: torch.Tensor = None  # (B, L) True on the tokens that a pass updates

    def rows(self, indices):
        """Some rows, without their texts and without the padding that all of them share."""
        length = int(self.lengths[indices].max())
        part = {}
        for name, values in vars(self).items():
            if torch.is_tensor(values):
                part[name] = values[indices] if values.dim() == 1 else values[indices, :length]
        return Rollout(texts=[], **part)


def training_step(policy, reference, optimizer, tokenizer, batch, settings):
    """One step of GRPO with Advantage Reweighting and Lopti, on a batch of rows of data.

    A row of data is a dictionary that `load_rows` of rewards.py makes. The comments 1. to 7. are
    the steps of the method in README.md, and the sections below. `reference` is None where β = 0.
    Returns the Rollout of B responses, and for each pass what `update` returns.
    """
    group_size = settings.group_size
    prompts = [row["prompt"] for row in batch]
    rows = []  # of data, one for each response
    for row in batch:
        rows += [row] * group_size
    # 1. Sample G responses to each prompt.
    rollout = sample(policy, tokenizer, prompts, group_size, settings.temperature, settings)
    # 2. R, the reward of each response: (B,)
    rewards = compute_rewards(rollout.texts, rows, settings)
    rollout.rewards = torch.tensor(rewards, dtype=torch.float64, device=policy.device)
    # 3. log π_old and log π_ref of each token: (B, L)
    rollout.old_logprobs, rollout.entropies = score(policy, rollout, settings)
    if reference is not None:
        rollout.ref_logprobs, _ = score(reference, rollout, settings)
    # 4. Â, Eq. 1: (B, L)
    if settings.advantage == "grpo":
        advantages = group_advantages(rollout.rewards, group_size)[:, None] * rollout.mask
    else:
        advantages = reinforce_pp_advantages(rollout.rewards, rollout.mask)
    advantages = advantages.to(rollout.old_logprobs.dtype)  # float64 → float32, as the loss is
    # 5. Advantage Reweighting, Eq. 4.
    rollout.advantages = reweight_advantages(advantages, rollout.old_logprobs, settings.alpha)
    # 6. Lopti: unlikely tokens and likely ones.
    low, high = split_tokens(rollout.old_logprobs, rollout.mask, settings.eta)
    tokens_of = {"low": low, "high": high, "all": rollout.mask}
    # 7. The passes, each of some optimizer steps on the loss of Eq. 1.
    updates = []
    for name in settings.pass_names():
        updates.append(update(policy, optimizer, rollout, tokens_of[name], settings))
    return rollout, updates


# 1. Sampling: o_i ~ π_old(· | q), G responses to each prompt --------------------------------------


@torch.no_grad()
def sample(model, tokenizer, prompts, group_size, temperature, settings):
    """Sample G = `group_size` responses to each prompt text: a Rollout.

    Rows g·G … g·G+G-1 answer prompt g. Temperature 0 means greedy decoding.
    """
    end_ids = end_token_ids(model, tokenizer)
    prompt_ids = []  # B lists
    for ids in tokenizer(prompts, add_special_tokens=False)["input_ids"]:
        prompt_ids += [ids] * group_size
    pad_id = tokenizer.pad_token_id
    size = settings.sample_batch_size or len(prompt_ids)
    responses = []
    with mixed_precision(model, settings):
        for start in tqdm(range(0, len(prompt_ids), size), "sampling", leave=False, disable=None):
            part = prompt_ids[start : start + size]
            responses += generate_in_stretches(model, part, temperature, settings, end_ids, pad_id)
    truncated = torch.tensor([response[-1] not in end_ids for response in responses])
    texts = []
    for response, cut in zip(responses, truncated):
        kept = response if cut else response[:-1]
        texts.append(tokenizer.decode(kept, clean_up_tokenization_spaces=False))
    ids, mask, lengths = pack(prompt_ids, responses, pad_id)
    device = model.device
    return Rollout(
        ids=ids.to(device),
        mask=mask.to(device),
        lengths=lengths.to(device),
        truncated=truncated.to(device),
        texts=texts,
    )


def generate(model, ids, attention_mask, cache, count, temperature, min_p, end_ids, pad_id):
    """Draw up to `count` more tokens of each row, o_t ~ π_old(· | q, o_<t), by HF `generate`.

    ids (N, n) are those that the cache has not read yet; returns (N, up to `count`). After a token
    that ends its response a row gets padding. attention_mask (N, P) covers all P tokens so far,
    those in the cache too: 0 on padding, else 1.
    """
    # Qwen ships top_k 20, top_p 0.8 and a repetition penalty. With those we would not sample from
    # the π that we score, so every knob that changes the distribution is set here.
    knobs = GenerationConfig(
        max_new_tokens=count,
        do_sample=temperature > 0,  # or else greedy
        repetition_penalty=1.0,
        eos_token_id=end_ids,
        pad_token_id=pad_id,
        disable_compile=True,  # the batch shrinks: a compiled model would be compiled again
    )
    if temperature:
        knobs.temperature = temperature
        knobs.top_k = 0  # all words; the default of HF is 50
        knobs.top_p = 1.0
        knobs.min_p = min_p or None  # the safe vocabulary of section 8
    # HF takes what we leave open from the model's own settings, so they are put aside.
    own_settings = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        options = {"generation_config": knobs, CACHE: cache}
        output = model.generate(ids, attention_mask=attention_mask, **options)
    finally:
        model.generation_config = own_settings
    return output[:, ids.shape[1] :]


def end_token_ids(model, tokenizer):
    """Every id that ends a response: a model may have several (Qwen2.5-Instruct has two).

    They are the tokenizer's and those of the model's generation_config.json. Without that file HF
    goes by config.json, perhaps by the default of the model's class (Llama's is 2), which may be
    any word of this tokenizer: of these only special tokens count, if there is another end at all.
    """
    from_tokenizer = listed(tokenizer.eos_token_id)
    from_model = listed(model.generation_config.eos_token_id)
    if model.generation_config._from_model_config:
        special = tokenizer.all_special_ids
        from_model = [token for token in from_model if token in special]
    from_config = listed(getattr(model.config.get_text_config(), "eos_token_id", None))
    return sorted(set(from_tokenizer + from_model)) or sorted(set(from_config))


def listed(ids):
    """None, an id or several → a list."""
    if ids is None:
        return []
    return list(ids) if isinstance(ids, (list, tuple)) else [ids]


def until_end(sampled_ids, end_ids):
    """Newly sampled ids of a response, cut behind the first that ends it; all if none does.

    What follows is padding. To cut at the padding id would lose the end where both ids are one.

    >>> until_end([5, 2, 2], end_ids=[2]), until_end([5, 6, 7], end_ids=[2])
    ([5, 2], [5, 6, 7])
    """
    for place, token in enumerate(sampled_ids):
        if token in end_ids:
            return sampled_ids[: place + 1]
    return sampled_ids


def pack(prompts, responses, pad_id=0):
    """Lists of prompt ids and of response ids → ids and mask (B, L), lengths (B,); padded right.

    >>> pack([[5, 6], [5]], [[7, 2], [8, 9]])[1]
    tensor([[False, False,  True,  True],
            [False,  True,  True, False]])
    """
    rows = [torch.tensor(prompt + response) for prompt, response in zip(prompts, responses)]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad_id)  # (B, L)
    starts = torch.tensor([[len(prompt)] for prompt in prompts])  # (B, 1)
    lengths = torch.tensor([len(row) for row in rows])  # (B,)
    places = torch.arange(ids.shape[1])  # (L,)
    return ids, (places >= starts) & (places < lengths[:, None]), lengths


# 2. The rewards are in rewards.py -----------------------------------------------------------------

# 3. Log-probabilities, log π(o_t | q, o_<t) ------------------------------------------------------


@torch.no_grad()
def score(model, rollout, settings):
    """log π and entropy H of every response token, a micro-batch at a time: two of (B, L)."""
    dtype = torch.promote_types(model.dtype, torch.float32)
    logprobs = torch.zeros_like(rollout.mask, dtype=dtype)
    entropies = torch.zeros_like(logprobs)
    everything = range(len(logprobs))
    for indices in micro_batches(everything, rollout.lengths, settings.tokens_per_microbatch):
        part = rollout.rows(indices)
        length = part.mask.shape[1]
        with mixed_precision(model, settings):
            logits = token_logits(model, part.ids, part.mask, settings.temperature, settings.min_p)
        sampled_ids = part.ids[part.mask]  # (M,)
        logprobs[indices, :length] = spread(token_logprobs(logits, sampled_ids), part.mask)
        entropies[indices, :length] = spread(entropy(logits), part.mask)
    return logprobs, entropies


def token_logits(model, ids, tokens, temperature, min_p=0.0):
    """The logits, divided by T_s, that each of `tokens` (B, L) of ids (B, L) was drawn from: (M, V)

    The temperature is that of sampling: π of Eqs. 1 and 4 is the distribution that the tokens come
    from. Outside the safe vocabulary of `min_p` logits are −∞. The output layer gets the hidden
    states of these M positions only: over a vocabulary of 150,000 words the logits of all tokens
    would take gigabytes.
    """
    # The logits of token t stand at t-1. Column 0, always a prompt's, goes round to the end.
    positions = tokens.roll(-1, 1)

    def select(layer, inputs):  # (B, L, size) → (M, size)
        return inputs[0][positions]

    with model.get_output_embeddings().register_forward_pre_hook(select):
        # Padding is on the right, where a causal model never looks: no attention mask is needed.
        logits = model(ids, use_cache=False).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if min_p:
        logits = logits.masked_fill(~safe_vocabulary(logits, min_p), -math.inf)
    return logits


def token_logprobs(logits, ids):
    """log π(o_t | q, o_<t) = logit of o_t - log Σ exp(logits): (M, V) and ids (M,) → (M,)

    >>> token_logprobs(torch.zeros(1, 4), torch.tensor([1]))  # -log 4
    tensor([-1.3863])
    """
    return logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(1)


def spread(values, tokens):
    """Values (M,) put at the M tokens of a mask, 0 elsewhere: (M,) and (B, L) → (B, L)"""
    return values.new_zeros(tokens.shape).masked_scatter(tokens, values)


def entropy(logits):
    """H = -Σ π log π in nats: (..., V) → (...).

    >>> entropy(torch.zeros(1, 4))  # log 4
    tensor([1.3863])
    """
    return torch.special.entr(logits.softmax(-1)).sum(-1)


# 4. Group-relative advantages (Eq. 1) -------------------------------------------------------------


def group_advantages(rewards, group_size):
    """Â_i = (R_i - mean of group) / (standard deviation of group + 1e-6), Eq. 1: (B,) → (B,)

    The deviation is the sample's (divided by G-1). A group whose rewards are all equal gets exactly
    0: rounding would leave small advantages, and Adam makes whole steps of small gradients.

    >>> group_advantages(torch.tensor([1., 0., 0., 1., 3., 3.]), group_size=2)
    tensor([ 0.7071, -0.7071, -0.7071,  0.7071,  0.0000,  0.0000])
    """
    groups = rewards.view(-1, group_size)  # (B/G, G)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    return advantages.masked_fill(all_equal(groups)[:, None], 0.0).view(-1)


def all_equal(groups):
    """Which rows have rewards that are all equal, up to rounding: (n, G) → (n,)"""
    return reaches(groups.amin(1), groups.amax(1))


def reaches(reward, bound):
    """Whether a reward is at least `bound`, up to rounding: .7 + .2 + .1 reaches 1."""
    return reward >= bound - 1e-9 * (1 + abs(bound))


# 5. Advantage Reweighting (Eq. 4) -----------------------------------------------------------------


def reweight_advantages(advantages, old_logprobs, alpha):
    """Â ← [α·π + (1-α)]·Â with π = exp(old_logprobs), Eq. 4: (B, L) → (B, L)

    The weight is 1-α at π = 0 and 1 at π = 1: unlikely tokens lose most, whether Â is positive or
    negative. α = 0 changes nothing, to the last bit.

    >>> reweight_advantages(torch.ones(1, 3), torch.tensor([[0.01, 0.5, 1.0]]).log(), alpha=0.3)
    tensor([[0.7030, 0.8500, 1.0000]])
    """
    return (alpha * old_logprobs.exp() + (1 - alpha)) * advantages


# 6. Lopti: isolate the low-probability tokens (section 4.2) ---------------------------------------


def split_tokens(old_logprobs, mask, eta):
    """The response tokens with π < η and those with π ≥ η, π = exp(old_logprobs): two (B, L) masks.

    GRPO (η = 0) makes one pass over a rollout batch, on all tokens. Lopti makes two: on the low
    tokens, then, from the weights that this left, on the high ones. Both go by the π of before the
    first pass. `--order high-low` is the ablation of Fig. 6b; "low" and "high" are one pass alone
    (Figs. 1 and 6a).

    >>> split_tokens(torch.tensor([[0.1, 0.5, 0.9]]).log(), torch.tensor([[True] * 3]), eta=0.5)
    (tensor([[ True, False, False]]), tensor([[False,  True,  True]]))
    """
    low = (old_logprobs.exp() < eta) & mask
    return low, mask & ~low


# 7. The update: mini-batches (one optimizer step each) of micro-batches (what memory allows) ------

# What `update` adds up. Always all of it, so that the lines of metrics.jsonl have the same names.
STATISTICS = (
    "policy_loss",
    "kl",
    "updated_share",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/dual_mean",
)
COUNTS = ("optimizer_steps", "skipped_steps", "nonfinite_steps", "masked_tokens")


def update(policy, optimizer, rollout, tokens, settings):
    """One pass over the mini-batches of a rollout batch, which updates `tokens` (B, L).

    A mini-batch is one optimizer step. N is the number of its response tokens (with STAPO or 80/20:
    of those they keep), low and high ones together, whatever the micro-batches. A mini-batch whose
    gradient is 0 is skipped, because Adam would move the weights all the same. Returns sums over
    the mini-batches: STATISTICS (those of `policy_loss`), the gradient's norm and COUNTS.
    """
    rollout = replace(rollout, tokens=tokens)
    totals = dict.fromkeys((*STATISTICS, "grad_norm", *COUNTS), 0)
    for indices in torch.arange(len(tokens)).split(settings.mini_batch_size or len(tokens)):
        mini_batch = rollout.rows(indices)
        kept = tokens_to_keep(policy, mini_batch, settings)  # all response tokens, or section 8
        mini_batch.tokens = mini_batch.tokens & kept
        count = kept.sum()  # N
        statistics = accumulate_gradient(policy, mini_batch, count, settings)
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), settings.max_grad_norm)
        totals["masked_tokens"] += int(mini_batch.mask.sum() - count)  # also if there is no step
        if not norm.isfinite():  # what is infinite or not a number must not reach the weights
            totals["nonfinite_steps"] += 1
        else:
            add(totals, statistics)
            if norm == 0:
                totals["skipped_steps"] += 1
            else:
                optimizer.step()
                totals["optimizer_steps"] += 1
                totals["grad_norm"] += float(norm)
        optimizer.zero_grad()
    return totals


def accumulate_gradient(policy, mini_batch, normalizer, settings):
    """Add the gradient of Eq. 1 on a mini-batch's `tokens`, divided by N; returns the statistics.

    Only rows with a token to update are read; with β = 0 not those either where every Â is 0: their
    gradient is 0, and their tokens do not count as updated.
    """
    has_gradient = mini_batch.tokens.any(1)  # (rows of the mini-batch,)
    if not settings.kl_coef:
        has_gradient = has_gradient & mini_batch.advantages.any(1)
    to_read = has_gradient.nonzero().flatten().tolist()
    sums = dict.fromkeys(STATISTICS, 0.0)
    for indices in micro_batches(to_read, mini_batch.lengths, settings.tokens_per_microbatch):
        part = mini_batch.rows(indices)  # a micro-batch
        tokens = part.tokens
        with mixed_precision(policy, settings):
            logits = token_logits(policy, part.ids, tokens, settings.temperature, settings.min_p)
        logprobs = spread(token_logprobs(logits, part.ids[tokens]), tokens)  # (rows, L)
        # With --min-p what π_θ or π_old cannot sample (log π = −∞) has no part in the loss.
        tokens = tokens & (logprobs > -math.inf) & (part.old_logprobs > -math.inf)
        ref_logprobs = None
        if part.ref_logprobs is not None:
            ref_logprobs = part.ref_logprobs[tokens]
        loss, statistics = policy_loss(
            logprobs[tokens],
            part.old_logprobs[tokens],
            part.advantages[tokens],
            normalizer,
            ref_logprobs,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            clip_dual=settings.clip_dual,
            kl_coef=settings.kl_coef,
        )
        loss.backward()
        add(sums, statistics)
    return sums


def add(totals, values):
    """Add each of some named numbers to the total of its name."""
    for name, value in values.items():
        totals[name] += value


def policy_loss(
    logprobs,
    old_logprobs,
    advantages,
    normalizer,
    ref_logprobs=None,
    clip_low=0.2,
    clip_high=0.24,
    clip_dual=10.0,
    kl_coef=0.001,
):
    """The clipped policy-gradient loss of Eq. 1, and a dictionary of statistics about it.

        loss = -1/N Σ_t { min(r Â, clip(r, 1-ε_l, 1+ε_h) Â) - β·k3 },   r = π_θ / π_old

    Tensors have one shape, such as (M,), and hold the tokens to update and no others. N, the
    `normalizer`, is the number of all response tokens of the mini-batch, also where only one group
    of them is updated. Where Â < 0 a token's loss is at most c·|Â| (the dual clip). There is no KL
    without `ref_logprobs` or with β = 0.

    Every statistic is a sum over the tokens divided by N, so that micro-batches given the same N
    add up to their mini-batch, and Lopti's passes to the whole.

    >>> policy_loss(torch.tensor([1.5, 0.9]).log(), torch.zeros(2), torch.tensor([1.0, -1.0]), 2)[0]
    tensor(-0.1700)
    """
    ratio = (logprobs - old_logprobs).exp()  # r
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    smaller = torch.minimum(unclipped, clipped)
    bound = clip_dual * advantages  # from below, where Â < 0
    objective = torch.where(advantages < 0, torch.maximum(smaller, bound), smaller)
    kl = torch.zeros_like(ratio)
    if ref_logprobs is not None and kl_coef:
        kl = kl_estimate(logprobs, ref_logprobs)
    loss = (kl_coef * kl - objective).sum() / normalizer
    with torch.no_grad():
        is_clipped = clipped < unclipped  # then the clip's constant is taken: only the KL pulls
        statistics = {
            "policy_loss": -objective,
            "kl": kl,
            "updated_share": torch.ones_like(ratio),
            "clip_ratio/low_mean": is_clipped & (advantages < 0),  # TRL's names: low is 1-ε_l
            "clip_ratio/high_mean": is_clipped & (advantages > 0),
            "clip_ratio/dual_mean": (advantages < 0) & (smaller < bound),
        }
        means = {name: float(values.sum() / normalizer) for name, values in statistics.items()}
    return loss, means


def kl_estimate(logprobs, ref_logprobs):
    """k3 of KL(π_θ‖π_ref) per token: e^d - d - 1 with d = log π_ref - log π_θ. (M,) → (M,)

    An estimate from one sampled token that is never negative, and 0 where the two agree. Clamped as
    in the published code; a token with π_ref = 0 (log −∞) is at the clamp and has no gradient.

    >>> kl_estimate(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.5, 0.25]).log())
    tensor([0.0000, 0.1931])
    """
    difference = (ref_logprobs - logprobs).clamp(-5, 5)
    return (difference.exp() - difference - 1).clamp(-10, 10)


def micro_batches(indices, lengths, size):
    """Cut row indices into lists, each a micro-batch of rows of similar length.

    It has at most `size` tokens with padding, or is one row.

    >>> micro_batches([0, 1, 2], lengths=torch.tensor([30, 5, 4]), size=12)
    [[2, 1], [0]]
    """
    batches = []
    for index in sorted(indices, key=lambda index: int(lengths[index])):  # the longest last
        length = int(lengths[index])
        if not batches or (len(batches[-1]) + 1) * length > size:
            batches.append([])
        batches[-1].append(index)
    return batches


def mixed_precision(model, settings):
    """Forward passes in bfloat16 where --dtype says so; weights and gradients stay float32."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16")


# 8. Later methods (STAPO, 80/20, safe vocabulary), and REINFORCE++ of the published code ----------


def tokens_to_keep(policy, batch, settings):
    """The response tokens (B, L) of a mini-batch that STAPO and 80/20 leave to the update.

    They go by the current policy, and their quantiles by the whole mini-batch: hence a forward
    pass of its own, without which the result would depend on the micro-batch size.
    """
    kept = batch.mask
    if settings.stapo or settings.top_entropy:
        logprobs, entropies = score(policy, batch, settings)
    if settings.stapo:
        kept = kept & stapo_mask(logprobs, entropies, batch.advantages, batch.mask)
    if settings.top_entropy:
        kept = kept & entropy_mask(entropies, batch.mask, settings.top_entropy)
    return kept


def stapo_mask(logprobs, entropies, advantages, mask, tau_p=0.002, quantile=0.75):
    """STAPO (arXiv 2602.15620): the tokens to keep, all but the spurious ones. All are (B, L).

    Spurious is a token with Â > 0, π < τ_p and H < τ_h. τ_h is the `quantile` of H among the
    tokens with Â > 0 and π < τ_p: it is relative, so three quarters of these candidates go,
    however unsure the policy was.
    """
    candidates = mask & (advantages > 0) & (logprobs.exp() < tau_p)
    if not candidates.any():
        return mask
    tau_h = entropies[candidates].quantile(quantile)
    return mask & ~(candidates & (entropies < tau_h))


def entropy_mask(entropies, mask, rho):
    """80/20 (arXiv 2506.01939): keep the share ρ of highest entropy, and what ties with it: (B, L).

    >>> entropy_mask(torch.tensor([[0.1, 0.9, 0.5, 0.2, 0.3]]), torch.tensor([[True] * 5]), rho=0.2)
    tensor([[False,  True, False, False, False]])
    """
    values = entropies[mask].sort(descending=True).values
    count = round(rho * len(values))
    threshold = values[count - 1] if count else math.inf
    return mask & (entropies >= threshold)


def safe_vocabulary(logits, min_p):
    """V_safe = {a : π(a) ≥ ρ·max_b π(b)} with ρ = min_p, as a mask: (..., V) → (..., V).

    Dynamic vocabulary pruning (arXiv 2512.23087). Only its abstract was at hand: min-p, and
    ρ = e^-13 = 2.3e-6, are our reading of it. HF's own min_p samples by the same rule.
    """
    return logits >= logits.max(-1, keepdim=True).values + math.log(min_p)


def reinforce_pp_advantages(rewards, mask):
    """REINFORCE++: each token gets its response's reward, whitened over all tokens: (B, L).

    Â = (R - mean)/sqrt(var + 1e-8), mean and unbiased variance over the tokens in `mask`, so that
    long responses count for more; no group, no discount. Exactly 0 where all rewards are equal.

    >>> reinforce_pp_advantages(torch.tensor([1., 0.]), torch.tensor([[True, True], [True, False]]))
    tensor([[ 0.5774,  0.5774],
            [-1.1547, -0.0000]])
    """
    values = rewards[:, None].expand(mask.shape)[mask]  # (number of response tokens,)
    if all_equal(values[None]):
        return torch.zeros_like(rewards)[:, None] * mask
    return (rewards[:, None] - values.mean()) / (values.var() + 1e-8).sqrt() * mask


# 9. The training loop -----------------------------------------------------------------------------


def train(settings):
    """A run, from its beginning or with --resume from its checkpoint, to its report: its folder."""
    if settings.eval_only:
        raise UserError("--eval-only trains nothing: show_accuracy(settings) evaluates")
    policy, tokenizer, train_rows, eval_rows = prepare(settings)
    torch.manual_seed(settings.seed)
    reference = make_reference(policy, settings)  # before a checkpoint is loaded
    optimizer = make_optimizer(policy, settings)
    folder = run_folder(settings)
    saved, log = load_checkpoint(folder, policy, optimizer)  # the last step, and all lines so far
    last = max(settings.steps, saved)
    batches = prompt_stream(train_rows, settings.prompts_per_step, settings.seed, skip=saved)
    tell_plan(settings, policy.device, folder, saved, last)
    try:
        write_config(folder, settings, policy)
        if not log["evaluations"]:
            log_evaluation(folder, log, saved, policy, tokenizer, eval_rows, settings)
        progress = tqdm(range(saved + 1, last + 1), desc="training", disable=None)
        for step in progress:
            batch = next(batches)
            started = time.perf_counter()
            rollout, updates = training_step(
                policy, reference, optimizer, tokenizer, batch, settings
            )
            metrics = step_metrics(rollout, updates, settings)
            metrics["seconds"] = time.perf_counter() - started
            log_step(folder, log, step, metrics, batch, rollout, settings)
            tell_step(log["metrics"], last, progress, settings)
            is_last = step == last
            if is_last or is_due(step, settings.eval_every):
                log_evaluation(folder, log, step, policy, tokenizer, eval_rows, settings)
            if settings.save_every and (is_last or is_due(step, settings.save_every)):
                save_checkpoint(folder, step, log, policy, optimizer)
                saved = step
    except KeyboardInterrupt as stop:
        advice = f"{folder} has no checkpoint yet: start again"
        if saved:
            advice = f"--resume {folder} goes on after step {saved}"
        raise KeyboardInterrupt(advice) from stop
    finally:
        if not log["evaluations"] and not settings.resume:
            shutil.rmtree(folder)  # nothing has come of the run
    with replaced_at_once(folder / "final") as path:
        policy.save_pretrained(path)
        tokenizer.save_pretrained(path)
    report(log, eval_rows, settings)
    print(f"\n{folder} holds metrics.jsonl, samples.jsonl, evaluations.jsonl, final/.")
    return folder


def is_due(step, every):
    """Whether something that happens every so many steps (0: never) happens after this step."""
    return every > 0 and step % every == 0


# 10. Evaluation -----------------------------------------------------------------------------------


def evaluate(policy, tokenizer, rows, settings):
    """Answer held-out rows once greedily, then k times at T = 1: the `tally` and the answers.

    The answers are (response, reward) pairs for each row, the greedy one first. The seed is always
    the same, and the training's own random state is left alone.
    """
    device = policy.device
    prompts = [row["prompt"] for row in rows]
    kinds = [(1, 0)]  # how many responses, and the temperature
    if settings.eval_samples:
        kinds.append((settings.eval_samples, 1.0))
    answers = [[] for _ in rows]
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        torch.manual_seed(settings.seed + 1)
        for count, temperature in kinds:
            texts = sample(policy, tokenizer, prompts, count, temperature, settings).texts
            rows_of_texts = []
            for row in rows:
                rows_of_texts += [row] * count
            rewards = compute_rewards(texts, rows_of_texts, settings)
            for place, answer in enumerate(zip(texts, rewards)):
                answers[place // count].append(answer)
    return tally(rows, answers, settings.solved_reward), answers


def tally(rows, answers, solved_reward):
    """Greedy accuracy, avg@k and pass@k per difficulty, each (mean, low, high); and mean reward.

    `answers` has (response, reward) pairs for each row, the greedy one first, then k samples.
    Returns {difficulty: {"prompts": n, "greedy": ..., "avg@k": ..., "pass@k": ..., "reward": ...}}.

    >>> table = tally([{"difficulty": "2"}], [[("a", 3.0), ("b", 3.0), ("c", -1.0)]], 3.0)
    >>> table["2"]["avg@2"][0], table["2"]["reward"]
    (0.5, 1.0)
    """
    table = {}
    for difficulty in dict.fromkeys(row["difficulty"] for row in rows):
        rewards = []
        for row, answers_of_row in zip(rows, answers):
            if row["difficulty"] == difficulty:
                rewards.append([reward for _, reward in answers_of_row])
        rewards = torch.tensor(rewards, dtype=torch.float64)  # (prompts, 1 + k)
        right = reaches(rewards, solved_reward).double()
        line = {"prompts": len(rewards), "greedy": wilson_interval(right[:, 0])}
        k = rewards.shape[1] - 1
        if k:
            line[f"avg@{k}"] = wilson_interval(right[:, 1:].mean(1))
            line[f"pass@{k}"] = wilson_interval(right[:, 1:].amax(1))
        line["reward"] = float(rewards[:, 1:].mean() if k else rewards.mean())
        table[difficulty] = line
    return table


def wilson_interval(values):
    """The mean of values between 0 and 1, and its 95 % interval (Wilson's score interval): (n,) → 3

    Where values are not only 0 and 1, as for avg@k, it is wider than it need be.

    >>> [round(number, 3) for number in wilson_interval(torch.tensor([0.0, 1.0] * 50))]
    [0.5, 0.404, 0.596]
    """
    z = 1.959964
    count = len(values)
    mean = float(values.mean())
    centre = (mean + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count**2))
    return mean, max(0.0, centre - half), min(1.0, centre + half)


def table_text(tables, heading):
    """Tables of `tally` {title: table} as text: a line for each measure and difficulty.

    `heading` says what the difficulties are, such as "people".
    """
    layout = "{:<8}{:>8}{:>9}" + "{:>21}" * len(tables)
    lines = [layout.format("", heading, "prompts", *tables)]
    first = next(iter(tables.values()))
    names = next(iter(first.values()))  # prompts, greedy, avg@k, pass@k, reward
    for measure in [name for name in names if name not in ("prompts", "reward")]:
        for difficulty, line in first.items():
            cells = []
            for table in tables.values():
                cells.append("{:.2f} [{:.2f}, {:.2f}]".format(*table[difficulty][measure]))
            lines.append(layout.format(measure, difficulty, line["prompts"], *cells))
        means = []
        for table in tables.values():
            means.append(sum(line[measure][0] for line in table.values()) / len(table))
        lines.append(mean_line(layout, measure, means))
    rewards = []
    for table in tables.values():
        rewards.append(sum(line["reward"] for line in table.values()) / len(table))
    lines.append(mean_line(layout, "reward", rewards))
    return "\n".join(lines)


def mean_line(layout, measure, means):
    """A line of `table_text`: the mean over the difficulties, for each table."""
    cells = [f"{mean:.2f}{'':13}" for mean in means]  # with room where others have an interval
    return layout.format(measure, "mean", "", *cells).rstrip()


def report(log, rows, settings):
    """Print what came of a run: accuracy, a prompt that it learned, the first step and the last."""
    before = log["evaluations"][0]
    after = log["evaluations"][-1]
    print(f"\nHeld-out accuracy before and after {after['step']} steps, with 95 % intervals\n")
    tables = {"before": before["table"], "after": after["table"]}
    print(table_text(tables, TASKS[settings.task].difficulty))
    learned = []  # greedy answers that became right
    for row, (old_text, was), (text, now) in zip(rows, before["greedy"], after["greedy"]):
        if reaches(now, settings.solved_reward) and not reaches(was, settings.solved_reward):
            learned.append((row["asked"], old_text, text))
    if learned:
        asked, old_text, text = min(learned, key=lambda each: len(each[0]))  # the shortest
        print(f"\nA prompt that it has learned to answer:\n{textwrap.fill(asked, 99)}")
        print("before:", " ".join(old_text.rpartition("</think>")[2].split())[:300])
        print("after: ", " ".join(text.rpartition("</think>")[2].split())[:300])
    steps = log["metrics"]
    if steps:
        print("\nIn training, first step → last:")
        for name in ("accuracy", "low_probability_share", "grad_norm/low", "grad_norm/high"):
            if name in steps[0]:
                print(f"{name:<24}{steps[0][name]:.2f} → {steps[-1][name]:.2f}")
    equal = steps_without_advantages(steps)
    if equal and settings.advantage == "grpo":
        told = "no group had unequal rewards: nothing was learned there; see samples.jsonl"
        print(f"\nIn {equal} of {len(steps)} steps {told}")


def show_accuracy(settings):
    """Print a model's answers to three prompts, easy to difficult, and then its accuracy."""
    policy, tokenizer, _, rows = prepare(settings)
    table, answers = evaluate(policy, tokenizer, rows, settings)
    shown = range(0, len(rows), max(1, len(rows) // 3))[:3]
    for place in shown:
        print(f"\n--- {rows[place]['prompt']}\nsolution: {rows[place]['solution']}")
        for number, (text, reward) in enumerate(answers[place]):
            title = f"sample {number}" if number else "greedy"
            print(f"\n[{title}, reward {reward:g}]\n{text}")
    print()
    print(table_text({"": table}, TASKS[settings.task].difficulty))


# 11. Sampling quickly -----------------------------------------------------------------------------

STRETCH = 32  # tokens, after which responses that have ended leave the batch
CACHE = ALL_CACHE_NAMES[0]  # HF's name of the argument: `cache` since transformers 5.24


def generate_in_stretches(model, prompt_ids, temperature, settings, end_ids, pad_id):
    """N lists of prompt ids → N lists of response ids, each up to its end or `--max-new-tokens`.

    From the same distribution as one plain call of `generate`, but with the bundled model in about
    half of the time: after each stretch, responses that have ended leave the batch.
    """
    prompts = [torch.tensor(prompt, device=model.device) for prompt in prompt_ids]
    ones = [torch.ones_like(prompt) for prompt in prompts]
    # Padded on the left, so that each row's next token comes in the next column.
    left = {"batch_first": True, "padding_side": "left"}
    ids = pad_sequence(prompts, padding_value=pad_id, **left)  # (N, P)
    attention_mask = pad_sequence(ones, padding_value=0, **left)  # (N, P)
    cache = DynamicCache(config=model.config)  # the config says which layers keep what
    responses = [[] for _ in prompt_ids]
    unfinished = list(range(len(prompt_ids)))  # row r of ids continues responses[unfinished[r]]
    min_p = settings.min_p
    for start in range(0, settings.max_new_tokens, STRETCH):
        count = min(STRETCH, settings.max_new_tokens - start)
        new = generate(
            model, ids, attention_mask, cache, count, temperature, min_p, end_ids, pad_id
        )
        rows = []  # of ids, those whose responses go on
        for row, sampled_ids in enumerate(new.tolist()):
            response = responses[unfinished[row]]
            response += until_end(sampled_ids, end_ids)
            if response[-1] not in end_ids:
                rows.append(row)
        if not rows:
            break
        unfinished = [unfinished[row] for row in rows]
        ids = new[rows, -1:]  # the only one that the cache has not read
        attention_mask = torch.cat([attention_mask, torch.ones_like(new)], 1)[rows]
        cache.reorder_cache(torch.tensor(rows, device=model.device))
    return responses


# 12. Metrics and files ----------------------------------------------------------------------------


def step_metrics(rollout, updates, settings):
    """One line of metrics.jsonl, with TRL's names where TRL has one."""
    metrics = rollout_metrics(rollout, settings) | update_metrics(updates, settings)
    tokens_gone_over = len(updates) * metrics["rollout/tokens"]
    metrics["masked_share"] = metrics["masked_tokens"] / tokens_gone_over
    return metrics


def rollout_metrics(rollout, settings):
    """What there is to say of a rollout batch before its update."""
    mask = rollout.mask
    lengths = mask.sum(1).double()
    count = int(mask.sum())
    groups = rollout.rewards.view(-1, settings.group_size)
    correction = 1 if settings.group_size > 1 else 0  # with 1 a group of one would have NaN
    # Without Lopti, too, a line has the share of unlikely tokens: those below the paper's η.
    low, _ = split_tokens(rollout.old_logprobs, mask, settings.eta or 0.5)
    kl = torch.zeros(())  # KL(π_old‖π_ref); stays 0 with β = 0
    if rollout.ref_logprobs is not None:
        inside = mask & (rollout.old_logprobs > -math.inf)
        kl = kl_estimate(rollout.old_logprobs[inside], rollout.ref_logprobs[inside])
    metrics = {
        "reward": rollout.rewards.mean(),
        "reward_std": groups.std(1, correction=correction).mean(),
        "frac_reward_zero_std": all_equal(groups).double().mean(),
        "accuracy": reaches(rollout.rewards, settings.solved_reward).double().mean(),
        "completions/mean_length": lengths.mean(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": rollout.truncated.double().mean(),
        "entropy": rollout.entropies.sum() / count,
        "low_probability_share": low.sum() / count,
        "rollout/kl": kl.sum() / count,
        "rollout/tokens": count,
    }
    return {name: float(value) for name, value in metrics.items()}


def update_metrics(updates, settings):
    """What there is to say of the passes, from the sums that `update` returned for each.

    STATISTICS are means over the mini-batches of a pass; those of Lopti's two passes are added,
    those of --passes are averaged. COUNTS are sums.
    """
    names = settings.pass_names()
    metrics = dict.fromkeys((*STATISTICS, *COUNTS), 0.0)
    for sums in updates:
        mini_batches = max(1, sums["optimizer_steps"] + sums["skipped_steps"])
        for name in STATISTICS:
            metrics[name] += sums[name] / mini_batches / settings.passes
        for name in COUNTS:
            metrics[name] += sums[name]
    for name in dict.fromkeys(names):  # "low" and "high", or "all": each once
        same = [sums for its_name, sums in zip(names, updates) if its_name == name]
        norms = sum(sums["grad_norm"] for sums in same)
        steps = sum(sums["optimizer_steps"] for sums in same)
        metrics[f"grad_norm/{name}"] = norms / max(1, steps)
    return metrics


def tell_plan(settings, device, folder, saved, last):
    """Say what a run is going to do."""
    steps = f"Steps {saved + 1} to {last}" if saved < last else f"All {last} steps are done"
    print(f"{steps} on {device}, into {folder}")
    responses = settings.prompts_per_step * settings.group_size
    remainder = responses % (settings.mini_batch_size or responses)
    if responses > settings.mini_batch_size and remainder:
        print(f"{responses} responses: the last mini-batch, a step too, has {remainder} of them")


def tell_step(lines, last, progress, settings):
    """Say how training goes: in the progress bar; without a terminal, in about ten lines."""
    metrics = lines[-1]
    step = metrics["step"]
    reward = metrics["reward"]
    accuracy = metrics["accuracy"]
    progress.set_postfix(reward=reward, accuracy=accuracy)
    if progress.disable and is_due(step, max(1, last // 10)):
        print(f"step {step} of {last}: reward {reward:.2f}, accuracy {accuracy:.2f}")
    if metrics["nonfinite_steps"]:
        tqdm.write(f"step {step}: left out an update whose gradient was not finite")
    equal = metrics["frac_reward_zero_std"] == 1 and settings.advantage == "grpo"
    if equal and steps_without_advantages(lines) == 1:  # the first such step
        tqdm.write(f"step {step}: no group has unequal rewards, so there is nothing to learn")


def steps_without_advantages(lines):
    """In how many steps the rewards of each group were all equal."""
    return sum(line["frac_reward_zero_std"] == 1 for line in lines)


def run_folder(settings):
    """The folder of a run; made unless it is resumed."""
    name = settings.name or f"{settings.task}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    path = settings.resume or Path(settings.output) / name
    folder = Path(path).expanduser().resolve()
    with user_errors(f"cannot make {folder}: choose another --output or --name, or --resume it"):
        folder.mkdir(parents=True, exist_ok=bool(settings.resume))
    return folder


def write_config(folder, settings, policy):
    """The settings of a run, for --resume; and whether its model can be saved, before training."""
    with user_errors("the model of this run could not be saved at its end"):
        for part in (policy.config, policy.generation_config):
            part.save_pretrained(folder / ".final.partial")  # what becomes final/
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    with replaced_at_once(folder / "config.json") as path:
        path.write_text(json.dumps(asdict(settings) | versions, indent=2, default=str))


@contextmanager
def replaced_at_once(path):
    """Write a file or folder beside `path`, and move it there when it is complete."""
    partial = path.with_name(f".{path.name}.partial")
    has_checkpoint = (path.parent / "checkpoint.pt").exists()
    advice = "--resume goes on" if has_checkpoint else "there is no checkpoint: start again"
    with user_errors(f"cannot write {path}, is the disk full? {advice}"):
        yield partial
        if path.is_symlink():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
        os.replace(partial, path)


def save_checkpoint(folder, step, log, policy, optimizer):
    """Everything that the next step depends on, and all lines, over the checkpoint before."""
    device = policy.device
    state = {"step": step, "log": log, "random": torch.get_rng_state()}
    state |= {"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    with replaced_at_once(folder / "checkpoint.pt") as path:
        torch.save(state, path)


def load_checkpoint(folder, policy, optimizer):
    """Bring a run back to its checkpoint: returns its step and lines, which the files then have."""
    device = policy.device
    path = folder / "checkpoint.pt"
    state = {"step": 0, "log": {"metrics": [], "samples": [], "evaluations": []}}
    if path.exists():
        with user_errors(f"{path} is damaged: start a new run"):
            state = torch.load(path, weights_only=True, map_location="cpu")
            policy.load_state_dict(state["policy"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        if device.type in state:  # else from another kind of device
            torch.get_device_module(device).set_rng_state(state[device.type], device)
    elif (folder / "final").exists():
        raise UserError(f"{folder} has no checkpoint: start a new run from its final/")
    for name, lines in state["log"].items():
        with replaced_at_once(folder / f"{name}.jsonl") as partial:
            partial.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return state["step"], state["log"]


def log_step(folder, log, step, metrics, batch, rollout, settings):
    """A line of metrics, and the first response to each of two prompts."""
    add_line(folder, log, "metrics", {"step": step, **metrics})
    for group, row in enumerate(batch[:2]):
        first = group * settings.group_size
        text = rollout.texts[first]
        reward = float(rollout.rewards[first])
        line = {"step": step, "prompt": row["prompt"], "response": text, "reward": reward}
        add_line(folder, log, "samples", line)


def log_evaluation(folder, log, step, policy, tokenizer, rows, settings):
    """Evaluate the policy: a line with the table and the greedy answers."""
    table, answers = evaluate(policy, tokenizer, rows, settings)
    greedy = [answers_of_row[0] for answers_of_row in answers]
    add_line(folder, log, "evaluations", {"step": step, "table": table, "greedy": greedy})


def add_line(folder, log, name, line):
    """One more line of a jsonl file."""
    log[name].append(line)
    with (folder / f"{name}.jsonl").open("a") as stream:
        stream.write(json.dumps(line) + "\n")


# 13. The model ------------------------------------------------------------------------------------


def prepare(settings):
    """The model on its device, its tokenizer, training and evaluation rows."""
    if settings.resume:
        refuse_changes(settings)
    device = settings.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    policy, tokenizer = load_model(settings.model, device)
    if settings.gradient_checkpointing:
        checkpoint_layers(policy)
    train_rows, eval_rows = load_data(settings, tokenizer)
    check_model(policy, tokenizer, train_rows + eval_rows, settings)
    return policy, tokenizer, train_rows, eval_rows


def load_model(name, device):
    """Model (weights in float32, in evaluation mode) and tokenizer of a folder or a hub name.

    Without a name the bundled model.
    """
    name = str(name) or str(Path(__file__).resolve().parent / "data" / "tiny")
    folder = Path(name).expanduser()
    is_path = name.startswith((".", "/", "~")) or Path(folder.parts[0]).exists()
    if is_path and not folder.exists():  # else it is looked for on the hub, for a minute
        raise UserError(f"--model {name}: there is no such folder")
    if folder.exists():
        name = str(folder)
    with user_errors(f"cannot load --model {name} on --device {device}"):
        if (Path(name) / "adapter_config.json").exists():
            raise ValueError("it is an adapter: merge it into its model first")
        tokenizer = AutoTokenizer.from_pretrained(name)
        options = {"dtype": torch.float32, "output_loading_info": True}
        model, report = AutoModelForCausalLM.from_pretrained(name, **options)
        if report["missing_keys"] or report["mismatched_keys"]:
            raise ValueError("its weights do not fit its config.json")
        trainable = all(weights.requires_grad for weights in model.parameters())
        if not trainable or hasattr(model.config, "quantization_config"):
            raise ValueError("it has weights that cannot be trained: quantized or frozen ones")
        words = model.get_input_embeddings().num_embeddings
        if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= words:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.pad_token_id is None:
            raise ValueError("its tokenizer has neither a padding token nor an end of sequence")
        if getattr(model.config, "output_router_logits", False):  # `generate` cannot take them
            model.config.output_router_logits = False
        return model.to(device).eval(), tokenizer


def checkpoint_layers(model):
    """Keep each layer's input only, and compute the rest again in the backward pass."""
    # HF's own switch works in training mode only: with dropout
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        name = type(model).__name__
        raise UserError(f"--gradient-checkpointing does nothing for {name}: leave it out")
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def check_model(model, tokenizer, rows, settings):
    """UserError where prompts and responses do not fit the model, or π is not what was sampled.

    Every token must be drawn from the distribution that it is scored with. Two responses are tried,
    one to a short prompt with much padding and one that ends where the longest row may end: some
    models change with the position, or read their cache in another way than a whole row.
    """
    prompts = tokenizer([row["prompt"] for row in rows], add_special_tokens=False)["input_ids"]
    longest = max(prompts, key=len)
    length = len(longest) + settings.max_new_tokens
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    if limit > 0 and length > limit:  # some models say -1: no limit
        raise UserError(f"responses may pass {limit} positions: lower --max-new-tokens")
    words = model.get_input_embeddings().num_embeddings
    largest = max(max(prompt, default=0) for prompt in prompts)
    if largest >= words:
        raise UserError(f"the model has {words} embeddings, none for token {largest} of a prompt")
    count = min(STRETCH + 4, settings.max_new_tokens)  # so that a second stretch begins
    few = replace(settings, max_new_tokens=count)
    exact = replace(few, dtype="float32")
    short = longest[:8]
    repeats = 1 + length // len(longest)
    long = (longest * repeats)[: length - count]
    with user_errors(f"{settings.model or 'the model'} cannot be trained"):
        drawn, scored = probe(model, [short, long], exact, tokenizer.pad_token_id)
        difference = float((drawn - scored).abs().max())
        if not difference < 1e-2:  # or it is not a number
            raise ValueError(
                f"π is not what was sampled: log-probabilities differ by {difference:.2g}"
            )
        if settings.dtype != "float32":  # rounding may be large there: it has to run, with numbers
            for logprobs in probe(model, [short, long], few, tokenizer.pad_token_id):
                if not logprobs.isfinite().all():
                    raise ValueError(f"log π is not a number in {settings.dtype}")


@torch.no_grad()
def probe(model, prompts, settings, pad_id):
    """log π of all words at each token of greedy responses, as drawn and as scored.

    N prompts, T = `settings.max_new_tokens` tokens each: two of (N·T, V). The batch has one more
    row, which ends at its first token and leaves after the first stretch, as responses do. The
    others are kept from ending.
    """
    drawn = []

    def record(module, inputs, output):
        logits = output.logits[:, -1]
        drawn.append(logits[-len(prompts) :].float().log_softmax(-1))  # (N, V)
        logits[:, pad_id] = -math.inf  # which ends a response here
        if len(logits) > len(prompts):
            logits[0, pad_id] = math.inf

    with mixed_precision(model, settings):
        with model.register_forward_hook(record):
            batch = [prompts[0], *prompts]
            _, *responses = generate_in_stretches(model, batch, 0, settings, [pad_id], pad_id)
        scored = []
        for prompt, response in zip(prompts, responses):
            ids, mask, _ = pack([prompt], [response])
            logits = token_logits(model, ids.to(model.device), mask.to(model.device), 1.0)
            scored.append(logits.log_softmax(-1))  # (T, V)
    return torch.stack(drawn, 1).flatten(0, 1), torch.cat(scored)


def make_reference(policy, settings):
    """π_ref, the policy as it starts, without gradients; None where β = 0."""
    if not settings.kl_coef:
        return None
    return copy.deepcopy(policy).requires_grad_(False)


def make_optimizer(policy, settings):
    """AdamW over all weights, one for all passes."""
    rate = settings.learning_rate
    decay = settings.weight_decay
    return torch.optim.AdamW(policy.parameters(), lr=rate, weight_decay=decay, fused=True)


# 14. The command line -----------------------------------------------------------------------------


def build_parser():
    """A flag for each field of Settings. @FILE stands for the flags in a file."""
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,  # so that errors are one sentence
        description=__doc__.split("\n\n")[0],
        epilog="@FILE stands for the flags in it: data/kk.flags, data/math.flags follow the paper.",
        fromfile_prefix_chars="@",
        argument_default=argparse.SUPPRESS,  # only what is given
    )
    parser.convert_arg_line_to_args = words_of_line
    for each in fields(Settings):
        options = {"help": each.metadata["meaning"]}
        if each.type is bool:
            options["action"] = "store_true"
        elif each.type is tuple:
            options |= {"type": int, "nargs": "+"}
        else:
            options |= {"type": each.type, "choices": each.metadata["choices"]}
        if each.type is not bool and each.default not in ("", None):
            options["help"] += f" (default: {each.default})"
        parser.add_argument(flag(each.name), **options)
    return parser


def words_of_line(line):
    """The words of a line of a file of flags, as in a shell: "one word", and # is a comment."""
    words = shlex.shlex(line, posix=True)
    words.whitespace_split = True
    words.escape = ""  # C:\data keeps its backslash
    with user_errors(f"cannot read the line {line} of a file of flags"):
        return list(words)


# What may change when a run goes on.
MAY_CHANGE = ("resume", "steps", "eval_every", "save_every", "device", "sample_batch_size")
MAY_CHANGE += ("tokens_per_microbatch", "gradient_checkpointing")
PLACES = ("model", "data", "eval_data")


def parse_arguments(words=None):
    """The settings by flags; with --resume those of the run, and few may change."""
    given = vars(build_parser().parse_args(words))
    if not given.get("resume"):
        return Settings(**given)
    return Settings(**(saved_settings(given["resume"]) | given))


def saved_settings(folder):
    """The settings in a run's config.json, by name."""
    path = Path(folder).expanduser() / "config.json"
    with user_errors(f"--resume {folder}: name the folder of a run, runs/NAME"):
        config = json.loads(path.read_text())
    lacking = ", ".join(each.name for each in fields(Settings) if each.name not in config)
    if lacking:
        raise UserError(f"{path} lacks {lacking}, as another version made it: start a new run")
    return {each.name: config[each.name] for each in fields(Settings)}


def refuse_changes(settings):
    """UserError where a run would go on by other settings than its own."""
    saved = saved_settings(settings.resume)
    as_saved = json.loads(json.dumps(asdict(settings)))  # with lists for tuples
    for name, value in as_saved.items():
        if name not in MAY_CHANGE and value != saved[name]:
            told = f"--resume cannot change {flag(name)}: start a new run for that"
            if name in PLACES:
                told += f", or write a place that has moved into {settings.resume}/config.json"
            raise UserError(told)


def exit_code(program, name):
    """Run a program and return its exit code.

    0; 2 after one sentence about what the user can mend; 130 after Ctrl-C.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a kill ends like Ctrl-C
    memory = "out of memory: lower --tokens-per-microbatch or --sample-batch-size, "
    memory += "leave out the reference model (--kl-coef 0), or take a smaller --model"
    try:
        program()
        return 0
    except KeyboardInterrupt as stop:
        print(f"{name}: stopped. {stop}", file=sys.stderr)
        return 130
    except (torch.OutOfMemoryError, MemoryError):
        told = memory
    except RuntimeError as error:
        if "allocate memory" not in str(error):  # as torch says on a CPU
            raise
        told = memory
    except (UserError, OSError) as error:  # OSError: a disk that is full or read-only
        told = str(error)
    print(f"{name}: {told}", file=sys.stderr)
    return 2


def run_command(words=None):
    """What the command line asks for: a training, or with --eval-only an evaluation."""
    settings = parse_arguments(words)
    if settings.eval_only:
        show_accuracy(settings)
    else:
        train(settings)


def main(words=None):
    """`run_command`, with an exit code for what goes wrong."""
    return exit_code(lambda: run_command(words), "lopti.py")


def open_streams():
    """Print each line at once, and signs that the terminal lacks as escapes.

    Where a stream is closed, what is printed is dropped.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, "w")  # noqa: SIM115, open until the end
            setattr(sys, name, nowhere)
        getattr(sys, name).reconfigure(errors="backslashreplace", line_buffering=True)


if __name__ == "__main__":
    open_streams()
    sys.exit(main())
