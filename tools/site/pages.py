"""MkDocs hook: files of the repository that are not in docs/ become pages too, and links between all of them hold.

Links in Markdown are written as they hold in the repository. On the site a page may lie elsewhere, so every relative
link is looked up in the repository and written anew. One that leads to no page fails the build.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

log = get_plugin_logger("pages")
ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = "docs"
HOME = "README.md"
DOCUMENTS = {
    HOME: "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
EXAMPLES = "examples"  # each program in it, those in its folders aside, becomes a page of the same name
LANGUAGES = {".py": "python", ".sbatch": "bash", ".sh": "bash"}
LINK = re.compile(r"(?P<start>!?\[(?:[^\]\[]|\[[^\]]*\])*\]\()(?P<target>[^)\s]+)(?P<end>\))")
FENCED = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)


def place_of(path: str) -> str:
    """Where on the site a file of the repository lies; "" where it is not there. `path` and the result are relative."""
    if path in DOCUMENTS:
        return DOCUMENTS[path]
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/")
    if posixpath.dirname(path) == EXAMPLES and Path(path).suffix in LANGUAGES:
        return f"{path}.md"
    return ""


def source_of(place: str) -> str:
    """The file of the repository that a page is made of: the inverse of `place_of`."""
    for path, document in DOCUMENTS.items():
        if place == document:
            return path
    return place.removesuffix(".md") if place.startswith(f"{EXAMPLES}/") else f"{DOCS}/{place}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose files are not in docs/."""
    for path, place in DOCUMENTS.items():
        files.append(File.generated(config, place, content=(ROOT / path).read_text(encoding="utf-8")))
    for file in sorted((ROOT / EXAMPLES).iterdir()):
        path = file.relative_to(ROOT).as_posix()
        if place_of(path):
            text = file.read_text(encoding="utf-8")
            page = f"# {file.name}\n\n```{LANGUAGES[file.suffix]}\n{text}```\n"
            files.append(File.generated(config, place_of(path), content=page))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its relative links as they hold on the site."""
    source = source_of(page.file.src_uri)

    def rewritten(found: re.Match[str]) -> str:
        return f"{found['start']}{_target(found['target'], source, page.file.src_uri)}{found['end']}"

    parts: list[str] = []
    last = 0
    for block in FENCED.finditer(markdown):  # code is left as it is
        parts += [LINK.sub(rewritten, markdown[last : block.start()]), block[0]]
        last = block.end()
    return "".join([*parts, LINK.sub(rewritten, markdown[last:])])


def _target(target: str, source: str, place: str) -> str:
    path, hash_sign, anchor = target.partition("#")
    if not path or "://" in path or path.startswith("mailto:"):
        return target
    wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    found = _page_of_folder(wanted) if (ROOT / wanted).is_dir() else place_of(wanted)
    if not found or not (ROOT / wanted).exists():
        log.warning("%s links to %s, which is not on the site", source, wanted)
        return target
    return os.path.relpath(found, posixpath.dirname(place) or ".") + hash_sign + anchor


def _page_of_folder(path: str) -> str:
    """The first page of a folder, in the order of names."""
    pages = sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / path).glob("*") if file.is_file())
    return next((place for place in map(place_of, pages) if place), "")
