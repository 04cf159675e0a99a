"""Decoders of releases: bundles of an upgrade, what a model says of itself, and what boards and rollouts keep."""

from __future__ import annotations

import io
import itertools
import os
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import boards
import msgspec
import numpy as np
import plain
import upgrades
from certified import Certified
from decoding import SHA, Decoder, numbered

from fedquilt import wire
from fedquilt.coordinator.rounds.rollout import (
    AnyRolloutEvent,
    PhasePassed,
    ReleaseOffered,
    RolloutCompleted,
    RolloutPlan,
    RolloutReverted,
    RolloutStarted,
    StatusReported,
    release_for_device,
)
from fedquilt.coordinator.storage.rollout_log import RolloutLog
from fedquilt.coordinator.storage.rows import NO_CHECKSUM, JobRow, checksum
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import DECODE_ERRORS, BlobRef, DataError, JobError, ModelError, Reading
from fedquilt.edge_agent import messages
from fedquilt.edge_agent import settings as agent_settings
from fedquilt.edge_agent.engines import exported_model
from fedquilt.edge_agent.releases import models
from fedquilt.edge_agent.runner_status import FILE, RunnerStatus, RunnerStatusReader
from fedquilt.edge_agent.task.protocol import CheckRequest
from fedquilt.edge_agent.upgrade import agent_release, archive, environment_build, launcher, remote_settings
from fedquilt.edge_agent.upgrade.launcher import VersionChoice
from fedquilt.formats import personal_models
from fedquilt.host import virtual_environment
from fedquilt.onnx import weights
from fedquilt.tools.boards.flash.bundle import write_archive

OWN_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # of orders that the agent itself gives


def every(folder: Path) -> dict[str, Decoder]:
    """The decoders by name.

    Args:
        folder: for files of theirs, empty.
    """
    folder.mkdir()
    return {
        **_upgrades(folder / "upgrades"),
        **_kept(folder / "kept"),
        **_networks(),
        **_parted(folder / "parted"),
        **_rollouts(folder / "home"),
    }


def _upgrades(folder: Path) -> dict[str, Decoder]:
    site, path, pem = Certified(folder), folder / "sent.tar", folder / "sent.crt"
    ca, packages = str(site.ca), folder / "packages"
    wheel = boards.wheel(folder, "toy", "1")
    packed = zipfile.ZipFile(folder / "packed.whl", "w", zipfile.ZIP_DEFLATED)
    with packed, zipfile.ZipFile(wheel) as stored:
        for name in stored.namelist():
            packed.writestr(name, stored.read(name) * 9)
    wholes = []
    for sign in (None, site.authority.sign_upgrade):
        upgrades.pack(path, [wheel], sign)
        wholes.append(path.read_bytes().rstrip(b"\0") + bytes(1024))  # without most of what fills it up
    with archive.open_bundle(path) as bundle:
        manifest, signature = bundle.signed, bundle.signature
    assert signature is not None
    order = environment_build.BuildRequest(
        "b", SHA, "f", ("agent",), ("/p",), ca, unsigned=False, highest_number=0, parent=0
    )

    def opened(payload: bytes) -> object:
        path.write_bytes(payload)
        try:
            with archive.open_bundle(path) as bundle:
                environment_build.require_fitting_machine(bundle.manifest)
                bundle.verify_wheels()
        except ModelError as error:
            str(error).encode()  # the coordinator is told
            raise
        return None

    def signed(payload: bytes) -> object:
        write_archive({archive.MANIFEST: manifest, archive.SIGNATURE: payload[:1000]}, path)
        with archive.open_bundle(path) as bundle:
            environment_build.require_valid_signature(bundle, ca, unsigned=False)
        assert payload == signature

    write_archive({archive.MANIFEST: manifest, archive.SIGNATURE: signature}, folder / "right.tar")

    def certified(payload: bytes) -> object:
        pem.write_bytes(payload)
        with archive.open_bundle(folder / "right.tar") as bundle:
            return environment_build.require_valid_signature(bundle, str(pem), unsigned=False)

    numbers = itertools.count()

    def unpacked(payload: bytes) -> object:
        into = packages / str(next(numbers))
        try:
            return virtual_environment.unpack_wheels([("toy.whl", io.BytesIO(payload))], into, 1 << 20)
        finally:
            assert [*packages.iterdir()] == [into]  # nothing is written beside it
            for root, folders, names in os.walk(into, topdown=False):
                for name in names:
                    Path(root, name).unlink()
                for name in folders:
                    Path(root, name).rmdir()
            into.rmdir()

    packages.mkdir()
    found = VersionChoice("f", "a" * 64, "b" * 64, trying=True, starts=1, boot="boot", began_s=100)
    told = msgspec.json.encode(launcher.launch_info(folder, "f", SHA, ["agent", "agent.toml"]))
    return {
        "bundle of an upgrade": Decoder(
            "edge_agent/upgrade/archive.py", opened, (ModelError,), tuple(wholes), headed, share=0.1
        ),
        "signature of an upgrade": Decoder(
            "edge_agent/upgrade/environment_build.py", signed, (ModelError,), (signature,), share=0.02
        ),
        "ca of an upgrade": Decoder(
            "edge_agent/upgrade/environment_build.py",
            certified,
            (JobError, ModelError),
            (site.ca.read_bytes(),),
            share=0.05,
        ),
        "order to build": Decoder(
            "edge_agent/upgrade/environment_build.py",
            lambda payload: msgspec.json.decode(payload, type=environment_build.BuildRequest),
            OWN_ERRORS,
            (msgspec.json.encode(order),),
            share=0.1,
        ),
        "wheel of an upgrade": Decoder(
            "fedquilt/host/virtual_environment.py",
            unpacked,
            (virtual_environment.InvalidWheelError, OSError),
            (wheel.read_bytes(), (folder / "packed.whl").read_bytes()),
            share=0.1,
        ),
        "choice.json": Decoder(
            "edge_agent/upgrade/launcher.py",
            _begun(folder),
            (),
            (launcher.format_choice(found).encode(), b'{"flashed":"f"}'),
        ),
        "bundle.json": Decoder("edge_agent/upgrade/launcher.py", _named(folder), (), (b'{"id":"f"}',), share=0.1),
        "word of the launcher": Decoder(
            "edge_agent/upgrade/agent_release.py",
            lambda payload: agent_release.read_launch_info({launcher.LAUNCH_INFO_VARIABLE: os.fsdecode(payload)}),
            (),
            (told,),
        ),
    }


