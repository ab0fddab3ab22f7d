"""Models that can be opened, read from source text: torch stays out, no code of theirs runs.

    def build(*, width=64, norm: Literal["layer", "batch"] = "layer")     a file of a user, or a class in it
    class LlamaConfig: vocab_size: int = 32000                            a configuration of transformers
    {"hidden_size": 4096, "hidden_act": "silu"}                           a local config.json

Of a model's arguments numbers and switches are offered, and words if the text lists their values: a word without
choices may be a path.
"""

from __future__ import annotations

import ast
import importlib.util
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard

from msgspec.structs import replace

from explorer.errors import UnreadableFile, message_of
from explorer.plan.factory_text import FactoryArguments, Value, arguments_of_factory
from explorer.record.base import Record, from_msgpack
from explorer.record.bounded_file import read_configuration, read_text
from explorer.record.graph import ModelRef
from explorer.record.measurement import Measurement
from explorer.record.plan import Front
from explorer.record.run import RunSpec

LARGEST_SOURCE = 8 * 1024**2
"""Bytes of a Python file that is read as text."""
HUGGING_FACE = {"batch": 2, "length": 64}
"""Arguments that shape the example batch of a transformers model; all others go to its configuration."""
BATCH = {**HUGGING_FACE, "side": 0}
"""Arguments that shape the batch that is made for any other model; side 0: that of the model's settings, or found."""
_NOT_OFFERED = ("use_cache", "tie_word_embeddings", "is_decoder", "is_encoder_decoder", "add_cross_attention")
"""Arguments of a configuration that the explorer sets itself, or that make another kind of model of it."""


def factory_arguments(target: str) -> FactoryArguments:
    """Arguments that a model takes; none where its text is not found or cannot be read: opening the model says why."""
    if target.startswith("hf:"):
        arguments = _of_configuration(target.removeprefix("hf:"))
        usual = {
            name: value
            for name, value in arguments.usual.items()
            if name not in _NOT_OFFERED and not name.endswith("token_id") and not name.startswith("_")
        }
        return FactoryArguments(usual={**HUGGING_FACE, **usual}, choices=arguments.choices)
    tree = _tree(target)
    return FactoryArguments() if tree is None else arguments_of_factory(tree, target.partition(":")[2] or "build")


def _tree(target: str) -> ast.Module | None:
    """The text of the Python file behind a reference; None: it cannot be read, of which opening the model says why."""
    path = source_path(target)
    if path.suffix != ".py":
        return None
    try:
        return ast.parse(read_text(path, LARGEST_SOURCE))
    except (UnreadableFile, SyntaxError, ValueError, RecursionError, MemoryError):  # MemoryError: nested too deep
        return None


def _of_configuration(config: str) -> FactoryArguments:
    path = Path(config)
    if path.suffix != ".json" and not path.is_dir():
        return _of_library(config)
    try:
        values = read_configuration(path / "config.json" if path.is_dir() else path)
    except UnreadableFile:
        return FactoryArguments()
    usual: dict[str, Value] = {name: value for name, value in values.items() if isinstance(value, (bool, int, float))}
    return FactoryArguments(usual=usual)


@cache
def _of_library(kind: str) -> FactoryArguments:
    """A configuration class of transformers, by the text of the file that defines it."""
    library = importlib.util.find_spec("transformers")  # a top-level package is found without being imported
    folders = library.submodule_search_locations if library is not None else None
    for folder in folders or ():
        for path in sorted(Path(folder).glob("models/*/configuration_*.py")):
            text = path.read_text(encoding="utf-8")
            if f"class {kind}(" in text:
                return arguments_of_factory(ast.parse(text), kind)
    return FactoryArguments()


def beside_or_inside(name: str, folder: str = "") -> Path:
    """A file or a folder that stands beside the package in a checkout, and inside the package in a wheel."""
    inside = Path(__file__).resolve().parents[1] / folder / name
    return inside if inside.exists() else Path(__file__).resolve().parents[2] / name


SAMPLES = beside_or_inside("sample_models")


def source_path(target: str) -> Path:
    """The Python file of a reference. `sample_models/gpt.py` is found from any folder."""
    path = Path(target.partition(":")[0])
    is_sample = path.parent.name == SAMPLES.name and not path.is_absolute() and not path.exists()
    return SAMPLES / path.name if is_sample else path


def is_younger(created: float, target: str) -> bool:
    """Whether a run of that date was made with the file of the model as it is now."""
    path = source_path(target)
    return not path.is_file() or path.stat().st_mtime <= created


class Sample(Record):
    """A sample model that can be loaded."""

    name: str
    target: str
    """Model reference: `sample_models/gpt.py`."""
    title: str
    """First line of the file's docstring."""
    lesson: str
    """The rest of it: what the model teaches, in Markdown."""
    sizes: dict[str, dict[str, Value]]
    """Arguments of the factory by size name."""
    arguments: FactoryArguments = FactoryArguments()
    """What can be changed besides, as it usually is."""

    def usual(self, size: str | None) -> dict[str, Value]:
        """The arguments of a size (None: the default size) over the usual ones."""
        return {**self.arguments.usual, **self.sizes.get(size or default_size(self.sizes) or "", {})}


