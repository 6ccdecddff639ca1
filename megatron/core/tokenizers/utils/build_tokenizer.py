"""Layer of megatron/core/tokenizers/utils/build_tokenizer.py.

Same as upstream but for:
- build_tokenizer: --tokenizer-type ByteLevelTokenizer builds the byte-level tokenizer that the wheel
  holds but that none of its tokenizer types reaches. Tokens are a text's UTF-8 bytes: no vocabulary
  file is needed.
"""

from megatron.overlay import upstream_of

upstream = upstream_of(__name__)

BYTE_LEVEL = 'ByteLevelTokenizer'
SUPPORTED_TOKENIZERS = [*upstream.SUPPORTED_TOKENIZERS, BYTE_LEVEL]


def build_tokenizer(args, **kwargs):
    """As upstream's, which knows no byte-level tokenizer.

    Its ids: 0 to 255 the bytes, 256 end of document, 257 padding, then --tokenizer-special-tokens.
    """
    if args.tokenizer_type != BYTE_LEVEL:
        return upstream.build_tokenizer(args, **kwargs)
    # The wheel numbers special tokens from the last one up; its default ids are bytes of texts too.
    special_tokens = [*reversed(args.special_tokens or []), '<|pad|>', '<|endoftext|>']
    tokenizer = MegatronTokenizer.from_pretrained(
        metadata_path={'library': 'byte-level'},
        special_tokens=special_tokens,
        vocab_size=256,
        _eos_id=256,
        _pad_id=257,
    )
    if args.pad_vocab_size:
        _set_padded_vocab_size(args, tokenizer)
    return tokenizer
