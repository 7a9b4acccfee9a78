"""`megarl --version`: megarl's version, and those of Python and the packages that decide what a run computes.

They are read from the packages' metadata: nothing is imported.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "megatron-core", "transformer-engine", "sglang", "ray", "transformers")


def version_lines() -> list[str]:
    """megarl in the first line, Python and the packages in the second."""
    others = [f"{package} {_version(package)}" for package in PACKAGES]
    return [
        f"megarl {_version('megarl')}",
        ", ".join([f"Python {platform.python_version()}", *others]),
    ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
