"""Values of the image and points kernels against Pillow, torch and numpy."""

import io
import json
import os
import pathlib
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from drivetrain import _native
from PIL import Image

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
DATA = pathlib.Path(os.environ.get("DRIVETRAIN_TEST_DATA", REPOSITORY / "../shared/data"))

IMAGENET = {"mean": (123.675, 116.28, 103.53), "std": (58.395, 57.12, 57.375)}


def need(path):
    if not (DATA / path).exists():
        pytest.skip(f"skipped: no {path} in the test data")
    return DATA / path


def transform(data, **arguments):
    """Returns (array, decoder, scale)."""
    base = {
        "size": None,
        "crop": None,
        "mean": None,
        "std": None,
        "dtype": "float32",
        "layout": "CHW",
        "exact": False,
    }
    spec = SimpleNamespace(**(base | arguments))
    buffer, shape, decoder, scale = _native.transform_image(data, spec, "picture.jpg")
    if spec.dtype == "bfloat16":
        bits = np.frombuffer(buffer, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(shape), decoder, scale
    return np.frombuffer(buffer, spec.dtype).reshape(shape), decoder, scale


def levels(data, **arguments):
    """(H, W, 3) as int64."""
    return transform(data, layout="HWC", **arguments)[0].astype(np.int64)


def encode(array, mode="RGB", **arguments):
    file = io.BytesIO()
    Image.fromarray(array, mode).save(file, arguments.pop("format", "JPEG"), **arguments)
    return file.getvalue()


def scene(height, width, seed=0):
    """A smooth picture with edges, (height, width, 3) uint8."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (9, 16, 3), np.uint8))
    picture = np.array(small.resize((width, height), Image.BICUBIC))
    picture[height // 3 : height // 2, width // 4 : width // 2] = (250, 20, 60)
    return picture


def has_turbo():
    return transform(encode(scene(8, 8)))[1] == "libjpeg-turbo"


# libjpeg-turbo is what Pillow decodes with; zune-jpeg's chroma differs by a few levels.
DECODER_TOLERANCE = 0 if has_turbo() else 4


def pillow(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(np.int64)


def test_every_jpeg_decodes_like_pillow_or_is_refused_like_pillow():
    folder = need("jpeg")
    for path in sorted(folder.glob("*.jpg")):
        data = path.read_bytes()
        try:
            want = pillow(data)
        except OSError:
            with pytest.raises(_native.Corrupt, match=r"picture\.jpg"):
                levels(data, dtype="uint8")
            continue
        try:
            got = levels(data, dtype="uint8")
        except _native.Unsupported:
            assert not has_turbo(), path.name
            continue
        assert got.shape == want.shape, path.name
        assert abs(got - want).max() <= DECODER_TOLERANCE, path.name


def test_png_like_pillow():
    folder = need("png")
    for name in ("ljt_monkey16.png", "pngsuite_basn2c16.png", "pngsuite_basn3p04.png"):
        data = (folder / name).read_bytes()
        assert (levels(data, dtype="uint8") == pillow(data)).all(), name


@pytest.mark.parametrize("size", [(256, 704), (320, 800), (111, 333), (1000, 1900)])
def test_exact_resize_is_pillows_bilinear_within_a_level(size):
    path = need("nuscenes_demo/n015-2018-07-24-11-22-45+0800__CAM_FRONT__1532402927612460.jpg")
    data = path.read_bytes()
    resized = Image.open(path).convert("RGB").resize(size[::-1], Image.BILINEAR)
    got = levels(data, size=size, dtype="uint8", exact=True)
    difference = abs(got - np.asarray(resized).astype(np.int64))
    assert difference.max() <= 1 + DECODER_TOLERANCE
    assert difference.mean() < 0.2


@pytest.mark.parametrize("size", [(256, 704), (320, 800), (112, 200)])
def test_scaled_decode_stays_close(size):
    path = need("nuscenes_demo/n015-2018-07-24-11-22-45+0800__CAM_BACK__1532402927637525.jpg")
    data = path.read_bytes()
    exact, _, one = transform(data, size=size, exact=True)
    scaled, decoder, scale = transform(data, size=size)
    assert one == (1, 1)
    if decoder == "libjpeg-turbo":
        assert scale == ((1, 4) if size == (112, 200) else (1, 2))
    # A picture halved in the DCT domain is sharper than one halved by the triangle filter.
    assert abs(exact - scaled).mean() < 1.0
    assert np.quantile(abs(exact - scaled), 0.999) < 12


@pytest.mark.parametrize("height,width", [(37, 53), (64, 64), (1, 1), (17, 400), (201, 3)])
@pytest.mark.parametrize("size", [(24, 40), (65, 31), (1, 1)])
def test_float_resize_is_torchs_antialiased_bilinear(height, width, size):
    torch = pytest.importorskip("torch")
    data = encode(scene(height, width), quality=92)
    full = levels(data, dtype="uint8", exact=True)
    source = torch.from_numpy(full).permute(2, 0, 1)[None].double()
    want = torch.nn.functional.interpolate(source, size, mode="bilinear", antialias=True)[0]
    got, _, _ = transform(data, size=size, exact=True)
    # Weights have 14 fraction bits and rows 7: far below half a level.
    assert abs(got - want.numpy()).max() < 0.1


@pytest.mark.parametrize(
    "dtype,tolerance", [("float32", 1e-5), ("float16", 2e-3), ("bfloat16", 2e-2)]
)
@pytest.mark.parametrize("layout", ["CHW", "HWC"])
def test_normalise_every_dtype_and_layout(dtype, tolerance, layout):
    data = encode(scene(45, 80))
    full = levels(data, dtype="uint8", exact=True)
    want = (full - np.array(IMAGENET["mean"])) / np.array(IMAGENET["std"])
    want = want.transpose(2, 0, 1) if layout == "CHW" else want
    got, _, _ = transform(data, dtype=dtype, layout=layout, **IMAGENET)
    assert got.shape == want.shape
    assert abs(got.astype(np.float64) - want).max() <= tolerance


@pytest.mark.parametrize("crop", [(0, 0, 45, 80), (3, 7, 30, 41), (44, 79, 1, 1), (10, 0, 20, 80)])
@pytest.mark.parametrize("size", [None, (15, 20), (33, 90)])
def test_crop_then_resize_ignores_what_is_outside(crop, size):
    y, x, h, w = crop
    data = encode(scene(45, 80))
    inside = Image.fromarray(levels(data, dtype="uint8", exact=True).astype(np.uint8)).crop(
        (x, y, x + w, y + h)
    )
    want = inside.resize((size or (h, w))[::-1], Image.BILINEAR)
    got = levels(data, crop=crop, size=size, dtype="uint8", exact=True)
    assert abs(got - np.asarray(want).astype(np.int64)).max() <= 1


def test_scaled_crop_lands_on_the_same_place():
    data = encode(scene(450, 800, seed=5), quality=95)
    arguments = {"crop": (101, 203, 256, 400), "size": (64, 100)}
    exact, _, _ = transform(data, exact=True, **arguments)
    scaled, _, _ = transform(data, **arguments)
    # Half a pixel of shift would show at the painted rectangle's edges and in the mean.
    assert abs(exact - scaled).mean() < 0.6


def test_grey_and_cmyk_become_rgb():
    grey = encode(scene(40, 60)[:, :, 0], "L")
    got = levels(grey, dtype="uint8")
    assert (got[..., 0] == got[..., 1]).all() and (got[..., 0] == got[..., 2]).all()
    assert abs(got - pillow(grey)).max() <= DECODER_TOLERANCE
    inks = np.dstack([scene(40, 60), scene(40, 60, seed=3)[:, :, 0]])
    cmyk = encode(inks, "CMYK", quality=95)
    assert abs(levels(cmyk, dtype="uint8") - pillow(cmyk)).max() <= DECODER_TOLERANCE


@pytest.mark.parametrize("arguments", [{}, {"progressive": True}, {"subsampling": "4:4:4"}])
def test_truncation_is_an_error_at_every_length(arguments):
    data = encode(scene(64, 96), **arguments)
    for cut in [*range(0, len(data) - 1, 97), len(data) - 1]:
        with pytest.raises(_native.Corrupt, match=r"picture\.jpg"):
            transform(data[:cut])


# Without libjpeg-turbo a progressive picture's scans are not counted: docs/transforms.md.
@pytest.mark.parametrize("arguments", [{}, {"progressive": True}] if has_turbo() else [{}])
def test_missing_middle_with_the_end_marker_kept_is_an_error(arguments):
    data = encode(scene(128, 192), quality=90, **arguments)
    with pytest.raises(_native.Corrupt, match=r"picture\.jpg"):
        transform(data[: len(data) // 2] + b"\xff\xd9")


def test_wrong_arguments_are_named():
    data = encode(scene(8, 8))
    for arguments, word in [
        ({"crop": (0, 0, 9, 8)}, "crop"),
        ({"size": (0, 8)}, "size"),
        ({"dtype": "float8"}, "dtype"),
        ({"layout": "WHC"}, "layout"),
        ({"dtype": "uint8", **IMAGENET}, "uint8"),
    ]:
        with pytest.raises(_native.InvalidArgument, match=word):
            transform(data, **arguments)
    with pytest.raises(_native.Corrupt, match="start marker"):
        transform(b"not a picture")


def gather(clouds, stored=5, **arguments):
    """Returns ((N, C) float32, names)."""
    base = {"sweeps": 0, "range": None, "columns": None, "remove_close_m": None}
    names = ["x", "y", "z", "intensity", "ring"][:stored]
    spec = SimpleNamespace(**(base | arguments))
    clouds = [
        (c.astype("<f4").tobytes(), None if m is None else list(m.ravel()), t) for c, m, t in clouds
    ]
    buffer, count, names = _native.transform_points(clouds, names, stored, spec)
    return np.frombuffer(buffer, np.float32).reshape(count, len(names)), names


def random_pose(rng):
    angle = rng.uniform(-0.3, 0.3)
    pose = np.eye(4)
    pose[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    pose[:3, 3] = rng.uniform(-5, 5, 3)
    return pose


def test_sweeps_move_filter_and_get_their_time():
    rng = np.random.default_rng(1)
    limits = (-51.2, -51.2, -5.0, 51.2, 51.2, 3.0)
    clouds, want = [], []
    for sweep in range(4):
        cloud = (rng.normal(size=(900, 5)) * [30, 30, 2, 50, 9]).astype(np.float32)
        cloud[:50, :2] = rng.uniform(-1.5, 1.5, (50, 2))
        pose = random_pose(rng) if sweep else None
        clouds.append((cloud, pose, 0.05 * sweep))
        moved = cloud.copy()
        if sweep:
            keep = ~((abs(cloud[:, 0]) < 1) & (abs(cloud[:, 1]) < 1))
            homogeneous = np.c_[cloud[:, :3].astype(np.float64), np.ones(len(cloud))]
            moved[:, :3] = (homogeneous @ pose.T)[:, :3]
            moved = moved[keep]
        moved = np.c_[moved, np.full(len(moved), np.float32(0.05 * sweep))]
        xyz, low, high = moved[:, :3], np.float32(limits[:3]), np.float32(limits[3:])
        want.append(moved[((xyz > low) & (xyz < high)).all(1)])
    want = np.concatenate(want).astype(np.float32)
    got, names = gather(clouds, sweeps=3, range=limits, remove_close_m=1.0)
    assert names == ["x", "y", "z", "intensity", "ring", "dt_s"]
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-5)
    assert (got[:, 3:] == want[:, 3:]).all()
    chosen, names = gather(
        clouds, sweeps=3, range=limits, remove_close_m=1.0, columns=["dt_s", "z", "ring"]
    )
    assert (chosen == got[:, [5, 2, 4]]).all()


def test_real_keyframe_in_range_count():
    path = need("nuscenes_demo/n015-2018-07-24-11-22-45+0800__LIDAR_TOP__1532402927647951.pcd.bin")
    joins = json.loads((DATA / "expected.json").read_text())["joins"]
    expected = joins["nuscenes_pillars_0.2m"]["points_in_range_strict_compare"]
    cloud = np.fromfile(path, "<f4").reshape(-1, 5)
    got, _ = gather([(cloud, None, 0.0)], range=(-51.2, -51.2, -5.0, 51.2, 51.2, 3.0))
    assert len(got) == expected


@pytest.mark.parametrize("close", [None, 1.0])
def test_real_sweeps_match_the_geometrically_right_reference(close):
    """nus_info.pkl's second sample: its one stored sweep, twice."""
    info = pickle.loads(need("nuscenes/nus_info.pkl").read_bytes())["data_list"][1]
    joins = json.loads((DATA / "expected.json").read_text())["joins"]["nuscenes_multi_sweep"]
    want = joins["results"][f"exact_inverse,remove_close={close is not None}"]

    def cloud(folder, entry):
        file = DATA / "nuscenes" / folder / "LIDAR_TOP" / pathlib.Path(entry["lidar_path"]).name
        return np.fromfile(file, "<f4").reshape(-1, 5)

    clouds = [(cloud("samples", info["lidar_points"]), None, 0.0)]
    for sweep in info["lidar_sweeps"]:
        points = sweep["lidar_points"]
        key_to_sweep = points.get("lidar2sensor", points.get("lidar2cam", sweep.get("lidar2cam")))
        seconds = info["timestamp"] - sweep["timestamp"]
        clouds.append((cloud("sweeps", points), np.linalg.inv(np.array(key_to_sweep)), seconds))
    columns = ["x", "y", "z", "intensity", "dt_s"]
    got, _ = gather(clouds, sweeps=10, remove_close_m=close, columns=columns)
    assert len(got) == want["points"]
    np.testing.assert_allclose(got[0], want["first"], rtol=1e-6)
    np.testing.assert_allclose(got[len(clouds[0][0])], want["first_of_sweep"], rtol=1e-5)
    np.testing.assert_allclose(got[-1], want["last"], rtol=1e-5)
    np.testing.assert_allclose(got.astype(np.float64).sum(0), want["sum"], rtol=1e-6)


def test_broken_record_size_is_named():
    spec = SimpleNamespace(sweeps=0, range=None, columns=None, remove_close_m=None)
    with pytest.raises(_native.Corrupt, match="multiple of 20 bytes"):
        _native.transform_points([(b"\0" * 33, None, 0.0)], [], 5, spec)
    with pytest.raises(_native.InvalidArgument, match="range"):
        gather([(np.zeros((1, 5)), None, 0.0)], range=(1, 0, 0, 0, 1, 1))
    with pytest.raises(_native.InvalidArgument, match="colour"):
        gather([(np.zeros((1, 5)), None, 0.0)], columns=["colour"])


def test_native_memory_is_wrapped_without_a_copy_and_outlives_its_owner():
    torch = pytest.importorskip("torch")
    data = encode(scene(16, 16))
    spec = SimpleNamespace(
        size=None, crop=None, mean=None, std=None, dtype="uint8", layout="HWC", exact=True
    )
    buffer, shape, _, _ = _native.transform_image(data, spec, "a")
    assert len(buffer) == 16 * 16 * 3 and buffer.writable
    array = np.frombuffer(buffer, np.uint8)
    tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    array.reshape(shape)[0, 0, 0] = 77
    del buffer
    assert tensor[0] == 77 and array.flags.writeable
