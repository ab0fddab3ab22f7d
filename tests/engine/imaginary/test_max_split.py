"""The lever `max_split_size_mb:128` on a step with blocks above 128 MiB: peaks are those of torch's own allocator.

`test_steps.py` has the setting too, on models whose blocks are smaller.
"""

from __future__ import annotations

from msgspec.structs import replace

from explorer.plan import levers
from explorer.plan.card.cards import CARDS
from explorer.record.base import to_json
from explorer.record.graph import ModelRef
from explorer.record.run import RunSpec
from tests.engine.imaginary.test_run import has_cuda_build, values_on

SIZE = {"width": 512, "length": 512, "batch": 16, "n_layers": 6, "n_heads": 8}
"""Scores of the attention take 128 MiB each."""
CODE = """
from explorer.engine.bench.measure import measure_without_data
from explorer.engine.bench.step import ignore, prepare, step_without_loss
from explorer.record.base import from_json
from explorer.record.run import RunSpec
from msgspec.structs import replace

spec = from_json(TEXT, RunSpec)
card = measure_without_data(spec, figures_only=True).card
out["played"] = [card.allocated_bytes, card.reserved_bytes]
trainee = prepare(replace(spec, card=None, device="cuda", holds_output=True))
for _ in range(4):
    torch.cuda.reset_peak_memory_stats()
    step_without_loss(trainee, ignore)
out["counted"] = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
"""


@has_cuda_build
def test_the_play_of_the_lever_holds_what_torch_holds() -> None:
    model = ModelRef(target="sample_models/gpt.py", size="small", arguments=SIZE)
    spec = RunSpec(model=model, card=replace(CARDS["h100"], cublas=""))
    changed = levers.under(spec, (levers.MAX_SPLIT,), levers.Parts())
    assert changed.card is not None and changed.card.options == "max_split_size_mb:128"
    peaks = values_on(changed.card, CODE.replace("TEXT", repr(to_json(changed).decode())), CUBLAS_WORKSPACE_CONFIG="")
    assert peaks["played"] == peaks["counted"]
