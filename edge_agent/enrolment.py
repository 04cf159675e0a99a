"""Enrolment of a device: obtains and renews its certificate, and explains failures.

The private key is created on the device and never leaves it. `enrol` may run at any time: `select_step` decides
whether anything is due. Only the authority's certificate in `broker.ca` is trusted. Certificates of the authority and
of servers are valid since 1970, so that a device whose clock is not set can still check all dates.

The agent's daemon does not import this module, which needs the cryptography library (`fedquilt[identity]`).
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

from fedquilt.core import FedquiltError, JobError, LinkError, Retry, StoreError
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.host import disk
from fedquilt.host.http_server import split_http_url
from fedquilt.security import enrolment
from fedquilt.security.enrolment import SigningRequest, SigningResponse
from fedquilt.transport.mqtt.broker import describe_exception

log = logging.getLogger("fedquilt.enrol")

RESPONSE_TIMEOUT_S: Final = 10.0
RETRY: Final = Retry(2.0, 60.0, jitter=0.5)  # pauses of many devices flashed at once, while the endpoint is unreachable
_NOT_YET, _EXPIRED = 9, 10  # OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED

Step = Literal["enrol", "renew", "keep"]


class CredentialPaths(NamedTuple):
    ca: Path
    cert: Path
    key: Path
    token: Path


class CertificateValidity(NamedTuple):
    begins: datetime.datetime
    ends: datetime.datetime


class EnrolmentRefusedError(JobError): ...


# Arguments: URL, credentials, path, request, and whether to send this device's certificate.
Post = Callable[[str, CredentialPaths, str, SigningRequest, bool], SigningResponse]


def select_step(validity: CertificateValidity | None, has_token: bool, time: datetime.datetime) -> Step | None:
    """Return the enrolment step due, or None if none is possible. With a token the step is always "enrol"."""
    if has_token:
        return "enrol"
    if validity is None or time >= validity.ends:
        return None
    return "renew" if enrolment.is_renewal_due(validity.begins, validity.ends, time) else "keep"


def paths_from_settings(settings: AgentSettings) -> CredentialPaths:
    broker, token = settings.broker, settings.enrol.token
    if broker.ca is None or broker.cert is None or broker.key is None:
        raise JobError(
            "[broker] lacks ca, cert or key: name the authority's ca.crt, and two files for enrolment to make"
        )
    key = Path(broker.key)
    return CredentialPaths(Path(broker.ca), Path(broker.cert), key, Path(token) if token else key.with_name("token"))


def enrol(settings: AgentSettings, now: datetime.datetime, post: Post | None = None) -> str:
    """Obtain, renew or keep the device's certificate. Return a sentence about the outcome.

    Raise JobError if enrolment is impossible or refused, and LinkError if the endpoint cannot be reached.
    """
    files, post = paths_from_settings(settings), post or _post_request
    token = _read_token(files.token)
    key = load_or_create_key(files)
    validity = _read_certificate(files, settings.device, key)
    step = select_step(validity, token is not None, now)
    if step == "keep" and validity is not None:
        return f"{settings.device} is enrolled, until {_format_time(validity.ends)}"
    if step is None:
        problem, hint = "there is no certificate", ""
        if validity is not None:
            problem = f"the certificate expired on {_format_time(validity.ends)} (now {_format_time(now)})"
            hint = "set the clock if wrong, else "
        raise JobError(
            f"{settings.device} cannot enrol: {problem} and {files.token} has no token: {hint}create one with "
            f"`fedquilt identity token {settings.device}` on the operator's machine"
        )
    if settings.enrol.url is None:
        raise JobError(
            '[enrol] url is missing: write url = "https://HOST:8884" under [enrol], or have a request signed by hand '
            "(`fedquilt identity request`)"
        )
    request = SigningRequest(device=settings.device, csr=create_signing_request(key, settings.device), token=token)
    path = enrolment.ENROL if step == "enrol" else enrolment.RENEW
    try:
        response = post(settings.enrol.url, files, path, request, step == "renew")
    except EnrolmentRefusedError as error:
        if step == "renew" or validity is None or now >= validity.ends:
            raise
        log.warning("token in %s was refused (%s), keeping the present certificate", files.token, error)
        return f"{settings.device} is enrolled, until {_format_time(validity.ends)}"
    if response.certificate is None:
        raise LinkError(
            f"{settings.enrol.url} answered without a certificate: check that `fedquilt identity serve` runs there"
        )
    ends = install_certificate(settings, response.certificate.encode())
    note = f". {enrolment.OTHER_REVOKED_NOTE}" if step == "enrol" and response.is_other_revoked else ""
    return f"{settings.device} is {'enrolled' if step == 'enrol' else 'renewed'}, until {_format_time(ends)}{note}"


def enrol_with_retries(
    settings: AgentSettings,
    clock: Callable[[], datetime.datetime],
    pause: Callable[[float], None],
    post: Post | None = None,
) -> str:
    """Call `enrol` until the endpoint is reachable. Return a sentence about the outcome."""
    attempts, last_error = 0, ""
    while True:
        try:
            return enrol(settings, clock(), post)
        except LinkError as error:
            if str(error) != last_error:
                last_error = str(error)
                log.warning("%s; trying again until the endpoint responds", error)
        pause(RETRY.delay_s(attempts, random.random()))
        attempts += 1


# -- the board's own files ------------------------------------------------------------------------


def load_or_create_key(files: CredentialPaths) -> ec.EllipticCurvePrivateKey:
    """Return the device's private key. A missing key is created, readable by its owner only."""
    with disk.disk_errors(f"look for {files.key}"):  # an unreadable key may still exist
        has_key = files.key.exists()
    if not has_key:
        key = ec.generate_private_key(ec.SECP256R1())
        plain = serialization.NoEncryption()
        pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        with disk.disk_errors(f"make {files.key.parent}"):
            files.key.parent.mkdir(parents=True, exist_ok=True)
        enrolment.write_file_with_mode(files.key, pem, 0o600)
        return key
    with disk.disk_errors(f"read {files.key}"):
        pem = files.key.read_bytes()
        if os.stat(files.key).st_mode & 0o077:
            files.key.chmod(0o600)
            log.warning(
                (
                    "key %s was readable by other users, permissions corrected: if the key may have been read, "
                    "revoke and enrol again"
                ),
                files.key,
            )
    try:
        private_key = serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        private_key = None
    if not isinstance(private_key, ec.EllipticCurvePrivateKey) or not isinstance(private_key.curve, ec.SECP256R1):
        raise JobError(f"{files.key} has no ECDSA P-256 key in PEM: delete the file to create a new key")
    return private_key


