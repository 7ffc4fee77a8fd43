"""The port to TRL against golden.json and against lopti.py; pytest -s prints the README's table."""

import copy
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]
import lopti

pytest.importorskip("trl", reason="the port to TRL is tested where trl is installed")
FOUND = version("transformers")
if f"transformers=={FOUND}" not in (ROOT / "requirements.txt").read_text().split():
    reason = f"the port to TRL is for the transformers of requirements.txt, and here is {FOUND}"
    pytest.skip(reason, allow_module_level=True)

import torch
import trl_lopti
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

GOLDEN = json.loads((ROOT / "data" / "golden.json").read_text(encoding="utf-8"))
MODEL = GOLDEN["model"]
NAMES = {"ids": lambda case: case["name"]}
grpo_trainer.shuffle_sequence_dict = lambda batch: batch  # mini-batches as golden.json has them


def settings_of(case):
    """The Settings of lopti.py of a case."""
    names = lopti.Settings.__dataclass_fields__.keys() & case.keys() - {"passes", "steps"}
    own = {name: case[name] for name in names}
    return lopti.Settings(prompts_per_step=1, device="cpu", **own)


def new_trainer(settings, processes=1, rollout=None, **changes):
    """A LoptiTrainer whose rewards are advantages: TRL's own differ by their ε of 1e-4."""
    policy, tokenizer = lopti.load_model("", "cpu")
    options = trl_lopti.trl_settings(settings, processes) | changes
    options |= {"scale_rewards": "none", "logging_steps": 1}
    dataset = Dataset.from_list([{"prompt": "a puzzle"}])
    return trl_lopti.LoptiTrainer(
        policy,
        lambda advantage, **columns: advantage,
        GRPOConfig("runs/test_trl", **options),
        alpha=settings.alpha,
        eta=settings.eta,
        processing_class=tokenizer,
        train_dataset=dataset,
        eval_dataset=dataset,
        optimizers=(new_optimizer(policy, settings), None),
        rollout_func=rollout,
    )


def new_optimizer(policy, settings):
    decay = settings.weight_decay
    return torch.optim.AdamW(policy.parameters(), settings.learning_rate, weight_decay=decay)


def flat_weights(policy):
    return torch.cat([weight.detach().flatten() for weight in policy.parameters()])


# The loss of each pass ----------------------------------------------------------------------------


def policy_logprobs(case):
    """log π of the policy that is updated, of the one that sampled, of the reference: (B, T) each."""
    names = ("new_logprobs", "old_logprobs", "ref_logprobs")
    return [torch.tensor(case[name], dtype=torch.float64) for name in names]


def is_unclamped(case):
    """Whether the KL is as TRL has it; lopti.py clamps it where the policies are far apart."""
    new, _, ref = policy_logprobs(case)
    return not case["kl_coef"] or (ref - new).abs().max() < 5


@pytest.mark.parametrize("case", filter(is_unclamped, GOLDEN["cases"]), **NAMES)
def test_golden_losses_and_gradients_by_trls_own_loss(case):
    """All three clips, both passes, and N of all response tokens."""
    new, old, ref = policy_logprobs(case)
    new.requires_grad_()
    mask = torch.arange(new.shape[1]) < torch.tensor(case["lengths"])[:, None]
    batch = {
        "prompt_ids": torch.ones(len(new), 1).long(),
        "prompt_mask": torch.ones(len(new), 1).long(),
        "completion_ids": torch.ones(new.shape).long(),
        "completion_mask": mask.long(),
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "advantages": torch.tensor(case["advantages"], dtype=torch.float64),
    }
    trainer = new_trainer(settings_of(case | {"mini_batch_size": case["group_size"]}))
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    scored = mock.Mock(return_value=(new, torch.zeros(new.shape), None))
    generated = mock.Mock(return_value=batch)
    with (
        mock.patch.object(trainer, "_get_per_token_logps_and_entropies", scored),
        mock.patch.object(GRPOTrainer, "_generate_and_score_completions", generated),
    ):
        for step, name in enumerate(["low", "high"] if case["eta"] else ["all"]):
            trainer._step = step
            loss = trainer._compute_loss(None, trainer._prepare_inputs(None))
            [gradient] = torch.autograd.grad(loss, new)
            assert loss.item() == pytest.approx(case["passes"][name]["loss"], abs=1e-12)
            right = torch.tensor(case["passes"][name]["gradient"], dtype=torch.float64)
            torch.testing.assert_close(gradient, right, atol=1e-12, rtol=0)


