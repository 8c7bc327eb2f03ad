"""The router's Triton kernels: the contract, ties, and what a warp's tile does not divide into."""

import pytest
import torch
from torch import Tensor

from accel._triton import topk_router as kernels
from accel.ops import moe_aux_scores, topk_router
from accel.ops.topk_router import SCORE_FUNCTIONS, moe_aux_scores_ref, topk_router_ref
from tests.ops import test_topk_router
from tests.ops.contract import Inputs
from tests.triton.harness import HAS_GPU, OnTriton, on_device

route = on_device(topk_router)
aux_scores = on_device(moe_aux_scores)


def first_of_the_largest(values: Tensor, k: int) -> Tensor:
    """bool [T, E]: the k largest; of equal ones the first, NaN above all: what CUDA's topk chooses."""
    order = values.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return torch.zeros_like(values, dtype=torch.bool).scatter(1, order, True)


class TestTopkRouter(OnTriton, test_topk_router.TestTopkRouter):
    def opchecks(self):
        """Sigmoid with groups and a bias: each takes seconds."""
        return list(super().opchecks())[8:10]

    @pytest.mark.parametrize("score", SCORE_FUNCTIONS)
    @pytest.mark.parametrize("shape", [(5, 1), (3, 67), (17, 7), (1, 512)], ids=str)
    def test_ragged_tiles(self, shape, score):
        for pre in (False, True):
            topk = min(16 if shape[1] > 100 else 3, shape[1])
            options = {"topk": topk, "score_function": score, "use_pre_softmax": pre}
            self.check(self.router_inputs(shape, torch.float32, options))

    @pytest.mark.parametrize("options", test_topk_router.OPTIONS[2:5:2], ids=str)
    @pytest.mark.parametrize("tile", [8, 2048])
    def test_tiles_of_any_size(self, options, tile, monkeypatch):
        """From one row in several warps to more rows than there are."""
        monkeypatch.setattr(kernels, "TILE", tile)
        self.check(self.router_inputs((7, 24), torch.bfloat16, options))

    def test_transposed_logits_and_strided_bias(self):
        inputs = self.router_inputs((6, 24), torch.float32, test_topk_router.OPTIONS[4])
        logits, bias = inputs.tensors
        bias = torch.stack([bias, bias], dim=1)[:, 0]
        self.check(inputs._replace(tensors=[logits.T.contiguous().T, bias]))

    def test_no_tokens(self):
        self.check(self.router_inputs((0, 8), torch.float32, {"topk": 2}))


class TestMoeAuxScores(OnTriton, test_topk_router.TestMoeAuxScores):
    @pytest.mark.parametrize("shape", [(5, 1), (3, 67)], ids=str)
    def test_ragged_tiles(self, shape):
        logits = TestTopkRouter().router_inputs(shape, torch.float32, {}).tensors[0]
        for score in SCORE_FUNCTIONS:
            self.check(Inputs([logits], {"topk": 1, "score_function": score}))

    def test_no_tokens(self):
        routing_map, scores = aux_scores(torch.empty(0, 8), 2)
        assert routing_map.shape == scores.shape == (0, 8)


