"""CPU time in milliseconds."""

from __future__ import annotations

from explorer.engine.device.clocks import CpuClock


def test_cpu_time_is_in_milliseconds() -> None:
    assert CpuClock().between_ms(1_000_000, 3_500_000) == 2.5
    clock = CpuClock()
    assert clock.mark() <= clock.mark()
