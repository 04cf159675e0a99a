"""Checks of a coordinator's services in a second root file system."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from fedquilt.core import JobError, LinkError
from fedquilt.formats import toml
from tests.rehearsal import enclosure, host
from tests.rehearsal.checks import CheckLog, last_message
from tests.rehearsal.container import Container, wait_until
from tests.rehearsal.fleet import FILES, HOST, LoopbackFleet, find_free_ports

SERVE, ENROL, DASH = "fedquilt-serve.service", "fedquilt-enrol-serve.service", "fedquilt-dash.service"
STATE: Final = "/var/lib/fedquilt"
RUNS: Final = f"{STATE}/runs"
PROGRAM: Final = "/opt/fedquilt/current/bin/fedquilt"
# runuser would wait for its child, and a shutdown for runuser
AS_USER: Final = ("setpriv", "--reuid=fedquilt", "--regid=fedquilt", "--init-groups", "--reset-env")
NEWCOMER: Final = "newcomer"
UP_S: Final = 60.0
RUN_S: Final = 180.0
JOURNAL: Final = "[Journal]\nStorage=persistent\nRateLimitIntervalSec=0\nSystemMaxUse=16M\nSystemMaxFileSize=4M\n"
LIMIT_BYTES: Final = 16 << 20
FLOOD: Final = "line %.0f of a service that has much to say"
LINES: Final = 60_000  # log lines that exceed the size limit


class CoordinatorHost:
    """Machine of a coordinator. Broker, authority and board are those of the rehearsal.

    Args:
        site: The fleet on loopback.
        base: A Debian root file system without fedquilt.
        root: Folder for the coordinator's root file system.
        job: File of a prepared job in the site's folder.
    """

    def __init__(self, site: LoopbackFleet, base: Path, root: Path, job: str) -> None:
        self.site, self._base, self.root, self._job = site, base, root, job
        self._enrolment, self._dash = find_free_ports(2)
        log = site.folder / "console-hub.log"
        self.machine = Container(root, None, log, "fedquilt-hub", tuple(enclosure.container_group_files(enclosure.HUB)))

    def run_checks(self, checks: CheckLog, target: Sequence[str]) -> None:
        print("flash a coordinator's machine, and boot it beside the board", flush=True)
        try:
            with checks("the coordinator's services come up") as seen:
                seen.append(self._check_start(target))
            if checks.done[-1].how != "ok":
                return
            with checks("the enrolment service: started once it has its authority, a board enrols") as seen:
                seen.append(self._check_enrolment())
            with checks("a run of one board through the services; the dashboard shows it") as seen:
                seen.append(self._check_run("rehearsal"))
            with checks("kill -9 of the coordinator in the middle of a run: back, and the run goes on") as seen:
                seen.append(self._check_kill())
            with checks("backup while it serves, home lost, restored: it goes on") as seen:
                seen.append(self._check_restore())
            with checks("logs: in the journal alone, which keeps to its limit") as seen:
                seen.append(self._check_logs())
        finally:
            self.shut_down()

    def shut_down(self) -> None:
        if self.machine.leader:
            (self.site.folder / "journal-hub.txt").write_text(self.machine.read_journal())
        self.machine.stop()

    def _check_start(self, target: Sequence[str]) -> str:
        self._flash(target)
        began_s = time.monotonic()
        self.machine.boot()
        for unit in (SERVE, DASH):
            self._wait_until_active(unit)
        if self.machine.unit_properties(ENROL)["ConditionResult"] != "no":
            raise JobError(f"{ENROL} was started without an authority")
        self._open_page("/")
        users = {unit: self.machine.unit_properties(unit)["User"] for unit in (SERVE, ENROL, DASH)}
        return f"{', '.join(f'{unit} as {user}' for unit, user in users.items())}; {time.monotonic() - began_s:.0f} s"

    def _flash(self, target: Sequence[str]) -> None:
        host.run_program("cp", "--archive", "--reflink=auto", str(self._base), str(self.root))
        table = {
            "broker": {"url": self.site.url, **FILES},
            "enrol": {"hosts": [HOST], "port": self._enrolment},
            "dash": {"listen": f"{HOST}:{self._dash}", "actions": True},
        }
        (self.site.folder / "coordinator.toml").write_text(toml.format_toml(table))
        self.site.run_fedquilt(
            *("board", "flash", "coordinator.toml", "--role", "coordinator", *target, "--rootfs", str(self.root))
        )
        limits = self.root / "etc/systemd/journald.conf.d/fedquilt.conf"
        limits.parent.mkdir(parents=True, exist_ok=True)
        limits.write_text(JOURNAL)

    def _wait_until_active(self, unit: str) -> None:
        if not wait_until(lambda: self.machine.unit_properties(unit)["ActiveState"] == "active", UP_S):
            raise LinkError(f"{unit} does not run; its journal ends: {last_message(self.machine.read_journal(unit))}")

    def _open_page(self, path: str) -> bytes:
        found: list[tuple[int, bytes]] = []

        def is_page_ready() -> bool:
            try:
                with closing(http.client.HTTPConnection(HOST, self._dash, timeout=10.0)) as link:
                    link.request("GET", path)
                    answer = link.getresponse()
                    found[:] = [(answer.status, answer.read())]
            except OSError:
                return False
            return found[0][0] == 200

        if not wait_until(is_page_ready, UP_S):
            said = f"{found[0][0]} {found[0][1][:200]!r}" if found else last_message(self.machine.read_journal(DASH))
            raise LinkError(f"the dashboard's {path} does not come: {said}")
        return found[0][1]

    # -- enrolment --

    def _check_enrolment(self) -> str:
        self.site.run_fedquilt("identity", "token", NEWCOMER, "--out", f"{NEWCOMER}/token")
        shutil.copytree(self.site.folder / "fedquilt-ca", self.root / "srv/fedquilt-ca")
        self.machine.run(
            *("sh", "-ec"),
            "cp -r /srv/fedquilt-ca/. /var/lib/fedquilt-ca && chown -R fedquilt-ca: /var/lib/fedquilt-ca",
        )
        self.machine.run("systemctl", "start", ENROL)
        self._wait_until_active(ENROL)
        folder = self.site.folder / NEWCOMER
        folder.mkdir(exist_ok=True)
        own = {name: str(folder / file) for name, file in (("cert", "device.crt"), ("key", "device.key"))}
        table = {
            "device": NEWCOMER,
            "home": str(folder / "home"),
            "broker": {"url": self.site.url, "ca": str(self.site.folder / FILES["ca"]), **own},
            "enrol": {"url": f"https://{HOST}:{self._enrolment}"},
        }
        (folder / "agent.toml").write_text(toml.format_toml(table))
        self.site.run_fedquilt("identity", "enrol", str(folder / "agent.toml"))
        if not Path(own["cert"]).is_file():
            raise JobError("the board has no certificate")
        if self.machine.error_of(*AS_USER, "cat", "/var/lib/fedquilt-ca/ca.key") is None:
            raise JobError("the coordinator's user may read the authority's key")
        return f"{NEWCOMER} has its certificate; the coordinator's user may not read the authority's key"

    # -- runs --

    def _run_fedquilt(self, *words: str) -> str:
        return self.machine.run(*AS_USER, PROGRAM, *words)

    def _list_runs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self._run_fedquilt("ls", "--home", RUNS, "--format", "json"))
        return found

    def _submit_job(self, name: str, rounds: int = 1) -> None:
        folder, prepared = self.root / "srv/jobs", self.site.folder / self._job
        shutil.copytree(prepared.with_suffix(".bundle"), folder / f"{name}.bundle")
        table = {**toml.read_toml(prepared), "name": name, "rounds": rounds}
        (folder / f"{name}.toml").write_text(toml.format_toml(table))
        self.machine.run("chmod", "-R", "a+rX", "/srv/jobs")
        self.machine.run(
            *("systemd-run", "--quiet", "--collect", "--uid=fedquilt", f"--unit=submit-{name}", PROGRAM),
            *("run", f"/srv/jobs/{name}.toml", "--home", RUNS),
        )

    def _wait_until_done(self, name: str) -> str:
        rows: list[dict[str, Any]] = []

        def has_ended() -> bool:
            rows[:] = [row for row in self._list_runs() if row["run"].startswith(f"{name}-")]
            return bool(rows) and rows[-1]["status"] in ("done", "failed", "stopped")

        if not wait_until(has_ended, RUN_S) or rows[-1]["status"] != "done":
            state = rows[-1]["status"] if rows else "not there"
            raise LinkError(
                f"the run is {state}; the coordinator's journal ends: {last_message(self.machine.read_journal(SERVE))}"
            )
        return str(rows[-1]["run"])

    def _check_run(self, name: str) -> str:
        began_s = time.monotonic()
        self._submit_job(name)
        run = self._wait_until_done(name)
        took_s = time.monotonic() - began_s
        if run.encode() not in self._open_page(f"/api/runs/{run}"):
            raise JobError(f"the dashboard does not name {run}")
        return f"{run} is done after {took_s:.0f} s, and the dashboard has it"

    def _check_kill(self) -> str:
        restarts = int(self.machine.unit_properties(SERVE)["NRestarts"])
        self._submit_job("killed", rounds=8)

        def has_begun() -> bool:
            return any(row["run"].startswith("killed-") and row["status"] == "running" for row in self._list_runs())

        if not wait_until(has_begun, RUN_S):
            raise LinkError(f"the run did not begin: {last_message(self.machine.read_journal(SERVE))}")
        pid, began_s = self.machine.kill_unit(signal.SIGKILL, SERVE), time.monotonic()
        run = self._wait_until_done("killed")
        if (times := int(self.machine.unit_properties(SERVE)["NRestarts"]) - restarts) != 1:
            raise JobError(f"systemd has started it anew {times} times, not once")
        return f"process {pid} killed, {run} done {time.monotonic() - began_s:.0f} s later"

    # -- a year of it --

    def _check_restore(self) -> str:
        before = [(row["run"], row["status"]) for row in self._list_runs()]
        said = self._run_fedquilt("backup", "save", RUNS, f"{STATE}/backup.tar").strip()
        self.machine.run("systemctl", "stop", SERVE, DASH)
        self.machine.run("rm", "-r", RUNS)
        self._run_fedquilt("backup", "restore", f"{STATE}/backup.tar", RUNS)
        self.machine.run("systemctl", "start", SERVE, DASH)
        if (now := [(row["run"], row["status"]) for row in self._list_runs()]) != before:
            raise JobError(f"{now} after it, {before} before")
        return f"{said.partition(': ')[2]}; {self._check_run('restored')}"

    def _check_logs(self) -> str:
        journal = self.machine.read_journal(SERVE)
        if "serving" not in journal:
            raise JobError(f"{SERVE} says nothing in its journal")
        token = (self.root / RUNS.lstrip("/") / "dash.token").read_text().strip()
        if token in self.machine.read_journal():
            raise JobError("the dashboard's token is in the journal")
        if files := self.machine.run("find", STATE, "-name", "*.log*").split():
            raise JobError(f"log files of its own: {', '.join(files)}")
        self.machine.run("sh", "-c", f"seq --format='{FLOOD}' {LINES} | systemd-cat --identifier=flood")
        self.machine.run("journalctl", "--sync")
        size = int(self.machine.run("du", "--summarize", "--block-size=1", "/var/log/journal").split()[0])
        kept = len(self.machine.run("journalctl", "--identifier=flood", "--output=cat").splitlines())
        if size > 1.1 * LIMIT_BYTES or not 0 < kept < LINES:
            raise JobError(f"the journal has {size / 1e6:.0f} MB with {kept} of {LINES} lines; its limit is 16 MiB")
        return f"{size / 1e6:.0f} MB with the latest {kept} of {LINES} lines; no files of its own, no token in it"
