"""Advantage Reweighting and Lopti as a subclass of TRL's GRPOTrainer; nothing in TRL is changed.

    pip install -r requirements.txt trl==1.16.0
    python data/ports/trl_lopti.py --steps 5      # trains the bundled model; writes it to runs/trl
    python lopti.py --steps 0 --model runs/trl    # evaluates it
    torchrun --nproc-per-node 2 data/ports/trl_lopti.py --steps 5 --output runs/trl-2

For a training of your own see README.md here.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: idle threads sleep sooner

import torch
import transformers
from datasets import Dataset
from packaging.version import Version
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti
from rewards import kk_reward


class LoptiTrainer(GRPOTrainer):
    """GRPOTrainer with `alpha` (α of Eq. 4) and `eta` (η of Lopti); with 0 and 0 it is GRPO.

    It sets what the method needs in `args`, a GRPOConfig. There `steps_per_generation` divided by
    `gradient_accumulation_steps` is the number of mini-batches.
    """

    def __init__(self, model, reward_funcs, args, alpha=0.0, eta=0.0, **options):
        if args.steps_per_generation % args.gradient_accumulation_steps:
            raise ValueError("steps_per_generation is no multiple of gradient_accumulation_steps")
        args.loss_type = "dapo"  # the sum over tokens divided by one N for all micro-batches
        args.use_bias_correction_kl = False  # True multiplies the KL by the ratio
        if eta:
            args.num_iterations = 2  # Lopti's two passes over a rollout batch
        super().__init__(model, reward_funcs, args, **options)
        if self.is_fsdp_enabled and Version(transformers.__version__) < Version("5.24"):
            raise ValueError(
                "FSDP needs transformers 5.24: with 5.22 and 5.19 gradients were wrong"
            )
        self.alpha = alpha
        self.eta = eta

    def _prepare_inputs(self, generation_batch):
        """A micro-batch of TRL's with Eq. 4 in its advantages, the tokens of this pass, and N.

        TRL samples a rollout batch, shuffles its rows once and cuts it into micro-batches. It
        keeps them for both passes.
        """
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return inputs  # an evaluation
        old_logprobs = inputs.get("old_per_token_logps")  # (B, T) at the sampling temperature
        if old_logprobs is None:  # one optimizer step uses up the batch: they are the current ones
            old_logprobs = self._current_logprobs(inputs)
        pi = old_logprobs.exp()
        weights = self.alpha * pi + (1 - self.alpha)  # Eq. 4
        micro_batches = self.args.steps_per_generation  # of a rollout batch, in this process
        per_step = self.args.gradient_accumulation_steps  # of a mini-batch
        tokens = response_mask(inputs)
        if self.eta:
            is_first_pass = self._step // micro_batches % 2 == 0
            tokens = tokens & ((pi < self.eta) == is_first_pass)
        first = self._step % micro_batches // per_step * per_step
        mini_batch = self._buffered_inputs[first : first + per_step]
        counts = [response_mask(part).sum() for part in mini_batch]
        N = self.accelerator.reduce(sum(counts))  # all response tokens, of all processes
        return {
            **inputs,
            "old_per_token_logps": old_logprobs,
            "advantages": weights * inputs["advantages"][:, None],
            "tool_mask": tokens,  # TRL's loss is a sum over these
            # which TRL takes for the rollout batch's, and divides by the number of mini-batches
            "num_items_in_batch": N * micro_batches / per_step,
        }

    @torch.no_grad()
    def _current_logprobs(self, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        length = inputs["completion_ids"].shape[1]
        return self._get_per_token_logps_and_entropies(self.model, ids, mask, length)[0]

    def _get_grad_norm(self, model, grad_norm=None):
        """No step where the gradient is 0: AdamW would move the weights, but passes over None."""
        norm = super()._get_grad_norm(model, grad_norm)
        if norm == 0:
            self.optimizer.zero_grad()
        return norm

    def _save_optimizer_and_scheduler(self, output_dir):
        """A checkpoint holds the rollout batch, too: not all steps on it may have been made."""
        super()._save_optimizer_and_scheduler(output_dir)
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        torch.save(self._buffered_inputs, f"{output_dir}/rollout_{self.args.process_index}.pt")

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint:
            self._step = self.state.global_step * self.args.gradient_accumulation_steps
            file = f"{checkpoint}/rollout_{self.args.process_index}.pt"
            self._buffered_inputs = torch.load(file, map_location=self.accelerator.device.type)


def response_mask(inputs):
    """Returns the tokens that the policy has sampled: (B, T)."""
    return (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()


def trl_settings(settings, processes=1):
    """Settings of lopti.py in the names of GRPOConfig; a mini-batch is one micro-batch."""
    responses = settings.prompts_per_step * settings.group_size
    return {
        "steps_per_generation": responses // settings.mini_batch_size,
        "per_device_train_batch_size": settings.mini_batch_size // processes,
        "num_generations": settings.group_size,
        "max_completion_length": settings.max_new_tokens,
        "temperature": settings.temperature,
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
        "bf16": settings.dtype == "bfloat16",
        "save_strategy": "no",
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=5, help="training steps (5)")
    parser.add_argument("--output", default="runs/trl", help="a new folder for the trained model")
    flags = parser.parse_args()
    if Path(flags.output).exists():
        parser.error(f"{flags.output} exists: give another --output")
    settings = lopti.Settings(alpha=0.3, eta=0.5)
    policy, tokenizer = lopti.load_model(settings.model, "cpu")
    rows, _ = lopti.load_data(settings, tokenizer)
    puzzles = [{"prompt": row.prompt, "solution": row.solution} for row in rows]
    options = trl_settings(settings, processes=int(os.environ.get("WORLD_SIZE", "1")))
    options["logging_steps"] = 2 * options["steps_per_generation"]  # of both passes
    options["max_steps"] = flags.steps * options["logging_steps"]  # TRL counts optimizer steps
    trainer = LoptiTrainer(
        policy,
        kk_reward,
        GRPOConfig(flags.output, **options),
        alpha=settings.alpha,
        eta=settings.eta,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(puzzles),
        # TRL's own optimizer would leave norms and biases without weight decay.
        optimizers=(lopti.new_optimizer(policy, settings), None),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
