"""Precision of matrix products: linear layers in 8-bit floating point."""

from hyperpod_plugins.precision.float8 import (
    FLOAT8_RECIPES,
    ConvertedLinears,
    Float8Recipe,
    check_float8,
    convert_linears,
)

__all__ = ["FLOAT8_RECIPES", "ConvertedLinears", "Float8Recipe", "check_float8", "convert_linears"]
