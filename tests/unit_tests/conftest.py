"""Fixtures of the unit tests: one rank of everything, and packs of sequences."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def single_thread():
    """The tests' tensors are small: several threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def single_rank():
    """Process groups of one rank and seeded RNG trackers, over gloo or, with a GPU, also NCCL.

    Per module rather than per test, as hypothesis asks of fixtures. Tests seed what they draw.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group(
        backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=torch.distributed.HashStore(),
        rank=0,
        world_size=1,
    )
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


class Pack:
    """Sequences in a row of tokens, each with padding behind it, and a padded tail.

    Attributes:
        spans: First token and length of each sequence.
        tokens: Tokens of the pack, padding included.
    """

    def __init__(self, lengths, padding=None, tail=0, device="cuda"):
        padding = padding or [0] * len(lengths)
        self.device = device
        self.real, self.padded = [0], [0]
        for length, pad in zip(lengths, padding):
            self.real.append(self.real[-1] + length)
            self.padded.append(self.padded[-1] + length + pad)
        self.spans = list(zip(self.padded, lengths))
        self.tokens = self.padded[-1] + tail

    def params(self):
        """The pack's PackedSeqParams; the padded offsets are set where they differ."""
        from megatron.core.packed_seq_params import PackedSeqParams

        real, padded = (
            torch.tensor(offsets, dtype=torch.int32, device=self.device)
            for offsets in (self.real, self.padded)
        )
        padded = None if self.padded == self.real else padded
        longest = max(end - start for start, end in zip(self.padded, self.padded[1:]))
        return PackedSeqParams(
            qkv_format='thd',
            cu_seqlens_q=real,
            cu_seqlens_kv=real,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )

    def is_padding(self):
        """Which tokens are padding: [tokens] bool."""
        mask = torch.ones(self.tokens, dtype=torch.bool, device=self.device)
        for start, length in self.spans:
            mask[start : start + length] = False
        return mask


@pytest.fixture(scope="session")
def pack():
    """The class Pack (a conftest cannot be imported from)."""
    return Pack