def create_signing_request(key: ec.EllipticCurvePrivateKey, device: str) -> str:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, device)])
    csr = x509.CertificateSigningRequestBuilder(subject).sign(key, hashes.SHA256())
    return csr.public_bytes(serialization.Encoding.PEM).decode()


def install_certificate(settings: AgentSettings, pem: bytes) -> datetime.datetime:
    """Store a certificate for this device and delete the token. Return the expiry, or raise JobError."""
    files = paths_from_settings(settings)
    validity = _validity_or_reason(pem, files, settings.device, load_or_create_key(files))
    if isinstance(validity, str):
        raise JobError(f"received certificate is unusable: {validity}")
    enrolment.write_file_with_mode(files.cert, pem, 0o644)
    with disk.disk_errors(f"remove {files.token}"):
        files.token.unlink(missing_ok=True)
    return validity.ends


def _read_token(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError):
        raise StoreError(
            f"token {path} cannot be read: write one line of text, owned by this user with mode 0600"
        ) from None
    return text or None


def _read_certificate(
    files: CredentialPaths, device: str, key: ec.EllipticCurvePrivateKey
) -> CertificateValidity | None:
    try:
        pem = files.cert.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{files.cert} cannot be read ({error.strerror}): check its owner") from None
    validity = _validity_or_reason(pem, files, device, key)
    if isinstance(validity, str):
        log.warning("certificate %s is unusable: %s", files.cert, validity)
        return None
    return validity


