"""Prints the tables of results/RESULTS.md and draws its pictures from the files beside it.

python data/lab/results.py        # a test asks that this changes nothing

A difference is one of accuracies or KLs: its mean over the seeds that both methods have, and half
of its 95 % interval (Student's t). It is bold in a table, and coloured in the picture, if it is
significant at 5 % after Holm's correction.
"""

import io
import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy
import pandas
from scipy import stats

FOLDER = Path(__file__).resolve().parent / "results"
COLORS = {  # orange is low probability, blue is high; colour-blind readers can tell all apart
    "low": "#D55E00",
    "high": "#0072B2",
    "GRPO": "#555555",
    "GRPO, two epochs": "#8B5A2B",
    "AR, α = 0.3": "#9C6FC4",
    "AR, α = 1": "#6A3D9A",
    "Lopti": "#009E73",
    "reversed Lopti": "#8FD1BB",
    "AR + Lopti": "#C2185B",
}
LOOK = {  # of the picture
    "font.size": 14,
    "axes.titlesize": "medium",
    "figure.labelsize": "medium",
    "figure.titlesize": 19,
    "figure.titleweight": "bold",
    "axes.spines.left": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "ytick.left": False,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.1,  # other fonts are wider
    "svg.hashsalt": "lopti",
    "svg.fonttype": "none",  # text stays text
}

# What is compared ---------------------------------------------------------------------------------

AR = "AR, α = 0.3 − GRPO"
AR_1 = "AR, α = 1 − GRPO"
UNBIASED_1 = "unbiased AR, α = 1 − GRPO"
BOTH = "AR + Lopti − GRPO"
LOPTI = "Lopti − GRPO"
TWO_EPOCHS = "GRPO, two epochs − GRPO"
SPLIT = "Lopti − GRPO, two epochs"
ORDER = "Lopti − reversed Lopti"
RANDOM = "Lopti − random split"
ORACLE = ["oracle − GRPO", "oracle − GRPO, two epochs"]  # without tokens that earn no reward
ALONE = ["first pass alone − GRPO", "second pass alone − GRPO"]
HALF_RATE = ["Lopti, half the rate − GRPO", "GRPO, two epochs, half the rate − GRPO"]
LONG = "Lopti − long-step GRPO"
LONG_STEPS = [
    LONG,
    "long-step GRPO − GRPO",
    "GRPO, two epochs − long-step GRPO",
    "unbiased AR, α = 1 − long-step GRPO",
]
OF_R7 = [
    "AR, α = 0.6 − GRPO",
    AR_1,
    "unbiased AR, α = 0.3 − GRPO",
    "unbiased AR, α = 0.6 − GRPO",
    UNBIASED_1,
    "unbiased AR, α = 0.3 − AR, α = 0.3",
    "unbiased AR, α = 0.6 − AR, α = 0.6",
    "unbiased AR, α = 1 − AR, α = 1",
]
OF_TRUE_OR_FALSE = [AR, LOPTI, TWO_EPOCHS, UNBIASED_1, SPLIT]
OF_TRUE_OR_FALSE += [
    *ORACLE,
    "AR, α = 0.3 − GRPO, two epochs",
    "unbiased AR, α = 1 − GRPO, two epochs",
]
SECTIONS = {  # group: {comparison: differences}, corrected together in each measure
    "R3": {"bundled": ORACLE, "wordy, fixed norm": ORACLE},
    "R4": {
        "bundled": [AR, LOPTI, TWO_EPOCHS, SPLIT, BOTH],
        "SmolLM2, word problems": [AR, LOPTI, TWO_EPOCHS, SPLIT],
    },
    "R5": {"bundled, new seeds": [LOPTI, TWO_EPOCHS, SPLIT, *HALF_RATE]},
    "R6": {
        "one-wording": [LOPTI, TWO_EPOCHS, SPLIT, ORDER],
        "bundled": [ORDER, RANDOM],
        "wordy, fixed norm": [ORDER, RANDOM],
        "bundled, new seeds": [LONG],
    },
    "R6, one pass alone": {"bundled": ALONE},
    "R7": {"bundled": OF_R7},
    "fixed norm": {
        "wordy, fixed norm": [AR, AR_1, UNBIASED_1, LOPTI, TWO_EPOCHS, SPLIT, *LONG_STEPS],
        "wordy, fixed norm, new seeds": [UNBIASED_1, TWO_EPOCHS],
        "bundled, fixed norm": [UNBIASED_1, TWO_EPOCHS],
        "one-wording, fixed norm": [UNBIASED_1, TWO_EPOCHS],
    },
    "true or false, first": {"SmolLM2, true or false, first": OF_TRUE_OR_FALSE},
    "true or false, second": {"SmolLM2, true or false, second": OF_TRUE_OR_FALSE},
}
METHODS = ["GRPO", "AR, α = 0.3", "Lopti", "GRPO, two epochs"]  # of the first picture
SEVEN = [  # its comparisons
    "bundled",
    "bundled, new seeds",
    "one-wording",
    "wordy, fixed norm",
    "SmolLM2, word problems",
    "SmolLM2, true or false, first",
    "SmolLM2, true or false, second",
]
SYNTHETIC = {  # the tasks of R8: π of a right and a wrong reward token, π of the noise tokens
    "noise at low π": ("0.6, 0.4", "eight with 1/8 each"),
    "equal noise at every π": ("0.55, 0.45", "0.55, 0.45"),
    "rare mistakes": ("0.9, 0.1", "0.7, 0.3"),
    "rare right answers": ("0.1, 0.9", "0.6, 0.4"),
    "noise depends on the first decision": ("0.6, 0.4", "0.5, seven with 1/14 each"),
}
LONG_METHODS = {  # of R2
    "GRPO": "GRPO",
    "AR": "AR, α = 0.3",
    "GRPO, two epochs": "GRPO, two epochs",
    "Lopti": "Lopti",
    "AR + Lopti": "AR + Lopti",
}
LONG_MEASURES = {
    "accuracy": "accuracy, steps 49–72",
    "kl": "KL, steps 49–72",
    "held_out": "held out, step 72",
}
LONG_PAIRS = [f"{method} − GRPO" for method in LONG_METHODS if method != "GRPO"] + [SPLIT]
CHANGES = {  # columns of R1's second table: what is measured
    "norm of π < 0.25, divided by π ≥ 0.75": "norm of π < 0.25 / norm of π ≥ 0.75",
    "change by step A − change by step B": "difference of the two updates",
}
FIRST_STEPS = {  # columns of R8's table of language models: what is measured
    "E_s[π]": "average π by the mean gradient",
    "E_v[π]": "average π by the squared norm",
    "gain of AR, in %": "gain of AR α = 0.3, gradient descent",
    "gain of Lopti, in %": "gain of Lopti, gradient descent",
    "of AR with AdamW": "gain of AR α = 0.3, AdamW",
    "of Lopti with AdamW": "gain of Lopti, AdamW",
}


