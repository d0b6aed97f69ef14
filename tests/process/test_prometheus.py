"""A real Prometheus reads a service's metrics, judges its rules, and answers what the dashboard asks."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import until
from test_grafana import GRAFANA, of_dashboard, use
from test_metrics import get

import transfer_queue as tq

SERVER, TOOL = shutil.which("prometheus"), shutil.which("promtool")
pytestmark = pytest.mark.skipif(SERVER is None or TOOL is None, reason="no prometheus is installed here")
SETTINGS = {"$instance": ".*", "$partition": ".*", "$__rate_interval": "3s"}  # what Grafana puts in place of these


class Prometheus:
    """One that reads this service five times a second, with our rules."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        (folder / "prometheus.yml").write_text(
            yaml.safe_dump(
                {
                    "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "200ms"},
                    "rule_files": [str(GRAFANA / "alerts.yml")],
                    "scrape_configs": [{"job_name": "transfer_queue", "static_configs": [{"targets": [endpoint]}]}],
                }
            )
        )
        files = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        command = [str(SERVER), *files, "--web.listen-address=127.0.0.1:0", "--log.format=json"]
        self._log = folder / "prometheus.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stderr=log)

    def wait_ready(self) -> None:
        until(lambda: "Server is ready" in self._log.read_text(), "the start of Prometheus", 20)
        told = [json.loads(line) for line in self._log.read_text().splitlines()]
        self._address = next(one["address"] for one in told if one.get("msg") == "Listening on")

    def ask(self, path: str, **params: str) -> Any:
        status, text = get(self._address, f"/api/v1/{path}?{urllib.parse.urlencode(params)}")
        assert status == 200, text
        return json.loads(text)["data"]

    def results(self, expr: str) -> list[Any]:
        for name, value in SETTINGS.items():
            expr = expr.replace(name, value)
        return list(self.ask("query", query=expr)["result"])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


@pytest.fixture
def prometheus(service: Callable[..., tq.TransferQueueClient], tmp_path: Path) -> Iterator[Prometheus]:
    use(service(metrics={"enabled": True}, server={"journal_dir": str(tmp_path / "journal")}))
    found = Prometheus(tmp_path, tq.get_metrics_endpoint() or "")
    try:
        found.wait_ready()
        yield found
    finally:
        found.close()


def test_every_panel_of_the_dashboard_has_an_answer(prometheus: Prometheus) -> None:
    def is_shown(expr: str) -> bool:
        tq.kv_batch_put([str(time.monotonic())], "train", {"x": torch.ones(1, 3)})  # what has a rate goes on
        return bool(prometheus.results(expr))

    for one in of_dashboard():
        until(lambda one=one: is_shown(one.expr), f"an answer for {one}: {one.expr}", 20)


def test_the_rules_are_judged_without_a_fault(prometheus: Prometheus) -> None:
    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]

    until(lambda: all(rule["health"] != "unknown" for rule in rules()), "the first look at the rules", 20)
    assert len(rules()) > 10
    assert [rule for rule in rules() if rule["health"] != "ok"] == []


def test_each_alert_fires_when_it_should_and_not_before() -> None:
    ran = subprocess.run([str(TOOL), "test", "rules", str(GRAFANA / "alerts_test.yml")], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
