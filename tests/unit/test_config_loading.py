"""YAML and overrides to dataclasses: values kept, mistakes named, all at once."""

import ast
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from alibi_lm.config import Config
from alibi_lm.config_loading import (
    apply_overrides,
    build,
    digest,
    flatten,
    load_yaml,
    to_dict,
    to_yaml,
)
from alibi_lm.data.config import RecipeConfig
from alibi_lm.evals.config import SuiteConfig
from alibi_lm.evals.registry import EVALS
from alibi_lm.utils.errors import ConfigError
from alibi_lm.utils.settings import Section


@dataclass
class Inner(Section):
    rate: float = 1.0
    kind: Literal["cosine", "linear"] = "cosine"
    count: int | None = None


@dataclass
class Outer(Section):
    name: str
    inner: Inner = field(default_factory=Inner)
    items: list[Inner] = field(default_factory=list)
    extra: dict[str, Any] | str = field(default_factory=dict)
    flag: bool = False


def message(raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        build(Outer, raw)
    return str(caught.value)


def test_values_are_converted_by_type() -> None:
    raw = {"name": "a", "inner": {"rate": 3, "count": 4.0}, "items": [{"kind": "linear"}]}
    outer = build(Outer, raw)
    assert outer == Outer("a", Inner(3.0, count=4), [Inner(kind="linear")])
    assert isinstance(outer.inner.rate, float)


def test_every_problem_is_named_at_once_with_the_nearest_key() -> None:
    text = message({"nme": "a", "inner": {"rte": 1, "kind": "cosin", "count": "x"}, "flag": 1})
    for part in (
        "nme: unknown key; did you mean name?",
        "name: is missing",
        "inner.rte: unknown key; did you mean inner.rate?",
        "inner.kind = cosin: is not one of cosine, linear; did you mean cosine?",
        "inner.count = x: is not a whole number",
        "flag = 1: is not true or false",
    ):
        assert part in text
    assert "\n" not in text


def test_nested_list_keys_are_named_by_index() -> None:
    assert "items.1.rte: unknown key" in message({"name": "a", "items": [{}, {"rte": 2}]})


def test_not_finite_numbers_are_refused() -> None:
    assert "inner.rate = inf: is not finite" in message({"name": "a", "inner": {"rate": 1e999}})


@pytest.mark.parametrize("text", ["3e-4", "3E-4", "3.0e-4", "0.0003"])
def test_scientific_notation_is_a_number(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"name: a\ninner:\n  rate: {text}\n")
    assert build(Outer, load_yaml(path)).inner.rate == 3e-4
    assert build(Outer, apply_overrides({"name": "a"}, [f"inner.rate={text}"])).inner.rate == 3e-4


def test_overrides_take_precedence_and_reach_into_lists() -> None:
    raw = {"name": "a", "items": [{"rate": 1}, {"rate": 2}]}
    outer = build(Outer, apply_overrides(raw, ["items.1.rate=5", "inner.kind=linear", "name=b"]))
    assert outer.items[1].rate == 5.0
    assert apply_overrides(raw, ["items[1].rate=5"]) == apply_overrides(raw, ["items.1.rate=5"])
    assert outer.inner.kind == "linear"
    assert outer.name == "b"
    assert raw["name"] == "a"


@pytest.mark.parametrize(
    "override", ["name", "=1", "items.7.rate=1", "items[7].rate=1", "name.x=1", "inner.rate=[1"]
)
def test_a_bad_override_is_named(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides({"name": "a", "items": [{}]}, [override])
    assert override in str(caught.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("name: a\nname: b\n", "given twice"),
        ("- a\n", "is not a mapping"),
        ("name: [1\n", "is not YAML"),
        ("? [a]\n: 1\n", "is not YAML"),
        ("name: 2024-13-45\n", "is not YAML"),
    ],
)
def test_a_bad_file_is_named(text: str, part: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_yaml(path)
    assert part in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_and_undecodable_files_are_named(tmp_path: Path) -> None:
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, part in (
        (tmp_path / "no.yaml", "no such file"),
        (binary, "not UTF-8"),
        (tmp_path, "is a folder"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_yaml(path)
        assert part in str(caught.value)


@given(
    st.builds(
        Outer,
        name=st.text(),
        inner=st.builds(
            Inner,
            rate=st.floats(allow_nan=False, allow_infinity=False),
            count=st.none() | st.integers(-(10**12), 10**12),
        ),
        items=st.lists(st.builds(Inner, rate=st.floats(0, 1)), max_size=3),
        extra=st.dictionaries(st.text(min_size=1), st.integers() | st.text(), max_size=3),
    )
)
@example(outer=Outer("", extra={"\x85": 0, "\u2028": "\u2029é😀"}))
def test_yaml_round_trip(tmp_path_factory: pytest.TempPathFactory, outer: Outer) -> None:
    path = tmp_path_factory.mktemp("yaml") / "a.yaml"
    path.write_text(to_yaml(outer), encoding="utf-8")
    again = build(Outer, load_yaml(path))
    assert again == outer
    assert digest(again) == digest(outer)


def test_flatten_gives_dotted_leaves() -> None:
    flat = flatten(Outer("a", extra={"x": {"y": 1}}))
    assert flat["inner.rate"] == 1.0
    assert flat["extra.x.y"] == 1
    assert flat["items"] == []
    assert "inner" not in flat


def sections(cls: type, seen: set[type]) -> set[type]:
    import typing

    seen.add(cls)
    for hint in typing.get_type_hints(cls).values():
        for part in (hint, *typing.get_args(hint)):
            if is_dataclass(part) and part not in seen:
                sections(part, seen)  # type: ignore[arg-type]
    return seen


@pytest.mark.parametrize(
    "root", [Config, RecipeConfig, SuiteConfig, *(e.config for e in EVALS.values())]
)
def test_every_setting_is_documented(root: type) -> None:
    for cls in sections(root, set()):
        import inspect

        body = ast.parse(inspect.getsource(cls)).body[0].body  # type: ignore[attr-defined]
        documented = {
            node.target.id
            for node, after in zip(body, body[1:], strict=False)
            if isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        }
        assert documented == {f.name for f in fields(cls)}, cls


def test_defaults_survive_a_round_trip() -> None:
    raw = {"run": {"dir": "runs/a"}, "data": {"corpora": [{"prefix": "x"}]}}
    config = build(Config, raw)
    assert build(Config, to_dict(config)) == config


def test_a_broken_rule_is_named_beside_another_section_s_mistake() -> None:
    raw = {
        "run": {"dir": "a"},
        "data": {"corpora": [{"prefix": "x"}]},
        "model": {"num_heads": 7},
        "train": {"precision": "int8"},
    }
    with pytest.raises(ConfigError) as caught:
        build(Config, raw)
    assert "model.num_heads = 7: does not divide" in str(caught.value)
    assert "train.precision = int8: is not one of fp32, bf16, fp16" in str(caught.value)


def test_merge_keys_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("base: &b {rate: 2.0, count: 3}\ninner: {<<: *b, rate: 4.0}\n")
    assert load_yaml(path)["inner"] == {"rate": 4.0, "count": 3}
