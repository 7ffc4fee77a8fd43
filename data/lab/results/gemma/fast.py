"""What diagnose.measure measures, with each prompt read once for its 8 responses and one forward pass for all bins.

python fast.py OUT BATCHES [--check] FLAGS: a line of OUT after each rollout batch (one mini-batch). --check: one batch,
also by diagnose.measure's own calls (lopti.update five times), to compare the norms and log π.
"""

import json, sys, time
from itertools import pairwise
from pathlib import Path
import torch

torch.set_num_threads(1)
sys.path.insert(0, ".")
import diagnose, lopti

assert lopti.__file__ == ".", lopti.__file__


def hidden_states(policy, rollout, groups, size, settings):
    """The last hidden states that predict each response token of these groups, and those tokens: (M, width), (M,).

    A group is one row: its prompt, then its responses, each of which sees the prompt and itself. Also the rows of the tokens.
    """
    rows, positions, blocks, places, targets, owners = [], [], [], [], [], []
    for number, group in enumerate(groups):
        first = group * size
        mask = rollout.response_mask[first]
        start = int(mask.nonzero()[0])  # tokens of the prompt
        ids, position, block = rollout.ids[first, :start].tolist(), list(range(start)), [-1] * start
        for row in range(first, first + size):
            response = rollout.ids[row][rollout.response_mask[row]].tolist()
            before = start - 1  # the last token of the prompt predicts the first of the response
            for t, token in enumerate(response):
                places.append((number, before))
                targets.append(token)
                owners.append(row)
                before = len(ids)
                ids.append(token)
                position.append(start + t)
                block.append(row)
        rows.append(torch.tensor(ids))
        positions.append(torch.tensor(position))
        blocks.append(torch.tensor(block))
    pad = lambda parts, value: torch.nn.utils.rnn.pad_sequence(
        parts, batch_first=True, padding_value=value
    )
    ids, position, block = pad(rows, 0), pad(positions, 0), pad(blocks, -2)
    assert ids.shape[1] < 512  # the windows of attention see all
    causal = torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
    sees = causal & ((block[:, None, :] == -1) | (block[:, None, :] == block[:, :, None]))
    with lopti.mixed_precision(policy, settings):
        float_mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)[
            :, None
        ]
        masks = {"full_attention": float_mask, "sliding_attention": float_mask}
        states = policy.model(
            input_ids=ids, attention_mask=masks, position_ids=position, use_cache=False
        ).last_hidden_state
    number, place = torch.tensor(places).T
    return states[number, place], torch.tensor(targets), torch.tensor(owners)


def logits_of(policy, states, settings):
    with lopti.mixed_precision(policy, settings):
        logits = policy.lm_head(states)
    return logits.float() / settings.temperature


