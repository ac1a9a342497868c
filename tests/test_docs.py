"""Every block of Python in README.md and docs/ runs; every command in them is understood by the program it names.

A block is a whole program (`PROGRAMS`) or a fragment, which a function marked with `fragments` runs among the names
that its page leaves out. Both quote the block. A block that neither quotes fails a test, and so does a quote of no
block.
"""

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from recovery.faults import run_job

from hyperpod_plugins import cli
from hyperpod_plugins.elastic.launcher import main as hyperpodrun
from hyperpod_plugins.presets import preset_names

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "console", "diff", "text", "yaml", ""}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    """Of the fence that opens it."""
    language: str
    text: str

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks_of(page, text):
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[2], textwrap.dedent(found[3]))
        for found in FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page, (ROOT / page).read_text())]


def only(language):
    found = [block for block in BLOCKS if block.language == language]
    return pytest.mark.parametrize("block", found, ids=map(str, found))


def one_block(page, quote):
    found = [block for block in BLOCKS if block.language == "python" and block.page == page and quote in block.text]
    assert len(found) == 1, f"{len(found)} blocks of Python in {page} have {quote!r}"
    return found[0]


def substituted(text, replaced):
    for old, new in replaced.items():
        assert text.count(old) == 1, f"not once in the block: {old!r}"
        text = text.replace(old, new)
    return text


# -- what a test can read ---------------------------------------------------------------------------------------------


def test_every_fence_is_read():
    for page in PAGES:
        fences = re.findall(r"^ *```.*$", (ROOT / page).read_text(), re.MULTILINE)
        assert len(fences) == 2 * sum(block.page == page for block in BLOCKS), f"an unusual fence in {page}: {fences}"
    assert {block.language for block in BLOCKS} == LANGUAGES


def test_every_block_of_python_is_run_once():
    quoted = [(page, quote) for program in PROGRAMS for page in program.pages for quote in program.quotes]
    quoted += [(fragments.page, quote) for fragments in FRAGMENTS.values() for quote in fragments.quotes]
    run = [str(one_block(page, quote)) for page, quote in quoted]
    assert sorted(run) == sorted(str(block) for block in BLOCKS if block.language == "python")


def check_imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name != "torch.sagemaker":  # there is none before `hyperpod_plugins.smp.install()`
                    importlib.import_module(alias.name)
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")


@only("python")
def test_python_compiles_and_imports_what_exists(block):
    check_imports(compile(block.text, str(block), "exec", ast.PyCF_ONLY_AST))


@only("diff")
def test_changes_lead_to_what_exists(block):
    lines = [line[1:] for line in block.text.splitlines() if not line.startswith("-")]
    text = textwrap.dedent("\n".join(lines))
    if text.startswith("hyperpodrun "):
        check_command(text)
    else:
        check_imports(compile(text, str(block), "exec", ast.PyCF_ONLY_AST))


# -- commands ---------------------------------------------------------------------------------------------------------

OTHERS = {"git", "cd", "kill", "pgrep", "python3", "."}
"""Commands of the system, in which nothing of ours can be wrong."""


def commands_of(text):
    """The command lines of a block, without comments; those within `$(...)` come first, and leave a word."""
    for line in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"(^|\s)#.*", "", line)
        while inner := re.search(r"\$\(([^()]*)\)", line):
            yield inner[1]
            line = line.replace(inner[0], "SUBSTITUTED")
        yield from line.split(" && ")


@only("console")
def test_commands_are_understood(block):
    for command in commands_of(block.text):
        check_command(command)


def check_command(command):
    words = shlex.split(command)
    while words and re.match(r"\w+=", words[0]):
        words.pop(0)
    if not words:
        return
    name, *arguments = words
    if name not in OTHERS:
        COMMANDS[name](arguments)


def check_hyperpod(arguments):
    parsed = cli.get_parser().parse_args(arguments)
    if parsed.command == "preset":
        named = parsed.name if parsed.what in ("show", "write") else parsed.what
        assert named in {*preset_names(), "list"}
    if parsed.command == "rehearse":
        assert parsed.program


def check_hyperpodrun(arguments):
    parsed = hyperpodrun.get_parser().parse_args(arguments)
    hyperpodrun.check_arguments(parsed)
    check_program(parsed.training_script)


def check_torchrun(arguments):
    from torch.distributed.run import get_args_parser

    check_program(get_args_parser().parse_args(arguments).training_script)


def check_accelerate(arguments):
    from accelerate.commands.launch import launch_command_parser

    assert arguments[0] == "launch"
    check_program(launch_command_parser().parse_args(arguments[1:]).training_script)


