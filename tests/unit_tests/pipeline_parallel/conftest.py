"""What the tests of prewarm share."""

import pytest


@pytest.fixture
def fresh_process(single_rank):
    """What passes leave in the process is as at its start, before and after the test."""
    import torch

    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        PipelineOffloadManager,
    )
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import hadamard
    from megatron.core.transformer.cuda_graphs import _CudagraphGlobalRecord
    from megatron.core.transformer.experimental_attention_variant.dsa import (
        DSAIndexerLossAutoScaler,
        DSAIndexerLossLoggingHelper,
    )
    from megatron.core.transformer.moe import moe_logging
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, RandomSTEShared
    from megatron.core.transformer.moe.paged_stash import PagedStashManager
    from megatron.core.transformer.moe.router_replay import RouterReplay
    from megatron.core.transformer.multi_token_prediction import (
        MTPLossAutoScaler,
        MTPLossLoggingHelper,
    )

    def reset():
        random.model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
        moe_logging.destroy_moe_metrics_tracker()
        for tracker in (DSAIndexerLossLoggingHelper.tracker, MTPLossLoggingHelper.tracker):
            tracker.clear()
        MoEAuxLossAutoScaler.main_loss_backward_scale = None
        DSAIndexerLossAutoScaler.main_loss_backward_scale = None
        MTPLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0)
        RandomSTEShared._cache.clear()
        RouterReplay.clear_global_router_replay_instances()
        PipelineOffloadManager.OFFLOAD_MGR = None
        PagedStashManager.STASH_MGR = None
        parallel_state.get_global_memory_buffer().buffer.clear()
        for function in (
            RotaryEmbedding.forward,
            YarnRotaryEmbedding.forward,
            hadamard._report_fallback,
        ):
            function.cache_clear()
        _CudagraphGlobalRecord._disable_saved_tensors_observer()
        _CudagraphGlobalRecord.cudagraph_record.clear()
        random._unset_checkpointing()

    reset()
    yield
    reset()
