r"""Rule-based rewards for Knights-and-Knaves puzzles and for mathematics.

    kk_reward(completions, solution, **columns) -> list[float]      3, -0.5, -1 or -3 each
    math_reward(completions, solution, **columns) -> list[float]    1 or 0 each

A completion is a string, or a list of chat messages whose last one counts. Any text gets a reward; none raises.
This is the signature that TRL calls, so both drop in unchanged (the data set needs a column `solution`):

    from trl import GRPOTrainer
    from rewards import kk_reward
    GRPOTrainer(model="Qwen/Qwen2.5-3B-Instruct", reward_funcs=kk_reward, train_dataset=puzzles).train()
"""

import cmath
import math
import re
import zlib
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple


def message_text(message):
    """Return the text of a string or of the last of a list of chat messages; None if there is no text."""
    if isinstance(message, list) and message and isinstance(message[-1], dict):
        message = message[-1].get("content")
    return message if isinstance(message, str) else None


def check_lengths(completions, other, name):
    if len(completions) != len(other):
        raise ValueError(f"got {len(completions)} completions but {len(other)} entries in `{name}`")


# ------------------------------------------------------------------------------------------ Knights and Knaves

FORMAT_REWARD, FORMAT_PENALTY = 1.0, -1.0
ALL_CORRECT, SOME_WRONG, NOT_PARSABLE = 2.0, -1.5, -2.0
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def kk_reward(completions, solution, **columns):
    r"""Score answers to Knights-and-Knaves puzzles; the accuracy is the share of scores equal to 3.0.

    Args:
        completions: strings or lists of chat messages.
        solution: one text per completion, for example "(1) Zoey is a knight\n(2) Oliver is a knave".
        columns: only `prompts` is read. A prompt that ends in <think> has opened that tag for the completion;
            without `prompts` it counts as opened.
    """
    check_lengths(completions, solution, "solution")
    prompts = columns.get("prompts")
    if prompts is None:
        prompts = ["<think>"] * len(completions)
    check_lengths(completions, prompts, "prompts")
    rewards = []
    for row, (completion, prompt, truth) in enumerate(zip(completions, prompts, solution)):
        roles = names_and_roles(truth)
        if not roles:
            raise ValueError(
                f"row {row} of `solution` names nobody: {truth!r}; want lines like '(1) Zoey is a knight'"
            )
        opened = (message_text(prompt) or "").rstrip().endswith("<think>")
        rewards.append(score_puzzle(message_text(completion), roles, opened))
    return rewards


def score_puzzle(text, roles, think_is_open=True):
    """Return the reward of one response: format (1 or -1) plus answer (2, -1.5 or -2).

    >>> score_puzzle("So. </think><answer>Zoey is a knight</answer>", {"Zoey": "knight"})
    3.0
    """
    answer = answer_text(text, think_is_open)
    if answer is None:
        return FORMAT_PENALTY + NOT_PARSABLE
    parsed = parse_roles(answer, list(roles))
    if parsed is None:
        return FORMAT_REWARD + NOT_PARSABLE
    return FORMAT_REWARD + (ALL_CORRECT if parsed == roles else SOME_WRONG)


def answer_text(text, think_is_open=True):
    """Return what stands between the answer tags, or None unless all four tags occur once each and in order."""
    if text is None:
        return None
    if think_is_open:  # a second <think> is then one too many, as in the published code
        text = "<think>" + text
    if any(text.count(tag) != 1 for tag in TAGS):
        return None
    positions = [text.index(tag) for tag in TAGS]
    return (
        text[positions[2] + len(TAGS[2]) : positions[3]] if positions == sorted(positions) else None
    )


def names_and_roles(solution):
    """Read a solution text, for example {"Zoey": "knight", "Oliver": "knave"}; empty if it names nobody."""
    if not isinstance(solution, str):
        return {}
    return {
        name: role.lower()
        for name, role in re.findall(r"(\w[\w'-]*) is an? (knight|knave)\b", solution, re.I)
    }


