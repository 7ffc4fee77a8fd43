"""What a port starts from, without an engine: golden.json, check_port.py, README, flags."""

import ast
import itertools
import json
import os
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "data"), str(ROOT)]
import lopti  # isort: skip, before torch

import check_port
import golden
import golden_model
import pytest
import torch
from golden_model import PAGE

GOLDEN = json.loads((ROOT / "data" / "golden.json").read_text(encoding="utf-8"))
slow = pytest.mark.skipif(not os.environ.get("LOPTI_ALL"), reason="LOPTI_ALL=1 runs it")
NAMES = {"ids": lambda case: case["name"]}


def block_of(page, language):
    """The first block of code in a language of a page, as it is written there."""
    return page.read_text(encoding="utf-8").split(f"```{language}\n")[1].split("```")[0]


# ---- golden.json


def leaves(values, place=()):
    """Every number and word of nested lists and dictionaries, with its place."""
    if not isinstance(values, (list, dict)):
        return [(place, values)]
    pairs = values.items() if isinstance(values, dict) else enumerate(values)
    return [leaf for key, value in pairs for leaf in leaves(value, (*place, key))]


@pytest.mark.parametrize(
    "part", ["cases", "rollouts", "treatments", pytest.param("model", marks=slow)]
)
def test_golden_file_is_what_its_script_computes(part):
    """An equation of golden.py that is changed by mistake; to the digits that hold elsewhere."""
    computed = leaves(golden.solve_part(part, GOLDEN[part]))
    written = dict(leaves(GOLDEN[part]))
    assert len(computed) == len(written)
    precision = 1e-4 if part == "model" else 1e-12
    for place, value in computed:
        if isinstance(value, float):
            value = pytest.approx(written[place], rel=precision, abs=1e-6 * precision**0.5)
        assert written[place] == value, place


def test_golden_cases_reach_every_clip_and_fact():
    """A golden.json without them: a port with that mistake would look right."""
    names = [case["name"] for case in GOLDEN["cases"]]
    assert len(set(names)) == len(names)
    for kind in golden.CLIPS:
        shares = [case["passes"]["all"][f"clip_{kind}_share"] for case in GOLDEN["cases"]]
        assert sum(share > 0 for share in shares) >= 3
    for mistake in check_port.MISTAKES | check_port.CHOICES:
        found = [
            max(check_port.differences(check_port.update_with({mistake}, case), case))
            for case in GOLDEN["rollouts"]
        ]
        assert max(found) > 0.05, mistake


@pytest.mark.parametrize("case", PAGE["cases"], **NAMES)
def test_lopti_makes_the_updates_of_golden_json(case):
    """The level of a whole model: padding, temperature, tied weights, AdamW on all weights."""
    policy, rollout, updates, steps = golden_model.lopti_update(case)
    mask = rollout.mask

    def same(values, right, tolerance):
        right = torch.tensor(list(itertools.chain(*right)), dtype=torch.float64)
        return torch.allclose(values[mask].double(), right, atol=tolerance, rtol=0)

    advantages = torch.tensor(PAGE["advantages"])[:, None] * mask
    weights = lopti.reweight_advantages(mask.double(), rollout.old_logprobs, case["alpha"])
    low, _ = lopti.split_tokens(rollout.old_logprobs, mask, case["eta"])
    assert same(rollout.old_logprobs, PAGE["old_logprobs"], 1e-5)
    assert same(rollout.entropies, PAGE["entropies"], 1e-5)
    assert same(weights, case["token_weights"], 1e-5)
    assert low[mask].tolist() == list(itertools.chain(*case["low"]))
    assert torch.allclose(rollout.advantages, (advantages * weights).float(), atol=1e-5)
    for name, statistics in updates.items():
        loss = statistics["policy_loss"] + PAGE["kl_coef"] * statistics["kl"]
        right = sum(step["loss"] for step in case["steps"] if step["pass"] == name)
        assert loss == pytest.approx(right, abs=1e-5)
    found = golden_model.differences(case, steps, policy)
    assert golden_model.is_right(found), found


# ---- check_port.py

