"""Make the bundled model data/tiny: its tokenizer, its weights, its generation settings.

    git archive 2385ecb data/tiny | tar -x -C FOLDER         # the earlier model that it starts from
    python data/make/pretrain.py --start FOLDER/data/tiny    # writes data/tiny-new, in minutes
    python lopti.py --eval-only --show 2 --model data/tiny-new

400 steps of next-token prediction on worked solutions of random puzzles and problems, those of the
committed files left out. They are the solutions of a pupil that misreads, slips and gives up (see
puzzles.worked_solution). That leaves a model that could solve a puzzle, but more often than not
reads some kinds of claim wrongly: greedy decoding is then wrong too, and reinforcement learning
from rewards has something to teach.

The earlier model was made from nothing by data/pretrain.py as it is at commit 2385ecb, in four
stages. The other models and texts that pages of data/lab/results name (--one-wording, --filler,
--experts, --texts) were made by this script as it is at commit ee9b7ad.
"""

import argparse
import itertools
import json
import math
import random
import sys
import time
from ast import literal_eval
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(DATA.parent))
import lopti  # isort: skip, before torch  # noqa: F401

import arithmetic
import puzzles
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rewards import MATH_REQUEST, TASKS, render_prompt

PEOPLE = {2: 0.35, 3: 0.55, 4: 0.1}  # the shares of the sizes of puzzles
PUZZLE_SHARE = 0.75  # of the batches; the others are arithmetic
PUZZLE_FAULTS = {"slip": 0.02, "misread": 0.6, "give_up": 0.1}  # see puzzles.worked_solution
ARITHMETIC_FAULTS = {"error_rate": 0.15}
STREAMS, TOKENS = 2, 3000  # a step takes a batch of so many tokens from each stream
MAX_TOKENS = 640  # of an example; longer ones are left out
LEARNING_RATE, WARM_UP = 4e-4, 20
SPECIAL = ["<|pad|>", "<|end|>", "<|unknown|>", "<|user|>", "<|assistant|>"]
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]

# The template renders user and assistant turns and leaves a system message out: this model knows
# two jobs only, and tells them apart by the question.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}{% endif %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# ---- the tokenizer

# One token per word, number sign or digit, and one for a name with its supposed role. White space
# is never a token: the decoder puts it back by rule. Quotation marks that close are tokens of their
# own (`,"` `."` `".` `" -`), so that a lone `"` always opens.
TOKEN_PATTERN = (
    r"</?(?:think|answer)>|[A-Z][a-z]+-(?:knight|knave)|\\[a-z]+|\(\d\)"
    r"""|,"|\."|"\.|" -|'s|[A-Za-z]+|\d|[^\sA-Za-z\d]"""
)
SUPPOSED = rf"(?:{'|'.join(puzzles.WORDING['supposition'])}) [A-Z][a-z]+-"
SAID = rf"[A-Z][a-z]+-(?:knight|knave) (?:{'|'.join(puzzles.WORDING['saying'])}) "
# Applied in this order to the tokens joined by single spaces: (pattern, what replaces the match).
SPACING = (
    (r""" (?=[.,?:)}{]|"\.|" -|'s)""", ""),  # nothing before closing punctuation or a brace
    (r"""(?<=[({]) """, ""),
    (r"""(?<= ") """, ""),  # nor after an opening quotation mark
    (r"""(?<=\d) (?=\d)""", ""),  # digits make numbers
    (r"""(?<=\d\.) (?=\d)""", ""),
    # a worked solution takes a line for each supposition and for each claim
    (rf" (?=\(\d\)|</think>|</?answer>|{SUPPOSED})", "\n"),
    (rf" (?={SAID})", "\n"),
)


def words_to_cover():
    """Every word and sign of the puzzles, arithmetic, worked solutions and the two requests."""
    atoms = ("lying", 0), ("telling-truth", 1)
    claims = [("not", atoms[0]), *((kind, *atoms) for kind in ("and", "or", "->", "<=>"))]
    claims = [puzzles.claim_text(claim, ["Zoey", "Liam"]) for claim in claims]
    pairs = itertools.product(puzzles.ATTRIBUTIONS, claims)
    texts = [attribution.format(name="Zoey", claim=claim) for attribution, claim in pairs]
    texts += [puzzles.OPENING, puzzles.QUESTION, "You meet inhabitants:", MATH_REQUEST, *TAGS]
    texts += [f"{name} {name}-knight {name}-knave" for name in puzzles.NAMES]
    texts += ["true false", *puzzles.WORDING_WORDS, "What is The answer is", r"\frac \boxed"]
    texts += ["+ - = * /", "0 1 2 3 4 5 6 7 8 9", "(1) (2) (3) (4) (5) (6) (7) (8)"]
    return [*texts, "( ) { } . , : ? ! ; -"]


