"""Makes golden.json: numbers that a right port of the method must reproduce.

    python data/golden.py     # computes the outputs in data/golden.json again, from its inputs

Nothing of lopti.py is used here: the tests hold lopti.py to these numbers as they would hold a
port. golden.json has four parts.

`cases`: one loss and its gradient, for each kind of pass. Inputs, of B responses of up to T tokens:
    name, group_size, rewards (B,), lengths (B,): what lies beyond a response's length is padding,
    old_logprobs, new_logprobs, ref_logprobs (B, T): log π of the policy that sampled, of the policy
        that is updated, of the reference,
    alpha, eta, clip_low, clip_high, clip_dual (ε_l, ε_h and c), kl_coef (β)
Outputs:
    advantages (B,): Â of Eq. 1; reweighted_advantages (B, T): Â after Eq. 4
    low (B, T): true where π_old < η
    passes: for "all", "low" and "high", the tokens that the pass updates:
        loss, policy_loss (the loss without the KL), kl (a mean without β), clip_low_share,
        clip_high_share, clip_dual_share (how many tokens have no policy gradient because of each
        clip), all divided by N, the number of all tokens; gradient (B, T): that of loss by
        new_logprobs

`rollouts`: whole updates of a policy small enough to write down. Inputs, beside the settings above:
    table (V, V): row i holds the logits of the token after token i; reference: another such table
    prompts (B,), one token each; responses: a list of tokens each
    mini_batch_size: responses of an optimizer step; micro_batch_size: responses of a forward and
        backward pass, which must change nothing; temperature
    learning_rate, weight_decay, max_grad_norm of AdamW (betas .9 and .999, epsilon 1e-8)
Outputs:
    old_logprobs, ref_logprobs, advantages (after Eq. 4) and low: a list for each response
    steps: one for each pass and mini-batch, in their order: pass ("all", "low" or "high"),
        first_row, response_tokens (N), updated_tokens, skipped (the gradient is 0: no step), loss,
        gradient (V, V) before it is clipped, table (V, V) after the step

`model`: whole updates of the bundled model (data/tiny, which is the reference too), from four
responses to one puzzle. Inputs: prompt and responses, as token ids, and what is named above.
Outputs:
    old_logprobs and entropies: a list for each response; advantages (4,): Â of Eq. 1
    cases, of which each has a name, alpha, eta and mini_batch_size, and of these come
        token_weights (the factor of Eq. 4) and low: a list for each response
        steps: as above, with gradient_norm before it is clipped, and change_norm: the norm of the
            step's change of all weights
        change_norm: the norm of the whole update's change
        new_logprobs: log π of the response tokens after the update
        weights: {name of a parameter: its first entry after the update}
They have eight digits, of which about six hold on another machine: transformers computes a part of
a forward pass in float32.

`treatments`: the later methods. Inputs: rewards, lengths, advantages (B,), logits (B, T, V) and ids
(B, T) of the current policy, temperature, min_p, stapo_tau, stapo_quantile, rho. Outputs:
    reinforce_pp_advantages (B, T)
    logprobs, entropies; with min-p: safe_logprobs, safe_entropies (0 where not safe), safe: (B, T)
    stapo_kept, top_kept (B, T): the tokens that STAPO, and 80/20 with the share rho, keep
    stapo_loss: the sum of -advantage over the tokens that STAPO keeps, divided by their number

All but `model` is computed with plain Python floats (float64), one token at a time, straight from
the equations. Sums are math.fsum, because sum() rounds otherwise since Python 3.12. The inputs were
drawn at random until every clip and every fact of data/ports/README.md shows in some case.
"""

import json
import math
from pathlib import Path
from statistics import mean, stdev

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

CLIPS = ("low", "high", "dual")
HERE = Path(__file__).resolve().parent


def clamp(value, low, high):
    return max(low, min(high, value))


def token_terms(new, old, ref, advantage, case):
    """(policy loss, KL, which clip cut the gradient, derivative by new) of one token, undivided."""
    ratio = math.exp(new - old)
    inside = clamp(ratio, 1 - case["clip_low"], 1 + case["clip_high"])
    loss = -min(ratio * advantage, inside * advantage)
    clipped = None
    if advantage > 0 and ratio > 1 + case["clip_high"]:
        clipped = "high"
    elif advantage < 0 and ratio < 1 - case["clip_low"]:
        clipped = "low"
    elif advantage < 0 and ratio > case["clip_dual"]:
        loss = -case["clip_dual"] * advantage
        clipped = "dual"
    derivative = 0.0 if clipped else -ratio * advantage

    difference = clamp(ref - new, -5, 5)
    estimate = math.exp(difference) - difference - 1
    kl = clamp(estimate, -10, 10)
    if case["kl_coef"] and abs(ref - new) < 5 and estimate < 10:
        derivative += case["kl_coef"] * (1 - math.exp(difference))
    return loss, kl if case["kl_coef"] else 0.0, clipped, derivative


