"""The vision tower and projector of a published K3 checkpoint, which are counted, not loaded."""

from collections.abc import Iterator, Mapping
from typing import Any

from tercel.weights.rows import Source


def vision_sources(vision: Mapping[str, Any] | None) -> Iterator[tuple[str, Source]]:
    """(part, tensor) for a config's `vision_config`; nothing where there is none."""
    if not vision:
        return
    for key, *shape in _tower(vision):
        yield "vision tower", Source(f"vision_tower.{key}.weight", tuple(shape), "BF16")
    for key, *shape in _projector(vision):
        yield "vision projector", Source(f"mm_projector.{key}.weight", tuple(shape), "BF16")


def _tower(vision: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    size, qkv, mlp = (
        vision[key] for key in ("vt_hidden_size", "qkv_hidden_size", "vt_intermediate_size")
    )
    patch = vision["patch_size"]
    yield "patch_embed.proj", size, 3, patch, patch
    grid = (vision[f"init_pos_emb_{side}"] for side in ("height", "width"))
    yield "patch_embed.pos_emb", *grid, size
    for block in range(vision["vt_num_hidden_layers"]):
        at = f"encoder.blocks.{block}"
        yield f"{at}.norm0", size
        yield f"{at}.norm1", size
        yield f"{at}.wqkv", 3 * qkv, size
        yield f"{at}.wo", size, qkv
        yield f"{at}.mlp.fc0", mlp, size
        yield f"{at}.mlp.fc1", size, mlp
    yield "encoder.final_layernorm", size


def _projector(vision: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    rows, columns = vision["merge_kernel_size"]
    merged, text = vision["mm_hidden_size"] * rows * columns, vision["text_hidden_size"]
    yield "proj.0", merged, merged
    yield "proj.2", text, merged
    yield "post_norm", text
