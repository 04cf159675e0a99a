"""Mutated inputs for every decoder of both sides: each is read, or refused by the error that the decoder names.

    python tests/fuzz.py --inputs 10000000 --processes 2
    python tests/fuzz.py --only wire.Task graph --inputs 100000
    python tests/fuzz.py --only facts --first 4711 --inputs 1

An input is a valid one of its decoder, changed at a few places; its number and its decoder's name are the seed. Half of
the inputs of a format with a checksum or a code get the right one afterwards, or nothing behind it would be reached.
Any other error, a read that takes more than `SLOW_S` of processor time, and memory that grows are failures.

`decoders.every` lists all decoders: a test compares it with the modules in which bytes are decoded.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from decoders import every
from decoding import Decoder

SLOW_S = 2.0  # of processor time for one input
GROWN_MB = 24.0  # of resident memory between a tenth of the inputs and their end
BATCH = 2000  # inputs of one decoder in a row, where it is not slow
_NUMBERS = b"0 -1 1e300 1e999 -1e-400 NaN null true [] {} 18446744073709551616 9007199254740993".split()
_BYTES = (b"\xff", b"\x00", b"\xed\xa0\x80", b"\xf0\x9f\xa7\xb5", b"\x7f" * 8, b"\xff" * 8, b"\x80\x80\x80\x80\x01")
SPICE = (*_NUMBERS, *_BYTES, b'""', b'"', b"'", b"#", b"+", b"\n", b"../../x", b"\\ud800", b"[" * 500, b'{"a":' * 500)


class Failure(NamedTuple):
    name: str
    number: int
    what: str

    def __str__(self) -> str:
        return f"{self.what}: python tests/fuzz.py --only '{self.name}' --first {self.number} --inputs 1"


class Part(NamedTuple):
    inputs: int
    read: int  # that were taken for valid
    seconds: float  # of processor time
    failures: tuple[Failure, ...]


def changed(seeds: Sequence[bytes], roll: random.Random) -> bytes:
    given = bytearray(roll.choice(seeds))
    for _ in range(roll.choice((1, 1, 1, 2, 4))):
        at, way = int(roll.random() * (len(given) + 1)), int(roll.random() * 9)
        upto = at + int(roll.random() * 12)
        if way == 0 and at < len(given):
            given[at] ^= 1 << int(roll.random() * 8)
        elif way == 1 and at < len(given):
            given[at] = int(roll.random() * 256)
        elif way == 2:
            del given[at:upto]
        elif way == 3:
            given[at:at] = roll.choice(SPICE)
        elif way == 4:
            given[at:upto] = roll.choice(SPICE)
        elif way == 5:
            given[at:at] = given[at:upto] * int(1 + roll.random() * 4)
        elif way == 6:
            other = roll.choice(seeds)
            begin = int(roll.random() * (len(other) + 1))
            given[at:upto] = other[begin : begin + int(roll.random() * 40)]
        elif way == 7:
            del given[at:]
        else:
            _digits(given, at, roll)
    return bytes(given)


def _digits(given: bytearray, at: int, roll: random.Random) -> None:
    begin = next((index for index in range(at, len(given)) if 48 <= given[index] <= 57), None)
    if begin is not None:
        end = begin
        while end < len(given) and 48 <= given[end] <= 57:
            end += 1
        given[begin:end] = roll.choice(_NUMBERS)


def one(name: str, decoder: Decoder, number: int) -> tuple[bool, Failure | None]:
    roll = random.Random(zlib_seed(name, number))
    payload = changed(decoder.seeds, roll)
    if decoder.dress is not None and roll.random() < 0.5:
        payload = decoder.dress(payload)
    began_s = time.process_time()
    try:
        decoder.read(payload)
        valid = True
    except decoder.errors:
        valid = False
    except Exception as error:
        return False, Failure(name, number, f"{name} raises {type(error).__name__}: {str(error)[:200]}")
    took_s = time.process_time() - began_s
    if took_s > SLOW_S:
        return valid, Failure(name, number, f"{name} takes {took_s:.1f} s")
    return valid, None


def zlib_seed(name: str, number: int) -> int:
    return (number << 40) ^ sum(ord(letter) * 257**place for place, letter in enumerate(name[:12]))


def spread(made: Mapping[str, Decoder], inputs: int) -> dict[str, int]:
    whole = sum(decoder.share for decoder in made.values())
    return {name: max(round(inputs * decoder.share / whole), 1) for name, decoder in made.items()}


@contextlib.contextmanager
def prepared(only: Sequence[str]) -> Iterator[dict[str, Decoder]]:
    shared = Path("/dev/shm")
    logging.disable(logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory(prefix="fedquilt-fuzz-", dir=shared if shared.is_dir() else None) as folder:
            made = every(Path(folder))
            yield {name: made[name] for name in made if not only or name.startswith(tuple(only))}
    finally:
        logging.disable(logging.NOTSET)


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def play(only: Sequence[str], first: int, inputs: int) -> Part:
    failures: list[Failure] = []
    done = read = 0
    with prepared(only) as made:
        left = spread(made, inputs)
        total, wide_mb, began_s = sum(left.values()), 0.0, time.process_time()
        numbers = dict.fromkeys(made, first)
        while any(left.values()):
            for name, decoder in made.items():
                some = min(left[name], max(round(BATCH * decoder.share), 1))
                for number in range(numbers[name], numbers[name] + some):
                    valid, failure = one(name, decoder, number)
                    read += valid
                    if failure is not None:
                        failures.append(failure)
                left[name] -= some
                numbers[name] += some
                done += some
            if not wide_mb and done >= total / 10:
                wide_mb = resident_mb()
        grown_mb = resident_mb() - wide_mb
        if grown_mb > GROWN_MB and total > 50 * BATCH:
            failures.append(Failure(",".join(only), first, f"memory has grown by {grown_mb:.0f} MB"))
        return Part(done, read, time.process_time() - began_s, tuple(failures))


def main(arguments: Sequence[str] | None = None) -> int:
    """Play as many inputs as the command line says; 1 when one failed."""
    parser = argparse.ArgumentParser(description="give every decoder mutated inputs")
    parser.add_argument("--inputs", type=int, default=10_000_000)
    parser.add_argument("--first", type=int, default=0, help="number of each decoder's first input")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="decoders whose names begin so")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args(arguments)
    each, began_s = -(-options.inputs // options.processes), time.monotonic()
    firsts = [options.first + number * each for number in range(options.processes)]
    if options.processes == 1:
        parts = [play(options.only, options.first, each)]
    else:
        with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
            parts = list(pool.map(play, [options.only] * len(firsts), firsts, [each] * len(firsts)))
    failures = [failure for part in parts for failure in part.failures]
    for failure in failures[:50]:
        print(failure)
    inputs, seconds = sum(part.inputs for part in parts), sum(part.seconds for part in parts)
    print(
        f"{inputs} inputs, {sum(part.read for part in parts)} of them valid, {len(failures)} failed; "
        f"{inputs / max(seconds, 1e-9):.0f} inputs per CPU-second, {time.monotonic() - began_s:.0f} s"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
