# SPDX-License-Identifier: Apache-2.0
"""The backward and keys of other ranks: it starts before these are there, and says, while it runs, when their gradients
are written. A second stream copies these as soon as it is told, and has to find what is there at the end."""

from __future__ import annotations

import ctypes
import time
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from bwd_lists_support import build  # noqa: E402
from gpu_support import (  # noqa: E402
    KINDS,
    assert_same_bits,
    check_backward,
    documents_case,
    is_served,
    make_inputs,
    needs_sm90,
    wide_case,
)
from schedule_support import mask_of  # noqa: E402

from paddle_fm3 import _native  # noqa: E402
from paddle_fm3.distributed.device import Sm90Device  # noqa: E402
from paddle_fm3.testing.cases import AttentionCase  # noqa: E402
from paddle_fm3.testing.gpu_call import GpuMask, Sm90  # noqa: E402
from paddle_fm3.testing.gpu_call_bwd import BackwardInputs, Gradients, Sm90Backward  # noqa: E402
from paddle_fm3.testing.hostile_cases import HOSTILE_CASES  # noqa: E402

pytestmark = needs_sm90


class Remote:
    """Backward calls some of whose keys come late, and what a second stream finds when their gradients are told."""

    def __init__(self) -> None:
        library = _native.sm90_library()
        self.backend, self.device = Sm90Backward(library), Sm90Device(library)
        self.words = torch.zeros(3, 32, dtype=torch.int32, device="cuda")  # gradients, rows, status: a line each
        self.value = 0
        self.sums, self.rows = torch.cuda.Stream(), torch.cuda.Stream()
        self.told, self.ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def run(
        self, inputs: BackwardInputs, mask: GpuMask, begin: int, *, lead_us: int = 100, is_late: bool = False,
        comes: bool = True, kept: list[torch.Tensor] | None = None, **options: object,
    ) -> tuple[Gradients, list[torch.Tensor]]:  # fmt: skip
        """Gradients, and rows [begin, s_k) of dk and dv, a batch entry each, as they were once the word was set.

        Args:
            is_late: rows from `begin` of k and v are NaN when the kernel starts, and are copied from the host after it.
            comes: or are not.
            kept: the workspace of such calls, its sums left as zeros; empty before the first.
        """
        given = inputs
        if is_late:
            given = replace(inputs, k=inputs.k.clone(), v=inputs.v.clone())
            given.k[:, begin:], given.v[:, begin:] = float("nan"), float("nan")
            late = [(to[b_idx, begin:], x[b_idx, begin:].cpu().pin_memory())
                    for to, x in ((given.k, inputs.k), (given.v, inputs.v)) for b_idx in range(len(x))]  # fmt: skip
        grads = self.backend.empty_gradients(given)
        params = self.backend.params(given, mask, grads, **options)
        if kept:
            params.workspace, params.workspace_bytes, params.zero_sums = kept[0].data_ptr(), kept[0].numel(), 2
        else:
            workspace = self.backend.prepare(params)
            workspace.fill_(0xA5)
        if kept == []:
            kept.append(workspace)
            params.zero_sums = 1
        self.value += 1
        sent, ready, status = (line.data_ptr() for line in self.words)
        self.words[1:] = 0
        params.remote_begin, params.sent_word, params.sent_value = begin, sent, self.value
        params.sent_lead_us = lead_us
        if is_late:
            params.ready_rows, params.ready_status = ready, status
            params.ready_timeout_us = 20_000 if not comes else 10_000_000
        wanted = [x[b_idx, begin:] for x in (grads.dk, grads.dv) for b_idx in range(len(x))]
        # To the host: copies inside the GPU are kernels, which find no room beside this one.
        found = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in wanted]
        torch.cuda.synchronize()
        if is_late:
            self.device.write_word(self.rows.cuda_stream, ready, begin)
            self.rows.synchronize()
        self.backend.run(params)
        self.ended.record()
        self.device.wait_word(self.sums.cuda_stream, sent, self.value)
        with torch.cuda.stream(self.sums):
            self.told.record()
            for to, source in zip(found, wanted, strict=True):
                to.copy_(source, non_blocking=True)
        if is_late and comes:
            time.sleep(2e-3)
            with torch.cuda.stream(self.rows):
                for to, source in late:
                    to.copy_(source, non_blocking=True)
            self.device.write_word(self.rows.cuda_stream, ready, inputs.k.shape[1])
        torch.cuda.synchronize()
        assert int(self.words[0, 0]) == self.value
        assert (int(self.words[2, 0]) == 0) == comes
        return grads, found

    def check(self, name: str, inputs: BackwardInputs, mask: GpuMask, begin: int, **options: object) -> Gradients:
        grads, found = self.run(inputs, mask, begin, **options)
        wanted = [x[b_idx, begin:].cpu() for x in (grads.dk, grads.dv) for b_idx in range(len(x))]
        assert_same_bits(f"{name}, rows from {begin}", tuple(wanted), tuple(found))
        return grads


