import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tercel.contract import Cell
from tercel.contract.check import check_cell, check_control, check_refusal, check_replay
from tercel.contract.draw import Maker, draw
from tercel.ops.attention.mla_decode import mla_decode
from tercel.ops.attention.mla_prefill import CONTRACT, mla_prefill, portable
from tercel.ops.attention.mla_prefill.reference import mla_prefill as naive
from tercel.ops.attention.mla_query_append import mla_query_append
from tests.interpreter import INTERPRETED, REASON
from tests.poison import poisoned_memory

CELL, _, WINDOWS, FP8, _ = CONTRACT.cells
SMALL = Cell(
    "",
    H=2,
    K=16,
    V=24,
    L=32,
    E=40,
    PS=4,
    PAGES=20,
    cu_seqlens=(0, 21, 24),
    context_lens=(9, 30),
    gated=True,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell, dtype):
    """All that lies past the rows' ends is NaN."""
    check_cell(mla_prefill, cell, mla_prefill.portable.name, dtype=dtype)


@pytest.mark.parametrize("window", [1, 4, 12, 1000])
def test_windows_of_any_size(monkeypatch, window):
    monkeypatch.setattr(portable, "WINDOW", window)
    check_cell(mla_prefill, SMALL, mla_prefill.portable.name)


def test_replay():
    check_replay(mla_prefill, SMALL, mla_prefill.portable.name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.update(context_lens=(9,)), "context_lens"),
        (lambda a: a.update(cu_seqlens=(0, 21, 25)), "cu_seqlens"),
        (lambda a: a.update(w_k=a["w_k"][:, 1:]), "K+E-L"),
        (lambda a: a.update(gate=a["gate"][:, 1:]), "H*V"),
        (lambda a: a.update(pages=a["pages"].double()), "pages"),
        (lambda a: a.update(page_scale=torch.ones(1)), "page_scale is None"),
    ],
    ids=["contexts", "bounds", "key width", "gate", "fp64 pages", "a scale"],
)
def test_refuses(change, words):
    assert words in str(check_refusal(mla_prefill, SMALL, mla_prefill.portable.name, change))


def test_validity_sees_a_row_past_its_table():
    a = draw(mla_prefill, SMALL, dtype=torch.float32)
    with pytest.raises(ValueError, match="row 1 is longer than its 36 positions"):
        CONTRACT.valid(**{**a, "context_lens": (9, 34)})


@pytest.mark.parametrize("split", range(1, 21))
def test_a_split_anywhere_changes_nothing(split):
    a = draw(mla_prefill, SMALL, dtype=torch.float32)
    whole = mla_prefill(**a)
    parts = [
        mla_prefill(
            **{
                **a,
                "q": a["q"][start:stop],
                "gate": a["gate"][start:stop],
                "block_table": a["block_table"][:1],
                "cu_seqlens": (0, stop - start),
                "context_lens": (9 + start,),
            }
        )
        for start, stop in ((0, split), (split, 21))
    ]
    torch.testing.assert_close(torch.cat(parts), whole[:21], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("prompt", [1, 7, 8])
def test_prefill_then_decode_is_prefill_of_everything(prompt):
    """With the latents appended on the way; the decode runs two tokens per row."""
    make, heads, tokens = Maker(3, torch.float32), 3, 12
    q, latent = make.normal(tokens, heads * 24), make.normal(tokens, 40)
    kv_norm, kv_b = make.uniform(32, low=0.5, high=1.5), make.normal(heads, 32, 32, scale=0.2)
    w_k, w_v, gate = kv_b[:, :16], kv_b[:, 16:], make.uniform(tokens, heads * 16, low=0, high=1)
    pages, table = make.poison(6, 4, 40), torch.tensor([[5, 2, 4]])
    mapping = (table[0].repeat_interleave(4) * 4) + torch.arange(12) % 4

    def append(start, stop):
        rows = slice(start, stop)
        eps = {"q_eps": 1e-6, "eps": 1e-6}
        own = (latent[rows], kv_norm, w_k, pages, mapping[rows])
        return mla_query_append(q[rows], None, None, *own, **eps)

    def prefill(stop):
        queries, lengths = q[:stop].unflatten(-1, (heads, -1)), (0, stop)
        options = {"cu_seqlens": lengths, "context_lens": (0,), "scale": 0.2}
        return mla_prefill(queries, pages, table, w_k, w_v, gate[:stop], **options)

    append(0, prompt)
    outputs = [prefill(prompt)]
    for start in range(prompt, tokens, 2):
        rows = slice(start, min(start + 2, tokens))
        query = append(rows.start, rows.stop)
        context = torch.tensor([start])
        out = mla_decode(
            query, pages, table, context, w_v, gate[rows], width=query.shape[0], scale=0.2
        )
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs), prefill(tokens), rtol=1e-4, atol=1e-5)


