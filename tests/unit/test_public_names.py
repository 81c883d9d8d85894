"""The public surface: exactly these names, each from its home, and nothing heavy loaded before it is needed."""

import ast
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import whale

PUBLIC = {
    "BatchSize",
    "Cluster",
    "Plan",
    "WhaleError",
    "__version__",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_object",
    "annotate",
    "broadcast",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cluster",
    "init",
    "launch",
    "load_checkpoint",
    "load_weights",
    "local_rank",
    "mesh_axis",
    "parallelize",
    "place_tables",
    "rank",
    "read_parts",
    "replicate",
    "row_wise",
    "save_checkpoint",
    "set_default_strategy",
    "shard_dataset",
    "size",
    "split",
    "stage",
    "verify",
    "wait_for_checkpoints",
}
HEAVY = ("torch", "transformers", "numpy", "networkx", "pydantic")
ROOT = Path(whale.__file__).parents[1]


def _loaded_after(program: str, names: tuple[str, ...]) -> list[str]:
    """The modules among ``names`` that a fresh interpreter has loaded after running ``program``."""
    code = f"import sys\n{program}\nprint('LOADED', *[name for name in {names!r} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()[-1].split()[1:]


def test_all_is_the_public_surface() -> None:
    assert set(whale.__all__) == PUBLIC
    assert len(whale.__all__) == len(PUBLIC)
    assert set(dir(whale)) >= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_public_name_comes_from_its_home(name: str) -> None:
    value = getattr(whale, name)
    assert value is getattr(import_module(whale._HOMES[name]), name)
    assert value.__doc__, f"whale.{name} has no docstring"


def test_type_checkers_see_the_same_names_from_the_same_homes() -> None:
    tree = ast.parse(Path(whale.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: statement.module
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert seen == whale._HOMES | {"optim": "whale"}  # a module of public names, as torch.optim
    assert whale.optim is import_module("whale.optim")


def test_no_submodule_bears_a_public_name() -> None:
    submodules = {module.name for module in pkgutil.iter_modules(whale.__path__)}
    assert not submodules & PUBLIC, "importing such a module would replace the public function"


def test_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match=r"'whale'.*'paralelize'"):
        whale.paralelize  # type: ignore[attr-defined]  # noqa: B018


def test_import_whale_loads_nothing_heavy() -> None:
    assert _loaded_after("import whale", (*HEAVY, "click", "whale.errors", "whale.api")) == []


def test_import_planner_loads_no_torch() -> None:
    assert _loaded_after("import whale.planner", ("torch", "transformers")) == []


@pytest.mark.parametrize("arguments", [["-h"], ["--version"], ["verify", "-h"], ["doctor", "-h"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    run_help = "try:\n    whale.cli.main()\nexcept SystemExit as end:\n    assert not end.code"
    program = f"sys.argv = ['whale', *{arguments!r}]\nimport whale.cli\n{run_help}"
    assert _loaded_after(program, HEAVY) == []
