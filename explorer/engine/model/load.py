"""From a model reference to a model with a batch and a loss. Loading runs the referenced code without a sandbox.

    sample_models/gpt.py          a file; its factory is `build`, sizes come from its SIZES
    path/to/file.py:factory       a file and a factory in it
    package.module:factory        an installed module: a function, a class or a model in the module
    timm:vit_base_patch16_224     a name that the package's own `create_model` knows
    hf:GPT2Config, hf:config.json a transformers configuration: random weights, offline

A factory returns the model (a batch is made to fit), (model, inputs), (model, (inputs, targets), loss_function), or
(model, step), see batch.py. A tensor of inputs is passed as it is, a tuple or list as positional arguments, a dict as
keyword arguments. A dict may hold the positional arguments under "*": {"*": (x, y), "mask": mask}.
`loss_function(output, targets)` is a mean over the batch. The default loss is `output.loss`, the sum of a dict of
losses, or else the mean of squares of all floating outputs.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import re
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from explorer.engine.device.memory_limit import process_memory_limit
from explorer.engine.device.without_data import explained
from explorer.engine.model.batch import SHAPE_ARGUMENTS, made_text, unpacked
from explorer.engine.model.loaded import Loaded, said_at
from explorer.engine.state.rng import seed_everything
from explorer.errors import (
    BadInput,
    ExplorerError,
    ModelNotLoaded,
    UnreadableFile,
    message_of,
    namesake,
    nearest,
    said_by,
)
from explorer.plan.catalogue import default_size, is_sizes, source_path
from explorer.plan.names import listed
from explorer.record.bounded_file import read_configuration
from explorer.record.failure import is_out_of_memory
from explorer.record.graph import ModelRef
from explorer.record.run import RunSpec

_STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts store the weights in a checkpoint."""

Factory = Callable[..., object]


def load_for(spec: RunSpec) -> Loaded:
    """The model of a run. On the CPU the run's memory limit also applies to the factory."""
    return load(spec.model, seed=spec.seed, limit_bytes=spec.memory_limit_bytes if spec.device == "cpu" else None)


def takes_argument(ref: ModelRef, name: str) -> bool:
    """Whether the factory of `ref` has a parameter `name`; every Hugging Face configuration has all settings."""
    factory, _ = _resolve(ref)
    return ref.target.startswith("hf:") or name in _parameters(factory)


def load(ref: ModelRef, *, seed: int = 0, limit_bytes: int | None = None) -> Loaded:
    """Builds the model of `ref` with every generator seeded first.

    Raises ModelNotLoaded: no such file, module, factory or size; an import or a factory that raised or switched
    gradients off. Raises OutOfMemory if the factory takes more than `limit_bytes`.
    """
    grad = torch.is_grad_enabled()
    factory, arguments = _resolve(ref)
    parameters = _parameters(factory)
    of_batch = {name: int(arguments[name]) for name in SHAPE_ARGUMENTS if name in arguments and name not in parameters}
    arguments = {name: value for name, value in arguments.items() if name not in of_batch}
    seed_everything(seed)
    try:
        with process_memory_limit(limit_bytes), explained(ref.target):
            built = factory(**{name: _value(text) for name, text in arguments.items()})
    except ExplorerError:
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        listing = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise ModelNotLoaded(
            f"The factory of {ref.target} was called with ({listing}) and raised {said_at(error, ref.target)}.",
            hint="Try it in Python with the same arguments.",
        ) from error
    if grad and not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        raise ModelNotLoaded(
            f"{ref.target} switched gradients off and left them off: nothing of it could be trained.",
            hint="Use `with torch.no_grad():` around the part that needs none, instead of torch.set_grad_enabled.",
        )
    loaded = unpacked(ref, built, of_batch)
    if is_configuration(ref.target):
        loaded = dataclasses.replace(loaded, made=made_text(loaded.model, loaded.inputs))
    elif ref.target.endswith(".py") and (name := getattr(factory, "__name__", "build")) != "build":
        loaded = dataclasses.replace(loaded, made=", ".join(filter(None, (loaded.made, f"by its only factory {name}"))))
    if ref.weights:
        _load_weights(loaded.model, ref.weights, ref.target)
    return loaded


def is_configuration(target: str) -> bool:
    """Whether `target` names a configuration of transformers."""
    return target.startswith("hf:") or target.endswith(".json")


def _value(text: int | float | str | bool) -> object:
    """The value of an argument: a reference has no None and no lists (`weights=null`, `widths=[32,64]`)."""
    if text == "null":
        return None
    if isinstance(text, str) and text.startswith("["):
        with contextlib.suppress(ValueError):
            return json.loads(text)
    return text


