"""What the paper's figures measure, on any policy and task: computed here, drawn elsewhere.

    python data/lab/measures.py "default job"                 # the screen: `progress`, minutes
    python data/lab/measures.py "T = 0.7" --temperature 0.7   # with any flags of lopti.py
    python data/lab/measures.py second-pass           # what Lopti's second pass corrects, minutes

`figure_1`, `figure_2` and `figure_3` return plain dictionaries of numbers that can be written as
JSON. The report calls them on the bundled policy, real_model.py on a language model. Words and open
questions are the report's. Shapes are lopti.py's: B responses, L positions.
"""

import copy
import functools
import itertools
import math
import random
import sys
from pathlib import Path

import experiments
import numpy as np
import theory
import torch
from analysis import FOLDER, interval, ratio
from torch.nn.utils import parameters_to_vector

DATA = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(DATA.parent), str(DATA / "make")]
import puzzles

import lopti
from rewards import told_in_a_sentence

EDGES = (0.0, 0.25, 0.5, 0.75, 1.1)  # of the four bins of π
QUANTILES = np.linspace(0.005, 0.995, 34)  # what a violin is drawn from

METHODS = {  # name -> α, η, passes
    "GRPO": (0.0, 0.0, 1),
    "GRPO, two passes": (0.0, 0.0, 2),
    "AR": (0.3, 0.0, 1),
    "Lopti": (0.0, 0.5, 1),
}


def changed(settings, **changes):
    """A copy of lopti's arguments or of a Rollout with some attributes changed."""
    result = copy.copy(settings)
    vars(result).update(changes)
    return result


# ---- one rollout batch


def collect(policy, tokenizer, rows, args, seed=0):
    """One rollout batch, made as `lopti.train` makes it: sample, judge, score, advantages.

    Returns the rollout, the rewards (B,), the entropies (B, L), and each response's row.
    """
    torch.manual_seed(seed)
    batch = [row for row in rows for _ in range(args.group_size)]
    prompts = [row["prompt"] for row in rows]
    rollout = lopti.sample(policy, tokenizer, prompts, args.group_size, args.temperature, args)
    rewards = torch.tensor(lopti.compute_rewards(rollout.texts, batch, args))
    rollout.old_logprobs, entropies = lopti.score(policy, rollout, args, with_entropy=True)
    advantages = lopti.group_advantages(rewards, args.group_size)[:, None] * rollout.mask
    rollout.advantages = advantages
    return rollout, rewards, entropies, batch


def reweighted(rollout, alpha):
    """The rollout with Eq. 4 applied to its advantages."""
    advantages = lopti.reweight_advantages(rollout.advantages, rollout.old_logprobs, alpha)
    return changed(rollout, advantages=advantages)


def bins_of(pi, mask):
    """Four masks (B, L): the tokens with π in [0, .25), [.25, .5), [.5, .75), [.75, 1]."""
    return [mask & (pi >= low) & (pi < high) for low, high in itertools.pairwise(EDGES)]


def wording_of(tokenizer, rollout):
    """The tokens (B, L) of words that do not matter to the answer."""
    words = torch.tensor(tokenizer.convert_tokens_to_ids(puzzles.WORDING_WORDS))
    return rollout.mask & torch.isin(rollout.ids, words)


def share(hits):
    return float(hits.double().mean())


# ---- what an update does to the probabilities


def probabilities(model, rollout, args):
    """π of every token (B, L) in float64: many changes of an update are too small for float32."""
    twin = copy.deepcopy(model).double()
    for module in twin.modules():
        if type(module).__name__.endswith("RMSNorm"):  # as it is written it goes through float32
            shape, weight = module.weight.shape, module.weight
            settings = {"normalized_shape": shape, "weight": weight, "eps": module.variance_epsilon}
            module.forward = functools.partial(torch.nn.functional.rms_norm, **settings)
    return lopti.score(twin, rollout, args)[0].exp()


def probabilities_after(policy, stages, rollout, args, optimizer):
    """π of every token after each stage of an update, (B, L) each; the policy is left as it is.

    `stages` as `lopti.update_stages` returns them; `optimizer` makes one for a policy.
    """
    trained, results = copy.deepcopy(policy), []
    steps = optimizer(trained)
    for _, tokens in stages:
        lopti.update(trained, steps, rollout, tokens, args)
        results.append(probabilities(trained, rollout, args))
    return results


def weight_step(policy, optimizer, rollout, tokens, args):
    """Update some tokens; returns the step that the weights took, as one long vector."""
    before = parameters_to_vector(policy.parameters()).detach()
    lopti.update(policy, optimizer, rollout, tokens, args)
    return parameters_to_vector(policy.parameters()).detach() - before


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


def adamw_direction(gradient):
    """The first step of AdamW, but for its length: each weight on its own has the same say."""
    return gradient / (gradient.abs() + 1e-8)


# ---- the screen: how far does a step of each method go along the expected gradient?


