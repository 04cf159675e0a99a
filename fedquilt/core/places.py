"""Messages on places outside of the broker where a blob can be fetched, or put."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from fedquilt.core.messages import Count, Digest, Sentence, Wired


class Source(Wired, frozen=True, omit_defaults=True):
    """One place: an address, and what opens it. Both are secrets, so its `repr` shows neither."""

    url: Annotated[str, Meta(pattern=r"^https?://[^\s/]+/", max_length=4096)]
    token: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{0,100}\Z")] = ""  # of the coordinator's server; "": a store's
    start: Count = 0  # offset of the first byte that is to be put there

    def __repr__(self) -> str:
        """The host alone."""
        return f"Source({self.origin})"

    @property
    def origin(self) -> str:
        """Scheme, host and port: what may be logged of it."""
        return "/".join(self.url.split("/", 3)[:3])


class Place(Wired, frozen=True):
    """Places of a blob on dn/blob/<sha256>/place: the device may fetch it there, or is to put it there.

    It takes the first that it reaches. If it reaches none, the blob comes and goes in chunks over the broker.
    """

    sha256: Digest
    way: Literal["get", "put"]
    sources: Annotated[tuple[Source, ...], Meta(min_length=1, max_length=4)]


class Placed(Wired, frozen=True, omit_defaults=True):
    """Progress of putting a blob on up/blob/<sha256>/placed: at its end, and every few seconds before."""

    sha256: Digest
    moved: Count = 0  # bytes so far
    source: Annotated[int, Meta(ge=0, le=3)] = 0  # which of the sources it is, or was
    done: bool = False
    error: Sentence = ""  # why it was put nowhere; then it has to be asked for in chunks
