"""golden.json, check_port.py, the example port, README's diff and the files of flags."""

import copy
import itertools
import json
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
MISTAKES = list(check_port.MISTAKES)
if not os.environ.get("LOPTI_ALL"):
    MISTAKES = MISTAKES[::3]


# golden.json --------------------------------------------------------------------------------------


def numbers(values):
    """Without the names, which torch.testing cannot compare."""

    def without_names(row):
        return {name: value for name, value in row.items() if not isinstance(value, str)}

    return json.loads(json.dumps(values), object_hook=without_names)


@pytest.mark.parametrize("part", ["cases", "rollouts", "model"])
def test_golden_json_is_what_golden_py_computes(part):
    """Every output anew: an equation that was changed, an input or a digit shows."""
    written = check_port.GOLDEN[part]
    # transformers has float32 inside: with another instruction set 1e-6 of a number differs
    limits = {"rtol": 1e-5, "atol": 1e-7} if part == "model" else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(
        numbers(golden.solve_part(part, written)), numbers(written), **limits
    )


def off_by(port, case):
    """The largest difference of a logit from golden.json."""
    steps = zip(port.update(case), case["steps"])
    return max((table - check_port.float64(step["table"])).abs().max() for table, step in steps)


def test_golden_json_reaches_every_clip_and_mistake():
    """A golden.json without them: a port with that mistake would look right."""
    for kind in golden.CLIPS:
        passes = [case["passes"]["all"] for case in check_port.GOLDEN["cases"]]
        assert sum(found[f"clip_{kind}_share"] > 0 for found in passes) >= 3
    rollouts = check_port.GOLDEN["rollouts"]
    assert max(off_by(check_port.port_with([]), case) for case in rollouts) < 1e-9
    for mistake in MISTAKES:
        assert max(off_by(check_port.port_with([mistake]), case) for case in rollouts) > 0.005


# check_port.py ------------------------------------------------------------------------------------


def checked(*mistakes):
    return check_port.verdict(check_port.find_mistakes(check_port.port_with(mistakes).update))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_check_port_names_each_mistake(mistake, capsys):
    """And takes none for another."""
    assert checked(mistake) == (0 if "a choice" in mistake else 1)
    *_, last_but_one, last = capsys.readouterr().out.splitlines()
    assert last == mistake
    assert last_but_one.startswith("Right" if "a choice" in mistake else "Looking")


def test_check_port_names_two_mistakes(capsys):
    names = [MISTAKES[0], "the ratio is not clipped"]
    assert checked(*names) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == names


@pytest.fixture
def change(monkeypatch):
    """A change of the example port that check_port.py does not know."""

    def put(text, instead):
        monkeypatch.setitem(check_port.MISTAKES, "unknown", [(text, instead)])
        monkeypatch.setattr(check_port, "candidates", lambda source: [()])
        return check_port.port_with(["unknown"])

    return put


def test_check_port_has_no_room_for_a_small_mistake(change, capsys):
    """A weight decay of .011 for .01 moves a logit by about a thousandth."""
    decay = 'weight_decay=case["weight_decay"]'
    line = f'    optimizer = torch.optim.AdamW([table], case["learning_rate"], {decay})'
    port = change(line, line.replace(decay, "weight_decay=0.011"))
    assert check_port.verdict(check_port.find_mistakes(port.update)) == 1
    assert "no mistake that is known" in capsys.readouterr().out


def test_check_port_as_a_command(monkeypatch, capsys, tmp_path):
    """Exit code 0 for the example, 1 for a mistake, 2 for what is no port."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "broken_port.py").write_text(check_port.EXAMPLE.replace("/ mask.sum()", ""))
    assert check_port.main(["example_port"]) == 0
    assert capsys.readouterr().out.count("Right.") == 4
    assert check_port.main(["example_port:update"]) == 0
    assert check_port.main(["broken_port"]) == 1
    printed = capsys.readouterr().out
    assert "policy_loss: fact 3: the loss is a sum" in printed
    assert printed.count("Right.") == 4
    for port, problem in (
        ("no_port:update", "No module named 'no_port'"),
        ("json", "json has none of group_advantages"),
    ):
        with pytest.raises(SystemExit, match="2"):
            check_port.main([port])
        assert problem in capsys.readouterr().err


LOGITS = 'logits = model(rows).logits[:, len(case["prompt"]) - 1 : -1]  # of the token after each'
LOSS = "policy_loss(logprobs()[rows], *fixed, case)"
CHANGES = [  # a line of the example port, another, the case of golden.json, the exit code
    (f"        {LOGITS}", f"        {LOGITS}", 5, 0),
    (f"        {LOGITS}", f"        {LOGITS.replace(' - 1 : -1', ' :')}", 5, 1),
    ("            if norm > 0:", "            if True:", 5, 0),
    ("            yield float(norm)", "            yield 1.001 * float(norm)", 5, 1),
    (f"            {LOSS}.backward()", f"            (-{LOSS}).backward()", 4, 1),
]


@pytest.mark.parametrize("text, instead, number, code", CHANGES)
def test_a_language_model_is_checked_to_its_weights(
    text, instead, number, code, change, monkeypatch
):
    """Level 3. In case 5 a pass has no token in a mini-batch; in case 4 there is one step, of which
    only the weights show that the gradient has the wrong sign."""
    monkeypatch.setitem(check_port.GOLDEN, "model", [check_port.GOLDEN["model"][number]])
    assert check_port.check_model_update(change(text, instead).update_model) == code


# lopti.py itself, on the bundled model ------------------------------------------------------------


def settings_of(case):
    """The settings of lopti.py for a golden case with one prompt."""
    names = lopti.Settings.__dataclass_fields__.keys() & case.keys() - {"passes", "steps"}
    return lopti.Settings(prompts_per_step=1, **{name: case[name] for name in names})


def lopti_update_model(model, optimizer, case):
    """A training step of lopti.py, but for sampling and rewards; and what it reports."""
    settings = settings_of(case)
    ids, mask, lengths = lopti.pack([case["prompt"]] * len(case["responses"]), case["responses"])
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


def test_readme_diff_is_a_right_port():
    """A porter copies it: what it divides by, what comes first, from which π."""
    choices = {check_port.ZERO_STEP, "fact 7, a choice: there is no dual clip"}
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
