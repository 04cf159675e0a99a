"""Messages about locations outside the broker where blobs are fetched or uploaded."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from fedquilt.core.messages import Count, Digest, Sentence, WireMessage


class BlobLocation(WireMessage, frozen=True, omit_defaults=True):
    """Location of a blob: URL and access token. Both are secret, so `repr` shows only the origin."""

    url: Annotated[str, Meta(pattern=r"^https?://[^\s/]+/", max_length=4096)]
    token: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{0,100}\Z")] = ""  # of the coordinator's server; "": a store's
    start: Count = 0  # offset of the first byte that is to be put there

    def __repr__(self) -> str:
        return f"Source({self.origin})"

    @property
    def origin(self) -> str:
        """Scheme, host and port of the URL, which may be logged."""
        return "/".join(self.url.split("/", 3)[:3])


class LocationOffer(WireMessage, frozen=True):
    """Offer of locations on dn/blob/<sha256>/place, for fetching or uploading a blob.

    The device uses the first location that it can reach, and the broker if no location can be reached.
    """

    sha256: Digest
    way: Literal["get", "put"]
    sources: Annotated[tuple[BlobLocation, ...], Meta(min_length=1, max_length=4)]


class UploadProgress(WireMessage, frozen=True, omit_defaults=True):
    """Progress of an upload on up/blob/<sha256>/placed, sent every few seconds and at the end."""

    sha256: Digest
    moved: Count = 0  # bytes so far
    source: Annotated[int, Meta(ge=0, le=3)] = 0  # which of the sources it is, or was
    done: bool = False
    error: Sentence = ""  # why it was put nowhere; then it has to be asked for in chunks
