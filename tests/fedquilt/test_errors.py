"""Long errors are shortened in the middle: a library names the cause at the end."""

import pytest

from fedquilt.core import shorten_error

RUNTIME = "[ONNXRuntimeError] : Load model failed: " + "void frame(const std::string&)\n" * 200 + "IR version 77 > 14"


@pytest.mark.parametrize("most", [60, 300, 1000])
def test_a_long_error_keeps_its_beginning_and_its_end(most):
    said = shorten_error(RUNTIME, most)
    assert len(said) == most
    assert said.startswith("[ONNXRuntime")
    assert said.endswith("IR version 77 > 14")
    assert " ... " in said
    assert "\n" not in said


def test_a_short_error_stays_as_it_is_in_one_line():
    assert shorten_error("a\n   b ") == "a b"
    assert shorten_error("x" * 1000) == "x" * 1000
