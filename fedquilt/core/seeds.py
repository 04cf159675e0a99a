"""Seeds that are the same on every machine and Python."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable


def derive_seed(*keys: object) -> int:
    """A 53-bit seed from any keys: the same keys give the same seed on every machine and Python."""
    return derived(*keys[:-1])(keys[-1])


def derive_seeds(keys: tuple[object, ...], last: Iterable[str]) -> list[int]:
    """`derive_seed` of these keys and each last one; what they share is hashed once."""
    copied, number = hashlib.sha256("".join([f"{key}\x1f" for key in keys]).encode()).copy, int.from_bytes
    found = []
    for each in last:
        whole = copied()
        whole.update(each.encode())
        found.append(number(whole.digest()[:8], "big") >> 11)
    return found


def derived(*keys: object) -> Callable[[object], int]:
    """Prefix of `derive_seed`: a function of one more key, which hashes the common keys only once."""
    copied = hashlib.sha256("".join([f"{key}\x1f" for key in keys]).encode()).copy

    def seed(last: object) -> int:
        whole = copied()
        whole.update(str(last).encode())
        return int.from_bytes(whole.digest()[:8], "big") >> 11

    return seed
