"""Knights-and-Knaves puzzles in the language of the public data set K-and-K/knights-and-knaves.

    python data/make/puzzles.py                # rewrites data/kk_{train,test}.jsonl byte for byte

On an island every inhabitant is a knight (always tells the truth) or a knave (always lies). Each
makes one claim; the question is who is what. Claims, as in the public set, people numbered from 0:

    ("telling-truth", 1)                          person 1 is a knight          an *atom*
    ("lying", 1)                                  person 1 is a knave           an *atom*
    ("not", atom)                                 person 1 is not a knave
    ("and" | "or" | "->" | "<=>", atom, atom)     two facts joined

Here are `generate_puzzle` (a random puzzle with exactly one solution), `worked_solution` (how the
bundled model was taught to solve one) and the command that writes the two files.
"""

import argparse
import json
import random
from itertools import product
from pathlib import Path

NAMES = """
    Abigail Aiden Alexander Amelia Aria Aurora Ava Avery Benjamin Charlotte Chloe Daniel David
    Elizabeth Ella Emily Emma Ethan Evelyn Grace Harper Henry Isabella Jack Jackson Jacob James
    Joseph Liam Lily Logan Lucas Luke Mason Matthew Mia Michael Noah Oliver Olivia Owen Penelope
    Riley Samuel Scarlett Sebastian Sofia Sophia Victoria William Zoey
"""
NAMES = NAMES.split()
# How a claim is attributed to its speaker.
ATTRIBUTIONS = (
    '"{claim}" - {name}.', '"{claim}," {name} claimed.', '"{claim}," {name} declared.',
    '"{claim}," {name} mentioned.', 'According to {name}, "{claim}".',
    'As {name} put it, "{claim}".', 'In a statement by {name}: "{claim}".',
    "In {name}'s words: \"{claim}\".", '{name} asserted: "{claim}".',
    '{name} commented, "{claim}".', '{name} noted, "{claim}".',
    '{name} remarked, "{claim}".', '{name} said, "{claim}."', '{name} stated, "{claim}".',
    '{name} was heard saying, "{claim}".', '{name} expressed that {claim}.',
    '{name} said that {claim}.', '{name} told you that {claim}.',
)  # fmt: skip
OPENING = (
    "A very special island is inhabited only by knights and knaves. "
    "Knights always tell the truth, and knaves always lie."
)
QUESTION = "So who is a knight and who is a knave?"
# Words of a worked solution that do not matter to its outcome: any of a kind will do, as in prose.
WORDING = {
    "supposition": "Suppose Assume Imagine Say Consider Try Picture Perhaps",
    "saying": "says claims states insists argues asserts holds maintains",
    "conclusion": "so thus hence therefore making meaning altogether accordingly",
    "relation": "for from by with given since as being",
    "agreement": "ok fine",
    "contradiction": "contradiction impossible",
    "and": "and plus",
    "or": "or else",
    "->": "then implies",
    "<=>": "iff equals",
}
WORDING = {kind: words.split() for kind, words in WORDING.items()}
WORDING_WORDS = sorted({word for words in WORDING.values() for word in words})
PATIENCE = 5  # how many suppositions a pupil makes that may give up


def role(is_knight):
    """True → 'knight', False → 'knave'."""
    return "knight" if is_knight else "knave"


def answer_text(names, roles):
    """'(1) Zoey is a knight', a line for each person."""
    pairs = enumerate(zip(names, roles), 1)
    return "\n".join(f"({i}) {name} is a {role(is_knight)}" for i, (name, is_knight) in pairs)


def claim_text(claim, names):
    """('->', ('lying', 0), ('telling-truth', 1)) → 'If Zoey is a knave then Liam is a knight'."""
    kind, *parts = claim
    if kind in ("telling-truth", "lying"):
        return f"{names[parts[0]]} is a {role(kind == 'telling-truth')}"
    if kind == "not":
        return claim_text(parts[0], names).replace(" is a ", " is not a ")
    first, second = (claim_text(part, names) for part in parts)
    if kind == "->":
        return f"If {first} then {second}"
    return f"{first} {'if and only if' if kind == '<=>' else kind} {second}"


