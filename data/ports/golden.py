"""Makes golden.json: numbers that a right port of the method must reproduce.

    python data/ports/golden.py     # computes the outputs in golden.json again, from its inputs

Nothing of lopti.py is used here: the tests hold lopti.py to these numbers as they would hold a
port. golden.json has three parts, each a list of cases with inputs and outputs.

`cases`: one loss and its gradient, for each kind of pass. Inputs, of B responses of up to T tokens:
    name, group_size, rewards (B,), lengths (B,): what lies beyond a response's length is padding
    old_logprobs, new_logprobs, ref_logprobs (B, T): log π of the policy that sampled, of the policy
        that is updated, of the reference
    alpha, eta, clip_low, clip_high, clip_dual (ε_l, ε_h and c), kl_coef (β)
Outputs:
    advantages (B,): Â of Eq. 1; reweighted_advantages (B, T): Â after Eq. 4
    low (B, T): true where π_old < η
    passes: for "all", "low" and "high", the tokens that the pass updates: loss, policy_loss (the
        loss without the KL), kl (a mean without β), clip_low_share, clip_high_share and
        clip_dual_share (how many tokens have no policy gradient because of each clip), all divided
        by N, the number of all tokens; gradient (B, T): that of loss by new_logprobs

`rollouts`: whole updates of a policy small enough to write down. Inputs, beside the settings above:
    table (V, V): row i holds the logits of the token after token i; reference: another such table
    prompts (B,), one token each; responses: a list of tokens each
    temperature; mini_batch_size: responses of an optimizer step; micro_batch_size: responses of a
        forward and backward pass, which must change nothing
    learning_rate, weight_decay, max_grad_norm of AdamW (betas 0.9 and 0.999, epsilon 1e-8)
Outputs:
    old_logprobs, ref_logprobs, advantages (after Eq. 4) and low: a list for each response
    steps: one for each pass and mini-batch, in their order: pass ("all", "low" or "high"),
        first_row, response_tokens (N), updated_tokens; loss and so on as above; gradient_norm
        before the gradient is clipped, skipped (it is 0: no step), table (V, V) after the step

`model`: whole updates of the bundled model (data/tiny, which is the reference too), from four
responses to one puzzle, or two to each of two. Inputs: prompts and responses, as lists of token
ids, four of each, and what is named above. Outputs, of which about six digits hold on another
machine (transformers computes a part of a forward pass in float32):
    advantages (4,): Â of Eq. 1
    old_logprobs: a list for each response
    steps: as above, without table
    change_norm: that of the change of all weights
    weights: {name of a parameter: its first entry after the update}

The equations are computed in plain Python, one token (i, t) at a time: position t of row i. In
`rollouts` and `model` PyTorch takes the derivatives by log π from there to the weights, and makes
AdamW's steps. math.fsum rounds alike in every Python. The inputs were drawn at random until every
clip and every mistake of mistakes.diff shows in some case.
"""

import itertools
import json
import math
from functools import partial
from pathlib import Path
from statistics import mean, stdev

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

CLIPS = ("low", "high", "dual")
HERE = Path(__file__).resolve().parent


# Parts of the equations ---------------------------------------------------------------------------


def token_terms(new, old, ref, advantage, case):
    """Returns policy loss, KL, the clip that acts, and the derivative by `new`, of one token."""
    ratio = math.exp(new - old)
    inside = max(1 - case["clip_low"], min(ratio, 1 + case["clip_high"]))
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
    if not case["kl_coef"]:
        return loss, 0.0, clipped, derivative

    difference = max(-5, min(ref - new, 5))
    estimate = math.exp(difference) - difference - 1
    if abs(ref - new) < 5 and estimate < 10:
        derivative += case["kl_coef"] * (1 - math.exp(difference))
    return loss, min(estimate, 10), clipped, derivative


def group_advantages(case):
    advantages = []
    for start in range(0, len(case["rewards"]), case["group_size"]):
        group = case["rewards"][start : start + case["group_size"]]
        # equal rewards: every advantage is 0
        scale = math.inf if len(set(group)) == 1 else stdev(group) + 1e-6
        for reward in group:
            advantages.append((reward - mean(group)) / scale)
    return advantages


