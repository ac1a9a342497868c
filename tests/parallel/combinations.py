"""Each pair of techniques for large models: trained and compared with one process, or refused.

    python tests/parallel/combinations.py --write      # takes some minutes; writes docs/guides/combinations.md

Four steps of a small Llama, or of a small Mixtral where experts are divided, on four CPU ranks with each pair. In
float32 the first loss and all its gradients equal those of one process to 1e-6; with bfloat16 and emulated float8,
losses of all steps to a few percent. `test_combinations.py` runs a part, and compares the page with the refusals.
"""

import argparse
import itertools
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

TECHNIQUES = {
    "2 replicas of 2 shards": {"hybrid_shard_degree": 2},
    "tensor parallel": {"tensor_parallel_degree": 2},
    "sequence parallel": {"tensor_parallel_degree": 2, "sequence_parallel": True},
    "context parallel": {"context_parallel_degree": 2},
    "expert parallel": {"expert_parallel_degree": 2},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "float8": {"precision": "bf16-mixed", "float8_recipe": "tensorwise", "float8_all_gather": True},
    "recomputation": {"activation_checkpointing": "full"},
    "selective recomputation": {"activation_checkpointing": "selective"},
    "activation offload": {"sm_activation_offloading": True},
    "chunked loss": {"loss_chunks": 3},
    "tiled MLPs": {"mlp_tiles": 3},
    "parameters on the host": {"param_offload": True},
    "optimizer on the host": {"optimizer_offload": True},
}
WORLD_SIZE, LIMIT, LOOSE, REFUSED = 4, 1e-6, 0.03, "refused: "
PAGE = Path(__file__).parents[2] / "docs/guides/combinations.md"
PART = [
    ("context parallel", "expert parallel"),
    ("context parallel", "activation offload"),
    ("expert parallel", "chunked loss"),
    ("tensor parallel", "tiled MLPs"),
    ("sequence parallel", "float8"),
    ("float8", "activation offload"),
    ("tiled MLPs", "parameters on the host"),
]
"""Run in the suite."""


def options_of(pair):
    """Options of two techniques; None if both set one option to different values."""
    one, other = (TECHNIQUES[name] for name in pair)
    return None if any(one[key] != other[key] for key in one.keys() & other.keys()) else one | other


def pairs():
    """All pairs that are no contradiction."""
    return [pair for pair in itertools.combinations(TECHNIQUES, 2) if options_of(pair) is not None]


def refusal(pair):
    """Why a configuration refuses a pair; empty if it does not."""
    from hyperpod_plugins.errors import ConfigError
    from hyperpod_plugins.parallel import ParallelConfig

    try:
        ParallelConfig.of(options_of(pair))
    except ConfigError as error:
        return str(error)
    return ""


def model_of(pair):
    """A new model, the same each time."""
    import torch
    from parallel.equal_training import VOCABULARY
    from parallel.expert_models import SIZES, make_model
    from transformers import LlamaConfig, LlamaForCausalLM

    if "expert parallel" in pair:
        return make_model("mixtral")
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(SIZES | {"vocab_size": VOCABULARY + VOCABULARY % 2})))


def train_pairs(given):
    """On each rank: what came of each pair."""
    import torch.distributed as dist
    from parallel.equal_training import train_alone, train_on_mesh

    from hyperpod_plugins.errors import ConfigError

    dist.init_process_group("hyperpod")
    alone = {name: train_alone(model_of(name)) for name in ((), ("expert parallel",))}
    told = {}
    for pair in given:
        wanted = alone[("expert parallel",) if "expert parallel" in pair else ()]
        try:
            options = {"precision": "32-true"} | options_of(pair)
            told[pair] = differences(train_on_mesh(model_of(pair), options, options["precision"]), wanted, pair)
        except ConfigError as error:
            told[pair] = REFUSED + str(error)
        except Exception as error:
            told[pair] = f"{type(error).__name__}: {error}"
    return told


def differences(found, wanted, pair):
    """What differs from one process, in words; `ok` if nothing does."""
    (losses, _, gradients, _), (wanted_losses, _, wanted_gradients, _) = found, wanted
    if {"bf16-mixed", "float8"} & {*pair}:
        far = max(abs(float(one) / float(other) - 1) for one, other in zip(losses, wanted_losses, strict=True))
        return "ok" if far < LOOSE else f"losses differ by {far:.3f}"
    far = abs(float(losses[0]) / float(wanted_losses[0]) - 1)
    if far > LIMIT:
        return f"the first loss differs by {far:.1e}"
    errors = {name: float((gradients[name] - each).norm() / each.norm()) for name, each in wanted_gradients.items()}
    name = max(errors, key=lambda name: errors[name])
    return "ok" if errors[name] <= LIMIT else f"the gradient of {name} differs by {errors[name]:.1e}"


def page(outcomes):
    """The text of the page."""
    names, reasons, rows = list(TECHNIQUES), [], []
    for number, name in enumerate(names):
        cells = []
        for other in names[:number]:
            outcome = outcomes.get((other, name))
            if outcome is None:
                cells.append("")
            elif outcome == "ok":
                cells.append("yes")
            else:
                if outcome not in reasons:
                    reasons.append(outcome)
                cells.append(f"no ({reasons.index(outcome) + 1})")
        rows.append(f"| **{name}** | " + " | ".join([*cells, *[""] * (len(names) - number)]) + " |")
    lines = [
        "# Combinations",
        "",
        "Which techniques for large models go together. `yes`: four steps on four CPU ranks were compared with one "
        "process. In float32 the first loss and all its gradients are equal to 1e-6 relative; in bfloat16 and float8, "
        "which is emulated on a CPU, losses are within 3 %. `no`: refused by name before the first step, with the "
        "message below. An empty cell means that one contains the other.",
        "",
        "Written by `python tests/parallel/combinations.py --write`; that file has the options of each technique. The "
        "model is a small Llama, or a small Mixtral with expert parallelism.",
        "",
        "| | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
        *rows,
        "",
        "## Why not",
        "",
        *(f"{number}. {plain(reason)}" for number, reason in enumerate(reasons, 1)),
        "",
        "More pairs, which other tests cover: recovery and elastic jobs with each technique "
        "([status](../status.md)); what float8 of Transformer Engine excludes ([float8](float8.md)); what "
        "[experts](experts.md) and [contexts](parallelism.md#context-parallelism) exclude in a model.",
        "",
    ]
    return "\n".join(lines)


def plain(reason):
    """A message as a line of Markdown."""
    text = " ".join(reason.removeprefix(REFUSED).split())
    return text.replace("<", "&lt;")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the page")
    asked = parser.parse_args()
    from harness import run_ranks

    outcomes = run_ranks(train_pairs, pairs(), world_size=WORLD_SIZE, timeout_s=900)[0]
    failed = {pair: told for pair, told in outcomes.items() if told != "ok" and not told.startswith(REFUSED)}
    for pair, told in outcomes.items():
        print(f"{' + '.join(pair):50} {told[:200]}")
    print(f"{len(outcomes)} pairs, {len(failed)} failed")
    if asked.write and not failed:
        PAGE.write_text(page(outcomes))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
