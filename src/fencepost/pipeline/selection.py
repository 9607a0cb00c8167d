"""Which streams a query reads: paths or a pattern, as options say it and as the server asks it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from fencepost.pipeline.options import Options
from fencepost.protocol.globs import ANY, BadGlob, parse_glob

SELECTING = ("stream", "streams", "match")
STREAMS_MAX = 64
"""As many paths as a server takes in one request (its `log_streams_max`)."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Streams by their paths, or by a pattern; `nothing` when filters contradict each other."""

    streams: tuple[str, ...] = ()
    match: str | None = None
    nothing: bool = False

    def asked(self) -> dict[str, Any]:
        """The arguments of the client's calls."""
        # Asked for everything without a pattern, the server compares no paths: half the work.
        match = None if self.match == ANY else self.match
        return {"streams": list(self.streams) or None, "match": match}

    def takes(self, path: str) -> bool:
        """Whether a stream is selected."""
        if self.match is None:
            return path in self.streams
        glob = parse_glob(self.match)
        assert not isinstance(glob, BadGlob)
        return glob.matches(path)

    def __str__(self) -> str:
        return self.match if self.match is not None else ", ".join(self.streams)


def selection_of(options: Options) -> Selection:
    """What `stream`, `streams` or `match` select: exactly one of them has to be there."""
    stream = options.text("stream")
    streams = options.text("streams")
    match = options.text("match")
    options.exactly_one(SELECTING, "say which streams to read (match ** is all)")
    if stream is not None:
        return Selection((_path(options, "stream", stream),))
    if streams is not None:
        paths = tuple(dict.fromkeys(_path(options, "streams", one) for one in _list(streams)))
        if not paths or len(paths) > STREAMS_MAX:
            raise options.refusal(
                "streams", f"from 1 to {STREAMS_MAX} paths; for more of them use the option match"
            )
        return Selection(paths)
    assert match is not None
    glob = parse_glob(match)
    if isinstance(glob, BadGlob):
        raise options.refusal("match", f"a pattern like orders/* or **: {glob.detail}")
    return Selection(match=match)


def _list(text: str) -> list[str]:
    """Paths in a JSON array, for those with commas in them, or with commas between them."""
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except ValueError:
            return [""]
        return [one if isinstance(one, str) else "" for one in found]
    return [piece.strip() for piece in text.split(",")]


def _path(options: Options, name: str, path: str) -> str:
    glob = parse_glob(path)
    if isinstance(glob, BadGlob):
        raise options.refusal(name, f"made of paths like orders/eu: {glob.detail}")
    if not glob.is_exact:
        raise options.refusal(name, "made of paths; a pattern with * goes into the option match")
    return path
