"""lopti: Advantage Reweighting and Low-Probability Token Isolation for GRPO, in one file.

    python lopti.py                             # plain GRPO on the bundled policy, no GPU needed
    python lopti.py --alpha 0.3 --eta 0.5       # the paper's two methods: α and η
    python lopti.py --task math --eta 0.5       # the same loop on arithmetic
    python lopti.py --preset kk --alpha 0.3 --eta 0.5     # the paper's setting, one large GPU

Read it beside "Do Not Let Low-Probability Tokens Over-Dominate in RL for LLMs" (arXiv 2505.12929).
The method comes first, from the top down. A training step (1) is the paper's algorithm box. What
it calls follows in the order of the paper: advantages and the loss (2, Eq. 1), Advantage
Reweighting (3, Eq. 4), Lopti (4). Then how it is computed: the update (5), log-probabilities (6),
sampling (7); and later methods for the same problem (8). The rest is plumbing: fast sampling (9),
evaluation (10), the run folder (11), the flags (12). rewards.py has the tasks: data files, prompts
and rewards.

What it leaves out of PPO: the value function (the group's mean is the baseline), generalized
advantage estimation, the entropy bonus. Of GRPO: the mean over each response's own tokens (one mean
over all tokens instead). Of large frameworks: several GPUs, inference servers, learning rate
schedules, chats of several turns.

Shapes: B responses (prompts × group size G), L tokens of the longest row, V words of the
vocabulary. A row is a prompt, its response, and padding. Log-probabilities are float32, and −∞
outside the vocabulary that is sampled from. Masks are boolean (B, L): `mask` is True on all
response tokens, `tokens` on those that a pass updates.
"""

import argparse
import copy
import functools
import importlib
import json
import math
import os
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

# Threads that wait for work spin, and take the time of whoever has some: beside one busy program
# training stood still. Now they sleep after 1,000 rounds, not 300,000. Read when torch is imported.
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

# Constants without a flag; `args` has them like all other settings.
CONSTANTS = {
    "weight_decay": 0.01,  # of AdamW
    "max_grad_norm": 1.0,  # what the norm of a step's gradient is clipped to
    "clip_dual": 10.0,  # c: where Â < 0, a token's loss is at most -c·Â
    "stapo_tau": 0.002,  # τ_p of STAPO
    "stapo_quantile": 0.75,  # which quantile of the candidates' entropies is its τ_h
    "eval_temperature": 1.0,  # of the sampled answers in an evaluation
}


# --------------------------------------------------------------------------------------------------
# 1. A training step


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

    def rows(self, indices):
        """Some rows, without the padding that all of them share."""
        length = int(self.lengths[indices].max())
        part = replace(self, lengths=self.lengths[indices], truncated=self.truncated[indices])
        part.texts = [self.texts[i] for i in indices]
        for name in ("ids", "mask", "old_logprobs", "ref_logprobs", "advantages", "unweighted"):
            if getattr(self, name) is not None:
                setattr(part, name, getattr(self, name)[indices, :length])
        return part


def train(policy, reference, tokenizer, optimizer, train_rows, eval_rows, run, args):
    """GRPO with Advantage Reweighting and Lopti, up to `args.steps` steps.

    The comments "1." to "7." are the steps of the algorithm in README.md.
    """
    batches = prompt_stream(train_rows, args.prompts_per_step, args.seed, skip=run.step)
    steps = range(run.step + 1, args.steps + 1)
    progress = tqdm(steps, desc=method_name(args), disable=None)
    for step in progress:
        if step == 1 or (args.eval_every and (step - 1) % args.eval_every == 0):
            run.evaluate(eval_rows)
        timings, device = {}, policy.device
        prompts = next(batches)
        rows = [row for row in prompts for _ in range(args.group_size)]  # one for each response
        with timed("sampling", device, timings):  # 1. o ~ π_old
            texts = [row["prompt"] for row in prompts]
            rollout = sample(policy, tokenizer, texts, args.group_size, args.temperature, args)
        with timed("rewarding", device, timings):  # 2. R
            rewards = torch.tensor(compute_rewards(rollout.texts, rows, args)).to(device)  # (B,)
        with timed("scoring", device, timings):  # 3. π_old and π_ref, before the first update
            old_logprobs, entropies = score(policy, rollout, args, with_entropy=True)  # (B, L) each
            ref_logprobs = score(reference, rollout, args)[0] if reference else None
        with timed("updating", device, timings):
            if args.advantage == "grpo":  # 4. Â, Eq. 1
                advantages = group_advantages(rewards, args.group_size)[:, None] * rollout.mask
            else:
                advantages = reinforce_pp_advantages(rewards, rollout.mask)  # (B, L)
            rollout = replace(
                rollout,
                old_logprobs=old_logprobs,
                ref_logprobs=ref_logprobs,
                advantages=reweight_advantages(advantages, old_logprobs, args.alpha),  # 5. Eq. 4
                unweighted=advantages,
            )
            low, high = split_tokens(old_logprobs, rollout.mask, args.eta)  # 6. Lopti
            stages = update_stages(low, high, rollout.mask, args.eta, args.order)
            stage_totals = [  # 7. the optimizer steps, Eq. 1
                (name, update(policy, optimizer, rollout, tokens, args, name))
                for name, tokens in stages * args.passes
            ]
        metrics = step_metrics(step, rollout, rewards, entropies, stage_totals, timings, args)
        run.end_step(step, metrics, rows, rollout, rewards)
        progress.set_postfix(reward=metrics["reward"], accuracy=metrics["accuracy"])
        if metrics["nonfinite_steps"]:
            tqdm.write(f"step {step}: a gradient was not finite, its optimizer step is left out")


