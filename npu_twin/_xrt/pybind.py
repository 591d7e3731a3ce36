"""How pybind11 behaves: overload resolution, argument conversion, enum objects and the texts of its errors.

The real module is compiled with pybind11; its errors are part of what callers see, so the twin declares every
call with the signature that the real docstring shows and derives conversion and error text from it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

NAMESPACE = "npu_twin.pyxrt"
"""``__module__`` of all classes, so that enum values can be pickled by name."""

_INT_TEXT = "typing.SupportsInt | typing.SupportsIndex"
_HINT = (
    "\n\nDid you forget to `#include <pybind11/stl.h>`? Or <pybind11/complex.h>,\n"
    "<pybind11/functional.h>, <pybind11/chrono.h>, etc. Some automatic\n"
    "conversions are optional and require extra headers to be included\n"
    "when compiling your pybind11 module."
)


class _NoMatch(Exception):
    """The value does not convert to the parameter's type."""


Converter = Callable[[Any], Any]

_BOUNDS = {
    "i32": (-(1 << 31), (1 << 31) - 1),
    "u32": (0, (1 << 32) - 1),
    "u64": (0, (1 << 64) - 1),
}


def _integer(low: int, high: int) -> Converter:
    def convert(value: Any) -> int:
        if type(value) is not int:
            if isinstance(value, float):
                raise _NoMatch
            try:
                value = operator.index(value)
            except TypeError:
                if not hasattr(type(value), "__int__"):
                    raise _NoMatch from None
                try:
                    value = int(value)
                except (TypeError, ValueError, OverflowError):
                    raise _NoMatch from None
        if not low <= value <= high:
            raise _NoMatch
        return int(value)

    return convert


