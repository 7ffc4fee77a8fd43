"""Checks rewards.py: rewards by the paper's rules, and what becomes of the rows of data files."""

import copy
import doctest
import functools
import itertools
import json
import math
import os
import random
import sys
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from test_lopti import (  # isort: skip, because it says that no test asks the hub
    KK_TRUTH,
    LILY,
    TOKENIZER,
    arguments,
    data_row,
    plain_rows,
    random_model,
    sample,
    write_jsonl,
)

import datasets
import numpy
import pytest
import torch
from tokenizers.processors import TemplateProcessing

import lopti
import rewards

# ------------------------------------------------------------------------------ rewards

TRUTH = "(1) Jack is a knight\n(2) Jackson is a knave"


def kk(answer, before="Suppose so. </think>", truth=TRUTH, **columns):
    return rewards.kk_reward([f"{before}<answer>{answer}</answer>"], [truth], **columns)[0]


def test_kk_answer():
    """Not readable is an answer where a name is missing or has both roles, or with one role word
    too many (knights counts as well); Jack is not inside Jackson, nor Ann inside Jo Ann."""
    assert kk(TRUTH) == kk("JACKSON IS A KNAVE.\nJack is\ta  knight") == 3.0
    assert kk("Jack is a knight\nJackson is a knight") == -0.5
    unread = ("Jack is a knight", "Jack is a knight\nJack is a knave", TRUTH + "\nso one knight")
    unread += ("Jackson is a knight\nJackson is a knave", "both are knights: " + TRUTH)
    assert [kk(answer) for answer in unread] == [-1.0] * 5
    truth = "(1) Mary Ann is a knight\n(2) Jo Ann is a knave, and Ann is a knave"
    answers = (truth, truth.replace("Jo Ann is a knave", "Jo Ann is a knight"), truth[:-16] + truth)
    assert [kk(answer, truth=truth) for answer in answers] == [3.0, -0.5, -1.0]
    name = "a" * 50  # where each word could begin a name of any length, time is quadratic
    assert rewards.read_roles(f"{name} is a knight") == {name: "knight"}
    assert rewards.read_roles(f"a{name} is a knight") is None


@pytest.mark.parametrize(
    ("solution", "names"),
    [
        ("(1) Jo Zoë is a knight\n(2) 小明 is a knave", ["jo zoë", "小明"]),
        ("1. Mary Ann is a knight\n2. Ann is a knave", ["mary ann", "ann"]),
        ("Zoey is a knight, and Oliver is a knave.", ["zoey", "oliver"]),
        ("Therefore Zoey is a knight, while Oliver is a knave", None),  # no names, but prose
        ("(1) Zoey is a knight\n(2) Oliver is no knight", None),
    ],
)
def test_the_names_of_a_solution(solution, names):
    assert (rewards.read_roles(solution) or {}).keys() == set(names or ())
    if names:
        assert kk(solution, truth=solution) == 3.0


def test_kk_format_and_what_the_prompt_has_opened():
    answer = f"<answer>{TRUTH}</answer>"  # unfinished, in wrong order, twice, with copied tags
    responses = [answer, f"</think>{answer}"[:-2], f"{answer}</think>", f"</think>{answer}{answer}"]
    responses += [f"<answer> </answer></think>{answer}", None, [], [{"content": None}]]
    assert rewards.kk_reward(responses, [TRUTH] * 8) == [-3.0] * 8
    named = "Write <think> first. Who?"  # names the tag, but does not open it
    for asked, opened in (("Who?", False), (named, False), ("Who?\nassistant: <think> \n", True)):
        for prompt in (asked, user(asked)):
            assert kk(TRUTH, prompts=[prompt]) == (3.0 if opened else -3.0)
            assert kk(TRUTH, "<think>So </think>", prompts=[prompt]) == (-3.0 if opened else 3.0)
    for truth in ("nobody here", "(1) Ann is a knight\n(2) Ann is a knave", None):
        with pytest.raises(ValueError, match="`solution` does not give each name one"):
            rewards.kk_reward(["a", "b"], [TRUTH, truth])


# ------------------------------------------------------------------------------ data


