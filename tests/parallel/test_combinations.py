"""Pairs of techniques: a part of `combinations.py`, and that the page says what a configuration refuses."""

import pytest
from parallel.combinations import PAGE, PART, REFUSED, WORLD_SIZE, pairs, plain, refusal, train_pairs


@pytest.mark.spawns
def test_pairs_of_techniques_equal_one_process(run_ranks):
    assert {*PART} <= {*pairs()}
    for told in run_ranks(train_pairs, PART, world_size=WORLD_SIZE, timeout_s=150):
        assert {pair: outcome for pair, outcome in told.items() if outcome != "ok"} == {}


def test_the_page_has_each_refusal_of_a_configuration():
    page = PAGE.read_text()
    reasons = {plain(REFUSED + why) for why in map(refusal, pairs()) if why}
    assert len(reasons) >= 4
    for reason in reasons:
        assert f". {reason}\n" in page, reason
    assert page.count("no (") >= sum(bool(refusal(pair)) for pair in pairs())
