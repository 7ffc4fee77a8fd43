"""golden.json, check_port.py, the example port, README's diff and the files of flags."""

import os
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "data"), str(ROOT)]

import check_port
import golden
import pytest
import torch

import lopti

torch.set_num_threads(1)  # for many small operations the fastest
slow = pytest.mark.skipif(not os.environ.get("LOPTI_ALL"), reason="LOPTI_ALL=1 runs it")
EXAMPLE = (HERE / "example_port.py").read_text(encoding="utf-8")


# golden.json --------------------------------------------------------------------------------------


def leaves(values, place=()):
    """Every number and word of nested lists and dictionaries by its place."""
    if not isinstance(values, (list, dict)):
        return {place: values}
    found = {}
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        found |= leaves(value, (*place, key))
    return found


@pytest.mark.parametrize("part", ["cases", "rollouts", "treatments", "model"])
def test_golden_json_is_what_golden_py_computes(part):
    """Every output anew: an equation that was changed, an input or a digit shows."""
    written = leaves(check_port.GOLDEN[part])
    computed = leaves(golden.solve_part(part, check_port.GOLDEN[part]))
    assert computed.keys() == written.keys()
    # transformers has float32 inside: with another instruction set 1e-6 of a number differs
    precision = {"rel": 1e-5, "abs": 1e-7} if part == "model" else {"rel": 1e-12, "abs": 1e-14}
    for place, value in written.items():
        expected = pytest.approx(value, **precision) if isinstance(value, float) else value
        assert computed[place] == expected, place


def test_golden_cases_reach_every_clip_and_mistake():
    """A golden.json without them: a port with that mistake would look right."""
    for kind in golden.CLIPS:
        shares = [
            case["passes"]["all"][f"clip_{kind}_share"] for case in check_port.GOLDEN["cases"]
        ]
        assert sum(share > 0 for share in shares) >= 3
    for mistake in check_port.MISTAKES | check_port.CHOICES:
        assert max(off_by({mistake}, case) for case in check_port.GOLDEN["rollouts"]) > 0.005


def test_golden_rollouts_are_what_check_port_takes_for_right():
    assert max(off_by((), case) for case in check_port.GOLDEN["rollouts"]) < 1e-9


def off_by(mistakes, case):
    """The largest difference of a logit that mistakes make."""
    steps = zip(check_port.update_with(mistakes, case), case["steps"])
    return max((table - check_port.float64(step["table"])).abs().max() for table, step in steps)


# check_port.py and the example --------------------------------------------------------------------

WEIGHT = "(alpha * old_logprobs.exp() + 1 - alpha)"
REWEIGHTED = "reweight_advantages(advantages, old,"
EACH_PASS = "for update_mask in passes:\n"
ADAMW = "torch.optim.AdamW(parameters, case['learning_rate'], weight_decay=case['weight_decay'])"
BROKEN = [  # what check_port.py says, what stands in the example, and the mistake in its place
    ("is the reference model's", REWEIGHTED, "reweight_advantages(advantages, ref,"),
    ("compared with log π", "old_logprobs.exp() < eta", "old_logprobs < eta"),
    ("tokens that the pass updates", "/ mask.sum()", "/ update_mask.sum().clamp(min=1)"),
    ("the loss is a sum", ".sum() / mask.sum()", ".sum()"),
    ("N counts padding", "/ mask.sum()", "/ mask.numel()"),
    ("padding is taken for", "ids >= 0", "ids >= -1"),
    (
        "leaves out the last token",
        "ids >= 0",
        "torch.nn.functional.pad(ids, (0, 1), value=-1)[:, 1:] >= 0",
    ),
    ("old log-probabilities anew", EACH_PASS, f"{EACH_PASS}        old = logprobs().detach()\n"),
    ("optimizer of its own", EACH_PASS, f"{EACH_PASS}        optimizer = {ADAMW}\n"),
    ("in one optimizer step", 'if case["eta"] else [mask]', "if False else [mask]"),
    ("gradient is not clipped", '(parameters, case["max_grad_norm"])', "(parameters, 1e9)"),
    ("high-probability tokens are updated first", "low, mask & ~low", "mask & ~low, low"),
    ("not weighted by Eq. 4", WEIGHT, "1"),
    ("α and 1 - α are exchanged", WEIGHT, "((1 - alpha) * old_logprobs.exp() + alpha)"),
    ("shifted by one", "logits[before]", "logits[ids]"),
    ("divided by G,", "std(1, keepdim=True)", "std(1, keepdim=True, correction=0)"),
    ("batch's, not the group's", "rewards.view(-1, group_size)", "rewards.view(1, -1)"),
    ("ratio is not clipped", '1 - case["clip_low"], 1 + case["clip_high"]', "0, 99"),
    ("at 1 + ε_l", '1 + case["clip_high"]', '1 + case["clip_low"]'),
    ("wrong way round", "(ref_logprobs - logprobs)", "(logprobs - ref_logprobs)"),
    ("KL is subtracted", '(case["kl_coef"] * kl', '(-case["kl_coef"] * kl'),
    ("fact 6, a choice", "if norm > 0:", "if True:"),
    ("a choice: log π_ref", "(-5, 5)", "(-99, 99)"),
    ("a choice: there is no dual clip", "advantages < 0, bounded", "advantages < 0, objective"),
]


