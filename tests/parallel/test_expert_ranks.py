"""Expert parallelism over real ranks with FSDP2, against one process.

Through each adapter: `test_context_ranks.py`; with ranks that are lost: `tests/recovery/test_context.py`.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from device import DEVICE
from parallel.equal_training import GLOBAL_BATCH, samples, train_alone, train_on_mesh, whole
from parallel.expert_models import OwnExperts, OwnMixture, drawn_again, make_model
from torch import nn

from hyperpod_plugins.parallel import balance_experts
from hyperpod_plugins.parallel.expert_exchange import TokenParts
from hyperpod_plugins.parallel.local_optimizer import step_locally

LAYOUTS = {
    "shard 2, experts 2": (2, {"expert_parallel_degree": 2}),
    "hsdp 2x2, experts 2": (4, {"hybrid_shard_degree": 2, "expert_parallel_degree": 2}),
    "shard 4, experts 2": (4, {"expert_parallel_degree": 2}),
    "experts 4": (4, {"expert_parallel_degree": 4}),
    "experts 2, recomputed": (2, {"expert_parallel_degree": 2, "activation_checkpointing": True, "loss_chunks": 3}),
    "experts 2, selective": (2, {"expert_parallel_degree": 2, "activation_checkpointing": "selective"}),
    "experts 2, offload": (2, {"expert_parallel_degree": 2, "sm_activation_offloading": True}),
    "experts 2, tensor 2": (4, {"expert_parallel_degree": 2, "tensor_parallel_degree": 2}),
    "experts 2, tensor 2, recomputed": (
        4,
        {"expert_parallel_degree": 2, "tensor_parallel_degree": 2, "activation_checkpointing": True, "loss_chunks": 3},
    ),
    "context 2, experts 4": (4, {"context_parallel_degree": 2, "expert_parallel_degree": 4}),
    "context 2, experts 2": (4, {"context_parallel_degree": 2, "expert_parallel_degree": 2}),
}
OF_ALL_MODELS = ("shard 2, experts 2", "hsdp 2x2, experts 2", "experts 2, tensor 2")
MODELS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")


def models_of(layout):
    """Biases of GPT-OSS have 1e-6 of rounding, on one process, too; that of a context comes to it."""
    return MODELS if layout in OF_ALL_MODELS else ("mixtral", "qwen3_moe" if "context" in layout else "gpt_oss")


def train_all_on_mesh(layouts):
    dist.init_process_group("hyperpod")
    found = {}
    for name, options in layouts.items():
        for model in models_of(name):
            found[model, name] = train_on_mesh(make_model(model), options)
    divide_tokens(dist.group.WORLD)
    if dist.get_world_size() == 4:
        random_numbers_in_experts()
    return found


class ExpertsWithDropout(OwnExperts):
    def forward(self, hidden, expert_index, weights):
        return super().forward(F.dropout(hidden, 0.5, self.training), expert_index, weights)


def random_numbers_in_experts():
    """Tensor peers compute different rows, and still draw the same numbers outside of the experts."""
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

    model = OwnMixture()
    model.experts = ExpertsWithDropout()
    plan = {"head": "colwise_gather_output"}
    config = ParallelConfig(expert_parallel_degree=2, tensor_parallel_degree=2, tensor_plan=plan)
    mesh = build_mesh(config.topology(4), DEVICE)
    parallelize(model, mesh, config)
    batch = samples(2)[mesh.get_local_rank("shard"), None, :7]
    random, numbers = torch.get_rng_state(), []
    for _ in range(3):
        logits = model(batch, batch).logits.detach()
        numbers.append(torch.cat([logits.reshape(-1), torch.rand(4)]))
    torch.set_rng_state(random)
    mine, peers = torch.cat(numbers), [torch.empty_like(torch.cat(numbers)) for _ in range(2)]
    dist.all_gather(peers, mine, group=mesh.get_group("tensor"))
    assert torch.equal(*peers)
    assert not torch.equal(numbers[0], numbers[1])


def divide_tokens(group):
    """Tokens that all ranks have, of numbers that do not divide evenly; also fewer than ranks, and none."""
    for number in (0, 1, 3, 2 * group.size() + 1):
        tokens = torch.arange(number * 3.0).view(number, 3).requires_grad_()
        parts = TokenParts(group=group, num_tokens=number)
        own = parts.own(tokens)
        assert torch.equal(own, parts.cut(tokens))
        joined = parts.join(own * (1 + dist.get_rank(group)))
        factors = 1.0 + torch.arange(number)[:, None] // max(1, parts.size)
        assert torch.equal(joined, tokens * factors)
        joined.backward(tokens.detach() + 1)
        assert torch.equal(tokens.grad, (tokens.detach() + 1) * factors)


def assert_close(found, wanted, what):
    """With tensor parallelism, sums over heads and features are split: one process is as far from float64 itself."""
    limit = 1e-6 if "tensor" in what[1] else 5e-7
    (losses, norms, gradients, state), (wanted_losses, wanted_norms, wanted_gradients, wanted_state) = found, wanted
    assert abs(losses[0] - wanted_losses[0]) <= 5e-7 * wanted_losses[0], what
    for name, gradient in wanted_gradients.items():
        error = float((gradients[name] - gradient).norm() / gradient.norm())
        assert error <= limit, (what, name, error)
    for values, expected in ((losses, wanted_losses), (norms, wanted_norms)):
        torch.testing.assert_close(torch.tensor(values), torch.tensor(expected), rtol=1e-5, atol=0)
    for name, value in wanted_state.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{what}: {n}: {m}")


def layouts_of(world_size):
    return {name: options for name, (size, options) in LAYOUTS.items() if size == world_size}


def assert_equal_one_process(found):
    alone = {name: train_alone(make_model(name)) for name in MODELS}
    for case, results in found.items():
        assert_close(results, alone[case[0]], case)


@pytest.mark.spawns
def test_steps_on_four_ranks_equal_one_process(run_ranks):
    assert_equal_one_process(run_ranks(train_all_on_mesh, layouts_of(4), world_size=4, timeout_s=150)[0])


# -- checkpoints ------------------------------------------------------------------------------------------------------

DEGREES = [
    {"expert_parallel_degree": 2},
    {"expert_parallel_degree": 4},
    {"expert_parallel_degree": 2, "hybrid_shard_degree": 2},
    {"hybrid_shard_degree": 2},
    {},
    {"expert_parallel_degree": 2, "tensor_parallel_degree": 2},
]


def trained(num_steps, options=None):
    """GPT-OSS, whose experts have biases, of whose parts some have fewer rows than ranks."""
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

    model = make_model("gpt_oss")
    if options is not None:
        config = ParallelConfig.of(options)
        model = parallelize(model, build_mesh(config.topology(4), DEVICE), config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in samples().split(GLOBAL_BATCH)[:num_steps]:
        loss_of(model, batch).backward()  # the same batch on all ranks
        step_locally(optimizer, lambda: None)
        optimizer.zero_grad()
    return model, optimizer


def everything(model, optimizer):
    found = {name: whole(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}:{key}": whole(value) for key, value in optimizer.state[parameter].items()}
    return found


def save_and_load(folder):
    from hyperpod_plugins.parallel import CheckpointWriter, export_safetensors, load_checkpoint

    dist.init_process_group("hyperpod")
    written = {}
    for number, options in ((0, DEGREES[0]), (2, DEGREES[2]), (5, DEGREES[5])):
        writer = CheckpointWriter()
        model, optimizer = trained(2, options)
        writer.save(f"{folder}/{number}", model=model, optimizers=[optimizer])
        writer.close()
        written[number] = everything(model, optimizer)
        export_safetensors(model, f"{folder}/{number}-exported")
    for options, sources in zip(DEGREES, (("alone", 5), (0, "alone"), (0,), (2,), (0, 2), (0, "alone")), strict=True):
        for number in sources:
            model, optimizer = trained(0, options)
            load_checkpoint(f"{folder}/{number}", model=model, optimizers=[optimizer])
            found = everything(model, optimizer)
            expected = torch.load(f"{folder}/alone.pt") if number == "alone" else written[number]
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), (options, number, name)
    return written


@pytest.mark.spawns
def test_checkpoints_load_with_any_degree(run_ranks, tmp_path):
    import transformers

    from hyperpod_plugins.parallel import CheckpointWriter, load_checkpoint

    model, optimizer = trained(2)
    writer = CheckpointWriter()
    writer.save(tmp_path / "alone", model=model, optimizers=[optimizer])
    writer.close()
    torch.save(everything(model, optimizer), tmp_path / "alone.pt")
    written = run_ranks(save_and_load, str(tmp_path), world_size=4, timeout_s=150)[0]
    for number, expected in written.items():
        model, optimizer = trained(0)
        load_checkpoint(tmp_path / str(number), model=model, optimizers=[optimizer])
        exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"{number}-exported")
        state = exported.state_dict()
        for name, value in everything(model, optimizer).items():
            assert torch.equal(value, expected[name])
            assert name not in state or torch.equal(value, state[name])


# -- one forward and backward on two ranks; each case says what it is, and what it must equal --------------------------


def parallelized(model, **options):
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

    config = ParallelConfig(expert_parallel_degree=2, **options)
    return parallelize(model, build_mesh(config.topology(2), DEVICE), config)


def gradients(model):
    return {name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None}


def compare(model, batches, compute):
    """Loss and gradients of the mean over ranks, each with its own batch: of a copy on this process, and divided."""
    alone = copy.deepcopy(model)
    wanted = sum(compute(alone, batch) for batch in batches) / len(batches)
    wanted.backward()
    divided = parallelized(model)
    loss = compute(divided, batches[dist.get_rank()])
    loss.backward()
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    assert abs(loss / 2 - wanted) <= 5e-7 * wanted
    found = gradients(divided)
    for name, gradient in gradients(alone).items():
        error = (found[name] - gradient).norm()
        assert error <= 5e-7 * gradient.norm() + 1e-12, (name, float(error), float(gradient.norm()))
    from hyperpod_plugins.parallel.clip_grad import gradient_norm

    norm = nn.utils.get_total_norm(list(gradients(alone).values()))
    assert abs(gradient_norm(divided.parameters()) - norm) <= 1e-6 * norm
    return divided


def loss_of(model, batch):
    return model(input_ids=batch, labels=batch).loss


def halves():
    return samples(4).split(2)


def implementations():
    """transformers #48205: NaN from rows that a kernel does not write; #48687: wrong gradients of routers alone."""
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        compare(make_model(experts_implementation=implementation), halves(), loss_of)


