"""Checks diagnose.py, compare.py, check_model.py: python -m pytest -q data/lab/test_lab.py"""

import copy
import doctest
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("scipy", reason="pip install -r data/lab/requirements.txt")

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import check_model
import compare
import diagnose
import numpy as np
import pandas
import torch

import lopti

TINY = str(HERE.parent / "tiny")
torch.set_num_threads(1)  # more gain little

# diagnose.py --------------------------------------------------------------------------------------

SMALL = [
    "--prompts-per-step",
    "2",
    "--group-size",
    "4",
    "--mini-batch-size",
    "4",
    "--max-new-tokens",
    "12",
]


@pytest.fixture
def unequal_rewards(monkeypatch):
    monkeypatch.setattr(lopti, "compute_rewards", lambda texts, *_: [0.0, 3.0] * (len(texts) // 2))


def test_gradient_norms_and_tokens_of_the_bins(monkeypatch, unequal_rewards):
    """A norm by hand is that of ∇ Σ Â·log π / N over all weights: Eq. 1 at π_old."""
    update = mock.Mock(wraps=lopti.update)
    monkeypatch.setattr(lopti, "update", update)
    settings = lopti.parse_arguments([*SMALL, "--eta", "0.5", "--max-grad-norm", "0.1"])
    policy, tokenizer = lopti.load_model(settings.model, "cpu")
    untouched = copy.deepcopy(policy)
    examples, _ = lopti.load_data(settings, tokenizer)
    tokens, norms = diagnose.measure(policy, tokenizer, examples, 1, settings)
    weights = list(untouched.parameters())
    assert all(map(torch.equal, weights, policy.parameters()))  # no weight moves
    rollout = update.call_args.args[2]
    mask = rollout.response_mask
    pi = rollout.old_logprobs.exp()
    masks = [mask & (pi < 0.25), mask & (pi >= 0.25) & (pi < 0.5), mask & (pi >= 0.5) & (pi < 0.75)]
    masks += [mask & (pi >= 0.75), mask]
    assert tokens[0].tolist() == [part.sum() for part in masks[:4]]
    by_hand = []  # of two mini-batches
    for rows in (slice(0, 4), slice(4, 8)):
        ids = rollout.ids[rows]
        logprobs = untouched(ids).logits[:, :-1].log_softmax(2).gather(2, ids[:, 1:, None])[..., 0]
        terms = rollout.advantages[rows, 1:] * logprobs / mask[rows].sum()
        by_hand.append([])
        for part in masks:
            gradient = torch.autograd.grad(terms[part[rows, 1:]].sum(), weights, retain_graph=True)
            by_hand[-1].append(torch.nn.utils.get_total_norm(gradient).item())
    assert norms[0] == pytest.approx(np.mean(by_hand, 0), rel=1e-3)


def test_table_of_diagnose_by_hand():
    """Two batches; t of one degree of freedom is 12.706.

    Norm of π < .25: 8/4 = 2, with 4 - 2·2 = 0 in both batches. Times: 8/2 = 4, with 5 - 4·1 = 1 and
    3 - 4·1 = -1: s/√2 is 1, and half of the interval 12.706.
    """
    tokens = np.array([[20, 10, 10, 60], [20, 10, 10, 60]])
    norms = np.array([[5.0, 1.0, 1.0, 1.0, 2.5], [3.0, 1.0, 1.0, 1.0, 1.5]])
    table = diagnose.summarize(tokens, norms)
    shares, relative = (table[name] for name in diagnose.PAPER)
    assert shares["measured"].tolist() == [0.2, 0.1, 0.1, 0.6]
    assert list(relative.loc["π < .25"]) == pytest.approx([2.0, 0.0, 0.88])
    assert list(relative.loc["π ≥ .75"]) == pytest.approx([0.5, 12.706 / 8, 0.18], abs=1e-4)
    assert not doctest.testmod(diagnose).failed
    text = diagnose.message(tokens, norms)
    assert text.startswith("20 % of the tokens have π < .25.\n")
    assert text.endswith("4.0 ± 12.7 times as large as that of π ≥ .75 (not significant).")
    norms[:, 0] = 4, 4
    assert diagnose.message(tokens, norms).endswith("4.0 ± 0.0 times as large as that of π ≥ .75.")


def test_diagnose_from_flags_to_plot(monkeypatch, tmp_path, unequal_rewards, capsys):
    words = [*SMALL, "--batches", "2", "--plot", str(tmp_path / "new" / "plot.png")]
    diagnose.main([*words, "--alpha", "0.3"])
    printed = capsys.readouterr().out
    assert "nan" not in printed
    assert "In the paper it is 4.8 times." in printed
    assert (tmp_path / "new" / "plot.png").stat().st_size > 10_000
    monkeypatch.setattr(diagnose, "measure", lambda *_: (np.ones((2, 4)), np.zeros((2, 5))))
    with pytest.raises(SystemExit, match="2"):
        diagnose.main(words)
    assert "no group has unequal rewards" in capsys.readouterr().err


# compare.py ---------------------------------------------------------------------------------------


def test_differences_by_hand():
    """B minus A in training: .01, .02, .03, hence .02 ± 4.303·.01/√3. Held out: .1, .1, .4."""
    runs = []
    for seed, training, held_out in ((0, 0.01, 0.1), (1, 0.02, 0.1), (2, 0.03, 0.4)):
        runs.append(["A", seed, seed, 0.5])
        runs.append(["B", seed, seed + training, 0.5 + held_out])
        runs.append(["C", seed, 0.0, 0.0])
    runs = pandas.DataFrame(runs, columns=["flags", "seed", "training", "held out"])
    table = compare.paired_differences(runs)
    assert list(table.index) == ["B minus A", "C minus A", "C minus B"]
    by_hand = [3, 0.02, 4.3027 * 0.01 / 3**0.5, 0.2, 4.3027 * 0.1]
    assert list(table.loc["B minus A"]) == pytest.approx(by_hand, rel=1e-4)
    assert table.loc["C minus B", "training"] == pytest.approx(-1.02)


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """lopti.train without training: it writes a run. What is not to be read there is above 1."""
    asked = []

    def train(settings):
        asked.append(settings)
        folder = Path(settings.output)
        assert folder.exists() == bool(settings.resume)
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "final").mkdir(parents=True)
        (folder / "checkpoint.pt").write_text("weights")
        for accuracy in (9.0, 0.2, 0.4 + settings.eta):
            lopti.add_line(folder / "metrics.jsonl", {"accuracy": accuracy})
        for step, value in ((0, 9.0), (3, 0.5 + settings.alpha)):
            intervals = {"2": [7.0, 0, 1], "all": [value, 0, 1]}
            table = {"greedy": {"all": [9.0, 0, 1]}, "avg@4": intervals}
            lopti.add_line(folder / "evaluations.jsonl", {"step": step, "table": table})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lopti, "train", train)
    return asked


