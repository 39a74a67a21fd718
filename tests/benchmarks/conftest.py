import pytest

from tercel.cli.checkpoint import make_tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A random checkpoint with a tokenizer."""
    directory = tmp_path_factory.mktemp("benchmarks") / "tiny"
    make_tiny(directory, changes=["num_hidden_layers=4"])
    return directory
