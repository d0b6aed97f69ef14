"""Requests that run while a version is committed, and what is cached of those before."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sglang_tests.conftest import Site
from transfer_queue.integrations.sglang.client import PauseMode
from vllm_tests.models import PROMPT, answer

MANY = 400
LONG = [7 + index % 300 for index in range(300)]


@contextmanager
def streamed(site: Site) -> Iterator[list[dict[str, Any]]]:
    """A long generation that has begun; in the end all that came of it, event by event."""
    events: list[dict[str, Any]] = []
    begun = threading.Event()

    def follow() -> None:
        link = http.client.HTTPConnection("127.0.0.1", site.server.port, timeout=120)
        headers = {"Authorization": f"Bearer {site.server.token}", "Content-Type": "application/json"}
        sampling = {"temperature": 0, "max_new_tokens": MANY, "ignore_eos": True}
        link.request(
            "POST", "/generate", json.dumps({"input_ids": PROMPT, "sampling_params": sampling, "stream": True}), headers
        )
        for line in link.getresponse():
            if line.startswith(b"data: {"):
                events.append(json.loads(line[6:]))
                if len(events) > 5:
                    begun.set()
        link.close()

    thread = threading.Thread(target=follow)
    thread.start()
    assert begun.wait(60)
    yield events
    thread.join(120)
    assert not thread.is_alive()


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_a_request_that_runs_goes_on_with_the_new_weights(site: Site, pause: PauseMode) -> None:
    with site.trainer() as trainer:
        for _ in range(2):  # a label unlike the next one
            site.update(trainer)
    before = site.said
    with site.trainer(pause=pause) as trainer, streamed(site) as events:
        site.train()
        report = trainer.send_weights(deadline_s=60)
    last = events[-1]
    said, parts = last["output_ids"], last["meta_info"]["weight_versions"]
    at = parts[-1]["start"]
    assert [one["version"] for one in parts] == [site.label, str(report.version)]
    assert (len(said), 0 < at < MANY) == (MANY, True)
    assert said[: min(at, len(before))] == before[:at]
    if pause == "retract":  # computed anew: as if all before had been the prompt
        assert said[at : at + 20] == answer(site.model, 20, PROMPT + said[:at])
    with site.trainer() as trainer:
        site.update(trainer)


def test_a_request_that_runs_ends_where_that_was_asked_for(site: Site) -> None:
    with site.trainer(pause="abort") as trainer:
        with streamed(site) as events:
            site.train()
            report = trainer.send_weights(deadline_s=60)
        assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        site.said, site.label = answer(site.model), str(report.version)
        site.serves()


def test_prefixes_that_were_cached_with_old_weights_are_not_used(site: Site) -> None:
    with site.trainer() as trainer:
        for _ in range(2):
            site.update(trainer)
            found = site.server.generate(prompt=LONG)
            assert (found["output_ids"], found["meta_info"]["cached_tokens"]) == (answer(site.model, prompt=LONG), 0)
            assert site.server.generate(prompt=LONG)["meta_info"]["cached_tokens"] == len(LONG) - 1


def test_prefixes_stay_where_requests_go_on_in_place(site: Site) -> None:
    with site.trainer(pause="in_place") as trainer:
        site.server.say(prompt=LONG)
        site.train()
        trainer.send_weights(deadline_s=60)
        assert site.server.generate(prompt=LONG)["meta_info"]["cached_tokens"] == len(LONG) - 1
    with site.trainer() as trainer:
        site.update(trainer)
