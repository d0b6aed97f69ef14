"""The dashboard and the alert rules ask only for metrics and labels that a service exports."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from paths import ROOT
from test_metrics import Scrape

import transfer_queue as tq
from transfer_queue.client.groups import GroupPool
from transfer_queue.errors import DeadlineExceeded, UnknownRows

GRAFANA = ROOT / "docs" / "grafana"
OF_PROMETHEUS = {"instance", "job", "le"}  # labels that every metric has there; `le` that of buckets
METRIC = re.compile(r"\btq_[a-z0-9_]+")
SELECTED = re.compile(r"\b(tq_[a-z0-9_]+)\{([^}]*)\}")
NAMED = re.compile(r"([a-z_]+)\s*(?:=~|!~|!=|=)")
GROUPED = re.compile(r"\b(?:by|on|without)\s*\(([^)]*)\)")
SHOWN = re.compile(r"\{\{\s*(?:\$labels\.)?([a-z_]+)\s*\}\}")


class Asked:
    """One expression and the texts that go with it."""

    def __init__(self, where: str, expr: str, texts: str) -> None:
        self.where, self.expr = where, expr
        bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', expr)
        self.metrics = set(METRIC.findall(bare))
        self.selected = {(name, label) for name, labels in SELECTED.findall(bare) for label in NAMED.findall(labels)}
        grouped = {one.strip() for found in GROUPED.findall(bare) for one in found.split(",")}
        self.labels = grouped | set(SHOWN.findall(texts))

    def __repr__(self) -> str:
        return self.where


def of_dashboard() -> Iterator[Asked]:
    board = json.loads((GRAFANA / "dashboard.json").read_text(encoding="utf-8"))
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
            yield Asked(f"variable {variable['name']}", metric, f"{{{{{label}}}}}")
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield Asked(f"panel {panel['title']}", target["expr"], target["legendFormat"])


def of_alerts() -> Iterator[Asked]:
    for group in yaml.safe_load((GRAFANA / "alerts.yml").read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            yield Asked(f"alert {rule['alert']}", rule["expr"], " ".join(rule["annotations"].values()))


def use(client: tq.TransferQueueClient) -> None:
    """Enough of a service that every family has a sample."""
    client.set_weight_version(1, "run")
    tq.kv_batch_put(["a", "b"], "train", {"x": torch.ones(2, 3)}, tags=[{"weight_version": 1}] * 2)
    client.set_weight_version(2, "run")
    with pytest.raises(DeadlineExceeded):  # a request that waits, as the rows are too old
        client.get_meta(["x"], 1, "train", "fetch", "actor", {"max_staleness": 0}, timeout_s=0.01)
    tq.kv_batch_get(["a"], "train")
    with pytest.raises(UnknownRows):
        tq.kv_batch_get(["nobody"], "train")
    pool: GroupPool = tq.group_pool("groups", tq.GroupPolicy.drop(1))
    pool.open("open", 3)
    pool.open("dropped", 1)
    (attempt,) = pool.claim(1, "dropped")
    pool.finish(attempt, {"x": torch.ones(1)}, reward=1.0)
    pool.filter("dropped")
    tq.open_partition("step", "steps", 0)


@pytest.fixture
def exported(service: Callable[..., tq.TransferQueueClient], tmp_path: Path) -> dict[str, set[str]]:
    """The labels of every sample that a service in use exports, by its name."""
    server: dict[str, Any] = {"journal_dir": str(tmp_path / "journal")}
    use(service(metrics={"enabled": True}, server=server))
    found: dict[str, set[str]] = {}
    for family in Scrape().families.values():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_metric_and_label_of_dashboard_and_alerts_is_exported(exported: dict[str, set[str]]) -> None:
    asked = [*of_dashboard(), *of_alerts()]
    assert sum(len(one.metrics) for one in asked) > 40
    for one in asked:
        assert one.metrics, one
        assert one.metrics <= exported.keys(), one
        for name, label in one.selected:
            assert label in exported[name] | OF_PROMETHEUS, (one, name, label)
        assert one.labels <= set().union(*(exported[name] for name in one.metrics)) | OF_PROMETHEUS, one


def test_only_who_waits_for_rows_starves() -> None:
    (starved,) = [rule for rule in of_alerts() if rule.where == "alert TransferQueueStarved"]
    assert starved.metrics == {"tq_oldest_fetch_wait_seconds"}  # puts of other fields, and other waits, say nothing


def test_an_alert_compares_a_service_with_itself_only() -> None:
    for rule in of_alerts():
        assert "scalar" not in rule.expr, rule  # one number of all services
        assert re.findall(r"\b(?:sum|max|min|avg|count)\b(?! by \(instance\b)", rule.expr) == [], rule
        assert re.findall(r"\b(?:and|unless)\b(?! on \(instance\))", rule.expr) == [], rule


def test_the_check_sees_what_a_service_does_not_export(exported: dict[str, set[str]]) -> None:
    wrong = Asked("", 'sum by (rank) (tq_blocks{unit="{tq_in_text}"}) / tq_missing_total', "{{ $labels.task_name }}")
    assert wrong.metrics - exported.keys() == {"tq_missing_total"}
    assert wrong.selected == {("tq_blocks", "unit")}
    assert wrong.labels == {"rank", "task_name"}


def test_panels_lie_beside_each_other_and_every_alert_says_what_to_do() -> None:
    board = json.loads((GRAFANA / "dashboard.json").read_text(encoding="utf-8"))
    places = [panel["gridPos"] for panel in board["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells))
    assert all(x < 24 for x, _ in cells)
    assert len({panel["id"] for panel in board["panels"]}) == len(places)
    rules = yaml.safe_load((GRAFANA / "alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
    topics = {"Starved", "RowsTooOld", "MemoryNearBudget", "DeadLetters"}
    assert {f"TransferQueue{topic}" for topic in topics} <= {rule["alert"] for rule in rules}


def test_each_alert_has_a_case() -> None:
    rules = yaml.safe_load((GRAFANA / "alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    cases = yaml.safe_load((GRAFANA / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    tried = {one["alertname"] for case in cases for one in case["alert_rule_test"] if one.get("exp_alerts") != []}
    assert tried == {rule["alert"] for rule in rules}
