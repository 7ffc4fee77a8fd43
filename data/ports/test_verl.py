"""The port to verl, without verl: stand-ins for its trainer and for the store of its batches."""

import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import check_port
import pytest
import torch

import lopti


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
            fixed = [padded[name] for name in ("old_log_probs", "ref_log_prob", "advantages")]
            for rows in torch.arange(len(batch)).split(self.case["mini_batch_size"]):
                losses = check_port.token_losses(self.logprobs(), *fixed, self.case)
                losses = (losses * padded["response_mask"])[rows]
                (losses.sum() / padded["loss_mask"][rows].sum()).backward()
                torch.nn.utils.clip_grad_norm_([self.table], self.case["max_grad_norm"])
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.tables.append(self.table.detach().clone())
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


@pytest.fixture
def update(monkeypatch):
    plugin, store = verl_plugin(monkeypatch)

    def run(case):
        """A golden rollout through the plugin's passes: the table after each optimizer step."""
        ids, before, mask = check_port.padded_rollout(case)
        lengths = mask.sum(1)
        table = torch.tensor(case["table"], dtype=torch.float64, requires_grad=True)

        def logprobs(logits):
            every_logprob = (logits[before] / case["temperature"]).log_softmax(-1)
            return every_logprob.gather(-1, ids[..., None])[..., 0]

        def ragged(values):
            rows = [row[:length] for row, length in zip(values, lengths)]
            return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

        rewards = check_port.float64(case["rewards"])
        advantages = lopti.group_advantages(rewards, case["group_size"])[:, None] * mask
        store["old_log_probs"] = ragged(logprobs(table).detach())
        store["ref_log_prob"] = ragged(logprobs(check_port.float64(case["reference"])))
        store["advantages"] = ragged(advantages)
        store["response_mask"] = ragged(mask.long())
        store["loss_mask"] = ragged(mask.long())
        settings = SimpleNamespace(alpha=case["alpha"], eta=case["eta"])
        mode = SimpleNamespace(v1=SimpleNamespace(trainer_mode="lopti"))
        trainer = plugin["LoptiTrainer"](SimpleNamespace(lopti=settings, trainer=mode))
        trainer.case = case
        trainer.table = table
        trainer.logprobs = lambda: logprobs(table)
        decay = case["weight_decay"]
        trainer.optimizer = torch.optim.AdamW([table], case["learning_rate"], weight_decay=decay)
        trainer.tables = []
        batch = Batch(keys=["0"] * len(lengths), partition_id="train")
        trainer._update_actor(trainer._compute_advantage(batch, {}), {})
        mask_again = torch.nn.utils.rnn.pad_sequence(
            list(store["response_mask"].unbind()), batch_first=True
        )
        assert (mask_again == mask).all()  # put back after the update
        return trainer.tables

    return run


def test_verl_plugin_is_a_right_port(update):
    """Its weights, its split, its order and its masks; verl itself steps at gradient 0."""
    assert check_port.find_mistakes(update) == ("zero step",)


def test_verl_reward_is_one_number(monkeypatch):
    plugin, _ = verl_plugin(monkeypatch)
    response = "So.</think><answer>(1) Zoey is a knight</answer>"
    for truth in ("(1) Zoey is a knight", {"solution_text_format": "(1) Zoey is a knight"}):
        reward = plugin["compute_score"]("kk", response, truth)
        assert isinstance(reward, float) and reward == 3.0
