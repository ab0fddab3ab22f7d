"""What of a block's time runs again, by its operators where those were timed."""

from __future__ import annotations

import msgspec
import pytest

from explorer.plan.forecast.rerun_ms import rerun_share, unit_ms
from explorer.record import Block, Policy
from explorer.record.measurement import MeasuredBlock, Measurement, Samples
from explorer.record.policy import Unit
from tests.plan.forecast.test_rerun_flops import HALF
from tests.view.builders import measured

MM, GELU, ADD = "aten.mm.default", "aten.gelu.default", "aten.add.Tensor"


def block(**given: object) -> Block:
    sizes = {"n_calls": 1, "parameter_bytes": 0, "buffer_bytes": 0, "output_bytes": 0, "saved_bytes": 1}
    return Block(fqn="b", kind="B", **sizes, forward_flops=100, rerun_flops=50, **given)  # type: ignore[arg-type]


def cost(**operator_ms: float) -> MeasuredBlock:
    names = {"mm": MM, "gelu": GELU, "add": ADD}
    return MeasuredBlock(
        fqn="b", n_forward=1, n_recompute=0, saved_after_forward_bytes=0, at_peak_bytes=0, forward_flops=100,
        recompute_flops=0, backward_flops=0, forward=Samples(ms=(10.0,)),
        operator_ms={names[name]: ms for name, ms in operator_ms.items()},
    )  # fmt: skip


def test_early_stop_leaves_out_its_share_of_the_operators_not_of_the_flops() -> None:
    two_products = block(op_flops={MM: 100}, late_op_flops={MM: 50})
    assert rerun_share(cost(mm=2, gelu=6), two_products) == pytest.approx(7 / 8)
    assert rerun_share(cost(mm=2, gelu=6), None) == 1
    assert rerun_share(cost(), two_products) == 0.5, "nobody timed the operators: by the FLOPs"


def test_operators_whose_results_are_kept_do_not_run_again() -> None:
    assert rerun_share(cost(mm=2, gelu=6, add=2), None, kept=(MM,)) == pytest.approx(0.8)
    one_late = block(op_flops={MM: 100}, late_op_flops={MM: 50})
    assert rerun_share(cost(mm=2, gelu=6, add=2), one_late, kept=(MM,)) == pytest.approx(0.8), "kept: late or not"
    assert rerun_share(cost(), None, kept=(MM,)) is None, "nobody knows"


def with_operators(**operator_ms: float) -> Measurement:
    run = measured()
    names = {"mm": MM, "gelu": GELU}
    of_each = {names[name]: ms for name, ms in operator_ms.items()}
    blocks = tuple(msgspec.structs.replace(one, operator_ms=of_each, n_operators=5) for one in run.blocks)
    times = msgspec.structs.replace(run.times, kept_operator_ms=0.1)
    return msgspec.structs.replace(run, blocks=blocks, times=times)


def test_a_unit_is_its_blocks_and_says_nothing_where_one_is_not_known() -> None:
    run = with_operators(mm=3, gelu=1)
    ms = run.by_fqn["layers.0"].forward.median_ms
    assert ms
    segment = Unit(blocks=("layers.0", "layers.1"), action="save_ops", save_ops=(MM,))
    assert unit_ms(run, None, segment, (), Policy(units=(segment,))) == pytest.approx(2 * ms / 4)
    assert unit_ms(measured(), None, segment, (), Policy(units=(segment,))) is None
    unlooked = msgspec.structs.replace(run, times=measured().times)
    assert unit_ms(unlooked, None, segment, (), Policy(units=(segment,))) is None


def test_a_rerun_that_ends_where_a_unit_inside_is_entered_is_spared_what_that_one_keeps_as_well() -> None:
    """Counted: of three products in a row the last two, kept by a unit inside, run in no rerun, the first in one."""
    run = with_operators(mm=3, gelu=1)
    inner = msgspec.structs.replace(run.by_fqn["layers.1"], fqn="layers.1.inner", forward=Samples(ms=(0.1,)))
    run = msgspec.structs.replace(run, blocks=(*run.blocks, inner))
    outer, within = Unit(blocks=("layers.1",)), Unit(blocks=("layers.1.inner",))
    keeping = msgspec.structs.replace(within, action="save_ops", save_ops=(MM,))
    alone, plain, kept = (unit_ms(run, HALF, outer, inside, Policy()) for inside in ((), (within,), (keeping,)))
    assert alone and plain == kept == pytest.approx(alone - 0.1)
