"""What the paper's figures measure, on any policy and task: computed here, drawn elsewhere.

`figure_1`, `figure_2` and `figure_3` return plain dictionaries of numbers that can be written as
JSON. The notebook calls them on the bundled policy, real_model.py on a language model. Words,
treatments and open questions are the notebook's.
"""

import copy
import functools
import itertools
import math
import random
import sys
from ast import literal_eval
from pathlib import Path

import experiments
import numpy as np
import theory
import torch

import lopti

sys.path.append(str(Path(__file__).resolve().parents[1] / "make"))
import puzzles

RESULTS = Path(__file__).resolve().parent / "results"
EDGES = (0.0, 0.25, 0.5, 0.75, 1.1)  # of the four bins of π
QUANTILES = np.linspace(0.005, 0.995, 34)  # what a violin is drawn from

METHODS = {  # name -> what differs from plain GRPO
    "GRPO": {},
    "GRPO, two passes": {"passes": 2},
    "AR": {"alpha": 0.3},
    "Lopti": {"eta": 0.5},
}


def changed(settings, **changes):
    """A copy of lopti's arguments or of a Rollout with some attributes changed."""
    result = copy.copy(settings)
    vars(result).update(changes)
    return result


# ---- one rollout batch


def collect(policy, tokenizer, rows, args, seed=0):
    """One rollout batch, made as `lopti.train` makes it: sample, judge, score, advantages.

    Returns the rollout, the rewards (B,), the sampling policy's scores, and each response's row.
    """
    torch.manual_seed(seed)
    batch = [row for row in rows for _ in range(args.group_size)]
    rollout = lopti.sample(
        policy, tokenizer, [row["prompt"] for row in rows], group_size=args.group_size,
        max_new_tokens=args.max_new_tokens, temperature=args.temperature,
    )  # fmt: skip
    rewards = torch.tensor(
        lopti.compute_rewards(rollout.texts, batch, args), device=rollout.mask.device
    )
    old = lopti.score(policy, rollout, args.temperature, args.tokens_per_microbatch)
    rollout.old_logprobs = old.logprobs
    rollout.advantages = (
        lopti.group_advantages(rewards, args.group_size)[:, None] * rollout.mask
    )  # (B, T)
    return rollout, rewards, old, batch


def bins_of(pi, mask):
    """Four masks (B, T): the tokens with π in [0, .25), [.25, .5), [.5, .75), [.75, 1]."""
    return [mask & (pi >= low) & (pi < high) for low, high in itertools.pairwise(EDGES)]


def shares_of(bins, mask):
    """Which share of all tokens each bin holds."""
    return [int(tokens.sum()) / int(mask.sum()) for tokens in bins]


# ---- what an update does to the probabilities


def probabilities(model, rollout, args):
    """π of every token (B, T) in float64: many changes of an update are too small for float32."""
    twin = copy.deepcopy(model).double()
    for module in twin.modules():
        if type(module).__name__.endswith("RMSNorm"):  # as it is written it goes through float32
            module.forward = functools.partial(
                torch.nn.functional.rms_norm,
                normalized_shape=module.weight.shape,
                weight=module.weight,
                eps=module.variance_epsilon,
            )
    scores = lopti.score(
        twin, rollout, args.temperature, args.tokens_per_microbatch, with_entropy=False
    )
    return scores.logprobs.exp()


def probabilities_after(policy, stages, rollout, args, optimizer):
    """π of every token after each stage of an update, (B, T) each; the policy is left as it is.

    `stages` as `lopti.update_stages` returns them; `optimizer` makes one for a policy.
    """
    trained, results = copy.deepcopy(policy), []
    steps = optimizer(trained)
    for _, tokens in stages:
        lopti.update(trained, steps, rollout, tokens, args)
        results.append(probabilities(trained, rollout, args))
    return results


def gradient_norm(policy, tokens, rollout, args):
    """‖∇ loss‖ with only `tokens` in the loss, before any clip: at step size 0 nothing moves."""
    still = torch.optim.SGD(policy.parameters(), lr=0)
    return lopti.update(policy, still, rollout, tokens, one_free_step(args)).get("grad_norm", 0.0)


