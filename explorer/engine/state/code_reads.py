"""What the code of modules reads: the functions that a forward can reach, and the names whose values they use.

    forward ─┬─ names of methods ─▶ methods of the modules and of the objects that they hold
             └─ names of globals ─┬─ functions, in installed packages too
                                  ├─ classes ─▶ their data and methods
                                  └─ data     ─▶ places

reachable.py collects the state of a model's author, which two runs may compare in whole. This file follows names:
state of a package counts too. A value that the code uses is told from a value that the code only writes.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import nn

from explorer.engine.state.reachable import (
    OF_TORCH,
    PLAIN,
    File,
    SharedName,
    cells,
    data_inside,
    is_opaque,
    is_own_module,
    names_in,
)
from explorer.engine.state.state_diff import Path

_MOST_FUNCTIONS = 2000
_MUTATORS = frozenset(str.split("append extend add update insert appendleft clear discard remove"))
"""Methods that change a container. As a statement, such a call uses no value of the container."""
_GUARDS = frozenset({"is_recomputing", "_current_graph_task_id", "recompute_fn", "unpack_hook"})
"""Names by which code finds out that it runs inside a recompute: of this package, of torch, and on the stack."""
_OF_PROCESS = ("torch", "numpy", __name__.partition(".")[0])


class CodeReads:
    """Functions that the forwards of `modules` and of their children may call, found by name, and the data they name.

    A name may belong to several classes: all of them count. Code of torch, numpy and the standard library is left out.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.places: dict[tuple[int, str], SharedName] = {}
        """Data in files and on classes that the functions name."""
        self.variables: dict[ContextVar[object], None] = {}
        """Context variables that the functions name."""
        self.guards_itself = False
        """Whether the code asks if it runs again: what it moves, it then moves once, and a recompute may read that."""
        self._functions: dict[types.FunctionType, None] = {}
        self._names: set[str] = {"forward", "__call__"}
        self._classes: dict[type, None] = {}
        self._waiting: list[types.FunctionType] = []
        for module in dict.fromkeys(child for root in modules for child in root.modules()):
            self._add_object(module)
            values = [value for name, value in vars(module).items() if name not in OF_TORCH]
            hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
            values += [hook for hook in hooks if not _only_observes(hook)]
            for value in (*data_inside(values), vars(module).get("forward")):
                self._add(value)
        self._follow()

    def _add(self, value: object) -> None:
        """Adds a function with what it holds, or the class of any other object."""
        if isinstance(value, functools.partial):
            for part in (value.func, *value.args):
                self._add(part)
            return
        if isinstance(value, ContextVar):
            self.variables[value] = None
            return
        function = getattr(value, "__func__", None) if _is_method(value) else value
        if isinstance(function, types.FunctionType):
            self._add_function(function)
        elif not isinstance(value, (nn.Module, type, types.ModuleType, *PLAIN)):
            self._add_object(value)

    def _add_function(self, function: types.FunctionType) -> None:
        is_new = function not in self._functions and len(self._functions) < _MOST_FUNCTIONS
        if is_new and is_followed(function.__module__ or ""):
            self._functions[function] = None
            self._waiting.append(function)

    def _add_object(self, value: object) -> None:
        for base in type(value).__mro__:
            self._add_class(base)

    def _add_class(self, kind: type) -> None:
        if kind in self._classes or not is_followed(kind.__module__):
            return
        self._classes[kind] = None
        self._add_members(kind, self._names)

    def _add_members(self, kind: type, names: Iterable[str]) -> None:
        """Methods and data of a class under `names`."""
        members = vars(kind)
        for name in names:
            if name not in members:
                continue
            value = members[name]
            getters = (value.fget, value.fset) if isinstance(value, property) else (value,)
            for getter in getters:
                if _is_method(getter) or isinstance(getter, types.FunctionType):
                    self._add(getter)
                elif not isinstance(getter, property):
                    self._add_data(SharedName(kind, name, f"{kind.__qualname__}.{name}"))

    def _follow(self) -> None:
        while self._waiting:
            function = self._waiting.pop()
            for _, content in cells(function):
                for value in data_inside([content]):
                    self._add(value)
            names = set(names_in(function.__code__))
            self.guards_itself |= not _GUARDS.isdisjoint(names | set(_text_in(function.__code__)))
            for file, name in _globals_of(function, names):
                self._add_global(file, name)
            names -= self._names
            self._names |= names
            for kind in list(self._classes):
                self._add_members(kind, names)

    def _add_global(self, file: File, name: str) -> None:
        value = file[name]
        if isinstance(value, type):
            for base in value.__mro__:
                self._add_class(base)
        elif isinstance(value, types.FunctionType) or _is_method(value):
            self._add(value)
        elif not isinstance(value, types.ModuleType):
            self._add_data(SharedName(file, name, name))

    def _add_data(self, place: SharedName) -> None:
        value = place.value
        if place.name.startswith("__") or hasattr(type(value), "__get__"):
            return
        if not is_opaque(value):
            self.places[id(place.owner), place.name] = place
        for part in data_inside([value]):
            self._add(part)

    @functools.cached_property
    def uses(self) -> Uses:
        """How the functions use names. Their source is read here, so only if anything differs."""
        uses = Uses()
        for function in self._functions:
            uses.add(function)
        return uses


