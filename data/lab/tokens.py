"""One update, token by token: a page to open beside the paper, in any browser, without a network.

    python data/lab/tokens.py                             # tokens.html, of the bundled policy
    python data/lab/tokens.py --picture update.svg        # and a picture of its first answer
    python data/lab/tokens.py --model FOLDER --task math --data problems.jsonl --out page.html

The policy answers a batch of training prompts. A copy of it makes one update with each method. The
page has the best and the worst answer to some prompts, each token coloured by π, by its gradient,
or by the change of log π. The picture is an SVG that moves: the first of these answers, the
gradient of each token, and what Lopti's two passes do to it.

Beside --out and --picture it takes lopti.py's flags, but for those of later methods. α and η are
the paper's unless given; --show says how many prompts. An optimizer step takes the whole batch. All
is in float32.
"""

import argparse
import json
import shlex
import sys
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from string import Template
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti  # isort: skip, before torch

import diagnose
import theory
import torch
from variants import updated_copy

HERE = Path(__file__).resolve().parent

DEFAULTS = ["--alpha", "0.3", "--eta", "0.5", "--show", "3"]
FIXED = ["--dtype", "float32", "--mini-batch-size", "0"]
SHOWN = ("alpha", "eta", "group_size", "temperature", "learning_rate")
NOT_SHOWN = ("stapo", "top_entropy", "min_p", "without_bias", "eval_only")


def token_texts(tokenizer, ids):
    """The text of each of T tokens in its place; together they are the decoded whole.

    Of a character that is made of several tokens, the last has it and the others are empty.
    """
    whole, rests = tokenizer.decode(ids), tokenizer.batch_decode([ids[i:] for i in range(len(ids))])
    starts = accumulate((len(whole) - len(rest) for rest in rests), max)
    return [whole[start:end] for start, end in pairwise([*starts, len(whole)])]


@torch.no_grad()
def at_the_logits(policy, rollout, args):
    """‖∇_z log π‖ (B, L), and for each response the five largest π and their ids, (T, 5) each."""
    norms, likeliest = [], []
    for row in range(len(rollout.ids)):
        response = rollout.rows([row])
        logits = lopti.token_logits(policy, response.ids, response.mask, args.temperature)
        norms.append(theory.logit_gradient_norm(logits, response.ids[response.mask]))
        likeliest.append(logits.softmax(-1).topk(5))
    return lopti.spread(torch.cat(norms), rollout.mask), likeliest


def after_updates(policy, rollout, args):
    """Δ log π after each step of each method: {name: (B, L)}, by `variants.updated_copy`."""
    before, every = rollout.old_logprobs, rollout.mask
    low, high = lopti.split_tokens(before, every, args.eta)
    weighted = lopti.reweight_advantages(rollout.advantages, before, args.alpha)
    methods = (  # the batch, and the tokens of each step
        (rollout, {"grpo": every, "two_passes": every}),
        (replace(rollout, advantages=weighted), {"ar": every}),
        (rollout, {"lopti_low": low, "lopti": high}),
    )
    return {
        name: lopti.score(trained, rollout, args)[0] - before
        for batch, steps in methods
        for name, trained in zip(steps, updated_copy(policy, batch, steps.values(), args))
    }


def short(value):
    return float(f"{value:.4g}")


def shares_of(numbers, eta, mask):
    """What the unlikely tokens have of all tokens, gradients, and of each Lopti pass's move: %."""
    low, first = numbers["pi"] < eta, numbers["lopti_low"]
    sizes = {"tokens": mask.float(), "gradient": numbers["gradient"]}
    sizes |= {"first": first, "second": numbers["lopti"] - first}
    of_low = lambda size: (size * low).abs().sum() / size.abs().sum().clamp(min=1e-30)
    return {name: short(100 * of_low(size)) for name, size in sizes.items()}


def best_and_worst(values, group_size, count):
    """The best and the worst response of so many groups, those with unequal rewards first.

    >>> best_and_worst(torch.tensor([1.0, 1.0, 0.0, 3.0]), group_size=2, count=2)
    [(3, 2), (1, 0)]
    """
    groups = torch.arange(len(values)).split(group_size)
    groups = [sorted(group.tolist(), key=values.__getitem__) for group in groups]
    groups.sort(key=lambda group: bool(values[group[0]] == values[group[-1]]))
    return [(group[-1], group[0]) for group in groups[:count]]


def with_names(tokenizer, likeliest, ids, pi):
    """[text, π] of the likeliest tokens at T places and of the sampled ones, which a 1 marks."""
    places = []
    for shares, others, id, own in zip(*map(torch.Tensor.tolist, (*likeliest, ids, pi))):
        found = {**dict(zip(others, shares)), id: own}.items()
        places.append([[tokenizer.decode([i]), short(x)] + [1] * (i == id) for i, x in found])
    return places


