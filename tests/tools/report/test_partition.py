"""A partition is shown as a picture, a table and JSON, which agree with what devices then load."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fedquilt import data
from fedquilt.cli import main
from fedquilt.coordinator import settings
from fedquilt.core import DataError
from fedquilt.data.spec import DataSpec
from fedquilt.tools.report import partition, plots
from fedquilt.tools.report.partition import ClassCounts
from fedquilt.tools.simulation import agents

DIGITS = Path(agents.__file__).parents[1] / "lab" / "demo" / "digits.npz"
SVG = "{http://www.w3.org/2000/svg}"


def job(folder: Path, more: str = 'partition = "dirichlet"\nalpha = 0.3\n', data: str = f'path = "{DIGITS}"') -> Path:
    file = folder / "job.toml"
    file.write_text(f'name = "digits"\nmethod = "fedavg"\nseed = 3\n[fleet]\ndevices = 4\n[data]\n{data}\n{more}')
    return file


def hand() -> ClassCounts:
    return ClassCounts(
        ("a", "b&c"), ("cat", "dog", "<owl>"), np.array([[8, 1, 0], [0, 2, 4]]), np.array([[1, 0, 0], [0, 1, 0]])
    )


def test_counts_are_those_of_what_devices_load(tmp_path: Path) -> None:
    parsed = settings.load_job(job(tmp_path))
    counts = partition.count_examples(parsed)
    members, _ = agents.FleetPlan(parsed, tmp_path, tmp_path).load_devices()
    assert counts.devices == tuple(member.device for member in members)
    for own, train, held in zip(members, counts.train, counts.held, strict=True):
        assert np.bincount(own.train.y, minlength=10).tolist() == train.tolist()
        assert np.bincount(own.held_out.y, minlength=10).tolist() == held.tolist()


def test_data_are_divided_like_those_of_the_job_that_simulate_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [f"{row % 7},{('cat', 'owl')[row % 2]}" for row in range(60)]
    Path("pets.csv").write_text("\n".join(["age,kind", *lines]) + "\n")
    assert main(["lab", "partition", "pets.csv", "--label", "kind", "--format", "json"]) == 0
    shown = capsys.readouterr().out
    assert not Path("job.toml").exists()
    assert main(["init", "--data", "pets.csv", "--label", "kind"]) == 0
    capsys.readouterr()
    assert main(["lab", "partition", "job.toml", "--format", "json"]) == 0
    assert capsys.readouterr().out == shown
    assert main(["lab", "partition", "job.toml", "--label", "kind"]) == 2
    assert "--label requires data, but job.toml is a job file: leave it out" in capsys.readouterr().err


def test_a_dot_has_the_area_of_its_count() -> None:
    """9 of the largest dot, so 1 has a third of its radius; nothing is drawn where there is nothing."""
    drawn = ElementTree.fromstring(plots.render_picture(partition.draw_counts(hand(), "two <devices>")))
    dots: dict[str, list[float]] = {}
    for group in drawn.iter(f"{SVG}g"):
        told = group.findtext(f"{SVG}title", "")
        if ", class " in told:
            (left, right), _ = box(group.find(f"{SVG}path"))
            dots.setdefault(told, []).append(round((right - left) / 2, 1))
    assert dots == {
        "a, class cat: 8 to train on, 1 held out": [15.5, 14.6],  # 15.5 sqrt(8/9)
        "a, class dog: 1 to train on, 0 held out": [5.2],
        "b&c, class dog: 2 to train on, 1 held out": [8.9, 7.3],
        "b&c, class <owl>: 4 to train on, 0 held out": [10.3],
    }
    texts = [text.text for text in drawn.iter(f"{SVG}text")]
    assert {"two <devices>", "cat", "dog", "<owl>", "a", "b&c", "9"} <= set(texts)
    assert "2 devices with 7 to 10 examples" in drawn.get("aria-label", "")


def box(path: ElementTree.Element | None) -> tuple[tuple[float, float], tuple[float, float]]:
    assert path is not None
    numbers = [float(number) for number in re.findall(r"-?\d+\.?\d*", path.get("d", ""))]
    return (min(numbers[::2]), max(numbers[::2])), (min(numbers[1::2]), max(numbers[1::2]))


@pytest.mark.parametrize(("devices", "classes"), [(1, 1), (40, 10)])
def test_everything_drawn_lies_in_the_picture(devices: int, classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "MAX_TOOLTIPS", 300)
    rng = np.random.default_rng(0)
    held = rng.integers(1, 5, (devices, classes))
    names = tuple(f"jetson-orin-nano-super-{number}" for number in range(devices))
    counts = ClassCounts(names, tuple(map(str, range(classes))), held * 4, held)
    drawn = ElementTree.fromstring(plots.render_picture(partition.draw_counts(counts)))
    width, height = float(drawn.get("width", "")), float(drawn.get("height", ""))
    paths = [path for path in drawn.iter(f"{SVG}path") if "fill: none" not in path.get("style", "")]
    assert len(paths) >= 2 * devices
    for path in paths if devices == 1 else ():
        (left, right), (upper, lower) = box(path)
        assert 0 <= left <= right <= width
        assert 0 <= upper <= lower <= height
    sideways = [text for text in drawn.iter(f"{SVG}text") if "rotate(-90" in text.get("transform", "")]
    assert sideways
    places = [re.search(r"translate\(([-\d.]+) ([-\d.]+)\)", text.get("transform", "")) for text in sideways]
    assert all(place is not None and 0 <= float(place[1]) <= width and float(place[2]) <= height for place in places)
    tips = [each.text or "" for each in drawn.iter(f"{SVG}title")]
    assert any(", class " in tip for tip in tips) == (devices == 1)


def test_the_command_draws_prints_and_is_read_by_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = job(tmp_path), tmp_path / "new" / "folder" / "shares.svg"
    assert main(["lab", "partition", str(file), "--out", str(picture)]) == 0
    told = capsys.readouterr().out
    assert "x86-host-03" in told
    assert told.endswith(f"drawn in {picture}\n")
    assert ElementTree.parse(picture).getroot().tag == f"{SVG}svg"
    assert main(["lab", "partition", str(file), "--devices", "6", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["classes"] == [str(kind) for kind in range(10)]
    assert len(found["devices"]) == 6
    with np.load(DIGITS) as arrays:
        whole = np.bincount(arrays["y_train"])
    every = np.array([[device["train"], device["held"]] for device in found["devices"]])
    assert every.sum(axis=(0, 1)).tolist() == whole.tolist()


def test_domains_are_printed_drawn_and_read_by_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = 'partition = "quantity"\nalpha = 1.0\n[data.domains]\nrotation = [0, 30]\nbrightness = [1, 1, 0.5]\n'
    file, picture = job(tmp_path, more), tmp_path / "shares.svg"
    assert main(["lab", "partition", str(file), "--out", str(picture)]) == 0
    told = capsys.readouterr().out
    assert ["x86-host-01", *["rotation", "30,", "noise", "0,", "brightness", "1"]] in map(str.split, told.splitlines())
    texts = [text.text for text in ElementTree.parse(picture).iter(f"{SVG}text")]
    assert "x86-host-02, rotation 0, noise 0, brightness 0.5" in texts
    assert main(["lab", "partition", str(file), "--format", "json"]) == 0
    devices = json.loads(capsys.readouterr().out)["devices"]
    assert [device["domain"].partition(",")[0] for device in devices] == ["rotation 0", "rotation 30"] * 2
    sizes = sorted(sum(device["train"]) + sum(device["held"]) for device in devices)
    assert sizes[-1] > 2 * sizes[0]


def test_a_job_names_its_classes(tmp_path: Path) -> None:
    parsed = msgspec.structs.replace(settings.load_job(job(tmp_path)), labels=tuple("abcdefghij"))
    assert partition.count_examples(parsed).classes == tuple("abcdefghij")
    short = msgspec.structs.replace(parsed, labels=("a",))
    assert partition.count_examples(short).classes[:2] == ("0", "1")


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        ('partition = "dirichlet"\nmin_size = 9999\n', 3, "are too few for 4 shares of at least 9999"),
        ("alpha = -1\n", 2, "job.toml: [data]: alpha = -1: must be a number above 0"),
        (
            'sources = [{ path = "a", labels_from = 0 }]\n',
            2,
            "one of path, sources and dataset is required, not path and sources",
        ),
    ],
)
def test_what_cannot_be_shared_out_ends_with_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str, code: int, message: str
) -> None:
    """2 for the table, 3 for the data; one sentence."""
    assert main(["lab", "partition", str(job(tmp_path, more))]) == code
    assert message in capsys.readouterr().err


def test_labels_alone_are_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.full((40, 2000), 9, np.uint8), y=np.arange(40) % 4)
    payload = bytearray((tmp_path / "a.npz").read_bytes())
    payload[payload.index(b"\x09" * 64) + 70_000] = 0
    (tmp_path / "a.npz").write_bytes(payload)
    spec = DataSpec(str(tmp_path / "a.npz"), partition="iid", shares=5)
    with pytest.raises(DataError, match="Bad CRC-32"):
        data.examples.load_share(spec)
    train, held = data.examples.count_labels(spec)
    assert (train + held).sum(axis=0).tolist() == [10] * 4
