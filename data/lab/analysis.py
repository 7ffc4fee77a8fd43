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
from typing import NamedTuple

import experiments
import numpy as np
import pandas as pd
from experiments import REVERSED, TWO, shown
from scipy import stats

FOLDER = Path(__file__).resolve().parent / "results"
PAGE = FOLDER / "RESULTS.md"
BEFORE = "before training"

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
        row = {"method": shown(line["method"]), "seed": line["seed"], "metrics": metrics}
        if accuracy := metrics.get("accuracy"):
            row |= {EARLY: np.mean(accuracy[1:12]), WHOLE: np.mean(accuracy[1:])}
        if "kl" in metrics:
            row[KL_END] = metrics["kl"][-1]
        if line.get("evaluations") and line.get("config", {}).get("eval_size") != 1:
            row |= {SAMPLED: held_out(line, "avg@2"), "greedy": held_out(line, "greedy")}
        rows.append(row)
    columns = ["method", "seed", "metrics", EARLY, WHOLE, SAMPLED, "greedy", KL_END]
    return pd.DataFrame(rows, columns=columns)


def accuracy_by_kl(metrics, kl="kl"):
    """A run's KL to the starting policy, never falling, and its accuracy: running means (N,), (N,).

    `kl` is the column: "kl" is the mean over an update, "rollout/kl" is at sampling.
    """
    mean = np.ones(WINDOW) / WINDOW
    by_step = [np.convolve(metrics[name], mean, "valid") for name in (kl, "accuracy")]
    return np.maximum.accumulate(by_step[0]), by_step[1]


def at_equal_kl(metrics, others, kl="kl"):
    """Accuracy minus another run's at the same KL, the mean over the KL that both pass through.

    Within KL_RANGE, linear between steps; NaN where the two have no KL in common.

    >>> kl = np.linspace(0.0, 0.06, 9)
    >>> float(at_equal_kl({"kl": kl, "accuracy": kl + 0.1}, {"kl": kl, "accuracy": kl}))
    0.1
    """
    curves = [accuracy_by_kl(one, kl) for one in (metrics, others)]
    low = max(KL_RANGE[0], *(curve[0][0] for curve in curves))
    high = min(KL_RANGE[1], *(curve[0][-1] for curve in curves))
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
    """First minus second for every seed that both have, as a series by seed."""
    first, second = (frame[frame.method == name].set_index("seed") for name in (method, other))
    seeds = first.index.intersection(second.index).sort_values()
    if outcome == EQUAL_KL:
        pairs = zip(first.metrics[seeds], second.metrics[seeds])
        return pd.Series([at_equal_kl(*pair, kl) for pair in pairs], seeds, dtype=float)
    return first[outcome][seeds] - second[outcome][seeds]


def differences(frame, pairs, outcome, kl="kl"):
    """pair → (by seed, mean, half of its interval, p by Holm), for pairs with two seeds or more."""
    found = {pair: by_seed(frame, *pair, outcome, kl).dropna() for pair in pairs}
    found = {pair: values for pair, values in found.items() if len(values) > 1}
    p_values = [stats.ttest_1samp(values, 0).pvalue for values in found.values()]
    p_values = holm(np.nan_to_num(p_values, nan=1.0))  # NaN: all differences are 0
    return {
        pair: (values, *interval(values), p) for (pair, values), p in zip(found.items(), p_values)
    }


# ---- What is compared


class Comparisons(NamedTuple):
    caption: str
    pairs: dict  # (method, compared with) → what DESIGN.md expected
    outcomes: tuple = (WHOLE, EQUAL_KL)
    kl: str = "kl"  # the column of the KL


def minus(other, *methods, ending=""):
    """Pairs of each method and another, where nothing was expected.

    >>> minus("GRPO", "AR", ending=", long")
    {('AR, long', 'GRPO, long'): ''}
    """
    return {(f"{method}{ending}", f"{other}{ending}"): "" for method in methods}


BIAS = ", without bias"


def without(method, own="", to_grpo=""):
    """A method without its bias: what is expected of it against itself, and against GRPO."""
    return {(f"{method}{BIAS}", method): own, (f"{method}{BIAS}", "GRPO"): to_grpo}


