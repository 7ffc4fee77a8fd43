import copy
import itertools
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

import rewards
from rewards import (
    TASKS,
    UserError,
    answers_match,
    compute_rewards,
    kk_reward,
    last_box,
    load_data,
    load_function,
    load_rows,
    math_reward,
    normalize,
    parse_answer,
    parse_number,
    prompt_stream,
    read_answer,
    read_solution,
    render_prompt,
    score_puzzle,
    split_label_and_unit,
)

DATA = Path(rewards.__file__).parent / "data"
TOKENIZER = AutoTokenizer.from_pretrained(DATA / "tiny")

# rewards.py: Knights and Knaves -------------------------------------------------------------------

JACK = "(1) Jack is a knight\n(2) Jackson is a knave"
ANN = "(1) Mary Ann is a knight\n(2) Ann is a knave"
ODD = "(1) Sir Knightley (the 2nd) is a knight\n(2) @bo+x is a knave\n(3) O'Neil Å. is a knight"

ANSWERS = [  # a solution, an answer, its reward in the right format
    (JACK, JACK, 3),
    (JACK, "JACKSON IS A KNAVE.\nJack is\ta  knight", 3),  # any case, blanks and order
    (ANN, ANN, 3),
    (ODD, ODD, 3),  # names may be anything
    (JACK, "Jack is a knight\nJackson is a knight", -0.5),
    (JACK, "Jack is a knight", -1),  # a name is missing
    (JACK, "Jackson is a knave\nJackson is a knight", -1),  # there is no Jack in Jackson
    ("(1) Ann is a knight", "Joann is a knight", -1),
    ("(1) Ann is a knight", "Ann is a knight\nJoann is a knave", -1),
    (JACK, "Jack is a knight\nJack is a knave", -1),  # both roles
    (JACK, f"{JACK}\nJack is a knight", -1),
    (JACK, f"Both are knights: {JACK}", -1),
    (JACK, "Jack is a knight or knave\nJackson is a knave", -1),
]


@pytest.mark.parametrize("solution, answer, reward", ANSWERS)
def test_answers_to_a_puzzle(solution, answer, reward):
    text = f"So. </think> <answer>{answer}</answer>"
    assert kk_reward([text], [solution]) == [reward]
    assert score_puzzle(f"<think>{text}", read_solution(solution)) == reward


ANSWER = f"<answer>{JACK}</answer>"
RIGHT = f"So. </think>{ANSWER}"

FORMS = [  # a response, its prompt, its reward
    (RIGHT, "Who? <think> \n", 3),
    (RIGHT, "Write <think> first. Who?", -3),
    (f"<think>{RIGHT}", "Who?", 3),
    (ANSWER, "<think>", -3),
    (f"{ANSWER}</think>", "<think>", -3),
    (RIGHT.removesuffix("</answer>"), "<think>", -3),
    (f"{RIGHT}{ANSWER}", "<think>", -3),
    (None, "<think>", -3),
    ([], "<think>", -3),
    ([{"content": "No."}, {"content": RIGHT}], "<think>", 3),  # a chat: its last message
    (RIGHT, [{"role": "user", "content": "Who? <think>"}], 3),
]


@pytest.mark.parametrize("response, prompt, reward", FORMS)
def test_the_form_of_a_response_to_a_puzzle(response, prompt, reward):
    assert kk_reward([response], [JACK], prompts=[prompt], names=[[]]) == [reward]


def test_the_solution_of_a_puzzle():
    roles = {"åsa öl": "knight", "小明": "knave"}
    for solution in (
        "1. Åsa Öl is a knight\n12) 小明 is a knave",
        "(1) Åsa Öl is a knight (2) 小明 is a knave",
    ):
        assert read_solution(solution) == read_answer(solution, roles) == roles
    for solution in ("(1) Ann is a knight\n(2) Ann is a knave", "So Ann is a knight", "", None):
        with pytest.raises(UserError, match=r"lines like \(1\) Zoey is a knight"):
            kk_reward(["", ""], [JACK, solution])


