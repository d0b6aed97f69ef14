"""Proof with the frameworks themselves: released packages, not edited, over this package, in environments of their own.

`make test-frameworks` runs every suite (`suites.py`) and creates what they need in `.venv-frameworks`
(`environments.py`). The `test_*` files here need verl and Ray and run in the environment `verl`; `own_tests.py` runs
the tests that verl and NeMo-RL have themselves, with the plugins `coroutines.py` and `nemo_rl.py`; `differential`
compares with TransferQueue 0.1.11, by the cases in `calls` and by random programs that `executor` plays; the suites
`td-oldest` and `td-newest` are parts of `tests/` under other releases of tensordict. With `--programs DIR` it runs
other people's programs instead (`programs.py`).
"""