def _is_method(value: object) -> bool:
    return isinstance(value, (types.MethodType, staticmethod, classmethod))


def _only_observes(hook: object) -> bool:
    """Whether a hook never returns a value: what the hook reads then changes nothing that the block computes."""
    code = getattr(hook, "__code__", None)
    if not isinstance(code, types.CodeType):
        return False
    last = None
    for instruction in dis.get_instructions(code):
        name, before, last = instruction.opname, last, instruction
        is_none = before is not None and before.opname == "LOAD_CONST" and before.argval is None
        if name == "RETURN_CONST" and instruction.argval is not None or name == "RETURN_VALUE" and not is_none:
            return False
    return True


def is_followed(module: str) -> bool:
    """Whether code of this module may hold state of a model."""
    return is_own_module(module) and module.partition(".")[0] not in _OF_PROCESS


def _globals_of(function: types.FunctionType, names: set[str]) -> Iterator[tuple[File, str]]:
    """Each name with the namespace that defines it: the function's file, or a module that the function names."""
    file = function.__globals__
    files = {id(file): file}
    modules = [file.get(name, sys.modules.get(name)) for name in names]
    for module in (*modules, *(content for _, content in cells(function))):
        if isinstance(module, types.ModuleType) and is_followed(module.__name__):
            files[id(vars(module))] = vars(module)
    for owner in files.values():
        yield from ((owner, name) for name in names if name in owner)


def _text_in(code: types.CodeType) -> Iterator[str]:
    """Text that the code holds, in tuples too."""
    for constant in code.co_consts:
        yield from (
            part for part in (constant if isinstance(constant, tuple) else (constant,)) if isinstance(part, str)
        )


@dataclass
class Uses:
    """How some functions use names: of attributes, of variables, and of keys that are written as text."""

    loaded: set[str] = field(default_factory=set)
    """Names whose values are loaded, if only to reach something inside."""
    passed: set[str] = field(default_factory=set)
    """Names that only lead to a value which is written: `losses` of `losses[i] += x`."""
    whole: set[str] = field(default_factory=set)
    """Names whose values are used as a whole: calculated with, compared, handed on, iterated."""
    replaced: set[str] = field(default_factory=set)
    """Names to which a function assigns a new value wherever it runs."""
    assigned: set[str] = field(default_factory=set)
    """Names to which a function may assign a new value."""
    _aliases: dict[str, set[str]] = field(default_factory=dict)
    is_complete: bool = True
    """False if a function has no source: all names then count as used."""

    def add(self, function: types.FunctionType) -> None:
        try:
            source = textwrap.dedent(inspect.getsource(function))
            tree = ast.parse(source)
        except (OSError, TypeError, SyntaxError):  # typed at a prompt, generated, or a lambda inside a statement
            self.is_complete = False
            return
        _Reader(self).visit_all(tree)

    def reads(self, path: Path, *, moved_by_block: bool) -> bool:
        """Whether the code may use the value at `path` before it assigns it.

        `moved_by_block`: the block's own call changed the value.
        """
        names = [name for name in path if isinstance(name, str)]
        if not names or names[-1] in self.replaced:
            return False
        if moved_by_block and names[-1] in self.assigned:
            return False
        if not self.is_complete:
            return True
        for name in names[:-1]:
            if name not in self.loaded | self.passed:
                return False
            if self._is_whole(name, set()):
                return True
        return names[-1] in self.loaded

    def _is_whole(self, name: str, visited: set[str]) -> bool:
        visited.add(name)
        aliases = self._aliases.get(name, set()) - visited
        return name in self.whole or any(self._is_whole(alias, visited) for alias in aliases)

    def alias(self, name: str, variable: str) -> None:
        self._aliases.setdefault(name, set()).add(variable)