def _resolve(ref: ModelRef) -> tuple[Factory, dict[str, Any]]:
    """The factory of `ref` and the arguments to call it with. Raises ModelNotLoaded."""
    if is_configuration(ref.target):
        from explorer.engine.model.transformers import factory as hf_factory

        return hf_factory(ref.target.removeprefix("hf:")), dict(ref.arguments)
    if ref.is_recorded:
        raise ModelNotLoaded(
            f"{ref.target} is a step that was recorded in a script: its model is not here to run.",
            hint="Record again there; to run it here, name a factory such as path/to/file.py:factory.",
        )
    where, _, name = ref.target.partition(":")
    if where.endswith(".py"):
        module, name = _from_file(where), name or "build"
    elif name:
        module = _from_package(where)
    else:
        raise ModelNotLoaded(
            f"{ref.target!r} names no model.",
            hint="Write sample_models/gpt.py, path/to/file.py:factory, package.module:factory or hf:GPT2Config.",
        )
    factory = _factory(module, name)
    functions = _factories_in(module)
    if factory is None and ":" not in ref.target and len(functions) == 1:
        factory = _factory(module, functions[0])  # a file with a single model
    if factory is None:
        names = [*_model_names(module), *functions]
        references = [f"{where}:{each}" for each in names[:20]]
        hint = nearest(name, names) or _list(references) or "Write a function there that returns a model."
        raise ModelNotLoaded(f"{where} has no factory {name!r}.", hint=hint)
    return factory, _arguments(ref, factory, getattr(module, "SIZES", None))


def _factories_in(module: object) -> list[str]:
    """Names that the module itself defines and that may make a model; a training script's `main` does not.

    Of a module that only collects others' names, as a package does, all that can be called.
    """
    public = {name: value for name, value in vars(module).items() if callable(value) and not name.startswith("_")}
    own = [name for name, value in public.items() if getattr(value, "__module__", "") == vars(module).get("__name__")]
    models = [
        name for name in own
        if name != "main" and not dataclasses.is_dataclass(public[name]) and not _is_of_a_script(public[name])
    ]  # fmt: skip
    return models or list(public)


def _is_of_a_script(function: object) -> bool:
    """Whether a function reads the command line or trains, by the names in its code."""
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    return not {"parse_args", "parse_known_args", "ArgumentParser", "backward"}.isdisjoint(names)


def _factory(module: object, name: str) -> Factory | None:
    """The factory `name`: a callable, copies of a model, a class with a configuration, or a name for `create_model`."""
    member = getattr(module, name, None)
    if isinstance(member, nn.Module):
        return functools.partial(copy.deepcopy, member)
    if isinstance(member, type) and issubclass(member, nn.Module) and hasattr(member, "from_config"):
        return _from_config(member)
    if callable(member):
        return member  # type: ignore[no-any-return]
    create = getattr(module, "create_model", None)
    if member is None and callable(create) and name in _model_names(module):
        return functools.partial(create, name)
    return None


def _model_names(module: object) -> list[str]:
    """Names that a package's `create_model` knows, as in timm."""
    listing = getattr(module, "list_models", None)
    return list(listing()) if callable(listing) else []


def _from_config(kind: Any) -> Factory:
    """A factory for a class as of diffusers: `config=path/to/config.json` builds from the file, with the arguments."""

    def build(*, config: str | None = None, **arguments: object) -> object:
        if config is None:
            return kind(**arguments)
        path = Path(config)
        try:
            settings = read_configuration(path / "config.json" if path.is_dir() else path)
        except UnreadableFile as error:
            raise ModelNotLoaded(f"{config} cannot be read as a configuration: {message_of(error)}.") from error
        return kind.from_config({**settings, **arguments})

    return build


def _parameters(factory: Factory) -> Mapping[str, inspect.Parameter]:
    """Parameters of the factory; empty if its signature is unknown."""
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return {}


def _arguments(ref: ModelRef, factory: Factory, sizes: object) -> dict[str, object]:
    """Arguments of the size, then those of `ref`. Raises ModelNotLoaded for unknown and for missing arguments."""
    parameters = _parameters(factory)
    any_name = not parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    unknown = [] if any_name else [name for name in ref.arguments if name not in {*parameters, *SHAPE_ARGUMENTS}]
    if unknown:
        raise ModelNotLoaded(
            f"{ref.target} has no argument {', '.join(map(repr, unknown))}.",
            hint=nearest(unknown[0], parameters) or f"Its factory takes {', '.join(parameters)}.",
        )
    arguments = {**_size(ref, sizes), **ref.arguments}
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each.name for each in parameters.values() if each.default is each.empty and each.kind not in kinds]
    missing = [name for name in needed if name not in {"self", *arguments}]
    if missing:
        raise ModelNotLoaded(
            f"{ref.target} needs {listed(missing)}, which {'has' if len(missing) == 1 else 'have'} no default.",
            hint=f"Give {'it' if len(missing) == 1 else 'them'}: {' '.join(f'--set {name}=...' for name in missing)}; "
            "what is no number or word needs a factory of your own.",
        )
    return arguments


def _size(ref: ModelRef, sizes: object) -> Mapping[str, object]:
    """Arguments of the size of `ref`, or of the default size."""
    if not is_sizes(sizes):
        if ref.size is not None:
            raise ModelNotLoaded(
                f"{ref.target} was asked for the size {ref.size!r}; it has no SIZES.", hint="Leave the size out."
            )
        return {}
    size = ref.size or default_size(sizes)
    if size is not None and size not in sizes:
        raise ModelNotLoaded(f"{ref.target} has no size {size!r}.", hint=_list(list(sizes)))
    return sizes[size] if size is not None else {}


