"""Inputs of networks: standardised numbers, resized images, and images that differ by device."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from fedquilt.coordinator import settings
from fedquilt.coordinator.settings import require_matching_bundle
from fedquilt.core import DataError, JobError
from fedquilt.data import compatibility, examples, inputs
from fedquilt.data.inputs import ImageInput
from fedquilt.data.spec import DataSpec
from fedquilt.tools.artefacts import prepare


def test_features_are_brought_to_mean_0_and_deviation_1():
    x = np.array([[[1, 5], [3, 5]], [[5, 5], [7, 5]]], np.int16)  # (n, steps, features)
    found = inputs.measure_scales(x)
    assert found.mean == (4.0, 5.0)
    assert found.std == (pytest.approx(np.sqrt(5)), 1.0)
    ready = inputs.prepare_inputs(x, {"mean": found.mean, "std": found.std})
    assert ready.dtype == np.float32
    np.testing.assert_allclose(ready[..., 0].std(), 1, rtol=1e-6)
    assert not ready[..., 1].any()
    with pytest.raises(DataError, match=r"shape \(3,\), but the job's \[input\] standardises 2 features"):
        inputs.prepare_inputs(np.zeros((4, 3)), {"mean": found.mean, "std": found.std})


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"mean": [1, 2], "std": [1, 2, 3]}, r"\[input\] mean has 2 values: give 1 or 3"),
        ({"std": [0]}, r"\[input\] std = 0: each standard deviation must be above 0"),
        ({"standardise": True, "mean": [1]}, "standardise = true computes mean and std: leave mean and std out"),
        ({"channels": 1, "size": 8, "mean": [0.5, 0.5, 0.5]}, r"\[input\] mean has 3 values: give 1 or 1"),
        ({"standardize": True}, "there is no key 'standardize'"),
    ],
)
def test_a_bad_table_of_inputs_says_what_is_wanted(table, said):
    with pytest.raises(JobError, match=said):
        inputs.parse_input_table(table)


def made(folder: Path, **tables: Any) -> tuple[settings.JobSettings, Any]:
    pytest.importorskip("torch")
    job = settings.parse_job({"name": "j", "method": "fedavg", **tables})
    import msgspec

    return job, prepare.prepare_bundle(msgspec.to_builtins(job), folder / "bundle")


def test_prepare_keeps_the_samples_statistics_in_the_bundle(tmp_path):
    (tmp_path / "train.csv").write_text("a,b,y\n1,10,0\n3,30,1\n")
    (tmp_path / "test.csv").write_text("a,b,y\n100,100,0\n")
    model = {"name": "mlp", "inputs": 2, "classes": 2}
    job, bundle = made(tmp_path, model=model, input={"standardise": True}, data={"path": str(tmp_path)})
    assert bundle.meta["network"]["input"] == {"mean": [2.0, 20.0], "std": [1.0, 10.0], "standardise": True}
    require_matching_bundle(job, bundle)
    _, inside = made(tmp_path, model={**model, "input": {"standardise": True}}, data={"path": str(tmp_path)})
    assert inside.meta["network"] == bundle.meta["network"]
    with pytest.raises(JobError, match=r"standardise = true needs \[data\]"):
        made(tmp_path, model=model, input={"standardise": True})


TABLE = "a,b,y\n1,10,0\n3,30,1\n"


@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        ({"name": "mlp", "inputs": 3, "classes": 2}, {}, r"have 2 values each \(a, b\), but network 'mlp' takes 3"),
        (
            {"name": "mlp", "inputs": 2, "classes": 1},
            {},
            r"labels run from 0 to 1, but network 'mlp' predicts 1 classes",
        ),
        (
            {"name": "mlp", "inputs": 2, "outputs": 2},
            {"task": "regression"},
            r"has 1 numbers, but network 'mlp' predicts 2",
        ),
        (
            {"name": "mlp", "inputs": 2, "outputs": 1},
            {"task": "labels", "y": ["y", "a"]},
            r"has 2 labels, .* predicts 1",
        ),
        (
            {"name": "gru", "channels": 3, "steps": 2, "classes": 2},
            {"windows": {"steps": 2}},
            "takes 2 steps of 3 channels",
        ),
        ({"name": "conv1d", "channels": 2, "steps": 1, "classes": 2}, {"windows": {"steps": 2}}, "takes 1 steps of 2"),
    ],
)
def test_data_that_do_not_fit_a_network_are_told_with_both_sides(model, data, said, tmp_path):
    text = TABLE.replace("3,30,1", "1,30,1") if data.get("task") == "labels" else TABLE
    (tmp_path / "a.csv").write_text(text)
    job, bundle = made(tmp_path, model=model, data={"path": str(tmp_path / "a.csv"), **data})
    with pytest.raises(DataError, match=said):
        compatibility.open_compatible_data(bundle.meta, DataSpec.parse(job.data))


def test_a_vocabulary_that_is_larger_than_the_networks_is_told(tmp_path):
    (tmp_path / "v.txt").write_text("[PAD]\n[UNK]\na\nb\n")
    (tmp_path / "a.csv").write_text("note,y\na,0\nb,1\n")
    text = {"vocabulary": str(tmp_path / "v.txt"), "length": 4}
    model = {"name": "transformer", "vocabulary": 3, "length": 4, "classes": 2, "width": 4}
    job, bundle = made(tmp_path, model=model, data={"path": str(tmp_path / "a.csv"), "text": text})
    with pytest.raises(DataError, match="the vocabulary has 4 tokens, but network 'transformer' was built for 3"):
        compatibility.open_compatible_data(bundle.meta, DataSpec.parse(job.data))
    longer = {**job.data, "text": {**text, "length": 5}}
    with pytest.raises(DataError, match=r"examples have shape \(5,\), but network 'transformer' takes 4 tokens"):
        compatibility.open_compatible_data(bundle.meta, DataSpec.parse(longer))
    with pytest.raises(DataError, match="task is 'labels', but network 'transformer' was prepared for 'classes'"):
        compatibility.open_compatible_data(
            bundle.meta, DataSpec.parse({**job.data, "task": "labels", "labels": ["0", "1"]})
        )


@pytest.mark.parametrize(("size", "wanted"), [(8, 8), (8, 3), (3, 8), (7, 28), (28, 7), (1, 5), (5, 1), (224, 32)])
def test_every_row_of_a_resizing_matrix_sums_to_one(size, wanted):
    matrix = inputs.resize_matrix(size, wanted)
    assert matrix.shape == (wanted, size)
    assert matrix.dtype == np.float32
    assert np.allclose(matrix.sum(axis=1), 1.0, atol=1e-6)
    assert (matrix >= 0).all()


def test_shrinking_takes_the_mean_of_what_each_row_covers():
    assert inputs.resize_matrix(4, 2).tolist() == [[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]]
    third = pytest.approx(1 / 3)
    assert inputs.resize_matrix(5, 2).tolist() == [[third, third, third, 0, 0], [0, 0, third, third, third]]


def test_growing_is_bilinear_between_pixel_centres():
    assert inputs.resize_matrix(2, 4).tolist() == [[1, 0], [0.75, 0.25], [0.25, 0.75], [0, 1]]


def test_the_same_size_is_the_identity():
    assert np.array_equal(inputs.resize_matrix(3, 3), np.eye(3))
    maps = np.arange(9, dtype=np.float32).reshape(1, 1, 3, 3)
    assert inputs.resize_maps(maps, 3, 3) is maps


def test_a_shared_matrix_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        inputs.resize_matrix(4, 2)[0, 0] = 9


def test_height_and_width_are_resized_each_for_itself():
    maps = np.arange(4, dtype=np.float32).reshape(1, 1, 4, 1)
    assert inputs.resize_maps(maps, 2, 2).tolist() == [[[[0.5, 0.5], [2.5, 2.5]]]]


def test_grey_becomes_colour_by_repetition():
    x = np.full((1, 2, 2), 255, np.uint8)
    out = inputs.prepare_images(x, ImageInput(channels=3, size=2, mean=(0.0, 0.5, 1.0), std=(1.0, 0.5, 2.0)))
    assert out.shape == (1, 3, 2, 2)
    assert out.dtype == np.float32
    assert out[0, :, 0, 0].tolist() == [1.0, 1.0, 0.0]


def test_colour_becomes_grey_by_luma():
    x = np.zeros((3, 1, 1, 3), np.uint8)
    for channel in range(3):
        x[channel, 0, 0, channel] = 255
    out = inputs.prepare_images(x, ImageInput(channels=1, size=1))
    assert out.shape == (3, 1, 1, 1)
    assert out.ravel().tolist() == pytest.approx([0.299, 0.587, 0.114])


def test_deeper_integers_are_scaled_by_their_own_range():
    assert inputs.prepare_images(np.full((1, 1, 1), 65535, np.uint16), ImageInput(1, 1)).item() == 1.0


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((2, 2), np.uint8), r"shape \(2, 2, 1\)|shape \(2, 2\)"),
        (np.zeros((1, 2, 2, 4), np.uint8), r"shape \(1, 2, 2, 4\)"),
        (np.zeros((1, 2, 2), np.int64), "type int64"),
    ],
)
def test_what_is_no_image_is_refused_with_its_shape_or_type(x, message):
    with pytest.raises(DataError, match=message):
        inputs.prepare_images(x, ImageInput(channels=1, size=2))


@pytest.fixture
def digits(tmp_path):
    rng = np.random.default_rng(3)
    x = rng.integers(0, 256, (40, 6, 5), np.uint8)
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(40) % 4)
    return tmp_path / "d.npz"


def spec(path, **domain):
    table = {"path": str(path), "partition": "iid", "shares": 4, "seed": 5}
    return DataSpec.parse({**table, **({"domains": domain} if domain else {})})


@pytest.mark.parametrize("degrees", [0, 30, -75.5, 90, 180])
@pytest.mark.parametrize("shape", [(3, 7, 7), (2, 6, 9, 3)])
def test_a_rotation_is_torchs(degrees, shape):
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(1).random(shape)
    maps = torch.tensor(x[..., None] if x.ndim == 3 else x).permute(0, 3, 1, 2)
    height, width = shape[1:3]
    cosine, sine = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    # in torch's coordinates, from -1 to 1 on both axes
    matrix = [[cosine, -sine * height / width, 0], [sine * width / height, cosine, 0]]
    grid = torch.nn.functional.affine_grid(torch.tensor([matrix] * len(x)), maps.shape, align_corners=False)
    wanted = torch.nn.functional.grid_sample(maps, grid, align_corners=False).permute(0, 2, 3, 1).numpy()
    assert np.abs(inputs.rotate_images(x, degrees) - wanted.reshape(shape)).max() < 1e-6


def test_a_quarter_turn_is_counter_clockwise():
    x = np.arange(9.0).reshape(1, 3, 3)
    assert np.allclose(inputs.rotate_images(x, 90)[0], np.rot90(x[0]))


def test_lists_repeat_over_the_devices(digits):
    plain = examples.load_all_shares(spec(digits))
    changed = examples.load_all_shares(spec(digits, rotation=[0, 180], brightness=[1, 1, 0.5]))
    for share, (before, after) in enumerate(zip(plain, changed, strict=True)):
        for old, new in zip(before, after, strict=True):
            turned = old.x[:, ::-1, ::-1] if share % 2 else old.x
            assert new.x.dtype == np.uint8
            assert np.array_equal(new.x, np.rint(turned * (0.5 if share == 2 else 1.0)))
            assert np.array_equal(new.y, old.y)


def test_a_device_computes_the_same_pixels_as_a_simulation(digits):
    """Alone, in one pass with all others, and in either order of devices."""
    given = spec(digits, noise=[0.0, 0.1], rotation=[20])
    loader = examples.SharedLoader()
    every = examples.load_all_shares(given)
    for share in (2, 1, 3, 0):
        own = msgspec.structs.replace(given, share=share)
        for one, two, three in zip(examples.load_share(own), loader.load_share(own), every[share], strict=True):
            assert np.array_equal(one.x, two.x)
            assert np.array_equal(one.x, three.x)
    pixels = hashlib.sha256(b"".join(part.x.tobytes() for pair in every for part in pair)).hexdigest()
    assert pixels[:16] == "18c5ab1604a75b12"


def test_noise_has_its_deviation_and_its_seed(tmp_path):
    np.savez(tmp_path / "grey.npz", x=np.full((50, 20, 20), 0.5, np.float32), y=np.zeros(50, int))
    given = spec(tmp_path / "grey.npz", noise=[0.1])
    first, other = examples.load_share(given)[0].x, examples.load_share(msgspec.structs.replace(given, seed=6))[0].x
    assert first.std() == pytest.approx(0.1, rel=0.05)
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first, other)


def test_the_test_set_stays_as_stored(digits):
    assert np.array_equal(examples.load_split(spec(digits, rotation=[90])).x, examples.load_split(spec(digits)).x)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"rotation": []}, r"\[data\]: domains.rotation = \[\]: must be a list of at least 1 entry"),
        ({"rotation": [400]}, r"rotation\[0\] = 400: .*360"),
        ({"noise": [-0.1]}, r"noise\[0\] = -0.1"),
        ({"noise": [float("nan")]}, r"noise\[0\] = nan"),
        ({"brightness": [float("inf")]}, r"brightness\[0\] = inf"),
        ({"brightness": 0.5}, "must be a list"),
        ({"contrast": [1]}, "contrast"),
    ],
)
def test_a_wrong_table_says_what_is_wrong(table, message):
    with pytest.raises(JobError, match=message):
        DataSpec.parse({"path": "d.npz", "domains": table})


@pytest.mark.parametrize("more", [{"text": {"vocabulary": "v.txt"}}, {"windows": {"steps": 3}}, {"audio": {}}])
def test_what_is_no_image_has_no_domain(more, tmp_path):
    with pytest.raises(JobError, match="domains changes images, and these examples are none"):
        DataSpec.parse({"path": "d.csv", "domains": {"noise": [0.1]}, **more})
    np.savez(tmp_path / "t.npz", x=np.zeros((8, 5), np.float32), y=np.zeros(8, int))
    with pytest.raises(DataError, match=r"examples are float32 of shape \(5,\): leave domains out"):
        examples.count_labels(spec(tmp_path / "t.npz", noise=[0.1]))


def test_a_folder_level_names_the_users(tmp_path):
    for number, (kind, user) in enumerate([("cat", "ann"), ("cat", "bob"), ("dog", "ann"), ("dog", "eve")]):
        for image in range(2):
            place = tmp_path / "train" / kind / user
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((2, 2, 3), 10 * number + image, np.uint8)).save(place / f"{image}.png")
    table = {"path": str(tmp_path), "column": "user", "partition": "column", "shares": 3}
    found = examples.load_all_shares(DataSpec.parse(table))
    own = [sorted(int(x.flat[0]) for part in pair for x in part.x) for pair in found]
    assert own == [[0, 1, 20, 21], [10, 11], [30, 31]]
    with pytest.raises(DataError, match=r"column 'user' has 3 users for 4 devices"):
        examples.load_all_shares(DataSpec.parse({**table, "shares": 4}))
    (tmp_path / "flat" / "train" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match=r"has no images: put .*/<class>/<user>/"):
        examples.load_all_shares(DataSpec.parse({**table, "path": str(tmp_path / "flat")}))
