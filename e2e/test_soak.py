"""Half a minute of `soak.py`: the same bounds that an hour has to keep."""

from soak import soak


def test_half_a_minute_of_everything() -> None:
    result = soak(0.5)
    assert result["faults"] == []
    counts = result["counts"]
    assert min(counts[kind] for kind in ("whole", "stream", "leave", "choices", "as_json", "mistake")) >= 3
    assert counts["compared"] > 20 and counts["cached tokens"] > 0 and counts["preemptions"] > 0
