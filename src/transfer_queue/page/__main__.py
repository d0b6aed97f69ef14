"""`python -m transfer_queue.page ADDRESS DESCRIPTOR`: the child of `beside`, until its standard input ends."""

from __future__ import annotations

import socket
import sys

from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.session import Session
from transfer_queue.page.serving import serve
from transfer_queue.wire.address import parse_address


def main(address: str, descriptor: str) -> None:
    with socket.socket(fileno=int(descriptor)) as listener:
        serve(lambda: TransferQueueClient.of(Session(parse_address(address))), listener, "", owner=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
