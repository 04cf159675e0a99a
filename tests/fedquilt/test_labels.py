"""Labels of boards, and the selections that jobs and commands make by them."""

import pytest

from fedquilt.core import JobError
from fedquilt.formats import labels


def test_words_of_a_cell_are_labels_in_order():
    assert labels.parse_labels(labels.split_words("window, site=lab window")) == ("site=lab", "window")
    assert labels.parse_labels(labels.split_words("  ")) == ()


@pytest.mark.parametrize("word", ["Site=lab", "site=", "=lab", "a=b=c", "!old", "ha l", "x" * 65, "a=" + "b" * 65, ""])
def test_a_label_that_is_no_label_is_refused(word):
    with pytest.raises(JobError, match="is not a label: write a label such as site=lab or window"):
        labels.parse_labels([word])


def test_labels_are_bounded():
    with pytest.raises(JobError, match="33 labels are too many: set at most 32"):
        labels.parse_labels([f"l{index}" for index in range(33)])
    with pytest.raises(JobError, match=r"label 'site' is set twice \(site=hall, site=lab\)"):
        labels.parse_labels(["site=lab", "site=hall"])


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ([], True),
        (["site=lab"], True),
        (["window"], True),
        (["site=lab", "window"], True),
        (["site=hall"], False),
        (["site=lab", "old"], False),
        (["!old"], True),
        (["!window"], False),
        (["site=hall|site=lab"], True),
        (["site=hall|!window"], False),
    ],
)
def test_a_selection_is_of_boards_for_which_every_word_holds(wanted, found):
    labels.require_valid_selection(wanted)
    assert labels.is_selected(wanted, ("site=lab", "window")) is found


@pytest.mark.parametrize("word", ["", "!", "site=lab|", "a b", "!!old"])
def test_a_selection_by_what_is_no_label_is_refused(word):
    """It would select nobody, or everybody, for ever."""
    with pytest.raises(JobError, match="is not a label or !label"):
        labels.require_valid_selection([word])
