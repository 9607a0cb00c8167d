"""Bad requests of writers: producer headers, conditions and Stream-Seq."""

from tests.integration.bad_input_requests import (
    JSON,
    MAX,
    NEW,
    PRODUCER,
    TEXT,
    WITNESS,
    Row,
    post,
    put,
)
from tests.integration.raw import request

BAD_INTEGERS = {
    "empty": "",
    "negative": "-1",
    "with a plus": "+1",
    "with a leading zero": "01",
    "two zeros": "00",
    "a fraction": "1.0",
    "an exponent": "1e3",
    "hexadecimal": "0x10",
    "underscored": "1_000",
    "with a blank inside": "1 0",
    "letters": "one",
    "of other digits": "\u0661",
    "2^53": str(2**53),
    "2^64": str(2**64),
    "very long": "9" * 400,
    "two in one": "1, 1",
    "NaN": "NaN",
}

X_PRODUCER = ("X-Producer-Id: p", "x-producer-epoch: 5", "X-PRODUCER-SEQ: 1")
COMMIT = b'{"appends":[{"stream":"witness","content_type":"text/plain","data":"x"}]}'

PRODUCERS = [
    *(post(f"with {header}", "header_unexpected", TEXT, header) for header in X_PRODUCER),
    post("with both names", "header_unexpected", TEXT, *PRODUCER, *X_PRODUCER),
    put("with X-Producer-Id", "header_unexpected", TEXT, X_PRODUCER[0], body=b"x"),
    *(
        Row(
            f"POST {target} with X-Producer-Id",
            request("POST", target, JSON, X_PRODUCER[0], body=body),
            400,
            "header_unexpected",
        )
        for target, body in (("/v1/commit", COMMIT), (f"{WITNESS}?truncate&before=now", b""))
    ),
    post("Claim-End twice", "header_repeated", TEXT, "Claim-End: released", "Claim-End: completed"),
    *(
        post(f"Producer-Epoch {name}", "header_invalid", TEXT, PRODUCER[0], PRODUCER[2], header)
        for name, value in BAD_INTEGERS.items()
        for header in [f"Producer-Epoch: {value}"]
    ),
    *(
        post(f"Producer-Seq {name}", "header_invalid", TEXT, PRODUCER[0], PRODUCER[1], header)
        for name, value in BAD_INTEGERS.items()
        for header in [f"Producer-Seq: {value}"]
    ),
    post("Producer-Id empty", "producer_id_empty", TEXT, *PRODUCER[1:], "Producer-Id:"),
    post("Producer-Id blank", "producer_id_empty", TEXT, *PRODUCER[1:], "Producer-Id:   "),
    post(
        "Producer-Id no-break space",
        "producer_id_empty",
        TEXT,
        *PRODUCER[1:],
        "Producer-Id: \u00a0",
    ),
    post(
        "Producer-Id too long", "header_too_long", TEXT, *PRODUCER[1:], f"Producer-Id: {'x' * 257}"
    ),
    post("Producer-Id not UTF-8", "header_invalid", TEXT, *PRODUCER[1:], b"Producer-Id: \xff"),
    *(
        post(
            f"only {' and '.join(h.split(':')[0] for h in some)}",
            "producer_headers_incomplete",
            TEXT,
            *some,
        )
        for some in (
            PRODUCER[:1],
            PRODUCER[1:2],
            PRODUCER[2:],
            PRODUCER[:2],
            PRODUCER[1:],
            PRODUCER[::2],
        )
    ),
    *(
        post(f"{header.split(':')[0]} twice", "header_repeated", TEXT, *PRODUCER, header)
        for header in PRODUCER
    ),
    post(
        "stale epoch",
        "producer_epoch_stale",
        TEXT,
        "Producer-Id: p",
        "Producer-Epoch: 4",
        "Producer-Seq: 1",
        status=403,
    ),
    post(
        "sequence gap",
        "producer_sequence_gap",
        TEXT,
        "Producer-Id: p",
        "Producer-Epoch: 5",
        "Producer-Seq: 2",
        status=409,
    ),
    post(
        "unknown producer's gap",
        "producer_sequence_gap",
        TEXT,
        "Producer-Id: q",
        "Producer-Epoch: 0",
        "Producer-Seq: 1",
        status=409,
    ),
    post(
        "epoch that does not start at 0",
        "producer_epoch_start",
        TEXT,
        "Producer-Id: p",
        "Producer-Epoch: 6",
        "Producer-Seq: 1",
    ),
    post(
        "largest numbers",
        "producer_epoch_start",
        TEXT,
        "Producer-Id: p",
        f"Producer-Epoch: {MAX}",
        f"Producer-Seq: {MAX}",
    ),
]

AT_START = f'If-Match: "{0:016d}_{0:016d}"'
BAD_TAGS = {
    "empty": "",
    "without quotes": f"{2:016d}_{5:016d}",
    "half quoted": f'"{2:016d}_{5:016d}',
    "empty quotes": '""',
    "letters": '"abc"',
    "now": '"now"',
    "weak": f'W/"{2:016d}_{5:016d}"',
    "two": f'"{2:016d}_{5:016d}", "{2:016d}_{5:016d}"',
}

COMMIT = b'{"appends":[{"stream":"witness","content_type":"text/plain","data_base64":"eA=="}]}'

