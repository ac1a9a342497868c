"""Which degrees a job begins with, of those that its user allows: tables."""

import pytest

from hyperpod_plugins.elastic.membership.elastic_spec import ReplicaLayout, choose, first_that_fits, sort_layouts
from hyperpod_plugins.errors import DegreeError

SIZES = (1, 2, 3, 4)


def layouts(*degrees, sizes=SIZES):
    return [ReplicaLayout(shard_degree=shard, tensor_degree=tensor, sizes=sizes) for shard, tensor in degrees]


@pytest.mark.parametrize(
    ("degrees", "wanted", "order"),
    [
        pytest.param([(1, 1), (4, 1), (2, 1)], [(0, 0), (0, 1)], [(4, 1), (2, 1), (1, 1)], id="the largest"),
        pytest.param([(4, 1), (2, 1), (1, 1)], [(0, 0), (2, 1)], [(2, 1), (4, 1), (1, 1)], id="the strategy's first"),
        pytest.param(
            [(4, 1), (2, 1), (1, 1)], [(1, 1), (2, 1)], [(1, 1), (2, 1), (4, 1)], id="what is asked for first"
        ),
        pytest.param(
            [(2, 2), (4, 1), (1, 4)], [(0, 0), (0, 1)], [(4, 1), (2, 2), (1, 4)], id="the tensor degree stays"
        ),
        pytest.param([(2, 2), (4, 1), (1, 4)], [(0, 0), (0, 2)], [(2, 2), (4, 1), (1, 4)], id="whatever it is"),
        pytest.param([(1, 2), (4, 1)], [(0, 0), (0, 2)], [(4, 1), (1, 2)], id="but a larger replica counts more"),
    ],
)
def test_the_order(degrees, wanted, order):
    assert [each.degrees for each in sort_layouts(layouts(*degrees), wanted=wanted)] == order


@pytest.mark.parametrize(
    ("num_ranks", "sizes", "degrees", "num_replicas"),
    [
        pytest.param(8, SIZES, (4, 1), 2, id="all"),
        pytest.param(7, SIZES, (4, 1), 1, id="three wait"),
        pytest.param(3, SIZES, (2, 1), 1, id="one waits"),
        pytest.param(1, SIZES, (1, 1), 1, id="alone"),
        pytest.param(6, (2, 4), (2, 1), 2, id="of four there would be one replica"),
        pytest.param(20, (1, 2, 3), (4, 1), 3, id="more are not allowed"),
    ],
)
def test_the_first_that_fits(num_ranks, sizes, degrees, num_replicas):
    layout = first_that_fits(layouts((4, 1), (2, 1), (1, 1), sizes=sizes), num_ranks)
    assert layout.degrees == degrees
    assert layout.replicas_in(num_ranks) == num_replicas


def test_too_few_for_all_of_them():
    allowed = layouts((4, 1), (1, 2), sizes=(2, 3))
    assert first_that_fits(allowed, 3) is None
    words = r"3 ranks are here, and this job may have shard degree 4 with 8 ranks or more, or shard degree 1 x tensor "
    with pytest.raises(DegreeError, match=words + r"degree 2 with 4 ranks or more\. Start more processes"):
        choose(allowed, 3)
