"""Which thread looks at an upload: a large body must not hold up the loop."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import pytest

from fencepost.http.exchanges import SHARED_BODY_BYTES_MAX
from fencepost.http.messages import Request, Response
from fencepost.protocol.limits import Limits
from fencepost.server.handlers import parsing
from fencepost.server.handlers.fields import RefusedError
from fencepost.server.handlers.staging import BUNDLE, Staging
from fencepost.store.contract import Bundle, Staged, Store, Upload

JSON = "application/json"
LARGE = b"[%b1]" % (b"1," * (SHARED_BODY_BYTES_MAX // 2))


class KeepingStore:
    """Takes every chunk at once, in place of a store."""

    def stage(self, upload: Upload, done: Callable[[Any], None]) -> None:
        self.stage_all(Bundle([upload]), lambda outcomes: done(outcomes[0]))

    def stage_all(self, bundle: Bundle, done: Callable[[Any], None]) -> None:
        batches = [upload.batch for upload in bundle.uploads]
        done([Staged(batch.messages, batch.size, repeated=False) for batch in batches])


def _request(body: bytes, content_type: str) -> Request:
    headers = {b"content-type": content_type.encode()}
    return Request("POST", b"/v1/staging/t/p", b"", headers, body)


def _bundle(chunks: Sequence[bytes]) -> bytes:
    index = [
        {"piece": number, "stream": "s", "content_type": JSON, "bytes": len(chunk)}
        for number, chunk in enumerate(chunks)
    ]
    return msgspec.json.encode(index) + b"\n" + b"".join(chunks)


async def _staged(request: Request, limits: Limits) -> Response:
    answered: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
    work = Staging(cast(Store, KeepingStore()), limits).stage(request, answered.set_result, b"t/p")
    return await (answered if work is None else work)


@pytest.mark.parametrize(
    ("body", "content_type", "beside"),
    [
        (b"[1,2]", JSON, False),
        (_bundle([b"[1,2]", b"3"]), BUNDLE, False),
        (LARGE, JSON, True),
        (_bundle([b"[1,2]", LARGE]), BUNDLE, True),
    ],
)
async def test_a_large_upload_is_read_beside_the_loop(
    body: bytes, content_type: str, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = parsing.batch_of
    threads = set()

    def noted(*arguments: Any) -> Any:
        threads.add(threading.get_ident())
        return reads(*arguments)

    monkeypatch.setattr(parsing, "batch_of", noted)

    answer = await _staged(_request(body, content_type), Limits(messages_per_append_max=len(LARGE)))

    assert answer.status == 201
    assert (threading.get_ident() not in threads) == beside


@pytest.mark.parametrize("chunk", [LARGE, b"[%b]" % (b" " * SHARED_BODY_BYTES_MAX), LARGE[:-1]])
async def test_a_large_upload_that_cannot_be_taken_is_refused(chunk: bytes) -> None:
    for body, content_type in ((chunk, JSON), (_bundle([b"1", chunk]), BUNDLE)):
        with pytest.raises(RefusedError):
            await _staged(_request(body, content_type), Limits(messages_per_append_max=1_000))
