"""`fedquilt metrics`: a Grafana dashboard and Prometheus alert rules for what `fedquilt serve --metrics` tells."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fedquilt import disk, open_metrics

HERE: Final = Path(__file__).parent
FILES: Final = ("grafana.json", "alerts.yml")
SCRAPE: Final = """\
scrape_configs:
  - job_name: fedquilt
    static_configs:
      - targets: ["{target}"]
rule_files:
  - {rules}
"""


def write(folder: Path, target: str) -> list[Path]:
    """Write the dashboard, the alert rules and a Prometheus configuration that has both into a folder.

    Args:
        folder: made if it is missing.
        target: HOST:PORT of `fedquilt serve --metrics`.

    Raises:
        JobError: no such address.
        StoreError: the folder cannot be written.
    """
    open_metrics.address(target)
    with disk.doing(f"write {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        disk.write(folder / name, (HERE / name).read_text(encoding="utf-8"))
    disk.write(folder / "prometheus.yml", SCRAPE.format(target=target, rules=FILES[1]))
    return [folder / name for name in (*FILES, "prometheus.yml")]
