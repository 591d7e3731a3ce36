"""Program listing: the twin's compiled artefact, one readable JSON file per ELF.

What runs is what the listing says. Removing, permuting or retyping a launch in the file changes the result,
as patching a binary would; there is no second description of the program anywhere.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from npu_twin.exceptions import ListingError
from npu_twin.memory import ITEMSIZE
from npu_twin.ops import OPS
from npu_twin.opset import OperandSpec, Signature

FORMAT = "npu2-program-listing"
VERSION = 1
TARGET = "npu2"
TOOLCHAIN = "npu-twin-compiler 1"
ROLES = ("input", "static", "intermediate", "output")
ROUNDINGS = ("floor", "nearest_even")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*\Z")


class FrozenMap(dict[str, Any]):
    """A dict that cannot be changed, hence hashable: launches serve as cache keys. Lists inside become
    tuples.
    """

    def __init__(self, content: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> None:
        super().__init__({str(k): _freeze(v) for k, v in dict(content).items()})

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("a listing is immutable; build a new one with dataclasses.replace")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenMap, (dict(self),)


def _freeze(value: Any) -> Any:
    if isinstance(value, FrozenMap):
        return value
    if isinstance(value, Mapping):
        return FrozenMap(value)
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(v) for v in value)
    return value


def default_rounding(op: str) -> str:
    """Rounding mode of the core that runs ``op``: ``nearest_even`` or ``floor``.

    Cores that run a matrix product set the mode themselves; float-only cores keep the reset value, which
    rounds toward minus infinity. Raises ListingError for an unknown operation.
    """
    if op not in OPS:
        raise ListingError(f"unknown operation {op!r}; known: {', '.join(OPS)}")
    return OPS[op].rounding


def _check_name(name: object, where: str) -> None:
    if not isinstance(name, str) or not _NAME.match(name):
        raise ListingError(f"{name!r} is not a name (letters, digits, '_', '-', '.')", where)


def _check_int(value: object, where: str, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ListingError(f"must be an integer of at least {least}, not {value!r}", where)


def _check_shape(shape: object, where: str) -> None:
    if not isinstance(shape, tuple) or not shape:
        raise ListingError(f"must be a non-empty list of integers, not {shape!r}", where)
    for i, n in enumerate(shape):
        _check_int(n, f"{where}[{i}]")


@dataclass(frozen=True)
class Argument:
    """One argument of the compiled program, i.e. one buffer object of the host.

    ``shape`` in elements, ``dtype`` ``bf16`` or ``f32``; ``role`` tells who fills it: ``input`` (host, every
    run), ``static`` (host, once), ``intermediate`` (a launch) or ``output`` (a launch, read by the host).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "bf16"
    role: str = "input"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _freeze(self.shape))
        _check_name(self.name, "arguments.name")
        _check_shape(self.shape, f"arguments.{self.name}.shape")
        if self.dtype not in ITEMSIZE:
            raise ListingError(
                f"{self.dtype!r} is not one of {', '.join(ITEMSIZE)}", f"arguments.{self.name}.dtype"
            )
        if self.role not in ROLES:
            raise ListingError(
                f"{self.role!r} is not one of {', '.join(ROLES)}", f"arguments.{self.name}.role"
            )

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Operand:
    """A contiguous part of an argument: ``offset`` in elements, ``shape`` None for the argument's own
    shape.
    """

    arg: str
    offset: int = 0
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _freeze(self.shape))
        _check_name(self.arg, "operand.arg")
        _check_int(self.offset, f"operand {self.arg}: offset", least=0)
        if self.shape is not None:
            _check_shape(self.shape, f"operand {self.arg}: shape")


