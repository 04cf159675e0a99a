"""`fedquilt rollout`: what it takes, queues, refuses and shows."""

import contextlib
import dataclasses
import json
import time
from pathlib import Path

import made_graphs
import pytest
import upgrades
from msgspec.structs import replace

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.blobs import chunks
from fedquilt.cli import main, rollout
from fedquilt.coordinator import settings
from fedquilt.coordinator.fleet.device_status import DeviceStatus, TelemetryStore
from fedquilt.coordinator.rounds.events import JobStarted
from fedquilt.coordinator.rounds.rollout import (
    ReleaseOffered,
    RolloutPlan,
    RolloutStarted,
    StatusReported,
    apply_rollout_event,
    release_for_device,
)
from fedquilt.coordinator.storage.store import Store
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.formats import job_bundle, personal_models
from fedquilt.onnx import graph_check, weights

NETWORK = {"name": "mlp", "inputs": 4, "hidden": [3], "classes": 2}


def graph(operator: str = "Relu") -> bytes:
    helper = pytest.importorskip("onnx.helper", reason="onnx is not installed")
    infos = [helper.make_tensor_value_info(name, 1, ["n", 4]) for name in ("x", "y")]
    made = helper.make_graph([helper.make_node(operator, ["x"], ["y"])], "g", infos[:1], infos[1:])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def ran(home: Path, method: str = "fedavg", status: str = "done", seed: int = 0) -> str:
    folder = home.with_name(f"{home.name}.bundle")
    first = numpy_engine.init_tensors(NETWORK, seed=0)
    job_bundle.write_bundle(folder, {"network": NETWORK, "flops": 96}, {"model": tensors.encode_tensors(first)})
    job = settings.parse_job({"name": "digits", "method": method, "seed": seed})
    with Store(home) as store:
        id = store.add_job(job, folder)
        state = settings.create_initial_state(job, job_bundle.load_bundle(folder))
        store.append_event(id, JobStarted(store.blob_store.store_bytes(tensors.pack_state(state))))
        store.set_status(id, status)
    return id


@pytest.fixture
def home(tmp_path: Path) -> Path:
    Store(tmp_path / "runs").close()
    return tmp_path / "runs"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with contextlib.suppress(SystemExit):  # words that the command line does not take
        assert main(list(words)) != 0
    return capsys.readouterr().err


def queued(home: Path) -> RolloutPlan:
    with Store(home) as store:
        return store.rollouts.find_rollout().state.plan


def test_a_file_is_queued_with_what_boards_are_asked(home, capsys):
    file = home.with_name("net.onnx")
    file.write_bytes(graph())
    words = (
        *("rollout", "model", str(file), "--home", str(home), "--label", "site=lab", "!spare"),
        *("--phases", "2,25,100", "--abort-above", "10%", "--min-gain", "-0.5pt", "--max-latency", "40ms"),
        *("--max-energy", "0.5", "--max-peak", "500MB", "--soak", "2min", "--window", "02:00-05:00"),
        *("--patience", "1h", "--force"),
    )
    assert main(list(words)) == 0
    out = capsys.readouterr().out
    with Store(home) as store:
        (kept,) = store.rollouts.readable_rollouts()
        assert store.blob_store.load(kept.state.plan.blob.sha256) == graph()
    plan = kept.state.plan
    assert (plan.kind, plan.name, plan.select) == ("model", "net", ("site=lab", "!spare"))
    assert plan.cumulative_shares == (0.02, 0.25, 1.0)
    assert (plan.abort_above, plan.soak_s, plan.window, plan.patience_s) == (0.1, 120.0, "02:00-05:00", 3600.0)
    limits = plan.limits
    assert (limits.min_gain, limits.max_latency_s, limits.max_energy_j) == (-0.005, 0.04, 0.5)
    assert (limits.max_peak_bytes, plan.force) == (500_000_000, True)
    assert f"{kept.state.id}: net.onnx; `fedquilt rollout status {kept.state.id} --home {home}` shows" in out
    assert f"start one with `fedquilt serve --home {home}`" in out


