# SPDX-License-Identifier: Apache-2.0
"""The CPU half of tools/bench_attention.py: fm3 beside Paddle's dense attention and, if installed, torch.

All impls and cases take turns, round after round, so that a busy moment of the machine falls on all of them.
Every round also times NumPy's sgemm (4096^3) on the same threads: what the processor gives a matrix product.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import ml_dtypes  # noqa: F401 - registers bfloat16 with NumPy
import numpy as np
from numpy.typing import NDArray

from paddle_fm3.mask import builders
from paddle_fm3.testing import bench, bench_check, memory_probe
from paddle_fm3.testing.bench_check import Outputs
from paddle_fm3.testing.cases import AttentionCase, AttentionInputs, RawMask, benchmark_case, make_inputs, paper_mask

DOCUMENT_KINDS = ("causal_document", "document", "prefix_document")
PHASES = ("fwd", "bwd", "total")
# Case names as in results/: `4k_full` is the bar against sgemm; the others' bar is visible tiles x `8k_full`.
CASES = (
    "4k_full",
    "8k_full",
    "8k_causal",
    "8k_window",
    *(f"8k_{kind}_sample{sample_idx}" for kind in DOCUMENT_KINDS for sample_idx in range(3)),
    "8k_share_question",
    "8k_global_window",
    "8k_causal_blockwise",
    "8k_prefix_causal",
    "8k_qk_sparse",
    "8k_random_eviction",
)
IMPLS = ("fm3", "paddle_dense", "torch_sdpa", "flex")
COLUMNS = {
    "attention": (
        "case", "impl", "dtype", "phase", "ms_median", "ms_p10", "ms_p90", "tflops_exact", "tflops_block",
        "density_block", "sgemm_share", "time_vs_full_by_tiles", "refcheck",
    ),
    "memory": ("case", "impl", "dtype", "phase", "peak_extra_bytes", "is_within_limit", "refcheck"),
}  # fmt: skip
_DENSE_MAX_PAIRS = 8192 * 8192  # a dense peer keeps several tables of this size
# A dense peer takes the same time for every mask of a size: three cases show it.
_DENSE_CASES = ("4k_full", "8k_full", "8k_causal_document_sample2")
MEMORY_LIMIT_BYTES = 64 * 2**20


def cpu_case(name: str) -> AttentionCase:
    """A case by name, cut to what two cores do in a second: b = 1, one head (two for `4k_full`), d = 128."""
    if name == "4k_full":
        bounds, causal = builders.full(4096).to_bounds()
        raw = RawMask(bounds, causal)
        return AttentionCase(name, 1, 4096, 4096, 2, 2, 128, 128, build_mask=lambda: raw)
    base_name, _, sample = name.partition("_sample")
    case = benchmark_case(base_name)
    sample_idx = int(sample) if sample else 2
    length, _, kind = base_name.partition("_")
    for variant in ("_gqa4", "_d64", "_d256"):
        kind = kind.removesuffix(variant)
    heads = (8, 1) if name.endswith("_gqa4") else (1, 1)

    def build_mask() -> RawMask:
        return RawMask(*paper_mask(length, kind, sample_idx).to_bounds())

    return replace(case, name=name, b=1, h_q=heads[0], h_kv=heads[1], build_mask=build_mask)


# --- implementations -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """One impl's calls on one case, inputs already in its own format."""

    forward: Callable[[], object]
    backward: Callable[[], object]  # uses what the last forward left
    outputs: Callable[[], Outputs]
    deterministic: bool
    release: Callable[[], object] = lambda: None  # drops what a peer keeps between calls


def _prepare_fm3(case: AttentionCase, inputs: AttentionInputs, threads: int) -> Prepared:
    from paddle_fm3.testing import native_call

    native_call.cpu_library().fm3_cpu_set_num_threads(threads)
    raw = case.build_mask()
    mask = native_call.NativeMask.from_bounds(raw.startend_row_indices, raw.causal, case.s_q, raw.block_mask)
    out, lse = native_call.forward(inputs.q, inputs.k, inputs.v, mask)
    grads = tuple(np.empty_like(x) for x in (inputs.q, inputs.k, inputs.v))
    return Prepared(
        forward=lambda: native_call.forward(inputs.q, inputs.k, inputs.v, mask, out=out),
        backward=lambda: native_call.backward(
            inputs.q, inputs.k, inputs.v, mask, out, lse, inputs.dout, grads=grads
        ),
        outputs=lambda: Outputs(out, lse, *grads),
        deterministic=True,
    )  # fmt: skip


def _dense_visible(case: AttentionCase) -> NDArray[np.bool_] | None:
    """[s_q, s_k] for a dense peer, None if nothing is hidden."""
    from paddle_fm3.testing.reference import visible_plane

    raw = case.build_mask()
    visible = visible_plane(raw.startend_row_indices[0, 0], raw.causal, case.s_q, case.s_k)
    return None if visible.all() else visible


