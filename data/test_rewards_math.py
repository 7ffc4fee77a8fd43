"""Checks the mathematics of rewards.py: which answers are paid, and that no text raises."""

import json
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pytest

import rewards


def paid(solution, answer):
    return rewards.math_reward([f"\\boxed{{{answer}}}"], [solution]) == [1.0]


# Each row: a solution, and answers in a box that earn its reward.
PAID = {
    "a number is compared by value, not by spelling": r"""
        11 | 11.0 | 011 | +11 | (11) | 11. | $11$ | \text{11} | \{11\} | {11} | 1.1E1
        \frac{3}{4} | 3/4 | .75 | \dfrac 3 4 | \tfrac34 | \left(\frac{3}{4}\right) | \\frac{3}{4}
        -\frac73 | \frac{-7}{3} | -7/3 | -2\frac{1}{3} | -2 1/3 | −2\frac13
        \frac13 | 0.\overline{3} | 0.\overline3  ;;  \frac16 | .1\overline{6}
        1200 | 1,200 | 1{,}200 | 1,\! 200 | 1\,200 | \(1,200\) | \$1,200 | 1.2e3""",
    "one of the two may lack the unit; percent, degree, dollar are units": r"""
        158000 | 158000\% | \$158000 | 158000^\circ | 158000\text{ cm} | 158000cm | €158000
        16\pi\text{ cm}^2 | 16\pi | 16 \pi cm² | 16π \text{ square centimeters}
        28\% | 28 | 28 percent  ;;  90^\circ | 90 | 90^{\circ} | 90° | 90 degrees
        5\text{ m} | 5 | 5 meters  ;;  9\text{ m/s}^2 | 9
        60\text{ miles per hour} | 60 miles/hour | 60
        \frac12\text{ hour} | 0.5 hours  ;;  9\text{ values} | 9  ;;  \$5 | 5 dollars""",
    "one of the two may lack the label": r"""
        x = 5 | 5 | x=5.0  ;;  5 | x = 5 | \theta = 5 | f(x)=5 | a_{n+1} = 5 | x = 5\text{ cm}
        (x, y) = (1, 0.5) | (1, \frac12)  ;;  x \in [0, \infty) | [0, ∞)  ;;  1, 2 | x=2, x=1""",
    "a list or a set has no order; a pair has one, and its elements are compared": r"""
        \{1, 2, 3\} | 3,1,2 | 1, 2, \text{ and } 3 | 1; 2; 3 | 1 or 2 or 3 | \{3.0,2,1\}
        (1, \frac12) | \left( 1,\, 0.5 \right)  ;;  (1,2), (3,4) | (3,4), (1,2)
        x = 1, y = 2 | y = 2, x = 1  ;;  [0, 0.5) | [0, \frac{1}{2})""",
    "one number in two spellings": r"""
        $\frac12$ or $0.5$ | 0.5 | \frac12  ;;  So $\boxed{9}$. | 9 | 9.0""",
    "everything else is the same text; spaces and spellings of signs are none of it": r"""
        \text{two lines} | two lines  ;;  \text{(B)} | B | (B) | \textbf{(B)}  ;;  Yes | \text{Yes}
        2\sqrt{3} | 2\sqrt3 | 2√3 | 2 \sqrt 3  ;;  x^2 + 2x | x^{2}+2 x  ;;  2\alpha | 2α
        x \neq 3 | x ≠ 3 | x\ne3  ;;  x > 3 | x \gt 3  ;;  \emptyset | \varnothing | ∅
        1.83\times10^{14} | 1.83 × 10^14  ;;  \binom52 | \dbinom{5}{2}  ;;  1204_9 | 1204_{9}
        (-\infty,1)\cup(2,+\infty) | (-∞, 1) ∪ (2, ∞)  ;;  x^2 | x\u200b^2""",
}

