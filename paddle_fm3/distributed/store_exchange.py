# SPDX-License-Identifier: Apache-2.0
"""Small records between ranks through the job's key-value store: on the host alone, and with a bounded wait.

For groups over NCCL: their collectives need the GPU, cannot be given up on, and bring no bytes but a tensor's.
"""

from __future__ import annotations

import threading
import time
from typing import Any

POLL_S = 0.001


class Missing(TimeoutError):
    """Ranks that did not bring a record in time; `ranks` is None if the store itself did not answer."""

    def __init__(self, ranks: list[int] | None) -> None:
        super().__init__(f"missing records of ranks {ranks}" if ranks is not None else "the store does not answer")
        self.ranks = ranks


def exchange(store: Any, key: str, rank: int, num_ranks: int, record: bytes, timeout_s: float) -> list[bytes]:
    """Every rank's record, by rank. Collective; `key` is of one use, the same on every rank.

    Raises:
        Missing: some rank brought none within timeout_s.
    """
    found: dict[int, bytes] = {}
    errors: list[BaseException] = []
    is_done, is_given_up = threading.Event(), threading.Event()
    answered_s = [time.monotonic()]

    def run() -> None:
        try:
            store.set(f"{key}/{rank}/record", record)
            store.add(f"{key}/{rank}/is_there", 1)
            for peer in range(num_ranks):
                # NOTE: get() of a key that is not there blocks for the store's own timeout, of minutes.
                while store.add(f"{key}/{peer}/is_there", 0) == 0:
                    answered_s[0] = time.monotonic()
                    if is_given_up.wait(POLL_S):
                        return
                found[peer] = bytes(store.get(f"{key}/{peer}/record"))
            is_done.set()
        except BaseException as error:  # noqa: BLE001  raised by the waiting thread
            errors.append(error)
            is_done.set()

    # A thread of its own: a store whose host is dead does not answer for minutes.
    threading.Thread(target=run, name="paddle_fm3-store-exchange", daemon=True).start()
    is_in_time = is_done.wait(timeout_s)
    is_given_up.set()
    if errors or (not is_in_time and time.monotonic() - answered_s[0] > 1.0):
        raise Missing(None) from (errors[0] if errors else None)
    if not is_in_time:
        raise Missing([peer for peer in range(num_ranks) if peer not in found])
    return [found[peer] for peer in range(num_ranks)]
