"""Strict settings: defaults, then a recipe in YAML, then key=value words; later layers win. Imports no torch.

A setting is named by its path (`train.epochs`) or, where that is unambiguous, by its last word (`epochs`).
An unknown name is an error that offers the nearest one; so is a value of the wrong type and a combination
that cannot work. Every mistake of the user is a `UserError`, one sentence that names the setting and the remedy.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from adclr.config.errors import UserError as UserError

Ratio = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10**9)]
# Limits that catch typing errors: layers wider than any GPU holds, deviations that float32 does not.
Side = Annotated[int, Field(ge=1, le=16384)]  # pixels
Width = Annotated[int, Field(ge=1, le=65536)]
Deviation = Annotated[float, Field(ge=0.001, le=1000)]
Beta = Annotated[float, Field(ge=0, lt=1)]
T = TypeVar("T")
_one = BeforeValidator(lambda value: (value,) if isinstance(value, int | float | str) else value)
Several = Annotated[tuple[T, ...], _one]  # any number of values; one may be written without brackets
Device = Literal["auto", "cpu", "cuda", "mps"]

# width, depth, heads of each size of the ViT
VIT_SIZES: dict[str, tuple[int, int, int]] = {
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
}

CLOSE = 0.66  # of 1: similarity from which a name is taken for a typing error, such as kk for k
# What other programs call a setting, by its last word; for suggestions only.
SYNONYMS = {
    "accumulation": "micro_batch_size",
    "amp": "precision",
    "arch": "size",
    "bands": "num_channels",
    "batch": "batch_size",
    "bs": "batch_size",
    "channels": "num_channels",
    "clip_grad": "clip_norm",
    "crop_size": "global_size",
    "dtype": "precision",
    "ema": "momentum",
    "grad_clip": "clip_norm",
    "gradient_checkpointing": "checkpoint_activations",
    "heads": "num_heads",
    "image_size": "global_size",
    "img_size": "global_size",
    "in_chans": "num_channels",
    "lambda": "query_weight",
    "layers": "depth",
    "learning_rate": "lr",
    "local_crops_number": "num_local",
    "min_lr": "final_lr",
    "momentum_teacher": "momentum",
    "out_dim": "num_prototypes",
    "patch": "patch_size",
    "pretrained": "init",
    "queries": "num_queries",
    "registers": "num_registers",
    "save_every": "checkpoint_every_steps",
    "threads": "num_workers",
    "warmup": "warmup_epochs",
    "wd": "weight_decay",
    "weights": "init",
    "workers": "num_workers",
}


class Section(BaseModel):
    """A group of settings. A `ClassVar` of it is a constant that was a setting in version 0.1."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())


S = TypeVar("S", bound=Section)
# Where a setting may differ: in a training or embedding that is resumed, in a study's result that is used again, and in
# the control from scratch that a score is compared with.
Purpose = Literal["resume", "study", "control"]


def setting(
    default: Any,
    description: str,
    *,
    free: Sequence[Purpose] = (),
    advanced: bool = False,
    old_name: str | None = None,
    **limits: Any,
) -> Any:
    """Return the pydantic field of a setting.

    `free` lists where it may differ, `advanced` settings are shown by --help-all only, and `old_name` is its name in
    version 0.1: accepted with a warning, and part of hashes, so that results of that version are still recognized.
    """
    flags: dict[str, Any] = {"free": list(free), "advanced": advanced}
    return Field(default, description=description, json_schema_extra=flags, serialization_alias=old_name, **limits)


