"""The dashboard and the alert rules of examples/monitoring know the metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from fedquilt import metrics_endpoint
from fedquilt.coordinator.fleet.device_status import DeviceStatus
from fedquilt.coordinator.metrics_exporter import CoordinatorMetrics

FOLDER = Path(__file__).parents[2] / "examples/monitoring"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
OURS = {
    each.name + ("_total" if each.kind == "counter" else "") for each in CoordinatorMetrics(list).metric_families()
} | {
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
}
NAMES = re.compile(r"\b(?:fedquilt|process)_\w+")


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    board = json.loads((FOLDER / "grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(expressions) > 15
    asked = {name for each in expressions for name in NAMES.findall(each)}
    assert asked <= OURS
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    places = [tuple(panel["gridPos"][key] for key in ("x", "y")) for panel in board["panels"]]
    assert len(set(places)) == len(places)


def test_the_rules_ask_for_metrics_that_there_are() -> None:
    text = (FOLDER / "alerts.yml").read_text()
    asked = {name for line in text.splitlines() if "expr:" in line for name in NAMES.findall(line)}
    assert len(asked) > 6
    assert asked <= OURS


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: apt install prometheus")
def test_prometheus_takes_rules_and_configuration(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    (tmp_path / "test.yml").write_text(
        "rule_files: [alerts.yml]\nevaluation_interval: 1m\ntests:\n  - interval: 1m\n    input_series:\n"
        "      - {series: 'fedquilt_board_online{device=\"a\"}', values: '1 0x10'}\n"
        "      - {series: 'fedquilt_build{version=\"1\"}', values: '1x10'}\n"
        "    alert_rule_test:\n"
        "      - {eval_time: 5m, alertname: FedquiltBoardOffline, exp_alerts: []}\n"
        "      - eval_time: 7m\n        alertname: FedquiltBoardOffline\n"
        "        exp_alerts:\n          - exp_labels: {device: a, severity: warning}\n"
        "            exp_annotations:\n              summary: a is offline\n"
        "              description: '`fedquilt devices a` says since when.'\n"
    )
    for words in (
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "alerts.yml"),
        ("test", "rules", "test.yml"),
    ):
        done = subprocess.run([str(PROMTOOL), *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def prometheus(folder: Path) -> Iterator[str]:
    log = folder / "prometheus.log"
    words = ("--config.file=prometheus.yml", "--storage.tsdb.path=data", "--web.listen-address=127.0.0.1:0")
    with log.open("w") as out, subprocess.Popen([str(PROMETHEUS), *words], cwd=folder, stderr=out) as process:
        try:
            wait_until(
                lambda: "ready to receive web requests" in log.read_text(), "Prometheus", diagnostics=log.read_text
            )
            (place,) = re.findall(r'"Listening on" address=(\S+)', log.read_text())
            yield f"http://{place}/api/v1"
        finally:
            process.terminate()


def asked(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{url}: {error.read().decode()}") from None


@pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed: apt install prometheus")
def test_prometheus_itself_reads_a_coordinator_and_answers_every_panel(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="metrics are an extra")
    boards = [(DeviceStatus("a", online=True), None), (DeviceStatus("b"), None)]
    counts = CoordinatorMetrics(lambda: boards)
    with metrics_endpoint.serve_metrics("127.0.0.1:0", counts.metric_families) as place:
        shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
        path, target = tmp_path / "prometheus.yml", place.removeprefix("http://").removesuffix("/metrics")
        # by default it looks once a minute, which a test need not wait for
        intervals = "global: {scrape_interval: 1s, evaluation_interval: 1s}"
        path.write_text(f"{intervals}\n{path.read_text().replace('127.0.0.1:9464', target)}")
        with prometheus(tmp_path) as api:
            query = f"{api}/query?query="
            states = wait_until(lambda: asked(f"{query}fedquilt_board_online")["result"], "boards are read")
            assert {each["metric"]["device"]: each["value"][1] for each in states} == {"a": "1", "b": "0"}
            wait_until(
                lambda: all(rule["health"] == "ok" for rule in asked(f"{api}/rules")["groups"][0]["rules"]),
                "every rule is evaluated",
                diagnostics=lambda: str(asked(f"{api}/rules")),
            )
            offline = query + urllib.parse.quote('ALERTS{alertname="FedquiltBoardOffline"}')
            (alert,) = wait_until(lambda: asked(offline)["result"], "an alert of b")
            assert (alert["metric"]["device"], alert["metric"]["alertstate"]) == ("b", "pending")
            for panel in json.loads((tmp_path / "grafana.json").read_text())["panels"]:
                for target in panel["targets"]:
                    asked(query + urllib.parse.quote(target["expr"]))
