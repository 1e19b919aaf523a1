# SPDX-License-Identifier: Apache-2.0
"""Calls the Hopper backward through the C ABI on torch tensors; the forward's part is `gpu_call`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from paddle_fm3._c_api import BwdParams, BwdSchedule, Shape
from paddle_fm3.testing.gpu_call import DTYPES, GpuMask, Sm90Error, address, strides, visible_rows


@dataclass(frozen=True, eq=False)
class Gradients:
    """dq [b, s_q, h_q, d_qk], dk [b, s_k, h_kv, d_qk], dv [b, s_k, h_kv, d_v]."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor

    def items(self) -> list[tuple[str, torch.Tensor]]:
        return [("dq", self.dq), ("dk", self.dk), ("dv", self.dv)]


@dataclass(frozen=True, eq=False)
class BackwardInputs:
    """What a backward call reads: the forward's inputs and results, and the incoming gradients."""

    q: torch.Tensor  # [b, s_q, h_q, d_qk]
    k: torch.Tensor  # [b, s_k, h_kv, d_qk]
    v: torch.Tensor  # [b, s_k, h_kv, d_v]
    out: torch.Tensor  # [b, s_q, h_q, d_v]
    lse: torch.Tensor  # float32 [b, h_q, s_q]
    dout: torch.Tensor  # [b, s_q, h_q, d_v]
    dlse: torch.Tensor | None = None  # float32 [b, h_q, s_q]


@dataclass(frozen=True, eq=False)
class PreparedLists:
    """The backward's prepared schedule of a mask; must outlive calls that use it."""

    struct: BwdSchedule
    memory: torch.Tensor  # uint8


class Sm90Backward:
    """`fm3_sm90_bwd` of a loaded `libfm3_sm90.so`, declared by `paddle_fm3._c_api.declare`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def empty_gradients(self, inputs: BackwardInputs) -> Gradients:
        """Contiguous outputs filled with NaN, so that an unwritten element is seen."""
        return Gradients(*(torch.full_like(x, float("nan"), memory_format=torch.contiguous_format)
                           for x in (inputs.q, inputs.k, inputs.v)))  # fmt: skip

    def build_schedule(self, mask: GpuMask) -> PreparedLists:
        """Prepares `mask` for the backward."""
        view = mask.view
        num_bytes = self.library.fm3_sm90_bwd_schedule_bytes(ctypes.byref(view))
        memory = torch.empty(max(num_bytes, 1), dtype=torch.uint8, device="cuda")
        made = PreparedLists(BwdSchedule(view, memory.data_ptr(), num_bytes), memory)
        self.fill_schedule(made)
        return made

    def fill_schedule(self, made: PreparedLists) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self._check(self.library.fm3_sm90_build_bwd_schedule(ctypes.byref(made.struct), stream))

    def params(
        self,
        inputs: BackwardInputs,
        mask: GpuMask,
        grads: Gradients,
        *,
        softmax_scale: float | None = None,
        is_deterministic: bool = False,
        lists: PreparedLists | None = None,
    ) -> BwdParams:
        """Parameters that point at the given tensors, without workspace."""
        b, s_q, h_q, d_qk = inputs.q.shape
        _, s_k, h_kv, d_v = inputs.v.shape
        return BwdParams(
            shape=Shape(b, s_q, s_k, h_q, h_kv, d_qk, d_v),
            dtype=DTYPES[inputs.q.dtype],
            softmax_scale=d_qk**-0.5 if softmax_scale is None else softmax_scale,
            is_deterministic=int(is_deterministic),
            mask=mask.view,
            bwd_schedule=None if lists is None else ctypes.addressof(lists.struct),
            **{name: address(getattr(inputs, name)) for name in ("q", "k", "v", "out", "lse", "dout", "dlse")},
            **{name: address(value) for name, value in grads.items()},
            **{f"stride_{name}": strides(getattr(inputs, name)) for name in ("q", "k", "v", "out", "dout")},
            **{f"stride_{name}": strides(value) for name, value in grads.items()},
        )

    def prepare(self, params: BwdParams) -> torch.Tensor:
        """Gives `params` a workspace; the caller keeps the returned tensor alive."""
        num_bytes = self.library.fm3_sm90_bwd_workspace_bytes(ctypes.byref(params))
        if num_bytes < 0:
            raise Sm90Error(2, self.library.fm3_sm90_last_error().decode())
        workspace = torch.empty(max(num_bytes, 1), dtype=torch.uint8, device="cuda")
        params.workspace, params.workspace_bytes = workspace.data_ptr(), num_bytes
        return workspace

    def run(self, params: BwdParams) -> None:
        """Enqueues the backward on torch's current stream."""
        self._check(self.library.fm3_sm90_bwd(ctypes.byref(params), torch.cuda.current_stream().cuda_stream))

    def _check(self, status: int) -> None:
        if status != 0:
            raise Sm90Error(status, self.library.fm3_sm90_last_error().decode())

    def backward(
        self,
        inputs: BackwardInputs,
        mask: GpuMask,
        *,
        grads: Gradients | None = None,
        softmax_scale: float | None = None,
        is_deterministic: bool = False,
        lists: PreparedLists | None = None,
    ) -> Gradients:
        """The gradients; outputs and workspace are poisoned first."""
        grads = self.empty_gradients(inputs) if grads is None else grads
        for _, value in grads.items():
            value.fill_(float("nan"))
        params = self.params(
            inputs, mask, grads, softmax_scale=softmax_scale, is_deterministic=is_deterministic, lists=lists
        )  # fmt: skip
        workspace = self.prepare(params)
        workspace.fill_(0xA5)  # nothing may rely on what it holds
        self.run(params)
        return grads


