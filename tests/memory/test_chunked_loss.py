"""The loss in chunks of tokens, against the loss of whole logits."""

import copy
import inspect
import math
import operator
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.memory import chunk_loss, chunked_cross_entropy
from hyperpod_plugins.parallel import ParallelConfig
from hyperpod_plugins.parallel.parallelize import save_activation_memory

transformers = pytest.importorskip("transformers")
TOKENS, WIDTH, VOCABULARY = 37, 16, 101


def tiny_llama(**options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


def tokens(seed=1):
    return torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(seed))


def assert_close(found, wanted):
    assert (found - wanted).abs().max() <= 5e-7 * wanted.abs().max()


@pytest.mark.parametrize("num_chunks", [1, 2, 5, 1000])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_and_gradients_are_those_of_whole_logits(num_chunks, reduction):
    generator = torch.Generator().manual_seed(2)
    results = []
    for is_chunked in (False, True):
        head = nn.Linear(WIDTH, VOCABULARY)
        with torch.no_grad():
            for index, parameter in enumerate(head.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
        hidden = torch.randn(3, TOKENS, WIDTH, generator=generator.manual_seed(2)).requires_grad_()
        labels = torch.randint(VOCABULARY, (3, TOKENS), generator=generator)
        labels[0, :5] = -100
        if is_chunked:
            loss = chunked_cross_entropy(head, hidden, labels, num_chunks=num_chunks, reduction=reduction)
        else:
            loss = F.cross_entropy(head(hidden).flatten(0, -2), labels.flatten(), reduction=reduction)
        loss.backward()
        results.append([loss.detach(), hidden.grad, *(parameter.grad for parameter in head.parameters())])
    for wanted, found in zip(*results, strict=True):
        assert_close(found, wanted)


def largest_logits(compute):
    """Largest number of rows of logits that the head has made at once."""
    seen, linear = [0], F.linear

    def watch(x, weight, bias=None):
        out = linear(x, weight, bias)
        if out.shape[-1] == VOCABULARY:
            seen[0] = max(seen[0], out.shape[:-1].numel())
        return out

    F.linear = watch
    try:
        compute()
    finally:
        F.linear = linear
    return seen[0]


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}])
@pytest.mark.parametrize("arguments", [{}, {"num_items_in_batch": torch.tensor(50)}, {"shift_labels": tokens(3)}])
def test_a_hugging_face_model_trains_without_whole_logits(options, arguments):
    plain, model = tiny_llama(**options), tiny_llama(**options)
    chunk_loss(model, 4)
    results = []
    for each in (plain, model):
        rows = largest_logits(lambda each=each: each(tokens(), labels=tokens(), **arguments).loss.backward())
        loss = each(tokens(), labels=tokens(), **arguments).loss
        results.append((rows, loss.detach(), [parameter.grad for parameter in each.parameters()]))
    (whole, wanted, gradients), (largest, found, others) = results
    assert whole == 2 * TOKENS
    assert largest <= TOKENS / 2 + 1
    assert_close(found, wanted)
    for one, other in zip(gradients, others, strict=True):
        assert_close(other, one)


def test_evaluation_and_generation_have_logits():
    plain, model = tiny_llama(), tiny_llama()
    chunk_loss(model, 4)
    with torch.no_grad():
        assert torch.equal(model(tokens(), labels=tokens()).logits, plain(tokens()).logits)
        assert torch.equal(model(tokens(), labels=tokens()).loss, plain(tokens(), labels=tokens()).loss)
    assert torch.equal(model(tokens()).logits, plain(tokens()).logits)
    assert torch.equal(
        model.generate(tokens()[:, :3], max_new_tokens=4), plain.generate(tokens()[:, :3], max_new_tokens=4)
    )


def test_logits_of_a_training_step_say_that_they_do_not_exist():
    model = tiny_llama()
    chunk_loss(model, 4)
    out = model(tokens(), labels=tokens())
    with pytest.raises(AttributeError, match=r"logits\.argmax: the loss is computed in chunks"):
        out.logits.argmax(-1)
    for use in (
        lambda: out.logits + 1,
        lambda: 2 * out.logits,
        lambda: out.logits[:, -1],
        lambda: out.logits @ tokens(),
    ):
        with pytest.raises(ConfigError, match=r"logits\): the loss is computed in chunks \(loss_chunks\)"):
            use()
    with pytest.raises(ConfigError, match=r"softmax\(logits\)"):
        torch.softmax(out.logits, -1)


