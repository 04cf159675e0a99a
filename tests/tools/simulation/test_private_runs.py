"""Runs with [privacy] on virtual time: the noise and clipping of each state, a resume, and the end of the budget."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated_fleets import Fleet, read_events

from fedquilt.arrays import tensors
from fedquilt.coordinator.rounds.events import JobEnded, PrivacyPlanned, RoundCommitted, UpdateAccepted
from fedquilt.coordinator.rounds.privacy import compute_epsilon
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views import event_messages
from fedquilt.coordinator.views.run_summary import summarise_events
from fedquilt.edge_agent.task.protocol import WorkRequest, WorkResult
from fedquilt.tools.simulation import run

PRIVACY = {"epsilon": 4.0, "delta": 1e-4, "clip": 0.2}
Models = dict[str, np.ndarray]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        yield Fleet(tmp_path, stack)


def play(
    fleet: Fleet, home: str, trained: dict[tuple[str, int], Models], rounds: int = 99, **table: Any
) -> tuple[Any, dict[int, Models]]:
    simulation, backend = fleet.begin(devices=4, home=home, **{"rounds": 4, "privacy": PRIVACY, **table})

    def work(requests: Sequence[WorkRequest]) -> Iterator[WorkResult]:
        for request, result in zip(requests, backend(requests), strict=True):
            model = tensors.decode_tensors(result.blobs[result.bundles["model"].sha256])
            trained[request.device, request.task.round] = {name: np.array(value) for name, value in model.items()}
            yield result

    models = {}
    for current in run.run_rounds(simulation, work):
        models[len(current.rounds)] = dict(current.state.model)
        if len(current.rounds) >= rounds:
            break
    return simulation, models


def clipped_mean(state: Models, updates: Sequence[Models]) -> Models:
    changes = [{name: each[name].astype(float) - state[name] for name in state} for each in updates]
    norms = [math.sqrt(sum(np.square(part).sum() for part in change.values())) for change in changes]
    shares = [min(1.0, PRIVACY["clip"] / norm) for norm in norms]
    assert any(share < 1 for share in shares)
    return {
        name: state[name]
        + sum(share * change[name] for share, change in zip(shares, changes, strict=True)) / len(updates)
        for name in state
    }


def expected_noise(secret: bytes, state: str, accepted: Sequence[UpdateAccepted], name: str, count: int) -> np.ndarray:
    lines = [str(accepted[0].round), state]
    for event in sorted(accepted, key=lambda event: event.update.device):
        lines += [event.update.device, f"model {event.update.bundles['model'].sha256}"]
    key = hashlib.sha256(secret + "\n".join(lines).encode()).digest()
    stream = hashlib.shake_256(key + name.encode()).digest(16 * ((count + 1) // 2))
    uniform = np.frombuffer(stream, np.uint64).reshape(2, -1) // 2**11
    radius, angle = np.sqrt(-2 * np.log((uniform[0] + 1) / 2**53)), 2 * np.pi * uniform[1] / 2**53
    return np.append(radius * np.cos(angle), radius * np.sin(angle))[:count]


def test_each_state_is_the_clipped_mean_with_the_noise_of_the_jobs_secret(fleet: Fleet) -> None:
    trained: dict[tuple[str, int], Models] = {}
    simulation, models = play(fleet, "home", trained)
    assert simulation.status == "done"
    with Store(fleet.place / "home") as store:
        secret = store.load_or_create_secret(simulation.run)
    (plan,) = read_events(simulation, PrivacyPlanned)
    started, commits = read_events(simulation)[0], read_events(simulation, RoundCommitted)
    states = [started.state.sha256, *(commit.state.sha256 for commit in commits)]
    for number in range(4):
        accepted = [event for event in read_events(simulation, UpdateAccepted) if event.round == number]
        assert len(accepted) == 4
        mean = clipped_mean(models[number], [trained[event.update.device, number] for event in accepted])
        for name, value in mean.items():
            noise = expected_noise(secret, states[number], accepted, name, value.size).reshape(value.shape)
            expected = value + plan.noise_multiplier * PRIVACY["clip"] / 4 * noise
            np.testing.assert_allclose(models[number + 1][name], expected, rtol=1e-5, atol=1e-6)
    spent = [commit.spent_epsilon for commit in commits]
    assert spent == [compute_epsilon(plan.noise_multiplier, 1e-4, count) for count in (1, 2, 3, 4)]
    assert 3.9 < spent[-1] <= PRIVACY["epsilon"]


def test_a_resumed_run_repeats_its_noise_and_forgets_nothing(fleet: Fleet) -> None:
    simulation, _ = play(fleet, "whole", {}, cohort={"size": 2})
    with Store(fleet.place / "whole") as store:
        secret = store.load_or_create_secret(simulation.run)
    first, _ = play(fleet, "parts", {}, rounds=2, cohort={"size": 2})
    first.__exit__()
    with Store(fleet.place / "parts") as store:
        assert store.load_or_create_secret(first.run) != secret
        kept = store.load_or_create_secret(first.run)
    second, _ = play(fleet, "parts", {}, cohort={"size": 2})
    assert second.run == first.run
    with Store(fleet.place / "parts") as store:
        assert store.load_or_create_secret(second.run) == kept
    assert len(read_events(second, PrivacyPlanned)) == 1
    counts = Counter(event.update.device for event in read_events(second, UpdateAccepted))
    assert set(counts.values()) == {2}
    for run_of, commits in ((simulation, 4), (second, 4)):
        spent = [commit.spent_epsilon for commit in read_events(run_of, RoundCommitted)]
        assert len(spent) == commits
        assert spent[-1] == pytest.approx(PRIVACY["epsilon"], rel=0.01)


def test_the_spent_epsilon_is_shown_for_private_jobs_only(fleet: Fleet) -> None:
    for home, privacy, shown in (("private", PRIVACY, "4"), ("plain", None, None)):
        simulation, _ = play(fleet, home, {}, privacy=privacy)
        with Store(fleet.place / home) as store:
            row = event_messages.summarise_run(store.find_job(simulation.run), store)
            summary = summarise_events(simulation.job, store.read_events(simulation.run))
        head, line = event_messages.format_runs([row])
        assert ("epsilon" in head.split()) == (shown is not None)
        assert (shown in line.split()) == (shown is not None)
        status = event_messages.format_status(summary, summary.state)[1]
        assert ("epsilon 4 of 4 spent, at delta 0.0001" in status) == (shown is not None)


def test_two_runs_with_one_secret_have_the_same_bits(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for secret in (b"same", b"same", b"other"):
        monkeypatch.setattr(Store, "load_or_create_secret", lambda store, id, secret=secret: secret)
        digests.append(play(fleet, f"home-{len(digests)}", {})[0].state_digest)
    assert digests[0] == digests[1] != digests[2]


def test_a_fleet_without_budget_ends_the_job_by_name(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of one contribution is for four devices: a fifth round of two would exceed epsilon."""
    from fedquilt.coordinator.rounds import privacy

    plan_noise = privacy.plan_noise
    monkeypatch.setattr(privacy, "plan_noise", lambda state, devices: plan_noise(state, 2 * devices))
    simulation, _ = play(fleet, "home", {}, cohort={"size": 2})
    counts = Counter(event.update.device for event in read_events(simulation, UpdateAccepted))
    assert counts == dict.fromkeys(counts, 1)
    assert len(counts) == 4
    (end,) = read_events(simulation, JobEnded)
    assert end.status == "done"
    assert end.reason.startswith("privacy budget spent: epsilon ")
