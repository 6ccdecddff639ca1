"""Layer of megatron/training/models/gpt.py.

Same as upstream but for:
- mtp_block_spec: multi-token prediction with an experimental attention variant (DSA), which upstream's
  refuses. The prediction layers are built like the last layer of the decoder, as without a variant.
"""

from typing import Optional

from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_layer_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.overlay import upstream_of

upstream = upstream_of(__name__)


def mtp_block_spec(
    config: "GPTModelConfig", transformer_layer_spec: ModuleSpec, vp_stage: Optional[int] = None
) -> Optional[ModuleSpec]:
    """Spec of the multi-token prediction layers of this pipeline stage, None if it has none."""
    transformer = config.transformer
    if transformer.mtp_num_layers is None or transformer.experimental_attention_variant is None:
        return upstream.mtp_block_spec(config, transformer_layer_spec, vp_stage)
    # The decoder's layers, all of them: those of this stage may be none.
    last_layer = get_transformer_layer_with_experimental_attention_variant_spec(transformer)[-1]
    return get_gpt_mtp_block_spec(
        transformer,
        last_layer,
        use_transformer_engine=transformer.transformer_impl == "transformer_engine",
        vp_stage=vp_stage,
    )