def test_a_run_is_deployed_as_export_writes_it(home, capsys):
    pytest.importorskip("torch", reason="a network is written as ONNX by torch")
    run, file = ran(home), home.with_name("out.onnx")
    assert main(["rollout", "model", "digits", "--home", str(home)]) == 0
    assert main(["model", "export", "digits", "--home", str(home), "--out", str(file)]) == 0
    with Store(home) as store:
        plan = store.rollouts.find_rollout(run).state.plan
        assert store.blob_store.load(plan.blob.sha256) == file.read_bytes()
    assert plan.name == run


@pytest.mark.parametrize("method", ["fedrep", "local"])
def test_a_run_with_parts_on_boards_is_deployed_without_them(home, capsys, method):
    pytest.importorskip("torch", reason="a network is written as ONNX by torch")
    run = ran(home, method, seed=7)
    assert main(["rollout", "model", "digits", "--home", str(home)]) == 0
    assert f"network mlp, completed on each device with its part of {run}" in capsys.readouterr().out
    with Store(home) as store:
        plan = store.rollouts.find_rollout(run).state.plan
        path = store.blob_store.blob_path(plan.blob.sha256)
    assert path is not None
    task, parts = personal_models.read_task(path), personal_models.read_personal(path)
    assert (task.job, task.method, task.params["network"]["name"]) == (run, method, "mlp")
    assert (task.actions, task.seed) == (("check",), 7)
    assert task.bundles == {
        name: chunks.ref_from_bytes(tensors.encode_tensors(held)) for name, held in parts.bundles.items()
    }
    assert weights.missing_tensors(parts.graph.data).keys() == numpy_engine.init_tensors(NETWORK, seed=0).keys()


def test_a_method_that_leaves_parts_and_does_not_say_how_they_go_together_is_refused_by_name(home, capsys, monkeypatch):
    """As one of another package may be: with the mend, and nothing is queued."""
    ran(home, "fedrep")
    method = dataclasses.replace(methods.load("fedrep"), personal_model=None)
    monkeypatch.setattr(methods, "load", lambda name: method)
    said = refused(capsys, "rollout", "model", "digits", "--home", str(home))
    assert "fedrep leaves 2 tensors (3.bias, ...) on devices" in said
    assert "or a FILE.onnx" in said
    with Store(home) as store:
        assert store.rollouts.readable_rollouts() == []


@pytest.mark.parametrize(
    ("payload", "said"),
    [(b"no graph", "net.onnx is not a valid ONNX file"), (b"", "net.onnx"), ("RandomNormalLike", "'RandomNormalLike'")],
)
def test_a_file_that_no_board_would_load_is_refused(home, capsys, payload, said):
    """A file that a board would refuse is refused before anything is sent."""
    file = home.with_name("net.onnx")
    file.write_bytes(graph(payload) if isinstance(payload, str) else payload)
    assert said in refused(capsys, "rollout", "model", str(file), "--home", str(home))
    with Store(home) as store:
        assert store.rollouts.readable_rollouts() == []


def test_a_model_in_two_files_is_queued_as_one(home, tmp_path):
    assert main(["rollout", "model", str(made_graphs.two_files(tmp_path)), "--home", str(home)]) == 0
    with Store(home) as store:
        (kept,) = store.rollouts.readable_rollouts()
        plan = kept.state.plan
        payload = store.blob_store.blob_path(plan.blob.sha256)
        assert payload is not None
        assert graph_check.check_file(payload).weight_bytes == 72
    assert plan.input_shape is None


def test_the_shape_of_an_example_goes_with_the_release(home, tmp_path):
    made = made_graphs.product([-1, 3, -1, -1], nodes=made_graphs.pooled, size=3)
    (tmp_path / "images.onnx").write_bytes(made.SerializeToString())
    words = ["rollout", "model", str(tmp_path / "images.onnx"), "--input-shape", "3,48,192"]
    assert main([*words, "--home", str(home)]) == 0
    with Store(home) as store:
        (kept,) = store.rollouts.readable_rollouts()
        assert release_for_device(
            apply_rollout_event(apply_rollout_event(kept.state, RolloutStarted(1)), ReleaseOffered(0, ("d",))), "d"
        ).input_shape == (3, 48, 192)


