"""Draws one training step of the bundled model: which shape flows where, where AR and Lopti act.

python data/lab/flow.py     # samples eight responses into results/flow.json, draws flow.svg
"""

import json
import sys
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from results import COLORS, FOLDER, svg

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti
from rewards import compute_rewards, find_reward, load_data

RECORD = FOLDER / "flow.json"
GROUP_SIZE = 4
ALPHA = 0.3
ETA = 0.5
COLUMNS = 8  # the first tokens of the last response
GREY = "#C9CED4"
QUIET = "#565D66"


def sample():
    """Samples responses to two puzzles. Returns prompt length, ids, their π and reward of each."""
    settings = lopti.Settings()
    policy, tokenizer = lopti.load_model(settings.model, "cpu")
    puzzles, _ = load_data(settings, tokenizer)
    batch = [puzzles[0], puzzles[5]]
    torch.manual_seed(62)
    ids, mask, texts, _ = lopti.sample(policy, tokenizer, batch, GROUP_SIZE, settings)
    rewards = compute_rewards(find_reward(settings), texts, batch)
    logprobs, _ = lopti.response_logprobs(policy, ids, mask, settings)
    rows = []
    for row, reward in enumerate(rewards):
        of_row = {"prompt_length": len(batch[row // GROUP_SIZE].prompt_ids), "reward": reward}
        of_row["ids"] = ids[row][mask[row]].tolist()
        of_row["pi"] = [round(float(pi), 6) for pi in logprobs[row][mask[row]].exp()]
        rows.append(of_row)
    tokens = [tokenizer.decode([token]) for token in rows[-1]["ids"][:COLUMNS]]
    return {"question": batch[-1].question, "tokens": tokens, "rows": rows}


def write(x, y, text, **style):
    plt.text(x, y, text, **{"va": "center", "size": 14} | style)


def code(x, y, text, **style):
    write(x, y, text, family="monospace", size=12.5, **style)


def box(x, y, width, height, **style):
    plt.gca().add_patch(plt.Rectangle((x, y), width, height, **{"linewidth": 0} | style))


def arrow(start, end):
    style = {"arrowstyle": "-|>", "linewidth": 1.5, "shrinkA": 0, "shrinkB": 0}
    plt.annotate("", end, start, arrowprops=style | {"facecolor": "black"})


def number(value):
    return f"{value:.2f}".replace("-", "−")


def draw_responses(record, mask, low, advantages):
    """Draws the upper half of the page, with a row for each response."""
    write(14, 66, f"{len(mask) // GROUP_SIZE} prompts", weight="bold")
    story = record["question"].partition("You meet ")[2]
    write(14, 87, "the second one:", size=13, color=QUIET)
    for line, words in enumerate(textwrap.wrap(f"… {story}", 18)):
        write(14, 108 + 17 * line, words, size=12, color=QUIET)
    shape = f"(B, L) = {tuple(mask.shape)}"
    for x, align, name, function, below in (
        (156, "left", "1. responses", f"sample(), G = {GROUP_SIZE}", shape),
        (396, "center", "2. R", "compute_rewards()", "(B,)"),
        (482, "left", "3. π of each token", "response_logprobs()", "(B, L)"),
        (816, "right", "4. Â, Eq. 1", "group_advantages()", "(B,)"),
    ):
        write(x, 66, name, ha=align, weight="bold")
        code(x, 87, function, ha=align)
        write(x, 107, below, ha=align, color=QUIET)
    write(156, 284, "prompt · response · padding", size=12, color=QUIET)
    write(540, 107, f"π < {ETA}", color=COLORS["low"], weight="bold")
    write(608, 107, f"π ≥ {ETA}", color=COLORS["high"], weight="bold")
    scale = 160 / mask.shape[1]
    for row, of_row in enumerate(record["rows"]):
        top = 121 + 18 * row + 8 * (row // GROUP_SIZE)
        length = of_row["prompt_length"]
        box(156, top, scale * length, 14, facecolor=GREY)
        box(156 + scale * length, top, scale * mask[row].sum(), 14, facecolor=QUIET)
        for left in (156, 482):
            box(left, top, 160, 14, facecolor="none", edgecolor=GREY, linewidth=0.8)
        for tokens, color in ((mask, COLORS["high"]), (low, COLORS["low"])):
            runs, counts = tokens[row].long().unique_consecutive(return_counts=True)
            edges = 482 + scale * torch.cat([torch.zeros(1), counts.cumsum(0)])
            plt.stairs(top + 14 * runs, edges, baseline=top, fill=True, color=color)
        write(408, top + 7, f"{of_row['reward']:g}".replace("-", "−"), ha="right")
        write(816, top + 7, number(advantages[row]), ha="right")
    # Two lines lead to the lower half, from the first tokens of the last response, and an arrow.
    left = 482 + scale * length
    right = left + scale * COLUMNS
    box(left, top, right - left, 14, facecolor="none", edgecolor="black", linewidth=2.5)
    plt.plot([192, left], [306, top + 14], color="black", linewidth=0.8)
    plt.plot([692, right], [306, top + 14], color="black", linewidth=0.8)
    plt.plot([800, 800], [top + 20, 374], color="black", linewidth=1.5)
    arrow((800, 374), (754, 374))


def draw_tokens(tokens, pi, advantage, weighted):
    """Draws the lower half, with a column for each of the first tokens of the last response."""
    box(6, 392, 818, 50, facecolor=COLORS["AR, α = 0.3"], alpha=0.3)
    box(6, 448, 818, 112, facecolor=COLORS["Lopti"], alpha=0.15)
    for y, name, function, shape in (
        (332, "first tokens of the\nlast response, and π", "", ""),
        (383, "Â of the response", "", "(B, 1)"),
        (417, f"5. AR, α = {ALPHA}, Eq. 4", "reweight_advantages()", "(B, L)"),
        (472, f"6. Lopti, η = {ETA}", "", "masks (B, L)"),
    ):
        write(14, y - 9, name, weight="bold")
        code(14, y + 10, function)
        write(704, y if function else y - 9, shape, color=QUIET)
    code(150, 463, "split_tokens()")
    for y, name, color in ((494, f"pass 1: π < {ETA}", "low"), (536, f"pass 2: π ≥ {ETA}", "high")):
        write(14, y, name, weight="bold", color=COLORS[color])
        arrow((696, y), (712, y))
        code(716, y - 9, "7. update()")
        write(716, y + 9, "optimizer step", size=13)
    for column, token in enumerate(tokens):
        left = 192 + 63 * column
        middle = left + 29.5
        is_low = pi[column] < ETA
        color = COLORS["low" if is_low else "high"]
        box(left, 306, 59, 52, facecolor=color, alpha=0.28)
        style = {"family": "monospace", "size": 12, "ha": "center"}
        write(middle, 323, token.replace("-", "-\n"), **style)
        write(middle, 347, number(pi[column]), weight="bold", ha="center")
        write(middle, 374, number(advantage), ha="center")
        factor = weighted[column] / advantage
        write(middle, 407, f"× {number(factor)}", color=QUIET, ha="center")
        write(middle, 428, number(weighted[column]), weight="bold", ha="center")
        y = 494 if is_low else 536
        box(left, y - 18, 59, 36, facecolor=color)
        style = {"color": "white", "weight": "bold", "ha": "center"}
        write(middle, y, number(weighted[column]), **style)


def flow():
    """Draws what was sampled, and what the functions of lopti.py make of it."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    rows = record["rows"]
    prompts = [[0] * row["prompt_length"] for row in rows[::GROUP_SIZE]]
    _, mask = lopti.pack(prompts, [row["ids"] for row in rows])
    logprobs = lopti.scatter(torch.cat([torch.tensor(row["pi"]) for row in rows]).log(), mask)
    rewards = torch.tensor([row["reward"] for row in rows])
    advantages = lopti.group_advantages(rewards, GROUP_SIZE)
    weighted = lopti.reweight_advantages(advantages[:, None] * mask, logprobs, ALPHA)
    low, high = lopti.split_tokens(logprobs, mask, ETA)

    figure = plt.figure(figsize=(830 / 72, 600 / 72), layout="none")
    axis = figure.add_axes((0, 0, 1, 1), xlim=(0, 830), ylim=(600, 0))  # in points, y downwards
    axis.axis("off")
    title = "A reward is for a whole response; AR and Lopti act on its tokens"
    write(14, 25, title, size=20, weight="bold")
    draw_responses(record, mask, low, advantages)
    draw_tokens(record["tokens"], rows[-1]["pi"], advantages[-1], weighted[-1][mask[-1]])
    text = f"Both passes divide the loss by N = {mask.sum()}, the number of all response tokens: "
    text += f"{low.sum()} in pass 1, {high.sum()} in pass 2."
    write(14, 580, text)
    return figure


if __name__ == "__main__":
    RECORD.write_text(json.dumps(sample(), ensure_ascii=False) + "\n", encoding="utf-8")
    (FOLDER / "flow.svg").write_text(svg(flow), encoding="utf-8")
