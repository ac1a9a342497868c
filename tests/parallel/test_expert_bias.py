"""Biases of routers that move against the tokens of all ranks: when, by how much, and what stays as it was.

With ranks that are lost: `tests/recovery/test_context.py`; with replicas that join: `tests/session`.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from device import ACCELERATOR, DEVICE, devices
from parallel.equal_training import GLOBAL_BATCH, NUM_STEPS, samples
from parallel.expert_models import make_model
from torch import nn
from torch.utils.data import DataLoader

from hyperpod_plugins.delayed_init import delayed_init
from hyperpod_plugins.errors import CheckpointMismatch, ConfigError, NotBuiltYetError
from hyperpod_plugins.memory.recompute import recompute_blocks
from hyperpod_plugins.parallel import (
    CheckpointWriter,
    ParallelConfig,
    balance_experts,
    build_data_group,
    build_mesh,
    export_safetensors,
    load_checkpoint,
    parallelize,
    router_z_loss,
)
from hyperpod_plugins.parallel.expert_bias import BIAS, counting_tokens, move_bias_of, without_counts

RATE = 0.0625  # sums of it are exact
BATCH = samples(2)


def biased(name="deepseek_v3", **options):
    """With two layers of experts."""
    return balance_experts(make_model(name, first_k_dense_replace=0, **options), method="bias", bias_rate=RATE)


def routers(model):
    return [part for part in model.modules() if type(part).__name__.lower().endswith("topkrouter")]


def biases(model):
    return torch.stack([router.get_buffer(BIAS) for router in routers(model)]).cpu()


def counts(model):
    return torch.stack([router.tokens_per_expert for router in routers(model)])


def chosen_by(model):
    """How many tokens each router of a model gives to each expert from now on, forwards one after the other."""
    seen = []
    for number, router in enumerate(routers(model)):
        router.register_forward_hook(
            lambda _, args, result, number=number: seen.append(
                (number, torch.bincount(result[2].flatten(), minlength=8))
            )
        )
    return seen


def loss_of(model, batch=BATCH):
    return model(input_ids=batch, labels=batch).loss


def moves(numbers):
    return RATE * torch.sign(numbers.sum(dim=1, keepdim=True) - 8 * numbers).float()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def train(model, batches, num_micro_steps=1, optimizer=None):
    """The biases after each step."""
    optimizer, found = optimizer or sgd(model), []
    for batch in batches:
        for part in batch.chunk(num_micro_steps):
            (loss_of(model, part) / num_micro_steps).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(biases(model).clone())
    return found


# -- what counts, and when --------------------------------------------------------------------------------------------


def test_biases_move_once_a_step_against_what_was_counted():
    model = biased()
    seen, optimizer = chosen_by(model), sgd(model)
    for part in BATCH.chunk(2):  # two micro-steps
        loss_of(model, part).backward()
        assert not biases(model).any()
    wanted = [sum(numbers for place, numbers in seen if place == layer) for layer in range(2)]
    assert torch.equal(counts(model), torch.stack(wanted))
    optimizer.step()
    assert torch.equal(biases(model), moves(torch.stack(wanted)))
    assert biases(model).any()
    assert not counts(model).any()
    optimizer.step()  # on the same gradients
    assert torch.equal(biases(model), moves(torch.stack(wanted)))


def test_an_expert_with_exactly_the_mean_stays():
    model = biased()
    loss_of(model)
    for router in routers(model):
        router.tokens_per_expert.copy_(torch.tensor([3, 3, 2, 4, 3, 3, 0, 6]))
    sgd(model).step()
    assert torch.equal(biases(model)[0], RATE * torch.tensor([0.0, 0, 1, -1, 0, 0, 1, -1]))


def test_a_bias_changes_the_choice_and_no_weight():
    """Of the same experts, the weights are those of the scores without it."""
    model = biased()
    (router, _), hidden = routers(model), torch.randn(40, 32)
    _, _, preferred = router.eval()(hidden)
    router.e_score_correction_bias.copy_(torch.linspace(-0.4, 0.4, 8))
    logits, weights, chosen = router(hidden)
    assert not torch.equal(chosen, preferred)
    scores = logits.sigmoid().gather(1, chosen)
    wanted = scores / scores.sum(dim=1, keepdim=True) * router.routed_scaling_factor
    torch.testing.assert_close(weights, wanted)


def test_tokens_are_spread_more_evenly():
    model = balance_experts(make_model("deepseek_v3", n_group=1), method="bias", bias_rate=0.01)
    seen, fixed = chosen_by(model), torch.optim.SGD(model.parameters(), lr=0.0)
    train(model, [BATCH] * 40, optimizer=fixed)
    first, last = (numbers.double().std() for _, numbers in (seen[0], seen[-1]))
    assert last < first / 2


@pytest.mark.parametrize("kind", ["full", "selective", "of transformers", "reentrant"])
def test_recomputed_forwards_count_once_and_meet_the_same_bias(kind):
    wanted, model = biased(), biased()
    if kind in ("full", "selective"):
        recompute_blocks(list(model.model.layers), kind)
    else:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": kind == "reentrant"})
        model.enable_input_require_grads()
    steps = [samples(8).split(2), [samples(8)[:4]]]
    for batches in steps:
        assert all(
            torch.equal(*pair) for pair in zip(train(wanted, batches), train(model, batches), strict=True)
        )  # by gradients of the recomputation, which change the next choices
    for name, value in wanted.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name], value, msg=name)


def test_two_forwards_before_one_backward_meet_the_same_bias():
    wanted, model = biased(), biased()
    recompute_blocks(list(model.model.layers), "full")
    for each in (wanted, model):
        optimizer = sgd(each)
        for _ in range(3):
            ((loss_of(each, samples(4)[:2]) + loss_of(each, samples(4)[2:])) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(biases(model), biases(wanted))
    assert torch.equal(biases(model), train(biased(), [samples(4)] * 3)[-1])


def test_evaluation_and_generation_count_nothing():
    model = biased()
    with torch.no_grad():
        loss_of(model)
        model.model(input_ids=BATCH)
    loss_of(model.eval())
    model.model(input_ids=BATCH)
    model.generate(BATCH[:, :5], max_new_tokens=3, do_sample=False, pad_token_id=0)
    with without_counts():
        loss_of(model.train())
    assert not counts(model).any()
    sgd(model).step()
    assert not biases(model).any()


def test_a_failed_forward_leaves_nothing_behind():
    model = biased()
    handle = model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model)
    handle.remove()
    assert not counts(model).any()
    with pytest.raises(ConfigError, match="a part of a model whose routers are balanced by a bias was called"):
        model.model(input_ids=BATCH)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # by dynamo
def test_a_compiled_model_is_balanced_alike():
    model = biased()
    found = train(torch.compile(model, backend="eager"), [BATCH] * 2)
    assert all(torch.equal(*pair) for pair in zip(found, train(biased(), [BATCH] * 2), strict=True))


def test_a_copy_has_biases_of_its_own():
    model = biased()
    other = copy.deepcopy(model)
    found = train(other, [BATCH])[0]
    assert found.any()
    assert not biases(model).any()
    assert torch.equal(train(model, [BATCH])[0], found)


def test_a_frozen_teacher_keeps_its_biases():
    model = biased()
    train(model, [BATCH])
    teacher, saved = copy.deepcopy(model).requires_grad_(False), biases(model).clone()
    both = sgd(nn.ModuleList([model, teacher]))
    (loss_of(model) + loss_of(teacher)).backward()
    assert not counts(teacher).any()
    both.step()
    assert torch.equal(biases(teacher), saved)
    assert not torch.equal(biases(model), saved)


def test_a_z_loss_goes_with_it():
    model = balance_experts(make_model("deepseek_v3"), method="bias", bias_rate=RATE, z_loss_coeff=0.05)
    plain = make_model("deepseek_v3")
    logits = []
    routers(plain)[0].register_forward_hook(lambda _, args, result: logits.append(result[0]))
    loss = loss_of(plain)
    torch.testing.assert_close(loss_of(model), loss + 0.05 * router_z_loss(logits[0]))
    assert counts(model).any()


# -- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convert", [nn.Module.bfloat16, nn.Module.half, lambda model: model.to(torch.float64)])
def test_biases_stay_in_float32(convert):
    model = biased()
    train(model, [BATCH])
    before = biases(model).clone()
    convert(model)
    assert routers(model)[0].weight.dtype is not torch.float32
    assert biases(model).dtype is torch.float32
    assert torch.equal(biases(model), before)


def test_biases_of_a_model_in_bfloat16_become_float32():
    model = balance_experts(make_model("deepseek_v3").bfloat16(), method="bias", bias_rate=1e-4)
    (router,) = routers(model)
    router.e_score_correction_bias.fill_(1.0)
    train(model, [BATCH])
    assert set((biases(model) - 1).flatten().tolist()) <= {0.0, *(1 + torch.tensor([1e-4, -1e-4]) - 1).tolist()}
    assert (biases(model) != 1).any()


def test_a_bias_that_was_assigned_in_another_type_is_refused():
    model = biased()
    values = {name: value.bfloat16() if BIAS in name else value for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)
    with pytest.raises(ConfigError, match=r"is torch\.bfloat16, as after load_state_dict"):
        loss_of(model)
    other = biased()
    optimizer = sgd(other)
    loss_of(other).backward()
    values = {name: value.bfloat16() for name, value in other.state_dict().items() if BIAS in name}
    other.load_state_dict(values, assign=True, strict=False)
    with pytest.raises(ConfigError, match=r"is torch\.bfloat16, as after load_state_dict"):
        optimizer.step()
    model.load_state_dict(biased().state_dict())
    with pytest.raises(ConfigError, match=r"is torch\.bfloat16"):
        loss_of(model)
    model.load_state_dict(biased().state_dict(), assign=True)
    assert train(model, [BATCH])[0].any()


# -- which models -----------------------------------------------------------------------------------------------------


def test_what_cannot_be_balanced_is_refused():
    for name, kind in (("mixtral", "Mixtral"), ("qwen3_moe", "Qwen3Moe"), ("gpt_oss", "GptOss")):
        with pytest.raises(NotBuiltYetError, match=rf"mlp\.\w+ \({kind}TopKRouter\): it has no buffer {BIAS}"):
            balance_experts(make_model(name), method="bias")
    for rate in (0.0, -1.0, float("inf")):
        with pytest.raises(ConfigError, match="bias_rate must be a number above 0"):
            balance_experts(make_model("deepseek_v3"), method="bias", bias_rate=rate)
    with pytest.raises(ConfigError, match="balanced already"):
        balance_experts(biased(), method="bias", bias_rate=0.5)
    again = balance_experts(biased(), method="bias", bias_rate=RATE)
    assert torch.equal(train(again, [BATCH])[0], train(biased(), [BATCH])[0])
    with delayed_init():
        model = make_model("deepseek_v3").bfloat16()
    with pytest.raises(NotBuiltYetError, match=r"is torch\.bfloat16 and has no values yet"):
        balance_experts(model, method="bias")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it
def test_adapters_of_peft_are_refused():
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(r=2, target_modules=["q_b_proj"], task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match=r"is not served for a model with parts of PEFT \(PeftModel"):
        balance_experts(peft.get_peft_model(make_model("deepseek_v3"), options), method="bias")
    model = peft.get_peft_model(biased(), options)
    with pytest.raises(ConfigError, match="is not served for a model with parts of PEFT"):
        loss_of(model)
    assert not counts(model).any()


class StepsInBackward:
    """An optimizer for each parameter, which steps as soon as its gradient is there."""

    def __init__(self, model):
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())


def test_steps_within_backward_are_refused():
    model = biased()
    StepsInBackward(model)
    with pytest.raises(ConfigError, match="an optimizer steps within backward"):
        loss_of(model).backward()


class TwoResults(nn.Module):
    """A router that does not say which experts it has chosen."""

    def __init__(self):
        super().__init__()
        self.e_score_correction_bias = nn.Buffer(torch.zeros(8))

    def forward(self, hidden):
        return hidden, hidden


def test_a_router_of_another_kind_is_refused_in_its_first_forward():
    router = TwoResults()
    model = make_model("deepseek_v3")
    move_bias_of(router, RATE)
    with counting_tokens(model, None), pytest.raises(ConfigError, match="a part of a model"):
        router(BATCH)
    model.add_module("other", router)
    with counting_tokens(model, None), pytest.raises(ConfigError, match="TwoResults does not return logits, weights"):
        router(BATCH)


# -- several ranks ----------------------------------------------------------------------------------------------------

LAYOUTS = {
    "shard 4": {},
    "hsdp 2x2, recomputed": {"hybrid_shard_degree": 2, "activation_checkpointing": True},
    "replicas": {"hybrid_shard_degree": 1},
    "selective": {"activation_checkpointing": "selective"},
    "experts 2": {"expert_parallel_degree": 2},
    "experts 2, tensor 2": {"expert_parallel_degree": 2, "tensor_parallel_degree": 2},
    "context 2": {"context_parallel_degree": 2},  # with filler: sequences have 21 tokens
    "context 2, experts 2": {"context_parallel_degree": 2, "expert_parallel_degree": 2},
}
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


def train_on_ranks(model, options, *, num_micro_steps=1, precision="32-true"):
    """The biases after each step, with this rank's share of each batch."""
    config = ParallelConfig.of(options, precision=precision)
    topology = config.topology(dist.get_world_size())
    model = parallelize(model, build_mesh(topology, DEVICE), config)
    build_data_group(topology)
    index, share = topology.data_rank(dist.get_rank()), GLOBAL_BATCH // topology.data_degree
    batches = [batch[index * share : (index + 1) * share] for batch in samples().split(GLOBAL_BATCH)]
    with pytest.raises(ConfigError, match="must be called before the model is sharded"):
        balance_experts(vars(model).pop("_hyperpod_balancing") and model, method="bias")
    found = train(model, batches, num_micro_steps)
    assert not counts(model).any()
    return found, model


