"""Log-mel spectrograms of recordings in numpy, equal on every device.

The power spectrum of Hann-windowed frames is summed in triangular bands, evenly spaced on the mel scale (2595 log10(1 +
f / 700)). The result is the natural logarithm of each band, with -23 for silence.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from fedquilt.data.spec import Audio

LEAST = 1e-10  # power of a band in silence


def frame_layout(spec: Audio) -> tuple[int, int, int, int]:
    """Return the samples of a recording, a frame and a hop, and the number of frames (at least 1)."""
    samples, frame, hop = (
        max(1, round(spec.rate * seconds)) for seconds in (spec.seconds, spec.frame_ms / 1000, spec.hop_ms / 1000)
    )
    samples = max(samples, frame)
    return samples, frame, hop, 1 + (samples - frame) // hop


@lru_cache(maxsize=8)
def mel_filters(rate: int, points: int, mels: int) -> np.ndarray:
    """Return the weights of each frequency in each band, (points // 2 + 1, mels) float64, read-only."""
    ends = np.linspace(0, _mel_from_hz(rate / 2), mels + 2)
    corners = 700 * (10 ** (ends / 2595) - 1)  # Hz
    frequencies = np.arange(points // 2 + 1)[:, None] * rate / points
    rising = (frequencies - corners[:-2]) / (corners[1:-1] - corners[:-2])
    falling = (corners[2:] - frequencies) / (corners[2:] - corners[1:-1])
    found = np.maximum(0, np.minimum(rising, falling))
    found.flags.writeable = False
    return found


def _mel_from_hz(frequency: float) -> float:
    return float(2595 * np.log10(1 + frequency / 700))


def log_mel_spectrogram(sound: np.ndarray, spec: Audio) -> np.ndarray:
    """Return the log-mel spectrogram (frames, mels) float32 of samples from -1 to 1.

    Longer recordings are cut, and shorter ones are padded with silence.
    """
    samples, frame, hop, _ = frame_layout(spec)
    held = np.zeros(samples)
    held[: min(samples, len(sound))] = sound[:samples]
    frames = np.lib.stride_tricks.sliding_window_view(held, frame)[::hop]  # (frames, frame)
    points = 1 << (frame - 1).bit_length()
    power = np.abs(np.fft.rfft(frames * np.hanning(frame + 1)[:-1], points)) ** 2 / points
    return np.log(np.maximum(power @ mel_filters(spec.rate, points, spec.mels), LEAST)).astype(np.float32)
