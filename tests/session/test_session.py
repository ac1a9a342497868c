"""A session in one process, without an agent: what a loop gets, and what it must not do."""

import inspect
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.comm.runtime import runtime
from hyperpod_plugins.data import BatchSplit, StatefulLoader
from hyperpod_plugins.data.loader import MapStyleData
from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy
from hyperpod_plugins.elastic.membership.quorum_policy import QuorumPolicy
from hyperpod_plugins.elastic.membership.restart_policy import NOT_NEEDED
from hyperpod_plugins.elastic.scaling.lr_scaling import LRScalingRule
from hyperpod_plugins.elastic.store.job_store import RESTART_KEY
from hyperpod_plugins.elastic.store.world import WorldPlan
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import (
    ConfigError,
    DeviceHung,
    LoopError,
    NonFiniteError,
    PeerLost,
    RecoveryError,
    StateLost,
)
from hyperpod_plugins.parallel import parallelize
from hyperpod_plugins.recovery import HangPolicy, Member, restart_all
from hyperpod_plugins.session import Session
from hyperpod_plugins.session.transaction import ends_only_this_process

NUM_SAMPLES, WIDTH = 20, 4
pytestmark = pytest.mark.slow_single


@pytest.fixture
def session(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "HYPERPOD_STORE"):
        monkeypatch.delenv(name, raising=False)
    yield Session()
    dist.destroy_process_group()
    runtime.reset()


@pytest.fixture
def make_session(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "HYPERPOD_STORE"):
        monkeypatch.delenv(name, raising=False)
    yield Session
    group_health.refusal_reason = ""
    dist.destroy_process_group()


class Trained:
    def __init__(self, session, *, schedule=True, **options):
        torch.manual_seed(0)
        self.model = session.parallelize(nn.Linear(WIDTH, WIDTH))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        session.train(self.model, self.optimizer, self.scheduler if schedule else (), **options)
        self.data = torch.arange(NUM_SAMPLES * WIDTH, dtype=torch.float32).view(NUM_SAMPLES, WIDTH) / 50
        self.seen = []

    def loader(self, **options):
        return DataLoader(TensorDataset(self.data, torch.arange(NUM_SAMPLES)), **{"batch_size": 5, **options})

    def loss(self, batch):
        x, ids = batch
        self.seen.append(ids.tolist())
        return (self.model(x) - x.flip(1)).square().mean()