def train_in_all_layouts():
    dist.init_process_group("hyperpod")
    found = {}
    for name, options in LAYOUTS.items():
        found[name, "glm4_moe", 1] = train_on_ranks(biased("glm4_moe"), options)[0]
    for name in ("experts 2", "experts 2, tensor 2"):
        found[name, "deepseek_v3", 1] = train_on_ranks(biased(), LAYOUTS[name])[0]
    for name in ("experts 2, tensor 2", "context 2"):
        found[name, "glm4_moe", 2] = train_on_ranks(biased("glm4_moe"), LAYOUTS[name], num_micro_steps=2)[0]
    with delayed_init():
        model = make_model("glm4_moe")
    found["delayed", "glm4_moe", 1] = train_on_ranks(
        balance_experts(model, method="bias", bias_rate=RATE), LAYOUTS["experts 2"]
    )[0]
    for precision in PRECISIONS[1:]:
        model = balance_experts(make_model("glm4_moe"), method="bias", bias_rate=1e-4)
        for router in routers(model):
            router.e_score_correction_bias.fill_(1.0)  # beside which a move is lost in bfloat16
        found[precision] = train_on_ranks(model, LAYOUTS["experts 2"], precision=precision)[0]
    return found


@pytest.mark.spawns
def test_ranks_move_biases_as_one_process_does(run_ranks):
    results = run_ranks(train_in_all_layouts, world_size=4, timeout_s=240)
    alone = {name: train(biased(name), samples().split(GLOBAL_BATCH)) for name in ("glm4_moe", "deepseek_v3")}
    assert len(alone["glm4_moe"]) == NUM_STEPS
    for case, found in results[0].items():
        assert all(torch.equal(*pair) for other in results for pair in zip(other[case], found, strict=True)), case
        if case in PRECISIONS:
            last = found[-1]
            assert last.dtype is torch.float32
            assert 5e-5 < (last - 1).abs().max() < 5e-4
        else:
            assert all(torch.equal(*pair) for pair in zip(found, alone[case[1]], strict=True)), (case, found)


