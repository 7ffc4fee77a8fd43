"""golden.json, check_port.py, the example port, README's diff and the files of flags."""

import copy
import itertools
import json
import math
import os
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

import check_port
import example_port
import golden
import pytest
import torch

import lopti

torch.set_num_threads(1)  # more gain little
GOLDEN = check_port.GOLDEN
PI_EQUALS_ETA = "a token with π = η is taken for a low-probability token (π ≤ η in place of π < η)"
MISTAKES = list(check_port.MISTAKES)
if not os.environ.get("LOPTI_ALL"):
    MISTAKES = MISTAKES[::12]


def changed_port(*changes):
    """The example port with texts in the place of others, which stand in it once."""
    source = check_port.EXAMPLE
    for text, instead in changes:
        assert source.count(text) == 1
        source = source.replace(text, instead)
    port = {}
    exec(source, port)  # noqa: S102
    return SimpleNamespace(**port)


# golden.json --------------------------------------------------------------------------------------


def numbers(values):
    """Without the names, which torch.testing cannot compare."""

    def without_names(row):
        return {name: value for name, value in row.items() if not isinstance(value, str)}

    return json.loads(json.dumps(values), object_hook=without_names)


@pytest.mark.parametrize("part", ["cases", "rollouts", "model"])
def test_golden_json_is_what_golden_py_computes(part):
    """Each output of golden.json follows from its inputs by the equations of golden.py."""
    written = GOLDEN[part] if os.environ.get("LOPTI_ALL") else GOLDEN[part][::-3]
    # transformers has float32 inside: with another instruction set 1e-6 of a number differs
    limits = {"rtol": 1e-5, "atol": 1e-7} if part == "model" else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(
        numbers(golden.solve_part(part, written)), numbers(written), **limits
    )


def test_golden_json_has_one_case_a_line(tmp_path):
    """golden.json can be read and compared line by line; golden.py writes it so."""
    golden.write_page(GOLDEN, tmp_path / "page.json")
    written = (HERE / "golden.json").read_text(encoding="utf-8")
    assert written == (tmp_path / "page.json").read_text(encoding="utf-8")
    cases = [line for line in written.splitlines() if line.startswith('{"name": ')]
    assert len(cases) == sum(map(len, GOLDEN.values()))


def off_by(port, case):
    """The largest difference of a logit from golden.json."""
    steps = zip(port.update(case), case["steps"])
    return max((table - check_port.float64(step["table"])).abs().max() for table, step in steps)


def test_golden_json_reaches_every_clip_and_mistake():
    """Each clip is active in some case, and each mistake moves some logit by 0.005 or more."""
    for kind in golden.CLIPS:
        passes = [case["passes"]["all"] for case in GOLDEN["cases"]]
        assert sum(found[f"clip_{kind}_share"] > 0 for found in passes) >= 3
    assert all(off_by(example_port, case) < 1e-9 for case in GOLDEN["rollouts"])
    for mistake in MISTAKES:
        if mistake != PI_EQUALS_ETA:
            port = check_port.port_with([mistake])
            assert any(off_by(port, case) > 0.005 for case in GOLDEN["rollouts"])


def test_float32_is_enough():
    """A right port in float32 differs from golden.json by less than 1e-5."""
    source = check_port.EXAMPLE.replace("torch.float64", "torch.float32")
    port = {}
    exec(source, port)  # noqa: S102
    assert all(off_by(SimpleNamespace(**port), case) < 1e-5 for case in GOLDEN["rollouts"])


# check_port.py, levels 1 and 2 --------------------------------------------------------------------


def checked(update, capsys):
    """The exit code of level 2, and what it prints below the list of the cases."""
    code = check_port.verdict(check_port.find_mistakes(update))
    lines = capsys.readouterr().out.splitlines()[len(GOLDEN["rollouts"]) :]
    return code, [line for line in lines if not line.startswith("Looking")]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_level_2_names_each_mistake(mistake, capsys):
    """A port with one mistake fails and is told this one; a port with a choice is right."""
    right_code_and_lines = (1, [f"Wrong: {mistake}"])
    if mistake in check_port.CHOICES:
        right_code_and_lines = (0, ["Right.", mistake])
    if mistake == PI_EQUALS_ETA:  # no table has such a token: rounding would decide
        right_code_and_lines = (0, ["Right."])
    assert checked(check_port.port_with([mistake]).update, capsys) == right_code_and_lines


