"""A source is read in the thread that sends, once for each version."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from weights import Net, copy_of, drawn, same

from transfer_queue.errors import InvalidInput, ShapeMismatch, UnsupportedValue
from transfer_queue.weights import Flip, InPlace, ModuleSource, Receiver, StateDictSource, Swap, pack, plan
from transfer_queue.weights.transport import collective, registry
from transfer_queue.weights.transport.deadline import Deadline, TimedCall
from transfer_queue.weights.transport.pending import PendingVersion
from transfer_queue.weights.version.packing import pack_into
from transfer_queue.weights.version.sources import named_weights

DEADLINE_S = 30.0
ENGINES: dict[str, dict[str, Any]] = {
    "shm": {}, "tcp": {}, "disk": {"sync": False}, "cuda_ipc": {"device": "cpu"},
}  # fmt: skip


class Seen(StateDictSource):
    """Notes who reads it, and how: once for each tensor, and once when a reading begins, and comes to its end."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__(weights)
        self.num_begun = self.num_ended = 0
        self.threads: set[int] = set()
        self.with_gradients: set[bool] = set()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.num_begun += 1
        for found in super().tensors():
            self.threads.add(threading.get_ident())
            self.with_gradients.add(torch.is_grad_enabled())
            yield found
        self.num_ended += 1


class Direct:
    """The client of one engine in this process."""

    def __init__(self, engine: Any) -> None:
        self.init_weight_transfer_engine = engine.init_transfer_engine
        self.start_weight_update = engine.start_weight_update
        self.update_weights = engine.update_weights
        self._engine = engine

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._engine.finish_weight_update()


def assert_read_here(source: Seen, times: int = 1) -> None:
    assert (source.num_begun, source.num_ended) == (times, times)
    assert source.threads == {threading.get_ident()}
    assert source.with_gradients == {False}


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_reads_in_the_callers_thread_once_for_a_version(name: str, tmp_path: Path) -> None:
    module, source = Net(), Seen(drawn(Net(), 1))  # several sizes of elements
    engine = registry.engine(name)(Receiver(InPlace(module)))
    folder = {"folder": str(tmp_path)} if name == "disk" else {}
    info = {"bucket_nbytes": 128, **ENGINES[name], **folder}
    trainer = registry.trainer(name).trainer_init(info, client=Direct(engine), source=source)
    try:
        for number in (1, 2):
            with torch.no_grad():
                trainer.send_weights(deadline_s=DEADLINE_S)
            assert_read_here(source, number)
        assert same(copy_of(module), drawn(Net(), 1))
    finally:
        engine.shutdown()
        trainer.shutdown()


def test_a_broadcast_reads_in_the_callers_thread_once_for_a_version() -> None:
    source = Seen(drawn(Net(), 1))
    trainer = collective.CollectiveTrainer.__new__(collective.CollectiveTrainer)
    trainer.info = collective.CollectiveTrainerInfo(world_size=2)
    trainer._group = sent = Sent()  # type: ignore[assignment]
    with torch.no_grad():
        manifest = trainer._publish(PendingVersion(source, 1, "e"), Deadline(DEADLINE_S))
        TimedCall(trainer._send_all, trainer._draft, manifest, Deadline(DEADLINE_S)).result(Deadline(DEADLINE_S), "it")
    assert sent.nbytes == [8, len(manifest.encode()), *manifest.buckets]
    assert_read_here(source)


