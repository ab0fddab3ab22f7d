"""Words from models, files and links stand on the page as they are: nothing in them becomes markup."""

from __future__ import annotations

import re

_MARKUP = re.compile(r"([\\`*_{}\[\]()#+\-.!~|<>$:&])")


def plain(text: str) -> str:
    """`text` with everything escaped that Markdown, or Streamlit's own directives, would read as markup."""
    return _MARKUP.sub(r"\\\1", text)
