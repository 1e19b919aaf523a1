# SPDX-License-Identifier: Apache-2.0
"""A small byte-level language model trained on packed documents with torch, attention exchangeable: whether training
through the Hopper kernels goes where exact attention goes.

Everything but attention is float32 without TF32 and the same in every run: parameters, batches, optimizer. So loss
curves differ by attention's rounding alone, and dense attention that rounds as a kernel must (`dense_bf16`) says how
far apart they may be.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from paddle_fm3.mask import builders
from paddle_fm3.testing.gpu_call import GpuMask, Sm90
from paddle_fm3.testing.gpu_call_bwd import BackwardInputs, PreparedLists, Sm90Backward

ATTENTIONS = ("fm3", "dense_bf16", "dense_fp32")


@dataclass(frozen=True)
class TrainingConfig:
    """The model and its batches; `name` goes into results."""

    name: str = "gpu_byte_lm"
    num_layers: int = 4
    h_q: int = 4
    h_kv: int = 2
    head_dim: int = 128
    ffn_size: int = 1536
    b: int = 4
    s: int = 2048
    steps: int = 200
    warmup_steps: int = 20
    learning_rate: float = 1e-3

    @property
    def hidden_size(self) -> int:
        return self.h_q * self.head_dim


@dataclass(frozen=True, eq=False)
class Batch:
    """Packed documents of one step."""

    tokens: torch.Tensor  # int64 [b, s + 1]
    lengths: list[list[int]]  # of the documents of each row
    positions: torch.Tensor  # int64 [b, s], within the document
    is_target: torch.Tensor  # bool [b, s]: the next byte belongs to the same document


def read_documents(folder: Path) -> list[bytes]:
    """The project's own pages and sources, in the order of their names."""
    paths = sorted(path for suffix in ("md", "py", "cc", "h", "cu", "cuh") for path in folder.rglob(f"*.{suffix}"))
    hidden = (".", "build", "runs")
    documents = [path.read_bytes() for path in paths if not str(path.relative_to(folder)).startswith(hidden)]
    if not documents:
        raise ValueError(f"read_documents: no text files under {folder}")
    return documents


def batches(documents: list[bytes], config: TrainingConfig, seed: int) -> Iterator[Batch]:
    """One batch a step: pieces of random documents, 1 to s bytes long, packed until a row is full."""
    rng = np.random.default_rng(seed)
    for _ in range(config.steps):
        rows, lengths = [], []
        for _ in range(config.b):
            row, row_lengths = b"", []
            while len(row) < config.s:
                document = documents[rng.integers(len(documents))]
                begin = int(rng.integers(max(len(document) - 1, 1)))
                longest = min(config.s - len(row), int(math.exp(rng.uniform(0, math.log(config.s)))))
                piece = document[begin : begin + longest]
                row, row_lengths = row + piece, [*row_lengths, len(piece)]
            rows.append(np.frombuffer(row + b"\n", np.uint8))
            lengths.append([length for length in row_lengths if length])
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64)).cuda()
        positions = [np.concatenate([np.arange(length) for length in row]) for row in lengths]
        last = [np.isin(np.arange(config.s) + 1, np.cumsum(row)) for row in lengths]
        yield Batch(
            tokens, lengths, torch.from_numpy(np.stack(positions)).cuda(), ~torch.from_numpy(np.stack(last)).cuda()
        )


# --- attention: (q [b, s, h_q, d], k, v [b, s, h_kv, d]) -> out [b, s, h_q, d], all float32 ---------------

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class _Kernel(torch.autograd.Function):
    """The C ABI's forward and backward as one differentiable call."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: Any) -> torch.Tensor:
        out, lse = step.sm90.forward(q, k, v, step.mask, schedule=step.schedule)
        ctx.step = step
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        inputs = BackwardInputs(*ctx.saved_tensors, dout.contiguous())
        grads = ctx.step.backend.backward(inputs, ctx.step.mask, lists=ctx.step.lists)
        return grads.dq, grads.dk, grads.dv, None


@dataclass(frozen=True, eq=False)
class _KernelStep:
    """A step's mask with its schedules, prepared once and used by every layer, forward and backward."""

    sm90: Sm90
    backend: Sm90Backward
    mask: GpuMask
    schedule: torch.Tensor
    lists: PreparedLists


