"""Test set-up of the whole repository: the folders behind the symlinks are collected once, under their right names.

Hypothesis keeps no clock: how fast examples are drawn says something of the machine, not of the code. The processes of
a run have a folder for the graphs of models, which they capture once.
"""

import gc
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.collecting import collect_seldom
from tests.distributed.kept_graphs import FOLDER

collect_ignore = ["planner", "strategies"]
if importlib.util.find_spec("triton") is None:
    collect_ignore.append("whale/runtime/adamw_triton.py")

settings.register_profile("whale", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("whale")


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder of this run's graphs, in the process that starts the others.

    These have one thread each: those of several would wait for each other, on processors that the others need.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Else each process that compiles kernels starts others, which load torch, to try what vectors the processor has.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    if FOLDER not in os.environ:
        folder = os.environ[FOLDER] = tempfile.mkdtemp(prefix="whale-graphs-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_finish() -> None:
    """Nothing looks again through what is collected, and torch writes no trace of its compilers.

    A collector of garbage would visit thousands of tests with their modules. Pytest adds handlers to loggers that do
    not propagate, and with a handler torch prints every graph into its trace: a sixth of the time of a capture.
    """
    gc.collect()
    gc.freeze()
    collect_seldom()
    logging.getLogger("torch.__trace").propagate = True


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> Iterator[None]:
    """Nothing looks again through what the tests of a module leave, such as traces that others share: code that has
    garbage collected, as parallel models do now and then, would take seconds each time."""
    yield
    gc.collect()
    gc.freeze()
