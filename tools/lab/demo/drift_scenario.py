"""Changed inputs of the demo story, and a model that fails on them."""

from __future__ import annotations

from typing import Final

import numpy as np

DEGREES: Final = 4.0  # by which digits are turned
LIGHT: Final = 0.5  # what is left of their brightness
NOISE: Final = 10.0  # its standard deviation, of 255
DARKEST: Final = 0.35  # brightness, 0 to 1, below which the bad model sees nothing


def degrade_images(x: np.ndarray, seed: int) -> np.ndarray:
    """Return images that are rotated, darker and noisier.

    Args:
        x: Images (n, size, size), uint8.
        seed: Seed of the noise.
    """
    dark = LIGHT * _rotate_images(x, DEGREES) + np.random.default_rng(seed).normal(0, NOISE, x.shape)
    return np.asarray(np.clip(dark, 0, 255).astype(np.uint8))


def _rotate_images(x: np.ndarray, degrees: float) -> np.ndarray:
    # bilinear interpolation, black outside the image
    size, angle = x.shape[1], np.deg2rad(degrees)
    down, across = np.mgrid[:size, :size] - (size - 1) / 2
    row = np.cos(angle) * down - np.sin(angle) * across + (size - 1) / 2
    column = np.sin(angle) * down + np.cos(angle) * across + (size - 1) / 2
    edged = np.pad(x.astype(np.float64), ((0, 0), (size, size), (size, size)))
    top, left = np.floor(row).astype(int), np.floor(column).astype(int)
    found = np.zeros(x.shape)
    for below, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
        share = np.abs(1 - below - (row - top)) * np.abs(1 - right - (column - left))
        found += share * edged[:, top + below + size, left + right + size]
    return found


def make_bright_only_model(model: bytes) -> bytes:
    """Return a copy of an exported network that ignores brightness below DARKEST.

    Args:
        model: Bytes of an ONNX file with the input "x".
    """
    import onnx
    from onnx import helper, numpy_helper

    made = onnx.load_from_string(model)
    for node in made.graph.node:
        for place, name in enumerate(node.input):
            if name == "x":
                node.input[place] = "story/bright"
    cut = [
        helper.make_node("Sub", ["x", "story/darkest"], ["story/above"], name="story/above"),
        helper.make_node("Relu", ["story/above"], ["story/cut"], name="story/cut"),
        helper.make_node("Mul", ["story/cut", "story/gain"], ["story/bright"], name="story/bright"),
    ]
    for node in reversed(cut):
        made.graph.node.insert(0, node)
    for name, value in (("story/darkest", DARKEST), ("story/gain", 1 / (1 - DARKEST))):
        made.graph.initializer.append(numpy_helper.from_array(np.array(value, np.float32), name))
    return bytes(made.SerializeToString(deterministic=True))
