"""Requests that must be refused: each with its bytes, its status and its code."""

from tests.integration.bad_input_requests import (
    JSON,
    MAX,
    ROOT,
    TEXT,
    WITNESS,
    Row,
    get,
    path,
    post,
    put,
)
from tests.integration.bad_input_writers import BAD_INTEGERS, CONDITIONS, PRODUCERS, SEQUENCES
from tests.integration.raw import request

PATHS = [
    *path("empty", ROOT, "path_invalid"),
    *path("empty first segment", ROOT + "/a", "path_invalid"),
    *path("empty middle segment", ROOT + "a//b", "path_invalid"),
    *path("empty last segment", ROOT + "a/", "path_invalid"),
    *path("only slashes", ROOT + "///", "path_invalid"),
    *path("dot", ROOT + ".", "path_invalid"),
    *path("dot dot", ROOT + "..", "path_invalid"),
    *path("traversal", ROOT + "../../etc/passwd", "path_invalid"),
    *path("traversal in the middle", ROOT + "a/../witness", "path_invalid"),
    *path("escaped traversal", ROOT + "%2e%2e/%2E%2E/etc/passwd", "path_invalid"),
    *path("half escaped dot", ROOT + "a/.%2e", "path_invalid"),
    *path("NUL", ROOT + "a%00b", "path_invalid"),
    *path("escaped line feed", ROOT + "a%0ab", "path_invalid"),
    *path("escaped CR", ROOT + "a%0d", "path_invalid"),
    *path("escaped tab", ROOT + "%09", "path_invalid"),
    *path("escaped DEL", ROOT + "a%7f", "path_invalid"),
    *path("escaped slash", ROOT + "a%2Fb", "path_invalid"),
    *path("escaped slash, small", ROOT + "a%2fb", "path_invalid"),
    *path("lone percent", ROOT + "a%", "path_invalid"),
    *path("half an escape", ROOT + "a%4", "path_invalid"),
    *path("no hexadecimal", ROOT + "a%zz", "path_invalid"),
    *path("half hexadecimal", ROOT + "a%4g", "path_invalid"),
    *path("not UTF-8", ROOT + "%ff", "path_invalid"),
    *path("broken UTF-8", ROOT + "%c3%28", "path_invalid"),
    *path("a surrogate", ROOT + "%ed%a0%80", "path_invalid"),
    *path("overlong encoding of a slash", ROOT + "%c0%af", "path_invalid"),
    *path("raw bytes that are not UTF-8", ROOT.encode() + b"\xff\xfe", "bad_request"),
    *path("overlong", ROOT + "a" * 1025, "path_too_long", 414),
    *path("overlong once decoded", ROOT + "%61" * 1025, "path_too_long", 414),
    *path("overlong in bytes, not in characters", ROOT + "%c3%a9" * 513, "path_too_long", 414),
    *path("overlong before decoding", ROOT + "%61" * 2000, "path_too_long", 414),
    *path("overlong target", ROOT + "a" * 9000, "target_too_long", 414),
    *path("reserved", ROOT + "__ds", "path_reserved"),
    *path("reserved, escaped", ROOT + "%5f%5Fds/subscriptions/x", "path_reserved"),
    *path("no stream root", "/v1/stream", "not_found", 404),
    *path("another version", "/v2/stream/a", "not_found", 404),
    *path("root in capitals", "/V1/Stream/a", "not_found", 404),
    *path("nothing at all", "/", "not_found", 404),
    *path("fragment", ROOT + "a#b", "bad_request"),
]

METHODS = [
    Row("PATCH", request("PATCH", WITNESS), 405, "method_not_allowed"),
    Row("unknown method", request("BREW", WITNESS), 400, "method_unknown"),
    Row("TRACE", request("TRACE", WITNESS), 400, "method_unknown"),
    Row("small letters", request("get", WITNESS), 400, "method_unknown"),
    Row("CONNECT", request("CONNECT", "test:80"), 400, "method_unknown"),
    Row("POST to /healthz", request("POST", "/healthz"), 405, "method_not_allowed"),
    Row("DELETE of /metrics", request("DELETE", "/metrics"), 405, "method_not_allowed"),
]

