"""Compares the port to TRL with golden.json; pytest -s prints the differences that README names."""

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "data" / "ports")]
FOUND = f"transformers=={version('transformers')}"
if FOUND not in (ROOT / "requirements.txt").read_text().split():
    reason = f"the port to TRL is for the transformers of requirements.txt, and here is {FOUND}"
    pytest.skip(reason, allow_module_level=True)
import lopti

pytest.importorskip("trl", reason="the port to TRL is tested where trl is installed")

import check_port
import torch
import trl_lopti
from datasets import Dataset
from test_ports import settings_of
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

grpo_trainer.shuffle_sequence_dict = lambda batch: batch  # mini-batches as golden.json has them


def new_trainer(settings, rollout=None, **changes):
    """A LoptiTrainer whose rewards are advantages already: TRL's own have another ε."""
    policy, tokenizer = lopti.load_model("", "cpu")
    options = trl_lopti.trl_settings(settings) | {"scale_rewards": "none"} | changes
    return trl_lopti.LoptiTrainer(
        policy,
        lambda advantage, **columns: advantage,
        GRPOConfig(tempfile.gettempdir(), **options),
        alpha=settings.alpha,
        eta=settings.eta,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": "a puzzle"}] * settings.prompts_per_step),
        optimizers=(lopti.new_optimizer(policy, settings), None),
        rollout_func=rollout,
    )


CASES = [case for case in check_port.GOLDEN["cases"] if "beyond its clamp" not in case["name"]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])  # TRL does not clamp the KL
def test_losses_and_gradients_by_trls_own_loss(case):
    """TRL's own loss gives golden.json's losses and gradients; an evaluation stays as TRL's."""
    new, old, ref = [check_port.float64(case[f"{of}_logprobs"]) for of in ("new", "old", "ref")]
    new.requires_grad_()
    mask = torch.arange(new.shape[1]) < torch.tensor(case["lengths"])[:, None]
    batch = dict.fromkeys(["prompt_ids", "prompt_mask"], torch.ones(len(new), 1))
    batch |= {"completion_ids": torch.ones(new.shape), "completion_mask": mask.long()}
    batch |= {"old_per_token_logps": old, "ref_per_token_logps": ref}
    batch["advantages"] = check_port.float64(case["advantages"])
    trainer = new_trainer(settings_of(case | {"mini_batch_size": len(case["rewards"])}))
    trainer.current_gradient_accumulation_steps = 1
    trainer._get_per_token_logps_and_entropies = lambda *_, **options: (new, 0 * new, None)
    with mock.patch.object(GRPOTrainer, "_generate_and_score_completions", lambda *_: batch):
        trainer.model.train()
        for trainer._step, name in enumerate(["low", "high"] if case["eta"] else ["all"]):
            loss = trainer._compute_loss(None, trainer._prepare_inputs(None))
            [gradient] = torch.autograd.grad(loss, new)
            right = case["passes"][name]
            assert loss.item() == pytest.approx(right["loss"], abs=1e-12)
            assert (gradient - check_port.float64(right["gradient"])).abs().max() < 1e-12
        trainer.model.eval()
        assert trainer._prepare_inputs(None) is batch


def compare(case, processes):
    """How far an update by TRL's own loop is from golden.json.

    One process makes a mini-batch of two micro-batches, two processes of one each.
    """
    share = case["mini_batch_size"] // 2

    def rollout(prompts, trainer):
        """This process's responses: of each mini-batch the same number of rows."""
        shares = torch.arange(4).view(-1, processes, share * 2 // processes)
        rows = shares[:, trainer.accelerator.process_index].flatten().tolist()
        return {
            "prompt_ids": [case["prompts"][row] for row in rows],
            "completion_ids": [case["responses"][row] for row in rows],
            "logprobs": None,
            "advantage": [case["advantages"][row] for row in rows],  # for the reward function
        }

    trainer = new_trainer(
        settings_of(case),
        rollout,
        max_steps=len(case["steps"]),
        logging_steps=1,
        per_device_train_batch_size=share,
        gradient_accumulation_steps=2 // processes,
        steps_per_generation=4 // share // processes,
    )
    trainer.train()
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    policy = trainer.accelerator.unwrap_model(trainer.model)
    return check_port.model_differences(policy, norms, case)


@pytest.mark.parametrize("processes", [1, 2])
def test_updates_of_the_bundled_model(processes, tmp_path):
    """TRL's own loop makes the updates of level 3, in one process and in two."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", __file__, tmp_path / "table.json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    for name, found in json.loads((tmp_path / "table.json").read_text()).items():
        print(processes, name, {key: f"{value:.1e}" for key, value in found.items()})
        assert check_port.is_right(found)


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    count = torch.distributed.get_world_size()
    cases = check_port.model_cases()
    if count == 2:  # without mini-batches of two rows from one group, which it would cut in half
        cases = check_port.GOLDEN["model"]
    table = {case["name"]: compare(case, count) for case in cases}
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(table))
