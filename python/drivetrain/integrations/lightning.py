"""Lightning: `Trainer(plugins=[CheckpointIO()])`, and its checkpoints are commits.

Lightning decides what is in a checkpoint and where it lies; each of its paths becomes a checkpoint
root with one step: sealed, written around the page cache, and there whole or not at all.
"""

import collections
import os
import pathlib
import shutil
import warnings
from typing import Any

from drivetrain._checkpoint.checkpointer import Checkpointer
from drivetrain._checkpoint.handle import SaveHandle
from drivetrain._checkpoint.values import Keep
from drivetrain._native import NotFound

try:
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO as _Base
except ImportError:  # the older name of the same package
    from lightning_fabric.plugins.io.checkpoint_io import CheckpointIO as _Base

#: Names that a checkpoint root of ours may have in it.
OWN_PREFIXES = ("step-", ".drivetrain", ".meet")


class CheckpointIO(_Base):
    """Saves and loads Lightning's checkpoints through a `Checkpointer`.

    Args:
        blocking: return from a save after the commit; else it goes on in the background, and a
            failure is raised by the next save or by `teardown`.
        allow_pickle: also store values that have no form of their own, such as hyper-parameters of
            your own classes, as pickles; loading them runs code.
        checkpointer: further arguments of every `Checkpointer`.
    """

    def __init__(
        self, *, blocking: bool = False, allow_pickle: bool = False, **checkpointer: Any
    ) -> None:
        self._blocking = blocking
        # A path that is saved again ("last.ckpt") keeps what it had until the new one is there.
        self._options = {"keep": Keep(last=1), "allow_pickle": allow_pickle, **checkpointer}
        self._running: tuple[Checkpointer, SaveHandle] | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Commits what Lightning hands over; called on rank 0 alone."""
        self._settle()
        ckpt = self._open(path)
        step = int(checkpoint.get("global_step", 0))
        handle = ckpt.save(
            step,
            {"checkpoint": plain(checkpoint)},
            blocking=self._blocking,
            rng=False,
            overwrite=step in ckpt.steps(),
        )
        self._running = ckpt, handle
        if self._blocking:
            self._settle()

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """The newest good step below `path`, on the CPU unless `map_location` says otherwise."""
        self._settle()
        if not os.path.isdir(path) and "://" not in os.fspath(path):
            raise NotFound(f"checkpoint {os.fspath(path)} not found: expected a folder")
        with self._open(path) as ckpt:
            restored = ckpt.restore({"checkpoint": {}}, strict=False, rng=False)
        if restored.step is None:
            raise NotFound(f"committed step in {os.fspath(path)} not found")
        found = restored.state["checkpoint"]
        return found if map_location is None else moved(found, map_location)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint that Lightning has no use for any more, if nothing else is in it."""
        self._settle()
        if "://" in os.fspath(path):
            warnings.warn(f"{path} stays: only local checkpoints are removed", stacklevel=2)
            return
        folder = pathlib.Path(path)
        if not folder.is_dir():
            return
        foreign = [p.name for p in folder.iterdir() if not p.name.startswith(OWN_PREFIXES)]
        if foreign:
            warnings.warn(f"{folder} stays: {foreign[0]} in it is not a checkpoint's", stacklevel=2)
            return
        shutil.rmtree(folder)

    def teardown(self) -> None:
        """Waits for a save in the background; raises what made it fail."""
        self._settle()

    def _open(self, path: str | os.PathLike[str]) -> Checkpointer:
        return Checkpointer(path, rank=0, world_size=1, **self._options)

    def _settle(self) -> None:
        if self._running is None:
            return
        (ckpt, handle), self._running = self._running, None
        try:
            handle.wait()
        finally:
            ckpt.close()


def plain(value: Any) -> Any:
    """Dicts, paths and strings of Lightning's own classes as the built-in ones."""
    if isinstance(value, collections.OrderedDict):
        return collections.OrderedDict((key, plain(item)) for key, item in value.items())
    if isinstance(value, dict) and type(value).__module__ != "collections":
        return {key: plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return str(value) if isinstance(value, str) else value


def moved(value: Any, map_location: Any) -> Any:
    """Tensors of a nested state on the device that `map_location` names (or maps the CPU to)."""
    import torch

    if isinstance(value, torch.Tensor):
        if callable(map_location):
            storage = map_location(value.untyped_storage(), "cpu")
            return value if storage is None else value.to(storage.device)
        if isinstance(map_location, dict):
            return value.to(map_location.get("cpu", "cpu"))
        return value.to(map_location)
    if isinstance(value, dict):
        for key in value:
            value[key] = moved(value[key], map_location)
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(moved(item, map_location) for item in value)
    return value
