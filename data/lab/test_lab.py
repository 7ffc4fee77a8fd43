"""Checks the laboratory: theory, worlds, diagnose.py, the tables, the token page, the lecture.

python -m pytest -q data/lab                # the quick ones
LOPTI_ALL=1 python -m pytest -q data/lab    # also the tables and the lecture
"""

import ast
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

import analysis
import diagnose
import experiments
import lecture
import pretrain
import theory
import tokens as pages
import transformers
import world
from scipy import stats
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from variants import puzzles

import lopti

# ------------------------------------------------------------------------------ the token page

LAB = Path(__file__).resolve().parent
PAGE_FLAGS = "--people 2 --prompts-per-step 2 --group-size 4 --max-new-tokens 60 --show 1 "


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
    data = write_jsonl(tmp_path / "rows.jsonl", [{"problem": html, "answer": html}])
    folder = Path(shutil.copytree(TINY, tmp_path / "base"))
    (folder / "chat_template.jinja").unlink()
    flags = f"--task math --data {data} --model {folder} --max-new-tokens 1 --group-size 2"
    (prompt,) = page_data(flags, tmp_path / "page.html")["prompts"]
    assert prompt["text"] == prompt["solution"] == html
    assert [len(answer["texts"]) for answer in prompt["answers"]] == [1, 1]
    missing = lambda: pages.main(["--model", str(tmp_path / "nothing")])
    assert lopti.exit_code(missing, "tokens.py") == 2
    assert capsys.readouterr().err.startswith("tokens.py: cannot load the model")


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


@pytest.mark.parametrize("program", [analysis, diagnose, experiments, pages, world])
def test_help_says_what_a_program_does_and_touches_nothing(program, monkeypatch, capsys):
    def run(*flags):
        monkeypatch.setattr(sys, "argv", [program.__name__, *flags])
        with pytest.raises(SystemExit) as stop:
            program.main()
        return stop.value.code

    monkeypatch.setattr(Path, "write_text", lambda *_, **__: pytest.fail("wrote"))
    assert run("--help") == 0 and program.__doc__.split("\n")[0] in capsys.readouterr().out
    if program not in (diagnose, pages):  # they take lopti.py's
        assert run("--wirte") == 2 and "--wirte" in capsys.readouterr().err


def test_experiments_in_a_folder_with_a_space(tmp_path):
    work = tmp_path / "a b"
    _, command = experiments.command_of("GRPO", 3, "--alpha 0.5", work)
    args = lopti.parse_arguments(command[2:])
    assert args.output == str(work) and args.eval_data == str(work / "kk_test.jsonl")


def test_a_world_is_trained_written_and_read(tmp_path, monkeypatch, in_float64):
    """All methods at all rates: the table of the file has the leads of its rows."""
    of, file = world.World(wording=4, late=True), tmp_path / "world.jsonl"
    small = {"WORLDS": {"small": (of, 0.01)}, "STEPS": 2, "TUNING": 1, "JUDGED": 3, "FILE": file}
    for name, value in small.items():
        monkeypatch.setattr(world, name, value)
    monkeypatch.setattr(sys, "argv", ["world.py"])
    world.main()
    rows = read_jsonl(file)
    assert len(rows) == 3 * len(world.METHODS)
    of_view = {row["method"]: row["accuracies"] for row in rows if row["view"] == "equal KL"}
    lead = np.mean(of_view["oracle"]) - np.mean(of_view["GRPO"])
    [told] = re.findall(r"oracle − GRPO .* (\S+) ± \S+ \|\n", analysis.worlds_table(rows))
    assert float(told) == pytest.approx(lead, abs=6e-4)


# ------------------------------------------------------------- laboratory, report, documentation


def line_of(method, seed, *sampled, training=(0.0,), kl=(0.0, 0.0)):
    """A line of runs.jsonl with these evaluations on 2 people, half of them on 3."""
    sizes = [
        {"2": {"avg@2": [x], "greedy": 0.0}, "3": {"avg@2": [x / 2], "greedy": 0.0}}
        for x in sampled
    ]
    metrics = {"accuracy": [0.0, *training], "kl": list(kl)}
    return {"method": method, "seed": seed, "evaluations": sizes, "metrics": metrics}