def _flag(field: FieldInfo, name: str) -> Any:
    return field.json_schema_extra.get(name) if isinstance(field.json_schema_extra, dict) else None


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield (path, pydantic field) of every setting of a settings class; an excluded field is none."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if field.exclude:
            continue
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from leaves(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def free_settings(model: type[BaseModel], purpose: Purpose) -> set[str]:
    """Return the paths of the settings that may differ for this purpose."""
    return {path for path, field in leaves(model) if purpose in (_flag(field, "free") or ())}


def _constants(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of every constant that was a setting in version 0.1."""
    for name in sorted(model.__class_vars__ - Section.__class_vars__):
        yield prefix + name, getattr(model, name)
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel) and not field.exclude:
            yield from _constants(field.annotation, f"{prefix}{name}.")


@cache
def _names(model: type[BaseModel]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the path for every name that is accepted, old names included; and the constants by their paths."""
    paths, old = {}, {}
    for path, field in leaves(model):
        paths[path] = path
        if field.serialization_alias:
            group, dot, _ = path.rpartition(".")
            old[group + dot + field.serialization_alias] = path
    constants = dict(_constants(model))
    return paths | old | {path: path for path in constants}, constants


def old_names(model: type[BaseModel]) -> dict[str, str]:
    """Return the names of version 0.1 by the paths of today, of the settings that were renamed."""
    return {path: old for old, path in _names(model)[0].items() if old != path}


def current_names(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored values, perhaps of version 0.1, by the paths of today, without those that became constants."""
    names, constants = _names(model)
    return {
        names.get(path, path): value
        for path, value in values.items()
        if path not in constants or _listed(value) != _listed(constants[path])
    }


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


_warned: set[str] = set()  # paths whose old name was used in this process


def full_name(model: type[BaseModel], name: str, warn: bool = True) -> str:
    """Return the path of the setting that `name` means: itself, or the only path that ends in it.

    An old name is accepted, with a warning, and so is that of a constant, whose value `build` checks.
    """
    names, constants = _names(model)
    matches = [name] if name in names else [path for path in names if path.endswith("." + name)]
    if len(matches) == 1:
        path = names[matches[0]]
        if path != matches[0] and warn:
            _warn_of_old_name(matches[0], path)
        return path
    if matches:
        raise UserError(f"setting '{name}' could be {' or '.join(matches)}; write one of them")
    paths = [path for path in dict.fromkeys(names.values()) if path not in constants]
    inside = [path for path in paths if path.startswith(name + ".")]
    if inside:
        raise UserError(f"'{name}' is a group of settings; set one of its own, such as {inside[0]}")
    near = _nearest(name, paths)
    option = "--help-all" if any(_flag(field, "advanced") for _, field in leaves(model)) else "--help"
    hint = f"did you mean '{near}'?" if near else f"{option} lists all settings"
    raise UserError(f"unknown setting '{name}'; {hint}")


def _warn_of_old_name(old: str, path: str) -> None:
    """Print a line once for each old name, in the first process."""
    if path not in _warned and os.environ.get("RANK", "0") == "0":
        print(f"adclr: the setting {old} is now {path}; the next version will not accept the old name", file=sys.stderr)
    _warned.add(path)


def _nearest(name: str, paths: Sequence[str]) -> str | None:
    """Return the setting whose name, here or in other programs, is close to the last part of `name`."""
    words = {path.rsplit(".", 1)[-1]: path for path in paths}
    words = {synonym: words[word] for synonym, word in SYNONYMS.items() if word in words} | words
    group, _, last = name.rpartition(".")
    inside = [word for word, path in words.items() if path.startswith(f"{group}.")] if group else []
    for candidates in (inside, list(words)):
        near = difflib.get_close_matches(last, candidates, n=1, cutoff=CLOSE)
        if near:
            return words[near[0]]
    return None


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested maps by their paths."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + str(name)] = value
    return flat


def parse_words(words: Sequence[str]) -> dict[str, Any]:
    """Return ['train.epochs=5', ...] as names and values; a value is read as YAML, so lists are [0.4, 1.0]."""
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise UserError(f"'{word}' is not a setting; write key=value, for example train.epochs=100")
        values[name] = load_yaml(text, f"the value of {name}")
    return values


class _Loader(yaml.SafeLoader):
    """Loads plain scalars, lists and maps; refuses a repeated name, which would drop the first, and an alias, which can
    be endless."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not taken")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise yaml.YAMLError(f"'{name}' is there twice")
        return super().construct_mapping(node, deep)


# Scalars as YAML 1.2 has them: 'off' and 'no' are words, 1:30 is no number, 1e-3 is one.
_PLAIN = {
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "null": r"~|null|Null|NULL|",
}
_Loader.yaml_implicit_resolvers = {}
for _name, _pattern in _PLAIN.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"^(?:{_pattern})$"), None)


def load_yaml(text: str, name: str) -> Any:
    """Return the data of a YAML text; tags that name Python objects are refused."""
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{name} is not readable as YAML ({first}); fix it") from None
    except (RecursionError, ValueError) as error:  # a thousand brackets; a date that does not exist
        raise UserError(f"{name} is not readable as YAML ({type(error).__name__}); fix it") from None


