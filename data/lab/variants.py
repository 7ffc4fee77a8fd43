"""lopti.py as two questions of the laboratory need it: with one of its functions replaced.

python data/lab/variants.py --variant random-split --eta 0.5       # random groups, Lopti's sizes
python data/lab/variants.py --variant two-optimizers --eta 0.5     # an AdamW for each group
python data/lab/variants.py --variant without-wording              # an oracle: no wording in it
python data/lab/variants.py --variant measured-alpha               # AR with an α that it measures
python data/lab/variants.py --variant unit-steps --learning-rate 0.05   # gradient descent, no AdamW

--variant can be given more than once.
"""

import argparse
import copy
import math
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti  # isort: skip, before torch

import theory
import torch
import transformers

sys.path.append(str(Path(__file__).resolve().parents[1] / "make"))
import puzzles

update, split_tokens, make_optimizer = lopti.update, lopti.split_tokens, lopti.make_optimizer


def random_split(old_logprobs, mask, eta):
    """Two random groups of response tokens, of the sizes that `lopti.split_tokens` gives.

    >>> first, rest = random_split(torch.tensor([[0.1, 0.9, 0.9]]).log(), torch.ones(1, 3) > 0, 0.5)
    >>> int(first.sum()), int(rest.sum())
    (1, 2)
    """
    low, _ = split_tokens(old_logprobs, mask, eta)
    of_tokens = low[mask]  # (number of response tokens,)
    drawn = of_tokens[torch.randperm(len(of_tokens))]
    first = torch.zeros_like(mask).masked_scatter(mask, drawn)
    return first, mask & ~first


def updated_copy(policy, rollout, stages, args, make_optimizer=make_optimizer):
    """Yields one copy of the policy, with one new optimizer, after the update on each stage."""
    optimizer = make_optimizer(trained := copy.deepcopy(policy), args)
    for tokens in stages:
        update(trained, optimizer, rollout, tokens, args)
        yield trained


def update_with_own_optimizer(policy, optimizer, rollout, tokens, args, stage):
    """`lopti.update`; the stage of likely tokens has an AdamW of its own."""
    if stage == "high":
        if not hasattr(optimizer, "of_likely_tokens"):
            optimizer.of_likely_tokens = make_optimizer(policy, args)
        optimizer = optimizer.of_likely_tokens
    return update(policy, optimizer, rollout, tokens, args, stage)


def unit_steps(policy, args):
    """Gradient descent whose every step has the length --learning-rate: where the theory is exact.

    >>> policy = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = unit_steps(policy, argparse.Namespace(learning_rate=0.5))
    >>> before, policy.weight.grad = policy.weight.clone(), torch.tensor([[3.0, 4.0]])
    >>> optimizer.step()
    >>> (policy.weight - before).detach()
    tensor([[-0.3000, -0.4000]])
    """

    def normalise(optimizer, *_):
        gradients = [weights.grad for weights in policy.parameters() if weights.grad is not None]
        torch._foreach_div_(gradients, torch.nn.utils.get_total_norm(gradients))

    optimizer = torch.optim.SGD(policy.parameters(), lr=args.learning_rate)
    optimizer.register_step_pre_hook(normalise)
    return optimizer


def update_with_measured_alpha(policy, optimizer, rollout, tokens, args, stage):
    """`lopti.update` with AR whose α is measured while it trains, and without AR's bias.

    Takes two gradients of each mini-batch: GRPO's, and that of α = 1 without its bias. What
    MeasuredAlpha says of the weight is `of_unlikely` in metrics.jsonl, a mean over mini-batches.
    """
    if not hasattr(optimizer, "measured"):
        optimizer.measured = theory.MeasuredAlpha()
    settings = {**vars(args), "mini_batch_size": 0, "max_grad_norm": math.inf, "eta": 0.0}
    totals, weights, gradients = Counter(), list(policy.parameters()), []
    recorder = torch.optim.SGD(weights, lr=0.0)  # takes gradients down, leaves the weights alone
    whole = lambda: torch.nn.utils.parameters_to_vector(weight.grad for weight in weights)
    recorder.register_step_pre_hook(lambda *_: gradients.append(whole()))
    for indices in torch.arange(len(tokens)).split(args.mini_batch_size or len(tokens)):
        gradients.clear()
        for alpha in (1.0, 0.0):
            advantages = lopti.reweight_advantages(rollout.unweighted, rollout.old_logprobs, alpha)
            batch = replace(rollout, advantages=advantages).rows(indices)
            one = argparse.Namespace(**settings | {"alpha": alpha, "without_bias": alpha > 0})
            sums = update(policy, recorder, batch, tokens[indices, : batch.ids.shape[1]], one)
        totals.update(sums)
        if len(gradients) == 2:  # else all advantages are 0
            by_pi, gradient = gradients
            step, of_unlikely = optimizer.measured(gradient, by_pi)
            for weight, part in zip(weights, step.split([weight.numel() for weight in weights])):
                weight.grad = part.view_as(weight)
            torch.nn.utils.clip_grad_norm_(weights, args.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            totals["of_unlikely"] += float(of_unlikely)
    return dict(totals)


def wording(ids, tokenizer):
    """Where tokens do not matter to the answer: synonyms in the bundled policy's puzzles, fillers.

    Nowhere with a tokenizer that does not have all these synonyms.
    """
    vocabulary, words = tokenizer.get_vocab(), {*puzzles.WORDING_WORDS}
    words = words | ({*puzzles.FILLERS} & vocabulary.keys()) if words <= vocabulary.keys() else ()
    return torch.isin(ids, ids.new_tensor([vocabulary[word] for word in words]))


def update_without_wording(policy, optimizer, rollout, tokens, args, stage):
    """`lopti.update` without the words that do not matter to the answer: an oracle."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    tokens = tokens & ~wording(rollout.ids, tokenizer)
    return update(policy, optimizer, rollout, tokens, args, stage)


VARIANTS = {
    "random-split": {"split_tokens": random_split},
    "unit-steps": {"make_optimizer": unit_steps},
    "two-optimizers": {"update": update_with_own_optimizer},
    "without-wording": {"update": update_without_wording},
    "measured-alpha": {"update": update_with_measured_alpha},
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--variant", choices=VARIANTS, required=True, action="append")
    chosen, flags = parser.parse_known_args()
    for variant in chosen.variant:
        vars(lopti).update(VARIANTS[variant])
    sys.exit(lopti.main(flags))
