"""Brokers to test against: Debian's Mosquitto and the embedded one, and certificates for TLS."""

from __future__ import annotations

import os

# One thread a process, as the pool's workers have: with more, sums have another order and last bits differ. Set
# before numpy or torch is imported; agents and workers that tests start inherit it.
os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))

import datetime
import gc
import ipaddress
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import forks
import ordinary
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import HealthCheck, settings
from mosquittos import MOSQUITTO, Mosquitto
from waiting import LIMIT_S

from fedquilt.tools.broker import EmbeddedBroker
from fedquilt.transport.link import Message
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.link import MqttLink

forks.refuse_with_threads()

# a slow moment of the machine is no fault of the code
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


def pytest_collection_finish() -> None:
    """Leave out of each garbage collection what thousands of collected tests hold."""
    gc.collect()
    gc.freeze()


# files that take a worker longest, as measured; then come these folders
LONGEST = (
    "methods/test_fedstitch.py",
    "models/stitching/test_blocks.py",
    "methods/test_conformance.py",
    "tools/test_site.py",
    "tools/demo/test_demo.py",
    "tools/flash/test_wheels.py",
    "tools/flash/test_fleet.py",
    "fedquilt/cli/test_simulate.py",
    "examples/test_kinds_of_data.py",
    "tools/flash/test_flash.py",
    "tools/experiments/papers/test_fedstitch.py",
    "tools/test_site_clocks.py",
    "tools/dash/test_browser.py",
    "examples/test_drift.py",
    "end_to_end/test_outside.py",
    "tools/experiments/papers/test_papers.py",
    "fedquilt/cli/test_init.py",
    "end_to_end/test_upgrade.py",
    "methods/test_fedstitch_joint.py",
    "tools/report/test_front.py",
    "tools/experiments/test_compare.py",
    "simulation/test_golden.py",
    "coordinator/test_reachability.py",
    "methods/test_fedsq.py",
    "tools/experiments/papers/test_genefl.py",
)
LONG_FOLDERS = ("end_to_end", "faults", "simulation")
ROOT = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that no worker ends long after the others."""
    places = {ROOT / name: place for place, name in enumerate(LONGEST)}
    later = len(LONGEST)
    items.sort(key=lambda item: places.get(item.path, later + (item.path.parent.name not in LONG_FOLDERS)))


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[Callable[..., Mosquitto]]:
    """Starts Mosquittos with extra configuration lines; all are killed at the end."""
    if MOSQUITTO is None:
        pytest.skip("Mosquitto is not installed: apt install mosquitto")
    started: list[Mosquitto] = []

    def start(*lines: str) -> Mosquitto:
        folder = tmp_path / f"mosquitto-{len(started)}"
        folder.mkdir()
        started.append(Mosquitto(folder, lines))
        return started[-1].start()

    yield start
    for broker in started:
        broker.kill()


@pytest.fixture
def embedded_broker() -> Iterator[EmbeddedBroker]:
    """The embedded broker, listening on a free port."""
    with EmbeddedBroker() as broker:
        yield broker


@pytest.fixture(scope="module")
def lasting_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a broker for all tests of a module: Mosquitto where it is installed, else the embedded one."""
    if MOSQUITTO is None:
        with EmbeddedBroker() as embedded:
            yield embedded.url
        return
    broker = Mosquitto(tmp_path_factory.mktemp("mosquitto"), ()).start()
    yield broker.url
    broker.kill()


class Stage:
    """Links in one thread, driven in turn, and what each has heard."""

    def __init__(self) -> None:
        self.links: list[MqttLink] = []
        self.heard: defaultdict[str, list[Message]] = defaultdict(list)

    def join(self, broker: Broker | str, name: str, *filters: str, will: tuple[str, bytes] | None = None) -> MqttLink:
        """A new client, not yet connected; jitter makes its back-off as short as can be."""
        parsed = Broker.from_url(broker) if isinstance(broker, str) else broker
        link = MqttLink(parsed, name, will, random_number=lambda: 1.0)
        link.subscribe(filters)
        self.links.append(link)
        return link

    def until(self, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        """Drive all links until the condition holds."""
        end = time.monotonic() + limit_s
        while not condition():
            problems = [link.problem for link in self.links]
            assert time.monotonic() < end, f"not within {limit_s} s; heard {dict(self.heard)}, problems {problems}"
            for link in self.links:
                link.wait(0.01)
                self.heard[link.client_id] += link.receive()

    def payloads(self, name: str) -> list[bytes]:
        return [message.payload for message in self.heard[name]]


@pytest.fixture
def stage() -> Iterator[Stage]:
    """Links that are closed at the end."""
    made = Stage()
    yield made
    for link in made.links:
        link.close()


@pytest.fixture
def user() -> Iterator[ordinary.User]:
    """Whom a board's agent runs as: an ordinary user, also where the suite runs as root."""
    with ordinary.made() as made:
        yield made


# -- certificates ---------------------------------------------------------------------------------


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder / name
        self.folder.mkdir()
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        extensions = [(x509.BasicConstraints(True, None), True), (usage, True)]
        self.ca = self._sign("ca.crt", self._name, self._key.public_key(), extensions)

    def issue(self, name: str, address: str | None = None) -> tuple[Path, Path]:
        """The files of a certificate for a common name and of its key; for a server, with its IP address."""
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        extensions: list[tuple[x509.ExtensionType, bool]] = [(issuer, False)]
        if address is not None:
            names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
            extensions.append((names, False))
        file = self.folder / f"{name}.key"
        pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        file.write_bytes(key.private_bytes(serialization.Encoding.PEM, pkcs8, plain))
        return self._sign(f"{name}.crt", _name(name), key.public_key(), extensions), file

    def _sign(
        self,
        file: str,
        name: x509.Name,
        key: ec.EllipticCurvePublicKey,
        extensions: list[tuple[x509.ExtensionType, bool]],
    ) -> Path:
        now = datetime.datetime.now(datetime.timezone.utc)
        builder = x509.CertificateBuilder(issuer_name=self._name, subject_name=name, public_key=key)
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(hours=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1))
        for extension, critical in [(x509.SubjectKeyIdentifier.from_public_key(key), False), *extensions]:
            builder = builder.add_extension(extension, critical)
        path = self.folder / file
        path.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        return path


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The certificate authority of the tests' own site."""
    return Authority(tmp_path_factory.mktemp("site"), "site")


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """A certificate authority that nobody at the site knows."""
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")
