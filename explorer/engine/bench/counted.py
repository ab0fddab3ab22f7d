"""A predicted step beside the same step of torch's own CUDA code, in a process that sees an imaginary card.

counted_on_card(spec) ──▶ python -m explorer.engine.bench.counted SPEC, on the card ──▶ its allocator's counters
"""

from __future__ import annotations

import json
import sys

import msgspec
from msgspec.structs import replace

from explorer.engine.imaginary.run import run_on
from explorer.errors import ModelFailed
from explorer.record.run import RunSpec

N_STEPS = 12
"""As often as a prediction repeats a step at most."""


def counted_on_card(spec: RunSpec) -> tuple[int, int]:
    """Allocated and reserved peak of a `spec` with a card. Raises BadInput without torch's CUDA build, ModelFailed."""
    assert spec.card is not None, "the verb and the page refuse it"
    arguments = ["-m", "explorer.engine.bench.counted", msgspec.json.encode(spec).decode()]
    setting = {"CUBLAS_WORKSPACE_CONFIG": spec.card.cublas}  # the worker has one of its own
    ran = run_on(spec.card, arguments, setting, capture=True)
    if ran.returncode:
        last = ran.stderr.strip().splitlines()[-1:]
        raise ModelFailed(f"The step failed on the imaginary {spec.card.name}: {''.join(last)[:300]}")
    allocated, reserved = json.loads(ran.stdout.splitlines()[-1])
    return allocated, reserved


def counted(spec: RunSpec) -> tuple[int, int]:
    """Allocated and reserved peak of the last step, on the card of this process."""
    import torch

    from explorer.engine.bench.step import ignore, prepare, step_without_loss

    trainee = prepare(replace(spec, card=None, device="cuda", holds_output=True))
    for _ in range(N_STEPS):
        torch.cuda.reset_peak_memory_stats()
        step_without_loss(trainee, ignore)
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


if __name__ == "__main__":
    print(json.dumps(counted(msgspec.json.decode(sys.argv[1], type=RunSpec))))
