r"""The tasks: rule-based rewards for puzzles and mathematics, their prompts, and data files.

    kk_reward(completions, solution, **columns) -> list[float]      3, -0.5, -1 or -3 each
    math_reward(completions, solution, **columns) -> list[float]    1 or 0 each

Mathematics is compared by value where an answer is a number, element by element where it is a list,
a set, a pair or an interval, and as text everywhere else: \sqrt{12} earns nothing for 2\sqrt{3}.

A completion is a string, or a list of chat messages whose last one counts. Any text gets a reward;
none raises. TRL calls rewards in this way (the data set needs a column `solution`):

    GRPOTrainer("Qwen/Qwen2.5-3B-Instruct", reward_funcs=kk_reward, train_dataset=puzzles).train()
"""

import copy
import csv
import functools
import importlib
import itertools
import json
import math
import os
import random
import re
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy
from jinja2 import TemplateError  # what chat templates raise; torch brings jinja2


def message_text(message):
    """A string, or the text of the last of a list of chat messages; "" if there is none."""
    if isinstance(message, list) and message and isinstance(message[-1], dict):
        message = message[-1].get("content")
    return message if isinstance(message, str) else ""


# ------------------------------------------------------------------------------ Knights and Knaves

FORMAT_REWARD, FORMAT_PENALTY = 1.0, -1.0
ALL_CORRECT, SOME_WRONG, NOT_PARSABLE = 2.0, -1.5, -2.0
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
ANY_NAME = r"[^\W\d_][\w'. -]{0,49}?"  # Zoey, Mary Ann, O'Neil; bounded, so time is linear


def kk_reward(completions, solution, **columns):
    r"""Rewards of answers to Knights-and-Knaves puzzles; 3.0 is a right one in the right format.

    A solution is a text like "(1) Zoey is a knight\n(2) Oliver is a knave". A prompt among the
    `columns` that ends in <think> has opened that tag; without `prompts` every one has.
    """
    prompts = columns.get("prompts") or ["<think>"] * len(completions)
    rewards = []
    for completion, prompt, truth in zip(completions, prompts, solution, strict=True):
        roles = read_roles(message_text(truth))
        if not roles:
            raise ValueError(f"`solution` does not give each name one role: {truth!r}")
        opened = "<think>" if message_text(prompt).rstrip().endswith("<think>") else ""
        rewards.append(score_puzzle(opened + message_text(completion), roles))
    return rewards


def score_puzzle(text, roles):
    """The reward of one response: format (1 or -1) plus answer (2, -1.5 or -2).

    All four tags must occur once each and in order, as in the published code.
    >>> score_puzzle("<think>So.</think><answer>Zoey is a knight</answer>", {"zoey": "knight"})
    3.0
    """
    positions = [text.find(tag) for tag in TAGS]
    if any(text.count(tag) != 1 for tag in TAGS) or positions != sorted(positions):
        return FORMAT_PENALTY + NOT_PARSABLE
    answer = read_roles(text[positions[2] + len(TAGS[2]) : positions[3]], roles)
    if answer is None:
        return FORMAT_REWARD + NOT_PARSABLE
    return FORMAT_REWARD + (ALL_CORRECT if answer == roles else SOME_WRONG)


def read_roles(text, names=None):
    """Who is what, in lower case; None unless everybody (of `names`) has exactly one role.

    A text must name as many people as it has role words, counted as substrings. So an answer cannot
    list both roles for a name, and a solution cannot lose a person.
    >>> read_roles("(1) Mary Ann is a knave (2) Ann is a knight")
    {'mary ann': 'knave', 'ann': 'knight'}
    """
    text = text.lower()
    name = ANY_NAME if names is None else "|".join(map(re.escape, names))
    roles = dict(re.findall(rf"\b(?:and\s+)?({name})\s+is\s+a\s+(knight|knave)\b", text))
    complete = names is None or roles.keys() == names.keys()
    return roles if complete and len(roles) == len(re.findall("knight|knave", text)) else None


# ------------------------------------------------------------------------------------- Mathematics
# Both answers are rewritten by one table, and then compared: numbers by value, lists and pairs
# element by element, everything else as text. Nothing is worked out: neither 5+6 nor 22/2 is 11, or
# a copy of the question would be an answer. Fractions are exact: 0.333 is not 1/3.

MAX_LENGTH = 300  # characters of an answer; anything longer is compared as it stands


def math_reward(completions, solution, **columns):
    r"""1.0 where the last \boxed{} of a completion is its solution, such as \frac12, else 0.0."""
    rewards = []
    for completion, truth in zip(completions, solution, strict=True):
        answer = extract_boxed(message_text(completion)) or ""
        rewards.append(float(answers_match(answer, solution_text(truth))))
    return rewards


