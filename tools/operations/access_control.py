"""Access control of a web page by host name, origin and token.

All functions depend only on the headers of a request. Reading needs no token, and links from other sites work. Pages
of other sites cannot read responses, because no header permits it. Actions must come from the dashboard's own pages.
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
REPORT_HEADERS: Final = {  # a run's page has inline styles and no script, and the dashboard shows the page in a frame
    **HEADERS,
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'self'; sandbox allow-same-origin",
}
PROOF_HEADER: Final = "x-fedquilt-proof"  # header of actions, with a value that other sites cannot read


def refusal_reason(
    headers: Mapping[str, str], permitted_names: Collection[str] = (), *, is_action: bool = False
) -> str | None:
    """Return why a request's host or origin is refused, or None. IP addresses and localhost are permitted."""
    host = headers.get("host", "")
    if not _is_permitted_host(host, permitted_names):
        return f"host {host[:100]!r} is not permitted: use the IP address, or allow the name with --host"
    if not is_action:
        return None
    origin = headers.get("origin")
    if origin is None:
        return "action has no Origin header: send the address of the dashboard's own page"
    is_same_origin = headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")
    if origin not in (f"http://{host}", f"https://{host}") or not is_same_origin:
        return f"action comes from another site's page ({origin[:100]!r}): use the dashboard's own page"
    return None


def _is_permitted_host(host: str, permitted_names: Collection[str]) -> bool:
    # addresses are permitted, because no name server can redirect them
    name = host.lower()
    if not name.endswith("]"):
        host_name, colon, port = name.rpartition(":")
        name = host_name if colon and port.isascii() and port.isdigit() else name
    if name == "localhost" or name in permitted_names:
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


class AccessPolicy:
    """Access policy of a dashboard with actions: the token, a session cookie and a proof.

    The token arrives once, in the fragment of a page's address, which browsers do not send. In exchange the browser
    receives a cookie that scripts cannot read, and a proof for the header of actions.
    """

    def __init__(self, token: str = "", port: int = 0) -> None:
        self.token = token or secrets.token_urlsafe(32)
        self._cookie_name = f"fedquilt-dash-{port}"

    def accepts_token(self, token: object) -> bool:
        return isinstance(token, str) and hmac.compare_digest(token.encode(), self.token.encode())

    def make_session_cookie(self) -> str:
        return f"{self._cookie_name}={self._derive_secret('session')}; Path=/; HttpOnly; SameSite=Strict"

    def has_session(self, headers: Mapping[str, str]) -> bool:
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self._cookie_name)
        except CookieError:
            return False
        return cookie is not None and hmac.compare_digest(
            cookie.value.encode(), self._derive_secret("session").encode()
        )

    @property
    def proof(self) -> str:
        return self._derive_secret("proof")

    def permits_action(self, headers: Mapping[str, str]) -> bool:
        proof = headers.get(PROOF_HEADER, "")
        return self.has_session(headers) and hmac.compare_digest(proof.encode(), self.proof.encode())

    def _derive_secret(self, purpose: str) -> str:
        return hmac.new(self.token.encode(), purpose.encode(), hashlib.sha256).hexdigest()