def gradient(policy, tokens, rollout, args):
    """∇ loss as one long vector when only `tokens` are in it: what a step of size 1 takes away.

    In float64, so that sums over its 10⁸ entries are exact.
    """
    twin = copy.deepcopy(policy)
    return -weight_step(twin, sgd(1.0)(twin), rollout, tokens, one_free_step(args)).double()


def one_free_step(args):
    """The simplest update: one mini-batch, no KL, no clip of the norm to change its gradient."""
    return changed(args, kl_coef=0.0, mini_batch_size=0, max_grad_norm=math.inf)


def sgd(rate):
    """Plain gradient descent, as the paper's Fig. 1 has it."""
    return lambda policy: torch.optim.SGD(policy.parameters(), lr=rate)


def adamw(args):
    """The optimizer of training, with nothing remembered yet."""
    return lambda policy: lopti.make_optimizer(policy, args)


# ---- signal or noise?


def parts_of(tokenizer, rollout):
    """Name -> tokens (B, T): the four bins, and the lowest one cut into wording and the rest."""
    wording_ids = torch.tensor(tokenizer.convert_tokens_to_ids(puzzles.WORDING_WORDS))
    wording = torch.isin(rollout.response_ids, wording_ids)  # (B, T)
    bins = bins_of(rollout.old_logprobs.exp(), rollout.mask)
    names = ("π < .25", ".25–.5", ".5–.75", "π ≥ .75")
    parts = {"π < .25, wording": bins[0] & wording, "π < .25, all else": bins[0] & ~wording}
    return {"all": rollout.mask, **dict(zip(names, bins)), **parts}


def agreement(gradients):
    """What the gradients (N, D) of N batches have in common: (norm, cosine, half, signal).

    Their mean norm; the mean cosine of two of them, with half of its 95 % interval by the jackknife
    over batches; and the norm of the expected gradient, √(mean of g_i·g_j over i ≠ j), which is the
    part of the norm that does not average out.

    >>> [round(x, 1) for x in agreement(torch.eye(2)[[0, 1, 0]])]
    [1.0, 0.3, 2.9, 0.6]
    """
    dots = gradients @ gradients.T  # (N, N)
    norms, batches = dots.diag().sqrt(), range(len(dots))
    cosines = dots / norms / norms[:, None]

    def off_diagonal(matrix):
        pairs = len(matrix) * (len(matrix) - 1)
        return float(matrix.sum() - matrix.trace()) / pairs if pairs else math.nan

    others = [[j for j in batches if j != i] for i in batches]
    _, half = experiments.mean_and_half([off_diagonal(cosines[rows][:, rows]) for rows in others])
    signal = math.sqrt(max(off_diagonal(dots), 0.0))
    return float(norms.mean()), off_diagonal(cosines), (len(dots) - 1) * half, signal


# ---- the paper's figures


def figure_1(policy, rollout, args, rate):
    """Fig. 1 on one rollout batch: bins, advantages, gradient norms, and who moves whom.

    "change" holds one step of SGD at `rate` on all tokens (c), on those with π < .25 (e) and on
    those with π ≥ .75 (f): the mean size of the change of π over all tokens and over each bin, its
    quantiles by bin, and its correlation with (c).
    """
    free, mask = one_free_step(args), rollout.mask
    before = probabilities(policy, rollout, args)
    bins = bins_of(before, mask)
    updates = {"all": mask, "lowest": bins[0], "highest": bins[3]}
    change = {
        name: probabilities_after(policy, [(name, tokens)], rollout, free, sgd(rate))[0] - before
        for name, tokens in updates.items()
    }
    return {
        "tokens": int(mask.sum()),
        "share": shares_of(bins, mask),
        "token_mean_of_advantage": float(rollout.advantages[mask].mean()),
        "advantage": by_bin(rollout.advantages, bins),
        "norm": {
            "bins": [gradient_norm(policy, tokens, rollout, args) for tokens in bins],
            "all": gradient_norm(policy, mask, rollout, args),
        },
        "change": {
            name: {
                "size": float(values[mask].abs().mean()),
                "size_by_bin": [float(values[tokens].abs().mean()) for tokens in bins],
                "correlation": correlation(values[mask], change["all"][mask]),
                **by_bin(values, bins),
            }
            for name, values in change.items()
        },
    }


