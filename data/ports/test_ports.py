"""golden.json, check_port.py, the example port, README's diff and the files of flags."""

import copy
import inspect
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
EXAMPLE = check_port.EXAMPLE
CHOICES = check_port.CHOICES
ZERO_STEP, *_ = CHOICES
ALL = bool(os.environ.get("LOPTI_ALL"))
EMPTY_PASS = [*check_port.MISTAKES][1]
FITTED = [name for name in check_port.MISTAKES if "FACTOR" in name]
LEVEL_2 = [name for name in check_port.MISTAKES if name not in FITTED]
LEVEL_1 = []
for mistake, its_changes in check_port.MISTAKES.items():
    if any(text in EXAMPLE.partition("def run_passes(")[0] for text, _ in its_changes):
        LEVEL_1.append(mistake)
# At level 2 nothing differs: no table has a token with π = η or a prompt to pad.
NOT_AT_LEVEL_2 = (
    "a token with π = η is taken for a low-probability token (π ≤ η in place of π < η)",
    "the mask has prompts, too",
    "prompts are padded on the left without an attention mask: the model reads the padding",
    "whole rows are padded on the left without an attention mask: the model reads the padding",
)
SETTINGS = (  # of three trainers
    {"mini_batch_size": 0, "kl_coef": 0.0, "temperature": 1.0, "clip_high": 0.2},
    {"temperature": 1.0, "clip_high": 0.2, "weight_decay": 0.0, "kl_coef": 0.01},
    {"mini_batch_size": 0, "temperature": 1.0, "max_grad_norm": math.inf, "weight_decay": 0.0},
)


def changed_port(*changes):
    """The example port with texts in the place of others, which stand in it once."""
    source = EXAMPLE
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
    written = GOLDEN[part] if ALL else GOLDEN[part][::-3]
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


def test_float32_is_enough():
    """A right port in float32 differs from golden.json by less than 1e-5."""
    port = {}
    exec(EXAMPLE.replace("torch.float64", "torch.float32"), port)  # noqa: S102
    for case in GOLDEN["rollouts"]:
        right = [check_port.float64(step["table"]) for step in case["steps"]]
        assert check_port.largest_error(port["update"](case), right) < 1e-5


# check_port.py, levels 1 and 2 --------------------------------------------------------------------


def checked(update, capsys, settings=()):
    """The exit code of level 2, and what it prints below the list of the cases."""
    code = check_port.check_update(update, settings)
    return code, capsys.readouterr().out.splitlines()[len(GOLDEN["rollouts"]) :]


def test_each_mistake_changes_the_example():
    """Each line that mistakes.diff takes away stands in the example port once."""
    assert all(check_port.port_with((mistake,)) for mistake in check_port.MISTAKES)


def same_tables(name, other, cases):
    """Says whether two mistakes give the same tables."""
    for case in cases:
        both = [check_port.tables(check_port.port_with((x,)).update, case) for x in (name, other)]
        if check_port.first_wrong(*both, 10 * check_port.TOLERANCE) < math.inf:
            return False
    return True


def named(lines):
    """The mistakes that the check names."""
    return [line.split(": ", 1)[1] for line in lines if line.startswith(("Wrong: ", "or: "))]


WITH_SETTINGS = [(mistake, {}) for mistake in (LEVEL_2 if ALL else LEVEL_2[::12])]
for settings_of_a_trainer in SETTINGS:
    for mistake in LEVEL_2 if ALL else LEVEL_2[5:6]:
        WITH_SETTINGS.append((mistake, settings_of_a_trainer))


@pytest.mark.parametrize("mistake, settings", WITH_SETTINGS)
def test_level_2_names_each_mistake(mistake, settings, capsys):
    """A mistake is named, beside all that give the same tables; a choice is right.

    With other settings than golden.json's, a mistake may be said to make no difference.
    """
    cases = check_port.table_cases(settings)
    code, lines = checked(check_port.port_with((mistake,)).update, capsys, settings)
    if code:
        assert mistake in named(lines)
        assert all(same_tables(name, mistake, cases) for name in named(lines))
    elif settings:
        assert lines[0].startswith("Right, with ")
        assert mistake in CHOICES or f"- {mistake}" in lines
    elif mistake in CHOICES:
        assert lines == ["Right.", mistake]
    else:
        assert lines == ["Right."]
        assert mistake in NOT_AT_LEVEL_2


