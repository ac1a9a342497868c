"""Step time of the same small Llama under four ways to train it: what we add to plain torch, and what Lightning adds.

    python benchmarks/throughput.py --rounds 60

    torch FSDP2            a plain loop, `fully_shard` per block and root             (the reference)
    hyperpod loop          a plain loop, `parallelize`
    Lightning ModelParallel   Trainer with Lightning's own strategy, sharded like the reference in `configure_model`
    Lightning hyperpod     Trainer with HyperPodStrategy, the module left alone

Hybrid sharding, 2 replicas x 2 shards on four ranks (or on the GPUs of this machine). Same seed and same data, so all
of them must show the same losses. Lightning's FSDPStrategy refuses CPUs, so it runs only where there is CUDA.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from benchmarks import harness, ranks, report
from hyperpod_plugins.lightning import HyperPodStrategy
from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

BATCH = 2
SEQUENCE = 128
VOCABULARY = 512
LIMIT = 1.02  # what hyperpod may take more than plain torch
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORLD_SIZE = torch.cuda.device_count() if DEVICE == "cuda" else 4
REPLICAS = 2 if WORLD_SIZE % 2 == 0 and WORLD_SIZE > 2 else 1
SHARDS = WORLD_SIZE // REPLICAS


class RandomTokens(Dataset[torch.Tensor]):
    """Endless random tokens; sample i of rank r is the same for every contender."""

    def __init__(self, global_rank: int) -> None:
        self.global_rank = global_rank

    def __len__(self) -> int:
        return 1_000_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index * WORLD_SIZE + self.global_rank)
        # Squaring makes low tokens more frequent: there is something to learn, so wrong gradients would show.
        return (VOCABULARY * torch.rand(SEQUENCE, generator=generator).square()).long()


def make_loader() -> DataLoader[torch.Tensor]:
    return DataLoader(RandomTokens(dist.get_rank()), batch_size=BATCH, shuffle=False)


def make_model() -> LlamaForCausalLM:
    """A Llama of 3.5 million parameters, the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)  # the fastest on DTensors, for all


def start_process_group(backend: str) -> torch.device:
    device = torch.device(DEVICE, dist.get_node_local_rank() if DEVICE == "cuda" else None)
    if DEVICE == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    return device


def shard_plainly(model: LlamaForCausalLM, mesh: DeviceMesh) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def plain_mesh() -> DeviceMesh:
    return init_device_mesh(DEVICE, (REPLICAS, SHARDS), mesh_dim_names=("replicate", "shard"))


def train_torch(turns: Iterator[int]) -> list[float]:
    """Plain torch: what anybody would write from the FSDP2 tutorial."""
    device = start_process_group("nccl" if DEVICE == "cuda" else "gloo")
    model = make_model().to(device)
    shard_plainly(model, plain_mesh())
    return plain_loop(turns, model, device)


def train_hyperpod(turns: Iterator[int]) -> list[float]:
    """The same loop with our group, our mesh and `parallelize`."""
    from hyperpod_plugins.comm import register

    register()
    device = start_process_group("hyperpod")
    config = ParallelConfig(hybrid_shard_degree=SHARDS)
    mesh = build_mesh(config.topology(dist.get_world_size()), DEVICE)
    model = parallelize(make_model().to(device), mesh, config)
    return plain_loop(turns, model, device)


def plain_loop(turns: Iterator[int], model: nn.Module, device: torch.device) -> list[float]:
    optimizer = make_optimizer(model)
    batches = iter(make_loader())
    losses = []
    for _ in turns:
        tokens = next(batches).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


class Module(pl.LightningModule):
    """The same model as an ordinary LightningModule; each batch begins when its turn does."""

    def __init__(self, turns: Iterator[int]) -> None:
        super().__init__()
        self.turns = turns
        self.losses: list[torch.Tensor] = []
        self.model = make_model()

    def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> int | None:
        return -1 if next(self.turns, None) is None else None  # -1 ends the epoch

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return make_loader()


