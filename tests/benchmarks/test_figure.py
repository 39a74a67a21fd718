"""Goals, verdicts, exit codes, and the page that the results render to."""

import json

import pytest
import typer

from benchmarks.cpu_throughput import OURS, THEIRS, Run, figures
from benchmarks.figure import Figure, Report, publish
from benchmarks.page import render
from benchmarks.report import accuracy, manifest

MET = Report("A", (Figure("x", 1.0, ">=", 1.0),), {"threads": 2})
MISSED = Report("B", (Figure("x", 1.0, ">=", 1.0), Figure("y", 3, "=", 2, ",d")))


@pytest.mark.parametrize(
    ("figure", "verdict"),
    [
        (Figure("at most", 1e-5, "<=", 1e-5), "met"),
        (Figure("at most", 1.1e-5, "<=", 1e-5), "missed"),
        (Figure("at most", float("nan"), "<=", 1e-5), "missed"),
        (Figure("at least", 0.94, ">=", 0.95), "missed"),
        (Figure("exactly", 7, "=", 7), "met"),
        (Figure("absent", None, ">=", 1.0), "not run"),
        (Figure("reported", 3.0), ""),
    ],
)
def test_verdicts(figure, verdict):
    assert figure.verdict == verdict


@pytest.mark.parametrize("as_json", [False, True])
def test_a_missed_goal_is_an_exit_code(as_json, capsys):
    publish(MET, as_json)
    with pytest.raises(typer.Exit) as end:
        publish(MISSED, as_json)
    assert end.value.exit_code == 1
    assert capsys.readouterr().out


def test_json_holds_the_report(capsys):
    publish(MET, as_json=True)
    assert Report.from_dict(json.loads(capsys.readouterr().out)) == MET
    assert MISSED.to_dict()["missed"] == ["y"]


def test_the_page_is_what_the_results_say(tmp_path):
    results = tmp_path / "cpu.json"
    empty = render(results)
    entry = {
        "command": "python -m x",
        "date": "2026-01-01",
        "seconds": 12.3,
        "machine": {"cores": 2},
        "versions": {"torch": "2.13"},
        "report": MISSED.to_dict(),
    }
    results.write_text(json.dumps({"b": entry}))
    page = render(results)
    assert page.startswith(empty)
    assert "| y | = 2 | 3 | missed |" in page
    assert "`python -m x`, 2026-01-01, 12 s" in page
    assert "cores 2" in page and "torch 2.13" in page


def test_gates_are_read_as_reports():
    score = {"exact_match": 0.96, "right": 96, "of": 100}
    report = accuracy({"scores": {"trained templates": score, "held-out templates": score}})
    assert not report.missed
    assert [figure.verdict for figure in report.figures] == ["met", "", "not run"]
    assert manifest({"model": "m", "tensors": 1, "bytes": 1}).missed


def test_ratios_of_rates():
    prompts = [[1, 2, 3, 4]] * 8
    ours = Run(prefill_s=1.0, decode_s=1.0, tokens=[[5, 6, 7]] * 8)
    theirs = Run(prefill_s=2.0, decode_s=1.5, tokens=[[5, 6, 7]] * 8)
    found = {f.name: f for f in figures(8, prompts, {OURS: [ours] * 3, THEIRS: [theirs] * 3})}
    assert found["prefill, batch 8: ratio"].measured == 2.0
    assert found["decode, batch 8: tercel tokens/s"].measured == 16.0
    assert found["decode, batch 8: ratio"].verdict == "missed"
    assert found["batch 8: same tokens"].verdict == "met"
    alone = list(figures(8, prompts, {OURS: [ours]}))
    assert {f.verdict for f in alone} == {"", "not run"}