PLAIN, NEW, WORDY = ", plain wording", ", new seeds", ", wordy"
AT = [f", SmolLM2 at {rate}" for rate in experiments.RATES]
FASTER = f"GRPO, learning rate × √2{NEW}"
STEPS = ("random split", "GRPO, half-size mini-batches")  # as many as Lopti takes
ON_RECORD = ("AR", "Lopti", "AR + Lopti", TWO, REVERSED, "high only", "low only", "AR α = 0.1")
ON_RECORD += ("AR α = 0.6", "AR α = 1", "Lopti η = 0.2", "Lopti η = 0.8", "STAPO", "80/20", "min-p")
ON_RECORD += ("REINFORCE++", "GRPO, learning rate × 0.5", "GRPO, learning rate × 2")
COMPARISONS = {
    "against GRPO": Comparisons(
        "The default job; sampled accuracy is on held-out puzzles. ![Six methods](training.png)",
        minus("GRPO", *ON_RECORD),
        (WHOLE, SAMPLED),
    ),
    "split or step": Comparisons(
        "Lopti against as many plain steps; an AdamW for each pass.",
        minus(TWO, "Lopti", *STEPS)
        | minus("Lopti", *STEPS, "Lopti, two optimizers")
        | minus(TWO, "Lopti", ending=PLAIN),
    ),
    "order": Comparisons(
        "Lopti against its reverse: varied wording, one for each thing, no momentum.",
        minus(REVERSED, "Lopti", TWO)
        | minus(REVERSED, "Lopti", TWO, "GRPO", ending=PLAIN)
        | minus(REVERSED, "Lopti", "GRPO", ending=", β₁ = 0"),
        (EARLY, WHOLE, SAMPLED),
    ),
    "equal KL, on record": Comparisons(
        "Looked at afterwards: accuracy by step and at equal KL.",
        minus("GRPO", "AR", "Lopti", TWO, REVERSED, *STEPS, "80/20")
        | minus("GRPO", "Lopti", TWO, REVERSED, ending=PLAIN),
    ),
    "equal KL, new seeds": Comparisons(
        "Planned: the same on seeds 20 to 29, with the KL at sampling.",
        {
            (f"Lopti{NEW}", f"GRPO{NEW}"): "level; −.06 at equal KL",
            (f"{TWO}{NEW}", f"GRPO{NEW}"): "level; −.08 at equal KL",
            (FASTER, f"GRPO{NEW}"): "as Lopti",
            (f"Lopti{NEW}", FASTER): "level in both",
            (f"Lopti{NEW}", f"{TWO}{NEW}"): "level",
        },
        kl="rollout/kl",
    ),
    "without bias": Comparisons(
        "Planned: the bias of weights by π subtracted.",
        without("AR α = 1", "above +.10", "0 to −.08")
        | without("AR α = 0.6", "", "within .02")
        | without("AR", "within .02")
        | without("high only", "above +.15")
        | without("Lopti, two optimizers", "not sure")
        | without(REVERSED, "not sure")
        | without("Lopti", "not sure")
        | without("low only", "not sure")
        | dict.fromkeys(minus("Lopti", REVERSED, ending=BIAS), "0, if the order is the bias"),
    ),
    "wordy": Comparisons(
        "A policy made so that its unlikely tokens are noise, with the KL at sampling.",
        minus("GRPO", TWO, "random split", "Lopti", REVERSED, "AR", "AR α = 1", ending=WORDY)
        | minus("GRPO", "AR α = 1, without bias", "GRPO, without wording", ending=WORDY)
        | minus("Lopti", TWO, "random split", REVERSED, ending=WORDY)
        | minus("AR α = 1", "AR α = 1, without bias", ending=WORDY),
        kl="rollout/kl",
    ),
    "SmolLM2": Comparisons(
        "One-step word problems at three learning rates, 12 steps.",
        minus("GRPO", "AR", "Lopti", TWO, ending=AT[0])
        | minus("GRPO", "AR", "Lopti", TWO, ending=AT[1])
        | minus("GRPO", "AR", "Lopti", TWO, ending=AT[2]),
        (EARLY,),
    ),
}
BIAS_IN_SHORT = {**without("AR α = 1"), **without("AR α = 0.6")}
BIAS_IN_SHORT |= minus("high only", f"high only{BIAS}")

# ---- Tables


