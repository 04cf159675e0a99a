"""Differential privacy: accounting, clipping, noise, and the jobs for which it is refused."""

import math
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_facts import apply_events, committed, started_state, update
from msgspec.structs import replace

from fedquilt import methods
from fedquilt.arrays import exact_sums
from fedquilt.arrays.disk_arrays import ScratchFile
from fedquilt.coordinator import privacy_settings, settings
from fedquilt.coordinator.privacy_settings import PrivacySettings
from fedquilt.coordinator.rounds import privacy
from fedquilt.coordinator.rounds.decisions import decide_event
from fedquilt.coordinator.rounds.events import (
    CohortSelected,
    EligibilityRecorded,
    JobEnded,
    PrivacyPlanned,
    RoundClosed,
    UpdateAccepted,
)
from fedquilt.coordinator.rounds.job_state import JobState
from fedquilt.coordinator.settings import CohortSettings
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.updates.private_sums import PrivateSums, draw_gaussian, noise_key
from fedquilt.core import BlobRef, DeviceUpdate, JobError, UpdateError
from fedquilt.core.messages import SITE_BUNDLES
from fedquilt.formats.tensor_register import register_from_kinds
from fedquilt.models.local_training import NetworkState

PRIVACY = PrivacySettings(epsilon=2.0, delta=1e-5, clip=0.5)
CHANGE_DIRECTION = np.ones(4, np.float32) / 2


# -- accounting -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epsilon", "delta", "multiplier"),
    [
        (1, 1e-5, 3.7306316),
        (8, 1e-5, 0.6002291),
        (1, 5e-4, 2.7666724),
        (4, 5.01187e-4, 0.8654051),
        (0.1, 1e-6, 36.30469),
    ],
)
def test_the_noise_is_that_of_dp_accounting_rounded_up(epsilon, delta, multiplier):
    """Numbers of `dp_accounting.get_sigma_gaussian`; the first is in Balle and Wang's paper, too."""
    found = privacy.find_noise_multiplier(epsilon, delta, 1)
    assert multiplier <= found <= multiplier * 1.001


@pytest.mark.parametrize(
    ("multiplier", "delta", "contributions", "epsilon"),
    [(1, 1e-5, 1, 4.3771781), (2, 1e-6, 1, 2.2540842), (0.5, 1e-5, 1, 9.9972561), (3, 1e-5, 16, 6.1292448)],
)
def test_the_spent_epsilon_is_that_of_dp_accounting(multiplier, delta, contributions, epsilon):
    """Numbers of `dp_accounting.get_epsilon_gaussian`; the last is of its PLDAccountant for 16 compositions."""
    assert privacy.compute_epsilon(multiplier, delta, contributions) == pytest.approx(epsilon, rel=1e-6)


@given(st.floats(0.01, 100), st.floats(1e-12, 0.9), st.integers(1, 10**6))
def test_the_planned_contributions_never_exceed_epsilon(epsilon, delta, contributions):
    multiplier = privacy.find_noise_multiplier(epsilon, delta, contributions)
    spent = [privacy.compute_epsilon(multiplier, delta, count) for count in (0, contributions, contributions + 1)]
    assert spent[0] == 0
    assert spent[1] <= epsilon * (1 + 1e-9)
    assert spent[1] <= spent[2]


# -- decisions ------------------------------------------------------------------------------------


def private_state(**cohort) -> JobState:
    state = started_state()
    constants = replace(state.constants, rounds=4, cohort=CohortSettings(**cohort), privacy=PRIVACY)
    return replace(state, constants=constants)


def play_round(state: JobState, devices: str, **commit) -> JobState:
    number = state.round
    return apply_events(
        state,
        CohortSelected(number, 0, tuple(devices)),
        *(UpdateAccepted(number, update(device, number)) for device in devices),
        RoundClosed(number),
        replace(committed(number), **commit),
    )


