import json

import equinox as eqx
import numpy as np

from stacked_remat.training import PackedHeldOut, PackedStream, PackedTokens

PACKED = PackedTokens(np.arange(90, dtype=np.uint16), 8, 2, 0)


def test_a_stream_goes_on_where_its_state_says():
    stream = PackedStream(PACKED)
    batches = [stream.next() for _ in range(5)]
    assert all(eqx.tree_equal(batch, PACKED.batch(index)) for index, batch in enumerate(batches))
    other = PackedStream(PACKED)
    for _ in range(2):
        other.next()
    state = json.loads(json.dumps(other.get_state()))
    resumed = PackedStream(PACKED)
    resumed.set_state(state)
    assert [eqx.tree_equal(resumed.next(), batch) for batch in batches[2:]] == [True] * 3


def test_a_held_out_set_has_every_sequence_at_most_once():
    held_out = PackedHeldOut(PACKED)
    assert len(held_out) == 6  # 12 sequences
    first = [int(t) for i in range(6) for t in np.asarray(held_out.batch(i).tokens.array[:, 0])]
    assert sorted(first) == list(range(0, 90, 8))
