"""A pure function's latest result stands for equal arguments alone."""

from fedquilt.core import WorkEstimate
from fedquilt.core.last_call_cache import cache_last_call


def test_equal_arguments_are_computed_once_and_others_anew():
    calls = []

    @cache_last_call
    def added(one, other=0):
        calls.append((one, other))
        return [one + other]

    assert [added(1, 2), added(1, 2), added(1, other=2), added(1, other=3), added(2, 2)] == [[3], [3], [3], [4], [4]]
    assert calls == [(1, 2), (1, 2), (1, 3), (2, 2)]


def test_an_error_is_no_result():
    outcomes = iter([None, 5])

    @cache_last_call
    def taken(key):
        if (found := next(outcomes)) is None:
            raise ValueError(key)
        return found

    for wanted in ("failed", 5, 5):
        try:
            assert taken("a") == wanted
        except ValueError:
            assert wanted == "failed"


def test_work_of_other_examples_or_of_other_work_is_not_taken_for_the_last():
    one, other = WorkEstimate(flops_per_example=2.0), WorkEstimate(flops_per_example=3.0)
    asked = [work.total_for_examples(examples).flops for work in (one, other) for examples in (10, 20, 20)]
    assert asked == [20.0, 40.0, 40.0, 30.0, 60.0, 60.0]
