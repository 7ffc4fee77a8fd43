"""A right port, as short as PyTorch allows: what check_port.py takes at its three levels.

Put your own loss, passes and optimizer in the place of these. mistakes.diff has changes that make
it wrong; check_port.py makes them to find what explains the numbers of another port.
"""

from functools import partial

import torch


def group_advantages(rewards, group_size):
    groups = rewards.view(-1, group_size)
    deviations = groups.std(1, keepdim=True)
    advantages = (groups - groups.mean(1, keepdim=True)) / (deviations + 1e-6)
    return advantages.flatten()


def reweight_advantages(advantages, old_logprobs, alpha):
    return (alpha * old_logprobs.exp() + (1 - alpha)) * advantages


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
    """The passes over the mini-batches; `logprobs()` are the current ones (B, T).

    Yields after each optimizer step the norm of its gradient before it is clipped.
    """
    old = logprobs().detach()
    rewards = torch.tensor(case["rewards"], dtype=old.dtype)
    advantages = group_advantages(rewards, case["group_size"])[:, None] * mask
    advantages = reweight_advantages(advantages, old, case["alpha"])
    passes = split_tokens(old, mask, case["eta"]) if case["eta"] else [mask]
    for update_mask in passes:
        for rows in torch.arange(len(mask)).split(case["mini_batch_size"]):
            fixed = [each[rows] for each in (old, ref, advantages, update_mask, mask)]
            policy_loss(logprobs()[rows], *fixed, case).backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, case["max_grad_norm"])
            if norm > 0:
                optimizer.step()
            optimizer.zero_grad()
            yield float(norm)


def padded(case):
    responses = [torch.tensor(response) for response in case["responses"]]
    ids = torch.nn.utils.rnn.pad_sequence(responses, batch_first=True, padding_value=-1)  # (B, T)
    mask = ids >= 0
    return ids.clamp(min=0), mask


def update(case):
    """The update of a policy that is a table (V, V): the table after each optimizer step."""
    ids, mask = padded(case)
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
    """The update of a causal language model, which is the reference, too: the gradients' norms."""
    ids, mask = padded(case)
    prompt = torch.tensor(case["prompt"]).expand(len(ids), -1)
    rows = torch.cat([prompt, ids], 1)

    def logprobs():
        logits = model(rows).logits[:, len(case["prompt"]) - 1 : -1]  # of the token after each
        every_logprob = (logits.float() / case["temperature"]).log_softmax(-1)
        return every_logprob.gather(-1, ids[..., None])[..., 0]

    ref = logprobs().detach()
    return list(run_passes(logprobs, ref, mask, list(model.parameters()), optimizer, case))