class Difference(NamedTuple):
    mean: float
    half: float  # of the interval, which is not corrected
    p: float  # after Holm's correction


def corrected(values):
    """{name: Difference} for {name: a difference for each seed}, with Holm's correction for all.

    The smallest of n p-values is multiplied by n, the next by n - 1, and so on, and none becomes
    smaller than the one before:

    >>> seeds = pandas.Series([0.0, 0.1, 0.2])
    >>> p = stats.ttest_1samp(seeds, 0).pvalue
    >>> [int(round(each.p / p, 9)) for each in corrected({"a": seeds, "b": seeds}).values()]
    [2, 2]
    """
    tests = {}
    found = {}
    for name, each in values.items():
        if numpy.ptp(each) > 1e-9:
            tests[name] = stats.ttest_1samp(each, 0)
        else:  # a few equal counts say nothing about their spread
            found[name] = Difference(each.mean(), 0.0, 1.0)
    left = len(values)
    p = 0.0
    for name, test in sorted(tests.items(), key=lambda item: item[1].pvalue):
        p = min(1.0, max(p, left * test.pvalue))
        left -= 1
        mean = values[name].mean()
        found[name] = Difference(mean, mean - test.confidence_interval().low, p)
    return found


def difference(accuracies, pair):
    """A difference for each seed. accuracies: a row for each seed, a column for each method."""
    first, second = pair.split(" − ")
    return (accuracies[first] - accuracies[second]).dropna()


