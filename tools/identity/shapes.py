"""Parts of certificates, in the types of the cryptography library."""

from __future__ import annotations

import datetime
import ipaddress
import re

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedquilt.core import JobError


def pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as PEM, not encrypted: a daemon has nobody to ask for a passphrase."""
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def pem(cert: x509.Certificate) -> bytes:
    """Certificate as PEM."""
    return cert.public_bytes(serialization.Encoding.PEM)


def subject(name: str, unit: str | None = None) -> x509.Name:
    """Name with `name` as its common name, and `unit` as its organisational unit."""
    common = x509.NameAttribute(NameOID.COMMON_NAME, name)
    return x509.Name([common] if unit is None else [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit), common])


def date(at_s: float) -> datetime.datetime:
    """Time as the library's datetime in UTC, whole seconds."""
    return datetime.datetime.fromtimestamp(int(at_s), datetime.timezone.utc)


def usage(signs_certificates: bool = False) -> x509.KeyUsage:
    """Key usage of an authority's or of another certificate."""
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


def authority_id(cert: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    """Identifier of the authority's key."""
    own = cert.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)


def points(url: str) -> x509.CRLDistributionPoints:
    """Extension with the URL of a revocation list."""
    name = x509.UniformResourceIdentifier(url)
    return x509.CRLDistributionPoints([x509.DistributionPoint([name], None, None, None)])


def host(host: str) -> x509.GeneralName:
    """Name or IP address of a host.

    Raises:
        JobError: it is neither.
    """
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not re.match(r"(?!-)[A-Za-z0-9-]{1,63}(\.(?!-)[A-Za-z0-9-]{1,63})*\Z", host):
        raise JobError(f"{host!r} is neither a host's name nor an IP address")
    return x509.DNSName(host)