def by_token(rows, lengths=None):
    """Returns rows as {(i, t): value}, without their padding."""
    lengths = lengths or [len(row) for row in rows]
    return {(i, t): rows[i][t] for i, length in enumerate(lengths) for t in range(length)}


def by_row(values, like, empty=0.0):
    """Returns {(i, t): value} as rows, which are as long as those of `like`."""
    return [[values.get((i, t), empty) for t in range(len(row))] for i, row in enumerate(like)]


def reweight_and_split(case, old, advantages):
    """Returns Â after Eq. 4, and whether π_old < η, of every token."""
    reweighted = {}
    low = {}
    for (i, t), logprob in old.items():
        pi = math.exp(logprob)
        reweighted[i, t] = (case["alpha"] * pi + (1 - case["alpha"])) * advantages[i]
        low[i, t] = pi < case["eta"]
    return reweighted, low


def tokens_of_pass(name, tokens, low):
    return [token for token in tokens if name == "all" or low[token] == (name == "low")]


def solve_pass(case, updated, new, old, ref, advantages, normalizer):
    """Returns the loss of the tokens that a pass updates, and its derivative by log π of each."""
    losses = []
    kls = []
    clips = []
    derivatives = {}
    for token in updated:
        loss, kl, clip, derivative = token_terms(
            new[token], old[token], ref[token], advantages[token], case
        )
        losses.append(loss)
        kls.append(kl)
        clips.append(clip)
        derivatives[token] = derivative / normalizer
    policy_loss = math.fsum(losses) / normalizer
    kl = math.fsum(kls) / normalizer
    found = {"loss": policy_loss + case["kl_coef"] * kl, "policy_loss": policy_loss, "kl": kl}
    for name in CLIPS:
        found[f"clip_{name}_share"] = clips.count(name) / normalizer
    return found, derivatives


# cases --------------------------------------------------------------------------------------------


def solve_case(case):
    lengths = case["lengths"]
    new = by_token(case["new_logprobs"], lengths)
    old = by_token(case["old_logprobs"], lengths)
    ref = by_token(case["ref_logprobs"], lengths)
    advantages = group_advantages(case)
    reweighted, low = reweight_and_split(case, old, advantages)
    passes = {}
    for name in ("all", "low", "high"):
        updated = tokens_of_pass(name, old, low)
        found, derivatives = solve_pass(case, updated, new, old, ref, reweighted, len(old))
        passes[name] = found | {"gradient": by_row(derivatives, case["old_logprobs"])}
    return {
        "advantages": advantages,
        "reweighted_advantages": by_row(reweighted, case["old_logprobs"]),
        "low": by_row(low, case["old_logprobs"], False),
        "passes": passes,
    }


# rollouts and model -------------------------------------------------------------------------------


def solve_steps(case, optimizer, logprobs, old, ref, advantages, low):
    """Makes the optimizer steps, and returns them one after the other.

    `logprobs(i)` are those of response i under the policy of the moment: (T,).
    """
    weights = optimizer.param_groups[0]["params"]
    mini_batches = torch.arange(len(case["responses"])).split(case["mini_batch_size"])
    passes = ["low", "high"] if case["eta"] else ["all"]
    for name, mini_batch in itertools.product(passes, mini_batches):
        of_rows = {i: logprobs(i) for i in mini_batch.tolist()}
        new = {(i, t): x for i, row in of_rows.items() for t, x in enumerate(row.tolist())}
        updated = tokens_of_pass(name, new, low)
        found, derivatives = solve_pass(case, updated, new, old, ref, advantages, len(new))
        slopes = [derivatives.get(token, 0.0) for token in new]  # 0: not in this pass
        torch.cat(list(of_rows.values())).backward(torch.tensor(slopes, dtype=torch.float64))
        norm = float(torch.nn.utils.clip_grad_norm_(weights, case["max_grad_norm"]))
        if norm > 0:
            optimizer.step()
        optimizer.zero_grad()
        step = {"pass": name, "first_row": int(mini_batch[0])}
        step |= {"response_tokens": len(new), "updated_tokens": len(updated)}
        yield step | found | {"skipped": norm == 0, "gradient_norm": norm}


