"""The README's two pictures.

python data/lab/idea.py                  # results/idea.png: a token's gradient by method
python data/lab/idea.py --run runs/NAME  # results/run.png: the accuracy of a run
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch

RESULTS = Path(__file__).resolve().parent / "results"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from style import COLORS
from theory import logit_gradient_bounds

import lopti

ALPHA, ETA, VOCABULARY = 0.3, 0.5, 200


def pull(now, old):
    """r·‖∇ log π‖ of a token that went from π = old to now, in the middle between the bounds.

    Â = 1 and no clip: r = now/old is the weight that Eq. 1 gives to its gradient.
    """
    return (
        now / old * float(torch.stack(logit_gradient_bounds(torch.tensor(now), VOCABULARY)).mean())
    )


def draw_idea():
    """The gradient at the logits of a token with |Â| = 1: GRPO, AR, and Lopti's second pass."""
    figure, axes = plt.subplots(1, 3, figsize=(15, 5), sharey=True)
    pi = torch.linspace(0.001, 1, 400)
    bounds = torch.stack(logit_gradient_bounds(pi, VOCABULARY))  # (2, points)
    reweighted = lopti.reweight_advantages(bounds, pi.log(), ALPHA)
    panels = [
        ("GRPO: unlikely tokens weigh most", [(bounds, pi > 0, "GRPO")]),
        (f"AR, α = {ALPHA}: they weigh less", [(reweighted, pi > 0, "AR")]),
        (
            f"Lopti, η = {ETA}: two passes",
            [(bounds, pi < ETA, "low"), (bounds, pi >= ETA, "high")],
        ),
    ]
    for axis, (title, bands) in zip(axes, panels):
        for band, where, name in bands:
            shade = {"color": COLORS[name], "alpha": 0.35, "linewidth": 0}
            axis.fill_between(pi[where], *band[:, where], label="between the bounds", **shade)
            axis.plot(pi[where], band[:, where].mean(0), color=COLORS[name])
        axis.set(title=title, xlabel="π of the token", xlim=(0, 1), ylim=(0, 1.5))
        axis.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    axes[0].set_ylabel("size of its gradient")
    axes[0].legend(["what Prop. 4.2 allows", "the middle"], loc="upper right")
    axes[1].plot(pi, bounds.mean(0), "--", color=COLORS["GRPO"], linewidth=1.5, label="GRPO")
    axes[1].legend(*[items[-1:] for items in axes[1].get_legend_handles_labels()])
    axes[2].text(0.07, 0.6, "first pass", color=COLORS["low"])
    start, fell, rose = ((now, pull(now, 0.85)) for now in (0.85, 0.62, 0.95))
    axes[2].plot(*zip(start, fell, rose), "o", color=COLORS["high"], markersize=11)
    arrow = {"arrowstyle": "->", "linewidth": 2, "connectionstyle": "arc3,rad=0.35"}
    for end in (fell, rose):
        axes[2].annotate("", end, start, arrowprops=arrow)
    text = "second pass: a likely token that\nthe first moved wrong pulls with\n"
    text += f"{fell[1]:.2f}, not {start[1]:.2f}: rewarded, fell\n"
    text += f"{rose[1]:.2f}, not {start[1]:.2f}: punished, rose"
    axes[2].text(1, 1.08, text, color=COLORS["high"], ha="right", fontsize=13)
    figure.savefig(RESULTS / "idea.png")


def draw_run(folder):
    """Accuracy on the puzzles of each step, before it trains on them, and on held-out puzzles."""
    steps, evaluations = (
        [json.loads(line) for line in (folder / file).read_text().splitlines()]
        for file in ("metrics.jsonl", "evaluations.jsonl")
    )
    figure, axis = plt.subplots(figsize=(11, 4.2))
    accuracy = [step["accuracy"] for step in steps]
    color = COLORS["AR + Lopti"]
    axis.plot([step["step"] for step in steps], accuracy, color=color, label="puzzles of the step")
    means = []
    for row in evaluations:
        held_out = [size["avg@4"][0] for size in row["table"].values()]
        means.append(sum(held_out) / len(held_out))
    axis.plot([row["step"] for row in evaluations], means, "D", color="black", label="held-out")
    title = (
        f"Held-out puzzles: {means[0]:.0%} right before, {means[-1]:.0%} after {len(steps)} steps"
    )
    axis.set(title=title, xlabel="training step", ylabel="right answers", ylim=(0, 1))
    axis.yaxis.set_major_formatter("{x:.0%}")
    axis.legend(loc="lower right")
    figure.savefig(RESULTS / "run.png")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, default=RESULTS / "run", help="the folder of a run")
    draw_run(parser.parse_args().run)
    draw_idea()


if __name__ == "__main__":
    main()