def directions(policy, tokenizer, rollout, entropies, args):
    """Method → the gradients whose steps it takes on this rollout, one after the other.

    Before the first update r = 1, so that the gradient is a sum over tokens: its parts add up.
    """

    def of(tokens=rollout.mask, rollout=rollout, **flags):
        return gradient(policy, tokens, rollout, changed(args, **flags))

    plain, (low, _) = of(), lopti.split_tokens(rollout.old_logprobs, rollout.mask, 0.5)
    fully = of(rollout=reweighted(rollout, 1))
    found = {"GRPO": [plain]}
    for alpha in (0.1, 0.3, 0.6, 1.0):
        found[f"AR, α = {alpha:g}"] = [(1 - alpha) * plain + alpha * fully]
    first = of(low)
    stages = [first, plain - first]
    found |= {"Lopti, stage 1": stages[:1], "Lopti, stage 2": stages[1:]}
    found["Lopti, both stages"] = stages
    kept, wording = later_methods(rollout, entropies), wording_of(tokenizer, rollout)
    found |= {name: [of(kept[name])] for name in ("STAPO", "80/20")}
    found["min-p"] = [of(min_p=2.3e-6)]
    if wording.any():
        found["without wording (an oracle)"] = [of(rollout.mask & ~wording)]
    return found


def progress(policy, tokenizer, batches, args):
    """How far a step of unit length goes along the gradient of all other batches.

    For each way of stepping, by plain gradient descent and by AdamW's first step: GRPO's progress,
    and the ratio of every other method's to it, with half of its 95 % interval over batches. A
    method of two stages adds a step of unit length for each, as AdamW does.
    """
    found, total = {}, sum(gradient(policy, one.mask, one, args) for one, *_ in batches)
    for rollout, _, entropies, _ in batches:
        methods = directions(policy, tokenizer, rollout, entropies, args)
        others = (total - methods["GRPO"][0]) / (len(batches) - 1)  # the mean of the other batches
        for way, step_of in (("gradient", torch.clone), ("AdamW", adamw_direction)):
            for name, gradients in methods.items():
                steps = [torch.nn.functional.normalize(step_of(one), dim=0) for one in gradients]
                step = torch.nn.functional.normalize(sum(steps), dim=0)
                found.setdefault(way, {}).setdefault(name, []).append(float(step @ others))
    result = {}
    for way, values in found.items():
        grpo = values.pop("GRPO")
        result[way] = {name: ratio(of_method, grpo) for name, of_method in values.items()}
        result[way]["GRPO"] = interval(grpo)
    return result


def progress_line(setting, flags, count):
    """`progress` on two independent sets of rollout batches, in one line for progress.jsonl."""
    args = lopti.parse_arguments(flags)
    policy, tokenizer = lopti.load_model(args.model, lopti.choose_device(args.device))
    rows, _ = lopti.load_data(args, tokenizer)
    prompts = lopti.prompt_stream(rows, args.prompts_per_step, args.seed)
    rng, line = random.Random(0), {"setting": setting, "batches": count}
    for part in ("first", "again"):
        batches = []
        while len(batches) < count:
            batch = collect(policy, tokenizer, next(prompts), args, seed=rng.randrange(2**31))
            if batch[0].advantages.any():  # without a difference in reward there is no step
                batches.append(batch)
        line[part] = progress(policy, tokenizer, batches, args)
    return line


# ---- signal or noise?


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
    _, half = interval([off_diagonal(cosines[rows][:, rows]) for rows in others])
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
        "share": [share(tokens[mask]) for tokens in bins],
        "advantage": by_bin(rollout.advantages, bins),
        "norm": {
            "bins": [float(gradient(policy, one, rollout, args).norm()) for one in bins],
            "all": float(gradient(policy, mask, rollout, args).norm()),
        },
        "change": {
            name: {
                "size": float(values[mask].abs().mean()),
                "size_by_bin": [float(values[tokens].abs().mean()) for tokens in bins],
                "correlation": float(np.corrcoef(values[mask], change["all"][mask])[0, 1]),
                **by_bin(values, bins),
            }
            for name, values in change.items()
        },
    }


def by_bin(values, bins):
    """The mean of some values (B, L) in each bin, and their quantiles."""
    samples = [values[tokens].double().numpy() for tokens in bins]
    return {
        "mean": [float(sample.mean()) if len(sample) else math.nan for sample in samples],
        "quantiles": [
            np.quantile(sample, QUANTILES).tolist() if len(sample) else [] for sample in samples
        ],
    }


