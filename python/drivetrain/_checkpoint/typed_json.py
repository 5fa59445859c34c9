"""Typed JSON: Python values as JSON text that gives the same values, and the same text, back.

Plain values look like plain JSON. What JSON cannot say is an object with one key that starts
with ``~`` and a letter:

====================  =====================================================================
``{"~tuple": [..]}``   a tuple; ``~size`` is a ``torch.Size``
``{"~float": "nan"}``  ``nan``, ``inf`` or ``-inf``
``{"~int": "0x.."}``   an integer outside int64
``{"~bytes": ".."}``   bytes in base64; ``~str`` is a string with lone surrogates
``{"~odict": {..}}``   an ``OrderedDict``; ``~counter`` is a ``Counter``
``{"~ddict": [f, {}]}``  a ``defaultdict``, ``f`` one of `FACTORIES` or null
``{"~numpy": [d, v]}``  a numpy scalar of dtype ``d``
``{"~dtype": ".."}``   a ``torch.dtype``; ``~device`` is a ``torch.device``
====================  =====================================================================

The key of an int is ``~`` and its digits (``{"~5": ..}``); a string key that starts with ``~`` gets
one more. So a tag never meets a user's key. Whoever walks a tree may add tags of its own (tensors,
values per rank) through the ``leaf`` hook.
"""

import base64
import json
import math
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any

from drivetrain._native import Corrupt, DrivetrainError, Unsupported

Key = str | int
Path = tuple[Key, ...]
#: Sees every value first; returns its node, or None to leave it to this module.
EncodeLeaf = Callable[[Any, Path], Any]
#: Sees the content of every tag this module does not know; raises `KeyError` if it is no tag.
DecodeLeaf = Callable[[str, Any, Path], Any]

#: Containers inside containers. The usual JSON readers stop at 128 levels and a tagged container
#: takes up to three.
DEPTH_MAX = 36
INT_MIN, INT_MAX = -(2**63), 2**63 - 1

#: Nodes that hold no others.
_LEAVES = frozenset((type(None), bool, int, float, str))

_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode

#: The factories a defaultdict may have; a name from a file never becomes anything else.
FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind
    for kind in (int, float, str, bytes, bool, list, dict, set, tuple, OrderedDict, Counter)
}

ADVICE = (
    "keep None, bool, int, float, str, bytes, tensors, numpy values, list, tuple, dict, "
    "OrderedDict, defaultdict, Counter, or open the Checkpointer with allow_pickle=True"
)


def format_path(path: Path) -> str:
    """The keys joined by dots, for messages."""
    return ".".join(str(key) for key in path) or "the state"


def dotted(path: str) -> str:
    """The same of a tensor's name on disk; nothing for none."""
    return format_path(tuple(json.loads(path))) if path else ""


def path_json(path: Path) -> str:
    """The compact JSON array of keys that names a tensor on disk."""
    # by hand, since a save does it for every tensor
    keys = (str(key) if isinstance(key, int) else encode_basestring(key) for key in path)
    return f"[{','.join(keys)}]"


@dataclass(frozen=True)
class Text:
    """A node whose text is known."""

    text: str


def dumps(node: Any) -> str:
    """The compact text of a node made by `encode`."""
    return _compact(node)


def dumps_with_texts(node: Any) -> str:
    """The same for nodes that hold a `Text` anywhere."""
    if type(node) is Text:
        return node.text
    if type(node) is dict:
        items = node.items()
        texts = [f"{encode_basestring(key)}:{dumps_with_texts(value)}" for key, value in items]
        return f"{{{','.join(texts)}}}"
    if type(node) is list and not _LEAVES.issuperset(map(type, node)):
        return f"[{','.join(map(dumps_with_texts, node))}]"
    return _compact(node)


def loads(text: str) -> Any:
    """The node in a text made by `dumps`; `Corrupt` if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"checkpoint state is not JSON: {error}; restore another step") from None


def refuse(value: Any, path: Path, advice: str = ADVICE) -> Unsupported:
    """The error for a value that cannot be stored."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return Unsupported(f"{format_path(path)}: {kind} in a checkpoint is not supported: {advice}")


