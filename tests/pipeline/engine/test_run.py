"""Pipelined runs of real processes: causes of differences, a plan below a cap, and the files for torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from explorer.child_process.forks import at_hand
from explorer.engine.model.describe import describe
from explorer.errors import InvalidPlan
from explorer.pipeline.engine import torchrun_rank
from explorer.pipeline.engine.build import build
from explorer.pipeline.engine.in_process import run_pass
from explorer.pipeline.engine.profile import profile_blocks
from explorer.pipeline.engine.run import open_results
from explorer.pipeline.engine.torchrun_rank import check_world, network
from explorer.pipeline.plan.cuts import atoms
from explorer.pipeline.plan.export import RESULTS, SCRIPT_FILE, SPEC_FILE, spec_beside
from explorer.pipeline.plan.joint import joint_plan
from explorer.pipeline.record.step import CapWish
from explorer.record.policy import Policy
from tests.pipeline.engine.pipeline_nets import LANGUAGE, TROUBLE
from tests.pipeline.engine.pipeline_runs import (
    NEEDS,
    SOME,
    assert_split_is_exact,
    free_port,
    ran,
    rank_here,
    spec,
    unpacked,
)

DEEP = ("tokens", *(f"blocks.{k}" for k in range(6)), "head")


@pytest.mark.slow
def test_a_tight_cap_is_kept() -> None:
    asked = spec("language", DEEP, 2, schedule="1F1B", arguments={"n_blocks": 6, "width": 64, "length": 32})
    graph = describe(asked.model)
    profile = profile_blocks(asked, atoms(graph), n_microbatches=4)
    free = joint_plan(profile, graph, CapWish(asked=asked.plan, cap_bytes=2**40, n_microbatches=4))
    wish = CapWish(asked=asked.plan, cap_bytes=int(0.75 * max(free.rank_bytes)), n_microbatches=4)
    held = []
    for _ in range(2):  # a forecast that was too low is corrected by what the run held
        lowered = wish.cap_bytes if not held else 2 * wish.cap_bytes - held[-1]
        joint = joint_plan(profile, graph, msgspec.structs.replace(wish, cap_bytes=lowered))
        assert joint.policy.units
        run = ran(msgspec.structs.replace(asked, plan=joint.plan, policy=joint.policy))
        assert run.failure is None, run.failure
        assert not run.moved
        held.append(run.fullest_bytes)
        assert max(joint.rank_bytes) == pytest.approx(held[-1], rel=0.05)
        if held[-1] <= wish.cap_bytes:
            break
    assert held[-1] <= wish.cap_bytes < max(free.rank_bytes)


def test_tied_weights_are_summed_and_named() -> None:
    run = ran(spec("language", LANGUAGE, 3, arguments={"tied": True}))
    tied = next(s for s in run.gradients if len(s.stages) > 1)
    assert (tied.name, tied.stages) == ("tokens.weight", (0, 2))
    assert tied.splitting.relative_norm < 1e-6
    assert (tied.splitting.bitwise, tied.splitting.verdict) == (False, "rounding")
    assert all(s.splitting.bitwise for s in run.gradients if s is not tied)
    assert any("tokens.weight" in note for note in run.notes)


def test_a_partial_tied_gradient_would_be_seen() -> None:
    """The test above has teeth: one stage's share alone is far off."""
    pipeline = build(spec("language", LANGUAGE, 3, arguments={"tied": True}))
    run_pass(pipeline)
    (_, first), (_, last) = pipeline.owners["tokens.weight"]
    assert first.data_ptr() == last.data_ptr()
    whole = pipeline.gradients()["tokens.weight"]
    for part in (first.grad, last.grad):
        assert (part / 4 - whole).norm() > 0.01 * whole.norm()


def test_shares_tell_recompute_from_splitting() -> None:
    """A policy that does not restore the generator is wrong by itself; splitting adds nothing to it."""
    careless = Policy.recompute(LANGUAGE[1:4], preserve_rng_state=False)
    run = ran(spec("language", LANGUAGE, 3, careless))
    assert "different" in {s.recompute.verdict for s in run.gradients}
    kept = ran(spec("language", LANGUAGE, 3, SOME))
    assert all(shares.recompute.bitwise and shares.splitting.bitwise for shares in kept.gradients)


