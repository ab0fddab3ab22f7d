"""Escapes words from models, files and links, so that no part of them becomes markup on the page."""

from __future__ import annotations

import re

_MARKUP = re.compile(r"([\\`*_{}\[\]()#+\-.!~|<>$:&])")


def plain(text: str) -> str:
    """`text` with everything escaped that Markdown, or Streamlit's own directives, would read as markup."""
    return _MARKUP.sub(r"\\\1", text)
