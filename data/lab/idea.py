"""The README's picture: a token's gradient at the logits by its probability, under each method.

    python data/lab/idea.py               # writes data/lab/results/idea.png

The bands are the bounds of Prop. 4.2 for a token with |Â| = 1, times the weight of Eq. 4 for AR.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from theory import logit_gradient_bounds

import lopti

ALPHA, ETA, VOCABULARY = 0.3, 0.5, 200
ORANGE, BLUE, GREY = "#D55E00", "#0072B2", "#555555"


def main():
    plt.rcParams.update({"font.size": 17, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.6), sharey=True, layout="constrained")
    pi = torch.linspace(0.001, 1, 400)
    low, high = (pi < ETA), (pi >= ETA)
    plain = torch.stack(logit_gradient_bounds(pi, VOCABULARY))  # (2, points)
    reweighted = lopti.reweight_advantages(plain, pi.log(), ALPHA)
    panels = [
        ("GRPO: all tokens at once", [(plain, pi > 0, GREY, "")]),
        (f"AR, α = {ALPHA}: unlikely ones weigh less", [(reweighted, pi > 0, GREY, "")]),
        (
            f"Lopti, η = {ETA}: in two passes",
            [(plain, low, ORANGE, "first pass"), (plain, high, BLUE, "second pass")],
        ),
    ]
    for axis, (title, bands) in zip(axes, panels):
        axis.plot(pi, plain.mean(0), "--", color="#AAAAAA", linewidth=1.5)
        for bounds, where, colour, label in bands:
            axis.fill_between(pi[where], *bounds[:, where], color=colour, alpha=0.5, linewidth=0)
            axis.plot(pi[where], bounds[:, where].mean(0), color=colour, linewidth=2.5)
            if label:
                middle = int(where.nonzero().float().mean())
                spot = (pi[middle] - 0.02, plain[1, middle] + 0.06)
                axis.annotate(label, spot, color=colour)
        axis.set(title=title, xlabel="π of the token", xlim=(0, 1), ylim=(0, 1.5))
        axis.title.set_fontsize(16)
        axis.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    axes[0].set_ylabel("‖gradient at the logits‖")
    path = ROOT / "data" / "lab" / "results" / "idea.png"
    figure.savefig(path, dpi=100)
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