# --------------------------------------------------------------------------------------------------
# 2. Group-relative advantages and the loss (Eq. 1)


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
            "kl": total(kl),
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


# --------------------------------------------------------------------------------------------------
# 3. Advantage Reweighting (Eq. 4)


def reweight_advantages(advantages, old_logprobs, alpha):
    """Â ← [α·π + (1-α)]·Â with π = exp(old_logprobs), Eq. 4: (B, L) → (B, L)

    The weight is 1-α at π = 0 and 1 at π = 1: unlikely tokens lose most, whether Â is positive or
    negative. α = 0 changes nothing, to the last bit.

    >>> reweight_advantages(torch.ones(1, 3), torch.tensor([[0.01, 0.5, 1.0]]).log(), alpha=0.3)
    tensor([[0.7030, 0.8500, 1.0000]])
    """
    return (alpha * old_logprobs.exp() + (1 - alpha)) * advantages


# --------------------------------------------------------------------------------------------------
# 4. Lopti: isolate the low-probability tokens


def split_tokens(old_logprobs, mask, eta):
    """The response tokens with π < η and those with π ≥ η, π = exp(old_logprobs): two (B, L) masks.

    Disjoint, and together the mask. η = 0 leaves the first empty.

    >>> split_tokens(torch.tensor([[0.1, 0.5, 0.9]]).log(), torch.tensor([[True] * 3]), eta=0.5)
    (tensor([[ True, False, False]]), tensor([[False,  True,  True]]))
    """
    low = (old_logprobs.exp() < eta) & mask
    return low, mask & ~low


def update_stages(low, high, mask, eta, order="low-high"):
    """The passes over a rollout batch, and what each updates: a list of (stage, tokens (B, L)).

    A pass goes over all mini-batches once. Plain GRPO (η = 0) makes one, on all tokens. Lopti
    (section 4.2) makes two: on the low-probability tokens, then, from where that led, on the
    others. `order="high-low"` is the ablation of Fig. 6b; "low" and "high" are one of the two alone
    (Figs. 1 and 6a).
    """
    if eta == 0:
        return [("all", mask)]
    return [(name, {"low": low, "high": high}[name]) for name in order.split("-")]


# --------------------------------------------------------------------------------------------------
# 5. The update: mini-batches (one optimizer step each) of micro-batches (what memory allows)

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
    totals = dict.fromkeys(STATISTICS, 0)
    for indices in torch.arange(len(tokens)).split(args.mini_batch_size or len(tokens)):
        batch, sums = rollout.rows(indices), Counter()
        # kept: what N counts; updated: what the loss sums over; scored: whose logits are needed
        kept = tokens_to_keep(policy, batch, args)  # (responses, L of the batch); section 8
        updated = kept & tokens[indices, : kept.shape[1]]
        if not args.kl_coef:  # then a response whose advantages are 0 has no gradient
            updated = updated & batch.advantages.any(1, keepdim=True)
        scored = kept if args.without_bias else updated
        busy = scored.any(1).nonzero().flatten().tolist()  # responses with such a token
        for micro_batch in micro_batches(busy, batch.lengths, args.tokens_per_microbatch):
            part = batch.rows(micro_batch)
            length = part.mask.shape[1]
            places = scored[micro_batch, :length]
            with mixed_precision(policy, args), gradient_checkpointing(policy, args):
                logits = token_logits(policy, part.ids, places, args.temperature, args.min_p)
            loss, statistics = policy_loss(
                token_logprobs(logits, part.ids, places),
                part.old_logprobs,
                part.advantages,
                part.mask,
                tokens=updated[micro_batch, :length],
                ref_logprobs=part.ref_logprobs,
                clip_low=args.clip_low,
                clip_high=args.clip_high,
                clip_dual=args.clip_dual,
                kl_coef=args.kl_coef,
                normalizer=kept.sum(),
            )
            if args.without_bias:  # section 8
                correction = bias_correction(
                    logits, part.unweighted[places], args.alpha, args.eta, stage
                )
                loss = loss + correction / kept.sum()
            loss.backward()
            sums.update(statistics)  # a Counter adds
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
        sums["grad_norm"] = float(norm)
        totals["masked_tokens"] += int((batch.mask & ~kept).sum())
        if sums["grad_norm"] == 0:
            totals["skipped_steps"] += 1
        elif all(map(math.isfinite, sums.values())):
            optimizer.step()
            totals["optimizer_steps"] += 1
            for name, value in sums.items():
                totals[name] += value
        else:  # what is infinite or not a number must not reach the weights
            totals["nonfinite_steps"] += 1
        optimizer.zero_grad()
    return totals


