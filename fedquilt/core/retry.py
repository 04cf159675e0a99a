"""Delays between attempts. The caller supplies the clock and the random numbers."""

from __future__ import annotations

from typing import Final, NamedTuple

MAX_COUNTED_ATTEMPTS: Final = 64  # avoids an overflow of factor**attempts


class Retry(NamedTuple):
    """Delays that grow from one attempt to the next.

    Attributes:
        first_s: The delay after the first attempt, in seconds.
        max_s: The longest delay, in seconds.
        factor: The growth from one delay to the next.
        jitter: The largest share by which a random number shortens a delay, so that devices do not retry together.
    """

    first_s: float
    max_s: float
    factor: float = 2.0
    jitter: float = 0.0

    def delay_s(self, attempts: int, draw: float = 0.0) -> float:
        """Return the seconds until the next attempt.

        Args:
            attempts: The number of attempts before the latest one, 0 for the first delay.
            draw: A random number from 0 to 1.
        """
        full_delay_s = self.first_s * self.factor ** min(attempts, MAX_COUNTED_ATTEMPTS)
        return min(full_delay_s, self.max_s) * (1.0 - self.jitter * draw)


RESEND: Final = Retry(5.0, 60.0)  # a message that the peer has not answered
REFETCH: Final = Retry(2.0, 60.0)  # a blob that could not be fetched
