"""Checks the laboratory: theory, variants, compare.py, diagnose.py, the token page, the lecture.

python -m pytest -q data/lab                # the quick ones
LOPTI_ALL=1 python -m pytest -q data/lab    # also the lecture, run
"""

import ast
import copy
import doctest
import graphlib
import importlib
import itertools
import json
import math
import re
import runpy
import shutil
import sys
import types
import xml.etree.ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
from test_lopti import (  # isort: skip, because it says that no test asks the hub
    FLAGS,
    ROWS,
    TINY,
    TOKENIZER,
    arguments,
    plain_distribution,
    plain_logprobs,
    plain_rows,
    read_jsonl,
    slow,
    spy,
    write_jsonl,
)

import numpy as np
import pytest
import torch

for package in ("matplotlib", "pandas", "scipy", "IPython"):
    pytest.importorskip(package, reason="pip install -r data/lab/requirements.txt")

import compare
import diagnose
import lecture
import pandas
import theory
import tokens as pages
import transformers
import variants
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import lopti

# ------------------------------------------------------------------------------ the token page

LAB = Path(__file__).resolve().parent
PAGE_FLAGS = f"{ROWS} --seed 1 --prompts-per-step 2 --group-size 4 --max-new-tokens 60 --show 1 "


def data_of(path):
    """The data that a page holds."""
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


def page_data(flags, path):
    pages.main([*flags.split(), "--out", str(path)])
    return data_of(path)


def test_the_token_pages_numbers(tmp_path, monkeypatch):
    """Each by hand from the plain distribution; the change of log π from updates of our own."""
    batches, svg = [], tmp_path / "hero.svg"
    spy(monkeypatch, diagnose, "collect", lambda batch, *inputs: batches.append(batch))
    shown = page_data(f"{PAGE_FLAGS} --hero {svg}", tmp_path / "tokens.html")
    rollout, values = batches[0]
    policy, grpo, first = (lopti.load_model(TINY, "cpu")[0] for _ in range(3))
    args, pair = arguments("--mini-batch-size 0"), pages.best_and_worst(values, 4, 1)[0]
    assert values[pair[0]] == values[:4].max() or values[pair[0]] == values[4:].max()
    low = rollout.mask & (rollout.old_logprobs.exp() < 0.5)
    for trained, tokens in ((grpo, rollout.mask), (first, low)):
        lopti.update(trained, lopti.make_optimizer(trained, args), rollout, tokens, args)
    rows, found = plain_rows(rollout), []
    for (prompt, ids), advantages in zip(rows, rollout.advantages):
        pi = plain_distribution(policy, prompt, ids, 1.0).detach().exp()  # (T, V)
        slope = torch.nn.functional.one_hot(ids, len(TOKENIZER)) - pi  # of log π by the logits
        chosen = pi.gather(1, ids[:, None])[:, 0]
        moved = (plain_logprobs(one, (prompt, ids), 1.0).detach() for one in (grpo, first))
        expected = {
            "pi": chosen,
            "weighted_push": (advantages.sum() / len(ids)).abs() * slope.norm(dim=1),
            **{name: x - chosen.log() for name, x in zip(("grpo", "lopti_low"), moved)},
        }
        found.append((expected, [TOKENIZER.batch_decode(x[:, None]) for x in pi.topk(5).indices]))
    for index, answer in zip(pair, shown["prompts"][0]["answers"]):
        expected, likeliest = found[index]
        for name, wanted in expected.items():
            wanted = pytest.approx(wanted.tolist(), rel=1e-3, abs=2e-5)
            assert answer["tokens"][name] == wanted, name
        assert "".join(answer["texts"]) == TOKENIZER.decode(rows[index][1])
        assert [[name for name, *_ in top[:5]] for top in answer["likeliest"]] == likeliest
    every = {name: torch.cat([expected[name] for expected, _ in found]) for name in found[0][0]}
    low = every["pi"] < 0.5
    shares = low.float().mean(), every["weighted_push"][low].sum() / every["weighted_push"].sum()
    assert [*shown["shares"].values()] == pytest.approx([100 * float(x) for x in shares], abs=0.05)

    text = svg.read_text(encoding="utf-8")  # the picture has the first answer's bars, by π
    root = xml.etree.ElementTree.fromstring(text)
    assert not [node.tag for node in root.iter() if node.tag.endswith(("script", "image"))]
    one = found[pair[0]][0]
    pi, order = one["pi"].sort()
    heights = 116 * one["weighted_push"][order] / one["weighted_push"].max()
    drawn = r'"(low|high)" .*d="M([\d.]+) 206v-([\d.]+)h.*206v-([\d.]+)h'
    kinds, *bars = zip(*re.findall(drawn, text))
    assert [kind == "low" for kind in kinds] == (pi < 0.5).tolist()
    for numbers, wanted in zip(bars, (19 + 592 * pi, heights, heights * (0.3 * pi + 0.7))):
        assert [*map(float, numbers)] == pytest.approx(wanted.tolist(), abs=0.1)
    share = 100 * heights[pi < 0.5].sum() / heights.sum()
    said = f"a step on the {int((pi < 0.5).sum())} unlikelytokens, {share:.0f} % of the push"
    assert said in "".join(root.itertext())