def no_token_for_the_experts_of_a_rank(*, frozen):
    """It must take part in backward all the same, also if no gradient is asked for tokens; ranks have other lengths."""
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        model = make_model("gpt_oss", experts_implementation=implementation)
        for layer in model.model.layers:
            layer.mlp.router.bias.data[4:] = -1e4
        if frozen:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("experts" in name and "layers.0" in name)
        compare(model, (samples(2), samples(4)[2:, :9]), loss_of)


def logits():
    """transformers #45473: wrong at any degree; #45994: the loss alone."""
    for name in MODELS:
        model = make_model(name).eval()
        with torch.no_grad():
            wanted = [model(input_ids=batch).logits for batch in halves()]
            found = parallelized(model)(input_ids=halves()[dist.get_rank()]).logits
        torch.testing.assert_close(found.cpu(), wanted[dist.get_rank()], rtol=1e-5, atol=1e-6)


def auxiliary_loss():
    """It is that of data parallelism: the mean of the ranks' own, of which each counts its own tokens."""
    for name in ("mixtral", "qwen3_moe"):
        model = make_model(name, output_router_logits=True, router_aux_loss_coef=0.5)
        compare(model, halves(), loss_of)


def balanced_routers():
    """Of its own tokens on each rank."""
    for name, method in (("mixtral", "aux_loss"), ("qwen3_moe", "sinkhorn"), ("gpt_oss", "sinkhorn")):
        compare(
            balance_experts(make_model(name), method=method, aux_loss_coeff=0.3, z_loss_coeff=0.1), halves(), loss_of
        )


