"""A principal cannot have the server call what listens on the server's own machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.attacks.attacking import attacked, bearer
from tests.engines import engine as engine
from tests.integration.raw import Connection


@pytest.mark.parametrize(("setting", "status"), [("auto", 400), ("refuse", 400), ("allow", 201)])
def test_loopback_is_called_for_a_principal_only_by_an_explicit_setting(
    engine: str, tmp_path: Path, setting: str, status: int
) -> None:
    body = {
        "type": "webhook",
        "pattern": "mallory/*",
        "webhook": {"url": "http://127.0.0.1:9/"},
    }
    environment = {"FENCEPOST_SUBSCRIPTIONS_WEBHOOK_ALLOW_LOCALHOST": setting}
    with attacked(engine, tmp_path, **environment) as server, Connection(server.port) as mallory:
        reply = mallory.ask(
            "PUT",
            "/v1/stream/__ds/subscriptions/s",
            bearer("mallory"),
            "Content-Type: application/json",
            body=json.dumps(body).encode(),
        )

    assert reply.status == status, reply.body