def _string(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8", "surrogateescape")
    raise _NoMatch


def _string_or_null(value: Any) -> str | None:
    return None if value is None else _string(value)


def _buffer(value: Any) -> Any:
    if isinstance(value, (str, int, list, tuple, dict, float)) or value is None:
        raise _NoMatch
    if hasattr(type(value), "__array_interface__") or hasattr(type(value), "__buffer__"):
        return value
    try:
        memoryview(value)
    except TypeError:
        raise _NoMatch from None
    except (ValueError, BufferError):
        return value
    return value


def _config(value: Any) -> dict[str, int]:
    if not isinstance(value, Mapping):
        raise _NoMatch
    number = _integer(*_BOUNDS["u32"])
    return {_string(k): number(v) for k, v in value.items()}


def _capsule(value: Any) -> Any:
    if type(value).__name__ != "PyCapsule":
        raise _NoMatch
    return value


def _never(value: Any) -> Any:
    raise _NoMatch


_CONVERTERS: dict[str, tuple[str, Converter]] = {
    **{name: (_INT_TEXT, _integer(*bounds)) for name, bounds in _BOUNDS.items()},
    "str": ("str", _string),
    "char*": ("str", _string_or_null),
    "buffer": ("collections.abc.Buffer", _buffer),
    "config": (f"collections.abc.Mapping[str, {_INT_TEXT}]", _config),
    "capsule": ("types.CapsuleType", _capsule),
    "milliseconds": ("std::chrono::duration<long, std::ratio<1l, 1000l> >", _never),
    "callback": ("std::function<void (void const*, ert_cmd_state, void*)>", _never),
    "axlf": ("axlf", _never),
    "pid": ("xrt::pid_type", _never),
}

classes: dict[str, type] = {}
"""Bound classes by the name after ``pyxrt.``; parameters refer to them by it."""


def _instance_of(name: str) -> Converter:
    def convert(value: Any) -> Any:
        if not isinstance(value, classes[name]):
            raise _NoMatch
        return value

    return convert


class _Parameter(NamedTuple):
    name: str
    text: str
    convert: Converter
    keyword: bool


def _parameter(declaration: str) -> _Parameter:
    if declaration.startswith("*"):
        return _Parameter(declaration, "", _never, False)
    name, kind = declaration.split(": ")
    if kind in _CONVERTERS:
        text, convert = _CONVERTERS[kind]
    elif kind.startswith("xrt::"):
        text, convert = kind, _instance_of(kind[5:])
    else:
        text, convert = f"pyxrt.{kind}", _instance_of(kind)
    return _Parameter(name, text, convert, not name.startswith("arg"))


class _Overload(NamedTuple):
    parameters: tuple[_Parameter, ...]
    target: Callable[..., Any]
    returns: str

    def convert(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """Converted arguments in order, or None when this overload does not take them."""
        if len(args) + len(kwargs) != len(self.parameters):
            return None
        values = list(args)
        for parameter in self.parameters[len(args) :]:
            if not parameter.keyword or parameter.name not in kwargs:
                return None
            values.append(kwargs[parameter.name])
        try:
            return [parameter.convert(v) for parameter, v in zip(self.parameters, values, strict=True)]
        except _NoMatch:
            return None


class Overloads:
    """The overloads of one function, tried in the order of declaration.

    ``owner`` is the class's name after ``pyxrt.``, empty for a module function. Declare with
    ``@overloads.add("size: u64, flags: bo.flags")``; parameters called ``arg0``, ``arg1`` ... take no
    keyword.
    """

    def __init__(self, name: str, owner: str = "") -> None:
        self.name = name
        self.owner = owner
        self._overloads: list[_Overload] = []

    def add(
        self, declaration: str = "", returns: str = "None"
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Declare one overload; the decorated function gets self (if any) and converted arguments."""
        parameters = tuple(_parameter(part) for part in declaration.split(", ") if part)

        def register(target: Callable[..., Any]) -> Callable[..., Any]:
            self._overloads.append(_Overload(parameters, target, returns))
            return target

        return register

    def __call__(self, instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the first overload that takes the arguments; TypeError in pybind11's words if none does."""
        for overload in self._overloads:
            values = overload.convert(args, kwargs)
            if values is not None:
                if self.owner:
                    return overload.target(instance, *values)
                return overload.target(*values)
        raise self.mismatch(instance, args, kwargs)

    def mismatch(self, instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TypeError:
        """The error for arguments that no overload takes."""
        constructor = self.name == "__init__"
        kind = "constructor" if constructor else "function"
        lines = [f"{self.name}(): incompatible {kind} arguments. The following argument types are supported:"]
        for number, overload in enumerate(self._overloads, 1):
            parameters = [f"{p.name}: {p.text}" if p.text else p.name for p in overload.parameters]
            if constructor:
                lines.append(f"    {number}. pyxrt.{self.owner}({', '.join(parameters)})")
            else:
                own = [f"self: pyxrt.{self.owner}"] if self.owner else []
                lines.append(f"    {number}. ({', '.join(own + parameters)}) -> {overload.returns}")
        shown = [] if constructor or not self.owner else [repr(instance)]
        shown.extend(repr(value) for value in args)
        invoked = ", ".join(shown)
        if kwargs:
            words = ", ".join(f"{key}={value!r}" for key, value in kwargs.items())
            invoked += f"; kwargs: {words}" if shown else f"kwargs: {words}"
        text = "\n".join(lines) + f"\n\nInvoked with: {invoked}"
        if "std::" in "\n".join(lines):
            text += _HINT
        return TypeError(text)


class pybind11_type(type):  # noqa: N801 - the name shows in error texts
    """Metaclass of all bound classes: checks that a subclass called the constructor."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct; TypeError when ``__init__`` of the bound class was not reached."""
        instance = super().__call__(*args, **kwargs)
        if not hasattr(instance, "_constructed"):
            raise TypeError(f"{cls._bound_name()}.__init__() must be called when overriding __init__")
        return instance

    def _bound_name(cls) -> str:
        return next((_shown(base) for base in cls.__mro__ if base in classes.values()), cls.__qualname__)


class pybind11_object(metaclass=pybind11_type):  # noqa: N801 - pybind11's own name for the base
    """Base of all bound classes: no ``__dict__``, not picklable, not copyable."""

    __slots__ = ("__weakref__", "_constructed")

    def __repr__(self) -> str:
        return f"<{_shown(type(self))} object at {id(self):#x}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"cannot pickle '{_shown(type(self))}' object")


def _shown(kind: type) -> str:
    module = "pyxrt" + kind.__module__[len(NAMESPACE) :] if kind in classes.values() else kind.__module__
    return f"{module}.{kind.__qualname__}"


def bound(name: str, doc: str | None = None) -> Callable[[type], Any]:
    """Class decorator: publish a class under its pybind11 name (``bo``, ``ext.bo``, ``bo.flags``)."""

    def publish(cls: type) -> type:
        own = name[4:] if name.startswith("ext.") else name
        cls.__module__ = NAMESPACE if own == name else f"{NAMESPACE}.ext"
        cls.__qualname__ = own
        cls.__name__ = name.rsplit(".", 1)[-1]
        cls.__doc__ = doc
        classes[name] = cls
        return cls

    return publish


class _Enum(pybind11_object):
    """Base of the enums: plain objects, deliberately no IntEnum."""

    __slots__ = ("_value",)
    _members: dict[str, int] = {}  # noqa: RUF012 - replaced per class, never changed
    _int_equal = False
    _convert = staticmethod(_integer(*_BOUNDS["u32"]))
    _constructor: Overloads

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._value = type(self)._constructor(self, args, kwargs)
        self._constructed = True

    def _label(self) -> str:
        """Name of the value, ``???`` when it has none."""
        for name, value in self._members.items():
            if value == self._value:
                return name
        return "???"

    # a member called "name" hides this property, as it does in the real xrt_info_device
    name = property(_label)

    @property
    def value(self) -> int:
        """The plain number."""
        return int(self._value)

    def __int__(self) -> int:
        return int(self._value)

    __index__ = __int__

    def __hash__(self) -> int:
        return hash(self._value)

    def __eq__(self, other: object) -> bool:
        if type(other) is type(self):
            return bool(self._value == other._value)
        # plain ints only: numpy scalars and other enums compare unequal from this side
        return self._int_equal and isinstance(other, int) and bool(self._value == other)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self._label()}: {self._value}>"

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self._label()}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), (self._value,)


class _EnumMembers:
    """``__members__`` of an enum class: fresh objects for each name."""

    def __get__(self, instance: object, owner: Any) -> dict[str, Any]:
        return {name: getattr(owner, name) for name in owner._members}


def enum(name: str, doc: str, members: Mapping[str, int], int_equal: bool = False) -> Any:
    """A pybind11 enum class. ``int_equal``: values compare equal to plain ints (an unscoped C++ enum)."""
    text = doc + "\n\nMembers:\n" + "".join(f"\n  {member}\n" for member in members)
    namespace: dict[str, Any] = {
        "__slots__": (),
        "_members": dict(members),
        "_int_equal": int_equal,
        "__members__": _EnumMembers(),
        "__hash__": _Enum.__hash__,
    }
    cls: Any = pybind11_type(name, (_Enum,), namespace)
    bound(name, text.rstrip("\n"))(cls)
    constructor = Overloads("__init__", name)
    constructor.add("value: u32")(lambda self, value: value)
    cls._constructor = constructor
    for member, value in members.items():
        setattr(cls, member, cls(value))
    return cls


def method(overloads: Overloads, doc: str) -> Any:
    """A bound method that only dispatches."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return overloads(self, args, kwargs)

    call.__name__ = overloads.name
    call.__qualname__ = f"{overloads.owner}.{overloads.name}"
    call.__doc__ = doc
    return call


def constructor(overloads: Overloads) -> Any:
    """``__init__`` that dispatches and marks the object as constructed."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it is one
        overloads(self, args, kwargs)
        self._constructed = True

    return __init__
