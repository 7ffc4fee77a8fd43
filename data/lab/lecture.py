"""Draws the pictures of notebook.ipynb, and holds what else keeps its cells short."""

import copy
import inspect
import io
import math
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

LAB = Path(__file__).resolve().parent
sys.path[:0] = [str(LAB.parents[1]), str(LAB.parent / "ports")]

import check_port
import matplotlib.pyplot as plt
import numpy
import pandas
import torch
from IPython import get_ipython
from IPython.core.pylabtools import print_figure
from IPython.display import Code, Markdown, display
from long_runs import METHODS
from matplotlib.colors import LinearSegmentedColormap
from PIL import Image
from results import COLORS, name_lines
from scipy import stats
from torch.nn.functional import one_hot

import lopti
from rewards import kk_reward

PROBABILITY = LinearSegmentedColormap.from_list("π", [COLORS["low"], "#F7F7F7", COLORS["high"]])
plt.rcParams |= {
    "font.size": 15,
    "axes.titlesize": 17,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "figure.titlesize": 17,
    "figure.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 2.5,
    "figure.constrained_layout.use": True,
    "legend.frameon": False,
    "figure.dpi": 80,
}


def small_png(figure):
    """Returns a figure as png with 256 colours: a third of the space in the notebook."""
    picture = Image.open(io.BytesIO(print_figure(figure, "png"))).convert("RGB")
    stream = io.BytesIO()
    picture.quantize(256, dither=Image.Dither.NONE).save(stream, "png", optimize=True)
    return stream.getvalue()


if get_ipython():  # in a notebook
    get_ipython().display_formatter.formatters["image/png"].for_type(plt.Figure, small_png)

# What the cells show ------------------------------------------------------------------------------


def conclude(text):
    """Shows the pictures drawn so far, then what follows from them."""
    plt.show()
    display(Markdown(f"**In short.** {text}"))


def source(function, first, last):
    """Shows the lines of a function from the first that holds `first` to the next with `last`."""
    text = inspect.getsource(function)
    start = text.rindex("\n", 0, text.index(first)) + 1
    stop = text.index("\n", text.index(last, start))
    display(Code(textwrap.dedent(text[start:stop]), language="python"))


# What the cells compute ---------------------------------------------------------------------------


def gradient_norm(logits, ids):
    """Returns the norm of the gradient of each token's log π with respect to the logits.

        ‖∇_z log π_j‖ = ‖e_j - π‖,   z the logits, π = softmax(z)

    logits (M, V), ids (M,) → (M,). Of two tokens with π = 0.5, e_j - π is (0.5, -0.5):

    >>> gradient_norm(torch.zeros(1, 2), torch.tensor([0]))
    tensor([0.7071])
    """
    probabilities = logits.softmax(-1)
    return (one_hot(ids, logits.shape[-1]) - probabilities).norm(dim=-1)


def distance(model, other):
    """Returns the norm of the difference between the weights of two models."""
    squares = 0.0
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        squares += float((ours - theirs).detach().square().sum())
    return math.sqrt(squares)


def gain_of_step(pi, signal, squared_norm, alpha):
    """Returns how far a step of norm 1 goes along the mean gradient, in units of a step of GRPO.

        (Σ s·w / Σ s) / √(Σ v·w² / Σ v),   w = 1 - α + α·π

    pi, signal (s) and squared_norm (v) have an entry for each group of tokens: their π, their share
    of the mean gradient, their share of the squared norm; (groups,) each → a scalar. The formula
    supposes that the gradients of different groups are orthogonal on average.

    >>> gain_of_step(torch.tensor([0.9]), torch.ones(1), torch.ones(1), alpha=0.3)  # one π only
    tensor(1.)
    """
    weights = lopti.reweight_advantages(torch.ones_like(pi), pi.log(), alpha)
    along = (signal * weights).sum() / signal.sum()
    norm = ((squared_norm * weights**2).sum() / squared_norm.sum()).sqrt()
    return along / norm


