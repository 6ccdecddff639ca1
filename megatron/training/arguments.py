"""Layer of megatron/training/arguments.py.

Same as upstream but for:
- add_megatron_arguments: adds the fork's own flags.
- validate_args: on the CPU device, first turns off what needs a GPU (see cpu_arguments.py).
"""

from megatron.overlay import cpu, upstream_of
from megatron.training import cpu_arguments

upstream = upstream_of(__name__)


def add_megatron_arguments(parser):
    """Adds Megatron-LM's arguments and the fork's to ``parser``."""
    parser = upstream.add_megatron_arguments(parser)
    cpu_arguments.add_arguments(parser)
    return parser


def validate_args(args, defaults={}):
    """As upstream's, with the CPU device's settings in place."""
    if cpu.active():
        cpu_arguments.adapt(args)
    return upstream.validate_args(args, defaults)
