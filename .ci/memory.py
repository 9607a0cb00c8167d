"""Make a folder in memory for the temporary files of a test run, and print its path.

Prints nothing where the machine has no such place, where it is too small, or where programs in it
may not be run: then the tests use the disk, and take longer.
"""

import os
import tempfile
from pathlib import Path

PLACE = Path("/dev/shm")
# A run keeps about a gigabyte at once, and the JVMs of its Sparks need as much each.
FREE_BYTES_MIN = 3 << 30
MEMORY_BYTES_MIN = 8 << 30


def main() -> None:
    if not PLACE.is_dir() or not os.access(PLACE, os.W_OK):
        return
    facts = os.statvfs(PLACE)
    free = facts.f_bavail * facts.f_frsize
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if facts.f_flag & os.ST_NOEXEC or free < FREE_BYTES_MIN or memory < MEMORY_BYTES_MIN:
        return
    folder = tempfile.mkdtemp(prefix="fencepost-test-", dir=PLACE)
    # PostgreSQL does not run as root: another user has to come through to its own folder.
    os.chmod(folder, 0o755)
    print(folder)


if __name__ == "__main__":
    main()
