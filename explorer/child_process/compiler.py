"""The machine's C compiler, for the stub libraries of the imaginary card."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from explorer.errors import BadInput


def compile_library(compiler: list[str], library: Path, arguments: list[str]) -> None:
    """Makes a shared library of that name. Raises BadInput with the compiler's last line."""
    command = [*compiler, "-shared", "-fPIC", "-O1", "-w", "-Wl,-rpath,$ORIGIN"]
    command += [f"-Wl,-soname,{library.name}", "-o", str(library), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["no message"])[-1]
        raise BadInput(
            f"The C compiler {compiler[0]!r} could not build the stubs of the imaginary card: {last[:200]}",
            hint="CC names another compiler; pip install ziglang==0.15.2 brings one.",
        )


def compiler_command() -> list[str]:
    """CC, the machine's C compiler, or that of the `ziglang` wheel. Its version 0.17.1 cannot link some stubs."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and shutil.which(name.split()[0]):
            return name.split()
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise BadInput(
        "The stubs of the imaginary card are compiled, and no C compiler was found.",
        hint="Install gcc or clang, or: pip install ziglang==0.15.2",
    )


def folder_of_libraries() -> Path:
    """The user's cache folder, where a preloaded library may lie: the loader takes spaces and colons for separators."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(home) / "checkpoint-explorer" / "imaginary"
    if re.search(r"[\s:]", str(folder)):
        why = f"The stubs of the imaginary card cannot lie in {str(folder)!r}: its name has a space or a colon."
        raise BadInput(why, hint="Set XDG_CACHE_HOME to another folder.")
    return folder
