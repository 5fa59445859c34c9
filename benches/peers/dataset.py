"""The data both sides read: a synthetic nuScenes tree, and what the peers need to read it.

The peers get a plain list of files and matrices, made here with numpy from the JSON tables alone,
so that nothing of ours helps or hinders them.
"""

import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np

CAMERAS = ("FRONT", "FRONT_LEFT", "FRONT_RIGHT", "BACK", "BACK_LEFT", "BACK_RIGHT")
SWEEPS = 9
SCENES, KEYFRAMES = 4, 40
LIDAR_POINTS = 34_600


def drivetrain_program():
    """The `drivetrain` script of this interpreter's environment."""
    return pathlib.Path(sys.executable).with_name("drivetrain")


def make(work):
    """Writes the data set below `work` once and returns (root, plan)."""
    root, plan_file = work / "nuscenes", work / "plan.json"
    if not plan_file.exists():
        half = work / "nuscenes.making"
        shutil.rmtree(half, ignore_errors=True)
        command = [drivetrain_program(), "synth", half, "--scenes", str(SCENES)]
        command += ["--keyframes", str(KEYFRAMES), "--seed", "7"]
        command += ["--image-size", "1600x900", "--lidar-points", str(LIDAR_POINTS)]
        if not root.exists():
            subprocess.run([str(c) for c in command], check=True)
            half.rename(root)
        plan_file.write_text(json.dumps(read_plan(root)))
    return root, json.loads(plan_file.read_text())


def rigid(record):
    """4x4 from a table record with rotation (w, x, y, z) and translation."""
    w, x, y, z = record["rotation"]
    out = np.eye(4)
    out[:3, :3] = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    out[:3, 3] = record["translation"]
    return out


def read_plan(root):
    """Per keyframe: six image paths, ten sweep paths, their matrices and ages."""
    tables = next(p for p in root.iterdir() if p.name.startswith("v1.0-"))

    def table(name):
        return {r["token"]: r for r in json.loads((tables / f"{name}.json").read_text())}

    data, poses, mounts = table("sample_data"), table("ego_pose"), table("calibrated_sensor")
    sensors = table("sensor")

    def channel(record):
        return sensors[mounts[record["calibrated_sensor_token"]]["sensor_token"]]["channel"]

    def to_global(record):
        mount = mounts[record["calibrated_sensor_token"]]
        return rigid(poses[record["ego_pose_token"]]) @ rigid(mount)

    keyframes = {}
    for record in data.values():
        if record["is_key_frame"]:
            keyframes.setdefault(record["sample_token"], {})[channel(record)] = record
    plan = []
    for sample, channels in keyframes.items():
        lidar = channels["LIDAR_TOP"]
        chain = [lidar]
        while len(chain) <= SWEEPS and chain[-1]["prev"]:
            chain.append(data[chain[-1]["prev"]])
        here = np.linalg.inv(to_global(lidar))
        plan.append(
            {
                "sample": sample,
                "images": [str(root / channels[f"CAM_{c}"]["filename"]) for c in CAMERAS],
                "sweeps": [str(root / r["filename"]) for r in chain],
                "matrices": [(here @ to_global(r)).tolist() for r in chain],
                "dt_s": [(lidar["timestamp"] - r["timestamp"]) / 1e6 for r in chain],
            }
        )
    return plan


def litdata_folder(work, plan, kind):
    """The same samples in LitData's own chunks, written once per kind (images, lidar)."""
    folder = work / f"litdata-{kind}"
    if not (folder / "index.json").exists():
        import litdata

        inputs = [(kind, item) for item in plan]
        litdata.optimize(
            fn=litdata_sample,
            inputs=inputs,
            output_dir=str(folder),
            chunk_bytes="64MB",
            num_workers=1,
        )
    return folder


def litdata_sample(pair):
    """One sample as LitData stores it: the file bytes, and for LiDAR the matrices."""
    kind, item = pair
    files = item["images"] if kind == "images" else item["sweeps"]
    out = {f"f{i}": pathlib.Path(p).read_bytes() for i, p in enumerate(files)}
    if kind == "lidar":
        out["matrices"] = json.dumps([item["matrices"], item["dt_s"]])
    return out