def test_labels_may_be_positional_and_copies_have_weights_of_their_own():
    model = tiny_llama()
    chunk_loss(model, 4)
    names = [name for name in inspect.signature(transformers.LlamaForCausalLM.forward).parameters if name != "self"]
    before = [None] * (names.index("labels") - 1)
    assert largest_logits(lambda: model(tokens(), *before, tokens()).loss.backward()) <= TOKENS / 2 + 1
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert float(other(tokens(), labels=tokens()).loss.detach()) == pytest.approx(math.log(VOCABULARY))
    assert float(model(tokens(), labels=tokens()).loss.detach()) == pytest.approx(
        float(tiny_llama()(tokens(), labels=tokens()).loss.detach()), rel=1e-6
    )


def test_a_model_that_only_converts_its_logits():
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16, dropout=0.0,
        word_embed_proj_dim=16,
    )  # fmt: skip
    model = transformers.OPTForCausalLM(config).train()
    wanted = model(tokens(), labels=tokens()).loss
    chunk_loss(model, 4)
    assert_close(model(tokens(), labels=tokens()).loss.detach(), wanted.detach())


@pytest.mark.parametrize(
    "build",
    [
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=WIDTH,
                n_layer=1,
                n_head=2,
                n_positions=TOKENS,
                resid_pdrop=0,
                embd_pdrop=0,
                attn_pdrop=0,
            )
        ),
        lambda: transformers.GraniteForCausalLM(
            transformers.GraniteConfig(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
            )
        ),
    ],
    ids=["another name", "logits divided by 1"],
)
def test_models_of_other_kinds_with_the_same_loss(build):
    torch.manual_seed(0)
    model = build().train()
    wanted = model(tokens(), labels=tokens()).loss
    chunk_loss(model, 4)
    assert (
        largest_logits(lambda: assert_close(model(tokens(), labels=tokens()).loss.detach(), wanted.detach()))
        <= TOKENS / 2 + 1
    )


LARGE = 20.0
"""The standard deviation of the head's weights, with which caps and scales matter."""