@dataclass(frozen=True)
class Launch:
    """One kernel launch. Frozen and hashable.

    ``dims``, ``method`` and operand names follow ``npu_twin.opset``; ``tile`` and ``herd`` (columns or rows
    of cores by kernel) are what the constraint check and the cost model need; ``rounding`` is the core's
    rounding mode, empty for the operation's default; ``symbol`` and ``object_file`` name the external object
    code, empty where nothing depends on it.
    """

    name: str
    op: str
    dims: Mapping[str, int]
    operands: Mapping[str, Operand]
    method: str = "default"
    attrs: Mapping[str, Any] = field(default_factory=FrozenMap)
    tile: Mapping[str, int] = field(default_factory=FrozenMap)
    herd: tuple[int, int] = (1, 1)
    rounding: str = ""
    symbol: str = ""
    object_file: str = ""

    def __post_init__(self) -> None:
        where = f"launches.{self.name}"
        _check_name(self.name, "launches.name")
        for key in ("dims", "operands", "attrs", "tile"):
            value = getattr(self, key)
            if not isinstance(value, Mapping):
                raise ListingError(f"must be an object, not {value!r}", f"{where}.{key}")
            object.__setattr__(self, key, FrozenMap(value))
        object.__setattr__(self, "herd", _freeze(self.herd))
        if self.op not in OPS:
            raise ListingError(f"unknown operation {self.op!r}; known: {', '.join(OPS)}", f"{where}.op")
        spec = OPS[self.op]
        if not self.rounding:
            object.__setattr__(self, "rounding", spec.rounding)
        if self.rounding not in ROUNDINGS:
            raise ListingError(f"{self.rounding!r} is not one of {', '.join(ROUNDINGS)}", f"{where}.rounding")
        if not isinstance(self.method, str) or (spec.methods and self.method not in spec.methods):
            raise ListingError(
                f"{self.op} has no method {self.method!r}; it has {', '.join(spec.methods)}",
                f"{where}.method",
            )
        if set(self.dims) != set(spec.dims):
            raise ListingError(
                f"{self.op} needs the dimensions {', '.join(spec.dims)}, "
                f"got {', '.join(self.dims) or 'none'}",
                f"{where}.dims",
            )
        for key in ("symbol", "object_file"):
            if not isinstance(getattr(self, key), str):
                raise ListingError(f"must be a text, not {getattr(self, key)!r}", f"{where}.{key}")
        for key, value in (*self.dims.items(), *self.tile.items()):
            _check_int(value, f"{where}.{key}")
        if not isinstance(self.herd, tuple) or len(self.herd) != 2:
            raise ListingError(f"must be two integers, not {self.herd!r}", f"{where}.herd")
        for value in self.herd:
            _check_int(value, f"{where}.herd")
        needed = self.signature()
        if set(self.operands) != set(needed):
            raise ListingError(
                f"{self.op} ({self.method}) needs the operands {', '.join(needed)}, "
                f"got {', '.join(self.operands) or 'none'}",
                f"{where}.operands",
            )

    def signature(self) -> Signature:
        """Operand name -> shape, dtype and access that this launch requires. Raises ListingError."""
        try:
            return OPS[self.op].signature(self.dims, self.method, self.tile)
        except ValueError as error:
            raise ListingError(str(error), f"launches.{self.name}.tile") from None


