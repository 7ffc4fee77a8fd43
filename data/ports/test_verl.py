"""The port to verl, without verl: golden.json through stand-ins for its store and its trainer."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import check_port
import pytest
import torch

import lopti

BATCH = mock.MagicMock()  # which verl's store has the fields of


class Trainer:
    """Like verl's: the loss is summed over response_mask and divided by N of loss_mask."""

    def __init__(self, config):
        self.config = config

    def _compute_advantage(self, batch, metrics):
        return batch

    def _update_actor(self, batch, metrics):
        fields = {name: rows.values() for name, rows in self.config.store.items()}
        names = ("new_log_probs", "old_log_probs", "advantages", "ref_log_prob")
        new, old, advantages, ref = [fields[name][fields["response_mask"] == 1] for name in names]
        clips = ("clip_low", "clip_high", "clip_dual", "kl_coef")
        settings = {name: self.config.case[name] for name in clips}
        N = fields["loss_mask"].sum()
        metrics["loss"] = lopti.policy_loss(new, old, advantages, N, ref, **settings)[0].item()
        return batch


def import_plugin(store):
    """What verl_lopti.py defines; `store` has the fields of the batch."""

    def put(keys, partition, fields):
        store.update(fields)
        return BATCH

    verl = SimpleNamespace(PPOTrainerSync=Trainer, register_trainer=lambda name: lambda each: each)
    modules = {
        "transfer_queue": SimpleNamespace(kv_batch_get=lambda *_: store, kv_batch_put=put),
        "tensordict": SimpleNamespace(TensorDict=lambda fields, batch_size: fields),
        "verl.trainer.ppo.v1": verl,
    }
    with mock.patch.dict(sys.modules, modules):
        return runpy.run_path(str(HERE / "verl_lopti.py"))


@pytest.mark.parametrize("case", check_port.GOLDEN["cases"], ids=lambda case: case["name"])
def test_losses_of_both_passes(case):
    """Eq. 4, the split, the order of the passes, their tokens, and N; then the whole mask again."""
    ones = [torch.ones(length).long() for length in case["lengths"]]
    store = {"response_mask": ones, "loss_mask": ones}
    store["advantages"] = [row * value for row, value in zip(ones, case["advantages"])]
    for name in ("new_log_probs", "old_log_probs", "ref_log_prob"):
        rows = case[f"{name[:3]}_logprobs"]
        store[name] = [torch.tensor(row[: len(one)]) for row, one in zip(rows, ones)]
    for name, rows in store.items():
        store[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)  # no padding
    config = mock.Mock(lopti=SimpleNamespace(**case), case=case, store=store)
    trainer = import_plugin(store)["LoptiTrainer"](config)
    metrics = {}
    trainer._update_actor(trainer._compute_advantage(BATCH, metrics), metrics)
    names = {"low/loss": "low", "high/loss": "high"} if case["eta"] else {"loss": "all"}
    right = {metric: case["passes"][name]["loss"] for metric, name in names.items()}
    assert metrics == pytest.approx(right, rel=1e-5, abs=1e-7)
    assert list(metrics) == list(names)  # the passes in their order
    assert store["response_mask"].values().all()


def test_reward_is_a_number():
    compute_score = import_plugin({})["compute_score"]
    response = "So.</think><answer>Zoey is a knight</answer>"  # the prompt has opened <think>
    truth = "(1) Zoey is a knight"
    assert compute_score("kk", response, truth) == 3.0
    assert compute_score("kk", response, {"solution_text_format": truth}) == 3.0
