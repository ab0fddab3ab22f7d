"""The one door for policies from outside: a policy file, or settings of a program whose recompute options are known."""

from __future__ import annotations

import os

from explorer.errors import UnreadableFile
from explorer.plan.imports.dialect import refuse_unread
from explorer.plan.imports.hugging_face import HUGGING_FACE
from explorer.plan.imports.megatron import MEGATRON
from explorer.plan.imports.own_file import on_model
from explorer.plan.imports.settings import settings_of
from explorer.plan.imports.torchtitan import TORCHTITAN
from explorer.plan.names import listed
from explorer.plan.policy import file as policy_file
from explorer.plan.policy.strict_yaml import Document
from explorer.record.graph import ModelGraph
from explorer.record.policy_file import Reading

PROGRAMS = (HUGGING_FACE, TORCHTITAN, MEGATRON)
SUFFIXES = ("yaml", "yml", "json", "toml", "txt", "sh", "py")
"""Names of files that may hold a policy, or flags; a script is refused with a sentence that says so."""


def read(text: str, graph: ModelGraph) -> Reading:
    """What `text` says of the model of `graph`. Raises UnreadableFile and InvalidPolicy, each in one sentence."""
    try:
        document, fault = Document(text), None
    except UnreadableFile as error:
        document, fault = None, error
    settings = settings_of(text, document and document.plain)
    paths = {program.name: [path for path in settings if program.says(path)] for program in PROGRAMS}
    programs = [program for program in PROGRAMS if paths[program.name]]
    speakers = [f"of {program.name} ({listed(paths[program.name])})" for program in programs]
    if len(programs) > 1:
        raise UnreadableFile(
            f"The settings are those {' and '.join(speakers)}, and only one of them can be meant.",
            hint="Keep the lines of one program.",
        )
    if programs and {"version", "policy"} <= {path.partition(".")[0] for path in settings}:
        raise UnreadableFile(
            f"This is a policy file that also holds settings {speakers[0]}, and only one of them can be meant.",
            hint="Keep the fields of the policy file, or the settings alone.",
        )
    if programs:
        return programs[0].read(settings, graph)
    if "version" not in settings:
        refuse_unread(settings)
    try:
        if document is None:
            raise fault or AssertionError
        return on_model(policy_file.in_document(document), graph)
    except UnreadableFile as error:
        if "version" in settings:
            raise
        raise UnreadableFile(error.sentence, hint=f"{error.hint} {_ALSO}".strip()) from error


_ALSO = f"Recompute settings of {listed([program.name for program in PROGRAMS])} are read as well."


def load(path: str | os.PathLike[str], graph: ModelGraph) -> Reading:
    """The same from a file, whose name every error begins with."""
    return policy_file.read_from(path, lambda text: read(text, graph))
