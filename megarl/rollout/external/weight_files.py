"""A version of the weights, as external engines get it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightFiles:
    """folder: a Hugging Face checkpoint. label: what SGLang is told to call the version; no two have the same."""

    folder: str
    label: str
    version: int
