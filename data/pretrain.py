"""Make the bundled policy data/tiny from nothing: its tokenizer, its weights, its generation settings.

    python data/pretrain.py                                       # writes data/tiny again: an hour on 2 CPU cores
    python data/pretrain.py --stage careless --start FOLDER       # the last stage alone, from the model in FOLDER

Stage `solve`: next-token prediction on worked solutions of random puzzles (and some arithmetic), the puzzles and
problems of the committed files left out. Stage `arithmetic`: two batches in three are arithmetic. Stage `practice`: mostly puzzles of 2 and 3 people again.
Stage `careless`: a
few hundred steps on worked solutions in which every verdict is flipped with a small probability. That leaves a
policy that knows how to solve a puzzle (greedy decoding is often right) but slips when it samples, which is what
reinforcement learning from rewards can improve.
"""

import argparse
import json
import math
import random
import sys
import time
from ast import literal_eval
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, LlamaConfig, LlamaForCausalLM

import arithmetic
import puzzles

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from lopti import MATH_REQUEST  # noqa: E402  the prompts of training must be those of pretraining

SPECIAL = ["<|pad|>", "<|end|>", "<|unknown|>", "<|user|>", "<|assistant|>"]
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]

# The template renders user and assistant turns and leaves a system message out: this policy knows two jobs only,
# and tells them apart by the question.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}{% endif %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# ---------------------------------------------------------------------------------------------- tokenizer

# One token per word, number sign or digit. White space is never a token: the decoder puts it back by rule.
# Quotation marks that close are tokens of their own (`,"` `."` `".` `" -`), so that a lone `"` always opens.
TOKEN_PATTERN = r"""</?(?:think|answer)>|\\[a-z]+|\(\d\)|,"|\."|"\.|" -|'s|[A-Za-z]+|\d|[^\sA-Za-z\d]"""
SPACING = (  # applied in this order to the tokens joined by single spaces: (pattern, what replaces the match)
    (r""" (?=[.,?:)}{]|"\.|" -|'s)""", ""),  # nothing before closing punctuation or an opening brace
    (r"""(?<=[({]) """, ""),
    (r"""(?<= ") """, ""),  # nor after an opening quotation mark
    (r"""(?<=\d) (?=\d)""", ""),  # digits make numbers
    (r"""(?<=\d\.) (?=\d)""", ""),
    (r""" (?=\(\d\)|</think>|</?answer>|Suppose )""", "\n"),
    (r""" (?=[A-Z][a-z]+: [A-Z])""", "\n"),  # a worked solution takes a line for each claim
)


def words_to_cover():
    """Every word and sign of the puzzles, the arithmetic, the worked solutions and the two requests."""
    claims = [("and", ("lying", 0), ("telling-truth", 1)), ("or", ("lying", 0), ("lying", 1)), ("not", ("lying", 0)),
              ("->", ("lying", 0), ("lying", 1)), ("<=>", ("lying", 0), ("lying", 1))]  # fmt: skip
    texts = [puzzles.OPENING, puzzles.QUESTION, "You meet inhabitants:", *puzzles.NAMES, *TAGS, MATH_REQUEST]
    texts += [attribution.format(name="Zoey", claim=puzzles.claim_text(claim, ["Zoey", "Liam"]))
              for attribution in puzzles.ATTRIBUTIONS for claim in claims]  # fmt: skip
    texts += ["Suppose true false iff so ok contradiction", "What is The answer is", r"\frac \boxed", "+ - = * /"]
    texts += ["0 1 2 3 4 5 6 7 8 9", "(1) (2) (3) (4) (5) (6) (7) (8)", "( ) { } . , : ? ! ; -"]
    return texts


