"""What the runs say: a frame with a row for each run, the tests, the tables of results/*.md.

    python data/lab/analysis.py            # print the tables
    python data/lab/analysis.py --write    # put them into RESULTS.md and TABLES.md

Methods against GRPO: Dunnett's test. By seed, which fixes the puzzles: Student's paired t-test;
Welch's test where the puzzles differ. All other pairs: the t-test with a standard deviation pooled
over the table. The p-values of all but Dunnett's are corrected by Holm within a table. ± is half of
a 95 % interval.
"""

import itertools
import re
import sys
from collections import Counter
from pathlib import Path

import experiments
import numpy as np
import pandas as pd
from experiments import PAPER, REVERSED, TWO
from scipy import stats

FOLDER = Path(__file__).resolve().parent / "results"
FIRST, REAL_MODEL = FOLDER / "first_laboratory.jsonl", FOLDER / "real_model_runs.jsonl"
SECOND_PASS = FOLDER / "second_pass.jsonl"
PAGE = FOLDER / "RESULTS.md"
BEFORE = "before training"
RATES = ("3e-6", "1e-5", "3e-5")  # learning rates of SmolLM2
NOT_WORSE = ("low only", "GRPO", 1)  # by no more than the margin of JUDGED

# ---- A frame of all runs


def shown(method):
    """The name of a method in tables: seeds of two series are one method, nothing is abbreviated.

    >>> shown("Lopti, seeds 5 to 9"), shown("GRPO, rate × 2"), shown("AR, plain, cut")
    ('Lopti', 'GRPO, learning rate × 2', 'AR, plain, truncated')
    """
    method = method.removesuffix(", seeds 5 to 9").replace(", cut", ", truncated")
    return re.sub(", (rate|lr)", ", learning rate", method)


OUTCOMES = {  # name -> the measure of an evaluation, and of how many evaluations it is the mean
    "sampled accuracy": ("avg@2", 2),
    "reward": ("reward", 2),
    "mean over training": ("avg@2", 99),
    "greedy": ("greedy", 2),
    "share truncated": ("cut", 2),
    "length": ("length", 2),
    "evaluated at the end": ("avg@2", 1),
}
JUDGED = {"sampled accuracy": 0.05, "reward": 0.15, "mean over training": 0.05}  # margins
EARLY, WHOLE = "steps 2 to 12", "steps 2 to 24"  # accuracy in training


def curve(line, measure):
    """A measure at each evaluation of a run, mean over the sizes of puzzle."""
    return [
        np.mean([size[measure] for size in row.values() if isinstance(size, dict)])
        for row in line["evaluations"]
    ]


def run_frame(lines, outcomes=OUTCOMES):
    """A row for each run: method, seed, learning rate, accuracy in training, and the outcomes.

    Accuracy in training begins with step 2, the first after an update; its puzzles are new. An
    outcome is the mean of the last evaluations, without the one before training.
    """
    rows = []
    for line in lines:
        row = {"method": shown(line["method"]), "seed": line["seed"]}
        row["learning rate"] = line.get("learning_rate")
        if metrics := {name: pd.Series(values) for name, values in line["metrics"].items()}:
            row |= {EARLY: metrics["accuracy"][1:12].mean(), WHOLE: metrics["accuracy"][1:].mean()}
            row["entropy"] = metrics["entropy"][-3:].mean()
        for outcome, (measure, last) in outcomes.items():
            judged = line.get("config", {}).get("eval_size") != 1  # else only training is judged
            values = curve(line, measure) if judged else [np.nan]
            row[outcome] = np.mean((values[1:] or values)[-last:])
        rows.append(row)
    return pd.DataFrame(rows)


# ---- Tests


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


def against(control, groups):
    """name → (difference to the control, half of its interval, p): Dunnett's, for all together."""
    test = stats.dunnett(*groups.values(), control=control, rng=0)
    bounds = test.confidence_interval()
    means = [np.mean(values) - np.mean(control) for values in groups.values()]
    return dict(zip(groups, zip(means, (bounds.high - bounds.low) / 2, test.pvalue)))


