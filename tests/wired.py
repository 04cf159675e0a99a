"""One message of each kind that goes over the wire."""

from __future__ import annotations

from fedquilt import wire
from fedquilt.core import (
    BlobLocation,
    BlobRef,
    LocationOffer,
    Profile,
    Task,
    Update,
    UploadProgress,
    Usage,
    WireMessage,
    WorkEstimate,
)

SHA = "ab" * 32
NUMBERED = {"job": "digits-1", "round": 3, "attempt": 0}
MESSAGES: list[WireMessage] = [
    wire.CoordState(online=True, epoch=7),
    wire.RoundState(job="digits-1", method="fedavg", round=3, rounds=5, phase="open", cohort=("tx2-1", "nano-2")),
    wire.Presence(online=False, boot="b1", seq=2),
    Profile(device="tx2-1", board="tx2", memory_bytes=8, budget_bytes=4, engines=("onnx",), versions={"numpy": "2"}),
    wire.Claim(**NUMBERED, accepted=False, code="memory", reason="needs 12 MB, has 8"),
    wire.Progress(**NUMBERED, fraction=0.5),
    Update(
        **NUMBERED,
        device="tx2-1",
        weight=2.0,
        bundles={"model": BlobRef(sha256=SHA, size=9)},
        metrics={"loss": 0.25},
        usage=Usage(wall_s=1.5, energy_j=None),
    ),
    wire.Telemetry(power_w=2.5),
    Task(
        **NUMBERED,
        method="fedavg",
        engine="numpy",
        actions=("check", "work"),
        params={"lr": 0.1, "network": {"name": "mlp", "layers": [64, 10]}},
        bundles={},
        work=WorkEstimate(flops=1e6),
        seed=5,
        deadline_s=60.0,
    ),
    wire.Ack(**NUMBERED, accepted=True),
    wire.DesiredRelease(
        rollout="digits-2", kind="model", serial=3, limits=wire.ReleaseLimits(min_gain=-0.005), window="02:00-05:00"
    ),
    wire.ReleaseStatus(rollout="digits-2", kind="model", serial=3, phase="committed", metrics={"accuracy": 0.93}),
    wire.ChunkRequest(sha256=SHA, chunk=1024, indices=(0, 5)),
    wire.BlobManifest(sha256=SHA, size=1500, chunk=1024, digests=SHA * 2),
    wire.MissingBlob(sha256=SHA, reason="not offered"),
    LocationOffer(
        sha256=SHA, direction="get", locations=(BlobLocation(url=f"https://c.site:8443/blobs/{SHA}", token="abc"),)
    ),
    UploadProgress(sha256=SHA, uploaded_bytes=1500, complete=True),
    wire.Hello(attempt="0123456789abcdef", flight=2, tls="AAAA"),
]
