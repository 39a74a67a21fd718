"""mlx-lm on a CPU, for convert_oracle.py: the logits of every position of some prompts, in fp32.

    python benchmarks/mlx_logits.py MODEL PROMPTS.json OUT.npy

Runs in an environment with mlx-lm and without Tercel.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.utils import load_model


def to_fp32(array):
    return array.astype(mx.float32) if array.dtype in (mx.bfloat16, mx.float16) else array


def main() -> None:
    mx.set_default_device(mx.cpu)
    model, _ = load_model(Path(sys.argv[1]))
    model.update(tree_map(to_fp32, model.parameters()))
    prompts = mx.array(json.loads(Path(sys.argv[2]).read_text()))
    np.save(sys.argv[3], np.asarray(model(prompts).astype(mx.float32)))


if __name__ == "__main__":
    main()