class Sent:
    """A group in which nobody listens."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.nbytes: list[int] = []

    def broadcast(self, tensor: torch.Tensor, _deadline: Deadline) -> None:
        self.nbytes.append(tensor.nbytes)


def test_differences_need_no_second_reading_nor_do_receivers_that_lack_their_base() -> None:
    weights = drawn(Net(), 1)
    source = Seen(weights)
    engine = registry.engine("tcp")(Receiver(InPlace(module := Net())))
    client = Direct(engine)
    trainer = registry.trainer("tcp").trainer_init({"anchor_every": 10}, client=client, source=source)
    try:
        kinds = []
        for number in range(1, 4):
            weights["first.weight"].view(-1)[number] += 1
            with torch.no_grad():
                kinds.append(trainer.send_weights(deadline_s=DEADLINE_S).kind)
            assert_read_here(source, number)
        engine.receiver = Receiver(InPlace(module))  # it has no version any more
        with torch.no_grad():
            kinds.append(trainer.send_weights(deadline_s=DEADLINE_S).kind)
        assert kinds == ["full", "delta", "delta", "full"]
        assert_read_here(source, 4)
        assert same(copy_of(module), weights)
    finally:
        engine.shutdown()
        trainer.shutdown()


@pytest.mark.parametrize("make", [InPlace, Swap])
def test_a_receiver_that_casts_is_sent_all_of_a_version_in_place_of_a_difference(make: Any) -> None:
    weights = drawn(Net(), 1)
    module = Net().bfloat16()
    engine = registry.engine("tcp")(Receiver(make(module, cast=True)))
    info = {"anchor_every": 10}
    trainer = registry.trainer("tcp").trainer_init(info, client=Direct(engine), source=StateDictSource(weights))
    try:
        trainer.send_weights(deadline_s=DEADLINE_S)
        weights["first.weight"][0, 0] += 1
        assert trainer.send_weights(deadline_s=DEADLINE_S).kind == "full"
        assert torch.equal(module.first.weight, weights["first.weight"].bfloat16())
    finally:
        engine.shutdown()
        trainer.shutdown()


@pytest.mark.parametrize("anchor_every", [1, 3])
@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_a_source_that_gives_more_than_it_said_is_refused(name: str, anchor_every: int) -> None:
    class More(StateDictSource):
        extra = False

        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from super().tensors()
            if self.extra:
                yield "unheard_of", torch.ones(3)

    source, engine = More(drawn(Net(), 1)), registry.engine(name)(Receiver(InPlace(Net())))
    info = {"anchor_every": anchor_every}
    trainer = registry.trainer(name).trainer_init(info, client=Direct(engine), source=source)
    try:
        trainer.send_weights(deadline_s=DEADLINE_S)
        source.extra = True
        with pytest.raises(ShapeMismatch, match="'unheard_of' beyond"):
            trainer.send_weights(deadline_s=DEADLINE_S)
        source.extra = False
        assert trainer.send_weights(deadline_s=DEADLINE_S).version == 2
    finally:
        engine.shutdown()
        trainer.shutdown()


def test_packing_reads_in_the_callers_thread_also_what_threads_copy() -> None:
    large = {str(number): torch.full((300_000,), float(number)) for number in range(4)}
    source = Seen(large)
    where = plan(source.specs(), 1 << 20)
    with torch.no_grad():
        found = [packed.data.clone() for packed in pack(source, where)]
        assert_read_here(source)
        places = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in where.buckets]
        pack_into(source, where, places)
        assert_read_here(source, 2)
        assert all(torch.equal(*two) for two in zip(found, places, strict=True))
    assert [float(one[:4].view(torch.float32)) for one in found] == [0.0, 1.0, 2.0, 3.0]


class Averaging(torch.nn.Module):
    """Assigns its buffer in every forward pass, as most modules that have one do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2)
        self.register_buffer("average", torch.zeros(2))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(given)
        self.average = 0.5 * self.average + 1.0
        return found


@pytest.mark.parametrize("name", ENGINES)
def test_what_replaced_a_modules_tensors_is_what_is_sent(name: str, tmp_path: Path) -> None:
    trained, served = Averaging(), Averaging()
    engine = registry.engine(name)(Receiver(InPlace(served)))
    folder = {"folder": str(tmp_path)} if name == "disk" else {}
    source = ModuleSource(trained)
    trainer = registry.trainer(name).trainer_init({**ENGINES[name], **folder}, client=Direct(engine), source=source)
    try:
        for _ in range(2):
            trained.double().float()  # replaces every buffer
            trained(torch.arange(4.0).view(2, 2))
            trained.norm.weight = torch.nn.Parameter(trained.norm.weight + 1)
            trainer.send_weights(deadline_s=DEADLINE_S)
            assert same(copy_of(served), copy_of(trained))
    finally:
        engine.shutdown()
        trainer.shutdown()


def test_shards_and_parts_are_those_that_a_module_has_now() -> None:
    module = Averaging()
    source = ModuleSource(module)
    source.shards()
    module.half()
    module.average += 3
    assert {shard.dtype for shard in source.shards()} == {torch.float16, torch.int64}
    assert torch.equal(dict(source.parts())["average"], module.average)


