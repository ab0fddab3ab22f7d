"""From a model reference to a model with a batch and a loss. Loading runs the referenced code without a sandbox.

    sample_models/gpt.py          a file; its factory is `build`, sizes come from its SIZES
    path/to/file.py:factory       a file and a factory in it
    package.module:factory        an installed module: a function, a class or a model in the module
    timm:vit_base_patch16_224     a name that the package's own `create_model` knows
    hf:GPT2Config, hf:config.json a transformers configuration: random weights, offline

A factory returns the model (a batch is made to fit), (model, inputs), (model, (inputs, targets), loss_function), or
another form of returned.py. A tensor of inputs is passed as it is, a tuple or list as positional arguments, a dict as
keyword arguments. A dict may hold the positional arguments under "*": {"*": (x, y), "mask": mask}.
`loss_function(output, targets)` is a mean over the batch. The default loss is `output.loss`, the sum of a dict of
losses, or else the mean of squares of all floating outputs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from explorer.engine.device.memory_limit import process_memory_limit
from explorer.engine.device.without_data import explain_data_dependence
from explorer.engine.model.example_batch import SHAPE_ARGUMENTS, BatchShape
from explorer.engine.model.loaded import Loaded
from explorer.engine.model.openable import refuse_unopenable
from explorer.engine.model.returned import unpacked
from explorer.engine.model.weights import load_weights
from explorer.engine.state.rng import seed_everything
from explorer.errors import ExplorerError, ModelNotLoaded, nearest, said_by
from explorer.plan.catalogue import default_size
from explorer.plan.names import listed
from explorer.record.failure import is_out_of_memory
from explorer.record.graph import ModelRef
from explorer.record.run import RunSpec

PROJECT = Path(__file__).resolve().parents[3]

Factory = Callable[..., Any]
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _meant(value: int | float | str | bool) -> Any:
    """The value of an argument: a reference has no None and no lists (`weights=null`, `widths=[32,64]`)."""
    if value == "null":
        return None
    if isinstance(value, str) and value.startswith("["):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def load_for(spec: RunSpec) -> Loaded:
    """The model of a run. On the CPU the run's memory limit also applies to the factory."""
    return load(spec.model, seed=spec.seed, limit_bytes=spec.memory_limit_bytes if spec.device == "cpu" else None)


def load(ref: ModelRef, *, seed: int = 0, limit_bytes: int | None = None) -> Loaded:
    """Builds the model of `ref` with every generator seeded first.

    Raises ModelNotLoaded: no such file, module, factory or size; an import or a factory that raised or switched
    gradients off. Raises OutOfMemory if the factory takes more than `limit_bytes`.
    """
    grad = torch.is_grad_enabled()
    factory, arguments = resolve(ref)
    shape, arguments = _batch_shape(factory, arguments)
    seed_everything(seed)
    try:
        with process_memory_limit(limit_bytes), explain_data_dependence(ref.target):
            built = factory(**{name: _meant(value) for name, value in arguments.items()})
    except ExplorerError:
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise ModelNotLoaded(
            f"The factory of {ref.target} was called with ({given}) and raised {said_by(error)}.",
            hint="Try it in Python with the same arguments.",
        ) from error
    if grad and not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        raise ModelNotLoaded(
            f"{ref.target} switched gradients off and left them off: nothing of it could be trained.",
            hint="Use `with torch.no_grad():` around the part that needs none, instead of torch.set_grad_enabled.",
        )
    if isinstance(built, nn.Module):
        refuse_unopenable(built, ref.target)
    loaded = unpacked(ref, built, shape)
    refuse_unopenable(loaded.model, ref.target)
    if ref.weights:
        load_weights(loaded.model, ref.weights, ref.target)
    return loaded


def _batch_shape(factory: Factory, arguments: dict[str, Any]) -> tuple[BatchShape, dict[str, Any]]:
    """The batch's shape, from arguments that the factory does not take, and the factory's arguments."""
    taken = _parameters(factory)
    own = {name: int(value) for name, value in arguments.items() if name in SHAPE_ARGUMENTS and name not in taken}
    left = {name: value for name, value in arguments.items() if name not in own}
    return BatchShape(**{**SHAPE_ARGUMENTS, **own}), left


def resolve(ref: ModelRef) -> tuple[Factory, dict[str, Any]]:
    """The factory of `ref` and the arguments to call it with. Raises ModelNotLoaded."""
    if ref.target.startswith("hf:"):
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
    factory = _factory(getattr(module, name, None), module, name)
    if factory is None:
        listing = getattr(module, "list_models", None)
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        functions = [*listing(), *functions] if callable(listing) else functions
        raise ModelNotLoaded(
            f"{where} has no factory {name!r}.", hint=nearest(name, functions) or _list(functions[:20])
        )
    _refuse_strangers(ref, factory)
    arguments = _arguments(ref, getattr(module, "SIZES", None))
    _refuse_missing(ref, factory, arguments)
    return factory, arguments