@pytest.mark.parametrize("mistake", LEVEL_1 if ALL else LEVEL_1[::12])
def test_level_1_names_each_mistake_in_a_function(mistake, capsys):
    """A function with one mistake fails and is told this one, or one of the same numbers."""
    code = check_port.check_functions(check_port.port_with((mistake,)))
    printed = capsys.readouterr().out
    if mistake in CHOICES:
        assert (code, printed.count("Right.")) == (0, 5)
        assert f": Right.\n{mistake}\n" in printed
    else:
        if mistake.startswith("~low"):  # two mistakes that differ outside of this function
            mistake = "~low"
        assert (code, printed.count("Right.")) == (1, 4)
        assert f": Wrong: {mistake}" in printed


def test_the_standard_deviation_is_named_beside_any_epsilon(capsys):
    """numpy's, which divides by G, is one mistake, and ε a choice: at levels 1 and 2."""
    mistake = "the standard deviation of a group is divided by G, not by G - 1 (as numpy's is)"
    for choice in CHOICES[-2:]:
        port = check_port.port_with((mistake, choice))
        assert "ε" in choice
        code, lines = checked(port.update, capsys)
        assert code == 1
        assert lines in ([f"Wrong: {mistake}"], [f"Wrong: {mistake}", choice])  # 1e-8 is near 1e-6
        assert check_port.check_function("group_advantages", port.group_advantages) == 1
        printed = capsys.readouterr().out
        assert printed == f"group_advantages: Wrong: {mistake}\n{choice}\n"


def test_level_1_passes_functions_in_float32(capsys):
    """Also where a derivative by log π is 1e5 (kl_estimate without its bounds)."""
    port = check_port.port_with((CHOICES[2], CHOICES[3]))

    def in_float32(function):
        def call(*arguments):
            tensors = [
                x.float() if torch.is_tensor(x) and x.is_floating_point() else x for x in arguments
            ]
            result = function(*tensors)
            return result.double() if torch.is_tensor(result) else result

        call.__signature__ = inspect.signature(function)
        return call

    for name in check_port.FUNCTIONS:
        assert check_port.check_function(name, in_float32(getattr(port, name))) == 0
    assert capsys.readouterr().out.count("Right.") == len(check_port.FUNCTIONS)


@pytest.fixture
def knows(monkeypatch):
    """Makes check_port.py know only a few mistakes, for speed."""

    def known(names):
        few = {name: check_port.MISTAKES[name] for name in names}
        monkeypatch.setattr(check_port, "MISTAKES", few)
        monkeypatch.setattr(check_port, "CHOICES", [name for name in few if name in CHOICES])

    return known


def test_level_2_names_two_mistakes_and_choices(knows, capsys):
    """Two mistakes and two choices of one port are all named, and the port fails."""
    mistakes = ["the KL is left out", "the advantages are not weighted by Eq. 4"]
    choices = [CHOICES[0], CHOICES[4]]
    port = check_port.port_with((*mistakes, *choices))
    knows([LEVEL_2[0], *mistakes, *choices])
    code, lines = checked(port.update, capsys)
    assert code == 1
    assert sorted(lines) == sorted([f"Wrong: {mistake}" for mistake in mistakes] + choices)


def test_a_choice_loosens_no_limit(knows, capsys):
    """A mistake that makes no difference does not explain a small error beside a choice."""
    epsilon = next(choice for choice in CHOICES if "1e-4" in choice)
    name = "Eq. 4 is applied twice"
    knows([name, epsilon])
    rate = '"lr": case["learning_rate"]'
    slower = (rate, f"{rate} * (0.9995 if 'nearly equal' in case['name'] else 1)")
    update = changed_port(*check_port.MISTAKES[epsilon], slower).update
    code, lines = checked(update, capsys, {"alpha": 0.0})
    assert code == 1
    assert named(lines) == []
    assert lines[0].startswith("Wrong. No known mistake explains it.")


@pytest.mark.parametrize("mistake", [EMPTY_PASS, "η is compared with log π, not with π"])
def test_level_2_names_a_mistake_that_makes_choices_show(mistake, knows, capsys):
    """It empties a pass, or gives NaN there: then a step without a gradient makes a difference."""
    choices = CHOICES[1:6]  # those that go together
    port = check_port.port_with((mistake, *choices))
    knows([LEVEL_2[0], mistake, *CHOICES])
    code, lines = checked(port.update, capsys)
    assert code == 1
    assert mistake in named(lines)
    assert lines[-len(choices) :] == choices