def by_hand(trained, batches, micro_steps=1):
    """The weights, after plain torch has trained on the same batches."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    for begin in range(0, len(batches), micro_steps):
        ids = [i for batch in batches[begin : begin + micro_steps] for i in batch]
        x = trained.data[ids]
        loss = (model(x) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return model.weight.detach(), losses


def test_steps_are_those_of_plain_torch(session):
    trained, losses, ends = Trained(session), [], []
    for step in session.steps(trained.loader(shuffle=True), epochs=2):
        with step:
            losses.append(float(step.run(trained.loss)))
        ends.append((step.index, step.epoch, step.ends_epoch))
    assert ends == [(i, i // 4, i % 4 == 3) for i in range(8)]
    for epoch in (trained.seen[:4], trained.seen[4:]):
        assert sorted(i for batch in epoch for i in batch) == list(range(NUM_SAMPLES))
    assert trained.seen[:4] != trained.seen[4:]
    weight, wanted = by_hand(trained, trained.seen)
    torch.testing.assert_close(trained.model.weight.full_tensor().detach(), weight)
    assert losses == pytest.approx(wanted)


def test_micro_steps_and_a_last_step_that_is_smaller(session):
    session._global_batch_size = 8
    trained, losses = Trained(session), []
    for step in session.steps(trained.loader(batch_size=4)):
        with step:
            losses.append(step.run(lambda batch: {"loss": trained.loss(batch), "one": 1.0}))
    assert [len(batch) for batch in trained.seen] == [4, 4, 4, 4, 4]
    first, wanted = by_hand(trained, trained.seen[:4], micro_steps=2)
    assert [float(each["loss"]) for each in losses[:2]] == pytest.approx(wanted)
    assert [float(each["one"]) for each in losses] == pytest.approx([1.0, 1.0, 1.0])
    assert first.shape == (WIDTH, WIDTH)


def test_weights_that_a_body_writes_after_an_evaluation(session):
    losses = []
    for evaluates in (False, True):
        trained = Trained(session)
        losses.append([])
        for step in session.steps(trained.loader()):
            with step:
                losses[-1].append(float(step.run(trained.loss)))
                with torch.no_grad():
                    if evaluates:
                        trained.model(trained.data)
                    for each in trained.model.parameters():
                        each.mul_(0.5)
    assert losses[0] == losses[1]


def test_limits_and_a_loop_that_is_left(session):
    trained = Trained(session)
    steps = [step.index for step in map(run_empty(trained), session.steps(trained.loader(), epochs=9, max_steps=3))]
    assert steps == [0, 1, 2]
    for step in session.steps(trained.loader()):
        with step:
            step.run(trained.loss)
        break
    dist.barrier()  # nothing is forbidden any more
    trained.optimizer.step()


def run_empty(trained):
    def run(step):
        with step:
            step.run(trained.loss)
        return step

    return run


def test_a_checkpoint_goes_on_where_it_was_written(session, tmp_path):
    trained = Trained(session)
    session.state["best"] = 7
    for step in session.steps(trained.loader(shuffle=True), epochs=2):
        with step:
            step.run(trained.loss)
            if step.index == 4:
                session.save(tmp_path / "saved")
    weight, seen = trained.model.weight.full_tensor().detach().clone(), trained.seen[5:]
    again = Trained(session)
    session.state["best"] = 0
    session.load(tmp_path / "saved")
    assert session.state["best"] == 7
    indices = [step.index for step in map(run_empty(again), session.steps(again.loader(shuffle=True), epochs=2))]
    assert indices == [5, 6, 7]
    assert again.seen == seen
    assert torch.equal(again.model.weight.full_tensor(), weight)


def test_batches_of_a_step_whose_body_runs_again(session):
    trained = Trained(session)
    for step in session.steps(trained.loader(shuffle=True), epochs=2):
        with step:
            step.run(trained.loss)
        loop, (wanted,) = step._loop, step.batches
        before = torch.get_rng_state()
        (found,) = loop._read_again(loop._position)
        assert all(map(torch.equal, found, wanted))
        assert torch.equal(torch.get_rng_state(), before)
        for position in (replace(loop._position, num_samples=3), replace(loop._position, loader_before=None)):
            with pytest.raises(LoopError, match=f"the batches of step {step.index}, whose body runs again"):
                loop._read_again(position)


def test_clipping_and_a_backward_of_ones_own(session):
    norms = []

    def backward(loss):
        (loss * 100).backward()

    trained = Trained(session, backward=backward, max_grad_norm=1e-3)
    trained.optimizer.register_step_pre_hook(
        lambda optimizer, *_: norms.append(
            float(torch.cat([p.grad.full_tensor().flatten() for p in trained.model.parameters()]).norm())
        )
    )
    for step in session.steps(trained.loader(), max_steps=2):
        with step:
            step.run(trained.loss)
    assert norms == pytest.approx([1e-3, 1e-3], rel=1e-3)


def values(model):
    return [value.detach().to_local().clone() for value in model.parameters()]


@pytest.mark.parametrize("policy", ["auto", "stop", "skip", "warn", "off", "ignore"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_loss_that_is_not_finite(session, caplog, policy, max_grad_norm):
    """Of step 2; where gradients are clipped, only a gradient is infinite."""
    if policy == "ignore":
        with pytest.raises(ConfigError, match="'ignore' is not known"):
            Trained(session, non_finite=policy)
        return
    trained = Trained(session, non_finite=policy, max_grad_norm=max_grad_norm)
    before = steps = None

    def run():
        nonlocal before, steps
        for step in session.steps(trained.loader(), epochs=1):
            steps = step.index
            with step:
                if step.index == 2:
                    before = values(trained.model)
                bad = 2 if step.index == 2 else 1
                if max_grad_norm and bad == 2:
                    step.run(lambda batch: trained.loss(batch) + (trained.model.weight.sum() * 0).sqrt())
                else:
                    step.run(lambda batch, bad=bad: trained.loss(batch) / (2 - bad))
            if step.index == 2:
                assert all(map(torch.equal, before, values(trained.model))) == (policy == "skip")
                assert trained.scheduler.last_epoch == 3

    if policy in ("auto", "stop"):
        with pytest.raises(
            NonFiniteError, match=r"step 2 of epoch 0 is not finite.* of this rank has such a loss.*Nothing"
        ):
            run()
        assert steps == 2
        assert all(map(torch.equal, before, values(trained.model)))
        return
    run()
    assert steps == 3
    assert ("step 2 of epoch 0 is not finite" in caplog.text) == (policy != "off")


def test_values_that_all_agree_on(session):
    assert session.agree({"name": "x", "at": 3}) == {"name": "x", "at": 3}


@pytest.fixture
def member(monkeypatch, session):
    """Makes the session's process a member of a job."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(restart_all, "_FINAL_SAVE_S", 0.0)
    session._member = Member(
        JobEnv(store_host="127.0.0.1", store_port=store.port, run_id="job"),
        worker_id=0,
        world=WorldPlan.initial(1),
        policy=QuorumPolicy(),
        hangs=HangPolicy(),
    )
    yield session._member
    group_health.reset()


