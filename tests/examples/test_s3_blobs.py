"""Blobs by an S3-compatible store: a real one from a package, and signatures as AWS's own library makes them."""

import datetime
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import fedquilt_s3
import object_stores
import pytest
from cutting import Canned, Relay
from fedquilt_s3 import Bucket
from object_stores import KEYS, asked
from streamed import Pair
from two_sides import noise

from fedquilt import plugins
from fedquilt.blobs import chunks
from fedquilt.blobs.download import BlobWriter
from fedquilt.cli import options
from fedquilt.coordinator.delivery.blob_server import BlobLocationSettings
from fedquilt.core import JobError
from fedquilt.formats import toml

CHUNK = 256 * 1024
NOW_S = 1_800_000_000.0


# -- signatures --
@pytest.mark.parametrize("session", ["", "tok/en+=="])
@pytest.mark.parametrize(
    ("method", "url", "name", "size"),
    [
        ("GET", "https://store.site:9000/bucket", "fleet/dn/" + "ab" * 32, None),
        ("PUT", "https://s3.eu-central-1.amazonaws.com/bucket/pre fix?region=eu-central-1", "fleet/up/a.b_c/x", 12345),
        ("DELETE", "http://127.0.0.1:5000/bucket/p~q", "fleet/up/a/x", None),
        ("HEAD", "https://store.site:443/bucket/prefix", "", None),
    ],
)
def test_an_address_is_signed_as_by_aws_s_own_library(monkeypatch, method, url, name, size, session):
    auth = pytest.importorskip("botocore.auth", reason="botocore is not installed: pip install botocore")
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    bucket = Bucket.from_url(url, {**KEYS, "AWS_SESSION_TOKEN": session})
    bucket.clock = lambda: NOW_S
    ours = bucket.sign_url(method, name, size)
    now = datetime.datetime.fromtimestamp(NOW_S, datetime.timezone.utc)
    for place in ("get_current_datetime", "datetime"):
        if hasattr(auth, place):
            frozen = type("Frozen", (datetime.datetime,), {"utcnow": staticmethod(lambda: now.replace(tzinfo=None))})
            monkeypatch.setattr(auth, place, (lambda *given: now) if place != "datetime" else _Module(frozen))
    headers = {} if size is None else {"content-length": str(size)}
    request = AWSRequest(method, ours.partition("?")[0], headers=headers)
    keys = Credentials(KEYS["AWS_ACCESS_KEY_ID"], KEYS["AWS_SECRET_ACCESS_KEY"], session or None)
    auth.S3SigV4QueryAuth(keys, "s3", bucket.region, expires=fedquilt_s3.EXPIRES_S).add_auth(request)
    assert sorted(ours.partition("?")[2].split("&")) == sorted(request.url.partition("?")[2].split("&"))


class _Module:
    def __init__(self, kind: type[datetime.datetime]) -> None:
        self.datetime, self.timezone = kind, datetime.timezone


@pytest.mark.parametrize(
    "url", ["bucket", "s3://bucket/prefix", "https://store.site", "https://u:p@store.site/b", "https://s.site/b?x=1"]
)
def test_an_address_of_no_bucket_is_refused_without_quoting_it(url):
    with pytest.raises(JobError, match="HOST") as refused:
        Bucket.from_url(url, KEYS)
    assert "u:p" not in str(refused.value)


def test_keys_come_from_the_environment_and_are_shown_nowhere():
    with pytest.raises(JobError, match="AWS_ACCESS_KEY_ID"):
        Bucket.from_url("https://store.site/bucket", {})
    bucket = Bucket.from_url("https://store.site/bucket", KEYS)
    assert "secret" not in repr(bucket)
    assert "Signature" not in repr(bucket.sign_source("GET", "x"))


