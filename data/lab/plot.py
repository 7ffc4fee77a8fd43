"""Draw the laboratory's pictures, equal_kl.png, bias.png and world.png, from its runs.

    python data/lab/plot.py

They go into data/lab/results, over those that are there.
"""

import argparse

import analysis
import experiments
import matplotlib.pyplot as plt
import numpy as np
import world

# One colour for each thing and one look, in every picture of the project: Okabe and Ito's colours,
# which colour-blind readers can tell apart, and type that a last row can read.
TWO, REVERSED, RANDOM = "GRPO, two passes", "reversed Lopti", "random split"
COLORS = {
    "low": "#D55E00",  # tokens with π < η
    "high": "#0072B2",  # tokens with π ≥ η
    "GRPO": "#555555",
    TWO: "#8B5A2B",
    "AR": "#E69F00",
    "AR α = 1": "#6A3D9A",
    "Lopti": "#009E73",
    "AR + Lopti": "#CC79A7",
    REVERSED: "#56B4E9",
    RANDOM: "#BBBBBB",
}
LOOK = {"font.size": 15, "axes.titlesize": 17, "axes.titlelocation": "left", "savefig.dpi": 110}
LOOK |= {"axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 2.5}
LOOK |= {"figure.constrained_layout.use": True, "legend.frameon": False}
plt.rcParams.update(LOOK)

BIAS, NEW = ", without bias", ", new seeds"
PICTURES = {  # file → methods; titles: by step, at equal KL
    "equal_kl": (
        (f"GRPO{NEW}", f"Lopti{NEW}", f"{TWO}{NEW}"),
        ("By step: no measurable difference", "At equal KL: both methods of two passes are behind"),
    ),
    "bias": (
        ("GRPO", "AR α = 1", f"AR α = 1{BIAS}"),
        ("By step: without its bias α = 1 learns", "At equal KL: it is still behind GRPO"),
    ),
}


def draw_two_views(lines, methods, titles):
    """Accuracy in training by step and by KL to the starting policy: the same runs, seen twice.

    Means over the seeds that all methods have, five steps at a time, with 95 % intervals. The KL is
    that at sampling where all runs have it.
    """
    frame = analysis.run_frame(lines)
    runs = frame[frame.method.isin(methods)].pivot(index="seed", columns="method", values="metrics")
    runs = runs.dropna()[list(methods)]
    kl = analysis.column_of_kl(runs.to_numpy().ravel())
    figure, (by_step, by_kl) = plt.subplots(1, 2, figsize=(16, 6.5), sharey=True)
    for name, of_method in runs.items():
        curves = [analysis.accuracy_by_kl(run, kl) for run in of_method]
        at = np.linspace(max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves), 50)
        steps = analysis.WINDOW // 2 + 1 + np.arange(len(curves[0][0]))
        views = {by_step: (steps, [y for _, y in curves])}
        views[by_kl] = (at, [np.interp(at, *curve) for curve in curves])
        name = name.removesuffix(NEW)
        style = {"color": COLORS[name.removesuffix(BIAS)]}
        style["linestyle"] = "--" if BIAS in name else "-"
        for axis, (x, values) in views.items():
            mean, half = map(np.array, zip(*map(analysis.interval, zip(*values))))
            axis.plot(x, mean, label=name, **style)
            band = {"color": style["color"], "alpha": 0.12, "linewidth": 0}
            axis.fill_between(x, mean - half, mean + half, **band)
    by_step.set(title=titles[0], xlabel="training step", ylabel="accuracy in training")
    by_kl.set(title=titles[1], xlabel="KL to the starting policy, nats a token")
    far = 2 * by_kl.lines[0].get_xdata()[-1]  # what goes on for long does not squeeze the rest
    by_kl.set_xlim(right=min(far, by_kl.get_xlim()[1]))
    by_step.xaxis.get_major_locator().set_params(integer=True)
    title = f"Means of {len(runs)} seeds, bands: 95 %; by KL up to where the first seed ends"
    labels = by_step.get_legend_handles_labels()
    figure.legend(*labels, title=title, loc="outside lower center", ncols=3)
    return figure


DRAWN = {"AR, α = 1": "AR α = 1", "AR, α = .3": "AR"} | {x: x for x in ("Lopti", RANDOM, TWO)}
WORLDS = {  # the three of world.py that are drawn
    "unlikely wording, unit steps": "Signal at likelier tokens:\nthey lead",
    "wording like decisions": "Signal and energy alike:\nno lead",
    "good policy, likely wording": "Signal at unlikelier tokens:\nthey fall behind",
}
NOTE = """Points: accuracy minus GRPO's at equal KL, 95 % intervals. Each panel has its own scale.
Predicted gain: how much more reward than GRPO's a first step adds, by the theory.
Left and right: steps of fixed length, in the middle: AdamW."""


def draw_worlds(rows):
    """A win, a tie and a loss: where signal and energy sit, what was predicted, what was found."""
    figure, axes = plt.subplots(1, 3, figsize=(16, 7.5), sharey=True)
    for axis, (name, title) in zip(axes, WORLDS.items()):
        (of, _), reach = world.WORLDS[name], 0.0
        signals, products = analysis.moments(of, lambda pi: pi**0, lambda pi: pi)
        by_signal, by_energy = signals[1] / signals[0], products[0, 1] / products[0, 0]
        text = {"ha": "right", "va": "center", "transform": axis.get_yaxis_transform()}
        for height, (method, color) in enumerate(DRAWN.items()):
            mean, half, _ = analysis.gain_in_world(rows, name, "equal KL", method)
            style = {"color": COLORS[color], "fmt": "o", "markersize": 10, "capsize": 5}
            axis.errorbar(mean, height, xerr=half, **style)
            gain = round(100 * analysis.predicted_gain(of, method)) - 100
            gain = "≤ 0 %" if method in (RANDOM, TWO) else f"{gain:+d} %"  # a bound: DESIGN.md
            axis.text(0.99, height, gain.replace("-", "−").replace("+0", "0"), **text)
            reach = max(reach, 1.9 * (abs(mean) + half))
        axis.text(0.99, 4.4, "predicted gain", weight="bold", **text)
        axis.axvline(0, color="black", linewidth=1.5)
        axis.set(xlim=(-reach, reach), ylim=(-0.5, 4.7), xlabel="accuracy minus GRPO's")
        axis.set_title(f"{title}\nmean π: signal {by_signal:.2f}, energy {by_energy:.2f}")
        axis.set_yticks(range(len(DRAWN)), DRAWN)
        axis.locator_params(axis="x", nbins=5)
    message = "AR and Lopti lead where the signal sits at likelier tokens than the energy"
    figure.suptitle(message, x=0.01, ha="left", weight="bold")
    figure.supxlabel(NOTE, fontsize=14, ha="left", x=0.01)
    return figure


def main():
    look = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=look).parse_args()
    lines = experiments.read_lines(experiments.RESULTS)
    made = {name: draw_two_views(lines, *how) for name, how in PICTURES.items()}
    made["world"] = draw_worlds(experiments.read_lines(world.FILE))
    for name, figure in made.items():
        figure.savefig(analysis.FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
