"""Op tests run Triton kernels interpreted where there is no GPU."""

from tests.interpreter import enable

enable()
