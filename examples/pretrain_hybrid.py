"""Pretrain a hybrid of Mamba-2 layers and attention: ``pretrain_gpt.py`` with another model.

    torchrun --nproc-per-node 2 examples/pretrain_hybrid.py --mock-data --tensor-model-parallel-size 2
    --sequence-parallel

Needs no ``mamba-ssm``. In ``--hybrid-layer-pattern`` M is a Mamba layer, * attention, - an MLP, E a mixture
of experts, and | ends a pipeline stage. The size is a toy's; a flag on the command line wins over its
default, and ``--no-NAME`` turns off a switch NAME that is on below. Nemotron-H-8B, as far as its layers go:

    --hybrid-layer-pattern M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-
    --hidden-size 4096 --ffn-hidden-size 21504 --num-attention-heads 32 --num-query-groups 8 --kv-channels 128
    --mamba-num-heads 128 --mamba-head-dim 64 --mamba-num-groups 8 --mamba-state-dim 128
    --seq-length 8192 --max-position-embeddings 8192
"""

import accel.megatron_adaptor  # noqa: F401  (the one line)

# isort: split
import pretrain_gpt
from megatron.training.argument_utils import hybrid_config_from_args

TOY = {
    "hybrid_layer_pattern": "M-M*M-M*",
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_num_groups": 2,
    "mamba_state_dim": 16,
    "normalization": "RMSNorm",
    "squared_relu": True,
    "add_bias_linear": False,
    "position_embedding_type": "none",
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    # training
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 255,
    "seq_length": 96,
    "max_position_embeddings": 96,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 10,
    "lr": 3e-3,
    "lr_decay_style": "constant",
    "log_interval": 1,
    "eval_interval": 1000,  # divided by even without evaluation
    "eval_iters": 0,
}


def with_defaults(parser):
    """Megatron's parser with the toy's defaults."""
    return pretrain_gpt.set_defaults(parser, TOY)


if __name__ == "__main__":
    pretrain_gpt.main(with_defaults, hybrid_config_from_args)
