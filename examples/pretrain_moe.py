"""Pretrain a mixture of experts in DeepSeek's shape: ``pretrain_gpt.py`` with other defaults.

    torchrun --nproc-per-node 2 examples/pretrain_moe.py --mock-data --expert-model-parallel-size 2

The first layer is dense; in the others a sigmoid router with a bias for each expert picks experts from the
best groups, beside a shared one. Attention is multi-latent, with ``--group-query-attention`` grouped (which
the local spec needs). The size is a toy's. A flag on the command line wins over its default, and
``--no-NAME`` turns off a switch NAME that is on below. DeepSeek-V2-Lite, 15.7 billion parameters:

    attention   --hidden-size 2048 --num-attention-heads 16 --kv-lora-rank 512 --qk-head-dim 128
                --qk-pos-emb-head-dim 64 --v-head-dim 128 --seq-length 4096 --max-position-embeddings 4096
    layers      --num-layers 27 --moe-layer-freq "([0]+[1]*26)" --ffn-hidden-size 10944
    experts     --num-experts 64 --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816
    router      --moe-router-topk 6 --moe-router-num-groups 1 --moe-router-group-topk 1
                --moe-router-score-function softmax --moe-router-pre-softmax
                --moe-router-topk-scaling-factor 1 --no-moe-router-enable-expert-bias
                --moe-aux-loss-coeff 1e-3
    tokens      --tokenizer-type HuggingFaceTokenizer --tokenizer-model deepseek-ai/DeepSeek-V2-Lite
                --vocab-size 102400
"""

import accel.megatron_adaptor  # noqa: F401  (the one line)

# isort: split
import sys

import pretrain_gpt

TOY = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    # experts
    "num_experts": 16,
    "moe_layer_freq": "([0]+[1]*3)",
    "moe_ffn_hidden_size": 32,
    "moe_grouped_gemm": True,
    "moe_permute_fusion": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_shared_expert_intermediate_size": 32,
    "moe_shared_expert_overlap": True,
    # router
    "moe_router_topk": 4,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_dtype": "fp32",
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 1e-3,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-4,
    # training
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 255,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 10,
    "lr": 3e-3,
    "lr_decay_style": "constant",
    "log_interval": 1,
    "eval_interval": 1000,  # divided by even without evaluation
    "eval_iters": 0,
}
LATENT = {
    "multi_latent_attention": True,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "qk_layernorm": True,
    "rope_type": "rope",
}
GROUPED = {"num_query_groups": 2}


def with_defaults(parser):
    """Megatron's parser with the toy's defaults."""
    attention = GROUPED if "--group-query-attention" in sys.argv else LATENT
    return pretrain_gpt.set_defaults(parser, TOY | attention)


if __name__ == "__main__":
    pretrain_gpt.main(with_defaults)
