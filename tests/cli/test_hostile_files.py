"""No verb loads what a file names: run files, step files, policy files, settings, results of ranks."""

from __future__ import annotations

import re
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from explorer.cli import main as cli
from explorer.cli.command import say
from explorer.cli.report import print_record
from explorer.cli.verbs import report as pages
from explorer.jobs import run_file
from explorer.jobs.protocol import models_of
from explorer.jobs.store import Store
from explorer.plan.catalogue import catalogue
from explorer.plan.export.formats import FORMATS
from explorer.plan.policy import file as policy_file
from explorer.record import Failure, ModelRef
from explorer.record.base import Record, to_json
from explorer.record.files import Lock, PolicyFile
from tests import graphs
from tests.cli.conftest import give
from tests.hostile import Trap
from tests.ui.fake_worker import FakeJob, FakeWorker
from tests.view.builders import compared, measured
from tests.view.reports import KINDS

OWN = "sample_models/mlp.py"
WITH_A_POLICY = {
    "measure": [OWN, "--policy", "{file}"],
    "compare": [OWN, "--policy", "{file}"],
    "batch": [OWN, "--budget", "1GiB", "--policy", "{file}"],
    "pipeline": [OWN, "--stages", "2", "--policy", "{file}"],
    "grade": ["gpt", "--policy", "{file}"],
    "check": ["{file}", OWN],
    "show": ["{file}"],
}
WITHOUT_FILES = {
    "models": [],
    "graph": [OWN],
    "plan": [OWN, "--budget", "1MiB"],
    "fit": [OWN, "--budget", "1MiB"],
    "gallery": ["--out", "{out}"],
    "lab": ["dropout"],
    "lock": [OWN],
}
ELSEWHERE = {"report", "export", "run", "app"}
"""Reports and exports have tests of their own below; `run` runs its owner's script and `app` offers its owner's model:
neither reads another file."""


class Refusing(FakeWorker):
    """Describes the owner's model and does nothing else; remembers every model that it was asked for."""

    def answer(self, job: FakeJob) -> None:
        super().answer(job)
        if not job.finished or not isinstance(job.result, Record) or job.result != self.graph:
            job.finish(failure=Failure(kind="bad input", sentence="Nothing runs here."))

    @property
    def models(self) -> list[ModelRef]:
        return [model for job in self.jobs.values() for model in models_of(job.request)]


@pytest.fixture
def trap(tmp_path: Path) -> Trap:
    return Trap(tmp_path)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Refusing:
    """What every verb gets as its worker."""
    refusing = Refusing(graphs.gpt(4))

    give(monkeypatch, refusing)  # type: ignore[arg-type]
    return refusing


def answers(*arguments: str) -> str:
    """What a verb says; it does not leave by a traceback."""
    result = CliRunner().invoke(cli.app, list(arguments))
    said = f"{result.stdout}{result.stderr}"
    assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, result.exception)
    assert "has no rule for this error" not in said and "Traceback (most" not in said, (arguments, said)
    assert said or not result.exit_code, arguments
    return said


def run_files(trap: Trap, folder: Path) -> list[Path]:
    """Every kind of run, and a recorded step; each names one of the texts."""
    records: dict[str, Any] = {**KINDS, "measurement": measured(), "comparison": compared()}
    records["step"] = msgspec.structs.replace(measured(), origin="recorded", graph=graphs.gpt(4))
    assert {type(record) for record in records.values()} == set(run_file.KINDS.values())
    texts, files = trap.texts, []
    for i, (name, record) in enumerate(records.items()):
        text = texts[i % len(texts)]
        files.append(folder / f"{name}.run")
        files[-1].write_bytes(run_file.write(run_file.stored_record(trap.changed(record, text), text)))
    return files


def policy_files(trap: Trap, folder: Path) -> list[Path]:
    """Policy files, and files that are none and name code."""
    function, factory, file, weights = trap.texts
    texts = [
        *(policy_file.dumps(trap.filled(PolicyFile, text)) for text in trap.texts),
        "!!python/object/apply:os.system ['touch mark']",
        f'{{"gradient_checkpointing": "{function}", "gradient_checkpointing_kwargs": {{"{file}": "{factory}"}}}}',
        f"--flags '{factory}' '{function}' '{weights}'",
        f"TrainingArguments(gradient_checkpointing=__import__('os').system('touch {trap.mark}'))",
    ]
    files = [folder / f"policy{i}.yaml" for i in range(len(texts))]
    for path, text in zip(files, texts):
        path.write_text(text)
    return files


def locks(trap: Trap, folder: Path) -> list[Path]:
    """Locks that name other code; for each text one of another model, and two of the owner's: a split, and a policy."""
    files = []
    for i, text in enumerate(trap.texts):
        lock = msgspec.structs.replace(trap.filled(Lock, text), blocks={})
        mine = ModelRef(target=OWN, size="small")
        own = msgspec.structs.replace(lock, run=msgspec.structs.replace(lock.run, model=mine))
        alone = msgspec.structs.replace(own, run=msgspec.structs.replace(own.run, ranks=None))
        for j, hostile in enumerate((lock, own, alone)):
            files.append(folder / f"{i}{j}.lock")
            files[-1].write_bytes(to_json(hostile))
    return files


def test_reports_of_hostile_runs_load_nothing(trap: Trap, tmp_path: Path, engine: Refusing) -> None:
    for i, file in enumerate(run_files(trap, tmp_path)):
        which = str(file) if i % 2 else Store().import_file(file.read_bytes())
        answers("report", which, "--out", str(tmp_path / "r.html"))
        assert "evil" in (text := (tmp_path / "r.html").read_text()) or "os:system" in text
        answers("show", str(file), "--html", str(tmp_path / "s.html"))
    answers("report")
    assert not trap.mark.exists() and not engine.jobs


