"""What several files of whole runs share."""

from __future__ import annotations

import pytest
from live_runs import LiveRuns


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> LiveRuns:
    """A folder in which runs are made."""
    return LiveRuns(tmp_path_factory.mktemp("live"))
