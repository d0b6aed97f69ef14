"""Updates of a real vLLM, good ones and bad ones. After each bad one the old weights answer and the next is good."""

from __future__ import annotations

import copy
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from transfer_queue.errors import (
    CommitFailed,
    DeadlineExceeded,
    DigestMismatch,
    Incomplete,
    ShapeMismatch,
    StaleBase,
    TransferQueueError,
    UnknownTensor,
)
from transfer_queue.weights import ModuleSource
from transfer_queue.weights.fleet import Fleet
from transfer_queue.weights.http import WeightSyncClient
from transfer_queue.weights.transport.deadline import Deadline
from transfer_queue.weights.transport.pending import PendingVersion
from vllm_tests.conftest import Site
from vllm_tests.dying import POINTS
from vllm_tests.figures import note
from vllm_tests.models import answer, drawn, save
from vllm_tests.processes import ROOT, TOKEN
from vllm_tests.servers import Server
from vllm_tests.sources import CORRUPT, Odd


def test_the_server_says_what_the_reference_says(site: Site) -> None:
    site.serves()
    with site.trainer() as trainer:
        reports = [site.update(trainer) for _ in range(10)]
    assert [report.version for report in reports] == list(range(1, 11))


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
        start = time.monotonic()
        with pytest.raises(error):
            trainer.send_weights(deadline_s=60)
        note(f"a refused update, TP = {site.tp}", time.monotonic() - start)
        source.odd = ""
        site.recovers(trainer)


def test_a_corrupt_bucket_is_found(site: Site) -> None:
    with site.trainer(kind=CORRUPT[site.transport]) as trainer:
        site.update(trainer)
        trainer.corrupt = True
        site.train()
        with pytest.raises(DigestMismatch):
            trainer.send_weights(deadline_s=60)
        trainer.corrupt = False
        site.recovers(trainer)


def test_a_difference_to_other_weights_is_refused(site: Site) -> None:
    with site.trainer(anchor_every=4) as trainer:
        site.update(trainer)
        other = copy.deepcopy(site.model)
        with torch.no_grad():
            next(other.parameters()).add_(1)
        before = PendingVersion(ModuleSource(other), trainer.version, trainer.epoch, keeps=True)
        before.read_alone(trainer._planned)
        base = before.settled()
        draft = PendingVersion(trainer._source, trainer.version + 1, trainer.epoch, base, keeps=True)
        with pytest.raises(StaleBase):
            trainer._send(draft, Deadline(60))
        site.recovers(trainer)
        trainer._base = base
        assert site.update(trainer).kind == "full"  # refused by the worker, and sent whole


@pytest.mark.parametrize("point", POINTS)
def test_a_trainer_is_killed(site: Site, point: str) -> None:
    with site.trainer() as trainer:
        site.update(trainer)
    seed, tied = 900 + POINTS.index(point), "tied" if site.tied else "untied"
    command = [sys.executable, "-m", "vllm_tests.dying", site.server.url, site.server.token, site.transport,
               str(seed), tied, point]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "here\n"
            if point == "finished":
                site.said, site.label = answer(drawn(seed, site.tied)), "1"
            site.serves()  # also while an update is open, and while its bytes do not come
        finally:
            child.kill()
    site.serves()
    start = time.monotonic()
    with site.trainer() as trainer:
        note(f"a new trainer is introduced after a kill, TP = {site.tp}", time.monotonic() - start)
        site.recovers(trainer)
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
        start = time.monotonic()
        with pytest.raises(CommitFailed, match="was loaded again"):
            trainer.send_weights(deadline_s=60)
        note(f"a commit that failed in the middle and was undone, TP = {site.tp}", time.monotonic() - start)
        site.recovers(trainer)


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
    client.update_weights([{"x": 1}] * site.tp)
    client.finish_weight_update()
    client.start_weight_update()
    client.finish_weight_update()
    site.serves()
    with site.trainer() as trainer:
        site.recovers(trainer)


def test_a_silent_worker_that_does_not_report_is_noticed(site: Site) -> None:
    with pytest.raises(DeadlineExceeded, match="1 of"), site.trainer(silent=site.tp + 1, timeout_s=1.0):
        pass
    with site.trainer() as trainer:
        site.recovers(trainer)


def test_a_late_server_gets_what_is_installed(
    site: Site, start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory
) -> None:
    if site.tp > 1:
        pytest.skip("with one worker each: memory")
    old = drawn(77)
    late = start(save(old, tmp_path_factory.mktemp("late")), "transfer_queue").wait()
    with site.trainer(anchor_every=3) as trainer:
        site.update(trainer)
        assert site.update(trainer).kind == "delta"
        assert late.say() == answer(old)
        version = trainer.join(late.client(), deadline_s=60)
        assert late.say() == site.said
        assert late.client().get_weight_version() == str(version) == site.label
        site.serves()
    both = WeightSyncClient([site.server.url, late.url], TOKEN, timeout_s=60)
    with site.trainer(client=both) as trainer:
        site.update(trainer)
        assert late.say() == site.said
        late.break_loader(1)
        site.train()
        with pytest.raises(CommitFailed, match="was loaded again"):
            trainer.send_weights(deadline_s=60)
        assert late.say() == site.said  # of two servers one has the new weights then: no label is true of both
        assert site.server.say() == answer(site.model)
        assert both.get_weight_version() == "unknown"
        site.update(trainer)
        assert late.say() == site.said
        assert both.get_weight_version() == site.label
    fleet = Fleet({"one": site.server.client(), "late": late.client()}, heartbeat_s=0.2)
    with site.trainer(client=fleet) as trainer:
        site.update(trainer)
        assert late.say() == site.said
        late.break_loader(1)
        site.update(trainer)  # goes on without it
        fleet.wait_ready(["one", "late"], 60)
        assert late.say() == site.said
        assert late.client().get_weight_version() == site.label
    fleet.close()
    late.stop()


def test_prefixes_that_were_cached_with_old_weights_are_not_used(site: Site) -> None:
    """vLLM keeps them over an update; our trainer has them cleared, unless told otherwise. Then a pause does."""
    client, prompt = site.server.client(), [7 + index % 300 for index in range(300)]
    with site.trainer() as trainer:
        for _ in range(2):
            site.update(trainer)
            assert site.server.say(prompt=prompt) == answer(site.model, prompt=prompt)
    with site.trainer(caches="keep") as trainer:
        site.update(trainer)
        assert site.server.say(prompt=prompt) != answer(site.model, prompt=prompt)
        client.pause_generation("abort")
        client.resume_generation()
        assert site.server.say(prompt=prompt) == answer(site.model, prompt=prompt)
