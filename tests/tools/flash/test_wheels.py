"""Which wheels a board gets: by its own Python and machine, not by those of who flashes it; and their hashes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from boards import required, wheel

import fedquilt
from fedquilt.core import JobError, StoreError
from fedquilt.tools.boards import targets
from fedquilt.tools.boards.flash import wheels
from fedquilt.tools.boards.flash.wheels import Wheel

JP6, JP7 = targets.find_target("jetpack6"), targets.find_target("jetpack7")


def known(*paths: Path) -> dict[str, Wheel]:
    return {read.name: read for read in map(Wheel.from_file, paths)}


# -- what is needed -------------------------------------------------------------------------------


def test_markers_are_the_boards_not_this_machines(tmp_path: Path) -> None:
    app = wheel(tmp_path, "app", "1.0", 'tomli; python_version < "3.11"', 'mkl; platform_machine == "x86_64"')
    tomli = wheel(tmp_path, "tomli")
    assert wheels.dependency_closure("app", known(app), JP6) == ({"app"}, ["tomli"])
    assert wheels.dependency_closure("app", known(app, tomli), JP6) == ({"app", "tomli"}, [])
    assert wheels.dependency_closure("app", known(app, tomli), JP7) == ({"app"}, [])
    assert wheels.dependency_closure("app", known(app), targets.find_target("amd64", "3.12")) == ({"app"}, ["mkl"])


def test_extras_bring_what_they_need_and_nothing_else(tmp_path: Path) -> None:
    app = wheel(tmp_path, "app", "1.0", 'web; extra == "site"', 'app[site]; extra == "all"', extras=("site", "all"))
    other = wheel(tmp_path, "other", "1.0", "app", "app[all]")
    web = wheel(tmp_path, "web")
    every = known(app, other, web)
    assert wheels.dependency_closure("app", every, JP6) == ({"app"}, [])
    assert wheels.dependency_closure("app[site]", every, JP6) == ({"app", "web"}, [])
    assert wheels.dependency_closure("other", every, JP6) == ({"app", "other", "web"}, [])


def test_a_version_that_does_not_fit_counts_as_missing(tmp_path: Path) -> None:
    app = wheel(tmp_path, "app", "1.0", "My.Lib>=2,<3")
    assert wheels.dependency_closure("app", known(app, wheel(tmp_path, "my_lib", "1.9")), JP6) == (
        {"app"},
        ["My.Lib<3,>=2"],
    )
    assert wheels.dependency_closure("app", known(app, wheel(tmp_path, "my_lib", "2.1")), JP6) == (
        {"app", "my-lib"},
        [],
    )


def test_packages_that_need_each_other_come_to_an_end(tmp_path: Path) -> None:
    one, two = wheel(tmp_path, "one", "1", "two"), wheel(tmp_path, "two", "1", "one")
    assert wheels.dependency_closure("one", known(one, two), JP6) == ({"one", "two"}, [])


def test_what_is_no_wheel_is_named(tmp_path: Path) -> None:
    (tmp_path / "half-1.0-py3-none-any.whl").write_bytes(b"PK")
    with pytest.raises(StoreError, match=r"half-1\.0.* is not a wheel .*delete it"):
        Wheel.from_file(tmp_path / "half-1.0-py3-none-any.whl")


# -- the house ------------------------------------------------------------------------------------


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    for name in required():
        wheel(folder, name.replace("-", "_"), "99.0")
    (folder / "numpy-99.0-py3-none-any.whl").unlink()
    for tag in ("cp310-cp310-manylinux_2_28_aarch64", "cp312-cp312-manylinux_2_34_aarch64", "cp310-cp310-win_amd64"):
        wheel(folder, "numpy", "99.0", tag=tag)
    wheel(folder, "numpy", "100.0", tag="cp310-cp310-manylinux_2_99_aarch64")  # of a newer glibc than JetPack 6's
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CERT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def names(house: list[Path]) -> list[str]:
    return sorted(path.name.split("-")[0] for path in house)


def test_a_house_holds_what_the_target_can_load(index: Path, tmp_path: Path) -> None:
    house = wheels.collect_wheels(JP6, ["onnx"])
    assert house[0].name == f"fedquilt_board-{fedquilt.__version__}-py3-none-any.whl"
    assert "numpy-99.0-cp310-cp310-manylinux_2_28_aarch64.whl" in [path.name for path in house]
    assert {"tomli", "onnxruntime", "paho_mqtt"} <= set(names(house))
    assert not {"torch", "amqtt"} & set(names(house))
    house = wheels.collect_wheels(JP7, [])
    assert "numpy-99.0-cp312-cp312-manylinux_2_34_aarch64.whl" in [path.name for path in house]
    assert not {"tomli", "onnxruntime"} & set(names(house))


def names_at(house: list[Path], name: str) -> int:
    return next(place for place, path in enumerate(house) if path.name.startswith(f"{name}-"))


def test_every_board_gets_the_same_versions_without_a_network(index: Path, tmp_path: Path) -> None:
    first = wheels.collect_wheels(JP7, [])
    wheel(index, "paho_mqtt", "100.0")
    assert wheels.collect_wheels(JP7, []) == first
    shutil.rmtree(tmp_path / "cache")
    newer = wheels.collect_wheels(JP7, [])
    paho = newer[names_at(newer, "paho_mqtt")]
    assert paho.name.startswith("paho_mqtt-100.0")
    assert not list(paho.parent.glob("paho_mqtt-99.0*"))
    paho.write_bytes(b"")
    mended = wheels.collect_wheels(JP7, [])
    assert mended == newer
    assert Wheel.from_file(paho).version == "100.0"


def test_an_operator_may_say_which_versions_are_allowed(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(index, "paho_mqtt", "98.0")
    constraint = tmp_path / "only.txt"
    constraint.write_text("paho-mqtt==98.0\nnot-needed==1.0\n")
    free = wheels.collect_wheels(JP7, [])
    monkeypatch.setenv("PIP_CONSTRAINT", str(constraint))
    held = wheels.collect_wheels(JP7, [])
    assert "paho_mqtt-98.0-py3-none-any.whl" in [path.name for path in held]
    assert "paho_mqtt-99.0-py3-none-any.whl" in [path.name for path in free]
    assert all(path.is_file() for path in free)
    constraint.write_text("paho-mqtt==99.0\n")  # what was kept for another text is not taken
    other = wheels.collect_wheels(JP7, [])
    assert "paho_mqtt-99.0-py3-none-any.whl" in [path.name for path in other]


def test_a_constraint_that_cannot_be_met_or_read_is_told(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "none.txt"))
    with pytest.raises(JobError, match=r"PIP_CONSTRAINT .*none\.txt cannot be read \(No such file.*numpy==2\.2\.6"):
        wheels.collect_wheels(JP7, [])
    (tmp_path / "only.txt").write_text("numpy==1.0\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "only.txt"))
    with pytest.raises(JobError, match=r"no wheels for jetpack7 .*the versions in .*only\.txt"):
        wheels.collect_wheels(JP7, [])


def test_what_there_is_no_wheel_for_is_told(index: Path, tmp_path: Path) -> None:
    for path in index.glob("numpy-*"):
        path.unlink()
    with pytest.raises(JobError, match=r"no wheels for jetpack6 \(Python 3\.10, aarch64\): .*numpy.*PIP_EXTRA_INDEX"):
        wheels.collect_wheels(JP6, [])


def test_an_unknown_extra_is_refused_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(JobError, match=r"unknown extra 'onx': fedquilt-board has .*onnx"):
        wheels.collect_wheels(JP6, ["onx"])
    assert not (tmp_path / "cache").exists()


def shelf(folder: Path) -> str:
    for path in list(folder.glob("*.whl")):
        place = folder / path.name.split("-")[0].replace("_", "-")
        place.mkdir(exist_ok=True)
        path.rename(place / path.name)
    for place in (one for one in folder.iterdir() if one.is_dir()):
        links = "".join(f'<a href="{path.name}">{path.name}</a>\n' for path in sorted(place.glob("*.whl")))
        (place / "index.html").write_text(f"<html><body>{links}</body></html>")
    return folder.as_uri()


LOCAL = "cp310-cp310-linux_aarch64"


@pytest.fixture
def nvidias(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("torch", "torchvision"):
        wheel(index, name, "99.1", tag="cp310-cp310-manylinux_2_28_aarch64")
    wheel(index, "numpy", "1.26.4", tag="cp310-cp310-manylinux_2_17_aarch64")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", shelf(index))
    folder = tmp_path / "nvidia"
    library = {"torch/lib/libtorch_python.so": "numpy.core._multiarray_umath"}
    wheel(folder, "onnxruntime_gpu", "1.23.0", "numpy", tag=LOCAL)
    wheel(folder, "torch", "2.8.0", tag=LOCAL, files=library)
    wheel(folder, "torchvision", "0.23.0", "torch==2.8.0", tag=LOCAL)
    return folder


def test_wheels_with_the_gpu_come_from_the_index_whatever_pypi_has(
    nvidias: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", shelf(nvidias))
    house = wheels.collect_wheels(JP6, ["gpu", "train"])
    files = [path.name for path in house]
    ours = ("onnxruntime_gpu-1.23.0", "torch-2.8.0", "torchvision-0.23.0")
    assert {f"{one}-{LOCAL}.whl" for one in ours} <= set(files)
    assert wheels.collect_wheels(JP6, ["gpu", "train"]) == house  # kept
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL")
    plain = wheels.collect_wheels(JP6, ["train"])
    assert "torch-99.1-cp310-cp310-manylinux_2_28_aarch64.whl" in [path.name for path in plain]


@pytest.mark.parametrize(("compiled", "numpy"), [("numpy.core", "1.26.4"), ("numpy._core", "99.0")])
def test_a_torch_compiled_with_numpy_1_gets_numpy_1(
    nvidias: Path, monkeypatch: pytest.MonkeyPatch, compiled: str, numpy: str
) -> None:
    wheel(nvidias, "torch", "2.8.0", tag=LOCAL, files={"torch/lib/libtorch_python.so": f"{compiled}._multiarray_umath"})
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", shelf(nvidias))
    house = wheels.collect_wheels(JP6, ["train"])
    assert house[names_at(house, "numpy")].name.startswith(f"numpy-{numpy}-")


def test_the_target_with_the_gpu_knows_its_index(
    nvidias: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(targets.TARGETS, "jetpack6-gpu", replace(targets.TARGETS["jetpack6-gpu"], index=shelf(nvidias)))
    house = wheels.collect_wheels(targets.find_target("jetpack6-gpu"), ["onnx"])
    assert f"onnxruntime_gpu-1.23.0-{LOCAL}.whl" in [path.name for path in house]
    assert "onnxruntime" not in names(house)


def test_a_wheel_of_that_tag_is_not_taken_from_pypi(nvidias: Path, index: Path, tmp_path: Path) -> None:
    wheel(index, "paho_mqtt", "100.0", tag=LOCAL)
    shelf(index)
    house = wheels.collect_wheels(JP6, [])
    assert "paho_mqtt-99.0-py3-none-any.whl" in [path.name for path in house]


# -- targets --------------------------------------------------------------------------------------


def test_wheels_for_an_older_glibc_run_and_for_a_newer_do_not() -> None:
    assert JP6.platforms[0] == "manylinux_2_35_aarch64"
    assert {"manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64"} <= set(JP6.platforms)
    assert not [tag for tag in JP6.platforms if "2_36" in tag or "x86" in tag]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("jetpack8",), r"unknown target 'jetpack8': choose one of jetpack5, "),
        (("arm64",), r"--python 3\.11"),
        (("jetpack5", "3.8"), r"install one on the board and name it, .* --python /opt"),
        (("arm64", "3.8"), r"needs 3\.10 or newer"),
        (("arm64", "2.7"), r"needs 3\.10 or newer"),
        (("arm64", "opt/python3.11"), r"write the path on the board"),
        (("arm64", "/usr/$(x)/python3.11"), r"not an absolute path"),
    ],
)
def test_boards_that_cannot_get_a_clear_answer(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(JobError, match=says):
        targets.find_target(*arguments)


def test_a_board_may_bring_its_own_python() -> None:
    target = targets.find_target("arm64", "/opt/python3.10/bin/python3.10")
    assert (target.python, target.interpreter) == ("3.10", "/opt/python3.10/bin/python3.10")
    assert targets.find_target("raspberry-pi-os", "3.13").interpreter == "/usr/bin/python3.13"
