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

PAD, UNKNOWN, GOES_ON = "[PAD]", "[UNK]", "##"
WORD = re.compile(r"\w+|[^\w\s]")
LONGEST = 100  # letters of a word; a longer one is unknown


@dataclass(frozen=True)
class Tokenizer:
    numbers: dict[str, int]

    def __len__(self) -> int:
        return len(self.numbers)

    @classmethod
    def load(cls, vocabulary: str | Sequence[str]) -> Tokenizer:
        path = vocabulary if isinstance(vocabulary, str) else "the model's vocabulary"
        lines = cls._read_lines(vocabulary) if isinstance(vocabulary, str) else list(vocabulary)
        numbers: dict[str, int] = {}
        for line, token in enumerate(lines, 1):
            if not token or token in numbers:
                what = f"{token!r} is there twice" if token else "no token"
                raise DataError(f"{path}, line {line}: {what}: each line holds another token")
            numbers[token] = line - 1
        if not lines or lines[0] != PAD or UNKNOWN not in numbers:
            raise DataError(f"{path} is no vocabulary: its first line is {PAD}, and another is {UNKNOWN}")
        return cls(numbers)

    @staticmethod
    def _read_lines(path: str) -> list[str]:
        """Return the lines of a vocabulary file. Raise DataError if it cannot be read."""
        try:
            return Path(path).read_text(encoding="utf-8-sig").splitlines()
        except OSError as error:
            raise DataError(
                f"cannot read the vocabulary {path}: {error.strerror}: set [data.text] vocabulary"
            ) from None
        except UnicodeDecodeError:
            raise DataError(f"the vocabulary {path} is not text in UTF-8: save it as that") from None

    def encode_words(self, text: str) -> Iterator[list[int]]:
        for word in WORD.findall(unicodedata.normalize("NFC", text).lower()):
            yield self._encode_longest_matches(word)

    def encode(self, text: str, length: int) -> np.ndarray:
        """Encode a text as (length,) int32, cut to `length` tokens or padded with 0."""
        found = np.zeros(length, np.int32)
        place = 0
        for numbers in self.encode_words(text):
            some = numbers[: length - place]
            found[place : place + len(some)] = some
            place += len(some)
            if place == length:
                break
        return found

    def _encode_longest_matches(self, word: str) -> list[int]:
        found: list[int] = []
        first = 0
        while first < len(word) and len(word) <= LONGEST:
            before = GOES_ON if first else ""
            fits = (end for end in range(len(word), first, -1) if before + word[first:end] in self.numbers)
            end = next(fits, 0)
            if not end:
                return [self.numbers[UNKNOWN]]
            found.append(self.numbers[before + word[first:end]])
            first = end
        return found or [self.numbers[UNKNOWN]]
