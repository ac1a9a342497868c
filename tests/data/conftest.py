"""The state law, stated once: resuming equals never stopping."""

import itertools
import json

import numpy as np
import pytest

from hyperpod_plugins.data import write_tokens


def collect(make, num_items):
    """The first `num_items` items of a stateful iterable, epoch after epoch."""
    source = make()
    endless = itertools.chain.from_iterable(iter(source) for _ in itertools.count())
    return list(itertools.islice(endless, num_items))


def collect_with_cuts(make, num_items, cuts):
    """The same, by a new object at each cut, which knows of the old one only what JSON can carry."""
    items, state, resumed = [], None, []
    for stop in [*sorted(cuts), num_items]:
        source = make()
        if state is not None:
            source.load_state_dict(json.loads(state))
            resumed.append(json.loads(state) == source.state_dict())
        endless = itertools.chain.from_iterable(iter(source) for _ in itertools.count())
        items += itertools.islice(endless, stop - len(items))
        state = json.dumps(source.state_dict())
    return items, all(resumed)


@pytest.fixture(scope="session")
def resuming_equals_never_stopping():
    def check(make, num_items, cuts):
        items, states_survive = collect_with_cuts(make, num_items, cuts)
        assert items == collect(make, num_items)
        assert states_survive

    return check


@pytest.fixture
def token_file(tmp_path):
    def write(num_tokens, name="tokens.bin", vocab_size=1 << 20):
        path = tmp_path / name
        write_tokens(path, [np.arange(num_tokens) % vocab_size], vocab_size=vocab_size, progress=False)
        return path

    return write
