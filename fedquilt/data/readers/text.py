"""Texts: a table with a column of texts, or a folder of .txt files for each class."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedquilt.core import DataError
from fedquilt.data.readers import columns, files, table
from fedquilt.data.readers.base import Reader
from fedquilt.data.readers.columns import Chunk
from fedquilt.data.spec import DataSpec, Text
from fedquilt.data.tokens import Tokenizer


def open_(path: Path, spec: DataSpec, *, labelled: bool = True) -> Reader:
    """Open texts as tokens, int32 (n, length).

    Raises:
        DataError: the vocabulary or a text cannot be read, or the column does not exist.
    """
    if spec.text is None:
        raise DataError(f'{path}: texts need a vocabulary: add [data.text] vocabulary = "vocab.txt"')
    tokenizer = Tokenizer.load(spec.text.vocabulary)
    if path.is_dir() and not table.split_files(path, spec.split):
        return _folder(path, spec, spec.text, tokenizer)
    return _open_table(table.file_of(path, spec), spec, spec.text, tokenizer, labelled)


def _open_table(file: Path, spec: DataSpec, text: Text, tokenizer: Tokenizer, labelled: bool) -> Reader:
    """Return a reader of the tokens of a table's text column."""

    def tokens(chunk: Chunk, decoder: columns.Decoder, names: tuple[str, ...]) -> np.ndarray:
        return _tokens([str(each or "") for each in chunk.columns[names[0]]], text, tokenizer)

    found = table.read_rows(file, spec, tokens, "a text", "be the text: name it", labelled=labelled)
    values = np.concatenate(found.x)
    return Reader(found.y, values.__getitem__, values.shape[1:], values.dtype, owner=found.owner, tokens=len(tokenizer))


def _folder(path: Path, spec: DataSpec, text: Text, tokenizer: Tokenizer) -> Reader:
    if spec.task != "classes":
        raise DataError(
            f"{path}: a folder by class has a class for each text: leave task = {spec.task!r} out, or give a table"
        )
    found, labels = files.by_class(path, spec, (".txt",), "texts")
    values = _tokens([_read_text(file) for file in found], text, tokenizer)
    return Reader(labels, values.__getitem__, values.shape[1:], values.dtype, tokens=len(tokenizer))


def _tokens(texts: list[str], text: Text, tokenizer: Tokenizer) -> np.ndarray:
    """Token numbers (texts, length) int32."""
    found = np.zeros((len(texts), text.length), np.int32)
    for row, each in enumerate(texts):
        found[row] = tokenizer.encode(each, text.length)
    return found


def tokens_of(source: Path | bytes, text: Text) -> np.ndarray:
    """Return the token numbers (length,) int32 of a text file, or of a text's bytes in UTF-8.

    Raises:
        DataError: If the text or the vocabulary cannot be read.
    """
    return _tokens([_read_text(source)], text, Tokenizer.load(text.vocabulary))[0]


def _read_text(source: Path | bytes) -> str:
    """Return the text of a UTF-8 file or of bytes. Raise DataError if it cannot be read."""
    if isinstance(source, bytes):
        try:
            return source.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise DataError("the text is not in UTF-8: send it in UTF-8") from None
    file = source
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{file} is not text in UTF-8{table.encoding(file)}") from None
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from None
