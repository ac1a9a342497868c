"""A loop, or the Trainer of `ranks_lightning.py`, that notes what its replacements get to know of the program's writes.

The loop writes to a shard in each step in a way that no version counter tells of.
"""

import os

import torch

from hyperpod_plugins.recovery.undo import StepStart


def note_known(faults):
    load = StepStart.load_known_writes

    def loading(self, known):
        load(self, known)
        faults.note(kind="known", steps=known["steps"], written=known["written"])

    StepStart.load_known_writes = loading


def run_loop():
    import ranks_transfer as program
    from torch import nn

    note_known(program.faults)
    called = nn.Sequential.__call__

    def writing(self, inputs):  # before FSDP2's hooks: the parameters are sharded
        self[1].weight._local_tensor.data.mul_(0.99)
        return called(self, inputs)

    nn.Sequential.__call__ = writing
    program.main()


def run_trainer():
    import ranks_lightning as program

    note_known(program.faults)
    program.main()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"loop": run_loop, "trainer": run_trainer}[os.environ["KIND"]]()
