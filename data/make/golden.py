"""Reference numbers for whoever ports lopti to another language or framework.

    python data/make/golden.py     # computes the outputs in data/golden.json again, byte for byte

Everything is computed here with plain Python floats (float64), one token at a time, straight from
the equations: no torch, and nothing of lopti.py, which is checked against these numbers by the
tests. Sums are math.fsum, because sum() rounds otherwise since Python 3.12. The inputs were drawn
at random by this script as it is at commit ee9b7ad: corners (GRPO, α = 1, η = 1) and the paper's
settings first, some groups with equal rewards, and ratios far enough off for every clip.

Each case of golden.json holds the inputs

    group_size, rewards (B,), lengths (B,), old_logprobs, new_logprobs, ref_logprobs (B, T),
    alpha, eta, clip_low, clip_high, clip_dual, kl_coef

(positions from lengths[i] on are padding) and the outputs

    advantages (B,), reweighted_advantages, low (B, T); per update (joint, low_stage, high_stage):
    loss, policy_loss, kl, clip_low_share, clip_high_share, clip_dual_share, gradient (B, T)

where gradient is the derivative of loss by new_logprobs.

Under `treatments` stand as many cases of the later methods. Inputs: rewards, lengths, advantages
(B,), logits (B, T, V) and ids (B, T) of the current policy, temperature, min_p, stapo_tau,
stapo_quantile, rho. Outputs: reinforce_pp_advantages (B, T); logprobs and entropies (B, T) without
and with min-p (safe_logprobs, safe_entropies, safe; 0 where not safe); the tokens that each mask
keeps, (B, T): stapo_kept, top_kept (share rho); and stapo_loss, the sum of -advantage over the kept
tokens divided by their number.

Under `rollouts` stand whole updates, both stages over two mini-batches, of a policy small enough
to write down: row i of a table (V, V) holds the logits of the token after token i. Inputs: name,
table, reference (another table), prompts (B,), one token each, responses, rewards, group_size,
mini_batch_size, temperature, alpha, eta, the clips and kl_coef as above, and AdamW's learning_rate,
weight_decay and max_grad_norm (betas 0.9 and 0.999, epsilon 1e-8). Outputs: old_logprobs,
ref_logprobs, advantages (after Eq. 4) and low, a list for each response; and under `steps`, in
their order, for each stage and mini-batch: stage, first_row, response_tokens (N), updated_tokens,
skipped (its gradient is 0), loss, gradient (V, V) before its clip, and table (V, V) after it.
"""

import argparse
import json
import math
from pathlib import Path
from statistics import mean, stdev

CLIPS = ("low", "high", "dual")


def clamp(value, low, high):
    return max(low, min(high, value))


def token_terms(new, old, ref, advantage, case):
    """(policy loss, KL, which clip cut the gradient, derivative by new) of one token, undivided."""
    ratio = math.exp(new - old)
    inside = clamp(ratio, 1 - case["clip_low"], 1 + case["clip_high"])
    loss, clipped = -min(ratio * advantage, inside * advantage), None
    if advantage > 0 and ratio > 1 + case["clip_high"]:
        clipped = "high"
    elif advantage < 0 and ratio < 1 - case["clip_low"]:
        clipped = "low"
    elif advantage < 0 and ratio > case["clip_dual"]:
        loss, clipped = -case["clip_dual"] * advantage, "dual"
    derivative = 0.0 if clipped else -ratio * advantage

    difference = clamp(ref - new, -5, 5)
    estimate = math.exp(difference) - difference - 1
    kl = clamp(estimate, -10, 10)
    if case["kl_coef"] and abs(ref - new) < 5 and estimate < 10:
        derivative += case["kl_coef"] * (1 - math.exp(difference))
    return loss, kl if case["kl_coef"] else 0.0, clipped, derivative