EXAMPLE = block_of(HERE / "README.md", "python")
OWN_TOKENS = '{"low": low[i], "high": ~low[i], "all": low[i] | True}[name]'
FOR_PASS = 'for name in ("low", "high") if case["eta"] else ("all",):\n'
BROKEN = [  # what check_port.py must say, a part of README's example, and what stands there instead
    ("fact 1", "logprobs(table, case, i).det", "logprobs(table, case | {'temperature': 1}, i).det"),
    ("fact 1", 'table[before] / case["temperature"]', "table[before]"),
    (
        "fact 2",
        FOR_PASS,
        FOR_PASS + " " * 8 + "low = [logprobs(table, case, i).exp() < case['eta']"
        " for i in range(len(raw))]\n",
    ),
    ("fact 3", "N = sum(len(old[i]) for", f"N = sum(int({OWN_TOKENS}.sum()) or 1e-9 for"),
    (
        "fact 4",
        FOR_PASS,
        FOR_PASS + " " * 8 + "table.data = torch.tensor(case['table']).double()\n",
    ),
    (
        "fact 5",
        FOR_PASS,
        FOR_PASS + " " * 8 + "optimizer = torch.optim.AdamW([table], "
        "case['learning_rate'], weight_decay=case['weight_decay'])\n",
    ),
    ("fact 6", "if table.grad.any():", "if True:"),
    ("fact 7", "(ref - new).clamp(-5, 5)", "ref - new"),
    ("fact 7", "(-5, 5)", "(-20, 20)"),
    (
        "fact 7",
        'bounded = torch.maximum(objective, case["clip_dual"] * advantage)',
        "bounded = objective",
    ),
    ("likely tokens are updated first", '("low", "high")', '("high", "low")'),
    ("not weighted by Eq. 4", 'alpha = case["alpha"]', "alpha = 0"),
    ("not clipped", '1 - case["clip_low"], 1 + case["clip_high"]', "0, 99"),
    ("not at 1 + ε_h", '1 + case["clip_high"]', '1 + case["clip_low"]'),
    ("no mistake that is known", "1 - case[", "0.9 - case["),
]


def ported(source):
    namespace = {}
    exec(source, namespace)  # noqa: S102
    return namespace["update"]


def test_readme_example_is_a_right_port():
    assert check_port.check(ported(EXAMPLE)) == []


@pytest.mark.parametrize(("said", "part", "instead"), BROKEN)
def test_check_port_names_the_broken_fact(said, part, instead):
    assert EXAMPLE.count(part) == 1
    [sentence] = check_port.check(ported(EXAMPLE.replace(part, instead)))
    assert said in sentence


def test_check_port_names_two_broken_facts():
    """As a first port has them: no dual clip, and a step where the gradient is 0."""
    source = EXAMPLE
    for _, part, instead in (BROKEN[4], BROKEN[6]):
        source = source.replace(part, instead)
    facts = [sentence[:6] for sentence in check_port.check(ported(source))]
    assert facts == ["fact 4", "fact 6"]