class ShardedModule(Module):
    """For ModelParallelStrategy, which leaves the sharding to the module and knows no replicas."""

    def configure_model(self) -> None:
        shard_plainly(self.model, plain_mesh())


def train_lightning(turns: Iterator[int], strategy: str) -> list[float]:
    """A Trainer without the parts that only write: no logger, checkpoints or progress bar."""
    strategies: dict[str, tuple[type[Module], Callable[[], Any]]] = {
        "hyperpod": (Module, lambda: HyperPodStrategy(hybrid_shard_degree=SHARDS)),
        "model parallel": (
            ShardedModule,
            lambda: ModelParallelStrategy(data_parallel_size=WORLD_SIZE, tensor_parallel_size=1),
        ),
        "fsdp": (
            Module,
            lambda: FSDPStrategy(
                auto_wrap_policy={LlamaDecoderLayer},
                sharding_strategy="HYBRID_SHARD",
                device_mesh=(REPLICAS, SHARDS),
            ),
        ),
    }
    module_class, make_strategy = strategies[strategy]
    trainer = pl.Trainer(
        accelerator=DEVICE,
        devices=WORLD_SIZE,
        strategy=make_strategy(),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = module_class(turns)
    trainer.fit(module)
    return torch.stack(module.losses).tolist()


def contenders() -> list[ranks.Contender]:
    ways: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
        "torch FSDP2": (train_torch, {}),
        "torch FSDP2 again (control)": (train_torch, {}),
        "hyperpod loop": (train_hyperpod, {}),
        "Lightning ModelParallel": (train_lightning, {"strategy": "model parallel"}),
        "Lightning hyperpod": (train_lightning, {"strategy": "hyperpod"}),
    }
    if DEVICE == "cuda":
        ways["Lightning FSDP"] = (train_lightning, {"strategy": "fsdp"})
    else:
        print("Lightning FSDPStrategy is left out: it refuses to run on CPUs (FSDP1 needs an accelerator).")
    return [
        ranks.Contender(name=name, train=train, world_size=WORLD_SIZE, kwargs=kwargs)
        for name, (train, kwargs) in ways.items()
    ]


def largest_loss_difference(run: harness.Run, reference: harness.Run) -> float:
    """Over all steps and ranks, relative to the reference's loss. All ran the same number of steps."""
    pairs = [
        (mine, theirs)
        for rank, losses in enumerate(run.results)
        for mine, theirs in zip(losses, reference.results[rank], strict=True)
    ]
    return max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)


def main() -> None:
    harness.leave_cleanly_on_sigterm()
    parser = harness.argument_parser("Step time of plain torch, hyperpod, and Lightning's strategies.")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="contenders with one of these words in their name")
    arguments = parser.parse_args()
    ranks.preload(["lightning.pytorch", "transformers.models.llama.modeling_llama", "hyperpod_plugins.lightning"])
    chosen = [c for c in contenders() if not arguments.only or any(word in c.name for word in arguments.only)]
    schedule = harness.Schedule.from_arguments(arguments, rounds=60, starts=6, steps=3)
    comparison = harness.compare(f"Llama, {REPLICAS} x {SHARDS}, {DEVICE}", chosen, schedule)
    report.print_comparison(comparison)
    for run in comparison.runs[1:]:
        print(report.ratio_line(comparison, run, LIMIT if "hyperpod" in run.name else None))
    reference = comparison.runs[0]
    differences = {run.name: largest_loss_difference(run, reference) for run in comparison.runs[1:]}
    first_rank = reference.results[0]
    print(f"loss of {reference.name}: {first_rank[0]:.4f} at first, {first_rank[-1]:.4f} after {len(first_rank)} steps")
    for name, difference in differences.items():
        verdict = "same curve" if difference < 1e-4 and math.isfinite(difference) else "OTHER CURVE"
        print(f"{name}: largest relative loss difference {difference:.1e}: {verdict}")
    report.write_results("throughput", [comparison], arguments.json, {"loss_difference": differences})


if __name__ == "__main__":
    main()