def by_bin(values, bins):
    """The mean of some values (B, T) in each bin, and their quantiles."""
    samples = [values[tokens].double().cpu().numpy() for tokens in bins]
    return {
        "mean": [float(sample.mean()) if len(sample) else math.nan for sample in samples],
        "quantiles": [
            np.quantile(sample, QUANTILES).tolist() if len(sample) else [] for sample in samples
        ],
    }


def correlation(a, b):
    return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])


def figure_2(policy, rollout, args, responses):
    """Fig. 2, for each token of some responses: π, entropy H, ‖∇ log π‖ at the logits and layers.

    "at_layers": a row for each token, embedding's output to last layer's, all positions together.
    """
    columns = {name: [] for name in ("probability", "entropy", "at_logits", "at_layers")}
    for row in responses:
        part = rollout.part([row])  # one row: no padding
        ids = torch.cat([part.prompt_ids, part.response_ids], 1)  # (1, P+T)
        output = policy(ids, output_hidden_states=True)
        logits = output.logits[0, part.prompt_ids.shape[1] - 1 : -1] / args.temperature  # (T, V)
        chosen = part.response_ids[0]
        logprobs = logits.log_softmax(-1).gather(-1, chosen[:, None]).squeeze(-1)  # (T,)
        columns["probability"] += logprobs.exp().tolist()
        columns["entropy"] += lopti.entropy(logits.detach()).tolist()
        columns["at_logits"] += theory.logit_gradient_norm(logits, chosen).tolist()
        for logprob in logprobs:
            layers = torch.autograd.grad(logprob, output.hidden_states, retain_graph=True)
            columns["at_layers"].append([float(layer.norm()) for layer in layers])
    return columns


def figure_3(policy, rollout, args, rate):
    """Fig. 3 on one rollout batch, for one step of SGD at `rate` and for one of a fresh AdamW.

    Norms are clipped as in training. "risen": the share of the tokens with Â > 0 whose probability
    rose, by bin of π, for each method. "stages": what each stage of Lopti did to the likely tokens
    (π ≥ ½, which stage 1 does not touch): the share of those with Â > 0 and of those with Â < 0
    whose probability moved the way of their advantage, since before the update, the share that
    rose, and the mean size of their change.
    """
    one_step = changed(args, kl_coef=0.0, mini_batch_size=0)
    before, advantages = probabilities(policy, rollout, args), rollout.advantages
    rewarded = [tokens & (advantages > 0) for tokens in bins_of(before, rollout.mask)]
    likely = lopti.split_tokens(before.log(), rollout.mask, 0.5)[1]
    result = {}
    for name, optimizer in (("SGD", sgd(rate)), ("AdamW", adamw(args))):
        risen, stages = {}, []
        for method, settings in METHODS.items():
            after = updated(policy, rollout, one_step, optimizer, **settings)
            risen[method] = [share((after[-1] > before)[tokens]) for tokens in rewarded]
            if method == "Lopti":
                stages = [
                    {
                        "right_way": [
                            share((pi > before)[likely & (advantages > 0)]),
                            share((pi < before)[likely & (advantages < 0)]),
                        ],
                        "risen": share((pi > before)[likely]),
                        "size": float((pi - before)[likely].abs().mean()),
                    }
                    for pi in after
                ]
        result[name] = {"risen": risen, "stages": stages}
    return result


def updated(policy, rollout, args, optimizer, alpha=0.0, eta=0.0, passes=1):
    """π after each stage of an update of the batch by a method."""
    low, high = lopti.split_tokens(rollout.old_logprobs, rollout.mask, eta)
    stages = lopti.update_stages(low, high, rollout.mask, eta) * passes
    advantages = lopti.reweight_advantages(rollout.advantages, rollout.old_logprobs, alpha)
    return probabilities_after(
        policy, stages, changed(rollout, advantages=advantages), args, optimizer
    )


