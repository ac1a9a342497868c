"""The fragments of Python in README.md and docs/ run among the names that their pages leave out.

A function marked with `fragments` runs those that it quotes. `test_docs.py` finds blocks that nothing quotes.
"""

import ast
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from docs_blocks import ROOT, one_block, substituted
from harness import run_ranks


class Page:
    """The names of a page while its fragments run."""

    def __init__(self, blocks):
        self._blocks = blocks
        self.names = {"__name__": "page"}
        self.done = set()

    def __getitem__(self, name):
        return self.names[name]

    def run(self, quote, *, replaced=None, **names):
        """Run the fragment with this quote among `names` and those that earlier fragments left."""
        self.names.update(names)
        for statement in self.statements(quote, replaced):
            statement()

    def statements(self, quote, replaced=None):
        """The fragment's statements, to be called one by one."""
        block = self._blocks[quote]
        self.done.add(quote)
        text = "\n" * block.line + substituted(block.text, replaced or {})  # traces show the page's lines
        nodes = ast.parse(text).body
        path = str(ROOT / block.page)
        codes = [compile(ast.Module([node], []), path, "exec") for node in nodes]
        return [lambda code=code: exec(code, self.names) for code in codes]


@dataclass(frozen=True, kw_only=True)
class Fragments:
    page: str
    quotes: tuple[str, ...]
    ranks: int
    run: Callable[[Page], None]


FRAGMENTS: dict[str, Fragments] = {}


def fragments(page, *quotes, ranks=1):
    def add(run):
        FRAGMENTS[run.__name__] = Fragments(page=page, quotes=quotes, ranks=ranks, run=run)
        return run

    return add


def run_fragments(run, blocks, folder):
    os.chdir(folder)
    torch.manual_seed(0)
    page = Page(blocks)
    run(page)
    return page.done


QUIET = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip
VOCABULARY = 64


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))


def loader_of_tokens(num_samples, batch_size):
    tokens = torch.randint(VOCABULARY, (num_samples, 8), generator=torch.Generator().manual_seed(0))
    samples = [{"input_ids": each, "labels": each} for each in tokens]
    return torch.utils.data.DataLoader(samples, batch_size=batch_size)