@pytest.mark.parametrize(("size", "devices", "contributions"), [(0, 5, 4), (2, 4, 2), (2, 3, 3), (3, 3, 4), (9, 3, 4)])
def test_a_device_contributes_its_share_of_the_rounds(size, devices, contributions):
    event = decide_event(private_state(size=size), 0.0, set("abcdefgh"[:devices]))
    assert isinstance(event, PrivacyPlanned)
    assert (event.devices, event.contributions) == (devices, contributions)
    assert event.noise_multiplier == privacy.find_noise_multiplier(2.0, 1e-5, contributions)


def test_devices_with_the_fewest_contributions_are_selected_and_none_contributes_too_often():
    state = apply_events(private_state(size=2), PrivacyPlanned(0, 4, 2, 3.0))
    counts = dict.fromkeys("abcd", 0)
    for _ in range(4):
        event = decide_event(state, 0.0, set("abcd"))
        assert isinstance(event, CohortSelected)
        for device in event.devices:
            counts[device] += 1
        assert max(counts.values()) - min(counts.values()) <= 1
        state = play_round(state, "".join(event.devices))
    assert privacy.devices_without_budget(replace(state, constants=replace(state.constants, rounds=9)), "abcd") == {
        *"abcd"
    }


def test_the_job_ends_when_another_round_would_exceed_epsilon():
    state = replace(private_state(size=2), privacy_plan=PrivacyPlanned(0, 4, 1, 3.0))
    state = play_round(state, "ab", spent_epsilon=1.5)
    state = apply_events(state, EligibilityRecorded(1, ("c",), {"privacy": ("a", "b")}))
    event = decide_event(state, 0.0, {"c"})
    assert event == JobEnded("done", "privacy budget spent: epsilon 1.5 of 2 spent, at delta 1e-05")
    offline = apply_events(state, EligibilityRecorded(1, (), {"privacy": ("a",), "offline": ("b",)}))
    assert isinstance(decide_event(offline, 0.0, {"c", "d"}), CohortSelected)


def test_the_spent_epsilon_is_that_of_the_device_with_the_most_contributions():
    state = replace(private_state(size=2), privacy_plan=PrivacyPlanned(0, 4, 2, 3.0))
    state = play_round(state, "ab", spent_epsilon=privacy.compute_epsilon(3.0, 1e-5, 1))
    state = apply_events(state, CohortSelected(1, 0, ("b", "c")))
    for devices, contributions in (("", 1), ("c", 1), ("b", 2)):
        accepted = replace(state, accepted_updates={device: update(device, 1) for device in devices})
        expected = privacy.compute_epsilon(3.0, 1e-5, contributions)
        assert privacy.spent_epsilon_after_round(accepted) == pytest.approx(expected)
    assert privacy.spent_epsilon_after_round(started_state()) is None


# -- clipping and noise ---------------------------------------------------------------------------


def network_state(*names: str) -> NetworkState:
    model = {name: np.zeros(4, np.float32) for name in names or ("w",)}
    register = register_from_kinds(model, {name: "buffer" for name in names if name != "w"})
    return NetworkState({}, {"name": "mlp", "register": msgspec.to_builtins(register)}, model, 0.0, 0)


def make_sums(secret: bytes = b"secret") -> PrivateSums:
    return PrivateSums(methods.load("fedavg").aggregation, PRIVACY.clip, secret)


def sent(device: str, model: np.ndarray, weight: float = 7.0) -> DeviceUpdate:
    return DeviceUpdate(device, 0, weight, {}, {"model": {"w": model.astype(np.float32)}})


def fold_clipped(updates):
    state, aggregation, total = network_state(), methods.load("fedavg").aggregation, None
    for each in updates:
        total = aggregation.fold(state, total, make_sums().clip_update(state, each))
    return total


@pytest.mark.parametrize(("norm", "clipped_norm"), [(0.0, 0.0), (0.4, 0.4), (0.5, 0.5), (3.0, 0.5), (1e18, 0.5)])
def test_the_coordinator_clips_a_change_and_every_update_has_weight_1(norm, clipped_norm):
    clipped = make_sums().clip_update(network_state(), sent("a", norm * CHANGE_DIRECTION))
    assert clipped.weight == 1
    np.testing.assert_allclose(clipped.bundles["model"]["w"], clipped_norm * CHANGE_DIRECTION, rtol=1e-6)


