"""What torch takes on a card beside its tensors, by version of torch and compute capability.

The figures lie in `workspaces.json`, measured from torch's own CUDA build (`benchmarks/imaginary/make.py`). This file
is apart from `cards.py` because it changes with each version of torch, the cards with the market.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from explorer.errors import BadInput
from explorer.record.card import Card
from explorer.record.measurement import Environment

KIB = 1 << 10
CUBLAS_SETTING = "CUBLAS_WORKSPACE_CONFIG"
TORCH_VERSIONS = ("2.11", "2.12", "2.13")
"""Versions of torch whose rules are known, the newest last."""
UNKNOWN_CAPABILITY = "8.0"
"""Counts for a card of unknown capability."""


class _Row(msgspec.Struct):
    """What the products of one thread keep."""

    cublas: int
    cublas_lt: int
    """Kept beside it by the first product that adds a bias; 0: such a product shares the other workspace."""


def installed_torch() -> str:
    """The version of TORCH_VERSIONS that the installed torch follows: its own, else the nearest older one."""
    try:
        installed = _numbers(version("torch"))
    except PackageNotFoundError:
        return TORCH_VERSIONS[-1]
    older = (name for name in reversed(TORCH_VERSIONS) if _numbers(name) <= installed)
    return next(older, TORCH_VERSIONS[0])


def torch_of(card: Card) -> str:
    """The version of torch of which the card's figures speak."""
    return card.torch if card.torch in TORCH_VERSIONS else installed_torch()


def parse_torch(text: str) -> str:
    """`2.13` of `2.13`, `2.13.0` or `2.13.0+cu130`; empty stays empty. Raises BadInput for other versions."""
    if not text:
        return ""
    named = re.fullmatch(r"(\d+\.\d+)(\..*)?", text.strip())
    if named is None or named[1] not in TORCH_VERSIONS:
        hint = f"Name one of {', '.join(TORCH_VERSIONS)}."
        raise BadInput(f"The rules of torch {text[:60]!r} are not known here.", hint=hint)
    return named[1]


def workspace_bytes(card: Card) -> int:
    """cuBLAS's workspace of one thread: CUBLAS_WORKSPACE_CONFIG, `:KiB:count` pairs, else torch's default."""
    if (n_bytes := configured_bytes(card.cublas)) is not None:
        return n_bytes
    return _row(card).cublas


def lt_workspace_bytes(card: Card) -> int:
    """What the first product with a bias keeps for cuBLASLt in one thread, beside the workspace of cuBLAS."""
    return _row(card).cublas_lt


def configured_bytes(setting: str) -> int | None:
    """The workspace of one thread by CUBLAS_WORKSPACE_CONFIG; None: the setting names none."""
    pairs = re.findall(r":(\d+):(\d+)", setting)
    return sum(int(kib) * int(count) for kib, count in pairs) * KIB if pairs else None


def changed_workspace(environment: Environment) -> tuple[str, int, int] | None:
    """The machine's CUBLAS_WORKSPACE_CONFIG, its bytes and torch's default; None: the machine has the default."""
    setting = re.search(rf"{CUBLAS_SETTING}=(\S+)", environment.allocator_settings)
    n_bytes = configured_bytes(setting[1]) if setting else None
    release = ".".join(map(str, _numbers(environment.torch_version)))
    default = workspace_bytes(Card(name="", total_bytes=0, capability=environment.capability, torch=release))
    return None if setting is None or n_bytes is None or n_bytes == default else (setting[1], n_bytes, default)


def _row(card: Card) -> _Row:
    """The row of the card's capability, of the nearest lower one if it was not measured."""
    rows = _table()[torch_of(card)]
    capability = _numbers(card.capability or UNKNOWN_CAPABILITY)
    lower = [name for name in rows if _numbers(name) <= capability]
    return rows[max(lower or rows, key=_numbers)]


@cache
def _table() -> Mapping[str, Mapping[str, _Row]]:
    text = (Path(__file__).parent / "workspaces.json").read_bytes()
    return msgspec.json.decode(text, type=dict[str, dict[str, _Row]])


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])
