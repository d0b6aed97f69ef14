"""The engines for vLLM's workers without vLLM, with what they need of it in its place. `make test-vllm` has the real
one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import until
from safetensors.torch import save_file
from vllm_stand_in import Client, Factory, Model, TrainerFactory, config, put_in_place, weights

from transfer_queue.errors import (
    CommitFailed,
    Incomplete,
    NotSupported,
    ShapeMismatch,
    TransferQueueError,
    UnknownTensor,
)
from transfer_queue.integrations.vllm import plugin
from transfer_queue.integrations.vllm.adapters import LabeledAdapters, path_of
from transfer_queue.integrations.workers.headers import checkpoint_of
from transfer_queue.integrations.workers.reloading import in_layers
from transfer_queue.weights import StateDictSource, Swap, digests, plan, seal
from transfer_queue.weights.transport import registry


@pytest.fixture(autouse=True)
def _a_place_for_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch)


def worker(folder: Path, name: str = "ShmWorker") -> Any:
    from transfer_queue.integrations.vllm import engine as workers

    kind = getattr(workers, name)
    return kind(SimpleNamespace(backend=f"tq_{kind.transport}"), config(folder), torch.device("cpu"), Model())


def test_a_worker_takes_folders_below_the_root_of_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transfer_queue.integrations.vllm.engine import DiskWorker

    monkeypatch.delenv("TQ_WEIGHTS_ROOT", raising=False)
    inside, outside = tmp_path / "root" / "run", tmp_path / "other"
    inside.mkdir(parents=True)
    outside.mkdir()

    def told(folder: Path) -> str:
        """The code of what a worker reports that was told of this folder."""
        engine = DiskWorker(None, config(tmp_path), torch.device("cpu"), Model())
        engine.init_transfer_engine({"folder": str(folder)})
        assert engine._lane.ended(20)
        engine.shutdown()
        return engine._engine.outcome.code

    assert told(inside) == "not_supported"
    monkeypatch.setenv("TQ_WEIGHTS_ROOT", str(tmp_path / "root"))
    assert (told(outside), told(inside)) == ("invalid_input", "")


def test_a_checkpoint_with_a_dtype_that_is_not_known_counts_as_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file({"scale": torch.zeros(2).to(torch.float8_e5m2fnuz)}, tmp_path / "model.safetensors")
    with caplog.at_level("INFO", logger="transfer_queue.weights"):
        assert checkpoint_of(str(tmp_path), None) is None
    assert "dtype F8_E5M2FNUZ" in caplog.text


@pytest.mark.skipif(not hasattr(torch, "float8_e8m0fnu"), reason="this torch has no such dtype")
def test_a_checkpoint_with_scales_that_are_powers_of_two_is_read(tmp_path: Path) -> None:
    scales = torch.tensor([0.5, 1.0, 256.0]).to(torch.float8_e8m0fnu)
    save_file({"scale": scales}, tmp_path / "model.safetensors")
    found = checkpoint_of(str(tmp_path), None)
    assert found is not None
    assert [one.dtype for one in found.specs()] == [torch.float8_e8m0fnu]
    assert torch.equal(dict(found.tensors())["scale"].view(torch.uint8), scales.view(torch.uint8))


def test_a_server_that_moves_experts_between_its_workers_is_refused(tmp_path: Path) -> None:
    from transfer_queue.integrations.vllm.model import LoadedModel

    settings, source = config(tmp_path), StateDictSource(weights(2.0))
    contents = seal(plan(source.specs(), 1 << 10), digests(source), version=1, epoch="e").contents()
    LoadedModel(Model(), settings, lambda well, _: well).check(contents)
    settings.parallel_config.enable_eplb = True
    with pytest.raises(NotSupported, match="--enable-eplb"):
        LoadedModel(Model(), settings, lambda well, _: well).check(contents)


def test_a_server_without_lora_refuses_adapters() -> None:
    source = StateDictSource({"base_model.model.linear.lora_A.weight": torch.ones(1, 2)})
    where = plan(source.specs())
    manifest = seal(where, digests(source), version=1, epoch="e", kind="adapter", label="math")
    with pytest.raises(NotSupported, match="--enable-lora"):
        LabeledAdapters(Model(), Swap(Model())).prepare(dict(source.tensors()), manifest)


def test_a_refused_adapter_leaves_nothing_behind_and_weights_are_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = worker(tmp_path)
    trainer = registry.trainer("shm").trainer_init({}, client=Client(made), source=StateDictSource(weights(2.0)))
    half = StateDictSource({"base_model.model.linear.lora_A.weight": torch.ones(1, 2)})
    with pytest.raises(NotSupported, match="--enable-lora"):
        trainer.send_adapter("math", half, {"r": 1}, deadline_s=20, for_base=False)
    assert trainer.send_weights(deadline_s=20).version == 1
    assert float(made.model.linear.bias.detach().max()) == 2.0
    made.shutdown()
    trainer.shutdown()
    caplog.clear()  # its tracebacks hold the connection


def test_the_path_of_an_adapter_holds_any_label() -> None:
    assert (path_of("math"), path_of("a/b #1", 7)) == ("tq:math", "tq:a%2Fb%20%231#7")


def test_the_plug_in_registers_once_and_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.register()
    plugin.register()
    assert set(Factory._registry) == {"nccl", *plugin.ENGINES}
    for name, place in plugin.ENGINES.items():
        assert Factory._registry[name] == ("transfer_queue.integrations.vllm.engine", place)
        assert TrainerFactory._registry[name] == ("transfer_queue.integrations.vllm.trainer", "FactoryTrainer")
    Factory._registry = {}
    monkeypatch.setattr(Factory, "register_engine", lambda *_: 1 / 0)
    plugin.register()
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.factory", None)
    plugin.register()


def test_it_is_made_by_position_and_by_keyword(tmp_path: Path) -> None:
    from transfer_queue.integrations.vllm import engine as workers

    for name in set(plugin.ENGINES.values()):
        kind = getattr(workers, name)
        more = {"device": torch.device("cpu"), "model": Model(), "a_later_one": 3}
        made = kind(None, vllm_config=config(tmp_path), **more)
        assert made._engine.rank == 3
        assert isinstance(made._engine, registry.engine(kind.transport))
        assert made.supports_draft_weight_update is made.defers_processing is False
        made.set_weight_update_target(None, None)
        made.reset_weight_update_target()
        made.drain_pending()
        made.shutdown()


def test_an_update_a_failed_load_and_a_trainer_that_left_an_update_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = worker(tmp_path)
    client, given = Client(made), weights(2.0)
    start: Callable[[], Any] = lambda: registry.trainer("shm").trainer_init(  # noqa: E731
        {}, client=client, source=StateDictSource(given)
    )
    trainer = start()
    made.model.fails_after = 1
    with pytest.raises(TransferQueueError, match="was loaded again"):  # from the folder
        trainer.send_weights(deadline_s=20)
    assert float(made.model.linear.weight.detach().max()) == 1.0
    assert trainer.send_weights(deadline_s=20).version == 2
    assert made.installed().version == 2
    assert float(made.model.linear.bias.detach().max()) == 2.0
    client.start_weight_update()
    trainer.shutdown()
    given["linear.bias"].fill_(3.0)
    trainer = start()
    assert trainer.send_weights(deadline_s=20).version == 1
    assert float(made.model.linear.bias.detach().max()) == 3.0
    made.shutdown()
    trainer.shutdown()
    caplog.clear()  # its tracebacks hold the weights


def test_weights_that_are_asleep_are_not_touched_and_come_back_with_the_next_version(tmp_path: Path) -> None:
    made = worker(tmp_path)
    client, given = Client(made), weights(2.0)
    trainer = registry.trainer("shm").trainer_init({}, client=client, source=StateDictSource(given))
    trainer.send_weights(deadline_s=20)
    given["linear.bias"].fill_(3.0)
    client.sleep(level=1)
    for tags in (["kv_cache"], None):
        with pytest.raises(CommitFailed, match="asleep"):
            trainer.send_weights(deadline_s=20)
        client.wake_up(tags=tags)
    assert trainer.send_weights(deadline_s=20).version > 1
    assert float(made.model.linear.bias.detach().max()) == 3.0
    made.shutdown()
    trainer.shutdown()


def test_weights_that_fall_asleep_in_an_update_stay_as_they_are(tmp_path: Path) -> None:
    class Tired(Client):
        def finish_weight_update(self, weight_version: str | None = None) -> None:
            self.sleep()
            super().finish_weight_update(weight_version)

    made = worker(tmp_path)
    client = Tired(made)
    trainer = registry.trainer("shm").trainer_init({}, client=client, source=StateDictSource(weights(2.0)))
    with pytest.raises(CommitFailed, match="asleep"):
        trainer.send_weights(deadline_s=20)
    assert made.installed().version is None
    made.shutdown()
    trainer.shutdown()


@pytest.mark.parametrize("anchor_every", [1, 5])
def test_weights_that_sleep_has_dropped_are_loaded_again_by_the_same_version_and_by_the_next(
    tmp_path: Path, anchor_every: int
) -> None:
    made = worker(tmp_path, "TcpWorker")
    client, given = Client(made), weights(2.0)
    info = {"anchor_every": anchor_every}
    trainer = registry.trainer("tcp").trainer_init(info, client=client, source=StateDictSource(given))
    trainer.send_weights(deadline_s=20)
    client.sleep(level=2)
    client.wake_up(tags=["weights"])
    assert trainer.join(client, deadline_s=20) == 1
    assert float(made.model.linear.weight.detach().max()) == 2.0
    client.sleep(level=2)
    client.wake_up()
    given["linear.bias"].fill_(3.0)
    assert trainer.send_weights(deadline_s=20).kind == ("full" if anchor_every == 1 else "delta")
    assert [float(tensor.max()) for tensor in made.model.state_dict().values()] == [2.0, 3.0]
    made.shutdown()
    trainer.shutdown()


def test_buckets_in_mapped_memory_come_one_by_one_and_a_fault_in_them_is_heard(tmp_path: Path) -> None:
    from transfer_queue.integrations.vllm.engine import CudaIpcWorker

    made = CudaIpcWorker(None, config(tmp_path), torch.device("cpu"), Model())
    told: list[tuple[int, str]] = []  # what has come when each call is answered

    class Watching(Client):
        def update_weights(self, info: Any) -> None:
            super().update_weights(info)
            if not info.get("abort"):
                assert made._lane.ended(0.0)
                told.append((info["bucket"], made._engine.receiver.state.value))

    given = weights(2.0)
    info = {"device": "cpu", "num_receivers": 4, "bucket_nbytes": 16}
    trainer = registry.trainer("cuda_ipc").trainer_init(info, client=Watching(made), source=StateDictSource(given))
    assert trainer.send_weights(deadline_s=20).version == 1
    assert float(made.model.linear.bias.detach().max()) == 2.0
    assert told == [(0, "open"), (1, "ready")]
    trainer._source = StateDictSource({**given, "linear.bias": torch.ones(3)})
    with pytest.raises(ShapeMismatch):
        trainer.send_weights(deadline_s=20)
    trainer._source = StateDictSource(weights(3.0))
    assert trainer.send_weights(deadline_s=20).version == 3
    assert float(made.model.linear.bias.detach().max()) == 3.0
    made.shutdown()
    trainer.shutdown()


@pytest.mark.parametrize("nonsense", [None, 3, [], {}, {"version": "x"}, {"address": 1}, {"abort": True}])
def test_nonsense_raises_nowhere(tmp_path: Path, nonsense: Any) -> None:
    made = worker(tmp_path)
    made.init_transfer_engine(made.parse_init_info(nonsense))
    made.update_weights(made.parse_update_info(nonsense))
    made.finish_weight_update()
    made.start_weight_update()
    made.receive_weights(nonsense)
    made.finish_weight_update()
    until(lambda: made._lane.ended(0.0), "that all is done")
    assert made.installed().version is None
    made.shutdown()
    made.shutdown()


def contents(tensors: dict[str, torch.Tensor]) -> Any:
    source = StateDictSource(tensors)
    where = plan(source.specs())
    return seal(where, digests(source), version=1, epoch="e", aliases=source.aliases()).contents()


def test_the_headers_tell_what_is_taken(tmp_path: Path) -> None:
    from transfer_queue.integrations.vllm.checkpoint import Checkpoint

    found = config(tmp_path, tied=True)
    save_file({**weights(1.0), "embed_tokens.weight": torch.ones(3, 2)}, tmp_path / "model.safetensors")
    checkpoint, table = Checkpoint(found, found.model_config), torch.full((3, 2), 4.0)
    good = {**weights(2.0), "embed_tokens.weight": table}
    checkpoint.check(contents(good))
    checkpoint.check(contents({**good, "linear.bias": good["linear.bias"].bfloat16()}))  # the loader converts
    checkpoint.check(contents({**good, "lm_head.weight": table}))
    for wrong, error in (
        ({"surplus": table}, UnknownTensor),
        ({"linear.bias": torch.zeros(3)}, ShapeMismatch),
        ({"linear.bias": torch.zeros(2, dtype=torch.int32)}, ShapeMismatch),
        ({"lm_head.weight": table + 1}, ShapeMismatch),
    ):
        with pytest.raises(error):
            checkpoint.check(contents({**good, **wrong}))
    del good["linear.bias"]
    with pytest.raises(Incomplete):
        checkpoint.check(contents(good))
    assert dict(checkpoint.tensors() or [])["linear.bias"].tolist() == [1.0, 1.0]


def test_tensors_come_by_layer() -> None:
    names = ["embed", "m.layers.1.a", "m.layers.0.experts.3.a", "m.layers.1.b", "head", "m.layers.0.experts.2.a"]
    assert in_layers(names) == [names[index] for index in (0, 1, 3, 2, 5, 4)]
