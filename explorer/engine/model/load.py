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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from explorer.engine.device.limits import is_out_of_memory
from explorer.engine.model.openable import refuse_unopenable
from explorer.engine.world.rng import seed_everything
from explorer.errors import ExplorerError, ModelFailed, ModelNotLoaded, nearest
from explorer.record.graph import ModelRef

PROJECT = Path(__file__).resolve().parents[3]

POSITIONAL = "*"
"""Key of the positional arguments in a dict of inputs: no keyword argument can have this name."""

LossFunction = Callable[[Any, Any], Tensor]
Factory = Callable[..., Any]


@dataclass(frozen=True)
class Loaded:
    """A model, a batch, and how to judge the output."""

    ref: ModelRef
    model: nn.Module
    inputs: Any
    targets: Any
    loss_function: LossFunction | None

    def output(self, model: nn.Module | None = None) -> Any:
        """The output for the whole batch, of `model` where one is given."""
        return call(self.model if model is None else model, self.inputs)

    def loss(self, output: Any, targets: Any = None) -> Tensor:
        """A scalar, the mean over the batch; `targets` are those of the whole batch where none are given.

        Raises ModelFailed where the loss is not a tensor with one number.
        """
        if self.loss_function is None:
            return default_loss(output)
        loss = self.loss_function(output, self.targets if targets is None else targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = shapes(loss) if isinstance(loss, Tensor) else type(loss).__name__
            raise ModelFailed(
                f"The loss function of {self.ref.target} returned {found}, not a tensor with one number.",
                hint="Let it return the mean over the batch.",
            )
        return loss


def load(ref: ModelRef, *, seed: int = 0) -> Loaded:
    """Builds the model of `ref` with every generator seeded first.

    Raises ModelNotLoaded: no such file, module, factory or size; an import or a factory that raised.
    """
    factory, arguments = resolve(ref)
    seed_everything(seed)
    try:
        built = factory(**arguments)
    except ExplorerError:
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        said = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise ModelNotLoaded(
            f"The factory of {ref.target} was called with ({said}) and raised {said_by(error)}.",
            hint="Try it in Python with the same arguments.",
        ) from error
    loaded = _unpack(ref, built)
    refuse_unopenable(loaded.model, ref.target)
    return loaded


def call(model: nn.Module, inputs: Any) -> Any:
    """model(x), model(*xs), model(**xs), or model(*xs["*"], **rest), by the form of `inputs`."""
    if isinstance(inputs, dict):
        positional, named = inputs.get(POSITIONAL, ()), {k: v for k, v in inputs.items() if k != POSITIONAL}
        return model(*(positional if isinstance(positional, (tuple, list)) else (positional,)), **named)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def place(loaded: Loaded, device: torch.device | str, dtype: torch.dtype | None) -> Loaded:
    """Parameters, buffers and batch on `device`; floating ones as `dtype`, or as they are where that is None.

    The model itself moves, the batch is new where it changes. Complex numbers stay complex, at the precision of `dtype`
    where it has a complex partner.
    """

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(device=device, dtype=cast_type(tensor.dtype, dtype))

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or (leaf.device == torch.device(device) and dtype is None):
            return leaf
        return cast(leaf.detach()).requires_grad_(leaf.requires_grad)

    model = loaded.model.to(device)
    if dtype is not None:
        model._apply(cast)  # .to(dtype) would cut complex parameters down to their real part
    return replace(loaded, model=model, inputs=tree_map(moved, loaded.inputs), targets=tree_map(moved, loaded.targets))


def types_of(model: nn.Module) -> str:
    """`bfloat16, float32`: of the parameters that are floating or complex, the one with the most numbers first."""
    numbers: Counter[str] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            numbers[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return ", ".join(name for name, _ in numbers.most_common())


def cast_type(found: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """The type of a tensor of type `found` where `dtype` is asked for."""
    if dtype is None or not (found.is_floating_point or found.is_complex):
        return found
    return (
        {torch.float32: torch.complex64, torch.float64: torch.complex128}.get(dtype, found)
        if found.is_complex
        else dtype
    )


@contextmanager
def blaming(ref: ModelRef, inputs: Any, doing: str) -> Iterator[None]:
    """Turns what the model raises while `doing` ("forward", "backward") into ModelFailed that shows the batch."""
    try:
        yield
    except ExplorerError:
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        raise ModelFailed(
            f"The {doing} of {ref.target} raised {said_by(error)} (inputs: {shapes(inputs)}).",
            hint=_hint(inputs),
        ) from error


def _hint(inputs: Any) -> str:
    hint = "Check that the batch fits the model."
    if isinstance(inputs, dict) and POSITIONAL not in inputs:
        hint += " A dict is passed as keyword arguments; a model that takes the dict itself gets it as (dict,)."
    return hint


def said_by(error: BaseException) -> str:
    """`ValueError: the first line of its message`"""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0].removesuffix('.')}"


def shapes(inputs: Any) -> str:
    """`float32[8, 3, 32, 32], int64[8]`"""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors) or "no tensor"


def default_loss(output: Any) -> Tensor:
    """`output.loss` (or output["loss"]), else the mean of squares over every floating tensor of the output.

    Raises ModelFailed where the output holds no floating tensor that requires a gradient.
    """
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    floating = [leaf for leaf in _tensors(output) if leaf.is_floating_point()]
    if not floating:
        raise ModelFailed(
            f"The model returned {shapes(output)}: nothing to take a loss of.",
            hint="Let the factory return (model, (inputs, targets), loss_function).",
        )
    return torch.stack([tensor.float().square().mean() for tensor in floating]).mean()


def _tensors(output: Any) -> list[Tensor]:
    if hasattr(output, "to_tuple"):
        output = output.to_tuple()
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def resolve(ref: ModelRef) -> tuple[Factory, dict[str, Any]]:
    """The factory of `ref` and the arguments to call it with. Raises ModelNotLoaded."""
    if ref.target.startswith("hf:"):
        from explorer.engine.model.transformers import factory as hf_factory

        return hf_factory(ref.target.removeprefix("hf:")), dict(ref.arguments)
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
