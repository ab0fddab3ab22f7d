"""The torch that is installed beside this interpreter, read from its files: nothing is imported.

The stubs are made for it: the functions of CUDA that its libraries call, and the libraries that they name. The wheel
says which versions of cuDNN and NCCL belong to it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from explorer.errors import BadInput

CUDA_SYMBOL = re.compile(
    r"(__cuda|cuda|cublas|cusparse|cusolver|cufft|curand|cudnn|cupti|nccl|nvrtc|nvshmem|cu[A-Z])\w+"
)
CUDA_LIBRARY = re.compile(r"lib(cu|nccl|nvrtc|nvshmem|nvJit|nvToolsExt)\w*\.so\.\d+")
CUDA_MAJOR = "13"
SYMBOL = struct.Struct("<IBBHQQ")
"""An entry of a symbol table: name, kind, visibility, section, value, size (ELF-64 specification, figure 3)."""


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """`version` is torch's own, such as `2.13.0+cu130`; `libraries` is the folder of its shared libraries."""

    version: str
    libraries: Path
    cudnn: tuple[int, int, int]
    nccl: tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Functions of CUDA that torch's libraries call, and version names that each library of CUDA must have."""

    functions: frozenset[str]
    versions: dict[str, frozenset[str]]


def torch_build() -> TorchBuild:
    """The installed torch. Raises BadInput if there is none, and for a build without CUDA 13."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise BadInput("The imaginary card runs torch's CUDA build, and no torch is installed.", hint=hint("2.13.0"))
    folder = Path(spec.submodule_search_locations[0])
    text = (folder / "version.py").read_text()
    version, cuda = (re.search(rf"^{name}\b.*?= '([^']*)'", text, re.MULTILINE) for name in ("__version__", "cuda"))
    release = version.group(1) if version else "unknown"
    if cuda is None or not cuda.group(1).startswith(f"{CUDA_MAJOR}."):
        build = f"is built for CUDA {cuda.group(1)}" if cuda else "is built without CUDA"
        raise BadInput(
            f"The imaginary card runs torch built for CUDA {CUDA_MAJOR}, and torch {release} {build}.",
            hint=hint(release.partition("+")[0]),
        )
    names = importlib.metadata.requires("torch") or []
    return TorchBuild(
        version=release,
        libraries=folder / "lib",
        cudnn=_pinned("cudnn", names) or (9, 10, 2),
        nccl=_pinned("nccl", names) or (2, 27, 5),
    )


def hint(release: str) -> str:
    """The command that installs the CUDA build of a torch release."""
    return (
        f"The CUDA build, in an environment of its own: pip install torch=={release} --index-url "
        "https://download.pytorch.org/whl/cu130. It needs no GPU."
    )


def check_cuda_build(script: Path) -> None:
    """Raises BadInput for a script that asks for a GPU if the installed torch has no imaginary card either."""
    try:
        torch_build()
    except BadInput as error:
        raise BadInput(
            f"{script} asks for a GPU, and the installed torch finds none here. {error.sentence}",
            hint=f"{error.hint} There, checkpoint-explorer {script} runs it on an imaginary card.",
        ) from error


def _pinned(name: str, requirements: list[str]) -> tuple[int, int, int] | None:
    for text in requirements:
        if match := re.match(rf"nvidia-{name}-cu\d+==(\d+)\.(\d+)\.(\d+)", text):
            major, minor, patch = map(int, match.groups())
            return major, minor, patch
    return None


def needs_of(build: TorchBuild) -> Needs:
    """What the libraries of that torch take from CUDA. Raises BadInput if the reader of ELF files is missing."""
    functions: set[str] = set()
    versions: dict[str, set[str]] = {}
    for path in sorted(build.libraries.glob("*.so")):
        for library, names in _read(path, functions).items():
            versions.setdefault(library, set()).update(names)
    return Needs(
        functions=frozenset(functions), versions={library: frozenset(names) for library, names in versions.items()}
    )


def _read(path: Path, functions: set[str]) -> dict[str, set[str]]:
    """Adds the functions of CUDA that a library calls; returns the libraries of CUDA that it names, with versions."""
    try:
        from elftools.elf.elffile import ELFFile
    except ImportError as error:
        raise BadInput(
            "The imaginary card reads torch's libraries with pyelftools, which is not installed.",
            hint="pip install 'checkpoint-explorer[card]'",
        ) from error
    with path.open("rb") as file:
        elf: Any = ELFFile(file)
        symbols, names = elf.get_section_by_name(".dynsym"), elf.get_section_by_name(".dynstr")
        if symbols is None:
            return {}
        text = names.data()
        for name, _, _, section, _, _ in SYMBOL.iter_unpack(symbols.data()):
            if section == 0:
                function = text[name : text.index(b"\0", name)].decode()
                if CUDA_SYMBOL.fullmatch(function):
                    functions.add(function)
        tags = elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")
        libraries: dict[str, set[str]] = {tag.needed: set() for tag in tags if CUDA_LIBRARY.fullmatch(tag.needed)}
        requirements = elf.get_section_by_name(".gnu.version_r")
        for library, entries in requirements.iter_versions() if requirements is not None else ():
            if library.name in libraries:
                libraries[library.name].update(entry.name for entry in entries)
        return libraries
