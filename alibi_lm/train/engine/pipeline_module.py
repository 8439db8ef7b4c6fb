"""The decoder as stages of a pipeline: the one place that knows DeepSpeed's pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.schedule import OptimizerStep, ReduceTiedGrads
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from alibi_lm.model.config import ModelConfig
from alibi_lm.model.init import initialize
from alibi_lm.model.layers import Block, Embedding, Head, layers, vocab_size
from alibi_lm.model.vocab_parallel_cross_entropy import output_losses
from alibi_lm.parallel.layout import stage_layers
from alibi_lm.parallel.mesh import Mesh, ParallelDim
from alibi_lm.parallel.tensor_parallel import vocabulary_weight

__all__ = ["OptimizerStep", "PipelineDecoder", "PipelineEngine", "ReduceTiedGrads"]

_TIED = "embedding"


class OutputMatrix(nn.Module):
    """The last stage's copy of a tied model's embedding matrix.

    A module of its own, because DeepSpeed leaves everything in a tied module's copy out of the
    gradient norm.
    """

    def __init__(self, config: ModelConfig, tp: ParallelDim) -> None:
        super().__init__()
        self.weight = vocabulary_weight(vocab_size(config), config.hidden_size, tp)

    def forward(self, normed: Tensor) -> Tensor:
        """Nothing: the loss multiplies by the matrix in portions."""
        return normed


class PipelineDecoder(PipelineModule):
    """This rank's stage of a decoder: what `model.decoder.Decoder` is without a pipeline.

    Attributes:
        activation_checkpointing: recompute the blocks in the backward pass.
        targets: int64 [B, T] of the micro-batch that comes next; the last stage only.
        evaluated: sum of the losses and number of the targets since it was last set to zeros,
            counted by the last stage in evaluation mode.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, seed: int | None) -> None:
        """Make the stage, with weights drawn from `seed`; None leaves them unset."""
        makers = layers(config, mesh.tp)
        specs = [LayerSpec(maker.func, *maker.args) for maker in makers]
        if config.tied_embeddings:
            specs[0] = TiedLayerSpec(_TIED, Embedding, config, mesh.tp)
            specs.append(TiedLayerSpec(_TIED, OutputMatrix, config, mesh.tp))
        topology = PipeModelDataParallelTopology(mesh.pp.size, mesh.tp.size, mesh.dp.size)
        super().__init__(specs, topology=topology)
        self.config = config
        self.tp = mesh.tp
        self.activation_checkpointing = False
        self.targets = torch.empty(0, 0, dtype=torch.int64)
        self.evaluated = [0.0, 0.0]
        if seed is not None:
            initialize(self.canonical_parameters(), config, seed)

    def _partition_layers(self, method: str = "") -> None:
        """DeepSpeed's hook: say which layers this stage builds."""
        num_blocks = sum(spec.typename is Block for spec in self._layer_specs)
        stages = stage_layers(num_blocks, self.num_stages)
        self.parts = [0, *(stage.stop for stage in stages[:-1]), self._num_layers]
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(self.parts[stage], self.parts[stage + 1])

    def canonical_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This stage's parameters under the names that they have in a whole decoder."""
        for name, parameter in self.named_parameters():
            first, rest = name.split(".", 1)
            if first == "tied_modules":
                yield rest, parameter
            elif int(first) == 0:
                yield f"embedding.{rest}", parameter
            elif int(first) <= self.config.num_layers:
                yield f"blocks.{int(first) - 1}.{rest}", parameter
            else:
                yield f"head.{rest}", parameter

    def forward(self, hidden: Tensor) -> Tensor:
        """Run the stage's layers.

        Tokens [B, T] or the residual stream [B, T, hidden_size] to the residual stream or, on the
        last stage, to the mean loss of `targets`.

        The loss is a part of the module: DeepSpeed's bf16 optimizer clears the gradients of all
        parameters when the gradient of the module's output is known.
        """
        recompute = self.activation_checkpointing and torch.is_grad_enabled()
        for layer in self.forward_funcs:
            if recompute and isinstance(layer, Block):
                hidden = cast(Tensor, checkpoint(layer, hidden, use_reentrant=False))
            elif isinstance(layer, Head):
                hidden = layer.norm(hidden)
            else:
                hidden = layer(hidden)
        return self._loss(hidden) if self.stage_id == self.num_stages - 1 else hidden

    def _output_weight(self) -> Tensor:
        if self.config.tied_embeddings:
            return cast(Tensor, self.tied_modules[_TIED].weight)
        return cast(Tensor, getattr(self, str(self.config.num_layers + 1)).weight)

    def _loss(self, normed: Tensor) -> Tensor:
        targets = self.targets.to(normed.device)
        size = vocab_size(self.config)
        losses = output_losses(normed, self._output_weight(), targets, size, self.tp)
        if not self.training:
            self.evaluated[0] += float(losses.double().sum())
            self.evaluated[1] += float((targets >= 0).sum())
        return losses.mean()
