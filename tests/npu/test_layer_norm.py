"""LayerNorm on Ascend."""

import pytest

from tests.npu.harness import OnNpu, npu_kernels
from tests.ops import test_layer_norm
from tests.ops.contract import LAYOUTS, change_layout
from tests.ops.norm_contract import DTYPES

__all__ = ["npu_kernels"]


class TestLayerNorm(OnNpu, test_layer_norm.TestLayerNorm):
    uses = ()

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("dtypes", DTYPES, ids=str)
    def test_matches_reference(self, dtypes, layout):
        for shape in ((6, 3, 43), (1, 7), (5, 1), (0, 4), (8,)):
            inputs = self.norm_inputs(shape, dtypes, zero_centered=shape[0] % 2 == 0)
            x, *vectors = inputs.tensors
            self.check(inputs._replace(tensors=[change_layout(x, layout), *vectors]))
