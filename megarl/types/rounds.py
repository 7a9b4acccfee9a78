"""How a round of sampling went."""

from __future__ import annotations
