"""Which layers of experts are divided among ranks, and which are refused; `test_expert_ranks.py` trains them."""

import pytest
import torch
from parallel.expert_models import OwnExperts, OwnMixture, make_model
from torch import nn

from hyperpod_plugins.errors import ConfigError, DegreeError, NotBuiltYetError
from hyperpod_plugins.parallel import ParallelConfig
from hyperpod_plugins.parallel.expert_parallel import find_experts, shard_experts
from hyperpod_plugins.parallel.parallelize import match_degrees

transformers = pytest.importorskip("transformers")
EXPERTS = ParallelConfig(expert_parallel_degree=2)
LAYER = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("mixtral", ["model.layers.0.mlp.experts", LAYER]),
        ("gpt_oss", ["model.layers.0.mlp.experts", LAYER]),
        ("deepseek_v3", [LAYER]),  # its first layer has no experts
    ],
)
def test_layers_of_experts_are_found_by_the_plans_of_the_model(name, found):
    model = nn.ModuleDict({"inner": make_model(name)})
    assert list(find_experts(model, EXPERTS)) == [f"inner.{each}" for each in found]
    assert find_experts(model, ParallelConfig()) == {}


def test_a_layer_of_ones_own_is_found_by_its_mark():
    assert list(find_experts(OwnMixture(), EXPERTS)) == ["experts"]


def changed(name, value, model=None):
    model = model or make_model()
    setattr(model.get_submodule(LAYER), name, value)
    return model


def with_adapters():
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(r=2, target_modules=[], target_parameters=["experts.down_proj"], lora_dropout=0.0)
    return peft.get_peft_model(make_model(), options)


def with_kernels():
    model = make_model()
    model._use_kernels = True
    return model


def without_plan():
    model = make_model()
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel):
            part.ep_plan = None
    return model


def shared():
    model = make_model()
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.down_proj = first.down_proj
    return model


def own(**options):
    model = OwnMixture()
    vars(model.experts).update(options)
    return model


def own_with(name, value):
    model = OwnMixture()
    setattr(model.experts, name, value)
    return model


def quantized(dtype):
    experts = make_model().get_submodule(LAYER)
    return nn.Parameter(experts.down_proj.detach().to(dtype), requires_grad=False)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: nn.Linear(2, 2), "has no layer of experts that is known"),
        (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=0)), "no layer of experts"),
        (with_adapters, "adapters of PEFT lie around it"),
        (lambda: changed("_is_expert_parallel", True), "has distributed the model already"),
        (without_plan, r"\(ep_plan\) does not name it"),
        (with_kernels, "use_kernels"),
        (lambda: own(forward=lambda *args: args[0]), "its attribute forward replaces the method of its class"),
        (shared, "down_proj belongs to other modules, too"),
        (lambda: changed("down_proj", quantized(torch.float8_e4m3fn)), r"down_proj is quantized \(torch.float8_e4m3fn"),
        (lambda: changed("down_proj", quantized(torch.uint8)), r"down_proj is quantized \(torch.uint8"),
        (
            lambda: changed("scale", nn.Parameter(torch.ones(3))),
            "first dimension of scale is not that of its 8 experts",
        ),
        (lambda: own_with("scale", nn.Parameter(torch.ones(()))), "first dimension of scale"),
        (lambda: own_with("norm", nn.LayerNorm(8)), "not parameters of its own.*norm.weight"),
        (lambda: own_with("table", nn.Buffer(torch.ones(8))), "not parameters of its own.*table"),
        (lambda: own(num_experts=None), "num_experts must be the number of its experts, but is None"),
    ],
)
def test_layers_that_are_not_known_to_be_exact(build, words):
    with pytest.raises(ConfigError, match=rf"expert_parallel_degree=2.*{words}.*Use expert_parallel_degree=1"):
        find_experts(build(), EXPERTS)


def test_experts_cannot_be_blocks_too():
    config = ParallelConfig(expert_parallel_degree=2, block_classes=("MixtralDecoderLayer", "MixtralExperts"))
    with pytest.raises(ConfigError, match="block_classes names MixtralExperts, a layer of experts"):
        find_experts(make_model(), config)


def test_parametrizations_of_experts():
    model = make_model()
    torch.nn.utils.parametrize.register_parametrization(model.get_submodule(LAYER), "down_proj", nn.Identity())
    with pytest.raises(ConfigError, match="not parameters of its own"):
        find_experts(model, EXPERTS)


@pytest.mark.parametrize(("degree", "nearest"), [(3, 2), (5, 4), (16, 8)])
def test_a_degree_that_does_not_divide_the_experts(degree, nearest):
    with pytest.raises(DegreeError, match=rf"has 8\. It can be one of \[1, 2, 4, 8\]; the nearest is {nearest}"):
        find_experts(make_model(), ParallelConfig(expert_parallel_degree=degree))


def test_what_computes_the_experts_must_be_served():
    model = make_model()
    model.config._experts_implementation_internal = "sonicmoe"
    with pytest.raises(NotBuiltYetError, match=r"experts_implementation='sonicmoe'.*eager, batched_mm, grouped_mm"):
        find_experts(model, EXPERTS)


def test_means_over_replicas_in_a_fixed_order():
    with pytest.raises(NotBuiltYetError, match="reproducible=True or AdaScale"):
        shard_experts({"experts": OwnExperts()}, None, EXPERTS, averages_replicas=False)


def test_a_model_that_the_program_has_sharded():
    with pytest.raises(
        ConfigError, match=r"expert_parallel_degree=2.*experts cannot be divided any more.*use expert_parallel_degree=1"
    ):
        match_degrees(make_model(), EXPERTS)
