"""The family that docs/models.md adds as a file of a user."""

from __future__ import annotations

import re
from pathlib import Path

NAME = "my_olmoe:OLMOE"
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def write_family(folder: Path) -> str:
    """The page's file, in `folder`; its text."""
    (own, *_) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (folder / f"{NAME.partition(':')[0]}.py").write_text(own)
    return own
