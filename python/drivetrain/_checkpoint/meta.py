"""Modules built under ``torch.device("meta")``: their parameters get memory when they are restored.

The new tensor takes the place of the old one inside the same Python object, so that tied parameters
stay tied and optimizers made before keep pointing at them.
"""

from typing import Any

from drivetrain._checkpoint import pieces


class Materialise:
    """New memory for the tensors of one module that have none."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._named: dict[str, Any] | None = None
        self._new: dict[int, tuple[Any, Any]] = {}

    @property
    def needed(self) -> bool:
        """True when something was asked for."""
        return bool(self._new)

    def tensor(self, name: str) -> Any:
        """The tensor that a parameter or buffer will be, on the CPU; `apply` puts it in place."""
        if self._named is None:
            self._named = dict(self._module.named_parameters(remove_duplicate=False))
            self._named |= dict(self._module.named_buffers(remove_duplicate=False))
        old = self._named[name]
        if id(old) not in self._new:
            self._new[id(old)] = old, real_like(old)
        return self._new[id(old)][1]

    def apply(self) -> None:
        """Makes the module's tensors the filled ones."""
        import torch

        for old, new in self._new.values():
            if isinstance(old, torch.nn.Parameter):
                new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
            torch.utils.swap_tensors(old, new)


def is_meta(tensor: Any) -> bool:
    """True for tensors without memory."""
    return tensor.device.type == "meta"


def real_like(tensor: Any) -> Any:
    """A tensor on the CPU of the same shape, dtype and spread."""
    import torch

    if pieces.is_dtensor(tensor):
        return pieces.sharded_like(tensor, tensor.dtype)
    return torch.empty(tensor.shape, dtype=tensor.dtype)
