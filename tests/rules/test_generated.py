"""Generated pages are what their generator writes."""

from tools import generate_docs


def test_docs_are_current(capsys):
    assert generate_docs.main(["--check"]) == 0, capsys.readouterr().err