def solution_text(solution):
    r"""A solution as text, without its box if it has one: "So $\boxed{9}$." is "9"."""
    text = str(solution) if isinstance(solution, (str, int, float)) else ""
    boxed = extract_boxed(text)
    if boxed is not None:
        text = boxed
    if text.strip() in ("", "nan"):
        raise ValueError(f"`solution` does not give an answer: {solution!r}")
    return text


def extract_boxed(text):
    r"""The content of the last \boxed{} (or \fbox{}) after the last </think>, or None.

    >>> extract_boxed(r"\boxed{1}</think> So $\boxed{\frac{1}{2}}$, in \boxed as you asked.")
    '\\frac{1}{2}'
    """
    text = text.rpartition("</think>")[2]
    without_braces = r"-?(?:\.?[0-9]|\\[a-z])[^\s$]*"  # \boxed 5
    boxes = list(re.finditer(rf"\\(?:boxed|fbox)\s*(?:\{{|({without_braces}))", text))
    if not boxes:
        return None
    if boxes[-1][1]:
        return boxes[-1][1]
    start = boxes[-1].end()
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)  # \{ and \} do not nest
        if depth == 0:
            return text[start : start + brace.start()]
    return None


def answers_match(predicted, expected):
    r"""Whether a predicted LaTeX answer is the expected one.

    One of the two may lack a label (x = 5) or the units; another label or unit is wrong. A percent
    sign is a unit, too: 20\% counts as 20, as in the paper's grader.
    >>> answers_match("x = 0.5", r"\frac12 \text{ cm}"), answers_match("2, 1", r"\{1, 2\}")
    (True, True)
    >>> answers_match("5+6", "11"), answers_match("5 kg", "5 cm"), answers_match("(2,1)", "(1,2)")
    (False, False, False)
    """
    if max(len(predicted), len(expected)) > MAX_LENGTH:
        return predicted == expected
    answer = rewrite(predicted)
    truth = rewrite(expected)
    if not answer:
        return False
    if ("=" in answer) != ("=" in truth):
        answer = without_label(answer)
        truth = without_label(truth)
    if read(answer, with_units=False) != read(truth, with_units=False):
        return False
    units_in_both = has_units(answer) and has_units(truth)
    return not units_in_both or read(answer) == read(truth)


def is_compared_as_text(solution):
    r"""Whether a part of a solution is no number, word or name: 2\sqrt{3}, but not 2, Yes or \pi.

    No other spelling of such a part, such as \sqrt{12}, is paid.
    """

    def is_text(value):
        if isinstance(value, tuple):
            return any(is_text(part) for part in value[1:])
        words_or_name = r"[A-Za-z ]+|-?\\?[A-Za-z]+"
        return isinstance(value, str) and not re.fullmatch(words_or_name, value)

    text = solution_text(solution)
    return len(text) > MAX_LENGTH or is_text(read(rewrite(text), with_units=False))


def first_of_row(table):
    """A table of words, its rows cut by | or lines → {word: the first word of its row}."""
    rows = table.replace("\n", "|").split("|")
    return {word: row.split()[0] for row in rows for word in row.split()}


# The first of a row is the spelling that is compared.
SPELLINGS = first_of_row(r"""* \cdot \times · × | - − – | \pm ± | \cup ∪ | \sqrt √ | ^2 ² | ^3 ³
= \in ∈ | < \lt | > \gt | ≠ \ne \neq != | ≤ \le \leq \leqslant <= | ≥ \ge \geq \geqslant >=
\frac{1}{2} ½ | \frac \dfrac \tfrac \cfrac | \binom \dbinom \tbinom
\infty ∞ | \emptyset \varnothing ∅ | \text \textbf \mathrm \mathbf \mbox
percent \% % | degree \degree ° | dollar \$ | euro €
\alpha α | \beta β | \gamma γ | \theta θ | \lambda λ | \mu μ | \pi π | \sigma σ | \phi φ""")
BLANKS = r"\, \; \: \! \( \) \[ \] $ ~ \left \right \big \Big \quad \qquad \displaystyle"
SPELLINGS |= dict.fromkeys(BLANKS.split(), " ")


def one_spelling(sign):
    """The match of a sign → the spelling of it that is compared, with a space on either side."""
    return " " + SPELLINGS.get(sign[0], sign[0]) + " "


def without_commas(number):
    """The match of 1,200 → 1200."""
    return number[0].replace(",", "")


