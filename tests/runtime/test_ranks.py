"""The engine's side of a group of ranks: what it says when one of them is late, wrong or gone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tercel.config import EngineConfig
from tercel.core.layout import Layout
from tercel.core.step import Row, StepPlan
from tercel.errors import CheckpointError, ConfigError, EngineError
from tercel.runtime.ranks import Ranks
from tests.runtime.test_process import is_running, wait_until_gone

FAKES = "tests.runtime.fake_ranks:main"
PLAN = StepPlan(verify=(Row("a", (1,), 3, 1, (1,)),))


def start(fault="", layout="tp1_pp3", deadline_s=20.0, **options):
    config = EngineConfig(model=fault, layout=layout, rank_deadline_s=deadline_s)
    return Ranks(config, Layout.parse(layout), rank_main=FAKES, **options)


@pytest.fixture(autouse=True)
def nothing_stays():
    """Every test ends without a child process."""
    before = children()
    yield
    assert children() <= before


def children():
    """Processes of this one, but for those that have ended and wait to be noticed."""
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = {int(pid) for file in tasks for pid in file.read_text().split()}
    return {pid for pid in pids if is_running(pid)}


def test_steps_go_to_all_ranks_and_tokens_come_from_the_last_stage():
    seen = []
    ranks = start(progress=lambda *report: seen.append(report))
    assert [ranks.run(PLAN).rows[0].tokens for _ in range(3)] == [(1,), (2,), (3,)]
    assert ranks.calls() == {"fake": 3}
    ranks.check()
    ranks.close()
    ranks.close()
    assert seen[-1][:2] == (6, 6)
    with pytest.raises(EngineError, match="closed"):
        ranks.run(PLAN)


@pytest.mark.parametrize(
    ("phase", "place"),
    [
        ("connect", r"not connected yet\) while starting"),
        ("start", r".*\) while starting"),
        ("load", r"here, process \d+\) while loading"),
        ("join", r"here, process \d+\) while forming the group"),
    ],
)
def test_a_rank_killed_before_it_serves(phase, place):
    begun = time.monotonic()
    with pytest.raises(EngineError, match=rf"rank 1 ended \(SIGKILL; {place}"):
        start(f"kill {phase} 1")
    assert time.monotonic() - begun < 10


def test_a_rank_killed_in_a_step():
    ranks = start("kill step 1")
    with pytest.raises(EngineError, match=r"rank 1 ended \(SIGKILL; .*\) in a step"):
        ranks.run(PLAN)
    with pytest.raises(EngineError, match="rank 1"):
        ranks.run(PLAN)
    ranks.close()


def test_a_rank_killed_between_steps():
    ranks = start()
    victim = ranks._processes[2].pid
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"rank 2 ended \(SIGKILL; .*\) between steps"):
        for _ in range(100):
            ranks.check()
            time.sleep(0.02)


def test_the_cause_is_told_from_its_consequences():
    """The others report a lost connection before the death itself is seen."""
    ranks = start("drop step 2")
    with pytest.raises(EngineError, match=r"^rank 2 ended \(SIGKILL"):
        ranks.run(PLAN)


@pytest.mark.parametrize(
    ("phase", "loaded", "doing"),
    [("connect", (0, 0), "starting"), ("load", (5, 6), "loading")],
)
def test_a_late_rank_is_named(phase, loaded, doing):
    seen = []
    with pytest.raises(EngineError, match=f"rank 1 made no progress in time while {doing}"):
        start(f"stop {phase} 1", deadline_s=3, progress=lambda *report: seen.append(report))
    assert (*loaded, f"waiting for rank 1 while {doing}") in seen


def test_a_quiet_rank_is_named_before_others_have_arrived():
    """Of many that load for long: the one that says nothing any more, as long as that lasts."""
    seen = []
    with pytest.raises(EngineError, match="rank 2 made no progress in time while loading"):
        start("slow load 2", deadline_s=3, progress=lambda *report: seen.append(report))
    names = [waiting for _, _, waiting in seen]
    assert names.count("waiting for rank 2 while loading") > 5
    assert "waiting for ranks 0-2 while loading" not in names


def test_a_rank_that_ends_in_another_way_when_closed_is_logged(caplog, monkeypatch):
    monkeypatch.setattr("tercel.runtime.ranks._EXIT_S", 0.5)
    ranks = start()
    os.kill(ranks._processes[2].pid, signal.SIGKILL)
    os.kill(ranks._processes[0].pid, signal.SIGSTOP)
    ranks.close()
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "rank 0 did not end in time and is killed while closing",
        "rank 2 ended (SIGKILL) while closing",
    ]


def test_a_rank_that_keeps_the_others_waiting_is_named():
    ranks = start("late step 0")
    with pytest.raises(EngineError, match=r"rank 0 made no progress .* while ranks 1-2 waited"):
        ranks.run(PLAN)


def test_no_rank_answers_in_time(monkeypatch):
    monkeypatch.setattr("tercel.runtime.ranks._GRACE_S", 0)
    ranks = start("stop step 2", deadline_s=2)
    with pytest.raises(EngineError, match="made no progress in time in a step"):
        ranks.run(PLAN)


def test_an_error_of_a_rank_keeps_its_class_and_names_the_rank():
    with pytest.raises(CheckpointError, match=r"^rank 2: model-1\.safetensors: cut short"):
        start("raise load 2")


def test_ranks_that_differ_read_no_weights():
    with pytest.raises(ConfigError) as caught:
        start("differ report 1")
    assert "checkpoint: same on ranks 0, 2; other on rank 1" in str(caught.value)


def test_strangers_are_ignored():
    import zmq

    ranks = start()
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(ranks._peers.address.endpoint)
    stranger.send(b"\x93not a message")
    stranger.send(b"\x85\xa4type\xa5Hello\xa4rank\x00\xa5token\xa1x\xa4host\xa1h\xa3pid\x01")
    time.sleep(0.1)
    assert ranks.run(PLAN).rows[0].tokens == (1,)
    ranks.close()
    context.destroy(linger=0)


PARENT = """
import sys, time
from tests.runtime.test_ranks import start
ranks = start()
print(*(process.pid for process in ranks._processes.values()), flush=True)
time.sleep(60)
"""


def test_ranks_end_with_the_engine():
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 3 and all(map(is_running, pids))
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    for pid in pids:
        wait_until_gone(pid)
