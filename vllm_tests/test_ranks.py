"""Shards of a trainer's ranks, straight into the workers of a real vLLM: each fetches what its loader takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_tests.models import answer, drawn, save
from vllm_tests.ranks import WORLD, altered, started
from vllm_tests.servers import Server


@pytest.mark.parametrize(
    ("tied", "factory"), [(False, False), (True, False), (True, True)], ids=["shards", "tied", "vllm's factory"]
)
def test_tensor_parallel_workers_fetch_each_byte_once(
    start: Callable[..., Server], tmp_path: Path, tied: bool, factory: bool
) -> None:
    """`factory`: what the ranks give is gathered by vLLM's own source, and dealt to them."""
    model = drawn(0, tied)
    server = start(save(model, tmp_path), "tq_tcp", 2).wait()
    model_nbytes = sum(tensor.nbytes for tensor in dict(model.named_parameters()).values())
    replicated = sum(one.nbytes for name, one in model.named_parameters() if "norm" in name)
    given = {"url": server.url, "token": server.token, "tied": tied, "factory": factory}
    with started(given) as send:
        before = 0
        for version, seed in enumerate([31, 32, 33], 1):
            reports = send(str(seed))
            assert [one["version"] for one in reports] == [version] * WORLD
            served = sum(one["served"] for one in reports)
            assert all(one["served"] for one in reports)
            assert model_nbytes <= served - before <= 1.05 * (model_nbytes + replicated)
            before = served
            assert server.say() == answer(drawn(seed, tied))
            assert server.client().get_weight_version() == str(version)
    server.stop()


@pytest.mark.parametrize("tied", [False, True])
def test_tensor_parallel_workers_are_sent_what_changed_in_their_pieces(
    start: Callable[..., Server], tmp_path: Path, tied: bool
) -> None:
    server = start(save(drawn(0, tied), tmp_path), "tq_tcp", 2).wait()
    given = {"url": server.url, "token": server.token, "tied": tied, "info": {"anchor_every": 10}}
    with started(given) as send:
        reports = send("31")
        assert [one["kind"] for one in reports] == ["full"] * WORLD
        before = whole = sum(one["served"] for one in reports)
        for row in (3, 9):
            reports = send(f"31 {row}")
            assert [one["kind"] for one in reports] == ["delta"] * WORLD
            served = sum(one["served"] for one in reports)
            assert 0 < served - before < whole / 20
            before = served
            assert server.say() == answer(altered(31, tied, row))
        server.break_loader(1)
        assert [one["error"] for one in send("31 5")] == ["CommitFailed"] * WORLD
        assert server.say() == answer(altered(31, tied, 9))  # made of the pieces before
        assert [one["kind"] for one in send("32")] == ["full"] * WORLD  # who has which version is not known
        assert server.say() == answer(drawn(32, tied))
    server.stop()


def test_a_draft_comes_in_slices_with_its_model(start: Callable[..., Server], tmp_path: Path) -> None:
    """It has the model's weights, so all of its tokens are accepted as long as every slice of it is right."""
    folder, model = save(drawn(0), tmp_path), drawn(0)
    settings = json.dumps({"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3})
    server = start(folder, "tq_tcp", 2, "--speculative-config", settings).wait()
    model_nbytes = sum(one.nbytes for one in model.parameters())
    replicated = sum(one.nbytes for name, one in model.named_parameters() if "norm" in name)
    with started({"url": server.url, "token": server.token, "tied": False, "draft": True}) as send:
        before = 0
        for seed in (31, 32):
            served = sum(one["served"] for one in send(str(seed)))
            assert 2 * model_nbytes <= served - before <= 2.1 * (model_nbytes + replicated)
            before, counted = served, drafted(server)
            assert server.say() == answer(drawn(seed))
            proposed, accepted = (now - then for now, then in zip(drafted(server), counted, strict=True))
            assert accepted == proposed > 0
    server.stop()


def drafted(server: Server) -> list[float]:
    """How many tokens the draft has proposed so far, and how many of them were accepted."""
    _, text = server.ask("GET", "/metrics")
    names = [f"vllm:spec_decode_num_{one}_tokens_total" for one in ("draft", "accepted")]
    found = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("vllm")}
    return [found[name] for name in names]


def test_a_server_with_another_tensor_parallel_size_joins_between_versions(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    """Its worker takes the pieces that were cut for two, and from then on those that are cut for all three."""
    folder = save(drawn(0), tmp_path)
    server = start(folder, "tq_tcp", 2).wait()
    given = {"url": server.url, "token": server.token, "tied": False, "info": {"anchor_every": 10}, "fleet": True}
    with started(given) as send:
        send("31")
        send("31 3")
        late = start(folder, "tq_tcp", 1).wait()
        send(f"join {late.url}")
        assert late.say() == server.say() == answer(altered(31, False, 3))
        for text, model in (("31 9", altered(31, False, 9)), ("32", drawn(32))):
            assert next(one["version"] for one in send(text)) > 2
            assert late.say() == server.say() == answer(model)
    late.stop()
    server.stop()
