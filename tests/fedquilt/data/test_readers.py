"""Readers: IDX files, folders of images, torchvision, recordings and texts."""

import gzip
import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_files import needs_torchvision, rows_of

from fedquilt.core import DataError
from fedquilt.data import examples as data
from fedquilt.data import readers
from fedquilt.data.readers import audio
from fedquilt.data.readers.text import Tokenizer
from fedquilt.data.spec import Audio, DataSpec


def idx(folder: Path, prefix: str, count: int, *, packed: bool = False, labels: int | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    labels = count if labels is None else labels
    pixels = np.repeat(np.arange(count, dtype=np.uint8), 4).tobytes()
    files = {
        f"{prefix}-images-idx3-ubyte": struct.pack(">BBBBIII", 0, 0, 8, 3, count, 2, 2) + pixels,
        f"{prefix}-labels-idx1-ubyte": struct.pack(">BBBBI", 0, 0, 8, 1, labels) + bytes(i % 3 for i in range(labels)),
    }
    for name, payload in files.items():
        (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(payload) if packed else payload)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("inside", ["", "raw"])
def test_idx_files_are_found_in_their_folder(tmp_path, packed, inside):
    idx(tmp_path / inside, "train", 6, packed=packed)
    idx(tmp_path / inside, "t10k", 3, packed=packed)
    train, held = data.load_share(DataSpec(str(tmp_path)))
    assert sorted(rows_of(train) + rows_of(held)) == list(range(6))
    assert train.x.shape[1:] == (2, 2)
    test = data.load_split(DataSpec(str(tmp_path), split="test"))
    assert (rows_of(test), test.y.tolist()) == ([0, 1, 2], [0, 1, 2])


def test_one_idx_file_brings_its_labels(tmp_path):
    idx(tmp_path, "train", 6)
    images = tmp_path / "train-images-idx3-ubyte"
    assert len(data.load_split(DataSpec(str(images)))) == 6
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="put train-labels-idx1-ubyte in the same folder"):
        data.load_split(DataSpec(str(images)))


def test_the_only_pair_of_a_folder_is_trained_on_whatever_its_name(tmp_path):
    idx(tmp_path, "t10k", 6)
    assert len(data.load_split(DataSpec(str(tmp_path)))) == len(data.load_split(DataSpec(str(tmp_path), split="test")))


def test_damaged_idx_files_are_refused(tmp_path):
    idx(tmp_path / "counts", "train", 6, labels=5)
    with pytest.raises(DataError, match="has 6 images, but train-labels-idx1-ubyte 5 labels"):
        data.load_share(DataSpec(str(tmp_path / "counts")))
    idx(tmp_path / "cut", "train", 6)
    images = tmp_path / "cut/train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-5])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte: file ends in row 4 of 6"):
        data.load_share(DataSpec(str(tmp_path / "cut")))
    images.write_bytes(b"no pixels")
    with pytest.raises(DataError, match="train-images-idx3-ubyte is not an IDX file"):
        data.load_share(DataSpec(str(tmp_path / "cut")))
    with pytest.raises(DataError, match=r"for split 'test' \(files: train-images-idx3-ubyte"):
        data.load_share(DataSpec(str(tmp_path / "cut"), split="test"))
    idx(tmp_path / "packed", "train", 6, packed=True)
    packed = tmp_path / "packed/train-images-idx3-ubyte.gz"
    packed.write_bytes(packed.read_bytes()[:-12])
    with pytest.raises(DataError, match=r"cannot read .*train-images-idx3-ubyte\.gz"):
        data.load_share(DataSpec(str(tmp_path / "packed")))


def picture(path: Path, value: int, size: tuple[int, int] = (4, 4), mode: str = "L") -> None:
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.new(mode, size, value if mode == "L" else (value,) * 3).save(path)