FUNCTIONS = check_port.EXAMPLE.partition("def run_passes(")[0]  # those of level 1


def is_in_a_function(mistake):
    return any(text in FUNCTIONS for text, _ in check_port.MISTAKES[mistake])


@pytest.mark.parametrize("mistake", list(filter(is_in_a_function, MISTAKES)))
def test_level_1_names_each_mistake_in_a_function(mistake, capsys):
    """A function with one mistake fails and is told this one, or one of the same numbers."""
    if mistake.startswith("the KL is taken off the advantages"):
        mistake = "the KL is left out"  # of the loss, which is all that level 1 sees of it
    code = check_port.check_functions(check_port.port_with([mistake]))
    printed = capsys.readouterr().out
    if mistake in check_port.CHOICES:
        assert (code, printed.count("Right.")) == (0, 4)
        assert f"policy_loss: Right.\n{mistake}\n" in printed
    else:
        assert (code, printed.count("Right.")) == (1, 3)
        assert f": Wrong: {mistake}\n" in printed


@pytest.fixture
def knows(monkeypatch):
    """Makes check_port.py know only a few mistakes, for speed."""

    def known(names):
        few = {name: check_port.MISTAKES[name] for name in names}
        monkeypatch.setattr(check_port, "MISTAKES", few)

    return known


def test_level_2_names_two_mistakes_and_choices(knows, capsys):
    """Two mistakes and two choices of one port are all named, and the port fails."""
    mistakes = ["the KL is left out", "the advantages are not weighted by Eq. 4"]
    choices = [check_port.CHOICES[0], check_port.CHOICES[3]]
    port = check_port.port_with([*mistakes, *choices])
    knows([MISTAKES[0], *mistakes, *choices])
    code, lines = checked(port.update, capsys)
    assert code == 1
    assert sorted(lines) == sorted([f"Wrong: {mistake}" for mistake in mistakes] + choices)


def test_level_2_sees_a_small_mistake(knows, capsys):
    """A weight decay of 0.011 in place of 0.01 moves a logit by about a thousandth: wrong."""
    knows([])
    decay = 'weight_decay=case["weight_decay"]'
    port = changed_port((decay, f'{decay} + 0.001 * (case["weight_decay"] < 1)'))
    code, lines = checked(port.update, capsys)
    assert code == 1
    assert lines[0].startswith("Wrong. No known mistake explains it")


@pytest.mark.parametrize("number", [0, -1])
@pytest.mark.parametrize("spoil", ["too few", "too many", "not a number", "none"])
def test_level_2_sees_tables_that_are_missing_or_nan(spoil, number, knows, capsys):
    """Too few or too many tables are wrong, and NaN is, whichever case of golden.json has them."""
    knows([])

    def update(case):
        tables = list(example_port.update(case))
        if case is not GOLDEN["rollouts"][number]:
            return tables
        spoiled = {"too few": tables[:-1], "too many": [*tables, tables[-1]], "none": []}
        return spoiled.get(spoil, [*tables[:-1], tables[-1] * math.nan])

    assert checked(update, capsys)[0] == 1


@pytest.mark.parametrize("broken", check_port.FUNCTIONS)
def test_level_1_fails_whichever_function_is_wrong(broken, knows):
    """One wrong function of four, the first as well as the last, makes exit code 1."""
    knows([])
    port = check_port.port_with([])
    original = getattr(port, broken)

    def wrong(*arguments):
        results = original(*arguments)
        return [~mask for mask in results] if broken == "split_tokens" else results * 1.01

    setattr(port, broken, wrong)
    assert check_port.check_functions(port) == 1


def test_the_search_ends_after_a_number_of_candidates(knows, capsys, monkeypatch):
    """Where nothing explains the numbers, the search ends by the count that --help names."""
    with pytest.raises(SystemExit):
        check_port.main(["--help"])
    assert f"tries {check_port.CANDIDATES:,} candidates at most" in capsys.readouterr().out
    knows(MISTAKES[:2])
    tried = mock.Mock(wraps=check_port.port_with)
    monkeypatch.setattr(check_port, "port_with", tried)
    monkeypatch.setattr(check_port, "CANDIDATES", 4)
    monkeypatch.setattr(check_port, "candidates", lambda names, agreement: itertools.repeat(()))
    port = changed_port(("(deviations + 1e-6)", "(deviations + 0.5)"))
    assert checked(port.update, capsys)[0] == 1
    assert tried.call_count == 2 + 4


