"""What the tests of GPU paths share. They import what they test and nothing more: see docs/gpu/README.md."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Record = Callable[[str, float, str], None]


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> Record:
    """Keep a figure that the test measured for the page of results: its name, its value and its unit."""

    def keep(name: str, value: float, unit: str) -> None:
        record_property(name, [float(value), unit])
        print(f"{name}: {value:.6g} {unit}")

    return keep
