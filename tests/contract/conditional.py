"""Requests with conditions, commits and uploads, as the contract tests write them."""

from typing import Any

from fencepost.protocol.appends import Append, Conditions, ProducerTuple
from fencepost.protocol.batches import digest
from fencepost.protocol.commits import Commit, CommitItem, Part
from fencepost.store.contract import Upload
from tests.contract.subject import Outcome, Subject, answered, batch_of

TEXT = "text/plain"
JSON = "application/json"


def conditional(
    path: str,
    body: bytes = b"",
    content_type: str = TEXT,
    *,
    closes: bool = False,
    producer: tuple[str, int, int] | None = None,
    seq: str | None = None,
    creates: bool = False,
    **conditions: Any,
) -> Append:
    """An append with conditions; `creates` makes the stream when it does not exist."""
    return Append(
        path,
        batch_of(body, content_type) if body else None,
        content_type if body else None,
        closes,
        None if producer is None else ProducerTuple(*producer),
        seq,
        digest(content_type if body else "", closes, body),
        Conditions(create_as=content_type if creates else None, **conditions),
    )


def item(
    path: str, body: bytes = b"", *, parts: tuple[str, ...] = (), **options: Any
) -> CommitItem:
    """An append of a commit; `parts` name parts of the transaction `t`."""
    return CommitItem(conditional(path, body, **options), tuple(Part("t", name) for name in parts))


def commit(*items: CommitItem, key: str | None = None, mark: bytes = b"a") -> Commit:
    """A commit; two with different `mark`s under one key are different requests."""
    return Commit(items, key, mark.ljust(16))


def chunk(
    part: str, body: bytes, ordinal: int = 0, content_type: str = TEXT, txn: str = "t"
) -> Upload:
    """A chunk of a part."""
    batch = batch_of(body, content_type)
    assert batch is not None
    return Upload(
        Part(txn, part), ordinal, content_type, batch, digest(content_type, False, batch.data)
    )


async def ask_append(subject: Subject, path: str, body: bytes = b"", **options: Any) -> Outcome:
    return await answered(subject.ask(subject.store.append, conditional(path, body, **options)))


async def ask_commit(
    subject: Subject, *items: CommitItem, key: str | None = None, mark: bytes = b"a"
) -> Outcome:
    return await answered(subject.ask(subject.store.commit, commit(*items, key=key, mark=mark)))


async def ask_stage(
    subject: Subject, part: str, body: bytes, ordinal: int = 0, content_type: str = TEXT
) -> Outcome:
    upload = chunk(part, body, ordinal, content_type)
    return await answered(subject.ask(subject.store.stage, upload))
