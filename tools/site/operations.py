"""Griffe extension: the API reference shows callers what they call.

Functions such as `kv_put` and methods such as `TransferQueueClient.put` are made of an operation, a generator that takes
a session (`kv_put = _plain(kv.kv_put)`). Nothing is imported here, so the reference is read from the source: this puts
the operation's signature and docstring in place of such an assignment, as `client/drivers.py:show_as_public` does at
run time. It also makes the names that a package imports for type checkers (`from x import y as y`) its public ones.
"""

from __future__ import annotations

import ast
from typing import Any

import griffe

SYNCHRONOUS = {"_plain", "blocking"}
ASYNCHRONOUS = {"_async", "awaitable"}


class Operations(griffe.Extension):
    """Works on the whole package once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for module in [pkg, *_modules(pkg)]:
            _export(module)
            for owner in (module, *module.classes.values()):
                if not owner.is_alias:
                    _replace(owner)


def _modules(module: griffe.Module) -> list[griffe.Module]:
    found = [one for one in module.modules.values() if not one.is_alias]
    return [*found, *(deeper for one in found for deeper in _modules(one))]


def _export(module: griffe.Module) -> None:
    """Where `__all__` is computed, what is imported for type checkers is what it has."""
    declared = module.members.get("__all__")
    if declared is not None and not module.exports:
        module.exports = [name for name, one in module.members.items() if one.is_alias and not name.startswith("_")]


def _replace(owner: griffe.Module | griffe.Class) -> None:
    for name, member in list(owner.members.items()):
        if member.is_alias or not member.is_attribute:
            continue
        call = _call(str(member.value), name, _names(owner, member))
        if call is None:
            continue
        runner, path = call
        operation = _resolved(owner, path)
        if operation is not None and operation.is_function:
            owner.set_member(name, _as_called(name, operation, owner, member, runner in ASYNCHRONOUS))


def _names(owner: griffe.Module | griffe.Class, member: griffe.Attribute) -> list[str]:
    """All names that the statement of `member` assigns to, in order."""
    statement = [
        (one.lineno or 0, one.endlineno or 0, name)
        for name, one in owner.members.items()
        if not one.is_alias and one.is_attribute and one.lineno == member.lineno
    ]
    return [name for _, _, name in statement]


def _call(value: str, name: str, names: list[str]) -> tuple[str, str] | None:
    """(runner, dotted name of the operation) of the part of an assignment that is for `name`."""
    try:
        parsed = ast.parse(value, mode="eval").body
    except SyntaxError:
        return None
    if isinstance(parsed, ast.Tuple):
        if name not in names or len(parsed.elts) != len(names):
            return None
        parsed = parsed.elts[names.index(name)]
    if not (isinstance(parsed, ast.Call) and isinstance(parsed.func, ast.Name) and len(parsed.args) == 1):
        return None
    if parsed.func.id not in SYNCHRONOUS | ASYNCHRONOUS:
        return None
    return parsed.func.id, ast.unparse(parsed.args[0])


def _resolved(owner: griffe.Module | griffe.Class, path: str) -> griffe.Function | None:
    first, _, rest = path.partition(".")
    module = owner if owner.is_module else owner.module
    try:
        found: Any = module.members[first]
        if found.is_alias:
            found = found.final_target
        for part in filter(None, rest.split(".")):
            found = found.members[part]
    except (KeyError, griffe.AliasResolutionError, griffe.CyclicAliasError):
        return None
    return found.final_target if found.is_alias else found


def _as_called(
    name: str, operation: griffe.Function, owner: griffe.Module | griffe.Class, member: griffe.Attribute, waits: bool
) -> griffe.Function:
    """The function that callers of `name` see."""
    shown = griffe.Function(
        name,
        lineno=member.lineno,
        endlineno=member.endlineno,
        parameters=griffe.Parameters(*(one for one in operation.parameters if one.name != "session")),
        returns=_result(operation.returns),
        docstring=operation.docstring,
        parent=owner,
    )
    if waits:
        shown.labels.add("async")
        operation_name = operation.name.removeprefix("_")
        shown.docstring = griffe.Docstring(f"Like `{operation_name}`, and awaits.", parent=shown)
    shown.runtime = True
    return shown


def _result(returns: Any) -> Any:
    """`T` of `Operation[T]`."""
    text = str(returns)
    if isinstance(returns, griffe.ExprSubscript) and text.startswith("Operation["):
        return returns.slice
    return returns