# Each row: a solution, and answers that earn nothing.
UNPAID = {
    "what is still to be worked out: the question itself would be an answer": r"""
        11 | 5+6 | 11+0 | 22/2 | \frac{22}{2} | \frac{11}{1} | \sqrt{121} | 11^1 | -(-11) | --11
        11 | x = 5 + 6 = 11 | 5+6=11  ;;  100 | 10^2 | 10^{2}  ;;  \frac34 | 6/8 | \frac{1.5}{2}
        x^2+2x+1 | (x+1)^2+0  ;;  3+4i | (2+i)^2 + 0  ;;  (x-1)(x+1) | \frac{x^2-1}{1} | x^2-1
        \frac73 | 2 2/6 | 1 4/3  ;;  9 | 9^{9^9} | 9^9^9""",
    "near, or another number": r"""
        \frac13 | 0.333 | .33333333333333333333  ;;  5 | -5 | 5 6 | 5{}6 | 5e1  ;;  -5 | 5
        0 | 1e-99 | \frac{1}{10^{99}}  ;;  1 | 1/0 | 0/0 | 1e999999 | 1-e^{-25}  ;;  \pi | 3.14
        1,200 | 1,2 | 1, 200 | (1,200)  ;;  (1,200) | 1200  ;;  12000 | 1,2000
        1234567 | 1234,567  ;;  0.12 | 0.1,200
        \frac73 | -2\frac13 | 2\frac{-1}{3}  ;;  \frac13 | -0.\overline{3}
        540 | 5\$40 | 5€40 | 5$40 | 5{}\$40  ;;  56 | 5\text{}6 | 5\!6 | 5\left.6 | 5 6 | 5+6
        5 | ５ | ٥ | 5\u202e | \u202e5 | 5\0 | \text{five} | 5 hundred | 5 million | 5 dozen""",
    "percent of a share is another share": r"""
        0.5 | 0.5\% | 50\% | 0.5\%\% | \frac12\%  ;;  \frac12 | \frac{1}{2}\%
        1 | 1\% | 100\%""",
    "another unit, or words that are no known unit": r"""
        5\text{ cm} | 5 km | 5 pounds | 5\text{ cm}^2  ;;  \$5 | 5 cents | €5  ;;  25 | 5 cm^2
        5 | 5\text{ is wrong} | 5\text{ or six} | 5 squared | 5 square | 5m | 5 xy | 5:00
        60\text{ miles per hour} | 60 hours per mile  ;;  \sin 30^\circ | \sin 30
        5\text{ cm}, 3\text{ kg} | 5 kg, 3 cm  ;;  3 hours 2 minutes | 2 hours 3 minutes""",
    "another label, or a left side that is none": r"""
        y = 5 | x = 5  ;;  5 | x < 5 | x \ne 5 | 2x = 5 | xy = 5 | -x = 5 | x^2 = 5 | 6 = 5 | x=7=5
        xy = 4 | 4  ;;  n = 3k | 3  ;;  x=1, y=2 | 2, 1 | 1, 2 | x=2, y=1 | (1, 2)""",
    "several answers for one, another order, other brackets": r"""
        5 | 5 or 6 | 5\text{ or }6 | 5, 6 | 5, 5 | \pm 5 | \{5, 6\}  ;;  A | A or B | A, B | (A)(B)
        (1, 2) | \{1, 2\} | 1, 2 | (2, 1) | [1, 2] | (1, 2] | (1, 2, 2)  ;;  1, 2 | (1, 2) | 1
        1, 1, 2 | 1, 2, 2 | 1, 2  ;;  (1,2),(3,4) | (2,1),(3,4) | (1,2,3,4)
        x<1 \text{ or } x>2 | x<1 \text{ and } x>2  ;;  x<1, x>2 | x<1 and x>2 | x<1 or x>2
        \frac12 | 1/2 or 0.6  ;;  5 | [5]  ;;  \{1,2\}\setminus\{3,4\} | \{4,2\}\setminus\{3,1\}""",
    "another text": r"""
        abc | ABC | Abc | a b c  ;;  \sin^2 3x | \sin^{23} x  ;;  x > 3 | x \ge 3 | x < 3
        2^{\frac12} | 2^1/2  ;;  \sqrt{\frac12} | \sqrt1/2  ;;  \frac{x^2}{3} | x^{7/3} | x^2\frac23
        \frac{1}{23} | \frac{1}{2}3 | \frac123  ;;  2-\frac13 | 2\frac{-1}{3}
        -\frac{3+x}{2} | \frac{-3+x}{2}  ;;  8:30 AM | 8:30 PM
        \log_2\frac58 | \frac{\log_2 5}{8}  ;;  \emptyset | \{\} | 0 |  | \,  ;;  \{\} | ()""",
    "the price of comparing as text: right, and unpaid": r"""
        2\sqrt{3} | \sqrt{12}  ;;  9a+11 | 11+9a  ;;  x > 3 | 3 < x  ;;  \pm 2 | 2, -2
        \cot x | \cot(x)  ;;  mn | m \cdot n  ;;  1200 | 1.2\times 10^3  ;;  6/8 | 3/4""",
}

MARKS = {r"\u200b": "\u200b", r"\u202e": "\u202e", r"\0": "\0"}


def pairs(table):
    """(solution, answer) of each answer of a table, and of each solution as its own answer."""
    for mark, sign in MARKS.items():
        table = table.replace(mark, sign)
    for row in table.replace(";;", "\n").strip().splitlines():
        solution, *answers = row.strip().split(" | ")
        yield solution, solution, True
        for answer in answers:
            yield solution, answer, False


@pytest.mark.parametrize("why", PAID)
def test_a_right_answer_is_paid(why):
    unpaid = [(truth, answer) for truth, answer, _ in pairs(PAID[why]) if not paid(truth, answer)]
    assert unpaid == []


