r"""The tasks: rule-based rewards for puzzles and mathematics, their prompts, and data files.

    kk_reward(completions, solution, **columns) -> list[float]      3, -0.5, -1 or -3 each
    math_reward(completions, solution, **columns) -> list[float]    1 or 0 each

A completion is a string, or a list of chat messages whose last one counts. Any text gets a reward;
none raises. TRL calls rewards in this way (the data set needs a column `solution`):

    GRPOTrainer("Qwen/Qwen2.5-3B-Instruct", reward_funcs=kk_reward, train_dataset=puzzles).train()
"""

import cmath
import copy
import csv
import functools
import importlib
import itertools
import json
import math
import operator
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
# Both answers are cut into tokens and parsed into trees. A tree is a name, a number ("", Fraction)
# or (operator, *parts). Trees are compared by value, with fixed values for the variables; what is
# no expression is compared as text. Fractions stay exact, so 0.333 is not 1/3.

MAX_LENGTH = 300  # characters of an answer; anything longer is compared as text
MAX_DIGITS = 3_000  # of a power; an answer that needs more is compared as text
NOT_READ = (KeyError, ValueError, ArithmeticError, RecursionError)  # no expression, 1/0, too deep


def math_reward(completions, solution, **columns):
    r"""1.0 where the last \boxed{} of a completion is its solution, such as \frac12, else 0.0."""
    answers = [extract_boxed(message_text(completion)) or "" for completion in completions]
    truths = [extract_boxed(truth) or truth for truth in map(str, solution)]
    return [float(answers_match(*pair)) for pair in zip(answers, truths, strict=True)]


def extract_boxed(text):
    r"""The content of the last \boxed{} (or \fbox{}) after the last </think>, or None.

    >>> extract_boxed(r"\boxed{1}</think> So $\boxed{\frac{1}{2}}$, in \boxed as you asked.")
    '\\frac{1}{2}'
    """
    text = text.rpartition("</think>")[2]
    box = r"\\(?:boxed|fbox)\s*(?:\{|(-?(?:\.?[0-9]|\\[a-z])[^\s$]*))"  # \boxed 5 has no braces
    last = re.match(rf"(?s).*{box}", text)
    if last is None or last[1]:
        return last and last[1]
    depth, content = 1, text[last.end() :]
    for brace in re.finditer(r"\\.|[{}]", content, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)  # \{ and \} do not nest
        if depth == 0:
            return content[: brace.start()]


def answers_match(predicted, expected):
    r"""Whether a predicted LaTeX answer is the expected one.

    The expected unit may be missing; another one is wrong, as are words that are no unit. Powers of
    units and "square", "per" are not compared. As in the paper's grader 20\% counts as 20. A
    fraction must be in lowest terms.
    >>> answers_match("0.5", r"\frac12"), answers_match("5+6", "11"), answers_match("11", "5+6")
    (True, False, True)
    """
    if max(len(predicted), len(expected)) > MAX_LENGTH:
        return predicted == expected
    (answer, units), (truth, true_units) = tokenize(predicted), tokenize(expected)
    right_units = units == true_units if true_units else STANDARD.keys() >= set(units)
    if not answer or (units and not right_units):
        return False
    try:
        return answer == truth or same_answer(parse(answer), parse(truth))
    except NOT_READ:
        return False