def compare_step(step, policy, tokenizer, batch, settings):
    """Compares a training step with those of lopti.py, and with three slips in AR + Lopti.

    Returns a table of distances between weights after one step from `policy`, which is π_ref, too;
    1 is the distance by which AR + Lopti has moved them.
    """
    models = {}

    def fresh(name):  # the same weights, and the same random numbers
        torch.manual_seed(7)
        models[name] = copy.deepcopy(policy)
        return models[name], lopti.new_optimizer(models[name], settings)

    model, optimizer = fresh("yours")
    step(model, policy, optimizer, batch, settings)
    for name, changed in METHODS.items():  # the last one is AR + Lopti
        model, optimizer = fresh(name)
        method = replace(settings, **changed)
        rollout, _ = lopti.training_step(
            model, policy, optimizer, tokenizer, kk_reward, batch, method
        )
    for slip in ("N of the pass", "split by the current policy", "~low without the mask"):
        model, optimizer = fresh(slip)
        update_with_slip(slip, model, policy, optimizer, rollout, method)
    rows = {}
    unit = distance(models["AR + Lopti"], policy)
    for name in [*models][1:]:
        to_yours = distance(models[name], models["yours"]) / unit
        to_both = distance(models[name], models["AR + Lopti"]) / unit
        rows[name] = {"your weights": to_yours, "those of AR + Lopti": to_both}
    return pandas.DataFrame.from_dict(rows, "index").rename_axis("distance to")


def update_with_slip(slip, policy, reference, optimizer, rollout, settings):
    """Makes both passes of Lopti on a rollout with AR, but with a slip."""
    mask = rollout.mask
    both = lopti.split_tokens(rollout.old_logprobs, mask, settings.eta)
    if slip == "~low without the mask":  # the second pass trains on all other tokens of a row
        everything = torch.ones_like(mask)
        everything[:, 0] = False  # no logits predict it
        old_logprobs, _ = lopti.response_logprobs(reference, rollout.ids, everything, settings)
        unweighted = rollout.response_advantages[:, None] * everything
        advantages = lopti.reweight_advantages(unweighted, old_logprobs, settings.alpha)
        whole_rows = {"mask": everything, "advantages": advantages}
        whole_rows |= {"old_logprobs": old_logprobs, "ref_logprobs": old_logprobs}
        rollout = replace(rollout, **whole_rows)
        both = (both[0], everything & ~both[0])
    for number, update_mask in enumerate(both):
        for rows in torch.arange(len(mask)).split(settings.mini_batch_size):
            part = rollout.part(rows)
            tokens = update_mask[rows]
            scale = 1.0
            if slip == "N of the pass":
                part = replace(part, mask=tokens)
            elif slip == "split by the current policy":
                logprobs, _ = lopti.response_logprobs(policy, part.ids, part.mask, settings)
                tokens = lopti.split_tokens(logprobs, part.mask, settings.eta)[number]
            else:  # `lopti.update` divides by the number of all tokens; N counts the responses
                scale = float(part.mask.sum() / mask[rows].sum())
            scaled = replace(part, advantages=part.advantages * scale)
            kl_coef = settings.kl_coef * scale
            lopti.update(policy, optimizer, scaled, tokens, replace(settings, kl_coef=kl_coef))


def show_learned(examples, before, after):
    """Prints the puzzle with the shortest responses that is solved now and was not before."""
    learned = []
    for example, old, new in zip(examples, before, after, strict=True):
        if new["reward"] == 3 and old["reward"] < 3:
            length = len(old["response"]) + len(new["response"])
            learned.append((length, example.question, old["response"], new["response"]))
    if learned:
        _, question, old, new = min(learned)
        print(f"{textwrap.fill(question, 99)}\n\nBefore:\n{old}\n\nAfter:\n{new}")


def compare_tables(port):
    """Prints which updates of golden.json a port makes wrongly, and from which step on.

    It is level 2 of check_port.py, but does not name the mistake.
    """
    cases = check_port.GOLDEN["rollouts"]
    wrong = 0
    for case in cases:
        right = [check_port.float64(step["table"]) for step in case["steps"]]
        first_wrong = check_port.first_wrong(port(case), right)
        if first_wrong < math.inf:
            print(f"{case['name']}: wrong from optimizer step {first_wrong + 1} on")
            wrong += 1
    print(f"{len(cases) - wrong} of {len(cases)} cases are right")


