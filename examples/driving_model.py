"""A small multi-camera + LiDAR model: where around the car do vehicles stand?

It is an example, not a benchmark: about 65,000 parameters that learn in a minute on two cores.
Pictures go through a tiny CNN, points through a tiny PointNet on 2 m pillars; both meet on a
bird's-eye grid of 16 x 16 cells of 4 m around the LiDAR (x right, y forward). A second head has
the pictures alone: in which directions is a vehicle near?
"""

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
#: Parts of a strip from top to bottom: how low a vehicle stands in a picture tells how near it is.
LEVELS = 4
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
#: What a vehicle covers nearer than this counts for the cameras' own head, metres.
NEAR_M = 12.0
#: Points per side at which a vehicle's outline from above is looked at, along and across.
OUTLINE = (5, 3)
#: Share of the two heads in the loss.
OCCUPANCY_WEIGHT, NEAR_WEIGHT = 4.0, 2.0
#: Columns of a point: x, y, z, intensity, ring, dt_s.
POINT_COLUMNS = 6


class Cameras(nn.Module):
    """(B, 6, 3, H, W) pictures to (B, 6 * STRIPS, C * LEVELS) features, one row per strip."""

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
        cells = functional.adaptive_avg_pool2d(maps, (LEVELS, STRIPS))
        return cells.permute(0, 3, 1, 2).reshape(batch, count * STRIPS, -1)


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
    middle = (torch.arange(CELLS) + 0.5) * (2 * REACH_M / CELLS) - REACH_M
    y, x = torch.meshgrid(middle, middle, indexing="ij")
    return strip_at(x, y).flatten()


def strip_at(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The camera strip that looks towards points (x right, y forward), of their shape."""
    left_deg = torch.rad2deg(torch.atan2(-x, y))
    aside = (left_deg[..., None] - torch.tensor(list(CAMERAS.values())) + 180.0) % 360.0 - 180.0
    camera = aside.abs().argmin(-1, keepdim=True)
    right = 0.5 - 0.5 * aside.gather(-1, camera) / HALF_VIEW_DEG
    strip = camera * STRIPS + (right * STRIPS).floor().clamp(0, STRIPS - 1).long()
    return strip[..., 0]


class DrivingModel(nn.Module):
    """Pictures and points of B samples to occupancy and near-vehicle logits.

    Returns (B, CELLS, CELLS) logits of "a vehicle's centre is in this cell" and (B, 24) logits of
    "a vehicle reaches within NEAR_M in this camera strip".
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
        self.near = nn.Sequential(nn.Linear(32 * LEVELS, 32), nn.ReLU(), nn.Linear(32, 1))
        self.look = nn.Linear(32 * LEVELS, 32)
        self.register_buffer("strip", strip_of_cell(), persistent=False)

    def forward(
        self, pictures: torch.Tensor, points: torch.Tensor, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        strips = self.cameras(pictures)
        seen = self.look(strips)[:, self.strip].transpose(1, 2)
        seen = seen.reshape(len(strips), -1, CELLS, CELLS)
        grid = self.grid(self.pillars(points, offsets))
        return self.fuse(torch.cat([grid, seen], dim=1))[:, 0], self.near(strips)[:, :, 0]


def outlines(boxes: torch.Tensor) -> torch.Tensor:
    """Boxes (N, 7) to (N, 15, 2) points that cover each from above, x and y in metres."""
    along, across = (torch.linspace(-0.5, 0.5, count) for count in OUTLINE)
    inside = torch.cartesian_prod(along, across)
    ahead, aside = (inside * boxes[:, None, 3:5]).unbind(-1)
    cos, sin = torch.cos(boxes[:, 6:7]), torch.sin(boxes[:, 6:7])
    turned = torch.stack([ahead * cos - aside * sin, ahead * sin + aside * cos], dim=-1)
    return boxes[:, None, :2] + turned


def targets(
    boxes: torch.Tensor, offsets: torch.Tensor, names: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model should say, from boxes (N, 7) in the LiDAR frame with offsets (B + 1)."""
    batch = offsets.numel() - 1
    grid = torch.zeros(batch, CELLS, CELLS)
    near = torch.zeros(batch, len(CAMERAS) * STRIPS)
    sample = torch.repeat_interleave(torch.arange(batch), offsets.diff())
    wanted = torch.tensor([name.startswith("vehicle.") for name in names], dtype=torch.bool)
    wanted &= boxes.isfinite().all(1)
    boxes, sample = boxes[wanted], sample[wanted]
    cell = ((boxes[:, :2] + REACH_M) * (CELLS / (2 * REACH_M))).floor().long()
    inside = ((cell >= 0) & (cell < CELLS)).all(1)
    grid[sample[inside], cell[inside, 1], cell[inside, 0]] = 1.0
    points = outlines(boxes)
    close = points.norm(dim=-1) < NEAR_M
    strip = strip_at(points[..., 0], points[..., 1])
    near[sample[:, None].expand_as(strip)[close], strip[close]] = 1.0
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
    both = OCCUPANCY_WEIGHT * occupancy + NEAR_WEIGHT * near
    return (both * weight).sum() / weight.sum().clamp(min=1.0)