QUERIES = [
    get("empty offset", "offset_invalid", "offset="),
    get("offset of letters", "offset_invalid", "offset=abc"),
    get("offset without padding", "offset_invalid", "offset=0_0"),
    get("offset below the start", "offset_invalid", "offset=-2"),
    get("offset now in capitals", "offset_invalid", "offset=NOW"),
    get("offset with a blank", "offset_invalid", "offset=now%20"),
    get("offset with a plus", "offset_invalid", "offset=+1"),
    get("offset with a NUL", "offset_invalid", "offset=%00"),
    get("offset with a line feed", "offset_invalid", "offset=now%0a"),
    get("offset of other digits", "offset_invalid", "offset=" + "%d9%a0" * 16 + "_" + "0" * 16),
    get("long offset", "offset_invalid", "offset=" + "9" * 5000),
    get("offset beyond the tail", "offset_invalid", f"offset={9:016d}_{900:016d}"),
    get("offset with another count", "offset_invalid", f"offset={1:016d}_{3:016d}"),
    get("offset beyond 2^53", "offset_invalid", "offset=" + "9" * 16 + "_" + "9" * 16),
    get("offset twice", "query_repeated", "offset=-1&offset=-1"),
    get("offset twice, once escaped", "query_repeated", "offset=-1&%6fffset=now"),
    get("unknown live", "live_invalid", "offset=-1&live=websocket"),
    get("empty live", "live_invalid", "offset=-1&live="),
    get("live in capitals", "live_invalid", "offset=-1&live=SSE"),
    get("live twice", "query_repeated", "offset=-1&live=sse&live=sse"),
    get("long-poll without an offset", "offset_missing", "live=long-poll"),
    get("SSE without an offset", "offset_missing", "live=sse"),
    get("long-poll at a bad offset", "offset_invalid", f"offset={1:016d}_{3:016d}&live=long-poll"),
    get("SSE at a bad offset", "offset_invalid", f"offset={1:016d}_{3:016d}&live=sse"),
    get("SSE beyond the tail", "offset_invalid", f"offset={9:016d}_{900:016d}&live=sse"),
    get("long-poll beyond the tail", "offset_invalid", f"offset={9:016d}_{9:016d}&live=long-poll"),
    get("cursor twice", "query_repeated", "offset=-1&live=long-poll&cursor=1&cursor=2"),
    get("query that is not UTF-8", "query_invalid", "offset=%ff"),
    get("raw bytes", "bad_request", b"offset=\xff"),
    get("too many parameters", "query_invalid", "&".join(["a=1"] * 65)),
]

JSON_BODIES = {
    "nothing but a bracket": b"[",
    "an open object": b'{"a":1',
    "a trailing comma": b"[1,]",
    "two values": b"1 2",
    "NaN": b"NaN",
    "single quotes": b"{'a':1}",
    "a byte order mark": b"\xef\xbb\xbf1",
    "a raw control character": b'"\x01"',
    "no UTF-8": b'"\xff"',
    "no UTF-8 in a key": b'{"\xc3":1}',
    "a raw surrogate": b'"\xed\xa0\x80"',
    "a bad escape": b'"\\q"',
    "a comment": b"/**/1",
    "blanks only": b"   ",
    "deep arrays": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
}

BODIES = [
    *(
        post(f"JSON: {name}", "json_invalid", JSON, body=body, to="witness-json")
        for name, body in JSON_BODIES.items()
    ),
    *(put(f"JSON: {name}", "json_invalid", JSON, body=body) for name, body in JSON_BODIES.items()),
    post("JSON: an empty array", "batch_empty", JSON, body=b"[]", to="witness-json"),
    post("JSON: an empty array, spread", "batch_empty", JSON, body=b" [ \n] ", to="witness-json"),
    post(
        "JSON: too many messages",
        "batch_too_large",
        JSON,
        body=b"[" + b"0," * 100_000 + b"0]",
        status=413,
        to="witness-json",
    ),
    post("no body", "body_empty", TEXT, body=b""),
    post("no body, Stream-Closed: false", "body_empty", TEXT, "Stream-Closed: false", body=b""),
    post("no body, Stream-Closed: 1", "body_empty", TEXT, "Stream-Closed: 1", body=b""),
    post("no body, Stream-Closed empty", "body_empty", TEXT, "Stream-Closed:", body=b""),
    post("no body, JSON", "body_empty", JSON, body=b"", to="witness-json"),
    Row(
        "POST too large",
        request("POST", WITNESS, TEXT, f"Content-Length: {2**40}").replace(
            b"Content-Length: 0\r\n", b""
        ),
        413,
        "body_too_large",
    ),
]

BAD_TYPES = {
    "without a slash": "text",
    "empty subtype": "text/",
    "empty type": "/plain",
    "two slashes": "a/b/c",
    "a blank inside": "te xt/plain",
    "a comma": "text/plain, text/html",
    "a quote": '"text/plain"',
    "parameters without a semicolon": "text/plain charset=utf-8",
    "letters beyond ASCII": "t\u00e9xt/plain",
}

