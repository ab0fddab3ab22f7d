"""The run specification in the address bar, so that a refresh and a shared link restore the page.

`?model=sample_models/gpt.py&size=small&weights=FILE` stay readable; the rest of the run specification is packed,
because a policy may name a thousand blocks. Reading is strict: a truncated link gives a sentence, never half a policy.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

import msgspec
import streamlit as st
from msgspec.structs import replace

from explorer.errors import UnreadableFile, message_of
from explorer.record.base import from_json, to_json
from explorer.record.bounded_file import unpack
from explorer.record.graph import ModelRef
from explorer.record.run import RunSpec

LIMIT = 1_000_000
"""Bytes a link may unpack to."""
SAME_USER = "x-checkpoint-explorer-same-user"
"""Header with which server.py says whether a request comes from the user who started the app."""
DEFAULT = RunSpec(model=ModelRef(target=""))


def to_query(spec: RunSpec) -> dict[str, str]:
    """The address of `spec`; default values are left out."""
    query = {"model": spec.model.target}
    if spec.model.size:
        query["size"] = spec.model.size
    if spec.model.weights:
        query["weights"] = spec.model.weights
    bare = ModelRef(target="", arguments=spec.model.arguments)
    rest = replace(spec, model=bare)
    if rest != DEFAULT:
        query["run"] = base64.urlsafe_b64encode(zlib.compress(to_json(_sparse(rest)), 9)).decode().rstrip("=")
    return query


def from_query(query: Mapping[str, str]) -> RunSpec | None:
    """The run specification of an address; None if the address names no model. Raises UnreadableFile."""
    if not query.get("model"):
        return None
    spec = DEFAULT
    if packed := query.get("run"):
        try:
            data = base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4))
            text = unpack(data, LIMIT, "Its text")
        except (binascii.Error, ValueError, UnreadableFile) as error:
            raise UnreadableFile(
                f"The link's run= part cannot be read: {message_of(error)}.",
                hint="Copy the whole address again, to its end.",
            ) from error
        spec = from_json(text, RunSpec)
    readable = {"target": query["model"], "size": query.get("size"), "weights": query.get("weights", "")}
    return replace(spec, model=replace(spec.model, **readable))


def visit_of(scope: Mapping[str, Any]) -> dict[str, str] | None:
    """The query of a request (ASGI) by which a person opens the Explore page; None for other requests.

    A browser marks what it opens in a window, so that an image or a frame of another site measures nothing.
    """
    is_explore = scope["type"] == "http" and scope["path"] in ("/", "/explore")
    if not is_explore or dict(scope["headers"]).get(b"sec-fetch-dest") != b"document":
        return None
    return dict(parse_qsl(scope["query_string"].decode(errors="replace")))


def show(query: dict[str, str]) -> None:
    """Writes `query` into the address bar, which keeps the job under way."""
    now = st.query_params.to_dict()
    new = query | {name: value for name, value in now.items() if name == "job"}
    if now != new:
        st.query_params.from_dict(new)


def _sparse(spec: RunSpec) -> dict[str, object]:
    """The fields that differ from their default."""
    full, usual = msgspec.to_builtins(spec), msgspec.to_builtins(DEFAULT)
    return {"model": full["model"], **{name: value for name, value in full.items() if value != usual[name]}}
