"""The checkers of histories: they name every planted fault, and accept whatever a correct service can answer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from histories import Clear, Get, Put, Record, check_keys
from histories_rows import Ack, End, Fetch, Insert, Release, check_rows
from hypothesis import given, settings
from hypothesis import strategies as st

seeds = st.integers(0, 1 << 32)


def put(value: int, started: float, ended: float, outcome: Any = "ok", key: str = "k") -> Put:
    return Put(process="w", key=key, value=value, started=started, ended=ended, outcome=outcome)


def unknown_put(value: int, started: float) -> Put:
    return Put(process="w", key="k", value=value, started=started)


def get(value: int | None, started: float, ended: float) -> Get:
    return Get(process="r", key="k", value=value, started=started, ended=ended, outcome="ok")


def clear(started: float, ended: float) -> Clear:
    return Clear(process="c", key="k", started=started, ended=ended, outcome="ok")


def insert(started: float, ended: float, *rows: str) -> Insert:
    return Insert(process="w", rows=rows, started=started, ended=ended, outcome="ok")


def take(started: float, ended: float, *rows: str, process: str = "a", task: str = "t") -> Fetch:
    return Fetch(process=process, task=task, size=len(rows), rows=rows, started=started, ended=ended, outcome="ok")


def lend(started: float, ended: float, lease: int, *rows: str, lease_s: float = 100.0, process: str = "a") -> Fetch:
    return replace(take(started, ended, *rows, process=process), lease=lease, lease_s=lease_s)


def ack(started: float, ended: float, lease: int, *rows: str, outcome: Any = "ok") -> Ack:
    return Ack(process="a", task="t", lease=lease, rows=rows, started=started, ended=ended, outcome=outcome)


def release(started: float, ended: float, lease: int, *rows: str) -> Release:
    return Release(process="a", task="t", lease=lease, rows=rows, started=started, ended=ended, outcome="ok")


def end(process: str, at: float) -> End:
    return End(process=process, started=at, ended=at, outcome="ok")


def names(history: Sequence[Record]) -> set[str]:
    rows = check_rows(history, drained=["t"] if any(isinstance(record, Insert) for record in history) else [])
    return {violation.name for violation in (*check_keys(history), *rows)}


WRONG: list[tuple[str, list[Record]]] = [
    ("read of a value never written", [put(1, 0, 1), get(2, 2, 3)]),
    ("read of a refused write", [put(1, 0, 1, "refused"), get(1, 2, 3)]),
    ("read before its write", [get(1, 0, 1), put(1, 2, 3)]),
    ("lost write", [put(1, 0, 1), get(None, 2, 3)]),
    ("lost write", [put(1, 0, 1), put(2, 2, 3), get(1, 4, 5), get(1, 6, 7)]),
    ("lost write", [put(1, 0, 1), clear(2, 3), get(1, 4, 5)]),
    ("stale read", [put(1, 0, 1), put(2, 2, 3), get(2, 4, 5), get(1, 6, 7)]),
    ("stale read", [put(1, 0, 1), clear(2, 3), get(None, 4, 5), get(1, 6, 7)]),
    ("stale read", [put(1, 0, 1), put(2, 2, 9), get(2, 3, 4), put(3, 5, 6), get(3, 7, 8), get(2, 10, 11)]),
    ("no order", [put(1, 0, 9), put(2, 0, 9), get(1, 1, 2), get(2, 3, 4), get(1, 5, 6)]),
    ("grant of a row never put", [insert(0, 1, "a"), take(2, 3, "a"), take(4, 5, "b")]),
    ("grant before the put", [take(0, 1, "a"), insert(2, 3, "a")]),
    ("granted twice", [insert(0, 1, "a"), take(2, 3, "a"), take(4, 5, "a", process="b")]),
    ("granted twice", [insert(0, 1, "a"), take(2, 5, "a"), take(3, 4, "a", process="b")]),
    ("granted twice", [insert(0, 1, "a"), take(2, 3, "a"), lend(4, 5, 1, "a")]),
    ("lost row", [insert(0, 1, "a", "b"), take(2, 3, "a")]),
    ("lost row", [insert(0, 1, "a"), lend(2, 3, 1, "a"), release(4, 5, 1, "a")]),
    ("lost row", [replace(insert(0, 1, "a", "b"), outcome="unknown"), take(2, 3, "a")]),
    ("granted while another lease lives", [insert(0, 1, "a"), lend(2, 3, 1, "a"), lend(4, 5, 2, "a", process="b")]),
    ("granted while another lease lives", [insert(0, 1, "a"), lend(2, 3, 1, "a"), take(4, 5, "a", process="b")]),
    ("granted while another lease lives", [insert(0, 1, "a"), lend(2, 5, 1, "a"), lend(3, 6, 2, "a", process="b")]),
    ("granted after its ack", [insert(0, 1, "a"), lend(2, 3, 1, "a"), ack(4, 5, 1, "a"), take(6, 7, "a")]),
    ("ack of a dead lease", [insert(0, 1, "a"), lend(2, 3, 1, "a", lease_s=1), lend(5, 6, 2, "a"), ack(7, 8, 1, "a")]),
    ("ack of a dead lease", [insert(0, 1, "a"), lend(2, 3, 1, "a", lease_s=1), ack(5, 6, 1, "a")]),
    ("ack of a dead lease", [insert(0, 1, "a"), lend(2, 3, 1, "a"), release(4, 5, 1, "a"), ack(6, 7, 1, "a")]),
    ("ack of a dead lease", [insert(0, 1, "a"), lend(2, 3, 1, "a", process="x"), end("x", 4), ack(5, 6, 1, "a")]),
    ("acked twice", [insert(0, 1, "a"), lend(2, 3, 1, "a"), lend(4, 5, 2, "a"), ack(6, 7, 1, "a"), ack(6, 7, 2, "a")]),
    ("ack of a row that was not lent", [insert(0, 1, "a", "b"), lend(2, 3, 1, "a"), ack(4, 5, 1, "a", "b")]),
    ("a living lease is refused", [insert(0, 1, "a"), lend(2, 3, 1, "a"), ack(4, 5, 1, "a", outcome="refused")]),
]


@pytest.mark.parametrize(("name", "history"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_a_planted_fault_is_named(name: str, history: list[Record]) -> None:
    assert name in names(history)


RIGHT: dict[str, list[Record]] = {
    "a read beside a write sees either": [put(1, 0, 1), put(2, 2, 5), get(2, 3, 4), get(1, 2, 3)],
    "writes at once come in any order": [put(1, 0, 9), put(2, 0, 9), get(2, 1, 2), get(1, 3, 4)],
    "a write of unknown outcome shows late": [put(1, 0, 1), unknown_put(2, 2), get(1, 3, 4), get(2, 5, 6)],
    "a write of unknown outcome never shows": [put(1, 0, 1), unknown_put(2, 2), get(1, 3, 4)],
    "a clear of unknown outcome shows": [put(1, 0, 1), Clear(process="c", key="k", started=2), get(None, 8, 9)],
    "a clear of unknown outcome between": [
        put(1, 0, 1), Clear(process="c", key="k", started=2), get(None, 3, 4), put(3, 5, 6), get(3, 7, 8),
    ],
    "every task gets a row": [insert(0, 1, "a"), take(2, 3, "a"), take(2, 3, "a", task="u")],
    "a fetch of unknown outcome": [
        insert(0, 1, "a"), Fetch(process="x", task="t", size=1, started=2),
    ],
    "a put of unknown outcome that nobody saw": [replace(insert(0, 1, "a"), outcome="unknown")],
    "a grant beside the put": [insert(0, 3, "a"), take(1, 2, "a")],
    "a lease that ran out": [
        insert(0, 1, "a"), lend(2, 3, 1, "a", lease_s=5), lend(4, 8, 2, "a"), ack(9, 10, 1, "a", outcome="refused"),
        ack(9, 10, 2, "a"),
    ],
    "a lease whose holder died": [insert(0, 1, "a"), lend(2, 3, 1, "a"), end("a", 4), take(4, 5, "a", process="b")],
    "an ack that is repeated": [
        insert(0, 1, "a"), lend(2, 3, 1, "a", lease_s=3), ack(4, 5, 1, "a"), ack(9, 10, 1, "a"),
    ],
    "an ack of unknown outcome": [
        insert(0, 1, "a", "b"), lend(2, 3, 1, "a"), ack(4, 9, 1, "a", outcome="unknown"),
        lend(2, 3, 2, "b", lease_s=1), ack(3, 9, 2, "b", outcome="unknown"), take(20, 21, "b"),
    ],
    "rows given back": [insert(0, 1, "a"), lend(2, 3, 1, "a"), release(4, 9, 1, "a"), take(5, 6, "a")],
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_what_a_correct_service_may_answer_is_accepted(name: str) -> None:
    assert names(RIGHT[name]) == set()


def test_an_unseen_fetch_hides_rows_only_where_nobody_undoes_it() -> None:
    history = [insert(0, 1, "a"), Fetch(process="x", task="t", size=1, started=2)]
    assert check_rows(history, ["t"]) == []
    assert [v.name for v in check_rows(history, ["t"], fetches_are_undone=True)] == ["lost row"]


# keys against every order there is, and random histories of a register


def possible(history: Sequence[Put | Get | Clear]) -> bool:
    """By trying every order of every choice of what took effect."""
    sure = [r for r in history if r.outcome == "ok"]
    in_doubt = [r for r in history if r.outcome == "unknown" and not isinstance(r, Get)]
    for some in itertools.chain.from_iterable(itertools.combinations(in_doubt, n) for n in range(len(in_doubt) + 1)):
        for order in itertools.permutations([*sure, *some]):
            if all(not b.ended < a.started for a, b in itertools.combinations(order, 2)) and reads_fit(order):
                return True
    return False


def reads_fit(order: Sequence[Put | Get | Clear]) -> bool:
    value = None
    for record in order:
        if isinstance(record, Get):
            if record.value != value:
                return False
        else:
            value = record.value if isinstance(record, Put) else None
    return True


@st.composite
def small_histories(draw: Any) -> list[Any]:
    history: list[Any] = []
    for value in range(draw(st.integers(1, 6))):
        started = float(draw(st.integers(0, 8)))
        ended = started + draw(st.integers(1, 6)) - 0.5
        kind = draw(st.sampled_from(["put", "put", "get", "get", "clear"]))
        if kind == "get":
            history.append(get(draw(st.sampled_from([None, 0, 1, 2, 3])), started, ended))
            continue
        record: Any = put(value, started, ended) if kind == "put" else clear(started, ended)
        if draw(st.booleans()) and draw(st.booleans()):
            record = replace(record, ended=float("inf"), outcome="unknown")
        history.append(record)
    return history


@given(small_histories())
@settings(max_examples=400, deadline=None)
def test_the_search_agrees_with_trying_every_order(history: list[Any]) -> None:
    assert (check_keys(history) == []) == possible(history)


def around(rng: random.Random, at: float) -> dict[str, float]:
    """An interval that holds the instant `at`; those of neighbouring instants overlap."""
    return {"started": at - rng.random() * 4, "ended": at + rng.random() * 4}


def register_history(rng: random.Random, count: int) -> list[Put | Get | Clear]:
    """What a register answered, each operation at an instant of its own; some outcomes got lost."""
    value: int | None = None
    history: list[Put | Get | Clear] = []
    for at in range(count):
        when: dict[str, Any] = {"process": "p", "key": "k", **around(rng, at)}
        kind, lost = rng.random(), rng.random() < 0.1
        if kind < 0.5:
            history.append(Get(**when, value=value, outcome="ok"))
            continue
        record: Put | Clear = Put(**when, value=at, outcome="ok") if kind < 0.9 else Clear(**when, outcome="ok")
        if lost:
            record = replace(record, ended=float("inf"), outcome="unknown")
        if not lost or rng.random() < 0.5:
            value = at if isinstance(record, Put) else None
        history.append(record)
    return history


@given(seeds, st.integers(1, 60))
@settings(max_examples=150, deadline=None)
def test_random_histories_of_a_register_are_accepted(seed: int, count: int) -> None:
    rng = random.Random(seed)
    history = register_history(rng, count)
    rng.shuffle(history)
    assert check_keys(history) == []


@given(seeds, st.integers(20, 60))
@settings(max_examples=150, deadline=None)
def test_a_read_that_is_certainly_wrong_is_refused(seed: int, count: int) -> None:
    rng = random.Random(seed)
    history = register_history(rng, count)
    wrong = []
    for i, read in enumerate(history):
        if not isinstance(read, Get):
            continue
        wrong.append((i, -1))
        puts = [r for r in history if isinstance(r, Put)]
        wrong += [(i, r.value) for r in puts if r.started > read.ended]
        known = [r for r in puts if r.outcome == "ok" and r.ended < read.started]
        wrong += [(i, a.value) for a, b in itertools.permutations(known, 2) if a.ended < b.started]
    for i, value in rng.sample(wrong, min(5, len(wrong))):
        mutated = [*history[:i], replace(history[i], value=value), *history[i + 1 :]]
        assert len(check_keys(mutated)) == 1, (history[i], value)


def test_a_long_history_is_decided_quickly() -> None:
    history = register_history(random.Random(1), 4000)
    assert check_keys(history) == []
    at = max(i for i, record in enumerate(history) if isinstance(record, Get))
    assert len(check_keys([*history[:at], replace(history[at], value=-1), *history[at + 1 :]])) == 1


# random histories of a service of rows


def row_history(rng: random.Random, count: int) -> list[Record]:
    """What a correct service answered, each operation at an instant of its own; drained at the end."""
    history: list[Record] = []
    free: dict[str, list[str]] = {"t": [], "u": []}
    leases: dict[int, tuple[str, set[str], float]] = {}
    ended: set[str] = set()
    for at in [float(n) for n in range(count)]:
        for task, rows, until in [*leases.values()]:
            if until <= at:
                free[task] += sorted(rows)
        leases = {n: held for n, held in leases.items() if held[2] > at}
        task, kind = rng.choice("tu"), rng.random()
        when: dict[str, Any] = {"process": f"p{rng.randrange(4)}", "outcome": "ok", **around(rng, at)}
        if kind < 0.4:
            rows = tuple(f"{at:g}.{n}" for n in range(rng.randint(1, 3)))
            history.append(Insert(**when, rows=rows))
            for offered in free.values():
                offered += rows
        elif kind < 0.7:
            size = rng.randint(1, 3)
            rows, free[task] = tuple(free[task][:size]), free[task][size:]
            if task == "u" and rows:
                lease_s = rng.choice([3.0, 10.0])
                leases[int(at)] = (task, set(rows), at + lease_s)
                when["process"] = f"l{at:g}"
                history.append(Fetch(**when, task=task, size=size, rows=rows, lease=int(at), lease_s=lease_s))
            else:
                history.append(Fetch(**when, task=task, size=size, rows=rows))
        elif leases:
            number = rng.choice(sorted(leases))
            task, held, until = leases[number]
            fetch = next(r for r in history if isinstance(r, Fetch) and r.lease == number)
            when["started"] = max(when["started"], fetch.ended)
            if not held or fetch.ended > at or fetch.process in ended:
                continue
            some = tuple(sorted(held)[: rng.randint(1, 3)])
            if kind < 0.85:
                history.append(Ack(**when, task=task, lease=number, rows=some))
            elif kind < 0.95:
                history.append(Release(**when, task=task, lease=number, rows=some))
                free[task] += some
            else:
                history.append(End(**{**when, "process": fetch.process}))
                some = tuple(held)
                free[task] += some
                ended.add(fetch.process)
            held.difference_update(some)
    last = count + 100.0
    for task, rest in free.items():
        held_rows = [row for _, (name, rows, _) in leases.items() if name == task for row in sorted(rows)]
        history += [take(last, last + 1, row, task=task, process="drain") for row in [*rest, *held_rows]]
    return history


@given(seeds, st.integers(5, 150))
@settings(max_examples=200, deadline=None)
def test_random_histories_of_rows_are_accepted(seed: int, count: int) -> None:
    history = row_history(random.Random(seed), count)
    assert check_rows(history, ["t", "u"]) == []


def granted_again(rng: random.Random, history: list[Any]) -> tuple[str, list[Any]]:
    taken = [(r, row) for r in history if isinstance(r, Fetch) and not r.lease for row in r.rows]
    fetch, row = rng.choice(taken)
    return "granted twice", [*history, replace(fetch, started=1e6, ended=1e6 + 1, rows=(row,))]


def acked_rows_come_back(rng: random.Random, history: list[Any]) -> tuple[str, list[Any]]:
    one = rng.choice([r for r in history if type(r) is Ack])
    return "granted after its ack", [*history, take(1e6, 1e6 + 1, one.rows[0], task="u")]


def lost_rows(rng: random.Random, history: list[Any]) -> tuple[str, list[Any]]:
    drains = [r for r in history if isinstance(r, Fetch) and r.process == "drain"]
    gone = rng.choice(drains)
    return "lost row", [r for r in history if r is not gone]


def a_late_ack(rng: random.Random, history: list[Any]) -> tuple[str, list[Any]]:
    lent = [r for r in history if isinstance(r, Fetch) and r.lease]
    fetch = rng.choice([f for f in lent if not any(isinstance(r, Ack) and r.lease == f.lease for r in history)])
    late = Ack(process="x", task="u", lease=fetch.lease, rows=fetch.rows, started=1e6, ended=1e6 + 1, outcome="ok")
    return "ack of a dead lease", [*history, late]


@pytest.mark.parametrize("mutate", [granted_again, acked_rows_come_back, lost_rows, a_late_ack])
@given(seed=seeds)
@settings(max_examples=40, deadline=None)
def test_a_fault_in_a_random_history_of_rows_is_named(mutate: Callable[..., Any], seed: int) -> None:
    rng = random.Random(seed)
    try:
        name, history = mutate(rng, row_history(rng, 80))
    except IndexError:
        return  # nothing to break in this one
    assert name in {violation.name for violation in check_rows(history, ["t", "u"])}
