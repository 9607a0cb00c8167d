"""The options of a write: every wrong one is refused with its name and what would be legal."""

import pytest

from fencepost.pipeline.errors import OptionError
from fencepost.pipeline.sink.options import sink_options
from tests.pipeline.sink_support import schema_of


@pytest.mark.parametrize(
    ("schema", "given", "complaint"),
    [
        ("value string", {}, "option stream, or rows a column stream"),
        ("value string, stream string", {"stream": "s"}, "drop one of them"),
        ("value string, stream other", {"sinkName": "n"}, "column stream must be a string"),
        ("value string, stream string", {}, "sinkName is missing"),
        ("value string", {"stream": "s", "chunkBytes": "2000000"}, "chunkBytes .* 1024 to 1048576"),
        (
            "value string",
            {"stream": "s", "onReplayMismatch": "x"},
            "onReplayMismatch .* warn or fail",
        ),
        ("value string", {"stream": "s", "autoCreate": "yes"}, "autoCreate .* true or false"),
        ("value string", {"stream": "s", "format": "avro"}, "format .* value, json or state"),
        ("value string", {"stream": "s", "autoCraete": "true"}, "did you mean autoCreate"),
        ("value string", {"path": "p"}, "no option path: give the option stream"),
        ("value string", {"stream": "s", "jobId": "7"}, "no option jobid for a stream"),
        ("value string, id other", {"stream": "s"}, "other columns are id"),
        ("value other", {"stream": "s"}, "type string or binary"),
        ("id other", {"stream": "s", "contentType": "text/plain"}, "which makes JSON"),
        (
            "id other",
            {"stream": "s", "format": "state"},
            "missing: type, key, operation, unknown: id",
        ),
        ("value string", {"stream": "s", "sinkName": "x" * 300}, "sinkName .* 256 bytes"),
        ("value string", {"stream": "a//b"}, "option stream is 'a//b': .* like a path"),
        ("value string", {"stream": "orders/*"}, "stream is 'orders/\\*': it must be one path"),
        ("value string", {"stream": "s", "sinkName": "a/../b"}, "sinkName .* like a path"),
        ("value string", {"stream": "s", "contentType": "json"}, "contentType .* text/plain"),
        ("value string", {"stream": "s", "url": "nonsense"}, "url"),
        ("id variant", {"stream": "s"}, "to_json"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(
    schema: str, given: dict[str, str], complaint: str
) -> None:
    with pytest.raises(OptionError, match=complaint):
        sink_options(given, schema_of(schema), False, streaming=True)


def test_a_job_that_no_server_would_take_is_refused_by_its_name() -> None:
    with pytest.raises(OptionError, match=r"option jobId is 'monday/': .* like a path"):
        sink_options(
            {"stream": "s", "jobId": "monday/"}, schema_of("v other"), False, streaming=False
        )


@pytest.mark.parametrize("streaming", [True, False])
def test_a_stream_cannot_be_overwritten(streaming: bool) -> None:
    with pytest.raises(OptionError, match="streams only grow"):
        sink_options({"stream": "s"}, schema_of("v other"), True, streaming=streaming)


def test_names_of_options_are_known_in_any_case_and_spark_adds_its_own() -> None:
    given = {"stream": "s", "AUTOCREATE": "True", "checkpointLocation": "file:/x"}

    options = sink_options(given, schema_of("v other"), False, streaming=True)

    assert options.auto_create
    assert options.format == "json"


def test_a_token_is_never_shown() -> None:
    given = {"stream": "s", "token": "secret"}

    options = sink_options(given, schema_of("v other"), False, streaming=True)

    assert "secret" not in repr(options)