@pytest.fixture(scope="module")
def remote() -> Remote:
    return Remote()


@pytest.mark.parametrize("d", [64, 128, (192, 128), 192, 256], ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (16, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_all_there_when_told(
    remote: Remote, kind: str, heads: tuple[int, int], d: int | tuple[int, int]
) -> None:
    """Groups whole and in parts (16/2); from the first key, inside a tile, in the last one, and from no key at all. Up to
    d = 128 the keys come late, too."""
    case = wide_case(kind, s=1500, b=3, heads=heads, d=d)
    inputs, mask = make_inputs(case, torch.bfloat16)
    waits = d in (64, 128)  # for late keys; the word is set behind the other kernels
    free = [remote.check(case.name, inputs, mask, begin) for begin in ((0, 700, 1499, 1500) if waits else (700,))]
    free += [remote.check(case.name, inputs, mask, begin, is_late=True) for begin in ((700, 1499) if waits else ())]
    fixed = [
        remote.check(case.name, inputs, mask, 700, is_late=is_late, is_deterministic=True)
        for is_late in ((False, True) if waits else (False,))
    ]
    check_backward(case.name, inputs, mask, *free, *fixed)
    for grads in fixed[1:]:
        assert_same_bits(case.name, *(tuple(x for _, x in one.items()) for one in (fixed[0], grads)))


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("case", HOSTILE_CASES, ids=lambda case: case.name)
def test_hostile(remote: Remote, case: AttentionCase, is_late: bool) -> None:
    if not is_served(case) or (is_late and max(case.d_qk, case.d_v) > 128):
        return
    inputs, mask = make_inputs(case, torch.bfloat16)
    for is_deterministic in (False, True):
        options = {"softmax_scale": case.softmax_scale, "is_deterministic": is_deterministic, "is_late": is_late}
        grads = remote.check(case.name, inputs, mask, case.s_k // 3, lead_us=10_000, **options)
        check_backward(case.name, inputs, mask, grads, softmax_scale=case.softmax_scale)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("heads", [(2, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("d", [64, 128, (192, 128)], ids=str)
def test_short_tiles(
    host: ctypes.CDLL, remote: Remote, d: int | tuple[int, int], heads: tuple[int, int], is_causal: bool
) -> None:
    """Other ranks' keys from a short tile's first key on, from inside it, and from behind it: then those that are loaded with it
    are late, too. Entries have other tiles there."""
    case = documents_case(is_causal, heads, (d, d) if isinstance(d, int) else d)
    begins = build(host, mask_of(case), 128).k_begins[0]
    short = next(idx for idx in range(len(begins)) if begins[idx + 1] - begins[idx] < 128)
    inputs, mask = make_inputs(case, torch.bfloat16)
    waits, got = d in (64, 128), []
    for begin in (begins[short], begins[short] + 5, begins[short + 1]):
        for is_late in (False, True) if waits else (False,):
            for is_deterministic in (False, True):
                options = {"is_late": is_late, "is_deterministic": is_deterministic}
                got.append(remote.check(case.name, inputs, mask, int(begin), **options))
    check_backward(case.name, inputs, mask, *got)
    for grads in got[3::2]:
        assert_same_bits(case.name, *(tuple(x for _, x in one.items()) for one in (got[1], grads)))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("heads", [(4, 4), (16, 2)], ids=str)
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_a_kept_workspace_s_sums_are_not_cleared_again(
    remote: Remote, is_deterministic: bool, heads: tuple[int, int], d: int
) -> None:
    """What a rank does: one workspace, keys that are late, gradients that are told, under several masks."""
    kept: list[torch.Tensor] = []
    for kind in ("causal", "window", "documents", "full", "causal"):
        case = wide_case(kind, s=1500, heads=heads, d=d)
        inputs, mask = make_inputs(case, torch.bfloat16)
        options = {"is_deterministic": is_deterministic, "lists": remote.backend.build_schedule(mask)}
        got = [
            remote.check(kind, inputs, mask, 700, is_late=is_late, kept=kept, **options) for is_late in (True, False)
        ]
        check_backward(kind, inputs, mask, *got)


def test_keys_that_nobody_sees_are_told_too(remote: Remote) -> None:
    inputs, _ = make_inputs(wide_case("causal", s=1500), torch.bfloat16)
    bounds = torch.zeros((2, 1, 1500, 1), dtype=torch.int32, device="cuda")
    nothing = GpuMask(bounds, None, True, 2, 1, 1500, 1500)
    grads = remote.check("nothing visible", inputs, nothing, 300)
    assert all(not x.any() for x in (grads.dk, grads.dv))


def rank_of_two(remote: Remote, heads: tuple[int, int]) -> tuple[BackwardInputs, GpuMask]:
    """A rank's 8K rows, and 8K keys of others: half of its rows see one half of these."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, dout = (torch.randn(1, 8192, heads[0], 128, generator=generator, device="cuda").bfloat16() for _ in range(2))
    k, v = (torch.randn(1, 16384, heads[1], 128, generator=generator, device="cuda").bfloat16() for _ in range(2))
    column = torch.arange(16384, dtype=torch.int32, device="cuda")
    end = torch.where(column < 8192, 8192, torch.where(column < 12288, 4096, 0)).int()
    mask = GpuMask(end.reshape(1, 1, -1, 1).contiguous(), None, False, 1, 1, 8192, 16384)
    out, lse = Sm90(remote.backend.library).forward(q, k, v, mask)
    return BackwardInputs(q, k, v, out, lse, dout), mask


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("heads", [(32, 4), (16, 16), (8, 1)], ids=str)
def test_told_well_before_the_end(remote: Remote, heads: tuple[int, int], is_deterministic: bool) -> None:
    inputs, mask = rank_of_two(remote, heads)
    plain = remote.backend.backward(inputs, mask, is_deterministic=is_deterministic)
    for is_late in (True, False, False):
        options = {"is_late": is_late, "is_deterministic": is_deterministic}
        grads = remote.check("a rank's", inputs, mask, 8192, lead_us=200, **options)
        for (name, x), (_, y) in zip(grads.items(), plain.items(), strict=True):
            if is_deterministic:
                assert torch.equal(x, y), name
            else:
                assert float((x.float() - y.float()).norm()) <= 3e-3 * float(y.float().norm()), name
    early_us = 1e3 * remote.told.elapsed_time(remote.ended)
    assert early_us > 100, f"told {early_us:.0f} us before the end; 200 were asked for"


def test_keys_that_never_come_end_in_a_status(remote: Remote) -> None:
    inputs, mask = rank_of_two(remote, (8, 1))
    remote.run(inputs, mask, 8192, is_late=True, comes=False)
    assert 8192 < int(remote.words[2, 0]) <= 16384
