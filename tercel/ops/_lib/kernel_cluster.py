"""Sums over the blocks of a cluster, through each other's shared memory.

In a launch of `num_ctas` blocks a Gluon program is a cluster, and a tensor's first axis may lie
over its blocks. Each block sends its numbers to all of them; after the cluster's barrier every
block adds up what it received, in the order of the blocks, so that all of them have the same bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _buffer_code(bytes):
    return f"{{ .shared .align 16 .b8 received[{bytes}]; mov.u32 $0, received; }}"


@gluon.constexpr_function
def _send_code(ctas, threads):
    """Thread t sends slot t / ctas, modulo the slots that threads cover, to block t % ctas."""
    shift = ctas.bit_length() - 1
    return (
        "{ .reg .b32 thread, mine, turn, at, rank; .reg .pred p; "
        "mov.u32 thread, %tid.x; mov.u32 rank, %cluster_ctarank; "
        f"and.b32 mine, $3, {threads // ctas - 1}; shr.u32 turn, thread, {shift}; "
        "setp.eq.u32 p, mine, turn; "
        f"mad.lo.u32 at, $3, {4 * ctas}, $1; mad.lo.u32 at, rank, 4, at; "
        f"and.b32 turn, thread, {ctas - 1}; mapa.shared::cluster.u32 at, at, turn; "
        "@p st.shared::cluster.f32 [at], $2; mov.u32 $0, 0; }"
    )


@gluon.constexpr_function
def _received_code(ctas):
    wide = min(ctas, 4)
    names = [f"v{index}" for index in range(ctas)]
    loads = [
        f"ld.shared.v{wide}.f32 {{{', '.join(names[first : first + wide])}}}, [at + {4 * first}];"
        for first in range(0, ctas, wide)
    ]
    adds = [f"add.f32 v0, v0, {name};" for name in names[1:]]
    return (
        f"{{ .reg .f32 {', '.join(names)}; .reg .b32 at; mad.lo.u32 at, $2, {4 * ctas}, $1; "
        + " ".join(loads + adds)
        + " mov.f32 $0, v0; }"
    )


@gluon.jit
def exchange(SLOTS: gl.constexpr, CTAS: gl.constexpr):
    """Where a block receives: an address in its shared memory, the same in all blocks. Once in a
    kernel; a slot is written once."""
    code: gl.constexpr = _buffer_code(4 * SLOTS * CTAS)
    return gl.inline_asm_elementwise(code, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def send(address, value, slot, CTAS: gl.constexpr, THREADS: gl.constexpr):
    """Puts fp32 values, which all threads of a block hold, into the slots of all blocks."""
    code: gl.constexpr = _send_code(CTAS, THREADS)
    gl.inline_asm_elementwise(
        code, "=r,r,f,r", [address, value, slot], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def received(address, slot, CTAS: gl.constexpr):
    """What the blocks sent to these slots, added up."""
    code: gl.constexpr = _received_code(CTAS)
    return gl.inline_asm_elementwise(
        code, "=f,r,r", [address, slot], gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def arrive():
    """Tells the cluster that this block is here, and has sent what it sent before."""
    code: gl.constexpr = "barrier.cluster.arrive.release; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(code, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait():
    """Until all blocks have arrived; what they sent is there. After the first wait all have
    started, and may be sent to."""
    code: gl.constexpr = "barrier.cluster.wait.acquire; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(code, "=r", [], gl.int32, is_pure=False, pack=1)
