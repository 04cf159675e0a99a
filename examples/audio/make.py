"""Make recordings in data/<split>/<class>/: a humming motor, a whistling kettle, rain."""

import random
import wave
from array import array
from math import pi, sin
from pathlib import Path

RATE = 8000  # samples per second
SECONDS = 0.5


def hum(rng: random.Random) -> list[float]:
    """Return the samples of a low tone and its overtones."""
    pitch = rng.uniform(80, 160)
    return [sum(sin(2 * pi * pitch * k * t / RATE) / k for k in (1, 2, 3)) / 2 for t in range(int(RATE * SECONDS))]


def whistle(rng: random.Random) -> list[float]:
    """Return the samples of a high rising tone."""
    pitch, rise = rng.uniform(1500, 2500), rng.uniform(0, 1000)
    return [sin(2 * pi * (pitch + rise * t / RATE) * t / RATE) for t in range(int(RATE * SECONDS))]


def rain(rng: random.Random) -> list[float]:
    """Return the samples of white noise."""
    return [rng.uniform(-1, 1) for _ in range(int(RATE * SECONDS))]


def main() -> None:
    """Write 60 recordings for training and 24 for tests, with noise and random loudness."""
    rng = random.Random(0)
    for split, count in (("train", 20), ("test", 8)):
        for make_sound in (hum, whistle, rain):
            folder = Path(__file__).parent / "data" / split / make_sound.__name__
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                amplitude = rng.uniform(0.1, 0.8)
                sound = [amplitude * value + rng.gauss(0, 0.02) for value in make_sound(rng)]
                samples = array("h", (int(32767 * max(-1.0, min(1.0, value))) for value in sound))
                with wave.open(str(folder / f"{number:02d}.wav"), "wb") as out:
                    out.setnchannels(1)
                    out.setsampwidth(2)
                    out.setframerate(RATE)
                    out.writeframes(samples.tobytes())


if __name__ == "__main__":
    main()
