"""Certificates of a fleet's own authority, as `fedquilt identity` and `enrol` make them."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from fedquilt.core import SiteRight
from fedquilt.tools.identity import broker_config
from fedquilt.tools.identity.authority import DAY_S, CertificateAuthority, clock_s, key_to_pem
from fedquilt.transport.mqtt.broker import Broker


class Certified:
    """An authority, and the files of those it has signed for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = CertificateAuthority.create(folder / "ca", "site", clock_s())

    @property
    def ca(self) -> Path:
        return self.authority.folder / "ca.crt"

    def configure_broker(self, folder: Path) -> list[str]:
        """Write a Mosquitto's configuration as `fedquilt broker config` does; its lines but that of the port."""
        broker_config.write_config(self.authority, ["127.0.0.1"], folder, clock_s(), installed=str(folder))
        first, listener, *lines = (folder / "fedquilt.conf").read_text().splitlines()
        assert listener == "listener 8883", first
        return lines

    def files(
        self,
        name: str,
        kind: Any = "device",
        *,
        days_ago: float = 0.0,
        days: float | None = None,
        right: SiteRight | None = None,
    ) -> dict[str, str]:
        """The files of a certificate that is made now, for a [broker] table."""
        key = ec.generate_private_key(ec.SECP256R1())
        with self.authority.register.transaction():
            at_s = clock_s() - days_ago * DAY_S
            hosts = ["127.0.0.1"] if kind == "server" else ()
            issued = self.authority.sign_certificate(
                name, kind, key.public_key(), at_s, hosts=hosts, days=days, site_right=right
            )
        (self.folder / f"{name}.crt").write_text(issued.pem)
        (self.folder / f"{name}.key").write_bytes(key_to_pem(key))
        (self.folder / f"{name}.key").chmod(0o600)
        return {"ca": str(self.ca), "cert": str(self.folder / f"{name}.crt"), "key": str(self.folder / f"{name}.key")}

    def broker(self, name: str, kind: Any = "device", *, url: str = "mqtts://localhost", days_ago: float = 0) -> Broker:
        """An address with these files."""
        return Broker.from_url(url, **self.files(name, kind, days_ago=days_ago))


def of_another_version(pem: str) -> str:
    """The certificate with a version of X.509 that there is not."""
    der = ssl.PEM_cert_to_DER_cert(pem)
    version = b"\xa0\x03\x02\x01\x02"
    assert version in der[:20]
    return ssl.DER_cert_to_PEM_cert(der.replace(version, b"\xa0\x03\x02\x01\x05", 1))
