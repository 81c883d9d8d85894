"""``--model``: from ``file.py:callable`` or ``hf:<model_type>`` and ``--set key=value`` to a model and an example
batch.

The only place of the command line that runs a user's code. torch and transformers are loaded when a model is, not
before. What it must not know: plans, clusters, strategies.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from whale.errors import UsageError

if TYPE_CHECKING:
    import torch

_FORMS = "'file.py:callable' or 'hf:<model_type>', for example 'model.py:build' or 'hf:gpt2'"


@dataclass(kw_only=True)
class LoadedModel:
    """The model of ``--model``: the module, and an example of its *global* batch (dict, tuple or one tensor).

    ``assumptions`` says, in the user's words, what was not given and how it was taken.
    """

    name: str
    model: torch.nn.Module
    batch: Any
    assumptions: tuple[str, ...] = ()


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Read repeated ``key=value``: JSON where the value is JSON, else Python's three constants, else text.

    Raises:
        UsageError: without ``=``, with a key that is no identifier or dotted ones, or with a key given twice.

    >>> parse_settings(["layers=2", "dropout=0.1", "tie=true", "act=gelu", "path=a=b", "text_config.layers=3"])
    {'layers': 2, 'dropout': 0.1, 'tie': True, 'act': 'gelu', 'path': 'a=b', 'text_config.layers': 3}
    """
    constants = {"True": True, "False": False, "None": None}
    parsed: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not all(map(str.isidentifier, key.split("."))):
            raise UsageError(f"--set {setting!r}: write key=value, where key is a name, for example --set num_layers=2")
        if key in parsed:
            raise UsageError(f"--set {key} is given twice: {parsed[key]!r} and {text!r}; keep one")
        try:
            parsed[key] = json.loads(text)
        except ValueError:
            parsed[key] = constants.get(text, text)
    return parsed


def load_model(
    spec: str,
    settings: dict[str, Any],
    *,
    batch_size: int | None = None,
    any_batch: bool = False,
    device: str = "cpu",
) -> LoadedModel:
    """Build the model that ``spec`` names.

    Args:
        spec: ``file.py:callable``, whose callable returns ``(model, example_batch)``, or ``hf:<model_type>``.
        settings: keyword arguments of the callable, or values for the configuration of the Hugging Face model
            (which also takes ``sequence_length`` and ``seed`` for its batch, and dotted keys for configurations in it).
        batch_size: samples of the global batch, which a callable receives as ``batch_size``.
        any_batch: whether another batch would do, that of a callable without such a parameter.
        device: where parameters are made; ``meta`` allocates nothing.

    Raises:
        UsageError: for anything that the caller wrote wrongly, the model's own file included.
    """
    kind, colon, name = spec.partition(":")
    if kind == "hf" and colon:
        return _load_hugging_face(name, settings, batch_size=batch_size, device=device)
    path_text, colon, name = spec.rpartition(":")
    if not colon or not path_text.endswith(".py") or not name.isidentifier():
        raise UsageError(f"--model {spec!r}: write {_FORMS}")
    return _load_from_file(spec, Path(path_text), name, settings, batch_size, any_batch=any_batch, device=device)


# --- a user's file ----------------------------------------------------------------------------------------------------


def _load_from_file(
    spec: str, path: Path, name: str, settings: dict[str, Any], batch_size: int | None, *, any_batch: bool, device: str
) -> LoadedModel:
    module = _import_file(path)
    build = getattr(module, name, None)
    if not callable(build):
        names = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise UsageError(f"--model {spec}: {path} has no callable {name!r}{_suggestion(name, names)}")
    arguments = _arguments(spec, build, settings, batch_size, any_batch=any_batch)
    with _seeded(), _device(device):
        try:
            result = build(**arguments)
        except Exception as error:
            texts = _texts_for_numbers(build, settings)
            raise UsageError(f"--model {spec}: {name}() raised {_brief(error, path)}{texts}") from error
    return _as_loaded(spec, name, result)


def _texts_for_numbers(build: Callable[..., Any], settings: dict[str, Any]) -> str:
    """Words for settings that are text in place of a number, of which torch says nothing that one could look for."""
    defaults = {key: one.default for key, one in inspect.signature(build).parameters.items()}
    found = [
        f"{key}={value} is text, and its default {defaults[key]}"
        for key, value in settings.items()
        if isinstance(value, str) and isinstance(defaults.get(key), int | float)
    ]
    return f"; --set {', and '.join(found)}" if found else ""


@contextmanager
def _seeded(seed: int = 0) -> Iterator[None]:
    """Let random numbers of torch, numpy and Python be the same in every process, so that all ranks have one model and
    one batch; afterwards go on with the process's own."""
    import torch

    numpy = importlib.import_module("numpy.random") if importlib.util.find_spec("numpy") else None
    own, numpys = random.getstate(), numpy and numpy.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.seed(seed)
        try:
            yield
        finally:
            random.setstate(own)
            if numpy is not None:
                numpy.set_state(numpys)


_imported: dict[tuple[Path, int, int], ModuleType] = {}
"""Modules of files, by path, time of the last change and bytes."""