def test_the_package_is_found_by_its_entry_point(tmp_path, monkeypatch):
    """As `serve --blobs-backend s3=ADDRESS` finds it; without keys it says what is missing."""
    monkeypatch.syspath_prepend(str(object_stores.install(tmp_path)))
    opens = plugins.load_plugin("blobs", "s3")
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(JobError, match="AWS_ACCESS_KEY_ID"):
        opens("https://store.site/bucket")
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    where = options.BlobOptions(None, None, "s3=https://store.site/bucket").to_locations(None)
    assert where.open_backend is not None
    table = toml.read_toml(Path(fedquilt_s3.__file__).with_name("pyproject.toml"))
    assert table["project"]["entry-points"] == {"fedquilt.blobs": {"s3": "fedquilt_s3:open_bucket"}}


def test_a_coordinator_gives_boards_signed_addresses_of_the_backend(tmp_path):
    store = Canned(b"HTTP/1.1 200 OK\r\nDate: Fri, 27 Nov 2026 12:00:00 GMT\r\nContent-Length: 0\r\n\r\n")
    bucket = Bucket.from_url(f"http://127.0.0.1:{store.port}/bucket/models", KEYS)
    pair = Pair(tmp_path, "a", where=BlobLocationSettings(open_backend=partial(fedquilt_s3.ObjectStoreBlobs, bucket)))
    pair.others.append(store.close)
    pair.play(lambda: pair.places._backend._is_clock_known)
    ref = pair.boards["a"].depot.store_bytes(noise(2 * CHUNK))
    manifest = chunks.ManifestBuilder(ref, CHUNK, lambda at, size: noise(2 * CHUNK)[at : at + size]).hash_chunks()
    writer = BlobWriter(pair.coordinator.depot, manifest, bytes(2))
    (source,) = pair.places.upload_locations("a", writer)
    assert source.url.startswith(f"http://127.0.0.1:{store.port}/bucket/models/fleet/up/a/{ref.sha256}?X-Amz-")
    assert "X-Amz-Date=20261127T" in source.url
    (other,) = pair.places.upload_locations("b", writer)
    assert f"/up/b/{ref.sha256}?X-Amz-" in other.url
    pair.close()


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with object_stores.moto() as origin:
        yield origin


class Site:
    def __init__(self, folder: Path, origin: str, listen: str | None = None) -> None:
        port = urlsplit(origin).port or 0
        self.relay = Relay(port)
        self.bucket = Bucket.from_url(f"http://127.0.0.1:{self.relay.port}/bucket/models", KEYS)
        self.direct = object_stores.bucket(origin)
        self.pair = Pair(
            folder,
            "a",
            "b",
            where=BlobLocationSettings(listen, None, partial(fedquilt_s3.ObjectStoreBlobs, self.bucket)),
        )
        self.pair.others.append(self.relay.close)
        self.pair.play(lambda: self.pair.places._backend._is_clock_known)

    def there(self, name: str) -> bool:
        return asked(self.direct.sign_url("HEAD", name), "HEAD")[0] == 200


@pytest.fixture
def site(tmp_path: Path, moto: str) -> Iterator[Site]:
    made = Site(tmp_path, moto)
    yield made
    made.pair.close()


def test_a_model_is_brought_to_the_store_once_and_fetched_there(site):
    pair, ref = site.pair, site.pair.coordinator.depot.store_bytes(noise(12 * CHUNK))
    pair.boards["a"].transfers.request_blob("a", ref)
    pair.broker.chunks_most = 3  # it ends only if the rest comes from the store
    pair.play(lambda: bool(pair.boards["a"].errors))
    pair.boards["b"].transfers.request_blob("b", ref)
    pair.broker.chunks_most = pair.broker.chunks
    pair.play(lambda: bool(pair.boards["b"].errors))
    for name, board in pair.boards.items():
        assert board.errors == {(name, ref.sha256): None}
        assert board.depot.load(ref.sha256) == noise(12 * CHUNK)
    assert site.there(f"fleet/dn/{ref.sha256}")