def pooled(groups, pairs):
    """(difference, half of its own 95 % interval, p by Holm) for each pair (name, name, ...).

    Student's t with one standard deviation, pooled over all groups.
    """
    groups = {name: np.asarray(values) for name, values in groups.items()}
    degrees = sum(len(values) - 1 for values in groups.values())
    squares = sum(((values - values.mean()) ** 2).sum() for values in groups.values())
    means = np.array([groups[a].mean() - groups[b].mean() for a, b, *_ in pairs])
    sizes = np.array([1 / len(groups[a]) + 1 / len(groups[b]) for a, b, *_ in pairs])
    errors = np.sqrt(squares / degrees * sizes)
    p_values = holm(2 * stats.t.sf(np.abs(means) / errors, degrees))
    return list(zip(means, stats.t.ppf(0.975, degrees) * errors, p_values))


def by_seed(frame, method, other, outcome):
    """The differences between two methods (seeds,), for seeds that both have."""
    sides = [
        frame[frame.method == name].set_index("seed")[outcome].dropna() for name in (method, other)
    ]
    return (sides[0] - sides[1]).dropna()


def difference(frame, method, other, outcome):
    """(differences, their mean, half of its 95 % interval, p); None for fewer than two.

    Student's paired t-test by seed. A method of UNPAIRED: Welch's test; its differences are each
    run minus the mean of the other method's.
    """
    values = by_seed(frame, method, other, outcome)
    if len(values) < 2:
        return None
    if method not in UNPAIRED:
        return values, *interval(values), stats.ttest_1samp(values, 0).pvalue
    runs, others = (frame[frame.method == name][outcome].dropna() for name in (method, other))
    test = stats.ttest_ind(runs, others, equal_var=False)
    bounds, values = test.confidence_interval(), runs - others.mean()
    return values, values.mean(), (bounds.high - bounds.low) / 2, test.pvalue


def over_both(sides):
    """(mean, half, second minus first, half) of two sets of differences, by one linear model.

    The model has a mean for each set and one standard deviation for both; the first mean is that
    of all differences together.

    >>> [round(float(x), 3) for x in over_both([pd.Series([0, 2]), pd.Series([1, 3])])]
    [1.5, 3.042, 1.0, 6.085]
    """
    sizes, both = np.array([len(side) for side in sides]), pd.concat(sides)
    degrees = sizes.sum() - 2
    deviation = np.sqrt(sum(((side - side.mean()) ** 2).sum() for side in sides) / degrees)
    half = stats.t.ppf(0.975, degrees) * deviation
    apart = sides[1].mean() - sides[0].mean()
    return both.mean(), half / np.sqrt(sizes.sum()), apart, half * np.sqrt((1 / sizes).sum())


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


CLAIMS = [  # (method, compared with, +1: claimed to be more, -1: less, 0: no claim)
    *[(method, "GRPO", 1) for method in (*PAPER, "STAPO", "80/20")],
    *[(method, "GRPO", -1) for method in (REVERSED, "high only", "reward-free")],
    (TWO, "GRPO", 1),
    *[(f"GRPO, learning rate × {factor}", "GRPO", -1) for factor in ("0.5", "2")],
    NOT_WORSE,
    *[(method, "GRPO", 0) for method in ("REINFORCE++", "min-p", "GRPO, centred")],
]
OTHER_CLAIMS = [
    ("AR + Lopti", "AR", 1),
    ("AR + Lopti", "Lopti", 1),
    (REVERSED, "Lopti", -1),
    ("Lopti", TWO, 1),
    ("REINFORCE++, AR + Lopti", "REINFORCE++", 1),
    *[
        (f"{method}, learning rate × {factor}", f"GRPO, learning rate × {factor}", 1)
        for factor in ("0.5", "2")
        for method in PAPER
    ],
    *[(f"{name}, centred", name, 1) for name in ("AR", "Lopti", "high only", "AR α = 1")],
    ("AR α = 1", "AR", -1),
    ("Lopti η = 0.8", "Lopti", -1),
]
CELLS = list(map(shown, experiments.CELLS))
CELL_CLAIMS = [
    (f"{name}, {cell}", f"GRPO, {cell}", 1) for cell in CELLS for name in ("AR", "Lopti")
]


