"""A process that is forked while another of its threads is in the middle of something that the child needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transfer_queue as tq

Spawn = Callable[[str], Any]


def test_a_child_that_is_forked_while_another_thread_loads_a_part_of_the_package_can_load_it(
    fresh_child: Spawn,
) -> None:
    forking = fresh_child(
        """
        import os, signal, sys, threading
        import transfer_queue as tq
        begun, go = threading.Event(), threading.Event()

        class Slow:
            def find_spec(self, name, path=None, target=None):
                if name == "transfer_queue.errors":
                    begun.set()
                    go.wait()

        sys.meta_path.insert(0, Slow())
        os.register_at_fork(before=go.set)
        threading.Thread(target=lambda: tq.LockLostError).start()
        begun.wait()
        pid = os.fork()
        if not pid:
            signal.alarm(20)
            tq.LockLostError
            os._exit(0)
        print(os.waitpid(pid, 0)[1])
        """
    )
    assert forking.finish() == "0"


def test_a_child_that_is_forked_while_another_thread_attaches_can_attach(
    client: tq.TransferQueueClient, child: Spawn
) -> None:
    forking = child(
        """
        import os, signal, threading
        import transfer_queue as tq
        from transfer_queue import interface
        entered, go, attach = threading.Event(), threading.Event(), interface._attach

        def wait_and_attach(*args):
            entered.set()
            go.wait()
            return attach(*args)

        interface._attach = wait_and_attach
        thread = threading.Thread(target=tq.init)
        thread.start()
        entered.wait()
        pid = os.fork()
        if not pid:
            signal.alarm(20)
            interface._attach = attach
            tq.init()
            os._exit(not tq.address())
        print(os.waitpid(pid, 0)[1])
        go.set()
        thread.join()
        """
    )
    assert forking.finish() == "0"
