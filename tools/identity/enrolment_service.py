"""Decisions on enrolment and renewal, without network access."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric import ec

from fedquilt.core import FedquiltError, JobError
from fedquilt.security.enrolment import SigningRequest, SigningResponse, is_renewal_due, key_fingerprint
from fedquilt.tools.identity.authority import CertificateAuthority, clock_s, parse_signing_request
from fedquilt.tools.identity.register import IssuedCertificate, format_time

log = logging.getLogger("fedquilt.enrol")


class EnrolmentService:
    def __init__(
        self, authority: CertificateAuthority, days: float | None = None, clock: Callable[[], float] = clock_s
    ) -> None:
        self.authority, self._days, self._clock = authority, days, clock

    def enrol_device(self, request: SigningRequest) -> IssuedCertificate:
        """Sign a certificate and revoke those of other keys, or return the earlier one of the same key.

        Raises:
            JobError: If the token or the request is refused.
        """
        now_s, register = self._clock(), self.authority.register
        if request.token is None:
            raise JobError("enrolling takes a token: ask the operator for one (`fedquilt identity token`)")
        key = parse_signing_request(request.csr, request.device)
        own = key_fingerprint(key)
        with register.transaction():
            token = register.redeem_token(request.token, request.device, own, now_s)
            if isinstance(token, str):
                raise JobError(token)
            # only the holder of a token learns who has the name
            self.authority.require_enrollable(request.device, key, now_s)
            valid = _valid_certificates(register.list_certificates(request.device), now_s)
            if token.used_s is not None and (again := [one for one in valid if one.key_id == own]):
                return again[-1]  # the answer to the first time was lost
            if token.used_s is not None:
                raise JobError("the certificate of this token has ended: ask the operator for another token")
            if not token.is_exact and any(one.key_id != own for one in valid):
                raise JobError(
                    f"{request.device} is enrolled with another key: if that board is gone, revoke it (`fedquilt "
                    f"identity revoke {request.device}`) or give a token for this very id; if not, give this "
                    "board another id"
                )
            return self._sign_and_revoke_others(request.device, key, now_s)

    def renew_certificate(self, request: SigningRequest, serial: str | None) -> IssuedCertificate:
        """Sign a certificate for the holder of certificate `serial`, or return that one if not yet due.

        Raises:
            JobError: If the certificate is missing, revoked, expired or another device's, or the request is refused.
        """
        now_s, register = self._clock(), self.authority.register
        with register.transaction():
            held = None if serial is None else register.find_by_serial(serial)
            if held is None or held.kind != "device":
                raise JobError("renewing takes the device's own certificate: enrol with a token instead")
            if held.name != request.device:
                raise JobError(f"{held.name} cannot renew the certificate of {request.device}")
            if held.revoked_s is not None:
                raise JobError(
                    f"the certificate of {held.name} was revoked at {format_time(held.revoked_s)}: enrol it anew"
                )
            key = parse_signing_request(request.csr, request.device)
            own = key_fingerprint(key)
            if own != held.key_id:
                raise JobError(f"{held.name} renews with the key it has: with a new key it enrols by a token")
            self.authority.require_enrollable(held.name, key, now_s)
            valid = [
                one for one in _valid_certificates(register.list_certificates(held.name), now_s) if one.key_id == own
            ]
            if not valid:
                raise JobError(f"the certificate of {held.name} expired at {format_time(held.ends_s)}: enrol it anew")
            newest = valid[-1]
            begins, ends = (datetime.datetime.fromtimestamp(s, datetime.timezone.utc) for s in newest[4:6])
            if not is_renewal_due(begins, ends, datetime.datetime.fromtimestamp(now_s, datetime.timezone.utc)):
                return newest
            made = self.authority.sign_certificate(held.name, "device", key, now_s, days=self._days)
        log.info("renewed %s, certificate until %s", made.name, format_time(made.ends_s))
        return made

    def _sign_and_revoke_others(self, device: str, key: ec.EllipticCurvePublicKey, now_s: float) -> IssuedCertificate:
        others = [
            one
            for one in _valid_certificates(self.authority.register.list_certificates(device), now_s)
            if one.key_id != key_fingerprint(key)
        ]
        for one in others:
            self.authority.register.revoke_certificate(one.serial, now_s)
        made = self.authority.sign_certificate(device, "device", key, now_s, days=self._days)
        if others:
            self.authority.write_crl(now_s)
            log.warning("%s has a new key: its former certificate is revoked, give brokers the new crl.pem", device)
        log.info("enrolled %s, certificate until %s", device, format_time(made.ends_s))
        return made

    def sign_request(self, csr: str, device: str) -> IssuedCertificate:
        """Sign an approved request without a token, and revoke the device's certificates of other keys.

        Raises:
            JobError: If the request is refused.
        """
        now_s, key = self._clock(), parse_signing_request(csr, device)
        with self.authority.register.transaction():
            self.authority.require_enrollable(device, key, now_s)
            return self._sign_and_revoke_others(device, key, now_s)


def make_enrolment_response(decide: Callable[[], IssuedCertificate], who: str) -> tuple[int, SigningResponse]:
    """Return the HTTP status and body for the outcome of `decide`, and log a refusal."""
    try:
        return 200, SigningResponse(certificate=decide().pem)
    except JobError as error:
        log.warning("refused %s: %s", who, error)
        return 403, SigningResponse(reason=str(error))
    except FedquiltError as error:
        log.error("%s got no certificate: %s", who, error)
        return 500, SigningResponse(reason="the enrolment endpoint cannot write its register: see its log")


def _valid_certificates(issued: list[IssuedCertificate], now_s: float) -> list[IssuedCertificate]:
    return [one for one in issued if one.revoked_s is None and one.ends_s > now_s]
