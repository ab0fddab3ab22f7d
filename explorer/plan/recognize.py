"""What a file is, by its name and its text: no code of the file runs, and torch is not imported.

    train.py                 trains when it is run: a script
    net.py                   a factory, else its outermost module class: a model
    config.json, hf:NAME     a configuration of transformers: a model
    step2.explorer           a run of ours; also a name whose ranks wrote files beside it
    snapshot.pickle          a history of torch's allocator or profiler
    policy.yaml, step.lock   files of ours

catalogue.py reads the arguments of a model that is known; here it is not known yet what a file is.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from explorer.errors import BadInput, UnreadableFile, message_of, nearest
from explorer.plan.card.opened import is_history
from explorer.plan.catalogue import LARGEST_SOURCE, source_path
from explorer.plan.names import listed
from explorer.record.base import Record
from explorer.record.bounded_file import read_start, read_text
from explorer.record.files import RUN_MAGIC
from explorer.record.graph import Lora

Kind = Literal["script", "model", "run", "history", "lock", "policy"]
_TRAINING_CALLS = {"backward", "fit", "manual_backward", "backward_step", "train_step", "training_step"}
_TRAINING_NAMES = {"Trainer", "Seq2SeqTrainer", "SFTTrainer", "Accelerator", "initialize"}
_OPTIMIZERS = ("torch.optim", "optim", "optimizers", "accelerate", "deepspeed", "lightning", "pytorch_lightning")
_FACTORIES = ("build", "build_model", "make_model", "create_model", "get_model", "make", "model")
LORA_EXAMPLE = "For example --lora r=16,targets=q_proj+v_proj."
_HOW = "Give a training script, a file with a model, a config.json, hf:NAME, or a run, snapshot, policy or lock."


class Recognized(Record):
    """What a file was taken for. `target` is what the verb for this kind is given."""

    kind: Kind
    target: str
    sentence: str
    otherwise: str
    """A command that takes the file for something else; empty: it can be nothing else."""

    @property
    def first_line(self) -> str:
        """What the file was taken for, and how to say otherwise."""
        return f"{self.sentence} For another view: {self.otherwise}" if self.otherwise else self.sentence


def recognize(name: str) -> Recognized:
    """What `name` is. Raises BadInput for a file that is missing or that is nothing of ours."""
    if name.startswith("hf:"):
        return _model(name, f"{name} is taken for a configuration of transformers, with random weights.")
    path = Path(name)
    where, _, member = name.partition(":")
    if member and not path.exists():
        return _model(name, f"{name} is taken for the model {member} of {where}.")
    if path.is_dir():
        return _folder(path)
    if path.suffix == ".ipynb" and path.is_file():
        hint = f"Write its code into a script, and give that: jupyter nbconvert --to script {path}."
        raise BadInput(f"{path} is a notebook, which is not run here.", hint=hint)
    if path.suffix == ".py" and source_path(name).is_file():
        return _python(path)
    return _data(path) if path.is_file() else _missing(path)


def model_in(name: str) -> str:
    """The reference of the model in a file. Raises BadInput for a file of another kind."""
    source = recognize(name)
    if source.kind != "model":
        hint = f"checkpoint-explorer {name} answers on the terminal, and with --open as a page."
        raise BadInput(f"{source.sentence} It holds no model to open.", hint=source.otherwise or hint)
    return source.target


def _own(kind: Kind, path: Path, what: str) -> Recognized:
    """A file that can be nothing else than `what`."""
    return Recognized(kind=kind, target=str(path), sentence=f"{path} is taken for {what}.", otherwise="")


def _model(target: str, sentence: str, otherwise: str = "") -> Recognized:
    return Recognized(kind="model", target=target, sentence=sentence, otherwise=otherwise)


def _folder(path: Path) -> Recognized:
    if (path / "config.json").is_file():
        return _model(f"hf:{path}", f"{path} is taken for a folder of transformers, by its config.json.")
    candidates = sorted(file.name for file in path.glob("*.py"))
    raise BadInput(f"{path} is a folder without a config.json.", hint=f"Name a file in it: {listed(candidates)}.")


def _missing(path: Path) -> Recognized:
    beside = list(path.parent.iterdir()) if path.parent.is_dir() else []
    if ranks := [file for file in beside if file.match(f"{path.stem}.rank*{path.suffix}")]:
        return _own("run", path, f"the runs that {len(ranks)} ranks recorded")
    files = [file.name for file in beside if file.is_file()]
    raise BadInput(f"There is no file {path}.", hint=nearest(path.name, files) or _HOW)


def _python(path: Path) -> Recognized:
    try:
        tree = ast.parse(read_text(source_path(str(path)), LARGEST_SOURCE))
    except (UnreadableFile, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadInput(f"{path} cannot be read as Python: {message_of(error)}.") from error
    classes, factories = _module_classes(tree), _factories(tree)
    functions = factories or _made_models(tree)
    member = next((name for name in (*functions, *classes) if name), "")
    if (line := _training_line(tree)) is not None:
        otherwise = f"checkpoint-explorer run {path}"
        if member and all(isinstance(statement, ast.If) for statement in _run_at_start(tree)):
            otherwise = f"checkpoint-explorer {path}:{member}"
        sentence = f"{path} is taken for a training script, because its line {line} runs when it is started."
        return Recognized(kind="script", target=str(path), sentence=sentence, otherwise=otherwise)
    others = [name for name in (*functions, *classes) if name != member]
    otherwise = f"checkpoint-explorer {path}:{others[0]}" if others else f"checkpoint-explorer run {path}"
    if member in functions:
        only = "" if others else "only "
        target = str(path) if member == "build" else f"{path}:{member}"  # `build` is found without its name
        how = f"made by its {only}function {member}" if factories else f"the object {member} that it makes"
        return _model(target, f"{path} is taken for a model, {how}.", otherwise)
    if member:
        choice = f"its only class {member}"
        if others:
            choice = f"its class {member}, the last that no other class builds; besides: {listed(others)}"
        return _model(f"{path}:{member}", f"{path} is taken for a model, {choice}.", otherwise)
    if any(_run_at_start(tree)):
        return _own("script", path, "a training script: it has no model class, and runs code when it is started")
    raise BadInput(
        f"{path} has neither a training loop nor a model: no class of it has a forward, no function makes a model.",
        hint=f"Name what makes the model: checkpoint-explorer {path}:FUNCTION.",
    )


def _training_line(tree: ast.Module) -> int | None:
    """The first line that runs when the file is started, if the file trains a model; None: it does not."""
    first = next(_run_at_start(tree), None)
    return first.lineno if first and _trains(tree) else None


def _run_at_start(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements of the module that do more than define: loops, calls, `if __name__ == "__main__"`."""
    for statement in tree.body:
        is_guard = isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
        is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
        if is_guard or is_call or isinstance(statement, (ast.For, ast.While, ast.With)):
            yield statement


