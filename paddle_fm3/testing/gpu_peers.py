# SPDX-License-Identifier: Apache-2.0
"""Implementations of attention that the GPU benchmark times beside each other, behind one small interface.

`make(impl, problem)` gives an `Attention`, or None if that implementation has no such mask or is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from paddle_fm3.schedule import TileClass
from paddle_fm3.testing.cases import LENGTHS, VARIANTS, AttentionCase, paper_documents
from paddle_fm3.testing.gpu_call import GpuMask, Sm90
from paddle_fm3.testing.gpu_call_bwd import BackwardInputs, Sm90Backward

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # dq, dk, dv, shaped like q, k, v


@dataclass(frozen=True, eq=False)
class Problem:
    """A case on the device: standard normal inputs and output gradient, the same in every process."""

    case: AttentionCase
    mask: GpuMask
    q: torch.Tensor  # [b, s_q, h_q, d_qk]
    k: torch.Tensor  # [b, s_k, h_kv, d_qk]
    v: torch.Tensor  # [b, s_k, h_kv, d_v]
    dout: torch.Tensor  # [b, s_q, h_q, d_v]

    @classmethod
    def of(cls, case: AttentionCase, dtype: str = "bfloat16") -> Problem:
        generator = torch.Generator("cuda").manual_seed(0)
        shapes = {
            "q": (case.b, case.s_q, case.h_q, case.d_qk),
            "k": (case.b, case.s_k, case.h_kv, case.d_qk),
            "v": (case.b, case.s_k, case.h_kv, case.d_v),
            "dout": (case.b, case.s_q, case.h_q, case.d_v),
        }
        tensors = {
            name: torch.randn(shape, generator=generator, device="cuda", dtype=DTYPES[dtype])
            for name, shape in shapes.items()
        }
        return cls(case, GpuMask.of(case), **tensors)

    @cached_property
    def kind(self) -> str:
        """The mask's name without length and variant: "full", "causal_document" and so on."""
        kind = self.case.name.partition("_")[2]
        for variant in VARIANTS:
            kind = kind.removesuffix(f"_{variant}") if variant else kind
        return kind

    @property
    def length(self) -> str:
        return self.case.name.partition("_")[0]


class Attention:
    """One implementation on one problem. `backward` belongs to the latest `forward` and may be called repeatedly."""

    def forward(self) -> torch.Tensor:
        """Enqueues the forward; out [b, s_q, h_q, d_v]."""
        raise NotImplementedError

    def backward(self) -> Grads:
        """Enqueues the backward of `problem.dout`."""
        raise NotImplementedError


class Fm3(Attention):
    """The C ABI with prepared schedules, as every layer but a mask's first runs it. Nothing is allocated a call."""

    def __init__(self, problem: Problem, library: Any, *, is_deterministic: bool = False) -> None:
        case, mask, inputs = problem.case, problem.mask, (problem.q, problem.k, problem.v)
        self._forward, self._backward = Sm90(library), Sm90Backward(library)
        out = torch.full_like(problem.dout, float("nan"))
        lse = torch.full((case.b, case.h_q, case.s_q), float("nan"), device="cuda")
        schedule = self._forward.build_schedule(mask)
        self._fwd_params = self._forward.forward_params(*inputs, mask, out, lse, schedule=schedule)
        self._lists = lists = self._backward.build_schedule(mask)
        self._held = [schedule, self._forward.prepare(self._fwd_params), mask]
        self._saved = saved = BackwardInputs(*inputs, out, lse, problem.dout)
        self._grads = grads = self._backward.empty_gradients(saved)
        self._bwd_params = self._backward.params(saved, mask, grads, is_deterministic=is_deterministic, lists=lists)
        self._held.append(self._backward.prepare(self._bwd_params))

    @property
    def workspace_bytes(self) -> dict[str, int]:
        """Device bytes a call needs besides inputs and outputs, by phase, with what is prepared once a mask."""
        fwd = self._held[0].numel() + self._fwd_params.workspace_bytes
        bwd = self._lists.memory.numel() + self._bwd_params.workspace_bytes
        return {"fwd": fwd, "bwd": bwd, "total": fwd + bwd}

    def forward(self) -> torch.Tensor:
        self._forward.run(self._fwd_params)
        return self._saved.out

    def backward(self) -> Grads:
        self._backward.run(self._bwd_params)
        return self._grads.dq, self._grads.dk, self._grads.dv


class Autograd(Attention):
    """A peer that torch differentiates. `attend`: (q, k, v) -> out, laid out as the peer likes it."""

    def __init__(self, inputs: Grads, dout: torch.Tensor, attend: Callable[..., torch.Tensor],
                 restore: Callable[[torch.Tensor], torch.Tensor]) -> None:  # fmt: skip
        self._inputs = tuple(x.detach().requires_grad_() for x in inputs)
        self._dout, self._attend, self._restore = dout, attend, restore
        self._out: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        self._out = self._attend(*self._inputs)
        return self._restore(self._out.detach())

    def backward(self) -> Grads:
        dq, dk, dv = torch.autograd.grad(self._out, self._inputs, self._dout, retain_graph=True)
        return self._restore(dq), self._restore(dk), self._restore(dv)