def page_data(policy, tokenizer, rows, args):
    """All that the page shows; `rows` are the prompts of the batch."""
    torch.manual_seed(args.seed)
    rollout, values = diagnose.collect(policy, tokenizer, rows, args)
    if args.kl_coef:  # in the first step the policy is its own reference
        rollout.ref_logprobs = rollout.old_logprobs
    norms, likeliest = at_the_logits(policy, rollout, args)
    known = {
        "pi": rollout.old_logprobs.exp(),
        "gradient": rollout.advantages.abs() * norms,  # before the first step w of Eq. 2 is Â
        **after_updates(policy, rollout, args),
    }

    def answer(index):
        inside = rollout.mask[index]
        ids, (advantage, *_) = rollout.ids[index, inside], rollout.advantages[index, inside]
        tokens = {name: each[index, inside] for name, each in known.items()}
        return {
            "reward": short(values[index]),
            "advantage": short(advantage),
            "truncated": bool(rollout.truncated[index]),
            "texts": token_texts(tokenizer, ids.tolist()),
            "special": [int(id in tokenizer.all_special_ids) for id in ids.tolist()],
            "tokens": {name: list(map(short, tokens[name].tolist())) for name in tokens},
            "likeliest": with_names(tokenizer, likeliest[index], ids, tokens["pi"]),
        }

    prompts = []
    for pair in best_and_worst(values.cpu(), args.group_size, max(1, args.show)):
        row = rows[pair[0] // args.group_size]
        answers = [answer(index) for index in pair]
        prompts.append({"text": row["prompt"], "solution": row["solution"], "answers": answers})
    shares = shares_of(known, args.eta, rollout.mask)
    settings = {name: getattr(args, name) for name in SHOWN} | {"responses": len(values)}
    return {"prompts": prompts, "shares": shares, "settings": settings}


def picture(data):
    """The first answer as an SVG: each token's gradient, then what Lopti's passes move."""
    answer, eta, drawn = data["prompts"][0]["answers"][0], data["settings"]["eta"], []
    numbers, left, top = answer["tokens"], 20, 148
    first, both = numbers["lopti_low"], numbers["lopti"]
    second = [after - before for before, after in zip(first, both)]
    bar, triangle = 56 / (max(numbers["gradient"]) or 1), -27 / (max(map(abs, first + second)) or 1)
    whole, shape = (HERE / "update.svg.in").read_text(encoding="utf-8").split("TOKEN\n")
    for i, text in enumerate(answer["texts"]):
        name = "end" if answer["special"][i] else text.strip() or "␣"
        name = "".join(letter if letter.isprintable() else "▯" for letter in name)
        width = 11.5 * len(name) + 8  # of monospaced type
        if left + width > 620 or (drawn and "\n" in answer["texts"][i - 1]):
            if top == 460:  # four lines are enough
                break
            left, top = 20, top + 104
        sizes = {"left": left, "top": top, "width": width, "middle": width / 2}
        sizes |= {"gradient": bar * numbers["gradient"][i]}
        sizes |= {"first": triangle * first[i], "second": triangle * second[i]}
        written = {key: f"{size:.1f}" for key, size in sizes.items()}
        kind = "low" if numbers["pi"][i] < eta else "high"
        drawn.append(Template(shape).substitute(written, kind=kind, name=escape(name)))
        left += width + 3
    tensors = {name: torch.tensor(values) for name, values in numbers.items()}
    shares = shares_of(tensors, eta, torch.ones_like(tensors["pi"]))
    shares |= {f"all_{key}": share for key, share in data["shares"].items()}
    shares = {name: f"{value:.0f}" for name, value in shares.items()}
    told = {"eta": eta, "responses": data["settings"]["responses"], "model": escape(data["model"])}
    told["sign"] = "rewarded" if answer["advantage"] > 0 else "punished"
    places = {"legend": top + 120, "height": top + 140}
    return Template(whole).substitute(shares | told | places, drawn="".join(drawn))


def main(argv=None):
    look = argparse.RawDescriptionHelpFormatter
    parser = lopti.Parser(description=__doc__, formatter_class=look, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("tokens.html"), help="the page")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="an SVG of its first answer")
    options, flags = parser.parse_known_args(argv)
    args = lopti.parse_arguments([*DEFAULTS, *flags, *FIXED])
    if given := [f"--{name.replace('_', '-')}" for name in NOT_SHOWN if getattr(args, name)]:
        raise lopti.UserError(f"the page shows an update by the paper's methods: not {given[0]}")
    policy, tokenizer, rows, _ = lopti.prepare(args)
    batch = next(lopti.prompt_stream(rows, min(args.prompts_per_step, len(rows)), args.seed))
    command = shlex.join(["python", "data/lab/tokens.py", *flags])
    model = args.model.removeprefix(f"{lopti.HERE}/")
    data = {"model": model, "command": command, **page_data(policy, tokenizer, batch, args)}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    text = text.replace("<", r"\u003c")  # no token can end the script element that holds the data
    page = (HERE / "tokens.html.in").read_text(encoding="utf-8").replace("DATA", text, 1)
    options.out.write_text(page, encoding="utf-8")
    if options.picture:
        options.picture.write_text(picture(data), encoding="utf-8")
    print(f"{options.out}: {len(data['prompts'])} prompts, {len(page.encode()) / 1000:.0f} KB")


if __name__ == "__main__":
    sys.exit(lopti.exit_code(main, "tokens.py"))
