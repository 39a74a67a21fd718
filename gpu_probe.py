"""check: warm; time: measure."""
import os, sys, time, traceback, json
from functools import partial
import torch
sys.path.insert(0, ".")
from benchmarks.kda_prefill_long import draw
from tercel.contract.compare import measure
from tercel.contract.timing import copy_bandwidth, in_graph, interleave
from tercel.ops._lib.kda_peers import chunk_kda, flash_kda
from tercel.ops.linear_attention.kda_prefill import kernel_triton as K
E8 = tuple(range(0, 8193, 1024))
CELLS = {"6x1024":(6,(0,1024)),"12x8192":(12,(0,8192)),"96x8x1024":(96,E8),"96x8192":(96,(0,8192)),"6x65536":(6,(0,65536)),"12x65536":(12,(0,65536)),"96x65536":(96,(0,65536)),"6x8192":(6,(0,8192))}
VAR = {"base":{}, "w1":dict(prepare_warps=1), "w4r128":dict(prepare_warps=4,registers=128), "w4r168":dict(prepare_warps=4,registers=168),"w4r112":dict(prepare_warps=4,registers=112),
 "w2r224":dict(prepare_warps=2,registers=224),"w2r168":dict(prepare_warps=2,registers=168),
 "c16w2":dict(chunk=16,prepare_warps=2), "c16w1":dict(chunk=16,prepare_warps=1), "c16w4":dict(chunk=16,prepare_warps=4),
 "c16w2s4":dict(chunk=16,prepare_warps=2,stages=4), "c16w2s6":dict(chunk=16,prepare_warps=2,stages=6), "r128w8":dict(rows=128,carry_warps=8), "r64w8":dict(rows=64,carry_warps=8), "s2":dict(stages=2), "s4":dict(stages=4),
 "slab18":dict(slab=1<<18),"slab20":dict(slab=1<<20),"slab17":dict(slab=1<<17)}
def call(a, v):
    return partial(K.launch, *(a[n] for n in ("qkv","g","b","state","slots","cu_seqlens","fresh")), K.WIDE._replace(**VAR[v]))
def vars_of(c):
    if c == "96x8x1024": return list(VAR)
    if c in ("96x8192",): return ["base","w1","w4r128","w4r168","c16w2","slab18","slab20","s4"]
    if c == "6x65536": return ["base","w1","w4r128","c16w2"]
    return ["base"]
def warm(part):
    heads = {"6":"6x1024","12":"12x8192","96":"96x8x1024"}
    if part == "flash":
        for c in ("6x1024","96x8x1024","12x8192"):
            a = draw(*CELLS[c]); o = K.kda_prefill(**{**a,"state":a["state"].clone()})
            try:
                f = flash_kda(**a); r = f(); torch.cuda.synchronize()
                print(c, "flash vs ours", measure(r[0].flatten(1), o.double().flatten(1)).rms_ulps, flush=True)
            except Exception: traceback.print_exc()
    elif part.startswith("fla"):
        for c in CELLS:
            if c.split("x")[0] != part[3:]: continue
            a = draw(*CELLS[c]); o = K.kda_prefill(**{**a,"state":a["state"].clone()})
            t=time.time(); f = chunk_kda(**a); r = f(); torch.cuda.synchronize()
            print(c, "fla vs ours", measure(r[0][0].flatten(1), o.double().flatten(1)).rms_ulps, f"{time.time()-t:.0f}s", flush=True)
            del f, r, a, o
    else:
        n, k = (int(x) for x in part.split("/"))
        for v in list(VAR)[n::k]:
            try:
                a = draw(6,(0,1024)); t=time.time(); o = call(a, v)(); torch.cuda.synchronize()
                a = draw(96,(0,1024)); o = call(a, v)(); torch.cuda.synchronize()
                print("warm", v, f"{time.time()-t:.0f}s", flush=True)
            except Exception as e: print("FAIL", v, str(e)[-200:], flush=True)
def stages(a, tag):
    """Seconds of each launch from one eager run under events is noisy: profile with the torch profiler."""
    from torch.profiler import profile, ProfilerActivity
    c = call(a, "base"); c(); torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(3): c()
        torch.cuda.synchronize()
    print(tag, {e.key: round(e.self_device_time_total/3,1) for e in p.key_averages() if e.self_device_time_total>0}, flush=True)
def timeit():
    print("copy", copy_bandwidth(1<<30, device="cuda")/1e9)
    for c in ("96x8x1024","96x8192","6x65536","12x65536","96x65536","12x8192","6x8192","6x1024"):
        t0=time.time()
        a = draw(*CELLS[c]); works = {}
        for v in vars_of(c):
            try: works[v] = in_graph([call(a, v)]*2)
            except Exception as e: print(c, v, "FAIL", str(e)[-200:])
        for n, f in (("fla", chunk_kda), ("flash", flash_kda)):
            try: works[n] = in_graph([f(**a)]*2)
            except Exception as e: print(c, n, "FAIL", type(e), str(e)[-300:])
        t = interleave(works, rounds=5 if "65536" in c else 7, device="cuda")
        print(c, ", ".join(f"{n} {x.per(2).median_us:.0f}" for n, x in t.items()), f"[{time.time()-t0:.1f}s]", flush=True)
        if c in ("96x8x1024","6x65536"):
            try: stages(a, c)
            except Exception as e: print("profiler", e)
        del works, a; torch.cuda.empty_cache()
if sys.argv[1] == "warm": warm(sys.argv[2])
else: timeit()
