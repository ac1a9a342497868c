"""Many keys of a c10d store in few requests, without waiting for those that are missing as `multi_get` does."""

from collections.abc import Sequence

from torch._C._distributed_c10d import Store


def read_key(store: Store, key: str) -> bytes | None:
    """Value of a key, or None."""
    return store.get(key) if store.check([key]) else None


def read_keys(store: Store, keys: Sequence[str]) -> dict[str, bytes]:
    """Values of those keys that are there: two requests if all are, a few more for each one that is missing.

    Nobody may delete them meanwhile.
    """
    found = present_keys(store, keys)
    return dict(zip(found, store.multi_get(found), strict=True)) if found else {}


def present_keys(store: Store, keys: Sequence[str]) -> list[str]:
    """Which keys are there, by halving: a store says of many at once only whether it has them all."""
    if not keys or store.check(list(keys)):
        return list(keys)
    if len(keys) == 1:
        return []
    half = len(keys) // 2
    return present_keys(store, keys[:half]) + present_keys(store, keys[half:])
