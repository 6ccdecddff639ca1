"""Layer of megatron/core/model_parallel_config.py.

Same as upstream but for:
- ModelParallelConfig: two fields that describe packed (THD) microbatches, of which the argument factory makes
  --sequence-packing-scheduler and --thd-max-packed-sequences. Upstream has max_seqlen_per_dp_cp_rank
  only. With both unset nothing changes.
"""

from dataclasses import dataclass
from typing import Literal, Optional

from megatron.overlay import upstream_of

upstream = upstream_of(__name__)


@dataclass
class ModelParallelConfig(upstream.ModelParallelConfig):
    """Base configuration for Megatron Core, with what describes packed microbatches."""

    sequence_packing_scheduler: Optional[Literal["fifo", "best-fit"]] = None
    """How sequences are put into packs of max_seqlen_per_dp_cp_rank * context_parallel_size tokens: in the order
       in which they come (fifo), or each into the pack that it fills best (best-fit); unset, nothing is packed.
    """

    thd_max_packed_sequences: Optional[int] = None
    """The most sequences that one pack holds, which fixes the length of its cu_seqlens; unset counts as 1."""

    def __post_init__(self):
        """As upstream's; then checks the fields of packing.

        Raises:
            ValueError: if a pack has no length, or room for no sequence.
        """
        super().__post_init__()
        scheduler, length = self.sequence_packing_scheduler, self.max_seqlen_per_dp_cp_rank
        if scheduler is not None and (length is None or length <= 0):
            raise ValueError(
                f"max_seqlen_per_dp_cp_rank={length} with sequence_packing_scheduler={scheduler!r}: expected a "
                "positive number of tokens, each rank's share of a pack. Set --max-seqlen-per-dp-cp-rank"
            )
        sequences = self.thd_max_packed_sequences
        if sequences is not None and (type(sequences) is not int or sequences <= 0):
            raise ValueError(
                f"thd_max_packed_sequences={sequences!r}: expected a positive int, the most sequences that one "
                "pack holds. Set --thd-max-packed-sequences to it, or leave it unset for 1"
            )
