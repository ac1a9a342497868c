"""Parallelize a model: topology, configuration, tensor parallelism, hybrid sharding, checkpoints.

Start reading with `parallelize.py`.
"""

from hyperpod_plugins.parallel.checkpoint.safetensors import export_safetensors
from hyperpod_plugins.parallel.checkpoint.save_load import CheckpointWriter, SaveHandle, load_checkpoint
from hyperpod_plugins.parallel.clip_grad import clip_grad_norm_, clip_grad_value_, gradient_norm
from hyperpod_plugins.parallel.config import ParallelConfig
from hyperpod_plugins.parallel.expert_balancing import balance_experts, router_aux_loss, router_z_loss
from hyperpod_plugins.parallel.expert_parallel import ExpertLoad
from hyperpod_plugins.parallel.parallelize import broadcast_from_rank_0, loss_parallel_context, parallelize
from hyperpod_plugins.parallel.plan_proposal import TensorPlanProposal, propose_tensor_plan
from hyperpod_plugins.parallel.sequence_context import SequenceContext
from hyperpod_plugins.parallel.topology import Coordinates, Topology, build_data_group, build_mesh

__all__ = [
    "CheckpointWriter",
    "Coordinates",
    "ExpertLoad",
    "ParallelConfig",
    "SaveHandle",
    "SequenceContext",
    "TensorPlanProposal",
    "Topology",
    "balance_experts",
    "broadcast_from_rank_0",
    "build_data_group",
    "build_mesh",
    "clip_grad_norm_",
    "clip_grad_value_",
    "export_safetensors",
    "gradient_norm",
    "load_checkpoint",
    "loss_parallel_context",
    "parallelize",
    "propose_tensor_plan",
    "router_aux_loss",
    "router_z_loss",
]
