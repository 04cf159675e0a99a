"""The audit: gradients out of what methods send, pictures out of gradients, and pictures on a sheet."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from fedquilt.core import DataError, Examples, JobError
from fedquilt.tools.lab import audit
from fedquilt.tools.lab.audit import UploadVariant, audit_methods, compare_fingerprints, extract_gradient, psnr

TABLE = {"channels": 1, "size": 12}
NETWORK = {"name": "lenet", **TABLE, "classes": 3, "width": 4, "input": TABLE}


@pytest.fixture(scope="module")
def attack():  # type: ignore[no-untyped-def]
    pytest.importorskip("torch")
    from fedquilt.tools.lab import audit as module

    return module


def engine():  # type: ignore[no-untyped-def]
    from fedquilt.edge_agent.engines.torch.engine import TorchEngine

    return TorchEngine(1 << 40)


def one() -> Examples:
    """A bright bar on dark ground, label 1."""
    x = np.full((1, 12, 12), 30, np.uint8)
    x[0, 3:6, 2:9] = 220
    return Examples(x, np.array([1]))


def test_what_fedavg_uploads_is_its_gradient(attack) -> None:  # type: ignore[no-untyped-def]
    """One step of one example with rate 1: every layer, equal to the gradient that torch reckons."""
    import torch
    import torch.nn.functional as F

    from fedquilt.data import inputs
    from fedquilt.models.networks import registry

    start = attack.draw_weights(NETWORK, 0)
    found = extract_gradient(UploadVariant("x", "fedavg", {}), NETWORK, start, one(), engine())
    model = registry.build_network(NETWORK)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(torch.tensor(start[name]))
    x = torch.from_numpy(inputs.prepare_images(one().x, TABLE))
    F.cross_entropy(model(x), torch.tensor([1])).backward()
    assert found.keys() == start.keys()
    for name, value in model.named_parameters():
        np.testing.assert_allclose(found[name], value.grad.numpy(), atol=1e-6)
    assert attack.infer_label(found, "7") == 1


def test_genefl_uploads_a_layer_or_all_but_the_head_and_nothing_of_a_fingerprint(attack) -> None:  # type: ignore[no-untyped-def]
    start = attack.draw_weights(NETWORK, 0)
    whole = extract_gradient(UploadVariant("x", "genefl", {}), NETWORK, start, one(), engine())
    assert {name.partition(".")[0] for name in whole} == {"0", "2", "4"}
    single = extract_gradient(UploadVariant("x", "genefl", {"first_layers": 1}), NETWORK, start, one(), engine())
    assert len({name.partition(".")[0] for name in single}) == 1
    assert attack.infer_label(single, "7") is None
    part = extract_gradient(UploadVariant("x", "parfed", {"layers": 1}), NETWORK, start, one(), engine())
    assert start.keys() - part.keys() == {"4.weight"}


def test_a_method_that_uploads_no_layers_cannot_be_audited(attack) -> None:  # type: ignore[no-untyped-def]
    start = attack.draw_weights(NETWORK, 0)
    with pytest.raises(JobError, match="uploads no tensors"):
        extract_gradient(UploadVariant("x", "genefl", {"gather": 9}), NETWORK, start, one(), engine())


def test_a_whole_gradient_gives_the_picture_away_and_a_single_layer_s_does_not(attack) -> None:  # type: ignore[no-untyped-def]
    """PSNR of the reconstruction: of 144 pixels the first layer's gradient has 104 values, the whole one 1023."""
    from fedquilt.arrays import tensors
    from fedquilt.data import inputs

    start, truth = attack.draw_weights(NETWORK, 0), inputs.prepare_images(one().x, TABLE)[0]
    found = {}
    for name, row in (
        ("all", UploadVariant("x", "fedavg", {})),
        ("one", UploadVariant("x", "genefl", {"first_layers": 1})),
    ):
        gradient = extract_gradient(row, NETWORK, start, one(), engine())
        guess = attack.reconstruct_example(NETWORK, start, gradient, 1, truth.shape, tensors.seeded_rng("t"), 100)
        assert guess.shape == truth.shape
        assert 0 <= guess.min() <= guess.max() <= 1
        found[name] = psnr(guess, truth)
    assert found["all"] > 30
    assert found["one"] < found["all"] - 10


def test_the_command_writes_the_pictures_and_tells_every_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from fedquilt import cli
    from fedquilt.tools.lab import audit

    x = np.concatenate([one().x, 255 - one().x])
    np.savez(tmp_path / "data.npz", x_train=x, y_train=np.array([0, 1]))
    out = tmp_path / "new" / "sheet.svg"
    monkeypatch.setattr("fedquilt.tools.lab.audit.MAX_STEPS", 3)
    asked = ["lab", "audit", "--data", str(tmp_path / "data.npz"), "--images", "1", "--out", str(out)]
    assert cli.main([*asked, "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["rows"]) == 6
    assert all(len(row["psnr_db"]) == 1 for row in told["rows"].values())
    assert told["fingerprints"][0] == {"examples": 1, "cosine": 1.0}
    assert out.read_text().count("data:image/png;base64,") == 7
    assert any("FedAvg, noise 0.001" in line for line in audit.format_result(told))


def test_what_are_no_square_pictures_is_said(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    np.savez(tmp_path / "data.npz", x_train=np.zeros((3, 8, 6), np.uint8), y_train=np.zeros(3, int))
    with pytest.raises(DataError, match="not square images: scale them with --size"):
        audit_methods(tmp_path / "data.npz")


def test_psnr_by_hand() -> None:
    """An error of 0.1 everywhere is 20 dB; none is told as 100."""
    assert psnr(np.full((2, 2), 0.6), np.full((2, 2), 0.5)) == pytest.approx(20)
    assert psnr(np.ones((2, 2)), np.ones((2, 2))) == 100


def test_a_fingerprint_tells_of_as_many_examples_as_there_are() -> None:
    some = Examples(np.repeat(one().x, 20, axis=0), np.zeros(20, int))
    assert [each["examples"] for each in compare_fingerprints(some)] == [1, 16]


def test_a_sheet_holds_its_images_titles_and_notes() -> None:
    """Grey and colour, as pixels of their own; what is beyond 0..1 is cut off; a note stands under each."""
    grey, colour = np.linspace(-0.2, 1.2, 6).reshape(2, 3, 1), np.zeros((2, 3, 3))
    sheet = audit.render_grid(["original", "FedAvg, noise 1"], [[grey, colour]], [["", "12.5 dB"]])
    root = ElementTree.fromstring(sheet)
    images = list(root.iter("{http://www.w3.org/2000/svg}image"))
    assert len(images) == 2
    assert all("pixelated" in image.get("style", "") for image in images)
    payload = base64.b64decode(images[0].get("{http://www.w3.org/1999/xlink}href", "").partition(",")[2])
    image = pytest.importorskip("PIL.Image").open(io.BytesIO(payload)).convert("L")
    wanted = np.clip(grey[..., 0], 0, 1) * 255
    np.testing.assert_allclose(np.asarray(image), wanted, atol=1.5)
    words = {"".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"original", "FedAvg", "noise 1", "12.5 dB"} <= words
