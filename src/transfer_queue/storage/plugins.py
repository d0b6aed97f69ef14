"""Classes that a name leads to: ours, or those that installed packages bring."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import TypeVar

from transfer_queue.errors import ConfigError

T = TypeVar("T")


def plugin(
    name: str, kind: type[T], built_in: Mapping[str, str], group: str, where: str, others: Collection[str] = ()
) -> type[T]:
    """The subclass of `kind` of that name: `module:Class` in `built_in`, else an entry point of `group`.

    The name may come from a server; what it leads to is installed here. `others`: names that are chosen elsewhere.
    Raises `ConfigError`, which says `where` the name stood, and ImportError where what it needs is not installed.
    """
    if name in built_in:
        module, _, found_name = built_in[name].partition(":")
        found = getattr(import_module(module), found_name)
    else:
        from importlib.metadata import entry_points  # its own imports take longer than all of this package's

        named = {one.name: one for one in entry_points(group=group)}
        if name not in named:
            known = ", ".join(sorted({*others, *built_in, *named}))
            raise ConfigError(f"{where}: {name!r} is not available; there are {known}")
        found = named[name].load()
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"{where}: {name!r} is no {kind.__name__}")
    return found
