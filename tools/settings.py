"""Writes docs/settings.md from the settings themselves: config.yaml, the environment variables and the server's struct.

    python tools/settings.py          # write the page
    python tools/settings.py --check  # fail when the page is not what would be written

Defaults and meanings are those of config.yaml and of the classes' docstrings. KINDS adds what neither says: the type,
the unit, and the environment variable that counts where a setting is not given. A test hands wrong values to each.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from transfer_queue import config  # noqa: E402
from transfer_queue.server.settings import ServerConfig  # noqa: E402
from transfer_queue.weights.transport import registry  # noqa: E402

PAGE = ROOT / "docs" / "settings.md"
SOURCE = Path(config.__file__).with_name("config.yaml")
KEPT = re.compile(r"(^|; )kept\b")  # how comments begin on keys that are there for configurations of TransferQueue
ENGINES = ("shm", "tcp", "disk", "collective", "cuda_ipc")


class Kind(NamedTuple):
    type: str
    unit: str = ""
    variable: str = ""


FLAG, TEXT, PORT = Kind("true or false"), Kind("text"), Kind("whole number, 0 to 65535", "port")
KINDS = {
    "metrics.enabled": FLAG,
    "metrics.host": Kind("text or null"),
    "metrics.port": PORT,
    "metrics.endpoint": Kind("text or null"),
    "controller.sampler": Kind("name, class or instance"),
    "controller.staleness.max_age": Kind("whole number from 0, or null", "versions"),
    "controller.staleness.untagged": Kind("accept or refuse"),
    "controller.staleness.rows_per_version": Kind("whole number from 1, or null", "rows"),
    "controller.max_deliver": Kind("whole number from 1, or null", "deliveries"),
    "controller.strict_schema": FLAG,
    "controller.dedupe": FLAG,
    "controller.polling_mode": FLAG,
    "controller.zmq_info": Kind("object or null"),
    "backend.storage_backend": Kind("name of a backend"),
    "backend.required": FLAG,
    "backend.Files.url": Kind("text or null", "URL"),
    "backend.MooncakeStore.pool": Kind("true, false or null"),
    "backend.MooncakeStore.auto_init": FLAG,
    "backend.MooncakeStore.metadata_server": Kind("HOST:PORT, URL or P2PHANDSHAKE"),
    "backend.MooncakeStore.master_server_address": Kind("HOST:PORT"),
    "backend.MooncakeStore.local_hostname": TEXT,
    "backend.MooncakeStore.protocol": Kind("tcp or rdma"),
    "backend.MooncakeStore.global_segment_size": Kind("whole number from 1", "bytes"),
    "backend.MooncakeStore.device_name": TEXT,
    "backend.MooncakeStore.hard_pin": Kind("true or null"),
    "backend.RayStore.address": Kind("HOST:PORT or null"),
    "backend.RayStore.durable": FLAG,
    "backend.Yuanrong.auto_init": FLAG,
    "backend.Yuanrong.worker_port": PORT,
    "backend.Yuanrong.metastore_port": PORT,
    "backend.Yuanrong.worker_args": TEXT,
    "backend.SimpleStorage.total_storage_size": Kind("whole number from 1, or null", "rows"),
    "backend.SimpleStorage.budget_nbytes": Kind("whole number from 1, or null", "bytes"),
    "backend.SimpleStorage.trim_after_s": Kind("number above 0", "seconds"),
    "backend.SimpleStorage.arena_dir": Kind("text or null", "directory"),
    "backend.SimpleStorage.spill_dir": Kind("text or null", "directory"),
    "backend.SimpleStorage.spill_nbytes": Kind("whole number from 1, or null", "bytes"),
    "backend.MooncakeStore.offload.enabled": FLAG,
    "backend.MooncakeStore.offload.file_storage_path": Kind("text", "directory"),
    "backend.MooncakeStore.offload.local_buffer_size_bytes": Kind("whole number from 1048576", "bytes"),
    "backend.MooncakeStore.offload.use_uring": FLAG,
    "backend.MooncakeStore.offload.heartbeat_interval_seconds": Kind("whole number from 1", "seconds"),
    "backend.MooncakeStore.offload.eviction_high_watermark_ratio": Kind("number above 0, 1 at most"),
    "backend.MooncakeStore.offload.eviction_ratio": Kind("number above 0, 1 at most"),
    "backend.SimpleStorage.ssd_offload.enabled": FLAG,
    "backend.SimpleStorage.ssd_offload.path": Kind("text or null", "directory"),
    "client.timeout_s": Kind("number above 0", "seconds"),
    "client.allow_pickle": Kind("true, false or null", "", "TQ_ALLOW_PICKLE"),
    "client.copy_threads": Kind("whole number from 1, or null", "threads", "TQ_NUM_THREADS"),
    "client.pool_nbytes": Kind("whole number from 0", "bytes"),
    "client.spin_us": Kind("whole number from 0", "microseconds"),
    "server.host": TEXT,
    "server.port": PORT,
    "server.join": TEXT,
    "server.durability": Kind("none, process, machine or null"),
    "server.journal_dir": Kind("text or null", "directory"),
    "server.away_s": Kind("number above 0, or null", "seconds"),
    "server.spin_us": Kind("whole number from 0", "microseconds"),
    "server.notice_after_s": Kind("list of numbers above 0", "seconds"),
    "server.token_file": Kind("text or null", "file", "TQ_TOKEN, TQ_TOKEN_FILE"),
    "server.unit_token_file": Kind("text or null", "file", "TQ_UNIT_TOKEN, TQ_UNIT_TOKEN_FILE"),
    "run_dir": Kind("text or null", "directory", "TQ_RUN_DIR"),
    "address": Kind("text or null", "", "TQ_ADDRESS"),
}
VARIABLES = {  # beside those of `config.Environment`
    "TQ_TOKEN": "the token that opens a service over TCP, 16 characters or more; where `server.token_file` is null",
    "TQ_TOKEN_FILE": "a file of mode 0600 with that token; where `TQ_TOKEN` is not set",
    "TQ_UNIT_TOKEN": "the token of servers that join as storage units; where `server.unit_token_file` is null",
    "TQ_UNIT_TOKEN_FILE": "a file of mode 0600 with that token; where `TQ_UNIT_TOKEN` is not set",
    "TQ_WEIGHTS_ROOT": "the only folder below which a server of weights takes versions from disk",
    "TQ_ZERO_COPY_SERIALIZATION": "nothing: vime's bridge sets it, as its pull request does, and nobody reads it",
}
HEAD = """\
# Settings

