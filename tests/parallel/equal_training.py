"""The training of language models on one process, and on a mesh with which it must be equal."""

import os
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from device import DEVICE

from hyperpod_plugins.parallel.local_optimizer import step_locally

SEQUENCE, VOCABULARY, NUM_STEPS, GLOBAL_BATCH, MAX_NORM = 21, 62, 4, 4, 0.5


def samples(number=NUM_STEPS * GLOBAL_BATCH):
    return torch.randint(VOCABULARY, (number, SEQUENCE), generator=torch.Generator().manual_seed(7))


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu().clone()


def state_of(model):
    return {name: whole(value) for name, value in model.named_parameters()}


def train(model, batches, clip):
    """Losses and norms of AdamW steps, the gradients of the first, and the parameters after the last."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms, gradients = [], [], {}
    for batch in batches:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        gradients = gradients or {name: whole(each.grad) for name, each in model.named_parameters()}
        norms.append(float(clip(model.parameters(), MAX_NORM)))
        step_locally(optimizer, lambda: None)
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, norms, gradients, state_of(model)


def train_alone(model):
    return train(model, samples().split(GLOBAL_BATCH), torch.nn.utils.clip_grad_norm_)


@contextmanager
def offloading(options):
    """Let inputs of any size go to the host, as the models are tiny, and check that some do, if the options say so."""
    from hyperpod_plugins.memory import offload

    attach, made = offload.ActivationOffload.attach, []

    def attach_and_note(self, blocks):
        made.append(self)
        attach(self, blocks)

    with (
        mock.patch.object(offload, "MIN_BYTES", 1),
        mock.patch.object(offload.ActivationOffload, "attach", attach_and_note),
    ):
        yield
    is_asked = options.get("sm_activation_offloading", False)
    assert [each.stored_bytes > 0 for each in made] == [True] * bool(is_asked), [each.stored_bytes for each in made]


def train_on_mesh(model, options, precision="32-true"):
    """The same, with this rank's share of each batch; losses are means over all ranks."""
    from hyperpod_plugins.parallel import ParallelConfig, build_data_group, build_mesh, clip_grad_norm_, parallelize
    from hyperpod_plugins.parallel.parallelize import loss_parallel_context

    config = ParallelConfig.of(options, precision=precision)
    topology = config.topology(dist.get_world_size(), ranks_per_node=int(os.environ["LOCAL_WORLD_SIZE"]))
    group, index = build_data_group(topology), topology.data_rank(dist.get_rank())
    share = GLOBAL_BATCH // topology.data_degree
    batches = [batch[index * share : (index + 1) * share] for batch in samples().split(GLOBAL_BATCH)]
    with offloading(options), loss_parallel_context(config):
        model = parallelize(model, build_mesh(topology, DEVICE), config)
        losses, *rest = train(model, batches, clip_grad_norm_)
    for loss in losses:
        dist.all_reduce(loss, group=group)
    return [loss / group.size() for loss in losses], *rest
