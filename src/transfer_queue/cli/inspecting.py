"""`tq inspect`: what is known of one row, and how its values begin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from transfer_queue.cli.attaching import Address, AsJson, answer, session
from transfer_queue.cli.previews import preview
from transfer_queue.cli.tables import Number, harmless, plain, print_json, print_table, seconds
from transfer_queue.errors import TransferQueueError

if TYPE_CHECKING:
    from transfer_queue.client.session import Session
    from transfer_queue.schema import FieldSchema
    from transfer_queue.wire import messages as m

MAX_SENT_NBYTES = 16 << 20  # of one value that comes over a network


def inspect(
    partition: str,
    key: Annotated[str | None, typer.Argument(help="Of the row; or --row.")] = None,
    row: Annotated[int | None, typer.Option(help="The row's global index, for one without a key.")] = None,
    values: Annotated[bool, typer.Option(help="Also how the values begin.")] = True,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """What is known of one row, and how its values begin.

    Tags, fields, what the row is to each task, the steps that used it, and what happened to it lately. Values are
    shortened, and no code of a value runs.
    """
    if (key is None) == (row is None):
        raise typer.BadParameter("name the row: by its KEY, or with --row")
    from transfer_queue.client.operations.overview import inspect_row

    with session(address) as found:
        seen = answer(found, inspect_row(found, partition, key, row))
        begins = {field.name: _begin(found, partition, seen.row, field) for field in seen.written} if values else {}
    if as_json:
        print_json({"partition": partition, **plain(seen), "values": begins})
    else:
        _print(partition, seen, begins)


def _begin(found: Session, partition: str, row: int, field: FieldSchema) -> str:
    """How a value begins, or why that cannot be said."""
    try:
        return preview(_value(found, partition, row, field.name))
    except TransferQueueError as error:  # it was cleared meanwhile, or is pickled: nothing is evaluated here
        return f"not read: {harmless(str(error))}"
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # of NumPy and torch, for odd dtypes
        return f"cannot be shown: {harmless(str(error))}"


def _value(found: Session, partition: str, row: int, field: str) -> Any:
    """The value itself; a view of the store where that is on this host."""
    import numpy as np

    from transfer_queue.client.drivers import run
    from transfer_queue.client.transfer.read import read
    from transfer_queue.wire import messages as m

    wanted = np.array([row], np.int64).tobytes()
    request = m.Get(found.next_rid(), partition, None, wanted, [field], True)
    column = run(found, read(found, [request], most_sent=MAX_SENT_NBYTES))[field]
    one = column.unbind()[0] if getattr(column, "is_nested", False) else column[0]
    return getattr(one, "data", one) if type(one).__name__ == "NonTensorData" else one


def _print(partition: str, seen: m.RowInspected, begins: dict[str, str]) -> None:
    about = [
        ("partition", partition), ("row", str(seen.row)), ("key", seen.key), ("tags", seen.tags), ("group", seen.group),
        ("age", None if seen.age is None else f"{seen.age} versions"), ("not written", ", ".join(seen.missing)),
    ]  # fmt: skip
    print_table(("what", "value"), [line for line in about if line[1]])
    fields = [(one.name, one.kind, one.dtype, str(list(one.shape)), begins.get(one.name, "")) for one in seen.written]
    print_table(("field", "kind", "dtype", "shape", "value"), fields)
    if seen.tasks:
        steps = [", ".join(f"{step}" if step >= 0 else "not marked" for step, _ in one.steps) for one in seen.tasks]
        lines = [
            (one.task, one.state, Number(one.lease) if one.lease else None, one.attempts, one.reason, used)
            for one, used in zip(seen.tasks, steps, strict=True)
        ]
        print_table(("task", "state", "lease", "attempts", "reason", "steps"), lines)
    if seen.events:
        events = [(seconds(one.ago_s), one.what, one.task, one.detail, one.session.hex()[:8]) for one in seen.events]
        print_table(("ago", "event", "task", "detail", "of"), events)
