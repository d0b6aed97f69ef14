"""Versions of the weights, in the order in which trainers announced them."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

import msgspec

from transfer_queue.errors import CheckpointCorrupt, StaleVersion, WrongEpoch

REMEMBERED = 65_536
UNTAGGED, UNKNOWN, AHEAD, FOREIGN = 0, -1, -2, -3  # in place of the number of an announcement
UNSETTLED = (AHEAD, FOREIGN)  # later announcements may say more


class RunVersions(msgspec.Struct):
    """One life of a trainer: its versions, ascending, and the number of each one's announcement."""

    versions: list[int]
    numbers: list[int]


class SavedVersions(msgspec.Struct):
    count: int = 0
    epochs: list[tuple[str, RunVersions]] = []


class WeightVersions:
    """Announcements are numbered 1, 2, ... over all epochs, so ages go on counting when a restarted trainer begins with
    smaller version numbers. The last 65 536 are remembered."""

    def __init__(self) -> None:
        self.count = 0
        self.epoch = ""
        self._epochs: dict[str, RunVersions] = {}
        self._num_remembered = 0

    @property
    def newest(self) -> int | None:
        """The version announced last."""
        return self._epochs[self.epoch].versions[-1] if self.count else None

    def announce(self, epoch: str, version: int) -> bool:
        """Whether it is news. `StaleVersion` for one below the newest of its epoch, `WrongEpoch` after another one."""
        known = self._epochs.get(epoch)
        if known is not None and epoch != self.epoch:
            raise WrongEpoch(f"epoch {epoch!r} is over, {self.epoch!r} came after it")
        if known is not None and version <= known.versions[-1]:
            if version == known.versions[-1]:
                return False
            raise StaleVersion(f"version {version} after {known.versions[-1]} was announced")
        self.count += 1
        self.epoch = epoch
        of_epoch = self._epochs.setdefault(epoch, RunVersions([], []))
        of_epoch.versions.append(version)
        of_epoch.numbers.append(self.count)
        self._num_remembered += 1
        if self._num_remembered > REMEMBERED:
            self._forget_first()
        return True

    def place(self, epoch: str, version: int) -> int:
        """The number of the announcement that a version counts as: its own, else that of the version before it.

        AHEAD: newer than all that was announced. UNKNOWN: older than all that is remembered. FOREIGN: its epoch was not
        announced.
        """
        if not self.count:
            return AHEAD
        known = self._epochs.get(epoch)
        if known is None:
            return FOREIGN
        at = bisect_right(known.versions, version)
        if epoch == self.epoch and version > known.versions[-1]:
            return AHEAD
        return known.numbers[at - 1] if at else UNKNOWN

    def _forget_first(self) -> None:
        """An epoch stays known when all its versions are forgotten: it is over."""
        oldest = next(known for known in self._epochs.values() if known.versions)
        del oldest.versions[0], oldest.numbers[0]
        self._num_remembered -= 1

    def saved(self) -> SavedVersions:
        return SavedVersions(self.count, list(self._epochs.items()))

    @staticmethod
    def restored(saved: SavedVersions) -> WeightVersions:
        """Raises `CheckpointCorrupt`."""
        found = WeightVersions()
        found.count, found._epochs = saved.count, dict(saved.epochs)
        found.epoch = saved.epochs[-1][0] if saved.epochs else ""
        numbers = [number for _, epoch in saved.epochs for number in epoch.numbers]
        found._num_remembered = len(numbers)
        fits = all(len(e.versions) == len(e.numbers) and _ascend(e.versions) for _, e in saved.epochs)
        whole = (not numbers and not saved.count) or (numbers[-1:] == [saved.count] and saved.epochs[-1][1].versions)
        if not (fits and whole and _ascend([0, *numbers]) and len(found._epochs) == len(saved.epochs)):
            raise CheckpointCorrupt("the saved controller state is not consistent: versions of weights")
        return found


def _ascend(numbers: list[int]) -> bool:
    return all(before < after for before, after in pairwise(numbers))
