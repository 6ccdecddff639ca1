"""Layer of megatron/training/arguments.py.

Same as upstream but for:
- add_megatron_arguments: adds the fork's own flags, and mends help texts of stock's that argparse
  cannot print: one bare percent sign is enough for --help to end in a ValueError.
- _add_tokenizer_args: --tokenizer-type takes ByteLevelTokenizer (see build_tokenizer.py) too.
- validate_args: on the CPU device, first turns off what needs a GPU; without one, and without that
  device, says what to do (see cpu_arguments.py). Checks the flags of pipeline_prewarm.py.
"""

from megatron.core.tokenizers.utils.build_tokenizer import BYTE_LEVEL
from megatron.overlay import cpu, upstream_of
from megatron.training import cpu_arguments, pipeline_prewarm

upstream = upstream_of(__name__)


def add_megatron_arguments(parser):
    """Adds Megatron-LM's arguments and the fork's to ``parser``."""
    parser = upstream.add_megatron_arguments(parser)
    cpu_arguments.add_arguments(parser)
    pipeline_prewarm.add_arguments(parser)
    for action in parser._actions:
        if action.help and "%" in action.help:
            try:
                action.help % {**vars(action), "prog": parser.prog}
            except (KeyError, TypeError, ValueError):
                action.help = action.help.replace("%", "%%")
    return parser


def validate_args(args, defaults={}):
    """As upstream's, with the CPU device's settings in place."""
    if cpu.active():
        cpu_arguments.adapt(args)
    else:
        cpu_arguments.require_gpu(args)
    pipeline_prewarm.validate(args)
    return upstream.validate_args(args, defaults)


def _add_tokenizer_args(parser):
    parser = upstream._add_tokenizer_args(parser)
    (action,) = (action for action in parser._actions if action.dest == "tokenizer_type")
    action.choices = (*action.choices, BYTE_LEVEL)
    return parser