def adapters():
    import peft

    options = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(3)
    compare(peft.get_peft_model(make_model(), options), halves(), loss_of)


def a_layer_of_ones_own():
    model = OwnMixture()
    divided = compare(model, halves(), loss_of)
    assert divided.experts.num_experts == 8
    assert divided.experts.up.shape == (8, 16, 24)
    assert divided.experts.up.to_local().shape == (4, 16, 24)


def mixed_precision():
    """Weights of experts stay in the type of the router, as without expert parallelism."""
    model, seen = make_model(), []
    model.model.layers[0].mlp.experts.register_forward_hook(lambda _, args, result: seen.extend([*args, result]))
    loss_of(parallelized(model, precision="bf16-mixed"), halves()[0]).backward()
    assert [each.dtype for each in seen] == [torch.bfloat16, torch.int64, torch.float32, torch.bfloat16]


def an_expert_that_does_not_exist():
    from hyperpod_plugins.errors import ConfigError

    model = OwnMixture()
    model.router = nn.Linear(16, 12)
    with pytest.raises(ConfigError, match=r"routed to expert (8|9|10|11), but the layer has 8 experts"):
        loss_of(parallelized(model), samples(4))


class ResultInOtherType(OwnExperts):
    def forward(self, hidden, expert_index, weights):
        return super().forward(hidden, expert_index, weights).bfloat16()


