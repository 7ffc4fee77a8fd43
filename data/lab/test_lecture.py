"""Checks the lecture: notebook.ipynb, which LOPTI_ALL=1 runs, and lecture.py."""

import ast
import doctest
import functools
import io
import json
import math
import os
import re
import sys
from pathlib import Path

LAB = Path(__file__).resolve().parent
ROOT = LAB.parents[1]
sys.path[:0] = [str(ROOT), str(LAB)]
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the hub

import pytest
import torch

pytest.importorskip("IPython", reason="pip install -r data/lab/requirements.txt")

import lecture
import numpy
from matplotlib.colors import to_rgb
from PIL import Image

import lopti
from rewards import compute_rewards, kk_reward, load_data

NOTEBOOK = json.loads((ROOT / "notebook.ipynb").read_text(encoding="utf-8"))
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"]]
CLIPS = (0.2, 0.24, 10.0)
RUNS_ALL = bool(os.environ.get("LOPTI_ALL"))


def cell_that_begins(start):
    [cell] = [cell for cell in CELLS if cell.startswith(start)]
    return cell


def run(text, **names):
    exec(text, names)  # noqa: S102
    return names


@pytest.mark.skipif(not RUNS_ALL, reason="LOPTI_ALL=1 runs it")
def test_the_notebook_runs(monkeypatch):
    """Without an error or a warning, and with as many pictures as are committed.

    It draws them itself: a MPLBACKEND of the environment, such as agg, would draw none.
    """
    monkeypatch.setenv("MPLBACKEND", "agg")
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    book = nbformat.read(ROOT / "notebook.ipynb", as_version=4)
    place = {"metadata": {"path": str(ROOT)}}
    nbclient.NotebookClient(book, timeout=3000, kernel_name="python3", resources=place).execute()
    for text in map(json.dumps, (book, NOTEBOOK)):
        assert text.count('"image/png"') == 11
        assert '"stderr"' not in text


def test_the_training_step_of_the_student():
    """It is GRPO; with its two edits it is AR + Lopti; each slip is the row that names it."""
    settings = lopti.Settings(mini_batch_size=8)
    policy, tokenizer = lopti.load_model(settings.model, "cpu")
    puzzles, _ = load_data(settings, tokenizer)
    names = {"lopti": lopti, "torch": torch, "tokenizer": tokenizer, "clips": CLIPS}
    names |= {"compute_rewards": compute_rewards, "kk_reward": kk_reward}
    cell = cell_that_begins("def logprobs_of(")
    _, edits, _, slip, _ = cell_that_begins("The table compares your weights").split("```")
    ar, lopti_edit = edits.removeprefix("python\n").split("    # 6. Lopti\n")
    both = cell.replace("    for update_mask in [mask]:\n", lopti_edit)
    both = both.replace("    # 5. Your first edit", ar + "    # 5. Your first edit")
    loops, loss = slip.removeprefix("python\n").split("            ...  # logprobs and losses")
    before, _, rest = both.partition("    for update_mask in [low")
    _, _, rest = rest.partition("            logprobs = ")
    split_anew = before + loops + "            logprobs = " + rest
    one_pass = "            loss = (losses * update_mask[rows]).sum() / N\n"
    split_anew = split_anew.replace(one_pass, loss.partition("\n")[2])
    cells = {
        "AR + Lopti": both,
        "GRPO": cell,
        "GRPO, two epochs": cell.replace("in [mask]:", "in [mask, mask]:"),
        "N of the pass": both.replace("N = mask[rows]", "N = update_mask[rows]"),
        "split by the current policy": split_anew,
        "~low without the mask": both.replace("mask & ~low", "~low"),
    }
    for name, text in cells.items() if RUNS_ALL else [*cells.items()][:1]:
        step = run(text, **names)["my_training_step"]
        apart = lecture.compare_step(step, policy, tokenizer, puzzles[5:7], settings)
        assert apart["your weights"].idxmin() == name
        assert apart["your weights"][name] < 0.001
        assert (apart["your weights"].drop(name) > 0.02).all()


def test_the_port_of_the_exercise_has_one_silent_bug(capsys):
    text = cell_that_begins("def port(").partition("\n\n\n")[0]
    lecture.compare_tables(run(text, torch=torch)["port"])
    *wrong, count = capsys.readouterr().out.splitlines()
    assert "Lopti: wrong from optimizer step 1 on" in wrong
    names = {line.partition(":")[0] for line in wrong}
    assert not names & {"GRPO", "AR"}
    assert count == f"{16 - len(wrong)} of 16 cases are right"
    bug = '(losses * tokens).sum() + case["kl_coef"] * kl.sum()'
    text = text.replace(bug, '((losses + case["kl_coef"] * kl) * tokens).sum()')
    lecture.compare_tables(run(text, torch=torch)["port"])
    assert capsys.readouterr().out == "16 of 16 cases are right\n"