# The whole update of the bundled model, in one process and in two ----------------------------------


def updated_by_lopti(settings):
    """The policy after a training step of lopti.py on the responses of golden.json."""
    policy, tokenizer = lopti.load_model("", "cpu")
    ids, mask, lengths = lopti.pack([MODEL["prompt"]] * 4, MODEL["responses"])
    rollout = lopti.Rollout(ids, mask, lengths, truncated=torch.zeros(4).bool(), texts=[])
    steps = {"sample": lambda *_: rollout, "compute_rewards": lambda *_: MODEL["rewards"]}
    reference = copy.deepcopy(policy)
    optimizer = new_optimizer(policy, settings)
    with mock.patch.multiple(lopti, **steps):
        lopti.training_step(policy, reference, optimizer, tokenizer, [{"prompt": ""}], settings)
    return policy


def compare(case, processes=1, accumulation=1):
    """TRL's own loop on a case: the worst difference of a gradient norm, and that of the weights.

    Both are relative: to golden.json's norm, and to the weights after the update of lopti.py.
    """
    mini_batch = case["mini_batch_size"]

    def rollout(prompts, trainer):
        """This process's share of the responses: of each mini-batch the same number of rows."""
        rows = torch.arange(4).view(-1, processes, mini_batch // processes)
        rows = rows[:, trainer.accelerator.process_index].flatten().tolist()
        return {
            "prompt_ids": [MODEL["prompt"]] * len(rows),
            "completion_ids": [MODEL["responses"][row] for row in rows],
            "logprobs": None,
            "advantage": [MODEL["advantages"][row] for row in rows],  # for the reward function
        }

    settings = settings_of(MODEL | case)
    changes = {
        "max_steps": len(case["steps"]),
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": 4 // mini_batch * accumulation,
        "per_device_train_batch_size": mini_batch // processes // accumulation,
    }
    trainer = new_trainer(settings, processes, rollout, **changes)
    trainer.train()
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    right_norms = [step["gradient_norm"] for step in case["steps"]]
    differences = [abs(a - b) / max(b, 1e-9) for a, b in zip(norms, right_norms, strict=True)]
    policy = trainer.accelerator.unwrap_model(trainer.model)
    weights = flat_weights(policy)
    right = flat_weights(updated_by_lopti(settings))
    return max(differences), float((weights - right).norm() / right.norm())


def check(found):
    print({name: [f"{value:.1e}" for value in values] for name, values in found.items()})
    for gradients, weights in found.values():
        assert gradients < 1e-4 and weights < 1e-6


@pytest.mark.parametrize("case", MODEL["cases"], **NAMES)
def test_update_in_one_process(case):
    found = {case["name"]: compare(case)}
    if case["name"] == "both":
        found["both, two micro-batches"] = compare(case, accumulation=2)
    check(found)


def test_updates_in_two_processes(tmp_path):
    """N, and the decision to skip a step, over both of them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [__file__, tmp_path / "found.json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    check(json.loads((tmp_path / "found.json").read_text()))


def test_an_evaluation_has_plain_advantages():
    """Neither Eq. 4 nor a split: the loss is −Σ Â/N over all response tokens."""
    generated = {"advantage": MODEL["advantages"], "completion_ids": MODEL["responses"]}
    generated |= {"prompt_ids": [MODEL["prompt"]] * 4, "logprobs": None}
    settings = settings_of(MODEL | {"alpha": 0.3, "eta": 0.5, "mini_batch_size": 4})
    trainer = new_trainer(
        settings, rollout=lambda *_: generated, per_device_eval_batch_size=4, beta=0.0
    )
    lengths = torch.tensor([len(response) for response in MODEL["responses"]])
    right = -(torch.tensor(MODEL["advantages"]) * lengths).sum() / lengths.sum()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(right.item(), abs=1e-5)


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    table = {case["name"]: compare(case, processes=2) for case in MODEL["cases"]}
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(table))
