"""Precision of matrix products: linear layers in 8-bit floating point."""

from hyperpod_plugins.precision.float8 import ConvertedLinears, convert_linears
from hyperpod_plugins.precision.transformer_engine import TeScaling

__all__ = ["ConvertedLinears", "TeScaling", "convert_linears"]
