"""`--card` against torch's own CUDA code: whole steps on imaginary cards, every pair of choices at least once.

    PYTHON -m benchmarks.imaginary.steps [MOST] [WORD...]

PYTHON has a CUDA build of torch; no GPU is needed. A row is a model, a policy, a type, an optimizer, a capability and a
setting of the allocator. `--card` predicts its allocated and reserved peak without data. Then torch's own code takes
the step twelve times on a card of that capability, and its allocator's counters are the truth. `MOST`: rows at most,
0: all. WORDs: rows that have one of them, such as `:llama` or `unet`.
"""

from __future__ import annotations

import gc
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from msgspec.structs import replace

from benchmarks.imaginary.make import MULTIPROCESSORS
from explorer.engine.imaginary.run import run_on
from explorer.errors import BadInput
from explorer.plan.card.cards import CARDS
from explorer.record import KEEP_ALL, ModelRef, RunSpec
from explorer.record.card import Card

Row = dict[str, str]
OWN_ADAMW = "own-adamw"
"""An optimizer that makes its state in new memory: every step has other addresses."""
CHOICES: dict[str, tuple[str, ...]] = {
    "model": (
        *(f"sample_models/{name}.py" for name in ("gpt", "mlp", "resnet", "unet", "recurrent", "tied_lm", "vit")),
        *(f"tests/engine/bench/third_party_nets.py:{name}" for name in ("llama", "neox", "vit", "bart", "rotated")),
        "tests/engine/bench/third_party_nets.py:convolutions",
    ),
    "policy": ("keep-all", "all", "every-2", "sqrt", "keep-products"),
    "autocast": ("none", "bfloat16"),
    "step": ("forward", "none", "adamw", "sgd", OWN_ADAMW),
    "capability": ("7.5", "8.0", "8.9", "9.0", "10.0"),
    "options": (
        "",
        "expandable_segments:True",
        "max_split_size_mb:64",
        "roundup_power2_divisions:4",
        "garbage_collection_threshold:0.8",
    ),
}

N_STEPS = 12


def rows(most: int | None = None) -> list[Row]:
    """Rows in which every pair of choices of two kinds occurs; each takes as many new pairs as a few drafts find."""
    names, draw = list(CHOICES), random.Random(0)
    open_pairs = {
        (one, left, other, right)
        for one, other in combinations(names, 2)
        for left in CHOICES[one]
        for right in CHOICES[other]
    }
    chosen: list[Row] = []
    while open_pairs and (most is None or len(chosen) < most):
        one, left, other, right = draw.choice(sorted(open_pairs))
        drafts = [{name: draw.choice(CHOICES[name]) for name in names} | {one: left, other: right} for _ in range(40)]
        best = max(drafts, key=lambda draft: len(_pairs(draft) & open_pairs))
        open_pairs -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(row: Row) -> set[tuple[str, str, str, str]]:
    return {(one, row[one], other, row[other]) for one, other in combinations(CHOICES, 2)}


def card_of(row: Row) -> Card:
    n = MULTIPROCESSORS[row["capability"]]
    return replace(CARDS["h100"], capability=row["capability"], multiprocessors=n, options=row["options"], cublas="")


def spec_of(row: Row) -> RunSpec:
    """The row's step as `--card` predicts it. Raises BadInput for a model without such a policy."""
    from explorer.engine.model.describe import describe
    from explorer.plan.policy.presets import preset

    model = ModelRef(target=row["model"], size="small" if row["model"].startswith("sample_models") else None)
    is_forward, is_own = row["step"] == "forward", row["step"] == OWN_ADAMW
    return RunSpec(
        model=model,
        policy=KEEP_ALL if is_forward else preset(row["policy"], describe(model)),
        autocast=row["autocast"],  # type: ignore[arg-type]
        optimizer="none" if is_forward or is_own else row["step"],  # type: ignore[arg-type]
        forward_only=is_forward,
        n_repeats=0,
        card=card_of(row),
    )


def answer(row: Row) -> dict[str, Any]:
    """Allocated and reserved peaks of the row's last step: predicted, and counted by torch on this process's card.

    Those of all steps after the first if no step is like another.
    """
    import torch

    from explorer.engine.bench.measure import measure_without_data
    from explorer.engine.bench.step import ignore, prepare, step_without_loss
    from tests.golden.b200.loop import STEPS

    is_own = row["step"] == OWN_ADAMW
    spec, step = spec_of(row), STEPS["forward+loss+backward+AdamW"] if is_own else step_without_loss
    memory = measure_without_data(spec, step=step).card
    assert memory is not None and memory.refused is None, memory
    assert torch.cuda.memory_reserved() == 0, "the prediction, or the row before it, left memory on the card"
    trainee = prepare(replace(spec, card=None, device="cuda", holds_output=True))
    peaks = []
    with _full_masks():
        for _ in range(N_STEPS):
            torch.cuda.reset_peak_memory_stats()
            step(trainee, ignore)
            peaks.append([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
    del trainee
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    unknown = [f"{part.what} ({', '.join(part.ops)})" for part in memory.unknown]
    counted = [max(column) for column in zip(*peaks[1:])] if is_own else peaks[-1]
    return {"predicted": [memory.allocated_bytes, memory.reserved_bytes], "counted": counted, "unknown": unknown}


def _full_masks() -> Any:
    """Answers yes where a library asks whether a mask is all ones, as those of these batches are.

    A real card would read its values and say so; an imaginary one has none.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class FullMasks(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.Tensor.__bool__ and args[0].is_cuda:
                return True
            return function(*args, **(kwargs or {}))

    return FullMasks()


def answers(chosen: Sequence[Row]) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Each row with its answer. Rows of one card and setting share a process."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in chosen:
        groups.setdefault((row["capability"], row["options"]), []).append(row)
    for group in groups.values():
        command = ["-m", "benchmarks.imaginary.steps", "--answer", json.dumps(group)]
        ran = run_on(card_of(group[0]), command, {"CUBLAS_WORKSPACE_CONFIG": ""}, capture=True)
        lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
        for row, line in zip(group, lines, strict=False):
            yield row, json.loads(line)
        for row in group[len(lines) :]:
            yield row, {"error": ran.stderr[-400:]}


def print_answers(text: str) -> None:
    for row in json.loads(text):
        try:
            print(json.dumps(answer(row)), flush=True)
        except (BadInput, ImportError) as error:
            print(json.dumps({"left out": str(error)[:200]}), flush=True)


def main(most: int, words: Sequence[str]) -> None:
    outcomes: Counter[str] = Counter()
    chosen = [row for row in rows(most or None) if not words or any(word in " ".join(row.values()) for word in words)]
    for row, result in answers(chosen):
        name = " ".join(row.values()).strip()
        if "counted" not in result:
            outcomes["left out"] += 1
            print(f"left out  {name}: {next(iter(result.values()))}", flush=True)
            continue
        off = [ours - torchs for ours, torchs in zip(result["predicted"], result["counted"])]
        word = "equal" if off == [0, 0] else "allocated equal" if off[0] == 0 else "differs"
        outcomes[word] += 1
        shares = [100 * part / whole for part, whole in zip(off, result["counted"])]
        print(f"{word:16} {name}: {off[0]:+,} ({shares[0]:+.2f} %), reserved {off[1]:+,} ({shares[1]:+.2f} %) "
              f"{'; '.join(result['unknown'])}", flush=True)  # fmt: skip
    print(dict(outcomes))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        print_answers(sys.argv[2])
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 0, sys.argv[2:])