def check_program(program):
    """A path is one of the repository; a bare name is the reader's own program."""
    assert program.endswith(".py")
    assert "/" not in program or (ROOT / program).is_file()


def check_python(arguments):
    program, *options = arguments
    check_program(program)
    for each in options:
        assert f'"{each}"' in (ROOT / program).read_text() if each.startswith("-") else (ROOT / each).is_file(), each


def check_files(arguments):
    assert [each for each in arguments if each.startswith("examples/") and (ROOT / each).is_file()]


def check_make(arguments):
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(arguments) <= set(targets)


def check_pip(arguments):
    (extras,) = [re.fullmatch(r"\.\[(.*)\]", each)[1] for each in arguments if each.startswith(".")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "hyperpod": check_hyperpod,
    "hyperpodrun": check_hyperpodrun,
    "torchrun": check_torchrun,
    "accelerate": check_accelerate,
    "python": check_python,
    "sbatch": check_files,
    "kubectl": check_files,
    "make": check_make,
    "pip": check_pip,
}


# -- whole programs ---------------------------------------------------------------------------------------------------


WITH_LIGHTNING = ("--preload", "default")
OF_LOOPS = ("--preload", "torch,torch._dynamo,torch.distributed.fsdp")


@dataclass(frozen=True, kw_only=True)
class Program:
    """A block that is a program by itself, or several that are one together, run as their page says."""

    pages: tuple[str, ...]
    """All that show it."""
    quotes: tuple[str, ...]
    ranks: int = 2
    launcher_options: tuple[str, ...] | None = WITH_LIGHTNING
    """Of `hyperpodrun`; None for a program that starts its ranks itself."""
    replaced: dict[str, str] = field(default_factory=dict)
    """To be done sooner."""
    rest: str = ""
    """What the page leaves out, at the end of the program."""
    arguments: tuple[str, ...] = ()
    says: str = ""
    """What the output has, if the program did what it is for."""
    leaves: str = "train.py"
    """A file or folder that it writes."""

    def __str__(self):
        return str(one_block(self.pages[0], self.quotes[0]))


PROGRAMS = [
    Program(
        pages=("README.md", "docs/index.md", "docs/quickstart.md"),
        quotes=("class Classifier",),
        ranks=4,
        replaced={"50_000": "2_000"},
        says=r"step 100: loss \d",
    ),
    Program(
        pages=("docs/quickstart.md",),
        quotes=("class Bytes",),
        replaced={"2_000_000": "25_000"},
        says="step 100 on 2 ranks",
    ),
    Program(
        pages=("docs/guides/elastic.md",),
        quotes=("class Bytes",),
        replaced={"1_000_000": "20_000", "logger=False": "logger=False, max_epochs=2, enable_progress_bar=False"},
        says="`Trainer.fit` stopped: `max_epochs=2` reached",
    ),
    Program(
        pages=("docs/guides/elastic-batch.md",),
        quotes=('lr_scaling="adascale"', "class StopAtEndOfSchedule"),
        rest="""
import torch
from hyperpod_plugins.lightning import HyperPodStrategy, TokenDataConfig, TokenDataModule
from test_docs import QUIET, language_module, write_token_file

write_token_file("train.tokens", 8 * 128 * 10)
trainer = L.Trainer(
    strategy=HyperPodStrategy(hybrid_shard_degree=1), callbacks=[elastic, StopAtEndOfSchedule(elastic, 5)], **QUIET
)
torch.manual_seed(0)  # the gains of three steps may all be exactly 2 otherwise
module = language_module(optimizer=torch.optim.SGD, epochs=9)
trainer.fit(module, datamodule=TokenDataModule("train.tokens", config=TokenDataConfig(sequence_length=8)))
print(f"ended at {elastic.schedule_step} after {trainer.global_step}", flush=True)
""",
        says="ended at 5 after [345]",
    ),
    Program(
        pages=("docs/quickstart.md",),
        quotes=("model = session.parallelize(",),
        ranks=4,
        launcher_options=OF_LOOPS,
        replaced={"50_000": "1_000"},
        says=r"step 50: loss \d",
    ),
    Program(
        pages=("docs/quickstart.md",),
        quotes=("plugin.accelerator(session=session)",),
        launcher_options=OF_LOOPS,
        replaced={"50_000": "1_000"},
        says=r"step 50: loss \d",
    ),
    Program(
        pages=("docs/guides/loops.md",),
        quotes=("for step in session.steps(loader, epochs=3)",),
        launcher_options=OF_LOOPS,
        replaced={"10_000, 64": "500, 64"},
        leaves="last",
    ),
    Program(
        pages=("docs/guides/loops.md",),
        quotes=("losses = step.run(train_both)",),
        launcher_options=OF_LOOPS,
        replaced={"10_000, 32": "200, 32"},
        rest="\nprint(f'ended with {float(losses[\"generator\"])}', flush=True)",
        says=r"ended with \d\.",
    ),
    Program(
        pages=("docs/guides/elastic.md",),
        quotes=("watch_elastic_events()",),
        launcher_options=OF_LOOPS,
        replaced={
            "    optimizer.zero_grad()\n": "    optimizer.zero_grad()\n"
            "    if (step, dist.get_rank()) == (3, 1):\n"
            "        import os; os.kill(os.getpid(), 15)\n"
        },
        rest="print(f'ended after step {step}', flush=True)",
        says="ended after step [34]\n",
        leaves="last.pt",
    ),
    Program(
        pages=("docs/benchmarks.md",),
        quotes=("harness.compare(",),
        launcher_options=None,
        replaced={
            "model, optimizer = ...": "import torch; model = torch.nn.Linear(width, 1)",
            "        ... ": "        final_loss = model(torch.ones(1, model.in_features)).item()",
            "world_size=4": "world_size=2",
        },
        arguments=("--quick", "--json", "samples.json"),
        says="(?s)narrow.*wide",
        leaves="samples.json",
    ),
]


