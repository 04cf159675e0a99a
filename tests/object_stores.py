"""A server that speaks S3, with a bucket, and requests to it."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import fedquilt_s3
import pytest
import sites
from fedquilt_s3 import Bucket

KEYS = {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "verysecret"}


@contextmanager
def moto() -> Iterator[str]:
    server = pytest.importorskip("moto.server", reason="moto is not installed: pip install 'moto[server]'")
    made = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    made.start()
    host, port = made.get_host_and_port()
    yield f"http://{host}:{port}"
    made.stop()


def bucket(origin: str) -> Bucket:
    found = Bucket.from_url(f"{origin}/bucket/models", KEYS)
    asked(found.sign_url("PUT", ""), "PUT")
    return found


def asked(url: str, method: str) -> tuple[int, bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    connection.request(method, f"{parts.path}?{parts.query}")
    with connection.getresponse() as answer:
        found = answer.status, answer.read()
    connection.close()
    return found


def install(site: Path) -> Path:
    """Put the package of examples/s3_blobs into `site`, which is returned."""
    points = {"fedquilt.blobs": {"s3": "fedquilt_s3:open_bucket"}}
    return sites.install(site, "fedquilt-s3", {"fedquilt_s3.py": Path(fedquilt_s3.__file__).read_text()}, points)
