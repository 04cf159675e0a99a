"""An S3-compatible object store, as far as the coordinator needs one: addresses that it has signed (AWS Signature 4).

A signed address opens one object for one HTTP method for EXPIRES_S to anyone who has it; the keys stay here. A store
checks times by its own clock, so addresses are signed by that clock: `Bucket.offset_s`.
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
from fedquilt.http_url import split_http_url

EXPIRES_S: Final = 3600  # validity of a signed address
FORM: Final = "write https://HOST[:PORT]/BUCKET[/PREFIX][?region=REGION]"
VARIABLES: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")

Method = Literal["GET", "PUT", "HEAD", "DELETE"]


@dataclass
class Bucket:
    """A bucket, and the keys to it; `repr` shows no key.

    Args:
        origin: scheme, host and port of the store.
        path: "/BUCKET", and a prefix of all objects.
        region: of the store.
        key_id: identifier of the access key.
        secret: secret part of the access key.
        session: token of a temporary key; "": the key is permanent.
        clock: seconds since 1970, as this machine counts them.
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
    def parse(cls, url: str, environment: Mapping[str, str]) -> Bucket:
        """A bucket by its address, with the keys in environment variables.

        Raises:
            JobError: the address names no bucket, or a key is missing.
        """
        try:
            parts = split_http_url(url)
        except ValueError:
            raise JobError(f"--blobs-s3: this is no address of a bucket: {FORM}") from None
        given, path = dict(parse_qsl(parts.query)), parts.path.rstrip("/")
        if not path or parts.fragment or given.keys() - {"region"}:
            raise JobError(f"--blobs-s3: this is no address of a bucket: {FORM}")
        key_id, secret, session = (environment.get(name, "") for name in VARIABLES)
        if not key_id or not secret:
            raise JobError(
                f"--blobs-s3: the store's access key is missing: put it into the environment as {VARIABLES[0]} and "
                f"{VARIABLES[1]}"
            )
        return cls(f"{parts.scheme}://{parts.netloc}", path, given.get("region", "us-east-1"), key_id, secret, session)

    def source(self, method: Method, name: str, size: int | None = None) -> Source:
        """Signed address of an object, or of the bucket for ""; with `size`, of an upload of so many bytes."""
        return Source(url=self.signed(method, name, size))

    def signed(self, method: Method, name: str, size: int | None = None) -> str:
        """See `source`."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self.clock() + self.offset_s))
        scope = f"{stamp[:8]}/{self.region}/s3/aws4_request"
        headers = {"host": _host(self.origin)} | ({} if size is None else {"content-length": str(size)})
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
        """Set the store's clock by the date of its answer; returns the change in seconds."""
        try:
            before, self.offset_s = self.offset_s, parsedate_to_datetime(date).timestamp() - self.clock()
        except (TypeError, ValueError, OverflowError):
            return 0.0
        return abs(self.offset_s - before)


def _host(origin: str) -> str:
    """A store's name as HTTP names it: without the port that its scheme has anyway."""
    parts = urlsplit(origin)
    usual = {"http": 80, "https": 443}[parts.scheme]
    return parts.netloc.rpartition(":")[0] if parts.port == usual else parts.netloc
