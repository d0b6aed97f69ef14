"""How long a process waits until it can work: beside Ray actors that have every processor, and without Ray."""

from __future__ import annotations

import tempfile
import threading
import time
from typing import Any

from bench.ops.calls import row_fields
from bench.session import Session

NUM_CPUS = 2
DIRECTORY_PREFIX = "tqb-"


def occupy(session: Session) -> dict[str, Any]:
    """Start a Ray cluster of two processors, both taken by actors of others."""
    import ray
    import tensordict  # noqa: F401
    import torch  # noqa: F401

    directory = session.scratch["directory"] = tempfile.TemporaryDirectory(prefix=DIRECTORY_PREFIX)
    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        include_dashboard=False,
        object_store_memory=256 << 20,
        log_to_driver=False,
        logging_level="ERROR",
        _temp_dir=directory.name,
        _node_ip_address="127.0.0.1",
    )

    class Busy:
        def ready(self) -> bool:
            return True

    busy: Any = ray.remote(num_cpus=1)(Busy)
    actors = [busy.remote() for _ in range(NUM_CPUS)]
    ray.get([actor.ready.remote() for actor in actors], timeout=60)
    session.scratch["actors"] = actors
    return {}


def first_round_trip(session: Session, patience_s: float) -> dict[str, Any]:
    """Seconds of `tq.init()`, and until a row was put and got as well; {} when that took longer than `patience_s`.

    torch, tensordict and the package are imported before. A call that took longer is left alone in its thread.
    """
    import tensordict  # noqa: F401
    import torch

    tq = session.tq
    tq.kv_put, tq.kv_batch_get, tq.get_client  # noqa: B018 - names may be loaded when first touched
    found: dict[str, Any] = {}
    errors: list[BaseException] = []

    def work() -> None:
        try:
            start = time.perf_counter()
            tq.init()
            init_s = time.perf_counter() - start
            tq.kv_put("row", "first", row_fields(3))
            row = tq.kv_batch_get("row", "first")
            seconds = time.perf_counter() - start
            assert torch.equal(row["tokens"][0], row_fields(3)["tokens"])
            found.update(init_s=init_s, s=seconds)
        except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(patience_s)
    if errors:
        raise errors[0]
    return dict(found)


def leave(session: Session, joined: bool) -> dict[str, Any]:
    """Close what was started: the system, if it was `joined`, then the cluster with its actors."""
    found = session.scratch.pop("actors", None)
    if joined:
        session.tq.close()
    if found is not None:
        import ray

        del found
        ray.shutdown()
        session.scratch.pop("directory").cleanup()
    return {}
