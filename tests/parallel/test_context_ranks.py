"""Context parallelism over real ranks with FSDP2, and expert parallelism through each adapter, against one process.

What attention does in all its cases is in `test_context_parallel.py`, where ranks are threads.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from device import ACCELERATOR, DEVICE, devices
from parallel.equal_training import (
    GLOBAL_BATCH,
    MAX_NORM,
    NUM_STEPS,
    VOCABULARY,
    samples,
    state_of,
    train,
    train_alone,
    train_on_mesh,
)
from parallel.expert_models import make_model as make_mixture

LAYOUTS = {
    "shard 4, context 2": {"context_parallel_degree": 2},
    "hsdp 2x2, context 2": {"hybrid_shard_degree": 2, "context_parallel_degree": 2},
    "context 4": {"context_parallel_degree": 4},
    "context 2, chunks, tiles, offload": {
        "context_parallel_degree": 2,
        "loss_chunks": 3,
        "mlp_tiles": 3,
        "sm_activation_offloading": True,
    },
    "context 4 in a ring": {"context_parallel_degree": 4, "context_comm_type": "p2p"},
    "context 2, selective": {"context_parallel_degree": 2, "activation_checkpointing": "selective"},
}
CONTEXT_AND_TENSOR = {"context_parallel_degree": 2, "tensor_parallel_degree": 2}
WITH_TENSORS = {
    "context 2 in a ring, tensor 2": CONTEXT_AND_TENSOR | {"context_comm_type": "p2p"},
    "context 2, tensor 2": CONTEXT_AND_TENSOR,
    "context 2, tensor 2, split stream and loss": CONTEXT_AND_TENSOR
    | {"sequence_parallel": True, "loss_parallel": True},
    "context 2, tensor 2, chunks of split logits": CONTEXT_AND_TENSOR | {"loss_chunks": 3, "loss_parallel": True},
    "context 2, tensor 2, tiles, offload": CONTEXT_AND_TENSOR | {"mlp_tiles": 3, "sm_activation_offloading": True},
}
CASES = {
    **{("llama", name): options for name, options in LAYOUTS.items()},
    **{("llama, one head of keys", name): options for name, options in LAYOUTS.items()},
    ("gpt_oss", "hsdp 2x2, context 2"): LAYOUTS["hsdp 2x2, context 2"],
    **{("llama", name): options for name, options in WITH_TENSORS.items()},
    # Of each tensor rank's heads, those of keys cannot be shared.
    **{("llama, two heads of keys", name): options for name, options in WITH_TENSORS.items()},
    ("own", "context 2, tensor 2"): CONTEXT_AND_TENSOR,
    ("gpt_oss", "context 2, tensor 2"): CONTEXT_AND_TENSOR,
    ("gpt_oss", "context 2, tensor 2, experts 2"): CONTEXT_AND_TENSOR | {"expert_parallel_degree": 2},
}


class OwnModel(torch.nn.Module):
    """Two heads of keys and values for four of queries."""

    uses_sequence_context = True

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.output = torch.nn.Embedding(VOCABULARY, 32), torch.nn.Linear(32, VOCABULARY)
        sizes = {"wq": 32, "wk": 16, "wv": 16, "wo": 32}
        layers = {name: torch.nn.Linear(32, size, bias=False) for name, size in sizes.items()}
        self.attention = torch.nn.ModuleDict(layers)

    def forward(self, input_ids, labels):
        from types import SimpleNamespace

        from hyperpod_plugins.parallel import SequenceContext

        num_tokens = labels[:, 1:].numel()
        length = labels.shape[1] - 1
        targets, tokens = labels[:, 1:], input_ids[:, :-1]
        targets, tokens = (F.pad(each, (0, -length % 4), value=value) for each, value in ((targets, -100), (tokens, 0)))
        context = SequenceContext.of(self, length=targets.shape[1], num_heads=4, num_key_value_heads=2)
        hidden = self.embed(context.part(tokens))
        heads = [self.attention[name](hidden).unflatten(2, (-1, 8)).transpose(1, 2) for name in ("wq", "wk", "wv")]
        hidden = hidden + self.attention["wo"](context.attention(*heads).transpose(1, 2).flatten(2))
        logits, targets = self.output(hidden).flatten(0, 1), context.part(targets).flatten()
        total = F.cross_entropy(logits, targets, reduction="sum")
        return SimpleNamespace(loss=context.mean(total, num_tokens))


NUM_KEY_HEADS = {"llama, one head of keys": 1, "llama, two heads of keys": 2}


def make_model(name="llama"):
    import transformers

    if name == "own":
        return OwnModel()
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "use_cache": False,
    }
    if name == "gpt_oss":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}
        kinds = ["sliding_attention", "full_attention"]
        config = transformers.GptOssConfig(**sizes, **experts, num_key_value_heads=2, head_dim=8, layer_types=kinds)
        return transformers.GptOssForCausalLM(config)
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=NUM_KEY_HEADS.get(name, 4))
    return transformers.LlamaForCausalLM(config)


def train_all_on_mesh():
    dist.init_process_group("hyperpod")
    results = {case: train_on_mesh(make_model(case[0]), options) for case, options in CASES.items()}
    results["bf16"] = train_on_mesh(make_model(), LAYOUTS["context 4"], "bf16-mixed")
    results["refused"] = refused_when_sharded_already()
    return results


def refused_when_sharded_already():
    """Errors of a model that was split already but is not to be, and of one that is to be but was sharded before."""
    from torch.distributed.fsdp import fully_shard

    from hyperpod_plugins.errors import ConfigError
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

    whole, split = ParallelConfig(), ParallelConfig(context_parallel_degree=2)
    mesh = build_mesh(split.topology(dist.get_world_size()), DEVICE)
    errors = []
    by_tensors = ParallelConfig(tensor_parallel_degree=2)
    over_tensors = build_mesh(by_tensors.topology(dist.get_world_size()), DEVICE)
    parallelize(parallelize(make_model(), over_tensors, by_tensors), over_tensors, by_tensors)  # as it is
    for model, config in (
        (parallelize(make_model(), mesh, split), whole),
        (fully_shard(make_model(), mesh=mesh["shard"]), split),
        (parallelize(make_model(), over_tensors, by_tensors), whole),
    ):
        try:
            parallelize(model, mesh, config)
        except ConfigError as error:
            errors.append(str(error))
    return errors


def assert_close(found, wanted, what):
    (losses, norms, gradients, state), (wanted_losses, wanted_norms, wanted_gradients, wanted_state) = found, wanted
    assert abs(losses[0] - wanted_losses[0]) <= 5e-7 * wanted_losses[0], what
    for name, gradient in wanted_gradients.items():
        limit = 2e-6 if name.endswith("k_proj.bias") else 5e-7  # its parts cancel: up to 5.5e-7 was seen
        assert (gradients[name] - gradient).norm() <= limit * gradient.norm(), (what, name)
    for values, expected in ((losses, wanted_losses), (norms, wanted_norms)):
        torch.testing.assert_close(torch.tensor(values), torch.tensor(expected), rtol=1e-5, atol=0)
    for name, value in wanted_state.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{what}: {n}: {m}")


@pytest.mark.spawns
def test_steps_on_four_ranks_equal_one_process(run_ranks):
    results = run_ranks(train_all_on_mesh, world_size=4, timeout_s=150)
    alone = {name: train_alone(make_model(name)) for name in {case[0] for case in CASES}}
    for result in results:
        refused = result.pop("refused")
        assert "was sharded with context_parallel_degree=2" in refused[0]
        assert "was sharded already, by the program" in refused[1]
        assert (
            "tensor_parallel_degree=1, but matrices of this FSDPLlamaForCausalLM are split over 2 ranks" in refused[2]
        )
    in_bfloat16 = results[0].pop("bf16")
    for case, found in results[0].items():
        assert_close(found, alone[case[0]], case)
    for losses in zip(in_bfloat16[0], alone["llama"][0], strict=True):
        assert abs(losses[0] - losses[1]) < 2e-2
    for other in results[1:]:
        for case, found in results[0].items():
            assert all(torch.equal(*pair) for pair in zip(found[0], other[case][0], strict=True))


# -- adapters: each returns this rank's batches and losses, and the parameters after the last step -------------------


CONTEXT = {"context_parallel_degree": 2, "hybrid_shard_degree": 2}
EXPERTS = {"expert_parallel_degree": 2}


def share_of(options):
    """Samples of a rank in a step: of four ranks, all have the same with `CONTEXT_AND_TENSOR`; otherwise two."""
    return GLOBAL_BATCH if options == CONTEXT_AND_TENSOR else GLOBAL_BATCH // 2


def with_lightning(folder, options, make_model, world_size):
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.batches, self.losses, self.validated = make_model(), [], [], []

        def training_step(self, batch, _):
            self.batches.append(batch)
            loss = self.model(input_ids=batch, labels=batch).loss
            self.log("loss", loss, sync_dist=True, on_step=True)
            self.losses.append(loss.detach().clone())
            return loss

        def validation_step(self, batch, _):
            self.log("val", self.model(input_ids=batch, labels=batch).loss, sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    from hyperpod_plugins.errors import ConfigError
    from hyperpod_plugins.lightning import HyperPodStrategy

    def trainer_of(**degrees):
        return pl.Trainer(
            strategy=HyperPodStrategy(**degrees),
            accelerator=ACCELERATOR,
            devices=devices(world_size),
            max_epochs=1,
            gradient_clip_val=MAX_NORM,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            num_sanity_val_steps=0,
        )

    trainer = trainer_of(**options)
    module = Module()
    data = samples()
    trainer.fit(module, DataLoader(data, batch_size=share_of(options)), DataLoader(data[:8], batch_size=2))
    state = {name.removeprefix("model."): value for name, value in state_of(module).items()}
    validated = float(trainer.callback_metrics["val"])
    degree = next(iter(options))
    with pytest.raises(ConfigError, match=rf"{degree}=1, but this \w*Module was sharded with {degree}=2"):
        trainer_of(**options | {degree: 1}).validate(module, DataLoader(data[:8], batch_size=2), verbose=False)
    return module.batches, module.losses, state, validated


def with_session(folder, options, make_model, world_size):
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader

    from hyperpod_plugins.errors import ConfigError
    from hyperpod_plugins.session import Session

    session = Session(**options, global_batch_size=GLOBAL_BATCH)
    if options == EXPERTS:
        other = fully_shard(make_model(), mesh=session.mesh["shard"])
        with pytest.raises(ConfigError, match="its experts cannot be divided any more"):
            session.train(other, torch.optim.AdamW(other.parameters()))
    model = session.parallelize(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session.train(model, optimizer, max_grad_norm=MAX_NORM)
    batches, losses = [], []
    loader = DataLoader(list(samples()), batch_size=1, shuffle=True)  # two micro-steps
    for step in session.steps(loader):
        with step:
            losses.append(step.run(lambda batch: model(input_ids=batch, labels=batch).loss).clone())
            batches.append(torch.cat(step.batches))
    return batches, losses, state_of(model), None


def with_accelerate(folder, options, make_model, world_size):
    from torch.utils.data import DataLoader

    from hyperpod_plugins.accelerate import HyperPodPlugin

    accelerator = HyperPodPlugin(**options).accelerator()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    loader = DataLoader(list(samples()), batch_size=share_of(options))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    batches, losses, gathered = [], [], []
    for batch in loader:
        with accelerator.maybe_context_parallel(buffers=[batch], buffer_seq_dims=[1]):
            loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        batches.append(batch)
        losses.append(accelerator.reduce(loss.detach(), "mean"))
        gathered.append(accelerator.gather_for_metrics(batch))
    # each sample counts once, whatever the number of ranks that have it
    assert torch.equal(torch.cat(gathered).sort(dim=0).values, samples().sort(dim=0).values)
    assert scheduler.scheduler.last_epoch == NUM_STEPS * GLOBAL_BATCH // share_of(options)
    return batches, losses, state_of(model), None


def with_smp(folder, options, make_model, world_size):
    from torch.utils.data import DataLoader, DistributedSampler

    import hyperpod_plugins.smp

    hyperpod_plugins.smp.install()
    import torch.sagemaker as tsm
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    tsm.init(options)
    index = tsm.state.rank % 2
    if options == CONTEXT_AND_TENSOR:
        index = tsm.state.rank // 2
    assert (tsm.state.cp_size, tsm.state.cp_rank) == ((1, 0) if options == EXPERTS else (2, index))
    assert (tsm.state.ep_size, tsm.state.ep_rank) == ((2, index) if options == EXPERTS else (1, 0))
    assert tsm.state.dp_size == GLOBAL_BATCH // share_of(options)
    comm_type = "p2p" if options == CONTEXT_AND_TENSOR else None
    model = FullyShardedDataParallel(
        tsm.transform(make_model(), cp_comm_type=comm_type),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = list(samples())
    sampler = DistributedSampler(data, tsm.state.dp_size, tsm.state.dp_rank, shuffle=False)
    batches, losses = [], []
    for batch in DataLoader(data, batch_size=share_of(options), sampler=sampler):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        model.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        batches.append(batch)
        losses.append(loss.detach())
    return batches, losses, state_of(model), None


@pytest.mark.spawns
@pytest.mark.parametrize(
    "options", [CONTEXT, EXPERTS, CONTEXT_AND_TENSOR], ids=["context", "experts", "context and tensor"]
)
@pytest.mark.parametrize("adapter", [with_lightning, with_session, with_accelerate, with_smp])
def test_through_an_adapter(run_ranks, tmp_path, adapter, options):
    build = make_mixture if options == EXPERTS else make_model
    world_size, num_readers = 2 if options == EXPERTS else 4, GLOBAL_BATCH // share_of(options)
    results = run_ranks(adapter, str(tmp_path), options, build, world_size, world_size=world_size, timeout_s=120)
    num_peers = world_size // num_readers  # they have the same samples
    for first in range(0, world_size, num_peers):
        one, *others = results[first : first + num_peers]
        for other in others:
            assert all(torch.equal(*pair) for pair in zip(one[0], other[0], strict=True))
            assert all(torch.equal(*pair) for pair in zip(one[1], other[1], strict=True))
    results = results[::num_peers]
    together = [torch.cat(parts) for parts in zip(*(each[0] for each in results), strict=True)]
    assert len(together) == NUM_STEPS
    read = torch.cat(together)
    assert sorted(map(tuple, read.tolist())) == sorted(map(tuple, samples().tolist()))
    alone = build()
    losses, _, _, state = train(alone, together, torch.nn.utils.clip_grad_norm_)
    for step, wanted in enumerate(losses):
        values = [each[1][step] for each in results]
        assert abs(sum(values) / num_readers - wanted) <= 1e-5 * wanted
    for _, _, found, _ in results:
        for name, value in state.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=2e-5)
    if results[0][3] is not None:
        alone.load_state_dict(state, strict=False)
        with torch.no_grad():
            wanted = alone(input_ids=samples()[:8], labels=samples()[:8]).loss
        assert all(abs(each[3] - wanted) <= 1e-5 * wanted for each in results)
