"""Signed URLs for an S3-compatible object store (AWS Signature Version 4).

A signed URL permits one HTTP method on one object for EXPIRES_S, to anyone who has the URL. The keys stay in this
process. A store checks times by its own clock, so URLs are signed with that time (`Bucket.offset_s`).
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Final, Literal
from urllib.parse import parse_qsl, quote, urlsplit

from fedquilt.core import JobError, Source

EXPIRES_S: Final = 3600  # validity of a signed address
FORM: Final = "write https://HOST[:PORT]/BUCKET[/PREFIX][?region=REGION]"
VARIABLES: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")

Method = Literal["GET", "PUT", "HEAD", "DELETE"]


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
    offset_s: float = 0.0  # the store's clock less `clock`

    @classmethod
    def from_url(cls, url: str, environment: Mapping[str, str]) -> Bucket:
        """Return the bucket with this URL, and with the access keys of the environment.

        Raises:
            JobError: If the URL names no bucket, or a key is missing.
        """
        try:
            parts = urlsplit(url)
            fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            fits = False
        given = dict(parse_qsl(parts.query)) if fits else {}
        path = parts.path.rstrip("/") if fits else ""
        if not fits or not path or parts.username or parts.fragment or given.keys() - {"region"}:
            raise JobError(f"--blobs-s3: this is no address of a bucket: {FORM}")
        key_id, secret, session = (environment.get(name, "") for name in VARIABLES)
        if not key_id or not secret:
            raise JobError(
                f"--blobs-s3: the store's access key is missing: put it into the environment as {VARIABLES[0]} and "
                f"{VARIABLES[1]}"
            )
        return cls(f"{parts.scheme}://{parts.netloc}", path, given.get("region", "us-east-1"), key_id, secret, session)

    def sign_source(self, method: Method, name: str, size: int | None = None) -> Source:
        return Source(url=self.sign_url(method, name, size))

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
        said = "&".join(f"{quote(key, safe='-_.~')}={quote(query[key], safe='-_.~')}" for key in sorted(query))
        path = quote(f"{self.path if name else '/' + self.path.split('/')[1]}{'/' if name else ''}{name}", safe="/-_.~")
        rows = "".join(f"{key}:{headers[key]}\n" for key in sorted(headers))
        canonical = f"{method}\n{path}\n{said}\n{rows}\n{names}\nUNSIGNED-PAYLOAD"
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        key = f"AWS4{self.secret}".encode()
        for part in (stamp[:8], self.region, "s3", "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        code = hmac.digest(key, f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}".encode(), "sha256").hex()
        return f"{self.origin}{path}?{said}&X-Amz-Signature={code}"

    def set_clock(self, date: str) -> float:
        """Set the clock offset from an HTTP date. Return the change in seconds, 0 for an invalid date."""
        try:
            before, self.offset_s = self.offset_s, parsedate_to_datetime(date).timestamp() - self.clock()
        except (TypeError, ValueError, OverflowError):
            return 0.0
        return abs(self.offset_s - before)


def _host_header(origin: str) -> str:
    parts = urlsplit(origin)
    usual = {"http": 80, "https": 443}[parts.scheme]
    return parts.netloc.rpartition(":")[0] if parts.port == usual else parts.netloc