def build(model: type[S], *layers: Mapping[str, Any], warn: bool = True) -> S:
    """Return settings from layers of names and values, later ones winning; names may be paths, nested or short.

    `warn` says whether old names get a warning.
    """
    values: dict[str, Any] = {}
    booleans = {path for path, field in leaves(model) if "bool" in str(field.annotation)}
    constants = _names(model)[1]
    for layer in layers:
        for name, value in flatten(layer).items():
            path = full_name(model, name, warn)
            if path in constants:
                _check_constant(path, value, constants[path])
                continue
            if isinstance(value, bool) and path not in booleans:
                raise UserError(f"setting {path}={value} is not possible: it is not a yes or no")
            values[path] = os.fspath(value) if isinstance(value, os.PathLike) else value
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *parents, leaf = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return validate_settings(model, tree)


def _check_constant(path: str, value: Any, constant: Any) -> None:
    """Refuse another value of what was a setting in version 0.1."""
    if _listed(value) != _listed(constant):
        raise UserError(f"{path} is a constant, {_listed(constant)}, and cannot be {value}; leave it out")


def validate_settings(model: type[S], tree: Mapping[str, Any]) -> S:
    """Return the settings of a tree in which every name is written out."""
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise UserError(_sentence(error)) from None


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    name = ".".join(str(part) for part in first["loc"] if not isinstance(part, int))
    message = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] == "missing":
        if isinstance(first["loc"][-1], str):
            return f"'{name}' is missing; add it"
        message = "a number is missing"
    if first["type"] == "extra_forbidden":
        return f"'{name}' is not known here; correct its name or leave it out"
    return f"setting {name}={first['input']!r} is not possible: {message.replace('tuple', 'list such as [1, 2]')}"


def recipe_names(kind: str = "") -> list[str]:
    """Return the names of the shipped recipes: of pretraining, or of a `kind` such as evaluate."""
    folder = resources.files("adclr.config") / "recipes" / kind
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def recipe_text(name: str, kind: str = "") -> str:
    """Return the text of a shipped recipe, or of a file if `name` ends in .yaml."""
    if name.endswith((".yaml", ".yml")):
        try:
            return Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise UserError(f"recipe file {name} cannot be read ({reason}); check the path") from None
    names = recipe_names(kind)
    if name not in names:
        other = {"": "distill", "distill": ""}.get(kind)
        if other is not None and name in recipe_names(other):
            use = "adclr distill, or adclr plan --teacher W" if other else "adclr pretrain"
            raise UserError(f"{name} is a recipe of {use}; choose one of: {', '.join(names)}")
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        hint = f"there are: {', '.join(names)}" if kind else "--list-recipes shows them"
        hint = f"did you mean '{near[0]}'?" if near else hint
        raise UserError(f"unknown recipe '{name}'; {hint}")
    return (resources.files("adclr.config") / "recipes" / kind / f"{name}.yaml").read_text(encoding="utf-8")


def load_recipe(name: str, kind: str = "") -> dict[str, Any]:
    """Return the settings of a recipe as it nests them."""
    values = load_yaml(recipe_text(name, kind), f"recipe {name}")
    if values is None:
        values = {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"recipe {name} is not a map of settings; write lines such as 'train:' and '  epochs: 100'")
    return values


def differences(a: Section, b: Section, ignore: Collection[str] = ()) -> list[str]:
    """Return a sentence with both values for each setting that differs."""
    left, right = flatten(a.model_dump(mode="json")), flatten(b.model_dump(mode="json"))
    return [
        f"{path} is {left[path]} there and {right[path]} here"
        for path in left
        if left[path] != right[path] and path not in ignore
    ]


def describe(model: type[BaseModel], advanced: bool = True) -> list[tuple[str, str, str]]:
    """Return (path, default, meaning) of every setting, for --help; without `advanced`, of the others only."""
    rows = []
    for path, field in leaves(model):
        if _flag(field, "advanced") and not advanced:
            continue
        default = field.get_default(call_default_factory=True)
        text = "null" if default is None else str(default)
        if isinstance(default, tuple):
            text = "[" + ", ".join(f"{x:.3g}" if isinstance(x, float) else str(x) for x in default) + "]"
        choices = _choices(field.annotation)
        meaning = field.description or ""
        rows.append((path, text, f"{meaning} ({' | '.join(choices)})" if choices else meaning))
    return rows


def _choices(annotation: Any) -> list[str]:
    if getattr(annotation, "__origin__", None) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return []
