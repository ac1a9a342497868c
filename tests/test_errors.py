"""Lists of names in messages, and the reference of errors and events."""

import re
from pathlib import Path

import pytest

from hyperpod_plugins import errors
from hyperpod_plugins.errors import HyperPodError, format_list
from hyperpod_plugins.recovery.plan import RecoveryLevel


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


def test_the_reference_lists_each_error_and_each_event():
    docs = Path(__file__).parents[1] / "docs" / "reference"
    listed = (docs / "errors.md").read_text()
    public = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, HyperPodError)]
    assert [each.__name__ for each in public if each is not HyperPodError and f"`{each.__name__}`" not in listed] == []
    package = Path(errors.__file__).parent
    source = "".join(path.read_text() for path in package.rglob("*.py"))
    names = {*re.findall(r'"((?:elastic|recovery)\.[a-z_]+)"', source), *(level.event for level in RecoveryLevel)}
    listed = (docs / "events.md").read_text()
    assert [name for name in sorted(names) if f"`{name}`" not in listed] == []