def norms_of(policy, rollout, settings):
    """Norms of the gradient: all tokens, then the four bins; counts of tokens in the bins; log π of all tokens in order."""
    size, parameters = settings.group_size, list(policy.parameters())
    advantages = lopti.group_advantages(rollout.rewards, size)
    groups = len(rollout.texts) // size
    busy = [g for g in range(groups) if advantages[g * size : (g + 1) * size].any()]
    idle = [g for g in range(groups) if g not in busy]
    normalizer, counts, logprobs = int(rollout.response_mask.sum()), torch.zeros(4), {}
    total, squares = None, [0.0] * 4
    for part, trains in ((busy, True), (idle, False)):
        if not part:
            continue
        with torch.set_grad_enabled(trains):
            states, targets, owners = hidden_states(policy, rollout, part, size, settings)
        with torch.no_grad():
            old = torch.cat(
                [
                    lopti.token_logprobs(logits_of(policy, s, settings), t)
                    for s, t in zip(states.split(128), targets.split(128))
                ]
            )
        for row in owners.unique().tolist():
            logprobs[row] = old[owners == row].tolist()
        pi = old.exp()
        for number, (low, high) in enumerate(pairwise(diagnose.EDGES)):
            chosen = (pi >= low) & (pi < high)
            counts[number] += chosen.sum()
            if not trains or not chosen.any():
                continue
            loss = 0
            for places in chosen.nonzero().flatten().split(400):
                new = lopti.token_logprobs(
                    logits_of(policy, states[places], settings), targets[places]
                )
                part_loss, _ = lopti.policy_loss(
                    new,
                    new.detach(),
                    advantages[owners[places]].float(),
                    normalizer,
                    None,
                    clip_low=settings.clip_low,
                    clip_high=settings.clip_high,
                    clip_dual=settings.clip_dual,
                    kl_coef=0.0,
                )
                loss = loss + part_loss
            found = torch.autograd.grad(
                loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            squares[number] = sum(
                float(
                    g.double().square().sum()
                    if g.numel() < 1e6
                    else torch.linalg.vector_norm(g) ** 2
                )
                for g in found
            )
            if total is None:
                total = list(found)
            else:
                for a, b in zip(total, found):
                    a.add_(b)
            del found, loss
        del states
    everything = (
        sum(float(torch.linalg.vector_norm(g)) ** 2 for g in total) ** 0.5 if total else 0.0
    )
    return (
        [everything] + [x**0.5 for x in squares],
        counts.int().tolist(),
        [logprobs[row] for row in range(len(rollout.texts))],
    )


def main():
    out, batches = Path(sys.argv[1]), int(sys.argv[2])
    words = sys.argv[3:]
    check = "--check" in words
    if check:
        words.remove("--check")
    settings = lopti.parse_arguments(words)
    policy, tokenizer = lopti.load_model(settings.model, settings.device)
    examples, _ = lopti.load_data(settings, tokenizer)
    torch.manual_seed(settings.seed)
    prompts = lopti.prompt_stream(examples, settings.prompts_per_step, settings.seed)
    for _ in range(batches):
        batch = next(prompts)
        started, cpu = time.time(), time.process_time()
        rollout = lopti.sample(
            policy,
            tokenizer,
            [e.prompt for e in batch],
            settings.group_size,
            settings.temperature,
            settings,
        )
        rollout.rewards = torch.tensor(
            lopti.compute_rewards(
                rollout.texts, [e for e in batch for _ in range(settings.group_size)], settings
            ),
            dtype=torch.float64,
        )
        sampled = time.process_time() - cpu
        norms, tokens, logprobs = norms_of(policy, rollout, settings)
        line = {
            "seed": settings.seed,
            "dtype": settings.dtype,
            "norms": [[n] for n in norms],
            "tokens": [sum(tokens), *tokens],
            "rewards": rollout.rewards.tolist(),
            "lengths": rollout.response_mask.sum(1).tolist(),
            "truncated": rollout.truncated.float().mean().item(),
            "texts": rollout.texts,
            "levels": [e.difficulty for e in batch],
            "solutions": [e.solution for e in batch],
            "logprobs": [[round(x, 5) for x in row] for row in logprobs],
            "seconds": time.time() - started,
            "cpu": time.process_time() - cpu,
            "cpu_sampling": sampled,
        }
        with out.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        print(
            line["norms"],
            line["tokens"],
            round(line["seconds"]),
            round(line["cpu"]),
            round(sampled),
            flush=True,
        )
        if check:
            cpu = time.process_time()
            settings.kl_coef, settings.max_grad_norm = 0.0, 1e9
            rollout.old_logprobs, rollout.entropies = lopti.response_logprobs(
                policy, rollout, settings
            )
            mine = torch.tensor(sum(logprobs, []))
            print(
                "largest difference of log π:",
                float((rollout.old_logprobs[rollout.response_mask] - mine).abs().max()),
            )
            rollout.advantages = (
                lopti.group_advantages(rollout.rewards, settings.group_size)[:, None]
                * rollout.response_mask
            ).float()
            no_step, pi = torch.optim.SGD(policy.parameters(), lr=0.0), rollout.old_logprobs.exp()
            masks = [rollout.response_mask] + [
                rollout.response_mask & (pi >= a) & (pi < b) for a, b in pairwise(diagnose.EDGES)
            ]
            for mask, mine in zip(masks, norms):
                [result] = lopti.update(policy, no_step, rollout, mask, settings)
                print(
                    "lopti.update:",
                    result["grad_norm"],
                    "here:",
                    mine,
                    "relative",
                    abs(result["grad_norm"] - mine) / mine,
                    int(mask.sum()),
                    flush=True,
                )
            print("cpu of the check:", round(time.process_time() - cpu))


main()
