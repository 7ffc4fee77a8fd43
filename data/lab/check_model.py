"""Is π of a model the same when it is drawn as when it is scored? Before a training with lopti.py.

    python data/lab/check_model.py MODEL                  # a folder or a hub name
    python data/lab/check_model.py MODEL --length 4096    # rows up to this many tokens

The loss takes π from whole rows, padded on the right. Sampling reads a cache and prompts padded on
the left, and a response that has ended leaves the batch. Some models give another π then. Here
`lopti.sample` draws three responses: one that ends at once, one to a short prompt with much
padding, one that ends near --length. `lopti.token_logits` scores them. All tokens of the vocabulary
are compared, in float32. Exit code 0: equal to 1e-2 nats. 1: not equal. 2: there is no such model.
"""

import argparse
import sys
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import lopti

TOLERANCE = 1e-2  # nats
SMALLEST = 1e-30  # of what is less likely the logarithm is not compared
SHORT = "Which of the inhabitants is a knight, and which is a knave? "


def largest_difference(model, tokenizer, length):
    """Between log π as drawn and as scored, in nats, over M sampled tokens and the vocabulary."""
    settings = lopti.Settings(max_new_tokens=lopti.STRETCH + 4)  # so that a second stretch begins
    end_ids = model.generation_config.eos_token_id
    drawn = [[], [], []]  # by row; row 0 ends at once and leaves the batch
    multinomial = torch.multinomial

    def draw(probabilities, num_samples):
        """Takes the place of torch.multinomial, with which HF draws the next token of each row."""
        first = 3 - len(probabilities)
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
    with torch.no_grad(), mock.patch("torch.multinomial", draw):
        rollout = lopti.sample(model, tokenizer, [SHORT, SHORT, long], 1, 1.0, settings)
        mask = rollout.response_mask
        scored = lopti.token_logits(model, rollout.ids, mask, 1.0).softmax(1)
    sampled = []
    for values, count in zip(drawn, mask.sum(1).tolist()):
        sampled += values[:count]  # a row that has ended is drawn on until it leaves, as padding
    difference = torch.stack(sampled).clamp(min=SMALLEST).log() - scored.clamp(min=SMALLEST).log()
    return float(difference.abs().max())  # of (M, V)


def main(words=None):
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=look)
    parser.add_argument("model", help="folder or hub name")
    parser.add_argument("--length", type=int, default=656, help="tokens in a row (default: 656)")
    args = parser.parse_args(words)
    try:
        model, tokenizer = lopti.load_model(args.model, "auto")
    except (lopti.UserError, OSError) as problem:
        parser.error(str(problem))
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    length = min(args.length, longest or args.length)
    ends = tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id)
    print(f"model type: {model.config.model_type}; longest position: {longest or 'not stated'}")
    print(f"tokens that end a response: {', '.join(ends)}")
    worst = largest_difference(model, tokenizer, length)
    verdict = "right" if worst <= TOLERANCE else "wrong, do not train this model with lopti.py"
    print(f"π is {verdict}: log π as drawn and as scored differ by up to {worst:.1e} nats.")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
