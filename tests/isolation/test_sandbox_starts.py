"""A sandbox that does not start for a while, or any more: no program is blamed for it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megarl.environments.python import PythonSession, python
from megarl.isolation import sandbox, service
from megarl.isolation.service import Service, ServiceError

pytestmark = pytest.mark.usefixtures("isolation")

FULL = "bwrap: Creating new namespace failed: Resource temporarily unavailable"
# `bwrap`, which fails as often as there are lines in a file; each start takes one away
_REFUSING = """#!/bin/sh
read -r line < {left} && {{
    {sed} -i 1d {left}
    echo "{words}" >&2
    exit 1
}}
exec {bwrap} "$@"
"""
Refuse = Callable[[int], None]


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """refuse(number): the next starts of bwrap fail, as where the machine has no room for a namespace."""
    left = tmp_path / "left"
    left.touch()
    script = tmp_path / "bin" / "bwrap"
    script.parent.mkdir()
    places = {"left": left, "sed": shutil.which("sed"), "bwrap": shutil.which("bwrap")}
    script.write_text(_REFUSING.format(words=FULL, **places))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=":")
    monkeypatch.setattr(sandbox, "SERVICE", Service("the sandbox"))
    monkeypatch.setattr(service, "_back_off", lambda state: 0.0)

    def refuse_next(number: int) -> None:
        left.write_text("refuse\n" * number)

    return refuse_next


def test_a_start_that_fails_for_a_while_is_tried_again(refuse: Refuse) -> None:
    refuse(3)
    outcome = sandbox.run("print('works')", where="reward.function")
    assert (outcome.status, outcome.stdout, outcome.stderr) == (0, "works\n", "")


def test_a_sandbox_that_does_not_start_is_no_outcome(refuse: Refuse) -> None:
    refuse(1000)
    with pytest.raises(ServiceError) as caught:
        sandbox.run("print('works')", where="reward.function")
    assert str(caught.value) == f"the sandbox gave no usable answer in 5 tries: {FULL}"


def test_a_program_that_says_so_itself_has_run(refuse: Refuse, tmp_path: Path) -> None:
    """It is not run again, and its words are not taken for the sandbox's."""
    refuse(0)
    program = f"import sys; print('once'); sys.exit({FULL!r})"
    outcome = sandbox.run(program, where="reward.function")
    assert (outcome.status, outcome.stdout, outcome.stderr) == (1, "once\n", f"{FULL}\n")
    outcome = sandbox.run("import os, signal; os.kill(os.getpid(), 9)", where="reward.function")
    assert outcome.status == 128 + 9


def test_the_python_tool_does_not_tell_it_as_the_programs_output(refuse: Refuse) -> None:
    refuse(2)
    assert asyncio.run(python("print(3)")) == "3"
    refuse(1000)
    with pytest.raises(ServiceError, match="Resource temporarily unavailable"):
        asyncio.run(python("print(3)"))


def test_a_session_begins_when_the_sandbox_does(refuse: Refuse) -> None:
    async def scenario() -> None:
        session = PythonSession()
        session.seed = 0
        refuse(1000)
        with pytest.raises(ServiceError, match="Resource temporarily unavailable"):
            await session.python("x = 3")
        refuse(2)
        assert await session.python("x = 3; x") == "3"
        assert await session.python("x + 1") == "4"
        await session.close()

    asyncio.run(scenario())


def test_a_session_that_is_closed_while_it_starts_leaves_no_process(refuse: Refuse) -> None:
    before = set(psutil.Process().children(recursive=True))

    async def scenario() -> None:
        session = PythonSession()
        session.seed = 0
        calling = asyncio.ensure_future(session.python("1"))
        while not set(psutil.Process().children(recursive=True)) - before:
            await asyncio.sleep(0)
        assert not calling.done()
        await session.close()
        with pytest.raises(RuntimeError, match="the episode has ended"):
            await calling

    refuse(0)
    asyncio.run(scenario())
    assert not set(psutil.Process().children(recursive=True)) - before