def of_runs(measure):
    """{(comparison, pair): Difference} of runs.csv. A seed's learning rates are averaged."""
    runs = pandas.read_csv(FOLDER / "runs.csv")
    accuracies = runs.groupby(["comparison", "seed", "method"])[measure].mean().unstack()
    found = {}
    for section in SECTIONS.values():
        values = {}
        for comparison, pairs in section.items():
            for pair in pairs:
                each = difference(accuracies.loc[comparison], pair)
                if len(each):  # the final accuracy is not always measured
                    values[comparison, pair] = each
        found |= corrected(values)
    return found


def of_tasks(compared):
    """Returns {(task and optimizer, pair): Difference} of the synthetic tasks."""
    name = {"at equal KL": "synthetic_equal_kl.csv", "at the best rates": "synthetic_tasks.csv"}
    tasks = pandas.read_csv(FOLDER / name[compared])
    tasks = tasks.assign(row=tasks.task + ", " + tasks.optimizer)
    together = ((AR_1, LOPTI), (SPLIT, TWO_EPOCHS, AR))  # pairs that are corrected together
    values = {pairs: {} for pairs in together}
    for row, of_row in tasks.groupby("row", sort=False):
        if compared == "at equal KL":
            differences = of_row.pivot(index="seed", columns="pair", values="difference")
        else:
            accuracies = of_row.pivot(index="seed", columns="method", values="accuracy")
            every = [pair for pairs in together for pair in pairs]
            differences = {pair: difference(accuracies, pair) for pair in every}
        for pairs in together:
            for pair in pairs:
                values[pairs][row, pair] = differences[pair]
    return corrected(values[together[0]]) | corrected(values[together[1]])


def steps_of_r5():
    """Returns {comparison: {method: {seed: the accuracy and both KLs of each training step}}}."""
    runs = pandas.read_csv(FOLDER / "runs.csv")
    steps = pandas.read_csv(FOLDER / "steps.csv").merge(runs, on="run")
    found = {}
    keys = ["comparison", "method", "seed"]
    for (comparison, method, seed), of_run in steps.groupby(keys, sort=False):
        of_comparison = found.setdefault(comparison, {})
        of_comparison.setdefault(method, {})[seed] = of_run[["accuracy", "kl", "kl_in_update"]]
    return found


def at_equal_kl(first, second, measured):
    """Returns a difference for each seed; first and second: {seed: accuracy and KLs of each step}.

    `measured` is the column of the KL. It and the accuracy jump from step to step, so each is the
    mean of five steps. The difference is a mean over the KL that both runs cover, from 0.006 to
    0.05 at most.
    """
    found = {}
    for seed in first:
        curves = []
        for steps in (first[seed], second[seed]):
            means = steps[["accuracy", measured]].rolling(5).mean().dropna()
            curves.append((means[measured].cummax().to_numpy(), means.accuracy.to_numpy()))
        low = max(0.006, *(kl[0] for kl, _ in curves))
        high = min(0.05, *(kl[-1] for kl, _ in curves))
        kl = numpy.linspace(low, high, 101)
        found[seed] = (numpy.interp(kl, *curves[0]) - numpy.interp(kl, *curves[1])).mean()
    return pandas.Series(found)


def of_long_runs():
    """Returns a row for each run of long_runs.csv, with the measures that were planned."""
    steps = pandas.read_csv(FOLDER / "long_steps.csv")
    held_out = pandas.read_csv(FOLDER / "long_runs.csv")
    run = ["setting", "method", "seed"]
    found = held_out[held_out.step == 72].set_index(run)[["held_out"]]
    for name in ("accuracy", "kl"):  # of the last third
        found[name] = steps[steps.step > 48].groupby(run)[name].mean()
    steps["twelve"] = (steps.step - 1) // 12
    means = steps.groupby([*run, "twelve"]).accuracy.mean().unstack()
    found["fell_back"] = means[5] < means.max(axis=1) - 0.1
    return found


# The tables ---------------------------------------------------------------------------------------


