"""A server that was started without weights, over disk: updates are rehearsed, and reports have a way of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from transfer_queue.errors import CommitFailed, DigestMismatch, Incomplete, ShapeMismatch, UnknownTensor
from transfer_queue.weights.transport.disk import DiskTrainer
from vllm_tests.conftest import Site
from vllm_tests.models import answer, drawn, save
from vllm_tests.servers import Server
from vllm_tests.sources import Nobody, Odd


@pytest.fixture(scope="module")
def empty(start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = save(drawn(9, tied=True), tmp_path_factory.mktemp("empty"))
    (folder / "model.safetensors").unlink()
    server = start(folder, "tq_disk", 1, "--load-format", "dummy").wait()
    yield Site(server, drawn(9, tied=True), "disk", 1)
    server.stop()


def test_weights_from_nothing_and_refusals(empty: Site, tmp_path: Path) -> None:
    site = empty
    source = Odd(site.model)
    with site.trainer(source, folder=str(tmp_path), sync=False) as trainer:
        for odd, error in (("unknown", UnknownTensor), ("missing", Incomplete), ("smaller", ShapeMismatch)):
            source.odd = odd
            with pytest.raises(error):
                trainer.send_weights(deadline_s=60)
            assert site.server.health() == 200
            assert site.server.client().get_weight_version() == "default"
        source.odd = ""
        site.server.break_loader(1)
        with pytest.raises(CommitFailed, match="no copy of what was there"):  # random weights, which nobody needs back
            trainer.send_weights(deadline_s=60)
        site.update(trainer)
        site.server.break_loader(1)
        with pytest.raises(CommitFailed, match="was loaded again"):
            trainer.send_weights(deadline_s=60)
        site.recovers(trainer)


def test_a_damaged_file_is_found_and_a_server_may_join_without_the_trainer(empty: Site, tmp_path: Path) -> None:
    site = empty

    class Damaging(DiskTrainer):
        damage = False

        def _publish(self, draft, deadline):  # type: ignore[no-untyped-def]
            manifest = super()._publish(draft, deadline)
            if self.damage:
                shard = next(self.folder_of(draft.version).glob("*.safetensors"))
                body = bytearray(shard.read_bytes())
                body[-7] ^= 1
                shard.write_bytes(body)
            return manifest

    with site.trainer(kind=Damaging, folder=str(tmp_path), sync=False) as trainer:
        site.update(trainer)
        trainer.damage = True
        site.train()
        with pytest.raises(DigestMismatch):
            trainer.send_weights(deadline_s=60)
        trainer.damage = False
        site.recovers(trainer)

    with torch.no_grad():  # another life of a trainer writes a version, and is gone
        site.model.lm_head.weight.mul_(-1.0)
    client = site.server.client()
    lonely = DiskTrainer.trainer_init(
        {"folder": str(tmp_path), "silent": 0, "sync": False}, client=Nobody(), source=Odd(site.model)
    )
    report = lonely.send_weights(deadline_s=60)
    lonely.shutdown()
    client.init_weight_transfer_engine({"folder": str(tmp_path)})
    client.start_weight_update()
    client.update_weights({"newest": True, "timeout_s": 60})
    client.finish_weight_update(f"joined-{report.version}")
    site.said, site.label = answer(site.model), f"joined-{report.version}"
    site.serves()
