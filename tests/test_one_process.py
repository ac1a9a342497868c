"""Generated programs on several ranks give the losses and the parameters of one process; see `one_process`.

`python tests/one_process.py --cases 300` is the long run.
"""

import pytest
from one_process import run_cases, run_with_faults


@pytest.mark.spawns
@pytest.mark.parametrize(("world_size", "numbers"), [(2, range(25)), (4, range(15))])
def test_generated_programs_equal_one_process(run_ranks, world_size, numbers):
    by_rank = run_ranks(run_cases, list(numbers), world_size=world_size, timeout_s=280)
    assert by_rank == [[]] * world_size


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("world_size", "faults"),
    [
        (1, [("units_are_not_watched", 1)]),
        (
            2,
            [
                ("gradients_without_optimizer_stay", 57),
                ("epochs_keep_their_length", 13),
                ("every_list_is_a_chain", 0),
                ("attributes_stay_behind", 10),
                ("references_stay_behind", 14),
            ],
        ),
    ],
)
def test_faults_that_were_there_once_are_found(run_ranks, world_size, faults):
    assert run_ranks(run_with_faults, faults, world_size=world_size) == [[]] * world_size