SIGN = r"\\[A-Za-z]+|\\.|[<>!]=|[$%~]|[^\x00-\x7f]"  # a command such as \pi or \%, or a sign
THOUSANDS = r"(?<![0-9.])[1-9][0-9]{0,2}(,[0-9]{3})+(?![0-9])"
OUTSIDE = r"(?![^(\[{]*[)\]}])"  # of brackets: the next bracket does not close one
NO_RELATION = "(?=[^=<>≤≥≠]*$)"  # such as x > 1 follows
BRACES = r"\{(?:[^{}]|\{[^{}]*\})*\}"  # with what stands in them, perhaps braces again
IN_FRONT = r"(?<![^,=(\[{])"  # of an element
REWRITES = (  # in this order, each with an example
    ("[\u200b-\u200d\u2060\ufeff]", ""),  # marks that have no width
    (r"\\\\(?=[a-z])", r"\\"),  # \\frac is \frac
    (r"(?<=[0-9])(\{,\}|,\\!|\\,) *(?=[0-9]{3}(?![0-9]))", ""),  # 1{,}200 is 1200
    (r"(?<![0-9.,])(\\\$|€) *(-?[0-9.,]*[0-9])", r"\2\1"),  # \$5 is 5\$
    (r"\^ *\{? *\\circ *\}?", "°"),  # 90^\circ is 90°
    (SIGN, one_spelling),  # \dfrac is \frac
    (THOUSANDS + OUTSIDE, without_commas),  # 1,200 is 1200; but (1,200) is a pair
    (r"\\text *\{([^{}]*)\bm\b", r"\\text{\1meter"),  # \text{ m}: elsewhere m is a variable
    (r"\\text *\{([^{}]*)\bs\b", r"\\text{\1second"),  # \text{ m/s}
    (r"\\text *\{([^{}]*)\}", r" \1 "),  # \text{Yes} is Yes
    (r"(\\(?:frac|binom|sqrt|overline)) *([0-9A-Za-z])", r"\1{\2}"),  # \sqrt3 is \sqrt{3}
    (rf"(\\(?:frac|binom) *{BRACES}) *([0-9A-Za-z])", r"\1{\2}"),  # \frac{1}2 is \frac{1}{2}
    (r"([\^_]) *(-?[0-9]+|[A-Za-z])", r"\1{\2}"),  # x^2 is x^{2}
    (r"(?<![0-9])\.(?= *[0-9\\])", "0."),  # .5 is 0.5
    (";", ","),  # 1; 2 is 1, 2
    (r"\s+", " "),  # one space, so that the next rows need not count them
    (rf",? ?\band\b{NO_RELATION}", ","),  # 2, 3, and 5 is a list; x > 1 and x < 5 is none
    (rf",? ?\bor\b{NO_RELATION}", ";"),  # 2 or 3 is a list as well
    (r" (?![A-Za-z0-9])|(?<![A-Za-z0-9]) ", ""),  # x + 1 is x+1
    (r"(?<=[0-9]) (?=[A-Za-z])|(?<=[A-Za-z]) (?=[0-9])", ""),  # 2 x is 2x; but 5 6 is not 56
    (r"\\([{}])", r"\1"),  # \{1,2\} is {1,2}
    (rf"{IN_FRONT}\+", ""),  # +2 is 2
    (rf"{IN_FRONT}\\frac\{{-([0-9]+)\}}", r"-\\frac{\1}"),  # \frac{-1}{2} is -\frac{1}{2}
)


def rewrite(text):
    r"""An answer in the one spelling in which answers are compared.

    >>> rewrite(r"$x = \dfrac12 \text{ cm}$"), rewrite(r"\left( 1,\, 1{,}200 \right)")
    ('x=\\frac{1}{2}cm', '(1,1200)')
    """
    for pattern, replacement in REWRITES:
        text = re.sub(pattern, replacement, text)
    return text.strip().rstrip(".,")


GREEK = "alpha|beta|gamma|delta|theta|lambda|mu|sigma|phi|omega"
NAME = rf"(?:[A-Za-z]|\\(?:{GREEK}))(?:_\{{[^{{}}]+\}})?(?:\([a-z]\))?"  # x, x_{1}, f(x)
POINT = r"\([a-z](?:,[a-z])+\)"  # (x,y)
LABEL = rf"(?<![^,])({NAME}|{POINT})="  # at the beginning or behind a comma


def without_label(text):
    """The value of "x=5" is "5", of "x=1,x=2" "1,2"; but "x=1,y=2" has more to say."""
    one_label = len(set(re.findall(LABEL, text))) == 1
    return re.sub(LABEL, "", text) if one_label else text


