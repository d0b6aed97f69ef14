"""SQL over live partitions: what is read, what is out of reach, and the command `tq sql`."""

from __future__ import annotations

import json
import subprocess
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Terminal
from conftest import until
from strikes import struck_as_it_waits
from test_cli import ENVIRONMENT
from zygote import CHILDREN

import transfer_queue as tq
from transfer_queue.errors import DataLost, InvalidInput
from transfer_queue.tables import cell_batches, row_listing

pytestmark = pytest.mark.usefixtures("shared")


@pytest.fixture
def train(request: pytest.FixtureRequest) -> str:
    """A partition of four rows, named for the test."""
    partition: str = request.node.name
    fields = {"g": torch.tensor([0, 0, 1, 1]), "x": torch.tensor([1.0, 2.0, 3.0, 4.0]), "s": ["a", "b", "c", "d"]}
    tq.kv_batch_put(["k0", "k1", "k2", "k3"], partition, fields, tags=[{"step": n} for n in range(4)])
    return partition


@pytest.fixture
def fields_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fields whose cells were asked for."""
    found: list[str] = []
    plain = cell_batches.CellBatches._read

    def read(self: Any, rows: Any, names: list[str]) -> Any:
        found.extend(names)
        return plain(self, rows, names)

    monkeypatch.setattr(cell_batches.CellBatches, "_read", read)
    return found


def rows(query: str) -> list[tuple[Any, ...]]:
    found = tq.sql(query)
    return list(zip(*(column.to_pylist() for column in found.columns), strict=True))


def test_a_query_groups_rows(train: str) -> None:
    assert rows(f'select g, sum(x), max(tag_step) from "{train}" group by g order by g') == [(0, 3.0, 1), (1, 7.0, 3)]


def test_only_the_columns_that_a_query_needs_are_read(train: str, fields_read: list[str]) -> None:
    assert rows(f'select sum(x) from "{train}"') == [(10.0,)]
    assert fields_read == ["x"]
    del fields_read[:]
    assert rows(f"select x from \"{train}\" where s = 'c'") == [(3.0,)]
    assert sorted(fields_read) == ["s", "x"]
    del fields_read[:]
    assert rows(f'select count(*) from "{train}"') == [(4,)]
    assert fields_read == []


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("select * from {} where key = 'k2'", 6), ("from {} where key = 'k2'", 6), ("select {} from {} limit 1", 1),
        ("select columns('tag_.*') from {} limit 1", 1), ("select #6 from {} limit 1", 1),
        ("select a.tag_step from {} a join {} b using (tag_step) where a.key = 'k2'", 1),
        ("select a.tag_step from {} a natural join {} b where a.key = 'k2'", 1),
        ("select count(*) from {} having max(TAG_step) = 3", 1), ("describe {}", 6), ("show {}", 6),
        ("with t as (select tag_step as s from {}) select s from t where s = 2", 1),
    ],
)  # fmt: skip
def test_tags_are_there_however_they_are_meant(train: str, query: str, expected: int) -> None:
    found = tq.sql(query.replace("{}", f'"{train}"'))
    assert found.num_rows >= 1
    assert found.num_columns == expected or query.startswith(("describe", "show"))
    if query.startswith("select {}"):
        assert found.column(0)[0].as_py()["tag_step"] in range(4)


@pytest.mark.parametrize("condition", ["s = 'c'", "s in ('c', 'z')", "x > 2.5 and g = 1 and s < 'd'", "s is not null"])
def test_a_condition_on_a_column_that_is_not_shown(train: str, condition: str) -> None:
    expected = [row[0] for row in rows(f'select * from (select key, x, g, s from "{train}") where {condition}')]
    assert [row[0] for row in rows(f'select key from "{train}" where {condition}')] == expected


def test_partitions_are_joined(train: str) -> None:
    tq.kv_batch_put(["k1", "k3"], "other", {"y": torch.tensor([10, 30])})
    query = f'select t.key, x, y from "{train}" t, other where t.key = other.key order by 1'
    assert rows(query) == [("k1", 2.0, 10), ("k3", 4.0, 30)]


@pytest.mark.parametrize("name", ['odd "name"', "a;b", "x\n\ty", "s.t", "ÄÖ", "z" * 10_000, "select"])
def test_odd_names_are_quoted(name: str) -> None:
    tq.kv_put("a", name, {"v": torch.tensor(1)})
    quoted = '"' + name.replace('"', '""') + '"'
    assert rows(f"select v from {quoted}") == [(1,)]


def test_names_that_differ_only_in_case() -> None:
    tq.kv_put("a", "Case", {"v": torch.tensor(1)})
    assert rows('select v from "CASE"') == [(1,)]
    tq.kv_put("a", "case", {"v": torch.tensor(2)})
    assert rows('select v from "case"') == [(2,)]
    with pytest.raises(InvalidInput, match="may be any of the partitions"):
        tq.sql('select v from "CASE"')
    with pytest.raises(InvalidInput, match="differ only in case"):
        tq.sql('select 1 from "case", "Case"')


@pytest.mark.parametrize(
    "query",
    [
        "select * from read_csv('{path}')", "select * from '{path}'", "select * from read_text('{path}')",
        "copy (select 1) to '{path}'", "attach '{path}' as db", "install httpfs", "load httpfs",
        "set enable_external_access = true", "export database '{path}'", "select * from glob('{path}')",
        "reset lock_configuration", "select * from monkeypatch", "select 1; select 2", "", "selec 1",
    ],
)  # fmt: skip
def test_files_extensions_settings_and_nonsense_are_refused(query: str, tmp_path: Path) -> None:
    path = tmp_path / "secret.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InvalidInput, match="SQL"):
        tq.sql(query.format(path=path))
    assert path.read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("select count(*) from {} using sample 2 rows", 2), ("select count(*) from {} tablesample 100%", 4),
        ("select count(*) from {} tablesample reservoir(3)", 3),
        ("select count(*) from {} using sample 100% (system)", 4),
    ],
)  # fmt: skip
def test_rows_are_sampled(train: str, query: str, expected: int) -> None:
    assert rows(query.replace("{}", f'"{train}"')) == [(expected,)]


@pytest.mark.parametrize("query", ["show tables", "show all tables", "from (show tables)", "describe"])
def test_who_asks_for_the_tables_hears_where_they_are_listed(query: str) -> None:
    with pytest.raises(InvalidInput, match="`tq ls` lists them"):
        tq.sql(query)


def test_unknown_tables_and_columns_are_named(train: str) -> None:
    with pytest.raises(InvalidInput, match=r"^SQL: partition 'nowhere' does not exist: `tq ls` shows those that do$"):
        tq.sql("select * from nowhere")
    tq.kv_put("k", "slips", {"x": torch.ones(1)})
    with pytest.raises(InvalidInput, match=r"^SQL: partition 'silps' does not exist; the nearest is 'slips'$"):
        tq.sql("select * from silps")
    with pytest.raises(InvalidInput, match="rewards"):
        tq.sql(f'select rewards from "{train}"')
    with pytest.raises(InvalidInput, match="a query is a string"):
        tq.sql(1)  # type: ignore[arg-type]


def test_what_reading_raises_reaches_the_caller(train: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: Any, rows: Any, names: list[str]) -> Any:
        raise DataLost("the host is gone")

    monkeypatch.setattr(cell_batches.CellBatches, "_read", lost)
    with pytest.raises(DataLost, match="the host is gone"):
        tq.sql(f'select sum(x) from "{train}"')


@pytest.mark.parametrize("read", ["", " and exists (from {})"])
def test_an_interrupt_ends_a_query_that_would_not_end(train: str, read: str) -> None:
    """DuckDB itself looks for signals between its tasks, of which one lasts as long as this query."""
    endless = "select count(*) from range(100000000000) a, range(1000000) b where a.range >= 0"
    struck_as_it_waits(lambda: tq.sql(endless + read.replace("{}", f'"{train}"')), "tq-sql")
    until(lambda: all(thread.name != "tq-sql" for thread in threading.enumerate()), "the query ended")


def test_rows_come_and_go_while_queries_run() -> None:
    stop = threading.Event()
    tq.kv_put("first", "busy", {"x": torch.tensor(1)})

    def churn() -> None:
        number = 0
        while not stop.is_set():
            keys = [f"{number}-{n}" for n in range(50)]
            tq.kv_batch_put(keys, "busy", {"x": torch.ones(50, dtype=torch.int64)})
            tq.kv_clear(keys, "busy")
            number += 1

    writer = threading.Thread(target=churn)
    writer.start()
    try:
        for _ in range(30):
            (found,) = rows("select count(*), count(x), sum(x), count(key) from busy")
            assert len(set(found)) == 1
    finally:
        stop.set()
        writer.join()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from transfer_queue.cli import main; main()"
    return CHILDREN.run(["-c", code, *arguments], {**ENVIRONMENT, "TQ_ADDRESS": tq.address()})


def test_the_command_prints_a_table_json_or_csv(train: str) -> None:
    tq.kv_put("odd", train, {"s": 'a\x1b[31m,\n"b"', "x": torch.tensor(float("nan"))})
    query = f"select key, s, x, [1, 2] as l from \"{train}\" where key in ('k0', 'odd') order by key"
    assert json.loads(command("sql", query, "--json").stdout) == [
        {"key": "k0", "s": "a", "x": 1.0, "l": [1, 2]},
        {"key": "odd", "s": 'a\x1b[31m,\n"b"', "x": None, "l": [1, 2]},
    ]
    assert command("sql", query, "--csv").stdout == (
        'key,s,x,l\nk0,a,1.0,"[1, 2]"\nodd,"a\x1b[31m,\n""b""",nan,"[1, 2]"\n'
    )
    twice = "select 1 as a, 2 as a, 3 as a_1, 4 as b"
    assert json.loads(command("sql", twice, "--json").stdout) == [{"a": 1, "a_2": 2, "a_1": 3, "b": 4}]
    shown = command("sql", query).stdout
    assert [line.split()[0] for line in shown.splitlines()] == ["key", "k0", "odd"], "in a pipe a row is a line"
    assert "\x1b" not in shown
    assert command("sql", f'select * from "{train}" where g > 99', "--json").stdout.strip() == "[]"


