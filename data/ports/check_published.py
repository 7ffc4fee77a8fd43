"""Compares the authors' published code with golden.json.

    git clone https://github.com/zhyang2226/AR-Lopti
    python data/ports/check_published.py AR-Lopti

Five functions of its commit cbeb333, and one that they call, are read from your clone and run on
the cases of golden.json. Prints the largest difference of each output; the exit code is 0 if all
are below 1e-12.
"""

import argparse
import ast
import subprocess
import sys
from collections import defaultdict
from types import SimpleNamespace

import check_port
import torch

COMMIT = "cbeb333"
FUNCTIONS = {
    "verl/utils/torch_functional.py": ["masked_mean"],
    "verl/trainer/ppo/core_algos.py": [
        "compute_grpo_outcome_advantage",
        "compute_policy_loss",
        "kl_penalty",
        "agg_loss",
    ],
    "verl/trainer/ppo/ray_trainer.py": ["compute_reweight_advantage"],
}


def read_functions(folder):
    """Returns the published functions, by name; raises OSError where there is no such clone."""
    names = {"torch": torch, "defaultdict": defaultdict}
    for path, wanted in FUNCTIONS.items():
        command = ["git", "-C", folder, "show", f"{COMMIT}:{path}"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise OSError(f"{folder}: no clone of zhyang2226/AR-Lopti with the commit {COMMIT}")
        for node in ast.parse(result.stdout).body:
            if isinstance(node, ast.FunctionDef) and node.name in wanted:
                exec(ast.unparse(node), names)  # noqa: S102
        names["verl_F"] = SimpleNamespace(masked_mean=names["masked_mean"])
    return SimpleNamespace(**names)


def outputs(published, case):
    """Yields for each output of a golden case its name, the published value and golden.json's."""
    old = check_port.float64(case["old_logprobs"])
    ref = check_port.float64(case["ref_logprobs"])
    mask = torch.arange(old.shape[1]) < torch.tensor(case["lengths"])[:, None]
    rewards = torch.zeros_like(old)
    rewards[:, 0] = check_port.float64(case["rewards"])
    groups = [number // case["group_size"] for number in range(len(old))]
    found, _ = published.compute_grpo_outcome_advantage(rewards, mask, groups)
    advantages = check_port.float64(case["advantages"])[:, None] * mask
    yield "Â", found, advantages
    weights = (case["alpha"], 1 - case["alpha"], 1.0)  # as in the published scripts
    found = published.compute_reweight_advantage(advantages, old, "both_linear_normal", *weights)
    weighted = check_port.float64(case["reweighted_advantages"])
    yield "Â after Eq. 4", found, weighted
    low = torch.tensor(case["low"])
    for name, updated in (("all", mask), ("low", low), ("high", mask & ~low)):
        right = case["passes"][name]
        new = check_port.float64(case["new_logprobs"]).requires_grad_()
        loss, *_ = published.compute_policy_loss(
            old,
            new,
            torch.where(updated, weighted, 0.0),
            mask,
            cliprange_low=case["clip_low"],
            cliprange_high=case["clip_high"],
            clip_ratio_c=case["clip_dual"],
        )
        kls = published.kl_penalty(new, ref, "low_var_kl") * updated
        loss = loss + case["kl_coef"] * published.agg_loss(kls, mask, "token-mean")
        loss.backward()
        yield "loss", loss.detach(), check_port.float64(right["loss"])
        yield "gradient", new.grad, check_port.float64(right["gradient"])


def main(words=None):
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("folder", metavar="FOLDER", help="a clone of zhyang2226/AR-Lopti")
    try:
        published = read_functions(parser.parse_args(words).folder)
    except OSError as problem:
        parser.error(str(problem))
    largest = {}
    for case in check_port.GOLDEN["cases"]:
        for name, found, right in outputs(published, case):
            difference = float((found - right).abs().max())
            largest[name] = max(largest.get(name, 0.0), difference)
    print(f"The published code ({COMMIT}) and golden.json, {len(check_port.GOLDEN['cases'])} cases")
    for name, difference in largest.items():
        print(f"{name:<14}{difference:.1e}")
    return int(not max(largest.values()) < 1e-12)


if __name__ == "__main__":
    sys.exit(main())
