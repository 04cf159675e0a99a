"""One file gives one tensor: in training, in a release check, and with `model run` and `model serve`."""

from __future__ import annotations

import csv
import json
import wave
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.core import DataError, ModelError
from fedquilt.data import examples
from fedquilt.data.reading_settings import complete_data_table
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent.engines import exported_model as engines_exported_model
from fedquilt.edge_agent.engines import training
from fedquilt.edge_agent.releases import check_process
from fedquilt.edge_agent.task.protocol import CheckRequest
from fedquilt.models.networks import onnx_file
from fedquilt.tools.artefacts import prepare
from fedquilt.tools.artefacts.predictions import predict_examples
from fedquilt.tools.artefacts.predictor import Predictor
from fedquilt.tools.operations.inference_server.service import ModelService, ModelSwitcher

pytest.importorskip("torch", reason="a network is exported by torch")
pytest.importorskip("onnxruntime", reason="an exported network is run")
Image = pytest.importorskip("PIL.Image", reason="images are decoded by Pillow")


class Case(NamedTuple):
    job: dict[str, Any]
    files: list[Path]
    table: Path | None = None  # the file, if its rows are the examples


def noise(seed: int, shape: tuple[int, ...], most: int = 255) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, most + 1, shape)


def image_case(folder: Path, save: Callable[[Path, int], Path], channels: int) -> Case:
    files = []
    for label in ("a", "b"):
        (folder / "train" / label).mkdir(parents=True)
        files += [save(folder / "train" / label / f"{n}", 10 * n + (label == "b")) for n in range(2)]
    job = {
        "model": {"name": "cnn", "channels": channels, "size": 8, "classes": 2},
        "input": {"channels": channels, "size": 8, "mean": [0.4], "std": [0.2]},
        "data": {"path": str(folder), "size": 12},
    }
    return Case(job, files)


def saved(mode: str, suffix: str, **options: Any) -> Callable[[Path, int], Path]:
    def save(path: Path, seed: int) -> Path:
        file = path.with_suffix(suffix)
        if mode == "I;16":
            image = Image.fromarray(np.where(np.eye(20, 17), 4095, noise(seed, (20, 17), 4095)).astype(np.uint16))
        else:
            image = Image.fromarray(noise(seed, (20, 17, 4)).astype(np.uint8), "RGBA").convert(mode)
        image.save(file, **options)
        return file

    return save


def rotated(path: Path, seed: int) -> Path:
    image = Image.fromarray(noise(seed, (20, 17, 3)).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(file := path.with_suffix(".jpg"), exif=exif)
    return file


def images(save: Callable[[Path, int], Path], channels: int = 3) -> Callable[[Path], Case]:
    return lambda folder: image_case(folder, save, channels)


def recordings(folder: Path) -> Case:
    files = []
    for label in ("hum", "click"):
        (folder / "train" / label).mkdir(parents=True)
        for n in range(2):
            files.append(folder / "train" / label / f"{n}.wav")
            with wave.open(str(files[-1]), "wb") as file:
                file.setnchannels(2)
                file.setsampwidth(2)
                file.setframerate(4000)
                file.writeframes(noise(n, (2400,), 30000).astype("<i2").tobytes())
    job = {
        "model": {"name": "conv1d", "channels": 8, "steps": 23, "classes": 2},
        "data": {"path": str(folder), "audio": {"rate": 4000, "seconds": 0.25, "mels": 8}},
        "input": {"standardise": True},
    }
    return Case(job, sorted(files))


def texts(folder: Path) -> Case:
    files = []
    for label, words in (("cold", ("frost bites", "Frost, again")), ("hot", ("heat!", "heat bites"))):
        (folder / "train" / label).mkdir(parents=True)
        for n, text in enumerate(words):
            files.append(folder / "train" / label / f"{n}.txt")
            files[-1].write_text(text)
    (folder / "words.txt").write_text("\n".join(["[PAD]", "[UNK]", "frost", "heat", "bite", "##s", ",", "!"]) + "\n")
    job = {
        "model": {"name": "transformer", "vocabulary": 8, "length": 6, "classes": 2, "width": 8},
        "data": {"path": str(folder), "text": {"vocabulary": str(folder / "words.txt"), "length": 6}},
    }
    return Case(job, files)


def table(folder: Path) -> Case:
    folder.mkdir(parents=True)
    rows = [(3, "iron", "u1", 0), ("", "steel", "u1", 1), (5, "iron", "u2", 1), (1, "steel", "u2", 0)]
    with (folder / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("age", "material", "user", "failed"), *rows])
    job = {
        "model": {"name": "mlp", "inputs": 3, "hidden": [4], "classes": 2},
        "data": {
            "path": str(folder / "train.csv"),
            "y": "failed",
            "column": "user",
            "fill": {"age": 7.5},
            "categories": {"material": "auto"},
        },
        "input": {"standardise": True},
    }
    return Case(job, [], folder / "train.csv")


