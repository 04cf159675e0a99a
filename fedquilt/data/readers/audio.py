"""Log-mel spectrograms of recordings in numpy, equal on every device.

The power spectrum of Hann-windowed frames is summed in triangular bands, evenly spaced on the mel scale (2595 log10(1 +
f / 700)). The result is the natural logarithm of each band, with -23 for silence.
"""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import numpy as np

from fedquilt.core import DataError
from fedquilt.data.readers import base, table
from fedquilt.data.readers.base import ExampleReader
from fedquilt.data.readers.table import TableChunk
from fedquilt.data.spec import Audio, DataSpec

SILENCE_POWER = 1e-10  # power of a band in silence


def frame_layout(spec: Audio) -> tuple[int, int, int, int]:
    """Return the samples of a recording, of a frame and of a hop, and the number of frames (at least 1)."""
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
    weights = np.maximum(0, np.minimum(rising, falling))
    weights.flags.writeable = False
    return weights


def _mel_from_hz(frequency: float) -> float:
    return float(2595 * np.log10(1 + frequency / 700))


def log_mel_spectrogram(sound: np.ndarray, spec: Audio) -> np.ndarray:
    """Return the log-mel spectrogram (frames, mels) float32 of samples from -1 to 1.

    Longer recordings are cut, and shorter ones are padded with silence.
    """
    samples, frame, hop, _ = frame_layout(spec)
    padded = np.zeros(samples)
    padded[: min(samples, len(sound))] = sound[:samples]
    frames = np.lib.stride_tricks.sliding_window_view(padded, frame)[::hop]  # (frames, frame)
    points = 1 << (frame - 1).bit_length()
    power = np.abs(np.fft.rfft(frames * np.hanning(frame + 1)[:-1], points)) ** 2 / points
    return np.log(np.maximum(power @ mel_filters(spec.rate, points, spec.mels), SILENCE_POWER)).astype(np.float32)


PCM: Final = 1  # format of a WAV file
EXTENSIBLE: Final = 0xFFFE  # the format is in the extension, as for 24 bits or several channels
SUBFORMAT: Final = bytes.fromhex("000000001000800000aa00389b71")  # end of the extension, after the number of the format
MAX_FORMAT_BYTES: Final = 40  # of a format chunk


class _WavFormat(NamedTuple):
    stream: BinaryIO  # at the first sample
    channels: int
    rate: int
    width: int  # bytes of a sample
    samples: int  # of each channel


def open_recordings(path: Path, spec: DataSpec, *, labelled: bool = True) -> ExampleReader:
    """Return a reader of WAV files, in a folder by class or named in a table, or raise DataError.

    All headers are read. Without `labelled`, a table has no labels, and all labels are 0.
    """
    audio = spec.audio or Audio()
    if path.is_dir() and not table.find_split_tables(path, spec.split):
        if spec.task != "classes":
            raise DataError(
                f"{path}: a folder of recordings by class has only classes: leave task = {spec.task!r} out, or set "
                "path to a table"
            )
        files, labels, owner = base.find_files_by_class(path, spec, (".wav",), "recordings")
    else:
        files, labels, owner = _read_listing(table.find_table(path, spec), spec, labelled)
    for file in files:
        with _open_wav(file) as sound:
            _require_sample_rate(sound, file, audio)
    shape = (frame_layout(audio)[3], audio.mels)

    def take(rows: np.ndarray) -> np.ndarray:
        x = np.empty((len(rows), *shape), np.float32)
        for index, row in enumerate(rows):
            x[index] = read_spectrogram(files[row], audio)
        return x

    return ExampleReader(labels, take, shape, np.dtype(np.float32), owner=owner)


def read_spectrogram(source: Path | bytes, audio: Audio) -> np.ndarray:
    return log_mel_spectrogram(read_samples(source, audio), audio)