def language_module(base=None, optimizer=torch.optim.AdamW, epochs=1):
    """A LightningModule that learns tokens and stops its Trainer, whose own limit is a page's, after some epochs."""
    import lightning as L

    class LanguageModule(base or L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = tiny_llama()
            self.losses = []

        def training_step(self, batch, batch_idx):
            loss = self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
            self.losses.append(loss.item())
            return loss

        def on_train_epoch_end(self):
            self.trainer.should_stop = self.trainer.should_stop or self.current_epoch + 1 >= epochs

        def configure_optimizers(self):
            return optimizer(self.parameters(), lr=1e-3)

    return LanguageModule()


def write_token_file(path, num_tokens):
    import numpy as np

    from hyperpod_plugins.data import build_tokens

    tokens = np.random.default_rng(0).integers(0, VOCABULARY, num_tokens, dtype=np.uint8)
    build_tokens(path, lambda: [tokens], vocab_size=VOCABULARY)


@fragments("docs/design/delayed-init.md", "with delayed_init():")
def delayed(page):
    import torch.distributed as dist

    from hyperpod_plugins.delayed_init import delayed_init
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

    torch.manual_seed(7)
    eager = tiny_llama().state_dict()
    dist.init_process_group("hyperpod")
    config = ParallelConfig()
    mesh = build_mesh(config.topology(1), "cpu")
    torch.manual_seed(7)
    page.run(
        "with delayed_init():",
        build=tiny_llama,
        delayed_init=delayed_init,
        parallelize=parallelize,
        mesh=mesh,
        config=config,
    )
    sharded = page["model"].state_dict()
    for name, value in eager.items():
        assert torch.equal(sharded[name].full_tensor(), value), name


@fragments("docs/quickstart.md", "hang_timeout_s=5")
def quickstart(page):
    page.run("hang_timeout_s=5")
    assert page["recovery"].options.hang_timeout_s == 5


@fragments("docs/guides/elastic-policies.md", '"replicaIncrementStep": 2')
def policies(page):
    page.run('"replicaIncrementStep": 2')


@fragments("docs/guides/elastic-stores.md", "shard_degrees=(16, 8, 4)")
def stores(page):
    page.run("shard_degrees=(16, 8, 4)")


RECOVERY = ("CheckpointlessRecovery(hang_timeout_s=60)", "class MyModule", '"kill:rank=3', "random_faults(seed=1")


@fragments("docs/guides/recovery.md", *RECOVERY, ranks=2)
def recovery(page):
    import lightning as L

    from hyperpod_plugins.lightning import HyperPodStrategy

    first, module, *faults = RECOVERY
    page.run(first, L=L)
    page.run(module)
    for each in faults:
        page.run(each)

    class Scale:
        def state_dict(self):
            return {"value": 3.0}

        def load_state_dict(self, state):
            assert state == {"value": 3.0}

    page["MyModule"].scale = Scale()
    trainer = L.Trainer(devices=2, strategy=HyperPodStrategy(hybrid_shard_degree=2), **QUIET)
    fitted = language_module(page["MyModule"])
    trainer.fit(fitted, loader_of_tokens(8, 2))
    assert len(fitted.losses) == 2
    trainer.save_checkpoint("last.ckpt")


@fragments("docs/guides/memory.md", "llama_8b = LlamaConfig")
def planning(page):
    page.run("llama_8b = LlamaConfig", replaced={"num_hidden_layers=32": "num_hidden_layers=2"})
    assert page["config"].sm_activation_offloading


def losses_with_and_without(strategy):
    """Losses of a fit with a page's strategy, and with one that only shards."""
    import lightning as L

    from hyperpod_plugins.lightning import HyperPodStrategy

    losses = []
    for each in (strategy, HyperPodStrategy(hybrid_shard_degree=2)):
        torch.manual_seed(0)
        fitted = language_module()
        L.Trainer(devices=2, strategy=each, **QUIET).fit(fitted, loader_of_tokens(8, 2))
        losses.append(fitted.losses)
    return losses


@fragments("docs/guides/memory.md", "activation_offload=True,  # keep", ranks=2)
def memory(page):
    page.run("activation_offload=True,  # keep", replaced={"hybrid_shard_degree=4": "hybrid_shard_degree=2"})
    losses = losses_with_and_without(page["strategy"])
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@fragments("docs/guides/memory.md", "optimizer_offload=True)", ranks=2)
def host_memory(page):
    page.run("optimizer_offload=True)", replaced={"hybrid_shard_degree=8": "hybrid_shard_degree=2"})
    losses = losses_with_and_without(page["strategy"])
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]


@fragments("docs/guides/memory.md", "model.resize_token_embeddings")
def loading(page):
    from hyperpod_plugins.delayed_init import materialize

    tiny_llama().save_pretrained("pretrained")
    page.run("model.resize_token_embeddings", replaced={"40_000": str(VOCABULARY + 3)})
    model = page["build"]("pretrained")
    assert all(each.is_meta and each.dtype is torch.bfloat16 for each in model.parameters())
    materialize(model)
    assert model.get_input_embeddings().weight.shape[0] == VOCABULARY + 3


@fragments("docs/guides/float8.md", 'float8_recipe="rowwise"', "import Float8Precision", ranks=2)
def float8(page):
    losses = []
    for quote, end in (('float8_recipe="rowwise"', '"bf16-mixed")'), ("import Float8Precision", '"bf16-mixed")])')):
        page.run(quote, QUIET=QUIET, replaced={end: f"{end[:-1]}, devices=2, **QUIET)"})
        torch.manual_seed(0)
        fitted = language_module()
        page["trainer"].fit(fitted, loader_of_tokens(8, 2))
        assert "Float8Linear" in {type(each).__name__ for each in fitted.modules()}
        losses.append(fitted.losses)
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]


COLLECTIVES = ('init_process_group("hyperpod")', "strict=True", "reset_traffic()")


@fragments("docs/guides/collectives.md", *COLLECTIVES)
def collectives(page):
    import torch.distributed as dist

    from hyperpod_plugins.errors import BackendUnavailable
    from hyperpod_plugins.lightning import HyperPodStrategy

    first, choice, counting = COLLECTIVES
    page.run(first, torch=torch)
    assert dist.get_backend() == "hyperpod"
    dist.destroy_process_group()
    page.names.update(init_process_group=dist.init_process_group, HyperPodStrategy=HyperPodStrategy)
    imports, falls_back, raises, strategy = page.statements(choice)
    imports()
    falls_back()
    page.run(counting, step=lambda: dist.all_reduce(torch.ones(3)))
    assert page["traffic"]()["world"].calls == {"all_reduce": 1}
    dist.destroy_process_group()
    with pytest.raises(BackendUnavailable):
        raises()
    strategy()