<!-- Written by tools/settings.py; change config.yaml, a docstring, or that file, and run it again. -->

`tq.init(conf)` merges `conf`, an OmegaConf `DictConfig` or a mapping, over these defaults. The headings are its
sections: `tq.init({"client": {"timeout_s": 60}})`, in errors `client.timeout_s`. Where a setting has an environment
variable, that counts while the setting is null. `tq serve --config FILE` takes the same as YAML. The settings of a
service are those of the process that starts it; who attaches with others is warned (`ConfigMismatch`). An unknown name
gives a `ConfigWarning`, a wrong value a `ConfigError`; both name it. An environment variable
that is probably a slip for one of ours gives a `ConfigWarning`, too.
"""


class Setting(NamedTuple):
    name: str
    default: str
    meaning: str
    told_at: str  # the name of the setting or section whose comment that is

    @property
    def is_kept(self) -> bool:
        return KEPT.search(self.meaning) is not None


def settings(text: str) -> Iterator[Setting]:
    """Every key of config.yaml that is no section. Its meaning is its comment, behind or above it, or its section's.

    ValueError for a comment that goes on below the value it stands behind: it would be the next key's.
    """
    sections: list[tuple[int, str, str, str]] = []  # indentation, name, and as `Setting`
    above: list[str] = []
    behind = ""  # the line before, where it has a value and a comment
    for line in text.splitlines():
        stripped = line.strip()
        if behind and stripped.startswith("#") and line.index("#") > len(behind) - len(behind.lstrip()):
            raise ValueError(f"the comment of {behind.strip()!r} goes on below it: one line, or above it")
        behind = ""
        if not stripped or stripped.startswith("#"):
            above = [*above, stripped.removeprefix("#").strip()] if stripped else []
            continue
        indentation = len(line) - len(line.lstrip())
        while sections and sections[-1][0] >= indentation:
            sections.pop()
        found = re.fullmatch(r"(\w+):(?:\s+([^#\s].*?))?(?:\s+#\s*(.*))?", stripped)
        assert found is not None, line
        name = ".".join([*(one[1] for one in sections[-1:]), found[1]])
        meaning, told_at = " ".join([*above, found[3] or ""]).strip(), name
        if not meaning and sections:
            _, _, meaning, told_at = sections[-1]
        above = []
        if found[2]:
            behind = line if found[3] else ""
            yield Setting(name, found[2], meaning, told_at)
        else:
            sections.append((indentation, name, meaning, told_at))


def described(docstring: str, names: Sequence[str]) -> dict[str, str]:
    """What a docstring of the form "a: text. b, c: text." says of each name, with or without backquotes."""
    text = " ".join(docstring.split())
    label = rf"`?\b(?:{'|'.join(map(re.escape, names))})\b`?"
    parts = list(re.finditer(rf"(?:(?<=^)|(?<=[.;)] ))({label}(?:,? {label})*): ", text))
    ends = [*(part.start() for part in parts[1:]), len(text)]
    found: dict[str, str] = {}
    for part, end in zip(parts, ends, strict=True):
        meaning = text[part.end() : end].strip().rstrip(".;")
        for name in re.findall(r"\w+", part[1]):
            found.setdefault(name, meaning)
    return found


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return "\n".join([*lines, *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)])


def page() -> str:
    found = list(settings(SOURCE.read_text(encoding="utf-8")))
    parts = [HEAD]
    own = [one for one in found if not one.is_kept]
    for section in dict.fromkeys(one.name.rpartition(".")[0] for one in own):
        in_it = [one for one in own if one.name.rpartition(".")[0] == section]
        parts.append(f"## {section or 'Where the service is'}\n\n{_settings_table(in_it)}\n")
    parts.append(_variables())
    parts.append(_kept([one for one in found if one.is_kept]))
    parts += [_server(), _engines()]
    return "\n".join(parts)


def _settings_table(found: Sequence[Setting]) -> str:
    """One table of a section; a column that would be empty is left out."""
    kinds = [KINDS[one.name] for one in found]
    columns = {
        "setting": [f"`{one.name.rpartition('.')[2]}`" for one in found],
        "type": [kind.type for kind in kinds],
        "default": [f"`{one.default}`" for one in found],
        "unit": [kind.unit for kind in kinds],
        "variable": [_coded(kind.variable) for kind in kinds],
        "meaning": [one.meaning for one in found],
    }
    filled = {head: cells for head, cells in columns.items() if any(cells)}
    return table(list(filled), list(zip(*filled.values(), strict=True)))


def _kept(found: Sequence[Setting]) -> str:
    rows = {
        f"`{one.told_at}.*`" if one.told_at != one.name else f"`{one.name}`": one.meaning.removeprefix("kept; ")
        for one in found
    }
    return (
        "## Kept, without effect\n\nThese are keys of TransferQueue. They are there so that its configurations fit.\n\n"
        f"{table(('settings', 'why'), list(rows.items()))}\n"
    )


def _coded(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", ")) if names else ""


def _variables() -> str:
    told = described(config.Environment.__doc__ or "", list(config.Environment.__dataclass_fields__))
    rows = []
    for meaning in told.values():
        variable, _, rest = meaning.partition(", ")
        rows.append((f"`{variable}`", rest))
    rows += [(f"`{name}`", meaning) for name, meaning in VARIABLES.items()]
    return (
        "## Environment variables\n\nThose of torchrun, Slurm and `MASTER_ADDR` say which processes are one job:"
        f" [jobs](concepts.md#jobs).\n\n{table(('variable', 'meaning'), rows)}\n"
    )


def _server() -> str:
    return (
        "## What a server process is started with\n\nFor maintainers: `init` and `tq serve` make this of the settings"
        " and hand it to the new process as JSON.\n\n" + _fields(ServerConfig, told=True) + "\n"
    )


def _engines() -> str:
    parts = [
        "## Engines of weights\n\nWhat `trainer_init` takes, by engine ([weights](weights.md#engines)). Every engine"
        " takes the first table.\n"
    ]
    common = registry.trainer(ENGINES[0]).init_form.__mro__[1]
    parts.append(f"### Every engine\n\n{_form(common)}")
    for name in ENGINES:
        form = registry.trainer(name).init_form
        parts.append(f"### {name}\n\n{_form(form, common.__struct_fields__)}")
    return "\n".join(parts)


def _form(cls: type[Any], without: Sequence[str] = ()) -> str:
    """What a struct's docstring says, and its fields."""
    says = " ".join((cls.__doc__ or "").split())
    return f"{says}\n\n{_fields(cls, without)}\n"


def _fields(cls: type[Any], without: Sequence[str] = (), told: bool = False) -> str:
    """A table of a struct's fields; `told`: with what its docstring says of each."""
    meanings = described(cls.__doc__ or "", cls.__struct_fields__) if told else {}
    rows = []
    for field in msgspec.structs.fields(cls):
        if field.name in without:
            continue
        default = "required" if field.required else f"`{_default(field)!r}`"
        meaning = [meanings[field.name]] if told else []
        rows.append((f"`{field.name}`", f"`{_type(cls, field.name)}`", default, *meaning))
    return table(("field", "type", "default", *["meaning"] * told), rows)


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()  # type: ignore[operator]


def _type(cls: type[Any], name: str) -> str:
    """As the source writes it."""
    return next(str(one.__annotations__[name]) for one in cls.__mro__ if name in vars(one).get("__annotations__", {}))


def main(arguments: Sequence[str]) -> int:
    text = page()
    if arguments[:1] != ["--check"]:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE.name} is not current: run tools/settings.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
