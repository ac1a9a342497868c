"""A stand-in for Transformer Engine 2 on a CPU: its interfaces, where it keeps its state, and when it reduces.

Names, signatures and the order of events are those of `transformer_engine/pytorch/quantization.py` and `module/base.py`
of version 2.20 (and of `fp8.py` of 2.0); the arithmetic is emulated. It is no proof that the library itself works.
"""
