"""Advantage Reweighting and Lopti as a trainer of verl, a plugin; nothing in verl is changed.

    PYTHONPATH=.:data/ports VERL_USE_EXTERNAL_MODULES=verl_lopti python -m verl.trainer.main_ppo \\
        trainer.v1.trainer_mode=lopti +lopti.alpha=0.3 +lopti.eta=0.5 ...

Written for the v1 trainer of verl 0.9.1. verl_kk.sh here follows the paper.
"""

import transfer_queue
from tensordict import TensorDict
from torch.nested import nested_tensor_from_jagged
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer


@register_trainer("lopti")
class LoptiTrainer(PPOTrainerSync):
    """verl's synchronous trainer with α and η; fields of M response tokens come and go as (M,)."""

    def __init__(self, config):
        config.trainer.v1.trainer_mode = "sync"  # verl takes other names for asynchronous trainers
        super().__init__(config)

    def _read(self, batch, *fields):
        data = transfer_queue.kv_batch_get(batch.keys, batch.partition_id, list(fields))
        return [data[field].values() for field in fields], data[fields[0]].offsets()

    def _write(self, batch, field, values, offsets):
        fields = {field: nested_tensor_from_jagged(values, offsets)}
        data = TensorDict(fields, batch_size=len(batch))
        return transfer_queue.kv_batch_put(batch.keys, batch.partition_id, data)

    def _compute_advantage(self, batch, metrics):
        batch = super()._compute_advantage(batch, metrics)
        (old_logprobs, advantages), offsets = self._read(batch, "old_log_probs", "advantages")
        alpha = self.config.lopti.alpha
        weights = alpha * old_logprobs.exp() + (1 - alpha)  # Eq. 4
        return self._write(batch, "advantages", weights * advantages, offsets)

    def _update_actor(self, batch, metrics):
        """Two passes. verl sums the loss over `response_mask` and counts N on `loss_mask`."""
        eta = self.config.lopti.eta
        if not eta:
            return super()._update_actor(batch, metrics)
        (old_logprobs, mask), offsets = self._read(batch, "old_log_probs", "response_mask")
        low = old_logprobs.exp() < eta
        for name, tokens in (("low", low), ("high", ~low)):
            metrics_of_pass = {}
            batch = self._write(batch, "response_mask", mask * tokens, offsets)
            batch = super()._update_actor(batch, metrics_of_pass)
            metrics.update({f"{name}/{key}": value for key, value in metrics_of_pass.items()})
        return self._write(batch, "response_mask", mask, offsets)


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **others):
    """Returns the reward of one response to a puzzle, a number, in verl's signature."""
    from rewards import kk_reward

    if isinstance(ground_truth, dict):
        ground_truth = ground_truth["solution_text_format"]
    return kk_reward([solution_str], [ground_truth])[0]
