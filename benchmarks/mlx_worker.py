"""mlx-lm on a CPU, for cpu_throughput.py: prompts in, times and tokens out, a JSON line each.

Runs in an environment with mlx-lm and without Tercel. The first line out says which versions.
"""

import importlib.metadata
import json
import sys
import time
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.utils import load_model


def to_fp32(array):
    return array.astype(mx.float32) if array.dtype in (mx.bfloat16, mx.float16) else array


def run(model, prompts: list[list[int]], new_tokens: int) -> dict:
    cache = model.make_cache()
    start = time.perf_counter()
    token = mx.argmax(model(mx.array(prompts), cache=cache)[:, -1:], axis=-1)
    mx.eval(token)
    prefilled = time.perf_counter()
    tokens = [token]
    for _ in range(new_tokens - 1):
        token = mx.argmax(model(token, cache=cache), axis=-1)
        mx.eval(token)
        tokens.append(token)
    end = time.perf_counter()
    return {
        "prefill_s": prefilled - start,
        "decode_s": end - prefilled,
        "tokens": mx.concatenate(tokens, axis=1).tolist(),
    }


def main() -> None:
    mx.set_default_device(mx.cpu)
    model, _ = load_model(Path(sys.argv[1]))
    model.update(tree_map(to_fp32, model.parameters()))
    mx.eval(model.parameters())
    versions = {name: importlib.metadata.version(name) for name in ("mlx-lm", "mlx")}
    print(json.dumps(versions), flush=True)
    for line in sys.stdin:
        prompts, new_tokens = json.loads(line)
        print(json.dumps(run(model, prompts, new_tokens)), flush=True)


if __name__ == "__main__":
    main()
