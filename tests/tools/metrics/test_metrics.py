"""The dashboard and the alert rules that ship know the metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fedquilt import cli
from fedquilt.coordinator.exposed import Exposed
from fedquilt.tools import metrics as tool

PROMTOOL = shutil.which("promtool")
OURS = {each.name + ("_total" if each.kind == "counter" else "") for each in Exposed(list).families()} | {
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
}
NAMES = re.compile(r"\b(?:fedquilt|process)_\w+")


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    """In every panel; each panel has its own number and place."""
    board = json.loads((tool.HERE / "grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(expressions) > 15
    asked = {name for each in expressions for name in NAMES.findall(each)}
    assert asked <= OURS
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    places = [tuple(panel["gridPos"][key] for key in ("x", "y")) for panel in board["panels"]]
    assert len(set(places)) == len(places)


def test_the_rules_ask_for_metrics_that_there_are() -> None:
    """And name a command that says more."""
    text = (tool.HERE / "alerts.yml").read_text()
    asked = {name for line in text.splitlines() if "expr:" in line for name in NAMES.findall(line)}
    assert len(asked) > 6
    assert asked <= OURS


def test_files_are_written_for_a_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that is none is refused before anything is written."""
    assert cli.main(["metrics", "--out", str(tmp_path / "m"), "--target", "hub:9464"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert '"hub:9464"' in (tmp_path / "m/prometheus.yml").read_text()
    assert cli.main(["metrics", "--out", str(tmp_path / "n"), "--target", "hub"]) == 2
    assert not (tmp_path / "n").exists()


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: apt install prometheus")
def test_prometheus_takes_rules_and_configuration(tmp_path: Path) -> None:
    """As its own tool says; and the alert of a board that is away goes off after its time, and no sooner."""
    tool.write(tmp_path, "127.0.0.1:9464")
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
