"""Make the bundled policy data/tiny: its tokenizer, its weights, its generation settings.

    python data/make/pretrain.py                                  # from nothing: ~30 min on 2 cores
    python data/make/pretrain.py --stage careless --start FOLDER  # the last stage only, from FOLDER
    python data/make/pretrain.py --texts 4000 --output F.jsonl    # only texts, to look at
    python lopti.py --eval-only --show 2 --model FOLDER           # what came of it

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
from functools import partial
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(DATA.parent))
import lopti  # isort: skip, before torch  # noqa: F401

import arithmetic
import puzzles
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

from rewards import MATH_REQUEST, TASKS, render_prompt

SPECIAL = ["<|pad|>", "<|end|>", "<|unknown|>", "<|user|>", "<|assistant|>"]
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
MAX_TOKENS = 640  # of an example; longer ones are left out

# The template renders user and assistant turns and leaves a system message out: this policy knows
# two jobs only, and tells them apart by the question.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}{% endif %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STAGES = {  # name: highest learning rate, warm-up
    "format": (1.5e-3, 200),
    "solve": (1e-3, 50),
    "arithmetic": (1e-3, 50),
    "careless": (4e-4, 20),
}

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


def words_to_cover(filler):
    """Every word and sign of the puzzles, arithmetic, worked solutions and the two requests."""
    atoms = ("lying", 0), ("telling-truth", 1)
    claims = [("not", atoms[0]), *((kind, *atoms) for kind in ("and", "or", "->", "<=>"))]
    claims = [puzzles.claim_text(claim, ["Zoey", "Liam"]) for claim in claims]
    pairs = itertools.product(puzzles.ATTRIBUTIONS, claims)
    texts = [attribution.format(name="Zoey", claim=claim) for attribution, claim in pairs]
    texts += [puzzles.OPENING, puzzles.QUESTION, "You meet inhabitants:", MATH_REQUEST, *TAGS]
    texts += [f"{name} {name}-knight {name}-knave" for name in puzzles.NAMES]
    texts += ["true false", *puzzles.WORDING_WORDS, *(puzzles.FILLERS if filler else [])]
    texts += ["What is The answer is", r"\frac \boxed", "+ - = * /", "0 1 2 3 4 5 6 7 8 9"]
    return [*texts, "(1) (2) (3) (4) (5) (6) (7) (8)", "( ) { } . , : ? ! ; -"]


def build_tokenizer(filler=0):
    tokenizer = Tokenizer(models.WordLevel(unk_token="<|unknown|>"))
    split = pre_tokenizers.Split(Regex(TOKEN_PATTERN), "isolated")
    without_spaces = pre_tokenizers.Split(Regex(r"^\s+$"), "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, without_spaces])
    split_text = tokenizer.pre_tokenizer.pre_tokenize_str
    words = {word for text in words_to_cover(filler) for word, _ in split_text(text)}
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
    kind_of |= dict.fromkeys(puzzles.FILLERS, "conclusion")
    stand_in = {"saying": ":", "relation": "is"}
    for word, _ in sorted(new_tokenizer.get_vocab().items(), key=lambda item: item[1]):
        kind = kind_of.get(word)
        known = word if word in old_id else stand_in.get(kind) or puzzles.WORDING[kind][0]
        rows.append(old_id[known])
    weights, embedding = model.state_dict(), model.get_input_embeddings().weight.detach()
    noise = 0.1 * embedding.std() * torch.randn(len(rows), embedding.shape[1])
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"] = embedding[rows] + noise
    config = LlamaConfig.from_dict(model.config.to_dict() | {"vocab_size": len(rows)})
    larger = LlamaForCausalLM(config)
    larger.load_state_dict(weights)
    return larger


def new_model(tokenizer, experts=0):
    """A Llama, or with `experts` a Mixtral: each token goes to two of them, half as wide each."""
    kind, more = LlamaForCausalLM, {"intermediate_size": 384}
    if experts:
        kind, more = MixtralForCausalLM, {"intermediate_size": 192, "num_local_experts": experts}
    config = kind.config_class(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        # a small base: what matters is close by
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **more,
    )
    return kind(config)


# ---- what it learns from


def random_example(tokenizer, rng, held_out, people_weights, faults):
    """(prompt, response) of a random uncommitted puzzle, or problem if `people_weights` is None."""
    while True:
        if people_weights is None:
            row, parts = arithmetic.generate_problem(rng, rng.randint(1, 3))
            task, question = TASKS["math"], row["problem"]
        else:
            people = rng.choices(list(people_weights), list(people_weights.values()))[0]
            row = puzzles.generate_puzzle(rng, people)
            task, question = TASKS["kk"], row["quiz"]
        if question not in held_out:
            break
    if people_weights is None:
        response = arithmetic.worked_solution(rng, parts, **faults)
    else:
        claims = literal_eval(row["statements"])
        response = puzzles.worked_solution(rng, row["names"], claims, **faults)
    prompt = render_prompt(tokenizer, task.messages(question), task.opening)
    return prompt, response + tokenizer.eos_token


def batches(tokenizer, rng, held_out, people_weights, faults, tokens, pool):
    """Endless (input_ids, labels) of about `tokens` tokens; like lengths share a batch."""
    settings = tokenizer, rng, held_out, people_weights, faults
    while True:
        texts = zip(*(random_example(*settings) for _ in range(pool)))
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


def mixed(coin, puzzle_share, quizzes, problems):
    """Batches of puzzles with probability `puzzle_share`, else of arithmetic."""
    while True:  # in a common pool the short rows of arithmetic would drown
        yield next(quizzes if coin.random() < puzzle_share else problems)


PEOPLE = {2: 0.35, 3: 0.55, 4: 0.1}  # the shares of the sizes of puzzles


def committed_questions():
    """The questions of the committed files, which nothing is taught from."""
    found = set()
    for name, column in (("kk", "quiz"), ("math", "problem")):
        for file in (DATA / f"{name}_train.jsonl", DATA / f"{name}_test.jsonl"):
            lines = file.read_text(encoding="utf-8").splitlines()
            found |= {json.loads(line)[column] for line in lines}
    return found


def faults_of(args):
    """Those of the careless stage."""
    return {"slip": args.slip, "misread": args.misread, "give_up": args.give_up}


def write_texts(args):
    """Puzzles as the careless stage teaches them, rows for data/lab/diagnose.py --supervised."""
    settings = build_tokenizer(args.filler), random.Random(args.seed + 1), committed_questions()
    faults = faults_of(args) | {"varied": not args.one_wording, "filler": args.filler}
    with args.output.open("w", encoding="utf-8") as file:
        for _ in range(args.texts):
            prompt, response = random_example(*settings, PEOPLE, faults)
            answer = response.split("<answer>\n")[1].split("\n</answer>")[0]
            row = {"prompt": prompt, "solution": answer, "response": response}
            file.write(json.dumps(row) + "\n")


def lessons(stage, args, tokenizer, rng, coin, held_out):
    """The batches of a stage; in arithmetic they have half as many tokens."""
    tokens, puzzle_faults = args.tokens // args.processes, {}
    if stage == "careless":
        puzzle_faults = faults_of(args)
    puzzle_faults |= {"varied": not args.one_wording, "filler": args.filler}
    math_faults = {"error_rate": args.math_error_rate} if stage == "careless" else {}
    of_kind = partial(batches, tokenizer, rng, held_out)
    quizzes = partial(of_kind, faults=puzzle_faults, tokens=tokens, pool=2048)
    if stage == "format":
        first = itertools.islice(quizzes({2: 1.0}), args.format_steps // 2)
        return itertools.chain(first, quizzes({2: 0.5, 3: 0.5}))
    puzzle_share = {"solve": 0.7, "arithmetic": 0.25, "careless": 0.75}[stage]
    problems = of_kind(None, faults=math_faults, tokens=tokens // 2, pool=512)
    return mixed(coin, puzzle_share, quizzes(PEOPLE), problems)


# ---- training


def average_gradients(model):
    """One gradient from those of all processes."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.nn.utils.parameters_to_vector(gradients)
    torch.distributed.all_reduce(flat)
    torch.nn.utils.vector_to_parameters(flat / torch.distributed.get_world_size(), gradients)