def group_advantages(case):
    size, advantages = case["group_size"], []
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
    tokens, advantages, alpha = tokens_of(case), group_advantages(case), case["alpha"]
    pi = {(i, t): math.exp(case["old_logprobs"][i][t]) for i, t in tokens}
    reweighted = {(i, t): (alpha * p + 1 - alpha) * advantages[i] for (i, t), p in pi.items()}
    low = {token: p < case["eta"] for token, p in pi.items()}
    found, like = {"advantages": advantages}, case["old_logprobs"]
    found["reweighted_advantages"] = spread_out(reweighted, like)
    found["low"] = spread_out(low, like, False)
    stages = {"joint": (True, False), "low_stage": (True,), "high_stage": (False,)}
    for name, wanted in stages.items():
        terms = {}
        for i, t in (token for token in tokens if low[token] in wanted):
            logprobs = [case[f"{policy}_logprobs"][i][t] for policy in ("new", "old", "ref")]
            terms[i, t] = token_terms(*logprobs, reweighted[i, t], case)
        policy_loss = math.fsum(loss for loss, _, _, _ in terms.values()) / len(tokens)
        kl = math.fsum(kl for _, kl, _, _ in terms.values()) / len(tokens)
        clipped = [clip for _, _, clip, _ in terms.values()]
        gradient = {token: derivative / len(tokens) for token, (*_, derivative) in terms.items()}
        found[name] = {
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
    logprobs, entropies, safe_logprobs, safe_entropies, safe = {}, {}, {}, {}, {}
    for i, t in tokens:
        tempered = [x / case["temperature"] for x in case["logits"][i][t]]
        every, chosen = log_softmax(tempered), case["ids"][i][t]
        logprobs[i, t], entropies[i, t] = every[chosen], -math.fsum(math.exp(x) * x for x in every)
        inside = [math.exp(x) >= case["min_p"] * math.exp(max(every)) for x in every]
        renormalised = log_softmax([x for x, kept in zip(tempered, inside) if kept])
        safe[i, t] = inside[chosen]
        safe_logprobs[i, t] = renormalised[sum(inside[:chosen])] if inside[chosen] else 0.0
        safe_entropies[i, t] = -math.fsum(math.exp(x) * x for x in renormalised)
    unlikely = [token for token in tokens if math.exp(logprobs[token]) < case["stapo_tau"]]
    spurious = [(i, t) for i, t in unlikely if case["advantages"][i] > 0]
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
    """The optimizer of the rollouts, on a list of rows; one for both stages."""

    def __init__(self, table, case):
        self.table, self.case, self.steps = table, case, 0
        self.first, self.second = ([[0.0] * len(row) for row in table] for _ in range(2))

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
    responses, size = case["responses"], case["mini_batch_size"]

    def distribution(table, i, t):
        """log π of every token at position t of response i, and the token before it."""
        before = responses[i][t - 1] if t else case["prompts"][i]
        return log_softmax([logit / case["temperature"] for logit in table[before]]), before

    def logprobs(table):
        return [
            [distribution(table, i, t)[0][token] for t, token in enumerate(response)]
            for i, response in enumerate(responses)
        ]

    old, ref = logprobs(case["table"]), logprobs(case["reference"])
    advantages = [
        [(case["alpha"] * math.exp(x) + 1 - case["alpha"]) * advantage for x in row]
        for row, advantage in zip(old, group_advantages(case))
    ]
    low = [[math.exp(x) < case["eta"] for x in row] for row in old]
    table, steps = [list(row) for row in case["table"]], []
    optimizer = AdamW(table, case)
    for stage in ("low", "high") if case["eta"] else ("all",):
        for start in range(0, len(responses), size):
            every = [(i, t) for i in range(start, start + size) for t in range(len(responses[i]))]
            tokens = [(i, t) for i, t in every if stage == "all" or low[i][t] == (stage == "low")]
            loss, gradient = 0.0, [[0.0] * len(row) for row in table]
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
            step = {"stage": stage, "first_row": start, "response_tokens": len(every)}
            step |= {"updated_tokens": len(tokens), "skipped": skipped, "loss": loss}
            steps.append(step | {"gradient": gradient, "table": [list(row) for row in table]})
    found = {"old_logprobs": old, "ref_logprobs": ref, "advantages": advantages}
    return case | found | {"low": low, "steps": steps}


def main():
    path = Path(__file__).resolve().parent.parent / "golden.json"
    page = json.loads(path.read_text(encoding="utf-8"))
    page["cases"] = [solve(case) for case in page["cases"]]
    page["treatments"] = [solve_treatments(case) for case in page["treatments"]]
    page["rollouts"] = [solve_rollout(case) for case in page["rollouts"]]
    path.write_text(json.dumps(page) + "\n", encoding="utf-8")
    print(f"{path}: every output computed anew")


if __name__ == "__main__":
    look = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=look).parse_args()
    main()