def read(text, with_units=True):
    r"""A rewritten answer → a value that is equal (==) for equal answers.

    A number is a Fraction; a list, a pair, an equation or a quantity is a tuple whose first element
    says what it is; the rest is text.
    >>> read("(0.5,x)"), read("2,1"), read("5cm")
    (('()', Fraction(1, 2), 'x'), ('{}', Fraction(1, 1), Fraction(2, 1)), ('cm', Fraction(5, 1)))
    """
    elements = split_list(text)
    if len(elements) > 1:
        values = [read(element, with_units) for element in elements]
        if ";" in text and all(value == values[0] for value in values):
            return values[0]  # 1/2 or 0.5: one number in two spellings
        return ("{}", *sorted(values, key=repr))  # in any order
    if is_one_bracket(text):
        kind = text[0] + text[-1]
        elements = split_list(text[1:-1])
        if kind == "{}" or (kind == "()" and len(elements) == 1):  # (5) and {5} are 5
            return read(text[1:-1], with_units)
        return (kind, *[read(element, with_units) for element in elements])
    if text.count("=") == 1:
        left, _, right = text.partition("=")
        return ("=", read(left, with_units), read(right, with_units))
    quantity, unit = split_unit(text)
    value = number(quantity)
    if value is None:
        value = quantity
    elif "percent" in unit and abs(value) <= 1:
        return (unit, value)  # a share such as 0.5 is not 0.5 percent
    return (unit, value) if unit and with_units else value


def has_units(text):
    """Whether a rewritten answer has a unit somewhere."""
    return read(text) != read(text, with_units=False)


def depths(text):
    """In how many brackets each sign of a text stands: "(a)b" → [1, 1, 0, 0]."""
    steps = [(sign in "([{") - (sign in ")]}") for sign in text]
    return list(itertools.accumulate(steps))


def split_list(text):
    """The elements between commas that stand in no bracket: "(1,2),3" → ["(1,2)", "3"]."""
    cuts = [i for i, depth in enumerate(depths(text)) if depth == 0 and text[i] in ",;"]
    starts = [0] + [cut + 1 for cut in cuts]
    return [text[start:end] for start, end in zip(starts, cuts + [len(text)])]


def is_one_bracket(text):
    """Whether the first sign is a bracket that the last one closes: (1,2), but not (1)(2) or ()."""
    return len(text) > 2 and text[0] in "([{" and text[-1] in ")]}" and 0 not in depths(text)[:-1]


UNITS = first_of_row("""percent | degree degrees | radian radians
dollar dollars | cent cents | euro euros | pound pounds lb lbs | ounce ounces oz
mm | cm centimeter centimeters | meter meters | km kilometer kilometers
inch inches in | foot feet ft | yard yards | mile miles | mph | square sq | cubic | per
ml | liter liters | gallon gallons | cup cups | gram grams | kg kilogram kilograms | ton tons
second seconds | minute minutes min | hour hours | day days | week weeks | month months
year years | unit units | way ways | time times | point points | value values
solution solutions | person people | student students | child children | man men | woman women
book books | page pages | apple apples | ball balls | card cards | coin coins""")


def split_unit(text):
    r"""A quantity and its unit, "" where there is none that is known.

    >>> split_unit(r"16\pi cm^{2}"), split_unit("25square feet"), split_unit("3x")
    (('16\\pi', 'cm square'), ('25', 'foot square'), ('3x', ''))
    """
    parts = re.fullmatch(r"((?:[-+*/^_.0-9(){} ]|\\frac|\\sqrt|\\pi)+?)([A-Za-z].*)", text)
    if parts is None:
        return text, ""
    unit = parts[2].lower().replace("/", " per ")
    unit = unit.replace("^{2}", " square").replace("^{3}", " cubic")
    unit = re.sub(r"\b(square|sq|cubic) (\w+)", r"\2 \1", unit)
    words = [UNITS.get(word) for word in unit.split()]
    if None in words or words[0] in ("per", "square", "cubic"):
        return text, ""
    return parts[1].strip(), " ".join(words)


