"""Every block of Python in README.md and docs/ runs; every command in them is understood by the program it names.

A block is a whole program (`PROGRAMS`) or a fragment of `test_docs_fragments.py`. Both quote the block. A block that
neither quotes fails a test, and so does a quote of no block.
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

import pytest
from docs_blocks import BLOCKS, LANGUAGES, PAGES, ROOT, one_block, only, substituted
from recovery.faults import run_job
from test_docs_fragments import FRAGMENTS

from hyperpod_plugins import cli
from hyperpod_plugins.elastic.launcher import main as hyperpodrun
from hyperpod_plugins.presets import preset_names

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
        rest=f"""
import sys
import torch
from hyperpod_plugins.lightning import HyperPodStrategy, TokenDataConfig, TokenDataModule
sys.path.append({str(ROOT / "tests")!r})
from test_docs_fragments import QUIET, language_module, write_token_file

write_token_file("train.tokens", 8 * 128 * 10)
trainer = L.Trainer(
    strategy=HyperPodStrategy(hybrid_shard_degree=1), callbacks=[elastic, StopAtEndOfSchedule(elastic, 5)], **QUIET
)
torch.manual_seed(0)  # the gains of three steps may all be exactly 2 otherwise
module = language_module(optimizer=torch.optim.SGD, epochs=9)
trainer.fit(module, datamodule=TokenDataModule("train.tokens", config=TokenDataConfig(sequence_length=8)))
print("ended at", elastic.schedule_step, "after", trainer.global_step, flush=True)
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
        pages=("docs/guides/trainer.md",),
        quotes=("trainer = HyperPodTrainer(",),
        launcher_options=OF_LOOPS,
        replaced={"per_device_train_batch_size=4": "per_device_train_batch_size=4, disable_tqdm=True"},
        says="'train_loss': ",
        leaves="out/checkpoint-8/model.safetensors",
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
    if program.launcher_options is None:
        environ = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(script), *program.arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240)
        code, output = done.returncode, done.stdout + done.stderr
    else:
        job = run_job(
            script,
            tmp_path / "job",
            num_ranks=program.ranks,
            args=program.launcher_options,
            cwd=tmp_path,
            timeout_s=240,
        )
        code, output = job.code, job.output
    assert code == 0, output[-8000:]
    assert re.search(program.says, output), output[-8000:]
    assert (tmp_path / program.leaves).exists()
