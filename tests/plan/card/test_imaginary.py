"""Our allocator against torch's own, on the imaginary card: every address of random programs, and what is reserved."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from explorer.engine.imaginary.run import run_on
from explorer.plan.card.cards import parse_card
from tests.engine.imaginary.test_run import has_cuda_build
from tests.plan.card.random_programs import played, programs

SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:64",
    "roundup_power2_divisions:4",
    "garbage_collection_threshold:0.8",
)
N_PROGRAMS = 500


@has_cuda_build
@pytest.mark.parametrize("options", SETTINGS)
def test_every_address_is_torchs(options: str) -> None:
    card = replace(parse_card("4GiB"), options=options)
    seed = SETTINGS.index(options)
    ran = run_on(card, ["-m", "tests.plan.card.random_programs", str(seed), str(N_PROGRAMS)], capture=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    answers = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(answers) == N_PROGRAMS
    wrong = []
    n_refused = 0
    for number, (program, answer) in enumerate(zip(programs(seed, N_PROGRAMS), answers)):
        ours = played(program, card)
        n_refused += sum(place[0] == -2 for place in answer)
        first = next((i for i, (one, other) in enumerate(zip(ours, answer)) if one != other), None)
        if first is not None:
            wrong.append(f"program {number}, {program[first]}: ours {ours[first]}, torch's {answer[first]}")
    assert n_refused > 10, "no program filled the card"
    assert not wrong, f"{len(wrong)} of {N_PROGRAMS} programs differ\n" + "\n".join(wrong[:5])
