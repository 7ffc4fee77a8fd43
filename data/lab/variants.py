"""lopti.py as the laboratory runs it: with rewards in its evaluations, and with variants.

python data/lab/variants.py --alpha 0.3                            # as python lopti.py
python data/lab/variants.py --variant reward-free                  # Â = 1 everywhere, with KL
python data/lab/variants.py --variant token-centred --alpha 0.3    # Â minus its token mean
python data/lab/variants.py --variant random-split --eta 0.5       # random groups, Lopti's sizes
python data/lab/variants.py --variant no-momentum                  # AdamW with β₁ = 0
python data/lab/variants.py --variant two-optimizers --eta 0.5     # an AdamW for each group
python data/lab/variants.py --variant without-wording              # an oracle: no wording in it
python data/lab/variants.py --variant without-bias --alpha 1       # the weights' bias subtracted
python data/lab/variants.py --variant without-bias-two-optimizers --eta 0.5
python data/lab/variants.py --set eval_temperature=0.2             # a constant of lopti.py
"""

import argparse
import copy
import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti

sys.path.append(str(Path(__file__).resolve().parents[1] / "make"))
import puzzles

evaluate, update, reweight_advantages = lopti.evaluate, lopti.update, lopti.reweight_advantages
split_tokens, make_optimizer = lopti.split_tokens, lopti.make_optimizer


def evaluate_with_rewards(policy, tokenizer, rows, args):
    """`lopti.evaluate`, with the mean reward of the sampled answers and the share truncated."""
    table, answers = evaluate(policy, tokenizer, rows, args)
    for difficulty, measures in table.items():
        pairs = zip(rows, answers)
        groups = [sampled for row, (_, *sampled) in pairs if row["difficulty"] == difficulty]
        _, rewards, lengths = zip(*(answer for sampled in groups for answer in sampled))
        cut = [length >= args.max_new_tokens for length in lengths]
        for name, values in (("reward", torch.tensor(rewards)), ("cut", torch.tensor(cut).float())):
            mean, half = float(values.mean()), 1.96 * float(values.std()) / len(values) ** 0.5
            measures[name] = (mean, mean - half, mean + half)
    return table, answers


def token_centred(advantages, mask, mini_batch_size):
    """Â minus its mean over the response tokens of each mini-batch: (B, L) → (B, L).

    >>> token_centred(torch.tensor([[2., 2.], [-1., 0.]]), torch.tensor([[1, 1], [1, 0]]) > 0, 2)
    tensor([[ 1.,  1.],
            [-2.,  0.]])
    """
    size = mini_batch_size or len(mask)
    parts = [
        torch.where(counts, values - values[counts].mean(), 0.0)
        for values, counts in zip(advantages.split(size), mask.split(size))
    ]
    return torch.cat(parts)


def update_centred(policy, optimizer, rollout, tokens, args):
    """`lopti.update` on token-centred advantages, reweighted by Eq. 4."""
    centred = copy.copy(rollout)
    advantages = token_centred(rollout.advantages, rollout.mask, args.mini_batch_size)
    centred.advantages = reweight_advantages(advantages, rollout.old_logprobs, args.alpha)
    return update(policy, optimizer, centred, tokens, args)


def constant_advantages(rewards, group_size):
    """Â = 1 for every response, whatever its reward."""
    return torch.ones_like(rewards)


def random_split(old_logprobs, mask, eta):
    """Two random groups of response tokens, of the sizes that `lopti.split_tokens` gives."""
    low, _ = split_tokens(old_logprobs, mask, eta)
    of_tokens = low[mask]  # (number of response tokens,)
    drawn = of_tokens[torch.randperm(len(of_tokens))]
    first = torch.zeros_like(mask).masked_scatter(mask, drawn)
    return first, mask & ~first


def adamw_without_momentum(policy, args):
    optimizer = make_optimizer(policy, args)
    optimizer.param_groups[0]["betas"] = (0.0, 0.999)
    return optimizer


def update_with_own_optimizer(policy, optimizer, rollout, tokens, args, update=update):
    """`lopti.update`; tokens with π ≥ η have an AdamW of their own."""
    if not (tokens & (rollout.old_logprobs.exp() < args.eta)).any():
        if not hasattr(optimizer, "of_likely_tokens"):
            optimizer.of_likely_tokens = make_optimizer(policy, args)
        optimizer = optimizer.of_likely_tokens
    return update(policy, optimizer, rollout, tokens, args)


