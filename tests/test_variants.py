"""The list of variants names tests that exist."""

from pathlib import Path

TESTS = Path(__file__).parent


def test_each_variant_is_a_test():
    lines = [line for line in (TESTS / "variants.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines == sorted(set(lines))
    for line in lines:
        path, _, name = line.partition("::")
        assert f"def {name.partition('[')[0]}(" in (TESTS.parent / path).read_text(), line
