"""A limit is met when a step holds so much: not before, whatever was freed meanwhile, and not after."""

from __future__ import annotations

import platform

import msgspec
import pytest

from explorer.engine.device.apart import apart
from explorer.engine.measure.measure import measure
from explorer.record import RunSpec
from explorer.record.progress import Report, silent
from explorer.view.words.cut_short import peak_and_end
from tests.engine.tiny_nets import ref

MIB = 2**20
PEAK_MIB = 46


def ran(limits_mib: tuple[int, ...], _: Report) -> list[str]:
    """What a person reads of the same step under each limit, one after the other in one process."""
    spec = RunSpec(model=ref("wide", mib=1, depth=4), n_repeats=0)
    limited = (msgspec.structs.replace(spec, memory_limit_bytes=n * MIB) for n in limits_mib)
    return [peak_and_end(measure(one)) for one in limited]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc lets holes be left out")
def test_a_step_fits_just_above_what_it_holds_and_is_refused_just_below() -> None:
    """In a process of its own: a hole that other steps have left may be filled."""
    above, below = PEAK_MIB + 2, PEAK_MIB - 2
    found = apart(ran, (below, above, below, above, above), report=silent, what="took steps under a limit")
    assert found is not None
    fits, refused = {found[i] for i in (1, 3, 4)}, {found[i] for i in (0, 2)}
    assert fits == {f"{PEAK_MIB}.0 MiB"}
    assert all(one.startswith("at least 4") and one.endswith(" MiB, then refused") for one in refused), refused
