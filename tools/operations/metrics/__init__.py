"""Grafana dashboard and Prometheus alert rules for the metrics exporter."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fedquilt import metrics_endpoint
from fedquilt.host import disk

FOLDER: Final = Path(__file__).parent
FILES: Final = ("grafana.json", "alerts.yml")
PROMETHEUS_CONFIG: Final = """\
scrape_configs:
  - job_name: fedquilt
    static_configs:
      - targets: ["{target}"]
rule_files:
  - {rules}
"""


def write_monitoring_files(folder: Path, target: str) -> list[Path]:
    """Write dashboard, alerts and a Prometheus configuration for the address `target`. Return the paths."""
    metrics_endpoint.parse_listen_address(target)
    with disk.disk_errors(f"write {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        disk.write_output(folder / name, (FOLDER / name).read_text(encoding="utf-8"))
    disk.write_output(folder / "prometheus.yml", PROMETHEUS_CONFIG.format(target=target, rules=FILES[1]))
    return [folder / name for name in (*FILES, "prometheus.yml")]
