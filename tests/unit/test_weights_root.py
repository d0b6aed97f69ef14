"""A server of weights reads folders below its own root only, whatever a trainer says over the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from weights import Net, drawn

from transfer_queue.errors import InvalidInput, NotSupported, TransferQueueError
from transfer_queue.weights import Control, InPlace, Receiver, StateDictSource
from transfer_queue.weights.http import WeightSyncClient, serve
from transfer_queue.weights.transport.disk import DiskEngine, DiskTrainer

ROOM_S = 20.0
Start = Callable[..., WeightSyncClient]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TQ_WEIGHTS_ROOT", "TQ_TOKEN", "TQ_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a server over HTTP whose engine reads folders; returns its client."""
    started: list[Any] = []

    def one(weights_root: Path | str = "", **engine: Any) -> WeightSyncClient:
        receiver = Receiver(InPlace(Net()))
        control = Control(DiskEngine(receiver, **engine), receiver)
        more = {"weights_root": str(weights_root)} if weights_root else {}
        started.append(serve(control, **more))
        return WeightSyncClient(started[-1].url, started[-1].token)

    yield one
    for server in started:
        server.close()


def trainer(folder: Path, client: Any) -> Any:
    info = {"folder": str(folder), "bucket_nbytes": 128, "sync": False}
    return DiskTrainer.trainer_init(info, client=client, source=StateDictSource(drawn(Net(), 1)))


def written(folder: Path) -> Path:
    """A version in that folder, sent to a receiver of this process, which needs no root."""
    engine = DiskEngine(Receiver(InPlace(Net())))
    client = SimpleNamespace(
        init_weight_transfer_engine=engine.init_transfer_engine,
        start_weight_update=engine.start_weight_update,
        update_weights=engine.update_weights,
        finish_weight_update=lambda weight_version=None: engine.finish_weight_update(),
    )
    assert trainer(folder, client).send_weights(deadline_s=ROOM_S).version == 1
    return folder


def newest(client: WeightSyncClient, folder: Path | str) -> None:
    """Have the server take the newest version in that folder."""
    client.init_weight_transfer_engine({"folder": str(folder)})
    client.start_weight_update()
    client.update_weights({"newest": True, "timeout_s": ROOM_S})
    client.finish_weight_update()


def test_a_trainer_sends_through_a_folder_below_the_root(start: Start, tmp_path: Path) -> None:
    client = start(tmp_path)
    assert trainer(tmp_path / "run", client).send_weights(deadline_s=ROOM_S).version == 1
    assert client.get_weight_version() == "1"


@pytest.mark.parametrize("where", ["http", "engine", "variable"])
def test_a_root_may_be_given_in_three_places(
    where: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, outside = written(tmp_path / "root" / "run"), written(tmp_path / "other")
    if where == "variable":
        monkeypatch.setenv("TQ_WEIGHTS_ROOT", str(tmp_path / "root"))
    client = {"http": lambda: start(tmp_path / "root"), "engine": lambda: start(root=tmp_path / "root")}.get(
        where, start
    )()
    with pytest.raises(InvalidInput, match="not below"):
        newest(client, outside)
    newest(client, inside)
    newest(client, "run")  # of the root, not of the folder the server was started in
    assert client.get_weight_version() == "1"


@pytest.mark.parametrize("path", ["{root}/../other", "../other", "/", "{root}-2", "{root}/link", "{root}/link/sub"])
def test_no_path_leads_out_of_the_root(path: str, start: Start, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for outside in (tmp_path / "other", tmp_path / "root-2", tmp_path / "other" / "sub"):
        written(outside)
    (root / "link").symlink_to(tmp_path / "other")
    with pytest.raises(InvalidInput, match="not below"):
        newest(start(root), path.format(root=root))


@pytest.mark.parametrize("linked", ["version", "shard", "manifest"])
def test_links_within_a_folder_lead_nowhere_either(linked: str, start: Start, tmp_path: Path) -> None:
    outside, inside = written(tmp_path / "other"), written(tmp_path / "root" / "run")
    there, here = next(outside.glob("v*")), next(inside.glob("v*"))
    if linked == "version":
        (inside / there.name).symlink_to(there)
        (inside / "LATEST").write_text(there.name)
    else:
        pattern = "model-00001-*" if linked == "shard" else "manifest.json"
        target = next(here.glob(pattern))
        target.unlink()
        target.symlink_to(next(there.glob(pattern)))
    client = start(tmp_path / "root")
    with pytest.raises(TransferQueueError, match="not below"):
        newest(client, inside)
    assert client.get_weight_version() == "default"


def test_a_server_without_a_root_takes_no_folder(start: Start, tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match="weights_root, or TQ_WEIGHTS_ROOT"):
        newest(start(), written(tmp_path / "run"))
