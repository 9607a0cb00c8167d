"""Events and entities as they are declared: names, schemas, actions, invariants, folds."""

from __future__ import annotations

from typing import Any, Self

import pytest

from fencepost.events import (
    ActionInvalidError,
    App,
    DefinitionError,
    Entity,
    Event,
    InvariantError,
    action,
    applies,
    invariant,
    upcasts,
)
from fencepost.events.types import require_action
from tests.unit.events.shop import Order, Placed, Reserved, Stock


def decide(state: Stock, **named: object) -> list[Event]:
    return Stock.reserve.decide(state, "stock/tea", (), named)


def test_an_event_is_frozen_and_takes_its_fields_by_name() -> None:
    event = Placed(sku="tea", quantity=2)

    with pytest.raises(AttributeError):
        event.sku = "coffee"  # type: ignore[misc]
    assert event == Placed(sku="tea", quantity=2)


def test_an_event_has_the_name_of_its_class_unless_it_says_otherwise() -> None:
    class Shipped(Event, name="order.shipped", schema=3):
        carrier: str

    assert Placed.__event__.name == "Placed"
    assert (Shipped.__event__.name, Shipped.__event__.schema) == ("order.shipped", 3)


def test_a_name_of_the_server_is_refused() -> None:
    with pytest.raises(DefinitionError, match="belong to the server"):

        class Closed(Event, name="$closed"):
            pass


def test_an_action_decides_an_event() -> None:
    assert decide(Stock(), order="orders/7", quantity=2) == [Reserved(order="orders/7", quantity=2)]


def test_an_action_may_decide_several_events_or_none() -> None:
    assert len(Order.place_twice.decide(Order(), "orders/7", ("tea",), {})) == 2
    assert Order.place_nothing.decide(Order(), "orders/7", (), {}) == []


def test_a_broken_invariant_names_its_reason() -> None:
    with pytest.raises(InvariantError, match="not enough left") as caught:
        decide(Stock(left=1), order="orders/7", quantity=2)

    assert (caught.value.stream, caught.value.action) == ("stock/tea", "reserve")


@pytest.mark.parametrize(
    "named",
    [{"order": "o", "quantity": "two"}, {"order": "o"}, {"order": "o", "quantity": 1, "x": 1}],
)
def test_arguments_that_an_action_does_not_take_are_refused(named: dict[str, object]) -> None:
    with pytest.raises(ActionInvalidError):
        decide(Stock(), **named)


def test_an_invariant_takes_arguments_by_name_or_in_their_order() -> None:
    class Shelf(Entity, stream="shelves/{id}"):
        @action
        @invariant(lambda shelf, a, b: (a, b) == ("o", 1), "by order")  # noqa: ARG005
        @invariant(lambda shelf, quantity: quantity == 1, "by name")  # noqa: ARG005
        @invariant(lambda shelf: shelf == Shelf(), "the state alone")
        def reserve(self, order: str, quantity: int) -> Reserved:
            return Reserved(order=order, quantity=quantity)

    assert Shelf.reserve.decide(Shelf(), "shelves/1", ("o", 1), {})
    with pytest.raises(InvariantError, match="by order"):
        Shelf.reserve.decide(Shelf(), "shelves/1", ("p", 1), {})
    with pytest.raises(InvariantError, match="by order"):
        Shelf.reserve.decide(Shelf(), "shelves/1", ("o", 2), {})


def test_an_action_can_be_tried_on_a_state() -> None:
    assert Stock().reserve(order="orders/7", quantity=1).quantity == 1


def test_a_fold_gives_the_state_after_an_event() -> None:
    state = Stock.__entity__.apply(Stock(), Reserved(order="orders/7", quantity=3))

    assert state.left == 97


def test_an_event_without_a_fold_changes_nothing() -> None:
    assert Stock.__entity__.apply(Stock(), Placed(sku="tea", quantity=1)) == Stock()


def test_an_entity_knows_the_events_that_its_methods_name() -> None:
    assert Order.__entity__.events() == [Placed]
    assert (Order.__entity__.path_of("7"), Order.__entity__.glob) == ("orders/7", "orders/*")


@pytest.mark.parametrize("entity_id", ["", "a/b", "a\0b", 7])
def test_an_id_that_is_no_segment_of_a_path_is_refused(entity_id: Any) -> None:
    with pytest.raises(ActionInvalidError):
        Order.__entity__.path_of(entity_id)


def test_a_field_of_an_entity_needs_a_default() -> None:
    with pytest.raises(DefinitionError, match="needs a default"):

        class Bad(Entity, stream="bad/{id}"):
            left: int