def build_tokenizer():
    tokenizer = Tokenizer(models.WordLevel(unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(TOKEN_PATTERN), "isolated"), pre_tokenizers.Split(Regex(r"^\s+$"), "removed")]
    )
    words = {word for text in words_to_cover() for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)}
    vocabulary = {word: i for i, word in enumerate(SPECIAL + TAGS + sorted(words - set(TAGS)))}
    tokenizer.model = models.WordLevel(vocabulary, unk_token="<|unknown|>")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
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


# ---------------------------------------------------------------------------------------------- examples


def random_example(rng, people_weights, error_rate, math_share, math_error_rate, held_out):
    """(prompt text, response text) of one random puzzle or problem that is in none of the committed files."""
    while True:
        if rng.random() < math_share:
            problem, parts = arithmetic.generate_problem(rng, rng.randint(1, 3))
            if problem["problem"] in held_out:
                continue
            prompt = f"<|user|>{problem['problem']}\n\n{MATH_REQUEST}<|assistant|>"
            return prompt, arithmetic.worked_solution(rng, parts, math_error_rate) + "<|end|>"
        people = rng.choices(list(people_weights), list(people_weights.values()))[0]
        puzzle = puzzles.generate_puzzle(rng, people)
        if puzzle["quiz"] in held_out:
            continue
        claims = literal_eval(puzzle["statements"])
        solution = puzzles.worked_solution(rng, puzzle["names"], claims, error_rate)
        return f"<|user|>{puzzle['quiz']}<|assistant|><think>", solution + "<|end|>"


def batches(tokenizer, rng, tokens_per_batch, max_tokens=640, pool=2048, **settings):
    """Endless (input_ids, labels) of about tokens_per_batch tokens; examples of like length share a batch."""
    while True:
        examples = [random_example(rng, **settings) for _ in range(pool)]
        prompts = tokenizer([prompt for prompt, _ in examples], add_special_tokens=False)["input_ids"]
        responses = tokenizer([response for _, response in examples], add_special_tokens=False)["input_ids"]
        rows = sorted(((p, r) for p, r in zip(prompts, responses) if len(p) + len(r) <= max_tokens), key=lambda row: len(row[0]) + len(row[1]))
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


# ---------------------------------------------------------------------------------------------- training


