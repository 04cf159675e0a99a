"""Check of HTTP addresses."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit


def split_http_url(url: str) -> SplitResult:
    """Return the parts of an HTTP address with a usable host and port.

    Raises:
        ValueError: If the address is not of HTTP or HTTPS, names a user, or its host or port cannot exist.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    host.encode("idna")  # Python does so when it resolves the name
    if parts.scheme not in ("http", "https") or not host or parts.port == 0 or parts.username is not None:
        raise ValueError(f"{url!r} is no HTTP address")
    return parts
