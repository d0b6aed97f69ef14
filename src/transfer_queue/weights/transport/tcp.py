"""Buckets over TCP: from the trainer, from other receivers of the update, or from replicas that have installed it.

Receivers on other hosts than the trainer's give each other what they have staged (`tracker`, `peers`).

A replica that comes late loads from all peers at once: it asks each for what it has, takes the newest version, and
fetches every bucket from whoever is free. Bytes are received straight into staging memory and checked there; damaged or
late buckets are asked for elsewhere. Nobody has to trust a peer's bytes, but whoever knows the token may serve.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import numpy as np
import torch

from transfer_queue.errors import DigestMismatch, InvalidInput, TransferQueueError, error_from_code
from transfer_queue.weights.receive.receiver import Receiver, VersionInfo
from transfer_queue.weights.transport import protocol as p
from transfer_queue.weights.transport.base import Engine
from transfer_queue.weights.transport.clients import Client
from transfer_queue.weights.transport.deadline import Deadline, checked_s
from transfer_queue.weights.transport.faults import system_faults
from transfer_queue.weights.transport.fetching import STALL_S, Source, TrainerLink, fetch, newest_of
from transfer_queue.weights.transport.group_meeting import GroupMeeting, MeetingPlace
from transfer_queue.weights.transport.holder import Holder
from transfer_queue.weights.transport.info import Info, InitInfo, Outcome, UpdateInfo, key_of, settings_of
from transfer_queue.weights.transport.peers import Sharing
from transfer_queue.weights.transport.pending import Base, PendingVersion, SyncReport
from transfer_queue.weights.transport.ranks import (
    BEYOND_S,
    GIVE_WHOLE,
    DecidedUpdate,
    Planned,
    RankFault,
    RankMeeting,
    RankOffer,
    Sealed,
)
from transfer_queue.weights.transport.serving import WeightServer, gone, listen_tcp
from transfer_queue.weights.transport.tracker import UPLOADS, Tracker
from transfer_queue.weights.transport.trainer import TrainerEngine, TrainerInfo
from transfer_queue.weights.transport.version_store import VersionStore, newest_key
from transfer_queue.weights.transport.wants import Specs, WantTables
from transfer_queue.weights.version.boxes import whole
from transfer_queue.weights.version.manifest import Count, Manifest
from transfer_queue.weights.version.packing import BUCKET_NBYTES, Plan, nbytes_of, pack_into, plan
from transfer_queue.weights.version.pieces import copy_box
from transfer_queue.weights.version.plans import ShardPlan, plan_pieces
from transfer_queue.weights.version.sealing import PackedCells
from transfer_queue.weights.version.shard_table import ShardTable
from transfer_queue.weights.version.sources import (
    TensorMeta,
    WeightSource,
    parts_of,
    table_of,
    weights_called,
)
from transfer_queue.weights.version.tensor_memory import room, warm
from transfer_queue.wire.address import Address, candidates, is_loopback
from transfer_queue.wire.token import checked_token

NUM_STREAMS = 2
NUM_SHARED = 64  # buckets of a version that receivers give each other, about: each goes on once it is whole
MIN_SHARED_NBYTES = 4 << 20
TELL_S = 5.0  # of telling the other ranks how the last update ended


class TcpTrainerInfo(TrainerInfo, kw_only=True):
    """`keep`: versions held in memory. `token`: made up when empty; the control plane brings it to the receivers.

    `warm`: memory is touched when the two meet, up to 1 GiB on each side, not by the first updates.

    `rank` of `world`: every rank of the trainer is to call `trainer_init` and `send_weights`, and gives what it holds;
    rank 0 leads, and only its client is used. `meet` and `token`, the address and the token of rank 0, are given on all
    ranks, or on none: the store of torch's process group brings them then. `timeout_s` has to cover the slowest rank.
    A rank is of the run of the rank 0 that it met first, or of its own `run_id`, and refused by those of others.

    `peers`: whether receivers give each other what they have verified during an update. Default: those on other hosts
    do. `uploads`: how many buckets a rank gives such receivers at once. `bucket_nbytes`: 0 makes it 256 MiB, or, where
    receivers may give each other buckets, a 64th of the model (4 MiB at least)."""

    host: str = "127.0.0.1"
    port: int = 0
    token: str = ""
    keep: int = 2
    warm: bool = True
    rank: int = 0
    world: int = 1
    meet: str = ""
    bucket_nbytes: Count = 0
    peers: bool | None = None
    uploads: int = UPLOADS


class TcpInfo(InitInfo, kw_only=True):
    """`address` may be empty for a replica that only joins through peers. A bucket that stalls for `stall_s` is asked
    for again, elsewhere if there is another peer. `buckets`: sizes to have memory ready for. `specs` names the tensors
    that are to come, where the trainer can be asked for them ("": it cannot). `addresses`: further ones of the
    trainer's host; the first at which it is reached is kept. `peers`: whether to take part in updates whose receivers
    give each other buckets; None: if the trainer is on another host."""

    address: str = ""
    token: str
    streams: int = NUM_STREAMS
    stall_s: float = STALL_S
    buckets: tuple[Count, ...] = ()
    specs: str = ""
    addresses: tuple[str, ...] = ()
    peers: bool | None = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_s(self.stall_s, 0.0)


class TensorStore(VersionStore[list[torch.Tensor]]):
    """The newest versions, packed, in this process's memory."""

    def bucket(self, key: str, index: int) -> torch.Tensor:
        buckets = self.content(key)
        if not 0 <= index < len(buckets):
            raise InvalidInput(f"bucket {index} of {len(buckets)}")
        return buckets[index]

    def lend(self, key: str) -> tuple[int, Callable[[], None]]:
        raise InvalidInput("memory is not lent over TCP")