CONDITIONS = [
    *(
        post(f"If-Match {name}", "if_match_invalid", TEXT, f"If-Match: {value}")
        for name, value in BAD_TAGS.items()
    ),
    post("If-Match another tail", "tail_moved", TEXT, AT_START, status=412),
    post("If-Match twice", "header_repeated", TEXT, AT_START, AT_START),
    post("If-None-Match twice", "header_repeated", TEXT, *["If-None-Match: *"] * 2),
    post("If-None-Match an offset", "if_none_match_invalid", TEXT, 'If-None-Match: "x"'),
    post("If-None-Match empty", "if_none_match_invalid", TEXT, "If-None-Match:"),
    post("Lease-Token that is forged", "lease_invalid", TEXT, "Lease-Token: 7"),
    post("If-None-Match of a full stream", "tail_moved", TEXT, "If-None-Match: *", status=412),
    post("both conditions", "precondition_conflict", TEXT, AT_START, "If-None-Match: *"),
    post("Producer-If without a point", "producer_if_invalid", TEXT, *PRODUCER, "Producer-If: 5"),
    post("Producer-If without numbers", "header_invalid", TEXT, *PRODUCER, "Producer-If: ."),
    post("Producer-If with a sign", "header_invalid", TEXT, *PRODUCER, "Producer-If: 5.-1"),
    post("Producer-If of three", "header_invalid", TEXT, *PRODUCER, "Producer-If: 5.0.0"),
    post(
        "Producer-If elsewhere", "producer_moved", TEXT, *PRODUCER, "Producer-If: 4.0", status=412
    ),
    post("Producer-If alone", "producer_headers_incomplete", TEXT, "Producer-If: 5.0"),
    post("Producer-If twice", "header_repeated", TEXT, *PRODUCER, *["Producer-If: 5.0"] * 2),
    post("key empty", "idempotency_key_invalid", TEXT, "Idempotency-Key:"),
    post("key too long", "header_too_long", TEXT, f"Idempotency-Key: {'k' * 257}"),
    post("key not UTF-8", "header_invalid", TEXT, b"Idempotency-Key: \xff"),
    post("key twice", "header_repeated", TEXT, *["Idempotency-Key: k"] * 2),
    post(
        "strict duplicate of another content",
        "producer_content_mismatch",
        TEXT,
        "Producer-Id: p",
        "Producer-Epoch: 5",
        "Producer-Seq: 0",
        "Producer-Strict: true",
        status=409,
    ),
    Row(
        "POST that makes a stream without a type",
        request("POST", NEW, "Stream-Auto-Create: true", "Stream-Closed: true"),
        400,
        "content_type_missing",
    ),
    Row(
        "POST that makes a stream of a bad type",
        request("POST", NEW, "Stream-Auto-Create: true", "Content-Type: x", body=b"1"),
        400,
        "content_type_invalid",
    ),
    Row(
        "POST that makes a stream of bad JSON",
        request("POST", NEW, "Stream-Auto-Create: true", JSON, body=b"{"),
        400,
        "json_invalid",
    ),
    Row("commit of nothing", request("POST", "/v1/commit", JSON), 400, "commit_invalid"),
    Row(
        "commit of no appends",
        request("POST", "/v1/commit", JSON, body=b'{"appends":[]}'),
        400,
        "commit_empty",
    ),
    Row(
        "commit with an unknown field",
        request("POST", "/v1/commit", JSON, body=b'{"appends":[],"x":1}'),
        400,
        "commit_invalid",
    ),
    Row(
        "commit nested too deeply",
        request("POST", "/v1/commit", JSON, body=b'{"appends":' + b"[" * 100_000),
        400,
        "commit_invalid",
    ),
    *(
        Row(
            f"{what} with {header.partition(':')[0]}",
            request("POST", target, header, body=body),
            400,
            "header_unexpected",
        )
        for what, target, body, more in (
            ("commit", "/v1/commit", COMMIT, ()),
            ("truncation", WITNESS + "?truncate&before=now", b"", ("Idempotency-Key: k",)),
        )
        for header in (
            *("If-Match: *", "If-None-Match: *", *PRODUCER, "Producer-If: 5.0", "Stream-Seq: z"),
            *("Producer-Strict: true", "Stream-Auto-Create: true", "Stream-Closed: true"),
            *("Lease-Token: 7", *more),
        )
    ),
    Row("GET of /v1/commit", request("GET", "/v1/commit"), 405, "method_not_allowed"),
    Row(
        "part without a name",
        request("POST", "/v1/staging/t", TEXT, body=b"x"),
        400,
        "staging_path_invalid",
    ),
]

SEQUENCES = [
    post("Stream-Seq empty", "header_invalid", TEXT, "Stream-Seq:"),
    post("Stream-Seq blank", "header_invalid", TEXT, "Stream-Seq:   "),
    post("Stream-Seq too long", "header_too_long", TEXT, f"Stream-Seq: {'x' * 257}"),
    post("Stream-Seq not UTF-8", "header_invalid", TEXT, b"Stream-Seq: \xff"),
    post("Stream-Seq twice", "header_repeated", TEXT, "Stream-Seq: x", "Stream-Seq: y"),
    post("Stream-Seq the same", "stream_seq_regression", TEXT, "Stream-Seq: m", status=409),
    post("Stream-Seq smaller", "stream_seq_regression", TEXT, "Stream-Seq: a", status=409),
    post("Stream-Closed twice", "header_repeated", TEXT, "Stream-Closed: true", "Stream-Closed: x"),
    post("to a closed stream", "stream_closed", TEXT, status=409, to="closed"),
    post("to a missing stream", "stream_not_found", TEXT, status=404, to="missing"),
    post("to a soft-deleted stream", "stream_deleted", TEXT, status=410, to="gone"),
]