def test_json_has_numbers_for_decimals(train: str) -> None:
    query = f'select sum(global_index) - sum(global_index) + 7 as a, 1.5 as b, [2.25] as c from "{train}"'
    assert type(tq.sql(query).column("a")[0].as_py()) is Decimal
    assert json.loads(command("sql", query, "--json").stdout) == [{"a": 7, "b": 1.5, "c": [2.25]}]
    long = "12345678901234567.89"
    query = f"select {long}::decimal(38,2) as a, [{long}::decimal(38,2)] as b, {{'k': -0.5::decimal(2,1)}} as c"
    told = json.loads(command("sql", query, "--json").stdout, parse_float=Decimal)
    assert told == [{"a": Decimal(long), "b": [Decimal(long)], "c": {"k": Decimal("-0.5")}}]


def test_csv_on_a_terminal_has_nothing_that_acts_on_it(train: str) -> None:
    tq.kv_put("odd", train, {"s": "a\x1b[2J\x1b]0;b\x07"})
    query = f'select s as "n\x1b[31m" from "{train}" where key = \'odd\''
    with Terminal("sql", query, "--csv", "--address", str(tq.address())) as terminal:
        assert terminal.end() == 0
    assert "\x1b" not in terminal.text
    assert terminal.text.splitlines() == ["n\\x1b[31m", "a\\x1b[2J\\x1b]0;b\\x07"]


def test_errors_of_the_command_are_one_line(train: str) -> None:
    for arguments in (["selec"], ["select 1", "--json", "--csv"], ["select * from '/etc/passwd'"]):
        done = command("sql", *arguments)
        assert done.returncode == 1
        assert done.stderr.startswith("tq: ")
        assert "Traceback" not in done.stderr


def test_of_tags_only_those_are_read_that_a_query_names(monkeypatch: pytest.MonkeyPatch) -> None:
    tq.kv_batch_put(["a", "b"], "few tags", {"x": torch.ones(2)}, tags=[{"step": 1, "source": "math"}] * 2)
    plain, asked = row_listing.RowListing.tag_values, []

    def told(self: Any, names: list[str]) -> Any:
        asked.append(names)
        return plain(self, names)

    monkeypatch.setattr(row_listing.RowListing, "tag_values", told)
    for query in ("sum(x)", "sum(TAG_step)", "*"):
        assert tq.sql(f'select {query} from "few tags"').num_rows
    assert asked == [[], ["step"], ["step", "source"]]
