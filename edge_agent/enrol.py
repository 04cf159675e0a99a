"""Enrolment of a board: gets its certificate, renews it, and explains failures.

The key is made here and never leaves. `enrol` may run at any time and any number of times: it takes
the step that is needed (`next_step`), or none. It trusts only the authority's certificate that the board was
given (`broker.ca`). The endpoint is checked in full, dates too: the authority and
servers are valid since 1970, so that a clock that says 1970 is no obstacle and nothing is left unchecked.
Not imported by the agent's daemon: this needs the cryptography library (`fedquilt[identity]`).
"""

from __future__ import annotations

import contextlib
import datetime
import http.client
import logging
import os
import random
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedquilt import disk, enrolment
from fedquilt.core import FedquiltError, JobError, LinkError, StoreError
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.enrolment import Answer, Request
from fedquilt.http_url import split_http_url
from fedquilt.transport import mqtt_errors

log = logging.getLogger("fedquilt.enrol")

ANSWER_S: Final = 10.0
PAUSE_S: Final = (2.0, 60.0)  # pauses between attempts while waiting: the first and the longest
_NOT_YET, _EXPIRED = 9, 10  # OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED

Step = Literal["enrol", "renew", "keep"]


class Paths(NamedTuple):
    """Files of the board: /etc/fedquilt/{ca.crt,device.crt,device.key,token} where flash put them."""

    ca: Path
    cert: Path
    key: Path
    token: Path


class Held(NamedTuple):
    """Validity of the board's certificate, which fits its key."""

    begins: datetime.datetime
    ends: datetime.datetime


class Refused(JobError):
    """The endpoint refused; the message is its reason."""


Post = Callable[[str, Paths, str, Request, bool], Answer]  # url, files, path, request, with our certificate


def next_step(held: Held | None, token: bool, now: datetime.datetime) -> Step | None:
    """Step to take; None: nothing is possible. A token is an operator's wish to enrol (again)."""
    if token:
        return "enrol"
    if held is None or now >= held.ends:
        return None
    return "renew" if enrolment.due(held.begins, held.ends, now) else "keep"


def paths(settings: AgentSettings) -> Paths:
    """Paths of this board's identity, by its settings.

    Raises:
        JobError: they name no files for it.
    """
    broker, token = settings.broker, settings.enrol.token
    if broker.ca is None or broker.cert is None or broker.key is None:
        raise JobError("[broker] must name ca (given to the board), cert and key (made by enrolling): add them")
    key = Path(broker.key)
    return Paths(Path(broker.ca), Path(broker.cert), key, Path(token) if token else key.with_name("token"))


def enrol(settings: AgentSettings, now: datetime.datetime, post: Post | None = None) -> str:
    """Get, renew or keep this board's certificate; returns a sentence on what was done.

    Raises:
        JobError: a setting or file that cannot be used; Refused by the endpoint with nothing valid in hand.
        LinkError: the endpoint cannot be reached, or is not to be trusted.
        StoreError: a file cannot be written.
    """
    files, post = paths(settings), post or _post
    token = _token(files.token)
    key = own_key(files)
    held = _held(files, settings.device, key)
    step = next_step(held, token is not None, now)
    if step == "keep" and held is not None:
        return f"{settings.device} is enrolled, until {_day(held.ends)}"
    if step is None:
        ended, mend = "it has no certificate", ""
        if held is not None:
            ended = f"its certificate expired on {_day(held.ends)} by this board's clock, which says {_day(now)},"
            mend = "set the clock if it is wrong, else "
        raise JobError(
            f"{settings.device} cannot enrol: {ended} and no token is in {files.token}: {mend}`fedquilt enrol token "
            f"{settings.device}` on the operator's machine makes one"
        )
    if settings.enrol.url is None:
        raise JobError('no endpoint to enrol with: write url = "https://HOST:8884" under [enrol], or carry a request')
    request = Request(device=settings.device, csr=signing_request(key, settings.device), token=token)
    path = enrolment.ENROL if step == "enrol" else enrolment.RENEW
    try:
        answer = post(settings.enrol.url, files, path, request, step == "renew")
    except Refused as error:
        if step == "renew" or held is None or now >= held.ends:
            raise
        log.warning("the token in %s was refused (%s); the certificate in hand stays", files.token, error)
        return f"{settings.device} is enrolled, until {_day(held.ends)}"
    if answer.certificate is None:
        raise LinkError(f"{settings.enrol.url} answered without a certificate: is it `fedquilt enrol serve`?")
    ends = accept(settings, answer.certificate.encode())
    return f"{settings.device} is {'enrolled' if step == 'enrol' else 'renewed'}, until {_day(ends)}"