def shown(found):
    """A Difference as the page writes it, with as many digits as tell mean and interval apart.

    >>> shown(Difference(-0.012, 0.007, 0.01)), shown(Difference(0.0056, 0.0062, 0.1))
    ('**−0.012 ± 0.007**', '+0.0056 ± 0.0062')
    """
    if found is None:
        return "–"
    digits = 3
    while digits < 5 and f"{found.mean:.{digits}f}" == f"{found.half:.{digits}f}":
        digits += 1
    sign = "+" if round(found.mean, digits) else ""  # 0.000, not −0.000
    mean = f"{round(found.mean, digits) + 0.0:{sign}.{digits}f}"
    text = f"{mean} ± {found.half:.{digits}f}".replace("-", "−")
    return f"**{text}**" if found.p < 0.05 else text


def table(head, lines):
    """Returns a table of Markdown."""
    rows = ["| " + " | ".join(map(str, line)) + " |" for line in (head, *lines)]
    return "\n".join([rows[0], "|---" * len(head) + "|", *rows[1:]])


def grid(corner, rows, columns, found):
    """Returns a table of found[row, column]; rows and columns: {label: key}."""
    lines = []
    for label, row in rows.items():
        lines.append([label, *[shown(found.get((row, column))) for column in columns.values()]])
    return table([corner, *columns], lines)


def names(*keys):
    """Returns rows or columns of a table whose labels are their keys."""
    return {key: key for key in keys}


def of_frame(corner, frame):
    """Returns a table of a pandas table of texts."""
    return table([corner, *frame], frame.reset_index().to_numpy())


def of_paper():
    accuracies = pandas.read_csv(FOLDER / "paper.csv", dtype=str)
    return table(list(accuracies), accuracies.to_numpy())


def long_runs(runs):
    """Returns the table of the five methods of R2."""
    found = {}  # {measure: {pair: Difference}}
    for measure in LONG_MEASURES:
        by_seed = runs[measure].unstack("method")
        values = {pair: difference(by_seed, pair) for pair in LONG_PAIRS}
        found[measure] = corrected(values)
    lines = []
    for method in LONG_METHODS:
        line = [method]
        for measure, each in found.items():
            line.append(f"{runs.loc[method, measure].mean():.3f}")
            line.append(shown(each.get(f"{method} − GRPO")))
        lines.append(line)
    line = [SPLIT]
    for each in found.values():
        line += ["–", shown(each[SPLIT])]
    head = ["mean over the seeds"]
    for name in LONG_MEASURES.values():
        head += [name, "minus GRPO"]
    return table(head, [*lines, line])


def long_controls(runs):
    """Returns the table of the controls of R2: means, and the difference to GRPO for each seed."""
    grpo = runs.loc["GRPO"]
    lines = []
    for method in runs.index.unique("method"):
        if method in LONG_METHODS:
            continue
        of_method = runs.loc[method]
        line = [method]
        for measure in LONG_MEASURES:
            each = of_method[measure] - grpo[measure].loc[of_method.index]
            line.append(f"{of_method[measure].mean():.3f}")
            line.append(", ".join(f"{value:+.3f}".replace("-", "−") for value in each))
        lines.append(line)
    head = ["controls, two seeds"]
    for name in LONG_MEASURES.values():
        head += [name, "minus GRPO, each seed"]
    return table(head, lines)


def small_batches(runs):
    """Returns the table of the small batches of R2, at two learning rates."""
    lines = []
    for method in LONG_METHODS:
        line = [method]
        for rate in ("1e-4", "3e-5"):
            of_method = runs.loc[f"small batches, {rate}"].loc[method]
            line.append(f"{of_method.fell_back.sum()} of {len(of_method)}")
            line += [f"{of_method.kl.mean():.3f}", f"{of_method.held_out.mean():.3f}"]
        lines.append(line)
    head = ["small batches", "1e-4: fell back", "KL", "held out"]
    return table([*head, "3e-5: fell back", "KL", "held out"], lines)


def gradient_norms():
    norms = pandas.read_csv(FOLDER / "r1.csv", dtype=str)
    norms["text"] = (norms.gradient_norm + " ± " + norms.half_interval).fillna(norms.gradient_norm)
    wide = norms.pivot(index="tokens", columns="model", values="text")
    wide = wide.loc[norms.tokens.unique(), norms.model.unique()]
    return of_frame("norm of the gradient (all tokens: 1)", wide)


