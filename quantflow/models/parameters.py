"""Parameters of a module put in and taken out, without transformers."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from quantflow.errors import InputError


def twins(model: nn.Module) -> dict[str, str]:
    """The tied parameters of a model, in both directions: lm_head.weight -> embedding and back.

    A part of a model has none.
    """
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    return {**tied, **{twin: name for name, twin in tied.items()}}


def materialize_(model: nn.Module, tensors: Mapping[str, Tensor], *, dtype: torch.dtype) -> None:
    """Give parameters of `model` their values, and buffers that a checkpoint holds.

    Of two tied parameters either name is enough: when one is given, both become the same parameter.

    Args:
        model: model or a part of it.
        tensors: parameter name relative to `model` -> values; converted to `dtype`, not copied when
            they have it.
        dtype: dtype of every parameter that is set.

    Raises:
        InputError: a name is no parameter and no buffer of `model`, or the shape differs.
    """
    other = twins(model)
    for name, tensor in tensors.items():
        owner, leaf = _owner(model, name)
        buffer = None if leaf in owner._non_persistent_buffers_set else owner._buffers.get(leaf)
        current = buffer if owner._parameters.get(leaf) is None else owner._parameters[leaf]
        if current is None:
            raise _no_parameter(model, name)
        if current.shape != tensor.shape:
            raise InputError(
                f"{name}: checkpoint holds {list(tensor.shape)}, the model needs "
                f"{list(current.shape)}",
                "check that config.json belongs to these weights",
            )
        if current is buffer:
            owner._buffers[leaf] = tensor.to(
                dtype if current.is_floating_point() else current.dtype
            )
            continue
        parameter = nn.Parameter(tensor.to(dtype), requires_grad=False)
        setattr(owner, leaf, parameter)
        if name in other and other[name] not in tensors:
            twin_owner, twin_leaf = _owner(model, other[name])
            setattr(twin_owner, twin_leaf, parameter)


def release_(module: nn.Module, names: Iterable[str] | None = None) -> None:
    """Put parameters back on meta, which frees their memory.

    Buffers stay: they are of a vector's size, and those that are not in a checkpoint have no other
    copy.

    Args:
        module: module of the parameters.
        names: names relative to `module`; None is all of them.
    """
    chosen = (
        [name for name, _ in module.named_parameters(remove_duplicate=False)]
        if names is None
        else list(names)
    )
    for name in chosen:
        owner, leaf = _owner(module, name)
        parameter = owner._parameters.get(leaf)
        if parameter is not None:
            setattr(owner, leaf, nn.Parameter(parameter.to("meta"), requires_grad=False))


def drop_unread_(model: nn.Module) -> None:
    """Give parameters that are still on meta no elements.

    No text reads them, and a model with parameters on meta cannot move to a device.
    """
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            owner, leaf = _owner(model, name)
            setattr(
                owner,
                leaf,
                nn.Parameter(torch.empty(0, dtype=parameter.dtype), requires_grad=False),
            )


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    prefix, _, leaf = name.rpartition(".")
    try:
        return model.get_submodule(prefix), leaf
    except AttributeError as error:
        raise _no_parameter(model, name) from error


def _no_parameter(model: nn.Module, name: str) -> InputError:
    return InputError(
        f"{name}: no parameter of {type(model).__name__}",
        "check that config.json belongs to these weights",
    )