def test_a_port_that_is_right_in_each_case_is_right(knows, capsys):
    """Also if no set of choices explains all cases together."""
    knows(CHOICES)
    always = check_port.port_with((ZERO_STEP,)).update
    with_tokens = check_port.port_with((CHOICES[1],)).update

    def inconsistent(case):
        return (always if case["name"].startswith("no low") else example_port.update)(case)

    assert checked(inconsistent, capsys) == (0, ["Right.", ZERO_STEP])
    assert checked(with_tokens, capsys) == (0, ["Right.", CHOICES[1]])


DECAY = '"weight_decay": case["weight_decay"]'
HALF_PRECISION = ("(logits / temperature)", "(logits.bfloat16() / temperature)")
UNEXPLAINED = {  # changes of the example port, the largest error
    "a weight decay of 0.0101, not 0.01": (
        [(DECAY, f'{DECAY} + 0.0001 * (case["weight_decay"] < 1)')],
        pytest.approx(0.0009, abs=0.0002),
    ),
    "half precision and choices": (
        [HALF_PRECISION, *check_port.MISTAKES[CHOICES[2]], *check_port.MISTAKES[CHOICES[3]]],
        pytest.approx(0.1, abs=0.09),
    ),
    "not a number": (
        [
            (
                "        yield table.rows.detach().clone()",
                "        yield table.rows.detach() * torch.nan",
            )
        ],
        pytest.approx(math.nan, nan_ok=True),
    ),
}


@pytest.mark.parametrize("name", UNEXPLAINED)
def test_level_2_says_how_large_an_error_is_that_it_cannot_explain(name, knows, capsys):
    """A choice is no error. NaN is one."""
    changes, right_error = UNEXPLAINED[name]
    knows(CHOICES[2:4])
    code, lines = checked(changed_port(*changes).update, capsys)
    assert code == 1
    assert lines[0].startswith("Wrong. No known mistake explains it.")
    assert float(lines[0].split()[-1].rstrip(".")) == right_error


def test_level_2_names_the_nearest_mistake(knows, capsys):
    """Beside one that is not known: the weight decay is at most 0.9, which shows in one case."""
    name = "the KL is left out"
    unknown = (DECAY, '"weight_decay": min(case["weight_decay"], 0.9)')
    knows([LEVEL_2[0], name])
    code, lines = checked(changed_port(*check_port.MISTAKES[name], unknown).update, capsys)
    assert code == 1
    assert lines[1] == f"A part of it is probably this: {name}"


def test_level_2_says_where_a_port_differs_first(knows, capsys):
    """The second pass has an optimizer of its own, so its first step differs."""
    name = "detail 5: the second pass has an optimizer of its own"
    knows([name])
    check_port.check_update(check_port.port_with((name,)).update)
    sentence = "\nboth: differs from optimizer step 3 of 4 on, the first of the second pass\n"
    assert sentence in capsys.readouterr().out


ONLY_FIRST_PASS = "detail 4: only the first pass is made"


def test_levels_2_and_3_count_the_optimizer_steps(knows, capsys, monkeypatch):
    """A wrong number of steps is said, and what it comes from."""
    knows([ONLY_FIRST_PASS])
    port = check_port.port_with((ONLY_FIRST_PASS,))
    case = next(case for case in GOLDEN["model"] if case["name"] == "both")
    monkeypatch.setattr(check_port, "model_cases", lambda settings: [case])
    sentence = "both: wrong; the number of optimizer steps is 2, and must be 4"
    for check, update in (
        (check_port.check_update, port.update),
        (check_port.check_model_update, port.update_model),
    ):
        assert check(update) == 1
        printed = capsys.readouterr().out
        assert f"\n{sentence}" in f"\n{printed}"
        assert f"Wrong: {ONLY_FIRST_PASS}\n" in printed


def test_a_wrong_port_in_float32_is_named(knows, capsys):
    """Rounding grows where steps are wrong: beyond the limit for a right port, which is 1e-4."""
    name = "detail 4: only the second pass is made"
    knows([name])
    changes = [*check_port.MISTAKES[name], ("torch.float64", "torch.float32")]
    assert checked(changed_port(*changes).update, capsys) == (1, [f"Wrong: {name}"])