CONTENT_TYPES = [
    *(
        row("Content-Type " + name, "content_type_invalid", f"Content-Type: {value}", body=b"x")
        for name, value in BAD_TYPES.items()
        for row in (put, post)
    ),
    put("Content-Type too long", "header_too_long", f"Content-Type: text/{'x' * 252}"),
    post("Content-Type too long", "header_too_long", f"Content-Type: text/{'x' * 252}"),
    put("Content-Type not UTF-8", "header_invalid", b"Content-Type: text/\xff"),
    post("Content-Type not UTF-8", "header_invalid", b"Content-Type: text/\xff"),
    post("no Content-Type", "content_type_missing"),
    post("empty Content-Type", "content_type_missing", "Content-Type:"),
    put("Content-Type twice", "header_repeated", TEXT, JSON),
    post("Content-Type twice", "header_repeated", TEXT, TEXT),
    post("another Content-Type", "content_type_mismatch", JSON, body=b"1", status=409),
]

BAD_TIMES = {
    "empty": "",
    "a word": "tomorrow",
    "a number": "1767225600",
    "a date only": "2999-01-01",
    "without a zone": "2999-01-01T00:00:00",
    "without seconds": "2999-01-01T00:00Z",
    "month 13": "2999-13-01T00:00:00Z",
    "day 0": "2999-01-00T00:00:00Z",
    "30 February": "2999-02-30T00:00:00Z",
    "hour 24": "2999-01-01T24:00:00Z",
    "minute 60": "2999-01-01T00:60:00Z",
    "second 61": "2999-01-01T00:00:61Z",
    "year 0": "0000-01-01T00:00:00Z",
    "five-digit year": "12999-01-01T00:00:00Z",
    "negative year": "-2999-01-01T00:00:00Z",
    "zone without a colon": "2999-01-01T00:00:00+0100",
    "zone beyond a day": "2999-01-01T00:00:00+99:00",
    "zone of minutes": "2999-01-01T00:00:00+00:99",
    "ten digits of a second": "2999-01-01T00:00:00.1234567890Z",
    "a bare point": "2999-01-01T00:00:00.Z",
    "compact": "29990101T000000Z",
    "a week date": "2999-W01-1T00:00:00Z",
    "HTTP's own form": "Tue, 01 Jan 2999 00:00:00 GMT",
    "two": "2999-01-01T00:00:00Z, 2999-01-01T00:00:00Z",
    "other digits": "\u0662999-01-01T00:00:00Z",
    "past the year 9999 in UTC": "9999-12-31T23:59:59-23:59",
    "before the year 1 in UTC": "0001-01-01T00:00:00+23:59",
}

LIFETIMES = [
    *(
        put(f"Stream-TTL {name}", "ttl_invalid", TEXT, f"Stream-TTL: {value}")
        for name, value in BAD_INTEGERS.items()
    ),
    put("Stream-TTL too long", "ttl_invalid", TEXT, f"Stream-TTL: {10 * 365 * 86_400 + 1}"),
    *(
        put(f"Stream-Expires-At {name}", "expires_at_invalid", TEXT, f"Stream-Expires-At: {value}")
        for name, value in BAD_TIMES.items()
    ),
    put(
        "both lifetimes",
        "lifetime_conflict",
        TEXT,
        "Stream-TTL: 60",
        "Stream-Expires-At: 2999-01-01T00:00:00Z",
    ),
    put("Stream-TTL twice", "header_repeated", TEXT, "Stream-TTL: 60", "Stream-TTL: 60"),
    put(
        "Stream-Expires-At twice",
        "header_repeated",
        TEXT,
        *["Stream-Expires-At: 2999-01-01T00:00:00Z"] * 2,
    ),
    Row(
        "PUT over a stream of another type",
        request("PUT", WITNESS, JSON),
        409,
        "stream_exists",
    ),
    Row("PUT over a soft-deleted stream", request("PUT", ROOT + "gone"), 409, "path_blocked"),
]

