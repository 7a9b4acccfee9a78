"""The run page in a real browser: it draws without an error, loads nothing, runs no text of a run, and stays quick."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.types.losses import Loss
from tests.report.browser import PHONE, WIDE, needs_chromium, opened
from tests.report.runs import SAMPLE, a_run, add_record, add_samples, page_of
from tests.tracking.test_health import RECORDED

pytestmark = [pytest.mark.slow, needs_chromium]

# each would set window.executed if it were read as markup or as a program
HOSTILE = (
    "</script><script>window.executed = 1</script><!--<script>\u2028\u2029"
    "<img src=x onerror='window.executed = 2'><svg onload='window.executed = 3'></svg>"
    "<a href='javascript:window.executed=4'>x</a>{{program}}{{data}}\"'`${window.executed = 5}"
)
SHOWN = HOSTILE.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_a_page_draws_everything_without_an_error_or_a_request(
    tmp_path: Path, size: tuple[int, int], is_dark: bool
) -> None:
    file = page_of(a_run(tmp_path), out=tmp_path / "page.html")
    with opened(file, tmp_path, size=size, is_dark=is_dark) as page:
        assert page.draw_all() >= 10
        assert page.errors() == []
        outside = [url for url in page.requests() if url.startswith(("http", "ws", "ftp"))]
        assert outside == []
        drawn = page.run("return document.querySelectorAll('.plot .main-svg').length")
        assert drawn >= page.run("return charts.size")
        assert page.run("return document.documentElement.scrollWidth") <= size[0]
        ground = page.run("return getComputedStyle(document.body).backgroundColor")
        red = int(ground.split("(")[1].split(",")[0])
        assert (red < 64) == is_dark
        text = page.run("return getComputedStyle(document.querySelector('.plot .xtitle')).fill")
        assert (int(text.split("(")[1].split(",")[0]) > 128) == is_dark


def test_a_change_of_the_scheme_redraws_the_charts(tmp_path: Path) -> None:
    file = page_of(a_run(tmp_path), out=tmp_path / "page.html")
    read = "return getComputedStyle(document.querySelector('.plot .xtitle')).fill"
    with opened(file, tmp_path) as page:
        page.draw_all()
        before = page.run(read)
        scheme = {"name": "prefers-color-scheme", "value": "dark"}
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        page.wait_for(f"return (() => {{ {read} }})() !== '{before}'")


def test_hostile_text_is_shown_and_runs_nothing(tmp_path: Path) -> None:
    """In prompts, turns, calls, names of metrics, values of the recipe, causes of losses and the folder's name."""
    folder = a_run(tmp_path, f"reward.arguments={{'x': {quoted(HOSTILE)}}}", text=HOSTILE)
    add_record(folder, {"step": 5, f"eval/{HOSTILE}/accuracy": 1.0, HOSTILE: 2.0})
    (folder / "losses.jsonl").write_text(Loss.of(HOSTILE, HOSTILE, 0.0).line())
    folder = folder.rename(tmp_path / "<img src=x onerror='window.executed=6'>")
    with opened(page_of(folder, out=tmp_path / "page.html"), tmp_path) as page:
        page.draw_all()
        page.run("for (const sample of browsers[0].samples) browsers[0].choose(sample)")
        assert page.run("return window.executed ?? null") is None
        assert page.errors() == []
        markup = "main img, main a[href^='javascript'], nav img, header img, svg[onload], a[href^='javascript']"
        assert page.run(f"return document.querySelectorAll(`{markup}`).length") == 0
        assert page.run("return document.scripts.length") == 3
        assert page.run("return document.querySelector('h1').textContent") == folder.name
        (prompt, *_) = page.run(
            "return [...document.querySelectorAll('.detail pre')].map(part => part.textContent)"
        )
        assert prompt == HOSTILE
        legends = page.run(
            "return [...document.querySelectorAll('.legendtext')].map(part => part.textContent)"
        )
        assert any("<img src=x onerror" in legend for legend in legends)
        assert "<svg onload" in page.run("return document.getElementById('losses').textContent")
        assert "<svg onload" in page.run("return document.getElementById('recipe').textContent")


def quoted(text: str) -> str:
    """As YAML."""
    return "'" + text.replace("'", "''").replace("\u2028", "").replace("\u2029", "") + "'"


def test_the_policy_stops_what_gets_into_the_page_all_the_same(tmp_path: Path) -> None:
    with opened(page_of(a_run(tmp_path), out=tmp_path / "page.html"), tmp_path) as page:
        page.run(
            "const script = document.createElement('script'); script.textContent = 'window.executed = 1';"
            "document.body.append(script);"
            "document.body.insertAdjacentHTML('beforeend', `<img src=x onerror='window.executed = 2'>`);"
        )
        assert page.run("return window.executed ?? null") is None
        is_refused = page.driver.execute_async_script(
            "const done = arguments[arguments.length - 1];"
            "fetch('http://127.0.0.1:9/').then(() => done(false), error => done(String(error)))"
        )
        assert "TypeError" in is_refused
        errors = " ".join(page.errors())
        assert errors.count("Content Security Policy") >= 3, errors


