"""What a B200 held, and what a play without data says: allocated and reserved bytes, and seconds of one CPU."""

from __future__ import annotations

import json
import time
from pathlib import Path

from explorer.engine.bench.measure import measure_without_data
from explorer.plan.card.cards import CARDS
from explorer.record import ModelRef, RunSpec

B200 = Path(__file__).resolve().parents[1] / "tests" / "golden" / "b200"


def main() -> None:
    for row in json.loads((B200 / "rows.json").read_text())["rows"]:
        if row["scope"] != "forward+loss+backward" or row["refused"]:
            continue
        arguments = {"size": row["size"], "seq": row["seq"], "segments": row["segments"] or 0}
        spec = RunSpec(
            model=ModelRef(target=f"{B200 / 'language_model.py'}:build", arguments=arguments),
            optimizer="none",
            autocast="bfloat16" if row["precision"] == "bf16" else "none",
            card=CARDS["b200"],
        )
        begun = time.process_time()
        memory = measure_without_data(spec).card
        assert memory is not None
        allocated = memory.allocated_bytes / row["peak_allocated_bytes"] - 1
        reserved = memory.reserved_bytes / row["peak_reserved_bytes"] - 1
        seconds = time.process_time() - begun
        print(f"{row['id']:32} allocated {allocated:+9.4%}  reserved {reserved:+9.4%}  {seconds:5.1f} s of CPU")


if __name__ == "__main__":
    main()
