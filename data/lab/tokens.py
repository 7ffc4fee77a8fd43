"""One update, token by token: a page to open beside the paper, in any browser, without a network.

    python data/lab/tokens.py                             # tokens.html, of the bundled policy
    python data/lab/tokens.py --model FOLDER --task math --data problems.jsonl --out page.html

The policy answers a batch of training prompts. A copy of it makes one update with GRPO, one with
AR, one with Lopti. The page has the best and the worst answer to some prompts, each token coloured
by π, by its gradient, by the change of log π, and so on.

Beside --out it takes lopti.py's flags. α, η and the other methods' ρ are the papers' unless given;
--show says how many prompts. An optimizer step takes the whole batch. All is in float32.
"""

import argparse
import copy
import json
import shlex
import sys
from itertools import accumulate, pairwise
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

import diagnose
import theory
import torch

import lopti
import rewards

TEMPLATE = HERE / "tokens.html.in"
DEFAULTS = {"alpha": 0.3, "eta": 0.5, "top_entropy": 0.2, "min_p": 2.3e-6, "show": 3}
SHOWN = (*DEFAULTS, "group_size", "temperature", "learning_rate", "stapo_tau")
# The updates are GRPO's, AR's and Lopti's alone; which tokens the others keep is only shown.
UPDATE = {"mini_batch_size": 0, "stapo": False, "top_entropy": 0, "min_p": 0}


def token_texts(tokenizer, ids):
    """The text of each of T tokens in its place; together they are the decoded whole.

    Of a character that is made of several tokens, the last has it and the others are empty.
    """
    whole, rests = tokenizer.decode(ids), tokenizer.batch_decode([ids[i:] for i in range(len(ids))])
    starts = accumulate((len(whole) - len(rest) for rest in rests), max)
    return [whole[start:end] for start, end in pairwise([*starts, len(whole)])]


def token_name(tokenizer, id):
    """The text of a token alone, or its name in the vocabulary where that is no whole character."""
    text = tokenizer.decode([id])
    return text if text and "\ufffd" not in text else str(tokenizer.convert_ids_to_tokens(id))


def before_update(rollout, entropies, args):
    """What is known of each token before the first step: {name: (B, L)}."""
    pi, advantages, mask = rollout.old_logprobs, rollout.advantages, rollout.mask
    weight = theory.gradient_weight(pi, pi, advantages, ref_logprobs=rollout.ref_logprobs)
    stapo = (pi, entropies, advantages, mask, args.stapo_tau, args.stapo_quantile)
    return {
        "pi": pi.exp(),
        "entropy": entropies,
        "advantage": advantages,
        "gradient": weight.abs(),  # times ‖∇_z log π‖, from `at_the_logits`
        "ar": lopti.reweight_advantages(torch.ones_like(pi), pi, args.alpha),
        "low": lopti.split_tokens(pi, mask, args.eta)[0],
        "stapo": lopti.stapo_mask(*stapo),
        "eighty_twenty": lopti.entropy_mask(entropies, mask, args.top_entropy),
    }


@torch.no_grad()
def at_the_logits(policy, tokenizer, response, args):
    """What needs the whole distribution at each of the T tokens of a Rollout of one response.

    Returns ‖∇_z log π‖ (T,), whether min-p keeps the token (T,), and the five likeliest tokens,
    [name, π, whether it is the sampled one] each; that one comes sixth if it is not among them.
    """
    logits = lopti.token_logits(policy, response.ids, response.mask, args.temperature)
    ids, norms, safe, likeliest = response.ids[response.mask], [], [], []
    for z, chosen in zip(logits.split(256), ids.split(256)):  # (256, V) at a time
        norms.append(theory.logit_gradient_norm(z, chosen))
        safe.append(lopti.safe_vocabulary(z, args.min_p).gather(1, chosen[:, None])[:, 0])
        for pi, id in zip(z.softmax(-1), chosen.tolist()):
            top = list(dict.fromkeys([*pi.topk(5).indices.tolist(), id]))
            names = [token_name(tokenizer, other) for other in top]
            likeliest.append(list(zip(names, rounded(pi[top]), [other == id for other in top])))
    return torch.cat(norms), torch.cat(safe), likeliest


def after_updates(policy, rollout, shown, args):
    """Δ log π of the responses `shown` after each stage of each method: {name: (shown, L)}.

    Each method updates its own copy of the policy, on the whole rollout, with a new optimizer.
    """

    def logprobs(model):
        return lopti.score(model, rollout.rows(shown), args)[0]

    args = diagnose.changed(args, **UPDATE)
    before, changes = logprobs(policy), {}
    low, high = lopti.split_tokens(rollout.old_logprobs, rollout.mask, args.eta)
    for method, alpha, eta in (("grpo", 0, 0), ("ar", args.alpha, 0), ("lopti", 0, args.eta)):
        trained = copy.deepcopy(policy)
        optimizer = lopti.make_optimizer(trained, args)
        weighted = lopti.reweight_advantages(rollout.advantages, rollout.old_logprobs, alpha)
        batch = diagnose.changed(rollout, advantages=weighted)
        for stage, tokens in lopti.update_stages(low, high, rollout.mask, eta):
            lopti.update(trained, optimizer, batch, tokens, args)
            changes[f"{method}_{stage}"] = logprobs(trained) - before
    return changes


