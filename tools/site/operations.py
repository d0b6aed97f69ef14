"""Griffe extension: the API reference shows callers what they call.

Functions such as `kv_put` and methods such as `TransferQueueClient.put` are made of an operation, a generator that
takes a session (`kv_put = _plain(kv.kv_put)`). Nothing is imported here, so the reference is read from the source: this
puts the operation's signature and docstring in place of such an assignment, as `show_as_public` of the client's drivers
does at run time.

It also makes the names that a package imports for type checkers (`from x import y as y`) its public ones, and keeps the
maps in docstrings of packages as they were drawn.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

PLAIN = {"_plain", "blocking"}
AWAITED = {"_async", "awaitable"}


class Operations(griffe.Extension):
    """Works on the whole package once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for module in [pkg, *_modules(pkg)]:
            _export(module)
            _keep_map(module)
            if isinstance(module.filepath, Path):
                tree = ast.parse(module.filepath.read_text(encoding="utf-8"))
                _replace(module, tree.body)
                for statement in tree.body:
                    if isinstance(statement, ast.ClassDef):
                        _replace(module.classes[statement.name], statement.body)


def _modules(module: griffe.Module) -> list[griffe.Module]:
    found = [one for one in module.modules.values() if not one.is_alias]
    return [*found, *(deeper for one in found for deeper in _modules(one))]


def _export(module: griffe.Module) -> None:
    """Where `__all__` is computed, what is imported for type checkers is what it has."""
    if "__all__" in module.members and not module.exports:
        module.exports = [name for name, one in module.members.items() if one.is_alias and not name.startswith("_")]


def _keep_map(module: griffe.Module) -> None:
    text = module.docstring
    if text is None or not module.is_init_module:
        return
    first, _, rest = text.value.partition("\n")
    if rest.strip():
        text.value = f"{first}\n\n```text\n{rest.strip(chr(10))}\n```"


def _replace(owner: griffe.Module | griffe.Class, body: list[ast.stmt]) -> None:
    """Put operations in the place of what is made of them."""
    for statement in body:
        for name, value in _assigned(statement):
            if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and len(value.args) == 1):
                continue
            if value.func.id in PLAIN | AWAITED:
                operation = _resolved(owner, ast.unparse(value.args[0]))
                shown = _as_called(name, operation, owner, value.func.id in AWAITED)
                shown.lineno, shown.endlineno = statement.lineno, statement.end_lineno
                owner.set_member(name, shown)
    owner.members = dict(sorted(owner.members.items(), key=lambda one: _line(one[1])))


def _line(member: Any) -> int:
    return (member.alias_lineno if member.is_alias else member.lineno) or 0


def _assigned(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Each name that the statement assigns to, with its part of the value."""
    if not isinstance(statement, ast.Assign):
        return
    for target in statement.targets:
        if isinstance(target, ast.Name):
            yield target.id, statement.value
        elif isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
            for one, value in zip(target.elts, statement.value.elts, strict=True):
                if isinstance(one, ast.Name):
                    yield one.id, value


def _resolved(owner: griffe.Module | griffe.Class, path: str) -> griffe.Function:
    first, *rest = path.split(".")
    found: Any = (owner if first in owner.members else owner.module).members[first]
    for part in rest:
        found = found.members[part]
    target = found.final_target if found.is_alias else found
    assert isinstance(target, griffe.Function), f"{path} is no function"
    return target


def _as_called(
    name: str, operation: griffe.Function, owner: griffe.Module | griffe.Class, is_awaited: bool
) -> griffe.Function:
    """The function that callers of `name` see."""
    shown = griffe.Function(
        name,
        parameters=griffe.Parameters(*(one for one in operation.parameters if one.name != "session")),
        returns=_result(operation.returns),
        docstring=operation.docstring,
        parent=owner,
    )
    if is_awaited:
        shown.labels.add("async")
        shown.docstring = griffe.Docstring(f"`{operation.name.removeprefix('_')}`, awaited.", parent=shown)
    return shown


def _result(returns: Any) -> Any:
    """`T` of `Operation[T]`."""
    if isinstance(returns, griffe.ExprSubscript) and str(returns).startswith("Operation["):
        return returns.slice
    return returns