def test_workspace_does_not_grow_with_the_context(tmp_path):
    def peak(context):
        sizes = {**SMALL.sizes, "PS": 64, "PAGES": context // 64 + 3, "gated": False}
        sizes.update(cu_seqlens=(0, 16), context_lens=(context,))
        a = draw(mla_prefill, Cell("", **sizes), dtype=torch.float32)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            mla_prefill(**a)
        trace = tmp_path / f"{context}.json"
        recorded.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
        allocated = [e for e in events if e.get("name") == "[memory]"]
        live, highest = 0, 0
        for event in sorted(allocated, key=lambda e: e["ts"]):
            live += event["args"]["Bytes"]
            highest = max(highest, live)
        return highest

    short, long = peak(1024), peak(16384)
    assert 0 < long <= short * 1.01


def test_control_a_token_does_not_see_itself():
    def broken(*, context_lens, **a):
        return naive(**a, context_lens=tuple(context - 1 for context in context_lens))

    check_control(mla_prefill, SMALL, broken)


def test_control_a_token_sees_the_next():
    def broken(*, context_lens, pages, **a):
        later = tuple(context + 1 for context in context_lens)
        return naive(**a, pages=pages.nan_to_num(), context_lens=later)

    check_control(mla_prefill, SMALL, broken)


def test_control_windows_merged_without_rescaling(monkeypatch):
    class Broken(portable._Softmax):
        def add(self, *args):
            self.most.fill_(-torch.inf)
            super().add(*args)

    monkeypatch.setattr(portable, "_Softmax", Broken)
    monkeypatch.setattr(portable, "WINDOW", 8)
    check_control(mla_prefill, SMALL, portable.mla_prefill)


def test_control_scale_of_the_pages_forgotten_in_the_values():
    def broken(*, page_scale, w_v, **a):
        return naive(**a, page_scale=page_scale, w_v=w_v / float(page_scale))

    check_control(mla_prefill, FP8, broken)


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
class TestTriton:
    """Both launches, interpreted, in blocks of 16 and windows of 32."""

    CODES = Cell("", **{**SMALL.sizes, "cu_seqlens": (0, 18), "context_lens": (31,)}, fp8=True)
    WIDE = Cell("", **{**SMALL.sizes, "K": 24, "V": 16, "L": 40, "E": 52, "gated": False})

    @pytest.fixture(autouse=True)
    def tiny(self, monkeypatch):
        from tercel.ops.attention.mla_prefill import kernel_triton as module

        monkeypatch.setattr(module, "WORKSPACE", 1)
        monkeypatch.setattr(module, "ROWS", 32)
        monkeypatch.setattr(module, "choose", lambda *_: module.Config(16, 16, 4, 1))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("cell", [SMALL, CODES, WIDE], ids=str)
    def test_cells(self, cell, dtype):
        """All that lies past the rows' ends is NaN."""
        check_cell(mla_prefill, cell, "triton", dtype=dtype)

    def test_one_window(self, monkeypatch):
        from tercel.ops.attention.mla_prefill import kernel_triton as module

        monkeypatch.setattr(module, "WORKSPACE", 1 << 20)
        check_cell(mla_prefill, SMALL, "triton")

    def test_scratch_is_not_read_before_it_is_written(self):
        """Fresh memory is NaN."""
        a = draw(mla_prefill, SMALL, dtype=torch.float32)
        with poisoned_memory():
            assert torch.empty(1).isnan()
            assert mla_prefill.using("triton")(**a).isfinite().all()

    def test_bits_repeat_and_sequences_do_not_depend_on_their_neighbours(self):
        a = draw(mla_prefill, SMALL, dtype=torch.bfloat16)
        run = mla_prefill.using("triton")
        before = run(**a)
        assert torch.equal(run(**a), before)
        a["q"][21:] = 7
        assert torch.equal(run(**a)[:21], before[:21])

    def test_replay(self):
        check_replay(mla_prefill, SMALL, "triton")

    def test_control_windows_forget(self, monkeypatch):
        from tercel.ops.attention.mla_prefill import kernel_triton as module

        launch = module._launch_attend

        def broken(q, window, state, *rest):
            if state.total.numel():
                state.total.zero_()
            launch(q, window, state, *rest)

        monkeypatch.setattr(module, "_launch_attend", broken)
        check_control(mla_prefill, SMALL, module.mla_prefill)
