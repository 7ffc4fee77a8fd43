"""What verl_lopti.py and verl_kk.sh would give to verl's own functions, compared with golden.json.

verl is not needed. Its store and the trainer that the plugin extends are stand-ins that only keep
what they get; README.md says when verl itself was run.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

import check_port
import pytest
import torch

import lopti

FIELDS = ("advantages", "old_log_probs", "response_mask", "loss_mask")


class Batch:
    """Names rows of the store, like verl's."""

    def __init__(self, case):
        self.keys = [f"response {i}" for i in range(len(case["lengths"]))]
        self.partition_id = f"partition of {case['name']}"

    def __len__(self):
        return len(self.keys)


class Trainer:
    """In the place of verl's: it keeps the fields that verl's update would read from the store."""

    def __init__(self, config):
        self.config = config
        self.updates = []

    def _compute_advantage(self, batch, metrics):
        return batch

    def _update_actor(self, batch, metrics):
        fields = self.config.store[batch.partition_id, *batch.keys]
        self.updates.append({name: fields[name].values().clone() for name in FIELDS})
        metrics["tokens"] = int(fields["response_mask"].values().sum())
        return batch


def import_plugin(store):
    """What verl_lopti.py defines; `store` is {(partition, *keys): fields}."""

    def get(keys, partition, names):
        fields = store[partition, *keys]
        return {name: fields[name] for name in names}

    def put(keys, partition, fields):
        store[partition, *keys].update(fields)
        return next(batch for batch in store["batches"] if batch.partition_id == partition)

    verl = SimpleNamespace(PPOTrainerSync=Trainer, register_trainer=lambda name: lambda each: each)
    modules = {
        "transfer_queue": SimpleNamespace(kv_batch_get=get, kv_batch_put=put),
        "tensordict": SimpleNamespace(TensorDict=lambda fields, batch_size: fields),
        "verl.trainer.ppo.v1": verl,
    }
    with mock.patch.dict(sys.modules, modules):
        return runpy.run_path(str(HERE / "verl_lopti.py"))


@pytest.mark.parametrize("case", check_port.GOLDEN["cases"], ids=lambda case: case["name"])
@pytest.mark.parametrize("tool_tokens", [False, True])
def test_verl_gets_the_advantages_and_tokens_of_both_passes(case, tool_tokens):
    """verl's update gets Â after Eq. 4, first the low tokens, then the high ones, and a whole N.

    A token that a tool wrote, and not the policy, is in no pass: its `response_mask` is 0.
    """

    def of_responses(rows):
        return [torch.tensor(row[:length]) for row, length in zip(rows, case["lengths"])]

    masks = [torch.ones(length).long() for length in case["lengths"]]
    advantages = [mask * value for mask, value in zip(masks, case["advantages"])]
    if tool_tokens:
        for mask in masks:
            mask[1::2] = 0
    batch = Batch(case)
    fields = {"response_mask": masks, "loss_mask": masks, "advantages": advantages}
    fields["old_log_probs"] = of_responses(case["old_logprobs"])
    for name, rows in fields.items():
        fields[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)  # no padding
    store = {(batch.partition_id, *batch.keys): fields, "batches": [batch]}
    mode = SimpleNamespace(trainer_mode="lopti")
    config = SimpleNamespace(lopti=SimpleNamespace(**case), store=store)
    config.trainer = SimpleNamespace(v1=mode)
    trainer = import_plugin(store)["LoptiTrainer"](config)
    assert mode.trainer_mode == "sync"  # the one under which verl does what is extended here
    metrics = {}
    after = trainer._update_actor(trainer._compute_advantage(batch, metrics), metrics)
    assert after is batch
    mask = torch.cat(masks).bool()
    low = torch.cat(of_responses(case["low"]))
    passes = {"tokens": mask}
    if case["eta"]:
        passes = {"low/tokens": mask & low, "high/tokens": mask & ~low}
    for update, tokens in zip(trainer.updates, passes.values(), strict=True):
        expected = torch.cat(of_responses(case["reweighted_advantages"]))
        assert torch.allclose(update["advantages"], expected)
        assert torch.equal(update["response_mask"].bool(), tokens)  # verl sums the loss over it
        assert torch.equal(update["loss_mask"].bool(), mask)  # and counts N on it
    assert metrics == {name: int(tokens.sum()) for name, tokens in passes.items()}
    assert torch.equal(fields["response_mask"].values().bool(), mask)  # as before the passes


def test_the_shell_script_has_the_settings_of_the_paper(tmp_path):
    """verl_kk.sh gives verl the values of kk.flags in verl's keys, and further keys behind them."""
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$PYTHONPATH" "$VERL_USE_EXTERNAL_MODULES" "$@"\n')
    python.chmod(0o755)
    words = ["bash", str(HERE / "verl_kk.sh"), "lopti.eta=0"]
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        words, env={"PATH": path}, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    folders, modules, *words = run.stdout.splitlines()
    assert Path(folders.split(":")[0]) == HERE
    assert Path(folders.split(":")[1]).resolve() == ROOT
    assert modules == "verl_lopti"
    assert words[:2] == ["-m", "verl.trainer.main_ppo"]
    assert words[-1] == "lopti.eta=0"
    given = dict(word.split("=", 1) for word in words[2:-1])
    kk = lopti.parse_arguments([f"@{ROOT / 'data' / 'kk.flags'}"])
    actor = "actor_rollout_ref.actor"
    numbers = {
        "+lopti.alpha": 0.3,
        "+lopti.eta": 0.5,
        "data.train_batch_size": kk.prompts_per_step,
        "data.max_prompt_length": kk.max_prompt_length,
        "data.max_response_length": kk.max_new_tokens,
        "actor_rollout_ref.rollout.n": kk.group_size,
        "actor_rollout_ref.rollout.temperature": kk.temperature,
        f"{actor}.ppo_mini_batch_size": kk.mini_batch_size / kk.group_size,  # verl counts prompts
        f"{actor}.ppo_epochs": kk.passes,
        f"{actor}.optim.lr": kk.learning_rate,
        f"{actor}.optim.weight_decay": kk.weight_decay,
        f"{actor}.optim.clip_grad": kk.max_grad_norm,
        f"{actor}.clip_ratio_low": kk.clip_low,
        f"{actor}.clip_ratio_high": kk.clip_high,
        f"{actor}.clip_ratio_c": kk.clip_dual,
        f"{actor}.kl_loss_coef": kk.kl_coef,
        f"{actor}.entropy_coeff": 0,
    }
    assert {name: float(given[name]) for name in numbers} == numbers
    names = {
        "trainer.v1.trainer_mode": "lopti",
        "algorithm.adv_estimator": kk.advantage,
        "algorithm.rollout_correction.bypass_mode": "false",
        "reward.custom_reward_function.path": "pkg://verl_lopti",
        "reward.custom_reward_function.name": "compute_score",
        f"{actor}.optim.lr_scheduler_type": "constant",
        f"{actor}.loss_agg_mode": "token-mean",
        f"{actor}.use_kl_loss": "True",
        f"{actor}.kl_loss_type": "low_var_kl",
    }
    assert {name: given[name] for name in names} == names


def test_the_reward_is_a_number():
    """compute_score takes a solution as text or as in the published data, and returns a number."""
    compute_score = import_plugin({})["compute_score"]
    response = "So.</think><answer>Zoey is a knight</answer>"  # the prompt has opened <think>
    truth = "(1) Zoey is a knight"
    assert compute_score("kk", response, truth) == 3.0
    assert compute_score("kk", response, {"solution_text_format": truth}) == 3.0
