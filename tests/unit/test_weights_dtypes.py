"""Every engine brings the dtypes that it takes bit for bit, and names those that it does not take beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from weights import Direct

from transfer_queue.errors import UnsupportedValue
from transfer_queue.weights import InPlace, ModuleSource, Receiver, SafetensorsSource
from transfer_queue.weights.transport import registry

SEND_S = 20.0


class Waves(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.phase = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
        self.scale = torch.nn.Parameter(torch.zeros(3))


def drawn(dtype: torch.dtype) -> Waves:
    module = Waves(dtype)
    with torch.no_grad():
        module.phase.copy_(torch.tensor([1 + 2j, -0.0 - 0.0j, 3.5, -1j], dtype=dtype))
    return module


def bits(module: Waves) -> list[int]:
    found: list[int] = module.phase.detach().view(torch.uint8).tolist()
    return found


def sent(name: str, source: Waves, module: Waves, folder: Path) -> None:
    client = Direct()
    client.engine = registry.engine(name)(Receiver(InPlace(module)))
    info = {"folder": str(folder)} if name == "disk" else {}
    trainer = registry.trainer(name).trainer_init(info, client=client, source=ModuleSource(source))
    try:
        trainer.send_weights(deadline_s=SEND_S)
    finally:
        trainer.shutdown()
        client.engine.shutdown()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("shm", torch.complex64), ("shm", torch.complex128), ("tcp", torch.complex64), ("tcp", torch.complex128),
        ("disk", torch.complex64),
    ],
)  # fmt: skip
def test_complex_weights_arrive_bit_for_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source, module = drawn(dtype), Waves(dtype)
    sent(name, source, module, tmp_path)
    assert bits(module) == bits(source)


def test_other_loaders_read_complex_weights_from_the_disk(tmp_path: Path) -> None:
    source = drawn(torch.complex64)
    sent("disk", source, Waves(torch.complex64), tmp_path)
    folder = tmp_path / (tmp_path / "LATEST").read_text()
    found = {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}
    assert torch.equal(found["phase"], source.phase.detach())
    assert torch.equal(dict(SafetensorsSource(folder).tensors())["phase"], source.phase.detach())


def test_the_disk_refuses_what_its_files_have_no_name_for_before_anybody_is_met(tmp_path: Path) -> None:
    met: list[object] = []
    client = Direct()
    client.init_weight_transfer_engine = met.append  # type: ignore[method-assign]
    with pytest.raises(UnsupportedValue, match=r"'phase' is torch\.complex128") as refused:
        registry.trainer("disk").trainer_init(
            {"folder": str(tmp_path / "versions")}, client=client, source=ModuleSource(drawn(torch.complex128))
        )
    assert "shm" in str(refused.value)
    assert not met
    assert not (tmp_path / "versions").exists()