def wait(
    settings: AgentSettings,
    clock: Callable[[], datetime.datetime],
    pause: Callable[[float], None],
    post: Post | None = None,
) -> str:
    """Repeat `enrol` until the endpoint is reached. A refusal or a wrong setting ends the repetition.

    Raises:
        JobError, StoreError: as `enrol`.
    """
    patience_s, said = PAUSE_S[0], ""
    while True:
        try:
            return enrol(settings, clock(), post)
        except LinkError as error:
            if str(error) != said:
                said = str(error)
                log.warning("%s; trying again until it answers", error)
        pause(patience_s * random.uniform(0.5, 1.0))
        patience_s = min(patience_s * 2, PAUSE_S[1])


# -- the board's own files ------------------------------------------------------------------------


def own_key(files: Paths) -> ec.EllipticCurvePrivateKey:
    """The board's key; made if there is none, readable by its owner alone.

    Raises:
        JobError: a key file that holds no key of ours.
        StoreError: it cannot be read or written.
    """
    with disk.doing(f"look for {files.key}"):  # a key that cannot be seen may still exist
        held = files.key.exists()
    if not held:
        key = ec.generate_private_key(ec.SECP256R1())
        plain = serialization.NoEncryption()
        pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        with disk.doing(f"make {files.key.parent}"):
            files.key.parent.mkdir(parents=True, exist_ok=True)
        enrolment.keep(files.key, pem, 0o600)
        return key
    with disk.doing(f"read {files.key}"):
        pem = files.key.read_bytes()
        if os.stat(files.key).st_mode & 0o077:
            files.key.chmod(0o600)
            log.warning(
                "others could read %s: now only its owner can; if they may have, revoke and enrol anew", files.key
            )
    try:
        loaded = serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        loaded = None
    if not isinstance(loaded, ec.EllipticCurvePrivateKey) or not isinstance(loaded.curve, ec.SECP256R1):
        raise JobError(f"{files.key} holds no ECDSA P-256 key in PEM: remove it, and a new one is made")
    return loaded


