"""Precision of matrix products: linear layers in 8-bit floating point."""

from hyperpod_plugins.precision.float8 import ConvertedLinears, convert_linears

__all__ = ["ConvertedLinears", "convert_linears"]
