"""The `transformers` reference: a folder's model, loaded whole or one block at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from alibi_lm.hf.specs.base import ImportSpec
from alibi_lm.hf.weights_reader import WeightsReader
from alibi_lm.utils.errors import CheckpointError, Problem


class Mismatch(Exception):
    """A difference between two models or tokenizers, and what the user can do."""

    def __init__(self, rule: str, fix: str = "nothing was written; report this") -> None:
        super().__init__(rule)
        self.rule, self.fix = rule, fix


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and advice of `transformers`."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def transformers_class(name: str) -> Any:
    """The class of `transformers` of this name."""
    from transformers.models.bloom.modeling_bloom import BloomForCausalLM
    from transformers.models.mpt.modeling_mpt import MptForCausalLM

    return {"BloomForCausalLM": BloomForCausalLM, "MptForCausalLM": MptForCausalLM}[name]


def reference_config(folder: Path, raw: dict[str, Any], import_spec: ImportSpec) -> Any:
    """A config.json as an instance of the class's config, with its defaults.

    Raises:
        CheckpointError: the class cannot read it.
    """
    kind = transformers_class(import_spec.export_spec.class_name).config_class
    try:
        return kind.from_dict(raw)
    except Exception as error:  # the class raises errors of several kinds on what it cannot read
        detail = " ".join(str(error).split())[:160]
        rule = f"{kind.__name__} cannot read it ({detail})"
        key = f"{folder}/config.json"
        raise CheckpointError(Problem(key, None, rule, "restore the folder")) from None


def load_model(folder: Path, class_name: str) -> Any:
    """The folder's model in fp32, loaded by `AutoModelForCausalLM` without remote code.

    Raises:
        Mismatch: it cannot be loaded, has another class, or a tensor is missing or left over.
    """
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except Exception as error:  # the class raises errors of many kinds on a config's other keys
        detail = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise Mismatch(f"transformers cannot load it ({detail})", "repair the folder") from None
    errors = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if errors or type(model).__name__ != class_name:
        raise Mismatch(f"{type(model).__name__} loads it with {errors or 'no errors'}")
    return model.eval()


class ReferenceBlocks:
    """A reference model with one block, or a part of the embedding, in memory.

    The `transformers` class itself computes: it is built with a single block, which gets the
    weights of each block in turn.
    """

    def __init__(
        self, config: Any, import_spec: ImportSpec, source: WeightsReader, dtype: torch.dtype
    ) -> None:
        """Build the class on the meta device.

        Args:
            config: its config.
            import_spec: the names of its modules.
            source: the folder's weights.
            dtype: dtype to compute in.
        """
        self.import_spec, self.source, self.dtype = import_spec, source, dtype
        self.tied = bool(config.tie_word_embeddings)
        one = copy.deepcopy(config)
        setattr(one, import_spec.num_blocks, 1)
        kind = transformers_class(import_spec.export_spec.class_name)
        with torch.device("meta"):
            self.model = kind._from_config(one, attn_implementation="eager").eval()
        self.base = self.model.base_model
        self.norm = getattr(self.base, import_spec.norm)
        if import_spec.embedding_norm is not None:
            self.embedding_norm = getattr(self.base, import_spec.embedding_norm)

    def _fill(self, module: nn.Module, name: str) -> None:
        module.to("meta")  # free the old weights first
        state = {
            key: self.source.tensor(f"{name}.{key}").to(self.dtype) for key in module.state_dict()
        }
        module.load_state_dict(state, assign=True)

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the embedding, before its norm."""
        name = self.import_spec.prefix + self.import_spec.embedding
        return self.source.rows(f"{name}.weight", start, stop).to(self.dtype)

    def place(self, index: int, last: int) -> None:
        """Load block `index`; the first also gets the embedding norm, the last the final norm."""
        import_spec = self.import_spec
        blocks = getattr(self.base, import_spec.blocks)
        self._fill(blocks[0], f"{import_spec.prefix}{import_spec.blocks}.{index}")
        if import_spec.embedding_norm is not None:
            if index == 0:
                self._fill(self.embedding_norm, import_spec.prefix + import_spec.embedding_norm)
            norm = self.embedding_norm if index == 0 else nn.Identity()
            setattr(self.base, import_spec.embedding_norm, norm)
        if index == last:
            self._fill(self.norm, import_spec.prefix + import_spec.norm)
        setattr(self.base, import_spec.norm, self.norm if index == last else nn.Identity())

    def remove(self) -> None:
        """Free the block."""
        getattr(self.base, self.import_spec.blocks)[0].to("meta")

    def block(self, hidden: Tensor, step_tokens: int) -> Tensor:
        """[1, T, d] through the loaded block."""
        parts = hidden_states(self.model, hidden, step_tokens)
        return torch.cat([part for _, part in parts], dim=1)

    def step(self, hidden: Tensor, state: CachedState) -> Tensor:
        """[1, n, d] through the loaded block, after the tokens in `state`."""
        return state.read(self.model, "inputs_embeds", hidden)

    def output(self, start: int, stop: int) -> Callable[[Tensor], Tensor]:
        """The output layer for vocabulary ids [start, stop), of normed hidden states."""
        name = self.import_spec.prefix + self.import_spec.embedding if self.tied else "lm_head"
        layer = self.model.get_output_embeddings()
        part = self.source.rows(f"{name}.weight", start, stop).to(self.dtype)
        layer.weight = nn.Parameter(part, requires_grad=False)
        return cast("Callable[[Tensor], Tensor]", layer)


class CachedState:
    """The KV cache of a reference model and the number of tokens in it."""

    def __init__(self) -> None:
        self.length = 0
        self._cache: dict[str, Any] = {}

    def read(self, model: Any, key: str, part: Tensor) -> Tensor:
        """Normed hidden states [1, n, d] of tokens [1, n] or embeddings [1, n, d]."""
        self.length += part.shape[1]
        # With a mask, BLOOM builds its bias in a method that `bias_zero_at_newest_key` can replace.
        mask = torch.ones(1, self.length, dtype=torch.int64)
        out = model.base_model(**{key: part}, attention_mask=mask, use_cache=True, **self._cache)
        name = "cache" if "cache" in out else "past_key_values"  # renamed in transformers 5
        self._cache = {name: out[name]}
        return cast(Tensor, out.last_hidden_state)


def hidden_states(model: Any, source: Tensor, step_tokens: int) -> Iterator[tuple[int, Tensor]]:
    """(first position, normed hidden states [1, n, d]) of each chunk, read through a cache.

    `source` is tokens [1, T] or embeddings [1, T, d].
    """
    key = "inputs_embeds" if source.is_floating_point() else "input_ids"
    if step_tokens >= source.shape[1]:
        yield 0, model.base_model(**{key: source}, use_cache=False).last_hidden_state
        return
    state = CachedState()
    for part in source.split(step_tokens, dim=1):
        yield state.length, state.read(model, key, part)


@contextmanager
def bias_zero_at_newest_key(model: Any) -> Iterator[None]:
    """Make BLOOM's bias zero at the newest key, as MPT's is; softmax ignores the shift."""
    base = model.base_model
    original = getattr(base, "build_alibi_tensor", None)
    if original is None:
        yield
        return

    def shifted(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        slopes = original(torch.ones(1, 2, dtype=mask.dtype), num_heads, torch.float32)[..., 1:]
        distance = torch.arange(1 - mask.shape[1], 1)
        return slopes.to(dtype) * distance

    base.build_alibi_tensor = shifted
    try:
        yield
    finally:
        del base.build_alibi_tensor