@pytest.mark.parametrize(
    ("shape", "words", "said"),
    [
        ([-1, 3, -1, -1], ("--input-shape", "1,48,192"), "does not fit input 'x' of shape (3, any, any)"),
        ([-1, 3, -1, -1], ("--input-shape", "3,48"), "--input-shape 3,48 does not fit input 'x' of shape"),
        ([-1, 3, -1, -1], ("--input-shape", "3,0,48"), "0 is below the minimum of 1"),
        (None, (), "input 'x' declares no number of axes: add --input-shape, such as 3,224,224"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_before_the_release(home, tmp_path, capsys, shape, words, said):
    path = tmp_path / "m.onnx"
    path.write_bytes(made_graphs.product(shape, nodes=made_graphs.pooled, size=3).SerializeToString())
    assert said in refused(capsys, "rollout", "model", str(path), *words, "--home", str(home))
    with Store(home) as store:
        assert not store.rollouts.readable_rollouts()


def test_what_cannot_be_deployed_is_said(home, capsys):
    ran(home, status="stopped")
    at = ("--home", str(home))
    assert "--input-shape requires a FILE.onnx" in refused(
        capsys, "rollout", "model", "digits", "--input-shape", "3", *at
    )
    assert "is stopped and has no result yet" in refused(capsys, "rollout", "model", "digits", *at)
    assert "none.onnx: the file cannot be read (No such file" in refused(capsys, "rollout", "model", "none.onnx", *at)
    assert "no rollout of kind 'model' in" in refused(capsys, "rollout", "back", "model", *at)
    assert "no runs in" in refused(capsys, "rollout", "back", "model", "--home", str(home / "nowhere"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--phases", "105%"), "105% is not between 0 % and 100 %"),
        (("--phases", "few"), "'few%' is not a share"),
        (("--phases", "50,25"), "do not grow"),
        (("--phases", "100"), "--phases has one share, 100 %"),
        (("--min-gain", "-0.5"), "'-0.5' is not a number of points: write a number with pt or %"),
        (("--max-latency", "40"), "'40' is not a time: write a number with ms, s"),
        (("--soak", "-1s"), "-1s is negative"),
        (("--max-peak", "much"), "'much' is not a size"),
        (("--max-peak", "-5MB"), "'-5MB' is not a size"),
        (("--window", "25:00-26:00"), "window '25:00-26:00' is invalid"),
        (("--label", "Site Lab"), "is not a label or !label"),
    ],
)
def test_a_number_that_is_none_is_named(home, capsys, words, said):
    file = home.with_name("net.onnx")
    file.write_bytes(graph())
    assert said in refused(capsys, "rollout", "model", str(file), *words, "--home", str(home))


def test_shares_points_and_sizes_are_read():
    assert [rollout.parse_size(each) for each in ("500MB", "1.5GiB")] == [500_000_000, 3 << 29]
    assert [rollout.parse_share(each) for each in ("5%", "5", "0.5%", "100%")] == [0.05, 0.05, 0.005, 1.0]
    assert [rollout.parse_points(each) for each in ("-0.5pt", "1pt", "-2%")] == [-0.005, 0.01, -0.02]


def test_rollouts_are_listed_and_told(home, capsys):
    assert main(["rollout", "status", "--home", str(home)]) == 0
    assert (
        f"no rollouts in {home}: start one with `fedquilt rollout model RUN --home {home}`" in capsys.readouterr().out
    )
    with Store(home) as store:
        id = store.rollouts.add_rollout(RolloutPlan("model", "digits-20261123-041500-1a2b3c", select=("site=lab",)))
        facts = [
            RolloutStarted(7),
            ReleaseOffered(0, ("a", "b", "c")),
            StatusReported("a", 7, "committed"),
            StatusReported("b", 7, "waiting", "a task runs"),
        ]
        store.rollouts.append_events([(id, fact) for fact in facts])
    assert main(["rollout", "status", "--home", str(home)]) == 0
    (_, line, waits) = capsys.readouterr().out.splitlines()
    assert waits == f"{id} waits for a coordinator: start one with `fedquilt serve --home {home}`"
    assert line.split()[:4] == [id, "digits-20261123-041500-1a2b3c", "running", "canary"]
    assert "1 committed, 1 waiting, 1 silent" in line
    assert main(["rollout", "status", "digits", "--home", str(home)]) == 0
    told = capsys.readouterr().out
    assert "canary 5 %: offered to 3 boards" in told
    assert "for site=lab" in told
    assert [line.split()[:3] for line in told.splitlines()[-2:]] == [["b", "0", "waiting"], ["c", "0", "silent"]]
    assert main(["rollout", "status", id, "--home", str(home), "--format", "json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["counts"] == {"committed": 1, "waiting": 1, "silent": 1}
    assert [board["device"] for board in values["boards"]] == ["b", "c", "a"]
    assert "no rollout 'none'" in refused(capsys, "rollout", "status", "none", "--home", str(home))


def test_a_request_to_revert_a_kind_is_for_its_latest_rollout(home, capsys):
    with Store(home) as store:
        model, agent, budget = (
            store.rollouts.add_rollout(RolloutPlan(kind, kind)) for kind in ("model", "agent", "settings")
        )
    assert main(["rollout", "back", "model", "--home", str(home)]) == 0
    with Store(home) as store:
        assert {kept.state.id: kept.revert_requested for kept in store.rollouts.readable_rollouts()} == {
            model: True,
            agent: False,
            budget: False,
        }
    assert main(["rollout", "back", agent, "--home", str(home)]) == 0
    with Store(home) as store:
        assert store.rollouts.find_rollout(agent).revert_requested


def known(home: Path, **boards: DeviceStatus) -> None:
    with TelemetryStore(home, writes=True) as store:
        store.write_telemetry([replace(board, device=name) for name, board in boards.items()], [])


def waits(home: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `rollout status` says that the only one waits for: in the list, and alone; "" for nothing."""
    with Store(home) as store:
        id = store.rollouts.find_rollout().state.id
    assert main(["rollout", "status", "--home", str(home)]) == 0
    listed = capsys.readouterr().out.splitlines()[2:]
    assert main(["rollout", "status", id, "--home", str(home)]) == 0
    alone = [line for line in capsys.readouterr().out.splitlines() if line.startswith("it waits for ")]
    assert main(["rollout", "status", id, "--home", str(home), "--format", "json"]) == 0
    said = json.loads(capsys.readouterr().out)["waits"]
    assert [line.removeprefix(f"{id} waits for ") for line in listed] == ([said] if said else [])
    assert [line.removeprefix("it waits for ") for line in alone] == ([said] if said else [])
    return str(said)


def test_rollouts_say_for_whom_they_wait(home, capsys):
    there, lab = DeviceStatus("", online=True), DeviceStatus("", online=True, labels=("site=lab",))
    with Store(home) as store:
        id = store.rollouts.add_rollout(RolloutPlan("model", "digits", select=("site=lab",), canary=0.5, phases=(1.0,)))

    def told(*facts):
        with Store(home) as store:
            store.rollouts.append_events([(id, fact) for fact in facts])

    assert waits(home, capsys) == f"a coordinator: start one with `fedquilt serve --home {home}`"
    with Store(home) as serving:
        assert serving.acquire_lock()
        assert waits(home, capsys) == f"a device: none has connected to a coordinator of {home} yet"
        known(home, a=there, b=there)
        said = "a device with labels site=lab: 2 boards known, none with these; `fedquilt devices --home "
        assert waits(home, capsys) == f"{said}{home}` shows their labels"
        known(home, c=replace(lab, online=False), d=replace(lab, online=False))
        assert waits(home, capsys) == "a device to come online: 2 are selected, all offline"
        known(home, **dict.fromkeys("cdefghij", lab))
        assert waits(home, capsys) == ""
        told(RolloutStarted(7), ReleaseOffered(0, tuple("cdefghi")))
        assert waits(home, capsys) == "c (silent), d (silent), e (silent), f (silent), g (silent) and 2 more"
        known(home, c=replace(lab, online=False, since=time.time()))
        told(
            StatusReported("d", 7, "committed"),
            StatusReported("e", 7, "checking"),
            *(StatusReported(name, 7, "committed") for name in "fghi"),
        )
        assert waits(home, capsys) == "c (offline), e (checking)"
        known(home, c=replace(lab, online=False, since=time.time() - 86400))
        assert waits(home, capsys) == "c (offline), e (checking)", "it was offered it a moment ago"
        told(StatusReported("e", 7, "committed"), StatusReported("c", 7, "refused", "too slow"))
        assert waits(home, capsys) == ""


def test_deploy_says_that_its_selection_names_no_board(home, capsys):
    """It is queued all the same: one with that label may come."""
    file = home.with_name("net.onnx")
    file.write_bytes(graph())
    known(home, a=DeviceStatus("", online=True, labels=("site=hall",)))
    assert main(["rollout", "model", str(file), "--label", "site=lab", "--home", str(home)]) == 0
    out = capsys.readouterr().out
    assert "it waits for a device with labels site=lab: 1 board known, none with these; `fedquilt devices" in out
    assert f"no coordinator is running for {home}" in out
    with Store(home) as store:
        assert len(store.rollouts.readable_rollouts()) == 1


# -- versions of agents, and settings -------------------------------------------------------------


def test_an_upgrade_is_queued_with_its_version_and_phases(home, tmp_path, capsys):
    file = upgrades.pack(tmp_path / "agents.tar", [upgrades.toy(tmp_path / "house")])
    words = ("--phases", "10%", "50,100", "--label", "site=lab", "--soak", "5min", "--window", "02:00-05:00")
    assert main(["rollout", "agent", str(file), "--home", str(home), *words]) == 0
    plan = queued(home)
    assert (plan.kind, plan.name, plan.select) == ("agent", "9.9.9", ("site=lab",))
    assert plan.cumulative_shares == (0.1, 0.5, 1.0)
    assert (plan.soak_s, plan.window, plan.force) == (300.0, "02:00-05:00", False)
    with Store(home) as store:
        kept = store.blob_store.blob_path(plan.blob.sha256)
        assert kept.read_bytes() == file.read_bytes()
    assert "not signed: only boards with unsigned = true" in capsys.readouterr().out
    assert "is queued: wait for its end" in refused(capsys, "rollout", "agent", str(file), "--home", str(home))
    assert main(["rollout", "back", "agent", "--home", str(home)]) == 0
    assert "is aborted" in capsys.readouterr().out


def test_what_is_no_bundle_is_not_sent(home, tmp_path, capsys):
    """A bundle that no board would take, such as one with a changed wheel, is refused."""
    (tmp_path / "x").write_bytes(b"x" * 1000)
    assert "is not an upgrade bundle" in refused(capsys, "rollout", "agent", str(tmp_path / "x"), "--home", str(home))
    house = [upgrades.toy(tmp_path / "house")]
    file = upgrades.pack(tmp_path / "agents.tar", house, wheels={house[0].name: "0" * 64})
    assert "differs from the manifest" in refused(capsys, "rollout", "agent", str(file), "--home", str(home))
    assert "name another kind or id" in refused(capsys, "rollout", "back", "agent", "--home", str(home))
    with Store(home) as store:
        assert store.rollouts.readable_rollouts() == []


def test_settings_are_queued_as_boards_take_them(home, capsys):
    words = ("budget=1GB", "labels=+canary,-old", "policy=energy", "max_w=10", "telemetry_s=60")
    assert main(["rollout", "settings", *words, "--label", "site=lab", "--home", str(home)]) == 0
    plan = queued(home)
    assert (plan.kind, plan.select, plan.blob) == ("settings", ("site=lab",), None)
    assert plan.settings == {
        "budget": "1GB",
        "labels": ["+canary", "-old"],
        "policy": "energy",
        "max_w": 10.0,
        "telemetry_s": 60.0,
    }
    assert main(["rollout", "back", "settings", "--home", str(home)]) == 0
    assert "is aborted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["budget"], "'budget' is not a setting: write KEY=VALUE"),
        (["budget=1GB", "budget=2GB"], "budget is set twice"),
        (["budget=much"], "budget: 'much' is not a size"),
        (["max_w=ten"], "has no number: write max_w=10"),
        (["home=/"], "home"),
        (["labels=+a,b"], "mixes changes with full labels"),
        ([], "missing argument"),
    ],
)
def test_settings_that_no_board_would_take_are_not_sent(home, capsys, words, said):
    assert said in refused(capsys, "rollout", "settings", *words, "--home", str(home))
