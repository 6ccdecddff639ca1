"""The loader's error, in a file that a Python too old for the rest can import."""


class OverlayError(RuntimeError):
    """A layer and the installed wheel do not fit, or the loader was used wrongly.

    Not an ImportError: Megatron-LM takes those for a missing optional package, and carries on.
    """
