"""A stand-in for smddp's library: it registers a real backend, over gloo, and refuses what the library refuses."""

import textwrap
from pathlib import Path

# [Note: stand-in] It does not inherit its collectives. torch calls an inherited one with the GIL held (WORK_OVERRIDE in
# PyProcessGroup.hpp), and it waits for gloo's queue. gloo's thread may hold the queue and wait for the GIL, to drop a
# tensor: one fit in ten never ended. Here each collective is called on a group of torch's own.
LIBRARY = """
    import os
    import torch
    import torch.distributed as dist

    COLLECTIVES = (
        "allreduce allreduce_coalesced allgather allgather_coalesced _allgather_base allgather_into_tensor_coalesced "
        "reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced alltoall alltoall_base broadcast reduce "
        "gather scatter send recv recv_anysource barrier"
    ).split()
    OPERATIONS = (dist.ReduceOp, dist.ReduceOp.RedOpType)


    class SMDDPGroup(dist.ProcessGroup):
        def __init__(self, store, rank, size, gloo):
            super().__init__(rank, size)
            self.plain = dist.ProcessGroup(store, rank, size)
            for group in (self, self.plain):
                group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
                group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, gloo)


    def handed_on(name):
        def call(self, *arguments, **named):
            operations = [getattr(each, "reduceOp", each) for each in (*arguments, *named.values())]
            if any(isinstance(each, OPERATIONS) and each == dist.ReduceOp.AVG for each in operations):
                raise RuntimeError("SMDDP does not support: ReduceOp")
            return getattr(self.plain, name)(*arguments, **named)

        return call


    for name in COLLECTIVES:
        setattr(SMDDPGroup, name, handed_on(name))


    def create(store, rank, size, timeout):
        if size != int(os.environ["WORLD_SIZE"]):
            raise RuntimeError("SMDDP does not support sub-groups")
        return SMDDPGroup(store, rank, size, dist.ProcessGroupGloo(store, rank, size, timeout=timeout))


    dist.Backend.register_backend("smddp", create, devices=["cuda", "cpu"])
"""


def write_library(folder: Path) -> str:
    """Write the stand-in's package; the folder that ranks are to put on their path."""
    package = folder / "smdistributed" / "dataparallel" / "torch" / "torch_smddp"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(LIBRARY))
    return str(folder)
