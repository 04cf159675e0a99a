"""Delays between attempts, without clock and random numbers: the caller adds them."""

from __future__ import annotations

from typing import Final, NamedTuple

ATTEMPTS_MOST: Final = 64  # more are not counted: every delay is at its longest by then


class Retry(NamedTuple):
    """Delays that grow from one attempt to the next.

    Attributes:
        first_s: The delay after the first attempt, in seconds.
        most_s: The longest delay, in seconds.
        factor: The growth from one delay to the next.
        jitter: The largest share by which a random number shortens a delay, so that many devices do not try at once.
    """

    first_s: float
    most_s: float
    factor: float = 2.0
    jitter: float = 0.0

    def delay_s(self, attempts: int, draw: float = 0.0) -> float:
        """Return the seconds until the next attempt.

        Args:
            attempts: The number of attempts before the latest one, 0 for the first delay.
            draw: A random number from 0 to 1.
        """
        longest_s = self.first_s * self.factor ** min(attempts, ATTEMPTS_MOST)
        return min(longest_s, self.most_s) * (1.0 - self.jitter * draw)


RESEND: Final = Retry(5.0, 60.0)  # a message that the peer has not answered
REFETCH: Final = Retry(2.0, 60.0)  # a blob that could not be fetched
