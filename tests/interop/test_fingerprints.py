"""Fingerprints as a program in another language computes them from the reference page alone.

The values to test against are read out of the page itself.
"""

import base64
import json
import re
import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fencepost.protocol.fingerprints import Unsendable, canonical_meta, fingerprint, refuse_fields
from tests import npm
from tests.unit.protocol.strategies import VALUES

pytestmark = pytest.mark.timeout(npm.INSTALL_SECONDS_MAX + 120)

PAGE = Path(__file__).parents[2] / "docs/reference/fingerprints.md"


def from_node(sends: list[dict[str, Any]]) -> list[str]:
    """What the Node program answers to each send."""
    outcome = subprocess.run(
        [npm.node(), "interop/fingerprints.mjs"],
        cwd=npm.FOLDER,
        input="".join(f"{json.dumps(send)}\n" for send in sends),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout.split()


def ours(send: dict[str, Any]) -> str:
    """The fingerprint in hexadecimal, or the code of the refusal."""
    kind, ref, reply_to, priority = (send[name] for name in ("kind", "ref", "reply_to", "priority"))
    refused = refuse_fields(kind, ref, reply_to, priority)
    if refused is not None:
        return refused.code
    meta = canonical_meta((send["meta"] or "").encode())
    if isinstance(meta, Unsendable):
        return meta.code
    return fingerprint(
        kind=kind,
        ref=ref,
        reply_to=reply_to,
        priority=priority,
        meta=meta,
        body_sha256=sha256(base64.b64decode(send["body_base64"])).digest(),
    ).hex()


def test_the_values_on_the_page_are_those_of_both_programs() -> None:
    block = re.search(r"^```json\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    sends = [json.loads(line) for line in block[1].splitlines()]

    answers = from_node(sends)

    expected = [send["fingerprint"] for send in sends]
    assert len(expected) >= 5
    assert answers == expected
    assert list(map(ours, sends)) == expected


TEXTS = st.text(st.characters(blacklist_categories=["Cs"]), max_size=6)
# Spelled as clients spell it, and now and then broken: one character less, or a key twice.
WHOLE = st.builds(
    lambda value, ascii_only, indent: json.dumps(value, ensure_ascii=ascii_only, indent=indent),
    st.dictionaries(st.text(max_size=6), VALUES, max_size=4) | VALUES,
    st.booleans(),
    st.sampled_from([None, 1]),
)
BROKEN = st.builds(lambda text, at: text[:at] + text[at + 1 :], WHOLE, st.integers(0, 30))
DOUBLED = st.builds(lambda one, other: f'{{"k":{one},"\\u006b":{other}}}', WHOLE, WHOLE)
METAS = (WHOLE | BROKEN | DOUBLED).filter(lambda text: text.isascii() or "\ud800" not in text)
SENDS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["topic", "dm", "queue", "mail"]),
        "ref": st.sampled_from(["alerts", "a.b-c_d", "ann", ".", ".."]) | TEXTS,
        "reply_to": st.just("") | TEXTS,
        "priority": st.sampled_from(["now", "next", "low", ""]),
        "meta": st.none() | METAS,
        "body_base64": st.binary(max_size=40).map(lambda body: base64.b64encode(body).decode()),
    }
)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(SENDS, min_size=100, max_size=300))
def test_random_sends_have_the_same_fingerprint_or_are_refused_by_both(
    sends: list[dict[str, Any]],
) -> None:
    """Both programs take the same sends, and give the same fingerprint to those they take."""
    for send, theirs in zip(sends, from_node(sends), strict=True):
        mine = ours(send)

        if mine.startswith("meta_"):
            assert theirs.startswith("meta_"), send  # with several faults any may be named
        else:
            assert mine == theirs, send
