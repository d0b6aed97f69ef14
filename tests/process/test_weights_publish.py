"""`publish`: the trainer goes on once a version is packed, while receivers take it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Child, until
from weights import Net, copy_of, same

from transfer_queue.errors import CommitFailed, DeadlineExceeded, InvalidInput, StaleVersion
from transfer_queue.weights import InPlace, ModuleSource, Receiver, StateDictSource
from transfer_queue.weights.transport import registry, ticket
from transfer_queue.weights.transport.ticket import PublishTicket

ENGINES = ["tcp", "shm", "disk"]


class Gated:
    """A client for one engine of this process, whose `update_weights` waits until it is let through."""

    engine: Any

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self.engine.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if not update_info.get("abort"):
            self.entered.set()
            assert self.open.wait(30)
        self.engine.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.engine.finish_weight_update()

    def close(self) -> None:
        """The next one waits again."""
        self.entered.clear()
        self.open.clear()


class Site:
    def __init__(self, kind: str, folder: Any, **info: Any) -> None:
        self.kind, self.model = kind, Net()
        self.client = Gated()
        self.start()
        if kind == "disk":
            info["folder"] = str(folder)
        self.trainer = registry.trainer(kind).trainer_init(info, client=self.client, source=ModuleSource(self.model))

    def start(self) -> None:
        """A server that has no version."""
        self.served = Net()
        self.receiver = Receiver(InPlace(self.served), adapter=lambda tensors, manifest: None)
        self.client.engine = self.engine = registry.engine(self.kind)(self.receiver)

    def restart(self) -> None:
        self.engine.shutdown()
        self.start()

    def train(self, seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        with torch.no_grad():
            for tensor in self.model.parameters():
                tensor.copy_(torch.randn(tensor.shape))
        return copy_of(self.model)

    def nudge(self, number: int) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            self.model.first.weight[number, 0] += 1
        return copy_of(self.model)

    def num_packed(self) -> int:
        """How many versions are there for receivers."""
        trainer = self.trainer
        return len(list(trainer.root.glob("v*"))) if hasattr(trainer, "root") else len(trainer.store.contents())

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        self.model.load_state_dict(weights)


@pytest.fixture(params=ENGINES)
def site(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Site]:
    made = Site(request.param, tmp_path)
    yield made
    made.client.open.set()
    made.trainer.shutdown()
    made.engine.shutdown()


def test_the_weights_may_change_while_receivers_take_what_was_published(site: Site) -> None:
    published = site.train(1)
    ticket = site.trainer.publish(deadline_s=30)
    assert site.client.entered.wait(30)
    assert not ticket.done
    site.train(2)
    site.client.open.set()
    report = ticket.result(30)
    assert (report.version, ticket.version, ticket.done) == (1, 1, True)
    assert same(copy_of(site.served), published)


def test_a_version_that_nobody_has_taken_gives_way_to_the_next(site: Site) -> None:
    site.train(1)
    first = site.trainer.publish(deadline_s=30)
    assert site.client.entered.wait(30)
    site.train(2)
    second = site.trainer.publish(deadline_s=30)
    newest = site.train(3)
    third = site.trainer.publish(deadline_s=30)
    site.client.open.set()
    assert [first.result(30).version, third.result(30).version] == [1, 3]
    with pytest.raises(StaleVersion, match="version 2 was superseded"):
        second.result(30)
    assert same(copy_of(site.served), newest)
    site.train(4)
    assert site.trainer.send_weights(deadline_s=30).version == 4


def test_a_version_that_is_superseded_is_let_go_of_at_once(site: Site) -> None:
    """While another one is on its way, however long that takes."""
    site.train(1)
    first = site.trainer.publish(deadline_s=60)
    assert site.client.entered.wait(30)
    waiting = [site.trainer.publish(deadline_s=60)]
    for seed in range(2, 6):
        site.train(seed)
        waiting.append(site.trainer.publish(deadline_s=60))
        assert site.num_packed() == 2
        with pytest.raises(StaleVersion, match="superseded"):
            waiting[-2].result(20)
        assert waiting[-2]._packed is None
    assert not first.done
    site.client.open.set()
    assert waiting[-1].result(30).version == 6


def test_what_ends_the_update_is_raised_by_the_ticket_and_the_next_is_good(site: Site) -> None:
    site.train(1)
    ticket = site.trainer.publish(deadline_s=1)
    with pytest.raises(DeadlineExceeded):
        ticket.result(30)
    assert site.receiver.installed().version is None
    site.client.open.set()
    newest = site.train(2)
    assert site.trainer.publish(deadline_s=30).result(30).version == 2
    assert same(copy_of(site.served), newest)


def test_what_ends_the_update_is_in_the_log_though_nobody_asks_the_ticket(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.train(1)
    first = site.trainer.publish(deadline_s=30)
    assert site.client.entered.wait(30)
    superseded = site.trainer.publish(deadline_s=30)
    last = site.trainer.publish(deadline_s=30)
    site.client.engine = None
    site.client.open.set()
    assert all(ticket.wait(30) for ticket in (first, superseded, last))
    said = [one.getMessage() for one in caplog.records if "was published" in one.getMessage()]
    assert [text.split(",")[0] for text in sorted(said)] == ["version 1", "version 3"]
    assert all("AttributeError" in text for text in said)
    site.client.engine = site.engine


def send_adapter(site: Site) -> None:
    site.trainer.send_adapter("a", StateDictSource({"x": torch.ones(2)}), {}, deadline_s=30)


def test_an_adapter_is_for_what_was_published_before_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticket, "LOOK_S", 0.001)  # one that waits is behind those that came after it
    site.train(1)
    first = site.trainer.publish(deadline_s=30)
    assert site.client.entered.wait(30)
    newest = site.train(2)
    second = site.trainer.publish(deadline_s=30)
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(send_adapter, site)
        until(sending.running, "the adapter to wait")
        site.client.open.set()
        sending.result(30)
    assert [first.result(30).version, second.result(30).version] == [1, 2]
    assert same(copy_of(site.served), newest)
    installed = site.receiver.installed()
    assert (list(installed.adapters), installed.outdated) == (["a"], ())


@pytest.mark.parametrize("is_restarted", [False, True])
def test_an_adapter_brings_the_version_that_failed_as_it_was_committed(site: Site, is_restarted: bool) -> None:
    site.client.open.set()
    site.train(1)
    site.trainer.send_weights(deadline_s=30)
    newest = site.train(2)

    def failing(weight_version: str | None = None) -> None:
        del site.client.finish_weight_update  # type: ignore[attr-defined]
        if is_restarted:
            site.restart()
        raise CommitFailed("copying failed")

    site.client.finish_weight_update = failing  # type: ignore[method-assign]
    with pytest.raises(CommitFailed):
        site.trainer.send_weights(deadline_s=30)
    send_adapter(site)
    assert same(copy_of(site.served), newest)
    assert (list(site.receiver.installed().adapters), site.receiver.installed().outdated) == (["a"], ())


def test_what_is_still_on_its_way_has_no_result_yet(site: Site) -> None:
    site.train(1)
    ticket = site.trainer.publish(deadline_s=30)
    with pytest.raises(DeadlineExceeded, match="still on its way"):
        ticket.result(0.01)
    site.client.open.set()
    assert ticket.result(30).version == 1


def test_a_time_that_is_over_is_no_fault_and_one_without_end_is_refused_by_type(site: Site) -> None:
    ticket = site.trainer.publish(deadline_s=30)
    assert not ticket.wait(-0.001)
    with pytest.raises(DeadlineExceeded, match="still on its way"):
        ticket.result(-0.001)
    for endless in (10**400, 10**5000, float("inf"), float("nan"), None):
        with pytest.raises(InvalidInput, match="11 days"):
            ticket.wait(endless)
    site.client.open.set()
    assert ticket.result(30).version == 1


def test_no_other_thread_packs_before_what_was_packed_is_known(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that published at once left three versions, and one of their tickets was nobody's."""
    start, packs = PublishTicket.start, []

    def watched(ticket: PublishTicket, function: Any) -> PublishTicket:
        packs.append(site.trainer._packing.locked() and site.trainer._turns._tickets[-1] is ticket)
        return start(ticket, function)

    monkeypatch.setattr(PublishTicket, "start", watched)
    site.client.open.set()
    assert site.trainer.publish(deadline_s=30).result(30).version == 1
    assert packs == [True]


