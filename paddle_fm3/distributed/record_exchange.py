# SPDX-License-Identifier: Apache-2.0
"""Small records between ranks over a TcpTransport: in well under a millisecond, and a rank that dies is known at once.

What ranks of a group say to each other on the host once they are connected: shapes, masks, memory handles.
"""

from __future__ import annotations

import json
from typing import Any

from paddle_fm3.distributed.transport import RECORDS, TcpTransport, TransportError

RECORD_BYTES = 8192  # fixed size of one rank's record: the receiver offers its memory first

Record = dict[str, Any]


class RecordExchange:
    """Collective calls, in the same order on every rank; no other phases may be open on the transport.

    Args:
        transport: connections between the ranks.
        timeout_s: longest wait for the others, unless a call names its own.
    """

    def __init__(self, transport: TcpTransport, timeout_s: float) -> None:
        self.transport = transport
        self._timeout_s = timeout_s

    def __call__(self, record: Record, what: str, timeout_s: float | None = None) -> list[Record]:
        """Every rank's JSON-able record, by rank.

        Raises:
            TransportError: a rank was lost, or is missing after timeout_s; every rank learns of it.
            ValueError: the record is longer than RECORD_BYTES.
        """
        transport = self.transport
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        if transport.failure is not None:
            raise TransportError(f"'{what}' refused: an earlier transfer of this group failed: {transport.failure}")
        encoded = json.dumps(record).encode()
        if len(encoded) > RECORD_BYTES:
            raise ValueError(
                f"RecordExchange: the record of '{what}' takes {len(encoded)} bytes; at most {RECORD_BYTES}"
            )
        own = memoryview(encoded.ljust(RECORD_BYTES))
        texts = {peer: bytearray(RECORD_BYTES) for peer in range(transport.num_ranks) if peer != transport.rank}
        open_recvs, open_sends = set(texts), set(texts)
        phase = transport.next_phase(RECORDS)
        for peer, text in texts.items():
            transport.post_recv(peer, phase, 0, [memoryview(text)], lambda _, peer=peer: open_recvs.discard(peer))
            transport.post_send(peer, phase, 0, [own], lambda _, peer=peer: open_sends.discard(peer))
        if not transport.wait_until(lambda: not open_recvs and not open_sends, timeout_s):
            missing = ", ".join(map(str, sorted(open_recvs | open_sends)))
            transport.fail(
                f"rank {transport.rank} of {transport.num_ranks} gave up on '{what}': no byte for "
                f"{timeout_s:g} s; missing: rank {missing} (dead or stalled)"
            )
            raise TransportError(transport.failure)
        return [record if rank not in texts else json.loads(bytes(texts[rank])) for rank in range(transport.num_ranks)]
