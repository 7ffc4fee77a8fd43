"""lopti: Advantage Reweighting and Low-Probability Token Isolation for GRPO, in one file.

    python lopti.py                             # GRPO on the bundled model, no GPU needed
    python lopti.py --alpha 0.3 --eta 0.5       # the paper's two methods: α and η
    python lopti.py --task math --eta 0.5       # the same on arithmetic
    python lopti.py @data/kk.flags --alpha 0.3 --eta 0.5     # the paper's setting, one large GPU

Read it beside "Do Not Let Low-Probability Tokens Over-Dominate in RL for LLMs" (arXiv 2505.12929).
It begins with a training step, the paper's algorithm box. Sections 1 to 7 are the steps of the box:
sampling, rewards (in rewards.py), log-probabilities, advantages (Eq. 1), Advantage Reweighting (Eq.
4), Lopti (section 4.2), the update (Eq. 1). Section 8 has later methods, 9 the training loop. The
rest is plumbing: evaluation (10), metrics and files (11), the model (12), the flags (13).

What it leaves out of PPO: the value function (the group's mean is the baseline), generalized
advantage estimation, the entropy bonus. Of GRPO: the mean over each response's own tokens (one mean
over all tokens instead). Of large frameworks: several GPUs, inference servers, learning rate
schedules, chats of several turns.

Shapes: B responses (prompts × group size G), L tokens of the longest row, V words of the
vocabulary. A row is a prompt, its response, and padding. Log-probabilities are float32, and −∞
outside the vocabulary that is sampled from. Masks are boolean (B, L): `mask` is True on all
response tokens (in an update on those that section 8 keeps), `tokens` on those that a pass updates.
"""

import argparse
import copy
import functools
import json
import math
import os
import shutil
import sys
import tempfile
import textwrap
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, replace
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

from rewards import TASKS, UserError, compute_rewards, load_data, prompt_stream, tally, user_errors

transformers.utils.logging.disable_progress_bar()  # ours is enough
HERE = Path(__file__).resolve().parent

# The training step --------------------------------------------------------------------------------


@dataclass
class Rollout:
    """A batch of sampled responses. Each row is a prompt, its response, then padding."""

    ids: torch.Tensor  # (B, L) the ids that were sampled; never re-tokenised text
    mask: torch.Tensor  # (B, L) True on the response, its end-of-sequence token included
    lengths: torch.Tensor  # (B,) tokens of prompt and response
    truncated: torch.Tensor  # (B,) True where the length limit came before an end-of-sequence token
    texts: list  # B strings: the responses without end of sequence
    old_logprobs: torch.Tensor = None  # (B, L) log π_old, of the policy that sampled; 0 elsewhere
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


def training_step(policy, reference, optimizer, tokenizer, batch, args):
    """One step of GRPO with Advantage Reweighting and Lopti, on a batch of rows of data.

    The comments 1. to 7. are the steps of the algorithm in README.md, and the sections below.
    `reference` is None where β = 0. Returns the step's metrics and, for each of the B responses,
    (text, reward); responses g·G … g·G+G-1 answer prompt g.
    """
    prompts = [row["prompt"] for row in batch]
    rows = [row for row in batch for _ in range(args.group_size)]  # one for each response
    clock = [time.perf_counter()]
    rollout = sample(policy, tokenizer, prompts, args.group_size, args.temperature, args)  # 1. o
    clock.append(time.perf_counter())
    rewards = torch.tensor(compute_rewards(rollout.texts, rows, args)).to(policy.device)  # 2. R
    clock.append(time.perf_counter())
    old_logprobs, entropies = score(policy, rollout, args)  # 3. log π_old, log π_ref: (B, L)
    rollout.old_logprobs = old_logprobs
    rollout.ref_logprobs = score(reference, rollout, args)[0] if reference else None
    clock.append(time.perf_counter())
    if args.advantage == "grpo":  # 4. Â, Eq. 1
        advantages = group_advantages(rewards, args.group_size)[:, None] * rollout.mask
    else:
        advantages = reinforce_pp_advantages(rewards, rollout.mask)  # (B, L)
    rollout.advantages = reweight_advantages(advantages, old_logprobs, args.alpha)  # 5. Eq. 4
    low, high = split_tokens(old_logprobs, rollout.mask, args.eta)  # 6. Lopti
    tokens = {"all": rollout.mask, "low": low, "high": high}
    passes = args.order.split("-") if args.eta else ["all"]
    totals = defaultdict(Counter)  # of each kind of pass, over its optimizer steps
    for name in passes * args.passes:  # 7. the optimizer steps, Eq. 1
        totals[name].update(update(policy, optimizer, rollout, tokens[name], args))
    clock.append(time.perf_counter())
    metrics = step_metrics(rollout, rewards, entropies, totals, clock, args)
    return metrics, list(zip(rollout.texts, rewards.tolist()))


