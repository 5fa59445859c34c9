"""Optimizer state by parameter name, so that it fits a model whose parameters are counted anew.

`Optimizer.state_dict` numbers parameters in the order of the groups. When the modules that own them
are saved together with the optimizer, numbers become names; a parameter no module owns keeps its
number.
"""

from collections.abc import Iterator
from typing import Any

from drivetrain._checkpoint.dtypes import loaded
from drivetrain._checkpoint.typed_json import Key, Path, format_path
from drivetrain._native import Corrupt, InvalidArgument

#: id(parameter) → (module's path in the saved dict, name inside the module)
Names = dict[int, tuple[Path, str]]

#: Wrappers inside wrappers (compile of DDP of …); more is a cycle.
WRAPPERS_MAX = 8


def unwrap(value: Any) -> Any:
    """The user's module inside DistributedDataParallel, DataParallel and torch.compile.

    Their prefixes would make a checkpoint readable only by a model wrapped the same way.
    """
    torch = loaded("torch")
    if torch is None or not isinstance(value, torch.nn.Module):
        return value
    parallel = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    for _ in range(WRAPPERS_MAX):
        if isinstance(value, parallel):
            value = value.module
        elif "_orig_mod" in value._modules:
            value = value._orig_mod
        else:
            break
    return value


def is_module(value: Any) -> bool:
    """True for torch modules, without importing torch."""
    torch = loaded("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def is_optimizer(value: Any) -> bool:
    """True for objects that keep their parameters in groups, as torch's optimizers do."""
    return hasattr(value, "param_groups") and hasattr(value, "load_state_dict")


def parameter_names(state: Any) -> Names:
    """Names of all parameters of the modules in a (nested) dict; the first owner names one."""
    names: Names = {}
    for path, module in modules_in(state, ()):
        for name, parameter in unwrap(module).named_parameters():
            names.setdefault(id(parameter), (path, name))
    return names


def modules_in(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """The torch modules in nested dicts, with their paths."""
    if is_module(value):
        yield path, value
    elif isinstance(value, dict) and len(path) < WRAPPERS_MAX:
        torch = loaded("torch")
        holders = (dict,) if torch is None else (dict, torch.nn.Module)
        if any(issubclass(kind, holders) for kind in set(map(type, value.values()))):
            for key, item in value.items():
                yield from modules_in(item, (*path, key))


def number_names(optimizer: Any, numbered: dict[str, Any], names: Names) -> dict[Key, Key]:
    """The stored key of each number in a state dict: the parameter's name, or the number itself.

    Names carry the module's path only when parameters of several modules meet in the optimizer.
    """
    owned: dict[Key, tuple[Path, str] | None] = {}
    for group, live in zip(numbered["param_groups"], optimizer.param_groups):
        owned.update((n, names.get(id(p))) for n, p in zip(group["params"], live["params"]))
    several = len({owner[0] for owner in owned.values() if owner is not None}) > 1
    return {
        number: number
        if owner is None
        else ("/".join((*map(str, owner[0]), owner[1])) if several else owner[1])
        for number, owner in owned.items()
    }


def parameters_by_key(
    optimizer: Any, numbered: dict[str, Any], stored: dict[Key, Key]
) -> dict[Key, Any]:
    """The live parameters by their number and by their stored key."""
    found: dict[Key, Any] = {}
    for group, live in zip(numbered["param_groups"], optimizer.param_groups):
        for number, parameter in zip(group["params"], live["params"]):
            found[number] = found[stored[number]] = parameter
    return found


def stored_keys(value: Any, path: Path, names: Names) -> dict[Path, set[Key]]:
    """The keys that parameters have in the state of each optimizer in nested dicts."""
    found: dict[Path, set[Key]] = {}
    if is_optimizer(value) and "param_groups" in (numbered := value.state_dict()):
        found[path] = set(number_names(value, numbered, names).values())
    elif isinstance(value, dict) and len(path) < WRAPPERS_MAX:
        for key, item in value.items():
            found.update(stored_keys(item, (*path, key), names))
    return found


def to_names(numbered: dict[str, Any], stored: dict[Key, Key]) -> dict[str, Any]:
    """A state dict with the keys of `number_names` in place of numbers."""
    state = {stored.get(key, key): value for key, value in numbered["state"].items()}
    groups = [
        {**group, "params": [stored[number] for number in group["params"]]}
        for group in numbered["param_groups"]
    ]
    return {**numbered, "state": state, "param_groups": groups}


def to_numbers(
    named: dict[str, Any],
    numbered: dict[str, Any],
    stored: dict[Key, Key],
    path: Path,
    strict: bool = True,
) -> dict[str, Any]:
    """A stored state dict with the numbers of the live optimizer, in the live order of groups.

    Args:
        named: what the checkpoint has.
        numbered: the live optimizer's own state dict.
        stored: the live optimizer's `number_names`.
        path: of the optimizer, for messages.
        strict: else parameters of differing groups keep the state that has their name.

    Raises `InvalidArgument` when groups, or with `strict` their parameters, differ.
    """
    pairs = _pair_groups(named, numbered, stored, path, strict)
    numbers: dict[Key, Key] = {}
    groups = []
    for live, group in pairs:
        if _by_name(live, group, stored) or not (strict or _positional(live, group, stored)):
            numbers.update((stored[number], number) for number in live["params"])
        else:
            numbers.update(zip(group["params"], live["params"]))
        groups.append({**group, "params": list(live["params"])})
    known = set(numbers.values())
    renumbered = {numbers.get(key, key): value for key, value in named["state"].items()}
    state = {key: value for key, value in renumbered.items() if strict or key in known}
    return {**named, "state": state, "param_groups": groups}


def _by_name(live: dict, group: dict, stored: dict[Key, Key]) -> bool:
    return {stored[number] for number in live["params"]} == set(group["params"])


def _pair_groups(
    named: dict[str, Any],
    numbered: dict[str, Any],
    stored: dict[Key, Key],
    path: Path,
    strict: bool,
) -> list[tuple[dict, dict]]:
    where = format_path(path)
    if "state" not in named or "param_groups" not in named:
        raise Corrupt(f"{where}: the checkpoint holds no optimizer state here")
    live, groups = numbered["param_groups"], named["param_groups"]
    if len(live) != len(groups):
        raise InvalidArgument(
            f"{where}: the optimizer has {len(live)} parameter groups, the checkpoint {len(groups)}"
        )
    pairs = []
    for at, (mine, theirs) in enumerate(zip(live, groups)):
        if strict and not _by_name(mine, theirs, stored):
            _check_positional(mine, theirs, stored, f"{where}.param_groups.{at}")
        pairs.append((mine, theirs))
    return pairs


def _positional(live: dict, group: dict, stored: dict[Key, Key]) -> bool:
    """Numbers on either side: only positions can match, as in `Optimizer.load_state_dict`."""
    mine = [stored[number] for number in live["params"]]
    both_named = all(isinstance(key, str) for key in (*mine, *group["params"]))
    return not both_named and len(mine) == len(group["params"])


def _check_positional(live: dict, group: dict, stored: dict[Key, Key], where: str) -> None:
    if _positional(live, group, stored):
        return
    mine = [stored[number] for number in live["params"]]
    lacking = [k for k in mine if k not in set(group["params"])]
    extra = [k for k in group["params"] if k not in set(mine)]
    raise InvalidArgument(
        f"{where}: {len(mine)} live and {len(group['params'])} stored parameters; "
        f"the checkpoint lacks {lacking[:5]}, the optimizer lacks {extra[:5]}"
    )