def effects(frame, claims, outcome):
    """claim → (difference, half of its interval, p), for claims with two runs on both sides."""
    groups = {name: values for name, values in frame.groupby("method")[outcome] if len(values) > 1}
    claims = [claim for claim in claims if {*claim[:2]} <= set(groups)]
    groups = {name: groups[name] for claim in claims for name in claim[:2]}
    if {other for _, other, _ in claims} == {"GRPO"}:
        found = against(groups.pop("GRPO"), groups)
        return {claim: found[claim[0]] for claim in claims}
    return dict(zip(claims, pooled(groups, claims))) if claims else {}


def verdict(difference, half, p, sign, margin=0.0):
    """'held', 'the opposite' or 'undecided'; '' where nothing is claimed.

    With a margin the claim is that the difference is above -margin: "not worse".

    >>> verdict(2, 1, 0.01, 1), verdict(-2, 1, 0.01, 1), verdict(1, 2, 0.3, 1)
    ('held', 'the opposite', 'undecided')
    >>> verdict(-0.06, 0.02, 0.01, 1, margin=0.05)
    'worse; whether by .05, undecided'
    """
    if margin and difference + half > -margin:
        worse = f"worse; whether by {margin:g}, undecided".replace("0.", ".")
        return "held" if difference - half > -margin else worse if p < 0.05 else "undecided"
    if p >= 0.05 or not sign:
        return "undecided" if sign else ""
    return "held" if difference * sign > 0 else "the opposite"


def claims_table(frame, claims):
    """Each claim's difference, interval and verdict by each of the judged outcomes."""
    judged = {outcome: effects(frame, claims, outcome) for outcome in JUDGED}
    runs, rows = Counter(frame.method), [("difference", "claimed", "runs", *JUDGED)]
    for claim in judged["reward"]:
        method, other, sign = claim
        claimed = "not worse" if claim == NOT_WORSE else {1: "more", -1: "less", 0: ""}[sign]
        row = [f"{method} − {other}", claimed, f"{runs[method]} and {runs[other]}"]
        for outcome, margin in JUDGED.items():
            difference, half, p = judged[outcome][claim]
            text = verdict(difference, half, p, sign, margin if claim == NOT_WORSE else 0.0)
            row.append(f"{difference:+.3f} ± {half:.3f} {text}".strip())
        rows.append(row)
    return markdown(rows)


def methods_table(frame):
    """Every outcome of every method; of untrained policies what their evaluation says."""
    columns = [WHOLE, *list(OUTCOMES)[:-1], "entropy"]
    rows = [("method", "runs", *columns)]
    for method in dict.fromkeys(map(shown, (BEFORE, *experiments.METHODS))):
        runs = frame[frame.method == method]
        if len(runs):
            cells = [of_runs(runs[name], 1 if name == "length" else 3) for name in columns]
            rows.append((method, f"{len(runs)}", *cells))
    return markdown(rows)


DIFFERENCES = [  # (method, compared with, seeds from)
    *[(method, "GRPO", 0) for method in (*PAPER, TWO, REVERSED, "low only", "high only")],
    *[("Lopti", TWO, 0), ("Lopti", REVERSED, 0), (TWO, REVERSED, 0), ("min-p", "GRPO", 0)],
    ("Lopti, two optimizers", "Lopti", 0),
    ("Lopti, β₁ = 0", f"{REVERSED}, β₁ = 0", 0),
    ("Lopti, plain wording", "GRPO, plain wording", 0),
    *[
        (f"{REVERSED}, plain wording", f"{name}, plain wording", 0)
        for name in ("Lopti", TWO, "GRPO")
    ],
    ("GRPO, learning rate × 2", "GRPO", 0),
    ("Lopti, learning rate × 0.5", "GRPO", 0),
    ("Lopti", "GRPO, learning rate × 2", 0),
    *[(f"Lopti, {cell}", f"GRPO, {cell}", 0) for cell in CELLS],
    *[("Lopti", other, 5) for other in ("GRPO", TWO, REVERSED)],
]


