"""A service at one instant: `tq status`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transfer_queue.cli.attaching import Address, AsJson, answer, session
from transfer_queue.cli.tables import print_json, print_table

if TYPE_CHECKING:
    from transfer_queue.wire import messages as m


def overview_of(address: str | None, most: int = 0) -> m.ServiceOverview:
    """An overview of the service that was chosen, with at most so many waiting requests and leases."""
    from transfer_queue.client.operations.overview import overview

    with session(address) as found:
        return answer(found, overview(found, most))


def status(address: Address = None, as_json: AsJson = False) -> None:
    """Counts and sizes of a running service, and its partitions."""
    seen = overview_of(address)
    partitions = {
        one.name: {"size": one.declared, "metadata": one.metadata, "rows": one.rows} for one in seen.partitions
    }
    if as_json:
        print_json({**seen.server, "partition": partitions})
        return
    counts = {name: value for name, value in seen.server.items() if name not in ("groups", "series")}
    print_table(("what", "value"), [(name, _count(value)) for name, value in counts.items()])
    lines = [(name, one["rows"], one["size"], one["metadata"]) for name, one in partitions.items()]
    print_table(("partition", "rows", "declared", "metadata"), lines)
    for title, counted in (("groups of", seen.server["groups"]), ("series", seen.server["series"])):
        if counted:
            print_table(
                (title, *next(iter(counted.values()))), [(name, *one.values()) for name, one in counted.items()]
            )


def _count(value: Any) -> Any:
    return f"{value:,}" if isinstance(value, int) else value  # as a text: it stands in a column with others
