"""A real PostgreSQL for tests: started, stopped, killed and restarted as a test needs it.

Given an address in FENCEPOST_TEST_POSTGRES, that server is used and left as it was. Without one a
server of our own is started in a temporary folder, on a free port of the loopback, with fsync on:
from the PyPI wheel `pgserver`, which brings PostgreSQL 16, or else from a `postgres` on the
machine. Only the programs of the wheel are used, so that settings, ports and kills are in our
hands.

PostgreSQL refuses to run as root, so for root it runs as `postgres` or `nobody`. A watcher ends it
when this process goes, however that ends.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fencepost.store.postgres.migrate import migrate_database
from fencepost.store.settings import PostgresSettings

ADDRESS = "FENCEPOST_TEST_POSTGRES"
START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 30.0
TRY_SECONDS = 0.02

SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "300",
    "shared_buffers": "128MB",
    "logging_collector": "off",
    "log_min_messages": "warning",
}

# Waits until its standard input ends, which is when we are gone, and then cleans up after us.
_WATCH = 'cat >/dev/null; kill -QUIT "$1" 2>/dev/null; sleep 1; rm -rf "$2"'


class NoPostgresError(Exception):
    """There is no PostgreSQL to test with: install the wheel `pgserver`, or give an address."""

    def __init__(self) -> None:
        super().__init__(
            f"no PostgreSQL to test with: give the address of one in {ADDRESS}, install the wheel "
            "pgserver (Python up to 3.12), or put `postgres` and `initdb` on the PATH"
        )


class NotOursError(Exception):
    """The server was given by its address: it is not this test's to stop."""

    def __init__(self) -> None:
        super().__init__(
            f"the server comes from {ADDRESS} and cannot be stopped from here: "
            "unset it to let the tests start their own"
        )


