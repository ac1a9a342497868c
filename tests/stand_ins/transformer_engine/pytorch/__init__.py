"""The linear layer."""

import pickle

import torch
from torch import nn

from transformer_engine.pytorch.quantization import FP8GlobalStateManager, autocast, fp8_autocast  # noqa: F401


class DelayedScalingRecipeState:
    def __init__(self, recipe, num_quantizers):
        self.scale = torch.ones(num_quantizers)
        self.amax_history = torch.zeros(recipe.amax_history_len, num_quantizers)


def _quantized(tensor, state, index, dtype):
    """Values in float8, and what they are multiplied by."""
    state.amax_history[0][index] = torch.maximum(state.amax_history[0][index], tensor.abs().max().float())
    limit = torch.finfo(dtype).max
    return (tensor.float() * state.scale[index]).clamp(-limit, limit).to(dtype), state.scale[index].reciprocal()


def _values(quantized, dtype):
    data, scale_inv = quantized
    return (data.float() * scale_inv).to(dtype)


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _quantized_in_blocks(tensor, recipe):
    """Blocks of the last dimension: MXFP8 with scales that are powers of two, NVFP4 with scales in E4M3."""
    size = 32 if type(recipe).__name__ == "MXFP8BlockScaling" else 16
    blocks = tensor.float().unflatten(-1, (-1, size))
    largest = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    if size == 32:
        scale = 2 ** (largest.log2().floor() - 8)
        cast = (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    else:
        scale = (largest / 6).to(torch.float8_e4m3fn).float().clamp_min(2**-9)
        scaled = blocks / scale
        cast = FP4[(scaled.abs().unsqueeze(-1) - FP4).abs().argmin(-1)] * scaled.sign()
    return (cast * scale).flatten(-2)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, inp, bias, layer, is_fp8, is_first):
        ctx.layer, ctx.is_fp8, ctx.is_first, ctx.has_bias = layer, is_fp8, is_first, bias is not None
        x, w = inp, weight
        ctx.is_in_blocks = is_fp8 and not layer.fp8_meta["recipe"].delayed()
        if ctx.is_in_blocks:
            x, w = (_quantized_in_blocks(each, layer.fp8_meta["recipe"]).to(inp.dtype) for each in (inp, weight))
        elif is_fp8:
            state = layer.fp8_meta["scaling_fwd"]
            saved = _quantized(inp, state, 0, torch.float8_e4m3fn)
            x = _values(saved, inp.dtype)
            w = _values(_quantized(weight, state, 1, torch.float8_e4m3fn), inp.dtype)
            # A model under FSDP2 keeps the weight, and quantizes it again with the scale that it has in backward.
            ctx.save_for_backward(*saved, weight)
            return nn.functional.linear(x, w, bias)
        ctx.save_for_backward(x, w)
        return nn.functional.linear(x, w, bias)

    @staticmethod
    def backward(ctx, grad):
        *x, w = ctx.saved_tensors
        g = grad
        if ctx.is_fp8 and not ctx.is_in_blocks:
            x = _values(x, grad.dtype)
            w = _values(_quantized(w, ctx.layer.fp8_meta["scaling_fwd"], 1, torch.float8_e4m3fn), grad.dtype)
        else:
            (x,) = x
        if ctx.is_in_blocks:
            g = _quantized_in_blocks(grad, ctx.layer.fp8_meta["recipe"]).to(grad.dtype)
        elif ctx.is_fp8:
            is_hybrid = ctx.layer.fp8_meta["recipe"].fp8_format.name == "HYBRID"
            dtype = torch.float8_e5m2 if is_hybrid else torch.float8_e4m3fn
            g = _values(_quantized(grad, ctx.layer.fp8_meta["scaling_bwd"], 0, dtype), grad.dtype)
        if ctx.is_first:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        of_weight = g.reshape(-1, g.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        return of_weight, g @ w, grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.has_bias else None, None, None, None


class Linear(nn.Module):
    def __init__(self, in_features, out_features, bias=True, params_dtype=None, device="cuda"):
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.fp8_initialized = self.fp8 = self.fp8_meta_tensors_initialized = False
        self.fp8_meta = {"fp8_checkpoint": False, "fp8_group": None}
        self.register_parameter("weight", nn.Parameter(torch.empty(out_features, in_features, device=device)))
        if bias:
            self.register_parameter("bias", nn.Parameter(torch.empty(out_features, device=device)))
        else:
            self.bias = torch.Tensor().to(dtype=params_dtype, device=device)

    def init_fp8_metadata(self, num_gemms=1):
        manager = FP8GlobalStateManager
        self.fp8 = manager.enabled
        if not self.fp8:
            self.fp8_initialized = False
            return
        if self.fp8_initialized and manager.recipe == self.fp8_meta["recipe"]:
            return
        self.fp8_meta |= {"recipe": manager.recipe, "num_gemms": num_gemms}
        if not self.fp8_meta_tensors_initialized and manager.recipe.delayed():
            self.fp8_meta["scaling_fwd"] = DelayedScalingRecipeState(manager.recipe, 3)
            self.fp8_meta["scaling_bwd"] = DelayedScalingRecipeState(manager.recipe, 2)
        self.fp8_initialized = self.fp8_meta_tensors_initialized = True

    def get_extra_state(self):
        return torch.frombuffer(bytearray(pickle.dumps(self.fp8_meta["scaling_fwd"].scale)), dtype=torch.uint8)

    def set_extra_state(self, state):
        raise AssertionError("runs code")

    def forward(self, inp):
        self.init_fp8_metadata()
        if self.fp8:
            FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(self.fp8_meta)
        if torch.is_autocast_enabled(inp.device.type):
            inp = inp.to(torch.get_autocast_dtype(inp.device.type))
        is_first = self.fp8 and torch.is_grad_enabled() and FP8GlobalStateManager.is_first_fp8_module()
        bias = self.bias.to(inp.dtype) if self.use_bias else None
        return _Linear.apply(self.weight, inp, bias, self, self.fp8, is_first)
