"""Sharded first, filled later: each rank's part is bitwise that of the eager model. On real ranks."""

import pytest
from device import DEVICE

pytestmark = pytest.mark.spawns


def materialize_on_mesh(shape, kind):
    """Names whose gathered value differs from the eager one, and what else must hold on every rank."""
    import tempfile

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from hyperpod_plugins.delayed_init import delayed_init, materialize

    def named_tensors(model):
        return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]

    dist.init_process_group("gloo")
    names = {2: ("replicate", "shard"), 3: ("replicate", "shard", "tensor")}[len(shape)]
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=names)

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.up = nn.Linear(width, 10, bias=False)
            self.down = nn.Linear(10, width)
            self.norm = nn.LayerNorm(width)
            self.register_buffer("table", torch.rand(3), persistent=False)

        def forward(self, x):
            return x + self.norm(self.down(self.up(x).relu()) + self.table.sum())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 6)  # 5 rows: uneven, and empty shards on some meshes
            self.blocks = nn.ModuleList(Block(6) for _ in range(2))
            self.scale = nn.Parameter(torch.randn(1))
            self.head = nn.Linear(6, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            x = self.embed(tokens) * self.scale
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def llama():
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=31, tie_word_embeddings=False, **sizes))

    def pretrained():
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype="float32")

    if kind == "pretrained":  # of bfloat16, so that values are converted
        folders = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folders, src=0)
        (folder,) = folders
        torch.manual_seed(1)
        if dist.get_rank() == 0:
            llama().bfloat16().save_pretrained(folder, max_shard_size="5KB")
        dist.barrier()
    build = {"plain": Model, "llama": llama, "pretrained": pretrained}[kind]
    torch.manual_seed(3)
    eager = build()
    state_after_eager = torch.get_rng_state()

    torch.manual_seed(100 + dist.get_rank())  # as if nobody had seeded
    with delayed_init() as tape:
        model = build()
    torch.manual_seed(3)
    tape.rng_state = torch.get_rng_state()
    if "tensor" in names and kind == "plain":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], plan)
    blocks = model.blocks if kind == "plain" else model.model.layers
    for block in blocks:
        fully_shard(block, mesh=mesh["replicate", "shard"])
    fully_shard(model, mesh=mesh["replicate", "shard"])
    assert all(parameter.is_meta for parameter in model.parameters())
    report = materialize(model)

    assert torch.equal(torch.get_rng_state(), state_after_eager)
    got = dict(named_tensors(model))
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in got.items()}
    wrong = [name for name, value in named_tensors(eager) if not torch.equal(full[name], value)]
    local_bytes = sum(p.to_local().untyped_storage().nbytes() for p in model.parameters())
    # A step runs: FSDP2 accepts the memory it was given.
    tokens = torch.arange(4)[None] % 5
    output = model(tokens)
    (output if kind == "plain" else output.logits).sum().backward()
    tied = kind == "plain" and model.head.weight is model.embed.weight
    expected = eager(tokens)
    torch.testing.assert_close(
        output if kind == "plain" else output.logits, expected if kind == "plain" else expected.logits
    )
    result = {"wrong": wrong, "tied": tied, "peak": report.peak_bytes, "local": local_bytes}
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (1, 2, 2), (2, 1, 2)], ids=str)
def test_plain_model(run_ranks, shape):
    results = run_ranks(materialize_on_mesh, world_size=4, timeout_s=90, shape=shape, kind="plain")
    for result in results:
        assert result["wrong"] == []
        assert result["tied"]
        assert result["peak"] <= 2 * 10 * 6 * 4  # the largest parameter, and small change


@pytest.mark.parametrize("kind", ["llama", "pretrained"])
def test_llama(run_ranks, kind):
    results = run_ranks(materialize_on_mesh, world_size=2, timeout_s=90, shape=(1, 2), kind=kind)
    assert [result["wrong"] for result in results] == [[], []]