class TcpTrainer(TrainerEngine):
    init_form = TcpTrainerInfo

    def __init__(self, info: TcpTrainerInfo, client: Client, source: WeightSource) -> None:
        if info.token and not is_loopback(info.host):
            checked_token(info.token, "token")
        super().__init__(info, client, source)
        self.token = info.token or secrets.token_urlsafe(24)
        self.store = TensorStore(info.keep)
        self._plan: tuple[object, list[ShardPlan]] | None = None  # with what it was made for
        self._ranks = RankMeeting(info.world, self.run_id) if info.world > 1 else None
        self._turns.in_turn |= self._ranks is not None
        self._led: tuple[str, ...] = ()  # the keys of what several ranks are giving
        self._holders: list[str] = []  # of several ranks, by rank, the addresses of those that gave the last version
        self._wants = WantTables(Specs.of(source.specs(), source.aliases()))
        may_share = info.peers or (info.peers is None and not is_loopback(info.host))
        self._tracker = Tracker(info.uploads) if may_share else None
        is_warm = info.warm and info.world == 1
        self._expected = self._placed(source).buckets if is_warm else ()
        warm(self._expected, info.keep + 1)
        listening, self.address = listen_tcp(info.host, info.port)  # last of all: what fails before leaves no server
        self._server = WeightServer(listening, self.token, self.store, self._wants, self._ranks, self._tracker)
        self.reports.come_to(self._server)

    @classmethod
    @system_faults()
    def trainer_init(cls, init_info: Info, *, client: Client | None, source: WeightSource) -> Any:
        """Of rank 0 (or the only one): see `TrainerEngine`. Of another rank: a `Holder`, once rank 0 is there; its
        `send_weights` takes part in those of rank 0, its `client` is not used."""
        info = settings_of(init_info, cls.init_form)
        if not 0 <= info.rank < info.world:
            raise InvalidInput(f"rank {info.rank} of {info.world}")
        if info.world > 1 and bool(info.meet) != bool(info.token):
            raise InvalidInput("several ranks: give `meet` and `token` on every rank, or neither on any")
        meeting = GroupMeeting(info.rank, info.world) if info.world > 1 and not info.meet else None
        place, deadline = MeetingPlace(info.meet, info.token), Deadline(info.timeout_s)
        if info.rank:
            if meeting is not None:
                place = meeting.find(info.timeout_s + BEYOND_S)  # rank 0 may need all of its time
            holder = Holder(info, place.address, place.token, source)
            holder.meet()
            return holder
        made: TcpTrainer | None = None
        try:
            if client is None:
                raise InvalidInput("rank 0 needs a client for the receivers")
            made = super().trainer_init(init_info, client=client, source=source)
            if meeting is not None:
                meeting.tell(MeetingPlace(made.address, made.token), deadline)
        except BaseException as error:  # an interrupt too: the others wait for what is told here
            try:
                if meeting is not None:
                    meeting.tell_fault(error)
            finally:
                if made is not None:
                    made.shutdown()
            raise
        return made

    def receivers_info(self) -> dict[str, Any]:
        peers = False if self._tracker is None else self.info.peers
        found = {"address": self.address, "token": self.token, "buckets": list(self._expected), "peers": peers}
        port = p.address_of(self.address, "").port
        others = [str(Address(host=host, port=port)) for host in candidates(self.info.host)]
        found["addresses"] = [one for one in others if one != self.address]
        return {**found, "specs": self._wants.key}

    @property
    def num_served_nbytes(self) -> int:
        """Bytes of buckets that receivers have fetched from this rank."""
        return self._server.num_served_nbytes

    def _conclude(self, outcome: SyncReport | TransferQueueError) -> None:
        if self._ranks is None:
            return
        error = outcome if isinstance(outcome, TransferQueueError) else None
        led, self._led = self._led, ()
        if error is None or ("" in self._newest and key_of(self._newest[""]) in led):
            told = (
                DecidedUpdate(outcome)
                if isinstance(outcome, SyncReport)
                else DecidedUpdate(fault=RankFault.of(outcome))
            )
            self._ranks.answer([msgspec.json.encode(told)] * (self.info.world - 1))
        self._ranks.end(error)

    def _publish(self, draft: PendingVersion, deadline: Deadline) -> Manifest:
        manifest = self._stored(draft, deadline)
        self._share(manifest)
        return manifest

    def _stored(self, draft: PendingVersion, deadline: Deadline) -> Manifest:
        if self._ranks is not None and draft.adapter is None:
            return self._publish_ranks(self._ranks, draft, deadline)
        if draft.adapter is None and (draft.keeps or self._wants.tables()):
            return self._publish_cells(draft)
        manifest, buckets = self._packed_whole(draft)
        self.store.add(manifest, buckets)
        return manifest

    def _give(self, manifest: Manifest, buckets: list[torch.Tensor]) -> None:
        self.store.add(manifest, buckets, self._holders)

    def _follow(self, draft: PendingVersion) -> Base | None:
        """The buckets are written where they lie, unless a late receiver reads them."""
        is_read = draft.is_ahead and draft.base is not None and not self.store.take_back(draft.base.manifest)
        found = draft.settled(copy=is_read)
        if found is not None and draft.changes is None:
            self._give(found.manifest, found.anchor.buckets)
        return found

    def _keep(self, draft: PendingVersion) -> None:
        """Who comes late is given all of a version also where a difference was sent: it is here, packed."""
        super()._keep(draft)
        taken = self._newest.get("")
        if self._base is not None and taken is not None and taken.kind == "delta":
            whole = self._newest[""] = self._base.manifest
            self.store.withdraw(taken)
            self._give(whole, self._base.anchor.buckets)
            self.store.decide(whole)

    def _pack_again(self, draft: PendingVersion, deadline: Deadline) -> Manifest:
        manifest = super()._pack_again(draft, deadline)
        if self._ranks is not None:
            self._ranks.answer([GIVE_WHOLE] * (self.info.world - 1))
            self._ranks.gather("served", deadline)
        self._share(manifest)
        return manifest

    def _share(self, manifest: Manifest) -> None:
        """Receivers may give each other what they fetch of it, until it is decided or given up."""
        if self._tracker is not None:
            self._tracker.begin(manifest)

    def _packed_whole(self, draft: PendingVersion) -> tuple[Manifest, list[torch.Tensor]]:
        where = self._placed(draft.source)
        buckets = [room(nbytes) for nbytes in where.buckets]
        return draft.seal(where, pack_into(draft.source, where, buckets)), buckets

    def _placed(self, source: WeightSource) -> Plan:
        specs = source.specs()
        return plan(specs, self._bucket_nbytes(specs))

    def _bucket_nbytes(self, specs: list[TensorMeta]) -> int:
        if self.info.bucket_nbytes or self._tracker is None:
            return int(self.info.bucket_nbytes) or BUCKET_NBYTES
        return min(BUCKET_NBYTES, max(MIN_SHARED_NBYTES, -(-nbytes_of(specs) // NUM_SHARED)))

    def _publish_ranks(self, ranks: RankMeeting, draft: PendingVersion, deadline: Deadline) -> Manifest:
        """Lead the ranks through `ranks`' steps until all of them have what they give where it can be fetched."""
        ranks.begin()
        offers = [msgspec.json.decode(body, type=RankOffer) for body in ranks.gather("offer", deadline)]
        mine = table_of(draft.source)
        for rank, offer in enumerate(offers, 1):
            if offer.fault is not None:
                raise error_from_code(offer.fault.code, f"rank {rank}: {offer.fault.text}")
            if offer.version not in (None, draft.version):
                raise InvalidInput(f"rank {rank} sends version {offer.version}, rank 0 {draft.version}")
        tables = [mine, *(ranks.table(rank, offer) for rank, offer in enumerate(offers, 1))]
        plans = self._planned(tables)
        base = "" if draft.base is None else key_of(draft.base.manifest)
        compares = draft.compares(tables, plans) and all(offer.base == base for offer in offers)
        newest = key_of(self._newest[""]) if "" in self._newest else ""
        planned = [Planned(ranks.turn, draft.version, one, compares, newest) for one in plans[1:]]
        ranks.answer([msgspec.json.encode(one) for one in planned])
        packed = [draft.read(mine, parts_of(draft.source), plans[0], compares=compares)]
        others = ranks.gather("packed", deadline)
        for table, where, body in zip(tables[1:], plans[1:], others, strict=True):
            packed.append(msgspec.json.decode(body, type=PackedCells))
            packed[-1].check(len(table), where, compares=compares)
        manifest = draft.seal_cells(tables, plans, packed)
        assert draft.whole is not None
        firsts = zip(_firsts(manifest, len(plans)), _firsts(draft.whole, len(plans)), strict=True)
        keys = self._led = key_of(manifest), key_of(draft.whole)
        ranks.answer([msgspec.json.encode(Sealed(keys[0], first, keys[1], whole)) for first, whole in list(firsts)[1:]])
        ranks.gather("served", deadline)
        self._holders = [self.address, *(offer.address for offer in offers)]
        self._give(manifest, draft.buckets)
        return manifest

    def _planned(self, tables: list[ShardTable]) -> list[ShardPlan]:
        """Who gives what; the plan before, as long as shards and wants stay what they were."""
        wants = self._wants.tables()
        asked = ([table.key for table in tables], list(wants))
        if self._plan is None or self._plan[0] != asked:
            bucket_nbytes = self._bucket_nbytes(self._source.specs())
            self._plan = (asked, plan_pieces(tables, list(wants.values()), bucket_nbytes))
        return self._plan[1]

    def _decide(self, manifest: Manifest) -> None:
        """Who comes late while a difference is being committed is given the whole version before it (`_keep`)."""
        if manifest.kind != "delta":
            self.store.decide(manifest)
        self._end(manifest)

    def _withdraw(self, manifest: Manifest) -> None:
        self.store.withdraw(manifest)
        self._end(manifest)

    def _end(self, manifest: Manifest) -> None:
        if self._tracker is not None:
            self._tracker.end(manifest)

    def _close(self) -> None:
        if self._ranks is not None:
            self._ranks.close(TELL_S)
        if self._tracker is not None:
            self._tracker.close()
        self._server.close()


def _firsts(manifest: Manifest, world: int) -> list[int]:
    """The number of each rank's first bucket."""
    holders = np.array([] if manifest.holders is msgspec.UNSET else manifest.holders, np.int64)
    return np.searchsorted(holders, np.arange(world)).tolist()


class TcpEngine(Engine):
    trainer = TcpTrainer
    init_form = TcpInfo

    def __init__(self, receiver: Receiver, *, host: str = "", **more: Any) -> None:
        """`host`: where this receiver gives others what it has staged, if not at its end of the connection to the
        trainer."""
        super().__init__(receiver, **more)
        self._sharing = Sharing(receiver, host)
        self._may_share = False  # what is fetched now
        self._control = TrainerLink()
        self._token = self._peers_token = ""  # of the trainer, and of other replicas where that is another one
        self._streams, self._stall_s = NUM_STREAMS, STALL_S
        self._sources: list[Source] = []
        self._expected: tuple[int, ...] = ()  # sizes of buckets that memory was made ready for
        self._serving: WeightServer | None = None

    def _connect(self, info: TcpInfo) -> None:
        self._control.close()
        self._token, self._streams, self._stall_s = info.token, info.streams, info.stall_s
        if self._serving is not None and info.token and not self._peers_token:
            self._serving.token = info.token  # which others have from this trainer too
        where = [p.address_of(one, info.token) for one in (info.address, *info.addresses) if one]
        self._control.address = where[0] if where else None
        if where:
            met = self._control.meet(where, info.timeout_s)
            try:
                self._control.address = met.address
                self._sharing.open(met, info.token, info.peers)
            finally:
                met.close()
        if info.address and info.specs:
            due = Deadline(info.timeout_s)
            wants = self._control.tell_wants(info.specs, self.receiver.wants, self._blank.who, self.rank, due)
            if wants is not None:
                return  # what comes is smaller than all of it, in buckets of other sizes
        if info.buckets != self._expected:
            self._expected = info.buckets
            warm(info.buckets, 2)  # one that is live and one that comes

    def _find(self, info: UpdateInfo, deadline: Deadline) -> Manifest:
        manifest = self._control.manifest(info.key, deadline)
        self._sources = self._control.holders(manifest, self._token, deadline)
        self._may_share = self._sharing.takes(manifest)
        return manifest

    def _newest(self, deadline: Deadline, label: str = "") -> Manifest:
        manifest = self._control.manifest(newest_key(label), deadline)
        self._sources = self._control.holders(manifest, self._token, deadline)
        self._may_share = False
        return manifest

    def join_peers(self, peers: Sequence[str], *, timeout_s: float) -> VersionInfo:
        """Install the newest version that these replicas (`serve_installed`) have, whether the trainer lives or not.

        Of several runs, the one that most of them have. `ServiceUnavailable` when none has a version."""
        addresses = [p.address_of(one, self._peers_token or self._token) for one in peers]

        def find(deadline: Deadline) -> Manifest:
            manifest, have_it = newest_of(addresses, deadline, self._stall_s)
            self._sources = [Source(one) for one in have_it]
            self._may_share = False
            return manifest

        with self._busy:
            return self._install(find, Deadline(timeout_s))

    def _fetch(self, manifest: Manifest, wanted: list[int], deadline: Deadline) -> None:
        sources, stall_s = self._sources, self._stall_s
        if self._may_share:
            wanted = self._sharing.fetch(manifest, wanted, self._control, sources, self._streams, deadline, stall_s)
        if wanted:
            stage, session = self.receiver.stage, self.receiver.session
            fetch(manifest, wanted, sources * self._streams, stage, deadline, stall_s, session)

    def _work(self) -> AbstractContextManager[None]:
        return self._control.work()

    def _interrupt(self) -> None:
        self._control.interrupt()

    def _tell(self, outcome: Outcome, deadline: Deadline) -> None:
        self._control.tell(outcome, deadline)

    def serve_installed(self, host: str = "127.0.0.1", port: int = 0, token: str = "") -> str:
        """Give what is installed, now and later, to other replicas, until `shutdown`; the address to give them.

        `token`: theirs; by default that of the trainer that was met last. A bucket is copied out of the live weights
        between commits, and checked: weights that were changed since are not sent."""
        if self._serving is None:
            self._peers_token = token
            listening, self._served_at = listen_tcp(host, port)
            self._serving = WeightServer(listening, token or self._token, Installed(self))
        return self._served_at

    @property
    def num_served_nbytes(self) -> int:
        """Bytes of buckets that other receivers have fetched here during updates."""
        return self._sharing.num_served_nbytes

    def _close(self) -> None:
        self._control.leave()
        self._sharing.close()
        if self._serving is not None:
            self._serving.close()
            self._serving = None


class Installed:
    """The live weights of an engine, packed when asked for: all buckets, whichever ranks they came from."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def _whole(self, key: str) -> Manifest:
        found = self._engine._whole
        info = self._engine.receiver.installed()
        if found is None or info.dirty or (found.version, found.root) != (info.version, info.root):
            raise gone(key)
        if key not in ("", key_of(found)):
            raise gone(key)
        return found

    def manifest(self, key: str) -> bytes:
        return self._whole(key).encode()

    def bucket(self, key: str, index: int) -> torch.Tensor:
        manifest = self._whole(key)
        if not 0 <= index < len(manifest.buckets):
            raise InvalidInput(f"bucket {index} of {len(manifest.buckets)}")
        place = room(manifest.buckets[index])
        with self._engine.receiver.reading() as live:
            if live.tag.root != manifest.root:
                raise gone(key)
            weights = weights_called(live.module, [spec.name for spec in manifest.in_bucket(index)])
            for part in manifest.in_bucket(index):
                source = weights[part.name].detach().contiguous().cpu()
                into = place[part.offset : part.offset + part.nbytes].numpy()
                is_same = source.nbytes == part.spec.nbytes and tuple(source.shape) == part.spec.shape
                if not is_same or copy_box(source, whole(part.spec.shape), part.box, into) != part.digest:
                    raise DigestMismatch(f"{part.name!r} is not what was installed any more")
        return place

    def holders(self, key: str) -> list[str]:
        return []

    def lend(self, key: str) -> tuple[int, Callable[[], None]]:
        raise InvalidInput("memory is not lent over TCP")
