"""The error tree: unique codes, documented bases, and one class back for every code that crosses the wire."""

from __future__ import annotations

import ast
import pickle
import re
import traceback
import weakref

import pytest
from paths import ROOT

from transfer_queue import errors
from transfer_queue.errors import InternalError, TransferQueueError, emptied, error_from_code, kept


def tree(root: type[TransferQueueError] = TransferQueueError) -> list[type[TransferQueueError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in tree(child))]


OURS = [cls for cls in tree() if cls.__module__ == errors.__name__ and cls is not TransferQueueError]
LEAVES = [cls for cls in OURS if "code" in vars(cls)]
BUILTINS = {
    "ValueError": ValueError, "TypeError": TypeError, "KeyError": KeyError, "AssertionError": AssertionError,
    "TimeoutError": TimeoutError, "RuntimeError": RuntimeError, "ConnectionError": ConnectionError,
    "PermissionError": PermissionError, "FileNotFoundError": FileNotFoundError,
}  # fmt: skip


def documented() -> dict[str, str]:
    """Class name -> builtin base named in the module's tree ("" for none)."""
    assert errors.__doc__ is not None
    lines = [line for line in errors.__doc__.splitlines() if "──" in line]
    found = {}
    for line in lines:
        match = re.search(r"── (\w+)(?:\s+\((\w+)\))?", line)
        assert match is not None
        found[match[1]] = match[2] or ""
    return found


@pytest.mark.parametrize("cls", [errors.UnsupportedValue, errors.InvalidSampling, errors.MissingParameter])
def test_what_was_a_runtime_error_in_transfer_queue_is_caught_as_one(cls: type[TransferQueueError]) -> None:
    assert issubclass(cls, RuntimeError)


def test_codes_are_unique() -> None:
    codes = [cls.code for cls in LEAVES]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("cls", LEAVES, ids=lambda cls: cls.__name__)
def test_an_error_survives_the_wire(cls: type[TransferQueueError]) -> None:
    error = error_from_code(cls.code, "rows [1] of 'p'")
    assert type(error) is cls
    assert str(error) == "rows [1] of 'p'"


@pytest.mark.parametrize("cls", LEAVES, ids=lambda cls: cls.__name__)
def test_an_error_survives_pickling(cls: type[TransferQueueError]) -> None:
    error = pickle.loads(pickle.dumps(cls("text")))  # noqa: S301  of our own making
    assert type(error) is cls
    assert str(error) == "text"


@pytest.mark.parametrize("cls", LEAVES, ids=lambda cls: cls.__name__)
def test_an_error_is_kept_without_what_it_went_through(cls: type[TransferQueueError]) -> None:
    with pytest.raises(cls) as raised:
        raise cls("text")
    vars(raised.value)["rows"] = [1]
    found = kept(raised.value)
    assert type(found) is cls
    assert (found.args, vars(found)) == (raised.value.args, vars(raised.value))
    assert found.__traceback__ is None
    assert raised.value.__traceback__ is not None


def test_an_emptied_error_says_where_it_was_and_holds_nothing() -> None:
    class Large:
        pass

    held: list[weakref.ref[Large]] = []

    def lost() -> None:
        large = Large()
        held.append(weakref.ref(large))
        raise OSError("no room")

    def translated() -> None:
        try:
            lost()
        except OSError as error:
            raise InternalError("text") from error

    with pytest.raises(InternalError) as raised:
        translated()
    assert held[0]() is not None
    assert emptied(raised.value) is raised.value
    assert held[0]() is None
    assert "in lost" in "".join(traceback.format_exception(raised.value))


def test_an_error_that_cannot_be_copied_is_kept_itself() -> None:
    class Odd(Exception):
        def __init__(self, first: str, second: str) -> None:
            super().__init__(first + second)

    with pytest.raises(Odd) as raised:
        raise Odd("a", "b")
    assert kept(raised.value) is raised.value
    assert raised.value.__traceback__ is None


def test_an_unknown_code_is_an_internal_error() -> None:
    assert type(error_from_code("from the future", "x")) is InternalError


@pytest.mark.parametrize(("name", "base"), documented().items())
def test_the_documented_classes_exist_with_their_builtin_bases(name: str, base: str) -> None:
    cls = getattr(errors, name)
    assert issubclass(cls, TransferQueueError)
    assert not base or issubclass(cls, BUILTINS[base])


def test_the_printed_tree_names_every_class() -> None:
    assert set(documented()) == {cls.__name__ for cls in OURS}


def test_every_class_says_whose_fault_it_is() -> None:
    sides = (errors.CallerError, errors.ServiceError, errors.InternalError)
    assert all(sum(issubclass(cls, side) for side in sides) == 1 for cls in LEAVES)


def test_conditions_that_were_runtime_errors_still_are() -> None:
    for cls in (errors.UnknownRows, errors.NotReady, errors.UnknownMode, errors.DeadlineExceeded, errors.StoreFull,
                errors.ServiceUnavailable, errors.ProtocolError, errors.InternalError,
                errors.NotInitialized):  # fmt: skip
        assert issubclass(cls, RuntimeError)


def test_deadlines_of_asyncio_are_caught_by_the_name_that_python_3_10_has() -> None:
    wrong = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Try) and "asyncio.wait_for(" in ast.unparse(ast.Module(node.body, [])):
                names = {one.id for handler in node.handlers if handler.type for one in ast.walk(handler.type)
                         if isinstance(one, ast.Name)}  # fmt: skip
                wrong += [f"{path}:{node.lineno}"] if "TimeoutError" in names else []
    assert not wrong


def test_a_cleared_row_has_both_names() -> None:
    assert errors.RowCleared is errors.StorageKeyNotFoundError
