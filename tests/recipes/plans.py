"""The plans of all recipes, which are built on the meta device, and whether they fit their devices.

python tests/recipes/plans.py      # minutes; the suite has some of them
"""

import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from hyperpod_plugins.planning import GIB

FOLDER = Path(__file__).parents[2] / "examples" / "recipes"
LIBRARIES_GIB = 8.0  # room for what a plan leaves out
SIZES = {  # parameters, as the published checkpoints have them
    "gpt_oss_120b": 116_829_156_672,
    "gpt_oss_20b": 20_914_757_184,
    "llama3_70b": 70_553_706_496,
    "llama3_70b_fp8_offload": 70_553_706_496,
    "llama3_8b": 8_030_261_248,
    "llama3_8b_full": 8_030_261_248,
    "llama3_8b_long_context": 8_030_261_248,
    "llama3_8b_lora": 8_030_261_248 + 41_943_040,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_4b_long_context": 4_022_468_096,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_8b": 8_190_735_360,
}


@cache
def plan_of(name):
    from recipe import Recipe

    return Recipe.read(FOLDER / f"{name}.yaml").plan()


def built_on_meta(recipe):
    with torch.device("meta"):
        return recipe.build()


def check(name):
    """Raise AssertionError if a rank of a recipe does not fit its device, or does not hold what it should."""
    from recipe import Recipe

    recipe = Recipe.read(FOLDER / f"{name}.yaml")
    assert all(parameter.is_meta for parameter in built_on_meta(recipe).parameters())
    plan = plan_of(name)
    print(f"\n{name}: {recipe.topology}\n  GiB of each rank: {plan}", flush=True)
    assert plan.num_parameters == SIZES[name]
    assert (plan.num_trained < plan.num_parameters) == (recipe.run == "lora")
    assert plan.device / GIB + LIBRARIES_GIB < recipe.trainer.device_memory_gib
    # 4 bytes a parameter, 4 its gradient, 8 its moments, over the ranks that share them
    ranks = recipe.topology.replica_size
    assert plan.parameters == pytest.approx(4 * plan.num_parameters / ranks, rel=1e-3)
    assert plan.gradients + plan.optimizer == pytest.approx(12 * plan.num_trained / ranks, rel=1e-3)
    # where each shard may come to exist once, two snapshots of a rank's own state and two of another's
    has_one_replica = recipe.elastic_policy.get("min_nodes", 99) * recipe.trainer.devices == ranks
    kept = 4 * (plan.parameters + 8 * plan.num_trained / ranks)
    assert plan.host_snapshots == pytest.approx(kept if has_one_replica else 0, rel=1e-3)
    assert ("snapshots" in str(plan)) == has_one_replica


if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER))
    for each in SIZES:
        check(each)
