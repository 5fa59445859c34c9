"""Typed JSON gives values, types and text back, and refuses what it cannot."""

import collections
import enum
import math
import random
import sys

import numpy as np
import pytest
import torch
from drivetrain import _native
from drivetrain._checkpoint import typed_json as tj


def back(value):
    text = tj.dumps(tj.encode(value))
    again = tj.decode(tj.loads(text))
    assert tj.dumps(tj.encode(again)) == text, "the second text differs from the first"
    return again


def same(a, b):
    """Equal in type, value and order, down to the sign of zero and NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items())
        made = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        return made and len(a) == len(b) and all(same(x, y) for p, q in pairs for x, y in zip(p, q))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    return bool(a == b)


def name_of(value):
    return f"huge {type(value).__name__}" if type(value) is int and value > 2**70 else repr(value)


VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**63 - 1,
    -(2**63),
    2**63,
    -(10**40),
    10**6000,
    0.0,
    -0.0,
    1.0,
    0.1,
    5e-324,
    1.7976931348623157e308,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "~",
    "~tuple",
    "line\nbreak \u00e4 \u2603 \U0001f697 \x00",
    "lone \ud800 surrogate",
    b"",
    bytes(range(256)),
    [],
    (),
    {},
    [[]],
    ((),),
    {"": {}},
    {1: "int", "1": "str", -5: "minus", "~1": "tilde", "~~": "two"},
    {"~tuple": [1]},
    {"~float": "nan"},
    collections.OrderedDict([("b", 1), ("a", (2,))]),
    collections.OrderedDict(),
    collections.defaultdict(list, {"x": [1], 3: []}),
    collections.defaultdict(None, {"x": 1}),
    collections.Counter({30: 1, 80: 2}),
    torch.Size([2, 3]),
    torch.Size([]),
    torch.bfloat16,
    torch.device("cuda", 1),
    torch.device("cpu"),
    np.float32(0.1),
    np.float64(-0.0),
    np.float16("inf"),
    np.int8(-5),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.complex64(1 - 2j),
    np.datetime64("2026-11-30T12:00:00", "us"),
    np.str_("text"),
    np.str_(""),
    np.bytes_(b"raw"),
]


@pytest.mark.parametrize("value", VALUES, ids=name_of)
def test_value_and_type_come_back(value):
    assert same(back(value), value)
    assert same(back({"k": [value, (value,)]}), {"k": [value, (value,)]})


def test_longdouble_keeps_its_bits():
    value = np.longdouble("0.1")
    assert back(value) == value


def test_text_is_what_a_person_expects():
    value = {"a": [1, 2.5, "x", None, True], 7: (1,), "~odd": b"\x00\x01"}
    expected = '{"a":[1,2.5,"x",null,true],"~7":{"~tuple":[1]},"~~odd":{"~bytes":"AAE="}}'
    assert tj.dumps(tj.encode(value)) == expected


def test_paths_are_compact_json():
    import json

    for path in [(), ("a",), ("a", 5, "5", -3), ('"\\\n', "\u00e4 \u2028", "\x00\x7f")]:
        text = tj.path_json(path)
        assert text == json.dumps(list(path), ensure_ascii=False, separators=(",", ":"))
        assert tuple(json.loads(text)) == path


def random_value(rng, depth):
    leaves = [v for v in VALUES if not isinstance(v, (dict, list, tuple))]
    kind = rng.randrange(8 if depth else 2)
    if kind < 2:
        return rng.choice([*leaves, rng.random(), struct_float(rng), rng.getrandbits(70)])
    items = [random_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind < 4:
        return items if kind == 2 else tuple(items)
    keys = [
        rng.choice([rng.randrange(-9, 9), f"k{rng.randrange(9)}", "~x", "~3", "3"]) for _ in items
    ]
    make = rng.choice([dict, collections.OrderedDict, lambda p: collections.defaultdict(int, p)])
    return make(zip(keys, items))


def struct_float(rng):
    import struct

    value = struct.unpack("<d", rng.randbytes(8))[0]
    return value if math.isfinite(value) else 0.5


def test_random_trees_come_back():
    rng = random.Random(20261130)
    for case in range(2000):
        value = random_value(rng, 5)
        assert same(back(value), value), f"case {case}: {value!r}"


class Color(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


class Text(str):
    pass


REFUSED = [
    {1, 2},
    object(),
    len,
    lambda: 0,
    Color.RED,
    Point(1, 2),
    Text("x"),
    1j,
    bytearray(b"x"),
    collections.deque([1]),
    collections.defaultdict(lambda: 0),
    {(0, 1): "tuple key"},
    {None: 1},
    {True: 1},
    {1.5: 1},
    {2**70: 1},
    {"\ud800": 1},
    range(3),
]


@pytest.mark.parametrize("value", REFUSED, ids=name_of)
def test_everything_else_is_refused_with_its_path(value):
    with pytest.raises(_native.Unsupported) as caught:
        tj.encode({"extra": {"list": [0, value]}})
    assert "extra.list.1" in str(caught.value)
    assert (
        "allow_pickle=True" in str(caught.value)
        or "keys" in str(caught.value)
        or isinstance(value, collections.defaultdict)
    )


def test_cycles_and_depth_are_bounded():
    cycle = []
    cycle.append(cycle)
    with pytest.raises(_native.Unsupported, match="deep"):
        tj.encode(cycle)
    deep = 0
    for _ in range(tj.DEPTH_MAX):
        deep = (deep,)
    assert same(back(deep), deep)


DAMAGED = [
    '{"~unknown":1}',
    '{"~ddict":["eval",{}]}',
    '{"~dtype":"nn"}',
    '{"~dtype":"no_such"}',
    '{"~float":"x"}',
    '{"~int":"zz"}',
    '{"~bytes":"*"}',
    '{"~bytes":5}',
    '{"~x y":1,"~5x":2}',
    '{"~odict":[1]}',
    '{"~ddict":[]}',
    '{"~numpy":["no dtype",1]}',
    '{"~device":"moon"}',
    "[1,",
    "[" * 100_000,
]


@pytest.mark.parametrize("text", DAMAGED, ids=lambda t: t[:20])
def test_damaged_text_is_a_typed_error(text):
    with pytest.raises(_native.Corrupt):
        tj.decode(tj.loads(text))


def test_torch_and_numpy_are_not_imported_for_plain_values(tmp_path):
    import subprocess

    code = (
        "import sys; from drivetrain._checkpoint import typed_json as tj\n"
        "from drivetrain._checkpoint.tree import Snapshot\n"
        "s = Snapshot(0, 1); s.add_all({'a': {'n': 1, 'l': [1.5, (None,)]}}); s.state_json()\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
