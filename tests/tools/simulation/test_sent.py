"""What simulated devices are sent, and what they say to it before their work is done."""

from __future__ import annotations

import plain
import pytest
from msgspec.structs import replace
from simulated_fleets import Fleet, facts

from fedquilt import wire
from fedquilt.coordinator.rounds.events import TaskDeclined
from fedquilt.core import Task
from fedquilt.tools.simulation.fleet import EncodedTasks

TASK = plain.task(engine="numpy", deadline_s=1.0)


def test_what_tasks_share_is_encoded_once_and_each_comes_as_it_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded, plainly = [], wire.encode
    monkeypatch.setattr(wire, "encode", lambda message: encoded.append(message) or plainly(message))
    given = [TASK, replace(TASK, seed=7, tier="small", counted=3), replace(TASK, seed=8), replace(TASK, attempt=1)]
    come = EncodedTasks()
    found = [come(task) for task in given]
    assert encoded == [given[0], given[3]]
    assert found == [wire.decode(plainly(task), Task) for task in given]
    assert found[1].params is not TASK.params


def test_a_refusal_is_heard_while_others_are_at_work(fleet: Fleet) -> None:
    simulation, _ = fleet.begin(fleet={"budgets": ["512MB", "1MB"]})
    orders = simulation.advance()
    assert [order.device for order in orders] == ["dev-0", "dev-2"]
    assert [fact.device for fact in facts(simulation, TaskDeclined)] == ["dev-1"]