def arrays(folder: Path) -> Case:
    folder.mkdir(parents=True)
    x = np.array([[1, 20], [np.nan, 40], [3, 10], [5, 70]], np.float32)
    np.savez(folder / "own.npz", features=x, kind=np.array(["oak", "ash", "ash", "oak"]))
    job = {
        "model": {"name": "mlp", "inputs": 2, "hidden": [4], "classes": 2},
        "data": {"path": str(folder / "own.npz"), "x": "features", "y": "kind", "labels": ["ash", "oak"], "fill": 2.5},
        "input": {"standardise": True},
    }
    return Case(job, [], folder / "own.npz")


CASES = {
    "RGB PNG": images(saved("RGB", ".png")),
    "RGB PNG for a grey network": images(saved("RGB", ".png"), 1),
    "grey PNG": images(saved("L", ".png"), 1),
    "black and white TIFF": images(saved("1", ".tif")),
    "grey PNG of 12 bits": images(saved("I;16", ".png"), 1),
    "grey TIFF of 12 bits": images(saved("I;16", ".tiff"), 3),
    "transparent PNG": images(saved("RGBA", ".png")),
    "transparent grey PNG": images(saved("LA", ".png"), 1),
    "palette PNG": images(saved("P", ".png")),
    "CMYK JPEG": images(saved("CMYK", ".jpg", quality=90)),
    "CMYK TIFF": images(saved("CMYK", ".tif")),
    "WebP": images(saved("RGB", ".webp", lossless=True)),
    "rotated JPEG": images(rotated),
    "recordings": recordings,
    "texts": texts,
    "table": table,
    "arrays": arrays,
}


def exported_model(case: Case, folder: Path) -> tuple[Path, Mapping[str, Any], Mapping[str, Any]]:
    """The file, the job's [data] table, and the network's table with all scales."""
    job = {**case.job, "data": complete_data_table(case.job["data"])}
    made = prepare.prepare_bundle(job, folder / "bundle")
    weights = tensors.decode_tensors((folder / "bundle" / "blobs" / made.files["model"].sha256).read_bytes())
    file = folder / "model.onnx"
    file.write_bytes(onnx_file.export_network(made.meta["network"], weights, made.meta["reading"]))
    return file, job["data"], made.meta["network"]


@pytest.mark.parametrize("name", CASES)
def test_every_consumer_reads_the_same_tensor(name: str, tmp_path: Path) -> None:
    case = CASES[name](tmp_path / "data")
    model, data, table = exported_model(case, tmp_path)
    network = Predictor(model)
    about = engines_exported_model.read_metadata(network._engine.read_metadata(model))
    stored = examples.load_split(DataSpec.parse(data)).x
    trained_on = training.network_inputs(stored, about.network or {})
    assert np.isfinite(trained_on).all()
    np.testing.assert_array_equal(network.standardise(trained_on), training.network_inputs(stored, table))
    assert np.ptp(trained_on) > 0

    own = {"path": data["path"], "held": 0.0, **({"y": data["y"]} if case.table else {})}
    order = CheckRequest(model=str(model), current_model=None, budget_bytes=10**9, data=own)
    checked = check_process._choose_evaluated(check_process._load_examples(order, about, examples.load_share))
    assert checked is not None
    np.testing.assert_array_equal(about.prepare_inputs(checked.x), trained_on)

    if case.table:
        is_npz = case.table.suffix == ".npz"
        held = network.examples_from_arrays(np.load(case.table)) if is_npz else network.read_rows(case.table)
        np.testing.assert_array_equal(network.prepare_inputs(held.x), trained_on)
    else:
        for source in (case.files, [file.read_bytes() for file in case.files]):
            read = np.concatenate([network.prepare_inputs(network.read_example(each)[None]) for each in source])
            np.testing.assert_array_equal(read, trained_on)

    best = network.compute_scores(trained_on).max(axis=1).tolist()
    by_command = predict_examples(model, case.table or tmp_path / "data" / "train")
    assert [answer.score for answer in by_command.answers] == best
    service = ModelService(ModelSwitcher(model))
    if case.table:
        served = service.predict_bytes(case.table.read_bytes())["answers"]
    else:
        served = [service.predict_bytes(file.read_bytes()) for file in case.files]
    assert [answer["score"] for answer in served] == pytest.approx(best, rel=1e-6)


