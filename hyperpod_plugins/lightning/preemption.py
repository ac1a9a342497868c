"""Ending all ranks after the same batch when any of them is told to end, without making each batch wait for it."""

# Lightning's signal handler has no public place.
# pyright: reportPrivateUsage=false

import logging
import math
import time
from types import FrameType

import torch
import torch.distributed as dist

from hyperpod_plugins.lightning.compat import SIGTERMException, Trainer

INTERVAL_S = 3.0

log = logging.getLogger(__name__)


def batches_until_next(batch_s: float) -> int:
    """How many batches to go on before the ranks ask each other again, so that it is about every three seconds."""
    return max(1, min(1000, int(INTERVAL_S / max(batch_s, 1e-9))))


class SigtermConsensus:
    """What a Trainer does about SIGTERM.

    Lightning has rank 0 broadcast at the beginning of each batch whether it got the signal, and every batch waits for
    that; its handler broadcasts too, out of whatever it interrupts; and a rank that got the signal leaves alone at the
    end of its batch. Here the handler takes a note. About every three seconds the ranks ask each other whether anybody
    has one, and the batch after that hears the answer, when it has long arrived. So it is enough to tell one rank, and
    all end after the same batch. Before a validation, and at the end, they wait for the answer. Within a validation,
    whose batches not all ranks need have alike, each that is told ends by itself.
    """

    def __init__(self, trainer: Trainer, *, agrees: bool) -> None:
        """Take the place of Lightning's handler, which is registered after this, and of its broadcasts.

        Args:
            trainer: whose.
            agrees: whether this is a fit on several ranks, all of which ask; otherwise each ends by itself.
        """
        self._trainer = trainer
        self._agrees = agrees
        self._is_told = False
        self._under_way: tuple[dist.Work, torch.Tensor] | None = None
        self._num_batches, self._batches_left, self._asked_s = 1, 0, 0.0
        self._batch_s = math.inf
        vars(trainer._signal_connector)["_sigterm_notifier_fn"] = self._told
        vars(trainer.fit_loop.epoch_loop)["_broadcast_sigterm_tensor"] = self.ask

    def _told(self, signum: int, frame: FrameType | None) -> None:
        log.info("rank %d received signal %d", self._trainer.global_rank, signum)
        launcher = self._trainer.strategy.launcher
        if not self._is_told and launcher is not None:
            launcher.kill(signum)
        self._is_told = True
        if not self._agrees or not self._trainer.training:
            self._trainer._signal_connector.received_sigterm = True

    def ask(self) -> None:
        """Begin a batch: hear what the ranks asked each other in the last one, and ask again if it is time.

        Raises:
            SIGTERMException: one of them got the signal.
        """
        self.hear()
        if not self._agrees:
            return
        if self._batches_left:
            self._batches_left -= 1
            return
        now_s = time.monotonic()
        # A validation or a pause in between does not make batches longer.
        self._batch_s = min(1.5 * self._batch_s, (now_s - self._asked_s) / self._num_batches)
        self._asked_s = now_s
        notes = torch.tensor([int(self._is_told), batches_until_next(self._batch_s)])  # on the CPU: no GPU waits for it
        work = dist.all_reduce(notes, op=dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        self._under_way = (work, notes)

    def agree(self) -> None:
        """Ask, and wait for the answer.

        Raises:
            SIGTERMException: one of the ranks got the signal.
        """
        self.hear()
        self._batches_left = 0
        self.ask()
        self.hear()

    def hear(self) -> None:
        """Wait for the answer to what was asked last.

        Raises:
            SIGTERMException: one of the ranks got the signal.
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
