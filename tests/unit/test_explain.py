"""`tercel explain` replays the tree, shows programs and compares them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tercel.cli import main
from tercel.cli.explain import app
from tercel.contract.receipt import Status

NANO = "checkpoints/nano"
ROOT = Path(__file__).parents[2]


def explain(*arguments):
    return CliRunner().invoke(app, [str(ROOT / NANO), "--device", "cpu", *arguments])


def as_json(*arguments):
    result = explain(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json_names_target_trace_and_program():
    told = as_json()
    assert told["target"] == "any__any__tp1"
    assert [line["label"] for line in told["trace"]][:3] == ["mode", "family", "shape"]
    assert {"prefill", "decode", "mixed"} <= set(told["steps"])
    assert len(told["program"]) == 64
    assert told["steps"]["decode"][0]["site"] == "embed"


def test_off_is_the_portable_target_with_the_same_program():
    assert as_json("--mode", "off")["policy"] == "portable"
    assert as_json("--mode", "off")["target"] == as_json()["target"]


def test_tables():
    assert "kda_decode" in explain().stdout
    assert "mla_append" in explain("--show", "prefill").stdout


def test_diff_of_two_layouts_says_what_a_rank_does_differently():
    told = as_json("--diff", "layout=tp2")
    assert told["other"]["target"] == "any__any__tp2"
    assert told["program"] != told["other"]["program"]
    changed = {item["site"] for item in told["diff"]}
    assert {"exchange", "o_proj", "kda_decode"} <= changed
    assert "route" not in changed
    assert as_json("--diff", "layout=tp1")["diff"] == []


def test_require_exits_with_the_trace(capsys):
    assert main(["explain", str(ROOT / NANO), "--mode", "require", "--device", "cpu"]) == 1
    text = capsys.readouterr().err
    assert "mode=require found no named target" in text and "shape" in text


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--mode", "sometimes"], 2, "sometimes"),
        (["--layout", "tp3"], 1, "by moe_tp 3; layouts that fit: tp1, tp2, tp4"),
        (["--layout", "dep4"], 1, "layout dep4: depN (attention_dp=4) is not built; choose tpN, "),
        (["--layout", "helix4"], 1, "layout helix4: helixN (decode_cp=4) is not built; choose"),
        (["--layout", "tp1_dwdp4"], 1, "layout tp1_dwdp4: _dwdpN (distributed_weights=4) is"),
        (["--diff", "layout"], 1, "expected FIELD=VALUE"),
        (["--diff", "lay=tp2"], 1, "lay: unknown"),
    ],
)
def test_wrong_questions(capsys, arguments, code, message):
    assert main(["explain", str(ROOT / NANO), *arguments]) == code
    assert message in capsys.readouterr().err


def test_published_names_need_no_checkpoint():
    told = CliRunner().invoke(
        app,
        ["kimi_linear_48b", "--arch", "sm_90", "--device", "cpu", "--dtype", "bfloat16", "--json"],
    )
    described = json.loads(told.stdout)
    assert described["target"] == "kimi_linear_bf16__sm_90__tp1"
    assert described["weight_bytes"] > 90e9


def test_require_refuses_a_target_whose_decode_sites_are_portable(capsys, monkeypatch):
    monkeypatch.setattr("tercel.targets.binding.status", lambda *_, **__: Status.UNTESTED)
    arguments = ["explain", "kimi_linear_48b", "--arch", "sm_90", "--device", "cpu"]
    assert main([*arguments, "--mode", "require"]) == 1
    text = capsys.readouterr().err
    assert "would decode on portable implementations at" in text and "kda_decode" in text
