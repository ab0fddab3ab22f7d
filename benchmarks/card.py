"""What a B200 held, and what a play without data says: allocated and reserved bytes, and seconds of one CPU."""

from __future__ import annotations

import time

from tests.golden.b200.loop import ROWS, simulated


def main() -> None:
    for row in ROWS.values():
        begun = time.process_time()
        memory = simulated(row).card
        seconds = time.process_time() - begun
        assert memory is not None
        if refused := memory.refused:
            held = f"refused {refused.n_bytes / 2**30:.2f} GiB in {refused.block}, {refused.op}: "
            held += f"{refused.allocated_bytes / 2**30:.2f} GiB allocated, {refused.free_bytes / 2**30:.2f} GiB free"
        else:
            allocated = memory.allocated_bytes / row["peak_allocated_bytes"] - 1
            reserved = memory.reserved_bytes / row["peak_reserved_bytes"] - 1
            held = f"allocated {allocated:+9.4%}  reserved {reserved:+9.4%}"
        print(f"{row['id']:32} {held}  {seconds:5.1f} s of CPU", flush=True)


if __name__ == "__main__":
    main()
