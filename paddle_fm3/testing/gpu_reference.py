# SPDX-License-Identifier: Apache-2.0
"""One key/value head of attention and its gradients in fp32 on a GPU, for sizes whose scores do not fit in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paddle_fm3.testing.gpu_call import GpuMask, visible_rows

CHUNK_PAIRS = 2**28  # scores held at a time: 1 GiB in fp32


@dataclass(frozen=True, eq=False)
class HeadReference:
    """What one key/value head and its `group` query heads give, in float32."""

    out: torch.Tensor  # [s_q, group, d_v]
    lse: torch.Tensor  # [group, s_q]
    dq: torch.Tensor  # [s_q, group, d_qk]
    dk: torch.Tensor  # [s_k, d_qk]
    dv: torch.Tensor  # [s_k, d_v]


def reference_head(
    q: torch.Tensor,  # [b, s_q, h_q, d_qk]
    k: torch.Tensor,  # [b, s_k, h_kv, d_qk]
    v: torch.Tensor,  # [b, s_k, h_kv, d_v]
    dout: torch.Tensor,  # [b, s_q, h_q, d_v]
    mask: GpuMask,
    b_idx: int,
    h_kv_idx: int,
    softmax_scale: float | None = None,
) -> HeadReference:
    """The textbook formulas without TF32, rows in chunks, only over the keys that a chunk's rows see."""
    torch.backends.cuda.matmul.allow_tf32 = False
    s_q, s_k, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    k32, v32 = k[b_idx, :, h_kv_idx].float(), v[b_idx, :, h_kv_idx].float()
    heads = range(h_kv_idx * group, (h_kv_idx + 1) * group)
    q32, dout32 = (x[b_idx, :, heads[0] : heads[-1] + 1].float() for x in (q, dout))  # [s_q, group, d]
    out, dq, dk, dv = torch.zeros_like(dout32), torch.zeros_like(q32), torch.zeros_like(k32), torch.zeros_like(v32)
    lse = torch.full((group, s_q), float("-inf"), device=q.device)
    rows = max(1, min(s_q, CHUNK_PAIRS // max(s_k, 1)))
    for begin in range(0, s_q, rows):
        chunk = slice(begin, min(begin + rows, s_q))
        last_mask_head = -1
        for g_idx, h_idx in enumerate(heads):
            h_mask_idx = h_idx // (q.shape[2] // mask.h_mask)
            if h_mask_idx != last_mask_head:
                hidden = ~visible_rows(mask, b_idx, h_mask_idx, chunk.start, chunk.stop)
                seen = torch.nonzero(~hidden.all(0))[:, 0]
                last_mask_head = h_mask_idx
                keys = slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 0)
            if keys.start == keys.stop:
                continue
            score = (q32[chunk, g_idx] @ k32[keys].T).mul_(scale).masked_fill_(hidden[:, keys], float("-inf"))
            row_lse = torch.logsumexp(score, dim=1)
            p = score.sub_(row_lse.masked_fill(row_lse.isinf(), 0)[:, None]).exp_()
            out[chunk, g_idx] = p @ v32[keys]
            lse[g_idx, chunk] = row_lse
            do = dout32[chunk, g_idx]
            dv[keys] += p.T @ do
            delta = (do * out[chunk, g_idx]).sum(1)
            ds = (do @ v32[keys].T).sub_(delta[:, None]).mul_(p).mul_(scale)
            dq[chunk, g_idx] = ds @ k32[keys]
            dk[keys] += ds.T @ q32[chunk, g_idx]
    return HeadReference(out, lse, dq, dk, dv)


def relative_error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `wanted`; infinite if anything is not finite."""
    norm = wanted.norm()
    error = float((actual.float() - wanted).norm() / norm) if norm > 0 else float(actual.float().norm())
    return error if error == error and error != float("inf") else float("inf")