def make(impl: str, problem: Problem, library: Any = None) -> Attention | None:
    """`impl`: a name of IMPLS. `library`: libfm3_sm90.so, which only fm3 needs.

    Raises:
        KeyError: no such implementation.
    """
    if impl in ("fm3", "fm3_deterministic"):
        return Fm3(problem, library, is_deterministic=impl == "fm3_deterministic")
    return {"cudnn": _cudnn, "fa4": _fa4, "flex": _flex}[impl](problem)


IMPLS = ("fm3", "fm3_deterministic", "fa4", "cudnn", "flex")


def _swapped(x: torch.Tensor) -> torch.Tensor:
    """[b, s, h, d] <-> [b, h, s, d]."""
    return x.transpose(1, 2)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _cudnn(problem: Problem) -> Attention | None:
    """torch's scaled_dot_product_attention with its cuDNN backend: full and causal."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    case = problem.case
    if problem.kind not in ("full", "causal") or case.h_q != case.h_kv or case.d_qk > 128:
        return None

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=problem.kind == "causal")

    inputs = tuple(_swapped(x) for x in (problem.q, problem.k, problem.v))
    return Autograd(inputs, _swapped(problem.dout), attend, _swapped)


def _fa4(problem: Problem) -> Attention | None:
    """FlashAttention-4's CuTe kernels: by name, by `window_size`, and packed documents by cu_seqlens."""
    try:
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
    except ImportError:
        return None
    case, kind = problem.case, problem.kind
    inputs, dout = (problem.q, problem.k, problem.v), problem.dout
    if kind in ("full", "causal", "window"):
        window = (LENGTHS[problem.length] // 16 - 1, 0) if kind == "window" else (None, None)
        return Autograd(
            inputs, dout, lambda q, k, v: _first(flash_attn_func(q, k, v, causal=kind != "full", window_size=window)),
            _same,
        )  # fmt: skip
    if kind not in ("causal_document", "document"):
        return None
    lengths = paper_documents(problem.length)[0] * case.b
    ends = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _first(
            flash_attn_varlen_func(
                q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=max(lengths), max_seqlen_k=max(lengths),
                causal=kind == "causal_document",
            )
        )  # fmt: skip

    packed = tuple(x.flatten(0, 1) for x in inputs)  # [b * s, h, d]
    return Autograd(packed, dout.flatten(0, 1), attend, lambda x: x.unflatten(0, (case.b, case.s_q)))


def _first(result: Any) -> torch.Tensor:
    """flash-attn-4 returns (out, lse), with or without a request for lse."""
    return result[0] if isinstance(result, tuple) else result


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., torch.Tensor]:
    import torch._functorch.config
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 64
    torch._functorch.config.donated_buffer = False
    return torch.compile(flex_attention, dynamic=False)


def _flex(problem: Problem) -> Attention | None:
    """FlexAttention with the mask as a function of row and key; its block mask is made outside the timing."""
    case, bounds, causal = problem.case, problem.mask.bounds, problem.mask.is_causal
    if problem.kind in ("full", "causal"):
        bounds = None

    def visible(b_idx: Any, h_idx: Any, q_idx: Any, k_idx: Any) -> Any:
        shown = k_idx <= q_idx if causal else q_idx >= 0
        if bounds is None:
            return shown
        bound = [bounds[b_idx, 0, k_idx, n] for n in range(bounds.shape[3])]
        if len(bound) == 1:
            return shown & (q_idx < bound[0])
        if len(bound) == 2 and not causal:
            return shown & (q_idx < bound[0]) & (q_idx >= bound[1])
        for n in range(0, len(bound), 2):
            shown = shown & ((q_idx < bound[n]) | (q_idx >= bound[n + 1]))
        return shown

    block_mask = None if problem.kind == "full" else _block_mask(case, visible)
    attend, is_grouped = _compiled_flex(), case.h_q != case.h_kv
    inputs = tuple(_swapped(x).contiguous() for x in (problem.q, problem.k, problem.v))
    return Autograd(
        inputs, _swapped(problem.dout).contiguous(),
        lambda q, k, v: attend(q, k, v, block_mask=block_mask, enable_gqa=is_grouped), _swapped,
    )  # fmt: skip


def _block_mask(case: AttentionCase, visible: Callable[..., Any]) -> Any:
    """FlexAttention's BlockMask from the case's own classes of 128 x 128 tiles: what create_block_mask finds, without
    its dense table, which takes 16 GiB at 128K."""
    from torch.nn.attention.flex_attention import BlockMask

    # NOTE: FlexAttention reads its lists as contiguous whatever their strides say; the classes are a transposed view.
    classes = torch.from_numpy(np.ascontiguousarray(case.schedule().tile_classes())).cuda()[None, None]
    lists: list[torch.Tensor] = []
    for tile_class in (TileClass.PARTIAL, TileClass.FULL):
        is_listed = classes == int(tile_class)
        lists.append(is_listed.sum(-1, dtype=torch.int32))
        lists.append(torch.argsort(is_listed.int(), dim=-1, descending=True, stable=True).int().contiguous())
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=128, mask_mod=visible, seq_lengths=(case.s_q, case.s_k))
