"""From a model reference to a model with a batch and a loss. This runs the code it is pointed at: it is no sandbox.

    sample_models/gpt.py          a file; its factory is `build`, sizes come from its SIZES
    path/to/file.py:factory       a file and a factory in it
    package.module:factory        an installed module
    hf:GPT2Config, hf:config.json a transformers configuration: random weights, offline

A factory returns the model, or (model, inputs), or (model, (inputs, targets), loss_function). inputs: a tensor is
passed as it is, a tuple or list as positional arguments, a dict as keyword arguments; both together are a dict with
the positional ones under "*": {"*": (x, y), "mask": mask}. `loss_function(output, targets)` is a mean over the batch.
Without one the loss is `output.loss`, else the mean of squares of all floating outputs.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from explorer.engine.device.limits import is_out_of_memory, limited_process
from explorer.engine.model.loaded import Loaded, said_by
from explorer.engine.model.openable import refuse_unopenable
from explorer.engine.world.rng import seed_everything
from explorer.errors import ExplorerError, ModelNotLoaded, nearest
from explorer.record.graph import ModelRef
from explorer.record.run import RunSpec

PROJECT = Path(__file__).resolve().parents[3]

Factory = Callable[..., Any]


def load_for(spec: RunSpec) -> Loaded:
    """The model of a run. Its factory is held to the run's memory limit where that is one of the process."""
    return load(spec.model, seed=spec.seed, limit_bytes=spec.memory_limit_bytes if spec.device == "cpu" else None)


def load(ref: ModelRef, *, seed: int = 0, limit_bytes: int | None = None) -> Loaded:
    """Builds the model of `ref` with every generator seeded first.

    Raises ModelNotLoaded: no such file, module, factory or size; an import or a factory that raised or switched
    gradients off. Raises OutOfMemory where the factory takes more than `limit_bytes`.
    """
    grad = torch.is_grad_enabled()
    factory, arguments = resolve(ref)
    seed_everything(seed)
    try:
        with limited_process(limit_bytes):
            built = factory(**arguments)
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
    loaded = _unpack(ref, built)
    refuse_unopenable(loaded.model, ref.target)
    return loaded


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
    factory = getattr(module, name, None)
    if not callable(factory):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ModelNotLoaded(f"{where} has no factory {name!r}.", hint=nearest(name, functions) or _list(functions))
    _refuse_strangers(ref, factory)
    return factory, _arguments(ref, getattr(module, "SIZES", None))


def _refuse_strangers(ref: ModelRef, factory: Factory) -> None:
    """Arguments that the factory does not take, by its signature."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    if strangers := [name for name in ref.arguments if name not in parameters]:
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
    size = ref.size or ("small" if "small" in sizes else next(iter(sizes), None))
    if size is not None and size not in sizes:
        raise ModelNotLoaded(f"{ref.target} has no size {size!r}.", hint=_list(list(sizes)))
    return {**(sizes[size] if size is not None else {}), **ref.arguments}


def _list(names: list[str]) -> str:
    return f"There are {', '.join(names)}." if names else ""


def _taken(names: list[str]) -> str:
    return f"Its factory takes {', '.join(names)}." if names else "Its factory takes no arguments."


def _from_file(where: str) -> Any:
    """Executes the file anew each time, so that an edited model is the model that runs."""
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


def _unpack(ref: ModelRef, built: Any) -> Loaded:
    model, batch, loss = built, None, None
    if isinstance(built, tuple):
        model, batch, loss = (*built, None, None)[:3] if len(built) <= 3 else (None, None, None)
    if not isinstance(model, nn.Module):
        raise ModelNotLoaded(
            f"The factory of {ref.target} returned {type(built).__name__}, not a model.",
            hint="Return the model, (model, inputs) or (model, (inputs, targets), loss_function).",
        )
    if batch is None:
        raise ModelNotLoaded(
            f"The factory of {ref.target} returned a model without an example batch.",
            hint="Return (model, inputs) or (model, (inputs, targets), loss_function): a run needs inputs.",
        )
    if loss is None:
        return Loaded(ref, model, batch, None, None)
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2) or not callable(loss):
        raise ModelNotLoaded(
            f"The factory of {ref.target} returned a loss function, but its batch is not a pair (inputs, targets).",
            hint="Return (model, (inputs, targets), loss_function) with loss_function(output, targets).",
        )
    return Loaded(ref, model, batch[0], batch[1], loss)