class _Reader:
    """Reads one syntax tree into `Uses`."""

    def __init__(self, uses: Uses) -> None:
        self._uses = uses
        self._parents: dict[ast.AST, ast.AST] = {}
        self._outer: set[str] = set()
        """Variables of the file, or of the function around, to which the function may assign."""

    def visit_all(self, tree: ast.AST) -> None:
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                self._parents[child] = node
            if isinstance(node, (ast.Global, ast.Nonlocal)):
                self._outer.update(node.names)
        for node in ast.walk(tree):
            name = _name_of(node)
            if name is None:
                self._visit_call(node)
            elif isinstance(getattr(node, "ctx", None), ast.Load):
                self._visit_load(node, name)
            else:
                self._visit_store(node, name)

    def _visit_call(self, node: ast.AST) -> None:
        """Text among the arguments of a call may name an attribute or a key: `getattr(self, "step")`."""
        if isinstance(node, ast.Call):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    self._uses.loaded.add(argument.value)
                    self._uses.whole.add(argument.value)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and (name := _name_of(node.value)):
            self._uses.loaded.add(name)  # an index that is no text: any part of the value
            self._uses.whole.add(name)

    def _visit_load(self, node: ast.AST, name: str) -> None:
        parent = self._parents[node]
        if self._is_own_update(node):
            return
        if isinstance(parent, ast.Attribute):
            self._visit_inside(node, parent, name)
            return
        is_container = isinstance(parent, ast.Subscript) and parent.value is node
        if is_container and not isinstance(getattr(parent, "ctx", None), ast.Load):
            self._uses.passed.add(name)
            return
        self._uses.loaded.add(name)
        if is_container:
            return  # the key, or `_visit_call`, says what is used
        if isinstance(parent, ast.Call) and parent.func is node:
            return
        if isinstance(parent, ast.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Name):
            self._uses.alias(name, parent.targets[0].id)
            return
        self._uses.whole.add(name)

    def _visit_inside(self, node: ast.AST, attribute: ast.Attribute, name: str) -> None:
        """`x.attribute`: a part of x, or a method of x."""
        call = self._parents[attribute]
        is_call = isinstance(call, ast.Call) and call.func is attribute
        if is_call and self._only_changes(attribute):
            return
        self._uses.loaded.add(name)
        if is_call and any(hasattr(kind, attribute.attr) for kind in (dict, list, set)):
            keys = [part for part in call.args[:1] if isinstance(part, ast.Constant)]  # type: ignore[attr-defined]
            if attribute.attr != "get" or not keys:
                self._uses.whole.add(name)

    def _only_changes(self, attribute: ast.AST) -> bool:
        """Whether a statement calls methods that change a value and uses no result: `self.mean.mul_(0.9).add_(x)`."""
        while isinstance(attribute, ast.Attribute):
            if attribute.attr not in _MUTATORS and not attribute.attr.endswith("_"):
                return False
            call = self._parents[attribute]
            if not isinstance(call, ast.Call) or call.func is not attribute:
                return False
            attribute = self._parents[call]
        return isinstance(attribute, ast.Expr)

    def _visit_store(self, node: ast.AST, name: str) -> None:
        parent = self._parents[node]
        if isinstance(node, ast.Name) and name not in self._outer:
            return
        if isinstance(parent, ast.Assign) and not self._updates(parent, node):
            self._uses.assigned.add(name)
            above = self._parents[parent]
            while isinstance(above, (ast.With, ast.Try)):
                above = self._parents[above]
            if isinstance(above, (ast.FunctionDef, ast.Module)):
                self._uses.replaced.add(name)

    def _is_own_update(self, node: ast.AST) -> bool:
        """Whether the value only goes back to where it came from: `self.n = self.n + 1`."""
        above = self._parents[node]
        while not isinstance(above, (ast.stmt, ast.Lambda)):
            above = self._parents[above]
        text = ast.unparse(node)
        return isinstance(above, ast.Assign) and any(ast.unparse(target) == text for target in above.targets)

    def _updates(self, assignment: ast.Assign, target: ast.AST) -> bool:
        text = ast.unparse(target)
        return any(_name_of(part) and ast.unparse(part) == text for part in ast.walk(assignment.value))


def _name_of(node: ast.AST) -> str | None:
    """The name of a variable, an attribute, or a key that is written as text."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return node.slice.value
    return None