def update_without_wording(policy, optimizer, rollout, tokens, args):
    """`lopti.update` without the words that do not matter to the answer: an oracle."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    wording = torch.tensor(tokenizer.convert_tokens_to_ids(puzzles.WORDING_WORDS))
    tokens = tokens & ~torch.isin(rollout.ids, wording)
    return update(policy, optimizer, rollout, tokens, args)


def weighted_mass(logits, alpha, eta, stage):
    """Σ_a m(π(a)) π_θ(a) over the vocabulary, (N, V) → (N,), with m held fixed.

    m(π) = απ + 1 - α, and 0 for the tokens that the stage leaves out. The gradient of V(s) times
    this is the bias of a weight that goes by π: E[m Â ∇log π | s] = Σ_a m (Q - V) ∇π + V ∇Σ_a m π.

    >>> weighted_mass(torch.zeros(1, 2), alpha=1.0, eta=0.0, stage="all")
    tensor([0.5000])
    """
    probabilities = logits.softmax(-1)
    weights = alpha * probabilities.detach() + 1 - alpha
    if stage != "all":
        weights = weights * ((probabilities.detach() < eta) == (stage == "low"))
    return (weights * probabilities).sum(-1)


def update_without_bias(policy, optimizer, rollout, tokens, args):
    """`lopti.update` with the loss + 1/N Σ_t Â_t Σ_a m(π(a)) π_θ(a) over all response tokens.

    Â is that before Eq. 4, and E[Â | s] = V(s): so the bias is subtracted in expectation. m goes by
    the current policy, and nothing is clipped in this term.
    """
    unlikely = rollout.old_logprobs.exp() < args.eta
    stage = "all" if not args.eta else "low" if (tokens & unlikely).any() else "high"
    totals = dict.fromkeys(lopti.STATISTICS, 0)
    for indices in torch.arange(len(tokens)).split(args.mini_batch_size or len(tokens)):
        batch, sums = rollout.rows(indices), lopti.Counter()
        normalizer = batch.mask.sum()
        rows = range(len(batch.mask))
        for micro_batch in lopti.micro_batches(rows, batch.lengths, args.tokens_per_microbatch):
            part = batch.rows(micro_batch)
            part_tokens = tokens[indices][micro_batch, : part.mask.shape[1]]
            logits = lopti.token_logits(policy, part.ids, part.mask, args.temperature)  # (N, V)
            logprobs = lopti.token_logprobs(logits, part.ids, part.mask)
            weighted = reweight_advantages(part.advantages, part.old_logprobs, args.alpha)
            settings = {"tokens": part_tokens, "ref_logprobs": part.ref_logprobs}
            settings |= {"kl_coef": args.kl_coef, "normalizer": normalizer}
            loss, statistics = lopti.policy_loss(
                logprobs, part.old_logprobs, weighted, part.mask, **settings
            )
            mass = weighted_mass(logits, args.alpha, args.eta, stage)  # (N,)
            (loss + (part.advantages[part.mask] * mass).sum() / normalizer).backward()
            sums.update(statistics)
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
        sums["grad_norm"] = float(norm)
        optimizer.step()
        optimizer.zero_grad()
        totals["optimizer_steps"] += 1
        for name, value in sums.items():
            totals[name] += value
    return totals


def update_without_bias_own_optimizer(policy, optimizer, rollout, tokens, args):
    """Both: the bias subtracted, and an AdamW for each group."""
    return update_with_own_optimizer(
        policy, optimizer, rollout, tokens, args, update=update_without_bias
    )


UNWEIGHTED = {"reweight_advantages": lambda advantages, *_: advantages}  # `update` does it
VARIANTS = {
    "without-bias": {**UNWEIGHTED, "update": update_without_bias},
    "without-bias-two-optimizers": {**UNWEIGHTED, "update": update_without_bias_own_optimizer},
    "random-split": {"split_tokens": random_split},
    "no-momentum": {"make_optimizer": adamw_without_momentum},
    "two-optimizers": {"update": update_with_own_optimizer},
    "without-wording": {"update": update_without_wording},
    "reward-free": {"group_advantages": constant_advantages},
    "token-centred": {**UNWEIGHTED, "update": update_centred},
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--variant", choices=VARIANTS)
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE")
    chosen, flags = parser.parse_known_args()
    changed = (setting.split("=") for setting in chosen.set)
    lopti.CONSTANTS.update({name: float(value) for name, value in changed})
    vars(lopti).update(VARIANTS.get(chosen.variant, {}), evaluate=evaluate_with_rewards)
    sys.exit(lopti.main(flags))