def encode_key(key: Any, path: Path) -> str:
    """A dict key as a JSON key: strings as they are, ints behind ``~``."""
    if type(key) is int and INT_MIN <= key <= INT_MAX:
        return f"~{key}"
    if type(key) is str and is_utf8(key):
        return "~" + key if key.startswith("~") else key
    raise refuse(key, path, "keys of dicts are str (valid Unicode) or int (64 bit)")


def decode_key(key: str) -> Key:
    """The dict key that `encode_key` was given."""
    if not key.startswith("~"):
        return key
    return key[1:] if key.startswith("~~") else int(key[1:])


def is_utf8(text: str) -> bool:
    """False for strings with lone surrogates, which JSON readers refuse."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encode(value: Any, leaf: EncodeLeaf | None = None, path: Path = ()) -> Any:
    """Turns a value into a node for `dumps`.

    Raises `Unsupported` with the path of a value that has no form here.
    """
    if leaf is not None and (node := leaf(value, path)) is not None:
        return node
    kind = type(value)
    if kind in _SCALARS:
        return _SCALARS[kind](value)
    if kind in _CONTAINERS:
        if len(path) > DEPTH_MAX:
            raise refuse(value, path, f"containers nest at most {DEPTH_MAX} deep, or a cycle")
        return _CONTAINERS[kind](value, leaf, path)
    node = _encode_library(value)
    if node is None:
        raise refuse(value, path)
    return node


def decode(node: Any, leaf: DecodeLeaf | None = None, path: Path = ()) -> Any:
    """The value that `encode` was given; `Corrupt` for nodes that `encode` cannot make."""
    try:
        return _decode(node, leaf, path)
    except DrivetrainError:
        raise
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        where = format_path(path)
        raise Corrupt(f"{where}: checkpoint state cannot be read: {error!r}") from error


def tag_of(node: Any) -> str | None:
    """The tag of a tagged node (without ``~``), else None."""
    if isinstance(node, dict) and len(node) == 1:
        (key,) = node
        if len(key) > 1 and key[0] == "~" and key[1].isalpha():
            return key[1:]
    return None


def _decode(node: Any, leaf: DecodeLeaf | None, path: Path) -> Any:
    if isinstance(node, list):
        return [_decode(item, leaf, (*path, i)) for i, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    tag = tag_of(node)
    if tag is None:
        return _decode_items(node, leaf, path)
    content = node["~" + tag]
    if tag in _TAGS:
        return _TAGS[tag](content, leaf, path)
    if leaf is None:
        raise Corrupt(f"{format_path(path)}: unknown tag ~{tag}; a newer version wrote it")
    return leaf(tag, content, path)


def _decode_items(node: dict, leaf: DecodeLeaf | None, path: Path) -> dict:
    keys = {text: decode_key(text) for text in node}
    return {key: _decode(node[text], leaf, (*path, key)) for text, key in keys.items()}


def _encode_items(value: dict, leaf: EncodeLeaf | None, path: Path) -> dict:
    return {encode_key(k, path): encode(v, leaf, (*path, k)) for k, v in value.items()}


def _encode_list(value: Any, leaf: EncodeLeaf | None, path: Path) -> list:
    return [encode(item, leaf, (*path, i)) for i, item in enumerate(value)]


def _encode_defaultdict(value: defaultdict, leaf: EncodeLeaf | None, path: Path) -> dict:
    factory = value.default_factory
    if factory is None:
        name = None
    else:
        name = next((n for n, f in FACTORIES.items() if f is factory), None)
        if name is None:
            known = ", ".join(FACTORIES)
            raise refuse(value, path, f"the factory of a defaultdict is one of {known}")
    return {"~ddict": [name, _encode_items(value, leaf, path)]}


def _encode_float(value: float) -> Any:
    return value if math.isfinite(value) else {"~float": repr(value)}


def _encode_int(value: int) -> Any:
    # hex, since Python refuses to print very long decimals
    return value if INT_MIN <= value <= INT_MAX else {"~int": hex(value)}


def _encode_str(value: str) -> Any:
    return value if is_utf8(value) else {"~str": _base64(value.encode("utf-8", "surrogatepass"))}


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def from_base64(text: str) -> bytes:
    """The bytes of a base64 text; `ValueError` if it is none."""
    return base64.b64decode(text, validate=True)


def _encode_library(value: Any) -> Any:
    """Values of torch and numpy; neither is imported for values that cannot be theirs."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None:
        if isinstance(value, torch.Size):
            return {"~size": [int(n) for n in value]}
        if isinstance(value, torch.dtype):
            return {"~dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"~device": str(value)}
    if numpy is not None and isinstance(value, numpy.generic):
        return _encode_numpy(value, numpy)
    return None


def _encode_numpy(value: Any, numpy: Any) -> Any:
    dtype = value.dtype
    name = dtype.name if dtype.kind == "V" else dtype.str
    if dtype.names is not None or dtype.hasobject or type(value) is numpy.void:
        return None
    if dtype.kind == "b":
        return {"~numpy": [name, bool(value)]}
    if dtype.kind in "iu":
        return {"~numpy": [name, _encode_int(int(value))]}
    if dtype.kind == "f" and dtype.itemsize <= 8:
        return {"~numpy": [name, _encode_float(float(value))]}
    return {"~numpy": [name, {"~bytes": _base64(numpy.asarray(value).tobytes())}]}


def numpy_dtype(name: str) -> Any:
    """The numpy dtype of a name, also those ml_dtypes adds."""
    import numpy

    try:
        return numpy.dtype(name)
    except TypeError:
        import ml_dtypes

        return numpy.dtype(getattr(ml_dtypes, name))


def _decode_numpy(content: Any, _leaf: DecodeLeaf | None, _path: Path) -> Any:
    import numpy

    dtype = numpy_dtype(content[0])
    value = _decode(content[1], None, ())
    if not isinstance(value, bytes):
        return dtype.type(value)
    return numpy.frombuffer(value, dtype)[0] if dtype.itemsize else dtype.type()


def _decode_dtype(content: str, _leaf: DecodeLeaf | None, _path: Path) -> Any:
    import torch

    dtype = getattr(torch, content)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch.{content} is no dtype")
    return dtype


def _decode_device(content: str, _leaf: DecodeLeaf | None, _path: Path) -> Any:
    import torch

    try:
        return torch.device(content)
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def _decode_size(content: list, _leaf: DecodeLeaf | None, _path: Path) -> Any:
    import torch

    return torch.Size(content)


def _decode_ddict(content: list, leaf: DecodeLeaf | None, path: Path) -> defaultdict:
    factory = None if content[0] is None else FACTORIES[content[0]]
    return defaultdict(factory, _decode_items(content[1], leaf, path))


_SCALARS: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: None,
    bool: lambda value: value,
    int: _encode_int,
    float: _encode_float,
    str: _encode_str,
    bytes: lambda value: {"~bytes": _base64(value)},
}

