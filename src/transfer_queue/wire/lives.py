"""What names the life that the number of a row is from: the random id of the service, and how often it had loaded.

Within one life a number is never given to two rows, but a loaded checkpoint brings rows with the numbers they had.
"""

from __future__ import annotations

ID_NBYTES = 16


def naming(service_id: bytes, loads: int) -> bytes:
    """The life of rows that a service named after `loads` loads."""
    return service_id + loads.to_bytes(4, "little") if loads else service_id


def service_of(life: bytes) -> bytes:
    """The id of the service in it."""
    return life[:ID_NBYTES]
