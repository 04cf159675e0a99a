"""Certificate authority of a fleet: a folder with key, certificate, revocation list and register.

All keys are ECDSA keys on P-256. Certificates restrict their use: certificates of devices and observers to clients, a
server's to servers, so that a device cannot impersonate the broker or the coordinator. Certificates of the authority,
servers and the coordinator are valid from 1970, so that a board whose clock shows 1970 can verify them. All other parts
of the verification (chain, name, use) are always required.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedquilt.core import JobError, SiteRight, StoreError, WireError
from fedquilt.edge_agent.upgrade import archive
from fedquilt.host import disk
from fedquilt.security import authenticated_link, certificates, enrolment, handshake
from fedquilt.tools.identity.register import CertificateRegister, IssuedCertificate, Kind, format_time


def key_to_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def certificate_to_pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


def subject_name(name: str, unit: str | None = None) -> x509.Name:
    common_name = x509.NameAttribute(NameOID.COMMON_NAME, name)
    return x509.Name(
        [common_name] if unit is None else [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit), common_name]
    )


def to_datetime(time_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(time_s), datetime.timezone.utc)


def key_usage(signs_certificates: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def authority_key_id(cert: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    subject_key_id = cert.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(subject_key_id)


def to_general_name(host: str) -> x509.GeneralName:
    """Return a host's name or IP address as a certificate's general name. Raise JobError if it is neither."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not re.match(r"(?!-)[A-Za-z0-9-]{1,63}(\.(?!-)[A-Za-z0-9-]{1,63})*\Z", host):
        raise JobError(f"--host {host!r} is neither a host name nor an IP address")
    return x509.DNSName(host)


DAY_S: Final = 86400.0
EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
AUTHORITY_DAYS: Final = 3650
VALIDITY_DAYS: dict[Kind, int] = {"device": 365, "coordinator": 730, "server": 730, "observer": 365, "site": 365}
# the broker grants this user the coordinator's rights
RESERVED_NAMES: Final = frozenset({certificates.COORDINATOR})
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}\Z")
_CLIENT, _SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
_EXTENDED_KEY_USAGES = {
    "device": [_CLIENT],
    "coordinator": [_CLIENT, _SERVER],  # client of the broker, and server of the handshake
    "server": [_SERVER],
    "observer": [_CLIENT],
    "site": [_CLIENT],
}


def parse_signing_request(pem: str, device: str) -> ec.EllipticCurvePublicKey:
    """Return the key of a signing request, or raise JobError if it is invalid or for another device."""
    try:
        csr = x509.load_pem_x509_csr(pem.encode())
        is_valid, key, name = csr.is_signature_valid, csr.public_key(), enrolment.common_name(csr)
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature, x509.InvalidVersion):
        fix = "create one with `fedquilt identity request`"
        raise JobError(f"signing request is damaged or no PKCS#10 in PEM: {fix}") from None
    if not is_valid:
        raise JobError("signing request was modified (invalid signature): copy it again")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise JobError("signing request has no ECDSA P-256 key: create it with `fedquilt identity request`")
    if name != device:
        raise JobError(f"signing request is of {name!r}, not of {device}: create it on {device}")
    return key


