"""Asking in Gluon for memory before it may be read."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _prefetch_code(bytes):
    return (
        "{ .reg .pred p; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 p, thread, $2; "
        f"@p cp.async.bulk.prefetch.L2.global [$1], {bytes}; mov.u32 $0, 0; }}"
    )


@gluon.jit
def prefetch(pointers, thread, BYTES: gl.constexpr):
    """Has a thread each bring BYTES, of whole 16, on their way into the second cache. Nothing goes
    stale there, so it may be asked for before the wait for the launch that writes them."""
    code: gl.constexpr = _prefetch_code(BYTES)
    gl.inline_asm_elementwise(
        code, "=r,l,r", [pointers.to(gl.int64), thread], gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _touch_code():
    return (
        "{ .reg .pred p; .reg .b32 word; setp.ne.u32 p, $2, 0; "
        "@p ld.volatile.global.b32 word, [$1]; mov.u32 $0, 0; }"
    )


@gluon.jit
def touch(pointers, wanted):
    """Reads a word at each pointer that is wanted, for nobody. Beside a prefetch of the same memory
    it has more of it near in time (docs/log.md, 2026-12-01); alone it does nothing."""
    code: gl.constexpr = _touch_code()
    args = [pointers.to(gl.int64), wanted.to(gl.int32)]
    gl.inline_asm_elementwise(code, "=r,l,r", args, gl.int32, is_pure=False, pack=1)
