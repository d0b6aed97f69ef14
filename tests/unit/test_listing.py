"""What a session knows of keys, when several threads list at once."""

from __future__ import annotations

from transfer_queue.client.listing import Listings
from transfer_queue.wire.messages import Changes, Listing


def reply(**partitions: Changes) -> Listing:
    return Listing(1, partitions)


def whole(table: int, version: int, *keys: str) -> Changes:
    return Changes(table, version, True, [], list(keys), None)


def since(table: int, version: int, *keys: str, removed: tuple[str, ...] = ()) -> Changes:
    return Changes(table, version, False, list(removed), list(keys), None)


def test_changes_are_taken_up_once_and_an_earlier_answer_changes_nothing() -> None:
    listings = Listings()
    assert listings.update(reply(p=whole(7, 1, "a", "b")), "p") == {"p": {"a": {}, "b": {}}}
    assert listings.versions("p") == {"p": (7, 1)}
    assert listings.update(reply(p=since(7, 3, "c", removed=("a",))), "p") == {"p": {"b": {}, "c": {}}}
    assert listings.update(reply(p=since(7, 2, removed=("a",))), "p") == {"p": {"b": {}, "c": {}}}
    assert listings.update(reply(p=since(7, 3)), None) == {"p": {"b": {}, "c": {}}}
    assert listings.versions(None) == {"p": (7, 3)}


def test_an_answer_about_a_partition_that_another_thread_found_gone_is_asked_for_again() -> None:
    listings = Listings()
    listings.update(reply(p=whole(7, 1, "a")), "p")
    assert listings.update(reply(), None) == {}, "another thread: it is gone"
    assert listings.update(reply(p=since(7, 1)), "p") is None, "an answer from before"
    assert listings.versions("p") == {}, "the next request asks for all of it"
    listings.update(reply(p=whole(9, 1, "z")), "p")
    assert listings.update(reply(p=since(7, 2, "b")), "p") is None
    assert listings.update(reply(p=since(9, 1)), "p") == {"p": {"z": {}}}
