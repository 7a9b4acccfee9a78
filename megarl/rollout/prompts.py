"""The data: rows of a file -> tokenised prompts -> an endless shuffled stream of them."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from megarl.types import Prompt, UserFault, UserFaults

Row = tuple[str, Mapping[str, Any]]  # where it stands in its file, and its columns


class _BadRow(Exception):
    """What is wrong with one row, and the mend; many rows with the same mend become one fault."""

    def __init__(self, problem: str, mend: str) -> None:
        super().__init__(problem, mend)
        self.problem, self.mend = problem, mend


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a checkpoint folder. Raises UserFault(model.path) when it has none that loads."""
    from transformers import AutoTokenizer  # takes seconds

    if not Path(path).is_dir():
        raise UserFault("model.path", f"{path} is not a folder", "give the folder of a HF checkpoint")
    try:
        found = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        if not found("a")["input_ids"]:
            raise ValueError("no tokenizer files")  # transformers makes an empty one of config.json
        return found
    except Exception as error:  # a broken file shows as whatever its parser met first
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        problem = f"{path} has no usable tokenizer ({reason})"
        raise UserFault("model.path", problem, "add its tokenizer files") from error


def load_prompts(
    path: str, where: str, tokenizer: Any, *, prompt_column: str, answer_column: str, max_prompt_tokens: int
) -> list[Prompt]:
    """Every row of a JSONL or parquet file as a prompt with its answer.

    A prompt is a string, which becomes one user message, or a list of chat messages; both go through the tokenizer's
    chat template. Without a template a string is used as it stands.
    `where` is the recipe key that named the file. Raises UserFaults: one fault per kind, with how many rows have it.
    """
    prompts: list[Prompt] = []
    bad: dict[str, list[tuple[str, _BadRow]]] = {}
    for place, row in _read_rows(path, where):
        try:
            text, special = _render(tokenizer, _column(row, prompt_column, "data.prompt"))
            answer = _answer(_column(row, answer_column, "data.answer"), answer_column)
            token_ids = tuple(tokenizer(text, add_special_tokens=special)["input_ids"])
            if not 0 < len(token_ids) <= max_prompt_tokens:
                raise _BadRow(
                    f"the prompt has {len(token_ids)} tokens, data.max_prompt_tokens allows 1 to {max_prompt_tokens}",
                    "raise data.max_prompt_tokens or remove such rows",
                )
        except _BadRow as error:
            bad.setdefault(error.mend, []).append((place, error))
        else:
            prompts.append(Prompt(place, text, token_ids, answer, row))
    if bad:
        raise UserFaults([_summary(where, rows) for rows in bad.values()])
    if not prompts:
        raise UserFaults([UserFault(where, f"{path} has no rows", "give a file with at least one")])
    return prompts


def answered_rows(path: str, where: str, answer_column: str, most: int) -> list[tuple[str, Mapping[str, Any]]]:
    """(answer, row) of the first rows of such a file, for those who need no prompt. Raises UserFaults likewise."""
    found = []
    for place, row in islice(_read_rows(path, where), most):
        try:
            found.append((_answer(_column(row, answer_column, "--answer"), answer_column), row))
        except _BadRow as error:
            raise UserFaults([_summary(where, [(place, error)])]) from None
    if not found:
        raise UserFaults([UserFault(where, f"{path} has no rows", "give a file with at least one")])
    return found


def _summary(where: str, rows: Sequence[tuple[str, _BadRow]]) -> UserFault:
    place, first = rows[0]
    more = f" (and {len(rows) - 1} more such rows)" if len(rows) > 1 else ""
    return UserFault(where, f"{place}: {first.problem}{more}", first.mend)


def _read_rows(path: str, where: str) -> Iterator[Row]:
    """Raises UserFaults when the file cannot be read at all."""
    source = Path(path)
    if not source.is_file():
        raise UserFaults([UserFault(where, f"{path} is not a file", "check the path; it is relative to where you are")])
    if source.suffix == ".parquet":
        yield from _read_parquet(source, where)
    elif source.suffix in (".jsonl", ".json"):
        try:
            yield from _read_jsonl(source, where)
        except (OSError, UnicodeDecodeError) as error:
            fault = UserFault(where, f"cannot read {path} ({error})", "give a UTF-8 file that this user may read")
            raise UserFaults([fault]) from error
    else:
        raise UserFaults([UserFault(where, f"{path} is neither .jsonl nor .parquet", "convert it to one of them")])


