"""The flags of vime's pull request 242."""

from __future__ import annotations

import argparse

from transfer_queue.errors import InvalidInput


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags to vime's parser."""
    group = parser.add_argument_group("transfer queue")
    group.add_argument(
        "--enable-vime-transfer-queue", action="store_true", help="rollouts reach the trainer through TransferQueue"
    )
    group.add_argument("--num-data-storage-units", type=int, default=1, help="kept; each host has one")
    group.add_argument(
        "--max-staleness", type=int, default=0, help="rollouts that may be written while an earlier one is not cleared"
    )
    group.add_argument(
        "--polling-mode", action=argparse.BooleanOptionalAction, default=True, help="kept; all waits are answered"
    )
    group.add_argument(
        "--transfer-queue-staleness-poll-interval",
        type=float,
        default=1.0,
        help="kept; nobody polls",
    )
    group.add_argument(
        "--transfer-queue-extra-data-fields", nargs="*", default=[], help="columns to fetch beside the usual ones"
    )
    return parser


def validate_arguments(args: argparse.Namespace) -> None:
    """Raises `InvalidInput` (a ValueError) for flags that do not fit together."""
    if not getattr(args, "enable_vime_transfer_queue", False):
        return
    for name in ("debug_train_only", "load_debug_rollout_data"):
        if getattr(args, name, None):
            raise InvalidInput(f"--{name.replace('_', '-')} has no rollouts to send: leave out the transfer queue")
    if args.max_staleness < 0:
        raise InvalidInput(f"--max-staleness {args.max_staleness}: expected 0 or more")
    if args.num_data_storage_units < 1:
        raise InvalidInput(f"--num-data-storage-units {args.num_data_storage_units}: expected 1 or more")