def test_ten_thousand_samples_are_filtered_without_making_their_rows(
    tmp_path: Path, record_property: Any
) -> None:
    """The slowest filter takes a fraction of the time in which the rows of all samples are made."""
    folder = a_run(tmp_path)
    add_samples(folder, 10_000)
    with opened(page_of(folder, out=tmp_path / "page.html"), tmp_path) as page:
        filtered = """
            const browser = browsers[0];
            const filter = (name, value) => {
                browser.controls[name].value = value;
                browser.controls[name].dispatchEvent(new Event('input'));
                return [browser.filterMs, browser.kept.length, browser.space.children.length];
            };
            return [filter('search', 'number 77'), filter('search', ''), filter('least', '0.9'),
                filter('firstStep', '500'), filter('order', '-length'), filter('end', 'finished')];
        """
        results = page.run(filtered)
        assert [kept for _, kept, _ in results[:3]] == [111, 10_008, 1_004]
        assert max(rows for _, _, rows in results) < 60
        naive_ms = page.run("""
            const began = performance.now();
            browsers[0].samples.map((sample, index) => browsers[0].row(sample, index));
            return performance.now() - began;
        """)
        slowest_ms = max(milliseconds for milliseconds, _, _ in results)
        record_property("filter_ms", slowest_ms)
        record_property("all_rows_ms", naive_ms)
        filters_ms = [round(milliseconds) for milliseconds, _, _ in results]
        print(f"the filters took {filters_ms} ms, all rows {naive_ms:.0f} ms")
        assert slowest_ms < naive_ms
        page.run("browsers[0].filter(); browsers[0].list.scrollTop = 1e9; browsers[0].showRows()")
        last = page.run("return browsers[0].space.lastChild.textContent")
        assert last
        assert page.errors() == []


def test_the_recipe_shows_what_differs_and_then_all(tmp_path: Path) -> None:
    file = page_of(a_run(tmp_path, "train.lr=0.5"), out=tmp_path / "page.html")
    with opened(file, tmp_path) as page:
        rows = (
            "return [...document.querySelectorAll('#recipe tbody tr')].map(row => row.textContent)"
        )
        differing = page.run(rows)
        assert any(row.startswith("train.lr0.5") for row in differing)
        assert not any(row.startswith("checkpoint.keep") for row in differing)
        page.run("document.getElementById('only-differing').click()")
        assert any(row.startswith("checkpoint.keep") for row in page.run(rows))


def test_the_busiest_expert_of_each_layer_is_a_row_of_its_own(tmp_path: Path) -> None:
    """In the order of the layers, of which there are more than nine."""
    with opened(page_of(a_run(tmp_path), out=tmp_path / "page.html"), tmp_path) as page:
        (map_of_layers,), _ = page.run("return describeBusiest(DATA.runs[0])")
        assert map_of_layers["x"] == [1, 2, 3, 4]
        assert map_of_layers["y"] == [f"layer {layer}" for layer in range(12)]
        assert [row[0] for row in map_of_layers["z"]] == [1 + layer for layer in range(12)]
        page.draw_all()
        assert page.run("return document.querySelectorAll('#experts .plot').length") == 3
        assert page.errors() == []


def test_samples_are_filtered_by_their_source(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    with (folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps(SAMPLE | {"source": "gsm8k"}) + "\n")
    with opened(page_of(folder, out=tmp_path / "page.html"), tmp_path) as page:
        kept = page.run(
            "browsers[0].controls.source.value = 'gsm8k'; browsers[0].filter(); return browsers[0].kept"
        )
        assert [sample["source"] for sample in kept] == ["gsm8k"]


def test_runs_are_laid_over_each_other(tmp_path: Path) -> None:
    folders = [a_run(tmp_path, f"run.name={name}") for name in ("first", "second")]
    with opened(page_of(*folders, out=tmp_path / "page.html"), tmp_path) as page:
        page.draw_all()
        assert page.errors() == []
        legend = page.run(
            "return [...document.querySelector('#learning .plot').querySelectorAll('.legendtext')]"
            ".map(part => part.textContent)"
        )
        assert {"first: reward/mean", "second: reward/mean"} <= set(legend)


def test_text_is_prepared_where_the_browser_does_not_say_when_it_is_idle(tmp_path: Path) -> None:
    """As Safari, which may have no requestIdleCallback."""
    folder = a_run(tmp_path)
    with opened(page_of(folder, out=tmp_path / "page.html"), tmp_path) as page:
        page.run(
            "delete window.requestIdleCallback; document.getElementById('samples').replaceChildren();"
            "addSamples(document.getElementById('samples'), DATA.runs[0])"
        )
        assert page.run("return globalThis.requestIdleCallback ?? null") is None
        page.wait_for("return browsers[1].texts.length === browsers[1].samples.length")
        assert page.errors() == []


def test_losses_that_cannot_be_read_are_not_said_to_be_none(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    (folder / "losses.jsonl").mkdir()
    with opened(page_of(folder, out=tmp_path / "page.html"), tmp_path) as page:
        losses = page.run("return document.getElementById('losses').textContent")
        assert "losses.jsonl cannot be read" in losses
        assert page.errors() == []


def test_the_first_section_of_a_sick_runs_page_names_the_illness_and_the_key(
    tmp_path: Path,
) -> None:
    """Of the quickstart with a learning rate a hundred times too high, as it was recorded."""
    folder = a_run(tmp_path)
    records = RECORDED / "lr_times_100.jsonl"
    (folder / "metrics.jsonl").write_bytes(records.read_bytes())
    with opened(page_of(folder, out=tmp_path / "page.html"), tmp_path) as page:
        first = page.run("return document.querySelector('main section').innerText")
        assert page.errors() == []
    assert "every sample has the reward 0" in first
    assert "train.lr (0.1) is probably too high, try a tenth of it" in first
