"""`python -m tests.faults.unfenced`: fencepost with the fence of leases taken out.

Every lease of a target that exists counts as current here, whatever its number. The tests of groups
run against this once, to show that they would notice. Nothing else may ever start it.
"""

from __future__ import annotations

from fencepost.cli.main import main
from fencepost.protocol import acks, leases
from fencepost.protocol.leases import Target


def any_lease_is_current(row: Target | None, number: int) -> bool:
    return row is not None


def take_the_fence_out() -> None:
    for module in (leases, acks):
        assert hasattr(module, "lease_is_current"), "the rule has moved"
        setattr(module, "lease_is_current", any_lease_is_current)  # noqa: B010


if __name__ == "__main__":
    take_the_fence_out()
    main()
