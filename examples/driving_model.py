"""A small multi-camera + LiDAR model: where around the car do vehicles stand?

It is an example, not a benchmark: about 60,000 parameters that learn in a minute on two cores.
Pictures go through a tiny CNN, points through a tiny PointNet on 2 m pillars; both meet on a
bird's-eye grid of 16 x 16 cells of 4 m around the LiDAR (x right, y forward).
"""

import math

import torch
from torch import nn
from torch.nn import functional

#: Channel and direction of view of each camera, degrees to the left of forward.
CAMERAS = {
    "CAM_FRONT": 0.0,
    "CAM_FRONT_RIGHT": -56.0,
    "CAM_BACK_RIGHT": -110.0,
    "CAM_BACK": 180.0,
    "CAM_BACK_LEFT": 108.0,
    "CAM_FRONT_LEFT": 55.0,
}
#: Vertical strips of each picture that get a feature of their own.
STRIPS = 4
#: Half of the horizontal field of view a strip is looked up in, degrees.
HALF_VIEW_DEG = 35.0
#: Half side of the bird's-eye grid, metres.
REACH_M = 32.0
PILLARS = 32
CELLS = 16
#: Points are counted per pillar in bands of height above the LiDAR, metres: road, bodies, roofs
#: of cars, taller things, trees and houses.
BAND_EDGES_M = (-1.6, -0.9, -0.2, 1.2)
BANDS = len(BAND_EDGES_M) + 1
#: Vehicles nearer than this count for the cameras' own head, metres.
NEAR_M = 24.0
#: Columns of a point: x, y, z, intensity, ring, dt_s.
POINT_COLUMNS = 6