@pytest.mark.slow
def test_verbs_with_hostile_files_load_the_model_of_the_command_line_alone(
    trap: Trap, tmp_path: Path, engine: Refusing, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {*WITH_A_POLICY, *WITHOUT_FILES, *ELSEWHERE} == set(cli.listed_verbs())
    monkeypatch.setattr(pages, "catalogue", lambda: [sample for sample in catalogue() if sample.target == OWN])
    files = [*policy_files(trap, tmp_path), run_files(trap, tmp_path)[0]]
    for file in files:
        for verb, arguments in WITH_A_POLICY.items():
            answers(verb, *(word.replace("{file}", str(file)) for word in arguments))
    for verb, arguments in WITHOUT_FILES.items():
        answers(verb, *(word.replace("{out}", str(tmp_path / "gallery")) for word in arguments))
    for lock in (hostile := locks(trap, tmp_path)):
        answers("show", str(lock))
    said = [answers("lock", OWN, "--check", str(lock)) for lock in hostile]
    assert sum("Give --parallelize as when" in text for text in said) == len(trap.texts), said
    for i, target in enumerate(FORMATS):
        answers("export", str(files[i % len(files)]), "--to", target)
    assert not trap.mark.exists() and engine.models
    assert not [model for model in engine.models if not model.target.startswith("sample_models/") or model.weights]


ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202egpj.exe\u200b\r[bold]x"
"""Clears the screen, sets the title, colours, turns letters around, hides one, and begins the line again."""
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")


def test_no_verb_hands_a_strangers_escapes_to_the_terminal(trap: Trap, tmp_path: Path, engine: Refusing) -> None:
    """Every kind of file, in every verb that reads it; a stored run's name too."""
    texts = Trap(tmp_path)
    said = []
    for i, record in enumerate({**KINDS, "measurement": measured(), "comparison": compared()}.values()):
        hostile = run_file.stored_record(texts.changed(record, ESCAPES), ESCAPES)
        path = tmp_path / f"{i}.run"
        path.write_bytes(run_file.write(hostile))
        Store().import_file(path.read_bytes())
        said += [answers("report", str(path)), answers("show", str(path))]
    said += [answers("report"), answers("report", "--json")]
    policy = tmp_path / "p.yaml"
    policy.write_text(policy_file.dumps(trap.filled(PolicyFile, ESCAPES)))
    said += [answers(verb, *(word.replace("{file}", str(policy)) for word in arguments))
             for verb, arguments in WITH_A_POLICY.items()]  # fmt: skip
    said += [answers("export", str(policy), "--to", target) for target in FORMATS]
    lock = msgspec.structs.replace(trap.filled(Lock, ESCAPES), blocks={})
    mine = msgspec.structs.replace(lock, run=msgspec.structs.replace(lock.run, model=ModelRef(target=OWN), ranks=None))
    for one in (lock, mine):
        (tmp_path / "l.lock").write_bytes(to_json(one))
        path = str(tmp_path / "l.lock")
        said += [answers("lock", OWN, "--check", path), answers("show", path)]
    strange = tmp_path / "strange.yaml"
    strange.write_text(f"version: 1\npolicy: {{}}\n{ascii(ESCAPES)}: 1\n")
    said.append(answers("export", str(strange), "--to", "torch"))
    assert not [text for text in said if OBEYED.search(text)], [text for text in said if OBEYED.search(text)][:1]
    assert any("u001b[2J" in text or "x1b[2J" in text for text in said), "a reader sees that something is there"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_every_answer_fits_the_terminals_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 1 says "different", so an answer that cannot be encoded must not end with 1."""
    out, err = (TextIOWrapper(BytesIO(), encoding=encoding) for _ in range(2))
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.setattr(cli, "app", lambda: (print_record(compared()), say("\N{RIGHTWARDS ARROW} \u4e2d")))
    cli.main()
    out.flush()
    err.flush()
    texts = [stream.buffer.getvalue().decode(encoding) for stream in (out, err)]  # type: ignore[attr-defined]
    assert "MiB" in texts[0] and ("-> \\u4e2d" if encoding != "utf-8" else "\N{RIGHTWARDS ARROW} \u4e2d") in texts[1]


@pytest.mark.parametrize("error", [TypeError("no"), UnicodeEncodeError("ascii", "x", 0, 1, "no"), BrokenPipeError()])
def test_an_error_of_ours_never_ends_as_an_answer(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising() -> None:
        raise error

    monkeypatch.setattr(pages, "Store", raising)
    result = CliRunner().invoke(cli.app, ["report"])
    assert result.exit_code == 2 and "Error:" in result.stderr


def test_results_of_ranks_name_no_model_and_no_weights(trap: Trap, tmp_path: Path, engine: Refusing) -> None:
    run = KINDS["pipeline"]
    for text in trap.texts:
        hostile = trap.changed(run.spec, text)  # type: ignore[union-attr]
        mixed = msgspec.structs.replace(hostile, model=msgspec.structs.replace(hostile.model, target=OWN))
        for spec in (hostile, mixed):
            (tmp_path / "run_spec.json").write_bytes(to_json(spec))
            assert "was another one" in answers("pipeline", OWN, "--results", str(tmp_path))
    assert not trap.mark.exists() and not engine.models
