import numpy as np
import pytest

from fedquilt.core import DataError
from fedquilt.data import inputs
from fedquilt.data.inputs import ImageInput


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


def test_floating_images_are_taken_as_they_are():
    """0..1 already; a single channel axis may be there or not."""
    x = np.array([[[0.0, 0.25], [0.5, 1.0]]])
    assert inputs.prepare_images(x, ImageInput(channels=1, size=2))[0, 0].tolist() == [[0.0, 0.25], [0.5, 1.0]]
    assert np.array_equal(
        inputs.prepare_images(x[..., None], {"channels": 1, "size": 2}), inputs.prepare_images(x, ImageInput(1, 2))
    )


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
