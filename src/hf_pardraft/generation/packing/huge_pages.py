"""Memory for packed weights in huge pages, which Linux gives to those who ask.

In pages of 4 KiB a core has to find out for each of them where its memory lies, and reads weights at 0.6 of the speed at which it
reads them in pages of 2 MiB. Most matrices are smaller than that: those of one shape, which are packed, and dropped, together,
share a piece of memory, which goes when the last of them goes.
"""

import math
import mmap
import threading
import weakref

import torch

PAGE = 2 << 20
# Of one piece of memory, unless a matrix needs more. Pages that nothing was written to cost nothing.
PIECE = 8 * PAGE
# Matrices begin at a cache line.
LINE = 64


class _Piece(mmap.mmap):
    """Private memory of at least `size` bytes from the first page's begin on. `used` counts from the memory's begin."""

    def __new__(cls, size: int) -> "_Piece":
        piece = super().__new__(cls, -1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        piece.madvise(mmap.MADV_HUGEPAGE)
        piece.used = -torch.frombuffer(piece, dtype=torch.uint8).data_ptr() % PAGE
        return piece


_lock = threading.Lock()
# By shape and dtype, which is being filled.
_pieces: weakref.WeakValueDictionary[tuple, _Piece] = weakref.WeakValueDictionary()


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """`torch.empty(shape, dtype=dtype)` on the CPU, in huge pages where there are any."""
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype, device="cpu")
    with _lock:
        piece = _pieces.get((shape, dtype))
        try:
            if piece is None or piece.used + size > len(piece):
                piece = _pieces[shape, dtype] = _Piece(max(size, PIECE))
        except (AttributeError, OSError):
            # Another system, or a kernel without them.
            return torch.empty(shape, dtype=dtype, device="cpu")
        begin = piece.used
        piece.used += size + -size % LINE
    return torch.frombuffer(piece, dtype=dtype, count=math.prod(shape), offset=begin).view(shape)