LIGHTNING = ('L.Trainer(strategy="hyperpod", devices=4)', 'precision="bf16-mixed"', "delayed_init()", "fully_shard(")


@fragments("docs/guides/lightning.md", *LIGHTNING)
def lightning(page):
    import lightning as L

    from hyperpod_plugins.lightning import HyperPodStrategy

    name, degrees, large, sharded = LIGHTNING
    page.run(name)
    assert isinstance(page["trainer"].strategy, HyperPodStrategy)
    page.run(degrees)
    page.run(large)
    module = page["MyModule"]()
    module.configure_model()
    assert sum(parameter.numel() for parameter in module.parameters()) > 6e9
    page.run(sharded)
    fitted = language_module(page["MyModule"])
    L.Trainer(devices=1, strategy=HyperPodStrategy(), **QUIET).fit(fitted, loader_of_tokens(4, 2))
    assert len(fitted.losses) == 2
    assert isinstance(fitted.model, torch.distributed.fsdp.FSDPModule)


BATCH = ("warmup_samples=50_000", "reproducible=True")


@fragments("docs/guides/elastic-batch.md", *BATCH)
def elastic_batch(page):
    for each in BATCH:
        page.run(each)


class Letters:
    """A tokenizer."""

    def __len__(self):
        return VOCABULARY

    def encode(self, text):
        return [ord(letter) - 32 for letter in text]


PLANNED = "make_plan(scenario"


@fragments("docs/guides/planning.md", PLANNED)
def planned_jobs(page):
    page.run(PLANNED)
    assert [each.policy.name for each in page["plan"].policies][-1] == page["standby"].name == "standby"
    assert 1 < page["runs"].time_ratio.mean < page["plan"].policies[0].runs.time_ratio.mean


@fragments("docs/guides/reports.md", "GoodputMonitor(every_num_steps=50)", "serve_prometheus(0, rank=0)")
def reports(page):
    page.run("GoodputMonitor(every_num_steps=50)")
    assert [type(each).__name__ for each in page["trainer"].callbacks if "Goodput" in type(each).__name__]
    page.run("serve_prometheus(0, rank=0)")
    assert page["figures"] == {}  # no ledger is open
    assert page["port"] > 0


@fragments("docs/tour.md", "GoodputMonitor()")
def tour(page):
    page.run("GoodputMonitor()")
    assert page["trainer"].strategy.config.hybrid_shard_degree == 2


@fragments("docs/reference/report.md", "report.headline.goodput")
def report(page):
    page.run("report.headline.goodput")
    assert not page["folder"].exists()


DATA = ("def source():", "data[0]", "ckpt_path=...", "data_world_size=8", "BatchCacheConfig(")


@fragments("docs/guides/data.md", *DATA)
def data(page):
    import lightning as L

    from hyperpod_plugins.data import (
        BatchCache,
        BatchCacheConfig,
        BatchSplit,
        ElasticSampler,
        StatefulLoader,
        TokenDataset,
    )

    source, dataset, module, loader, cache = DATA
    page.run(source, documents=["ALL WORK AND NO PLAY" * 100] * 90, tokenizer=Letters())
    page.run(dataset, TokenDataset=TokenDataset)
    tokens = page["data"]
    assert [tokens[0][name].shape for name in ("input_ids", "labels")] == [(1024,), (1024,)]
    write_token_file("train.bin", 64 * 1024 + 1)
    write_token_file("val.bin", 8 * 1024 + 1)
    trainer = L.Trainer(devices=1, strategy="hyperpod", accumulate_grad_batches=16, **QUIET)
    model = language_module()
    page.run(module, replaced={"ckpt_path=...": "ckpt_path=None"}, trainer=trainer, model=model)
    assert (len(model.losses), trainer.global_step) == (16, 1)
    fresh = ElasticSampler(
        len(tokens), BatchSplit(global_batch_size=64, micro_batch_size=4, data_world_size=8), data_rank=0, seed=0,
        fingerprint=tokens.fingerprint,
    )  # fmt: skip
    names = {"BatchSplit": BatchSplit, "ElasticSampler": ElasticSampler, "StatefulLoader": StatefulLoader}
    names |= {"data": tokens, "rank": 0, "state": StatefulLoader(tokens, fresh).state_dict()}
    page.run(loader, replaced={"num_workers=2": "num_workers=0"}, **names)  # a rank of the harness may have no children
    assert page["batch"]["input_ids"].shape == (4, 1024)
    sizes = "size_bytes=4 << 30, max_batch_bytes=64 << 20"  # in /dev/shm, if the page had its way
    small = {sizes: "size_bytes=16 << 20, max_batch_bytes=1 << 20, folder=folder"}
    page.run(
        cache,
        replaced=small,
        BatchCache=BatchCache,
        BatchCacheConfig=BatchCacheConfig,
        dataset=tokens,
        folder=Path.cwd(),
    )
    assert len(list(page["loader"])) == 4  # 2 steps of 8 samples


