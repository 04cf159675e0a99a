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
from fedquilt.security import authenticated_link, enrolment, handshake
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


def crl_distribution_points(url: str) -> x509.CRLDistributionPoints:
    name = x509.UniformResourceIdentifier(url)
    return x509.CRLDistributionPoints([x509.DistributionPoint([name], None, None, None)])


def to_general_name(host: str) -> x509.GeneralName:
    """Return the name or IP address of a host as a certificate's general name."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not re.match(r"(?!-)[A-Za-z0-9-]{1,63}(\.(?!-)[A-Za-z0-9-]{1,63})*\Z", host):
        raise JobError(f"{host!r} is neither a host's name nor an IP address")
    return x509.DNSName(host)


DAY_S: Final = 86400.0
EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
AUTHORITY_DAYS: Final = 3650
VALIDITY_DAYS: dict[Kind, int] = {"device": 365, "coordinator": 730, "server": 730, "observer": 365, "site": 365}
# the broker grants this user the coordinator's rights
RESERVED_NAMES: Final = frozenset({authenticated_link.COORDINATOR})
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
    """Return the public key of a device's signing request."""
    try:
        csr = x509.load_pem_x509_csr(pem.encode())
        is_valid, key, name = csr.is_signature_valid, csr.public_key(), enrolment.common_name(csr)
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature, x509.InvalidVersion):
        raise JobError("this is no signing request (PKCS#10, PEM): `fedquilt identity request` makes one") from None
    if not is_valid:
        raise JobError("the signing request was changed on its way: its signature does not fit it")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise JobError("the signing request has another key than ECDSA P-256: let `fedquilt identity request` make it")
    if name != device:
        raise JobError(f"the signing request is for {name!r}, not for {device}: each device asks for itself")
    return key