def share(hits):
    return float(hits.double().mean())


def rank_correlation(a, b):
    """Spearman's, for values without ties."""
    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


# ---- means over batches


def over_batches(rows):
    """Means and half intervals of each column of `rows`, one row for each batch: two lists."""
    pairs = [experiments.mean_and_half(list(map(float, column))) for column in zip(*rows)]
    return [mean for mean, _ in pairs], [half for _, half in pairs]


# ---- levers: what Eq. 4 takes from whom


def lever_shares(rollout, alpha):
    """How the tokens of a batch share the sum of (1-π)·[απ + 1-α], by bin of π."""
    pi = rollout.old_logprobs.exp()
    levers = lopti.reweight_advantages((1 - pi) * rollout.mask, rollout.old_logprobs, alpha)
    return [float(levers[tokens].sum() / levers.sum()) for tokens in bins_of(pi, rollout.mask)]


def turned(policy, rollout, args, alphas=(0.1, 0.3, 1.0)):
    """What Eq. 4 does to the gradient, for each α: [cosine with GRPO's, length over GRPO's, cosine
    of the steps that an AdamW without a past takes].

    Such an AdamW steps along g/(|g| + 1e-8), each weight on its own: the length is lost, and small
    entries, which turn the most, count as much as large ones.
    """

    def cosine(a, b):
        return float(a @ b / a.norm() / b.norm())

    def step(gradient):
        return gradient / (gradient.abs() + 1e-8)

    plain, result = gradient(policy, rollout.mask, rollout, args), {}
    for alpha in alphas:
        weighted = lopti.reweight_advantages(rollout.advantages, rollout.old_logprobs, alpha)
        other = gradient(policy, rollout.mask, changed(rollout, advantages=weighted), args)
        length = float(other.norm() / plain.norm())
        result[f"{alpha:g}"] = [cosine(plain, other), length, cosine(step(plain), step(other))]
    return result


# ---- words

KINDS = {  # the paper's categories -> words of a worked solution
    "analysis": ("true", "false"),
    "statement": [word for kind in ("and", "or", "->", "<=>") for word in puzzles.WORDING[kind]],
    "causal indicator": puzzles.WORDING["relation"],
    "conclusion indicator": puzzles.WORDING["conclusion"],
    "assumption": puzzles.WORDING["supposition"],
    "assertion": puzzles.WORDING["saying"],
}


def word_differences(batches, right=3.0, wrong=-0.5):
    """How much more often words come in right answers than in wrong ones to the same puzzle.

    Returns kind of word -> one value for each puzzle that was answered both ways, per 100 words of
    reasoning. The controls set half of the words of a kind against the other half: which of them
    is written was drawn at random when the policy was taught.
    """
    kinds = {name: (words, ()) for name, words in KINDS.items()}
    for name in ("causal indicator", "conclusion indicator", "assumption", "assertion"):
        kinds[f"control: {name}, half − half"] = (KINDS[name][:4], KINDS[name][4:])
    differences = {name: [] for name in kinds}
    for rollout, rewards, _, batch in batches:
        reasoning = [text.split("</think>")[0].split() for text in rollout.texts]
        for puzzle in {row["question"]: None for row in batch}:
            rows = [i for i, row in enumerate(batch) if row["question"] == puzzle and reasoning[i]]
            sides = [[i for i in rows if rewards[i] == reward] for reward in (right, wrong)]
            if not all(sides):
                continue
            for name, (plus, minus) in kinds.items():
                in_right, in_wrong = (
                    np.mean(
                        [
                            100
                            * sum((word in plus) - (word in minus) for word in reasoning[i])
                            / len(reasoning[i])
                            for i in side
                        ]
                    )
                    for side in sides
                )
                differences[name].append(float(in_right - in_wrong))
    return differences


# ---- the later treatments