def torchrun_of(script: str, cwd: Path, *options: str) -> tuple[list[str], str]:
    """What the script asks torchrun for, and the PYTHONPATH that it sets; started from `cwd` by a shell alone."""
    python = cwd.parent / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] || printf "%s\\n" "$PWD" "$PYTHONPATH" "$@"\n')
    python.chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        ["sh", script, *options], cwd=cwd, env={**clean, "PATH": "/usr/bin:/bin", "PYTHON": str(python)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    folder, path, dash_m, module, *arguments = ran.stdout.splitlines()
    assert (dash_m, module) == ("-m", "torch.distributed.run")
    return [folder, *arguments], path


class RankHere:
    """A rank that torchrun starts, forked from the clean server. A new interpreter takes 4 s of CPU to import torch."""

    def __init__(self, arguments: tuple[str, ...], world: dict[str, str]) -> None:
        *python, module = arguments[1:4]
        assert (python, module) == (["-u", "-m"], torchrun_rank.__name__)
        self.process = at_hand().start(rank_here, str(Path.cwd()), world, arguments[3:], needs=NEEDS)
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.code if self.process.ended else None

    def wait(self, timeout: float) -> None:
        self.process.wait()


def launched(arguments: list[str]) -> None:
    """torchrun in a fork that has imported torch already."""
    os.chdir(arguments[0])
    SubprocessHandler._popen = RankHere  # type: ignore[assignment, method-assign]
    torchrun.main(arguments[1:])


@pytest.mark.slow
def test_torchrun_runs_the_files_we_write_on_two_machines(tmp_path: Path) -> None:
    """Started by a relative path from a folder with a space in its name, which stays empty."""
    plan = spec("language", LANGUAGE, 2, SOME, schedule="1F1B")
    folder, elsewhere = unpacked(plan, tmp_path / "packed"), tmp_path / "some" / "where else"
    elsewhere.mkdir(parents=True)
    port = str(free_port())
    script = f"../../packed/../packed/{SCRIPT_FILE}"
    beside = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port"]
    with tempfile.TemporaryFile() as output:
        machines = []
        for rank in range(2):
            asked, path = torchrun_of(script, elsewhere, *beside, port, "--node-rank", str(rank))
            assert Path(path.split(os.pathsep)[1], "explorer", "__init__.py").is_file()
            machines.append(at_hand().start(launched, asked, errors=output.fileno(), needs=NEEDS))
        for machine in machines:
            machine.wait()
        output.seek(0)
        assert [machine.code for machine in machines] == [0, 0], output.read().decode()
    for machine in machines:
        machine.close()
    assert spec_beside(folder / RESULTS).plan == plan.plan
    run = open_results(plan, folder / RESULTS)
    assert not list(elsewhere.iterdir())
    assert_split_is_exact(run)
    assert run.engine == "torchrun"
    assert run.headlines()["makespan_ms"] == run.wall.makespan_ms == max(time.end_ms for time in run.actions)
    with pytest.raises(InvalidPlan, match="another run"):
        open_results(msgspec.structs.replace(plan, seed=1), folder / RESULTS)


def rank_of_torchrun(rank: int, folder: str, port: int) -> None:
    """One rank's process, with the environment that torchrun gives it."""
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    threading.Timer = WhenAsleep  # type: ignore[misc]
    time.sleep = lambda _: (asleep.set(), threading.Event().wait())  # type: ignore[assignment]
    names = {name: str(value) for name, value in world.items()}
    rank_here(folder, {**names, "MASTER_ADDR": "127.0.0.1"}, ("torchrun_rank", SPEC_FILE, "--out", RESULTS))


asleep = threading.Event()


class WhenAsleep(threading.Timer):
    """The limit of a rank is over when its model sleeps."""

    def run(self) -> None:
        asleep.wait()
        self.function(*self.args, **self.kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [("raise", "model raised", "Rank 1 failed in 1F"), ("sleep", "cancelled", "when the limit of 10 s was reached")],
)
def test_what_a_rank_said_last_is_the_result(how: str, kind: str, words: str, tmp_path: Path) -> None:
    plan = spec("trouble", TROUBLE, 2, arguments={"how": how}, n_microbatches=2, stages=(TROUBLE[:1], TROUBLE[1:]))
    folder = unpacked(msgspec.structs.replace(plan, time_limit_s=10.0), tmp_path / "packed")
    port = free_port()
    ranks = [at_hand().start(rank_of_torchrun, rank, str(folder), port, needs=NEEDS) for rank in range(2)]
    for process in ranks:
        process.wait()
        assert process.code == 1
        process.close()
    run = open_results(msgspec.structs.replace(plan, time_limit_s=10.0), folder / RESULTS)
    assert run.failure is not None and words in run.failure.sentence
    assert run.failure.kind == kind and not run.gradients


def test_an_interpreter_that_lacks_torch_or_the_explorer_is_named(tmp_path: Path) -> None:
    folder, bare = unpacked(spec("trouble", TROUBLE, 2), tmp_path / "packed"), tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    ran = subprocess.run(
        ["sh", folder / SCRIPT_FILE], env={**os.environ, "PYTHON": str(bare)}, stderr=subprocess.PIPE, text=True
    )
    assert (ran.returncode, ran.stderr.count(f"Error: {bare} has no torch or no explorer.")) == (2, 1)


def test_the_world_has_as_many_ranks_as_the_plan() -> None:
    with pytest.raises(InvalidPlan, match="has 3 ranks, and torchrun started 2"):
        check_world(spec("language", LANGUAGE, 3), 2)


def test_gloo_takes_the_interface_that_leads_to_the_first_machine() -> None:
    one = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert network(one) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert network({**one, "LOCAL_WORLD_SIZE": "2"}) == {}
    assert network({**one, "GLOO_SOCKET_IFNAME": "eth7"}) == {}