def train(model, stream, steps, learning_rate, warmup, name, log_every=50, save_every=300, folder=None):
    """AdamW on the response tokens, learning rate up over `warmup` steps and down along a cosine to a tenth."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    started, tokens = time.time(), 0
    for step in range(1, steps + 1):
        decay = 0.55 + 0.45 * math.cos(math.pi * max(0, step - warmup) / max(1, steps - warmup))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, step / warmup) * decay
        input_ids, labels = next(stream)
        kept = labels[:, 1:] != -100
        with torch.autocast("cpu", torch.bfloat16):  # a third faster on processors that have bf16; weights stay float32
            hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
            logits = model.lm_head(hidden[kept])
        loss = torch.nn.functional.cross_entropy(logits.float(), labels[:, 1:][kept])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tokens += input_ids.numel()
        if step % log_every == 0:
            seconds = time.time() - started
            print(f"{name} step {step}/{steps}  loss {loss.item():.4f}  {seconds:.0f} s  {tokens / seconds:.0f} tokens/s", flush=True)
        if folder is not None and (step % save_every == 0 or step == steps):
            model.save_pretrained(folder)


STAGES = ("solve", "arithmetic", "practice", "careless")


def solve_stream(rng, tokenizer, steps, **common):
    """Short puzzles in small batches first, for they teach the format soonest; then everything."""
    settings = {"error_rate": 0.0, "math_error_rate": 0.0, "math_share": 0.15, **common}
    lessons = [
        (0.22, batches(tokenizer, rng, 6000, people_weights={2: 1.0}, **settings)),
        (0.5, batches(tokenizer, rng, 6000, people_weights={2: 0.5, 3: 0.5}, **settings)),
        (1.0, batches(tokenizer, rng, 12000, people_weights={2: 0.2, 3: 0.35, 4: 0.25, 5: 0.2}, **settings)),
    ]
    return (next(next(lesson for until, lesson in lessons if step < until * steps)) for step in range(steps))


def mixed_stream(rng, tokenizer, puzzle_share, people_weights, error_rate, math_error_rate, held_out):
    """Batches of puzzles with probability `puzzle_share`, else of arithmetic: its short rows would drown in a common pool."""
    settings = {"people_weights": people_weights, "error_rate": error_rate, "math_error_rate": math_error_rate, "held_out": held_out}
    quizzes = batches(tokenizer, rng, 8000, math_share=0.0, **settings)
    problems = batches(tokenizer, rng, 3000, math_share=1.0, pool=512, **settings)
    while True:
        yield next(quizzes if rng.random() < puzzle_share else problems)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE / "tiny")
    parser.add_argument("--stage", choices=STAGES, default="solve", help="the stage to begin with")
    parser.add_argument("--start", type=Path, help="the model folder to begin a later stage from")
    parser.add_argument("--solve-steps", type=int, default=3600)
    parser.add_argument("--arithmetic-steps", type=int, default=1600)
    parser.add_argument("--practice-steps", type=int, default=1200)
    parser.add_argument("--careless-steps", type=int, default=400)
    parser.add_argument("--error-rate", type=float, default=0.06, help="careless: probability that a verdict is flipped")
    parser.add_argument("--math-error-rate", type=float, default=0.15, help="careless: probability of a slip in arithmetic")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rope-theta", type=float, default=10000.0, help="base of the rotary positions; smaller looks closer by")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = random.Random(args.seed + 1)  # the committed files are made with seed 0
    tokenizer = build_tokenizer()
    held_out = set()
    for name, column in (("kk_train", "quiz"), ("kk_test", "quiz"), ("math_train", "problem"), ("math_test", "problem")):
        held_out |= {json.loads(line)[column] for line in open(HERE / f"{name}.jsonl", encoding="utf-8")}
    if args.stage == "solve":
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=args.hidden_size,
            intermediate_size=3 * args.hidden_size,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            num_key_value_heads=args.heads,
            rope_parameters={"rope_type": "default", "rope_theta": args.rope_theta},
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model = LlamaForCausalLM(config)
    elif args.start:
        model = LlamaForCausalLM.from_pretrained(args.start)
    else:
        parser.error(f"--stage {args.stage} needs --start FOLDER")
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)

    def scratch(stage):
        folder = args.output.with_name(f"{args.output.name}-{stage}")
        tokenizer.save_pretrained(folder)
        return folder

    ahead = STAGES[STAGES.index(args.stage) :]
    if "solve" in ahead:
        stream = solve_stream(rng, tokenizer, args.solve_steps, held_out=held_out)
        train(model, stream, args.solve_steps, 1.5e-3, 200, "solve", folder=scratch("solver"))
    if "arithmetic" in ahead:
        stream = mixed_stream(rng, tokenizer, 1 / 3, {2: 0.25, 3: 0.4, 4: 0.2, 5: 0.15}, 0.0, 0.0, held_out)
        train(model, stream, args.arithmetic_steps, 1e-3, 50, "arithmetic", folder=scratch("arithmetic"))
    if "practice" in ahead:
        stream = mixed_stream(rng, tokenizer, 5 / 6, {2: 0.3, 3: 0.5, 4: 0.1, 5: 0.1}, 0.0, 0.0, held_out)
        train(model, stream, args.practice_steps, 1e-3, 50, "practice", folder=scratch("practice"))
    stream = mixed_stream(rng, tokenizer, 2 / 3, {2: 0.4, 3: 0.5, 4: 0.05, 5: 0.05}, args.error_rate, args.math_error_rate, held_out)
    train(model, stream, args.careless_steps, 4e-4, 20, "careless")
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    print(f"saved {args.output}")


if __name__ == "__main__":
    main()
