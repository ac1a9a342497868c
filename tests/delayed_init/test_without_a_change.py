"""A script's own `from_pretrained` with `delayed_init=True` in a session, or in `torch.sagemaker.init`.

Through Accelerate: `tests/accelerate_adapter/test_pretrained.py`; through Lightning: `tests/lightning_adapter`.
"""

import pytest
import torch
from harness import run_ranks

pytest.importorskip("transformers")
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}


def load_and_compute(folder, shard):
    """Whether the model is loaded before it is sharded, and its values and loss afterwards."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").train()
    has_values = [not each.is_meta for each in model.parameters()]
    model, tokens = shard(model), torch.arange(2 * 8).view(2, 8)
    loss = float(model(input_ids=tokens, labels=tokens).loss.detach())
    values = {name: getattr(each, "full_tensor", each.detach)() for name, each in model.named_parameters()}
    return any(has_values), all(has_values), values, loss


def with_session(folder):
    from hyperpod_plugins.session import Session

    session = Session(hybrid_shard_degree=2, delayed_init=True, global_batch_size=2)
    return load_and_compute(folder, session.parallelize)


def with_smp(folder):
    import hyperpod_plugins.smp

    hyperpod_plugins.smp.install()
    import torch.sagemaker as tsm
    from torch.distributed.fsdp import FullyShardedDataParallel

    tsm.init({"hybrid_shard_degree": 2, "delayed_init": True})
    return load_and_compute(folder, lambda model: FullyShardedDataParallel(model, use_orig_params=True))


@pytest.mark.spawns
@pytest.mark.parametrize("load", [with_session, with_smp])
def test_a_pretrained_model_is_not_read_before_it_is_sharded(tmp_path, load):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path, max_shard_size="5KB")
    has_any, has_all, wanted, alone = load_and_compute(tmp_path, lambda model: model)
    assert (has_any, has_all) == (True, True)
    for has_any, _, values, loss in run_ranks(load, tmp_path, world_size=2, timeout_s=120):
        assert not has_any
        assert loss == pytest.approx(alone, rel=2e-6)
        assert values.keys() == wanted.keys()
        assert all(torch.equal(value, wanted[name]) for name, value in values.items())
