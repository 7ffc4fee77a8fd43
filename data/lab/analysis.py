"""What the runs say: a frame with a row for each run, one test, the tables of results/*.md.

    python data/lab/analysis.py            # print the tables
    python data/lab/analysis.py --write    # put them into RESULTS.md and TABLES.md

Every comparison is by seed, which fixes the puzzles: Student's paired t-test, p corrected by Holm
for all comparisons of a column. ± is half of a 95 % interval, which is not corrected. What has
fewer than two seeds in common is left out, so the tables grow with runs.jsonl.
"""

import argparse
import itertools
import math
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti  # isort: skip, before torch  # noqa: F401

import numpy as np
import pandas as pd
import theory
import torch
import world
from experiments import RESULTS, read_lines, rows_of, with_ending
from scipy import stats

FOLDER = Path(__file__).resolve().parent / "results"
PAGE, TABLES = FOLDER / "RESULTS.md", FOLDER / "TABLES.md"

# ---- A frame of all runs

EARLY, WHOLE = "steps 2 to 12", "by step"  # accuracy in training; the whole is steps 2 to 24
EQUAL_KL = "at equal KL"  # accuracy in training at the same KL to the starting policy
SAMPLED, KL_END = "sampled accuracy", "KL at the end"  # held out: mean of the last two evaluations
KL_RANGE = (0.006, 0.05)  # where accuracy is compared at equal KL
WINDOW = 5  # steps that are averaged for it


def held_out(line, measure):
    """A measure of the last two evaluations of a run, or of all, but not that before training."""
    values = [
        np.mean([np.ravel(size[measure])[0] for size in row.values() if isinstance(size, dict)])
        for row in line["evaluations"]
    ]
    return np.mean((values[1:] or values)[-2:])


def run_frame(lines):
    """A row for each run: method, seed, metrics by step, and its outcomes.

    Accuracy in training begins with step 2, the first after an update; its puzzles are new.
    """
    rows = []
    for line in lines:
        metrics = line["metrics"]
        row = {"method": line["method"], "seed": line["seed"], "metrics": metrics}
        if accuracy := metrics.get("accuracy"):
            row |= {EARLY: np.mean(accuracy[1:12]), WHOLE: np.mean(accuracy[1:])}
        if "kl" in metrics:
            row[KL_END] = metrics[column_of_kl([metrics])][-1]
        if line.get("evaluations") and line.get("config", {}).get("eval_samples", 2) == 2:
            row |= {SAMPLED: held_out(line, "avg@2"), "greedy": held_out(line, "greedy")}
        rows.append(row)
    columns = ["method", "seed", "metrics", EARLY, WHOLE, SAMPLED, "greedy", KL_END]
    return pd.DataFrame(rows, columns=columns).drop_duplicates(["method", "seed"])


def column_of_kl(runs):
    """The KL at sampling, where the metrics of all runs have it; else the mean over each update."""
    return "rollout/kl" if all("rollout/kl" in metrics for metrics in runs) else "kl"


def accuracy_by_kl(metrics, kl="kl"):
    """A run's KL to the starting policy, never falling, and its accuracy: running means, (N,)."""
    mean = np.ones(WINDOW) / WINDOW
    by_step = [np.convolve(metrics[name], mean, "valid") for name in (kl, "accuracy")]
    return np.maximum.accumulate(by_step[0]), by_step[1]


def at_equal_kl(metrics, others, kl="kl", limits=KL_RANGE):
    """Accuracy minus another run's at the same KL, the mean over the KL that both pass through.

    Within the limits, linear between steps; NaN where the two have no KL in common.

    >>> kl = np.linspace(0.0, 0.06, 9)
    >>> float(at_equal_kl({"kl": kl, "accuracy": kl + 0.1}, {"kl": kl, "accuracy": kl}))
    0.1
    """
    curves = [accuracy_by_kl(one, kl) for one in (metrics, others)]
    low = max(limits[0], *(curve[0][0] for curve in curves))
    high = min(limits[1], *(curve[0][-1] for curve in curves))
    at = np.linspace(low, high, 101)
    difference = np.interp(at, *curves[0]) - np.interp(at, *curves[1])
    return round(difference.mean(), 12) if low < high else np.nan


