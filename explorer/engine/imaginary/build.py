"""Compiles the stub libraries for the installed torch, once for each version of torch and of the sources.

All functions lie in one library. Each library that torch asks for by name is an empty one beside it that names the
versions of its symbols. A function without a body in `stubs/` is generated: it returns 0, makes a handle, or answers
that it wants no memory.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from explorer.child_process.compiler import compile_library, compiler_command, folder_of_libraries
from explorer.engine.imaginary.torch_build import Needs, TorchBuild, needs_of, torch_build

SOURCES = Path(__file__).parent / "stubs"
CORE = "libimaginary.so"
OPENED_BY_NAME = ("libcuda.so.1", "libnvidia-ml.so.1", "libnvJitLink.so.13")
"""Libraries that torch opens when it needs them; no library of torch is linked to NVML. bitsandbytes needs the last."""
MAKES_HANDLE = re.compile(r"(cublas|cusparse|cusolver|cufft|curand|cudnn|nvrtc)\w*[cC]reate\w*")
WANTS_MEMORY: list[tuple[str, list[int], str]] = json.loads((SOURCES / "wants_memory.json").read_text())
"""Functions that tell the host how much memory they want, or that all is well: name, positions of the answers, type.

Integers and pointers take the same registers and places of the stack in their order, whatever their types.
Source: the API references of cuDNN 9, cuFFT, cuSPARSE and cuSOLVER of CUDA 13.
"""


def build_stubs() -> tuple[Path, ...]:
    """The libraries to load before torch, the first one with all functions.

    Raises BadInput if torch, a compiler or the reader of ELF files is missing.
    """
    torch = torch_build()
    folder = folder_of_libraries() / f"torch-{torch.version}-{_hash_of_sources()}"
    if not folder.is_dir():
        _build(torch, folder)
    others = sorted(path for path in folder.iterdir() if path.name != CORE)
    return (folder / CORE, *others)


def _hash_of_sources() -> str:
    paths = [*sorted(SOURCES.iterdir()), *sorted(Path(__file__).parent.glob("*build.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]


def _build(torch: TorchBuild, folder: Path) -> None:
    compiler, needs = compiler_command(), needs_of(torch)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        work = Path(name)
        (work / "generated.c").write_text(generated(needs.functions))
        made = work / "made"
        made.mkdir()
        sources = sorted(SOURCES.glob("*.c"))
        options = [f"-I{SOURCES}", *map(str, sources), str(work / "generated.c"), "-ldl", "-lpthread"]
        compile_library(compiler, made / CORE, options)
        for library in {*needs.versions, *OPENED_BY_NAME}:
            _empty_library(compiler, work, made / library, needs)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was faster
                raise


def generated(functions: Iterable[str]) -> str:
    """C of the functions that may have no body in `stubs/`; weak, so that a body there counts."""
    lines = ['#include "imaginary.h"', "#define WEAK __attribute__((weak))"]
    for function in sorted(functions):
        rule = next((row for row in WANTS_MEMORY if re.fullmatch(row[0], function)), None)
        call = f'return imaginary_stub("{function}");'
        if rule is not None:
            _, positions, kind = rule
            arguments = [f"{kind} *a{i}" if i in positions else f"long a{i}" for i in range(1, positions[-1] + 1)]
            answers = " ".join(f"if (a{i}) *a{i} = 0;" for i in positions)
            lines.append(f"WEAK Status {function}({', '.join(arguments)}) {{ {answers} {call} }}")
        elif MAKES_HANDLE.fullmatch(function):
            lines.append(f"WEAK Status {function}(void **out) {{ *out = new_handle(); {call} }}")
        else:
            lines.append(f"WEAK Status {function}(void) {{ {call} }}")
    return "\n".join(lines) + "\n"


def _empty_library(compiler: list[str], work: Path, library: Path, needs: Needs) -> None:
    """A library of that name, with nothing in it but the versions that torch expects of it."""
    source, versions = work / "empty.c", work / "versions.map"
    marker = "imaginary_" + re.sub(r"\W", "_", library.name)
    source.write_text(f"int {marker}(void) {{ return 0; }}\n")
    nodes = sorted(needs.versions.get(library.name, ()))
    first = "".join(f"{node} {{ {f'global: {marker};' if not i else ''} }};\n" for i, node in enumerate(nodes))
    versions.write_text(first)
    options = [f"-Wl,--version-script={versions}"] if nodes else []
    compile_library(compiler, library, [str(source), "-Wl,--no-as-needed", str(library.parent / CORE), *options])