def group_advantages(case):
    size = case["group_size"]
    advantages = []
    for start in range(0, len(case["rewards"]), size):
        group = case["rewards"][start : start + size]
        # equal rewards: every advantage is 0
        scale = math.inf if len(set(group)) == 1 else stdev(group) + 1e-6
        advantages += [(reward - mean(group)) / scale for reward in group]
    return advantages


def tokens_of(case):
    """(row, position) of every response token."""
    return [(i, t) for i, length in enumerate(case["lengths"]) for t in range(length)]


def spread_out(values, like, empty=0.0):
    """{(row, position): value} in rows as long as those of `like`."""
    return [[values.get((i, t), empty) for t in range(len(row))] for i, row in enumerate(like)]


def solve(case):
    """The case with its outputs."""
    tokens = tokens_of(case)
    advantages = group_advantages(case)
    alpha = case["alpha"]
    pi = {(i, t): math.exp(case["old_logprobs"][i][t]) for i, t in tokens}
    reweighted = {(i, t): (alpha * p + 1 - alpha) * advantages[i] for (i, t), p in pi.items()}
    low = {token: p < case["eta"] for token, p in pi.items()}
    like = case["old_logprobs"]
    found = {"advantages": advantages}
    found["reweighted_advantages"] = spread_out(reweighted, like)
    found["low"] = spread_out(low, like, False)
    found["passes"] = {}
    for name, wanted in {"all": (True, False), "low": (True,), "high": (False,)}.items():
        terms = {}
        for i, t in (token for token in tokens if low[token] in wanted):
            logprobs = [case[f"{policy}_logprobs"][i][t] for policy in ("new", "old", "ref")]
            terms[i, t] = token_terms(*logprobs, reweighted[i, t], case)
        policy_loss = math.fsum(loss for loss, _, _, _ in terms.values()) / len(tokens)
        kl = math.fsum(kl for _, kl, _, _ in terms.values()) / len(tokens)
        clipped = [clip for _, _, clip, _ in terms.values()]
        gradient = {token: derivative / len(tokens) for token, (*_, derivative) in terms.items()}
        found["passes"][name] = {
            "loss": policy_loss + case["kl_coef"] * kl,
            "policy_loss": policy_loss,
            "kl": kl,
            **{f"clip_{kind}_share": clipped.count(kind) / len(tokens) for kind in CLIPS},
            "gradient": spread_out(gradient, like),
        }
    return case | found


def log_softmax(logits):
    top = max(logits)
    normalizer = top + math.log(math.fsum(math.exp(x - top) for x in logits))
    return [x - normalizer for x in logits]


def quantile(values, q):
    """Linear between the two nearest ranks, as numpy and torch do it."""
    values = sorted(values)
    position = q * (len(values) - 1)
    below = math.floor(position)
    above = min(below + 1, len(values) - 1)
    return values[below] + (position - below) * (values[above] - values[below])


def solve_treatments(case):
    """The case with its outputs."""
    tokens = tokens_of(case)
    rewards = [case["rewards"][i] for i, _ in tokens]
    center, scale = mean(rewards), math.sqrt(stdev(rewards) ** 2 + 1e-8)
    whitened = {token: (case["rewards"][token[0]] - center) / scale for token in tokens}
    logprobs = {}
    entropies = {}
    safe_logprobs = {}
    safe_entropies = {}
    safe = {}
    for i, t in tokens:
        tempered = [x / case["temperature"] for x in case["logits"][i][t]]
        every = log_softmax(tempered)
        chosen = case["ids"][i][t]
        logprobs[i, t] = every[chosen]
        entropies[i, t] = -math.fsum(math.exp(x) * x for x in every)
        inside = [math.exp(x) >= case["min_p"] * math.exp(max(every)) for x in every]
        renormalised = log_softmax([x for x, kept in zip(tempered, inside) if kept])
        safe[i, t] = inside[chosen]
        safe_logprobs[i, t] = renormalised[sum(inside[:chosen])] if inside[chosen] else 0.0
        safe_entropies[i, t] = -math.fsum(math.exp(x) * x for x in renormalised)
    low_probability = [token for token in tokens if math.exp(logprobs[token]) < case["stapo_tau"]]
    spurious = [(i, t) for i, t in low_probability if case["advantages"][i] > 0]
    if spurious:
        tau_h = quantile([entropies[token] for token in spurious], case["stapo_quantile"])
        spurious = [token for token in spurious if entropies[token] < tau_h]
    stapo_kept = {token: token not in spurious for token in tokens}
    ranked = sorted(tokens, key=lambda token: -entropies[token])
    top = set(ranked[: round(case["rho"] * len(tokens))])
    loss = math.fsum(-case["advantages"][i] for i, t in tokens if stapo_kept[i, t])
    numbers = {
        "reinforce_pp_advantages": whitened,
        "logprobs": logprobs,
        "entropies": entropies,
        "safe_logprobs": safe_logprobs,
        "safe_entropies": safe_entropies,
    }
    chosen = {"safe": safe, "stapo_kept": stapo_kept}
    chosen["top_kept"] = {token: token in top for token in tokens}
    found = {name: spread_out(values, case["ids"]) for name, values in numbers.items()}
    found |= {name: spread_out(values, case["ids"], False) for name, values in chosen.items()}
    return case | found | {"stapo_loss": loss / sum(stapo_kept.values())}


