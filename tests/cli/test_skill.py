"""Each task of SKILL.md: at most six calls, which run as they stand, and the fields that its text names."""

from __future__ import annotations

import json
import pickle
import re
import shlex
from pathlib import Path

import pytest

from explorer.jobs.client import Worker
from tests.cli.asked import run
from tests.plan.card.histories import small_document
from tests.test_wheel import NET, TRAIN

PAGE = Path(__file__).resolve().parents[2] / "SKILL.md"
TASKS = dict(re.findall(r"^## (\d+\. .*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE))
MOST_CALLS = 6


def calls(text: str) -> list[list[str]]:
    (code,) = re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [shlex.split(line) for line in code.splitlines()]


def names_in(document: object) -> set[str]:
    """All keys of a document, at any depth."""
    if isinstance(document, dict):
        return set(document).union(*map(names_in, document.values()))
    return set().union(*map(names_in, document)) if isinstance(document, list) else set()


def test_there_are_ten_tasks_of_few_calls() -> None:
    assert len(TASKS) == 10
    assert all(1 <= len(calls(text)) <= MOST_CALLS for text in TASKS.values())
    assert all(call[0] == "checkpoint-explorer" for text in TASKS.values() for call in calls(text))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("skill")
    (place / "net.py").write_text(NET)
    (place / "train.py").write_text(TRAIN)
    (place / "snapshot.pickle").write_bytes(pickle.dumps(small_document()))
    return place


@pytest.mark.parametrize("task", TASKS)
def test_the_calls_of_a_task_run_and_name_what_they_print(
    shared: Worker, folder: Path, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    if "step2.explorer" in TASKS[task] and not (folder / "step2.explorer").exists():
        run("train.py")
    printed: set[str] = set()
    for _, *words in calls(TASKS[task]):
        answer = run(*words)
        if "--json" in words:
            printed |= names_in(json.loads(answer.stdout))
    prose = re.sub(r"^```.*?^```$", "", TASKS[task], flags=re.DOTALL | re.MULTILINE)
    for sentence in re.findall(r"Read (.*?)\n\n|Read (.*?)\Z", prose, re.DOTALL):
        fields = re.findall(r"`([a-z_.]+)`", "".join(sentence).partition(". ")[0])
        assert {part for field in fields for part in field.split(".")} <= printed, task
