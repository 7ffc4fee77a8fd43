"""lopti: Advantage Reweighting and Low-Probability Token Isolation for GRPO, in one file.

    python lopti.py                             # GRPO on the bundled policy, no GPU needed
    python lopti.py --alpha 0.3 --eta 0.5       # the paper's two methods: α and η
    python lopti.py --task math --eta 0.5       # the same on arithmetic
    python lopti.py @data/kk.flags --alpha 0.3 --eta 0.5     # the paper's setting, one large GPU

Read it beside "Do Not Let Low-Probability Tokens Over-Dominate in RL for LLMs" (arXiv 2505.12929).
A training step (1) is the paper's algorithm box. What it calls follows in the paper's order:

    2. Eq. 1     group_advantages(), policy_loss(): GRPO
    3. Eq. 4     reweight_advantages(): Advantage Reweighting, α
    4. sec. 4.2  split_tokens(), update_stages(): Lopti, η

Then how it is computed: the update (5), log-probabilities (6), sampling (7). Later methods for the
same problem are in 8. The rest is plumbing: fast sampling (9), evaluation (10), the run and its
folder (11), the model (12), the flags (13). rewards.py has the tasks: data, prompts and rewards.

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
import shlex
import shutil
import signal
import sys
import textwrap
import time
from collections import Counter, defaultdict
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

# Threads that wait for work spin, and take processor time from others: beside one busy program
# training stood still. Now they sleep after 1,000 rounds, not 300,000. Set before torch's import.
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "1000"

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from rewards import TASKS, UserError, compute_rewards, load_data, prompt_stream, user_errors

transformers.utils.logging.disable_progress_bar()  # ours is enough
HERE = Path(__file__).resolve().parent

# 1. A training step -------------------------------------------------------------------------------


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
    unweighted: torch.Tensor = None  # (B, L) Â before Eq. 4, for --without-bias
    tokens: torch.Tensor = None  # (B, L) True on the tokens that a pass updates

    def rows(self, indices):
        """Some rows, without the padding that all of them share."""
        length, part = int(self.lengths[indices].max()), {}
        for name, values in vars(self).items():
            if name == "texts":
                part[name] = [values[i] for i in indices]
            elif values is not None:
                part[name] = values[indices] if values.dim() == 1 else values[indices, :length]
        return Rollout(**part)


def training_step(policy, reference, optimizer, tokenizer, prompts, args):
    """One step of GRPO with Advantage Reweighting and Lopti, on a batch of prompts (rows of data).

    The comments 1. to 7. are the steps of the algorithm in README.md. `reference` is None where
    β = 0. Returns the step's metrics, and for each response what was asked, written and earned.
    """
    device, timings = policy.device, {}
    rows = [row for row in prompts for _ in range(args.group_size)]  # one for each response
    with timed("sampling", device, timings):  # 1. o ~ π_old
        texts = [row["prompt"] for row in prompts]
        rollout = sample(policy, tokenizer, texts, args.group_size, args.temperature, args)
    with timed("rewarding", device, timings):  # 2. R
        rewards = torch.tensor(compute_rewards(rollout.texts, rows, args)).to(device)  # (B,)
    with timed("scoring", device, timings):  # 3. π_old and π_ref, before the first update
        old_logprobs, entropies = score(policy, rollout, args, with_entropy=True)  # (B, L) each
        rollout.old_logprobs = old_logprobs
        rollout.ref_logprobs = score(reference, rollout, args)[0] if reference else None
    with timed("updating", device, timings):
        if args.advantage == "grpo":  # 4. Â, Eq. 1
            advantages = group_advantages(rewards, args.group_size)[:, None] * rollout.mask
        else:
            advantages = reinforce_pp_advantages(rewards, rollout.mask)  # (B, L)
        rollout.unweighted = advantages
        rollout.advantages = reweight_advantages(advantages, old_logprobs, args.alpha)  # 5. Eq. 4
        low, high = split_tokens(old_logprobs, rollout.mask, args.eta)  # 6. Lopti
        stages = update_stages(low, high, rollout.mask, args.eta, args.order)
        totals = defaultdict(Counter)  # of each stage, over its optimizer steps
        for stage, tokens in stages * args.passes:  # 7. the optimizer steps, Eq. 1
            totals[stage].update(update(policy, optimizer, rollout, tokens, args, stage))
    metrics = step_metrics(rollout, rewards, entropies, totals, timings, args)
    columns = [row["prompt"] for row in rows], rollout.texts, [row["solution"] for row in rows]
    names = ("prompt", "response", "solution", "reward")
    return metrics, [dict(zip(names, each)) for each in zip(*columns, rewards.tolist())]


# 2. Group-relative advantages and the loss (Eq. 1) ------------------------------------------------


def group_advantages(rewards, group_size):
    """Â_i = (R_i - mean of group) / (standard deviation of group + 1e-6), Eq. 1: (B,) → (B,)

    The deviation is the sample's (divided by G-1). A group whose rewards are all equal gets exactly
    0: rounding noise over a tiny deviation would otherwise become advantages of order one.

    >>> group_advantages(torch.tensor([1., 0., 0., 1., 3., 3.]), group_size=2)
    tensor([ 0.7071, -0.7071, -0.7071,  0.7071,  0.0000,  0.0000])
    """
    if group_size < 2:
        raise ValueError("group_size must be at least 2: advantages are relative to the group")
    groups = rewards.view(-1, group_size)  # (B/G, G)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    all_equal = (groups == groups[:, :1]).all(1, keepdim=True)
    return advantages.masked_fill(all_equal, 0.0).view(-1)


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
    logprobs = logprobs.masked_fill(~tokens, 0.0)  # other places are set to 0
    ratio = (logprobs - old_logprobs.masked_fill(~tokens, 0.0)).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    dual = -advantages * clip_dual  # where Â < 0, a bound from above on the loss
    pessimistic = torch.maximum(unclipped, clipped)  # maximum of losses: minimum of objectives
    token_loss = torch.where(advantages < 0, torch.minimum(pessimistic, dual), pessimistic)
    kl = torch.zeros_like(token_loss)
    if ref_logprobs is not None and kl_coef:
        kl = kl_estimate(logprobs, ref_logprobs)

    def total(values):
        return (values * tokens).sum() / normalizer

    loss = total(token_loss + kl_coef * kl)
    with torch.no_grad():
        clipped_off = clipped > unclipped  # the clip has taken the gradient of this token
        statistics = {
            "policy_loss": total(token_loss),
            "kl": total(kl),  # below with TRL's names: low is 1-ε_l, not π < η
            "clip_ratio/low_mean": total(clipped_off & (advantages < 0)),
            "clip_ratio/high_mean": total(clipped_off & (advantages > 0)),
            "clip_ratio/dual_mean": total((advantages < 0) & (pessimistic > dual)),
            "ratio_mean": total(ratio),
            "updated_share": total(torch.ones_like(ratio)),
        }
    return loss, {name: float(value) for name, value in statistics.items()}


def kl_estimate(logprobs, ref_logprobs):
    """k3 of KL(π_θ‖π_ref) per token: e^d - d - 1 with d = log π_ref - log π_θ. (B, L) → (B, L)

    An estimate from one sampled token that is never negative, and 0 where the two agree. Clamped as
    in the published code; a token with π_ref = 0 (log −∞) is at the clamp and has no gradient.

    >>> kl_estimate(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.5, 0.25]).log())
    tensor([0.0000, 0.1931])
    """
    difference = (ref_logprobs - logprobs).clamp(-5, 5)
    return (difference.exp() - difference - 1).clamp(-10, 10)


# 3. Advantage Reweighting (Eq. 4) -----------------------------------------------------------------


def reweight_advantages(advantages, old_logprobs, alpha):
    """Â ← [α·π + (1-α)]·Â with π = exp(old_logprobs), Eq. 4: (B, L) → (B, L)

    The weight is 1-α at π = 0 and 1 at π = 1: unlikely tokens lose most, whether Â is positive or
    negative. α = 0 changes nothing, to the last bit.

    >>> reweight_advantages(torch.ones(1, 3), torch.tensor([[0.01, 0.5, 1.0]]).log(), alpha=0.3)
    tensor([[0.7030, 0.8500, 1.0000]])
    """
    return (alpha * old_logprobs.exp() + (1 - alpha)) * advantages


# 4. Lopti: isolate the low-probability tokens -----------------------------------------------------


def split_tokens(old_logprobs, mask, eta):
    """The response tokens with π < η and those with π ≥ η, π = exp(old_logprobs): two (B, L) masks.

    >>> split_tokens(torch.tensor([[0.1, 0.5, 0.9]]).log(), torch.tensor([[True] * 3]), eta=0.5)
    (tensor([[ True, False, False]]), tensor([[False,  True,  True]]))
    """
    low = (old_logprobs.exp() < eta) & mask
    return low, mask & ~low


def update_stages(low, high, mask, eta, order="low-high"):
    """The passes over a rollout batch, and what each updates: a list of (stage, tokens (B, L)).

    A pass goes over all mini-batches once. GRPO (η = 0) makes one, on all tokens. Lopti
    (section 4.2) makes two: on the low-probability tokens, then, from the weights that this left,
    on the others. `order="high-low"` is the ablation of Fig. 6b; "low" and "high" are one of the
    two alone (Figs. 1 and 6a).
    """
    if eta == 0:
        return [("all", mask)]
    return [(name, {"low": low, "high": high}[name]) for name in order.split("-")]


# 5. The update: mini-batches (one optimizer step each) of micro-batches (what memory allows) ------

# What `update` adds up, 0 where no step is taken: every line of metrics.jsonl has the same keys.
STATISTICS = ("policy_loss", "kl", "ratio_mean", "updated_share", "grad_norm", "optimizer_steps")
STATISTICS += tuple(f"clip_ratio/{name}_mean" for name in ("low", "high", "dual"))
STATISTICS += ("skipped_steps", "nonfinite_steps", "masked_tokens")


def update(policy, optimizer, rollout, tokens, args, stage="all"):
    """One pass over the mini-batches, which updates `tokens` (B, L); `stage` is their name.

    A mini-batch is one optimizer step. N is the number of its response tokens (with STAPO or 80/20:
    of those they keep), low and high ones together, whatever the micro-batches. A mini-batch whose
    gradient is 0 is skipped, because Adam would move the weights all the same. Returns sums over
    the mini-batches: policy_loss's statistics, the gradient norm, counts.
    """
    totals, rollout = Counter(dict.fromkeys(STATISTICS, 0)), replace(rollout, tokens=tokens)
    for indices in torch.arange(len(tokens)).split(args.mini_batch_size or len(tokens)):
        batch, sums = rollout.rows(indices), Counter()
        batch.mask = tokens_to_keep(policy, batch, args)  # section 8
        normalizer = batch.mask.sum()  # N
        busy = batch.mask.any(1) if args.without_bias else (batch.mask & batch.tokens).any(1)
        if not args.kl_coef:  # a response whose advantages are 0 has no gradient: left out
            busy &= batch.advantages.any(1)
        busy = busy.nonzero().flatten().tolist()
        for rows in micro_batches(busy, batch.lengths, args.tokens_per_microbatch):
            loss, statistics = batch_loss(policy, batch.rows(rows), normalizer, args, stage)
            loss.backward()
            sums.update(statistics)  # a Counter adds
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
        sums["grad_norm"] = float(norm)
        totals["masked_tokens"] += int(rollout.mask[indices].sum() - normalizer)
        if sums["grad_norm"] == 0:
            totals["skipped_steps"] += 1
        elif all(map(math.isfinite, sums.values())):
            optimizer.step()
            totals.update(sums, optimizer_steps=1)
        else:  # what is infinite or not a number must not reach the weights
            totals["nonfinite_steps"] += 1
        optimizer.zero_grad()
    return totals


def batch_loss(policy, batch, normalizer, args, stage="all"):
    """The loss of Eq. 1 on `batch.tokens`, and its statistics: `policy_loss` of the policy now."""
    places = batch.mask if args.without_bias else batch.mask & batch.tokens  # (B, L)
    with mixed_precision(policy, args), gradient_checkpointing(policy, args):
        logits = token_logits(policy, batch.ids, places, args.temperature, args.min_p)  # (M, V)
    loss, statistics = policy_loss(
        token_logprobs(logits, batch.ids, places),
        batch.old_logprobs,
        batch.advantages,
        batch.mask,
        tokens=batch.tokens,
        ref_logprobs=batch.ref_logprobs,
        clip_low=args.clip_low,
        clip_high=args.clip_high,
        clip_dual=args.clip_dual,
        kl_coef=args.kl_coef,
        normalizer=normalizer,
    )
    if args.without_bias:  # section 8
        raw = batch.unweighted[places]
        loss = loss + bias_correction(logits, raw, args.alpha, args.eta, stage) / normalizer
    return loss, statistics


def micro_batches(indices, lengths, size):
    """Cut rows into lists of similar length: one row, or at most `size` tokens with padding."""
    batches, lengths = [], lengths.tolist()
    for index in sorted(indices, key=lengths.__getitem__):
        if not batches or (len(batches[-1]) + 1) * lengths[index] > size:
            batches.append([])
        batches[-1].append(index)
    return batches


def mixed_precision(model, args):
    """Forward passes in bfloat16 where --dtype says so; weights and gradients stay float32."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")