def _validity_or_reason(
    pem: bytes, files: CredentialPaths, device: str, key: ec.EllipticCurvePrivateKey
) -> CertificateValidity | str:
    with disk.disk_errors(f"read {files.ca}", full_disk_fix=""):
        authority = files.ca.read_bytes()
    try:
        ca = x509.load_pem_x509_certificate(authority)
    except (ValueError, x509.InvalidVersion):
        raise JobError(
            f"{files.ca} contains no certificate in PEM: copy the ca.crt of `fedquilt identity init` there"
        ) from None
    try:
        cert = x509.load_pem_x509_certificate(pem)
        cert.verify_directly_issued_by(ca)
        name, public = enrolment.common_name(cert), cert.public_key()
    except (InvalidSignature, ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion):
        return f"damaged, or not signed by {files.ca}"
    if name != device:
        return f"issued to {name!r}, and agent.toml has device = {device!r}"
    if public != key.public_key():
        return f"issued for another key than {files.key}"
    return CertificateValidity(cert.not_valid_before_utc, cert.not_valid_after_utc)


def _format_time(time: datetime.datetime) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC")


# -- the endpoint ---------------------------------------------------------------------------------


def _post_request(
    url: str, files: CredentialPaths, path: str, request: SigningRequest, with_certificate: bool
) -> SigningResponse:
    host, port = _endpoint_address(url)
    try:
        context = ssl.create_default_context(cafile=str(files.ca))
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if with_certificate:
            context.load_cert_chain(files.cert, files.key)
    except (ValueError, OSError) as error:
        raise JobError(f"[enrol] url = {url!r} or {files.ca} cannot be used: {describe_exception(error)}") from None
    connection = http.client.HTTPSConnection(host, port, timeout=RESPONSE_TIMEOUT_S, context=context)
    try:
        connection.request("POST", path, msgspec.json.encode(request), {"Content-Type": "application/json"})
        response = connection.getresponse()
        status, body = response.status, response.read(enrolment.MAX_BODY_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        raise LinkError(_describe_connection_error(url, files, error)) from None
    finally:
        connection.close()
    try:
        reply = enrolment.decode_message(body, SigningResponse)
    except FedquiltError as error:
        raise LinkError(f"{url} is not an enrolment endpoint ({status}: {error}): check [enrol] url") from None
    if 400 <= status < 500:
        raise EnrolmentRefusedError(f"{url} refuses {request.device}: {reply.reason}")
    if status != 200:
        raise LinkError(f"{url} failed with status {status}: {reply.reason}")
    return reply


def _endpoint_address(url: str) -> tuple[str, int]:
    with contextlib.suppress(ValueError):
        parts = split_http_url(url)
        if parts.scheme == "https" and parts.path in ("", "/"):
            return parts.hostname or "", parts.port or enrolment.PORT
    raise JobError(f"[enrol] url = {url!r} is not the address of an endpoint: write https://HOST[:PORT]")


def _describe_connection_error(url: str, files: CredentialPaths, error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in (_NOT_YET, _EXPIRED):
            clock_time = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
            return f"certificate of {url} is not valid at {clock_time}, this device's time: set the clock"
        return f"{url} is not trusted ({error.verify_message}): check [enrol] url and {files.ca}"
    description = describe_exception(error)
    if "alert" in description and "expired" in description:
        return f"{url} refused {files.cert} as expired: put a new token into {files.token}"
    return (
        f"{url} cannot be reached ({description}): check the address, the network, and `fedquilt identity serve` there"
    )
