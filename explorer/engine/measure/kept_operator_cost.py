"""Time of torch's dispatch of every operator under selective checkpointing (save_ops).

Forwards of the measured model are timed in turns with the dispatch and without. A loop of small operators shows 15
microseconds for each. Between real operators, which displace Python from the caches, the dispatch took 50 to 130 (four
samples, torch 2.13, a CPU core). A busy GPU does not wait for the dispatch. A rerun dispatches as often as a forward.
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
    """Milliseconds of one step's forward with every operator dispatched and no result kept."""
    look = ExitStack()

    def on_phase(phase: Phase) -> None:
        look.close()
        if phase == "forward":
            look.enter_context(create_selective_checkpoint_contexts([])[0])

    with look:
        return step_ms(trainee, clock, on_phase)["forward"]
