# SPDX-License-Identifier: Apache-2.0
"""Calls the Hopper backend's C ABI on torch tensors: for tests and benchmarks on machines that have a GPU and
torch, with or without Paddle. Nothing outside `paddle_fm3.testing` imports torch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from paddle_fm3._c_api import DType, FwdParams, MaskView, Shape, Strides
from paddle_fm3.testing.cases import AttentionCase
from paddle_fm3.testing.native_call import mask_view

DTYPES = {torch.float32: DType.FLOAT32, torch.bfloat16: DType.BFLOAT16, torch.float16: DType.FLOAT16}


class Sm90Error(RuntimeError):
    """A C ABI call returned a status other than 0; the text is the library's own message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {message}")
        self.status = status


@dataclass(frozen=True, eq=False)
class GpuMask:
    """A mask on the device; keeps the tensors alive that `view` points to."""

    bounds: torch.Tensor | None  # int32 [b, h_mask, s_k, n]
    block_mask: torch.Tensor | None  # int32 [b, h_mask, ceil(s_q/128), ceil(s_k/128)]
    is_causal: bool
    b: int
    h_mask: int
    s_q: int
    s_k: int

    @classmethod
    def of(cls, case: AttentionCase) -> GpuMask:
        raw = case.build_mask()
        bounds, block_mask = (
            None if x is None else torch.from_numpy(np.ascontiguousarray(x)).cuda()
            for x in (raw.startend_row_indices, raw.block_mask)
        )
        h_mask = 1 if bounds is None else bounds.shape[1]
        return cls(bounds, block_mask, bool(raw.causal), case.b, h_mask, case.s_q, case.s_k)

    @property
    def view(self) -> MaskView:
        return mask_view(self, address(self.bounds), address(self.block_mask))


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None or tensor.numel() == 0 else tensor.data_ptr()


def strides(tensor: torch.Tensor) -> Strides:
    """Element strides of a [b, s, h, d] tensor."""
    return Strides(*tensor.stride()[:3])


class Sm90:
    """The library `libfm3_sm90.so` with torch tensors in and out.

    Args:
        library: as `paddle_fm3._native.sm90_library()` gives it.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def check(self, status: int) -> None:
        """Raises Sm90Error with the library's message unless `status` is 0."""
        if status != 0:
            raise Sm90Error(status, self.library.fm3_sm90_last_error().decode())

    def build_schedule(self, mask: GpuMask) -> torch.Tensor:
        """The prepared schedule of `mask`, a uint8 tensor."""
        view = mask.view
        num_bytes = self.library.fm3_sm90_schedule_bytes(ctypes.byref(view))
        schedule = torch.empty(max(num_bytes, 1), dtype=torch.uint8, device="cuda")
        self.fill_schedule(mask, schedule)
        return schedule

    def fill_schedule(self, mask: GpuMask, schedule: torch.Tensor) -> None:
        view = mask.view
        self.check(self.library.fm3_sm90_build_schedule(ctypes.byref(view), schedule.data_ptr(), _stream()))

    def scan_bounds(self, mask: GpuMask, schedule: torch.Tensor) -> None:
        """The first pass of `fill_schedule` alone."""
        scan = self.library.fm3_sm90_scan_bounds
        scan.restype, scan.argtypes = ctypes.c_int32, self.library.fm3_sm90_build_schedule.argtypes
        view = mask.view
        self.check(scan(ctypes.byref(view), schedule.data_ptr(), _stream()))

    def forward_params(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: GpuMask,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        softmax_scale: float | None = None,
        schedule: torch.Tensor | None = None,
    ) -> FwdParams:
        """Parameters that point at the given tensors (q, k, v, out [b, s, h, d], lse [b, h_q, s_q]), without
        workspace."""
        b, s_q, h_q, d_qk = q.shape
        return FwdParams(
            shape=Shape(b, s_q, k.shape[1], h_q, k.shape[2], d_qk, v.shape[3]),
            dtype=DTYPES[q.dtype],
            softmax_scale=d_qk**-0.5 if softmax_scale is None else softmax_scale,
            mask=mask.view,
            schedule=None if schedule is None else schedule.data_ptr(),
            q=address(q),
            k=address(k),
            v=address(v),
            out=address(out),
            lse=address(lse),
            stride_q=strides(q),
            stride_k=strides(k),
            stride_v=strides(v),
            stride_out=strides(out),
        )

    def prepare(self, params: FwdParams) -> torch.Tensor:
        """Gives `params` a workspace; the caller keeps the returned tensor alive."""
        num_bytes = self.library.fm3_sm90_fwd_workspace_bytes(ctypes.byref(params))
        if num_bytes < 0:
            raise Sm90Error(2, self.library.fm3_sm90_last_error().decode())
        workspace = torch.empty(max(num_bytes, 1), dtype=torch.uint8, device="cuda")
        params.workspace, params.workspace_bytes = workspace.data_ptr(), num_bytes
        return workspace

    def run(self, params: FwdParams) -> None:
        """Enqueues the forward on torch's current stream."""
        self.check(self.library.fm3_sm90_fwd(ctypes.byref(params), _stream()))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: GpuMask,
        *,
        softmax_scale: float | None = None,
        schedule: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out [b, s_q, h_q, d_v] and lse float32 [b, h_q, s_q]; both are poisoned first."""
        b, s_q, h_q, _ = q.shape
        if out is None:
            out = torch.empty((b, s_q, h_q, v.shape[3]), dtype=q.dtype, device=q.device)
        out.fill_(float("nan"))
        lse = torch.full((b, h_q, s_q), float("nan"), dtype=torch.float32, device=q.device)
        params = self.forward_params(q, k, v, mask, out, lse, softmax_scale=softmax_scale, schedule=schedule)
        workspace = self.prepare(params)
        workspace.fill_(0xA5)  # nothing may rely on what it holds
        self.run(params)
        return out, lse


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def visible_rows(mask: GpuMask, b_idx: int, h_mask_idx: int, q_begin: int, q_end: int) -> torch.Tensor:
    """Dense bool [q_end - q_begin, s_k] of visible pairs, from the definition of the format."""
    rows = torch.arange(q_begin, q_end, device="cuda")[:, None]
    keys = torch.arange(mask.s_k, device="cuda")[None, :]
    shown = torch.ones((q_end - q_begin, mask.s_k), dtype=torch.bool, device="cuda")
    if mask.is_causal:
        shown &= keys - rows <= mask.s_k - mask.s_q
    if mask.bounds is not None:
        bound = [mask.bounds[b_idx, h_mask_idx, :, n][None, :] for n in range(mask.bounds.shape[3])]
        if len(bound) == 1:
            shown &= rows < bound[0]
        elif len(bound) == 2 and not mask.is_causal:
            shown &= (rows < bound[0]) & (rows >= bound[1])
        else:
            for n in range(0, len(bound), 2):
                shown &= (rows < bound[n]) | (rows >= bound[n + 1])
    if mask.block_mask is not None:
        tiles = mask.block_mask[b_idx, h_mask_idx].bool()
        shown &= tiles[(rows[:, 0] // 128)][:, keys[0] // 128]
    return shown