def signing_request(key: ec.EllipticCurvePrivateKey, device: str) -> str:
    """PKCS#10 request for the common name `device`, PEM."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, device)])
    csr = x509.CertificateSigningRequestBuilder(subject).sign(key, hashes.SHA256())
    return csr.public_bytes(serialization.Encoding.PEM).decode()


def accept(settings: AgentSettings, pem: bytes) -> datetime.datetime:
    """Keep a certificate, if it is for this board's id and key and from its authority; then the token is deleted.

    Returns: end of its validity.

    Raises:
        JobError: it belongs to another board.
        StoreError: it cannot be written.
    """
    files = paths(settings)
    held = _parse(pem, files, settings.device, own_key(files))
    if isinstance(held, str):
        raise JobError(f"the certificate that came is not to be used: {held}")
    enrolment.keep(files.cert, pem, 0o644)
    with disk.doing(f"remove {files.token}"):
        files.token.unlink(missing_ok=True)
    return held.ends


def _token(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError):
        raise StoreError(f"the token {path} cannot be read: it is one line of text, mode 0600, this user's") from None
    return text or None


def _held(files: Paths, device: str, key: ec.EllipticCurvePrivateKey) -> Held | None:
    """Certificate on disk; None if there is none that could serve."""
    try:
        pem = files.cert.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{files.cert} cannot be read ({error.strerror}): check its owner") from None
    held = _parse(pem, files, device, key)
    if isinstance(held, str):
        log.warning("%s is of no use: %s", files.cert, held)
        return None
    return held


def _parse(pem: bytes, files: Paths, device: str, key: ec.EllipticCurvePrivateKey) -> Held | str:
    """Validity of a certificate that fits, or a sentence why it does not."""
    with disk.doing(f"read {files.ca}", when_full=""):
        authority = files.ca.read_bytes()
    try:
        ca = x509.load_pem_x509_certificate(authority)
    except (ValueError, x509.InvalidVersion):
        raise JobError(f"{files.ca} holds no certificate in PEM: it is the ca.crt of `fedquilt ca init`") from None
    try:
        cert = x509.load_pem_x509_certificate(pem)
        cert.verify_directly_issued_by(ca)
        name, public = enrolment.common_name(cert), cert.public_key()
    except (InvalidSignature, ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion):
        return f"it is damaged, or {files.ca} did not sign it"
    if name != device:
        return f"it is for {name!r}, and agent.toml says device = {device!r}"
    if public != key.public_key():
        return f"it is for another key than {files.key}"
    return Held(cert.not_valid_before_utc, cert.not_valid_after_utc)


def _day(at: datetime.datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M UTC")


# -- the endpoint ---------------------------------------------------------------------------------


def _post(url: str, files: Paths, path: str, request: Request, certified: bool) -> Answer:
    """Send one request over HTTPS, to a host that proves by `files.ca` to be `url`'s.

    Raises:
        Refused: the endpoint refused.
        LinkError: no answer, or an untrusted one.
        JobError: a URL, CA file, certificate or key that cannot be used.
    """
    host, port = _endpoint_address(url)
    try:
        context = ssl.create_default_context(cafile=str(files.ca))
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if certified:
            context.load_cert_chain(files.cert, files.key)
    except (ValueError, OSError) as error:
        raise JobError(f"[enrol] url = {url!r} or {files.ca} cannot be used: {mqtt_errors.why(error)}") from None
    connection = http.client.HTTPSConnection(host, port, timeout=ANSWER_S, context=context)
    try:
        connection.request("POST", path, msgspec.json.encode(request), {"Content-Type": "application/json"})
        response = connection.getresponse()
        status, body = response.status, response.read(enrolment.MAX_BODY + 1)
    except (OSError, http.client.HTTPException) as error:
        raise LinkError(_unreached(url, files, error)) from None
    finally:
        connection.close()
    try:
        answer = enrolment.decode(body, Answer)
    except FedquiltError as error:
        raise LinkError(f"{url} is no enrolment endpoint ({status}: {error}): check [enrol] url") from None
    if 400 <= status < 500:
        raise Refused(f"{url} refuses {request.device}: {answer.reason}")
    if status != 200:
        raise LinkError(f"{url} could not answer ({status}): {answer.reason}")
    return answer


def _endpoint_address(url: str) -> tuple[str, int]:
    with contextlib.suppress(ValueError):
        parts = split_http_url(url)
        if parts.scheme == "https" and parts.path in ("", "/"):
            return parts.hostname or "", parts.port or enrolment.PORT
    raise JobError(f"[enrol] url = {url!r} is no endpoint's address: write https://HOST[:PORT]")


def _unreached(url: str, files: Paths, error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in (_NOT_YET, _EXPIRED):
            now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
            return f"the certificate of {url} is out of date by this board's clock, which says {now}: set the clock"
        return f"{url} is not to be trusted ({error.verify_message}): check [enrol] url and {files.ca}"
    said = mqtt_errors.why(error)
    if "alert" in said and "expired" in said:
        return f"{url} says that {files.cert} has expired: put a new token into {files.token}"
    return (
        f"{url} cannot be reached ({said}): check the address, the network, and that `fedquilt enrol serve` runs there"
    )
