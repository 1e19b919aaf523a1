# SPDX-License-Identifier: Apache-2.0
"""SignalPage: words in host memory that all processes of a node and their GPUs write and wait for.

Host memory, not a GPU's: a rank can then see what the others have done without a CUDA call, release what hangs, and
read why, also after the process that wrote it has ended.

    name           written by                        waited for by              then it is safe to
    ready[r][n]    rank r's stream, batch n          streams that copy from r   read the sends of batch n of rank r
    pulled[r]      rank r's stream, after its copies streams of any rank        overwrite sends up to that batch
    come[r]        rank r's pack, as it begins       streams of attention       hold the GPU until rows are in
    wanted[r][n]   rank r's stream, before it waits  -, read by rank r's watch  say for how long peers have kept it from
                   for pulled of peers                                          overwriting the sends of batch n
    status[r]      rank r's stream, after a kernel   -, read by rank r's watch  say that the kernel gave up
    notes[r][n]    rank r's host, as it posts        -, read by later posts     know that all post the same
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from pathlib import Path

import numpy as np

FAILURE_OFFSET = 0  # of a word that is not 0 once there is a failure: the length of its reason
NUM_READY_WORDS = 1024  # more than the batches that can be under way: buffers are reused after a few
NOTE_SCALE = 1 << 32  # a note is the number of a batch, from 1 on, times this, and 32 bits of what it is
_HEAD_BYTES, _RANK_BYTES = 4096, 20480
_PULLED, _STATUS, _PID, _STARTED, _CLOSED, _COME = 4096, 4160, 4224, 4232, 4240, 4288  # in a rank's part
_NOTES, _WANTED = 8192, 16384
_REASON_AT, _MAX_REASON_BYTES = 64, 2048
_FOLDER = Path("/dev/shm")


class SignalPage:
    """One rank's mapping of the page.

    Attributes:
        path: the file behind it until `unlink`.
        num_bytes, address: of the mapping, for cudaHostRegister.
    """

    def __init__(self, path: Path, rank: int, num_ranks: int, is_new: bool) -> None:
        self.path, self.rank, self.num_ranks = path, rank, num_ranks
        self.num_bytes = _HEAD_BYTES + num_ranks * _RANK_BYTES
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if is_new else 0) | os.O_NOFOLLOW
        self._file = os.open(path, flags, 0o600)
        if is_new:
            os.ftruncate(self._file, self.num_bytes)
        self._map = mmap.mmap(self._file, self.num_bytes)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._words = self._bytes.view(np.uint32)
        self.address = self._bytes.ctypes.data
        self._words64 = self._bytes.view(np.uint64)
        # Of all ranks. (A memoryview's items are quicker than an array's.)
        self._notes = memoryview(self._map).cast("Q")
        self._notes_at = [(self._part(r) + _NOTES) // 8 for r in range(num_ranks)]
        self._words64[(self._part(rank) + _STARTED) // 8] = start_time(os.getpid())
        self._words64[(self._part(rank) + _PID) // 8] = os.getpid()

    @classmethod
    def create(cls, num_ranks: int) -> SignalPage:
        """Rank 0's; the others open it by its path."""
        return cls(_FOLDER / f"paddle_fm3-{secrets.token_hex(16)}", 0, num_ranks, True)

    def unlink(self) -> None:
        """Once all ranks have opened it: no name is left behind, whatever happens later."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    def _part(self, rank: int) -> int:
        return _HEAD_BYTES + rank * _RANK_BYTES

    # --- words: offsets for streams, values for the host -----------------------------------------

    def ready_offset(self, rank: int, number: int) -> int:
        return self._part(rank) + number % NUM_READY_WORDS * 4

    def pulled_offset(self, rank: int) -> int:
        return self._part(rank) + _PULLED

    def come_offset(self, rank: int) -> int:
        return self._part(rank) + _COME

    def wanted_offset(self, rank: int, number: int) -> int:
        return self._part(rank) + _WANTED + number % NUM_READY_WORDS * 4

    def status_offset(self, rank: int) -> int:
        return self._part(rank) + _STATUS

    def is_wanted(self, number: int) -> bool:
        return self.word(self.wanted_offset(self.rank, number)) >= number + 1

    def word(self, offset: int) -> int:
        return int(self._words[offset // 4])

    def release(self, value: int) -> None:
        """Every wait for a value up to `value` ends, on every rank."""
        for rank in range(self.num_ranks):
            begin = self._part(rank) // 4
            self._words[begin : begin + NUM_READY_WORDS] = value
            for offset in (self.pulled_offset(rank), self.come_offset(rank)):
                self._words[offset // 4] = value

    # --- what ranks post -------------------------------------------------------------------------

    def note(self, number: int, what: int) -> None:
        """This rank posts batch `number`; `what` is 32 bits wide."""
        self._notes[self._notes_at[self.rank] + number % NUM_READY_WORDS] = (number + 1) * NOTE_SCALE + what

    def notes_of(self, number: int) -> list[int]:
        """What each rank noted last in the place of batch `number`: below (number + 1) * NOTE_SCALE if it has yet to
        come to it, from (number + 2) * NOTE_SCALE on if it is far ahead."""
        at = number % NUM_READY_WORDS
        return [self._notes[begin + at] for begin in self._notes_at]

    # --- ranks -----------------------------------------------------------------------------------

    def has_ended(self, rank: int) -> bool:
        """The rank's process is gone and had not closed its transport."""
        pid, started = (int(self._words64[(self._part(rank) + at) // 8]) for at in (_PID, _STARTED))
        return pid != 0 and not self.has_closed(rank) and start_time(pid) != started

    def has_closed(self, rank: int) -> bool:
        return self.word(self._part(rank) + _CLOSED) != 0

    def mark_closed(self) -> None:
        """This rank takes its leave in order: that its process ends is no failure."""
        self._words[(self._part(self.rank) + _CLOSED) // 4] = 1

    def close(self) -> None:
        self.mark_closed()
        os.close(self._file)

    # --- failure ---------------------------------------------------------------------------------

    @property
    def failure(self) -> str | None:
        """Why the transport has ended; the same text on every rank."""
        num_bytes = self.word(FAILURE_OFFSET)
        return None if num_bytes == 0 else bytes(self._bytes[_REASON_AT : _REASON_AT + num_bytes]).decode()

    def fail(self, reason: str) -> None:
        """The first reason stays."""
        text = reason.encode()[:_MAX_REASON_BYTES].decode(errors="ignore").encode()
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            if self.word(FAILURE_OFFSET) == 0:
                self._bytes[_REASON_AT : _REASON_AT + len(text)] = np.frombuffer(text, np.uint8)
                self._words[FAILURE_OFFSET // 4] = len(text)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)


def start_time(pid: int) -> int:
    """When the process began, in clock ticks since boot; 0 if there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
