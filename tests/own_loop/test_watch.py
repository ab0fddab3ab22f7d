"""Chosen steps of a loop or a script are recorded, the others cost nothing, and one that dies leaves a file first."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

import explorer
from explorer.engine.device.memory_limit import process_memory_limit
from explorer.engine.policy.several_models import models_of
from explorer.errors import BadInput, OutOfMemory
from explorer.jobs.run_file import read
from explorer.own_loop.script import ScriptUnderWatch
from explorer.own_loop.watch import StopAfterRecord, Watch
from explorer.own_loop.watch_request import WatchRequest
from explorer.plan.sizes import mib
from explorer.record import Measurement
from explorer.record.base import from_msgpack
from tests.own_loop.test_record_step import Loop, carried

MIB = 2**20
HUGE = 2**36
"""Bytes beyond every limit. A smaller request may fit into a hole that earlier tests of the process have left."""


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = (sys.excepthook, torch.autograd.backward, dict(torch_optimizer._global_optimizer_pre_hooks))
    yield
    assert before == (sys.excepthook, torch.autograd.backward, dict(torch_optimizer._global_optimizer_pre_hooks))
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def opened(path: Path) -> Measurement:
    return from_msgpack(read(path.read_bytes()).record, Measurement)


def steps(loop: Loop, n: int) -> Loop:
    for _ in range(n):
        loop.step()
    return loop


@pytest.mark.parametrize("named", [True, False], ids=["optimizer", "found"])
def test_the_steps_asked_for_are_recorded_and_the_loop_cannot_tell(named: bool) -> None:
    bare, loop = steps(Loop(), 4), Loop()
    with explorer.watch(loop.model, loop.optimizer if named else None, at=(2, 4)) as watch:
        steps(loop, 4)
    watched = carried(loop)
    assert all(torch.equal(a, b) for a, b in zip(carried(bare), watched)) and len(watched) > 20
    assert list(watch.runs) == [2, 4] and watch.n_steps == 4
    phases = [span.phase for span in watch.runs[2].measurement.phases]
    assert [phase for phase in phases if phase != "between"] == ["forward", "backward"] * 2 + ["optimizer"]
    assert watch.runs[2].measurement.recorded_in.endswith("step 2")
    assert watch.runs[2].measurement.spec.optimizer == "adamw"
    assert not loop.optimizer._optimizer_step_post_hooks


def test_recorded_steps_go_to_the_log_of_the_training() -> None:
    logged: dict[int, dict[str, float]] = {}
    loop = Loop()
    with explorer.watch(loop.model, loop.optimizer, at=(1, 3)) as watch:
        watch.log_to(lambda step, scalars: logged.update({step: scalars}))
        steps(loop, 2)
        watch.log_to(lambda step, scalars: 1 / 0)
        with pytest.warns(UserWarning, match="Step 3 is recorded and not logged. division by zero"):
            steps(loop, 1)
    assert list(watch.runs) == [1, 3] and list(logged) == [1]
    assert logged[1]["memory/peak_bytes"] == watch.runs[1].measurement.step_peak_bytes
    assert logged[1]["recompute/blocks"] == 0 and "memory/reserved_bytes" not in logged[1]  # the CPU reserves nothing


def test_of_the_worst_one_file_is_left_and_a_step_that_was_named_stays(tmp_path: Path) -> None:
    loop = Loop()
    x, y = loop.x, loop.y
    with explorer.watch(loop.model, at=(1,), worst_of=4) as watch:
        watch.save_as(str(tmp_path / "step{step}.explorer"))
        for share in (8, 4, 2, 4):
            loop.x, loop.y = x[::share], y[::share]
            loop.step()
    assert list(watch.runs) == [1, 3]
    assert {path.name for path in tmp_path.iterdir()} == {"step1.explorer", "step3.explorer"}
    assert set(watch.written.values()) == set(tmp_path.iterdir())


def test_a_loop_outlives_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    loop = Loop()
    with explorer.watch(loop.model, loop.optimizer, at=1) as watch:
        watch.save_as(str(tmp_path / "nowhere" / "step{step}.explorer"))
        with pytest.warns(UserWarning, match="Step 1 is recorded and has no file.*Give another path"):
            loop.step()
        steps(loop, 1)
    assert watch.n_steps == 2 and list(watch.runs) == [1] and not watch.written


@pytest.mark.parametrize("taken", [0, 2], ids=["recorded", "between"])
def test_a_model_under_watch_is_copied_and_pickled_and_the_copy_is_not_watched(taken: int, tmp_path: Path) -> None:
    """As an average of the weights does."""
    loop = Loop()
    with explorer.watch(loop.model, loop.optimizer, at=1, on_oom=tmp_path / "oom.explorer") as watch:
        steps(loop, taken)
        copies = [copy.deepcopy(loop.model), pickle.loads(pickle.dumps(loop.model))]
        for one in copies:
            assert one(loop.x).shape == loop.y.shape
        steps(loop, 1)
        with pytest.raises(OutOfMemory), torch.no_grad():
            copies[0].register_forward_pre_hook(lambda module, args: refuse())
            copies[0](loop.x)
    assert not watch.on_oom.exists()  # type: ignore[union-attr]
    assert watch.runs[1].measurement.by_fqn[""].n_forward == 2


def refuse() -> None:
    raise OutOfMemory("It is full.", asked_bytes=1)


def test_watches_may_be_closed_in_any_order(tmp_path: Path) -> None:
    before = (sys.excepthook, torch.autograd.backward)
    loop = Loop()
    first = explorer.watch(loop.model, loop.optimizer, on_oom=tmp_path / "a.explorer")
    loop.step()  # of two recorded steps at once the later one would be left out
    second = explorer.watch(Loop().model, on_oom=tmp_path / "b.explorer")
    first.close()
    second.close()
    assert (sys.excepthook, torch.autograd.backward) == before


def died(loop: Loop, watch: Any, n_before: int) -> pytest.ExceptionInfo[RuntimeError]:
    """Step `n_before` + 1 asks for more than the process may take."""
    with pytest.raises((RuntimeError, OutOfMemory)) as caught, process_memory_limit(400 * MIB), watch:
        steps(loop, n_before)
        loss = loop.model(loop.x).square().mean()
        torch.empty(HUGE, dtype=torch.uint8)
        loss.backward()
    return caught  # type: ignore[return-value]


def test_a_recorded_step_that_is_refused_is_written_with_its_timeline(tmp_path: Path) -> None:
    loop, path = Loop(), tmp_path / "oom.explorer"
    watch = explorer.watch(loop.model, loop.optimizer, at=(1, 2), on_oom=path)
    caught = died(loop, watch, 1)
    run = opened(path)
    assert run.failure is not None and run.failure.kind == "out of memory" and run.failure.asked_bytes == HUGE
    assert run.failed_in == "forward" and len(run.phases) == 2 and run.by_fqn["3"].n_forward == 1
    assert "saved activation" in run.failure.hint and "an earlier step held" in run.failure.hint
    notes = caught.value.__cause__.__notes__ if caught.value.__cause__ else caught.value.__notes__
    assert str(path) in notes[0]
    assert not list(tmp_path.glob("*.part"))


def test_a_refusal_is_held_against_the_largest_step_and_written_once(tmp_path: Path) -> None:
    loop, path = Loop(), tmp_path / "oom.explorer"
    with explorer.watch(loop.model, loop.optimizer, at=(1, 2), on_oom=path) as watch:
        loop.step()
        loop.x, loop.y = loop.x[:8], loop.y[:8]
        loop.step()
        peaks = [watch.runs[number].measurement.step_peak_bytes or 0 for number in (1, 2)]
        assert watch.refused(OutOfMemory("first")) == path
        written = path.read_bytes()
        assert watch.refused(OutOfMemory("second")) is None and path.read_bytes() == written
    run = opened(path)
    assert peaks[0] > peaks[1] and run.failure is not None
    assert f"an earlier step held {mib(peaks[0])}" in run.failure.hint


def test_a_training_ends_with_the_last_step_that_was_asked_for() -> None:
    loop = Loop()
    with Watch(loop.model, loop.optimizer, WatchRequest(at=(1, 2), stop=True), "loop") as watch:
        loop.step()
        with pytest.raises(StopAfterRecord):
            loop.step()
    assert list(watch.runs) == [1, 2]


def test_without_a_library_to_plan_with_it_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, path = Loop(), tmp_path / "oom.explorer"
    with explorer.watch(loop.model, loop.optimizer, at=1):  # what torch itself imports at its first record is there
        loop.step()
    monkeypatch.setitem(sys.modules, "highspy", None)
    died(loop, explorer.watch(loop.model, loop.optimizer, at=(1, 2), on_oom=path), 1)
    run = opened(path)
    assert run.failure is not None and "Held then" in run.failure.hint
    assert "No plan was made: " in run.failure.hint, run.failure.hint  # no solver, or no memory for it


class Greedy(nn.Linear):
    """Asks for too much inside its own forward, where torch is going through its hooks."""

    wants = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.wants:
            torch.empty(HUGE, dtype=torch.uint8)
        return super().forward(x)


def test_the_error_that_ends_a_recorded_step_inside_the_model_is_the_loops_own(tmp_path: Path) -> None:
    model, path = Greedy(4, 4), tmp_path / "oom.explorer"
    optimizer = torch.optim.SGD(model.parameters())
    with process_memory_limit(400 * MIB), explorer.watch(model, optimizer, at=(1, 2), on_oom=path):
        model(torch.ones(4, 4)).sum().backward()
        optimizer.step()
        model.wants = True
        with pytest.raises(RuntimeError, match="allocate memory"):
            model(torch.ones(4, 4))
        model.wants = False
        model(torch.ones(4, 4)).sum().backward()  # a loop that catches it goes on without instruments
    assert opened(path).failure is not None and not model._forward_hooks


@pytest.mark.parametrize("asked", [{"at": (1, 2)}, {"on_oom": "heal"}])
def test_an_optimizer_that_steps_inside_backward_is_not_watched(asked: dict[str, Any]) -> None:
    """No recording can end there: torch restores after backward what it changes."""
    left = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        steps_of = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, steps_of=steps_of: steps_of[p].step())
        with pytest.warns(UserWarning, match="optimizer steps inside backward") if watched else nullcontext():
            watch = explorer.watch(model, **asked) if watched else None
            model(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4)).sum().backward()  # without instruments, though nobody closes the watch
        assert torch._C._len_torch_dispatch_stack() == 0 and not torch._C._autograd._profiler_enabled()
        assert watch is None or not watch.runs
        left.append([*model.parameters()])
    assert all(map(torch.equal, *left))


def test_what_was_held_is_what_was_held_when_it_was_refused(tmp_path: Path) -> None:
    """Garbage of before the step was more than all of it, and went within."""
    loop, path, older = Loop(), tmp_path / "oom.explorer", [torch.zeros(16 * MIB)]
    watch = explorer.watch(loop.model, on_oom=path)
    going = loop.model.register_forward_pre_hook(lambda module, args: older.clear())
    died(loop, watch, 0)
    going.remove()
    run = opened(path)
    assert run.failure is not None and run.held_peak_bytes is not None and run.held_peak_bytes > 64 * MIB
    assert "Saved activations of 0, 1, 2 and 1 more hold" in run.failure.hint


def test_any_other_step_says_what_was_held_and_by_whom(tmp_path: Path) -> None:
    loop, path = Loop(), tmp_path / "oom.explorer"
    died(loop, explorer.watch(loop.model, loop.optimizer, on_oom=path), 3)
    run = opened(path)
    assert run.recorded_in.endswith("step 4") and not run.phases
    own = sum(parameter.nbytes for parameter in loop.model.parameters())
    log = run.allocations
    assert log is not None
    rows = zip(log.n_bytes, log.role, log.block)  # weights of other tests' models are of no block
    assert sum(size for size, role, block in rows if role == 0 and log.blocks[block]) == own


def test_other_errors_write_nothing(tmp_path: Path) -> None:
    loop, path = Loop(), tmp_path / "oom.explorer"
    with pytest.raises(RuntimeError, match="shape"), explorer.watch(loop.model, on_oom=path):
        loop.model(loop.x).view(3, 5)
    assert not path.exists()


def test_what_cannot_be_watched_is_one_sentence() -> None:
    model = nn.Linear(2, 2)
    for wrong in ({}, {"at": (0,)}, {"at": "2"}, {"at": 2.5}, {"worst_of": -1}, {"on_oom": "nowhere/oom.explorer"}):
        with pytest.raises(BadInput):
            explorer.watch(model, **wrong)  # type: ignore[arg-type]


def test_a_chosen_step_under_another_instrument_is_left_out_and_the_loop_goes_on() -> None:
    loop = Loop()
    with explorer.record_step(loop.model), pytest.warns(UserWarning, match="Step 1 is not recorded"):
        watch = explorer.watch(loop.model, at=(1,))
        steps(loop, 1)
        watch.close()
    assert not watch.runs


TRAIN = """
import sys
import torch
from beside import WIDTH