# ---- The test


def interval(values):
    """The mean and half of its 95 % interval by Student's t, NaNs left out; NaN for one value.

    >>> [round(x, 3) for x in interval([1, 2, 3])]  # 4.303 · 1 / √3
    [2.0, 2.484]
    """
    values = pd.Series(values, dtype=float).dropna()
    return float(values.mean()), float(stats.t.ppf(0.975, max(len(values) - 1, 1)) * values.sem())


def holm(p_values):
    """Holm's correction: (N,) → (N,).

    >>> holm([0.01, 0.04, 0.03]).tolist()
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p_values)
    factors = np.arange(len(order), 0, -1)
    corrected = np.maximum.accumulate(np.asarray(p_values)[order] * factors).clip(max=1)
    return corrected[order.argsort()]


def by_seed(frame, method, other, outcome, kl="kl"):
    """First minus second for every seed that both have, as a series by seed.

    The outcome `at equal KL from .001` begins at that KL.
    """
    first, second = (frame[frame.method == name].set_index("seed") for name in (method, other))
    seeds = first.index.intersection(second.index).sort_values()
    if outcome.startswith(EQUAL_KL):
        limits = float(outcome.partition(" from ")[2] or KL_RANGE[0]), KL_RANGE[1]
        pairs = zip(first.metrics[seeds], second.metrics[seeds])
        return pd.Series([at_equal_kl(*pair, kl, limits) for pair in pairs], seeds, dtype=float)
    return first[outcome][seeds] - second[outcome][seeds]


def differences(frame, pairs, outcome, kl="kl"):
    """pair → (by seed, mean, half of its interval, p by Holm), for pairs with two seeds or more."""
    found = {pair: by_seed(frame, *pair, outcome, kl).dropna() for pair in pairs}
    found = {pair: values for pair, values in found.items() if len(values) > 1}
    p_values = [stats.ttest_1samp(values, 0).pvalue for values in found.values()]
    p_values = holm(np.nan_to_num(p_values, nan=1.0))  # NaN: all differences are 0
    with_p = zip(found.items(), p_values)
    return {pair: (values, *interval(values), p) for (pair, values), p in with_p}


# ---- Tables


SHORTER = {", new seeds": "", "learning rate × 0.5": "half rate", ", wordy, steps of .005": ""}
SHORTER |= {", wordy, steps of .007071": " in √2 times longer steps"}  # in RESULTS.md
MISSING = np.array([]), 0.0, 0.0, 1.0  # the difference of a pair that no two seeds have


def comparisons():
    """The tables of comparisons.txt: name → ({pair of methods: (label, expected)}, outcomes)."""
    found = {}
    for (name, ending, outcomes), (*pair, expected) in rows_of(FOLDER / "comparisons.txt"):
        label = " − ".join(pair) + f" ({ending})" * (ending not in name)
        pair = tuple(with_ending(method, ending) for method in pair)
        found.setdefault(name, ({}, outcomes.split(", ")))[0][pair] = label, expected
    return found


def markdown(rows):
    """Rows of text, the first of them the head, as a Markdown table; -0.012 is written −.012."""
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    text = "\n".join(f"| {' | '.join(row)} |".replace("  ", " ") for row in rows)
    return re.sub(r"(-?)\b0(\.\d{3})", lambda cell: cell[1].replace("-", "−") + cell[2], text)


def difference_rows(frame, pairs, outcomes):
    """A head and a row for each pair: those of TABLES.md, and the short ones of RESULTS.md.

    The first have p by Holm for every outcome, seeds and KL, the others are bold where p < .05.
    """
    kl = column_of_kl(frame[frame.method.isin({name for pair in pairs for name in pair})].metrics)
    found = [differences(frame, pairs, outcome, kl) for outcome in outcomes]
    told, with_kl = any(told for _, told in pairs.values()), EQUAL_KL in " ".join(outcomes)
    head = [part for outcome in outcomes for part in (outcome, "p (Holm)")]
    rows = [("difference", *["expected"] * told, "seeds", *head, *[KL_END] * with_kl)]
    short = [("difference", "expected", *outcomes)]
    for pair in found[0]:
        (label, expected), seeds = pairs[pair], found[0][pair][0].index
        row, cells = [label, *[expected] * told, f"{len(seeds)}"], []
        for values, mean, half, p in (of_pairs.get(pair, MISSING) for of_pairs in found):
            text = f"{mean:+.3f} ± {half:.3f}" if len(values) else ""
            cells.append(f"**{text}**" if p < 0.05 else text)
            row.append(text and f"{text} ({sum(values > 0)} of {len(values)})")
            row.append(text and (f"{p:.3f}" if p >= 0.0005 else "< 0.001"))
        if with_kl:
            shared = frame[frame.seed.isin(seeds)]
            sides = [shared[shared.method == name].metrics for name in pair]
            ends = [np.mean([metrics[kl][-1] for metrics in side]) for side in sides]
            row.append(" and ".join(f"{end:.3f}" for end in ends))
        rows.append(row)
        for words, shorter in SHORTER.items():
            label = label.replace(words, shorter)
        short.append((label, expected, *cells))
    return rows, short


def methods_table(frame):
    """Every method on record; before training what the evaluation of GRPO's policies says."""
    columns = [WHOLE, SAMPLED, "greedy", KL_END]
    rows = [("mean ± standard deviation", "runs", *columns)]
    for method, runs in frame.groupby("method", sort=False):
        means, deviations = runs[columns].mean(), runs[columns].std()
        cells = [f"{x:.3f} ± {y:.3f}" for x, y in zip(means, deviations)]
        cells = [cell.removesuffix(" ± nan").removeprefix("nan") for cell in cells]
        rows.append((method, f"{len(runs)}", *cells))
    return markdown(rows)