# rewards.py: mathematics --------------------------------------------------------------------------

EQUAL = r"""
11 | 11.0 | 011 | +11 | (11) | 11. | $11$ | \text{11} | {11} | \( 11 \) | \mathrm{11}
3/4 | \frac{3}{4} | .75 | \dfrac 3 4 | \tfrac34 | \left(\frac{3}{4}\right) | \frac3{4}
-\frac73 | \frac{-7}{3} | -7/3 | -2\frac{1}{3} | -2 1/3 | −2\frac13
1234567 | 1,234,567 | 1{,}234{,}567 | 1,\! 234,\!567 | \(1,234,567\) | \$1,234,567 | x = 1,234,567
\$5.00 | 5 | \$5 | $\$5$ | 5 dollars
28\% | 28 | 28% | 28 percent
90^\circ | 90 | 90^{\circ} | 90^ {\circ} | 90° | 90 degrees
10 | 10\ \text{cm} | 10 cm | 10cm | x = 10\text{ cm} | 10 inches | 10 square feet | 10\text{ ways}
5 inches | 5 inch | 5 | x = 5 | \theta = 5 | f(x) = 5
x = \frac12\text{ hour} | 0.5 hours | 0.5 | x=0.50
x = 1, y = 2 | y = 2, x = 1
\{1, 2, 3\} | 3,1,2 | 1, 2, \text{ and } 3 | 1; 2; 3 | 1 or 2 or 3 | \{3.0,2,1\} | {1,2,3}
(1, 2) | (1,\ 2) | \left( 1,\, 2.0 \right) | ( 1, 2 )
(1,2), (3,0.5) | (3,\frac12), (1,2)
[0, 0.5) | [0, \frac{1}{2})
yes | Yes | \text{Yes}
x^2 + 2x\sqrt3 | x^{2}+2 x \sqrt{3}
1204_9 | 1204_{9}
2 \cdot 10^3 | 2 \times 10^{3} | 2 × 10^3
x \le 3 \le y | x ≤ 3 \leq y
y \geq 3 \ge x | y≥3≥x
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix}1\\2\end{pmatrix}
"""

DIFFERENT = r"""
11 | 5+6 | 11+0 | 22/2 | \frac{22}{2} | \frac{11}{1} | 11^1 | -(-11) | x = 5 + 6 = 11 | 5+6=11
\frac34 | 6/8 | \frac{1.5}{2} | -\frac34 | 3 | 34
\frac73 | -2\frac13 | 2\frac{-1}{3} | 2 2/6 | 1 4/3 | 2 1/0
0.9666... | 0.9666 | 0.9666..
1024 | 1024... | 1024..
0,5 | 0.5
5.5 | 5 0.5 | 5 .5 | 5 1/2.0
5 | -5 | 5 6 | 5e1 | ５ | ٥ | \text{five} | 5 hundred | 5x | [5] | 5 or 6 | \pm 5
540 | 5\$40 | 5 40 | 5\,40 | 5\text{40}
1200 | 1, 200 | (1,200) | ( 1,200 ) | \left(1,200\right) | 12,00 | 1,20000
(1,200,3) | (1200,3) | 1200,3
0.12 | 0.1,200
\frac{\pi}{3} | \frac{\pi}{3}^\circ
0.5 | 0.5\% | 50\%
3 hours and 20 minutes | 20, 3 | 3, 20 | 2 hours and 30 minutes
5\text{ cm}, 3\text{ kg} | 5 kg, 3 cm | 5, 3
5 | 5 time person book | 5 cm kg | 5\text{ is wrong} | 5 squared | 5 square | 5 xy | 5:00
5\text{ cm} | 5 km | 5 square cm | 5 cm per hour
y = 5 | x = 5 | 2y = 5 | y < 5 | y = 7 = 5
x=1, y=2 | 2, 1 | 1, 2 | x=2, y=1 | (1, 2)
n = 3k | 3
(1, 2) | (2, 1) | \{1, 2\} | 1, 2 | [1, 2] | (1, 2] | (1, 2, 2)
1, 1, 2 | 1, 2, 2 | 1, 2
(1,2),(3,4) | (2,1),(3,4) | (1,2,3,4)
\{1,2\}\setminus\{3,4\} | \{4,2\}\setminus\{3,1\}
x \le 1 \text{ or } x \ge 2 | x \le 1 \text{ and } x \ge 2
ABC | abc
\frac{1}{23} | \frac{1}{2}3 | \frac123
\{\} | | \,
2\sqrt{3} | \sqrt{12}
9a+11 | 11+9a
"""  # the last two are right; but they are text, and not the same