_CONTAINERS: dict[type, Callable[[Any, EncodeLeaf | None, Path], Any]] = {
    list: _encode_list,
    tuple: lambda value, leaf, path: {"~tuple": _encode_list(value, leaf, path)},
    dict: _encode_items,
    OrderedDict: lambda value, leaf, path: {"~odict": _encode_items(value, leaf, path)},
    Counter: lambda value, leaf, path: {"~counter": _encode_items(value, leaf, path)},
    defaultdict: _encode_defaultdict,
}

_TAGS: dict[str, Callable[[Any, DecodeLeaf | None, Path], Any]] = {
    "tuple": lambda content, leaf, path: tuple(_decode(content, leaf, path)),
    "odict": lambda content, leaf, path: OrderedDict(_decode_items(content, leaf, path)),
    "counter": lambda content, leaf, path: Counter(_decode_items(content, leaf, path)),
    "ddict": _decode_ddict,
    "float": lambda content, leaf, path: float(content),
    "int": lambda content, leaf, path: int(content, 16),
    "bytes": lambda content, leaf, path: from_base64(content),
    "str": lambda content, leaf, path: from_base64(content).decode("utf-8", "surrogatepass"),
    "numpy": _decode_numpy,
    "dtype": _decode_dtype,
    "device": _decode_device,
    "size": _decode_size,
}

#: Types whose values never need a look by whoever walks the tree.
PLAIN = frozenset((*_SCALARS, *_CONTAINERS))


def is_library_value(value: Any) -> bool:
    """True for the torch and numpy values (not tensors) this module stores."""
    return _encode_library(value) is not None
