"""Hugging Face folders scored by our own model, and by their own class, against native runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from alibi_lm.checkpoint.step import Checkpoint
from alibi_lm.cli.main import main
from alibi_lm.evals.attention_span.evaluation import AttentionSpan
from alibi_lm.evals.config import (
    AttentionSpanConfig,
    NeedleConfig,
    PerplexityConfig,
    RetrievalConfig,
)
from alibi_lm.evals.models import scorer
from alibi_lm.evals.models.base import EvalModel, EvalOptions, NativeModel
from alibi_lm.evals.models.resolve import resolve_model
from alibi_lm.evals.perplexity.evaluation import Perplexity
from alibi_lm.evals.report.report import summary_lines, write_report
from alibi_lm.evals.results import run_and_store
from alibi_lm.evals.retrieval.evaluation import Retrieval
from alibi_lm.evals.retrieval.needle import Needle
from alibi_lm.evals.retrieval.needle_prompts import PromptMaker
from alibi_lm.hf.exporting.exporter import export
from alibi_lm.model.inference.kv_cache import KVCache
from alibi_lm.model.inference.pruned_kv_cache import PrunedKVCache
from alibi_lm.tasks.config import TaskSizes
from alibi_lm.utils.errors import CheckpointError, ConfigError, DataError
from tests.unit.hf.reference_models import write_reference
from tests.unit.hf.small_step import LENGTH, LINES, add_tokenizer, add_validation, write_step

PERPLEXITY = PerplexityConfig(
    lengths=[12, LENGTH, 300],
    stride=12,
    fixed_targets=6,
    truncated_context_targets=40,
    max_tokens=1200,
)
NEEDLE = NeedleConfig(lengths=[180, 360], depths=[0.0, 0.6], num_trials=3)
RETRIEVAL = RetrievalConfig(tasks=["mqar"], lengths=[700], num_trials=4)
SHAPES = {
    "mpt": {"architecture": "mpt", "num_heads": 12},
    "bloom": {"architecture": "bloom", "num_heads": 8, "tied_embeddings": True},
}


def texts() -> list[str]:
    """Documents that differ, each some hundred tokens long."""
    return ["".join(LINES[(i * k) % 5] for i in range(1, 200)) + f"x{k}" for k in range(1, 7)]


@pytest.fixture(scope="module", params=SHAPES)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Checkpoint, Path]:
    """A run and its export."""
    folder = tmp_path_factory.mktemp(request.param)
    step = write_step(folder / "run", SHAPES[request.param])
    add_tokenizer(step, folder)
    add_validation(step, folder / "validation", texts())
    export(step, folder / "exported")
    return step, folder / "exported"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def eval_models(exported: tuple[Checkpoint, Path]) -> list[EvalModel]:
    """The run; and its export computed by our own model and by the class."""
    step, folder = exported
    corpus = step.config.data.validation[0]
    return [
        NativeModel(step),
        resolve_model(f"hf:{folder}", EvalOptions(corpus=corpus)),
        resolve_model(f"hf:{folder}", EvalOptions(corpus=corpus, engine="hf")),
    ]


def losses(result: Any) -> list[float]:
    """Every loss of a perplexity result."""
    rows = [*result.rows, *result.sliding.rows, *result.fixed_target.rows]
    return [row.loss for row in rows + result.by_position.rows + result.truncated_context.rows]


def test_one_models_perplexity_is_the_same_natively_imported_and_by_its_class(
    exported: tuple[Checkpoint, Path],
) -> None:
    native: Any
    others: Any
    native, *others = (
        run_and_store(Perplexity(), one, PERPLEXITY) for one in eval_models(exported)
    )
    assert len(losses(native)) > 15
    assert native.training_length == LENGTH
    for result, kind in zip(others, ("native", "hf"), strict=True):
        assert result.model["kind"] == kind
        assert result.training_length == LENGTH
        assert losses(result) == pytest.approx(losses(native), rel=1e-5)
        for ours, theirs in zip(native.rows, result.rows, strict=True):
            assert theirs.perplexity == pytest.approx(ours.perplexity, rel=1e-5)
            assert theirs.bits_per_byte == pytest.approx(ours.bits_per_byte, rel=1e-5)
        assert result.truncated_context.verdict.word == native.truncated_context.verdict.word


def test_one_models_needle_answers_are_the_same(exported: tuple[Checkpoint, Path]) -> None:
    native, *others = eval_models(exported)
    maker = PromptMaker(native.tokenizer(), Needle().open_corpora(native, NEEDLE), 0)  # type: ignore[arg-type]
    trials = [maker.trial(300, index) for index in range(4)]
    prompts = torch.stack([torch.from_numpy(trial.prompt(0.5)) for trial in trials])
    choices = torch.tensor([[answer.tokens for answer in trial.candidates] for trial in trials])
    wanted = native.scorer("fp32").loglikelihood_and_generate(prompts, choices, 12)
    grid = run_and_store(Needle(), native, NEEDLE)
    wanted_cells = run_and_store(Retrieval(), native, RETRIEVAL).cells
    for eval_model in others:
        found = eval_model.scorer("fp32").loglikelihood_and_generate(prompts, choices, 12)
        assert torch.equal(found.generated, wanted.generated)
        torch.testing.assert_close(
            found.loglikelihoods, wanted.loglikelihoods, rtol=1e-4, atol=1e-4
        )
        result = run_and_store(Needle(), eval_model, NEEDLE)
        assert result.cells == grid.cells
        assert result.by_length == grid.by_length
        assert run_and_store(Retrieval(), eval_model, RETRIEVAL).cells == wanted_cells


def test_long_inputs_of_an_imported_model_go_through_the_fast_engine(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_reference(folder, "mpt", heads=8)
    tokens = torch.randint(0, 307, (1, 2600), generator=torch.Generator().manual_seed(0))
    options = EvalOptions(training_length=100)
    fast = resolve_model(f"hf:{folder}", options).scorer("fp32", None)
    assert fast.describe()["pruning_tolerance"] == 1e-6
    slow = resolve_model(f"hf:{folder}", EvalOptions(engine="hf")).scorer("fp32", None)
    torch.testing.assert_close(
        fast.token_losses(tokens), slow.token_losses(tokens), rtol=1e-3, atol=1e-4
    )
    assert resolve_model(f"hf:{folder}").training_length == 300  # config.json's max_seq_len


def test_far_keys_left_out_of_long_prompts_change_no_answer(
    exported: tuple[Checkpoint, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[KVCache] = []
    decoding_cache = scorer.decoding_cache

    def remembered(*arguments: Any) -> KVCache:
        made.append(decoding_cache(*arguments))
        return made[-1]

    monkeypatch.setattr(scorer, "ANSWERS_DENSE_UP_TO", 2048)
    monkeypatch.setattr(scorer, "decoding_cache", remembered)
    step, folder = exported
    add_validation(step, tmp_path / "long", ["".join(texts())])
    corpus = step.config.data.validation.pop()
    needle = NeedleConfig(lengths=[2600], depths=[0.5], num_trials=3, num_distractors=2)
    retrieval = RetrievalConfig(
        tasks=["passkey"], lengths=[2600], num_trials=2, sizes=TaskSizes(passkey_num_distances=3)
    )
    for name in (str(step.folder.parent.parent), f"hf:{folder}"):
        eval_model = resolve_model(name, EvalOptions(corpus=corpus, out=tmp_path / name[:3]))
        for fast, dense in (
            [
                run_and_store(Needle(), eval_model, replace(needle, pruning_tolerance=e))
                for e in (None, 0.0)
            ],
            [
                run_and_store(Retrieval(), eval_model, replace(retrieval, pruning_tolerance=e))
                for e in (None, 0.0)
            ],
        ):
            assert (fast.model["pruning_tolerance"], dense.model["pruning_tolerance"]) == (
                1e-6,
                0.0,
            )
            assert fast.cells == dense.cells
        maker = PromptMaker(eval_model.tokenizer(), Needle().open_corpora(eval_model, needle), 0)  # type: ignore[arg-type]
        trials = [maker.trial(2600, index) for index in range(2)]
        prompts = torch.stack([torch.from_numpy(trial.prompt(0.5)) for trial in trials])
        choices = torch.tensor([[a.tokens for a in trial.candidates] for trial in trials])
        made.clear()
        found, wanted = (
            eval_model.scorer("fp32", e).loglikelihood_and_generate(prompts, choices, 9)
            for e in (1e-6, 0)
        )
        assert [isinstance(cache, PrunedKVCache) for cache in made] == [True, False]
        assert torch.equal(found.generated, wanted.generated)
        torch.testing.assert_close(
            found.loglikelihoods, wanted.loglikelihoods, rtol=1e-4, atol=1e-4
        )


def test_text_is_tokenized_on_the_fly(exported: tuple[Checkpoint, Path], tmp_path: Path) -> None:
    step, folder = exported
    (tmp_path / "texts").mkdir()
    for index, text in enumerate(texts()):
        (tmp_path / "texts" / f"{index}.txt").write_text(text)
    lines = [json.dumps({"text": text}) for text in texts()]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    config = PerplexityConfig(lengths=[LENGTH, 96], truncated_context_targets=None, max_tokens=1000)
    wanted = run_and_store(Perplexity(), NativeModel(step), config)
    for engine in ("native", "hf"):
        for path in ("texts", "texts/*.txt", "lines.jsonl"):
            options = EvalOptions(engine=engine, text=(path,))
            result = run_and_store(Perplexity(), resolve_model(f"hf:{folder}", options), config)
            assert result.num_tokens == wanted.num_tokens, (engine, path)
            assert result.rows[1].loss == pytest.approx(wanted.rows[1].loss, rel=1e-5)
    native = NativeModel(step, EvalOptions(text=("texts",), out=tmp_path / "out"))
    assert run_and_store(Perplexity(), native, config).rows == wanted.rows
    assert (tmp_path / "out" / "perplexity.json").is_file()


def test_the_commands_and_where_they_write(
    exported: tuple[Checkpoint, Path], tmp_path: Path
) -> None:
    step, folder = exported
    (tmp_path / "texts.txt").write_text("".join(texts()))
    before = sorted(folder.rglob("*"))
    settings = ["perplexity.lengths=[12,24,96]", "perplexity.truncated_context_targets=20"]
    asked = ["eval", "perplexity", f"hf:{folder}", "text=texts.txt", *settings]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    assert "96" in done.output
    (written,) = (tmp_path / "evals" / "hf").iterdir()
    assert written.name.startswith("exported-")
    assert (written / "perplexity.png").is_file()
    again = CliRunner().invoke(main, asked)
    assert "done before with the same settings" in again.output
    stock = CliRunner().invoke(main, [*asked, "--engine", "hf"])
    assert stock.exit_code == 0, stock.output
    assert "perplexity.json stays the main result" in stock.output
    (other,) = (written / "perplexity").glob("*.json")  # another engine is another result
    assert json.loads(other.read_text())["inputs"]["engine"] == "hf"
    needle = ["needle.lengths=[180]", "needle.num_trials=2", "needle.depths=[0.5]"]
    done = CliRunner().invoke(
        main, ["eval", "needle", f"hf:{folder}", "text=texts.txt", "--out", "mine", *needle]
    )
    assert done.exit_code == 0, done.output
    assert (tmp_path / "mine" / "needle.json").is_file()
    done = CliRunner().invoke(main, ["report", f"hf:{folder}"])
    assert done.exit_code == 0, done.output
    assert "Report on exported" in (written / "report.html").read_text()
    assert sorted(folder.rglob("*")) == before


def test_the_report_and_horizons_of_an_imported_model(exported: tuple[Checkpoint, Path]) -> None:
    _, eval_model, stock = eval_models(exported)
    assert "slope" in write_report(eval_model).read_text()
    assert "attention_span: not measured yet: alibi-lm eval attention-span hf:" in "\n".join(
        summary_lines(eval_model)
    )
    assert "attention_span" not in "\n".join(summary_lines(stock))
    with pytest.raises(ConfigError, match="--engine = hf: this eval needs"):
        run_and_store(AttentionSpan(), stock, AttentionSpanConfig(num_tokens=3000))
    with pytest.raises(DataError, match=r"not more than num_tokens"):
        run_and_store(AttentionSpan(), eval_model, AttentionSpanConfig(num_tokens=90_000))


def test_mistakes_are_named(
    exported: tuple[Checkpoint, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, folder = exported
    with pytest.raises(CheckpointError, match=r"hf:\./nowhere/at/all: no such folder"):
        resolve_model("hf:./nowhere/at/all")
    with pytest.raises(ConfigError, match=r"--engine = hf: computes Hugging Face models"):
        resolve_model(str(step.run_folder), EvalOptions(engine="hf"))
    with pytest.raises(DataError, match=r"names no validation corpus; set text="):
        run_and_store(Perplexity(), resolve_model(f"hf:{folder}"), PERPLEXITY)
    stock = resolve_model(f"hf:{folder}", EvalOptions(engine="hf"))
    with pytest.raises(ConfigError, match="takes another scaling"):
        stock.scorer("fp32", None, {"kind": "linear", "factor": 2})
    with pytest.raises(ConfigError, match="pruning_tolerance = 0.001: only this project"):
        stock.scorer("fp32", 0.001)
    bare = tmp_path / "bare"
    write_reference(bare, "bloom", heads=8)
    for engine in ("native", "hf"):
        eval_model = resolve_model(f"hf:{bare}", EvalOptions(engine=engine, text=(str(bare),)))
        with pytest.raises(DataError, match="has no tokenizer to write needles with"):
            run_and_store(Needle(), eval_model, NEEDLE)
        with pytest.raises(
            DataError, match=r"text = .*bare: hf:.*bare has no tokenizer; give corp"
        ):
            Perplexity().open_corpora(eval_model, PERPLEXITY)
    with pytest.raises(ConfigError, match="does not say how long its training samples were"):
        _ = resolve_model(f"hf:{bare}").training_length
    assert resolve_model(f"hf:{bare}", EvalOptions(training_length=64)).training_length == 64


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_reference(tmp_path / "model", "mpt", heads=8)
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    del tensors["transformer.blocks.1.ffn.up_proj.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"blocks\.1\.ffn\.up_proj\.weight: is missing"):
        resolve_model(f"hf:{tmp_path / 'model'}")
    eval_model = resolve_model(f"hf:{tmp_path / 'model'}", EvalOptions(engine="hf"))
    with pytest.raises(CheckpointError, match=r"1 tensors are missing .*up_proj\.weight"):
        eval_model.scorer("fp32")


def test_what_ours_cannot_compute_goes_to_the_class_by_itself(tmp_path: Path) -> None:
    from transformers import MptConfig, MptForCausalLM
    from transformers.models.mpt.configuration_mpt import MptAttentionConfig

    attention = MptAttentionConfig(clip_qkv=0.5)
    config = MptConfig(d_model=32, n_layers=1, n_heads=4, vocab_size=50, attn_config=attention)
    MptForCausalLM(config).save_pretrained(tmp_path / "clipped")
    name = f"hf:{tmp_path / 'clipped'}"
    assert resolve_model(name).settings == {"engine": "hf"}
    with pytest.raises(ConfigError, match=r"native: cannot compute .*attn_config.clip_qkv"):
        resolve_model(name, EvalOptions(engine="native"))