def _prepare_paddle_dense(case: AttentionCase, inputs: AttentionInputs, threads: int) -> Prepared:
    import paddle
    import paddle.nn.functional as F

    paddle.set_device("cpu")
    q, k, v = (paddle.to_tensor(x, stop_gradient=False) for x in (inputs.q, inputs.k, inputs.v))
    dout = paddle.to_tensor(inputs.dout)
    visible = _dense_visible(case)
    mask = None
    if visible is not None:  # -1e9 rather than -inf: a fully hidden row would be NaN
        mask = paddle.to_tensor(np.where(visible, 0, -1e9).astype(np.float32)[None, None])
    state: dict[str, object] = {}

    def forward() -> None:
        state["out"] = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def backward() -> None:
        state["grads"] = paddle.grad([state["out"]], [q, k, v], [dout], retain_graph=True)

    return Prepared(
        forward,
        backward,
        outputs=lambda: Outputs(state["out"].numpy(), None, *(x.numpy() for x in state["grads"])),
        deterministic=False,
        release=state.clear,
    )


def _prepare_torch(case: AttentionCase, inputs: AttentionInputs, threads: int, *, is_flex: bool) -> Prepared:
    import torch

    torch.set_num_threads(threads)
    arrays = (inputs.q, inputs.k, inputs.v, inputs.dout)
    q, k, v, dout = (torch.from_numpy(x).transpose(1, 2).contiguous() for x in arrays)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    visible = _dense_visible(case)
    table = None if visible is None else torch.from_numpy(visible)
    if is_flex:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        block_mask = None
        if table is not None:
            rule = lambda b, h, q_idx, k_idx: table[q_idx, k_idx]  # noqa: E731
            block_mask = create_block_mask(rule, None, None, case.s_q, case.s_k, device="cpu")
        attend = partial(torch.compile(flex_attention, dynamic=False), block_mask=block_mask)
    else:
        attend = partial(torch.nn.functional.scaled_dot_product_attention, attn_mask=table)
    state: dict[str, object] = {}

    def forward() -> None:
        state["out"] = attend(q, k, v)

    def backward() -> None:
        state["grads"] = torch.autograd.grad(state["out"], (q, k, v), dout, retain_graph=True)

    def outputs() -> Outputs:
        arrays = [x.detach().transpose(1, 2).numpy() for x in (state["out"], *state["grads"])]
        return Outputs(arrays[0], None, *arrays[1:])

    return Prepared(forward, backward, outputs, deterministic=False, release=state.clear)


_PREPARE = {
    "fm3": _prepare_fm3,
    "paddle_dense": _prepare_paddle_dense,
    "torch_sdpa": partial(_prepare_torch, is_flex=False),
    "flex": partial(_prepare_torch, is_flex=True),
}
_NEEDS_MODULE = {"paddle_dense": "paddle", "torch_sdpa": "torch", "flex": "torch"}


def why_not(impl: str, case: AttentionCase, dtype: str) -> str | None:
    """Why an impl cannot run a case on this machine; None if it can."""
    module = _NEEDS_MODULE.get(impl)
    if module is not None and importlib.util.find_spec(module) is None:
        return f"{module} is not installed"
    if impl == "paddle_dense" and dtype != "float32":
        return f"Paddle's CPU matmul has no {dtype}"
    if module is not None and dtype != "float32":
        return "peers are timed in float32 only"
    if module is not None and case.h_q != case.h_kv:
        return "dense peers are timed without grouped heads"
    if module is not None and case.s_q * case.s_k > _DENSE_MAX_PAIRS:
        return f"a dense table of {case.s_q} x {case.s_k} is beyond this benchmark's memory"
    return None


# --- measuring -----------------------------------------------------------------------------------


def run(bench_name: str, options: bench.BenchOptions) -> Iterator[bench.Record]:
    """Yields the records of "attention" or "memory".

    Raises:
        KeyError: an unknown case or impl name.
    """
    identity = bench.RunIdentity.of_this_process(bench.cpu_name())
    yield from (_run_memory if bench_name == "memory" else _run_attention)(identity, options)