def _list(names: list[str]) -> str:
    return f"There {'is' if len(names) == 1 else 'are'} {', '.join(names)}." if names else ""


def function_of(target: str) -> Factory:
    """The function of `file.py:function` or `package.module:function`. A file that is loaded already runs only once.

    Raises ModelNotLoaded and what the file raises.
    """
    where, _, name = target.partition(":")
    path = str(Path(where).resolve())
    loaded = next((module for module in list(sys.modules.values()) if getattr(module, "__file__", None) == path), None)
    module = loaded or (_from_file(where) if where.endswith(".py") else _from_package(where))
    function = getattr(module, name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ModelNotLoaded(f"{where} has no function {name!r}.", hint=nearest(name, names) or _list(names[:20]))
    return function  # type: ignore[no-any-return]


def _from_file(where: str) -> object:
    """The module of a file. Every call executes the file again, so that edits take effect."""
    path = source_path(where)
    if not path.is_file():
        stems = {each.stem for each in path.parent.glob("*.py")}
        near = nearest(Path(where).stem, stems).replace("?", ".py?")
        raise ModelNotLoaded(f"There is no file {where}.", hint=near or "Give a path from here, or an absolute one.")
    path = path.resolve()
    source = path.read_bytes()
    package, root = _package_of(path) if re.search(rb"^\s*from \.", source, re.MULTILINE) else ("", path.parent)
    digest = hashlib.sha256(bytes(path)).hexdigest()[:8]
    name = f"{package}explorer_model_{path.stem}_{digest}"  # pickle finds classes by it
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "the path ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(root))
    try:
        exec(_compiled(source, str(path)), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ModelNotLoaded(
            f"{where} was imported and raised {said_at(error, where)}.",
            hint=namesake(root) or "Run the file in Python first.",
        ) from error
    finally:
        sys.path.remove(str(root))
    return module


def _package_of(path: Path) -> tuple[str, Path]:
    """Prefix of the names in the package of a file, `pkg.models.`, and the folder that the package lies in.

    A package is a folder with an `__init__.py`: the prefix is empty for a file beside none.
    """
    root, names = path.parent, list[str]()
    while (root / "__init__.py").is_file():
        names.insert(0, f"{root.name}.")
        root = root.parent
    return "".join(names), root


@functools.lru_cache(maxsize=16)
def _compiled(source: bytes, path: str) -> CodeType:
    """The code of a file. One comparison executes its file a dozen times."""
    return compile(source, path, "exec")


def _from_package(name: str) -> object:
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ModelNotLoaded(
            f"The module {name} was imported and raised {said_by(error)}.",
            hint="Is it installed in the environment that runs the explorer?",
        ) from error


def _load_weights(model: nn.Module, path: str, target: str) -> None:
    """Loads all weights in place. Raises BadInput for a file without weights, ModelNotLoaded for another model's."""
    weights = _state_dict(Path(path))
    parameters = model.state_dict()
    missing = [name for name in parameters if name not in weights]
    strangers = [name for name in weights if name not in parameters]
    other = [name for name in parameters if name in weights and parameters[name].shape != weights[name].shape]
    faults = [
        f"{word} {listed(names)}" for word, names in
        (("it lacks", missing), ("the model has no", strangers), ("of another shape are", other)) if names
    ]  # fmt: skip
    if faults:
        raise ModelNotLoaded(
            f"The weights in {path} are not those of {target}: {'; '.join(faults)}.",
            hint="Give the arguments with which the saved model was built, or leave the weights out.",
        )
    model.load_state_dict(weights)


def _refuse_packed_weights(path: Path) -> None:
    """torch writes a zip file without compression. One with compression may unpack to any size."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        n_bytes = sum(entry.file_size for entry in archive.infolist())
    if n_bytes > path.stat().st_size:
        raise BadInput(
            f"{path} cannot be read as weights: its {path.stat().st_size:,} bytes would unpack to {n_bytes:,}.",
            hint="Save model.state_dict() with torch.save, which packs nothing.",
        )


def _state_dict(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise BadInput(f"There is no file {path} to read weights from.", hint="Give a .safetensors or .pt file.")
    _refuse_packed_weights(path)
    try:
        if path.suffix == ".safetensors":
            content: Any = importlib.import_module("safetensors.torch").load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except ImportError as error:
        raise BadInput(f"{path} needs the library safetensors.", hint="pip install safetensors") from error
    except Exception as error:
        raise BadInput(
            f"{path} cannot be read as weights: {said_by(error)}.",
            hint="Save model.state_dict() alone: a file that would run code is never loaded.",
        ) from error
    keys = _STATE_DICT_KEYS if isinstance(content, dict) else ()
    weights = next((content[key] for key in keys if isinstance(content.get(key), dict)), content)
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise BadInput(f"{path} holds no state_dict.", hint="Save model.state_dict().")
    return weights
