"""The page that follows its runs: who gets an answer, and what the page does with new records."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from megarl.config import Recipe
from megarl.report import watch
from megarl.report.planned import Planned
from megarl.report.watch import FollowedRun, PageServer
from megarl.types import UserError
from megarl.types.losses import Loss
from tests.report.browser import needs_chromium, opened
from tests.report.runs import a_run, add_record


@contextmanager
def served(folder: Path) -> Iterator[PageServer]:
    """A server that answers in a thread."""
    with PageServer([FollowedRun(folder, plans=False)], port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_the_page_and_its_data_are_behind_the_token(tmp_path: Path) -> None:
    with served(a_run(tmp_path)) as server:
        root = f"http://127.0.0.1:{server.server_port}/"
        token = server.address.removeprefix(root)
        assert len(token) > 40
        for path in ("", "data", "x/data", f"{token[:-2]}/data", f"{token}other", f"{token}data/x"):
            assert httpx.get(root + path).status_code == 404, path
        redirect = httpx.get(root + token.removesuffix("/"))
        assert (redirect.status_code, redirect.headers["Location"]) == (308, f"/{token}")
        page = httpx.get(server.address)
        assert page.text.startswith("<!doctype html>")
        assert "connect-src 'self'" in page.text[:2000]
        assert page.headers["Content-Security-Policy"] == "frame-ancestors 'none'"
        assert page.headers["Referrer-Policy"] == "no-referrer"
        data = httpx.get(f"{server.address}data")
        assert data.json()["runs"][0]["metrics"]["step"] == [0, 1, 2, 3, 4]
        assert data.headers["Content-Encoding"] == "gzip"
        plain = httpx.get(f"{server.address}data", headers={"Accept-Encoding": "identity"})
        assert plain.text == data.text and "Content-Encoding" not in plain.headers
        assert httpx.post(server.address).status_code == 501


def test_it_listens_on_loopback_alone_and_answers_to_no_other_name(tmp_path: Path) -> None:
    with served(a_run(tmp_path)) as server:
        assert server.server_address[0] == "127.0.0.1"
        port = server.server_port
        for host, status in (("evil.example", 404), (f"localhost:{port}", 200)):
            assert httpx.get(f"{server.address}data", headers={"Host": host}).status_code == status


def test_data_is_sent_anew_when_a_file_has_changed(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    with served(folder) as server:
        first = httpx.get(f"{server.address}data")
        known = {"If-None-Match": first.headers["ETag"]}
        assert httpx.get(f"{server.address}data", headers=known).status_code == 304
        add_record(folder, {"step": 5, "reward/mean": 0.25})
        second = httpx.get(f"{server.address}data", headers=known)
        assert second.json()["runs"][0]["metrics"]["reward/mean"][-1] == 0.25


def test_what_comes_after_the_page_is_sent_at_its_first_request(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    with served(folder) as server:
        html = httpx.get(server.address).text
        text = html.split('<script type="application/json" id="data">')[1].split("</script>")[0]
        known = {"If-None-Match": json.loads(text)["version"]}
        assert httpx.get(f"{server.address}data", headers=known).status_code == 304
        (folder / "losses.jsonl").write_text(Loss.of("an engine", "it died", 0.0).line())
        answer = httpx.get(f"{server.address}data", headers=known)
        assert [loss["what"] for loss in answer.json()["runs"][0]["losses"]] == ["an engine"]


def test_a_run_that_resumes_with_another_recipe_is_planned_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = a_run(tmp_path)
    recipes: list[int] = []

    def count(recipe: Recipe) -> Planned:
        recipes.append(recipe.run.steps)
        return Planned(notes=[f"planned {recipe.run.steps} steps"])

    monkeypatch.setattr(watch, "planned", count)
    run = FollowedRun(folder, plans=True)
    assert run.data()["notes"][0] == "planned 4 steps"
    add_record(folder, {"step": 5})
    run.data()
    assert recipes == [4]
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("steps: 4", "steps: 16"))
    assert run.data()["notes"][0] == "planned 16 steps"
    recipe.unlink()
    assert run.data()["slots"] == []
    assert recipes == [4, 16]


def test_a_run_that_is_removed_is_told(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    with served(folder) as server:
        (folder / "metrics.jsonl").unlink()
        gone = httpx.get(f"{server.address}data")
        assert gone.status_code == 503
        assert "has no metrics.jsonl" in gone.text


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    runs = [FollowedRun(a_run(tmp_path), plans=False)]
    with PageServer(runs, port=0) as server, pytest.raises(UserError, match="--port"):
        PageServer(runs, port=server.server_port)


@pytest.mark.slow
@needs_chromium
def test_an_open_page_shows_the_new_step_and_keeps_what_the_reader_has_set(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    with served(folder) as server, opened(server.address, tmp_path) as page:
        page.run(
            "browsers[0].controls.least.value = '1'; browsers[0].filter();"
            "browsers[0].choose(browsers[0].kept[1]); window.chosen = browsers[0].chosen.step;"
        )
        assert page.run("return pointsOf(DATA.runs[0], 'step')[0].length") == 5
        add_record(folder, {"step": 5, "reward/mean": 0.25})
        page.wait_for("return document.querySelector('.card b').textContent.startsWith('5 of')")
        kept = page.run(
            "return [browsers[0].kept.length, browsers[0].chosen.step === window.chosen]"
        )
        assert kept == [4, True]
        page.draw_all()
        assert page.errors() == []


@pytest.mark.slow
@needs_chromium
def test_a_page_opened_before_the_first_record_shows_it(tmp_path: Path) -> None:
    """Also while a list has the focus, and after the page could not be built."""
    folder = a_run(tmp_path)
    metrics = folder / "metrics.jsonl"
    records = metrics.read_bytes()
    metrics.write_bytes(b"")
    with served(folder) as server, opened(server.address, tmp_path) as page:
        assert page.errors() == []
        page.run("browsers[0].controls.order.focus()")
        assert page.run("return document.activeElement.tagName") == "SELECT"
        page.run("window.rightBuild = buildPage; buildPage = () => { throw new Error('broken') }")
        metrics.write_bytes(records)
        page.wait_for("return document.body.innerText.includes('no answer: broken')")
        page.run("buildPage = window.rightBuild")
        page.wait_for("return document.querySelector('.card b')?.textContent.startsWith('4 of')")
        page.draw_all()
        assert page.errors() == []


@pytest.mark.slow
@needs_chromium
def test_a_field_that_is_written_in_is_left_alone(tmp_path: Path) -> None:
    with served(a_run(tmp_path)) as server, opened(server.address, tmp_path) as page:
        is_writing = {
            name: page.run(
                f"browsers[0].controls.{name}.focus(); return isWriting()",
            )
            for name in ("search", "least", "order")
        }
        assert is_writing == {"search": True, "least": True, "order": False}
        page.run("document.getElementById('only-differing').focus()")
        assert page.run("return isWriting()") is False