@pytest.mark.parametrize("number", [0, -1])
@pytest.mark.parametrize("spoil", ["too few", "too many", "not a number"])
def test_level_2_sees_tables_that_are_missing_or_nan(spoil, number, knows, capsys):
    """Too few or too many tables are wrong, and NaN is, whichever case of golden.json has them."""
    knows([])

    def update(case):
        tables = list(example_port.update(case))
        if case is not GOLDEN["rollouts"][number]:
            return tables
        spoiled = {"too few": tables[:-1], "too many": [*tables, tables[-1]]}
        return spoiled.get(spoil, [*tables[:-1], tables[-1] * math.nan])

    assert checked(update, capsys)[0] == 1


SPOILED = [  # the function of a right port, what becomes of its result
    ("group_advantages", lambda advantages: advantages + 0.01),
    ("reweight_advantages", lambda advantages: advantages + 0.01),
    ("split_tokens", lambda masks: (~masks[0], masks[1])),
    ("split_tokens", lambda masks: (masks[0], ~masks[1])),
    ("policy_loss", lambda losses: losses + 0.01),
    ("policy_loss", lambda losses: losses.detach()),
    ("kl_estimate", lambda losses: losses + 0.01),
    ("kl_estimate", lambda losses: losses.detach()),
]


@pytest.mark.parametrize("name, spoil", SPOILED)
def test_level_1_sees_each_result_and_gradient(name, spoil, knows, capsys):
    """One wrong function makes the port wrong, whichever it is, also if only its gradient is."""
    knows([])
    port = copy.copy(check_port.port_with(()))
    original = getattr(port, name)
    setattr(port, name, lambda *arguments: spoil(original(*arguments)))
    assert check_port.check_functions(port) == 1
    assert capsys.readouterr().out.count("Right.") == 4


