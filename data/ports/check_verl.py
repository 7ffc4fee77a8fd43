"""Check verl_lopti.py against lopti.py without GPUs, in an environment of verl's own.

    pip install torch==2.15.0 && pip install --no-deps verl==0.9.1
    pip install transformers==5.24.0 datasets tensordict ray hydra-core codetiming peft torchdata \\
        TransferQueue pyzmq msgspec orjson pillow aiohttp fastapi uvicorn cachetools
    python data/ports/check_verl.py            # with 2 processes

pip ends with *ERROR: ... dependency conflicts*, as expected: verl asks for older versions. TRL must
not be installed there.

All but sampling is verl's: the configuration, which verl_kk.sh makes, Ray workers, TransferQueue,
and the FSDP2 engine on gloo. The trainer's methods run from old log-probabilities to the update.
What all of these say goes to a file, which is named where a check fails.
"""

import argparse
import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

look = argparse.RawDescriptionHelpFormatter
parser = argparse.ArgumentParser(description=__doc__, formatter_class=look)
parser.add_argument("processes", type=int, nargs="?", default=2, choices=[1, 2])
PROCESSES = parser.parse_args().processes
if importlib.util.find_spec("trl"):
    parser.error(
        "TRL is installed here, and verl 0.9.1 fails beside it: make an environment for verl alone"
    )
SCREEN = os.dup(2)
log, LOG = tempfile.mkstemp(prefix="check_verl-", suffix=".log")
os.dup2(log, 2)  # for the workers too

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])  # for the workers
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # verl_kk.sh
os.environ["VERL_USE_EXTERNAL_MODULES"] = "verl_on_cpu,verl_lopti"
# A token of this run: else Ray writes one to a file in the home folder.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
try:
    import lopti  # isort: skip, before torch

    import golden_model
    import ray
    import torch
    import transfer_queue as tq
    from golden_model import PAGE
    from omegaconf import OmegaConf
    from tensordict import NonTensorStack, TensorDict
    from transformers import AutoModelForCausalLM
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.trainer.ppo.v1 import PPOTrainer, get_trainer_cls
    from verl.utils import tensordict_utils
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine_workers import ActorRolloutRefWorker
    from verl.workers.utils.losses import ppo_loss
except ModuleNotFoundError as missing:
    os.dup2(SCREEN, 2)
    os.remove(LOG)
    parser.error(f"{missing}: --help says how to make its environment")

SMALL = """actor_rollout_ref.model.path={folder}/policy trainer.n_gpus_per_node={processes}
    actor_rollout_ref.model.custom_chat_template=null
    actor_rollout_ref.model.use_remove_padding=false
    actor_rollout_ref.model.enable_gradient_checkpointing=false
    +actor_rollout_ref.model.override_config.attn_implementation=sdpa
    actor_rollout_ref.actor.fsdp_config.param_offload=false
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=false
    actor_rollout_ref.actor.fsdp_config.use_torch_compile=false
    +actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32
    actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]
    actor_rollout_ref.actor.ppo_mini_batch_size=1
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1
    actor_rollout_ref.actor.kl_loss_coef=0.1
    actor_rollout_ref.actor.optim.lr=1e-4
    actor_rollout_ref.actor.optim.clip_grad=1
    actor_rollout_ref.rollout.n=2
    actor_rollout_ref.rollout.temperature=1.2
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1
    actor_rollout_ref.rollout.calculate_log_probs=false"""


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def put(keys, uid=(), **fields):
    """Rows of tensors, as verl's own sampling stores them."""
    rows = {
        name: torch.nested.as_nested_tensor(list(values), layout=torch.jagged)
        for name, values in fields.items()
    }
    if uid:
        rows["uid"] = NonTensorStack(*uid)
    tags = [{} for _ in keys]
    return tq.kv_batch_put(keys, "train", TensorDict(rows, batch_size=len(keys)), tags)