def parse_roles(text, names):
    """Read who is what from an answer; None if a name is missing or roles are listed more or less than once per name.

    Counting the roles as substrings is what stops an answer from listing both roles for a name. The word
    boundaries keep "Jack" from matching inside "Jackson".
    >>> parse_roles("(1) Jackson is a knave (2) Jack is a knight", ["Jack", "Jackson"])
    {'Jack': 'knight', 'Jackson': 'knave'}
    """
    lowered = text.lower()
    if lowered.count("knight") + lowered.count("knave") != len(names):
        return None
    roles = {}
    for name in names:
        match = re.search(
            rf"\b{re.escape(name)}\b\s+is\s+a\s+(knight|knave)\b", text, re.IGNORECASE
        )
        if match is None:
            return None
        roles[name] = match.group(1).lower()
    return roles


# ------------------------------------------------------------------------------------------------- Mathematics
# Both answers are cut into tokens and evaluated by a recursive descent parser, with a few fixed values for their
# variables. Equal values each time mean equal answers. What cannot be parsed is compared as text. Numbers stay
# exact fractions as long as they can, so 0.333 is not 1/3.

MAX_LENGTH = 1000  # characters of an answer; anything longer is only compared as text
MAX_DEPTH = 30  # nested brackets, fractions and exponents; each takes about 7 stack frames
MAX_BITS = 4000  # size of exact integers; beyond it numbers become floats, which may overflow (then: as text)
POINTS = ("first", "second", "negative")  # where the variables are evaluated, see `variable_value`


def math_reward(completions, solution, **columns):
    r"""Return 1.0 where the last \boxed{} of a completion has the value of its solution, else 0.0.

    Args:
        completions: strings or lists of chat messages.
        solution: one answer per completion, for example r"\frac{1}{2}".
        columns: ignored; trainers pass the other columns of the data set here.
    """
    check_lengths(completions, solution, "solution")
    boxed = [extract_boxed(message_text(completion) or "") for completion in completions]
    return [
        float(ours is not None and answers_match(ours, str(truth)))
        for ours, truth in zip(boxed, solution)
    ]


def extract_boxed(text):
    r"""Return the content of the last \boxed{} (or \fbox{}) after the last </think>, or None.

    >>> extract_boxed(r"\boxed{1}</think> So $\boxed{\frac{1}{2}}$.")
    '\\frac{1}{2}'
    """
    text = text.rpartition("</think>")[2]
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    opening = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|([^\s$]+))").match(text, max(start, 0))
    if opening is None or opening.group(1):  # \boxed 5 has no braces
        return opening and opening.group(1)
    depth = 1
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(
        text, opening.end()
    ):  # \{ and \} do not nest
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[opening.end() : brace.start()]
    return None  # cut off before the closing brace


def answers_match(predicted, expected):
    r"""Tell whether two LaTeX answers mean the same.

    >>> answers_match("0.5", r"\frac12"), answers_match("[1,2)", "(1,2)")
    (True, False)
    """
    predicted, expected = predicted.strip(), expected.strip()
    if not predicted or predicted == expected or max(len(predicted), len(expected)) > MAX_LENGTH:
        return bool(predicted) and predicted == expected
    theirs = readings(expected)
    return any(same_reading(ours, other) for ours in readings(predicted) for other in theirs)


def readings(text):
    r"""Return the token lists that a text may stand for: two for "1,200", a number or a list of two.

    Inside brackets a comma separates: (1,200) is a point or an interval. 1{,}200 and 1,\!200 are always one number.
    """
    text = re.sub(r"(?<=[0-9])(?:\{,\}|,?\\[!,;: ])(?=[0-9]{3}(?![0-9]))", "", text)
    joined = (
        text
        if re.search(r"[(\[]|\\\{", text)
        else THOUSANDS.sub(lambda m: re.sub("[, ]", "", m.group()), text)
    )
    return [tokenize(reading) for reading in dict.fromkeys([joined, text])]


def same_reading(predicted, expected):
    """Compare two token lists by value, or as text if either is not an expression."""
    try:
        for point in POINTS:
            ours, theirs = Evaluator(predicted, point), Evaluator(expected, point)
            if not same_value(ours.answer(), theirs.answer()):
                return False
            if not (ours.has_variables or theirs.has_variables):
                break  # the other points would repeat this one
        return True
    except (
        ValueError,
        ArithmeticError,
    ):  # not an expression, a division by zero, or numbers too large
        return bool(predicted) and plain_text(predicted) == plain_text(expected)


