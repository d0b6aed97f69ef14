"""The same calls to TransferQueue 0.1.11 and to this package; every difference has to be one of `INTENDED`.

Where both raise, ours has to be caught by whoever catches theirs: their builtin class is among ours.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CALLS = Path(__file__).resolve().parent.parent / "calls"

# case -> why it differs; the rows of docs/compatibility.md. A case that stops differing has to go from here.
INTENDED = {
    "what_is_left_of_refused_puts": "a refused put leaves nothing behind; there it leaves its keys",
    "dtypes_that_differ": "integers beside floats are these, in jagged rows; there as the first row, in strided ones",
    "put_of_a_dict": "numbers and lists of numbers are tensors, as in a batch; there they are objects",
    "put_of_an_array": "an array is a tensor, as in a batch; there it is an object",
    "one_value_for_all_rows": "a NonTensorData column is one value for every row; there the put fails",
    "keys_and_rows": "metadata of no rows names no fields; there it names those of the partition",
    "shapes_and_dtypes_of_metadata": "metadata tells no row shapes of ragged fields",
}


def compare(theirs: Sequence[str | Path], ours: Sequence[str | Path], cwd: Path, environment: Mapping[str, str]) -> int:
    """Run `calls` by both commands in the folder `cwd` and compare; the number of unexpected differences, or 1 when a
    run failed."""
    answers = []
    for name, command in {"theirs": theirs, "ours": ours}.items():
        out = cwd / f"{name}.jsonl"
        extra = ["ray"] if name == "theirs" else []
        done = subprocess.run([*command, CALLS, str(out), *extra], cwd=cwd, env=environment, check=False)
        if done.returncode:
            print(f"differential: the calls to {name} did not end well", file=sys.stderr)
            return 1
        answers.append(dict(json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()))
    return report(*answers)


def report(theirs: dict[str, Any], ours: dict[str, Any]) -> int:
    """Print every difference; how many are not intended, or intended and gone."""
    wrong = 0
    for name in theirs.keys() | ours.keys():
        found = list(differences(theirs.get(name), ours.get(name), name))
        if bool(found) == (name in INTENDED):
            continue
        wrong += 1
        print("\n".join(found) if found else f"{name}: no longer differs ({INTENDED[name]})")
    print(f"differential: {len(theirs)} cases, {len(INTENDED)} differ as intended, {wrong} unexpectedly")
    return wrong


def differences(theirs: Any, ours: Any, where: str) -> list[str]:
    """The places in which two plain values differ, one line each."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        if "raises" in theirs and "raises" in ours and theirs["raises"][0] in ours["raises"]:
            return []
        if theirs.keys() == ours.keys() and "raises" not in theirs:
            return [line for key in theirs for line in differences(theirs[key], ours[key], f"{where}.{key}")]
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        pairs = enumerate(zip(theirs, ours, strict=True))
        return [line for number, (a, b) in pairs for line in differences(a, b, f"{where}[{number}]")]
    return [] if theirs == ours else [f"{where}\n  theirs {json.dumps(theirs)}\n  ours   {json.dumps(ours)}"]
