"""Write the data of the search recipes: questions with an instruction, from the files that Search-R1 publishes.

    python scripts/make_search_data.py train.parquet --out data/search/train.jsonl
    python scripts/make_search_data.py test.parquet --out data/search/nq.jsonl --source nq

The files are train.parquet and test.parquet of the Hugging Face data set PeterJinGo/nq_hotpotqa_train: questions of NQ
and HotpotQA, and the tests of five other sets. Their columns `question`, `golden_answers` and `data_source` are read;
their own prompts describe tags for searching, and here the chat template describes the tool.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.data.files import RowErrors, read_rows
from megarl.types import UserErrors

INSTRUCTION = (
    "Answer the question. Search for what you do not know for certain, as often as you need to. End with the answer, "
    "in as few words as possible, between <answer> and </answer>, for example <answer>Marie Curie</answer>.\n\n"
    "Question: {}"
)


def make_rows(path: str, source: str | None) -> Iterator[dict[str, Any]]:
    """The rows of one source, or of all; those without an answer are left out.

    Raises UserErrors for a file or rows that cannot be read, and KeyError for one without the columns.
    """
    bad = RowErrors("SOURCE")
    for _, row in read_rows(path, "SOURCE", bad):
        answers = [answer for answer in map(str.strip, row["golden_answers"]) if answer]
        if answers and source in (None, row["data_source"]):
            question = row["question"].strip()
            yield {
                "prompt": INSTRUCTION.format(
                    question if question.endswith("?") else f"{question}?"
                ),
                "answer": answers[0],
                "golden_answers": answers,
                "data_source": row["data_source"],
            }
    if errors := bad.errors():
        raise UserErrors(errors)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source_file", metavar="SOURCE", help="a parquet or JSONL file")
    parser.add_argument("--out", type=Path, required=True, help="the JSONL file to write")
    parser.add_argument(
        "--source", help="only rows whose data_source this is, for example nq or hotpotqa"
    )
    arguments = parser.parse_args()
    try:
        rows = list(make_rows(arguments.source_file, arguments.source))
    except UserErrors as error:
        parser.error(str(error))
    if not rows:
        parser.error(f"{arguments.source_file} has no row of the source {arguments.source!r}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    print(f"{arguments.out}: {len(rows):,} questions")


if __name__ == "__main__":
    main()