def test_check_port_as_a_command(monkeypatch, capsys, tmp_path):
    """The exit code is 0 for the example, 1 for a mistake, 2 for what is no port."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "broken_port.py").write_text(EXAMPLE.replace("1 + clip_high", "1 + clip_low"))
    short = "def policy_loss(logprobs, old_logprobs, advantages):\n    return -advantages\n"
    (tmp_path / "short_port.py").write_text(short)
    assert check_port.main(["example_port"]) == 0
    assert capsys.readouterr().out.count("Right.") == 5
    assert check_port.main(["example_port:update"]) == 0
    monkeypatch.setattr(check_port, "model_cases", lambda settings: [CASES[ONE_STEP]])
    assert check_port.main(["--model", "example_port:update_model"]) == 0
    for port, sentence in (
        ("broken_port", "policy_loss: Wrong: the ratio is clipped at 1 + ε_l, not at 1 + ε_h"),
        ("short_port", "It is called as policy_loss(logprobs, old_logprobs, advantages, clip_low"),
        ("short_port", "Not found: group_advantages, reweight_advantages, split_tokens, kl_est"),
        ("json", "Not found: group_advantages, reweight_advantages, split_tokens, policy_loss"),
    ):
        capsys.readouterr()
        assert check_port.main([port]) == 1
        assert sentence in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")  # under torchrun only the first process reports
    assert check_port.main(["broken_port"]) == 0
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit, match="2"):
        check_port.main(["no_port:update"])
    assert "No module named 'no_port'" in capsys.readouterr().err


# check_port.py, level 3 ---------------------------------------------------------------------------

CASES = check_port.model_cases()
ONE_STEP = 4  # a case with one step: only the weights show a gradient's wrong sign
NO_TOKEN = 5  # a case with a pass that has no token in its second mini-batch
TWO_PROMPTS = 6  # a case of two groups, with prompts of two lengths and a larger weight decay
LEFT_PADDING = (
    "whole rows are padded on the left without an attention mask: the model reads the padding"
)
LEFT_PROMPTS = (
    "prompts are padded on the left without an attention mask: the model reads the padding"
)
SHIFTED_LOGITS = "the logits are shifted by one: log π of a token is read at the token itself"
ATTENDS = ("model(ids[rows])", "model(ids[rows], attention_mask=attention_mask[rows])")
CLAMPED = "    ids = ids.clamp(min=0)"
MASKED = f"    attention_mask = (ids >= 0).long()\n{CLAMPED}"
OPTIMIZER = "    parameters = list(model.parameters())"
ADAMW = f"""{OPTIMIZER}
    optimizer = torch.optim.AdamW(parameters, case["learning_rate"], weight_decay=0.0)"""
NORM = "yield float(norm)"
RIGHT_AT_LEVEL_3 = ["Right.", "Level 2 sees more mistakes."]
LEVEL_3 = {  # changes of the example port, the number of a case, what is printed below it
    "right": ([], TWO_PROMPTS, RIGHT_AT_LEVEL_3),
    "step at gradient 0": (
        check_port.MISTAKES[ZERO_STEP],
        NO_TOKEN,
        ["Right.", ZERO_STEP, RIGHT_AT_LEVEL_3[1]],
    ),
    "step at gradient 0, and a norm": (
        [*check_port.MISTAKES[ZERO_STEP], (NORM, "yield 1.001 * float(norm)")],
        NO_TOKEN,
        None,
    ),
    "sign": ([("loss.backward()", "(-loss).backward()")], ONE_STEP, None),
    "left padding behind a mask": (
        [*check_port.MISTAKES[LEFT_PADDING], ATTENDS, (CLAMPED, MASKED)],
        TWO_PROMPTS,
        RIGHT_AT_LEVEL_3,
    ),
    "left padding": (
        check_port.MISTAKES[LEFT_PADDING],
        TWO_PROMPTS,
        [f"Wrong: {LEFT_PADDING}"],
    ),
    "shifted logits": (
        check_port.MISTAKES[SHIFTED_LOGITS],
        NO_TOKEN,
        [f"Wrong: {SHIFTED_LOGITS}"],
    ),
    "a norm that is not a number": ([(NORM, "yield float('nan')")], ONE_STEP, None),
    "no weight decay": ([(OPTIMIZER, ADAMW)], TWO_PROMPTS, None),
    "the first norm": (
        [(NORM, "yield float(norm) + 0.001 * (update_mask is passes[0])")],
        TWO_PROMPTS,
        None,
    ),
    "the batch's normalization": (
        [("rewards.view(-1, group_size)", "rewards.view(1, -1)")],
        TWO_PROMPTS,
        None,
    ),
}


@pytest.mark.parametrize("name", LEVEL_3 if ALL else list(LEVEL_3)[::3])
def test_level_3_sees_norms_weights_positions_and_the_optimizer(name, monkeypatch, capsys, knows):
    """Level 3 passes right ports, fails wrong ones, and names what it knows."""
    changes, number, right_lines = LEVEL_3[name]
    knows([SHIFTED_LOGITS, LEFT_PADDING, ZERO_STEP])
    monkeypatch.setattr(check_port, "model_cases", lambda settings: [CASES[number]])
    code = check_port.check_model_update(changed_port(*changes).update_model)
    state, *lines = capsys.readouterr().out.splitlines()
    assert ("differs" in state) == (code == 1)
    assert ("Right." in lines) == (code == 0)
    if right_lines is None:
        assert lines[0].startswith("Wrong. No known mistake explains it.")
    else:
        assert lines == right_lines


def test_three_cases_of_level_3_have_prompts_of_two_lengths():
    """In each of them, prompts padded on the left without an attention mask are wrong."""
    port = check_port.port_with((LEFT_PROMPTS,))
    wrong = []
    for case in CASES:
        model = check_port.bundled_model()
        norms = port.update_model(model, check_port.new_optimizer(model, case), case)
        if not check_port.is_right(check_port.model_differences(model, norms, case)):
            wrong.append(case)
    assert wrong == [case for case in CASES if len(set(map(len, case["prompts"]))) == 2]
    assert len(wrong) == 3


# lopti.py itself, on the bundled model ------------------------------------------------------------


def settings_of(case):
    """The settings of lopti.py for a golden case."""
    names = lopti.Settings.__dataclass_fields__.keys() & case.keys() - {"steps"}
    prompts = len(case["rewards"]) // case["group_size"]
    return lopti.Settings(prompts_per_step=prompts, **{name: case[name] for name in names})


def lopti_update_model(model, optimizer, case):
    """A training step of lopti.py, but for sampling and rewards; and what it reports."""
    settings = settings_of(case)
    ids, mask = lopti.pack(case["prompts"], case["responses"])
    texts = [""] * len(ids)
    sampled = (ids, mask, texts, torch.zeros(len(ids), dtype=torch.bool))
    batch = [mock.Mock()] * settings.prompts_per_step
    with (
        mock.patch.object(lopti, "sample", return_value=sampled),
        mock.patch.object(lopti, "compute_rewards", return_value=case["rewards"]),
    ):
        reference = copy.deepcopy(model)
        models = (model, reference, optimizer, None, None)
        rollout, updates = lopti.training_step(*models, batch, settings)
    right = torch.cat([torch.tensor(row) for row in case["old_logprobs"]])
    assert torch.allclose(rollout.old_logprobs[mask], right, atol=1e-5, rtol=0)
    results = itertools.chain(*[results for _, results in updates])  # of each mini-batch
    norms = []
    for result, right in zip(results, case["steps"], strict=True):
        share = right["updated_tokens"] / right["response_tokens"]
        assert result["updated_share"] == pytest.approx(share)
        norms.append(result["grad_norm"])
    return norms


def test_lopti_updates_the_bundled_model_rightly(monkeypatch):
    """training_step of lopti.py makes the updates of golden.json, and reports their norms."""
    model, _ = lopti.load_model("", "cpu")
    monkeypatch.setattr(check_port, "load_bundled_model", lambda: model)
    assert check_port.check_model_update(lopti_update_model) == 0


# The diff of the main README ----------------------------------------------------------------------


def run_diff(case):
    """A golden rollout with README's diff, after the change."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    diff = page.split("```diff\n")[1].split("```")[0].splitlines()
    lines = [line[2:] for line in diff if line[:1] in ("+", " ")]
    table = torch.tensor(case["table"], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([table], case["learning_rate"], weight_decay=case["weight_decay"])
    tables = example_port.record_tables(optimizer, table)
    ids, mask = lopti.pack([[token] for token in case["prompts"]], case["responses"])

    def logprobs(rows, logits=table):
        every_logprob = (logits[ids[rows, :-1]] / case["temperature"]).log_softmax(-1)
        return every_logprob.gather(-1, ids[rows, 1:, None])[..., 0]

    def step():
        torch.nn.utils.clip_grad_norm_([table], case["max_grad_norm"])
        optimizer.step()

    mask = mask[:, 1:]
    rewards = check_port.float64(case["rewards"])
    names = case | {
        "torch": torch,
        "logprobs": logprobs,
        "old_logprobs": logprobs(slice(None)).detach(),
        "ref_logprobs": logprobs(slice(None), check_port.float64(case["reference"])),
        "kl_estimate": lopti.kl_estimate,
        "advantages": lopti.group_advantages(rewards, case["group_size"])[:, None] * mask,
        "mask": mask,
        "mini_batches": torch.arange(len(mask)).split(case["mini_batch_size"]),
        "optimizer": SimpleNamespace(step=step, zero_grad=optimizer.zero_grad),
    }
    exec(textwrap.dedent("\n".join(lines)), names)  # noqa: S102
    return tables


def test_readme_diff_is_a_right_port(knows, capsys):
    """README's diff makes the updates of golden.json, but for two choices that it does not show."""
    knows(CHOICES)
    choices = [ZERO_STEP, "a choice: there is no dual clip"]
    assert check_port.check_update(run_diff) == 0
    *states, right, zero_step, dual_clip = capsys.readouterr().out.splitlines()
    assert [right, zero_step, dual_clip] == ["Right.", *choices]
    found = {state.split(": ")[1] for state in states}
    assert found == {"right", "right, with your choices"}


def test_a_step_that_calls_another_is_recorded_once():
    """As that of a trainer whose optimizer is a subclass of AdamW."""

    class Optimizer(torch.optim.AdamW):
        def step(self):
            return super().step()

    table = torch.ones(2, requires_grad=True)
    torch.optim.AdamW([table])  # from now on PyTorch calls the hooks of both steps
    optimizer = Optimizer([table], lr=0.5, weight_decay=0.0)
    tables = example_port.record_tables(optimizer, table)
    for _ in range(2):
        table.sum().backward()
        optimizer.step()
    assert len(tables) == 2
    assert tables[0].tolist() == pytest.approx([0.5, 0.5])
    assert torch.equal(tables[1], table)


# The files of flags -------------------------------------------------------------------------------

PAPER = """
--prompts-per-step 64 --group-size 8 --mini-batch-size 256 --learning-rate 1e-6 --update-epochs 1
--temperature 0.7 --max-prompt-length 400 --max-new-tokens 4096 --clip-low 0.2 --clip-high 0.24
--clip-dual 10 --kl-coef 0.001 --weight-decay 0.01 --max-grad-norm 1 --advantage grpo"""


@pytest.mark.parametrize("words", ["--task kk --steps 351", "--task math --steps 781"])
def test_flag_files_have_the_settings_of_the_paper(words):
    """One that is lost, or a default that changes: the paper's run would silently be another."""
    file = f"@{ROOT / 'data' / words.split()[1]}.flags"
    settings = lopti.parse_arguments([file])
    assert lopti.parse_arguments([file, *words.split(), *PAPER.split()]) == settings