class AdamW:
    """The optimizer of the rollouts, on a list of rows; one for both passes."""

    def __init__(self, table, case):
        self.table = table
        self.case = case
        self.steps = 0
        self.first = [[0.0] * len(row) for row in table]
        self.second = [[0.0] * len(row) for row in table]

    def step(self, gradient):
        self.steps += 1
        rate = self.case["learning_rate"]
        norm = math.sqrt(math.fsum(slope * slope for row in gradient for slope in row))
        clip = min(1.0, self.case["max_grad_norm"] / (norm + 1e-6))
        for i, row in enumerate(gradient):
            for j, slope in enumerate(row):
                self.first[i][j] = 0.9 * self.first[i][j] + 0.1 * clip * slope
                self.second[i][j] = 0.999 * self.second[i][j] + 0.001 * (clip * slope) ** 2
                first = self.first[i][j] / (1 - 0.9**self.steps)
                second = self.second[i][j] / (1 - 0.999**self.steps)
                self.table[i][j] *= 1 - rate * self.case["weight_decay"]
                self.table[i][j] -= rate * first / (math.sqrt(second) + 1e-8)


def solve_rollout(case):
    """The case with its outputs."""
    responses = case["responses"]
    size = case["mini_batch_size"]

    def distribution(table, i, t):
        """log π of every token at position t of response i, and the token before it."""
        before = responses[i][t - 1] if t else case["prompts"][i]
        return log_softmax([logit / case["temperature"] for logit in table[before]]), before

    def logprobs(table):
        return [
            [distribution(table, i, t)[0][token] for t, token in enumerate(response)]
            for i, response in enumerate(responses)
        ]

    old = logprobs(case["table"])
    ref = logprobs(case["reference"])
    advantages = [
        [(case["alpha"] * math.exp(x) + 1 - case["alpha"]) * advantage for x in row]
        for row, advantage in zip(old, group_advantages(case))
    ]
    low = [[math.exp(x) < case["eta"] for x in row] for row in old]
    table = [list(row) for row in case["table"]]
    steps = []
    optimizer = AdamW(table, case)
    for name in ("low", "high") if case["eta"] else ("all",):
        for start in range(0, len(responses), size):
            every = [(i, t) for i in range(start, start + size) for t in range(len(responses[i]))]
            tokens = [(i, t) for i, t in every if name == "all" or low[i][t] == (name == "low")]
            loss = 0.0
            gradient = [[0.0] * len(row) for row in table]
            for i, t in tokens:
                every_logprob, before = distribution(table, i, t)
                policy_loss, kl, _, derivative = token_terms(
                    every_logprob[responses[i][t]], old[i][t], ref[i][t], advantages[i][t], case
                )
                loss += (policy_loss + case["kl_coef"] * kl) / len(every)
                for k, logprob in enumerate(every_logprob):
                    slope = ((k == responses[i][t]) - math.exp(logprob)) / case["temperature"]
                    gradient[before][k] += derivative * slope / len(every)
            skipped = not any(slope for row in gradient for slope in row)
            if not skipped:
                optimizer.step(gradient)
            step = {"pass": name, "first_row": start, "response_tokens": len(every)}
            step |= {"updated_tokens": len(tokens), "skipped": skipped, "loss": loss}
            steps.append(step | {"gradient": gradient, "table": [list(row) for row in table]})
    found = {"old_logprobs": old, "ref_logprobs": ref, "advantages": advantages}
    return case | found | {"low": low, "steps": steps}


def digits(values):
    """Numbers of the model with eight digits; lists and dictionaries of them too."""
    if isinstance(values, dict):
        return {name: digits(value) for name, value in values.items()}
    if isinstance(values, list):
        return [digits(value) for value in values]
    return float(f"{values:.8g}") if isinstance(values, float) else values


def load_policy():
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(HERE / "tiny", dtype=torch.float64)


