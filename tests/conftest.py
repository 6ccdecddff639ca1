import megatron.overlay

megatron.overlay.install(device="cpu")