# 1. Sampling: o_i ~ π_old(· | q), G responses to each prompt --------------------------------------


@torch.no_grad()
def sample(model, tokenizer, prompts, group_size, temperature, args, end_ids=None):
    """Sample `group_size` responses to each prompt text with HF `generate`: a Rollout.

    Rows g·G … g·G+G-1 answer prompt g. Temperature 0 means greedy decoding. `end_ids` are the
    tokens that end a response, by default all that the model and its tokenizer have.
    """
    end_ids = end_token_ids(model, tokenizer) if end_ids is None else end_ids
    pad_id = tokenizer.pad_token_id
    # Every knob is set here and the model's own settings are put aside: Qwen ships top_k 20,
    # top_p 0.8 and a repetition penalty, and with those we would not sample from the π we score.
    settings = GenerationConfig(max_new_tokens=args.max_new_tokens, repetition_penalty=1.0)
    settings.update(pad_token_id=pad_id, eos_token_id=end_ids, do_sample=temperature > 0)
    if temperature:
        settings.update(temperature=temperature, top_k=0, top_p=1.0, min_p=args.min_p or None)
    prompt_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    prompt_ids = [ids for ids in prompt_ids for _ in range(group_size)]  # B lists
    size = args.sample_batch_size or len(prompt_ids)
    own_settings = model.generation_config
    model.generation_config = settings
    responses = []
    try:
        with mixed_precision(model, args):
            for i in tqdm(range(0, len(prompt_ids), size), "sampling", leave=False, disable=None):
                responses += generate_in_stretches(model, tokenizer, prompt_ids[i : i + size])
    finally:
        model.generation_config = own_settings
    truncated = torch.tensor([response[-1] not in end_ids for response in responses])
    ids, mask, lengths = pack(prompt_ids, responses, pad_id)
    without_end = [each if cut else each[:-1] for each, cut in zip(responses, truncated)]
    tensors = [values.to(model.device) for values in (ids, mask, lengths, truncated)]
    return Rollout(*tensors, tokenizer.batch_decode(without_end))


STRETCH = 32  # tokens, after which responses that have ended leave the batch
CACHE = ALL_CACHE_NAMES[0]  # HF's name of the argument: `cache` since transformers 5.24


def generate_in_stretches(model, tokenizer, prompt_ids):
    """HF `generate` by the settings of the model: N lists of prompt ids → N lists of response ids.

    From the same distribution as one plain call, 2.3 times faster with the bundled model
    (`seconds/sampling` of a run, and of one with data/lab/variants.py --variant plain-sampling).
    """
    settings = model.generation_config
    ends = settings.eos_token_id
    padded = tokenizer.pad({"input_ids": prompt_ids}, padding_side="left", return_tensors="pt")
    ids = padded["input_ids"].to(model.device)  # (N, P)
    mask = padded["attention_mask"].to(model.device)
    responses = [[] for _ in prompt_ids]
    unfinished = list(range(len(prompt_ids)))  # whose responses the rows of ids are
    cache = DynamicCache()
    for start in range(0, settings.max_new_tokens, STRETCH):
        options = {"max_new_tokens": min(STRETCH, settings.max_new_tokens - start), CACHE: cache}
        ids = model.generate(ids, attention_mask=mask, **options)
        new = ids[:, mask.shape[1] :]  # (unfinished, new tokens)
        for i, tokens in zip(unfinished, new.tolist()):
            responses[i] = until_end(responses[i] + tokens, ends)
        rows = [k for k, i in enumerate(unfinished) if responses[i][-1] not in ends]
        if not rows:
            break
        unfinished = [unfinished[row] for row in rows]
        mask = torch.cat([mask, torch.ones_like(new)], 1)[rows]
        ids = ids[rows]
        cache.batch_select_indices(torch.tensor(rows, device=ids.device))
    return responses