def golden_losses(trainer, case):
    """Loss and gradient of each pass of a golden case: the plugin's, with verl's ppo_loss."""
    lengths = case["lengths"]
    keys = [str(i) for i in range(len(lengths))]
    results = []
    actor = trainer.config.actor_rollout_ref.actor
    actor.clip_ratio_low, actor.clip_ratio_high = case["clip_low"], case["clip_high"]
    actor.clip_ratio_c, actor.kl_loss_coef = case["clip_dual"], case["kl_coef"]
    trainer.config.lopti = {"alpha": case["alpha"], "eta": case["eta"]}

    def rows(name):
        return [row[:length] for row, length in zip(float64(case[name]), lengths)]

    def loss_of_batch(self, batch, metrics):  # instead of the workers
        data = tq.kv_batch_get(batch.keys, batch.partition_id, batch.fields)
        tokens = data["loss_mask"].values().sum().item()
        sizes = {"dp_size": 1, "batch_num_tokens": tokens, "global_batch_size": len(keys)}
        tensordict_utils.assign_non_tensor(data, **sizes)
        new = float64(case["new_logprobs"]).requires_grad_()
        # of a prompt of one token and its response, each position speaks of the next one
        padded = torch.nn.functional.pad(new, (0, 1))
        flat = torch.cat([row[: length + 1] for row, length in zip(padded, lengths)])
        loss, _ = ppo_loss(omega_conf_to_dataclass(actor), {"log_probs": flat}, data)
        loss.backward()
        results.append((loss.item(), new.grad))
        return batch

    ones = [torch.ones(length, dtype=torch.int64) for length in lengths]
    batch = put(
        keys,
        prompts=[row[:1] for row in ones],
        responses=ones,
        response_mask=ones,
        loss_mask=ones,
        old_log_probs=rows("old_logprobs"),
        ref_log_prob=rows("ref_logprobs"),
        advantages=[x * row.double() for x, row in zip(case["advantages"], ones)],
    )
    right = PPOTrainer._compute_advantage, PPOTrainer._update_actor
    PPOTrainer._compute_advantage = lambda self, batch, metrics: batch
    PPOTrainer._update_actor = loss_of_batch
    trainer._update_actor(trainer._compute_advantage(batch, {}), {})
    PPOTrainer._compute_advantage, PPOTrainer._update_actor = right
    tq.kv_clear(keys, "train")
    return results


def check_golden_cases(trainer):
    cases = json.loads((HERE.parent / "golden.json").read_text(encoding="utf-8"))["cases"]
    losses = []
    gradients = []
    skipped = []
    for case in cases:
        new = float64(case["new_logprobs"])
        ref = float64(case["ref_logprobs"])
        mask = torch.arange(new.shape[1]) < torch.tensor(case["lengths"])[:, None]
        if case["kl_coef"] and ((ref - new) * mask).abs().max() > 5:
            skipped.append(case["name"])
            continue
        for eta, names in ((0, ["all"]), (case["eta"], ["low", "high"])):
            if not eta and names != ["all"]:
                continue
            results = golden_losses(trainer, case | {"eta": eta})
            for name, (loss, gradient) in zip(names, results, strict=True):
                right = case["passes"][name]
                losses.append(abs(loss - right["loss"]))
                gradients.append((gradient - float64(right["gradient"])).abs().max().item())
    print(f"{len(losses)} golden losses {max(losses):.0e}, their gradients {max(gradients):.0e};")
    print(f"left out, where verl clamps otherwise: {skipped}")
    assert max(losses + gradients) < 1e-12