def port_with(*changes):
    """The example port, with changes to it, as a module."""
    source = EXAMPLE
    for part, instead in changes:
        assert source.count(part) == 1
        source = source.replace(part, instead)
    namespace = {}
    exec(source, namespace)  # noqa: S102
    return SimpleNamespace(**namespace, __name__="port")


def checked(port):
    return check_port.verdict(check_port.find_mistakes(port.update))


@pytest.mark.parametrize(("said", "part", "instead"), BROKEN)
def test_check_port_names_a_mistake(said, part, instead, capsys):
    assert checked(port_with((part, instead))) == (0 if "choice" in said else 1)
    assert said in capsys.readouterr().out


def test_check_port_names_two_mistakes(capsys):
    assert checked(port_with(BROKEN[0][1:], BROKEN[2][1:])) == 1
    printed = capsys.readouterr().out
    assert BROKEN[0][0] in printed and BROKEN[2][0] in printed


@slow
@pytest.mark.parametrize("mistake", check_port.MISTAKES | check_port.CHOICES)
def test_no_mistake_is_taken_for_another(mistake):
    found = check_port.find_mistakes(lambda case: check_port.update_with({mistake}, case))
    assert found == (mistake,)


def test_check_port_has_no_room_for_a_small_mistake(monkeypatch, capsys):
    """A weight decay of .011 for .01 moves a logit by about a thousandth."""
    monkeypatch.setattr(check_port, "candidates", lambda: [()])
    assert checked(port_with(('weight_decay=case["weight_decay"]', "weight_decay=0.011"))) == 1
    assert "no mistake that is known" in capsys.readouterr().out