@contextmanager
def gradient_checkpointing(model, args):
    """With the flag: keep each layer's input only, and compute the rest again in the backward pass.

    Not transformers' own switch, which works in training mode only, and so with dropout.
    """
    with ExitStack() as undo:
        for layer in model.modules() if args.gradient_checkpointing else ():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
                undo.callback(delattr, layer, "forward")
        yield


# 6. Log-probabilities: log π(o_t | q, o_<t) at the sampling temperature ---------------------------


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


@torch.no_grad()
def score(model, rollout, args, with_entropy=False):
    """log π and H (or zeros) of every response token, a micro-batch at a time: two of (B, L)."""
    dtype = torch.promote_types(model.dtype, torch.float32)
    logprobs = torch.zeros_like(rollout.mask, dtype=dtype)
    entropies = logprobs.clone()
    for rows in micro_batches(range(len(logprobs)), rollout.lengths, args.tokens_per_microbatch):
        part = rollout.rows(rows)
        with mixed_precision(model, args):
            logits = token_logits(model, part.ids, part.mask, args.temperature, args.min_p)
        length = part.mask.shape[1]
        logprobs[rows, :length] = token_logprobs(logits, part.ids, part.mask)
        if with_entropy:
            entropies[rows, :length] = spread(entropy(logits), part.mask)
    return logprobs, entropies