def test_page_and_picture_on_record_are_of_one_run():
    results = LAB / "results"
    drawn = pages.hero(data_of(results / "tokens.html"))
    assert (results / "hero.svg").read_text(encoding="utf-8") == drawn


def test_what_is_given_is_taken(tmp_path):
    """An explicit 0 is 0; what the page cannot show is refused at once."""
    shown = page_data(f"{PAGE_FLAGS} --alpha 0 --eta 0 --show 0", tmp_path / "page.html")
    assert (shown["settings"]["alpha"], shown["settings"]["eta"]) == (0, 0)
    (prompt,) = shown["prompts"]
    for answer in prompt["answers"]:  # then AR is GRPO, and Lopti has no first pass
        assert answer["tokens"]["ar"] == answer["tokens"]["grpo"] == answer["tokens"]["lopti"]
        assert not any(answer["tokens"]["lopti_low"])
    for flags in (
        "--eval-only",
        "--stapo",
        "--min-p=0.1",
        "--output x",
        "--passes 2",
        "--eta 0 --name a",
    ):
        with pytest.raises(lopti.UserError, match=f"not --{flags.split('--')[-1].split()[0]}"):
            pages.main(flags.split())


def test_no_picture_of_a_group_that_teaches_nothing():
    answer = {"advantage": 0.0}
    data = {"prompts": [{"answers": [answer, answer]}], "settings": {"eta": 0.5, "alpha": 0.3}}
    with pytest.raises(lopti.UserError, match="no answer is better"):
        pages.hero(data)


def test_no_text_of_a_model_or_a_file_breaks_the_page(tmp_path, capsys):
    """HTML in a prompt and a solution, no chat template, a truncated answer of one token."""
    html = "</script><b>&amp; <!--"
    rows = [{"problem": html + name, "answer": html} for name in "abcd"]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    folder = Path(shutil.copytree(TINY, tmp_path / "base"))
    (folder / "chat_template.jinja").unlink()
    flags = f"--task math --data {data} --model {folder} --max-new-tokens 1 --group-size 2"
    prompt, *_ = page_data(flags, tmp_path / "page.html")["prompts"]
    assert html in prompt["text"] and prompt["solution"] == html
    assert [len(answer["texts"]) for answer in prompt["answers"]] == [1, 1]
    missing = lambda: pages.main(["--model", str(tmp_path / "nothing")])
    assert lopti.exit_code(missing, "tokens.py") == 2
    assert capsys.readouterr().err.startswith("tokens.py: cannot load --model")


# ------------------------------------------------------------------------------ the programs


def imports_of(file):
    """The modules that a file imports, in its order; last those that its functions import."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


def test_no_circle_among_the_imports():
    graph = {file.stem: {*imports_of(file)} for file in LAB.glob("*.py")}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


@pytest.mark.parametrize("folder", ["lab", "make", "ports"])
def test_lopti_comes_before_torch(folder):
    """lopti.py says how threads wait before torch is imported, and what verl starts is verl's."""
    files = [file for file in (ROOT / "data" / folder).glob("*.py") if file.stem != "test_lab"]
    for file in files:
        names = [name for name in imports_of(file) if name not in sys.stdlib_module_names]
        if "torch" in names and not file.stem.startswith("verl"):
            assert names[0] == "lopti", file


@pytest.mark.parametrize("program", [compare, diagnose, pages])
def test_help_says_what_a_program_does_and_touches_nothing(program, monkeypatch, capsys):
    def run(*flags):
        monkeypatch.setattr(sys, "argv", [program.__name__, *flags])
        with pytest.raises(SystemExit) as stop:
            program.main()
        return stop.value.code

    monkeypatch.setattr(Path, "write_text", lambda *_, **__: pytest.fail("wrote"))
    assert run("--help") == 0 and program.__doc__.split("\n")[0] in capsys.readouterr().out


