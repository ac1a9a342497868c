"""Models that transformers has sharded while it loaded them are adopted: made plain again, and sharded by us.

    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(tp_size=2, fsdp_size=2))
    model = session.parallelize(model)

transformers splits such a model by tensors, by experts and by FSDP2, over meshes of its own, whose process groups do
not survive the loss of a rank. `release_shards` takes the shards out of the model and undoes the rest, so that a plain
model without values remains, which `parallelize` shards as any other. `AdoptedShards.give_to` then fills each
parameter: from the shard of this rank where both layouts give every rank the same part, else from the whole parameter,
which the ranks that hold it send, one parameter at a time (`adopted_parts.py`). The degrees at loading need not be
those of the training.

A process that replaces a lost rank, or joins a job that grows, loads the model alone, and with groups that are not
connected. It needs only the model's structure, as its values come from the other ranks: nothing is sent there.
transformers' groups are closed on all ranks as the model is released, and nothing is communicated over them, so that
neither a recovery nor a resize meets them.
"""

# Neither FSDP2 nor transformers has a public way to undo what it does to a module.
# pyright: reportPrivateUsage=false

import inspect
from collections.abc import Collection, Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate

from hyperpod_plugins.comm import ResilientProcessGroup, group_health
from hyperpod_plugins.delayed_init.materialize import allocate, copy_shard_
from hyperpod_plugins.delayed_init.tape import full_name, own_tensors
from hyperpod_plugins.errors import ConfigError, NotBuiltYetError, format_list
from hyperpod_plugins.parallel.adopted_parts import gather_whole, has_known_part
from hyperpod_plugins.parallel.gathered_parameters import PRIVATE_ATTRIBUTES
from hyperpod_plugins.parallel.topology import EXPERT_SHARD
from hyperpod_plugins.parallel.unit_messages import HOOK_ADVICE
from hyperpod_plugins.parallel.unit_watch import parameter_groups

_STYLES = "transformers.distributed."
"""Package of the functions that transformers puts in the place of the forward of a module that it splits."""
_MESHES = "_mesh_manager"
_MARKS = (_MESHES, "_device_mesh", "_is_distributed_loading_by_transformers", "_tp_size", "_fsdp_size")
"""Attributes of a model that transformers has sharded; their classes have defaults."""
_AXES = {"dp_replicate", "fsdp", "tp", "efsdp", "ep"}
"""Axes of transformers' meshes. None is called as one of ours."""


def sharded_at_load(model: nn.Module) -> list[nn.Module]:
    """Return the models of transformers in a module that transformers has sharded, and that we have not adopted."""
    return [part for part in model.modules() if _is_of_transformers(vars(part).get(_MESHES))]


def _is_of_transformers(value: object) -> bool:
    """Whether a value is of a class of transformers' package for sharding; a program's own may have its name."""
    return any(kind.__module__.startswith(_STYLES) for kind in type(value).__mro__)


def is_sharded_by_program(model: nn.Module) -> bool:
    """Whether a module has FSDP2 units that are to stay as they are: of the program, or of an earlier call.

    Raises:
        ConfigError: it has a part of a model that transformers has sharded, without the model itself.
    """
    if sharded_at_load(model):
        return False
    _refuse_part(model)
    return any(isinstance(part, FSDPModule) for part in model.modules())


def release_shards(model: nn.Module) -> "AdoptedShards | None":
    """Turn a model that transformers has sharded into a plain one, and return what it held.

    Parameters that were sharded are plain ones on the meta device afterwards, with the shape of the whole; others keep
    their values. Gone are transformers' hooks, its FSDP2 units, and its marks on the model and its `config`. No
    communication.

    Args:
        model: a model of transformers, or a module that contains one, in place.

    Returns:
        The shards; None if transformers has not sharded the model.

    Raises:
        ConfigError: the program has changed the model so that it cannot be made plain again, or has sharded others of
            its parameters; or it has run or been trained.
        NotBuiltYetError: it has stages of a pipeline, or is quantized.
    """
    parts = sharded_at_load(model)
    if not parts:
        _refuse_foreign_shards(model)
        return None
    _refuse_unserved(model, parts)
    adopted = AdoptedShards(model, parts)
    for part in parts:
        for module in part.modules():
            _remove_fsdp(module)
            _restore_forward(module)
            _restore_experts(module)
            _forget_distribution(module)
        for mark in _MARKS:
            vars(part).pop(mark, None)
    adopted.take_from(model)  # from plain modules
    return adopted


