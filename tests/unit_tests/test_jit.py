"""The fuser on the CPU device."""

import torch

from megatron.core import jit
from megatron.core.fusions import fused_bias_swiglu


def test_fuser_is_off_on_the_cpu_device_and_stocks_where_it_is_not(monkeypatch):
    assert jit.jit_fuser is jit.noop_decorator
    monkeypatch.setattr(jit.cpu, "active", lambda: False)
    monkeypatch.setattr(jit, "jit_fuser", jit.noop_decorator)
    jit.enable_jit_fuser()
    assert jit.jit_fuser is torch.compile


def test_a_backend_can_be_asked_for_on_the_cpu_device(monkeypatch):
    monkeypatch.setattr(jit, "jit_fuser", jit.noop_decorator)
    monkeypatch.setenv("MEGATRON_OVERLAY_CPU_COMPILE", "aot_eager")
    jit.enable_jit_fuser()
    assert jit.jit_fuser.func is torch.compile
    assert jit.jit_fuser.keywords == {"backend": "aot_eager"}


def test_stock_modules_decorate_with_it():
    assert not hasattr(fused_bias_swiglu.swiglu, "_torchdynamo_orig_callable")
