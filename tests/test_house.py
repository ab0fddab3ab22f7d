"""The house keeps its own rules: who may import whom, how long a file may be, and that the README names everything."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

STANDARD = sys.stdlib_module_names

# ring -> (rings of ours it may import, outside libraries it may import)
LAW: dict[str, tuple[set[str], set[str]]] = {
    "errors": (set(), set()),
    "record": ({"errors"}, {"msgspec"}),
    "plan": ({"record", "errors"}, {"msgspec", "numpy", "yaml"}),
    "engine": ({"plan", "record", "errors"}, {"msgspec", "torch", "torchviz", "numpy"}),
    "jobs": ({"record", "errors"}, {"msgspec", "platformdirs"}),
    "view": ({"plan", "record", "errors"}, {"msgspec", "plotly", "graphviz", "numpy"}),
    "ui": ({"jobs", "view", "plan", "record", "errors"}, {"msgspec", "streamlit"}),
    "cli": ({"jobs", "view", "plan", "record", "errors"}, {"msgspec", "typer", "rich"}),
    "app": ({"ui"}, {"streamlit"}),
    "sample_models": (set(), {"torch"}),
}
# msgspec is where records come from: whoever makes a changed copy of one may name it (`structs.replace`).
LATE_ENGINE = {"explorer/jobs/worker.py", "explorer/__init__.py"}
"""The worker alone imports the engine, inside a function; the public face imports by name on first use."""


def sources() -> list[Path]:
    return [
        ROOT / "app.py",
        *sorted((ROOT / "explorer").rglob("*.py")),
        *sorted((ROOT / "sample_models").rglob("*.py")),
    ]


def ring_of(path: Path) -> str | None:
    where = path.relative_to(ROOT).parts
    if where[0] in ("app.py", "sample_models"):
        return where[0].removesuffix(".py")
    if len(where) == 2:
        stem = where[1].removesuffix(".py")
        return "cli" if stem.startswith("cli") else stem if stem == "errors" else None
    return where[1]


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{package}: import by full name"
            module = node.module or ""
            yield from (f"{module}.{alias.name}" if module == "explorer" else module for alias in node.names)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_keep_the_law(path: Path) -> None:
    ring = ring_of(path)
    if ring is None:
        return
    ours, outside = LAW[ring]
    wrong = []
    for name in set(imports(ast.parse(path.read_text()), str(path))):
        top, _, rest = name.partition(".")
        if top in STANDARD:
            continue
        if top == "explorer":
            target = rest.partition(".")[0]
            if target in ("", "__version__"):
                continue
            target = "cli" if target.startswith("cli") else target
            late = target == "engine" and str(path.relative_to(ROOT)) in LATE_ENGINE
            if target != ring and target not in ours and not late:
                wrong.append(name)
        elif top not in outside:
            wrong.append(name)
    assert not wrong, f"{path.relative_to(ROOT)} ({ring}) imports {sorted(wrong)}"


def test_the_law_can_fail() -> None:
    assert "torch" in set(imports(ast.parse("import torch"), "x"))
    assert "explorer.engine.apply" in set(imports(ast.parse("from explorer.engine.apply import apply_policy"), "x"))
    assert "torch" not in LAW["ui"][1]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_small(path: Path) -> None:
    n_lines = len(path.read_text().splitlines())
    assert n_lines <= 400, f"{path.relative_to(ROOT)} has {n_lines} lines: more than one idea in a room"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_says_why_it_exists(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path.relative_to(ROOT)} has no docstring"


@pytest.mark.parametrize("statement", ["import explorer", "import explorer.ui", "import explorer.jobs.client"])
def test_the_app_process_never_imports_torch(statement: str) -> None:
    check = f"import sys; {statement}; print(sorted({{'torch', 'explorer.engine'}} & set(sys.modules)))"
    said = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_importing_the_package_is_cheap() -> None:
    check = "import sys, explorer; print(sorted({'torch', 'streamlit', 'plotly', 'numpy'} & set(sys.modules)))"
    said = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_top_level_holds_what_was_agreed() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    top = {name.partition("/")[0] for name in listed if name and not name.startswith(".")}
    agreed = {"app.py", "explorer", "tests", "sample_models", "requirements.txt", "README.md"}
    assert top <= agreed | {"Makefile", "pyproject.toml", "LICENSE", "benchmarks"}


def test_readme_names_every_command_preset_and_sample_model() -> None:
    from typer.main import get_command

    from explorer.cli import app
    from explorer.plan.presets import PRESETS

    readme = (ROOT / "README.md").read_text()
    commands = [f"python -m explorer {name}" for name in getattr(get_command(app), "commands")]  # noqa: B009
    samples = [
        f"sample_models/{path.name}" for path in (ROOT / "sample_models").glob("*.py") if path.stem != "__init__"
    ]
    missing = [name for name in (*commands, *PRESETS, *samples) if name not in readme]
    assert not missing, f"the README does not name {missing}"