def micro_batches(indices, lengths, size):
    """Cut rows into lists of similar length, each of at most `size` tokens, padding included.

    A row that is longer than that is alone.
    """
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
    """With --gradient-checkpointing: keep each layer's input only, and compute the rest again in
    the backward pass. Less memory, a third more time.

    Not transformers' own switch, which works in training mode only, and so with dropout.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    layers = layers if args.gradient_checkpointing else []
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


# --------------------------------------------------------------------------------------------------
# 6. Log-probabilities: log π(o_t | q, o_<t) at the sampling temperature


def token_logits(model, ids, tokens, temperature, min_p=0.0):
    """The logits, divided by T_s, that each of `tokens` (B, L) of ids (B, L) was drawn from: (M, V)

    M is the number of `tokens`. The temperature is that of sampling: π of Eqs. 1 and 4 is the
    distribution that the tokens come from. Outside the safe vocabulary of `min_p` logits are −∞.
    The output layer gets the hidden states of these M positions only: over a vocabulary of 150,000
    words the logits of all tokens would take more memory than the model.
    """
    positions = tokens.roll(-1, 1)  # logits at t speak of token t+1; the first is no response's

    def select(output_layer, inputs):
        return inputs[0][positions]  # (B, L, hidden size) → (M, hidden size)

    hook = model.get_output_embeddings().register_forward_pre_hook(select)
    try:  # padding is on the right, where a causal model never looks: no attention mask is needed
        logits = model(ids, use_cache=False).logits
    finally:
        hook.remove()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return logits.masked_fill(~safe_vocabulary(logits, min_p), -math.inf) if min_p else logits


def token_logprobs(logits, ids, tokens):
    """log π(o_t | q, o_<t) = logit of o_t - log Σ exp(logits), for M tokens: (M, V) → (B, L)

    0 where `tokens` (B, L) is False.

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


# --------------------------------------------------------------------------------------------------
# 7. Sampling: o_i ~ π_old(· | q), G responses to each prompt


@torch.no_grad()
def sample(model, tokenizer, prompts, group_size, temperature, args):
    """Sample `group_size` responses to each prompt text with HF `generate` (section 9): a Rollout.

    Rows g·G … g·G+G-1 answer prompt g. Temperature 0 means greedy decoding.
    """
    end_ids, pad_id = end_token_ids(model, tokenizer), tokenizer.pad_token_id
    # Every knob is set here and the model's own settings are put aside: Qwen ships top_k 20,
    # top_p 0.8 and a repetition penalty, and with those we would not sample from the π we score.
    drawing = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": args.min_p or None}
    settings = GenerationConfig(
        do_sample=temperature > 0,
        **(drawing if temperature else {}),
        repetition_penalty=1.0,
        max_new_tokens=args.max_new_tokens,
        eos_token_id=end_ids,
        pad_token_id=pad_id,
    )
    prompt_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    prompt_of = torch.arange(len(prompts)).repeat_interleave(group_size)  # (B,)
    own_settings, model.generation_config = model.generation_config, settings
    try:
        with mixed_precision(model, args):
            generated = [
                generate(model, tokenizer, prompt_ids, part, settings)
                for part in prompt_of.split(args.sample_batch_size or len(prompt_of))
            ]
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


# --------------------------------------------------------------------------------------------------
# 8. Later methods (REINFORCE++, STAPO, 80/20, safe vocabulary), and our correction of a bias


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
    whatever the tokens have to do with the reward; the biases of Lopti's two passes are opposite.
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


