"""What the runs say: a frame with a row for each run, one test, the tables of results/*.md.

    python data/lab/analysis.py            # print the tables
    python data/lab/analysis.py --write    # put them into RESULTS.md and TABLES.md

Every comparison is by seed, which fixes the puzzles: Student's paired t-test, p corrected by Holm
for all comparisons of a column. ± is half of a 95 % interval, which is not corrected. What has
fewer than two seeds in common is left out, so the tables grow with runs.jsonl.
"""

import re
import sys
from pathlib import Path

import experiments
import numpy as np
import pandas as pd
from experiments import REVERSED, TWO, shown
from scipy import stats

FOLDER = Path(__file__).resolve().parent / "results"
PAGE, TABLES = FOLDER / "RESULTS.md", FOLDER / "TABLES.md"

# ---- A frame of all runs

EARLY, WHOLE = "steps 2 to 12", "by step"  # accuracy in training; the whole is steps 2 to 24
EQUAL_KL = "at equal KL"  # accuracy in training at the same KL to the starting policy
SAMPLED, KL_END = "sampled accuracy", "KL at the end"  # held out: mean of the last two evaluations
KL_RANGE = (0.006, 0.05)  # where accuracy is compared at equal KL
SMALL_KL = (0.001, 0.05)  # the same, where steps are shorter
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
        row = {"method": shown(line["method"]), "seed": line["seed"], "metrics": metrics}
        if accuracy := metrics.get("accuracy"):
            row |= {EARLY: np.mean(accuracy[1:12]), WHOLE: np.mean(accuracy[1:])}
        if "kl" in metrics:
            row[KL_END] = metrics["kl"][-1]
        if line.get("evaluations") and line.get("config", {}).get("eval_size") != 1:
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


def by_seed(frame, method, other, outcome, kl="kl", limits=KL_RANGE):
    """First minus second for every seed that both have, as a series by seed."""
    first, second = (frame[frame.method == name].set_index("seed") for name in (method, other))
    seeds = first.index.intersection(second.index).sort_values()
    if outcome == EQUAL_KL:
        pairs = zip(first.metrics[seeds], second.metrics[seeds])
        return pd.Series([at_equal_kl(*pair, kl, limits) for pair in pairs], seeds, dtype=float)
    return first[outcome][seeds] - second[outcome][seeds]


def differences(frame, pairs, outcome, kl="kl", limits=KL_RANGE):
    """pair → (by seed, mean, half of its interval, p by Holm), for pairs with two seeds or more."""
    found = {pair: by_seed(frame, *pair, outcome, kl, limits).dropna() for pair in pairs}
    found = {pair: values for pair, values in found.items() if len(values) > 1}
    p_values = [stats.ttest_1samp(values, 0).pvalue for values in found.values()]
    p_values = holm(np.nan_to_num(p_values, nan=1.0))  # NaN: all differences are 0
    return {
        pair: (values, *interval(values), p) for (pair, values), p in zip(found.items(), p_values)
    }


# ---- What is compared: pairs of methods → what DESIGN.md expected, or nothing

BIAS, NEW, PLAIN, WORDY = ", without bias", ", new seeds", ", plain wording", ", wordy"
SLOWER, UNIT = f"{WORDY}, learning rate × 0.5", ", unit steps"
SHORT, QUARTER = f"{UNIT}{WORDY}, half as long", f"{UNIT}{WORDY}, a quarter as long"


def minus(other, *methods, ending="", expected=""):
    """Pairs of each method and another, all with the same ending.

    >>> minus("GRPO", "AR", ending=", wordy")
    {('AR, wordy', 'GRPO, wordy'): ''}
    """
    return {(f"{method}{ending}", f"{other}{ending}"): expected for method in methods}


def without(method, own="not sure", to_grpo=""):
    """A method without its bias: what is expected of it against itself, and against GRPO."""
    return {(f"{method}{BIAS}", method): own, (f"{method}{BIAS}", "GRPO"): to_grpo}


