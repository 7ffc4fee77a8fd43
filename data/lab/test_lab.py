"""Checks diagnose.py, compare.py, check_model.py: python -m pytest -q data/lab/test_lab.py"""

import doctest
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("scipy", reason="pip install -r data/lab/requirements.txt")

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import check_model
import compare
import diagnose
import numpy as np
import pandas
import torch

import lopti

SMALL = ["--prompts-per-step", "2", "--group-size", "4", "--mini-batch-size", "4"]
SMALL += ["--max-new-tokens", "12"]
torch.set_num_threads(1)  # for many small operations the fastest
TINY = str(HERE.parent / "tiny")


@pytest.mark.parametrize("program", [compare, diagnose])
def test_examples_and_help(program, capsys):
    result = doctest.testmod(program)
    assert result.attempted and not result.failed
    with pytest.raises(SystemExit, match="0"):
        program.main(["--help"])
    assert program.__doc__.split("\n")[0] in capsys.readouterr().out


# ---- diagnose.py


def norm_by_hand(policy, rollout, rows, mask):
    """The norm of ∇ Σ Â·log π / N over all weights: what Eq. 1's gradient is at π_old."""
    objective = torch.zeros(())
    for row in rows:
        ids = rollout.ids[row, : rollout.lengths[row]]
        logprobs = policy(ids[None]).logits[0].log_softmax(1)
        for place in mask[row].nonzero()[:, 0].tolist():
            advantage = rollout.advantages[row, place]
            objective = objective + advantage * logprobs[place - 1, ids[place]]
    if not mask[rows].any():
        return 0.0
    count = rollout.response_mask[rows].sum()
    gradient = torch.autograd.grad(objective / count, list(policy.parameters()))
    return float(torch.cat([part.flatten() for part in gradient]).norm())