def reset_on_mesh():
    """A plain meta model, initialised by its own initialisers after sharding."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from hyperpod_plugins.delayed_init import materialize

    dist.init_process_group("gloo")
    mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("shard",))

    def build():
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))

    torch.manual_seed(dist.get_rank())
    sharded = build()
    fully_shard(sharded[0], mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    materialize(sharded, seed=4)
    alone = build()
    materialize(alone, seed=4)
    equal = [torch.equal(a.full_tensor(), b) for a, b in zip(sharded.parameters(), alone.parameters(), strict=True)]
    dist.destroy_process_group()
    return equal


def test_plain_meta_model(run_ranks):
    assert run_ranks(reset_on_mesh, world_size=2) == [[True] * 4] * 2


def complete_on_mesh():
    """A model of which some tensors have values before it is sharded, and the rest are initialised afterwards."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from hyperpod_plugins.delayed_init import materialize
    from hyperpod_plugins.errors import InitializationError

    dist.init_process_group("gloo")
    mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("shard",))

    class Scaled(nn.Linear):
        """Its factor depends on a parameter that is sharded."""

        def __init__(self):
            super().__init__(5, 3)
            self.register_buffer("factor", torch.ones(1))

        def reset_parameters(self):
            if "factor" in self._buffers:
                self.factor.copy_(self.weight.abs().mean())

    def build(missing):
        torch.manual_seed(1)
        model = nn.Sequential(Scaled() if missing == "factor" else nn.Linear(5, 3), nn.Linear(3, 3)).to(DEVICE)
        whole = getattr(model[0], missing)
        empty = whole.detach().to("meta")
        setattr(model[0], missing, nn.Parameter(empty) if isinstance(whole, nn.Parameter) else empty)
        return model

    alone, sharded = build("bias"), build("bias")
    weight = alone[0].weight.detach().clone()
    fully_shard(sharded[0], mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    for model in (alone, sharded):
        materialize(model, device=DEVICE, seed=4)
    equal = [torch.equal(a.full_tensor(), b) for a, b in zip(sharded.parameters(), alone.parameters(), strict=True)]
    scaled = build("factor")
    fully_shard(scaled, mesh=mesh)
    try:
        materialize(scaled, device=DEVICE, seed=4)
        refusal = ""
    except InitializationError as error:
        refusal = str(error)
    dist.destroy_process_group()
    return [*equal, torch.equal(weight, alone[0].weight)], refusal


def test_values_that_exist_stay_in_a_sharded_model(run_ranks):
    for equal, refusal in run_ranks(complete_on_mesh, world_size=2):
        assert equal == [True] * 5
        assert "0.factor is on the meta device" in refusal
        assert "computes it from weight, bias" in refusal


def reset_attention_on_mesh():
    """Modules whose initialisers write or scale parameters of submodules that are sharded."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from hyperpod_plugins.delayed_init import materialize
    from hyperpod_plugins.errors import InitializationError

    dist.init_process_group("gloo")
    mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("shard",))

    class Attention(nn.MultiheadAttention):
        def reset_parameters(self):
            self._reset_parameters()

    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def reset_parameters(self):
            with torch.no_grad():
                self.inner.weight.mul_(0.5)

    def filled(build, *, is_sharded):
        with torch.device("meta"):
            model = nn.Sequential(build(), nn.Linear(4, 3))
        if is_sharded:
            fully_shard(model, mesh=mesh)
        materialize(model, device=DEVICE, seed=4)
        return model

    alone = filled(lambda: Attention(4, 2), is_sharded=False)
    sharded = filled(lambda: Attention(4, 2), is_sharded=True)
    equal = [torch.equal(a.full_tensor(), b) for a, b in zip(sharded.parameters(), alone.parameters(), strict=True)]
    zeros = not sharded[0].out_proj.bias.full_tensor().any()
    drawn = bool(sharded[0].out_proj.weight.full_tensor().std() > 0)
    try:
        filled(Scales, is_sharded=True)
        refusal = ""
    except InitializationError as error:
        refusal = str(error)
    dist.destroy_process_group()
    return equal, zeros, drawn, refusal


def test_initialisers_that_write_sharded_submodules(run_ranks):
    for equal, zeros, drawn, refusal in run_ranks(reset_attention_on_mesh, world_size=2):
        assert equal == [True] * 6
        assert zeros
        assert drawn
        assert "the initialiser of 0 (Scales) computes it from 0.inner.weight, of which each rank has a part" in refusal


def load_on_rank_0(fails):
    """A pretrained model whose files rank 0 alone can read: the names that differ, or the error."""
    import tempfile

    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    from hyperpod_plugins.delayed_init import delayed_init
    from hyperpod_plugins.errors import InitializationError
    from hyperpod_plugins.parallel import ParallelConfig, Topology, build_mesh, parallelize

    dist.init_process_group("hyperpod")
    rank = dist.get_rank()
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=31, tie_word_embeddings=True, **sizes)
    torch.manual_seed(1)
    eager = LlamaForCausalLM(config).bfloat16()
    settings = ParallelConfig(hybrid_shard_degree=2, delayed_values="rank_0", allow_empty_shards=True)
    mesh = build_mesh(Topology(world_size=2, shard_degree=2), "cpu")
    folder = tempfile.mkdtemp()
    if rank == 0:
        eager.save_pretrained(folder, max_shard_size="5KB")
    torch.manual_seed(5 + rank)
    context = torch.device("meta") if rank else delayed_init()
    with context:
        model = LlamaForCausalLM(config) if rank else AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        if fails and rank == 0:
            model.lm_head.bias = None
            model.model.norm.weight = torch.nn.Parameter(torch.empty(16))  # nobody gives it values
    try:
        parallelize(model, mesh, settings)
    except InitializationError as error:
        return str(error)
    drawn = torch.rand(1)
    everywhere = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(everywhere, drawn)
    got = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in model.named_parameters()}
    got |= dict(model.named_buffers())
    expected = dict([*eager.float().named_parameters(), *LlamaForCausalLM(config).named_buffers()])
    wrong = [name for name, value in expected.items() if not torch.equal(got[name], value)]
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    dist.destroy_process_group()
    return wrong, tied, bool(torch.equal(*everywhere))


def test_values_of_rank_0(run_ranks):
    results = run_ranks(load_on_rank_0, world_size=2, timeout_s=90, fails=False)
    assert results == [([], True, True)] * 2


def test_an_error_on_rank_0_ends_all(run_ranks):
    first, second = run_ranks(load_on_rank_0, world_size=2, timeout_s=90, fails=True)
    assert "no code gave values to" in first
    assert "the rank that sends the initial values has failed" in second
