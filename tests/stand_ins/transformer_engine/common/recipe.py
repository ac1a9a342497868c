"""Recipes."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    E4M3 = _FormatHelper(448, 448)
    E5M2 = _FormatHelper(57344, 57344)
    HYBRID = _FormatHelper(448, 57344)


@dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True

    def delayed(self):
        return True


@dataclass
class MXFP8BlockScaling:
    margin: int = 0
    fp8_format: Format = Format.E4M3

    def delayed(self):
        return False


@dataclass
class NVFP4BlockScaling:
    fp4_format: str = "E2M1"

    def delayed(self):
        return False