def test_the_laboratorys_comparisons():
    """Series of seeds are merged, runs paired by seed, the first evaluation left out; Holm."""
    lines = [line_of("GRPO", seed, 9, 0.4, 0.6, 0.8, training=[seed / 8]) for seed in range(3)]
    lines += [line_of("Lopti", 0, 9, 0.8, training=[0.5])]
    lines += [line_of("Lopti", seed, 9, 0.8, training=[0.5]) for seed in (2, 1, 7)]
    lines += [line_of("AR", 0, 9, 0.8), line_of("80/20", 2), line_of("80/20", 1, training=[0.125])]
    frame = analysis.run_frame(lines)
    grpo, lopti_runs = (frame[frame.method == name] for name in ("GRPO", "Lopti"))
    assert grpo["sampled accuracy"].tolist() == pytest.approx([0.75 * 0.7] * 3)
    assert len(lopti_runs) == 4 and lopti_runs["sampled accuracy"].eq(0.75 * 0.8).all()
    pairs = [(method, "GRPO") for method in ("Lopti", "AR", "80/20")]
    found = analysis.differences(frame, pairs, analysis.WHOLE)
    assert list(found) == [("Lopti", "GRPO"), ("80/20", "GRPO")]  # of AR there is one run
    values, mean, half, p = found["Lopti", "GRPO"]
    assert values.to_dict() == pytest.approx({0: 0.5, 1: 0.375, 2: 0.25})
    tests = [stats.ttest_rel([0.5] * 3, [0, 1 / 8, 2 / 8]), stats.ttest_1samp([0.0, -0.25], 0)]
    assert (mean - half, mean + half) == pytest.approx(tuple(tests[0].confidence_interval()))
    assert (p, found["80/20", "GRPO"][-1]) == pytest.approx((2 * tests[0].pvalue, tests[1].pvalue))
    corrected = analysis.holm([0.04, 0.01, 0.02, 0.05, 0.03])
    assert corrected == pytest.approx([0.09, 0.05, 0.08, 0.09, 0.09])


def test_the_laboratorys_tables_with_few_runs():
    """Accuracy at equal KL by hand; what has no runs is left out; marks in a page are replaced."""
    kl = [i / 200 for i in range(9)]
    lines = [line_of("GRPO", seed, 0.1, 0.5, training=kl[1:], kl=kl) for seed in range(2)]
    for seed in range(2):  # ahead by .1 at the same KL, which it reaches in half of the steps
        fast = [2 * x + 0.1 for x in kl[1:]]
        lines += [line_of("Lopti", seed, 0.1, 0.5, training=fast, kl=[2 * x for x in kl])]
    lines[-1]["metrics"]["accuracy"][0] = lines[-2]["metrics"]["accuracy"][0] = 0.1
    pair = "Lopti", "GRPO"
    values = analysis.by_seed(analysis.run_frame(lines), "Lopti", "GRPO", analysis.EQUAL_KL)
    assert values.tolist() == pytest.approx([0.1] * 2)
    made = analysis.tables(lines)
    assert made["equal KL, on record"].count("\n") == 2 and made["unit steps"].count("\n") == 1
    assert "## unit steps" not in analysis.pages(made)[analysis.TABLES]
    page = "a\n<!-- methods -->\nold\n<!-- end -->\nb"
    assert analysis.with_tables(page, {"methods": "new"}) == page.replace("old", "new")
    near = [
        line_of(*run, training=[0.1] * 8, kl=[0.001] * 9)
        for run in itertools.product(pair, range(2))
    ]
    told = (
        analysis.run_frame(near),
        {pair: ("Lopti − GRPO", "")},
        (analysis.WHOLE, analysis.EQUAL_KL),
    )
    full, short = map(analysis.markdown, analysis.difference_rows(*told))
    assert short.endswith("| +.000 ± .000 | |")  # too near for equal KL
    assert "(0 of 2) | 1.000 | | | .001 and .001 |" in full


