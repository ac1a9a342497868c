"""What a recipe says, and the model it describes. Nothing is fetched: sizes stand in the YAML file.

recipe = Recipe.read("llama3_8b.yaml")
model = recipe.build()          # inside torch.device("meta"), or delayed_init, it takes no memory
"""

import dataclasses
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hyperpod_plugins.parallel import ParallelConfig, Topology
from hyperpod_plugins.planning import MemoryPlan, TrainingShape, plan_memory
from hyperpod_plugins.recovery import RecoveryOptions

SMOKE_RANKS = 4
SMOKE_SIZES = {  # what is left of a model that has such a size; its kind stays
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "max_position_embeddings": 128,
}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines, as the Trainer is told."""

    num_nodes: int
    devices: int
    """Ranks of each node."""
    device_memory_gib: float
    precision: Literal["32-true", "bf16-mixed", "bf16-true"] = "bf16-mixed"


@dataclass(frozen=True, kw_only=True)
class Training:
    """Batches and learning rate; the names are those of HyperPod's recipes."""

    sequence_length: int
    train_batch_size: int
    """Samples of one optimizer step, over all ranks."""
    micro_train_batch_size: int
    """Most samples of one rank in one forward and backward pass."""
    learning_rate: float
    warmup_steps: int = 0
    max_steps: int
    weight_decay: float = 0.1
    gradient_clip_val: float = 1.0
    recompute: bool = True
    """Keep the inputs of blocks only, and compute the rest again in backward."""
    balance_experts: bool = False
    """Add the model's auxiliary loss, which keeps experts equally busy."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685)."""

    r: int
    lora_alpha: int
    target_modules: str | list[str]
    lora_dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One job."""

    run: Literal["pretrain", "full", "lora"]
    """From scratch, or fine-tuning of all weights or of adapters."""
    model: dict[str, Any]
    """`model_type` and sizes, as in the `config.json` of a published model."""
    trainer: Cluster
    parallel: dict[str, Any]
    """Fields of `ParallelConfig`."""
    training: Training
    data: dict[str, str]
    """Token files by name: `train`."""
    pretrained: str = ""
    """Name or folder of the weights to fine-tune."""
    lora: Lora | None = None
    recovery: dict[str, Any] = field(default_factory=dict)
    """Fields of `CheckpointlessRecovery`."""
    elastic_policy: dict[str, Any] = field(default_factory=dict)
    scale_config: dict[int, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path) -> "Recipe":
        values = yaml.safe_load(Path(path).read_text())
        for name, kind in (("trainer", Cluster), ("training", Training), ("lora", Lora)):
            if name in values:
                values[name] = kind(**values[name])
        return cls(**values)

    @property
    def config(self) -> ParallelConfig:
        """Degrees and precision."""
        return ParallelConfig.of(self.parallel, precision=self.trainer.precision)

    @property
    def topology(self) -> Topology:
        """Who holds what when the job begins."""
        return self.config.topology(self.trainer.num_nodes * self.trainer.devices, ranks_per_node=self.trainer.devices)

    @property
    def takes_snapshots(self) -> bool:
        """Whether ranks keep snapshots, here or where the job has shrunk to the fewest nodes that it may have."""
        fewest = int(self.elastic_policy.get("min_nodes", self.trainer.num_nodes))
        options, devices = RecoveryOptions(**self.recovery), self.trainer.devices
        return any(
            options.snapshots(self.config.topology(nodes * devices, ranks_per_node=devices)).every_steps > 0
            for nodes in (fewest, self.trainer.num_nodes)
        )

    @property
    def elastic_document(self) -> dict[str, Any]:
        """What `ElasticTraining(policy=...)` reads."""
        return {
            "elastic_policy": self.elastic_policy,
            "training": dataclasses.asdict(self.training),
            **({"scale_config": self.scale_config} if self.scale_config else {}),
        }

    def build(self, *, with_weights: bool = False) -> PreTrainedModel:
        """The model, with adapters where the recipe has them."""
        sizes = dict(self.model)
        if with_weights:
            model = AutoModelForCausalLM.from_pretrained(self.pretrained, dtype="float32", use_cache=False)
        else:
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(sizes.pop("model_type"), **sizes, use_cache=False)
            )
        if self.training.recompute and self.config.activation_checkpointing == "none":
            name = "activation_checkpointing_enable"  # of older transformers: gradient_checkpointing_enable
            enable = getattr(model, name, None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        if self.lora is not None:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(**dataclasses.asdict(self.lora)))
        return model

    def plan(self) -> MemoryPlan:
        """What a rank needs, from the model on the meta device."""
        with torch.device("meta"):
            model = self.build()
        micro_batch_size = self.training.micro_train_batch_size
        shape = TrainingShape(
            micro_batch_size=micro_batch_size,
            sequence_length=self.training.sequence_length,
            keeps_gradients=self.training.train_batch_size > micro_batch_size * self.topology.data_degree,
            has_snapshots=self.takes_snapshots,
        )
        world_size, per_node = self.trainer.num_nodes * self.trainer.devices, self.trainer.devices
        return plan_memory(model, self.config, shape, world_size=world_size, ranks_per_node=per_node)

    def smoke(self, num_ranks: int = SMOKE_RANKS) -> "Recipe":
        """The same recipe with a small model, for a few CPU ranks: as many axes, and the same kinds of layers.

        It has random values: `pretrained` names weights of other sizes.
        """
        asked = self.config
        tensor_degree = 2 if asked.tensor_parallel_degree > 1 else 1
        shard_degree = 2 if asked.hybrid_shard_degree != 1 else 1
        context_degree = 2 if asked.context_parallel_degree > 1 else 1
        degrees = {
            "tensor_parallel_degree": tensor_degree,
            "hybrid_shard_degree": shard_degree,
            "context_parallel_degree": context_degree,
            "expert_parallel_degree": 2 if asked.expert_parallel_degree > 1 else 1,
        }
        policy = {"min_nodes": 1, "max_nodes": 1, "replica_increment_step": 1} if self.elastic_policy else {}
        return replace(
            self,
            pretrained="",
            model={name: SMOKE_SIZES.get(name, value) for name, value in self.model.items()},
            trainer=replace(self.trainer, num_nodes=1, devices=num_ranks),
            parallel=self.parallel | degrees,
            training=replace(
                self.training,
                sequence_length=32,
                train_batch_size=16,
                micro_train_batch_size=2,
                learning_rate=1e-2,
                warmup_steps=2,
                max_steps=20,
            ),
            lora=None if self.lora is None else replace(self.lora, r=4),
            elastic_policy=self.elastic_policy | policy,
            scale_config={},
        )
