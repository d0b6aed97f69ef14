"""Updates of a real SGLang, good ones and bad ones. After each bad one the old weights answer and the next is good."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_tests.conftest import Site, Transport
from sglang_tests.dying import POINTS
from sglang_tests.servers import Server
from transfer_queue.errors import (
    CommitFailed,
    DigestMismatch,
    Incomplete,
    NotSupported,
    ShapeMismatch,
    TransferQueueError,
    UnknownTensor,
)
from transfer_queue.integrations.sglang.payload import LOADER
from vllm_tests.figures import note
from vllm_tests.models import PROMPT, answer, drawn, save
from vllm_tests.processes import ROOT
from vllm_tests.sources import CORRUPT, Odd

OTHER: dict[Transport, Transport] = {"tcp": "shm", "shm": "tcp"}
NEAR = 1e-3  # of logprobs in float32, by other kernels


def test_where_the_first_load_fails_the_checkpoint_is_loaded_again(site: Site) -> None:
    """First of all: no version was installed before."""
    with site.trainer() as trainer:
        site.server.break_loader(1, site.tp - 1)
        site.train()
        with pytest.raises(CommitFailed, match="was loaded again"):
            trainer.send_weights(deadline_s=60)
        site.serves()


def test_the_server_says_what_the_reference_says(site: Site) -> None:
    site.serves()
    with site.trainer() as trainer:
        reports = [site.update(trainer) for _ in range(10)]
    assert [report.version for report in reports] == list(range(1, 11))


def test_logprobs_are_those_of_the_new_weights(site: Site) -> None:
    with site.trainer() as trainer:
        site.update(trainer)
    given = site.server.generate()["meta_info"]["output_token_logprobs"]
    with torch.no_grad():
        logits = site.model(torch.tensor([PROMPT + site.said])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    wanted = [float(row[token]) for row, token in zip(logits, site.said, strict=True)]
    assert [one[0] for one in given] == pytest.approx(wanted, abs=NEAR)


def test_it_says_what_a_server_says_that_was_started_with_the_new_checkpoint(
    site: Site, start: Callable[..., Server], tmp_path: Path
) -> None:
    if site.tp > 1:
        pytest.skip("with one worker each: memory")
    with site.trainer() as trainer:
        site.update(trainer)
    fresh = start(save(site.model, tmp_path), 1).wait()
    given, wanted = (one.generate()["meta_info"]["output_token_logprobs"] for one in (site.server, fresh))
    assert [one[1] for one in given] == [one[1] for one in wanted]
    assert [one[0] for one in given] == pytest.approx([one[0] for one in wanted], abs=NEAR)
    fresh.stop()


def test_differences_are_applied_to_what_is_installed(site: Site) -> None:
    with site.trainer(anchor_every=4) as trainer:
        assert site.update(trainer).kind == "full"
        for _ in range(3):
            with torch.no_grad():
                next(site.model.parameters())[:8] *= 1.5
            report = trainer.send_weights(deadline_s=60)
            assert report.kind == "delta"
            assert report.nbytes < 8192
            site.said, site.label = answer(site.model), str(report.version)
            site.serves()
        assert site.update(trainer).kind == "full"


@pytest.mark.parametrize(
    ("odd", "error"),
    [
        ("unknown", UnknownTensor), ("missing", Incomplete), ("larger", ShapeMismatch), ("smaller", ShapeMismatch),
        ("integers", ShapeMismatch),
    ],
)  # fmt: skip
def test_what_the_loader_would_not_take_is_refused_before(
    site: Site, odd: str, error: type[TransferQueueError]
) -> None:
    source = Odd(site.model)
    with site.trainer(source) as trainer:
        site.update(trainer)
        source.odd = odd
        with pytest.raises(error):
            trainer.send_weights(deadline_s=60)
        source.odd = ""
        site.serves()
        site.update(trainer)


def test_a_corrupt_bucket_is_found(site: Site) -> None:
    with site.trainer(kind=CORRUPT[site.transport]) as trainer:
        site.update(trainer)
        trainer.corrupt = True
        site.train()
        with pytest.raises(DigestMismatch):
            trainer.send_weights(deadline_s=60)
        trainer.corrupt = False
        site.serves()
        site.update(trainer)


@pytest.mark.parametrize("point", POINTS)
def test_a_trainer_is_killed(site: Site, point: str) -> None:
    with site.trainer() as trainer:
        site.update(trainer)
    seed, tied = 900 + POINTS.index(point), "tied" if site.tied else "untied"
    command = [sys.executable, "-m", "sglang_tests.dying", site.server.url, site.server.token, site.transport,
               str(seed), tied, point]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "here\n"
            if point == "finished":
                site.said, site.label = answer(drawn(seed, site.tied)), "1"
            if point != "session":  # the server is paused
                site.serves()  # also while an update is open, and while its bytes do not come
        finally:
            child.kill()
    with site.trainer() as trainer:
        site.serves()
        site.update(trainer)


@pytest.mark.parametrize("rank", [-1, 0, 1])
def test_a_load_that_fails_in_the_middle_is_undone(site: Site, rank: int) -> None:
    """In all workers, or in one of them: then the others go back too."""
    if rank >= site.tp:
        pytest.skip("no such worker")
    with site.trainer() as trainer:
        site.update(trainer)
        site.server.break_loader(1, rank)
        site.train()
        with pytest.raises(CommitFailed, match="was loaded again"):
            trainer.send_weights(deadline_s=60)
        site.serves()
        site.update(trainer)


def test_a_load_that_fails_goes_back_to_what_came_by_another_transport(site: Site) -> None:
    with site.trainer() as trainer:
        site.update(trainer)
    with site.trainer(transport=OTHER[site.transport]) as trainer:
        site.server.break_loader(1)
        site.train()
        with pytest.raises(CommitFailed, match="was loaded again"):
            trainer.send_weights(deadline_s=60)
        site.serves()
        site.update(trainer)


def test_a_load_that_cannot_be_undone_ends_with_the_next_version(site: Site) -> None:
    with site.trainer() as trainer:
        site.update(trainer)
        site.server.break_loader(2)
        site.train()
        with pytest.raises(CommitFailed, match="so did going back"):
            trainer.send_weights(deadline_s=60)
        assert site.server.health() == 200
        site.update(trainer)


@pytest.mark.parametrize("info", [{}, {"address": 3}, {"address": "tcp:127.0.0.1:1", "token": "t", "timeout_s": 1}])
def test_nonsense_harms_nothing(site: Site, info: dict[str, Any]) -> None:
    client = site.server.client()
    client.init_weight_transfer_engine(info)
    client.start_weight_update()
    client.update_weights({"version": "none", "timeout_s": 1})
    client.finish_weight_update(site.label)
    site.serves()
    with site.trainer() as trainer:
        site.update(trainer)


def test_a_server_without_our_loader_gets_no_call(start: Callable[..., Server], tmp_path: Path) -> None:
    model = drawn(5)
    server = start(save(model, tmp_path), 1, loaders=()).wait()
    with pytest.raises(NotSupported, match=LOADER):
        server.client().init_weight_transfer_engine({})
    assert server.say() == answer(model)
    server.stop()


def test_versions_do_not_add_up_in_a_workers_memory(site: Site) -> None:
    with site.trainer() as trainer:
        for _ in range(3):
            site.update(trainer)
        before = site.server.worker_nbytes()
        for _ in range(20):
            site.train()
            trainer.send_weights(deadline_s=60)
        site.update(trainer)
    grown = site.server.worker_nbytes() - before
    note(f"MiB that 21 versions add to a worker, TP = {site.tp}", grown / 2**20)
    assert grown < 10 * sum(one.nbytes for one in site.model.parameters())
