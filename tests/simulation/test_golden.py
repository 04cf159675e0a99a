"""Six methods do what golden.json holds: the same devices asked, the same states, the same exported bytes.

What moves on purpose is kept anew by `python -m tests.goldens --write`, and the commit says why it moved.
"""

import goldens
import pytest

from fedquilt.coordinator.delivery.executor import LinkExecutor
from fedquilt.coordinator.rounds.events import CohortSelected, TaskDeclined, UpdateAccepted
from fedquilt.coordinator.rounds.selection import NO_WORK
from fedquilt.coordinator.storage.store import Store
from fedquilt.tools.simulation import agents


@pytest.fixture(scope="module")
def kept() -> goldens.File:
    return goldens.load()


@pytest.mark.parametrize("method", goldens.CHANGES)
def test_a_golden_run_is_what_was_kept(method, kept, tmp_path):
    """Bit for bit where this processor multiplies as the one that wrote the file; else to 1e-5."""
    if method == "fedstitch":
        pytest.importorskip("onnxruntime")
    same = goldens.probe(method) == kept.probes[method]
    moved = goldens.differences(kept.runs[method], goldens.play(method, tmp_path), bits=same)
    assert moved == [], f"{method}; if it is meant to: python -m tests.goldens --write, and say why in the commit"


def test_golden_runs_ask_a_part_of_the_fleet_and_evaluate(kept):
    for method, run in kept.runs.items():
        whole = 3 + (method == "fedstitch")
        first, again = [[each for each in run.asked if (len(each) == whole) == is_] for is_ in (True, False)]
        assert [len(asked) for asked in again] == ([2, 2, 2] if method == "fedstitch" else [])
        assert len({tuple(asked) for asked in run.asked}) > 2
        assert len(run.states) == len(first) + 1


def test_a_stitching_round_asks_others_for_those_heard_and_sends_no_task_in_vain(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    sent = []
    send = LinkExecutor.send_task

    def watched(link, device, task, now_s):
        sent.append((device, task.round))
        send(link, device, task, now_s)

    monkeypatch.setattr(LinkExecutor, "send_task", watched)
    job, stock = goldens._job("fedstitch", tmp_path)
    plan = agents.FleetPlan(job, stock, tmp_path / "runs")
    run, status = agents.run_fleet_virtually(plan)
    with Store(plan.home) as store:
        facts = [fact for _, _, fact in store.read_events(run)]
    asked = [fact for fact in facts if isinstance(fact, CohortSelected)]
    answered = [(fact.update.device, fact.round) for fact in facts if isinstance(fact, UpdateAccepted)]
    declined = [fact for fact in facts if isinstance(fact, TaskDeclined)]
    last = max(fact.round for fact in asked)
    devices = sorted({device for device, _ in answered})
    assert (status, len(devices)) == ("done", 6)
    assert sorted(sent) == sorted(answered)  # whatever was sent was answered, and counted
    assert {fact.code for fact in declined} == {NO_WORK}
    for round in range(last + 1):
        names = [device for fact in asked if fact.round == round for device in fact.devices]
        assert len(names) == len(set(names))
        idle = [fact.device for fact in declined if fact.round == round]
        assert sorted(names) == sorted([*idle, *(device for device, at in answered if at == round)])
        assert bool(idle) == (round in (last - 3, last - 2, last))
    for first, end in ((last - 4, last - 2), (last - 1, last)):  # gather, validate
        assert sorted(device for device, at in answered if first <= at <= end) == devices
    assert [sum(fact.round == round for fact in asked) for round in range(last - 4, last + 1)] == [1, 2, 2, 1, 2]