def test_compare_refuses_in_one_sentence(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    for flags, said in {
        "--seeds 0-1 --jbos": "two methods or more",
        "--seeds 0-1 --rates 1 2 --eta=0.5 --stapo": "--rates needs --rate-seeds",
        "--seeds 0-4 --rates 1 2 --rate-seeds 4 --eta=0.5 --stapo": "--seeds has none of these",
        "--seeds 0-4 --eta=0.5 --stapo wrong": "each in quotation marks",
    }.items():
        monkeypatch.setattr(sys, "argv", ["compare.py", *flags.split()])
        with pytest.raises(SystemExit):
            compare.main()
        assert said in capsys.readouterr().err
    assert not any(tmp_path.iterdir()) and compare.numbers("0-2,7") == [0, 1, 2, 7]


# ------------------------------------------------------------------------------ compare.py


def line_of(kl_of_step, lead, held_out):
    """A line of results: accuracy is 5 times the KL plus `lead`; a first evaluation far above."""
    kl = kl_of_step * np.arange(9)
    of_size = lambda x: {"prompts": 9, "greedy": [0.9, 0, 1], "avg@4": [x, 0, 1]}
    after = {"2": of_size(held_out - 0.1), "3": of_size(held_out + 0.1)}
    evaluations = [{"step": 0, "table": {"2": of_size(9.0)}}, {"step": 8, "table": after}]
    metrics = {"accuracy": (5 * kl + lead).tolist(), "rollout/kl": kl.tolist()}
    return {"flags": "--some", "evaluations": evaluations, "metrics": metrics}


def test_the_table_of_compare():
    """By hand. By step GRPO has .05 · 4.5, as the first step does not count, twice the KL .45.

    Leads of .01, .02, .03 are .02 ± 4.303 · .01/√3, and p is 1 - t/√(t² + 2) for three seeds.
    """
    leads = {0: 0.01, 1: 0.02, 2: 0.03}
    runs = {
        "GRPO": {seed: line_of(0.01, 0.0, 0.5) for seed in (2, 1, 0, 9)},
        "far": {seed: line_of(0.02, lead, 0.6) for seed, lead in {7: 5.0, **leads}.items()},
        "near": {seed: line_of(0.01, lead, 0.5) for seed, lead in leads.items()},
    }
    args = types.SimpleNamespace(judge=None, kl=(0.0, math.inf))
    made = compare.table(runs, ["GRPO"], args).T.to_dict("list")
    assert made == {
        "GRPO": [4, "0.225 ± 0.000", "–", "0.500 ± 0.000", "0.080 ± 0.000"],
        "far": [4, made["far"][1], "–", "0.600 ± 0.000", "0.160 ± 0.000"],
        "near": [3, "0.245 ± 0.025", "–", "0.500 ± 0.000", "0.080 ± 0.000"],
        "far − GRPO": [
            3,
            "+0.245 ± 0.025, p 0.001",  # Holm: .00055 · 2
            "+0.020 ± 0.025, p 0.148",  # .0742 · 2
            "+0.100 ± 0.000, p 0.000",
            "+0.080 ± 0.000",
        ],
        "near − GRPO": [
            3,
            "+0.020 ± 0.025, p 0.074",
            "+0.020 ± 0.025, p 0.148",
            "+0.000 ± 0.000, p 1.000",
            "+0.000 ± 0.000",
        ],
    }
    both = compare.table(runs, ["GRPO", "near"], args)
    assert list(both.index[3:]) == ["far − GRPO", "near − GRPO", "far − near"]
    assert both.loc["far − near", "by step"] == "+0.225 ± 0.000, p 0.000"
    p_values = pandas.Series([0.04, 0.01, 0.02, 0.05, 0.03])
    corrected = compare.holm(p_values).sort_index().tolist()
    assert corrected == pytest.approx([0.09, 0.05, 0.08, 0.09, 0.09])
    one = compare.table({name: {0: lines[0]} for name, lines in runs.items()}, ["GRPO"], args)
    assert one.loc["far − GRPO"].tolist() == [1, "+0.235", "+0.010", "+0.100", "+0.080"]
    runs["no KL"] = {seed: line_of(0.0, 0.1, 0.5) for seed in leads}
    no_kl = compare.table(runs, ["GRPO"], args).loc["no KL − GRPO"]
    assert no_kl["at equal KL"] == no_kl["KL at the end"] == "–"
    args.judge = [4, 8]
    with pytest.raises(SystemExit, match="no evaluation at step 4 with --some"):
        compare.table(runs, ["GRPO"], args)


def test_the_picture_of_compare(tmp_path):
    """The mean over seeds, from the middle of five steps on; of what has not finished, no line."""
    lines = {seed: line_of(0.01, 0.2 * seed, 0.5) for seed in (0, 1)}
    compare.draw({"GRPO": lines, "later": {}}, tmp_path / "picture.png")
    drawn, empty = compare.plt.gca().lines
    assert drawn.get_xdata().tolist() == [3, 4, 5, 6, 7] and not len(empty.get_xdata())
    assert drawn.get_ydata().tolist() == pytest.approx([0.2, 0.25, 0.3, 0.35, 0.4])
    assert (tmp_path / "picture.png").exists()
    compare.plt.close()


def test_compare_goes_on_and_chooses_rates(monkeypatch, tmp_path, capsys):
    """Runs that learn best at 4e-4, beyond the grid; the first is stopped, and then goes on."""
    monkeypatch.chdir(tmp_path)
    commands = []

    def run(command, **_):
        words = list(map(str, command[2:]))
        commands.append((Path(command[1]).name, words))
        if "--resume" in words:
            folder, rate = Path(words[-1]), 4e-4
        else:
            folder = Path(words[-1]) / words[words.index("--name") + 1]
            rate = float(words[len(words) - words[::-1].index("--learning-rate")])
            folder.mkdir(parents=True)
        stopped = len(commands) == stop_at
        (folder / "checkpoint.pt").write_text("weights")
        if not stopped:
            (folder / "final").mkdir()
        metrics = dict.fromkeys(compare.METRICS, -abs(math.log(rate / 4e-4)))
        (folder / "metrics.jsonl").write_text(9 * (json.dumps(metrics) + "\n"))
        row = {"step": 9, "table": {"2": {"prompts": 1, "greedy": [0.123456, 0, 1]}}}
        (folder / "evaluations.jsonl").write_text(json.dumps(row) + "\n")
        return types.SimpleNamespace(returncode=130 * stopped, stderr="lopti.py: stopped\n")

    monkeypatch.setattr(compare.subprocess, "run", run)
    flags = ["--seeds", "0-1", "--rates", "1e-4", "2e-4", "--rate-seeds", "90", "--rate-steps", "3"]
    method = "--variant oracle --only 'a b'"
    monkeypatch.setattr(sys, "argv", ["compare.py", *flags, "", method, "--", "--people", "2"])
    stop_at = 12  # rates of two methods: 1e-4, 2e-4, 4e-4, 8e-4; then four runs, this one's last
    compare.main()
    told = capsys.readouterr().out
    assert told.count("best at 0.0004 of [0.0001, 0.0002, 0.0004, 0.0008]\n") == 2
    assert re.search(r"of 4: --people 2 --variant oracle .*, seed 1: .*lopti.py: stopped\n", told)
    assert [name for name, _ in commands] == ["lopti.py"] * 4 + ["variants.py"] * 4 + [
        "lopti.py",
        "variants.py",
    ] * 2
    own = ["--variant", "oracle", "--only", "a b"]
    assert commands[4][1][:6] == ["--people", "2", *own]
    assert "--steps" in commands[0][1] and "--steps" not in commands[8][1]
    compare.main()
    assert len(commands) == 13 and commands[12][1][:5] == [*own, "--resume"]
    made = capsys.readouterr().out.splitlines()
    compare.main()  # from the results alone
    assert len(commands) == 13 and [*made[:2], *made[3:]] == capsys.readouterr().out.splitlines()
    assert "0.123" in made[4] and not list(tmp_path.glob("runs/compare/*/[cf]*"))
    assert len(read_jsonl(tmp_path / "runs" / "compare" / "results.jsonl")) == 12


# ---------------------------------------------------------- the theory, and what diagnose.py says


def binary_world(p, decisions, words, synonyms, responses, batches=500):
    """Sampled gradients (batches, P): of unlikely tokens (wrong ones, words), of likely ones."""
    torch.manual_seed(0)
    right = (torch.rand(batches * responses, decisions) < p).float()
    said = torch.randint(synonyms, (batches * responses, words))
    said = torch.nn.functional.one_hot(said, synonyms).flatten(1) - 1 / synonyms
    advantages = lopti.group_advantages(right.sum(1), responses)[:, None]
    pairs = right * (1 - p), (right - 1) * p  # ∇ log π at the logit of right; of wrong: minus it
    scores = [torch.cat([pair, -pair], 1) for pair in pairs] + [said]
    means = [(advantages * x).view(batches, responses, -1).mean(1) for x in scores]
    return torch.cat(means[1:], 1), torch.cat([means[0], 0 * means[2]], 1)


@pytest.mark.parametrize("p, words, synonyms", [(0.8, 0, 8), (0.6, 100, 8), (0.9, 100, 3)])
def test_the_gain_of_a_split_in_the_binary_world(p, words, synonyms):
    """Lopti's two steps over GRPO's on sampled groups; without words all is parallel."""
    unit = lambda x: (x[:, :10] - x[:, 10:20]).sum(1) / x.norm(dim=1)
    low, high = binary_world(p, 10, words, synonyms, 64)
    low_2, high_2, both = (
        (x * y).sum(1).mean() for x, y in ((low, low), (high, high), (low, high))
    )
    cosine, phi = float(both / (low_2 * high_2).sqrt()), math.atan((high_2 / low_2).sqrt())
    assert words or cosine == pytest.approx(1)
    gain, length = theory.split_gain(1 - p, phi, cosine), (2 + 2 * cosine) ** 0.5
    plain = unit(low + high).mean()
    assert (unit(low) + unit(high)).mean() / plain / length == pytest.approx(gain, rel=0.01)


def test_what_ar_can_gain_at_most():
    """1/(1-α), and nearly that where π ≈ 1 has all the signal and π ≈ 0 the energy."""
    torch.manual_seed(0)
    for alpha in (0.1, 0.3, 0.9):
        gains = []
        for pi, signals, energies in torch.rand(500, 3, 8) ** torch.tensor([[4.0], [9.0], [9.0]]):
            progress = [theory.unit_progress(pi, signals, energies, x) for x in (alpha, 0.0)]
            gains.append(float(progress[0] / progress[1]))
        gains.append(
            theory.unit_progress(*torch.tensor([[0.999, 0.0], [1, 0], [1e-4, 1]]), alpha)
            / theory.unit_progress(*torch.tensor([[0.999, 0.0], [1, 0], [1e-4, 1]]))
        )
        assert max(gains) < 1 / (1 - alpha) and gains[-1] == pytest.approx(
            1 / (1 - alpha), rel=0.01
        )


def test_drift_of_adamw_that_alternates():
    """AdamW itself, on 2000 batches of correlated stages."""
    torch.manual_seed(0)
    shared, low, high = torch.randn(3, 2000, 20) + torch.randn(3, 1, 20)
    for stages in ([shared + low], [low, high], [shared + low, shared], [shared + low] * 2):
        weights = torch.zeros(20, requires_grad=True)
        optimizer = torch.optim.AdamW([weights], lr=1 / 2000, weight_decay=0.0)
        for gradient in torch.stack(stages, 1).flatten(0, 1):
            weights.grad = -gradient
            optimizer.step()
        means, squares = [g.mean(0) for g in stages], [(g**2).mean(0) for g in stages]
        drift = theory.adam_drift(means, squares)
        assert weights.tolist() == pytest.approx(drift.tolist(), abs=0.03)


def tabular_world():
    """Two steps of three actions; the second state is by the first action. V(s) is not 0.

    Logits (4, 3), the Â of all responses (9,), Q (4, 3), V (4,), chances of the states (4, 1).
    """
    torch.manual_seed(0)
    logits, advantages = torch.randn(4, 3).double(), torch.randn(9).double()
    pi, later = logits.softmax(1), advantages.view(3, 3)
    values = torch.cat([(pi[1:] * later).sum(1)[None], later])
    visits = torch.cat([torch.ones(1), pi[0]])[:, None]
    return logits, advantages, values, (pi * values).sum(1), visits


def moments(logits, advantages, alpha=0.0, eta=0.0, stage="all", mass=None, now=None):
    """E g (4, 3) and E‖g‖² over all responses, by `lopti`, less that of Â Σ mass; π_θ is `now`."""
    now = (logits if now is None else now).clone().requires_grad_()
    mean, energy = 0, 0
    for number, advantage in enumerate(advantages):
        first, second = divmod(number, 3)
        states, actions = [0, 1 + first], [first, second]
        old, new = (z.log_softmax(1)[states, actions][None] for z in (logits, now))
        mask = torch.ones_like(old, dtype=torch.bool)
        low, high = lopti.split_tokens(old, mask, eta)
        tokens = {"all": mask, "low": low, "high": high}[stage]
        weighted = lopti.reweight_advantages(advantage.expand(1, 2), old, alpha)
        loss, _ = lopti.policy_loss(new, old, weighted, tokens, normalizer=1)
        loss = loss + (advantage * mass(now)[states].sum() if mass else 0)
        [gradient] = torch.autograd.grad(-loss, now)
        mean = mean + old.sum().exp() * gradient
        energy = energy + old.sum().exp() * gradient.square().sum()
    return mean, energy


def masses(logits, *weights):
    """Σ_a m(a) π(a) of each state, from `variants.bias_correction` with Â = 1."""
    return torch.stack([variants.bias_correction(z[None], torch.ones(1), *weights) for z in logits])


def slope_of(logits, factors):
    """Σ_a f(a)·∇π(a) = π∘(f - Σ_a f(a)π(a)), f held fixed."""
    pi = logits.softmax(-1)
    return pi * (factors - (factors * pi).sum(-1, keepdim=True))


BIASED = [(1.0, 0.0, "all"), (0.3, 0.0, "all"), (0.0, 0.35, "low"), (0.3, 0.35, "high")]


@pytest.mark.parametrize("alpha, eta, stage", BIASED)
def test_the_bias_of_a_weight(alpha, eta, stage):
    """The expected gradient, exactly: with the bias, without, after a step; and the variance."""
    logits, advantages, values, value, visits = tabular_world()
    world, pi = (logits, advantages, alpha, eta, stage), logits.softmax(1)
    weights = (1 - alpha * (1 - pi)) * {"all": pi >= 0, "low": pi < eta, "high": pi >= eta}[stage]
    mass = lambda z: (weights * z.softmax(1)).sum(1)
    current = lambda z: masses(z, alpha, eta, stage)
    bias_of = lambda weights: value[:, None] * slope_of(logits, weights)
    bias, total = bias_of(weights), lambda z: (value * mass(z)).sum()
    steps = 1e-6 * torch.eye(12).double().view(12, 4, 3)
    slopes = [float(total(logits + step) - total(logits - step)) / 2e-6 for step in steps]
    assert bias.flatten().tolist() == pytest.approx(slopes)
    other = bias_of(1 - alpha * (1 - pi) - weights)
    assert (bias + other - bias_of(alpha * pi)).abs().max() < 1e-12
    signal = lambda z: visits * slope_of(z, weights * (values - value[:, None]))
    assert (moments(*world, current)[0] - signal(logits)).abs().max() < 1e-12
    assert (moments(*world)[0] - signal(logits) - visits * bias).abs().max() < 1e-12
    assert bias.abs().max() > 0.01
    now = logits + 0.1 * signal(logits) / signal(logits).norm()  # later mini-batches: m of π_old,
    left = [(moments(*world, one, now)[0] - signal(now)).norm() for one in (mass, current)]
    assert left[0] < 1e-12 < left[1] < 0.1 * (visits * bias).norm()  # or of π_θ: nearly
    world = (logits, advantages.sign(), *world[2:])  # where Â² = 1 the energy falls:
    lower = (visits * slope_of(logits, weights) ** 2).sum()
    assert float(moments(*world)[1] - moments(*world, mass)[1]) == pytest.approx(float(lower))


def test_the_condition_for_ar():
    """The derivative of log unit progress at α = 0, with the bias and without, by enumeration.

    Without it E_s[π] - E_v[π] changes by noise/Σv - bias/Σs, bias = Σ_states V·⟨∇J, ½∇Σπ²⟩ and
    noise = Σ_states ⟨E[Â²∇log π | state], ½∇Σπ²⟩, which is 0 where Â² is the same for all tokens.
    """
    logits, advantages, values, value, visits = tabular_world()
    slope, pi, later = moments(logits, advantages)[0], logits.softmax(1), advantages.view(3, 3) ** 2
    scores = torch.eye(3) - pi[:, None]  # ∇ log π: (states, actions, logits)
    squares = torch.cat([(pi[1:] * later).sum(1)[None], later])  # E[Â² | s, a]
    signals = visits * pi * values * (scores * slope[:, None]).sum(2)
    energies = visits * pi * squares * scores.square().sum(2)
    sharper = slope_of(logits, pi)  # ∇½Σπ²
    bias = (visits * value[:, None] * slope * sharper).sum()
    noise = (visits * slope_of(logits, squares) * sharper).sum()

    def progress(alpha, corrected):
        mass = (lambda z: masses(z, alpha, 0.0)) if corrected else None
        mean, energy = moments(logits, advantages, alpha, mass=mass)
        return float((mean * slope).sum() / energy.sqrt())

    found = theory.unit_progress(pi, signals, energies, alpha=0.5)
    assert float(found) == pytest.approx(progress(0.5, False))
    change = noise / energies.sum() - bias / signals.sum()
    for corrected, more in ((False, 0.0), (True, change)):
        found = math.log(progress(1e-5, corrected) / progress(-1e-5, corrected)) / 2e-5
        criterion = theory.reweighting_criterion(pi, signals, energies) + more
        assert float(criterion) == pytest.approx(found, rel=1e-4)


SMALL_BATCH = f"{ROWS} --prompts-per-step 2 --max-new-tokens 24 --dtype float32".split()


def test_the_update_without_bias():
    """Gradient descent along Eq. 1 and the correction, in one piece for each mini-batch."""
    args = lopti.parse_arguments([*SMALL_BATCH, "--alpha", "0.9", "--eta", "0.4", "--kl-coef", "0"])
    args.mini_batch_size, args.max_grad_norm, args.tokens_per_microbatch = 9, 1e9, 200
    policy, tokenizer = lopti.load_model(args.model, "cpu")
    batch, _ = diagnose.collect(policy, tokenizer, lopti.load_data(args, tokenizer)[0][:2], args)
    raw = torch.randn(len(batch.mask), 1) * batch.mask
    batch.advantages = lopti.reweight_advantages(raw, batch.old_logprobs, args.alpha)
    trained = copy.deepcopy(policy)
    for name, tokens in zip(
        ("low", "high"), lopti.split_tokens(batch.old_logprobs, batch.mask, args.eta)
    ):
        before = copy.deepcopy(trained)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        totals = variants.update_without_bias(trained, optimizer, batch, tokens, args)
        assert totals["optimizer_steps"] == 2
        for rows in torch.arange(16).split(9):
            part, mask = batch.rows(rows), batch.rows(rows).mask
            logits = lopti.token_logits(before, part.ids, mask, 1.0)
            chosen = tokens[rows, : mask.shape[1]]
            loss, _ = lopti.policy_loss(
                lopti.token_logprobs(logits, part.ids, mask),
                part.old_logprobs,
                part.advantages,
                chosen,
                normalizer=mask.sum(),
            )
            at = raw[rows, : mask.shape[1]][mask]
            loss = loss + variants.bias_correction(logits, at, 0.9, 0.4, name) / mask.sum()
            optimizer = torch.optim.SGD(before.parameters(), lr=0.1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for ours, theirs in zip(trained.parameters(), before.parameters()):
            assert torch.allclose(ours, theirs, atol=1e-6)


def test_the_oracles_tokens():
    """The first word, all but two words; with a space in a token, and with words as tokens."""
    byte_level = Tokenizer(WordLevel({"Yes": 0, ".": 1, "ĠYes": 2, "Ġshe": 3, "ĠĠ": 4}))
    byte_level.decoder = decoders.ByteLevel()
    byte_level = PreTrainedTokenizerFast(tokenizer_object=byte_level)
    ids, mask = (
        torch.tensor([[2, 0, 1, 3, 2], [0, 4, 2, 3, 1]]),
        torch.tensor([[0, 1, 1, 1, 1]] * 2),
    )
    first = variants.matching(ids, mask > 0, byte_level, r"^\W*\w+")
    assert first.int().tolist() == [[0, 1, 0, 0, 0], [0, 1, 1, 0, 0]]
    words = "Say Ava-knave says ok Suppose fine"
    ids = TOKENIZER(words, return_tensors="pt")["input_ids"]
    pattern = r"\b(?!(ok|fine)\b)\w+"
    matched = variants.matching(ids, torch.ones_like(ids) > 0, TOKENIZER, pattern)
    assert TOKENIZER.decode(ids[matched]).split() == ["Say", "Ava-knave", "says", "Suppose"]
    assert not variants.matching(ids, torch.zeros_like(ids) > 0, TOKENIZER, ".").any()


def test_sampling_by_one_call_of_generate(monkeypatch, tmp_path):
    """`--variant plain-sampling` trains from its flags to its end."""
    monkeypatch.setattr(lopti, "STRETCH", lopti.STRETCH)  # which the variant sets
    flags = [*FLAGS.split(), "--steps", "1", "--output", str(tmp_path), "--name", "plain"]
    monkeypatch.setattr(sys, "argv", ["variants.py", "--variant", "plain-sampling", *flags])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(variants.__file__, run_name="__main__")
    assert lopti.STRETCH > 10**8 and (tmp_path / "plain" / "final").exists()


def test_a_random_split_has_the_sizes_of_lopti():
    torch.manual_seed(0)
    mask, pi = torch.rand(4, 30) < 0.8, torch.rand(4, 30)
    first, rest = variants.random_split(pi.log(), mask, 0.3)
    assert first.sum() == ((pi < 0.3) & mask).sum() and (first != (pi < 0.3) & mask).any()
    assert torch.equal(first | rest, mask) and not (first & rest).any()


def test_diagnose_gradients_against_autograd_and_as_sketches():
    """Pieces add up, Eq. 4's part, biases: response by response. Sketches within their error."""
    torch.manual_seed(0)
    args = lopti.parse_arguments([*SMALL_BATCH, "--eta", "0.4", "--temperature", "0.8"])
    policy, tokenizer = lopti.load_model(args.model, torch.device("cpu"))
    batch, _ = diagnose.collect(policy, tokenizer, lopti.load_data(args, tokenizer)[0][:2], args)
    batch.advantages, terms = torch.randn(len(batch.mask), 1) * batch.mask, 0.0
    rows, entries = diagnose.gradients(policy, batch, args)
    for ids, mask, advantages in zip(batch.ids, batch.mask, batch.advantages):
        pi = (policy(ids[None]).logits[0, mask.roll(-1)].double() / 0.8).softmax(-1)
        old, one_hot = pi.detach(), torch.nn.functional.one_hot(ids[mask], pi.shape[1])
        logs = (pi.log() * one_hot).sum(1)
        by_pi = (logs * (old * one_hot).sum(1)).sum()
        biases = (old * pi).sum(), (pi * (old >= 0.4)).sum()
        sums = torch.stack([logs.sum(), by_pi, *biases])
        terms = terms + advantages.sum() / mask.sum() * sums
    for term, row in zip(terms / batch.mask.sum(), [rows[:5].sum(0), *rows[5:]]):
        slopes = torch.autograd.grad(term, list(policy.parameters()), retain_graph=True)
        slope = torch.cat([part.flatten() for part in slopes])
        assert (row - slope).norm() <= 1e-4 * slope.norm()
    assert len(rows) == 5 + 3
    sketches, same_entries = diagnose.gradients(policy, batch, args, exact=False)
    assert torch.equal(entries, same_entries) and entries.shape[1] <= diagnose.ENTRIES
    exact, dots = (diagnose.inner_products(x[None])[0, :, 0] for x in (rows, sketches))
    squares = np.outer(exact.diagonal(), exact.diagonal()) + exact**2
    assert (abs(dots - exact) < 5 * (squares / diagnose.BUCKETS) ** 0.5).all()


def test_diagnose_measures_unit_steps_and_says_it_in_words(monkeypatch):
    """Four pieces of π, Σ Â π ∇log π, two biases: of random vectors, step by step."""
    torch.manual_seed(0)
    vectors = torch.randn(6, 7, 20, dtype=torch.float64) + 1
    args, ones = lopti.parse_arguments(["--eta", "0.5", "--alpha", "0.3"]), np.ones((6, 4))
    numbers = diagnose.inner_products(vectors), ones, args
    found = diagnose.gradient_statistics(*numbers, list(range(6)))
    low, high, by_pi, bias = (
        vectors[:, :2].sum(1),
        vectors[:, 2:4].sum(1),
        vectors[:, 4],
        vectors[:, 5],
    )
    unit, grpo = torch.nn.functional.normalize, low + high
    ar = 0.7 * grpo + 0.3 * by_pi
    steps = [unit(x) for x in (grpo, ar, ar - 0.3 * bias)] + [unit(unit(low) + unit(high))]
    others = (grpo.sum(0) - grpo) / 5
    plain, *gains = ((step * others).sum(1).mean() for step in steps)
    gains = [float(100 * (gain / plain - 1)) for gain in gains]
    assert found["gain in %, measured"][1] == pytest.approx(gains[0])
    assert found["gain in %, measured, without the bias"][1] == pytest.approx(gains[1])
    assert found["an optimizer for each pass"][1] == pytest.approx(gains[2])
    pairs = list(itertools.permutations(range(6), 2))
    signal = lambda x: sum(float(x[i] @ grpo[j]) for i, j in pairs)
    by_energy = float((grpo * by_pi).sum() / (grpo**2).sum())
    by_signal = signal(by_pi) / signal(grpo)
    wanted = [by_signal, by_energy, by_signal - by_energy]
    assert found["mean π"].tolist() == pytest.approx(wanted)
    found |= diagnose.adam_statistics(vectors, args, range(6))
    steps = (grpo, ar, ar - 0.3 * bias)
    sums = torch.zeros(3, 2, dtype=torch.float64)  # of each: progress and length
    for i, rest in enumerate(itertools.combinations(reversed(range(6)), 5)):
        for number, step in enumerate(steps):
            drift = step[list(rest)].mean(0) / step[list(rest)].square().mean(0).sqrt()
            sums[number] += torch.stack([drift @ grpo[i], drift.norm()])
    per_length = sums[:, 0] / sums[:, 1]
    expected = (100 * (per_length / per_length[0] - 1)).tolist()
    assert found["gain in %, AdamW"][1] == pytest.approx(expected[1])
    assert found["gain in %, AdamW, without the bias"][1] == pytest.approx(expected[2])
    found["moves π ≥ .75 (an update on all: 1)"] = np.ones(3)
    page = diagnose.page({name: np.array([x, 0 * x + 1]) for name, x in found.items()}, args)
    assert " ".join(page.split()).count("reward than GRPO (95 % interval: ") == 4
    assert re.search(r"α = 0.1 +α = 0.3 +α = 1\n", page)
    assert "first step does not predict a training at a large α" in page
    said = dict(found, ratio=np.nan, **{"an optimizer for each pass": np.full(2, np.nan)})
    page = diagnose.page({name: np.array([x, 0 * x + 1]) for name, x in said.items()}, args)
    assert "Not decided: no token is likely" in page and "on one side of η = 0.5" in page
    assert not re.search(r"nan|\d{6}", page)
    monkeypatch.setattr(lopti, "compute_rewards", lambda texts, *_: [0.0] * len(texts))
    with pytest.raises(lopti.UserError, match="only 0 of 3 mini-batches have .*0 % of the ans"):
        diagnose.main([*SMALL_BATCH, "--batches", "3"])


def test_no_likely_token_is_said_in_words():
    """Lengths of nothing are not divided by."""
    vectors = torch.randn(6, 7, 20, dtype=torch.float64)
    vectors[:, 2:4] = 0.0  # π ≥ .5
    args = lopti.parse_arguments(["--eta", "0.5", "--alpha", "0"])
    numbers = diagnose.inner_products(vectors), np.ones((6, 4)), args
    found = diagnose.gradient_statistics(*numbers, list(range(6)))
    assert math.isnan(found["ratio"]) and math.isnan(found["an optimizer for each pass"][0])
    assert found["gain in %, measured"][0] == pytest.approx(0)  # α = 0 is GRPO


def test_diagnose_refuses_in_one_sentence(monkeypatch):
    """What it cannot do; with what would mend it."""
    rewards = lambda texts, *_: [float(i % 2) for i in range(len(texts))]
    monkeypatch.setattr(lopti, "compute_rewards", rewards)
    with pytest.raises(lopti.UserError, match="take more --batches"):
        diagnose.main([*SMALL_BATCH, "--batches", "1", "--max-new-tokens", "2"])


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen2Moe"])
def test_diagnose_a_mixture_of_experts(kind, tmp_path, capsys, monkeypatch):
    """From its flags to the page; one answer of each group is right."""
    sizes = {"vocab_size": 308, "hidden_size": 16, "num_hidden_layers": 1, "eos_token_id": 1}
    sizes |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2)
    sizes |= {"num_local_experts": 4, "num_experts": 4, "pad_token_id": 0, "bos_token_id": None}
    sizes |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 8)
    config = getattr(transformers, f"{kind}Config")(intermediate_size=8, **sizes)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    rewards = lambda texts, *_: [float(i % 8 == 0) for i in range(len(texts))]
    monkeypatch.setattr(lopti, "compute_rewards", rewards)
    flags = ["--model", str(tmp_path), "--batches", "4", "--solved-reward", "1"]
    diagnose.main([*SMALL_BATCH, *flags])
    page = capsys.readouterr().out
    assert "4 mini-batches of 16 answers, 12 % of the answers right" in page
    assert "Not decided: no token is likely" in page and "nan" not in page


@pytest.mark.parametrize("module", ["theory", "variants"])
def test_examples_in_docstrings(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted and not result.failed