def test_check_port_as_a_command(tmp_path, monkeypatch, capsys):
    """Exit codes 0 (right) and 1 (broken); 2 with one sentence for what is no port."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "right_port.py").write_text(EXAMPLE, encoding="utf-8")
    (tmp_path / "first_half.py").write_text(EXAMPLE + "    return tables[:1]\n", encoding="utf-8")
    half = EXAMPLE.replace("return tables", "return tables[:1]")
    (tmp_path / "first_half.py").write_text(half, encoding="utf-8")
    assert check_port.main(["right_port:update"]) == 0
    assert "The port is right in all cases." in capsys.readouterr().out
    for port, problem in (
        ("first_half:update", "GRPO: update must return 2 tables"),
        ("right_port:updat", "has no attribute 'updat'"),
        ("no_port:update", "No module named 'no_port'"),
    ):
        with pytest.raises(SystemExit) as stopped:
            check_port.main([port])
        assert stopped.value.code == 2 and problem in capsys.readouterr().err


# ---- The diff of the main README


class TableOptimizer:
    """AdamW that clips, passes over a gradient of 0, and keeps the table after each step."""

    def __init__(self, table, case):
        decay = case["weight_decay"]
        self.table = table
        self.max_norm = case["max_grad_norm"]
        self.adamw = torch.optim.AdamW([table], case["learning_rate"], weight_decay=decay)
        self.tables = []

    def step(self):
        torch.nn.utils.clip_grad_norm_([self.table], self.max_norm)
        if self.table.grad.any():
            self.adamw.step()
        self.tables.append(self.table.detach().clone())

    def zero_grad(self):
        self.adamw.zero_grad()


def table_policy(case):
    """What a trainer has of a golden rollout: tensors (B, T), log π as a function of the table."""
    responses = [torch.tensor(response) for response in case["responses"]]
    ids = torch.nn.utils.rnn.pad_sequence(responses, batch_first=True, padding_value=-1)
    mask = ids >= 0
    ids = ids.clamp(min=0)
    before = torch.cat([torch.tensor(case["prompts"])[:, None], ids[:, :-1]], 1)

    def logprobs(table):
        every_logprob = (table[before] / case["temperature"]).log_softmax(-1)
        return every_logprob.gather(-1, ids[..., None])[..., 0]

    table = torch.tensor(case["table"], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor(case["reference"], dtype=torch.float64)
    rewards = torch.tensor(case["rewards"], dtype=torch.float64)
    return SimpleNamespace(
        table=table,
        mask=mask,
        logprobs=logprobs,
        old=logprobs(table).detach(),
        ref=logprobs(reference),
        advantages=lopti.group_advantages(rewards, case["group_size"])[:, None] * mask,
        mini_batches=torch.arange(len(ids)).split(case["mini_batch_size"]),
        optimizer=TableOptimizer(table, case),
    )


def run_diff(sign, case):
    """The diff's code before ("-") or after ("+") the change, on a golden rollout."""
    diff = block_of(ROOT / "README.md", "diff").splitlines()
    lines = [line[2:] for line in diff if line[0] in (sign, " ")]
    policy = table_policy(case)

    def token_loss(rows):
        advantages = namespace["advantages"]
        new = policy.logprobs(policy.table)
        losses = check_port.token_losses(new, policy.old, policy.ref, advantages, case, ())
        return losses[rows]

    namespace = {
        "old_logprobs": policy.old,
        "advantages": policy.advantages,
        "mask": policy.mask,
        "alpha": case["alpha"],
        "eta": case["eta"],
        "mini_batches": policy.mini_batches,
        "optimizer": policy.optimizer,
        "token_loss": token_loss,
    }
    exec(textwrap.dedent("\n".join(lines)), namespace)  # noqa: S102
    return policy.optimizer.tables


def test_readme_diff_is_a_right_port():
    """A porter copies it: what it divides by, what comes first, from which π."""
    assert check_port.check(lambda case: run_diff("+", case)) == []
    grpo = GOLDEN["rollouts"][0]
    assert check_port.is_right(run_diff("-", grpo), grpo)


# ---- The port to verl, without verl


class Batch(SimpleNamespace):
    def __len__(self):
        return len(self.keys)


def verl_plugin(monkeypatch):
    """verl_lopti.py with stand-ins for what it takes from verl: a store, and a trainer."""
    store = {}

    def get(keys, partition, names):
        return {name: store[name] for name in names}

    def put(keys, partition, fields):
        store.update(fields)
        return Batch(keys=keys, partition_id=partition)

    class Trainer:
        """Like verl's: the loss is summed over response_mask and divided by N of loss_mask."""

        def __init__(self, config):
            self.config = config

        def _compute_advantage(self, batch, metrics):
            return batch

        def _update_actor(self, batch, metrics):
            padded = {
                name: torch.nn.utils.rnn.pad_sequence(list(rows.unbind()), batch_first=True)
                for name, rows in store.items()
            }
            for rows in self.policy.mini_batches:
                new = self.policy.logprobs(self.policy.table)
                fixed = [padded[name] for name in ("old_log_probs", "ref_log_prob", "advantages")]
                losses = check_port.token_losses(new, *fixed, self.case, ())
                losses = (losses * padded["response_mask"])[rows]
                (losses.sum() / padded["loss_mask"][rows].sum()).backward()
                self.policy.optimizer.step()
                self.policy.optimizer.zero_grad()
            return batch

    queue = ModuleType("transfer_queue")
    queue.kv_batch_get = get
    queue.kv_batch_put = put
    tensordict = ModuleType("tensordict")
    tensordict.TensorDict = lambda fields, batch_size: fields
    verl = ModuleType("verl.trainer.ppo.v1")
    verl.PPOTrainerSync = Trainer
    verl.register_trainer = lambda name: lambda trainer: trainer
    modules = {"transfer_queue": queue, "tensordict": tensordict, "verl.trainer.ppo.v1": verl}
    for name in ("verl", "verl.trainer", "verl.trainer.ppo"):
        modules[name] = ModuleType(name)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return runpy.run_path(str(HERE / "verl_lopti.py")), store


