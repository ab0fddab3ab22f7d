"""A training script on a card that is not there: `python -m explorer run --card h100 train.py -- ARGS`.

    steps_on_card ──▶ torchrun, if there are ranks ──▶ main, in a process that sees the card ──▶ the script
         ◀───────────────────── StepsOnCard, a file of each rank ────────────────┘

The script runs as it is, on torch's CUDA build. Kernels write nothing: a loss is 0, and a script that branches on
values takes the branch of zeros. This file is apart from script.py because the process that starts the others cannot
import torch: its CUDA build does not load without a driver.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

from explorer.engine.imaginary.run import run_on
from explorer.engine.imaginary.seen import NAME
from explorer.engine.imaginary.torch_build import check_cuda_build
from explorer.errors import BadInput, message_of
from explorer.jobs import run_file
from explorer.jobs.on_card import OnCardRequest
from explorer.plan.card.cards import parse_card
from explorer.record.base import from_json, from_msgpack, to_json, to_msgpack
from explorer.record.failure import is_out_of_memory
from explorer.record.measurement import Measurement

__all__ = ["check_cuda_build", "steps_on_card"]
MOST_STEPS = 10
_ZEROS = "Values are zeros on an imaginary card: an error about values need not come on a real one."
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--no-python")


@dataclass(kw_only=True)
class StepsOnCard:
    """What a script did on a card. `peaks`: bytes (allocated, reserved) of each step that ended."""

    card: str
    peaks: list[tuple[int, int]] = field(default_factory=list)
    last: Measurement | None = None
    """The step in which a request was refused first, else the last step that ended; None: neither was recorded."""
    file: str = ""
    """Where `last` was written."""
    refusal: str = ""
    """The first refused request in words; empty: everything was granted."""
    no_step: str = ""
    """Why the script has no step; empty: it has."""
    branches: dict[str, None] = field(default_factory=dict)
    """Lines of the script that branched on values of the card, which are zeros."""

    @property
    def decided(self) -> str:
        """The lines of `branches` below a sentence; empty: there are none."""
        if not self.branches:
            return ""
        said = "These lines decide by values, which are zeros here: a real card may take another way and hold more."
        return "\n  ".join([said, *self.branches])

    @property
    def document(self) -> dict[str, object]:
        """What `--json` prints."""
        refused = self.refusal or None
        return {"card": self.card, "peaks": self.peaks, "refused": refused, "branches": list(self.branches)}


class _Enough(BaseException):
    """Ends the script between two steps. Not an Exception, so that a script's own handlers let it through."""


def steps_on_card(request: OnCardRequest, script: Path, arguments: Sequence[str]) -> list[StepsOnCard]:
    """What the script did on each rank, in processes that see the card. A script that fails ends this process too.

    Raises BadInput for an unknown card, without torch's CUDA build, and for a script without a step.
    """
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    # Compiled code needs Triton, whose kernels no imaginary card runs: the step runs as it is written, and says so.
    env = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TORCH_COMPILE_DISABLE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = ["-P", "-m", "explorer.own_loop.on_card", folder, to_json(request).decode(), str(script), *arguments]
        if request.ranks is not None:
            command = [*_TORCHRUN, f"--nproc-per-node={request.ranks}", sys.executable, *command]
        ended = run_on(parse_card(request.card), command, env, n_cards=request.ranks or 1)
        if ended.returncode:
            sys.exit(ended.returncode)
        results = []
        for file in sorted(Path(folder).iterdir()):
            result = from_msgpack(file.read_bytes(), StepsOnCard)
            if result.no_step:
                raise BadInput(result.no_step, hint="Put explorer.watch(model) or explorer.record_step(model) into it.")
            results.append(result)
    return results


def main(folder: str, request: str, script: str, *arguments: str) -> None:
    """A process of `steps_on_card`: runs the script, leaves the result in `folder`, and waits for the other ranks."""
    options = from_json(request, OnCardRequest)
    printed = sys.stdout
    if options.json:
        printed = sys.stderr
    with redirect_stdout(printed):
        result = _run(Path(script), arguments, options.steps)
    if result.last is not None:
        from explorer.engine.device.device import path_of_rank

        number = str(len(result.peaks) + bool(result.refusal))
        file = path_of_rank(Path(options.out.replace("{step}", number)))
        result.file = str(run_file.write_file(file, run_file.write(run_file.stored_record(result.last))))
    run_file.write_file(Path(folder) / f"{os.environ.get('RANK', 0):0>2}", to_msgpack(result))
    while len(list(Path(folder).glob("*[0-9]"))) < (options.ranks or 1):
        time.sleep(0.05)  # the first rank may keep the store that the others still need


def _run(script: Path, arguments: Sequence[str], n_steps: int | None) -> StepsOnCard:
    """Runs `script` for `n_steps` steps, or until its peak repeats. Errors of the script pass through."""
    from explorer.engine.imaginary.checks_of_one import checks_of_one
    from explorer.engine.imaginary.objects import broadcast_objects
    from explorer.engine.imaginary.value_branches import value_branches
    from explorer.own_loop.script import ScriptUnderWatch  # torch, like all that comes with it

    result = StepsOnCard(card=os.environ[NAME])
    with tempfile.TemporaryDirectory() as folder:
        oom = Path(folder) / "oom.explorer"

        def step_ended(step: int, scalars: dict[str, float]) -> None:
            assert watched.watch is not None
            result.last = watched.watch.runs[step].measurement
            watched.watch.runs.pop(step - 1, None)  # a refusal is explained by the step before it
            peaks = result.last.peaks
            result.peaks.append((peaks.allocated_peak_bytes or 0, peaks.reserved_peak_bytes or 0))
            repeats = len(result.peaks) > 2 and result.peaks[-1] == result.peaks[-2]
            if step == n_steps or (n_steps is None and (repeats or step == MOST_STEPS)):
                raise _Enough

        steps = range(1, (n_steps or MOST_STEPS) + 1)
        watched = ScriptUnderWatch(script, at=steps, on_oom=oom, files="", log=step_ended)
        try:
            with broadcast_objects(), checks_of_one(), value_branches() as result.branches:
                watched.run(arguments)
        except _Enough:
            pass
        except SystemExit as ended:  # `sys.exit(main())` ends most scripts that are well
            if ended.code:
                raise
        except Exception as error:
            if not is_out_of_memory(error):
                if result.decided:
                    print(result.decided, file=sys.stderr)
                error.add_note(_ZEROS)
                raise
            result.refusal = message_of(error)
        for path in Path(folder).glob("*.explorer"):
            result.last = from_msgpack(run_file.read(path.read_bytes()).record, Measurement)
            assert result.last.failure is not None
            result.refusal = f"{result.last.failure.sentence} {result.last.failure.hint}"
    if watched.watch is None and not result.refusal:
        result.no_step = f"{script} made no optimizer of a model's parameters, so no step could be found."
    return result


if __name__ == "__main__":
    main(*sys.argv[1:])