def test_a_folder_of_images_is_read_by_class(tmp_path):
    for name, value, mode in (("cat/b.png", 2, "RGB"), ("cat/a.png", 1, "L"), ("dog/c.PNG", 3, "L")):
        picture(tmp_path / "train" / name, value, mode=mode)
    picture(tmp_path / "test/dog/z.png", 9)
    (tmp_path / "train/cat/notes.txt").write_text("no image")
    train = data.load_split(DataSpec(str(tmp_path)))
    assert train.x.shape == (3, 4, 4, 3)
    assert (rows_of(train), train.y.tolist()) == ([1, 2, 3], [0, 0, 1])
    test = data.load_split(DataSpec(str(tmp_path), split="test"))
    assert (rows_of(test), test.y.tolist()) == ([9], [1])
    alone = data.load_split(DataSpec(str(tmp_path / "train")))
    assert np.array_equal(alone.x, train.x)


def test_images_of_several_sizes_need_one(tmp_path):
    picture(tmp_path / "cat/a.png", 1)
    picture(tmp_path / "dog/b.png", 2, (6, 5))
    with pytest.raises(DataError, match=r"\(\(5, 6\) and \(4, 4\) pixels\): set \[data\] size"):
        data.load_split(DataSpec(str(tmp_path)))
    sized = data.load_split(DataSpec(str(tmp_path), size=3))
    assert sized.x.shape == (2, 3, 3, 3)
    assert rows_of(sized) == [1, 2]


def test_folders_that_are_no_data_are_refused(tmp_path):
    with pytest.raises(DataError, match="has no images: put"):
        data.load_share(DataSpec(str(tmp_path)))
    picture(tmp_path / "train/cat/a.png", 1)
    with pytest.raises(DataError, match="has no folder 'test'"):
        data.load_share(DataSpec(str(tmp_path), split="test"))
    picture(tmp_path / "test/cow/a.png", 1)
    with pytest.raises(DataError, match="class 'cow' is not a training class: choose among cat"):
        data.load_share(DataSpec(str(tmp_path), split="test"))
    for payload in (b"not a picture", (tmp_path / "train/cat/a.png").read_bytes()[:50]):
        (tmp_path / "train/cat/b.png").write_bytes(payload)
        with pytest.raises(DataError, match=r"cannot read .*cat/b\.png"):
            data.load_share(DataSpec(str(tmp_path)))


@needs_torchvision
def test_a_torchvision_data_set_that_is_not_there_says_how_to_fetch_it(tmp_path):
    with pytest.raises(DataError, match=r"CIFAR10 in .*set \[data\] download = true"):
        data.load_share(DataSpec(str(tmp_path), dataset="CIFAR10"))
    with pytest.raises(DataError, match="torchvision has no data set 'CIFAR11'"):
        data.load_share(DataSpec(str(tmp_path), dataset="CIFAR11"))


RATE = 8000
SPEC = Audio(rate=RATE, seconds=0.1, mels=8, frame_ms=32, hop_ms=16)


def spec(path: Path, **keys: Any) -> DataSpec:
    return DataSpec.parse({"path": str(path), **keys})


def tone(hz: float, seconds: float = 0.1) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hz * np.arange(round(RATE * seconds)) / RATE)