def load_data(flags="", **files):
    """(training rows, evaluation rows) of `lopti.load_data`."""
    return lopti.load_data(arguments(flags, **files), TOKENIZER)


def load_rows(path, flags="--task math"):
    return rewards.load_rows(str(path), arguments(flags), TOKENIZER)


CHAT = "<|user|>Who is a knave?<|assistant|><think>"  # the template is applied already


def user(text):
    return [{"role": "user", "content": text}]


def verl(prompt, truth):
    return {"prompt": prompt, "reward_model": {"ground_truth": truth}}


ROWS = {  # shape: (task, a row, its question or its prompt, its solution)
    "K&K": ("kk", {"quiz": "Who?", **KK_TRUTH}, "Who?", LILY),
    "TRL": ("kk", {"prompt": user("Who?"), "solution": LILY}, "<|user|>Who?<|assistant|>", LILY),
    "both": ("kk", {"quiz": "Who?", **KK_TRUTH, "prompt": "Who?"}, "Who?", LILY),
    "TRL, text": ("math", {"prompt": "1 + 1 =", "solution": "2", "problem": "No."}, "1 + 1 =", "2"),
    "verl": ("math", {**verl(user("1?"), "1"), "question": "1?"}, "<|user|>1?<|assistant|>", "1"),
    "verl, rendered": ("kk", verl(user(CHAT), KK_TRUTH), CHAT, LILY),
    "GSM8K": ("math", {"question": "How many?", "answer": "2.\n#### 1,002"}, "How many?", "1,002"),
    "DeepScaleR": ("math", {"problem": "Add.", "answer": "2", "solution": "Clear."}, "Add.", "2"),
    "MATH": ("math", {"problem": "Halve.", "solution": r"$\boxed{\frac12}$"}, "Halve.", r"\frac12"),
}


@pytest.mark.parametrize("shape", ROWS)
def test_every_shape_of_row_in_every_format(tmp_path, shape):
    """From a file to a prompt, and to a solution that the reward reads."""
    task, row, prompt, solution = ROWS[shape]
    data, own = datasets.Dataset.from_list([row]), "prompt" in row and "quiz" not in row
    for suffix in ("jsonl", "parquet", "csv")[: 3 if {*map(type, row.values())} == {str} else 2]:
        path = tmp_path / f"rows.{suffix}"
        getattr(data, f"to_{suffix.removesuffix('l')}")(path)
        training, (loaded,) = load_data(f"--task {task} --people 1 --eval-only --eval-data {path}")
        assert not training and loaded["solution"] == solution  # it is evaluated on: not trained on
        assert loaded["difficulty"] == ("1" if task == "kk" else "all")
        assert loaded["prompt"] == prompt if own else prompt in loaded["prompt"]
        assert loaded["prompt"].endswith("<think>") is (shape in ("K&K", "both", "verl, rendered"))


SHAPES = {
    "K&K": lambda quiz: {"quiz": quiz, **KK_TRUTH},
    "TRL": lambda quiz: {"prompt": user(quiz), "solution": LILY},
    "verl": lambda quiz: verl(user(CHAT.replace("Who", "The puzzle: " + quiz)), LILY),
}


@pytest.mark.parametrize(("trained_in", "evaluated_in"), [*itertools.product(SHAPES, SHAPES)])
def test_no_training_prompt_is_an_evaluation_prompt(tmp_path, capsys, trained_in, evaluated_in):
    """Whatever the files' shapes, spaces and capitals, and beyond --eval-size as well."""
    files = {}
    island = "On this island live knights and knaves, and you meet"
    for name, shape, part in (("data", trained_in, "A B C"), ("eval_data", evaluated_in, "a b")):
        rows = [SHAPES[shape](f"{island}{' ' * x.isupper()} {x}?") for x in part.split()]
        files[name] = write_jsonl(tmp_path / f"{name}.jsonl", rows)
    (row,), (_,) = load_data("--people 1 --eval-size 1", **files)
    told = "1 training and 1 of 2 evaluation prompts; 2 of 3 rows are also in --eval-data\n"
    assert "you meet c?" in row["key"] and capsys.readouterr().out.endswith(told)