def end_token_ids(model, tokenizer):
    """Every id that ends a response: a model may have several (Qwen2.5-Instruct has two)."""
    end_ids = set()
    for source in (model.generation_config, model.config.get_text_config(), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        end_ids.update(ids if isinstance(ids, list) else [ids])
    return sorted(end_ids - {None})


def until_end(sampled_ids, end_ids):
    """The ids of a response: those sampled up to and including the first that ends it, or all.

    Going by the ids of the end, not by the padding id, keeps the end where both are the same.

    >>> until_end([5, 2, 2], end_ids=[2]), until_end([5, 6, 7], end_ids=[2])
    ([5, 2], [5, 6, 7])
    """
    ends = [place for place, token in enumerate(sampled_ids) if token in end_ids]
    return sampled_ids[: ends[0] + 1] if ends else sampled_ids


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


# 3. Log-probabilities, log π(o_t | q, o_<t) (2., the rewards, are in rewards.py) -----------------


@torch.no_grad()
def score(model, rollout, args):
    """log π and entropy H of every response token, a micro-batch at a time: two of (B, L)."""
    dtype = torch.promote_types(model.dtype, torch.float32)
    logprobs = torch.zeros_like(rollout.mask, dtype=dtype)
    entropies = logprobs.clone()
    for rows in micro_batches(range(len(logprobs)), rollout.lengths, args.tokens_per_microbatch):
        part = rollout.rows(rows)
        with mixed_precision(model, args):
            logits = token_logits(model, part.ids, part.mask, args.temperature, args.min_p)
        length = part.mask.shape[1]
        logprobs[rows, :length] = token_logprobs(logits, part.ids, part.mask)
        entropies[rows, :length] = spread(entropy(logits), part.mask)
    return logprobs, entropies


def token_logits(model, ids, tokens, temperature, min_p=0.0):
    """The logits, divided by T_s, that each of `tokens` (B, L) of ids (B, L) was drawn from: (M, V)

    M is the number of `tokens`. The temperature is that of sampling: π of Eqs. 1 and 4 is the
    distribution that the tokens come from. Outside the safe vocabulary of `min_p` logits are −∞.
    The output layer gets the hidden states of these M positions only: over a vocabulary of 150,000
    words the logits of all tokens would take gigabytes.
    """
    positions = tokens.roll(-1, 1)  # logits at t speak of token t+1; the first is no response's
    output_layer = model.get_output_embeddings()  # before it (B, L, size) → (M, size)
    with output_layer.register_forward_pre_hook(lambda _, inputs: inputs[0][positions]):
        # Padding is on the right, where a causal model never looks: no attention mask is needed.
        logits = model(ids, use_cache=False).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return logits.masked_fill(~safe_vocabulary(logits, min_p), -math.inf) if min_p else logits


def token_logprobs(logits, ids, tokens):
    """log π(o_t | q, o_<t) = logit of o_t - log Σ exp(logits): (M, V) → (B, L), 0 off `tokens`.

    >>> token_logprobs(torch.zeros(1, 4), torch.tensor([[3, 1]]), torch.tensor([[False, True]]))
    tensor([[ 0.0000, -1.3863]])
    """
    chosen = logits.gather(1, ids[tokens][:, None])[:, 0]  # (M,)
    return spread(chosen - logits.logsumexp(1), tokens)


def spread(values, tokens):
    """Values (M,) to the M places of a mask (B, L), 0 elsewhere."""
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
    all_equal = (groups == groups[:, :1]).all(1, keepdim=True)
    return advantages.masked_fill(all_equal, 0.0).view(-1)


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

# The keys of what `update` adds up; always all, so that lines of metrics.jsonl have the same ones.
STATISTICS = ("policy_loss", "kl", "updated_share")
STATISTICS += tuple(f"clip_ratio/{name}_mean" for name in ("low", "high", "dual"))
COUNTS = ("optimizer_steps", "skipped_steps", "nonfinite_steps", "masked_tokens")


@torch.enable_grad()  # also where a user's reward has turned gradients off
def update(policy, optimizer, rollout, tokens, args):
    """One pass over the mini-batches of a rollout batch, which updates `tokens` (B, L).

    A mini-batch is one optimizer step. N is the number of its response tokens (with STAPO or 80/20:
    of those they keep), low and high ones together, whatever the micro-batches. A mini-batch whose
    gradient is 0 is skipped, because Adam would move the weights all the same. Returns sums over
    the mini-batches: STATISTICS (those of `policy_loss`), the gradient's norm and COUNTS.
    """
    rollout = replace(rollout, tokens=tokens)
    totals = Counter(dict.fromkeys((*STATISTICS, "grad_norm", *COUNTS), 0))
    for indices in torch.arange(len(tokens)).split(args.mini_batch_size or len(tokens)):
        batch = rollout.rows(indices)
        batch.mask = tokens_to_keep(policy, batch, args)  # section 8
        batch.tokens = batch.tokens & batch.mask
        normalizer = batch.mask.sum()  # N
        has_gradient = batch.tokens.any(1)  # (rows of the mini-batch,)
        if not args.kl_coef:
            has_gradient &= batch.advantages.any(1)
        sums = Counter()
        rows_to_read = has_gradient.nonzero().flatten().tolist()
        for rows in micro_batches(rows_to_read, batch.lengths, args.tokens_per_microbatch):
            part = batch.rows(rows)
            with mixed_precision(policy, args):
                logits = token_logits(policy, part.ids, part.tokens, args.temperature, args.min_p)
            loss, statistics = policy_loss(
                token_logprobs(logits, part.ids, part.tokens),
                part.old_logprobs,
                part.advantages,
                part.mask,
                tokens=part.tokens,
                ref_logprobs=part.ref_logprobs,
                clip_low=args.clip_low,
                clip_high=args.clip_high,
                clip_dual=args.clip_dual,
                kl_coef=args.kl_coef,
                normalizer=normalizer,
            )
            loss.backward()
            sums.update(statistics)  # a Counter adds
        norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm))
        totals["masked_tokens"] += int(rollout.mask[indices].sum() - normalizer)
        if norm == 0:
            totals.update(sums, skipped_steps=1)
        elif math.isfinite(norm):
            optimizer.step()
            totals.update(sums, grad_norm=norm, optimizer_steps=1)
        else:  # what is infinite or not a number must not reach the weights
            totals["nonfinite_steps"] += 1
        optimizer.zero_grad()
    return totals


