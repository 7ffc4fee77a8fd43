"""Tests of the programs of this folder: python -m pytest -q data/lab/test_lab.py

They are diagnose.py, curve.py, flow.py, compare.py and check_model.py.
"""

import copy
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("scipy", reason="pip install -r data/lab/requirements.txt")

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import check_model
import compare
import curve
import diagnose
import flow
import long_runs
import matplotlib
import numpy as np
import pandas
import results
import torch
from transformers import AutoModelForCausalLM

import lopti
from rewards import kk_reward

TINY = str(HERE.parent / "tiny")
torch.set_num_threads(1)  # more gain little

# diagnose.py --------------------------------------------------------------------------------------

SMALL = ["--prompts-per-step", "2", "--group-size", "4", "--mini-batch-size", "4"]
SMALL += ["--max-new-tokens", "12", "--task", "math"]  # which has short prompts
SMALL += ["--temperature", "2"]  # for tokens in each bin


@pytest.fixture
def unequal_rewards(monkeypatch):
    def compute_rewards(function, texts, examples):
        return [0.0, 3.0] * (len(texts) // 2)

    monkeypatch.setattr(lopti, "compute_rewards", compute_rewards)


def test_gradient_norms_and_tokens_of_the_bins(monkeypatch, unequal_rewards):
    """`measure` returns norms of ∇ Σ Â·log π / N, the gradient of Eq. 1 at π_old, over all weights.

    Â is that of Eq. 4: rewards of 0 and 3 in turns give ∓ 1.5 / 1.732. No weight moves. Flags of a
    method that makes several passes do not change what is measured.
    """
    update = mock.Mock(wraps=lopti.update)
    monkeypatch.setattr(lopti, "update", update)
    passes = ["--eta", "0.5", "--order", "high-low", "--update-epochs", "2"]
    settings = lopti.parse_arguments([*SMALL, *passes, "--max-grad-norm", "0.1", "--alpha", "0.3"])
    policy, tokenizer = lopti.load_model(settings.model, "cpu")
    untouched = copy.deepcopy(policy)
    examples, _ = lopti.load_data(settings, tokenizer)
    tokens, norms = diagnose.measure(policy, tokenizer, examples, 1, settings)
    weights = list(untouched.parameters())
    assert all(map(torch.equal, weights, policy.parameters()))
    rollout = update.call_args.args[2]
    mask = rollout.mask
    pi = rollout.old_logprobs.exp()
    masks = [mask & (pi < 0.25), mask & (pi >= 0.25) & (pi < 0.5), mask & (pi >= 0.5) & (pi < 0.75)]
    masks += [mask & (pi >= 0.75), mask]
    assert tokens[0].tolist() == [part.sum() for part in masks[:4]]
    signs = torch.tensor([-1.0, 1.0] * 4)[:, None]
    advantages = (0.3 * pi + 0.7) * signs * 3**0.5 / 2
    by_hand = []  # of two mini-batches
    for rows in (slice(0, 4), slice(4, 8)):
        ids = rollout.ids[rows]
        logits = untouched(ids).logits[:, :-1] / 2  # the temperature
        logprobs = logits.log_softmax(2).gather(2, ids[:, 1:, None])[..., 0]
        terms = advantages[rows, 1:] * logprobs / mask[rows].sum()
        by_hand.append([])
        for part in masks:
            gradient = torch.autograd.grad(terms[part[rows, 1:]].sum(), weights, retain_graph=True)
            by_hand[-1].append(torch.nn.utils.get_total_norm(gradient).item())
    assert norms[0] == pytest.approx(np.mean(by_hand, 0), rel=1e-3)


def test_diagnose_does_what_its_flags_say(monkeypatch, unequal_rewards):
    """--min-p and --dtype change what is measured, and --gradient-checkpointing only how."""
    checkpoint = mock.Mock(wraps=lopti.checkpoint)
    monkeypatch.setattr(lopti, "checkpoint", checkpoint)
    found = []
    for flags in ([], ["--min-p", "0.9"], ["--dtype", "bfloat16"], ["--gradient-checkpointing"]):
        assert not checkpoint.called
        settings = lopti.parse_arguments([*SMALL, *flags])
        policy, tokenizer = lopti.load_model(settings.model, "cpu")
        examples, _ = lopti.load_data(settings, tokenizer)
        found.append(diagnose.measure(policy, tokenizer, examples, 1, settings))
    (tokens, norms), (tokens_of_min_p, _), (_, norms_in_bfloat16), (_, checkpointed) = found
    assert tokens_of_min_p[0, 3] > tokens[0, 3]  # nearly greedy: nearly all tokens have π ≥ 0.75
    assert norms_in_bfloat16 != pytest.approx(norms, rel=1e-4)
    assert checkpointed == pytest.approx(norms)
    assert checkpoint.called


def test_table_of_diagnose_by_hand():
    """The table and the sentences have the ratios and 95 % intervals that a hand computes.

    There are two batches, and t of one degree of freedom is 12.706. The share of π < 0.25 is
    120/300 = 0.4, with 20 - 0.4·100 = -20 and 100 - 0.4·200 = 20: s/√2 is 20, and half of the
    interval is 12.706·20/150. The norm of π < 0.25 is 8/4 = 2 of that of all tokens, with
    5 - 2·2.5 = 0 and 3 - 2·1.5 = 0. It is 8/2 = 4 times that of π ≥ 0.75, with 5 - 4·1 = 1 and
    3 - 4·1 = -1: s/√2 is 1, and half of the interval is 12.706.
    """
    tokens = np.array([[20, 10, 10, 60], [100, 20, 20, 60]])
    norms = np.array([[5.0, 1.0, 1.0, 1.0, 2.5], [3.0, 1.0, 1.0, 1.0, 1.5]])
    table = diagnose.summarize(tokens, norms)
    shares, relative = (table[name] for name in diagnose.PAPER)
    assert shares["measured"].tolist() == [0.4, 0.1, 0.1, 0.4]
    assert shares.loc["π < 0.25", "±"] == pytest.approx(12.706 * 20 / 150, rel=1e-4)
    assert list(relative.loc["π < 0.25"]) == pytest.approx([2.0, 0.0, 0.88])
    assert list(relative.loc["π ≥ 0.75"]) == pytest.approx([0.5, 12.706 / 8, 0.18], abs=1e-4)
    text = diagnose.message(tokens, norms)
    assert text.startswith("40 % of the tokens have π < 0.25.\n")
    assert text.endswith("4.0 ± 12.7 times as large as that of π ≥ 0.75 (not significant).")
    for times in (4.0, 0.5):  # both differ from 1 by more than ± 0
        norms[:, 0] = times
        text = diagnose.message(tokens, norms)
        assert text.endswith(f"{times} ± 0.0 times as large as that of π ≥ 0.75.")


def test_diagnose_from_flags_to_table(monkeypatch, unequal_rewards, capsys):
    """The program prints the table, and leaves out batches without a gradient.

    It ends in one sentence if fewer than two are left, or if a bin has no gradient at all.
    """
    diagnose.main([*SMALL, "--batches", "2"])
    printed = capsys.readouterr().out
    assert "± " in printed and "nan" not in printed
    assert "This does not say whether a method helps" in printed
    norms = np.array([[3.0, 1, 1, 1, 2], [0, 0, 0, 0, 0], [1, 1, 1, 1, 2]])
    monkeypatch.setattr(diagnose, "measure", lambda *_: (np.ones((3, 4)), norms))
    diagnose.main(SMALL)
    # of the two batches that have a gradient: half of the interval of 3 and 1 is 12.706
    assert "is 2.0 ± 12.7 times as large" in capsys.readouterr().out
    norms[0, 2] = norms[2, 2] = 0
    with pytest.raises(SystemExit, match="2"):
        diagnose.main(SMALL)
    assert "no token with 0.5 to 0.75 has a gradient" in capsys.readouterr().err
    norms[2] = 0
    with pytest.raises(SystemExit, match="2"):
        diagnose.main(SMALL)
    assert "needs two batches with groups of unequal rewards, not 1" in capsys.readouterr().err


# compare.py ---------------------------------------------------------------------------------------


def test_differences_by_hand():
    """Each pair of lists gets the mean of the differences by seed, and its 95 % interval.

    B minus A is 0.01, 0.02, 0.03 in training, hence 0.02 ± 4.303·0.01/√3, and 0.1, 0.1, 0.4 held
    out, hence 0.2 ± 4.303·0.1. Held out, C minus A is always -0.5, and C minus B is -0.7 ± 0.43.
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
    columns = ["seeds", "training", "training ±", "held out", "held out ±"]
    assert list(table.loc["B minus A", columns]) == pytest.approx(by_hand, rel=1e-4)
    assert table.loc["C minus B", "training"] == pytest.approx(-1.02)
    assert list(table["training *"]) == ["", "", ""]
    assert list(table["held out *"]) == ["", "*", "*"]


def table_row(measure, difficulty, mean, low=0.0, high=1.0):
    """A row of an evaluation, as `lopti.accuracy_table` makes it."""
    row = {"measure": measure, "difficulty": difficulty}
    return row | {"mean": mean, "low": low, "high": high}


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """In place of lopti.train: it writes a run's files, and what no one should read is above 1.

    Accuracies of the run are 0.2 + 0.2·seed and 0.4 + η in training, and 0.5 + α held out.
    """
    asked = []

    def train(settings):
        asked.append(settings)
        folder = Path(settings.output)
        (folder / "final").mkdir(parents=True)  # as lopti.py, it refuses a folder that exists
        print("the report of a run")
        assert Path(f"{folder}.txt").read_text() == "the report of a run\n"  # at once
        for step, accuracy in enumerate((9.0, 0.2 + 0.2 * settings.seed, 0.4 + settings.eta), 1):
            line = dict.fromkeys(curve.PANELS.values(), 9.0)
            lopti.add_line(folder / "metrics.jsonl", line | {"step": step, "accuracy": accuracy})
        for step, value in ((0, 9.0), (3, 0.5 + settings.alpha)):
            measures = {"greedy": value}
            if settings.eval_samples:
                measures = {"greedy": 9.0, f"avg@{settings.eval_samples}": value}
            table = []
            for measure, mean in measures.items():
                table += [table_row(measure, "2", 7.0), table_row(measure, "all", mean)]
            lopti.add_line(folder / "evaluations.jsonl", {"step": step, "table": table})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lopti, "train", train)
    return asked


def test_compare_trains_each_run_once(trained, tmp_path, capsys):
    """Every list is trained with every seed, and a list's own flags win over those of all lists.

    The reports of the runs do not stand between the accuracies, and no weights are left. The same
    command prints the same again, in another process, too, and trains only what was stopped.
    """
    lists = ["", "--eta 0.5 --eval-samples 0", "--alpha 0.3"]
    words = ["--seeds", "2", *lists, "--", "--steps", "3", "--eval-samples", "2"]
    compare.main(words)
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert ["GRPO", "0.35", "0.5"] in lines
    assert [*lists[1].split(), "0.60", "0.5"] in lines
    difference = f"{lists[2]} minus {lists[1]} 2 -0.25 0.0 * 0.3 0.0 *"
    assert difference.split() in lines
    assert lines[:2] == [
        ["GRPO,", "seed", "0"],
        ["training", "0.300,", "held", "out", "0.500,", "in", trained[0].output],
    ]
    assert "report" not in printed
    expected = []
    for seed in (0, 1):
        expected += [(seed, 0, 0, 2), (seed, 0.5, 0, 0), (seed, 0, 0.3, 2)]
    assert [(one.seed, one.eta, one.alpha, one.eval_samples) for one in trained] == expected
    assert {(one.steps, one.save_every) for one in trained} == {(3, 0)}
    folders = [Path(one.output) for one in trained]
    for folder in folders:
        assert sorted(path.name for path in folder.iterdir()) == [
            "evaluations.jsonl",
            "metrics.jsonl",
        ]
    code = "import sys, compare, lopti; lopti.train = None; compare.main(sys.argv[1:])"
    paths = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    again = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=os.environ | {"PYTHONPATH": paths, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert again.stdout == printed
    (folders[1] / "evaluations.jsonl").write_text('{"step": 0}\n{"step": 3, "tab')  # by a kill
    (folders[2] / "evaluations.jsonl").unlink()
    compare.main(words)
    assert capsys.readouterr().out == printed
    assert [Path(one.output) for one in trained[6:]] == folders[1:3]


def test_compare_says_how_to_go_on(trained, monkeypatch, capsys):
    """Ctrl-C ends in one sentence and exit code 130."""
    monkeypatch.setattr(lopti, "train", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit, match="130"):
        compare.main(["", "--eta 0.5"])
    assert "The same command goes on" in capsys.readouterr().out


def test_compare_draws_means(trained, monkeypatch):
    """Each list of flags gets one curve, the mean over the seeds."""
    drawn = []
    monkeypatch.setattr(curve, "draw", lambda path, runs: drawn.append((path, runs)))
    compare.main(["--seeds", "2", "", "--eta 0.5"])
    [(path, runs)] = drawn
    assert path == Path("runs/compare/curves.png")
    assert list(runs) == ["GRPO", "--eta 0.5"]
    metrics, evaluations = runs["--eta 0.5"]
    assert dict(metrics["accuracy"]) == pytest.approx({1: 9.0, 2: 0.3, 3: 0.9})
    assert dict(evaluations["mean"]) == {0: 9.0, 3: 0.5}


def test_each_program_refuses_in_one_sentence(trained, tmp_path, capsys):
    """What a user gets wrong ends in one sentence and exit code 2, and nothing is trained."""
    record = str(HERE / "results" / "readme_run.jsonl")
    for program, words, sentence in (
        (compare, ["", ""], "all different"),
        (compare, ["--seeds", "1", "", "--stapo"], "--seeds 2 or more"),
        (compare, ["", "--steps 1"], "--steps 2 or more"),
        (compare, ["", "--eta 7"], "--eta must be from 0 to 1, not 7"),
        (compare, ["", "--tabel"], "unrecognized arguments: --tabel"),
        (diagnose, ["--batches", "1"], "--batches must be 2 or more"),
        (diagnose, ["--group-size", "1"], "--group-size must be at least 2"),
        (diagnose, ["--resume", "runs/one"], "unrecognized arguments: --resume"),
        (check_model, [str(tmp_path)], "cannot load --model"),
        (curve, [str(tmp_path)], "has no line of a training step"),
        (curve, [record, record], "a different one for each run"),
        (curve, [record, "--labels", "A", "B"], "a different one for each run"),
        (curve, [record, "--plot", str(tmp_path / "plot.doc")], "doc"),
    ):
        with pytest.raises(SystemExit, match="2"):
            program.main(words)
        assert sentence in capsys.readouterr().err
    assert not trained and not any(tmp_path.iterdir())


@pytest.mark.parametrize("program", [check_model, compare, curve, diagnose, long_runs])
def test_each_program_prints_at_once_and_in_any_encoding(program, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "argv", ["program", "--help"])
    with pytest.raises(SystemExit, match="0"):
        program.main()
    assert stream.line_buffering


# curve.py -----------------------------------------------------------------------------------------


def write_run(folder, metrics="metrics", evaluations="evaluations", run=None):
    """Writes a run of six steps with the accuracies 0, 0, 0, 0, 0.5, 1, and two evaluations."""
    for step, accuracy in enumerate((0.0, 0.0, 0.0, 0.0, 0.5, 1.0), 1):
        line = dict.fromkeys(curve.PANELS.values(), 0.1 * step)
        lopti.add_line(folder / f"{metrics}.jsonl", line | {"step": step, "accuracy": accuracy})
    for step, mean in ((0, 0.2), (6, 0.8)):
        table = [table_row("greedy", "all", mean, mean - 0.1, mean + 0.2)]
        table.append(table_row("greedy", "2", 0.9))
        line = {"step": step, "table": table}
        if run:
            table.append(table_row("avg@2", "all", mean / 2))
            line["run"] = run
        lopti.add_line(folder / f"{evaluations}.jsonl", line)


def test_runs_are_read_from_folders_and_from_files(tmp_path):
    """An evaluation belongs to the metrics file that it names; avg@k goes before greedy."""
    write_run(tmp_path)
    metrics, evaluations = curve.read_run(tmp_path)
    assert list(metrics["accuracy"]) == [0, 0, 0, 0, 0.5, 1]
    assert list(metrics.index) == [1, 2, 3, 4, 5, 6]
    assert evaluations.loc[6].tolist() == pytest.approx([0.8, 0.7, 1.0])
    (tmp_path / "several").mkdir()
    for name in ("one", "two"):
        write_run(tmp_path / "several", name, "their_evaluations", run=name)
    lopti.add_line(
        tmp_path / "several" / "their_evaluations.jsonl",
        {"run": "two", "step": 7, "table": [table_row("greedy", "all", 0.1)]},
    )
    _, of_one = curve.read_run(tmp_path / "several" / "one.jsonl")
    _, of_two = curve.read_run(tmp_path / "several" / "two.jsonl")
    assert dict(of_one["mean"]) == {0: 0.1, 6: 0.4}
    assert dict(of_two["mean"]) == {0: 0.1, 6: 0.4, 7: 0.1}


def test_curves_by_hand(tmp_path, monkeypatch, capsys):
    """A mean of five steps stands at the third, and at both ends there are means of fewer.

    Evaluations have their own intervals, each run has its colour, and a file of svg is the same
    each time.
    """
    monkeypatch.setattr(curve.plt, "close", lambda figure: None)  # so that it can be looked at
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name)
    words = [str(tmp_path / "one"), str(tmp_path / "two"), "--labels", "first run", "second run"]
    plot = tmp_path / "new" / "plot.svg"
    curve.main([*words, "--plot", str(plot)])
    assert capsys.readouterr().out == f"The plot is in {plot}.\n"
    figure = curve.plt.gcf()
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert titles == list(curve.PANELS)
    accuracy = figure.axes[0]
    thin, thick, *_ = accuracy.lines
    assert list(thin.get_ydata()) == [0, 0, 0, 0, 0.5, 1]
    means = dict(zip(thick.get_xdata(), thick.get_ydata()))
    assert means[3] == pytest.approx(0.1) and means[4] == pytest.approx(0.3)
    assert means[1] == 0 and means[5] == pytest.approx(1.5 / 4)
    intervals = accuracy.collections[0].get_segments()
    assert intervals[1][:, 1].tolist() == pytest.approx([0.7, 1.0])
    colors = {line.get_color() for line in figure.axes[0].lines}
    assert len(colors) == 2
    text = plot.read_text()
    assert "first run" in text and "second run" in text
    curve.main([*words, "--plot", str(plot)])
    assert plot.read_text() == text


@pytest.mark.parametrize("name", ["", "metrics.jsonl"])
def test_without_plot_it_is_in_the_folder_of_the_first_run(name, tmp_path, capsys):
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
        write_run(tmp_path / run)
    curve.main([str(tmp_path / "one" / name), str(tmp_path / "two")])
    plot = tmp_path / "one" / "curve.png"
    assert plot.exists()
    assert capsys.readouterr().out == f"The plot is in {plot}.\n"


def test_the_picture_of_the_readme_is_what_curve_draws(tmp_path):
    results = HERE / "results"
    on_record = (results / "readme_runs.svg").read_text(encoding="utf-8")
    if f"Matplotlib v{matplotlib.__version__}," not in on_record:
        pytest.skip("another version of matplotlib drew it")
    words = [str(results / f"{name}.jsonl") for name in ("readme_run", "readme_grpo")]
    plot = tmp_path / "plot.svg"
    title = "One run each: both learn alike, AR + Lopti moves farther from its start"
    words += ["--labels", "AR + Lopti", "GRPO", "--title", title]
    curve.main([*words, "--plot", str(plot)])
    assert plot.read_text(encoding="utf-8") == on_record


# flow.py ------------------------------------------------------------------------------------------


def test_the_picture_of_a_training_step_is_what_flow_draws():
    on_record = (results.FOLDER / "flow.svg").read_text(encoding="utf-8")
    if f"Matplotlib v{matplotlib.__version__}," not in on_record:
        pytest.skip("another version of matplotlib drew it")
    assert results.svg(flow.flow) == on_record


def test_the_numbers_of_a_training_step_by_hand():
    """π is the model's softmax, a reward is that of the text, and the rest is arithmetic."""
    record = json.loads(flow.RECORD.read_text(encoding="utf-8"))
    rows = record["rows"]
    model, tokenizer = lopti.load_model(TINY, "cpu")
    puzzles, _ = lopti.load_data(lopti.Settings(), tokenizer)
    asked = [puzzles[0]] * 4 + [puzzles[5]] * 4
    for row, puzzle in zip(rows, asked, strict=True):
        start = row["prompt_length"]
        assert start == len(puzzle.prompt_ids)
        ids = torch.tensor(puzzle.prompt_ids + row["ids"])
        with torch.no_grad():
            softmax = model(ids[None]).logits[0].softmax(1)
        pi = [float(softmax[t - 1, ids[t]]) for t in range(start, len(ids))]
        assert row["pi"] == pytest.approx(pi, abs=1e-5)
        text = tokenizer.decode(row["ids"], skip_special_tokens=True)
        assert kk_reward([text], [puzzle.solution]) == [row["reward"]]
    assert record["question"] == puzzles[5].question

    figure = flow.flow()
    texts = [text.get_text().replace("−", "-") for text in figure.axes[0].texts]
    heights = {}  # of the labels, and of the white numbers from left to right
    whites = []
    for text in figure.axes[0].texts:
        heights[text.get_text()] = text.get_position()[1]
        if text.get_color() == "white":
            whites.append(text.get_position()[1])
    flow.plt.close(figure)
    advantages = []
    for group in (rows[:4], rows[4:]):
        numbers = np.array([row["reward"] for row in group])
        advantages += list((numbers - numbers.mean()) / numbers.std(ddof=1))
    start = texts.index(f"{rows[0]['reward']:g}")
    for place, row in enumerate(rows):
        shown = [f"{row['reward']:g}", f"{advantages[place]:.2f}"]
        assert texts[start + 2 * place : start + 2 * place + 2] == shown
    start = texts.index(tokenizer.decode(rows[-1]["ids"][:1]))
    for place, pi in enumerate(rows[-1]["pi"][:8]):
        token = tokenizer.decode(rows[-1]["ids"][place : place + 1]).replace("-", "-\n")
        weight = 0.3 * pi + 0.7
        advantage = advantages[-1]
        shown = [token, f"{pi:.2f}", f"{advantage:.2f}", f"× {weight:.2f}"]
        shown += [f"{weight * advantage:.2f}"] * 2
        assert texts[start + 6 * place : start + 6 * place + 6] == shown
        label = "pass 1: π < 0.5" if pi < 0.5 else "pass 2: π ≥ 0.5"
        assert whites[place] == heights[label]
    longest = max(row["prompt_length"] + len(row["ids"]) for row in rows)
    assert f"(B, L) = (8, {longest})" in texts
    every_pi = np.concatenate([row["pi"] for row in rows])
    low = (every_pi < 0.5).sum()
    counts = f"{low} in pass 1, {len(every_pi) - low} in pass 2."
    assert f"N = {len(every_pi)}, " in texts[-1] and texts[-1].endswith(counts)


# check_model.py -----------------------------------------------------------------------------------


@pytest.fixture
def model(monkeypatch):
    """The bundled model, as check_model.py loads it: a test may spoil it."""
    model, tokenizer = lopti.load_model(TINY, "cpu")
    monkeypatch.setattr(lopti, "load_model", lambda *_: (model, tokenizer))
    return model


def rows_and_differences(printed):
    """Reads the length of the longest row and the largest difference, once for each length."""
    found = []
    for line in printed.splitlines():
        if line.startswith("rows of up to"):
            words = line.split()
            found.append((int(words[4]), float(words[-2])))
    return found


def test_check_model_reads_rows_of_the_length_that_is_asked_for(model, capsys):
    """A right model is found right; rows are as long as --length and the model's positions allow.

    That the model would end each response at once makes no row shorter.
    """

    def prefer_end(model, inputs, output):
        output.logits[..., model.generation_config.eos_token_id] += 20

    model.register_forward_hook(prefer_end)
    for positions, length, longest in ((2048, 130, 130), (100, 656, 100)):
        model.config.max_position_embeddings = positions
        assert check_model.main([TINY, "--length", str(length)]) == 0
        printed = capsys.readouterr().out
        [(tokens, difference)] = rows_and_differences(printed)
        assert longest - 14 < tokens <= longest  # a prompt grows by 14 tokens at a time
        assert difference < 1e-3
        assert "<|end|>" in printed and "π is right." in printed


def test_check_model_crosses_the_original_length(monkeypatch, capsys):
    """A model whose positions change beyond 100 tokens is right up to there, and wrong beyond.

    yarn scales positions, too, but once for all lengths.
    """
    _, tokenizer = lopti.load_model(TINY, "cpu")
    factors = {"short_factor": [1.0] * 8, "long_factor": [float(i) for i in range(1, 9)]}
    original = {"original_max_position_embeddings": 100, "factor": 4.0}
    for positions, code, rope in (
        (100, 1, {"rope_type": "dynamic", "factor": 4.0}),
        (400, 1, {"rope_type": "longrope"} | original | factors),
        (400, 0, {"rope_type": "yarn"} | original),
    ):
        model = AutoModelForCausalLM.from_pretrained(
            TINY, max_position_embeddings=positions, rope_parameters={"rope_theta": 1e3} | rope
        )
        model.generation_config.eos_token_id = [tokenizer.eos_token_id]
        monkeypatch.setattr(lopti, "load_model", mock.Mock(return_value=(model, tokenizer)))
        assert check_model.main([TINY]) == code
        printed = capsys.readouterr().out
        (within, small), *beyond = rows_and_differences(printed)
        assert small < 1e-3
        if code:
            [(tokens, difference)] = beyond
            assert within <= 100 < tokens
            assert difference > 0.1
            assert "π is wrong in rows of more than 100 tokens" in printed
        else:
            assert within > 300 and not beyond


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