def test_a_default_that_states_would_share_is_refused() -> None:
    with pytest.raises(DefinitionError, match="Tagged: mutable default"):

        class Tagged(Entity, stream="tagged/{id}"):
            tags: list[str] = []  # noqa: RUF012


def test_a_stream_without_an_id_is_refused() -> None:
    with pytest.raises(DefinitionError, match="must be a path"):

        class Bad(Entity, stream="bad"):
            pass


def test_a_fold_must_say_which_event_it_applies() -> None:
    class Bad(Entity, stream="bad/{id}"):
        @applies
        def something(self, event: int) -> Self:
            return self

    with pytest.raises(DefinitionError, match="applies no event"):
        Bad.__entity__.events()


def test_a_fold_that_returns_no_state_is_named() -> None:
    class Forgetful(Entity, stream="forgetful/{id}"):
        @applies
        def placed(self, event: Placed) -> None:
            pass

    with pytest.raises(DefinitionError, match="returned NoneType"):
        Forgetful.__entity__.apply(Forgetful(), Placed(sku="tea", quantity=1))


def test_an_action_that_returns_no_event_is_named() -> None:
    class Odd(Entity, stream="odd/{id}"):
        @action
        def act(self) -> list[str]:
            return ["x"]

    with pytest.raises(DefinitionError, match="no event"):
        Odd.act.decide(Odd(), "odd/1", (), {})


def test_an_upcaster_is_for_an_older_schema() -> None:
    with pytest.raises(DefinitionError, match="upcaster"):
        upcasts(Placed, 1)


def test_a_bound_method_is_told_from_the_action_of_the_class() -> None:
    with pytest.raises(DefinitionError, match=r"the place of one Order is no @action"):
        require_action(Order().place)


def test_an_invariant_above_its_action_is_refused_because_it_would_not_be_checked() -> None:
    with pytest.raises(DefinitionError, match="stands above @action"):

        class Unchecked(Entity, stream="unchecked/{id}"):
            @invariant(lambda _: False, "never")  # type: ignore[type-var]
            @action
            def act(self) -> Placed:
                return Placed(sku="tea", quantity=1)


def test_an_invariant_that_takes_more_than_its_action_has_is_refused() -> None:
    with pytest.raises(DefinitionError, match="'enough' of act takes other arguments"):

        class Narrow(Entity, stream="narrow/{id}"):
            @action
            @invariant(lambda _, quantity, price: quantity * price > 0, "enough")
            def act(self, quantity: int) -> None:
                return None


def test_an_event_has_one_fold() -> None:
    class Doubled(Entity, stream="doubled/{id}"):
        @applies
        def one(self, event: Placed) -> Self:
            return self

        @applies
        def other(self, event: Placed | Reserved) -> Self:
            return self

    with pytest.raises(DefinitionError, match=r"Doubled\.one and Doubled\.other both apply Placed"):
        Doubled.__entity__.events()


def test_a_subclass_may_fold_an_event_in_its_own_way() -> None:
    class Counted(Order, stream="counted/{id}"):
        @applies
        def placed(self, event: Placed) -> Self:
            return self.replace(placed_count=self.placed_count + event.quantity)

    after = Counted.__entity__.apply(Counted(), Placed(sku="tea", quantity=3))

    assert after.placed_count == 3


def test_a_fold_whose_decorator_was_forgotten_is_named() -> None:
    class Forgotten(Entity, stream="forgotten/{id}"):
        def placed(self, event: Placed) -> Self:
            return self

        def fits(self, event: Placed) -> bool:
            return True

    class Helped(Entity, stream="helped/{id}"):
        def _after(self, event: Placed) -> Self:
            return self

        @applies
        def placed(self, event: Placed) -> Self:
            return self._after(event)

    with pytest.raises(DefinitionError, match=r"Forgotten\.placed takes an event: put @applies"):
        App("any", entities=[Forgotten])
    App("any", entities=[Helped])


def test_actions_and_folds_are_plain_methods() -> None:
    async def act(self: Order) -> Placed:
        return Placed(sku="tea", quantity=1)

    async def fold(self: Order, event: Placed) -> Order:
        return self

    with pytest.raises(DefinitionError, match="act is async: an action is a plain method"):
        action(act)
    with pytest.raises(DefinitionError, match="fold is async: a fold is a plain method"):
        applies(fold)


def test_an_action_that_returns_a_text_is_told_so() -> None:
    class Odd(Entity, stream="odd/{id}"):
        @action
        def act(self) -> str:
            return "placed"

    with pytest.raises(DefinitionError, match="act returned str, which is no event"):
        Odd.act.decide(Odd(), "odd/1", (), {})
