"""The linear biases stay fp32 inside DeepSpeed's engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked import Forked
from launching import environment, finished

SCRIPT = """
import json, sys, torch, deepspeed
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.parallel.process_group import avoid_shared_memory

torch.distributed.init_process_group("gloo", f"file://{sys.argv[1]}", rank=0, world_size=1)
avoid_shared_memory()
deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
config = ModelConfig(num_layers=2, hidden_size=64, num_heads=8, vocab_size=97,
                     initializer_range=0.1)
tokens = torch.randint(0, 97, (1, 4097), generator=torch.Generator().manual_seed(0))
inputs, targets = tokens[:, :-1], tokens[:, 1:]
blocks = {
    "bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}
results = {}
for name, block in blocks.items():
    for stage in (1, 3):
        model = Decoder(config)
        optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
            "train_batch_size": 1, "optimizer": optimizer, **block,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}})
        losses = engine(inputs, targets)
        engine.backward(losses.mean())
        plain = Decoder(config)
        with torch.no_grad():
            exact = plain(inputs, targets)
            if name == "bf16":
                same = plain.bfloat16()(inputs, targets)
            else:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    same = plain(inputs, targets)
        results[f"{name} {stage}"] = {
            "spread": exact.std().item(),
            "against_fp32": (losses - exact)[0, 3584:].std().item(),
            "against_plain": (losses - same).abs().max().item(),
        }
        engine.destroy()
print("RESULT " + json.dumps(results))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    folder: Path = tmp_path_factory.mktemp("engine")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    arguments = [str(script), str(folder / "store")]
    done = finished(Forked([(arguments, environment() | {"LOCAL_RANK": "0"})]))
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    found: dict[str, dict[str, float]] = json.loads(line.removeprefix("RESULT "))
    return found


@pytest.mark.parametrize("engine", ["bf16 1", "bf16 3", "autocast 1", "autocast 3"])
def test_far_positions_score_as_in_fp32(engine: str, results: dict[str, dict[str, float]]) -> None:
    figures = results[engine]
    assert figures["spread"] > 0.3
    assert figures["against_plain"] <= 1e-6
    assert figures["against_fp32"] < 0.03 * figures["spread"]
