# SPDX-License-Identifier: Apache-2.0
"""The shipped training configs: one JSON file a scenario, read into checked values. Imports no framework.

A file has the sections of `Scenario`; a key that no section knows is an error that names it and its neighbours.
`load_scenario(name)` finds a shipped file, or takes a path.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paddle_fm3.integration.paddlenlp.layout import Layout, check_choice
from paddle_fm3.integration.paddlenlp.masks import KINDS, LayerMasks
from paddle_fm3.integration.paddlenlp.model_size import MemoryEstimate, ModelShape, estimate_memory
from paddle_fm3.integration.paddlenlp.settings import (
    DEFAULT_CP_STRATEGY,
    DEFAULT_PLANS_AHEAD,
    FlashMask3Settings,
)

CONFIG_DIR = Path(__file__).parent / "configs"
CHUNK_TOKENS = 2048  # what the planner balances (the paper's chunk)
TILE_TOKENS = 128
GROUPED_MASKS = ("share_question", "prefix_lm_document")  # a document is a list of parts


@dataclass(frozen=True)
class Data:
    """The sequences.

    Attributes:
        max_seq_len: tokens of a packed sequence.
        mask: which documents see what: a kind of `LayerMasks`.
        documents: lengths of one representative packed sequence that `plan` uses when no other data is given: a list of
            lengths (for share_question of [question, answer, ...], for prefix_lm_document of [prefix, rest]), or
            "paper_128k_2": a published sample.
        mask_window, mask_layers: layers with a sliding window, as the Trainer's flags of that name.
    """

    max_seq_len: int
    mask: str
    documents: Any
    mask_window: int = 0
    mask_layers: str = ""

    def __post_init__(self) -> None:
        check_choice("Data", "mask", self.mask, KINDS)
        LayerMasks.from_flags(self.mask, self.mask_window, self.mask_layers)
        lengths = self.document_lengths()
        total = sum(sum(x) if isinstance(x, list) else x for x in lengths)
        if total != self.max_seq_len:
            raise ValueError(f"Data: documents hold {total} tokens; max_seq_len={self.max_seq_len}")
        if (self.mask in GROUPED_MASKS) != isinstance(lengths[0], list):
            raise ValueError(
                f"Data: mask {self.mask!r} with documents like {lengths[0]!r}; share_question takes [question, "
                "answer, ...], prefix_lm_document [prefix, rest], the others lengths"
            )

    def document_lengths(self) -> list[Any]:
        if not isinstance(self.documents, str):
            return list(self.documents)
        from paddle_fm3.testing.cases import paper_documents

        prefix, _, rest = self.documents.partition("_")
        length, _, sample = rest.partition("_")
        if prefix != "paper" or not sample.isdecimal():
            raise ValueError(f"Data: documents={self.documents!r}; expected a list or paper_<8k|32k|128k>_<0|1|2>")
        return paper_documents(length, int(sample))[0]


@dataclass(frozen=True)
class Attention:
    """The flags of this package, as `FlashMask3TrainingArguments` takes them. --cp_nodes follows from the layout."""

    use_flashmask3: bool = True
    cp_strategy: str = DEFAULT_CP_STRATEGY
    cp_timeout_s: float = 60.0
    cp_reduce_dtype: str = "float32"
    cp_plans_ahead: int = DEFAULT_PLANS_AHEAD

    def __post_init__(self) -> None:
        FlashMask3Settings(self.cp_strategy, self.cp_timeout_s, self.cp_reduce_dtype, plans_ahead=self.cp_plans_ahead)


@dataclass(frozen=True)
class Training:
    """Fields of PaddleNLP's TrainingArguments, under its names. Degrees stand in `Layout`.

    NOTE: without report_to PaddleNLP insists on VisualDL, which it does not install.
    """

    device: str = "gpu"
    per_device_train_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-5
    lr_scheduler_type: str = "cosine"
    warmup_steps: int = 0
    max_steps: int = -1
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    max_grad_norm: float = 1.0
    bf16: bool = False
    fp16_opt_level: str = "O1"
    amp_master_grad: bool = False
    recompute: bool = False
    recompute_granularity: str = "full"
    logging_steps: int = 1
    save_steps: int = 500
    report_to: str = "none"
    seed: int = 42

    def __post_init__(self) -> None:
        check_choice("Training", "recompute_granularity", self.recompute_granularity, ("full",))


# Fields of the section "training" that PaddleNLP keeps in its model config and not in TrainingArguments.
MODEL_CONFIG_FIELDS = ("recompute_granularity",)


@dataclass(frozen=True)
class Scenario:
    """One shipped config.

    Attributes:
        what: one sentence.
        why: section.key or topic -> reason; every layout degree above 1 has one.
        claims: what the name promises, checked against the count: total_billions, active_billions (may be empty).
        has_reference_model: DPO with a frozen copy of the weights on the GPU.
    """

    what: str
    why: dict[str, str]
    claims: dict[str, float]
    model: ModelShape
    layout: Layout
    data: Data
    attention: Attention
    training: Training
    has_reference_model: bool = False

    def __post_init__(self) -> None:
        layout, model, cp = self.layout, self.model, self.layout.context_parallel_degree
        s = self.data.max_seq_len
        if s % cp:
            raise ValueError(f"Scenario: max_seq_len={s} must be a multiple of context_parallel_degree={cp}")
        if cp > 1 and self.s_local % (2 * TILE_TOKENS):
            raise ValueError(
                f"Scenario: s_local={self.s_local} must be a multiple of {2 * TILE_TOKENS}, two chunks of whole "
                f"{TILE_TOKENS}-tiles"
            )
        if cp > 1 and self.s_local >= CHUNK_TOKENS and self.s_local % CHUNK_TOKENS:
            raise ValueError(
                f"Scenario: s_local={self.s_local} must be a multiple of the planner's {CHUNK_TOKENS}-token chunk"
            )
        for name, size in (
            ("num_attention_heads", model.num_attention_heads),
            ("num_key_value_heads", model.num_key_value_heads),
            ("hidden_size", model.hidden_size),
        ):
            if size % layout.tensor_parallel_degree:
                raise ValueError(
                    f"Scenario: tensor_parallel_degree={layout.tensor_parallel_degree} must divide {name}={size}"
                )
        if model.num_experts % layout.expert_parallel_degree:
            raise ValueError(
                f"Scenario: expert_parallel_degree={layout.expert_parallel_degree} must divide "
                f"num_experts={model.num_experts}"
            )
        if model.num_hidden_layers % layout.pipeline_parallel_degree:
            raise ValueError(
                f"Scenario: pipeline_parallel_degree={layout.pipeline_parallel_degree} must divide "
                f"num_hidden_layers={model.num_hidden_layers}"
            )
        if model.max_position_embeddings < s:
            raise ValueError(f"Scenario: max_position_embeddings={model.max_position_embeddings} < max_seq_len={s}")
        _unknown("claims", self.claims, ("total_billions", "active_billions"))

    @property
    def s_local(self) -> int:
        """Tokens a rank holds."""
        return self.data.max_seq_len // self.layout.context_parallel_degree

    @property
    def tokens_per_step(self) -> int:
        training = self.training
        sequences = (
            self.layout.num_replicas * training.per_device_train_batch_size * training.gradient_accumulation_steps
        )
        return sequences * self.data.max_seq_len

    def memory(self) -> MemoryEstimate:
        """Bytes on one GPU, estimated; see `model_size.FORMULAS`."""
        layout = self.layout
        expert_sharding = layout.sharding_parallel_degree
        if layout.topology == "expert":
            expert_sharding = layout.moe_sharding_degree
        elif layout.expert_parallel_degree > 1:
            expert_sharding = 1  # split experts keep their states with them
        return estimate_memory(
            self.model,
            b=self.training.per_device_train_batch_size,
            s=self.data.max_seq_len,
            cp=layout.context_parallel_degree,
            tp=layout.tensor_parallel_degree,
            pp=layout.pipeline_parallel_degree,
            ep=layout.expert_parallel_degree,
            sharding=layout.sharding_parallel_degree,
            sharding_stage=layout.sharding_stage,
            expert_sharding=expert_sharding,
            is_bfloat16=self.training.bf16,
            has_f32_gradients=self.training.amp_master_grad,
            has_reference_model=self.has_reference_model,
            is_recomputed=self.training.recompute,
        )

    def model_config(self) -> dict[str, Any]:
        """Keyword arguments of PaddleNLP's Qwen2MoeConfig."""
        shape = {name: value for name, value in vars(self.model).items()}
        return {
            **shape,
            "intermediate_size": self.model.shared_expert_intermediate_size,
            "seq_length": self.data.max_seq_len,
            "use_flash_attention": True,
            "recompute": self.training.recompute,
            "recompute_granularity": self.training.recompute_granularity,
        }

    def trainer_arguments(self) -> dict[str, Any]:
        """Flat fields for PaddleNLP's argument parser with `FlashMask3TrainingArguments`.

        Raises:
            ValueError: topology "expert": TrainingArguments of PaddleNLP 3.0.0b4 cannot express it; call
                `fleet.init` with `layout.fleet_hybrid_configs()`.
        """
        layout = self.layout
        if layout.topology == "expert":
            raise ValueError(
                "Scenario.trainer_arguments: topology 'expert' is not one of PaddleNLP 3.0.0b4's TrainingArguments "
                "(they set no "
                "ep_degree); initialise fleet with layout.fleet_hybrid_configs() and pass training_fields()"
            )
        degrees = {}
        if layout.num_gpus > 1:
            degrees = {
                "context_parallel_degree": layout.context_parallel_degree,
                "tensor_parallel_degree": layout.tensor_parallel_degree,
                "pipeline_parallel_degree": layout.pipeline_parallel_degree,
                "sharding_parallel_degree": layout.sharding_parallel_degree,
                "sharding": f"stage{layout.sharding_stage}" if layout.sharding_stage else "",
                "moe_expert_parallel": layout.expert_parallel_degree,
            }
        return {**self.training_fields(), **degrees}

    def training_fields(self) -> dict[str, Any]:
        """The part of `trainer_arguments` that is not the parallel layout."""
        training = {name: value for name, value in vars(self.training).items() if name not in MODEL_CONFIG_FIELDS}
        data = self.data
        masks = {"mask_kind": data.mask, "mask_window": data.mask_window, "mask_layers": data.mask_layers}
        return {**training, **vars(self.attention), "cp_nodes": str(self.layout.context_ranks_per_node), **masks}


