"""Makes the updates of a right port: the functions that check_port.py calls.

Put your own code in the place of these functions. The first five have the names and arguments of
those in lopti.py. They are not imported from there, because check_port.py changes their lines to
simulate the mistakes of mistakes.diff.
"""

from functools import partial

import torch
from torch.nn.utils.rnn import pad_sequence


def group_advantages(rewards, group_size):
    groups = rewards.view(-1, group_size)
    means = groups.mean(1, keepdim=True)
    deviations = groups.std(1, keepdim=True)
    advantages = (groups - means) / (deviations + 1e-6)
    return advantages.flatten()


def reweight_advantages(advantages, old_logprobs, alpha):
    weights = alpha * old_logprobs.exp() + (1 - alpha)
    return weights * advantages


def split_tokens(old_logprobs, mask, eta):
    low = mask & (old_logprobs.exp() < eta)
    return low, mask & ~low


def policy_loss(logprobs, old_logprobs, advantages, clip_low, clip_high, clip_dual):
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    return torch.where(advantages < 0, losses.clamp(max=-clip_dual * advantages), losses)


def kl_estimate(logprobs, ref_logprobs):
    difference = ref_logprobs - logprobs
    difference = difference.clamp(-5, 5)
    estimate = difference.exp() - difference - 1
    estimate = estimate.clamp(max=10)
    return estimate


def run_passes(logprobs, ref_logprobs, mask, parameters, optimizer, case):
    """Makes the passes over the mini-batches; `logprobs()` gives the current ones, (B, T).

    It yields after each optimizer step the norm of its gradient before it is clipped.
    """
    old_logprobs = logprobs().detach()
    rewards = torch.tensor(case["rewards"], dtype=old_logprobs.dtype)
    advantages = group_advantages(rewards, case["group_size"])[:, None] * mask
    advantages = reweight_advantages(advantages, old_logprobs, case["alpha"])
    passes = split_tokens(old_logprobs, mask, case["eta"]) if case["eta"] else [mask]
    mini_batches = torch.arange(len(mask)).split(case["mini_batch_size"])
    clips = (case["clip_low"], case["clip_high"], case["clip_dual"])
    for update_mask in passes:
        for rows in mini_batches:
            new = logprobs()[rows]
            losses = policy_loss(new, old_logprobs[rows], advantages[rows], *clips)
            losses = losses + case["kl_coef"] * kl_estimate(new, ref_logprobs[rows])
            N = mask[rows].sum()  # all response tokens of the mini-batch, in both passes
            loss = (losses * update_mask[rows]).sum() / N
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, case["max_grad_norm"])
            if norm > 0:
                optimizer.step()
            optimizer.zero_grad()
            yield float(norm)


def update(case):
    """Updates a policy that is a table (V, V). Returns the table after each optimizer step."""
    responses = [torch.tensor(response) for response in case["responses"]]
    ids = pad_sequence(responses, batch_first=True, padding_value=-1)  # (B, T)
    mask = ids >= 0
    ids = ids.clamp(min=0)
    before = torch.cat([torch.tensor(case["prompts"])[:, None], ids[:, :-1]], 1)

    def logprobs(logits, temperature=case["temperature"]):
        every_logprob = (logits[before] / temperature).log_softmax(-1)  # (B, T, V)
        return every_logprob.gather(-1, ids[..., None])[..., 0]

    table = torch.tensor(case["table"], dtype=torch.float64, requires_grad=True)
    reference = logprobs(torch.tensor(case["reference"], dtype=torch.float64))
    optimizer = torch.optim.AdamW([table], case["learning_rate"], weight_decay=case["weight_decay"])
    for _ in run_passes(partial(logprobs, table), reference, mask, [table], optimizer, case):
        yield table.detach().clone()


def update_model(model, optimizer, case):
    """Updates a causal language model, which is also the reference. Returns the gradient norms."""
    starts = torch.tensor([[len(prompt)] for prompt in case["prompts"]])  # (B, 1)
    rows = []
    for prompt, response in zip(case["prompts"], case["responses"]):
        rows.append(torch.tensor(prompt + response))
    ids = pad_sequence(rows, batch_first=True, padding_value=-1)  # (B, L), padded on the right
    mask = (ids >= 0) & (torch.arange(ids.shape[1]) >= starts)
    mask = mask[:, 1:]  # the logits after token t speak of token t+1
    ids = ids.clamp(min=0)

    def logprobs(temperature=case["temperature"]):
        logits = model(ids).logits[:, :-1].float()
        every_logprob = (logits / temperature).log_softmax(-1)  # (B, L-1, V)
        return every_logprob.gather(-1, ids[:, 1:, None])[..., 0]

    reference = logprobs().detach()
    parameters = list(model.parameters())
    return list(run_passes(logprobs, reference, mask, parameters, optimizer, case))
