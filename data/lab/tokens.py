"""One update, token by token: a page to open beside the paper, in any browser, without a network.

    python data/lab/tokens.py                     # tokens.html, of the bundled model
    python data/lab/tokens.py --hero hero.svg     # and a picture of one answer, for a README
    python data/lab/tokens.py --model FOLDER --task math --data problems.jsonl --out page.html

The model answers a batch of training prompts. A copy of it makes one update with each method, in
float32; an optimizer step takes the whole batch. The page has the best and the worst answer to some
prompts (--show), each token coloured by π, by its weighted push, or by the change of log π. α and η
are the paper's unless given. It takes lopti.py's flags of method, sampling, model and data.
"""

import argparse
import json
import shlex
import sys
import textwrap
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

HERE = Path(__file__).resolve().parent

DEFAULTS, FIXED = "--alpha 0.3 --eta 0.5 --show 3", "--dtype float32 --mini-batch-size 0"
REFUSED = """--stapo --top-entropy --min-p --order --passes --mini-batch-size --dtype --steps
--output --name --resume --save-every --eval-only --eval-every --eval-size --eval-samples"""


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
    """Δ log π after each step of each method: {name: (B, L)}, by `theory.updated_copy`."""
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
        for name, trained in zip(steps, theory.updated_copy(policy, batch, steps.values(), args))
    }


def short(value):
    return float(f"{value:.4g}")


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
        "weighted_push": rollout.advantages.abs() * norms,  # before the first step w of Eq. 2 is Â
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
        row, answers = rows[pair[0] // args.group_size], [*map(answer, pair)]
        prompts.append({"text": row["asked"], "solution": row["solution"], "answers": answers})
    low = rollout.mask & (known["pi"] < args.eta)  # their shares in %
    share = lambda sizes: short(100 * sizes[low].sum() / sizes.sum().clamp(min=1e-30))
    shares = {"tokens": share(rollout.mask.float()), "weighted_push": share(known["weighted_push"])}
    names = ("alpha", "eta", "group_size", "temperature", "learning_rate")
    settings = {"responses": len(values)} | {name: getattr(args, name) for name in names}
    return {"prompts": prompts, "shares": shares, "settings": settings}


def hero(data):
    """The first good answer as an SVG: each token at its π with its push, and its pass."""
    prompt, settings = data["prompts"][0], data["settings"]
    (good, bad), eta, alpha = prompt["answers"], settings["eta"], settings["alpha"]
    if good["advantage"] <= 0:
        raise lopti.UserError("no answer is better than its group: take another --seed")
    whole, *shapes = (HERE / "hero.svg.in").read_text(encoding="utf-8").split("PART\n")
    printed = lambda text: "".join(x if x.isprintable() else "▯" for x in text)
    visible = lambda text: escape(printed(" ".join(text.split())))
    drawn, left, foot, end, pushes = ["", "", ""], 46, 200, 16, good["tokens"]["weighted_push"]
    texts = [" end" if special else text for text, special in zip(good["texts"], good["special"])]
    tokens = list(zip(texts, map(str.strip, texts), good["tokens"]["pi"], pushes))

    def draw(part, pi, word="", **places):
        kind = 'class="low" fill="#d55e00"' if pi < eta else 'class="high" fill="#0072b2"'
        written = {name: f"{place:.1f}" for name, place in places.items()}
        drawn[part] += Template(shapes[part]).substitute(written, kind=kind, word=visible(word))

    for text, word, pi, _ in tokens:  # the answer, two lines of monospaced type
        left, width = left + 11 * text[:1].isspace(), 11 * len(word) + 1
        if left + width > 620:
            left, foot = 46, foot + 30
        if word and foot < 240:
            draw(0, pi, word, left=left, foot=foot, width=width, middle=left + width / 2)
        left += width + 11 * (text[-1:].isspace() and word > "")
    for _, word, pi, push in sorted(tokens, key=lambda token: token[2]):
        x, height, width = 24 + 592 * pi, 116 * push / max(pushes), 10.2 * len(word)
        draw(1, pi, left=x - 5, height=height, kept=height * (alpha * pi + 1 - alpha))
        left = x + 5 - width if pi < eta else min(x - 5, 622 - width)
        if height > 12 and left > end - 4:  # room for its name
            left = max(left, end + 2)
            draw(2, pi, word, left=left, foot=200 - height)
            end = left + width
        end = max(end, x + 5)
    low = [push for *_, pi, push in tokens if pi < eta]
    told = {name: f"{value:g}".replace("0.", ".") for name, value in settings.items()}
    told |= {"low": len(low), "high": len(tokens) - len(low), "split": 24 + 592 * eta}
    told |= {"push": f"{100 * sum(low) / sum(pushes):.0f}", "model": visible(data["model"])}
    said = "".join(text for text, special in zip(bad["texts"], bad["special"]) if not special)
    cut = lambda text, mark: textwrap.wrap(visible(text), 51, max_lines=2, placeholder=mark) + [""]
    (asked, more, *_), (wrong, *_) = cut(f"“{prompt['text']}”", " …”"), cut(said, " …")
    told |= dict(zip(("words", "bars", "names"), drawn), asked=asked, asked_on=more, bad=wrong)
    return Template(whole).substitute(told)


def main(argv=None):
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=look, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("tokens.html"), help="the page")
    parser.add_argument("--hero", type=Path, metavar="FILE", help="an SVG of its first answer")
    options, flags = parser.parse_known_args(argv)
    args = lopti.parse_arguments([*DEFAULTS.split(), *flags, *FIXED.split()])
    if given := [flag for flag in flags if flag.split("=")[0] in REFUSED.split()]:
        raise lopti.UserError(f"one update by the paper's methods is shown: not {given[0]}")
    policy, tokenizer, rows, _ = lopti.prepare(args)
    batch = next(lopti.prompt_stream(rows, min(args.prompts_per_step, len(rows)), args.seed))
    data = {"model": args.model.removeprefix(f"{lopti.HERE}/")}
    data |= {"command": shlex.join(["python", "data/lab/tokens.py", *flags])}
    data |= page_data(policy, tokenizer, batch, args)
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    text = text.replace("<", r"\u003c")  # no token can end the script element that holds the data
    page = (HERE / "tokens.html.in").read_text(encoding="utf-8").replace("DATA", text, 1)
    options.out.write_text(page, encoding="utf-8")
    if options.hero:
        options.hero.write_text(hero(data), encoding="utf-8")
    print(f"{options.out}: {len(data['prompts'])} prompts, {len(page.encode()) / 1000:.0f} KB")


if __name__ == "__main__":
    sys.exit(lopti.exit_code(main, "tokens.py"))
