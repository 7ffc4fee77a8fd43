"""Make the bundled policy data/tiny: its tokenizer, its weights, its generation settings.

    python data/make/pretrain.py                                  # from nothing: ~30 min on 2 cores
    python data/make/pretrain.py --stage careless --start FOLDER  # the last stage only, from FOLDER
    python data/make/properties.py                                # what came of it

Next-token prediction on worked solutions of random puzzles and problems, those of the committed
files left out, in four stages. `format`: puzzles of 2 and 3 people, which teach how a solution is
written. `solve`: more of them, and arithmetic. `arithmetic`: three batches in four are arithmetic.
`careless`: a few hundred steps on the worked solutions of a pupil that misreads, slips and gives up
(see puzzles.worked_solution). That leaves a policy that could solve a puzzle, but more often than
not reads some kinds of claim wrongly: greedy decoding is then wrong too, and reinforcement learning
from rewards has something to teach. data/tiny/README.md says how the committed weights were made.
"""

import argparse
import itertools
import json
import math
import os
import random
import sys
import tempfile
import time
from ast import literal_eval
from pathlib import Path

import arithmetic
import puzzles
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

DATA = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(DATA.parent))
from rewards import MATH_REQUEST, TASKS, render_prompt

SPECIAL = ["<|pad|>", "<|end|>", "<|unknown|>", "<|user|>", "<|assistant|>"]
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]

# The template renders user and assistant turns and leaves a system message out: this policy knows
# two jobs only, and tells them apart by the question.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}{% endif %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# ---------------------------------------------------------------------------------------- tokenizer

# One token per word, number sign or digit, and one for a name with its supposed role. White space
# is never a token: the decoder puts it back by rule. Quotation marks that close are tokens of their
# own (`,"` `."` `".` `" -`), so that a lone `"` always opens.
TOKEN_PATTERN = (
    r"</?(?:think|answer)>|[A-Z][a-z]+-(?:knight|knave)|\\[a-z]+|\(\d\)"
    r"""|,"|\."|"\.|" -|'s|[A-Za-z]+|\d|[^\sA-Za-z\d]"""
)
# Applied in this order to the tokens joined by single spaces: (pattern, what replaces the match).
SPACING = (
    # nothing before closing punctuation or an opening brace
    (r""" (?=[.,?:)}{]|"\.|" -|'s)""", ""),
    (r"""(?<=[({]) """, ""),
    (r"""(?<= ") """, ""),  # nor after an opening quotation mark
    (r"""(?<=\d) (?=\d)""", ""),  # digits make numbers
    (r"""(?<=\d\.) (?=\d)""", ""),
    # a worked solution takes a line for each supposition and for each claim
    (
        (
            r" (?=\(\d\)|</think>|</?answer>|"
            rf"""(?:{"|".join(puzzles.WORDING["supposition"])}) [A-Z][a-z]+-)"""
        ),
        "\n",
    ),
    (rf""" (?=[A-Z][a-z]+-(?:knight|knave) (?:{"|".join(puzzles.WORDING["saying"])}) )""", "\n"),
)


def words_to_cover(filler):
    """Every word and sign of the puzzles, arithmetic, worked solutions and the two requests."""
    claims = [
        ("and", ("lying", 0), ("telling-truth", 1)),
        ("or", ("lying", 0), ("lying", 1)),
        ("not", ("lying", 0)),
        ("->", ("lying", 0), ("lying", 1)),
        ("<=>", ("lying", 0), ("lying", 1)),
    ]
    texts = [
        puzzles.OPENING,
        puzzles.QUESTION,
        "You meet inhabitants:",
        *puzzles.NAMES,
        *TAGS,
        MATH_REQUEST,
    ]
    texts += [attribution.format(name="Zoey", claim=puzzles.claim_text(claim, ["Zoey", "Liam"]))
              for attribution in puzzles.ATTRIBUTIONS for claim in claims]  # fmt: skip
    texts += [f"{name}-knight {name}-knave" for name in puzzles.NAMES]
    texts += [
        "true false",
        *puzzles.WORDING_WORDS,
        *(puzzles.FILLERS if filler else []),
        "What is The answer is",
        r"\frac \boxed",
        "+ - = * /",
    ]
    texts += ["0 1 2 3 4 5 6 7 8 9", "(1) (2) (3) (4) (5) (6) (7) (8)", "( ) { } . , : ? ! ; -"]
    return texts