def test_the_gradient_norm_is_that_of_autograd():
    logits = (3 * torch.randn(50, 7, generator=torch.Generator().manual_seed(0))).requires_grad_()
    ids = torch.arange(50) % 7
    logprobs = logits.log_softmax(1).gather(1, ids[:, None])[:, 0]
    (gradient,) = torch.autograd.grad(logprobs.sum(), logits)
    norms = lecture.gradient_norm(logits.detach(), ids)
    torch.testing.assert_close(norms, gradient.norm(dim=1))
    assert doctest.testmod(lecture).failed == 0


def test_the_distance_of_two_models():
    """All parameters count together: 3² + 4² = 5²."""
    models = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    for model, weight, bias in zip(models, (1.0, 4.0), (0.0, -4.0)):
        torch.nn.init.constant_(model.weight, weight)
        torch.nn.init.constant_(model.bias, bias)
    assert lecture.distance(*models) == pytest.approx(5.0)


def test_the_gain_is_that_of_vectors():
    """Each token has two axes of its own, one for its mean gradient and one for its noise."""
    generator = torch.Generator().manual_seed(0)
    pi = torch.rand(30, generator=generator, dtype=torch.float64)
    squared_norm = torch.rand(30, generator=generator, dtype=torch.float64)
    mean = torch.diag(squared_norm.sqrt() * pi)  # (tokens, axes)
    noise = torch.diag((squared_norm - mean.diagonal() ** 2).sqrt())
    tokens = torch.cat([mean, noise], 1)
    mean_gradient = torch.cat([mean, 0 * noise], 1).sum(0)

    def along(alpha):
        step = ((1 - alpha + alpha * pi)[:, None] * tokens).sum(0)
        return mean_gradient @ step / step.norm()

    for alpha in (0.1, 0.3, 1.0):
        gain = lecture.gain_of_step(pi, tokens @ mean_gradient, squared_norm, alpha)
        assert float(gain) == pytest.approx(float(along(alpha) / along(0.0)), rel=1e-12)


def test_the_lines_of_lopti_that_the_cells_show(monkeypatch):
    """Each call of lecture.source finds the lines that it names, and shows whole statements."""
    shown = []
    monkeypatch.setattr(lecture, "display", shown.append)
    calls = re.findall(r"^lecture\.source\(.*\)$", "\n".join(CELLS), flags=re.MULTILINE)
    for call in calls:
        run(call, lecture=lecture, lopti=lopti)
    texts = [code.data for code in shown]
    assert len(texts) == 4
    assert "difference = (ref_logprobs - logprobs).clamp(-5, 5)\n" in texts[-1]
    for text in texts:
        ast.parse(text.replace("return ", "_ = "))


def test_the_picture_of_the_bounds():
    """With V = 3: at π = 0.5 from √1.5·0.5 to √2·0.5, and every norm lies between the bounds."""
    logits = 3 * torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(200) % 3
    pi = logits.softmax(1).gather(1, ids[:, None])[:, 0]
    norms = lecture.gradient_norm(logits, ids)
    lecture.bounds(pi, norms, vocabulary_size=3)
    area, points = lecture.plt.gca().collections
    x, y = torch.tensor(area.get_paths()[0].vertices).T
    at_half = y[(x - 0.5).abs() < 1e-6]
    assert float(at_half.min()) == pytest.approx(math.sqrt(1.5) * 0.5)
    assert float(at_half.max()) == pytest.approx(math.sqrt(2) * 0.5)
    assert area.get_paths()[0].contains_points(points.get_offsets(), radius=1e-3).all()


def test_the_picture_of_the_clip():
    """Flat: above 1.24 where Â > 0, and below 0.8 where Â < 0; letters on the lines."""
    lecture.clip_cases({"B": (2.22, 1), "C": (0.3, -1)}, CLIPS)
    rises, falls = lecture.plt.gcf().axes
    for axis, end in ((rises, 1.24), (falls, 0.8)):
        flat, sloping, letter, _ = axis.lines
        ratios = flat.get_xdata()
        is_flat = ~numpy.isnan(flat.get_ydata())
        assert (is_flat == numpy.isnan(sloping.get_ydata())).all()
        assert ratios[1:][numpy.diff(is_flat)] == pytest.approx([end], rel=0.01)
        assert letter.get_ydata() == pytest.approx([-1.24 if axis == rises else 0.8])