@pytest.mark.parametrize("why", UNPAID)
def test_a_wrong_or_unfinished_answer_is_not_paid(why):
    """But each solution is paid for itself."""
    rows = pairs(UNPAID[why])
    assert [(truth, answer) for truth, answer, same in rows if paid(truth, answer) != same] == []


def test_copying_the_problem_is_not_answering_it():
    lines = (ROOT / "data" / "math_train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    answers = [row["answer"] for row in rows]
    copies = [row["problem"].removeprefix("What is ").removesuffix("?") for row in rows]
    for form in ("%s", "x = (%s)", r"\frac{%s}{1}\text{ cm}", "%s+0", "%s = %s"):
        boxes = ["\\boxed{" + form.replace("%s", copy) + "}" for copy in copies]
        assert rewards.math_reward(boxes, answers) == [0.0] * len(rows), form


BOXES = {
    r"\boxed{1} or \fbox{2}": "2",
    r"\boxed{\frac{1}{2}} }": r"\frac{1}{2}",
    r"\boxed{\left\{ 1 \right.}": r"\left\{ 1 \right.",
    r"\boxed{5} no: $\boxed\frac12$": r"\frac12",
    r"$\boxed 5$ eggs": "5",
    r"\boxed{3}, in \boxed as told": "3",
    r"\boxed{1} no: \boxed{2": None,
    r"\boxed{1}</think> no.": None,
}


def test_the_last_box_is_read():
    for text, content in BOXES.items():
        assert rewards.extract_boxed(text) == content, text
    texts = [r"\boxed{42}", r"\boxed{42} or \boxed{}", "42", r"\boxed{%s}" % ("4" * 10_000)]
    texts += [[{"content": r"\boxed{7}"}, {"content": r"\boxed{42}"}]]  # a chat: its last message
    assert rewards.math_reward(texts, [42] * 5, level=[1] * 5) == [1.0, 0.0, 0.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="argument 2 is shorter than argument 1"):
        rewards.math_reward(["", ""], ["1"])


@pytest.mark.parametrize("solution", [None, float("nan"), "", " ", [], ["2"], {}, r"\boxed{}"])
def test_a_row_without_a_solution_is_an_error(solution):
    """Otherwise the answer "none" would be right."""
    with pytest.raises(ValueError, match="`solution` does not give an answer"):
        rewards.math_reward([r"\boxed{none}"], [solution])


def test_what_is_compared_as_text_is_known():
    read = ["2", "x = 5", r"\frac12\text{ hours}", "(1, 2.5)", "two lines", r"[1, \infty)", "-i"]
    texts = [r"2\sqrt{3}", "x^2+1", "8:30 AM", r"\forall x", "9/", "(1, 2x)", "6/8", "9" * 999]
    assert [text for text in read if rewards.is_compared_as_text(text)] == []
    assert [text for text in texts if not rewards.is_compared_as_text(text)] == []
    assert not rewards.is_compared_as_text(r"So $\boxed{9}$.")


PIECES = r"""√ \sqrt ( [( { - | \frac \frac1 \sqrt[ 2^{ \text{ \text{m 2^ 9! 1/ x= (x,y)= 1< 1, \pm
x_ % 1_ € \$ & \\ ) ] } \} \{ . , ; : + * _ ^ 0 7 12 1,000 .5 1/0 x tea or and i π ² ٥ 𝟓 $ 5cm
\infty 9^{9^{9}} 9^{999} 1e99 0.\overline{ \overline{3} 99999999999999999999 \boxed \sin^2 = {,}"""


def test_no_text_raises():
    """Whatever a model writes. What would take long, such as a power, is not even worked out."""
    generator = random.Random(0)
    pieces = [*PIECES.split(), "1 1/2 ", "\u200f", "\ud800", "\x00", "5 feet per ", " ", " or "]
    texts = [piece * (size // len(piece)) for piece in pieces for size in (150, 290, 990)]
    texts += ["(" * 149 + "5" + ")" * 149, "{" * 149 + "1,2" + "}" * 147]
    for count in [3, 9, 40] * 300:
        texts.append("".join(generator.choices(pieces, k=count)))
    for text in texts:
        boxed = rf"\boxed{{{text}}}"
        assert rewards.math_reward([boxed, text], ["17", "3x+(1,2)"]) == [0.0, 0.0], text
        assert rewards.answers_match(text, text + "x") in (True, False)  # either verdict
    assert rewards.number("1e999999") is None
    assert not rewards.answers_match("", r"\,")  # if a row has no more to compare
    for solution in ("9", r"9^{9^{9}}"):
        assert rewards.math_reward([r"\boxed{9^{9^{9^{9}}}}"], [solution]) == [0.0]
