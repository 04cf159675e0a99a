"""Who may ask a dashboard for what: the name it is called by, where a page comes from, and the token for actions.

Pure functions of a request's headers. Reading needs no token, and links from other sites work. A page of another site
cannot read the answers, as no header allows it. Requests that change something have to come from the dashboard's pages.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Collection, Mapping
from http.cookies import CookieError, SimpleCookie
from typing import Final

HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
REPORT: Final = {  # a page of a run has its style in it, no script, and stands in a frame of ours
    **HEADERS,
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'self'; sandbox allow-same-origin",
}
PROOF: Final = "x-fedquilt-proof"  # header of a request to do something, which no page of somebody else's can know


def refusal_reason(headers: Mapping[str, str], names: Collection[str] = (), *, acts: bool = False) -> str | None:
    """Return why a request is refused for its host or origin, or None if it is not.

    Args:
        headers: of the request, with lower-case names.
        names: by which the dashboard may be called besides addresses and localhost.
        acts: whether it changes something.
    """
    host = headers.get("host", "")
    if not _ours(host, names):
        return f"this dashboard is not called {host[:100]!r}: use its address, or allow the name with --name"
    if not acts:
        return None
    origin = headers.get("origin")
    if origin is None:
        return "a request to do something has to say which page it comes from (Origin)"
    if origin not in (f"http://{host}", f"https://{host}"):
        return "the request comes from a page of somebody else's"
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return "the request comes from a page of somebody else's"
    return None


def _ours(host: str, names: Collection[str]) -> bool:
    """Whether a Host header is an address, which no name server can lead elsewhere, localhost or a name of ours."""
    name = host.lower()
    if not name.endswith("]"):
        before, colon, port = name.rpartition(":")
        name = before if colon and port.isascii() and port.isdigit() else name
    if name == "localhost" or name in names:
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


class Door:
    """What one start of a dashboard with actions checks: a token, and what follows from it.

    The token comes once, in a page's address behind "#", which browsers do not send. What it is exchanged for is a
    cookie that scripts cannot read, and a proof that requests to do something carry in a header.

    Args:
        token: a secret of this start.
        port: that is listened at: cookies do not tell ports apart.
    """

    def __init__(self, token: str = "", port: int = 0) -> None:
        self.token = token or secrets.token_urlsafe(32)
        self._cookie = f"fedquilt-dash-{port}"

    def opens(self, token: object) -> bool:
        """Whether this is the token."""
        return isinstance(token, str) and hmac.compare_digest(token.encode(), self.token.encode())

    def cookie(self) -> str:
        """Value of Set-Cookie for a browser that has shown the token."""
        return f"{self._cookie}={self._of('session')}; Path=/; HttpOnly; SameSite=Strict"

    def knows(self, headers: Mapping[str, str]) -> bool:
        """Whether a request carries the cookie."""
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return False
        return found is not None and hmac.compare_digest(found.value.encode(), self._of("session").encode())

    @property
    def proof(self) -> str:
        """Value of the header PROOF, told to pages that have the cookie."""
        return self._of("proof")

    def allows(self, headers: Mapping[str, str]) -> bool:
        """Whether a request may do something: it has the cookie and the proof."""
        given = headers.get(PROOF, "")
        return self.knows(headers) and hmac.compare_digest(given.encode(), self.proof.encode())

    def _of(self, use: str) -> str:
        return hmac.new(self.token.encode(), use.encode(), hashlib.sha256).hexdigest()