class WiderResult(OwnExperts):
    def forward(self, hidden, expert_index, weights):
        return super().forward(hidden, expert_index, weights).repeat(1, 2)


def to_first_rank(model):
    with torch.no_grad():
        model.router.bias[4:] = -1e4
    return model


def a_parameter_that_is_none():
    """Also on a rank whose experts get no row."""
    model = to_first_rank(OwnMixture())
    model.experts.register_parameter("scale", None)
    compare(model, halves(), loss_of)


def experts_whose_result_cannot_travel():
    """All ranks refuse it, those without rows, too."""
    from hyperpod_plugins.errors import ConfigError

    for kind, words in ((ResultInOtherType, "in torch.bfloat16"), (WiderResult, r"32\) in torch.float32")):
        model = to_first_rank(OwnMixture())
        model.experts = kind()
        with pytest.raises(ConfigError, match=rf"{kind.__name__} must compute .* but its result is .*{words}"):
            loss_of(parallelized(model), samples(4))


def inputs_of_other_dimensions():
    from hyperpod_plugins.errors import ConfigError

    experts = parallelized(OwnMixture()).experts
    hidden, index, weights = torch.randn(6, 16), torch.zeros(6, 2, dtype=torch.int64), torch.ones(6, 2)
    for inputs in (
        (hidden[None], index[None], weights[None]),
        (hidden, index, weights[:, :1]),
        (hidden, index[0], weights),
    ):
        with pytest.raises(ConfigError, match=r"OwnExperts must be called with hidden states \(tokens, hidden\)"):
            experts(*inputs)


def models_that_are_sharded_already():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate

    from hyperpod_plugins.errors import ConfigError

    model = parallelized(make_model())
    assert parallelized(model) is model
    other = fully_shard(make_model())
    with pytest.raises(ConfigError, match="its experts cannot be divided any more"):
        parallelized(other)
    third = make_model()
    weight = DTensor.from_local(third.lm_head.weight.detach(), model.lm_head.weight.device_mesh, [Replicate()] * 2)
    third.lm_head.weight = nn.Parameter(weight)
    with pytest.raises(
        ConfigError, match=r"are sharded already, over DeviceMesh.*or shard the whole model by the program"
    ):
        parallelized(third)


