"""The repository keeps its own rules: every YAML loads, imports point one way, READMEs are true."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from alibi_lm.config import load_config
from alibi_lm.data.preparation.prepare import load_recipe
from alibi_lm.evals.suite import read_suite
from alibi_lm.experiments.claims.run import load_claims
from alibi_lm.experiments.claims.training import suite_runs
from alibi_lm.model.flops import num_parameters
from alibi_lm.train.engine.deepspeed_config import accumulation_steps
from alibi_lm.train.run import read_config

REPOSITORY = Path(__file__).parents[2]
LIBRARY = REPOSITORY / "alibi_lm"
SCRIPT_FOLDERS = ("launch", "data", "evals", "configs")

MODULES = sorted(LIBRARY.rglob("*.py"))
SCRIPTS = sorted(path for name in SCRIPT_FOLDERS for path in (REPOSITORY / name).rglob("*.py"))
TESTS = sorted((REPOSITORY / "tests").rglob("*.py"))
CONFIGS = sorted((REPOSITORY / "configs").rglob("*.yaml"))

UTILS = {
    "errors": (),
    "logging": (),
    "files": (),
    "memory": (),
    "text": (),
    "utf8": (),
    "exit": ("errors", "logging"),
    "plugins": (),
    "settings": ("errors",),
    "locking": ("errors", "logging"),
    "progress": ("logging",),
    "atomic_directory": ("errors", "files", "locking", "logging"),
}
"""What everything may import, and what each of it may import of the rest."""

WHOLE_RUNS = ("parallel", "model", "data", "checkpoint", "hf", "evals", "train")

# What each part of the library may import of the library, besides itself, `utils` and
# `config_loading`. A name with a dot is a module or a package below the top level. Read downwards,
# a part only ever names parts above it: imports point one way.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "kernels": (),
    "config": ("data.config", "model.config", "parallel.config", "train.config"),
    "parallel": ("config", "kernels"),
    "model": ("config", "parallel", "kernels"),
    "data": (),
    "tasks": ("data.tokenizer", "data.indexed"),
    "data.preparation": ("data", "tasks"),
    "checkpoint": ("config", "parallel", "model", "data.tokenizer"),
    "hf": ("config", "parallel", "model", "data", "checkpoint"),
    "evals": ("config", "parallel", "model", "data", "data.preparation", "tasks", "checkpoint",
              "hf"),
    "train": ("config", "parallel", "model", "data", "checkpoint", "evals"),
    "experiments": ("config", "model", "data", "data.preparation", "tasks", "checkpoint", "evals",
                    "train"),
    "plan": ("config", "parallel", "model", "data", "train"),
    "doctor": ("config", "parallel", "model", "train"),
    "loaded_run": ("config", "parallel", "model", "data", "checkpoint"),
    "bench": ("config", "kernels", "parallel", "model", "data", "data.preparation", "checkpoint",
              "evals", "train"),
    "cli": (*WHOLE_RUNS, "data.preparation", "config", "loaded_run", "bench", "plan", "experiments",
            "doctor"),
    "__main__": ("cli",),
}  # fmt: skip
PUBLIC = ("data.hf_dataset", "model.config", "model.decoder", "loaded_run")
"""Where the names that `alibi_lm` itself offers come from."""
SECTIONS = re.compile(r"^(data|evals|experiments\.claims|model|parallel|tasks|train)\.config$")
"""The packages' own config sections: below everything else."""

ENVIRONMENT_READERS = {
    *("train.entry", "bench.processes"),
    *("cli.main", "cli.doctor", "cli.claims", "cli.distributed"),
}
PRINTERS = {"utils.logging"}
DEEPSPEED_USERS = {
    "deepspeed.accelerator": (
        "parallel.device",
        "parallel.process_group",
        "doctor.collective",
        "doctor.hosts",
        "doctor.probe",
    ),
    "deepspeed.launcher": ("doctor.hosts",),
    "deepspeed.runtime": (),
    "deepspeed": ("parallel.process_group", "bench.processes"),
}
"""Who uses which public part of DeepSpeed, outside of train/engine, which knows its insides."""
PIPELINE_USERS = {"train.engine.pipeline_module"}
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_SCRIPT_LINES, MAX_FOLDER_FILES = 400, 80, 40, 15

RANKS = re.compile(
    r"^# Ranks: (?P<ranks>\d+) \((?P<micro>\d+) samples? x (?P<data>\d+) (?:ranks|data-parallel)"
    r"(?: x (?P<accumulated>\d+) accumulated)? = (?P<batch>[\d,]+)",
    re.MULTILINE,
)
PUBLISHED_PARAMETERS = {
    "mpt-7b.yaml": 6_649_286_656,
    "mpt-7b-65k.yaml": 6_649_286_656,
    "bloom-560m.yaml": 559_214_592,
    "bloom-176b.yaml": 176_247_271_424,
}


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