@pytest.mark.parametrize("anchor_every", [1, 4])
def test_a_version_whose_thread_could_not_begin_keeps_no_memory_and_no_later_one_waiting(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, anchor_every: int
) -> None:
    site = Site("tcp", tmp_path, anchor_every=anchor_every)
    site.client.open.set()
    site.train(1)
    site.trainer.send_weights(deadline_s=30)
    before, start = site.num_packed(), threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "tq-weights-publish":
            raise RuntimeError("can't start new thread")
        start(thread)

    newest = site.nudge(1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="new thread"):
            site.trainer.publish(deadline_s=30)
    assert site.num_packed() == before
    site.trainer.send_weights(deadline_s=30)
    assert same(copy_of(site.served), newest)
    assert site.trainer.publish(deadline_s=30).result(30).version == 4
    site.trainer.shutdown()
    site.engine.shutdown()


def test_shutdown_waits_for_what_is_on_its_way(site: Site) -> None:
    published = site.train(1)
    site.trainer.publish(deadline_s=30)
    assert site.client.entered.wait(30)
    leaving = threading.Thread(target=site.trainer.shutdown)
    leaving.start()
    site.client.open.set()
    leaving.join(30)
    assert same(copy_of(site.served), published)


@pytest.fixture(params=["tcp", "shm"])
def changing(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Site]:
    made = Site(request.param, tmp_path, anchor_every=4)
    made.client.open.set()
    yield made
    made.trainer.shutdown()
    made.engine.shutdown()


