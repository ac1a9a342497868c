"""Step time of the same small Llama under several ways to train it: what we add to plain torch, and to Lightning.

    python benchmarks/throughput.py --rounds 60                              # 2 replicas x 2 shards, against FSDP2
    python benchmarks/throughput.py --rounds 60 --ranks 2 --shard-degree 1   # pure replication, against DDP
    python benchmarks/throughput.py --rounds 60 --ranks 2 --shard-degree 2   # full sharding, against FSDP2

    torch FSDP2            a plain loop, `fully_shard` per block and root      (the reference with more than one shard)
    torch DDP              a plain loop, `DistributedDataParallel`             (the reference with one shard)
    hyperpod loop          a plain loop, `parallelize`
    Lightning ModelParallel   Trainer with Lightning's own strategy, sharded like "torch FSDP2" in `configure_model`
    Lightning DDP          Trainer with DDPStrategy
    Lightning hyperpod     Trainer with HyperPodStrategy, the module left alone

By default hybrid sharding on four ranks (or on the GPUs of this machine). DDP keeps everything on each rank, whatever
the degree. Same seed and same data, so all of them must show the same losses. Lightning's FSDPStrategy refuses CPUs, so
it runs only where there is CUDA.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from benchmarks import harness, ranks, report
from hyperpod_plugins.lightning import HyperPodStrategy
from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

BATCH = 2
SEQUENCE = 128
VOCABULARY = 512
LIMIT, LIMIT_OF_REPLICATION = 1.02, 1.03  # what hyperpod may take more than plain torch, and than DDP
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class RandomTokens(Dataset[torch.Tensor]):
    """Endless random tokens; sample i of rank r is the same for every contender."""

    def __init__(self, global_rank: int, sequence: int = SEQUENCE) -> None:
        self.global_rank, self.sequence = global_rank, sequence

    def __len__(self) -> int:
        return 1_000_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index * dist.get_world_size() + self.global_rank)
        # Squaring makes low tokens more frequent: there is something to learn, so wrong gradients would show.
        return (VOCABULARY * torch.rand(self.sequence, generator=generator).square()).long()


def make_loader() -> DataLoader[torch.Tensor]:
    return DataLoader(RandomTokens(dist.get_rank()), batch_size=BATCH, shuffle=False)


def make_model(sequence: int = SEQUENCE, heads: int = 4, key_value_heads: int = 4) -> LlamaForCausalLM:
    """A Llama of 3.5 million parameters, the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=sequence,
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


def plain_mesh(shard_degree: int) -> DeviceMesh:
    replicas = dist.get_world_size() // shard_degree
    return init_device_mesh(DEVICE, (replicas, shard_degree), mesh_dim_names=("replicate", "shard"))


def train_torch(turns: Iterator[int], shard_degree: int) -> list[float]:
    """Plain torch: what anybody would write from the FSDP2 tutorial."""
    device = start_process_group("nccl" if DEVICE == "cuda" else "gloo")
    model = make_model().to(device)
    shard_plainly(model, plain_mesh(shard_degree))
    return plain_loop(turns, model, device)


def train_ddp(turns: Iterator[int]) -> list[float]:
    """Plain torch: what anybody would write from the DDP tutorial."""
    device = start_process_group("nccl" if DEVICE == "cuda" else "gloo")
    model = DistributedDataParallel(make_model().to(device))
    return plain_loop(turns, model, device)


def train_hyperpod(turns: Iterator[int], shard_degree: int) -> list[float]:
    """The same loop with our group, our mesh and `parallelize`."""
    from hyperpod_plugins.comm import register

    register()
    device = start_process_group("hyperpod")
    config = ParallelConfig(hybrid_shard_degree=shard_degree)
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

    def __init__(self, turns: Iterator[int], shard_degree: int) -> None:
        super().__init__(turns)
        self.shard_degree = shard_degree

    def configure_model(self) -> None:
        shard_plainly(self.model, plain_mesh(self.shard_degree))