def rewarded(solution, answer):
    return math_reward([rf"So $\boxed{{{answer}}}$."], [solution]) == [1]


@pytest.mark.parametrize("row", EQUAL.strip().splitlines())
def test_equal_answers_are_rewarded(row):
    solution, *answers = row.split(" | ")
    assert [answer for answer in answers if not rewarded(solution, answer)] == []


@pytest.mark.parametrize("row", DIFFERENT.strip().splitlines())
def test_different_answers_are_not_rewarded(row):
    solution, *answers = row.split(" | ")
    assert [answer for answer in answers if rewarded(solution, answer)] == []
    assert answers_match(solution, solution)


def test_the_parts_of_the_grader():
    assert normalize(r"x = \dfrac 1 2 \text{ hours}.") == r"x=\frac{1}{2}hours"
    assert split_label_and_unit("x=5cm") == ("5", "x", "cm")
    assert split_label_and_unit("5cm,3kg") == ("5cm,3kg", "", "")
    assert parse_answer("[1.50,x)") == "[3/2,x)"
    assert parse_answer("2,1") == parse_answer("{1,2}") != parse_answer("(1,2)")
    assert parse_answer("(1)(2)") == "(1)(2)"
    assert parse_number("2 1/2") == parse_number("2.5") == 2.5
    assert parse_number("4/8") is parse_number("5x") is None


def test_the_last_box():
    assert last_box(r"\boxed{1}, no, \boxed{\frac{1}{2}} }") == r"\frac{1}{2}"
    assert last_box(r"\boxed{\left\{ 1 \right.}") == r"\left\{ 1 \right."
    assert last_box(r"\boxed{1} or \boxed{}") == ""
    assert last_box(r"\boxed{1} and \boxed{2") is None
    assert last_box(r"\boxed{1}</think> no box.") is None


def test_math_reward_takes_chats_worked_solutions_and_numbers():
    chat = [{"content": r"\boxed{9}"}, {"content": r"\boxed{4}"}]  # its last message counts
    responses = [chat, r"\boxed{9}", r"\boxed{4}", "4", None, r"\boxed{}", r"\boxed{9999}" * 99]
    solutions = ["4", r"So $\boxed{9}$.", 4, "4", "4", "", "9" * 999]
    assert math_reward(responses, solutions, level=[1] * 7) == [1, 1, 1, 0, 0, 0, 0]


