"""The port to verl, without verl: golden.json through stand-ins for its store and its trainer."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import check_port
import pytest
import torch

BATCH = mock.MagicMock()  # which verl's store has the fields of


class Trainer:
    """Like verl's, but its update only says over which tokens it would sum the loss."""

    def __init__(self, config):
        self.config = config

    def _compute_advantage(self, batch, metrics):
        return batch

    def _update_actor(self, batch, metrics):
        metrics["tokens"] = self.config.store["response_mask"].values().tolist()
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
def test_advantages_and_tokens_of_both_passes(case):
    """Eq. 4, the split, the order of the passes; N, which verl counts on loss_mask; both masks."""

    def of_responses(name):
        return [torch.tensor(row[:length]) for row, length in zip(case[name], case["lengths"])]

    ones = [torch.ones(length).long() for length in case["lengths"]]
    advantages = [row * value for row, value in zip(ones, case["advantages"])]
    store = {"response_mask": ones, "loss_mask": ones, "advantages": advantages}
    store["old_log_probs"] = of_responses("old_logprobs")
    for name, rows in store.items():
        store[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)  # no padding
    config = mock.Mock(lopti=SimpleNamespace(**case), store=store)
    trainer = import_plugin(store)["LoptiTrainer"](config)
    metrics = {}
    trainer._update_actor(trainer._compute_advantage(BATCH, metrics), metrics)
    right = torch.cat(of_responses("reweighted_advantages"))
    assert torch.allclose(store["advantages"].values(), right)
    low = torch.cat(of_responses("low"))
    passes = [("tokens", torch.ones_like(low))]
    if case["eta"]:
        passes = [("low/tokens", low), ("high/tokens", ~low)]
    assert list(metrics.items()) == [(name, tokens.long().tolist()) for name, tokens in passes]
    assert store["response_mask"].values().all()
    assert store["loss_mask"].values().all()


def test_reward_is_a_number():
    compute_score = import_plugin({})["compute_score"]
    response = "So.</think><answer>Zoey is a knight</answer>"  # the prompt has opened <think>
    truth = "(1) Zoey is a knight"
    assert compute_score("kk", response, truth) == 3.0
    assert compute_score("kk", response, {"solution_text_format": truth}) == 3.0
