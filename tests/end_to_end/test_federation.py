"""Coordinator, agents and Mosquitto as processes of their own, over TLS. `test_kills.py` kills them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import Processes, facts, make_job
from waiting import LIMIT_S

from fedquilt.coordinator.rounds.events import TaskDeclined


def test_over_tls_with_certificates_and_access_rules_a_federation_runs(
    tmp_path: Path, mosquitto: Callable[..., Any], authority: Any, processes: Processes
) -> None:
    """Each agent's certificate names it; the broker keeps it to its own branch; a device without data says so."""
    plan = make_job(tmp_path)
    members = plan.make_agent_tables()
    crt, key = authority.issue("broker", "127.0.0.1")
    (tmp_path / "acl").write_text(
        "user coordinator\ntopic readwrite fq/#\n"
        "pattern write fq/1/+/dev/%u/up/#\npattern read fq/1/+/dev/%u/dn/#\npattern read fq/1/+/coord/state\n"
    )
    broker = mosquitto(
        f"cafile {authority.ca}",
        f"certfile {crt}",
        f"keyfile {key}",
        "require_certificate true",
        "use_identity_as_username true",
        "allow_anonymous false",
        f"acl_file {tmp_path / 'acl'}",
        "max_packet_size 131072",
    )
    url = broker.url.replace("mqtt://", "mqtts://")

    def files(name: str) -> dict[str, str]:
        cert, key = authority.issue(name)
        return {"ca": str(authority.ca), "cert": str(cert), "key": str(key)}

    members[-1]["data"] = {}
    processes.start_agents(tmp_path, members, lambda device: {"url": url, **files(device)})
    options = [part for key, value in files("coordinator").items() for part in (f"--{key}", value)]
    home = tmp_path / "runs"
    run = ("run", str(tmp_path / "job.toml"), "--home", str(home), "--broker", url, *options)
    processes.start("coordinator", tmp_path / "run.log", *run)
    assert processes.running["coordinator"].wait(timeout=LIMIT_S) == 0, (tmp_path / "run.log").read_text()
    assert "signed" not in (tmp_path / "run.log").read_text()  # that it is unsigned would be said
    kept = [path for table in members for path in (tmp_path / table["device"]).rglob("*")]
    assert any(path.parent.name == "blobs" for path in kept)
    assert [path for path in kept if path.stat().st_mode & 0o077] == []
    declined = [fact for fact in facts(home) if isinstance(fact, TaskDeclined)]
    assert {(fact.device, fact.code) for fact in declined} == {(members[-1]["device"], "data")}
    shown = subprocess.run(
        [sys.executable, "-m", "fedquilt.cli", "logs", "digits", "--home", str(home), "--format", "json"],
        capture_output=True,
        check=True,
    )
    assert json.loads(shown.stdout.splitlines()[-1])["fact"]["status"] == "done"
