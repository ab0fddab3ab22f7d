"""A step that is the first of its kind under a limit: libraries map memory of their own for it, once and for all.

oneDNN writes the code of each kernel when it is first asked for a shape: 34 MiB behind the first step of the sample
U-Net, nothing behind the second. On a CPU a limit of memory is one of address space, in which that counts as well,
though it is no part of what the step holds. So a step that is refused is tried again as long as the last try left more
behind: what was mapped then is there already. A model that keeps something of every step leaves more behind each time:
hence MOST_TRIES.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

from explorer.engine.device.device import Device
from explorer.engine.device.limits import address_space_bytes
from explorer.record.failure import is_out_of_memory

LEFT_BYTES = 2**20
"""More than so much left behind is a reason to try again."""
MOST_TRIES = 20

Made = TypeVar("Made")
Result = TypeVar("Result")


def first_step(device: Device, make: Callable[[], Made], step: Callable[[Made], Result]) -> tuple[Made, Result]:
    """What `make()` returned and `step(made)`, which sets a limit. Raises what both raise, of the last try."""
    n_tries = 0
    while True:
        n_tries += 1
        made, before_bytes = make(), address_space_bytes()
        try:
            return made, step(made)
        except Exception as error:
            if before_bytes is None or not is_out_of_memory(error):
                raise
            refused = error
        _let_go_of_frames(refused)
        del made
        device.release()
        if n_tries == MOST_TRIES or (address_space_bytes() or 0) - before_bytes < LEFT_BYTES:
            raise refused


def _let_go_of_frames(error: BaseException | None) -> None:
    """Tensors in the frames that it came through would be taken for what is left behind."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
