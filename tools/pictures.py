"""Draws the two pictures of docs/architecture.md, in docs/img: `python tools/pictures.py`.

A picture has a background of its own and colours for light and for dark, so it can be read on any page. It refers to
nothing outside of itself.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "img"
STYLE = """
svg{--back:#fff;--ink:#1f2937;--soft:#5b6472;--line:#7a8494;--host:#f6f8fa;--hostline:#c5ccd6;
--client:#e3eefc;--server:#fdf1dc;--part:#fffaf0;--memory:#dff3e4;--weights:#f1e8fb}
@media(prefers-color-scheme:dark){svg{--back:#1b2027;--ink:#e4e9f0;--soft:#a7b1bf;--line:#8390a2;--host:#222831;
--hostline:#3d4654;--client:#22375a;--server:#4a3a1d;--part:#352a16;--memory:#1e4029;--weights:#3a2a52}}
text{font:13px system-ui,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:var(--ink)}
.soft{fill:var(--soft);font-size:11.5px}.name{font-weight:600}
.code{font-family:ui-monospace,'DejaVu Sans Mono',monospace;font-size:11.5px}
.box{stroke:var(--line);stroke-width:1}.arrow{stroke:var(--line);stroke-width:1.4;fill:none;marker-end:url(#end)}
.both{marker-start:url(#end)}
.bulk{stroke:#2f9e58;stroke-width:3;marker-end:url(#bulkend)}.bulk.both{marker-start:url(#bulkend)}
.stem{stroke:#2f9e58;stroke-width:3;marker-end:none}.lane{stroke:var(--hostline);stroke-dasharray:3 4}
"""
HEAD = '<marker id="{}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="{}" markerHeight="{}" orient="{}">{}</marker>'
SHAPE, TURNED = '<path d="M0 0L8 4L0 8z" fill="{}"/>', "auto-start-reverse"
MARKERS = (
    f"<defs>{HEAD.format('end', 8, 8, TURNED, SHAPE.format('var(--line)'))}"
    f"{HEAD.format('bulkend', 4.5, 4.5, TURNED, SHAPE.format('#2f9e58'))}</defs>"
)
CLIENT = "session: connections, mapped arenas"
MAPPED = "every client maps each twice: shared, to write blocks; private, to read them"


class Picture:
    """Shapes in the order they are drawn; units are pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-label="{escape(title)}"><title>{escape(title)}</title><style>{STYLE}</style>{MARKERS}',
            f'<rect width="{width}" height="{height}" rx="10" fill="var(--back)"/>',
        ]

    def box(self, x: int, y: int, width: int, height: int, colour: str, *lines: str) -> None:
        """A box with lines of text from its top; the first one is its name."""
        line = "var(--hostline)" if colour == "host" else "var(--line)"
        self._parts.append(
            f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{height}" rx="7" fill="var(--{colour})" '
            f'style="stroke:{line}"/>'
        )
        for number, text in enumerate(lines):
            self.text(x + 11, y + 20 + 16 * number, text, "name" if number == 0 else "soft")

    def text(self, x: int, y: int, text: str, kind: str = "", anchor: str = "start") -> None:
        self._parts.append(f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>')

    def arrow(self, *points: tuple[int, int], kind: str = "") -> None:
        """A line through the points with a head at its end. `kind`: "bulk" for payload, "both" for two heads."""
        path = "M" + "L".join(f"{x} {y}" for x, y in points)
        self._parts.append(f'<path class="arrow {kind}" d="{path}"/>')

    def lane(self, x: int, top: int, bottom: int, name: str, colour: str, width: int = 130) -> None:
        self._parts.append(f'<line class="lane" x1="{x}" y1="{top + 30}" x2="{x}" y2="{bottom}"/>')
        self.box(x - width // 2, top, width, 30, colour)
        self.text(x, top + 20, name, "name", "middle")

    def step(self, x: int, y: int, *lines: str) -> None:
        """What happens at one lane: text right of it."""
        for number, text in enumerate(lines):
            self.text(x + 8, y + 15 * number, text, "soft")

    def call(self, start: int, end: int, y: int, text: str, kind: str = "") -> None:
        """A message from lane to lane, with its name above."""
        self.arrow((start, y), (end - (6 if end > start else -6), y), kind=kind)
        self.text((start + end) // 2, y - 6, text, "code", "middle")

    def svg(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])


def processes() -> str:
    """Who runs where, and who talks to whom."""
    p = Picture(1040, 706, "Processes of a service on two hosts, and of weights")
    _first_host(p)
    _second_host(p)
    _weights(p)
    return p.svg()


def _first_host(p: Picture) -> None:
    p.box(16, 16, 600, 430, "host", "host A: the controller's")
    p.box(44, 52, 262, 84, "client", "client process: a rollout worker", "operations: plan, copy, commit", CLIENT)
    p.box(322, 52, 262, 84, "client", "client process: a trainer", "operations; a stream or data loader", CLIENT)
    p.box(44, 194, 540, 126, "server", "server process", "one loop for all requests; imports neither torch nor ray")
    p.box(60, 240, 246, 68, "part", "controller", "which cells are ready, where they", "lie, who consumed what: no I/O")
    p.box(322, 240, 246, 68, "part", "storage unit", "blocks, pins, byte budget;", "owns the arenas of its host")
    p.box(44, 374, 540, 56, "memory", "arenas: shared memory without a name", MAPPED)
    p.arrow((110, 136), (110, 192), kind="both")
    p.text(118, 169, "requests: a unix socket", "soft")
    p.arrow((400, 136), (400, 192), kind="both")
    p.text(408, 169, "arena descriptors: another one", "soft")
    p.arrow((345, 308), (345, 372))
    p.text(353, 351, "owns, trims", "soft")
    p.arrow((30, 112), (30, 402), (42, 402), kind="bulk")
    p.arrow((44, 112), (30, 112), kind="stem")
    p.text(54, 351, "a put copies columns in", "soft")
    p.arrow((584, 402), (600, 402), (600, 112), (586, 112), kind="bulk")
    p.text(576, 351, "a get maps views", "soft", "end")


def _second_host(p: Picture) -> None:
    p.box(724, 16, 300, 430, "host", "host B: joined")
    p.box(
        740,
        52,
        252,
        84,
        "client",
        "client process",
        "asks the server of its own host;",
        "others only for rows that lie there",
    )
    p.box(740, 194, 252, 126, "server", "server process")
    p.box(
        756,
        224,
        220,
        84,
        "part",
        "storage unit",
        "no controller: requests are",
        "passed on, for each session over",
        "a connection of its own",
    )
    p.box(740, 374, 252, 56, "memory", "arenas of host B", "rows lie where they were written")
    p.arrow((800, 136), (800, 192), kind="both")
    p.text(808, 169, "unix sockets", "soft")
    p.arrow((866, 308), (866, 372))
    p.arrow((992, 402), (1008, 402), (1008, 112), (994, 112), kind="bulk both")
    p.arrow((740, 290), (586, 290), kind="both")
    p.text(670, 281, "control: TCP", "soft", "middle")
    p.arrow((740, 216), (670, 216), (670, 80), (586, 80), kind="bulk")
    p.text(678, 152, "TCP:", "soft")
    p.text(678, 168, "rows", "soft")
    p.text(678, 184, "of B", "soft")


def _weights(p: Picture) -> None:
    p.box(16, 462, 1008, 228, "host", "weights: a way of their own, without the service")
    p.box(
        44,
        496,
        300,
        90,
        "weights",
        "trainer",
        "a source names the tensors; pack, digest",
        "TrainerEngine leads the update",
        "Fleet: two phases, fences, catching up",
    )
    p.box(
        440,
        496,
        276,
        90,
        "weights",
        "inference server: a replica",
        "Engine fetches; Receiver stages, verifies,",
        "commits whole; the old version serves",
        "until then",
    )
    p.box(740, 496, 252, 90, "weights", "another one", "forward passes run in", "receiver.reading(): one version each")
    p.arrow((344, 520), (438, 520), kind="both")
    p.text(391, 512, "control", "soft", "middle")
    p.text(391, 540, "init, start,", "soft", "middle")
    p.text(391, 556, "update, finish", "soft", "middle")
    p.box(44, 630, 948, 44, "memory", "")
    p.text(
        56, 657, "the bytes of a version, by one engine: shm (memory without a name), tcp, disk, collective, cuda_ipc"
    )
    p.arrow((194, 586), (194, 628), kind="bulk")
    p.arrow((578, 630), (578, 588), kind="bulk")
    p.arrow((866, 630), (866, 588), kind="bulk")


def put_and_get() -> str:
    """Messages and copies, from top to bottom."""
    p = Picture(1040, 860, "The way of a put and of a get")
    _put(p, *_lanes(p, 0, "put of more than 64 KiB: two round trips, one copy"))
    _get(p, *_lanes(p, 520, "get on the same host: one round trip, no copy of whole runs"))
    _get_elsewhere(p)
    return p.svg()


def _lanes(p: Picture, x: int, title: str) -> tuple[int, int, int]:
    """Where client, server and arena are."""
    p.text(x + 24, 34, title, "name")
    lanes = x + 96, x + 268, x + 440
    for lane, name, colour in zip(lanes, ("client", "server", "arena"), ("client", "server", "memory"), strict=True):
        p.lane(lane, 52, 470, name, colour)
    return lanes


def _put(p: Picture, client: int, server: int, arena: int) -> None:
    p.step(client, 110, "1  plan: dtypes, shapes, lengths", "    no data is touched")
    p.call(client, server, 158, "2  Allocate(nbytes)")
    p.call(server, client, 186, "Allocated(arena, offset)")
    p.arrow((client, 238), (arena - 8, 238), kind="bulk")
    p.step(client, 228, "3  one memcpy a column, several threads when large")
    p.call(client, server, 288, "4  Commit(rows, block)")
    p.step(
        server, 312, "controller: the cells are ready,", "tags merge, waiting fetches are", "answered: one atomic step"
    )
    p.call(server, client, 374, "Committed(metadata)")
    p.step(
        client,
        412,
        "Up to 64 KiB step 2 and 3 are left out: the bytes ride with",
        "Commit, and the server copies them into a block.",
    )
    p.step(client, 446, "A client without a server on its host sends them by TCP (Write).")


def _get(p: Picture, c: int, s: int, a: int) -> None:
    p.call(c, s, 112, "1  Get(rows, fields)")
    p.step(s, 136, "controller: runs of blocks", "unit: pins them for this request")
    p.call(s, c, 182, "Located(runs, pieces)")
    p.arrow((a, 236), (c + 8, 236), kind="bulk")
    p.step(c, 226, "2  one run: a view, a tensor over the private mapping")
    p.step(c, 256, "    writable; what is written stays in this process")
    p.arrow((a, 306), (c + 8, 306), kind="bulk")
    p.step(c, 296, "or a gather: one copy a column and run")
    p.call(c, s, 362, "3  Unpin")
    p.step(s, 352, "when the last tensor over a", "view is gone, at once after", "a gather")
    p.step(c, 412, "Up to 64 KiB the bytes ride with Located: one copy into", "the reply, and step 2 reads them there.")


def _get_elsewhere(p: Picture) -> None:
    p.text(
        24,
        510,
        "get of rows that another host has: what lies here as above, the rest is received straight into place",
        "name",
    )
    b, own, head, other = 96, 330, 600, 880
    p.lane(b, 530, 836, "client", "client")
    p.lane(own, 530, 836, "server of its host", "server", 170)
    p.lane(head, 530, 836, "controller's server", "server", 170)
    p.lane(other, 530, 836, "server with the rows", "server", 170)
    p.call(b, own, 596, "1  Get(rows, fields)")
    p.call(own, head, 596, "passed on")
    p.call(head, own, 632, "Located(runs, units)")
    p.call(own, b, 632, "adds what lies here")
    p.call(b, other, 684, "2  Take(exactly these rows and fields), one request to each such server")
    p.arrow((other, 724), (b + 8, 724), kind="bulk")
    p.step(b, 714, "up to 1 MiB with the answer; more by Read, 32 MiB a request, several connections at once")
    p.call(b, other, 776, "3  Unpin")
    p.step(
        b,
        814,
        "A block that moved meanwhile is looked up again. On the controller's own host the first two servers are one.",
    )


if __name__ == "__main__":
    for name, drawn in (("processes", processes()), ("put-and-get", put_and_get())):
        (FOLDER / f"{name}.svg").write_text(drawn, encoding="utf-8")
