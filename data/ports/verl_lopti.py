"""Advantage Reweighting and Lopti as a trainer of verl, a plugin; nothing in verl is changed.

    PYTHONPATH=data/ports VERL_USE_EXTERNAL_MODULES=verl_lopti python -m verl.trainer.main_ppo \\
        trainer.v1.trainer_mode=lopti +lopti.alpha=0.3 +lopti.eta=0.5 ...

Written for the v1 trainer of verl 0.9.1. data/ports/verl_kk.sh follows the paper.
"""

import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer


@register_trainer("lopti")
class LoptiTrainer(PPOTrainerSync):
    """verl's synchronous trainer with α and η; values of response tokens come and go as (N,)."""

    def __init__(self, config):
        config.trainer.v1.trainer_mode = "sync"  # verl takes other names for asynchronous trainers
        super().__init__(config)

    def _read(self, batch, *fields):
        data = tq.kv_batch_get(batch.keys, batch.partition_id, list(fields))
        return [data[field].values() for field in fields], data[fields[0]].offsets()

    def _write(self, batch, field, values, offsets):
        values = torch.nested.nested_tensor_from_jagged(values, offsets)
        fields = TensorDict({field: values}, batch_size=len(batch))
        return tq.kv_batch_put(batch.keys, batch.partition_id, fields)

    def _compute_advantage(self, batch, metrics):
        batch = super()._compute_advantage(batch, metrics)
        (old, advantages), offsets = self._read(batch, "old_log_probs", "advantages")
        alpha = self.config.lopti.alpha
        weights = alpha * old.exp() + 1 - alpha  # Eq. 4
        return self._write(batch, "advantages", weights * advantages, offsets)

    def _update_actor(self, batch, metrics):
        """Two passes. verl sums the loss over `response_mask` and counts N on `loss_mask`."""
        eta = self.config.lopti.eta
        if not eta:
            return super()._update_actor(batch, metrics)
        (old, mask), offsets = self._read(batch, "old_log_probs", "response_mask")
        low = old.exp() < eta
        for name, tokens in (("low", low), ("high", ~low)):
            of_pass = {}
            batch = self._write(batch, "response_mask", mask * tokens, offsets)
            batch = super()._update_actor(batch, of_pass)
            metrics.update({f"{name}/{metric}": value for metric, value in of_pass.items()})
        return self._write(batch, "response_mask", mask, offsets)


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **others):
    """verl's signature of a reward function, for the puzzles."""
    from rewards import kk_reward

    if isinstance(ground_truth, dict):
        ground_truth = ground_truth["solution_text_format"]
    return kk_reward([solution_str], [ground_truth])[0]
