"""Which server a command talks to, and which token goes to it."""

from pathlib import Path

import pytest

from fencepost.cli.profile import DEFAULT_URL, Profile, ProfileError, default_file, resolve

FILE_URL = "http://file:1"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "client.toml"
    made.write_text(f'url = "{FILE_URL}"\ntoken = "of the file"\n')
    return made


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.usefixtures("nowhere")
def test_without_anything_it_is_this_machine() -> None:
    assert resolve(None, None, {}) == Profile(DEFAULT_URL, None)
    assert resolve(None, None, {"FENCEPOST_URL": "", "FENCEPOST_TOKEN": ""}).url == DEFAULT_URL


def test_an_option_wins_over_the_environment_and_that_over_the_file(file: Path) -> None:
    environment = {"FENCEPOST_CONFIG": str(file)}
    named = {**environment, "FENCEPOST_URL": "http://env:1", "FENCEPOST_TOKEN": "of the env"}

    assert resolve(None, None, environment) == Profile(FILE_URL, "of the file")
    assert resolve(None, None, named) == Profile("http://env:1", "of the env")
    assert resolve("http://o:1", "t", named) == Profile("http://o:1", "t")
    assert resolve("http://o:1", None, named) == Profile("http://o:1", "of the env")
    assert resolve(None, "t", environment) == Profile(FILE_URL, "t")


def test_the_token_of_the_file_is_sent_to_the_server_of_the_file_only(file: Path) -> None:
    environment = {"FENCEPOST_CONFIG": str(file)}

    assert resolve("http://elsewhere:1", None, environment).token is None
    assert resolve(FILE_URL + "/", None, environment).token == "of the file"
    file.write_text('token = "of the file"\n')
    assert resolve("http://elsewhere:1", None, environment).token == "of the file"


def test_the_file_is_looked_for_in_the_configuration_folder(
    nowhere: None,
) -> None:
    default_file().parent.mkdir(parents=True, exist_ok=True)
    default_file().write_text(f'url = "{FILE_URL}"')

    assert resolve(None, None, {}) == Profile(FILE_URL, None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("url = ", "not TOML"),
        ("\xff", "not TOML"),
        ("adress = 'x'", "has 'adress'; it may have url and token"),
        ("url = 7", "url in the file .* must be a text"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_that_names_it(
    file: Path, text: str, reason: str
) -> None:
    file.write_bytes(text.encode("latin-1"))

    with pytest.raises(ProfileError, match=reason) as raised:
        resolve(None, None, {"FENCEPOST_CONFIG": str(file)})
    assert str(file) in str(raised.value)


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="there is no file"):
        resolve(None, None, {"FENCEPOST_CONFIG": str(tmp_path / "none")})


def test_a_token_does_not_show_in_a_profile() -> None:
    assert "secret" not in repr(Profile(DEFAULT_URL, "secret"))