@pytest.mark.parametrize("liar", [1e6 * CHANGE_DIRECTION, np.array([1e18, 0, 0, 0]), np.zeros(4)])
def test_one_device_moves_the_mean_by_at_most_twice_the_clip(liar):
    honest = [sent(device, CHANGE_DIRECTION * size) for device, size in (("b", 0.1), ("c", 9.0))]
    means = [fold_clipped([sent("a", model), *honest]).mean()["w"] for model in (-CHANGE_DIRECTION, liar)]
    assert np.linalg.norm(means[0] - means[1]) <= 2 * PRIVACY.clip / 3 * (1 + 1e-6)


def test_an_invalid_update_and_one_of_a_site_are_rejected():
    site = DeviceUpdate("a", 0, 1.0, {}, {next(iter(SITE_BUNDLES)): {}})
    for bad in (sent("a", np.zeros(3)), sent("a", np.array([np.nan, 0, 0, 0])), site):
        with pytest.raises(UpdateError):
            make_sums().clip_update(network_state(), bad)


def private_job_state(round: int = 0, **hashes: str) -> JobState:
    updates = {device: replace(update(device), bundles={"model": BlobRef(sha, 1)}) for device, sha in hashes.items()}
    return replace(private_state(), round=round, accepted_updates=updates, privacy_plan=PrivacyPlanned(0, 4, 1, 2.0))


def test_a_repeated_commit_has_the_same_noise_and_any_other_has_independent_noise():
    states = [private_job_state(0, a="0"), private_job_state(1, a="0"), private_job_state(0, a="1"),
              private_job_state(0, b="0"), private_job_state(0, a="0", b="0")]  # fmt: skip
    keys = {noise_key(b"secret", state) for state in states}
    assert len(keys | {noise_key(b"other", states[0])}) == 6
    assert noise_key(b"secret", private_job_state(0, b="1", a="0")) == noise_key(
        b"secret", private_job_state(0, a="0", b="1")
    )


def test_the_noise_is_standard_normal():
    values = draw_gaussian(b"key", 200_001)
    assert abs(values.mean()) < 5 / math.sqrt(200_001)
    assert values.var() == pytest.approx(1, abs=5 * math.sqrt(2 / 200_001))
    for limit, share in ((1, 0.6826895), (2, 0.9544997), (3, 0.9973002)):
        assert (abs(values) < limit).mean() == pytest.approx(share, abs=0.005)
    halves = values[:100_000], values[100_001:]
    assert abs(np.corrcoef(*halves)[0, 1]) < 5 / math.sqrt(100_000)


def test_sums_on_the_disk_get_the_same_noise(tmp_path):
    total = {"w": exact_sums.add_to_sum(None, np.arange(100_000.0)), "b": exact_sums.add_to_sum(None, np.ones(3))}
    sums = exact_sums.WeightedSums(total, exact_sums.ExactScalar((2.0,)))

    def draw(name, shape):
        return draw_gaussian(name.encode(), math.prod(shape)).reshape(shape)

    with exact_sums.sums_on_disk(ScratchFile(tmp_path, min_entries=1)):
        on_disk = exact_sums.copy_accumulator(sums).with_noise(draw)
    in_memory = exact_sums.copy_accumulator(sums).with_noise(draw)
    assert on_disk.weight == in_memory.weight == 2
    for name, noise in (("w", draw("w", (100_000,))), ("b", draw("b", (3,)))):
        np.testing.assert_array_equal(on_disk.total[name].rounded_value(), in_memory.total[name].rounded_value())
        np.testing.assert_allclose(
            in_memory.total[name].rounded_value() - sums.total[name].rounded_value(), noise, atol=1e-9
        )