assert __name__ == "__main__" and sys.argv[1:] == ["--lr", "0.1"]
model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(2):
    optimizer.zero_grad()
    model(torch.randn(4, WIDTH)).sum().backward()
    optimizer.step()
ENDING
"""


def script(folder: Path, ending: str = "") -> ScriptUnderWatch:
    (folder / "train.py").write_text(TRAIN.replace("ENDING", ending))
    (folder / "beside.py").write_text("WIDTH = 8\n")
    files = str(folder / "step{step}.explorer")
    return ScriptUnderWatch(folder / "train.py", at=(1, 2), on_oom=None, files=files)


@pytest.mark.parametrize(
    ("ending", "error"), [("", None), ("raise SystemExit(3)", SystemExit), ("1 / 0", ArithmeticError)]
)
def test_it_runs_as_main_and_leaves_everything_as_found(
    ending: str, error: type[BaseException] | None, tmp_path: Path
) -> None:
    before = sys.argv, sys.path[:], Optimizer.__init__
    under_watch = script(tmp_path, ending)
    try:
        if error is None:
            under_watch.run(["--lr", "0.1"])
        else:
            with pytest.raises(error):
                under_watch.run(["--lr", "0.1"])
    finally:
        sys.modules.pop("beside", None)
    assert (sys.argv, sys.path, Optimizer.__init__) == before
    assert under_watch.watch is not None and set(under_watch.watch.runs) == {1, 2}
    assert under_watch.watch.runs[1].measurement.recorded_in == "train.py, step 1"
    assert (tmp_path / "step2.explorer").exists() and under_watch.watch.where == "train.py"


def test_a_script_without_an_optimizer_is_watched_by_nobody(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("done = True\n")
    under_watch = ScriptUnderWatch(tmp_path / "none.py", at=(1,), on_oom=None, files="")
    under_watch.run([])
    assert under_watch.watch is None


def test_a_script_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="There is no script"):
        ScriptUnderWatch(tmp_path / "nowhere.py", at=(1,), on_oom=None, files="")


def test_the_model_is_the_outermost_that_holds_most_of_what_is_trained() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    around = nn.Sequential(model)
    part = torch.optim.SGD([*model[0].parameters(), model[1].weight], lr=0.1)
    assert models_of([part]) == [around]
    assert models_of([torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)]) == []
