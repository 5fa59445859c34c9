"""What both halves of the plug-in know of their folder."""

from __future__ import annotations

import os
from typing import Any


class OneFolder:
    """The folder of one checkpoint, given at construction or later as DCP's `checkpoint_id`."""

    _uri: str | None

    @property
    def checkpoint_id(self) -> str | None:
        """The folder or URI that is read or written."""
        return self._uri

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepares for another checkpoint."""
        if checkpoint_id is not None:
            self._uri = os.fspath(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """True for paths and the URIs that `Checkpointer` takes."""
        if not isinstance(checkpoint_id, str | os.PathLike):
            return False
        scheme, found, _ = os.fspath(checkpoint_id).partition("://")
        return not found or scheme in ("file", "memory", "s3", "s3a")


def rank_folder(uri: str, rank: int | None) -> str:
    """Where a rank saves that does not coordinate with the others."""
    return f"{uri.rstrip('/')}/rank-{rank or 0:05}"