class CertificateAuthority:
    """Certificate authority in an existing folder (made by `create`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / "ca.key").is_file() or not (folder / "ca.crt").is_file():
            raise StoreError(f"no authority in {folder}: `fedquilt identity init --ca {folder}` makes one")
        with disk.disk_errors(f"read {folder}"):
            key, cert = (folder / "ca.key").read_bytes(), (folder / "ca.crt").read_bytes()
        try:
            self.cert = x509.load_pem_x509_certificate(cert)
            loaded = serialization.load_pem_private_key(key, None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise StoreError(f"ca.key or ca.crt in {folder} is damaged: restore the folder from a copy") from None
        if not isinstance(loaded, ec.EllipticCurvePrivateKey) or loaded.public_key() != self.cert.public_key():
            raise StoreError(f"ca.key and ca.crt in {folder} do not belong together: restore the folder from a copy")
        self._key = loaded
        self.register = CertificateRegister(folder / "register.db")

    @classmethod
    def create(cls, folder: Path, name: str, now_s: float, crl_url: str | None = None) -> CertificateAuthority:
        """Create an authority, with its key readable only by the current user."""
        if (folder / "ca.key").exists():
            raise JobError(f"{folder} holds an authority already: every certificate of the fleet hangs on it")
        if not 0 < len(name) <= 64 or not name.isprintable():
            raise JobError(f"{name!r} is no name for an authority: up to 64 printable characters")
        if crl_url is not None and not re.match(r"https?://[!-~]{1,200}\Z", crl_url):
            raise JobError(f"{crl_url!r} is no address of a revocation list: write http://HOST/crl.pem")
        with disk.disk_errors(f"make {folder}"):
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
        if crl_url is not None:
            builder = builder.add_extension(crl_distribution_points(crl_url), critical=False)
        enrolment.write_file_with_mode(folder / "ca.crt", certificate_to_pem(builder.sign(key, hashes.SHA256())), 0o644)
        enrolment.write_file_with_mode(folder / "ca.key", key_to_pem(key), 0o600)
        authority = cls(folder)
        authority.write_crl(now_s)
        return authority

    @property
    def crl_url(self) -> str | None:
        try:
            points = self.cert.extensions.get_extension_for_class(x509.CRLDistributionPoints).value
        except x509.ExtensionNotFound:
            return None
        return str(next(iter(points)).full_name[0].value)  # as `create` wrote it

    # -- signing ----------------------------------------------------------------------------------

    def require_enrollable(self, device: str, key: ec.EllipticCurvePublicKey, now_s: float) -> None:
        """Raise an error if a device may not have a certificate for a key."""
        certs = self.register.list_certificates(device)
        if device in RESERVED_NAMES or any(cert.kind != "device" for cert in certs):
            raise JobError(
                f"{device!r} is no device's name here, but the coordinator's or a server's: rename the device"
            )
        if (
            site := next((site for site, site_right in self.valid_sites(now_s) if site_right.authorizes(device)), None)
        ) is not None:
            raise JobError(f"{device!r} is a name of a board of site {site}: rename the device, or enrol it there")
        if any(cert.key_id == enrolment.key_fingerprint(key) and cert.revoked_s is not None for cert in certs):
            raise JobError(
                f"this key of {device} was revoked: remove device.key on the board, which then makes another"
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
        """Sign a certificate for a key and add it to the register, within `register.transaction`."""
        if not _NAME.match(name):
            raise JobError(f"{name!r} is no name: up to 64 of a-z, 0-9, '.', '_' and '-', beginning with a-z or 0-9")
        checked_by_boards = kind in ("server", "coordinator")
        valid_from = EPOCH if checked_by_boards else to_datetime(now_s - DAY_S)  # the clock of a broker may be slow
        valid_until = min(
            to_datetime(now_s + (VALIDITY_DAYS[kind] if days is None else days) * DAY_S),
            self.cert.not_valid_after_utc,
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
        if self.crl_url is not None:
            builder = builder.add_extension(crl_distribution_points(self.crl_url), critical=False)
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
        """Return a new certificate and its new private key in PEM, for all kinds except devices."""
        key = ec.generate_private_key(ec.SECP256R1())
        with self.register.transaction():
            other_kind = next((cert.kind for cert in self.register.list_certificates(name) if cert.kind != kind), kind)
            if "device" in (other_kind, kind) or other_kind != kind:
                cert = "an observer" if other_kind == "observer" else f"a {other_kind}"
                raise JobError(
                    f"{name!r} is {cert}'s name, and the broker grants rights by name: take a name that nobody has"
                )
            if (name in RESERVED_NAMES) != (kind == "coordinator"):
                raise JobError(
                    f"the name {authenticated_link.COORDINATOR!r} and the coordinator's rights belong together"
                )
            if site_right is not None:
                self._require_free_boards(name, site_right, now_s)
            certificate = self.sign_certificate(
                name, kind, key.public_key(), now_s, hosts=hosts, days=days, site_right=site_right
            )
            return certificate, key_to_pem(key)

    def _require_free_boards(self, name: str, site_right: SiteRight, now_s: float) -> None:
        valid_certs = (
            cert for cert in self.register.list_certificates() if cert.revoked_s is None and cert.ends_s > now_s
        )
        if (conflicting := next((cert for cert in valid_certs if site_right.authorizes(cert.name)), None)) is not None:
            raise JobError(
                f"{name} cannot speak for {conflicting.name}, which is a {conflicting.kind} here: narrow --boards"
            )
        for site, other_right in self.valid_sites(now_s):
            if site != name and site_right.overlaps(other_right):
                raise JobError(
                    f"{name} and {site} could both speak for one board: give each board to one site (--boards), or "
                    f"`fedquilt identity revoke {site}`"
                )

    def valid_sites(self, now_s: float) -> list[tuple[str, SiteRight]]:
        certs = [cert for cert in self.register.list_certificates() if cert.kind == "site"]
        return [
            (cert.name, _read_site_right(cert.pem)) for cert in certs if cert.revoked_s is None and cert.ends_s > now_s
        ]

    def valid_observers(self, now_s: float) -> list[str]:
        certs = [cert for cert in self.register.list_certificates() if cert.kind == "observer"]
        return sorted({cert.name for cert in certs if cert.revoked_s is None and cert.ends_s > now_s})

    # -- revoking ---------------------------------------------------------------------------------

    def revoke_name(self, name: str, now_s: float) -> list[IssuedCertificate]:
        with self.register.transaction():
            certs = self.register.list_certificates(name)
            cancelled = self.register.cancel_tokens(name)
            if not certs and not cancelled:
                raise JobError(f"nothing was issued to {name!r}: `fedquilt identity list` shows all")
            revoked = [cert for cert in certs if cert.revoked_s is None and cert.ends_s > now_s]
            for cert in revoked:
                self.register.revoke_certificate(cert.serial, now_s)
        self.write_crl(now_s)
        return revoked

    def write_crl(self, now_s: float) -> Path:
        """Write crl.pem, the list of revoked certificates that have not expired. Return its path.

        The list is valid as long as the authority, so that no broker refuses all devices because of an old copy.
        """
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.cert.subject)
            .last_update(to_datetime(now_s - DAY_S))  # the clock of a broker may be slow
            .next_update(self.cert.not_valid_after_utc)
            .add_extension(x509.CRLNumber(int(now_s * 1000)), critical=False)
            .add_extension(authority_key_id(self.cert), critical=False)
        )
        if self.crl_url is not None:  # EMQX uses only a revocation list whose address is in the certificate
            point = x509.IssuingDistributionPoint(
                full_name=[x509.UniformResourceIdentifier(self.crl_url)],
                relative_name=None,
                only_contains_user_certs=False,
                only_contains_ca_certs=False,
                only_some_reasons=None,
                indirect_crl=False,
                only_contains_attribute_certs=False,
            )
            builder = builder.add_extension(point, critical=True)
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
        raise StoreError(f"a site's certificate in the register cannot be read ({error}): restore a copy") from None


def describe_state(certificate: IssuedCertificate, now_s: float) -> str:
    if certificate.revoked_s is not None:
        return f"revoked {format_time(certificate.revoked_s)}"
    return f"{'expired' if certificate.ends_s <= now_s else 'valid until'} {format_time(certificate.ends_s)}"


def clock_s() -> float:
    return time.time()
