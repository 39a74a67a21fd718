"""Jobs in processes: results, errors, deaths and deadlines."""

import math
import os
import time

from tercel.contract.workers import run_jobs


def ends(function, jobs, seconds=60.0):
    found = run_jobs(function, jobs, processes=2, deadline=time.monotonic() + seconds)
    return {done.job: done for done in found}


def test_results_and_errors():
    found = ends(math.sqrt, [4.0, -1.0, 9.0])
    assert (found[4.0].result, found[9.0].result) == (2.0, 3.0)
    assert found[-1.0].problem.startswith("ValueError")


def test_a_death_is_one_jobs_problem():
    found = ends(os._exit, [3, 4, 5])
    assert {job: done.problem for job, done in found.items()} == {
        code: f"died with {code}" for code in (3, 4, 5)
    }


def test_what_is_not_done_in_time_says_so():
    started = time.monotonic()
    found = ends(time.sleep, [600, 601, 602], seconds=0.5)
    assert {done.problem for done in found.values()} == {"no time was left"}
    assert len(found) == 3
    assert time.monotonic() - started < 30
