#!/usr/bin/env bash
# The paper's Knights-and-Knaves run on four 80 GB GPUs, in the keys of verl 0.9.1. Behind each key stands what the
# published script says (zhyang2226/AR-Lopti, scripts/train_kklogic_AR-Lopti_4x80GB.sh). Not yet run on GPUs.
#
#   KK=AR-Lopti/data/kk/instruct bash data/ports/verl_kk.sh               # KK: the published puzzles
#   ... bash data/ports/verl_kk.sh lopti.eta=0 lopti.alpha=0              # GRPO; a new key: +key=value
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
kk=${KK:-AR-Lopti/data/kk/instruct}
model=actor_rollout_ref.model
actor=actor_rollout_ref.actor
rollout=actor_rollout_ref.rollout

settings=(
    trainer.v1.trainer_mode=lopti                        # algorithm.seperate_updating=True
    +lopti.alpha=0.3                                     # algorithm.reweight_k=0.3
    +lopti.eta=0.5                                       # algorithm.seperate_prob=0.5
    algorithm.adv_estimator=grpo                         # grpo
    algorithm.rollout_correction.bypass_mode=false       # log π_old by the trainer; the only way there
    data.train_files="$kk/merge_34567ppl/train.parquet"  # the folder, which holds the test puzzles too
    data.val_files="[$(echo "$kk"/{3..7}ppl/test_new.parquet | tr ' ' ,)]"  # the same files
    data.train_batch_size=64                             # 64 prompts
    data.max_prompt_length=400                           # 400
    data.max_response_length=4096                        # 4096
    reward.custom_reward_function.path=pkg://verl_lopti  # its own reward, by data_source
    reward.custom_reward_function.name=compute_score
    $model.path=Qwen/Qwen2.5-3B-Instruct                 # this, or Qwen2.5-7B-Instruct-1M
    # those files hold rendered prompts: the published code takes a message's content as it is
    "$model.custom_chat_template='{% for message in messages %}{{ message.content }}{% endfor %}'"
    $model.use_remove_padding=True                       # True
    $model.enable_gradient_checkpointing=True            # True
    $actor.strategy=fsdp2                                # fsdp
    $actor.fsdp_config.param_offload=True                # True
    $actor.fsdp_config.optimizer_offload=True            # True; and grad_offload=True
    $actor.optim.lr=1e-6                                 # 1e-6
    $actor.optim.weight_decay=0.01                       # 0.01, by default
    $actor.optim.lr_scheduler_type=constant              # constant, by default
    $actor.optim.clip_grad=1.0                           # grad_clip=1.0, by default
    $actor.ppo_mini_batch_size=32                        # 256: there in responses, here in prompts
    $actor.ppo_micro_batch_size_per_gpu=8                # ppo_micro_batch_size=32 over 4 GPUs
    $actor.ppo_epochs=1                                  # 1, by default
    $actor.clip_ratio_low=0.2                            # 0.20
    $actor.clip_ratio_high=0.24                          # 0.24
    $actor.clip_ratio_c=10.0                             # 10.0
    $actor.loss_agg_mode=token-mean                      # token-mean
    $actor.entropy_coeff=0                               # 0.0, by default
    $actor.use_kl_loss=True                              # True
    $actor.kl_loss_coef=0.001                            # 0.001
    $actor.kl_loss_type=low_var_kl                       # low_var_kl
    $rollout.name=vllm                                   # vllm
    $rollout.n=8                                         # 8
    $rollout.temperature=0.7                             # 0.7
    $rollout.tensor_model_parallel_size=1                # 1
    $rollout.gpu_memory_utilization=0.6                  # 0.6
    $rollout.log_prob_micro_batch_size_per_gpu=16        # log_prob_micro_batch_size=8, times 8 over 4 GPUs
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16  # the same
    actor_rollout_ref.ref.fsdp_config.param_offload=True # True
    trainer.n_gpus_per_node=4                            # 4
    trainer.total_epochs=5                               # 5
    trainer.save_freq=20                                 # 20
    trainer.test_freq=20                                 # 20
    trainer.logger=[console]                             # [wandb]
    trainer.project_name=lopti                           # AR-Lopti
    trainer.experiment_name=kk-3b-ar-lopti               # made of the model's and the method's names
)
export PYTHONPATH=$here:$here/../..${PYTHONPATH:+:$PYTHONPATH}
export VERL_USE_EXTERNAL_MODULES=${VERL_USE_EXTERNAL_MODULES:-verl_lopti}
exec python3 -m verl.trainer.main_ppo "${settings[@]}" "$@"
