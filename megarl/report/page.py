"""The page as one file: Plotly's program, ours, and the runs as data.

Nothing of a run is markup or program text. It is JSON in an element that no browser executes, with every character
escaped that could end the element, and our program writes it by `textContent` alone. The page's Content-Security-Policy
names the hashes of the two programs: nothing else can run, and nothing can be fetched or sent, but for the data of
`--watch`, from its own server.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import sys
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from megarl.types import UserError
from megarl.types.json_objects import JsonObject

_PROGRAMS = (
    "elements.js",
    "charts.js",
    "panels.js",
    "tables.js",
    "samples.js",
    "follow.js",
    "main.js",
)
_ESCAPED = {character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def page(runs: Sequence[JsonObject], *, version: str | None = None) -> str:
    """The HTML of runs, objects of `run_data`; several are laid over each other.

    version: of this data, with which the page asks its server for newer; None: it does not ask. Raises UserError where
    Plotly is not installed.
    """
    plotly = _plotly_program()
    program = "\n".join(_part(name) for name in _PROGRAMS)
    parts = {
        "policy": content_security_policy([plotly, program], is_followed=version is not None),
        "style": _part("page.css"),
        "plotly": plotly,
        "data": embedded_json({"runs": list(runs), "version": version}),
        "program": program,
    }
    # split once: the runs' own text may have the names of parts in it
    pieces = _part("page.html").split("{{")
    html = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        html += [parts[name], rest]
    return "".join(html)


def embedded_json(value: object) -> str:
    """JSON for the inside of a script element: it can neither end the element nor begin a comment."""
    text = json.dumps(_finite(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character, escaped in _ESCAPED.items():
        text = text.replace(character, escaped)
    return text


def _finite(value: Any) -> Any:
    """The value with null in place of numbers that are not finite, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and abs(value) > sys.float_info.max:  # infinite to JavaScript
        return None
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def content_security_policy(programs: Sequence[str], *, is_followed: bool = False) -> str:
    """The policy under which these programs run, and nothing is loaded or sent; is_followed: but to the page's server.

    Styles may be inline: Plotly sets them. With all loading forbidden a style can show something and no more.
    """
    digests = [hashlib.sha256(program.encode()).digest() for program in programs]
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    connections = "connect-src 'self'; " if is_followed else ""
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"{connections}base-uri 'none'; form-action 'none'"
    )


def _plotly_program() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        problem = f"the page's charts need Plotly, which cannot be imported ({error})"
        raise UserError("plotly", problem, "pip install 'megarl[report]'") from None
    return get_plotlyjs()


def _part(name: str) -> str:
    return (files("megarl.report") / "page_parts" / name).read_text(encoding="utf-8")