def build_tokenizer(filler=0):
    tokenizer = Tokenizer(models.WordLevel(unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(TOKEN_PATTERN), "isolated"),
            pre_tokenizers.Split(Regex(r"^\s+$"), "removed"),
        ]
    )
    words = {
        word
        for text in words_to_cover(filler)
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)
    }
    vocabulary = {word: i for i, word in enumerate(SPECIAL + TAGS + sorted(words - set(TAGS)))}
    tokenizer.model = models.WordLevel(vocabulary, unk_token="<|unknown|>")
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.WordPiece(prefix="##", cleanup=False), decoders.Fuse()]
        + [decoders.Replace(Regex(pattern), content) for pattern, content in SPACING]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unknown|>",
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def with_vocabulary(model, tokenizer, new_tokenizer):
    """The model for new words: each begins as the first of its kind, or as the sign it replaces."""
    old_id, rows = tokenizer.get_vocab(), []
    kind_of = {word: kind for kind, words in puzzles.WORDING.items() for word in words}
    kind_of |= dict.fromkeys(puzzles.FILLERS, "conclusion")
    stand_in = {"saying": ":", "relation": "is"}
    for word, _ in sorted(new_tokenizer.get_vocab().items(), key=lambda item: item[1]):
        kind = kind_of.get(word)
        known = word if word in old_id else stand_in.get(kind) or puzzles.WORDING[kind][0]
        rows.append(old_id[known])
    weights = model.state_dict()
    embedding = model.get_input_embeddings().weight.detach()
    weights["model.embed_tokens.weight"] = embedding[rows] + 0.1 * embedding.std() * (
        torch.randn(len(rows), embedding.shape[1])
    )
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    config = LlamaConfig.from_dict(model.config.to_dict() | {"vocab_size": len(rows)})
    larger = LlamaForCausalLM(config)
    larger.load_state_dict(weights)
    return larger


# ----------------------------------------------------------------------------------------- examples


def random_example(tokenizer, rng, people_weights, faults, held_out):
    """(prompt, response) of a random uncommitted puzzle, or problem if `people_weights` is None."""
    while True:
        if people_weights is None:
            problem, parts = arithmetic.generate_problem(rng, rng.randint(1, 3))
            task, question = TASKS["math"], problem["problem"]
        else:
            puzzle = puzzles.generate_puzzle(
                rng, rng.choices(list(people_weights), list(people_weights.values()))[0]
            )
            task, question = TASKS["kk"], puzzle["quiz"]
        if question in held_out:
            continue
        if people_weights is None:
            response = arithmetic.worked_solution(rng, parts, **faults)
        else:
            response = puzzles.worked_solution(
                rng, puzzle["names"], literal_eval(puzzle["statements"]), **faults
            )
        return render_prompt(
            tokenizer, task.messages(question), task.opening
        ), response + tokenizer.eos_token


