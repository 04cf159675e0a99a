"""Parts of certificates as objects of the cryptography library."""

from __future__ import annotations

import datetime
import ipaddress
import re

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedquilt.core import JobError


def key_to_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def certificate_to_pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


def subject_name(name: str, unit: str | None = None) -> x509.Name:
    common = x509.NameAttribute(NameOID.COMMON_NAME, name)
    return x509.Name([common] if unit is None else [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit), common])


def to_datetime(at_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(at_s), datetime.timezone.utc)


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
    own = cert.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)


def crl_distribution_points(url: str) -> x509.CRLDistributionPoints:
    name = x509.UniformResourceIdentifier(url)
    return x509.CRLDistributionPoints([x509.DistributionPoint([name], None, None, None)])


def to_general_name(host: str) -> x509.GeneralName:
    """Return the name or IP address of a host as a certificate's general name.

    Raises:
        JobError: If the text is neither.
    """
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not re.match(r"(?!-)[A-Za-z0-9-]{1,63}(\.(?!-)[A-Za-z0-9-]{1,63})*\Z", host):
        raise JobError(f"{host!r} is neither a host's name nor an IP address")
    return x509.DNSName(host)