# --------------------------------------------------------------------------------------------------
# 9. Fast sampling: HF `generate` with a key-value cache that has room


STRETCH = 32  # tokens: so often ended responses leave, and the cache has room for as many


def generate(model, tokenizer, prompt_ids, prompt_of, settings):
    """HF `generate`: a response to prompt_ids[i] for each i in prompt_of (N,) → (N, new tokens).

    Draws from the same distribution as one plain call, in less than half the time on a CPU: a
    prompt is read once for its group, responses that have ended leave the batch every `STRETCH`
    tokens, and the key-value cache is not copied for every token.
    """
    first, last = int(prompt_of[0]), int(prompt_of[-1])
    encoded = {"input_ids": prompt_ids[first : last + 1]}
    encoded = tokenizer.pad(encoded, padding_side="left", return_tensors="pt").to(model.device)
    ids, mask = encoded["input_ids"], encoded["attention_mask"]  # (prompts, P)
    end_ids = torch.tensor(settings.eos_token_id, device=ids.device)
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
        settings_of_stretch = copy.copy(settings)
        settings_of_stretch.max_new_tokens = min(STRETCH, settings.max_new_tokens - start)
        options = {"past_key_values": cache, "generation_config": settings_of_stretch}
        ids = model.generate(ids, attention_mask=mask, **options)
        new = ids[:, mask.shape[1] :]  # (unfinished responses, new tokens)
        responses[unfinished, start : start + new.shape[1]] = new
        rows = (~torch.isin(new, end_ids).any(1)).nonzero().squeeze(1)
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
        """Keep these rows; one may stand several times."""
        if self.is_initialized:
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


# --------------------------------------------------------------------------------------------------
# 10. Evaluation


def wilson_interval(mean, count):
    """95 % interval for a share measured on `count` prompts (Wilson's score interval).

    For the mean of values between 0 and 1, such as avg@k, it errs on the wide side.

    >>> tuple(round(bound, 3) for bound in wilson_interval(0.5, 100))
    (0.404, 0.596)
    """
    z = 1.959964
    centre = (mean + z * z / (2 * count)) / (1 + z * z / count)
    root = math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
    half = z / (1 + z * z / count) * root
    return max(0.0, centre - half), min(1.0, centre + half)


