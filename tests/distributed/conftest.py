"""Tests that start ranks run one after another, whatever else runs beside them: their limits of time are honest only
where ranks do not fill the machine."""

from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if _HERE in item.path.parents:
                item.add_marker(pytest.mark.xdist_group("ranks"))