@slow
def test_the_laboratorys_commands_and_tables(tmp_path):
    """The flags of the plan are those of the runs on record; the tables are those of the runs."""
    record = experiments.read_lines(experiments.RESULTS)
    made = {(line["method"], line["seed"]): line for line in record}
    free = {"name", "output", "resume", "save_every", "model", "data", "eval_data", "dtype"}
    free |= {"eval_every", "eval_size", "eval_samples", "sample_batch_size"}  # change no training
    for _, method, seed, flags in experiments.planned():
        _, command = experiments.command_of(method, seed, flags, tmp_path)
        args = vars(arguments(re.sub(r"--variant \S+", "", " ".join(command[2:]))))
        settings = made.get((method, seed), {}).get("config", {})
        for name in (settings.keys() & args.keys()) - free:
            written = float(f"{args[name]:.4g}") if isinstance(args[name], float) else args[name]
            only = name == "order" and " only" in method  # was a flag of its own
            assert only or settings[name] == written, (method, name)
    for path, text in analysis.pages(analysis.tables(record)).items():
        assert path.read_text(encoding="utf-8") == text


# ---------------------------------------------------------- the theory, and what diagnose.py says


def binary_world(p, decisions, words, synonyms, responses, alpha=0.0, batches=500):
    """Sampled gradients (batches, P): of unlikely tokens (wrong ones, words), of likely ones."""
    torch.manual_seed(0)
    right = (torch.rand(batches * responses, decisions) < p).float()
    said = torch.randint(synonyms, (batches * responses, words))
    said = torch.nn.functional.one_hot(said, synonyms).flatten(1) - 1 / synonyms
    advantages = lopti.group_advantages(right.sum(1), responses)[:, None]
    pi = torch.tensor([[p, 1 - p, 1 / synonyms]])  # of a right token, a wrong one, a word
    factors = lopti.reweight_advantages(advantages, pi.log(), alpha).T[..., None]
    pairs = right * (1 - p), (right - 1) * p  # ∇ log π at the logit of right; of wrong: minus it
    scores = [torch.cat([pair, -pair], 1) for pair in pairs] + [said]
    means = [(x * y).view(batches, responses, -1).mean(1) for x, y in zip(factors, scores)]
    return torch.cat(means[1:], 1), torch.cat([means[0], 0 * means[2]], 1)


@pytest.mark.parametrize("p, words, synonyms", [(0.8, 0, 8), (0.6, 100, 8), (0.9, 100, 3)])
def test_progress_in_the_binary_world(p, words, synonyms):
    """AR's progress and the split's gain on sampled groups; without words all is parallel."""
    settings = (p, 10, words, synonyms, 64)
    unit = lambda x: (x[:, :10] - x[:, 10:20]).sum(1) / x.norm(dim=1) * (p * (1 - p) / 10) ** 0.5
    low, high = binary_world(*settings)
    plain, reweighted = (unit(x).mean() for x in (low + high, sum(binary_world(*settings, 0.3))))
    of, weights = world.World(p, 10, words), [torch.ones_like, lambda pi: 1 - 0.3 * (1 - pi)]
    pi = torch.full((1, synonyms), 1 / synonyms)
    signals, products = theory.world_moments(of, pi[0], weights, 64, 64)
    expected = 2 * p * (1 - p) * signals / products.diagonal() ** 0.5
    assert plain == pytest.approx(float(expected[0]), rel=0.02)
    assert reweighted / plain == pytest.approx(float(expected[1] / expected[0]), abs=1e-3)
    low_2, high_2, both = (
        (x * y).sum(1).mean() for x, y in ((low, low), (high, high), (low, high))
    )
    cosine, phi = float(both / (low_2 * high_2).sqrt()), math.atan((high_2 / low_2).sqrt())
    assert words or cosine == pytest.approx(1)
    gain, length = theory.split_gain(1 - p, phi, cosine), (2 + 2 * cosine) ** 0.5
    assert (unit(low) + unit(high)).mean() / plain / length == pytest.approx(gain, rel=0.01)


def test_the_best_slope_of_a_weight(in_float64):
    """λ makes most unit progress of all slopes, and is V⁻¹s."""
    world_ = world.WORLDS["unlikely wording, unit steps"][0]
    signals, products = analysis.moments(world_, torch.ones_like, lambda pi: pi)
    b = products[0, 1] / products[0, 0]
    energies = products[0, 0], products[1, 1] - b**2 * products[0, 0]
    slope = theory.best_slope((signals[0], signals[1] - b * signals[0]), energies)
    weights = torch.stack([1 - slope * b, slope])  # of g and of g_π
    best = torch.linalg.solve(products, signals)
    assert torch.allclose(weights / weights.sum(), best / best.sum())
    tried = torch.stack([torch.tensor([1 - x * b, x]) for x in torch.linspace(-20, 20, 401)])
    progress = tried @ signals / ((tried @ products) * tried).sum(1).sqrt()
    assert progress.max() <= weights @ signals / (weights @ products @ weights).sqrt()


