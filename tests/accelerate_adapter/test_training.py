"""Training through Accelerate's own calls, on four ranks: the bits of Lightning and of a plain loop.

All cases run in one set of processes, an Accelerator each. Where a loop is compared with one process, the tolerance is
that of float32 sums taken in another order.
"""

import pytest
import torch
import torch.distributed as dist
from device import ACCELERATOR, DEVICE
from torch import nn

VOCABULARY, WIDTH, SEQUENCE = 32, 16, 6
GLOBAL_BATCH, NUM_STEPS, MAX_NORM = 8, 4, 0.5
PLAN = {"*.w1": "colwise", "*.w2": "rowwise", "*output": "colwise_gather_output"}
HSDP = {"hybrid_shard_degree": 2}
TENSOR = {"hybrid_shard_degree": 2, "tensor_parallel_degree": 2, "tensor_plan": PLAN}
OFFLOADED = {"activation_checkpointing": True, "activation_checkpointing_offload": True}
LAYOUTS = {
    "hsdp 2x2": HSDP,
    "full shard": {},
    "tp 2 x shard 2": TENSOR,
    "replicate 2 x tp 2": TENSOR | {"hybrid_shard_degree": 1},
    "recomputed": TENSOR | {"activation_checkpointing": True},
    "offloaded": TENSOR | OFFLOADED,
    "parameters on the host": TENSOR | {"offload_params": True},
    "optimizer on the host": TENSOR | {"optimizer_offload": True},
    "loss parallel": TENSOR | {"loss_parallel": True},
}


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.w1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.w2(torch.tanh(self.w1(self.norm(x)))))


class Net(nn.Module):
    """Returns the mean loss of a batch of token ids, as models of transformers do."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block(dropout) for _ in range(2)])
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.output(x).flatten(0, 1), tokens[:, 1:].flatten())


def make_net(kind="plain", **options):
    torch.manual_seed(0)
    return Net(**options) if kind == "plain" else make_llama()


def make_llama():
    """A model of transformers, with its own tensor plan, and one parameter that two modules share."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def loss_of(net, tokens):
    return net(tokens) if not hasattr(net, "generate") else net(input_ids=tokens, labels=tokens).loss


def samples():
    """Token ids in the order in which all ranks together read them, `(samples, sequence)`."""
    return torch.randint(VOCABULARY, (NUM_STEPS * GLOBAL_BATCH, SEQUENCE), generator=torch.Generator().manual_seed(7))


def make_adamw(net, ranks_that_read):
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count / ranks_that_read))


def whole_state(net):
    return {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().clone()
        for name, each in net.state_dict().items()
    }


# -- the same training, four times ------------------------------------------------------------------------------------


def train_alone(kind="plain"):
    net, losses = make_net(kind), []
    optimizer, scheduler = make_adamw(net, 1)
    for batch in samples().split(GLOBAL_BATCH):
        loss = loss_of(net, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "state": whole_state(net)}


def fresh(options, **arguments):
    from accelerate.state import AcceleratorState, GradientState

    from hyperpod_plugins.accelerate import HyperPodPlugin

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return HyperPodPlugin(**options).accelerator(**arguments)


