"""Models and updates in a bucket of an S3-compatible store (AWS, MinIO, Ceph), by signed URLs.

    pip install ./s3_blobs
    AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... fedquilt serve --blobs-backend
    s3=https://HOST/BUCKET/PREFIX?region=R

The coordinator uploads each model once, and sends its URLs to the devices. Updates are deleted after their download,
models are not. A lifecycle rule of the bucket should delete objects after a day or more.

A signed URL permits one HTTP method on one object for EXPIRES_S, to anyone who has the URL. The keys stay in this
process. A store checks times by its own clock, so URLs are signed with that time (`Bucket.offset_s`).
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Final, Literal
from urllib.parse import parse_qsl, quote, urlsplit

from fedquilt.blobs.direct_transfers import Key, TransferBackend, TransferResult
from fedquilt.blobs.store import BlobStore
from fedquilt.coordinator.delivery.blob_server import OpenBackend
from fedquilt.core import BlobLocation, BlobRef, JobError, LinkError
from fedquilt.host.http_server import split_http_url

EXPIRES_S: Final = 3600  # validity of a signed URL
FORM: Final = "write s3=https://HOST[:PORT]/BUCKET[/PREFIX][?region=REGION]"
KEY_VARIABLES: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
Method = Literal["GET", "PUT", "HEAD", "DELETE"]
STORED_S: Final = 3600.0  # time for which a stored object is assumed to exist
PAUSE_S: Final = 60.0  # pause after a failed request
MAX_SKEW_S: Final = 60.0  # larger differences of the store's clock are logged
_CLOCK: Final = ("", "clock")
_REMOVED: Final = ("", "removed")

log = logging.getLogger("fedquilt.coordinator.blobs")


@dataclass
class Bucket:
    """Bucket of an object store, with its access keys. The `repr` contains no key.

    Args:
        origin: The scheme, host and port of the store.
        path: The path "/BUCKET", with an optional prefix of all objects.
        region: The region of the store.
        key_id: The id of the access key.
        secret: The secret part of the access key.
        session: The token of a temporary key, or "" for a permanent key.
        clock: The clock of this machine, in seconds since 1970.
    """

    origin: str
    path: str
    region: str
    key_id: str = field(repr=False)
    secret: str = field(repr=False)
    session: str = field(default="", repr=False)
    clock: Callable[[], float] = time.time
    offset_s: float = 0.0  # of the store's clock to `clock`

    @classmethod
    def from_url(cls, url: str, environment: Mapping[str, str]) -> Bucket:
        """Return the bucket with this URL, and with the access keys of the environment.

        Raises:
            JobError: If the URL names no bucket, or a key is missing.
        """
        try:
            parts = split_http_url(url)
        except ValueError:
            raise JobError(f"--blobs-backend s3: the URL names no bucket: {FORM}") from None
        query, path = dict(parse_qsl(parts.query)), parts.path.rstrip("/")
        if not path or parts.fragment or query.keys() - {"region"}:
            raise JobError(f"--blobs-backend s3: the URL names no bucket: {FORM}")
        key_id, secret, session = (environment.get(name, "") for name in KEY_VARIABLES)
        if not key_id or not secret:
            raise JobError(
                f"--blobs-backend s3: the access key is missing: set the environment variables "
                f"{KEY_VARIABLES[0]} and {KEY_VARIABLES[1]}"
            )
        return cls(f"{parts.scheme}://{parts.netloc}", path, query.get("region", "us-east-1"), key_id, secret, session)

    def sign_source(self, method: Method, name: str, size: int | None = None) -> BlobLocation:
        return BlobLocation(url=self.sign_url(method, name, size))

    def sign_url(self, method: Method, name: str, size: int | None = None) -> str:
        """Return the signed URL of an object, or of the bucket itself if `name` is "".

        With `size`, the URL is valid only for an upload of exactly this many bytes.
        """
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self.clock() + self.offset_s))
        scope = f"{stamp[:8]}/{self.region}/s3/aws4_request"
        headers = {"host": _host_header(self.origin)} | ({} if size is None else {"content-length": str(size)})
        names = ";".join(sorted(headers))
        query = {
            "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
            "X-Amz-Credential": f"{self.key_id}/{scope}",
            "X-Amz-Date": stamp,
            "X-Amz-Expires": str(EXPIRES_S),
            "X-Amz-SignedHeaders": names,
        }
        if self.session:
            query["X-Amz-Security-Token"] = self.session
        query_text = "&".join(f"{quote(key, safe='-_.~')}={quote(query[key], safe='-_.~')}" for key in sorted(query))
        path = quote(f"{self.path if name else '/' + self.path.split('/')[1]}{'/' if name else ''}{name}", safe="/-_.~")
        header_lines = "".join(f"{key}:{headers[key]}\n" for key in sorted(headers))
        canonical = f"{method}\n{path}\n{query_text}\n{header_lines}\n{names}\nUNSIGNED-PAYLOAD"
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        key = f"AWS4{self.secret}".encode()
        for part in (stamp[:8], self.region, "s3", "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        code = hmac.digest(key, f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}".encode(), "sha256").hex()
        return f"{self.origin}{path}?{query_text}&X-Amz-Signature={code}"

    def set_clock(self, date: str) -> float:
        """Set the clock offset from an HTTP date. Return the change in seconds, 0 for an invalid date."""
        try:
            old_offset_s, self.offset_s = self.offset_s, parsedate_to_datetime(date).timestamp() - self.clock()
        except (TypeError, ValueError, OverflowError):
            return 0.0
        return abs(self.offset_s - old_offset_s)


def open_bucket(address: str) -> OpenBackend:
    """Return the backend of a bucket, whose keys are in the environment. This is the entry point.

    Raises:
        JobError: If the address names no bucket, or a key is missing.
    """
    return functools.partial(ObjectStoreBlobs, Bucket.from_url(address, os.environ))


def _host_header(origin: str) -> str:
    parts = urlsplit(origin)
    usual = {"http": 80, "https": 443}[parts.scheme]
    return parts.netloc.rpartition(":")[0] if parts.port == usual else parts.netloc


class ObjectStoreBlobs:
    """Blobs of one coordinator in an object store. Requests run in threads and never block.

    Args:
        bucket: The bucket of the store.
        fleet: The name of the folder of all objects.
        depot: The local blob store.
        carriers: The runner of the threads, which passes their results to `handle_result`.
    """

    def __init__(self, bucket: Bucket, fleet: str, blob_store: BlobStore, transfer_backend: TransferBackend) -> None:
        self._bucket, self._fleet, self._blob_store, self._transfer_backend = (
            bucket,
            fleet,
            blob_store,
            transfer_backend,
        )
        self._stored_until_s: dict[str, float] = {}  # by sha256
        self._waiting_devices: dict[str, dict[str, None]] = {}  # by sha256 of blobs in upload
        self._ready_blobs: list[Key] = []
        self._upload_keys: set[Key] = set()  # blobs for which devices received a URL
        self._is_clock_known = False
        self._not_before_s = -math.inf
        self.request_clock()

    def download_locations(self, device: str, ref: BlobRef) -> tuple[BlobLocation, ...]:
        """Return the locations from which a device can fetch a blob.

        A blob that is missing in the store is uploaded first, and then returned by `take_ready_blobs`.
        """
        if time.monotonic() < self._stored_until_s.get(ref.sha256, -math.inf):
            return (self._bucket.sign_source("GET", self._download_name(ref.sha256)),)
        if ref.sha256 in self._waiting_devices:
            self._waiting_devices[ref.sha256][device] = None
        elif self._is_usable():
            self._waiting_devices[ref.sha256] = {device: None}
            source = self._bucket.sign_source("PUT", self._download_name(ref.sha256), ref.size)
            self._transfer_backend.start_upload(("", ref.sha256), self._blob_store, ref, (source,), lambda size: None)
        return ()

    def upload_locations(self, device: str, ref: BlobRef) -> tuple[BlobLocation, ...]:
        if not self._is_usable():
            return ()
        self._upload_keys.add((device, ref.sha256))
        return (self._bucket.sign_source("PUT", self._upload_name(device, ref.sha256), ref.size),)

    def uploaded_locations(self, device: str, ref: BlobRef) -> tuple[BlobLocation, ...]:
        has_upload_url = (device, ref.sha256) in self._upload_keys
        return (self._bucket.sign_source("GET", self._upload_name(device, ref.sha256)),) if has_upload_url else ()

    def delete_upload(self, key: Key) -> None:
        if key in self._upload_keys:
            self._upload_keys.discard(key)
            source = self._bucket.sign_source("DELETE", self._upload_name(*key))
            self._transfer_backend.start_job(lambda: self._delete_object(source), TransferResult(_REMOVED, None, None))

    def take_ready_blobs(self) -> list[Key]:
        """Return the blobs that reached the store since the last call, once per waiting device."""
        ready, self._ready_blobs = self._ready_blobs, []
        return ready

    def handle_result(self, result: TransferResult) -> bool:
        """Process the result of a request. Return whether the request was made by this object."""
        if result.key == _CLOCK and result.error is not None:
            self._pause(result.error)
        if result.key[0] != "":
            return False
        devices = self._waiting_devices.pop(result.key[1], {})
        if result.key not in (_CLOCK, _REMOVED) and result.error is None:
            self._stored_until_s[result.key[1]] = time.monotonic() + STORED_S
            self._ready_blobs += [(device, result.key[1]) for device in devices]
        elif result.key not in (_CLOCK, _REMOVED):
            self._pause(str(result.error))
        return True

    def request_clock(self) -> None:
        source = self._bucket.sign_source("HEAD", "")
        self._not_before_s = math.inf  # until the store replies
        self._transfer_backend.start_job(lambda: self._fetch_clock(source), TransferResult(_CLOCK, None, "no answer"))

    def _is_usable(self) -> bool:
        # Requests the store's clock if the clock is unknown.
        if time.monotonic() < self._not_before_s:
            return False
        if not self._is_clock_known:
            self.request_clock()
        return self._is_clock_known

    def _fetch_clock(self, source: BlobLocation) -> TransferResult:
        _, date = self._transfer_backend.http.send_request("HEAD", source)
        if self._bucket.set_clock(date) > MAX_SKEW_S:
            log.warning(
                "the clock of %s differs by %+.0f s from this machine's: correct one of them",
                source.origin,
                self.offset_s,
            )
        self._is_clock_known, self._not_before_s = True, -math.inf
        return TransferResult(_CLOCK, None, None)

    def _delete_object(self, source: BlobLocation) -> TransferResult:
        try:
            self._transfer_backend.http.send_request("DELETE", source)
        except LinkError as error:
            log.debug("an object is left in the store: %s", error)
        return TransferResult(_REMOVED, None, None)

    @property
    def offset_s(self) -> float:
        return self._bucket.offset_s

    def _pause(self, error: str) -> None:
        log.warning("the object store is not used for %g s: %s", PAUSE_S, error)
        self._not_before_s, self._is_clock_known = time.monotonic() + PAUSE_S, False

    def _download_name(self, sha256: str) -> str:
        return f"{self._fleet}/dn/{sha256}"

    def _upload_name(self, device: str, sha256: str) -> str:
        return f"{self._fleet}/up/{device}/{sha256}"
