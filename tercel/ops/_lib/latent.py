"""Cached MLA entries: how contracts name them, and their FP8 form.

An FP8 cache stores e4m3 codes of value / page_scale, one fp32 scale for all pages of a layer.
"""

from collections.abc import Mapping, Sequence

import torch

from tercel.contract import Arg, Cell
from tercel.contract.contract import InputMaker
from tercel.ops._lib.dtypes import wide
from tercel.ops._lib.pools import draw_pages

AXES = {
    "L": "kv_lora_rank",
    "E": "an entry of the cache: kv_lora_rank + qk_rope_head_dim",
    "PS": "tokens of a page",
    "PAGES": "pages of the pool; page 0 is the sink",
}
PAGE_SCALE = Arg("1", "f32", optional=True)
SCALED = "(page_scale is None) == (pages.itemsize > 1)"
"""The condition that FP8 pages, and only they, have a scale."""
LARGEST = 448.0
"""Of e4m3."""
DISTINCT = 509
"""Pages of a cell that differ; a larger pool repeats them."""


def page_dtype(cell: Cell) -> str:
    """Name of the pages' dtype in a cell."""
    return "e4m3" if cell.get("fp8") else "act"


def draw_page_scale(cell: Cell, make: InputMaker) -> torch.Tensor | None:
    """A scale that is no power of two, where the cell's pages are FP8."""
    return make.uniform(1, low=0.02, high=0.03, dtype="f32") if cell.get("fp8") else None


def draw_cache(
    cell: Cell, make: InputMaker, lengths: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages [PAGES, PS, E] of a cell and the block table of rows of these lengths, as
    `draw_pages` gives them."""
    count, dtype = cell["PAGES"], page_dtype(cell)
    scale = 40.0 if cell.get("fp8") else 1.0
    pages = make.normal(min(count, DISTINCT), cell["PS"], cell["E"], scale=scale, dtype=dtype)
    if count > DISTINCT:
        pages = pages[torch.arange(count, device=pages.device) % DISTINCT]
    return draw_pages(make, lengths, pages, dtype)


def whole_tiles(sizes: Mapping[str, int]) -> str | None:
    """Why a kernel that reads an entry as tiles of powers of two does not serve these sizes."""
    latent, key, page = sizes["L"], sizes["E"] - sizes["L"], sizes["PS"]
    if min(latent, key) < 16 or latent & (latent - 1) or key & (key - 1):
        return f"entries of {latent} + {key}: both must be powers of two from 16 on"
    return f"pages of {page} tokens: must be a multiple of 16" if page % 16 else None


def stored(
    rows: torch.Tensor, pages: torch.Tensor, page_scale: torch.Tensor | None
) -> torch.Tensor:
    """Rows as `pages` keep them: as they are, or codes, to nearest, ties to even, saturated."""
    if page_scale is None:
        return rows
    codes = (wide(rows) / page_scale).clamp(-LARGEST, LARGEST)
    return codes.to(torch.float8_e4m3fn).to(pages.dtype)


def loaded(
    entries: torch.Tensor, dtype: torch.dtype, page_scale: torch.Tensor | None
) -> torch.Tensor:
    """Values of cached entries in `dtype`, which is fp32 or wider where there is a scale."""
    values = entries.to(dtype)
    return values if page_scale is None else values * page_scale
