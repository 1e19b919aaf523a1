# SPDX-License-Identifier: Apache-2.0
"""Checkpoints under context parallelism, and of models with split experts.

Upstream lets every rank of a context-parallel group write the optimizer's states to one and the same path at the same
time; here the first does. The Trainer writes what its first rank holds. Beside that, every rank that is not a copy of
another writes its experts and their optimizer states to ``experts_<place>_of_<ranks>.pdparams``, under the model's
names for them, so that they can be read back by any number of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paddle
from paddlenlp.trainer.trainer import Trainer

from paddle_fm3.distributed import groups
from paddle_fm3.integration.paddlenlp.expert_training import is_split
from paddle_fm3.integration.paddlenlp.experts import expert_groups
from paddle_fm3.integration.paddlenlp.settings import FlashMask3Settings, RunState

PATTERN = "experts_*_of_*.pdparams"
MASTER_WEIGHTS = "master_weights"


def replacements(settings: FlashMask3Settings, state: RunState) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """What `enable` replaces for checkpoints: owner, attribute, original -> replacement."""
    return [
        (Trainer, "_save_checkpoint", _by_one_rank_a_sequence),
        (Trainer, "save_model", lambda original: _saving_experts(original, settings)),
        (Trainer, "_load_from_checkpoint", _loading_experts),
        (Trainer, "_load_optimizer_and_scheduler", _loading_expert_states),
    ]


def read_experts(folder: str | Path) -> dict[str, paddle.Tensor]:
    """All experts of a checkpoint by the model's names: what is missing in the Trainer's own model file.

    Raises:
        FileNotFoundError: the folder has no or not all files of split experts.
    """
    files = _files(Path(folder))
    if not files:
        raise FileNotFoundError(f"read_experts: {folder} has no {PATTERN}")
    return {name: value for content in _contents(files) for name, value in content["weights"].items()}


def _files(folder: Path) -> list[Path]:
    files = sorted(folder.glob(PATTERN))
    if files:
        expected = int(files[0].stem.split("_of_")[1])
        if len(files) != expected or {path.stem.split("_of_")[1] for path in files} != {f"{expected:03d}"}:
            raise FileNotFoundError(
                f"paddle_fm3: {folder} has {len(files)} of {expected} files of split experts: "
                f"{', '.join(path.name for path in files)}. Every rank must see all of them"
            )
    return files


def _contents(files: list[Path]) -> Iterator[dict[str, Any]]:
    for path in files:
        yield paddle.load(str(path))


def _by_one_rank_a_sequence(original: Callable) -> Callable:
    @functools.wraps(original)
    def _save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> None:
        if groups.group_rank(groups.resolve_group()) == 0:
            original(self, *args, **kwargs)
            return
        write, self._save_ckpt_func = self._save_ckpt_func, lambda *args, **kwargs: None
        try:
            original(self, *args, **kwargs)
        finally:
            self._save_ckpt_func = write

    return _save_checkpoint


def _saving_experts(original: Callable, settings: FlashMask3Settings) -> Callable:
    @functools.wraps(original)
    def save_model(self: Any, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        own = {name: parameter for name, parameter in self.model.named_parameters() if is_split(parameter)}
        if own and self.args.unified_checkpoint:
            raise ValueError("paddle_fm3: moe_expert_parallel with unified_checkpoint is not served; turn it off")
        original(self, output_dir, *args, **kwargs)
        found = expert_groups(settings.expert_parallel) if own else None
        if found is None or (found.copies is not None and found.copies.rank > 0):
            return
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"experts_{found.split.rank:03d}_of_{found.split.nranks:03d}.pdparams"
        paddle.save(_content(own, None if self.optimizer is None else self.optimizer.state_dict()), str(path))

    return save_model


def _content(own: dict[str, paddle.Tensor], states: dict[str, Any] | None) -> dict[str, Any]:
    """Weights, and optimizer states by [the model's name][what the optimizer appends to the parameter's own name]."""
    states = dict(states or {})
    masters = states.pop(MASTER_WEIGHTS, {})
    return {
        "weights": own,
        "states": {
            name: {key[len(p.name) :]: value for key, value in states.items() if key.startswith(p.name + "_")}
            for name, p in own.items()
        },
        MASTER_WEIGHTS: {name: masters[p.name] for name, p in own.items() if p.name in masters},
    }


def _loading_experts(original: Callable) -> Callable:
    @functools.wraps(original)
    def _load_from_checkpoint(self: Any, resume_from_checkpoint: Any = None) -> None:
        original(self, resume_from_checkpoint)
        named = dict(self.model.named_parameters())
        for content in _contents(_files(Path(resume_from_checkpoint)) if resume_from_checkpoint else []):
            for name, value in content["weights"].items():
                if name in named:
                    named[name].set_value(value)

    return _load_from_checkpoint


def _loading_expert_states(original: Callable) -> Callable:
    """The optimizer's states with this rank's experts in the place of the first rank's, which go by the same names."""

    @functools.wraps(original)
    def _load_optimizer_and_scheduler(self: Any, checkpoint: Any) -> None:
        files = _files(Path(checkpoint)) if checkpoint else []
        is_needed = checkpoint and not self.args.ignore_load_lr_and_optim
        if is_needed and not files and any(is_split(parameter) for parameter in self.model.parameters()):
            raise ValueError(
                f"paddle_fm3: {checkpoint} was saved without split experts; their optimizer states go by other names "
                "there. Resume with moe_expert_parallel=1, or with --ignore_load_lr_and_optim"
            )
        if not files:
            original(self, checkpoint)
            return
        optimizer = self.optimizer
        set_state_dict = optimizer.set_state_dict

        def with_own_experts(states: dict[str, Any]) -> None:
            for content in _contents(files):
                for name, parameter in self.model.named_parameters():
                    for suffix, value in content["states"].get(name, {}).items():
                        states[parameter.name + suffix] = value
                    if name in content[MASTER_WEIGHTS]:
                        states[MASTER_WEIGHTS][parameter.name] = content[MASTER_WEIGHTS][name]
            set_state_dict(states)

        optimizer.set_state_dict = with_own_experts
        try:
            original(self, checkpoint)
        finally:
            del optimizer.set_state_dict

    return _load_optimizer_and_scheduler
