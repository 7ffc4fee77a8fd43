"""Drawings and tables of the notebook. What they show is computed in measures.py and theory.py.

A "line" is what was measured on one rollout batch, as measures.py and real_model.py make it:
{"figure_1": ..., "figure_3": ...}, in the first batch also "figure_2".
"""

import io
import re
from collections import Counter

import experiments
import matplotlib.pyplot as plt
import measures
import numpy as np
import plot
import real_model
import theory
import torch
from IPython.display import Image, Markdown
from PIL import Image as Pillow
from plot import COLOURS, LINES

import lopti

BINS = ("π < .25", ".25–.5", ".5–.75", "π ≥ .75")
BIN_COLOURS = ("#D55E00", "#E69F00", "#56B4E9", "#0072B2")
ORANGE, BLUE, GREY = "#D55E00", "#0072B2", "#999999"
REAL = measures.RESULTS / "real_model_figures.jsonl"
REAL_COMMAND = "python data/lab/real_model.py figures"
CHANGE_LIMITS = (-0.15, 0.15)
NAMES = ("the bundled policy", "SmolLM2-135M-Instruct")
SMOLLM2_WORDS = 49152  # of its vocabulary
TICKS = (0.01, 0.1, 0.5, 0.9, 0.99, 0.999)  # of a logit axis
plt.rcParams.update({"axes.titlesize": 17, "legend.fontsize": 15, "legend.frameon": False})


# ---- pictures


def canvas(rows, columns, height=4.6, **options):
    """A figure as wide as a slide."""
    return plt.subplots(rows, columns, figsize=(14, height * rows), layout="constrained", **options)


def picture(figure):
    """The figure as a small PNG: 150 dpi, 64 colours."""
    stream, small = io.BytesIO(), io.BytesIO()
    figure.savefig(stream, dpi=150)
    plt.close(figure)
    Pillow.open(stream).convert("RGB").quantize(64).save(small, "png", optimize=True)
    return Image(small.getvalue(), width=1000)


def bars(axis, names, groups, *, base=0.0, digits=None, colours=COLOURS):
    """`groups`: label -> (means, halves of intervals), drawn side by side for each name."""
    width = 0.8 / len(groups)
    for number, (label, (means, halves)) in enumerate(groups.items()):
        places = np.arange(len(names)) + (number - (len(groups) - 1) / 2) * width
        heights = np.asarray(means) - base
        colour = colours if len(groups) == 1 else colours[number]
        style = {"capsize": 4, "ecolor": "#555555", "label": label}
        axis.bar(places, heights, width, bottom=base, yerr=halves, color=colour, **style)
        if digits is not None:
            for place, mean, half in zip(places, means, np.nan_to_num(halves)):
                text = f"{mean:.{digits}f}"
                how = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center"}
                axis.annotate(text, (place, max(mean, base) + half), fontsize=15, **how)
    axis.set_xticks(np.arange(len(names)), names)


def violins(axis, by_bin, limits=None):
    """The distribution of a value in each bin, from its quantiles in every batch."""
    samples = [np.concatenate(bins) for bins in zip(*(one["quantiles"] for one in by_bin))]
    drawn = axis.violinplot(samples, showmeans=True, showextrema=False, widths=0.85)
    for body, colour in zip(drawn["bodies"], BIN_COLOURS):
        body.set(facecolor=colour, alpha=0.7)
    drawn["cmeans"].set_color("black")
    axis.axhline(0, color="black", linewidth=0.8, linestyle=":")
    axis.set_xticks(range(1, 5), BINS)
    axis.set_ylim(limits)


def logit_axis(axis):
    """π from 0 to 1, stretched at both ends, where nearly all tokens are."""
    axis.set_xscale("logit")
    axis.set_xlim(1e-4, 1 - 1e-5)
    labels = [f"{tick:g}".removeprefix("0") for tick in TICKS]
    axis.set_xticks(TICKS, labels, minor=False, fontsize=14)
    axis.xaxis.set_minor_locator(plt.NullLocator())
    axis.set_xlabel("π of the token (logit axis)")


