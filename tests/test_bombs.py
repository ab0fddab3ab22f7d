"""Small files that grow without end, one for each reader: each is one sentence, in little memory and without a wait.

The last test holds the class: no reader of a stranger's file opens or unpacks it on its own.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import pickle
import re
import resource
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from explorer.engine.model.load import load as load_model
from explorer.errors import BadInput
from explorer.jobs import run_file
from explorer.jobs.run_file import StoredRecord
from explorer.plan.card.opened import read_history
from explorer.plan.catalogue import factory_arguments
from explorer.plan.guard import lock as lock_file
from explorer.plan.policy import file as policy_file
from explorer.record import ModelRef
from explorer.record.base import to_msgpack
from explorer.record.bounded_file import read_configuration
from explorer.ui.session.address import from_query

ROOT = Path(__file__).resolve().parent.parent
MOST_GROWTH_MIB = 160
MIB = 2**20
DEEP = 200_000


def packed_run(content: bytes) -> bytes:
    document = zlib.compress(content, 9)
    version, length = run_file._VERSION.pack(run_file.VERSION), run_file._LENGTH.pack(len(document))
    return run_file.MAGIC + version + run_file._digest(version, length, document) + length + document


def gzipped(*parts: tuple[bytes, int]) -> bytes:
    """Each part repeated, packed without holding what it unpacks to."""
    target = io.BytesIO()
    with gzip.GzipFile(fileobj=target, mode="wb", compresslevel=9) as stream:
        for part, n in parts:
            for _ in range(n):
                stream.write(part)
    return target.getvalue()


def lock_with(blocks: dict[str, dict[str, object]]) -> bytes:
    figures = ("peak_bytes", "saved_bytes", "forward_flops", "recompute_flops", "backward_flops")
    step = {**dict.fromkeys(figures, 1), "peak_phase": "backward"}
    plain = {"packages": {}, "policy": "keep-all", "run": {"model": {"target": "x"}}, "step": step}
    return json.dumps({**plain, "blocks": {"": {"kind": "M"}, **blocks}}).encode()


def doubling(n: int) -> bytes:
    """Each level holds its own twin: 2**n blocks in n lines, all of them beside the block that they are the same as."""
    deep = [".".join(["0"] * (depth + 1)) for depth in range(n)]
    first = {name: {"kind": "B"} for name in deep}
    twins = {f"{name[:-1]}1": {"same_as": name} for name in reversed(deep)}
    return lock_with({**first, **twins})


def weights_of_zeros() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr("archive/data/0", bytes(300 * MIB))
    return file.getvalue()


def link(text: bytes) -> bytes:
    return base64.urlsafe_b64encode(zlib.compress(text, 9))


NESTED = b"[" * DEEP
EMPTY_DICTS = b"\x80\x04](" + b"}" * 6_000_000 + b"e."
READERS: dict[str, Callable[[Path], object]] = {
    "run": lambda path: run_file.read(run_file.read_path(path)),
    "policy": policy_file.load,
    "lock": lock_file.load,
    "trace": read_history,
    "snapshot": read_history,
    "link": lambda path: from_query({"model": "x", "run": path.read_text()}),
    "configuration": read_configuration,
    "weights": lambda path: load_model(ModelRef(target=str(ROOT / "sample_models/mlp.py"), weights=str(path))),
}
BOMBS: dict[str, Callable[[], bytes]] = {
    "run zeros": lambda: packed_run(bytes(300 * MIB)),
    "run deep": lambda: packed_run(b"\x91" * DEEP),
    "run record deep": lambda: run_file.write(
        StoredRecord(kind="measurement", name="", created=0, record=b"\x91" * DEEP)
    ),
    "policy deep": lambda: b"version: 1\npolicy: " + NESTED,
    "policy aliases": lambda: b"version: 1\na: &a [x]\nb: &b [*a, *a]\npolicy: [*b, *b]\n",
    "policy values": lambda: b"version: 1\npolicy: {units: [" + b"a," * 400_000 + b"]}",
    "lock doubling": lambda: doubling(40),
    "lock in itself": lambda: lock_with(
        {"a": {"kind": "B"}, **{"a" + ".0" * i: {"same_as": "a"} for i in range(1, 40)}}
    ),
    "lock long name": lambda: lock_with({"a." * 10**6: {"kind": "B"}}),
    "lock deep": lambda: b'{"version": 1, "packages": ' + NESTED,
    "trace blanks": lambda: gzipped((b" " * MIB, 400), (b'{"traceEvents": []}', 1)),
    "trace objects": lambda: gzipped((b'{"traceEvents": [', 1), (b"{}," * 10**5, 60), (b"{}]}", 1)),
    "trace objects and blanks": lambda: gzipped(
        (b'{"traceEvents": [', 1), ((b"{}," + b" " * 29) * 10**4, 600), (b"{}]}", 1)
    ),
    "trace deep": lambda: b'{"traceEvents": ' + NESTED,
    "trace packed twice": lambda: gzip.compress(gzipped((b" " * MIB, 400))),
    "snapshot dicts": lambda: EMPTY_DICTS,
    "snapshot deep": lambda: b"\x80\x04" + b"](" * DEEP + b"e" * DEEP + b".",
    "snapshot class": lambda: pickle.dumps(Path("x")),
    "link zeros": lambda: link(b" " * 50 * MIB + b"{}"),
    "link deep": lambda: link(b'{"model": ' + NESTED),
    "configuration deep": lambda: b'{"a": ' + NESTED,
    "configuration large": lambda: b'{"a": [' + b"0," * 5 * MIB + b"0]}",
    "weights zeros": weights_of_zeros,
}  # fmt: skip


def refuse(folder: Path) -> None:
    """Reads every file of a folder with the reader that its name begins with, and prints what was said and grown."""
    for path in sorted(folder.iterdir()):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            sentence = f"was read as {str(READERS[path.name.partition(' ')[0]](path))[:80]}"
        except BadInput as error:
            sentence = "" if len(str(error)) < 600 else f"said {len(str(error))} letters"
        except BaseException as error:
            sentence = f"raised {type(error).__name__}: {str(error)[:200]}"
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
        print(json.dumps([path.name, grown, sentence]))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    folder = tmp_path_factory.mktemp("bombs")
    for name, make in BOMBS.items():
        (folder / name).write_bytes(make())
    for reader in READERS:
        if reader == "link":
            continue
        os.mkfifo(folder / f"{reader} pipe")
        with (folder / f"{reader} sparse").open("wb") as file:
            file.truncate(2**40)
    source = "import sys; from pathlib import Path; from tests.test_bombs import refuse; refuse(Path(sys.argv[1]))"
    process = subprocess.run(
        [sys.executable, "-c", source, str(folder)], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert process.returncode == 0, process.stderr[-2000:]
    rows = [json.loads(line) for line in process.stdout.splitlines()]
    return {name: (grown, sentence) for name, grown, sentence in rows}


def test_every_bomb_is_one_sentence_in_little_memory(outcomes: dict[str, tuple[int, str]]) -> None:
    assert outcomes.keys() >= BOMBS.keys()
    wrong = {name: row for name, row in outcomes.items() if row[1] or row[0] > MOST_GROWTH_MIB}
    assert not wrong, wrong


@pytest.mark.parametrize("kind", ["pipe", "folder", "missing"])
def test_a_model_that_is_no_regular_file_is_no_wait(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    assert not factory_arguments(str(path)).usual
    with pytest.raises(BadInput):
        load_model(ModelRef(target=str(path)))


def test_a_lock_of_twins_in_twins_opens_again() -> None:
    lock = lock_file.loads(doubling(6).decode())
    names = set(lock.blocks)
    assert len(names) == 1 + sum(2**depth for depth in range(1, 7))
    assert "1.1.1.1.1.1" in names


OWN_FILES = {
    "child_process/fork_server.py": "/proc",
    "child_process/forks.py": "counters of the system",
    "cli/main.py": "the package",
    "cli/verbs/report.py": "64 bytes of a regular file",
    "engine/device/subprocess_call.py": "our own child",
    "engine/device/device.py": "/proc",
    "engine/device/memory_limit.py": "/proc",
    "engine/imaginary/build.py": "the package",
    "engine/imaginary/torch_build.py": "the installed torch",
    "engine/model/load.py": "the model, which is code",
    "pipeline/engine/run.py": "our own ranks",
    "engine/ranks/real.py": "our own ranks",
    "jobs/client.py": "our own worker",
    "engine/imaginary/objects.py": "ranks of one script",
    "jobs/connection.py": "/proc",
    "lab/plan.py": "the package",
    "lab/view/outcome.py": "the package",
    "jobs/store.py": "our own database",
    "own_loop/on_card.py": "our own folder",
    "own_loop/script.py": "the script, which is run",
    "own_loop/second_run.py": "our own folder",
    "plan/card/torch_rules.py": "the package",
    "plan/catalogue.py": "the package",
    "plan/export/torch_file.py": "the package",
    "pipeline/plan/export.py": "the package",
    "record/bounded_file.py": "the opener",
    "ui/components/__init__.py": "the package",
    "ui/server.py": "streamlit",
    "ui/session/repository.py": "our own database",
    "view/graph/browser.py": "the package",
    "view/report/html.py": "the package",
}
OPENS = re.compile(
    r"\.read_(?:text|bytes)\(|(?<!def )(?<!webbrowser\.)\bopen\(|decompress|"
    r"\bjson\.load\(|\byaml\.(?:safe_)?load|pickle\.loads?\("
)


def test_strangers_files_have_one_opener() -> None:
    """A new reader goes through bounded_file.py, or says here whose file it reads."""
    files = {
        str(path.relative_to(ROOT / "explorer"))
        for path in (ROOT / "explorer").rglob("*.py")
        if OPENS.search(path.read_text())
    }
    assert files <= OWN_FILES.keys(), files - OWN_FILES.keys()


def test_a_record_nested_without_end_is_no_traceback() -> None:
    """From the worker's pipe too."""
    from explorer.record.base import from_msgpack

    with pytest.raises(BadInput):
        from_msgpack(b"\x91" * DEEP, dict[str, Any])
    assert to_msgpack([]) == b"\x90"
