"""The device on which tests and their programs compute, and the transport of their groups.

`HYPERPOD_TEST_DEVICE` is `cpu`, the default, or `cuda`. `HYPERPOD_TEST_TRANSPORT` is a transport of the tests for the
programs that ask for it: `nccl-like` (see `nccl_like.py`) or `staged` (see `staged_gloo.py`), which ranks that share a
GPU take anyway.
"""

import os

import torch

DEVICE = ACCELERATOR = os.environ.get("HYPERPOD_TEST_DEVICE", "cpu")
"""Type of the device, as a mesh and as Lightning's Trainer want it."""


def devices(num_ranks):
    """What `Trainer(devices=...)` is given for `num_ranks` ranks on this node: they share GPUs that are too few."""
    return num_ranks if DEVICE == "cpu" else max(1, min(num_ranks, torch.cuda.device_count()))


def own_device(rank):
    """This rank's device, which is the current one from now on."""
    if DEVICE == "cpu":
        return torch.device("cpu")
    device = torch.device(DEVICE, rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def why_not_cuda():
    """Why tests cannot compute on a GPU here, or None if they can."""
    if not torch.cuda.is_available():
        return "torch finds no usable GPU here; `make gpu` is for a machine that has one"
    return None if DEVICE == "cuda" else "HYPERPOD_TEST_DEVICE is not cuda; `make gpu` sets it"


def install_transport():
    """Let the groups of this process that are made from now on use the transport that is asked for, if any is."""
    name = os.environ.get("HYPERPOD_TEST_TRANSPORT")
    if DEVICE == "cuda" and int(os.environ.get("WORLD_SIZE", "1")) > torch.cuda.device_count():
        name = "staged"
    if name == "nccl-like":
        import nccl_like

        nccl_like.install()
    elif name == "staged":
        import staged_gloo

        staged_gloo.install()
