"""Memory that was freed stays with the process, so that the next buffer costs no page faults."""

from __future__ import annotations

import ctypes
from functools import cache

# The numbers of glibc's malloc.h, and the largest values that it takes.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_TRIM, LARGEST_MMAP = 2**31 - 1, 32 * 2**20


@cache
def keep_freed_memory() -> bool:
    """Has malloc keep what is freed, for the rest of the process; False where it cannot be told.

    Otherwise glibc gives large buffers back to the system, and every step of a training run faults the same pages in
    again. Buffers above 32 MiB still go back.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):
        # Not glibc.
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP)) and bool(mallopt(M_TRIM_THRESHOLD, LARGEST_TRIM))
