"""A small math set of our own with \\boxed{} answers, at a level the bundled model can attempt.

    python data/make/arithmetic.py             # rewrites data/math_{train,test}.jsonl byte for byte

Columns as in the public MATH set: problem, answer, level, type. Four types (whole numbers,
fractions, decimals, pairs) at three levels: the level is the number of steps it takes.
"""

from fractions import Fraction

from puzzles import files_parser, write_files

TYPES = ("whole numbers", "fractions", "decimals", "pairs")


def _operand(rng, kind):
    if kind == "pairs":
        return (rng.randint(1, 9), rng.randint(1, 9))
    return rng.randint(1, 9)


def _write(value, kind, denominator):
    """How a value stands in a problem: 12, \\frac{3}{7}, 0.4 or (1, 2)."""
    if kind == "pairs":
        return f"({value[0]}, {value[1]})"
    if kind == "fractions":
        return f"\\frac{{{value}}}{{{denominator}}}"
    return f"{value / 10:.1f}" if kind == "decimals" else str(value)


def _apply(sign, left, right):
    if isinstance(left, tuple):
        return tuple(_apply(sign, a, b) for a, b in zip(left, right))
    return left + right if sign == "+" else left - right


def _answer(value, kind, denominator):
    """A value as it stands in an answer: fractions reduced."""
    if kind != "fractions":
        return _write(value, kind, denominator)
    value = Fraction(value, denominator)
    if value.denominator == 1:
        return str(value.numerator)
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def generate_problem(rng, level):
    """`level` additions and subtractions of 1 to 9, all values in 0 to 20 (tenths for decimals)."""
    while True:
        kind, denominator = rng.choice(TYPES), rng.randint(2, 9)
        operands = [_operand(rng, kind) for _ in range(level + 1)]
        signs = [rng.choice("+-") for _ in range(level)]
        values = operands[:1]
        for sign, operand in zip(signs, operands[1:]):
            values.append(_apply(sign, values[-1], operand))
        numbers = sum(map(tuple, values), ()) if kind == "pairs" else values
        if all(0 <= number <= 20 for number in numbers):
            break
    chain = _write(operands[0], kind, denominator)
    for sign, operand in zip(signs, operands[1:]):
        chain += f" {sign} {_write(operand, kind, denominator)}"
    answer = _answer(values[-1], kind, denominator)
    problem = {"problem": f"What is {chain}?", "answer": answer, "level": level, "type": kind}
    return problem, (kind, denominator, operands, signs)


def _slip(rng, value, error_rate):
    """A pupil's slip: one too many or one too few, with probability error_rate."""
    if isinstance(value, tuple):
        return tuple(_slip(rng, number, error_rate) for number in value)
    slip = rng.choice((-1, 1)) if rng.random() < error_rate else 0
    # after a slip a difference may fall below 0, for which there are no words
    return max(0, value + slip)


def worked_solution(rng, parts, error_rate=0.0):
    """'7 + 5 = 12, 12 - 3 = 9. The answer is \\boxed{9}.': step by step, with slips if asked."""
    kind, denominator, operands, signs = parts
    value, steps = operands[0], []
    for sign, operand in zip(signs, operands[1:]):
        result = _slip(rng, _apply(sign, value, operand), error_rate)
        written = [_write(x, kind, denominator) for x in (value, operand, result)]
        steps.append(f"{written[0]} {sign} {written[1]} = {written[2]}")
        value = result
    answer = _answer(value, kind, denominator)
    return ", ".join(steps) + f". The answer is \\boxed{{{answer}}}."


def main():
    args = files_parser(__doc__, train=300, test=100).parse_args()
    generate = lambda rng, level: generate_problem(rng, level)[0]
    write_files(args, "math", (1, 2, 3), generate, "problem")


if __name__ == "__main__":
    main()
