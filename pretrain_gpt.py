"""Pretrains a GPT (dense, MoE, MLA, DSA, MTP) with Megatron-LM's own training loop.

    torchrun --nproc-per-node 2 pretrain_gpt.py --pipeline-model-parallel-size 2 ...

Takes every flag of Megatron-LM, and the fork's own; runs on GPUs over NCCL, or on the CPU over gloo.
"""

import sys
from functools import partial

import megatron.overlay

megatron.overlay.install(megatron.overlay.device_argument(sys.argv[1:]))

import torch  # noqa: E402

from megatron.core import mpu  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import (  # noqa: E402
    BlendedMegatronDatasetBuilder,
)
from megatron.core.datasets.gpt_dataset import (  # noqa: E402
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
)
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.rerun_state_machine import get_rerun_state_machine  # noqa: E402
from megatron.core.transformer.multi_token_prediction import (  # noqa: E402
    get_mtp_ranks,
    mtp_on_this_rank,
)
from megatron.core.transformer.pipeline_parallel_layer_layout import (  # noqa: E402
    PipelineParallelLayerLayout,
)
from megatron.core.utils import (  # noqa: E402
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import (  # noqa: E402
    get_args,
    get_timers,
    get_tokenizer,
    inprocess_restart,
    pretrain,
)
from megatron.training.argument_utils import (  # noqa: E402
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args  # noqa: E402
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig  # noqa: E402
from megatron.training.training import stimer, update_seqlen_stats_from_cu_seqlens  # noqa: E402
from megatron.training.utils import (  # noqa: E402
    get_blend_and_blend_per_split,
    is_first_or_last_pipeline_stage,
    print_rank_0,
)

BATCH_KEYS = (
    "tokens labels loss_mask position_ids attention_mask cu_seqlens cu_seqlens_padded max_seqlen "
    "local_cp_size hybrid_cp_group"
).split()
SPIKY_LOSS_FACTOR = 10.0


def get_batch(data_iterator, vp_stage=None):
    """The next microbatch, as this rank's model chunk needs it.

    Returns:
        dict of BATCH_KEYS; ``tokens``, ``labels``, ``loss_mask``, ``position_ids`` are [b, s / cp] or None.
        Packed documents are flattened to b = 1, with ``cu_seqlens`` int32 [1, documents + 1] on every
        pipeline stage.
    """
    args = get_args()
    packed = args.dataloader_inter_document_masking
    first = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    mtp = _mtp_on_this_rank(vp_stage)
    if not (first or last or mtp or packed):
        return dict.fromkeys(BATCH_KEYS)
    batch = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        sample = next(data_iterator)
        for key in BATCH_KEYS:
            value = sample.get(key)
            batch[key] = value if value is None else value.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=packed,
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=first,
        is_pipeline_last_stage=last,
    )
    return get_batch_on_this_cp_rank(
        flatten_batch_for_packed_sequences(batch),
        is_hybrid_cp=args.hybrid_context_parallel,
        cp_group=mpu.get_context_parallel_group(),
        hybrid_cp_group_func=mpu.get_hybrid_data_context_parallel_groups,
    )


def packed_seq_params_of(batch):
    """PackedSeqParams of a packed microbatch, its q and kv fields one tensor; None if it is not packed."""
    if batch["cu_seqlens"] is None:
        return None
    cu_seqlens = batch["cu_seqlens"].squeeze(0)
    max_seqlen = int(batch["max_seqlen"])
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
    )