def train_with_accelerate(options, micro_batches=1, **net_options):
    accelerator = fresh(options, gradient_accumulation_steps=micro_batches)
    readers = accelerator.topology.data_degree
    net = make_net(**net_options)
    optimizer, scheduler = make_adamw(net, readers)
    loader = torch.utils.data.DataLoader(samples(), batch_size=GLOBAL_BATCH // readers // micro_batches)
    net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    losses = []
    for index, batch in enumerate(loader):
        torch.manual_seed(100 + index)
        with accelerator.accumulate(net):
            loss = loss_of(net, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), MAX_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return {"losses": losses, "state": whole_state(net)}


def train_with_lightning(options, micro_batches):
    import lightning.pytorch as pl

    from hyperpod_plugins.lightning import HyperPodStrategy

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = make_net(), []

        def training_step(self, batch, index):
            loss = self.net(batch)
            self.losses.append(float(self.trainer.strategy.reduce(loss)))
            return loss

        def configure_optimizers(self):
            optimizer, scheduler = make_adamw(self.net, 1)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

        def train_dataloader(self):
            place = self.trainer.strategy.distributed_sampler_kwargs
            size = GLOBAL_BATCH // place["num_replicas"] // micro_batches
            mine = torch.cat(samples().split(size)[place["rank"] :: place["num_replicas"]])
            return torch.utils.data.DataLoader(mine, batch_size=size)

    trainer = pl.Trainer(
        strategy=HyperPodStrategy(**options),
        accelerator=ACCELERATOR,
        max_epochs=1,
        accumulate_grad_batches=micro_batches,
        gradient_clip_val=MAX_NORM,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module)
    return {"losses": module.losses, "state": whole_state(module.net)}


def train_plainly(options, micro_batches):
    from contextlib import nullcontext

    from hyperpod_plugins.parallel import ParallelConfig, build_data_group, build_mesh, clip_grad_norm_, parallelize
    from hyperpod_plugins.parallel.hsdp import without_replica_sync

    config = ParallelConfig.of(options)
    topology = config.topology(dist.get_world_size())
    net = make_net()
    parallelize(net, build_mesh(topology, DEVICE), config)
    data_group = build_data_group(topology)
    optimizer, scheduler = make_adamw(net, 1)
    size, readers, place = (
        GLOBAL_BATCH // topology.data_degree // micro_batches,
        topology.data_degree,
        topology.data_rank(dist.get_rank()),
    )
    losses = []
    for index, batch in enumerate(samples().split(size)[place::readers]):
        is_last = (index + 1) % micro_batches == 0
        with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bf16-mixed", cache_enabled=False):
            loss = net(batch)
        with nullcontext() if is_last else without_replica_sync(net):
            (loss / micro_batches).backward()
        if is_last:
            clip_grad_norm_(net.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=data_group)
        losses.append(float(total / dist.get_world_size(data_group)))
    return {"losses": losses, "state": whole_state(net)}


EQUAL = {
    "hsdp 2x2": (HSDP, 1),
    "hsdp 2x2, accumulated": (HSDP, 2),
    "hsdp 2x2 in bfloat16": (HSDP | {"precision": "bf16-mixed"}, 1),
    "tp 2 x shard 2": (TENSOR, 2),
}


def train_in_all_ways():
    from hyperpod_plugins.memory import offload

    offload.MIN_BYTES = 1  # the models are tiny
    dist.init_process_group("hyperpod")
    equal = {
        name: [train(*case) for train in (train_with_accelerate, train_with_lightning, train_plainly)]
        for name, case in EQUAL.items()
    }
    alike = {name: train_with_accelerate(options) for name, options in LAYOUTS.items()}
    memory = ({}, {"activation_checkpointing": True}, OFFLOADED)
    dropped = [train_with_accelerate(TENSOR | options, dropout=0.5) for options in memory]
    llama = train_with_accelerate({"hybrid_shard_degree": 2, "tensor_parallel_degree": 2}, kind="llama")
    return {"equal": equal, "alike": alike, "dropped": dropped, "llama": llama}


@pytest.fixture(scope="module")
def trained(run_ranks):
    return run_ranks(train_in_all_ways, world_size=4, timeout_s=150)


def assert_same_bits(left, right):
    assert left["losses"] == right["losses"]
    for name, value in left["state"].items():
        assert torch.equal(value, right["state"][name]), name


@pytest.mark.spawns
@pytest.mark.parametrize("case", EQUAL)
def test_accelerate_lightning_and_a_plain_loop_give_the_same_bits(trained, case):
    for rank in trained:
        by_accelerate, by_lightning, plainly = rank["equal"][case]
        assert_same_bits(by_accelerate, by_lightning)
        assert_same_bits(by_accelerate, plainly)


@pytest.mark.spawns
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_one_process_does(trained, layout):
    expected = train_alone()
    for rank in trained:
        assert rank["alike"][layout]["losses"] == pytest.approx(expected["losses"], rel=3e-6)
        for name, value in expected["state"].items():
            torch.testing.assert_close(rank["alike"][layout]["state"][name], value, rtol=0, atol=2e-5)


@pytest.mark.spawns
def test_a_model_of_transformers_brings_its_own_plan(trained):
    expected = train_alone("llama")
    for rank in trained:
        assert rank["llama"]["losses"] == pytest.approx(expected["losses"], rel=3e-6)


@pytest.mark.spawns
def test_recomputed_activations_drop_what_was_dropped_before(trained):
    for rank in trained:
        whole, recomputed, offloaded = rank["dropped"]
        assert_same_bits(whole, recomputed)
        assert_same_bits(whole, offloaded)
        assert rank["dropped"][0]["losses"] != rank["alike"]["tp 2 x shard 2"]["losses"]
