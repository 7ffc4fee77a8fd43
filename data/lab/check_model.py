"""Does a model give the same π in sampling and in training? Run this before you train a new model.

    python data/lab/check_model.py MODEL                  # a folder or a hub name
    python data/lab/check_model.py MODEL --length 4096    # rows of up to this many tokens

The update computes π from whole rows, which are padded on the right. Sampling computes π from a
cache and from prompts that are padded on the left, and a response that has ended leaves the batch.
Some models give different π in these two cases, and training them with lopti.py would be wrong.

This program samples two responses to each of two prompts with `lopti.sample`. The first one ends at
once, the second follows a short prompt behind much padding, and two end near --length. Then it
computes their logits again with `lopti.token_logits`, and compares log π of every token of the
vocabulary, in float32.

Dynamic and longrope scaling change all positions of a row as soon as it is longer than the model's
original length. Of such a model a response that crosses this length is compared as well.

Exit code: 0 if all differences are at most 1e-2 nats, 1 if not, 2 if the model cannot be loaded.
"""

import argparse
import sys
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti
from rewards import make_example

TOLERANCE = 1e-2  # nats
SMALLEST = 1e-30  # smaller probabilities count as this one: float32 does not hold their logarithms
SHORT = "Which of the inhabitants is a knight, and which is a knave? "


def largest_difference(model, tokenizer, length):
    """Compares log π in sampling and in training, for M sampled tokens and the whole vocabulary.

    Returns the largest absolute difference, in nats, and the number of tokens of the longest row,
    which is `length` or a little less.
    """
    # With 4 tokens more a second stretch begins; the task math takes a prompt as it is.
    settings = lopti.Settings(task="math", max_new_tokens=lopti.STRETCH + 4)
    end_ids = model.generation_config.eos_token_id
    drawn = [[], [], [], []]  # of each row π of each token; row 0 ends at once and leaves the batch
    multinomial = torch.multinomial

    def draw(probabilities, num_samples):
        """Replaces torch.multinomial, with which HF draws the next token of each row."""
        first = 4 - len(probabilities)
        for row, values in enumerate(probabilities, first):
            drawn[row].append(values)
        without_end = probabilities.clone()
        without_end[:, end_ids] = 0.0
        ids = multinomial(without_end, num_samples)
        if first == 0:
            ids[0] = end_ids[0]
        return ids

    long = SHORT
    while len(tokenizer(long + SHORT).input_ids) <= length - settings.max_new_tokens:
        long += SHORT
    examples = []
    for prompt in (SHORT, long):
        row = {"prompt": prompt, "solution": "none"}
        examples.append(make_example(row, settings, tokenizer))
    with torch.no_grad(), mock.patch("torch.multinomial", draw):
        ids, mask, _, _ = lopti.sample(model, tokenizer, examples, 2, settings)
        scored = lopti.token_logits(model, ids, mask, settings).softmax(1)
    sampled = []
    for values, count in zip(drawn, mask.sum(1).tolist()):
        sampled += values[:count]  # HF draws for a row that has ended, too, until it leaves
    difference = torch.stack(sampled).clamp(min=SMALLEST).log() - scored.clamp(min=SMALLEST).log()
    return float(difference.abs().max()), ids.shape[1]  # difference: (M, V)


def original_length(config):
    """Returns the length of a row beyond which its positions change, or None if they never do."""
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *rope.values()):  # one for all layers, or one for each type of layer
        if isinstance(each, dict) and each.get("rope_type") in ("dynamic", "longrope"):
            return each.get("original_max_position_embeddings", config.max_position_embeddings)
    return None


def main(words=None):
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # as lopti.main
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=look)
    parser.add_argument("model", help="a folder or a hub name")
    parser.add_argument(
        "--length",
        type=int,
        default=656,
        help="tokens of the longest row, at most those that the model has positions for "
        "(default: %(default)s)",
    )
    args = parser.parse_args(words)
    try:
        model, tokenizer = lopti.load_model(args.model, "auto")
    except (lopti.UserError, OSError) as problem:
        parser.error(str(problem))
    config = model.config.get_text_config()
    original = original_length(config)
    limit = original or getattr(config, "max_position_embeddings", None) or args.length
    lengths = [min(args.length, limit)]
    if original:
        lengths.append(original + lopti.STRETCH // 2)  # the response crosses the original length
    ends = tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id)
    print(f"tokens that end a response: {', '.join(ends)}")
    are_right = []
    for length in lengths:
        difference, tokens = largest_difference(model, tokenizer, length)
        print(f"rows of up to {tokens} tokens: log π differs by up to {difference:.1e} nats")
        are_right.append(difference <= TOLERANCE)
    if all(are_right):
        print("π is right.")
    elif are_right[0]:
        print(f"π is wrong in rows of more than {original} tokens: train with shorter ones only.")
    else:
        print("π is wrong: do not train this model with lopti.py.")
    return 0 if all(are_right) else 1


if __name__ == "__main__":
    sys.exit(main())
