"""What a model runner is asked, and what it keeps."""

from __future__ import annotations

import io
from pathlib import Path

import classifiers
import msgspec
import numpy as np
from decoding import Decoder

from fedquilt.core import DECODE_ERRORS, DataError
from fedquilt.tools.operations.inference_server import drift
from fedquilt.tools.operations.inference_server.service import ModelService, ModelSwitcher


def every(folder: Path) -> dict[str, Decoder]:
    """Bodies of requests, with a network of ours behind them, and the counts that a runner keeps.

    Args:
        folder: for files of theirs, empty.
    """
    place = classifiers.write_classifier(folder / "model.onnx")
    answers = ModelService(ModelSwitcher(place), size=20)
    x = np.stack([classifiers.image(level) for level in (0, 90, 250)])
    files = [io.BytesIO() for _ in range(4)]
    np.save(files[0], x[0])
    np.save(files[1], np.asfortranarray(x[1].astype(np.float64)))
    np.savez(files[2], x=x, y=np.array([0, 1, 1]))
    np.savez_compressed(files[3], x=x)
    bodies = [each.getvalue() for each in files]
    for _ in range(20):
        answers.predict_bytes(bodies[2])
    kept = drift.make_reference(("mean",), np.arange(60.0)[:, None], np.arange(60) % 2)

    def compared(payload: bytes) -> object:
        found = msgspec.json.decode(payload, type=drift.ReferenceDistribution)
        if found.is_consistent:
            counted = drift.DriftCounts(found)
            counted.add_examples(found.names, np.ones((60, len(found.names))), [0] * 60)
            assert 0.0 <= (counted.compute_score() or 0.0) <= 1.0
        return found

    return {
        "asked": Decoder("tools/artefacts/predictor.py", answers.predict_bytes, (DataError,), tuple(bodies), share=0.2),
        "reference": Decoder(
            "tools/operations/inference_server/service.py",
            compared,
            DECODE_ERRORS,
            (msgspec.json.encode(kept),),
            share=0.2,
        ),
    }