def test_check_port_as_a_command(monkeypatch, capsys, tmp_path):
    """The exit code is 0 for the example, 1 for a mistake, 2 for what is no port."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "broken_port.py").write_text(check_port.EXAMPLE.replace("/ mask.sum()", ""))
    assert check_port.main(["example_port"]) == 0
    assert capsys.readouterr().out.count("Right.") == 4
    assert check_port.main(["example_port:update"]) == 0
    assert check_port.main(["broken_port"]) == 1
    printed = capsys.readouterr().out
    assert "policy_loss: Wrong: detail 3: the loss is a sum" in printed
    assert printed.count("Right.") == 4
    for port, problem in (
        ("no_port:update", "No module named 'no_port'"),
        ("json", "json has none of group_advantages"),
    ):
        with pytest.raises(SystemExit, match="2"):
            check_port.main([port])
        assert problem in capsys.readouterr().err


# check_port.py, level 3 ---------------------------------------------------------------------------

ONE_STEP = 4  # case 4 of golden.json has one step: only the weights show a gradient's wrong sign
NO_TOKEN = 5  # case 5 has a pass without a token in its second mini-batch
TWO_PROMPTS = 6  # case 6 has two groups, prompts of two lengths, a larger weight decay
PADDED_LEFT = [
    ("padding_value=-1)  # (B, L), padded on the right", 'padding_value=-1, padding_side="left")'),
    (
        "mask = (ids >= 0) & (torch.arange(ids.shape[1]) >= starts)",
        """attention_mask = (ids >= 0).long()
    lengths = torch.tensor([[len(response)] for response in case["responses"]])
    mask = torch.arange(ids.shape[1]) >= ids.shape[1] - lengths""",
    ),
]
SEES_PADDING = ("logits = model(ids)", "logits = model(ids, attention_mask=attention_mask)")
OPTIMIZER = "    parameters = list(model.parameters())"
ADAM = f"""{OPTIMIZER}
    rates = {{"lr": case["learning_rate"], "weight_decay": case["weight_decay"]}}
    optimizer = torch.optim.Adam(parameters, **rates)"""
NORM = "yield float(norm)"
LEVEL_3 = {  # changes of the example port, the number of a case, the exit code
    "right": ([], TWO_PROMPTS, 0),
    "step at gradient 0": ([("            if norm > 0:", "            if True:")], NO_TOKEN, 0),
    "left padding behind a mask": ([*PADDED_LEFT, SEES_PADDING], TWO_PROMPTS, 0),
    "left padding that the model sees": (PADDED_LEFT, TWO_PROMPTS, 1),
    "shifted logits": ([("logits[:, :-1]", "logits[:, 1:]")], NO_TOKEN, 1),
    "a norm": ([(NORM, "yield 1.001 * float(norm)")], NO_TOKEN, 1),
    "the first norm": ([(NORM, "yield float(norm) + 0.001 * (update_mask is passes[0])")], 6, 1),
    "sign": ([("loss.backward()", "(-loss).backward()")], ONE_STEP, 1),
    "Adam": ([(OPTIMIZER, ADAM)], TWO_PROMPTS, 1),
    "AdamW without weight decay": (
        [(OPTIMIZER, ADAM.replace("Adam(", "AdamW(").replace('case["weight_decay"]', "0.0"))],
        TWO_PROMPTS,
        1,
    ),
    "the batch's normalization": (
        [("rewards.view(-1, group_size)", "rewards.view(1, -1)")],
        TWO_PROMPTS,
        1,
    ),
}


@pytest.mark.parametrize("name", LEVEL_3 if os.environ.get("LOPTI_ALL") else list(LEVEL_3)[::3])
def test_level_3_sees_norms_weights_positions_and_the_optimizer(name, monkeypatch):
    """Level 3 passes right ports and fails wrong ones, also where one weight or one norm is off."""
    changes, number, code = LEVEL_3[name]
    monkeypatch.setitem(GOLDEN, "model", [GOLDEN["model"][number]])
    assert check_port.check_model_update(changed_port(*changes).update_model) == code


def test_level_3_fails_whichever_case_is_wrong(monkeypatch):
    """A wrong case makes exit code 1, also where the last case is right."""
    monkeypatch.setitem(GOLDEN, "model", [GOLDEN["model"][ONE_STEP]] * 2)
    monkeypatch.setattr(check_port, "is_right", mock.Mock(side_effect=[False, True]))
    assert check_port.check_model_update(example_port.update_model) == 1


# lopti.py itself, on the bundled model ------------------------------------------------------------


def settings_of(case):
    """The settings of lopti.py for a golden case."""
    names = lopti.Settings.__dataclass_fields__.keys() & case.keys() - {"passes", "steps"}
    prompts = len(case["rewards"]) // case["group_size"]
    return lopti.Settings(prompts_per_step=prompts, **{name: case[name] for name in names})


def lopti_update_model(model, optimizer, case):
    """A training step of lopti.py, but for sampling and rewards; and what it reports."""
    settings = settings_of(case)
    ids, mask, lengths = lopti.pack(case["prompts"], case["responses"])
    rollout = lopti.Rollout(ids, mask, lengths, truncated=lengths == 0, texts=[])
    with (
        mock.patch.object(lopti, "sample", return_value=rollout),
        mock.patch.object(lopti, "compute_rewards", return_value=case["rewards"]),
    ):
        reference = copy.deepcopy(model)
        step = lopti.training_step(model, reference, optimizer, None, [mock.Mock()], settings)
    right = torch.cat([torch.tensor(row) for row in case["old_logprobs"]])
    assert torch.allclose(rollout.old_logprobs[mask], right, atol=1e-5, rtol=0)
    results = itertools.chain(*step[1])  # of each pass and mini-batch
    norms = []
    for result, right in zip(results, case["steps"], strict=True):
        share = right["updated_tokens"] / right["response_tokens"]
        assert result["updated_share"] == pytest.approx(share)
        norms.append(result["grad_norm"])
    return norms


def test_lopti_updates_the_bundled_model_rightly():
    """training_step of lopti.py makes the updates of golden.json, and reports their norms."""
    assert check_port.check_model_update(lopti_update_model) == 0


# The diff of the main README ----------------------------------------------------------------------


def run_diff(case):
    """A golden rollout with README's diff, after the change, as the passes of the example port."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    diff = page.split("```diff\n")[1].split("```")[0].splitlines()
    lines = [line[2:] for line in diff if line[:1] in ("+", " ")]
    tables = []

    def run_passes(logprobs, ref, mask, parameters, optimizer, case):
        def step():
            torch.nn.utils.clip_grad_norm_(parameters, case["max_grad_norm"])
            optimizer.step()
            tables.append(parameters[0].detach().clone())

        rewards = check_port.float64(case["rewards"])
        names = case | {
            "torch": torch,
            "old_logprobs": logprobs().detach(),
            "logprobs": lambda rows: logprobs()[rows],
            "kl": lambda rows: lopti.kl_estimate(logprobs(), ref)[rows],
            "advantages": lopti.group_advantages(rewards, case["group_size"])[:, None] * mask,
            "mask": mask,
            "mini_batches": torch.arange(len(mask)).split(case["mini_batch_size"]),
            "optimizer": SimpleNamespace(step=step, zero_grad=optimizer.zero_grad),
        }
        exec(textwrap.dedent("\n".join(lines)), names)  # noqa: S102
        return []

    with mock.patch.object(example_port, "run_passes", run_passes):
        assert not list(example_port.update(case))
    return tables


def test_readme_diff_is_a_right_port(knows):
    """README's diff makes the updates of golden.json, but for two choices that it does not show."""
    knows(check_port.CHOICES)
    choices = {check_port.ZERO_STEP, "a choice: there is no dual clip"}
    assert set(check_port.find_mistakes(run_diff)) == choices


# The files of flags -------------------------------------------------------------------------------

PAPER = """
--prompts-per-step 64 --group-size 8 --mini-batch-size 256 --learning-rate 1e-6 --passes 1
--temperature 0.7 --max-prompt-length 400 --max-new-tokens 4096 --clip-low 0.2 --clip-high 0.24
--clip-dual 10 --kl-coef 0.001 --weight-decay 0.01 --max-grad-norm 1 --advantage grpo"""


@pytest.mark.parametrize("words", ["--task kk --steps 351", "--task math --steps 781"])
def test_flag_files_have_the_settings_of_the_paper(words):
    """One that is lost, or a default that changes: the paper's run would silently be another."""
    file = f"@{ROOT / 'data' / words.split()[1]}.flags"
    settings = lopti.parse_arguments([file])
    assert lopti.parse_arguments([file, *words.split(), *PAPER.split()]) == settings