def test_the_picture_of_a_response():
    """The bars of a line stand on one baseline and are as high as their norms."""
    norms = torch.tensor([1.0, 0.5, 0.25])
    lecture.token_sheet(["a", "b", "c"], torch.tensor([0.1, 0.5, 0.9]), norms, "title", width=5)
    axis = lecture.plt.gcf().axes[0]
    marks = {}
    for place, label in zip(axis.get_yticks(), axis.get_yticklabels()):
        marks[label.get_text()] = place
    bars = axis.patches[1::2]  # every other one is behind a token
    heights = torch.tensor([bar.get_height() for bar in bars])
    torch.testing.assert_close(heights / (marks["1"] - marks["0"]), norms)
    assert [bar.get_facecolor() for bar in bars] == [
        lecture.PROBABILITY(pi) for pi in (0.1, 0.5, 0.9)
    ]
    feet = [bar.get_y() for bar in bars]
    assert feet[0] == feet[1] > feet[2]  # two tokens fit into a line of 5 letters
    assert set(feet) <= set(axis.get_yticks())


def test_small_pictures_keep_their_colours():
    """Tokens of low probability stay orange and those of high probability blue."""
    table = torch.rand(5, 12, generator=torch.Generator().manual_seed(0)) / 10 + 0.93
    table[:, -1] = 0.5
    _, axis = lecture.plt.subplots(figsize=(11, 6))
    axis.imshow(table, cmap="PRGn", vmin=0, vmax=1)  # most cells are pale: few colours are left
    axis.set_title("low", color=lecture.COLORS["low"], weight="bold")
    axis.set_xlabel("high", color=lecture.COLORS["high"], weight="bold")
    small = lecture.small_png(lecture.plt.gcf())
    exact = lecture.print_figure(lecture.plt.gcf(), "png")
    assert len(small) < 0.6 * len(exact)
    pictures = []
    for data in (small, exact):
        pictures.append(torch.tensor(numpy.asarray(Image.open(io.BytesIO(data)).convert("RGB"))))
    small, exact = pictures
    for name in ("low", "high"):
        color = torch.tensor([round(255 * part) for part in to_rgb(lecture.COLORS[name])])
        is_this = (exact == color).all(2)
        assert is_this.any()
        assert (small[is_this].int() - color).abs().max() < 30


# The experiment of section 12 ---------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_the_small_policies(shared):
    """Their first π are those given, and log π, KL and accuracy are those of the logits."""
    torch.manual_seed(0)
    policy = lecture.SmallPolicies(1 / 4, shared, seeds=3)
    pi = policy.log_pi().exp()
    assert pi.shape == (3, 204, 4)
    assert pi[1, 0].tolist() == pytest.approx([0.7, 0.3, 0, 0])
    assert pi[2, 4].tolist() == pytest.approx([0.25] * 4)
    torch.testing.assert_close(policy.kl_and_accuracy(), torch.tensor([[0.0] * 3, [0.7] * 3]))

    with torch.no_grad():
        policy.weights[-1].normal_()
    now = policy.log_pi().exp()
    assert not torch.allclose(now[0], now[1])  # each seed has weights of its own
    assert len(policy.weights) == 1 + shared  # a table, or two layers
    changed = torch.zeros(3, 204, 4)
    changed[:] = now.log().nan_to_num(neginf=0) - pi.log().nan_to_num(neginf=0)
    kl, accuracy = policy.kl_and_accuracy()
    torch.testing.assert_close(kl, (now * changed).sum((1, 2)))
    torch.testing.assert_close(accuracy, now[:, :4, 0].mean(1))

    words, logprobs = policy.sample(500)  # (1500, 204), seed by seed
    assert logprobs[700, 9].item() == pytest.approx(now[1, 9, words[700, 9]].log().item(), abs=1e-5)
    shares = (words[1000:] == 0).double().mean(0)  # of the third seed
    assert (shares - now[2, :, 0]).abs().max() < 0.1
    assert (shares - now[1, :, 0]).abs().max() > 0.3


def test_steps_of_one_norm():
    """The norm is that of all tensors of a seed together; without a gradient there is no step."""
    weights = [torch.zeros(3, 1, 2), torch.zeros(3, 2, 1)]
    optimizer = lecture.NormedDescent(weights, norm=0.5)
    weights[0].grad = torch.tensor([[[3.0, 0.0]], [[0.0, 0.0]], [[30.0, 0.0]]])
    weights[1].grad = torch.tensor([[[0.0], [4.0]], [[0.0], [0.0]], [[0.0], [0.0]]])
    optimizer.step()
    assert weights[0].flatten(1).tolist() == [[pytest.approx(-0.3), 0], [0, 0], [-0.5, 0]]
    assert weights[1].flatten(1).tolist() == [[0, pytest.approx(-0.4)], [0, 0], [0, 0]]