# ---- Designed worlds

VIEWS = ("one rate", "best rate", "equal KL")
IN_WORLDS = [("Lopti", name) for name in list(world.METHODS)[:3]] + [("Lopti", "reversed Lopti")]
IN_WORLDS += [("AR, α = .3", "GRPO"), ("AR, α = 1", "GRPO"), ("oracle", "GRPO")]
IN_WORLDS += [("AR, α = 1, no bias", name) for name in ("GRPO", "AR, α = 1")]
IN_WORLDS += [("AR, measured α", "GRPO")]


def moments(of, *weights):
    """Signals (M,) and inner products (M, M) of gradients in which a token counts m(π)."""
    words = world.start_logits(of._replace(wording=1))[-1].softmax(0).double()
    return theory.world_moments(of, words, weights, of.groups * world.GROUP_SIZE, world.GROUP_SIZE)


def progress(of, alpha=0.0):
    """Unit progress of GRPO with AR in a world."""
    (signal,), ((energy,),) = moments(of, lambda pi: 1 - alpha * (1 - pi))
    return float(signal / energy.sqrt())


def predicted_gain(of, name):
    """Progress for each unit of length, over GRPO's, of a method in a world."""
    alpha, eta, *_ = world.METHODS[name]
    if "Lopti" in name and of.optimizer == "unit steps":
        low = lambda pi: (pi < eta - 1e-6).to(pi)  # what is η but for rounding is likely
        signals, products = moments(of, low, lambda pi: 1 - low(pi))
        low, high = products.diagonal().sqrt().tolist()
        cosine = float(products[0, 1]) / (low * high)
        return theory.split_gain(float(signals[1] / signals.sum()), math.atan2(high, low), cosine)
    if "measured" in name:  # at the best slope: √(s·V⁻¹s)
        signals, products = moments(of._replace(late=False), torch.ones_like, lambda pi: pi)
        inverse = torch.linalg.pinv(products, rtol=1e-6, hermitian=True)  # both may be one gradient
        return float((signals @ inverse @ signals).sqrt()) / progress(of)
    others = {"oracle": of._replace(wording=0), "AR, α = 1, no bias": of._replace(late=False)}
    # Not late: V(s) is 0. With one AdamW two passes and Lopti are a longer step of GRPO: 1.
    return progress(others.get(name, of), alpha) / progress(of)


