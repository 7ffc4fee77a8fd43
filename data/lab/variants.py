r"""lopti.py with one of its functions replaced, which is no method of the paper's.

    python data/lab/variants.py --variant without-bias --alpha 1    # AR without its bias
    python data/lab/variants.py --variant random-split --eta 0.5    # random groups, Lopti's sizes
    python data/lab/variants.py --variant oracle --only '^\W*\w+'   # only the first word is trained
    python data/lab/variants.py --variant plain-sampling            # one call of HF's `generate`

All other flags are lopti.py's. The oracle is told by a regular expression which words matter: it
updates the tokens whose text, in that of their response, touches a match.
"""

import argparse
import functools
import re
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti  # isort: skip, before torch

import torch

update, split_tokens = lopti.update, lopti.split_tokens
tokenizer_of = functools.cache(lopti.AutoTokenizer.from_pretrained)


def random_split(old_logprobs, mask, eta):
    """Two random groups of response tokens, of the sizes that `lopti.split_tokens` gives."""
    in_first = split_tokens(old_logprobs, mask, eta)[0][mask]  # (number of response tokens,)
    drawn = in_first[torch.randperm(len(in_first))]
    first = torch.zeros_like(mask).masked_scatter(mask, drawn)
    return first, mask & ~first


def bias_correction(logits, advantages, alpha, eta, stage="all"):
    """Σ_t Â_t Σ_a m(π(a)) π_θ(a), a scalar: added to the loss it subtracts the bias of a weight.

    Tokens are weighted by m(π): Eq. 4's 1 - α(1-π), and 0 outside the stage. Then, at a prefix s,

        E[m Â ∇log π] = Σ_a m·(Q - V)·∇π(a) + V·∇Σ_a m·π(a),    Q = E[Â | s, a],  V = E[Â | s]

    The last part is the bias. Eq. 4's sharpens the policy where V > 0 and flattens it where V < 0,
    whatever the token did; with α = 0 those of Lopti's passes are opposite. m = 1 and a weight of
    prefixes (80/20) have none. logits (M, V); Â before Eq. 4 (M,). m is held fixed and goes by the
    current π instead of π_old; nothing is clipped.

    >>> bias_correction(torch.tensor([[0.8, 0.2]]).log(), torch.tensor([1.0]), alpha=1.0, eta=0.0)
    tensor(0.6800)
    """
    pi = logits.softmax(-1)  # (M, V)
    low, high = split_tokens(pi.detach().log(), torch.ones_like(pi, dtype=torch.bool), eta)
    in_stage = {"all": low | high, "low": low, "high": high}[stage]
    weights = lopti.reweight_advantages(in_stage.float(), pi.detach().log(), alpha)
    return (advantages * (weights * pi).sum(-1)).sum()


def update_without_bias(policy, optimizer, rollout, tokens, args):
    """`lopti.update`, one mini-batch at a time: it adds its gradient to the correction's."""
    low, _ = split_tokens(rollout.old_logprobs, rollout.mask, args.eta)
    stage = ("low" if torch.equal(tokens, low) else "high") if args.eta else "all"
    rollout = replace(rollout, tokens=tokens)
    totals = Counter()
    for indices in torch.arange(len(tokens)).split(args.mini_batch_size or len(tokens)):
        batch, every = rollout.rows(indices), range(len(indices))
        kept = replace(batch, mask=lopti.tokens_to_keep(policy, batch, args))  # N of them
        for rows in lopti.micro_batches(every, batch.lengths, args.tokens_per_microbatch):
            part = kept.rows(rows)
            at = part.mask
            with lopti.mixed_precision(policy, args):
                logits = lopti.token_logits(policy, part.ids, at, args.temperature, args.min_p)
            weights = lopti.reweight_advantages(1.0, part.old_logprobs[at], args.alpha)
            advantages = (part.advantages[at] / weights).nan_to_num()  # 0/0 outside of --min-p
            loss = bias_correction(logits, advantages, args.alpha, args.eta, stage)
            (loss / kept.mask.sum()).backward()
        totals.update(update(policy, optimizer, batch, batch.tokens, args))
    return totals


def matching(ids, mask, tokenizer, pattern):
    """The tokens (B, L) whose text touches a match of `pattern` in the text of their response."""
    found = torch.zeros_like(mask)
    for row, places in enumerate(mask):
        own = ids[row, places].tolist()
        texts = tokenizer.batch_decode([own[:end] for end in range(len(own) + 1)])
        spans = [match.span() for match in re.finditer(pattern, texts[-1])]
        ends = pairwise(map(len, texts))  # where the text of each token begins and ends
        touched = [any(a < end and start < b for a, b in spans) for start, end in ends]
        found[row, places] = torch.tensor(touched, dtype=torch.bool, device=mask.device)
    return found


def update_what_matters(pattern, policy, optimizer, rollout, tokens, args):
    """`lopti.update` on those of `tokens` that the oracle calls for."""
    matched = matching(rollout.ids, rollout.mask, tokenizer_of(args.model), pattern)
    return update(policy, optimizer, rollout, tokens & matched, args)


if __name__ == "__main__":
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=look, allow_abbrev=False)
    variants = ("without-bias", "random-split", "oracle", "plain-sampling")
    parser.add_argument("--variant", choices=variants, required=True)
    parser.add_argument("--only", metavar="PATTERN")
    own, flags = parser.parse_known_args()
    if (own.variant == "oracle") != bool(own.only):
        parser.error("--only PATTERN belongs to --variant oracle")
    if own.variant == "random-split":
        lopti.split_tokens = random_split
    elif own.variant == "plain-sampling":
        lopti.STRETCH = 10**9
    else:
        oracle = functools.partial(update_what_matters, own.only)
        lopti.update = oracle if own.only else update_without_bias
    sys.exit(lopti.main(flags))
