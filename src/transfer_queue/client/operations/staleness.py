"""Versions of the weights: which one is live, and how many rows may be started for a task."""

from __future__ import annotations

from transfer_queue.client.effects import Call, Operation
from transfer_queue.client.session import Session
from transfer_queue.wire import messages as m


def set_weight_version(session: Session, version: int, epoch: str = "") -> Operation[int]:
    """Tell the service that `version` is live: what earlier ones made is one version older from now on.

    `epoch` names this life of the trainer; one that begins anew counts on, whatever its numbers. Repeating a call
    changes nothing. Returns how many versions were announced so far. Raises `StaleVersion` when a newer one of
    the epoch was announced, `WrongEpoch` when another epoch came after it.
    """
    return (yield Call(m.Announce(session.next_rid(), epoch, version)))[0].count


def admit(
    session: Session,
    task_name: str,
    num_rows: int,
    max_staleness: int | None = None,
    rows_per_version: int | None = None,
    timeout_s: float | None = None,
) -> Operation[None]:
    """Wait until starting `num_rows` more rows cannot make them more than `max_staleness` versions old when `task_name`
    uses them, which it does `rows_per_version` for each version; None: the service's setting.

    Waits in the service, in order of arrival, at most `timeout_s` (default: the configured one); a version that is
    announced, rows given back, and rows that became too old for the task let others in. Raises `DeadlineExceeded`,
    `InvalidInput`; nothing is admitted then.
    """
    wait_s = session.timeout_s if timeout_s is None else timeout_s
    yield Call(m.Admit(session.next_rid(), task_name, num_rows, max_staleness, rows_per_version, wait_s), wait_s=wait_s)


def give_back(session: Session, task_name: str, num_rows: int) -> Operation[None]:
    """Rows that were admitted will not come: their producer failed, or dropped them."""
    yield Call(m.GiveBack(session.next_rid(), task_name, num_rows))