def token_sheet(tokenizer, rollout, row, *, width=104, lines=3, eta=0.5):
    """The first lines of a response, each token on its probability's colour; a bar under π < η."""
    tokens = [tokenizer.decode([token]).strip(" ") for token in rollout.response_ids[row]]
    pi = rollout.old_logprobs[row].exp().tolist()
    figure, axis = plt.subplots(figsize=(14, 0.62 * lines + 0.9), layout="constrained")
    map_, x, line = plt.get_cmap("cividis"), 0, 0
    for token, probability in zip(tokens, pi):
        token = token.replace("\n", "↵")
        size = len(token) + 0.8
        if x + size > width:
            x, line = 0, line + 1
        if line == lines:
            break
        colour = map_(probability)
        axis.add_patch(plt.Rectangle((x, -line - 0.33), size - 0.2, 0.66, color=colour))
        if probability < eta:
            axis.plot([x, x + size - 0.2], [-line - 0.42] * 2, color=ORANGE, linewidth=4)
        how = {"ha": "center", "va": "center", "family": "monospace", "fontsize": 16}
        ink = "white" if probability < 0.55 else "black"
        axis.text(x + (size - 0.2) / 2, -line, token, color=ink, **how)
        x += size
    axis.set(xlim=(0, width), ylim=(0.5 - lines, 0.5))
    axis.axis("off")
    scale = plt.cm.ScalarMappable(cmap=map_, norm=plt.Normalize(0, 1))
    bar = figure.colorbar(scale, ax=axis, location="bottom", aspect=60, fraction=0.12, pad=0.02)
    bar.set_label("probability π of the token; orange line: π < η = ½")
    return picture(figure)


def both(draw, lines, real):
    """The same picture of the bundled policy and, where it has been measured, of SmolLM2."""
    sets = [with_gradient(measured) for measured in (lines, real)]
    return [draw(measured, name) for measured, name in zip(sets, NAMES) if measured]


def with_gradient(lines):
    """The batches with a gradient: some group of answers had rewards that differ."""
    return [line for line in lines if line["figure_1"]["norm"]["all"]]


def tokens_and_gradients(lines, name):
    """Fig. 1 (a) to (d)."""
    figure, axes = canvas(2, 2)
    figure.suptitle(name)
    ones = [line["figure_1"] for line in lines]
    shares = measures.over_batches([[100 * share for share in one["share"]] for one in ones])
    bars(axes[0, 0], BINS, {"": shares}, colours=BIN_COLOURS, digits=1)
    axes[0, 0].set(title="(a) how many tokens?", ylabel="% of response tokens")
    violins(axes[0, 1], [one["advantage"] for one in ones])
    axes[0, 1].set(title="(b) which advantages?", ylabel="Â")
    violins(axes[1, 0], [one["change"]["all"] for one in ones], CHANGE_LIMITS)
    axes[1, 0].set(title="(c) change after an update on all", ylabel="change of π")
    norms = measures.over_batches([[*one["norm"]["bins"], one["norm"]["all"]] for one in ones])
    bars(axes[1, 1], [*BINS, "all"], {"": norms}, colours=[*BIN_COLOURS, GREY], digits=3)
    axes[1, 1].set(title="(d) gradient of the loss on one bin alone", ylabel="‖∇‖")
    return picture(figure)