DEFAULT = ("AR", "Lopti", "AR + Lopti", TWO, REVERSED, "high only", "low only", "AR α = 0.1")
DEFAULT += ("AR α = 0.6", "AR α = 1", "Lopti η = 0.2", "Lopti η = 0.8", "STAPO", "80/20", "min-p")
DEFAULT += ("REINFORCE++", "GRPO, learning rate × 0.5", "GRPO, learning rate × 2")
STEPS = ("random split", "GRPO, half-size mini-batches")  # as many as Lopti takes
FASTER = "GRPO, learning rate × √2"
COMPARISONS = {  # table → pairs; outcomes if not by step and at equal KL; limits of the KL
    "against GRPO": (minus("GRPO", *DEFAULT), (WHOLE, SAMPLED)),
    "split or step": (
        minus(TWO, "Lopti", *STEPS)
        | minus("Lopti", *STEPS, "Lopti, two optimizers")
        | minus(TWO, "Lopti", ending=PLAIN),
    ),
    "order": (
        minus(REVERSED, "Lopti", TWO)
        | minus(REVERSED, "Lopti", TWO, "GRPO", ending=PLAIN)
        | minus(REVERSED, "Lopti", "GRPO", ending=", β₁ = 0"),
        (EARLY, WHOLE, SAMPLED),
    ),
    "equal KL, on record": (
        minus("GRPO", "AR", "Lopti", TWO, REVERSED, *STEPS, "80/20")
        | minus("GRPO", "Lopti", TWO, REVERSED, ending=PLAIN),
    ),
    "equal KL, new seeds": (
        minus("GRPO", "Lopti", ending=NEW, expected="level; −.06 at equal KL")
        | minus("GRPO", TWO, ending=NEW, expected="level; −.08 at equal KL")
        | minus("GRPO", FASTER, ending=NEW, expected="as Lopti")
        | minus(FASTER, "Lopti", ending=NEW, expected="level in both")
        | minus(TWO, "Lopti", ending=NEW, expected="level"),
    ),
    "without bias": (
        without("AR α = 1", "above +.10", "0 to −.08")
        | without("AR α = 0.6", "", "within .02")
        | without("AR", "within .02")
        | without("high only", "above +.15")
        | without("Lopti, two optimizers")
        | without(REVERSED)
        | without("Lopti")
        | without("low only")
        | minus("Lopti", REVERSED, ending=BIAS, expected="0, if the order is the bias"),
    ),
    "alpha, without bias": (minus("GRPO", *map(shown, experiments.ALPHAS)),),
    "unit steps": (
        minus("GRPO", f"AR α = 1{BIAS}", ending=UNIT, expected="behind; behind")
        | minus("GRPO", f"AR α = 1{BIAS}", ending=f"{UNIT}{WORDY}", expected="ahead; ahead")
        | minus("GRPO", f"AR α = 1{BIAS}", ending=SHORT, expected="ahead; ahead")
        | minus("GRPO", "Lopti", ending=UNIT, expected="ahead; level")
        | minus("GRPO", "Lopti", ending=f"{UNIT}{WORDY}", expected="ahead; ahead")
        | minus("GRPO", TWO, ending=UNIT, expected="ahead; level or behind")
        | minus("GRPO", TWO, ending=f"{UNIT}{WORDY}", expected="ahead; level or behind")
        | minus(TWO, "Lopti", ending=UNIT, expected="behind; level")
        | minus(TWO, "Lopti", ending=f"{UNIT}{WORDY}", expected="ahead; ahead"),
        (WHOLE, EQUAL_KL),
        SMALL_KL,
    ),
    "short steps": (
        minus("GRPO", f"AR α = 1{BIAS}", ending=QUARTER, expected="+.017 (.013 to .021)")
        | minus("GRPO", "AR α = 1", ending=QUARTER, expected="+.018 (.012 to .023)")
        | minus("AR α = 1", f"AR α = 1{BIAS}", ending=QUARTER, expected="within .01")
        | {(f"Lopti{QUARTER}", f"GRPO{QUARTER} × √2"): "+.010 (.005 to .014)"},
        (WHOLE,),
    ),
    "short steps, other methods": (
        minus("GRPO", "GRPO, without wording", ending=QUARTER, expected="+.01 to +.04")
        | minus("GRPO", "AR", ending=QUARTER, expected="+.002 to +.003")
        | minus(TWO, "Lopti", ending=QUARTER, expected="0 to −.01")
        | minus("random split", "Lopti", ending=QUARTER, expected="+.004 to +.012")
        | minus(REVERSED, "Lopti", ending=QUARTER, expected="0"),
        (WHOLE,),
    ),
    "wordy, half the learning rate": (
        minus("GRPO", f"AR α = 1{BIAS}", ending=SLOWER, expected="ahead")
        | minus("GRPO", "Lopti", ending=SLOWER, expected="ahead; level or a little ahead")
        | minus("GRPO", TWO, ending=SLOWER, expected="ahead or level; level or behind")
        | minus(TWO, "Lopti", ending=SLOWER, expected="ahead at equal KL"),
        (WHOLE, EQUAL_KL),
        SMALL_KL,
    ),
    "SmolLM2, 12 steps": (
        dict(
            pair
            for rate in experiments.RATES
            for pair in minus("GRPO", "AR", "Lopti", TWO, ending=f", SmolLM2 at {rate}").items()
        ),
        (WHOLE,),
    ),
}
IN_SHORT = [*without("AR α = 1"), *without("AR α = 0.6"), *[*without("high only")][:1]]