@pytest.mark.parametrize("signal", [-1.0, 0.0, 1.0, 30.0])
def test_the_alpha_that_is_measured(signal):
    """300 trainings, g = ∇J + noise and d = signal·∇J + as much noise: the best λ is the signal.

    With b = ½ tokens with π = 0 have (1 - λ/2)/2 of the weight, between 0 and 1.
    """
    torch.manual_seed(0)
    measured = theory.MeasuredAlpha()
    for step in range(60):
        g, d = 10 / 1000**0.5 * torch.randn(2, 300, 1000)
        g[:, 0], d[:, 0] = g[:, 0] + 1, d[:, 0] + signal
        direction, of_unlikely = measured(g, 0.5 * g + d)
        assert step > 2 or torch.equal(direction, g)  # GRPO, until it has measured
    assert of_unlikely.min() >= 0 and of_unlikely.max() <= 1
    assert (2 - 4 * of_unlikely).mean() == pytest.approx(min(signal, 2.0), abs=0.3)


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
        loss, _ = lopti.policy_loss(new, old, weighted, mask, tokens=tokens, normalizer=1)
        loss = loss + (advantage * mass(now)[states].sum() if mass else 0)
        [gradient] = torch.autograd.grad(-loss, now)
        mean = mean + old.sum().exp() * gradient
        energy = energy + old.sum().exp() * gradient.square().sum()
    return mean, energy


def masses(logits, *weights):
    """Σ_a m(a) π(a) of each state, from `lopti.bias_correction` with Â = 1."""
    return torch.stack([lopti.bias_correction(z[None], torch.ones(1), *weights) for z in logits])


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


SMALL_BATCH = ["--people", "2", "--prompts-per-step", "2", "--max-new-tokens", "24"]
SMALL_BATCH += ["--dtype", "float32"]


def test_diagnose_gradients_against_autograd_and_as_sketches():
    """Pieces add up, Eq. 4's part, biases: response by response. Sketches within their error."""
    torch.manual_seed(0)
    args = lopti.parse_arguments([*SMALL_BATCH, "--eta", "0.4", "--temperature", "0.8"])
    policy, tokenizer = lopti.load_model(args.model, torch.device("cpu"))
    batch, _ = diagnose.collect(policy, tokenizer, lopti.load_data(args, tokenizer)[0][:2], args)
    batch.advantages, terms, energy = torch.randn(len(batch.mask), 1) * batch.mask, 0.0, 0.0
    words = diagnose.kinds(batch.ids, batch.mask, tokenizer)
    found = [tokenizer.convert_ids_to_tokens(batch.ids[kind].tolist()) for kind in words]
    supposing = {*puzzles.WORDING["supposition"]}
    assert {*found[1]} <= supposing and found[2].count("</think>") == len(found[2])
    starts = [row[mask].tolist() for row, mask in zip(words[0], batch.mask)]
    assert all(start[0] for start in starts)  # the first attempt is wording
    assert len([word for word in found[0] if word in supposing]) == len(starts)
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0})))
    assert len(diagnose.kinds(batch.ids, batch.mask, other)) == 0
    rows, entries, (energies, _) = diagnose.gradients(policy, batch, words, args)
    for ids, mask, advantages, *said in zip(batch.ids, batch.mask, batch.advantages, *words):
        pi = (policy(ids[None]).logits[0, mask.roll(-1)].double() / 0.8).softmax(-1)
        old, one_hot = pi.detach(), torch.nn.functional.one_hot(ids[mask], pi.shape[1])
        logs = (pi.log() * one_hot).sum(1)
        by_pi, of_words = (logs * (old * one_hot).sum(1)).sum(), [logs[x[mask]].sum() for x in said]
        biases = (old * pi).sum(), (pi * (old >= 0.4)).sum()
        sums = torch.stack([logs.sum(), by_pi, *biases, *of_words])
        terms = terms + advantages.sum() / mask.sum() * sums
        energy += float((advantages[mask, None] * (one_hot - old)).square().sum())
    for term, row in zip(terms / batch.mask.sum(), [rows[:5].sum(0), *rows[5:]]):
        slopes = torch.autograd.grad(term, list(policy.parameters()), retain_graph=True)
        slope = torch.cat([part.flatten() for part in slopes])
        assert (row - slope).norm() <= 1e-4 * slope.norm()
    assert (
        len(rows) == 5 + 6 and words[0].any() and energies.sum() == pytest.approx(energy, rel=1e-4)
    )
    sketches, same_entries, _ = diagnose.gradients(policy, batch, words, args, exact=False)
    assert torch.equal(entries, same_entries) and entries.shape[1] <= diagnose.ENTRIES
    exact, dots = (diagnose.inner_products(x[None])[0, :, 0] for x in (rows, sketches))
    squares = np.outer(exact.diagonal(), exact.diagonal()) + exact**2
    assert (abs(dots - exact) < 5 * (squares / diagnose.BUCKETS) ** 0.5).all()


