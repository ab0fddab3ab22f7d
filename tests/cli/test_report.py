"""What `--json` prints beside the record."""

from __future__ import annotations

import msgspec

from explorer.cli.report import document
from tests.view.builders import compared, measured


def test_caveats_of_the_peak_are_in_the_document_of_every_run() -> None:
    plain = measured()
    assert document(plain)["caveats"] == ()
    assert plain.allocations is not None
    log = msgspec.structs.replace(plain.allocations, ops=(*plain.allocations.ops, "aten::mkldnn_rnn_layer"))
    recurrent = msgspec.structs.replace(plain, allocations=log)
    (caveat,) = document(recurrent)["caveats"]
    assert "oneDNN" in caveat
    both = document(msgspec.structs.replace(compared(), candidate=recurrent))
    assert both["candidate"]["caveats"] == (caveat,) and both["baseline"]["caveats"] == ()
