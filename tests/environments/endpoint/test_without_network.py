"""A program in a sandbox without network asks the model over the Unix socket: the example of docs/agents.md."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.environments.endpoint.chat_endpoint import ChatEndpoint
from tests.environments.endpoint.scripted import WAIT_S, Scripted, say

pytest.importorskip("openai")

PAGE = (Path(__file__).parents[3] / "docs/agents.md").read_text(encoding="utf-8")
# Without the socket there is no way; with it, another user than the one whose folder it lies in can ask, too.
PROBE = """
import socket

try:
    socket.create_connection((os.environ["HOST"], int(os.environ["PORT"])), timeout=5)
except OSError as error:
    print(type(error).__name__, os.path.exists(os.environ["FOLDER"]))
if os.geteuid() == 0:
    os.setuid(65534)
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect("/tmp/model")
    key = os.environ["MODEL_KEY"]
    connection.sendall(f"GET /v1/models HTTP/1.0\\r\\nAuthorization: Bearer {key}\\r\\n\\r\\n".encode())
    print(connection.recv(1000).split()[1])
print("SECRET" in os.environ)
"""


@pytest.mark.slow
def test_the_example_asks_without_network(
    endpoint: ChatEndpoint, tmp_path: Path, isolation: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, agent = re.findall(
        r"^```python\n(# my_(?:client|sandbox).py\n.*?)^```", PAGE, re.DOTALL | re.MULTILINE
    )
    script = tmp_path / "my_client.py"
    script.write_text(client + PROBE)
    handler = Scripted(say("Six."))
    access = endpoint.open(handler)
    host, _, port = access.url.removeprefix("http://").removesuffix("/v1").partition(":")
    more = {"HOST": host, "PORT": port, "FOLDER": os.path.dirname(access.socket)}
    monkeypatch.setenv("SECRET", "of the user")
    ended: list[subprocess.CompletedProcess[str]] = []

    async def run(*words: str, env: dict[str, str]) -> SimpleNamespace:
        """In place of asyncio's."""
        assert "my_client.py" in words and not any(access.key in word for word in words)
        settings = {"capture_output": True, "text": True, "timeout": 2 * WAIT_S}
        ended.append(
            await asyncio.to_thread(
                subprocess.run, command(words, script), env=env | more, **settings
            )
        )
        return SimpleNamespace(wait=lambda: asyncio.sleep(0))

    names: dict[str, Any] = {}
    exec(agent, names)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", run)
    asyncio.run(names["run"](access, {}))
    (process,) = ended
    assert process.stdout.splitlines() == [
        "Six.",
        "ConnectionRefusedError False",
        "b'200'",
        "False",
    ], process.stderr
    assert [list(asked.messages) for asked in handler.requests] == [
        [{"role": "user", "content": "What do two apples cost?"}]
    ]


def command(words: Sequence[str], script: Path) -> list[str]:
    """The page's, with this interpreter and script, and with the files that its empty /tmp would hide."""
    arguments: list[str] = []
    for word in words:
        if word == "--bind":
            for hidden in {sys.prefix, str(script.parent)}:
                arguments += ["--ro-bind", hidden, hidden] if hidden.startswith("/tmp/") else []
        # without a user namespace, to become another user inside
        if word == "--unshare-all" and os.geteuid() == 0:
            arguments += [
                "--unshare-pid",
                "--unshare-net",
                "--unshare-ipc",
                "--cap-drop",
                "ALL",
                "--cap-add",
                "CAP_SETUID",
            ]
            continue
        arguments.append({"python": sys.executable, "my_client.py": str(script)}.get(word, word))
    return arguments