def training_table(frames, pairs):
    """Differences in accuracy in training, by seed: a row for each pair, a column for each frame.

    `frames` is column → (frame, outcome); `pairs` is (method, compared with, seeds from).
    """
    rows = [("difference", *frames)]
    for method, other, first in pairs:
        name = f"{method} − {other}" + (f", seeds from {first}" if first else "")
        cells = []
        for frame, outcome in frames.values():
            values = by_seed(frame[frame.seed >= first], method, other, outcome)
            mean, half = interval(values)
            won = f"({(values > 0).sum()} of {len(values)})"
            cells.append(f"{mean:+.3f} ± {half:.3f} {won}" if len(values) > 1 else "")
        if any(cells):
            rows.append((name, *cells))
    return markdown(rows)


PLAIN_ENDING = ", plain wording"


def pairs_with(ending, *pairs):
    return [(f"{method}{ending}", f"{other}{ending}") for method, other in pairs]


# Each of its steps has twice as many puzzles: so a seed does not fix the puzzles of a step.
UNPAIRED = {"GRPO, twice the prompts"}
FAMILIES = {  # question → pairs of methods; Holm's correction within each
    "plain wording": [
        *pairs_with(PLAIN_ENDING, ("Lopti", TWO), ("Lopti", "GRPO"), (TWO, "GRPO")),
        *pairs_with(PLAIN_ENDING, (REVERSED, "Lopti"), (REVERSED, TWO), ("AR", "GRPO")),
    ],
    "second step": [
        (method, other) for method in experiments.SECOND_STEP for other in ("GRPO", "Lopti", TWO)
    ],
    "order or Adam": [
        *pairs_with(", β₁ = 0", ("Lopti", REVERSED), ("Lopti", "GRPO"), (REVERSED, "GRPO")),
        ("Lopti, two optimizers", "Lopti"),
    ],
    "ceiling": [(method, "GRPO") for method in experiments.CEILING],
}
SAME = 0.02  # "equal within .02": the whole interval lies within ± this


def family(frame, pairs):
    """pair → (differences, mean, half of its interval, p by Holm over the pairs)."""
    found = {pair: difference(frame, *pair, WHOLE) for pair in pairs}
    found = {pair: one for pair, one in found.items() if one}
    p_values = holm([one[-1] for one in found.values()])
    return {pair: (*one[:-1], p) for (pair, one), p in zip(found.items(), p_values)}


def family_table(frame, pairs):
    """Accuracy in training over steps 2 to 24, with Holm's correction over the pairs."""
    rows = [("difference", "runs", "accuracy in training", "p (Holm)", "", "evaluated at the end")]
    runs = Counter(frame.method)
    for pair, (values, mean, half, p) in family(frame, pairs).items():
        text = "open" if p >= 0.05 else "more" if mean > 0 else "less"
        text += ", equal within .02" if abs(mean) + half < SAME else ""
        end = difference(frame, *pair, "evaluated at the end")
        cells = [(mean, half), *([end[1:3]] if end else [])]
        cells = [f"{one:+.3f} ± {width:.3f}" for one, width in cells] + [""]
        name = " − ".join(pair).replace(PLAIN_ENDING, "")
        count = f"{runs[pair[0]]} and {runs[pair[1]]}" if pair[0] in UNPAIRED else f"{len(values)}"
        rows.append((name, count, cells[0], f"{p:.3f}", text, cells[1]))
    return markdown(rows)


BOTH_WORDINGS = [("Lopti", TWO), ("Lopti", "GRPO"), (TWO, "GRPO"), (REVERSED, "Lopti")]
BOTH_WORDINGS += [(REVERSED, TWO), (REVERSED, "GRPO")]


def both_wordings_table(frame, pairs):
    """Differences by seed with varied and with plain wording, and both in one linear model."""
    head = ("difference", "varied", "plain", "plain minus varied", "both")
    rows = [(*head, "both, evaluated at the end")]
    for pair in pairs:
        sides, ends = (
            [by_seed(frame, *pairs_with(ending, pair)[0], outcome) for ending in ("", PLAIN_ENDING)]
            for outcome in (WHOLE, "evaluated at the end")
        )
        mean, half, apart, width = over_both(sides)
        texts = [f"{one:+.3f} ± {h:.3f}" for one, h in (*map(interval, sides), (apart, width))]
        texts += [f"{mean:+.3f} ± {half:.3f}", "{:+.3f} ± {:.3f}".format(*over_both(ends)[:2])]
        rows.append((" − ".join(pair), *texts))
    return markdown(rows)