STANDARD = r"""percent|degree deg|radian|dollar usd|cent|euro|lb pound|oz ounce|g gram|kg kilogram
mg milligram|ton tonne|mm millimeter millimetre|cm centimeter centimetre|m meter metre|min minute
km kilometer kilometre|in inch inche|ft foot feet|yd yard|mi mile|l liter litre|gal gallon|cup
s sec second|h hr hour|day|week|month|year|unit|way|time|point|value|solution|people person|student
child children|man men|woman women|book|page|apple|ball|card|coin|<= ≤ \le \leq \leqslant|< \lt
>= ≥ \ge \geq \geqslant|> \gt|!= ≠ \ne \neq|= ∈ \in|* × · \times \cdot|- − –|^2 ²|^3 ³|\frac12 ½
\pi π|\infty ∞|\cup ∪|\pm ±|\approx ≈|\sqrt √|\frac \dfrac \tfrac \cfrac|\binom \dbinom \tbinom
\text \mathrm \mbox \textbf|\text{percent} % \%|\text{degree} ° \degree|\text{dollar} \$
\text{euro} €"""  # rows of known units, and of other spellings; the first of a row is used
STANDARD = {word: row.split()[0] for row in re.split(r"[|\n]", STANDARD) for word in row.split()}
ZEROS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
REWRITES = (  # in this order: what can be written in several ways is written in one
    (r"(?<!\\)\\\\(?=(?:[dt]?frac|sqrt|text|left|right|begin|end|pi|infty|cdot)\b)", r"\\"),
    (r"\\\\", ";"),
    (r"(\\\$|€)\s*(-?[0-9.,]*[0-9])", r"\2\1"),  # $5 becomes 5$
    (r"\\?[$%]|\\[A-Za-z]+|[^\x00-\x7f]", lambda sign: STANDARD.get(sign[0], sign[0]) + " "),
    (r"\\(?:left|right|[bB]igg?[lr]?|q?quad|displaystyle|math(?:bf|bb|cal)|angle) ", " "),
    (r"\\(begin|end)\s*\{(?:array|[bp]?matrix)\}(?:\s*\{[clr|]*\})?", r"\\\1 "),  # a bracket
    (r"(?<=[0-9])(?:\{,\}|,?\\[,!] *|\\[;: ]|,(?!.*[)\]]|.*\\\}))(?=[0-9]{3}(?![0-9]))", ""),
    (r"\^\s*\{?\s*\\circ *\}?", r"\\text{degree}"),
    (r"(?<=[0-9])\s*\^?\s*\{?(?:\\text *\{)?(?:st|nd|rd|th)\b\}{0,2}", ""),  # 12^{th}
    (r"(?<=[0-9])\s*\( *([a-z]{4,}|[ckm]m) *\)\s*$", r"\\text{\1}"),  # 35 (apples)
    (r"(?<=[0-9])\s*(\\text\s*\{\s*)?mph\b", r" \1mi/h"),
    (r"(?i)(?<=[0-9])\s*(?:\\text\s*\{\s*)?([ap])\.?m\b\.?\s*\}?", r"\\text{time\1}"),
    (r"\\[,;:!()\[\]\s]|[$~]", " "),
    (r"^\s*(?:\\frac *\{[A-Z]+\} *\{[A-Z]+\}|\|[A-Z]+\|)\s*=", "x="),  # AB/CD is a label, too
    (r",?\s*(?:\\text\s*\{[\s,]*(?:and|or)\s*\}|\b(?:and|or)\b|&)", ","),  # 2, and 3: one comma
    (r"^(\s*[A-Za-z]\s*=)[^=<>,;]*[0-9][^=<>,;]*=(?=[^=<>,;]*$)", r"\1"),  # x = 2 + 3 = 5
    (r"^((?:[^=<>,]*=)?\s*-?(?:[0-9]|\\(?:frac|sqrt|pi))[^=<>,]*)\\approx .*", r"\1"),
    (r"(^\s*(?:\\\{)?|[,;])([^,;]*?)\\pm ([^,;]*?)(?=\\\}|[,;]|$)", r"\1\2+\3,\2-\3"),
    (r"(?<=\))\s*(?=\.?[0-9])", "*"),  # (n - 2)2^n: a number behind a bracket is a factor
    (r"(?<![\\A-Za-z])(sqrt|pi|ln|log|(?:arc)?(?:sin|cos|tan))(?![A-Za-z])", r"\\\1 "),
    (r"(?<![0-9])\.(?=[0-9]|\\overline)", "0."),
    (r"\\frac\s*([0-9]|\{[^{}]*\})\s*([0-9])", r"\\frac{\1}{\2}"),  # \frac12 is one half
    (r"([0-9])\s*\\frac\s*\{*([0-9]+)\}*\s*\{([0-9]+)\}", r"\1 \2/\3"),  # a mixed number
    (r"(?<![\w.])10\s*\^\s*(?:([0-9]{1,3})(?![0-9])|\{\s*(-?[0-9]{1,3})\s*\})", r"1e\1\2"),
    (r"(?<![\w.^/])([0-9]+|[0-9]*\.[0-9]+)\s*\*\s*1e", r"\1e"),  # 3 \times 10^6
    *((rf"(?<=[0-9])\s*(\\text\s*\{{\s*)?{x}\b", rf"e{ZEROS[x]}\1") for x in ZEROS),
)
KNOWN = rf"(?:square|cubic|sq|(?:{'|'.join(filter(str.isalpha, STANDARD))})s?)\b\.?"
UNIT = rf"""(?xi) (?<=[0-9}}])(?:\s*\\text\s*\{{\s*(?!dozen|half|third|quart)([a-z][a-z./^23\ ]*)\}}
    | (?:\ +|(?=[ckm]m|kg|lb))({KNOWN}(?:(?:\s*/\s*|\ +per\ +|\ +){KNOWN})*)
    )(?:\s*\^\s*\{{?[23]\}}?)?"""