def number(text):
    r"""The value of a number, or None: 0.75, 1.5e3, 0.\overline{3}, 3/4, \frac{3}{4}, 2\frac{1}{3}.

    >>> number("0.75"), number(r"2\frac{1}{3}"), number("6/8")  # the last can still be reduced
    (Fraction(3, 4), Fraction(7, 3), None)
    """
    if re.fullmatch(r"-?[0-9]*\.?[0-9]+([eE][-+]?[0-9]{1,2})?", text):
        return Fraction(text)
    sign = -1 if text.startswith("-") else 1
    digits = text.removeprefix("-")
    repeating = re.fullmatch(r"([0-9]+\.([0-9]*))\\overline\{([0-9]+)\}", digits)
    if repeating:
        start, places, period = repeating.groups()
        rest = Fraction(int(period), 10 ** len(period) - 1) / 10 ** len(places)
        return sign * (Fraction(start + "0") + rest)
    digits = re.sub(r"\\frac\{([0-9]+)\}\{([0-9]+)\}$", r" \1/\2", digits).strip()
    mixed = re.fullmatch(r"(?:([0-9]+) )?([0-9]+/[1-9][0-9]*)", digits)
    if mixed is None:
        return None
    whole, part = mixed.groups()
    fraction = Fraction(part)
    if str(fraction) != part or (whole and fraction > 1):
        return None
    return sign * (int(whole or 0) + fraction)


# ---------------------- The two tasks: from a data file to rows, a prompt, responses and a reward

KK_SYSTEM_PROMPT = """You are a helpful assistant. You first think about the problem and then \
answer it. Write your reasoning between <think> and </think>, and after it your final answer \
between <answer> and </answer>. You will be given a logic puzzle. Once you have worked it out, \
list who everybody is, one numbered line for each person, like this: <answer> (1) Zoey is a knight
(2) Oliver is a knave
(3) Ava is a knight </answer>"""

MATH_REQUEST = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Task:
    """How a question becomes a prompt, and what a response earns."""

    reward: object  # f(completions, solution, **columns) -> list of floats
    solved: float  # a response counts as right from this reward on
    difficulty: str  # what the tables are split by
    system: str = ""  # the system message
    request: str = ""  # what follows the question
    opening: str = ""  # what the assistant's turn begins with

    def messages(self, question):
        """A question as a chat."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": question + self.request}]

    def table_text(self, tables):
        """Tables of `tally` {title: table} as text: a line for each measure and difficulty."""
        first = next(iter(tables.values()))
        lines = [("", self.difficulty, "prompts", *tables)]
        for measure in [name for name in next(iter(first.values())) if name != "prompts"]:
            for difficulty, row in first.items() if measure != "reward" else ():
                cells = (table[difficulty][measure] for table in tables.values())
                cells = ("{:.2f} [{:.2f}, {:.2f}]".format(*cell) for cell in cells)
                lines.append((measure, difficulty, row["prompts"], *cells))
            means = ([row[measure][0] for row in table.values()] for table in tables.values())
            cells = (f"{numpy.mean(values):.2f}{'':13}" for values in means)
            lines.append((measure, "mean", "", *cells))
        columns = "{:<8}{:>8}{:>9}" + "{:>21}" * len(tables)
        return "\n".join(columns.format(*line).rstrip() for line in lines)


TASKS = {
    "kk": Task(kk_reward, 3.0, "people", system=KK_SYSTEM_PROMPT, opening="<think>"),
    "math": Task(math_reward, 1.0, "level", request=f"\n\n{MATH_REQUEST}"),
}


def question_and_solution(row):
    """What a row asks, its solution, and whether what it asks is a whole prompt: by its columns."""
    if row.get("reward_model"):  # verl: the prompt is chat messages
        truth = row["reward_model"]["ground_truth"]
        truth = truth["solution_text_format"] if isinstance(truth, dict) else truth
        return row["prompt"], truth, True
    if row.get("prompt") and to_text(row.get("solution")):  # TRL: chat messages, or text
        return row["prompt"], row["solution"], True
    if "quiz" in row:  # K-and-K/knights-and-knaves
        return row["quiz"], row.get("solution_text_format"), False
    if "problem" in row:  # DeepScaleR, MATH-500, and MATH, which has no answer but the box
        answer = row.get("answer", extract_boxed(to_text(row.get("solution"))))
        return row["problem"], answer, False
    return row.get("question"), to_text(row.get("answer")).split("####")[-1], False  # GSM8K


def to_text(value):
    """As text; "" for null, NaN, infinity, lists. 1e20 in digits: only a copy would match 1e+20."""
    if isinstance(value, float):
        value = int(value) if value.is_integer() else value if math.isfinite(value) else None
    return "" if value is None or isinstance(value, (list, dict, bytes)) else str(value)


class UserError(Exception):
    """Something that the user can put right: ends the program with one sentence and exit code 2."""


@contextmanager
def user_errors(problem):
    """Whatever goes wrong within, in a library or a user's code, is told as one sentence."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"{problem} ({reason})") from error


