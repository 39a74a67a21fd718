"""Generated pages are what their generator writes."""

import subprocess
import sys

from tests.rules.sources import ROOT


def test_docs_are_current():
    command = [sys.executable, "tools/generate_docs.py", "--check"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