def test_diagnose_measures_unit_steps_and_says_it_in_words(monkeypatch):
    torch.manual_seed(0)
    vectors = torch.randn(6, 11, 20, dtype=torch.float64) + 1
    args, ones = lopti.parse_arguments(["--eta", "0.5", "--alpha", "0.3"]), np.ones((6, 2, 8))
    dots = diagnose.inner_products(vectors)
    found = diagnose.gradient_statistics(dots, ones[..., :4], ones[:, 0], args, list(range(6)))
    low, high, by_pi = vectors[:, :2].sum(1), vectors[:, 2:4].sum(1), vectors[:, 4]
    unit, grpo = torch.nn.functional.normalize, low + high
    steps = [unit(step) for step in (grpo, 0.7 * grpo + 0.3 * by_pi, unit(low) + unit(high))]
    others = (grpo.sum(0) - grpo) / 5
    plain, ar, split = ((step * others).sum(1).mean() for step in steps)
    pairs = list(itertools.permutations(range(6), 2))
    by_pairs = sum(float(vectors[i, 7] @ grpo[j]) for i, j in pairs)
    signal = sum(float(grpo[i] @ grpo[j]) for i, j in pairs)
    assert found["share of the signal, of these"][0] == pytest.approx(by_pairs / signal)
    by_pairs = sum(float(vectors[i, 10] @ grpo[j]) for i, j in pairs)
    assert found["its shares"].tolist()[::2] == pytest.approx([1 / 4, by_pairs / signal])
    assert found["gain in %, measured"][1] == pytest.approx(float(100 * (ar / plain - 1)))
    assert found["an optimizer for each pass"][1] == pytest.approx(float(100 * (split / plain - 1)))
    found |= diagnose.adam_statistics(vectors, args, range(6))
    sums = torch.zeros(2, 2, dtype=torch.float64)  # of GRPO, of AR: progress and length
    for i, rest in enumerate(itertools.combinations(reversed(range(6)), 5)):
        for number, step in enumerate((grpo, 0.7 * grpo + 0.3 * (by_pi - vectors[:, 5]))):
            drift = step[list(rest)].mean(0) / step[list(rest)].square().mean(0).sqrt()
            sums[number] += torch.stack([drift @ grpo[i], drift.norm()])
    (plain, length), (ar, other) = sums
    expected = float(100 * (ar / other / (plain / length) - 1))
    assert found["gain in %, AdamW, without the bias"][1] == pytest.approx(expected)
    found |= diagnose.move_statistics(np.ones((1, 3)), [0])
    numbers = dots, ones[..., :4], ones[:, 0], args
    halves = [diagnose.gradient_statistics(*numbers, part) for part in ([0, 2, 4], [1, 3, 5])]
    predicted, shown = (
        [half[f"gain in %, {kind}"][1] for half in halves] for kind in ("predicted", "measured")
    )
    off = (((predicted[0] - shown[1]) ** 2 + (predicted[1] - shown[0]) ** 2) / 2) ** 0.5
    found |= diagnose.half_statistics(*numbers, list(range(6)))
    assert found["gain in %, prediction off by"][1] == pytest.approx(off)
    page = diagnose.page({name: np.array([x, 0 * x + 1]) for name, x in found.items()}, args)
    assert " ".join(page.split()).count("reward than GRPO (95 % interval: ") == 4
    monkeypatch.setattr(lopti, "compute_rewards", lambda texts, *_: [0.0] * len(texts))
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
    args, ones = lopti.parse_arguments(["--eta", "0.5", "--alpha", "0"]), np.ones((6, 2, 4))
    numbers = diagnose.inner_products(vectors), ones, ones[:, 0], args
    found = diagnose.gradient_statistics(*numbers, list(range(6)))
    assert math.isnan(found["ratio"]) and math.isnan(found["an optimizer for each pass"][0])
    assert found["gain in %, measured"][0] == pytest.approx(0)  # α = 0 is GRPO


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--without-bias", "leave --without-bias and --eval-only out"),
        ("--eval-only", "leave --without-bias and --eval-only out"),
        ("--supervised", "needs --data with a column `response`"),
        ("--batches 1 --max-new-tokens 2", "take more --batches"),
    ],
)
def test_diagnose_refuses_in_one_sentence(flags, message, monkeypatch):
    """What it cannot do; with what would mend it."""
    rewards = lambda texts, *_: [float(i % 2) for i in range(len(texts))]
    monkeypatch.setattr(lopti, "compute_rewards", rewards)
    with pytest.raises(lopti.UserError, match=message):
        diagnose.main([*SMALL_BATCH, *flags.split()])


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen2Moe"])
def test_diagnose_a_mixture_of_experts_and_texts(kind, tmp_path, capsys):
    """From its flags to the page, on texts that are given: Â is 1 on each of their tokens."""
    sizes = {"vocab_size": 308, "hidden_size": 16, "num_hidden_layers": 1, "eos_token_id": 1}
    sizes |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2)
    sizes |= {"num_local_experts": 4, "num_experts": 4, "pad_token_id": 0, "bos_token_id": None}
    sizes |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 8)
    config = getattr(transformers, f"{kind}Config")(intermediate_size=8, **sizes)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    rows = [
        {**row, "response": "Say Ava-knave"}
        for row in read_jsonl(ROOT / "data" / "kk_train.jsonl")[:40]
    ]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    flags = ["--model", str(tmp_path), "--data", str(data), "--supervised", "--batches", "4"]
    diagnose.main([*SMALL_BATCH, *flags])
    page = capsys.readouterr().out
    assert "4 mini-batches of 16 texts, Â = 1" in page
    assert "Not decided: no token is likely" in page and "nan" not in page


