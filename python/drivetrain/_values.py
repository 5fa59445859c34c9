"""Natural forms of sample values: what `ds[i]` returns and what batches hold as objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, eq=False, repr=False)
class PointCloud:
    """A point cloud.

    Attributes:
        array: (N, C) float32, one row per point, columns as stored; x, y, z in metres.
        columns: C names, the first three are "x", "y", "z".
        frame: Frame of x, y, z, or None if the data set does not say.

    `points["intensity"]` is one column, (N,); `numpy.asarray(points)` is `array`.
    """

    array: np.ndarray
    columns: tuple[str, ...]
    frame: str | None = None

    @property
    def xyz(self) -> np.ndarray:
        """(N, 3) float32 view of x, y, z in metres."""
        return self.array[:, :3]

    def __getitem__(self, column: str) -> np.ndarray:
        try:
            return self.array[:, self.columns.index(column)]
        except ValueError:
            raise KeyError(f"{column!r}; there are {', '.join(self.columns)}") from None

    def __len__(self) -> int:
        return len(self.array)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        import numpy as np

        array = np.asarray(self.array, dtype=dtype)
        return array.copy() if copy and array is self.array else array

    def __repr__(self) -> str:
        return f"PointCloud({len(self)} x {', '.join(self.columns)}; frame={self.frame})"


@dataclass(frozen=True, eq=False)
class Pose:
    """A rigid transform that carries its frames.

    Attributes:
        matrix: (4, 4) float64, target ← source, metres.
        target: Frame of the result.
        source: Frame of the input.
        timestamp_ns: When it holds, nanoseconds since the Unix epoch.
    """

    matrix: np.ndarray
    target: str
    source: str
    timestamp_ns: int

    def __matmul__(self, other: Pose) -> Pose:
        """target ← other.source; the frames in between must be the same one."""
        if self.source != other.target:
            raise ValueError(
                f"frames do not meet: {self.target} ← {self.source} after "
                f"{other.target} ← {other.source}"
            )
        return Pose(self.matrix @ other.matrix, self.target, other.source, self.timestamp_ns)

    def inverse(self) -> Pose:
        """source ← target, exact for rigid transforms."""
        import numpy as np

        rotation = self.matrix[:3, :3].T
        matrix = np.eye(4)
        matrix[:3, :3] = rotation
        matrix[:3, 3] = -rotation @ self.matrix[:3, 3]
        return Pose(matrix, self.source, self.target, self.timestamp_ns)


@dataclass(frozen=True, eq=False)
class Calibration:
    """Calibration of one sensor at one sample.

    Attributes:
        channel: Name of the sensor.
        sensor_to_ego: (4, 4) float64, ego ← sensor, metres.
        ego_to_global: (4, 4) float64, global ← ego at the sensor's own time, metres.
        intrinsic: (3, 3) float64 pinhole matrix in pixels; None if the sensor is no camera.
        timestamp_ns: The sensor's own time at this sample, nanoseconds since the Unix epoch.
    """

    channel: str
    sensor_to_ego: np.ndarray
    ego_to_global: np.ndarray
    intrinsic: np.ndarray | None
    timestamp_ns: int

    @property
    def matrix(self) -> np.ndarray:
        """(4, 4) float64, ego ← sensor: the same as `sensor_to_ego`."""
        return self.sensor_to_ego


@dataclass(frozen=True, eq=False, repr=False)
class Boxes:
    """3-D boxes of one sample; every array has one row per box.

    Attributes:
        geometry: (N, 7) float32: centre x y z and length width height in metres, yaw in radians
            counter-clockwise about +z from +x.
        velocity: (N, 3) float32 in m/s, NaN where unknown.
        names: N class names.
        token: N annotation tokens, "" where the data set has none.
        lidar_points: (N,) int32 LiDAR points inside, -1 where unknown.
        frame: Frame of geometry and velocity.
    """

    geometry: np.ndarray
    velocity: np.ndarray
    names: list[str]
    token: list[str]
    lidar_points: np.ndarray
    frame: str

    def __len__(self) -> int:
        return len(self.geometry)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        import numpy as np

        array = np.asarray(self.geometry, dtype=dtype)
        return array.copy() if copy and array is self.geometry else array

    def __repr__(self) -> str:
        return f"Boxes({len(self)} in {self.frame or 'an unnamed frame'})"


def array_of(buffer: Any, dtype: str, shape: Sequence[int]) -> np.ndarray:
    """Wraps native memory as an array without a copy; bfloat16 needs ml_dtypes."""
    import numpy as np

    if dtype == "bfloat16":
        import ml_dtypes

        kind = np.dtype(ml_dtypes.bfloat16)
    else:
        kind = np.dtype(dtype)
    return np.frombuffer(buffer, kind).reshape(shape)


def _array(raw: tuple) -> np.ndarray:
    return array_of(raw[1], raw[2], raw[3])


def _points(raw: tuple) -> PointCloud:
    _, buffer, count, columns, frame = raw
    return PointCloud(array_of(buffer, "float32", (count, len(columns))), tuple(columns), frame)


def _pose(raw: tuple) -> Pose:
    _, matrix, target, source, timestamp_ns = raw
    return Pose(array_of(matrix, "float64", (4, 4)), target, source, timestamp_ns)


def _calibration(raw: tuple) -> Calibration:
    _, channel, sensor, ego, intrinsic, timestamp_ns = raw
    camera = None if intrinsic is None else array_of(intrinsic, "float64", (3, 3))
    sensor, ego = (array_of(m, "float64", (4, 4)) for m in (sensor, ego))
    return Calibration(channel, sensor, ego, camera, timestamp_ns)


def _boxes(raw: tuple) -> Boxes:
    _, count, geometry, velocity, names, tokens, points, frame = raw
    return Boxes(
        array_of(geometry, "float32", (count, 7)),
        array_of(velocity, "float32", (count, 3)),
        names,
        tokens,
        array_of(points, "int32", (count,)),
        frame,
    )


_WRAPPERS = {
    "array": _array,
    "points": _points,
    "pose": _pose,
    "calibration": _calibration,
    "boxes": _boxes,
}


def wrap(raw: Any) -> Any:
    """Makes the public value of what the native side returns (a tagged tuple or a plain value)."""
    return _WRAPPERS[raw[0]](raw) if isinstance(raw, tuple) else raw