@dataclass(frozen=True)
class Listing:
    """A whole compiled program. Frozen, hashable and fully checked at construction.

    Raises ListingError when a name is not unique, an operand names no argument, leaves its range, has the
    wrong type or shape for the operation, or overlaps with what the same launch writes.
    """

    name: str
    arguments: tuple[Argument, ...]
    launches: tuple[Launch, ...]
    options: Mapping[str, Any] = field(default_factory=FrozenMap)
    target: str = TARGET
    toolchain: str = TOOLCHAIN

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", tuple(self.arguments))
        object.__setattr__(self, "launches", tuple(self.launches))
        object.__setattr__(self, "options", FrozenMap(self.options))
        _check_name(self.name, "name")
        if not isinstance(self.target, str) or not self.target:
            raise ListingError(f"{self.target!r} is not a device name", "target")
        if not self.arguments:
            raise ListingError("a program needs at least one argument", "arguments")
        for kind, names in (
            ("arguments", [a.name for a in self.arguments]),
            ("launches", [x.name for x in self.launches]),
        ):
            double = {n for n in names if names.count(n) > 1}
            if double:
                raise ListingError(f"{', '.join(sorted(double))}: the name is used twice", kind)
        for launch in self.launches:
            self._check_launch(launch)

    def _check_launch(self, launch: Launch) -> None:
        ranges: list[tuple[str, str, int, int, OperandSpec]] = []
        for key, spec in launch.signature().items():
            where = f"launches.{launch.name}.operands.{key}"
            operand = launch.operands[key]
            argument = self.argument(operand.arg, where)
            shape = operand.shape or argument.shape
            if argument.dtype != spec.dtype:
                raise ListingError(
                    f"{launch.op} ({launch.method}) needs {spec.dtype} here, "
                    f"argument {argument.name} is {argument.dtype}",
                    where,
                )
            if shape != spec.shape:
                raise ListingError(
                    f"{launch.op} with {_dims(launch.dims)} needs shape {list(spec.shape)} here, "
                    f"got {list(shape)}; give offset and shape to take a part of argument "
                    f"{argument.name} or to read it in another shape",
                    where,
                )
            stop = operand.offset + math.prod(shape)
            if stop > argument.size:
                raise ListingError(
                    f"elements {operand.offset}..{stop - 1} are outside of argument {argument.name}, "
                    f"which has {argument.size}",
                    where,
                )
            for other, arg, start, end, known in ranges:
                overlap = arg == operand.arg and operand.offset < end and start < stop
                if overlap and "write" in (spec.access, known.access):
                    raise ListingError(
                        f"overlaps with operand {other} of the same launch, and one of the two is written",
                        where,
                    )
            ranges.append((key, operand.arg, operand.offset, stop, spec))

    def argument(self, name: str, where: str = "") -> Argument:
        """The argument of that name; raises ListingError naming the known ones."""
        for argument in self.arguments:
            if argument.name == name:
                return argument
        raise ListingError(
            f"no argument {name!r}; the program has {', '.join(a.name for a in self.arguments)}", where
        )

    def dataflow_problems(self) -> list[tuple[str | None, str]]:
        """(launch name or None, sentence) for each read of something unwritten and each output left
        unwritten.

        Input and static arguments count as filled by the host. These are no errors of the file format:
        hardware runs such a program and gives garbage, so loading allows it (the poison shows) and the
        compiler does not.
        """
        written: dict[str, list[tuple[int, int]]] = {
            a.name: [] for a in self.arguments if a.role in ("intermediate", "output")
        }
        problems: list[tuple[str | None, str]] = []
        for launch, key, operand, start, stop, spec in self._accesses():
            if operand.arg in written and spec.access == "read":
                hole = _first_hole(written[operand.arg], start, stop)
                if hole is not None:
                    problems.append(
                        (
                            launch.name,
                            f"launch {launch.name} reads element {hole} of {operand.arg} as {key} before "
                            "any launch has written it",
                        )
                    )
            elif operand.arg in written:
                written[operand.arg].append((start, stop))
        for argument in self.arguments:
            if argument.role == "output":
                hole = _first_hole(written[argument.name], 0, argument.size)
                if hole is not None:
                    problems.append((None, f"no launch writes element {hole} of output {argument.name}"))
        return problems

    def _accesses(self) -> Iterator[tuple[Launch, str, Operand, int, int, OperandSpec]]:
        for launch in self.launches:
            signature = launch.signature()
            for access in ("read", "write"):
                for key, spec in signature.items():
                    if spec.access == access:
                        operand = launch.operands[key]
                        stop = operand.offset + math.prod(spec.shape)
                        yield launch, key, operand, operand.offset, stop, spec

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Listing:
        """Build and check a listing from its JSON object. Raises ListingError naming the place."""
        _check_keys(data, "", {"name", "arguments", "launches"}, _HEADER | {"options"})
        for key, expected in (("format", FORMAT), ("version", VERSION)):
            if data.get(key, expected) != expected:
                raise ListingError(
                    f"{data[key]!r} cannot be read here, only {expected!r}; compile it again", key
                )
        arguments = []
        for i, item in enumerate(_list(data["arguments"], "arguments")):
            _check_keys(item, f"arguments[{i}]", {"name", "shape"}, {"dtype", "role"})
            arguments.append(Argument(**{k: _freeze(v) for k, v in item.items()}))
        launches = []
        for i, item in enumerate(_list(data["launches"], "launches")):
            where = f"launches[{i}]"
            _check_keys(
                item,
                where,
                {"name", "op", "dims", "operands"},
                {"method", "attrs", "tile", "herd", "rounding", "symbol", "object_file"},
            )
            fields = dict(item)
            fields["operands"] = {}
            for key, operand in _object(item["operands"], f"{where}.operands").items():
                _check_keys(operand, f"{where}.operands.{key}", {"arg"}, {"offset", "shape"})
                fields["operands"][key] = Operand(**operand)
            launches.append(Launch(**fields))
        options = _object(data.get("options", {}), "options")
        return cls(
            name=data["name"],
            arguments=tuple(arguments),
            launches=tuple(launches),
            options=FrozenMap(options),
            target=data.get("target", TARGET),
            toolchain=data.get("toolchain", TOOLCHAIN),
        )

    @classmethod
    def from_json(cls, text: str) -> Listing:
        """Read a listing from the text of its file, with all checks. Raises ListingError naming the place."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ListingError(f"not a program listing: {error}") from None
        _object(data, "")
        missing = [key for key in ("format", "version", "target") if key not in data]
        if missing:
            raise ListingError(f"not a program listing: no {', '.join(missing)}")
        return cls.from_mapping(data)

    def to_mapping(self) -> dict[str, Any]:
        """JSON object of the listing: plain dicts and lists in a fixed order."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "target": self.target,
            "name": self.name,
            "toolchain": self.toolchain,
            "options": dict(self.options),
            "arguments": [
                {"name": a.name, "shape": list(a.shape), "dtype": a.dtype, "role": a.role}
                for a in self.arguments
            ],
            "launches": [_launch_mapping(launch) for launch in self.launches],
        }

    def to_json(self) -> str:
        """Text of the file: one line per argument and per field of a launch, the same for the same
        program.
        """
        data = self.to_mapping()
        lines = [f"  {json.dumps(key)}: {json.dumps(data[key])}," for key in (*_HEADER_ORDER, "options")]
        lines.append('  "arguments": [')
        lines.extend(_joined([f"    {json.dumps(a)}" for a in data["arguments"]]))
        lines.append("  ],")
        lines.append('  "launches": [')
        launches = []
        for launch in data["launches"]:
            fields = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in launch.items()]
            launches.append("    {" + ",\n     ".join(fields) + "}")
        lines.extend(_joined(launches))
        lines.append("  ]")
        return "{\n" + "\n".join(lines) + "\n}\n"


