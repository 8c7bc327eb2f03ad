"""Pretrain a GPT: an ordinary Megatron-LM (0.19) script whose only unusual line is the first
import.

    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --tensor-model-parallel-size 2
    --sequence-parallel ...

Takes every flag of Megatron-LM but those of ``OTHER_DATA``, which need other batches: an error. Data:
``--mock-data``, or ``--data-path PREFIX`` with a tokenizer.
"""

import accel.megatron_adaptor  # noqa: F401  (the one line)

# isort: split
import json
from functools import partial
from pathlib import Path

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    StragglerDetector,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, pretrain, print_rank_0
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

stimer = StragglerDetector()
BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
OTHER_DATA = ("sft", "fim_data", "dataloader_inter_document_masking", "hybrid_context_parallel")
"""Switches that Megatron's own ``pretrain_gpt.py`` has other datasets and packed batches for."""


def get_batch(data_iterator, vp_stage):
    """The micro-batch of this rank: read on the first rank of the tensor-parallel group, broadcast
    to the others."""
    args = get_args()
    on_mtp_rank = has_mtp_layer(vp_stage)
    if not is_first_or_last_pipeline_stage(vp_stage) and not on_mtp_rank:
        return dict.fromkeys(BATCH_KEYS)
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch = {}
    if tp_rank == 0:
        batch = {
            k: v.cuda(non_blocking=True) for k, v in next(data_iterator).items() if k in BATCH_KEYS
        }
        batch = {k: batch.get(k) for k in BATCH_KEYS}
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=on_mtp_rank,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=False,
        cp_group=mpu.get_context_parallel_group(),
        hybrid_cp_group_func=mpu.get_hybrid_data_context_parallel_groups,
        use_per_sequence_balancing=False,
    )


def has_mtp_layer(vp_stage):
    """Whether this stage predicts further tokens (``--mtp-num-layers``) and therefore needs the data."""
    config = core_transformer_config_from_args(get_args())
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def get_embedding_ranks(pp_ranks):
    """Pipeline ranks that hold the word embedding: the first, the last if it is tied, those with MTP."""
    args = get_args()
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        ranks.update(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)


def loss_func(loss_mask, losses):
    """Summed loss, number of tokens, and what is logged."""
    loss_mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * loss_mask)
    num_tokens = loss_mask.sum().clone().detach().to(torch.int)
    return (
        loss,
        num_tokens,
        {"lm loss": torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])},
    )


def forward_step(data_iterator, model, return_schedule_plan=False):
    """One micro-batch through the model, or with ``--overlap-moe-expert-parallel-comm`` the plan of
    its steps; Megatron calls the returned function on the last pipeline stage."""
    with stimer(bdata=True):
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    with stimer:
        output = (model.build_schedule_plan if return_schedule_plan else model)(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )
    return output, partial(loss_func, batch["loss_mask"])


def is_dataset_built_on_rank(vp_stage=None):
    has_data = is_first_or_last_pipeline_stage(vp_stage) or has_mtp_layer(vp_stage)
    return mpu.get_tensor_model_parallel_rank() == 0 and has_data


def train_valid_test_datasets_provider(train_val_test_num_samples, vp_stage=None):
    """Train, validation and test datasets with the given numbers of samples."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sizes = args.per_dataset_sequences_path
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        object_storage_cache_path=args.object_storage_cache_path,
        sequences_per_dataset=None if sizes is None else json.loads(Path(sizes).read_text()),
    )
    dataset = MockGPTDataset if args.mock_data else GPTDataset
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    is_built = partial(is_dataset_built_on_rank, vp_stage=vp_stage)
    return BlendedMegatronDatasetBuilder(
        dataset, train_val_test_num_samples, is_built, config
    ).build()


train_valid_test_datasets_provider.is_distributed = True


def set_defaults(parser, defaults):
    """Megatron's parser with other defaults, and a ``--no-NAME`` for each switch that is on."""
    parser.set_defaults(**defaults)
    for name, value in defaults.items():
        if value is True:
            parser.add_argument("--no-" + name.replace("_", "-"), dest=name, action="store_false")
    return parser


def main(extra_args_provider=None, model_config_from_args=gpt_config_from_args):
    """Train; ``extra_args_provider(parser)`` may add flags to Megatron's parser and set defaults."""
    args = parse_and_validate_args(
        extra_args_provider, args_defaults={"tokenizer_type": "GPT2BPETokenizer"}
    )
    if given := [name for name in OTHER_DATA if getattr(args, name, False)]:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise SystemExit(
            f"{flags}: this example has no such data; Megatron-LM's pretrain_gpt.py does"
        )
    pretrain(
        pretrain_cfg_container_from_args(args, model_config_from_args(args)),
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=get_embedding_ranks,
    )


if __name__ == "__main__":
    main()
