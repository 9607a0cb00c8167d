"""Events and entities: what an application declares, as frozen dataclasses that msgspec checks.

An `Event` is something that happened. An `Entity` is the state that the events of one stream add up
to: `@action` methods decide which events happen, `@applies` methods say what the state is after an
event. Both are pure: they read `self` and their arguments, and return. Nothing here waits.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import (
    Any,
    ClassVar,
    Concatenate,
    Generic,
    ParamSpec,
    Self,
    TypeVar,
    dataclass_transform,
    overload,
)

import msgspec

from fencepost.events.errors import ActionInvalidError, DefinitionError, InvariantError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
EntityT = TypeVar("EntityT", bound="Entity")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Fold = Callable[[Any, Any], Any]

_TEMPLATE = re.compile(r"[^{}]*\{id\}[^{}]*")
_BY_CLASS_NAME: dict[str, type[Event]] = {}
"""Events by the names of their classes, for annotations of classes that a function defines."""


Upcaster = Callable[[dict[str, Any]], dict[str, Any]]


class EventKind(msgspec.Struct):
    """What the log calls an event, the number of its form, and how older forms become it."""

    name: str
    schema: int
    upcasters: dict[int, Upcaster] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Event:
    """Something that happened. Declare its fields as in a dataclass.

    `name` is what the log calls it (the name of the class by default), and `schema` the number of
    its form: raise it when the fields change, and say with `@upcasts` how older ones become it.
    """

    __event__: ClassVar[EventKind] = EventKind("Event", 1)

    def __init_subclass__(cls, *, name: str | None = None, schema: int = 1) -> None:
        super().__init_subclass__()
        cls.__event__ = EventKind(cls.__name__ if name is None else name, schema)
        if not cls.__event__.name or cls.__event__.name.startswith("$"):
            raise DefinitionError(
                f"an event cannot be named {name!r}: names that begin with $ belong to the server"
            )
        if schema < 1:
            raise DefinitionError(f"the schema of {cls.__name__} is {schema}, and must be 1 on")
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        _BY_CLASS_NAME[cls.__name__] = cls


def upcasts(event: type[Event], schema: int) -> Callable[[Upcaster], Upcaster]:
    """Declare how the data of an event of this schema becomes that of the next schema."""
    kind = event.__event__
    if not 1 <= schema < kind.schema:
        raise DefinitionError(
            f"an upcaster of {kind.name} is for a schema from 1 to {kind.schema - 1}, not {schema}"
        )

    def note(function: Upcaster) -> Upcaster:
        kind.upcasters[schema] = function
        return function

    return note


class Recorded(msgspec.Struct, Generic[T_co], frozen=True, kw_only=True):
    """An event where it lies. `position` is its id: its place in the order of all streams."""

    data: T_co
    name: str
    stream: str
    version: int
    """Its number in its stream, from 0 on."""
    position: int
    timestamp_ms: int | None = None
    """When the server stored it; None in the answer to a commit, which does not say."""
    correlation: str | None = None
    """The id of the whole conversation: events that follow from one another share it."""
    causation: str | None = None
    """What led to it: the position of an event, or what the caller gave."""
    meta: Mapping[str, Any] = {}
    schema: int = 1

    @property
    def created(self) -> datetime | None:
        """When the server stored it."""
        if self.timestamp_ms is None:
            return None
        return datetime.fromtimestamp(self.timestamp_ms / 1000, UTC)


class _Invariant(msgspec.Struct, frozen=True):
    holds: Callable[..., Any]
    reason: str


def invariant(holds: Callable[..., Any], reason: str) -> Callable[[FunctionT], FunctionT]:
    """Let an action happen only while `holds(state, ...)` is true.

    The function takes the state, then arguments of the action by their names. Names that the action
    does not have stand for its arguments in their order.
    """

    def note(function: FunctionT) -> FunctionT:
        if isinstance(function, Action):
            raise DefinitionError(
                f"the @invariant of {function.name} stands above @action, where it would not be "
                "checked: put it between @action and the method"
            )
        found: list[_Invariant] = getattr(function, "__invariants__", [])
        function.__invariants__ = [_Invariant(holds, reason), *found]  # type: ignore[attr-defined]
        return function

    return note


class Action(Generic[EntityT, P, R]):
    """A decision that an entity can make. `Order.place` names it; `order.place(...)` tries it."""

    def __init__(self, function: Callable[Concatenate[EntityT, P], R]) -> None:
        _require_plain(function, "an action")
        self._function = function
        self._signature = inspect.signature(function)
        self._invariants: Sequence[_Invariant] = getattr(function, "__invariants__", ())
        for rule in self._invariants:
            _require_arguments(rule, function)
        self._types: dict[str, Any] | None = None
        self.name: str = function.__name__
        self.entity: type[Entity] = Entity
        self.__doc__ = function.__doc__

    def __repr__(self) -> str:
        return f"<action {self.entity.__name__}.{self.name}>"

    def __set_name__(self, owner: type[Entity], name: str) -> None:
        self.entity = owner
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type[EntityT]) -> Action[EntityT, P, R]: ...

    @overload
    def __get__(self, instance: EntityT, owner: type[EntityT]) -> Callable[P, R]: ...

    def __get__(
        self, instance: EntityT | None, owner: type[EntityT]
    ) -> Action[EntityT, P, R] | Callable[P, R]:
        if instance is None:
            return self

        def bound(*arguments: P.args, **named: P.kwargs) -> R:
            return self._function(instance, *arguments, **named)

        bound.__qualname__ = f"the {self.name} of one {owner.__name__}"
        return bound

    def decide(
        self, state: EntityT, stream: str, arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> list[Event]:
        """The events that follow, with arguments and invariants checked first."""
        bound = self._checked(state, stream, arguments, named)
        given = dict(list(bound.arguments.items())[1:])
        for rule in self._invariants:
            if not rule.holds(state, *_taken(rule.holds, given)):
                raise InvariantError(stream, self.name, rule.reason)
        return events_of(self._function(*bound.args, **bound.kwargs), self.name)

    def _checked(
        self, state: EntityT, stream: str, arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> inspect.BoundArguments:
        try:
            bound = self._signature.bind(state, *arguments, **named)
        except TypeError as error:
            raise ActionInvalidError(f"{self.name} on {stream!r}: {error}") from None
        bound.apply_defaults()
        if self._types is None:
            self._types = types_of(self._function)
        for parameter, value in list(bound.arguments.items())[1:]:
            kind = self._types.get(parameter, Any)
            if isinstance(kind, type) and type(value) is kind:
                continue  # the common case: nothing to convert
            try:
                bound.arguments[parameter] = msgspec.convert(value, kind)
            except (msgspec.ValidationError, TypeError) as error:
                raise ActionInvalidError(
                    f"{self.name} on {stream!r}: the argument {parameter} is not valid: {error}"
                ) from None
        return bound

    def emits(self) -> list[type[Event]]:
        """The events that its annotation names."""
        return event_classes(types_of(self._function).get("return"))


def action(function: Callable[Concatenate[EntityT, P], R]) -> Action[EntityT, P, R]:
    """Make a method an action: it decides, and the event or events that it returns happen."""
    return Action(function)


def applies(function: FunctionT) -> FunctionT:
    """Make a method the fold of the event that its parameter is annotated with."""
    _require_plain(function, "a fold")
    function.__applies__ = True  # type: ignore[attr-defined]
    return function


class EntityKind:
    """What there is to know of a class of entities: its streams, actions and folds."""

    def __init__(self, cls: type[Entity], template: str, snapshot: int) -> None:
        self.cls = cls
        self.name = cls.__name__
        self.template = template
        self.snapshot = snapshot
        members = [pair for base in reversed(cls.__mro__) for pair in vars(base).items()]
        newest = dict(members)
        self.actions = {name: found for name, found in newest.items() if isinstance(found, Action)}
        self._applying: list[Fold] = [
            found for found in newest.values() if getattr(found, "__applies__", False)
        ]
        self._folds: dict[str, Fold] | None = None

    def path_of(self, entity_id: str) -> str:
        """The stream of the entity with this id."""
        if not self.template:
            raise DefinitionError(f"{self.name} has no stream: give its class stream='.../{{id}}'")
        if not isinstance(entity_id, str):
            raise ActionInvalidError(f"the id {entity_id!r} of {self.name} is no text: give a str")
        if not entity_id or "/" in entity_id or "\0" in entity_id:
            raise ActionInvalidError(f"the id {entity_id!r} of {self.name} is empty or has a /")
        return self.template.replace("{id}", entity_id)

    @property
    def glob(self) -> str:
        """The streams of all entities of this kind."""
        return self.template.replace("{id}", "*")

    @property
    def folds(self) -> dict[str, Fold]:
        """The `@applies` methods by the names of their events."""
        if self._folds is None:
            self._folds = {kind.__event__.name: fold for kind, fold in self._applied()}
        return self._folds

    def events(self) -> list[type[Event]]:
        """The events that its methods name; raises `DefinitionError` for one that cannot be."""
        self._check_forgotten()
        named = [kind for kind, _fold in self._applied()]
        for found in self.actions.values():
            named += found.emits()
        return list(dict.fromkeys(named))

    def _applied(self) -> Iterable[tuple[type[Event], Fold]]:
        seen: dict[type[Event], Fold] = {}
        for fold in self._applying:
            parameters = list(inspect.signature(fold).parameters)
            kinds = event_classes(types_of(fold).get(parameters[1])) if len(parameters) == 2 else []
            if not kinds:
                raise DefinitionError(
                    f"{self.name}.{fold.__name__} applies no event: annotate its parameter with "
                    "the class of one"
                )
            for kind in kinds:
                other = seen.setdefault(kind, fold)
                if other is not fold:
                    raise DefinitionError(
                        f"{self.name}.{other.__name__} and {self.name}.{fold.__name__} both apply "
                        f"{kind.__name__}: one method applies an event"
                    )
                yield kind, fold

    def _check_forgotten(self) -> None:
        """A method that turns an event into a state and is no fold was meant to be one."""
        for name, found in vars(self.cls).items():
            is_fold = getattr(found, "__applies__", False)
            if not inspect.isfunction(found) or is_fold or name.startswith("_"):
                continue
            parameters = list(inspect.signature(found).parameters)
            returned = inspect.get_annotations(found).get("return")
            is_state = returned is Self or returned in ("Self", self.name) or returned is self.cls
            if (
                is_state
                and len(parameters) == 2
                and event_classes(types_of(found).get(parameters[1]))
            ):
                raise DefinitionError(f"{self.name}.{name} takes an event: put @applies above it")

    def apply(self, state: EntityT, event: Event) -> EntityT:
        """The state after an event; an event without an `@applies` method changes nothing."""
        fold = self.folds.get(event.__event__.name)
        if fold is None:
            return state
        after: EntityT = fold(state, event)
        if not isinstance(after, self.cls):
            raise DefinitionError(
                f"{self.name}.{fold.__name__} returned {type(after).__name__}: "
                "return self.replace(...)"
            )
        return after


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Entity:
    """The state that the events of one stream add up to. Every field has a default.

    `stream` says where the events of an entity lie: a path with `{id}` in it. `snapshot` is the
    number of the fold: raise it when `@applies` methods change, and older snapshots are left
    alone.
    """

    __entity__: ClassVar[EntityKind]

    def __init_subclass__(cls, *, stream: str | None = None, snapshot: int = 1) -> None:
        super().__init_subclass__()
        if stream is not None and not _TEMPLATE.fullmatch(stream):
            raise DefinitionError(
                f"the stream of {cls.__name__} is {stream!r}, and must be a path with one {{id}}"
            )
        try:
            dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        except ValueError as error:  # a list or dict as a default
            raise DefinitionError(f"{cls.__name__}: {error}; or give a tuple") from None
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            missing = dataclasses.MISSING
            if field.default is missing and field.default_factory is missing:
                raise DefinitionError(
                    f"{cls.__name__}.{field.name} needs a default: the state before any event"
                )
        inherited = getattr(cls, "__entity__", None)
        template = stream or ("" if inherited is None else inherited.template)
        cls.__entity__ = EntityKind(cls, template, snapshot)

    def replace(self, **changes: Any) -> Self:
        """The state with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


