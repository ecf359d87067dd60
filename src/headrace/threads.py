"""Pools of threads with more stack than threads usually have."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

# A grammar is descended into by recursion: enough for the longest chain of rules that the limits of text/grammar.py let in.
GRAMMAR_STACK_BYTES = 64 << 20


def deep_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """All of its threads are started here: the size of a stack is decided when a thread starts, for the whole process."""
    before = threading.stack_size(GRAMMAR_STACK_BYTES)
    try:
        pool = ThreadPoolExecutor(threads, name)
        barrier = threading.Barrier(threads + 1)
        for _ in range(threads):
            pool.submit(barrier.wait)
        barrier.wait()
    finally:
        threading.stack_size(before)
    return pool
