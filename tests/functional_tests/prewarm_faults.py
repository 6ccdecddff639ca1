"""Faults that a case of ranks.py puts into pipeline prewarm, to see that tests notice and that ranks end."""


def put_in(fault: str, rank: int) -> None:
    """Puts ``fault`` into this process.

    ``leave out NAME``: that piece of state is not restored. ``raise on RANK in STEP``: that rank raises there.
    ``hook on RANK``: its first model chunk has a forward hook.
    """
    from megatron.core.pipeline_parallel import parallel_prewarm, prewarm_state

    words = fault.split()
    if words[:2] == ["leave", "out"]:
        del prewarm_state.PRESERVED[words[2]]
    elif words[:2] == ["raise", "on"]:
        if rank == int(words[2]):
            _raise_in(parallel_prewarm._Warmer, " ".join(words[4:]))
    elif words[:2] == ["hook", "on"]:
        if rank == int(words[2]):
            _hook_first(parallel_prewarm)
    else:
        raise ValueError(
            f"fault={fault!r}: expected 'leave out NAME', 'raise on RANK in STEP' or 'hook on RANK'"
        )


def _raise_in(warmer, name: str) -> None:
    step = warmer.step

    def raising(self, current, *args):
        if current != name:
            return step(self, current, *args)
        self.rendezvous.step(current)
        raise ArithmeticError("put in by a test")

    warmer.step = raising


def _hook_first(parallel_prewarm) -> None:
    prewarm = parallel_prewarm.prewarm

    def hooking(model, *args, **kwargs):
        model[0].register_forward_hook(lambda module, inputs, output: None)
        return prewarm(model, *args, **kwargs)

    parallel_prewarm.prewarm = hooking