def response_logprobs(logits, response, temperature):
    """Returns log π of the tokens of a response, (T,), from their logits, (T, V)."""
    every_logprob = (logits / temperature).log_softmax(-1)
    return every_logprob[range(len(response)), response]


def solve_rollout(case):
    responses = case["responses"]

    def logprobs(table, i):
        logits = table[[case["prompts"][i], *responses[i][:-1]]]
        return response_logprobs(logits, responses[i], case["temperature"])

    table = torch.tensor(case["table"], dtype=torch.float64, requires_grad=True)
    old_logprobs = [logprobs(table, i).tolist() for i in range(len(responses))]
    reference = torch.tensor(case["reference"], dtype=torch.float64)
    ref_logprobs = [logprobs(reference, i).tolist() for i in range(len(responses))]
    old = by_token(old_logprobs)
    ref = by_token(ref_logprobs)
    advantages, low = reweight_and_split(case, old, group_advantages(case))
    steps = []
    optimizer = torch.optim.AdamW([table], case["learning_rate"], weight_decay=case["weight_decay"])
    for step in solve_steps(case, optimizer, partial(logprobs, table), old, ref, advantages, low):
        steps.append(step | {"table": table.tolist()})
    return {
        "old_logprobs": old_logprobs,
        "ref_logprobs": ref_logprobs,
        "advantages": by_row(advantages, responses),
        "low": by_row(low, responses),
        "steps": steps,
    }


def solve_model(case):
    """Returns the outputs of a case. The reference is the first policy: its log π are the old."""
    logging.disable_progress_bar()
    policy = AutoModelForCausalLM.from_pretrained(HERE.parent / "tiny", dtype=torch.float64)
    responses = case["responses"]

    def logprobs(i):
        ids = torch.tensor([case["prompts"][i] + responses[i]])
        # The logits of a token speak of the next one.
        logits = policy(ids).logits[0, len(case["prompts"][i]) - 1 : -1]
        return response_logprobs(logits, responses[i], case["temperature"])

    old_logprobs = [logprobs(i).tolist() for i in range(len(responses))]
    old = by_token(old_logprobs)
    advantages, low = reweight_and_split(case, old, group_advantages(case))
    weights = list(policy.parameters())
    first_weights = torch.nn.utils.parameters_to_vector(weights).detach()
    optimizer = torch.optim.AdamW(weights, case["learning_rate"], weight_decay=case["weight_decay"])
    steps = list(solve_steps(case, optimizer, logprobs, old, old, advantages, low))
    change = torch.nn.utils.parameters_to_vector(weights) - first_weights
    found = {
        "advantages": group_advantages(case),
        "old_logprobs": old_logprobs,
        "steps": steps,
        "change_norm": change.norm().item(),
        "weights": {name: each.flatten()[0].item() for name, each in policy.named_parameters()},
    }
    return json.loads(json.dumps(found), parse_float=lambda number: float(f"{float(number):.8g}"))


# The file -----------------------------------------------------------------------------------------


def solve_part(part, cases):
    """Returns a part of golden.json, every output computed anew from the inputs."""
    solvers = {"cases": solve_case, "rollouts": solve_rollout, "model": solve_model}
    return [case | solvers[part](case) for case in cases]


def write_page(page, path):
    """Writes {part: cases} with one case a line."""
    parts = []
    for part, cases in page.items():
        lines = ",\n".join(json.dumps(case) for case in cases)
        parts.append(f'"{part}": [\n{lines}\n]')
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def main():
    path = HERE / "golden.json"
    page = json.loads(path.read_text(encoding="utf-8"))
    write_page({part: solve_part(part, cases) for part, cases in page.items()}, path)
    print(f"{path}: every output computed anew")


if __name__ == "__main__":
    main()