def markdown(rows):
    """Rows of text, the first of them the head, as an aligned Markdown table."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |"
        for row in rows
    )


def of_runs(values, digits=3):
    """'0.787 ± 0.014', the mean and the standard deviation of runs; the mean alone for one run."""
    values = values.dropna()
    deviation = f" ± {values.std():.{digits}f}" if len(values) > 1 else ""
    return f"{values.mean():.{digits}f}{deviation}" if len(values) else ""


def comparisons_table(frame, compared, only=None):
    """A row for each pair, or for those in `only`: every outcome with its interval and p."""
    found = {
        outcome: differences(frame, compared.pairs, outcome, compared.kl)
        for outcome in compared.outcomes
    }
    told, with_kl = any(compared.pairs.values()), EQUAL_KL in compared.outcomes
    head = [part for outcome in compared.outcomes for part in (outcome, "p (Holm)")]
    rows = [("difference", *["expected"] * told, "seeds", *head, *[KL_END] * with_kl)]
    for pair, (first, *_) in found[compared.outcomes[0]].items():
        if only is not None and pair not in only:
            continue
        row = [" − ".join(pair), *[compared.pairs[pair]] * told, f"{len(first)}"]
        for of_pairs in found.values():
            values, mean, half, p = of_pairs.get(pair, ((), 0, 0, 0))
            text = f"{mean:+.3f} ± {half:.3f} ({sum(values > 0)} of {len(values)})"
            row += [text, f"{p:.3f}"] if len(values) else ["", ""]
        if with_kl:
            sides = [frame[(frame.method == name) & frame.seed.isin(first.index)] for name in pair]
            ends = [np.mean([run[compared.kl][-1] for run in side.metrics]) for side in sides]
            row.append(" and ".join(f"{end:.3f}" for end in ends))
        rows.append(row)
    return markdown(rows)


def methods_table(frame):
    """Every method on record; before training what the evaluation of GRPO's policies says."""
    columns = [WHOLE, SAMPLED, "greedy", KL_END]
    rows = [("method", "runs", *columns)]
    for method, runs in frame.groupby("method", sort=False):
        rows.append((method, f"{len(runs)}", *(of_runs(runs[name]) for name in columns)))
    return markdown(rows)


def tables(lines):
    """The tables by name; `lines` are those of runs.jsonl."""
    untrained = [  # GRPO's policies before training
        line | {"method": BEFORE, "metrics": {}, "evaluations": line["evaluations"][:1]}
        for line in lines
        if line["method"] == "GRPO"
    ]
    frame = run_frame(lines)
    bias = COMPARISONS["without bias"]
    return {
        **{name: comparisons_table(frame, compared) for name, compared in COMPARISONS.items()},
        "without bias, in short": comparisons_table(frame, bias, BIAS_IN_SHORT),
        "methods": methods_table(run_frame([*untrained, *lines])),
    }


CAPTIONS = {name: compared.caption for name, compared in COMPARISONS.items()}
CAPTIONS["methods"] = "Every method on record: mean ± *standard deviation* of its runs."


def tables_page(made):
    """TABLES.md: every table under its name."""
    head = "`python data/lab/analysis.py --write` makes this page from the `*.jsonl` beside it. A "
    head += (
        "difference is *first minus second* by seed; ± is half of a 95 % interval; in brackets, "
    )
    head += "how many seeds are above 0. *By step* is accuracy in training from step 2 on. p is "
    head += "corrected by Holm for the comparisons of its column."
    parts = [
        f"## {name}\n\n{caption}\n\n{made[name]}\n"
        for name, caption in CAPTIONS.items()
        if made[name].count("\n") > 1  # there are runs for it
    ]
    return "\n".join([f"# All tables of the laboratory\n\n{head}\n", *parts])


def with_tables(text, made):
    """RESULTS.md with what stands between `<!-- name -->` and `<!-- end -->` made anew."""
    for name in re.findall(r"<!-- (?!end)(.+?) -->", text):
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        rest = rest.partition("<!-- end -->")[2]
        text = f"{before}<!-- {name} -->\n{made[name]}\n<!-- end -->{rest}"
    return text


def pages(made):
    """The two pages as they should be: path → text."""
    results = with_tables(PAGE.read_text(encoding="utf-8"), made)
    return {PAGE: results, FOLDER / "TABLES.md": tables_page(made)}


if __name__ == "__main__":
    found = tables(experiments.read_lines(experiments.RESULTS))
    if "--write" in sys.argv:
        for path, text in pages(found).items():
            path.write_text(text, encoding="utf-8")
    else:
        print("\n\n".join(f"{name}\n{table}" for name, table in found.items()))
