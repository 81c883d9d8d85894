"""One tree of errors: each has its exit code, is documented, and keeps its place in a file."""

import pickle
from pathlib import Path

import pytest

from whale import errors

EXIT_CODES = {
    "AnnotationError": 2,
    "CaptureError": 2,
    "CheckpointError": 5,
    "InfeasibleError": 4,
    "InputFileError": 3,
    "PlanMismatchError": 3,
    "ScheduleError": 1,
    "UsageError": 2,
    "WhaleError": 1,
    "WorkerError": 6,
}


def test_every_error_is_public_documented_and_in_the_tree() -> None:
    assert set(errors.__all__) == set(EXIT_CODES)
    assert errors.__doc__ is not None
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(kind, errors.WhaleError)
        assert kind.__doc__
        assert f"{name} " in errors.__doc__, f"{name} is missing in the tree of the docstring"


@pytest.mark.parametrize(("name", "code"), EXIT_CODES.items())
def test_exit_code(name: str, code: int) -> None:
    assert getattr(errors, name)("message").exit_code == code


def test_tree_in_the_docstring_shows_the_true_exit_codes() -> None:
    assert errors.__doc__ is not None
    for line in errors.__doc__.splitlines():
        if "  exit " in line:
            name = line.strip(" │├└─").split()[0]
            assert line.split("  exit ")[1].split()[0] == str(EXIT_CODES[name])


@pytest.mark.parametrize("kind", [errors.UsageError, errors.AnnotationError, errors.InputFileError])
def test_what_the_user_did_is_a_value_error(kind: type[Exception]) -> None:
    assert issubclass(kind, ValueError)


def test_worker_error_is_a_runtime_error() -> None:
    assert issubclass(errors.WorkerError, RuntimeError)


PLACES = [
    ("a.toml", 3, "a.toml:3: bad"),
    (Path("a.toml"), None, "a.toml: bad"),
    (None, 3, "line 3: bad"),
    (None, None, "bad"),
]


@pytest.mark.parametrize("kind", [errors.InputFileError, errors.PlanMismatchError])
@pytest.mark.parametrize(("path", "line", "shown"), PLACES)
def test_place_in_an_input_file_is_shown_and_survives_pickling(
    kind: type[errors.InputFileError], path: str | Path | None, line: int | None, shown: str
) -> None:
    error = kind("bad", path=path, line=line)
    for copy in (error, pickle.loads(pickle.dumps(error))):
        assert str(copy) == shown
        assert (copy.message, copy.path, copy.line) == ("bad", None if path is None else "a.toml", line)
        assert type(copy) is kind


@pytest.mark.parametrize(("file", "line", "shown"), PLACES)
def test_place_in_the_model_is_shown_and_survives_pickling(
    file: str | Path | None, line: int | None, shown: str
) -> None:
    error = errors.CaptureError("bad", file=file, line=line)
    for copy in (error, pickle.loads(pickle.dumps(error))):
        assert str(copy) == shown
        assert (copy.message, copy.file, copy.line) == ("bad", None if file is None else "a.toml", line)


def test_place_of_a_capture_error_may_be_found_later() -> None:
    error = errors.CaptureError("bad")
    error.file, error.line = "model.py", 7
    assert (error.file, error.line, str(error)) == ("model.py", 7, "bad")