def test_a_joiner_gets_what_was_agreed_on_before_it_came(session, member):
    agreed = [session.agree("run-7"), session.agree(None)]
    with session._entries.enter(member.job, "steps"):
        assert session.agree("of a step") == "of a step"  # on all ranks, a joiner too
    agreed.append(session.agree([3]))
    session._num_agreed = 0
    group_health.detach()
    assert [session.agree("its own") for _ in range(3)] == agreed == ["run-7", None, [3]]
    with pytest.raises(StateLost, match=r"session\.agree 4 times, .* agreed on 3 values .* the same calls"):
        session.agree("its own")
    assert member.job_store.try_get(RESTART_KEY) is not None


def test_ranks_that_have_lost_a_peer_do_not_agree_each_with_itself(session, member):
    group_health.mark_broken("a test", lambda: None)
    with pytest.raises(PeerLost):
        session.agree("its own")


# -- wrong loops ----------------------------------------------------------------------------------------------------


def assert_refused(session, body, match):
    trained = Trained(session)

    def loop():
        for step in session.steps(trained.loader()):
            body(step, trained)

    with pytest.raises(LoopError, match=match):
        loop()


def test_a_collective_between_steps(session):
    def after(step, trained):
        run_empty(trained)(step)
        dist.barrier()

    assert_refused(session, after, "between the steps")


def test_a_collective_before_the_step_is_run(session):
    def before(step, trained):
        with step:
            dist.barrier()

    assert_refused(session, before, r"before `step.run")


def test_an_optimizer_stepped_by_hand(session):
    def by_hand(step, trained):
        with step:
            step.run(trained.loss)
            trained.optimizer.step()

    assert_refused(session, by_hand, "by hand.*manual_optimization=True")


def test_backward_by_hand(session):
    def backward(step, trained):
        def compute_loss(batch):
            loss = trained.loss(batch)
            loss.backward()
            return loss.detach()

        with step:
            step.run(compute_loss)

    assert_refused(session, backward, "Leave backward.*manual_optimization=True")


def test_bodies_that_do_not_use_their_step(session):
    def nothing(step, trained):
        with step:
            pass

    def twice(step, trained):
        with step:
            step.run(trained.loss)
            step.run(trained.loss)

    assert_refused(session, lambda step, trained: None, "without `with step:`")
    assert_refused(session, lambda step, trained: step.run(trained.loss), "outside")
    assert_refused(session, nothing, "nothing was trained")
    assert_refused(session, twice, "twice")


