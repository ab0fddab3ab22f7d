"""A limit is met when a step holds so much: not before, whatever was freed meanwhile, and not after."""

from __future__ import annotations

import platform
import re

import msgspec
import pytest

from explorer.engine.bench.measure import measure
from explorer.engine.bench.step import prepare, run_step
from explorer.engine.device.limits import limited_process
from explorer.engine.device.subprocess_call import call_in_subprocess
from explorer.errors import OutOfMemory
from explorer.record import RunSpec
from explorer.record.plan import Report, silent
from explorer.view.text.runs import peak_and_end
from tests.engine.tiny_nets import ref

MIB = 2**20
PEAK_MIB = 46
BELOW, ABOVE = PEAK_MIB - 2, PEAK_MIB + 2


def ran(_: Report) -> tuple[str, list[tuple[int, bool]]]:
    """What a person reads of the step below its peak; then by limit, one after the other, whether it ran."""
    spec = RunSpec(model=ref("wide", mib=1, depth=4), n_repeats=0)
    words = peak_and_end(measure(msgspec.structs.replace(spec, memory_limit_bytes=BELOW * MIB)))
    trainee, outcomes = prepare(spec), []
    for limit_mib in (BELOW, ABOVE) * 4:
        try:
            with limited_process(limit_mib * MIB):
                run_step(trainee)
        except OutOfMemory:
            outcomes.append((limit_mib, False))
        else:
            outcomes.append((limit_mib, True))
    return words, outcomes


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc lets holes be left out")
def test_a_step_fits_just_above_what_it_holds_and_is_refused_just_below() -> None:
    """In a process of its own: a hole that steps without a limit have left may be filled."""
    answer = call_in_subprocess(ran, report=silent, what="took steps under a limit")
    assert answer is not None
    words, outcomes = answer
    assert re.fullmatch(r"at least \d+\.\d MiB, then refused", words)
    assert outcomes == [(BELOW, False), (ABOVE, True)] * 4
