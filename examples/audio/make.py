"""Make recordings in data/<split>/<class>/: a motor that hums, a kettle that whistles, rain."""

import random
import wave
from array import array
from math import pi, sin
from pathlib import Path

RATE = 8000  # samples a second
SECONDS = 0.5


def hum(draw: random.Random) -> list[float]:
    """A low tone and its overtones."""
    pitch = draw.uniform(80, 160)
    return [sum(sin(2 * pi * pitch * k * t / RATE) / k for k in (1, 2, 3)) / 2 for t in range(int(RATE * SECONDS))]


def whistle(draw: random.Random) -> list[float]:
    """A high tone that rises."""
    pitch, rise = draw.uniform(1500, 2500), draw.uniform(0, 1000)
    return [sin(2 * pi * (pitch + rise * t / RATE) * t / RATE) for t in range(int(RATE * SECONDS))]


def rain(draw: random.Random) -> list[float]:
    """Noise of all frequencies."""
    return [draw.uniform(-1, 1) for _ in range(int(RATE * SECONDS))]


def main() -> None:
    """Write 60 recordings to train on and 24 for a test, each with some noise and at a loudness of its own."""
    draw = random.Random(0)
    for split, count in (("train", 20), ("test", 8)):
        for make in (hum, whistle, rain):
            folder = Path(__file__).parent / "data" / split / make.__name__
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                loud = draw.uniform(0.1, 0.8)
                sound = [loud * value + draw.gauss(0, 0.02) for value in make(draw)]
                samples = array("h", (int(32767 * max(-1.0, min(1.0, value))) for value in sound))
                with wave.open(str(folder / f"{number:02d}.wav"), "wb") as out:
                    out.setnchannels(1)
                    out.setsampwidth(2)
                    out.setframerate(RATE)
                    out.writeframes(samples.tobytes())


if __name__ == "__main__":
    main()