def test_texts_as_taught_are_learnt(tmp_path):
    """What pretrain.py writes, every row can be read; a mixture is as large for each token."""
    faults = {"slip": 0.02, "misread": 0.6, "give_up": 0.1, "one_wording": False, "filler": 0}
    file = tmp_path / "texts.jsonl"
    pretrain.write_texts(types.SimpleNamespace(texts=20, output=file, seed=0, **faults))
    args = arguments(f"--data {file} --people 2 3 4")
    args.max_new_tokens = 400
    rows, policy = lopti.load_data(args, TOKENIZER)[0], lopti.load_model(TINY, "cpu")[0]
    batch, _ = diagnose.texts_to_learn(policy, TOKENIZER, rows, args)
    assert len(rows) == 20 and (batch.ids[batch.mask] != TOKENIZER.unk_token_id).all()
    assert batch.old_logprobs[batch.mask].mean() > -1  # it was taught such texts
    mixture = pretrain.new_model(TOKENIZER, 4)
    experts = sum(p.numel() for name, p in mixture.named_parameters() if ".experts." in name)
    active = mixture.num_parameters() - experts // 2
    assert active == pytest.approx(policy.num_parameters(), rel=0.01)


def test_texts_to_learn():
    rows = [{"prompt": "a", "columns": {"response": text}} for text in ("Say fine", "ok<|end|>")]
    args = arguments("--max-new-tokens 3")
    batch, _ = diagnose.texts_to_learn(lopti.load_model(TINY, "cpu")[0], TOKENIZER, rows, args)
    texts = [TOKENIZER.decode(ids[mask]) for ids, mask in zip(batch.ids, batch.mask)]
    assert texts == ["Say fine <|end|>", "ok <|end|>"]
    assert torch.equal(batch.advantages, batch.mask.float()) and batch.mask.sum() == 5