FUNCTION = r"\\(?:ln|log|exp|(?:arc)?(?:sin|cos|tan|sec|csc|cot)h?)"
TOKEN = rf"""(?x) (?:(?<=[\[({{,=])|\A)(?!\s*(?!no)[a-z]\s*[a-z]\s*(?:[,=]|\Z))\s*    # ABC, not mn
      [A-Za-z](?:\s*[A-Za-z])+(?=\s*(?:[,=]|\Z)) | (?<!\S)[A-Za-z]{{4,}}          # two lines
    | {FUNCTION}\s*(?:[_^]\s*(?:[0-9]|\{{[0-9]+\}}))?\s*                          # \ln 2x
      (?:\([^()]*\)|\{{[^{{}}]*\}}|(?:[0-9A-Za-z]|\\(?:pi|alpha|beta|theta|phi)\s*)+)
    | (?:[0-9]+|[A-Za-z])_(?:\{{[^{{}}]*\}}|[0-9A-Za-z]) | [0-9]+\ +[0-9]+/[0-9]+ # 1204_9, 2 1/3
    | [0-9]+(?:\.[0-9]+)?(?:e-?[0-9]{{1,3}})? | \\[A-Za-z]+ | \\. | [<>!]= | \S"""


def tokenize(text):
    r"""LaTeX → its tokens, and its units by their names in STANDARD. Spacing disappears.

    A comma joins 1,200 but not (1,200), which is a point. Letters alone are one word.
    >>> tokenize(r"x = 1,200 \text{ square feet}"), tokenize("two lines")
    ((['x', '=', '1200'], ['ft']), (['twolines'], []))
    """
    for pattern, replacement in REWRITES:
        text = re.sub(pattern, replacement, text)
    units = re.findall("[a-z]+", " ".join(map("".join, re.findall(UNIT, text))).lower())
    units = [STANDARD.get(word, STANDARD.get(word.removesuffix("s"), word)) for word in units]
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1 ", re.sub(UNIT, " ", text)).strip(" .,;")
    tokens = [re.sub(r"\s(?![0-9]+/)|(?<=[^\\])[{}()]", "", x) for x in re.findall(TOKEN, text)]
    tokens = [token.lower() if token.isalpha() and len(token) > 1 else token for token in tokens]
    return tokens, [unit for unit in units if unit not in ("square", "cubic", "sq", "per")]


NAME = r"\\(?:pi|infty|alpha|beta|gamma|delta|theta|lambda|mu|sigma|phi)"  # or a function of one
NAME = rf"[A-Za-z]+(?:_.+)?|[0-9]+_.+|{NAME}|{FUNCTION}.+"
NAMED_VALUES = {r"\pi": math.pi, r"\infty": math.inf, "e": math.e, "i": 1j}
KINDS = {x: x for x in ("()", "(]", "[)", "[]", "{}", r"\begin\end")} | {r"\{\}": "{}"}
OPERATIONS = {"+": operator.add, "*": operator.mul, "/": operator.truediv, "^": operator.pow}
PRECEDENCE = {";": 1, ",": 2, "=": 3, r"\approx": 3, "!=": 3, "<": 3, "<=": 3, ">": 3, ">=": 3}
PRECEDENCE |= {r"\cup": 4, "+": 5, "-": 5, "*": 6, "/": 6, "^": 8}
FACTOR, SIGN, OPERAND = 6.5, 7, 9  # how tightly x binds in 2x, a sign in front, an operand


def parse(tokens):
    """The tree of an answer: ["x", "+", "y"] → ("+", "x", "y"). A list is a set."""
    tokens = [*tokens, ""]  # "" is the end; what is read is taken off the list
    tree = expression(tokens)
    if tokens != [""]:
        raise ValueError(f"cannot read {tokens}")
    return ("{}", *tree[1:]) if tree[0] in (",", ";") else tree


def expression(tokens, level=1):
    """Reads operators of precedence `level` or more; on the right of one stands what binds more."""
    tree = operand(tokens)
    while True:
        token = tokens[0]  # in 2x the sign is missing; but 2 3 is not a product
        starts_factor = re.fullmatch(rf"[(\[{{]|\\frac|\\sqrt|{NAME}", token)
        precedence = FACTOR if starts_factor else PRECEDENCE.get(token, 0)
        if precedence < level:
            return tree
        operation = "*" if starts_factor else tokens.pop(0)
        tree = join(tree, operation, expression(tokens, precedence + 1))