def policy_loss(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    *,
    tokens=None,
    ref_logprobs=None,
    clip_low=0.2,
    clip_high=0.24,
    clip_dual=10.0,
    kl_coef=0.001,
    normalizer=None,
):
    """The clipped policy-gradient loss of Eq. 1, and a dictionary of statistics about it.

        loss = 1/N Σ_t { -min(r Â, clip(r, 1-ε_l, 1+ε_h) Â) + β·k3 },   r = π_θ / π_old

    summed over `tokens`, by default all of `mask`, and divided by N = `normalizer`, by default the
    number of tokens in `mask`: N counts all, also where only one group is updated. Where Â < 0 a
    token's loss is capped at -c·Â (the dual clip). No KL without `ref_logprobs` or with β = 0. A
    token that π_θ or π_old cannot sample (log π = −∞) is left out.

    All tensors are (B, L). Every statistic is a sum over the updated tokens divided by N, so that
    micro-batches given the same N add up to their mini-batch, and Lopti's passes to the whole.
    """
    normalizer = mask.sum() if normalizer is None else normalizer
    tokens = mask if tokens is None else mask & tokens
    tokens = tokens & (logprobs != -math.inf) & (old_logprobs != -math.inf)
    logprobs = logprobs.masked_fill(~tokens, 0.0)  # so that −∞ minus −∞ makes no NaN
    ratio = (logprobs - old_logprobs.masked_fill(~tokens, 0.0)).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    dual = -advantages * clip_dual  # where Â < 0, a bound from above on the loss
    pessimistic = torch.maximum(unclipped, clipped)  # maximum of losses: minimum of objectives
    token_loss = torch.where(advantages < 0, torch.minimum(pessimistic, dual), pessimistic)
    kl = torch.zeros_like(ratio)
    if ref_logprobs is not None and kl_coef:
        kl = kl_estimate(logprobs, ref_logprobs)
    share = tokens.to(ratio) / normalizer  # of the mean
    loss = ((token_loss + kl_coef * kl) * share).sum()
    with torch.no_grad():
        clipped_off = clipped > unclipped  # no policy gradient is left of it; the KL's stays
        statistics = {
            "policy_loss": token_loss,
            "kl": kl,
            "updated_share": torch.ones_like(ratio),
            "clip_ratio/low_mean": clipped_off & (advantages < 0),  # TRL's names: low is 1-ε_l
            "clip_ratio/high_mean": clipped_off & (advantages > 0),
            "clip_ratio/dual_mean": (advantages < 0) & (pessimistic > dual),
        }
        return loss, {name: float((value * share).sum()) for name, value in statistics.items()}


def kl_estimate(logprobs, ref_logprobs):
    """k3 of KL(π_θ‖π_ref) per token: e^d - d - 1 with d = log π_ref - log π_θ. (B, L) → (B, L)

    An estimate from one sampled token that is never negative, and 0 where the two agree. Clamped as
    in the published code; a token with π_ref = 0 (log −∞) is at the clamp and has no gradient.

    >>> kl_estimate(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.5, 0.25]).log())
    tensor([0.0000, 0.1931])
    """
    difference = (ref_logprobs - logprobs).clamp(-5, 5)
    return (difference.exp() - difference - 1).clamp(-10, 10)


def micro_batches(indices, lengths, size):
    """Cut rows into lists of similar length: one row, or at most `size` tokens with padding."""
    lengths = lengths.tolist()
    batches = []
    for index in sorted(indices, key=lengths.__getitem__):
        if not batches or (len(batches[-1]) + 1) * lengths[index] > size:
            batches.append([])
        batches[-1].append(index)
    return batches


