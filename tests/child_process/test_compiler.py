"""Which C compiler makes the stubs of the imaginary card: CC, the machine's, else that of the ziglang wheel."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from explorer.child_process import compiler
from explorer.errors import BadInput


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler on the PATH."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)


@pytest.mark.parametrize("is_installed", [True, False])
def test_the_wheel_takes_the_place_of_a_compiler(is_installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: name if is_installed else None)
    if is_installed:
        assert compiler.compiler_command() == [sys.executable, "-m", "ziglang", "cc"]
    else:
        with pytest.raises(BadInput, match=r"no C compiler was found.*\n?.*pip install ziglang==0\.15\.2"):
            compiler.compiler_command()


def test_a_compiler_of_the_machine_goes_before_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        compiler.shutil, "which", lambda name: f"/usr/bin/{name}" if name in ("clang", "ccache") else None
    )
    assert compiler.compiler_command() == ["clang"]
    monkeypatch.setenv("CC", "ccache clang -g0")
    assert compiler.compiler_command() == ["ccache", "clang", "-g0"]


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="needs the ziglang wheel")
def test_the_wheel_builds_the_stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from explorer.engine.imaginary.build import CORE, build_stubs

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    core, *others = build_stubs()
    assert core.name == CORE and len(others) > 10 and core.stat().st_size