def operand(tokens):
    """Reads a number, a name, a bracket, or a root, a fraction or a sign and what stands behind."""
    token = tokens.pop(0)
    if token in ("+", "-"):
        tree = expression(tokens, SIGN)
        if token == "-":  # -5 is a number, -(-5) is not
            return ("", -tree[1]) if tree[0] == "" and tree[1] > 0 else ("*", ("", -1), tree)
        return tree
    if token in ("(", "[", "{", r"\{", r"\begin"):
        tree, kind = expression(tokens), KINDS[token + tokens.pop(0)]
        if tree[0] == "," or (tree[0] == ";" and kind == "{}"):
            return (kind, *tree[1:])
        return tree if kind in ("()", "[]", "{}") else (kind, tree)  # (5), {5} are 5
    if token == r"\frac":
        return join(expression(tokens, OPERAND), "/", expression(tokens, OPERAND))
    if token == r"\sqrt":
        degree = expression(tokens, OPERAND) if tokens[0] == "[" else ("", 2)
        return ("^", expression(tokens, OPERAND), ("/", ("", 1), degree))
    if re.fullmatch(NAME, token):
        return token
    whole, *part = token.split()  # 2, or the mixed number 2 1/3
    if not token.isascii() or (part and not str(Fraction(part[0]) % 1) == part[0]):
        raise ValueError(f"not a number in lowest terms: {token!r}")
    return ("", Fraction(whole) + sum(map(Fraction, part)))


def join(left, operation, right):
    """The tree of an operation: a - b is a + (-b), x > 3 is 3 < x, and sums are flat.

    3/4 is a number, 6/8 an operation that is left to do. 'name=' is the sign behind a label.
    """
    names = left[1:] if left[0] in ("*", "()") else [left]
    if operation == "/" and left[0] == right[0] == "":
        if abs(right[1]) == (left[1] / right[1]).denominator > 1:
            return ("", left[1] / right[1])
    elif operation in ("=", r"\approx") and all(isinstance(name, str) for name in names):
        operation = "name="  # x = 5, f(x) = 5, (x, y) = (1, 2)
    elif operation == "-":
        operation, right = "+", ("*", ("", -1), right)
    elif operation in (">", ">="):
        operation, left, right = operation.replace(">", "<"), right, left
    is_flat = operation in (";", ",", r"\cup", "+", "*") and left[0] == operation
    return (operation, *(left[1:] if is_flat else [left]), right)


def same_answer(answer, truth):
    """Whether two trees agree; numbers and expressions by value. x = 5 says 5. A set has no order,
    but where only one answer names its values, as in x = 1, y = 2, these have one."""
    trees = (answer, truth)
    if (answer[0] == "name=") != (truth[0] == "name="):
        answer, truth = trees = [tree[2] if tree[0] == "name=" else tree for tree in trees]
    if all(isinstance(tree, str) or tree[0] in ("", *OPERATIONS) for tree in trees):
        return same_value(answer, truth)
    if answer[0] != truth[0] or len(answer) != len(truth):
        return False
    names = [len({part[1] for part in tree[1:] if part[0] == "name="}) > 1 for tree in trees]
    if truth[0] not in ("{}", r"\cup") or names[0] != names[1]:
        return all(map(same_answer, answer[1:], truth[1:]))
    partners = list(truth[1:])
    for item in answer[1:]:
        partner = next((other for other in partners if same_answer(item, other)), None)
        if partner is None:
            return False
        partners.remove(partner)
    return True


def same_value(answer, truth):
    """Whether an expression has the value of another, and its form.

    Fractions are compared exactly, other numbers to nine digits; variables get two fixed values.
    5 + 6 is no number. A sum, be it over a number, must have as many terms: x^2 - 1 is not
    (x - 1)(x + 1), where the factors are asked for.
    """
    for sign in (1, -1):
        values = value(answer, sign), value(truth, sign)
        exact = all(isinstance(number, Fraction) for number in values)
        if not (values[0] == values[1] if exact else cmath.isclose(*values)):
            return False
    if "" in (answer[0], truth[0]):
        return answer[0] == ""
    trees = (answer, truth)
    sums = [tree[1] if tree[0] == "/" and tree[2][0] == "" else tree for tree in trees]
    sizes = [[len(x) if x[0] == "+" else 2 for x in pair] for pair in (trees, sums)]
    return any(first == second for first, second in sizes)


def value(tree, sign):
    """The number that a tree stands for; a variable is a fixed fraction of that sign."""
    if tree[0] == "":
        return Fraction(tree[1])
    if isinstance(tree, str):
        some = random.Random(f"{sign} {tree}").randrange(5000, 15000)
        return NAMED_VALUES.get(tree) or sign * Fraction(some, 10007)
    first, *others = (value(part, sign) for part in tree[1:])
    if tree[0] == "^" and len(str(first)) * abs(others[0]) > MAX_DIGITS:
        raise ValueError("too large")
    return functools.reduce(OPERATIONS[tree[0]], others, first)


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
        texts = len(rows)
        for row in rows:
            with suppress(*NOT_READ):
                texts -= bool(parse(tokenize(row["solution"])[0]))
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