def catalogue(folder: Path = SAMPLES) -> tuple[Sample, ...]:
    """Every sample in `folder`, by name. Raises UnreadableFile for a file that cannot be read as a sample."""
    return tuple(sample(path) for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_"))


class RecordedSample(Record):
    """The step of a sample model in its first size with everything kept, measured when the file was made."""

    run: Measurement
    """With the graph of the model."""
    front: Front
    """The plans found for the run."""


def recorded_sample(model: ModelRef) -> RecordedSample | None:
    """The run bundled with a sample model; None for other models. `python -m tests.golden.make samples` makes them."""
    try:
        packed = (SAMPLES / "recorded" / f"{Path(model.target).stem}.run").read_bytes()
        recorded = from_msgpack(zlib.decompress(packed), RecordedSample)
    except (OSError, ValueError, zlib.error, UnreadableFile):
        return None
    if recorded.run.spec.model != model:
        return None
    # How often blocks are probed and steps are timed may have changed since.
    usual = RunSpec(model=model)
    spec = replace(recorded.run.spec, n_probes=usual.n_probes, n_repeats=usual.n_repeats)
    return replace(recorded, run=replace(recorded.run, spec=spec))


def sample(path: Path) -> Sample:
    """The entry of a sample file. Raises UnreadableFile."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise UnreadableFile(f"{path} cannot be read as a sample model: {message_of(error)}.") from error
    title, _, lesson = (ast.get_docstring(tree) or path.stem).partition("\n")
    return Sample(
        name=path.stem,
        target=f"{path.parent.name}/{path.name}",
        title=title.strip().rstrip("."),
        lesson=lesson.strip(),
        sizes=_sizes(tree, path),
    )


def own_samples(targets: Iterable[str], lesson: str = "Given on the command line.") -> tuple[Sample, ...]:
    """Models given by reference, each under a name that no other has; a file's SIZES are its sizes."""
    short = {target: _short(target) for target in targets}
    titles = Counter(short.values())
    samples = []
    for target, title in short.items():
        if titles[title] > 1:
            title = target.replace(":", ", ")
        sizes, arguments = sizes_of(target), _with_batch(target, factory_arguments(target))
        samples.append(Sample(name=target, target=target, title=title, lesson=lesson, sizes=sizes, arguments=arguments))
    return tuple(samples)


def _with_batch(target: str, arguments: FactoryArguments) -> FactoryArguments:
    """`arguments` after those that shape a batch, which count where the factory makes none."""
    if target.startswith("hf:") or target.endswith(".json"):
        return arguments
    shape = {name: value for name, value in BATCH.items() if name not in arguments.needed}
    return replace(arguments, usual=shape | arguments.usual)


def is_sizes(sizes: object) -> TypeGuard[dict[str, dict[str, Any]]]:
    """Whether a module's `SIZES` is ours: arguments of a factory by the name of a size."""
    if not isinstance(sizes, dict) or not all(isinstance(arguments, dict) for arguments in sizes.values()):
        return False
    return all(isinstance(name, str) for name in chain(sizes, *sizes.values()))


def default_size(sizes: Mapping[str, object]) -> str | None:
    """The size that a model has when none is named."""
    return "small" if "small" in sizes else next(iter(sizes), None)


def _short(target: str) -> str:
    """`nets.py, build_b`; `llama/config.json`, because every local configuration is called config.json."""
    if target.startswith("hf:"):
        path = Path(target.removeprefix("hf:"))
        return "/".join(path.parts[-2:]) if path.suffix == ".json" else path.name
    where, _, factory = target.partition(":")
    return f"{Path(where).name}, {factory}" if factory else Path(where).name


def sizes_of(target: str) -> dict[str, dict[str, Value]]:
    """Arguments by size name of the file behind a reference; empty where it has no SIZES or cannot be read, of which
    opening the model says why."""
    tree = _tree(target)
    try:
        return {} if tree is None else _sizes(tree, Path(target))
    except UnreadableFile:
        return {}


def _sizes(tree: ast.Module, path: Path) -> dict[str, dict[str, Value]]:
    try:
        sizes = literals(tree, ("SIZES",)).get("SIZES", {})
        if not is_sizes(sizes):
            raise ValueError("it is no dictionary of arguments by size")
        return dict(sizes)
    except (ValueError, TypeError) as error:
        raise UnreadableFile(f"{path}: SIZES must be a literal dictionary.") from error


def literals(tree: ast.Module, names: Collection[str]) -> dict[str, Any]:
    """The values of literals of a module, assigned one by one or side by side. Raises ValueError for other values."""
    values: dict[str, object] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            target = ast.unparse(statement.targets[0] if isinstance(statement, ast.Assign) else statement.target)
            assigned = target.strip("()").split(", ")
            if not set(names).isdisjoint(assigned):
                try:
                    value = ast.literal_eval(statement.value)
                except ValueError as error:
                    raise ValueError(f"{target} is no literal") from error
                values |= {target: value} if len(assigned) == 1 else dict(zip(assigned, value))
    return values
