"""The file of a page: nothing of a run is markup, and the policy names what may run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from megarl.report.page import content_security_policy, embedded_json, page

HOSTILE = "</script><script>x</script><!-- <SCRIPT ]]> & \u2028\u2029 \ud800 {{program}} {{data}}"


class Scripts(HTMLParser):
    """The attributes and the text of each script element."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.policy = ""
        self._is_inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._is_inside = tag == "script"
        if self._is_inside:
            self.scripts.append((dict(attrs), ""))
        if tag == "meta" and ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"] or ""

    def handle_endtag(self, tag: str) -> None:
        self._is_inside = False

    def handle_data(self, data: str) -> None:
        if self._is_inside:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)


def test_embedded_json_is_the_value_and_has_no_character_of_markup() -> None:
    value = {HOSTILE: [HOSTILE, 1.5, None, float("nan"), float("inf"), (True,)]}
    text = embedded_json(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert text.isascii()
    assert json.loads(text) == {HOSTILE: [HOSTILE, 1.5, None, None, None, [True]]}


def test_the_page_has_three_scripts_whatever_the_runs_say() -> None:
    run = {"name": HOSTILE, HOSTILE: HOSTILE}
    parser = Scripts()
    parser.feed(page([run]))
    (_, plotly), (attributes, data), (_, program) = parser.scripts
    assert attributes == {"type": "application/json", "id": "data"}
    assert json.loads(data) == {"runs": [run], "version": None}
    hashes = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (plotly, program)
    ]
    assert re.findall(r"'sha256-([^']+)'", parser.policy) == hashes
    assert parser.policy.startswith("default-src 'none'; script-src 'sha256-")


def test_the_policy_lets_nothing_be_loaded() -> None:
    policy = content_security_policy(["a"])
    allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert allowed["default-src"] == "'none'"
    assert "unsafe" not in allowed["script-src"]
    assert not {"connect-src", "font-src", "frame-src", "media-src"} & set(allowed)
    assert "http" not in policy


@pytest.mark.parametrize("ending", ["</script", "<!--"])
def test_no_program_can_end_its_element(ending: str) -> None:
    parser = Scripts()
    parser.feed(page([]))
    assert not [text for _, text in parser.scripts if ending in text.lower()]
