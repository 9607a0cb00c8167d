"""Reading a range of the log on an executor: as Arrow, page by page, across restarts of the server.

Memory stays bounded whatever the range: a page is a few megabytes, and one page is fetched ahead
while Spark takes the one before it. The same range gives the same rows however often it is read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from fencepost.client.arrow_log import ArrowPage
from fencepost.client.errors import BadRequestError, LogPrunedError
from fencepost.client.sync import Client
from fencepost.pipeline.errors import AccessError, DataLossError
from fencepost.pipeline.options import Selection
from fencepost.pipeline.source.formats import messages
from fencepost.pipeline.source.options import SourceOptions

if TYPE_CHECKING:
    import pyarrow as pa

PAGE_ROWS = 100_000
"""Rows to ask for at once; the bytes of a page bound it before that."""

log = logging.getLogger(__name__)


class Range(NamedTuple):
    """Positions above `after` up to `until`."""

    after: int
    until: int


def read_range(
    options: SourceOptions, selection: Selection, asked: Range
) -> Iterator[pa.RecordBatch]:
    """The rows of a range in the declared columns, in the order of positions."""
    for page in _pages(options, selection, asked):
        for batch in _batches(page):
            rows = messages(batch)
            if rows.num_rows:
                shaped = options.shape.shaped(rows)
                if shaped.num_rows:
                    yield shaped


def _pages(options: SourceOptions, selection: Selection, asked: Range) -> Iterator[ArrowPage]:
    with options.connection.client() as client, ThreadPoolExecutor(1) as ahead:
        fetching = ahead.submit(_fetch, client, options, selection, asked)
        while True:
            page = fetching.result()
            done = page.next >= asked.until
            if not done:
                asked = Range(page.next, asked.until)
                fetching = ahead.submit(_fetch, client, options, selection, asked)
            if page.pruned is not None:
                log.warning("%s", skipped(selection, page.pruned))
            yield page
            if done:
                return


def _fetch(client: Client, options: SourceOptions, selection: Selection, asked: Range) -> ArrowPage:
    try:
        return _page(client, options, selection, asked, PAGE_ROWS)
    except LogPrunedError as error:
        raise pruned_error(selection, error.pruned) from error
    except BadRequestError as error:
        if error.code == "after_beyond_head":
            raise beyond_head_error(asked.after, error.headers.get("log-head", "?")) from error
        if error.code == "arrow_unavailable":
            raise AccessError(
                "the server cannot send its log as Arrow, which Spark reads: where the server runs,"
                " pip install 'fencepost[arrow]' and start it again"
            ) from error
        if error.code != "limit_invalid":
            raise
        # A server with a smaller limit has a default that fits.
        return _page(client, options, selection, asked, None)


def _page(
    client: Client,
    options: SourceOptions,
    selection: Selection,
    asked: Range,
    page_rows: int | None,
) -> ArrowPage:
    return client.log_arrow(
        after=asked.after,
        until=asked.until,
        page_rows=page_rows,
        columns=options.shape.log_columns,
        skip_pruned=not options.fail_on_data_loss,
        **selection.asked(),
    )


def _batches(page: ArrowPage) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    with pa.ipc.open_stream(pa.py_buffer(page.data)) as reader:
        yield from reader


def skipped(selection: Selection, position: int) -> str:
    """The warning that rows are gone and that the query goes on without them."""
    return (
        f"rows of {selection}, the newest at position {position}, left the server's log after its"
        " retention and are skipped (failOnDataLoss=false)"
    )


def pruned_error(selection: Selection, position: int | None) -> DataLossError:
    """The error that rows are gone which the query has not read."""
    return DataLossError(
        f"rows of {selection} that were not read yet, the newest at position {position}, left the"
        " server's log after its retention (log_retention_ms): their streams were deleted or"
        " truncated. Read what is left with failOnDataLoss=false (of a table: --skip-lost)"
    )


def beyond_head_error(position: int, head: int | str) -> DataLossError:
    """The error that the query has read further than the server's log goes."""
    return DataLossError(
        f"the query stands at position {position}, but the server's log ends at {head}: this is"
        " another server, or one that lost data (an old backup). Check the url; to read this server"
        " from its beginning, start with a new checkpoint"
    )
