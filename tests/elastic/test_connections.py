"""The process that serves the store may keep a connection to everybody."""

import resource

import pytest

from hyperpod_plugins.elastic.process import OPEN_FILES, raise_open_file_limit


@pytest.fixture(autouse=True)
def hard():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def soft_limit():
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_a_low_limit_is_raised_as_far_as_allowed(hard):
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    raise_open_file_limit()
    assert soft_limit() == (OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES))


def test_a_limit_is_never_lowered(hard):
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    raise_open_file_limit()
    assert soft_limit() == hard
