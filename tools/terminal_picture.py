"""Runs a command in a terminal of its own and draws what stands there in the end as an SVG, colours included.

    python tools/terminal_picture.py docs/img/demo.svg --title "make demo" -- python -m demo

`--at` draws what stood there when its pattern was last seen instead. The picture refers to nothing outside of itself:
no font, no style sheet, no script.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from html import escape
from pathlib import Path

from rich.ansi import AnsiDecoder
from rich.cells import cell_len
from rich.color import ColorType
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import MONOKAI

CELL_WIDTH, LINE_HEIGHT, MARGIN, BAR = 7.8, 17, 16, 34
BACKGROUND, FRAME, TEXT = "#1c2128", "#444c56", "#cdd9e5"
COLOURS = {  # the terminal's own sixteen, readable on BACKGROUND
    0: "#545d68", 1: "#f47067", 2: "#57ab5a", 3: "#c69026", 4: "#539bf5", 5: "#b083f0", 6: "#39c5cf", 7: "#909dab",
    8: "#768390", 9: "#ff938a", 10: "#6bc46d", 11: "#daaa3f", 12: "#6cb6ff", 13: "#dcbdfb", 14: "#56d4dd",
    15: "#f0f6fc",
}  # fmt: skip
CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\r\n|\n|\r")


def screen(output: str) -> list[str]:
    """The lines that stand on a terminal after `output`; colour codes stay in them.

    Knows what rich's live displays do: move up, erase a line, write it anew.
    """
    lines, row = [""], 0
    position = 0
    for found in CONTROL.finditer(output):
        lines[row] += output[position : found.start()]
        position = found.end()
        argument, letter = found[1], found[2]
        if letter is None and "\n" in found[0]:
            row += 1
            if row == len(lines):
                lines.append("")
        elif letter == "A":
            row = max(0, row - int(argument or 1))
        elif letter == "K":
            lines[row] = ""
        elif letter == "m":
            lines[row] += found[0]
    lines[row] += output[position:]
    while lines and not re.sub(r"\x1b\[[0-9;]*m", "", lines[-1]).strip():
        lines.pop()
    return lines


def until(output: str, pattern: str) -> str:
    """`output` up to the end of the display that matched `pattern` last."""
    found = None
    for found in re.finditer(pattern, output):  # noqa: B007
        pass
    if found is None:
        raise SystemExit(f"{pattern!r} was never seen")
    following = output.find("\x1b[1A", found.end())
    return output if following < 0 else output[: output.rfind("\r", found.end(), following)]


def output_of(command: list[str], columns: int, rows: int) -> str:
    """What the command writes to a terminal of this size. Raises `SystemExit` with its status when it fails."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(rows)}
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment) as process:
        os.close(follower)
        found = bytearray()
        while True:
            try:
                part = os.read(leader, 1 << 16)
            except OSError:  # the other end is closed (EIO, pty(7))
                break
            if not part:
                break
            found += part
    os.close(leader)
    if process.returncode:
        sys.stderr.buffer.write(found)
        raise SystemExit(process.returncode)
    return found.decode()


def drawn(lines: list[str], title: str, columns: int) -> str:
    """The SVG."""
    width = round(columns * CELL_WIDTH + 2 * MARGIN)
    height = BAR + len(lines) * LINE_HEIGHT + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}">',
        "<style>text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre}"
        "</style>",
        f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8" fill="{BACKGROUND}" stroke="{FRAME}"/>',
        f'<text x="{width // 2}" y="22" fill="#909dab" text-anchor="middle">{escape(title)}</text>',
    ]
    console = Console(width=columns * 2, color_system="256", force_terminal=True)
    decoder = AnsiDecoder()
    for number, line in enumerate(lines):
        y = BAR + number * LINE_HEIGHT + 12
        column = 0
        for segment in decoder.decode_line(line).render(console):
            parts += _piece(segment.text.rstrip("\n"), segment.style or Style(), column, y)
            column += cell_len(segment.text.rstrip("\n"))
    return "\n".join([*parts, "</svg>", ""])


def _piece(text: str, style: Style, column: int, y: int) -> list[str]:
    """A run of text in one style; `textLength` keeps the columns where a reader's font is wider."""
    body = text.strip(" ")
    if not body:
        return []
    left = MARGIN + (column + len(text) - len(text.lstrip(" "))) * CELL_WIDTH
    weight = ' font-weight="bold"' if style.bold else ""
    return [
        f'<text x="{left:.1f}" y="{y}" fill="{_colour(style)}"{weight} textLength="{cell_len(body) * CELL_WIDTH:.1f}" '
        f'lengthAdjust="spacingAndGlyphs">{escape(body)}</text>'
    ]


def _colour(style: Style) -> str:
    colour = style.color
    if colour is None or colour.is_default:
        return TEXT
    if colour.type is ColorType.STANDARD or (colour.number is not None and colour.number < 16):
        return COLOURS[colour.number or 0]
    return colour.get_truecolor(MONOKAI).hex


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("picture", type=Path)
    parser.add_argument("--title", required=True)
    parser.add_argument("--columns", type=int, default=124)
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--at", default="", help="a regular expression")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    output = output_of(given.command, given.columns, given.rows)
    lines = screen(until(output, given.at) if given.at else output)
    given.picture.parent.mkdir(parents=True, exist_ok=True)
    given.picture.write_text(drawn(lines, given.title, given.columns), encoding="utf-8")
    print("\n".join(screen(output)))


if __name__ == "__main__":
    main()
