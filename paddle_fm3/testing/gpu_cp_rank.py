# SPDX-License-Identifier: Apache-2.0
"""One rank's process for context parallelism on GPUs: `python -m paddle_fm3.testing.gpu_cp_rank CONFIG RANK`.

CONFIG is a JSON file: port, num_ranks, devices (by rank), timeout_s, out (folder) and jobs, run one after another. The
rank writes out/rank<RANK>.jsonl, one line a job. Jobs of kind

    check   forward and backward `repeats` times against one GPU: relative errors, bytes, equality of repeats
    stall   rank `victim` stays away from a step, or, without "has_backward", from forwards alone; what the others are
            told, and when
    kill    rank `victim` kills itself in a step; likewise
    time    milliseconds of forward, backward and both, by events; see `gpu_cp_steps`. Jobs that follow one another with
            the same "case" are timed in turns.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paddle_fm3._native import sm90_library
from paddle_fm3.distributed.device import Sm90Device
from paddle_fm3.distributed.device_execute import DeviceAttention, Heads
from paddle_fm3.distributed.device_ipc import IpcTransport
from paddle_fm3.distributed.transport import TransportError
from paddle_fm3.testing import gpu_cp
from paddle_fm3.testing.device_work_file import load_work

Job = dict[str, Any]


class RankProcess:
    """What the jobs of one process share."""

    def __init__(self, config: dict[str, Any], rank: int) -> None:
        self.config, self.rank = config, rank
        self.folder = Path(config["folder"])
        torch.cuda.set_device(config["devices"][rank])
        torch.zeros(1, device="cuda")  # makes the context current
        self.library = sm90_library()
        self.device = Sm90Device(self.library)
        self.exchanges: dict[int, gpu_cp.LoopbackExchange] = {}
        self.wanted: dict[str, dict[str, torch.Tensor]] = {}
        self.full: dict[str, gpu_cp.Inputs] = {}
        self.stream = torch.cuda.Stream()
        self._shared: dict[str, Any] = {}

    def exchange(self, num_ranks: int) -> gpu_cp.LoopbackExchange:
        if num_ranks not in self.exchanges:
            self.exchanges[num_ranks] = gpu_cp.LoopbackExchange(self.rank, num_ranks, self.config["port"] + num_ranks)
        return self.exchanges[num_ranks]

    def transport(self, num_ranks: int, timeout_s: float) -> IpcTransport | None:
        if num_ranks == 1:
            return None
        return IpcTransport(self.device, self.rank, num_ranks, self.exchange(num_ranks), timeout_s)

    def shared(self, name: str, job: Job, make: Callable[[], Any]) -> Any:
        """One for all jobs with the same ranks and options."""
        key = f"{name} {job['num_ranks']} {json.dumps(job['options'], sort_keys=True)}"
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def attention(self, job: Job) -> tuple[DeviceAttention, IpcTransport]:
        """The executor of all time jobs with the same ranks and options, and its transport."""

        def make() -> tuple[DeviceAttention, IpcTransport]:
            timeout_s = self.config["timeout_s"]
            transport = self.transport(job["num_ranks"], timeout_s)
            assert transport is not None
            return DeviceAttention(self.device, transport, timeout_s=timeout_s, **job["options"]), transport

        return self.shared("moving", job, make)

    def step(self, job: Job, attention: DeviceAttention) -> tuple[gpu_cp.RankStep, torch.Tensor]:
        heads = Heads(**job["heads"])
        work = load_work(self.folder / f"{job['work']}_rank{self.rank}.npz")
        rows = torch.from_numpy(np.load(self.folder / f"{job['work']}_rank{self.rank}_rows.npy")).cuda()
        local = self.inputs(job, heads).rows(rows)
        return gpu_cp.RankStep(attention, attention.prepare(work, heads), heads, local), rows

    def inputs(self, job: Job, heads: Heads) -> gpu_cp.Inputs:
        key = json.dumps([job["heads"], job["s"]])
        if key not in self.full:
            self.full[key] = gpu_cp.Inputs.random(heads, job["s"], seed=0)
        return self.full[key]

    def reference(self, job: Job) -> dict[str, torch.Tensor]:
        key = json.dumps([job["heads"], job["s"], job["mask"]])
        if key not in self.wanted:
            bounds = np.load(self.folder / f"{job['mask']}.npy")
            heads = Heads(**job["heads"])
            mask = gpu_cp.mask_of(bounds, job["causal"])
            self.wanted[key] = gpu_cp.one_device(self.library, self.inputs(job, heads), mask)
        return self.wanted[key]

    # --- jobs ------------------------------------------------------------------------------------

    def check(self, job: Job) -> Job:
        num_ranks = job["num_ranks"]
        transport = self.transport(num_ranks, self.config["timeout_s"])
        attention = DeviceAttention(self.device, transport, timeout_s=self.config["timeout_s"], **job["options"])
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step, rows = self.step(job, attention)
            wanted = self.reference(job)
            begin_s, all_equal, first = time.perf_counter(), True, None
            for _ in range(job.get("repeats", 2)):
                step.forward()
                step.backward()
                stream.synchronize()
                results = {name: x.clone() for name, x in step.results().items()}
                first = first or results
                # dq, dk and dv of the free-order backward differ in the last bits from run to run.
                all_equal = all_equal and all(torch.equal(first[name], results[name]) for name in ("out", "lse"))
            seconds = time.perf_counter() - begin_s
            if transport is not None:
                transport.check()
            errors = gpu_cp.relative_errors(step.results(), wanted, rows)
        work = load_work(self.folder / f"{job['work']}_rank{self.rank}.npz")
        repeats = job.get("repeats", 2)
        planned = [x * repeats for x in gpu_cp.planned_bytes(work, Heads(**job["heads"]))]
        received = 0 if transport is None else sum(transport.received_bytes)
        if transport is not None:
            self.exchange(num_ranks)({"done": True})
            transport.close()
        return {"errors": errors, "repeats_equal": all_equal, "planned_bytes": sum(planned), "received_bytes": received,
                "seconds": round(seconds, 3)}  # fmt: skip

    def stall(self, job: Job) -> Job:
        return self._failure(job, is_killed=False)

    def kill(self, job: Job) -> Job:
        return self._failure(job, is_killed=True)

    def _failure(self, job: Job, is_killed: bool) -> Job:
        transport = self.transport(job["num_ranks"], job["timeout_s"])
        attention = DeviceAttention(self.device, transport, timeout_s=job["timeout_s"], **job["options"])
        stream = torch.cuda.Stream()
        begin_s = time.perf_counter()
        with torch.cuda.stream(stream):
            step, _ = self.step(job, attention)
            calls = (step.forward, step.backward) if job.get("has_backward", True) else (step.forward,)
            for call in calls:
                call()
            stream.synchronize()
            begin_s = time.perf_counter()
            if self.rank == job["victim"]:
                if is_killed:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(job["timeout_s"] + 3)
            try:
                for _ in range(3):  # the third one's rows go where those of the first are
                    for call in calls:
                        call()
                stream.synchronize()
                assert transport is not None
                deadline_s = time.perf_counter() + 1.0  # the watch looks every few milliseconds
                while time.perf_counter() < deadline_s:
                    transport.check()
                    time.sleep(0.02)
                message = None
            except TransportError as error:
                message = str(error)
        stream.synchronize()  # the GPU is not hung
        return {"message": message, "seconds": round(time.perf_counter() - begin_s, 3)}

    def run(self, jobs: list[Job]) -> list[Job]:
        if jobs[0]["kind"] != "time":
            return [getattr(self, job["kind"])(job) for job in jobs]
        from paddle_fm3.testing import gpu_cp_steps

        return gpu_cp_steps.run(self, jobs)


def main(config_path: str, rank_text: str) -> int:
    config, rank = json.loads(Path(config_path).read_text()), int(rank_text)
    process = RankProcess(config, rank)
    status = 0
    with (Path(config["out"]) / f"rank{rank}.jsonl").open("a") as out:
        own = [job for job in config["jobs"] if rank < job["num_ranks"]]
        for _, group in itertools.groupby(enumerate(own), lambda item: item[1].get("case", item[0])):
            jobs = [job for _, job in group]
            lines = [{"job": job["name"], "kind": job["kind"], "rank": rank} for job in jobs]
            try:
                lines = [line | result for line, result in zip(lines, process.run(jobs), strict=True)]
            except Exception:  # noqa: BLE001  written down; the ranks are out of step after it
                lines = [line | {"error": traceback.format_exc()[-3000:]} for line in lines]
                status = 1
            out.writelines(json.dumps(line) + "\n" for line in lines)
            out.flush()
            if status:
                break
    os._exit(status)  # frees nothing in order: after a failure nothing may wait for the device


if __name__ == "__main__":
    main(*sys.argv[1:])
