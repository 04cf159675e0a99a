"""Changes that mutants are made of."""

from __future__ import annotations

import ast

import pytest

from tests.measures import mutants


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("x = a < 2", {"x = (a <= 2)", "x = a < (5)"}),
        ("x = 'é' if a and b else c", {"x = 'é' if (a or b) else c", "x = 'é' if (not (a and b)) else c"}),
        ("self.count = True", {"pass", "self.count = (False)"}),
        ("send(device, task)", {"pass", "(send(task, device))"}),
        ("x: Limit[3] = f'{2:>9}'", set()),
        ("log.warning('round %d', 3)", set()),
        ("class Seen(Struct, frozen=True): pass", set()),
    ],
)
def test_each_change_keeps_the_rest_of_the_source(source: str, changed: set[str]) -> None:
    (statement,) = ast.parse(source).body
    changes = mutants.statement_changes(statement)
    assert {mutants.make_mutant("", source.encode(), statement, each).source.decode() for each in changes} == changed


def test_the_most_specific_tests_that_fit_run_first() -> None:
    mutant = mutants.Mutant("m.py", 3, "constant", "1", "(3)", range(2, 4), b"")
    whole = {"m.py": [2, 3], "other.py": [1, 2, 3, 4]}
    unit = mutants.TestFile("unit", 10, True, {"m.py": [3]})
    flaky = mutants.TestFile("fails", 1, False, {"m.py": [3]})
    elsewhere = mutants.TestFile("elsewhere", 1, True, {"m.py": [1]})
    tests = [
        mutants.TestFile("job", 20, True, whole),
        mutants.TestFile("long", 60, True, whole),
        unit,
        flaky,
        elsewhere,
    ]
    assert [test.path for test in mutants.choose_tests(mutant, tests, 40)] == ["unit", "job"]
    assert [test.path for test in mutants.choose_tests(mutant, tests, 5)] == ["unit"]
