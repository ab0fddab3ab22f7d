"""AdamW with moments of 8 bits, in the layout of bitsandbytes 0.49: the memory of a step, and a real update.

    parameter of 4,096 elements and more    two moments of one byte an element, and two float32 for each 256 elements
    smaller parameter                       two moments in float32
    once                                    two tables of the 256 values that a byte can mean

The update is one operator without memory of its own, as their kernel is. step.py makes torch's optimizers, which have
no such form. Source: https://arxiv.org/abs/2110.02861
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from explorer.engine.model.four_bit import BLOCK, codes

LEAST_ELEMENTS = 4096
CHUNK = 16 * BLOCK
"""Elements that the update has in float32 at a time."""
BETA1, BETA2, EPSILON, DECAY = 0.9, 0.999, 1e-8, 1e-2
NAMES = (("mean", "square"), ("mean_scales", "square_scales"), ("mean_codes", "square_codes"))
"""Of the state of a parameter; a smaller parameter has the first two."""


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with the defaults of `bitsandbytes.optim.AdamW8bit`."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self._tables: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    self._begin(parameter, state)
                state["step"] += 1
                moments, scales, tables = ([state[name] for name in names if name in state] for names in NAMES)
                update(parameter, parameter.grad, moments + scales, tables, [group["lr"], state["step"]])

    def _begin(self, parameter: Tensor, state: dict[str, object]) -> None:
        moments, scales, tables = NAMES
        state["step"] = 0
        is_small = parameter.numel() < LEAST_ELEMENTS
        kind = torch.float32 if is_small else torch.uint8
        state.update((name, parameter.new_zeros(parameter.shape, dtype=kind)) for name in moments)
        if is_small:
            return
        if not self._tables:
            self._tables = [codes(signed=signed).to(parameter.device, copy=True) for signed in (True, False)]
        n_blocks = -(-parameter.numel() // BLOCK)
        state.update((name, parameter.new_zeros(n_blocks, dtype=torch.float32)) for name in scales)
        state.update(zip(tables, self._tables))


@torch.library.custom_op("explorer::adamw_8bit", mutates_args=("parameter", "state"))
def update(
    parameter: Tensor, gradient: Tensor, state: list[Tensor], tables: list[Tensor], numbers: list[float]
) -> None:
    """One step of one parameter, in place. `numbers`: the learning rate, and the number of the step."""
    rate, step = numbers
    flat, slopes = parameter.reshape(-1), gradient.reshape(-1)
    mean_of, square_of = (_Moment(i, state, tables) for i in range(2))
    root = (1 - BETA2**step) ** 0.5
    for start in range(0, flat.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        slope = slopes[part].float()
        mean = mean_of.moved(part, slope, BETA1)
        square = square_of.moved(part, slope * slope, BETA2)
        change = mean / (square.sqrt() + EPSILON * root) * (rate * root / (1 - BETA1**step))
        flat[part] = ((flat[part].float() - change) * (1 - rate * DECAY)).to(flat.dtype)
    if flat.data_ptr() != parameter.data_ptr():  # reshape copies a parameter whose elements do not lie in a row
        parameter.copy_(flat.view_as(parameter))


@update.register_fake
def _(*_: object) -> None:
    """The update takes no memory."""


class _Moment:
    """A moment of one parameter, in 8 bits if it has scales."""

    def __init__(self, index: int, state: list[Tensor], tables: list[Tensor]) -> None:
        self._values = state[index].view(-1)
        self._scales = state[index + 2] if tables else None
        self._codes = tables[index] if tables else None

    def moved(self, part: slice, slope: Tensor, beta: float) -> Tensor:
        """The moment of `part` after `slope`, in float32."""
        if self._scales is None or self._codes is None:
            return self._values[part].mul_(beta).add_(slope, alpha=1 - beta)
        n, blocks = len(slope), slice(part.start // BLOCK, part.stop // BLOCK)
        scale = self._scales[blocks].repeat_interleave(BLOCK)[:n]
        moment = self._codes[self._values[part].long()] * scale * beta + slope * (1 - beta)
        largest = torch.nn.functional.pad(moment.abs(), (0, -n % BLOCK)).view(-1, BLOCK).amax(1)
        self._scales[blocks] = largest
        scale = largest.clamp(min=torch.finfo(torch.float32).tiny).repeat_interleave(BLOCK)[:n]
        borders = (self._codes[1:] + self._codes[:-1]) / 2
        self._values[part] = torch.bucketize(moment / scale, borders).to(torch.uint8)
        return moment
