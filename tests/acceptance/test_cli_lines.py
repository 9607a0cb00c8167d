"""`append --lines` as a process: each line is stored once, through pauses and lost answers."""

import contextlib
import signal
import socket
import threading
from pathlib import Path

import pytest

from tests.acceptance.shell import WAIT_SECONDS, Shell
from tests.acceptance.shell import home as home
from tests.acceptance.shell import shell as shell
from tests.serving import ServerProcess


def test_lines_go_in_once_and_in_order(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_text("".join(f'{{"n": {n}}}\n' for n in range(20_000)) + "\n\n20000")

    arguments = ("--ndjson", "--file", str(file), "--producer", "import")
    told = shell.lines("append", "lines", "--create", *arguments, "--json")[0]

    assert (told["lines"], told["messages"], told["producer"]) == (20_003, 20_001, "import")
    assert shell.client.stream("lines").read().messages() == [
        *({"n": n} for n in range(20_000)),
        20_000,
    ]


def test_a_line_that_is_not_json_stops_the_run_and_tells_how_to_go_on(shell: Shell) -> None:
    stream = shell.client.create("broken-lines")

    said = shell.refusal("append", "broken-lines", "--ndjson", given="1\n\n2\nthree\n4\n", code=2)
    assert "line 4 is not JSON" in said
    assert "Lines up to 3 are stored" in said
    again = said.partition("To go on: fencepost ")[2].split()
    shell.run(*again, given="1\n\n2\n3\n4\n")

    assert stream.read().messages() == [1, 2, 3, 4]


def test_lines_of_a_pipe_that_pauses_are_stored_meanwhile(shell: Shell) -> None:
    stream = shell.client.create("pausing")
    with shell.started("append", "pausing", "--ndjson") as feeding:
        assert feeding.stdin is not None
        feeding.stdin.write(b"1\n2\n")
        feeding.stdin.flush()
        messages = stream.follow(patience=WAIT_SECONDS)
        assert [next(messages), next(messages)] == [1, 2]
        messages.close()
        feeding.stdin.write(b"3")
        feeding.stdin.close()
        feeding.stdin = None
        assert feeding.wait(WAIT_SECONDS) == 0

    assert stream.read().messages() == [1, 2, 3]


def test_ctrl_c_stores_the_lines_that_were_taken_and_tells_how_to_go_on(shell: Shell) -> None:
    stream = shell.client.create("stopped")
    with shell.started("append", "stopped", "--ndjson", "--producer", "p") as feeding:
        assert feeding.stdin is not None
        feeding.stdin.write(b"1\n2\n")
        feeding.stdin.flush()
        messages = stream.follow(patience=WAIT_SECONDS)
        assert [next(messages), next(messages)] == [1, 2]
        messages.close()
        feeding.send_signal(signal.SIGINT)
        assert feeding.wait(WAIT_SECONDS) == 130
        assert feeding.stderr is not None
        said = feeding.stderr.read().decode()

    assert said == (
        "fencepost: interrupted. Lines up to 2 are stored."
        " To go on: fencepost append stopped --ndjson --producer p --skip 2\n"
    )


@pytest.mark.parametrize("answered", [0, 1])
def test_a_run_whose_answers_were_lost_is_resumed_without_a_double(
    shell: Shell, server_process: ServerProcess, answered: int
) -> None:
    """The answers are lost between the server and the command, after the server has stored."""
    path = f"lost-answers-{answered}"
    stream = shell.client.create(path)
    given = "".join(f"{n}\n" for n in range(10))

    with AnswersLost(server_process.port, answered) as proxy:
        arguments = ("--ndjson", "--producer", "p", "--patience", "0.5", "--url", proxy.url)
        said = shell.refusal("append", path, *arguments, given=given, code=3)
    assert stream.read().messages() != []
    assert "may be" in said
    again = said.partition("To go on: fencepost ")[2].split()
    assert "--resume" in again
    shell.run(*again, given=given)

    assert stream.read().messages() == list(range(10))


class AnswersLost:
    """A way to the server that passes everything but the answers to appends after the first."""

    def __init__(self, port: int, answered: int) -> None:
        self._answered = answered
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> "AnswersLost":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(WAIT_SECONDS)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with client, socket.create_connection(self._target) as server:
                    self._carry(client, server)

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while request := client.recv(1 << 20):
                server.sendall(request)
                answer = server.recv(1 << 20)
                self._answered -= request.count(b"POST /")
                if b"POST /" in request and self._answered < 0:
                    return
                client.sendall(answer)
