"""Work ahead of the consumer in a thread."""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

_END: Final = object()


def prefetched(source: Iterator[Any], depth: int) -> Generator[Any, None, None]:
    """Yield the items of `source`, which one thread reads up to `depth` items ahead.

    What the source raises is raised here, in its place in the order and with its own traceback.
    """
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hyperpod-prefetch")
    try:
        wanted = deque(pool.submit(next, source, _END) for _ in range(depth))
        while (item := wanted.popleft().result()) is not _END:
            wanted.append(pool.submit(next, source, _END))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)
