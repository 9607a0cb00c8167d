"""Small parts of the command line: which hosts are this machine, and how a log line looks."""

import json
import logging
import sys

import pytest

from fencepost.cli.process import JsonFormatter
from fencepost.cli.serve import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
def test_this_machine_is_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "10.0.0.1", "192.0.2.1", "2001:db8::1", "no such host", "0"]
)
def test_everything_else_is_not(host: str) -> None:
    assert not is_loopback(host)


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("fencepost.test", logging.WARNING, "file.py", 1, message, args, None)
    made.__dict__.update(extra)
    return made


def test_a_log_line_is_one_json_object_whatever_it_holds() -> None:
    line = JsonFormatter().format(record("a %s\nin two lines: %r", "message", b"\xff"))

    entry = json.loads(line)
    assert "\n" not in line
    assert entry["message"] == "a message\nin two lines: b'\\xff'"
    assert (entry["level"], entry["logger"]) == ("warning", "fencepost.test")
    assert entry["time"]


def test_a_log_line_carries_its_fields_and_its_error() -> None:
    try:
        raise ValueError("as the test asked")
    except ValueError:
        made = record("failed", fields={"stream": "s", "place": object()})
        made.exc_info = sys.exc_info()

    entry = json.loads(JsonFormatter().format(made))

    assert entry["stream"] == "s"
    assert "object" in entry["place"]
    assert "as the test asked" in entry["error"]
