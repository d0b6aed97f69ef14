"""What tensors are called: renamed by the source, and without what torch.compile and DDP put before names."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from safetensors.torch import save_file
from weights import Net, Tied, copy_of, drawn, full, install, same

from transfer_queue.errors import InvalidInput, UnknownTensor
from transfer_queue.weights import Flip, InPlace, ModuleSource, Receiver, SafetensorsSource, StateDictSource, Swap
from transfer_queue.weights.version.sources import named_weights

PLAIN = list(named_weights(Net()))


@pytest.fixture
def ddp(tmp_path: Path) -> Iterator[Any]:
    """Wraps modules; this process is the only one of its group."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield torch.nn.parallel.DistributedDataParallel
    torch.distributed.destroy_process_group()


def compiled(module: torch.nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when its compiler is imported
        return torch.compile(module)


def names(source: StateDictSource | SafetensorsSource) -> list[str]:
    found = [name for name, _ in source.tensors()]
    assert found == [spec.name for spec in source.specs()]
    return found


def test_a_compiled_modules_weights_have_their_own_names() -> None:
    assert next(iter(compiled(Net()).state_dict())).startswith("_orig_mod.")
    assert names(ModuleSource(compiled(Net()))) == PLAIN


def test_a_part_that_is_compiled_has_its_own_names() -> None:
    module = Net()
    module.first = compiled(module.first)
    assert names(ModuleSource(module)) == PLAIN


def test_a_ddp_modules_weights_have_their_own_names_also_when_it_or_its_inside_is_compiled(ddp: Any) -> None:
    for wrapped in (ddp(Net()), compiled(ddp(Net())), ddp(compiled(Net()))):
        assert names(ModuleSource(wrapped)) == PLAIN


def test_a_module_that_somebody_called_module_keeps_its_name(ddp: Any) -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Net()

    expected = [f"module.{name}" for name in PLAIN]
    assert names(ModuleSource(Outer())) == expected
    assert names(ModuleSource(ddp(Outer()))) == expected
    assert names(StateDictSource(copy_of(Outer()))) == expected


def test_names_that_would_be_the_same_without_the_prefix_keep_it() -> None:
    two = {"_orig_mod.w": torch.ones(2), "w": torch.zeros(2)}
    assert names(StateDictSource(two)) == list(two)


@pytest.mark.parametrize("make", [InPlace, Swap, lambda module: Flip(module, compiled(Net()))])
def test_a_compiled_server_takes_what_a_plain_trainer_sends(make: Any) -> None:
    module, weights = Net(), drawn(Net(), 1)
    receiver = Receiver(make(compiled(module)))
    install(receiver, full(weights, 1))
    install(receiver, full(drawn(Net(), 2), 2))
    install(receiver, full(ModuleSource(compiled_with(weights)), 3))
    assert same(copy_of(receiver._target._module), weights)  # type: ignore[attr-defined]


def compiled_with(weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    module = Net()
    module.load_state_dict(weights)
    return compiled(module)  # type: ignore[no-any-return]


def test_a_map_renames_what_it_names_and_leaves_the_rest() -> None:
    weights = drawn(Net(), 1)
    source = StateDictSource(weights, rename={"first.weight": "model.fc1.weight"})
    assert names(source) == ["model.fc1.weight" if name == "first.weight" else name for name in PLAIN]
    assert torch.equal(dict(source.tensors())["model.fc1.weight"], weights["first.weight"])


def test_a_function_renames_all_and_sees_names_without_prefixes() -> None:
    source = ModuleSource(compiled(Net()), rename=lambda name: f"model.{name}")
    assert names(source) == [f"model.{name}" for name in PLAIN]


def test_other_names_of_tied_weights_are_renamed_too() -> None:
    source = ModuleSource(Tied(), rename={"head.weight": "lm_head.weight", "embed.weight": "wte.weight"})
    assert (names(source), source.aliases()) == (["wte.weight"], {"lm_head.weight": "wte.weight"})


def test_files_are_renamed(tmp_path: Path) -> None:
    weights = drawn(Net(), 3)
    save_file(weights, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path, rename=lambda name: name.replace("first", "one"))
    assert same(dict(source.tensors()), {name.replace("first", "one"): one for name, one in weights.items()})
    assert names(source) == [spec.name for spec in source.specs()]


def test_a_name_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(UnknownTensor, match=r"'third\.weight'"):
        ModuleSource(Net(), rename={"third.weight": "x"})


@pytest.mark.parametrize("rename", [{"first.weight": "first.bias"}, lambda name: name.replace("bias", "weight")])
def test_two_tensors_of_one_name_are_refused_by_name(rename: Any) -> None:
    with pytest.raises(InvalidInput, match=r"'first\.(weight|bias)' and 'first\.(bias|weight)' would both be called"):
        ModuleSource(Net(), rename=rename)


@pytest.mark.parametrize("rename", [{"steps": ""}, lambda _: None])
def test_a_new_name_that_is_no_text_is_refused(rename: Any) -> None:
    with pytest.raises(InvalidInput, match="cannot be called"):
        ModuleSource(Net(), rename=rename)
