"""Models of other people, in tiny configurations: each is opened, described, measured and compared by the command line.

The list is zoo.txt: kind, target, arguments. No network: random weights. A model whose package is not installed is
skipped, and said. A failure is what `explorer compare` says, on one line.

    python -m benchmarks.zoo [WORD ...]             only lines that contain one of the words
    python -m benchmarks.zoo coverage [WORD ...]    share of saved bytes inside units of preset `all`, by one forward
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from explorer.cli.options import ModelOptions
from explorer.engine.model.describe import describe
from explorer.errors import message_of
from explorer.plan.policy.presets import preset

HERE = Path(__file__).parent
SECONDS = 240


@dataclass(frozen=True, kw_only=True)
class Entry:
    kind: str
    target: str
    arguments: tuple[str, ...]

    @property
    def package(self) -> str:
        return "transformers" if self.target.startswith("hf:") else self.target.partition(":")[0].partition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    entry: Entry
    word: str
    """A verdict, `skipped` or `failed`."""
    detail: str
    """Figures of a verdict, the reason of anything else."""


def entries(words: list[str]) -> list[Entry]:
    """The lines of the list that contain one of the words; all where there are none."""
    listed = []
    for line in (HERE / "zoo.txt").read_text().splitlines():
        if line.startswith("#") or (words and not any(word in line for word in words)):
            continue
        kind, target, arguments = (part.strip() for part in line.split("|"))
        listed.append(Entry(kind=kind, target=target, arguments=tuple(arguments.split())))
    return listed


def tried(entry: Entry) -> Outcome:
    """One model through `explorer compare --policy all --quick`, in a process of its own."""
    if importlib.util.find_spec(entry.package) is None:
        return Outcome(entry=entry, word="skipped", detail=f"{entry.package} is not installed")
    options = [part for argument in entry.arguments for part in ("--set", argument)]
    command = [sys.executable, "-m", "explorer", "compare", entry.target, "--policy", "all", *options]
    command += ["--quick", "--repeats", "2", "--no-store", "--json"]
    began = time.monotonic()
    try:
        ran = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Outcome(entry=entry, word="failed", detail=f"not done after {SECONDS} s")
    seconds = time.monotonic() - began
    try:
        document = json.loads(ran.stdout)
    except ValueError:
        return Outcome(entry=entry, word="failed", detail=_last(ran.stderr))
    if document.get("verdict") in (None, "not comparable"):
        return Outcome(entry=entry, word="failed", detail=_reason(document) or _last(ran.stderr))
    peaks = [document[run]["step_peak_bytes"] / 2**20 for run in ("baseline", "candidate")]
    figures = f"{peaks[0]:.1f} -> {peaks[1]:.1f} MiB, {len(document['candidate']['spec']['policy']['units'])} units"
    return Outcome(entry=entry, word=document["verdict"], detail=f"{figures}, {seconds:.0f} s")


def _reason(document: dict[str, object]) -> str:
    failure = document.get("failure") or {}
    sentences = [str(failure.get(part) or "") for part in ("sentence", "hint")] if isinstance(failure, dict) else []
    return " ".join(sentences).strip() or str(document.get("not_reproducible_because") or "")


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[-3:]) or "no word"


def coverage(words: list[str]) -> None:
    """Prints by model the share of saved bytes that were made inside units of preset `all`. The loss is not included.

    Bytes of a block are those that it makes itself and blocks inside it make, so units that do not overlap add up.
    """
    warnings.simplefilter("ignore")
    shares = []
    for entry in entries(words):
        try:
            graph = describe(ModelOptions(arguments=list(entry.arguments)).ref(entry.target))
            inside = sum(graph.by_fqn[fqn].saved_bytes for fqn in preset("all", graph).blocks)
        except Exception as error:  # a model of other people may fail in any way
            print(f"left out  {entry.target}: {message_of(error)[:200]}", flush=True)
            continue
        shares.append(inside / graph.by_fqn[""].saved_bytes)
        print(f"{shares[-1]:8.1%}  {entry.target}", flush=True)
    if shares:
        print(f"{len(shares)} models: {min(shares):.1%} to {max(shares):.1%}, median {statistics.median(shares):.1%}")


def main(words: list[str]) -> None:
    if words[:1] == ["coverage"]:
        coverage(words[1:])
        return
    outcomes = []
    for entry in entries(words):
        outcomes.append(tried(entry))
        print(f"{outcomes[-1].word:15} {entry.kind:20} {entry.target:50} {outcomes[-1].detail}", flush=True)
    for word, n in Counter(outcome.word for outcome in outcomes).most_common():
        print(f"{n:4} {word}")


if __name__ == "__main__":
    main(sys.argv[1:])
