"""`scale_config` and `uneven_batch` of HyperPod recipes: what each number of nodes trains on, as a table.

    elastic_policy: {min_nodes: 1, max_nodes: 4}
    training_config: {training_args: {train_batch_size: 128, micro_train_batch_size: 8, learning_rate: 0.0004}}
    scale_config:
      3: {training_config: {training_args: {micro_train_batch_size: 6, uneven_batch: {...}}}}

The keys that mean something are found wherever they stand, for recipes put them in different places.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from hyperpod_plugins.elastic.batch import SizeBatch, StepBatch
from hyperpod_plugins.elastic.policy_formats import recipe_at, replicas_of_nodes, uneven_batch_size
from hyperpod_plugins.errors import ConfigError, few

_BATCH = ("train_batch_size", "global_batch_size")
_MICRO = ("micro_train_batch_size", "micro_batch_size")
_AS_WRITTEN = {"global_batch_size": _BATCH[0], "micro_batch_size": _MICRO[0]}
_RATE = ("learning_rate", "lr")
_UNEVEN_BATCH = "uneven_batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What a recipe says of one number of nodes, or of all where it has no `scale_config`."""

    num_nodes: int = 0
    """0 for all."""
    global_batch_size: int = 0
    """Samples of one step; 0 where it does not say."""
    micro_batch_size: int = 0
    """Most samples of a rank in one pass; 0 where it does not say."""
    learning_rate: float = 0.0
    """0 where it does not say."""
    uneven: Mapping[str, Any] | None = None
    """The `uneven_batch` block; None where there is none, and uneven shares are allowed."""

    @property
    def is_even(self) -> bool:
        """Whether all ranks must have as many samples: the block says `use_uneven_batch: false`."""
        return self.uneven is not None and not self.uneven.get("use_uneven_batch", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleTable:
    """The batches of a recipe.

    Raises:
        ConfigError: batches that are said at some numbers of nodes only.
    """

    base: Scale
    """What holds where a scale says nothing else."""
    scales: tuple[Scale, ...] = ()
    """By number of nodes, ascending; empty without `scale_config`."""
    dropped: tuple[str, ...] = ()
    """Why others of `scale_config` cannot be had with the present ranks, one sentence each."""

    def __post_init__(self) -> None:
        """Check that every scale, or none, says its sizes."""
        for name in ("global_batch_size", "micro_batch_size"):
            silent = [each.num_nodes for each in self.scales if not getattr(each, name)]
            if 0 < len(silent) < len(self.scales):
                raise ConfigError(
                    f"scale_config says {_AS_WRITTEN[name]} for some numbers of nodes, and not for "
                    f"{few(map(str, silent))}. Say it for all, or once outside of scale_config."
                )

    @property
    def nodes(self) -> tuple[int, ...]:
        """Numbers of nodes that are in `scale_config`; empty where it leaves them to the policy."""
        return tuple(each.num_nodes for each in self.scales)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What people should know of the table, one sentence each."""
        rates = {row.learning_rate for row in self.scales} - {0.0, self.base.learning_rate}
        if not rates:
            return self.dropped
        said = (
            f"scale_config says the learning rate {', '.join(f'{rate:g}' for rate in sorted(rates))}, and elsewhere it "
            f"is {self.base.learning_rate:g}: it is not set here, so give the one that you want to your optimizer"
        )
        return (*self.dropped, said)

    def fill(self, global_batch_size: int, micro_batch_size: int) -> "ScaleTable":
        """The table with sizes that were given elsewhere, where it says nothing.

        Raises:
            ConfigError: it says something else.
        """
        given = {"global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size}
        rows = [self.base, *self.scales]
        for name, value in given.items():
            said = sorted({getattr(row, name) for row in rows[1:] or rows} - {0, value})
            if value and said:
                raise ConfigError(
                    f"{name}={value} is given, and the recipe says {', '.join(map(str, said))}. Leave one of them out."
                )
        filled = [replace(row, **{name: getattr(row, name) or value for name, value in given.items()}) for row in rows]
        return replace(self, base=filled[0], scales=tuple(filled[1:]))

    def batch(self, *, ranks_per_node: int, ranks_per_replica: int) -> StepBatch:
        """The batches by number of replicas.

        Raises:
            ConfigError: nodes that make up no whole replicas, or sizes that nobody says.
        """
        rows = self.scales or (self.base,)
        if not all(row.global_batch_size and row.micro_batch_size for row in rows):
            raise ConfigError(
                "the recipe says no train_batch_size or no micro_train_batch_size. Give ElasticTraining "
                "global_batch_size and micro_batch_size."
            )
        ranks = {"ranks_per_node": ranks_per_node, "ranks_per_replica": ranks_per_replica}
        sizes = {row.global_batch_size for row in rows}
        return StepBatch(
            global_batch_size=sizes.pop() if len(sizes) == 1 else 0,
            micro_batch_size=max(row.micro_batch_size for row in rows),
            by_replicas=tuple(
                SizeBatch(
                    num_replicas=replicas_of_nodes("scale_config", row.num_nodes, **ranks),
                    global_batch_size=row.global_batch_size,
                    micro_batch_size=row.micro_batch_size,
                    is_even=row.is_even,
                )
                for row in self.scales
            ),
            is_even=self.base.is_even,
        )

    def on(self, *, ranks_per_node: int, ranks_per_replica: int, tensor_degree: int) -> "ScaleTable":
        """The table of those numbers of nodes that the present ranks can train as it says.

        A number of nodes is dropped where it makes up no whole replicas, and where its `uneven_batch` describes other
        shares than ours, which differ by at most one sample: the first ones are larger.

        Raises:
            ConfigError: there is a `scale_config`, and none is left.
        """
        kept: list[Scale] = []
        dropped: list[str] = []
        for row in self.scales:
            try:
                replicas_of_nodes(
                    "scale_config",
                    row.num_nodes,
                    ranks_per_node=ranks_per_node,
                    ranks_per_replica=ranks_per_replica,
                )
                _check_shares(row, row.num_nodes * ranks_per_node // tensor_degree)
            except ConfigError as error:
                dropped.append(f"{row.num_nodes} nodes are left out: {error}")
            else:
                kept.append(row)
        if dropped and not kept:
            raise ConfigError(
                f"scale_config has no number of nodes that can be trained as it says. {' '.join(dropped)}"
            )
        return replace(self, scales=tuple(kept), dropped=tuple(dropped))


def read_scales(recipe: Mapping[str, Any]) -> ScaleTable | None:
    """What a recipe says of batches, at every scale; None where it says nothing.

    Raises:
        UnknownKeyError: an `uneven_batch` block with keys that it does not have.
        ConfigError: keys that are no numbers of nodes, another number of nodes inside, or something that a running
            job cannot change: another learning rate for the same batch, another model.
    """
    scales: Mapping[Any, Mapping[str, Any]] = recipe.get("scale_config") or {}
    plain = {key: value for key, value in recipe.items() if key not in ("scale_config", "elastic_policy")}
    base = _scale(0, plain)
    odd = [key for key in scales if not str(key).isdecimal() or int(key) < 1]
    if odd:
        raise ConfigError(f"the keys of scale_config are numbers of nodes, but there are {few(map(repr, odd))}.")
    rows: list[Scale] = []
    for key in sorted(scales, key=int):
        _check_changes(int(key), dict(_leaves(scales[key])), dict(_leaves(plain)))
        rows.append(_scale(int(key), recipe_at(plain | {"scale_config": scales}, int(key))))
    limits: Mapping[str, Any] = recipe.get("elastic_policy") or {}
    low, high = (limits.get(name) or default for name, default in (("min_nodes", 1), ("max_nodes", math.inf)))
    _check_rates({key: value for key, value in scales.items() if low <= int(key) <= high}, plain)
    if not rows and not (base.global_batch_size or base.micro_batch_size or base.uneven):
        return None
    return ScaleTable(base=base, scales=tuple(rows))


def _scale(num_nodes: int, recipe: Mapping[str, Any]) -> Scale:
    uneven = _find(recipe, (_UNEVEN_BATCH,))
    if uneven is not None:
        uneven_batch_size({**uneven, "use_uneven_batch": False}, data_degree=1)  # the names of its keys
    return Scale(
        num_nodes=num_nodes,
        global_batch_size=int(_find(recipe, _BATCH) or 0),
        micro_batch_size=int(_find(recipe, _MICRO) or 0),
        learning_rate=float(_find(recipe, _RATE) or 0.0),
        uneven=uneven,
    )


def _check_shares(row: Scale, data_degree: int) -> None:
    """Raise where `uneven_batch` describes other shares than ours."""
    if row.uneven is None or not row.uneven.get("use_uneven_batch", False):
        return
    total = uneven_batch_size(row.uneven, data_degree=data_degree)
    each, rest = divmod(row.global_batch_size, data_degree)
    wanted = {int(row.uneven["small_local_batch_size"]), int(row.uneven["large_local_batch_size"])}
    ours = {each, each + 1} if rest else {each}
    num_small = int(row.uneven["num_dp_groups_with_small_batch_size"])
    if total != row.global_batch_size or not (wanted == ours and (not rest or num_small == data_degree - rest)):
        raise ConfigError(
            f"uneven_batch at {row.num_nodes} nodes describes a step of {total} samples with shares of "
            f"{' and '.join(map(str, sorted(wanted)))}, and train_batch_size is {row.global_batch_size}. On "
            f"{data_degree} data-parallel ranks it is shared out as {data_degree - rest} x {each} + {rest} x "
            f"{each + 1}: say that, or leave uneven_batch out."
        )


def _check_changes(num_nodes: int, above: Mapping[str, Any], below: Mapping[str, Any]) -> None:
    for path, value in above.items():
        name = path.rpartition(".")[2]
        if name == "num_nodes" and value != num_nodes:
            raise ConfigError(f"scale_config.{num_nodes} says {path}: {value}. It must be {num_nodes}, or left out.")
        known = (*_BATCH, *_MICRO, *_RATE, "num_nodes")
        if name not in known and f".{_UNEVEN_BATCH}." not in f".{path}." and below.get(path) != value:
            raise ConfigError(
                f"scale_config.{num_nodes} sets {path} to {value!r}, which a running job cannot change. It can change "
                f"{', '.join((_BATCH[0], _MICRO[0], _UNEVEN_BATCH))}; take the rest out."
            )


def _check_rates(scales: Mapping[Any, Mapping[str, Any]], plain: Mapping[str, Any]) -> None:
    merged = [recipe_at({**plain, "scale_config": scales}, int(key)) for key in scales]
    rates = {float(rate) for each in merged if (rate := _find(each, _RATE)) is not None}
    if len(rates) > 1:
        raise ConfigError(
            f"scale_config says the learning rates {', '.join(f'{rate:g}' for rate in sorted(rates))}. One program has "
            "one: take them out, and say lr_scaling='linear' or 'sqrt' where the batch changes."
        )


def _find(recipe: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """The value of a key, wherever it stands.

    Raises:
        ConfigError: it stands in several places, with different values.
    """
    found = [value for name, value in _entries(recipe) if name in names and value is not None]
    if any(value != found[0] for value in found):
        raise ConfigError(f"the recipe says {names[0]} several times, differently: {few(map(str, found))}.")
    return found[0] if found else None


def _entries(recipe: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in recipe.items():
        yield str(key), value
        if isinstance(value, Mapping) and key != _UNEVEN_BATCH:
            yield from _entries(cast("Mapping[str, Any]", value))


def _leaves(recipe: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in recipe.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(cast("Mapping[str, Any]", value), f"{path}.")
        else:
            yield path, value