def _read_jsonl(source: Path, where: str) -> Iterator[Row]:
    with source.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{source}:{number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                fault = UserFault(where, f"{place} is not JSON ({error.msg})", "write one JSON object a line")
                raise UserFaults([fault]) from error
            if not isinstance(row, dict):
                raise UserFaults([UserFault(where, f"{place} is not a JSON object", "write one JSON object a line")])
            yield place, row


def _read_parquet(source: Path, where: str) -> Iterator[Row]:
    import pyarrow.lib
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(source)
    except (OSError, pyarrow.lib.ArrowException) as error:
        raise UserFaults([UserFault(where, f"{source} is not a parquet file ({error})", "write it again")]) from error
    for number, row in enumerate(table.to_pylist()):
        yield f"{source} row {number}", row


def _column(row: Mapping[str, Any], column: str, key: str) -> Any:
    """A column, or by a dotted name what lies inside one."""
    outer, _, inner = column.partition(".")
    if column not in row and inner and isinstance(row.get(outer), dict):
        return _column(row[outer], inner, key)
    if column not in row:
        present = ", ".join(sorted(row)) or "the columns it has"
        raise _BadRow(f"there is no column {column!r}", f"set {key} to one of {present}")
    return row[column]


def _answer(value: Any, column: str) -> str:
    if value is None or isinstance(value, (list, dict)) or str(value) == "":
        raise _BadRow(f"{column!r} is {value!r}", f"give every row a text or a number in {column!r}")
    return str(value)


def _render(tokenizer: Any, prompt: Any) -> tuple[str, bool]:
    """The prompt's text, and whether the tokenizer still has to add its special tokens (a template writes them)."""
    mend = "write a non-empty string, or a list of messages {role, content}"
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
        if not prompt.strip():
            raise _BadRow("the prompt is empty", mend)
    elif isinstance(prompt, list) and prompt and all(_is_message(message) for message in prompt):
        messages = prompt
    else:
        raise _BadRow(f"the prompt is {_short(prompt)}", mend)
    if tokenizer.chat_template is None:
        if isinstance(prompt, str):
            return prompt, True
        raise _BadRow("the prompt is chat messages, and the tokenizer has no chat template", "write prompts as strings")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), False
    except Exception as error:  # a template raises whatever its author wrote
        raise _BadRow(f"the chat template refuses the prompt: {error}", "mend the messages or the template") from error


def chat(tokenizer: Any, prompt: Any, response: str) -> tuple[str, bool]:
    """A data row's prompt with a response to it as text, and whether the tokenizer still has to add special tokens.

    A chat by the tokenizer's template. Raises ValueError for messages where it has none, and what a template raises.
    """
    if tokenizer.chat_template is None:
        if not isinstance(prompt, str):
            raise ValueError("it is chat messages, and there is no chat template")
        return prompt + response, True
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    answered = [*messages, {"role": "assistant", "content": response}]
    return tokenizer.apply_chat_template(answered, tokenize=False), False


def conversation(tokenizer: Any, prompt: Any, response: str) -> list[int]:
    """The token ids of such a text."""
    text, special = chat(tokenizer, prompt, response)
    return tokenizer(text, add_special_tokens=special)["input_ids"]


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class PromptStream:
    """Prompts without end: every epoch is a new shuffle, and holds each prompt once. The seed decides all of it."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not prompts:
            raise ValueError("a stream needs at least one prompt")
        self._prompts = list(prompts)
        self._random = random.Random(seed)
        self._waiting: list[Prompt] = []
        self.taken = 0  # since the stream began: all that it takes to go on from there

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self._prompts)

    @property
    def fingerprint(self) -> str:
        """The same for the same prompts in the same order."""
        sha = hashlib.sha256()
        for prompt in self._prompts:
            sha.update(f"{prompt.id}\0{prompt.text}\0{prompt.answer}\0".encode())
        return sha.hexdigest()

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts; an epoch's end may fall inside."""
        taken: list[Prompt] = []
        while len(taken) < n:
            if not self._waiting:
                self._waiting = self._random.sample(self._prompts, len(self._prompts))
            missing = n - len(taken)
            taken += self._waiting[:missing]
            self._waiting = self._waiting[missing:]
        self.taken += n
        return taken

    def skip_to(self, taken: int) -> None:
        """Go on as if this many prompts had been taken from a new stream."""
        while self.taken < taken:
            self.take(min(len(self._prompts), taken - self.taken))