def simulated_gain(of, method):
    """The accuracy that one tiny batch gains in a table of logits, for each unit of length."""
    of, gains = of._replace(parameters=0, optimizer="unit steps"), []
    for name in (method, "GRPO"):
        runs = [world.train(of, name, 1e-5, 1, 200, 100 + block) for block in range(2)]
        gained = sum(float((accuracies[1] - accuracies[0]).sum()) for accuracies, _, _ in runs)
        gains.append(
            gained / sum(float(np.linalg.norm(theta, axis=1).sum()) for _, _, theta in runs)
        )
    return gains[0] / gains[1]


@pytest.fixture
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dial", [{"wording": 32}, {"wording": 0}, None])
def test_the_designed_worlds_gain_what_the_theorem_predicts(in_float64, dial):
    """A small step in a table of logits, by lopti's own loss; without wording nothing changes."""
    of = world.World(**dial) if dial else world.WORLDS["good policy, likely wording"][0]
    for method in ("AR, α = 1", "Lopti"):
        predicted = analysis.predicted_gain(of, method)
        close = pytest.approx(predicted, rel=0.03 if of.wording else 1e-5)
        assert simulated_gain(of, method) == close


def test_a_slope_that_changes_nothing_gains_nothing():
    """Each token is one of two, with the same π: g_π is along g, V singular but for rounding."""
    of, _ = world.WORLDS["wording like decisions"]
    assert analysis.predicted_gain(of, "AR, measured α") == pytest.approx(1, abs=1e-6)


def test_a_word_with_a_probability_of_eta_is_likely():
    """Its π is .5 but for rounding, which differs between machines."""
    of, _ = world.WORLDS["wording follows the decision"]
    assert analysis.predicted_gain(of, "Lopti") == pytest.approx(1.01, abs=0.005)


def test_the_gains_on_record_are_as_predicted(in_float64):
    """88 gains of one tiny batch in 28 worlds: all but six within 3 % of the theorem."""
    rows = read_jsonl(analysis.FOLDER / "world_gain.jsonl")
    assert len(rows) == 88 and len({str(row["world"]) for row in rows}) == 28
    for row in rows:
        predicted = analysis.predicted_gain(world.World(**row["world"]), row["gain_of"])
        assert row["predicted"] == pytest.approx(predicted, abs=1e-4)
        row["error"] = abs(row["simulated"] / predicted - 1)
    assert sum(row["error"] < 0.03 for row in rows) == 82 and max(r["error"] for r in rows) < 0.09


# ------------------------------------------------------------------------- notebook and scripts


@slow
def test_the_notebook_is_as_it_runs(monkeypatch):
    """Committed with outputs, in order; run with fewer batches: no error, and the same pictures."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    book = nbformat.read(ROOT / "notebook.ipynb", as_version=4)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    kinds = {output.get("name", output.output_type) for cell in code for output in cell.outputs}
    assert not kinds & {"stderr", "error"}
    pictures = lambda cell: sum("image/png" in output.get("data", {}) for output in cell.outputs)
    expected = list(map(pictures, code))
    monkeypatch.setenv("LOPTI_QUICK", "1")  # the kernel inherits it
    place = {"metadata": {"path": str(ROOT)}}
    nbclient.NotebookClient(book, timeout=3000, kernel_name="python3", resources=place).execute()
    assert list(map(pictures, code)) == expected


BOOK = json.loads((ROOT / "notebook.ipynb").read_text(encoding="utf-8"))


def test_the_lecture_asks_ten_questions_and_answers_them():
    """Each opens with README's picture, some boxes of it marked, and has an answer."""
    boxes = re.findall('<g id="(.*?)"', (LAB / "results" / "hero.svg").read_text("utf-8"))
    assert boxes == ["sample", "score", "ar", "split", "pass1", "pass2"]
    book, questions = "", []
    for cell in BOOK["cells"]:
        book += "".join(cell["source"]) + "\n"
        for output in cell.get("outputs", ()):
            book += "".join(output.get("data", {}).get("text/markdown", "")) + "\n"
    for part in re.split(r"^## ", book, flags=re.MULTILINE)[1:-1]:
        number, rest = part.split(".", 1)
        questions.append(number)
        assert "**Answer.** " in rest
        if marked := re.search(r"lecture\.roadmap\((.*)\)", rest):
            assert {*re.findall(r'"(\w+)"', marked[1])} <= {*boxes}
        else:
            assert number == "9"
    assert questions == [*"0123456789"]


