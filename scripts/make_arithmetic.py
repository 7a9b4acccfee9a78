"""Write the quickstart's data: additions of a three-digit and a one-digit number, as JSONL.

With --tools: multiplications of two two-digit numbers, each with a conversation that demonstrates the answer. Every
digit that an evaluation question needs is seen in training; the question itself is not.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

Row = dict[str, Any]
DIRECT = 3  # of four demonstrations, those that answer without the tool


def make_rows(seed: int, num_eval: int) -> tuple[list[Row], list[Row]]:
    """(training rows, evaluation rows), both shuffled by the seed; together they are all 9,000 questions once."""
    pairs = [(a, b) for a in range(100, 1000) for b in range(10)]
    random.Random(seed).shuffle(pairs)
    return [_row(*pair) for pair in pairs[num_eval:]], [_row(*pair) for pair in pairs[:num_eval]]


def _row(a: int, b: int) -> Row:
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def make_tool_rows(seed: int, num_eval: int) -> tuple[list[Row], list[Row]]:
    """As `make_rows`, all 8,100 multiplications; the training rows have `messages`, the conversation after the prompt.

    All demonstrations are right. Most have no call: a model that has learnt from them answers in both ways, and has to
    find out that only the way with the calculator leads to right answers.
    """
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    rows = [{"prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in pairs]
    train = [
        row | {"messages": _messages(row, calls=number % (DIRECT + 1) == 0)}
        for number, row in enumerate(rows[num_eval:])
    ]
    return train, rows[:num_eval]


def _messages(row: Row, *, calls: bool) -> list[dict[str, Any]]:
    """A conversation in OpenAI's form. calls: whether it has a call of megarl.environments.calculator."""
    answer = {"role": "assistant", "content": row["answer"]}
    if not calls:
        return [answer]
    arguments = json.dumps({"expression": row["prompt"].removesuffix("=")})
    call = {
        "id": "call00000",
        "type": "function",
        "function": {"name": "calculate", "arguments": arguments},
    }
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "content": row["answer"]},
        answer,
    ]


def write_jsonl(path: Path, rows: list[Row]) -> None:
    """Whole or not at all: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    draft.replace(path)
    print(f"{path}: {len(rows)} questions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("data"), help="folder for train.jsonl and eval.jsonl"
    )
    parser.add_argument("--eval", type=int, default=256, help="questions held out for evaluation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--tools", action="store_true", help="questions for a model with a calculator"
    )
    args = parser.parse_args()
    make = make_tool_rows if args.tools else make_rows
    train, evaluation = make(args.seed, args.eval)
    write_jsonl(args.out / "train.jsonl", train)
    write_jsonl(args.out / "eval.jsonl", evaluation)


if __name__ == "__main__":
    main()
