"""The first step under a memory limit, repeated while libraries map memory for themselves.

oneDNN generates the code of a kernel at the first use of a shape: 34 MiB in the first step of the sample U-Net, none in
the second. A memory limit on a CPU limits address space, so the code counts although the step does not hold it.
A refused step is therefore repeated as long as the last try enlarged the address space: the next try finds the code
mapped. A model that keeps something of every step grows at each try, so MOST_TRIES bounds the tries.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

from explorer.engine.device.device import Device
from explorer.engine.device.limits import address_space_bytes
from explorer.record.failure import is_out_of_memory

LEFT_BYTES = 2**20
"""Growth of the address space from which on a refused step is repeated."""
MOST_TRIES = 20

Made = TypeVar("Made")
Result = TypeVar("Result")


def first_step(device: Device, make: Callable[[], Made], step: Callable[[Made], Result]) -> tuple[Made, Result]:
    """The results of `make()` and `step(made)`; `step` sets the limit. Raises the error of the last try."""
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
    """Clears the frames of `error` and its causes: tensors held there would count as growth."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