# The experiment of section 12 ---------------------------------------------------------------------

REWARD_TOKENS = 4
PI_OF_RIGHT = 0.7
NOISE_TOKENS = 200
FOUR_METHODS = ("GRPO", "AR", "Lopti", "GRPO, two epochs")


class SmallPolicies:
    """Holds twenty policies without a prompt, one for each seed; T = 204 tokens, V words.

    A reward token is word 0, which is right, with `PI_OF_RIGHT`, and word 1 otherwise. A noise
    token is each of V = 1 / `pi_of_noise` words with this probability. Training changes the logits
    of a policy: with `shared` by one small network for all tokens, whose input says which token it
    is, and otherwise by a table, in which each token has parameters of its own.
    """

    def __init__(self, pi_of_noise, shared, seeds=20):
        words = round(1 / pi_of_noise)
        self.start = torch.full((REWARD_TOKENS + NOISE_TOKENS, words), -math.inf)  # logits, (T, V)
        self.start[:REWARD_TOKENS, :2] = torch.tensor([PI_OF_RIGHT, 1 - PI_OF_RIGHT]).log()
        self.start[REWARD_TOKENS:] = -math.log(words)
        self.seeds = seeds
        self.places = None
        self.weights = [torch.zeros(seeds, len(self.start), words)]
        if shared:
            self.places = torch.randn(seeds, len(self.start), 16)
            self.weights = [torch.randn(seeds, 16, 16) / 4, torch.zeros(seeds, 16, words)]
        for tensor in self.weights:
            tensor.requires_grad_()

    def log_pi(self):
        """Returns log π of each word: (seeds, T, V)."""
        change = self.weights[-1]
        if self.places is not None:
            change = (self.places @ self.weights[0]).tanh() @ change
        return (self.start + change).log_softmax(2)

    def logprobs(self, words):
        """Returns log π of these words, (B, T) each; the responses of a seed are side by side."""
        words = words.view(self.seeds, -1, len(self.start))  # (seeds, responses, T)
        log_pi = self.log_pi().transpose(1, 2)  # (seeds, V, T)
        return log_pi.gather(1, words).view(-1, len(self.start))

    @torch.no_grad()
    def sample(self, count):
        """Samples `count` responses of each policy. Returns their words and log π: (B, T) each."""
        pi = self.log_pi().exp().flatten(0, 1)  # (seeds · T, V)
        words = pi.multinomial(count, replacement=True).view(self.seeds, -1, count)
        words = words.transpose(1, 2).flatten(0, 1)
        return words, self.logprobs(words)

    @torch.no_grad()
    def kl_and_accuracy(self):
        """Returns the KL to the first policy, and the mean π of a right word: (2, seeds)."""
        log_pi = self.log_pi()
        kl = (log_pi.exp() * (log_pi - self.start)).nan_to_num().sum((1, 2))
        return torch.stack([kl, log_pi[:, :REWARD_TOKENS, 0].exp().mean(1)])


def count_right(words):
    """Returns the reward of each response, the number of right reward tokens: (B, T) → (B,)."""
    return (words[:, :REWARD_TOKENS] == 0).sum(1).float()


class NormedDescent:
    """Makes steps of gradient descent that all have one norm, for each seed by itself."""

    def __init__(self, weights, norm):
        self.weights = weights
        self.norm = norm

    def zero_grad(self):
        for tensor in self.weights:
            tensor.grad = None

    @torch.no_grad()
    def step(self):
        squares = [tensor.grad.square().sum((1, 2), keepdim=True) for tensor in self.weights]
        norm = sum(squares).sqrt()  # (seeds, 1, 1)
        for tensor in self.weights:
            tensor -= self.norm * tensor.grad / norm.clamp(min=1e-12)  # no step without a gradient


def accuracy_at(path, kl):
    """Returns the accuracy of each seed where it first reaches these KLs (K,): (seeds, K)."""
    rows = []
    for seed in range(path.shape[2]):
        reached = numpy.maximum.accumulate(path[:, 0, seed])
        is_new = numpy.diff(reached, prepend=-1) > 0
        rows.append(numpy.interp(kl, reached[is_new], path[is_new, 1, seed]))
    return numpy.array(rows)


