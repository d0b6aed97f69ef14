"""`python -m sglang_tests.launch OPTIONS`: as `python -m sglang.launch_server`, with `kernels` in all of its processes:
those that SGLang starts import this module first."""

from __future__ import annotations

import runpy

from sglang_tests.kernels import stand_in

stand_in()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