def test_no_answer_raises():
    signs = [*"()[]{}.,;=+-*/^_$%&~<> 07xI\n\\", "1,000", "\\frac", "\\text{", " or ", "\ud800"]
    texts = ["".join(pair) for pair in itertools.product(signs, repeat=2)]
    texts += [sign * (290 // len(sign)) for sign in signs]
    texts += ["(" * n + "5" + ")" * n for n in (149, 999)]
    for text in texts:
        assert answers_match(text, "17y") is False, text


# rewards.py: the two tasks, and a reward of one's own ---------------------------------------------


def make_settings(**changes):
    settings = {"task": "math", "reward": "", "data": "", "eval_data": "", "eval_size": 0}
    return SimpleNamespace(**{**settings, "max_prompt_length": 400, **changes})


def example_of(solution="2", **columns):
    return {"prompt": "1 + 1?", "solution": solution, "columns": columns}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The user's current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_reward_of_ones_own_gets_every_column(folder):
    (folder / "every_column.py").write_text(
        "def reward(**columns):\n    seen.update(columns)\n    return [7, True, 0.5, -1]\nseen = {}"
    )
    settings = make_settings(reward="every_column:reward")
    examples = [example_of("2", a=1, prompts="no"), example_of(b=[2], solution={"x": 3})]
    assert compute_rewards(["r", "s", "t", "u"], examples, settings) == [7.0, 1.0, 0.5, -1.0]
    assert load_function("every_column:seen") == {
        "completions": ["r", "s", "t", "u"],
        "prompts": ["1 + 1?"] * 4,
        "solution": ["2", "2", {"x": 3}, {"x": 3}],
        "a": [1, 1, None, None],  # the union of the rows' columns
        "b": [None, None, [2], [2]],
    }


@pytest.mark.parametrize("returned", [[1], [1, 2, 3], [1, math.nan], [1, math.inf]])
def test_a_reward_returns_one_finite_number_for_each_response(returned, monkeypatch):
    monkeypatch.setattr(rewards, "load_function", lambda place: lambda **columns: returned)
    with pytest.raises(UserError, match="a finite number for each response"):
        compute_rewards(["a", "b"], [example_of()], make_settings(reward="my:own"))


WRONG_NAMES = [  # what is given as --reward, what is said
    ("no_such_module:f", "No module named 'no_such_module'"),
    ("has_f.py:f", "No module named 'has_f.py'"),
    ("has_f:g", "has no attribute 'g'"),
    ("has_f", "MODULE:FUNCTION"),
    (":f", "MODULE:FUNCTION"),
    ("lacks_one:f", "No module named 'no_such_library'"),  # the cause
]


@pytest.mark.parametrize("place, told", WRONG_NAMES)
def test_a_wrong_name_of_a_reward_is_one_sentence(place, told, folder):
    (folder / "has_f.py").write_text("def f(**columns): return [1]")
    (folder / "lacks_one.py").write_text("import no_such_library")
    with pytest.raises(UserError, match=told):
        load_function(place)


def test_an_error_in_a_reward_has_its_traceback(folder):
    (folder / "fails.py").write_text("def f(**columns): return [1 / 0]")
    with pytest.raises(ZeroDivisionError):
        compute_rewards(["a"], [example_of()], make_settings(reward="fails:f"))


def test_the_current_folder_takes_no_librarys_place(folder, monkeypatch):
    """A folder datasets/ and a file random.py there stay unread, while and after a reward loads."""
    monkeypatch.setattr("sys.path", [path for path in sys.path if path != ""])
    (folder / "datasets").mkdir()
    for name in ("datasets/__init__.py", "random.py", "beside.py"):
        (folder / name).write_text("")
    code = "import beside\nfrom importlib.machinery import PathFinder\nplaces = "
    code += "[PathFinder.find_spec(name).origin for name in ('datasets', 'random', 'beside')]"
    (folder / "finds.py").write_text(code)
    before = list(sys.path)
    places = load_function("finds:places")
    assert [str(folder) in place for place in places] == [False, False, True]
    with pytest.raises(UserError):
        load_function("finds:nothing")
    assert sys.path == before


# rewards.py: data ---------------------------------------------------------------------------------


ROW = {"problem": "1 + 1?", "answer": "2"}
LILY = "(1) Lily is a knave"
CHAT = [{"role": "user", "content": "1 + 1?"}]
ASKED = f"<|user|>1 + 1?{TASKS['math'].request}<|assistant|>"  # by the template of data/tiny


def write_rows(path, rows):
    """A jsonl file; a row may be a text that stands there as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def loaded(path, rows, **settings):
    """The examples of a jsonl file with these rows."""
    return load_rows(write_rows(path / "a.jsonl", rows), make_settings(**settings), TOKENIZER)


ROWS = [  # a task, a row, its prompt, its solution
    ("math", ROW, ASKED, "2"),
    ("math", {"question": "1 + 1?", "answer": "One more.\n#### 2 "}, ASKED, "2"),  # GSM8K
    ("math", {"problem": "1 + 1?", "solution": r"So $\boxed{2}$."}, ASKED, r"So $\boxed{2}$."),
    ("math", {**ROW, "question": "1 + 1?", "problem": "No."}, ASKED, "2"),
    ("math", {**ROW, "solution": "Add.", "question": None}, ASKED, "2"),
    ("math", {"prompt": CHAT, "solution": "2"}, "<|user|>1 + 1?<|assistant|>", "2"),
    ("math", {**ROW, "prompt": "1 + 1 ="}, "1 + 1 =", "2"),
    ("kk", {"quiz": "Who?", "solution_text_format": LILY, "solution": [False]},
     "<|user|>Who?<|assistant|><think>", LILY),
    ("kk", {"prompt": "Who? ", "solution": LILY}, "Who? ", LILY),
]  # fmt: skip


@pytest.mark.parametrize("task, row, prompt, solution", ROWS)
def test_what_becomes_of_a_row(task, row, prompt, solution, tmp_path):
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "a.parquet")
    settings = make_settings(task=task)
    (example,) = loaded(tmp_path, [row], task=task)
    assert load_rows(tmp_path / "a.parquet", settings, TOKENIZER) == [example]
    assert example["prompt"] == prompt
    assert example["solution"] == solution
    assert example["columns"] == row
    assert example["difficulty"] == ("1" if task == "kk" else "all")


WRONG_ROWS = [  # a task, a row, what is missing
    ("math", {"answer": "2"}, "a text as question, quiz, problem, or a whole prompt"),
    ("math", {**ROW, "problem": 2}, "a text as question"),
    ("math", {**ROW, "problem": None, "prompt": 5}, "a text as question"),
    ("math", {"problem": "1 + 1?"}, "a text as solution_text_format, answer, solution"),
    ("math", {**ROW, "answer": 2}, "a text as solution_text_format"),
    ("math", {"prompt": CHAT, "solution": ["2"]}, "a text as solution_text_format"),
    ("math", '{"problem": ', "Expecting value"),
    ("kk", {"quiz": "Who?", "solution": "Lily"}, r"lines like \(1\) Zoey is a knight, not 'Lily'"),
]


@pytest.mark.parametrize("task, row, told", WRONG_ROWS)
def test_a_row_that_lacks_a_text_is_named(task, row, told, tmp_path):
    good = {"quiz": "Who?", "solution": LILY}  # blank lines do not count
    with pytest.raises(UserError, match=rf"a\.jsonl, row 2: .*{told}"):
        loaded(tmp_path, [good, "", row, good], task=task)


def test_one_line_tells_which_rows_are_used_and_what_the_model_does_not_see(tmp_path, capsys):
    rows = [ROW, {**ROW, "level": 3, "image": "x.png"}, {**ROW, "answer": r"\frac{1}{2"}, ""]
    rows += [{**ROW, "problem": "1 + 1? " * 99}]
    examples = loaded(tmp_path, rows)
    assert [example["difficulty"] for example in examples] == ["all", "3"]
    told = "a.jsonl: 2 of 4 rows used; 1 longer than --max-prompt-length; 1 with a solution that no"
    told += " answer could match; other columns, for the reward: image, level\n"
    assert capsys.readouterr().out == told
    length = len(TOKENIZER(ASKED).input_ids)  # of all that the model reads
    assert len(loaded(tmp_path, [ROW], max_prompt_length=length)) == 1
    assert loaded(tmp_path, [ROW], max_prompt_length=length - 1) == []


@pytest.mark.parametrize("solution", [None, 0, {"target": 24}, "Lily", "12 #### x"])
@pytest.mark.parametrize("task", TASKS)
def test_with_a_reward_of_ones_own_no_solution_is_read(task, solution, tmp_path):
    (example,) = loaded(tmp_path, [{**ROW, "answer": solution}], task=task, reward="my:own")
    assert example["solution"] == solution
    assert example["difficulty"] == "all"


def test_a_prompt_without_tokens_is_refused(tmp_path, monkeypatch):
    """Qwen's tokenizer, not found beside the model, is an empty one."""
    monkeypatch.setattr(rewards, "render_prompt", lambda tokenizer, prompt: "")
    with pytest.raises(UserError, match="is there a tokenizer beside the model"):
        loaded(tmp_path, [ROW])


def no_network(*arguments, **options):
    raise ConnectionError("no network")


NO_FILES = [  # what is given as --data, what is said
    ("folder", "neither a .jsonl nor a .parquet file"),
    ("folder:main:train", "neither a .jsonl nor a .parquet file"),
    ("rows.csv", "neither a .jsonl nor a .parquet file"),
    ("missing.jsonl", "No such file"),
    ("missing.parquet", "Unable to find"),
    ("broken.parquet", "Parquet"),
    ("no/such_name", "no network"),
]


@pytest.mark.parametrize("source, told", NO_FILES)
def test_what_cannot_be_read_is_one_sentence(source, told, folder, monkeypatch):
    (folder / "folder").mkdir()
    for name in ("rows.csv", "broken.parquet"):
        (folder / name).write_text("?")
    monkeypatch.setattr(datasets, "load_dataset", no_network)
    with pytest.raises(UserError, match=f"cannot read {source}: .*{told}"):
        load_rows(source, make_settings(), TOKENIZER)


HUB_NAMES = [  # what is given as --data, what `datasets` is asked for
    ("owner/name", ("owner/name", None, "train")),
    ("owner/name:main", ("owner/name", "main", "train")),
    ("owner/name:main:test+dev", ("owner/name", "main", "test+dev")),
    ("owner/name::test", ("owner/name", None, "test")),
]


@pytest.mark.parametrize("source, asked", HUB_NAMES)
def test_a_data_set_of_the_hub(source, asked, monkeypatch):
    def load_dataset(name, configuration=None, split=None):
        assert (name, configuration, split) == asked
        return datasets.Dataset.from_list([ROW])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(load_rows(source, make_settings(), TOKENIZER)) == 1


def problems(examples):
    return [example["question"] for example in examples]


def test_a_tenth_of_ones_own_data_is_held_out(tmp_path, capsys):
    """The same rows for every seed; what is there twice is not trained on."""
    rows = [{"problem": f"{i // 2}?", "answer": "2"} for i in range(42)]
    own = write_rows(tmp_path / "own.jsonl", rows)
    training, evaluation = load_data(make_settings(data=own, seed=1), TOKENIZER)
    assert problems(evaluation) == ["12?", "13?", "1?", "8?", "16?"]  # rows 24, 26, 2, 16, 32
    assert problems(training) == [
        row["problem"] for row in rows if row["problem"] not in problems(evaluation)
    ]
    assert "32 rows to train on, 5 of 5 to evaluate on" in capsys.readouterr().out
    many = write_rows(tmp_path / "many.jsonl", [{"prompt": f"{i} is"} for i in range(5010)])
    settings = make_settings(data=many, reward="rewards:math_reward")
    assert len(load_data(settings, TOKENIZER)[1]) == 500
    one = write_rows(tmp_path / "one.jsonl", rows[:2])
    with pytest.raises(UserError, match="no row is left to train on"):
        load_data(make_settings(data=one), TOKENIZER)


def test_no_training_question_is_in_the_evaluation_rows(tmp_path):
    """Also where the question is a whole prompt, and beyond --eval-size."""
    rows = [{"problem": f"Say {i}!", "answer": "2", "level": i % 2} for i in range(20)]
    rows += [{"prompt": CHAT, "solution": "2"}]
    own = write_rows(tmp_path / "own.jsonl", [*rows, {**ROW, "problem": "Say 99!"}])
    other = write_rows(tmp_path / "other.jsonl", rows)
    settings = make_settings(data=own, eval_data=other, eval_size=3)
    training, evaluation = load_data(settings, TOKENIZER)
    assert problems(training) == ["Say 99!"]
    assert [example["difficulty"] for example in evaluation] == ["0"] * 3 + ["1"] * 3 + ["all"]
    assert problems(evaluation)[:3] != ["Say 0!", "Say 2!", "Say 4!"]  # a sorted file: its easiest


def test_batches_come_in_a_new_order_each_time_through():
    def batches(seed, skip=0):
        return list(itertools.islice(prompt_stream(range(5), 2, seed, skip), 10 - skip))

    drawn = [[1, 0], [4, 3], [2, 3], [4, 2], [1, 0], [0, 3], [4, 1], [2, 4], [0, 2], [1, 3]]
    assert batches(seed=1) == drawn  # README's run depends on it
    assert batches(seed=1, skip=4) == drawn[4:]
    assert batches(seed=2) != drawn


# rewards.py: prompts ------------------------------------------------------------------------------


def tokenizer_with(template, bos=None):
    """A tokenizer with a chat template (None: of a base model), and perhaps a first token."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = template
    if bos:
        tokenizer.add_special_tokens({"bos_token": bos})
        first = [(bos, tokenizer.bos_token_id)]
        tokenizer._tokenizer.post_processor = TemplateProcessing(f"{bos} $A", special_tokens=first)
    return tokenizer


TURNS = "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{% endfor %}<assistant>"
DROPS = TURNS.replace("messages %}", "messages if turn.role != 'system' %}")
SYSTEM = TASKS["kk"].system

PUZZLE_PROMPTS = [  # a chat template, the prompt of the puzzle "Who?"
    (TURNS, f"<system>{SYSTEM}<user>Who?<assistant><think>"),
    (DROPS, "<user>Who?<assistant><think>"),
    (TURNS + "<think>\n\n", f"<system>{SYSTEM}<user>Who?<assistant><think>\n"),  # DeepSeek's: once
    (None, f"{SYSTEM}\n\nWho?\n\n<think>"),  # a base model: the words
]


@pytest.mark.parametrize("template, prompt", PUZZLE_PROMPTS)
def test_the_prompt_of_a_puzzle(template, prompt, tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [{"quiz": "Who?", "solution": LILY}])
    settings = make_settings(task="kk", max_prompt_length=10_000)
    (example,) = load_rows(source, settings, tokenizer_with(template))
    assert example["prompt"] == prompt


def test_no_later_turn_of_a_chat_is_lost():
    roles = ("system", "user", "assistant", "user")
    chat = [{"role": role, "content": f"{role}?"} for role in roles]
    turns = "<user>user?<assistant>assistant?<user>user?<assistant>"
    assert render_prompt(tokenizer_with(TURNS), chat) == f"<system>system?{turns}"
    assert render_prompt(tokenizer_with(DROPS), chat) == turns
    assert render_prompt(tokenizer_with(None), chat).split() == [f"{role}?" for role in roles]


def test_a_prompt_begins_once_as_the_model_is_used_to():
    """Llama's tokenizer puts a token before every text; a chat template has its own."""
    tokenizer = tokenizer_with(TURNS, bos="<|bos|>")
    assert render_prompt(tokenizer, CHAT) == "<user>1 + 1?<assistant>"
    assert render_prompt(tokenizer, "1 + 1 =") == "<|bos|>1 + 1 ="
    assert render_prompt(tokenizer, "<|bos|>1 + 1 =") == "<|bos|>1 + 1 ="