def load_data(args, tokenizer):
    """Training rows (none with --eval-only) and, of each difficulty, --eval-size evaluation rows.

    Without --eval-data a tenth of --data, at most 500 rows, is held out, always the same ones. A
    training row goes if its question contains an evaluation question or is part of one, also of one
    beyond --eval-size.
    """
    if args.eval_only and args.data and not args.eval_data:
        raise UserError("--eval-only evaluates --eval-data: give that instead of --data")
    if args.reward:
        load_function(args.reward)  # a wrong name is told at once
    files = Path(__file__).resolve().parent / "data"
    source = args.data or files / f"{args.task}_train.jsonl"
    rows = [] if args.eval_only else load_rows(source, args, tokenizer)
    if args.data and rows and not args.eval_data:
        held_out = random.Random(0).sample(rows, min(500, math.ceil(len(rows) / 10)))
    else:
        held_out = load_rows(args.eval_data or files / f"{args.task}_test.jsonl", args, tokenizer)
    keys = {row["key"] for row in held_out}
    kept = [row for row in rows if not any(key in row["key"] or row["key"] in key for key in keys)]
    chosen = []
    for level in sorted({row["difficulty"] for row in held_out}, key=lambda x: (len(x), x)):
        chosen += [row for row in held_out if row["difficulty"] == level][: args.eval_size or None]
    told = f"{len(kept)} training and {len(chosen)} of {len(held_out)} evaluation prompts"
    if args.data and rows:
        why = "also in --eval-data" if args.eval_data else "held out for evaluation"
        told += f"; {len(rows) - len(kept)} of {len(rows)} rows are {why}"
    if rows and not kept:
        raise UserError(f"nothing is left to train on: {told}")
    print(told)
    return kept, chosen


def load_rows(source, args, tokenizer):
    """The rows of a data file or hub data set that can be used; one line tells of the others."""
    with user_errors(f"cannot read {source}"):
        table = read_table(str(source))
    if not table:
        raise UserError(f"{source} is empty: it has no rows")
    names = dict.fromkeys(itertools.chain(*(row for row in table if isinstance(row, dict))))
    rows, left_out = [], {}  # left_out: reason → the numbers of its rows
    for number, columns in enumerate(table, 1):
        try:
            with user_errors("that cannot be read"):  # whatever goes wrong with a row
                row = make_row(columns, args, tokenizer)
            row["columns"] = {name: columns.get(name) for name in names if name is not None}
            if args.task == "math" or int(row["difficulty"]) in args.people:
                rows.append(row)
        except UserError as reason:
            left_out.setdefault(str(reason), []).append(str(number))
    told = [f"{len(them)} {why} (row {', '.join(them[:9])})" for why, them in left_out.items()]
    if args.task == "math" and not args.reward:
        texts = sum(is_compared_as_text(row["solution"]) for row in rows)
        told += [f"{texts} compared as text (see math-verify in data/GUIDE.md)"] * bool(texts)
    found = f"{len(table)} rows, {sum(map(len, left_out.values()))} left out: {', '.join(told)}"
    if not rows:
        found += f" (columns: {', '.join(map(str, names))}; --task {args.task}"
        found += f" --people {' '.join(map(str, args.people))})" if args.task == "kk" else ")"
        raise UserError(f"no prompts are left of {source}, see data/GUIDE.md: {found}")
    if told:
        print(f"{Path(source).name}: {found}")
    return rows


def prompt_stream(rows, size, seed, skip=0):
    """Endless batches of `size` rows, in a new random order each time through."""
    generator = random.Random(seed)
    epochs = (generator.sample(rows, len(rows)) for _ in itertools.count())
    stream = itertools.islice(itertools.chain.from_iterable(epochs), size * skip, None)
    while True:
        yield list(itertools.islice(stream, size))


def read_table(source):
    """The rows of a jsonl, json, csv or parquet file or a hub data set name:configuration:split."""
    kind = Path(source).suffix.lower()
    if kind in (".json", ".jsonl"):  # utf-8-sig: Excel and PowerShell mark a file's beginning
        text = Path(source).read_text(encoding="utf-8-sig")
        if kind == ".jsonl":  # each line becomes a list, so that an error has the line's number
            text = "[" + text.replace("\n", "],\n[") + "]"
        return list(itertools.chain(*json.loads(f"[{text}]")))
    if kind == ".csv":
        with open(source, newline="", encoding="utf-8-sig") as stream:
            table = csv.DictReader(stream)
            if len(set(table.fieldnames or ())) < len(table.fieldnames or ()):
                raise UserError(f"{source} has two columns of one name: give them different ones")
            return list(table)
    if kind != ".parquet" and Path(source).is_file():
        raise UserError(f"{source} is no jsonl, json, csv or parquet file: make it one of these")
    import datasets  # here, because it takes a second to import
    import pyarrow.parquet

    if kind == ".parquet":
        data = datasets.Dataset(pyarrow.parquet.read_table(source))
    else:
        name, configuration, split = (source.split(":") + ["", ""])[:3]
        data = datasets.load_dataset(name, configuration or None, split=split or "train")

    def as_meant(value, kind):
        """A class by its name; float32 .3 without the digits that it gets as float64."""
        if isinstance(value, int) and isinstance(kind, datasets.ClassLabel):
            return kind.int2str(value)
        short = isinstance(value, float) and kind.dtype == "float32"
        return float(str(numpy.float32(value))) if short else value

    kinds = data.features
    return [{name: as_meant(row[name], kinds[name]) for name in row} for row in data.to_list()]