# ---- YAML ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_every_config_loads_and_its_batch_divides_over_its_ranks(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    stated = RANKS.search(text)
    if stated is None:
        makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
        command = re.search(rf"--num_gpus (\d+) launch/pretrain.py {name_of(path)}", makefile)
        assert command, "its first lines must say `# Ranks: ...`"
        read_config(path, [], int(command[1]))
        return
    ranks = int(stated["ranks"])
    config, _ = read_config(path, [], ranks)
    assert config.train.micro_batch_size == int(stated["micro"])
    assert config.train.global_batch_size == int(stated["batch"].replace(",", ""))
    data_ranks = ranks // (config.parallel.tp * config.parallel.pp)
    assert data_ranks == int(stated["data"])
    assert accumulation_steps(config, data_ranks) == int(stated["accumulated"] or 1)
    assert ("Not run" in text) != ("# Seen:" in text), "it says whether it was run"


@pytest.mark.parametrize(("name", "expected"), PUBLISHED_PARAMETERS.items())
def test_shapes_have_the_published_number_of_parameters(name: str, expected: int) -> None:
    assert num_parameters(load_config(REPOSITORY / "configs" / name).model) == expected


def test_the_other_length_of_the_papers_large_model_is_a_valid_config() -> None:
    path = REPOSITORY / "configs" / "paper-1.3b.yaml"
    line = next(s for s in path.read_text().splitlines() if "train.sequence_length=1024" in s)
    overrides = line.removeprefix("#").split()
    assert read_config(path, overrides, 32)[0].train.sequence_length == 1024


def test_a_continuation_has_the_model_that_it_goes_on_from() -> None:
    first, _ = read_config(REPOSITORY / "configs/mpt-7b.yaml", [], 64)
    second, _ = read_config(REPOSITORY / "configs/mpt-7b-65k.yaml", [], 8)
    assert second.model == first.model
    assert second.train.init_from == first.run.dir
    assert second.train.sequence_length == 65536


@pytest.mark.parametrize("path", sorted((REPOSITORY / "data").rglob("*.yaml")), ids=name_of)
def test_every_recipe_loads(path: Path) -> None:
    assert load_recipe(path).sources


@pytest.mark.parametrize("path", sorted((REPOSITORY / "evals").glob("*.yaml")), ids=name_of)
def test_every_suite_loads(path: Path) -> None:
    read_suite(path)


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "evals" / "suites").glob("*.yaml")), ids=name_of
)
def test_every_claims_suite_loads(path: Path) -> None:
    assert suite_runs(load_claims(path))


# ---- launch templates ---------------------------------------------------------------------------


def test_the_hostfile_is_one_that_deepspeed_reads() -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    assert fetch_hostfile(str(REPOSITORY / "launch/hostfile.example")) == {"node-1": 8, "node-2": 8}


def test_the_environment_file_has_no_line_that_deepspeed_stumbles_over() -> None:
    text = (REPOSITORY / "launch/deepspeed_env.example").read_text(encoding="utf-8")
    for line in text.splitlines():
        # The launcher splits every line at its first =, comments and empty ones too.
        assert re.fullmatch(r"[A-Z][A-Z0-9_]*=\S+", line), line
    table = (REPOSITORY / "docs/many-nodes.md").read_text(encoding="utf-8")
    for line in text.splitlines():
        assert f"`{line.split('=')[0]}`" in table


# ---- imports ------------------------------------------------------------------------------------


def module_name(path: Path) -> str:
    """The name of a library file inside the library, for example train.loop; "" for its root."""
    parts = path.relative_to(LIBRARY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path) for path in MODULES}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path) -> Iterator[str]:
    """Full names of everything that a file imports anywhere in it, `from a import b` as a.b."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def library_imports(path: Path) -> set[str]:
    """The library's modules that a file imports; the root (`__version__`) aside."""
    found = set()
    for name in imports(path):
        if name.split(".")[0] == "alibi_lm":
            inside = name.removeprefix("alibi_lm").removeprefix(".")
            while inside not in NAMES:  # a class or function of a module
                inside = inside.rpartition(".")[0]
            found.add(inside)
    return found - {""}


def part_of(module: str) -> str:
    """The part of the library that a module belongs to: the longest name of the table."""
    while module not in MAY_IMPORT and "." in module:
        module = module.rpartition(".")[0]
    return module


def may_import(importer: str, imported: str) -> bool:
    """Whether the architecture lets one module of the library import another."""
    if importer == "":
        return imported in PUBLIC
    if SECTIONS.match(importer):
        return imported in ("utils.errors", "utils.plugins", "utils.settings", "tasks.config")
    package, _, name = imported.partition(".")
    if importer.startswith("utils."):
        return package == "utils" and name in UTILS[importer.removeprefix("utils.")]
    if importer == "config_loading":
        return imported in ("utils.errors", "utils.settings")
    part = part_of(importer)
    allowed = (part, *MAY_IMPORT[part])
    return (
        package in ("utils", "config_loading")
        or imported in allowed
        or part_of(imported) in allowed
    )


