"""What is taken home: real runs as records, for the tests of views and plans, and the file of torch's own viewer."""

from __future__ import annotations

import msgspec

from explorer.engine.bench.other_tools import save_snapshot
from explorer.record import ModelRef, Policy
from explorer.record.base import to_msgpack
from tests.golden.make import TINY
from tests.gpu.kit import Bench


def check_golden_run(bench: Bench) -> None:
    spec = msgspec.structs.replace(
        bench.spec("gpt", optimizer="sgd", n_repeats=1 if bench.tiny else 3),
        model=ModelRef(target="sample_models/gpt.py", arguments=TINY),
    )
    comparison = bench.compared(spec, Policy.recompute(["blocks.0", "blocks.2"]))
    document = to_msgpack(comparison)
    (bench.folder / f"{bench.device}.msgpack").write_bytes(document)
    bench.figure("bytes", len(document))
    bench.figure("verdict", comparison.verdict)
    bench.expect(comparison.failure is None, comparison.failure.sentence if comparison.failure else "")


def check_snapshot(bench: Bench) -> None:
    bench.needs_cuda()
    saved = save_snapshot(bench.spec("gpt"), bench.folder / "snapshot.pickle")
    bench.figure("bytes", saved.n_bytes)
