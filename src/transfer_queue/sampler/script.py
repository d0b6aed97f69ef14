"""Sampler classes of the script a user runs: where it lies, and how the controller's process gets them from it.

The way of multiprocessing's spawn: the file is run once more under the name `__mp_main__`, so that what stands below
`if __name__ == "__main__"` is left out.
"""

from __future__ import annotations

import os
import runpy
import sys
from types import ModuleType

from transfer_queue.errors import ConfigError

MAIN, AGAIN = "__main__", "__mp_main__"
MAIN_NAMES = (MAIN, AGAIN)  # the second one in a process that multiprocessing spawned

_running = False


def main_module(cls: type) -> tuple[str, str | None]:
    """Where another process finds a class of the main module: (module name, path of the script).

    The path is None when `python -m` runs a module, which is imported by its name.

    Raises:
        ConfigError: the main module is no file, or this process's main module is another one.
    """
    refuse_while_running()
    main = sys.modules[MAIN]
    found: object = main
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    path = getattr(main, "__file__", None)
    spec = getattr(main, "__spec__", None)
    if found is not cls or not path or not os.path.isfile(path):
        raise ConfigError(
            f"the sampler class {cls.__qualname__} is not in a file that the controller's process could run (an "
            f"interactive session, a notebook, or a class sent from another process): define it in an importable module"
        )
    if spec is not None and spec.name not in MAIN_NAMES:
        return spec.name, None
    return MAIN, os.path.abspath(path)


def run_main(path: str) -> ModuleType:
    """The module that the script at `path` makes when it is run under the name `__mp_main__`; at most once."""
    global _running
    known = sys.modules.get(AGAIN)
    if known is not None and getattr(known, "__file__", None) == path:
        return known
    module = ModuleType(AGAIN)
    _running = True
    try:
        module.__dict__.update(runpy.run_path(path, run_name=AGAIN))
    finally:
        _running = False
    sys.modules[AGAIN] = module
    return module


def refuse_while_running() -> None:
    """ConfigError when the script that is run again would start a service of its own: it would run for ever."""
    if _running:
        raise ConfigError(
            "the script starts a service while the controller's process reads its sampler class: put what the script "
            'does under `if __name__ == "__main__":`'
        )
