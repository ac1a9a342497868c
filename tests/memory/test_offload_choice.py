"""Whether offload pays, by widths, lengths and devices."""

import logging

import pytest
import torch

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.memory.offload import AutomaticOffload, DeviceSpeed, choose_offload
from hyperpod_plugins.parallel import ParallelConfig
from hyperpod_plugins.parallel.parallelize import save_activation_memory

H100 = DeviceSpeed(flops=400e12, bytes_per_s=50e9, memory_bytes=80 * 2**30)


@pytest.mark.parametrize(
    ("width", "tokens", "pays", "why"),
    [
        (4096, 131_072, True, "inputs of blocks take 30.00 GiB, and copies hide"),
        (4096, 32_768, True, "inputs of blocks take 7.50 GiB"),
        (4096, 8_192, False, "1.88 GiB, less than 5% of the device's memory: longer sequences would gain"),
        (666, 1_048_576, False, "the width is 666, and at 400 TFLOP/s and 50 GB/s it must be at least 667"),
    ],
)
def test_copies_must_hide_and_gain_something(width, tokens, pays, why):
    choice = choose_offload(width, 2 * width * tokens, 32, 2, H100)
    assert choice.pays == pays
    assert why in choice.why


def test_a_choice_is_made_and_told_once_for_each_size(caplog):
    measured = []
    automatic = AutomaticOffload(torch.device("cpu"), 2, lambda: measured.append(1) or H100)
    long, short = torch.empty(1, 65_536, 4096, dtype=torch.bfloat16), torch.empty(1, 64, 4096, dtype=torch.bfloat16)
    with caplog.at_level(logging.INFO):
        assert [automatic(each, 32) for each in (long, short, long, short)] == [True, False, True, False]
    assert len(measured) == 1
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "activation_offload='auto': on",
        "activation_offload='auto': off",
    ]


def test_a_cpu_is_the_host(caplog):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=256,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    asked = ParallelConfig.of(activation_offload="auto")
    offload = save_activation_memory(model, asked, torch.device("cpu"))
    tokens = torch.randint(50, (2, 64))
    with caplog.at_level(logging.INFO):
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert offload.stored_bytes == 0
    assert "off; the device (cpu) is the host" in caplog.text
    with pytest.raises(ConfigError, match="sm_activation_offloading must be true or false or auto, but is 'maybe'"):
        ParallelConfig.of(activation_offload="maybe")