def test_a_scheduler_that_waits_for_a_metric_is_refused(session):
    model = session.parallelize(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"ReduceLROnPlateau .* in the body after step\.run"):
        session.train(model, optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


def test_an_optimizer_that_computes_gradients_itself_is_refused(session):
    model = session.parallelize(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="LBFGS evaluates its closure several times"):
        session.train(model, torch.optim.LBFGS(model.parameters()))


def test_steps_of_nothing(session):
    with pytest.raises(LoopError, match=r"session\.train"):
        session.steps(DataLoader(TensorDataset(torch.zeros(3))))


def test_loaders_that_nobody_else_could_continue(session):
    trained = Trained(session)

    class Stream(IterableDataset):
        def __iter__(self):
            yield 1

    with pytest.raises(ConfigError, match="map-style"):
        session.steps(DataLoader(Stream()))
    with pytest.raises(ConfigError, match="WeightedRandomSampler"):
        session.steps(trained.loader(sampler=WeightedRandomSampler([1.0] * NUM_SAMPLES, 4)))
    for sampler, yields in (
        (RandomSampler(trained.data, replacement=True), "20 of 20 samples with replacement"),
        (RandomSampler(trained.data, num_samples=4), "4 of 20 samples"),
        (SequentialSampler(range(8)), "8 of 20 samples"),
    ):
        with pytest.raises(ConfigError, match=rf"{type(sampler).__name__} that yields {yields}, .* Leave the sampler"):
            session.steps(trained.loader(sampler=sampler))
    for sampler in (BatchSampler(range(NUM_SAMPLES), 5, False), [[0, 1], [2, 3]]):
        with pytest.raises(ConfigError, match=r"with a batch_sampler"):
            session.steps(DataLoader(TensorDataset(trained.data), batch_sampler=sampler))
    with pytest.raises(ConfigError, match=r"with batch_size=None"):
        session.steps(DataLoader(TensorDataset(trained.data), batch_size=None))
    with pytest.raises(ConfigError, match=r"in_order=False"):
        session.steps(trained.loader(num_workers=1, in_order=False))


def test_every_option_of_a_loader_is_passed_on():
    given = {
        "num_workers": 1,
        "collate_fn": list,
        "pin_memory": True,
        "timeout": 7,
        "worker_init_fn": print,
        "multiprocessing_context": "spawn",
        "generator": torch.Generator(),
        "prefetch_factor": 3,
        "persistent_workers": True,
        "pin_memory_device": "cuda",
        "in_order": True,
    }
    of_order = {"self", "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
    assert inspect.signature(DataLoader.__init__).parameters.keys() - of_order == given.keys()
    theirs = DataLoader(TensorDataset(torch.zeros(4)), batch_size=2, **given)
    split = BatchSplit(global_batch_size=2, micro_batch_size=2, data_world_size=1)
    ours = MapStyleData(theirs, seed=0, taken_by="it").build_loader(split, 0, StatefulLoader)._loader
    assert {name: getattr(ours, name) for name in given} == {name: getattr(theirs, name) for name in given}


class Counting(nn.Linear):
    count = 0


class OfRank:
    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def save_of_ranks(folder):
    """A loop whose body steps a scheduler, and keeps one value that is equal on all ranks and one that is not."""
    session = Session(hybrid_shard_degree=1, global_batch_size=12)
    model, own, shared = session.parallelize(nn.Linear(WIDTH, WIDTH)), OfRank(), OfRank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    session.train(model, optimizer)
    for name, each in (("own", own), ("shared", shared), ("schedule", scheduler)):
        session.register_rank_local(name, each)
    for step in session.steps(DataLoader(TensorDataset(torch.ones(48, WIDTH)), batch_size=3)):
        with step:
            step.run(lambda batch: model(batch[0]).square().mean())
            scheduler.step()
            own.value, shared.value = session.rank + 1, 7
            if step.ends_epoch:
                session.save(folder)
    return own.value


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.spawns), 1])
def test_registered_state_in_a_job_of_another_size(session, tmp_path, caplog, world_size):
    """What was equal on all ranks goes on, such as a schedule that the body steps; the rest begins anew, by name."""
    if world_size == 1:
        save_of_ranks(tmp_path / "saved")
    else:
        assert run_ranks(save_of_ranks, tmp_path / "saved", world_size=world_size) == [1, 2]
    model, own, shared = session.parallelize(nn.Linear(WIDTH, WIDTH)), OfRank(), OfRank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    session.train(model, optimizer)
    session.register_rank_local("own", own)
    session.register_rank_local("schedule", scheduler)
    session.load(tmp_path / "saved")
    session.register_rank_local("shared", shared)
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (4, pytest.approx(0.01))
    assert (shared.value, own.value) == (7, 1 if world_size == 1 else 0)
    assert ("registered 'own'" in caplog.text) == (world_size == 2)
    assert "shared" not in caplog.text
    assert "schedule" not in caplog.text


