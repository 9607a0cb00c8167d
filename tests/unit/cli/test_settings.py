"""Settings: which source wins, and that a mistake in any of them is named."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fencepost.cli.settings import TABLES, SettingsError, default_folder, load, load_store
from fencepost.server.settings import ServerSettings
from fencepost.store.opener import AnyStoreSettings, describe
from fencepost.store.settings import PostgresSettings, SqliteSettings


def from_text(
    tmp_path: Path, text: str, **overrides: Any
) -> tuple[ServerSettings, AnyStoreSettings]:
    file = tmp_path / "fencepost.toml"
    file.write_text(text)
    return load(file, folder=None, overrides=overrides)


def folder_of(store: AnyStoreSettings) -> Path:
    assert isinstance(store, SqliteSettings)
    return store.folder


def url_of(store: AnyStoreSettings) -> str:
    assert isinstance(store, PostgresSettings)
    return store.url


def test_without_any_source_there_are_defaults() -> None:
    server, store = load(None, folder=None, overrides={})

    assert server == ServerSettings()
    assert store == SqliteSettings(folder=default_folder())


def test_every_table_reaches_its_layer(tmp_path: Path) -> None:
    server, store = from_text(
        tmp_path,
        """
        [server]
        long_poll_ms = 1
        [http]
        body_bytes_max = 2
        header_timeout_seconds = 1.5
        [limits]
        path_bytes_max = 3
        [store]
        reader_threads = 4
        [subscriptions]
        acks_max = 5
        """,
    )

    assert server.long_poll_ms == 1
    assert (server.http.body_bytes_max, server.http.header_timeout_seconds) == (2, 1.5)
    assert server.limits.path_bytes_max == 3
    assert store.reader_threads == 4
    assert server.subscriptions.acks_max == 5


def test_a_whole_number_will_do_for_a_setting_with_a_fraction(tmp_path: Path) -> None:
    server, _ = from_text(tmp_path, "[http]\nidle_timeout_seconds = 9")

    assert server.http.idle_timeout_seconds == 9.0


def test_the_environment_wins_over_the_file_and_options_over_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "[server]\nlong_poll_ms = 1\nsse_ms = 1\ndrain_ms = 1"
    monkeypatch.setenv("FENCEPOST_SERVER_SSE_MS", "2")
    monkeypatch.setenv("FENCEPOST_SERVER_DRAIN_MS", "2")

    server, _ = from_text(tmp_path, text, server={"drain_ms": 3})

    assert (server.long_poll_ms, server.sse_ms, server.drain_ms) == (1, 2, 3)


def test_the_data_folder_is_the_options_the_environments_or_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "fencepost.toml"
    file.write_text('[store]\nfolder = "~/in-the-file"')

    _, by_file = load(file, folder=None, overrides={})
    monkeypatch.setenv("FENCEPOST_STORE_FOLDER", str(tmp_path / "in-the-environment"))
    _, by_environment = load(file, folder=None, overrides={})
    _, by_option = load(file, folder=tmp_path / "option", overrides={})

    assert folder_of(by_file) == Path.home() / "in-the-file"
    assert folder_of(by_environment) == tmp_path / "in-the-environment"
    assert folder_of(by_option) == tmp_path / "option"


DATABASE = "postgresql://streams:hush@db.example/streams"


def test_a_url_makes_the_store_postgresql(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, by_file = from_text(tmp_path, f'[store]\nurl = "{DATABASE}1"\nturn_wait_ms = 5')
    monkeypatch.setenv("FENCEPOST_STORE_URL", DATABASE + "2")
    _, by_environment = load(None, folder=None, overrides={})
    _, by_option = load(None, folder=None, url=DATABASE + "3", overrides={})

    assert [url_of(by_file), url_of(by_environment), url_of(by_option)] == [
        DATABASE + "1",
        DATABASE + "2",
        DATABASE + "3",
    ]
    assert isinstance(by_file, PostgresSettings)
    assert by_file.turn_wait_ms == 5


def test_the_last_source_that_names_a_place_chooses_the_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "fencepost.toml"
    file.write_text(f'[store]\nurl = "{DATABASE}"\nreader_threads = 3')

    _, folder_by_option = load(file, folder=tmp_path, overrides={})
    monkeypatch.setenv("FENCEPOST_STORE_FOLDER", str(tmp_path))
    _, folder_by_environment = load(file, folder=None, overrides={})
    _, url_by_option = load(file, folder=None, url=DATABASE, overrides={})

    assert folder_of(folder_by_option) == folder_of(folder_by_environment) == tmp_path
    assert url_of(url_by_option) == DATABASE
    assert folder_by_option.reader_threads == url_by_option.reader_threads == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f'[store]\nurl = "{DATABASE}"\nwal_bytes_max = 9', "wal_bytes_max.*SQLite.*PostgreSQL"),
        ('[store]\nfolder = "f"\nturn_wait_ms = 9', "turn_wait_ms.*PostgreSQL.*SQLite"),
        (f'[store]\nurl = "{DATABASE}"\nno_such = 9', "no_such"),
        (f'[store]\nurl = "{DATABASE}"\nfolder = "f"', "both"),
        ('[store]\nurl = "mysql://streams:hush@db/x"', "postgresql://"),
        ("[store]\nurl = 5", "url"),
        ('[store]\nurl = ["hush"]', "url"),
    ],
)
def test_a_mistake_about_the_store_is_named_and_no_password_with_it(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(SettingsError, match=said) as refused:
        from_text(tmp_path, text)

    assert "hush" not in str(refused.value)


def test_a_folder_and_a_url_on_the_command_line_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--data .* --store"):
        load_store(None, folder=tmp_path, url=DATABASE)


@pytest.mark.parametrize("field", fields(PostgresSettings), ids=lambda field: field.name)
def test_every_number_of_postgresql_can_be_set_in_the_file(tmp_path: Path, field: Any) -> None:
    if str(field.type) not in ("int", "float"):
        return

    _, store = from_text(tmp_path, f'[store]\nurl = "{DATABASE}"\n{field.name} = 77')

    assert getattr(store, field.name) == 77


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://streams:hush@db.example:5432/name",
        "postgres://streams:hu/hush@db.example:5432/name",
        "postgresql://streams:hu@hush@db.example/name?password=hush",
        "postgresql://streams@db.example,other:5433/name?password=hush&sslmode=require",
        "postgresql://db.example/name?user=streams&password=hush#hush",
    ],
)
def test_a_store_is_described_without_its_password(url: str) -> None:
    shown = describe(PostgresSettings(url=url))

    assert "hush" not in shown
    assert shown.startswith("postgres")
    assert "db.example" in shown
    assert "/name" in shown
    assert "hush" not in repr(PostgresSettings(url=url))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[servr]\nlong_poll_ms = 1", "servr"),
        ("long_poll_ms = 1", "long_poll_ms"),
        ("server = 1", "server"),
        ("[[server]]\nlong_poll_ms = 1", "server"),
        ("[server]\nlong_pol_ms = 1", "long_pol_ms"),
        ("[server]\nhttp = 1", "http"),
        ("[server.http]\nbody_bytes_max = 1", "http"),
        ("[server.subscriptions]\nacks_max = 1", "subscriptions"),
        ("[store]\nvfs = 'memory'", "vfs"),
        ("[store]\nsynchronous = 'OFF'", "synchronous"),
        ("[server]\nlong_poll_ms = 'soon'", "long_poll_ms"),
        ("[server]\nlong_poll_ms = 1.5", "long_poll_ms"),
        ("[server]\nlong_poll_ms = true", "long_poll_ms"),
        ("[server]\nlong_poll_ms = []", "long_poll_ms"),
        ("[server]\nlong_poll_ms = -1", "long_poll_ms"),
        ("[http]\nbody_bytes_max = 0", "body_bytes_max"),
        ("[http]\nidle_timeout_seconds = nan", "idle_timeout_seconds"),
        ("[http]\nwrite_buffer_bytes_low = 999999999", "write_buffer_bytes_low"),
        ("[limits]\npath_bytes_max = -5", "path_bytes_max"),
        ("[store]\nreader_threads = 0", "reader_threads"),
        ("[store]\nstreams_cached_max = -1", "streams_cached_max"),
        ("[store]\nfolder = 5", "folder"),
        ("[subscriptions]\nacks_max = 0", "acks_max"),
        ("[server\n", "not TOML"),
        ("[server]\nlong_poll_ms = 1\nlong_poll_ms = 2", "not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        from_text(tmp_path, text)


def test_an_unknown_setting_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="long_poll_ms"):
        from_text(tmp_path, "[server]\nlong_poll = 1")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"missing\.toml"):
        load(tmp_path / "missing.toml", folder=None, overrides={})
    with pytest.raises(SettingsError, match="cannot be read"):
        load(tmp_path, folder=None, overrides={})


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "binary.toml"
    file.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(SettingsError, match=r"binary\.toml"):
        load(file, folder=None, overrides={})


def test_a_mistake_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCEPOST_SERVER_LONG_POLL_MS", "soon")

    with pytest.raises(SettingsError, match="long_poll_ms"):
        load(None, folder=None, overrides={})


@pytest.mark.parametrize("table", sorted(TABLES))
def test_every_number_of_every_layer_can_be_set_in_the_file(tmp_path: Path, table: str) -> None:
    """A limit without a setting does not exist; this finds the one that was forgotten."""
    numbers = [field for field in fields(TABLES[table]) if str(field.type) in ("int", "float")]
    assert numbers

    for field in numbers:
        from_text(tmp_path, f"[{table}]\n{field.name} = {field.default}")