def _require_plain(function: Callable[..., Any], what: str) -> None:
    """Actions and folds read what they are given, and wait for nothing."""
    if inspect.iscoroutinefunction(function):
        raise DefinitionError(f"{function.__name__} is async: {what} is a plain method")


def _require_arguments(rule: _Invariant, function: Callable[..., Any]) -> None:
    """Raise `DefinitionError` if an action has fewer arguments than its invariant takes."""
    given = dict.fromkeys(list(inspect.signature(function).parameters)[1:])
    try:
        taken = _taken(rule.holds, given)
        inspect.signature(rule.holds).bind(None, *taken)
    except TypeError:
        raise DefinitionError(
            f"the @invariant {rule.reason!r} of {function.__name__} takes other arguments than "
            "the state and those of the action"
        ) from None


def events_of(emitted: Any, action: str) -> list[Event]:
    """What an action returned, as a list."""
    if emitted is None:
        return []
    many = isinstance(emitted, Iterable) and not isinstance(emitted, str)
    found = list(emitted) if many else [emitted]
    for event in found:
        if not isinstance(event, Event):
            raise DefinitionError(f"{action} returned {type(event).__name__}, which is no event")
    return found


def require_action(found: Any) -> None:
    """Raise `DefinitionError` for what is no action of an entity."""
    if not isinstance(found, Action):
        name = getattr(found, "__qualname__", repr(found))
        raise DefinitionError(f"{name} is no @action of an entity's class, such as Order.place")


