r"""The tasks: rule-based rewards for puzzles and mathematics, their prompts, and data files.

    kk_reward(completions, solution, **columns) -> list[float]      3, -0.5, -1 or -3 each
    math_reward(completions, solution, **columns) -> list[float]    1 or 0 each

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
import traceback
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from decimal import Decimal
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

FORMAT_REWARD = 1.0
FORMAT_PENALTY = -1.0
ALL_CORRECT = 2.0
SOME_WRONG = -1.5
NOT_PARSABLE = -2.0
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
LETTER = r"[^\W\d_]"  # of any alphabet: a sign of a word, but neither a digit nor _
ANY_NAME = rf"{LETTER}[\w'. -]{{0,49}}?"  # Zoey, Mary Ann, O'Neil; bounded, so time is linear
ONE_WORD = rf"{LETTER}[\w'-]{{0,49}}"  # in prose: the word before a name is not part of it


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
    list both roles for a name, and a solution cannot lose a person. Without `names` the text is a
    solution: names of several words stand behind a number, and nothing but "and" between people.
    >>> read_roles("(1) Mary Ann is a knave (2) Ann is a knight")
    {'mary ann': 'knave', 'ann': 'knight'}
    """
    text = text.lower()
    if names is None:
        any_name = rf"[0-9][.)]\s*{ANY_NAME}|{ONE_WORD}"
    else:
        alternatives = "|".join(re.escape(name) for name in names)
        any_name = rf"\b(?:{alternatives})"
    person = rf"({any_name})\s+is\s+a\s+(knight|knave)\b"
    roles = {}
    for name, role in re.findall(person, text):
        roles[name.lstrip("0123456789.) \n\t")] = role  # without the number before it
    if names is None:
        other_words = re.findall(rf"{LETTER}+", re.sub(person, "", text))
        is_complete = set(other_words) <= {"and"}
    else:
        is_complete = roles.keys() == names.keys()
    role_words = re.findall("knight|knave", text)
    return roles if is_complete and len(roles) == len(role_words) else None


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
        if brace[0] == "{":  # \{ and \} do not nest
            depth += 1
        elif brace[0] == "}":
            depth -= 1
        if depth == 0:
            return text[start : start + brace.start()]
    return None


def answers_match(predicted, expected):
    r"""Whether a predicted LaTeX answer is the expected one.

    One of the two may lack a label (x = 5) or the units; another label or unit is wrong. A percent
    sign is a unit, too: 20\% counts as 20, as in the paper's grader, but 0.5\% not as 0.5.
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
    first_words = {}
    for row in table.replace("\n", "|").split("|"):
        words = row.split()
        for word in words:
            first_words[word] = words[0]
    return first_words


# The first of a row is the spelling that is compared.
SPELLINGS = first_of_row(r"""* \cdot \times · × | - − – | \pm ± | \cup ∪ | \sqrt √ | ^2 ² | ^3 ³
= \in ∈ | < \lt | > \gt | ≠ \ne \neq != | ≤ \le \leq \leqslant <= | ≥ \ge \geq \geqslant >=
\frac{1}{2} ½ | \frac \dfrac \tfrac \cfrac | \binom \dbinom \tbinom
\infty ∞ | \emptyset \varnothing ∅ | \text \textbf \mathrm \mathbf \mbox
percent \% % | degree \degree ° | dollar \$ | euro €
\alpha α | \beta β | \gamma γ | \theta θ | \lambda λ | \mu μ | \pi π | \sigma σ | \phi φ""")
BLANKS = r"\, \; \: \! \( \) \[ \] $ ~ \left \right \big \Big \quad \qquad \displaystyle"
SPELLINGS |= dict.fromkeys(BLANKS.split(), " ")


def one_spelling(match):
    """The match of a sign → the spelling of it that is compared, with a space on either side."""
    sign = match[0]
    return " " + SPELLINGS.get(sign, sign) + " "


def without_commas(match):
    """The match of 1,200 → 1200."""
    return match[0].replace(",", "")


SIGN = r"\\[A-Za-z]+|\\.|[<>!]=|[$%~]|[^\x00-\x7f]"  # a command such as \pi or \%, or a sign
THOUSANDS = r"(?<![0-9.])[1-9][0-9]{0,2}(,[0-9]{3})+(?![0-9])"
OUTSIDE = r"(?![^(\[{]*[)\]}])"  # of brackets: the next bracket does not close one
NO_RELATION = "(?=[^=<>≤≥≠]*$)"  # such as x > 1 follows
BRACES = r"\{(?:[^{}]|\{[^{}]*\})*\}"  # with what stands in them, perhaps braces again
IN_FRONT = r"(?<![^,;=(\[{])"  # of an element
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
    (rf",? ?\bor\b{NO_RELATION}", ";"),  # 2 or 3 is a list, x = 2 or x = 3 is text
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
    """How many brackets are open behind each sign of a text: "(a)b" → [1, 1, 0, 0]."""
    depth = 0
    result = []
    for sign in text:
        if sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        result.append(depth)
    return result


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


# --------------------------------------------------------- The two tasks, and their prompts

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
    form: str  # a prompt that never says this word does not ask for the form that is paid
    system: str = ""  # the system message
    request: str = ""  # what follows the question
    opening: str = ""  # what the assistant's turn begins with

    def messages(self, question):
        """A question as a chat."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": question + self.request}]