def loss_func(loss_mask, output_tensor):
    """Sums the per-token losses that ``loss_mask`` keeps.

    Args:
        loss_mask: float [b, s / cp].
        output_tensor: float [b, s / cp], the model's per-token losses.

    Returns:
        the sum (scalar), the number of tokens (int scalar), and what the training loop logs.
    """
    args = get_args()
    loss_mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * loss_mask)
    num_tokens = loss_mask.sum().detach().to(torch.int)
    rerun = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for reject, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            rerun.validate_result(
                result=loss,
                rejection_func=reject,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        rerun.validate_result(
            result=loss,
            rejection_func=partial(
                rerun.is_unexpectedly_large, threshold=SPIKY_LOSS_FACTOR, context="loss"
            ),
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )
    report = torch.cat([loss.detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def forward_step(data_iterator, model, return_schedule_plan=False):
    """One microbatch through ``model``: its output, and the function that makes a loss of it."""
    args, timers = get_args(), get_timers()
    timers("batch-generator", log_level=2).start()
    with stimer(bdata=True):
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    packed_seq_params = packed_seq_params_of(batch)
    if packed_seq_params is not None:
        update_seqlen_stats_from_cu_seqlens(packed_seq_params.cu_seqlens_q)
    timers("batch-generator").stop()
    run = model
    if return_schedule_plan:
        if not args.overlap_moe_expert_parallel_comm:
            raise ValueError(
                "overlap_moe_expert_parallel_comm=False: a schedule plan is only for expert-parallel "
                "overlap; set --overlap-moe-expert-parallel-comm"
            )
        run = get_attr_wrapped_model(model, "build_schedule_plan")
    with stimer:
        output = run(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
            packed_seq_params=packed_seq_params,
        )
    return output, partial(loss_func, batch["loss_mask"])


def train_valid_test_datasets_provider(train_val_test_num_samples, vp_stage=None):
    """Builds the training, validation and test datasets: mock data, or indexed data blended and split."""
    args = get_args()
    tokenizer = get_tokenizer()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    settings = dict(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
        hybrid_context_parallel=args.hybrid_context_parallel,
        inter_document_masking=args.dataloader_inter_document_masking,
    )
    config, dataset = GPTDatasetConfig(**settings), GPTDataset
    if args.mock_data:
        dataset = MockGPTDataset
    elif args.fim_data:
        dataset = GPTFIMDataset
        extra_tokens = {
            name: getattr(args, f"fim_{name}_token")
            for name in ("prefix", "middle", "suffix", "pad")
        }
        config = GPTFIMDatasetConfig(
            **settings,
            fim_rate=args.fim_rate,
            fim_spm_rate=args.fim_spm_rate,
            fim_extra_tokens={**extra_tokens, "eod": tokenizer.eod},
            fim_split_sample=args.fim_split_sample,
            fim_fragment_rate=args.fim_fragment_rate,
            fim_no_prefix=args.fim_no_prefix,
        )
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    needed = partial(_is_dataset_built_on_rank, vp_stage=vp_stage)
    return BlendedMegatronDatasetBuilder(
        dataset, train_val_test_num_samples, needed, config
    ).build()


# Every pipeline stage builds its own: the training loop asks for this attribute.
setattr(train_valid_test_datasets_provider, "is_distributed", True)


def _is_dataset_built_on_rank(vp_stage=None):
    args = get_args()
    return mpu.get_tensor_model_parallel_rank() == 0 and (
        args.dataloader_inter_document_masking
        or is_first_or_last_pipeline_stage(vp_stage)
        or _mtp_on_this_rank(vp_stage)
    )


def _mtp_on_this_rank(vp_stage):
    args = get_args()
    layout = args.pipeline_model_parallel_layout
    if layout is not None:  # still as it was given; parsed once
        layout = PipelineParallelLayerLayout.from_str(layout, args.pipeline_model_parallel_size)
    return mtp_on_this_rank(
        layout=layout, mtp_num_layers=args.mtp_num_layers, ignore_virtual=False, vp_stage=vp_stage
    )


def embedding_ranks(pp_ranks, config, tied):
    """The ranks of a pipeline that hold the word embedding and sum its gradients.

    Args:
        pp_ranks: global ranks, in the pipeline's order.
        config: TransformerConfig, which says where multi-token prediction lies.
        tied: whether the output layer shares the embedding.
    """
    if config.mtp_num_layers is None:
        return mpu.default_embedding_ranks(pp_ranks)
    last = [pp_ranks[-1]] if tied else []
    return sorted({pp_ranks[0], *last, *get_mtp_ranks(pp_ranks, config)})


def main():
    """Parses the command line and trains."""
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    check_arguments(args)
    model_config = gpt_config_from_args(args)
    if args.dataloader_inter_document_masking and args.micro_batch_size > 1:
        # A packed microbatch travels as [b * s, 1, h], and stock pipelines expect [s, b, h]: let the
        # stages tell each other. Set here, for the config's own check refuses more than it must.
        model_config.transformer.variable_seq_lengths = True
    run, store = pretrain, None
    if args.inprocess_restart:
        run, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    run(
        pretrain_cfg_container_from_args(args, model_config),
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=partial(
            embedding_ranks,
            config=model_config.transformer,
            tied=not args.untie_embeddings_and_output_weights,
        ),
        store=store,
    )


def check_arguments(args):
    """Raises ValueError for a flag that is missing, or whose data path this script does not have."""
    if args.eval_interval is None:
        raise ValueError(
            "--eval-interval is not given, and stock has no default for it: pass the number of iterations "
            "between evaluations, also with --eval-iters 0"
        )
    if args.sft:
        raise ValueError(
            "--sft: conversations are not read by pretrain_gpt.py; expected indexed or mock data. "
            "Tokenize them with tools/preprocess_data.py"
        )
    if args.dataloader_inter_document_masking and args.context_parallel_size > 1:
        raise ValueError(
            f"--context-parallel-size {args.context_parallel_size} with "
            "--dataloader-inter-document-masking: documents are not padded to a multiple of "
            f"{2 * args.context_parallel_size} tokens, as splitting them needs. Drop one of the two flags."
        )
    for name in ("sequence_packing_scheduler", "thd_max_packed_sequences"):
        value = getattr(args, name, None)  # the script also runs on the bare wheel
        if value is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} {value}: pretrain_gpt.py has no data path that schedules sequences "
                "into packs; expected the flag unset. Drop it, or use --dataloader-inter-document-masking to "
                "keep packed documents apart"
            )


if __name__ == "__main__":
    main()
