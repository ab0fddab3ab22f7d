"""What torch's look at every operator takes where results of operators are kept (selective checkpointing, save_ops).

Whole forwards of this very model are timed with such a look and without, in turns. A loop of small operators would say
15 microseconds each; between real ones, which throw Python out of the caches, it was 50 to 130 (four samples, torch
2.13, a CPU core), and a GPU that is busy does not wait for it at all. A rerun looks as often as the forward does.
Source: torch.utils.checkpoint.create_selective_checkpoint_contexts
"""

from __future__ import annotations

from contextlib import ExitStack

from torch.utils.checkpoint import create_selective_checkpoint_contexts

from explorer.engine.device.clocks import Clock
from explorer.engine.measure.stopwatch import step_ms
from explorer.engine.step import Trainee
from explorer.record.allocations import Phase


def looked_at_ms(trainee: Trainee, clock: Clock) -> float:
    """Milliseconds of one step's forward, every operator of it looked at and nothing kept."""
    look = ExitStack()

    def on_phase(phase: Phase) -> None:
        look.close()
        if phase == "forward":
            look.enter_context(create_selective_checkpoint_contexts([])[0])

    with look:
        return step_ms(trainee, clock, on_phase)["forward"]