def require_entity(found: Any) -> None:
    """Raise `DefinitionError` for what is no class of entities."""
    if not (isinstance(found, type) and issubclass(found, Entity)):
        raise DefinitionError(f"{found!r} is no class of entities")


def is_event_class(found: Any) -> bool:
    """Whether it is a class of events."""
    return isinstance(found, type) and issubclass(found, Event)


def types_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function as types.

    A name that the module does not have is looked for among the events: a test may declare them
    inside a function.
    """
    known = dict(_BY_CLASS_NAME)
    names = {**known, **getattr(function, "__globals__", {})}
    found: dict[str, Any] = {}
    for name, annotation in inspect.get_annotations(function).items():
        try:
            found[name] = _resolved(annotation, names)
        except (NameError, TypeError, SyntaxError, AttributeError):
            found[name] = Any
    return found


def _resolved(annotation: Any, names: dict[str, Any]) -> Any:
    holder = type("holder", (), {"__annotations__": {"value": annotation}})
    return typing.get_type_hints(holder, names, {"Self": Any})["value"]


def event_classes(annotation: Any) -> list[type[Event]]:
    """The events that a type names: itself, the members of a union, the items of a list."""
    if isinstance(annotation, type) and issubclass(annotation, Event):
        return [annotation] if annotation is not Event else []
    found: list[type[Event]] = []
    for argument in typing.get_args(annotation):
        found += event_classes(argument)
    return found


def _taken(holds: Callable[..., Any], given: dict[str, Any]) -> list[Any]:
    """The arguments of an action that a function of state and arguments takes."""
    names = list(inspect.signature(holds).parameters)[1:]
    if all(name in given for name in names):
        return [given[name] for name in names]
    return list(given.values())[: len(names)]
