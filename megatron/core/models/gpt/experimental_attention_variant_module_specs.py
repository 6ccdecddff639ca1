"""Layer of megatron/core/models/gpt/experimental_attention_variant_module_specs.py.

Same as upstream but for:
- _get_backend_spec_provider: takes transformer_impl="local", for DSA. Upstream's wants Transformer Engine.
- get_dsa_module_spec_for_backend: the local backend's down projections are column parallel, as those
  of upstream's local specs for multi-latent attention are, and its indexer norm takes float32 inputs.
"""

from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.upcasting_layer_norm import UpcastingLayerNorm
from megatron.overlay import upstream_of

upstream = upstream_of(__name__)


def get_dsa_module_spec_for_backend(
    config: TransformerConfig, backend: BackendSpecProvider = None
) -> ModuleSpec:
    """Spec of a self-attention layer with DeepSeek sparse attention."""
    spec = upstream.get_dsa_module_spec_for_backend(config=config, backend=backend)
    if isinstance(backend, LocalSpecProvider):
        # AbsorbedMLASelfAttention knows the modules it may be given here; the local backend's linear()
        # is none of them.
        spec.submodules.linear_q_down_proj = backend.column_parallel_linear()
        spec.submodules.linear_kv_down_proj = backend.column_parallel_linear()
        if config.dsa_indexer_k_norm_fp32:
            indexer = spec.submodules.core_attention.submodules.indexer
            indexer.submodules.k_norm = UpcastingLayerNorm
    return spec


def _get_backend_spec_provider(config: TransformerConfig) -> BackendSpecProvider:
    """Backend of the specs of experimental attention variants."""
    if config.transformer_impl != "local":
        return upstream._get_backend_spec_provider(config)
    if config.experimental_attention_variant != "dsa":
        raise ValueError(
            f"experimental_attention_variant is {config.experimental_attention_variant!r}, expected "
            "'dsa' with transformer_impl='local'. Use transformer_impl='transformer_engine'."
        )
    if config.use_kitchen:
        raise ValueError(
            "use_kitchen is True, expected False with experimental_attention_variant='dsa' and "
            "transformer_impl='local'."
        )
    return LocalSpecProvider()
