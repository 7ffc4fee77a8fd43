"""A right port, as short as PyTorch allows: the functions that check_port.py calls.

The first five have the names, arguments and values of those in lopti.py. They are not imported from
there, because check_port.py changes their lines to simulate mistakes. At the end is what helps to
call a trainer whose update is a single call.

B is the number of responses and T the length of the longest, with padding on the right. Rewards are
(B,), and so is what `group_advantages` returns; all other tensors of level 1 are (B, T).
"""

import copy
from types import SimpleNamespace

import torch
from torch.nn.utils.rnn import pad_sequence


def group_advantages(rewards, group_size):
    groups = rewards.view(-1, group_size)
    means = groups.mean(1, keepdim=True)
    deviations = groups.std(1, keepdim=True)
    advantages = (groups - means) / (deviations + 1e-6)
    advantages = advantages.masked_fill(deviations < 1e-6, 0.0)
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


def run_passes(model, reference, optimizer, case):
    """Makes the passes over the mini-batches of a case, with the policy `model`.

    It yields after each optimizer step the norm of its gradient before it is clipped.
    """
    starts = torch.tensor([[len(prompt)] for prompt in case["prompts"]])  # (B, 1)
    sequences = []
    for prompt, response in zip(case["prompts"], case["responses"]):
        sequences.append(torch.tensor(prompt + response))
    ids = pad_sequence(sequences, batch_first=True, padding_value=-1)  # (B, L), on the right
    mask = (ids >= 0) & (torch.arange(ids.shape[1]) >= starts)
    mask = mask[:, 1:]  # the logits after token t speak of token t+1
    ids = ids.clamp(min=0)

    def logprobs(rows=slice(None), model=model, temperature=case["temperature"]):
        logits = model(ids[rows]).logits[:, :-1]
        every_logprob = (logits / temperature).log_softmax(-1)  # (rows, L-1, V)
        return every_logprob.gather(-1, ids[rows, 1:, None])[..., 0]

    ref_logprobs = logprobs(model=reference).detach()
    old_logprobs = logprobs().detach()
    rewards = torch.tensor(case["rewards"], dtype=old_logprobs.dtype)
    advantages = group_advantages(rewards, case["group_size"])[:, None] * mask
    advantages = reweight_advantages(advantages, old_logprobs, case["alpha"])
    passes = split_tokens(old_logprobs, mask, case["eta"]) if case["eta"] else [mask]
    mini_batches = torch.arange(len(mask)).split(case["mini_batch_size"])
    parameters = list(model.parameters())
    clips = (case["clip_low"], case["clip_high"], case["clip_dual"])
    for update_mask in passes:
        for rows in mini_batches:
            new = logprobs(rows)
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


class Table(torch.nn.Module):
    """The policy of level 2, a table of logits (V, V), as a model: its logits after each token."""

    def __init__(self, rows):
        super().__init__()
        self.rows = torch.nn.Parameter(torch.tensor(rows, dtype=torch.float64))

    def forward(self, ids, **ignored):  # (B, L) → (B, L, V)
        return SimpleNamespace(logits=self.rows[ids])


def update(case):
    """The update of a table: a copy of it after each optimizer step, also if it is skipped."""
    case = case | {"prompts": [[token] for token in case["prompts"]]}
    table = Table(case["table"])
    reference = Table(case["reference"])
    rates = {"lr": case["learning_rate"], "weight_decay": case["weight_decay"]}
    optimizer = torch.optim.AdamW(table.parameters(), **rates)
    for _ in run_passes(table, reference, optimizer, case):
        yield table.rows.detach().clone()


def update_model(model, optimizer, case):
    """The update of a causal language model, which is also the reference.

    It returns the gradient norm of each step, 0 if it is skipped.
    """
    return list(run_passes(model, copy.deepcopy(model), optimizer, case))


# For a trainer whose update is a single call ------------------------------------------------------


def record_tables(optimizer, table):
    """Returns a list that gets a copy of the table after each step that the optimizer makes."""
    tables = []
    step = optimizer.step

    def step_and_record(*arguments, **options):
        result = step(*arguments, **options)
        tables.append(table.detach().clone())
        return result

    optimizer.step = step_and_record
    return tables


def recorded(function, results):
    """Returns the function, changed so that it also puts its results into a list.

    To get the norms at level 3, while your trainer runs (its module is `trainer` here):
    with mock.patch.object(trainer, "clip_grad_norm_", recorded(clip_grad_norm_, norms)):
    """

    def call(*arguments, **options):
        results.append(function(*arguments, **options))
        return results[-1]

    return call