def plain_text(tokens):
    r"""Join tokens for comparison as text: "(D)", r"\text{D}" and "d" are the same choice."""
    text = "".join(token.removeprefix("text:") for token in tokens).replace(" ", "").casefold()
    return re.sub(r"^\((\w+)\)$", r"\1", text)


THOUSANDS = re.compile(r"(?<![\w.,])[0-9]{1,3}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+)(?![0-9])")
TOKEN = re.compile(
    r"""\\(?:begin|end)\s*\{[bp]?matrix\}
    | \\(?:text|textbf|textrm|textit|mbox|mathrm|operatorname)\s*\{[^{}]*\}(?:\s*\^\s*(?:[0-9]|\{[0-9]\}))?
    | \^\s*(?:\\circ|\{\s*\\circ\s*\})                     # a degree sign
    | \\[A-Za-z]+ | \\.                                    # a command
    | [0-9]+_(?:[0-9]|\{[0-9]+\})                          # 1204_9, a number in base nine
    | [0-9]+(?:\.[0-9]+)? | \.[0-9]+
    | (?<![A-Za-z])(?:sqrt|sin|cos|tan|ln|log|pi|and|or|cm|mm|km|kg|mg|ml|ft|lbs?|oz|mph|min|sec|hrs?)(?![A-Za-z])
    | (?<!\S)[A-Za-z]{4,}                                  # a word; shorter or attached runs are products like xyz
    | [A-Za-z]_(?:\w|\{\w+\}) | [<>!]= | \S""",
    re.VERBOSE | re.DOTALL,
)
# Signs that do not change which number is meant. By the convention of the paper's grader 20\% counts as 20.
IGNORED = set(
    r"\left \right \big \Big \bigl \bigr \Bigl \Bigr \, \; \: \! \quad \qquad \displaystyle \( \)".split()
)
IGNORED |= set(r"~ $ \$ % \% ° \degree \circ \mathbf \boldsymbol \mathbb \mathcal € £".split()) | {
    "\\ ",
    "\\\n",
}
SYNONYMS = dict(
    pair.split(":")
    for pair in r"""\dfrac:\frac \tfrac:\frac \cfrac:\frac sqrt:\sqrt √:\sqrt sin:\sin cos:\cos tan:\tan ln:\ln log:\log
    pi:\pi π:\pi ∞:\infty −:- –:- ×:* \times:* \cdot:* ·:* \div:/ ÷:/ and:, or:, \lbrace:\{ \rbrace:\} \pm:± \mp:∓
    \le:<= \leq:<= \leqslant:<= ≤:<= \ge:>= \geq:>= \geqslant:>= ≥:>= \lt:< \gt:> \ne:!= \neq:!= ≠:!= \in:= ∈:=
    ∪:\cup \lvert:| \rvert:| \vert:|""".split()
)


def tokenize(text):
    r"""Cut LaTeX into tokens; spacing, currency, percent and degree signs disappear, other words become "text:...".

    >>> tokenize(r"x = \dfrac12 \text{ cm}^2")
    ['x', '=', '\\frac', '{', '1', '}', '{', '2', '}', 'text:cm']
    """
    text = text.strip().rstrip(".,;")
    text = re.sub(
        r"(\\[dtc]?frac)\s*([0-9])\s*(?=[0-9{\\])", r"\1{\2}", text
    )  # \frac12 is one half, not twelve
    text = re.sub(r"(\\[dtc]?frac\s*\{[^{}]*\})\s*([0-9])", r"\1{\2}", text)
    tokens = []
    for token in TOKEN.findall(text):
        token = SYNONYMS.get(token, token)
        if token in IGNORED or (token[0] == "^" and len(token) > 1):
            continue
        if token.startswith((r"\begin", r"\end")):
            token = re.match(r"\\[a-z]+", token).group()
        elif (
            token[0] == "\\" and token[-1] in "}0123456789" and len(token) > 2
        ):  # \text{...} and perhaps a power
            content = token[token.index("{") + 1 : token.index("}")].strip(" .,;~")
            if not tokens and re.fullmatch(
                r"[-A-Z0-9,.() ]+", content
            ):  # \text{(D)}, \text{A,B}: choices
                tokens += TOKEN.findall(content)
                continue
            token = SYNONYMS.get(content, "text:" + content.lower()) if content else ","
        elif len(token) > 1 and token.isascii() and token.isalpha():
            token = "text:" + token.lower()
        elif "_{" in token:  # x_{1} is x_1
            token = token.replace("{", "").replace("}", "")
        if token != "," or tokens[-1:] != [","]:  # "2, and 3" has one separator
            tokens.append(token)
    return tokens


