"""What programs are told when ranks run different FSDP2 units, or gradients are not what they must be.

See `unit_watch.py`.
"""

from collections.abc import Sequence
from itertools import zip_longest

from hyperpod_plugins.errors import format_list

_WHAT_TO_DO = (
    "Name in block_classes only classes whose modules every rank runs in every forward, such as the layer around a set "
    "of experts: modules outside them are gathered with the model as a whole, and ranks may then run different ones."
)
HOOK_ADVICE = (
    "Each rank computes the gradient of its own samples, so a hook would see other values than in one process, and it "
    "does not run on shards. Change reduced gradients instead: parameter.grad between backward and the optimizer's "
    "step (Lightning: in on_before_optimizer_step), or by parameter.register_post_accumulate_grad_hook after sharding: "
    "in configure_optimizers, or after parallelize or prepare. Each is a DTensor there, of which a rank has a part."
)
"""What to do instead of registering hooks for gradients of parameters."""
SPARSE_ADVICE = (
    "FSDP2 reduces dense gradients only. Use sparse=False, and an optimizer for dense gradients (torch.optim.Adam "
    "instead of SparseAdam)."
)
"""What to do instead of training with sparse gradients."""


def _first_difference(ranks: Sequence[int], traces: Sequence[Sequence[int]], names: Sequence[str]) -> tuple[int, str]:
    """Return the number of the first collective in which two ranks differ, from 1, and what each of them does there."""

    def told(event: int | None) -> str:
        if event is None:
            return "does nothing more"
        if event // 2 == len(names):
            return "ends its step"
        return f"{'reduces' if event % 2 else 'gathers'} {names[event // 2]}"

    other = next(index for index, trace in enumerate(traces) if list(trace) != list(traces[0]))
    pairs = list(zip_longest(traces[0], traces[other]))
    at = next(index for index, (here, there) in enumerate(pairs) if here != there)
    here, there = pairs[at]
    return at + 1, f"rank {ranks[0]} {told(here)}, but rank {ranks[other]} {told(there)}"


def step_message(traces: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """Return a message that tells where the sequences of two ranks diverge in a step, and what to do about it."""
    number, told = _first_difference(range(len(traces)), traces, names)
    return (
        f"ranks ran different modules in this step: at its collective number {number}, {told}. Each of them is a unit "
        "that all ranks must run together, in the same order, so this step's gradients are invalid; nothing has been "
        f"updated. {_WHAT_TO_DO}"
    )


def evaluation_message(ranks: Sequence[int], traces: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """Return the same for a sequence of gathers without gradients."""
    number, told = _first_difference(ranks, traces, names)
    return (
        f"ranks ran different modules where no gradients are computed, as in an evaluation: at gather number {number} "
        f"since they last compared, {told}. Each of them is a unit that all ranks must run together, in the same "
        f"order, so what was computed there is invalid. {_WHAT_TO_DO}"
    )


def written_message(names: Sequence[str]) -> str:
    """Return a message about parameters that the program has written while they were gathered."""
    return (
        f"the program wrote to parameters while they were gathered, in forward or training_step: {format_list(names)}. "
        "That changes one step's copy, which is dropped when they are sharded again, or with one rank a shard the "
        "parameters of one replica; so this step is not committed, and the optimizer has not stepped. Write to "
        "parameters where each rank sees its shards: in on_train_batch_start or on_train_batch_end, or between the "
        "steps of a hand-written loop. Instead of nn.Embedding(max_norm=...), normalize the rows that a forward "
        "returns, and initialize parameters before training instead of in a forward."
    )


SECOND_DERIVATIVES = (
    "a backward with create_graph=True, as for a gradient penalty, ran through a module whose parameters are gathered "
    "only while it computes: they are freed before the second derivatives are computed. Within the forward of the "
    "whole model, such as Lightning's training_step, parameters outside of blocks stay gathered: compute the gradients "
    "of the penalty there, with torch.autograd.grad. For modules that are gathered block by block, use differences "
    "such as model(x + step) - model(x) instead."
)


def gradient_message(names: Sequence[str], *, is_hooked: bool, is_sparse: bool) -> str:
    """Return a message that tells what the gradients of some parameters must not be."""
    if is_hooked:
        return f"a gradient hook is registered on {format_list(names)}. {HOOK_ADVICE} Nothing has been updated."
    if is_sparse:
        return f"the gradient of {format_list(names)} is sparse. {SPARSE_ADVICE} Nothing has been updated."
    return f"the gradient of {format_list(names)} has a graph. {SECOND_DERIVATIVES} Nothing has been updated."


def old_gradients_message(names: Sequence[str]) -> str:
    """Return a message about gradients of parameters that backward has added to after an optimizer's step."""
    return (
        f"backward has added to gradients on which the optimizer has stepped before: of {format_list(names)}. They "
        "were not dropped in between, or only with model.zero_grad() between forward and backward, when a module holds "
        "gathered parameters and not those with the gradients. Call optimizer.zero_grad() in each step, anywhere "
        "before backward."
    )


SUM_YOURSELF = (
    "If gradients are to be added up over optimizer steps, keep the sum yourself, as here it looks the same as this "
    "mistake: total.add_(parameter.grad) after backward, with a total made by torch.zeros_like(parameter), then "
    "parameter.grad = total.clone() before the optimizer's step, and optimizer.zero_grad() after it."
)
OF_REPLACEMENTS = (
    "If they are to be added up over optimizer steps: a process that replaces a lost one would not have them. Keep the "
    "sum in frozen parameters of the model instead, add to it before the optimizer's step, and let gradients be copies "
    "of it there; or train without recovery (Lightning: CheckpointlessRecovery(enabled=False))."
)
