"""Rows of a task together with their data: in one round trip where it lies on the caller's host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDict

from transfer_queue.arguments import flag
from transfer_queue.client.dense import Pad, check_pad
from transfer_queue.client.describing import batch_meta, warn_repeated
from transfer_queue.client.effects import GRACE_S, Call, HoldSession, Operation
from transfer_queue.client.operations import rows as ops
from transfer_queue.client.session import Session
from transfer_queue.client.transfer.read import read
from transfer_queue.codec.select import NO_SLICES
from transfer_queue.codec.slices import Slice
from transfer_queue.errors import UnknownMode
from transfer_queue.metadata import BatchMeta
from transfer_queue.sampler.base import whole_number
from transfer_queue.wire import messages as m


class TaskRows:
    """The answer to a fetch with `locate`: its metadata, and the data where it came along."""

    def __init__(self, session: Session, request: m.Fetch, reply: m.Handed | m.RowSet, payload: memoryview) -> None:
        self._session = session
        self._request = request
        self._answer = (reply.located, payload) if isinstance(reply, m.Handed) else None
        self.rows: m.RowSet = reply.rows if isinstance(reply, m.Handed) else reply
        self.meta = batch_meta(session.service_id, self.rows, request.partition)

    def data(
        self,
        meta: BatchMeta,
        dense: bool = False,
        pad: Pad | None = None,
        slices: Mapping[str, Slice] | None = None,
    ) -> Operation[TensorDict]:
        """The rows of `meta`, which is that of the answer or a part of it."""
        if self._answer is None or meta is not self.meta:
            return (yield from ops.get_data(self._session, meta, False, None, None, dense, pad, slices))
        request = self._request
        get = m.Get(self._session.next_rid(), request.partition, None, self.rows.rows, request.fields, True)
        parts = slices or NO_SLICES
        return (yield from read(self._session, [get], dense=dense, pad=pad, slices=parts, located=self._answer))


def handed(session: Session, request: m.Fetch, grace_s: float = GRACE_S) -> Operation[TaskRows]:
    """Carry out a fetch with `locate`."""
    reply, payload = yield Call(request, wait_s=request.timeout_s, grace_s=grace_s)
    return TaskRows(session, request, reply, payload)


def take(
    session: Session,
    partition_id: str,
    data_fields: list[str],
    batch_size: int | None,
    task_name: str,
    lease_s: float | None,
    timeout_s: float | None,
    sampling_config: Mapping[str, Any] | None,
    dense: bool,
    pad: Pad | None,
    slices: Mapping[str, Slice] | None = None,
) -> Operation[tuple[BatchMeta, TensorDict]]:
    check_pad(pad)
    dense, lease_s = flag(dense, "dense"), ops.lease_length(lease_s)
    batch_size = None if batch_size is None else whole_number(batch_size, "batch_size")
    if not ops.is_given(task_name, "task_name"):
        raise UnknownMode("take needs task_name: which consumer takes the rows")
    if batch_size == 0:
        return BatchMeta.empty(), TensorDict({}, batch_size=[0])
    if lease_s and not session.is_held:
        yield HoldSession()
    wait_s, polling = ops.waiting(session, timeout_s)
    sampling = ops.checked_sampling(sampling_config)
    request = m.Fetch(
        session.next_rid(), partition_id, data_fields, m.ALL if batch_size is None else batch_size, task_name, sampling,
        wait_s, polling, lease_s or 0.0, locate=True,
    )  # fmt: skip
    answer = yield from handed(session, request)
    if not answer.rows.rows:
        return BatchMeta.empty(), TensorDict({}, batch_size=[0])
    warn_repeated(answer.meta)
    return answer.meta, (yield from answer.data(answer.meta, dense, pad, slices))
