"""The toys of `fedquilt.testing.toys`, under the name that the tests use."""

from fedquilt.testing.toys import (
    DONORS,
    MLP,
    MLP_MASKS,
    SMALL,
    FakeRunner,
    build,
    files,
    folder,
    given,
    job,
    learners,
    members,
    pictures,
    play,
    remembered,
    to_train,
)

__all__ = [
    "DONORS",
    "MLP",
    "MLP_MASKS",
    "SMALL",
    "FakeRunner",
    "build",
    "files",
    "folder",
    "given",
    "job",
    "learners",
    "members",
    "pictures",
    "play",
    "remembered",
    "to_train",
]
