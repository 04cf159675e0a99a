"""Token numbers of texts, by greedy longest match against a vocabulary, like BERT's WordPiece.

A vocabulary has one token per line in UTF-8, numbered from 0. The first is `[PAD]`, and `[UNK]` is another. Tokens that
continue a word begin with `##`: with `sens`, `##or` and `##s`, "Sensors" becomes these three. Texts are normalised to
NFC and lower case, and split at white space and punctuation marks. A word that cannot be split into tokens is `[UNK]`
(Wu et al. 2016, arXiv 1609.08144, and Devlin et al. 2019, arXiv 1810.04805).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedquilt.core import DataError
from fedquilt.data.readers import base, table
from fedquilt.data.readers.base import ExampleReader
from fedquilt.data.readers.table import TableChunk
from fedquilt.data.spec import DataSpec, Text

PAD, UNKNOWN, CONTINUATION = "[PAD]", "[UNK]", "##"
WORD = re.compile(r"\w+|[^\w\s]")
MAX_WORD_LETTERS = 100  # longer words are encoded as unknown


@dataclass(frozen=True)
class Tokenizer:
    numbers: dict[str, int]  # by token

    def __len__(self) -> int:
        return len(self.numbers)

    @classmethod
    def load(cls, vocabulary: str | Sequence[str]) -> Tokenizer:
        path = vocabulary if isinstance(vocabulary, str) else "the model's vocabulary"
        lines = cls._read_lines(vocabulary) if isinstance(vocabulary, str) else list(vocabulary)
        numbers: dict[str, int] = {}
        for line, token in enumerate(lines, 1):
            if not token or token in numbers:
                problem = f"token {token!r} is repeated" if token else "token is missing"
                raise DataError(f"{path}, line {line}: {problem}: write a different token in each line")
            numbers[token] = line - 1
        if not lines or lines[0] != PAD or UNKNOWN not in numbers:
            raise DataError(f"{path} is not a vocabulary: write {PAD} in the first line, and {UNKNOWN} in another")
        return cls(numbers)

    @staticmethod
    def _read_lines(path: str) -> list[str]:
        try:
            return Path(path).read_text(encoding="utf-8-sig").splitlines()
        except OSError as error:
            raise DataError(
                f"cannot read the vocabulary {path}: {error.strerror}: set [data.text] vocabulary"
            ) from None
        except UnicodeDecodeError:
            raise DataError(f"the vocabulary {path} is not text in UTF-8: save it in UTF-8") from None

    def encode_words(self, text: str) -> Iterator[list[int]]:
        for word in WORD.findall(unicodedata.normalize("NFC", text).lower()):
            yield self._encode_longest_matches(word)

    def encode(self, text: str, length: int) -> np.ndarray:
        """Return a text's token numbers as (length,) int32, cut to `length` tokens or padded with 0."""
        encoded = np.zeros(length, np.int32)
        position = 0
        for numbers in self.encode_words(text):
            fitting = numbers[: length - position]
            encoded[position : position + len(fitting)] = fitting
            position += len(fitting)
            if position == length:
                break
        return encoded

    def _encode_longest_matches(self, word: str) -> list[int]:  # the number of [UNK] if no token matches
        encoded: list[int] = []
        start = 0
        while start < len(word) and len(word) <= MAX_WORD_LETTERS:
            prefix = CONTINUATION if start else ""
            ends = (end for end in range(len(word), start, -1) if prefix + word[start:end] in self.numbers)
            end = next(ends, 0)
            if not end:
                return [self.numbers[UNKNOWN]]
            encoded.append(self.numbers[prefix + word[start:end]])
            start = end
        return encoded or [self.numbers[UNKNOWN]]


def open_texts(path: Path, spec: DataSpec, *, labelled: bool = True) -> ExampleReader:
    """Return a reader of token numbers of texts, from a folder by class or a table, or raise DataError."""
    if spec.text is None:
        raise DataError(f'{path}: texts have no vocabulary: set [data.text] vocabulary, such as "vocab.txt"')
    tokenizer = Tokenizer.load(spec.text.vocabulary)
    if path.is_dir() and not table.find_split_tables(path, spec.split):
        return _open_folder(path, spec, spec.text, tokenizer)
    return _open_table(table.find_table(path, spec), spec, spec.text, tokenizer, labelled)


def _open_table(file: Path, spec: DataSpec, text: Text, tokenizer: Tokenizer, labelled: bool) -> ExampleReader:
    def encode_chunk(chunk: TableChunk, decoder: table.ColumnDecoder, names: tuple[str, ...]) -> np.ndarray:
        return _encode_texts([str(cell or "") for cell in chunk.columns[names[0]]], text, tokenizer)

    rows = table.read_rows(file, spec, encode_chunk, "a text", "be the text", labelled=labelled)
    values = np.concatenate(rows.x)
    return ExampleReader(
        rows.y, values.__getitem__, values.shape[1:], values.dtype, owner=rows.owner, tokens=len(tokenizer)
    )


def _open_folder(path: Path, spec: DataSpec, text: Text, tokenizer: Tokenizer) -> ExampleReader:
    if spec.task != "classes":
        raise DataError(
            f"{path}: a folder of texts by class has only classes: leave task = {spec.task!r} out, or use a table"
        )
    files, labels, owner = base.find_files_by_class(path, spec, (".txt",), "texts")
    values = _encode_texts([_read_text(file) for file in files], text, tokenizer)
    return ExampleReader(labels, values.__getitem__, values.shape[1:], values.dtype, owner=owner, tokens=len(tokenizer))


def _encode_texts(texts: list[str], text: Text, tokenizer: Tokenizer) -> np.ndarray:
    encoded = np.zeros((len(texts), text.length), np.int32)
    for row, text_ in enumerate(texts):
        encoded[row] = tokenizer.encode(text_, text.length)
    return encoded


def read_tokens(source: Path | bytes, text: Text) -> np.ndarray:
    return _encode_texts([_read_text(source)], text, Tokenizer.load(text.vocabulary))[0]


def _read_text(source: Path | bytes) -> str:
    if isinstance(source, bytes):
        try:
            return source.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise DataError("the text is not in UTF-8: encode it as UTF-8") from None
    file = source
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{file} is not text in UTF-8{table.encoding_hint(file)}") from None
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from None