def treatments(rollout, entropies):
    """Which tokens (B, T) each treatment leaves to the update; before the first, π_θ is π_old."""
    logprobs, mask = rollout.old_logprobs, rollout.mask
    return {
        "Lopti, stage 1": lopti.split_tokens(logprobs, mask, 0.5)[0],
        "80/20": lopti.entropy_mask(entropies, mask, 0.2),
        "80/20's ablation": lopti.entropy_mask(entropies, mask, 0.8, lowest=True),
        "STAPO": lopti.stapo_mask(logprobs, entropies, rollout.advantages, mask),
    }


LIMITS = (0.05, 0.1, 0.25, 0.5, 1.1)


def kept_shares(rollout, entropies):
    """Treatment -> the share that it keeps of the tokens below each of LIMITS."""
    pi, mask = rollout.old_logprobs.exp(), rollout.mask
    below = [mask & (pi < limit) for limit in LIMITS]
    return {"all tokens": [float(tokens.sum() / mask.sum()) for tokens in below]} | {
        name: [share(kept[tokens]) for tokens in below]
        for name, kept in treatments(rollout, entropies).items()
    }


# ---- open questions


def worked_solutions(policy, tokenizer, rows, args, seed=0):
    """Worked solutions without a mistake as a Rollout in which every token has Â = 1.

    With r = 1 and no KL Eq. 1 is then the loss of supervised fine-tuning on these texts.
    """
    rng = random.Random(seed)
    texts = [
        puzzles.worked_solution(rng, row["columns"]["names"], literal_eval(statements))
        for row in rows
        for statements in [row["columns"]["statements"]]
    ]
    prompts = tokenizer([row["prompt"] for row in rows], add_special_tokens=False)
    answers = tokenizer([text + tokenizer.eos_token for text in texts], add_special_tokens=False)
    prompts = tokenizer.pad(prompts, padding_side="left", return_tensors="pt")
    answers = tokenizer.pad(answers, padding_side="right", return_tensors="pt")
    mask = answers["attention_mask"].bool()
    rollout = lopti.Rollout(
        prompt_ids=prompts["input_ids"],
        prompt_mask=prompts["attention_mask"].bool(),
        response_ids=answers["input_ids"],
        mask=mask,
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        texts=texts,
        advantages=mask.float(),
    )
    old = lopti.score(policy, rollout, args.temperature, args.tokens_per_microbatch)
    rollout.old_logprobs = old.logprobs
    return rollout


def second_steps(policy, tokenizer, prompts, args, *, eta, passes, count):
    """How alike the second optimizer step on a rollout batch is to the first, step after step.

    η > 0 and one pass: Lopti's two stages. η = 0 and two passes: two plain steps, the control. The
    second step is taken twice from the same weights: "shared", with the AdamW that took the first,
    and "own", with one that has seen second steps only. Returns the cosines of `count` batches.
    """
    policy = copy.deepcopy(policy)
    shared, own_state, cosines = lopti.make_optimizer(policy, args), None, []
    for number in range(count + 1):
        rollout, *_ = collect(policy, tokenizer, next(prompts), args, seed=1000 + number)
        low, high = lopti.split_tokens(rollout.old_logprobs, rollout.mask, eta)
        stages = lopti.update_stages(low, high, rollout.mask, eta) * passes
        (_, first), (_, second) = stages
        one = weight_step(policy, shared, rollout, first, args)
        twin = copy.deepcopy(policy)
        own = lopti.make_optimizer(twin, args)
        if own_state:
            own.load_state_dict(own_state)
        steps = {
            "own": weight_step(twin, own, rollout, second, args),
            "shared": weight_step(policy, shared, rollout, second, args),
        }
        own_state = copy.deepcopy(own.state_dict())
        if number:  # at first an AdamW of its own has no memory yet
            cosine = functools.partial(torch.nn.functional.cosine_similarity, one, dim=0)
            cosines.append({name: float(cosine(step)) for name, step in steps.items()})
    return cosines


def weight_step(policy, optimizer, rollout, tokens, args):
    """Update some tokens; returns the step that the weights took, as one long vector."""
    before = torch.nn.utils.parameters_to_vector(policy.parameters()).detach()
    lopti.update(policy, optimizer, rollout, tokens, args)
    return torch.nn.utils.parameters_to_vector(policy.parameters()).detach() - before
