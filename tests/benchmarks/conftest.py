import pytest
import torch

from tercel.cli.checkpoint import make_tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A random checkpoint with a tokenizer."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("benchmarks") / "tiny"
    make_tiny(directory, changes=["num_hidden_layers=4"])
    return directory
