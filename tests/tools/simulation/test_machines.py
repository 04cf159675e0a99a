"""What results depend on beside the job: which machines compute one run, what differs, and what a run keeps of it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.core import JobError
from fedquilt.formats import job_bundle
from fedquilt.testing.toy_networks import point_devices, toy_bundle
from fedquilt.tools.simulation import machines, pool, ray_workers
from fedquilt.tools.simulation.machines import Machine
from fedquilt.tools.simulation.pool import ScratchFolder
from fedquilt.tools.simulation.run import simulate

ONE = Machine("EPYC (x86_64)", ("A100",), "1", {"Python": "3.11.7", "numpy": "2.1.0"}, {"fedquilt": "0.1.0 (aa)"})


def changed(**given: object) -> Machine:
    return msgspec.structs.replace(ONE, **given)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (changed(processor="Xeon (x86_64)"), r"processor Xeon \(x86_64\), not EPYC \(x86_64\)"),
        (changed(gpus=()), "GPU none, not A100"),
        (changed(threads="4"), "threads 4, not 1"),
        (changed(libraries={"Python": "3.11.7"}), "numpy missing, not 2.1.0"),
    ],
)
def test_a_machine_that_differs_is_refused_by_name_unless_machines_may_be_mixed(other: Machine, said: str) -> None:
    with pytest.raises(
        JobError, match=rf"two differs from one \({said}\), so results would differ in their last bits.*--mixed"
    ):
        machines.require_same_results({"one": ONE}, "two", other, mixed=False)
    machines.require_same_results({"one": ONE}, "two", other, mixed=True)


@pytest.mark.parametrize("name", ["fedquilt", "mine"])
def test_other_code_is_refused_even_where_machines_may_be_mixed(name: str) -> None:
    first = changed(code={**ONE.code, "mine": "bb"})
    other = changed(code={**first.code, name: "0.2.0 (cc)"})
    with pytest.raises(JobError, match=rf"two has other code than one \({name} 0.2.0 \(cc\), not .*install the same"):
        machines.require_same_results({"one": first}, "two", other, mixed=True)


def test_a_run_keeps_what_computed_it_and_goes_on_elsewhere_only_where_it_may(tmp_path: Path) -> None:
    machines.record_machines(tmp_path, "run", {"one": ONE}, mixed=False)
    machines.record_machines(tmp_path, "run", {"one": changed(code={"fedquilt": "0.2.0 (dd)"})}, mixed=False)
    other = changed(libraries={**ONE.libraries, "numpy": "1.26.4"})
    with pytest.raises(JobError, match=r"two differs from one, where run began \(numpy 1\.26\.4, not 2\.1\.0"):
        machines.record_machines(tmp_path, "run", {"two": other}, mixed=False)
    machines.record_machines(tmp_path, "run", {"two": other}, mixed=True)
    assert list(machines.read_machines(tmp_path, "run")) == ["one", "two"]


def test_machines_of_one_kind_are_told_in_one_line() -> None:
    found = machines.format_machines({"a": ONE, "b": changed(gpus=()), "c": ONE})
    assert found == [
        "a, c: EPYC (x86_64), A100, Python 3.11.7, numpy 2.1.0, fedquilt 0.1.0 (aa)",
        "b: EPYC (x86_64), Python 3.11.7, numpy 2.1.0, fedquilt 0.1.0 (aa)",
    ]


def test_a_simulated_run_in_a_home_keeps_this_machine(tmp_path: Path) -> None:
    made = toy_bundle()
    job_bundle.write_bundle(tmp_path / "bundle", made.meta, {"model": tensors.encode_tensors(made.load("model"))})
    job = settings.parse_job({"name": "toy", "method": "fedavg", "engine": "numpy", "rounds": 1})
    simulate(job, tmp_path / "bundle", point_devices(2, 13), home=tmp_path / "home")
    (path,) = (tmp_path / "home" / "machines").iterdir()
    found = machines.read_machines(tmp_path / "home", path.stem)
    assert found == {socket.gethostname(): machines.describe_this_machine(threads="1")}
    assert found[socket.gethostname()].libraries["numpy"]


@pytest.mark.parametrize("word", ["pool", "ray", "ray://head:10001", "ray://[::1]:10001"])
def test_an_engine_is_taken_at_its_word(word: str) -> None:
    assert pool.choose_engine(word, {"RAY_ADDRESS": "10.0.0.1:6379"}) == word


def test_auto_is_a_pool_except_within_a_ray_cluster() -> None:
    assert pool.choose_engine("auto", {}) == "pool"
    assert pool.choose_engine("auto", {"RAY_ADDRESS": "10.0.0.1:6379"}) == "ray"


@pytest.mark.parametrize("word", ["dask", "ray://", "ray://head", "ray://:10001", "ray://head:port", ""])
def test_an_unknown_engine_is_refused_with_those_there_are(word: str) -> None:
    with pytest.raises(JobError, match="is unknown: use auto, pool, ray or ray://HOST:PORT"):
        pool.choose_engine(word, {})


def test_the_ray_of_this_machine_is_the_one_that_ray_start_has_noted(tmp_path: Path) -> None:
    given = {"RAY_TMPDIR": str(tmp_path)}
    assert ray_workers.find_ray_address(given) is None
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.2:6379\n")
    assert ray_workers.find_ray_address(given) == "10.0.0.2:6379"
    assert ray_workers.find_ray_address({**given, "RAY_ADDRESS": "10.0.0.1:6379"}) == "10.0.0.1:6379"


HOLDS = (
    "from fedquilt.tools.simulation.pool import ScratchFolder; s = ScratchFolder(); print(s.path, flush=True); input()"
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
    tempfile.tempdir = None


def test_a_folder_goes_with_what_is_in_it_however_it_is_left(place: Path) -> None:
    def interrupted() -> None:
        with ScratchFolder() as folder:
            (folder / "deep").mkdir()
            (folder / "deep" / "file").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    made = ScratchFolder()
    made.cleanup()
    made.cleanup()
    assert list(place.iterdir()) == []


def test_what_a_killed_process_left_goes_and_what_a_living_one_holds_stays(place: Path) -> None:
    (place / "fedquilt-older").mkdir()
    (place / "fedquilt-scratch-file").write_text("")
    held: list[Path] = []
    processes: list[subprocess.Popen[str]] = []
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        held.append(Path(process.stdout.readline().strip()))
        processes.append(process)
    killed, living = processes
    (held[0] / "file").write_text("left behind")
    killed.kill()
    killed.communicate()
    with ScratchFolder() as own:
        assert {path.name for path in place.iterdir()} == {
            "fedquilt-older",
            "fedquilt-scratch-file",
            held[1].name,
            own.name,
        }
    living.communicate("\n")


def test_a_folder_that_was_removed_before_it_could_be_locked_is_made_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = tempfile.mkdtemp
    first: list[str] = []

    def seen(prefix: str) -> str:
        found = make(prefix=prefix)
        if not first:
            first.append(found)
            opened = os.open
            monkeypatch.setattr(os, "open", lambda path, flags: (opened(path, flags), os.rmdir(path))[0])
        else:
            monkeypatch.undo()
        return found

    monkeypatch.setattr(tempfile, "mkdtemp", seen)
    with ScratchFolder() as folder:
        assert folder.exists()
        assert str(folder) != first[0]


def test_a_folder_that_was_removed_before_it_could_be_opened_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    make = tempfile.mkdtemp
    first: list[str] = []

    def taken(prefix: str) -> str:
        found = make(prefix=prefix)
        if not first:
            first.append(found)
            os.rmdir(found)
        return found

    monkeypatch.setattr(tempfile, "mkdtemp", taken)
    with ScratchFolder() as folder:
        assert folder.exists()
        assert str(folder) != first[0]
