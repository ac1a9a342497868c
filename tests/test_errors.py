"""Lists of names in messages."""

import pytest

from hyperpod_plugins.errors import format_list


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ([], ""),
        (["a"], "a"),
        (list("abcde"), "a, b, c, d, e"),
        (list("abcdef"), "a, b, c, d, e and 1 more"),
        (iter("abcdefgh"), "a, b, c, d, e and 3 more"),
    ],
)
def test_a_long_list_is_cut_and_says_so(names, wanted):
    assert format_list(names) == wanted


def test_the_length_can_be_chosen():
    assert format_list("abc", at_most=2) == "a, b and 1 more"