def test_an_update_goes_by_the_store_and_is_removed_there(site):
    pair, board = site.pair, site.pair.boards["a"]
    ref = board.depot.store_bytes(noise(12 * CHUNK, 3))
    pair.coordinator.transfers.request_blob("a", ref)
    pair.play(lambda: bool(pair.coordinator.errors))
    assert pair.coordinator.errors == {("a", ref.sha256): None}
    assert pair.coordinator.depot.load(ref.sha256) == noise(12 * CHUNK, 3)
    assert pair.broker.chunks == 0
    pair.play(lambda: not site.there(f"fleet/up/a/{ref.sha256}"))


@pytest.mark.parametrize("way", ["dn", "up"])
def test_a_store_that_is_gone_in_the_middle_leaves_the_rest_to_the_broker(site, way):
    pair, board = site.pair, site.pair.boards["a"]
    giver, taker = (pair.coordinator, board) if way == "dn" else (board, pair.coordinator)
    ref = giver.depot.store_bytes(noise(12 * CHUNK, 4))
    if way == "dn":
        pair.boards["b"].transfers.request_blob("b", ref)
        pair.play(lambda: bool(pair.boards["b"].errors) and bool(pair.places._backend._stored_until_s))
    pair.broker.chunks = 0

    def cut(number):
        site.relay.closed = True
        return 5 * CHUNK + 1000

    site.relay.most = cut
    taker.transfers.request_blob("a", ref)
    pair.play(lambda: bool(taker.errors))
    assert taker.errors == {("a", ref.sha256): None}
    assert taker.depot.load(ref.sha256) == noise(12 * CHUNK, 4)
    assert 0 < pair.broker.chunks <= 12
    assert way == "up" or pair.broker.chunks < 12


def test_an_address_that_has_expired_is_refused_and_named_and_the_blob_comes_all_the_same(site, caplog):
    caplog.set_level(0, "fedquilt")
    pair, board = site.pair, site.pair.boards["a"]
    ref = pair.coordinator.depot.store_bytes(noise(4 * CHUNK, 6))
    pair.boards["b"].transfers.request_blob("b", ref)
    pair.play(lambda: bool(pair.boards["b"].errors) and bool(pair.places._backend._stored_until_s))
    body = b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"
    store = Canned(b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    pair.others.append(store.close)
    site.bucket.origin = f"http://127.0.0.1:{store.port}"
    pair.broker.chunks = 0
    board.transfers.request_blob("a", ref)
    pair.play(lambda: bool(board.errors))
    assert board.errors == {("a", ref.sha256): None}
    assert pair.broker.chunks == 4
    assert b"X-Amz-Signature" in store.asked[0]
    said = " ".join(each.getMessage() for each in caplog.records if each.name.startswith("fedquilt"))
    assert f"http://127.0.0.1:{store.port} refused the request (403 Forbidden)" in said
    assert "X-Amz" not in said
    assert "verysecret" not in said


def test_a_clock_that_is_years_off_signs_by_the_store_s(site, caplog):
    site.bucket.clock = lambda: 0.0
    site.pair.places._backend._is_clock_known = False
    site.pair.places._backend.request_clock()
    site.pair.play(lambda: site.pair.places._backend._is_clock_known)
    assert abs(site.bucket.offset_s - time.time()) < 3600
    stamp = site.bucket.sign_url("GET", "x").partition("X-Amz-Date=")[2][:4]
    assert stamp == str(time.gmtime().tm_year)
    assert "clock" in caplog.text


def test_a_store_that_refuses_rests(site, monkeypatch):
    monkeypatch.setattr(fedquilt_s3, "PAUSE_S", 1000.0)
    site.bucket.path = "/nobucket/models"
    pair, board = site.pair, site.pair.boards["a"]
    first, second = (pair.coordinator.depot.store_bytes(noise(4 * CHUNK, seed)) for seed in (7, 8))
    board.transfers.request_blob("a", first)
    pair.play(lambda: bool(board.errors) and pair.places._backend._not_before_s > time.monotonic())
    board.transfers.request_blob("a", second)
    pair.play(lambda: len(board.errors) == 2)
    assert set(board.errors.values()) == {None}
    assert pair.places._backend._waiting_devices == {}
