# SPDX-License-Identifier: Apache-2.0
"""PaddleNLP's mixture of experts with tokens sent by index, and with its experts split over ranks.

Upstream sends tokens through dense [tokens, experts, capacity] tables, and splits experts over fleet's data-parallel
ranks only. Here each expert gets its own tokens; experts may be split over any consecutive ranks, those of a
context-parallel group and of several replicas among them, or over fleet's expert-parallel group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from numpy.typing import NDArray
from paddle import nn
from paddle.autograd import PyLayer
from paddlenlp.transformers.moe_gate import PretrainedMoEGate
from paddlenlp.transformers.moe_layer import MoELayer
from paddlenlp.transformers.qwen2_moe.modeling import Qwen2MoePretrainedModel

from paddle_fm3 import _paddle
from paddle_fm3.distributed import groups
from paddle_fm3.distributed.comm import Communicator
from paddle_fm3.integration.paddlenlp.settings import FlashMask3Settings, RunState

Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ExpertGroups:
    """Where experts are.

    Attributes:
        split: the ranks that hold one expert each share of a layer; tokens travel inside it.
        copies: the ranks that hold the same experts as this one; gradients are summed over it. None: no other.
    """

    split: Any
    copies: Any | None


def replacements(settings: FlashMask3Settings, state: RunState) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """What `enable` replaces for experts: owner, attribute, original -> replacement."""
    if settings.moe_dispatch == "dense":
        return []
    return [
        (MoELayer, "__init__", lambda original: _init_with_own_experts(original, settings)),
        (MoELayer, "forward", lambda original: _by_index(settings)),
        (PretrainedMoEGate, "_priority", _choice_without_places),
        (Qwen2MoePretrainedModel, "_init_weights", _init_as_if_whole),
    ]


# --- groups --------------------------------------------------------------------------------------

_groups: dict[int, ExpertGroups] = {}  # by expert_parallel_degree


def expert_groups(degree: int) -> ExpertGroups | None:
    """The groups for experts split over `degree` ranks; None where nothing is split. Collective when first called.

    If fleet was initialised with expert parallelism of its own (``ep_degree`` > 1), its groups; else `degree`
    consecutive ranks share the experts, and ranks `degree` apart hold copies.

    Raises:
        ValueError: the degree is not fleet's, does not divide the ranks, or the layout is one that is not served.
    """
    topology = groups.fleet_topology()
    own = getattr(topology, "get_expert_parallel_group", None)
    if own is not None and own().nranks > 1:
        if degree not in (1, own().nranks):
            raise ValueError(
                f"paddle_fm3: expert_parallel={degree}, but fleet was initialised with ep_degree={own().nranks}"
            )
        copies = topology.get_moe_sharding_parallel_group()
        return ExpertGroups(own(), copies if copies.nranks > 1 else None)
    if degree == 1:
        return None
    if degree not in _groups:
        _groups[degree] = _new_groups(degree, topology)
    return _groups[degree]


def _new_groups(degree: int, topology: Any) -> ExpertGroups:
    num_ranks = dist.get_world_size()
    if num_ranks % degree:
        raise ValueError(f"paddle_fm3: expert_parallel={degree} must divide the number of ranks, {num_ranks}")
    if topology is not None:
        for name, size in (
            ("tensor_parallel_degree", topology.get_model_parallel_world_size()),
            ("pipeline_parallel_degree", topology.get_pipe_parallel_world_size()),
        ):
            if size > 1:
                raise ValueError(
                    f"paddle_fm3: expert_parallel={degree} with {name}={size} is not served: ranks next to one "
                    "another would hold different parts of an expert or of the model"
                )
    rank = dist.get_rank()
    split, copies = None, None
    # Every rank makes every group, in the same order.
    for begin in range(0, num_ranks, degree):
        group = dist.new_group(list(range(begin, begin + degree)))
        split = group if begin <= rank < begin + degree else split
    if num_ranks > degree:
        for place in range(degree):
            group = dist.new_group(list(range(place, num_ranks, degree)))
            copies = group if rank % degree == place else copies
    return ExpertGroups(split, copies)


# --- the layer -----------------------------------------------------------------------------------


class RemoteExpert(nn.Layer):
    """Stands where an expert of another rank would be."""

    def __init__(self, shapes: list[list[int]]) -> None:
        super().__init__()
        self.shapes = shapes


def _init_with_own_experts(original: Callable, settings: FlashMask3Settings) -> Callable:
    @functools.wraps(original)
    def __init__(
        self: Any, config: Any, moe_num_experts: int, expert_class: Any, expert_kwargs: dict[str, Any], gate: Any,
        capacity: int = 1.0, moe_group: str = "data", all_to_all_dropout: float = 0.0,
    ) -> None:  # fmt: skip
        found = expert_groups(settings.expert_parallel)
        num_ranks = groups.group_size(None if found is None else found.split)
        if moe_num_experts % num_ranks:
            raise ValueError(
                f"paddle_fm3: expert_parallel={num_ranks} must divide num_experts={moe_num_experts} of the model"
            )
        first = 0 if found is None else found.split.rank * (moe_num_experts // num_ranks)
        own = range(first, first + moe_num_experts // num_ranks)
        built = iter(range(moe_num_experts))

        def own_or_remote(**kwargs: Any) -> nn.Layer:
            # Built in any case: the random numbers that follow are then those of a model with all experts.
            expert = expert_class(**kwargs)
            return expert if next(built) in own else RemoteExpert([p.shape for p in expert.parameters()])

        # "dummy": upstream then makes every expert, and no group of its own.
        original(
            self, config, moe_num_experts, own_or_remote, expert_kwargs, gate, capacity, "dummy", all_to_all_dropout
        )
        self.fm3_groups, self.fm3_own = found, own
        if found is not None:
            for expert_idx in own:
                for parameter in self.experts[expert_idx].parameters():
                    # What fleet and the Trainer look at: this parameter is not the same on every rank.
                    parameter.expert = parameter.no_sync = True

    return __init__


def _init_as_if_whole(original: Callable) -> Callable:
    """Initialisation that draws and drops the weights of remote experts, so that the others are as without a split."""

    @functools.wraps(original)
    def _init_weights(self: Any, layer: nn.Layer) -> None:
        if isinstance(layer, RemoteExpert):
            for shape in layer.shapes:
                paddle.tensor.normal(mean=0.0, std=1.0, shape=shape)
            return
        original(self, layer)

    return _init_weights


def _choice_without_places(original: Callable) -> Callable:
    """The gate's table of who goes where, [tokens, experts, 1] instead of [tokens, experts, capacity].

    Where nothing is dropped (the capacity is that of the fullest expert) a token's place in its expert's buffer
    carries no information.
    """

    @functools.wraps(original)
    def _priority(self: Any, topk_idx: paddle.Tensor, capacity: int) -> paddle.Tensor:
        if self.drop_tokens:
            return original(self, topk_idx, capacity)
        return F.one_hot(topk_idx, self.num_experts).sum(axis=1).unsqueeze(-1)

    return _priority


def _by_index(settings: FlashMask3Settings) -> Callable:
    def forward(self: Any, hidden_state: paddle.Tensor, used_token: None = None) -> tuple[paddle.Tensor, ...]:
        tokens = hidden_state.reshape([-1, hidden_state.shape[-1]])  # [t, d]
        _, combine_weights, _, _, l_aux, l_zloss = self.gate(hidden_state)
        weights = combine_weights.sum(axis=-1)  # [t, experts], 0 where not chosen
        num_tokens, num_experts = weights.shape
        # One more token, of zeros, that every expert gets with weight 0: so every expert has a row and every
        # parameter a gradient on every rank, and no message is empty.
        tokens = paddle.concat([tokens, paddle.zeros_like(tokens[:1])])  # [t + 1, d]
        weights = paddle.concat([weights, paddle.zeros_like(weights[:1])])  # [t + 1, experts]
        is_chosen = weights.detach() != 0
        is_chosen[num_tokens] = True
        pairs = paddle.nonzero(is_chosen.t())  # [n, 2]: expert, token; by expert
        expert_idx, token_idx = pairs[:, 0], pairs[:, 1]
        rows = paddle.gather(tokens, token_idx)  # [n, d]
        counts = is_chosen.astype("int64").sum(axis=0)  # [experts]
        if self.fm3_groups is None:
            out_rows = _run(self.experts, range(num_experts), counts.tolist(), rows)
        else:
            communicator = Communicator(self.fm3_groups.split, settings.cp_timeout_s)
            out_rows = _run_split(self.experts, self.fm3_own, counts, rows, communicator)
        pair_weights = paddle.gather_nd(weights, paddle.stack([token_idx, expert_idx], axis=1))  # [n]
        weighted = (out_rows * pair_weights.astype(out_rows.dtype).unsqueeze(-1)).astype("float32")
        out = paddle.zeros([num_tokens + 1, rows.shape[1]], "float32")
        out = paddle.scatter_nd_add(out, token_idx.unsqueeze(-1), weighted)[:num_tokens]  # [t, d]
        return out.astype(hidden_state.dtype).reshape(hidden_state.shape), l_aux, l_zloss

    return forward


def _run(experts: Any, which: range, counts: list[int], rows: paddle.Tensor) -> paddle.Tensor:
    """Each expert on its rows; `rows` [n, d] hold counts[i] rows of the i-th expert of `which`, one after another."""
    parts = paddle.split(rows, counts)
    return paddle.concat([experts[idx](part) for idx, part in zip(which, parts, strict=True)])


def _run_split(
    experts: Any, own: range, counts: paddle.Tensor, rows: paddle.Tensor, communicator: Communicator
) -> paddle.Tensor:
    """As `_run` over all ranks' experts: rows go to the ranks that hold their experts, results come back."""
    gathered = communicator.post_all_gather(counts, "tokens an expert").wait()
    by_expert: Counts = np.stack([x.numpy() for x in gathered])  # [ranks, experts]
    by_rank = by_expert.reshape(len(gathered), len(gathered), -1).sum(axis=2)  # [from, to]
    came = _Exchange.apply(rows, communicator, by_rank, "tokens to experts")
    # They come by sender, then expert; experts want them by expert, then sender.
    mine = by_expert[:, own.start : own.stop]  # [ranks, own experts]
    label = np.repeat(np.tile(np.arange(len(own)), len(gathered)), mine.reshape(-1))  # [rows that came]: its expert
    order = np.argsort(label, kind="stable")
    done = _run(experts, own, mine.sum(axis=0).tolist(), paddle.gather(came, paddle.to_tensor(order)))
    back = paddle.gather(done, paddle.to_tensor(np.argsort(order)))
    return _Exchange.apply(back, communicator, by_rank.T.copy(), "tokens from experts")


@_paddle.backward_once
class _Exchange(PyLayer):
    """Rows to other ranks; their gradients the way back."""

    @staticmethod
    def forward(ctx: Any, rows: paddle.Tensor, communicator: Communicator, counts: Counts, what: str) -> paddle.Tensor:
        ctx.communicator, ctx.counts, ctx.what = communicator, counts, what
        return communicator.post_all_to_all(rows, counts, what).wait()

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor) -> paddle.Tensor:
        return ctx.communicator.post_all_to_all(grad, ctx.counts.T.copy(), f"gradients of {ctx.what}").wait()