def test_verl_plugin_is_a_right_port(monkeypatch):
    """Its weights, its split, its order and its masks, without verl."""
    plugin, store = verl_plugin(monkeypatch)

    def update(case):
        policy = table_policy(case)
        lengths = policy.mask.sum(1)

        def ragged(values):
            rows = [row[:length] for row, length in zip(values, lengths)]
            return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

        store["old_log_probs"] = ragged(policy.old)
        store["ref_log_prob"] = ragged(policy.ref)
        store["advantages"] = ragged(policy.advantages)
        store["response_mask"] = ragged(policy.mask.long())
        store["loss_mask"] = ragged(policy.mask.long())
        settings = SimpleNamespace(alpha=case["alpha"], eta=case["eta"])
        mode = SimpleNamespace(v1=SimpleNamespace(trainer_mode="lopti"))
        trainer = plugin["LoptiTrainer"](SimpleNamespace(lopti=settings, trainer=mode))
        trainer.policy = policy
        trainer.case = case
        batch = Batch(keys=["0"] * len(lengths), partition_id="train")
        trainer._update_actor(trainer._compute_advantage(batch, {}), {})
        return policy.optimizer.tables

    assert check_port.check(update) == []


# ---- The flag files and the scripts

PAPER = {  # of both tasks, in the words of `lopti.Settings`
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
    "alpha": 0.0,
    "eta": 0.0,
    "sample_batch_size": 64,
    "tokens_per_microbatch": 4096,
    "gradient_checkpointing": True,
    "dtype": "bfloat16",
    "eval_every": 50,
    "save_every": 20,
}
KK = "K-and-K/knights-and-knaves:{}:3ppl+4ppl+5ppl+6ppl+7ppl"
OF_TASK = {
    "kk": {
        "task": "kk",
        "model": "Qwen/Qwen2.5-3B-Instruct",
        "data": KK.format("train"),
        "eval_data": KK.format("test"),
        "people": (3, 4, 5, 6, 7),
        "steps": 351,
    },
    "math": {
        "task": "math",
        "model": "Qwen/Qwen2.5-3B",
        "data": "agentica-org/DeepScaleR-Preview-Dataset",
        "eval_data": "HuggingFaceH4/MATH-500::test",
        "steps": 781,
    },
}


@pytest.mark.parametrize("task", OF_TASK)
def test_flag_files_have_the_settings_of_the_paper(task):
    """One that is lost, or a default that changes: the paper's run would silently be another."""
    settings = lopti.parse_arguments([f"@{ROOT / 'data' / task}.flags"])
    for name, value in (PAPER | OF_TASK[task]).items():
        assert getattr(settings, name) == value, name


WITHOUT_PACKAGES = """
import runpy, sys
sys.modules |= dict.fromkeys(["torch", "trl", "ray"])
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_trl_script_helps_and_says_what_is_missing():
    script = "trl_lopti.py"

    def run(*flags):
        command = [sys.executable, "-c", WITHOUT_PACKAGES, HERE / script, *flags]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    described = ast.get_docstring(ast.parse((HERE / script).read_text(encoding="utf-8")))
    helped = run("--help")
    assert helped.returncode == 0 and described.split("\n")[0] in helped.stdout
    missing = run()
    assert missing.returncode == 2 and "Traceback" not in missing.stderr
    assert "torch" in missing.stderr.splitlines()[-1]