# 7. Sampling: o_i ~ π_old(· | q), G responses to each prompt --------------------------------------


@torch.no_grad()
def sample(model, tokenizer, prompts, group_size, temperature, args):
    """Sample `group_size` responses to each prompt text with HF `generate` (section 9): a Rollout.

    Rows g·G … g·G+G-1 answer prompt g. Temperature 0 means greedy decoding.
    """
    end_ids, pad_id = end_token_ids(model, tokenizer), tokenizer.pad_token_id
    # Every knob is set here and the model's own settings are put aside: Qwen ships top_k 20,
    # top_p 0.8 and a repetition penalty, and with those we would not sample from the π we score.
    settings = GenerationConfig(max_new_tokens=args.max_new_tokens, repetition_penalty=1.0)
    settings.update(eos_token_id=end_ids, pad_token_id=pad_id, do_sample=temperature > 0)
    if temperature:
        settings.update(temperature=temperature, top_k=0, top_p=1.0, min_p=args.min_p or None)
    prompt_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    prompt_of = torch.arange(len(prompts)).repeat_interleave(group_size)  # (B,)
    parts = prompt_of.split(args.sample_batch_size or len(prompt_of))
    parts = tqdm(parts, desc="sampling", leave=False, disable=None)
    own_settings, model.generation_config = model.generation_config, settings
    try:
        with mixed_precision(model, args):
            generated = [generate(model, tokenizer, prompt_ids, part) for part in parts]
    finally:
        model.generation_config = own_settings
    responses = torch.cat(generated).cpu()  # (B, max_new_tokens)
    in_response, truncated = response_mask(responses, end_ids)
    responses = [ids[own].tolist() for ids, own in zip(responses, in_response)]
    ids, mask, lengths = pack([prompt_ids[i] for i in prompt_of], responses, pad_id)
    without_end = [ids if endless else ids[:-1] for ids, endless in zip(responses, truncated)]
    tensors = [values.to(model.device) for values in (ids, mask, lengths, truncated)]
    return Rollout(*tensors, tokenizer.batch_decode(without_end))


