"""Texts as token numbers: a table with a text column, or a folder of .txt files per class."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedquilt.core import DataError
from fedquilt.data.readers import columns, files, table
from fedquilt.data.readers.base import ExampleReader
from fedquilt.data.readers.columns import TableChunk
from fedquilt.data.spec import DataSpec, Text
from fedquilt.data.tokens import Tokenizer


def open_texts(path: Path, spec: DataSpec, *, labelled: bool = True) -> ExampleReader:
    if spec.text is None:
        raise DataError(f'{path}: texts need a vocabulary: add [data.text] vocabulary = "vocab.txt"')
    tokenizer = Tokenizer.load(spec.text.vocabulary)
    if path.is_dir() and not table.find_split_tables(path, spec.split):
        return _open_folder(path, spec, spec.text, tokenizer)
    return _open_table(table.find_table(path, spec), spec, spec.text, tokenizer, labelled)


def _open_table(file: Path, spec: DataSpec, text: Text, tokenizer: Tokenizer, labelled: bool) -> ExampleReader:
    """Return a reader of the tokens of a table's text column."""

    def encode_chunk(chunk: TableChunk, decoder: columns.ColumnDecoder, names: tuple[str, ...]) -> np.ndarray:
        return _encode_texts([str(each or "") for each in chunk.columns[names[0]]], text, tokenizer)

    found = table.read_rows(file, spec, encode_chunk, "a text", "be the text: name it", labelled=labelled)
    values = np.concatenate(found.x)
    return ExampleReader(
        found.y, values.__getitem__, values.shape[1:], values.dtype, owner=found.owner, tokens=len(tokenizer)
    )


def _open_folder(path: Path, spec: DataSpec, text: Text, tokenizer: Tokenizer) -> ExampleReader:
    if spec.task != "classes":
        raise DataError(
            f"{path}: a folder by class has a class for each text: leave task = {spec.task!r} out, or give a table"
        )
    found, labels, owner = files.find_files_by_class(path, spec, (".txt",), "texts")
    values = _encode_texts([_read_text(file) for file in found], text, tokenizer)
    return ExampleReader(labels, values.__getitem__, values.shape[1:], values.dtype, owner=owner, tokens=len(tokenizer))


def _encode_texts(texts: list[str], text: Text, tokenizer: Tokenizer) -> np.ndarray:
    found = np.zeros((len(texts), text.length), np.int32)
    for row, each in enumerate(texts):
        found[row] = tokenizer.encode(each, text.length)
    return found


def read_tokens(source: Path | bytes, text: Text) -> np.ndarray:
    return _encode_texts([_read_text(source)], text, Tokenizer.load(text.vocabulary))[0]


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
        raise DataError(f"{file} is not text in UTF-8{table.encoding_hint(file)}") from None
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from None
