"""A user's program against the client, as mypy in strict mode must accept it.

`test_example_client.py` checks its types and runs it; the URL is its one argument.
"""

import asyncio
import sys

import msgspec

import fencepost


class Order(msgspec.Struct):
    """What this program writes and reads."""

    order: int
    customer: str = "nobody"


def write(client: fencepost.Client, count: int) -> fencepost.Receipt | None:
    """Store some orders exactly once."""
    unsaved: list[object] = []

    def keep(error: Exception, batch: fencepost.PendingBatch) -> None:
        unsaved.extend(batch.messages)

    orders = client.create("example/orders")
    with orders.producer("example", on_error=keep) as producer:
        for number in range(count):
            producer.append(Order(number))
        last: fencepost.Delivery = producer.append(Order(count, "somebody"))
        receipt: fencepost.Receipt = last.wait(30)
    assert not unsaved
    assert producer.last_acked == receipt
    return producer.last_acked


def read(client: fencepost.Client) -> list[Order]:
    """Read them back, typed."""
    found: list[Order] = []
    for batch in client.stream("example/orders").read(type=Order).batches():
        found += batch.messages
    return found


def change(client: fencepost.Client) -> bool:
    """Append only if nobody else did."""
    stream = client.create("example/register")
    head: fencepost.Head = stream.head()
    done: fencepost.Appended = stream.append({"value": 1}, if_match=head.next_offset)
    try:
        stream.append({"value": 2}, if_match=head.next_offset)
    except fencepost.TailMovedError as moved:
        return moved.next_offset == done.next_offset
    return False


async def follow(url: str, count: int) -> list[int]:
    """Follow a stream while another task writes it."""
    async with fencepost.connect_async(url) as client:
        stream = await client.create("example/numbers")

        async def produce() -> None:
            async with stream.producer("numbers") as producer:
                for number in range(count - 1):
                    _ = await producer.append(number)
                last: fencepost.AsyncDelivery = await producer.append(count - 1)
                receipt: fencepost.Receipt = await last
                assert receipt.messages >= 1
            await stream.close()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(produce())
            seen = [number async for number in stream.follow(type=int)]
    return seen


def main(url: str) -> None:
    """Do all of it."""
    with fencepost.connect(url, timeouts=fencepost.Timeouts(answer=20.0)) as client:
        write(client, 1_000)
        assert [order.order for order in read(client)] == list(range(1_001))
        assert change(client)
        paths: list[str] = [info.path for info in client.streams(match="example/*")]
        assert "example/orders" in paths
    assert asyncio.run(follow(url, 500)) == list(range(500))


if __name__ == "__main__":
    main(sys.argv[1])