class Group(NamedTuple):
    """Several values: a point or interval ("(", "[" ...), a set or list ("{"), a union, a matrix, an inequality."""

    opening: str
    items: tuple
    closing: str = ""


class Equation(NamedTuple):
    """`balance` is the same however the equation is rearranged; `value` is the right side if the left is a name."""

    balance: object
    value: object


def same_value(a, b):
    """Compare two results of `Evaluator.answer`, each a number, a Group or an Equation."""
    if isinstance(a, Equation) and isinstance(b, Equation) and None not in (a.balance, b.balance):
        return same_value(a.balance, b.balance)
    a, b = (
        side.value if isinstance(side, Equation) else side for side in (a, b)
    )  # x = 5 matches 5
    if isinstance(a, Group) and isinstance(b, Group):
        if (a.opening, a.closing, len(a.items)) != (b.opening, b.closing, len(b.items)):
            return False
        if a.opening not in ("{", r"\cup"):
            return all(same_value(*pair) for pair in zip(a.items, b.items))
        left = list(b.items)  # without order: strike out a partner for each entry
        for item in a.items:
            partner = next((i for i, other in enumerate(left) if same_value(item, other)), None)
            if partner is None:
                return False
            del left[partner]
        return True
    if a is None or b is None or isinstance(a, Group) or isinstance(b, Group):
        return False
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    return cmath.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)


def number(value):
    """Return a value that arithmetic may use; exact fractions only up to a reasonable size."""
    if isinstance(value, (Group, Equation)):
        raise ValueError("not a number")
    if (
        isinstance(value, Fraction)
        and max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS
    ):
        return float(value)
    return value


def variable_value(name, point):
    """Return a fixed pseudo-random fraction for a variable; the negative point tells |x| from x."""
    size = Fraction(1000 + zlib.crc32((point + name).encode("utf-8", "replace")) % 9973, 1009)
    return -size if point == "negative" else size


def power(base, exponent):
    base, exponent = number(base), number(exponent)
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if exponent.denominator == 1 and bits * abs(exponent) <= MAX_BITS:
            return base**exponent.numerator
        base, exponent = float(base), float(exponent)  # 9^{9^{9}} overflows here, at once
    return base**exponent


def root(value, degree):
    if (
        isinstance(number(value), complex)
        or value >= 0
        or isinstance(degree, complex)
        or degree % 2 != 1
    ):
        return power(
            complex(value) if not isinstance(value, complex) and value < 0 else value, 1 / degree
        )
    return -power(-value, 1 / degree)  # the real cube root of -8, not the principal one


def factorial(n):
    if not isinstance(n, Fraction) or n.denominator != 1 or not 0 <= n <= 500:
        raise ValueError("not a factorial of a small integer")
    return Fraction(math.factorial(n.numerator))


FUNCTIONS = {
    r"\sin": cmath.sin, r"\cos": cmath.cos, r"\tan": cmath.tan, r"\ln": cmath.log, r"\log": cmath.log10,
    r"\arcsin": cmath.asin, r"\arccos": cmath.acos, r"\arctan": cmath.atan, r"\exp": cmath.exp,
    r"\cot": lambda x: 1 / cmath.tan(x), r"\sec": lambda x: 1 / cmath.cos(x), r"\csc": lambda x: 1 / cmath.sin(x),
}  # fmt: skip
CONSTANTS = {r"\pi": math.pi, r"\infty": math.inf, "e": math.e, "i": 1j}
SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
FLIPPED = {">": "<", ">=": "<=", "<": ">", "<=": ">=", "=": "=", "!=": "!="}  # keys: all relations
CLOSING = {
    "(": (")", "]"),
    "[": (")", "]"),
    r"\{": (r"\}",),
    "{": ("}",),
    r"\langle": (r"\rangle",),
}
NAME = re.compile(
    r"(?!\\pi|\\infty|[ei]$)(?:\\[A-Za-z]+|[A-Za-z]|text:.*)(?:_\w+)?(?:\([A-Za-z]\))?"
)
ENDS = ("", r"\}", r"\cup", r"\rangle", r"\\", r"\end")


