"""A training script on a card that is not there: `python -m explorer run --card h100 train.py -- ARGS`.

The script runs as it is, on torch's CUDA build, in a process of its own (explorer/engine/imaginary). Kernels write
nothing: a loss is 0, and a script that branches on values takes the branch of zeros. This file is apart from script.py
because the process that starts the other one cannot import torch: its CUDA build does not load without a driver.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from explorer.engine.imaginary.run import NAME, run_on, sees_imaginary_card
from explorer.engine.imaginary.torch_build import torch_build
from explorer.errors import BadInput, message_of
from explorer.jobs import run_file
from explorer.plan.card.cards import parse_card
from explorer.record.base import from_msgpack
from explorer.record.failure import is_out_of_memory
from explorer.record.measurement import Measurement

if TYPE_CHECKING:
    from explorer.own_loop.record_step import RecordedRun

__all__ = ["run_again_on", "run_on_card", "asks_for_cuda", "check_cuda_build", "sees_imaginary_card"]
MOST_STEPS = 10
NEEDS_CUDA = ("Torch not compiled with CUDA enabled", "Found no NVIDIA driver on your system")
"""What torch says where a script asks for a GPU: a CPU build, and a CUDA build without a driver."""
_CUDA_LIBRARY = re.compile(r"lib(cu\w+|nv\w+|nccl)\.so")


@dataclass(kw_only=True)
class StepsOnCard:
    """What a script did on a card. `peaks`: bytes (allocated, reserved) of each step that ended."""

    card: str
    peaks: list[tuple[int, int]] = field(default_factory=list)
    last: RecordedRun | None = None
    """The last step that was recorded; None: none ended."""
    refused: Measurement | None = None
    """The step in which a request was refused first; None: none was, or before the script made its optimizer."""
    refusal: str = ""
    """The first refused request in words; empty: everything was granted."""
    repeats: bool = False
    """Whether the last step peaks where the step before it did."""
    branches: dict[str, None] = field(default_factory=dict)
    """Lines of the script that branched on values of the card, which are zeros."""

    @property
    def document(self) -> dict[str, object]:
        """What `--json` prints."""
        refused = self.refusal or None
        return {"card": self.card, "peaks": self.peaks, "refused": refused, "branches": list(self.branches)}

    @property
    def branch_lines(self) -> list[str]:
        """`branches` as lines to print; empty if there are none."""
        if not self.branches:
            return []
        notice = "The script branched on values, which are not computed here: a real card may take another way."
        return [notice, *(f"  {line}" for line in self.branches)]


class _Enough(BaseException):
    """Ends the script between two steps. Not an Exception, so that a script's own handlers let it through."""


def run_again_on(card: str, arguments: Sequence[str]) -> int:
    """`python -m explorer ARGUMENTS` in a process that sees the card; its exit code.

    Raises BadInput for an unknown card and without torch's CUDA build.
    """
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return run_on(parse_card(card), ["-P", "-m", "explorer", *arguments], env).returncode


def run_on_card(script: Path, arguments: Sequence[str], n_steps: int | None) -> StepsOnCard:
    """Runs `script` for `n_steps` steps, or until its peak repeats. Errors of the script pass through.

    Raises BadInput if the script makes no optimizer of a model's parameters.
    """
    from explorer.engine.imaginary.value_branches import value_branches
    from explorer.own_loop.script import ScriptUnderWatch  # torch, like all that comes with it

    result = StepsOnCard(card=os.environ[NAME])
    with tempfile.TemporaryDirectory() as folder:
        oom = Path(folder) / "oom.explorer"

        def step_ended(step: int, scalars: dict[str, float]) -> None:
            assert watched.watch is not None
            result.last = watched.watch.runs.pop(step)
            peaks = result.last.measurement.peaks
            result.peaks.append((peaks.allocated_peak_bytes or 0, peaks.reserved_peak_bytes or 0))
            result.repeats = len(result.peaks) > 2 and result.peaks[-1] == result.peaks[-2]
            if step == n_steps or (n_steps is None and (result.repeats or step == MOST_STEPS)):
                raise _Enough

        steps = range(1, (n_steps or MOST_STEPS) + 1)
        watched = ScriptUnderWatch(script, at=steps, on_oom=oom, files="", log=step_ended)
        try:
            with value_branches() as result.branches:
                watched.run(arguments)
        except _Enough:
            pass
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            result.refusal = message_of(error)
        for path in Path(folder).glob("*.explorer"):
            result.refused = from_msgpack(run_file.read(path.read_bytes()).record, Measurement)
            assert result.refused.failure is not None
            result.refusal = f"{result.refused.failure.sentence} {result.refused.failure.hint}"
    if watched.watch is None and not result.refusal:
        raise BadInput(
            f"{script} made no optimizer of a model's parameters, so no step could be found.",
            hint="Put explorer.watch(model) or explorer.record_step(model) into it.",
        )
    return result


def file_of_module(name: str) -> Path:
    """The file that `python -m name` runs. Raises BadInput if there is none."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ImportError:
        spec = None
    finally:
        sys.path.remove(str(Path.cwd()))
    if spec is None or spec.origin is None:
        raise BadInput(f"There is no module {name} to run.", hint="Give the name that `python -m` would be given.")
    return Path(spec.origin)


def asks_for_cuda(error: Exception) -> bool:
    """Whether a script failed because there is no GPU. torch's CUDA build is not even imported without a driver."""
    is_missing = isinstance(error, (ImportError, OSError)) and _CUDA_LIBRARY.search(str(error)) is not None
    return is_missing or any(text in str(error) for text in NEEDS_CUDA)


def check_cuda_build(script: Path) -> None:
    """Raises BadInput for a script that asks for a GPU if the installed torch has no imaginary card either."""
    try:
        torch_build()
    except BadInput as error:
        raise BadInput(
            f"{script} asks for a GPU, and the installed torch finds none here. {error.sentence}",
            hint=f"{error.hint} There, checkpoint-explorer {script} runs it on an imaginary card.",
        ) from error