class Cameras(nn.Module):
    """(B, 6, 3, H, W) pictures to (B, 6 * STRIPS, C) features, one per picture strip."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 12, 5, stride=2, padding=2),
            nn.GroupNorm(3, 12),
            nn.ReLU(),
            nn.Conv2d(12, 24, 3, stride=2, padding=1),
            nn.GroupNorm(4, 24),
            nn.ReLU(),
            nn.Conv2d(24, channels, 3, stride=2, padding=1),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
        )

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        batch, count = pictures.shape[:2]
        maps = self.net(pictures.flatten(0, 1))
        strips = [strip.mean((2, 3)) for strip in maps.chunk(STRIPS, dim=3)]
        features = torch.stack(strips, dim=1)
        return features.reshape(batch, count * STRIPS, -1)


class Pillars(nn.Module):
    """Ragged points (N, 6) with offsets (B + 1) to a grid (B, C + BANDS, PILLARS, PILLARS)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.point = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, channels))
        self.channels = channels
        self.register_buffer("edges", torch.tensor(BAND_EDGES_M), persistent=False)

    def forward(self, points: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        batch = offsets.numel() - 1
        sample = torch.repeat_interleave(torch.arange(batch), offsets.diff())
        cell = ((points[:, :2] + REACH_M) * (PILLARS / (2 * REACH_M))).floor().long()
        inside = ((cell >= 0) & (cell < PILLARS)).all(1)
        points, cell, sample = points[inside], cell[inside], sample[inside]
        pillar = (sample * PILLARS + cell[:, 1]) * PILLARS + cell[:, 0]
        total = batch * PILLARS * PILLARS
        centre = (cell + 0.5) * (2 * REACH_M / PILLARS) - REACH_M
        inputs = torch.cat(
            [
                points[:, :2] - centre,
                points[:, 2:3],
                points[:, 3:4] / 255.0,
                points[:, 5:6] * 10.0,
                points[:, :2] / REACH_M,
            ],
            dim=1,
        )
        features = torch.relu(self.point(inputs))
        one = torch.ones(len(pillar))
        count = torch.zeros(total).index_add_(0, pillar, one)
        summed = torch.zeros(total, self.channels).index_add(0, pillar, features)
        mean = summed / count.clamp(min=1.0)[:, None]
        bands = torch.bucketize(points[:, 2].contiguous(), self.edges)
        layers = torch.zeros(total * BANDS).index_add_(0, pillar * BANDS + bands, one)
        layers = torch.log1p(layers.reshape(total, BANDS))
        grid = torch.cat([mean, layers], dim=1)
        return grid.reshape(batch, PILLARS, PILLARS, -1).permute(0, 3, 1, 2)


def strip_of_cell() -> torch.Tensor:
    """(CELLS * CELLS,) which camera strip looks at each cell of the grid (rows go forward)."""
    step = 2 * REACH_M / CELLS
    found = []
    for row in range(CELLS):
        for column in range(CELLS):
            x, y = (column + 0.5) * step - REACH_M, (row + 0.5) * step - REACH_M
            left_deg = math.degrees(math.atan2(-x, y))
            found.append(strip_at(left_deg))
    return torch.tensor(found)


def strip_at(left_deg: float) -> int:
    """The camera strip that looks `left_deg` degrees to the left of forward."""

    def aside(yaw_deg: float) -> float:
        return (left_deg - yaw_deg + 180.0) % 360.0 - 180.0

    camera = min(range(len(CAMERAS)), key=lambda i: abs(aside(list(CAMERAS.values())[i])))
    right = 0.5 - 0.5 * aside(list(CAMERAS.values())[camera]) / HALF_VIEW_DEG
    return camera * STRIPS + min(max(int(right * STRIPS), 0), STRIPS - 1)


class DrivingModel(nn.Module):
    """Pictures and points of B samples to occupancy and near-vehicle logits.

    Returns (B, CELLS, CELLS) logits of "a vehicle's centre is in this cell" and (B, 24) logits of
    "a vehicle within NEAR_M in this camera strip".
    """

    def __init__(self) -> None:
        super().__init__()
        self.cameras = Cameras(32)
        self.pillars = Pillars(24)
        self.grid = nn.Sequential(
            nn.Conv2d(24 + BANDS, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.fuse = nn.Sequential(
            nn.Conv2d(64, 48, 3, padding=1), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(48, 1, 1)
        )
        self.near = nn.Linear(32, 1)
        self.register_buffer("strip", strip_of_cell(), persistent=False)

    def forward(
        self, pictures: torch.Tensor, points: torch.Tensor, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        strips = self.cameras(pictures)
        seen = strips[:, self.strip].transpose(1, 2).reshape(len(strips), -1, CELLS, CELLS)
        grid = self.grid(self.pillars(points, offsets))
        return self.fuse(torch.cat([grid, seen], dim=1))[:, 0], self.near(strips)[:, :, 0]


def targets(
    boxes: torch.Tensor, offsets: torch.Tensor, names: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model should say, from boxes (N, 7) in the LiDAR frame with offsets (B + 1)."""
    batch = offsets.numel() - 1
    grid = torch.zeros(batch, CELLS, CELLS)
    near = torch.zeros(batch, len(CAMERAS) * STRIPS)
    bounds = offsets.tolist()
    for sample in range(batch):
        for i in range(bounds[sample], bounds[sample + 1]):
            x, y = float(boxes[i, 0]), float(boxes[i, 1])
            column, row = ((math.floor((v + REACH_M) * CELLS / (2 * REACH_M))) for v in (x, y))
            if not names[i].startswith("vehicle.") or not math.isfinite(x + y):
                continue
            if 0 <= column < CELLS and 0 <= row < CELLS:
                grid[sample, row, column] = 1.0
            if math.hypot(x, y) < NEAR_M:
                near[sample, strip_at(math.degrees(math.atan2(-x, y)))] = 1.0
    return grid, near


def loss_of(
    said: tuple[torch.Tensor, torch.Tensor],
    wanted: tuple[torch.Tensor, torch.Tensor],
    valid: torch.Tensor,
) -> torch.Tensor:
    """Mean over the valid samples of the batch; padding counts for nothing."""
    occupancy = functional.binary_cross_entropy_with_logits(
        said[0], wanted[0], reduction="none", pos_weight=torch.tensor(4.0)
    ).mean((1, 2))
    near = functional.binary_cross_entropy_with_logits(said[1], wanted[1], reduction="none").mean(1)
    weight = valid.to(torch.float32)
    return ((4.0 * occupancy + near) * weight).sum() / weight.sum().clamp(min=1.0)
