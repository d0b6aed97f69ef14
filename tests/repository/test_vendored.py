"""What is not our own in this repository is what its authors published, byte for byte, with its licence."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

import transfer_queue

STATIC = Path(transfer_queue.__file__).parent / "page" / "static"
VERSION = "4.0.1"  # of the package htmx.org
PUBLISHED = {
    "htmx.min.js": "a0abb04f2f45a1f89d1d4844023245537e5e6014c87b144553e0607b4cc32130",
    "hx-sse.min.js": "18ef2761356ec1fe0bb6d92612315b37517a7c1e9856b661c5ae81fef239d103",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_htmx_is_as_its_authors_published_it(name: str) -> None:
    assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == PUBLISHED[name]


def test_htmx_is_of_the_version_that_the_docs_name() -> None:
    script = (STATIC / "htmx.min.js").read_text(encoding="utf-8")
    assert re.findall(r'this\.version="([^"]+)"', script) == [VERSION]
    docs = Path(__file__).parents[2] / "docs" / "page.md"
    assert f"htmx.org {VERSION}" in docs.read_text(encoding="utf-8")


def test_htmx_comes_with_its_licence() -> None:
    assert (STATIC / "htmx.LICENSE").read_text(encoding="utf-8").startswith("Zero-Clause BSD")