def train_all(train, pi_of_noise, make_optimizer, steps, shared=False, methods=FOUR_METHODS):
    """Trains by each method, from the same policies and random numbers. Returns {method: path}."""
    paths = {}
    for method in methods:
        torch.manual_seed(0)
        policy = SmallPolicies(pi_of_noise, shared)
        paths[method] = train(method, policy, make_optimizer(policy.weights), steps)
    return paths


def ahead_of_grpo(paths):
    """Returns how far methods are ahead of GRPO: KLs (K,), and {method: (means, halves)} at these.

    `paths` has a tensor (steps, 2, seeds) for each method. The KLs go up to 1, or less where a run
    does not come so far. A half is that of the 95 % interval over the seeds.
    """
    last = min(float(path[:, 0].amax(0).min()) for path in paths.values())
    kl = numpy.linspace(0, min(last, 1.0), 101)
    of_grpo = accuracy_at(paths["GRPO"].numpy(), kl)
    ahead = {}
    for method, path in paths.items():
        difference = accuracy_at(path.numpy(), kl) - of_grpo
        count = len(difference)
        half = stats.t.ppf(0.975, count - 1) * difference.std(0, ddof=1) / math.sqrt(count)
        ahead[method] = (difference.mean(0), half)
    return kl, ahead


def print_differences(ahead):
    """Prints how far the methods are ahead of GRPO at the last KL."""
    print("accuracy minus GRPO's, at the right end")
    for method, (means, halves) in ahead.items():
        if method != "GRPO":
            print(f"    {method}: {means[-1]:+.3f} ± {halves[-1]:.3f}")


def standing(means, halves):
    """Says where a method stands against GRPO at the last KL; less than 0.002 is called level."""
    if abs(means[-1]) <= max(halves[-1], 0.002):
        return "level"
    return "ahead" if means[-1] > 0 else "behind"


# Pictures -----------------------------------------------------------------------------------------


def token_sheet(tokens, pi, norms, title, notes=None, width=88):
    """Draws a response: each token on the colour of its π, and under it a bar for its norm.

    The bars of a line stand on one baseline; thin lines mark the norms 0 and 1. `notes` are words
    to write beside the bars of some tokens, {token: words}.
    """
    places = []  # left end, foot, width of each token
    x = 0
    foot = 0
    for token in tokens:
        if x + len(token) + 1 > width:
            x = 0
            foot -= 3.4
        places.append((x, foot, len(token) + 0.8))
        x += len(token) + 1
    figure, axis = plt.subplots(figsize=(13, 2.7 - 0.33 * foot))
    height = 1.2  # of the norm 1
    below = 1.8  # from the foot of the tokens to the baseline of their bars
    ticks = {}  # place of a thin line: the norm that it marks
    for foot in {foot for _, foot, _ in places}:
        ticks[foot - below] = "0"
        ticks[foot - below + height] = "1"
    for place in ticks:
        axis.axhline(place, color="#BBBBBB", linewidth=0.8, zorder=0)
    axis.set_yticks(list(ticks), list(ticks.values()), fontsize=11)
    axis.tick_params(left=False, bottom=False, labelbottom=False)
    text_style = {"ha": "center", "va": "center", "family": "monospace", "fontsize": 13}
    for token, (x, foot, size), probability, norm in zip(tokens, places, pi, norms, strict=True):
        color = PROBABILITY(float(probability))
        axis.add_patch(plt.Rectangle((x, foot), size, 0.9, color=color))
        ink = "white" if abs(probability - 0.5) > 0.3 else "black"
        axis.text(x + size / 2, foot + 0.43, token, color=ink, **text_style)
        left = x + size / 2 - 1
        style = {"facecolor": color, "edgecolor": "#777777", "linewidth": 0.8}
        axis.add_patch(plt.Rectangle((left, foot - below), 2, height * norm, **style))
        axis.text(left + 2.5, foot - below + 0.4, (notes or {}).get(token, ""), weight="bold")
    axis.set(xlim=(0, width), ylim=(places[-1][1] - 2, 1.1), title=title, ylabel="gradient norm")
    axis.spines[:].set_visible(False)
    style = {"location": "bottom", "aspect": 60, "shrink": 0.6, "label": "π of the token"}
    figure.colorbar(plt.cm.ScalarMappable(cmap=PROBABILITY), ax=axis, **style)


