"""README and docs: short pages in plain sentences, examples that run, a name for everything a person can ask for."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
MOST_WORDS = {"README.md": 1000, "card-checked.md": 1500, "models-that-fit.md": 1400}  # these two are mostly tables
MOST_WORDS_OF_A_PAGE = 1200
MOST_WORDS_OF_A_SENTENCE = 25
FORBIDDEN = re.compile(
    r"\b(foret(?:old|ell\w*)|(?:un)?foresee[ns]?|anew|once more|nobody|somebody\w*|whoever|of its own)\b", re.IGNORECASE
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    """The page without code, tables, headings and addresses."""
    text = _FENCE.sub("", text)
    text = re.sub(r"<[^>]+>|\]\([^)]*\)|^\[[^\]]+\]:.*$", "", text, flags=re.MULTILINE)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "#"))]
    return re.sub(r"`[^`]*`", "X", "\n".join(lines))


def sentences(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n|\n(?=- |\d+\. )", prose(text)):
        yield from re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split()))


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_pages_are_short_and_their_sentences_too(page: Path) -> None:
    text = page.read_text()
    assert len(text.split()) <= MOST_WORDS.get(page.name, MOST_WORDS_OF_A_PAGE)
    assert not [words for words in sentences(text) if len(words.split()) > MOST_WORDS_OF_A_SENTENCE]
    assert not FORBIDDEN.findall(prose(text))


def _run(code: str, folder: str, environment: dict[str, str]) -> None:
    """Runs `code` in this process as a script in `folder`, its errors in the file `errors` there."""
    os.chdir(folder)
    os.environ.update(environment)
    os.dup2(os.open("errors", os.O_WRONLY | os.O_CREAT), 2)
    exec(code, {"__name__": "__main__"})  # noqa: S102


@pytest.fixture(scope="module")
def warm() -> ForkServerContext:
    """Starts processes in which torch is imported already: the import costs more than most examples."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "explorer", __name__])
    return context


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, warm: ForkServerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The process imports what is the main module here: of a page's test, Streamlit leaves one that is no script.
    monkeypatch.setitem(sys.modules, "__main__", sys.modules[__name__])
    examples = [code for language, code in _FENCE.findall(page.read_text()) if language == "python"]
    assert examples, "each page has an example"
    (tmp_path / "sample_models").symlink_to(ROOT / "sample_models")
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CHECKPOINT_EXPLORER_HOME": str(tmp_path)}
    script = warm.Process(target=_run, args=("\n\n".join(examples), str(tmp_path), environment))
    script.start()
    script.join()
    assert script.exitcode == 0, (tmp_path / "errors").read_text()


def test_links_lead_somewhere() -> None:
    broken = []
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES):
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert not broken


def test_the_site_has_every_page_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = [
        page for entry in site["nav"] for page in ([entry] if isinstance(entry, str) else sum(entry.values(), []))
    ]
    assert sorted(listed) == [page.name for page in PAGES]


def test_the_readme_shows_a_real_answer() -> None:
    """The labels of the answer stand in the order in which the command prints them."""
    (answer,) = re.findall(r"^```text\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    lines = answer.splitlines()
    labels = [line[:10].strip() for line in lines[1:] if line[:10].strip()]
    assert labels == ["Step", "Peak", "Held by", "Fits", "Helps", "Next"] and len(lines) <= 12
    assert lines[0].startswith("sample_models/gpt.py is taken for a model")


def test_the_pages_name_every_command_preset_and_sample_model() -> None:
    from typer.main import get_command

    from explorer.cli.main import app
    from explorer.plan.policy.presets import PRESETS

    text = (ROOT / "docs/command-line.md").read_text()
    commands = [f"checkpoint-explorer {name}" for name in getattr(get_command(app), "commands")]  # noqa: B009
    samples = [
        f"sample_models/{path.name}" for path in (ROOT / "sample_models").glob("*.py") if path.stem != "__init__"
    ]
    missing = [name for name in (*commands, *PRESETS, *samples) if name not in text]
    assert not missing, f"the page of the command line does not name {missing}"
