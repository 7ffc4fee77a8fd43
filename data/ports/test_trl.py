"""The port to TRL makes the updates of lopti.py in one process and two; pytest -s prints tables."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]
import lopti  # isort: skip, before torch

import pytest
import torch

pytest.importorskip("trl", reason="the port to TRL is tested where trl is installed")

import small_rollout as small
from datasets import Dataset
from small_rollout import tensor_of
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer
from trl_lopti import LoptiTrainer, trl_settings

grpo_trainer.shuffle_sequence_dict = lambda batch: batch  # both sides get the same mini-batches
GOLDEN = json.loads((HERE.parent / "golden.json").read_text(encoding="utf-8"))
BOTH = {"alpha": 0.3, "eta": 0.5}
CASES = {  # what differs from small_rollout.py; `empty`: what the second mini-batch has none of
    "GRPO": {},
    "AR": {"alpha": 0.3},
    "Lopti": {"eta": 0.5},
    "both": BOTH,
    "both, gradients clipped": BOTH | {"max_grad_norm": 0.05},
    "both, two micro-batches": BOTH | {"accumulation": 2},
    "empty low group": BOTH | {"eta": 1e-9},
    "empty low group in a mini-batch": BOTH | {"empty": "low tokens"},
    "no gradient in a mini-batch": BOTH | {"kl_coef": 0.0, "empty": "gradient"},
    "AR, one mini-batch": {"alpha": 0.3, "mini_batch_size": 16},
    "wrong: N of the stage's tokens": BOTH | {"mistake": "normaliser"},
    "wrong: KL times the ratio": BOTH | {"mistake": "KL"},
}
MISTAKES = {  # and one choice: the golden rollout that shows it, as README.md says
    "π without the temperature": "Lopti",
    "split again": "Lopti",
    "N of the stage's tokens": "both",
    "from the first weights": "Lopti",
    "a step at gradient 0": "no unlikely token in the second mini-batch",
    "moments of its own": "both",
}


def new_trainer(args, processes=1, accumulation=1, **changes):
    policy, tokenizer = small.moved_policy(args)
    settings = trl_settings(args, processes, accumulation) | changes
    steps = settings["steps_per_generation"] * settings["num_iterations"] // accumulation
    config = GRPOConfig(tempfile.gettempdir(), max_steps=steps, scale_rewards="none", **settings)
    options = {"processing_class": tokenizer, "alpha": args.alpha, "eta": args.eta}
    options["train_dataset"] = Dataset.from_list([{"prompt": str(i)} for i in range(4)])
    return LoptiTrainer(policy, lambda advantage, **columns: advantage, config, **options)


def compare(rollout, processes, empty=None, accumulation=1, mistake=None, **changes):
    """Worst relative difference of a gradient, relative difference of the weights, and steps."""
    args = small.arguments(**changes)
    order = small.order_of_rows(args, processes)
    ordered, rewards = rollout.rows(order.tolist()), torch.tensor([3.0, -1.0, -0.5, 3.0]).repeat(4)
    if empty == "gradient":
        rewards[order[8:]] = 3.0
    elif empty:
        args.eta = ordered.old_logprobs.view(2, -1).min(1).values.mean().exp().item()
    advantages = lopti.group_advantages(rewards, 4)

    def sampled(prompts, trainer):  # the rows of this process
        start = trainer.accelerator.process_index * len(prompts)
        own = list(range(start, start + len(prompts)))
        prompt_ids, response_ids = small.prompts_and_responses(rollout.rows(own))
        return {
            "prompt_ids": [ids.tolist() for ids in prompt_ids],
            "completion_ids": [ids.tolist() for ids in response_ids],
            "logprobs": None,
            "advantage": advantages[own].tolist(),  # for the reward function
        }

    trainer = new_trainer(args, processes, accumulation)
    trainer.rollout_func, policy = sampled, trainer.model
    trainer.optimizer = lopti.make_optimizer(policy, args)
    gradients = small.recorded(trainer.optimizer)
    trainer.loss_type = "bnpo" if mistake == "normaliser" else "dapo"
    trainer.args.use_bias_correction_kl = mistake == "KL"
    trainer.train()
    wanted_gradients, wanted = small.update_with_lopti(args, ordered, advantages[order])
    assert len(gradients) == len(wanted_gradients)
    worst = max(map(small.difference, gradients, wanted_gradients))
    return worst, small.difference(small.flat(policy), wanted), len(gradients)


@pytest.mark.parametrize("processes", [1, 2])
def test_updates_are_those_of_lopti(processes, tmp_path):
    command = f"-m torch.distributed.run --standalone --nproc-per-node {processes}".split()
    command += [__file__, tmp_path / "table.json"]
    run = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    table = json.loads((tmp_path / "table.json").read_text())
    for name, (gradients, weights, steps) in table.items():
        print(processes, name, f"{steps} steps, gradients {gradients:.1e}, weights {weights:.1e}")
        assert (gradients < 1e-5 and weights < 1e-6) != name.startswith("wrong")


def test_settings_of_another_method_are_refused():
    with pytest.raises(ValueError, match="needs GRPOConfig with num_iterations=2"):
        new_trainer(small.arguments(eta=0.5), num_iterations=1)


def through_trl(case, steps, batch, weights, logprobs, monkeypatch, mistake=None):
    """The largest difference of a loss, gradient or weight that TRL's own methods make."""
    trainer, rows = new_trainer(small.arguments(eta=0.5)), len(case["rewards"])
    trainer.alpha, trainer.eta, trainer.beta = case["alpha"], case["eta"], case["kl_coef"]
    trainer.epsilon_low, trainer.epsilon_high = case["clip_low"], case["clip_high"]
    trainer.args.delta, trainer.num_iterations = case["clip_dual"], 2 if case["eta"] else 1
    trainer.args.steps_per_generation = rows // case.get("mini_batch_size", rows)
    trainer.loss_type = "bnpo" if mistake == "N of the stage's tokens" else "dapo"
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    scores = "_get_per_token_logps_and_entropies"
    monkeypatch.setattr(trainer, scores, lambda model, ids, *_, **how: (*[logprobs(ids)] * 2, None))
    batch |= {"prompt_mask": batch["completion_mask"][:, :1]}
    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", lambda *_: dict(batch))
    how = {"lr": case.get("learning_rate", 0.0), "weight_decay": case.get("weight_decay", 0.0)}
    optimizer, differences = torch.optim.AdamW([weights], **how), []
    for number, step in enumerate(steps):
        second_pass = number == len(steps) // 2
        if second_pass and mistake == "split again":
            for part in trainer._buffered_inputs:
                ids = torch.cat([part["prompt_ids"], part["completion_ids"]], 1)
                part["low"] = logprobs(ids).exp() < case["eta"]
        if second_pass and mistake == "from the first weights":
            weights.data = tensor_of(case["table"])
        if second_pass and mistake == "moments of its own":
            optimizer = torch.optim.AdamW([weights], **how)
        loss = trainer._compute_loss(None, trainer._prepare_inputs(None))
        loss.backward()
        differences += [loss - step["loss"], weights.grad - tensor_of(step["gradient"])]
        norm = torch.nn.utils.clip_grad_norm_([weights], case.get("max_grad_norm", 1.0))
        if mistake != "a step at gradient 0":
            trainer._get_grad_norm(optimizer, norm)
        optimizer.step()
        optimizer.zero_grad()
        differences.append(weights - tensor_of(step.get("table", weights.tolist())))
        trainer._step += 1
    return max(difference.abs().max().item() for difference in differences)