def test_what_changed_is_published_while_the_weights_change_on(changing: Site) -> None:
    changing.train(1)
    kinds = [changing.trainer.publish(deadline_s=30).result(30).kind]
    for number in range(4):
        published = changing.nudge(number)
        changing.client.close()
        ticket = changing.trainer.publish(deadline_s=30)
        assert changing.client.entered.wait(30)
        changing.train(9)
        changing.client.open.set()
        kinds.append(ticket.result(30).kind)
        assert same(copy_of(changing.served), published)
        changing.load(published)
    assert kinds == ["full", "delta", "delta", "delta", "full"]


def test_the_next_difference_is_to_what_receivers_have_by_then(changing: Site) -> None:
    """It is not packed before the one on its way has ended, well or not."""
    changing.train(1)
    changing.trainer.publish(deadline_s=30).result(30)
    changing.client.close()
    changing.nudge(1)
    failed = changing.trainer.publish(deadline_s=1)
    newest = changing.nudge(2)
    second: list[Any] = []
    publishing = threading.Thread(target=lambda: second.append(changing.trainer.publish(deadline_s=30)))
    publishing.start()
    with pytest.raises(DeadlineExceeded):
        failed.result(30)
    changing.client.open.set()
    publishing.join(30)
    assert second[0].result(30).kind == "delta"
    assert same(copy_of(changing.served), newest)


def test_who_lacks_the_base_is_given_all_of_what_was_published(changing: Site) -> None:
    changing.train(1)
    changing.trainer.publish(deadline_s=30).result(30)
    with torch.no_grad():
        changing.served.first.weight[0, 0] += 1
    published = changing.nudge(1)
    ticket = changing.trainer.publish(deadline_s=30)
    changing.train(9)
    assert ticket.result(30).kind == "full"
    assert same(copy_of(changing.served), published)
    changing.load(published)
    newest = changing.nudge(2)
    assert changing.trainer.send_weights(deadline_s=30).kind == "delta"
    assert same(copy_of(changing.served), newest)


@pytest.mark.parametrize("version", [3.0, "7", 2**62 + 1])
def test_a_number_that_no_version_has_is_refused_and_the_next_version_is_taken(version: Any, tmp_path: Any) -> None:
    here = Site("tcp", tmp_path)
    here.client.open.set()
    try:
        with pytest.raises(InvalidInput, match="version"):
            here.trainer.send_weights(version, deadline_s=30)
        assert here.trainer.send_weights(np.int64(5), deadline_s=30).version == 5
        assert here.trainer.send_weights(deadline_s=30).version == 6
    finally:
        here.trainer.shutdown()
        here.engine.shutdown()


def test_a_program_that_ends_waits_for_what_it_has_published(fresh_child: Callable[[str], Child]) -> None:
    program = fresh_child("""
        import threading, torch
        from transfer_queue.weights import Control, ModuleSource, Receiver, Swap
        from transfer_queue.weights.transport import registry

        receiver = Receiver(Swap(torch.nn.Linear(2, 2)))
        engine = registry.engine("tcp")(receiver)
        control = Control(engine, receiver)
        update, finish = control.update_weights, control.finish_weight_update
        ending = threading.Event()

        def at_the_end(*args):
            ending.wait()
            update(*args)

        def told(*args):
            finish(*args)
            print("committed", receiver.installed().version, flush=True)

        control.update_weights, control.finish_weight_update = at_the_end, told
        source = ModuleSource(torch.nn.Linear(2, 2))
        trainer = registry.trainer("tcp").trainer_init({}, client=control, source=source)
        trainer.publish(deadline_s=30)
        threading._register_atexit(ending.set)
    """)
    assert program.finish() == "committed 1"