def _factory(member: Any, module: Any, name: str) -> Factory | None:
    """A factory from `member`: a callable itself, copies of a model, or else `create_model` with the name."""
    if isinstance(member, nn.Module):
        return functools.partial(copy.deepcopy, member)
    if callable(member):
        return _from_config(member) if _is_configured(member) else member
    create, known = getattr(module, "create_model", None), getattr(module, "list_models", None)
    if member is None and callable(create) and callable(known) and name in known():
        return functools.partial(create, name)
    return None


def _is_configured(member: Any) -> bool:
    """Whether `member` is a module class with `from_config`, like the models of diffusers."""
    return isinstance(member, type) and issubclass(member, nn.Module) and hasattr(member, "from_config")


def _from_config(kind: Any) -> Factory:
    """A factory for a class: `config=path/to/config.json` builds from the file, else the arguments are passed."""

    def build(*, config: str | None = None, **arguments: Any) -> nn.Module:
        if config is None:
            model: nn.Module = kind(**arguments)
            return model
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            read = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ModelNotLoaded(f"{config} cannot be read as a configuration: {said_by(error)}.") from error
        configured: nn.Module = kind.from_config({**read, **arguments})
        return configured

    return build


def _parameters(factory: Factory) -> Mapping[str, inspect.Parameter]:
    """Parameters of the factory; empty if its signature is unknown."""
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return {}


def _refuse_missing(ref: ModelRef, factory: Factory, arguments: Mapping[str, Any]) -> None:
    """Raises ModelNotLoaded for arguments without a default and without a value."""
    given = {"self", *arguments}
    missing = [
        one.name
        for one in _parameters(factory).values()
        if one.default is one.empty and one.kind not in _ANY and one.name not in given
    ]
    if missing:
        raise ModelNotLoaded(
            f"{ref.target} needs {listed(missing)}, which {'has' if len(missing) == 1 else 'have'} no default.",
            hint=f"Give {'it' if len(missing) == 1 else 'them'}: {' '.join(f'--set {name}=...' for name in missing)}; "
            "what is no number or word needs a factory of your own.",
        )


def _refuse_strangers(ref: ModelRef, factory: Factory) -> None:
    """Raises ModelNotLoaded for arguments that are missing in the factory's signature."""
    parameters = _parameters(factory)
    if not parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    if strangers := [name for name in ref.arguments if name not in parameters and name not in SHAPE_ARGUMENTS]:
        raise ModelNotLoaded(
            f"{ref.target} has no argument {', '.join(map(repr, strangers))}.",
            hint=nearest(strangers[0], parameters) or _taken(list(parameters)),
        )


def _arguments(ref: ModelRef, sizes: Any) -> dict[str, Any]:
    if not isinstance(sizes, dict):
        if ref.size is not None:
            raise ModelNotLoaded(
                f"{ref.target} was asked for the size {ref.size!r}; it has no SIZES.", hint="Leave the size out."
            )
        return dict(ref.arguments)
    size = ref.size or default_size(sizes)
    if size is not None and size not in sizes:
        raise ModelNotLoaded(f"{ref.target} has no size {size!r}.", hint=_list(list(sizes)))
    return {**(sizes[size] if size is not None else {}), **ref.arguments}


def _list(names: list[str]) -> str:
    return f"There are {', '.join(names)}." if names else ""


def _taken(names: list[str]) -> str:
    return f"Its factory takes {', '.join(names)}." if names else "Its factory takes no arguments."


def _from_file(where: str) -> Any:
    """The module of a file. Every call executes the file again, so that edits take effect."""
    path = next((p for p in (Path(where), PROJECT / where) if p.is_file()), None)
    if path is None:
        near = nearest(Path(where).stem, [p.stem for p in Path(where).parent.glob("*.py")]).replace("?", ".py?")
        raise ModelNotLoaded(f"There is no file {where}.", hint=near or "Give a path from here, or an absolute one.")
    path = path.resolve()
    name = f"explorer_model_{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"  # pickle finds classes by it
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelNotLoaded(f"{where} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ModelNotLoaded(
            f"{where} was imported and raised {said_by(error)}.", hint="Run the file in Python first."
        ) from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _from_package(name: str) -> Any:
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ModelNotLoaded(
            f"The module {name} was imported and raised {said_by(error)}.",
            hint="Is it installed in the environment that runs the explorer?",
        ) from error
