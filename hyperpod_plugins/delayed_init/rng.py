"""Record and replay random streams, so that delayed ops draw the same numbers as eager ones.

[Note: seeds seen on tape]
User code may read or set the state of a generator during a build (`torch.manual_seed`, `fork_rng`). Delayed ops draw
nothing, so the state of the generator would not advance and a saved state would be meaningless. After every delayed
draw we therefore set the generator to an artificial state that stands for "after draw n". If the next draw finds the
expected state, the generator is unchanged. If it finds the state for "after draw m", user code has restored that one.
Any other state was set by the user and is recorded as it is.
"""

import hashlib
from dataclasses import dataclass

import torch

# Seeds of the artificial states: odd, so that different draws have different ones; large, so that no user picks one.
_TOKEN_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """The random numbers that one delayed op draws."""

    stream: int
    """Index of the generator on the tape; 0 is torch's default CPU generator."""
    number: int
    """Number of this draw in its stream, from 1."""
    reseed: torch.Tensor | int | None
    """State to set before the draw: the user's, or the one after this draw (0: the start); None keeps the state."""


class RandomStream:
    """A CPU generator while ops are recorded."""

    def __init__(self, generator: torch.Generator, index: int) -> None:
        self.generator = generator
        self.entry_state = generator.get_state()
        self.final: torch.Tensor | int | None = None
        self.kept_numbers: set[int] = set()
        self._index = index
        self._num_draws = 0
        self._expected = _digest(self.entry_state)
        self._numbers = {self._expected: 0}

    def draw(self) -> Draw:
        """Record one draw."""
        reseed = self._reseed()
        self._num_draws += 1
        self.generator.manual_seed(self._num_draws * _TOKEN_STEP % 2**63)
        self._expected = _digest(self.generator.get_state())
        self._numbers[self._expected] = self._num_draws
        return Draw(self._index, self._num_draws, reseed)

    def close(self) -> None:
        """End recording: save the state that the user left, and restore the generator's state from before."""
        self.final = self._reseed()
        self.generator.set_state(self.entry_state)

    def _reseed(self) -> torch.Tensor | int | None:
        state = self.generator.get_state()
        digest = _digest(state)
        if digest == self._expected:
            return None
        number = self._numbers.get(digest)
        if number is None:
            return state
        self.kept_numbers.add(number)
        return number


class StreamReplayer:
    """A generator while the tape is replayed, when it really draws."""

    def __init__(self, stream: RandomStream) -> None:
        self._stream = stream
        self._kept = {0: stream.entry_state}
        stream.generator.set_state(stream.entry_state)

    def before(self, draw: Draw) -> None:
        """Set the generator to the state that eager code would have found."""
        self._set(draw.reseed)

    def after(self, draw: Draw) -> None:
        """Save the state if the build restored it later."""
        if draw.number in self._stream.kept_numbers:
            self._kept[draw.number] = self._stream.generator.get_state()

    def finish(self) -> None:
        """Set the generator to the state that eager code would have left."""
        self._set(self._stream.final)

    def _set(self, reseed: torch.Tensor | int | None) -> None:
        if reseed is not None:
            self._stream.generator.set_state(self._kept[reseed] if isinstance(reseed, int) else reseed)


def _digest(state: torch.Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()