def test_check_port_as_a_command(monkeypatch, capsys, tmp_path):
    """Exit code 0 for the example, 1 for a mistake, 2 for what is no port."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "broken_port.py").write_text(EXAMPLE.replace("/ mask.sum()", ""))
    assert check_port.main(["example_port"]) == 0
    assert capsys.readouterr().out.count("Right.") == 4
    assert check_port.main(["example_port:update"]) == 0
    assert check_port.main(["broken_port"]) == 1
    printed = capsys.readouterr().out
    assert "policy_loss: fact 3: the loss is a sum" in printed and printed.count("Right.") == 4
    for port, problem in (
        ("no_port:update", "No module named 'no_port'"),
        ("json", "json has none of group_advantages"),
    ):
        with pytest.raises(SystemExit) as stopped:
            check_port.main([port])
        assert stopped.value.code == 2 and problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "instead", "code"),
    [
        ("import torch", "import torch", 0),
        ("if norm > 0:", "if True:", 0),
        ('len(case["prompt"]) - 1 : -1]', 'len(case["prompt"]) :]', 1),
    ],
)
def test_a_language_model_is_checked_to_its_weights(part, instead, code, monkeypatch):
    """Level 3, where a pass has no token: right; a step all the same; the logits shifted by one."""
    case = check_port.model_cases()[5]
    monkeypatch.setattr(check_port, "model_cases", lambda: [case])
    assert check_port.check_model_update(port_with((part, instead)).update_model) == code


# lopti.py itself, on the bundled model ------------------------------------------------------------


def settings_of(case):
    """The settings of lopti.py for a golden case with one prompt."""
    names = lopti.Settings.__dataclass_fields__.keys() & case.keys() - {"passes", "steps"}
    return lopti.Settings(prompts_per_step=1, **{name: case[name] for name in names})


def lopti_update_model(model, optimizer, case):
    """Steps 3 to 7 of a training step of lopti.py, and what they report on the way."""
    settings = settings_of(case)
    prompts = [case["prompt"]] * len(case["responses"])
    ids, mask, lengths = lopti.pack(prompts, case["responses"])
    rollout = lopti.Rollout(ids, mask, lengths, truncated=torch.zeros(4), texts=[])
    old, rollout.entropies = lopti.response_logprobs(model, rollout, settings)
    rollout.old_logprobs = old
    rollout.ref_logprobs = old
    advantages = lopti.group_advantages(torch.tensor(case["rewards"]), settings.group_size)
    advantages = advantages[:, None] * mask
    rollout.advantages = lopti.reweight_advantages(advantages, old, settings.alpha)
    low, high = lopti.split_tokens(old, mask, settings.eta)
    results = []
    for name in settings.pass_names():
        update_mask = {"low": low, "high": high, "all": mask}[name]
        results += lopti.update(model, optimizer, rollout, update_mask, settings)
    for values, name in ((rollout.entropies, "entropies"), (old, "old_logprobs")):
        right = torch.cat([torch.tensor(row) for row in case[name]])
        assert torch.allclose(values[mask], right, atol=1e-5, rtol=0)
    for result, right in zip(results, case["steps"], strict=True):
        share = right["updated_tokens"] / right["response_tokens"]
        assert result["updated_share"] == pytest.approx(share)
        assert result["grad_norm"] == pytest.approx(right["gradient_norm"], rel=1e-4)


def test_lopti_updates_the_bundled_model_rightly():
    assert check_port.check_model_update(lopti_update_model) == 0


# The diff of the main README ----------------------------------------------------------------------


def run_diff(case):
    """The code of README's diff, after the change, on a golden rollout."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    diff = page.split("```diff\n")[1].split("```")[0].splitlines()
    lines = [line[2:] for line in diff if line[:1] in ("+", " ")]
    ids, before, mask = check_port.padded_rollout(case)
    table = torch.tensor(case["table"], dtype=torch.float64, requires_grad=True)

    def of_table(logits):
        every_logprob = (logits[before] / case["temperature"]).log_softmax(-1)
        return every_logprob.gather(-1, ids[..., None])[..., 0]

    def kl(rows):
        ref = of_table(check_port.float64(case["reference"]))
        return lopti.kl_estimate(of_table(table), ref)[rows]

    adamw = torch.optim.AdamW([table], case["learning_rate"], weight_decay=case["weight_decay"])
    tables = []

    def step():
        torch.nn.utils.clip_grad_norm_([table], case["max_grad_norm"])
        adamw.step()
        tables.append(table.detach().clone())

    rewards = check_port.float64(case["rewards"])
    names = ("alpha", "eta", "clip_low", "clip_high", "kl_coef")
    namespace = {name: case[name] for name in names} | {
        "torch": torch,
        "old_logprobs": of_table(table).detach(),
        "logprobs": lambda rows: of_table(table)[rows],
        "kl": kl,
        "advantages": lopti.group_advantages(rewards, case["group_size"])[:, None] * mask,
        "mask": mask,
        "mini_batches": torch.arange(len(ids)).split(case["mini_batch_size"]),
        "optimizer": SimpleNamespace(step=step, zero_grad=adamw.zero_grad),
    }
    exec(textwrap.dedent("\n".join(lines)), namespace)  # noqa: S102
    return tables


def test_readme_diff_is_a_right_port():
    """A porter copies it: what it divides by, what comes first, from which π."""
    assert set(check_port.find_mistakes(run_diff)) == {"zero step", "no dual clip"}


# The files of flags -------------------------------------------------------------------------------

PAPER = {
    "prompts_per_step": 64,
    "group_size": 8,
    "mini_batch_size": 256,
    "learning_rate": 1e-6,
    "temperature": 0.7,
    "max_prompt_length": 400,
    "max_new_tokens": 4096,
    "clip_low": 0.2,
    "clip_high": 0.24,
    "clip_dual": 10.0,
    "kl_coef": 0.001,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "passes": 1,
    "advantage": "grpo",
}


@pytest.mark.parametrize(("task", "steps"), [("kk", 351), ("math", 781)])
def test_flag_files_have_the_settings_of_the_paper(task, steps):
    """One that is lost, or a default that changes: the paper's run would silently be another."""
    settings = lopti.parse_arguments([f"@{ROOT / 'data' / task}.flags"])
    for name, value in (PAPER | {"task": task, "steps": steps}).items():
        assert getattr(settings, name) == value, name