def bounds(pi, norms, vocabulary_size):
    """Draws the norm of every token between its bounds, Prop. 4.2, V the size of the vocabulary.

    √(V/(V-1))·(1-π) ≤ ‖∇ log π‖ ≤ √2·(1-π)
    """
    grid = torch.linspace(0, 1, 101)
    lower = math.sqrt(vocabulary_size / (vocabulary_size - 1)) * (1 - grid)
    upper = math.sqrt(2) * (1 - grid)
    label = "between 1 − π and √2·(1 − π)"
    _, axis = plt.subplots(figsize=(11, 4.8))
    axis.fill_between(grid, lower, upper, color=COLORS["GRPO"], alpha=0.25, label=label)
    axis.scatter(pi, norms, s=16, c=pi, cmap=PROBABILITY, edgecolors="black", linewidths=0.3)
    axis.plot([], [], "o", color=COLORS["low"], label="a token, coloured by its π")
    title = "The gradient norm lies between 1 − π and √2·(1 − π)"
    axis.set(title=title, xlabel="π of the token", ylabel="gradient norm at the logits")
    axis.legend()


def bars(values, halves, colors, title, ylabel, notes=()):
    """Draws bars with intervals: a row of the table `values` is a group, a column is a color.

    `halves` is a table of the same shape, with half of each interval. `notes` are words to write
    above the groups.
    """
    style = {"figsize": (12, 4.8), "width": 0.8, "capsize": 4, "rot": 0, "xlabel": ""}
    axis = values.plot.bar(yerr=halves, color=colors, title=title, ylabel=ylabel, **style)
    for drawn in axis.containers[1::2]:  # every other one has the intervals
        labels = [f"{value:.2f}".replace("-", "−") for value in drawn.datavalues]
        axis.bar_label(drawn, labels, fontsize=11, padding=3)
    tops = (values + halves).max(axis=1)
    for place, (top, note) in enumerate(zip(tops, notes)):
        axis.text(place, top + 0.1 * max(tops), note, ha="center")
    axis.axhline(0, color="black", linewidth=1)
    axis.margins(y=0.3 if notes else 0.12)
    axis.legend(loc="upper right")


def five_bars(values, title, ylabel):
    """Draws a bar for each of some values, {name: value}."""
    _, axis = plt.subplots(figsize=(10, 4))
    colors = [COLORS.get(name, COLORS["Lopti"]) for name in values]  # the others are its passes
    labels = [name.replace(", ", ",\n") for name in values]
    drawn = axis.bar(labels, list(values.values()), color=colors, width=0.6)
    axis.bar_label(drawn, fmt="%.2f")
    axis.axhline(1, color="black", linewidth=1, linestyle=":")
    axis.set(title=title, ylabel=f"{ylabel}\n(dotted: no change)")


def first_steps():
    """Returns what was measured of first steps, and half of each interval: a row for each model."""
    table = pandas.read_csv(LAB / "results/first_steps.csv")
    values = table.pivot(index="model", columns="measured", values="value")
    return values, table.pivot(index="model", columns="measured", values="half_interval")


def draw_first_steps():
    """Draws how far steps on some of the tokens move the tokens with π ≥ 0.75 (R1).

    Returns, for each model, how much longer the step on π < 0.25 is than that on π ≥ 0.75.
    """
    values, halves = first_steps()
    updates = ["update on π < 0.25", "update on π ≥ 0.75"]
    models = ["SmolLM2", "bundled"]
    title = (
        "An update on the low-probability tokens moves the high-probability\n"
        "tokens more than their own update does, but is also longer"
    )
    ylabel = "movement of tokens with π ≥ 0.75\n(update on all tokens = 1)"
    colors = [COLORS["low"], COLORS["high"]]
    difference = "difference of the two updates"
    lengths = values["norm of π < 0.25 / norm of π ≥ 0.75"]
    notes = []
    for model in models:
        mean = values.loc[model, difference]
        half = halves.loc[model, difference]
        note = f"difference, paired: {mean:.2f} ± {half:.2f}\n"
        notes.append(f"{note}orange step: {lengths[model]:.1f} times as long")
    bars(values.loc[models, updates], halves.loc[models, updates], colors, title, ylabel, notes)
    return lengths