class Evaluator:
    """Recursive descent parser that computes while it reads, with the variables at one point.

    answer    = statement {"," statement}            product = factor {["*" | "/"] factor | unit}
    statement = union {relation union}               factor  = {sign} primary {"!" | "^" factor}
    union     = sum {"∪" sum}                        primary = number | variable | function | bracket | ...
    sum       = product {sign product}
    """

    def __init__(self, tokens, point, sign=1):
        self.tokens, self.point, self.sign = (
            tokens + [""],
            point,
            sign,
        )  # "" is the end; sign is what ± stands for
        self.position = self.depth = 0
        self.has_variables = self.has_signs = self.inside_bars = False

    def next_is(self, *tokens):
        return self.tokens[self.position] in tokens

    def take(self):
        self.position += 1
        return self.tokens[self.position - 1]

    def skip(self, token):
        """Take the next token if it is the given one, and tell whether it was."""
        self.position += (found := self.next_is(token))
        return found

    def expect(self, *tokens):
        if not self.next_is(*tokens):
            raise ValueError(f"expected one of {tokens}")
        return self.take()

    def answer(self):
        items = []
        while not items or self.skip(","):
            start, self.has_signs = self.position, False
            items.append(self.statement())
            if self.has_signs:  # an entry with ± counts as two
                self.position, self.sign = start, -self.sign
                items.append(self.statement())
                self.sign = -self.sign
        self.expect("")
        return items[0] if len(items) == 1 else Group("{", tuple(items))

    def statement(self):
        start, sides, relations = self.position, [self.union()], []
        name = NAME.fullmatch("".join(self.tokens[start : self.position]))
        while self.next_is(*FLIPPED):
            relations.append(self.take())
            sides.append(self.union())
        if relations == ["="]:
            left, right = sides
            if isinstance(left, Group) or isinstance(right, Group):
                return Equation(None, right)
            # Left minus right is fixed up to a factor: divide it by its value at another point.
            other = Evaluator(self.tokens[start : self.position], "reference", self.sign)
            scale = other.sum() - (other.take() and other.sum())
            return Equation((left - right) / scale, right if name else None)
        if ">" in relations or ">=" in relations:  # x > 5 is 5 < x
            sides, relations = sides[::-1], [FLIPPED[relation] for relation in relations[::-1]]
        return Group(" ".join(relations), tuple(sides)) if relations else sides[0]

    def union(self):
        parts = [self.sum()]
        while self.skip(r"\cup"):
            parts.append(self.sum())
        return parts[0] if len(parts) == 1 else Group(r"\cup", tuple(parts))

    def sum(self):
        value = self.product()
        while self.next_is("+", "-", "±", "∓"):  # the sign belongs to the next product
            value = number(number(value) + number(self.product()))
        return value

    def product(self):
        value = self.factor()
        while True:
            last, token = self.tokens[self.position - 1], self.tokens[self.position]
            if token.startswith(
                "text:"
            ):  # a unit, without effect unless it is a word such as million
                words = self.take().removeprefix("text:")
                if re.sub("[^a-z]", "", words) in ("am", "pm"):
                    raise ValueError("a time of day, not a number")
                value = number(value) * math.prod(SCALES.get(word, 1) for word in words.split())
            elif self.skip("*"):
                value = number(number(value) * number(self.factor()))
            elif self.skip("/"):
                value = number(number(value) / number(self.factor()))
            elif self.starts_factor(token) and not (token[0].isdigit() and last[0].isdigit()):
                value = number(number(value) * number(self.factor()))
            else:
                return value

    def starts_factor(self, token):
        """Tell whether a token continues a product without a multiplication sign."""
        opens_bars = token == "|" and not self.inside_bars
        return token not in ENDS and (token[0].isalnum() or token[0] in "\\([{" or opens_bars)

    def factor(self):
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        sign = 1
        while self.next_is("+", "-", "±", "∓"):
            self.has_signs |= self.next_is("±", "∓")
            sign *= {"+": 1, "-": -1, "±": self.sign, "∓": -self.sign}[self.take()]
        value = self.primary()
        while self.next_is("!", "^"):
            value = factorial(value) if self.take() == "!" else power(value, self.factor())
        self.depth -= 1
        return value if sign == 1 else -number(value)

    def primary(self):
        token = self.take()
        if token[:1].isdigit() or token[:1] == ".":
            return self.literal(token)
        if token in CLOSING:
            return self.bracketed(token)
        if token == "|" and not self.inside_bars:
            self.inside_bars = True
            value = abs(number(self.sum()))
            self.inside_bars = False
            self.expect("|")
            return value
        if token == r"\begin":
            return self.matrix()
        if token == r"\frac":
            return number(number(self.factor()) / number(self.factor()))
        if token == r"\sqrt":
            degree = number(self.bracketed(self.take())) if self.next_is("[") else Fraction(2)
            return root(self.primary(), degree)
        if token in FUNCTIONS:
            return self.function(token)
        if token in CONSTANTS:
            return CONSTANTS[token]
        is_label = token.startswith("text:") and self.next_is("=")  # \text{Area} = 5
        if not (is_label or re.fullmatch(r"\\?[^\W\d_]+(_\w+)?", token)):
            raise ValueError(f"not an expression: {token!r}")
        self.has_variables = True
        return variable_value(token, self.point)

    def literal(self, token):
        r"""Read a number, also in another base (101_2) or mixed (1\frac{2}{3} or 1 2/3)."""
        if "_" in token:
            digits, base = token.split("_")
            return Fraction(int(digits, int(base)))
        following = " ".join(self.tokens[self.position : self.position + 7]) + " "
        mixed = re.match(r"\\frac \{ ([0-9]+) \} \{ ([0-9]+) \} |([0-9]+) / ([0-9]+) ", following)
        if mixed is None or not token.isdigit():
            return Fraction(token)
        self.position += len(mixed.group().split())
        return Fraction(token) + Fraction(*[int(digits) for digits in mixed.groups() if digits])

    def bracketed(self, opening):
        items = [self.union()]
        while self.skip(","):
            items.append(self.union())
        closing = self.expect(*CLOSING[opening])
        if len(items) == 1:  # (5), [5] and {5} are 5
            if opening + closing in ("(]", "[)"):
                raise ValueError("an interval with one end")
            return items[0]
        is_set = opening in ("{", r"\{")  # a set is a list: its order does not count
        return Group("{", tuple(items)) if is_set else Group(opening, tuple(items), closing)

    def matrix(self):
        rows = [[]]
        while True:
            rows[-1].append(number(self.sum()))
            separator = self.expect("&", r"\\", r"\end")
            if separator == r"\end":
                return Group("matrix", tuple(Group("row", tuple(row)) for row in rows))
            if separator == r"\\":
                rows.append([])

    def function(self, name):
        r"""Read \sin x, \sin^2 x, \log_2 x; the argument is a bracket or a product that ends at the next function."""
        base = number(self.primary()) if self.skip("_") else None
        exponent = self.factor() if self.skip("^") else 1
        is_bracket = self.next_is("(", "{")
        argument = number(self.primary() if is_bracket else self.factor())
        while (
            not is_bracket
            and self.starts_factor(self.tokens[self.position])
            and not self.next_is(*FUNCTIONS)
        ):
            argument = number(argument * number(self.factor()))
        value = FUNCTIONS[name](argument) if base is None else cmath.log(argument) / cmath.log(base)
        return power(value, exponent)


# ==================================================================================================
# The two tasks: what is asked, and what a response earns
# ==================================================================================================

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


TASKS = {
    "kk": Task(kk_reward, 3.0, "people", system=KK_SYSTEM_PROMPT, opening="<think>"),
    "math": Task(math_reward, 1.0, "level", request=f"\n\n{MATH_REQUEST}"),
}


def question_and_solution(row):
    """What a row asks and the solution, told by its columns; MATH's solution has it in a box."""
    if "quiz" in row:  # K-and-K/knights-and-knaves
        return row["quiz"], row["solution_text_format"]
    if "problem" in row:  # DeepScaleR, MATH-500, MATH
        return row["problem"], row["answer"] if "answer" in row else extract_boxed(row["solution"])
    if "question" in row:  # GSM8K
        return row["question"], str(row["answer"]).split("####")[-1].strip()
    if "reward_model" in row:  # verl: the prompt is chat messages
        truth = row["reward_model"]["ground_truth"]
        return row["prompt"], truth["solution_text_format"] if isinstance(truth, dict) else truth
    return row["prompt"], row["solution"]  # TRL: the prompt is chat messages, or text
