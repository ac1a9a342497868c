"""The pure plan of a replay: which ops run, in which order, and when memory may go."""

import torch

from hyperpod_plugins.delayed_init.tape import Draw, Op, plan_replay


def op(*, reads=(), writes=(), makes=(), number=None):
    return Op(
        func=None,
        args=(),
        kwargs={},
        outputs=(),
        used=frozenset((*reads, *writes)),
        written=frozenset((*writes, *makes)),
        default_dtype=torch.float32,
        draw=None if number is None else Draw(0, number, None),
    )


def test_ops_nobody_needs_are_left_out():
    ops = [op(makes=[0]), op(makes=[1]), op(reads=[0], makes=[2])]
    assert plan_replay(ops, [2], with_draws=True).steps == (0, 2)


def test_dead_draws_run_but_what_only_they_were_followed_by_does_not():
    ops = [op(writes=[0], number=1), op(writes=[0]), op(writes=[1], number=2)]
    plan = plan_replay(ops, [1], with_draws=True)
    assert plan.steps == (0, 2)
    assert plan.last_use[0] == 0
    assert plan_replay(ops, [1], with_draws=False).steps == (2,)


def test_inputs_of_dead_draws_are_computed():
    ops = [op(makes=[0]), op(reads=[0], makes=[1], number=1)]
    assert plan_replay(ops, [], with_draws=True).steps == (0, 1)


def test_a_cast_at_the_end_of_a_build_runs_right_after_the_draw_it_casts():
    draws = [op(writes=[weight], number=weight + 1) for weight in range(3)]
    casts = [op(reads=[weight], makes=[weight + 3]) for weight in range(3)]
    plan = plan_replay(draws + casts, [3, 4, 5], with_draws=True)
    assert plan.steps == (0, 3, 1, 4, 2, 5)
    assert [plan.last_use[weight] for weight in range(3)] == [3, 4, 5]


def test_draws_keep_their_order_even_when_an_early_one_waits_for_nothing():
    ops = [op(writes=[0], number=1), op(makes=[1]), op(reads=[1, 0], writes=[2], number=2), op(writes=[3], number=3)]
    steps = plan_replay(ops, [0, 2, 3], with_draws=True).steps
    assert [step for step in steps if ops[step].draw] == [0, 2, 3]


def test_ops_on_one_version_keep_their_order():
    ops = [op(makes=[0]), op(writes=[1], number=1), op(reads=[1], writes=[0]), op(writes=[0])]
    assert plan_replay(ops, [0], with_draws=True).steps == (0, 1, 2, 3)
