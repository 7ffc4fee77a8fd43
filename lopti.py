"""lopti: Advantage Reweighting and Low-Probability Token Isolation for GRPO, in one file.

    python lopti.py                             # plain GRPO on the bundled policy: minutes on a laptop, no GPU
    python lopti.py --alpha 0.3 --eta 0.5       # the paper's two cures: Advantage Reweighting (α) and Lopti (η)
    python lopti.py --task math --eta 0.5       # the same loop on arithmetic
    python lopti.py --preset kk --alpha 0.3 --eta 0.5     # the paper's own setting: Qwen2.5-3B-Instruct, one large GPU

Read it beside "Do Not Let Low-Probability Tokens Over-Dominate in RL for LLMs" (arXiv 2505.12929). The functions
come in the order in which a training step calls them; `train` puts them together and reads like the algorithm.
The later treatments of the same problem follow, and after them the plumbing: arguments, data, evaluation, run folder.

What it leaves out: many GPUs, inference servers, value functions, multi-turn chats.

Shapes: B responses (prompts x group size), P prompt tokens, T response tokens, V words of the vocabulary.
Log-probabilities and probabilities are float32 (float64 from a policy in float64); a mask is boolean, True where a
token counts.
"""

import argparse
import copy
import functools
import importlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from jinja2 import TemplateError  # what chat templates raise; torch brings it
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer

from rewards import extract_boxed, kk_reward, math_reward

transformers.utils.logging.disable_progress_bar()  # ours is enough

# ======================================================================================================
# 1. Sampling: o_i ~ π_old(· | q), G responses to each prompt
# ======================================================================================================


@dataclass
class Rollout:
    """A batch of sampled responses: prompts padded on the left, responses on the right."""

    prompt_ids: torch.Tensor  # (B, P)
    prompt_mask: torch.Tensor  # (B, P) True on the prompt, False on its padding
    response_ids: torch.Tensor  # (B, T) the ids that were sampled; never re-tokenised text
    mask: torch.Tensor  # (B, T) True up to and including the end-of-sequence token
    truncated: torch.Tensor  # (B,) True where the length limit came before an end-of-sequence token
    texts: list  # B strings: the responses without padding and end of sequence, tags and all
    old_logprobs: torch.Tensor = None  # (B, T) log π_old, of the policy that sampled; 0 on padding
    ref_logprobs: torch.Tensor = (
        None  # (B, T) log π_ref, of the policy before training; None where β = 0
    )
    advantages: torch.Tensor = None  # (B, T) Â

    def lengths(self):
        """(B,) how many tokens of prompt and response each row holds."""
        return self.prompt_mask.sum(1) + self.mask.sum(1)

    def part(self, rows):
        """Some rows, with the padding that all of them share cut away."""
        prompt = slice(self.prompt_ids.shape[1] - int(self.prompt_mask[rows].sum(1).max()), None)
        response = slice(0, int(self.mask[rows].sum(1).max()))
        per_token = (
            self.response_ids,
            self.mask,
            self.old_logprobs,
            self.ref_logprobs,
            self.advantages,
        )
        response_ids, mask, *rest = (
            None if values is None else values[rows, response] for values in per_token
        )
        prompt_ids, prompt_mask = self.prompt_ids[rows, prompt], self.prompt_mask[rows, prompt]
        return Rollout(
            prompt_ids,
            prompt_mask,
            response_ids,
            mask,
            self.truncated[rows],
            [self.texts[row] for row in rows],
            *rest,
        )


def end_token_ids(model, tokenizer):
    """Every id that ends a response: a model may have several (Qwen2.5-Instruct has two).

    They stand in the model's generation settings, in its configuration and in the tokenizer.
    """
    places = (model.generation_config, model.config, model.config.get_text_config(), tokenizer)
    found = [getattr(place, "eos_token_id", None) for place in places]
    return sorted(
        {
            i
            for ids in found
            if ids is not None
            for i in (ids if isinstance(ids, (list, tuple)) else [ids])
        }
    )


