"""RMSNorm on Ascend."""

import pytest

from tests.npu.harness import OnNpu, npu_kernels
from tests.ops import test_rms_norm
from tests.ops.contract import LAYOUTS, change_layout
from tests.ops.norm_contract import DTYPES

__all__ = ["npu_kernels"]


class TestRmsNorm(OnNpu, test_rms_norm.TestRmsNorm):
    uses = ("npu_rms_norm", "npu_rms_norm_backward")

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("dtypes", DTYPES, ids=str)
    def test_matches_reference(self, dtypes, layout):
        for shape in ((6, 3, 43), (1, 7), (5, 1), (0, 4), (8,)):
            inputs = self.norm_inputs(shape, dtypes, zero_centered=shape[0] % 2 == 0)
            x, *vectors = inputs.tensors
            self.check(inputs._replace(tensors=[change_layout(x, layout), *vectors]))