_HEADER_ORDER = ("format", "version", "target", "name", "toolchain")
_HEADER = set(_HEADER_ORDER)


def _launch_mapping(launch: Launch) -> dict[str, Any]:
    operands: dict[str, dict[str, Any]] = {}
    for key in launch.signature():
        operand = launch.operands[key]
        operands[key] = {"arg": operand.arg}
        if operand.offset:
            operands[key]["offset"] = operand.offset
        if operand.shape is not None:
            operands[key]["shape"] = list(operand.shape)
    code = {"symbol": launch.symbol, "object_file": launch.object_file}
    return {
        "name": launch.name,
        "op": launch.op,
        "method": launch.method,
        "dims": {key: launch.dims[key] for key in OPS[launch.op].dims},
        "attrs": dict(launch.attrs),
        "tile": dict(launch.tile),
        "herd": list(launch.herd),
        "rounding": launch.rounding,
        **{key: value for key, value in code.items() if value},
        "operands": operands,
    }


def _joined(blocks: list[str]) -> list[str]:
    return [block + "," for block in blocks[:-1]] + blocks[-1:]


def _dims(dims: Mapping[str, int]) -> str:
    return ", ".join(f"{key}={value}" for key, value in dims.items())


def _first_hole(ranges: list[tuple[int, int]], start: int, stop: int) -> int | None:
    at = start
    for low, high in sorted(ranges):
        if low > at:
            break
        at = max(at, high)
    return at if at < stop else None


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ListingError(f"must be an object, not {type(value).__name__}", where)
    return value


def _list(value: Any, where: str) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise ListingError(f"must be a list, not {type(value).__name__}", where)
    return value


def _check_keys(item: Any, where: str, required: set[str], optional: set[str]) -> None:
    keys = set(_object(item, where))
    if missing := required - keys:
        raise ListingError(f"no {', '.join(sorted(missing))}", where)
    if unknown := keys - required - optional:
        raise ListingError(f"unknown {', '.join(sorted(unknown))}", where)