UNUSABLE = (  # solutions of mathematics, and why
    (r"\A(?i:proof|not ?found|n/a|nan|null|None)\.?\Z", "whose solution says that there is none"),
    (r"(?s)\A\[\s*(['\"]).*\1\s*\]\Z", "whose solution is a list"),
    (r"(?:(?!per\b)[A-Za-z]{2,}[^A-Za-z\\]+){4}[A-Za-z]{2}", "whose solution is a sentence"),
    (r"[\0-\b\v\f]|[\t\r](?=[a-z])|\n(?=eq?\b|u\b|ot)", "with LaTeX that JSON has cut"),
)


def make_row(columns, args, tokenizer):
    """The columns of a data set → prompt, solution, difficulty, and the question twice: as it was
    `asked`, and as a `key` by which questions are compared. UserError: why a row cannot be used."""
    if not isinstance(columns, dict):
        raise UserError("without columns")
    if any(columns.get(None, ())):  # where csv puts them
        raise UserError("with more cells than columns")
    question, solution, is_whole = question_and_solution(columns)
    question = question or ""
    solution = to_text(solution).strip(" ")
    task = TASKS[args.task]
    prompt = question
    opening = ""
    if not is_whole:
        prompt, opening = task.messages(question), task.opening
        if args.reward and question == columns.get("question"):  # no words of ours
            prompt = [{"role": "user", "content": question}]
            opening = ""
    if not isinstance(question, str):
        question = " ".join(turn["content"] for turn in question if turn["role"] != "system")
    asked = " ".join(question.split())
    prompt = render_prompt(tokenizer, prompt, opening)
    if not asked or not solution.strip():
        raise UserError("without a prompt or a (boxed) solution")
    choices = columns.get("choices") or columns.get("options") or ()
    choices = [choices] if isinstance(choices, str) else choices
    if not all(str(choice) in question for choice in choices):
        raise UserError("with choices that its question does not show")
    if re.search(r"[\b\f](?=[a-z])", prompt):
        raise UserError(UNUSABLE[-1][1])
    for pattern, reason in UNUSABLE if args.task == "math" and not args.reward else ():
        if re.search(pattern, solution):
            raise UserError(reason)
    # A solution, as the answer in the form of either task, must earn the full reward.
    response = rf"</think><answer>{solution}</answer>\boxed{{{solution}}}"
    people = len(read_roles(solution) or ())
    unknown = args.task == "kk" and not people
    if unknown or not args.reward and task.reward([response], [solution]) != [task.solved]:
        raise UserError(f"whose solution --task {args.task} cannot read")
    if len(tokenizer(prompt, add_special_tokens=False).input_ids) > args.max_prompt_length:
        raise UserError(f"longer than --max-prompt-length {args.max_prompt_length}")
    level = to_text(columns.get("level")).strip().removesuffix(".0") or "all"
    return {
        "asked": asked,
        "key": asked.casefold(),
        "prompt": prompt,
        "solution": solution,
        "difficulty": str(people) if args.task == "kk" else level,
    }


# Where one of these stands in a message, a chat template has been applied already.
CHAT_MARKS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "[INST]", "<|assistant|>")


def render_prompt(tokenizer, messages, opening=""):
    """The text that the model continues: chat messages up to its own turn, or plain text."""
    is_text = isinstance(messages, str)
    text = messages if is_text else "\n\n".join(message["content"] for message in messages)
    is_whole = is_text or len(messages) == 1 and any(mark in text for mark in CHAT_MARKS)
    if tokenizer.chat_template and not is_whole:
        return render_chat(tokenizer, messages, opening)
    if not is_whole:  # a base model: the words without a chat
        text += f"\n\n{opening}"
    if tokenizer("x")["input_ids"][:1] == [tokenizer.bos_token_id]:  # as for Llama and Gemma
        text = tokenizer.bos_token + text.removeprefix(tokenizer.bos_token)
    return text


