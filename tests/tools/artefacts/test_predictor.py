"""Arrays of .npy and .npz files, read from their bytes."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")

from runners import npy, npz

from fedquilt.tools.artefacts import predictor


def test_two_threads_never_read_a_header_at_once(monkeypatch: Any) -> None:
    """Two threads in `ast` fail at times in CPython 3.11 ("AST constructor recursion depth mismatch")."""
    read, ends = np.lib.format.read_array_header_1_0, list[bool]()
    entered, second = threading.Event(), threading.Thread(target=lambda: predictor.read_array(npy(np.zeros(2))))

    def header(*args: Any, **options: Any) -> Any:
        if not entered.is_set():  # the first: what a second one does meanwhile is seen
            entered.set()
            second.start()
            second.join(0.2)
            ends.append(second.is_alive())
        return read(*args, **options)

    monkeypatch.setattr(np.lib.format, "read_array_header_1_0", header)
    predictor.read_array(npy(np.zeros(2)))
    second.join()
    assert ends == [True]


def test_arrays_are_read_as_numpy_reads_them() -> None:
    for x in (
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        np.zeros((0, 3)),
    ):
        assert np.array_equal(predictor.read_array(npy(x)), x)
    held = predictor.read_arrays(npz(x=np.arange(3), y=np.arange(2)), 10_000)
    assert {name: each.tolist() for name, each in held.items()} == {"x": [0, 1, 2], "y": [0, 1]}