def draw_shares():
    """Draws the shares of four kinds of tokens with π < 0.25 of the bundled model (R3).

    Returns the shares.
    """
    table = pandas.read_csv(LAB / "results/r3.csv", index_col="group")
    table = table[table["one_of_seven"] & table.index.str.startswith("π < 0.25, ")]
    table.index = table.index.str.removeprefix("π < 0.25, ")
    names = ["squared norm", "mean gradient"]
    shares = table[["share_of_squared_norm", "share_of_mean_gradient"]].set_axis(names, axis=1)
    halves = table[["squared_norm_half_interval", "mean_gradient_half_interval"]]
    title = "Size is not usefulness: synonyms have much of the squared norm,\n"
    title += "but </think> has most of the mean gradient"
    ylabel = "share (tokens with π < 0.25)"
    bars(shares, halves.set_axis(names, axis=1), ["#AAAAAA", "#222222"], title, ylabel)
    return shares


def show_rule():
    """Shows for each setting in which it was measured what the rule of section 12 says.

    The interval of the rule takes those of its two averages as independent.
    """
    values, halves = first_steps()
    by_signal = "average π by the mean gradient"
    by_norm = "average π by the squared norm"
    values = values[values[by_signal].notna()]
    halves = halves.loc[values.index]
    gain = "gain of AR α = 0.3, gradient descent"
    by_rule = 100 * 0.3 * (values[by_signal] - values[by_norm])  # α times the derivative
    half_by_rule = 100 * 0.3 * (halves[by_signal] ** 2 + halves[by_norm] ** 2) ** 0.5

    def with_interval(means, half_intervals):
        return means.map("{:.1f}".format) + " ± " + half_intervals.map("{:.1f}".format)

    rule = {"by the rule, α·(E_s − E_v), in %": with_interval(by_rule, half_by_rule)}
    rule["measured, in %"] = with_interval(values[gain], halves[gain])
    display(pandas.DataFrame(rule))


def curves(lines, title, xlabel, ylabel):
    """Draws lines, {name: (x, y, style)}."""
    _, axis = plt.subplots(figsize=(12, 4.6))
    ends = {}
    for name, (x, y, style) in lines.items():
        axis.plot(x, y, **style)
        ends[name] = (y[-1], style["color"])
    name_lines(axis, x[-1], ends)
    axis.set(title=title, xlabel=xlabel, ylabel=ylabel)
    return axis


def draw_ahead(kl, ahead, setting):
    """Draws what `ahead_of_grpo` returns. `setting` says in a few words what was trained."""
    figure, axis = plt.subplots(figsize=(12, 4.8))
    ends = {}
    for method, (means, halves) in ahead.items():
        color = COLORS["AR, α = 1" if method == "AR" else method]
        axis.plot(kl, means, color=color)
        axis.fill_between(kl, means - halves, means + halves, color=color, alpha=0.2)
        ends[method] = (means[-1], color)
    name_lines(axis, kl[-1], ends)
    axis.set(
        xlabel="KL to the policy at the start", ylabel="accuracy, minus GRPO's\nat the same KL"
    )
    axis.set_title(setting, fontsize=15, weight="normal")
    of_ar = standing(*ahead["AR"])
    of_lopti = standing(*ahead["Lopti"])
    found = f"AR is {of_ar} and Lopti is {of_lopti}"
    if of_ar == of_lopti:
        found = f"AR and Lopti are {of_ar}"
    title = f"In this task, against GRPO at equal KL, {found}"
    figure.suptitle(title, x=0.01, ha="left")