def _import_file(path: Path) -> ModuleType:
    """Run ``path`` as Python runs a script: with its folder first on the path, so that it finds its neighbours.

    A file runs once until it changes: one that defines an operator (``torch.library.custom_op``) would take it from
    under the models that it has made, whose graphs then call memory that is free.
    """
    path = path.expanduser()
    if not path.is_file():
        raise UsageError(f"--model: there is no file {str(path)!r} (looked in {Path.cwd()})")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    state = path.stat()
    key = path.resolve(), state.st_mtime_ns, state.st_size
    if key not in _imported:
        with _seeded():
            _imported[key] = _run_file(path)
    return _imported[key]


def _run_file(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    if specification is None or specification.loader is None:
        raise UsageError(f"--model: {str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(specification)
    sys.modules.setdefault(path.stem, module)  # a dataclass of the file looks for its module there
    try:
        specification.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"--model: importing {path} raised {_brief(error, path)}") from error
    return module


def _arguments(
    spec: str, build: Callable[..., Any], settings: dict[str, Any], batch_size: int | None, *, any_batch: bool
) -> dict[str, Any]:
    parameters = inspect.signature(build).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in settings:
        if key not in parameters and not takes_any:
            raise UsageError(
                f"--set {key}: the callable of --model {spec} takes {', '.join(parameters) or 'no arguments'}"
                f"{_suggestion(key, list(parameters))}"
            )
    arguments = dict(settings)
    is_taken = "batch_size" in parameters or takes_any
    if batch_size is not None and "batch_size" not in arguments and (is_taken or not any_batch):
        if not is_taken:
            raise UsageError(
                f"--batch {batch_size}: the callable of --model {spec} has no parameter 'batch_size'; let it "
                f"make a batch of as many rows: def {build.__name__}(batch_size={batch_size})"
            )
        arguments["batch_size"] = batch_size
    empty = inspect.Parameter.empty
    missing = [
        key
        for key, parameter in parameters.items()
        if parameter.default is empty
        and key not in arguments
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    if missing:
        wanted = " ".join(f"--set {key}=..." for key in missing)
        raise UsageError(f"--model {spec} needs {', '.join(missing)}: add {wanted}")
    return arguments


def _as_loaded(spec: str, name: str, result: Any) -> LoadedModel:
    import torch

    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.nn.Module)):
        raise UsageError(
            f"--model {spec}: {name}() returned {type(result).__name__}; it must return (model, example_batch), "
            "where the batch is a dict of keyword arguments, a tuple or one tensor"
        )
    return LoadedModel(name=spec, model=result[0], batch=result[1])


def _brief(error: BaseException, path: Path) -> str:
    """Name the error, and the last line of the user's file that it passed through."""
    place = ""
    traceback = error.__traceback__
    while traceback is not None:
        if Path(traceback.tb_frame.f_code.co_filename) == path:
            place = f" ({path}:{traceback.tb_lineno})"
        traceback = traceback.tb_next
    reason = str(error).partition("\nException raised from")[0]  # torch's own frames, which say nothing of the file
    return f"{type(error).__name__}: {reason}{place}; -v shows the traceback"


def _suggestion(word: str, words: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


@contextmanager
def _device(device: str) -> Iterator[None]:
    """Let what is made be on a device; values of parameters that have none are not drawn, which takes long."""
    import torch
    from torch.overrides import TorchFunctionMode

    class WithoutValues(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            x = args[0] if args else kwargs.get("tensor")
            if (
                isinstance(x, torch.Tensor)
                and x.is_meta
                and (func in draws or getattr(func, "__module__", "") == "torch.nn.init")
            ):
                return x
            return func(*args, **kwargs)

    draws = {
        getattr(torch.Tensor, name)
        for name in (
            "normal_", "uniform_", "bernoulli_", "exponential_", "geometric_", "log_normal_", "cauchy_", "random_"
        )
    }  # fmt: skip
    with torch.device(device), WithoutValues():
        yield


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def _load_hugging_face(
    model_type: str, settings: dict[str, Any], *, batch_size: int | None, device: str
) -> LoadedModel:
    """Make a model of ``model_type`` with random weights; nothing is downloaded, ever."""
    from whale.cli.hugging_face import ROWS, architecture

    chosen = architecture(model_type, settings)
    import torch

    try:
        with _device(device), torch.random.fork_rng(devices=[]):
            torch.manual_seed(chosen.seed)
            model = chosen.build()
    except Exception as error:
        raise UsageError(
            f"--model hf:{model_type} with these settings raised {type(error).__name__}: {error}"
        ) from error
    chosen = chosen.fitted(model, given="sequence_length" in settings)
    if device == "meta":
        chosen.check_length(model)
    return LoadedModel(
        name=f"hf:{model_type}",
        model=model,
        batch=chosen.batch(model, batch_size or ROWS),
        assumptions=(*_said_of_class(model, chosen.config), *chosen.assumptions),
    )


def _said_of_class(model: Any, config: Any) -> tuple[str, ...]:
    """The class that was taken, of an architecture for text and for images."""
    towers = all(hasattr(config, name) for name in ("text_config", "vision_config"))
    return (f"the model is a {type(model).__name__}, one of its architecture's classes",) if towers else ()
