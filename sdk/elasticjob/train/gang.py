"""Exchange of bytes between the ranks of a round, over torch's process group."""

from __future__ import annotations

_CHUNK_BYTES = 1 << 30


class Gang:
    """Ranks of this round; one rank alone if no process group is initialized.

    Bytes travel over gloo, as tensors: nothing that is received is unpickled.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        self.rank, self.size = 0, 1
        self._group = None
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            if dist.get_backend() != "gloo":
                self._group = dist.new_group(backend="gloo")

    def gather(self, content: bytes) -> list[memoryview]:
        """Return the content of every rank, by rank."""
        import torch
        import torch.distributed as dist

        if self.size == 1:
            return [memoryview(bytearray(content))]
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(counts, torch.tensor([len(content)]), group=self._group)
        sizes = [int(count) for count in counts]
        largest = max(sizes)
        if not largest:
            return [memoryview(b"") for _ in range(self.size)]
        padded = torch.zeros(largest, dtype=torch.uint8)
        if content:
            padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        buffers = [bytearray(largest) for _ in range(self.size)]
        found = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers]
        dist.all_gather(found, padded, group=self._group)
        return [memoryview(each)[:size] for each, size in zip(buffers, sizes)]

    def broadcast(self, content: bytes, source: int) -> memoryview:
        """Return the content of rank `source`."""
        import torch
        import torch.distributed as dist

        size = torch.tensor([len(content)])
        dist.broadcast(size, source, group=self._group)
        buffer = bytearray(content if self.rank == source else int(size))
        whole = torch.frombuffer(buffer, dtype=torch.uint8)
        for first in range(0, len(buffer), _CHUNK_BYTES):
            dist.broadcast(whole[first : first + _CHUNK_BYTES], source, group=self._group)
        return memoryview(buffer)