def mixed_precision(model, args):
    """Forward passes in bfloat16 where --dtype says so; weights and gradients stay float32."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")


# 8. Later methods (STAPO, 80/20, safe vocabulary), and REINFORCE++ of the published code ----------


def tokens_to_keep(policy, batch, args):
    """The response tokens (B, L) of a mini-batch that STAPO and 80/20 leave to the update.

    They go by the current policy, and their quantiles by the whole mini-batch: hence a forward
    pass of its own, without which the result would depend on the micro-batch size.
    """
    kept = batch.mask
    if args.stapo or args.top_entropy:
        logprobs, entropies = score(policy, batch, args)
    if args.stapo:
        kept = kept & stapo_mask(logprobs, entropies, batch.advantages, batch.mask)
    if args.top_entropy:
        kept = kept & entropy_mask(entropies, batch.mask, args.top_entropy)
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
    if (values == values[0]).all():
        return torch.zeros_like(rewards)[:, None] * mask
    return (rewards[:, None] - values.mean()) / (values.var() + 1e-8).sqrt() * mask


# 9. The training loop -----------------------------------------------------------------------------


def train(args):
    """A run, from its beginning or with --resume from its checkpoint, to its report."""
    policy, tokenizer, train_rows, eval_rows = prepare(args)
    torch.manual_seed(args.seed)
    reference = make_reference(policy, args)  # before a checkpoint is loaded
    optimizer = make_optimizer(policy, args)
    name = args.name or args.task + time.strftime("-%Y%m%d-%H%M%S-") + str(os.getpid())
    folder = Path(args.resume or Path(args.output) / name)
    with user_errors(f"cannot make {folder}: --resume it or choose another --name"):
        folder.mkdir(parents=True, exist_ok=bool(args.resume))
    lock = (folder / ".lock").open("w")
    if os.name == "posix":
        import fcntl

        with user_errors(f"another process is at work in {folder}"):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    saved, log = load_checkpoint(folder, policy, optimizer)  # the last step, and all lines so far
    last = max(args.steps, saved)
    config = {**vars(args), "torch": torch.__version__, "transformers": transformers.__version__}
    with replaced_at_once(folder / "config.json") as path:
        path.write_text(json.dumps(config, indent=2))
    steps = f"Steps {saved + 1} to {last}" if saved < last else f"All {last} steps are done"
    print(f"{steps} on {policy.device}, into {folder}")
    batches = prompt_stream(train_rows, args.prompts_per_step, args.seed, skip=saved)
    progress = tqdm(range(saved, last + 1), desc="training", disable=None)
    try:
        for step in progress:
            if step > saved:  # else it is only evaluated, if that is due
                batch = next(batches)
                models = policy, reference, optimizer, tokenizer
                metrics, responses = training_step(*models, batch, args)
                add_line(folder, log, "metrics", {"step": step, **metrics})
                for row, (text, reward) in zip(batch[:2], responses[:: args.group_size]):
                    sample = {"prompt": row["prompt"], "response": text, "reward": reward}
                    add_line(folder, log, "samples", {"step": step, **sample})
                if metrics["nonfinite_steps"]:
                    tqdm.write(f"step {step}: left out an update whose gradient was not finite")
                progress.set_postfix(reward=metrics["reward"], accuracy=metrics["accuracy"])
                if args.save_every and (step % args.save_every == 0 or step == last):
                    save_checkpoint(folder, step, log, policy, optimizer)
                    saved = step
            due = step in (0, last) or (args.eval_every and step % args.eval_every == 0)
            if due and step not in [line["step"] for line in log["evaluations"]]:
                table, answers = evaluate(policy, tokenizer, eval_rows, args)
                line = {"step": step, "table": table, "greedy": [each[0] for each in answers]}
                add_line(folder, log, "evaluations", line)
        with replaced_at_once(folder / "final") as path:
            policy.save_pretrained(path)
            tokenizer.save_pretrained(path)
        report(log, eval_rows, args)
        print(f"\n{folder} holds metrics.jsonl, samples.jsonl, evaluations.jsonl, final/.")
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"--resume {folder} goes on after step {saved}") from stop
    finally:
        lock.close()


# 10. Evaluation -----------------------------------------------------------------------------------


def evaluate(policy, tokenizer, rows, args):
    """Answer held-out rows once greedily, then k times at T = 1: the `tally` and the answers.

    The answers are (response, reward) pairs for each row, the greedy one first. The seed is always
    the same, and the training's own random state is left alone.
    """
    k = args.eval_samples
    device = policy.device
    prompts = [row["prompt"] for row in rows]
    answers = [[] for _ in rows]
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        torch.manual_seed(args.seed + 1)
        for group_size, temperature in [(1, 0), (k, 1.0)] if k else [(1, 0)]:
            texts = sample(policy, tokenizer, prompts, group_size, temperature, args).texts
            rewards = compute_rewards(texts, [row for row in rows for _ in range(group_size)], args)
            for i, answer in enumerate(zip(texts, rewards)):
                answers[i // group_size].append(answer)
    return tally(rows, answers, args.solved_reward), answers


def report(log, rows, args):
    """Print what came of a run: accuracy, a prompt that it learned, unlikely tokens, gradients."""
    before, after = log["evaluations"][0], log["evaluations"][-1]
    print(f"\nHeld-out accuracy before and after {after['step']} steps, with 95 % intervals\n")
    print(TASKS[args.task].table_text({"before": before["table"], "after": after["table"]}))
    learned = [  # greedy answers that became right
        (row["asked"], old_text, text)
        for row, (old_text, was), (text, now) in zip(rows, before["greedy"], after["greedy"])
        if was < args.solved_reward <= now
    ]
    for asked, *texts in sorted(learned, key=lambda each: len(each[0]))[:1]:  # the shortest
        print(f"\nA prompt that it has learned to answer:\n{textwrap.fill(asked, 99)}")
        for title, text in zip(("before:", "after: "), texts):
            print(title, " ".join(text.rpartition("</think>")[2].split())[:300])
    if steps := log["metrics"]:
        blocks = "".join("▁▂▃▄▅▆▇█"[round(7 * step["accuracy"])] for step in steps)
        print(f"\nAccuracy in training, a bar for each step: {blocks}\nFirst step and last:")
        for name in ("accuracy", "low_probability_share", "grad_norm/low", "grad_norm/high"):
            if name in steps[0]:
                print(f"{name:<24}{steps[0][name]:.2f} → {steps[-1][name]:.2f}")


# 11. Metrics and files ----------------------------------------------------------------------------


def step_metrics(rollout, rewards, entropies, totals, clock, args):
    """One line of metrics.jsonl, with TRL's names where TRL has one. `totals`: {pass: sums}."""
    mask = rollout.mask
    lengths = mask.sum(1).float()
    count = int(mask.sum())
    groups = rewards.view(-1, args.group_size)
    low, _ = split_tokens(rollout.old_logprobs, mask, args.eta or 0.5)  # the paper's η
    metrics = {
        "reward": rewards.mean(),
        "reward_std": groups.std(1, correction=min(1, args.group_size - 1)).mean(),
        "frac_reward_zero_std": (groups == groups[:, :1]).all(1).float().mean(),
        "accuracy": (rewards >= args.solved_reward).float().mean(),
        "completions/mean_length": lengths.mean(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": rollout.truncated.float().mean(),
        "entropy": entropies.sum() / count,
        "low_probability_share": low.sum() / count,
        "rollout/kl": 0.0,  # of the policy that sampled to the starting one
        "rollout/tokens": count,
    }
    if rollout.ref_logprobs is not None:
        inside = mask & (rollout.old_logprobs != -math.inf)
        kl = kl_estimate(rollout.old_logprobs[inside], rollout.ref_logprobs[inside])
        metrics["rollout/kl"] = kl.sum() / count
    metrics = Counter({name: float(value) for name, value in metrics.items()})
    for kind, sums in totals.items():
        for name in STATISTICS:  # means over the mini-batches; Lopti's two passes add up
            metrics[name] += sums[name] / max(1, sums["optimizer_steps"] + sums["skipped_steps"])
        metrics[f"grad_norm/{kind}"] = sums["grad_norm"] / max(1, sums["optimizer_steps"])
        for name in COUNTS:
            metrics[name] += sums[name]
    metrics["masked_share"] = metrics["masked_tokens"] / (len(totals) * args.passes * count)
    phases = ("sampling", "rewarding", "scoring", "updating")
    for phase, begin, end in zip(phases, clock, clock[1:]):
        metrics[f"seconds/{phase}"] = round(end - begin, 4)
    return dict(metrics)


@contextmanager
def replaced_at_once(path):
    """Write a file or folder beside `path`, and move it there when it is complete."""
    partial = path.with_name(f".{path.name}.partial")
    with user_errors(f"cannot write {path}; --resume goes on"):  # a full disk, say
        yield partial
        if path.is_dir():
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
        with replaced_at_once(folder / f"{name}.jsonl") as path:
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return state["step"], state["log"]


def add_line(folder, log, name, line):
    """One more line of a jsonl file."""
    log[name].append(line)
    with (folder / f"{name}.jsonl").open("a") as stream:
        stream.write(json.dumps(line) + "\n")


# 12. The model ------------------------------------------------------------------------------------


def prepare(args):
    """The model on its device, its tokenizer, training and evaluation rows."""
    device = args.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    policy, tokenizer = load_model(args.model, device)
    if args.gradient_checkpointing:
        checkpoint_layers(policy)
    train_rows, eval_rows = load_data(args, tokenizer)
    check_model(policy, tokenizer, train_rows + eval_rows, args)
    return policy, tokenizer, train_rows, eval_rows


def load_model(name, device):
    """Model (weights in float32, in evaluation mode) and tokenizer of a folder or a hub name."""
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
    for layer in model.modules():  # HF's own switch works in training mode only: with dropout
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def check_model(model, tokenizer, rows, args):
    """UserError where prompts and responses do not fit the model, or π is not what was sampled.

    Each token of two responses, one to a padded prompt, must be drawn from what it is scored with.
    """
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or math.inf
    ropes = getattr(config, "rope_parameters", None) or {}  # one, or one for each kind of layer
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
            # Past this length a row's log-probabilities would depend on the longest row beside it.
            limit = min(limit, rope.get("original_max_position_embeddings", limit))
    ids = tokenizer([row["prompt"] for row in rows], add_special_tokens=False)["input_ids"]
    if max(map(len, ids)) + args.max_new_tokens > limit > 0:  # some models say -1: no limit
        raise UserError(f"responses may pass {limit} positions: lower --max-new-tokens")
    words = model.get_input_embeddings().num_embeddings
    largest = max(max(prompt, default=0) for prompt in ids)
    if largest >= words:
        raise UserError(f"the model has {words} embeddings, none for token {largest} of a prompt")
    text = 2 * tokenizer.decode(ids[0][:8])
    drawn = []
    size = min(STRETCH + 4, args.max_new_tokens)
    few = argparse.Namespace(**vars(args) | {"max_new_tokens": size})
    with user_errors(f"{args.model} cannot be trained"), tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)  # what cannot be saved is told before training
        with model.register_forward_hook(lambda *call: drawn.append(call[2].logits[:, -1])):
            rollout = sample(model, tokenizer, [text, 2 * text], 1, 0, few, end_ids=[])
        drawn = torch.stack(drawn, 1).flatten(0, 1).float()  # (new tokens of both, V)
        with torch.no_grad(), mixed_precision(model, args):
            scored = token_logits(model, rollout.ids, rollout.mask, 1.0)
        difference = float((drawn - scored).abs().max())
        rounding = 1e-3 if args.dtype == "float32" else 0.05 * float(scored.abs().max())
        if not difference < rounding:  # or it is not a number
            raise ValueError(f"π is not what was sampled: its logits differ by {difference:.2g}")


