"""Agent process of a device, which runs until SIGTERM or SIGINT."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from pathlib import Path

import msgspec

from fedquilt import heap, open_metrics, profiles, systemd, wire
from fedquilt.blobs.carriers import Carriers
from fedquilt.edge_agent import devices, exposed
from fedquilt.edge_agent.agent import Agent
from fedquilt.edge_agent.releases import models, start
from fedquilt.edge_agent.releases.kind import Kind
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.edge_agent.state import Local
from fedquilt.edge_agent.task import budget, confine
from fedquilt.edge_agent.task.worker import ChildWorker
from fedquilt.edge_agent.upgrade.central import SettingsKind
from fedquilt.edge_agent.upgrade.kind import AgentKind, read_launch_info
from fedquilt.transport import link as links

log = logging.getLogger("fedquilt.agent")


def run_agent(settings: AgentSettings) -> None:
    """Run a device's agent until SIGTERM or SIGINT.

    Raises:
        JobError: If a setting is unusable or another agent runs in the same home.
        StoreError: If the home cannot be read or written.
    """
    from fedquilt.transport.broker import Broker
    from fedquilt.transport.mqtt import MqttLink
    from fedquilt.transport.sealed import UNSIGNED, BoardLink, load_identity

    heap.keep_freed_memory()
    broker = Broker.from_url(**msgspec.structs.asdict(settings.broker))
    profile = None if settings.profile is None else profiles.find_board_profile(settings.profile)
    meter = None if settings.meter is None else devices.create_meter(settings.meter)
    board, boot = devices.create_device(settings.board, profile=profile, meter=meter), os.urandom(8).hex()
    presence = wire.Topics(settings.fleet).device_topic(settings.device, "up", "presence")
    confine.protect_memory()
    before = os.umask(0o077)  # models, updates and private state are nobody else's on this board
    lock = Local(Path(settings.home)).lock_home()
    with contextlib.suppress(PermissionError):  # of an earlier version's home, unless it is another user's
        os.chmod(settings.home, 0o700)
    client = f"fedquilt-{settings.fleet}-{settings.device}"
    plain = MqttLink(broker, client, (presence, wire.encode(wire.Presence(online=False, boot=boot))))
    own = load_identity(broker)
    link = plain if own is None else BoardLink(plain, own, settings.fleet, settings.device)
    if own is None:
        log.info("%s", UNSIGNED)
    cage, home = budget.Cage(), Path(settings.home).absolute()
    worker = ChildWorker(settings.warm_s, confine.task_command(home / "task"), cage, home / "task")
    checks = ChildWorker(0.0, start.check_command(home / confine.CHECK), cage, home / confine.CHECK)
    stopped: list[int] = []
    central = SettingsKind(settings, board.memory_bytes, Path(settings.home), lambda given: agent.apply_settings(given))
    deployed = models.Models(
        settings,
        board,
        checks,
        lambda: agent.settings.task_budget_bytes(board.memory_bytes),
        kept=lambda job: agent.local.latest_private_state(job),
    )
    kinds: dict[str, Kind] = {
        "model": deployed,
        "agent": AgentKind(read_launch_info(), settings, lambda: link.connected, lambda: stopped.append(0)),
        "settings": central,
    }
    carriers = Carriers(own, broker.ca)
    agent = Agent(
        link, central.effective_settings(), board, worker, boot, kinds=kinds, runner=deployed.runner, carriers=carriers
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: stopped.append(signum))
    online = f"online as {settings.device} of fleet {settings.fleet}, through {broker}"
    watched = systemd.Watched(agent, lambda: link.problem or (online if link.connected else f"asks for {broker}"))
    try:
        with open_metrics.serve_metrics(settings.metrics.listen, lambda: exposed.collect_metrics(agent)):
            links.run_endpoint(watched, link, lambda: bool(stopped))
    finally:
        systemd.send_notification("STOPPING=1")
        agent.shut_down()
        lock.release()
        os.umask(before)
