"""Checks diagnose.py and compare.py: python -m pytest -q data/lab/test_lab.py"""

import doctest
import json
import math
import sys
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("scipy", reason="pip install -r data/lab/requirements.txt")

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
import lopti  # isort: skip, before torch

import compare
import diagnose
import numpy as np
import torch
from scipy import stats

# ---- diagnose.py: a policy so small that all of its answers can be written down
# Two tokens of three words each. The first is drawn in state 0, the second in the state to which
# the first word leads. Probabilities are whole tenths, so that a hundred answers, each as often as
# it is likely, stand for all.

PI = torch.tensor([[0.1, 0.3, 0.6], [0.8, 0.1, 0.1], [0.2, 0.2, 0.6]])  # (states, words)
NEXT_STATE = torch.tensor([1, 2, 0])  # by the first word
REWARDS = torch.tensor([[1.0, 0.0, 0.5], [0.0, 2.0, 0.0], [-1.0, 0.3, 0.7]])  # by both words
SETTINGS = lopti.Settings(alpha=0.3, eta=0.28, kl_coef=0.0)


class TablePolicy(torch.nn.Module):
    """The logits of each state are the weights. Takes ids of a prompt's token and two words."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self):
        super().__init__()
        self.output = torch.nn.Linear(3, 3, bias=False)
        self.output.weight.data = PI.log().T.clone()  # (words, states)

    def get_output_embeddings(self):
        return self.output

    def forward(self, ids, use_cache):
        states = torch.stack([0 * ids[:, 0], NEXT_STATE[ids[:, 1]], 0 * ids[:, 2]], 1)
        hidden = torch.nn.functional.one_hot(states, 3).float()
        return SimpleNamespace(logits=self.output(hidden))


def answers():
    """Each answer: its two words, and how often it is among a hundred."""
    for first, second in product(range(3), range(3)):
        yield first, second, round(100 * float(PI[0, first] * PI[NEXT_STATE[first], second]))


def mini_batch(first, second):
    """A mini-batch of one answer, whose Â is its reward."""
    mask = torch.tensor([[False, True, True]])
    old_logprobs = torch.tensor([[0.0, PI[0, first].log(), PI[NEXT_STATE[first], second].log()]])
    return lopti.Rollout(
        ids=torch.tensor([[0, first, second]]),
        mask=mask,
        lengths=torch.tensor([3]),
        truncated=torch.tensor([False]),
        texts=[""],
        old_logprobs=old_logprobs,
        advantages=REWARDS[first, second] * mask,
    )


def slopes_by_hand(first, second):
    """Of each of the two tokens: π, and Â·(e - π)/2 at the logits of its state, (9,)."""
    for state, word in ((0, first), (NEXT_STATE[first], second)):
        slope = torch.zeros(3, 3).double()  # (words, states)
        slope[:, state] = torch.eye(3)[word] - PI[state]
        yield float(PI[state, word]), REWARDS[first, second] * slope.flatten() / 2


def expected_reward(weights):
    """J of logits (9,), by going through all answers."""
    pi = weights.view(3, 3).T.softmax(1)  # (states, words)
    return (pi[0, :, None] * pi[NEXT_STATE] * REWARDS).sum()


def rise_along(step):
    """By how much J rises along a step (9,), by finite differences."""
    weights, small = PI.double().log().T.flatten(), 1e-5
    more, less = (expected_reward(weights + sign * small * step) for sign in (1, -1))
    return float(more - less) / (2 * small)


@pytest.fixture(scope="module")
def measured():
    """What diagnose.py makes of a hundred answers in each half."""
    keeper, first = diagnose.GradientKeeper(TablePolicy(), SETTINGS), diagnose.FirstHalf()
    found = {"energy": [], "signal": [], "descent": [], "adamw": []}
    gradients = []
    for first_word, second_word, times in answers():
        batch = mini_batch(first_word, second_word)
        gradients += times * [(batch, diagnose.gradients(keeper, batch, SETTINGS))]
    for _, parts in gradients:
        first.add(*parts)
    first.finish()
    for batch, parts in gradients:
        numbers = diagnose.sizes(batch, parts[0], SETTINGS.eta) | first.products(*parts)
        for name, values in found.items():
            values.append(numbers[name].numpy())
    return {name: np.array(values) for name, values in found.items()}


def test_signal_and_energy_of_each_bin(measured):
    """Signal is the rise of J along the mean gradient of a bin's tokens."""
    energy, means = np.zeros(4), torch.zeros(4, 9).double()
    for first, second, times in answers():
        parts = torch.zeros(4, 9).double()
        for pi, slope in slopes_by_hand(first, second):
            parts[int(pi // 0.25)] += slope
        energy += times * parts.square().sum(1).numpy()
        means += times * parts
    signal = np.array([rise_along(mean) for mean in means])
    for name, wanted in (("energy", energy), ("signal", signal)):
        sums = measured[name].sum(0)
        assert sums / sums.sum() == pytest.approx(wanted / wanted.sum(), rel=1e-3)
    assert min(abs(signal / signal.sum())) > 0.01  # no bin is empty


def steps_by_hand(first, second):
    """The gradients of GRPO, AR, π < η and π ≥ η for one answer, each (9,)."""
    grpo, ar, low, high = torch.zeros(4, 9).double()
    for pi, slope in slopes_by_hand(first, second):
        grpo += slope
        ar += (0.3 * pi + 0.7) * slope
        part = low if pi < 0.28 else high
        part += slope
    return grpo, ar, low, high


def test_gains_are_rises_of_the_expected_reward(measured):
    """Every step, of length 1, is tried: J before and after it. Then AdamW's mean step."""
    rises, squares, means = np.zeros(3), torch.zeros(3, 9).double(), torch.zeros(3, 9).double()
    for first, second, times in answers():
        grpo, ar, low, high = steps_by_hand(first, second)
        passes = torch.zeros(9).double()
        for part in (low, high):
            if part.any():
                passes += part / part.norm()
        for method, step in enumerate((grpo, ar, passes)):
            if step.any():
                rises[method] += times * rise_along(step / step.norm())
        means += times / 100 * torch.stack([grpo, ar, grpo])
        squares += times / 100 * torch.stack([grpo**2, ar**2, (low**2 + high**2) / 2])
    steps = means / squares.sqrt()
    by_adamw = [rise_along(step / step.norm()) for step in steps]
    for method in (1, 2):
        for name, wanted in (("descent", rises), ("adamw", by_adamw)):
            gain, _ = diagnose.gain(measured[name], method, 0.02)
            assert gain == pytest.approx(100 * (wanted[method] / wanted[0] - 1), rel=1e-3)


def simulated(generator, batches, signal, noise):
    """Random gradients of known mean: progress (batches // 2, 3) and signals (batches // 2, 4)."""
    first, found = diagnose.FirstHalf(), []
    for number in range(batches):
        bins = signal + noise * torch.randn(4, 40, generator=generator).double()
        parts = bins, bins[:2].sum(0), (torch.tensor([[0.7], [0.8], [0.9], [1.0]]) * bins).sum(0)
        if number < batches // 2:
            first.add(*parts)
        if number == batches // 2:
            first.finish()
        if number >= batches // 2:
            found.append(first.products(*parts))
    return [np.array([one[name].numpy() for one in found]) for name in ("descent", "signal")]


def test_intervals_hold_the_truth_as_often_as_they_say():
    """In 19 of 20 simulations; neither much more often, nor much less."""
    generator = torch.Generator().manual_seed(0)
    signal, noise = torch.zeros(4, 40).double(), torch.zeros(4, 40).double()
    for number, deviation in enumerate((1.0, 0.6, 0.4, 0.2)):
        signal[number, 10 * number : 10 * number + 10] = 2 * deviation
        noise[number, 10 * number : 10 * number + 10] = deviation
    share = float(signal[0].square().sum() / signal.sum(0).square().sum())
    held = 0
    for _ in range(400):
        _, signals = simulated(generator, 12, signal, noise)
        value, half = diagnose.ratio(signals[:, 0], signals.sum(1), 2 / 6)
        held += abs(value - share) < half
    assert 370 <= held <= 394


def test_a_loss_and_a_gain_can_be_sure():
    """All signal at the unlikely tokens, all noise at the likely ones: AR harms. And reversed."""
    generator = torch.Generator().manual_seed(0)
    for place, word in ((0, "it does harm"), (3, "it helps")):
        signal, noise = torch.zeros(4, 40).double(), torch.zeros(4, 40).double()
        signal[place, :10], noise[3 - place, 10:] = 1.0, 1.0
        progress, _ = simulated(generator, 20, signal, noise)
        assert diagnose.answer(progress, 1, 2 / 10).startswith(word)
    progress, _ = simulated(generator, 20, 0 * signal, noise + 1)
    assert "GRPO's own progress may be 0" in diagnose.answer(progress, 1, 2 / 10)


def test_the_halves_can_be_exchanged():
    """Each half is measured along the other."""
    parts = torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(0)).double()
    halves = [(bins, bins[:2].sum(0), 0.8 * bins.sum(0)) for bins in parts]
    found = []
    for one, other in (halves, halves[::-1]):
        first = diagnose.FirstHalf()
        first.add(*one)
        first.finish()
        found.append(first.products(*other))
    for name in ("signal", "descent"):
        assert torch.allclose(found[0][name], found[1][name])


def test_ratio_is_students_interval():
    numbers = np.array([0.2, 0.5, 0.1, 0.9])
    value, half = diagnose.ratio(numbers, np.ones(4))
    bounds = stats.ttest_1samp(numbers, 0.0).confidence_interval(0.95)
    assert (value - half, value + half) == pytest.approx(tuple(bounds))
    assert diagnose.ratio(numbers, 2 * np.ones(4))[0] == pytest.approx(value / 2)


SMALL = "--people 2 --prompts-per-step 2 --group-size 4 --max-new-tokens 12 --batches 4"


def test_diagnose_from_its_flags_to_its_page(monkeypatch, capsys):
    """Every second answer is right; no weight of the model moves."""
    moved = []
    measure = diagnose.measure

    def watched(policy, *inputs):
        before = [weights.clone() for weights in policy.parameters()]
        found = measure(policy, *inputs)
        pairs = zip(before, policy.parameters())
        moved.extend(not torch.equal(old, new) for old, new in pairs)
        counts = {name: len(values) for name, values in found[0].items()}
        assert counts["tokens"] == counts["energy"] == 4 and counts["signal"] == 2
        return found

    monkeypatch.setattr(diagnose, "measure", watched)
    monkeypatch.setattr(lopti, "compute_rewards", lambda texts, *_: [0.0, 3.0] * (len(texts) // 2))
    diagnose.main(SMALL.split())
    page = capsys.readouterr().out
    assert moved and not any(moved)
    assert "4 rollout batches, 50 % of the answers right" in page and "nan" not in page
    for question in ("Do unlikely tokens push hardest?", "Would AR help", "Would Lopti help"):
        assert page.count(question) == 1


def test_diagnose_refuses_in_one_sentence(monkeypatch, capsys):
    for flags, said in {
        "--batches 3": "at least 4",
        "--alpha 0": "above 0",
        "--eval-only": "no --resume, no --eval-only",
    }.items():
        assert lopti.exit_code(partial(diagnose.main, flags.split()), "diagnose.py") == 2
        told = capsys.readouterr().err
        assert said in told and told.count("\n") == 1
    monkeypatch.setattr(lopti, "compute_rewards", lambda texts, *_: [0.0] * len(texts))
    with pytest.raises(lopti.UserError, match="nothing to measure.*0 % of the answers are right"):
        diagnose.main(SMALL.split())


# ---- compare.py


def line_of(kl_of_step, lead, held_out):
    """A line of results: accuracy is 5 times the KL plus `lead`; a first evaluation far above."""
    kl = kl_of_step * np.arange(9)
    evaluations = []
    for step, shift in ((0, 9.0), (8, 0.0)):
        table = {}
        for size, change in (("2", -0.1), ("3", 0.1)):
            table[size] = {"greedy": [0.9, 0, 1], "avg@4": [held_out + change + shift, 0, 1]}
        evaluations.append({"step": step, "table": table})
    metrics = {"accuracy": (5 * kl + lead).tolist(), "rollout/kl": kl.tolist()}
    return {"flags": "--some", "evaluations": evaluations, "metrics": metrics}


LEADS = (0.01, 0.02, 0.03)  # of three seeds: .020 ± 4.303 · .01/√3 = .025, p .0742
RUNS = {
    "GRPO": {seed: line_of(0.01, 0.0, 0.5) for seed in (2, 1, 0, 9)},
    "far": {seed: line_of(0.02, LEADS[seed], 0.6) for seed in range(3)},
    "near": {seed: line_of(0.01, LEADS[seed], 0.5) for seed in range(3)},
}


def cells(lines):
    """{name of the row: its cells} of a table."""
    rows = [line.split("  ") for line in lines]
    return {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in rows if row[0]}


def test_the_table_of_compare():
    """By step GRPO has .05 · 4.5, as the first step does not count; far goes twice as far in KL."""
    lines = compare.table(RUNS, ["GRPO"], (0.0, math.inf))
    made = cells(lines[:6])
    assert made["GRPO"] == ["4", "0.225", "–", "0.500", "0.080"]
    assert made["near"] == ["3", "0.245 ± 0.025", "–", "0.500", "0.080"]
    assert made["near − GRPO"][:3] == ["3", "+0.020 ± 0.025, p 0.074", "+0.020 ± 0.025, p 0.148"]
    assert made["far − GRPO"] == [
        "3",
        "+0.245 ± 0.025, p 0.001",  # Holm: .00055 · 2
        "+0.020 ± 0.025, p 0.148",
        "+0.100",  # all seeds alike: no interval
        "+0.080",
    ]
    assert lines[-1] == "Decided: far − GRPO (by step)." and lines[-2].endswith("is decided.")
    both = cells(compare.table(RUNS, ["GRPO", "near"], (0.0, math.inf)))
    assert list(both)[3:6] == ["far − GRPO", "near − GRPO", "far − near"]
    few = {name: {0: lines[0]} for name, lines in RUNS.items()}
    one = compare.table(few, ["GRPO"], (0.0, math.inf))
    assert cells(one)["near − GRPO"] == ["1", "+0.010", "+0.010", "+0.000", "+0.000"]
    assert one[-1] == "No lead is decided."
    without = {"GRPO": RUNS["GRPO"], "no KL": {0: line_of(0.0, 0.1, 0.5)}}
    assert cells(compare.table(without, ["GRPO"], (0.0, math.inf)))["no KL − GRPO"][2] == "–"


def test_intervals_of_compare_are_students():
    mean, half, p = compare.interval([0.1, -0.2, 0.4, math.nan])
    t = 0.1 / (0.3 / 3**0.5)
    assert (mean, half) == pytest.approx((0.1, stats.t.ppf(0.975, 2) * 0.3 / 3**0.5))
    assert p == pytest.approx(2 * stats.t.sf(t, 2))


def run_in(folder, monkeypatch, stop_at):
    """Takes the place of lopti.py: it learns best at 4e-4, and run number `stop_at` is stopped."""
    commands = []

    def run(command, **_):
        words = [str(word) for word in command[2:]]
        commands.append(words)
        settings = dict(pairwise(words))
        if "--resume" in settings:
            run_folder, rate = Path(settings["--resume"]), 4e-4
        else:
            run_folder = Path(settings["--output"]) / settings["--name"]
            rate = float(settings["--learning-rate"])
            run_folder.mkdir(parents=True)
        stopped = len(commands) == stop_at
        (run_folder / "checkpoint.pt").write_text("weights")
        if not stopped:
            (run_folder / "final").mkdir()
        metrics = dict.fromkeys(compare.METRICS, -abs(math.log(rate / 4e-4)))
        (run_folder / "metrics.jsonl").write_text(9 * (json.dumps(metrics) + "\n"))
        row = {"step": 9, "table": {"2": {"prompts": 1, "greedy": [0.123456, 0, 1]}}}
        (run_folder / "evaluations.jsonl").write_text(json.dumps(row) + "\n")
        return SimpleNamespace(returncode=130 * stopped, stderr="lopti.py: stopped\n")

    monkeypatch.chdir(folder)
    monkeypatch.setattr(compare.subprocess, "run", run)
    return commands


def test_compare_goes_on_and_chooses_rates(monkeypatch, tmp_path, capsys):
    """Rates of two methods: 1e-4, 2e-4, and beyond them 4e-4, 8e-4. Then four runs."""
    commands = run_in(tmp_path, monkeypatch, stop_at=12)  # the last of the four
    flags = "--seeds 0-1 --rates 1e-4 2e-4 --rate-seeds 90"
    words = ["compare.py", *flags.split(), "", "--eta 0.5", "--", "--people", "2"]
    monkeypatch.setattr(sys, "argv", words)
    compare.main()
    told = capsys.readouterr().out
    assert told.count("best at 0.0004 of [0.0001, 0.0002, 0.0004, 0.0008]\n") == 2
    assert "2 runs to train, 1 at a time" in told and "4 runs to train" in told
    assert "about 0 minutes for the others" in told
    assert "4 of 4: --people 2 --eta 0.5 --learning-rate 0.0004, seed 1: lopti.py: stopped" in told
    assert commands[4][:4] == ["--people", "2", "--eta", "0.5"]
    compare.main()  # goes on with what was stopped
    assert len(commands) == 13 and commands[12][0] == "--resume"
    made = capsys.readouterr().out.splitlines()
    compare.main()  # from the results alone
    again = capsys.readouterr().out.splitlines()
    assert len(commands) == 13 and again == [*made[:2], *made[5:]] and "0.123" in again[3]
    assert not list(tmp_path.glob("runs/compare/*/[cf]*"))  # no weights are left
    assert len(compare.read_lines(tmp_path / "runs" / "compare" / "results.jsonl")) == 12


def test_compare_refuses_in_one_sentence(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    for flags, said in {
        "--seeds 0-1 --jbos": "two methods or more",
        "--seeds 0-1 --rates 1 2 --eta=0.5 --stapo": "--rates needs --rate-seeds",
        "--seeds 0-4 --rates 1 2 --rate-seeds 4 --eta=0.5 --stapo": "--seeds has none of these",
        "--seeds 0-4 --eta=0.5 --stapo wrong": "each in quotation marks",
        "--seeds 0-4 --eta=0.5 --eta=0.5": "two methods are the same",
        "--seeds 0-4 --eta=0.5 --stapo --against 3": "1 to 2",
        "--seeds 0-4 --eta=7 --stapo": "must lie between",
        "--seeds 0-4 --stapo --eval-only": "no --resume, no --eval-only",
    }.items():
        monkeypatch.setattr(sys, "argv", ["compare.py", *flags.split()])
        try:
            code = lopti.exit_code(compare.main, "compare.py")
        except SystemExit as stop:
            code = stop.code
        told = capsys.readouterr().err
        assert code == 2 and said in told and told.count("\n") == 1, flags
    assert not any(tmp_path.iterdir()) and compare.seed_list("0-2,7") == [0, 1, 2, 7]


@pytest.mark.parametrize("program", [compare, diagnose])
def test_examples_and_help(program, monkeypatch, capsys):
    result = doctest.testmod(program)
    assert result.attempted and not result.failed
    monkeypatch.setattr(sys, "argv", [program.__name__, "--help"])
    with pytest.raises(SystemExit, match="0"):
        program.main()
    assert program.__doc__.split("\n")[0] in capsys.readouterr().out