def train_lightning(turns: Iterator[int], strategy: str, world_size: int, shard_degree: int) -> list[float]:
    """A Trainer without the parts that only write: no logger, checkpoints or progress bar."""
    strategies: dict[str, tuple[Callable[[Iterator[int]], Module], Callable[[], Any]]] = {
        "hyperpod": (Module, lambda: HyperPodStrategy(hybrid_shard_degree=shard_degree)),
        "ddp": (Module, DDPStrategy),
        "model parallel": (
            lambda turns: ShardedModule(turns, shard_degree),
            lambda: ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1),
        ),
        "fsdp": (
            Module,
            lambda: FSDPStrategy(
                auto_wrap_policy={LlamaDecoderLayer},
                sharding_strategy="HYBRID_SHARD",
                device_mesh=(world_size // shard_degree, shard_degree),
            ),
        ),
    }
    make_module, make_strategy = strategies[strategy]
    trainer = pl.Trainer(
        accelerator=DEVICE,
        devices=world_size,
        strategy=make_strategy(),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = make_module(turns)
    trainer.fit(module)
    return torch.stack(module.losses).tolist()


def contenders(world_size: int, shard_degree: int) -> list[ranks.Contender]:
    """All ways; the first is the reference."""
    sharded = {"shard_degree": shard_degree}
    in_lightning = {"world_size": world_size, "shard_degree": shard_degree}
    ways: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "torch FSDP2": (train_torch, sharded),
        "torch FSDP2 again (control)": (train_torch, sharded),
        "torch DDP": (train_ddp, {}),
        "hyperpod loop": (train_hyperpod, sharded),
        "Lightning ModelParallel": (train_lightning, {"strategy": "model parallel", **in_lightning}),
        "Lightning DDP": (train_lightning, {"strategy": "ddp", **in_lightning}),
        "Lightning hyperpod": (train_lightning, {"strategy": "hyperpod", **in_lightning}),
    }
    if shard_degree == 1:
        ways = {"torch DDP": ways["torch DDP"], "torch DDP again (control)": ways["torch DDP"], **ways}
        del ways["torch FSDP2 again (control)"]
    if DEVICE == "cuda":
        ways["Lightning FSDP"] = (train_lightning, {"strategy": "fsdp", **in_lightning})
    else:
        print("Lightning FSDPStrategy is left out: it refuses to run on CPUs (FSDP1 needs an accelerator).")
    return [
        ranks.Contender(name=name, train=train, world_size=world_size, kwargs=kwargs)
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
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() if DEVICE == "cuda" else 4)
    parser.add_argument(
        "--shard-degree", type=int, help="ranks that one model state is split over (default: two replicas)"
    )
    arguments = parser.parse_args()
    world_size = arguments.ranks
    replicas = 2 if world_size % 2 == 0 and world_size > 2 else 1
    shard_degree = arguments.shard_degree or world_size // replicas
    if world_size % shard_degree:
        parser.error(f"--shard-degree {shard_degree} does not divide --ranks {world_size}")
    ranks.preload(["lightning.pytorch", "transformers.models.llama.modeling_llama", "hyperpod_plugins.lightning"])
    everyone = contenders(world_size, shard_degree)
    chosen = [each for each in everyone if not arguments.only or any(word in each.name for word in arguments.only)]
    schedule = harness.Schedule.from_arguments(arguments, rounds=60, starts=6, steps=3)
    title = f"Llama, {world_size // shard_degree} x {shard_degree}, {DEVICE}"
    comparison = harness.compare(title, chosen, schedule)
    report.print_comparison(comparison)
    limit = LIMIT_OF_REPLICATION if shard_degree == 1 else LIMIT
    for run in comparison.runs[1:]:
        print(report.ratio_line(comparison, run, limit if "hyperpod" in run.name else None))
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