@pytest.mark.parametrize("differ", [False, True])
def test_state_of_ranks_after_a_restart_with_other_degrees(session, differ):
    model, mine = session.parallelize(Counting(WIDTH, WIDTH)), OfRank()
    model.count = 0
    session.train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    session.register_rank_local("mine", mine)
    saved = {"attributes": {"module": {"count": 7}}, "registered 'mine'": {"state": {"value": 5}}}
    session._trained._load_of_first(saved, {*saved} if differ else (), is_of_another_job=False)
    assert (model.count, mine.value) == (7, 0 if differ else 5)


def test_state_that_a_replacement_could_not_read(session):
    trained = Trained(session)
    session.state["callback"] = print
    with pytest.raises(ConfigError, match=r"session.state\['callback'\]"):
        next(iter(session.steps(trained.loader())))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"elastic": ElasticPolicy(max_replicas=2)}, "needs global_batch_size"),
        ({"global_batch_size": 8, "samples_per_replica": 4}, "not both"),
        ({"samples_per_replica": 4, "elastic": True}, r"elastic=ElasticPolicy\(max_replicas"),
        ({"global_batch_size": 8, "lr_scaling": "linear"}, "give samples_per_replica"),
        ({"global_batch_size": 8, "lr_scaling": "adascale"}, "give samples_per_replica"),
        ({"samples_per_replica": 4, "lr_scaling": "cubic"}, "lr_scaling must be one of"),
        ({"samples_per_replica": 4, "reproducible": True}, "a global batch that stays the same"),
        ({"global_batch_size": 8, "reproducible": True}, "needs `elastic`"),
        ({"global_batch_size": 8, "shard_degrees": (1, 2)}, "need `elastic`"),
        ({"global_batch_size": 8, "tensor_degrees": (1, 2)}, "need `elastic`"),
        ({"global_batch_size": 8, "elastic": True, "shard_degrees": (0,)}, "whole numbers from 1 on"),
        ({"global_batch_size": 8, "elastic": True, "reproducible": True, "shard_degrees": (2,)}, "add up otherwise"),
    ],
)
def test_batches_that_are_not_possible(options, words):
    with pytest.raises(ConfigError, match=words):
        Session(**options)


def test_a_session_in_a_process_that_has_joined_another_group(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "HYPERPOD_STORE"):
        monkeypatch.delenv(name, raising=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match=r"'gloo', which cannot lose members\. Create the Session"):
            Session()
    finally:
        dist.destroy_process_group()