def who_moves_whom(lines, name):
    """Fig. 1 (c), (e), (f) on one scale, and the mean size of the change in each bin."""
    figure, axes = canvas(2, 2)
    figure.suptitle(name)
    titles = {"all": "(c) update on all", "lowest": "(e) on π < .25", "highest": "(f) on π ≥ .75"}
    changes, sizes = [line["figure_1"]["change"] for line in lines], {}
    for axis, (updated, title) in zip(axes.flat, titles.items()):
        change = [change[updated] for change in changes]
        violins(axis, change, CHANGE_LIMITS)
        axis.set(title=title, ylabel="change of π")
        sizes[title] = measures.over_batches([one["size_by_bin"] for one in change])
    bars(axes[1, 1], BINS, sizes)
    axes[1, 1].set(title="mean size of the change", yscale="log", ylabel="|change of π|")
    axes[1, 1].legend(fontsize=13, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    return picture(figure)


def some_layers(layers, most=6):
    """Which columns of `layers` to show: all, or of a deep model five from first to last."""
    count = layers.shape[1]
    return range(count) if count <= most else np.linspace(0, count - 1, 5).astype(int)


def proposition(tokens, vocabulary_size, name):
    """Fig. 2: the cone at the logits, and the norms at the layers."""
    figure, axes = canvas(1, 2, 5.6)
    figure.suptitle(name)
    pi = np.clip(tokens["probability"], 0, 1 - 1e-6)
    grid = torch.tensor(np.append(np.linspace(2e-4, 0.99, 300), 1 - np.geomspace(0.01, 2e-5, 100)))
    lower, upper = theory.logit_gradient_bounds(grid, vocabulary_size)
    axes[0].fill_between(grid, lower, upper, color="#56B4E9", alpha=0.5, label="Prop. 4.2 allows")
    label = f"{len(pi)} tokens"
    axes[0].plot(pi, tokens["at_logits"], "o", markersize=3.5, color=ORANGE, label=label)
    logit_axis(axes[0])
    axes[0].set(title="at the logits", ylabel="‖∇ log π‖")
    layers = np.array(tokens["at_layers"])
    for number, colour in zip(some_layers(layers), COLOURS[1:]):
        label = f"layer {number}" if number else "embedding"
        axes[1].loglog(1 - pi, layers[:, number], "o", markersize=3, color=colour, label=label)
    axes[1].set(title="at the layers' outputs", xlabel="1 − π", ylabel="‖∇ log π‖")
    axes[1].set(xlim=(1e-4, 1.3), ylim=(layers[1 - pi > 1e-4].min() / 2, None))
    for axis in axes:
        axis.legend(markerscale=3)
    return picture(figure)


def levers(rollouts, alphas=(0.0, 0.1, 0.3, 1.0)):
    """Eq. 4: what one token may move, and how the tokens of the batches share it."""
    figure, axes = canvas(1, 2, 5)
    pi, shares = torch.linspace(0.001, 0.999, 300), {}
    for number, alpha in enumerate(alphas):
        weight = lopti.reweight_advantages(1 - pi, pi.log(), alpha)
        style = {"color": COLOURS[number], "linestyle": LINES[number]}
        axes[0].plot(pi, weight, label=f"α = {alpha:g}", **style)
        of_batches = [measures.lever_shares(rollout, alpha) for rollout in rollouts]
        shares[f"α = {alpha:g}"] = measures.over_batches(100 * np.array(of_batches))
    axes[0].set(title="the lever of one token", xlabel="π", ylabel="(1−π)·[απ + 1−α]")
    axes[0].legend()
    bars(axes[1], BINS, shares)
    axes[1].set(title="who holds the levers?", ylabel="% of the sum of levers")
    return picture(figure)


def risen(lines, name, optimizers=("SGD", "AdamW")):
    """Fig. 3 for both optimizers."""
    figure, axes = canvas(1, 2, 5.2, sharey=True)
    figure.suptitle(name)
    for axis, optimizer in zip(axes, optimizers):
        of_lines = [line["figure_3"][optimizer]["risen"] for line in lines]
        groups = {
            method: measures.over_batches([one[method] for one in of_lines])
            for method in of_lines[0]
        }
        bars(axis, BINS, groups, base=0.5)
        axis.axhline(0.5, color="black", linewidth=1)
        axis.set_title(optimizer)
    axes[0].set_ylabel("share of tokens with Â > 0\nwhose π rose")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return picture(figure)


def word_effects(differences):
    """A row for each kind of word: mean over puzzles and 95 % interval."""
    figure, axis = canvas(1, 1, 0.55 * len(differences) + 1.4)
    for row, values in enumerate(differences.values()):
        mean, half = experiments.mean_and_half(values)
        colour = COLOURS[0] if abs(mean) <= half else BLUE if mean > 0 else ORANGE
        axis.errorbar(mean, row, xerr=half, fmt="D", color=colour, markersize=9, capsize=4)
    axis.axvline(0, color="black", linewidth=1, linestyle=":")
    axis.set_yticks(range(len(differences)), list(differences))
    axis.set(ylim=(len(differences) - 0.5, -0.5))
    axis.set_xlabel("per 100 words: right minus wrong answers to the same puzzle")
    return picture(figure)


def treatments(rollout, entropies, most=2000):
    """Tokens by π and entropy: blue is what a treatment updates, orange what it leaves out."""
    figure, axes = canvas(1, 3, 5.4, sharey=True)
    mask, kept = rollout.mask, measures.treatments(rollout, entropies)
    pi = rollout.old_logprobs.exp()[mask].clamp(2e-4, 1 - 2e-5)
    height = entropies[mask].clamp(min=1e-3)
    shown = torch.arange(len(pi)) % max(1, len(pi) // most) == 0  # so many dots are enough
    for axis, name in zip(axes, ("Lopti, stage 1", "80/20", "STAPO")):
        kept_here = kept[name][mask]
        shown_here = shown | ~kept_here if name == "STAPO" else shown
        axis.semilogy(pi[shown & kept_here], height[shown & kept_here], "o", color=BLUE, ms=4)
        left_out = shown_here & ~kept_here
        axis.semilogy(pi[left_out], height[left_out], "o", color=ORANGE, ms=4)
        axis.set_title(name)
        logit_axis(axis)
    axes[0].set_ylabel("entropy (nats)")
    return picture(figure)


def cosines(measured):
    """How alike second and first step are: name -> one dictionary for each batch."""
    figure, axis = canvas(1, 1, 4.2)
    groups = {
        label: [experiments.mean_and_half([row[key] for row in rows]) for rows in measured.values()]
        for key, label in (("shared", "one AdamW for both steps"), ("own", "an AdamW for each"))
    }
    bars(axis, list(measured), {label: zip(*pairs) for label, pairs in groups.items()}, digits=2)
    axis.set(ylabel="cosine of the two steps", ylim=(0, 1.3))
    axis.legend(loc="upper center", ncols=2)
    return picture(figure)


# ---- tables


def table(rows, note=""):
    """Rows of cells, the first of them the head, as a table."""
    text = experiments.markdown([[str(cell) for cell in row] for row in rows])
    return Markdown(f"{text}\n\n{note}" if note else text)


def number(value, digits):
    """.38 rather than 0.38; − for minus."""
    text = f"{abs(value):.{digits}f}".removeprefix("0" if digits else "")
    return f"{'−' if value < 0 else ''}{text}"


def answers(rollout, rewards, group, size=8):
    """The answers to one prompt: reward, advantage, length."""
    rows = range(group * size, group * size + size)
    return table(
        [
            ("answer", *range(1, size + 1)),
            ("reward R", *(f"{rewards[row]:g}" for row in rows)),
            ("advantage Â", *(f"{rollout.advantages[row, 0]:+.2f}" for row in rows)),
            ("tokens", *(int(rollout.mask[row].sum()) for row in rows)),
        ]
    )


def three_tokens(old_logprobs, logprobs, advantages, weight, by_autograd):
    """Eqs. 1 and 2 on a few tokens: a column for each."""
    rows = {
        "π_old": old_logprobs.exp(),
        "π_θ": logprobs.exp(),
        "r": (logprobs - old_logprobs).exp(),
        "Â": advantages,
        "w by gradient_weight (Eq. 2)": weight,
        "w by autograd from policy_loss (Eq. 1)": by_autograd,
    }
    head = ("token", *range(1, 1 + weight.numel()))
    values = {name: tensor.detach().flatten().tolist() for name, tensor in rows.items()}
    return table(
        [head, *((name, *(f"{x + 0.0:.3f}" for x in row)) for name, row in values.items())]
    )


def shown(rows, digits):
    """'mean ± half' for each number of `rows`, which hold one list of numbers for each batch."""
    cells = [
        (number(mean, digits), number(half, digits))
        for mean, half in zip(*measures.over_batches(rows))
    ]
    return " / ".join(mean if half == "nan" else f"{mean} ± {half}" for mean, half in cells)


def columns(rows_of, measured):
    """(what, the paper's numbers, a cell for each of some sets of lines).

    `rows_of` takes a line and returns rows (what, the paper's numbers, numbers, digits).
    """
    sets = [[rows_of(line) for line in lines] for lines in measured]
    first = next(rows for rows in sets if rows)[0]
    return [
        (
            what,
            paper,
            *(shown([rows[i][2] for rows in rows_of_set], digits) for rows_of_set in sets),
        )
        for i, (what, paper, _, digits) in enumerate(first)
    ]


HEAD = ("", "paper", *NAMES)
NOT_MEASURED = f"SmolLM2 is not measured yet: `{REAL_COMMAND}` does it."


def beside(rows_of, lines, real):
    """A table of what the paper reports, what is measured here, and on a real language model."""
    note = f"Means over {len(lines)} batches ± half of a 95 % interval. "
    without = len(real) - len(with_gradient(real))
    ours = f"SmolLM2: {len(real)} batches of 16 answers; {without} have no gradient."
    note += ours if real else NOT_MEASURED
    return table([HEAD, *columns(rows_of, [lines, real])], note)


def ratio(value, whole):
    """NaN, which means over batches leave out, where a batch had no gradient."""
    return value / whole if whole else float("nan")


def figure_1_rows(line):
    """Fig. 1 (a), (b) and (d)."""
    one = line["figure_1"]
    norms, shares = one["norm"]["bins"], [100 * share for share in one["share"]]
    over_highest = [ratio(norm, norms[3]) for norm in norms]
    over_all = ratio(norms[0], one["norm"]["all"])
    return [
        ("(a) % of tokens, low to high π", "19 / 10 / 10 / 61", shares, 1),
        ("(b) mean Â, low to high π", "not given", one["advantage"]["mean"], 2),
        ("(d) ‖∇‖ of each bin over the highest's", "4.8 / 2.4 / 1.6 / 1", over_highest, 1),
        ("(d) ‖∇‖ of the lowest bin over that of all", ".88", [over_all], 2),
    ]


def agreement_table(policy, tokenizer, rollouts, args):
    """Of the gradient of each part of the tokens: how much batches have in common."""
    shares, gradients, words = {}, {}, Counter()
    for rollout in rollouts:
        for name, tokens in measures.parts_of(tokenizer, rollout).items():
            gradient = measures.gradient(policy, tokens, rollout, args)
            gradients.setdefault(name, []).append(gradient)
            shares.setdefault(name, []).append(100 * float(tokens.sum() / rollout.mask.sum()))
        decoded = tokenizer.batch_decode(rollout.response_ids[tokens][:, None])  # the last part's
        words.update(re.sub(r".*-(knight|knave)", "a name with its role", w) for w in decoded)
    rows = [("tokens", "% of all", "‖∇‖", "cosine of two batches", "‖expected ∇‖")]
    for name, of_batches in gradients.items():
        norm, cosine, half, signal = measures.agreement(torch.stack(of_batches))
        common = f"{number(cosine, 2)} ± {number(half, 2)}"
        share = number(np.mean(shares[name]), 1)
        rows.append((name, share, number(norm, 3), common, number(signal, 3)))
    note = f"{len(rollouts)} batches; ± is half of a 95 % interval (jackknife). "
    most = [f"`{word}` {count / words.total():.0%}" for word, count in words.most_common(6)]
    return table(rows, f"{note}*All else* is {', '.join(most)}, and others.")


def change_rows(line):
    """Fig. 1 (e) and (f) held against (c)."""
    change = line["figure_1"]["change"]
    parts = [change["lowest"], change["highest"]]
    sizes = [ratio(part["size"], change["all"]["size"]) for part in parts]
    likely = change["all"]["size_by_bin"][3]
    of_likely = [ratio(part["size_by_bin"][3], likely) for part in parts]
    likeness = [part["correlation"] for part in parts]
    return [
        ("mean size of (e), of (f), over that of (c)", "near 1 / much smaller", sizes, 2),
        ("the same, tokens with π ≥ .75 only", "not given", of_likely, 2),
        ("correlation of (e), of (f), with (c)", "not given", likeness, 2),
    ]


def turned_rows(line):
    """What Eq. 4 leaves of the gradient's direction and length."""
    cosines, lengths, steps = zip(*line["turned"].values())
    return [
        ("cosine with GRPO's gradient, α = .1 / .3 / 1", "not given", cosines, 3),
        ("length over that of GRPO's gradient", "not given", lengths, 2),
        ("cosine of the first steps of AdamW", "not given", steps, 3),
    ]


def risen_rows(line):
    """The highest bin of Fig. 3 as a difference to GRPO, and the tokens that stage 1 leaves out."""
    both = [line["figure_3"][name] for name in ("SGD", "AdamW")]
    risen = [one["risen"] for one in both]
    what = "Â > 0: share that rose with GRPO, lowest bin minus highest; SGD, AdamW"
    rows = [(what, ".033", [one["GRPO"][0] - one["GRPO"][3] for one in risen], 3)]
    for method, paper in (("AR", ".029"), ("Lopti", ".037"), ("GRPO, two passes", "not given")):
        more = [one[method][3] - one["GRPO"][3] for one in risen]
        what = f"π ≥ .75, Â > 0: share that rose, {method} minus GRPO; SGD, AdamW"
        rows.append((what, paper, more, 3))
    for stage in (0, 1):
        right = [one["stages"][stage]["right_way"] for one in both]
        for side, moved in enumerate(("Â > 0: share that rose", "Â < 0: share that fell")):
            what = f"π ≥ ½, {moved} by the end of stage {stage + 1}; SGD, AdamW"
            rows.append((what, "not given", [one[side] for one in right], 3))
    sizes = [stage["size"] for one in both for stage in one["stages"]]
    what = "π ≥ ½: mean size of the change after stage 1, 2, SGD; after stage 1, 2, AdamW"
    rows.append((what, "not given", sizes, 4))
    return rows


def proposition_table(tokens, vocabulary_size, real):
    """How well ‖∇‖ goes with 1 - π, and whether the theorems hold in the numbers."""

    def cells(tokens, size):
        pi, entropies = np.array(tokens["probability"]), np.array(tokens["entropy"])
        norms, layers = np.array(tokens["at_logits"]), np.array(tokens["at_layers"])
        lower, upper = theory.logit_gradient_bounds(torch.tensor(pi), size)
        inside = (norms >= lower.numpy() - 1e-4) & (norms <= upper.numpy() + 1e-4)
        above = norms**2 >= 1 - 2 * pi + np.exp(-entropies) - 1e-4
        ends = some_layers(layers)
        unlikely, likely = layers[pi < 0.25], layers[pi >= 0.75]
        return (
            f"{len(pi)}",
            f"{inside.mean():.1%}",
            f"{above.mean():.1%}",
            " / ".join(number(measures.rank_correlation(layers[:, k], 1 - pi), 2) for k in ends),
            " / ".join(f"{np.median(unlikely[:, k]) / np.median(likely[:, k]):.0f}" for k in ends),
        )

    names = (
        ("tokens", ""),
        ("inside the bounds of Prop. 4.2", "all: a theorem"),
        ("above STAPO's bound 1 − 2π + e^(−H)", "all: a theorem"),
        ("rank correlation of ‖∇‖ and 1 − π, embedding to last layer", "proportional"),
        ("median ‖∇‖, π < .25 over π ≥ .75, embedding to last layer", "not given"),
    )
    measured = [line["figure_2"] for line in real if "figure_2" in line][:1]
    others = cells(measured[0], SMOLLM2_WORDS) if measured else [""] * len(names)
    rows = zip(names, cells(tokens, vocabulary_size), others)
    rows = [(*name, ours, other) for name, ours, other in rows]
    return table([HEAD, *rows], "" if measured else NOT_MEASURED)


def kept_table(batches):
    """Which share of the tokens below some probabilities each treatment keeps, over batches."""
    of_batches = [measures.kept_shares(rollout, old.entropies) for rollout, _, old, _ in batches]
    limits = [f"π < {number(limit, 2).rstrip('0')}" for limit in measures.LIMITS[:-1]]
    rows = [("% kept of the tokens with", *limits, "any π")]
    for name in of_batches[0]:
        means, halves = measures.over_batches([100 * np.array(one[name]) for one in of_batches])
        cells = [f"{mean:.1f} ± {half:.1f}" for mean, half in zip(means, halves)]
        rows.append(("of all tokens, how many" if name == "all tokens" else name, *cells))
    note = f"Means over {len(batches)} batches ± half of a 95 % interval."
    return table(rows, note)


def compared(measured):
    """Fig. 1's rows and changes for several sets of lines, name -> lines, without the paper's."""
    sets = list(measured.values())
    rows = columns(figure_1_rows, sets) + columns(change_rows, sets)
    rows = [(what, *cells) for what, _, *cells in rows if not what.startswith("(b)")]
    return table([("", *measured), *rows])


# ---- the laboratory's runs


def run_pictures(lines):
    """The two pictures of the laboratory as the plot module draws them."""
    methods = [line["method"] for line in lines]
    if methods.count("GRPO") < 2 or not set(methods) & set(plot.SHOWN):
        return [Markdown("No runs yet: `python data/lab/experiments.py` makes them.")]
    return [picture(plot.draw_training(lines)), picture(plot.draw_effects(lines))]


def run_tables(lines):
    """The claims with their verdicts; none without runs."""
    if not lines:
        return []
    tables = experiments.tables(lines)
    shown = [tables[name] for name in ("against GRPO", "other claims", "two by two")]
    return [Markdown(text) for text in shown if len(text.splitlines()) > 2]


def early(lines):
    """What happens while the policy learns, in the three laboratories."""
    return Markdown(experiments.early_table(lines))


def real_runs(lines):
    """SmolLM2's training runs: their curves, and the methods against GRPO."""
    return [picture(plot.draw_real_model(lines)), Markdown(real_model.comparison(lines))]
