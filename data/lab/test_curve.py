"""README's curve and the leads of R3 are those of the runs in curve.csv."""

import re
import sys
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
pandas = pytest.importorskip("pandas")
stats = pytest.importorskip("scipy.stats")

LAB = Path(__file__).parent
sys.path.insert(0, str(LAB))
import curve  # isort: skip

RUNS = pandas.read_csv(LAB / "results" / "curve.csv", index_col=["method", "seed"])


def test_the_curve_on_record_is_that_of_the_runs():
    on_record = (LAB / "results" / "curve.svg").read_text(encoding="utf-8")
    assert on_record == curve.draw(RUNS)


def test_the_leads_of_r3_are_those_of_the_runs():
    names = {"AR + Lopti": "both"}  # a row of the table → its runs
    by_step = RUNS.iloc[:, 1:].mean(axis=1)
    page = (LAB / "results" / "RESULTS.md").read_text(encoding="utf-8")
    part = page.split("## R3.")[1].split("## R4.")[0]
    rows = re.findall(r"^\| (.+?) − (.+?) \| (\S+) ± (\S+) \|", part, re.MULTILINE)
    assert len(rows) == 5
    for first, second, lead, half in rows:
        leads = (by_step[names.get(first, first)] - by_step[second]).dropna()
        error = leads.std() / np.sqrt(len(leads))
        wanted = stats.t.ppf(0.975, len(leads) - 1) * error
        assert abs(float(lead.replace("−", "-")) - leads.mean()) < 0.0006, first
        assert abs(float(half) - wanted) < 0.0006, first