def test_compare_trains_and_goes_on(trained, tmp_path, capsys):
    """The fake runs have accuracies .2 and .4 + η in training, .5 + α held out."""
    words = ["--seeds", "2", "", "--eta 0.5", "--alpha 0.3", "--", "--steps", "3"]
    compare.main(words)
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert ["--eta", "0.5", "0.55", "0.5"] in lines
    assert ["--alpha", "0.3", "minus", "--eta", "0.5", "2", "-0.25", "0.0", "0.3", "0.0"] in lines
    assert [(one.seed, one.eta, one.alpha, one.steps) for one in trained] == [
        (seed, eta, alpha, 3) for seed in (0, 1) for eta, alpha in ((0, 0), (0.5, 0), (0, 0.3))
    ]
    assert not [path for path in tmp_path.rglob("*") if path.name in ("final", "checkpoint.pt")]
    stopped = Path(trained[1].output)
    (stopped / "evaluations.jsonl").write_text('{"step": 0}\n{"step": 3, "tab')  # cut by a kill
    (stopped / "checkpoint.pt").write_text("weights")
    without_checkpoint = Path(trained[2].output)
    (without_checkpoint / "evaluations.jsonl").unlink()
    compare.main(words)
    assert capsys.readouterr().out == printed
    assert [Path(one.output) for one in trained[6:]] == [stopped, without_checkpoint]
    assert [one.resume for one in trained[6:]] == [str(stopped), ""]


def test_each_program_refuses_in_one_sentence(trained, tmp_path, capsys):
    for program, words, sentence in (
        (compare, ["--seeds", "1", "", ""], "all different"),
        (compare, ["--seeds", "0", "", "--stapo"], "--seeds 1 or more"),
        (compare, ["--seeds", "1", "", "--eta 7"], "must lie between"),
        (compare, ["--seeds", "1", "", "--tabel"], "unrecognized arguments: --tabel"),
        (diagnose, ["--batches", "1"], "--batches must be 2 or more"),
        (diagnose, ["--group-size", "1"], "--group-size must be at least 2"),
        (check_model, [str(tmp_path)], "cannot load --model"),
    ):
        with pytest.raises(SystemExit, match="2"):
            program.main(words)
        assert sentence in capsys.readouterr().err
    assert not trained and not any(tmp_path.iterdir())


# check_model.py -----------------------------------------------------------------------------------


def test_check_model_finds_padding_that_the_model_sees(monkeypatch, capsys):
    assert check_model.main([TINY]) == 0
    printed = capsys.readouterr().out
    assert "model type: llama; longest position: 2048\n" in printed
    assert "tokens that end a response: <|end|>\n" in printed
    assert "π is right" in printed
    model, tokenizer = lopti.load_model(TINY, "cpu")
    forward = model.forward
    monkeypatch.setattr(
        model,
        "forward",
        lambda *ids, **options: forward(*ids, **options | {"attention_mask": None}),
    )
    monkeypatch.setattr(lopti, "load_model", lambda *_: (model, tokenizer))
    assert check_model.main([TINY, "--length", "100"]) == 1
    assert "π is wrong" in capsys.readouterr().out
