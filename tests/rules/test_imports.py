"""Imports point one way, as the table in docs/architecture.md says."""

import ast
import re
import subprocess
import sys

import pytest

from tests.rules.sources import HOST, ROOT, SOURCES, Source

TABLE = re.search(
    r"```imports\n(.*?)```", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), re.DOTALL
)
assert TABLE is not None
ALLOWED = {
    name: set(allowed.split())
    for name, _, allowed in (line.partition(":") for line in TABLE[1].strip().splitlines())
}


def violations(source: Source) -> list[str]:
    found = []
    for name in source.imports():
        parts = name.split(".")
        if parts[0] != "tercel" or len(parts) < 2 or source.package in ("", "__main__"):
            continue
        if parts[1] == "__version__":
            continue
        if parts[1] != source.package and parts[1] not in ALLOWED[source.package]:
            found.append(f"{source.module} imports {name}")
    return found


def test_every_package_is_in_the_table():
    packages = {source.package for source in SOURCES} - {"", "__main__"}
    assert packages == set(ALLOWED)


def test_direction():
    assert [line for source in HOST for line in violations(source)] == []


def test_the_rule_sees_a_wrong_import(tmp_path):
    wrong = Source(ROOT / "tercel/core/wrong.py")
    wrong.__dict__["tree"] = ast.parse("from tercel.runtime.engine import Engine")
    assert violations(wrong) == ["tercel.core.wrong imports tercel.runtime.engine.Engine"]


def test_ops_import_no_other_op_but_its_reference_or_contract():
    wrong = []
    for source in HOST:
        parts = source.module.split(".")
        if parts[:2] != ["tercel", "ops"] or len(parts) < 5:
            continue
        for name in source.imports():
            target = name.split(".")
            is_op = target[:2] == ["tercel", "ops"] and len(target) > 3 and target[2] != "_lib"
            if (
                is_op
                and target[2:4] != parts[2:4]
                and not {"reference", "contract"} & set(target[4:])
            ):
                wrong.append(f"{source.module} imports {name}")
    assert wrong == []


def test_reference_imports_torch_only():
    for source in HOST:
        if source.package == "reference":
            roots = {name.split(".")[0] for name in source.imports()}
            own = {name for name in source.imports() if name.startswith("tercel.")}
            assert all(name.startswith("tercel.reference") for name in own)
            assert roots - {"tercel"} - set(sys.stdlib_module_names) <= {"torch"}


def test_only_gates_import_reference():
    users = {
        source.package
        for source in HOST
        if source.package != "reference"
        and any(name.startswith("tercel.reference") for name in source.imports())
    }
    assert users <= {"gates"}


def test_server_never_imports_torch():
    for source in HOST:
        if source.package == "server":
            assert not any(name.split(".")[0] == "torch" for name in source.imports())


@pytest.mark.parametrize("module", ["tercel", "tercel.cli"])
def test_import_is_cheap(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
