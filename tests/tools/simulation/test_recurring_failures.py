"""Tasks that fail in the same way whenever they are tried, on simulated devices with the agents' own code."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from simulated_fleets import Fleet, read_events

from fedquilt.coordinator.rounds.events import (
    CohortSelected,
    JobEnded,
    RoundCommitted,
    RoundRetried,
    TaskDeclined,
)
from fedquilt.core import ClientContext, ClientResult, DataError, DiskFullError, Method, ModelError, Task
from fedquilt.methods import fedavg
from fedquilt.testing.toy_networks import point_devices
from fedquilt.tools.simulation.simulated_job import Simulation

DEVICES = {"dev-0", "dev-1", "dev-2"}


def broken(fail: Callable[[Task, ClientContext], Any], devices: set[str]) -> Method:
    def work(task: Task, site: ClientContext) -> ClientResult:
        if site.device in devices:
            fail(task, site)
        return fedavg.METHOD.work(task, site)

    return replace(fedavg.METHOD, work=work)


def diverge(task: Task, site: ClientContext) -> None:
    fedavg.METHOD.work(msgspec.structs.replace(task, params={**task.params, "lr": 1e9, "epochs": 20}), site)


def raising(error: Exception) -> Callable[[Task, ClientContext], Any]:
    def fail(task: Task, site: ClientContext) -> None:
        raise error

    return fail


CAUSES: dict[str, tuple[Callable[[Task, ClientContext], Any], str]] = {
    "diverged": (diverge, r"training diverged in round 1 on 3 of 3 devices \(.*learning rate 1e\+09\)\.\nFix: lower "),
    "data": (
        raising(DataError("a.csv, line 3: the value is missing")),
        r"the data cannot be used in round 1 on 3 of 3 devices \(a.csv, line 3: the value is missing\)\.\nFix: correct",
    ),
    "model": (
        raising(ModelError("there is no layer 'fc9'")),
        r"the model does not fit in round 1 on 3 of 3 devices \(there is no layer 'fc9'\)\.\nFix: change the model",
    ),
    "exception": (
        lambda task, site: {}["mu"],
        r"the method's code failed in round 1 on 3 of 3 devices \(KeyError: 'mu' \(test_recurring_failures.py, line \d+"
        r"\)\)\.\nFix: correct the code",
    ),
    "full": (
        raising(DiskFullError("cannot write x: No space left on device")),
        r"the disk is full in round 1 on 3 of 3 devices \(cannot write x: No space left on device\)\.\nFix: free disk",
    ),
}


def attempts(ended: Simulation) -> list[tuple[int, int]]:
    return [(fact.round, fact.attempt) for fact in read_events(ended, CohortSelected)]


@pytest.mark.parametrize("code", CAUSES)
def test_what_fails_on_every_device_ends_the_job_in_one_attempt_with_cause_and_fix(fleet: Fleet, code: str) -> None:
    fail, reason = CAUSES[code]
    ended = fleet.run_job(method=broken(fail, DEVICES))
    assert ended.status == "failed"
    assert attempts(ended) == [(0, 0)]
    assert [fact.code for fact in read_events(ended, TaskDeclined)] == [code] * 3
    (end,) = read_events(ended, JobEnded)
    assert end.code == code
    assert re.match(reason, end.reason), end.reason
    assert end.reason.count("\n") == 1


def test_a_passing_failure_is_tried_again(fleet: Fleet) -> None:
    left = dict.fromkeys(DEVICES, 1)

    def fail(task: Task, site: ClientContext) -> None:
        if left[site.device]:
            left[site.device] -= 1
            raise OSError(5, "Input/output error")

    ended = fleet.run_job(method=broken(fail, DEVICES))
    assert ended.status == "done"
    assert [fact.code for fact in read_events(ended, TaskDeclined)] == ["disk"] * 3
    assert attempts(ended) == [(0, 0), (0, 1), (1, 0)]
    assert len(read_events(ended, RoundRetried)) == 1


def test_an_update_with_nan_that_no_engine_noticed_is_diverged_too(fleet: Fleet) -> None:
    def work(task: Task, site: ClientContext) -> ClientResult:
        answer = fedavg.METHOD.work(task, site)
        spoiled = {name: array * np.float32(np.nan) for name, array in answer.bundles["model"].items()}
        return replace(answer, bundles={"model": spoiled})

    ended = fleet.run_job(method=replace(fedavg.METHOD, work=work))
    assert attempts(ended) == [(0, 0)]
    assert "training diverged in round 1 on 3 of 3 devices" in ended.reason
    assert "not finite" in ended.reason


def test_a_loss_that_explodes_on_unscaled_features_names_them(fleet: Fleet) -> None:
    given = point_devices(2, 13)
    for member in given:
        member.train.x[:, 0] *= 1e4
    ended = fleet.run_job(members=given)
    assert ended.status == "failed"
    assert "training diverged in round 1 on 2 of 2 devices" in ended.reason
    assert "features differ in scale by a factor of" in ended.reason
    assert ended.reason.endswith("set [input] standardise = true.")


def test_a_loss_that_never_changes_is_noted_with_its_likely_cause(fleet: Fleet) -> None:
    params = {"lr": 1e-12, "epochs": 1, "batch": 4}
    still, learns = (fleet.run_job(rounds=7, params=given) for given in (params, {**params, "lr": 0.05}))
    notes = [(fact.round, note) for fact in read_events(still, RoundCommitted) for note in fact.warnings]
    assert [round for round, _ in notes] == [4]
    assert "the loss has stayed at " in notes[0][1]
    assert notes[0][1].endswith("for 5 rounds: the learning rate is probably too low (1e-12): raise [params] lr")
    assert not [note for fact in read_events(learns, RoundCommitted) for note in fact.warnings]
