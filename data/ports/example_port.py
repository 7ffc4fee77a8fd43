"""A right port, as short as PyTorch allows: the functions that check_port.py calls.

Put your own loss, passes and optimizer in the place of these. mistakes.diff lists changes that make
this port wrong. check_port.py makes these changes to find what explains the numbers of a port.
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


def policy_loss(logprobs, old_logprobs, ref_logprobs, advantages, update_mask, mask, case):
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - case["clip_low"], 1 + case["clip_high"])
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    bounded = torch.maximum(objective, case["clip_dual"] * advantages)
    objective = torch.where(advantages < 0, bounded, objective)
    difference = ref_logprobs - logprobs
    difference = difference.clamp(-5, 5)
    kl = difference.exp() - difference - 1
    kl = kl.clamp(max=10)
    losses = case["kl_coef"] * kl - objective
    return (losses * update_mask).sum() / mask.sum()


def run_passes(logprobs, ref, mask, parameters, optimizer, case):
    """Makes the passes over the mini-batches; `logprobs()` gives the current ones, (B, T).

    It yields after each optimizer step the norm of its gradient before it is clipped.
    """
    old = logprobs().detach()
    rewards = torch.tensor(case["rewards"], dtype=old.dtype)
    advantages = group_advantages(rewards, case["group_size"])[:, None] * mask
    advantages = reweight_advantages(advantages, old, case["alpha"])
    passes = split_tokens(old, mask, case["eta"]) if case["eta"] else [mask]
    mini_batches = torch.arange(len(mask)).split(case["mini_batch_size"])
    for update_mask in passes:
        for rows in mini_batches:
            fixed = [each[rows] for each in (old, ref, advantages, update_mask, mask)]
            loss = policy_loss(logprobs()[rows], *fixed, case)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, case["max_grad_norm"])
            if norm > 0:
                optimizer.step()
            optimizer.zero_grad()
            yield float(norm)


def update(case):
    """The update of a policy that is a table (V, V): the table after each optimizer step."""
    responses = [torch.tensor(response) for response in case["responses"]]
    ids = pad_sequence(responses, batch_first=True, padding_value=-1)  # (B, T)
    mask = ids >= 0
    ids = ids.clamp(min=0)
    before = torch.cat([torch.tensor(case["prompts"])[:, None], ids[:, :-1]], 1)

    def logprobs(logits, temperature=case["temperature"]):
        every_logprob = (logits[before] / temperature).log_softmax(-1)  # (B, T, V)
        return every_logprob.gather(-1, ids[..., None])[..., 0]

    table = torch.tensor(case["table"], dtype=torch.float64, requires_grad=True)
    ref = logprobs(torch.tensor(case["reference"], dtype=torch.float64))
    optimizer = torch.optim.AdamW([table], case["learning_rate"], weight_decay=case["weight_decay"])
    for _ in run_passes(partial(logprobs, table), ref, mask, [table], optimizer, case):
        yield table.detach().clone()


def update_model(model, optimizer, case):
    """The update of a causal language model, which is also the reference: the gradient norms."""
    starts = torch.tensor([[len(prompt)] for prompt in case["prompts"]])  # (B, 1)
    rows = []
    for prompt, response in zip(case["prompts"], case["responses"]):
        rows.append(torch.tensor(prompt + response))
    ids = pad_sequence(rows, batch_first=True, padding_value=-1)  # (B, L), padded on the right
    mask = (ids >= 0) & (torch.arange(ids.shape[1]) >= starts)
    ids = ids.clamp(min=0)

    def logprobs():
        logits = model(ids).logits[:, :-1].float()  # those after token t speak of token t+1
        every_logprob = (logits / case["temperature"]).log_softmax(-1)  # (B, L-1, V)
        return every_logprob.gather(-1, ids[:, 1:, None])[..., 0]

    ref = logprobs().detach()
    parameters = list(model.parameters())
    return list(run_passes(logprobs, ref, mask[:, 1:], parameters, optimizer, case))
