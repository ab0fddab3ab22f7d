"""Which results torch refuses to keep: by the operator's name, and by what the observed forward did to them."""

from __future__ import annotations

from explorer.plan.names import products_kept, written_results
from explorer.record.graph import ModelGraph
from explorer.record.policy import Unit
from tests.graphs import block
from tests.plan.why.test_peak import graph

OPS = ("aten.mm.default", "aten.add_.Tensor", "aten.bernoulli_.float", "aten.exp.default", "aten._softmax.default")


def test_results_that_are_written_in_place() -> None:
    blocks = (block("a", "B", rewritten_ops=("aten.exp.default", "aten.sin.default")), block("b", "B"))
    known = ModelGraph(model=graph().model, blocks=blocks, edges=())
    by_name = ("aten.add_.Tensor", "aten.bernoulli_.float")

    def written(*fqns: str, of: ModelGraph | None = known) -> tuple[str, ...]:
        return written_results(Unit(blocks=fqns, action="save_ops", save_ops=OPS), of)

    assert written("b", "a") == (*by_name, "aten.exp.default"), "any block of a segment"
    assert written("b") == written("a", of=None) == written("elsewhere") == by_name


def test_products_are_what_flops_are_counted_of_and_nothing_writes_into() -> None:
    flops = {"aten.mm.default": 8, "aten.bmm.default": 4, "aten.gelu.default": 0}
    blocks = (
        block("a", "B", op_flops=flops, rewritten_ops=("aten.bmm.default",)),
        block("b", "B", op_flops={"aten.convolution.default": 2}),
        block("norm", "B"),
    )
    known = ModelGraph(model=graph().model, blocks=blocks, edges=())
    assert products_kept(("a", "b"), known) == Unit(
        blocks=("a", "b"), action="save_ops", save_ops=("aten.convolution.default", "aten.mm.default")
    )
    assert products_kept(("norm",), known) == Unit(blocks=("norm",)), "nothing to keep: recomputed whole"