def test_golden_cases_through_trl(monkeypatch):
    worst = []
    for case in GOLDEN["cases"]:
        new, old, ref = (tensor_of(case[f"{name}_logprobs"]) for name in ("new", "old", "ref"))
        mask = (torch.arange(new.shape[1]) < torch.tensor(case["lengths"])[:, None]).long()
        if case["kl_coef"] and ((ref - new) * mask).abs().max() > 5:
            continue  # where lopti.py clamps and TRL does not
        batch = {"prompt_ids": mask[:, :1], "completion_ids": mask, "completion_mask": mask}
        batch |= {"old_per_token_logps": old, "ref_per_token_logps": ref}
        batch |= {"advantages": tensor_of(case["advantages"])}
        inputs = batch, new.requires_grad_(), lambda ids, new=new: new, monkeypatch
        worst.append(through_trl(case | {"eta": 0}, [case["joint"]], *inputs))
        if case["eta"]:
            worst.append(through_trl(case, [case["low_stage"], case["high_stage"]], *inputs))
    print(f"{len(worst)} updates of golden cases: {max(worst):.0e}")
    assert len(worst) > 30 and max(worst) < 1e-12


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_golden_rollouts_through_trl(mistake, monkeypatch):
    for case in GOLDEN["rollouts"]:
        if mistake and MISTAKES[mistake] != case["name"]:
            continue
        responses, table = map(torch.tensor, case["responses"]), tensor_of(case["table"])
        ids = torch.nn.utils.rnn.pad_sequence(list(responses), batch_first=True, padding_value=-1)
        batch = {"prompt_ids": torch.tensor(case["prompts"])[:, None]}
        batch |= {"completion_ids": ids.clamp(min=0), "completion_mask": (ids >= 0).long()}

        def logprobs(ids, table=table, case=case):
            wrong = mistake == "π without the temperature" and not torch.is_grad_enabled()
            logits = table[ids[:, :-1]] / (1.0 if wrong else case["temperature"])
            return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        batch["ref_per_token_logps"] = logprobs(ids, tensor_of(case["reference"]))
        batch["advantages"] = lopti.group_advantages(tensor_of(case["rewards"]), 4)
        inputs = batch, table.requires_grad_(), logprobs, monkeypatch
        worst = through_trl(case, case["steps"], *inputs, mistake)
        print(f"golden rollout {case['name']}, {mistake or 'as it should be'}: {worst:.0e}")
        assert worst > 1e-3 if mistake else worst < 1e-12


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    rollout = small.sampled_rollout(small.arguments())
    processes = torch.distributed.get_world_size()
    table = {name: compare(rollout, processes, **changes) for name, changes in CASES.items()}
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(table))
