"""Fuzzing knows every decoder, and some thousands of its inputs; `make nightly` (stage fuzz) has ten millions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import decoders
import fuzz
import pytest
import wired
from decoding import Decoder

from fedquilt import wire
from fedquilt.core import WireMessage

ROOT = Path(__file__).parents[2]
FOLDERS = ("coordinator", "edge_agent", "models", "profiles", "fedquilt")
CALLS = {  # (module or object, function) that make values of bytes
    *(("json", name) for name in ("load", "loads", "decode", "Decoder")),
    *(("msgpack", name) for name in ("decode", "Decoder")),
    *(("struct", name) for name in ("unpack", "iter_unpack", "Struct")),
    *(("tomllib", name) for name in ("load", "loads")),
    *(("numpy", name) for name in ("load", "frombuffer")),
    *(("np", name) for name in ("load", "frombuffer", "fromfile")),
    *(("x509", name) for name in ("load_pem_x509_certificate", "load_pem_x509_certificates")),
    *(("x509", name) for name in ("load_der_x509_certificate", "load_pem_x509_csr")),
    *(("tarfile", name) for name in ("open",)),
    *(("zipfile", name) for name in ("ZipFile",)),
    *(("serialization", name) for name in ("load_pem_private_key",)),
    *(("base64", name) for name in ("b64decode",)),
    *(("binascii", name) for name in ("a2b_base64",)),
    *(("pickle", name) for name in ("load", "loads")),
    *(("protobuf", name) for name in ("fields", "parse", "read")),
}
OWN = {  # modules that read only what the same machine's owner or the same process wrote
    "models/partial/dual_copy.py": "a key of a cache, made in the same function",
    "models/partial/output_cache.py": "a board's own cache, whose rows have checksums",
    "coordinator/device_columns.py": "arrays of this process, viewed without a copy",
    "coordinator/updates/private_sums.py": "random bytes of this process",
    "coordinator/fleet/device_status.py": "own notes on boards; a row that cannot be read is left out",
    "fedquilt/formats/job_bundle.py": "a record beside the bundle, which the job's owner has prepared",
    "edge_agent/task/data_check.py": "the answer of a process that the agent has started",
    "fedquilt/formats/tensor_register.py": "a table of the job's bundle, which the job's owner has prepared",
    "fedquilt/data/readers/base.py": "examples of the board's owner",
    "fedquilt/data/readers/audio.py": "likewise",
    "fedquilt/data/readers/images.py": "likewise",
    "fedquilt/data/readers/arrays.py": "likewise",
}


def modules() -> Iterator[tuple[str, set[str]]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if any((ROOT / "fedquilt" / link) in path.parents for link in (*FOLDERS, "tools", "testing")):
                continue
            called, text = set(), path.read_text()
            if not any(f".{function}(" in text for _, function in CALLS):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    of = node.func.value
                    owner = of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""
                    if (owner, node.func.attr) in CALLS:
                        called.add(f"{owner}.{node.func.attr}")
            if called:
                yield name, called


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Decoder]:
    return decoders.every(tmp_path_factory.mktemp("decoders"))


def test_every_module_that_decodes_bytes_is_fuzzed(known: dict[str, Decoder]) -> None:
    """Or is here with the reason why not; a new decoder is told by this test."""
    fuzzed = {decoder.module for decoder in known.values()}
    found = dict(modules())
    assert found.keys() - fuzzed - OWN.keys() == set()
    assert OWN.keys() <= found.keys()
    assert not OWN.keys() & fuzzed
    assert {name for name in fuzzed if not (ROOT / name).is_file()} == set()


def test_every_message_is_fuzzed(known: dict[str, Decoder]) -> None:
    """Those that a topic can carry, in both directions."""
    kinds = {
        wire.CoordState,
        wire.RoundState,
        wire.ChunkRequest,
        *wire.DEVICE_MESSAGES.values(),
        *wire.COORDINATOR_MESSAGES.values(),
        *wire.BLOB_MESSAGES.values(),
    }
    assert {type(message) for message in wired.MESSAGES} == kinds
    assert all(issubclass(kind, WireMessage) and f"wire.{kind.__name__}" in known for kind in kinds)


def test_some_inputs_of_every_decoder_give_values_or_the_named_errors() -> None:
    """A mutator that changes nothing, or everything, would say little."""
    found = fuzz.play((), 0, 15_000)
    assert found.failures == ()
    assert 0.05 < found.read / found.inputs < 0.5


def test_each_decoder_takes_its_seeds(known: dict[str, Decoder]) -> None:
    """Also when they are given the checksum that they have; what is dressed is another input."""
    for name, decoder in known.items():
        assert decoder.seeds, name
        for seed in decoder.seeds:
            if name not in ("certificate", "handshake.board", "handshake.proof"):  # bare DER; of another attempt
                decoder.read(seed)
                decoder.read(seed if decoder.dress is None else decoder.dress(seed))
