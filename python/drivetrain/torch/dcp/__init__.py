"""Storage for torch.distributed.checkpoint: save, async_save and load through Drivetrain's layout.

A checkpoint id is one folder with a manifest.json directly inside; `drivetrain ckpt` and
`Checkpointer` read it like any other checkpoint.
"""

from drivetrain.torch.dcp._reader import StorageReader
from drivetrain.torch.dcp._stager import Stager
from drivetrain.torch.dcp._writer import StorageWriter

__all__ = ["Stager", "StorageReader", "StorageWriter"]
