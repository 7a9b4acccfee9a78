"""Write the quickstart's data: additions of a three-digit and a one-digit number, as JSONL.

Every digit that an evaluation question needs is seen in training; the question itself is not.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

Row = dict[str, str]


def make_rows(seed: int, num_eval: int) -> tuple[list[Row], list[Row]]:
    """(training rows, evaluation rows), both shuffled by the seed; together they are all 9,000 questions once."""
    pairs = [(a, b) for a in range(100, 1000) for b in range(10)]
    random.Random(seed).shuffle(pairs)
    return [_row(*pair) for pair in pairs[num_eval:]], [_row(*pair) for pair in pairs[:num_eval]]


def _row(a: int, b: int) -> Row:
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def write_jsonl(path: Path, rows: list[Row]) -> None:
    """Whole or not at all: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    draft.replace(path)
    print(f"{path}: {len(rows)} questions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("data"), help="folder for train.jsonl and eval.jsonl")
    parser.add_argument("--eval", type=int, default=256, help="questions held out for evaluation")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    train, evaluation = make_rows(args.seed, args.eval)
    write_jsonl(args.out / "train.jsonl", train)
    write_jsonl(args.out / "eval.jsonl", evaluation)


if __name__ == "__main__":
    main()