def figure_2(policy, rollout, args, responses):
    """Fig. 2, for each token of some responses: π, entropy H, ‖∇ log π‖ at the logits and layers.

    "at_layers": a row for each token, embedding's output to last layer's, all positions together.
    """
    columns = {name: [] for name in ("probability", "entropy", "at_logits", "at_layers")}
    for row in responses:
        part = rollout.rows([row])  # one row: no padding
        output = policy(part.ids, output_hidden_states=True)
        logits = output.logits[part.mask.roll(-1, 1)] / args.temperature  # (T, V)
        chosen = part.ids[part.mask]  # (T,)
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
    whose probability moved the way of their advantage since before the update, and the mean size of
    their change.
    """
    one_step = changed(args, kl_coef=0.0, mini_batch_size=0)
    before, advantages = probabilities(policy, rollout, args), rollout.advantages
    rewarded = [tokens & (advantages > 0) for tokens in bins_of(before, rollout.mask)]
    _, likely = lopti.split_tokens(before.log(), rollout.mask, 0.5)
    result = {}
    for name, make in (
        ("SGD", sgd(rate)),
        ("AdamW", lambda policy: lopti.make_optimizer(policy, args)),
    ):
        risen = {}
        for method, (alpha, eta, passes) in METHODS.items():
            groups = lopti.split_tokens(rollout.old_logprobs, rollout.mask, eta)
            stages = lopti.update_stages(*groups, rollout.mask, eta) * passes
            after = probabilities_after(policy, stages, reweighted(rollout, alpha), one_step, make)
            risen[method] = [share((after[-1] > before)[tokens]) for tokens in rewarded]
        stages = [  # of Lopti, the last method
            {
                "right_way": [
                    share((pi > before)[likely & (advantages > 0)]),
                    share((pi < before)[likely & (advantages < 0)]),
                ],
                "size": float((pi - before)[likely].abs().mean()),
            }
            for pi in after
        ]
        result[name] = {"risen": risen, "stages": stages}
    return result


def second_pass(policy, rollout, args, rate):
    """What Lopti's second pass does to the likely tokens, by what the first pass did to them.

    For SGD at `rate` and for a fresh AdamW. "rewarded, wrong" are the tokens with π ≥ ½ and Â > 0
    that the first pass moved against Â, by 5e-5 in log π or more, and so on: the mean change of
    log π in the second pass, counted in the direction of Â, and the share that moved that way.
    """
    one_step = changed(args, kl_coef=0.0, mini_batch_size=0)
    before, sign = probabilities(policy, rollout, args).log(), rollout.advantages.sign()
    low, high = lopti.split_tokens(before, rollout.mask, 0.5)
    stages = lopti.update_stages(low, high, rollout.mask, 0.5)
    result = {"SGD": {}, "AdamW": {}}
    for name, make in zip(result, (sgd(rate), lambda policy: lopti.make_optimizer(policy, args))):
        after = probabilities_after(policy, stages, rollout, one_step, make)
        first, second = (pi.log() for pi in after)
        moved, moves = (first - before) * sign, (second - first) * sign
        for who, of_sign in (("rewarded", sign > 0), ("punished", sign < 0)):
            for how, tokens in (("wrong", moved <= -5e-5), ("right", moved >= 5e-5)):
                values = moves[high & of_sign & tokens]
                result[name][f"{who}, {how}"] = [float(values.mean()), share(values > 0)]
    return result


def second_pass_lines(count=10, rate=0.3):
    """`second_pass` on the batches of the report's chapter 1, a line each for second_pass.jsonl."""
    args = lopti.parse_arguments(["--kl-coef", "0", "--mini-batch-size", "0"])
    policy, tokenizer = lopti.load_model("data/tiny", "cpu")
    prompts = lopti.prompt_stream(lopti.load_data(args, tokenizer)[0], 8, seed=0)
    for seed in range(count):
        rollout, *_ = collect(policy, tokenizer, next(prompts), args, seed)
        yield {"seed": seed, **second_pass(policy, rollout, args, rate)}


# ---- what Eq. 4 does to the gradient


def turned(policy, rollout, args, alphas=(0.1, 0.3, 1.0)):
    """What Eq. 4 does to the gradient, by α: cosine with GRPO's, length over GRPO's, cosine of
    the first steps of AdamW.
    """

    def cosine(a, b):
        return float(a @ b / a.norm() / b.norm())

    plain, fully = (gradient(policy, rollout.mask, reweighted(rollout, x), args) for x in (0, 1))
    result = {}
    for alpha in alphas:
        other = (1 - alpha) * plain + alpha * fully
        steps = cosine(adamw_direction(plain), adamw_direction(other))
        result[f"{alpha:g}"] = [cosine(plain, other), float(other.norm() / plain.norm()), steps]
    return result


# ---- the later methods


def later_methods(rollout, entropies):
    """Which tokens (B, L) each leaves to the update; before the first update π_θ is π_old."""
    logprobs, mask = rollout.old_logprobs, rollout.mask
    return {
        "Lopti, stage 1": lopti.split_tokens(logprobs, mask, 0.5)[0],
        "80/20": lopti.entropy_mask(entropies, mask, 0.2),
        "80/20's ablation": mask & ~lopti.entropy_mask(entropies, mask, 0.2),
        "STAPO": lopti.stapo_mask(logprobs, entropies, rollout.advantages, mask),
    }


if __name__ == "__main__":
    with told_in_a_sentence():
        if sys.argv[1:] == ["second-pass"]:
            for of_batch in second_pass_lines():
                experiments.append_line(FOLDER / "second_pass.jsonl", of_batch)
            sys.exit()
        flags = ["--prompts-per-step", "8", *sys.argv[2:]]
        experiments.append_line(FOLDER / "progress.jsonl", progress_line(sys.argv[1], flags, 10))
