"""What can go wrong between Spark and Fencepost, each with what to do about it."""

from __future__ import annotations

from fencepost.client.errors import FencepostError


class PipelineError(FencepostError):
    """The root of what the pipeline raises on purpose."""


class OptionError(PipelineError):
    """An option of `.format("fencepost")` is missing, unknown or not a legal value. Change it."""


class SparkMissingError(PipelineError):
    """PySpark is not installed, or not the version this is made for. Install fencepost[spark]."""


class JavaError(PipelineError):
    """There is no Java that Spark can run on; the message says where it was looked for."""


class SessionError(PipelineError):
    """A Spark session is running with other settings. Stop it first, or use it with `register`."""


class AccessError(PipelineError):
    """The server cannot be read from: a wrong url or token, missing grants, no Arrow there."""


class DataLossError(PipelineError):
    """Rows that the query has not read are gone, or the server is not the one it read from."""


class MalformedError(PipelineError):
    """A message is not what its format and schema say, and the mode is failfast."""