def make_reference(policy, args):
    """π_ref, the policy as it starts, without gradients; None where β = 0."""
    return copy.deepcopy(policy).requires_grad_(False) if args.kl_coef else None


def make_optimizer(policy, args):
    rate, decay = args.learning_rate, args.weight_decay
    return torch.optim.AdamW(policy.parameters(), lr=rate, weight_decay=decay, fused=True)


# 13. Flags and main -------------------------------------------------------------------------------


def within(kind, low, high=math.inf):
    """A type for argparse: an int or float from `low` to `high`."""

    def number(text):  # argparse says "invalid number value" by this name
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must lie between {low} and {high}, not {text}")
        return value

    return number


def build_parser():
    share, not_negative = within(float, 0, 1), within(float, 0, 1e9)
    count, at_least_1 = within(int, 0, 10**9), within(int, 1, 10**9)
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,  # so that errors are one sentence
        description=__doc__.split("\n\n")[0],
        epilog="@FILE stands for the flags in it: data/kk.flags, data/math.flags are the paper's.",
        fromfile_prefix_chars="@",
    )
    parser.convert_arg_line_to_args = lambda line: line.partition("#")[0].split()
    parser.set_defaults(weight_decay=0.01, max_grad_norm=1.0, clip_dual=10.0)  # without a flag

    def add(name, help, default=None, **options):
        if default is not None and default is not False and default != "":
            help += " (default: %(default)s)"
        group.add_argument(name, help=help, default=default, **options)

    group = parser.add_argument_group("method")
    add("--advantage", "by group or by batch", "grpo", choices=("grpo", "reinforce++"))
    add("--alpha", "α of Advantage Reweighting, Eq. 4", 0.0, type=share)
    add("--eta", "η of Lopti: π < η is updated first", 0.0, type=share)
    add("--order", "Lopti's passes", "low-high", choices=("low-high", "high-low", "low", "high"))
    add("--passes", "how often to go over a rollout batch", 1, type=at_least_1)
    add("--stapo", "leave out STAPO's spurious tokens", False, action="store_true")
    add("--top-entropy", "ρ of 80/20, the share kept; the paper: 0.2; 0: off", 0.0, type=share)
    add("--min-p", "ρ of the safe vocabulary; e^-13 is 2.3e-6; 0: off", 0.0, type=share)
    add("--clip-low", "ε_l: the ratio is clipped at 1-ε_l", 0.2, type=not_negative)
    add("--clip-high", "ε_h: the ratio is clipped at 1+ε_h", 0.24, type=not_negative)
    add("--kl-coef", "β; at 0 no reference model is needed", 0.001, type=not_negative)
    group = parser.add_argument_group("sampling")
    add("--prompts-per-step", "prompts in a rollout batch (math: 64)", 16, type=at_least_1)
    add("--group-size", "G: responses to each prompt", 8, type=at_least_1)
    add("--temperature", "T_s, of sampling and every π", 1.0, type=within(float, 0.01, 100))
    add("--max-prompt-length", "longer prompts are dropped", 400, type=at_least_1)
    add("--max-new-tokens", "longest response, in tokens", 256, type=at_least_1)
    add("--sample-batch-size", "responses at a time (math: 512); 0: all", 256, type=count)
    group = parser.add_argument_group("optimisation")
    add("--learning-rate", "of AdamW, constant", 1e-4, type=within(float, 1e-12, 1))
    add("--mini-batch-size", "responses in an optimizer step (math: 256); 0: all", 64, type=count)
    add("--tokens-per-microbatch", "changes memory and speed only", 2048, type=at_least_1)
    add("--gradient-checkpointing", "less memory, a third more time", False, action="store_true")
    add("--steps", "training steps (rollout batches)", 24, type=count)
    group = parser.add_argument_group("model and data")
    add("--task", "Knights and Knaves, or math with \\boxed{}", "kk", choices=TASKS)
    add("--model", "folder or hub name of a causal model", str(HERE / "data" / "tiny"))
    add("--data", "jsonl, json, csv, parquet or hub name:configuration:split; else our own rows")
    add("--eval-data", "in the same forms; without it a tenth of --data, or our own rows")
    add("--reward", "your own, f(completions, solution, **columns)", metavar="MODULE:FUNCTION")
    add("--solved-reward", "a response is right from this reward on", type=within(float, -1e9, 1e9))
    add("--people", "kk: sizes of puzzles", [2, 3], type=int, nargs="+")
    add("--dtype", "of forward passes", "float32", choices=("float32", "bfloat16"))
    add("--device", "auto: cuda or cpu; mps is untried", "auto")
    group = parser.add_argument_group("evaluation and run folder")
    add("--eval-every", "steps; 0: before and after training only", 0, type=count)
    add("--eval-size", "evaluation prompts per difficulty; 0: all", 100, type=count)
    add("--eval-samples", "k of avg@k and pass@k, at T = 1; 0: greedy only", 4, type=count)
    add("--eval-only", "evaluate the model and stop", False, action="store_true")
    add("--show", "with --eval-only: print so many prompts, answered", 0, type=count)
    add("--save-every", "steps; 0: no checkpoint", 10, type=count)
    add("--resume", "go on with a run, by its own settings", "", metavar="runs/NAME")
    add("--name", "of the run folder; a new one otherwise", "")
    add("--output", "where run folders are made", "runs")
    add("--seed", "of everything random", 0, type=within(int, 0, 2**32 - 1))
    return parser