class CertificateAuthority:
    """Certificate authority in a folder of `create`. Raises StoreError for missing or damaged files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / "ca.key").is_file() or not (folder / "ca.crt").is_file():
            raise StoreError(f"no authority in {folder}: create one with `fedquilt identity init --ca {folder}`")
        with disk.disk_errors(f"read {folder}"):
            key, cert = (folder / "ca.key").read_bytes(), (folder / "ca.crt").read_bytes()
        try:
            self.cert = x509.load_pem_x509_certificate(cert)
            loaded = serialization.load_pem_private_key(key, None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise StoreError(f"ca.key or ca.crt in {folder} is damaged: restore the folder from a backup") from None
        if not isinstance(loaded, ec.EllipticCurvePrivateKey) or loaded.public_key() != self.cert.public_key():
            raise StoreError(f"ca.key and ca.crt in {folder} do not match: restore the folder from a backup")
        self._key = loaded
        self.register = CertificateRegister(folder / "register.db")

    @classmethod
    def create(cls, folder: Path, name: str, now_s: float) -> CertificateAuthority:
        """Create an authority and its revocation list in a folder, with a key that only this user can read.

        Raise JobError if the folder has an authority, or the name is invalid.
        """
        if (folder / "ca.key").exists():
            raise JobError(f"{folder} has an authority already, which signed the fleet's certificates: keep it")
        if not 0 < len(name) <= 64 or not name.isprintable():
            raise JobError(f"authority's name {name!r} is invalid: use up to 64 printable characters")
        with disk.disk_errors(f"create {folder}"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
        key, subject = ec.generate_private_key(ec.SECP256R1()), subject_name(name)
        builder = (
            x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(EPOCH)
            .not_valid_after(to_datetime(now_s + AUTHORITY_DAYS * DAY_S))
            .add_extension(x509.BasicConstraints(True, 0), critical=True)
            .add_extension(key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        enrolment.write_file_with_mode(folder / "ca.crt", certificate_to_pem(builder.sign(key, hashes.SHA256())), 0o644)
        enrolment.write_file_with_mode(folder / "ca.key", key_to_pem(key), 0o600)
        authority = cls(folder)
        authority.write_crl(now_s)
        return authority

    # -- signing ----------------------------------------------------------------------------------

    def require_enrollable(self, device: str, key: ec.EllipticCurvePublicKey, now_s: float) -> None:
        """Raise JobError if a device may not have a certificate for this key.

        The name must not be reserved, a site's or of another kind of certificate, and the key must not be revoked.
        """
        certs = self.register.list_certificates(device)
        if device in RESERVED_NAMES or any(cert.kind != "device" for cert in certs):
            raise JobError(f"{device!r} is the name of a server, site, observer or the coordinator: rename the device")
        if (
            site := next((site for site, site_right in self.valid_sites(now_s) if site_right.authorizes(device)), None)
        ) is not None:
            raise JobError(f"{device!r} belongs to site {site}: rename the device, or enrol it at the site")
        if any(cert.key_id == enrolment.key_fingerprint(key) and cert.revoked_s is not None for cert in certs):
            raise JobError(
                f"this key of {device} was revoked: delete device.key on the board, which then creates another"
            )

    def sign_certificate(
        self,
        name: str,
        kind: Kind,
        key: ec.EllipticCurvePublicKey,
        now_s: float,
        *,
        hosts: Sequence[str] = (),
        days: float | None = None,
        site_right: SiteRight | None = None,
    ) -> IssuedCertificate:
        """Sign a certificate for a key and register it. The caller must hold `register.transaction`.

        It is valid for `days` (default VALIDITY_DAYS), at most as long as the authority's. Raise JobError if the name
        or a host is invalid.
        """
        if not _NAME.match(name):
            fix = "use up to 64 of a-z, 0-9, '.', '_' and '-', beginning with a-z or 0-9"
            raise JobError(f"name {name!r} is invalid: {fix}")
        checked_by_boards = kind in ("server", "coordinator")
        valid_from = EPOCH if checked_by_boards else to_datetime(now_s - DAY_S)  # the clock of a broker may be slow
        valid_until = min(
            to_datetime(now_s + (VALIDITY_DAYS[kind] if days is None else days) * DAY_S), self.cert.not_valid_after_utc
        )
        builder = (
            x509.CertificateBuilder(
                self.cert.subject,
                subject_name(name, authenticated_link.OBSERVER if kind == "observer" else None),
                key,
                x509.random_serial_number(),
            )
            .not_valid_before(valid_from)
            .not_valid_after(valid_until)
            .add_extension(x509.BasicConstraints(False, None), critical=True)
            .add_extension(key_usage(), critical=True)
            .add_extension(x509.ExtendedKeyUsage(_EXTENDED_KEY_USAGES[kind]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(authority_key_id(self.cert), critical=False)
        )
        names = [to_general_name(host) for host in hosts]
        if site_right is not None:
            names.append(x509.UniformResourceIdentifier(handshake.uri_from_right(site_right)))
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        cert = builder.sign(self._key, hashes.SHA256())
        certificate = IssuedCertificate(
            serial=f"{cert.serial_number:x}",
            name=name,
            kind=kind,
            key_id=enrolment.key_fingerprint(key),
            issued_s=now_s,
            ends_s=valid_until.timestamp(),
            revoked_s=None,
            pem=certificate_to_pem(cert).decode(),
        )
        self.register.add_certificate(certificate)
        return certificate

    def next_upgrade_number(self, now_s: float) -> int:
        """Reserve the number of the next signed upgrade, greater than all earlier numbers.

        The number is at least the seconds since 1970, so that it also grows in a folder restored from a backup.
        """
        file = self.folder / "upgrades"
        with self.register.transaction():
            with disk.disk_errors(f"read {file}"):
                text = file.read_text(encoding="ascii", errors="replace").strip() if file.is_file() else "0"
            last_number = int(text) if re.fullmatch(r"[0-9]{1,15}", text) else 0
            number = max(last_number + 1, int(now_s))
            enrolment.write_file_with_mode(file, f"{number}\n".encode(), 0o600)
        return number

    def sign_upgrade(self, manifest: bytes) -> bytes:
        return self._key.sign(archive.SIGNED_PREFIX + manifest, ec.ECDSA(hashes.SHA256()))

    def issue_with_new_key(
        self,
        name: str,
        kind: Kind,
        now_s: float,
        *,
        hosts: Sequence[str] = (),
        days: float | None = None,
        site_right: SiteRight | None = None,
    ) -> tuple[IssuedCertificate, bytes]:
        """Return a new certificate and its new private key in PEM, for all kinds except devices.

        Raise JobError if another kind has the name, or a device of `site_right` has a certificate or another site.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        with self.register.transaction():
            other_kind = next((cert.kind for cert in self.register.list_certificates(name) if cert.kind != kind), kind)
            if "device" in (other_kind, kind) or other_kind != kind:
                cert = "an observer" if other_kind == "observer" else f"a {other_kind}"
                raise JobError(f"{name!r} is {cert}'s name, by which the broker grants rights: choose an unused name")
            if (name in RESERVED_NAMES) != (kind == "coordinator"):
                raise JobError(f"only the coordinator is named {certificates.COORDINATOR!r}: choose another name")
            if site_right is not None:
                self._require_free_boards(name, site_right, now_s)
            certificate = self.sign_certificate(
                name, kind, key.public_key(), now_s, hosts=hosts, days=days, site_right=site_right
            )
            return certificate, key_to_pem(key)

    def _require_free_boards(self, name: str, site_right: SiteRight, now_s: float) -> None:
        certs = self.register.list_valid_certificates(now_s)
        if (conflicting := next((cert for cert in certs if site_right.authorizes(cert.name)), None)) is not None:
            raise JobError(
                f"site {name} cannot have {conflicting.name}, which has its own certificate ({conflicting.kind}): "
                "narrow --boards"
            )
        for site, other_right in self.valid_sites(now_s):
            if site != name and site_right.overlaps(other_right):
                raise JobError(
                    f"sites {name} and {site} have common boards: narrow --boards, or `fedquilt identity revoke {site}`"
                )

    def valid_sites(self, now_s: float) -> list[tuple[str, SiteRight]]:
        certs = self.register.list_valid_certificates(now_s, kind="site")
        return [(cert.name, _read_site_right(cert.pem)) for cert in certs]

    def valid_observers(self, now_s: float) -> list[str]:
        return sorted({cert.name for cert in self.register.list_valid_certificates(now_s, kind="observer")})

    # -- revoking ---------------------------------------------------------------------------------

    def revoke_name(self, name: str, now_s: float) -> list[IssuedCertificate]:
        """Revoke a name's valid certificates and return them, delete its tokens, and write crl.pem.

        Raise JobError if the name never had a certificate or token.
        """
        with self.register.transaction():
            deleted_count = self.register.delete_tokens(name)
            if not self.register.list_certificates(name) and not deleted_count:
                raise JobError(f"{name!r} has no certificate or token: see `fedquilt identity list`")
            revoked = self.register.list_valid_certificates(now_s, name=name)
            for cert in revoked:
                self.register.revoke_certificate(cert.serial, now_s)
        self.write_crl(now_s)
        return revoked

    def write_crl(self, now_s: float) -> Path:
        """Write crl.pem, the list of revoked certificates that have not expired. Return its path.

        The list is valid as long as the authority. Otherwise a broker with an old list would refuse all devices.
        """
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.cert.subject)
            .last_update(to_datetime(now_s - DAY_S))  # the clock of a broker may be slow
            .next_update(self.cert.not_valid_after_utc)
            .add_extension(x509.CRLNumber(int(now_s * 1000)), critical=False)
            .add_extension(authority_key_id(self.cert), critical=False)
        )
        for cert in self.register.list_certificates():
            if cert.revoked_s is not None and cert.ends_s > now_s:
                entry = x509.RevokedCertificateBuilder(int(cert.serial, 16), to_datetime(cert.revoked_s)).build()
                builder = builder.add_revoked_certificate(entry)
        path = self.folder / "crl.pem"
        pem = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        enrolment.write_file_with_mode(path, pem, 0o644)
        return path


def _read_site_right(pem: str) -> SiteRight:
    names = x509.load_pem_x509_certificate(pem.encode()).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    uris: list[str] = names.value.get_values_for_type(x509.UniformResourceIdentifier)
    try:
        return handshake.right_from_uri(uris[0])
    except (IndexError, WireError) as error:
        raise StoreError(f"a site's certificate in register.db is damaged ({error}): restore a backup") from None


def describe_state(certificate: IssuedCertificate, now_s: float) -> str:
    if certificate.revoked_s is not None:
        return f"revoked {format_time(certificate.revoked_s)}"
    return f"{'expired' if certificate.ends_s <= now_s else 'valid until'} {format_time(certificate.ends_s)}"


def clock_s() -> float:
    return time.time()
