"""Words of a table's columns that a job leaves to the data: `categories = { material = "auto" }`.

They are looked up once, when the job is read, in the training split that its [data] names, and stand in the job from
then on. So the bundle, every simulated device and the test set have the same words in the same order, also where a
device's own rows lack one of them. A board reads its own [data] and cannot know the others' words: it has to list them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from fedquilt.core import DataError, JobError
from fedquilt.data.spec import AUTO, DataSpec

MOST: Final = 256  # words of a column; one with more holds names or texts rather than categories


def named(table: Mapping[str, Any]) -> dict[str, Any]:
    """A [data] table with the words, sorted, in place of each "auto"; another table as it is.

    Raises:
        JobError: another key of the table is wrong, or it names no table.
        DataError: the table cannot be read, or a column is missing, empty or no category; names file and column.
    """
    given = table.get("categories")
    asked = [column for column, words in given.items() if words == AUTO] if isinstance(given, Mapping) else []
    if not asked:
        return dict(table)
    from fedquilt.data import readers

    spec = DataSpec.parse({**table, "categories": {}})
    if not spec.path:
        raise JobError(f'[data] categories = "{AUTO}" is for a table at a path, not for {spec.where}')
    found = readers.words(Path(spec.path), msgspec.structs.replace(spec, split="train"), asked)
    for column, words in found.items():
        if not words or len(words) > MOST:
            what = f"has {len(words)} different words" if words else "has no word"
            raise DataError(
                f"{spec.where}: column {column!r} {what}, which makes no category: leave it out of [data] x"
            )
    assert isinstance(given, Mapping)
    return {**table, "categories": {**given, **{column: list(words) for column, words in found.items()}}}


def written(categories: Mapping[str, Sequence[str]]) -> str:
    """Categories as a line of a [data] table."""
    each = (f"{column} = {json.dumps(list(words), ensure_ascii=False)}" for column, words in categories.items())
    return f"categories = {{ {', '.join(each)} }}"
