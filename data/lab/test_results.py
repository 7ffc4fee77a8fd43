"""Checks the numbers of the pages: python -m pytest -q data/lab/test_results.py"""

import csv
import doctest
import json
import re
import statistics
import sys
from pathlib import Path

import pytest

pytest.importorskip("scipy", reason="pip install -r data/lab/requirements.txt")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

import matplotlib
import results

PAGE = (results.FOLDER / "RESULTS.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
NOTEBOOK = json.loads((ROOT / "notebook.ipynb").read_text(encoding="utf-8"))


def test_tables_and_pictures_are_what_the_program_prints():
    assert doctest.testmod(results).failed == 0
    for path, text in results.files().items():
        on_record = path.read_text(encoding="utf-8")
        if path.suffix == ".svg" and f"Matplotlib v{matplotlib.__version__}," not in on_record:
            continue  # another version draws a little differently
        assert text == on_record, f"{path.name} changes: run python data/lab/results.py"


def decimals(text):
    """The decimals of a text, each with its interval if it has one, but not settings and names.

    >>> sorted(decimals("+0.019 ± 0.006 and 0.68, with α = 0.3, Qwen2.5 and π < 0.25"))
    ['0.019 ± 0.006', '0.68']
    """
    text = re.sub(r"\(http\S+\)", "", " ".join(text.split()))
    text = re.sub(r"(?:[=<≥≤]|Prop\.|section) [0-9.]+", "", text)
    return set(re.findall(r"\b\d+\.\d+(?: ± \d+\.\d+)?", text))


def paragraphs():
    """Those with results: of RESULTS.md all, of README and lecture those with ± or with R1, R2…"""
    for paragraph in PAGE.split("\n\n"):
        if not paragraph.startswith("|"):
            yield paragraph
    cells = [
        "".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "markdown"
    ]
    for text in (README, *cells):
        for paragraph in text.split("\n\n"):
            if "±" in paragraph or re.search(r"\bR[1-9]", paragraph):
                yield paragraph


def test_every_decimal_of_a_result_is_printed():
    """It stands in a table of RESULTS.md or in the picture, with its interval if it has one."""
    assert doctest.testmod(sys.modules[__name__]).failed == 0
    printed = [line for line in PAGE.splitlines() if line.startswith("|")]
    picture = (results.FOLDER / "comparisons.svg").read_text(encoding="utf-8")
    printed += re.findall(r">([^<]+)</text>", picture)
    allowed = set()
    for text in printed:
        allowed |= decimals(text) | set(re.findall(r"\d+\.\d+", text))
    for paragraph in paragraphs():
        assert decimals(paragraph) <= allowed, paragraph


def test_the_measures_of_the_long_runs():
    """The last third are steps 49 to 72; fell back: .1 below the best of six means of twelve."""
    runs = results.of_long_runs()
    by_run = {}
    with open(results.FOLDER / "long_steps.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            key = (row["setting"], row["method"], int(row["seed"]))
            by_run.setdefault(key, []).append((float(row["accuracy"]), float(row["kl"])))
    assert sorted(runs.index) == sorted(by_run)
    for key, steps in by_run.items():
        assert len(steps) == 72
        accuracies, kls = zip(*steps)
        assert runs.loc[key, "accuracy"] == pytest.approx(statistics.mean(accuracies[48:]))
        assert runs.loc[key, "kl"] == pytest.approx(statistics.mean(kls[48:]))
        twelves = [statistics.mean(accuracies[start : start + 12]) for start in range(0, 72, 12)]
        assert runs.loc[key, "fell_back"] == (twelves[-1] < max(twelves) - 0.1)


def test_the_table_of_readme():
    """Its rows are those of the two runs' evaluations, as `lopti.report` writes them."""
    lines = (results.FOLDER / "readme_evaluations.jsonl").read_text().splitlines()
    before, after, of_grpo_before, of_grpo = [json.loads(line)["table"] for line in lines]
    assert before == of_grpo_before
    shown = [("greedy", "2"), ("greedy", "3"), ("greedy", "all"), ("avg@4", "all")]
    for rows in zip(before, after, of_grpo):
        measure = rows[0]["measure"]
        people = rows[0]["difficulty"]
        text = f"{measure:<8}{people:>8}"
        for row in rows:
            text += f"{'{mean:.2f} [{low:.2f}, {high:.2f}]'.format(**row):>21}"
        assert (f"\n{text}\n" in README) == ((measure, people) in shown)