def clip_cases(letters, clips):
    """Draws the loss of Eq. 1 over the ratio; letters: {name: (ratio, Â)} are marked.

    `clips` are the last three arguments of `lopti.policy_loss`.
    """
    ratio = torch.linspace(0.05, 3, 2000)
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.2))
    for axis, advantage, aim in zip(axes, (1.0, -1.0), ("raise", "lower")):
        logprobs = ratio.log().requires_grad_()
        losses = lopti.policy_loss(
            logprobs, torch.zeros(2000), torch.full((2000,), advantage), *clips
        )
        (slope,) = torch.autograd.grad(losses.sum(), logprobs)
        losses = losses.detach()
        axis.plot(ratio, losses.where(slope == 0, math.nan), color="#BBBBBB", linewidth=5)
        axis.plot(ratio, losses.where(slope != 0, math.nan), color="#333333", linewidth=5)
        for name, (at, of) in letters.items():
            if of == advantage:
                place = (float(at), float(losses[(ratio - at).abs().argmin()]))
                axis.plot(*place, "o", color="white", markeredgecolor="black", markersize=20)
                axis.annotate(name, place, ha="center", va="center", weight="bold")
        axis.axvline(1, color="#BBBBBB", linewidth=1, linestyle=":")
        name = f"Â = {advantage:.0f}: {aim} π".replace("-", "−")
        middle = -0.9 if advantage > 0 else 1.8  # both panels have one scale
        axis.set(xlim=(0, 2.9), ylim=(middle - 1.15, middle + 1.15))
        axis.set_xticks([0.8, 1, 1.24, 2], ["0.8", "1", "1.24", "2"])
        axis.set_title(name, fontsize=15, weight="normal")
    style = {"va": "center", "color": "#666666"}
    axes[0].text(1.6, -1.1, "clipped", **style)
    axes[1].text(0.1, 1.1, "clipped", **style)
    axes[0].set_ylabel("loss, without the KL")
    words = r"ratio r = π / π$_{\mathrm{old}}$ (dotted: 1, the probability has not changed)"
    figure.supxlabel(words, fontsize=15)
    title = "Where the loss is flat, a token has no gradient: it is clipped"
    figure.suptitle(title, x=0.01, ha="left")


def draw_steps(steps, title):
    """Draws π of A, B and C before (dotted) and after a step: {name: (before, after)}."""
    figure, axes = plt.subplots(1, len(steps), figsize=(12, 3.8), sharey=True)
    for axis, (name, (before, after)) in zip(axes, steps.items(), strict=True):
        colors = [COLORS["high"], COLORS["low"], COLORS["low"]]
        names = ["A (good)", "B (good)", "C (bad)"]
        axis.bar(names, after, color=colors)
        axis.bar(names, before, fill=False, linewidth=2, linestyle=":")
        for place, (old, new) in enumerate(zip(before, after, strict=True)):
            axis.text(place, max(old, new) + 0.02, f"{new:.2f}", ha="center")
        axis.set_title(name, fontsize=15, weight="normal")
    axes[0].set(ylabel="π (dotted: before)", ylim=(0, 1.05))
    figure.suptitle(title, x=0.01, ha="left")


def draw_toy(panels, title):
    """Draws π of A after each step, {name of a panel: {treatment: π}}.

    Behind the name of a panel stands whether Lopti ends above 0.80, which the title asks.
    """
    figure, axes = plt.subplots(1, len(panels), figsize=(12, 4.2), sharey=True)
    for axis, (name, paths) in zip(axes, panels.items(), strict=True):
        ends = {}
        for treatment, path in paths.items():
            width = 7 if treatment == "GRPO, two epochs" else 2.5  # GRPO's step lies on its first
            axis.plot(path, color=COLORS[treatment], linewidth=width, marker="o")
            if len(path) == 3:
                ends[treatment] = (float(path[-1]), COLORS[treatment])
            else:
                style = {"color": COLORS[treatment], "weight": "bold", "ha": "right", "va": "top"}
                axis.text(0.98, path[-1] - 0.006, treatment, **style)
        axis.axhline(0.8, color="black", linewidth=1, linestyle=":")
        answer = "yes" if paths["Lopti"][-1] > 0.8 else "no"
        axis.set_title(f"{name} {answer}", fontsize=15, weight="normal")
        axis.set_xticks([0, 1, 2])
        axis.set_xlabel("optimizer steps")
        name_lines(axis, 2, ends)
    axes[0].set_ylabel("π of A (0.80 before)")
    figure.suptitle(title, x=0.01, ha="left")