def test_a_short_question_is_no_part_of_a_long_one(tmp_path, monkeypatch, capsys):
    """'Solve for x' removes itself, and not all equations. Long lists: equal questions only."""
    long = "A train leaves at noon and arrives at three, after 120 miles. "
    asked = ["Solve for x: 2x = 4", "solve  for x", long + "How fast is it?"]
    files = {"data": tmp_path / "data.jsonl", "eval_data": tmp_path / "eval.jsonl"}
    write_jsonl(files["data"], [{**GOOD, "problem": problem} for problem in asked])
    write_jsonl(files["eval_data"], [{**GOOD, "problem": x} for x in ("Solve for x", long)])
    load = functools.partial(load_data, "--task math", **files)
    assert [row["asked"] for row in load()[0]] == asked[:1]
    monkeypatch.setattr(rewards, "MAX_PAIRS", 1)
    assert [row["asked"] for row in load()[0]] == [asked[0], asked[2]]
    assert "only equal ones are left out" in capsys.readouterr().out


def test_a_tenth_of_ones_own_data_is_evaluated_on(tmp_path, capsys):
    """At random: a sorted file begins with its easiest rows. What is there twice is no training."""
    rows = [{"problem": f"Say {i // 2}!", "answer": f"{i // 2}"} for i in range(40)]
    files = {"data": write_jsonl(tmp_path / "own.jsonl", rows)}
    training, evaluation = load_data("--task math", **files)
    assert not {row["key"] for row in training} & {row["key"] for row in evaluation}
    assert [row["asked"][:3] for row in evaluation] == ["Say"] * 4
    assert max(int(row["solution"]) for row in evaluation) > 4
    told = f"4 of 40 rows are held out for evaluation, {36 - len(training)} more have the same"
    assert told in capsys.readouterr().out
    assert load_data("--task math --seed 7", **files)[1] == evaluation  # of every run
    write_jsonl(tmp_path / "own.jsonl", rows[:2])
    with pytest.raises(lopti.UserError, match="nothing is left to train on"):
        load_data("--task math", **files)
    write_jsonl(tmp_path / "own.jsonl", rows)
    _, evaluation = load_data("--task math --eval-only --eval-size 4", eval_data=files["data"])
    assert max(int(row["solution"]) for row in evaluation) > 4


GOOD = {"problem": "2?", "answer": "2"}
TEXT = [{"type": "text", "text": "2?"}]
NO_ROW = "without a prompt or a (boxed) solution"
CUT = "with LaTeX that JSON has cut"
BAD = {  # why a row is left out: such rows
    "without columns": [7, None, [GOOD]],
    "with columns that are not known (question, final": [{"question": "2?", "final": "2"}],
    NO_ROW: [{"problem": "2?", "solution": 2}, {"problem": "", "answer": "2"}],
    "with several boxes": [{"problem": "2?", "solution": r"\boxed{3} and $\boxed{4}$"}],
    "that cannot be read": [
        {"prompt": user(content), "solution": "2"}  # the last: half a character
        for content in (None, TEXT, 2, "\ud83d")
    ],
    "whose chat is written as text": [{"prompt": str(user("2?")), "solution": "2"}],
    CUT: [{**GOOD, "problem": "\frac12?"}],
    "with a picture": [{**GOOD, "images": ["figure.png"]}],
    "with choices that its question does not show": [
        {**GOOD, "choices": ["7", "8"]},
        {**GOOD, "options": "?2"},  # as csv has it: one text
        {"problem": "Is 2 even, Anna and Ben?", "options": {"A": "yes", "B": "no"}, "answer": "A"},
    ],
    "the number of a choice": [{"problem": "1, or 2?", "choices": ["1", "2"], "answer": 1}],
    "longer than --max-prompt-length 400": [{**GOOD, "problem": "Hm? " * 999}],
}
SOLUTIONS = {  # the same of answers
    NO_ROW: [None, math.nan, -math.inf, ["3"], {"a": 3}, ""],
    CUT: ["\frac12", "3\times 2", "\bar x", "2\right)", "\neq 2"],
    "says that there is none": ["proof", "Not found", "None", "unknown", "See solution.", "?"],
    "is a list or other JSON": ['["2"]', "['2', '3']", '{"inputs": ["1"], "outputs": ["2"]}'],
    "is a sentence": ["One and one are two, so 2"],
    "a spreadsheet has made a date": ["4-Mar", "Mar-04"],
    "with two spellings of one answer": [r"$\frac12$ or $0.5$"],
    "whose solution --task math cannot read": [r"\frac{1}{2"],
}
for why, answers in SOLUTIONS.items():
    BAD[why] = BAD.get(why, []) + [{**GOOD, "answer": answer} for answer in answers]


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_row_is_left_out_and_counted_with_its_reason(reason, tmp_path, capsys):
    rows = [GOOD, *BAD[reason], {**GOOD, "options": ["2"]}]
    loaded = load_rows(write_jsonl(tmp_path / "rows.jsonl", rows))
    assert len(loaded) == 2 and set(map(str, loaded[0]["columns"])) >= {"problem", "options"}
    told = capsys.readouterr().out
    assert told.startswith(f"rows.jsonl: {len(rows)} rows, {len(rows) - 2} left out: ")
    assert reason in told and " (row 2" in told


