"""Domains of devices: rotation equals torch's, every device computes its own pixels, and only images are changed."""

import hashlib

import msgspec
import numpy as np
import pytest
from PIL import Image

from fedquilt.core import DataError, JobError
from fedquilt.data import examples, inputs
from fedquilt.data.spec import DataSpec


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
        ({"rotation": []}, r"\[data\]: domains.rotation = \[\]: a list of at least 1 entry is wanted"),
        ({"rotation": [400]}, r"rotation\[0\] = 400: .*360"),
        ({"noise": [-0.1]}, r"noise\[0\] = -0.1"),
        ({"noise": [float("nan")]}, r"noise\[0\] = nan"),
        ({"brightness": [float("inf")]}, r"brightness\[0\] = inf"),
        ({"brightness": 0.5}, "a list is wanted"),
        ({"contrast": [1]}, "contrast"),
    ],
)
def test_a_wrong_table_says_what_is_wrong(table, message):
    with pytest.raises(JobError, match=message):
        DataSpec.parse({"path": "d.npz", "domains": table})


@pytest.mark.parametrize("more", [{"text": {"vocabulary": "v.txt"}}, {"windows": {"steps": 3}}, {"audio": {}}])
def test_what_is_no_image_has_no_domain(more, tmp_path):
    with pytest.raises(JobError, match="domains changes images: leave it out"):
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
    with pytest.raises(DataError, match=r"column 'user' names 3 users, and there are 4 devices"):
        examples.load_all_shares(DataSpec.parse({**table, "shares": 4}))
    (tmp_path / "flat" / "train" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match=r"holds no images: put them in .*/<class>/<user>/"):
        examples.load_all_shares(DataSpec.parse({**table, "path": str(tmp_path / "flat")}))