def first_steps(columns, settings=None):
    """Returns a table of first_steps.csv, as texts; columns: {label: what is measured}."""
    steps = pandas.read_csv(FOLDER / "first_steps.csv", dtype=str)
    steps["text"] = (steps.value + " ± " + steps.half_interval).str.replace("-", "−")
    wide = steps.pivot(index="model", columns="measured", values="text").fillna("–")
    wide = wide.loc[settings or list(steps.model.unique()), list(columns.values())]
    return wide.set_axis(list(columns), axis="columns")


def kinds_of_tokens():
    groups = pandas.read_csv(FOLDER / "r3.csv", index_col="group")
    lines = []
    for kind in ("synonyms", "</think>", "new try", "all else"):
        row = groups.loc[f"π < 0.25, {kind}"]
        squared = f"{row.share_of_squared_norm:.2f} ± {row.squared_norm_half_interval:.2f}"
        mean = f"{row.share_of_mean_gradient:.2f} ± {row.mean_gradient_half_interval:.2f}"
        kind = kind.replace("</think>", "`</think>`")
        lines.append([kind, f"{100 * row.share_of_tokens:.3g}", squared, mean.replace("-", "−")])
    head = ["bundled model, π < 0.25", "% of the tokens", "share of the squared norm"]
    return table([*head, "share of the mean gradient"], lines)


def conditions():
    runs = pandas.read_csv(FOLDER / "runs.csv")
    lines = []
    for comparison in SEVEN:
        of = runs[(runs.comparison == comparison) & runs.method.isin(METHODS)]
        rates = ", ".join(f"{rate:.0e}" for rate in sorted(of.learning_rate.unique()))
        rates = rates.replace("e-0", "e-")
        grpo = of[of.method == "GRPO"]
        of_ar = of[of.method == "AR, α = 0.3"].seed.nunique() or "–"
        seeds = f"{grpo.seed.nunique()} ({of_ar})"
        [steps] = grpo.training_steps.unique()
        [optimizer] = grpo.optimizer.unique()
        accuracy = f"{grpo.training_accuracy.mean():.3f}"
        lines.append([comparison, steps, seeds, f"{optimizer}, {rates}", accuracy])
    head = ["comparison", "steps", "seeds (of AR)", "learning rate or norm"]
    return table([*head, "GRPO's accuracy in training"], lines)


def equal_kl(training):
    """Returns the table of R5. The differences at equal KL are corrected together for each KL."""
    steps = steps_of_r5()
    found = {}  # {KL: {(comparison, method): Difference}}
    behind = {}  # {(comparison, method): in how many seeds the accuracy is below GRPO's}
    for measured in ("kl", "kl_in_update"):
        values = {}
        for comparison, methods in steps.items():
            if measured == "kl" and "new seeds" not in comparison:
                continue  # the older runs have only the KL in the update
            for method in list(methods)[1:]:  # GRPO is the first
                each = at_equal_kl(methods[method], methods["GRPO"], measured)
                values[comparison, method] = each
                behind[comparison, method] = f"{(each < 0).sum()} of {len(each)}"
        found[measured] = corrected(values)
    lines = []
    for comparison, methods in steps.items():
        last = {}
        for method, of_method in methods.items():
            each = [of_run["kl_in_update"].iloc[-1] for of_run in of_method.values()]
            last[method] = f"{numpy.mean(each):.3f}"
        for method in list(methods)[1:]:
            key = (comparison, method)
            line = [f"{comparison}: {method}"]
            line.append(shown(training[comparison, f"{method} − GRPO"]))
            line += [shown(found["kl"].get(key)), shown(found["kl_in_update"][key])]
            lines.append([*line, behind[key], f"{last[method]}, {last['GRPO']}"])
    head = ["minus GRPO", "at equal steps", "at equal KL", "at equal KL in the update"]
    return table([*head, "seeds behind GRPO", "last KL in the update, GRPO's"], lines)


def both_measures(pairs, training, final):
    """Returns a table with a row for each difference; pairs: {pair: its comparisons}."""
    lines = []
    for pair, comparisons in pairs.items():
        for comparison in comparisons:
            key = (comparison, pair)
            cells = [shown(training[key]), shown(final.get(key))]
            lines.append([f"{comparison}: {pair}", *cells])
    return table(["accuracy", "in training", "final"], lines)