def measure_epsilon(deviation_share: float) -> float:
    """Return a lower bound of epsilon, with 95 % confidence, from guesses whether a canary was in 4,000 sums.

    The guess is by the projection on the canary's change. `deviation_share` scales the noise of the control.
    """
    count, delta, margin = 4000, PRIVACY.delta, math.sqrt(math.log(4 / 0.05) / 8000)
    multiplier = privacy.find_noise_multiplier(PRIVACY.epsilon, delta, 1) * deviation_share
    guesses = {}
    for has_canary in (True, False):
        canary = 1e6 * CHANGE_DIRECTION * has_canary
        state = replace(private_job_state(a="0"), privacy_plan=PrivacyPlanned(0, 4, 1, multiplier))
        totals = [
            make_sums(f"{has_canary} {number}".encode()).add_noise(state, fold_clipped([sent("a", canary)]))
            for number in range(count)
        ]
        projections = np.array([total.total["w"].rounded_value() @ CHANGE_DIRECTION for total in totals])
        guesses[has_canary] = float((projections > PRIVACY.clip / 2).mean())
    return math.log((guesses[True] - margin - delta) / (guesses[False] + margin))


def test_a_canary_is_recognised_no_more_often_than_epsilon_allows():
    assert 0 < measure_epsilon(1.0) <= PRIVACY.epsilon
    assert measure_epsilon(0.1) > PRIVACY.epsilon  # the control


def test_a_jobs_secret_is_stored_once_and_deleted_with_the_run(tmp_path):
    with Store(tmp_path) as store:
        secrets = [store.load_or_create_secret(id) for id in ("a", "a", "b")]
        assert [len(secret) for secret in secrets] == [32, 32, 32]
        assert secrets[0] == secrets[1] != secrets[2]
        store.delete_runs(["a"])
        assert store.load_or_create_secret("a") != secrets[0]
    assert (tmp_path / "fedquilt.db").stat().st_mode & 0o077 == 0


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"method": "robust"}, "robust uses more of an update"),
        ({"method": "scaffold"}, "scaffold uses more of an update"),
        ({"method": "fedstitch"}, "fedstitch uses more of an update"),
        ({"method": "genefl"}, "genefl groups devices by their updates"),
        ({"cohort": {"mode": "buffered", "size": 2}}, 'not supported with .* "buffered"'),
        ({"cohort": {"mode": "auto", "size": 2}}, 'not supported with .* "auto"'),
        ({"cohort": {"turns": 1.0}}, "turns has no effect"),
        ({"privacy": {"epsilon": 0, "delta": 1e-5, "clip": 1}}, "epsilon"),
        ({"privacy": {"epsilon": 101, "delta": 1e-5, "clip": 1}}, "epsilon"),
        ({"privacy": {"epsilon": 1, "delta": 1, "clip": 1}}, "delta"),
        ({"privacy": {"epsilon": 1, "delta": 1e-5, "clip": 0}}, "clip"),
        ({"privacy": {"epsilon": 1, "delta": 1e-5}}, "clip"),
        ({"privacy": {"epsilon": 1, "delta": 1e-5, "clip": 1, "unit": "device"}}, "unit"),
    ],
)
def test_a_job_that_privacy_cannot_protect_is_refused(changes, problem):
    table = {"name": "j", "method": "fedavg", "privacy": {"epsilon": 8, "delta": 1e-5, "clip": 0.5}, **changes}
    with pytest.raises(JobError, match=problem):
        settings.parse_job(table)


def test_a_network_with_running_statistics_is_refused():
    job, method = SimpleNamespace(privacy=PRIVACY), methods.load("fedavg")
    assert privacy_settings.require_private_network(job, method, state := network_state("w")) is state
    with pytest.raises(JobError, match="would make mean and 1 more useless"):
        privacy_settings.require_private_network(job, method, network_state("w", "mean", "var"))


def test_the_methods_with_privacy_are_those_that_average_models():
    def supports(name: str) -> bool:
        change = methods.load(name).aggregation.change
        return change is not None and change.supports_noise

    assert {name for name in methods.builtin_names() if supports(name)} >= {"fedavg", "fedprox", "fedopt", "fedsq"}
