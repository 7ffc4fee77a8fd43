"""Checks what the scripts of this folder have made: golden.json, the rows, the bundled model.

A folder `shared` beside the project, no part of it, may have numbers and data of others: where it
is there, these are checked too.
"""

import doctest
import itertools
import json
import random
import re
import sys
from ast import literal_eval
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
import test_lopti  # isort: skip, because it says that no test asks the hub
import golden
import pretrain
import puzzles
import pytest
import small_talk
import smollm2
from transformers import AutoModelForCausalLM

import rewards
from test_lopti import GOLDEN, TINY, TOKENIZER, arguments, read_jsonl


def shared(*names):
    """Those of the files of others that are there."""
    return [path for name in names if (path := ROOT.parent / "shared" / name).exists()]


def leaves(page, place=""):
    """(place, value) of everything in nested dictionaries and lists."""
    if not isinstance(page, dict | list):
        return [(place, page)]
    parts = page.items() if isinstance(page, dict) else enumerate(page)
    return [leaf for key, part in parts for leaf in leaves(part, f"{place}/{key}")]


def test_golden_file_is_what_its_script_writes(monkeypatch):
    """But for the last digits of another C library; and the cases do reach every clip."""
    written = []
    write = lambda path, text, encoding: written.append(text)
    monkeypatch.setattr(golden.Path, "write_text", write)
    golden.main()
    new, old = dict(leaves(json.loads(written[0]))), dict(leaves(GOLDEN))
    assert new.keys() == old.keys()
    for place, value in old.items():
        is_number = isinstance(value, float)
        assert new[place] == (pytest.approx(value, rel=1e-12, abs=1e-14) if is_number else value)
    for name in golden.CLIPS:
        assert any(case["joint"][f"clip_{name}_share"] > 0 for case in GOLDEN["cases"])


OUR_NAMES = {f"{name}_logprob": f"{name}_logprobs" for name in ("old", "new", "ref")}
OUR_NAMES |= {"advantage": "advantages", "advantage_reweighted": "reweighted_advantages"}
OUR_NAMES |= {"low_mask": "low", "low": "low_stage", "high": "high_stage"}
OUR_NAMES["grad_wrt_logprob"] = "gradient"
RENAME = lambda pairs: {OUR_NAMES.get(name, name): value for name, value in pairs}
PUBLISHED = [
    case
    for path in shared("golden/published_code.json")
    for case in json.loads(path.read_text(), object_pairs_hook=RENAME)["cases"]
]


@pytest.mark.parametrize("case", PUBLISHED)
def test_the_published_code_gives_the_same_numbers(case):
    test_lopti.test_golden_numbers(case)


@pytest.mark.parametrize("path", shared("golden/kk_rewards.jsonl", "data/math_grading.jsonl"))
def test_others_give_the_same_rewards(path):
    """The published code for every puzzle; two established graders for all math answers."""
    rows, is_kk = read_jsonl(path), "kk" in path.name
    reward = rewards.kk_reward if is_kk else rewards.math_reward
    ours = reward([row["response"] for row in rows], [row["solution"] for row in rows])
    assert ours == [row["score" if is_kk else "correct"] for row in rows]


def committed(task):
    """Training and evaluation rows."""
    files = [ROOT / "data" / f"{task}_{use}.jsonl" for use in ("train", "test")]
    return [row for file in files for row in read_jsonl(file)]


@pytest.mark.parametrize("task, question", [("kk", "quiz"), ("math", "problem")])
def test_committed_rows_are_all_different_and_in_the_words_of_the_bundled_policy(task, question):
    rows = committed(task)
    assert len({row[question] for row in rows}) == len(rows)  # training and evaluation disjoint
    check_vocabulary([row[key] for row in rows for key in (question, "answer") if key in row])


def check_vocabulary(texts):
    ids = TOKENIZER(texts, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.batch_decode(ids) == texts
    assert not any(TOKENIZER.unk_token_id in row for row in ids)


def test_copying_the_problem_is_not_answering_it():
    rows = committed("math")
    answers = [row["answer"] for row in rows]
    copies = [row["problem"].removeprefix("What is ").removesuffix("?") for row in rows]
    for form in ("%s", "x = (%s)", r"\frac{%s}{1}\text{ cm}", "%s+0"):
        boxes = [f"\\boxed{{{form % copy}}}" for copy in copies]
        assert rewards.math_reward(boxes, answers) == [0.0] * len(rows), form


def is_true(sentence, roles):
    """Of 'If A is a knave then B is not a knight' and the like: read from the text alone."""
    truth = lambda fact: str((roles[fact[1]] == fact[3]) != bool(fact[2]))
    logic = re.sub(r"(\w+) is (not )?a (\w+)", truth, sentence).replace("if and only if", "==")
    return logic != "If True then False" if logic.startswith("If ") else eval(logic)


def test_committed_puzzles_have_one_solution():
    """Counted by brute force on the text itself, not on the generator's claims."""
    rng = random.Random(0)
    for row in rng.sample(committed("kk"), 200):
        claims, solutions = literal_eval(row["statements"]), []
        said = [puzzles.claim_text(claim, row["names"]) for claim in claims]
        assert all(sentence in row["quiz"] for sentence in said)
        for values in itertools.product((True, False), repeat=len(said)):
            roles = {name: puzzles.role(value) for name, value in zip(row["names"], values)}
            if tuple(is_true(sentence, roles) for sentence in said) == values:
                solutions.append(list(values))
        assert solutions == [row["solution"]]
        text = puzzles.worked_solution(rng, row["names"], claims)
        assert rewards.kk_reward([text], [row["solution_text_format"]]) == [3.0]


def test_bundled_model_has_this_tokenizer_and_was_taught_such_texts():
    tokenizer, rng = pretrain.build_tokenizer(), random.Random(1)
    assert tokenizer.backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()
    model, held_out = AutoModelForCausalLM.from_pretrained(TINY), pretrain.committed_questions()
    for task in ("kk", "math"):
        batches = pretrain.batches(tokenizer, rng, held_out, task, tokens=1000, pool=16)
        ids, labels = next(batches)
        assert (ids != tokenizer.unk_token_id).all() and ids.numel() <= 1000
        assert model(ids, labels=labels).loss < 0.6


REAL = [f"kk_{people}ppl.jsonl" for people in range(3, 8)]
REAL += ["gsm8k.jsonl", "math.jsonl", "verl_math.parquet", "verl_kk.parquet"]
FILES = [*(ROOT / "data").glob("*.jsonl"), *shared(*(f"data/{name}" for name in REAL))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_committed_and_real_files_grade_themselves(path, capsys):
    """Of each hundred solutions the reward reads 99, and gives full marks to a copy of one."""
    args = arguments("--people 2 3 4 5 6 7 --max-prompt-length 1000000")
    args.task = "kk" if "kk" in path.name else "math"
    rows = rewards.load_rows(path, args, TOKENIZER)
    left_out = re.search(r"(\d+) left out", capsys.readouterr().out)
    assert len(rows) >= 99 * int(left_out[1] if left_out else 0) and rows
    if "ppl" in path.name:
        check_vocabulary([row["columns"]["quiz"] for row in rows])


@pytest.mark.parametrize("module", [small_talk, smollm2])
def test_examples_in_docstrings(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
