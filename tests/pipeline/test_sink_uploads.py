"""What tasks upload, and what the server refuses: nothing half done, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import fencepost
from fencepost.pipeline.errors import (
    CommitTooLargeError,
    MissingStreamError,
    RowError,
    SinkError,
    StagingExpiredError,
)
from fencepost.pipeline.sink import commit as sink_commit
from fencepost.pipeline.sink.chunks import Chunk
from fencepost.pipeline.sink.upload import BUNDLE_BYTES_MAX, Placed, bundled
from tests.integration.auth_support import principal, token
from tests.pipeline.sink_driver import Driver, parts_waiting
from tests.pipeline.sink_support import messages, waiting_parts
from tests.serving import ServerProcess


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes of runs go where Spark's scratch folder would be."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A stream of the test's own."""
    return f"sink/{request.node.name[:80]}"


def test_abort_drops_what_no_commit_used_and_keeps_what_one_did(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    driver = Driver(server, tmp_path, stream=name)
    used = driver.stage(0, ["1"])
    driver.writer().commit(used, 0)
    unused = driver.stage(1, ["2"], ["3"])

    driver.writer().abort([*used, None], 0)
    driver.writer().abort([None, unused[1]], 1)

    assert messages(server.url, name) == [1]
    assert parts_waiting(server, unused) == [True, False]


def test_an_expired_upload_fails_the_batch_and_leaves_everything_as_it_was(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    driver = Driver(server, tmp_path, stream=name)
    driver.write(0, ["1"])
    staged = driver.stage(1, ["2"], ["3"])
    # To the commit it is the same whether the part expired or was dropped.
    assert parts_waiting(server, staged[1:]) == [True]

    with pytest.raises(StagingExpiredError, match=r"staging_ttl_s.*maxRowsPerTrigger"):
        driver.writer().commit(staged, 1)
    assert messages(server.url, name) == [1]
    driver.restarted().write(1, ["2"], ["3"])

    assert messages(server.url, name) == [1, 2, 3]


def test_a_replay_is_known_although_its_parts_are_gone(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    driver = Driver(server, tmp_path, stream=name)
    driver.write(0, ["0"])
    again = driver.restarted()
    staged = again.stage(1, ["1"])
    driver.write(1, ["1"])
    assert parts_waiting(server, staged) == [True]

    again.writer().commit(staged, 1)

    assert messages(server.url, name) == [0, 1]


def test_chunks_of_some_hundreds_of_streams_share_uploads() -> None:
    """A million rows over 1,000 streams are chunks of 100 KiB each."""
    small = [Placed(Chunk(f"s/{number}", 1, b"x" * 100_000), number, 0) for number in range(30)]
    large = Placed(Chunk("large", 1, b"x" * (BUNDLE_BYTES_MAX // 2)), 30, 0)

    uploads = list(bundled([*small[:15], large, *small[15:]]))

    assert [large] in uploads
    assert len(uploads) == 4
    assert sorted(placed.piece for upload in uploads for placed in upload) == list(range(31))


def test_a_task_that_fails_drops_its_own_uploads(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    waiting = waiting_parts(server.data)
    driver = Driver(server, tmp_path, stream=name, chunkBytes="1024")

    with pytest.raises(RowError, match="row 200 of partition 0"):
        driver.stage(0, [*(f'"{"x" * 100}"' for _ in range(200)), "no"])

    assert waiting_parts(server.data) == waiting


@pytest.mark.parametrize("bound", ["COMMIT_STREAMS_MAX", "COMMIT_PARTS_MAX", "COMMIT_BYTES_MAX"])
def test_a_batch_beyond_a_bound_of_commits_is_refused_by_its_name(
    server: ServerProcess, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(sink_commit, bound, 1)
    driver = Driver(server, tmp_path, "stream string, value string", sinkName=name)
    staged = driver.stage(0, [(f"{name}/a", "1"), (f"{name}/b", "22")])

    with pytest.raises(CommitTooLargeError, match=f"{bound}.*maxRowsPerTrigger"):
        driver.writer().commit(staged, 0)

    assert messages(server.url, f"{name}/a") == []


def test_a_missing_stream_is_refused_before_anything_is_uploaded(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    driver = Driver(server, tmp_path, stream=name, autoCreate="false")

    with pytest.raises(MissingStreamError, match="autoCreate"):
        driver.writer()


def test_a_missing_stream_of_a_column_is_named_and_nothing_is_written(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    columns = "stream string, value string"
    driver = Driver(server, tmp_path, columns, sinkName=name, autoCreate="false")
    with fencepost.connect(server.url) as client:
        client.create(f"{name}/a")

    with pytest.raises(MissingStreamError, match=f"{name}/b"):
        driver.write(0, [(f"{name}/a", "1"), (f"{name}/b", "2")])

    assert messages(server.url, f"{name}/a") == []


def test_a_closed_stream_is_named(server: ServerProcess, tmp_path: Path, name: str) -> None:
    with fencepost.connect(server.url) as client:
        client.create(name, closed=True)

    with pytest.raises(SinkError, match=f"{name}.*stream_closed"):
        Driver(server, tmp_path, stream=name).write(0, ["1"])


def test_a_byte_stream_takes_a_message_for_each_row(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    driver = Driver(server, tmp_path, stream=name, contentType="text/plain")

    driver.write(0, ["one\n", "two\n"], ["three\n"])

    with fencepost.connect(server.url) as client:
        assert "".join(client.stream(name).read()) == "one\ntwo\nthree\n"
        assert client.stream(name, content_type="text/plain").head().content_type == "text/plain"


def test_a_server_that_is_away_is_waited_for(tmp_path: Path, name: str) -> None:
    with ServerProcess(tmp_path / "data") as own:
        driver = Driver(own, tmp_path, stream=name)
        staged = driver.stage(0, ["1"])
        writer = driver.writer()
        own.kill()
        own.restart()

        writer.commit(staged, 0)

        assert messages(own.url, name) == [1]


def test_only_a_principal_that_may_append_may_write(tmp_path: Path) -> None:
    principals = [
        principal("pipeline", ("allowed/**", ["append", "create"])),
        principal("other", ("allowed/**", ["append", "create", "read"])),
    ]
    environment = {"FENCEPOST_PRINCIPALS": msgspec.json.encode(principals).decode()}
    with ServerProcess(tmp_path / "data", environment=environment) as own:
        columns = "stream string, value string"
        driver = Driver(own, tmp_path, columns, sinkName="s", token=token("pipeline"))
        driver.write(0, [("allowed/a", "1")])
        driver.restarted().write(0, [("allowed/a", "1")])

        with pytest.raises((fencepost.ForbiddenError, SinkError), match="403"):
            driver.write(1, [("elsewhere/a", "1")])
        driver.options["token"] = token("other")
        with pytest.raises(fencepost.WriterHeldError):
            driver.restarted().write(1, [("allowed/a", "2")])
        del driver.options["token"]
        with pytest.raises(fencepost.UnauthorizedError):
            driver.restarted().write(1, [("allowed/a", "2")])
        with fencepost.connect(own.url, token=token("other")) as client:
            assert list(client.stream("allowed/a").read()) == [1]
