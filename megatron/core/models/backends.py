"""Layer of megatron/core/models/backends.py.

Same as upstream but for:
- LocalSpecProvider.linear: which upstream's lacks, though the DSA specs ask a backend for it.
"""

from megatron.core.tensor_parallel.duplicated_linear import DuplicatedLinear
from megatron.overlay import upstream_of

upstream = upstream_of(__name__)


class LocalSpecProvider(upstream.LocalSpecProvider):
    """Modules of Megatron Core alone."""

    def linear(self) -> type:
        """Which linear module is used for a weight that is not split over ranks."""
        return DuplicatedLinear