def scenario_names() -> list[str]:
    """Names of the shipped configs."""
    return sorted(path.stem for path in CONFIG_DIR.glob("*.json"))


def load_scenario(name_or_path: str | Path) -> Scenario:
    """Reads a shipped config by name, or any file by path.

    Raises:
        FileNotFoundError: neither; the message lists the shipped names.
        ValueError: an unknown, missing or illegal key; the message names the file and the key.
    """
    path = CONFIG_DIR / f"{name_or_path}.json"
    if not path.is_file():
        path = Path(name_or_path)
    if not path.is_file():
        raise FileNotFoundError(
            f"load_scenario: no config {str(name_or_path)!r}; shipped: {', '.join(scenario_names())}"
        )
    try:
        return scenario_from_dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error


def scenario_from_dict(content: dict[str, Any]) -> Scenario:
    """A scenario from parsed JSON; every section's keys are checked against its dataclass."""
    sections = {"model": ModelShape, "layout": Layout, "data": Data, "attention": Attention, "training": Training}
    fields = dict(_checked_keys(Scenario, "config", content))
    for section, kind in sections.items():
        if section in fields:
            fields[section] = kind(**_checked_keys(kind, section, fields[section]))
    return Scenario(**fields)


_Kind = TypeVar("_Kind")


def _checked_keys(kind: type[_Kind], section: str, content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"{section} is {type(content).__name__}; expected an object")
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    _unknown(section, content, tuple(field.name for field in fields))
    required = [
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    missing = [name for name in required if name not in content]
    if missing:
        raise ValueError(f"{section} lacks {', '.join(missing)}")
    return content


def _unknown(section: str, content: dict[str, Any], known: tuple[str, ...]) -> None:
    for key in content:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{section} has the unknown key {key!r}{hint} (known: {', '.join(known)})")