def test_how_a_solution_is_read(tmp_path):
    """The box of a whole solution, as `math_reward` reads it; what a spreadsheet wrote; 1 or 2."""
    box = r"We must have x equal to one more than seven, so $\boxed{8}$."
    for written, read in ((box, "8"), ("1E+06", "1000000"), ("1.5E-07", "0.00000015")):
        (row,) = load_rows(
            write_jsonl(tmp_path / "a.jsonl", [{"prompt": "2?", "solution": written}])
        )
        assert row["solution"] == read
    path = write_jsonl(tmp_path / "a.jsonl", [{**GOOD, "answer": "1 or 2"}])
    assert load_rows(path)[0]["solution"] == "1 or 2"


def test_prompts_that_do_not_ask_for_the_form_are_counted(tmp_path, capsys):
    """verl's GSM8K asks for ####: every obedient answer would earn 0, in silence."""
    rows = [verl(user(x), "7") for x in ("3 + 4? Write #### before it.", "3 + 4? Box it.")]
    load_rows(write_jsonl(tmp_path / "a.jsonl", [*rows, {"problem": "3 + 4?", "answer": "7"}]))
    told = "a.jsonl: 1 prompts do not ask for a box: answers without one count as wrong\n"
    assert capsys.readouterr().out == told


def test_the_length_of_a_prompt_is_that_of_all_that_the_model_reads(tmp_path):
    """System message, template and our request included."""
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD])
    length = len(TOKENIZER(load_rows(path)[0]["prompt"])["input_ids"])
    assert load_rows(path, f"--task math --max-prompt-length {length}")
    with pytest.raises(lopti.UserError, match="longer than"):
        load_rows(path, f"--task math --max-prompt-length {length - 1}")


def test_what_people_and_the_task_do_with_rows(tmp_path, capsys):
    """--people leaves out silently, and what is left as text only is counted."""
    rows = [("A?", "(1) Ann is a knight (2) Bo is a knave"), ("B?", LILY), ("C?", "(1) Knightley")]
    rows = [{"quiz": quiz, "solution_text_format": truth} for quiz, truth in rows]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    assert [row["asked"] for row in load_rows(path, "--people 2")] == ["A?"]
    told = "2 of another size than --people .*columns: quiz, solution_text_format; .* --people 3"
    with pytest.raises(lopti.UserError, match=told):
        load_rows(path, "--people 3")
    answers = ["2", "Yes", r"\frac12\text{ hours}", "8:30 AM", r"\forall x", "1,2", r"\{1\}", "9/"]
    assert len(load_rows(write_jsonl(Path(path), [{**GOOD, "answer": x} for x in answers]))) == 8
    told = "a.jsonl: 3 rows, 1 left out: 1 whose solution --task kk cannot read"
    told += " (not puzzles? --task math) (row 3)\n"
    told += "a.jsonl: 3 compared as text (see math-verify in data/GUIDE.md)\n"
    assert capsys.readouterr().out == told