def changes_its_logits(name, **options):
    """A model of a type whose forward scales or caps its logits."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        name, vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, use_cache=False, pad_token_id=0, **options,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=LARGE)
    return model


CHANGED = {
    "capped": ("gemma2", "final_logit_softcapping", 3.0),
    "capped, of Gemma 3": ("gemma3_text", "final_logit_softcapping", 5.0),
    "multiplied": ("cohere", "logit_scale", 0.0625),
    "multiplied, of Cohere 2": ("cohere2", "logit_scale", 0.25),
    "divided": ("granite", "logits_scaling", 7.0),
    "capped by another function": ("recurrent_gemma", "logits_soft_cap", 9.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CHANGED)
def test_logits_that_a_model_scales_or_caps(case, dtype):
    name, key, value = CHANGED[case]
    plain, model = (changes_its_logits(name, **{key: value}).to(dtype) for _ in range(2))
    other = changes_its_logits(name, **{key: 2 * value}).to(dtype)
    chunk_loss(model, 4)
    wanted = plain(tokens(), labels=tokens()).loss
    rows = largest_logits(lambda: model(tokens(), labels=tokens()).loss.backward())
    found = model(tokens(), labels=tokens()).loss.detach()
    wanted.backward()
    assert rows <= TOKENS / 2 + 1
    assert_close(found, wanted.detach())
    for one, another in zip(plain.parameters(), model.parameters(), strict=True):
        if dtype == torch.float32:
            assert_close(another.grad, one.grad)
        else:  # gradients of the head are sums over chunks, each rounded
            assert (another.grad - one.grad).abs().max() <= 2e-2 * one.grad.abs().max()
    assert abs(float(other(tokens(), labels=tokens()).loss.detach() / found) - 1) > 1e-2  # so the value matters


class Changing(transformers.LlamaForCausalLM):
    """Changes its logits before the loss by a function that tests put there."""

    def forward(self, input_ids, labels=None):
        logits = self.change(self.lm_head(self.model(input_ids).last_hidden_state))
        return self.loss_function(logits, labels, VOCABULARY), logits


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda logits: logits * torch.tensor(2.0), "mul"),
        (lambda logits: torch.tensor(2.0) * logits, "mul"),
        (lambda logits: logits / nn.Parameter(torch.ones(())), "truediv"),
        (lambda logits: logits * True, "mul"),
        (lambda logits: operator.imul(logits, 2.0), "imul"),
        (lambda logits: operator.itruediv(logits, 2.0), "itruediv"),
        (lambda logits: 2.0 / logits, "rtruediv"),
        (lambda logits: logits + torch.zeros(VOCABULARY), "add"),
        (lambda logits: torch.tanh(logits, out=torch.zeros(1)), "tanh"),
        (torch.sigmoid, "sigmoid"),
        (lambda logits: logits[..., :VOCABULARY], "getitem"),
    ],
)
def test_other_changes_of_logits_are_refused(change, named):
    model = Changing(tiny_llama().config).train()
    model.loss_type, model.change = "ForCausalLM", change
    chunk_loss(model, 4)
    with pytest.raises(ConfigError, match=rf"{named}\(logits\): .* Before its loss a model may multiply and divide"):
        model(tokens(), tokens())


def test_changes_of_logits_are_applied_in_the_order_of_the_model():
    model = Changing(tiny_llama().config).train()
    model.loss_type = "ForCausalLM"
    model.change = lambda logits: 3 * (logits.contiguous() / 0.01).tanh().float() * 0.5
    wanted, _ = model(tokens(), tokens())
    chunk_loss(model, 4)
    found, logits = model(tokens(), tokens())
    assert_close(found.detach(), wanted.detach())
    for use in (lambda: logits * 2, lambda: logits / 2, logits.tanh, lambda: torch.tanh(logits)):
        with pytest.raises(ConfigError, match=r"\(logits\): the loss is computed in chunks"):
            use()  # there is a loss already


def test_losses_that_are_computed_in_another_way_are_refused():
    """As libraries of kernels do, which replace the forward of an object, or of a class."""
    model = tiny_llama()
    model.forward = types.MethodType(type(model).forward, model)
    with pytest.raises(ConfigError, match="forward of LlamaForCausalLM was replaced in the object"):
        chunk_loss(model, 4)

    class Fused(transformers.LlamaForCausalLM):
        def forward(self, input_ids, labels=None):
            hidden = self.model(input_ids).last_hidden_state
            if self.training:
                logits = F.linear(hidden, self.lm_head.weight)
                return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return self.loss_function(self.lm_head(hidden), labels, VOCABULARY)

    model = tiny_llama()
    chunk_loss(model, 4)
    with pytest.raises(ConfigError, match="so it cannot be set any more"):
        model.loss_function = lambda *_, **__: torch.zeros(())

    fused = Fused(tiny_llama().config).train()
    fused.loss_type = "ForCausalLM"
    chunk_loss(fused, 4)
    with pytest.raises(ConfigError, match="Fused has computed its loss without its loss_function"):
        fused(tokens(), tokens())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # of peft
def test_adapters_train_without_whole_logits():
    peft = pytest.importorskip("peft")
    config = ParallelConfig(loss_chunks=4)
    plain, model = (
        peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        for _ in range(2)
    )
    model.load_state_dict(plain.state_dict())
    save_activation_memory(model, config, torch.device("cpu"))
    rows = largest_logits(lambda: model(input_ids=tokens(), labels=tokens()).loss.backward())
    plain(input_ids=tokens(), labels=tokens()).loss.backward()
    assert rows <= TOKENS / 2 + 1
    for wanted, found in zip(plain.parameters(), model.parameters(), strict=True):
        if wanted.grad is not None:
            assert_close(found.grad, wanted.grad)


def test_models_whose_loss_would_be_another_one_are_refused():
    own = tiny_llama()
    own.loss_function = lambda logits, labels, **_: logits.float().square().mean()
    with pytest.raises(ConfigError, match="has a loss function of its own"):
        chunk_loss(own, 4)
    bart = transformers.BartConfig(
        vocab_size=50, d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16, is_decoder=True
    )
    with pytest.raises(ConfigError, match=r"computes its loss itself|is for Hugging Face models"):
        chunk_loss(transformers.BartForCausalLM(bart), 4)
    with pytest.raises(ConfigError, match="is for Hugging Face models"):
        chunk_loss(nn.Linear(2, 2), 4)
    for wrong in ({"num_chunks": 0}, {"num_chunks": 2, "reduction": "none"}):
        with pytest.raises(ConfigError, match="takes num_chunks from 1 on"):
            chunked_cross_entropy(nn.Linear(2, 3), torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64), **wrong)