class Adversaries(nn.Module):
    """A language model and a critic of its logits, in one root."""

    def __init__(self):
        super().__init__()
        self.writer, self.critic = biased("glm4_moe"), nn.Linear(biased("glm4_moe").config.vocab_size, 2)

    def forward(self, batch=None, x=None):
        return self.critic(x) if batch is None else self.writer(input_ids=batch).logits


def train_in_turns(model, batches):
    """The biases after each step of each of two optimizers, of which one steps while the other's backward waits."""
    of_writer, of_critic = sgd(model.writer), sgd(model.critic)
    found = []
    for batch in batches:
        fake = model(batch=batch)
        model(x=fake.detach()).square().mean().backward()
        of_critic.step()
        found.append(biases(model).clone())
        of_critic.zero_grad()
        (model(x=fake) - 1).square().mean().backward()
        of_writer.step()
        found.append(biases(model).clone())
        of_writer.zero_grad()
        of_critic.zero_grad()
    return found


def train_adversaries():
    dist.init_process_group("hyperpod")
    found = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        config = ParallelConfig.of({"activation_checkpointing": recomputed})
        model = parallelize(Adversaries(), build_mesh(config.topology(dist.get_world_size()), DEVICE), config)
        found.append(train_in_turns(model, [BATCH] * 3))
    return found


