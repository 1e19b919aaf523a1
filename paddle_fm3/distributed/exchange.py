# SPDX-License-Identifier: Apache-2.0
"""A plan's tables of transfers as one rank sees them: what it sends and receives, and what must come before what."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

STAGE, HOP, SRC, DST, BEGIN, ROWS, SRC_ROW, DST_ROW = range(8)  # columns: rank_plan.TRANSFER_FIELDS


@dataclass(frozen=True)
class Message:
    """One row of a plan's table as this rank sees it: rows [row, row + num_rows) of its buffer, to or from a peer.

    Attributes:
        tag: row of the table, the same on both ends.
        after: sends: positions in the list of receives that must be in first; receives: of earlier receives for
            the same rows.
    """

    tag: int
    stage: int
    hop: int
    peer: int
    row: int
    num_rows: int
    after: tuple[int, ...]

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.num_rows)


@dataclass(frozen=True, eq=False)
class Exchange:
    """All messages of one phase, in table order."""

    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]

    @classmethod
    def of(cls, table: NDArray[np.int32], rank: int) -> Exchange:
        sends = _messages(table, rank, SRC, DST, SRC_ROW)
        recvs = _messages(table, rank, DST, SRC, DST_ROW)
        return cls(
            tuple(_with_after(message, recvs, before=(message.stage, message.hop)) for message in sends),
            tuple(_with_after(message, recvs[:at]) for at, message in enumerate(recvs)),
        )


def _messages(table: NDArray[np.int32], rank: int, own: int, other: int, row: int) -> list[Message]:
    tags = np.flatnonzero(table[:, own] == rank).tolist()
    return [
        Message(tag, t[STAGE], t[HOP], t[other], t[row], t[ROWS], ())
        for tag, t in zip(tags, table[tags].tolist(), strict=True)
    ]


def _with_after(message: Message, recvs: list[Message], before: tuple[int, int] | None = None) -> Message:
    end = message.row + message.num_rows
    after = tuple(
        at
        for at, recv in enumerate(recvs)
        if recv.row < end and message.row < recv.row + recv.num_rows
        and (before is None or (recv.stage, recv.hop) < before)
    )  # fmt: skip
    return Message(message.tag, message.stage, message.hop, message.peer, message.row, message.num_rows, after)