def test_gradient_norms_and_tokens_of_the_bins(monkeypatch):
    """A rollout batch of two mini-batches: norms over all weights by hand. No weight moves."""
    rollouts = []
    training_step = lopti.training_step

    def recorded(*inputs):
        rollout, updates = training_step(*inputs)
        rollouts.append(rollout)
        return rollout, updates

    monkeypatch.setattr(lopti, "training_step", recorded)
    monkeypatch.setattr(lopti, "compute_rewards", lambda texts, *_: [0.0, 3.0] * (len(texts) // 2))
    settings = lopti.parse_arguments([*SMALL, "--eta", "0.5"])
    policy, tokenizer = lopti.load_model(settings.model, "cpu")
    before = [weights.clone() for weights in policy.parameters()]
    examples, _ = lopti.load_data(settings, tokenizer)
    tokens, norms = diagnose.measure(policy, tokenizer, examples, 1, settings)
    assert all(torch.equal(old, new) for old, new in zip(before, policy.parameters()))
    pi = rollouts[0].old_logprobs.exp()
    mask = rollouts[0].response_mask
    masks = [mask & (pi < 0.25), mask & (pi >= 0.25) & (pi < 0.5), mask & (pi >= 0.5) & (pi < 0.75)]
    masks += [mask & (pi >= 0.75), mask]
    for place, part in enumerate(masks):
        first = norm_by_hand(policy, rollouts[0], range(4), part)
        second = norm_by_hand(policy, rollouts[0], range(4, 8), part)
        assert norms[0, place] == pytest.approx((first + second) / 2, rel=1e-3)
    assert tokens[0].tolist() == [part.sum() for part in masks[:4]]
    assert tokens.all() and norms.all()


def test_table_of_diagnose_by_hand():
    """Two batches. t of one degree of freedom is 12.706.

    norms: 8/4 with 4 - 2·2 = 0 in both batches; times: 8/2, with 5 - 4·1 = 1 and 3 - 4·1 = -1, so
    that s/√2 = 1 and half is 12.706.
    """
    tokens = np.array([[20, 10, 10, 60], [20, 10, 10, 60]])
    norms = np.array([[5.0, 1.0, 1.0, 1.0, 2.5], [3.0, 1.0, 1.0, 1.0, 1.5]])
    shares, relative, times = diagnose.summarize(tokens, norms)
    assert shares[:, 0] == pytest.approx([0.2, 0.1, 0.1, 0.6])
    assert relative[0] == pytest.approx([2.0, 0.0]) and relative[3, 0] == pytest.approx(0.5)
    assert times == pytest.approx((4.0, 12.706), abs=1e-3)
    printed = diagnose.table(shares, relative, times)
    assert "0.20 ± 0.00" in printed and "2.00 ± 0.00" in printed
    assert "4.0 ± 12.7 times as large as that of π ≥ .75 (not significant)." in printed
    assert "not significant" not in diagnose.message(shares, (4.0, 2.9))
    assert "not significant" in diagnose.message(shares, (0.9, 0.2))


def test_diagnose_from_flags_to_plot(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(lopti, "compute_rewards", lambda texts, *_: [0.0, 3.0] * (len(texts) // 2))
    words = [*SMALL, "--batches", "2", "--plot", str(tmp_path / "new" / "plot.png")]
    diagnose.main([*words, "--alpha", "0.3"])
    printed = capsys.readouterr().out
    assert "nan" not in printed and printed.count("the paper, 7B model") == 2
    assert (tmp_path / "new" / "plot.png").stat().st_size > 10_000
    monkeypatch.setattr(diagnose, "measure", lambda *_: (np.ones((2, 4)), np.zeros((2, 5))))
    with pytest.raises(SystemExit, match="2"):
        diagnose.main(words)
    assert "no group has unequal rewards" in capsys.readouterr().err


# ---- compare.py


def write_run(folder, accuracies, held_out):
    """A finished run of three steps. Its first step and its first evaluation are far above."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for accuracy in (9.0, *accuracies):
        lopti.add_line(folder / "metrics.jsonl", {"accuracy": accuracy})
    for step, value in ((0, 9.0), (3, held_out)):
        intervals = {"2": [0.0, 0, 1], "3": [7.0, 0, 1], "all": [value, 0, 1]}
        table = {"greedy": {"all": [0.9, 0, 1]}, "avg@4": intervals}
        lopti.add_line(folder / "evaluations.jsonl", {"step": step, "table": table, "greedy": []})


def test_differences_by_hand():
    """near - GRPO: .01, .02, .03, hence .020 ± 4.303·.01/√3 = .025. Seed 3 has no partner."""
    rows = []
    for seed in range(4):
        rows.append({"flags": "GRPO", "seed": seed, "training": 0.2 + seed, "held out": 0.5})
    for seed, lead in enumerate((0.01, 0.02, 0.03)):
        near = {"flags": "near", "seed": seed, "training": 0.2 + seed + lead, "held out": 0.6}
        rows += [near, near | {"flags": "far", "training": seed}]
    runs = pandas.DataFrame(rows)
    names = ["GRPO", "near", "far", "not run"]
    table = compare.paired_differences(runs, names, [1, 2])
    near = table.loc["near minus GRPO"]
    assert list(near[["seeds", "training", "held out"]]) == pytest.approx([3, 0.02, 0.1])
    assert near["training ±"] == pytest.approx(4.3027 * 0.01 / 3**0.5, rel=1e-4)
    assert np.isnan(near["held out ±"])  # all seeds are alike: no interval
    assert list(table.index[:3]) == ["near minus GRPO", "far minus GRPO", "not run minus GRPO"]
    assert list(table.index[3:]) == ["far minus near", "not run minus near"]
    printed = compare.text_of(runs, table, names, "avg@4").splitlines()
    assert printed[2].split() == ["GRPO", "4", "1.700", "0.500"]
    assert printed[8].split() == ["near", "minus", "GRPO", "3", "0.020", "0.025", "0.100", "–"]
    assert printed[10].split() == ["not", "run", "minus", "GRPO", "0", "–", "–", "–", "–"]


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """lopti.train without training: writes a finished run, and keeps what it was asked for."""
    asked = []

    def train(settings):
        asked.append(settings)
        folder = Path(settings.output)
        assert folder.exists() == bool(settings.resume)
        write_run(folder, [0.2, 0.4 + settings.eta], 0.5 + settings.alpha)
        (folder / "final").mkdir()
        (folder / "checkpoint.pt").write_text("weights")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lopti, "train", train)
    return asked


WORDS = ["--seeds", "0-1", "", "--eta 0.5", "--alpha 0.3", "--against", "1", "2"]


def test_compare_trains_and_goes_on(runs, tmp_path, capsys):
    """The fake runs have accuracies .2 and .4 + η in training, .5 + α held out."""
    compare.main([*WORDS, "--", "--steps", "3"])
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["--eta", "0.5", "2", "0.550", "0.500"] in printed
    assert ["--alpha", "0.3", "minus", "--eta", "0.5", "2", "-0.250", "–", "0.300", "–"] in printed
    assert [(one.seed, one.eta, one.alpha, one.steps) for one in runs] == [
        (seed, eta, alpha, 3) for seed in (0, 1) for eta, alpha in ((0, 0), (0.5, 0), (0, 0.3))
    ]
    stopped = Path(runs[1].output)
    (stopped / "evaluations.jsonl").write_text('{"step": 0}\n{"step": 3, "tab')  # cut by a kill
    (stopped / "checkpoint.pt").write_text("weights")
    without_checkpoint = Path(runs[2].output)
    (without_checkpoint / "evaluations.jsonl").unlink()
    before = compare_files(tmp_path)
    compare.main([*WORDS, "--table-only", "--", "--steps", "3"])  # of what has finished
    assert len(runs) == 6 and compare_files(tmp_path) == before
    compare.main([*WORDS, "--", "--steps", "3"])
    assert [Path(one.output) for one in runs[6:]] == [stopped, without_checkpoint]
    assert (runs[6].resume, runs[7].resume) == (str(stopped), "")
    assert not [path for path in tmp_path.rglob("*") if path.name in ("final", "checkpoint.pt")]


def compare_files(folder):
    """All files but the plot."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".png"]
    return {path: path.read_text() for path in paths}


def test_each_program_refuses_in_one_sentence(runs, tmp_path, capsys):
    for program, words, sentence in (
        (compare, ["--seeds", "0", "", ""], "all different"),
        (compare, ["--seeds", "0", "", "--stapo", "--against", "3"], "--against has their numbers"),
        (compare, ["--seeds", "0", "", "--eta 7"], "must lie between"),
        (compare, ["--seeds", "0", "", "--tabel-only"], "unrecognized arguments: --tabel-only"),
        (compare, ["--seeds", "0", "", "--stapo", "--table-only"], "no run of these has finished"),
        (diagnose, ["--batches", "1"], "--batches must be 2 or more"),
        (diagnose, ["--group-size", "1"], "--group-size must be at least 2"),
        (check_model, [str(tmp_path)], "cannot load --model"),
    ):
        with pytest.raises(SystemExit, match="2"):
            program.main(words)
        assert sentence in capsys.readouterr().err
    assert not runs and not any(tmp_path.iterdir())


# ---- check_model.py


def test_check_model_finds_the_bundled_model_right(capsys):
    assert check_model.main([TINY]) == 0
    printed = capsys.readouterr().out
    assert "model type: llama; longest position: 2048" in printed
    assert "end token <|end|>: from tokenizer, generation config, chat template" in printed
    assert "π is right" in printed


def plant(monkeypatch, fault):
    """Lets lopti.load_model return a model with a fault in its forward pass."""
    load_model = lopti.load_model

    def load_with_fault(*inputs):
        model, tokenizer = load_model(*inputs)
        forward = model.forward
        monkeypatch.setattr(model, "forward", lambda *ids, **options: fault(forward, ids, options))
        return model, tokenizer

    monkeypatch.setattr(lopti, "load_model", load_with_fault)


def sees_padding(forward, ids, options):
    return forward(*ids, **(options | {"attention_mask": None}))


def other_scale_without_cache(forward, ids, options):
    output = forward(*ids, **options)
    if not options["use_cache"]:
        output.logits = output.logits * 1.01
    return output


@pytest.mark.parametrize("fault", [sees_padding, other_scale_without_cache])
def test_check_model_reports_a_difference(monkeypatch, capsys, fault):
    plant(monkeypatch, fault)
    assert check_model.main([TINY, "--length", "100"]) == 1
    assert "π is wrong" in capsys.readouterr().out