def gain_in_world(rows, name, view, one, other="GRPO"):
    """Accuracy of one method minus another's, by seed: mean, half of its interval; at the end?

    The last: whether the rate of one of them is the lowest or the highest of the grid.
    """
    of_both = [row for row in rows if (row["world"], row["view"]) == (name, view)]
    pair = [next(row for row in of_both if row["method"] == method) for method in (one, other)]
    ends = world.RATES[world.WORLDS[name][0].optimizer][::7]
    by_seed = np.subtract(*(row["accuracies"] for row in pair))
    return *interval(by_seed), any(row["rate"] in ends for row in pair)


def worlds_table(rows):
    """What was predicted in each world, and what was found: `rows` are those of world.jsonl."""
    table = [("world", "difference of accuracy", "predicted gain", *VIEWS)]
    for (name, (of, _)), (one, other) in itertools.product(world.WORLDS.items(), IN_WORLDS):
        if of.late or "no bias" not in one:
            gain = predicted_gain(of, one) / predicted_gain(of, other)
            found = [gain_in_world(rows, name, view, one, other) for view in VIEWS]
            cells = [f"{mean:+.3f} ± {half:.3f}{'°' * at_end}" for mean, half, at_end in found]
            table.append((name, f"{one} − {other}", f"{gain:.2f}", *cells))
    return markdown(table)


# ---- The pages

SHORT = {  # of RESULTS.md: name → how many rows of which tables
    "equal KL": {"equal KL, new seeds": 2, "equal KL, step length": 3},
    "without bias": {"without bias": 5},
    "wordy": {"wordy, steps of .005": 4},
}


def tables(lines):
    """The tables by name; `lines` are those of runs.jsonl."""
    frame, made, short = run_frame(lines), {}, {}
    for name, (pairs, outcomes) in comparisons().items():
        rows, short[name] = difference_rows(frame, pairs, outcomes)
        made[name] = markdown(rows)
    for name, parts in SHORT.items():
        rows = [row for part, count in parts.items() for row in short[part][1 : 1 + count]]
        made[f"{name}, in short"] = markdown([short[next(iter(parts))][0], *rows])
    untrained = [
        line | {"method": "before training", "metrics": {}, "evaluations": line["evaluations"][:1]}
        for line in lines
        if line["method"] == "GRPO"
    ]
    made["methods"] = methods_table(run_frame([*untrained, *lines]))
    made["designed worlds"] = worlds_table(read_lines(world.FILE))
    return made


def with_tables(text, made):
    """RESULTS.md with what stands between `<!-- name -->` and `<!-- end -->` made anew."""
    new = lambda mark: f"<!-- {mark[1]} -->\n{made[mark[1]]}\n<!-- end -->"
    return re.sub(r"<!-- (?!end)(.+?) -->\n.*?<!-- end -->", new, text, flags=re.DOTALL)


def pages(made):
    """The two pages as they should be: path → text. Their prose is theirs, the tables are made."""
    shown = {name: table for name, table in made.items() if table.count("\n") > 1}  # has rows
    parts = [f"## {name}\n\n{table}\n" for name, table in shown.items() if "in short" not in name]
    results, prose = (path.read_text(encoding="utf-8") for path in (PAGE, TABLES))
    head = prose.partition("## ")[0]
    return {PAGE: with_tables(results, made), TABLES: head + "\n".join(parts)}


def main():
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=look)
    parser.add_argument("--write", action="store_true", help="into RESULTS.md and TABLES.md")
    args, found = parser.parse_args(), tables(read_lines(RESULTS))
    if args.write:
        for path, text in pages(found).items():
            path.write_text(text, encoding="utf-8")
    else:
        print("\n\n".join(f"{name}\n{table}" for name, table in found.items()))


if __name__ == "__main__":
    main()