PARALLELISM = "config = ParallelConfig(hybrid_shard_degree=2, tensor_parallel_degree=2)"


PROPOSED_PLAN = "propose_tensor_plan(model"
CONTEXTS = "uses_sequence_context = True"


SHARDED_AT_LOAD = "distributed_config=degrees"


@fragments("docs/guides/parallelism.md", SHARDED_AT_LOAD, ranks=4)
def sharded_at_load(page):
    os.mkdir(os.environ["RANK"])  # all ranks begin in the same folder
    os.chdir(os.environ["RANK"])
    tiny_llama().save_pretrained("model")
    page.run(SHARDED_AT_LOAD)
    (batch,) = loader_of_tokens(4, 4)
    page["model"](**batch).loss.backward()
    assert page["model"].lm_head.weight.grad.device_mesh.shape == (2, 1, 2)


@fragments("docs/guides/parallelism.md", PARALLELISM, PROPOSED_PLAN, CONTEXTS, ranks=4)
def parallelism(page):
    page.run(PARALLELISM, model=tiny_llama())
    (batch,) = loader_of_tokens(4, 4)
    page["model"](**batch).loss.backward()
    page["optimizer"].step()
    page.run(PROPOSED_PLAN)
    assert page["proposal"].plan == {"0": "colwise", "2": "rowwise"}
    page.run(CONTEXTS)
    config = page["ParallelConfig"](context_parallel_degree=2)
    model, tokens = page["Model"](), page["tokens"]
    wanted = model(tokens[:, :-1], tokens[:, 1:])
    page["parallelize"](model, page["build_mesh"](config.topology(4), "cpu"), config)
    torch.testing.assert_close(model(tokens[:, :-1], tokens[:, 1:]), wanted)


EXPERTS = "holds_experts = True"
BALANCED = 'method="sinkhorn"'


@fragments("docs/guides/experts.md", "expert_parallel_degree=4)", BALANCED, EXPERTS, ranks=2)
def experts(page):
    from torch.distributed import init_process_group
    from transformers import MixtralConfig

    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

    init_process_group("hyperpod")
    page.run("expert_parallel_degree=4)")
    assert page["strategy"].config.expert_parallel_degree == 4
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    page.run(BALANCED, config=MixtralConfig(vocab_size=VOCABULARY, num_hidden_layers=1, **sizes))
    rows = torch.arange(8).view(2, 4)
    assert page["model"](input_ids=rows, labels=rows).loss != page["model"].eval()(input_ids=rows, labels=rows).loss
    page.run(EXPERTS)
    config, model, tokens = ParallelConfig(expert_parallel_degree=2), page["model"], torch.randn(12, 16)
    wanted = model(tokens)
    page["load"].values()
    parallelize(model, build_mesh(config.topology(2), "cpu"), config)
    torch.testing.assert_close(model(tokens), wanted)
    values = page["load"].values()
    assert values["router/min_load"] <= 1 <= values["router/max_load"]


ACCELERATOR = "accelerator.accumulate(model)"


def accelerated_names(num_samples, batch_size):
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    loader = loader_of_tokens(num_samples, batch_size)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}


@fragments("docs/guides/accelerate.md", ACCELERATOR, ranks=2)
def accelerator(page):
    smaller = {"hybrid_shard_degree=4, tensor_parallel_degree=2": "hybrid_shard_degree=1, tensor_parallel_degree=2"}
    page.run(ACCELERATOR, replaced=smaller, **accelerated_names(16, 2))  # 8 batches
    assert page["scheduler"].get_last_lr() == [1e-3 / 4]  # two steps


FROM_ENVIRON = "HyperPodPlugin.from_environ()"
BESIDE_A_PRESET = "HyperPodPlugin.from_environ(loss_chunks=16, mlp_tiles=4)"


