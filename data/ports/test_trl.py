"""The port to TRL makes the updates of golden.json; `pytest -s` prints a table."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import pytest
import torch
import transformers

pytest.importorskip("trl", reason="the port to TRL is tested where trl is installed")
if transformers.__version__ != "5.24.0":
    reason = f"the port to TRL is for transformers 5.24.0, here is {transformers.__version__}"
    pytest.skip(reason, allow_module_level=True)

import check_port
import trl_lopti
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

import lopti

grpo_trainer.shuffle_sequence_dict = lambda batch: batch  # mini-batches as golden.json has them


def new_trainer(settings, processes=1, accumulation=1, **changes):
    policy, tokenizer = lopti.load_model(settings.model, "cpu")
    options = trl_lopti.trl_settings(settings, processes, accumulation) | changes
    steps = options["steps_per_generation"] * options["num_iterations"] // accumulation
    config = GRPOConfig(tempfile.gettempdir(), max_steps=steps, scale_rewards="none", **options)
    return trl_lopti.LoptiTrainer(
        policy,
        lambda advantage, **columns: advantage,  # the reward function: see `sampled`
        config,
        alpha=settings.alpha,
        eta=settings.eta,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": "a puzzle"}]),
        optimizers=(trl_lopti.make_optimizer(policy, settings), None),
    )


# The bundled model, in one process and two --------------------------------------------------------


def settings_of(case):
    """The settings of a golden case: one puzzle, four responses."""
    names = "group_size mini_batch_size temperature alpha eta clip_low clip_high clip_dual kl_coef"
    return lopti.Settings(prompts_per_step=1, **{name: case[name] for name in names.split()})


def compare(case, processes, accumulation=1):
    """How far TRL's own training loop ends from golden.json."""
    trainer = new_trainer(settings_of(case), processes, accumulation)

    def sampled(prompts, trainer):
        """This process's share of the responses: of each mini-batch the same number of rows."""
        shares = torch.arange(4).view(-1, processes, case["mini_batch_size"] // processes)
        rows = shares[:, trainer.accelerator.process_index].flatten().tolist()
        return {
            "prompt_ids": [case["prompt"]] * len(rows),
            "completion_ids": [case["responses"][row] for row in rows],
            "logprobs": None,
            "advantage": [case["advantages"][row] for row in rows],  # for the reward function
        }

    trainer.rollout_func = sampled
    steps = check_port.record_steps(trainer.optimizer)
    trainer.train()
    policy = trainer.accelerator.unwrap_model(trainer.model)
    return check_port.model_differences(policy.eval(), steps, case)


@pytest.mark.parametrize("processes", [1, 2])
def test_updates_of_the_bundled_model(processes, tmp_path):
    """N over processes and micro-batches, the passes in TRL's loop, the steps that are skipped."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", __file__, tmp_path / "table.json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    for name, found in json.loads((tmp_path / "table.json").read_text()).items():
        print(processes, name, {key: f"{value:.1e}" for key, value in found.items()})
        assert max(found.values()) < check_port.TOLERANCE and found["weights"] < 1e-6


def main(path):
    torch.distributed.init_process_group("gloo")
    processes = torch.distributed.get_world_size()
    cases = {case["name"]: case for case in check_port.model_cases()}
    table = {name: compare(case, processes) for name, case in cases.items()}
    if processes == 1:
        table["both, two micro-batches"] = compare(cases["both"], processes, accumulation=2)
    if torch.distributed.get_rank() == 0:
        Path(path).write_text(json.dumps(table))


# The small table ----------------------------------------------------------------------------------


def update(case, loss_type="dapo"):
    """A golden rollout through TRL's own loss and the port's passes, in float64."""
    settings = lopti.Settings(eta=case["eta"], device="cpu")
    trainer = new_trainer(settings)
    trainer.alpha = case["alpha"]
    trainer.beta = case["kl_coef"]
    trainer.epsilon_low = case["clip_low"]
    trainer.epsilon_high = case["clip_high"]
    trainer.args.delta = case["clip_dual"]
    trainer.args.steps_per_generation = len(case["prompts"]) // case["mini_batch_size"]
    trainer.loss_type = loss_type
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    table = torch.tensor(case["table"], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor(case["reference"], dtype=torch.float64)

    def logprobs(ids, table):
        every_logprob = (table[ids[:, :-1]] / case["temperature"]).log_softmax(-1)
        return every_logprob.gather(-1, ids[:, 1:, None])[..., 0]

    def scored(model, ids, *_, **options):
        return logprobs(ids, table), torch.zeros(ids.shape[0], ids.shape[1] - 1), None

    prompts = torch.tensor(case["prompts"])[:, None]
    responses = [torch.tensor(response) for response in case["responses"]]
    ids = torch.nn.utils.rnn.pad_sequence(responses, batch_first=True, padding_value=-1)
    rewards = torch.tensor(case["rewards"], dtype=torch.float64)
    generated = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": ids.clamp(min=0),
        "completion_mask": (ids >= 0).long(),
        "ref_per_token_logps": logprobs(torch.cat([prompts, ids.clamp(min=0)], 1), reference),
        "advantages": lopti.group_advantages(rewards, case["group_size"]),
    }
    decay = case["weight_decay"]
    optimizer = torch.optim.AdamW([table], case["learning_rate"], weight_decay=decay)
    tables = []
    with (
        mock.patch.object(trainer, "_get_per_token_logps_and_entropies", scored),
        mock.patch.object(
            GRPOTrainer, "_generate_and_score_completions", lambda *_: dict(generated)
        ),
    ):
        for _ in case["steps"]:
            trainer._compute_loss(None, trainer._prepare_inputs(None)).backward()
            norm = torch.nn.utils.clip_grad_norm_([table], case["max_grad_norm"])
            trainer._get_grad_norm(optimizer, norm)
            optimizer.step()
            optimizer.zero_grad()
            tables.append(table.detach().clone())
            trainer._step += 1
    return tables


def test_golden_rollouts_through_trl():
    """Right but for the clamps of the KL, which TRL does not have; then with another N."""
    not_clamped = ("no clamp of the difference", "no clamp of the estimate")
    assert check_port.find_mistakes(update) == not_clamped
    own_tokens = check_port.find_mistakes(lambda case: update(case, loss_type="bnpo"))
    assert own_tokens == ("own tokens", *not_clamped)


def test_evaluation_batches_are_left_as_they_are():
    trainer = new_trainer(lopti.Settings(alpha=0.3, eta=0.5))
    batch = {"advantages": torch.ones(2)}
    trainer.model.eval()
    with mock.patch.object(GRPOTrainer, "_generate_and_score_completions", lambda *_: batch):
        assert trainer._generate_and_score_completions(None) == batch


def test_settings_of_another_method_are_refused():
    with pytest.raises(ValueError, match="needs GRPOConfig with num_iterations=2"):
        new_trainer(lopti.Settings(eta=0.5), num_iterations=1)


if __name__ == "__main__":
    main(sys.argv[1])
