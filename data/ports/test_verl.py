"""Compares the port to verl with golden.json; pytest -s prints the differences that README names.

What runs is verl's own, from the log-probabilities of a batch to the optimizer steps. Sampling, Ray
and the store of the batch are left out: every process holds the whole batch, and works on its rows.
In an environment for verl alone:

    pip install -r requirements.txt
    pip install --no-deps verl==0.9.1   # without the older versions that it asks for
    pip install tensordict==0.15.3 TransferQueue==0.1.11 ray hydra-core codetiming peft torchdata \\
        pyzmq msgspec orjson pillow aiohttp fastapi uvicorn cachetools
    python -m pytest -s data/ports/test_verl.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]
pytest.importorskip("verl", reason="the port to verl is tested where verl is installed")

import torch
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA


class PlatformCPU(PlatformCUDA):
    """What verl must know to use CPUs in the place of GPUs."""

    device_name = "cpu"

    def current_device(self):
        return "cpu"

    def communication_backend_name(self):
        return "gloo"


set_platform(PlatformCPU())  # before verl is imported any further
torch.cuda.get_device_name = mock.Mock(return_value="CPU")  # for verl's metrics
torch.cuda.mem_get_info = mock.Mock(return_value=(0, 0))

import check_port
import transfer_queue
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils import tensordict_utils
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl_lopti import LoptiTrainer

import lopti

EngineRegistry.register("language_model", "fsdp2", "cpu")(FSDPEngineWithLMHead)
MISTAKE = "a mistake: N counts the tokens of the pass"


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    """The file of the configuration that verl makes of the settings in verl_kk.sh."""
    folder = tmp_path_factory.mktemp("verl")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # of python3
    environment = os.environ | {"PATH": path}
    command = ["bash", HERE / "verl_kk.sh", "--cfg", "job"]
    with open(folder / "config.yaml", "w", encoding="utf-8") as file:
        subprocess.run(command, env=environment, cwd=folder, stdout=file, check=True)
    return folder / "config.yaml"


def test_the_shell_script_has_the_settings_of_the_paper(config_file):
    """verl_kk.sh gives verl the values of kk.flags, our trainer, and a reward that is a number."""
    config = OmegaConf.load(config_file)
    actor = config.actor_rollout_ref.actor
    kk = lopti.parse_arguments([f"@{ROOT / 'data' / 'kk.flags'}"])
    group_size = config.actor_rollout_ref.rollout.n
    found_and_right = [
        (config.lopti, {"alpha": 0.3, "eta": 0.5}),
        (config.data.train_batch_size, kk.prompts_per_step),
        (config.data.max_prompt_length, kk.max_prompt_length),
        (config.data.max_response_length, kk.max_new_tokens),
        (group_size, kk.group_size),
        (config.actor_rollout_ref.rollout.temperature, kk.temperature),
        (actor.ppo_mini_batch_size * group_size, kk.mini_batch_size),  # verl counts prompts
        (actor.ppo_epochs, kk.update_epochs),
        (actor.optim.lr, kk.learning_rate),
        (actor.optim.lr_scheduler_type, "constant"),
        (actor.optim.weight_decay, kk.weight_decay),
        (actor.optim.clip_grad, kk.max_grad_norm),
        (actor.clip_ratio_low, kk.clip_low),
        (actor.clip_ratio_high, kk.clip_high),
        (actor.clip_ratio_c, kk.clip_dual),
        (actor.kl_loss_coef, kk.kl_coef),
    ]
    for found, right in found_and_right:
        assert found == right
    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
    assert type(trainer) is LoptiTrainer
    assert type(trainer.replay_buffer).__name__ == "ReplayBuffer"  # of the synchronous trainer
    reward = get_custom_reward_fn(config)
    response = "So.</think><answer>Zoey is a knight</answer>"  # the prompt has opened <think>
    truth = "(1) Zoey is a knight"
    for solution in (truth, {"solution_text_format": truth}):
        assert reward(data_source="kk", solution_str=response, ground_truth=solution) == 3.0


def config_of(case, file):
    """The configuration of verl_kk.sh, changed to a golden case and to CPUs."""
    config = OmegaConf.load(file)
    config.lopti = {"alpha": case["alpha"], "eta": case["eta"]}
    actor = config.actor_rollout_ref.actor
    actor.ppo_mini_batch_size = case["mini_batch_size"]
    actor.ppo_micro_batch_size_per_gpu = 1
    actor.kl_loss_coef = case["kl_coef"]
    actor.optim.lr = case["learning_rate"]
    actor.optim.weight_decay = case["weight_decay"]
    actor.fsdp_config.mixed_precision = {"param_dtype": "fp32"}
    actor.fsdp_config.use_torch_compile = False
    rollout = config.actor_rollout_ref.rollout
    rollout.n = 1  # verl uses it only to count the rows of a mini-batch; `uid` has the groups
    rollout.temperature = case["temperature"]
    rollout.log_prob_micro_batch_size_per_gpu = 1
    rollout.calculate_log_probs = False  # while sampling
    config.actor_rollout_ref.model.path = str(ROOT / "data" / "tiny")
    config.actor_rollout_ref.model.override_config = {"attn_implementation": "sdpa"}
    return config


def rows_of(case):
    """The batch of a golden case. Behind each response stands a token that a tool wrote."""
    prompts = [torch.tensor(prompt) for prompt in case["prompts"]]
    responses = [torch.tensor([*response, 0]) for response in case["responses"]]
    texts = [torch.cat(pair) for pair in zip(prompts, responses)]
    masks = [(torch.arange(len(row)) < len(row) - 1).long() for row in responses]
    fields = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": texts,
        "position_ids": [torch.arange(len(text)) for text in texts],
        "response_mask": masks,
        "loss_mask": masks,
        "rm_scores": [torch.eye(len(row))[-1] * r for row, r in zip(masks, case["rewards"])],
    }
    for name, tensors in fields.items():
        fields[name] = torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
    fields["uid"] = NonTensorStack(*[str(row // case["group_size"]) for row in range(len(masks))])
    return TensorDict(fields, batch_size=len(masks))


def compare(case, file, own_tokens=False):
    """How far an update by verl is from golden.json; `own_tokens` plants a mistake."""
    config = config_of(case, file)
    trainer = LoptiTrainer(config)
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, "actor")
    worker.init_model()
    rows = rows_of(case)
    keys = [f"{row}_0_0" for row in range(len(rows))]
    batch = transfer_queue.KVBatchMeta(keys, [{}] * len(keys), "train")
    processes = torch.distributed.get_world_size()
    shares = torch.arange(len(rows)).view(-1, processes, case["mini_batch_size"] // processes)
    share = shares[:, torch.distributed.get_rank()].flatten()  # of each mini-batch as many rows
    norms = []

    # In the place of the store, and of the workers that get rows from it.

    def get(keys, partition_id, select_fields):
        return rows.select(*select_fields, strict=False)

    def put(keys, partition_id, fields):
        rows.update(fields)
        return batch

    def compute_log_prob(batch):
        data = tensordict_utils.assign_non_tensor(rows.copy(), **batch.extra_info)
        rows.update(worker.compute_log_prob(data))
        return batch

    def update_actor(batch):
        data = tensordict_utils.index_select_tensor_dict(rows, share)
        tensordict_utils.assign_non_tensor(data, **batch.extra_info)
        if own_tokens:
            data["loss_mask"] = data["response_mask"]  # N counts the tokens of the pass
        output = worker.update_actor(data)
        norms.extend(output["metrics"]["grad_norm"])
        return output

    workers = {"compute_log_prob": compute_log_prob, "update_actor": update_actor}
    trainer.actor_rollout_wg = SimpleNamespace(**workers)
    metrics = {}
    with mock.patch.multiple(transfer_queue, kv_batch_get=get, kv_batch_put=put):
        trainer._compute_old_log_prob(batch, metrics)
        rows["ref_log_prob"] = rows["old_log_probs"]
        trainer._compute_advantage(batch, metrics)
        trainer._update_actor(batch, metrics)
    assert rows["response_mask"].values().sum() == sum(map(len, case["responses"]))  # as before
    names = ["low/actor/grad_norm", "high/actor/grad_norm"] if case["eta"] else ["actor/grad_norm"]
    assert [name for name in metrics if name.endswith("grad_norm")] == names
    policy = check_port.bundled_model()
    weights = worker.actor.engine.module.state_dict()
    policy.load_state_dict({name: weight.full_tensor() for name, weight in weights.items()})
    return check_port.model_differences(policy, norms, case)


@pytest.mark.parametrize("processes", [1, 2])
def test_updates_of_the_bundled_model(processes, config_file, tmp_path):
    """verl makes the updates of level 3, in one process and in two; a planted mistake is seen."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", __file__, config_file, tmp_path / "table.json"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    table = json.loads((tmp_path / "table.json").read_text())
    for name, found in table.items():
        print(processes, name, {key: f"{value:.1e}" for key, value in found.items()})
    assert not check_port.is_right(table.pop(MISTAKE))
    assert all(map(check_port.is_right, table.values()))


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    table = {}
    for case in check_port.GOLDEN["model"]:
        if not any(step["skipped"] for step in case["steps"]):  # verl makes such a step
            table[case["name"]] = compare(case, sys.argv[1])
        if case["name"] == "both":
            table[MISTAKE] = compare(case, sys.argv[1], own_tokens=True)
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(table))