def test_the_roadmap_marks_boxes(monkeypatch):
    drawn = []
    monkeypatch.setattr(lecture, "display", lambda picture: drawn.append(picture.data))
    lecture.roadmap("split", "pass1")
    lecture.roadmap()
    faint = re.findall(r'<g (?:id="(\w+)" opacity|opacity="\S+" id="(\w+)")', drawn[0])
    assert {*itertools.chain(*faint)} - {""} == {"sample", "score", "ar", "pass2"}
    assert ' opacity="' not in drawn[1]


def test_a_package_that_is_missing_is_said_in_one_sentence(tmp_path, monkeypatch):
    [cell] = [cell for cell in BOOK["cells"] if "".join(cell["source"]).startswith("import copy")]
    (tmp_path / "cell.py").write_text("".join(cell["source"]), "utf-8")
    monkeypatch.chdir(ROOT)
    monkeypatch.delitem(sys.modules, "lecture")
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(SystemExit, match="matplotlib.* is missing: pip install -r .*lab/req"):
        runpy.run_path(tmp_path / "cell.py")


def test_what_the_student_writes(tmp_path, capsys):
    """The empty function is not right yet, the solution is, and slips in the split are seen."""

    def said(text):
        (tmp_path / "method.py").write_text(text, "utf-8")
        lecture.check(runpy.run_path(tmp_path / "method.py")["method"])
        return [line.split(",")[0] for line in capsys.readouterr().out.splitlines()]

    book = "\n".join("".join(cell["source"]) for cell in BOOK["cells"])
    empty = re.search(r"^def method.*?^    return.*?\n", book, re.DOTALL | re.MULTILINE)[0]
    solution = re.search(r"```python\n(def method.*?)```", book, re.DOTALL)[1]
    assert said(empty) == ["AR: not yet", "Lopti: not yet"]
    assert said(solution) == ["AR: done", "Lopti: done"]
    for old, new in (
        ("pi < eta", "pi <= eta"),
        ("mask & ~low", "~low"),
        (" if eta else [mask]", ""),
    ):
        assert said(solution.replace(old, new)) == ["AR: done", "Lopti: not yet"]
    assert said(solution.replace("+ 1 - alpha", "")) == ["AR: not yet", "Lopti: done"]


def of_lecture(function, path, old="", new=""):
    """A function of the exercises, with one thing replaced."""
    sources = ("".join(cell["source"]) for cell in BOOK["cells"])
    [text] = [text for text in sources if f"def {function}(" in text]
    text = re.search(rf"def {function}\(.*?\n    return .*?\n", text, re.DOTALL)[0]
    path.write_text(text.replace(old, new), "utf-8")
    return runpy.run_path(path, {"torch": torch})[function]


def test_the_lectures_small_silent_bug(tmp_path):
    """Exercise 4: the loss is right, the gradient is not; and right with π_old."""
    old = torch.tensor([[0.8, 0.15, 0.05]]).log()
    advantages, mask = torch.tensor([[1.0, 1.0, -1.0]]), torch.ones(1, 3).bool()

    def of(loss_of):
        logprobs = old.clone().requires_grad_()
        (loss := loss_of(logprobs)).backward()
        return loss.detach(), logprobs.grad

    weighted = lopti.reweight_advantages(advantages, old, 0.3)
    loss, gradient = of(lambda new: lopti.policy_loss(new, old, weighted, mask)[0])
    for mended in (False, True):
        change = ("logprobs.exp() +", "old_logprobs.exp() +") if mended else ()
        ar_loss = of_lecture("ar_loss", tmp_path / "port.py", *change)
        other, slope = of(lambda new, ar_loss=ar_loss: ar_loss(new, old, advantages, 0.3))
        assert torch.allclose(loss, other) and torch.allclose(gradient, slope) == mended


def test_the_lectures_port_has_one_silent_bug(tmp_path):
    """Exercise 5: wrong only where a token crosses η, and right with the old policy's split."""
    for mended in (False, True):
        change = ("logprobs.detach()", "old") if mended else ()
        far = lecture.compare(of_lecture("port", tmp_path / "port.py", *change)).max(axis=1)
        assert (far["Lopti"] > 0.01) != mended
        assert far[["GRPO", "AR", "both"]].max() < 1e-12


@pytest.mark.parametrize("module", ["theory", "variants", "analysis", "diagnose"])
def test_examples_in_docstrings(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted and not result.failed
