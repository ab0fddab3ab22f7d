"""The files for torchrun, started as a person starts them: real processes, from any folder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from explorer.engine.pipeline.run import open_results
from explorer.engine.pipeline.torchrun_rank import check_world, network
from explorer.errors import InvalidPlan
from explorer.plan.export.torchrun import RESULTS, SCRIPT_FILE, run_files, spec_beside
from explorer.record.run import RunSpec
from tests.engine.pipeline.pipeline_nets import LANGUAGE, TROUBLE
from tests.engine.pipeline.pipeline_runs import SOME, assert_split_is_exact, spec


def unpacked(plan: RunSpec, folder: Path) -> Path:
    """The torchrun files, in a folder that was not there when they were written."""
    files = run_files(plan)
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def torchruns(script: str, n_machines: int = 1, cwd: Path = Path("/")) -> list[subprocess.Popen[str]]:
    """Started from `cwd`, without torchrun on the path; several machines are several torchruns here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    beside = f"--nnodes {n_machines} --nproc-per-node 1 --master-addr 127.0.0.1".split() if n_machines > 1 else []
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return [
        subprocess.Popen(
            ["sh", script, "--master-port", port, *beside, "--node-rank", str(rank)],
            env={**clean, "PATH": "/usr/bin:/bin"},
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(n_machines)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("n_machines", [1, 2])
def test_torchrun_runs_the_files_we_write(tmp_path: Path, n_machines: int) -> None:
    """On one machine through a relative path, on several through a whole one; from a folder that stays empty."""
    plan = spec("language", LANGUAGE, 2, SOME, schedule="1F1B")
    folder, elsewhere = unpacked(plan, tmp_path / "packed"), tmp_path / "some" / "where else"
    elsewhere.mkdir(parents=True)
    script = f"../../packed/../packed/{SCRIPT_FILE}" if n_machines == 1 else str(folder / SCRIPT_FILE)
    started = torchruns(script, n_machines, elsewhere)
    outputs = [machine.communicate(timeout=200)[0] for machine in started]
    assert [machine.returncode for machine in started] == [0] * n_machines, "\n".join(outputs)
    assert spec_beside(folder / RESULTS).plan == plan.plan
    run = open_results(plan, folder / RESULTS)
    assert not list(elsewhere.iterdir())
    assert_split_is_exact(run)
    assert run.engine == "torchrun"
    assert run.wall is not None
    assert run.headlines()["makespan_ms"] == run.wall.makespan_ms == max(time.end_ms for time in run.actions)
    with pytest.raises(InvalidPlan, match="another run"):
        open_results(msgspec.structs.replace(plan, seed=1), folder / RESULTS)


@pytest.mark.slow
def test_what_a_rank_said_last_is_the_result(tmp_path: Path) -> None:
    plan = spec("trouble", TROUBLE, 2, arguments={"how": "raise"}, n_microbatches=2, stages=(TROUBLE[:1], TROUBLE[1:]))
    folder = unpacked(plan, tmp_path / "elsewhere")
    (started,) = torchruns(str(folder / SCRIPT_FILE))
    started.communicate(timeout=200)
    assert started.returncode != 0
    run = open_results(plan, folder / RESULTS)
    assert run.failure is not None
    assert (run.failure.kind, run.failed_rank) == ("model raised", 1)
    assert not run.gradients


def test_an_interpreter_that_lacks_torch_or_the_explorer_is_named(tmp_path: Path) -> None:
    folder, bare = unpacked(spec("trouble", TROUBLE, 2), tmp_path / "packed"), tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    ran = subprocess.run(
        ["sh", folder / SCRIPT_FILE], env={**os.environ, "PYTHON": str(bare)}, stderr=subprocess.PIPE, text=True
    )
    assert (ran.returncode, ran.stderr.count(f"Error: {bare} has no torch or no explorer.")) == (2, 1)


@pytest.mark.slow
def test_a_torchrun_rank_keeps_its_time_limit(tmp_path: Path) -> None:
    stages = (TROUBLE[:1], TROUBLE[1:])
    plan = spec("trouble", TROUBLE, 2, arguments={"how": "sleep"}, n_microbatches=2, stages=stages)
    folder = unpacked(msgspec.structs.replace(plan, time_limit_s=10.0), tmp_path / "elsewhere")
    (started,) = torchruns(str(folder / SCRIPT_FILE))
    output, _ = started.communicate(timeout=200)
    assert started.returncode != 0
    assert "when the limit of 10 s was reached" in output


def test_the_world_has_as_many_ranks_as_the_plan() -> None:
    with pytest.raises(InvalidPlan, match="has 3 ranks, and torchrun started 2"):
        check_world(spec("language", LANGUAGE, 3), 2)


def test_gloo_takes_the_interface_that_leads_to_the_first_machine() -> None:
    one = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert network(one) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert network({**one, "LOCAL_WORLD_SIZE": "2"}) == {}
    assert network({**one, "GLOO_SOCKET_IFNAME": "eth7"}) == {}