def of_r7(training):
    found = {}  # {(pair without α, α): Difference}
    for (comparison, pair), each in training.items():
        for alpha in ("α = 0.3", "α = 0.6", "α = 1"):
            if comparison == "bundled" and alpha in pair:
                found[pair.replace(f", {alpha}", ""), alpha] = each
    found[BOTH, "α = 0.3"] = training["bundled", BOTH]
    rows = names("AR − GRPO", "unbiased AR − GRPO", "unbiased AR − AR", BOTH)
    return grid("bundled model", rows, names("α = 0.3", "α = 0.6", "α = 1"), found)


def tasks_of_r8():
    means = pandas.read_csv(FOLDER / "synthetic_rule.csv").groupby("task", sort=False).first()
    lines = []
    for task, (reward_tokens, noise_tokens) in SYNTHETIC.items():
        of_task = means.loc[task]
        rule = f"{of_task.mean_pi_by_mean_gradient:.3f}, {of_task.mean_pi_by_squared_norm:.3f}"
        lines.append([task, reward_tokens, noise_tokens, rule])
    head = ["task", "π of a right, a wrong reward token", "π of noise tokens", "E_s[π], E_v[π]"]
    return table(head, lines)


def of_r8(compared):
    found = of_tasks(compared)
    rows = {}
    for task in SYNTHETIC:
        for optimizer in ("fixed norm", "AdamW"):
            row = f"{task}, {optimizer}"
            if (row, AR) in found:
                rows[row] = row
    columns = {pair.removesuffix(" − GRPO"): pair for pair in (AR, AR_1, TWO_EPOCHS, LOPTI)}
    return grid(f"minus GRPO, {compared}", rows, columns | names(SPLIT), found)


def gpu_step():
    """Returns the guide's table of one training step on an H100."""
    measured = pandas.read_json(FOLDER / "gpu_h100.jsonl", lines=True)
    step = measured[(measured.run == "whole_step") & (measured.longest != 8)]
    parts = step.groupby("part")[["seconds", "peak_GiB"]].agg({"seconds": "sum", "peak_GiB": "max"})
    parts.loc["training_step", "peak_GiB"] = parts.peak_GiB.max()
    labels = {
        "sample": "sampling 64 responses of 1,024 tokens",
        "response_logprobs": "log-probabilities, of the policy and of the initial model",
        "update": "both passes of Lopti, two optimizer steps each",
        "training_step": "the whole training step",
        "save_checkpoint": "after it, saving a checkpoint of 37 GB",
    }
    lines = []
    for part, label in labels.items():
        row = parts.loc[part]
        gigabytes = row.peak_GiB * 2**30 / 10**9
        lines.append([label, f"{row.seconds:.0f}", f"{gigabytes:.0f} GB"])
    return table(["part", "seconds", "peak memory of the tensors"], lines)


def tables():
    """Returns {name: table} of RESULTS.md, in the order of the page, and of GUIDE.md."""
    training = of_runs("training_accuracy")
    final = of_runs("final_accuracy")
    long = of_long_runs()
    runs = long.loc["72 steps"]
    models = ["one-wording", "SmolLM2", "bundled", "wordy"]
    shares = ("share of the squared norm", "share of the mean gradient")
    of_r3 = {share: f"{share}, π < 0.25" for share in shares}
    true_or_false = ["SmolLM2, true or false, second", "SmolLM2, true or false, first"]
    of_oracle = {
        ORACLE[0]: [*true_or_false, "wordy, fixed norm", "bundled"],
        ORACLE[1]: ["wordy, fixed norm"],
    }
    others = [*SECTIONS["fixed norm"], *true_or_false]
    of_r6 = {
        ORDER: ["bundled", "one-wording", "wordy, fixed norm"],
        RANDOM: ["bundled", "wordy, fixed norm"],
        LONG: ["bundled, new seeds", "wordy, fixed norm"],
        ALONE[0]: ["bundled"],
        ALONE[1]: ["bundled"],
    }
    held_out = [comparison for comparison in SEVEN if (comparison, LOPTI) in final]
    return {
        "paper": of_paper(),
        "R1, norms": gradient_norms(),
        "R1, changes": of_frame("setting", first_steps(CHANGES)),
        "R2, five methods": long_runs(runs),
        "R2, controls": long_controls(runs),
        "R2, small batches": small_batches(long),
        "R3, models": of_frame("π < 0.25", first_steps(of_r3, models)),
        "R3, kinds of tokens": kinds_of_tokens(),
        "R3, oracle": both_measures(of_oracle, training, final),
        "R4, conditions": conditions(),
        "R4, final accuracy": grid(
            "final accuracy", names(*held_out), names(AR, LOPTI, TWO_EPOCHS, SPLIT, BOTH), final
        ),
        "R5": equal_kl(training),
        "R6": both_measures(of_r6, training, final),
        "R7": of_r7(training),
        "R7, other models": grid(
            "in training", names(*others), names(UNBIASED_1, TWO_EPOCHS), training
        ),
        "R8, tasks": tasks_of_r8(),
        "R8, at equal KL": of_r8("at equal KL"),
        "R8, at the best rates": of_r8("at the best rates"),
        "R8, language models": of_frame("before training", first_steps(FIRST_STEPS, models)),
        "GPU": gpu_step(),
    }


