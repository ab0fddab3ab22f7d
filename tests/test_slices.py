"""A slice can be deleted: a copy of the tree without its folder starts, lists its verbs, draws its pages and passes.

The rooms below name no slice. Files of tests that hold a run of a pipeline among others are left out:
`tests/ui/runs`, `tests/golden/test_earlier.py` and the like.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from explorer.cli.main import listed_verbs
from tests.test_house import ROOT, SLICES

ROOMS = (
    "record", "plan/policy", "plan/export", "plan/test_catalogue.py", "jobs/test_run_file.py", "jobs/test_store.py",
    "view/test_report.py", "cli/test_command.py", "ui/session/test_page_job.py",
)  # fmt: skip
VISIT = """
from streamlit.testing.v1 import AppTest

at = AppTest.from_file("app.py", default_timeout=60).run()
assert not at.exception, at.exception
print(*at.session_state["pages"])
"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=[*([slice] for slice in SLICES), [*SLICES]], ids=" and ".join)
def deleted(request: pytest.FixtureRequest) -> list[str]:
    return list(request.param)


@pytest.fixture(scope="module")
def rest(deleted: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree without the slices and their tests."""
    copy = tmp_path_factory.mktemp("rest")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    gone = tuple(f"{folder}/{slice}/" for folder in ("explorer", "tests") for slice in deleted)
    for name in names:
        if not name.startswith(gone) and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
    return copy


def run(rest: Path, *arguments: str, code: int = 0) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=rest, capture_output=True, text=True, check=False)
    assert done.returncode == code, (done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout if not code else " ".join(done.stderr.split())


def test_the_command_line_lists_the_other_verbs(rest: Path, deleted: list[str]) -> None:
    verbs = set(re.findall(r"^. (\w+) ", run(rest, "-m", "explorer", "--help"), flags=re.M))
    assert verbs >= set(listed_verbs()) - set(deleted) and not verbs & set(deleted)


def test_the_app_draws_the_other_pages(rest: Path, deleted: list[str]) -> None:
    pages = [name for name in ("explore", "pipeline", "lab", "runs") if name not in deleted]
    assert run(rest, "-c", VISIT).split() == pages


def test_the_rooms_of_the_core_pass(rest: Path) -> None:
    rooms = [f"tests/{room}" for room in ROOMS]
    run(rest, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not browser", *rooms)


def test_what_needs_the_slice_says_so_in_one_sentence(rest: Path, deleted: list[str]) -> None:
    if "pipeline" in deleted:
        refused = run(rest, "-m", "explorer", "report", "tests/golden/earlier/pipeline.explorer", code=2)
        assert "The run file holds a pipeline run; this release reads measurement, " in refused
        refused = run(rest, "-m", "explorer", "measure", "sample_models/mlp.py", "--predict", "--pp", "2", code=2)
        assert refused.startswith("Error: This needs explorer/pipeline, which is not here.")