def second_pass_table(lines):
    """What Lopti's second pass does to the likely tokens: (change of log π, share) by group."""
    rows = [("tokens with π ≥ ½, after the first pass", "plain gradient descent", "AdamW")]
    for group in lines[0]["AdamW"] if lines else ():
        cells = []
        for way in ("SGD", "AdamW"):
            moves, shares = (interval([line[way][group][i] for line in lines]) for i in (0, 1))
            share = " ± ".join(f"{100 * x:.0f}" for x in shares)
            cells.append("{:+.4f} ± {:.4f}; ".format(*moves) + f"{share} %")
        rows.append((group, *cells))
    return markdown(rows)


KL_RANGE = (0.006, 0.05)  # where accuracy is compared at equal KL
WINDOW = 5  # steps that are averaged for it


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


def metrics_by_seed(lines, method):
    """seed → what was measured in each step."""
    return {line["seed"]: line["metrics"] for line in lines if shown(line["method"]) == method}


def two_views(lines, pairs, kl="kl"):
    """pair → view → the differences by seed: accuracy over steps 2 to 24, and at equal KL."""
    found = {}
    for method, other in pairs:
        runs, others = (metrics_by_seed(lines, name) for name in (method, other))
        seeds = sorted(runs.keys() & others.keys())
        if len(seeds) > 1:
            both = [(runs[seed], others[seed]) for seed in seeds]
            by_step = [np.mean(a["accuracy"][1:]) - np.mean(b["accuracy"][1:]) for a, b in both]
            equal_kl = [at_equal_kl(*pair, kl) for pair in both]
            found[method, other] = {"by step": by_step, "at equal KL": equal_kl}
    return found


def two_views_table(lines, pairs, kl="kl", only=None):
    """Each difference by step and at equal KL; Holm's correction over the pairs of each view.

    `pairs` is (method, compared with) → what was expected, or a list; `only` are those to show.
    """
    found = two_views(lines, pairs, kl)
    views = ("by step", "at equal KL")
    corrected = {
        view: dict(zip(found, holm([t_test(one[view]) for one in found.values()])))
        for view in views
    }
    expected = pairs if isinstance(pairs, dict) else {}
    head = ("by step", "p (Holm)", "at equal KL", "p (Holm)", "KL at the end")
    rows = [("difference", *(["expected"] if expected else []), "seeds", *head)]
    for pair in found if only is None else only:
        if pair not in found:
            continue
        row = [
            " − ".join(pair),
            *([expected[pair]] if expected else []),
            f"{len(found[pair]['by step'])}",
        ]
        for view in views:
            values = np.array(found[pair][view])
            won = f"({(values > 0).sum()} of {np.isfinite(values).sum()})"
            mean, half = interval(values)
            row += [f"{mean:+.3f} ± {half:.3f} {won}", f"{corrected[view][pair]:.3f}"]
        runs = [metrics_by_seed(lines, name) for name in pair]
        seeds = runs[0].keys() & runs[1].keys()
        ends = [np.mean([one[seed][kl][-1] for seed in seeds]) for one in runs]
        rows.append((*row, " and ".join(f"{end:.3f}" for end in ends)))
    return markdown(rows)


def t_test(values):
    """p of Student's t-test against 0, NaNs left out; 1 where it cannot be computed."""
    p = stats.ttest_1samp([value for value in values if np.isfinite(value)], 0).pvalue
    return p if np.isfinite(p) else 1.0


