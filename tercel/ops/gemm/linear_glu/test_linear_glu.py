from tercel.ops.gemm.linear_glu import linear_glu
from tests.gated_products import GatedProduct


class TestLinearGlu(GatedProduct):
    op = linear_glu
