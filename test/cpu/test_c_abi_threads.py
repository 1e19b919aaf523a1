# SPDX-License-Identifier: Apache-2.0
"""Results do not depend on the number of threads, bit for bit, whoever calls and however often."""

from __future__ import annotations

import ctypes
import os
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
from c_abi_support import assert_matches_oracle, assert_same_bits, backend, expected, run, simd_targets

from paddle_fm3._native import cpu_library
from paddle_fm3.testing.cases import AttentionCase, RawMask, make_inputs

THREAD_COUNTS = (1, 2, 3, 5)


def _documents(s: int) -> RawMask:
    """Documents of 300 rows, one interval each side: key tiles share query tiles unevenly."""
    begin = np.arange(s) // 300 * 300
    return RawMask(np.stack([begin + 300, begin], axis=-1).astype(np.int32)[None, None], False)


CASES = [
    AttentionCase("threads_causal", 1, 700, 700, 1, 1, 64, 64, build_mask=lambda: RawMask(None, True)),
    AttentionCase("threads_full_group", 1, 400, 530, 6, 2, 40, 24, build_mask=lambda: RawMask(None, False)),
    AttentionCase("threads_many_heads", 3, 170, 150, 6, 3, 24, 16, build_mask=lambda: RawMask(None, True)),
    AttentionCase("threads_documents", 1, 1000, 1000, 2, 2, 32, 32, build_mask=lambda: _documents(1000)),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_any_thread_count_gives_the_same_bits(case, dtype):
    inputs = make_inputs(case, np.dtype(dtype))
    for target in simd_targets():
        with backend(target=target, num_threads=1):
            single = run(case, inputs)
        for num_threads in THREAD_COUNTS[1:]:
            for _ in range(3):  # another interleaving each time
                with backend(target=target, num_threads=num_threads):
                    assert_same_bits(single, run(case, inputs), (target, num_threads, case))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_heads_are_summed_in_groups_when_dq_is_not_fp32(num_threads):
    """Nine kv heads with room for 2 (4) at once: groups end inside a batch entry, the last one is short."""
    case = next(case for case in CASES if case.name == "threads_many_heads")
    inputs, exact, naive = expected(case, "bfloat16")
    with backend(num_threads=num_threads):
        assert_matches_oracle(run(case, inputs), exact, naive, (num_threads, case))


def test_calls_from_several_python_threads_at_once():
    case = CASES[0]
    inputs = make_inputs(case)
    results = {}
    with backend(num_threads=1):
        single = run(case, inputs)
    with backend(num_threads=3):
        callers = [
            threading.Thread(target=lambda idx=idx: results.update({idx: [run(case, inputs) for _ in range(3)]}))
            for idx in range(4)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(timeout=120)
    assert sorted(results) == [0, 1, 2, 3]
    for idx, several in results.items():
        for one in several:
            assert_same_bits(single, one, f"caller {idx}")


def _in_forked_child(body) -> int:
    """Exit status of a fork that runs ``body() -> bool``: 0 if it returned True. A hang is killed after 60 s."""
    pid = os.fork()
    if pid == 0:
        is_right = False
        try:
            is_right = body()
        finally:
            os._exit(0 if is_right else 1)
    watchdog = threading.Timer(60, os.kill, (pid, 9))
    watchdog.start()
    _, status = os.waitpid(pid, 0)
    watchdog.cancel()
    return status


def test_a_forked_child_computes_too():
    """A data loader forks: the child has none of the parent's worker threads and must start its own."""
    case = CASES[0]
    inputs = make_inputs(case)
    with backend(num_threads=2):
        parent = run(case, inputs)

        def child() -> bool:
            mine = run(case, inputs)
            return all(np.array_equal(parent[name], mine[name]) for name in parent)

        assert _in_forked_child(child) == 0


def test_a_system_that_refuses_threads_gets_the_same_bits():
    """The address space has room for a few thread stacks, not for the 64 asked for."""
    case = CASES[1]  # 24 items forward: 24 threads if they can be had
    inputs = make_inputs(case)
    with backend(num_threads=1):  # a parent with many threads would leave their stacks to the child
        alone = run(case, inputs)

        def child() -> bool:
            cpu_library().fm3_cpu_set_num_threads(64)
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            room = pages * resource.getpagesize() + 64 * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (room, room))
            mine = run(case, inputs)
            num_threads = len(os.listdir("/proc/self/task"))
            return num_threads < 20 and all(np.array_equal(alone[name], mine[name]) for name in alone)

        assert _in_forked_child(child) == 0


def test_workers_share_the_callers_rounding_mode():
    """Changing the caller's rounding direction changes every row's bits, not only rows the caller computed."""
    libm = ctypes.CDLL("libm.so.6")
    to_nearest, upward = libm.fegetround(), 0x800  # FE_UPWARD on x86-64
    if os.uname().machine != "x86_64":
        pytest.skip("the value of FE_UPWARD is that of x86-64")
    case = CASES[1]
    inputs = make_inputs(case)
    results = []
    with backend(num_threads=4):
        run(case, inputs)  # starts the workers: a new thread would begin with the mode of its creator
    for num_threads in (1, 4):
        with backend(num_threads=num_threads):
            libm.fesetround(upward)
            try:
                results.append(run(case, inputs))
            finally:
                libm.fesetround(to_nearest)
    assert_same_bits(*results, "rounding upward")
    with backend(num_threads=1):
        assert not np.array_equal(run(case, inputs)["out"], results[0]["out"]), "the rounding mode had no effect"