@pytest.mark.spawns
@pytest.mark.parametrize("program", PROGRAMS, ids=map(str, PROGRAMS))
def test_program(program, tmp_path):
    texts = ["\n".join(one_block(page, quote).text for quote in program.quotes) for page in program.pages]
    assert len(set(texts)) == 1, "the pages show different versions of one program"
    script = tmp_path / "train.py"
    script.write_text(substituted(texts[0], program.replaced) + program.rest)
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))}
    if program.launcher_options is None:
        command = [sys.executable, str(script), *program.arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | paths, capture_output=True, text=True, timeout=100
        )
        code, output = done.returncode, done.stdout + done.stderr
    else:
        job = run_job(
            script,
            tmp_path / "job",
            num_ranks=program.ranks,
            args=program.launcher_options,
            prefix=("env", "-C", str(tmp_path)),
            environ=paths,
        )
        code, output = job.code, job.output
    assert code == 0, output[-8000:]
    assert re.search(program.says, output), output[-8000:]
    assert (tmp_path / program.leaves).exists()


# -- fragments --------------------------------------------------------------------------------------------------------


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


@fragments("docs/guides/memory.md", "activation_offload=True,  # keep", ranks=2)
def memory(page):
    import lightning as L

    from hyperpod_plugins.lightning import HyperPodStrategy

    page.run("activation_offload=True,  # keep", replaced={"hybrid_shard_degree=4": "hybrid_shard_degree=2"})
    losses = []
    for strategy in (page["strategy"], HyperPodStrategy(hybrid_shard_degree=2)):
        torch.manual_seed(0)
        fitted = language_module()
        L.Trainer(devices=2, strategy=strategy, **QUIET).fit(fitted, loader_of_tokens(8, 2))
        losses.append(fitted.losses)
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@fragments("docs/guides/memory.md", "optimizer_offload=True)", ranks=2)
def host_memory(page):
    import lightning as L

    from hyperpod_plugins.lightning import HyperPodStrategy

    page.run("optimizer_offload=True)", replaced={"hybrid_shard_degree=8": "hybrid_shard_degree=2"})
    losses = []
    for strategy in (page["strategy"], HyperPodStrategy(hybrid_shard_degree=2)):
        torch.manual_seed(0)
        fitted = language_module()
        L.Trainer(devices=2, strategy=strategy, **QUIET).fit(fitted, loader_of_tokens(8, 2))
        losses.append(fitted.losses)
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


CHECKPOINTS = ("background_checkpoints=True", "export_safetensors", "CheckpointWriter()")


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
    trained, exported, written = CHECKPOINTS
    module = language_module()
    names = {"L": L, "HyperPodStrategy": HyperPodStrategy, "ModelCheckpoint": ModelCheckpoint}
    page.run(trained, **names, module=module, data=tokens)
    assert page["trainer"].global_step == 4
    page.run(exported, LlamaForCausalLM=LlamaForCausalLM)
    (optimizer,) = page["trainer"].optimizers
    page.run(written, model=module.model, optimizer=optimizer)
    assert page["extra"]["step"] == 100


@pytest.mark.spawns
@pytest.mark.parametrize("name", FRAGMENTS)
def test_fragments(name, tmp_path):
    of_page = FRAGMENTS[name]
    blocks = {quote: one_block(of_page.page, quote) for quote in of_page.quotes}
    results = run_ranks(run_fragments, of_page.run, blocks, tmp_path, world_size=of_page.ranks)
    assert results == [set(of_page.quotes)] * of_page.ranks