@torch.no_grad()
def sample(
    model, tokenizer, prompts, *, group_size, max_new_tokens, temperature, min_p=0.0, batch_size=0
):
    """Sample `group_size` responses to each prompt text with HF `generate`; temperature 0 means greedy decoding.

    `min_p` > 0 samples from the safe vocabulary of `safe_vocabulary` only. Returns a Rollout whose rows
    g·G … g·G+G-1 answer prompt g. `batch_size` > 0 samples so many rows at a time.
    """
    if tokenizer.pad_token_id is None:
        raise ValueError(
            "the tokenizer needs a pad token; set tokenizer.pad_token = tokenizer.eos_token"
        )
    end_ids, pad_id = end_token_ids(model, tokenizer), tokenizer.pad_token_id
    # Every knob is set here, and the model's own generation settings are put aside while we sample: Qwen ships
    # top_k 20, top_p 0.8 and a repetition penalty, and with those the samples would not come from the π we score.
    settings = {"do_sample": False}
    if temperature:
        settings = {
            "do_sample": True,
            "temperature": temperature,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": min_p or None,
        }
    settings = GenerationConfig(
        **settings, num_beams=1, repetition_penalty=1.0, no_repeat_ngram_size=0, max_new_tokens=max_new_tokens,
        eos_token_id=end_ids, pad_token_id=pad_id, use_cache=True,
    )  # fmt: skip
    encoded = tokenizer(
        prompts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
    )
    prompt_ids, prompt_mask = (
        encoded["input_ids"].to(model.device),
        encoded["attention_mask"].to(model.device),
    )
    model.eval()  # no dropout: the policy that samples is the policy that is scored
    own_settings, model.generation_config = model.generation_config, settings
    try:
        size = max(1, (batch_size or group_size * len(prompts)) // group_size)  # prompts at a time
        parts = [
            generate_groups(model, *part, group_size, settings)
            for part in zip(prompt_ids.split(size), prompt_mask.split(size))
        ]
    finally:
        model.generation_config = own_settings
    length = max(part.shape[1] for part in parts)
    response_ids = torch.cat(
        [torch.nn.functional.pad(part, (0, length - part.shape[1]), value=pad_id) for part in parts]
    )
    mask, truncated = response_mask(response_ids, end_ids)
    decoded = [
        tokenizer.decode(strip_end(ids[kept], end_ids), skip_special_tokens=False)
        for ids, kept in zip(response_ids, mask)
    ]
    prompt_ids, prompt_mask = (
        part.repeat_interleave(group_size, 0) for part in (prompt_ids, prompt_mask)
    )  # (B, P)
    return Rollout(prompt_ids, prompt_mask.bool(), response_ids, mask, truncated, decoded)


def response_mask(response_ids, end_ids):
    """Which sampled tokens belong to the response: all up to and including the first end-of-sequence token.

    Going by the ids of the end, not by the padding id, keeps the end token where both are the same. Returns the
    mask (B, T) and truncated (B,), True where no end token was sampled.

    >>> response_mask(torch.tensor([[5, 2, 2], [5, 6, 7]]), end_ids=[2])
    (tensor([[ True,  True, False],
            [ True,  True,  True]]), tensor([False,  True]))
    """
    is_end = torch.isin(response_ids, torch.tensor(end_ids, device=response_ids.device))  # (B, T)
    return is_end.cumsum(1) - is_end.long() == 0, ~is_end.any(1)


def strip_end(ids, end_ids):
    """A response's ids without a closing end-of-sequence token."""
    return ids[:-1] if len(ids) and int(ids[-1]) in end_ids else ids


# ======================================================================================================
# 2. Log-probabilities: log π(o_t | q, o_<t) at the sampling temperature
# ======================================================================================================


class TokenScores(NamedTuple):
    """What a policy says about tokens of a rollout, each (B, T) and 0 or False for other tokens and padding."""

    logprobs: torch.Tensor  # log π(o_t | q, o_<t), float32
    entropies: (
        torch.Tensor
    )  # H of π(· | q, o_<t) in nats, without a gradient; None where not asked for
    safe: torch.Tensor  # True where the token is in the safe vocabulary; everywhere with min_p = 0


def token_logprobs(model, rollout, temperature, min_p=0.0, with_entropy=True, tokens=None):
    """log π(o_t | q, o_<t) = log_softmax(logits / temperature) at the sampled token; returns TokenScores.

    The temperature is the one of sampling, because the π of Eqs. 1 and 4 is the distribution that the tokens were
    drawn from. With `min_p` > 0 the softmax goes over the safe vocabulary only. Logits are made for `tokens` (B, T),
    by default all of the response, so that Lopti's two stages make each token's once.
    """
    tokens = rollout.mask if tokens is None else tokens
    states, to_logits = response_states(
        model, rollout
    )  # (number of response tokens, hidden size), without padding
    states = states[tokens[rollout.mask]]  # (N, hidden size)

    def of(states, ids):  # n of them at a time
        logits = to_logits(states)  # (n, V)
        logits = (
            logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        )  # bfloat16 is too coarse for them
        safe = torch.ones_like(ids, dtype=torch.bool)  # (n,)
        if min_p:
            in_vocabulary = safe_vocabulary(logits, min_p)  # (n, V)
            safe = in_vocabulary.gather(-1, ids[:, None]).squeeze(-1)
            logits = logits.masked_fill(
                ~in_vocabulary, torch.finfo(logits.dtype).min
            )  # probability 0
        logprobs = (logits.gather(-1, ids[:, None]).squeeze(-1) - logits.logsumexp(-1)).masked_fill(
            ~safe, 0.0
        )
        return (
            logprobs,
            entropy(logits.detach()) if with_entropy else torch.zeros_like(logprobs),
            safe,
        )

    found = in_chunks(
        of,
        states,
        rollout.response_ids[tokens],
        vocabulary_size=model.config.get_text_config().vocab_size,
    )
    logprobs, entropies, safe = (
        torch.zeros(tokens.shape, dtype=part.dtype, device=part.device).masked_scatter(tokens, part)
        for part in found
    )
    return TokenScores(logprobs, entropies if with_entropy else None, safe)


def entropy(logits):
    """H = log Z - Σ π·logit in nats: (..., V) → (...). In chunks of positions, so that no second copy of the logits is made.

    >>> entropy(torch.zeros(1, 4))  # log 4
    tensor([1.3863])
    """
    positions = logits.reshape(-1, logits.shape[-1])
    chunks = positions.split(max(1, 2**22 // logits.shape[-1]))
    found = [chunk.logsumexp(-1) - (chunk.softmax(-1) * chunk).sum(-1) for chunk in chunks]
    return torch.cat(found).view(logits.shape[:-1])


def micro_batches(rows, lengths, tokens):
    """Cut rows into lists of similar length, each of at most `tokens` tokens with its padding (but never empty)."""
    batches = []
    for row in sorted(rows, key=lambda row: int(lengths[row])):
        if not batches or (len(batches[-1]) + 1) * int(lengths[row]) > tokens:
            batches.append([])
        batches[-1].append(row)
    return batches


@torch.no_grad()
def score(model, rollout, temperature, tokens_per_microbatch, min_p=0.0, with_entropy=True):
    """token_logprobs of a whole rollout, a micro-batch at a time and without gradients."""
    dtype = torch.promote_types(model.dtype, torch.float32)
    logprobs = torch.zeros(rollout.mask.shape, dtype=dtype, device=rollout.mask.device)  # (B, T)
    scores = TokenScores(
        logprobs, logprobs.clone() if with_entropy else None, torch.zeros_like(rollout.mask)
    )
    for rows in micro_batches(range(len(rollout.mask)), rollout.lengths(), tokens_per_microbatch):
        part = rollout.part(rows)
        for whole, found in zip(
            scores, token_logprobs(model, part, temperature, min_p, with_entropy)
        ):
            if whole is not None:
                whole[rows, : part.mask.shape[1]] = found
    return scores


# ======================================================================================================
# 3. Advantages: how much better than its group is a response? (Eq. 1) and Advantage Reweighting (Eq. 4)
# ======================================================================================================


def group_advantages(rewards, group_size):
    """Â_i = (R_i - mean of the group) / (standard deviation of the group + 1e-6), Eq. 1. (B,) → (B,)

    The deviation is the sample's (divided by G-1). A group whose rewards are all equal gets exactly 0: there
    rounding noise over a tiny deviation would otherwise become advantages of order one.

    >>> group_advantages(torch.tensor([1., 0., 0., 1., 3., 3.]), group_size=2)
    tensor([ 0.7071, -0.7071, -0.7071,  0.7071,  0.0000,  0.0000])
    """
    if group_size < 2:
        raise ValueError(
            "group_size must be at least 2: the advantage of a response is relative to its group"
        )
    groups = rewards.view(-1, group_size)  # (B/G, G)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    all_equal = (groups == groups[:, :1]).all(1, keepdim=True)
    return advantages.masked_fill(all_equal, 0.0).view(-1)


def reweight_advantages(advantages, old_logprobs, alpha):
    """Â ← [α·π + (1-α)]·Â with π = exp(old_logprobs), Eq. 4. (B, T) → (B, T)

    A token's gradient grows with 1-π; the weight grows with π from 1-α to 1 and so takes from the unlikely ones.
    Positive and negative advantages alike. α = 0 changes nothing, to the last bit.

    >>> reweight_advantages(torch.ones(1, 3), torch.tensor([[0.01, 0.5, 1.0]]).log(), alpha=0.3)
    tensor([[0.7030, 0.8500, 1.0000]])
    """
    return (alpha * old_logprobs.exp() + (1 - alpha)) * advantages


# ======================================================================================================
# 4. Lopti: isolate the low-probability tokens
# ======================================================================================================


def split_tokens(old_logprobs, mask, eta):
    """The response tokens with π < η and those with π ≥ η, by the policy that sampled them: two (B, T) masks.

    Disjoint, and together the mask. η = 0 leaves the first empty.

    >>> split_tokens(torch.tensor([[0.1, 0.5, 0.9]]).log(), torch.tensor([[True, True, True]]), eta=0.5)
    (tensor([[ True, False, False]]), tensor([[False,  True,  True]]))
    """
    low = (old_logprobs.exp() < eta) & mask
    return low, mask & ~low


def update_stages(low, high, mask, *, eta, order="low-high", update_only=None, passes=1):
    """The passes over one rollout batch, in order: a list of (name, tokens to update (B, T)).

    Plain GRPO (η = 0): all tokens at once. Lopti (section 4.2 of the paper): first the low-probability tokens,
    then the others, starting from where the first pass led. `order="high-low"` is the ablation of Fig. 6b,
    `update_only` trains on one group alone (Figs. 1 and 6a), `passes` repeats everything.
    """
    if update_only:
        stages = [(update_only, {"low": low, "high": high}[update_only])]
    elif eta == 0:
        stages = [("all", mask)]
    else:
        stages = (
            [("low", low), ("high", high)]
            if order == "low-high"
            else [("high", high), ("low", low)]
        )
    return stages * passes


# ======================================================================================================
# 5. The loss (Eq. 1)
# ======================================================================================================


def kl_estimate(logprobs, ref_logprobs):
    """k3 of KL(π_θ‖π_ref) per token: e^d - d - 1 with d = log π_ref - log π_θ. (B, T) → (B, T)

    Never negative, and 0 where the two agree. d is clamped to ±5 and the estimate to 10, as in the published code; a
    token with π_ref = 0 (log −∞) is at the clamp and has no gradient.
    """
    difference = (ref_logprobs - logprobs).clamp(-5, 5)
    return (difference.exp() - difference - 1).clamp(-10, 10)


def policy_loss(
    logprobs, old_logprobs, advantages, mask, *, update_mask=None, ref_logprobs=None,
    clip_low=0.2, clip_high=0.24, clip_dual=10.0, kl_coef=0.001, normalizer=None,
):  # fmt: skip
    """The clipped policy-gradient loss of Eq. 1, and a dictionary of statistics about it.

        loss = 1/N Σ_t { -min(r Â, clip(r, 1-ε_l, 1+ε_h) Â) + β·k3 },   r = exp(logprobs - old_logprobs)

    summed over the tokens in `mask & update_mask` and divided by N = `normalizer`, by default the number of
    response tokens in `mask`: also where only one group is updated, N counts them all. Where Â < 0 a token's loss
    is capped at -c·Â (the dual clip). No KL without `ref_logprobs` or where kl_coef (β) is 0.

    All tensors are (B, T). Every statistic is a sum over the updated tokens divided by N, so that micro-batches
    given the same N add up to their mini-batch, and Lopti's two groups to the whole: policy_loss; kl;
    clip_ratio/low_mean, high_mean, dual_mean (share of tokens whose gradient the lower, upper or dual clip cut
    off); ratio_mean; updated_share.
    """
    updated = mask if update_mask is None else mask & update_mask
    normalizer = mask.sum() if normalizer is None else normalizer
    ratio = (
        (logprobs - old_logprobs).masked_fill(~updated, 0.0).exp()
    )  # (B, T); padding must not overflow
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    dual = -advantages * clip_dual  # where Â < 0, a bound from above on the loss
    token_loss = torch.maximum(
        unclipped, clipped
    )  # the maximum of losses is the minimum of objectives
    token_loss = torch.where(advantages < 0, torch.minimum(token_loss, dual), token_loss)
    kl = (
        kl_estimate(logprobs, ref_logprobs)
        if ref_logprobs is not None and kl_coef
        else torch.zeros_like(token_loss)
    )

    def total(values):
        return (values * updated).sum() / normalizer

    loss = total(token_loss + kl_coef * kl)
    with torch.no_grad():
        cut_off = clipped > unclipped
        stats = {
            "policy_loss": total(token_loss),
            "kl": total(kl),
            "clip_ratio/low_mean": total(cut_off & (advantages < 0)),
            "clip_ratio/high_mean": total(cut_off & (advantages > 0)),
            "clip_ratio/dual_mean": total(
                (advantages < 0) & (torch.maximum(unclipped, clipped) > dual)
            ),
            "ratio_mean": total(ratio),
            "updated_share": total(torch.ones_like(ratio)),
        }
    return loss, {name: float(value) for name, value in stats.items()}


# ======================================================================================================
# 6. The update: mini-batches (one optimizer step each) of micro-batches (as many as memory asks for)
# ======================================================================================================


def update(policy, optimizer, rollout, tokens, args):
    """One pass over the rollout batch that updates `tokens` (B, T): all of them in GRPO, a group in a stage of Lopti.

    Each mini-batch is one optimizer step; its loss is divided once, by the number of its response tokens (those that
    STAPO or 80/20 keep), of both groups, however it is cut into micro-batches. A mini-batch without a token to
    update is skipped: Adam would move the weights even at a gradient of 0. (One whose gradient is 0 because all its
    advantages are, with β = 0, is a step like any other.) Returns the sums over the mini-batches of policy_loss's
    statistics and of the gradient norm before its clip, and how many steps were taken, skipped, and left out because
    their loss or gradient was not finite.
    """
    totals = Counter(optimizer_steps=0, skipped_steps=0, nonfinite_steps=0)
    for rows in torch.arange(len(rollout.mask)).split(args.mini_batch_size or len(rollout.mask)):
        batch = rollout.part(rows.tolist())
        kept = tokens_to_keep(policy, batch, args)  # (rows, width)
        to_update = tokens[rows, : batch.mask.shape[1]] & kept
        totals["masked_tokens"] += int((batch.mask & ~kept).sum())
        if not to_update.any():
            totals["skipped_steps"] += 1
            continue
        sums, busy = Counter(), to_update.any(1).nonzero().flatten().tolist()
        if not args.kl_coef:  # β = 0: a response whose advantages are 0 has gradient 0; it is left out, of the statistics too
            busy = [row for row in busy if batch.advantages[row].any()] or busy[:1]
        for micro in micro_batches(busy, batch.lengths(), args.tokens_per_microbatch):
            part = batch.part(micro)
            in_loss = to_update[micro, : part.mask.shape[1]]
            scores = token_logprobs(
                policy, part, args.temperature, args.min_p, with_entropy=False, tokens=in_loss
            )
            loss, stats = policy_loss(
                scores.logprobs, part.old_logprobs, part.advantages, part.mask,
                update_mask=in_loss & scores.safe, ref_logprobs=part.ref_logprobs,
                clip_low=args.clip_low, clip_high=args.clip_high, clip_dual=args.clip_dual,
                kl_coef=args.kl_coef, normalizer=kept.sum(),
            )  # fmt: skip
            loss.backward()
            sums.update(stats)
            sums["unsafe_tokens"] += int((in_loss & ~scores.safe).sum())
        sums["grad_norm"] = float(
            torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
        )
        if sums["updated_share"] == 0:  # every token has left the safe vocabulary
            totals["skipped_steps"] += 1
        elif all(map(math.isfinite, sums.values())):
            optimizer.step()
            totals.update(sums, optimizer_steps=1)
        else:  # a loss or gradient that is infinite or not a number must not reach the weights
            totals["nonfinite_steps"] += 1
        optimizer.zero_grad()
    return dict(totals)


# ======================================================================================================
# 7. The algorithm
# ======================================================================================================


def train(policy, reference, tokenizer, optimizer, train_rows, eval_rows, run, args):
    """GRPO with Advantage Reweighting and Lopti, up to `args.steps` steps. Writes metrics and samples to `run`."""
    prompts = itertools.islice(
        prompt_stream(train_rows, args.prompts_per_step, args.seed), run.step, None
    )
    progress = tqdm(range(run.step + 1, args.steps + 1), desc=method_name(args), disable=args.quiet)
    for step in progress:
        run.begin_step(step, policy, tokenizer, optimizer)
        clock = Clock(policy.device)
        batch = [
            row for row in next(prompts) for _ in range(args.group_size)
        ]  # B rows, G for each prompt
        with clock("sampling"):  # o ~ π_old
            rollout = sample(
                policy, tokenizer, [row["prompt"] for row in batch[:: args.group_size]], group_size=args.group_size,
                max_new_tokens=args.max_new_tokens, temperature=args.temperature, min_p=args.min_p,
                batch_size=args.sample_batch_size,
            )  # fmt: skip
        with clock("rewarding"):  # R
            rewards = torch.tensor(
                judge(rollout.texts, batch, args), device=rollout.mask.device
            )  # (B,)
        with clock("scoring"):  # log π_old and log π_ref, before the first update
            old = score(policy, rollout, args.temperature, args.tokens_per_microbatch, args.min_p)
            rollout.old_logprobs = old.logprobs  # (B, T)
            if reference is not None:
                of_reference = score(
                    reference,
                    rollout,
                    args.temperature,
                    args.tokens_per_microbatch,
                    args.min_p,
                    with_entropy=False,
                )
                rollout.ref_logprobs = of_reference.logprobs.masked_fill(
                    rollout.mask & ~of_reference.safe, -math.inf
                )  # π_ref = 0 there
        with clock("updating"):
            checkpoint_gradients(policy, args.gradient_checkpointing)
            if args.advantage == "grpo":
                advantages = (
                    group_advantages(rewards, args.group_size)[:, None] * rollout.mask
                )  # (B, T)
            else:
                advantages = reinforce_pp_advantages(rewards, rollout.mask)  # (B, T)
            rollout.advantages = reweight_advantages(
                advantages, rollout.old_logprobs, args.alpha
            )  # Eq. 4
            low, high = split_tokens(rollout.old_logprobs, rollout.mask, args.eta)
            stages = update_stages(
                low,
                high,
                rollout.mask,
                eta=args.eta,
                order=args.order,
                update_only=args.update_only,
                passes=args.passes,
            )
            stats = [
                (name, update(policy, optimizer, rollout, tokens & old.safe, args))
                for name, tokens in stages
            ]
        metrics = step_metrics(step, rollout, rewards, old.entropies, stats, clock, args)
        run.append("metrics.jsonl", metrics)
        run.write_samples(step, batch, rollout, rewards)
        progress.set_postfix(
            reward=f"{metrics['reward']:.2f}",
            accuracy=f"{metrics['accuracy']:.2f}",
            length=f"{metrics['completions/mean_length']:.0f}",
        )
        if args.eval_every and step % args.eval_every == 0 and args.eval_from <= step < args.steps:
            run.write_evaluation(step, evaluate(policy, tokenizer, eval_rows, args)[0])
        run.end_step(metrics, policy, tokenizer, optimizer)


# ======================================================================================================
# 8. The later treatments: REINFORCE++, which tokens of a mini-batch to keep by the policy as it is now, and
# the safe vocabulary
# ======================================================================================================


def reinforce_pp_advantages(rewards, mask):
    """REINFORCE++: each token gets its response's reward, whitened over all response tokens. (B,), (B, T) → (B, T)

    Â = (R - mean)/sqrt(var + 1e-8), mean and unbiased variance over the tokens in `mask`, so that long responses
    count for more; no group, no discount. Exactly 0 where all rewards are equal, and outside the mask.

    >>> reinforce_pp_advantages(torch.tensor([1., 0.]), torch.tensor([[True, True], [True, False]]))
    tensor([[ 0.5774,  0.5774],
            [-1.1547, -0.0000]])
    """
    values = rewards[:, None].expand(mask.shape)[mask]  # (number of response tokens,)
    if (values == values[0]).all():
        return torch.zeros_like(rewards)[:, None] * mask
    return (rewards[:, None] - values.mean()) / (values.var() + 1e-8).sqrt() * mask


def stapo_mask(logprobs, entropies, advantages, mask, tau_p=0.002, quantile=0.75):
    """STAPO (arXiv 2602.15620): the tokens to keep, all but the spurious ones. All tensors are (B, T).

    Spurious is a token with Â > 0, π < τ_p and H < τ_h: rewarded, unlikely, and where the policy was sure of
    something else. τ_h is the `quantile` of H among the tokens with π < τ_p and Â > 0.
    """
    candidates = mask & (advantages > 0) & (logprobs.exp() < tau_p)
    if not candidates.any():
        return mask
    tau_h = entropies[candidates].quantile(quantile)
    return mask & ~(candidates & (entropies < tau_h))


def entropy_mask(entropies, mask, rho, lowest=False):
    """80/20 (arXiv 2506.01939): keep the share ρ of the response tokens with the highest entropy. (B, T) → (B, T)

    `lowest` keeps the share ρ with the lowest instead, for the paper's ablation: with 0.8 exactly the tokens that
    0.2 leaves out.

    >>> entropy_mask(torch.tensor([[0.1, 0.9, 0.5, 0.2, 0.3]]), torch.ones(1, 5, dtype=torch.bool), rho=0.2)
    tensor([[False,  True, False, False, False]])
    """
    values = entropies[mask].sort(descending=True).values
    count = (
        len(values) - round(rho * len(values)) if lowest else round(rho * len(values))
    )  # how many are on top
    threshold = values[count - 1] if count else math.inf
    return mask & ((entropies < threshold) if lowest else (entropies >= threshold))


def tokens_to_keep(policy, batch, args):
    """The tokens (B, T) of a mini-batch that STAPO and 80/20 leave to the update; all of them where both are off.

    They go by the current policy, and their quantiles by the whole mini-batch: hence a forward pass of its own,
    without which the result would depend on the micro-batch size.
    """
    if not (args.stapo or args.top_entropy or args.bottom_entropy):
        return batch.mask
    now = score(policy, batch, args.temperature, args.tokens_per_microbatch, args.min_p)
    kept = batch.mask
    if args.stapo:
        kept = kept & stapo_mask(
            now.logprobs,
            now.entropies,
            batch.advantages,
            batch.mask,
            args.stapo_tau,
            args.stapo_quantile,
        )
    if args.top_entropy:
        kept = kept & entropy_mask(now.entropies, batch.mask, args.top_entropy)
    if args.bottom_entropy:
        kept = kept & entropy_mask(now.entropies, batch.mask, args.bottom_entropy, lowest=True)
    return kept


def safe_vocabulary(logits, min_p):
    """V_safe = {a : π(a) ≥ ρ·max_b π(b)} with ρ = min_p, as a mask: (..., V) → (..., V).

    Dynamic vocabulary pruning (arXiv 2512.23087). Only its abstract was at hand: min-p, and ρ = e^-13 = 2.3e-6, are
    our reading of it. Sampling uses HF's own min_p, the same rule on the same tempered logits.
    """
    return logits >= logits.max(-1, keepdim=True).values + math.log(min_p)


# ======================================================================================================
# 9. To read and to test, not called in training: what each token weighs in the gradient (Eq. 2, Prop. 4.2)
# ======================================================================================================


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
    """w of Eq. 2: the gradient of Eq. 1 is 1/N Σ w·∇log π_θ. (B, T) → (B, T)

        w = r·Â·1[trust] + β·π_ref/π_θ - β

    1[trust] is 0 where a clip takes the constant branch; the KL part is 0 outside the clamps of `kl_estimate`.
    Training does not call this (autograd does the work); reading and testing do.
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
    """‖∇_z log π_j‖ = sqrt((1-π_j)² + Σ_{k≠j} π_k²) at logits z (..., V) for tokens j = ids (...): Prop. 4.2's core."""
    probabilities = logits.softmax(-1)
    gradient = (
        torch.nn.functional.one_hot(ids, logits.shape[-1]) - probabilities
    )  # ∇_z log π_j = e_j - π
    return gradient.norm(dim=-1)


def logit_gradient_bounds(probabilities, vocabulary_size):
    """sqrt(N/(N-1))·(1-π) ≤ ‖∇_z log π‖ ≤ sqrt(2)·(1-π): Prop. 4.2, N the vocabulary size. Returns (lower, upper).

    This is why unlikely tokens dominate: at π = 0.01 the gradient is about a hundred times that at π = 0.99.
    """
    room = 1 - probabilities
    return math.sqrt(vocabulary_size / (vocabulary_size - 1)) * room, math.sqrt(2) * room


# ======================================================================================================
# Plumbing from here on. Speed and memory: the same numbers as `generate` and a plain forward pass, for less
# ======================================================================================================


def positions(mask):
    """Position ids that count from the first real token of each row: (B, T) → (B, T)."""
    return (mask.cumsum(1) - 1).clamp(min=0)


class RoomyLayer(DynamicLayer):
    """A layer of HF's key-value cache with free room after its last position, for so many positions at a time.

    DynamicLayer copies the whole cache for every token. This one writes new keys and values into the free room, and
    copies only where that is used up or where the rows have changed. `keys` and `values` are views of the used part.
    Under autocast, keys leave the rotation in float32; they are kept in the type in which attention uses them.
    """

    def __init__(self, room):
        super().__init__()
        self.room, self.whole = (
            room,
            None,
        )  # whole: keys and values with their free room, (rows, heads, length + room, head size) each

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        used, new = self.get_seq_length(), key_states.shape[-2]
        if (
            self.whole is None
            or self.whole[0].shape[-2] < used + new
            or self.keys.data_ptr() != self.whole[0].data_ptr()
        ):
            device = key_states.device.type
            dtype = (
                torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            )  # None: each its own
            rows, heads, _, _ = key_states.shape
            self.whole = [
                states.new_empty(rows, heads, used + new + self.room, states.shape[-1], dtype=dtype)
                for states in (key_states, value_states)
            ]
            if used:
                self.whole[0][:, :, :used], self.whole[1][:, :, :used] = self.keys, self.values
        self.whole[0][:, :, used : used + new], self.whole[1][:, :, used : used + new] = (
            key_states,
            value_states,
        )
        self.keys, self.values = (whole[:, :, : used + new] for whole in self.whole)
        return self.keys, self.values

    def batch_repeat_interleave(self, repeats):
        self.whole = None  # keys and values hold on to what is needed of it
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices):
        self.whole = None
        super().batch_select_indices(indices)


def generate_groups(model, prompt_ids, prompt_mask, group_size, settings, stretch=32):
    """HF `generate` for G responses to each prompt: (N, P) → the sampled ids (N·G, at most max_new_tokens).

    Each prompt is read once for its whole group, and `generate` is called for a stretch of tokens at a time, after
    which the responses that have ended leave the batch, so that nothing is computed for them while others go on.
    """
    end_ids = torch.tensor(settings.eos_token_id, device=prompt_ids.device)
    ids, mask = (
        prompt_ids.repeat_interleave(group_size, 0),
        prompt_mask.repeat_interleave(group_size, 0),
    )
    responses = torch.full(
        (len(ids), settings.max_new_tokens), settings.pad_token_id, device=ids.device
    )
    going, done = (
        torch.arange(len(ids), device=ids.device),
        0,
    )  # the rows that have not ended, the tokens they have
    with mixed_precision(model):
        cache = DynamicCache(config=model.config)
        cache.layers = [
            RoomyLayer(stretch) if type(layer) is DynamicLayer else layer for layer in cache.layers
        ]
        if prompt_ids.shape[1] > 1:
            head, seen = (
                prompt_ids[:, :-1],
                prompt_mask[:, :-1],
            )  # generate reads the last prompt token itself
            read = model(
                input_ids=head,
                attention_mask=seen,
                position_ids=positions(seen),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            if (read.logits.isnan() | read.logits.isposinf()).any():
                raise UserError(
                    "the model's logits are not finite: its weights are damaged, or training has diverged; try a lower --learning-rate"
                )
            cache.batch_repeat_interleave(group_size)
        while len(going) and done < settings.max_new_tokens:
            settings_now = copy.copy(settings)
            settings_now.max_new_tokens = min(stretch, settings.max_new_tokens - done)
            found = model.generate(
                input_ids=ids,
                attention_mask=mask,
                past_key_values=cache,
                generation_config=settings_now,
            )
            new = found[:, ids.shape[1] :]
            responses[going, done : done + new.shape[1]] = new
            done += new.shape[1]
            on = (~torch.isin(new, end_ids).any(1)).nonzero().squeeze(1)
            mask = torch.cat([mask, torch.ones_like(new)], 1)[on]
            going, ids = going[on], found[on]
            if 0 < len(on) < len(new):
                cache.batch_select_indices(on)
    return responses[:, :done]


def response_states(model, rollout):
    """The last hidden states (N, hidden size) from which each response token is predicted, and the way from them to logits.

    Prompts and responses are moved together, so that all padding stands on the right, where a causal model never looks:
    no attention mask is needed, and rows of like length are cut to the longest. The decoder runs without the head, so
    that logits can be made for a few positions at a time; where they are made the model's own forward pass does it, on
    a decoder that hands back the given states: whatever the model does to its logits (scaling, soft-capping) is kept.
    """
    kept = torch.cat([rollout.prompt_mask, rollout.mask], dim=1)  # (B, P+T)
    order = kept.long().argsort(dim=1, descending=True, stable=True)[
        :, : int(rollout.lengths().max())
    ]  # (B, L) tokens before padding
    input_ids = torch.cat([rollout.prompt_ids, rollout.response_ids], dim=1).gather(
        1, order
    )  # (B, L)
    of_response = torch.cat([torch.zeros_like(rollout.prompt_mask), rollout.mask], dim=1).gather(
        1, order
    )  # (B, L)
    name = model.base_model_prefix
    decoder = getattr(model, name)
    with mixed_precision(model):
        outputs = decoder(input_ids=input_ids, use_cache=False)
    states = outputs.last_hidden_state[:, :-1][
        of_response[:, 1:]
    ]  # (N, hidden size): the state at position t speaks about token t+1

    def to_logits(states):
        given = torch.nn.Module()
        given.forward = lambda *inputs, **options: type(outputs)(last_hidden_state=states[None])
        setattr(model, name, given)
        try:
            with mixed_precision(model):
                return model(inputs_embeds=states[None], use_cache=False).logits[0]  # (n, V)
        finally:
            setattr(model, name, decoder)

    return states, to_logits


def in_chunks(function, states, ids, vocabulary_size, elements=2**25):
    """function(states, ids) in chunks whose logits have at most so many elements, the results joined.

    Where there are several chunks, each makes its logits again in the backward pass instead of keeping them.
    """
    size = max(1, elements // vocabulary_size)
    again = torch.is_grad_enabled() and len(ids) > size
    call = (lambda *parts: checkpoint(function, *parts, use_reentrant=False)) if again else function
    found = [call(*parts) for parts in zip(states.split(size), ids.split(size))]
    return [torch.cat(parts) for parts in zip(*found)]


# ======================================================================================================
# Tasks: what is asked, and how an answer is judged
# ======================================================================================================

HERE = Path(__file__).resolve().parent

KK_SYSTEM_PROMPT = """You are a helpful assistant. You first think about the problem and then answer it. \
Write your reasoning between <think> and </think>, and after it your final answer between <answer> and </answer>. \
You will be given a logic puzzle. Once you have worked it out, list who everybody is, one numbered line for each \
person, like this: <answer> (1) Zoey is a knight
(2) Oliver is a knave
(3) Ava is a knight </answer>"""

MATH_REQUEST = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Task:
    """Where a task's rows come from, how they become a prompt, and what a response earns."""

    reward: (
        object  # f(completions, solution, **columns) -> list of floats, the signature that TRL uses
    )
    solved: float  # a response counts as right when its reward is this
    shapes: dict  # the columns a data file may have -> f(row) giving (prompt, solution); see SHAPES
    difficulty: object  # (row, solution) -> what the tables are split by
    difficulty_name: str
    messages: object  # question -> chat messages
    opening: str  # what the assistant's turn begins with
    train_data: str
    eval_data: str


# Where one of these stands in a message, a chat template has been applied already.
CHAT_MARKS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "[INST]", "<|assistant|>")


class Text(str):
    """A prompt that is used as it stands."""


def own_prompt(prompt):
    """Chat messages, or Text where the prompt is text or one message that holds a whole rendered chat."""
    if isinstance(prompt, str):
        return Text(prompt)
    rendered = len(prompt) == 1 and any(mark in prompt[0]["content"] for mark in CHAT_MARKS)
    return Text(prompt[0]["content"]) if rendered else prompt


def verl_solution(row):
    """A row of verl's parquet files holds its solution as text, or for K&K in a dictionary."""
    truth = row["reward_model"]["ground_truth"]
    return truth["solution_text_format"] if isinstance(truth, dict) else truth


SHAPES = {  # any task; the prompt is then the row's own: chat messages, or text that is used as it stands
    ("prompt", "solution"): lambda row: (own_prompt(row["prompt"]), row["solution"]),  # TRL
    ("prompt", "reward_model"): lambda row: (own_prompt(row["prompt"]), verl_solution(row)),  # verl
}

TASKS = {
    "kk": Task(
        reward=kk_reward,
        solved=3.0,
        shapes={
            ("quiz", "solution_text_format"): lambda row: (
                row["quiz"],
                row["solution_text_format"],
            ),
            **SHAPES,
        },
        difficulty=lambda row, solution: str(len(solution.strip().splitlines())),
        difficulty_name="people",
        messages=lambda quiz: [
            {"role": "system", "content": KK_SYSTEM_PROMPT},
            {"role": "user", "content": quiz},
        ],
        opening="<think>",
        train_data=str(HERE / "data" / "kk_train.jsonl"),
        eval_data=str(HERE / "data" / "kk_test.jsonl"),
    ),
    "math": Task(
        reward=math_reward,
        solved=1.0,
        shapes={
            ("problem", "answer"): lambda row: (
                row["problem"],
                row["answer"],
            ),  # DeepScaleR, MATH-500
            ("problem", "solution"): lambda row: (
                row["problem"],
                extract_boxed(row["solution"]),
            ),  # MATH
            ("question", "answer"): lambda row: (
                row["question"],
                row["answer"].rsplit("####")[-1].strip(),
            ),  # GSM8K
            **SHAPES,
        },
        difficulty=lambda row, solution: str(row.get("level", "all")),
        difficulty_name="level",
        messages=lambda problem: [{"role": "user", "content": f"{problem}\n\n{MATH_REQUEST}"}],
        opening="",
        train_data=str(HERE / "data" / "math_train.jsonl"),
        eval_data=str(HERE / "data" / "math_test.jsonl"),
    ),
}

# ======================================================================================================
# Arguments
# ======================================================================================================


class UserError(Exception):
    """Something that the user can put right: ends the program with one sentence and exit code 2."""


def one_line(error, length):
    """What an exception says, on one line and cut to a length, to be told in a UserError."""
    return " ".join(str(error).split())[:length]


def option(default, group, text, **more):
    """A field of Arguments: its default, its group in --help, its documentation."""
    value = (
        {"default_factory": lambda: list(default)}
        if isinstance(default, list)
        else {"default": default}
    )
    return field(**value, metadata={"group": group, "help": text, **more})


@dataclass
class Arguments:
    """Every setting of a run. The defaults are the preset `tiny`; PRESETS holds what the others change."""

    advantage: str = option(
        "grpo",
        "method",
        "grpo: relative to the group; reinforce++: whitened over the batch",
        choices=("grpo", "reinforce++"),
    )
    alpha: float = option(
        0.0,
        "method",
        "α of Advantage Reweighting, Eq. 4, from 0 (off) to 1; the paper uses 0.3 on K&K",
    )
    eta: float = option(
        0.0,
        "method",
        "η of Lopti, from 0 (off: plain GRPO) to 1: tokens with π < η are updated first; the paper uses 0.5",
    )
    order: str = option(
        "low-high",
        "method",
        "which group Lopti updates first (Fig. 6b)",
        choices=("low-high", "high-low"),
    )
    update_only: str = option(
        None,
        "method",
        "update one of Lopti's two groups alone (Figs. 1 and 6a)",
        choices=("low", "high"),
    )
    passes: int = option(1, "method", "how often the update goes over a rollout batch")
    stapo: bool = option(
        False, "method", "silence STAPO's spurious tokens: Â > 0, π < τ_p, low entropy"
    )
    stapo_tau: float = option(0.002, "method", "τ_p of STAPO")
    stapo_quantile: float = option(
        0.75, "method", "STAPO's τ_h is this quantile of the entropies of its candidates"
    )
    top_entropy: float = option(
        0.0,
        "method",
        "ρ of 80/20: train on this share of tokens, those of highest entropy; the paper uses 0.2; 0 is off",
    )
    bottom_entropy: float = option(
        0.0,
        "method",
        "train on this share of tokens, those of lowest entropy (80/20's ablation: 0.8); 0 is off",
    )
    min_p: float = option(
        0.0,
        "method",
        "ρ of the safe vocabulary, in sampling and in log-probabilities: tokens with π < ρ·max π are cut off; our reading of the paper is e^-13 = 2.3e-6; 0 is off",
    )
    clip_low: float = option(0.2, "method", "ε_l: the ratio is clipped below at 1-ε_l")
    clip_high: float = option(0.24, "method", "ε_h: the ratio is clipped above at 1+ε_h")
    clip_dual: float = option(
        10.0, "method", "c > 1 of the dual clip: where Â < 0 the loss of a token is at most -c·Â"
    )
    kl_coef: float = option(
        0.001,
        "method",
        "β: weight of the KL to the starting policy; 0 also saves the reference model",
    )

    prompts_per_step: int = option(16, "sampling", "prompts in a rollout batch")
    group_size: int = option(8, "sampling", "G: responses to each prompt, at least 2")
    temperature: float = option(
        1.0, "sampling", "T_s: temperature of sampling, and of every log-probability"
    )
    max_prompt_length: int = option(
        400, "sampling", "longer prompts (in tokens) are dropped, and counted"
    )
    max_new_tokens: int = option(200, "sampling", "longest response, in tokens")
    sample_batch_size: int = option(
        0, "sampling", "responses generated at a time; 0 means all at once"
    )

    learning_rate: float = option(1e-4, "optimisation", "constant learning rate of AdamW")
    weight_decay: float = option(0.01, "optimisation", "weight decay of AdamW")
    max_grad_norm: float = option(
        1.0, "optimisation", "the gradient of each optimizer step is clipped to this norm"
    )
    mini_batch_size: int = option(
        64, "optimisation", "responses in one optimizer step; 0 means the whole rollout batch"
    )
    tokens_per_microbatch: int = option(
        2048,
        "optimisation",
        "tokens in one forward pass, padding included: changes memory and speed, not the result (up to rounding)",
    )
    gradient_checkpointing: bool = option(
        False,
        "optimisation",
        "make activations again in the backward pass: less memory, a third more time",
    )
    steps: int = option(24, "optimisation", "training steps (rollout batches)")
    epochs: int = option(
        0, "optimisation", "instead of --steps: how often to go through the training prompts"
    )

    task: str = option(
        "kk",
        "model and data",
        "what to train on: Knights and Knaves, or math with \\boxed{} answers",
        choices=tuple(TASKS),
    )
    model: str = option(
        str(HERE / "data" / "tiny"),
        "model and data",
        "folder or hub name of a causal language model, or random:NAME for the shape of Qwen2.5-0.5B, -1.5B, -3B or -7B with random weights",
    )
    data: str = option(
        "",
        "model and data",
        "training rows: a jsonl, json, csv or parquet file, or a hub data set name[:configuration[:split+split]]; columns as in K&K, TRL, GSM8K, MATH, DeepScaleR or verl; the task's own file by default",
    )
    eval_data: str = option("", "model and data", "evaluation rows, in the same forms")
    reward: str = option(
        "",
        "model and data",
        "MODULE:FUNCTION, a reward function of your own with TRL's signature f(completions, solution, **columns); the task's by default",
    )
    solved_reward: float = option(
        None,
        "model and data",
        "a response counts as right from this reward on; 3 for kk, 1 for math by default",
        type=float,
    )
    people: list = option(
        [2, 3], "model and data", "kk: numbers of people to train and evaluate on", type=int
    )
    dtype: str = option(
        "auto",
        "model and data",
        "type of the forward passes, with weights in float32 always; auto: bfloat16 on a GPU that has it",
        choices=("auto", "float32", "bfloat16"),
    )
    device: str = option("auto", "model and data", "auto, cpu, cuda or mps")

    eval_every: int = option(
        0,
        "evaluation",
        "evaluate after every so many steps; 0 means before and after training only",
    )
    eval_from: int = option(0, "evaluation", "with --eval-every: not before this step")
    eval_size: int = option(100, "evaluation", "evaluation prompts per difficulty; 0 means all")
    eval_samples: int = option(
        4, "evaluation", "k: sampled responses to each evaluation prompt, for avg@k and pass@k"
    )
    eval_temperature: float = option(1.0, "evaluation", "temperature of those samples")
    eval_only: bool = option(False, "evaluation", "evaluate the model and stop")
    benchmark: int = option(
        0,
        "evaluation",
        "time so many steps of GRPO and of Lopti, print a table and stop; 3 will do",
    )
    show: int = option(
        0, "evaluation", "with --eval-only: print so many prompts with their responses and rewards"
    )

    save_every: int = option(
        10, "run", "write a checkpoint after every so many steps; 0 means only when interrupted"
    )
    keep: int = option(2, "run", "how many of the newest checkpoints stay")
    resume: str = option("", "run", "continue the run in this folder, with its own settings")
    reward_timeout: float = option(
        60.0, "run", "seconds that a reward function may take for one batch"
    )
    trust_remote_code: bool = option(False, "run", "let a model folder run its own Python code")
    name: str = option("", "run", "name of the run folder; a new one by default")
    output: str = option("runs", "run", "where run folders are made")
    seed: int = option(0, "run", "seed of everything random")
    quiet: bool = option(False, "run", "no progress bar")


# The bundled policy's arithmetic has 45 tokens to a response where its puzzles have 110: more of them make up a step.
TINY_MATH = {"prompts_per_step": 64, "mini_batch_size": 256}

PRESETS = {
    "tiny": {},  # with --task math, TINY_MATH
    # Section 5 of the paper and its published scripts. α and η stay 0 here: say --alpha 0.3 --eta 0.5 for its method.
    "kk": {
        "task": "kk", "model": "Qwen/Qwen2.5-3B-Instruct", "data": "K-and-K/knights-and-knaves:train:3ppl+4ppl+5ppl+6ppl+7ppl",
        "eval_data": "K-and-K/knights-and-knaves:test:3ppl+4ppl+5ppl+6ppl+7ppl", "people": [3, 4, 5, 6, 7],
        "prompts_per_step": 64, "temperature": 0.7, "max_new_tokens": 4096, "learning_rate": 1e-6, "mini_batch_size": 256,
        "tokens_per_microbatch": 16384, "gradient_checkpointing": True, "sample_batch_size": 64,
        "steps": 0, "epochs": 5, "eval_every": 10, "save_every": 20, "keep": 1,
    },
    # The paper trains Qwen2.5-7B here, with α = 0.1 or η = 0.5 but not both; 7B with AdamW in float32 needs more than 80 GB.
    "math": {
        "task": "math", "model": "Qwen/Qwen2.5-3B", "data": "agentica-org/DeepScaleR-Preview-Dataset::train",
        "eval_data": "HuggingFaceH4/MATH-500::test", "prompts_per_step": 64, "temperature": 0.7, "max_new_tokens": 4096,
        "learning_rate": 1e-6, "mini_batch_size": 256, "tokens_per_microbatch": 16384, "gradient_checkpointing": True, "sample_batch_size": 64,
        "steps": 0, "epochs": 5, "eval_every": 10, "save_every": 20, "keep": 1,
    },
}  # fmt: skip


class OneLineParser(argparse.ArgumentParser):
    """Wrong flags end in one sentence, without the list of all flags before it."""

    def error(self, message):
        raise UserError(f"{message} (python lopti.py --help lists the flags)")


def build_parser():
    """--help, grouped as Arguments is; flags that are not given leave the preset's value."""
    changed = {"tiny with --task math": TINY_MATH, **PRESETS}
    presets = "\n".join(
        f"  {name}: " + ", ".join(f"{k}={v}" for k, v in values.items())
        for name, values in changed.items()
        if values
    )
    parser = OneLineParser(
        prog="lopti.py", usage="python lopti.py [flags]", description=__doc__.split("\n\nRead it")[0],
        epilog=f"presets (tiny: the defaults above):\n{presets}", formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    preset_help = "tiny: the bundled policy, minutes on a CPU (default); kk, math: the paper's settings; flags given explicitly win"
    parser.add_argument(
        "--preset", choices=tuple(PRESETS), default=argparse.SUPPRESS, help=preset_help
    )
    groups = {}
    for item in fields(Arguments):
        name = item.metadata["group"]
        group = groups.setdefault(name, parser.add_argument_group(name))
        default = item.default if item.default is not MISSING else item.default_factory()
        flag, text = "--" + item.name.replace("_", "-"), item.metadata["help"].replace("%", "%%")
        if isinstance(default, bool):
            switchable = any(
                item.name in preset for preset in PRESETS.values()
            )  # then --no-... takes it back
            group.add_argument(
                flag,
                action=argparse.BooleanOptionalAction if switchable else "store_true",
                default=argparse.SUPPRESS,
                help=text,
            )
            continue
        shown = " ".join(map(str, default)) if isinstance(default, list) else default
        shown = str(shown).replace(str(HERE) + "/", "")
        text += f" [{shown}]" if shown not in ("", "None") else ""
        more = (
            {"nargs": "+", "type": item.metadata["type"]}
            if isinstance(default, list)
            else {"type": type(default) if default is not None else item.metadata.get("type", str)}
        )
        choices = item.metadata.get("choices")
        metavar = (
            None if choices else {"float": "X", "int": "N", "str": "TEXT"}[more["type"].__name__]
        )
        group.add_argument(
            flag, default=argparse.SUPPRESS, help=text, choices=choices, metavar=metavar, **more
        )
    return parser


def parse_arguments(argv=None):
    """The command line as Arguments: a flag given explicitly wins over the preset, the preset over the default."""
    given = vars(build_parser().parse_args(argv))
    preset = given.pop("preset", None)
    if given.get("epochs"):
        if given.get("steps"):
            raise UserError("--steps and --epochs exclude each other: give one of them")
        given["steps"] = 0
    if given.get("resume"):
        return resumed_arguments(given, preset)
    tiny_math = preset in (None, "tiny") and given.get("task") == "math"
    args = Arguments(**{**(TINY_MATH if tiny_math else PRESETS[preset or "tiny"]), **given})
    check_arguments(args)
    return args


# What --resume takes beside it: nothing that changes what the run means.
FREE_TO_CHANGE = {"resume", "steps", "save_every", "keep", "eval_every", "eval_from", "eval_size", "eval_samples",
                  "tokens_per_microbatch", "gradient_checkpointing", "reward_timeout", "device", "quiet"}  # fmt: skip


def resumed_arguments(given, preset=None):
    """The settings of the run in the folder given["resume"], with the flags that may change."""
    refused = sorted(
        "--" + name.replace("_", "-") for name in given if name not in FREE_TO_CHANGE
    ) + (["--preset"] if preset else [])
    if refused:
        raise UserError(
            f"--resume continues a run with its own settings and cannot take {', '.join(refused)}: leave that out, or start a new run"
        )
    path = Path(given["resume"]) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        known = {item.name for item in fields(Arguments)}
        args = Arguments(
            **{**{name: value for name, value in config.items() if name in known}, **given}
        )
        check_arguments(args)  # a setting of the wrong type shows here
        return args
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"cannot resume {given['resume']}: {path} is not there or not readable as the settings of a run"
        ) from error


def check_arguments(args):
    """Raise UserError for values that make no sense."""
    for name in (
        "alpha",
        "eta",
        "top_entropy",
        "bottom_entropy",
        "stapo_tau",
        "stapo_quantile",
        "min_p",
    ):
        if not 0 <= getattr(args, name) <= 1:
            raise UserError(
                f"--{name.replace('_', '-')} must lie between 0 and 1, not {getattr(args, name)}"
            )
    if args.top_entropy and args.bottom_entropy:
        raise UserError("--top-entropy and --bottom-entropy exclude each other")
    if args.group_size < (2 if args.advantage == "grpo" else 1):
        raise UserError(
            f"--group-size must be at least 2, not {args.group_size}: GRPO compares the responses to one prompt with each other"
        )
    for name in ("temperature", "eval_temperature", "learning_rate", "reward_timeout"):
        if not 0 < getattr(args, name) < math.inf:
            raise UserError(
                f"--{name.replace('_', '-')} must be above 0 and finite, not {getattr(args, name)}"
            )
    for name, least in (("clip_dual", 1), ("max_grad_norm", 0)):  # where infinity means no clip
        if not getattr(args, name) > least:
            raise UserError(
                f"--{name.replace('_', '-')} must be above {least}, not {getattr(args, name)}"
            )
    for name in (
        "keep",
        "passes",
        "prompts_per_step",
        "max_prompt_length",
        "max_new_tokens",
        "tokens_per_microbatch",
    ):
        if getattr(args, name) < 1:
            raise UserError(
                f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}"
            )
    for name in ("clip_low", "clip_high", "kl_coef", "weight_decay", "steps", "epochs", "mini_batch_size", "sample_batch_size",
                 "eval_every", "eval_from", "eval_size", "eval_samples", "show", "benchmark", "save_every"):  # fmt: skip
        if not getattr(args, name) >= 0:
            raise UserError(
                f"--{name.replace('_', '-')} must not be negative, but is {getattr(args, name)}"
            )
    if not 0 <= args.seed < 2**32:
        raise UserError(f"--seed must lie between 0 and {2**32 - 1}, not {args.seed}")
    if args.update_only and args.eta == 0:
        raise UserError(
            f"--update-only {args.update_only} needs --eta above 0 to tell the two groups apart"
        )
    if args.show and not args.eval_only:
        raise UserError("--show needs --eval-only")
    if args.eval_from and not args.eval_every and not args.resume:
        raise UserError("--eval-from needs --eval-every")
    if not (args.steps or args.epochs or args.eval_only or args.benchmark):
        raise UserError("give --steps or --epochs, or --eval-only")


def method_name(args):
    """'GRPO', 'GRPO + AR (α=0.3)', 'GRPO + AR (α=0.3) + Lopti (η=0.5)' and so on."""
    name = {"grpo": "GRPO", "reinforce++": "REINFORCE++"}[args.advantage]
    if args.alpha:
        name += f" + AR (α={args.alpha:g})"
    if args.update_only:
        name += f", {args.update_only}-probability tokens only (η={args.eta:g})"
    elif args.eta:
        name += f" + {'Lopti' if args.order == 'low-high' else 'reversed Lopti'} (η={args.eta:g})"
    name += " + STAPO" if args.stapo else ""
    name += f" + 80/20 (ρ={args.top_entropy:g})" if args.top_entropy else ""
    name += (
        f", lowest-entropy {args.bottom_entropy:.0%} of tokens only" if args.bottom_entropy else ""
    )
    name += f" + min-p (ρ={args.min_p:g})" if args.min_p else ""
    return name + (f", {args.passes} passes" if args.passes > 1 else "")


# ======================================================================================================
# Data: rows of {question, prompt, solution, difficulty, columns, shape}
# ======================================================================================================


def load_rows(source, task):
    """Read a data file or hub data set into the rows of `read_row`."""
    import datasets  # here, because it takes a second to import

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(
        datasets.logging.CRITICAL
    )  # what goes wrong is said below, in one sentence
    path = Path(source)
    formats = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
    if path.suffix in formats:
        if not path.is_file():
            raise UserError(f"there is no data file {source}")
        if path.stat().st_size == 0:
            raise UserError(f"the data file {source} is empty")
        load = {"path": formats[path.suffix], "data_files": str(path), "split": "train"}
    else:
        name, configuration, splits = (source.split(":") + ["", ""])[:3]
        load = {"path": name, "name": configuration or None, "split": splits or "train"}
    try:
        rows = datasets.load_dataset(**load).to_list()
    except Exception as error:  # whatever the library objects to
        reason = one_line(error.__cause__ or error, 300)
        raise UserError(f"cannot load the data {source}: {reason}") from error
    if not rows:
        raise UserError(f"the data {source} has no rows")
    for columns, parts_of in task.shapes.items():
        if set(columns) <= set(rows[0]):
            return [
                read_row(row, number, columns, parts_of, source, task)
                for number, row in enumerate(rows, 1)
            ]
    wanted = " or ".join(" and ".join(columns) for columns in task.shapes)
    raise UserError(f"the data {source} needs the columns {wanted}; it has {', '.join(rows[0])}")


def read_row(row, number, columns, parts_of, source, task):
    """One row of a data file as {question, prompt, solution, difficulty, columns, shape}."""
    missing = [column for column in columns if row[column] is None]
    if missing:
        raise UserError(f"row {number} of the data {source} has no {missing[0]}")
    try:
        prompt, solution = parts_of(row)
        asked = (
            [prompt]
            if isinstance(prompt, str)
            else [message["content"] for message in prompt if message["role"] != "system"]
        )
        question = "\n".join(asked)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"row {number} of the data {source}: its {' and '.join(columns)} do not hold a prompt and a solution"
        ) from error
    if not question.strip():
        raise UserError(f"row {number} of the data {source}: its {columns[0]} is empty")
    if solution is None:
        raise UserError(
            f"row {number} of the data {source} has no solution: there is no \\boxed{{}} in its {columns[1]}"
        )
    others = {
        name: value
        for name, value in row.items()
        if name not in ("prompt", "prompts", "completions", "solution")
    }
    return {
        "question": question, "prompt": prompt, "solution": str(solution), "difficulty": task.difficulty(row, str(solution)),
        "columns": others, "shape": (columns, type(prompt)),
    }  # fmt: skip


def render_prompt(tokenizer, messages, opening=""):
    """The prompt text: the tokenizer's chat template up to the assistant's turn, and what that turn opens with."""
    if tokenizer.chat_template is None:  # a base model: the same words without a chat around them
        return begun(
            tokenizer, "\n\n".join(message["content"] for message in messages) + "\n\n" + opening
        )
    try:
        return (
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            + opening
        )
    except TemplateError as error:
        first, *others = messages
        if (
            first["role"] == "system" and others
        ):  # Gemma's template takes none: it opens the user's message instead
            merged = {**others[0], "content": first["content"] + "\n\n" + others[0]["content"]}
            return render_prompt(tokenizer, [merged, *others[1:]], opening)
        raise UserError(
            f"the model's chat template does not take the roles {', '.join(message['role'] for message in messages)}: {error}"
        ) from error


@functools.cache
def beginning(tokenizer):
    """The beginning-of-sequence token that Llama's and Gemma's tokenizers put before every text; "" for those that put none, as Qwen's."""
    puts_one = tokenizer.bos_token_id is not None and tokenizer("x")["input_ids"][:1] == [
        tokenizer.bos_token_id
    ]
    return tokenizer.bos_token if puts_one else ""


def begun(tokenizer, text):
    """A text with the token that this tokenizer puts before every text, if it is not there yet."""
    return text if text.startswith(beginning(tokenizer)) else beginning(tokenizer) + text


def not_in_evaluation(training, evaluation):
    """The rows of `training` that ask nothing that `evaluation` asks; spaces and capital letters do not count.

    Between rows of different shapes one question may hold the other: a rendered prompt holds the bare question.
    """

    def key(row):
        return " ".join(row["question"].split()).casefold()

    held_out = {}
    for row in evaluation:
        held_out.setdefault(row["shape"], set()).add(key(row))

    def is_new(row):
        ours = key(row)
        others = (
            theirs
            for shape, questions in held_out.items()
            if shape != row["shape"]
            for theirs in questions
        )
        return ours not in held_out.get(row["shape"], ()) and not any(
            theirs in ours or ours in theirs for theirs in others
        )

    return [row for row in training if is_new(row)]


def load_data(args, tokenizer, say=print):
    """Training and evaluation rows with their prompts; the training rows never hold an evaluation question."""
    task = TASKS[args.task]
    sources = {
        "training": args.data or task.train_data,
        "evaluation": args.eval_data or task.eval_data,
    }
    rows = {use: load_rows(source, task) for use, source in sources.items()}
    if args.task == "kk":
        sizes = {str(people) for people in args.people}
        rows = {
            use: [row for row in found if row["difficulty"] in sizes] for use, found in rows.items()
        }
    for use, found in rows.items():
        for row in found:
            if not isinstance(row["prompt"], str):  # messages of its own
                row["prompt"] = render_prompt(tokenizer, row["prompt"])
            elif isinstance(row["prompt"], Text):
                row["prompt"] = begun(tokenizer, row["prompt"])
            else:  # a question
                row["prompt"] = render_prompt(tokenizer, task.messages(row["prompt"]), task.opening)
        lengths = (
            [
                len(ids)
                for ids in tokenizer([row["prompt"] for row in found], add_special_tokens=False)[
                    "input_ids"
                ]
            ]
            if found
            else []
        )
        kept = [row for row, length in zip(found, lengths) if length <= args.max_prompt_length]
        if len(kept) < len(found):
            say(
                f"dropped {len(found) - len(kept)} {use} prompts longer than {args.max_prompt_length} tokens"
            )
        rows[use] = kept

    training = not_in_evaluation(rows["training"], rows["evaluation"])
    dropped = len(rows["training"]) - len(training)
    say(
        f"{len(training)} training prompts ({dropped} dropped because they are also evaluation prompts)"
    )
    evaluation, counts = [], {}
    for row in sorted(rows["evaluation"], key=lambda row: row["difficulty"]):
        counts[row["difficulty"]] = counts.get(row["difficulty"], 0) + 1
        if not args.eval_size or counts[row["difficulty"]] <= args.eval_size:
            evaluation.append(row)
    say(f"{len(evaluation)} evaluation prompts")
    if not evaluation or not (training or args.eval_only):
        empty = "training" if evaluation else "evaluation"
        chosen = f" for --people {' '.join(map(str, args.people))}" if args.task == "kk" else ""
        raise UserError(f"no {empty} prompts are left of {sources[empty]}{chosen}")
    return training, evaluation


def prompt_stream(rows, size, seed):
    """Endless batches of `size` rows, in a new random order each time through."""
    generator = random.Random(seed)
    order = itertools.chain.from_iterable(
        generator.sample(rows, len(rows)) for _ in itertools.count()
    )
    while True:
        yield list(itertools.islice(order, size))


# ======================================================================================================
# Rewards, guarded: a reward function may be anybody's
# ======================================================================================================


class TookTooLong(
    BaseException
):  # no Exception: a reward function's own `except Exception` must not swallow it
    pass


@contextmanager
def time_limit(seconds):
    """Raise TookTooLong in the block after so many seconds (where the system has alarms: not on Windows)."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number, frame):
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@functools.cache
def load_function(place):
    """'module:function' → the function; the module may be a file beside you (my_reward.py is my_reward:function)."""
    module, _, name = place.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module.removesuffix(".py")), name)
    except Exception as error:
        raise UserError(
            f"--reward {place}: cannot load it ({type(error).__name__}: {error}); give MODULE:FUNCTION"
        ) from error
    finally:
        sys.path.remove(os.getcwd())


def reward_function(args):
    return load_function(args.reward) if args.reward else TASKS[args.task].reward


def solved(args):
    """The reward from which on a response counts as right."""
    return TASKS[args.task].solved if args.solved_reward is None else args.solved_reward


def judge(texts, rows, args):
    """The task's reward for each response; UserError naming function and row where it raises, hangs or miscounts."""
    function = reward_function(args)
    name = getattr(function, "__name__", str(function))

    def call(texts, rows):
        names = set.intersection(*(set(row.get("columns", {})) for row in rows))
        columns = {name: [row["columns"][name] for row in rows] for name in sorted(names)}
        columns |= {
            "solution": [row["solution"] for row in rows],
            "prompts": [row["prompt"] for row in rows],
        }
        with time_limit(args.reward_timeout):
            rewards = function(completions=texts, **columns)
        if isinstance(rewards, (dict, set, str)):
            raise UserError(
                f"the reward function {name} returned a {type(rewards).__name__}: it must return a list with one number for each response"
            )
        rewards = list(rewards)
        if len(rewards) != len(texts):
            raise UserError(
                f"the reward function {name} returned {len(rewards)} values for {len(texts)} responses: it must return one each"
            )
        return [float(reward) for reward in rewards]

    def complaint(error):
        if isinstance(error, TookTooLong):
            return f"took longer than {args.reward_timeout:g} s (--reward-timeout)"
        return f"raised {type(error).__name__}: {one_line(error, 200)}"

    try:
        rewards = call(texts, rows)
    except UserError:
        raise
    except (Exception, TookTooLong) as error:
        for number, (text, row) in enumerate(zip(texts, rows)):  # which one was it?
            try:
                call([text], [row])
            except (Exception, TookTooLong) as alone:
                raise UserError(
                    f"the reward function {name} {complaint(alone)}, at response {number} of the batch: {printable(text)[:80]!r}"
                ) from error
        raise UserError(
            f"the reward function {name} {complaint(error)}, on the batch but on none of its responses alone"
        ) from error
    for number, reward in enumerate(rewards):
        if not abs(reward) <= 1e15:  # float32 must be able to square it
            raise UserError(
                f"the reward function {name} returned {reward} at response {number} of the batch: rewards must be finite, and at most 1e15"
            )
    return rewards


# ======================================================================================================
# Evaluation
# ======================================================================================================


def wilson_interval(mean, count):
    """95 % interval for a share measured on `count` prompts (Wilson's score interval).

    For the mean of values between 0 and 1, such as avg@k, it errs on the wide side.

    >>> tuple(round(bound, 3) for bound in wilson_interval(0.5, 100))
    (0.404, 0.596)
    """
    z = 1.959964
    centre = (mean + z * z / (2 * count)) / (1 + z * z / count)
    half = (
        z / (1 + z * z / count) * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
    )
    return max(0.0, centre - half), min(1.0, centre + half)


def evaluate(policy, tokenizer, rows, args):
    """Accuracy on held-out rows, per difficulty: greedy, avg@k and pass@k, each (mean, lower, upper).

    The same seed every time, and the training's own random state is left alone. Returns the table
    {difficulty: {"greedy": ..., "avg@k": ..., "pass@k": ..., "length": ..., "prompts": n}} and, for each row,
    its (response, reward) pairs, the greedy one first.
    """
    k = args.eval_samples
    answered = [[] for _ in rows]
    with torch.random.fork_rng():
        torch.manual_seed(args.seed + 1)
        for group_size, temperature in ((1, 0), (k, args.eval_temperature)):
            rollouts = max(1, (args.sample_batch_size or 256) // max(1, group_size))
            for start in range(0, len(rows) if group_size else 0, rollouts):
                chunk = rows[start : start + rollouts]
                rollout = sample(
                    policy, tokenizer, [row["prompt"] for row in chunk], group_size=group_size,
                    max_new_tokens=args.max_new_tokens, temperature=temperature, min_p=args.min_p,
                )  # fmt: skip
                repeated = [row for row in chunk for _ in range(group_size)]
                rewards = judge(rollout.texts, repeated, args)
                for i, (text, reward, length) in enumerate(
                    zip(rollout.texts, rewards, rollout.mask.sum(1).tolist())
                ):
                    answered[start + i // group_size].append((text, reward, length))
    table = {}
    for difficulty in sorted({row["difficulty"] for row in rows}):
        right = [
            [reward >= solved(args) for _, reward, _ in answered[i]]
            for i, row in enumerate(rows)
            if row["difficulty"] == difficulty
        ]
        values = {"greedy": [answers[0] for answers in right]}
        if k:
            values[f"avg@{k}"] = [sum(answers[1:]) / k for answers in right]
            values[f"pass@{k}"] = [any(answers[1:]) for answers in right]
        means = {name: sum(found) / len(found) for name, found in values.items()}
        table[difficulty] = {
            name: (mean, *wilson_interval(mean, len(right))) for name, mean in means.items()
        }
        lengths = [
            length
            for i, row in enumerate(rows)
            if row["difficulty"] == difficulty
            for _, _, length in answered[i]
        ]
        table[difficulty] |= {"length": sum(lengths) / len(lengths), "prompts": len(right)}
    return table, [[(text, reward) for text, reward, _ in answers] for answers in answered]


def evaluation_table(tables, difficulty_name):
    """The evaluations {title: table} as text: a row for each measure and difficulty, a 95 % interval after each mean."""
    first = next(iter(tables.values()))
    lines = [
        f"{'':<8}{difficulty_name:>8}{'prompts':>9}" + "".join(f"{title:>21}" for title in tables)
    ]
    for measure in (
        name for name in next(iter(first.values())) if name not in ("length", "prompts")
    ):
        for number, difficulty in enumerate(first):
            cells = [
                f"{mean:.2f} [{low:.2f}, {high:.2f}]"
                for mean, low, high in (table[difficulty][measure] for table in tables.values())
            ]
            lines.append(
                f"{'' if number else measure:<8}{difficulty:>8}{first[difficulty]['prompts']:>9}"
                + "".join(f"{cell:>21}" for cell in cells)
            )
        if len(first) > 1:
            means = [
                sum(row[measure][0] for row in table.values()) / len(table)
                for table in tables.values()
            ]
            lines.append(
                f"{'':<8}{'mean':>8}{sum(row['prompts'] for row in first.values()):>9}"
                + "".join(f"{mean:>8.2f}{'':13}" for mean in means)
            )
    return "\n".join(line.rstrip() for line in lines)


# ======================================================================================================
# Metrics and the run folder
# ======================================================================================================


class Clock:
    """Seconds and peak memory per phase: `with clock("sampling"): ...`."""

    def __init__(self, device):
        self.device, self.seconds, self.memory = device, {}, {}

    @contextmanager
    def __call__(self, phase):
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[phase] = time.perf_counter() - started
        self.memory[phase] = peak_memory_gib(self.device)


def peak_memory_gib(device):
    """Peak memory: of the GPU since the phase began, or of this process since its start; None where the system cannot say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        2**30 if sys.platform == "darwin" else 2**20
    )


def step_metrics(step, rollout, rewards, entropies, stats, clock, args):
    """One line of metrics.jsonl, with TRL's names where TRL has one."""
    tokens, lengths = int(rollout.mask.sum()), rollout.mask.sum(1).float()
    groups = rewards.view(-1, args.group_size)
    deviations = groups.std(1) if args.group_size > 1 else torch.zeros(len(groups))
    metrics = {
        "step": step,
        "reward": rewards.mean().item(),
        "reward_std": deviations.mean().item(),
        "frac_reward_zero_std": (deviations == 0).float().mean().item(),
        "accuracy": (rewards >= solved(args)).float().mean().item(),
        "completions/mean_length": lengths.mean().item(),
        "completions/min_length": lengths.min().item(),
        "completions/max_length": lengths.max().item(),
        "completions/clipped_ratio": rollout.truncated.float().mean().item(),
        "entropy": entropies.sum().item() / tokens,
        "low_probability_share": split_tokens(rollout.old_logprobs, rollout.mask, args.eta or 0.5)[
            0
        ]
        .sum()
        .item()
        / tokens,
    }
    steps = Counter()
    for name, stage in stats:
        steps[name] += stage["optimizer_steps"]
    for (
        name,
        stage,
    ) in stats:  # means over the mini-batches of a group; the two groups of Lopti add up
        for key in (
            "policy_loss",
            "kl",
            "ratio_mean",
            "updated_share",
            "clip_ratio/low_mean",
            "clip_ratio/high_mean",
            "clip_ratio/dual_mean",
        ):
            metrics[key] = metrics.get(key, 0.0) + stage.get(key, 0.0) / max(1, steps[name])
        key = f"grad_norm/{name}"
        metrics[key] = metrics.get(key, 0.0) + stage.get("grad_norm", 0.0) / max(1, steps[name])
        for key in (
            "optimizer_steps",
            "skipped_steps",
            "nonfinite_steps",
            "masked_tokens",
            "unsafe_tokens",
        ):
            metrics[key] = metrics.get(key, 0) + stage.get(key, 0)
    metrics["masked_share"] = metrics["masked_tokens"] / (len(stats) * tokens)
    for phase, seconds in clock.seconds.items():
        metrics[f"seconds/{phase}"] = round(seconds, 4)
        metrics[f"tokens_per_second/{phase}"] = round(tokens / seconds, 1) if seconds else None
        metrics[f"peak_memory_gib/{phase}"] = clock.memory[phase]
    metrics["peak_memory_gib"] = max(
        (found for found in clock.memory.values() if found), default=None
    )
    metrics |= {
        "rollout/tokens": tokens,
        "rollout/tokens_with_prompts": int(rollout.lengths().sum()),
    }
    return metrics


class Interrupted(Exception):
    """The user or the system asked the run to stop, and it has stopped in good order."""


@contextmanager
def replaced_whole(path):
    """Write a file or folder beside `path` and move it there when it is whole; the old one goes only after that."""
    partial, old = path.with_name(f".{path.name}.partial"), path.with_name(f".{path.name}.old")
    remove(partial)
    try:
        yield partial
        for file in [partial, *partial.glob("*")] if os.name == "posix" else []:
            handle = os.open(file, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
        if path.is_dir():  # a folder cannot be moved onto another: first move the old one aside
            remove(old)
            os.replace(path, old)
        os.replace(partial, path)
        remove(old)
    except Exception as error:
        free = (
            shutil.disk_usage(next(folder for folder in path.parents if folder.exists())).free
            / 2**20
        )
        remove(partial)
        reason = getattr(error, "strerror", None) or one_line(error, 120)
        raise UserError(
            f"cannot write {path} ({reason}; {free:.0f} MiB are free on that disk): make room and continue with --resume; "
            "what was written before is untouched"
        ) from error


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


class Run:
    """The folder runs/NAME: config.json, metrics.jsonl, samples.jsonl, evaluations.jsonl, checkpoints/, final/."""

    PATIENCE = (
        3  # training steps in a row without one finite optimizer step, after which the run stops
    )

    def __init__(self, args):
        self.args, self.step = args, 0  # step: the last one that is done
        self.stop_signal, self.bad_steps = None, 0
        if args.resume:
            self.folder = Path(args.resume)
            return
        name = args.name or f"{args.task}-{datetime.now():%Y%m%d-%H%M%S}"
        for number in itertools.count(1):
            self.folder = Path(args.output) / (name if number == 1 else f"{name}-{number}")
            try:
                self.folder.mkdir(parents=True)
                break
            except FileExistsError:
                if args.name:
                    raise UserError(
                        f"the run folder {self.folder} is there already: continue it with --resume {self.folder} or choose another --name"
                    ) from None
            except OSError as error:
                raise UserError(
                    f"cannot make the run folder {self.folder}: {error.strerror}"
                ) from error
        self.write_config()

    def write_config(self):
        versions = {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        config = {
            **asdict(self.args),
            "resume": "",
            "method": method_name(self.args),
            "versions": versions,
        }
        with replaced_whole(self.folder / "config.json") as path:
            path.write_text(
                json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )

    # ---- lines

    def append(self, file, row):
        try:
            with open(self.folder / file, "a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")
        except OSError as error:
            raise UserError(
                f"cannot write {self.folder / file}: {error.strerror}; continue later with --resume {self.folder}"
            ) from error

    def write_samples(self, step, batch, rollout, rewards, samples=2):
        for i in range(min(samples, len(batch))):
            row = {
                "step": step,
                "prompt": batch[i]["prompt"],
                "response": rollout.texts[i],
                "solution": batch[i]["solution"],
            }
            self.append(
                "samples.jsonl",
                row | {"reward": rewards[i].item(), "truncated": bool(rollout.truncated[i])},
            )

    def write_evaluation(self, step, table):
        self.append("evaluations.jsonl", {"step": step, "table": table})

    def read_lines(self, file):
        """The rows of a jsonl file, without lines that a crash cut short."""
        path, rows = self.folder / file, []
        for line in (
            path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        ):
            try:
                row = json.loads(line)
                if row["step"] >= 0:
                    rows.append(row)
            except (ValueError, TypeError, KeyError):
                print(f"{path}: dropped a line that was cut short or is none of a run's")
        return rows

    # ---- checkpoints

    def checkpoints(self):
        return sorted((self.folder / "checkpoints").glob("step-*"))

    def save_checkpoint(self, policy, tokenizer, optimizer, random_state=None):
        """Everything that the next step depends on, in checkpoints/step-N; the newest `keep` stay."""
        folder = self.folder / "checkpoints" / f"step-{self.step:06d}"
        if not folder.exists():
            state = {
                "step": self.step,
                "optimizer": optimizer.state_dict(),
                "random": random_state or random_states(),
            }
            with replaced_whole(folder) as path:
                path.mkdir(parents=True)
                policy.save_pretrained(path)
                tokenizer.save_pretrained(path)
                torch.save(state, path / "training_state.pt")
        for old in self.checkpoints()[: -self.args.keep]:
            remove(old)

    def load_checkpoint(self, policy, optimizer):
        """Bring policy, optimizer, random numbers and the run's files back to the newest checkpoint, if there is one."""
        for folder in self.checkpoints()[-1:]:
            try:
                state = torch.load(
                    folder / "training_state.pt", weights_only=True, map_location="cpu"
                )
                weights = AutoModelForCausalLM.from_pretrained(
                    folder, dtype=torch.float32, trust_remote_code=self.args.trust_remote_code
                )
                policy.load_state_dict(weights.state_dict())
                optimizer.load_state_dict(state["optimizer"])
                set_random_states(state["random"])
                self.step = state["step"]
            except Exception as error:
                if out_of_memory(error):
                    raise
                reason = one_line(error, 160)
                raise UserError(
                    f"the checkpoint {folder} is damaged or not one of this run ({reason}): move it away to go on from the one before"
                ) from error
        if self.step > self.args.steps or (
            self.step == self.args.steps and (self.folder / "final").exists()
        ):
            raise UserError(
                f"{self.folder} has done its {self.step} steps: give --steps above {self.step} to go on"
            )
        self.write_config()
        for file in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl"):
            rows = [row for row in self.read_lines(file) if row["step"] <= self.step]
            with replaced_whole(self.folder / file) as path:
                path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    # ---- around each training step

    @contextmanager
    def signals(self):
        """Ctrl-C and SIGTERM ask for a stop after the current step; a second one stops at once."""

        def ask(number, frame):
            if self.stop_signal:
                raise KeyboardInterrupt
            self.stop_signal = number
            print("\nfinishing this step; once more to stop at once", file=sys.stderr)

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def begin_step(self, step, policy, tokenizer, optimizer):
        self.stop_if_asked(policy, tokenizer, optimizer)
        if not self.bad_steps:
            self.random_before = random_states()

    def end_step(self, metrics, policy, tokenizer, optimizer):
        """Count what could not be applied, save where it is due, stop where that was asked for."""
        step = metrics["step"]
        if metrics["skipped_steps"]:
            tqdm.write(
                f"step {step}: {metrics['skipped_steps']} mini-batches skipped, for they held no token to update"
            )
        if metrics["nonfinite_steps"]:
            tqdm.write(
                f"step {step}: {metrics['nonfinite_steps']} optimizer steps left out, for their loss or gradient was not finite"
            )
        if metrics["nonfinite_steps"] and not metrics["optimizer_steps"]:
            self.bad_steps += 1
            if (
                self.bad_steps >= self.PATIENCE
            ):  # the weights are still those from before the first of them
                self.save_checkpoint(policy, tokenizer, optimizer, self.random_before)
                raise UserError(
                    f"no finite gradient in {self.bad_steps} steps: stopped, with a checkpoint from before them (step {self.step}) in {self.folder}; "
                    "try a lower --learning-rate, a lower --clip-dual or another --seed"
                )
            return
        self.step, self.bad_steps = step, 0
        if self.args.save_every and step % self.args.save_every == 0:
            self.save_checkpoint(policy, tokenizer, optimizer)
        self.stop_if_asked(policy, tokenizer, optimizer)

    def stop_if_asked(self, policy, tokenizer, optimizer):
        if self.stop_signal:
            self.save_checkpoint(
                policy, tokenizer, optimizer, self.random_before if self.bad_steps else None
            )
            raise Interrupted


def random_states():
    """The states of the random number generators that sampling draws from."""
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "mps": torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
    }


def set_random_states(states):
    torch.set_rng_state(states["cpu"])
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
    if states.get("mps") is not None and torch.backends.mps.is_available():
        torch.mps.set_rng_state(states["mps"])


# ======================================================================================================
# Model, device, main
# ======================================================================================================


def choose_device(name):
    """'auto' → cuda, else mps, else cpu; UserError where the device asked for is not there."""
    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        return torch.device(next(device for device, found in there.items() if found))
    if not there.get(name.split(":")[0]):
        found = ", ".join(device for device, found in there.items() if found)
        raise UserError(f"--device {name}: no such device here; this machine has {found}")
    try:
        device = torch.zeros(0, device=name).device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # the one that memory figures are about
        return device
    except (RuntimeError, AssertionError) as error:  # cuda:7 on a machine with one GPU
        raise UserError(f"--device {name}: {one_line(error, 100)}") from error


def mixed_precision(model):
    """Forward passes in bfloat16 where load_model was told so; the weights that AdamW updates stay float32."""
    return torch.autocast(
        model.device.type,
        torch.bfloat16,
        enabled=getattr(model, "forward_dtype", None) == torch.bfloat16,
    )


def checkpoint_gradients(model, on):
    """Keep one activation a layer and make the others again in the backward pass: less memory, a third more time.

    Only the layers themselves are put in training mode, on which transformers' switch depends; dropout stays off.
    """
    if on:
        enable = (
            getattr(model, "activation_checkpointing_enable", None)
            or model.gradient_checkpointing_enable
        )  # its older name
        enable({"use_reentrant": False})
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.training = on


def printable(text):
    """Text of a model with its control characters escaped: it cannot move the cursor or change the terminal."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


# The shapes of Qwen2.5, for --model random:NAME: (hidden size, MLP size, layers, heads, key-value heads, tied embeddings).
RANDOM_SHAPES = {
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, True),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, True),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, True),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, False),
}


def random_model(shape, tokenizer):
    """A model of a known shape with random weights, that reads with the bundled tokenizer: for measuring, not for answers."""
    if shape not in RANDOM_SHAPES:
        raise UserError(f"--model random:{shape}: the shapes are {', '.join(RANDOM_SHAPES)}")
    hidden, mlp, layers, heads, key_value_heads, tied = RANDOM_SHAPES[shape]
    config = transformers.Qwen2Config(
        vocab_size=152064 if shape.endswith("7B") else 151936, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_value_heads, tie_word_embeddings=tied, max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(config)


def load_model(name, device, trust_remote_code=False, dtype="auto"):
    """Model (weights in float32, in evaluation mode) and tokenizer of a folder, a hub name or random:SHAPE.

    `dtype` is that of the forward passes: auto takes bfloat16 on a GPU that has it, else float32.
    """
    folder, device = Path(name), torch.device(device)
    if not folder.exists() and (
        folder.is_absolute() or name.startswith(".") or len(folder.parts) > 2
    ):  # the hub knows owner/name
        raise UserError(
            f"there is no model folder {name}: give one that is there, or a model of the hub as owner/name"
        )
    if folder.is_dir() and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise UserError(f"the model folder {name} holds no weights (*.safetensors)")
    try:
        if name.startswith("random:"):
            tokenizer = AutoTokenizer.from_pretrained(HERE / "data" / "tiny")
            with device:
                model = random_model(name.removeprefix("random:"), tokenizer)
        else:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
            model = AutoModelForCausalLM.from_pretrained(
                name, dtype=torch.float32, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # whatever the libraries object to in a folder's files
        if out_of_memory(error):
            raise
        raise UserError(f"cannot load the model {name}: {one_line(error, 300)}") from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise UserError(
                f"the tokenizer of {name} has neither a padding nor an end-of-sequence token: name one in its tokenizer_config.json"
            )
        tokenizer.pad_token = tokenizer.eos_token
    has_bfloat16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    model.forward_dtype = (
        torch.bfloat16
        if dtype == "bfloat16" or (dtype == "auto" and has_bfloat16)
        else torch.float32
    )
    model = model.to(device).eval()
    check_model(model, tokenizer, name)
    return model, tokenizer


@torch.no_grad()
def check_model(model, tokenizer, name):
    """UserError where sampling and scoring, on shortcuts of their own, do not give what the model called plainly gives.

    They are right for a decoder with a key-value cache whose logits depend on its last hidden state alone: Llama, Qwen,
    Gemma, GPT-2 and their like; state-space models, for example, are others.
    """
    try:
        rollout = sample(
            model,
            tokenizer,
            ["One", "Two and two are"],
            group_size=2,
            max_new_tokens=3,
            temperature=0,
        )
        logprobs = score(model, rollout, 1.0, 4096, with_entropy=False).logprobs
        off = []
        for row, mask in enumerate(rollout.mask):
            prompt, response = (
                rollout.prompt_ids[row][rollout.prompt_mask[row]],
                rollout.response_ids[row][mask],
            )
            with mixed_precision(model):
                logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
            plain = logits.float().log_softmax(-1)
            off += [
                (logprobs[row][mask] - plain.gather(-1, response[:, None])[:, 0]).abs(),
                plain.max(-1).values - logprobs[row][mask],
            ]
        reason = (
            ""
            if torch.cat(off).mean() < 0.3
            else "other log-probabilities or samples than its own forward pass"
        )  # bfloat16 rounds, by less
    except UserError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {one_line(error, 150)}"
    if reason:
        raise UserError(
            f"the model {name} ({type(model).__name__}) does not work with the sampling and scoring of lopti.py ({reason}): choose a model such as Qwen2.5 or Llama"
        )


def make_reference(policy, args):
    """π_ref, the policy as it starts, in the type of the forward passes; None where β = 0."""
    if not args.kl_coef:
        return None
    reference = copy.deepcopy(policy).requires_grad_(False)
    for parameter in (
        reference.parameters()
    ):  # not the buffers: rotary frequencies in bfloat16 would shift far positions
        parameter.data = parameter.data.to(policy.forward_dtype)
    return reference


def make_optimizer(policy, args):
    return torch.optim.AdamW(
        policy.parameters(),
        lr=args.learning_rate,
        weight_decay=args.weight_decay,
        fused=policy.device.type != "mps",
    )


def show_responses(rows, answered, count):
    """Print `count` evaluation prompts, spread over the difficulties, with each response and its reward."""
    for i in range(0, len(rows), max(1, len(rows) // count))[:count]:
        print(
            f"\n--- {printable(rows[i]['question'])}\nsolution: {printable(' / '.join(rows[i]['solution'].splitlines()))}"
        )
        for number, (text, reward) in enumerate(answered[i]):
            print(
                f"\n[{'greedy' if number == 0 else f'sample {number}'}, reward {reward:g}]\n{printable(text)}"
            )


def run_command(args):
    task, device = TASKS[args.task], choose_device(args.device)
    reward_function(args)  # a wrong name should not wait for the model to load
    policy, tokenizer = load_model(args.model, device, args.trust_remote_code, args.dtype)
    train_rows, eval_rows = load_data(args, tokenizer)
    if args.eval_only:
        table, answered = evaluate(policy, tokenizer, eval_rows, args)
        if args.show:
            show_responses(eval_rows, answered, args.show)
        print("\n" + evaluation_table({"": table}, task.difficulty_name))
        return 0
    if args.benchmark:
        return benchmark(policy, tokenizer, train_rows, args)
    if not args.steps:
        args.steps = max(1, args.epochs * len(train_rows) // args.prompts_per_step)
    torch.manual_seed(args.seed)
    reference, optimizer = make_reference(policy, args), make_optimizer(policy, args)
    run = Run(args)
    if args.resume:
        run.load_checkpoint(policy, optimizer)
    try:
        with run.signals():
            return train_and_report(
                policy, reference, tokenizer, optimizer, train_rows, eval_rows, run, args
            )
    except Interrupted:
        print(
            f"\nstopped after step {run.step}; continue with: python lopti.py --resume {run.folder}",
            file=sys.stderr,
        )
    except KeyboardInterrupt:
        saved = run.checkpoints()
        print(
            f"\nstopped at once; {saved[-1].name if saved else 'the beginning'} is where --resume {run.folder} continues",
            file=sys.stderr,
        )
    return 128 + (run.stop_signal or signal.SIGINT)


def forward_operations(model, tokens, tokens_with_prompts, times=1):
    """Floating-point operations of `times` forward passes over a rollout that make each token's logits once.

    2 for each parameter and token: of the layers on prompts and responses, of the head on responses. Attention's own are not
    counted, and input embeddings are looked up.
    """
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    layers = sum(
        parameter.numel()
        for parameter in model.parameters()
        if parameter is not head and parameter is not embedding
    )
    return 2 * (times * layers * tokens_with_prompts + head.numel() * tokens)


def benchmark(policy, tokenizer, train_rows, args):
    """Time a few steps of GRPO and of Lopti, and print one table: the median of each phase.

    The two take turns, so that a machine that slows down slows both, and the learning rate is 0: both always see the
    same policy, hence with the same seed the same responses.
    """
    methods = {"GRPO": replace(args, eta=0.0), "Lopti": replace(args, eta=args.eta or 0.5)}
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    reference, optimizer = (
        make_reference(policy, args),
        make_optimizer(policy, replace(args, learning_rate=0.0)),
    )
    with tempfile.TemporaryDirectory() as folder:
        unsaved = {"eval_every": 0, "save_every": 0, "output": folder, "quiet": True}
        runs = {
            name: Run(replace(method, name=name, **unsaved)) for name, method in methods.items()
        }
        for step in range(1, args.benchmark + 2):
            for name, method in methods.items():
                torch.manual_seed(args.seed + step)
                train(
                    policy,
                    reference,
                    tokenizer,
                    optimizer,
                    train_rows,
                    [],
                    runs[name],
                    replace(method, steps=step, **unsaved),
                )
        measured = {
            name: run.read_lines("metrics.jsonl")[1:] for name, run in runs.items()
        }  # the first step warms up
    results = {}
    for name, steps in measured.items():
        results[name] = {
            key: statistics.median(step[key] for step in steps)
            for key in steps[0]
            if key.startswith(("seconds/", "rollout/tokens"))
        }
        results[name] |= {
            key: max(step[key] or 0 for step in steps)
            for key in steps[0]
            if key.startswith("peak_memory")
        }
    passes = {
        "scoring": 1 + bool(args.kl_coef),
        "updating": 3,
    }  # a backward pass is two forward passes
    print(
        f"\n{args.model} with {parameters / 1e6:,.1f} million parameters on {policy.device} ({policy.forward_dtype}): ",
        end="",
    )
    print(
        f"{args.prompts_per_step} prompts x {args.group_size} responses, median of {args.benchmark} steps after one to warm up\n"
    )
    print(f"{'method':<8}{'phase':<12}{'seconds':>9}{'tokens/s':>11}{'TFLOP/s':>9}{'peak GiB':>10}")
    for name, found in results.items():
        tokens, whole = found["rollout/tokens"], 0.0
        for phase in ("sampling", "rewarding", "scoring", "updating"):
            seconds = found[f"seconds/{phase}"]
            whole += seconds
            stages = 2 if name == "Lopti" and phase == "updating" else 1
            operations = passes.get(phase, 0) * forward_operations(
                policy, tokens, found["rollout/tokens_with_prompts"], stages
            )
            speed = f"{operations / seconds / 1e12:.2f}" if operations else ""
            print(
                f"{name:<8}{phase:<12}{seconds:>9.3f}{tokens / seconds:>11,.0f}{speed:>9}{found[f'peak_memory_gib/{phase}']:>10.2f}"
            )
        print(
            f"{name:<8}{'whole step':<12}{whole:>9.3f}{tokens / whole:>11,.0f}{'':>9}{found['peak_memory_gib']:>10.2f}"
        )
    ratio = statistics.median(
        lopti["seconds/updating"] / grpo["seconds/updating"]
        for grpo, lopti in zip(measured["GRPO"], measured["Lopti"])
    )
    print(
        f"\nLopti's update takes {ratio:.2f} times GRPO's. tokens/s counts response tokens; TFLOP/s counts 2 operations per parameter"
    )
    print(
        "and token in a forward pass, 4 in a backward pass (the head's on responses only), without padding and recomputation."
    )
    return 0


def comparable_tables(evaluations):
    """{step: table} of the evaluations made like the last one: a resumed run may have been given another --eval-size or --eval-samples."""

    def made(table):
        return {difficulty: (row["prompts"], set(row)) for difficulty, row in table.items()}

    return {
        row["step"]: row["table"]
        for row in evaluations
        if made(row["table"]) == made(evaluations[-1]["table"])
    }


def train_and_report(policy, reference, tokenizer, optimizer, train_rows, eval_rows, run, args):
    """Evaluate, train, evaluate, save, and print the table."""
    started, first_step = time.time(), run.step + 1
    print(
        f"{method_name(args)} on {policy.device}, steps {first_step} to {args.steps}, run folder {run.folder}"
    )
    done = {row["step"] for row in run.read_lines("evaluations.jsonl")}
    if run.step == 0 and 0 not in done:
        run.write_evaluation(0, evaluate(policy, tokenizer, eval_rows, args)[0])
    train(policy, reference, tokenizer, optimizer, train_rows, eval_rows, run, args)
    if args.steps not in done:  # else the run was stopped between its last evaluation and its end
        run.write_evaluation(args.steps, evaluate(policy, tokenizer, eval_rows, args)[0])
    run.save_checkpoint(policy, tokenizer, optimizer)
    with replaced_whole(run.folder / "final") as folder:
        policy.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    tables = comparable_tables(run.read_lines("evaluations.jsonl"))
    shown = {"before": tables[0]} if 0 in tables else {}
    print(
        f"\nAccuracy on held-out prompts, before and after {args.steps} steps of {method_name(args)}, with 95 % intervals\n"
    )
    print(
        evaluation_table({**shown, "after": tables[args.steps]}, TASKS[args.task].difficulty_name)
    )
    accuracy = {
        step: statistics.mean(row["greedy"][0] for row in table.values())
        for step, table in tables.items()
        if step
    }
    best = max(accuracy, key=accuracy.get)
    if accuracy[best] > accuracy[args.steps]:
        print(f"\nBest mean greedy accuracy: {accuracy[best]:.2f} after step {best}")
    print(
        f"\n{time.time() - started:.0f} s in all. {run.folder} holds the metrics, samples and the trained model (final/)."
    )
    return 0


def out_of_memory(error):
    """Whether an exception says that memory ran out: a GPU's has a type of its own, the CPU's is told by its words."""
    return (
        isinstance(error, (torch.OutOfMemoryError, MemoryError))
        or "not enough memory" in str(error)
        or "can't allocate memory" in str(error)
    )


def main(argv=None):
    args = None
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # where the terminal has no α
    try:
        args = parse_arguments(argv)
        return run_command(args)
    except UserError as error:
        print(f"lopti.py: {error}", file=sys.stderr)
    except KeyboardInterrupt:  # before or after training; in between, Run.signals takes care
        print("\nstopped", file=sys.stderr)
        return 130
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        print(
            f"lopti.py: out of memory on {args.device} (at most {peak_memory_gib(choose_device(args.device)) or 0:.1f} GiB were in use): lower "
            f"--tokens-per-microbatch (now {args.tokens_per_microbatch}), --sample-batch-size (now "
            f"{args.sample_batch_size or args.prompts_per_step * args.group_size}) or --max-new-tokens (now {args.max_new_tokens})", file=sys.stderr,
        )  # fmt: skip
    return 2


if __name__ == "__main__":
    sys.exit(main())