def _kernel_attention(library: Any, batch: Batch) -> Attend:
    b, s = batch.positions.shape
    bounds, is_causal = builders.causal_document(batch.lengths).to_bounds()
    mask = GpuMask(torch.from_numpy(np.ascontiguousarray(bounds)).cuda(), None, is_causal, b, bounds.shape[1], s, s)
    sm90, backend = Sm90(library), Sm90Backward(library)
    schedule = sm90.build_schedule(mask)
    step = _KernelStep(sm90, backend, mask, schedule, backend.build_schedule(mask))
    return lambda q, k, v: _Kernel.apply(q.bfloat16(), k.bfloat16(), v.bfloat16(), step).float()


def _dense_attention(batch: Batch, dtype: torch.dtype) -> Attend:
    """The textbook formula; P and out are rounded to `dtype`, scores are not."""
    begin = (torch.arange(batch.positions.shape[1], device="cuda") - batch.positions)[:, :, None]  # of the document
    rows, keys = (torch.arange(begin.shape[1], device="cuda").view(shape) for shape in ((-1, 1), (1, -1)))
    hidden = ((keys > rows) | (keys < begin))[:, None]  # [b, 1, s, s]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.shape[2] // k.shape[2]
        q, k, v = (x.to(dtype).float().transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        score = (q @ k.transpose(2, 3) * q.shape[3] ** -0.5).masked_fill(hidden, float("-inf"))
        p = torch.softmax(score, dim=-1).to(dtype).float()
        return (p @ v).to(dtype).float().transpose(1, 2)

    return attend


# --- model ------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Pre-norm attention with rotary positions, and a gated feed-forward."""

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__()
        self.config, width, kv_width = config, config.hidden_size, config.h_kv * config.head_dim
        self.norm_attention, self.norm_ffn = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, width + 2 * kv_width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * config.ffn_size, bias=False)
        self.down = nn.Linear(config.ffn_size, width, bias=False)

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attend: Attend) -> torch.Tensor:
        config = self.config
        heads = self.qkv(self.norm_attention(x)).unflatten(2, (-1, config.head_dim))  # [b, s, h_q + 2 h_kv, d]
        q, k, v = heads.split([config.h_q, config.h_kv, config.h_kv], dim=2)
        x = x + self.project(attend(_rotate(q, *rotary), _rotate(k, *rotary), v).flatten(2))
        gate, up = self.gate_up(self.norm_ffn(x)).chunk(2, dim=2)
        return x + self.down(functional.silu(gate) * up)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [b, s, h, d] by [b, s, 1, d / 2] angles."""
    first, second = x.chunk(2, dim=3)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=3)


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size)
        self.frequency = 10000.0 ** -(torch.arange(0, config.head_dim, 2, device="cuda") / config.head_dim)

    def loss(self, batch: Batch, attend: Attend) -> torch.Tensor:
        """Mean cross entropy over bytes whose successor is in the same document."""
        angle = batch.positions[:, :, None, None] * self.frequency  # [b, s, 1, d / 2]
        rotary = (angle.cos(), angle.sin())
        x = self.embed(batch.tokens[:, :-1])
        for layer in self.layers:
            x = layer(x, rotary, attend)
        logits = self.norm(x) @ self.embed.weight.T
        return functional.cross_entropy(logits[batch.is_target], batch.tokens[:, 1:][batch.is_target])


@dataclass(frozen=True)
class Curve:
    """What a run gave, step by step."""

    losses: list[float]
    grad_norms: list[float]
    tokens_per_s: float  # over the second half of the steps


def train(
    attention: str, documents: list[bytes], config: TrainingConfig, library: Any = None, *, seed: int = 0
) -> Curve:
    """Trains from the seed's start on the seed's batches. `attention`: a name of ATTENTIONS.

    Raises:
        KeyError: no such attention.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(seed)
    model = Model(config).cuda()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / config.warmup_steps))
    makers: dict[str, Callable[[Batch], Attend]] = {
        "fm3": lambda batch: _kernel_attention(library, batch),
        "dense_bf16": lambda batch: _dense_attention(batch, torch.bfloat16),
        "dense_fp32": lambda batch: _dense_attention(batch, torch.float32),
    }
    make, losses, grad_norms = makers[attention], [], []
    begin = 0.0
    for step, batch in enumerate(batches(documents, config, seed)):
        if step == config.steps // 2:
            torch.cuda.synchronize()
            begin = time.perf_counter()
        loss = model.loss(batch, make(batch))
        optimizer.zero_grad()
        loss.backward()
        grad_norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    tokens = (config.steps - config.steps // 2) * config.b * config.s
    return Curve([float(x) for x in losses], [float(x) for x in grad_norms], tokens / seconds)