TASKS = {
    "kk": Task(kk_reward, 3.0, "people", "<answer>", system=KK_SYSTEM_PROMPT, opening="<think>"),
    "math": Task(math_reward, 1.0, "level", "box", request=f"\n\n{MATH_REQUEST}"),
}


# ------------------------------------------------------------- What the user is told in a sentence


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
        raise UserError(f"{problem} ({short_text(error)})") from error


def short_text(error):
    """What an exception says, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# --------------------------------------------------- Training and evaluation rows of data files

PART_LENGTH = 50  # characters; a shorter question inside another one is chance: "Solve for x"
MAX_PAIRS = 25_000_000  # of questions to look for within each other: about six seconds


def load_data(settings, tokenizer):
    """Training rows (none with --eval-only) and, of each difficulty, --eval-size evaluation rows.

    Without --eval-data a tenth of --data, at most 500 rows, is held out, always the same ones. No
    training row has the question of an evaluation row, also of one beyond --eval-size.
    """
    if settings.eval_only and settings.data and not settings.eval_data:
        raise UserError("--eval-only evaluates --eval-data: give that instead of --data")
    if settings.reward:
        load_function(settings.reward)  # a wrong name is told at once
    files = Path(__file__).resolve().parent / "data"
    rows = []
    if not settings.eval_only:
        source = settings.data or files / f"{settings.task}_train.jsonl"
        rows = load_rows(source, settings, tokenizer)
    generator = random.Random(0)  # which rows are evaluated on does not depend on --seed
    if settings.eval_data:
        held_out = load_rows(settings.eval_data, settings, tokenizer)
        generator.shuffle(held_out)  # a sorted file begins with its easiest rows
    elif settings.data:
        held_out = generator.sample(rows, min(500, math.ceil(len(rows) / 10)))
    else:  # our own, which stand in random order
        held_out = load_rows(files / f"{settings.task}_test.jsonl", settings, tokenizer)
    kept = without_questions_of(held_out, rows)
    by_difficulty = {}
    for row in held_out:
        by_difficulty.setdefault(row["difficulty"], []).append(row)
    chosen = []
    for difficulty in sorted(by_difficulty, key=lambda name: (len(name), name)):
        chosen += by_difficulty[difficulty][: settings.eval_size or None]
    told = f"{len(kept)} training and {len(chosen)} of {len(held_out)} evaluation prompts"
    missing = len(rows) - len(kept)
    if settings.data and rows and settings.eval_data:
        told += f"; {missing} of {len(rows)} rows are also in --eval-data"
    elif settings.data and rows:
        told += f"; {len(held_out)} of {len(rows)} rows are held out for evaluation"
        told += f", {missing - len(held_out)} more have the same questions"
    if rows and not kept:
        raise UserError(f"nothing is left to train on: {told}")
    print(told)
    return kept, chosen


def without_questions_of(held_out, rows):
    """The rows whose question is none of the held-out ones, contains none and is part of none.

    The shorter of the two must have PART_LENGTH characters to be a part.
    """
    questions = {row["key"] for row in held_out}
    rows = [row for row in rows if row["key"] not in questions]
    long = [question for question in questions if len(question) >= PART_LENGTH]
    if len(rows) * len(long) > MAX_PAIRS:
        print("too many rows to look for a question within another: only equal ones are left out")
        return rows
    kept = []
    for row in rows:
        question = row["key"]
        contains = any(other in question for other in long)
        is_part = len(question) >= PART_LENGTH and any(question in other for other in long)
        if not contains and not is_part:
            kept.append(row)
    return kept


def load_rows(source, settings, tokenizer):
    """The rows of a data file or hub data set that can be used; one line tells of the others."""
    source = os.path.expanduser(source)
    with user_errors(f"cannot read {source}"):
        table = read_table(source)
    if not table:
        raise UserError(f"{source} is empty: it has no rows")
    names = {}  # of all columns, in their order
    for columns in table:
        if isinstance(columns, dict):
            names |= dict.fromkeys(name for name in columns if name is not None)
    rows = []
    left_out = {}  # reason → the numbers of its rows
    other_sizes = []
    for number, columns in enumerate(table, 1):
        try:
            with user_errors("that cannot be read"):  # whatever goes wrong with a row
                row = make_row(columns, settings, tokenizer)
        except UserError as reason:
            left_out.setdefault(str(reason), []).append(str(number))
            continue
        if row is None:
            other_sizes.append(str(number))
        else:
            row["columns"] = {name: columns.get(name) for name in names}
            rows.append(row)
    if not rows and other_sizes:  # else nobody needs to hear of them
        left_out["of another size than --people"] = other_sizes
    reasons = [f"{len(them)} {why} (row {', '.join(them[:9])})" for why, them in left_out.items()]
    found = f"{len(table)} rows, {sum(map(len, left_out.values()))} left out: {', '.join(reasons)}"
    if not rows:
        columns = f"columns: {', '.join(names)}; --task {settings.task}"
        if settings.task == "kk":
            columns += f" --people {' '.join(map(str, settings.people))}"
        raise UserError(f"no prompts are left of {source}, see data/GUIDE.md: {found} ({columns})")
    name = Path(source).name
    if left_out:
        print(f"{name}: {found}")
    if not settings.reward:
        form = TASKS[settings.task].form
        other_form = sum(not row["asks_for_form"] for row in rows)
        if other_form:
            told = f"{other_form} prompts do not ask for a {form}"
            print(f"{name}: {told}: answers without one count as wrong")
    if settings.task == "math" and not settings.reward:
        texts = sum(is_compared_as_text(row["solution"]) for row in rows)
        if texts:
            print(f"{name}: {texts} compared as text (see math-verify in data/GUIDE.md)")
    return rows


def prompt_stream(rows, size, seed, skip=0):
    """Endless batches of `size` rows, in a new random order each time through.

    The first `skip` batches, which a resumed run has had, are left out.
    """
    generator = random.Random(seed)
    waiting = []
    for number in itertools.count():
        while len(waiting) < size:
            waiting += generator.sample(rows, len(rows))
        if number >= skip:
            yield waiting[:size]
        waiting = waiting[size:]


# -------------------------------------------------------------------------------- Reading files


def read_table(source):
    """The rows of a jsonl, json, csv or parquet file or a hub data set name:configuration:split.

    JSON and csv are read without `datasets`, which would make dates of texts, cut numbers of twenty
    digits, and read 007 as 7 and NA as nothing.
    """
    kind = Path(source).suffix.lower()
    if kind in (".json", ".jsonl"):
        text = Path(source).read_text(encoding="utf-8-sig")  # Excel marks a file's beginning
        return list(json.loads(text)) if kind == ".json" else read_lines(text)
    if kind == ".csv":
        with open(source, newline="", encoding="utf-8-sig") as stream:
            table = csv.DictReader(stream)
            names = table.fieldnames or []
            if len(set(names)) < len(names):
                raise UserError(f"{source} has two columns of one name: give them different ones")
            return list(table)
    if kind != ".parquet" and Path(source).is_file():
        raise UserError(f"{source} is no jsonl, json, csv or parquet file: make it one of these")
    import datasets  # here, because it takes a second to import
    import pyarrow.parquet

    datasets.disable_progress_bars()
    if kind == ".parquet":  # read anew each time: load_dataset would keep a copy on the disk
        data = datasets.Dataset(pyarrow.parquet.read_table(source))
    elif Path(source).exists():  # a folder, whatever stands in its name
        data = datasets.load_dataset(source, split="train")
    else:
        drive, path = os.path.splitdrive(source)  # C: of Windows
        name, configuration, split = (path.split(":") + ["", ""])[:3]
        data = datasets.load_dataset(drive + name, configuration or None, split=split or "train")
    return [as_written(row, data.features) for row in data.to_list()]


def read_lines(text):
    """The values of jsonl, one a line."""
    values = []
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: a text may have U+2028
        if line.strip():
            try:
                values.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
    return values


def as_written(value, kind):
    """A value of a data set, at every depth: a class by its name, and float32 .3 without the digits
    that it gets as a float of Python."""
    if isinstance(value, dict) and isinstance(kind, dict):
        return {name: as_written(part, kind[name]) for name, part in value.items()}
    if isinstance(value, list) and hasattr(kind, "feature"):
        return [as_written(part, kind.feature) for part in value]
    if isinstance(value, int) and hasattr(kind, "int2str"):
        return kind.int2str(value)
    if isinstance(value, float) and getattr(kind, "dtype", "") in ("float32", "float16"):
        return float(str(numpy.dtype(kind.dtype).type(value)))
    return value


# --------------------------------------------------------- From the columns of a row to a prompt


def make_row(columns, settings, tokenizer):
    """The columns of a data set → prompt, solution, difficulty, and the question twice: as it was
    `asked`, and as a `key` by which questions are compared.

    None for a puzzle of another size than --people. UserError: why a row cannot be used.
    """
    if not isinstance(columns, dict):
        raise UserError("without columns")
    if any(columns.get(None, ())):  # where csv puts them
        raise UserError("with more cells than columns")
    task = TASKS[settings.task]
    question, solution, is_whole = question_and_solution(columns, settings)
    question = question or ""
    is_for_own_reward = settings.reward and isinstance(solution, (dict, list))
    if not is_for_own_reward:
        solution = to_text(solution).strip(" ")
    if not question or not solution:
        raise UserError("without a prompt or a (boxed) solution")
    if settings.task == "kk":
        people = len(read_roles(to_text(solution)) or ())
        if not people:
            raise UserError("whose solution --task kk cannot read (not puzzles? --task math)")
        if people not in settings.people:
            return None
        difficulty = str(people)
    else:
        difficulty = to_text(columns.get("level")).strip().removesuffix(".0") or "all"
        if not settings.reward:
            solution = math_solution(solution)
    prompt = question if is_whole else task.messages(question)
    opening = "" if is_whole else task.opening
    if not isinstance(question, str):
        question = " ".join(turn["content"] for turn in question if turn["role"] != "system")
    check_question(question, solution, columns)
    prompt = render_prompt(tokenizer, prompt, opening)
    if len(tokenizer(prompt, add_special_tokens=False).input_ids) > settings.max_prompt_length:
        raise UserError(f"longer than --max-prompt-length {settings.max_prompt_length}")
    asked = " ".join(question.split())
    return {
        "asked": asked,
        "key": asked.casefold(),
        "prompt": prompt,
        "solution": solution,
        "difficulty": difficulty,
        "asks_for_form": not is_whole or task.form in prompt.lower(),
    }


def question_and_solution(row, settings):
    """What a row asks, its solution, and whether what it asks is a whole prompt: by its columns."""
    if row.get("reward_model"):  # verl: the prompt is chat messages
        truth = row["reward_model"]["ground_truth"]
        if isinstance(truth, dict):  # of puzzles the text; others are for a reward of one's own
            truth = truth.get("solution_text_format", truth)
        return row["prompt"], truth, True
    if row.get("prompt") and to_text(row.get("solution")):  # TRL: chat messages, or text
        return row["prompt"], row["solution"], True
    if "quiz" in row:  # K-and-K/knights-and-knaves
        return row["quiz"], row.get("solution_text_format"), False
    if "problem" in row and "answer" in row:  # DeepScaleR, MATH-500
        return row["problem"], row["answer"], False
    if "problem" in row:  # MATH, which has no answer but the box
        return row["problem"], boxed_answer(to_text(row.get("solution"))), False
    if "question" not in row or "answer" not in row:
        raise UserError(f"with columns that are not known ({', '.join(map(str, row))})")
    answer = to_text(row["answer"]).split("####")[-1]  # GSM8K
    if settings.reward:  # no words of ours
        return [{"role": "user", "content": row["question"]}], answer, True
    return row["question"], answer, False


def to_text(value):
    """As text; "" for null, NaN, infinity, lists. 1e20 in digits: only a copy would match 1e+20."""
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value) if value.is_integer() else value)
    if value is None or isinstance(value, (float, list, dict, bytes)):
        return ""
    return str(value)


def boxed_answer(solution):
    """What stands in the box of a whole solution; "" if it has none."""
    if len(re.findall(r"\\(?:boxed|fbox)", solution)) > 1:
        raise UserError("with several boxes in its solution")
    return extract_boxed(solution) or ""


NO_SOLUTION = r"(?i)(proof|not ?found|n/a|nan|null|none|unknown|see solution)\.?"
CUT_LATEX = r"[\0-\b\v\f]|[\t\r](?=[a-z])|\n(?=eq?\b|u\b|ot)"  # JSON makes one sign of \t and a tab


def math_solution(solution):
    """The answer that `math_reward` compares; UserError where no response could be paid for it."""
    if re.search(CUT_LATEX, solution):
        raise UserError("with LaTeX that JSON has cut")
    solution = boxed_answer(solution) or solution
    if not re.search(r"[\w\\∞∅]", solution) or re.fullmatch(NO_SOLUTION, solution):
        raise UserError("whose solution says that there is none")
    if re.match(r"""[\[{]+\s*['"]""", solution):
        raise UserError("whose solution is a list or other JSON")
    words = [word.strip(".,;:!?") for word in solution.split() if word != "per"]
    if sum(word.isalpha() and len(word) > 1 for word in words) >= 5:
        raise UserError("whose solution is a sentence")
    if re.fullmatch(r"\d+-[A-Z][a-z]{2}|[A-Z][a-z]{2}-\d+", solution):  # 4-Mar
        raise UserError("of whose solution a spreadsheet has made a date")
    alternatives = solution.replace(r"\text{ or }", " or ").split(" or ")
    if len(alternatives) == 2 and answers_match(*(text.strip("$ ") for text in alternatives)):
        raise UserError("with two spellings of one answer")
    if re.fullmatch(r"-?[0-9.]+E[+-][0-9]{2}", solution):  # a spreadsheet writes 1E+06
        solution = f"{Decimal(solution):f}"
    if math_reward([rf"\boxed{{{solution}}}"], [solution]) != [1.0]:  # braces that do not close
        raise UserError("whose solution --task math cannot read")
    return solution


def check_question(question, solution, columns):
    """UserError where a question cannot be answered as it stands."""
    if not question.strip():
        raise UserError("without a prompt or a (boxed) solution")
    if question.lstrip().startswith("[{"):
        raise UserError("whose chat is written as text")
    if re.search(r"[\b\f](?=[a-z])", question):
        raise UserError("with LaTeX that JSON has cut")
    if columns.get("images") or columns.get("image"):
        raise UserError("with a picture, which the model does not see")
    choices = columns.get("choices") or columns.get("options")
    if choices:
        if not isinstance(choices, list) or not all(str(choice) in question for choice in choices):
            raise UserError("with choices that its question does not show, or that are no list")
        if str(solution).isdigit() and int(solution) <= len(choices):
            raise UserError("whose solution may be the number of a choice")


def render_prompt(tokenizer, prompt, opening=""):
    """The text that the model continues: chat messages up to its own turn, or plain text."""
    is_chat = isinstance(prompt, list)
    if is_chat and len(prompt) == 1 and is_rendered(tokenizer, prompt[0]["content"]):
        prompt = prompt[0]["content"]
    elif is_chat and tokenizer.chat_template:
        return render_chat(tokenizer, prompt, opening)
    elif is_chat:  # a base model: the words without a chat
        prompt = "\n\n".join([*(message["content"] for message in prompt), opening])
    if tokenizer("x")["input_ids"][:1] == [tokenizer.bos_token_id]:  # as for Llama and Gemma
        prompt = tokenizer.bos_token + prompt.removeprefix(tokenizer.bos_token)
    return prompt


def is_rendered(tokenizer, text):
    """Whether the chat template has been applied to a text: it has what the template writes behind
    a question, up to the next space, such as <|im_end|>."""
    if not tokenizer.chat_template:
        return False
    with suppress(TemplateError):
        rendered = apply_template(tokenizer, [{"role": "user", "content": "Q?"}])
        _, found, behind = rendered.rpartition("Q?")
        return bool(found) and any(mark in text for mark in behind.split()[:1])
    return False


def apply_template(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def render_chat(tokenizer, messages, opening):
    """Chat messages through the template, and `opening` where it has not opened the turn with it.

    A system message that the template refuses or loses is put into the user's turn, or dropped
    where the vocabulary lacks its words (data/tiny was taught without one).
    """
    forms = [messages]
    if len(messages) > 1 and messages[0]["role"] == "system":
        system, user, *others = messages
        known = tokenizer.unk_token_id not in tokenizer(system["content"])["input_ids"]
        content = f"{system['content']}\n\n{user['content']}" if known else user["content"]
        forms.append([{**user, "content": content}, *others])
    for form in forms:
        with suppress(TemplateError):
            text = apply_template(tokenizer, form)
            asked = [turn["content"].split() for turn in form if turn["role"] != "assistant"]
            if all(" ".join(words) in " ".join(text.split()) for words in asked):
                return text if text.rstrip().endswith(opening) else text + opening
    raise UserError("whose question the chat template of --model refuses or leaves out")


# ---------------------------------------------------------------- The reward of a step's responses


def compute_rewards(texts, rows, settings):
    """The reward R of each response: the task's, or that of --reward MODULE:FUNCTION.

    It has TRL's signature, f(completions, solution, **columns) -> list of numbers. It gets strings,
    for chats as well, and copies of all columns of the data as lists with one entry a response.
    None, by which a reward is left out in TRL, is refused.
    """
    name = settings.reward or settings.task
    function = load_function(settings.reward) if settings.reward else TASKS[settings.task].reward
    columns = {}
    for column in rows[0]["columns"]:
        columns[column] = [row["columns"][column] for row in rows]
    columns["completions"] = list(texts)
    columns["solution"] = [row["solution"] for row in rows]
    columns["prompts"] = [row["prompt"] for row in rows]
    columns = copy.deepcopy(columns)
    try:
        with process_as_before():
            rewards = function(**columns)
            numbers = [float(reward) for reward in rewards]
    except (Exception, SystemExit) as error:
        reason = f"{short_text(error)}{own_line(error)}"
        where = "; what a reward gets and returns: data/GUIDE.md, Your own reward"
        raise UserError(f"the reward {name} failed ({reason}){where}") from error
    is_list = not isinstance(rewards, dict) and len(numbers) == len(texts)
    if not is_list or not all(map(math.isfinite, numbers)):
        raise UserError(f"{name} must return a list: one finite number for each response")
    return numbers


def own_line(error):
    """The last line of the reward's own file that an exception has passed, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if frame.filename != __file__]  # not ours, which calls it
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" in {own[-1].filename}, line {own[-1].lineno}" if own else ""


@contextmanager
def process_as_before():
    """What a reward changes in the process is changed back.

    A seed in it would draw the same answers in every step; running code changes the folder; a
    reward model may leave another default dtype or device, or inference mode.
    """
    import torch  # here, so that TRL's users get the rewards without waiting

    folder = os.getcwd()
    python_state = random.getstate()
    numpy_state = numpy.random.get_state()
    dtype = torch.get_default_dtype()
    device = torch.get_default_device()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.inference_mode(False), torch.random.fork_rng(gpus):
            yield
    finally:
        os.chdir(folder)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(device)


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
