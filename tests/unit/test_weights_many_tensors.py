"""What is done for each tensor does not grow with the number of buckets: counted, not timed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_weights_sources import Direct

from transfer_queue.weights import InPlace, Manifest, ModuleSource, Receiver, StateDictSource, pack, plan, seal
from transfer_queue.weights.transport import cuda_ipc, registry
from transfer_queue.weights.transport.tcp import Installed
from transfer_queue.weights.version.packing import Plan, digests, pack_into
from transfer_queue.weights.version.sources import Once, weights_called

NUM = 400
SOURCE = StateDictSource({f"{number:04}.weight": torch.full((3,), float(number)) for number in range(NUM)})


class Counted(tuple[Any, ...]):
    """How many of its elements were gone through."""

    num_seen = 0

    def __iter__(self) -> Iterator[Any]:
        for one in super().__iter__():
            self.num_seen += 1
            yield one


def in_own_buckets() -> tuple[Plan, Counted]:
    where = plan(SOURCE.specs(), 12)
    assert len(where.buckets) == NUM
    counted = Counted(where.placements)
    return where._replace(placements=counted), counted  # type: ignore[arg-type]


def test_packing_goes_through_the_plan_once() -> None:
    where, counted = in_own_buckets()
    for packed in pack(SOURCE, where):
        assert packed.data.nbytes == 12
    assert counted.num_seen == NUM
    pack_into(SOURCE, where, [torch.empty(12, dtype=torch.uint8) for _ in where.buckets])
    assert counted.num_seen == 2 * NUM


def test_mapped_buffers_are_filled_going_through_the_plan_once() -> None:
    where, counted = in_own_buckets()
    trainer = cuda_ipc.CudaIpcTrainer.__new__(cuda_ipc.CudaIpcTrainer)
    trainer._device = torch.device("cpu")
    trainer._buffers = [cuda_ipc.Shared(trainer._device, 12) for _ in range(2)]
    assert list(trainer._filled(Once(SOURCE), where)) == list(range(NUM))
    assert counted.num_seen == NUM
    trainer._drop_buffers()


def manifest() -> Manifest:
    return seal(plan(SOURCE.specs(), 12), digests(SOURCE), version=1, epoch="e")


def test_all_buckets_of_a_manifest_take_one_look_at_its_tensors() -> None:
    made = manifest()
    assert made.by_bucket is made.by_bucket
    assert [made.in_bucket(index)[0].spec for index in range(NUM)] == list(made.tensors)


def test_a_manifest_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = manifest()
    encoded: list[int] = []
    encode = Manifest.encode
    monkeypatch.setattr(Manifest, "encode", lambda self: encoded.append(1) or encode(self))
    assert len({made.key for _ in range(5)}) == 1
    assert len(encoded) == 1


class Model(torch.nn.Module):
    """Counts how often its whole state is asked for."""

    num_asked = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1, 3) for _ in range(20))

    def state_dict(self, *args: Any, **more: Any) -> Any:
        type(self).num_asked += 1
        return super().state_dict(*args, **more)


def test_a_replica_gives_its_buckets_without_going_through_all_its_weights_for_each() -> None:
    module = Model()
    engine = registry.engine("tcp")(Receiver(InPlace(module)))
    trainer = registry.trainer("tcp").trainer_init(
        {"bucket_nbytes": 12}, client=Direct(engine), source=ModuleSource(Model())
    )
    trainer.send_weights(deadline_s=30)
    store, num = Installed(engine), len(engine._whole.buckets)  # type: ignore[union-attr]
    Model.num_asked = 0
    assert sum(store.bucket("", index).nbytes for index in range(num)) == 20 * 24
    assert Model.num_asked == 0
    assert weights_called(module, ["unheard.of"]).keys() == module.state_dict().keys()
    engine.shutdown()
    trainer.shutdown()


@pytest.mark.parametrize("num", [3, 300])
def test_a_version_on_the_disk_goes_through_its_plan_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num: int
) -> None:
    seen: list[Counted] = []
    by_bucket = Plan.by_bucket

    def counting(self: Plan) -> Any:
        seen.append(counted := Counted(self.placements))
        return by_bucket(self._replace(placements=counted))  # type: ignore[arg-type]

    monkeypatch.setattr(Plan, "by_bucket", counting)
    module = torch.nn.ModuleList(torch.nn.Linear(1, 3, bias=False) for _ in range(num))
    engine = registry.engine("disk")(Receiver(InPlace(module)))
    trainer = registry.trainer("disk").trainer_init(
        {"bucket_nbytes": 12, "folder": str(tmp_path), "sync": False}, client=Direct(engine),
        source=ModuleSource(module),
    )  # fmt: skip
    trainer.send_weights(deadline_s=60)
    assert len(seen) == 2
    engine.shutdown()
    trainer.shutdown()