OWN_ADAMW = "Lopti, two optimizers"
WITHOUT = "{}, without bias".format
BIAS_PAIRS = {  # (method, compared with) → what DESIGN.md expected
    (WITHOUT("AR α = 1"), "AR α = 1"): "above +.10",
    (WITHOUT("AR α = 1"), "GRPO"): "0 to −.08",
    (WITHOUT("AR α = 0.6"), "AR α = 0.6"): "",
    (WITHOUT("AR α = 0.6"), "GRPO"): "within .02",
    (WITHOUT("AR"), "AR"): "within .02",
    (WITHOUT("AR"), "GRPO"): "",
    (WITHOUT("high only"), "high only"): "above +.15",
    (WITHOUT("high only"), "GRPO"): "",
    (WITHOUT(OWN_ADAMW), OWN_ADAMW): "not sure",
    (WITHOUT(OWN_ADAMW), "GRPO"): "",
    (WITHOUT(REVERSED), REVERSED): "not sure",
    (WITHOUT(REVERSED), "GRPO"): "",
    (WITHOUT("Lopti"), "Lopti"): "not sure",
    (WITHOUT("Lopti"), "GRPO"): "",
    (WITHOUT("low only"), "low only"): "not sure",
    (WITHOUT("low only"), "GRPO"): "",
    (WITHOUT(REVERSED), WITHOUT("Lopti")): "0, if the order is the bias",
}
BIAS_IN_SHORT = [*list(BIAS_PAIRS)[:4], (WITHOUT("high only"), "high only")]
NEW = "{}, new seeds".format
FASTER = NEW("GRPO, learning rate × √2")
NEW_PAIRS = {
    (NEW("Lopti"), NEW("GRPO")): "level; −.06 at equal KL",
    (NEW(TWO), NEW("GRPO")): "level; −.08 at equal KL",
    (FASTER, NEW("GRPO")): "as Lopti",
    (NEW("Lopti"), FASTER): "level in both",
    (NEW("Lopti"), NEW(TWO)): "level",
}
ON_RECORD = [
    (f"{name}{ending}", f"GRPO{ending}")
    for ending in ("", ", plain wording")
    for name in ("AR", "Lopti", TWO, REVERSED, *experiments.SECOND_STEP, "80/20")
]


def long_frame(lines):
    """A row for each step of the long runs: method, seed, step, reward in training, held out."""
    frames = [pd.DataFrame({"method": [], "step": []})]
    for line in lines:
        if line["method"] in experiments.LONG:
            steps = [row["step"] for row in line["evaluations"]]
            columns = {"held out": pd.Series(curve(line, "avg@2"), steps)}
            columns["reward"] = pd.Series([np.nan, *line["metrics"]["reward"]])  # by step
            frame = pd.DataFrame(columns).rename_axis("step").reset_index()
            method = line["method"].removesuffix(", long")
            frames.append(frame.assign(method=method, seed=line["seed"]))
    return pd.concat(frames)


def long_table(lines, steps=(0, 40, 80, 120, 160, 200)):
    """Sampled accuracy on held-out puzzles over 200 steps, means over seeds."""
    rows = [("method", "seeds", *map(str, steps), "reward in training, steps 181 to 200")]
    for method, runs in long_frame(lines).groupby("method", sort=False):
        means = runs.groupby("step")[["held out", "reward"]].mean()
        values = [*means["held out"].reindex(steps), means["reward"].loc[181:].mean()]
        rows.append((method, f"{runs.seed.nunique()}", *(f"{value:.3f}" for value in values)))
    return markdown(rows)


def real_model_table(lines):
    """SmolLM2: each method at three learning rates; at its best one against GRPO at its own."""
    frame = run_frame(lines, {})
    for name, measure in (("sampled", "avg@1"), ("greedy", "greedy")):
        levels = [line["held_out"].values() for line in lines]
        frame[name] = [np.mean([level[measure][0] for level in each]) for each in levels]
    cells = frame.groupby(["method", "learning rate"])
    best = cells[WHOLE].mean().groupby("method").idxmax()  # method → (method, learning rate)
    values = {method: cells.get_group(cell)[WHOLE] for method, cell in best.items()}
    found = against(values.pop("GRPO"), values)
    head = ("method", "learning rate", "runs", "in training", "minus GRPO, each at its best")
    rows = [(*head, "held out, sampled", "held out, greedy")]
    for method, rate in itertools.product(best.index, RATES):
        runs, cell = cells.get_group((method, rate)), ""
        if method in found and (method, rate) == best[method]:
            difference, half, p = found[method]
            cell = f"{difference:+.3f} ± {half:.3f} {verdict(difference, half, p, 1)}"
        held_out = (of_runs(runs[name]) for name in ("sampled", "greedy"))
        rows.append((method, rate, f"{len(runs)}", of_runs(runs[WHOLE]), cell, *held_out))
    return markdown(rows)


