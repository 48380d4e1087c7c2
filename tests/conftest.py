"""Settings of all tests; its place also puts the helpers in this folder on the import path."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def tables_of_this_run(tmp_path_factory):
    """Measured times are kept for the run alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAMPPRUNER_CACHE", str(tmp_path_factory.mktemp("tables")))
        yield