def recorded(path: Path, sound: np.ndarray, *, rate: int = RATE, width: int = 2, channels: int = 1) -> Path:
    """Write a WAV file; every channel the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = np.round(np.repeat(sound, channels) * (2 ** (8 * width - 1) - 1)).astype(np.int64)
    if width == 1:
        raw = (whole + 128).astype(np.uint8).tobytes()
    else:
        raw = b"".join(int(value).to_bytes(width, "little", signed=True) for value in whole)
    with wave.open(str(path), "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(width)
        out.setframerate(rate)
        out.writeframes(raw)
    return path


def test_a_tone_is_loudest_in_its_own_band():
    points = 256
    weights = audio.mel_filters(RATE, points, 8)
    for band in range(2, 8):
        hz = float(np.argmax(weights[:, band]) * RATE / points)
        found = audio.log_mel_spectrogram(tone(hz), SPEC)
        assert found.shape == (audio.frame_layout(SPEC)[3], 8) == (5, 8)
        assert (found.argmax(axis=1) == band).all()
    np.testing.assert_allclose(audio.log_mel_spectrogram(np.zeros(10), SPEC), np.log(1e-10), rtol=1e-6)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_any_width_and_channels_are_the_same_sound(width, tmp_path):
    path = recorded(tmp_path / "a.wav", tone(440), width=width, channels=2)
    np.testing.assert_allclose(audio.read_samples(path, SPEC), tone(440), atol=2.0 ** (2 - 8 * width))


@pytest.mark.parametrize(("number", "bits"), [(1, 24), (1, 16), (3, 32)])
def test_an_extensible_format_is_read_if_it_names_plain_samples(number, bits, tmp_path):
    plain = recorded(tmp_path / "a.wav", tone(440), width=bits // 8)
    head, samples = plain.read_bytes()[:44], plain.read_bytes()[44:]
    named = struct.pack("<HHIH", 22, bits, 4, number) + bytes.fromhex("000000001000800000aa00389b71")
    fmt = b"fmt " + struct.pack("<IH", 40, 0xFFFE) + head[22:36] + named
    notes = b"LIST" + struct.pack("<I", 5) + b"INFOx\0"
    path = tmp_path / "b.wav"
    path.write_bytes(b"RIFF\0\0\0\0WAVE" + fmt + notes + b"data" + struct.pack("<I", len(samples)) + samples)
    if number == 1:
        np.testing.assert_array_equal(audio.read_samples(path, SPEC), audio.read_samples(plain, SPEC))
    else:
        with pytest.raises(
            DataError, match=r"b\.wav is not an uncompressed WAV file \(format 3, 1 channels, 32 bits\)"
        ):
            audio.read_samples(path, SPEC)


def test_recordings_are_read_by_folder_or_by_table(tmp_path):
    for kind, hz in (("high", 2000), ("low", 200)):
        for number in range(2):
            recorded(tmp_path / "a" / kind / f"{number}.wav", tone(hz + number))
    keys = {"rate": RATE, "seconds": 0.1, "mels": 8}
    by_folder = readers.open_reader(spec(tmp_path / "a", audio=keys))
    assert by_folder.y.tolist() == [0, 0, 1, 1]
    rows = ["a/low/1.wav,low,ann", "a/high/0.wav,high,bob"]
    (tmp_path / "list.csv").write_text("\n".join(["file,kind,who", *rows]) + "\n")
    table = {"x": "file", "y": "kind", "labels": ["high", "low"], "column": "who", "audio": keys}
    by_table = readers.open_reader(spec(tmp_path / "list.csv", **table))
    assert by_table.y.tolist() == [1, 0]
    assert by_table.owner.tolist() == ["ann", "bob"]
    np.testing.assert_array_equal(by_table.take(np.arange(2)), by_folder.take(np.array([3, 0])))


def test_a_bad_recording_is_named(tmp_path):
    recorded(tmp_path / "a" / "k" / "1.wav", tone(200), rate=16000)
    with pytest.raises(DataError, match=r"1\.wav has 16000 samples a second instead of 8000: .*ffmpeg -i 1\.wav"):
        readers.open_reader(spec(tmp_path / "a", audio={"rate": RATE}))
    (tmp_path / "b" / "k").mkdir(parents=True)
    (tmp_path / "b" / "k" / "2.wav").write_bytes(b"ID3 this is no WAV file")
    with pytest.raises(DataError, match=r"2\.wav is not an uncompressed WAV file"):
        readers.open_reader(spec(tmp_path / "b", audio={"rate": RATE}))
    whole = recorded(tmp_path / "c" / "k" / "3.wav", tone(200)).read_bytes()
    (tmp_path / "c" / "k" / "3.wav").write_bytes(whole[:-200])
    with pytest.raises(DataError, match=r"3\.wav has fewer samples than"):
        readers.open_reader(spec(tmp_path / "c", audio={"rate": RATE, "seconds": 0.1})).take(np.arange(1))
    (tmp_path / "list.csv").write_text("file,y\nnowhere.wav,0\n")
    with pytest.raises(DataError, match=r"list\.csv, line 2, column 'file': file 'nowhere\.wav' does not exist"):
        readers.open_reader(spec(tmp_path / "list.csv", x="file", audio={"rate": RATE}))


WORDS = ["[PAD]", "[UNK]", "sens", "##or", "##s", "pump", "3", ".", "##ing", "s", "ä"]


def vocabulary(folder: Path, words: list[str] = WORDS) -> Path:
    path = folder / "vocabulary.txt"
    path.write_text("\n".join(words) + "\n", encoding="utf-8")
    return path


def test_the_longest_token_that_fits_is_taken_first(tmp_path):
    tokenizer = Tokenizer.load(str(vocabulary(tmp_path)))
    assert tokenizer.encode("Sensors, PUMP 3.", 10).tolist() == [2, 3, 4, 1, 5, 6, 7, 0, 0, 0]
    assert tokenizer.encode("pumping pumped", 3).tolist() == [5, 8, 1]
    assert tokenizer.encode("a\N{COMBINING DIAERESIS}", 1).tolist() == [10]
    assert tokenizer.encode("sensors", 2).tolist() == [2, 3]
    assert tokenizer.encode("", 2).tolist() == [0, 0]


def test_texts_are_read_from_a_table_or_by_folder(tmp_path):
    text = {"vocabulary": str(vocabulary(tmp_path)), "length": 4}
    (tmp_path / "notes.csv").write_text('note,y\n"pump 3, sensor",1\nsensors,0\n')
    reader = readers.open_reader(spec(tmp_path / "notes.csv", text=text))
    assert reader.take(np.arange(2)).tolist() == [[5, 6, 1, 2], [2, 3, 4, 0]]
    assert (reader.shape, reader.tokens, reader.y.tolist()) == ((4,), len(WORDS), [1, 0])
    for kind in ("a", "b"):
        (tmp_path / "t" / kind).mkdir(parents=True)
        (tmp_path / "t" / kind / "1.txt").write_text("sensors")
    by_folder = readers.open_reader(spec(tmp_path / "t", text=text))
    assert by_folder.y.tolist() == [0, 1]
    assert by_folder.take(np.array([1])).tolist() == [[2, 3, 4, 0]]
    (tmp_path / "t" / "b" / "1.txt").write_bytes("pumpe läuft".encode("latin-1"))
    with pytest.raises(DataError, match=r"1\.txt is not text in UTF-8 \(perhaps Latin-1\)"):
        readers.open_reader(spec(tmp_path / "t", text=text))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a", "[PAD]", "[UNK]"], r"is not a vocabulary: write \[PAD\] in the first line"),
        (["[PAD]", "a"], r"\[UNK\] in another"),
        (["[PAD]", "[UNK]", "a", "a"], r"line 4: token 'a' is repeated"),
        (["[PAD]", "[UNK]", "", "a"], r"line 3: token is missing"),
    ],
)
def test_a_bad_vocabulary_is_told_with_its_line(words, said, tmp_path):
    (tmp_path / "notes.csv").write_text("note,y\npump,1\n")
    with pytest.raises(DataError, match=said):
        readers.open_reader(spec(tmp_path / "notes.csv", text={"vocabulary": str(vocabulary(tmp_path, words))}))


def test_a_text_among_several_columns_has_to_be_named(tmp_path):
    (tmp_path / "notes.csv").write_text("note,title,y\npump,a,1\n")
    with pytest.raises(
        DataError, match=r"columns note, title could all be the text: set one, as in \[data\] x = 'note'"
    ):
        readers.open_reader(spec(tmp_path / "notes.csv", text={"vocabulary": str(vocabulary(tmp_path))}))
    with pytest.raises(DataError, match=r"cannot read the vocabulary .*gone\.txt"):
        readers.open_reader(spec(tmp_path / "notes.csv", x="note", text={"vocabulary": str(tmp_path / "gone.txt")}))