def batches(tokenizer, rng, tokens_per_batch, max_tokens=640, pool=2048, **settings):
    """Endless (input_ids, labels) of about tokens_per_batch tokens; like lengths share a batch."""
    while True:
        examples = [random_example(tokenizer, rng, **settings) for _ in range(pool)]
        prompts = tokenizer([prompt for prompt, _ in examples], add_special_tokens=False)[
            "input_ids"
        ]
        responses = tokenizer([response for _, response in examples], add_special_tokens=False)[
            "input_ids"
        ]
        rows = sorted(
            ((p, r) for p, r in zip(prompts, responses) if len(p) + len(r) <= max_tokens),
            key=lambda row: len(row[0]) + len(row[1]),
        )
        groups, group = [], []
        for row in rows:
            if group and (len(group) + 1) * (len(row[0]) + len(row[1])) > tokens_per_batch:
                groups.append(group)
                group = []
            group.append(row)
        rng.shuffle(groups)  # the last, incomplete group is left out
        for group in groups:
            width = max(len(p) + len(r) for p, r in group)
            input_ids = torch.zeros(len(group), width, dtype=torch.long)
            labels = torch.full((len(group), width), -100)
            for i, (p, r) in enumerate(group):
                input_ids[i, : len(p) + len(r)] = torch.tensor(p + r)
                labels[i, len(p) : len(p) + len(r)] = torch.tensor(r)
            yield input_ids, labels


# ----------------------------------------------------------------------------------------- training


def average_gradients(model):
    """One gradient from those of all processes."""
    flat = torch.nn.utils.parameters_to_vector([parameter.grad for parameter in model.parameters()])
    torch.distributed.all_reduce(flat)
    torch.nn.utils.vector_to_parameters(
        flat / torch.distributed.get_world_size(),
        [parameter.grad for parameter in model.parameters()],
    )