@pytest.mark.spawns
def test_biases_wait_for_steps_on_their_own_model(run_ranks):
    results = run_ranks(train_adversaries, world_size=2, timeout_s=120)
    torch.manual_seed(0)
    wanted = train_in_turns(Adversaries(), [BATCH] * 3)
    assert not wanted[0].any()
    assert wanted[1].any()
    for found in (each for result in results for each in result):
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


class Distilled(nn.Module):
    """A language model and a frozen copy of it, in one root."""

    def __init__(self):
        super().__init__()
        self.student = biased("glm4_moe")
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, batch):
        return (self.student(input_ids=batch).logits - 2 * self.teacher(input_ids=batch).logits).square().mean()


def train_with_teacher():
    dist.init_process_group("hyperpod")
    config = ParallelConfig.of({})
    model = parallelize(Distilled(), build_mesh(config.topology(dist.get_world_size()), DEVICE), config)
    optimizer = sgd(model)
    for _ in range(2):
        model(BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
    return biases(model.student), biases(model.teacher), counts(model.teacher)


@pytest.mark.spawns
def test_a_frozen_teacher_of_one_root_keeps_its_biases(run_ranks):
    for of_student, of_teacher, counted in run_ranks(train_with_teacher, world_size=2, timeout_s=120):
        assert of_student.any()
        assert not of_teacher.any()
        assert not counted.any()


def train_replicas():
    dist.init_process_group("hyperpod")
    model = biased("glm4_moe")
    with pytest.raises(ConfigError, match="trains on several ranks, but is not sharded by this package"):
        loss_of(nn.parallel.DistributedDataParallel(model))
    assert not counts(model).any()
    loss_of(model.eval())
    return True


@pytest.mark.spawns
def test_replicas_of_another_kind_are_refused_in_their_first_forward(run_ranks):
    assert all(run_ranks(train_replicas, world_size=2, timeout_s=120))


def step_with_closures():
    dist.init_process_group("hyperpod")
    for build in (biased, make_model):
        model = model_on_ranks({}, build)
        optimizer, before = sgd(model), [each.to_local().clone() for each in model.parameters()]

        def closure(model=model):
            loss = loss_of(model)
            loss.backward()
            return loss

        if build is make_model:
            optimizer.step(closure)
            continue
        for give in (lambda step: step(closure), lambda step: step(closure=closure)):
            with pytest.raises(ConfigError, match=r"optimizer\.step was given a closure that computes gradients"):
                give(optimizer.step)
        assert all(torch.equal(each.to_local(), old) for each, old in zip(model.parameters(), before, strict=True))
        loss_of(model).backward()
        optimizer.step(lambda: None)
        assert biases(model).any()
    return True


@pytest.mark.spawns
def test_closures_that_compute_gradients_are_refused_in_loops_of_ones_own(run_ranks):
    assert all(run_ranks(step_with_closures, world_size=2, timeout_s=120))


# -- through each adapter ---------------------------------------------------------------------------------------------

EXPERTS = {"expert_parallel_degree": 2}


def with_lightning(folder):
    """Two micro-steps a step, and a validation within a window; resumed from a checkpoint after two steps."""
    import lightning.pytorch as pl

    from hyperpod_plugins.lightning import HyperPodStrategy

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.batches, self.found = biased("glm4_moe"), [], []

        def training_step(self, batch, _):
            self.batches.append(batch)
            return loss_of(self.model, batch)

        def validation_step(self, batch, _):
            self.log("val", loss_of(self.model, batch), sync_dist=True)

        def on_train_batch_end(self, *_):
            if len(self.batches) % 2 == 0:
                self.found.append(biases(self.model).clone())

        def configure_optimizers(self):
            return sgd(self)

    def fit(max_steps, path=None):
        trainer = pl.Trainer(
            strategy=HyperPodStrategy(**EXPERTS),
            accelerator=ACCELERATOR,
            devices=devices(2),
            max_steps=max_steps,
            accumulate_grad_batches=2,
            val_check_interval=3,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        module = Module()
        data = samples()
        trainer.fit(module, DataLoader(data, batch_size=1), DataLoader(data[:4], batch_size=1), ckpt_path=path)
        return trainer, module

    trainer, begun = fit(2)
    trainer.save_checkpoint(f"{folder}/resumed")
    _, rest = fit(NUM_STEPS, f"{folder}/resumed")
    batches = begun.batches + rest.batches
    return [torch.cat(pair) for pair in zip(batches[::2], batches[1::2], strict=True)], begun.found + rest.found


def with_session(folder, **options):
    from hyperpod_plugins.session import Session

    session = Session(**{"global_batch_size": GLOBAL_BATCH} | options)
    model = session.parallelize(biased("glm4_moe"))
    session.train(model, sgd(model))
    batches, found = [], []
    for step in session.steps(DataLoader(list(samples()), batch_size=1, shuffle=True)):
        with step:
            step.run(lambda batch: loss_of(model, batch))
            batches.append(torch.cat(step.batches))
            found.append(biases(model).clone())
    return batches, found


def with_experts(folder):
    return with_session(folder, **EXPERTS)


def with_reproducible_means(folder):
    """Each micro-step's gradients are averaged by themselves."""
    from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy

    return with_session(folder, hybrid_shard_degree=1, reproducible=True, elastic=ElasticPolicy(max_replicas=2))


def with_manual_optimization(folder):
    from hyperpod_plugins.session import Session

    session = Session(global_batch_size=GLOBAL_BATCH, **EXPERTS)
    model = session.parallelize(biased("glm4_moe"))
    optimizer = sgd(model)
    session.train(model, optimizer, manual_optimization=True)
    batches, found = [], []

    def update(batch):
        for part in batch.chunk(2):
            loss = loss_of(model, part) / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for step in session.steps(DataLoader(list(samples()), batch_size=2)):
        with step:
            step.run(update)
            batches.append(torch.cat(step.batches))
            found.append(biases(model).clone())
    return batches, found


def with_accelerate(folder):
    from hyperpod_plugins.accelerate import HyperPodPlugin

    accelerator = HyperPodPlugin(**EXPERTS).accelerator(gradient_accumulation_steps=2)
    model = biased("glm4_moe")
    model, optimizer, loader = accelerator.prepare(model, sgd(model), DataLoader(list(samples()), batch_size=1))
    batches, found = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        batches.append(batch)
        if accelerator.sync_gradients:
            found.append(biases(model).clone())
    return [torch.cat(pair) for pair in zip(batches[::2], batches[1::2], strict=True)], found


@pytest.mark.spawns
@pytest.mark.parametrize(
    "adapter", [with_lightning, with_experts, with_reproducible_means, with_manual_optimization, with_accelerate]
)
def test_biases_move_once_a_step_through_an_adapter(run_ranks, tmp_path, adapter):
    results = run_ranks(adapter, str(tmp_path), world_size=2, timeout_s=120)
    together = [torch.cat(parts) for parts in zip(results[0][0], results[1][0], strict=True)]
    assert [len(batch) for batch in together] == [GLOBAL_BATCH] * NUM_STEPS
    wanted = train(biased("glm4_moe"), together)
    for _, found in results:
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def with_uneven_last_step(folder):
    """Of the last micro-step, the second rank has no sample, and computes one of another with weight 0."""
    from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy
    from hyperpod_plugins.session import Session

    session = Session(global_batch_size=GLOBAL_BATCH, elastic=ElasticPolicy(max_replicas=2), hybrid_shard_degree=1)
    model = session.parallelize(biased("glm4_moe"))
    session.train(model, sgd(model))
    weights = []
    for step in session.steps(DataLoader(list(samples(GLOBAL_BATCH + 3)), batch_size=1)):
        with step:
            step.run(lambda batch: loss_of(model, batch))
            weights.append(step.weights)
    return weights, biases(model)


@pytest.mark.spawns
def test_samples_of_other_ranks_do_not_count(run_ranks, tmp_path):
    results = run_ranks(with_uneven_last_step, str(tmp_path), world_size=2, timeout_s=120)
    assert sorted(weights[-1][-1] == 0 for weights, _ in results) == [False, True]
    wanted = train(biased("glm4_moe"), samples(GLOBAL_BATCH + 3).split(GLOBAL_BATCH))[-1]
    assert all(torch.equal(found, wanted) for _, found in results)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def model_on_ranks(options, build=biased):
    config = ParallelConfig.of(options)
    return parallelize(build("glm4_moe"), build_mesh(config.topology(dist.get_world_size()), DEVICE), config)


def save_and_load(folder):
    """Saved after two steps, and continued with other degrees."""
    dist.init_process_group("hyperpod")
    batches = samples().split(GLOBAL_BATCH)  # the same on all ranks
    model = model_on_ranks(EXPERTS)
    train(model, batches[:2])
    writer = CheckpointWriter()
    writer.save(f"{folder}/biased", model=model)
    export_safetensors(model, f"{folder}/exported")
    rest = train(model, batches[2:])
    other = model_on_ranks({"hybrid_shard_degree": 1})
    load_checkpoint(f"{folder}/biased", model=other)
    assert all(torch.equal(*pair) for pair in zip(train(other, batches[2:]), rest, strict=True))
    plain = model_on_ranks(EXPERTS, make_model)
    load_checkpoint(f"{folder}/biased", model=plain)
    saved = biases(plain).clone()
    assert saved.any()
    writer.save(f"{folder}/plain", model=plain)
    writer.close()
    again = model_on_ranks(EXPERTS)
    load_checkpoint(f"{folder}/plain", model=again)
    assert torch.equal(biases(again), saved)
    assert all(torch.equal(*pair) for pair in zip(train(again, batches[2:]), rest, strict=True))
    return saved, rest


@pytest.mark.spawns
def test_checkpoints_hold_biases_and_nothing_else(run_ranks, tmp_path):
    import transformers

    saved, rest = run_ranks(save_and_load, str(tmp_path), world_size=2, timeout_s=120)[0]
    model = biased("glm4_moe")
    assert model.state_dict().keys() == make_model("glm4_moe").state_dict().keys()
    load_checkpoint(tmp_path / "biased", model=model)
    assert torch.equal(biases(model), saved)
    batches = [batch.repeat(2, 1) for batch in samples().split(GLOBAL_BATCH)[2:]]
    assert all(torch.equal(*pair) for pair in zip(train(model, batches), rest, strict=True))
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert torch.equal(biases(exported), saved)
    in_bfloat16 = make_model("glm4_moe").bfloat16()
    writer = CheckpointWriter()
    optimizer = sgd(in_bfloat16)
    writer.save(tmp_path / "bfloat16", model=in_bfloat16, optimizers=[optimizer])
    writer.close()
    model = balance_experts(make_model("glm4_moe").bfloat16(), method="bias")
    with pytest.raises(CheckpointMismatch, match=r"e_score_correction_bias \(checkpoint torch.bfloat16, model torch"):
        load_checkpoint(tmp_path / "bfloat16", model=model, optimizers=[sgd(model)])
    with pytest.warns(UserWarning, match="are converted"):
        load_checkpoint(tmp_path / "bfloat16", model=model)
