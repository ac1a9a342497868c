"""Which lists of modules are read as chains: those whose elements are all run, whatever the data."""

import pytest
from torch import nn

from hyperpod_plugins.parallel.module_chains import find_chains


class Layers(nn.Module):
    """Two layers and a forward that a test overrides."""

    num = 2
    drops = False

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))


class Plain(Layers):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Inherits(Plain):
    pass


class Sliced(Layers):
    def forward(self, x, cache):
        for i, (layer, past) in enumerate(zip(self.layers[: self.num], cache, strict=True)):
            if i == 0:
                x = x + 1
            out = layer(x, past)
            x = out[0] if isinstance(out, tuple) else out
        return x


class Indexed(Layers):
    def forward(self, x):
        for i in range(self.num):
            x = self.layers[i](x)
        return x


class Named(Layers):
    def forward(self, x):
        for i in range(len(self.layers)):
            layer = self.layers[i]
            x = layer(x)
        return x


class Recomputed(Layers):
    def forward(self, x):
        for layer in self.layers:
            if self.training:
                x = self.checkpoint(layer.__call__, x)
                x = x.float()
            else:
                x = layer(x)
        return x


class Aliased(Layers):
    def forward(self, x):
        layers = self.layers
        with self.context():
            for layer in reversed(layers):
                x = layer(x)
        return x


class Matched(Layers):
    def forward(self, x, kind):
        for layer in self.layers:
            match kind:
                case "whole":
                    x = layer(x)
                case _:
                    x = x + 1
        return x


class BehindMatch(Layers):
    def forward(self, x, kind):
        match kind:
            case "whole":
                for layer in self.layers:
                    x = layer(x)
        return x


class BehindMatchedReturn(Layers):
    def forward(self, x, kind):
        match kind:
            case "none":
                return x
        for layer in self.layers:
            x = layer(x)
        return x


class LeftAfterALoop(Layers):
    def forward(self, x):
        for layer in self.layers:
            for _ in range(2):
                x = x + 1
            else:
                break
            x = layer(x)
        return x


class Asserted(Layers):
    def forward(self, x):
        for layer in self.layers:
            assert layer(x) is not None
        return x


class Summed(Layers):
    def forward(self, x):
        return sum(layer(x) for layer in self.layers)


class Initialised(Plain):
    def reset(self):
        for layer in self.layers:
            if layer.bias is not None:
                layer.reset_parameters()


class Children(Layers):
    def forward(self, x):
        for layer in self.layers.children():
            x = layer(x)
        return x


class Dropped(Layers):
    def forward(self, x):
        for layer in self.layers:
            if self.training and self.drops:
                continue
            x = layer(x)
        return x


class Left(Layers):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.norm() > 1:
                break
        return x


class Returned(Layers):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.norm() > 1:
                return x
        return x


class Routed(Layers):
    def forward(self, x, to):
        for i, layer in enumerate(self.layers):
            if (to == i).any():
                x = x + layer(x)
        return x


class Ternary(Layers):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if x.norm() > 1 else x
        return x


class Filtered(Layers):
    def forward(self, x):
        return sum(layer(x) for layer in self.layers if layer.bias is not None)


class Chosen(Layers):
    def forward(self, x, task):
        return self.layers[task](x)


class ChosenInALoop(Layers):
    def forward(self, x, hit):
        for index in hit:
            layer = self.layers[index]
            x = layer(x)
        return x


class SometimesChosen(Plain):
    def half(self, x, task):
        return self.layers[task](x)


class Handed(Layers):
    def forward(self, x):
        return nn.Sequential(*self.layers)(x)


class Configured(Layers):
    def forward(self, x, mask=None):
        if mask is None and self.num > 1:
            for layer in self.layers:
                x = layer(x)
        return x


class Conditional(Layers):
    def forward(self, x):
        if x.norm() > 1:
            for layer in self.layers:
                x = layer(x)
        return x


class Skipped(Layers):
    def forward(self, x):
        if x.norm() > 1:
            return x
        for layer in self.layers:
            x = layer(x)
        return x


class Passed(Layers):
    def forward(self, x):
        for layer in self.layers:
            x = self.where(x > 1, x, layer)
        return x


CHAINS = [Plain, Inherits, Sliced, Indexed, Named, Recomputed, Aliased, Summed, Initialised, Children, Configured]
NOT_CHAINS = [
    *(Dropped, Left, Returned, Routed, Ternary, Filtered, Chosen, ChosenInALoop, SometimesChosen, Handed, Layers),
    *(Conditional, Skipped, Passed, Matched, BehindMatch, BehindMatchedReturn, LeftAfterALoop, Asserted),
]


@pytest.mark.parametrize("kind", CHAINS)
def test_a_loop_that_runs_each_element_makes_a_chain(kind):
    assert find_chains(kind()) == {"layers"}


@pytest.mark.parametrize("kind", NOT_CHAINS)
def test_what_may_leave_out_an_element_is_no_chain(kind):
    assert find_chains(kind()) == set()


class Nano(nn.Module):
    """A list that a module further out runs, as in nanoGPT."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict({"h": nn.ModuleList([Routed(), Plain()]), "head": nn.Linear(2, 2)})

    def forward(self, x):
        for block in self.transformer.h:
            x = block(x)
        return self.transformer.head(x)


class Tasks(nn.Module):
    """Chains inside of what is itself run on a condition."""

    def __init__(self):
        super().__init__()
        self.body = Plain()
        self.heads = nn.ModuleList([Plain(), Plain()])
        self.adapters = nn.ModuleDict({"a": Plain()})

    def forward(self, x, task):
        return self.adapters["a"](self.heads[task](self.body(x)))


def test_a_list_is_read_where_it_is_run_and_counts_only_where_its_module_always_runs():
    assert find_chains(Nano()) == {"transformer.h", "transformer.h.1.layers"}
    assert find_chains(Tasks()) == {"body.layers"}


def test_models_of_others():
    assert find_chains(nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, batch_first=True), 2)) == {"layers"}
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    small = {**sizes, "num_key_value_heads": 2, "vocab_size": 8}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small))
    assert find_chains(llama) == {"model.layers"}
    opt = {"ffn_dim": 8, "word_embed_proj_dim": 8, "max_position_embeddings": 8, "vocab_size": 8, **sizes}
    dropping = transformers.OPTModel(transformers.OPTConfig(**{k: v for k, v in opt.items() if k[0] != "i"}))
    assert find_chains(dropping) == set()  # its loop may drop layers