class AdoptedShards:
    """The parameters of a model as transformers had sharded them."""

    def __init__(self, model: nn.Module, parts: list[nn.Module]) -> None:
        """Keep the meshes of the models in a module that are about to be released."""
        self.parameters: dict[str, DTensor] = {}
        """By name in the model."""
        self._meshes: dict[str, Any] = {
            name: vars(part)[_MESHES] for name, part in model.named_modules() if any(part is each for each in parts)
        }
        """Of each of the models, by its name in the module."""
        _close_groups([mesh for each in self._meshes.values() for mesh in (each._dense_mesh, each._expert_mesh)])

    def take_from(self, model: nn.Module) -> None:
        """Replace a model's sharded parameters by plain ones on the meta device; what is tied stays tied."""
        twins: dict[int, nn.Parameter] = {}
        for prefix, module in model.named_modules():
            for key, parameter in own_tensors(module).items():
                if not isinstance(parameter, DTensor):
                    continue
                if id(parameter) not in twins:
                    self.parameters[full_name(prefix, key)] = parameter
                    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                    twins[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
                    own = {name: each for name, each in vars(parameter).items() if _is_of_program(name)}
                    vars(twins[id(parameter)]).update(own)
                module.register_parameter(key, twins[id(parameter)])

    def give_to(self, model: nn.Module, mesh: DeviceMesh, device: torch.device, on_host: Collection[int]) -> None:
        """Allocate the parameters of the model, which is sharded again, and fill them; a collective of all ranks.

        Afterwards all copies of a part are equal. About one whole parameter is in memory at a time, and the former
        shard of each until it is filled. A process without connections only allocates.

        Args:
            model: as `parallelize` has sharded it.
            mesh: `("replicate", "shard", "tensor")`, over which it did.
            device: of the model.
            on_host: `id` of each DTensor to allocate in host memory instead.

        Raises:
            NotBuiltYetError: a part is not of the shape that transformers' layout gives it, on some rank.
        """
        allocate(model, device, on_host)
        if not group_health.suppresses_collectives:
            targets = [(each, name) for name, each in model.named_parameters() if name in self.parameters]
            are_same = self._agree_on_parts(targets, device)
            for (target, name), is_same in zip(targets, are_same, strict=True):
                former = self.parameters.pop(name)
                if is_same:
                    _copy_part(target, former, mesh, device)
                else:
                    copy_shard_(target, self._whole(former, name, device))
            assert not self.parameters, f"no parameter has taken the values of {format_list(self.parameters)}"
        self.parameters.clear()

    def _agree_on_parts(self, targets: list[tuple[nn.Parameter, str]], device: torch.device) -> list[bool]:
        """Whether each parameter has the same part on every rank in both layouts; all ranks refuse an unknown part."""
        are_same = [_cuts(each) == _cuts(self.parameters[name]) for each, name in targets]
        num_ranks = dist.get_world_size()
        firsts = [num_ranks if has_known_part(self.parameters[name]) else dist.get_rank() for _, name in targets]
        agreed = torch.tensor([are_same, firsts], dtype=torch.int, device=device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)  # ranks of one mesh may lie in another order on the other
        are_same, firsts = agreed.tolist()
        for (_, name), rank in zip(targets, firsts, strict=True):
            if rank < num_ranks:
                raise NotBuiltYetError(
                    f"{name} of shape {tuple(self.parameters[name].shape)} was sharded by transformers in a way that "
                    f"is not known, or its part on rank {rank} has been replaced: it is of another shape than "
                    f"{self.parameters[name].placements} gives it. Load the model without distributed_config or "
                    "tp_plan; this package shards it."
                )
        return are_same

    def _whole(self, former: DTensor, name: str, device: torch.device) -> Tensor:
        """Return a whole parameter, of which ranks have parts."""
        owner = max((each for each in self._meshes if not each or name.startswith(f"{each}.")), key=len)
        meshes = self._meshes[owner]
        is_of_experts = {"ep", "efsdp"} & {*(former.device_mesh.mesh_dim_names or ())}
        return gather_whole(former, meshes._expert_mesh if is_of_experts else meshes._dense_mesh, device)


def _close_groups(meshes: Iterable[DeviceMesh]) -> None:
    """Close the groups of meshes. c10d keeps their names: it makes those of later groups by the number of names."""
    for mesh in meshes:
        for group in map(mesh.get_group, range(mesh.ndim)):
            if group is not dist.group.WORLD and isinstance(group, ResilientProcessGroup):
                group.shutdown()


def _is_of_program(attribute: str) -> bool:
    return not attribute.startswith(PRIVATE_ATTRIBUTES)


@torch.no_grad()
def _copy_part(target: Tensor, former: DTensor, mesh: DeviceMesh, device: torch.device) -> None:
    """Fill this rank's part of a parameter from that of the former one, or of the first rank that has this part."""
    part = former.to_local().to(device).contiguous()
    for group in _groups_of_copies(target, mesh) if part.numel() else ():
        dist.broadcast(part, group=group, group_src=0)
    assert isinstance(target, DTensor)
    target.to_local().copy_(part)


def _groups_of_copies(target: Tensor, mesh: DeviceMesh) -> Iterator[dist.ProcessGroup]:
    """The groups along whose ranks a parameter is not split."""
    assert isinstance(target, DTensor)
    names = target.device_mesh.mesh_dim_names or ()
    for axis, placement in enumerate(target.placements):
        if isinstance(placement, Replicate) and target.device_mesh.size(axis) > 1:
            yield target.device_mesh.get_group(axis)
    if not {"tensor", EXPERT_SHARD} & {*names} and mesh["tensor"].size() > 1:
        yield mesh.get_group("tensor")


def _cuts(tensor: Tensor) -> list[tuple[Placement, list[int]]] | None:
    """How a parameter is split, and among which ranks; None for one that is no DTensor."""
    if not isinstance(tensor, DTensor):
        return None
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    found: list[tuple[Placement, list[int]]] = []
    for axis, placement in enumerate(tensor.placements):
        if mesh.size(axis) > 1 and not isinstance(placement, Replicate):
            row = tuple(slice(None) if each == axis else index for each, index in enumerate(coordinate))
            found.append((placement, mesh.mesh[row].tolist()))
    return found


# -- what transformers has done to modules ----------------------------------------------------------------------------


def _remove_fsdp(module: nn.Module) -> None:
    """Make a unit of FSDP2, which has not run, a plain module."""
    if not isinstance(module, FSDPModule):
        return
    state: Any = module._get_fsdp_state()
    for group in parameter_groups(module):
        for record in group.fsdp_params:
            record._post_load_hook_handle.remove()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for key in (STATE_KEY, REGISTRY_KEY):
        vars(module).pop(key, None)
    _module_state_mapping.pop(module, None)
    plain: Any = type(module).__mro__[2]  # after the class that FSDP2 has made, and FSDPModule
    module.__class__ = plain


def _restore_forward(module: Any) -> None:
    """Give a module that transformers splits the forward back that it had; see `_fault_of_forward`."""
    own = vars(module)
    if not _is_of_style(own.get("forward")):
        return
    while _is_of_style(own["forward"]):
        own["forward"] = _replaced_forward(own["forward"])
    if own["forward"].__func__ is type(module).forward:
        del own["forward"]


def _replaced_forward(forward: Any) -> Any:
    """The forward that a style has replaced by this one; None if the style has another form."""
    variables: Any = inspect.getclosurevars(forward).nonlocals
    return variables.get("original_forward") or getattr(variables.get("implementation"), "experts_forward", None)


def _forget_distribution(module: Any) -> None:
    own = vars(module)
    if own.pop("_is_hooked", False) and isinstance(module, nn.Linear):
        own.pop("config", None)  # a style for multi-head latent attention has put it there
    vars(getattr(module, "config", module)).pop("distributed_config", None)
    for key in ("_hf_tp_plan", "_hf_device_mesh"):  # PEFT has told itself where to split an adapter
        own.pop(key, None)
    if _is_split_by_peft(module):
        own.update(tp_layer=None, device_mesh=None, input_fns={}, output_fns={})


def _is_split_by_peft(module: nn.Module) -> bool:
    """Whether a module is an adapter of an embedding, whose own forward calls the styles of transformers."""
    return type(module).__module__.startswith("peft.") and _is_of_transformers(vars(module).get("tp_layer"))


def _is_of_style(forward: object) -> bool:
    """Whether a function is transformers' own by its code: `functools.wraps` copies `__module__`."""
    if not inspect.isfunction(forward) or "__wrapped__" in vars(forward):
        return False
    return str(forward.__globals__.get("__name__")).startswith(_STYLES)


def _restore_experts(module: Any) -> None:
    """Tell a layer of experts that it has all of them again."""
    own = vars(module)
    if own.get("_is_expert_parallel"):
        parameters = module.named_parameters(recurse=False)
        own["num_experts"] = next(each.shape[0] for _, each in parameters if isinstance(each, DTensor))
        own["_is_expert_parallel"] = False


# -- what is refused --------------------------------------------------------------------------------------------------


def _refuse_part(model: nn.Module) -> None:
    """Refuse part of a model that transformers has sharded: its meshes, and half of its marks, lie on the whole."""
    is_configured = any(_is_configured(part) for part in model.modules())
    for name, module in model.named_modules():
        own = vars(module)
        axes = _axes_of(module) & _AXES
        is_split = _is_of_style(own.get("forward")) or (own.get("_is_hooked") is True and (axes or "forward" in own))
        if is_split or (is_configured and axes):
            raise ConfigError(
                f"{name or 'the module'} of {type(model).__name__} is part of a model that transformers has sharded "
                "while it loaded it, and cannot be sharded anew without the rest. Give the whole model, or load this "
                "part by itself, as by AutoModel.from_pretrained, with or without distributed_config."
            )


def _is_configured(module: Any) -> bool:
    """Whether the configuration of a module says that transformers has sharded the model that it is of."""
    variables: dict[str, Any] = getattr(vars(module).get("config"), "__dict__", {})
    return variables.get("distributed_config") is not None


def _axes_of(module: nn.Module) -> set[str]:
    """Names of the axes of the meshes over which a module's own parameters, or those of its units, are split."""
    meshes = [each.device_mesh for each in module.parameters(recurse=False) if isinstance(each, DTensor)]
    meshes += [group.mesh_info.mesh for group in parameter_groups(module)]
    return {name for mesh in meshes for name in mesh.mesh_dim_names or ()}


def _refuse_foreign_shards(model: nn.Module) -> None:
    """Refuse shards that neither FSDP2 nor the transformers that we know has made: we do not know their meshes.

    Earlier releases of transformers kept their shards as plain tensors, of a smaller shape.
    """
    for part in model.modules():
        size = vars(part).get("_tp_size")
        if isinstance(size, int) and size > 1:
            raise NotBuiltYetError(
                f"{type(part).__name__} was sharded by a transformers that keeps no meshes with the model. Use "
                "transformers 5.23 or later, or load the model without tp_plan; tensor_parallel_degree splits it."
            )
    if any(isinstance(part, FSDPModule) for part in model.modules()):
        return
    names = [name for name, each in model.named_parameters() if isinstance(each, DTensor)]
    if names:
        mesh = cast("DTensor", model.get_parameter(names[0])).device_mesh
        raise ConfigError(
            f"{format_list(names)} of {type(model).__name__} are sharded already, over {mesh}, and are of no model "
            "that from_pretrained of transformers 5.23 or later has sharded. Leave tensor parallelism to this package "
            "(tensor_parallel_degree), or shard the whole model by the program, by fully_shard over the mesh of this "
            "package."
        )


def _refuse_unserved(model: nn.Module, parts: list[nn.Module]) -> None:
    inside: set[object] = {module for part in parts for module in part.modules()}
    kind = type(parts[0]).__name__
    beside = [name for name, each in (*model.named_parameters(), *model.named_buffers()) if each.is_meta]
    if beside:
        raise NotBuiltYetError(
            f"{format_list(beside)} have no values yet, beside a {kind} that transformers has sharded. Build the whole "
            "model inside delayed_init, with from_pretrained without distributed_config or tp_plan, or no part of it."
        )
    for part in parts:
        meshes: Any = vars(part)[_MESHES]
        if meshes.get_mesh("pp").size() > 1:
            raise NotBuiltYetError(
                f"{kind} was loaded with pp_size={meshes.get_mesh('pp').size()}, but stages of a pipeline are not "
                "supported. Load it with pp_size=1."
            )
        if getattr(part, "hf_quantizer", None) is not None:
            raise NotBuiltYetError(
                f"{kind} was sharded by transformers and is quantized, which cannot be adopted yet. Load it without "
                "distributed_config or tp_plan; this package shards it."
            )
    foreign = [name for name, module in model.named_modules() if module not in inside and _is_sharded(module)]
    if foreign:
        raise ConfigError(
            f"{foreign[0] or type(model).__name__} was sharded by the program around or beside {kind}, which "
            "transformers has sharded. Leave that out; this package shards all of it."
        )
    _refuse_changed(model, inside, kind)


def _is_sharded(module: nn.Module) -> bool:
    has_shards = any(isinstance(each, DTensor) for each in module.parameters(recurse=False))
    return has_shards or isinstance(module, FSDPModule) or _is_of_style(vars(module).get("forward"))


def _refuse_changed(model: nn.Module, inside: set[object], kind: str) -> None:
    """Refuse a model that has run, or that the program has changed."""
    has_run = any(isinstance(each, FSDPModule) and each._get_fsdp_state()._is_root is not None for each in inside)
    if has_run or any(isinstance(each, DTensor) and each.grad is not None for each in model.parameters()):
        raise ConfigError(
            f"this {kind}, which transformers has sharded, has run already. Give it to this package before its first "
            "forward (session.parallelize, prepare, or return it from configure_model)."
        )
    for name, module in model.named_modules():
        if _is_unit_of_other_class(module):
            raise ConfigError(
                f"the class of {name or kind} was changed after transformers had made it a unit of FSDP2, as "
                f"register_parametrization does, so that this {kind} cannot be made plain again. Load the model "
                "without distributed_config before you do that; this package shards it."
            )
        fault = _fault_of_forward(module)
        if fault:
            raise ConfigError(
                f"forward of {name} {fault} after transformers had sharded this {kind}, so that its own one cannot be "
                "restored. Do that after this package has sharded the model."
            )
    hooked = [
        name
        for name, each in model.named_parameters()
        if isinstance(each, DTensor) and (each._backward_hooks or _own_gradient_hooks(each))
    ]
    if hooked:
        raise ConfigError(
            f"gradient hooks of {format_list(hooked)} were registered before this {kind} was sharded anew, which "
            f"replaces parameters. {HOOK_ADVICE}"
        )


def _is_unit_of_other_class(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule) and type(module).__mro__[1] is not FSDPModule


def _fault_of_forward(module: nn.Module) -> str:
    """What has been done to a forward that transformers has replaced, if the former one cannot be restored."""
    own = vars(module)
    forward: Any = own.get("forward")
    if not _is_of_style(forward):
        is_split = own.get("_is_hooked") is True or _axes_of(module) & {"tp", "ep"}
        return "was replaced" if is_split and forward is not None else ""
    while _is_of_style(forward):
        forward = _replaced_forward(forward)
    return "" if inspect.ismethod(forward) and forward.__self__ is module else "was replaced or copied"


def _own_gradient_hooks(parameter: Any) -> list[Any]:
    """Hooks of a parameter's accumulated gradient that are not of transformers."""
    hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}
    return [each for each in hooks.values() if not _is_of_style(each)]
