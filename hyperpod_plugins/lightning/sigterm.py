"""Ending all ranks at the same batch when rank 0 is told to end, without making each batch wait for it."""

import torch
import torch.distributed as dist

from hyperpod_plugins.lightning.flavour import SIGTERMException, Trainer


class SigtermNews:
    """Stands where Lightning broadcasts at the beginning of each batch whether rank 0 got SIGTERM.

    Lightning waits for each of these broadcasts, and so every batch for the slowest rank. Here a batch looks at the
    broadcast of the batch before, which has long arrived: all ranks still end at the same batch, one later.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Begin with no news."""
        self._trainer = trainer
        self._under_way: tuple[dist.Work, torch.Tensor] | None = None

    def __call__(self) -> None:
        """Hear of the last batch, and ask for the next.

        Raises:
            SIGTERMException: rank 0 got the signal.
        """
        self.close()
        device = self._trainer.strategy.root_device
        asked = torch.tensor([int(self._trainer.received_sigterm)], device=device)
        work = dist.broadcast(asked, src=0, async_op=True)
        assert work is not None
        self._under_way = (work, asked)

    def close(self) -> None:
        """Hear of the last batch.

        Raises:
            SIGTERMException: rank 0 got the signal.
        """
        if self._under_way is None:
            return
        (work, told), self._under_way = self._under_way, None
        work.wait()
        if told.item():
            raise SIGTERMException
