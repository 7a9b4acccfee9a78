"""Hook of mkdocs.yml: links of pages to files that the site lacks become the paths of these files in the repository."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, files: Any, **_: Any) -> str:
    """The page's text, with `text (path)` where a link's target is a file of the repository and no page of the site."""
    folder = posixpath.dirname(page.file.src_uri)
    in_site = {file.src_uri for file in files if not file.inclusion.is_excluded()}

    def rewrite(link: re.Match[str]) -> str:
        text, target = link[1], posixpath.normpath(posixpath.join(folder, link[2]))
        if target in in_site:
            return link[0]
        path = posixpath.normpath(posixpath.join("docs", target))
        return f"{text} (`{path}`)"

    return _LINK.sub(rewrite, markdown)
