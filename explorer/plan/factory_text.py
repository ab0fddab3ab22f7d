"""Arguments of a factory or of a class, with their defaults, read from the text of a file: no code runs.

catalogue.py finds the text and says which models there are; this file reads one definition.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from explorer.record.base import Record

Value = int | float | str | bool


class FactoryArguments(Record):
    """Arguments with what they usually are; words have choices."""

    usual: dict[str, Value] = {}
    choices: dict[str, tuple[str, ...]] = {}
    needed: tuple[str, ...] = ()
    """Arguments without a default."""


def arguments_of_factory(tree: ast.Module, name: str) -> FactoryArguments:
    """Arguments of the function or class `name` of a file; none where the file has no such name."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return _offered(_parameters(node), _needed(node))
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _of_class(node)
    return FactoryArguments()


def _of_class(node: ast.ClassDef) -> FactoryArguments:
    """Its `__init__`, or without one the fields of its body, as dataclasses have them."""
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            return _offered(_parameters(member), _needed(member)[1:])
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


def _needed(node: ast.FunctionDef) -> tuple[str, ...]:
    """Arguments without a default, `self` too."""
    positional = [*node.args.posonlyargs, *node.args.args]
    arguments = positional[: len(positional) - len(node.args.defaults)]
    named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    arguments += [argument for argument, default in named if default is None]
    return tuple(argument.arg for argument in arguments)


def _offered(parameters: Iterator[_Parameter], needed: tuple[str, ...] = ()) -> FactoryArguments:
    usual: dict[str, Value] = {}
    choices: dict[str, tuple[str, ...]] = {}
    for name, annotation, default in parameters:
        value, words = _literal(default), _words(annotation)
        if isinstance(value, str) and value in words:
            usual[name], choices[name] = value, words
        elif isinstance(value, (bool, int, float)):
            usual[name] = value
    return FactoryArguments(usual=usual, choices=choices, needed=needed)


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
