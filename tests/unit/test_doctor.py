"""Two distributions over each other, made of a few files: what the doctor sees, says, and what the import does.

`frameworks/distributions.py` does the same with real wheels and pip.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

import transfer_queue_doctor as doctor

THEIRS = {"transfer_queue/__init__.py": "from .client import Thing\n", "transfer_queue/client.py": "Thing = 1\n"}
OURS = {"transfer_queue/__init__.py": "__version__ = '1'\n", "transfer_queue/client/__init__.py": "", doctor.MARK: ""}


def install(site: Path, name: str, files: dict[str, str], **direct: Any) -> None:
    """Write the files over what is there, as pip does."""
    info = site / f"{name.replace('-', '_').lower()}-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    record = []
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        record.append(f"{path},sha256={digest},{len(text)}")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text("\n".join(record))
    if direct:
        (info / "direct_url.json").write_text(json.dumps(direct))


def said(site: Path) -> tuple[str, str]:
    found = doctor.trouble([str(site)])
    assert found is not None
    return found


def test_one_distribution_is_no_trouble(tmp_path: Path) -> None:
    install(tmp_path, "transfer-queue", OURS)
    assert doctor.trouble([str(tmp_path)]) is None
    assert doctor.folder([str(tmp_path)]) == tmp_path / "transfer_queue"


def test_the_other_package_over_this_one(tmp_path: Path) -> None:
    install(tmp_path, "transfer-queue", OURS, url="file:///wheels/ours.whl", archive_info={})
    install(tmp_path, "TransferQueue", THEIRS)
    what, command = said(tmp_path)
    assert "2 of 2 of TransferQueue. The files of TransferQueue win" in what.replace("files are of", "of")
    assert command.endswith("--force-reinstall --no-deps /wheels/ours.whl")
    assert "pip uninstall -y TransferQueue && " in command


def test_this_package_over_the_other(tmp_path: Path) -> None:
    install(tmp_path, "TransferQueue", THEIRS)
    install(tmp_path, "transfer-queue", OURS)
    what, command = said(tmp_path)
    assert "The files of transfer-queue win" in what
    assert command.endswith("transfer-queue==1.0")


def test_an_editable_install_beside_the_other_package_only_loses_that(tmp_path: Path) -> None:
    install(tmp_path, "transfer-queue", {}, url="file:///checkout", dir_info={"editable": True})
    install(tmp_path, "TransferQueue", THEIRS)
    what, command = said(tmp_path)
    assert str(tmp_path / "transfer_queue") in what
    assert "install" not in command.replace("uninstall", "")


def test_missing_files_are_restored(tmp_path: Path) -> None:
    install(tmp_path, "transfer-queue", OURS)
    (tmp_path / "transfer_queue" / "__init__.py").unlink()
    what, command = said(tmp_path)
    assert "1 of the 2 files" in what
    assert "uninstall" not in command


def test_this_project_under_both_names(tmp_path: Path) -> None:
    install(tmp_path, "transfer-queue", OURS)
    install(tmp_path, "TransferQueue", OURS)
    what, command = said(tmp_path)
    assert "both this project" in what
    assert "uninstall -y" in command


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The package itself, installed, with the other one's marks."""
    ignored = shutil.ignore_patterns("__pycache__", "weights", "server", "storage")
    shutil.copytree(ROOT / "src" / "transfer_queue", tmp_path / "transfer_queue", ignore=ignored)
    shutil.copy(ROOT / "src" / doctor.MARK, tmp_path)
    install(tmp_path, "transfer-queue", {"transfer_queue/version/version": "9.9\n"})
    return tmp_path


def test_the_import_warns_where_both_lie(site: Path, fresh_child: Callable[[str], Any]) -> None:
    install(site, "TransferQueue", {"transfer_queue/client.py": "", "transfer_queue/version/version": "0\n"})
    code = f"""
    import sys, warnings
    sys.path.insert(0, {str(site)!r})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import transfer_queue
    assert transfer_queue.__file__.startswith({str(site)!r})
    assert "are installed over each other" in str(caught[0].message) and "pip uninstall" in str(caught[0].message)
    """
    fresh_child(code).finish()


def test_the_others_import_says_what_is_wrong(site: Path, fresh_child: Callable[[str], Any]) -> None:
    install(site, "TransferQueue", {**THEIRS, "transfer_queue/version/version": "0\n"})
    code = f"""
    import sys
    sys.path.insert(0, {str(site)!r})
    try:
        import transfer_queue
    except ImportError as error:
        assert "The files of TransferQueue win" in str(error), error
    else:
        raise AssertionError("imported")
    """
    fresh_child(code).finish()


def test_the_command_needs_no_package_to_say_so(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tq", "doctor"])
    monkeypatch.setattr("sys.path", [str(site)])
    assert doctor.main() == 0
    (site / "transfer_queue" / "version" / "version").unlink()
    assert doctor.main() == 1
    assert "--force-reinstall --no-deps" in capsys.readouterr().out