def combine(kind, first, second):
    """The truth of two facts joined by 'and', 'or', '->' or '<=>'."""
    return {
        "and": first and second,
        "or": first or second,
        "->": not first or second,
        "<=>": first == second,
    }[kind]


def claim_is_true(claim, roles):
    """Is the claim true where person i is a knight exactly if roles[i]?"""
    kind, *parts = claim
    if kind in ("telling-truth", "lying"):
        return roles[parts[0]] == (kind == "telling-truth")
    if kind == "not":
        return not claim_is_true(parts[0], roles)
    return combine(kind, *(claim_is_true(part, roles) for part in parts))


def solutions(claims):
    """Every way to hand out the roles under which knights tell the truth and knaves lie."""
    agree = lambda roles: all(claim_is_true(claim, roles) == r for claim, r in zip(claims, roles))
    return list(filter(agree, product([True, False], repeat=len(claims))))


def random_claim(rng, speaker, people):
    """A claim as in the public set: 1/6 plain facts, 1/6 negations, 1/6 each connective.

    Nobody says 'I am a knave' (no one could), and plain facts are about somebody else.
    """
    others = [person for person in range(people) if person != speaker]
    kind = rng.choice(("fact", "not", "and", "or", "->", "<=>"))
    if kind in ("fact", "not"):
        atom = (rng.choice(("telling-truth", "lying")), rng.choice(others))
        return atom if kind == "fact" else ("not", atom)
    atoms = [("telling-truth", person) for person in range(people)]
    atoms += [("lying", person) for person in others]
    first = rng.choice(atoms)
    second = rng.choice([atom for atom in atoms if atom != first])
    return (kind, first, second)


def generate_puzzle(rng, people):
    """A random puzzle for 2 to 8 people with exactly one solution, in the public set's columns."""
    while True:
        claims = tuple(random_claim(rng, speaker, people) for speaker in range(people))
        found = solutions(claims)
        if len(found) == 1:
            break
    names = rng.sample(NAMES, people)
    sentences = [
        rng.choice(ATTRIBUTIONS).format(name=name, claim=claim_text(claim, names))
        for name, claim in zip(names, claims)
    ]
    listed = f"{', '.join(names[:-1])}{',' * (people > 2)} and {names[-1]}"
    told = f"{OPENING} You meet {people} inhabitants: {listed}. {' '.join(sentences)} {QUESTION}"
    return {
        "quiz": told,
        "names": names,
        "solution": list(found[0]),
        "solution_text_format": answer_text(names, found[0]),
        "statements": repr(claims),
    }


