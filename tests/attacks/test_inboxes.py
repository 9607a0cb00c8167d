"""Who may create a topic has nothing delivered into an inbox that it may not send to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines import emptied
from tests.engines import engine as engine
from tests.integration.auth_support import ALL, ROOT, place, principal

TOPICS = ("__mesh/shop/topic/**", ["create", "append", "read", "delete"])
INBOXES = "__mesh/shop/inbox"


@pytest.mark.parametrize(
    ("verbs", "status"), [(["claim", "delete"], 403), (["append"], 201), (["read"], 201)]
)
def test_a_member_is_signed_up_by_who_may_send_to_it_or_read_it(
    engine: str, tmp_path: Path, verbs: list[str], status: int
) -> None:
    mallory = principal("mallory", TOPICS, (f"{INBOXES}/ann", verbs), (f"{INBOXES}/eve", ALL))
    with emptied(engine, tmp_path) as store, place(store, ROOT, mallory) as at:
        root, view = at("root").client, at("mallory").client
        for path in ("", "/members/ann", "/members/eve"):
            assert root.put(f"/v1/mesh/shop{path}").status_code == 201
        assert view.put("/v1/mesh/shop/topics/noise").status_code == 201

        for member in ("eve", "none"):
            view.put(f"/v1/mesh/shop/topics/noise/members/{member}")
        joined = view.put("/v1/mesh/shop/topics/noise/members/ann")
        sent = view.post(
            "/v1/mesh/shop/send", json={"kind": "topic", "ref": "noise", "body": "hello"}
        )
        delivered = root.get(f"/v1/stream/{INBOXES}/ann?offset=-1").json()

    assert joined.status_code == status, joined.text
    assert sent.status_code == 201
    assert len(delivered) == (status == 201)
