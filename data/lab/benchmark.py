"""Seconds, speed and memory of each phase of a training step, GRPO beside Lopti.

    python data/lab/benchmark.py                                           # the bundled policy
    python data/lab/benchmark.py --shape Qwen2.5-3B --preset kk --data data/kk_train.jsonl \\
        --eval-data data/kk_test.jsonl --people 3 4 5                      # one GPU, no download

The flags of lopti.py may follow. --shape takes random weights in the shape of a Qwen2.5 model, to
measure before anything is downloaded. The two methods take turns, so that a machine that slows
down slows both, with a learning rate so small that both always see the same policy.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti

# hidden size, MLP size, layers, heads, key-value heads, whether the embeddings are tied, vocabulary
SHAPES = {
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, True, 151936),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, True, 151936),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, True, 151936),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, False, 152064),
}
PHASES = ("sampling", "rewarding", "scoring", "updating")


def random_model(shape, like, device):
    """A Qwen2 model with random weights that reads with the tokenizer of the model `like`."""
    hidden, mlp, layers, heads, key_value_heads, tied, words = SHAPES[shape]
    config = Qwen2Config(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=like.config.eos_token_id,
        pad_token_id=like.config.pad_token_id,
    )
    with device:
        model = Qwen2ForCausalLM(config).eval()
    model.forward_dtype = like.forward_dtype
    return model


def forward_operations(model, metrics, times=1):
    """Floating-point operations of `times` forward passes that make each response's logits once.

    2 for each parameter and token, of the layers on prompts and responses and of the output layer
    on responses; those of attention itself are not counted.
    """
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    parameters = sum(p.numel() for p in model.parameters() if p is not head and p is not embedding)
    layers = parameters * metrics["rollout/tokens_with_prompts"]
    return 2 * (times * layers + head.numel() * metrics["rollout/tokens"])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="measured steps of each method")
    parser.add_argument("--shape", choices=SHAPES)
    own, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        quiet = ["--quiet", "--save-every", "0", "--learning-rate", "1e-9", "--output", folder]
        methods = {
            "GRPO": lopti.parse_arguments([*flags, *quiet, "--name", "GRPO"]),
            "Lopti": lopti.parse_arguments(["--eta", "0.5", *flags, *quiet, "--name", "Lopti"]),
        }
        args = methods["GRPO"]
        policy, tokenizer = lopti.load_model(
            args.model, lopti.choose_device(args.device), dtype=args.dtype
        )
        rows, _ = lopti.load_data(args, tokenizer)
        if own.shape:
            policy = random_model(own.shape, policy, policy.device)
        reference = lopti.make_reference(policy, args)
        optimizer = lopti.make_optimizer(policy, args)
        runs = {name: lopti.Run(method) for name, method in methods.items()}
        for step in range(1, own.rounds + 2):
            for name, method in methods.items():
                torch.manual_seed(args.seed + step)
                method.steps, method.eval_every = step, 0
                everything = (policy, reference, tokenizer, optimizer, rows, [])
                lopti.train(*everything, runs[name], method)
        measured = {name: run.read_lines("metrics.jsonl")[1:] for name, run in runs.items()}
    count = sum(parameter.numel() for parameter in policy.parameters()) / 1e6
    print(
        f"\n{own.shape or args.model}, {count:,.1f} million parameters on {policy.device}", end=""
    )
    print(f", {args.prompts_per_step} prompts × {args.group_size} responses, median of", end="")
    print(f" {own.rounds} steps after one to warm up\n")
    print(f"{'method':<8}{'phase':<12}{'seconds':>9}{'tokens/s':>11}{'TFLOP/s':>9}{'peak GiB':>10}")
    passes = {"scoring": 1 + bool(args.kl_coef), "updating": 3}  # a backward pass is two forward
    for name, steps in measured.items():
        median = {key: statistics.median(step[key] for step in steps) for key in steps[0]}
        seconds = {phase: median[f"seconds/{phase}"] for phase in PHASES}
        seconds["whole step"] = sum(seconds.values())
        for phase, value in seconds.items():
            stages = 2 if name == "Lopti" and phase == "updating" else 1
            operations = passes.get(phase, 0) * forward_operations(policy, median, stages)
            speed = f"{operations / value / 1e12:.2f}" if operations else ""
            memory = median.get(f"peak_memory_gib/{phase}")
            row = f"{name:<8}{phase:<12}{value:>9.3f}{median['rollout/tokens'] / value:>11,.0f}"
            print(f"{row}{speed:>9}{'' if memory is None else f'{memory:.2f}':>10}")


if __name__ == "__main__":
    main()
