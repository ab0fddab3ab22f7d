"""The small GPT that several files of this room measure."""

from __future__ import annotations

from tests.engine.tiny_nets import ref

BLOCKS = [f"blocks.{i}" for i in range(4)]
GPT = ref("gpt", width=64, length=64)