FROM = "Stream-Forked-From: " + WITNESS
FORKS = [
    put("fork offset without a source", "fork_source_missing", "Stream-Fork-Offset: -1"),
    put("fork sub-offset without a source", "fork_source_missing", "Stream-Fork-Sub-Offset: 1"),
    put("fork source empty", "fork_source_invalid", "Stream-Forked-From:"),
    put("fork source without the root", "fork_source_invalid", "Stream-Forked-From: witness"),
    put(
        "fork source with a host",
        "fork_source_invalid",
        "Stream-Forked-From: http://test" + WITNESS,
    ),
    put("fork source elsewhere", "fork_source_invalid", "Stream-Forked-From: /metrics"),
    put("fork source traversal", "path_invalid", f"Stream-Forked-From: {ROOT}a/../witness"),
    put("fork source with a NUL", "path_invalid", f"Stream-Forked-From: {ROOT}a%00"),
    put("fork source root only", "path_invalid", f"Stream-Forked-From: {ROOT}"),
    put("fork source reserved", "path_reserved", f"Stream-Forked-From: {ROOT}__ds/x"),
    put(
        "fork source too long",
        "path_too_long",
        f"Stream-Forked-From: {ROOT}{'a' * 1025}",
        status=414,
    ),
    put("fork source missing", "fork_source_not_found", f"Stream-Forked-From: {ROOT}x", status=404),
    put(
        "fork source deleted", "fork_source_deleted", f"Stream-Forked-From: {ROOT}gone", status=409
    ),
    put("fork source twice", "header_repeated", FROM, FROM),
    put("fork of another type", "content_type_mismatch", JSON, FROM, status=409),
    put("fork body without a type", "content_type_missing", FROM, body=b"x"),
    put("fork offset malformed", "offset_invalid", FROM, "Stream-Fork-Offset: abc"),
    put("fork offset empty", "offset_invalid", FROM, "Stream-Fork-Offset:"),
    put("fork offset not UTF-8", "offset_invalid", FROM, b"Stream-Fork-Offset: \xff"),
    put(
        "fork offset beyond the tail",
        "fork_offset_invalid",
        FROM,
        f"Stream-Fork-Offset: {9:016d}_{900:016d}",
    ),
    put(
        "fork offset made up", "fork_offset_invalid", FROM, f"Stream-Fork-Offset: {1:016d}_{1:016d}"
    ),
    put("fork offset twice", "header_repeated", FROM, *["Stream-Fork-Offset: -1"] * 2),
    *(
        put(
            f"fork sub-offset {name}",
            "fork_sub_offset_invalid",
            FROM,
            "Stream-Fork-Offset: -1",
            f"Stream-Fork-Sub-Offset: {value}",
        )
        for name, value in BAD_INTEGERS.items()
    ),
    put(
        "fork sub-offset without an offset",
        "fork_offset_missing",
        FROM,
        "Stream-Fork-Sub-Offset: 1",
    ),
    put(
        "fork sub-offset past the append",
        "fork_offset_invalid",
        FROM,
        "Stream-Fork-Offset: -1",
        "Stream-Fork-Sub-Offset: 100",
    ),
    put(
        "fork sub-offset as far as it goes",
        "fork_offset_invalid",
        FROM,
        "Stream-Fork-Offset: -1",
        f"Stream-Fork-Sub-Offset: {MAX}",
    ),
    put(
        "fork sub-offset twice",
        "header_repeated",
        FROM,
        "Stream-Fork-Offset: -1",
        *["Stream-Fork-Sub-Offset: 1"] * 2,
    ),
]

HTTP = [
    Row("no Host", b"GET %b HTTP/1.1\r\n\r\n" % WITNESS.encode(), 400, "bad_request"),
    Row("Host twice", request("GET", WITNESS, "Host: other"), 400, "bad_request"),
    Row(
        "no HTTP at all",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        400,
        "method_unknown",
    ),
    Row("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "bad_request"),
    Row("HTTP/0.9", b"GET /\r\n\r\n", 505, "version_not_supported"),
    Row("HTTP/3.0", b"GET / HTTP/3.0\r\nHost: test\r\n\r\n", 400, "bad_request"),
    Row(
        "two lengths",
        request("POST", WITNESS, TEXT, "Content-Length: 1", body=b"xx"),
        400,
        "bad_request",
    ),
    Row("negative length", request("GET", WITNESS, "Content-Length: -1"), 400, "bad_request"),
    Row(
        "both framings",
        request("POST", WITNESS, TEXT, "Content-Length: 1", body=b"x", chunked=True),
        400,
        "bad_request",
    ),
    Row(
        "unknown coding",
        request("POST", WITNESS, TEXT, "Transfer-Encoding: gzip"),
        400,
        "bad_request",
    ),
    Row("a header without a colon", request("GET", WITNESS, "Nonsense"), 400, "bad_request"),
    Row(
        "a header with a blank before its colon",
        request("GET", WITNESS, "A : b"),
        400,
        "bad_request",
    ),
    Row("a folded header", request("GET", WITNESS, "A: b", " c"), 400, "bad_request"),
    Row("a NUL in a header", request("GET", WITNESS, b"A: \x00"), 400, "bad_request"),
    Row(
        "too many headers",
        request("GET", WITNESS, *[f"A{n}: b" for n in range(200)]),
        431,
        "header_too_large",
    ),
    Row(
        "too large a header", request("GET", WITNESS, "A: " + "b" * 40_000), 431, "header_too_large"
    ),
    Row(
        "another expectation",
        request("POST", WITNESS, TEXT, "Expect: a miracle", body=b"x"),
        417,
        "expectation_failed",
    ),
    Row(
        "a change of protocol",
        request("GET", WITNESS, "Connection: Upgrade", "Upgrade: websocket"),
        400,
        "upgrade_refused",
    ),
]

TABLE = [
    *PATHS,
    *METHODS,
    *QUERIES,
    *BODIES,
    *CONTENT_TYPES,
    *PRODUCERS,
    *CONDITIONS,
    *SEQUENCES,
    *LIFETIMES,
    *FORKS,
    *HTTP,
]
