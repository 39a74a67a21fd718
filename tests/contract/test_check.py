"""The checks catch what they are for: each is shown an op that is wrong in exactly one way."""

import pytest
import torch

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Implementation, Tolerance, operation
from tercel.contract import reference as reference_implementation
from tercel.contract.check import (
    check_cell,
    check_control,
    check_refusal,
    check_replay,
    check_sequence,
)
from tercel.contract.draw import Maker, draw, stable_seed
from tercel.errors import CheckFailed, ContractError


def valid(x, state, rows):
    if len(set(rows.tolist())) != rows.numel():
        raise ContractError("rows: must be distinct")


def inputs(cell, make):
    state = make.poison(cell["S"], cell["N"], dtype="f32")
    rows = make.choice(cell["T"], low=1, high=cell["S"])
    state[rows] = make.normal(cell["T"], cell["N"], dtype="f32")
    return {"x": make.normal(cell["T"], cell["N"]), "state": state, "rows": rows}


CONTRACT = Contract(
    axes={"T": "rows", "N": "width", "S": "slots"},
    args={
        "x": Arg("T N"),
        "state": Arg("S N", "f32", written="rows[t]"),
        "rows": Arg("T", "i64"),
    },
    returns={"y": Arg("T N")},
    cost=lambda sizes: Cost(sizes["T"] * sizes["N"] * (sizes["act"] * 2 + 8)),
    cells=(Cell("a pool larger than the batch", layouts=("tp1",), T=3, N=8, S=7),),
    inputs=inputs,
    valid=valid,
    tolerance=Tolerance(2, 1, why="one addition and one product, each rounded once"),
    hazards=(Hazard("aliasing", "two equal rows race"),),
)
CELL = CONTRACT.cells[0]


def accumulate(x, state, rows):
    """The running sum per slot, in place; y is its double."""
    state[rows] += x.to(state.dtype)
    return (2 * state[rows]).to(x.dtype)


def build(run):
    @operation(CONTRACT, reference_implementation(accumulate), Implementation("candidate", run))
    def running_sum(x, state, rows):
        """Args: see the contract."""

    return running_sum


def test_a_right_implementation_passes():
    op = build(accumulate)
    report = check_sequence(op, CELL, "candidate", steps=4, dtype=torch.bfloat16)
    assert set(report.errors) == {"y", "state"}
    check_cell(op, CELL, "candidate")
    check_replay(op, CELL, "candidate")


def test_sees_a_wrong_result():
    op = build(lambda x, state, rows: accumulate(x, state, rows) * 1.001)
    with pytest.raises(CheckFailed, match="worst element"):
        check_cell(op, CELL, "candidate")


def test_sees_a_lost_state_update_in_a_sequence():
    def forgetful(x, state, rows):
        return (2 * (state[rows] + x)).to(x.dtype)

    with pytest.raises(CheckFailed, match="state"):
        check_sequence(build(forgetful), CELL, "candidate", steps=2)


def test_sees_a_write_outside_the_declared_rows():
    def spill(x, state, rows):
        y = accumulate(x, state, rows)
        state[0] = 0
        return y

    with pytest.raises(CheckFailed, match="state"):
        check_cell(build(spill), CELL, "candidate")


def test_sees_an_undeclared_write():
    def scribble(x, state, rows):
        y = accumulate(x, state, rows)
        x.zero_()
        return y

    with pytest.raises(CheckFailed, match="wrote x, which its contract does not declare"):
        check_cell(build(scribble), CELL, "candidate")


def test_sees_a_read_of_poisoned_memory():
    def peek(x, state, rows):
        return accumulate(x, state, rows) + state[0].sum().to(x.dtype)

    with pytest.raises(CheckFailed, match="y"):
        check_cell(build(peek), CELL, "candidate")


def test_replay_sees_a_remembered_input():
    remembered = {}

    def sticky(x, state, rows):
        return accumulate(remembered.setdefault(x.data_ptr(), x.clone()), state, rows)

    with pytest.raises(CheckFailed, match="rewritten in place"):
        check_replay(build(sticky), CELL, "candidate")


def test_refusal():
    op = build(accumulate)
    error = check_refusal(op, CELL, "candidate", lambda a: a.update(rows=a["rows"][:-1]))
    assert "rows" in str(error)
    with pytest.raises(CheckFailed, match="accepted arguments"):
        check_refusal(op, CELL, "candidate", lambda a: None)


def test_refusal_by_the_implementation():
    op = build(accumulate)
    op.implementations["candidate"] = Implementation(
        "candidate", accumulate, admits=lambda sizes: "T above 2" if sizes["T"] > 2 else None
    )
    with pytest.raises(ContractError, match="candidate refuses: T above 2"):
        op.using("candidate")(**draw(op, CELL, dtype=torch.float32))


def test_a_control_that_passes_is_a_failure():
    with pytest.raises(CheckFailed, match="the check is too weak"):
        check_control(build(accumulate), CELL, accumulate)
    check_control(build(accumulate), CELL, lambda x, state, rows: accumulate(x, state, rows) + 1)


def test_validity_runs_before_every_cell():
    bad = build(accumulate)
    object.__setattr__(bad, "contract", CONTRACT)
    arguments = draw(bad, CELL, dtype=torch.float32)
    arguments["rows"][:] = 1
    with pytest.raises(ContractError, match="must be distinct"):
        CONTRACT.valid(**arguments)


def test_seeds_are_stable_across_processes():
    assert stable_seed("rms_norm", CELL, 0) == 185648240713157
    first = Maker(3, torch.float32).normal(2, 2)
    assert torch.equal(first, Maker(3, torch.float32).normal(2, 2))
