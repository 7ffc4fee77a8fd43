"""Tests of diagnose.py, compare.py and check_model.py: python -m pytest -q data/lab/test_lab.py"""

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

SMALL = ["--prompts-per-step", "2", "--group-size", "4", "--mini-batch-size", "4"]
SMALL += ["--max-new-tokens", "12", "--task", "math"]  # which has short prompts
SMALL += ["--temperature", "2"]  # for tokens in each bin


@pytest.fixture
def unequal_rewards(monkeypatch):
    monkeypatch.setattr(lopti, "compute_rewards", lambda texts, *_: [0.0, 3.0] * (len(texts) // 2))


def test_gradient_norms_and_tokens_of_the_bins(monkeypatch, unequal_rewards):
    """`measure` returns norms of ∇ Σ Â·log π / N, the gradient of Eq. 1 at π_old, over all weights.

    No weight moves. Flags of a method that makes several passes do not change what is measured.
    """
    update = mock.Mock(wraps=lopti.update)
    monkeypatch.setattr(lopti, "update", update)
    passes = ["--eta", "0.5", "--order", "high-low", "--passes", "2", "--max-grad-norm", "0.1"]
    settings = lopti.parse_arguments([*SMALL, *passes])
    policy, tokenizer = lopti.load_model(settings.model, "cpu")
    untouched = copy.deepcopy(policy)
    examples, _ = lopti.load_data(settings, tokenizer)
    tokens, norms = diagnose.measure(policy, tokenizer, examples, 1, settings)
    weights = list(untouched.parameters())
    assert all(map(torch.equal, weights, policy.parameters()))
    rollout = update.call_args.args[2]
    mask = rollout.response_mask
    pi = rollout.old_logprobs.exp()
    masks = [mask & (pi < 0.25), mask & (pi >= 0.25) & (pi < 0.5), mask & (pi >= 0.5) & (pi < 0.75)]
    masks += [mask & (pi >= 0.75), mask]
    assert tokens[0].tolist() == [part.sum() for part in masks[:4]]
    by_hand = []  # of two mini-batches
    for rows in (slice(0, 4), slice(4, 8)):
        ids = rollout.ids[rows]
        logits = untouched(ids).logits[:, :-1] / 2  # the temperature
        logprobs = logits.log_softmax(2).gather(2, ids[:, 1:, None])[..., 0]
        terms = rollout.advantages[rows, 1:] * logprobs / mask[rows].sum()
        by_hand.append([])
        for part in masks:
            gradient = torch.autograd.grad(terms[part[rows, 1:]].sum(), weights, retain_graph=True)
            by_hand[-1].append(torch.nn.utils.get_total_norm(gradient).item())
    assert norms[0] == pytest.approx(np.mean(by_hand, 0), rel=1e-3)


def test_table_of_diagnose_by_hand():
    """The table and the sentences have the ratios and 95 % intervals that a hand computes.

    There are two batches, and t of one degree of freedom is 12.706. The norm of π < 0.25 is 8/4 = 2
    of that of all tokens, with 5 - 2·2.5 = 0 and 3 - 2·1.5 = 0. It is 8/2 = 4 times that of
    π ≥ 0.75, with 5 - 4·1 = 1 and 3 - 4·1 = -1: s/√2 is 1, and half of the interval is 12.706.
    """
    tokens = np.array([[20, 10, 10, 60], [20, 10, 10, 60]])
    norms = np.array([[5.0, 1.0, 1.0, 1.0, 2.5], [3.0, 1.0, 1.0, 1.0, 1.5]])
    table = diagnose.summarize(tokens, norms)
    shares, relative = (table[name] for name in diagnose.PAPER)
    assert shares["measured"].tolist() == [0.2, 0.1, 0.1, 0.6]
    assert list(relative.loc["π < 0.25"]) == pytest.approx([2.0, 0.0, 0.88])
    assert list(relative.loc["π ≥ 0.75"]) == pytest.approx([0.5, 12.706 / 8, 0.18], abs=1e-4)
    assert not doctest.testmod(diagnose).failed
    text = diagnose.message(tokens, norms)
    assert text.startswith("20 % of the tokens have π < 0.25.\n")
    assert text.endswith("4.0 ± 12.7 times as large as that of π ≥ 0.75 (not significant).")
    for times in (4.0, 0.5):  # both differ from 1 by more than ± 0
        norms[:, 0] = times
        text = diagnose.message(tokens, norms)
        assert text.endswith(f"{times} ± 0.0 times as large as that of π ≥ 0.75.")


def test_diagnose_from_flags_to_plot(monkeypatch, tmp_path, unequal_rewards, capsys):
    """The program prints the table and what it does not show, and saves the plot in a new folder.

    It ends in one sentence where a norm is 0, which has no ratio.
    """
    words = [*SMALL, "--batches", "2", "--plot", str(tmp_path / "new" / "plot.png")]
    diagnose.main([*words, "--alpha", "0.3"])
    printed = capsys.readouterr().out
    assert "nan" not in printed
    assert "In the paper it is 4.9 times." in printed
    assert "This does not say whether a method helps" in printed
    assert (tmp_path / "new" / "plot.png").stat().st_size > 10_000
    monkeypatch.setattr(diagnose, "measure", lambda *_: (np.ones((2, 4)), np.zeros((2, 5))))
    with pytest.raises(SystemExit, match="2"):
        diagnose.main(words)
    assert "no group has unequal rewards" in capsys.readouterr().err


# compare.py ---------------------------------------------------------------------------------------


def test_differences_by_hand():
    """Each pair of lists gets the mean of the differences by seed, and its 95 % interval.

    B minus A is 0.01, 0.02, 0.03 in training, hence 0.02 ± 4.303·0.01/√3, and 0.1, 0.1, 0.4 held
    out, hence 0.2 ± 4.303·0.1.
    """
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
    """In place of lopti.train: it writes a run's files, and what no one should read is above 1.

    Accuracies of the run are 0.2 and 0.4 + η in training, and 0.5 + α held out.
    """
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
            table = {"greedy": {"2": [7.0, 0, 1], "all": [value, 0, 1]}}
            if settings.eval_samples:
                table[f"avg@{settings.eval_samples}"] = table["greedy"]
                table["greedy"] = {"all": [9.0, 0, 1]}
            lopti.add_line(folder / "evaluations.jsonl", {"step": step, "table": table})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lopti, "train", train)
    return asked


def test_compare_trains_and_continues(trained, tmp_path, capsys):
    """Every list is trained with every seed, and a list's own flags win over those of all lists.

    The same command prints the same again; it continues a run that was stopped, and trains only a
    run that has no checkpoint from its beginning. No weights are left.
    """
    lists = ["", "--eta 0.5 --eval-samples 0", "--alpha 0.3"]
    words = ["--seeds", "2", *lists, "--", "--steps", "3", "--eval-samples", "2"]
    compare.main(words)
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert ["GRPO", "0.30", "0.5"] in lines
    assert [*lists[1].split(), "0.55", "0.5"] in lines
    difference = f"{lists[2]} minus {lists[1]} 2 -0.25 0.0 0.3 0.0"
    assert difference.split() in lines
    expected = []
    for seed in (0, 1):
        expected += [(seed, 0, 0, 2), (seed, 0.5, 0, 0), (seed, 0, 0.3, 2)]
    assert [(one.seed, one.eta, one.alpha, one.eval_samples) for one in trained] == expected
    assert {one.steps for one in trained} == {3}
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
    """What a user gets wrong ends in one sentence and exit code 2, and nothing is trained."""
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


@pytest.fixture
def model(monkeypatch):
    """The bundled model, as check_model.py loads it: a test may spoil it."""
    model, tokenizer = lopti.load_model(TINY, "cpu")
    monkeypatch.setattr(lopti, "load_model", lambda *_: (model, tokenizer))
    return model


def test_check_model_reads_rows_of_the_length_that_is_asked_for(model, capsys):
    """A right model is found right; rows are as long as --length and the model's positions allow.

    Where a model has -1 positions, as XLNet, there is no limit.
    """
    for positions, length, longest, limit in (
        (2048, 656, 656, "2048"),
        (100, 656, 100, "100"),
        (-1, 130, 130, "no limit is stated"),
    ):
        model.config.max_position_embeddings = positions
        assert check_model.main([TINY, "--length", str(length)]) == 0
        lines = capsys.readouterr().out.splitlines()
        tokens = int(lines[3].removeprefix("longest row: ").removesuffix(" tokens"))
        assert longest - 14 < tokens <= longest  # a prompt grows by 14 tokens at a time
        assert lines[:3] == [
            "model type: llama",
            f"positions: {limit}",
            "tokens that end a response: <|end|>",
        ]
        assert lines[-1] == "π is right."


def test_check_model_finds_padding_that_the_model_sees(model, capsys):
    """A model that reads the padding in front of a short prompt is found wrong."""
    forward = model.forward
    model.forward = lambda *ids, **options: forward(*ids, **options | {"attention_mask": None})
    assert check_model.main([TINY, "--length", "100"]) == 1
    assert "π is wrong" in capsys.readouterr().out


def test_check_model_finds_one_wrong_number(model):
    """One logit of M·V that differs, by 2e-2, is enough for a wrong model; 5e-3 is rounding."""

    def spoil(model, inputs, output):
        if output.logits.dim() == 2:  # (M, V): this is not sampling
            output.logits[-1, 7] += error

    model.register_forward_hook(spoil)
    for error, code in ((0.02, 1), (0.005, 0)):
        assert check_model.main([TINY, "--length", "100"]) == code
