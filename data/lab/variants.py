"""lopti.py as the laboratory runs it: with rewards in its evaluations, and with variants.

python data/lab/variants.py --alpha 0.3                            # as python lopti.py
python data/lab/variants.py --variant reward-free                  # Â = 1 everywhere, with KL
python data/lab/variants.py --variant token-centred --alpha 0.3    # Â minus its token mean
python data/lab/variants.py --variant random-split --eta 0.5       # random groups, Lopti's sizes
python data/lab/variants.py --variant no-momentum                  # AdamW with β₁ = 0
python data/lab/variants.py --variant two-optimizers --eta 0.5     # an AdamW for each group
python data/lab/variants.py --variant without-wording              # an oracle: no wording in it
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


def update_centred(policy, optimizer, rollout, tokens, args, stage):
    """`lopti.update` on token-centred advantages, reweighted by Eq. 4."""
    centred = copy.copy(rollout)
    advantages = token_centred(rollout.advantages, rollout.mask, args.mini_batch_size)
    centred.advantages = reweight_advantages(advantages, rollout.old_logprobs, args.alpha)
    return update(policy, optimizer, centred, tokens, args, stage)


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


def update_with_own_optimizer(policy, optimizer, rollout, tokens, args, stage):
    """`lopti.update`; the stage of likely tokens has an AdamW of its own."""
    if stage == "high":
        if not hasattr(optimizer, "of_likely_tokens"):
            optimizer.of_likely_tokens = make_optimizer(policy, args)
        optimizer = optimizer.of_likely_tokens
    return update(policy, optimizer, rollout, tokens, args, stage)


def update_without_wording(policy, optimizer, rollout, tokens, args, stage):
    """`lopti.update` without the words that do not matter to the answer: an oracle."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    vocabulary = tokenizer.get_vocab()  # of most policies without the fillers
    words = {*puzzles.WORDING_WORDS, *puzzles.FILLERS} & vocabulary.keys()
    wording = torch.tensor(sorted(map(vocabulary.get, words)), device=rollout.ids.device)
    tokens = tokens & ~torch.isin(rollout.ids, wording)
    return update(policy, optimizer, rollout, tokens, args, stage)


VARIANTS = {
    "random-split": {"split_tokens": random_split},
    "no-momentum": {"make_optimizer": adamw_without_momentum},
    "two-optimizers": {"update": update_with_own_optimizer},
    "without-wording": {"update": update_without_wording},
    "reward-free": {"group_advantages": constant_advantages},
    "token-centred": {
        "reweight_advantages": lambda advantages, *_: advantages,
        "update": update_centred,
    },
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