def test_the_levels_of_a_12_bit_camera_fill_the_range(tmp_path: Path) -> None:
    """4095 is white, although the PNG file could hold 65535."""
    case = images(saved("I;16", ".png"), 1)(tmp_path)
    data = complete_data_table(case.job["data"])
    assert data["depth"] == 12
    x = examples.load_split(DataSpec.parse({**data, "size": 0})).x
    assert (x.dtype, x.max()) == (np.uint16, 65535)


def test_transparent_pixels_are_white(tmp_path: Path) -> None:
    (tmp_path / "train" / "a").mkdir(parents=True)
    Image.new("RGBA", (2, 2), (10, 20, 30, 0)).save(tmp_path / "train" / "a" / "0.png")
    assert examples.load_split(DataSpec(str(tmp_path))).x.tolist() == [[[[255] * 3] * 2] * 2]


def test_a_rotated_photograph_stands_upright(tmp_path: Path) -> None:
    case = images(rotated)(tmp_path)
    assert examples.load_split(DataSpec(str(tmp_path))).x.shape == (4, 17, 20, 3)
    assert len(case.files) == 4


@pytest.mark.parametrize(
    ("name", "save", "reason"),
    [
        ("floats", lambda path: Image.fromarray(np.ones((2, 2), np.float32)).save(path), "floating-point levels"),
        ("32 bits", lambda path: Image.fromarray(np.full((2, 2), 70000, np.int32)).save(path), "32-bit levels"),
        (
            "pages",
            lambda path: Image.new("L", (2, 2)).save(path, save_all=True, append_images=[Image.new("L", (2, 2))]),
            "has 2 pages: save each page as a file",
        ),
    ],
)
def test_images_that_would_lose_information_are_rejected_when_prepared(
    name: str, save: Callable[[Path], None], reason: str, tmp_path: Path
) -> None:
    case = images(saved("RGB", ".png"))(tmp_path / "data")
    file = tmp_path / "data" / "train" / "a" / "00.tif"
    save(file)
    with pytest.raises(DataError, match=reason) as raised:
        prepare.prepare_and_check(
            settings.parse_job({"name": "j", "method": "fedavg", "rounds": 1, **case.job}), tmp_path / "b"
        )
    assert str(file) in str(raised.value)


def test_deep_images_without_depth_name_the_setting(tmp_path: Path) -> None:
    images(saved("I;16", ".png"), 1)(tmp_path)
    with pytest.raises(DataError, match=r"more than 8 bits: set \[data\] depth = 12"):
        examples.load_split(DataSpec(str(tmp_path)))
    with pytest.raises(DataError, match=r"above the 1023 of \[data\] depth = 10: set depth = 12"):
        examples.load_split(DataSpec(str(tmp_path), depth=10))


@pytest.mark.parametrize("first", ["8 bits", "12 bits", "12 bits, all black"])
def test_one_image_of_12_bits_among_others_gives_the_depth_in_any_order(tmp_path: Path, first: str) -> None:
    """Images of 8 bits are read at the depth of the deep ones; a black one does not make them images of 8 bits."""
    levels: dict[str, Any] = {"8 bits": np.uint8(200), "12 bits": np.uint16(4095), "12 bits, all black": np.uint16(0)}
    (tmp_path / "train" / "a").mkdir(parents=True)
    for number, name in enumerate(sorted(levels, key=lambda name: (name != first, name))):
        Image.fromarray(np.full((4, 4), levels[name])).save(tmp_path / "train" / "a" / f"{number}.png")
    data = complete_data_table({"path": str(tmp_path)})
    assert data["depth"] == 12
    assert examples.load_split(DataSpec.parse(data)).x.dtype == np.uint16


def test_a_file_that_is_no_image_is_named_when_the_job_is_read(tmp_path: Path) -> None:
    (tmp_path / "train" / "a").mkdir(parents=True)
    file = tmp_path / "train" / "a" / "0.png"
    file.write_bytes(b"no image")
    with pytest.raises(DataError, match="cannot read the image") as raised:
        complete_data_table({"path": str(tmp_path)})
    assert str(file) in str(raised.value)


def test_a_model_whose_reading_settings_are_forged_is_rejected(tmp_path: Path) -> None:
    for given, reason in (({"path": "/etc/passwd"}, "unknown key 'path'"), ({"size": "many"}, "'reading'")):
        with pytest.raises(ModelError, match=reason):
            engines_exported_model.read_metadata({"reading": json.dumps(given)})
