"""Random streams on tape: which numbers a delayed op will draw, although nothing is drawn while the model is built.

[Note: seeds seen on tape]
User code may look at or set the state of a generator in the middle of a build (`torch.manual_seed`, `fork_rng`).
Delayed ops draw nothing, so the state of the generator would stand still and a saved state would mean nothing.
After every delayed draw we therefore put the generator into a made-up state that stands for "after draw n".
If the state found at the next draw is the expected one, nobody touched it. If it stands for "after draw m",
somebody went back there. Any other state was set by the user, and is put on tape as it is.
"""

import hashlib
from dataclasses import dataclass

import torch

_TOKEN_STEP = 0x9E3779B97F4A7C15  # odd, so that tokens of different draws differ; large, so that no user picks one


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """One delayed op that draws random numbers."""

    stream: int
    """Index of the generator on tape; 0 is torch's default CPU generator."""
    number: int
    """How many draws of this stream have happened when the op is done, counted from 1."""
    reseed: torch.Tensor | int | None
    """State to set before: a user's state, the number of the draw to go back to (0: the start), or None."""


class Stream:
    """One CPU generator while ops are being recorded."""

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
        """Put one draw on tape."""
        reseed = self._reseed()
        self._num_draws += 1
        self.generator.manual_seed(self._num_draws * _TOKEN_STEP % 2**63)
        self._expected = _digest(self.generator.get_state())
        self._numbers[self._expected] = self._num_draws
        return Draw(self._index, self._num_draws, reseed)

    def close(self) -> None:
        """End recording: note the state the user left, and put the generator back to where it was."""
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


class StreamPlayer:
    """One generator while the tape is replayed: it really draws."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._kept = {0: stream.entry_state}
        stream.generator.set_state(stream.entry_state)

    def before(self, draw: Draw) -> None:
        """Bring the generator into the state in which eager code would have found it."""
        self._set(draw.reseed)

    def after(self, draw: Draw) -> None:
        """Keep the state if the build went back to it later."""
        if draw.number in self._stream.kept_numbers:
            self._kept[draw.number] = self._stream.generator.get_state()

    def finish(self) -> None:
        """Leave the state that eager code would have left."""
        self._set(self._stream.final)

    def _set(self, reseed: torch.Tensor | int | None) -> None:
        if reseed is not None:
            self._stream.generator.set_state(self._kept[reseed] if isinstance(reseed, int) else reseed)


def _digest(state: torch.Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()
