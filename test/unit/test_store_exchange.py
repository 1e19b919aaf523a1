# SPDX-License-Identifier: Apache-2.0
"""Records through a key-value store: everybody's arrive, and a rank that does not come is named in time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from paddle_fm3.distributed import store_exchange


class Store:
    """The three calls of Paddle's TCPStore that are used; get() of an absent key would block there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            assert key not in self._values, f"{key} was used before"
            self._values[key] = value

    def get(self, key: str) -> bytes:
        with self._lock:
            return self._values[key]

    def add(self, key: str, value: int) -> int:
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + value
            return self._counts[key]


def test_every_rank_gets_every_record() -> None:
    store = Store()
    with ThreadPoolExecutor(4) as pool:

        def one(rank: int) -> list[bytes]:
            time.sleep(0.01 * ((rank * 3) % 4))
            return store_exchange.exchange(store, "one", rank, 4, f"record {rank}".encode(), 10.0)

        results = list(pool.map(one, range(4)))
    assert results == [[f"record {rank}".encode() for rank in range(4)]] * 4


def test_an_absent_rank_is_named_in_time() -> None:
    store = Store()
    with ThreadPoolExecutor(2) as pool:
        began = time.monotonic()
        waiting = [pool.submit(store_exchange.exchange, store, "two", rank, 4, b"x", 0.5) for rank in (0, 1)]
        for future in waiting:
            with pytest.raises(store_exchange.Missing) as raised:
                future.result()
            assert raised.value.ranks is not None and set(raised.value.ranks) >= {2}
    assert time.monotonic() - began < 5


def test_a_store_that_does_not_answer_is_said_so() -> None:
    class Dead(Store):
        def add(self, key: str, value: int) -> int:
            time.sleep(30)
            return 0

    with pytest.raises(store_exchange.Missing) as raised:
        store_exchange.exchange(Dead(), "three", 0, 2, b"x", 1.2)
    assert raised.value.ranks is None


def test_a_failing_store_is_said_so() -> None:
    class Broken(Store):
        def set(self, key: str, value: bytes) -> None:
            raise RuntimeError("connection reset")

    with pytest.raises(store_exchange.Missing) as raised:
        store_exchange.exchange(Broken(), "four", 0, 2, b"x", 10.0)
    assert raised.value.ranks is None and "connection reset" in str(raised.value.__cause__)