def _trains(tree: ast.Module) -> bool:
    """Whether the file calls backward or a trainer, or makes an optimizer of a library."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).split(".")
            if called[-1] in _TRAINING_CALLS or called[-1] in _TRAINING_NAMES:
                return True
            if len(called) > 1 and ".".join(called[:-1]) in _OPTIMIZERS:
                return True
    return False


def _module_classes(tree: ast.Module) -> list[str]:
    """Classes with a forward or a Module among their bases, those that no other class builds first, the last first."""
    defined = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    modules = [name for name, node in defined.items() if _is_module(node, defined)]
    built: set[str] = set()
    for name in modules:
        built |= {inner.id for inner in ast.walk(defined[name]) if isinstance(inner, ast.Name)} - {name}
    return sorted(reversed(modules), key=built.__contains__)


def _is_module(node: ast.ClassDef, defined: dict[str, ast.ClassDef]) -> bool:
    bases = [ast.unparse(base) for base in node.bases]
    if any(base.rpartition(".")[2].endswith(("Module", "PreTrainedModel", "ModelMixin")) for base in bases):
        return True
    others = {name: other for name, other in defined.items() if other is not node}
    if any(_is_module(others[base], others) for base in bases if base in others):
        return True
    methods = [member.name for member in node.body if isinstance(member, ast.FunctionDef)]
    return "forward" in methods and bool(bases)


def _factories(tree: ast.Module) -> list[str]:
    """Functions that are called as a factory usually is, the most usual name first."""
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    usual = [name for name in _FACTORIES if name in functions]
    return usual or [name for name in functions if name.startswith(("build_", "make_", "create_"))][:1]


def _made_models(tree: ast.Module) -> list[str]:
    """Names of models that the file makes, the last first: of a class of its own, else of `nn.Linear` or its like."""
    classes = _module_classes(tree)
    names = []
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
            *place, called = ast.unparse(statement.value.func).split(".")
            is_layer = place[-1:] == ["nn"] and called[:1].isupper() and not called.endswith("Loss")
            if called in classes or (is_layer and not classes):
                names += [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return names[::-1]


def _data(path: Path) -> Recognized:
    head = read_start(path, 4096)
    if head.startswith(RUN_MAGIC):
        return _own("run", path, "a run of Checkpoint Explorer")
    if path.suffix in (".yaml", ".yml"):
        return _own("policy", path, "a policy")
    if path.suffix in (".json", ".lock") and head.lstrip()[:1] == b"{" and (kind := _document(path)) is not None:
        return kind
    if is_history(head):
        return _own("history", path, "a memory snapshot or a profiler trace of torch")
    raise BadInput(f"{path} is no file that is known here.", hint=_HOW)


def _document(path: Path) -> Recognized | None:
    """A lock, a policy or a configuration of a model; None: another JSON document, a trace perhaps."""
    try:
        document = json.loads(read_text(path, LARGEST_SOURCE))
    except (UnreadableFile, ValueError, RecursionError):
        return None
    keys: Sequence[str] = list(document) if isinstance(document, dict) else []
    if "packages" in keys and "step" in keys:
        return _own("lock", path, "a lock")
    if "policy" in keys and "version" in keys:
        return _own("policy", path, "a policy")
    if {"model_type", "architectures", "hidden_size"} & set(keys):
        return _model(str(path), f"{path} is taken for a configuration of transformers, with random weights.")
    return None


def set_pairs(texts: list[str] | None) -> dict[str, str]:
    """`["p=0.3"]` as `{"p": "0.3"}`. Raises BadInput that names every text that is not NAME=VALUE."""
    pairs = [text.partition("=") for text in texts or ()]
    if wrong := ["".join(pair) for pair in pairs if not pair[1] or not pair[0]]:
        raise BadInput(f"--set takes NAME=VALUE and got {', '.join(wrong)}.", hint="For example --set n_layers=6.")
    return {name: value for name, _, value in pairs}


_LORA = re.compile(r"(?:r=(?P<rank>[1-9]\d*),)?targets=(?P<targets>[\w.+]+)")


def lora_of(text: str, quantize: str = "none") -> Lora:
    """`r=16,targets=q_proj+v_proj`: adapters beside each Linear whose fqn is, or ends with, one of the names, as in
    peft. `quantize`: `nf4` or `none`. Raises BadInput."""
    if quantize not in ("none", "nf4"):
        raise BadInput(
            f"--quantize {quantize} is not offered: frozen layers are held in four bits or as they are.",
            hint="Take --quantize nf4, or leave it out.",
        )
    match = _LORA.fullmatch(text.replace(" ", ""))
    names = list(filter(None, match["targets"].split("+"))) if match else []
    if match is None or not names:
        raise BadInput(f"--lora takes a rank and names of Linear layers and got {text!r}.", hint=LORA_EXAMPLE)
    targets = rf"(.*\.)?({'|'.join(map(re.escape, names))})"
    return Lora(targets=targets, rank=int(match["rank"] or Lora(targets="").rank), quantize=quantize)  # type: ignore[arg-type]


def argument_value(text: str) -> int | float | str | bool:
    """`6`, `0.1`, `true` and `false` by their looks, else text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
