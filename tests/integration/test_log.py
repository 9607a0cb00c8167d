"""The global log on a real server: what it shows, in which order, and what it refuses."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from tests.engines import engine as engine
from tests.integration.log_support import ARROW, JSON, Client
from tests.serving import ServerProcess


@pytest.fixture
def client(server_process: ServerProcess) -> Iterator[Client]:
    client = Client(server_process.port)
    yield client
    client.close()


def head_of(client: Client) -> int:
    return int(client.ask("HEAD", "/v1/log").headers["log-head"])


def test_every_message_is_a_line_with_all_that_is_known_of_it(client: Client) -> None:
    client.create("seen/one")
    before = head_of(client)

    reply = client.append(
        "seen/one",
        '[{"a":1}, "zwei" ,\n[3,\r\n3]]',
        Producer_Id='p"1',
        Producer_Epoch="4",
        Producer_Seq="0",
    )

    lines = client.read_all("stream=seen/one", before)
    assert [line["position"] for line in lines] == [before + 1, before + 2, before + 3]
    assert [line["data"] for line in lines] == [{"a": 1}, "zwei", [3, 3]]
    assert [line["version"] for line in lines] == [0, 1, 2]
    assert {line["stream"] for line in lines} == {"seen/one"}
    assert {line["content_type"] for line in lines} == {"application/json"}
    assert all(line["producer"] == {"id": 'p"1', "epoch": 4, "seq": 0} for line in lines)
    offsets = [line["offset"] for line in lines]
    assert offsets[0] == "0000000000000000_0000000000000000"
    # Each offset is a place in the stream: reading after it gives the messages from there on.
    for index, offset in enumerate(offsets):
        rest = client.ask("GET", f"/v1/stream/seen/one?offset={offset}").json()
        assert rest == [line["data"] for line in lines[index:]]
    assert reply.headers["stream-next-offset"] > offsets[-1]


def test_bytes_travel_as_base64_and_are_one_message_each(client: Client) -> None:
    payload = bytes(range(256))
    client.create("seen/bytes", "application/octet-stream")

    client.append("seen/bytes", payload, "application/octet-stream")

    [line] = client.read_all("stream=seen/bytes")
    assert base64.b64decode(line["data_base64"]) == payload
    assert "data" not in line
    assert "producer" not in line


def test_closing_deleting_and_expiring_leave_markers(client: Client) -> None:
    client.create("marked/a")
    client.append("marked/a", "1", Stream_Closed="true")
    client.ask("DELETE", "/v1/stream/marked/a")
    client.create("marked/a", Stream_TTL="0")
    assert client.ask("GET", "/v1/stream/marked/a").status == 404

    lines = client.read_all("stream=marked/a")

    assert [line.get("marker") for line in lines] == [None, "closed", "deleted", "expired"]
    assert len({line["incarnation"] for line in lines}) == 2
    assert lines[1]["offset"] == lines[2]["offset"]
    assert "data" not in lines[2]


def test_a_range_is_open_below_and_closed_above_also_inside_an_append(client: Client) -> None:
    client.create("range/a")
    before = head_of(client)
    client.append("range/a", json.dumps(list(range(10))))

    lines = client.log(f"after={before + 3}&until={before + 6}").lines()

    assert [line["data"] for line in lines] == [3, 4, 5]
    assert [line["position"] for line in lines] == [before + 4, before + 5, before + 6]


def test_a_limit_ends_an_answer_and_next_goes_on_from_there(client: Client) -> None:
    client.create("limit/a")
    before = head_of(client)
    for first in range(0, 30, 10):
        client.append("limit/a", json.dumps(list(range(first, first + 10))))

    seen, after = [], before
    while True:
        reply = client.log(f"after={after}&limit=7")
        assert len(reply.lines()) <= 7
        seen += [line["data"] for line in reply.lines()]
        assert reply.next > after
        after = reply.next
        if reply.at_head:
            break

    assert seen == list(range(30))


def test_the_same_range_gives_the_same_bytes_whatever_happens_to_its_streams(
    client: Client,
) -> None:
    before = head_of(client)
    for path in ("same/kept", "same/deleted"):
        client.create(path)
        client.append(path, '[1, {"two": "2"}]')
    client.create("same/expired", Stream_TTL="1")
    client.append("same/expired", "3")
    until = head_of(client)
    asked = f"after={before}&until={until}"
    first, first_arrow = client.log(asked), client.log(asked, Accept=ARROW)

    client.ask("DELETE", "/v1/stream/same/deleted")
    client.create("same/deleted")
    client.append("same/kept", "4")
    while client.ask("HEAD", "/v1/stream/same/expired").status == 200:
        client.log("live=long-poll&after=now&stream=same/expired")

    assert len(first.lines()) == 5
    assert client.log(asked).body == first.body
    assert client.log(asked, Accept=ARROW).body == first_arrow.body


def test_staged_parts_are_in_the_log_from_their_commit_on(client: Client) -> None:
    for chunk, data in enumerate(("[1,2]", '[{"three":3}]')):
        reply = client.ask("POST", f"/v1/staging/log/p?chunk={chunk}", data, Content_Type=JSON)
        assert reply.status == 201
    before = head_of(client)
    assert client.read_all("stream=staged/a") == []

    append = {
        "stream": "staged/a",
        "content_type": JSON,
        "auto_create": True,
        "parts": [{"txn": "log", "part": "p"}],
    }
    committed = client.ask("POST", "/v1/commit", json.dumps({"appends": [append]}))

    assert committed.status == 200, committed.body
    lines = client.read_all("stream=staged/a")
    assert [line["data"] for line in lines] == [1, 2, {"three": 3}]
    assert [line["position"] for line in lines] == [before + 1, before + 2, before + 3]
    body = client.log("stream=staged/a", Accept=ARROW).body
    values = pa.ipc.open_stream(body).read_all()["value"].to_pylist()
    assert values == [b"1", b"2", b'{"three":3}']


def test_truncated_messages_stay_in_the_log_and_a_marker_follows_them(client: Client) -> None:
    client.create("cut/a")
    kept_from = client.append("cut/a", "[1,2]").headers["stream-next-offset"]
    client.append("cut/a", "3")

    cut = client.ask("POST", f"/v1/stream/cut/a?truncate&before={kept_from}")

    assert cut.status < 300, cut.body
    lines = client.read_all("stream=cut/a")
    assert [line.get("data") for line in lines] == [1, 2, 3, None]
    assert (lines[3]["marker"], lines[3]["offset"]) == ("truncated", kept_from)


def test_a_fork_shows_only_its_own_messages(client: Client) -> None:
    client.create("fork/source")
    client.append("fork/source", "[1,2]")
    client.create("fork/copy", Stream_Forked_From="/v1/stream/fork/source")
    client.append("fork/copy", "3")

    lines = client.read_all("match=fork/*")

    assert [(line["stream"], line["data"]) for line in lines] == [
        ("fork/source", 1),
        ("fork/source", 2),
        ("fork/copy", 3),
    ]
    assert lines[2]["version"] == 2


def test_patterns_and_names_select_together(client: Client) -> None:
    for path in ("pick/a/x", "pick/b/x", "pick/b/y", "pick/c"):
        client.create(path)
        client.append(path, json.dumps(path))

    def picked(query: str) -> list[str]:
        return [line["data"] for line in client.read_all(query)]

    assert picked("match=pick/*/x") == ["pick/a/x", "pick/b/x"]
    assert picked("match=pick/**") == ["pick/a/x", "pick/b/x", "pick/b/y", "pick/c"]
    assert picked("match=pick/b/*&stream=pick/c") == ["pick/b/x", "pick/b/y", "pick/c"]
    assert picked("stream=pick/c&stream=pick/a/x") == ["pick/a/x", "pick/c"]
    assert picked("stream=pick/none") == []


def test_parts_are_disjoint_complete_and_keep_each_stream_together(client: Client) -> None:
    for number in range(9):
        client.create(f"parts/{number}")
    for turn in range(3):
        for number in range(9):
            client.append(f"parts/{number}", f"[{turn},{turn}]")
    everything = list(client.raw_lines("match=parts/*"))

    parts = [list(client.raw_lines(f"match=parts/*&part={index}/4")) for index in range(4)]

    assert sorted(line for part in parts for line in part) == sorted(everything)
    owners = [{json.loads(line)["stream"] for line in part} for part in parts]
    assert sum(map(len, owners)) == 9
    assert all(
        [json.loads(line)["position"] for line in part]
        == sorted(json.loads(line)["position"] for line in part)
        for part in parts
    )
    whole = sorted(client.raw_lines())
    assert sorted(line for i in range(3) for line in client.raw_lines(f"part={i}/3")) == whole


def test_arrow_holds_the_same_rows_as_the_lines(client: Client) -> None:
    client.create("arrow/json")
    client.create("arrow/bytes", "text/plain")
    before = head_of(client)
    client.append("arrow/json", '[1,{"b":[2, 3]},"x"]')
    client.append("arrow/bytes", b"\0,\n", "text/plain", **_producer("w", 1, 0))
    client.append("arrow/json", '"single"', **_producer("w2", 0, 0))
    client.append("arrow/json", "[true,false]", Stream_Closed="true")
    asked = f"match=arrow/*&after={before}"
    lines = client.log(asked).lines()

    table = pa.ipc.open_stream(client.log(asked, Accept=ARROW).body).read_all()

    assert table.schema.names == [
        *("stream", "offset", "version", "position", "timestamp", "content_type"),
        *("producer_id", "producer_epoch", "producer_seq", "value", "marker"),
    ]
    assert [str(kind) for kind in table.schema.types] == [
        *("string", "string", "int64", "int64", "timestamp[us, tz=UTC]", "string"),
        *("string", "int64", "int64", "binary", "string"),
    ]
    rows = table.to_pylist()
    assert len(rows) == len(lines) == 8
    for row, line in zip(rows, lines, strict=True):
        for name in ("stream", "offset", "position"):
            assert row[name] == line[name]
        assert row["timestamp"] == datetime.fromtimestamp(line["timestamp_ms"] / 1000, UTC)
        assert row["marker"] == line.get("marker")
        assert row["version"] == line.get("version")
        producer = line.get("producer", {})
        assert row["producer_id"] == producer.get("id")
        assert row["producer_epoch"] == producer.get("epoch")
        assert row["producer_seq"] == producer.get("seq")
        if "data" in line:
            assert json.loads(row["value"]) == line["data"]
        elif "data_base64" in line:
            assert row["value"] == base64.b64decode(line["data_base64"])
        else:
            assert row["value"] is None
    assert rows[1]["value"] == b'{"b":[2, 3]}'
    assert rows[3]["value"] == b"\0,\n"


def _producer(name: str, epoch: int, seq: int) -> dict[str, str]:
    return {"Producer_Id": name, "Producer_Epoch": str(epoch), "Producer_Seq": str(seq)}


def test_arrow_of_part_of_an_append_holds_that_part_only(client: Client) -> None:
    client.create("arrow/cut")
    before = head_of(client)
    client.append("arrow/cut", json.dumps([f"{n:0>1000}" for n in range(100)]))

    reply = client.log(f"after={before + 40}&until={before + 43}", Accept=ARROW)

    rows = pa.ipc.open_stream(reply.body).read_all().to_pylist()
    assert [int(json.loads(row["value"])) for row in rows] == [40, 41, 42]
    assert [row["version"] for row in rows] == [40, 41, 42]
    assert len(reply.body) < 10_000


def test_columns_that_are_named_are_what_they_are_among_all_others(client: Client) -> None:
    """Whichever columns are asked for, of whole appends, of parts of them and of markers."""
    client.create("columns/json")
    client.create("columns/bytes", "text/plain")
    before = head_of(client)
    client.append("columns/bytes", b"one", "text/plain", **_producer("w", 1, 0))
    client.append("columns/bytes", b",two", "text/plain")
    singles = head_of(client)
    client.append("columns/json", '[1,{"b":[2, 3]},"x","",[]]', **_producer("v", 0, 0))
    client.append("columns/bytes", b"\0,\n", "text/plain", **_producer("w", 1, 1))
    client.append("columns/json", '["single"]')
    client.append("columns/json", "[true,false]", Stream_Closed="true")
    ranges = [(before, singles), (before, head_of(client)), (singles + 1, singles + 4)]
    named = [{"value"}, {"size"}, {"offset"}, {"position", "stream"}, {"marker", "version"}]
    named += [{"timestamp", "content_type", "producer_seq"}, {"value", "size", "producer_id"}]

    for after, until in ranges:
        asked = f"match=columns/*&after={after}&until={until}"
        whole = pa.ipc.open_stream(client.log(asked, Accept=ARROW).body).read_all()
        sizes = [None if one is None else len(one) for one in whole["value"].to_pylist()]
        whole = whole.append_column("size", pa.array(sizes, pa.int64()))
        for columns in named:
            reply = client.log(f"{asked}&columns={','.join(sorted(columns))}", Accept=ARROW)
            table = pa.ipc.open_stream(reply.body).read_all()
            table.validate(full=True)
            assert set(table.schema.names) == columns
            assert table.to_pydict() == whole.select(table.schema.names).to_pydict()


def test_values_alone_are_read_and_sent_alone(client: Client) -> None:
    client.create("alone/a")
    before = head_of(client)
    client.append("alone/a", json.dumps(["x" * 98] * 1_000))

    reply = client.log(f"after={before}&columns=value,marker", Accept=ARROW)

    assert 100_000 < len(reply.body) < 111_000


@pytest.mark.parametrize(
    ("columns", "accept"),
    [("value,nothing", ARROW), ("", ARROW), ("value", "application/x-ndjson"), ("value", "*/*")],
)
def test_columns_that_there_are_not_are_refused(client: Client, columns: str, accept: str) -> None:
    reply = client.log(f"columns={columns}", Accept=accept)

    assert (reply.status, reply.json()["code"]) == (400, "columns_invalid")


def test_an_empty_arrow_answer_still_has_its_columns(client: Client) -> None:
    reply = client.log("after=now", Accept=ARROW)

    table = pa.ipc.open_stream(reply.body).read_all()

    assert table.num_rows == 0
    assert "value" in table.schema.names


def test_a_large_log_comes_in_bounded_answers(client: Client) -> None:
    client.create("large/a", "application/octet-stream")
    before = head_of(client)
    for _ in range(12):
        client.append("large/a", bytes(1 << 20), "application/octet-stream")

    sizes, after = [], before
    while True:
        reply = client.log(f"after={after}", Accept=ARROW)
        sizes.append(len(reply.body))
        after = reply.next
        if reply.at_head:
            break

    assert len(sizes) == 4
    assert max(sizes) < 5 << 20


def test_a_long_poll_waits_for_its_own_streams_and_ends_empty(client: Client) -> None:
    reply = client.log("live=long-poll&after=now&match=nobody/**")

    assert reply.status == 204
    assert reply.at_head
    assert reply.next == int(reply.headers["log-head"])


def test_the_newest_position_is_told_without_reading(client: Client) -> None:
    client.create("head/a")
    before = head_of(client)

    client.append("head/a", "[1,2,3]")

    assert head_of(client) == before + 3


BAD = [
    ("after=x", "after_invalid"),
    ("after=-2", "after_invalid"),
    ("after=1.5", "after_invalid"),
    ("after=", "after_invalid"),
    ("until=-1", "until_invalid"),
    ("until=x", "until_invalid"),
    ("after=5&until=4", "range_invalid"),
    ("after=1000000000", "after_beyond_head"),
    ("limit=0", "limit_invalid"),
    ("limit=100001", "limit_invalid"),
    ("limit=ten", "limit_invalid"),
    ("part=1", "part_invalid"),
    ("part=2/2", "part_invalid"),
    ("part=0/1025", "part_invalid"),
    ("match=", "match_invalid"),
    ("match=a//b", "match_invalid"),
    ("match=a**", "match_invalid"),
    ("match=" + "a" * 1025, "match_invalid"),
    ("stream=", "path_invalid"),
    ("stream=a/../b", "path_invalid"),
    ("stream=__ds/x", "path_reserved"),
    ("stream=" + "a" * 1025, "path_too_long"),
    ("&".join(f"stream=s{n}" for n in range(65)), "streams_too_many"),
    ("live=yes", "live_invalid"),
    ("pruned=maybe", "pruned_invalid"),
    ("order=down", "order_invalid"),
    ("order=desc&live=long-poll", "order_invalid"),
    ("order=desc&live=sse", "order_invalid"),
    ("order=asc&order=desc", "query_repeated"),
    ("name=", "name_invalid"),
    ("name=a%00b", "name_invalid"),
    ("name=" + "a" * 257, "name_invalid"),
    ("&".join(f"name=n{n}" for n in range(65)), "name_invalid"),
    ("correlation=", "correlation_invalid"),
    ("correlation=a%0Ab", "correlation_invalid"),
    ("correlation=" + "a" * 257, "correlation_invalid"),
    ("correlation=a&correlation=b", "query_repeated"),
    ("from=0", "parameter_unknown"),
    ("after=0&after=1", "query_repeated"),
    ("match=%FF", "query_invalid"),
    ("&".join(["stream=a"] * 300), "query_invalid"),
]


@pytest.mark.parametrize(("query", "code"), BAD)
def test_a_bad_parameter_is_refused_by_name(client: Client, query: str, code: str) -> None:
    reply = client.log(query)

    assert (reply.status, reply.json()["code"]) == (400, code)
    assert reply.headers["content-type"] == "application/problem+json"


BAD_PLANS = [
    ("after=now", "after_invalid"),
    ("after=x", "after_invalid"),
    ("after=5&until=4", "range_invalid"),
    ("after=1000000000", "after_beyond_head"),
    ("rows_max=0", "rows_max_invalid"),
    ("bytes_max=-1", "bytes_max_invalid"),
    ("parts=0", "parts_invalid"),
    ("parts=257", "parts_invalid"),
    ("at=noon", "at_invalid"),
    ("limit=5", "parameter_unknown"),
    ("order=desc", "parameter_unknown"),
    ("name=Paid", "parameter_unknown"),
]


@pytest.mark.parametrize(("query", "code"), BAD_PLANS)
def test_a_bad_parameter_of_a_plan_is_refused_by_name(
    client: Client, query: str, code: str
) -> None:
    reply = client.ask("GET", f"/v1/log/plan?{query}")

    assert (reply.status, reply.json()["code"]) == (400, code)


@pytest.mark.parametrize(
    ("accept", "live"),
    [("text/html", ""), ("image/png, text/css;q=0.5", ""), (ARROW, "live=sse")],
)
def test_a_form_that_there_is_not_is_refused(client: Client, accept: str, live: str) -> None:
    reply = client.log(live, Accept=accept)
    head = client.ask("HEAD", f"/v1/log?{live}", Accept=accept)

    assert (reply.status, reply.json()["code"]) == (406, "not_acceptable")
    assert head.status == 406


@pytest.mark.parametrize("accept", ["*/*", "application/x-ndjson", "text/html, */*;q=0.1"])
def test_lines_are_what_anybody_gets_who_takes_anything(client: Client, accept: str) -> None:
    reply = client.log("after=now", Accept=accept)

    assert reply.status == 200
    assert reply.headers["content-type"] == "application/x-ndjson"


def test_a_bad_last_event_id_is_refused(client: Client) -> None:
    reply = client.log("live=sse", Last_Event_ID="abc")

    assert (reply.status, reply.json()["code"]) == (400, "after_invalid")


@pytest.mark.parametrize("path", ["/v1/log", "/v1/log/plan", "/v1/streams"])
def test_the_log_cannot_be_written_to(client: Client, path: str) -> None:
    reply = client.ask("POST", path, "{}", Content_Type="application/json")

    assert (reply.status, reply.json()["code"]) == (405, "method_not_allowed")


def test_without_pyarrow_lines_are_offered_instead(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "pyarrow.py").write_text("raise ImportError('not here')\n")

    with ServerProcess(tmp_path / "data", environment={"PYTHONPATH": str(hidden)}) as server:
        client = Client(server.port)
        refused = client.log(Accept=ARROW)
        lines = client.log()
        client.close()

    assert (refused.status, refused.json()["code"]) == (406, "arrow_unavailable")
    assert "fencepost[arrow]" in refused.json()["detail"]
    assert lines.status == 200
