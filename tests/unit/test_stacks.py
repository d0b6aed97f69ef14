"""Stacks of values that make their members when somebody looks: to everybody else they are tensordict's own."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from transfer_queue.client.transfer.read import new_tensordict
from transfer_queue.codec import stacks
from transfer_queue.codec.collector import CollectorPause, collector_pause
from transfer_queue.codec.stacks import Members, stack

VALUES: list[Any] = ["a", None, {"b": [1]}, 3, b"c", [1, 2], ("d",), 2.5, True]


def plain(values: list[Any] = VALUES) -> NonTensorStack:
    """What tensordict makes of the values."""
    return NonTensorStack(*[NonTensorData(value) for value in values])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many members were made, each time some were."""
    numbers: list[int] = []
    original = stacks.members

    def counted(values: Any) -> list[NonTensorData]:
        numbers.append(len(values))
        return original(values)

    monkeypatch.setattr(stacks, "members", counted)
    return numbers


def test_it_is_the_stack_that_tensordict_makes() -> None:
    ours, theirs = stack(list(VALUES)), plain()
    assert type(ours) is NonTensorStack
    assert vars(ours).keys() == vars(theirs).keys()
    assert (ours.batch_size, ours.stack_dim, ours.device) == (theirs.batch_size, theirs.stack_dim, theirs.device)
    assert ours.tolist() == theirs.tolist() == VALUES
    assert repr(ours) == repr(theirs)
    assert [type(one) for one in ours.tensordicts] == [NonTensorData] * len(VALUES)
    assert [vars(one).keys() for one in ours.tensordicts] == [vars(one).keys() for one in theirs.tensordicts]


def test_no_member_is_made_before_it_is_looked_at(made: list[int]) -> None:
    found = new_tensordict({"x": stack(list(VALUES))}, len(VALUES))
    assert len(found.get("x")) == len(VALUES)
    assert not made
    assert found[2]["x"] == {"b": [1]}
    assert made == [1]
    assert found.get("x")[2] is found.get("x")[2]
    assert made == [1]
    assert found["x"] == VALUES
    assert sum(made) == len(VALUES)


@pytest.mark.parametrize(
    "use",
    [
        lambda s: s.tolist(), lambda s: s[1:4].tolist(), lambda s: s[::2].tolist(), lambda s: s[-1].data,
        lambda s: [one.data for one in s], lambda s: [one.data for one in s.unbind(0)], lambda s: s.clone().tolist(),
        lambda s: s[torch.tensor([3, 0])].tolist(), lambda s: s[torch.arange(len(VALUES)) % 2 == 0].tolist(),
        lambda s: torch.stack([s, s]).tolist(), lambda s: torch.cat([s, s]).tolist(), lambda s: s.split(3)[1].tolist(),
        lambda s: pickle.loads(pickle.dumps(s)).tolist(),  # noqa: S301
        lambda s: copy.deepcopy(s).tolist(),
        lambda s: copy.copy(s).tolist(), lambda s: s.contiguous().tolist(), lambda s: s.to("cpu").tolist(),
        lambda s: s.unsqueeze(0).tolist(), lambda s: len(s), lambda s: s.numel(), lambda s: bool((s == s).all()),
        lambda s: TensorDict({"x": s}, [len(VALUES)]).to_dict()["x"], lambda s: s.to_dict(),
        lambda s: TensorDict({"x": s}, [len(VALUES)]).to_tensordict()["x"],
    ],
)  # fmt: skip
def test_whatever_is_done_with_it_gives_the_same(use: Callable[[NonTensorStack], Any]) -> None:
    assert use(stack(list(VALUES))) == use(plain())


def test_a_member_is_shared_with_slices_and_can_be_changed() -> None:
    found = stack(list(VALUES))
    part = found[:2]
    assert part.tensordicts[0] is found.tensordicts[0]
    found[1] = NonTensorData("new")
    assert found.tolist()[:3] == ["a", "new", {"b": [1]}]


def test_a_pickle_names_nothing_of_ours() -> None:
    assert b"transfer_queue" not in pickle.dumps(stack(list(VALUES)))


def test_no_values_make_an_empty_stack() -> None:
    assert stack([]).batch_size == NonTensorStack().batch_size == torch.Size([0])


def test_a_member_is_there_though_another_thread_makes_all_of_them_meanwhile() -> None:
    class Late(Members):
        """Another thread makes all members between the two looks of `__getitem__`."""

        def __getattribute__(self, name: str) -> Any:
            if name == "_values" and not filling:
                filling.append(True)
                thread = threading.Thread(target=lambda: list(self))
                thread.start()
                thread.join()
            return super().__getattribute__(name)

    filling: list[bool] = []
    late = Late.__new__(Late)
    filling.append(True)
    late.__init__(["a", "b"])  # type: ignore[misc]
    filling.clear()
    assert late[1].data == "b"
    assert filling


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(st.lists(st.sampled_from(VALUES), min_size=1, max_size=6), st.data())
def test_the_list_of_members_behaves_as_a_list(values: list[Any], data: st.DataObject) -> None:
    """Any sequence of steps gives what a list gives, by value."""
    ours, model = Members(list(values)), list(values)

    def same() -> None:
        assert [one.data for one in list(ours)] == model

    for _ in range(data.draw(st.integers(1, 5))):
        step = data.draw(st.sampled_from(["get", "set", "append", "insert", "pop", "add", "radd", "slice", "reverse"]))
        at = data.draw(st.integers(-len(model), len(model) - 1)) if model else 0
        match step:
            case "get" if model:
                assert ours[at].data == model[at]
            case "set" if model:
                ours[at], model[at] = NonTensorData("set"), "set"
            case "append":
                ours.append(NonTensorData("end"))
                model.append("end")
            case "insert":
                ours.insert(at, NonTensorData("in"))
                model.insert(at, "in")
            case "pop" if model:
                assert ours.pop(at).data == model.pop(at)
            case "add":
                assert [one.data for one in ours + [NonTensorData(1)]] == [*model, 1]  # noqa: RUF005
            case "radd":
                assert [one.data for one in [NonTensorData(1)] + ours] == [1, *model]  # noqa: RUF005
            case "slice":
                assert [one.data for one in ours[at:]] == model[at:]
            case "reverse":
                ours.reverse()
                model.reverse()
    assert len(ours) == len(model)
    same()


def test_collections_wait_for_the_last_of_several_contexts_and_an_off_collector_stays_off() -> None:
    pause = CollectorPause()
    with pause:
        with pause:
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with pause:
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_child_that_is_forked_meanwhile_collects() -> None:
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        with collector_pause:
            inside.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(10)
    pid = os.fork()
    if not pid:
        with collector_pause:
            inner = gc.isenabled()
        os._exit(0 if gc.isenabled() and not inner else 1)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
