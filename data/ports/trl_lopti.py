"""Advantage Reweighting and Lopti as a subclass of TRL's GRPOTrainer; nothing in TRL is changed.

    pip install -r requirements.txt trl==1.16.0
    python data/ports/trl_lopti.py --steps 5                       # bundled model and puzzles
    torchrun --nproc-per-node 2 data/ports/trl_lopti.py --steps 5 --output runs/trl-2
    python lopti.py --steps 0 --model runs/trl                     # evaluates what came of it

Written for TRL 1.16 with transformers 5.24. What a run of your own has to mind: README.md here.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import lopti
from rewards import kk_reward


class LoptiTrainer(GRPOTrainer):
    """GRPOTrainer with `alpha` (α of Eq. 4) and `eta` (η of Lopti); with 0 and 0 it is GRPO."""

    def __init__(self, *args, alpha=0.0, eta=0.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.alpha = alpha
        self.eta = eta
        required = {
            "loss_type": "dapo",  # a sum over tokens divided by num_items_in_batch
            "num_iterations": 2 if eta else self.num_iterations,  # Lopti's two passes
            "importance_sampling_level": "token",
            "use_bias_correction_kl": False,  # True multiplies the KL by the ratio
        }
        wrong = []
        for key, value in required.items():
            if getattr(self.args, key) != value:
                wrong.append(f"{key}={value!r}")
        if self.args.steps_per_generation % self.args.gradient_accumulation_steps:
            wrong.append("steps_per_generation a multiple of gradient_accumulation_steps")
        if wrong:
            raise ValueError("the method of the paper needs GRPOConfig with " + ", ".join(wrong))

    def _generate_and_score_completions(self, inputs):
        """The rollout batch of this process: advantages become (B, T), by Eq. 4."""
        batch = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return batch
        if "old_per_token_logps" not in batch:  # TRL leaves them out where one step uses up a batch
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
            sizes = batch["completion_ids"].shape[1], self.args.per_device_train_batch_size
            with torch.no_grad():
                scores = self._get_per_token_logps_and_entropies(self.model, ids, mask, *sizes)
            batch["old_per_token_logps"] = scores[0]
        probabilities = batch["old_per_token_logps"].exp()  # (B, T) π_old, at the temperature
        weights = self.alpha * probabilities + 1 - self.alpha
        batch["advantages"] = weights * batch["advantages"][:, None]
        batch["low"] = probabilities < self.eta
        batch["response_mask"] = batch["completion_mask"] * batch.get("tool_mask", 1)
        return batch

    def _prepare_inputs(self, generation_batch):
        """A micro-batch: `tool_mask` takes the other pass's tokens from the loss, not from N."""
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return inputs
        per_batch = self.args.steps_per_generation
        per_step = self.args.gradient_accumulation_steps
        mask = inputs["response_mask"].bool()
        if self.eta:
            low_pass = self._step // per_batch % 2 == 0
            mask = mask & (inputs["low"] == low_pass)
        first = self._step % per_batch // per_step * per_step
        mini_batch = self._buffered_inputs[first : first + per_step]  # its micro-batches here
        tokens = self.accelerator.reduce(sum(part["response_mask"].sum() for part in mini_batch))
        # TRL takes num_items_in_batch for the rollout batch's and divides it by the mini-batches
        return {**inputs, "tool_mask": mask, "num_items_in_batch": tokens * per_batch / per_step}

    def _get_grad_norm(self, model, grad_norm=None):
        """No step where the gradient is 0: AdamW would move the weights, but passes over None."""
        norm = super()._get_grad_norm(model, grad_norm)
        if norm == 0:
            model.zero_grad(set_to_none=True)
        return norm


def trl_settings(settings, processes=1, accumulation=1):
    """Settings of lopti.py in the names of GRPOConfig."""
    responses = settings.prompts_per_step * settings.group_size
    mini_batches = responses // settings.mini_batch_size
    return {
        "loss_type": "dapo",
        "use_bias_correction_kl": False,
        "num_iterations": 2 if settings.eta else 1,
        "steps_per_generation": mini_batches * accumulation,
        "gradient_accumulation_steps": accumulation,
        "per_device_train_batch_size": settings.mini_batch_size // (processes * accumulation),
        "num_generations": settings.group_size,
        "max_completion_length": settings.max_new_tokens,
        "temperature": settings.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "epsilon": settings.clip_low,
        "epsilon_high": settings.clip_high,
        "delta": settings.clip_dual,
        "beta": settings.kl_coef,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
        "seed": settings.seed,
        "use_cpu": not torch.cuda.is_available(),  # else processes without a GPU train alone
        "bf16": False,
        "activation_checkpointing": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=5, help="rollout batches")
    parser.add_argument("--alpha", type=float, default=0.3, help="α of Eq. 4")
    parser.add_argument("--eta", type=float, default=0.5, help="η of Lopti")
    parser.add_argument("--output", default="runs/trl", help="folder for the trained model")
    flags = parser.parse_args()
    settings = lopti.Settings(alpha=flags.alpha, eta=flags.eta)
    policy, tokenizer = lopti.load_model(settings.model, "cpu")
    examples, _ = lopti.load_data(settings, tokenizer)
    puzzles = [{"prompt": each["prompt"], "solution": each["solution"]} for each in examples]
    options = trl_settings(settings, processes=int(os.environ.get("WORLD_SIZE", "1")))
    optimizer_steps = options["steps_per_generation"] * options["num_iterations"]  # of a batch
    options["max_steps"] = flags.steps * optimizer_steps
    options["logging_steps"] = optimizer_steps
    trainer = LoptiTrainer(
        policy,
        kk_reward,
        GRPOConfig(flags.output, **options),
        alpha=settings.alpha,
        eta=settings.eta,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(puzzles),
        optimizers=(make_optimizer(policy, settings), None),
    )
    trainer.train()
    trainer.save_model()


def make_optimizer(policy, settings):
    """TRL's own optimizer would leave norms and biases without weight decay."""
    decay = settings.weight_decay
    return torch.optim.AdamW(policy.parameters(), settings.learning_rate, weight_decay=decay)


if __name__ == "__main__":
    main()
