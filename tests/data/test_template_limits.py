"""Chat templates that do not end, or write without bounds: refused, and this process keeps its time and memory."""

from __future__ import annotations

import copy
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.data import template_limits
from megarl.data.prompts import PromptSource, load_prompts
from megarl.data.template_limits import Bounds, template_error
from megarl.types import UserErrors

FOR_EVER = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
WIDE = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}"
)
ONE_ROW = "{% if '3+1' in messages[0].content %}" + FOR_EVER + "{% endif %}"
SHORT = Bounds(row_s=2.0, total_s=20.0)
PROMPTS = [(f"rows.jsonl:{number}", f"{number}+1=") for number in range(1, 5)]


@pytest.fixture
def with_template(tokenizer: Any) -> Callable[[str], Any]:
    def changed(template: str) -> Any:
        copied = copy.deepcopy(tokenizer)
        copied.chat_template = template
        return copied

    return changed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "says"),
    [
        (FOR_EVER, "does not end within 2 s for rows.jsonl:1"),
        (WIDE, " for rows.jsonl:1"),  # out of memory or out of time, whichever is first
        ("{{ 'x' * 30000000000 }}", "takes more than 1024 MB for rows.jsonl:1"),
        ("{{ 'x' * 2000000 }}", "writes 2000000 characters for rows.jsonl:1"),
        (ONE_ROW, "does not end within 2 s for rows.jsonl:3"),
    ],
    ids=["loop", "wide", "product", "long", "one_row"],
)
def test_a_template_without_bounds_is_refused(
    with_template: Callable[[str], Any], template: str, says: str
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    others = {*psutil.Process().children()}  # another test's, in a process that adopts orphans
    error = template_error(with_template(template), PROMPTS, bounds=SHORT)
    assert error and error.where == "model.path" and error.problem.endswith(says), error
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB
    left = {*psutil.Process().children()} - others
    assert not [child for child in left if child.status() == psutil.STATUS_ZOMBIE]


def test_the_file_is_not_read_with_such_a_template(
    with_template: Callable[[str], Any], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "1+2=", "answer": "3"}) + "\n")
    with pytest.raises(UserErrors) as caught:
        source = PromptSource("data.train", str(path))
        load_prompts(source, with_template("{{ 'x' * 30000000000 }}"), max_prompt_tokens=32)
    (error,) = caught.value.errors
    assert str(error) == (
        f"model.path: the chat template takes more than 1024 MB for {path}:1; "
        "correct the checkpoint's chat template (chat_template.jinja, or in tokenizer_config.json)"
    )


def test_what_a_template_refuses_and_rows_without_a_prompt_are_told_elsewhere(
    with_template: Callable[[str], Any],
) -> None:
    tokenizer = with_template("{{ raise_exception('no') }}")
    assert template_error(tokenizer, [*PROMPTS, ("x", 3), ("y", [])]) is None


def test_another_models_template_reads_the_response_too(
    with_template: Callable[[str], Any],
) -> None:
    tokenizer = with_template(
        "{% if messages[-1].role == 'assistant' %}{{ 'x' * 2000000 }}{% endif %}"
    )
    assert template_error(tokenizer, PROMPTS) is None
    assert template_error(tokenizer, PROMPTS, response="") is not None


def test_of_many_rows_the_longest_and_each_kind_are_tried(
    with_template: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "_MOST_ROWS", 16)
    many: list[tuple[str, Any]] = [(str(number), "1+1=") for number in range(1000)]
    many[567] = ("567", "1+1= and more")
    many[789] = ("789", [{"role": "system", "content": "Add."}, {"role": "user", "content": "1"}])
    for condition, place in (
        ("messages[0].content|length > 5", "567"),
        ("messages[0].role == 'system'", "789"),
    ):
        tokenizer = with_template("{% if " + condition + " %}{{ 'x' * 2000000 }}{% endif %}")
        error = template_error(tokenizer, many)
        assert error and error.problem.endswith(f"for {place}")
