"""What one rank fetched, for its model-parallel group: four processes over gloo, DP 2 x TP 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Child, until
from rollouts import SCHEMA, N, rollout

import transfer_queue as tq
from transfer_queue.bridge import RolloutBridge

WORLD, TP = 4, 2

RANK = """
    import json, sys
    import torch, torch.distributed as dist
    sys.path.insert(0, {helpers!r})
    import transfer_queue as tq
    from transfer_queue.bridge import RolloutBridge
    from transfer_queue.bridge.ranks import fetch_together
    from rollouts import SCHEMA

    torch.set_num_threads(1)
    rank = {rank}
    dist.init_process_group("gloo", init_method="file://{store}", rank=rank, world_size=4)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    tq.init()
    bridge = RolloutBridge(tq.get_client(), SCHEMA)
    for line in sys.stdin:
        step, how, columns, part, timeout_s, lease_s = json.loads(line)
        slices = {{"experts": tq.Slice.of_rank(rank % 2, 2)}} if part else None
        try:
            found = fetch_together(bridge, group, step, "actor", rank // 2, 2, columns=columns, how=how,
                                   slices=slices, lease_s=lease_s, timeout_s=timeout_s)
            plain = {{
                name: [None if row is None else {{key: value.tolist() for key, value in row.items()}}
                       if isinstance(row, dict) else row.tolist() for row in rows]
                for name, rows in found.columns.items()
            }}
            print(json.dumps([plain, found.schedule["partition"]]), flush=True)
            if lease_s:
                print(found.meta.lease, flush=True)
                if sys.stdin.readline() == "ack\\n":
                    bridge.ack(found)
        except Exception as error:
            print(json.dumps([type(error).__name__, str(error)]), flush=True)
    tq.close()
    dist.destroy_process_group()
"""


@pytest.fixture
def ranks(client: tq.TransferQueueClient, child: Callable[[str], Child], tmp_path: Path) -> list[Child]:
    helpers = str(Path(__file__).parents[1] / "helpers")
    return [child(RANK.format(rank=rank, store=tmp_path / "store", helpers=helpers)) for rank in range(WORLD)]


def ask(ranks: list[Child], *what: Any, lease_s: float | None = None) -> list[Any]:
    for one in ranks:
        one.say(json.dumps([*what, lease_s]))
    return [json.loads(one.line()) for one in ranks]


@pytest.mark.parametrize("how", ["broadcast", "read"])
def test_all_ranks_of_a_group_have_what_the_first_fetched(
    client: tq.TransferQueueClient, ranks: list[Child], how: str
) -> None:
    batch = rollout()
    RolloutBridge(client, SCHEMA).put("step", batch, dp_size=2)
    found = ask(ranks, "step", how, None, False, 20)
    for rank, (columns, rows) in enumerate(found):
        assert rows == list(range(N // 2 * (rank // TP), N // 2 * (rank // TP + 1)))
        for name in ("tokens", "loss_masks", "log_probs", "rewards", "done"):
            assert columns[name] == [batch[name][row] for row in rows]
        assert columns["experts"] == [batch["experts"][row].tolist() for row in rows]
        was = [batch["images"][row] for row in rows]
        assert columns["images"] == [None if one is None else {"pixels": one["pixels"].tolist()} for one in was]


def test_ranks_that_read_by_themselves_read_their_parts(client: tq.TransferQueueClient, ranks: list[Child]) -> None:
    batch = rollout()
    RolloutBridge(client, SCHEMA).put("step", batch, dp_size=2)
    for rank, (columns, rows) in enumerate(ask(ranks, "step", "read", ["experts"], True, 20)):
        for got, row in zip(columns["experts"], rows, strict=True):
            length = len(batch["experts"][row])
            part = slice(length * (rank % TP) // 2, length * (rank % TP + 1) // 2)
            assert got == batch["experts"][row][part].tolist()


def test_all_ranks_hear_of_it_when_the_first_gets_nothing(client: tq.TransferQueueClient, ranks: list[Child]) -> None:
    batch = rollout()
    RolloutBridge(client, SCHEMA).put("step", batch, dp_size=2)
    found = ask(ranks, "step", "broadcast", ["values"], False, 0.1)
    assert [name for name, _ in found] == ["DeadlineExceeded"] * WORLD
    assert len({text for _, text in found}) <= 2
    found = ask(ranks, "step", "broadcast", ["tokens"], False, 20)  # and the group works on
    assert [len(columns["tokens"]) for columns, _ in found] == [N // 2] * WORLD
    assert torch.tensor(found[3][0]["tokens"][0]).tolist() == batch["tokens"][5]


def test_the_first_rank_has_the_rows_on_a_lease(client: tq.TransferQueueClient, ranks: list[Child]) -> None:
    batch = rollout()
    bridge = RolloutBridge(client, SCHEMA)
    bridge.put("step", batch, dp_size=2)
    ask(ranks, "step", "broadcast", ["tokens"], False, 20, lease_s=60)
    leases = [int(one.line()) for one in ranks]
    assert [bool(lease) for lease in leases] == [True, False] * 2
    ranks[0].say("ack")  # and the first of the other group dies
    ranks[2].kill()
    assert len(bridge.fetch("step", "actor", 1, 2, columns=["tokens"], timeout_s=20)) == N // 2
    until(lambda: bool(client.check_consumption_status("actor", "step")), "the first group's acknowledgement")