def end_token_ids(model, tokenizer):
    """Every id that ends a response: a model may have several (Qwen2.5-Instruct has two)."""
    end_ids = set()
    for source in (model.generation_config, model.config.get_text_config(), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        end_ids.update(ids if isinstance(ids, list) else [ids])
    return sorted(end_ids - {None})


def response_mask(sampled_ids, end_ids):
    """Which sampled tokens belong to the response: all up to and including the first end token.

    Going by the ids of the end, not by the padding id, keeps the end token where both are the
    same. Returns a mask of the shape of the ids, and truncated (B,): no end token was sampled.

    >>> response_mask(torch.tensor([[5, 2, 2], [5, 6, 7]]), end_ids=[2])
    (tensor([[ True,  True, False],
            [ True,  True,  True]]), tensor([False,  True]))
    """
    is_end = torch.isin(sampled_ids, torch.tensor(end_ids, device=sampled_ids.device))
    return is_end.cumsum(1) - is_end.long() == 0, ~is_end.any(1)


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


# 8. Later methods (REINFORCE++, STAPO, 80/20, safe vocabulary), and our correction of a bias ------


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


def tokens_to_keep(policy, batch, args):
    """The response tokens (B, L) of a mini-batch that STAPO and 80/20 leave to the update.

    They go by the current policy, and their quantiles by the whole mini-batch: hence a forward
    pass of its own, without which the result would depend on the micro-batch size.
    """
    kept = batch.mask
    if args.stapo or args.top_entropy:
        logprobs, entropies = score(policy, batch, args, with_entropy=True)
    if args.stapo:
        inputs = (logprobs, entropies, batch.advantages, batch.mask)
        kept = kept & stapo_mask(*inputs, args.stapo_tau, args.stapo_quantile)
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
    """80/20 (arXiv 2506.01939): keep the share ρ of tokens with the highest entropy: (B, L).

    >>> entropy_mask(torch.tensor([[0.1, 0.9, 0.5, 0.2, 0.3]]), torch.tensor([[True] * 5]), rho=0.2)
    tensor([[False,  True, False, False, False]])
    """
    values = entropies[mask].sort(descending=True).values
    count = round(rho * len(values))
    threshold = values[count - 1] if count else math.inf
    return mask & (entropies >= threshold)


def bias_correction(logits, advantages, alpha, eta, stage="all"):
    """Σ_t Â_t Σ_a m(π(a)) π_θ(a), a scalar: added to the loss it subtracts the bias of a weight.

    Tokens are weighted by m(π): Eq. 4's 1 - α(1-π), and 0 outside the stage. Then, at a prefix s,

        E[m Â ∇log π] = Σ_a m·(Q - V)·∇π(a) + V·∇Σ_a m·π(a),    Q = E[Â | s, a],  V = E[Â | s]

    The last part is the bias. Eq. 4's sharpens the policy where V > 0 and flattens it where V < 0,
    whatever the tokens have to do with the reward; with α = 0 those of Lopti's passes are opposite.
    m = 1 and a weight of prefixes (80/20) have none. Ours, not the paper's. logits (M, V); Â before
    Eq. 4 (M,). m is held fixed and goes by the current π instead of π_old; nothing is clipped.

    >>> bias_correction(torch.tensor([[0.8, 0.2]]).log(), torch.tensor([1.0]), alpha=1.0, eta=0.0)
    tensor(0.6800)
    """
    pi = logits.softmax(-1)  # (M, V)
    low, high = split_tokens(pi.detach().log(), torch.ones_like(pi, dtype=torch.bool), eta)
    in_stage = {"all": low | high, "low": low, "high": high}[stage]
    weights = reweight_advantages(in_stage.float(), pi.detach().log(), alpha)
    return (advantages * (weights * pi).sum(-1)).sum()


def safe_vocabulary(logits, min_p):
    """V_safe = {a : π(a) ≥ ρ·max_b π(b)} with ρ = min_p, as a mask: (..., V) → (..., V).

    Dynamic vocabulary pruning (arXiv 2512.23087). Only its abstract was at hand: min-p, and
    ρ = e^-13 = 2.3e-6, are our reading of it. HF's own min_p samples by the same rule.
    """
    return logits >= logits.max(-1, keepdim=True).values + math.log(min_p)


# 9. Fast sampling: HF `generate` with a key-value cache that has room -----------------------------

STRETCH = 32  # tokens: so often ended responses leave, and the cache has room for as many


def generate(model, tokenizer, prompt_ids, prompt_of):
    """HF `generate`: a response to prompt_ids[i] for each i in prompt_of (N,) → (N, new tokens).

    Draws from the same distribution as one plain call, in less than half the time on a CPU: a
    prompt is read once for its group, responses that have ended leave the batch every `STRETCH`
    tokens, and the key-value cache is not copied for every token.
    """
    settings, first, last = model.generation_config, int(prompt_of[0]), int(prompt_of[-1])
    encoded = {"input_ids": prompt_ids[first : last + 1]}
    encoded = tokenizer.pad(encoded, padding_side="left", return_tensors="pt").to(model.device)
    ids, mask = encoded["input_ids"], encoded["attention_mask"]  # (prompts, P)
    cache = Cache(layer_class_to_replicate=LayerWithRoom)
    if ids.shape[1] > 1:  # `generate` reads the last prompt token itself
        positions = (mask[:, :-1].cumsum(1) - 1).clamp(min=0)  # from 0 at the first after padding
        options = {"position_ids": positions, "past_key_values": cache, "use_cache": True}
        model.base_model(ids[:, :-1], attention_mask=mask[:, :-1], **options)
    rows = (prompt_of - first).to(ids.device)  # (N,) of ids, mask and cache
    unfinished = torch.arange(len(rows), device=ids.device)  # the responses that have not ended
    responses = ids.new_full((len(rows), settings.max_new_tokens), settings.pad_token_id)
    for start in range(0, settings.max_new_tokens, STRETCH):
        ids, mask = ids[rows], mask[rows]
        cache.batch_select_indices(rows)
        options = {"max_new_tokens": min(STRETCH, settings.max_new_tokens - start)}
        ids = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
        new = ids[:, mask.shape[1] :]  # (unfinished responses, new tokens)
        responses[unfinished, start : start + new.shape[1]] = new
        _, endless = response_mask(new, settings.eos_token_id)
        rows = endless.nonzero().squeeze(1)
        if not len(rows):
            break
        mask, unfinished = torch.cat([mask, torch.ones_like(new)], 1), unfinished[rows]
    return responses


class LayerWithRoom(DynamicLayer):
    """One layer of HF's key-value cache, with room for `STRETCH` new tokens behind those it holds.

    DynamicLayer copies all keys and values for each new token; this one writes into the room.
    """

    room = None  # keys and values with their room, (rows, heads, length + room, size) each

    def batch_select_indices(self, indices):
        """Keep these rows; an index may repeat."""
        super().batch_select_indices(indices)
        self.room = None

    def update(self, keys, values, *args, **kwargs):
        """Add the keys and values of new tokens; returns all that attention is to see."""
        keys = keys.to(values.dtype)  # under autocast rotated keys are float32: twice the memory
        if not self.is_initialized:  # the prompts
            return super().update(keys, values)
        length, end = self.keys.shape[2], self.keys.shape[2] + keys.shape[2]
        if self.room is None or end > self.room[0].shape[2]:
            sides = (0, 0, 0, keys.shape[2] + STRETCH)
            self.room = [torch.nn.functional.pad(old, sides) for old in (self.keys, self.values)]
        for states, new in zip(self.room, (keys, values)):
            states[:, :, length:end] = new
        self.keys, self.values = (states[:, :, :end] for states in self.room)
        return self.keys, self.values


# 10. Evaluation -----------------------------------------------------------------------------------


def wilson_interval(mean, count):
    """95 % interval for a share measured on `count` prompts (Wilson's score interval).

    For the mean of values between 0 and 1, such as avg@k, it is rather too wide.

    >>> tuple(round(bound, 3) for bound in wilson_interval(0.5, 100))
    (0.404, 0.596)
    """
    z = 1.959964
    centre = (mean + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def evaluate(policy, tokenizer, rows, args):
    """Accuracy on held-out rows, per difficulty: greedy, avg@k and pass@k, each (mean, low, high).

    The same seed every time, and the training's own random state is left alone. Returns the table
    {difficulty: {"prompts": n, "greedy": ..., "avg@k": ..., "pass@k": ...}} and, for each row, its
    (response, reward), the greedy one first.
    """
    k, device = args.eval_samples, policy.device
    prompts, answers = [row["prompt"] for row in rows], [[] for _ in rows]
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        torch.manual_seed(args.seed + 1)
        for group_size, temperature in [(1, 0), (k, 1.0)] if k else [(1, 0)]:
            texts = sample(policy, tokenizer, prompts, group_size, temperature, args).texts
            rewards = compute_rewards(texts, [row for row in rows for _ in range(group_size)], args)
            for i, answer in enumerate(zip(texts, rewards)):
                answers[i // group_size].append(answer)
    table = {}
    for difficulty in dict.fromkeys(row["difficulty"] for row in rows):
        group = [answers[i] for i, row in enumerate(rows) if row["difficulty"] == difficulty]
        right = [[reward >= args.solved_reward for _, reward in each] for each in group]
        right = torch.tensor(right).double()  # (prompts, 1 + k)
        measures = {"greedy": right[:, 0]}
        if k:
            measures |= {f"avg@{k}": right[:, 1:].mean(1), f"pass@{k}": right[:, 1:].amax(1)}
        means = {measure: values.mean().item() for measure, values in measures.items()}
        table[difficulty] = {"prompts": len(group)}
        table[difficulty] |= {m: (x, *wilson_interval(x, len(group))) for m, x in means.items()}
    return table, answers


def evaluation_table(tables, difficulty_name):
    """The evaluations {title: table} as text: one line for each measure and difficulty."""
    first = next(iter(tables.values()))
    lines = [("", difficulty_name, "prompts", *tables)]
    for measure in [name for name in next(iter(first.values())) if name != "prompts"]:
        for difficulty, row in first.items():
            cells = (table[difficulty][measure] for table in tables.values())
            cells = [f"{mean:.2f} [{low:.2f}, {high:.2f}]" for mean, low, high in cells]
            lines.append((measure, difficulty, row["prompts"], *cells))
        means = ([row[measure][0] for row in table.values()] for table in tables.values())
        cells = [f"{sum(values) / len(values):.2f}{'':13}" for values in means]
        lines.append((measure, "mean", "", *cells))
    columns = "{:<8}{:>8}{:>9}" + "{:>21}" * len(tables)
    return "\n".join(columns.format(*line) for line in lines)


def show_responses(rows, answers, count):
    """Print `count` evaluation prompts, spread over the difficulties, with their responses."""
    for i in range(0, len(rows), max(1, len(rows) // max(1, count)))[:count]:
        print(f"\n--- {rows[i]['prompt']}\nsolution: {rows[i]['solution']}")
        for sampled, (text, reward) in enumerate(answers[i]):
            print(f"\n[{f'sample {sampled}' if sampled else 'greedy'}, reward {reward:g}]\n{text}")


def show_learned(rows, before, after, args):
    """Print the shortest held-out prompt whose greedy answer became right, if there is one."""
    learned = []
    for row, was, now in zip(rows, before, after):
        (old_text, old_reward), (text, reward) = was[0], now[0]  # the greedy answers
        if old_reward < args.solved_reward <= reward:
            learned.append((row["asked"], old_text, text))
    if learned:
        asked, *texts = min(learned, key=lambda each: len(each[0]))
        print(f"\nA prompt that it has learned to answer:\n{textwrap.fill(asked, 99)}")
        for title, text in zip(("before:", "after: "), texts):
            print(title, " ".join(text.rpartition("</think>")[2].split())[:300])


# 11. A run: its metrics, its folder, how it stops and goes on -------------------------------------


@contextmanager
def timed(phase, device, timings):
    """Put the seconds, and on a GPU the peak memory, of a phase of the step into `timings`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize()
        timings[f"peak_memory_gib/{phase}"] = torch.cuda.max_memory_allocated() / 2**30
    timings[f"seconds/{phase}"] = round(time.perf_counter() - started, 4)


def step_metrics(rollout, rewards, entropies, totals, timings, args):
    """One line of metrics.jsonl, with TRL's names where TRL has one. `totals`: {stage: sums}."""
    mask, lengths = rollout.mask, rollout.mask.sum(1).float()
    groups, count = rewards.view(-1, args.group_size), int(mask.sum())
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
    for stage, sums in totals.items():  # means over mini-batches; Lopti's two passes add up
        for name, value in sums.items():
            is_count = name.endswith(("_steps", "_tokens"))
            name = f"grad_norm/{stage}" if name == "grad_norm" else name
            metrics[name] += value if is_count else value / max(1, sums["optimizer_steps"])
    metrics["masked_share"] = metrics["masked_tokens"] / (len(totals) * args.passes * count)
    return {**metrics, **timings}


class Run:
    """The folder runs/NAME: its files config.json and *.jsonl, checkpoints/ and final/."""

    def __init__(self, policy, tokenizer, optimizer, args):
        self.policy, self.tokenizer, self.optimizer, self.args = policy, tokenizer, optimizer, args
        self.step, self.stop_asked, self.evaluating = 0, False, False  # step: the last that is done
        self.answers = {}  # step → the answers of its evaluation
        name = args.name or args.task + time.strftime("-%Y%m%d-%H%M%S-") + str(os.getpid())
        self.folder = Path(args.resume or Path(args.output) / name)
        with user_errors(f"cannot make {self.folder}: --resume it or choose another --name"):
            self.folder.mkdir(parents=True, exist_ok=bool(args.resume))
        self.lock = (self.folder / ".lock").open("w")  # the system unlocks it when the process ends
        if os.name == "posix":
            import fcntl

            with user_errors(f"another process is at work in {self.folder}"):
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if args.resume:
            self.go_on()
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        config = {**vars(args), "resume": "", **versions}
        with replaced_at_once(self.folder / "config.json") as path:
            path.write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")

    def train(self, reference, train_rows, eval_rows):
        """The steps that are not done yet, with evaluations and checkpoints where they are due."""
        args, models = self.args, (self.policy, reference, self.optimizer, self.tokenizer)
        batches = prompt_stream(train_rows, args.prompts_per_step, args.seed, skip=self.step)
        progress = tqdm(range(self.step + 1, args.steps + 1), desc="training", disable=None)
        for step in progress:
            if step == 1 or (args.eval_every and (step - 1) % args.eval_every == 0):
                self.evaluate(eval_rows)
            metrics, responses = training_step(*models, next(batches), args)
            self.step = step
            self.append("metrics.jsonl", metrics)
            for response in responses[:2]:
                self.append("samples.jsonl", response)
            progress.set_postfix(reward=metrics["reward"], accuracy=metrics["accuracy"])
            if metrics["nonfinite_steps"]:
                tqdm.write(f"step {step}: left out an update whose gradient was not finite")
            due = args.save_every and (step % args.save_every == 0 or step == args.steps)
            if due or self.stop_asked:
                self.save_checkpoint()
            if self.stop_asked:
                raise KeyboardInterrupt
        self.evaluate(eval_rows)

    def append(self, file, row):
        """One more line of a file: the step and `row`."""
        with open(self.folder / file, "a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": self.step, **row}) + "\n")

    def read_lines(self, file):
        """The rows of a jsonl file up to the last step that is done, without a partial line."""
        path = self.folder / file
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        return [row for row in map(json.loads, lines) if row["step"] <= self.step]

    def evaluate(self, rows):
        """Evaluate the policy as it is now, once, into evaluations.jsonl."""
        if any(row["step"] == self.step for row in self.read_lines("evaluations.jsonl")):
            return
        self.evaluating = True
        try:
            table, answers = evaluate(self.policy, self.tokenizer, rows, self.args)
        except KeyboardInterrupt:
            self.save_checkpoint()
            raise
        self.evaluating, self.answers[self.step] = False, answers
        self.append("evaluations.jsonl", {"table": table})

    def ask_to_stop(self, number, frame):
        """For Ctrl-C and SIGTERM: stop after this step; in an evaluation or if asked twice, now."""
        if self.evaluating or self.stop_asked:
            raise KeyboardInterrupt
        self.stop_asked = True
        print("\nfinishing this step; once more to stop at once", file=sys.stderr)

    def save_checkpoint(self):
        """Everything that the next step depends on, in checkpoints/step-N; the one before goes."""
        checkpoints, device = self.folder / "checkpoints", self.policy.device
        newest = checkpoints / f"step-{self.step:06d}"
        if newest.exists() or not self.step:
            return
        state = {"step": self.step, "optimizer": self.optimizer.state_dict()}
        state["random"] = {"cpu": torch.get_rng_state()}
        if device.type != "cpu":
            state["random"][device.type] = torch.get_device_module(device).get_rng_state()
        with replaced_at_once(newest) as folder:
            self.policy.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
            torch.save(state, folder / "training_state.pt")
        for old in sorted(checkpoints.glob("step-*"))[:-1]:
            shutil.rmtree(old)

    def go_on(self):
        """Bring policy, optimizer, random numbers and files back to the newest checkpoint."""
        checkpoints = sorted((self.folder / "checkpoints").glob("step-*"))
        if checkpoints:
            self.policy.load_state_dict(load_model(checkpoints[-1], "cpu")[0].state_dict())
            file, kind = checkpoints[-1] / "training_state.pt", self.policy.device.type
            with user_errors(f"{file} is damaged: start a new run from {self.args.model}"):
                state = torch.load(file, weights_only=True, map_location="cpu")
            self.step = state["step"]
            self.optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["random"]["cpu"])
            if kind in state["random"].keys() - {"cpu"}:  # else from another kind of device
                torch.get_device_module(kind).set_rng_state(state["random"][kind])
        elif (self.folder / "final").exists():
            raise UserError(f"{self.folder} has no checkpoint: start a new run from its final/")
        for file in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl"):
            rows = self.read_lines(file)
            with replaced_at_once(self.folder / file) as path:
                path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def report(self, eval_rows):
        """Print what came of it: accuracy, a puzzle, and what the paper speaks of."""
        tables = {row["step"]: row["table"] for row in self.read_lines("evaluations.jsonl")}
        tables = {"before": tables[0], "after": tables[self.step]}
        print(f"\nHeld-out accuracy before and after {self.step} steps, with 95 % intervals\n")
        print(evaluation_table(tables, TASKS[self.args.task].difficulty))
        if self.answers.keys() >= {0, self.step}:  # a resumed run has no answers of before
            show_learned(eval_rows, self.answers[0], self.answers[self.step], self.args)
        if steps := self.read_lines("metrics.jsonl"):
            print("\n" + paper_in_numbers(steps, self.args.eta or 0.5))


def paper_in_numbers(steps, eta):
    """What the lines of metrics.jsonl say of learning and of the paper's claim: lines of text."""

    def ends(name, unit=1, digits=2):
        return " and ".join(f"{unit * step[name]:.{digits}f}" for step in (steps[0], steps[-1]))

    blocks = "".join("▁▂▃▄▅▆▇█"[round(7 * step["accuracy"])] for step in steps)
    text = f"Accuracy in training, step by step: {blocks} {ends('accuracy').replace('and', '→')}"
    share = ends("low_probability_share", 100, 0)
    text += f"\nIn the first and the last step {share} % of the tokens were unlikely (π < {eta:g})."
    if "grad_norm/low" in steps[0] and "grad_norm/high" in steps[0]:  # Lopti
        low, high = ends("grad_norm/low"), ends("grad_norm/high")
        text += f"\nTheir gradient had the length {low}, that of all other tokens {high}."
    return text


@contextmanager
def replaced_at_once(path):
    """Write a file or folder beside `path`, and move it there when it is complete."""
    partial = path.with_name(f".{path.name}.partial")
    with user_errors(f"cannot write {path}; --resume goes on"):  # a full disk, say
        yield partial
        if path.is_dir():
            shutil.rmtree(path)
        os.replace(partial, path)


# 12. The model ------------------------------------------------------------------------------------


def load_model(name, device):
    """Model (weights in float32, in evaluation mode) and tokenizer of a folder or a hub name."""
    with user_errors(f"cannot load the model {name}"):
        tokenizer = AutoTokenizer.from_pretrained(name)
        options = {"dtype": torch.float32, "output_loading_info": True}
        model, report = AutoModelForCausalLM.from_pretrained(name, **options)
        if report["missing_keys"] or report["mismatched_keys"]:
            raise ValueError("its weights do not fit its config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.to(device).eval(), tokenizer


def check_model(model, tokenizer, rows, args):
    """UserError where the model cannot be sampled from, or prompts and responses do not fit it."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", math.inf)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        # Past this length a row's log-probabilities would depend on the longest row beside it.
        limit = rope.get("original_max_position_embeddings", limit)
    ids = tokenizer([row["prompt"] for row in rows], add_special_tokens=False)["input_ids"]
    if max(map(len, ids)) + args.max_new_tokens > limit:
        raise UserError(f"responses may pass {limit} positions: lower --max-new-tokens")
    if not all(ids) or max(map(max, ids)) >= model.get_input_embeddings().num_embeddings:
        raise UserError("a prompt is empty, or has a token that the model has no embedding for")
    with user_errors(f"cannot sample from {args.model}: choose a --model with attention only"):
        if getattr(model, "_is_stateful", False):
            raise ValueError("it keeps a state instead of keys and values")
        two_tokens = argparse.Namespace(**{**vars(args), "max_new_tokens": 2})
        rollout = sample(model, tokenizer, [rows[0]["prompt"]], 2, 0, two_tokens)
        ids = rollout.ids[:1].repeat(2, 1)  # (2, L)
        ids[1, -1] = int(ids[1, -1] == 0)  # another last token: what is before must not change
        before = torch.ones_like(ids, dtype=torch.bool)
        before[:, [0, -1]] = False
        if not torch.allclose(*token_logits(model, ids, before, 1.0).chunk(2), atol=1e-3):
            raise ValueError("it sees the tokens that follow")


def choose_device(name):
    """'auto' → the GPU of this machine, else cpu. Made the current one: each has its own seeds."""
    if name == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        name = found.type if found and found.type != "mps" else "cpu"  # mps: only when asked for
    with user_errors(f"--device {name} cannot be used"):
        device = torch.zeros(1, device=name).device  # with its index
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index)
    return device


def prepare(args):
    """The model on its device, its tokenizer, training and evaluation rows; sets args.dtype."""
    device = choose_device(args.device)
    if args.dtype == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(False)
        args.dtype = "bfloat16" if fast else "float32"
    policy, tokenizer = load_model(args.model, device)
    train_rows, eval_rows = load_data(args, tokenizer)
    check_model(policy, tokenizer, train_rows + eval_rows, args)
    return policy, tokenizer, train_rows, eval_rows


def make_reference(policy, args):
    """π_ref, the policy as it starts, without gradients; None where β = 0.

    In bfloat16 training its linear layers are stored in bfloat16, half the memory: what autocast
    makes of the policy's own, to the last bit, so that the KL begins at exactly 0. Embeddings and
    norms stay in float32, as they do in the policy.
    """
    if not args.kl_coef:
        return None
    reference = copy.deepcopy(policy).requires_grad_(False)
    embedding = reference.get_input_embeddings().weight
    for module in reference.modules() if args.dtype == "bfloat16" else ():
        if isinstance(module, torch.nn.Linear) and module.weight is not embedding:
            module.to(torch.bfloat16)
    return reference


def make_optimizer(policy, args):
    rate, decay = args.learning_rate, args.weight_decay
    return torch.optim.AdamW(policy.parameters(), lr=rate, weight_decay=decay, fused=True)


# 13. Flags and main -------------------------------------------------------------------------------

CONSTANTS = {  # without a flag; `args` has them like all other settings
    "weight_decay": 0.01,  # of AdamW
    "max_grad_norm": 1.0,  # what the norm of a step's gradient is clipped to
    "clip_dual": 10.0,  # c: where Â < 0, a token's loss is at most -c·Â
    "stapo_tau": 0.002,  # τ_p of STAPO
    "stapo_quantile": 0.75,  # which quantile of the candidates' entropies is its τ_h
}
# Defaults of --task math, where they are others.
MATH_SIZES = {"prompts_per_step": 64, "mini_batch_size": 256, "sample_batch_size": 512}


class Parser(argparse.ArgumentParser):
    """Errors are one sentence, without the list of all flags; @FILE stands for the flags in it."""

    def error(self, message):
        raise UserError(f"{message} (python lopti.py --help lists the flags)")

    def flags_of(self, word):
        """What a word stands for: itself, or as @FILE the flags there; # begins a comment."""
        if not word.startswith("@"):
            return [word]
        flags, file = [], word[1:]
        with user_errors(f"cannot read the flags in {file}"):
            lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
        for number, line in enumerate(lines, 1):
            try:
                words = shlex.split(line, comments=True)
                self.parse_args(words)  # a line holds whole flags
            except (UserError, ValueError) as error:  # ValueError: a quotation mark is alone
                raise UserError(f"{file}, line {number}: {error}") from error
            flags += words
        return flags


def number(kind, low, high=math.inf):
    """A type for argparse: an int or float from `low` to `high`."""

    def read(text):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must lie between {low} and {high}, not {text}")
        return value

    read.__name__ = kind.__name__  # argparse says "invalid float value" by it
    return read


def build_parser():
    share, not_negative = number(float, 0, 1), number(float, 0, 1e9)
    count, at_least_1 = number(int, 0, 10**9), number(int, 1, 10**9)
    parser = Parser(
        usage="python lopti.py [flags]    (for example --alpha 0.3 --eta 0.5, the paper's methods)",
        description=__doc__.split("\n\n")[0],
        epilog="@FILE stands for the flags in it: data/kk.flags, data/math.flags are the paper's.",
    )
    parser.set_defaults(**CONSTANTS)

    def add(name, help, default=None, **options):
        if default is False:
            options["action"] = "store_true"
        elif default not in (None, ""):
            help += " (default: %(default)s)"
        group.add_argument(name, help=help, default=default, **options)

    group = parser.add_argument_group("method")
    add("--advantage", "by group or by batch", "grpo", choices=("grpo", "reinforce++"))
    add("--alpha", "α of Advantage Reweighting, Eq. 4", 0.0, type=share)
    add("--eta", "η of Lopti: π < η is updated first", 0.0, type=share)
    orders = ("low-high", "high-low", "low", "high")
    add("--order", "Lopti's passes (Fig. 6a, b)", "low-high", choices=orders)
    add("--without-bias", "ours: subtract the bias of weights by π", False)
    add("--passes", "how often to go over a rollout batch", 1, type=at_least_1)
    add("--stapo", "leave out STAPO's spurious tokens", False)
    add("--top-entropy", "ρ of 80/20, the share kept; the paper: 0.2; 0: off", 0.0, type=share)
    add("--min-p", "ρ of the safe vocabulary; e^-13 is 2.3e-6; 0: off", 0.0, type=share)
    add("--clip-low", "ε_l: the ratio is clipped at 1-ε_l", 0.2, type=not_negative)
    add("--clip-high", "ε_h: the ratio is clipped at 1+ε_h", 0.24, type=not_negative)
    add("--kl-coef", "β; at 0 no reference model is needed", 0.001, type=not_negative)
    group = parser.add_argument_group("sampling")
    add("--prompts-per-step", "prompts in a rollout batch (math: 64)", 16, type=at_least_1)
    add("--group-size", "G: responses to each prompt", 8, type=at_least_1)
    add("--temperature", "T_s, of sampling and every π", 1.0, type=number(float, 0.01, 100))
    add("--max-prompt-length", "longer prompts are dropped", 400, type=at_least_1)
    add("--max-new-tokens", "longest response, in tokens", 256, type=at_least_1)
    add("--sample-batch-size", "responses at a time (math: 512); 0: all", 256, type=count)
    group = parser.add_argument_group("optimisation")
    add("--learning-rate", "of AdamW, constant", 1e-4, type=number(float, 1e-12, 1))
    add("--mini-batch-size", "responses in an optimizer step (math: 256); 0: all", 64, type=count)
    add("--tokens-per-microbatch", "changes memory and speed only", 2048, type=at_least_1)
    add("--gradient-checkpointing", "less memory, a third more time", False)
    add("--steps", "training steps (rollout batches)", 24, type=count)
    group = parser.add_argument_group("model and data")
    add("--task", "Knights and Knaves, or math with \\boxed{}", "kk", choices=TASKS)
    add("--model", "folder or hub name of a causal model; or the bundled one, data/tiny")
    add("--data", "jsonl, json, csv, parquet or hub name:configuration:split; or the task's")
    add("--eval-data", "evaluation rows, in the same forms")
    add("--reward", "your own, f(completions, solution, **columns)", metavar="MODULE:FUNCTION")
    add("--solved-reward", "a response is right from this reward on", type=number(float, -1e9, 1e9))
    add("--people", "kk: sizes of puzzles", [2, 3], type=int, nargs="+")
    dtypes = ("auto", "float32", "bfloat16")
    add("--dtype", "of forward passes; auto: bfloat16 on a GPU that has it", "auto", choices=dtypes)
    add("--device", "auto: a GPU or cpu; mps is untried", "auto")
    group = parser.add_argument_group("evaluation and run folder")
    add("--eval-every", "steps; 0: before and after training only", 0, type=count)
    add("--eval-size", "evaluation prompts per difficulty; 0: all", 100, type=count)
    add("--eval-samples", "k of avg@k and pass@k, at T = 1; 0: greedy only", 4, type=count)
    add("--eval-only", "evaluate the model and stop", False)
    add("--show", "with --eval-only: print so many prompts, answered", 0, type=count)
    add("--save-every", "steps; 0: a checkpoint only when stopped", 10, type=count)
    add("--resume", "go on with a run, by its own settings", "", metavar="runs/NAME")
    add("--name", "of the run folder; a new one otherwise", "")
    add("--output", "where run folders are made", "runs")
    add("--seed", "of everything random", 0, type=number(int, 0, 2**32 - 1))
    return parser


# What --resume takes beside it: nothing that changes what the run means.
FREE_TO_CHANGE = {"resume", "steps", "save_every", "eval_every", "device", "sample_batch_size"}
FREE_TO_CHANGE |= {"tokens_per_microbatch", "gradient_checkpointing"}


def parse_arguments(argv=None):
    """Defaults, then those of the task or of the run to resume, then flags: the later wins."""
    parser = build_parser()
    argv = sys.argv[1:] if argv is None else argv
    argv = [flag for word in argv for flag in parser.flags_of(word)]
    args = parser.parse_args(argv)
    settings = MATH_SIZES if args.task == "math" else {}
    if args.resume:
        with user_errors(f"--resume {args.resume}: name the folder of a run, runs/NAME"):
            config = json.loads((Path(args.resume) / "config.json").read_text(encoding="utf-8"))
            settings = {name: config[name] for name in vars(args)}
    args = parser.parse_args(argv, argparse.Namespace(**settings))
    changed = {name for name, value in settings.items() if getattr(args, name) != value}
    if args.resume and (refused := ", ".join(sorted(changed - FREE_TO_CHANGE))):
        raise UserError(f"--resume cannot change {refused}: start a new run for that")
    if args.eval_only and args.data and not args.eval_data:
        raise UserError("--eval-only evaluates --eval-data: give that instead of --data")
    if args.reward and args.solved_reward is None:
        raise UserError("--reward needs --solved-reward: from which reward on is a response right?")
    if args.solved_reward is None:
        args.solved_reward = TASKS[args.task].solved
    if args.order != "low-high" and not args.eta:
        raise UserError("--order needs --eta above 0 to tell low from high")
    if args.group_size < 2 and args.advantage == "grpo":
        raise UserError("--group-size must be at least 2: GRPO compares responses within a group")
    args.model = args.model or str(HERE / "data" / "tiny")
    return args


def run_command(args):
    """Evaluate, train, evaluate, save, and tell what came of it."""
    started = time.time()
    policy, tokenizer, train_rows, eval_rows = prepare(args)
    if args.eval_only:
        table, answers = evaluate(policy, tokenizer, eval_rows, args)
        show_responses(eval_rows, answers, args.show)
        print("\n" + evaluation_table({"": table}, TASKS[args.task].difficulty))
        return
    torch.manual_seed(args.seed)
    reference = make_reference(policy, args)  # before Run, which may load a checkpoint
    run = Run(policy, tokenizer, make_optimizer(policy, args), args)
    with suppress(ValueError):  # of any thread but the main one
        for asking in (signal.SIGINT, signal.SIGTERM):
            signal.signal(asking, run.ask_to_stop)
    print(f"Steps {run.step + 1} to {args.steps} on {policy.device}, into {run.folder}")
    run.train(reference, train_rows, eval_rows)
    with replaced_at_once(run.folder / "final") as folder:
        policy.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    run.report(eval_rows)
    print(f"\n{time.time() - started:.0f} s in all. {run.folder} holds metrics, samples, final/.")


def exit_code(program, name):
    """Run a program: 0; 2 after one sentence about what its user can mend; 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # where the terminal has no α
    try:
        program()
        return 0
    except (UserError, OSError) as error:  # OSError: a disk that is full or read-only
        print(f"{name}: {error}", file=sys.stderr)
    except torch.OutOfMemoryError:
        flags = "--tokens-per-microbatch, --sample-batch-size or --max-new-tokens"
        print(f"{name}: out of memory: lower {flags}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"\n{name}: stopped; --resume goes on with a training run", file=sys.stderr)
        return 130
    finally:  # Ctrl-C is Python's own again, for whoever calls this from a notebook
        with suppress(ValueError):
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return 2


def main(argv=None):
    return exit_code(lambda: run_command(parse_arguments(argv)), "lopti.py")


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends quietly
    sys.exit(main())