@pytest.mark.usefixtures("triton_kernels")
class TestChoice:
    @pytest.mark.parametrize("num_experts", [4, 24, 136])
    @pytest.mark.parametrize("levels", [1, 2, 3])
    def test_the_first_of_equals(self, num_experts, levels):
        generator = torch.Generator().manual_seed(levels)
        logits = torch.randint(levels, (5, num_experts), generator=generator).float()
        for topk in (1, 3):
            want = first_of_the_largest(logits, topk)
            for pre in (False, True):
                assert torch.equal(route(logits, topk, use_pre_softmax=pre)[1], want)
            assert torch.equal(aux_scores(logits, topk)[0], want)

    def test_the_first_of_equal_groups(self):
        logits = torch.zeros(2, 24)
        logits[1, 13] = 1
        got = route(logits, 4, num_groups=6, group_topk=2)[1]
        want = torch.zeros(2, 24, dtype=torch.bool)
        want[0, :4] = True  # groups 0 and 1, the first four of their experts
        want[1, [13, 0, 1, 2]] = True  # group 3 by its expert 13, then group 0
        assert torch.equal(got, want)

    @pytest.mark.skipif(not HAS_GPU, reason="compares with torch.topk on a GPU")
    def test_ties_are_those_of_torch_on_this_device(self):
        generator = torch.Generator().manual_seed(0)
        logits = torch.randint(-2, 3, (64, 256), generator=generator).cuda() * 0.5
        logits[::3] *= -1  # -0 beside 0
        for groups in ({}, {"num_groups": 8, "group_topk": 4}):
            got, want = (f(logits, 8, **groups)[1] for f in (topk_router, topk_router_ref))
            assert torch.equal(got, want)

    def test_zero_is_above_minus_zero(self):
        logits = torch.tensor([[-0.0, -1.0, 0.0, -0.0]])
        assert route(logits, 1)[1].nonzero()[:, 1].tolist() == [2]
        assert route(logits, 2)[1].nonzero()[:, 1].tolist() == [0, 2]

    @pytest.mark.parametrize("score", SCORE_FUNCTIONS)
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_nan_and_inf_stay_visible(self, bad, score):
        logits = torch.randn(4, 19, generator=torch.Generator().manual_seed(0))
        logits[1, 7] = bad
        got, want = (f(logits, 3, score_function=score) for f in (route, topk_router_ref))
        assert torch.equal(got[1], want[1])
        torch.testing.assert_close(got[0], want[0], equal_nan=True)
        logits[1] = bad
        got_map = route(logits, 3, score_function=score)[1]
        assert got_map.sum(1).tolist() == [3] * 4

    @pytest.mark.parametrize("value", [-200.0, -90.0, -20.0, 20.0, 90.0, 200.0])
    @pytest.mark.parametrize("score", SCORE_FUNCTIONS)
    def test_extreme_logits(self, score, value):
        if score == "sqrtsoftplus" and value == -200:
            pytest.skip("the root has no slope at 0: torch spreads the NaN to experts not chosen")
        logits = torch.linspace(0.9, 1.1, 16)[None] * value
        results = []
        for f in (route, topk_router_ref):
            leaf = logits.clone().requires_grad_()
            # All are chosen: some scores are equal, and the CPU's topk chooses others of those.
            probs, _ = f(leaf, 16, score_function=score, use_pre_softmax=True)
            (grad,) = torch.autograd.grad(probs[0, probs[0].argmax()], leaf)
            results.append((probs.detach(), grad))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7, equal_nan=True)

    def test_scores_of_all_experts_match(self):
        logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
        for score in SCORE_FUNCTIONS:
            got, want = (f(logits, 4, score) for f in (aux_scores, moe_aux_scores_ref))
            assert torch.equal(got[0], want[0])
            torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=0)

    @pytest.mark.skipif(HAS_GPU, reason="the raw ops on CPU tensors are the C++ kernels there")
    def test_the_kernels_check_what_they_read(self):
        logits = torch.randn(3, 8)
        ops = torch.ops.accel
        for call, message in (
            (
                lambda: ops.topk_router_fwd(logits, 9, False, 0, 0, 1.0, "softmax", None),
                "topk must be 1 to",
            ),
            (
                lambda: ops.topk_router_fwd(logits, 2, False, 3, 1, 1.0, "softmax", None),
                "do not fit num_groups 3",
            ),
            (
                lambda: ops.topk_router_fwd(logits, 2, False, 0, 0, 1.0, "sigmoid", torch.ones(7)),
                r"expert_bias must have shape \[8\]",
            ),
            (
                lambda: ops.topk_router_bwd(
                    logits[:2], logits, logits.bool(), 2, False, 1.0, "softmax"
                ),
                "dprobs must be torch.float32",
            ),
            (
                lambda: ops.moe_aux_scores_bwd(logits[:2], logits, "softmax"),
                "dscores must be torch.float32",
            ),
            (lambda: ops.moe_aux_scores_fwd(logits, 2, "relu"), "softmax, sigmoid or sqrtsoftplus"),
        ):
            with pytest.raises(ValueError, match=message):
                call()
