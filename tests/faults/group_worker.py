"""A worker of a group as a process: its effects and its ack are one commit. Killed at any point.

Arguments: the server's URL, the group, the worker's name.
"""

from __future__ import annotations

import sys

import fencepost
from fencepost import CommitAppend


def main() -> None:
    url, name, worker = sys.argv[1:]
    with fencepost.connect(url) as client:
        group = client.group(name)
        while True:
            try:
                leases = group.claim(worker, streams_max=4, events_max=3, wait_ms=1_000).leases
                for lease in leases:
                    done = [
                        CommitAppend(
                            stream=f"{name}-out",
                            messages=[{"target": lease.target, "n": event.data, "by": worker}],
                            auto_create=True,
                        )
                        for event in lease.events
                    ]
                    if done:
                        client.commit(done, leases=[(lease.token, lease.read_to)])
            except fencepost.LeaseLostError:
                continue
            except (fencepost.ConnectionFailedError, fencepost.UnavailableError):
                continue


if __name__ == "__main__":
    main()
