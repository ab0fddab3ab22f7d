"""Models that can be opened, and the arguments that each takes, read from source text: torch stays out, no model runs.

    def build(*, width=64, norm: Literal["layer", "batch"] = "layer")     a file of a user, or a class in it
    class LlamaConfig: vocab_size: int = 32000                            a configuration of transformers
    {"hidden_size": 4096, "hidden_act": "silu"}                           a local config.json

Numbers and switches are offered, and words if the text lists their values: a word without choices may be a path.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from explorer.errors import UnreadableFile, message_of
from explorer.record.base import Record, from_msgpack
from explorer.record.graph import ModelRef
from explorer.record.measurement import Measurement
from explorer.record.plan import Front

Value = int | float | str | bool
HUGGING_FACE = {"batch": 2, "length": 64}
"""Arguments that shape the example batch of a transformers model; all others go to its configuration."""
_NOT_OFFERED = ("use_cache", "tie_word_embeddings", "is_decoder", "is_encoder_decoder", "add_cross_attention")
"""Arguments of a configuration that the explorer sets itself, or that make another kind of model of it."""


class FactoryArguments(Record):
    """Arguments with what they usually are; words have choices."""

    usual: dict[str, Value] = {}
    choices: dict[str, tuple[str, ...]] = {}


def factory_arguments(target: str) -> FactoryArguments:
    """Arguments that a model takes; none where its text is not found or cannot be read: opening the model says why."""
    if target.startswith("hf:"):
        arguments = _of_configuration(target.removeprefix("hf:"))
        usual = {name: value for name, value in arguments.usual.items() if _is_offered(name)}
        return FactoryArguments(usual={**HUGGING_FACE, **usual}, choices=arguments.choices)
    where, _, name = target.partition(":")
    if not where.endswith(".py"):
        return FactoryArguments()
    tree = _tree(Path(where))
    return _of_factory(tree, name or "build") if tree is not None else FactoryArguments()


def _is_offered(name: str) -> bool:
    return name not in _NOT_OFFERED and not name.endswith("token_id") and not name.startswith("_")


def _tree(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


def _of_factory(tree: ast.Module, name: str) -> FactoryArguments:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return _offered(_parameters(node))
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _of_class(node)
    return FactoryArguments()


def _of_class(node: ast.ClassDef) -> FactoryArguments:
    """Its `__init__`, or without one the fields of its body, as dataclasses have them."""
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            return _offered(_parameters(member))
    return _offered(
        (member.target.id, member.annotation, member.value)
        for member in node.body
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name) and member.value is not None
    )


_Parameter = tuple[str, ast.expr | None, ast.expr]
"""Name, annotation, default."""


def _parameters(node: ast.FunctionDef) -> Iterator[_Parameter]:
    positional = [*node.args.posonlyargs, *node.args.args]
    defaults = node.args.defaults
    for argument, default in zip(positional[len(positional) - len(defaults) :], defaults, strict=True):
        yield argument.arg, argument.annotation, default
    for argument, keyword_default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        if keyword_default is not None:
            yield argument.arg, argument.annotation, keyword_default


def _offered(parameters: Iterator[_Parameter]) -> FactoryArguments:
    usual: dict[str, Value] = {}
    choices: dict[str, tuple[str, ...]] = {}
    for name, annotation, default in parameters:
        value, words = _literal(default), _words(annotation)
        if isinstance(value, str) and value in words:
            usual[name], choices[name] = value, words
        elif isinstance(value, (bool, int, float)):
            usual[name] = value
    return FactoryArguments(usual=usual, choices=choices)


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _words(annotation: ast.expr | None) -> tuple[str, ...]:
    """`Literal["a", "b"]`, written out or as a string."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            annotation = ast.parse(annotation.value, mode="eval").body
        except SyntaxError:
            return ()
    if not isinstance(annotation, ast.Subscript) or not ast.unparse(annotation.value).endswith("Literal"):
        return ()
    inside = annotation.slice
    words = [_literal(part) for part in (inside.elts if isinstance(inside, ast.Tuple) else [inside])]
    return tuple(word for word in words if isinstance(word, str))


def _of_configuration(config: str) -> FactoryArguments:
    path = Path(config)
    if path.suffix == ".json" or path.is_dir():
        try:
            read = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return FactoryArguments()
        numbers = {} if not isinstance(read, dict) else read
        return FactoryArguments(
            usual={name: value for name, value in numbers.items() if isinstance(value, (bool, int, float))}
        )
    return _of_library(config)


@cache
def _of_library(kind: str) -> FactoryArguments:
    """A configuration class of transformers, by the text of the file that defines it."""
    library = importlib.util.find_spec("transformers")  # a top-level package is found without being imported
    folders = library.submodule_search_locations if library is not None else None
    for folder in folders or ():
        for path in sorted(Path(folder).glob("models/*/configuration_*.py")):
            text = path.read_text(encoding="utf-8")
            if f"class {kind}(" in text:
                return _of_factory(ast.parse(text), kind)
    return FactoryArguments()


SAMPLES = Path(__file__).resolve().parents[2] / "sample_models"
"""Beside the package in a checkout; absent where only the package is installed."""


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
    return recorded if recorded.run.spec.model == model else None


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


def own_samples(targets: Iterable[str]) -> tuple[Sample, ...]:
    """Models given by reference, each under a name that no other has; a file's SIZES are its sizes."""
    unique = tuple(dict.fromkeys(targets))
    short = {target: _short(target) for target in unique}
    return tuple(
        Sample(
            name=target,
            target=target,
            title=short[target] if list(short.values()).count(short[target]) == 1 else target.replace(":", ", "),
            lesson="Given on the command line.",
            sizes=sizes_of(target),
            arguments=factory_arguments(target),
        )
        for target in unique
    )


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
    path = Path(target.partition(":")[0])
    if path.suffix != ".py":
        return {}
    try:
        return _sizes(ast.parse(path.read_text(encoding="utf-8")), path)
    except (OSError, SyntaxError, ValueError, UnreadableFile):
        return {}


def _sizes(tree: ast.Module, path: Path) -> dict[str, dict[str, Value]]:
    try:
        return dict(literals(tree, ("SIZES",)).get("SIZES", {}))
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