# ---- Tables


def markdown(rows):
    """Rows of text, the first of them the head, as an aligned Markdown table."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |"
        for row in rows
    )


def of_runs(values):
    """'0.787 ± 0.014', the mean and the standard deviation of runs; the mean alone for one run."""
    values = values.dropna()
    deviation = f" ± {values.std():.3f}" if len(values) > 1 else ""
    return f"{values.mean():.3f}{deviation}" if len(values) else ""


def comparisons_table(frame, pairs, outcomes=(WHOLE, EQUAL_KL), limits=KL_RANGE, only=None):
    """A row for each pair, or for those in `only`: every outcome with its interval and p."""
    kl = column_of_kl(frame[frame.method.isin({name for pair in pairs for name in pair})].metrics)
    found = [differences(frame, pairs, outcome, kl, limits) for outcome in outcomes]
    told, with_kl = any(pairs.values()), EQUAL_KL in outcomes
    head = [part for outcome in outcomes for part in (outcome, "p (Holm)")]
    rows = [("difference", *["expected"] * told, "seeds", *head, *[KL_END] * with_kl)]
    for pair in [pair for pair in found[0] if only is None or pair in only]:
        seeds = found[0][pair][0].index
        row = [" − ".join(pair).replace(NEW, ""), *[pairs[pair]] * told, f"{len(seeds)}"]
        for of_pairs in found:
            values, mean, half, p = of_pairs.get(pair, ((), 0, 0, 0))
            text = f"{mean:+.3f} ± {half:.3f} ({sum(values > 0)} of {len(values)})"
            row += [text, f"{p:.3f}" if p >= 0.0005 else "< 0.001"] if len(values) else ["", ""]
        if with_kl:
            sides = [
                frame[(frame.method == name) & frame.seed.isin(seeds)].metrics for name in pair
            ]
            ends = [np.mean([metrics[kl][-1] for metrics in side]) for side in sides]
            row.append(" and ".join(f"{end:.3f}" for end in ends))
        rows.append(row)
    return markdown(rows)


def methods_table(frame):
    """Every method on record; before training what the evaluation of GRPO's policies says."""
    columns = [WHOLE, SAMPLED, "greedy", KL_END]
    rows = [("mean ± standard deviation", "runs", *columns)]
    for method, runs in frame.groupby("method", sort=False):
        rows.append((method, f"{len(runs)}", *(of_runs(runs[name]) for name in columns)))
    return markdown(rows)


def tables(lines):
    """The tables by name; `lines` are those of runs.jsonl."""
    frame, bias = run_frame(lines), COMPARISONS["without bias"][0]
    untrained = [
        line | {"method": "before training", "metrics": {}, "evaluations": line["evaluations"][:1]}
        for line in lines
        if line["method"] == "GRPO"
    ]
    return {
        **{name: comparisons_table(frame, *compared) for name, compared in COMPARISONS.items()},
        "methods": methods_table(run_frame([*untrained, *lines])),
        "without bias, in short": comparisons_table(frame, bias, only=IN_SHORT),
    }


HEAD = """# All tables of the laboratory

`python data/lab/analysis.py --write` makes this page from `runs.jsonl`. A difference is *first
minus second*, by seed; ± is half of a 95 % interval; in brackets, how many seeds are above 0. p is
corrected by Holm for its column. *By step* is accuracy in training, the mean from step 2 on;
*sampled accuracy* is on held-out puzzles, the mean of the last two evaluations.
"""


def with_tables(text, made):
    """RESULTS.md with what stands between `<!-- name -->` and `<!-- end -->` made anew."""
    for name in re.findall(r"<!-- (?!end)(.+?) -->", text):
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        rest = rest.partition("<!-- end -->")[2]
        text = f"{before}<!-- {name} -->\n{made[name]}\n<!-- end -->{rest}"
    return text


def pages(made):
    """The two pages as they should be: path → text."""
    made = {name: re.sub("-{3,}", "---", re.sub(" +", " ", table)) for name, table in made.items()}
    shown = {name: table for name, table in made.items() if table.count("\n") > 1}  # has rows
    parts = [f"## {name}\n\n{table}\n" for name, table in shown.items() if "in short" not in name]
    results = with_tables(PAGE.read_text(encoding="utf-8"), made)
    return {PAGE: results, TABLES: "\n".join([HEAD, *parts])}


if __name__ == "__main__":
    found = tables(experiments.read_lines(experiments.RESULTS))
    if "--write" in sys.argv:
        for path, text in pages(found).items():
            path.write_text(text, encoding="utf-8")
    else:
        print("\n\n".join(f"{name}\n{table}" for name, table in found.items()))