def check_update(trainer, case, processes, folder, own_tokens=False):
    """An update by verl's workers, against golden.json and the weights of lopti.update."""
    trainer.config.lopti = {"alpha": case["alpha"], "eta": case["eta"]}
    pool = RayResourcePool([processes], use_gpu=False, max_colocate_count=1)
    settings = {"config": trainer.config.actor_rollout_ref, "role": "actor"}
    worker = RayClassWithInitArgs(ray.remote(ActorRolloutRefWorker), **settings)
    group = RayWorkerGroup(pool, worker, device_name="cpu")
    group.init_model()
    trainer.actor_rollout_wg = group

    # verl gives each process the rows that follow one another; each has its share of a mini-batch
    shares = torch.arange(4).view(-1, processes, case["mini_batch_size"] // processes)
    rows = shares.transpose(0, 1).flatten().tolist()
    policy, _ = lopti.load_model("", "cpu")
    rollout = golden_model.new_rollout(policy, golden_model.settings_of(case))
    prompts = [torch.tensor(PAGE["prompt"])] * 4
    responses = [torch.tensor(PAGE["responses"][row]) for row in rows]
    ones = [torch.ones_like(ids) for ids in responses]
    batch = put(
        [f"0_{i}_0" for i in range(4)],
        uid=["0"] * 4,
        prompts=prompts,
        responses=responses,
        input_ids=[torch.cat(row) for row in zip(prompts, responses)],
        position_ids=[torch.arange(sum(map(len, row))) for row in zip(prompts, responses)],
        response_mask=ones,
        loss_mask=ones,
        rm_scores=[PAGE["rewards"][row] * torch.eye(len(one))[-1] for row, one in zip(rows, ones)],
        ref_log_prob=[rollout.ref_logprobs[row][rollout.mask[row]] for row in rows],
    )
    batch = trainer._compute_old_log_prob(batch, {})
    batch = trainer._compute_advantage(batch, {})
    if own_tokens:  # a mistake: N of the pass's own tokens
        write = type(trainer)._write

        def write_both(batch, field, *values):
            return write(trainer, write(trainer, batch, "loss_mask", *values), field, *values)

        trainer._write = write_both
    metrics = {}
    trainer._update_actor(batch, metrics)
    group.save_checkpoint(str(folder / "after"))
    tq.kv_clear(batch.keys, "train")
    for process in group.workers:
        ray.kill(process)
    ray.util.remove_placement_group(pool.pgs[0])

    saved = AutoModelForCausalLM.from_pretrained(folder / "after" / "huggingface", dtype="float32")
    right = golden_model.flat_weights(golden_model.lopti_update(case)[0])
    weights = float((golden_model.flat_weights(saved) - right).norm() / right.norm())
    # verl reports the mean norm of a pass's gradients, before they are clipped
    norms = float64([x for name, x in metrics.items() if name.endswith("grad_norm")])
    wanted = float64([step["gradient_norm"] for step in case["steps"]])
    wanted = wanted.view(len(norms), -1).mean(1)
    norms = (norms / wanted - 1).abs().max().item()
    name = f"{processes} processes, {case['name']}{', N of own tokens' if own_tokens else ''}"
    print(f"{name}: weights {weights:.1e}, gradient norms {norms:.1e}", flush=True)
    assert (weights < 1e-6 and norms < 1e-4) != own_tokens


def main(processes):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        shutil.copytree(golden_model.ROOT / "data" / "tiny", folder / "policy")
        changes = SMALL.format(folder=folder, processes=processes).split()
        command = ["bash", str(HERE / "verl_kk.sh"), *changes, "--cfg", "job"]
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        printed = printed[printed.index("actor_rollout_ref:") :]
        config = OmegaConf.create(printed)
        reward = get_custom_reward_fn(config)
        solution = {"solution_text_format": "(1) Zoey is a knight"}
        answer = "</think><answer>(1) Zoey is a knight</answer>"
        assert reward(data_source="kk", solution_str=answer, ground_truth=solution) == 3.0

        trainer_class = get_trainer_cls(config.trainer.v1.trainer_mode)
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
        tq.init()
        trainer = trainer_class(config)
        buffer = type(trainer.replay_buffer).__name__
        print(f"trainer_mode=lopti is {trainer_class.__qualname__} with verl's {buffer}")
        check_golden_cases(trainer)
        trainer.config = OmegaConf.create(printed)
        cases = {case["name"]: case for case in PAGE["cases"]}
        for name in ("GRPO", "AR", "Lopti", "both"):
            check_update(trainer, cases[name], processes, folder)
        check_update(trainer, cases["both"], processes, folder, own_tokens=True)
        tq.close()
        ray.shutdown()


if __name__ == "__main__":
    try:
        main(PROCESSES)
        os.remove(LOG)
        print("all checks passed")
    finally:
        os.dup2(SCREEN, 2)  # a traceback is seen
        if os.path.exists(LOG):
            print(f"What verl and Ray said is in {LOG}")