def worked_solution(rng, names, claims, slip=0.0, misread=0.0, give_up=0.0):
    """Reason in the open: suppose roles, check claims in turn, on a contradiction suppose others.

    A supposed role is written as one word with the name, and each fact as *subject, supposed role,
    claimed role, verdict*: every verdict follows from the words right before it, and what is
    supposed of a person can be copied whole. That is what makes the format learnable by a model of
    a million parameters:

        Suppose Ava-knight Mia-knave
        Ava-knight insists Mia Mia-knave knave true for knight fine
        Mia-knave says Ava Ava-knight knave false or Mia Mia-knave knight false so false as knave ok

    The first supposition is a guess. The next one agrees with every claim that has failed so far
    and changes as few roles as it can. Words that do not matter are drawn from WORDING. The pupil
    that reinforcement learning is to improve has three faults, each a probability:

    - `slip`: a verdict is flipped, and the reasoning goes on from the mistake;
    - `misread`: an *or* is read as exclusive, *if* as *if and only if*, or a *not* is overlooked;
    - `give_up`: on a contradiction (always after PATIENCE suppositions) the last one is the answer.

    Returns the text after the opening <think>: reasoning, </think>, and the <answer>.
    """

    def happens(probability):
        return rng.random() < probability

    def wording(kind):
        return rng.choice(WORDING[kind])

    def verdict(truth):
        return bool(truth) != happens(slip)

    def check_fact(atom, roles):
        """('lying', 1) → 'Mia Mia-knight knave false' if supposed a knight, and the verdict."""
        claimed, supposed = atom[0] == "telling-truth", roles[atom[1]]
        truth = verdict(claimed == supposed)
        name = names[atom[1]]
        return f"{name} {name}-{role(supposed)} {role(claimed)} {str(truth).lower()}", truth

    def check_claim(claim, roles):
        """The words and the verdict for a whole claim."""
        kind, *parts = claim
        if kind in ("telling-truth", "lying"):
            return check_fact(claim, roles)
        if kind == "not":  # 'not a knight' is said more shortly as 'a knave'
            (kind, person), overlooked = parts[0], happens(misread)
            opposite = {"telling-truth": "lying", "lying": "telling-truth"}
            return check_fact((kind if overlooked else opposite[kind], person), roles)
        (first, first_truth), (second, second_truth) = (check_fact(atom, roles) for atom in parts)
        misreading = {"or": first_truth != second_truth, "->": first_truth == second_truth}
        truth = combine(kind, first_truth, second_truth)
        if kind in misreading and happens(misread):
            truth = misreading[kind]
        truth = verdict(truth)
        return (
            f"{first} {wording(kind)} {second} {wording('conclusion')} {str(truth).lower()}",
            truth,
        )

    untried = list(product([True, False], repeat=len(names)))
    contradicted, lines, suppositions = set(), [], 0
    roles = rng.choice(untried)
    while True:
        suppositions += 1
        supposed = " ".join(f"{name}-{role(is_knight)}" for name, is_knight in zip(names, roles))
        lines.append(f"{wording('supposition')} {supposed}")
        for speaker, claim in enumerate(claims):
            checked, truth = check_claim(claim, roles)
            consistent = verdict(truth == roles[speaker])
            name, speaker_role = names[speaker], role(roles[speaker])
            said = f"{name}-{speaker_role} {wording('saying')} {checked} {wording('relation')}"
            judged = wording("agreement" if consistent else "contradiction")
            lines.append(f"{said} {speaker_role} {judged}")
            if not consistent:
                break
        if consistent or happens(give_up) or (give_up and suppositions == PATIENCE):
            break
        contradicted.add(speaker)
        if roles in untried:
            untried.remove(roles)
        agree = lambda r: all(claim_is_true(claims[s], r) == r[s] for s in contradicted)
        candidates = list(filter(agree, untried)) or untried
        if not candidates:  # only mistakes lead here: begin again
            candidates = untried = list(product([True, False], repeat=len(names)))
        changes = [sum(a != b for a, b in zip(roles, r)) for r in candidates]
        nearest = [r for r, changed in zip(candidates, changes) if changed == min(changes)]
        roles = rng.choice(nearest)
    answer = answer_text(names, roles)
    return "\n" + "\n".join(lines) + f"\n</think>\n<answer>\n{answer}\n</answer>"


def files_parser(doc, train, test):
    """The flags of this script and of arithmetic.py."""
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=look)
    parser.add_argument("--train", type=int, default=train, help="training rows of each size")
    parser.add_argument("--test", type=int, default=test, help="test rows of each size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parent.parent)
    return parser


def write_files(args, name, sizes, generate, question):
    """Write NAME_train.jsonl, shuffled, and NAME_test.jsonl: rows generate(rng, size), all new."""
    rng = random.Random(args.seed)
    files, seen = {"test": [], "train": []}, set()
    for size in sizes:
        for use, rows in files.items():
            target = len(rows) + getattr(args, use)
            while len(rows) < target:
                row = generate(rng, size)
                if row[question] not in seen:  # none twice, within a file or across the two
                    seen.add(row[question])
                    rows.append(row)
    rng.shuffle(files["train"])
    for use, rows in files.items():
        path = args.folder / f"{name}_{use}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} rows")


def main():
    parser, text = files_parser(__doc__, train=500, test=200), "sizes of puzzle (2 to 8)"
    look = {"nargs": "+", "metavar": "N", "choices": range(2, 9), "help": text}
    parser.add_argument("--people", type=int, default=[2, 3, 4, 5], **look)
    args = parser.parse_args()
    write_files(args, "kk", args.people, generate_puzzle, "quiz")


if __name__ == "__main__":
    main()
