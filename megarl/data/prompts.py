"""The training data: rows of a file -> tokenised prompts -> an endless shuffled stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megarl.data.files import BadRow, RowErrors, answer_of, column, no_rows_error, read_rows
from megarl.data.template_limits import template_error
from megarl.data.tokens import ProgressBar, TokenCache, Tokens, cached_tokens, no_bar, tokenise
from megarl.model.tokenizer import OWN_TOKENIZER, chat_messages, token_outside_vocabulary
from megarl.printable import short
from megarl.types import Prompt, UserError, UserErrors, WhenOverlong
from megarl.types.json_objects import ToolSchema

_MESSAGES = (
    "write a non-empty string, or a list of messages {role, content} whose contents are strings"
)


@dataclass(frozen=True)
class PromptSource:
    """A file of prompts: the recipe key that names it, its path and its columns.

    prompt_hint, answer_hint: what to write where a column is missing; {columns} stands for the row's columns.
    """

    where: str
    path: str
    prompt: str = "prompt"
    answer: str = "answer"
    prompt_hint: str = "set data.prompt to one of {columns}"
    answer_hint: str = "set data.answer to one of {columns}"


@dataclass(frozen=True)
class PromptFile:
    """The prompts of a file, in order. num_rows: counts also the prompts that were dropped as too long.

    longest: the tokens of the longest prompt, dropped or not.
    """

    source: PromptSource
    prompts: Sequence[Prompt]
    num_rows: int
    longest: int

    @property
    def num_dropped(self) -> int:
        return self.num_rows - len(self.prompts)


def load_prompts(
    source: PromptSource,
    tokenizer: Any,
    *,
    max_prompt_tokens: int,
    vocab_size: int | None = None,
    overlong: WhenOverlong = "refuse",
    tools: Sequence[ToolSchema] = (),
    cache: TokenCache | None = None,
    bar: ProgressBar = no_bar,
) -> PromptFile:
    """Every row of a JSONL or parquet file as a prompt with its answer.

    A prompt is a string, which becomes one user message, or a list of chat messages; the tokenizer's chat template is
    applied to both. Without a template a string is used unchanged. overlong: whether prompts of more than
    max_prompt_tokens are refused or dropped. vocab_size: the model's, or None where it is not known. tools: the schemas
    that the template is given. Raises UserErrors: one fault for each kind, which counts its rows.
    """
    bad = RowErrors(source.where)
    rows = list(_rows(source, tokenizer.chat_template is not None, bad))
    title = f"{source.where}: tokenising {len(rows):,} prompts"

    def make() -> Tokens | None:
        if unbounded := template_error(tokenizer, [(row.id, row.messages) for row in rows]):
            raise UserErrors([*bad.errors(), unbounded])
        with bar(title, len(rows)) as done:
            texts = _texts(tokenizer, rows, bad, tools)
            tokens = tokenise(tokenizer, texts, special=tokenizer.chat_template is None, done=done)
        if len(tokens.texts) == len(rows):
            return tokens
        return None

    kind = f"prompts with {json.dumps(list(tools))}"
    messages = [row.messages for row in rows]
    tokens = cached_tokens(cache, tokenizer, kind, messages, make)
    errors = bad.errors()
    if tokens is None:
        raise UserErrors(errors)
    if not rows and not errors:
        raise UserErrors([no_rows_error(source.path, source.where)])
    prompts = [
        replace(row, text=tokens.texts[number], token_ids=tokens.of(number))
        for number, row in enumerate(rows)
    ]
    empty = next((prompt.id for prompt in prompts if not prompt.token_ids), None)
    if empty:
        hint = "write a prompt of at least one token, or mend the chat template"
        errors.append(UserError(source.where, f"{empty}: the prompt has no tokens", hint))
    if vocab_size:
        errors += vocabulary_errors(source.where, tokenizer, prompts, tokens, "prompt", vocab_size)
    kept = [prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_tokens]
    if len(kept) < len(prompts) and (overlong == "refuse" or not kept):
        errors.append(_overlong_error(source, prompts, len(kept), max_prompt_tokens))
    if errors:
        raise UserErrors(errors)
    return PromptFile(source, kept, len(prompts), int(tokens.lengths.max()))


def vocabulary_errors(
    where: str,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    tokens: Tokens,
    part: str,
    vocab_size: int,
) -> list[UserError]:
    """One fault for all rows with token ids outside a vocabulary of vocab_size.

    part: "prompt" or "answer"; tokens: those of this part of every row.
    """
    bad = RowErrors(where)
    beyond = np.flatnonzero(tokens.ids >= vocab_size)
    for number in np.unique(np.searchsorted(tokens.ends, beyond, side="right")).tolist():
        largest = token_outside_vocabulary(tokenizer, tokens.of(number), vocab_size)
        bad.add(prompts[number].id, BadRow(f"the {part} has {largest}", OWN_TOKENIZER))
    return bad.errors()


def _overlong_error(
    source: PromptSource, prompts: Sequence[Prompt], num_kept: int, limit: int
) -> UserError:
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    many = f"{len(prompts) - num_kept} of the {len(prompts)} prompts of {source.path}"
    problem = f"data.max_prompt_tokens ({limit}) is exceeded by {many}, the longest is {longest.id}"
    hint = f"raise data.max_prompt_tokens to {len(longest.token_ids)}"
    if num_kept:
        hint += " or less, and set data.overlong to drop to leave out longer prompts"
    return UserError(source.where, f"{problem} with {len(longest.token_ids)} tokens", hint)


def _rows(source: PromptSource, has_template: bool, bad: RowErrors) -> Iterator[Prompt]:
    """The rows with a usable prompt, not yet tokenised; the problems of all rows are added to `bad`."""
    for place, row in read_rows(source.path, source.where, bad):
        answer = ""
        try:
            answer = answer_of(column(row, source.answer, source.answer_hint), source.answer)
        except BadRow as error:
            bad.add(place, error)
        try:
            prompt = column(row, source.prompt, source.prompt_hint)
            _check_messages(prompt, has_template)
        except BadRow as error:
            bad.add(place, error)
        else:
            yield Prompt(place, "", (), answer, row, prompt)


def _check_messages(prompt: Any, has_template: bool) -> None:
    """Raises BadRow unless the prompt is a text, or chat messages and the tokenizer has a template."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise BadRow("the prompt is empty", _MESSAGES)
        return
    if not isinstance(prompt, list) or not prompt:
        raise BadRow(f"the prompt is {short(prompt, 60)}", _MESSAGES)
    for number, message in enumerate(prompt, start=1):
        if not isinstance(message, dict):
            raise BadRow(f"message {number} of the prompt is {short(message, 60)}", _MESSAGES)
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                if key in message:
                    value = short(message[key], 60)
                else:
                    value = "missing"
                raise BadRow(f"the {key} of message {number} of the prompt is {value}", _MESSAGES)
    if not has_template:
        raise BadRow(
            "the prompt is chat messages, and the tokenizer has no chat template",
            "write prompts as strings",
        )


def _texts(
    tokenizer: Any, rows: Sequence[Prompt], bad: RowErrors, tools: Sequence[ToolSchema]
) -> Iterator[str]:
    """The prompts' texts by the chat template, if there is one; it also writes the special tokens.

    Rows that the template refuses are added to `bad`.
    """
    if tokenizer.chat_template is None:
        yield from (row.messages for row in rows)
        return
    for row in rows:
        try:
            text = tokenizer.apply_chat_template(
                chat_messages(row.messages),
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # a template may raise any exception
            problem = f"the chat template refuses the prompt: {error}"
            bad.add(row.id, BadRow(problem, "mend the messages or the template"))
        else:
            yield text
