"""Arrays that travel together arrive as they were."""

import numpy as np
import torch

from mambalign.worker.host_copy import PART_BYTES, pack, send_together, unpack

ARRAYS = {
    "odd": np.arange(5, dtype=np.int32),
    "none": np.zeros(0, np.int64),
    "wide": np.array([1 << 40, -1, 3]),
    "table": np.arange(12, dtype=np.int32).reshape(3, 4),
    "no columns": np.zeros((3, 0), np.int32),
    "last": np.array([7], np.int64),
}


def assert_equal(parts: dict[str, torch.Tensor]) -> None:
    assert list(parts) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert np.array_equal(parts[name].cpu().numpy(), array) and parts[name].cpu().numpy().dtype == array.dtype


def test_parts_of_one_transfer() -> None:
    packed = torch.full((1024,), 255, dtype=torch.uint8)
    pack(ARRAYS, packed)
    parts = unpack(ARRAYS, packed.clone())
    assert_equal(parts)
    assert all(part.storage_offset() * part.element_size() % PART_BYTES == 0 for part in parts.values())
    assert (packed[128:] == 255).all()


def test_sent_together() -> None:
    assert_equal(send_together(ARRAYS, torch.device("cuda" if torch.cuda.is_available() else "cpu")))