class PostgresServer:
    """A PostgreSQL server; `dsn` names its maintenance database, `new_database` makes others."""

    def __init__(
        self,
        address: str | None = None,
        settings: dict[str, str] | None = None,
        *,
        primary: PostgresServer | None = None,
    ) -> None:
        self._address = address
        self._primary = primary
        self._settings = SETTINGS | (settings or {})
        self._folder: Path | None = None
        self._programs = Path()
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._databases: set[str] = set()
        self._numbers = itertools.count()
        self._template: str | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def dsn(self) -> str:
        """The address of the database `postgres`."""
        if self._address is not None:
            return self._address
        return f"postgresql://postgres@127.0.0.1:{self._port}/postgres"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process that is running now; its sessions are children of it."""
        if self._process is None:
            raise NotOursError if self._address is not None else RuntimeError("it is not running")
        return self._process.pid

    @property
    def log_text(self) -> str:
        """What the server wrote about itself."""
        if self._folder is None:
            return ""
        return (self._folder / "server.log").read_text(errors="replace")

    # Starting and ending

    def start(self) -> None:
        """Return when the server takes connections; on the port it had before, if it had one."""
        if self._address is not None or self.is_running:
            return
        if self._folder is None:
            programs = find_programs()
            self._folder = _make_folder()
            self._programs = _reachable(programs, self._folder)
            self._init()
        for _ in range(5):
            if self._port == 0:
                self._port = _free_port()
            if self._try_start():
                return
            # Another process took the port between our look and our start, unless the log says
            # more.
            if "could not bind" not in self.log_text:
                break
            self._port = 0
        raise RuntimeError(f"PostgreSQL did not start:\n{self.log_text}")

    def stop(self) -> None:
        """Shut down in order, as an administrator would: sessions end, nothing is recovered."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """End it as a crash would: the next start recovers from the log."""
        # SIGKILL would leave the server's children alone; this ends them too, without a checkpoint.
        self._end(signal.SIGQUIT)

    def restart(self) -> None:
        """Shut down in order and start again, on the same port."""
        self.stop()
        self.start()

    def close(self) -> None:
        """Leave nothing behind: no process, no folder, no database on a server that was given."""
        if self._address is not None:
            for name in sorted(self._databases):
                with contextlib.suppress(psycopg.Error):
                    self._drop(name)
            self._databases.clear()
            return
        if self.is_running:
            self._end(signal.SIGQUIT)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _end(self, how: signal.Signals) -> None:
        if self._address is not None:
            raise NotOursError
        if self._process is None:
            return
        if self._watcher is not None:
            # First the watcher: later the number might be another process's.
            self._watcher.kill()
            self._watcher.wait()
            assert self._watcher.stdin is not None
            self._watcher.stdin.close()
            self._watcher = None
        if self._process.poll() is None:
            self._process.send_signal(how)
        try:
            self._process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _init(self) -> None:
        assert self._folder is not None
        program = "initdb" if self._primary is None else "pg_basebackup"
        arguments = ["--pgdata", str(self._data), "--username", "postgres", "--no-sync"]
        if self._primary is None:
            arguments += ["--auth", "trust", "--encoding", "UTF8", "--locale", "C"]
            arguments += ["--no-instructions"]
        else:
            arguments += ["--dbname", self._primary.dsn, "--write-recovery-conf"]
            arguments += ["--checkpoint", "fast"]
        made = subprocess.run(
            [self._programs / program, *arguments],
            **_identity(),
            cwd=self._folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode != 0:
            raise RuntimeError(f"{program} failed:\n{made.stdout}{made.stderr}")

    @property
    def _data(self) -> Path:
        assert self._folder is not None
        return self._folder / "data"

    def _try_start(self) -> bool:
        assert self._folder is not None
        options = [f"--{name}={value}" for name, value in self._settings.items()]
        with (self._folder / "server.log").open("wb") as output:
            # A session of its own: Ctrl-C in the terminal is for the tests, not for the server.
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._data, f"--port={self._port}", *options],
                **_identity(),
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._watcher = subprocess.Popen(
            ["sh", "-c", _WATCH, "sh", str(self._process.pid), str(self._folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        for _ in range(int(START_SECONDS_MAX / TRY_SECONDS)):
            try:
                psycopg.connect(self.dsn, connect_timeout=2).close()
                return True
            except psycopg.OperationalError:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(TRY_SECONDS)
                    break
        self._end(signal.SIGQUIT)
        return False

    # Failing over

    def standby(self) -> PostgresServer:
        """Another server, started, that has every commit of this one before that is answered."""
        if self._address is not None:
            raise NotOursError
        follower = PostgresServer(settings=self._settings, primary=self)
        follower.start()
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")
            following = "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"
            for _ in range(int(START_SECONDS_MAX / TRY_SECONDS)):
                if connection.execute(following).fetchone() is not None:
                    return follower
                connection.execute("SELECT pg_sleep(%s)", (TRY_SECONDS,))
        said = follower.log_text
        follower.close()
        raise RuntimeError(f"the standby does not follow:\n{said}")

    def promote(self) -> None:
        """A standby takes the place of the server that it followed; return when it takes writes."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute("SELECT pg_promote()")

    # Databases

    def new_database(self, *, migrated: bool = True) -> str:
        """The address of a fresh database, with our schema in it unless it shall be empty."""
        with self._lock:
            if migrated and self._template is None:
                template = self._create("template0")
                migrate_database(PostgresSettings(url=self._dsn_of(template)))
                self._template = template
            source = self._template if migrated and self._template is not None else "template0"
            return self._dsn_of(self._create(source))

    def copy_database(self, dsn: str) -> str:
        """The address of a fresh database with all that is in this one, which must be unused."""
        return self._dsn_of(self._create(str(conninfo_to_dict(dsn)["dbname"])))

    def drop_database(self, dsn: str) -> None:
        """Drop a database that was made here, sessions in it included."""
        self._drop(str(conninfo_to_dict(dsn)["dbname"]))

    def _create(self, template: str) -> str:
        name = f"fencepost_{os.getpid()}_{os.urandom(4).hex()}_{next(self._numbers)}"
        self._administer("CREATE DATABASE {} TEMPLATE {} ENCODING 'UTF8'", name, template)
        self._databases.add(name)
        return name

    def _drop(self, name: str) -> None:
        self._administer("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)
        self._databases.discard(name)

    def _administer(self, text: Any, *names: str) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(sql.SQL(text).format(*map(sql.Identifier, names)))

    def _dsn_of(self, name: str) -> str:
        if self._address is not None:
            return make_conninfo(self._address, dbname=name)
        return f"postgresql://postgres@127.0.0.1:{self._port}/{name}"


_shared: PostgresServer | None = None
_sharing = threading.Lock()


def shared_server() -> PostgresServer:
    """The one server of this process, started at the first call, gone with the process."""
    global _shared
    with _sharing:
        if _shared is None:
            server = PostgresServer(os.environ.get(ADDRESS) or None)
            atexit.register(server.close)
            server.start()
            _shared = server
    return _shared


def find_programs() -> Path:
    """The folder of `postgres` and `initdb`: the wheel's, or the machine's."""
    wheel = importlib.util.find_spec("pgserver")
    if wheel is not None and wheel.origin is not None:
        return Path(wheel.origin).parent / "pginstall" / "bin"
    found = [shutil.which("postgres"), *map(str, _installed())]
    for postgres in found:
        if postgres is not None and Path(postgres).with_name("initdb").exists():
            return Path(postgres).resolve().parent
    raise NoPostgresError


def _installed() -> Sequence[Path]:
    """Where packages of distributions put it, the newest first."""
    folders = Path("/usr/lib/postgresql").glob("*/bin/postgres")
    return sorted(folders, key=lambda path: int(path.parts[-3]), reverse=True)


def _make_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fencepost-postgres-"))
    user = _other_user()
    if user is not None:
        os.chown(folder, user.pw_uid, user.pw_gid)
    return folder


def _other_user() -> pwd.struct_passwd | None:
    """The user that the server runs as: our own, unless we are root."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    user = names.get("postgres") or names.get("nobody")
    if user is None:
        raise RuntimeError("PostgreSQL does not run as root, and there is no user `nobody`")
    return user


def _identity() -> dict[str, Any]:
    """Arguments for `subprocess` that give root's rights up."""
    user = _other_user()
    if user is None:
        return {}
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _reachable(programs: Path, folder: Path) -> Path:
    """The programs where the server's user may run them: in place, else as a copy."""
    asked = subprocess.run(
        ["sh", "-c", 'test -x "$1"', "sh", programs / "postgres"],
        **_identity(),
        cwd="/",
        check=False,
    )
    if asked.returncode == 0:
        return programs
    # A checkout in a home folder that only its owner may enter. The wheel keeps libraries beside.
    installed = programs.parent
    copy = folder / "programs" / installed.parent.name
    shutil.copytree(installed, copy / installed.name, symlinks=True)
    libraries = installed.parent.with_name(installed.parent.name + ".libs")
    if libraries.is_dir():
        shutil.copytree(libraries, copy.with_name(libraries.name), symlinks=True)
    return copy / installed.name / "bin"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
