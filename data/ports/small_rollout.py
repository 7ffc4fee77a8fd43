"""What the ports are checked against: a small rollout batch and its update by lopti.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti  # isort: skip, before torch

import torch

SETTINGS = {"prompts_per_step": 4, "group_size": 4, "mini_batch_size": 8, "temperature": 1.2}
SETTINGS |= {"kl_coef": 0.1, "max_new_tokens": 60, "max_grad_norm": 1000.0, "learning_rate": 1e-4}
SETTINGS |= {"device": "cpu", "dtype": "float32"}


def arguments(**changes):
    args = lopti.parse_arguments([])
    vars(args).update(SETTINGS | changes)
    return args


def moved_policy(args):
    """The bundled model, moved a little from its reference, which TRL loads from the folder."""
    policy, tokenizer = lopti.load_model(args.model, "cpu")
    torch.manual_seed(0)
    for weight in policy.parameters():
        weight.data += 0.02 * weight.std() * torch.randn_like(weight)
    return policy, tokenizer


def sampled_rollout(args):
    """16 responses to 4 puzzles; the group with the unlikeliest token comes first."""
    policy, tokenizer = moved_policy(args)
    prompts = [row["prompt"] for row in lopti.load_data(args, tokenizer)[0][:4]]
    rollout = lopti.sample(policy, tokenizer, prompts, 4, args.temperature, args)
    rollout.old_logprobs = lopti.score(policy, rollout, args)[0]
    reference = lopti.load_model(args.model, "cpu")[0]
    rollout.ref_logprobs = lopti.score(reference, rollout, args)[0]
    groups = rollout.old_logprobs.view(4, -1).min(1).values.argsort()
    return rollout.rows((groups[:, None] * 4 + torch.arange(4)).flatten().tolist())


def prompts_and_responses(rollout):
    """The token ids of each row without padding: two lists of B tensors."""
    starts = rollout.lengths - rollout.mask.sum(1)
    prompts = [ids[:start] for ids, start in zip(rollout.ids, starts)]
    return prompts, [ids[mask] for ids, mask in zip(rollout.ids, rollout.mask)]


def recorded(optimizer):
    """A list that gets the gradient of every step that has one."""
    gradients, weights = [], optimizer.param_groups[0]["params"]

    def record(*_):
        if weights[0].grad is not None:
            gradients.append(torch.cat([weight.grad.flatten() for weight in weights]))

    optimizer.register_step_pre_hook(record)
    return gradients


def update_with_lopti(args, rollout, advantages):
    policy, _ = moved_policy(args)
    optimizer = lopti.make_optimizer(policy, args)
    gradients, old, mask = recorded(optimizer), rollout.old_logprobs, rollout.mask
    rollout.advantages = lopti.reweight_advantages(advantages[:, None] * mask, old, args.alpha)
    for tokens in lopti.split_tokens(old, mask, args.eta) if args.eta else [mask]:  # low, high
        lopti.update(policy, optimizer, rollout, tokens, args)
    return gradients, flat(policy)


def flat(policy):
    return torch.cat([weight.detach().flatten() for weight in policy.parameters()])


def order_of_rows(args, processes):
    """The rows of an engine's mini-batches, one after the other: of each process the same share."""
    shares = torch.arange(16).view(processes, -1, args.mini_batch_size // processes)
    return shares.transpose(0, 1).flatten()


def difference(a, b):
    return ((a - b).norm() / b.norm()).item()


def tensor_of(values):
    return torch.tensor(values, dtype=torch.float64)
