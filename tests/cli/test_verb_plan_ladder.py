"""The ladder of the verb plan, for models that do not fit with everything kept."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from explorer.cli import main as cli
from explorer.jobs.client import Worker
from tests.cli.conftest import Remembering

MIB = 2**20
NETS = '''"""Tensors of 1 MiB, made element by element: nothing counts but what is kept."""
import torch
from torch import nn


class Wave(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        x = x + self.bias
        for _ in range(6):
            x = x.square()
        return x


def blocks(n_blocks=3, n_waves=6):
    """Everything kept 108 MiB; one block at a time 43; of one block one wave at a time 19."""
    stacks = (nn.Sequential(*(Wave() for _ in range(n_waves))) for _ in range(n_blocks))
    return nn.Sequential(*stacks), torch.zeros(1, 2**18)


def operators(n=64):
    """Single operations, each of which keeps its input and nothing else: only segments of them free anything."""
    return nn.Sequential(Wave(), *(nn.Softplus() for _ in range(n))), torch.zeros(1, 2**18)
'''


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nets") / "nets.py"
    path.write_text(NETS)
    return path


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Its malloc gives every tensor pages of its own and takes none ahead: then the limit is one of tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_ARENA_MAX", "1")
        patch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**16))
        worker = Remembering(tmp_path_factory.mktemp("runs") / "runs.sqlite")
        worker.warm()
    yield worker
    worker.close()


Planned = Callable[..., Result]


@pytest.fixture
def planned(shared: Worker, nets: Path) -> Planned:
    def run(factory: str, *arguments: str) -> Result:
        asked = ["plan", f"{nets}:{factory}", "--repeats", "0", "--optimizer", "none", *arguments]
        return CliRunner().invoke(cli.app, asked)

    return run


def headings(stderr: str) -> list[str]:
    """What the progress lines say in front of their colon, each once: the rungs that were tried."""
    words = (line.rpartition(": ")[0] for line in stderr.splitlines() if "does not fit, now" in line)
    return list(dict.fromkeys(words))


@pytest.mark.slow
def test_below_that_blocks_inside_blocks_are_recomputed_too(planned: Planned) -> None:
    asked = ("blocks", "--memory-limit", "32MiB", "--budget", "24MiB")
    result = planned(*asked, "--json")
    assert result.exit_code == 0, result.stderr
    assert headings(result.stderr) == [
        "everything kept does not fit, now every block recomputed",
        "every block recomputed does not fit, now every block at every depth recomputed",
    ]
    (sentence,) = [line for line in one_line_each(result.stderr) if line.startswith("Did not fit")]
    assert re.fullmatch(
        r"Did not fit: everything kept, at least [\d,.]+ MiB, then every block recomputed, at least [\d,.]+ MiB, then "
        r"refused\. Put together from the run that fitted, everything kept needs 1[01]\d\.\d MiB \(predicted\)\.",
        sentence,
    ), sentence
    document = json.loads(result.stdout)
    assert document["met"] and not document["contradiction"]
    assert document["plan"]["baseline_step_peak_bytes"] == pytest.approx(111 * MIB, rel=0.04)
    assert document["plan"]["step_peak_bytes"] == pytest.approx(document["measured"]["step_peak_bytes"], rel=1e-3)
    assert document["measured"]["step_peak_bytes"] <= 24 * MIB
    assert document["first_run"]["step_peak_bytes"] < 24 * MIB, "the rung that fitted"
    printed = planned(*asked).stdout
    assert re.search(r"Budget +24\.0 MiB, kept", printed) and re.search(r"Kept all +1[01].* predicted", printed)


@pytest.mark.slow
def test_a_chain_of_single_operations_goes_down_to_segments_and_is_planned_in_segments(planned: Planned) -> None:
    result = planned("operators", "--memory-limit", "50MiB", "--budget", "40MiB", "--json")
    assert result.exit_code == 0, result.stderr
    assert headings(result.stderr) == ["everything kept does not fit, now every block recomputed"]
    document = json.loads(result.stdout)
    assert document["met"] and document["plan"]["baseline_step_peak_bytes"] == pytest.approx(76 * MIB, rel=0.02)
    assert all(len(unit["blocks"]) > 1 for unit in document["plan"]["policy"]["units"])
    assert document["plan"]["step_peak_bytes"] == pytest.approx(document["measured"]["step_peak_bytes"], rel=1e-3)


@pytest.mark.slow
def test_where_no_rung_fits_the_command_says_so_and_prints_no_figure(planned: Planned) -> None:
    result = planned("blocks", "--memory-limit", "10MiB", "--budget", "9MiB")
    assert result.exit_code == 2 and not result.stdout
    (sentence,) = [line for line in one_line_each(result.stderr) if line.startswith("Did not fit")]
    assert sentence.endswith("then refused.") and "was refused" in result.stderr and "Traceback" not in result.stderr


def one_line_each(stderr: str) -> list[str]:
    """Sentences as they were said, however wide the terminal was."""
    return stderr.replace("\n       ", " ").splitlines()