def test_ahead_at_equal_kl():
    """AR is 0.1 and 0.3 ahead where GRPO has a KL of 1, though it gets there in another step."""
    grpo = torch.tensor([[[0.0, 0.0], [0.5, 0.5]], [[2.0, 2.0], [0.7, 0.7]]])  # (steps, 2, seeds)
    ar = torch.tensor(
        [[[0.0, 0.0], [0.5, 0.5]], [[1.0, 1.0], [0.7, 0.9]], [[0.5, 3.0], [0.9, 1.0]]]
    )
    kl, ahead = lecture.ahead_of_grpo({"GRPO": grpo, "AR": ar})
    assert kl[-1] == 1.0
    means, halves = ahead["AR"]
    assert means[-1] == pytest.approx(0.2)
    assert halves[-1] == pytest.approx(12.706 * 0.1, rel=1e-4)  # t of one degree of freedom
    kl, _ = lecture.ahead_of_grpo({"GRPO": grpo, "AR": ar / 2})
    assert kl[-1] == 0.5  # where the run ends that comes least far
    assert lecture.standing([0.9, 0.2], [0, 0.1]) == "ahead"
    assert lecture.standing([0.9, -0.2], [0, 0.1]) == "behind"
    assert lecture.standing([0.9, -0.2], [0, 0.3]) == "level"
    assert lecture.standing([0.9, 0.001], [0, 0]) == "level"


def test_in_the_experiment_help_becomes_harm(monkeypatch):
    """What the text beside the experiment says, with its own cell and three seeds."""
    policies = functools.partial(lecture.SmallPolicies, seeds=3)
    monkeypatch.setattr(lecture, "SmallPolicies", policies)
    names = {"lecture": lecture, "lopti": lopti, "torch": torch, "clips": CLIPS}
    cell = run(cell_that_begins("pi_of_noise = 1 / 8"), **names)

    def make_optimizer(weights):
        return lecture.NormedDescent(weights, norm=0.4)

    final = {}  # accuracy minus GRPO's at a KL of 1
    methods = (*lecture.FOUR_METHODS, "Lopti, pass 1 alone")
    for noise in (1 / 8, 1 / 4, 1 / 3, 1 / 2):
        paths = lecture.train_all(cell["train"], noise, make_optimizer, 60, methods=methods)
        kl, ahead = lecture.ahead_of_grpo(paths)
        assert kl[-1] == 1.0
        final[noise] = {method: means[-1] for method, (means, _) in ahead.items()}
    assert final[1 / 8]["AR"] > 0.01
    assert final[1 / 8]["Lopti"] > 0.02
    assert final[1 / 2]["AR"] < -0.01
    assert final[1 / 2]["Lopti"] < -0.01
    assert final[1 / 4]["AR"] > 0 > final[1 / 3]["AR"]
    assert final[1 / 2]["Lopti, pass 1 alone"] > 0.05
    for ahead in final.values():
        assert ahead["GRPO"] == 0
        assert ahead["GRPO, two epochs"] < ahead["Lopti"]


def test_the_passes_of_the_experiment():
    """Lopti trains on the tokens with π < 0.5 first, and then on the others."""
    trained = []  # for each pass: which tokens have a gradient, and their π

    class Observed(lecture.SmallPolicies):
        def logprobs(self, words):
            logprobs = super().logprobs(words)
            if logprobs.requires_grad:
                pi = logprobs.detach().exp()
                logprobs.register_hook(lambda gradient: trained.append((gradient != 0, pi)))
            return logprobs

    names = {"lecture": lecture, "lopti": lopti, "torch": torch, "clips": CLIPS}
    cell = run(cell_that_begins("pi_of_noise = 1 / 8"), **names)
    torch.manual_seed(0)
    policy = Observed(1 / 8, False, seeds=1)
    cell["train"]("Lopti", policy, lecture.NormedDescent(policy.weights, norm=1e-6), steps=1)
    (low, pi), (high, _) = trained
    has_advantage = (low | high).any(1)[:, None]  # a response of average reward has no gradient
    assert torch.equal(low, (pi < 0.5) & has_advantage)
    assert torch.equal(high, (pi >= 0.5) & has_advantage)
