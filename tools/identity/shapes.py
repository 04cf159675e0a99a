"""The parts of certificates, as the cryptography library wants them."""

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
    return cert.public_bytes(serialization.Encoding.PEM)


def subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def date(at_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(at_s), datetime.timezone.utc)


def usage(signs_certificates: bool = False) -> x509.KeyUsage:
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
    own = cert.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)


def points(url: str) -> x509.CRLDistributionPoints:
    name = x509.UniformResourceIdentifier(url)
    return x509.CRLDistributionPoints([x509.DistributionPoint([name], None, None, None)])


def host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not re.match(r"(?!-)[A-Za-z0-9-]{1,63}(\.(?!-)[A-Za-z0-9-]{1,63})*\Z", host):
        raise JobError(f"{host!r} is neither a host's name nor an IP address")
    return x509.DNSName(host)