def parse_arguments(argv=None):
    """Defaults, then those of the task or of the run to resume, then flags: the later wins."""
    parser = build_parser()
    settings = vars(parser.parse_args([]))
    flags = vars(parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(settings))))
    flags = {name: value for name, value in flags.items() if value is not None}
    if flags.get("task") == "math":
        settings |= {"prompts_per_step": 64, "mini_batch_size": 256, "sample_batch_size": 512}
    if "resume" in flags:
        with user_errors(f"--resume {flags['resume']}: name the folder of a run, runs/NAME"):
            config = json.loads((Path(flags["resume"]) / "config.json").read_text())
            settings = {name: config[name] for name in settings}
        free = {"resume", "steps", "eval_every", "save_every", "device", "sample_batch_size"}
        free |= {"tokens_per_microbatch", "gradient_checkpointing"}
        if refused := ", ".join(flags.keys() - free):
            parser.error(f"--resume cannot change {refused}: start a new run for that")
    args = argparse.Namespace(**{**settings, **flags})
    if args.reward and args.solved_reward is None:
        parser.error("--reward needs --solved-reward: from which reward on is a response right?")
    if args.solved_reward is None:
        args.solved_reward = TASKS[args.task].solved
    if args.order != "low-high" and not args.eta:
        parser.error("--order needs --eta above 0 to tell low from high")
    if args.group_size < 2 and args.advantage == "grpo":
        parser.error("--group-size must be at least 2: GRPO compares responses within a group")
    return args