# The pictures -------------------------------------------------------------------------------------


def comparisons():
    """All pairs of R4, those with twice as many steps as GRPO first."""
    steps = {LOPTI: "twice the steps", TWO_EPOCHS: "twice the steps"}
    steps |= {AR: "equal steps", SPLIT: "equal steps"}
    title = "Where Lopti gained over GRPO,\nGRPO with two epochs gained about as much or more"
    return marks(steps, title, (-0.08, 0.13), figsize=(11.5, 7.4))


def equal_steps():
    """The pairs whose two methods make equally many optimizer steps."""
    title = """Neither method was significantly better
than GRPO with equally many optimizer steps,
and Lopti was once worse"""
    return marks({AR: "", SPLIT: ""}, title, (-0.13, 0.13), figsize=(8, 6.6))


def marks(steps, title, limits, figsize):
    """A panel for each pair of methods, and in it a mark for each of the seven comparisons.

    `steps` has words to write above each panel, {pair: words}; `limits` are those of the x-axis.
    """
    left, right = limits
    goes_on = False
    found = of_runs("training_accuracy")
    figure, panels = plt.subplots(1, len(steps), figsize=figsize, sharey=True)
    for panel, pair in zip(panels, steps, strict=True):
        first, _, second = pair.partition(" − ")
        color = COLORS[first] if second == "GRPO" else "black"
        for line, comparison in enumerate(SEVEN):
            each = found.get((comparison, pair))
            weight = "bold" if each and each.p < 0.05 else "normal"
            text = shown(each).strip("*") if each else "not run"
            panel.text((left + right) / 2, line - 0.12, text, ha="center", weight=weight)
            panel.vlines(0, line - 0.04, line + 0.5, color="#888888", linewidth=0.8, zorder=0)
            panel.axhline(line - 0.5, color="#dddddd", linewidth=0.8, zorder=0)
            if each:
                fill = color if weight == "bold" else "white"
                style = {"color": color, "markerfacecolor": fill, "markersize": 8}
                panel.errorbar(each.mean, line + 0.16, xerr=each.half, fmt="o", **style)
                for edge, arrow in ((left, "<"), (right, ">")):
                    if abs(edge - each.mean) < each.half:
                        goes_on = True
                        panel.plot(edge, line + 0.16, arrow, color=color, clip_on=False)
            if weight == "bold":
                panel.axhspan(line - 0.5, line + 0.5, color=color, alpha=0.2, linewidth=0)
        pad = 24 if steps[pair] else 8
        panel.set_title(pair.replace(" − ", "\n− "), size=13.5, weight="bold", pad=pad)
        panel.text(0.5, 1.015, steps[pair], ha="center", transform=panel.transAxes)
        panel.set(xlim=(left, right), xticks=(0, 0.1), ylim=(len(SEVEN) - 0.5, -0.5))
        panel.set_xlabel("← worse · better →")
    panels[0].set_yticks(range(len(SEVEN)), [name.replace(", ", ",\n", 1) for name in SEVEN])
    figure.suptitle(title, x=0.01, ha="left")
    meanings = "filled: significant after Holm's correction; open: not"
    if goes_on:
        meanings += "; arrow: it goes on"
    words = "difference in accuracy during training, with its 95 % interval"
    figure.supxlabel(f"{words}\n({meanings})")
    return figure