def evaluate(policy, tokenizer, rows, args):
    """Accuracy on held-out rows, per difficulty: greedy, avg@k and pass@k, each (mean, low, high).

    The same seed every time, and the training's own random state is left alone. Returns the table
    {difficulty: {"greedy": ..., "avg@k": ..., "pass@k": ..., "length": ..., "prompts": n}} and, for
    each row, its (response, reward, length), the greedy one first.
    """
    k, device, prompts = args.eval_samples, policy.device, [row["prompt"] for row in rows]
    answers = [[] for _ in rows]
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        torch.manual_seed(args.seed + 1)
        for group_size, temperature in [(1, 0), (k, args.eval_temperature)][: 1 + bool(k)]:
            rollout = sample(policy, tokenizer, prompts, group_size, temperature, args)
            repeated = [row for row in rows for _ in range(group_size)]
            rewards = compute_rewards(rollout.texts, repeated, args)
            for i, answer in enumerate(zip(rollout.texts, rewards, rollout.mask.sum(1).tolist())):
                answers[i // group_size].append(answer)
    table = {}
    for difficulty in dict.fromkeys(row["difficulty"] for row in rows):
        group = [answers[i] for i, row in enumerate(rows) if row["difficulty"] == difficulty]
        numbers = [[(reward, length) for _, reward, length in each] for each in group]
        rewards, lengths = torch.tensor(numbers, dtype=torch.float64).unbind(2)  # (prompts, 1 + k)
        table[difficulty] = {"prompts": len(group), "length": lengths.mean().item()}
        right = (rewards >= args.solved_reward).double()
        measures = {"greedy": right[:, 0]}
        if k:
            measures |= {f"avg@{k}": right[:, 1:].mean(1), f"pass@{k}": right[:, 1:].amax(1)}
        for measure, values in measures.items():
            mean = values.mean().item()
            table[difficulty][measure] = (mean, *wilson_interval(mean, len(group)))
    return table, answers


def evaluation_table(tables, difficulty_name):
    """The evaluations {title: table} as text: one line for each measure and difficulty."""
    first = next(iter(tables.values()))
    titles = "".join(f"{title:>21}" for title in tables)
    lines = [f"{'':<8}{difficulty_name:>8}{'prompts':>9}{titles}"]
    for measure in [name for name in next(iter(first.values())) if "@" in name or name == "greedy"]:
        for difficulty, row in first.items():
            lines.append(f"{measure:<8}{difficulty:>8}{row['prompts']:>9}")
            for table in tables.values():
                mean, low, high = table[difficulty][measure]
                lines[-1] += f"{f'{mean:.2f} [{low:.2f}, {high:.2f}]':>21}"
        lines.append(f"{measure:<8}{'mean':>8}{'':>9}")
        for table in tables.values():
            mean = sum(row[measure][0] for row in table.values()) / len(table)
            lines[-1] += f"{mean:>8.2f}{'':13}"
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------
# 11. Metrics, run folder and model


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


def step_metrics(step, rollout, rewards, entropies, stage_totals, timings, args):
    """One line of metrics.jsonl, with TRL's names where TRL has one."""
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
    steps, sums = Counter(), Counter()
    for name, totals in stage_totals:
        steps[name] += totals["optimizer_steps"]
    for name, totals in stage_totals:  # means over mini-batches; Lopti's two passes add up
        for key, value in totals.items():
            is_count = key.endswith(("_steps", "_tokens"))
            key = f"grad_norm/{name}" if key == "grad_norm" else key
            sums[key] += value if is_count else value / max(1, steps[name])
    sums["masked_share"] = sums["masked_tokens"] / (len(stage_totals) * count)
    return {
        "step": step,
        **{key: float(value) for key, value in metrics.items()},
        **sums,
        **timings,
    }


class Run:
    """The folder runs/NAME: its files config.json and *.jsonl, checkpoints/ and final/."""

    def __init__(self, policy, tokenizer, optimizer, args):
        self.policy, self.tokenizer, self.optimizer, self.args = policy, tokenizer, optimizer, args
        self.step, self.stop_asked, self.evaluating = 0, False, False  # step: the last that is done
        name = args.name or args.task + time.strftime("-%Y%m%d-%H%M%S-") + str(os.getpid())
        self.folder = Path(args.resume or Path(args.output) / name)
        if self.folder.exists() and not args.resume:
            raise UserError(f"{self.folder} is there: --resume it or choose another --name")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = (self.folder / ".lock").open("w")  # the system unlocks it when the process ends
        if os.name == "posix":
            fcntl = importlib.import_module("fcntl")
            with user_errors(f"another process is at work in {self.folder}"):
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if args.resume:
            self.go_on()
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        config = {**vars(args), "resume": "", "method": method_name(args), **versions}
        with replaced_at_once(self.folder / "config.json") as path:
            path.write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")

    def append(self, file, row):
        with open(self.folder / file, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")

    def read_lines(self, file):
        """The rows of a jsonl file up to the last step that is done, without a torn one."""
        path = self.folder / file
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        return [row for row in map(json.loads, lines) if row["step"] <= self.step]

    def end_step(self, step, metrics, rows, rollout, rewards):
        """Write what the step was, save where that is due, stop where that was asked for."""
        self.step = step
        self.append("metrics.jsonl", metrics)
        for row, text, reward in list(zip(rows, rollout.texts, rewards.tolist()))[:2]:
            shown = {"prompt": row["prompt"], "response": text, "solution": row["solution"]}
            self.append("samples.jsonl", {"step": step, **shown, "reward": reward})
        if self.stop_asked or (self.args.save_every and step % self.args.save_every == 0):
            self.save_checkpoint()
        if self.stop_asked:
            raise KeyboardInterrupt

    def evaluate(self, rows):
        """Evaluate the policy as it is now, once, into evaluations.jsonl."""
        if any(row["step"] == self.step for row in self.read_lines("evaluations.jsonl")):
            return
        try:
            self.evaluating = True
            if self.stop_asked:
                raise KeyboardInterrupt
            table, _ = evaluate(self.policy, self.tokenizer, rows, self.args)
        except KeyboardInterrupt:
            self.save_checkpoint()
            raise
        finally:
            self.evaluating = False
        self.append("evaluations.jsonl", {"step": self.step, "table": table})

    def ask_to_stop(self, number, frame):
        """What Ctrl-C and SIGTERM call: finish this step, then stop. In an evaluation, and
        when called twice, stop at once.
        """
        signal.signal(number, signal.default_int_handler)
        if self.evaluating:
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
        if checkpoints := sorted((self.folder / "checkpoints").glob("step-*")):
            self.policy.load_state_dict(load_model(checkpoints[-1], "cpu")[0].state_dict())
            file = checkpoints[-1] / "training_state.pt"
            with user_errors(f"{file} is damaged: start a new run from {self.args.model}"):
                state = torch.load(file, weights_only=True, map_location="cpu")
                self.step, random_states = state["step"], state["random"]
                state = state["optimizer"]
            self.optimizer.load_state_dict(state)
            torch.set_rng_state(random_states["cpu"])
            device = self.policy.device
            if device.type in random_states.keys() - {"cpu"}:  # else from another kind
                torch.get_device_module(device).set_rng_state(random_states[device.type])
        if self.step > self.args.steps:
            raise UserError(f"{self.folder} has done {self.step} steps: give --steps above that")
        for file in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl"):
            rows = self.read_lines(file)
            with replaced_at_once(self.folder / file) as path:
                path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@contextmanager
def replaced_at_once(path):
    """Write a file or folder beside `path`, and move it there when it is complete."""
    partial = path.with_name(f".{path.name}.partial")
    if partial.is_dir():  # a crash left it
        shutil.rmtree(partial)
    with user_errors(f"cannot write {path}; --resume goes on"):  # a full disk, say
        yield partial
        if path.is_dir():
            shutil.rmtree(path)
        os.replace(partial, path)


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


ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}  # kinds of layers


def check_model(model, tokenizer, rows, args):
    """UserError where the model cannot be sampled from, or prompts and responses do not fit it."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if getattr(model, "_is_stateful", False) or kinds - ATTENTION:
        raise UserError(f"{args.model} has layers other than attention: choose another --model")
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
    with user_errors(f"cannot sample from {args.model}: choose another --model"):
        two_tokens = argparse.Namespace(**{**vars(args), "max_new_tokens": 2})
        sample(model, tokenizer, [rows[0]["prompt"]], 2, 0, two_tokens)


def choose_device(name):
    """'auto' → the GPU of this machine, else cpu. Made the current one: each has its own seeds."""
    if name == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        name = found.type if found and found.type != "mps" else "cpu"  # mps: only when asked for
    with user_errors(f"--device {name} cannot be used"):
        place = torch.zeros(1, device=name)
        place.item()  # `meta` holds no numbers
        if place.device.type != "cpu":
            torch.accelerator.set_device_index(place.device.index)
    return place.device


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
    for module in reference.modules():
        is_linear = isinstance(module, torch.nn.Linear) and module.weight is not embedding
        if is_linear and args.dtype == "bfloat16":
            module.to(torch.bfloat16)
    return reference


def make_optimizer(policy, args):
    rate, decay = args.learning_rate, args.weight_decay
    return torch.optim.AdamW(policy.parameters(), lr=rate, weight_decay=decay, fused=True)


# --------------------------------------------------------------------------------------------------
# 12. Flags and main

# A preset is a list of flags that stand before yours. The paper's have the steps of its 5 epochs,
# for math of 5 times its 10,000 problems; our --data is the whole set it drew them from, our model
# 3B instead of 7B. α and η are in none: say them for its method.
# Computed for 80 GB, not run: 3B take 58 GiB and a response of 4,496 tokens .155 GiB of cache, so
# 104 responses fit at a time, and a step's 512 take five decodes. An evaluation (500 prompts, five
# answers each) takes 25: every 50 steps it adds a tenth to the time.
PAPER = """--prompts-per-step 64 --temperature 0.7 --max-new-tokens 4096 --mini-batch-size 256
    --learning-rate 1e-6 --tokens-per-microbatch 4096 --gradient-checkpointing
    --sample-batch-size 104 --eval-every 50 --save-every 20"""
PRESETS = {
    "kk": f"""{PAPER} --model Qwen/Qwen2.5-3B-Instruct --people 3 4 5 6 7 --steps 351
    --data K-and-K/knights-and-knaves:train:3ppl+4ppl+5ppl+6ppl+7ppl
    --eval-data K-and-K/knights-and-knaves:test:3ppl+4ppl+5ppl+6ppl+7ppl""",
    "math": f"""{PAPER} --task math --model Qwen/Qwen2.5-3B --steps 781
    --data agentica-org/DeepScaleR-Preview-Dataset --eval-data HuggingFaceH4/MATH-500::test""",
}


# --task math without a preset: shorter responses, more of them
TINY_MATH = "--prompts-per-step 64 --mini-batch-size 256 --sample-batch-size 512"


class Parser(argparse.ArgumentParser):
    def error(self, message):  # one sentence, without the list of all flags
        raise UserError(f"{message} (python lopti.py --help lists the flags)")


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
    rate, temperature = number(float, 1e-12, 1), number(float, 0.01, 100)
    count, at_least_1, score = number(int, 0), number(int, 1), number(float, -1e9, 1e9)
    parser = Parser(
        usage="python lopti.py [flags]    (for example --alpha 0.3 --eta 0.5, the paper's methods)",
        description=__doc__.split("\n\n")[0],
        epilog=" ".join(f"--preset {name} is {flags}." for name, flags in PRESETS.items())
        + f" --task math without a preset is {TINY_MATH}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.set_defaults(**CONSTANTS)
    add = parser.add_argument
    add("--preset", choices=("tiny", "kk", "math"), default="tiny", help="kk, math: the paper's")
    add = parser.add_argument_group("method").add_argument
    add("--advantage", choices=("grpo", "reinforce++"), default="grpo", help="by group or by batch")
    add("--alpha", type=share, default=0.0, help="α of Advantage Reweighting, Eq. 4")
    add("--eta", type=share, default=0.0, help="η of Lopti: π < η is updated first")
    orders = ("low-high", "high-low", "low", "high")
    add("--order", choices=orders, default="low-high", help="Lopti's passes (Fig. 6a, b)")
    add("--without-bias", action="store_true", help="ours: subtract the bias of weights by π")
    add("--passes", type=at_least_1, default=1, help="how often to go over a rollout batch")
    add("--stapo", action="store_true", help="leave out STAPO's spurious tokens")
    add("--top-entropy", type=share, default=0.0, help="ρ of 80/20, the share kept; paper: 0.2")
    add("--min-p", type=share, default=0.0, help="ρ of the safe vocabulary; e^-13 is 2.3e-6")
    add("--clip-low", type=not_negative, default=0.2, help="ε_l: the ratio is clipped at 1-ε_l")
    add("--clip-high", type=not_negative, default=0.24, help="ε_h: the ratio is clipped at 1+ε_h")
    add("--kl-coef", type=not_negative, default=0.001, help="β; 0 also saves the reference model")
    add = parser.add_argument_group("sampling").add_argument
    add("--prompts-per-step", type=at_least_1, default=16, help="prompts in a rollout batch")
    add("--group-size", type=at_least_1, default=8, help="G: responses to each prompt")
    add("--temperature", type=temperature, default=1.0, help="T_s, of sampling and every π")
    add("--max-prompt-length", type=at_least_1, default=400, help="longer prompts are dropped")
    add("--max-new-tokens", type=at_least_1, default=256, help="longest response, in tokens")
    add("--sample-batch-size", type=count, default=256, help="responses at a time; 0: all")
    add = parser.add_argument_group("optimisation").add_argument
    add("--learning-rate", type=rate, default=1e-4, help="of AdamW, constant")
    add("--mini-batch-size", type=count, default=64, help="responses in an optimizer step; 0: all")
    add("--tokens-per-microbatch", type=at_least_1, default=2048, help="changes memory and speed")
    add("--gradient-checkpointing", action="store_true", help="less memory, a third more time")
    add("--steps", type=count, default=24, help="training steps (rollout batches)")
    add = parser.add_argument_group("model and data").add_argument
    add("--task", choices=TASKS, default="kk", help="Knights and Knaves, or math with \\boxed{}")
    add("--model", default=str(HERE / "data" / "tiny"), help="folder or hub name of a causal model")
    add("--data", help="jsonl, json, csv, parquet or hub name:configuration:split; or the task's")
    add("--eval-data", help="evaluation rows, in the same forms")
    add("--reward", metavar="MODULE:FUNCTION", help="your own, f(completions, solution, **columns)")
    add("--solved-reward", type=score, help="a response counts as right from this reward on")
    add("--people", type=int, nargs="+", default=[2, 3], help="kk: sizes of puzzles")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of forwards")
    add("--device", default="auto", help="auto: a GPU or cpu; mps is untried")
    add = parser.add_argument_group("evaluation and run folder").add_argument
    add("--eval-every", type=count, default=0, help="steps; 0: before and after training only")
    add("--eval-size", type=count, default=100, help="evaluation prompts per difficulty; 0: all")
    add("--eval-samples", type=count, default=4, help="k of avg@k and pass@k, at T = 1")
    add("--eval-only", action="store_true", help="evaluate the model and stop")
    add("--show", type=count, default=0, help="with --eval-only: print so many prompts, answered")
    add("--save-every", type=count, default=10, help="steps; 0: a checkpoint only when stopped")
    add("--resume", default="", metavar="runs/NAME", help="go on with a run, by its own settings")
    add("--name", default="", help="of the run folder; a new one by default")
    add("--output", default="runs", help="where run folders are made")
    add("--seed", type=number(int, 0, 2**32 - 1), default=0, help="of everything random")
    return parser


# What --resume takes beside it: nothing that changes what the run means.
FREE_TO_CHANGE = {"resume", "steps", "save_every", "eval_every", "device", "sample_batch_size"}
FREE_TO_CHANGE |= {"tokens_per_microbatch", "gradient_checkpointing"}


def parse_arguments(argv=None):
    """Defaults, then those of the preset or of the run to resume, then flags: the later wins."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.eval_only and args.data:
        raise UserError("--eval-only evaluates --eval-data: leave out --data, which is not read")
    if args.resume:
        with user_errors(f"--resume {args.resume}: name the folder of a run, runs/NAME"):
            config = json.loads((Path(args.resume) / "config.json").read_text(encoding="utf-8"))
            settings = {name: config[name] for name in vars(args)}
        parser.set_defaults(**settings)
        args = parser.parse_args(argv)
        changed = {name for name in settings if getattr(args, name) != settings[name]}
        if refused := ", ".join(sorted(changed - FREE_TO_CHANGE)):
            raise UserError(f"--resume cannot change {refused}: start a new run for that")
    else:
        preset = PRESETS.get(args.preset, TINY_MATH if args.task == "math" else "")
        args = parser.parse_args([*preset.split(), *argv])
    if args.reward and args.solved_reward is None:
        raise UserError("--reward needs --solved-reward: from which reward on is a response right?")
    if args.solved_reward is None:
        args.solved_reward = TASKS[args.task].solved
    if args.order != "low-high" and not args.eta:
        raise UserError("--order needs --eta above 0 to tell low from high")
    if args.without_bias and not (args.alpha or args.eta):
        raise UserError("--without-bias needs --alpha or --eta above 0: else no weight goes by π")
    if args.group_size < 2 and args.advantage == "grpo":
        raise UserError("--group-size must be at least 2: GRPO compares responses within a group")
    return args


def method_name(args):
    """'GRPO', 'GRPO + AR (α=0.3)', 'GRPO + AR (α=0.3) + Lopti (η=0.5)' and so on."""
    split = {"low-high": "Lopti", "high-low": "reversed Lopti"}.get(
        args.order, f"{args.order} only"
    )
    parts = {
        args.advantage.upper(): True,
        f"AR (α={args.alpha:g})": args.alpha,
        f"{split} (η={args.eta:g})": args.eta,
        "STAPO": args.stapo,
        f"80/20 (ρ={args.top_entropy:g})": args.top_entropy,
        f"min-p (ρ={args.min_p:g})": args.min_p,
        f"{args.passes} passes": args.passes > 1,
        "without bias": args.without_bias,
    }
    return " + ".join(part for part, used in parts.items() if used)


def show_responses(rows, answers, count):
    """Print `count` evaluation prompts, spread over the difficulties, with their responses."""
    for i in range(0, len(rows), max(1, len(rows) // max(1, count)))[:count]:
        print(f"\n--- {rows[i]['prompt']}\nsolution: {rows[i]['solution']}")
        for sampled, (text, reward, _) in enumerate(answers[i]):
            print(f"\n[{f'sample {sampled}' if sampled else 'greedy'}, reward {reward:g}]\n{text}")


def run_command(args):
    """Evaluate, train, evaluate, save, and print the table."""
    started, difficulty_name = time.time(), TASKS[args.task].difficulty
    policy, tokenizer, train_rows, eval_rows = prepare(args)
    if args.eval_only:
        table, answers = evaluate(policy, tokenizer, eval_rows, args)
        show_responses(eval_rows, answers, args.show)
        print("\n" + evaluation_table({"": table}, difficulty_name))
        return
    torch.manual_seed(args.seed)
    reference, optimizer = make_reference(policy, args), make_optimizer(policy, args)
    run = Run(policy, tokenizer, optimizer, args)
    with suppress(ValueError):  # of any thread but the main one
        for asking in (signal.SIGINT, signal.SIGTERM):
            signal.signal(asking, run.ask_to_stop)
    steps = f"steps {run.step + 1} to {args.steps}"
    print(f"{method_name(args)} on {policy.device}, {steps}, {run.folder}")
    train(policy, reference, tokenizer, optimizer, train_rows, eval_rows, run, args)
    if args.save_every:
        run.save_checkpoint()
    run.evaluate(eval_rows)
    with replaced_at_once(run.folder / "final") as folder:
        policy.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    tables = {row["step"]: row["table"] for row in run.read_lines("evaluations.jsonl")}
    print(f"\nAccuracy on held-out prompts, before and after {args.steps} steps, 95 % intervals\n")
    print(evaluation_table({"before": tables[0], "after": tables[args.steps]}, difficulty_name))
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
