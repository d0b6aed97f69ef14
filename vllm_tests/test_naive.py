"""What happens without staging: the life cycle of vLLM's own engines, with the fault that ours refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file

from vllm_tests.conftest import note
from vllm_tests.models import answer, drawn, save
from vllm_tests.servers import Server


def test_an_unknown_tensor_kills_a_server_with_a_naive_engine(start: Callable[..., Server], tmp_path: Path) -> None:
    """If this fails since vLLM survives, its updates have become transactional: say so in docs/weights.md."""
    model = drawn(3)
    server = start(save(model, tmp_path / "model"), "naive").wait()
    note("a restart of the server, TP = 1", server.start_s)
    assert server.say() == answer(model)
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    model = drawn(4)
    save_file(model.state_dict(), good)
    save_file({**model.state_dict(), "model.layers.1.surplus.weight": model.lm_head.weight.clone()}, bad)

    def update(file: Path) -> list[int]:
        body = {"update_info": {"file": str(file)}}
        calls = (("/start_weight_update", None), ("/update_weights", body), ("/finish_weight_update", None))
        return [server.ask("POST", path, body)[0] for path, body in calls]

    assert server.ask("POST", "/init_weight_transfer_engine", {"init_info": {}})[0] == 200
    assert update(good) == [200, 200, 200]
    assert server.say() == answer(model)  # it does work, as long as nothing is wrong

    assert update(bad) == [200, 500, 500]
    assert server.health() == 200  # it looks well
    assert server.complete(4)[0] == 500  # the first request ends it
    assert server.health() != 200
    server.stop()