def train(model, stream, steps, stage, folder):
    """AdamW on response tokens: rate up over the warm-up, down along a cosine to a tenth."""
    (highest, warmup), started, tokens = STAGES[stage], time.time(), 0
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=highest, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    first = torch.distributed.get_rank() == 0
    for step in range(1, steps + 1):
        decay = 0.55 + 0.45 * math.cos(math.pi * max(0, step - warmup) / max(1, steps - warmup))
        optimizer.param_groups[0]["lr"] = highest * min(1.0, step / warmup) * decay
        input_ids, labels = next(stream)
        kept = labels[:, 1:] != -100
        # a third faster on processors that have bf16; weights stay float32
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
            logits = model.lm_head(hidden[kept])
        loss = torch.nn.functional.cross_entropy(logits.float(), labels[:, 1:][kept])
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tokens += input_ids.numel() * torch.distributed.get_world_size()
        if first and step % 50 == 0:
            seconds = time.time() - started
            line = f"{stage} step {step}/{steps}  loss {loss.item():.4f}  {seconds:.0f} s"
            print(f"{line}  {tokens / seconds:.0f} tokens/s", flush=True)
        if first and (step % 300 == 0 or step == steps):
            model.save_pretrained(folder)


def work(rank, args, meeting_point):
    """What each process does: the same steps on other puzzles, with gradients averaged over all."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=meeting_point, rank=rank, world_size=args.processes
    )
    torch.manual_seed(args.seed)
    coin = random.Random(args.seed)
    rng = random.Random(args.seed + 1 + 1000 * rank)  # the committed files are made with seed 0
    tokenizer, held_out = build_tokenizer(args.filler), committed_questions()
    if args.start:
        model = AutoModelForCausalLM.from_pretrained(args.start)
    else:
        model = new_model(tokenizer, args.experts)
    if model.config.vocab_size != len(tokenizer):
        model = with_vocabulary(model, AutoTokenizer.from_pretrained(args.start), tokenizer)
    for setting in ("eos_token_id", "pad_token_id"):
        setattr(model.generation_config, setting, getattr(tokenizer, setting))
    if rank == 0:
        print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    for stage in list(STAGES)[list(STAGES).index(args.stage) :]:
        # what a stage leaves is kept beside the output, to try the next one again from there
        beside = args.output.with_name(f"{args.output.name}-{stage}")
        folder = args.output if stage == "careless" else beside
        if rank == 0:
            tokenizer.save_pretrained(folder)
        stream = lessons(stage, args, tokenizer, rng, coin, held_out)
        train(model, stream, getattr(args, f"{stage}_steps"), stage, folder)
    if rank == 0:
        print(f"saved {args.output}")
    torch.distributed.destroy_process_group()


def main():
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=look)
    add = parser.add_argument
    add("--output", type=Path, default=DATA / "tiny")
    add("--stage", choices=STAGES, default="format", help="the stage to begin with")
    add("--start", type=Path, help="the model folder to begin a later stage from")
    add("--format-steps", type=int, default=800)
    add("--solve-steps", type=int, default=1500)
    add("--arithmetic-steps", type=int, default=2000)
    add("--careless-steps", type=int, default=400)
    add("--slip", type=float, default=0.02, help="faults of the careless stage:")
    add("--misread", type=float, default=0.6, help="see puzzles.worked_solution")
    add("--give-up", type=float, default=0.1)
    add("--math-error-rate", type=float, default=0.15, help="probability of a slip in arithmetic")
    add("--one-wording", action="store_true", help="never vary the wording")
    add("--filler", type=int, default=0, help="empty words before each line")
    add("--texts", type=int, default=0, help="write so many puzzles as taught, and stop")
    add("--experts", type=int, default=0, help="a mixture of so many experts instead of a Llama")
    add("--tokens", type=int, default=6000, help="tokens in a step, of all processes together")
    text = "of one thread each: faster than one process with as many threads"
    add("--processes", type=int, default=os.cpu_count(), help=text)
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.texts:
        write_texts(args)
        return
    if (args.stage == "format") == bool(args.start):
        parser.error("--stage and --start FOLDER go together: a later stage, and where it begins")
    with tempfile.TemporaryDirectory() as meeting_point:
        settings = args, f"file://{meeting_point}/processes"
        torch.multiprocessing.spawn(work, settings, args.processes)


if __name__ == "__main__":
    main()
