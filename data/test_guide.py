"""GUIDE's own loop runs as it stands there, and its table names every metric."""

import re
import sys
from pathlib import Path

DATA = Path(__file__).parent
sys.path.insert(0, str(DATA.parent))  # where the loop finds lopti

GUIDE = (DATA / "GUIDE.md").read_text(encoding="utf-8")


def test_the_loop_runs_and_the_table_has_every_metric(tmp_path, monkeypatch):
    (loop,) = [
        x for x in re.findall("```python\n(.*?)```", GUIDE, re.DOTALL) if "step_metrics" in x
    ]
    for long, short in (("steps=3", "steps=1"), ("step=8", "step=2"), ("rows[:20]", "rows[:1]")):
        assert long in loop
        loop = loop.replace(long, short)
    (tmp_path / "data").symlink_to(DATA)
    monkeypatch.chdir(tmp_path)
    made = {}
    exec(loop, made)  # noqa: S102, it is our own page
    assert (tmp_path / "trained" / "model.safetensors").exists()

    part = GUIDE.split("### What the metrics mean")[1].split("**Why")[0]
    first_column = "\n".join(row.split("|")[1] for row in part.splitlines() if row.startswith("|"))
    in_the_table = set(re.findall("`([a-z_/]+)`", first_column))
    made_by_a_run = {"seconds", "grad_norm/all", *made["metrics"]}
    assert in_the_table == made_by_a_run
