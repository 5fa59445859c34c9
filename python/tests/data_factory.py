"""Small data sets made on the spot: nuScenes-layout trees by the synthesiser, WebDataset tars."""

import io
import json
import tarfile
from pathlib import Path

from drivetrain import _native

CAMERAS = (
    "CAM_FRONT",
    "CAM_FRONT_RIGHT",
    "CAM_FRONT_LEFT",
    "CAM_BACK",
    "CAM_BACK_LEFT",
    "CAM_BACK_RIGHT",
)


def nuscenes(root: Path, scenes: int = 1, keyframes: int = 6, seed: int = 3) -> Path:
    """A tree of six small cameras and one small LiDAR."""
    arguments = ["--scenes", str(scenes), "--keyframes", str(keyframes), "--seed", str(seed)]
    size = ["--image-size", "160x96", "--lidar-points", "1500", "--threads", "1"]
    assert _native.cli_main(["drivetrain", "synth", str(root), *arguments, *size, "--json"]) == 0
    return root


def webdataset(path: Path, samples: list[dict[str, bytes]], prefix: str = "s") -> Path:
    """A tar with one run of members per sample: `{extension: bytes}`."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number, sample in enumerate(samples):
            for extension, content in sample.items():
                member = tarfile.TarInfo(f"{prefix}{number:05d}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


def blobs(count: int, size: int = 1000) -> list[dict[str, bytes]]:
    """Samples of bytes, an integer as text and a JSON object, all functions of their number."""
    return [
        {
            "bin": bytes((i * 7 + k) % 256 for k in range(size + i % 13)),
            "txt": f"sample {i}".encode(),
            "json": json.dumps({"i": i}).encode(),
        }
        for i in range(count)
    ]


def number(key: str) -> int:
    """Number of a sample made here, from its key."""
    return int(key.rsplit("s", 1)[-1])


def sparse_webdataset(path: Path, sizes: list[int]) -> Path:
    """A tar of one `bin` member per sample whose contents are holes: large, but quick to make."""
    with open(path, "wb") as file:
        for number_, size in enumerate(sizes):
            member = tarfile.TarInfo(f"s{number_:05d}.bin")
            member.size = size
            file.write(member.tobuf(tarfile.USTAR_FORMAT))
            file.seek(-(-size // 512) * 512, io.SEEK_CUR)
        file.write(bytes(1024))
    return path
