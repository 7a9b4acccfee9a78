"""Headless Chromium, as Debian packages it, for the run page."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

DRIVER = shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(DRIVER is None, reason="it needs Chromium: chromedriver")
WIDE = (1280, 900)
PHONE = (390, 844)
_LOAD_S = 120  # a limit for a machine that does many other things


class Page:
    """A page that is open. errors: what the console had of errors and warnings since the last look."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def run(self, program: str, *arguments: Any) -> Any:
        return self.driver.execute_script(program, *arguments)

    def errors(self) -> list[str]:
        lines = self.driver.get_log("browser")
        return [line["message"] for line in lines if line["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """The addresses of everything that was loaded, or tried to be."""
        events = [
            json.loads(line["message"])["message"] for line in self.driver.get_log("performance")
        ]
        sent = [event for event in events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def wait_for(self, program: str) -> None:
        """Return when the program is true; fails after `_LOAD_S`."""
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, _LOAD_S).until(lambda _: self.run(program))

    def draw_all(self) -> int:
        """Draw every chart, as scrolling through the page does; how many there are."""
        return self.run("for (const plot of charts.keys()) drawChart(plot); return charts.size")

    def text(self) -> str:
        return self.run("return document.body.innerText")


@contextmanager
def opened(
    page: Path | str, folder: Path, *, size: tuple[int, int] = WIDE, is_dark: bool = False
) -> Iterator[Page]:
    """A page by its file or address. folder: for what the browser writes; size: width and height in pixels."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    arguments = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    if os.geteuid() == 0:  # Chromium's own sandbox does not run as root
        arguments.append("--no-sandbox")
    for argument in (*arguments, f"--user-data-dir={folder / 'chromium'}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        driver.set_page_load_timeout(_LOAD_S)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        width, height = size
        metrics = {
            "width": width,
            "height": height,
            "deviceScaleFactor": 1,
            "mobile": size == PHONE,
        }
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        driver.get(page.absolute().as_uri() if isinstance(page, Path) else page)
        yield Page(driver)
    finally:
        driver.quit()