def rounded(values):
    return [float(f"{value:.4g}") for value in values.tolist()]


def best_and_worst(values, group_size, count):
    """The best and the worst response of so many groups, those with unequal rewards first.

    >>> best_and_worst(torch.tensor([1.0, 1.0, 0.0, 3.0]), group_size=2, count=2)
    [(3, 2), (1, 0)]
    """
    groups = values.view(-1, group_size)
    chosen = (groups == groups[:, :1]).all(1).int().argsort(stable=True)[:count]
    order = groups.argsort(dim=1, stable=True) + group_size * torch.arange(len(groups))[:, None]
    return [(best, worst) for best, worst in order[chosen][:, [-1, 0]].tolist()]


def page_data(policy, tokenizer, rows, args):
    """All that the page shows; `rows` are the prompts of the batch."""
    torch.manual_seed(args.seed)
    whole = diagnose.changed(args, min_p=0.0)  # the page shows what min-p would leave out
    rollout, values, entropies = diagnose.collect(policy, tokenizer, rows, whole)
    if args.kl_coef:  # in the first step the policy is its own reference
        rollout.ref_logprobs = rollout.old_logprobs
    pairs = best_and_worst(values.cpu(), args.group_size, args.show)
    shown, special = [index for pair in pairs for index in pair], set(tokenizer.all_special_ids)
    known, changes = (
        before_update(rollout, entropies, args),
        after_updates(policy, rollout, shown, args),
    )
    answers = []
    for number, index in enumerate(shown):
        response = rollout.rows([index])
        norms, safe, likeliest = at_the_logits(policy, tokenizer, response, args)
        ids, place = response.ids[response.mask].tolist(), rollout.mask[index].nonzero()[:, 0]
        tokens = {name: of_tokens[index, place] for name, of_tokens in known.items()}
        tokens |= {"gradient": tokens["gradient"] * norms, "min_p": safe}
        tokens |= {name: change[number, place] for name, change in changes.items()}
        answer = {
            "reward": rounded(values[[index]])[0],
            "truncated": bool(rollout.truncated[index]),
        }
        answer |= {"tokens": {name: rounded(of_tokens) for name, of_tokens in tokens.items()}}
        answer |= {"texts": token_texts(tokenizer, ids), "special": [id in special for id in ids]}
        answers.append(answer | {"likeliest": likeliest})
    prompts = []
    for (best, _), pair in zip(pairs, zip(answers[::2], answers[1::2])):
        row = rows[best // args.group_size]
        prompts.append({"text": row["prompt"], "solution": row["solution"], "answers": pair})
    settings = {name: getattr(args, name) for name in SHOWN} | {"responses": len(values)}
    vocabulary = len(policy.get_output_embeddings().weight)
    return {"prompts": prompts, "settings": settings, "vocabulary": vocabulary}


def write_page(args, out, command):
    device = lopti.choose_device(args.device)
    policy, tokenizer = lopti.load_model(args.model, device)
    source = args.data or lopti.HERE / "data" / f"{args.task}_train.jsonl"
    rows = rewards.load_rows(source, args, tokenizer)
    lopti.check_model(policy, tokenizer, rows, args)
    batch = next(lopti.prompt_stream(rows, min(args.prompts_per_step, len(rows)), args.seed))
    model = args.model.removeprefix(f"{lopti.HERE}/")
    data = {"model": model, "command": command, **page_data(policy, tokenizer, batch, args)}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    text = text.replace("<", r"\u003c")  # no token can end the script element that holds the data
    page = TEMPLATE.read_text(encoding="utf-8").replace("DATA", text, 1)
    out.write_text(page, encoding="utf-8")
    print(f"{out}: {len(data['prompts'])} prompts, {out.stat().st_size / 1000:.0f} KB")


def main(argv=None):
    look = argparse.RawDescriptionHelpFormatter
    parser = lopti.Parser(description=__doc__, formatter_class=look, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("tokens.html"), help="the page")
    try:
        options, flags = parser.parse_known_args(argv)
        args = lopti.parse_arguments([*flags, "--dtype", "float32"])
        vars(args).update({name: vars(args)[name] or value for name, value in DEFAULTS.items()})
        write_page(args, options.out, shlex.join(["python", "data/lab/tokens.py", *flags]))
        return 0
    except (lopti.UserError, OSError, torch.OutOfMemoryError) as error:
        print(f"tokens.py: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