def test_data_are_read_as_they_are_written(tmp_path, capsys):
    """No dates, floats or lines are made of what is text, a long number, or one line. A mark at the
    beginning, empty lines, capitals in the name and 1e+20 for a number are nobody's intention."""
    problem = "Two\u2028lines?"
    answers = ["2021-03-04", "2021-03-04 05:06:07", 12345678901234567890123, "0.10", "1e3"]
    numbers = {1e20: "1" + "0" * 20, -2.0: "-2", 0.5: "0.5"}
    rows = [{"problem": problem, "answer": x} for x in (*answers, *numbers)]
    rows = [json.dumps(row, ensure_ascii=False) for row in rows]
    for name, text in (("a.JSONL", "\n\n".join(rows) + "\n\n"), ("a.json", f"[{','.join(rows)}]")):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        loaded = load_rows(tmp_path / name)
        assert [row["solution"] for row in loaded] == [*map(str, answers), *numbers.values()]
        assert all(problem in row["prompt"] for row in loaded)
    levels = {1: "1", "1.0": "1", None: "all", "": "all", "Level 5": "Level 5"}
    path = write_jsonl(tmp_path / "a.jsonl", [{**GOOD, "level": level} for level in levels])
    assert [row["difficulty"] for row in load_rows(path)] == list(levels.values())
    path = tmp_path / "a.csv"  # of Excel, with a cell too many, and with two columns of one name
    path.write_text("problem,answer,note\r\n2?,2,,\r\n3?,3,b,c\r\n", encoding="utf-8-sig")
    assert [row["columns"] for row in load_rows(path)] == [{**GOOD, "note": ""}]
    assert "2 rows, 1 left out: 1 with more cells than columns (row 2)\n" in capsys.readouterr().out
    path.write_text("problem,answer,answer\n2?,2,3\n")
    with pytest.raises(lopti.UserError, match="two columns of one name"):
        load_rows(path)
    with pytest.raises(lopti.UserError, match=r"a.JSONL \(ValueError: line 2: "):
        Path(tmp_path / "a.JSONL").write_text('{"problem": "?"}\n{"problem": ')
        load_rows(tmp_path / "a.JSONL")


def test_parquet_is_read_as_it_was_meant(tmp_path):
    """At every depth float32 .3 is .3 and not 0.30000001192092896; a class is its name. A file that
    has changed is read anew."""
    single, half = datasets.Value("float32"), datasets.Value("float16")
    cases = (
        ("answer", single, 0.3, "0.3"),
        ("answer", half, 1.1, "1.1"),
        ("answer", datasets.ClassLabel(names=["no", "yes"]), 1, "yes"),
        ("reward_model", {"ground_truth": single}, {"ground_truth": 0.1}, "0.1"),
    )
    for name, kind, value, meant in cases:
        features = {"problem": datasets.Value("string"), "prompt": datasets.Value("string")}
        features = datasets.Features({**features, name: kind, "list": datasets.List(single)})
        columns = {"problem": ["?"], "prompt": ["?"], name: [value], "list": [[0.3]]}
        data = datasets.Dataset.from_dict(columns, features=features)
        data.to_parquet(tmp_path / "a.parquet")
        (row,) = load_rows(tmp_path / "a.parquet")
        assert row["solution"] == meant and row["columns"]["list"] == [0.3]


def test_paths_are_read_as_they_are_meant(tmp_path, monkeypatch):
    """A colon in the name of a folder does not cut it; ~ is the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("d:1", r"C:\data\x"):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "train.jsonl", [GOOD])
        assert len(load_rows(tmp_path / name)) == len(load_rows(f"~/{name}")) == 1


def test_a_data_set_with_configurations_and_splits(tmp_path):
    """The form in which the hub holds the paper's data: name:configuration:split+split."""
    files = [write_jsonl(tmp_path / f"{x}.jsonl", [{"quiz": x, **KK_TRUTH}] * 2) for x in "ab"]
    parts = "".join(f"  - split: {Path(x).stem}\n    path: {Path(x).name}\n" for x in files)
    card = f"---\nconfigs:\n- config_name: train\n  data_files:\n{parts}---\n"
    (tmp_path / "README.md").write_text(card)
    rows = load_rows(f"{tmp_path}:train:a+b", "--people 1")
    assert [row["asked"] for row in rows] == ["a", "a", "b", "b"]