def test_a_batch_that_follows_the_world_goes_on_where_it_was_saved(make_session, tmp_path):
    """Steps of 8, 8 and 4 samples are 2, 2 and 1 steps of the schedule, and the factor moves from 1 to 2."""
    rule = LRScalingRule(scaling="linear", reference_batch_size=4, warmup_samples=16)
    session = make_session(samples_per_replica=8, lr_scaling=rule)
    trained, used, factors = Trained(session), [], []
    trained.optimizer.register_step_pre_hook(lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"]))
    for step in session.steps(trained.loader(shuffle=True), epochs=2):
        with step:
            step.run(trained.loss)
            factors.append((step.num_samples, session.schedule_step, session.lr_factor))
            if step.index == 3:
                session.save(tmp_path / "saved")
    assert factors == [(8, 2, 1.5), (8, 4, 2.0), (4, 5, 2.0), (8, 7, 2.0), (8, 9, 2.0), (4, 10, 2.0)]
    bases = [0.1 * 0.5 ** (done // 2) for done in (0, 2, 4, 5, 7, 9)]
    assert used == pytest.approx([base * factor for base, factor in zip(bases, (1, 1.5, 2, 2, 2, 2), strict=True)])
    weight, seen = trained.model.weight.full_tensor().detach().clone(), trained.seen
    again = Trained(session)
    session.load(tmp_path / "saved")
    for step in map(run_empty(again), session.steps(again.loader(shuffle=True), epochs=2)):
        assert step.index >= 4
    assert again.seen == seen[-len(again.seen) :]
    assert (session.schedule_step, session.lr_factor) == (10, 2.0)
    assert torch.equal(again.model.weight.full_tensor(), weight)


def test_a_rule_that_does_not_fit_the_optimizer(make_session):
    session = make_session(samples_per_replica=8, lr_scaling=LRScalingRule(scaling="sqrt", scale_adam=True))
    with pytest.raises(ConfigError, match="scale_adam is for Adam"):
        session.steps(Trained(session).loader())


def test_reproducible_steps_are_those_of_plain_torch(make_session):
    session = make_session(global_batch_size=10, elastic=ElasticPolicy(max_replicas=2), reproducible=True)
    trained, results = Trained(session), []
    for step in session.steps(trained.loader(shuffle=True), epochs=2):
        with step:
            results.append(step.run(lambda batch: {"loss": trained.loss(batch), "first": float(batch[1][0])}))
    weight, wanted = by_hand(trained, trained.seen, micro_steps=2)
    assert [float(each["loss"]) for each in results] == pytest.approx(wanted)
    firsts = [ids[0] for ids in trained.seen]
    assert [float(each["first"]) for each in results] == [sum(firsts[i : i + 2]) / 2 for i in range(0, 8, 2)]
    torch.testing.assert_close(trained.model.weight.full_tensor().detach(), weight)


def test_a_hook_that_sees_the_gradient_of_one_replica_is_refused(make_session):
    session = make_session(global_batch_size=10, elastic=ElasticPolicy(max_replicas=2), reproducible=True)
    trained = Trained(session)
    trained.model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    before = trained.model.weight.full_tensor().clone()
    with (
        pytest.raises(ConfigError, match=r"hook on weight is not possible with reproducible=True.*step_pre_hook"),
        next(iter(session.steps(trained.loader()))) as step,
    ):
        step.run(trained.loss)
    torch.testing.assert_close(trained.model.weight.full_tensor(), before)


@pytest.mark.parametrize(
    "options",
    [
        {"global_batch_size": 10, "elastic": ElasticPolicy(max_replicas=2), "reproducible": True},
        {"samples_per_replica": 10, "lr_scaling": "adascale"},
    ],
    ids=["reproducible", "adascale"],
)
def test_a_model_whose_replicas_are_averaged_by_fsdp2_is_refused(make_session, options):
    session = make_session(**options)
    trained = Trained(session)
    model = parallelize(nn.Linear(WIDTH, WIDTH), session.mesh, session.config)
    session.train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="leave sharding to the strategy or the session"):
        session.steps(trained.loader())


def test_an_optimizer_that_was_made_before_sharding_trains_the_shards(session):
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD([{"params": [model.bias], "lr": 0.2}, {"params": [model.weight]}], lr=0.1)
    session.parallelize(model)
    session.train(model, optimizer)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert held[0] is model.bias
    assert held[1] is model.weight
    before = model.weight.full_tensor().detach().clone()
    loader = DataLoader(TensorDataset(torch.randn(NUM_SAMPLES, WIDTH)), batch_size=5)
    for step in session.steps(loader):
        with step:
            step.run(lambda batch: model(batch[0]).square().mean())
    assert not torch.equal(model.weight.full_tensor(), before)


def test_an_optimizer_that_has_trained_before_sharding_is_refused(session):
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    session.parallelize(model)
    with pytest.raises(ConfigError, match=r"SGD has state already, of weight before it was sharded"):
        session.train(model, optimizer)


@pytest.mark.parametrize(
    ("error", "is_alone"),
    [
        (None, False),
        (SystemExit(NOT_NEEDED), True),  # the job goes on in a smaller world
        (RecoveryError("another process has taken the place of rank 1"), True),
        (DeviceHung("a test"), True),
        (SystemExit(0), False),
        (LoopError("a step without its body"), False),
        (ValueError("of the program"), False),
    ],
)
def test_whose_end_is_not_that_of_the_job(error, is_alone):
    assert ends_only_this_process(error) == is_alone
