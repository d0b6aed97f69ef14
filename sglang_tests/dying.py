"""As `vllm_tests.dying`, for SGLang; "session" is a point more, in the middle of a call:
`python -m sglang_tests.dying URL TOKEN TRANSPORT SEED TIED POINT`."""

from __future__ import annotations

import sys
from typing import Any

from sglang_tests.kernels import stand_in

stand_in()

from transfer_queue.integrations.sglang.client import SGLangClient  # noqa: E402
from vllm_tests import dying  # noqa: E402

POINTS = (*dying.POINTS, "session")


class Client(dying.Stopping, SGLangClient):
    def _post(self, peer: Any, path: str, body: Any) -> None:
        super()._post(peer, path, body)
        if self.point == "session" and path == "/begin_weight_update" and self.is_sending:
            dying.stop_here()

    is_sending = False

    def start_weight_update(self) -> None:
        self.is_sending = True
        super().start_weight_update()


def main(url: str, token: str, transport: Any, seed: str, tied: str, point: str) -> None:
    dying.run(Client(url, token, transport=transport, timeout_s=60), transport, seed, tied, point)


if __name__ == "__main__":
    main(*sys.argv[1:])