@fragments("docs/guides/accelerate.md", FROM_ENVIRON, BESIDE_A_PRESET)
def accelerator_from_environ(page):
    from hyperpod_plugins.accelerate import HyperPodAccelerator, HyperPodPlugin

    page.run(BESIDE_A_PRESET)
    assert (page["plugin"].config.loss_chunks, page["plugin"].config.mlp_tiles) == (16, 4)
    page.run(FROM_ENVIRON, HyperPodPlugin=HyperPodPlugin)
    assert isinstance(page["accelerator"], HyperPodAccelerator)


ACCELERATED_SESSION = "backward=accelerator.backward"


@fragments("docs/guides/accelerate.md", ACCELERATED_SESSION, ranks=2)
def accelerated_session(page):
    page.run(ACCELERATED_SESSION, **accelerated_names(128, 16))
    assert page["step"].index == 5


ELASTIC_TRAINER = "configure(elastic=ElasticPolicy(max_replicas=8)"


@fragments("docs/guides/trainer.md", ELASTIC_TRAINER, ranks=2)
def elastic_trainer(page):
    page.run(ELASTIC_TRAINER)
    assert page["args"].world_size == 2


MIXED_IN = "class MyTrainer(HyperPodTrainerMixin, Seq2SeqTrainer)"


@fragments("docs/guides/trainer.md", MIXED_IN)
def trainer_with_the_mixin(page):
    page.run(MIXED_IN)
    assert page["MyTrainer"].save_model is page["HyperPodTrainerMixin"].save_model


ELASTIC_SESSION = "global_batch_size=64, elastic=ElasticPolicy(max_replicas=8)"


@fragments("docs/guides/loops.md", ELASTIC_SESSION, ranks=2)
def elastic_session(page):
    page.run(ELASTIC_SESSION)
    assert page["session"].world_size == 2


FOLLOWING_SESSION = 'scaling="linear", reference_batch_size=64'


@fragments("docs/guides/loops.md", FOLLOWING_SESSION, ranks=2)
def session_whose_batch_follows_the_world(page):
    page.run(FOLLOWING_SESSION)
    assert page["session"].world_size == 2


REPRODUCIBLE_SESSION = "reproducible=True, elastic=ElasticPolicy(max_replicas=4"


@fragments("docs/guides/loops.md", REPRODUCIBLE_SESSION, ranks=2)
def reproducible_session(page):
    page.run(REPRODUCIBLE_SESSION)
    assert page["session"].world_size == 2


CHECKPOINTS = (
    "background_checkpoints=True",
    "hyperpod://",
    "export_safetensors",
    "CheckpointWriter()",
    "save_distributed_checkpoint=False",
)


@fragments("docs/guides/checkpoints.md", *CHECKPOINTS)
def checkpoints(page):
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint
    from transformers import LlamaForCausalLM

    from hyperpod_plugins.lightning import HyperPodStrategy, TokenDataConfig, TokenDataModule

    write_token_file("train.tokens", 8 * 16 + 1)
    sizes = TokenDataConfig(sequence_length=8, global_batch_size=8, micro_batch_size=8)
    tokens = TokenDataModule("train.tokens", config=sizes)
    trainer = L.Trainer(devices=1, strategy="hyperpod", **QUIET)
    trainer.fit(language_module(), datamodule=tokens)
    trainer.save_checkpoint("checkpoints/last.ckpt")
    trained, opened, exported, written, as_file = CHECKPOINTS
    module = language_module()
    names = {"L": L, "HyperPodStrategy": HyperPodStrategy, "ModelCheckpoint": ModelCheckpoint}
    page.run(trained, **names, module=module, data=tokens)
    assert page["trainer"].global_step == 4
    page.run(exported, LlamaForCausalLM=LlamaForCausalLM)
    (optimizer,) = page["trainer"].optimizers
    page.run(written, model=module.model, optimizer=optimizer)
    assert page["extra"]["step"] == 100
    page.run(opened, Module=type(module), loader=loader_of_tokens(8, 2))
    assert page["trainer"].global_step > 4
    page.run(as_file, module=language_module())
    assert Path("checkpoints", "best.ckpt").is_file()


@pytest.mark.spawns
@pytest.mark.parametrize("name", FRAGMENTS)
def test_fragments(name, tmp_path):
    of_page = FRAGMENTS[name]
    blocks = {quote: one_block(of_page.page, quote) for quote in of_page.quotes}
    results = run_ranks(run_fragments, of_page.run, blocks, tmp_path, world_size=of_page.ranks)
    assert results == [set(of_page.quotes)] * of_page.ranks
