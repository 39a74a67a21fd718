"""Lints of kernel sources: the catalog passes, and each fails on a kernel that is broken so."""

import ast

import pytest

from tercel.ops.catalog import catalog
from tests.rules.kernel_lints import early_reads, unfenced_reads, unwaited_clusters
from tests.rules.sources import HOST

SOURCES = [source for source in HOST if source.package == "ops" and "jit" in source.text]
CONSTANTS = {
    name
    for op in catalog().values()
    for hazard in op.contract.hazards
    if hazard.kind == "early_read"
    for name in hazard.args
}
"""Arguments that some op declares that it reads before the wait."""
EARLIER = {
    name
    for op in catalog().values()
    for hazard in op.contract.hazards
    if hazard.kind == "earlier_steps"
    for name in hazard.args
}
"""Arguments of which some op reads before the wait what earlier steps have written."""
CARRIED: dict[str, set[str]] = {
    "words": {"w13", "w2"},
    "scales": {"w13_scale", "w2_scale"},
    "matrices": {"w13", "w2"},
    "matrix": {"w13", "w2"},
}
"""Parameters of kernels that serve several arguments of an op, and which."""
DECLARED = CONSTANTS | EARLIER | {name for name, carried in CARRIED.items() if carried <= CONSTANTS}
WRITTEN = {name for op in catalog().values() for name in op.contract.written}


def imported_by(source):
    """Modules with kernels' helpers that a module imports, and those that they import."""
    for name in source.imports():
        for helper in SOURCES:
            if name.startswith(helper.module + "."):
                yield from imported_by(helper)
                yield helper.tree


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.module)
class TestCatalog:
    def test_reads_before_the_wait_are_declared(self, source):
        assert early_reads(source.tree, DECLARED, list(imported_by(source))) == []

    def test_written_shared_memory_is_fenced(self, source):
        assert unfenced_reads(source.tree, list(imported_by(source))) == []

    def test_clusters_are_waited_for(self, source):
        assert unwaited_clusters(source.tree) == []


def test_nothing_that_is_written_counts_as_constant():
    assert CONSTANTS.isdisjoint(WRITTEN)


STATE_BEFORE_THE_WAIT = """
@triton.jit
def helper(pointer, offsets):
    return tl.load(pointer + offsets)

@triton.jit
def recurrence(x, weight, state, y, slots, N: tl.constexpr):
    cuda.gdc_launch_dependents()
    k = tl.arange(0, N)
    held = tl.load(weight + k)
    here = state + k
    {early}
    cuda.gdc_wait()
    values = tl.load(x + k)
    tl.store(y + k, values * held)
"""


@pytest.mark.parametrize(
    ("early", "found"),
    [
        ("pass", []),
        ("more = helper(weight, k)", []),
        ("old = tl.load(here)", ["recurrence:12 load of state before gdc_wait"]),
        ("old = helper(state, k)", ["recurrence:12 load of state before gdc_wait"]),
        ("copy_to_shared(held, here)", ["recurrence:12 load of state before gdc_wait"]),
        ("slot = tl.load(slots)", ["recurrence:12 load of slots before gdc_wait"]),
        ("tl.store(y + k, held)", ["recurrence:12 store of y before gdc_wait"]),
    ],
)
def test_state_read_before_the_wait(early, found):
    tree = ast.parse(STATE_BEFORE_THE_WAIT.format(early=early))
    assert early_reads(tree, {"weight"}) == found


def test_a_kernel_that_triggers_and_never_waits():
    text = STATE_BEFORE_THE_WAIT.format(early="cuda.gdc_launch_dependents()")
    assert early_reads(ast.parse(text), {"weight"}) == []
    found = early_reads(ast.parse(text.replace("    cuda.gdc_wait()\n", "")), {"weight"})
    assert [line.partition(" ")[2] for line in found] == [
        "load of x before gdc_wait",
        "store of y before gdc_wait",
    ]


def test_a_helper_of_another_module_is_read_where_it_is_called():
    helper = ast.parse("@triton.jit\ndef taken(pointer):\n    return tl.load(pointer)")
    kernel = STATE_BEFORE_THE_WAIT.format(early="old = taken(here)")
    assert early_reads(ast.parse(kernel), {"weight"}) == []
    found = early_reads(ast.parse(kernel), {"weight"}, [helper])
    assert found == ["recurrence:12 load of state before gdc_wait"]


PRODUCT = """
@gluon.jit
def product(a, c, LAYOUT: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], LAYOUT)
    tile.store(gl.load(a))
    {between}
    sums = warpgroup_mma(tile, tile, sums)
"""


def test_tensor_core_read_without_a_fence():
    broken = ast.parse(PRODUCT.format(between="pass"))
    assert unfenced_reads(broken) == ["product:7 warpgroup_mma reads tile without a fence"]
    assert unfenced_reads(ast.parse(PRODUCT.format(between="fence_async_shared()"))) == []
    held = PRODUCT.replace("LAYOUT)\n    tile.store(gl.load(a))", "LAYOUT, gl.load(a))")
    assert len(unfenced_reads(ast.parse(held.format(between="pass")))) == 1


COPIED = """
@gluon.jit
def multiplied(tile, sums):
    return warpgroup_mma(tile, tile, sums)

@gluon.jit
def product(a, c, tile):
    async_copy.async_load(tile, a)
    {wait}
    {between}
    sums = multiplied(tile, 0)
"""


@pytest.mark.parametrize("wait", ["async_copy.wait_group(0)", "mbarrier.wait(full.index(0), 1)"])
def test_copies_that_a_product_reads_without_a_fence(wait):
    broken = ast.parse(COPIED.format(wait=wait, between="pass"))
    assert unfenced_reads(broken) == ["product:11 multiplied reads copies without a fence"]
    assert unfenced_reads(ast.parse(COPIED.format(wait=wait, between="fence_async_shared()"))) == []


def test_a_fence_that_is_taken_away_is_missed():
    for name in ("kernel_slot_wgmma", "kernel_slot_streams", "kernel_gluon_sm_90"):
        source = next(each for each in SOURCES if each.module.endswith(name))
        broken = ast.parse(source.text.replace("hopper.fence_async_shared()", "pass"))
        assert unfenced_reads(broken, list(imported_by(source)))


CLUSTER = """
@triton.jit
def exchange(x):
    tl.inline_asm_elementwise("barrier.cluster.arrive.release; ", "=r", [], tl.int32, False, 1)
    {after}
"""
WAIT = 'tl.inline_asm_elementwise("barrier.cluster.wait.acquire; ", "=r", [], tl.int32, False, 1)'


def test_cluster_barrier_without_a_wait():
    broken = ast.parse(CLUSTER.format(after="return"))
    assert unwaited_clusters(broken) == ["exchange:4 arrives at the cluster and never waits"]
    assert unwaited_clusters(ast.parse(CLUSTER.format(after=WAIT))) == []
    assert unwaited_clusters(ast.parse(CLUSTER.format(after="hopper.cluster.wait()"))) == []