def reference_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: GpuMask,
    *,
    softmax_scale: float | None = None,
    compute: torch.dtype = torch.float64,
    out_dtype: torch.dtype | None = None,
    round_like: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [b, s_q, h_q, d_v] and lse float32 [b, h_q, s_q], one head at a time; for sizes whose scores fit in memory.

    Args:
        out_dtype: of out; by default that of q.
        round_like: rounds P, and only P, to this dtype, as a kernel does that feeds it to matrix units.
    """
    out = torch.zeros((*q.shape[:3], v.shape[3]), dtype=out_dtype or q.dtype, device=q.device)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), device=q.device)
    for b_idx in range(q.shape[0]):
        for h_idx in range(q.shape[2]):
            score, h_kv_idx = _scores(q, k, mask, b_idx, h_idx, softmax_scale, compute)
            row_lse = torch.logsumexp(score, dim=1)
            p = torch.exp(score - torch.where(row_lse.isinf(), torch.zeros_like(row_lse), row_lse)[:, None])
            if round_like is not None:
                p = p.to(round_like).to(compute)
            out[b_idx, :, h_idx] = (p @ v[b_idx, :, h_kv_idx].to(compute)).to(out.dtype)
            lse[b_idx, h_idx] = row_lse.float()
    return out, lse


def reference_backward(
    inputs: BackwardInputs,
    mask: GpuMask,
    *,
    softmax_scale: float | None = None,
    heads: list[tuple[int, int]] | None = None,
    compute: torch.dtype = torch.float64,
    round_like: torch.dtype | None = None,
) -> Gradients:
    """Gradients by the textbook formulas, one head at a time, in `compute` precision.

    Args:
        heads: (b_idx, h_kv_idx) to compute, all by default; others stay zero.
        round_like: rounds P and dS to this dtype, as a kernel does that feeds them to matrix units. The error of
            that low-precision answer is what a tolerance is derived from.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    group = q.shape[2] // k.shape[2]
    dq, dk, dv = (torch.zeros(x.shape, dtype=compute, device=x.device) for x in (q, k, v))
    if heads is None:
        heads = [(b_idx, h_idx) for b_idx in range(k.shape[0]) for h_idx in range(k.shape[2])]

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x if round_like is None else x.to(round_like).to(compute)

    for b_idx, h_kv_idx in heads:
        for h_idx in range(h_kv_idx * group, (h_kv_idx + 1) * group):
            score, _ = _scores(q, k, mask, b_idx, h_idx, softmax_scale, compute)
            lse = inputs.lse[b_idx, h_idx].to(compute)
            p = torch.exp(score - torch.where(lse.isinf(), torch.zeros_like(lse), lse)[:, None])
            do, o = inputs.dout[b_idx, :, h_idx].to(compute), inputs.out[b_idx, :, h_idx].to(compute)
            delta = (do * o).sum(1)
            if inputs.dlse is not None:
                delta = delta - inputs.dlse[b_idx, h_idx].to(compute)
            ds = rounded(p * (do @ v[b_idx, :, h_kv_idx].to(compute).T - delta[:, None]))
            dq[b_idx, :, h_idx] = scale * (ds @ k[b_idx, :, h_kv_idx].to(compute))
            dk[b_idx, :, h_kv_idx] += scale * (ds.T @ q[b_idx, :, h_idx].to(compute))
            dv[b_idx, :, h_kv_idx] += rounded(p).T @ do
    return Gradients(dq, dk, dv)


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: GpuMask,
    b_idx: int,
    h_idx: int,
    softmax_scale: float | None,
    compute: torch.dtype,
) -> tuple[torch.Tensor, int]:
    """Masked scores [s_q, s_k] of one query head, and its key/value head."""
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    h_kv_idx = h_idx // (q.shape[2] // k.shape[2])
    score = q[b_idx, :, h_idx].to(compute) @ k[b_idx, :, h_kv_idx].to(compute).T * scale
    hidden = ~visible_rows(mask, b_idx, h_idx // (q.shape[2] // mask.h_mask), 0, q.shape[1])
    return score.masked_fill_(hidden, float("-inf")), h_kv_idx
