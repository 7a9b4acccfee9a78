"""The site of docs/: it is built strictly, loads nothing from elsewhere, and is readable in a real browser."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.report.browser import PHONE, WIDE, needs_chromium, opened

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
MOST_PAGES = 22
# Elements of the text that reach beyond the window, and lie in nothing that scrolls.
OVERFLOWING = """
const width = document.documentElement.clientWidth, wide = []
const isClipped = (e) => getComputedStyle(e).overflowX !== 'visible'
const scrolls = (e) => e && e !== document.body && (isClipped(e) || scrolls(e.parentElement))
for (const e of document.querySelectorAll('article *'))
  if (e.getBoundingClientRect().right > width + 1 && !scrolls(e.parentElement)) wide.push(e.outerHTML.slice(0, 80))
return wide
"""
# What is typed before the search is ready has no results, so that each look types the other of two words.
FINDS = """
const box = document.querySelector('input.md-search__input')
box.focus(); box.value = box.value === 'entropy' ? 'checkpoint' : 'entropy'
box.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}))
return document.querySelectorAll('.md-search-result__item').length > 2
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    settings = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_each_page_is_found_and_nothing_comes_from_elsewhere(site: Path) -> None:
    pages = {page.stem for page in site.glob("*.html")} - {"404"}
    sources = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert pages == sources and len(pages) <= MOST_PAGES
    settings = yaml.load((ROOT / "mkdocs.yml").read_text().split("\ntheme:")[0], yaml.SafeLoader)
    named = [
        page
        for entry in settings["nav"]
        for page in (entry if isinstance(entry, dict) else {"": [entry]}).values()
    ]
    assert sorted(page for group in named for page in group) == sorted(f"{s}.md" for s in sources)
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"([^\"]+)\"", page.read_text()
        )
        assert [address for address in loaded if "//" in address] == [], page.name


def test_links_to_records_become_their_paths(site: Path) -> None:
    text = (site / "faq.html").read_text(encoding="utf-8")
    assert "the list (<code>docs/gpu/UNVERIFIED.md</code>)" in text
    assert (ROOT / "docs/gpu/UNVERIFIED.md").exists()


@needs_chromium
@pytest.mark.parametrize(("size", "is_dark"), [(WIDE, True), (PHONE, False)])
def test_pages_are_readable_from_files_and_are_searched(
    site: Path, tmp_path: Path, size: tuple[int, int], is_dark: bool
) -> None:
    """Without a server: no error on the console, nothing loaded but files, no table beyond the window."""
    with opened(site / "index.html", tmp_path, size=size, is_dark=is_dark) as page:
        scheme = page.run("return document.body.getAttribute('data-md-color-scheme')")
        assert scheme == ("slate" if is_dark else "default")
        for name in ("tuning", "peers", "recipe_reference", "index"):
            page.driver.get((site / f"{name}.html").as_uri())
            page.wait_for("return document.querySelector('article h1') !== null")
            assert page.run(OVERFLOWING) == [], name
        page.run("document.querySelector('#__search').click()")
        page.wait_for(FINDS)
        assert page.errors() == []
        assert [address for address in page.requests() if address.startswith("http")] == []
