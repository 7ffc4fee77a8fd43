"""Seconds, speed and memory of each phase of a training step, GRPO beside Lopti.

    python data/lab/benchmark.py                                           # the bundled policy
    python data/lab/benchmark.py --shape Qwen2.5-3B --preset kk --data data/kk_train.jsonl \\
        --eval-data data/kk_test.jsonl --people 3 4 5                      # one GPU, no download

The flags of lopti.py may follow. --shape takes random weights in the shape of a Qwen2.5 model, to
measure before anything is downloaded. The two methods take turns, so that a machine that slows
down slows both. The learning rate is so small that both always see the same policy.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import pandas as pd
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti
from rewards import told_in_a_sentence

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("num_key_value_heads", "tie_word_embeddings", "vocab_size")
SHAPES = {
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, True, 151936),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, True, 151936),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, True, 151936),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, False, 152064),
}
PHASES = ("sampling", "rewarding", "scoring", "updating")


def random_model(shape, like):
    """A Qwen2 model with random weights that reads with the tokenizer of the model `like`."""
    ids = {name: getattr(like.config, name) for name in ("eos_token_id", "pad_token_id")}
    config = Qwen2Config(**dict(zip(SIZES, SHAPES[shape])), **ids, bos_token_id=None)
    with like.device:
        return Qwen2ForCausalLM(config).eval()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="measured steps of each method")
    parser.add_argument("--shape", choices=SHAPES)
    own, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = [*flags, "--save-every", "0", "--learning-rate", "1e-9"]
        flags += ["--output", folder]
        methods = {
            "GRPO": lopti.parse_arguments([*flags, "--name", "GRPO"]),
            "Lopti": lopti.parse_arguments(["--eta", "0.5", *flags, "--name", "Lopti"]),
        }
        args = methods["GRPO"]
        device = lopti.choose_device(args.device)
        if args.dtype == "auto":  # as lopti.py chooses
            fast = device.type == "cuda" and torch.cuda.is_bf16_supported(False)
            args.dtype = methods["Lopti"].dtype = "bfloat16" if fast else "float32"
        policy, tokenizer = lopti.load_model(args.model, device)
        rows, _ = lopti.load_data(args, tokenizer)
        if own.shape:
            policy = random_model(own.shape, policy)
        models = policy, lopti.make_reference(policy, args), tokenizer
        optimizer = lopti.make_optimizer(policy, args)
        runs = {name: lopti.Run(method) for name, method in methods.items()}
        for step in range(1, own.rounds + 2):
            for name, method in methods.items():
                torch.manual_seed(args.seed + step)
                method.steps = step
                lopti.train(*models, optimizer, rows, [], runs[name], method)
        measured = {
            name: pd.DataFrame(run.read_lines("metrics.jsonl")[1:]) for name, run in runs.items()
        }
    count = sum(parameter.numel() for parameter in policy.parameters()) / 1e6
    print(f"\n{own.shape or args.model}, {count:,.1f} million parameters on {device}")
    print(f"{args.prompts_per_step} prompts × {args.group_size} responses a step, ", end="")
    print(f"median of {own.rounds} steps after one that warms up\n")
    print(f"{'method':<8}{'phase':<12}{'seconds':>9}{'tokens/s':>11}{'peak GiB':>10}")
    for name, steps in measured.items():
        median = steps.median()
        seconds = {phase: median[f"seconds/{phase}"] for phase in PHASES}
        for phase, value in {**seconds, "whole step": sum(seconds.values())}.items():
            speed = median["rollout/tokens"] / value
            memory = median.get(f"peak_memory_gib/{phase}")  # on a GPU
            memory = "" if memory is None else f"{memory:>10.2f}"
            print(f"{name:<8}{phase:<12}{value:>9.3f}{speed:>11,.0f}{memory}")


if __name__ == "__main__":
    with told_in_a_sentence():
        main()
