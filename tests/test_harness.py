"""The processes of tests themselves."""

import pytest


def imported():
    import sys

    return "transformers.models.llama.modeling_llama" in sys.modules


@pytest.mark.spawns
def test_ranks_are_forked_from_a_process_that_has_imported_what_they_need(run_ranks):
    """Each would import it for ten seconds otherwise, in hundreds of tests, and none of them would fail."""
    assert run_ranks(imported, world_size=2) == [True, True]