def test_the_table_itself_points_one_way() -> None:
    parts = list(MAY_IMPORT)
    for part, allowed in MAY_IMPORT.items():
        for other in allowed:
            below = SECTIONS.match(other) or parts.index(part_of(other)) < parts.index(part)
            assert below, f"{part} may import {other}"
    named = {part_of(name) for name in NAMES if name and not name.startswith("utils")}
    assert named == {*parts, "config_loading"}
    assert {name for name in NAMES if name.startswith("utils.")} == {f"utils.{n}" for n in UTILS}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_obey_the_architecture(path: Path) -> None:
    module = module_name(path)
    wrong = [name for name in library_imports(path) if not may_import(module, name)]
    assert not wrong, f"{module} may not import {wrong}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module_name(path): library_imports(path) for path in MODULES}
    TopologicalSorter(graph).prepare()  # raises CycleError, naming the circle


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_scripts_are_thin_and_know_the_library_only(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports(path)}
    assert roots <= {*sys.stdlib_module_names, "alibi_lm"}
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_SCRIPT_LINES


def test_nothing_imports_the_script_folders_and_they_are_not_packaged() -> None:
    for path in (*MODULES, *SCRIPTS, *TESTS):
        roots = {name.split(".")[0] for name in imports(path)}
        assert not roots & set(SCRIPT_FOLDERS), path
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    find = settings["tool"]["setuptools"]["packages"]["find"]
    assert find["include"] == ["alibi_lm*"]


# ---- style --------------------------------------------------------------------------------------


def environment_reads(module: ast.Module) -> Iterator[int]:
    """Lines that use os.environ or os.getenv in another way than setting a variable."""
    set_only = {
        id(node.value)
        for node in ast.walk(module)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    }
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and id(node) not in set_only:
            if ast.unparse(node) in ("os.environ", "os.environb", "os.getenv"):
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (node.lineno for alias in node.names if "env" in alias.name)


def test_only_entry_points_read_the_environment() -> None:
    found = {module_name(path) for path in MODULES if any(environment_reads(tree(path)))}
    assert found <= ENVIRONMENT_READERS


def test_only_the_console_prints() -> None:
    found = {
        module_name(path)
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    }
    assert found <= PRINTERS


def test_compiled_kernels_are_imported_by_their_registry_only() -> None:
    backends = {name for name in NAMES if name.startswith("kernels.amx")}
    assert "kernels.amx" in backends
    for path in MODULES:
        if not module_name(path).startswith("kernels"):
            assert not library_imports(path) & backends, name_of(path)


def test_every_import_is_declared() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {
        name: deps for name, deps in settings["optional-dependencies"].items() if name != "dev"
    }
    declared = [*settings["dependencies"], *(dep for deps in extras.values() for dep in deps)]
    known = {re.split(r"[^\w.-]", dep)[0].lower().replace("-", "_") for dep in declared}
    packages = packages_distributions()
    for path in MODULES:
        for root in {name.split(".")[0] for name in imports(path)}:
            if root not in {*sys.stdlib_module_names, "alibi_lm"}:
                names = {name.lower().replace("-", "_") for name in packages.get(root, [root])}
                assert names & known, f"{name_of(path)}: {root} is not declared in pyproject.toml"


def test_deepspeeds_insides_are_known_in_one_folder() -> None:
    for path in MODULES:
        for name in imports(path):
            if re.match(r"deepspeed\b", name) and not module_name(path).startswith("train.engine."):
                users = next(
                    (us for part, us in DEEPSPEED_USERS.items() if name.startswith(part)), ()
                )
                assert module_name(path) in users, f"{name_of(path)}: {name}"


def test_only_the_pipeline_knows_deepspeeds_pipeline() -> None:
    found = {
        module_name(path)
        for path in MODULES
        if any(re.match(r"deepspeed(\.runtime)?\.pipe\b", name) for name in imports(path))
    }
    assert found <= PIPELINE_USERS


@pytest.mark.parametrize("path", [*MODULES, *SCRIPTS, *TESTS], ids=name_of)
def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name}: {length} lines"


def test_folders_hold_few_files() -> None:
    for top in ("alibi_lm", "tests", *SCRIPT_FOLDERS):
        for folder in (REPOSITORY / top, *(REPOSITORY / top).rglob("*")):
            if folder.is_dir() and folder.name != "__pycache__":
                files = [path for path in folder.iterdir() if path.is_file()]
                assert len(files) <= MAX_FOLDER_FILES, f"{name_of(folder)}: {len(files)} files"