def headed(payload: bytes) -> bytes:
    given, at = bytearray(payload), 0
    while at + 512 <= len(given) and any(given[at : at + 512]):
        given[at + 148 : at + 156] = b" " * 8
        given[at + 148 : at + 156] = b"%06o\0 " % sum(given[at : at + 512])
        try:
            size = max(tarfile.nti(given[at + 124 : at + 136]), 0)  # type: ignore[attr-defined]
        except tarfile.TarError:
            break
        at += 512 + -(-size // 512) * 512
    return bytes(given)


def _begun(folder: Path) -> Any:
    program = launcher.python_path(folder, "a" * 64)
    program.parent.mkdir(parents=True)
    program.touch()

    def read(payload: bytes) -> object:
        (folder / launcher.CHOICE).write_bytes(payload)
        choice, said = launcher.choose_version(launcher.read_choice(folder), "f", "boot", 500.0, folder)
        said.encode("utf-8", "backslashreplace")
        assert launcher.parse_choice(launcher.format_choice(choice)) == choice
        return choice

    return read


def _named(folder: Path) -> Any:
    def read(payload: bytes) -> str:
        (folder / "bundle.json").write_bytes(payload)
        return launcher.installation_id(folder)

    return read


def _kept(folder: Path) -> dict[str, Decoder]:
    folder.mkdir()
    settings = agent_settings.AgentSettings(device="d", home=str(folder), budget="1GB")
    lies = models.models_folder(settings)
    (lies / SHA[:16]).mkdir(parents=True)
    (lies / SHA[:16] / models.MODEL).touch()
    (lies / models.CURRENT).symlink_to(SHA[:16])
    laid = models.ReleaseManifest(model=SHA, rollout="digits-1", name="digits", serial=3)
    says = RunnerStatus(at=1e9, model=SHA, served=20, failed=2, latency_s=0.1, drift=0.2, accuracy=0.9, labelled=5)
    values = {"budget": "512MB", "labels": ["+canary", "-old"], "policy": "max", "max_w": 9.5, "telemetry_s": 30.0}
    kept = remote_settings.StoredSettings(serial=3, set=values, previous={"labels": ["a=b", "c"]})
    order = CheckRequest(
        model="m",
        current_model=None,
        budget_bytes=1,
        data={"path": "digits.npz"},
        allowed_plugins=("a",),
    )

    def current(payload: bytes) -> object:
        (lies / SHA[:16] / models.RELEASE).write_bytes(payload)
        return models.ModelReleases(settings, None, None).current_sha256()  # type: ignore[arg-type]

    (lies / SHA[:16] / models.RELEASE).write_bytes(msgspec.json.encode(laid))

    def served(payload: bytes) -> object:
        (lies / FILE).write_bytes(b"")
        runner = RunnerStatusReader(lies)
        board = models.ModelReleases(settings, None, None)  # type: ignore[arg-type]
        board.runner = runner
        runner.read_status()
        for _ in range(2):
            (lies / FILE).write_bytes(payload)
            board.unhealthy_reason()
        told = messages.telemetry_message(Reading(), runner_status=runner.read_status())
        return None if told is None else wire.decode(wire.encode(told), wire.Telemetry)

    def held(payload: bytes) -> object:
        (folder / remote_settings.FILE).write_bytes(payload)
        taken: list[agent_settings.AgentSettings] = []
        board = remote_settings.SettingsKind(settings, 8 << 30, folder, taken.append)
        board.current_sha256()
        return board.effective_settings().task_budget_bytes(8 << 30)

    def set_by(payload: bytes) -> object:
        try:
            table = msgspec.json.decode(payload, type=dict[str, Any])
        except DECODE_ERRORS:
            return None
        found = remote_settings.apply_remote_settings(settings, table, 8 << 30)
        return found.task_budget_bytes(8 << 30)

    where = "edge_agent/upgrade/remote_settings.py"
    return {
        "release.json": Decoder("edge_agent/releases/models.py", current, (), (msgspec.json.encode(laid),), share=0.3),
        "served.json": Decoder("edge_agent/runner_status.py", served, (), (msgspec.json.encode(says),), share=0.2),
        "settings.json": Decoder(where, held, (), (wire.encode(kept),), numbered, share=0.3),
        "settings of a release": Decoder(where, set_by, (JobError,), (msgspec.json.encode(values),)),
        "order to check": Decoder(
            "edge_agent/task/process.py",
            lambda payload: msgspec.json.decode(payload, type=CheckRequest),
            OWN_ERRORS,
            (msgspec.json.encode(order),),
            share=0.1,
        ),
    }


def _networks() -> dict[str, Decoder]:
    images, rows = np.full((2, 4, 4), 9, np.uint8), np.ones((2, 6), np.float32)
    stitched = b'{"channels": 3, "size": 8, "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.1]}\n\n["day", "night"]'
    trained = (
        b'\n{"name": "mlp", "inputs": 6, "hidden": [4], "classes": 2, "task": "regression"}\n',
        b'\n{"name": "mlp", "inputs": 6, "classes": 2, "input": {"mean": [0.5], "std": [0.1]}}\n',
        b'\n{"name": "transformer", "vocabulary": 20, "length": 4, "classes": 2}\n',
    )

    def read(payload: bytes) -> object:
        lines = payload.decode("utf-8", "replace").split("\n")
        facts = {name: line for name, line in zip(("input", "network", "labels"), lines, strict=False) if line}
        found = exported_model.read_metadata(facts)
        kind = found.task
        assert kind is None or isinstance(kind, str)
        sides = [table.get("size", 1) for table in (found.input, (found.network or {}).get("input")) if table]
        for x in (images, rows) if max(sides, default=1) <= 64 else ():  # greater ones only take time
            with np.errstate(all="ignore"):
                try:
                    found.prepare_inputs(x)
                except DataError:
                    continue
        return found

    return {
        "words of a network": Decoder("edge_agent/engines/exported_model.py", read, (ModelError,), (stitched, *trained))
    }


def _parted(folder: Path) -> dict[str, Decoder]:
    folder.mkdir()
    path, given = folder / "shared", {"w": np.ones((2, 3), np.float32)}
    tensor = b"\x08\x02\x08\x03\x10\x01B\x01w"  # dims 2 and 3, float, "w", and no numbers
    graph = b"*" + bytes([len(tensor)]) + tensor + b"\x0a\x03\x0a\x01w"  # an initializer, and a node with one input
    model = b"\x08\x08:" + bytes([len(graph)]) + graph + b"B\x02\x10\x11"
    task = plain.task(job="digits-1", method="fedrep", params={"lr": 0.1}, actions=("check",))
    assert weights.missing_tensors(model).keys() == given.keys()
    sent = personal_models.encode_personal(task, model, {"own": given, "model": {"v": np.zeros((), np.float32)}})

    def read(payload: bytes) -> object:
        path.write_bytes(payload)
        said = personal_models.read_task(path)
        return said, weights.missing_tensors(personal_models.read_personal(path).graph.data)

    def filled(payload: bytes) -> object:
        return b"".join(weights.fill_graph(payload, given))

    def read_whole(payload: bytes) -> object:
        (folder / "two.onnx").write_bytes(payload)
        return b"".join(weights.read_with_external_data(folder / "two.onnx"))

    (folder / "d").write_bytes(bytes(24))
    place = b"j\x0d\x0a\x08location\x12\x01dp\x01"  # external data: the location "d"
    outer = b"*" + bytes([len(tensor + place)]) + tensor + place
    beside = b"\x08\x08:" + bytes([len(outer)]) + outer + b"B\x02\x10\x11"
    assert len(weights.read_with_external_data(_written(folder / "two.onnx", beside))) > 1

    return {
        "result with parts on boards": Decoder("fedquilt/formats/personal_models.py", read, (ModelError,), (sent,)),
        "graph to be filled": Decoder("fedquilt/onnx/weights.py", filled, (ModelError,), (model,)),
        "graph in two files": Decoder("fedquilt/onnx/weights.py", read_whole, (ModelError,), (beside,)),
    }


def _written(path: Path, payload: bytes) -> Path:
    path.write_bytes(payload)
    return path


def _rollouts(home: Path) -> dict[str, Decoder]:
    store = Store(home, durable=False)
    plan = RolloutPlan(
        kind="settings", name="quieter", select=("a=b",), phases=(0.5, 1.0), settings={"budget": "1GB", "labels": ["a"]}
    )
    brought = RolloutPlan(
        kind="model", name="digits", blob=BlobRef(sha256=SHA, size=3), limits=wire.ReleaseLimits(min_gain=-0.005)
    )
    id = store.rollouts.add_rollout(plan)
    facts: tuple[AnyRolloutEvent, ...] = (
        RolloutStarted(1),
        ReleaseOffered(0, ("a", "b")),
        StatusReported("a", 1, "committed", "it is well", {"accuracy": 0.5}),
        PhasePassed(0, ("b",)),
        RolloutCompleted(),
        RolloutReverted(2, "two of two"),
        RolloutReverted(2, "why"),
    )
    bodies = tuple(msgspec.json.encode(event) for event in facts)

    def kept(text: str, lines: tuple[str, ...]) -> object:
        head = NO_CHECKSUM
        with store.open_transaction():
            store._db.execute("delete from rollout_facts")
            for body in lines:
                head = checksum(head, id, 1.0, body)
                store._db.execute(
                    "insert into rollout_facts (job, at, body, sum) values (?, ?, ?, ?)", (id, 1.0, body, head)
                )
            row = JobRow(id, text, "", "", 1.0, head=head, submitter="x")
            store._db.execute(
                "update rollouts set settings = ?, created = 1.0, submitter = 'x', head = ?, sum = ?",
                (text, head, row.row_checksum),
            )
        log = RolloutLog(store._db, store._rows, home, store.open_transaction)
        log.referenced_blobs()
        for why in log.read_errors().values():
            raise JobError(why)
        state = log.find_rollout(id).state
        for device in ("a", *state.offered):
            if (sent := release_for_device(state, device)) is not None:
                assert wire.decode(wire.encode(sent), wire.DesiredRelease).serial == sent.serial
        return state

    known = msgspec.json.encode(plan).decode()

    def planned(payload: bytes) -> object:
        return kept(payload.decode("utf-8", "replace"), (bodies[0].decode(), bodies[1].decode()))

    def heard(payload: bytes) -> object:
        return kept(known, tuple(payload.decode("utf-8", "replace").split("\n")))

    where = "coordinator/storage/rollout_log.py"
    logs = (bodies[:5], (*bodies[:3], bodies[5]), (*bodies[:2], bodies[4], bodies[6]))
    return {
        "plan of a rollout": Decoder(
            where, planned, (JobError,), (msgspec.json.encode(plan), msgspec.json.encode(brought)), share=0.1
        ),
        "facts of a rollout": Decoder(where, heard, (JobError,), tuple(b"\n".join(log) for log in logs), share=0.1),
    }