def test_a_module_that_got_or_lost_a_tensor_is_refused() -> None:
    module = Averaging()
    source = ModuleSource(module)
    module.more = torch.nn.Linear(2, 2)
    with pytest.raises(InvalidInput, match=r"got 'more.bias'"):
        source.specs()
    del module.more
    assert len(list(source.tensors())) == len(source.specs())
    del module.average
    with pytest.raises(InvalidInput, match="lost 'average'"):
        source.tensors()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_modules_tensor_of_another_shape_is_refused(in_place: bool) -> None:
    module = Averaging()
    source = ModuleSource(module)
    if in_place:
        module.average.data = torch.zeros(3)
    else:
        module.average = torch.zeros(3)
    with pytest.raises(InvalidInput, match=r"'average' is \[3\], and was \[2\]"):
        source.tensors()


def test_a_tie_that_has_come_loose_is_refused() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[1].weight = module[0].weight
    source = ModuleSource(module)
    assert source.aliases() == {"1.weight": "0.weight"}
    module[1].weight = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(InvalidInput, match=r"'1.weight' was '0.weight'"):
        source.tensors()


def test_weights_are_what_a_state_dict_has_also_where_somebody_changes_that() -> None:
    class Own(torch.nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            destination[prefix + "packed"] = self.weight

    def without_bias(_part: Any, state: Any, prefix: str, _meta: Any) -> None:
        del state[prefix + "bias"]

    module = torch.nn.Sequential(Averaging(), Own(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))
    module[0].register_buffer("passing", torch.zeros(1), persistent=False)
    module[2].register_state_dict_post_hook(without_bias)
    found, state = named_weights(module), module.state_dict(keep_vars=True)
    assert list(found) == list(state)
    assert all(found[name] is state[name] for name in state)


def test_a_view_of_other_values_over_the_same_memory_is_a_tensor_of_its_own() -> None:
    one = torch.tensor([1 + 2j, 3 - 4j])
    views = {"a": one, "conjugate": one.conj(), "imaginary": one.imag, "negative": one.conj().imag}
    source = StateDictSource(views)
    assert source.aliases() == {}
    assert all(torch.equal(tensor, views[name]) for name, tensor in source.tensors())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused() -> None:
    with pytest.raises(UnsupportedValue, match="plain dense"):
        StateDictSource({"a": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])})


def test_a_lazy_module_that_nobody_has_called_is_refused_with_what_to_do() -> None:
    module = torch.nn.LazyLinear(2)
    with pytest.raises(UnsupportedValue, match="'weight' has no shape yet"):
        ModuleSource(module)
    module(torch.ones(1, 3))
    assert dict(ModuleSource(module).tensors())["weight"].shape == (2, 3)


@pytest.mark.parametrize(
    ("mistaken", "named"),
    [
        (lambda net, engine: StateDictSource(net), r"ModuleSource\(module\)"),
        (lambda net, engine: ModuleSource(net.state_dict()), r"a torch\.nn\.Module is expected, got a OrderedDict"),
        (lambda net, engine: StateDictSource(net.named_parameters()), r"got a generator: give dict\(\.\.\)"),
        (lambda net, engine: StateDictSource({3: torch.ones(1)}), "called by texts, not by 3"),  # type: ignore[dict-item]
        (lambda net, engine: ModuleSource(net, rename=["first"]), "rename is a list: give a map"),  # type: ignore[arg-type]
        (lambda net, engine: Flip(net, None), "a torch.nn.Module is expected, got a NoneType"),  # type: ignore[arg-type]
        (lambda net, engine: InPlace(net.state_dict()), r"a torch\.nn\.Module is expected"),
        (lambda net, engine: Receiver(net), r"a target is expected, such as Swap\(module\), got a Net"),
        (lambda net, engine: engine.trainer_init({}, client="", source=net), r"source is a Net: give Module"),
        (lambda net, engine: engine.trainer_init({}, client="", source=net.state_dict()), "give .*StateDictSource"),
        (lambda net, engine: engine.trainer_init({}, client="http://a:1", source=ModuleSource(net)), "client is a str"),
        (lambda net, engine: engine.trainer_init({}, client=None, source=ModuleSource(net)), "client"),
    ],
)
@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_what_is_mistaken_for_a_source_a_client_or_a_target_is_refused_with_what_to_give(
    mistaken: Callable[[Any, Any], object], named: str, kind: str
) -> None:
    with pytest.raises(InvalidInput, match=named):
        mistaken(Net(), registry.trainer(kind))
