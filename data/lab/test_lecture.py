"""Checks the lecture: notebook.ipynb, which LOPTI_ALL=1 runs, and lecture.py."""

import doctest
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

LAB = Path(__file__).resolve().parent
ROOT = LAB.parents[1]
sys.path[:0] = [str(ROOT), str(LAB), str(ROOT / "data" / "ports")]
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the hub

import pytest
import torch

pytest.importorskip("IPython", reason="pip install -r data/lab/requirements.txt")

import check_port
import lecture

import lopti

NOTEBOOK = json.loads((ROOT / "notebook.ipynb").read_text(encoding="utf-8"))
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"]]


def cell_that_begins(start):
    [cell] = [cell for cell in CELLS if cell.startswith(start)]
    return cell


def run(text, **names):
    exec(text, names)  # noqa: S102
    return names


@pytest.mark.skipif(not os.environ.get("LOPTI_ALL"), reason="LOPTI_ALL=1 runs it")
def test_the_notebook_runs():
    """Without an error or a warning, and with as many pictures as are committed."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    book = nbformat.read(ROOT / "notebook.ipynb", as_version=4)
    place = {"metadata": {"path": str(ROOT)}}
    nbclient.NotebookClient(book, timeout=3000, kernel_name="python3", resources=place).execute()
    for text in map(json.dumps, (book, NOTEBOOK)):
        assert text.count('"image/png"') == 8
        assert '"stderr"' not in text


def test_the_functions_that_the_student_writes(capsys):
    """The empty ones are wrong, the solution is right, and slips are named."""
    cell = cell_that_begins("def reweight_advantages(")
    solution = cell_that_begins("<details><summary>Solution<").split("```")[1]
    solution = solution.removeprefix("python") + cell[cell.index("yours = ") :]

    def said(*change):
        run(solution.replace(*change), **names)
        return capsys.readouterr().out

    names = {"SimpleNamespace": SimpleNamespace, "check_port": check_port}
    run(cell, **names)
    weights, split = capsys.readouterr().out.splitlines()
    assert weights == "reweight_advantages: the advantages are not weighted by Eq. 4"
    assert split.startswith("split_tokens: Wrong")
    assert said("", "") == "reweight_advantages: Right.\nsplit_tokens: Right.\n"
    for change in (("< eta", "<= eta"), ("mask & ~low", "~low"), ("mask & (", "(")):
        assert "split_tokens: Wrong" in said(*change)
    assert "compared with log π" in said("old_logprobs.exp() <", "old_logprobs <")
    assert "reweight_advantages: Wrong" in said("+ (1 - alpha)", "")


def test_the_exercises_with_numbers():
    """The solutions are right, the numbers that stand in the cell are not."""
    text = cell_that_begins("a_fifth = ")
    solved = text.replace("0.50", "1 / 3", 1).replace("0.10", "0.5", 1).replace("0.70", "0.64", 1)
    start = torch.tensor([0.80, 0.15, 0.05]).log()
    names = {"lopti": lopti, "torch": torch, "start": start}
    names["grid"] = torch.linspace(0.001, 1, 400)
    for cell, right in ((text, False), (solved, True)):
        done = run(cell, **names)["done"]
        assert list(done.values()) == [right] * 3


def test_the_port_of_the_exercise_has_one_silent_bug(capsys):
    text = cell_that_begins("def port(").partition("\n\n\n")[0]
    for port in (text, text.replace("logprobs.detach()", "old")):
        check_port.compare_tables(run(port, torch=torch)["port"])
    lines = capsys.readouterr().out.splitlines()
    wrong = lines[: len(lines) // 2]
    assert {"GRPO: right", "AR: right", "Lopti: wrong from optimizer step 2 on"} <= set(wrong)
    assert all(line.endswith(": right") for line in lines[len(wrong) :])


def test_the_gradient_norm_is_that_of_autograd():
    logits = (3 * torch.randn(50, 7, generator=torch.Generator().manual_seed(0))).requires_grad_()
    ids = torch.arange(50) % 7
    logprobs = logits.log_softmax(1).gather(1, ids[:, None])[:, 0]
    (gradient,) = torch.autograd.grad(logprobs.sum(), logits)
    norms = lecture.gradient_norm(logits.detach(), ids)
    torch.testing.assert_close(norms, gradient.norm(dim=1))
    assert doctest.testmod(lecture).failed == 0


def test_the_picture_of_the_clip():
    lecture.clip_cases({"B": (2.22, 1)})
    _, falls, _, rises = lecture.plt.gca().collections
    assert falls.get_paths()[0].vertices[:, 0].min() == pytest.approx(0.8, abs=0.01)
    assert rises.get_paths()[0].vertices[:, 0].max() == pytest.approx(1.24, abs=0.01)
    lecture.plt.close("all")