def train(
    model, stream, steps, learning_rate, warmup, name, log_every=50, save_every=300, folder=None
):
    """AdamW on response tokens: rate up over `warmup` steps, down along a cosine to a tenth."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    first = torch.distributed.get_rank() == 0
    started, tokens = time.time(), 0
    for step in range(1, steps + 1):
        decay = 0.55 + 0.45 * math.cos(math.pi * max(0, step - warmup) / max(1, steps - warmup))
        optimizer.param_groups[0]["lr"] = learning_rate * min(1.0, step / warmup) * decay
        input_ids, labels = next(stream)
        kept = labels[:, 1:] != -100
        with torch.autocast(
            "cpu", torch.bfloat16
        ):  # a third faster on processors that have bf16; weights stay float32
            hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
            logits = model.lm_head(hidden[kept])
        loss = torch.nn.functional.cross_entropy(logits.float(), labels[:, 1:][kept])
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tokens += input_ids.numel() * torch.distributed.get_world_size()
        if first and step % log_every == 0:
            seconds = time.time() - started
            print(
                f"{name} step {step}/{steps}  loss {loss.item():.4f}  "
                f"{seconds:.0f} s  {tokens / seconds:.0f} tokens/s",
                flush=True,
            )
        if first and folder is not None and (step % save_every == 0 or step == steps):
            model.save_pretrained(folder)


def mixed(coin, puzzle_share, quizzes, problems):
    """Batches of puzzles with probability `puzzle_share`, else of arithmetic."""
    while True:  # in a common pool the short rows of arithmetic would drown
        yield next(quizzes if coin.random() < puzzle_share else problems)


def lessons(stage, steps, tokenizer, rng, coin, tokens, held_out, puzzle_faults, math_faults):
    """The batches of a stage, of about `tokens` tokens (half as many in arithmetic)."""

    def quizzes(people_weights, faults):
        return batches(
            tokenizer,
            rng,
            tokens,
            people_weights=people_weights,
            faults=faults,
            held_out=held_out,
        )

    def problems(faults):
        return batches(
            tokenizer,
            rng,
            tokens // 2,
            people_weights=None,
            faults=faults,
            held_out=held_out,
            pool=512,
        )

    if stage != "careless":
        unfaulty = ("varied", "filler")
        puzzle_faults, math_faults = {name: puzzle_faults[name] for name in unfaulty}, {}
    if stage == "format":
        return itertools.chain(
            itertools.islice(quizzes({2: 1.0}, puzzle_faults), steps // 2),
            quizzes({2: 0.5, 3: 0.5}, puzzle_faults),
        )
    puzzle_share = {"solve": 0.7, "arithmetic": 0.25, "careless": 0.75}[stage]
    return mixed(
        coin,
        puzzle_share,
        quizzes({2: 0.35, 3: 0.55, 4: 0.1}, puzzle_faults),
        problems(math_faults),
    )


STAGES = {
    "format": (1.5e-3, 200),
    "solve": (1e-3, 50),
    "arithmetic": (1e-3, 50),
    "careless": (4e-4, 20),
}  # name -> highest learning rate, warm-up


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=DATA / "tiny")
    parser.add_argument("--stage", choices=STAGES, default="format", help="the stage to begin with")
    parser.add_argument("--start", type=Path, help="the model folder to begin a later stage from")
    parser.add_argument("--format-steps", type=int, default=800)
    parser.add_argument("--solve-steps", type=int, default=1500)
    parser.add_argument("--arithmetic-steps", type=int, default=2000)
    parser.add_argument("--careless-steps", type=int, default=400)
    parser.add_argument("--slip", type=float, default=0.02, help="faults of the careless stage:")
    parser.add_argument("--misread", type=float, default=0.6, help="see puzzles.worked_solution")
    parser.add_argument("--give-up", type=float, default=0.1)
    parser.add_argument("--plain", action="store_true", help="never vary the wording")
    parser.add_argument("--filler", type=int, default=0, help="empty words before each line")
    parser.add_argument(
        "--math-error-rate",
        type=float,
        default=0.15,
        help="probability of a slip in arithmetic",
    )
    parser.add_argument(
        "--tokens", type=int, default=6000, help="tokens in a step, of all processes together"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=os.cpu_count(),
        help="of one thread each: faster than one process with as many threads",
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.stage != "format" and not args.start:
        parser.error(f"--stage {args.stage} needs --start FOLDER")
    with tempfile.TemporaryDirectory() as meeting_point:
        torch.multiprocessing.spawn(
            work, (args, f"file://{meeting_point}/processes"), args.processes
        )


def work(rank, args, meeting_point):
    """What each process does: the same steps on other puzzles, with gradients averaged over all."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=meeting_point, rank=rank, world_size=args.processes
    )
    torch.manual_seed(args.seed)
    rng, coin = (
        random.Random(args.seed + 1 + 1000 * rank),
        random.Random(args.seed),
    )  # the committed files are made with seed 0
    tokenizer = build_tokenizer(args.filler)
    held_out = set()
    for name, column in (
        ("kk_train", "quiz"),
        ("kk_test", "quiz"),
        ("math_train", "problem"),
        ("math_test", "problem"),
    ):
        held_out |= {
            json.loads(line)[column]
            for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        }
    if args.stage == "format":
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=8,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1000.0,
            },  # a small base: what matters is close by
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model = LlamaForCausalLM(config)
    else:
        model = LlamaForCausalLM.from_pretrained(args.start)
        if model.config.vocab_size != len(tokenizer):
            model = with_vocabulary(model, AutoTokenizer.from_pretrained(args.start), tokenizer)
    if rank == 0:
        print(
            f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens",
            flush=True,
        )
    for stage in list(STAGES)[list(STAGES).index(args.stage) :]:
        steps = getattr(args, f"{stage}_steps")
        stream = lessons(
            stage,
            steps,
            tokenizer,
            rng,
            coin,
            args.tokens // args.processes,
            held_out,
            {
                "slip": args.slip,
                "misread": args.misread,
                "give_up": args.give_up,
                "varied": not args.plain,
                "filler": args.filler,
            },
            {"error_rate": args.math_error_rate},
        )
        # what a stage leaves is kept beside the output, to try the next one again from there
        folder = (
            args.output
            if stage == "careless"
            else args.output.with_name(f"{args.output.name}-{stage}")
        )
        if rank == 0:
            tokenizer.save_pretrained(folder)
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = (
            tokenizer.eos_token_id,
            tokenizer.pad_token_id,
        )
        train(model, stream, steps, *STAGES[stage], stage, folder=folder)
    if rank == 0:
        print(f"saved {args.output}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