def logprobs_and_entropies(policy, page, i):
    """log π and entropy of the tokens of response i: two of (T,)."""
    response = page["responses"][i]
    ids = torch.tensor([page["prompt"] + response])
    logits = policy(ids).logits[0, len(page["prompt"]) - 1 : -1]  # each speaks of the next token
    every_logprob = (logits / page["temperature"]).log_softmax(-1)  # (T, V)
    logprobs = every_logprob[range(len(response)), response]
    return logprobs, -(every_logprob.exp() * every_logprob).sum(-1)


@torch.no_grad()
def of_all_responses(policy, page):
    """log π and entropies of all responses: two lists of (T,)."""
    all_logprobs = []
    all_entropies = []
    for i in range(len(page["responses"])):
        logprobs, entropies = logprobs_and_entropies(policy, page, i)
        all_logprobs.append(logprobs)
        all_entropies.append(entropies)
    return all_logprobs, all_entropies


def token_losses(new, old, ref, advantages, page):
    """`token_terms` again, as torch differentiates it: the losses with KL (T,)."""
    ratio = (new - old).exp()
    inside = ratio.clamp(1 - page["clip_low"], 1 + page["clip_high"])
    losses = -torch.minimum(ratio * advantages, inside * advantages)
    capped = torch.minimum(losses, -page["clip_dual"] * advantages)
    losses = torch.where(advantages < 0, capped, losses)
    difference = (ref - new).clamp(-5, 5)
    kl = (difference.exp() - difference - 1).clamp(-10, 10)
    return losses + page["kl_coef"] * kl


def solve_model_case(case, page, old, advantages):
    """An update of the bundled model, by torch's own AdamW: the case with its outputs."""
    policy = load_policy()
    weights = list(policy.parameters())
    optimizer = torch.optim.AdamW(weights, page["learning_rate"], weight_decay=page["weight_decay"])

    def all_weights():
        return torch.cat([weight.detach().flatten() for weight in weights])

    token_weights = [case["alpha"] * logprobs.exp() + 1 - case["alpha"] for logprobs in old]
    low = [logprobs.exp() < case["eta"] for logprobs in old]
    first_weights = all_weights()
    steps = []
    for name in ("low", "high") if case["eta"] else ("all",):
        for start in range(0, len(old), case["mini_batch_size"]):
            rows = range(start, start + case["mini_batch_size"])
            response_tokens = sum(len(old[i]) for i in rows)
            updated_tokens = 0
            loss = 0.0
            for i in rows:
                tokens = {"all": low[i] | True, "low": low[i], "high": ~low[i]}[name]
                new, _ = logprobs_and_entropies(policy, page, i)
                # the reference is the first policy: its log-probabilities are the old ones
                losses = token_losses(new, old[i], old[i], token_weights[i] * advantages[i], page)
                loss = loss + losses[tokens].sum() / response_tokens
                updated_tokens += int(tokens.sum())
            loss.backward()
            gradient_norm = float(torch.nn.utils.clip_grad_norm_(weights, page["max_grad_norm"]))
            before = all_weights()
            if gradient_norm > 0:
                optimizer.step()
            optimizer.zero_grad()
            steps.append(
                {
                    "pass": name,
                    "first_row": start,
                    "response_tokens": response_tokens,
                    "updated_tokens": updated_tokens,
                    "skipped": gradient_norm == 0,
                    "loss": loss.item(),
                    "gradient_norm": gradient_norm,
                    "change_norm": float((all_weights() - before).norm()),
                }
            )
    new, _ = of_all_responses(policy, page)
    return case | {
        "token_weights": [values.tolist() for values in token_weights],
        "low": [values.tolist() for values in low],
        "steps": steps,
        "change_norm": float((all_weights() - first_weights).norm()),
        "new_logprobs": [values.tolist() for values in new],
        "weights": {name: float(w.detach().flatten()[0]) for name, w in policy.named_parameters()},
    }


def solve_model(page):
    """The page of the bundled model with its outputs."""
    old, entropies = of_all_responses(load_policy(), page)
    advantages = group_advantages(page)
    cases = [solve_model_case(case, page, old, advantages) for case in page["cases"]]
    found = {
        "old_logprobs": [values.tolist() for values in old],
        "entropies": [values.tolist() for values in entropies],
        "advantages": advantages,
        "cases": cases,
    }
    return page | digits(found)


def solve_part(name, inputs):
    """One of the four parts of golden.json, every output computed anew from the inputs."""
    if name == "model":
        return solve_model(inputs)
    solvers = {"cases": solve, "rollouts": solve_rollout, "treatments": solve_treatments}
    return [solvers[name](case) for case in inputs]


def main():
    path = HERE / "golden.json"
    page = json.loads(path.read_text(encoding="utf-8"))
    page = {name: solve_part(name, inputs) for name, inputs in page.items()}
    path.write_text(json.dumps(page) + "\n", encoding="utf-8")
    print(f"{path}: every output computed anew")


if __name__ == "__main__":
    main()