def test_prompts_begin_as_the_model_is_used_to():
    """Llama's tokenizer puts a token before every text: once; a chat template has its own."""
    tokenizer, task = copy.deepcopy(TOKENIZER), rewards.TASKS["kk"]
    tokenizer.add_special_tokens({"bos_token": "<|bos|>"})
    first = [("<|bos|>", tokenizer.bos_token_id)]
    tokenizer._tokenizer.post_processor = TemplateProcessing("<|bos|> $A", special_tokens=first)
    assert rewards.render_prompt(tokenizer, user("Lily")) == "<|user|>Lily<|assistant|>"
    tokenizer.chat_template = None  # a base model
    text = rewards.render_prompt(tokenizer, task.messages("Lily"), task.opening)
    assert text == f"<|bos|>{task.system}\n\nLily\n\n<think>"
    assert rewards.render_prompt(tokenizer, "<|bos|>Lily") == "<|bos|>Lily"
    rollout = sample(random_model(vocab_size=len(tokenizer)), ["<|bos|>Lily"], tokenizer)
    assert plain_rows(rollout)[0][0].tolist() == tokenizer("Lily")["input_ids"]  # not twice


def test_a_template_is_applied_once():
    """What the model's own template writes shows that it was applied; another's mark is text."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = "<｜User｜>{{ messages[0].content }}<｜Assistant｜><think>"  # R1's
    text = rewards.render_prompt(tokenizer, user("What is <think> or [INST]?"))
    assert text == "<｜User｜>What is <think> or [INST]?<｜Assistant｜><think>"
    assert rewards.render_prompt(tokenizer, user(text)) == text


TURN = "{% for turn in messages if turn.role == 'user' %}<|user|>{{ turn.content }}{% endfor %}"
REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


def test_a_chat_template_loses_nothing_and_adds_nothing_twice():
    """Gemma's refuses a system message, others drop it; DeepSeek's opens <think> itself."""
    tokenizer, task = copy.deepcopy(TOKENIZER), rewards.TASKS["kk"]
    for template in (REFUSING + TURN, TURN, TURN + "<|assistant|><think>\n"):
        tokenizer.chat_template, tokenizer.unk_token = template, TOKENIZER.unk_token
        text = rewards.render_prompt(tokenizer, task.messages("Lily  is?"), task.opening)
        assert task.system not in text  # which the bundled vocabulary cannot write
        tokenizer.unk_token = None
        text = rewards.render_prompt(tokenizer, task.messages("Lily  is?"), task.opening)
        assert text.startswith(f"<|user|>{task.system}\n\nLily  is?") and text.count("Lily") == 1
        assert text.removeprefix(f"<|user|>{task.system}").count("<think>") == 1
    for broken in ("{{ messages[-1].content[0].text }}", "{{ raise_exception('no chat') }}"):
        tokenizer.chat_template = broken  # the first is for content in parts
        with pytest.raises(lopti.UserError, match="refuses or leaves out"):
            rewards.render_prompt(tokenizer, task.messages("Lily"))


def test_every_epoch_has_every_prompt_in_an_order_of_its_own():
    def batches(size, seed, skip=0):
        return list(itertools.islice(lopti.prompt_stream(range(10), size, seed, skip), 10 - skip))

    order = list(itertools.chain(*batches(4, 0)))  # of four epochs
    epochs = [tuple(order[start : start + 10]) for start in range(0, 40, 10)]
    assert len(set(epochs)) == 4 and all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert batches(4, 0, skip=3) == batches(4, 0)[3:] and batches(4, 0) != batches(4, 1)


class FromTheData:  # a callable without a name of its own; other tests have plain functions
    def __call__(self, completions, value, prompts, **columns):
        for column in (completions, prompts, columns["solution"], columns["nested"][0]):
            column.clear()  # a function that changes what it gets
        return {1: 0.5, 2: 0.5} if value[0] == "dictionary" else value


from_the_data = FromTheData()


def test_a_reward_function_of_ones_own(tmp_path, monkeypatch):
    """It gets copies of every column of every row, as in TRL; it returns one finite number a
    response. A file of one's own is not ours of the same name; a question gets no words of ours."""
    args = arguments(f"--reward {__name__}:from_the_data --solved-reward 1")
    bad = (
        (None, 1),
        (None, 1, 2),
        (1, math.nan),
        (1, math.inf),
        (1, 2, 3),
        ("dictionary", 1),
        ("a", "b"),
    )
    for values in ((0, 6.5), *bad):
        rows = [{**data_row("?"), "columns": {"value": x, "nested": [1]}} for x in values]
        texts, before = ["a", "b"], copy.deepcopy(rows)
        with pytest.raises(lopti.UserError, match="from_") if values in bad else nullcontext():
            assert lopti.compute_rewards(texts, rows, args) == [0.0, 6.5]
        assert texts == ["a", "b"] and rows == before
    row, args.task = {"question": "Why?", "answer": "The earth turns around the sun"}, "math"
    (loaded,) = rewards.load_rows(write_jsonl(tmp_path / "a.jsonl", [row]), args, TOKENIZER)
    assert loaded["prompt"] == "<|user|>Why?<|assistant|>"
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text("def kk_reward(**columns): return [1.0]")
    with pytest.raises(lopti.UserError, match="rename your file"):
        rewards.load_function("rewards:kk_reward")
    args.reward = lambda completions, **columns: [len(text) for text in completions]
    assert lopti.compute_rewards(["a", "bc"], [data_row("?")] * 2, args) == [1.0, 2.0]
    truth = {"target": 24, "numbers": [4, 6]}  # Countdown's
    (loaded,) = rewards.load_rows(
        write_jsonl(Path("b.jsonl"), [verl("24?", truth)]), args, TOKENIZER
    )
    args.reward = lambda completions, solution, **columns: [truth["target"] for truth in solution]
    assert lopti.compute_rewards(["a"], [loaded], args) == [24.0]


