"""The router on Ascend."""

import pytest
import torch

from tests.npu.harness import OnNpu, calls_of, npu_kernels
from tests.ops import test_topk_router

__all__ = ["npu_kernels"]

GATING, AFTER = {"npu_moe_gating_top_k"}, {"npu_moe_gating_top_k_softmax_v2"}
SIGMOID = {"topk": 4, "score_function": "sigmoid"}
CALLS = [
    ({"topk": 4}, AFTER),
    ({"topk": 4, "use_pre_softmax": True}, GATING),
    (SIGMOID, GATING),
    (SIGMOID | {"num_groups": 4, "group_topk": 2, "scaling_factor": 2.5}, GATING),
    (SIGMOID | {"num_groups": 4, "group_topk": 4}, GATING),
    (SIGMOID | {"num_groups": 4, "group_topk": 1}, set()),  # worth the best four
    (SIGMOID | {"num_groups": 12, "group_topk": 2}, set()),  # groups of two
    (SIGMOID | {"topk": 1}, set()),  # not divided by the sum
    (SIGMOID | {"score_function": "sqrtsoftplus"}, set()),
    ({"topk": 4, "num_groups": 4, "group_topk": 2}, set()),
]


class TestTopkRouter(OnNpu, test_topk_router.TestTopkRouter):
    uses = ("npu_moe_gating_top_k_softmax_v2",)

    def uses_inputs(self):
        return self.router_inputs((7, 24), torch.bfloat16, CALLS[0][0])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize(("options", "calls"), CALLS, ids=str)
    def test_every_choice(self, options, calls, dtype):
        inputs = self.router_inputs((7, 24), dtype, options)
        self.check(inputs)
        assert calls_of(self.op, inputs) == calls

    def test_two_experts_are_too_few_for_the_op(self):
        inputs = self.router_inputs((5, 2), torch.float32, SIGMOID | {"topk": 2})
        self.check(inputs)
        assert not calls_of(self.op, inputs)


class TestMoeAuxScores(OnNpu, test_topk_router.TestMoeAuxScores):
    uses = ()
