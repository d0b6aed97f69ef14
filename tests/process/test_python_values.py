"""Python values are taken apart and put together aside from an event loop where they are many, or long."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq
from transfer_queue.client.effects import Offload
from transfer_queue.client.transfer.read import read
from transfer_queue.wire import messages as m


class Noted:
    """A value that notes which threads take it apart and put it together."""

    taken_apart: set[int] = set()  # noqa: RUF012
    put_together: set[int] = set()  # noqa: RUF012

    def __init__(self, number: int) -> None:
        self.number = number

    def plain(self) -> int:
        self.taken_apart.add(threading.get_ident())
        return self.number

    @classmethod
    def of_plain(cls, number: int) -> Noted:
        cls.put_together.add(threading.get_ident())
        return cls(number)


@pytest.mark.parametrize("how", ["together", "alone", "few"])
def test_many_python_values_are_not_taken_apart_and_put_together_on_the_loop(
    client: tq.TransferQueueClient, how: str
) -> None:
    tq.register_type(Noted, name="Noted", to_plain=Noted.plain, from_plain=Noted.of_plain)
    keys = [f"k{number}" for number in range(3 if how == "few" else 2500)]
    values = [Noted(number) for number in range(len(keys))]
    if how == "alone":
        for key, value in zip(keys, values, strict=True):
            tq.kv_put(key, "p", {"x": value})

    async def main() -> list[int]:
        if how != "alone":
            Noted.taken_apart.clear()
            await tq.async_kv_batch_put(keys, "p", {"x": values})
        Noted.put_together.clear()
        return [value.number for value in (await tq.async_kv_batch_get(keys, "p"))["x"]]

    assert asyncio.run(main()) == list(range(len(keys)))
    here = {threading.get_ident()}
    assert (Noted.put_together == here) is (how == "few")
    if how != "alone":
        assert (Noted.taken_apart == here) is (how == "few")


@pytest.mark.parametrize("how", ["update", "nested"])
def test_many_python_values_of_updates_and_of_nested_columns_are_taken_apart_aside_from_the_loop(
    client: tq.TransferQueueClient, how: str
) -> None:
    tq.register_type(Noted, name="Noted", to_plain=Noted.plain, from_plain=Noted.of_plain)
    values = [Noted(number) for number in range(2500)]
    meta = client.put({"x": values}, partition_id="p")
    nested = TensorDict({"n": TensorDict({"x": NonTensorStack(*values)}, 2500)}, 2500)
    Noted.taken_apart.clear()
    if how == "update":
        asyncio.run(client.async_update(meta, "x", {"x": values}, "replace"))
    else:
        asyncio.run(client.async_put(nested, partition_id="q"))
    assert threading.get_ident() not in Noted.taken_apart


def test_a_long_text_is_decoded_aside_from_the_loop(client: tq.TransferQueueClient) -> None:
    tq.kv_put("a", "p", {"x": "long" * (1 << 19)})
    operation = read(client.session, [m.Get(client.session.next_rid(), "p", ["a"], None, None, False)])
    effect = operation.send(client.session.call(next(operation)))  # type: ignore[arg-type]
    assert isinstance(effect, Offload)
    assert effect.nbytes > 1 << 20
    operation.close()