def render_chat(tokenizer, messages, opening):
    """Chat messages through the template. A system message that it refuses or loses goes into the
    user's turn; where the vocabulary lacks its words (data/tiny was taught without one) it goes.
    `opening` is added where the template has not opened the turn with it."""
    forms = [messages]
    if len(messages) > 1 and messages[0]["role"] == "system":
        system, user, *others = messages
        known = tokenizer.unk_token_id not in tokenizer(system["content"])["input_ids"]
        content = f"{system['content']}\n\n{user['content']}" if known else user["content"]
        forms.append([{**user, "content": content}, *others])
    for form in forms:
        with suppress(TemplateError):
            text = tokenizer.apply_chat_template(form, tokenize=False, add_generation_prompt=True)
            asked = [turn["content"].split() for turn in form if turn["role"] != "assistant"]
            if all(" ".join(words) in " ".join(text.split()) for words in asked):
                return text if text.rstrip().endswith(opening) else text + opening
    raise UserError("whose question the chat template of --model refuses or leaves out")


def compute_rewards(texts, rows, args):
    """The reward R of each response: the task's, or that of --reward MODULE:FUNCTION.

    It has TRL's signature, f(completions, solution, **columns) -> list of numbers. It gets strings,
    for chats as well, and copies of all columns of the data as lists with one entry a response.
    None, by which a reward is left out in TRL, is refused.
    """
    function = load_function(args.reward) if args.reward else TASKS[args.task].reward
    columns = {name: [row["columns"][name] for row in rows] for name in rows[0]["columns"]}
    columns["completions"] = list(texts)
    columns["solution"] = [row["solution"] for row in rows]
    columns["prompts"] = [row["prompt"] for row in rows]
    with user_errors(f"the reward {args.reward or args.task} failed"):
        rewards = function(**copy.deepcopy(columns))
        numbers = [float(reward) for reward in rewards]
    if isinstance(rewards, dict) or len(numbers) != len(texts) or not numpy.isfinite(numbers).all():
        raise UserError(f"{args.reward} must return a list: one finite number for each response")
    return numbers


@functools.cache
def load_function(place):
    """'my_reward:function' → the function of my_reward.py in the current folder; or a function."""
    if callable(place):
        return place
    module, _, name = place.partition(":")
    sys.path.append(os.getcwd())
    with user_errors(f"--reward {place}: give MODULE:FUNCTION"):
        loaded = importlib.import_module(module)
        own = Path(*module.split(".")).with_suffix(".py")
        if own.is_file() and not own.samefile(loaded.__file__):
            raise UserError(f"--reward {place}: {loaded.__file__} has that name: rename your file")
        function = getattr(loaded, name)
        if not callable(function):
            raise TypeError(f"{name} must be callable")
        return function


# ------------------------------------------------- From the rewards of held-out rows to an accuracy


def tally(rows, answers, solved_reward):
    """Greedy accuracy, avg@k and pass@k per difficulty, each (mean, low, high); and mean reward.

    `answers` has (response, reward) pairs for each row, the greedy one first, then k samples.
    Returns {difficulty: {"prompts": n, "greedy": ..., "avg@k": ..., "pass@k": ..., "reward": ...}}.

    >>> table = tally([{"difficulty": "2"}], [[("a", 3.0), ("b", 3.0), ("c", -1.0)]], 3.0)
    >>> table["2"]["avg@2"][0], table["2"]["reward"]
    (0.5, (1.0,))
    """
    table = {}
    for difficulty in dict.fromkeys(row["difficulty"] for row in rows):
        group = [each for row, each in zip(rows, answers) if row["difficulty"] == difficulty]
        rewards = numpy.array([[reward for _, reward in each] for each in group])
        right = rewards >= solved_reward  # (prompts, 1 + k)
        k = len(group[0]) - 1
        table[difficulty] = {"prompts": len(group), "greedy": wilson_interval(right[:, 0])}
        if k:
            table[difficulty][f"avg@{k}"] = wilson_interval(right[:, 1:].mean(1))
            table[difficulty][f"pass@{k}"] = wilson_interval(right[:, 1:].any(1))
        sampled = rewards[:, 1:] if k else rewards
        table[difficulty]["reward"] = (float(sampled.mean()),)
    return table


def wilson_interval(values):
    """The mean of values between 0 and 1, and its 95 % interval (Wilson's score interval).

    Where they are not just 0 or 1, as for avg@k, it is rather too wide.

    >>> [round(number, 3) for number in wilson_interval([0, 1] * 50)]
    [0.5, 0.404, 0.596]
    """
    z = 1.959964
    count = len(values)
    mean = float(numpy.mean(values))
    centre = (mean + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count**2))
    return mean, max(0.0, centre - half), min(1.0, centre + half)
