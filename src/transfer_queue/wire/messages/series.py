"""Messages about series of partitions, of which only so many may be open. Part of the unions in `messages`."""

from __future__ import annotations

from transfer_queue.wire.messages.base import Request, Seconds


class OpenPartition(Request):
    """`partition` is the next one of `series` (`Done`); parks while more than `max_open` others of it are not cleared.
    Once each of `consumers` has finished it, it is cleared where `clears` says so. Repeating it changes nothing."""

    partition: str
    series: str
    max_open: int
    consumers: list[str]
    clears: bool
    timeout_s: Seconds


class EnterSeries(Request):
    """`partition` is one of `series`: what an `OpenPartition` came to."""

    partition: str
    series: str
    consumers: list[str]
    clears: bool


class FinishPartition(Request):
    """`consumer` needs no more of `partition`."""

    partition: str
    consumer: str


class DescribeSeries(Request):
    """Which partitions of `series` are not cleared, and whom they wait for (`Report`)."""

    series: str
