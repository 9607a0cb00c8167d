"""How much is measured: the full scale of the report, or a quick one that only shows it works."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Sizes and times of one run."""

    seconds: float = 5.0
    warmup_seconds: float = 1.5
    connections: tuple[int, ...] = (1, 16, 64, 256)
    scattered_streams: int = 10_000
    catch_up_bytes: int = 64 * 2**20
    # Single 100-byte appends are slow to write on the reference's files, so there are fewer.
    catch_up_single_bytes: int = 4 * 2**20
    readers: tuple[int, ...] = (200, 1_000)
    sse_rate: int = 20
    sse_seconds: float = 10.0
    restart_streams: int = 100_000
    restart_messages: int = 1_000_000
    log_rows: int = 300_000
    listed_streams: int = 100_000
    conditional_appends: int = 40_000
    committed_streams: tuple[int, ...] = (1_000, 10_000, 100_000)
    sync_seconds: float = 2.0
    quick: bool = False


QUICK = Scale(
    seconds=0.3,
    warmup_seconds=0.1,
    connections=(1, 16),
    scattered_streams=200,
    catch_up_bytes=2**20,
    catch_up_single_bytes=2**16,
    readers=(10, 30),
    sse_rate=20,
    sse_seconds=0.5,
    restart_streams=90,
    restart_messages=900,
    log_rows=900,
    listed_streams=300,
    conditional_appends=400,
    committed_streams=(400,),
    sync_seconds=0.2,
    quick=True,
)
