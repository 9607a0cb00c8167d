"""The public suite against a server that does not lead: what it asks of subscriptions is passed on
to the one that does, and clients cannot tell."""

from pathlib import Path

import pytest

from tests import npm
from tests.conformance.test_public_suite import (
    SUITE_SECONDS_MAX,
    TESTS_IN_THE_SUITE,
    run_suite,
)
from tests.postgres.nodes import nodes


@pytest.mark.timeout(SUITE_SECONDS_MAX + npm.INSTALL_SECONDS_MAX)
def test_every_test_of_the_public_suite_passes_on_a_node_that_does_not_lead(
    postgres_dsn: str, tmp_path: Path
) -> None:
    with nodes(postgres_dsn, 2) as (_, second):
        ran = run_suite(second.url, report=tmp_path / "report.json")

    assert not ran.failures, f"{len(ran.failures)} failed:\n" + "\n".join(ran.failures)
    assert ran.passed == TESTS_IN_THE_SUITE