def built_later(folder):
    """Delayed initialisation, also from rank 0, and weights that are read from files part by part."""
    import transformers

    from hyperpod_plugins.delayed_init import delayed_init

    for name in ("mixtral", "gpt_oss"):
        wanted = make_model(name)
        if dist.get_rank() == 0:
            wanted.save_pretrained(f"{folder}/{name}")
        dist.barrier()
        fresh = drawn_again(wanted)
        with delayed_init():
            drawn = drawn_again(wanted)
        with delayed_init():
            sent = drawn_again(wanted)
        with delayed_init():
            read = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/{name}")
        for model, expected, source in (
            (drawn, fresh, "every_rank"),
            (sent, fresh, "rank_0"),
            (read, wanted, "every_rank"),
        ):
            state = dict(expected.named_parameters())
            for parameter_name, value in parallelized(model, delayed_values=source).named_parameters():
                assert torch.equal(whole(value), state[parameter_name]), parameter_name


def loads():
    """Of the tokens of both ranks; blocks that run again in backward count once."""
    from hyperpod_plugins.parallel import ExpertLoad

    model = make_model()
    alone = copy.deepcopy(model)
    wanted, chosen = ExpertLoad(alone), []
    alone.model.layers[1].mlp.experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1]))
    divided = parallelized(model, activation_checkpointing=True)
    found = ExpertLoad(divided)
    for batch in halves():
        loss_of(alone, batch)
    loss_of(divided, halves()[dist.get_rank()]).backward()
    divided.eval()
    with torch.no_grad():
        loss_of(divided, halves()[0])
    divided.train()
    counts = {name: each / dist.get_world_size() for name, each in wanted.counts().items()}  # the same on both ranks
    numbers = torch.cat(chosen).flatten().bincount(minlength=8)
    assert torch.equal(counts["model.layers.1.mlp.experts"], numbers.float())
    assert all(torch.equal(each.float(), counts[name]) for name, each in found.counts().items())
    assert found.values() == {}
    loss_of(divided, halves()[dist.get_rank()])
    shares = torch.stack([each / each.sum() for each in counts.values()]).double()
    entropy = float(torch.distributions.Categorical(shares).entropy().mean() / torch.log(torch.tensor(8.0)))
    expected = {
        "router/entropy": entropy,
        "router/max_load": 8 * float(shares.max()),
        "router/min_load": 8 * float(shares.min()),
    }
    assert found.values() == pytest.approx(expected)
    if dist.get_rank() == 1:  # a rank may have run none of the layers that others have
        loss_of(divided, halves()[1])
        found._counts.clear()
    else:
        loss_of(divided, halves()[0])
    assert all(int(each.sum()) == 2 * halves()[0].numel() for each in found.counts().values())
    again = parallelized(make_model())
    again.gradient_checkpointing_enable({"use_reentrant": True})
    again.enable_input_require_grads()
    found = ExpertLoad(again)
    loss_of(again, halves()[dist.get_rank()]).backward()
    assert all(torch.equal(each.float(), counts[name]) for name, each in found.counts().items())


def train_and_try_all_cases(layouts, folder):
    found = train_all_on_mesh(layouts)
    implementations()
    no_token_for_the_experts_of_a_rank(frozen=False)
    no_token_for_the_experts_of_a_rank(frozen=True)
    logits()
    auxiliary_loss()
    balanced_routers()
    adapters()
    a_layer_of_ones_own()
    mixed_precision()
    a_parameter_that_is_none()
    experts_whose_result_cannot_travel()
    inputs_of_other_dimensions()
    models_that_are_sharded_already()
    loads()
    built_later(folder)
    an_expert_that_does_not_exist()
    return found


@pytest.mark.spawns
def test_steps_and_cases_on_two_ranks(run_ranks, tmp_path):
    found = run_ranks(train_and_try_all_cases, layouts_of(2), str(tmp_path), world_size=2, timeout_s=240)
    assert_equal_one_process(found[0])
