"""Seeds that are equal on every machine and Python version."""

from __future__ import annotations

import hashlib
from collections.abc import Callable


def derive_seed(*keys: object) -> int:
    """Return a 53-bit seed from any keys, equal on every machine and Python version."""
    return seed_deriver(*keys[:-1])(keys[-1])


def seed_deriver(*keys: object) -> Callable[[object], int]:
    """Return a function of one more key that returns `derive_seed(*keys, key)`.

    The common keys are hashed only once.
    """
    copied = hashlib.sha256("".join([f"{key}\x1f" for key in keys]).encode()).copy

    def seed(last: object) -> int:
        whole = copied()
        whole.update(str(last).encode())
        return int.from_bytes(whole.digest()[:8], "big") >> 11

    return seed