def build_tokenizer():
    tokenizer = Tokenizer(models.WordLevel(unk_token="<|unknown|>"))
    split = pre_tokenizers.Split(Regex(TOKEN_PATTERN), "isolated")
    without_spaces = pre_tokenizers.Split(Regex(r"^\s+$"), "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, without_spaces])
    split_text = tokenizer.pre_tokenizer.pre_tokenize_str
    words = {word for text in words_to_cover() for word, _ in split_text(text)}
    vocabulary = {word: i for i, word in enumerate(SPECIAL + TAGS + sorted(words - set(TAGS)))}
    tokenizer.model = models.WordLevel(vocabulary, unk_token="<|unknown|>")
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    tokenizer.add_special_tokens(special)
    replacements = [decoders.Replace(Regex(pattern), content) for pattern, content in SPACING]
    joined = [decoders.WordPiece(prefix="##", cleanup=False), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(joined + replacements)
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
    stand_in = {"saying": ":", "relation": "is"}
    for word, _ in sorted(new_tokenizer.get_vocab().items(), key=lambda item: item[1]):
        kind = kind_of.get(word)
        known = word if word in old_id else stand_in.get(kind) or puzzles.WORDING[kind][0]
        rows.append(old_id[known])
    embedding = model.get_input_embeddings().weight.detach().clone()
    noise = 0.1 * embedding.std() * torch.randn(len(rows), embedding.shape[1])
    model.resize_token_embeddings(len(rows), mean_resizing=False)
    model.get_input_embeddings().weight.data = embedding[rows] + noise
    model.tie_weights()
    return model


# ---- what it learns from


def committed_questions():
    """The questions of the committed files, which nothing is taught from."""
    found = set()
    for name in ("kk_train", "kk_test", "math_train", "math_test"):
        lines = (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        found |= {row.get("quiz", row.get("problem")) for row in map(json.loads, lines)}
    return found


def random_example(tokenizer, rng, held_out, task):
    """(prompt, response) of a random puzzle ("kk") or problem ("math") that is not committed."""
    if task == "kk":
        people = rng.choices(list(PEOPLE), list(PEOPLE.values()))[0]
        row = puzzles.generate_puzzle(rng, people)
        question, parts = row["quiz"], literal_eval(row["statements"])
    else:
        row, parts = arithmetic.generate_problem(rng, rng.randint(1, 3))
        question = row["problem"]
    if question in held_out:
        return random_example(tokenizer, rng, held_out, task)  # another one
    if task == "kk":
        response = puzzles.worked_solution(rng, row["names"], parts, **PUZZLE_FAULTS)
    else:
        response = arithmetic.worked_solution(rng, parts, **ARITHMETIC_FAULTS)
    prompt = render_prompt(tokenizer, TASKS[task].messages(question), TASKS[task].opening)
    return prompt, response + tokenizer.eos_token


def batches(tokenizer, rng, held_out, task, tokens, pool):
    """Endless (input_ids, labels) of about `tokens` tokens; like lengths share a batch."""
    while True:
        texts = zip(*(random_example(tokenizer, rng, held_out, task) for _ in range(pool)))
        ids = [tokenizer(list(part), add_special_tokens=False)["input_ids"] for part in texts]
        rows = [(p, r) for p, r in zip(*ids) if len(p) + len(r) <= MAX_TOKENS]
        groups, group = [], []
        for prompt, response in sorted(rows, key=lambda row: len(row[0]) + len(row[1])):
            if group and (len(group) + 1) * (len(prompt) + len(response)) > tokens:
                groups.append(group)
                group = []
            group.append((prompt, response))
        rng.shuffle(groups)  # the last, incomplete group is left out
        for group in groups:
            width = max(len(prompt) + len(response) for prompt, response in group)
            input_ids = torch.zeros(len(group), width, dtype=torch.long)
            labels = torch.full((len(group), width), -100)
            for i, (prompt, response) in enumerate(group):
                end = len(prompt) + len(response)
                input_ids[i, :end] = torch.tensor(prompt + response)
                labels[i, len(prompt) : end] = torch.tensor(response)
            yield input_ids, labels


def mixed_batches(tokenizer, held_out, number):
    """Stream `number`: batches of puzzles and, half as large, of arithmetic."""
    # the committed files are made with seed 0
    coin, rng = random.Random(0), random.Random(1 + 1000 * number)
    quizzes = batches(tokenizer, rng, held_out, "kk", TOKENS, pool=2048)
    problems = batches(tokenizer, rng, held_out, "math", TOKENS // 2, pool=512)
    while True:  # in a common pool the short rows of arithmetic would drown
        yield next(quizzes if coin.random() < PUZZLE_SHARE else problems)


# ---- training


def train(model, streams, steps):
    """AdamW on response tokens: rate up over the warm-up, down along a cosine to a tenth."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    started = time.time()
    for step in range(1, steps + 1):
        decay = 0.55 + 0.45 * math.cos(math.pi * max(0, step - WARM_UP) / max(1, steps - WARM_UP))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, step / WARM_UP) * decay
        optimizer.zero_grad()
        for stream in streams:
            input_ids, labels = next(stream)
            kept = labels[:, 1:] != -100
            # a third faster on processors that have bf16; weights stay float32
            with torch.autocast("cpu", torch.bfloat16):
                hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
                logits = model.lm_head(hidden[:, :-1][kept])
            loss = torch.nn.functional.cross_entropy(logits.float(), labels[:, 1:][kept])
            (loss / len(streams)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            seconds = time.time() - started
            print(f"step {step}/{steps}  loss {loss.item():.4f}  {seconds:.0f} s", flush=True)


def main():
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=look)
    text = "the folder of the earlier model"
    parser.add_argument("--start", type=Path, required=True, help=text)
    parser.add_argument("--output", type=Path, default=DATA / "tiny-new", metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer, held_out = build_tokenizer(), committed_questions()
    earlier = AutoTokenizer.from_pretrained(args.start)
    model = with_vocabulary(AutoModelForCausalLM.from_pretrained(args.start), earlier, tokenizer)
    for setting in ("eos_token_id", "pad_token_id"):
        setattr(model.generation_config, setting, getattr(tokenizer, setting))
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    streams = [mixed_batches(tokenizer, held_out, number) for number in range(STREAMS)]
    train(model, streams, args.steps)
    for part in (model, tokenizer):
        part.save_pretrained(args.output)
    print(f"saved {args.output}")


if __name__ == "__main__":
    main()