def test_a_reward_leaves_the_process_as_it_was(tmp_path):
    """Else a seed in it draws the same answers in every step, and a folder loses the run."""
    kept = []

    def careless(completions, **columns):
        for seed in (random.seed, numpy.random.seed, torch.manual_seed):
            seed(0)
        os.chdir(tmp_path)
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        kept.append(torch.inference_mode())
        kept[-1].__enter__()
        return [1091.375] * len(completions)

    def state():
        draws = random.random(), numpy.random.random(), float(torch.rand(()))
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return draws, modes, torch.get_default_dtype(), torch.get_default_device(), Path.cwd()

    states = []
    for reward in (lambda completions, **columns: [1091.375], careless, careless):
        random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
        args = arguments(reward=reward)
        assert lopti.compute_rewards(["a"], [data_row("?")], args) == [1091.375]
        states.append(state())
    assert states[0] == states[1] == states[2]


def test_where_a_reward_failed(tmp_path, monkeypatch):
    """Its own file and line, also where a library raises; and where to read what it gets."""
    code = "def chat(completions, **columns):\n    return [x[0]['content'] for x in completions]\n"
    code += "import json\ndef load(completions, **columns):\n    return json.loads('[')\n"
    (tmp_path / "failing.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    for name, line in (("chat", 2), ("load", 5)):
        args = arguments(f"--reward failing:{name} --solved-reward 1")
        with pytest.raises(lopti.UserError, match=f"failing.py, line {line}.*data/GUIDE.md"):
            lopti.compute_rewards(["a"], [data_row("?")], args)


def test_the_guide_s_reward_with_math_verify(tmp_path, monkeypatch):
    pytest.importorskip("math_verify")
    guide = (ROOT / "data" / "GUIDE.md").read_text(encoding="utf-8")
    (code,) = [x for x in guide.split("```") if x.startswith("python\n") and "math_verify" in x]
    (tmp_path / "my_reward.py").write_text(code.removeprefix("python\n"))
    monkeypatch.chdir(tmp_path)
    reward = rewards.load_function("my_reward:math_verify_reward")
    texts = [r"\boxed{(-\infty, 4)}", r"\boxed{2}</think> \boxed{3}", "4", r"\boxed{4"]
    assert reward(texts, ["x < 4", "3", "5", "5"], level=[1] * 4) == [1.0, 1.0, 0.0, 0.0]


def test_examples_in_docstrings():
    result = doctest.testmod(rewards)
    assert result.attempted and not result.failed