def _run_attention(identity: bench.RunIdentity, options: bench.BenchOptions) -> Iterator[bench.Record]:
    threads = options.threads or len(os.sched_getaffinity(0))
    impls = options.impls or IMPLS
    for impl in impls:
        if impl not in IMPLS:
            raise KeyError(f"bench_cpu: no impl {impl!r}; legal: {', '.join(IMPLS)}")
    jobs: dict[tuple[str, str, str], _Job] = {}
    for name in options.cases or CASES:
        case = cpu_case(name)
        for dtype in options.dtypes or ("float32",):
            inputs = make_inputs(case, dtype)
            for impl in impls:
                reason = why_not(impl, case, dtype)
                if impl in ("paddle_dense", "torch_sdpa") and not options.cases and name not in _DENSE_CASES:
                    continue
                if reason is None:
                    try:
                        jobs[name, impl, dtype] = _Job(case, impl, dtype, inputs, threads)
                    except Exception as error:
                        if impl == "fm3":
                            raise
                        reason = f"{type(error).__name__}: {error}"  # a peer's failure must not end the run
                if reason is not None:
                    print(f"skipped {impl} on {name} {dtype}: {reason}", flush=True)
    sgemm = Sgemm()
    num_rounds = options.repeats or 9
    for round_idx in range(num_rounds):
        sgemm.measure()
        for job in jobs.values():
            if job.impl == "fm3" or round_idx % 3 == 0:  # dense peers take long; a third of the rounds will do
                job.measure()
        print(f"round {round_idx + 1} of {num_rounds}, load {os.getloadavg()[0]:.1f}", flush=True)
    sgemm_gflops = sgemm.gflops
    full_ms = {
        (job.dtype, phase): job.stats(phase).ms_median
        for (name, impl, _), job in jobs.items()
        for phase in PHASES
        if name == "8k_full" and impl == "fm3"
    }
    for job in jobs.values():
        for phase in PHASES:
            stats = job.stats(phase)
            extra = {"threads": threads, "sgemm_gflops": round(sgemm_gflops, 2), "blas": sgemm.kernel}
            one = bench.attention_record(
                identity, job.impl, job.case, phase, job.dtype, stats,
                refcheck=job.refcheck, deterministic=job.prepared.deterministic, **extra,
            )  # fmt: skip
            one["sgemm_share"] = round(one["tflops_exact"] * 1e3 / sgemm_gflops, 4)
            full = full_ms.get((job.dtype, phase))
            if full is not None and job.impl == "fm3" and job.case.s_q == 8192:
                one["time_vs_full_by_tiles"] = round(stats.ms_median / full / job.case.density_block, 4)
            yield one


class _Job:
    """One impl on one case: checked once, then timed a round at a time."""

    def __init__(self, case: AttentionCase, impl: str, dtype: str, inputs: AttentionInputs, threads: int) -> None:
        self.case, self.impl, self.dtype = case, impl, dtype
        self.prepared = _PREPARE[impl](case, inputs, threads)
        self.prepared.forward()
        self.prepared.backward()
        errors = bench_check.relative_errors(case, inputs, self.prepared.outputs())
        self.refcheck = bench_check.passes(errors, dtype)
        self.prepared.release()
        self.times_ms: dict[str, list[float]] = {phase: [] for phase in PHASES}
        if not self.refcheck:
            print(f"WRONG RESULT: {impl} on {case.name} {dtype}: relative errors {errors}", flush=True)

    def measure(self) -> None:
        begin = perf_counter()
        self.prepared.forward()
        middle = perf_counter()
        self.prepared.backward()
        end = perf_counter()
        self.prepared.release()
        for phase, seconds in (("fwd", middle - begin), ("bwd", end - middle), ("total", end - begin)):
            self.times_ms[phase].append(seconds * 1e3)

    def stats(self, phase: str) -> bench.TimingStats:
        return bench.TimingStats.from_ms(self.times_ms[phase])


class Sgemm:
    """NumPy's own float32 matrix product, n = 4096, on the threads of its BLAS."""

    def __init__(self, n: int = 4096) -> None:
        rng = np.random.default_rng(0)
        self.left, self.right = (rng.standard_normal((n, n), np.float32) for _ in range(2))
        self.product = np.empty((n, n), np.float32)
        self.seconds: list[float] = []
        np.dot(self.left, self.right, out=self.product)

    def measure(self) -> None:
        begin = perf_counter()
        np.dot(self.left, self.right, out=self.product)
        self.seconds.append(perf_counter() - begin)

    @property
    def gflops(self) -> float:
        """From the median time of all rounds."""
        return 2 * self.left.shape[0] ** 3 / float(np.median(self.seconds)) * 1e-9

    @property
    def kernel(self) -> str:
        """Which BLAS kernel NumPy chose, if threadpoolctl is there to ask."""
        if importlib.util.find_spec("threadpoolctl") is None:
            return "unknown"
        import threadpoolctl

        pools = [pool for pool in threadpoolctl.threadpool_info() if "numpy" in pool["filepath"]]
        return ", ".join(f"{pool['internal_api']} {pool.get('architecture')} x{pool['num_threads']}" for pool in pools)


def _run_memory(identity: bench.RunIdentity, options: bench.BenchOptions) -> Iterator[bench.Record]:
    """s = 65,536, d = 64, one head; a causal window as wide as the sequence is the causal mask."""
    windows = {"64k_causal_d64": 65536, "64k_window_d64": 4096}
    for name in options.cases or tuple(windows):
        if name not in windows:
            raise KeyError(f"bench_cpu: no memory case {name!r}; legal: {', '.join(windows)}")
        for dtype in options.dtypes or ("float32", "bfloat16"):
            for phase in ("fwd", "bwd"):
                peak, is_right = memory_probe.probe(phase, dtype, s=65536, d=64, window=windows[name])
                is_within = peak < MEMORY_LIMIT_BYTES
                print(f"{name} {dtype} {phase}: {peak / 2**20:.1f} MiB", flush=True)
                yield bench.record(
                    identity, "memory", "fm3", refcheck=is_right, case=name, phase=phase,
                    dtype=dtype, peak_extra_bytes=peak, limit_bytes=MEMORY_LIMIT_BYTES, is_within_limit=is_within,
                )  # fmt: skip