def tables(lines):
    """The tables of RESULTS.md by name."""
    frame, first = run_frame(lines), run_frame(experiments.read_lines(FIRST), {})
    real_lines = [line for line in experiments.read_lines(REAL_MODEL) if "metrics" in line]
    untrained = [  # GRPO's policies before training
        line | {"method": BEFORE, "metrics": {}, "evaluations": line["evaluations"][:1]}
        for line in lines
        if line["method"] == "GRPO"
    ]
    here = {f"here, {EARLY}": (frame, EARLY), f"here, {WHOLE}": (frame, WHOLE)}
    here |= {f"first laboratory, {EARLY}": (first, EARLY), f"first, {WHOLE}": (first, WHOLE)}
    real = run_frame(real_lines, {})
    rates = {f"at {rate}": (real[real["learning rate"] == rate], EARLY) for rate in RATES}
    return {
        **{question: family_table(frame, pairs) for question, pairs in FAMILIES.items()},
        "equal KL, on record": two_views_table(lines, ON_RECORD),
        "equal KL, new seeds": two_views_table(lines, NEW_PAIRS, "rollout/kl"),
        "without bias": two_views_table(lines, BIAS_PAIRS),
        "without bias, in short": two_views_table(lines, BIAS_PAIRS, only=BIAS_IN_SHORT),
        "both wordings": both_wordings_table(frame, BOTH_WORDINGS),
        "second pass": second_pass_table(experiments.read_lines(SECOND_PASS)),
        "long": long_table(lines),
        "early": training_table(here, DIFFERENCES),
        "against GRPO": claims_table(frame, CLAIMS),
        "other claims": claims_table(frame, OTHER_CLAIMS),
        "two by two": claims_table(frame, CELL_CLAIMS),
        "methods": methods_table(pd.concat([run_frame(untrained), frame])),
        "SmolLM2 by seed": training_table(rates, DIFFERENCES),
        "SmolLM2": real_model_table(real_lines),
    }


CAPTIONS = {  # what stands above a table in TABLES.md
    "plain wording": "The policy with one wording for each thing. By seed; p by Holm.",
    "second step": "A random split of Lopti's sizes, half-size mini-batches. By seed; p by Holm.",
    "order or Adam": "Without AdamW's momentum, and an AdamW for each pass. By seed; p by Holm.",
    "ceiling": "An oracle without wording, and twice the prompts (Welch, not by seed). p by Holm.",
    "equal KL, on record": "Looked at afterwards: accuracy by step and at equal KL. By seed.",
    "equal KL, new seeds": "Planned: the same on seeds 20 to 29, with the KL at sampling.",
    "without bias": "Planned: the bias of weights by π subtracted. By seed.",
    "both wordings": "Pooled afterwards over varied and plain wording, ten seeds each.",
    "second pass": "Likely tokens in the second pass: change of log π along Â, share that did so.",
    "long": "200 steps on 3 to 5 people, one seed each: sampled accuracy on held-out puzzles.",
    "early": "Accuracy in training by seed; in brackets, how many seeds are above 0.",
    "against GRPO": "Final evaluation. ± is Dunnett's for all rows of a column together.",
    "other claims": "One standard deviation pooled over the table; verdicts by Holm.",
    "two by two": "Wording varied or plain, 23 % of first responses truncated or none.",
    "methods": "Every method: mean ± standard deviation of its runs.",
    "SmolLM2 by seed": "One-step word problems, steps 2 to 12, by seed.",
    "SmolLM2": "Mean ± standard deviation; each at its best rate against GRPO at its own.",
}


def tables_page(made):
    """TABLES.md: every table under its name."""
    parts = [f"## {name}\n\n{CAPTIONS[name]}\n\n{made[name]}\n" for name in CAPTIONS]
    head = "`python data/lab/analysis.py --write` makes this page from the `*.jsonl` beside it. A "
    head += (
        "difference is *first minus second*; ± is half of a 95 % interval unless said otherwise."
    )
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
