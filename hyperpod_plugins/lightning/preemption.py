"""Ending all ranks after the same batch when any receives SIGTERM, without a blocking collective per batch."""

# Lightning's signal handler is private.
# pyright: reportPrivateUsage=false

import logging
import math
import time
from types import FrameType

import torch
import torch.distributed as dist

from hyperpod_plugins.lightning.compat import SIGTERMException, Trainer, override

INTERVAL_S = 3.0

log = logging.getLogger(__name__)


def batches_until_next(batch_s: float) -> int:
    """Batches until the next exchange between ranks, so that there is one about every `INTERVAL_S` seconds."""
    return max(1, min(1000, int(INTERVAL_S / max(batch_s, 1e-9))))


class SigtermConsensus:
    """Handles SIGTERM in a Trainer so that all ranks end after the same batch.

    In Lightning, rank 0 broadcasts at the beginning of each batch whether it received the signal, and every batch
    waits for that. The handler also broadcasts, from whatever code it interrupts, and a rank that received the signal
    leaves alone at the end of its batch. Here the handler only sets a flag. About every three seconds the ranks start
    an all-reduce of their flags, and read the result at the next batch, when it has long arrived. So a signal to one
    rank is enough, and all ranks end after the same batch. Before a validation, and at the end, they wait for the
    result. Inside a validation, where ranks may have different numbers of batches, each rank that receives the signal
    ends by itself.
    """

    def __init__(self, trainer: Trainer, *, agrees: bool) -> None:
        """Replace Lightning's signal handler, which is registered after this, and its broadcasts.

        Args:
            trainer: whose handler and broadcasts to replace.
            agrees: whether the ranks agree on the signal, for a fit on several ranks; otherwise each ends by itself.
        """
        self._trainer = trainer
        self._agrees = agrees
        self._is_told = False
        self._under_way: tuple[dist.Work, torch.Tensor] | None = None
        self._num_batches, self._batches_left, self._asked_s = 1, 0, 0.0
        self._batch_s = math.inf
        override(trainer._signal_connector, "_sigterm_notifier_fn", self._told)
        override(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", self.ask)

    def _told(self, signum: int, frame: FrameType | None) -> None:
        log.info("rank %d received signal %d", self._trainer.global_rank, signum)
        launcher = self._trainer.strategy.launcher
        if not self._is_told and launcher is not None:
            launcher.kill(signum)
        self._is_told = True
        if not self._agrees or not self._trainer.training:
            self._trainer._signal_connector.received_sigterm = True

    def ask(self) -> None:
        """At the beginning of a batch, read the result of the last exchange, and start another one if it is due.

        Raises:
            SIGTERMException: a rank has received the signal.
        """
        self.hear()
        if not self._agrees:
            return
        if self._batches_left:
            self._batches_left -= 1
            return
        now_s = time.monotonic()
        # The limit keeps a validation or a pause in between from inflating the estimate.
        self._batch_s = min(1.5 * self._batch_s, (now_s - self._asked_s) / self._num_batches)
        self._asked_s = now_s
        notes = torch.tensor([int(self._is_told), batches_until_next(self._batch_s)])  # on the CPU: no GPU waits for it
        work = dist.all_reduce(notes, op=dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        self._under_way = (work, notes)

    def agree(self) -> None:
        """Start an exchange, and wait for its result.

        Raises:
            SIGTERMException: a rank has received the signal.
        """
        self.hear()
        self._batches_left = 0
        self.ask()
        self.hear()

    def hear(self) -> None:
        """Wait for the result of the last exchange, if it has not been read yet.

        Raises:
            SIGTERMException: a rank has received the signal.
        """
        if self._under_way is None:
            return
        (work, notes), self._under_way = self._under_way, None
        work.wait()
        is_over, self._num_batches = notes.tolist()
        self._batches_left = self._num_batches - 1
        if is_over:
            self._trainer._signal_connector.received_sigterm = True
            raise SIGTERMException
