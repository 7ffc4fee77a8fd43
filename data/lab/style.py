"""One colour for each thing and one look, in every picture of the project.

Colours of Okabe and Ito, which colour-blind readers can tell apart; type that a last row can read.
"""

import matplotlib

COLORS = {
    "low": "#D55E00",  # tokens with π < η
    "high": "#0072B2",  # tokens with π ≥ η
    "GRPO": "#555555",
    "GRPO, two passes": "#8B5A2B",
    "AR": "#E69F00",
    "AR α = 1": "#6A3D9A",
    "Lopti": "#009E73",
    "AR + Lopti": "#CC79A7",
    "reversed Lopti": "#56B4E9",
    "high only": "#0072B2",
    "GRPO, without wording": "#000000",
    "80/20": "#882255",
    "STAPO": "#117733",
    "min-p": "#999933",
}
LOOK = {"font.size": 15, "axes.titlesize": 17, "axes.titlelocation": "left", "savefig.dpi": 110}
LOOK |= {"axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 2.5}
LOOK |= {"figure.constrained_layout.use": True, "legend.frameon": False}
matplotlib.rcParams.update(LOOK)
