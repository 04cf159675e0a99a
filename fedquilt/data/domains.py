"""Feature skew: images rotated, brightened and with noise, differently on each device.

A domain follows from a share's number and its noise from the seed, so that a device computes the same pixels as a
simulation of all devices. Common test sets stay as stored.
"""

from __future__ import annotations

import math

import numpy as np

from fedquilt.arrays import tensors
from fedquilt.core import DataError, Examples
from fedquilt.data import images
from fedquilt.data.readers import ExampleReader
from fedquilt.data.spec import DataSpec

GRID = 2.0**24  # coordinates are rounded to its inverse, because the last bits of sines depend on the machine


def require_images(reader: ExampleReader, spec: DataSpec) -> None:
    """Raise DataError if the spec has domains, and the examples are not images."""
    if spec.domains is None or (images.is_image_shape(reader.shape) and reader.dtype.kind in "uf"):
        return
    raise DataError(
        f"{spec.source_name}: [data] domains changes images, (height, width) or (height, width, 1 or 3), and examples "
        f"are {reader.dtype} of shape {reader.shape}: leave domains out"
    )


def change_examples(given: Examples, spec: DataSpec, share: int, part: str) -> Examples:
    """Return examples of a share in its domain. `part` of the share names the random draws."""
    if spec.domains is None:
        return given
    domain = spec.domains.values_of_share(share)
    rng = tensors.seeded_rng("domain", spec.seed, share, part)
    x, at_once = np.empty_like(given.x), max(1, images.AT_ONCE_PIXELS // math.prod(given.x.shape[1:3]))
    highest = np.iinfo(x.dtype).max if x.dtype.kind == "u" else 1.0
    for first in range(0, len(x), at_once):
        pixels = given.x[first : first + at_once].astype(np.float64)
        if domain["rotation"]:
            pixels = rotate_images(pixels, domain["rotation"])
        pixels *= domain["brightness"]
        if domain["noise"]:
            pixels += domain["noise"] * highest * rng.standard_normal(pixels.shape)
        x[first : first + at_once] = np.clip(np.rint(pixels), 0, highest) if x.dtype.kind == "u" else pixels
    return Examples(x, given.y)


def rotate_images(x: np.ndarray, degrees: float) -> np.ndarray:
    """Rotate images (n, h, w[, c]) of floats counter-clockwise about their centre, bilinearly and with 0 outside."""
    height, width = x.shape[1:3]
    sine, cosine = math.sin(math.radians(degrees)), math.cos(math.radians(degrees))
    down, right = np.mgrid[:height, :width] - np.array([(height - 1) / 2, (width - 1) / 2])[:, None, None]
    # the place in the image that each pixel (h, w) is taken from
    row = np.rint((sine * right + cosine * down + (height - 1) / 2) * GRID) / GRID
    column = np.rint((cosine * right - sine * down + (width - 1) / 2) * GRID) / GRID
    result = np.zeros_like(x)
    for i in (np.floor(row).astype(int), np.floor(row).astype(int) + 1):
        for j in (np.floor(column).astype(int), np.floor(column).astype(int) + 1):
            inside = (i >= 0) & (i < height) & (j >= 0) & (j < width)
            weight = inside * (1 - abs(row - i)) * (1 - abs(column - j))  # (h, w)
            taken = x[:, np.clip(i, 0, height - 1), np.clip(j, 0, width - 1)]
            result += weight.reshape(weight.shape + (1,) * (x.ndim - 3)) * taken
    return result