def run_command(args):
    """Train; or print the accuracy of a model and, spread over the difficulties, some answers."""
    if not args.eval_only:
        return train(args)
    policy, tokenizer, _, rows = prepare(args)
    table, answers = evaluate(policy, tokenizer, rows, args)
    for i in range(0, len(rows), max(1, len(rows) // max(1, args.show)))[: args.show]:
        print(f"\n--- {rows[i]['prompt']}\nsolution: {rows[i]['solution']}")
        for sampled, (text, reward) in enumerate(answers[i]):
            print(f"\n[{f'sample {sampled}' if sampled else 'greedy'}, reward {reward:g}]\n{text}")
    print("\n" + TASKS[args.task].table_text({"": table}))


def exit_code(program, name):
    """Run a program: 0; 2 after one sentence about what its user can mend; 130 after Ctrl-C."""
    try:
        program()
        return 0
    except KeyboardInterrupt as stop:
        code, told = 130, f"stopped. {stop}"
    except torch.OutOfMemoryError:
        code, told = 2, "out of memory: lower --tokens-per-microbatch or --sample-batch-size"
    except (UserError, OSError) as error:  # OSError: a disk that is full or read-only
        code, told = 2, error
    print(f"{name}: {told}", file=sys.stderr)
    return code


def main(argv=None):
    return exit_code(lambda: run_command(parse_arguments(argv)), "lopti.py")


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # where the terminal has no α
    sys.exit(main())
