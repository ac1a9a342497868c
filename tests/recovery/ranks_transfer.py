"""A loop in plain torch whose state takes some MiB, and faults in the middle of its transfers; run by `hyperpodrun`."""

import os
import time
from pathlib import Path

import torch
from faults import Faults
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hyperpod_plugins.comm import channel
from hyperpod_plugins.recovery import RecoveryOptions, Snapshots
from hyperpod_plugins.session import Session
from hyperpod_plugins.session.state import SessionState

torch.set_num_threads(1)
WIDTH, MIDDLE = 256, 10
faults = Faults()


def instrument():
    """Ranks that meet a fault in a transfer take their time in it, so that the fault meets its payload under way."""
    channel._CHUNK_BYTES = 2**16
    swap, restore, steps = Snapshots._exchange_all, SessionState.restore, {}

    def swapping(self, step, own):
        steps["snapshot"] = step
        swap(self, step, own)

    def restoring(self, plan, rank):
        steps["tensors"] = plan.step
        restore(self, plan, rank)

    def slowly(advance):
        def advancing(self):
            step = steps.get(self.label)
            if any(fault[:2] == [self.label, step] for fault in faults.faults):
                self.num_calls = getattr(self, "num_calls", 0) + 1
                time.sleep(0.01)
                if self.num_calls == MIDDLE:
                    faults.at(self.label, step)
            return advance(self)

        return advancing

    Snapshots._exchange_all, SessionState.restore = swapping, restoring
    for each in (channel._Sending, channel._Receiving):
        each.advance = slowly(each.advance)


def damage_snapshots():
    """Change a byte in the middle of each snapshot of this rank's own."""
    for path in Path(os.environ["HYPERPOD_SNAPSHOTS"]).glob(f"{faults.rank}-own-*.data"):
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))


def local(tensor):
    whole = tensor.detach()
    return (whole.to_local() if hasattr(whole, "to_local") else whole).clone()


def main():
    instrument()
    SessionState.can_undo_exceptions = os.environ.get("CAN_RESET") != "0"  # 0: as with a torch older than 2.13
    if os.environ.get("OUTLIVES") == "0":  # a process takes its snapshots with it, as a node does
        del os.environ["HYPERPOD_SNAPSHOTS"]
    shards, every = int(os.environ["SHARDS"]), os.environ.get("EVERY", "auto")
    session = Session(
        hybrid_shard_degree=shards,
        global_batch_size=20,
        recovery=RecoveryOptions(
            verify=True,
            hang_timeout_s=5.0,
            replacement_timeout_s=30.0,
            snapshot_every_steps="auto" if every == "auto" else int(every),
        ),
    )
    torch.manual_seed(0)
    model = session.parallelize(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session.train(model, optimizer)
    loader = DataLoader(TensorDataset(torch.randn(240, WIDTH)), batch_size=20 // session.world_size)
    for step in session.steps(loader, epochs=100, max_steps=int(os.environ.get("STEPS", "12"))):
        with step:

            def compute_loss(batch, step=step):
                if os.environ.get("DAMAGES") and ["forward", step.index] in [fault[:2] for fault in faults.faults]:
                    damage_snapshots()
                faults.at("forward", step.index)
                return (model(batch[0]) - batch[0]).square().mean()

            means = step.run(compute_loss)
            faults.at("committed", step.index)
            kind = "again" if step.is_replay else "step"
            faults.note(kind=kind, pid=os.getpid(), step=step.index, loss=float(means).hex())
    state = {name: local(tensor) for name, tensor in model.state_dict().items()}
    for number, each in optimizer.state_dict()["state"].items():
        state |= {f"{number}.{name}": local(value) for name, value in each.items()}
    torch.save(
        {"state": state, "repairs": [str(r) for r in session.repairs]}, faults.folder / f"result-{faults.rank}.pt"
    )


if __name__ == "__main__":
    main()