def _read_listing(file: Path, spec: DataSpec, labelled: bool) -> tuple[list[Path], np.ndarray, np.ndarray | None]:
    def listed_files(chunk: TableChunk, decoder: table.ColumnDecoder, names: tuple[str, ...]) -> list[Path]:
        for position, name in zip(chunk.positions, chunk.columns[names[0]], strict=True):
            if not (file.parent / str(name)).is_file():
                raise DataError(
                    f"{file}, {chunk.unit} {position}, column {names[0]!r}: file {str(name)!r} does not exist: write "
                    "paths relative to the table's folder"
                )
        return [file.parent / str(name) for name in chunk.columns[names[0]]]

    rows = table.read_rows(file, spec, listed_files, "a recording", "name the recordings", labelled=labelled)
    return list(chain.from_iterable(rows.x)), rows.y, rows.owner


@contextlib.contextmanager
def _open_wav(source: Path | bytes) -> Iterator[_WavFormat]:
    """Open a WAV file, or its bytes, at the first sample. Raise DataError if it is not uncompressed WAV."""
    file = _name_of(source)
    try:
        stream = io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from None
    with stream:
        try:
            sound = _read_wav_head(stream)
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror}") from None
        except (ValueError, struct.error) as error:
            reason = "incomplete" if isinstance(error, struct.error) else error
            raise DataError(f"{file} is not an uncompressed WAV file ({reason}): save it as PCM") from None
        yield sound


def _read_wav_head(stream: BinaryIO) -> _WavFormat:
    """Return the format, and move to the first sample. Raise ValueError or struct.error if invalid."""
    riff, _, kind = struct.unpack("<4sI4s", stream.read(12))
    if (riff, kind) != (b"RIFF", b"WAVE"):
        raise ValueError("no RIFF/WAVE header")
    fmt = b""
    while True:
        name, size = struct.unpack("<4sI", stream.read(8))
        if name == b"data":
            break
        end = stream.tell() + size + size % 2
        if name == b"fmt ":
            fmt = stream.read(min(size, MAX_FORMAT_BYTES))
        stream.seek(end)
    tag, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", fmt)
    if tag == EXTENSIBLE and fmt[26:] == SUBFORMAT:
        (tag,) = struct.unpack_from("<H", fmt, 24)
    width = (bits + 7) // 8
    if tag != PCM or not channels or width not in (1, 2, 3, 4):
        raise ValueError(f"format {tag}, {channels} channels, {bits} bits")
    return _WavFormat(stream, channels, rate, width, size // (channels * width))


def _name_of(source: Path | bytes) -> str:
    return "the recording" if isinstance(source, bytes) else str(source)


def _require_sample_rate(sound: _WavFormat, source: Path | bytes, audio: Audio) -> None:
    if (rate := sound.rate) != audio.rate:
        name = source.name if isinstance(source, Path) else "old.wav"
        raise DataError(
            f"{_name_of(source)} has {rate} samples a second instead of {audio.rate}: convert it, as with `ffmpeg -i "
            f"{name} -ar {audio.rate} new.wav`, or set [data.audio] rate = {rate} if all recordings have this rate"
        )


def read_samples(source: Path | bytes, audio: Audio) -> np.ndarray:
    """Return a WAV file's samples, averaged over channels, float64 from -1 to 1, or raise DataError."""
    max_samples, file = frame_layout(audio)[0], _name_of(source)
    with _open_wav(source) as sound:
        _require_sample_rate(sound, source, audio)
        stream, channels, _, width, count = sound
        try:
            raw = stream.read(min(max_samples, count) * width * channels)
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror}") from None
    if len(raw) < min(max_samples, count) * width * channels:
        raise DataError(f"{file} has fewer samples than the {count} in its header: record or copy it again")
    if width == 1:
        values = np.frombuffer(raw, np.uint8).astype(np.float64) / 128 - 1
    elif width == 3:  # the three bytes of a sample become the upper three of four
        padded = np.zeros((len(raw) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        values = padded.reshape(-1).view("<i4") / 2.0**31
    else:
        values = np.frombuffer(raw, f"<i{width}") / 2.0 ** (8 * width - 1)
    return values.reshape(-1, channels).mean(axis=1)