def name_lines(panel, x, ends):
    """Writes the names of lines beside their ends, {name: (y, color)}, without overlaps."""
    x += 0.03 * (panel.get_xlim()[1] - panel.get_xlim()[0])
    low, high = panel.get_ylim()
    lines = sorted(ends, key=ends.get)  # from below
    places = [ends[name][0] for name in lines]
    for _ in range(100):  # neighbours push each other apart
        for i, j in pairwise(range(len(lines))):
            overlap = max(0, places[i] + 0.07 * (high - low) - places[j])
            places[i] -= overlap / 2
            places[j] += overlap / 2
    for name, place in zip(lines, places, strict=True):
        panel.text(x, place, name, color=ends[name][1], weight="bold", va="center")


def long_curves():
    """Accuracy and KL of the five methods of R2: their means, and a point for each last value."""
    steps = pandas.read_csv(FOLDER / "long_steps.csv")
    evaluations = pandas.read_csv(FOLDER / "long_runs.csv").query("step > 0")
    figure, panels = plt.subplots(1, 2, figsize=(11.5, 5))
    drawn = ((evaluations, "held_out", 1), (steps, "kl", 12))
    for panel, (table, column, width) in zip(panels, drawn, strict=True):
        ends = {}
        for place, (method, name) in enumerate(LONG_METHODS.items()):
            of_method = table[(table.setting == "72 steps") & (table.method == method)]
            by_seed = of_method.pivot(index="step", columns="seed", values=column)
            smooth = by_seed.rolling(width).mean()
            means = smooth.mean(axis=1)
            style = {"color": COLORS[name], "linewidth": 6 if method == "GRPO" else 3}
            panel.plot(means, marker="o" if width == 1 else None, **style)
            for seed in smooth.loc[72]:  # the points of a method stand above each other
                panel.plot(75 + 2.5 * place, seed, "o", color=COLORS[name], markersize=5)
            ends[method.removeprefix("GRPO, ")] = (means[72], COLORS[name])
        panel.set(xlabel="training step", xticks=range(0, 73, 24))
        panel.axvline(24, color="#888888", linewidth=0.8, linestyle=":")
        panel.spines["left"].set_visible(True)
        panel.tick_params(left=True)
        name_lines(panel, 86, ends)
    panels[0].set_title("accuracy on held-out puzzles")
    panels[1].set_title("KL to the initial model, mean of 12 steps")
    panels[0].text(25, 0.71, "README's\nruns end", color="#565D66")
    title = "On average no method ended ahead of GRPO,\nand two epochs moved farthest"
    figure.suptitle(title, x=0.01, ha="left")
    words = "lines: mean over five seeds; points: each seed at step 72"
    figure.supxlabel(f"{words}\nno difference in accuracy is significant")
    return figure


def svg(draw):
    """Returns a picture as text. Its coordinates have two digits: rounding errors do not show."""
    with plt.style.context(LOOK, after_reset=True):  # whatever the caller has set
        figure = draw()
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
        plt.close(figure)
    return re.sub(r"\d+\.\d{5,}", lambda found: f"{round(float(found[0]), 2):g}", file.getvalue())


def filled(path):
    """Returns the text of a page, with its tables as they are now."""
    page, *parts = path.read_text(encoding="utf-8").split("<!-- table: ")
    printed = tables()
    end = "<!-- end of table -->"
    for part in parts:
        name, _, rest = part.partition(" -->")
        page += f"<!-- table: {name} -->\n\n{printed[name]}\n\n{end}{rest.partition(end)[2]}"
    return page


def files():
    """Returns {path: text}: the pages with their tables, and the pictures."""
    guide = FOLDER.parents[1] / "GUIDE.md"
    texts = {page: filled(page) for page in (FOLDER / "RESULTS.md", guide)}
    texts[FOLDER / "comparisons.svg"] = svg(comparisons)
    texts[FOLDER / "equal_steps.svg"] = svg(equal_steps)
    texts[FOLDER / "long_runs.svg"] = svg(long_curves)
    return texts


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
